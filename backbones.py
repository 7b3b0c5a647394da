"""
The MLLM zoo: how each family turns (frames, prompt) into decoder inputs. MARS and SLQ read hidden
states, so all they need is one small handle per family, `Backbone`: where things live, and inputs.
PHA-Net needs two towers instead, `DualEncoder`.

    frames uint8 [T, H, W, 3] --family's resize, patches--> pixel inputs     (in loader workers)
    "<video>\nSummarize ..." or "{caption}\n..." --chat template, tokens--> input_ids [B, L]
    + n_append placeholder tokens at the very end, whose embeddings the method swaps for its own

A new family is one function at the end of this file and one line in FAMILIES.
Not here on purpose: generation, remote code (never executed), anything a method decides.
Shapes: B items, L tokens, T frames, D hidden width, N decoder layers, P patches of all videos.
"""
import json
import math
import os
import re
from dataclasses import dataclass, replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any, Callable

import torch
import torch.nn.functional as F
import transformers
from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from transformers.image_processing_base import ImageProcessingMixin
from transformers.utils import cached_file, is_flash_attn_2_available
from transformers.vision_utils import get_vision_window_index

# what a folder has to hold; *: all there are, some checkpoints come in parts with an index
FILES = ('config.json', '*.safetensors*', 'tokenizer*.json', '*preprocessor_config.json')
LLM_LINEARS = r'self_attn\.(q|k|v|o)_proj|mlp\.(gate|up|down)_proj' # the seven of MARS, App. B


