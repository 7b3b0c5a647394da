"""
Time and memory of the things that could be done more cheaply, measured side by side.

    $ make bench                                       # all of them, on random and demo backbones
    $ python bench.py --only=encode --backbone=Qwen/Qwen2-VL-2B-Instruct --batch=32   # on a GPU

Variants take turns, A B C, B C A, ..., so that a busy machine slows all of them; a ratio is taken
within a round, and its median and range over rounds are printed. Memory is the peak of live tensor
bytes above those held before the call (weights are not in it): what the CUDA allocator counts, and
the same sum over the CPU allocator's events. A bench is one function -> dict; the table BENCHES.
"""
# settings
only = ''               # names of benches, with commas between; empty: all of them
rounds = 5              # times that each variant is measured
json = ''               # also write the JSON lines to this file
device = 'auto'         # cuda or cpu; auto: a GPU if there is one
dtype = 'auto'          # autocast and frozen weights: bfloat16, float32; auto: bfloat16 on a GPU
backbone = ''           # folder or hub id of an MLLM; empty: a random Qwen2-VL, and the demo's
layers = 12             # decoder layers of the random one
hidden = 512            # its width
lora_r = 128            # LoRA rank (MARS, App. B) where a bench uses LoRA
num_frames = 16         # frames per video; 16 are 256 vision tokens of the random backbone
batch = 4               # encode: videos per forward
demo_batch = 32         # encode: the same for the demo's backbone, which is far smaller
train_batch = 8         # grad_cache, slq: pairs of the global batch
train_frames = 2        # grad_cache: frames per video; few, because a step is several passes
train_rounds = 3        # grad_cache, matching, slq: rounds
chunks = (4, 1)         # grad_cache: chunk sizes
data = 'data/demo'      # loader: its val.jsonl and videos/; backbones/tiny-qwen2-vl for encode
clips = 50              # loader: how many of them
decode_frames = 12      # decode: frames per clip
decode_seconds = 30     # decode: length of the clips, 640x360 at 25 frames per second
pairs = 1000            # matching: texts and videos
items = 100_000         # search: MARS items of 4 slots x slot_width, random: 1.43 GB on disk and
slot_width = 896        # three times that in memory (with the paper's 3,584: 5.7 GB and 17 GB)
pha_run = 'out/demo_pha'  # search: a PHA-Net whose preselection is compared with scoring all
# end of settings

if __name__ == '__main__':  # before torch is imported, so that --help and typos answer at once
    from configurator import at_once, check_output, configure
    cfg = at_once(lambda: configure(__file__))
    at_once(lambda: check_output('json', cfg.json))

import os
os.environ.setdefault('KINETO_LOG_LEVEL', '99')  # torch's profiler is silent, before torch loads

import gc
import importlib.util
import tempfile
import time
from dataclasses import replace
from functools import partial
from json import dump, dumps
from statistics import median
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
import transformers

import backbones
import data as datalib
import eval as evaluation
import search as searchlib
import shelf
import train
import video
from checkpoint import describe
from model_mars import MARS, MARSConfig
from model_pha import PHAConfig, PHANet, dpc_knn, merge
from model_slq import SLQ, SLQConfig

GOAL = 1.10  # encoding may cost 10% more than the bare backbone, in time and in memory
DECODE_GOALS = {'OpenCV, all frames': 5.0, 'bare decord': 0.9}  # times as fast as these
SLQ_GOALS = {'faster than plain': 1.8, 'faster than plain with checkpointing': 2.6,
             'less memory than plain': 4.0}  # of the prefix-cache step, at L about 280 and N = 20
SEARCH_GOAL = 1.2  # a query may take 20% longer than the faster of torch and faiss
MIB = 2 ** 20

# -----------------------------------------------------------------------------
# measuring

def peak_memory(run, device):
    """Peak of live tensor bytes during run(), above what was live before it."""
    if device.type == 'cuda':
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    gc.collect()  # what an earlier run left in cycles must not be freed, so counted, in this one
    # the resident set would also show what malloc keeps, so a second run looks different
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU],
                                profile_memory=True) as profile:
        run()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == '[memory]']
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()  # negative when memory is given back
        peak = max(peak, now)
    return peak


def seconds(run, reps, device):
    if device.type == 'cuda':
        torch.cuda.synchronize(device)
    begun = time.perf_counter()
    for _ in range(reps):
        run()
    if device.type == 'cuda':
        torch.cuda.synchronize(device)
    return (time.perf_counter() - begun) / reps


