"""
VideoChat-Flash-Qwen2-7B, res448 and res224: the MLLM of MARS's main results, all of it in here.

Four frames at a time go through a video ViT (UMT-L) as one sequence, ToMe merges what comes out to
64 tokens, an MLP takes those to the width of a plain Qwen2. An image is a clip of one frame.

    frames uint8 [F, 3, S, S]   --tower, clip by clip--> [T * L, C]  L = 784 patches (res224: 196)
    a clip's tokens [T * L, C]  --merge_tokens---------> [64, C]     of all clips: vision_features
    vision_features [K, 64, C]  --mm_projector---------> [64 * K, D] where the vision tokens stand

Papers: VideoChat-Flash (arXiv 2501.00574), UMT (2303.16058), ToMe (2210.09461). Modules have the
public checkpoint's names, so from_pretrained loads it; the code that lies beside it never runs.
Not here on purpose: tiles for large images, dropping tokens inside the LLM.
Shapes: B items, F frames of all, T of a clip, K clips of all, S x S pixels, C and D widths.
"""
from functools import lru_cache

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers import AutoConfig, Qwen2Config, Qwen2Model
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.qwen2.modeling_qwen2 import Qwen2PreTrainedModel

CLIP = 4         # frames that attend to each other
TOKENS = 64      # that a clip, or an image, is merged to: 16 per frame of a clip
GRID = 14        # patches per side that the tower was pretrained with
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, of pixels / 255


class VideoChatFlashConfig(Qwen2Config):
    """
    config.json of the public checkpoints: Qwen2's keys and, with mm_ in front, those of the rest.
    The tower's own sizes are not in it, they follow from its name; vision_config may give others.
    """
    model_type = 'videochat_flash_qwen'
    default_theta = 1e6

    vocab_size: int = 152064
    hidden_size: int = 3584
    intermediate_size: int = 18944
    num_hidden_layers: int = 28
    num_attention_heads: int = 28
    num_key_value_heads: int | None = 4
    mm_vision_tower: str = 'umt-hd-large'           # umt-hd...: 448 x 448 pixels, umt...: 224 x 224
    mm_hidden_size: int = 1024                      # C
    mm_vision_select_layer: int = -2                # the tower's last layer that is read
    mm_local_num_frames: int = 4
    mm_projector_type: str = 'tome16_mlp_hd64'
    vision_config: dict | None = None

    def vision_sizes(self):
        """The tower's sizes; ValueError for a checkpoint whose vision is not the one in here."""
        for key, here in (('mm_vision_tower', 'umt'), ('mm_projector_type', 'tome16_mlp_hd64'),
                          ('mm_local_num_frames', CLIP)):
            value = getattr(self, key)
            if here not in value if isinstance(here, str) else here != value:
                raise ValueError(f"{key} is {value!r} in config.json, videochat_flash.py has only "
                                 f"{here!r}")
        sizes = dict(num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096,
                     patch_size=16, image_size=448 if 'umt-hd' in self.mm_vision_tower else 224)
        sizes.update(self.vision_config or {})
        # UMT-L has 24 layers, -2 is the one before the last: the checkpoint ends there, with 23
        sizes['num_blocks'] = sizes['num_hidden_layers'] + self.mm_vision_select_layer + 1
        sizes['side'] = sizes['image_size'] // sizes['patch_size']
        if sizes['side'] ** 2 < TOKENS:
            raise ValueError(f"an image of {sizes['side']} x {sizes['side']} patches is less than "
                             f"the {TOKENS} tokens that it is merged to")
        return sizes


# transformers' tokenizers read config.json too; by a name they don't know they'd ask to run the
# code that lies beside it
AutoConfig.register(VideoChatFlashConfig.model_type, VideoChatFlashConfig)


# -----------------------------------------------------------------------------
# frames

def square_frames(frames, size):
    """uint8 [T, H, W, 3] -> uint8 [T', 3, S, S] of whole clips: T' is 1 or a multiple of 4."""
    if frames.shape[1:3] != (size, size):
        # both sides to S whatever the aspect. By Pillow, as the official processor: torch's bicubic
        # is 5 times faster, but up to 19 of 255 away where one side grows and the other shrinks
        from PIL import Image
        frames = np.stack([np.asarray(Image.fromarray(frame).resize((size, size), Image.BICUBIC))
                           for frame in frames])
    x = torch.from_numpy(frames).permute(0, 3, 1, 2)                            # [T, 3, S, S]
    # the official model has no place for a clip that is not full, and its reader repeats the last
    # frame where a video has too few; one frame alone takes the path of an image
    if len(x) > 1 and len(x) % CLIP:
        x = torch.cat([x, x[-1:].expand(-len(x) % CLIP, -1, -1, -1)])
    return x.contiguous()