@dataclass
class Backbone:
    """A frozen MLLM and what a retrieval method must know of it. Made by `load`."""
    family: str
    path: str
    model: Any            # transformers ...ForConditionalGeneration, requires_grad False, eval mode
    decoder: Any          # the module that maps inputs to hidden states (everything but lm_head)
    tokenizer: Any
    layers: Any           # ModuleList of the N decoder layers
    norm: Any             # the decoder's final norm
    embed: Any            # the input embedding
    lora_regex: str       # full match on names in `model`: 7 LLM linears per layer + the projector
    chat: str             # chat template, one {} for the user's message, ends where answers begin
    # B arrays uint8 [T, H, W, 3] -> ({what run() wants of pixels}, [what `vision` wants of each
    # video]: its number of LLM tokens, or a list with a number per frame). Families that write
    # times into the prompt take B lists of T seconds as well; without, frames are a second apart
    pixels: Callable
    vision: Callable      # what pixels() says of a video -> the string for it in a prompt
    vision_token: str     # the token of that string that vision features will replace
    # {input_ids, attention_mask, mm_token_type_ids [B, L], pixel inputs} -> position_ids, [B, L] or
    # [3, B, L]; padding counts nothing, appended tokens continue the text
    positions: Callable
    pixel_rows: Callable  # pixel inputs -> [B], how many rows of 'pixel_values...' each video has
    end: str = '<|im_end|>'  # what closes an answer
    # the frozen tower and the projector apart, for a cache between them, see features()
    tower: Callable = None    # pixel inputs -> [n, W], a row for each LLM token of all videos
    project: Callable = None  # [n, W] -> what `decoder` takes as mm_encoder_outputs
    token_types: bool = False  # does `decoder` have to be told mm_token_type_ids?
    cache: Any = None     # vision_cache.py's, which then stands before `pixels`

    @property
    def hidden_size(self):
        return self.embed.weight.shape[1]

    @property
    def num_layers(self):
        return len(self.layers)

    def run(self, inputs, **kw):
        """Last hidden state [B, L, D], after the final norm; no lm_head, no KV cache. 'features'
        among the inputs stand for pixels, and the tower does not run."""
        ours = ('append_pos', 'cut', 'labels', 'features',
                *['mm_token_type_ids'] * (not self.token_types))
        known = {k: v for k, v in inputs.items() if k not in ours}
        if 'features' in inputs:
            known = {k: v for k, v in known.items() if not k.startswith(('pixel_values', 'video_'))}
            known['mm_encoder_outputs'] = self.project(inputs['features'])
        return self.decoder(**known, use_cache=False, **kw).last_hidden_state

    @torch.no_grad()
    def features(self, inputs):
        """
        What the frozen tower makes of the pixels, up to the projector, which LoRA may train: [n, W]
        for the n LLM tokens of all videos, W as wide as the projector's input. (Qwen3-VL's rows
        also hold what deepstack adds after the first layers, and its mergers are never trained.)
        """
        return self.tower(inputs)

    def cost(self, num_frames, height=360, width=640):
        """One line: the LLM tokens of a video, markers and times between its frames included."""
        dice = torch.Generator().manual_seed(0)  # noise: no frame looks like the one before it
        frames = torch.randint(256, (num_frames, height, width, 3), generator=dice).byte().numpy()
        n = len(self.ids(self.vision(self.pixels([frames])[1][0])))
        return (f"{self.family}: {num_frames} frame{'s' * (num_frames > 1)} of {width}x{height} -> "
                f"{n:,} LLM tokens a video")

    def select(self, inputs, rows):
        """The inputs of some items, rows [b]; what follows from their lengths stays as it is."""
        out = {}
        for key, x in inputs.items():
            # [rows of all videos, ...]; rows of LLM tokens are so many, or a part of it, for each
            if key.startswith('pixel_values') or key in ('features', 'video_compression_mask'):
                size = self.pixel_rows(inputs) if key.startswith('pixel_values') else \
                    (inputs['mm_token_type_ids'] == 2).sum(1)
                if key == 'video_compression_mask':  # the tokens before some are dropped
                    size = inputs['video_grid_thw'].prod(1) // inputs['video_merge_sizes'] ** 2
                parts = x.split(size.tolist())
                out[key] = torch.cat([parts[i] for i in rows.tolist()])
            else:                                              # [B, ...], positions [3, B, L] too
                out[key] = x[:, rows] if key == 'position_ids' and x.dim() == 3 else x[rows]
        return out

    def ids(self, text):
        """Token ids of our own template text, special tokens recognised."""
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def plain_ids(self, text):
        """Token ids of a user's text: a caption that spells '<|im_end|>' is just text."""
        return self.tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids

    @cached_property
    def vision_ids(self):
        """Ids of the special tokens in the text that stands for a video."""
        with torch.device('cpu'):  # where the model is built on no device at all, too
            frame = torch.zeros(1, 32, 32, 3, dtype=torch.uint8).numpy()
            text = self.vision(self.pixels([frame])[1][0])
        return set(self.ids(text)) & set(self.tokenizer.get_added_vocab().values())

    def check_prompt(self, prompt):
        """ValueError when a prompt spells a token that only a video's own place may hold."""
        own = self.vision_ids
        for part in re.split(r'<video>|\{caption\}', prompt):
            for i in self.ids(part) if part else ():
                if i in own:
                    raise ValueError(f"prompt {prompt!r} spells {self.tokenizer.decode([i])!r}, a "
                                     "token of the backbone's own; write <video> for a video")

    def collate(self, prompt, captions=None, frames=None, answers=None, n_append=0,
                max_text_tokens=1024, padding_side='right', times=None):
        """
        Decoder inputs for B items that share one prompt, on the CPU.

        prompt    message with '<video>' and/or '{caption}' where the item's own content goes
        captions  B strings or None, cut to `max_text_tokens` tokens *before* the template goes
                  around them, so a long caption never loses the end of the prompt
        frames    B arrays uint8 [T, H, W, 3] or None; an image is a video of one frame
        answers   B strings that follow the assistant header, then `end` (captioning loss)
        n_append  number of placeholder tokens at the end
        times     B lists of each frame's time in seconds, or None

        Returns input_ids, attention_mask, mm_token_type_ids [B, L], position_ids, pixel inputs,
        append_pos [B, n_append]: where the placeholders stand, cut [B]: the caption was cut, and
        with answers labels [B, L].
        """
        self.check_prompt(prompt)
        pixel_inputs, n_vision = {}, None
        if frames is not None:
            pixel_inputs, n_vision = self.pixels(frames, times) if times else self.pixels(frames)
        B = len(captions if captions is not None else frames)
        rows, n_prompt, cut = [], [], []
        for i in range(B):
            row, was_cut, text = [], False, self.chat.format(prompt)
            if '<video>' in prompt:
                assert n_vision is not None, f"prompt {prompt!r} wants a video, there is none"
                text = text.replace('<video>', self.vision(n_vision[i]))
            # our text and the user's are tokenised apart: neither changes how the other one is read
            for part in re.split(r'(\{caption\})', text):
                if part == '{caption}':
                    tokens = self.plain_ids(captions[i].strip())
                    row, was_cut = row + tokens[:max_text_tokens], len(tokens) > max_text_tokens
                elif part:
                    row += self.ids(part)
            n_prompt.append(len(row))
            if answers is not None:
                row += self.plain_ids(answers[i]) + self.ids(self.end)
            rows.append(row + [self.tokenizer.eos_token_id] * n_append)
            cut.append(was_cut)

        L = max(len(row) for row in rows)
        pad_id = self.tokenizer.pad_token_id
        input_ids = torch.full((B, L), pad_id)                                 # [B, L]
        attention_mask = torch.zeros(B, L, dtype=torch.long)                   # [B, L]
        start = [L - len(row) if padding_side == 'left' else 0 for row in rows]
        for i, row in enumerate(rows):
            input_ids[i, start[i]:start[i] + len(row)] = torch.tensor(row)
            attention_mask[i, start[i]:start[i] + len(row)] = 1
        inputs = {'input_ids': input_ids, 'attention_mask': attention_mask, **pixel_inputs}
        is_vision = input_ids == self.tokenizer.convert_tokens_to_ids(self.vision_token)
        is_vision &= attention_mask.bool()
        inputs['mm_token_type_ids'] = 2 * is_vision.int()      # [B, L], 0 text, 2 video
        inputs['position_ids'] = self.positions(inputs)
        end = torch.tensor([s + len(row) for s, row in zip(start, rows)])  # [B], one past the last
        inputs['append_pos'] = end[:, None] - n_append + torch.arange(n_append)  # [B, n_append]
        inputs['cut'] = torch.tensor(cut)
        if answers is not None:
            first = torch.tensor([s + n for s, n in zip(start, n_prompt)])[:, None]
            at = torch.arange(L)[None]
            keep = (at >= first) & (at < end[:, None] - n_append)
            inputs['labels'] = input_ids.masked_fill(~keep, -100)              # [B, L]
        return inputs

    def collate_samples(self, samples, prompt, **how):
        """
        `collate` of samples (id, caption, frames): of what the prompt names, <video>, {caption} or
        both, every sample must have it. ValueError names the sample that is at fault.
        """
        used = {'captions': 'caption'} if '{caption}' in prompt else {}
        used |= {'frames': 'frames'} if '<video>' in prompt else {}
        if not used:
            raise ValueError(f"prompt {prompt!r} holds neither <video> nor {{caption}}")
        for key in used.values():
            missing = [s.id for s in samples if getattr(s, key) is None]
            if missing:
                raise ValueError(f"{len(missing)} of {len(samples)} samples have no {key}, the "
                                 f"first is {missing[0]!r}; a batch has it for all or none")

        def collate(samples):
            content = {key: [getattr(s, k) for s in samples] for key, k in used.items()}
            return self.collate(prompt, **content, **how)
        try:
            return collate(samples)
        except ValueError:
            for s in samples:  # whose fault is it?
                try:
                    collate([s])
                except ValueError as e:
                    raise ValueError(f"{s.id}: {e}") from None
            raise


