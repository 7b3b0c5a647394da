"""
`python bench_flops.py time`: what one video costs offline and one query online, on this machine.

A video is decoded, resized, goes through the vision tower, then through the LLM (PHA-Net: its
head); a query goes through the LLM and is compared with the gallery. Each is measured several
times: median and spread, FLOPs as torch counts them, FLOP/s. Without --backbone these are the
demo's tiny backbones, or, by default on a GPU, the papers' sizes with random weights: time does
not depend on them. MARS's column "Time" and PHA-Net's "inference time, memory" stand beside it.
"""
import os
from statistics import median
from unittest import mock

import torch
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import backbones
import bench
import data as datalib
import flops
import train
from checkpoint import describe
from flops import GIGA, LLMS, WHOLE, row
from model_mars import MARS, MARSConfig
from model_pha import PHAConfig, PHANet
from model_slq import SLQ, SLQConfig

# the demo's backbones, with the settings of config/demo_*.py that change what is computed
DEMO = {'mars': ('tiny-qwen2-vl', dict(num_frames=8, lora_r=16, lora_alpha=32)),
        'pha': ('tiny-clip', dict(num_frames=6, max_words=24, block_layers=2)),
        'slq': ('tiny-qwen2-vl', dict(num_frames=8))}
CPU = torch.device('cpu')
MIB = 2 ** 20
DEMO_SIDE = 48  # pixels that its clips are decoded to
QWEN2_VL_VISION = dict(depth=32, embed_dim=1280, num_heads=16, mlp_ratio=4, patch_size=14,
                       spatial_merge_size=2, temporal_patch_size=2)  # of 2B and 7B alike


def qwen2_vl_config(llm, tokenizer):
    """Qwen2-VL as published; the special tokens are where this tokenizer has them."""
    ids = {f'{name}_token_id': tokenizer.convert_tokens_to_ids(f'<|{token}|>') for name, token in
           (('image', 'image_pad'), ('video', 'video_pad'), ('vision_start', 'vision_start'),
            ('vision_end', 'vision_end'))}
    text = dict(vocab_size=llm['vocab'], hidden_size=llm['d'], intermediate_size=llm['mlp'],
                num_hidden_layers=llm['layers'], num_attention_heads=llm['heads'],
                num_key_value_heads=llm['kv'], bos_token_id=None,
                rope_parameters=dict(rope_type='default', rope_theta=1e6,
                                     mrope_section=[16, 24, 24]))
    return transformers.Qwen2VLConfig(text_config=text, vision_config=QWEN2_VL_VISION | dict(
        hidden_size=llm['d']), tie_word_embeddings=bool(llm.get('tied')), **ids)


def paper_backbone(name, device, **how):
    """
    (backbone, what it is) of the papers' sizes, random weights made on the device. The tokenizers
    are the demo's: a random model needs no words, only the special tokens.
    """
    here = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'data', 'demo', 'backbones')
    tokenizer = transformers.AutoTokenizer.from_pretrained(os.path.join(here, DEMO[name][0]))
    half = dict(image_mean=[0.5] * 3, image_std=[0.5] * 3)
    if name == 'pha':
        family, what, config, pre = 'clip', 'CLIP ViT-B/32', transformers.CLIPConfig(), half
    elif name == 'mars' and 'videochat_flash_qwen' in backbones.FAMILIES:
        from videochat_flash import VideoChatFlashConfig
        family, what = 'videochat_flash_qwen', 'VideoChat-Flash-Qwen2-7B at 448 pixels'
        config, pre = VideoChatFlashConfig(), {}
    else:  # Table 5 has MARS on it too; SLQ's own are InternVL3 and Qwen3-VL
        llm, what = {'mars': ('Qwen2-7B', 'Qwen2-VL-7B at 224 pixels'),
                     'slq': ('Qwen2-1.5B', 'Qwen2-VL-2B at 448 pixels')}[name]
        side = 224 if name == 'mars' else 448
        family, config = 'qwen2_vl', qwen2_vl_config(LLMS[llm], tokenizer)
        pre = half | dict(patch_size=14, merge_size=2, temporal_patch_size=2,
                          size=dict(shortest_edge=side ** 2, longest_edge=side ** 2))
    return random_backbone(family, config, tokenizer, pre, device, **how), what


