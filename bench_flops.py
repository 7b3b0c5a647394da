"""
The papers' cost tables, recomputed to the printed digit; one honest rule beside them; a stopwatch.

    $ python bench_flops.py mars     # MARS, Table 4. pha: PHA-Net, Tables 4, 7, 10, 12
    $ python bench_flops.py slq      # SLQ, Table 3, and what a training step costs
    $ python bench_flops.py mars --videos=1000000 --slots=8 --frames=32      # price your own plan
    $ python bench_flops.py time --model=mars                                # measure, here

A table shows what the paper prints, what the paper's counting rule gives for the architecture, and
the difference; then the same under one rule for all rows: 2 FLOPs per multiply-add, attention
counted everywhere. Rules and recipes are in flops.py. The last line is JSON: {"table", "rows":
[{"model", "cell", "paper", "ours", "diff", "rule"}]}. Only `time` needs torch; nothing needs
weights, a network or a GPU, but on a GPU `time` builds the papers' sizes with random weights.
"""
# settings
table = ''              # mars, pha, slq or time; also the first word of the command
json = ''               # also write the JSON line to this file
# a plan: any of the next six prices it in place of the table; 0 is the paper's value. `time` too
# goes by videos, frames, slots and query_tokens
videos = 0              # videos (slq: images) in the gallery, 0: 1000
frames = 0              # mars, pha: frames of a video
resolution = 0          # pixels of a frame's side
slots = 0               # mars: slots M; slq: queries N
video_tokens = 0        # mars: LLM tokens of each 4 frames; slq: of an image
query_tokens = 0        # mars, slq: of a query, template included, slots not; pha: words
mllm = 'InternVL3-1B'   # slq: InternVL3-1B, InternVL3-8B, Qwen3VL-2B or Qwen3VL-4B
number_bytes = 2        # bytes that the gallery keeps per number
machine_gb = 256.0      # memory of a machine for the gallery, GB of 10^9 bytes
tflops = 100.0          # what a device sustains, in 10^12 FLOPs per second; an assumption
# time
model = 'mars'          # mars, pha or slq
backbone = ''           # folder or hub id; empty: see size
size = 'auto'           # without a backbone: demo (tiny ones), paper (random weights of the papers'
                        # sizes), auto: paper on a GPU, else demo
data = 'data/demo'      # test.jsonl and videos/ to read clips from
clips = 16              # how many of them
batch = 4               # videos per forward; queries come one by one
runs = 5                # measured runs of each stage, after one that isn't
device = 'auto'         # cuda or cpu; auto: a GPU if there is one
dtype = 'auto'          # of the weights: bfloat16, float32; auto: bfloat16 on a GPU
# end of settings

import sys

if __name__ == '__main__':  # so that --help and typos answer at once
    from configurator import at_once, check_output, configure, one_line_errors
    argv = sys.argv[1:]
    if argv and not argv[0].startswith('-') and not argv[0].endswith('.py'):
        argv[0] = f'--table={argv[0]}'  # `bench_flops.py mars` reads better
    cfg = at_once(lambda: configure(__file__, argv))
    at_once(lambda: check_output('json', cfg.json))

import math
import os
from json import dumps

import flops
from flops import (BASELINES, BERT_TOKENS, GALLERY, GIGA, LLMS, MARS_SLOTS, MARS_TOKENS, TERA,
                   TOWERS, UNITS, WHOLE, agrees, count, row)

# -----------------------------------------------------------------------------
# what is printed

def show(title, rows):
    """paper | recomputed | difference, and what does not round to the printed digits."""
    print(f"\n{title}")
    print(f"  {'model':<17}{'cell':<31}{'paper':>11}{'recomputed':>14}{'difference':>12}")
    for r in rows:
        print(f"  {r['model']:<17}{r['cell']:<31}{r['printed']:>11}{r['ours']:>14,.4f}"
              f"{r['diff']:>+12.4f}" + ("" if agrees(r) else "  residual"))
    good = sum(map(agrees, rows))
    print(f"  {good} of {len(rows)} cells round to the printed digits")