def compare(variants, rounds, device, memory=True):
    """{name: run} -> a row per variant; ratios are to the first one."""
    names = list(variants)
    warm = [seconds(run, 1, device) for run in variants.values()]
    reps = max(1, round(0.3 / max(warm[0], 1e-4)))  # short runs: several of them per measurement
    peaks = {n: peak_memory(run, device) for n, run in variants.items()} if memory else {}
    times = {n: [] for n in names}
    for r in range(rounds):
        for k in range(len(names)):
            name = names[(r + k) % len(names)]
            times[name].append(seconds(variants[name], reps, device))
    rows = []
    for name in names:
        ratios = [t / first for t, first in zip(times[name], times[names[0]])]
        row = {'variant': name, 'ms': 1e3 * median(times[name]), 'time_ratio': median(ratios),
               'time_ratio_min': min(ratios), 'time_ratio_max': max(ratios)}
        if memory:
            row.update(peak_mib=peaks[name] / MIB,
                       memory_ratio=peaks[name] / max(peaks[names[0]], 1))
        rows.append(row)
    return rows


def show(title, rows):
    """The table for people."""
    print(f"\n{title}")
    memory = f"{'peak MiB':>9}{'ratio':>8}" if 'peak_mib' in rows[0] else ''
    print(f"  {'':<28}{'ms':>9}   {'time ratio (min .. max)':<27}{memory}")
    for r in rows:
        time_ratio = f"{r['time_ratio']:.3f} ({r['time_ratio_min']:.3f} .. " \
                     f"{r['time_ratio_max']:.3f})"
        memory = f"{r['peak_mib']:>9.1f}{r['memory_ratio']:>8.3f}" if 'peak_mib' in r else ''
        print(f"  {r['variant']:<28}{r['ms']:>9.1f}   {time_ratio:<27}{memory}", flush=True)


def machine(device):
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()
    load = os.getloadavg()[0] if hasattr(os, 'getloadavg') else -1.0
    name = torch.cuda.get_device_name(device) if device.type == 'cuda' else 'cpu'
    return {'device': name, 'cores': cores, 'threads': torch.get_num_threads(),
            'load_average': round(load, 2)}


# -----------------------------------------------------------------------------
# what is measured: models and items