def clip_lengths(num_frames):
    """How many frames the clips of all videos have: [1, 8, 4] -> 1, 4, 4, 4."""
    lengths = []
    for n in num_frames:
        if n != 1 and (n % CLIP or n < 1):
            raise ValueError(f"a video of {n} frames; wanted 1 or a multiple of {CLIP}, which "
                             "square_frames makes")
        lengths += [1] if n == 1 else [CLIP] * (n // CLIP)
    return lengths


# -----------------------------------------------------------------------------
# the tower, UMT-L

@lru_cache(maxsize=None)
def position_table(T, side, C, device, dtype):
    """
    What is added to the patches, [T * side^2, C]: one sinusoid over the flattened (t, y, x) of the
    pretrained grid, T x 14 x 14, each frame then resized to side x side. Fixed, in no checkpoint.
    """
    at = torch.arange(T * GRID * GRID, dtype=torch.double, device='cpu')[:, None]  # [n, 1]
    j = torch.arange(C, device='cpu')
    angle = at / 10000.0 ** (2 * (j // 2) / C).double()                            # [n, C]
    table = torch.where(j % 2 == 0, angle.sin(), angle.cos()).float()
    if side != GRID:
        table = table.view(T, GRID, GRID, C).permute(0, 3, 1, 2)                   # [T, C, 14, 14]
        table = F.interpolate(table, (side, side), mode='bicubic', align_corners=False)
        table = table.permute(0, 2, 3, 1)                                          # [T, s, s, C]
    return table.reshape(T * side * side, C).to(device, dtype)


class Attention(nn.Module):
    def __init__(self, C, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(C, 3 * C, bias=False)
        # keys have none: it would add the same to all scores of a query, which softmax ignores
        self.q_bias, self.v_bias = nn.Parameter(torch.zeros(C)), nn.Parameter(torch.zeros(C))
        self.proj = nn.Linear(C, C)

    def forward(self, x):  # [B, n, C], every token sees every token of its clip
        bias = torch.cat([self.q_bias, torch.zeros_like(self.q_bias), self.v_bias])
        qkv = F.linear(x, self.qkv.weight, bias).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)                                    # [B, heads, n, d]
        y = F.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, C, num_heads, hidden):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(C, eps=1e-6), nn.LayerNorm(C, eps=1e-6)
        self.attn = Attention(C, num_heads)
        self.mlp = nn.ModuleDict({'fc1': nn.Linear(C, hidden), 'fc2': nn.Linear(hidden, C)})

    def forward(self, x):  # [B, n, C]
        x = x + self.attn(self.norm1(x))
        return x + self.mlp['fc2'](F.gelu(self.mlp['fc1'](self.norm2(x))))


class Tower(nn.Module):
    def __init__(self, C, sizes):
        super().__init__()
        p = sizes['patch_size']
        self.side, self.num_heads = sizes['side'], sizes['num_attention_heads']
        self.patch_embed = nn.ModuleDict({'proj': nn.Conv3d(3, C, (1, p, p), stride=(1, p, p))})
        self.blocks = nn.ModuleList(Block(C, self.num_heads, sizes['intermediate_size'])
                                    for _ in range(sizes['num_blocks']))
        self.vision_layernorm = nn.LayerNorm(C, eps=1e-12)

    def forward(self, x):
        """Normalised frames [B, T, 3, S, S] of B clips -> tokens [B, T * L, C], by (t, y, x)."""
        proj, T = self.patch_embed['proj'], x.shape[1]
        x = proj(x.transpose(1, 2).to(proj.weight.dtype))                       # [B, C, T, s, s]
        x = x.flatten(2).transpose(1, 2)                                        # [B, T * L, C]
        x = x + position_table(T, self.side, x.shape[-1], x.device, x.dtype)
        for block in self.blocks:
            x = block(x)
        return self.vision_layernorm(x)


# -----------------------------------------------------------------------------
# ToMe

def merge_schedule(n, target):
    """How many tokens each step merges away: half of them, in the end what is left to go."""
    steps = []
    while n > target:
        steps.append(min(n // 2, n - target))
        n -= steps[-1]
    return steps


def merge_once(x, size, r, num_heads):
    """
    One step of bipartite matching: r of the even tokens join the odd token most like them. x [n, C]
    are means over `size` [n, 1] patches each. What is left is not in the order of space any more:
    first the other even tokens, the most similar first, then the odd ones.
    """
    with torch.no_grad():
        metric = F.normalize(x.unflatten(-1, (num_heads, -1)).mean(1), dim=-1)  # [n, d]
        best, partner = (metric[::2] @ metric[1::2].T).max(dim=1)               # [even], [even]
        order = best.argsort(descending=True, stable=True)
        joins, stays = order[:r], order[r:]
        to = partner[joins]                                                     # [r]

    def merge(y):
        even, odd = y[::2], y[1::2]
        return torch.cat([even[stays], odd.index_add(0, to, even[joins])])      # [n - r, ...]

    total = merge(size)
    return merge(x * size) / total, total


def merge_tokens(x, target, num_heads):
    """[n, C] -> [target, C]; fp32 inside, since in bf16 most similarities would be ties."""
    with torch.autocast(x.device.type, enabled=False):
        y, size = x.float(), torch.ones(len(x), 1, device=x.device)
        for r in merge_schedule(len(x), target):
            y, size = merge_once(y, size, r, num_heads)
    return y.to(x.dtype)


# -----------------------------------------------------------------------------
# the whole

class VideoChatFlashModel(Qwen2Model):
    """Everything but the head: what a Backbone calls its decoder."""

    def __init__(self, config):
        super().__init__(config)
        C, D = config.mm_hidden_size, config.hidden_size
        tower = Tower(C, config.vision_sizes())
        self.vision_tower = nn.ModuleDict({'vision_tower': nn.ModuleDict({'encoder': tower})})
        mlp = nn.Sequential(nn.Linear(C, D), nn.GELU(), nn.Linear(D, D))
        self.mm_projector = nn.ModuleDict({'mlp': mlp})

    @property
    def tower(self):
        return self.vision_tower['vision_tower']['encoder']

    def vision_features(self, pixel_values, num_frames):
        """
        Frames of all videos, uint8 or already normalised [F, 3, S, S], and how many each has [B]
        -> [K, 64, C], video by video. Frozen in MARS and SLQ: what follows it is trained.
        """
        tower, features = self.tower, []
        # Choice: clip by clip. Matching decides by comparing, so rounding that changes with the
        # size of a batch could reorder tokens, and a clip of 3136 fills a GPU on its own
        for x in pixel_values.split(clip_lengths(num_frames.tolist())):
            if not x.is_floating_point():
                mean, std = (x.new_tensor(m, dtype=torch.float).view(3, 1, 1) for m in (MEAN, STD))
                x = (x.float() / 255 - mean) / std
            x = tower(x[None])[0]                                               # [T * L, C]
            features.append(merge_tokens(x, TOKENS, tower.num_heads))
        return torch.stack(features)

    def project(self, features):
        """[n, C] -> [n, D]: the part of vision that LoRA trains in MARS."""
        mlp = self.mm_projector['mlp']
        return mlp(features.to(mlp[0].weight.dtype))

    def put_vision(self, x, is_vision, rows):
        """Embeddings x [B, L, D], with the projected features [n, D] at is_vision, in order."""
        if int(is_vision.sum()) != len(rows):
            raise ValueError(f"{int(is_vision.sum())} vision tokens in the prompts, and "
                             f"{len(rows)} vision features to put there")
        return x.masked_scatter(is_vision[..., None], rows.to(x.dtype))

    def forward(self, input_ids=None, inputs_embeds=None, pixel_values=None, num_frames=None,
                mm_encoder_outputs=None, mm_token_type_ids=None, **kw):
        """
        Qwen2Model's, and vision: pixel_values and num_frames as vision_features wants them, or its
        result, projected, as mm_encoder_outputs [n, D]; mm_token_type_ids [B, L]: 2 where it goes.
        """
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds  # [B, L, D]
        if pixel_values is not None:
            features = self.vision_features(pixel_values, num_frames).flatten(0, 1)
            mm_encoder_outputs = self.project(features)
        if mm_encoder_outputs is not None:
            x = self.put_vision(x, mm_token_type_ids == 2, mm_encoder_outputs)
        return super().forward(inputs_embeds=x, **kw)


class VideoChatFlash(Qwen2PreTrainedModel):
    config_class = VideoChatFlashConfig
    _tied_weights_keys = {'lm_head.weight': 'model.embed_tokens.weight'}
    # what checkpoints tuned for generating both ways have more
    _keys_to_ignore_on_load_unexpected = [r'^visual_head\.', r'mm_projector\.tvg_mlp\.']

    def __init__(self, config):
        super().__init__(config)
        self.model = VideoChatFlashModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def vision_features(self, pixel_values, num_frames):
        return self.model.vision_features(pixel_values, num_frames)

    def forward(self, **inputs):
        out = self.model(**inputs)
        return CausalLMOutputWithPast(logits=self.lm_head(out.last_hidden_state))
