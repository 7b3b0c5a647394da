"""
A checkpoint -> features -> similarity -> tables. All metrics of the repo are defined here, once.

    $ python eval.py --ckpt out/demo_mars                        # best checkpoint on the test split
    $ torchrun --nproc_per_node=2 eval.py --ckpt out/demo_mars   # the same bits, twice as fast
    $ python eval.py --ckpt out/demo_mars,out/demo_baseline      # one after the other, then a table
    $ python eval.py --compare out/demo_mars,out/demo_baseline   # that table, from metrics.json

    videos, captions --model.encode_*--> Features --model.similarity--> S [Nt, Nv] --> ranks

S[i, j] is text i against video j, always text first. T2V: every caption is a query, the videos are
the gallery. V2T: every video is a query. A tie costs half a rank, whatever the order.
"""
ckpt = ""              # run folder (out/demo_mars), or one step folder inside it; or several,
                       # comma-separated
which = "best"         # checkpoint of the run: best (by the validation split) or latest
split = "test"         # <data>/<split>.jsonl
v2t = "best"           # V2T with several captions per video: best (own caption that ranks highest
                       # among all captions) or group (captions max-pooled per video)
dsl = False            # also report dual softmax scores; they see the whole set of queries at once
# DSL weighs S by softmax(S / dsl_temperature) over the queries. The papers state no value. At 1 the
# softmax over cosines is so flat that DSL does nothing. 0.02 is 1 / gamma for MARS's default gamma,
# 50; a run may be trained with another temperature (demo_mars: 1 / 20, PHA-Net: 0.01)
dsl_temperature = 0.02
per_slot = False       # also T2V of every slot alone (MARS, Fig. 3)
by = ""                # also T2V for each value of this field of the annotations (demo: kind)
within = ""            # with by: and how often the right video beats one of another value that has
                       # this field in common with it (demo: family, so each clip and its siblings)
json = ""              # also write the result to this file (<run>/metrics.json is always written)
report = ""            # also write a page (HTML) of captions whose video is not first, worst first
compare = ""           # comma-separated run folders: one table from their metrics.json, nothing run
device = "auto"        # cuda, cpu; auto: a GPU if there is one
# what follows is as in training unless it is given
data: str | None = None            # folder of the annotations; alone it moves video_root with it
video_root: str | None = None      # folder of the videos; "": <data>/videos
eval_batch_size: int | None = None # items per forward pass of a process
num_workers: int | None = None     # loader processes
frame_cache: str | None = None     # folder for decoded frames
cache_vision: str | None = None    # folder for what the frozen vision tower makes of them
on_bad_video: str | None = None    # raise, whatever training did; or skip a video that can't be
                                   # read and its captions: the gallery is smaller then
min_decoded: float | None = None   # share of its frames that has to decode
video_timeout: float | None = None # seconds one video may take
reader: str | None = None          # pyav or decord
num_frames: int | None = None      # frames per video; prints a warning when it differs
text_prompt: str | None = None     # the same
video_prompt: str | None = None    # the same
paragraph: bool | None = None      # the same: a video's captions joined to one
backbone: str | None = None        # where the backbone is now, if it has moved
# end of settings
import json as jsonlib
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

from configurator import at_once, check_output, configure, convert, one_line_errors, type_name


def find_checkpoint(args):
    """The folder of the checkpoint that is asked for."""
    run = Path(args.ckpt)
    if args.which not in ("best", "latest"):
        raise ValueError(f"which must be best or latest, not {args.which!r}")
    if not args.ckpt or not run.is_dir():
        found = sorted(str(p.parent.parent) for p in Path("out").glob("*/latest/config.json"))
        raise FileNotFoundError(f"--ckpt {args.ckpt!r} is no run folder; there are: "
                                f"{', '.join(found) or 'none yet, run train.py first'}")
    step = run if (run / "model.safetensors").is_file() else run / args.which
    for name in ("config.json", "model.safetensors"):
        if not (step / name).is_file():
            raise FileNotFoundError(f"{step / name} not found: {run} holds no finished "
                                    f"{args.which!r} checkpoint, train it or give another --which")
    return step


def read_json(path):
    try:
        found = jsonlib.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("it holds no {...}")
        return found
    except ValueError as e:
        raise ValueError(f"{path} is no JSON file ({e}); delete it or restore it") from None