def random_qwen2vl(folder, layers, hidden):
    """
    A random Qwen2-VL of the native class, saved in `folder`: large enough that the time goes into
    matrix products. Its vision tower is small, so that most of the time and the peak of the memory
    are the decoder's, where the hooks are; a large one would hide them. A word is a token and two
    frames are 4 x 8: with 16 frames, L is about 290 (the paper's is 291, by Table 4).
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2VLConfig, Qwen2VLForConditionalGeneration
    special = ['<|endoftext|>', '<|im_start|>', '<|im_end|>', '<|vision_start|>', '<|vision_end|>',
               '<|video_pad|>', '<|image_pad|>']
    words = ['<unk>', *special, *(f'word{i}' for i in range(100))]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token='<unk>'))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token='<unk>', eos_token='<|im_end|>',
        pad_token='<|endoftext|>', additional_special_tokens=special).save_pretrained(folder)

    def heads(width):
        return max(1, width // 64)

    half = hidden // heads(hidden) // 2
    config = Qwen2VLConfig(
        text_config=dict(vocab_size=len(words), hidden_size=hidden, intermediate_size=3 * hidden,
                         num_hidden_layers=layers, num_attention_heads=heads(hidden),
                         num_key_value_heads=2 - heads(hidden) % 2, tie_word_embeddings=True,
                         bos_token_id=None, eos_token_id=3, pad_token_id=1,
                         rope_parameters=dict(  # sections for time, height, width: 2 : 3 : 3
                             rope_type='default', rope_theta=1e6,
                             mrope_section=[half - half * 3 // 8 * 2, *[half * 3 // 8] * 2])),
        vision_config=dict(depth=2, embed_dim=hidden // 4, hidden_size=hidden,
                           num_heads=heads(hidden // 4), mlp_ratio=2, patch_size=14,
                           spatial_merge_size=2, temporal_patch_size=2),
        tie_word_embeddings=True, image_token_id=7, video_token_id=6, vision_start_token_id=4,
        vision_end_token_id=5)
    torch.manual_seed(0)
    Qwen2VLForConditionalGeneration(config).save_pretrained(folder)
    pixels = 112 * 224  # 4 x 8 tokens of 28 x 28 pixels each
    with open(os.path.join(folder, 'preprocessor_config.json'), 'w') as f:
        dump(dict(image_processor_type='Qwen2VLImageProcessor', patch_size=14, merge_size=2,
                  temporal_patch_size=2, size=dict(shortest_edge=pixels, longest_edge=pixels),
                  image_mean=[0.5] * 3, image_std=[0.5] * 3), f)


def random_samples(n, num_frames, height=112, width=224):
    rng = np.random.default_rng(0)
    return [datalib.Sample(
        str(i), ' '.join(f'word{w}' for w in rng.integers(0, 100, 16)),
        rng.integers(0, 256, (num_frames, height, width, 3), dtype=np.uint8), i)
        for i in range(n)]


def make_mars(path, cfg, device, **config):
    dtype = train.torch_dtype(cfg, device)
    torch.manual_seed(0)
    return MARS(MARSConfig(num_frames=cfg.num_frames, **config),
                backbones.load(path, dtype=dtype)).to(device)


def with_backbone(bench):
    """bench(cfg, device, path, name) gets --backbone, or a random one in a temporary folder."""
    def run(cfg, device):
        if cfg.backbone:
            return bench(cfg, device, cfg.backbone, cfg.backbone)
        with tempfile.TemporaryDirectory() as folder:
            random_qwen2vl(folder, cfg.layers, cfg.hidden)
            return bench(cfg, device, folder, f'random Qwen2-VL {cfg.layers} x {cfg.hidden}')
    return run


# -----------------------------------------------------------------------------
# the benches

@with_backbone
def encode(cfg, device, path, name):
    """MARS.encode_video against the bare backbone and against output_hidden_states."""
    frame = 112, 224
    cases = [(path, name, cfg.batch, frame, 0), (path, name, cfg.batch, frame, cfg.lora_r)]
    demo = os.path.join(cfg.data, 'backbones', 'tiny-qwen2-vl')
    if not cfg.backbone and os.path.isdir(demo):
        cases.append((demo, "the demo's Qwen2-VL", cfg.demo_batch, (96, 96), cfg.lora_r))
    return {'goal': GOAL, 'cases': [encode_case(cfg, device, *case) for case in cases]}


def encode_case(cfg, device, path, name, batch, frame, lora_r):
    model = make_mars(path, cfg, device, lora_r=lora_r).eval()
    samples = [replace(s, caption=None) for s in random_samples(batch, cfg.num_frames, *frame)]
    # the bare forward gets the same inputs, so the same L: the M slot tokens are in input_ids
    inputs = train.to_device(model.collate(samples)['video'], device)
    autocast = train.autocast_of(cfg, device)
    variants = {'bare backbone': partial(model.backbone.run, inputs),
                'MARS.encode_video': partial(model.encode_video, inputs),
                'output_hidden_states + fuse': partial(all_hidden_states, model, inputs)}
    with torch.no_grad(), autocast():
        ours, theirs = (variants[v]()['slots'] for v in list(variants)[1:])
        if not torch.allclose(ours, theirs, atol=1e-2 if autocast.keywords['enabled'] else 1e-4):
            raise ValueError("encode: hooks and output_hidden_states give different slots, so the "
                             "comparison is void; run tests/test_model_mars.py")
        rows = compare(variants, cfg.rounds, device)
    L = inputs['input_ids'].shape[1]
    lora = f'LoRA r={lora_r} in all' if lora_r else 'no LoRA'
    case = f"{name}, {lora}, {batch} videos of {cfg.num_frames} frames, L {L}"
    show(f"encode: {case}", rows)
    met = max(rows[1]['time_ratio'], rows[1]['memory_ratio']) <= GOAL
    print(f"  goal: MARS at most {GOAL:.2f} in time and memory: {'met' if met else 'NOT met'}")
    return {'case': case, 'rows': rows}


def all_hidden_states(model, inputs):
    """The textbook way to the same slots: keep [N, B, L, D], then pick the read positions."""
    known = {k: v for k, v in inputs.items() if k not in ('append_pos', 'cut')}
    pos = inputs['append_pos']  # [B, M]
    with model._hooks(pos, [], []):  # only puts the slot tokens in
        hidden = model.backbone.decoder(**known, use_cache=False,
                                        output_hidden_states=True).hidden_states
    rows = torch.arange(len(pos), device=pos.device)[:, None]
    h = torch.stack([x[rows, pos - 1] for x in hidden[1:]])  # [N, B, M, D], the last one normed
    return {'slots': model.fuse(h)}


@with_backbone
def grad_cache(cfg, device, path, name):
    """train.cached_step against train.plain_step on the same global batch."""
    cases, samples = [], random_samples(cfg.train_batch, cfg.train_frames)
    ids, autocast = torch.arange(cfg.train_batch, device=device), train.autocast_of(cfg, device)
    for checkpointing in (False, True):
        model = make_mars(path, cfg, device, lora_r=cfg.lora_r,
                          gradient_checkpointing=checkpointing)

        def variant(step, chunk):
            chunks, _, _ = train.collate_chunks(samples, model.collate, chunk)
            chunks = [train.to_device(c, device) for c in chunks]

            def run():
                step(model, chunks if step is train.cached_step else chunks[0], ids, autocast)
                model.zero_grad(set_to_none=True)
            return run

        variants = {'plain_step': variant(train.plain_step, 0)}
        variants.update({f'cached_step, chunks of {c}': variant(train.cached_step, c)
                         for c in cfg.chunks if c < cfg.train_batch})
        rows = compare(variants, cfg.train_rounds, device)
        case = (f"{name}, LoRA r={cfg.lora_r}, gradient checkpointing "
                f"{'on' if checkpointing else 'off'}, global batch {cfg.train_batch} pairs, "
                f"{cfg.train_frames} frames")
        show(f"grad_cache: {case}", rows)
        cases.append({'case': case, 'rows': rows})
    return {'cases': cases}


@with_backbone
def slq(cfg, device, path, name):
    """A step of SLQ with the prefix cache against the plain pass over everything."""
    samples = random_samples(cfg.train_batch, cfg.num_frames)
    autocast = train.autocast_of(cfg, device)
    ids = torch.arange(cfg.train_batch, device=device)

    def model(**config):
        torch.manual_seed(0)
        config = SLQConfig(num_frames=cfg.num_frames, **config)
        return SLQ(config, backbones.load(path, dtype=train.torch_dtype(cfg, device))).to(device)

    models = {
        'plain': model(prefix_cache=False, gradient_checkpointing=False),
        'plain, checkpointing': model(prefix_cache=False, gradient_checkpointing=True),
        'prefix cache': model(gradient_checkpointing=False),
        'prefix cache, checkpointing': model(),  # the model's default settings
        'the same in chunks of 2': model(content_chunk=2)}
    batch = train.to_device(models['plain'].collate(samples), device)
    text = F.normalize(torch.randn(cfg.train_batch, models['plain'].backbone.hidden_size), dim=-1)

    def videos_only(m):
        with autocast():
            z = m.encode_video(batch['video'])
        m.loss({'z': text.to(device)}, z, ids)[0].backward()

    def both_sides(m):
        train.plain_step(m, batch, ids, autocast)

    N, cases = models['plain'].config.num_queries, []
    L, L_text = (batch[side]['input_ids'].shape[1] - N for side in ('video', 'text'))
    for run, what in ((videos_only, f'videos of {L} tokens, {N} queries'),
                      (both_sides, f'the same and texts of {L_text} tokens')):
        def variant(m):
            def step():
                run(m)
                m.zero_grad(set_to_none=True)
            return step

        grads = []
        for m in models.values():
            run(m)
            grads.append(m.queries.grad.clone())
            m.zero_grad(set_to_none=True)
        off = max(((g - grads[0]).norm() / grads[0].norm()).item() for g in grads)
        if not off < (0.1 if autocast.keywords['enabled'] else 1e-3):
            raise ValueError(f"slq: gradients differ by {off:.1e}, so the comparison is void; run "
                             "tests/test_model_slq.py")
        rows = compare({n: variant(m) for n, m in models.items()}, cfg.train_rounds, device)
        case = f"{name}, batch {cfg.train_batch}, {what}; gradients within {off:.0e}"
        show(f"slq: {case}", rows)
        cases.append({'case': case, 'rows': rows})
        for row in rows[2:] if run is videos_only else ():
            got = (1 / row['time_ratio'], rows[1]['time_ratio'] / row['time_ratio'],
                   1 / row['memory_ratio'])
            print(f"  {row['variant']}: " + ', '.join(
                f"{x:.2f}x {what} (goal {goal}: {'met' if x >= goal else 'NOT met'})"
                for x, (what, goal) in zip(got, SLQ_GOALS.items())))
    return {'goals': SLQ_GOALS, 'cases': cases}


def loader(cfg, device):
    """Reading clips: PyAV with and without its process, decord, and the frame cache."""
    path, root = os.path.join(cfg.data, 'val.jsonl'), os.path.join(cfg.data, 'videos')
    if not os.path.isfile(path) or not os.path.isdir(root):
        return {'skipped': f"{path} or {root} is missing; run `python data/demo/prepare.py` first"}
    items = datalib.load_annotations(path)[:cfg.clips]
    with tempfile.TemporaryDirectory() as cache:
        def variant(**how):
            videos = datalib.Videos(items, root, cfg.num_frames, **how)
            return lambda: [videos[i] for i in range(len(videos))]

        variants = {'PyAV': variant(), 'PyAV, no deadline': variant(video_timeout=0),
                    'frame cache': variant(frame_cache=cache)}
        if importlib.util.find_spec('decord'):
            variants['decord'] = variant(reader='decord')
        rows = compare(variants, cfg.rounds, device, memory=False)
    for row in rows:
        row['items_per_s'] = 1e3 * len(items) / row['ms']
    case = f"{len(items)} clips of {cfg.data}, {cfg.num_frames} frames each, one process"
    show(f"loader: {case}", rows)
    print("  clips/s: " + ", ".join(f"{r['variant']} {r['items_per_s']:.0f}" for r in rows))
    return {'cases': [{'case': case, 'rows': rows}]}


def render(path, n, gop, seed=0):
    """n frames of 640x360: a texture that moves, a square that crosses it, noise. x264's defaults
    but for the distance of keyframes."""
    import av
    rng = np.random.default_rng(seed)
    h, w = 360, 640
    texture = rng.integers(0, 256, (h // 8 + 40, w // 8 + 140, 3), np.uint8)
    texture = texture.repeat(8, 0).repeat(8, 1)
    with av.open(path, 'w') as out:
        s = out.add_stream('libx264', rate=25)
        s.width, s.height, s.pix_fmt, s.options = w, h, 'yuv420p', {'g': str(gop)}
        for i in range(n):
            x, y = int(1.2 * i) % 1000, int(120 + 100 * np.sin(i / 40))
            frame = texture[y:y + h, x:x + w].astype(np.int16)
            frame[150:210, 5 * i % 580:5 * i % 580 + 60] = 255, 40, 20
            frame += rng.integers(-6, 7, frame.shape, np.int16)
            frame = frame.clip(0, 255).astype(np.uint8)
            out.mux(s.encode(av.VideoFrame.from_ndarray(frame, format='rgb24')))
        out.mux(s.encode())


def opencv_frames(path, T):
    """CLIP4Clip's way, to read all and to sample then; one thread, as a loader's worker has."""
    import cv2
    capture = cv2.VideoCapture(path, cv2.CAP_FFMPEG, [cv2.CAP_PROP_N_THREADS, 1])
    frames, ok = [], True
    while ok:
        ok, frame = capture.read()
        if ok:
            frames.append(cv2.cvtColor(frame, cv2.COLOR_BGR2RGB))
    return np.stack([frames[(2 * i + 1) * len(frames) // (2 * T)] for i in range(T)])


def decord_frames(path, T):
    import decord
    video = decord.VideoReader(path, ctx=decord.cpu(0), num_threads=1)
    return video.get_batch([(2 * i + 1) * len(video) // (2 * T) for i in range(T)]).asnumpy()


def decode(cfg, device):
    """Frames of a long clip: ours, bare decord, and all frames by OpenCV; the same pixels."""
    others = {'OpenCV, all frames': (opencv_frames, 'cv2', 'opencv-python-headless'),
              'bare decord': (decord_frames, 'decord', 'decord')}
    for name, (_, module, package) in list(others.items()):
        if importlib.util.find_spec(module) is None:
            print(f"\ndecode: without {name}; pip install {package}")
            del others[name]
    cases, T = [], cfg.decode_frames
    with tempfile.TemporaryDirectory() as folder:
        for gop in (250, 30):
            path = os.path.join(folder, f'{gop}.mp4')
            render(path, 25 * cfg.decode_seconds, gop)
            process = video.Process(60)
            variants = {'ours': lambda: process.call('decode', path, T)[0],
                        'ours, no deadline': lambda: video.decode(path, T)[0],
                        **{n: partial(run, path, T) for n, (run, _, _) in others.items()}}
            want = variants['ours']()
            off = {n: np.abs(run().astype(int) - want).max() for n, run in variants.items()}
            if max(off.values()) > 3:
                raise ValueError(f"decode: the ways differ by {off}, so the comparison is void")
            rows = compare(variants, cfg.rounds, device, memory=False)
            case = (f"{T} frames of {cfg.decode_seconds} s of 640x360 H.264, a keyframe every "
                    f"{gop} frames; pixels within {max(off.values())}")
            show(f"decode: {case}", rows)
            for r in rows:
                goal = DECODE_GOALS.get(r['variant'])
                if goal:
                    met = 'met' if r['time_ratio'] >= goal else 'NOT met'
                    print(f"  ours is {r['time_ratio']:.2f} times as fast as {r['variant']} (goal "
                          f"{goal}: {met})")
            cases.append({'case': case, 'rows': rows})
    return {'goals': DECODE_GOALS, 'cases': cases}


def pha_model(device):
    """A PHA-Net of the paper's width on a CLIP of few layers: its matching and merging are real."""
    text = dict(num_hidden_layers=4, vocab_size=100, bos_token_id=98, eos_token_id=99)
    vision = dict(num_hidden_layers=1, hidden_size=64, intermediate_size=64, num_attention_heads=1)
    torch.manual_seed(0)
    clip = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision))
    return PHANet(PHAConfig(), backbones.DualEncoder('clip', 'random', clip, None, None, (0.5,) * 3,
                                                     (0.5,) * 3)).to(device).eval()


