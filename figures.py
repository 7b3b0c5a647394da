"""
Pictures from a run folder, as PNG files in <run>/figures/: what a paper shows beside its tables.

    $ python figures.py --ckpt out/demo_pha                          # all that this model has
    $ python figures.py --ckpt out/demo_mars --only=examples --pick=wrong
    $ python figures.py --ckpt out/demo_pha --only=cmc --compare=out/demo_mars,out/demo_baseline

    attention  what PHA-Net's prototypes look at, words and frames              (PHA-Net, Fig. 9)
    cmc        share of queries answered within rank 1 .. 50, of several runs   (PHA-Net, Fig. 8)
    tsne       words and frames, phrases and clips, in the plane                (PHA-Net, Fig. 7)
    examples   what is retrieved, both ways, with its frames                    (PHA-Net, Fig. 5-6)
    geometry   principal components; modality gap, alignment, uniformity (SLQ, Fig. 6 and Table 4)

run folder --eval.encode_split--> Features --model.similarity--> S [Nt, Nv] --> cmc, examples
                                           --one_vector--> [n, D] --> geometry, also printed
"""
ckpt = ""              # run folder (out/demo_pha), or one step folder inside it
which = "best"         # checkpoint of the run: best (by the validation split) or latest
split = "test"         # <data>/<split>.jsonl
only = ""              # comma-separated pictures; empty: all that the model has
compare = ""           # comma-separated further runs, for cmc, tsne and geometry
v2t = "best"           # of cmc: best or group, see eval.py
ids = ""               # comma-separated ids for attention and examples; empty: drawn by chance
samples = 4            # as many are drawn
pick = "any"           # for examples from all: any, or those that succeed (right) or fail (wrong)
seed = 0               # of what is drawn, and of t-SNE
layer = 2              # of the individual block, for attention; 1 is the first (the paper's: 2)
top_k = 3              # retrieved per query in examples
frames_shown = 5       # per clip in examples
max_rank = 50          # of cmc
tsne_pairs = 50        # pairs of a caption and its clip in tsne
device = "auto"        # cuda, cpu; auto: a GPU if there is one
# what follows is as in training unless it is given
data: str | None = None            # folder of the annotations; alone it moves video_root with it
video_root: str | None = None      # folder of the videos; "": <data>/videos
eval_batch_size: int | None = None # items per forward pass
num_workers: int | None = None     # loader processes
frame_cache: str | None = None     # folder for decoded frames
on_bad_video: str | None = None    # raise, or skip an unreadable video and its captions
num_frames: int | None = None      # frames per video; prints a warning when it differs
text_prompt: str | None = None     # the same
video_prompt: str | None = None    # the same
paragraph: bool | None = None      # the same: a video's captions joined to one
backbone: str | None = None        # where the backbone is now, if it has moved
# end of settings
if __name__ == "__main__":         # before torch is imported, so that --help is instant
    from configurator import at_once, configure
    args = at_once(lambda: configure(__file__))

import os
import re
import textwrap
import warnings
from difflib import get_close_matches
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace

import matplotlib.font_manager
import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import eval as evaluation
from data import Item, Sample, load_annotations, read_frames

PICTURES = ("attention", "cmc", "tsne", "examples", "geometry")
# text as it is: a "$" in a caption starts no formula
matplotlib.rcParams.update({"font.size": 7.5, "text.parse_math": False, "axes.linewidth": 0.6,
                            "axes.titlesize": 8, "legend.fontsize": 7, "savefig.dpi": 200})
NO_GLYPH = r"Glyph (\d+) .*missing from"  # so matplotlib warns at each measuring of each text
warnings.filterwarnings("ignore", NO_GLYPH)
# fonts of scripts that matplotlib's own lacks, where this machine has them
matplotlib.rcParams["font.family"] = ["DejaVu Sans", *(f for f in (
    "Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans Arabic", "Noto Sans Devanagari",
    "Noto Emoji", "PingFang SC", "Hiragino Sans", "Microsoft YaHei", "Arial Unicode MS")
    if f in {font.name for font in matplotlib.font_manager.fontManager.ttflist})]
# Okabe and Ito's: told apart by the colour-blind, and each comes with a line or a mark of its own
BLUE, RED, GREEN, ORANGE, PURPLE, SKY = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7",
                                         "#56B4E9")
MARKS = "\u25cf\u25b2"             # a disc and a triangle, as matplotlib's "o" and "^"
LINES = [(c, s) for s in ("-", "--", ":") for c in (BLUE, RED, GREEN, PURPLE, ORANGE, SKY)]
WIDTH = 7.2                        # inches, a page of two columns; type is set for this size


# -----------------------------------------------------------------------------
# what the pictures show: numbers, no drawing

