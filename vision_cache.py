"""
What the frozen vision tower makes of each video, kept on disk: the tower runs once per video, and
later epochs and evaluations neither decode nor look (train.py's and eval.py's `cache_vision`).

    worker: look(path) -> Video with rows, from disk, or with frames, decoded
    model.collate      -> pixel inputs of the latter, 'features' of the former, 'cache': who is who
    main process: fill -> the tower on each missing video, written; then features [n, W] of all

A row is what the trained projector reads for one LLM token, in the dtype of the frozen weights: on
disk is exactly what the projector gets. The tower takes video by video, so that a row depends on
nothing else of its batch, and it does not matter which process made it, in which step.
Shapes: B items, n LLM tokens of all videos, W the width of the projector's input.
"""
import hashlib
import json
import os
import sys
import time
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save
from transformers.utils import cached_file

from checkpoint import fingerprint

FORMAT = 1  # of the files; another one is another folder
STALE = 3600  # seconds after which a temporary file is what a kill left


@dataclass
class Video:
    """What stands for a sample's frames when there is a cache."""
    key: str | None       # file name in the cache; None: not to be written
    frames: Any = None    # uint8 [T, H, W, 3], or of a video that the cache has:
    rows: Any = None      # [n, W]
    inputs: Any = None    # the family's inputs beside pixels, such as the grid, [1, ...] each
    vision: Any = None    # what the prompt says of the video, see Backbone.pixels


def attach(model, cfg):
    """The cache of a model by the settings of a run, or None; made once for each model."""
    folder = getattr(cfg, 'cache_vision', '')
    if not folder:
        return None
    backbone = model.backbone
    if getattr(backbone, 'tower', None) is None:
        raise ValueError(f"cache_vision: {type(model).__name__} with {backbone.path!r} has no "
                         "frozen vision tower whose output stays the same (PHA-Net trains its "
                         "CLIP); leave it empty, frame_cache keeps decoded frames")
    if backbone.cache is None:
        backbone.cache = VisionCache(folder, backbone, getattr(cfg, 'max_pixels', 0))
    return backbone.cache


def fill(model, inputs):
    """The inputs of model.collate as its encoders want them: with features of all videos."""
    return model.backbone.cache.fill(inputs) if 'cache' in inputs else inputs


def fill_batch(model, batch):
    return {side: fill(model, inputs) for side, inputs in batch.items()}