@dataclass
class DualEncoder:
    """A CLIP: two towers and a projection each. Made by `load`; PHA-Net trains it."""
    family: str
    path: str
    model: Any            # transformers CLIPModel
    tokenizer: Any        # with bos and eos, the start and end of every text
    pixels: Callable      # frames uint8 [T, H, W, 3] -> uint8 [T, 3, S, S]: resized, center cut
    mean: tuple           # of the pixels / 255, and
    std: tuple            # their standard deviation: not applied by pixels()


def load(path, max_pixels=0, dtype=None):
    """
    A Backbone or a DualEncoder, from a hub id or a folder in the layout of `save_pretrained`.

    max_pixels  most pixels per frame, which sets a video's LLM tokens; 0: the checkpoint's limit
    dtype       torch dtype of the frozen weights; default bfloat16 on a GPU, float32 on a CPU
    Raises FileNotFoundError when nothing is there, ValueError for a family we do not have and for a
    checkpoint of which anything is missing: no weight is ever left as initialised.
    """
    if dtype is None:
        dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    if not path:
        raise FileNotFoundError("backbone is empty; set it to a folder as save_pretrained writes "
                                "it, or to a hub id")
    if not os.path.isdir(path):
        ask_hub(path)
    config, _ = transformers.PretrainedConfig.get_config_dict(path)
    if not config:
        raise FileNotFoundError(f"backbone {path!r}: the folder holds no config.json; give a "
                                "folder as save_pretrained writes it, or a hub id")
    family = config.get('model_type')
    if family not in FAMILIES:
        raise ValueError(f"backbone {path!r} is of family {family!r}, which is not supported yet; "
                         f"backbones.py has {', '.join(FAMILIES)}")
    # CLIP's towers are short, and PHA-Net's tests want the same bits everywhere
    attention = 'sdpa' if family == 'clip' else attention_for(dtype)
    backbone = FAMILIES[family](path, max_pixels, dtype=dtype, attn_implementation=attention)
    backbone.model.requires_grad_(False).eval()
    return backbone


def attention_for(dtype):
    """FlashAttention where it is installed and can run (16 bits, a GPU), else torch's own."""
    flash = dtype != torch.float32 and torch.cuda.is_available() and is_flash_attn_2_available()
    return 'flash_attention_2' if flash else 'sdpa'


def ask_hub(path):
    """FileNotFoundError unless the hub, or its cache here, has a model of that id. One request:
    transformers itself would try again and again for half a minute."""
    try:
        if not isinstance(try_to_load_from_cache(path, 'config.json'), str):
            get_hf_file_metadata(hf_hub_url(path, 'config.json'), timeout=5)
    except Exception as e:  # no network, no such model, no rights: these share no base class
        reason = (str(e).strip() or type(e).__name__).splitlines()[0]
        why = "no hub id either" if isinstance(e, HFValidationError) else \
            f"it can't be fetched from the hub ({reason})"
        raise FileNotFoundError(
            f"backbone {path!r}: no such folder, and {why}; give a folder as save_pretrained "
            "writes it, or a hub id while online. For a machine without network, put "
            f"{', '.join(FILES)} of the hub's page into a folder and say --backbone=FOLDER, or "
            f"where there is one: hf download {path} --local-dir FOLDER") from None


def read_parts(path, model_class, preprocessor_keys, **kw):
    """
    (model, tokenizer, what preprocessor_config.json holds) of a checkpoint; ValueError when a part
    is missing, unreadable or another model's. transformers itself makes up what is missing: random
    weights, a tokenizer of two tokens.
    """
    def part(what, read):
        try:
            return read()
        except Exception as e:  # of json, safetensors, tokenizers, the hub: no base class in common
            reason = (str(e).strip() or type(e).__name__).splitlines()[0].split('. ')[0].strip(': ')
            raise ValueError(f"backbone {path!r}: can't read its {what} ({type(e).__name__}: "
                             f"{reason}); save or download it again") from e

    pre = {}
    if preprocessor_keys:  # a family that wants none of it may not have the file
        pre, _ = part('preprocessor_config.json',
                      lambda: ImageProcessingMixin.get_image_processor_dict(path))
        pre['video'] = {**pre, **part('video_preprocessor_config.json',
                                      lambda: video_settings(path))}
    lacks = [key for key in preprocessor_keys if key not in pre]
    if lacks:
        raise ValueError(f"backbone {path!r}: its preprocessor_config.json has no {lacks[0]!r}; "
                         "take the file of the original checkpoint")
    # a config that we made spares the folder's own, which may name code to run
    tokenizer = part('tokenizer.json', lambda: transformers.AutoTokenizer.from_pretrained(
        path, config=kw.get('config'), trust_remote_code=False))
    model, info = part('weights', lambda: model_class.from_pretrained(
        path, output_loading_info=True, ignore_mismatched_sizes=True, **kw))
    reshaped = [name for name, *_ in info['mismatched_keys']]
    wrong = [f"{len(names)} tensors are {what}, first {', '.join(sorted(names)[:6])}"
             for what, names in
             (('missing', info['missing_keys']),
              ('of another shape than config.json says', reshaped)) if names]
    if wrong:
        raise ValueError(f"backbone {path!r}: in its weights {'; '.join(wrong)}; they would be "
                         "random, so save or download the checkpoint again")
    # a few rows of the embedding may be spare (Qwen2-VL: 151657 of 151936 are used), not most; and
    # a few tokens may have no row, such as words that a processor replaces
    n, rows = len(tokenizer), model.config.get_text_config().vocab_size
    if not rows / 2 <= n <= rows + 16:
        raise ValueError(f"backbone {path!r}: its tokenizer knows {n} tokens, its config.json says "
                         f"{rows}; tokenizer.json (or vocab.json and merges.txt) is missing or of "
                         "another model")
    return model, tokenizer, pre