def random_backbone(family, config, tokenizer, pre, device, **how):
    """A family's handle on random weights: backbones.py reads a checkpoint, here one is made up."""

    def make(path, model_class, keys, **how):
        with torch.device(device):
            return model_class._from_config(config, **how), tokenizer, pre

    with mock.patch.object(backbones, 'read_parts', make):
        backbone = backbones.FAMILIES[family]('random', 0, **how)
    backbone.model.requires_grad_(False).eval()
    return backbone


def make_model(cfg, device, dtype):
    """-> (model, what it is, is it of the paper's size)"""
    folder, how = DEMO[cfg.model]
    paper = not cfg.backbone and (cfg.size == 'paper' or
                                  cfg.size == 'auto' and device.type == 'cuda')
    if paper:
        backbone, what = paper_backbone(cfg.model, device, dtype=dtype,
                                        attn_implementation='sdpa')
    else:
        what = cfg.backbone or f"the demo's {folder}"
        backbone = backbones.load(cfg.backbone or os.path.join('data', 'demo', 'backbones', folder),
                                  dtype=dtype)
    if paper or cfg.backbone:
        layers = cfg.model == 'pha' and len(backbone.model.text_model.encoder.layers)
        how = dict(block_layers=min(4, layers)) if layers else {}
    config, cls = {'mars': (MARSConfig, MARS), 'pha': (PHAConfig, PHANet),
                   'slq': (SLQConfig, SLQ)}[cfg.model]
    given = dict(num_frames=cfg.frames, num_slots=cfg.model == 'mars' and cfg.slots,
                 num_queries=cfg.model == 'slq' and cfg.slots)
    how = how | {key: n for key, n in given.items() if n} | dict(gradient_checkpointing=False)
    with torch.device(device if paper else 'cpu'):  # LoRA too is made where it will be
        model = cls(config(**how), backbone)
    return model.to(device).eval().requires_grad_(False), what, paper


def read_clips(cfg, num_frames, side):
    """(samples, seconds per clip or None): decoded, or random frames where there is no clip."""
    path, root = os.path.join(cfg.data, 'test.jsonl'), os.path.join(cfg.data, 'videos')
    if not (os.path.isfile(path) and os.path.isdir(root)):
        if cfg.data != 'data/demo':
            raise ValueError(f"data: {path} or {root} is missing")
        print("no clips in data/demo (`python data/demo/prepare.py` renders them in 2 minutes): "
              "random frames,\nand decoding isn't measured")
        return bench.random_samples(cfg.clips, num_frames, 240, 320), None
    videos = datalib.Videos(datalib.load_annotations(path)[:cfg.clips], root, num_frames, size=side)
    samples = [videos[i] for i in range(len(videos))]
    times = [bench.seconds(lambda: [videos[i] for i in range(len(videos))], 1, CPU) / len(videos)
             for _ in range(cfg.runs)]
    return samples, times


class Clock:
    """Seconds and FLOPs inside calls, by name: a tower's call happens inside an encoding's."""

    def __init__(self, device):
        self.device, self.counter = device, None
        self.clear()

    def clear(self):
        self.seconds, self.flops = {}, {}

    def timed(self, name, call):
        import bench

        def run(*args, **kw):
            before, out = self.counter.get_total_flops() if self.counter else 0, []
            spent = bench.seconds(lambda: out.append(call(*args, **kw)), 1, self.device)
            self.seconds[name] = self.seconds.get(name, 0.0) + spent
            if self.counter:
                after = self.counter.get_total_flops()
                self.flops[name] = self.flops.get(name, 0) + after - before
            return out[0]
        return run


def watch_tower(clock, model):
    """Times the vision tower of a family we know; of others it stays part of the LLM's time."""
    backbone = model.backbone
    owner, name = {'qwen2_vl': (getattr(backbone.model, 'model', None), 'get_video_features'),
                   'videochat_flash': (getattr(backbone.model, 'model', None), 'vision_features'),
                   'clip': (getattr(backbone.model, 'vision_model', None), 'forward')
                   }.get(backbone.family, (None, ''))
    if owner is not None:
        setattr(owner, name, clock.timed('vision tower', getattr(owner, name)))