def cmc(ranks, n):
    """Share of queries [n], in percent, whose target has at most rank 1 .. n; ranks [Nq]."""
    return 100 * (ranks[:, None] <= torch.arange(1, n + 1)).double().mean(0)


def reads_attention(module, seen):
    """A hook that adds softmax(q k^T) [B, heads, N, N] of a CLIP attention to the list `seen`;
    the fused kernel that the model runs keeps none."""
    def hook(module, args, kwargs):
        h, bias = kwargs["hidden_states"], kwargs["attention_mask"]  # [B, N, D], [B, 1, N, N]
        B, N, _ = h.shape
        q, k = (f(h).view(B, N, module.num_heads, -1).transpose(1, 2).float()
                for f in (module.q_proj, module.k_proj))             # [B, heads, N, D / heads]
        seen.append((q @ k.mT * module.scale + bias.float()).softmax(-1))
    return module.register_forward_pre_hook(hook, with_kwargs=True)


def no_attention(model):
    """None, or why a model has no picture of its prototypes' attention."""
    head = getattr(model, "head", None)                   # SLQ's may be a linear layer, or None
    if not isinstance(head, torch.nn.ModuleDict) or "block_I" not in head:
        return f"{type(model).__name__} has no prototypes here, they are PHA-Net's"
    if not len(head["block_I"]) or not model.config.individual_prototypes:
        return "this run was trained without individual prototypes or their block"
    return None


@torch.no_grad()
def prototype_attention(model, side, inputs, layer):
    """
    How the P prototypes of the individual level attend to one item's tokens: A [P, n], rows sum to
    1, and share [P], the part of a row that goes to the tokens at all, the rest being prototypes'.

    Choice: the mean over heads, which the paper does not mention.
    """
    blocks, P = model.head["block_I"], model.config.individual_prototypes
    layers = blocks["both" if "both" in blocks else side].layers
    if not 1 <= layer <= len(layers):
        raise ValueError(f"layer must be 1 .. {len(layers)} in this run's block, not {layer}")
    seen = []
    hook = reads_attention(layers[layer - 1].self_attn, seen)
    try:
        getattr(model, f"encode_{side}")(inputs)
    finally:
        hook.remove()
    A = seen[0][0].mean(0)[-P:, :-P].cpu()                # [P, N], zero at padding
    if side == "text":
        A = A[:, inputs["attention_mask"][0].bool().cpu()]  # [P, n]
    share = A.sum(1)
    return A / share[:, None], share


def word_pieces(tokenizer, ids):
    """Readable names of tokens: a word's piece that is not its last one ends in '-'."""
    special = {tokenizer.bos_token_id: "[start]", tokenizer.eos_token_id: "[end]"}
    raw = tokenizer.convert_ids_to_tokens(ids)
    marked = any(t.endswith("</w>") for t in raw)         # CLIP's vocabularies mark a word's end
    return [special.get(i) or tokenizer.decode([i]).strip() +
            "-" * (marked and not t.endswith("</w>")) for i, t in zip(ids, raw)]


def no_tokens(model):
    if getattr(model, "levels", {}).keys() & {"I", "L"}:
        return None
    return f"{type(model).__name__} has no individual or local level here, they are PHA-Net's"


def level_tokens(model, text, video, row):
    """{level: (text tokens [n, D], video tokens [m, D])}, unit, without prototypes and padding."""
    P = {"I": model.config.individual_prototypes, "L": model.config.local_prototypes}
    text = {k: v[row] for k, v in text.items()}
    # start and end count as words, as in Eq. 3
    return {level: tuple(f[level][:, :N][f[f"{level}_mask"][:, :N].bool()] for f in (text, video)
                         for N in [f[level].shape[1] - P[level]])
            for level in ("I", "L") if level in text}


def mixing(text, video, k=10):
    """How far two clouds of unit vectors are mixed: share of the other modality among a token's k
    nearest, and what it would be if a token's modality said nothing."""
    x = torch.cat([text, video]).double()
    kind = torch.arange(len(x)) < len(text)
    S = (x @ x.T).fill_diagonal_(-2)
    near = S.topk(min(k, len(x) - 1)).indices             # [n + m, k]
    n, m = len(text), len(video)
    return (kind[near] != kind[:, None]).double().mean().item(), 2 * n * m / ((n + m) * (n + m - 1))


def plane(text, video, seed):
    """t-SNE of both clouds together -> two arrays of points. Unit vectors: by their cosines."""
    from sklearn.manifold import TSNE
    x = torch.cat([text, video]).numpy()
    points = TSNE(perplexity=min(30, (len(x) - 1) / 3), init="pca", learning_rate="auto",
                  random_state=seed).fit_transform(x)
    return points[:len(text)], points[len(text):]