def pha_tokens(n, N, P, least, device, D=512):
    """n items of least..N valid tokens and P prototypes: x [n, N + P, D], mask."""
    rng = torch.Generator().manual_seed(N)
    words = torch.randint(least, min(N, 17) + 1, (n,), generator=rng)
    mask = (torch.arange(N) < words[:, None]) | (least == N)  # [n, N]
    mask = F.pad(mask, (0, P), value=True)
    return torch.randn(n, N + P, D, generator=rng).to(device), mask.to(device)


@torch.no_grad()
def matching(cfg, device):
    """Scores of cfg.pairs texts x videos: PHANet.similarity against Eq. 3 pair by pair."""
    model, n = pha_model(device), cfg.pairs
    sides = []
    for side, N, least in (('text', 32, 6), ('video', 12, 12)):
        features = {}
        for level, size, P, low in (('I', N, 3, least), ('L', 6, 1, 6)):
            x, mask = pha_tokens(n, size, P, low, device)
            features |= model._level(level, side, x * mask[..., None], mask)[0]
        features['G'] = F.normalize(features['L'][:, 0], dim=-1)
        sides.append(features)

    def ours(levels):
        def run():
            model.levels = levels
            return evaluation.similarity(model.similarity, *sides, device=device)
        return run

    def textbook(chunk):
        # the field's usual way: all token products of a chunk of pairs at once, as an einsum, with
        # features normalised and weighted anew for every pair of chunks
        def run():
            rows = []
            for t in chunked(sides[0], chunk):
                row = []
                for v in chunked(sides[1], chunk):
                    x, y = F.normalize(t['I'], dim=-1), F.normalize(v['I'], dim=-1)
                    X = torch.einsum('atd,bvd->abtv', x, y)
                    X = torch.einsum('abtv,at->abtv', X, t['I_mask'])
                    X = torch.einsum('abtv,bv->abtv', X, v['I_mask'])
                    row.append((torch.einsum('abt,at->ab', X.max(-1).values, t['I_gamma'])
                                + torch.einsum('abv,bv->ab', X.max(-2).values, v['I_gamma'])) / 2)
                rows.append(torch.cat(row, 1))
            return torch.cat(rows)
        return run

    def chunked(features, size):
        return ({k: x[i:i + size] for k, x in features.items()} for i in range(0, n, size))

    every, individual = dict(model.levels), {'I': 1.0}
    gap = (ours(individual)() - textbook(32)().cpu()).abs().max().item()
    if gap > 1e-5:
        raise ValueError(f"matching: the two ways differ by {gap}; run tests/test_model_pha.py")
    variants = {'level I, textbook, chunks of 32': textbook(32),
                'level I, textbook, chunks of 64': textbook(64),
                'level I, PHANet.similarity': ours(individual),
                'levels I L G, the same': ours(every)}
    rows = compare(variants, cfg.train_rounds, device)
    case = f"{n} texts of 6 to 17 words x {n} videos of 12 frames, D 512; largest gap {gap:.1e}"
    show(f"matching: {case}", rows)
    return {'cases': [{'case': case, 'rows': rows}]}