class VisionCache:
    def __init__(self, folder, backbone, max_pixels=0):
        self.backbone, self.pixels_of = backbone, backbone.pixels
        self.dtype, self.off = backbone.embed.weight.dtype, False
        backbone.pixels = self.pixels
        # a folder for each tower and preprocessing: what was made by another one is never found
        same = repr((FORMAT, fingerprint(backbone.model), max_pixels, str(self.dtype),
                     self.preprocessing())).encode()
        self.folder = os.path.join(
            folder, f'{backbone.family}-{hashlib.sha256(same).hexdigest()[:16]}')
        if os.path.exists(folder) and not os.path.isdir(folder):
            raise ValueError(f"cache_vision {folder} is a file; name a folder")
        try:
            os.makedirs(self.folder, exist_ok=True)
            for name in os.listdir(self.folder):
                path = os.path.join(self.folder, name)
                if name.endswith('.tmp') and time.time() - os.path.getmtime(path) > STALE:
                    os.remove(path)
        except OSError as e:  # others may be writing there, or nothing can be written at all
            self.warn(e)

    def preprocessing(self):
        """What makes pixels out of frames: the checkpoint's files, and what noise becomes."""
        files = []
        for name in ('preprocessor_config.json', 'video_preprocessor_config.json',
                     'processor_config.json'):
            path = cached_file(self.backbone.path, name,
                               _raise_exceptions_for_missing_entries=False)
            if path is not None:
                with open(path, 'rb') as f:
                    files.append(hashlib.sha256(f.read()).hexdigest())
        dice = np.random.default_rng(0)  # the files don't know this code, nor the library's version
        for shape in ((5, 70, 45, 3), (1, 33, 64, 3)):
            inputs, vision = self.pixels_of([dice.integers(0, 256, shape, dtype=np.uint8)])
            # rounded: what one processor computes in other last bits than another is the same
            files += [json.dumps(vision), *(hashlib.sha256(
                (x.double() * 100).round().long().numpy().tobytes()).hexdigest()
                for _, x in sorted(inputs.items()))]
        return files

    # ---------------------------------------------------------------- in the loader's worker

    def look(self, path, how, decode):
        """-> (Video, partial) of a file; decode(path) -> (frames, partial). how: the frames'."""
        key = self.key(path, how)
        video = self.read(key) if key else None
        if video is not None:
            return video, None
        frames, partial = decode(path)
        # a partial file is not kept, so that it is named in every run
        return Video(None if partial else key, frames), partial

    def key(self, path, how):
        try:
            st = os.stat(path)
        except OSError:  # the reader will tell
            return None
        same = repr((os.path.abspath(path), st.st_size, st.st_mtime_ns, how))
        return hashlib.sha1(same.encode()).hexdigest() + '.safetensors'

    def read(self, key):
        """A Video, or None where there is none or its file is not whole: it is made again."""
        try:
            with open(os.path.join(self.folder, key), 'rb') as f:
                data = f.read()
            start = 8 + int.from_bytes(data[:8], 'little')
            crc, vision = json.loads(json.loads(data[8:start])['__metadata__']['said'])
            if crc != zlib.crc32(data[start:], zlib.crc32(vision.encode())):
                return None
            tensors = load(data)
            return Video(key, None, tensors.pop('rows'), tensors, json.loads(vision))
        except Exception:  # json's, safetensors', the system's: no base class in common
            return None

    def pixels(self, frames, times=None):
        """Backbone.pixels of Videos; plain frames are what they always were."""
        if not any(isinstance(f, Video) for f in frames):
            return self.pixels_of(frames, times) if times else self.pixels_of(frames)
        parts, visions, rows, who = [], [], [], []
        for i, v in enumerate(frames):
            if v.rows is not None:
                inputs, vision = v.inputs, v.vision
                rows.append(v.rows)
                who.append(None)
            else:
                more = ([times[i]],) if times else ()
                inputs, (vision,) = self.pixels_of([v.frames], *more)
                who.append((v.key, json.dumps(vision, default=float)))
            parts.append(inputs)
            visions.append(vision)
        keys = list(dict.fromkeys(key for part in parts for key in part))
        inputs = {key: torch.cat([part[key] for part in parts if key in part]) for key in keys}
        if rows:
            inputs['features'] = torch.cat(rows)                               # [n of these, W]
        return {**inputs, 'cache': who}, visions

    # ---------------------------------------------------------------- in the main process

    @torch.no_grad()
    def fill(self, inputs):
        """Inputs with features of all videos [n, W] and without pixels; new ones are written."""
        who = inputs['cache']
        is_pixels = {key: key.startswith('pixel_values') for key in inputs}
        rest = {k: x for k, x in inputs.items() if k not in ('cache', 'features')
                and not is_pixels[k]}
        tokens = (rest['mm_token_type_ids'] == 2).sum(1).tolist()              # of each of B videos
        new = [i for i, w in enumerate(who) if w is not None]
        have = iter(inputs['features'].split([t for t, w in zip(tokens, who) if w is None])
                    if 'features' in inputs else ())
        # the pixels are those of the new ones alone, so the rest must be, too
        missing = {k: x for k, x in inputs.items() if is_pixels[k]}
        if new:
            missing |= self.backbone.select(rest, torch.tensor(new))
        rows, place = [], 0
        for i, w in enumerate(who):
            if w is None:
                rows.append(next(have))
                continue
            one = self.backbone.select(missing, torch.tensor([place]))
            place += 1
            rows.append(self.backbone.features(one).to(self.dtype))            # [tokens[i], W]
            if len(rows[-1]) != tokens[i]:
                raise ValueError(f"the tower of {self.backbone.path!r} gives {len(rows[-1])} rows "
                                 f"for a video that has {tokens[i]} tokens in the prompt")
            if w[0]:
                beside = {k: x for k, x in one.items() if k in self.beside(rest)}
                self.write(*w, rows[-1], beside)
        rest['features'] = torch.cat(rows)
        return rest

    def beside(self, inputs):
        """The names of what `pixels` says of a video beside its pixels."""
        return inputs.keys() - {'input_ids', 'attention_mask', 'mm_token_type_ids', 'position_ids',
                                'append_pos', 'cut', 'labels'}

    def write(self, key, vision, rows, inputs):
        """One file, whole or absent. What is not finite is nobody's to keep."""
        if self.off or not rows.isfinite().all():
            return
        path = os.path.join(self.folder, key)
        temporary = f'{path}.{os.getpid()}.tmp'
        tensors = {k: x.contiguous().cpu() for k, x in {**inputs, 'rows': rows}.items()}
        data = save(tensors)
        crc = zlib.crc32(data[8 + int.from_bytes(data[:8], 'little'):], zlib.crc32(vision.encode()))
        try:
            with open(temporary, 'wb') as f:
                f.write(save(tensors, {'said': json.dumps([crc, vision])}))
            os.replace(temporary, path)
        except OSError as e:
            self.warn(e)
            try:
                os.remove(temporary)  # half a file keeps a full disk full
            except OSError:
                pass

    def warn(self, e):
        self.off = True
        print(f"warning: can't write into cache_vision {self.folder}: {e.strerror or e}; the run "
              "goes on and writes no more of it", file=sys.stderr, flush=True)