def grid(title, columns, lines, digits=1):
    """A table of numbers: lines are [name, number, number, ...]; None is an empty cell."""
    print(f"\n{title}")
    print(f"  {'':<34}" + ''.join(f"{c:>13}" for c in columns))
    for name, *numbers in lines:
        print(f"  {name:<34}" + ''.join(f"{'' if x is None else f'{x:,.{digits}f}':>13}"
                                        for x in numbers))


def honest(lines, columns):
    """The same lines as rows of the JSON."""
    return [row(name, cell, x, 'flops') for name, *numbers in lines
            for cell, x in zip(columns, numbers) if x is not None]


# -----------------------------------------------------------------------------
# MARS, Table 4

TABLE4 = {  # offline, four times online, total; all as printed
    'UMT': ('267.8', '1,740.8', '2,683.4', '2,089.2', '1,395.2', '20.5'),
    'InternVideo2-1B': ('2,542.6', '4,576.1', '5,661.3', '4,977.5', '4,177.4', '61.7'),
    'InternVideo2-6B': ('13,384.1', '2,857.2', '3,942.5', '3,258.7', '2,458.5', '134.0'),
    'MARS': ('5,657.7', '322.3', '1,031.8', '659.3', '274.3', '51.1'),
}
COLUMNS4 = ('offline GF/video', *(f'online GF/query, {s}' for s in GALLERY), 'total M GF')


def table4_works(name, T, **how):
    """The work of a row: one video, and one query of each of the four sets."""
    if name == 'MARS':
        return flops.mars_video(T, **how), [
            flops.mars_query(MARS_TOKENS[s], N, MARS_SLOTS[s]) for s, N in GALLERY.items()]
    return flops.baseline_video(name, T), [
        flops.baseline_query(name, T, BERT_TOKENS[s], N) for s, N in GALLERY.items()]


def table4_row(name, T, rule, **how):
    """The six numbers: GF per video, GF per query of four sets, millions of GF for all of it."""
    video, queries = table4_works(name, T, **how)
    offline, online = count(video, rule) / GIGA, [count(q, rule) / GIGA for q in queries]
    whole = offline * WHOLE + sum(x * N for x, N in zip(online, GALLERY.values()))
    return [offline, *online, whole / 1e6]


def paper_frames(name):
    return flops.MARS['frames'] if name == 'MARS' else BASELINES[name]['frames']


def mars_table():
    rows = [row(name, cell, ours, 'fvcore', paper) for name, cells in TABLE4.items()
            for cell, paper, ours in zip(COLUMNS4, cells,
                                         table4_row(name, paper_frames(name), 'fvcore'))]
    show("MARS, Table 4. Rule: fvcore. A multiply-add is 1, LayerNorm 5 per element, attention in "
         "a fused\nkernel is not seen. GF are 10^9 multiply-adds; total: 7,920 videos and queries",
         rows)

    lines = []
    for name, T in (('UMT', 12), ('UMT', 4), ('InternVideo2-1B', 8), ('InternVideo2-6B', 4),
                    ('InternVideo2-6B', 8), ('MARS', 16)):
        lines.append([f'{name}, {T} frames', *table4_row(name, T, 'flops')])
    lines.append(['MARS, 16 frames at 224 pixels', *table4_row('MARS', 16, 'flops', side=224)])
    short = ('GF/video', *GALLERY, 'total M GF')
    grid("One rule for all rows: 2 FLOPs per multiply-add, attention counted everywhere. Frames as "
         "in the\nofficial fine-tuning configs (UMT 12, InternVideo2-1B 8 in a public kit, -6B 4), "
         "or as in Table 4", short, lines)
    return rows + honest(lines, COLUMNS4) + mars_findings() + mars_tokens()


def mars_findings():
    """What Table 4 leaves out, in its own unit, so that the numbers can be put beside it."""
    rows = [row('MARS', f'{cell}, nothing left out', x, 'fvcore+') for cell, x in
            zip(COLUMNS4, table4_row('MARS', 16, 'fvcore+'))]
    rows += [row('UMT', f'{cell}, 12 frames', x, 'fvcore+') for cell, x in
             zip(COLUMNS4, table4_row('UMT', 12, 'fvcore+'))]
    mars, mars_all, umt, umt_all = (rows[i]['ours'] for i in (0, 5, 6, 11))
    print(f"\nIn Table 4's own unit, with nothing left out:\n"
          f"  MARS encodes a video for {mars:,.1f} GF, not 5,657.7: the attention of its vision "
          f"tower, a flash\n  kernel, was not seen, that of the other rows was. Total "
          f"{mars_all:.1f} M, not 51.1\n"
          f"  UMT's cells are those of 4 frames. With the 12 of its fine-tuning configs: offline "
          f"{umt:,.1f}\n  (267.8 printed), online {rows[7]['ours']:,.1f} on DiDeMo (1,740.8), "
          f"total {umt_all:.1f} M (20.5)")
    return rows