@torch.no_grad()
def clustering(cfg, device):
    """DPC-KNN and the merge of 128 items, against the same by cdist, where and index_add."""
    def textbook(x, mask, score, M, k=3):
        B, N, D = x.shape
        d = torch.cdist(x, x) / D ** 0.5
        d = torch.where(mask[:, None, :], d, d.max() + 1)
        rho = (-(d.topk(k, largest=False).values ** 2).mean(-1)).exp() * mask
        denser = (rho[:, None, :] > rho[:, :, None]).to(d.dtype)
        delta = (d * denser + d.flatten(1).max(1).values[:, None, None] * (1 - denser)).min(-1)[0]
        centers = (rho * delta).topk(M).indices
        to_center = d[torch.arange(B, device=x.device)[:, None], centers]  # [B, M, N]
        assign = to_center.argmin(1)
        batch = torch.arange(B, device=x.device)[:, None]
        assign[batch.expand(B, M).reshape(-1), centers.reshape(-1)] = \
            torch.arange(M, device=x.device).repeat(B)
        flat = (assign + batch * M).reshape(-1)
        w = (score.exp() * mask)[..., None]
        total = x.new_zeros(B * M, 1).index_add(0, flat, w.reshape(B * N, 1)) + 1e-6
        part = w / total[flat].view(B, N, 1)
        return x.new_zeros(B * M, D).index_add(0, flat, (x * part).reshape(B * N, D)).view(B, M, D)

    def ours(x, mask, score, M):
        assign, _ = dpc_knn(x, mask, M)
        return merge(x, score.masked_fill(~mask, -torch.inf), assign, M)[0]

    cases = []
    for title, N, P, least, M in (('text, 35 tokens to 6', 32, 3, 6, 6),
                                  ('video, 15 tokens to 6', 12, 3, 12, 6)):
        x, mask = pha_tokens(128, N, P, least, device)
        x = F.layer_norm(x, x.shape[-1:])
        score = torch.randn(x.shape[:2], device=device)
        a, b = ours(x, mask, score, M), textbook(x, mask, score, M)
        same = (a.sum(1) - b.sum(1)).abs().amax(1) < 1e-2  # the order of clusters may differ
        if same.float().mean() < 0.99:
            raise ValueError(f"clustering: the two ways agree on {same.sum()} of 128 items only")
        rows = compare({'cdist, where, index_add': partial(textbook, x, mask, score, M),
                        'dpc_knn + merge': partial(ours, x, mask, score, M)}, cfg.rounds, device)
        show(f"clustering: batch 128, {title}", rows)
        cases.append({'case': title, 'rows': rows})
    return {'cases': cases}