def video_settings(path):
    """What the files of a checkpoint say of videos alone; {} where they treat videos as images."""
    for name, key in (('processor_config.json', 'video_processor'),
                      ('video_preprocessor_config.json', None)):
        file = cached_file(path, name, _raise_exceptions_for_missing_entries=False,
                           _raise_exceptions_for_connection_errors=False)
        if file is not None:
            with open(file, encoding='utf-8') as f:
                settings = json.load(f)
            settings = settings.get(key) if key else settings
            if settings:
                return settings
    return {}


# -----------------------------------------------------------------------------
# frames -> pixels, shared by the families

def fit_size(height, width, factor, min_pixels, max_pixels, T=1, counted=1):
    """
    The size a frame is resized to: both sides multiples of `factor`, the area between min_pixels
    and max_pixels, the aspect ratio as near as that allows (the rule of Qwen2-VL's processor).
    For Qwen3-VL's the two bound T frames together, of which `counted` count.
    """
    if max(height, width) > 200 * min(height, width):
        raise ValueError(f"a frame of {width}x{height} is too thin: the longer side may be at most "
                         "200 times the other")
    h, w = (round(side / factor) * factor for side in (height, width))
    if counted * h * w > max_pixels:
        shrink = math.sqrt(T * height * width / max_pixels)
        h, w = (max(factor, math.floor(s / shrink / factor) * factor) for s in (height, width))
    elif counted * h * w < min_pixels:
        grow = math.sqrt(min_pixels / (T * height * width))
        h, w = (math.ceil(side * grow / factor) * factor for side in (height, width))
    return h, w