def no_vector(model):
    """None, or why an item of this model is not one vector whose dot products are the scores."""
    if getattr(model.config, "aggregation", "uniform") != "uniform":
        return f"with aggregation={model.config.aggregation} its scores are no dot products"
    if set(getattr(model, "levels", "G")) != {"G"}:
        return f"an item of {type(model).__name__} is many vectors here"
    return None


def one_vector(features):
    """Unit vectors [n, D]; MARS's M slots side by side, so that a dot product is Eq. 3's score."""
    (x,) = (features[k] for k in ("z", "G", "slots") if k in features)
    return x if x.dim() == 2 else x.flatten(1) / x.shape[1] ** 0.5


def geometry(text, video, owner):
    """
    Table 4 of SLQ, from unit vectors text [Nt, D], video [Nv, D]; owner [Nt]: each text's video.

    gap         distance of the two centroids
    alignment   mean |t - v|^2 over the pairs of a text and its own video
    uniformity  log of the mean of exp(-2 |x - y|^2) over pairs of different items of one modality
    """
    def uniformity(x):
        return torch.pdist(x).pow(2).mul(-2).exp().mean().log().item()

    text, video = text.double(), video.double()
    return {"gap": (text.mean(0) - video.mean(0)).norm().item(),
            "alignment": (text - video[owner]).pow(2).sum(1).mean().item(),
            "uniformity, text": uniformity(text), "uniformity, video": uniformity(video)}


def components(text, video):
    """The first two principal components of both clouds together: [Nt, 2], [Nv, 2], their shares
    of the variance [2]."""
    x = torch.cat([text, video]).double()
    x = x - x.mean(0)
    _, sigma, axes = torch.linalg.svd(x, full_matrices=False)
    points = (x @ axes[:2].T).numpy()
    return points[:len(text)], points[len(text):], (sigma.pow(2) / sigma.pow(2).sum())[:2].tolist()


def choose(pool, n, seed):
    """n of the pool's indices by chance, in order."""
    order = torch.randperm(len(pool), generator=torch.Generator().manual_seed(seed))
    return [pool[i] for i in sorted(order[:n].tolist())]


def find_ids(ids, items):
    """Indices in items of the ids of a comma-separated list."""
    place = {item.id: i for i, item in enumerate(items)}
    ids = [i.strip() for i in ids.split(",") if i.strip()]
    for i in ids:
        if i not in place:
            near = get_close_matches(i, place, n=1)
            raise ValueError(f"ids: the split has no {i!r}" +
                             (f", did you mean {near[0]!r}?" if near else f"; its first is "
                              f"{items[0].id!r}"))
    return [place[i] for i in ids]


# -----------------------------------------------------------------------------
# one run: the model is built, all that the pictures need is computed, the model goes

def gather(args, wanted, explicit):
    """What the pictures in `wanted` need of the run args.ckpt. A picture that the model does not
    have is named and left out of run.has, or an error if it was asked for."""
    import train
    _, _, device = train.init_distributed(args.device)
    cfg, step, other = evaluation.load_settings(args)
    if cfg.eval_batch_size < 1 or cfg.num_workers < 0:
        raise ValueError(f"eval_batch_size {cfg.eval_batch_size} must be at least 1, num_workers "
                         f"{cfg.num_workers} at least 0")
    items = load_annotations(os.path.join(cfg.data, f"{args.split}.jsonl"), cfg.paragraph)
    given = find_ids(args.ids, items)
    model = train.build_model(cfg, device).eval()
    evaluation.load_weights(model, step)
    step = step.resolve().name
    print(f"{step} of {args.ckpt}, {cfg.model}, on {device}", flush=True)
    run = SimpleNamespace(folder=args.ckpt, name=os.path.basename(os.path.abspath(args.ckpt)),
                          step=step, cfg=cfg, items=items, given=given, has=set(wanted))
    run.note = "".join(f", {k}={v}" for k, v in [("which", args.which)] * (args.which != "best") +
                       [*other.items()] if k not in ("backbone", "video_root"))
    for picture, why in (("attention", no_attention(model)), ("tsne", no_tokens(model)),
                         ("geometry", no_vector(model))):
        if why and picture in wanted:
            if explicit:
                raise ValueError(f"{picture} of {args.ckpt}: {why}")
            print(f"{picture} of {args.ckpt} skipped: {why}")
            run.has.remove(picture)

    how = dict(device=device, autocast=train.autocast_of(cfg, device))
    if run.has & {"cmc", "examples", "geometry"}:
        text, row, run.owner, video, run.kept, _ = evaluation.encode_split(
            model, items, cfg, args.split, **how)
        run.captions = [c for v in run.kept for c in items[v].captions]                   # [Nt]
    if "geometry" in run.has:
        run.vectors = one_vector(text)[row], one_vector(video)                # [Nt, D], [Nv, D]
        run.geometry = geometry(*run.vectors, run.owner)
    if run.has & {"cmc", "examples"}:
        run.S = evaluation.similarity(model.similarity, text, video, device=device)[row]  # [Nt, Nv]
        run.t2v, run.v2t = evaluation.both_ranks(run.S, run.S, run.owner, args.v2t)
    if "tsne" in run.has:
        chosen = [items[i] for i in choose(range(len(items)), args.tsne_pairs, args.seed)]
        pairs = [Item(item.id, item.video, item.captions[:1]) for item in chosen]
        text, row, _, video, _, _ = evaluation.encode_split(
            model, pairs, cfg, args.split, **how)
        run.tokens = level_tokens(model, text, video, row)
        run.prototypes = (model.config.individual_prototypes, model.config.local_prototypes)
    if "attention" in run.has:
        chosen = given or choose(range(len(items)), args.samples, args.seed)
        run.attention = [attention_of(model, items[i], cfg, args.layer, device) for i in chosen]
        run.layers = model.config.block_layers
    return run