class Made(shelf.Writer):
    """An index of vectors x [n, M, D] that no video stands behind."""

    def __init__(self, folder, x, dtype):
        super().__init__(folder, dict(format=shelf.FORMAT, run={}, moments=0.0, dtype=dtype))
        self.x, self.dtype = x, dtype
        self.lines = {f'{i:09d}.mp4': dict(path=f'{i:09d}.mp4', size=1, mtime_ns=1, end=1.0,
                                           digest='0' * 16, moments=[]) for i in range(len(x))}

    def tensors(self, line):
        i = int(line['path'][:9])
        return shelf.pack({'slots': self.x[i:i + 1]}, self.dtype)


@torch.no_grad()
def search(cfg, device):
    """A query in an index on disk against a product of matrices in memory, by torch and by faiss;
    and what PHA-Net's preselection finds of what scoring everything finds."""
    M, n, device = 4, cfg.items, torch.device('cpu')
    rng = torch.Generator().manual_seed(0)
    x = torch.empty(n, M, cfg.slot_width)
    for part in x.split(4096):
        part.copy_(F.normalize(torch.randn(part.shape, generator=rng), dim=-1))
    queries = {'slots': F.normalize(torch.randn(32, M, cfg.slot_width, generator=rng), dim=-1)}
    one = {'slots': queries['slots'][:1]}
    model = SimpleNamespace(config=SimpleNamespace(aggregation='uniform'),
                            beta=lambda: torch.full((M,), 1 / M))
    model.similarity = partial(MARS.similarity, model)
    run = SimpleNamespace(model=model, device=device)
    q = searchlib.as_vectors(model, one, True)  # [1, M * D]
    flat = x.flatten(1)

    with tempfile.TemporaryDirectory() as folder:
        readers = {}
        for dtype in ('fp32', 'int8'):
            Made(os.path.join(folder, dtype), x, dtype).compact()
            readers[dtype] = shelf.Reader(os.path.join(folder, dtype))
        variants = {'torch, matmul and topk': lambda: (q @ flat.T).topk(10)}
        if importlib.util.find_spec('faiss'):
            import faiss
            faiss.omp_set_num_threads(torch.get_num_threads())
            exact = faiss.IndexFlatIP(flat.shape[1])
            exact.add(flat.numpy())
            variants['faiss, IndexFlatIP'] = lambda: exact.search(q.numpy(), 10)
        else:
            print("\nsearch: faiss is not installed, so it is left out: pip install faiss-cpu")
        for dtype, reader in readers.items():
            variants[f'search.py, {dtype} on disk'] = partial(
                searchlib.search, run, reader, one, 10)
        want = (q @ flat.T).topk(10).indices[0].tolist()
        got = [h['row'] for h in searchlib.search(run, readers['fp32'], one, 10)]
        if got != want:
            raise ValueError(f"search: {got} are found, {want} are the best; run "
                             "tests/test_search.py")
        rows = compare(variants, cfg.rounds, device, memory=False)
        case = (f"{n} items of {M} x {cfg.slot_width}, {x.numel() * 4 / 1e9:.2f} GB in fp32, one "
                "query, the best 10")
        show(f"search: {case}", rows)
        agree = searchlib.agree(*(torch.cat([
            searchlib.as_vectors(model, queries, True) @ searchlib.as_vectors(model, f).T
            for _, f in readers[dtype].chunks(searchlib.BLOCK)], 1) for dtype in readers))
        print(f"  int8 against fp32: {agree}")
    ratio = rows[-2]['ms'] / min(r['ms'] for r in rows[:-2])
    print(f"  goal: fp32 at most {SEARCH_GOAL} of the faster of the others: {ratio:.2f}, "
          f"{'met' if ratio <= SEARCH_GOAL else 'NOT met'}")
    return {'cases': [{'case': case, 'rows': rows, 'int8': agree}],
            'preselection': preselection(cfg, device)}