def square_side(side, max_pixels, unit):
    """The side of square frames: the checkpoint's, or what max_pixels allows in whole tokens."""
    if not 0 < max_pixels < side * side:
        return side
    return max(unit, math.isqrt(max_pixels) // unit * unit)


def resize(frames, h, w, mode='bicubic'):
    """uint8 [T, H, W, 3] -> uint8 [T, 3, h, w]; rounded to uint8 in between, as processors do."""
    x = torch.from_numpy(frames).permute(0, 3, 1, 2)                           # [T, 3, H, W]
    return x if tuple(x.shape[-2:]) == (h, w) else F.interpolate(x, (h, w), mode=mode,
                                                                 antialias=True)


def normalize(x, mean, std):
    """uint8 [T, 3, h, w] -> float, mean and std being those of x / 255."""
    mean, std = (255 * torch.tensor(m).view(1, 3, 1, 1) for m in (mean, std))
    return (x.float() - mean) / std


def patches(frames, h, w, patch, merge, tubelet, mean, std):
    """
    frames uint8 [T, H, W, 3] -> float patches [P, 3 * tubelet * patch^2] and grid (t, h, w).

    Order of rows: time, then blocks of merge x merge patches (a block becomes one LLM token), then
    inside a block. T is padded to a multiple of `tubelet` by repeating the last frame.
    """
    x = normalize(resize(frames, h, w), mean, std)                             # [T, 3, h, w]
    if len(x) % tubelet:
        x = torch.cat([x, x[-1:].expand(-len(x) % tubelet, -1, -1, -1)])
    t, gh, gw = len(x) // tubelet, h // patch, w // patch
    x = x.view(t, tubelet, 3, gh // merge, merge, patch, gw // merge, merge, patch)
    x = x.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)       # [t, gh/m, gw/m, m, m, 3, tubelet, patch, patch]
    return x.reshape(t * gh * gw, 3 * tubelet * patch * patch), (t, gh, gw)


def seconds(frames, times):
    """B lists of T seconds; frames of unknown time are taken to be a second apart."""
    return times or [list(range(len(f))) for f in frames]


def running_positions(inputs):                                                 # -> [B, L]
    return (inputs['attention_mask'].cumsum(1) - 1).clamp(min=0)


# -----------------------------------------------------------------------------
# the families

def qwen2_vl(path, max_pixels, model_class=transformers.Qwen2VLForConditionalGeneration, **kw):
    """Qwen2-VL 2B, 7B: native-resolution ViT, 2 frames per temporal patch, 2x2 merge, M-RoPE."""
    model, tokenizer, pre = read_parts(
        path, model_class,
        ('patch_size', 'merge_size', 'temporal_patch_size', 'image_mean', 'image_std'), **kw)
    size = pre.get('size') or {}
    lo = size.get('shortest_edge') or pre.get('min_pixels') or 56 * 56
    hi = size.get('longest_edge') or pre.get('max_pixels') or 28 * 28 * 1280
    # the checkpoint's limit is meant for single images (12.8 M pixels); its makers' video recipe
    # stops a frame at 768 tokens' worth of pixels
    hi = max_pixels or min(hi, 768 * 28 * 28)
    lo = min(lo, hi)
    patch, merge, tubelet = pre['patch_size'], pre['merge_size'], pre['temporal_patch_size']
    visual = model.model.visual

    def pixels(frames, times=None):  # the prompt says nothing of time
        sizes = [fit_size(*f.shape[1:3], patch * merge, lo, hi) for f in frames]
        rows, grids = zip(*[patches(f, *size, patch, merge, tubelet, pre['image_mean'],
                                    pre['image_std']) for f, size in zip(frames, sizes)])
        grid = torch.tensor(grids)                                             # [B, 3]
        n_tokens = (grid.prod(1) // merge ** 2).tolist()
        return {'pixel_values_videos': torch.cat(rows), 'video_grid_thw': grid}, n_tokens

    def positions(inputs):                                                     # M-RoPE -> [3, B, L]
        # always made here: the model's own fallback counts padding as positions
        return model.model.get_rope_index(
            inputs['input_ids'], inputs['mm_token_type_ids'],
            video_grid_thw=inputs.get('video_grid_thw'), attention_mask=inputs['attention_mask'])[0]

    def tower(inputs):
        x = visual(inputs['pixel_values_videos'].type(visual.dtype),
                   grid_thw=inputs['video_grid_thw']).last_hidden_state        # [P, Dv]
        return x.view(len(x) // merge ** 2, -1)

    def project(x):
        x = visual.merger(x.type(visual.dtype).view(len(x) * merge ** 2, -1))  # [n, D]
        return {'video': SimpleNamespace(pooler_output=(x,))}

    return Backbone(
        family='qwen2_vl', path=path, model=model, decoder=model.model, tokenizer=tokenizer,
        layers=model.model.language_model.layers, norm=model.model.language_model.norm,
        embed=model.model.get_input_embeddings(),
        lora_regex=(rf'model\.language_model\.layers\.\d+\.({LLM_LINEARS})'
                    r'|model\.visual\.merger\.mlp\.(0|2)'),
        chat=('<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n'
              '<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n'),
        vision=lambda n: '<|vision_start|>' + '<|video_pad|>' * n + '<|vision_end|>',
        vision_token='<|video_pad|>', pixels=pixels, positions=positions,
        pixel_rows=lambda inputs: inputs['video_grid_thw'].prod(1), tower=tower, project=project)


def videochat_flash(path, max_pixels, **kw):
    """VideoChat-Flash-Qwen2-7B, res448, res224: clips of 4 frames, 64 tokens each; an image too."""
    from videochat_flash import TOKENS, VideoChatFlash, clip_lengths, square_frames
    model, tokenizer, _ = read_parts(path, VideoChatFlash, (), **kw)
    size = model.config.vision_sizes()['image_size']
    if 0 < max_pixels < size * size:
        raise ValueError(f"backbone {path!r}: its frames are always {size} x {size} pixels; "
                         f"set max_pixels=0, got {max_pixels}")
    # the checkpoint's own placeholder is no token; any id will do, its embedding is never seen
    tokenizer.add_tokens(['<|video_pad|>'], special_tokens=True)

    def pixels(frames):
        clips = [square_frames(f, size) for f in frames]                       # [T, 3, S, S] each
        num_frames = [len(c) for c in clips]
        n_tokens = [TOKENS * len(clip_lengths([n])) for n in num_frames]
        return {'pixel_values': torch.cat(clips), 'num_frames': torch.tensor(num_frames)}, n_tokens

    def tower(inputs):
        return model.vision_features(inputs['pixel_values'], inputs['num_frames']).flatten(0, 1)

    return Backbone(
        family='videochat_flash', path=path, model=model, decoder=model.model, tokenizer=tokenizer,
        layers=model.model.layers, norm=model.model.norm, embed=model.model.embed_tokens,
        lora_regex=(rf'model\.layers\.\d+\.({LLM_LINEARS})|model\.mm_projector\.mlp\.(0|2)'),
        chat=('<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n'
              '<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n'),
        vision=lambda n: '<|video_pad|>' * n, vision_token='<|video_pad|>', pixels=pixels,
        positions=running_positions, pixel_rows=lambda inputs: inputs['num_frames'], tower=tower,
        project=model.model.project, token_types=True)


def clip(path, max_pixels, **kw):
    """CLIP ViT-B/32, B/16, ...: square frames, at most 77 text tokens."""
    model, tokenizer, pre = read_parts(path, transformers.CLIPModel, ('image_mean', 'image_std'),
                                       **kw)
    for name in ('bos', 'eos'):  # eos_token_id in the config may be wrong (old files say 2)
        if getattr(tokenizer, f'{name}_token_id') is None:
            raise ValueError(f"backbone {path!r}: its tokenizer has no {name} token, so it is no "
                             "CLIP's")
    side = model.config.vision_config.image_size

    def pixels(frames):
        x = torch.from_numpy(frames).permute(0, 3, 1, 2)                       # [T, 3, H, W]
        H, W = x.shape[-2:]
        if max(H, W) > 200 * min(H, W):
            raise ValueError(f"a frame of {W}x{H} is too thin: the longer side may be at most 200 "
                             "times the other")
        h, w = side * H // min(H, W), side * W // min(H, W)  # the shorter side becomes S
        if (h, w) != (H, W):
            x = F.interpolate(x, (h, w), mode='bicubic', antialias=True)  # in uint8
        top, left = (h - side) // 2, (w - side) // 2
        return x[..., top:top + side, left:left + side].contiguous()           # [T, 3, S, S]

    return DualEncoder(family='clip', path=path, model=model, tokenizer=tokenizer, pixels=pixels,
                       mean=tuple(pre['image_mean']), std=tuple(pre['image_std']))


def qwen2_5_vl(path, max_pixels, **kw):
    """Qwen2.5-VL 3B, 7B: as Qwen2-VL, with windows in the tower and seconds in M-RoPE."""
    base = qwen2_vl(path, max_pixels, transformers.Qwen2_5_VLForConditionalGeneration, **kw)
    model, visual = base.model, base.model.model.visual
    merge, tubelet = visual.spatial_merge_size, model.config.vision_config.temporal_patch_size

    def pixels(frames, times=None):
        inputs, n_tokens = base.pixels(frames)
        step = [(t[-1] - t[0]) / max(len(t) - 1, 1) for t in seconds(frames, times)]
        return {**inputs, 'second_per_grid_ts': tubelet * torch.tensor(step)}, n_tokens   # [B]

    def positions(inputs):                                                     # M-RoPE -> [3, B, L]
        return model.model.get_rope_index(
            inputs['input_ids'], inputs['mm_token_type_ids'],
            video_grid_thw=inputs.get('video_grid_thw'), attention_mask=inputs['attention_mask'],
            second_per_grid_ts=inputs.get('second_per_grid_ts'))[0]

    def tower(inputs):
        # the tower goes through its windows one by one, the tokens come in reading order
        order, _ = get_vision_window_index(inputs['video_grid_thw'], merge, visual.window_size,
                                           visual.patch_size)
        return base.tower(inputs)[order.argsort()]

    return replace(base, family='qwen2_5_vl', pixels=pixels, positions=positions, tower=tower)


def qwen3_vl(path, max_pixels, **kw):
    """Qwen3-VL 2B, 4B: a block of text and tokens for each 2 frames, deepstack, M-RoPE."""
    model, tokenizer, pre = read_parts(
        path, transformers.Qwen3VLForConditionalGeneration,
        ('size', 'patch_size', 'merge_size', 'temporal_patch_size', 'image_mean', 'image_std'),
        **kw)
    visual, image, video = model.model.visual, pre['size'], pre['video']['size']
    patch, merge, tubelet = pre['patch_size'], pre['merge_size'], pre['temporal_patch_size']
    factor, n_deep = patch * merge, len(visual.deepstack_merger_list)
    frame_limit = max_pixels or 768 * factor ** 2  # as in its makers' video recipe

    def size(T, H, W):
        if T == 1:
            hi = min(frame_limit, image['longest_edge'])
            return fit_size(H, W, factor, min(image['shortest_edge'], hi), hi)
        if min(H, W) < factor:
            scale = max(factor / H, factor / W)
            H, W = int(H * scale), int(W * scale)
        hi = T * max(min(frame_limit, video['longest_edge'] // T),
                     int(1.05 * video['shortest_edge']))
        return fit_size(H, W, factor, video['shortest_edge'], hi, T, round(T / tubelet) * tubelet)

    def pixels(frames, times=None):
        rows, grids, blocks = [], [], []
        for f, t in zip(frames, seconds(frames, times)):
            x, grid = patches(f, *size(*f.shape[:3]), patch, merge, tubelet, pre['image_mean'],
                              pre['image_std'])
            t = [*t, *t[-1:] * (-len(t) % tubelet)]
            # a block's time lies between its first and its last frame; one frame has none
            at = [(t[i] + t[i + tubelet - 1]) / 2 for i in range(0, len(t), tubelet)]
            n = grid[1] * grid[2] // merge ** 2
            blocks.append([(s if len(f) > 1 else None, n) for s in at])
            rows.append(x)
            grids.append(grid)
        return {'pixel_values_videos': torch.cat(rows), 'video_grid_thw': torch.tensor(grids)}, \
            blocks

    def vision(blocks):
        return ''.join(('' if s is None else f'<{s:.1f} seconds>') + '<|vision_start|>'
                       + '<|video_pad|>' * n + '<|vision_end|>' for s, n in blocks)

    def positions(inputs):                                                     # M-RoPE -> [3, B, L]
        return model.model.get_rope_index(
            inputs['input_ids'], inputs['mm_token_type_ids'],
            video_grid_thw=inputs.get('video_grid_thw'), attention_mask=inputs['attention_mask'])[0]

    def tower(inputs):
        out = visual(inputs['pixel_values_videos'].type(visual.dtype),
                     grid_thw=inputs['video_grid_thw'])
        x = out.last_hidden_state                                              # [P, Dv]
        return torch.cat([x.view(len(x) // merge ** 2, -1), *out.deepstack_features], 1)

    def project(x):                                                # [n, merge^2 Dv + n_deep D]
        D = visual.config.out_hidden_size
        x, *deep = x.type(visual.dtype).split([x.shape[1] - n_deep * D] + n_deep * [D], 1)
        x = visual.merger(x.reshape(len(x) * merge ** 2, -1))                  # [n, D]
        return {'video': SimpleNamespace(pooler_output=(x,), deepstack_features=[
            (d,) for d in deep])}

    return Backbone(
        family='qwen3_vl', path=path, model=model, decoder=model.model, tokenizer=tokenizer,
        layers=model.model.language_model.layers, norm=model.model.language_model.norm,
        embed=model.model.get_input_embeddings(),
        lora_regex=(rf'model\.language_model\.layers\.\d+\.({LLM_LINEARS})'
                    r'|model\.visual\.merger\.linear_fc(1|2)'),
        chat='<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n',
        vision=vision, vision_token='<|video_pad|>', pixels=pixels, positions=positions,
        pixel_rows=lambda inputs: inputs['video_grid_thw'].prod(1), tower=tower, project=project)


def internvl(path, max_pixels, **kw):
    """InternVL3 1B, 8B (-hf): frames are squares of 448, cut to one tile; 2x2 patches a token."""
    model, tokenizer, pre = read_parts(path, transformers.InternVLForConditionalGeneration,
                                       ('size', 'image_mean', 'image_std'), **kw)
    body, config, pre = model.model, model.config, pre['video']
    unit = config.vision_config.patch_size[0] * round(1 / config.downsample_ratio)
    side = square_side(pre['size']['height'], max_pixels, unit)
    n = (side // unit) ** 2  # tokens of a frame

    def pixels(frames, times=None):  # the prompt counts frames, it says nothing of time
        x = torch.cat([normalize(resize(f, side, side), pre['image_mean'], pre['image_std'])
                       for f in frames])                                       # [frames, 3, S, S]
        return {'pixel_values': x}, [[n] * len(f) for f in frames]

    def vision(blocks):
        text = [f'<img>{"<IMG_CONTEXT>" * n}</img>' for n in blocks]
        return text[0] if len(text) == 1 else '\n'.join(
            f'Frame{i}: {frame}' for i, frame in enumerate(text, 1))

    def tower(inputs):
        x = body.vision_tower(inputs['pixel_values'].to(body.dtype)).last_hidden_state[:, 1:]
        x = x.view(len(x), *2 * [math.isqrt(x.shape[1])], -1)                  # [frames, h, w, Dv]
        return body.pixel_shuffle(x, config.downsample_ratio).flatten(0, 2)

    def project(x):
        return {'image': SimpleNamespace(pooler_output=body.multi_modal_projector(
            x.to(body.dtype)))}

    return Backbone(
        family='internvl', path=path, model=model, decoder=body, tokenizer=tokenizer,
        layers=body.language_model.layers, norm=body.language_model.norm,
        embed=body.get_input_embeddings(),
        lora_regex=(rf'model\.language_model\.layers\.\d+\.({LLM_LINEARS})'
                    r'|model\.multi_modal_projector\.linear_(1|2)'),
        chat='<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n',
        vision=vision, vision_token='<IMG_CONTEXT>', pixels=pixels, positions=running_positions,
        pixel_rows=lambda inputs: (inputs['mm_token_type_ids'] == 2).sum(1) // n,
        tower=tower, project=project)


def videollama3(path, max_pixels, **kw):
    """VideoLLaMA3 7B: native resolution, 2x2 patches averaged, tokens that do not change go."""
    kw |= makers_videollama3(path)
    model, tokenizer, pre = read_parts(path, transformers.VideoLlama3ForConditionalGeneration,
                                       ('patch_size', 'image_mean', 'image_std'), **kw)
    body, pre = model.model, pre['video']
    patch, merge, size = pre['patch_size'], pre.get('merge_size', 2), pre.get('size') or {}
    token = (patch * merge) ** 2
    lo = pre.get('min_pixels') or size.get('shortest_edge') or 16 * token
    hi = pre.get('max_pixels') or size.get('longest_edge') or 16384 * token  # of all frames

    def pixels(frames, times=None):
        rows, grids, keep, blocks = [], [], [], []
        for f, t in zip(frames, seconds(frames, times)):
            most = min(hi // len(f), max_pixels or hi)
            x, grid = patches(f, *fit_size(*f.shape[1:3], patch * merge, min(lo, most), most),
                              patch, merge, 1, pre['image_mean'], pre['image_std'])
            # a token goes if its pixels differ from those of the frame before by less than .1
            # in 255, on average; a frame keeps one
            mask = x.new_ones(len(f), grid[1] * grid[2] // merge ** 2, dtype=torch.bool)
            if pre.get('use_token_compression', True):
                frame = x.view(*mask.shape, -1)                # [T, tokens, values]
                mask[1:] = 255 * (frame[1:] - frame[:-1]).abs().mean(-1) > 0.1
                mask[:, 0] |= ~mask.any(1)
            blocks.append([(s if len(f) > 1 else None, n)
                           for s, n in zip(t, mask.sum(1).tolist())])
            for values, value in ((rows, x), (grids, grid), (keep, mask.flatten())):
                values.append(value)
        return {'pixel_values_videos': torch.cat(rows), 'video_grid_thw': torch.tensor(grids),
                'video_merge_sizes': torch.full((len(frames),), merge),
                'video_compression_mask': torch.cat(keep)}, blocks

    def vision(blocks):
        return ','.join(('' if s is None else f'Time {s:.1f}s:') + '<|video_pad|>' * n
                        for s, n in blocks)

    def tower(inputs):
        x = body.vision_model(inputs['pixel_values_videos'], inputs['video_grid_thw'],
                              inputs['video_merge_sizes']).last_hidden_state
        return x[inputs['video_compression_mask']]                             # [n, Dv]

    def project(x):
        return {'video': SimpleNamespace(pooler_output=(body.projector(x.to(body.dtype)),))}

    return Backbone(
        family='video_llama_3', path=path, model=model, decoder=body, tokenizer=tokenizer,
        layers=body.language_model.layers, norm=body.language_model.norm,
        embed=body.get_input_embeddings(),
        lora_regex=(rf'model\.language_model\.layers\.\d+\.({LLM_LINEARS})'
                    r'|model\.projector\.readout\.(0|2)'),
        chat=('<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n'
              '<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n'),
        vision=vision, vision_token='<|video_pad|>', pixels=pixels, positions=running_positions,
        pixel_rows=lambda inputs: inputs['video_grid_thw'].prod(1), tower=tower, project=project)


def makers_videollama3(path):
    """
    What from_pretrained must be told of a folder in the layout of VideoLLaMA3's makers, whose own
    code (never run here) has other names for the same modules; {} for transformers' layout.
    """
    old, _ = transformers.PretrainedConfig.get_config_dict(path)
    if old['model_type'] != 'videollama3_qwen2':
        return {}
    theirs = ('architectures', 'auto_map', 'model_type', 'vision_encoder_config')
    text = {k: v for k, v in old.items() if k not in theirs}
    vision = {k: v for k, v in old['vision_encoder_config'].items() if k != 'model_type'}
    return {'config': transformers.VideoLlama3Config(text_config=dict(text, model_type='qwen2'),
                                                     vision_config=vision),
            'key_mapping': {r'^model\.vision_encoder\.': 'model.vision_model.',
                            r'^model\.mm_projector\.': 'model.projector.',
                            r'^model\.(embed_tokens|layers|norm)\.': r'model.language_model.\1.'}}


def smolvlm(path, max_pixels, **kw):
    """SmolVLM2 256M, 500M, 2.2B: frames are squares of 384 or 512 with their time before them."""
    model, tokenizer, pre = read_parts(
        path, transformers.SmolVLMForConditionalGeneration,
        ('size', 'max_image_size', 'image_mean', 'image_std'), **kw)
    body, pre = model.model, pre['video']
    patch, scale = model.config.vision_config.patch_size, model.config.scale_factor
    side = square_side(pre['max_image_size']['longest_edge'], max_pixels, patch * scale)
    n = (side // patch // scale) ** 2  # tokens of a frame
    longest = pre['size']['longest_edge']

    def frame_pixels(f):
        H, W = f.shape[1:3]  # first the longer side as the checkpoint says, the other one even
        h, w = (int(longest * H / W), longest) if W >= H else (longest, int(longest * W / H))
        h, w = (h + h % 2, w) if W >= H else (h, w + w % 2)
        x = resize(f, max(h, 1), max(w, 1), 'lanczos').permute(0, 2, 3, 1).numpy()
        return normalize(resize(x, side, side, 'lanczos'), pre['image_mean'], pre['image_std'])

    def pixels(frames, times=None):
        x = torch.cat([frame_pixels(f) for f in frames])                       # [frames, 3, S, S]
        # the model wants [B, images, ...] and makes one list of it: here an image is a batch item
        return {'pixel_values': x[:, None]}, [[(s, n) for s in t] for t in seconds(frames, times)]

    def vision(blocks):
        images = [f'<fake_token_around_image><global-img>{"<image>" * n}<fake_token_around_image>'
                  for _, n in blocks]
        if len(blocks) == 1:
            return images[0]
        last = int(blocks[-1][0])
        return (f'You are provided the following series of {in_words(len(blocks))} frames from a '
                f'{last // 3600}:{last // 60 % 60:02d}:{last % 60:02d} [H:MM:SS] video.\n'
                + ''.join(f'\nFrame from {int(s // 60):02d}:{int(s % 60):02d}:{image}'
                          for (s, _), image in zip(blocks, images)) + '\n\n')

    def tower(inputs):
        x = inputs['pixel_values'][:, 0].to(body.dtype)                        # [frames, 3, S, S]
        mask = torch.ones(len(x), *2 * [side // patch], dtype=torch.bool, device=x.device)
        x = body.vision_model(x, patch_attention_mask=mask).last_hidden_state
        return body.connector.pixel_shuffle(x, scale).flatten(0, 1)            # [n, scale^2 Dv]

    def project(x):
        x = body.connector.modality_projection(x.to(body.dtype))
        return {'image': SimpleNamespace(pooler_output=[x])}

    return Backbone(
        family='smolvlm', path=path, model=model, decoder=body, tokenizer=tokenizer,
        layers=body.text_model.layers, norm=body.text_model.norm, embed=body.get_input_embeddings(),
        lora_regex=(rf'model\.text_model\.layers\.\d+\.({LLM_LINEARS})'
                    r'|model\.connector\.modality_projection\.proj'),
        chat='<|im_start|>User: {}<end_of_utterance>\nAssistant:', end='<end_of_utterance>',
        vision=vision, vision_token='<image>', pixels=pixels, positions=running_positions,
        pixel_rows=lambda inputs: (inputs['mm_token_type_ids'] == 2).sum(1) // n,
        tower=tower, project=project)


def in_words(n):
    """1 to 99 in English, as SmolVLM's prompt says how many frames there are."""
    ones = ('zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen '
            'fifteen sixteen seventeen eighteen nineteen').split()
    tens = 'twenty thirty forty fifty sixty seventy eighty ninety'.split()
    if n < 20 or n > 99:
        return ones[n] if n < 20 else str(n)
    return tens[n // 10 - 2] + (f'-{ones[n % 10]}' if n % 10 else '')


# model_type in config.json -> its function
FAMILIES = {
    'qwen2_vl': qwen2_vl,
    'videochat_flash_qwen': videochat_flash,
    'qwen2_5_vl': qwen2_5_vl,
    'qwen3_vl': qwen3_vl,
    'internvl': internvl,
    'video_llama_3': videollama3,      # lkhl/VideoLLaMA3-7B-Image-HF
    'videollama3_qwen2': videollama3,  # DAMO-NLP-SG/VideoLLaMA3-7B
    'smolvlm': smolvlm,
    'clip': clip,
}