def attention_of(model, item, cfg, layer, device):
    """One item's two heat maps, with the names of its words and the frames that the model saw."""
    path = os.path.join(cfg.video_root or os.path.join(cfg.data, "videos"), item.video)
    how = (path, cfg.num_frames, cfg.sampler, cfg.reader)
    batch = model.collate([Sample(item.id, item.captions[0],
                                  read_frames(*how, size=cfg.frame_size))])
    out = SimpleNamespace(id=item.id, frames=read_frames(*how, size=THUMB), maps={})
    ids, mask = (batch["text"][k][0] for k in ("input_ids", "attention_mask"))
    out.words = word_pieces(model.backbone.tokenizer, ids[mask.bool()].tolist())
    for side in ("text", "video"):
        inputs = {k: v.to(device) for k, v in batch[side].items()}
        out.maps[side] = prototype_attention(model, side, inputs, layer)
    return out


# -----------------------------------------------------------------------------
# drawing: places are in inches from the top left, so that nothing can overlap

THUMB = 160                        # pixels of a thumbnail's shorter side


def page(height):
    return Figure(figsize=(WIDTH, height))


def box(fig, x, y, w, h):
    """Axes w x h inches, their top left corner at (x, y)."""
    W, H = fig.get_size_inches()
    return fig.add_axes([x / W, 1 - (y + h) / H, w / W, h / H])


def write(fig, x, y, text, **style):
    """A text whose top left corner is at (x, y) inches."""
    W, H = fig.get_size_inches()
    return fig.text(x / W, 1 - y / H, text, **{"va": "top", "ha": "left", **style})


def lines_of(text, width, most=3):
    """A text cut to lines of `width` characters, at most so many, joined."""
    return textwrap.wrap(text.strip(), width, max_lines=most, placeholder=" ...") or [""]


def strip(fig, x, y, w, h, frames, color=None):
    """Frames [T, H, W, 3] side by side in w x h inches, with a frame around if there is a color;
    none is cropped or stretched."""
    cell = w / len(frames)
    for t, frame in enumerate(frames):
        ax = box(fig, x + t * cell + 0.01, y, cell - 0.02, h)
        ax.imshow(frame)
        ax.axis("off")
    if color:
        (W, H), out = fig.get_size_inches(), 0.03
        fig.add_artist(Rectangle(((x - out) / W, 1 - (y + h + out) / H), (w + 2 * out) / W,
                                 (h + 2 * out) / H, fill=False, edgecolor=color, linewidth=1.8))


