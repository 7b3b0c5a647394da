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
import math
import os
import re
from dataclasses import dataclass
from typing import Any, Callable

import torch
import torch.nn.functional as F
import transformers
from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from transformers.image_processing_base import ImageProcessingMixin

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
    # B arrays uint8 [T, H, W, 3] -> ({what run() wants of pixels}, [LLM tokens of each video])
    pixels: Callable
    vision: Callable      # number of LLM tokens -> the string that stands for one video in a prompt
    vision_token: str     # the token of that string that vision features will replace
    # {input_ids, attention_mask, mm_token_type_ids [B, L], pixel inputs} -> position_ids, [B, L] or
    # [3, B, L]; padding counts nothing, appended tokens continue the text
    positions: Callable
    pixel_rows: Callable  # pixel inputs -> [B], how many rows of 'pixel_values...' each video has

    @property
    def hidden_size(self):
        return self.embed.weight.shape[1]

    @property
    def num_layers(self):
        return len(self.layers)

    def run(self, inputs, **kw):
        """Last hidden state [B, L, D], after the final norm; no lm_head, no KV cache."""
        known = {k: v for k, v in inputs.items() if k not in ('append_pos', 'cut', 'labels')}
        return self.decoder(**known, use_cache=False, **kw).last_hidden_state

    def select(self, inputs, rows):
        """The inputs of some items, rows [b]; what follows from their lengths stays as it is."""
        out = {}
        for key, x in inputs.items():
            if key.startswith('pixel_values'):                 # [rows of all videos, ...]
                parts = x.split(self.pixel_rows(inputs).tolist())
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

    def check_prompt(self, prompt):
        """ValueError when a prompt spells a token that only a video's own place may hold."""
        own = set(self.ids(self.vision(1)))
        for part in re.split(r'<video>|\{caption\}', prompt):
            for i in self.ids(part) if part else ():
                if i in own:
                    raise ValueError(f"prompt {prompt!r} spells {self.tokenizer.decode([i])!r}, a "
                                     "token of the backbone's own; write <video> for a video")

    def collate(self, prompt, captions=None, frames=None, answers=None, n_append=0,
                max_text_tokens=1024, padding_side='right'):
        """
        Decoder inputs for B items that share one prompt, on the CPU.

        prompt    message with '<video>' and/or '{caption}' where the item's own content goes
        captions  B strings or None, cut to `max_text_tokens` tokens *before* the template goes
                  around them, so a long caption never loses the end of the prompt
        frames    B arrays uint8 [T, H, W, 3] or None; an image is a video of one frame
        answers   B strings that follow the assistant header, then <|im_end|> (captioning loss)
        n_append  number of placeholder tokens at the end

        Returns input_ids, attention_mask, mm_token_type_ids [B, L], position_ids, pixel inputs,
        append_pos [B, n_append]: where the placeholders stand, cut [B]: the caption was cut, and
        with answers labels [B, L].
        """
        self.check_prompt(prompt)
        pixel_inputs, n_vision = self.pixels(frames) if frames is not None else ({}, None)
        B = len(captions if captions is not None else frames)
        rows, n_prompt, cut = [], [], []
        for i in range(B):
            row, was_cut = [], False
            # our text and the user's are tokenised apart: neither changes how the other one is read
            for part in re.split(r'(<video>|\{caption\})', self.chat.format(prompt)):
                if part == '<video>':
                    assert n_vision is not None, f"prompt {prompt!r} wants a video, there is none"
                    row += self.ids(self.vision(n_vision[i]))
                elif part == '{caption}':
                    tokens = self.plain_ids(captions[i].strip())
                    row, was_cut = row + tokens[:max_text_tokens], len(tokens) > max_text_tokens
                elif part:
                    row += self.ids(part)
            n_prompt.append(len(row))
            if answers is not None:
                row += self.plain_ids(answers[i]) + self.ids('<|im_end|>')
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
    backbone = FAMILIES[family](path, max_pixels, dtype=dtype, attn_implementation='sdpa')
    backbone.model.requires_grad_(False).eval()
    return backbone


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
            f"writes it, or a hub id while online. To fetch one: hf download {path} --local-dir "
            "FOLDER (*.json, *.safetensors, merges.txt), then backbone=FOLDER") from None


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
    lacks = [key for key in preprocessor_keys if key not in pre]
    if lacks:
        raise ValueError(f"backbone {path!r}: its preprocessor_config.json has no {lacks[0]!r}; "
                         "take the file of the original checkpoint")
    tokenizer = part('tokenizer.json', lambda: transformers.AutoTokenizer.from_pretrained(path))
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
    # a few rows of the embedding may be spare (Qwen2-VL: 151657 of 151936 are used), not most
    n, rows = len(tokenizer), model.config.get_text_config().vocab_size
    if not rows / 2 <= n <= rows:
        raise ValueError(f"backbone {path!r}: its tokenizer knows {n} tokens, its config.json says "
                         f"{rows}; tokenizer.json (or vocab.json and merges.txt) is missing or of "
                         "another model")
    return model, tokenizer, pre