def run_settings(file):
    """The settings in a run's config.json, as they stand there."""
    settings = read_json(file).get("settings")
    if not isinstance(settings, dict):
        raise ValueError(f"{file} holds no settings of a run; restore it, or train the run again")
    for key in ("model", "data"):
        if not isinstance(settings.get(key), str):
            raise ValueError(f"{file}: the run's setting {key} is {settings.get(key)!r}, which is "
                             "no str; restore it, or train the run again")
    return settings


def configured():
    """The settings of the command line, and whether the files they name are there."""
    args = configure(__file__)
    if not args.compare:
        from data import find_annotations  # numpy is imported, torch is not
        check_output("json", args.json)
        check_output("report", args.report)
        for one in each_run(args):
            results = os.path.join(one.ckpt, "metrics.json")
            if args.json and os.path.realpath(args.json) == os.path.realpath(results):
                raise ValueError(f"json '{args.json}' is where the run keeps the results of all "
                                 "its splits; name another file")
            trained = run_settings(find_checkpoint(one) / "config.json")
            data = trained["data"] if args.data is None else args.data
            find_annotations(os.path.join(data, f"{args.split}.jsonl"))
    return args


def each_run(args):
    """The settings for each of the runs that --ckpt names."""
    runs = [r.strip() for r in args.ckpt.split(",") if r.strip()]
    if len(runs) < 2 or os.path.isdir(args.ckpt):            # a folder may have a comma in its name
        return [args]
    for key in ("json", "report"):
        if getattr(args, key):
            raise ValueError(f"{key} is the file of one run, and --ckpt names {len(runs)}; "
                             "evaluate them one by one for it, or read their metrics.json")
    return [SimpleNamespace(**{**vars(args), "ckpt": run}) for run in runs]


if __name__ == "__main__":  # before torch is imported: --help, typos, missing files answer at once
    args = at_once(configured)

import torch
import torch.distributed as dist
from tqdm import tqdm

import vision_cache
from checkpoint import check_backbone, load_trainable, read, write_atomic
from data import Texts, Videos, content, load_annotations, make_loader, reading

PROTOCOLS = ("best", "group")      # of V2T, see the setting v2t
METRICS = ("R@1", "R@5", "R@10", "MdR", "MnR", "RSum")
TILE = 512                         # texts x videos scored at once
REPORTED = 50                      # captions on the page of --report, and
BEFORE = 3                         # of those ranked before the right video so many


# -----------------------------------------------------------------------------
# metrics

def ranks(sim, target):
    """
    Rank of each query's target: 1 + #(strictly higher) + #(equal others) / 2. -> float64 [Nq]
    With one target that is the expected rank under random tie-breaking, whatever the order.

    sim     [Nq, Ng] scores of the gallery for each query
    target  [Nq] index of the right candidate, or several: lists of indices or a bool mask [Nq, Ng].
            Of several the best ranked counts, and the other right ones are not in its way. (Where
            several right ones tie with others, / 2 is on the safe side of the expected rank.)
    """
    sim = torch.as_tensor(sim)
    sim = sim if sim.dtype == torch.float64 else sim.float()
    check_finite(sim)
    own = target_mask(target, sim.shape)                           # [Nq, Ng]
    best = sim.masked_fill(~own, float("-inf")).amax(1, keepdim=True)
    higher = ((sim > best) & ~own).sum(1)
    equal = ((sim == best) & ~own).sum(1)
    return 1 + higher.double() + equal.double() / 2


def target_mask(target, shape):
    if torch.is_tensor(target) and target.dtype == torch.bool:
        own = target
    else:
        own = torch.zeros(shape, dtype=torch.bool)
        for i, t in enumerate(target):
            t = torch.as_tensor(t)
            if i < shape[0] and t.numel() and 0 <= t.min() and t.max() < shape[1]:
                own[i, t] = True
        if len(target) != shape[0]:
            raise ValueError(f"ranks: {len(target)} targets for {shape[0]} queries")
    if own.shape != torch.Size(shape) or not own.any(1).all():
        raise ValueError(f"ranks: scores are {tuple(shape)}, so every query needs a target in "
                         f"0..{shape[1] - 1}; query {int(own.any(1).int().argmin())} has none")
    return own


def check_finite(S, text_ids=None, video_ids=None):
    """A score that is NaN or infinite sorts anywhere: stop, and name the pairs."""
    bad = (~torch.isfinite(S)).nonzero()
    if len(bad) == 0:
        return
    name = lambda ids, i: ids[i] if ids is not None else i         # noqa: E731
    first = ", ".join(f"({name(text_ids, i)}, {name(video_ids, j)})" for i, j in bad[:3].tolist())
    raise ValueError(f"{len(bad)} of {S.numel()} similarities are not finite, first (row, column): "
                     f"{first}; look for NaN in the checkpoint or in these items' input")