def save(fig, path):
    """A PNG that is complete or absent; signs that no font here has are told, in one line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fig.savefig(temporary, format="png", facecolor="white")
        os.replace(temporary, path)
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)
    missing = [re.match(NO_GLYPH, str(w.message)) for w in caught]
    missing = sorted({chr(int(m[1])) for m in missing if m})
    for w in caught:
        if not re.match(NO_GLYPH, str(w.message)):
            warnings.warn_explicit(w.message, w.category, w.filename, w.lineno)
    print(f"wrote {path}")
    if missing:
        print(f"note: in it are boxes for {len(missing)} signs that no font here has ("
              f"{''.join(missing[:8])}{'...' * (len(missing) > 8)}); install one that has them and "
              "name it in figures.py, font.family")


def title(run, args, rest):
    return f"{run.name} ({run.step}{run.note}), split {args.split}: {rest}"


def draw_attention(run, args):
    """Fig. 9: a block per item, its caption's words and its clip's frames as columns, prototypes as
    rows. Darker is more."""
    x0, cell, top, rows = 0.85, 0.15, 0.62, run.attention
    tall = cell * len(rows[0].maps["text"][1])
    high = min(0.58, max(min(5.75 / len(f), 0.62) * f.shape[1] / f.shape[2]
                         for f in (item.frames for item in rows)))
    longest = max(len(w) for item in rows for w in item.words)
    under = 0.1 + 0.043 * min(longest, 16)               # inches for the words, written slanted
    block = 0.2 + tall + under + 0.04 + high + 0.02 + tall + 0.28
    fig = page(top + block * len(rows))
    write(fig, 0.1, 0.08, title(run, args, f"{len(rows)} of {len(run.items)} videos"),
          weight="bold")
    write(fig, 0.1, 0.24, f"Prototypes' attention in layer {args.layer} of {run.layers} of the "
          "individual block, mean over heads. A row sums to 1 over the words (frames);\n"
          "in brackets what it gives to them at all, the rest goes to prototypes.", color="0.3")
    for n, item in enumerate(rows):
        y = top + n * block
        write(fig, 0.1, y, item.id, weight="bold")
        y += 0.2
        heat_map(fig, x0, y, min(5.75, 0.42 * len(item.words)), tall, item.maps["text"], item.words,
                 "words")
        y += tall + under + 0.04
        w = min(5.75, 0.62 * len(item.frames))
        strip(fig, x0, y, w, high, item.frames)
        heat_map(fig, x0, y + high + 0.02, w, tall, item.maps["video"],
                 range(1, len(item.frames) + 1), "frames")
    return fig


def heat_map(fig, x, y, w, h, map_, names, what):
    A, share = map_
    ax = box(fig, x, y, w, h)
    image = ax.imshow(A.numpy(), cmap="Blues", vmin=0, vmax=A.max().item(), aspect="auto")
    slant = dict(rotation=40, ha="right", rotation_mode="anchor") if what == "words" else {}
    ax.set_xticks(range(len(names)), [str(n)[:16] for n in names], **slant)
    ax.set_yticks(range(len(A)), [f"{p + 1} ({s:.0%})" for p, s in enumerate(share.tolist())])
    ax.tick_params(length=0, pad=2)
    ax.set_xticks(np.arange(len(names) - 1) + 0.5, minor=True)
    ax.set_yticks(np.arange(len(A) - 1) + 0.5, minor=True)
    ax.tick_params(which="minor", length=0)
    ax.grid(which="minor", color="white", linewidth=0.8)
    write(fig, 0.1, y + h / 2, what, va="center", color="0.3", rotation=90)
    bar = fig.colorbar(image, cax=box(fig, x + w + 0.08, y, 0.07, h), ticks=[0, A.max().item()],
                       format="%.2f")
    bar.ax.tick_params(length=0, labelsize=6)
    bar.outline.set_linewidth(0.4)


def draw_cmc(runs, args):
    """Fig. 8: for each direction one curve per run."""
    n_text, n_video = runs[0].S.shape
    fig = page(3.0)
    write(fig, 0.1, 0.08, f"Cumulative match, split {args.split}, {frames_of(runs)}, no DSL",
          weight="bold")
    gallery = {"best": f"{n_text} captions, the best own one counts (best)",
               "group": f"{n_video} groups of captions (group)"}[args.v2t]
    names = [r.name for r in runs]
    names = names if len(set(names)) == len(names) else [r.folder for r in runs]
    low = min(r.le(1).double().mean().item() for run in runs for r in (run.t2v, run.v2t))
    for side, (key, head) in enumerate((
            ("t2v", f"text to video: {n_text} queries\n{n_video} videos"),
            ("v2t", f"video to text: {n_video} queries\n{gallery}"))):
        ax = box(fig, 0.5 + 3.5 * side, 0.6, 3.1, 2.0)
        ax.set_title(head, loc="left")
        n = min(args.max_rank, n_text if key == "v2t" and args.v2t == "best" else n_video)
        for run, name, (color, line) in zip(runs, names, cycle(LINES)):
            curve = cmc(getattr(run, key), n).numpy()
            ax.plot(range(1, n + 1), curve, color=color, linestyle=line, linewidth=1.4,
                    label=f"{name}{run.note}, R@1 {curve[0]:.1f}")
        ax.set_xlim(1, max(n, 2))
        ax.set_ylim(10 * (10 * low // 1), 101)
        ax.set_xticks([k for k in (1, 5, *range(10, n + 1, 10)) if k <= n])
        ax.set_xlabel("rank K")
        if side == 0:
            ax.set_ylabel("queries of rank K or better (%)")
        ax.grid(color="0.9", linewidth=0.5)
        ax.spines[["top", "right"]].set_visible(False)
        bottom, top = ax.get_ylim()
        free = min(line.get_ydata()[n // 3] for line in ax.lines) > (bottom + top) / 2
        ax.legend(loc="lower right" if free else "best", framealpha=0.8, edgecolor="0.9")
    return fig


def frames_of(runs):
    counts = sorted({r.cfg.num_frames for r in runs})
    return " or ".join(map(str, counts)) + " frames"


def draw_tsne(runs, args):
    """Fig. 7: a column per run, fewest prototypes first; individual level above, local below. The
    levels of a single run stand beside each other."""
    runs = sorted(runs, key=lambda r: r.prototypes)
    levels = [level for level in ("I", "L") if any(level in r.tokens for r in runs)]
    beside = len(runs) == 1
    columns, lines = (len(levels), 1) if beside else (len(runs), len(levels))
    gap = 0.3 if beside else 0.15
    side = min(3.15, (WIDTH - 0.35) / columns - gap)
    fig = page(0.65 + lines * (side + 0.4))
    pairs = min(args.tsne_pairs, len(runs[0].items))
    write(fig, 0.1, 0.08, "t-SNE of the tokens of matching captions and clips, "
          f"split {args.split}: {pairs} of {len(runs[0].items)} pairs, seed {args.seed}",
          weight="bold")
    for i, run in enumerate(runs):
        write(fig, 0.35 + i * (side + gap), 0.26, f"{run.name} ({run.step}{run.note})\n"
              f"prototypes: {run.prototypes[0]} individual, {run.prototypes[1]} local",
              linespacing=1.3)
        for n, level in enumerate(levels):
            column, line = (n, 0) if beside else (i, n)
            x, y = 0.35 + column * (side + gap), 0.58 + line * (side + 0.4)
            if column == 0 or beside:
                write(fig, x - 0.04, y + side / 2, TOKENS[level][0], rotation=90, va="center",
                      ha="right")
            cloud(fig, x, y, side, run.tokens.get(level), level, args.seed)
    return fig


TOKENS = {"I": ("individual level", "words", "frames"), "L": ("local level", "phrases", "clips")}


def cloud(fig, x, y, side, tokens, level, seed):
    """One panel of t-SNE, and below it what it shows."""
    ax = box(fig, x, y, side, side)
    ax.set_xticks([])
    ax.set_yticks([])
    if tokens is None:
        write(fig, x + side / 2, y + side / 2, "not in this run", ha="center", color="0.4")
        return
    for k, (points, color) in enumerate(zip(plane(*tokens, seed), (BLUE, RED))):
        ax.scatter(*points.T, s=8, marker="o^"[k], color=color, alpha=0.55, linewidths=0)
        write(fig, x + k * 0.5 * side, y + side + 0.04,
              f"{MARKS[k]} {len(points)} {TOKENS[level][1 + k]}", color=color)
    got, mixed = mixing(*tokens)
    write(fig, x, y + side + 0.17, f"10 nearest: {100 * got:.0f}% other modality (mixed: "
          f"{100 * mixed:.0f}%)", color="0.3", fontsize=6.5)


def draw_geometry(runs, args):
    """Fig. 6 of SLQ: a panel per run, each on the first two components of its own points, and what
    Table 4 says of it below."""
    columns = min(3, len(runs))
    side, gap = min(2.6, (WIDTH - 0.3) / columns - 0.25), 0.25
    fig = page(0.45 + -(-len(runs) // columns) * (side + 1.0))
    write(fig, 0.1, 0.08, f"Principal components of captions and clips, split {args.split}; "
          "crosses are the centroids", weight="bold")
    for i, run in enumerate(runs):
        x, y = 0.2 + i % columns * (side + gap), 0.5 + i // columns * (side + 1.0)
        text, video, shares = components(*run.vectors)
        write(fig, x, y - 0.15, f"{run.name} ({run.step}{run.note})")
        ax = box(fig, x, y, side, side)
        ax.set_xticks([])
        ax.set_yticks([])
        for k, (points, color) in enumerate(((text, BLUE), (video, RED))):
            ax.scatter(*points.T, s=5, marker="o^"[k], color=color, alpha=0.45, linewidths=0)
            ax.scatter(*points.mean(0), s=60, marker="x", color="black", linewidths=2.6, zorder=3)
            ax.scatter(*points.mean(0), s=60, marker="x", color=color, linewidths=1.4, zorder=4)
            write(fig, x + k * 0.5 * side, y + side + 0.04,
                  f"{MARKS[k]} {len(points)} {('captions', 'clips')[k]}", color=color)
        ax.set_aspect("equal", "datalim")
        g = run.geometry
        write(fig, x, y + side + 0.19,
              f"shown: {shares[0]:.0%} + {shares[1]:.0%} of the variance\n"
              f"gap {g['gap']:.3f}, alignment {g['alignment']:.3f}\n"
              f"uniformity {g['uniformity, text']:.2f} captions, "
              f"{g['uniformity, video']:.2f} clips", color="0.3", fontsize=6.5, linespacing=1.3)
    return fig


def geometry_table(runs, args):
    """Lines of text: Table 4's columns for each run."""
    keys = list(runs[0].geometry)
    width = max(len(r.name) for r in runs) + 2
    return [f"geometry, split {args.split}: {len(runs[0].vectors[0])} texts, "
            f"{len(runs[0].vectors[1])} videos; lower is better for each by itself",
            " " * width + "".join(f"{k:>19}" for k in keys),
            *(f"{r.name:<{width}}" + "".join(f"{r.geometry[k]:19.3f}" for k in keys)
              for r in runs)]