def mars_tokens():
    """What follows from how many tokens a text is given: Table 4 has its own for each row."""
    lengths, N = (32, 64, 96, 150), GALLERY['DiDeMo']
    lines = [[f'{name}, {T} frames', *(count(flops.baseline_query(name, T, L, N), 'flops') / GIGA
                                       for L in lengths)]
             for name, T in (('UMT', 12), ('InternVideo2-1B', 8), ('InternVideo2-6B', 4))]
    lines.append(['MARS', *(count(flops.mars_query(L, N), 'flops') / GIGA for L in lengths)])
    cells = [f'online GF/query, {L} tokens, {N:,} videos' for L in lengths]
    grid("A query of the same length for all (Table 4: UMT, InternVideo2 padded to 64, 150, 96, "
         "32;\nMARS 47, 150, 96, 40), GF on 1,003 videos, same rule", [f'L = {x}' for x in lengths],
         lines)
    per_clip = (16, 64, 256, 3136)
    video = [['MARS, 16 frames', *(count(flops.mars_video(tokens=n), 'flops') / GIGA
                                   for n in per_clip)]]
    cells_video = [f'offline GF/video, {n} tokens per 4 frames' for n in per_clip]
    grid("Tokens that the LLM gets of each 4 frames (64 in the model; 3136 is without merging)",
         [f'{n}' for n in per_clip], video)
    return honest(lines, cells) + honest(video, cells_video)


# -----------------------------------------------------------------------------
# PHA-Net, Tables 12, 10, 7, 4

TABLE12 = {'HBI': '36.38', 'CLIP4Clip': '36.27', 'X-Pool': '37.34', 'X-CLIP': '36.27',
           'DRL': '36.28', 'UCoFiA': '36.43', 'TC-MGC': '37.39', 'PHA-Net': '36.84'}
TABLE10 = {2: '36.75', 4: '36.79', 6: '36.84', 8: '36.88', 10: '36.93'}  # N_p
CCA, PCA = 'center', 'prototype'
TABLE7 = {'w/o 1D-Conv': ('36.785', dict(conv=False)), 'w/ 1D-Conv': ('36.836', {}),
          'w/o CA': ('36.821', dict(attention=('none', 'none'))),
          'CCA & CCA': ('36.862', dict(attention=(CCA, CCA))),
          'CCA & PCA': ('36.856', dict(attention=(CCA, PCA))),
          'PCA & CCA': ('36.842', dict(attention=(PCA, CCA))),
          'PCA & PCA': ('36.836', dict(attention=(PCA, PCA)))}
TABLE4_PHA = {'neither block shared': ('129.39', 2, 2), 'ITB not shared': ('120.99', 2, 1),
              'LTB not shared': ('120.99', 1, 2), 'both shared': ('112.59', 1, 1)}


