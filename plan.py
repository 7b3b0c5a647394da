"""
What a run needs, before anything is downloaded: `python train.py config/mars_didemo.py --plan`.

config.json (a folder's, the hub cache's, or the published values below) --> the model on torch's
meta device, tensors with a size and no data --> one training step, taken there by train.py's own
plain_step or cached_step, and one batch of the evaluation --> bytes alive at the peak, per GPU

So there is no formula for activations that could age: checkpointing, LoRA, prefix cache, gradient
cache and matching are what the code does. Whole numbers and booleans (ids, masks, grids) stay real
and on the CPU, since code asks for their values; floats are ghosts. Autocast is imitated, attention
is counted as a fused kernel. tests/test_plan.py compares with what is measured.
"""
import json
import os
import re
import tempfile
import weakref
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import torch
import transformers
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers.image_processing_base import ImageProcessingMixin
from transformers.utils import cached_file

import backbones
import data as datalib
import losses
import train

GIB = 2 ** 30
CONTEXT = 1.0 * GIB    # CUDA itself, cuBLAS and NCCL: what a process takes before any tensor
SLACK = 1.1            # of the peak: blocks that the allocator holds and can't fill
CARDS = {'40 GB': 39.4 * GIB, '80 GB': 79.1 * GIB}  # what torch sees of an A100
LAYERS = 2, 4          # decoder layers that a step is taken with, where there are more
FRAME = 360, 640       # height and width of a video, when frame_size says nothing else

# -----------------------------------------------------------------------------
# tensors without data, and what they would weigh


class Ghosts(TorchDispatchMode):
    """Counts the storages that operations bring to life, while they live."""

    def __init__(self, *known):
        super().__init__()
        self.sizes, self.refs, self.live, self.peak = {}, {}, 0, 0
        for x in known:
            self.sizes[x.untyped_storage()._cdata] = 0  # was there before

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = op._schema.name.removeprefix('aten::')
        tensors = [x for x in tree_leaves((args, kwargs)) if torch.is_tensor(x)]
        if any(x.is_meta for x in tensors):
            if name in ('index', 'index_put', 'index_put_', '_index_put_impl_'):
                args = (args[0], indices(args[1]), *args[2:])
            if not all(x.is_meta for x in tensors):
                args, kwargs = tree_map(lambda x: x.to('meta') if torch.is_tensor(x)
                                        and not x.is_meta else x, (args, kwargs))
        out = op(*args, **kwargs)
        if torch.is_tensor(out) and out.is_meta and not out.is_floating_point():
            # a whole number made for a ghost's device is real, unless it comes out of ghosts
            if str(kwargs.get('device')) == 'meta' and not any(x.is_meta for x in tensors):
                out = op(*args, **{**kwargs, 'device': torch.device('cpu')})
            elif name.startswith('new_') or name.endswith('_like'):
                out = op(*args, **{**kwargs, 'device': torch.device('cpu')})
        for x in tree_leaves(out):
            if torch.is_tensor(x):
                self.count(x.untyped_storage())
        return out

    def count(self, storage):
        key = storage._cdata
        if key in self.sizes:
            return
        self.sizes[key] = storage.nbytes()
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        self.refs[key] = weakref.ref(storage, lambda _: self.forget(key))

    def forget(self, key):
        del self.refs[key]
        self.live -= self.sizes.pop(key)


def indices(index):
    """Masks as positions: how many there are is known only while they are real."""
    out = []
    for x in index:
        masked = x is not None and x.dtype == torch.bool
        out += list(x.nonzero(as_tuple=True)) if masked else [x]
    return out


HALF = ('linear', 'matmul', '__matmul__', '__rmatmul__', 'bmm', 'mm', 'addmm', 'baddbmm', 'einsum',
        'conv1d', 'conv2d', 'conv3d', 'scaled_dot_product_attention')