def draw_examples(run, args, direction):
    """Fig. 5-6: a block per query, two beside each other. What is right is green and ticked; where
    it is not among the top k it stands below them with its rank."""
    t2v, v2t = evaluation.both_ranks(run.S, run.S, run.owner, "best")
    ranks = t2v if direction == "t2v" else v2t
    queries, how = queries_of(run, args, direction, ranks)
    S = run.S if direction == "t2v" else run.S.T                                # queries x gallery
    own = run.owner[:, None] == torch.arange(run.S.shape[1])                    # [Nt, Nv]
    own = own if direction == "t2v" else own.T
    blocks = []
    for q in queries:
        best = S[q].argsort(descending=True, stable=True)[:args.top_k].tolist()
        if not own[q, best].any():
            best.append(int(S[q].masked_fill(~own[q], float("-inf")).argmax()))
        blocks.append(SimpleNamespace(q=q, rank=ranks[q].item(), shown=[
            (g, S[q, g].item(), bool(own[q, g])) for g in best]))
    what = ("text to video", "videos") if direction == "t2v" else ("video to text", "captions")
    head = title(run, args, f"{what[0]}, {len(blocks)} of {S.shape[0]} queries {how}, "
                 f"{S.shape[1]} {what[1]}")
    return (clips_found if direction == "t2v" else captions_found)(run, args, blocks, head)