def pha_table():
    def thop(peer):
        return count(flops.item(peer), 'thop') / GIGA

    rows = [row(name, 'Table 12, GFLOPs', thop(flops.PEERS[name]()), 'thop', paper)
            for name, paper in TABLE12.items()]
    rows += [row('PHA-Net', f'Table 10, N_p = {n}, GFLOPs', thop(flops.phanet(Np=n)), 'thop', paper)
             for n, paper in TABLE10.items()]
    rows += [row('PHA-Net', f'Table 7, {name}, GFLOPs', thop(flops.phanet(**how)), 'thop', paper)
             for name, (paper, how) in TABLE7.items()]
    rows += [row('PHA-Net', f'Table 4, {name}, M', flops.pha_parameters(*blocks) / 1e6, 'thop',
                 paper) for name, (paper, *blocks) in TABLE4_PHA.items()]
    show("PHA-Net, Tables 12, 10, 7, 4 (a text, a video, their part in 64 x 64 pairs). Rule: thop. "
         "A\nmultiply-add of nn.Linear or nn.Conv is 1, nn.LayerNorm 4 per element; attention (its "
         "weights too), products of\nactivations and bare parameters are not seen, nor are their "
         "parameters", rows)

    columns = ('text GF', 'video GF', 'pairs GF', 'all GF', 'x printed')
    lines = []
    for name, make in flops.PEERS.items():
        peer = make()
        parts = [count(peer[k], 'flops') / GIGA for k in ('text', 'video', 'pairs')]
        lines.append([f'{name}, 12 frames', *parts, sum(parts),
                      sum(parts) / float(TABLE12[name])])
    grid("One rule for all rows: 2 FLOPs per multiply-add, attention counted everywhere; 12 "
         "frames, as\nall their configs have. Similarity by hand, n x n re-weightings left out",
         columns, lines, 2)
    true = flops.pha_true_parameters() / 1e6
    print(f"  PHA-Net has {true:.1f} M parameters, not 112.59 M: CLIP's attention, embeddings and "
          "projections count too")
    return rows + honest(lines, columns) + [row('PHA-Net', 'all parameters, M', true, 'flops')]


# -----------------------------------------------------------------------------
# SLQ, Table 3

TABLE3 = {'InternVL3-1B': ('0.6B', '4.4M', '36k'), 'Qwen3VL-2B': ('1.7B', '8.7M', '83K'),
          'Qwen3VL-4B': ('4B', '16.5M', '106K'), 'InternVL3-8B': ('7.6B', '20.2M', '144k')}
# the bare chat template, as the authors train: 8 tokens round a caption, 2 more round an image
TEMPLATE, IMAGE_ENDS, CAPTION = 8, 2, 12


def slq_table():
    rows, twice = [], []
    for name, cells in TABLE3.items():
        llm = LLMS[name]
        ours = (flops.llm_parameters(llm), flops.lora_parameters(llm, flops.SLQ_RANK),
                flops.slq_parameters(llm))
        rows += [row(name, f'{what}, {paper[-1]}', n / UNITS[paper[-1]], 'parameters', paper)
                 for what, n, paper in zip(('full FT (the LLM)', 'LoRA r=8, all linears',
                                            'SLQ, 20 x D + 1'), ours, cells)]
        twice.append(f"{name} {2 * (ours[2] - 1) / 1e3:.1f}")
    show("SLQ, Table 3, trainable parameters", rows)
    print("  SLQ's column is about twice what its N = 20 gives: 2 x 20 x D is, in thousands,\n  "
          + ', '.join(twice) + "; we know of no reason")
    return rows + slq_steps()


def slq_steps():
    """Training, per pair: an image and a caption, forward and backward, in TFLOPs."""
    columns = ('L image', 'L text', 'tower TF', 'plain TF', '+ recompute', 'cache TF',
               '+ recompute', 'ratio')
    lines = []
    for name in TABLE3:
        sizes = flops.image_tokens(name) + TEMPLATE + IMAGE_ENDS, TEMPLATE + CAPTION
        tower = count(flops.image_vision(name), 'flops') / TERA
        steps = [sum(count(step(LLMS[name], n, checkpointing=again), 'flops') for n in sizes) / TERA
                 for step in (flops.plain_step, flops.cache_step) for again in (False, True)]
        lines.append([name, *sizes, tower, *steps, steps[0] / steps[2]])
    grid(f"A training step per pair, LLM only, TFLOPs (same rule; N = {flops.N_QUERIES}, an image "
         f"of 448 x 448,\na caption of {CAPTION} tokens). The tower runs once, without gradient, "
         "in all of them. plain: all tokens\nforward and backward. cache: the content forward, "
         "only the queries forward and backward", columns, lines, 3)
    cells = ('image tokens', 'text tokens', 'tower TF/pair', 'plain step TF/pair',
             'plain step, checkpointing, TF/pair', 'prefix-cache step TF/pair',
             'prefix-cache step, recomputing, TF/pair', 'plain / prefix cache')
    return honest(lines, cells)


# -----------------------------------------------------------------------------
# a plan of one's own