FULL = ('layer_norm', 'group_norm', 'softmax', 'log_softmax', 'pow', 'cross_entropy', 'cumsum')


class Kernels(TorchFunctionMode):
    """Fused attention, and what autocast would do: ghosts' device has neither."""

    def __init__(self, half):
        super().__init__()
        self.half, self.casts = half, None

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(func, '__name__', '')
        if self.half and name in HALF + FULL:
            cast = self.to_half if name in HALF else lambda x: x.float()
            args, kwargs = tree_map(lambda x: cast(x) if torch.is_tensor(x) and x.is_meta
                                    and x.is_floating_point() else x, (args, kwargs))
        if func is torch.Tensor.backward:  # else this mode would be off while layers run again
            with self:
                return torch.autograd.graph._engine_run_backward(
                    (args[0],), (torch.ones_like(args[0]),), False, False, (),
                    allow_unreachable=True, accumulate_grad=True)
        if name == 'scaled_dot_product_attention' and args[0].is_meta:
            return self.attention(*args, **kwargs)
        return func(*args, **kwargs)

    def to_half(self, x):
        if x.dtype != torch.float32:
            return x
        if self.casts is None or not (x.requires_grad and x.is_leaf):
            return x.bfloat16()
        if id(x) not in self.casts:  # autocast keeps the copies of what is trained until it ends
            self.casts[id(x)] = x.bfloat16()
        return self.casts[id(x)]

    @contextmanager
    def autocast(self, device_type='', dtype=None, enabled=True, **kw):
        half, casts = self.half, self.casts
        # checkpointing names the CPU when it computes again, and knows no autocast of ghosts
        self.half = half and (enabled or device_type == 'cpu')
        if enabled and casts is None:
            self.casts = {}
        try:
            yield
        finally:
            self.half, self.casts = half, casts

    @contextmanager
    def instead(self):
        """Is what code gets when it asks for autocast."""
        with patch.object(torch, 'autocast', self.autocast), patch.object(
                torch.amp, 'autocast', self.autocast), self:
            yield self

    @staticmethod
    def attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
                  enable_gqa=False):
        if enable_gqa and k.shape[-3] != q.shape[-3]:
            n = q.shape[-3] // k.shape[-3]
            k, v = (x.unsqueeze(-3).expand(*x.shape[:-2], n, *x.shape[-2:]).flatten(-4, -3)
                    for x in (k, v))
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros(attn_mask.shape, dtype=q.dtype, device='meta')
        # keeps q, k, v, the output and a sum for each row, as the kernels on GPUs do
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]


# -----------------------------------------------------------------------------
# a model without weights

class Words:
    """Stands in for a tokenizer that is not here: a word, a digit or a sign is a token."""
    eos_token_id = bos_token_id = pad_token_id = 0

    def __init__(self, config):
        names = {'<|video_pad|>': 'video', '<|vision_start|>': 'vision_start', '<image>': 'image',
                 '<|vision_end|>': 'vision_end', '<IMG_CONTEXT>': 'image'}
        ids = {word: getattr(config, f'{name}_token_id', None) for word, name in names.items()}
        self.table = {word: i for word, i in ids.items() if i is not None}

    def __len__(self):
        return 1 << 20

    def __call__(self, text, split_special_tokens=False, **kw):
        pattern = r'\d|[^\W\d]+|\n|[^\w\s]'
        if not split_special_tokens:
            pattern = r'<\|?[A-Za-z_-]+\|?>|' + pattern
        return SimpleNamespace(input_ids=[self.id(w) for w in re.findall(pattern, text)])

    def id(self, word):
        return self.table.setdefault(word, len(self.table) + 1)

    convert_tokens_to_ids = id

    def get_added_vocab(self):
        return {w: i for w, i in self.table.items() if w[0] == '<' and len(w) > 1}

    def decode(self, ids):
        return next(w for w, i in self.table.items() if i == ids[0])

    def add_tokens(self, *words, **kw):
        pass