def metrics(r):
    """Recalls in percent, median (mean of the middle two) and mean of 1-based ranks."""
    r = torch.as_tensor(r, dtype=torch.float64).sort().values
    out = {f"R@{k}": 100 * (r <= k).double().mean().item() for k in (1, 5, 10)}
    out["MdR"] = (r[(len(r) - 1) // 2] + r[len(r) // 2]).item() / 2
    out["MnR"] = r.mean().item()
    out["RSum"] = out["R@1"] + out["R@5"] + out["R@10"]
    return out


def both_ranks(S_t2v, S_v2t, owner, protocol):
    """Ranks of all queries from scores [Nt, Nv]: T2V [Nt], V2T [Nv]; owner[i]: video of text i."""
    owner = torch.as_tensor(owner)
    own = owner[:, None] == torch.arange(S_t2v.shape[1])           # [Nt, Nv]
    if own.shape != S_t2v.shape or S_t2v.shape != S_v2t.shape:
        raise ValueError(f"scores must be texts x videos, {tuple(own.shape)}, "
                         f"not {tuple(S_t2v.shape)} and {tuple(S_v2t.shape)}")
    t2v = ranks(S_t2v, owner)
    if protocol == "best":
        return t2v, ranks(S_v2t.T, own.T)
    # group: G[i, j]: best caption of video i against video j
    index = owner[:, None].expand_as(S_v2t)
    G = torch.full((own.shape[1],) * 2, float("-inf"), dtype=S_v2t.dtype)
    G = G.scatter_reduce(0, index, S_v2t, "amax")                  # [Nv, Nv]
    return t2v, ranks(G.T, torch.arange(len(G)))


def both_directions(S_t2v, S_v2t, owner, protocol):
    """Metrics from scores [Nt, Nv]; owner[i] is the video of text i."""
    t2v, v2t = (metrics(r) for r in both_ranks(S_t2v, S_v2t, owner, protocol))
    return {"t2v": t2v, "v2t": v2t, "SumR": t2v["RSum"] + v2t["RSum"]}


def dual_softmax(S, temperature):
    """
    DSL scores for T2V and V2T, both [Nt, Nv]: S x softmax of S / temperature over the *queries*.

    fp64, because a candidate nobody asks for gets weights that underflow to ties in fp32.
    """
    S = S.double()
    return S * (S / temperature).softmax(0), S * (S / temperature).softmax(1)


# -----------------------------------------------------------------------------
# features and scores

class Collate:
    """Samples -> (positions of those that could be read, model inputs). For loader workers."""

    def __init__(self, model):
        self.collate = model.collate

    def __call__(self, samples):
        kept = [i for i, s in enumerate(samples) if s.error is None]
        return kept, self.collate([samples[i] for i in kept]) if kept else None


@torch.no_grad()
def encode(model, side, dataset, order, batch_size, num_workers=0, device="cpu",
           autocast=nullcontext, source="the data"):
    """
    Features [n, ...] of the samples in `order` (side: text or video), sorted by index; the indices
    of those that could be read; and of those whose text was cut to the context limit.

    Ranks take the batches in turn. A batch is the same however many they are, and so is every bit.
    """
    rank, n_rank = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    order = list(order)
    mine = [order[i:i + batch_size] for i in range(0, len(order), batch_size)][rank::n_rank]
    loader = make_loader(dataset, mine, Collate(model), num_workers)
    indices, cut, parts = [], [], []
    bar = tqdm(loader, desc=f"encode {side}", leave=False, disable=rank > 0)
    for batch, (kept, inputs) in zip(mine, bar):
        if not kept:
            continue
        inputs = {k: v.to(device, non_blocking=True) if torch.is_tensor(v) else v
                  for k, v in inputs[side].items()}
        with autocast():
            features = getattr(model, f"encode_{side}")(vision_cache.fill(model, inputs))
        parts.append({k: (v.float() if v.is_floating_point() else v).cpu()
                      for k, v in features.items()})
        batch = [batch[i] for i in kept]
        indices += batch
        cut += [i for i, c in zip(batch, inputs["cut"].tolist() if "cut" in inputs else []) if c]
    if n_rank > 1:
        boxes = [None] * n_rank
        dist.all_gather_object(boxes, (indices, cut, parts))
        indices, cut, parts = (sum(lists, []) for lists in zip(*boxes))
    if not parts:
        raise ValueError(f"not one {side} of the {len(order)} in {source} could be read")
    where = torch.tensor(indices).argsort()
    return {k: torch.cat([p[k] for p in parts])[where] for k in parts[0]}, sorted(indices), cut


@torch.no_grad()
def similarity(score, text, video, tile=TILE, device="cpu", say=lambda *_: None, quiet=False):
    """
    score (model.similarity or slot_similarity) in tiles over both axes -> fp32 [..., Nt, Nv].

    Matrix products treat the odd rows at an edge differently in the last bit. So tiles are filled
    up to a multiple of 64 by repeating an item: the tile's size changes no bit and breaks no tie.
    Ranks take the rows of tiles in turn. say: told the time that a long computation will take.
    """
    rank, n_rank = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    def tiles(features):
        n = len(next(iter(features.values())))
        for start in range(0, n, tile):
            size = min(tile, n - start)
            yield start + torch.arange(-(-size // 64) * 64).clamp(max=size - 1), size

    def cut(features, index):
        return {k: v[index].to(device) for k, v in features.items()}

    rows, columns = list(tiles(text)), list(tiles(video))
    mine, strips = rows[rank::n_rank], []
    bar = tqdm(total=len(mine) * len(columns), desc="score", leave=False, unit="tile",
               disable=quiet or rank > 0)
    for t, nt in mine:
        t, strip = cut(text, t), []
        for v, nv in columns:
            begun = time.perf_counter()
            strip.append(score(t, cut(video, v))[..., :nt, :nv].float().cpu())
            bar.update()
            left = (time.perf_counter() - begun) * (bar.total - bar.n)
            if rank == 0 and bar.n == 2 and left > 30:  # the first tile warms up, the second tells
                say(f"scoring {sum(n for _, n in rows)} texts x {sum(n for _, n in columns)} "
                    f"videos will take about {left / 60:.1f} minutes")
        strips.append(torch.cat(strip, -1))
    bar.close()
    if n_rank > 1:
        boxes = [None] * n_rank
        dist.all_gather_object(boxes, strips)
        strips = [boxes[i % n_rank][i // n_rank] for i in range(len(rows))]
    return torch.cat(strips, -2)


def slots_alone(S_m, owner):
    """MARS Fig. 3: T2V of each slot by itself, and the queries that only one slot gets right."""
    r = torch.stack([ranks(S, owner) for S in S_m])                # [M, Nt]
    first = r <= 1
    alone = first & (first.sum(0) == 1)                            # [M, Nt]
    return {"t2v": [metrics(x) for x in r], "exclusive": alone.sum(1).tolist(),
            "exclusive_total": int(alone.sum())}


def field_values(items, field):
    """What each item's annotation says in `field`, as text; None where it has no such field."""
    values = [item.fields.get(field) for item in items]
    if all(v is None for v in values):
        there = sorted({k for item in items for k in item.fields})
        raise ValueError(f"no line of the split has a field {field!r}; beside id, video and "
                         f"captions there are: {', '.join(there) or 'none'}")
    for v in values:
        if isinstance(v, (list, dict)):
            raise ValueError(f"the field {field!r} holds lists or objects, such as {str(v)[:40]}; "
                             "it takes one with a word or a number per video")
    return [v if v is None else str(v) for v in values]


def by_field(S, owner, items, field, within=""):
    """
    T2V of the queries whose video has each value of `field`, in the whole gallery S [Nt, Nv].

    within: a second field. Videos that share it are siblings; "beats"[v] is how often, in percent
    of all pairs, a query's own video scores above a sibling of value v (a tie is half of that).
    Each pair is a gallery of two, so chance is 50.
    """
    owner = torch.as_tensor(owner)
    values, r = field_values(items, field), ranks(S, owner)
    own = S.gather(1, owner[:, None])                              # [Nt, 1]
    wins = (S < own).double() + (S == own).double() / 2            # [Nt, Nv]
    sibling = torch.zeros(S.shape, dtype=torch.bool)
    if within:
        shared = field_values(items, within)
        code = torch.tensor([shared.index(v) if v is not None else -1 for v in shared])  # [Nv]
        sibling = (code[owner][:, None] == code) & (code >= 0)     # [Nt, Nv]
        sibling &= owner[:, None] != torch.arange(S.shape[1])
    has = {v: torch.tensor([x == v for x in values]) for v in sorted(set(values) - {None})}  # [Nv]
    out = {}
    for value, mask in has.items():
        mine = mask[owner]                                         # [Nt]
        out[value] = {"n_text": int(mine.sum()), "t2v": metrics(r[mine])}
        if within:
            pairs = {v: mine[:, None] & sibling & of_v for v, of_v in has.items()}
            out[value]["beats"] = {v: 100 * wins[p].mean().item()
                                   for v, p in pairs.items() if p.any()}
    return {"field": field, "within": within, "values": out}


def encode_split(model, items, cfg, split, **how):
    """
    Features of a split: (text, row, owner, video, kept, number of captions that were cut).

    row [Nt]     row of `text` of each caption. Captions that are the same word for word are encoded
                 once, so that their scores are equal to the last bit and count as the ties they are
    owner [Nt]   index in `video` of each caption's video
    kept [Nv]    index in items of each video; one that is skipped leaves with its captions

    Three items with captions [a, b], [c], [a], the second unreadable: kept [0, 2], the captions are
    a, b, a with owner [0, 0, 1], `text` holds a and b, and row is [0, 1, 0].
    """
    root = cfg.video_root or os.path.join(cfg.data, "videos")
    videos = Videos(items, root, cfg.num_frames, **reading(cfg))
    videos.clips.vision = vision_cache.attach(model, cfg)
    how |= dict(batch_size=cfg.eval_batch_size, num_workers=cfg.num_workers,
                source=f"{os.path.join(cfg.data, split)}.jsonl (videos in {root})")
    video, kept, _ = encode(model, "video", videos, range(len(items)), **how)
    texts, place = Texts(items), {v: n for n, v in enumerate(kept)}
    ours = [i for i, v in enumerate(texts.owner) if v in place]
    first = {}                                        # caption -> its first index
    for i in ours:
        first.setdefault(texts.captions[i].strip(), i)
    # batches of captions of about the same length waste little on padding
    order = sorted(first.values(), key=lambda i: (len(texts.captions[i]), i))
    text, read, cut = encode(model, "text", texts, order, **how)
    row_of = {i: n for n, i in enumerate(read)}       # caption's first index -> row of `text`
    source = [first[texts.captions[i].strip()] for i in ours]
    owner = torch.tensor([place[texts.owner[i]] for i in ours])
    row = torch.tensor([row_of[i] for i in source])
    cut = set(cut)
    return text, row, owner, video, kept, sum(i in cut for i in source)


def evaluate(model, items, cfg, split, device="cpu", autocast=nullcontext, v2t="best", dsl=None,
             per_slot=False, by="", within="", found=None):
    """
    The result of one split as it stands in metrics.json, on every rank alike. dsl: temperature.
    found: a dict, gets the scores "S" [Nt, Nv] with "owner" and "kept" (see encode_split).

    cfg: data, video_root, num_frames, what data.reading wants, num_workers, eval_batch_size, and
    what the model calls its prompts.
    """
    if v2t not in PROTOCOLS:
        raise ValueError(f"v2t must be one of {', '.join(PROTOCOLS)}, not {v2t!r}")
    if dsl is not None and not 0 < dsl < float("inf"):
        raise ValueError(f"dsl_temperature must be above 0, not {dsl}")
    if per_slot and not hasattr(model, "slot_similarity"):
        raise ValueError(f"per_slot: {type(model).__name__} has no slots")
    if within and not by:
        raise ValueError("within is given without by: name the field to report by, as in --by=kind")
    for key in filter(None, (by, within)):
        field_values(items, key)                 # better now than after the encoding
    was_training = model.training
    model.eval()
    text, row, owner, video, kept, n_cut = encode_split(model, items, cfg, split,
                                                        device=device, autocast=autocast)
    model.train(was_training)
    S = similarity(model.similarity, text, video, device=device, say=tqdm.write)[row]  # [Nt, Nv]
    check_finite(S, [f"a caption of {items[kept[v]].id}" for v in owner],
                 [items[v].id for v in kept])
    if found is not None:
        found |= {"S": S, "owner": owner, "kept": kept}
    result = both_directions(S, S, owner, v2t)
    result |= {"n_text": len(row), "n_video": len(kept), "split": split, "v2t_protocol": v2t,
               "dsl": False, "num_frames": cfg.num_frames,
               "prompt": {k: p for k, p in sorted(vars(cfg).items()) if k.endswith("prompt")},
               "model": type(model).__name__,
               "duplicate_captions": len(row) - len(text[next(iter(text))]),
               "cut_captions": n_cut, "skipped_videos": len(items) - len(kept)}
    if dsl is not None:
        result["dsl"] = {"temperature": dsl}
        result["dsl_rows"] = both_directions(*dual_softmax(S, dsl), owner, v2t)
    if per_slot:
        S_m = similarity(model.slot_similarity, text, video, device=device)[:, row]    # [M, Nt, Nv]
        result["per_slot"] = slots_alone(S_m, owner)
    if by:
        result["by"] = by_field(S, owner, [items[v] for v in kept], by, within)
    return result


def failures(S, owner, kept, items):
    """Captions whose own video is not first, worst first, as page.write_failures wants them."""
    captions = [c for v in kept for c in items[v].captions]         # [Nt]
    r = ranks(S, owner)

    def scored(i, v):
        return items[kept[v]].id, items[kept[v]].video, float(S[i, v])

    out = []
    for i in r.argsort(descending=True, stable=True).tolist():
        if r[i] > 1:
            own = int(owner[i])
            order = S[i].argsort(descending=True, stable=True).tolist()
            out.append({"caption": captions[i], "rank": float(r[i]), "true": scored(i, own),
                        "before": [scored(i, v) for v in order if v != own
                                   and S[i, v] >= S[i, own]][:BEFORE]})
    return out


def write_report(path, found, items, cfg, split):
    import page
    rows, root = failures(items=items, **found), cfg.video_root or os.path.join(cfg.data, "videos")
    for row in rows[:REPORTED]:
        for key, of in (("true", [row["true"]]), ("before", row["before"])):
            of = [(name, os.path.join(root, video), s) for name, video, s in of]
            row[key] = of[0] if key == "true" else of
    page.write_failures(path, rows[:REPORTED],
                        f"split {split}: {len(rows)} of {len(found['owner'])} captions, here are "
                        f"the {min(REPORTED, len(rows))} whose video ranks worst")


# -----------------------------------------------------------------------------
# tables

def line(label, m):
    return f"{label:<52}" + "".join(f"{m[k]:8.2f}" for k in METRICS)


def table(r):
    """What was measured on what, in full; then one line per direction."""
    n_text, n_video = r["n_text"], r["n_video"]
    gallery = f"{n_text} captions" if r["v2t_protocol"] == "best" else f"{n_video} caption groups"
    t2v = f"text -> video (T2V), {n_text} queries, {n_video} videos"
    v2t = f"video -> text (V2T), {n_video} queries, {gallery}"
    out = [f"split {r['split']}: {n_video} videos ({r['skipped_videos']} skipped), {n_text} "
           f"captions ({r['duplicate_captions']} repeat an earlier one, {r['cut_captions']} cut)",
           f"{r['num_frames']} frames, V2T protocol {r['v2t_protocol']}, no DSL",
           " " * 52 + "".join(f"{k:>8}" for k in METRICS),
           line(t2v, r["t2v"]), line(v2t, r["v2t"]), f"SumR {r['SumR']:.2f}"]
    if r["dsl"]:
        d = r["dsl_rows"]
        out += [line(t2v.replace("T2V", "T2V+DSL"), d["t2v"]),
                line(v2t.replace("V2T", "V2T+DSL"), d["v2t"]),
                f"SumR {d['SumR']:.2f}, DSL at temperature {r['dsl']['temperature']} over all "
                "queries of the split"]
    if "per_slot" in r:
        p = r["per_slot"]
        out += [line(f"slot {m + 1} alone (T2V), only it ranks first: {p['exclusive'][m]}", x)
                for m, x in enumerate(p["t2v"])]
        out += [f"rank 1 in exactly one slot: {p['exclusive_total']} of {n_text} queries"]
    if "by" in r:
        out += by_lines(r["by"])
    return "\n".join(out)


def by_lines(b):
    out = [line(f"{b['field']} {value} (T2V), {x['n_text']} queries", x["t2v"])
           for value, x in b["values"].items()]
    for value, x in b["values"].items():
        if x.get("beats"):
            beaten = ", ".join(f"{other} {p:.1f}" for other, p in x["beats"].items())
            out += [f"{value} scores above what shares its {b['within']}, % (chance 50): {beaten}"]
    return out


def is_result(r, dsl=False):
    """Is r a result as `evaluate` makes it, with all that a comparison reads of it?"""
    try:
        rows = [r, r["dsl_rows"]] if dsl else [r]
        numbers = [r["n_text"], r["n_video"], r["num_frames"], r.get("trainable", 0)]
        numbers += [r["dsl"]["temperature"]] if dsl else []
        for x in rows:
            numbers += [x["SumR"], *(x[side][k] for side in ("t2v", "v2t") for k in METRICS[:3])]
        return {"v2t_protocol", "prompt", "dsl"} <= r.keys() and \
            all(type(x) in (int, float) for x in numbers)
    except (KeyError, TypeError, AttributeError):
        return False


def compare_runs(folders, split, dsl=False):
    """The comparison of runs by their metrics.json."""
    folders, rows = [f.strip() for f in folders if f.strip()], []
    if not folders:
        raise ValueError("compare names no run folder; separate several with commas")
    for folder in folders:
        file = Path(folder, "metrics.json")
        if not file.is_file():
            raise FileNotFoundError(f"{file} not found: run `python eval.py --ckpt {folder}` first")
        r = read_json(file).get(split)
        again = f"`python eval.py --ckpt {folder} --split {split}{' --dsl' if dsl else ''}`"
        if r is None or (dsl and is_result(r) and not r["dsl"]):
            raise ValueError(f"{file} has no results on {split!r}{' with DSL' if dsl else ''}: run "
                             f"{again} first")
        if not is_result(r, dsl):
            raise ValueError(f"{file} holds no whole result of eval.py for {split!r}: run {again} "
                             "again")
        best = Path(folder, "best")
        if best.is_symlink() and best.resolve().name != r.get("checkpoint", best.resolve().name):
            print(f"warning: {file} holds the result of {r['checkpoint']}, and the run's best "
                  f"checkpoint is {best.resolve().name} now: run {again}", file=sys.stderr)
        rows.append(r)
    return comparison(folders, rows, split, dsl)


def comparison(folders, rows, split, dsl=False):
    """One line per run's result; refused when galleries or protocols differ."""
    a = rows[0]
    for folder, r in zip(folders, rows):
        for key in ["data"] * ("data" in a and "data" in r) + [
                "n_text", "n_video", "v2t_protocol"] + ["dsl"] * dsl + ["num_frames", "prompt"]:
            if key == "prompt" and r.get("model") != a.get("model"):
                continue                         # another method has other words
            if r[key] != a[key]:
                text = f"{key} is {a[key]!r} in {folders[0]} and {r[key]!r} in {folder}"
                if key not in ("num_frames", "prompt"):
                    raise ValueError(f"these runs cannot be compared on {split}: {text}")
                print(f"warning: {text}", file=sys.stderr)
    names = [Path(f).name for f in folders]
    names = names if len(set(names)) == len(names) else folders
    width = max(map(len, names)) + 2
    out = [f"split {split}: {a['n_video']} videos, {a['n_text']} captions, V2T protocol "
           f"{a['v2t_protocol']}, " + (f"DSL at temperature {a['dsl']['temperature']}" if dsl
                                       else "no DSL"),
           " " * width + f"{'text -> video (T2V)':^24}  {'video -> text (V2T)':^24}",
           " " * width + f"{'R@1':>8}{'R@5':>8}{'R@10':>8}  " * 2 + f"{'SumR':>8}{'trainable':>12}"]
    for name, r in zip(names, rows):
        m = r["dsl_rows"] if dsl else r
        out.append(f"{name:<{width}}")
        for direction in (m["t2v"], m["v2t"]):
            out[-1] += "".join(f"{direction[k]:8.2f}" for k in METRICS[:3]) + "  "
        out[-1] += f"{m['SumR']:8.2f}{r.get('trainable', '?'):>12}"
    return "\n".join(out)


# -----------------------------------------------------------------------------
# the script

def load_settings(args, say=print):
    """The run's settings with the command line's over them, the checkpoint's folder, and which of
    the settings given make the result another one than the run's own."""
    step = find_checkpoint(args)
    settings = with_defaults(run_settings(step / "config.json"), step / "config.json")
    if args.data is not None and args.video_root is None:
        settings["video_root"] = ""
    settings["on_bad_video"] = "raise"           # a smaller gallery has to be asked for
    other = {}                                   # what makes it another result than the run's own
    for key in ("data", "video_root", "eval_batch_size", "num_workers", "frame_cache",
                "cache_vision", "on_bad_video", "min_decoded", "video_timeout", "reader",
                "num_frames", "text_prompt", "video_prompt", "paragraph", "backbone"):
        value = getattr(args, key, None)         # figures.py asks for fewer of them
        if value is None or value == settings.get(key):
            continue
        if key not in settings:
            raise ValueError(f"{key} is given, and {args.ckpt} is a run of {settings['model']}, "
                             f"which has no setting {key}; leave it out")
        if key in ("num_frames", "text_prompt", "video_prompt", "paragraph"):
            say(f"warning: {key} is {value!r} here and {settings.get(key)!r} in training; the "
                "result is not the run's")
        if key not in ("eval_batch_size", "num_workers", "frame_cache", "cache_vision",
                       "video_timeout", "reader"):
            other[key] = value
        settings[key] = value
    settings["out_dir"] = args.ckpt              # where the run is now
    return SimpleNamespace(**settings), step, other


def with_defaults(settings, file="config.json"):
    """The settings in a run's file, checked. A run older than a setting of today did what that
    setting's default does."""
    import train
    from configurator import read_settings
    here = Path(train.__file__)
    if settings.get("model") not in train.SETTINGS:
        raise ValueError(f"{file}: model {settings.get('model')!r} is none of "
                         f"{', '.join(train.SETTINGS)}; restore it, or train the run again")
    source, config = train.SETTINGS[settings["model"]]
    known = read_settings(here) | read_settings(here.parent / source, config)
    for key in settings.keys() & known.keys():
        try:
            convert(settings[key], known[key][0])
        except ValueError:
            raise ValueError(f"{file}: the run's setting {key} is {settings[key]!r}, which "
                             f"is no {type_name(known[key][0])}; restore it, or train the run "
                             "again") from None
    return {**{key: default for key, (_, default, _) in known.items()}, **settings}


def load_weights(model, step):
    """A checkpoint's trained tensors into the model, which must have the backbone they had."""
    check_backbone(model, read_json(step / "config.json"), step / "config.json")
    load_trainable(model, read_weights(step))


def read_weights(step):
    from safetensors.torch import load_file
    return read(str(step / "model.safetensors"), load_file,
                "or evaluate another checkpoint of the run (--which, --ckpt)")


def save_result(path, result, split=None):
    """Write a result; with `split`, into a file that holds one per split."""
    if split:
        result = {**(read_json(path) if path.is_file() else {}), split: result}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, jsonlib.dumps(result, indent=1) + "\n")


def main(args):
    import train                             # knows the models and the devices
    rank, _, device = train.init_distributed(args.device)
    say = print if rank == 0 else lambda *_: None
    cfg, step, other = load_settings(args, say)
    if Path(args.ckpt, "metrics.json").is_file():
        read_json(Path(args.ckpt, "metrics.json"))   # better now than after the work
    if cfg.eval_batch_size < 1 or cfg.num_workers < 0:
        raise ValueError(f"eval_batch_size {cfg.eval_batch_size} must be at least 1, num_workers "
                         f"{cfg.num_workers} at least 0")
    items = load_annotations(os.path.join(cfg.data, f"{args.split}.jsonl"), cfg.paragraph)
    had, has = read_json(step / "config.json").get("data", {}).get(args.split), content(items)
    if had not in (None, has) and not {"data", "paragraph"} & other.keys():
        say(f"warning: {cfg.data}/{args.split}.jsonl has changed since the run began: it had "
            f"{had}, now {has}")
    model = train.build_model(cfg, device)
    load_weights(model, step)
    say(f"{step.resolve().name} of {args.ckpt}, {cfg.model}, on {device}")
    train.tell_cost(model, cfg, say)
    found = {}
    result = evaluate(model, items, cfg, args.split, device, train.autocast_of(cfg, device),
                      args.v2t, args.dsl_temperature if args.dsl else None, args.per_slot,
                      args.by, args.within, found)
    result["checkpoint"] = step.resolve().name
    result["data"] = os.path.abspath(cfg.data)
    result["trainable"] = sum(p.numel() for p in model.parameters() if p.requires_grad)
    say(table(result))
    if rank == 0:
        # one entry per split for the run as it is; anything else has a name of its own
        name = " ".join([args.split, *([args.which] if args.which != "best" else []),
                         *([f"v2t={args.v2t}"] if args.v2t != "best" else []),
                         *(f"{k}={v}" for k, v in other.items())])
        save_result(Path(args.ckpt, "metrics.json"), result, name)
        if args.json:
            save_result(Path(args.json), result)
        if args.report:
            write_report(args.report, found, items, cfg, args.split)
    return result


def main_of_all(args):
    """Evaluate the run, or one run after the other and then compare them."""
    runs = each_run(args)
    results = [main(one) for one in runs]
    if len(runs) > 1 and (not dist.is_initialized() or dist.get_rank() == 0):
        print(comparison([one.ckpt for one in runs], results, args.split, args.dsl))


if __name__ == "__main__":
    if args.compare:
        one_line_errors(lambda: print(compare_runs(args.compare.split(","), args.split, args.dsl)))
    else:
        one_line_errors(lambda: main_of_all(args))
    if dist.is_initialized():  # not after an error: other ranks may wait in a collective
        dist.destroy_process_group()