def queries_of(run, args, direction, ranks):
    """Indices of the queries to show, and how they were picked, in words."""
    if run.given:
        place = {v: n for n, v in enumerate(run.kept)}
        lost = [run.items[v].id for v in run.given if v not in place]
        if lost:
            raise ValueError(f"ids: the video of {lost[0]!r} can't be read")
        videos = [place[v] for v in run.given]
        if direction == "v2t":
            return videos, "by id"
        return [int((run.owner == v).int().argmax()) for v in videos], "by id"  # first captions
    fits = {"any": ranks > 0, "right": ranks <= 1, "wrong": ranks > 1}[args.pick]
    pool = fits.nonzero().flatten().tolist()
    how = {"any": "drawn by chance", "right": f"drawn from the {len(pool)} at rank 1",
           "wrong": f"drawn from the {len(pool)} beyond rank 1"}[args.pick]
    if not pool:
        raise ValueError(f"pick: no query of {direction} is {args.pick}")
    return choose(pool, args.samples, args.seed), how


def thumbs(run, v, n):
    item, cfg = run.items[run.kept[v]], run.cfg
    root = cfg.video_root or os.path.join(cfg.data, "videos")
    return read_frames(os.path.join(root, item.video), n, cfg.sampler, cfg.reader, THUMB)


def badge(fig, x, y, place, args, block):
    """Position (of a right one below the top k: its rank), score, and a tick if it is right."""
    _, score, right = block.shown[place]
    position = f"{place + 1}" if place < args.top_k else f"{block.rank:g}"
    style = dict(color=GREEN, weight="bold") if right else dict(color="0.25")
    write(fig, x, y, position, **style)
    if right:
        write(fig, x + 0.1 + 0.06 * len(position), y, "\N{CHECK MARK}", **style)
    write(fig, x, y + 0.13, f"{score:.3f}", fontsize=6.5, **style)
    return style


def clips_found(run, args, blocks, head):
    """Text to video: the caption, then a row of frames per clip."""
    for b in blocks:
        b.lines = lines_of(run.captions[b.q], 56)
        b.frames = [thumbs(run, g, args.frames_shown) for g, _, _ in b.shown]
    w = 2.8
    h = min(0.75, max(w / args.frames_shown * f.shape[1] / f.shape[2] for b in blocks
                      for f in b.frames))
    tall = [0.13 * len(b.lines) + 0.22 + (h + 0.08) * len(b.shown) for b in blocks]

    def draw(fig, x, y, b):
        write(fig, x, y, "\n".join(b.lines), weight="bold", linespacing=1.25)
        y += 0.13 * len(b.lines) + 0.03
        write(fig, x, y, f"ground truth: rank {b.rank:g}", color="0.3")
        y += 0.19
        for place, frames in enumerate(b.frames):
            badge(fig, x, y + h / 2 - 0.12, place, args, b)
            strip(fig, x + 0.6, y, w, h, frames, GREEN if b.shown[place][2] else None)
            y += h + 0.08
    return two_columns(blocks, tall, draw, head)