def preselection(cfg, device):
    """Of the best 1 and 10 by all three levels, how many are among the best P by the global one."""
    try:
        run = searchlib.load(cfg.pha_run, device='cpu')
        settings = run.cfg
        items = datalib.load_annotations(os.path.join(settings.data, 'test.jsonl'))
        text, row, _, video, _, _ = evaluation.encode_split(run.model, items, settings, 'test')
    except (OSError, ValueError) as e:
        print(f"  preselection: skipped, {e}")
        return None
    S = evaluation.similarity(run.model.similarity, text, video, quiet=True)
    order, out = (text['G'] @ video['G'].T).argsort(dim=1, descending=True, stable=True), {}
    place = order.argsort(1)  # [Nt, Nv]
    print(f"  preselection of {cfg.pha_run}, {S.shape[0]} captions, {S.shape[1]} videos: of the "
          "best 1 (10) by all levels")
    for P in (10, 20, 50, 100, 200):
        out[P] = [100 * (place.gather(1, S.topk(k).indices) < P).float().mean().item()
                  for k in (1, 10)]
        print(f"    {out[P][0]:.1f} % ({out[P][1]:.1f} %) are among the best {P} by the global one")
    return out


BENCHES = {'encode': encode, 'grad_cache': grad_cache, 'loader': loader, 'decode': decode,
           'matching': matching, 'clustering': clustering, 'slq': slq, 'search': search}