# -----------------------------------------------------------------------------
# frames -> pixels, shared by the families that cut frames into patches

def fit_size(height, width, factor, min_pixels, max_pixels):
    """
    The size a frame is resized to: both sides multiples of `factor`, the area between min_pixels
    and max_pixels, the aspect ratio as near as that allows (the rule of Qwen2-VL's processor).
    """
    if max(height, width) > 200 * min(height, width):
        raise ValueError(f"a frame of {width}x{height} is too thin: the longer side may be at most "
                         "200 times the other")
    h, w = (round(side / factor) * factor for side in (height, width))
    if h * w > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        h, w = (max(factor, math.floor(s / shrink / factor) * factor) for s in (height, width))
    elif h * w < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        h, w = (math.ceil(side * grow / factor) * factor for side in (height, width))
    return h, w


def patches(frames, h, w, patch, merge, tubelet, mean, std):
    """
    frames uint8 [T, H, W, 3] -> float patches [P, 3 * tubelet * patch^2] and grid (t, h, w).

    Order of rows: time, then blocks of merge x merge patches (a block becomes one LLM token), then
    inside a block. T is padded to a multiple of `tubelet` by repeating the last frame.
    """
    x = torch.from_numpy(frames).permute(0, 3, 1, 2)                           # [T, 3, H, W]
    if tuple(x.shape[-2:]) != (h, w):
        x = F.interpolate(x, (h, w), mode='bicubic', antialias=True)  # in uint8, as processors do
    mean, std = (255 * torch.tensor(m).view(1, 3, 1, 1) for m in (mean, std))
    x = (x.float() - mean) / std
    if len(x) % tubelet:
        x = torch.cat([x, x[-1:].expand(-len(x) % tubelet, -1, -1, -1)])
    t, gh, gw = len(x) // tubelet, h // patch, w // patch
    x = x.view(t, tubelet, 3, gh // merge, merge, patch, gw // merge, merge, patch)
    x = x.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)       # [t, gh/m, gw/m, m, m, 3, tubelet, patch, patch]
    return x.reshape(t * gh * gw, 3 * tubelet * patch * patch), (t, gh, gw)


# -----------------------------------------------------------------------------
# the families

def qwen2_vl(path, max_pixels, **kw):
    """Qwen2-VL 2B, 7B: native-resolution ViT, 2 frames per temporal patch, 2x2 merge, M-RoPE."""
    model, tokenizer, pre = read_parts(
        path, transformers.Qwen2VLForConditionalGeneration,
        ('patch_size', 'merge_size', 'temporal_patch_size', 'image_mean', 'image_std'), **kw)
    size = pre.get('size') or {}
    lo = size.get('shortest_edge') or pre.get('min_pixels') or 56 * 56
    hi = size.get('longest_edge') or pre.get('max_pixels') or 28 * 28 * 1280
    # the checkpoint's limit is meant for single images (12.8 M pixels); its makers' video recipe
    # stops a frame at 768 tokens' worth of pixels
    hi = max_pixels or min(hi, 768 * 28 * 28)
    lo = min(lo, hi)
    patch, merge, tubelet = pre['patch_size'], pre['merge_size'], pre['temporal_patch_size']

    def pixels(frames):
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
        pixel_rows=lambda inputs: inputs['video_grid_thw'].prod(1))


def videochat_flash(path, max_pixels, **kw):
    """VideoChat-Flash-Qwen2-7B, res448, res224: clips of 4 frames, 64 tokens each; an image too."""
    from videochat_flash import CLIP, TOKENS, VideoChatFlash, clip_lengths, square_frames
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

    def pixel_rows(inputs):  # frames; clips where vision features [K, 64, C] stand in for them
        n = inputs['num_frames']
        return n if inputs['pixel_values'].dim() == 4 else (n / CLIP).ceil().long()

    return Backbone(
        family='videochat_flash', path=path, model=model, decoder=model.model, tokenizer=tokenizer,
        layers=model.model.layers, norm=model.model.norm, embed=model.model.embed_tokens,
        lora_regex=(rf'model\.layers\.\d+\.({LLM_LINEARS})|model\.mm_projector\.mlp\.(0|2)'),
        chat=('<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n'
              '<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n'),
        vision=lambda n: '<|video_pad|>' * n, vision_token='<|video_pad|>', pixels=pixels,
        positions=lambda inputs: (inputs['attention_mask'].cumsum(1) - 1).clamp(min=0),  # [B, L]
        pixel_rows=pixel_rows)


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


FAMILIES = {'qwen2_vl': qwen2_vl, 'videochat_flash_qwen': videochat_flash, 'clip': clip}