def stages(clock, call, runs, items, head):
    """{part: (seconds per item of each run, FLOPs per item)}; `head` is what isn't the tower."""
    everything = clock.timed(head, call)
    everything()  # warm
    found = {}
    for i in range(runs + 1):
        clock.clear()
        if i < runs:
            everything()
        else:  # once more, counted: attention written out, since a fused kernel may count as zero
            with FlopCounterMode(display=False) as clock.counter, sdpa_kernel(SDPBackend.MATH):
                everything()
            clock.counter = None
        source = clock.seconds if i < runs else clock.flops
        for name in source:
            inside = source.get('vision tower', 0) if name == head else 0
            found.setdefault(name, []).append((source[name] - inside) / items)
    return {name: (x[:-1], x[-1]) for name, x in found.items()}


def query_inputs(cfg, model):
    """One caption that, with its template and slots, has the wanted number of tokens."""
    appended = {'mars': 'num_slots', 'slq': 'num_queries'}.get(cfg.model)
    wanted = (cfg.query_tokens or flops.QUERY_TOKENS) + getattr(model.config, appended or '', 0)
    for words in range(1, 2 * wanted + 2):
        sample = datalib.Sample('query', ' '.join(['a'] * words), None, 0)
        inputs = model.collate([sample])['text']
        if cfg.model == 'pha' or inputs['input_ids'].shape[1] >= wanted:
            break  # PHA-Net pads all texts to max_words
    return inputs


def measure(cfg, device, model, samples, decoding):
    """-> ({'offline' | 'online': {part: (seconds of each run, FLOPs)}}, peak bytes, tokens)"""
    batch, head = samples[:cfg.batch], 'head' if cfg.model == 'pha' else 'LLM'
    resizing = [bench.seconds(lambda: model.collate(batch), 1, CPU) / len(batch)
                for _ in range(cfg.runs)]
    videos = train.to_device(model.collate(batch), device)['video']
    query = train.to_device(query_inputs(cfg, model), device)
    clock = Clock(device)
    watch_tower(clock, model)
    offline = {'decoding': (decoding, 0)} if decoding else {}
    offline['resizing, prompt'] = (resizing, 0)
    with torch.no_grad(), train.autocast_of(cfg, device)():
        features, text = model.encode_video(videos), model.encode_text(query)
        rows = torch.arange(cfg.videos or 1000, device=device) % len(batch)
        gallery = {k: x[rows] for k, x in features.items()}
        offline |= stages(clock, lambda: model.encode_video(videos), cfg.runs, len(batch), head)
        online = stages(clock, lambda: model.encode_text(query), cfg.runs, 1, 'text, ' + head)
        online |= stages(clock, lambda: model.similarity(text, gallery), cfg.runs, 1, 'similarity')
        peaks = {'offline': bench.peak_memory(lambda: model.encode_video(videos), device),
                 'online': bench.peak_memory(
                     lambda: model.similarity(model.encode_text(query), gallery), device)}
        if cfg.model == 'pha':  # what Table 12 calls inference time, as far as it can be told
            many = {k: x.expand(flops.BATCH, *x.shape[1:]) for k, x in text.items()}
            online |= stages(clock, lambda: model.similarity(many, gallery), cfg.runs, 1, ROW)
    tokens = {k: x['input_ids'].shape[1] for k, x in (('video', videos), ('query', query))
              if 'input_ids' in x}
    return {'offline': offline, 'online': online}, peaks, tokens


def time_table(cfg):
    """Measures, prints, -> (rows, what else the JSON holds)."""
    transformers.utils.logging.disable_progress_bar()
    _, _, device = train.init_distributed(cfg.device)
    where, versions = bench.machine(device), describe(cfg)['versions']
    print('  '.join(f'{k} {v}' for k, v in {**where, **versions}.items()))
    if where['load_average'] > 0.5 * where['cores']:
        print("the machine is busy: trust no millisecond")
    model, what, paper = make_model(cfg, device, train.torch_dtype(cfg, device))
    samples, decoding = read_clips(cfg, model.config.num_frames,
                                   0 if paper or cfg.backbone else DEMO_SIDE)
    parts, peaks, tokens = measure(cfg, device, model, samples, decoding)
    print(f"\n{cfg.model} on {what}: {min(cfg.batch, len(samples))} videos per forward, "
          f"{model.config.num_frames} frames, {cfg.videos or 1000:,} in the gallery,\nper item; "
          "tokens of " + ', '.join(f"a {k} {n}" for k, n in tokens.items()))
    rows = timing_rows(cfg, model, parts, peaks) + paper_columns(cfg, model, parts, peaks, paper)
    return rows, {'backbone': what, 'settings': vars(cfg), 'machine': where, 'versions': versions}