def captions_found(run, args, blocks, head):
    """Video to text: the clip, then a caption per line."""
    for b in blocks:
        b.frames = thumbs(run, b.q, args.frames_shown)
        b.lines = [lines_of(run.captions[g], 47) for g, _, _ in b.shown]
    w = 2.8
    h = min(0.75, max(w / args.frames_shown * b.frames.shape[1] / b.frames.shape[2]
                      for b in blocks))
    tall = [h + 0.24 + sum(max(0.13 * len(c), 0.25) + 0.06 for c in b.lines) for b in blocks]

    def draw(fig, x, y, b):
        write(fig, x, y + h / 2, "query", va="center")
        strip(fig, x + 0.6, y, w, h, b.frames)
        y += h + 0.04
        write(fig, x + 0.6, y, f"{run.items[run.kept[b.q]].id}, ground truth: rank {b.rank:g}",
              color="0.3")
        y += 0.2
        for place, lines in enumerate(b.lines):
            style = badge(fig, x, y, place, args, b)
            write(fig, x + 0.6, y, "\n".join(lines), linespacing=1.25, **style)
            y += max(0.13 * len(lines), 0.25) + 0.06
    return two_columns(blocks, tall, draw, head)


def two_columns(blocks, tall, draw, head):
    """Blocks of `tall` inches, two beside each other: draw(fig, x, y, block)."""
    lines = [tall[i:i + 2] for i in range(0, len(tall), 2)]
    gap, top = 0.2, 0.3 + 0.13 * len(lines_of(head, 105))
    fig = page(top + sum(max(t) + gap for t in lines))
    write(fig, 0.1, 0.08, "\n".join(lines_of(head, 105)), weight="bold", linespacing=1.25)
    y = top
    for n, line in enumerate(lines):
        for side, b in enumerate(blocks[2 * n:2 * n + 2]):
            draw(fig, 0.1 + side * WIDTH / 2, y, b)
        y += max(line) + gap
    return fig


# -----------------------------------------------------------------------------
# the script

def check_settings(args):
    wanted = [p.strip() for p in args.only.split(",") if p.strip()] or list(PICTURES)
    for picture in wanted:
        if picture not in PICTURES:
            raise ValueError(f"only: {picture!r} is not one of {', '.join(PICTURES)}")
    for key, allowed in (("v2t", evaluation.PROTOCOLS), ("pick", ("any", "right", "wrong"))):
        if getattr(args, key) not in allowed:
            raise ValueError(f"{key} must be one of {', '.join(allowed)}, not "
                             f"{getattr(args, key)!r}")
    for key, least in (("samples", 1), ("layer", 1), ("top_k", 1), ("frames_shown", 1),
                       ("max_rank", 2), ("tsne_pairs", 4), ("seed", 0)):
        if getattr(args, key) < least:
            raise ValueError(f"{key} must be at least {least}, not {getattr(args, key)}")
    return wanted


def same_gallery(runs):
    """The curves of one picture are of the same queries and the same gallery."""
    for run in runs[1:]:
        of = [([r.items[v].id for v in r.kept], r.captions) for r in (runs[0], run)]
        if of[0] != of[1]:
            raise ValueError(f"compare: {run.folder} has other videos or captions than "
                             f"{runs[0].folder}; compare runs on the same data (--data sets it)")


def main(args):
    wanted, explicit = check_settings(args), bool(args.only)
    others = [f.strip() for f in args.compare.split(",") if f.strip()]
    # pictures that show other runs too
    shared = [p for p in wanted if p in ("cmc", "tsne", "geometry")]
    runs = [gather(args, wanted, explicit)]
    for folder in others if shared else ():
        runs.append(gather(SimpleNamespace(**{**vars(args), "ckpt": folder, "ids": ""}), shared,
                           explicit))
    run, out = runs[0], Path(args.ckpt, "figures")
    if "attention" in run.has:
        save(draw_attention(run, args), out / f"attention_{args.split}.png")
    if "cmc" in run.has:
        same_gallery(runs)
        save(draw_cmc(runs, args), out / f"cmc_{args.split}.png")
    if "tsne" in run.has:
        save(draw_tsne([r for r in runs if "tsne" in r.has], args),
             out / f"tsne_{args.split}.png")
    if "geometry" in run.has:
        having = [r for r in runs if "geometry" in r.has]
        same_gallery(having)
        print("\n".join(geometry_table(having, args)))
        save(draw_geometry(having, args), out / f"geometry_{args.split}.png")
    if "examples" in run.has:
        for direction in ("t2v", "v2t"):
            save(draw_examples(run, args, direction),
                 out / f"examples_{direction}_{args.split}.png")


if __name__ == "__main__":
    from train import one_line_errors
    one_line_errors(lambda: main(args))