# -----------------------------------------------------------------------------
# the run

def main(cfg):
    names = [n.strip() for n in cfg.only.split(',') if n.strip()] or list(BENCHES)
    unknown = [n for n in names if n not in BENCHES]
    if unknown:
        raise ValueError(f"only: there is no bench '{unknown[0]}'; there are {', '.join(BENCHES)}")
    for key in ('rounds', 'train_rounds', 'batch', 'demo_batch', 'num_frames', 'train_frames',
                'clips', 'layers', 'pairs', 'decode_frames', 'decode_seconds', 'items',
                'slot_width'):
        if getattr(cfg, key) < 1:
            raise ValueError(f"{key} is {getattr(cfg, key)}, the least is 1")
    if cfg.train_batch < 2 or cfg.hidden % 32 or cfg.hidden < 32 or min(cfg.chunks, default=1) < 1:
        raise ValueError(f"train_batch {cfg.train_batch} must be at least 2, hidden {cfg.hidden} a "
                         f"multiple of 32, and chunks {cfg.chunks} at least 1 each")
    transformers.utils.logging.disable_progress_bar()
    _, _, device = train.init_distributed(cfg.device)
    where, versions = machine(device), describe(cfg)['versions']
    print('  '.join(f'{k} {v}' for k, v in {**where, **versions}.items()))
    if where['load_average'] > 0.5 * where['cores']:
        print("the machine is busy: trust the ratios, not the milliseconds")
    lines = []
    for name in names:
        begun = time.time()
        result = BENCHES[name](cfg, device)
        if 'skipped' in result:
            print(f"\n{name}: skipped, {result['skipped']}")
        lines.append({'bench': name, **result, 'settings': vars(cfg),
                      'seconds': round(time.time() - begun, 1), 'machine': where,
                      'versions': versions})
    text = ''.join(dumps(line) + '\n' for line in lines)
    print('\n' + text, end='')
    if cfg.json:
        os.makedirs(os.path.dirname(os.path.abspath(cfg.json)), exist_ok=True)
        with open(cfg.json, 'w', encoding='utf-8') as f:
            f.write(text)
    return lines


if __name__ == '__main__':
    train.one_line_errors(lambda: main(cfg))