def ghost_parts(path, model_class, preprocessor_keys, config=None, dtype=None, layers=0, **kw):
    """
    backbones.read_parts without the weights, and without a tokenizer where there is none. layers:
    so many decoder layers; 0: all.
    """
    pre, _ = ImageProcessingMixin.get_image_processor_dict(path) if preprocessor_keys else ({}, 0)
    pre['video'] = {**pre, **backbones.video_settings(path)}
    config = config or model_class.config_class.from_pretrained(path)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, config=config,
                                                               trust_remote_code=False)
    except Exception:  # of json, tokenizers, the hub: no base class in common
        tokenizer = ()
    if len(tokenizer) < 100:  # transformers makes up what is missing
        tokenizer = Words(config)
    text = config.get_text_config()
    if layers:
        text.num_hidden_layers = layers
        if getattr(text, 'layer_types', None):
            text.layer_types = text.layer_types[:layers]
    with torch.device('meta'):
        model = model_class._from_config(config, dtype=dtype, attn_implementation='sdpa')
    return model, tokenizer, pre


def find_config(path, folder):
    """Where a backbone's config.json is: at `path`, or written into `folder` as published."""
    if os.path.isdir(path):
        return path
    try:
        cached_file(path, 'config.json', local_files_only=True)
        return path
    except OSError:
        pass
    if path not in PUBLISHED:
        raise FileNotFoundError(
            f"backbone {path!r}: neither a folder nor in the hub's cache, and its sizes are not "
            f"among those in plan.py; fetch its small files first: hf download {path} "
            "--include '*.json' --local-dir FOLDER, and say --backbone=FOLDER")
    for name, content in zip(('config', 'preprocessor_config', 'video_preprocessor_config'),
                             PUBLISHED[path]):
        with open(os.path.join(folder, f'{name}.json'), 'w', encoding='utf-8') as f:
            json.dump(content, f)
    return folder


def ghost_model(cfg, half, layers=0):
    """train.build_model on the meta device, with so many decoder layers; 0: all."""
    load = backbones.load

    def load_here(*args, **kw):
        with torch.device('cpu'):  # pixels are real
            backbone = load(*args, **kw)
            getattr(backbone, 'vision_ids', None)  # found by looking at a frame
        return backbone

    with tempfile.TemporaryDirectory() as folder, patch.object(
            backbones, 'read_parts', partial(ghost_parts, layers=layers)), patch.object(
            backbones, 'load', load_here), patch.object(
            train, 'torch_dtype', lambda *a: torch.bfloat16 if half else torch.float32):
        at = SimpleNamespace(**{**vars(cfg), 'backbone': find_config(cfg.backbone, folder)})
        verbosity = transformers.logging.get_verbosity()
        transformers.logging.set_verbosity_error()
        with torch.device('meta'):
            model = train.build_model(at, torch.device('meta'))
        transformers.logging.set_verbosity(verbosity)
    return model


def ghost_inputs(model, samples, cfg, chunk):
    """
    model.collate of `chunk` samples -> inputs, their pixels being ghosts; and the pixels' bytes.
    """
    backbone, shared = model.backbone, samples[0].frames
    real = backbone.pixels

    def pixels(frames, times=None):  # the frames are the same for all: they are looked at once
        if isinstance(frames, np.ndarray):  # a CLIP's, of one clip
            return seen
        x, vision = seen
        return {k: torch.empty(len(v) * len(frames), *v.shape[1:], dtype=v.dtype, device='meta')
                if k.startswith('pixel_values') else v.repeat(len(frames), *[1] * (v.dim() - 1))
                for k, v in x.items()}, vision * len(frames)

    seen = real(shared) if hasattr(backbone, 'mean') else real([shared])
    with patch.object(backbone, 'pixels', pixels):
        batch = model.collate(samples[:chunk])
    return {side: {k: torch.empty_like(v, device='meta') if k == 'frames' else v
                   for k, v in inputs.items()} for side, inputs in batch.items()}