PLAN_KEYS = {'mars': ('videos', 'frames', 'resolution', 'slots', 'video_tokens', 'query_tokens'),
             'pha': ('videos', 'frames', 'resolution', 'query_tokens'),
             'slq': ('videos', 'resolution', 'slots', 'video_tokens', 'query_tokens'),
             'time': ('videos', 'frames', 'slots', 'query_tokens')}
LEAST = dict(videos=1, frames=1, resolution=0, slots=1, video_tokens=1, query_tokens=1)


def check_resolution(side, patch, least=1):
    if side % patch or side < patch * least:
        raise ValueError(f"resolution is {side}; it must be a multiple of the tower's {patch} "
                         f"pixels, and at least {patch * least}")


def plan_mars(cfg):
    """-> (what it is, work of a video by part, work of a query by part, numbers kept per video)"""
    T, side = cfg.frames or 16, cfg.resolution or TOWERS['MARS']['side']
    M, tokens = cfg.slots or 4, cfg.video_tokens or flops.MARS['tokens']
    tower, D = TOWERS['MARS'] | dict(side=side), LLMS['Qwen2-7B']['d']
    check_resolution(side, tower['patch'])
    if tokens > flops.vision_tokens(tower, T):
        raise ValueError(f"video_tokens is {tokens}, but 4 frames of {side} pixels have only "
                         f"{flops.vision_tokens(tower, T)} patches to merge")
    L = (cfg.query_tokens or flops.QUERY_TOKENS) + M
    video = flops.mars_video(T, side, M, tokens)
    see = flops.vision(tower, T)
    N = cfg.videos or 1000
    dots = flops.Counter(matmul=N * M * D)
    what = (f"MARS on VideoChat-Flash-Qwen2-7B, LoRA r=128 not merged, {T} frames of {side} pixels,"
            f"\n{tokens} tokens per 4 frames, {M} slots, a query of {L} tokens in all")
    return what, N, {'vision tower': see, 'merging, LLM': video - see}, \
        {'LLM': flops.mars_query(L, 0, M), 'similarity': dots}, M * D


def plan_pha(cfg):
    T, side, words = cfg.frames or 12, cfg.resolution or 224, cfg.query_tokens or 32
    check_resolution(side, 32)
    for key, n in (('frames', T), ('query_tokens', words)):
        if n > 77 - 3:
            raise ValueError(f"{key} is {n}; with 3 prototypes the block has positions for 74")
    peer = flops.phanet(words=words, frames=T, side=side, projected=1, queries=1)
    N, tokens = cfg.videos or 1000, T + 3 + 6 + 1
    see = flops.clip_frames(T, 1, side)
    dots = flops.times(N / flops.BATCH, peer['pairs'])
    what = f"PHA-Net on CLIP ViT-B/32, {T} frames of {side} pixels, a query of {words} words"
    # kept: unit tokens of two levels with a weight each, one vector of the third
    return what, N, {'CLIP': see, 'prototypes, merging': peer['video'] - see}, \
        {'CLIP, merging': peer['text'], 'similarity': dots}, tokens * (flops.D + 1) + flops.D


def plan_slq(cfg):
    if cfg.mllm not in TABLE3:
        raise ValueError(f"mllm is '{cfg.mllm}', there are {', '.join(TABLE3)}")
    llm, side, M = LLMS[cfg.mllm], cfg.resolution or 448, cfg.slots or flops.N_QUERIES
    check_resolution(side, TOWERS[flops.SLQ_TOWERS[cfg.mllm]]['patch'], 2)
    image = (cfg.video_tokens or flops.image_tokens(cfg.mllm, side)) + TEMPLATE + IMAGE_ENDS
    L, N = cfg.query_tokens or TEMPLATE + CAPTION, cfg.videos or 1000
    what = (f"SLQ on {cfg.mllm}, images of {side} pixels, {image} tokens each, a query of {L}, and "
            f"{M} latent queries behind")
    return what, N, {'vision tower': flops.image_vision(cfg.mllm, side),
                     'LLM': flops.slq_item(cfg.mllm, image, M)}, \
        {'LLM': flops.slq_item(cfg.mllm, L, M),
         'similarity': flops.Counter(matmul=N * llm['d'])}, llm['d']