NAMES = {'mars': 'MARS', 'pha': 'PHA-Net', 'slq': 'SLQ'}
ROW = '64 texts, similarity'
NOT_ENCODING = ('decoding', 'resizing, prompt', ROW)


def timing_rows(cfg, model, parts, peaks):
    """Prints the split; -> rows."""
    name, rows = NAMES[cfg.model], []
    print(f"  {'':<28}{'ms':>10}   {'(min .. max)':<24}{'GFLOPs':>11}{'GFLOP/s':>11}")
    for side, unit in (('offline', 'video'), ('online', 'query')):
        for part, (times, work) in parts[side].items():
            ms, cell = [1e3 * t for t in times], f'{side}, {part}'
            spread = f"({min(ms):.3f} .. {max(ms):.3f})"
            rate = work / median(times) / GIGA
            print(f"  {cell:<28}{median(ms):>10.3f}   {spread:<24}"
                  + (f"{work / GIGA:>11,.4f}{rate:>11,.1f}" if work else ""))
            rows += [row(name, f'{cell}, ms/{unit}{end}', f(ms), 'measured') for end, f in
                     (('', median), (', least', min), (', most', max))]
            if work:
                rows += [row(name, f'{cell}, GFLOPs/{unit}', work / GIGA, 'flops'),
                         row(name, f'{cell}, GFLOP/s', rate, 'measured')]
    weights = weight_bytes(model)
    print(f"  peak memory: weights {weights / MIB:,.1f} MiB; above them offline "
          f"{peaks['offline'] / MIB:,.1f}, online {peaks['online'] / MIB:,.1f} MiB")
    return rows + [row(name, 'weights, MiB', weights / MIB, 'measured'),
                   *(row(name, f'{side}, peak MiB above the weights', x / MIB, 'measured')
                     for side, x in peaks.items())]


def weight_bytes(model):
    return sum(p.numel() * p.element_size() for p in model.parameters())


def paper_columns(cfg, model, parts, peaks, paper):
    """MARS's Time and PHA-Net's inference time and memory, beside what this machine comes to."""
    def whole(side):
        return sum(median(t) for part, (t, _) in parts[side].items() if part not in NOT_ENCODING)

    if cfg.model == 'pha':
        memory = (weight_bytes(model) + max(peaks.values())) / 1e6
        cells = [(f'Table 12, inference time, ms: 64 texts x {cfg.videos or 1000:,} videos',
                  1e3 * median(parts['online'][ROW][0]), '407.0', 'RTX 3090, 1,000 videos',
                  cfg.videos in (0, 1000)),
                 (f'Table 12, inference memory, MB: batch {cfg.batch}', memory, '3044.35',
                  'batch 64', cfg.batch == flops.BATCH)]
    else:
        mars = cfg.model == 'mars'
        cells = [('Table 4, Time, s: 7,920 videos, 7,920 queries' if mars else
                  's for 7,920 videos and 7,920 queries',
                  (whole('offline') + whole('online')) * WHOLE, '3,626.1' if mars else None,
                  'A100', 'videochat' in model.backbone.family)]
    for cell, x, theirs, on, alike in cells:
        other = "" if paper and alike else ", not the same case"
        print(f"  {cell}: {x:,.1f}" + (f"; the paper has {theirs} ({on}){other}" if theirs else ""))
    if 'decoding' in parts['offline'] and cfg.model == 'mars':
        print(f"  with decoding {median(parts['offline']['decoding'][0]) * WHOLE:,.1f} s more; "
              "what the paper's time holds is not said")
    return [row(NAMES[cfg.model], cell, x, 'measured', theirs if paper and alike else None)
            for cell, x, theirs, _, alike in cells]