def nbytes(tensors):
    """Of their storages, each once."""
    return sum({x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}.values())


# -----------------------------------------------------------------------------
# the plan

def samples_for(model, cfg, n):
    """n pairs whose captions are as long as the model reads, of noise in widescreen."""
    height, width = (cfg.frame_size, round(cfg.frame_size * 16 / 9)) if cfg.frame_size else FRAME
    dice = np.random.default_rng(0)  # noise: no frame looks like the one before it
    frames = dice.integers(0, 256, (cfg.num_frames, height, width, 3), dtype=np.uint8)
    words = getattr(cfg, 'max_text_tokens', 0) or cfg.max_words
    return [datalib.Sample(str(i), 'a ' * words, frames, i) for i in range(n)]


def step_peak(model, chunks, cfg, half, world):
    """
    Bytes at the peak of one training step: activations, gradients, features. `chunks` are one, or
    two that stand for all of a rank's: each but the one at work has left only features.
    """
    share = cfg.batch_size // world
    kernels = Kernels(half)
    known = [*model.parameters(), *model.buffers(), *inputs_of(chunks)]

    def gather(x):  # what the other ranks send, and the chunks that were left out
        times = -(-cfg.batch_size // len(x))
        return x.repeat(times, *[1] * (x.dim() - 1))[:cfg.batch_size]

    model.train()
    with kernels.instead(), patch.object(losses, 'gather', gather), patch.object(
            losses, 'gather_ids', gather), Ghosts(*known) as ghosts:
        if vision_cache_on(cfg, model):
            chunks = [{**c, 'video': with_features(model, c['video'])} for c in chunks]
        ids = torch.arange(sum(len(c['text']['input_ids']) for c in chunks))
        step = train.plain_step if len(chunks) == 1 else train.cached_step
        step(model, chunks[0] if len(chunks) == 1 else chunks, ids, kernels.autocast)
        peak = ghosts.peak
    gradients = nbytes([p.grad for p in model.parameters() if p.grad is not None])
    model.zero_grad(set_to_none=True)
    with torch.no_grad(), kernels.instead(), Ghosts(*known):
        sides = model(chunks[0])
        per_pair = sum(x.nbytes / len(x) for side in sides for x in side.values())
    stored = 0
    if len(chunks) > 1:  # features of a rank's pairs and their gradients
        stored = round(2 * share * per_pair)
        peak += max(0, round(2 * (share - len(ids)) * per_pair))
    return peak, gradients, stored


def inputs_of(chunks):
    return [x for chunk in chunks for side in chunk.values() for x in side.values()
            if torch.is_tensor(x)]


def vision_cache_on(cfg, model):
    return bool(getattr(cfg, 'cache_vision', '')) and getattr(model.backbone, 'tower', None)


def with_features(model, inputs):
    """Inputs with what the tower makes of them, video by video as vision_cache.py has it."""
    b, n = model.backbone, len(inputs['input_ids'])
    rows = [b.features(b.select(inputs, torch.tensor([i]))).to(b.embed.weight.dtype)
            for i in range(n)]
    inputs = {k: x for k, x in inputs.items() if not k.startswith('pixel_values')}
    return {**inputs, 'features': torch.cat(rows)}


def eval_peak(model, inputs, half):
    """Bytes at the peak of encoding one batch of videos without gradient."""
    kernels = Kernels(half)
    model.eval()
    known = [*model.parameters(), *model.buffers(), *inputs.values()]
    with torch.no_grad(), kernels.instead(), Ghosts(*known) as ghosts:
        with kernels.autocast():
            model.encode_video(inputs)
        peak = ghosts.peak
    model.train()
    return peak + nbytes(inputs.values())


def groups(model):
    """{name: parameters} of all, each once: what is trained by the model's own names."""
    trained = {f'trained: {k}': sum(p.numel() for p in g.values())
               for k, g in model.trainable_groups().items()}
    b, frozen = model.backbone, {}
    inside = {id(p) for p in b.layers.parameters()} if hasattr(b, 'layers') else set()
    table = {id(b.embed.weight)} if hasattr(b, 'embed') else set()
    for name, p in b.model.named_parameters():
        if p.requires_grad:
            continue
        module = name.removeprefix('base_model.model.').replace('.base_layer', '')
        key = 'decoder layers' if id(p) in inside else \
            'token embedding' if id(p) in table else \
            'head (unused)' if 'lm_head' in name else \
            'projector' if hasattr(b, 'lora_regex') and projector_of(b, module) else 'vision tower'
        frozen[key] = frozen.get(key, 0) + p.numel()
    return {**{f'frozen: {k}': n for k, n in frozen.items()}, **trained}


def projector_of(backbone, name):
    """Is it a parameter of a module that LoRA adapts outside the decoder?"""
    return re.fullmatch(backbone.lora_regex, name.rpartition('.')[0])


def make(cfg, world=2, half=True):
    """The plan as a dict of bytes per GPU, for the longest captions and widescreen noise."""
    share = cfg.batch_size // world
    n = min(cfg.chunk_size or share, share)
    model = ghost_model(cfg, half)
    held = nbytes([*model.parameters(), *model.buffers()])
    trained = nbytes([p for p in model.parameters() if p.requires_grad])
    plan = dict(parameters=groups(model), world=world, half=half, pairs=n, chunks=-(-share // n),
                weights=held, optimizer=2 * trained, buckets=trained if world > 1 else 0)
    # all decoder layers are alike: a few of them, and a few more, tell what all of them need
    N = model.backbone.num_layers if hasattr(model.backbone, 'layers') else 0
    if N <= sum(LAYERS):
        plan |= activations(model, cfg, half, world, n)
    else:
        few, more = (activations(ghost_model(cfg, half, layers), cfg, half, world, n)
                     for layers in LAYERS)
        steps = (N - LAYERS[0]) / (LAYERS[1] - LAYERS[0])
        plan |= {k: few[k] + round(steps * (more[k] - few[k])) if isinstance(few[k], int)
                 else few[k] for k in few}
    held += plan['optimizer'] + plan['buckets']
    plan['train'] = held + plan['inputs'] + plan['step']
    plan['need'] = max(plan['train'], held + plan['eval']) * SLACK + CONTEXT
    if getattr(model, 'cached', False):
        plan['prefix'] = sum(model.cache_bytes(L) for _, L in plan['tokens'].values()) * n
    return plan


def activations(model, cfg, half, world, n):
    """What comes and goes in a step of chunks of n pairs, and in an evaluation."""
    share = cfg.batch_size // world
    samples = samples_for(model, cfg, max(n, 2))
    # two chunks stand for all: what the others leave behind is counted apart
    chunks = [ghost_inputs(model, samples, cfg, n) for _ in range(2 if n < share else 1)]
    peak, gradients, stored = step_peak(model, chunks, cfg, half, world)
    few = [eval_peak(model, ghost_inputs(model, samples, cfg, b)['video'], half) for b in (1, 2)]
    out = dict(
        step=peak, gradients=gradients, activations=peak - gradients, features=stored,
        inputs=nbytes(inputs_of(chunks[:1])) * -(-share // n),
        eval=few[0] + (cfg.eval_batch_size - 1) * (few[1] - few[0]),  # items are all alike
        tokens={side: tuple(x['input_ids'].shape) for side, x in chunks[0].items()
                if 'input_ids' in x})
    if getattr(model.backbone, 'tower', None):
        with torch.no_grad(), Kernels(half).instead(), Ghosts():
            rows = with_features(model, ghost_inputs(model, samples, cfg, 1)['video'])['features']
        out['rows'] = tuple(rows.shape), rows.nbytes
    return out


def report(cfg, world):
    """The plan for people; nothing is trained."""
    if int(os.environ.get('RANK', 0)):
        return
    half = cfg.dtype == 'bfloat16' or (cfg.dtype == 'auto' and cfg.device != 'cpu')
    p = make(cfg, world, half)
    print(f"plan of {cfg.out_dir}: {cfg.model} with {cfg.backbone}, {world} process(es), "
          f"{'bfloat16' if half else 'float32'}\n\nparameters")
    for name, n in p['parameters'].items():
        print(f"  {name:<28}{n:>16,d}")
    length = ', '.join(f"{side} {L}" for side, (_, L) in p['tokens'].items())
    print(f"\nGiB per GPU, {p['pairs']} pairs per forward, {p['chunks']} forward(s) a step, "
          f"tokens: {length}")
    rows = [('weights', p['weights']), ('gradients', p['gradients']),
            ('optimizer (AdamW)', p['optimizer']), ("DDP's buckets", p['buckets']),
            ('inputs of a step', p['inputs']), ('activations at the peak', p['activations'])]
    rows += [('  gradient cache: features', p['features'])] * (p['chunks'] > 1)
    rows += [('  prefix cache', p.get('prefix', 0))] * ('prefix' in p)
    rows += [('peak of training', p['train']), (f'evaluation, {cfg.eval_batch_size} items',
                                                 p['weights'] + p['optimizer'] + p['eval'])]
    for name, n in rows:
        print(f"  {name:<28}{n / GIB:>16.3f}")
    print(f"\nwith {100 * (SLACK - 1):.0f} % for gaps and {CONTEXT / GIB:.0f} GiB for CUDA: "
          f"{p['need'] / GIB:.1f} GiB a GPU; "
          + ', '.join(f"{card} {'fits' if p['need'] <= size else 'is too small'}"
                      for card, size in cards().items()))
    if 'rows' in p:
        (n, W), size = p['rows']
        print(f"cache_vision: {n} rows x {W} x {size // n // W} bytes = {size / 1e6:.2f} MB a "
              f"video of {cfg.num_frames} frame(s), {size / 1e5:.1f} GB for 10,000")


def cards():
    """What to compare with: name -> bytes."""
    if torch.cuda.is_available():
        here = {torch.cuda.get_device_name(0): torch.cuda.get_device_properties(0).total_memory}
    else:
        memory = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
        here = {f"this machine (no GPU, {memory / GIB:.0f} GiB of RAM)": memory}
    return {**CARDS, **here}


# -----------------------------------------------------------------------------
# sizes as published in the config.json and preprocessor_config.json of the configs' backbones

def qwen2(D, inner, N, heads, kv, vocab=152064, tied=False, **more):
    return dict(hidden_size=D, intermediate_size=inner, num_hidden_layers=N, vocab_size=vocab,
                num_attention_heads=heads, num_key_value_heads=kv, tie_word_embeddings=tied, **more)


def mrope(section, theta, **more):
    return dict(rope_theta=theta, rope_scaling=dict(mrope_section=section, rope_type='default',
                                                    **more))


def mean_std(mean, std):
    return dict(image_mean=mean, image_std=std)


HALVES = mean_std([0.5] * 3, [0.5] * 3)
IMAGENET = mean_std([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
CLIPS = mean_std([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711])
PATCHES = dict(patch_size=14, merge_size=2, temporal_patch_size=2)
IDS = dict(image_token_id=151655, video_token_id=151656, vision_start_token_id=151652,
           vision_end_token_id=151653)


def published_qwen2_vl(text):
    D = text['hidden_size']
    return dict(IDS, model_type='qwen2_vl', **text, **mrope([16, 24, 24], 1e6), vision_config=dict(
        model_type='qwen2_vl', hidden_size=D)), dict(CLIPS, **PATCHES, min_pixels=3136,
                                                     max_pixels=12845056)


def published_qwen3_vl(D, inner, N, heads):
    pre = dict(HALVES, **{**PATCHES, 'patch_size': 16})
    return dict(IDS, model_type='qwen3_vl', tie_word_embeddings=True, text_config=qwen2(
        D, inner, N, heads, 8, 151936, True, head_dim=128, model_type='qwen3_vl_text',
        **mrope([24, 20, 20], 5e6, mrope_interleaved=True)), vision_config=dict(
        depth=24, hidden_size=1024, intermediate_size=4096, num_heads=16, out_hidden_size=D,
        patch_size=16, spatial_merge_size=2, temporal_patch_size=2, num_position_embeddings=2304,
        deepstack_visual_indexes=[5, 11, 17], model_type='qwen3_vl')), dict(
        pre, size=dict(shortest_edge=65536, longest_edge=16777216)), dict(
        pre, size=dict(shortest_edge=4096, longest_edge=25165824))


def published_internvl3(text):
    size = dict(height=448, width=448)
    return dict(model_type='internvl', text_config=dict(text, model_type='qwen2'),
                image_token_id=151667, image_seq_length=256, vision_config=dict(
        model_type='internvl_vision', hidden_size=1024, intermediate_size=4096,
        num_hidden_layers=24, num_attention_heads=16, attention_bias=True, image_size=[448, 448],
        patch_size=[14, 14]), tie_word_embeddings=text['tie_word_embeddings']), dict(
        IMAGENET, size=size), dict(IMAGENET, size=size)


def published_clip(patch):
    return dict(model_type='clip', projection_dim=512, text_config=dict(
        hidden_size=512, intermediate_size=2048, num_attention_heads=8, num_hidden_layers=12),
        vision_config=dict(hidden_size=768, intermediate_size=3072, num_attention_heads=12,
                           num_hidden_layers=12, patch_size=patch)), dict(
        CLIPS, size=dict(shortest_edge=224))


def published_videochat_flash(tower):
    return dict(model_type='videochat_flash_qwen', mm_vision_tower=tower, mm_hidden_size=1024,
                mm_vision_select_layer=-2, mm_local_num_frames=4,
                mm_projector_type='tome16_mlp_hd64', **qwen2(3584, 18944, 28, 28, 4)), {}


SIGLIP = dict(hidden_size=1152, intermediate_size=4304, num_hidden_layers=27,
              num_attention_heads=16, patch_size=14)
PUBLISHED = {
    'OpenGVLab/VideoChat-Flash-Qwen2-7B_res448': published_videochat_flash('umt-hd-large'),
    'OpenGVLab/VideoChat-Flash-Qwen2-7B_res224': published_videochat_flash('umt-large'),
    'Qwen/Qwen2-VL-2B-Instruct': published_qwen2_vl(
        qwen2(1536, 8960, 28, 12, 2, 151936, True)),
    'Qwen/Qwen2-VL-7B-Instruct': published_qwen2_vl(qwen2(3584, 18944, 28, 28, 4)),
    'Qwen/Qwen3-VL-2B-Instruct': published_qwen3_vl(2048, 6144, 28, 16),
    'Qwen/Qwen3-VL-4B-Instruct': published_qwen3_vl(2560, 9728, 36, 32),
    'OpenGVLab/InternVL3-1B-hf': published_internvl3(qwen2(896, 4864, 24, 14, 2, 151674)),
    'OpenGVLab/InternVL3-8B-hf': published_internvl3(qwen2(3584, 18944, 28, 28, 4, 151674)),
    'DAMO-NLP-SG/VideoLLaMA3-7B': (
        dict(qwen2(3584, 18944, 28, 28, 4), model_type='videollama3_qwen2',
             vision_encoder_config=SIGLIP),
        dict(HALVES, patch_size=14, merge_size=2, min_pixels=12544, max_pixels=12845056)),
    'openai/clip-vit-base-patch32': published_clip(32),
    'openai/clip-vit-base-patch16': published_clip(16),
}