def plan(cfg):
    """Offline, online, and what the gallery takes."""
    what, N, video, query, numbers = {'mars': plan_mars, 'pha': plan_pha,
                                      'slq': plan_slq}[cfg.table](cfg)
    item = 'image' if cfg.table == 'slq' else 'video'
    offline, online = (sum(count(w, 'flops') for w in works.values()) for works in (video, query))
    size = numbers * cfg.number_bytes
    machines = math.ceil(N * size / (cfg.machine_gb * 1e9))
    hours, seconds = N * offline / (cfg.tflops * TERA) / 3600, online / (cfg.tflops * TERA)

    def parts(works):
        return ', '.join(f"{k} {count(w, 'flops') / GIGA:,.1f}" for k, w in works.items())

    print(f"\n{what}; {N:,} {item}s. FLOPs, 2 per multiply-add")
    print(f"  offline  {offline / GIGA:,.1f} GFLOPs per {item} ({parts(video)}), all: "
          f"{N * offline:.3g} FLOPs,\n           {hours:,.1f} device hours at "
          f"{cfg.tflops:g} TFLOP/s (assumed: set --tflops to what yours sustains)")
    print(f"  online   {online / GIGA:,.1f} GFLOPs per query ({parts(query)}), "
          f"{1e3 * seconds:,.1f} ms at that rate")
    print(f"  gallery  {size:,} bytes per {item} ({numbers:,} numbers of {cfg.number_bytes} "
          f"bytes), {N * size:,} bytes in all:\n           {machines:,} "
          f"machine{'s' * (machines > 1)} of {cfg.machine_gb:g} GB")
    cells = {f'offline GFLOPs/{item}': offline / GIGA, 'offline FLOPs, all': N * offline,
             'offline device hours': hours, 'online GFLOPs/query': online / GIGA,
             f'gallery bytes/{item}': size, 'gallery bytes': N * size, 'machines': machines}
    return [row(what.partition(' on ')[0], cell, x, 'flops') for cell, x in cells.items()]


# -----------------------------------------------------------------------------
# the run

def check(cfg):
    """One clear line for a setting that can't be."""
    if cfg.table not in TABLES:
        raise ValueError((f"there is no table '{cfg.table}'" if cfg.table else "which table?")
                         + f" There are {', '.join(TABLES)}, as in `python bench_flops.py mars`")
    for key, low in LEAST.items():
        if getattr(cfg, key) and getattr(cfg, key) < low or getattr(cfg, key) < 0:
            raise ValueError(f"{key} is {getattr(cfg, key)}, the least is {max(low, 1)} (0: the "
                             "paper's)")
        if getattr(cfg, key) and key not in PLAN_KEYS[cfg.table]:
            raise ValueError(f"{key} is no setting of {cfg.table}'s plan; it has "
                             f"{', '.join(PLAN_KEYS[cfg.table])}")
    for key in ('number_bytes', 'machine_gb', 'tflops', 'clips', 'batch', 'runs'):
        if not 0 < getattr(cfg, key) < math.inf:
            raise ValueError(f"{key} is {getattr(cfg, key)} and must be above 0")
    for key, allowed in (('model', MODELS), ('size', ('auto', 'demo', 'paper'))):
        if getattr(cfg, key) not in allowed:
            raise ValueError(f"{key} is '{getattr(cfg, key)}' and must be one of "
                             f"{', '.join(allowed)}")


MODELS = ('mars', 'pha', 'slq')
TABLES = {'mars': mars_table, 'pha': pha_table, 'slq': slq_table, 'time': None}


def main(cfg):
    check(cfg)
    extra = {}
    if cfg.table == 'time':
        from stopwatch import time_table
        rows, extra = time_table(cfg)
    elif any(getattr(cfg, key) for key in PLAN_KEYS[cfg.table]):
        rows = plan(cfg)
    else:
        rows = TABLES[cfg.table]()
    rows = [{k: v for k, v in r.items() if k != 'printed'} for r in rows]
    line = {'table': cfg.table, 'rows': rows, **extra}
    write(cfg.json, dumps(line) + '\n')
    print('\n' + dumps(line), flush=True)
    return line


def write(path, text):
    if not path:
        return
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    temporary = f'{path}.{os.getpid()}.tmp'
    with open(temporary, 'w', encoding='utf-8') as f:
        f.write(text)
    os.replace(temporary, path)


if __name__ == '__main__':
    one_line_errors(lambda: main(cfg))
