"""
A checkpoint on tasks beyond one caption per item: COCO, Flickr30K, KARR-Bench, I2I, CIRR, FashionIQ
and MMEB, from the files as they are published. -> a table and <run>/tasks.json

    $ python eval_tasks.py --ckpt out/slq --task coco --data /where/coco/is
    $ python eval_tasks.py --ckpt out/slq --task mmeb --data /where/mmeb/is --datasets CIRR,GQA

    files --LOADERS[task]--> [Task]: queries, candidates, who is right, who is not asked
    Entry (prompt, text and/or image) --model.collate_prompt, encode_video | encode_text--> Features
    Features of B queries and C candidates --model.similarity--> S [B, C] --eval.ranks--> recalls

An image is a video of one frame. A model needs `collate_prompt(samples, prompt)` -> inputs, and
`encode_video` / `encode_text(inputs, normalize=True)`; its similarity takes no side for a text.
"""
ckpt = ""              # run folder (out/slq), or one step folder inside it
which = "best"         # checkpoint of the run: best (by the validation split) or latest
task = ""              # coco, flickr30k, karr, i2i_coco, i2i_flickr30k, cirr, fashioniq or mmeb
data = ""              # folder of the published files; or the annotation file itself
images = ""            # folder of the images; "": <data>/images or its like, else <data>
split = ""             # "": val for CIRR and FashionIQ (their test sets are not public), else test
datasets = ""          # of MMEB (CIRR,GQA) or FashionIQ (dress); "": all there are
device = "auto"        # cuda, cpu; auto: a GPU if there is one
# what follows is as in training unless it is given
on_bad_video: str | None = None    # a missing or unreadable image: raise, or skip it
eval_batch_size: int | None = None # items per forward pass of a process
num_workers: int | None = None     # loader processes
backbone: str | None = None        # where the backbone is now, if it has moved
# prompts: <video> is where the image goes, {caption} the text. A trained model knows its own two
text_prompt: str | None = None     # of a caption; None: the run's own
image_prompt: str | None = None    # of an image, and of a caption drawn as one; None: the run's own
pilot = False          # the wording of SLQ's zero-shot pilot (Fig. 2b) for these two
cirr_prompt = "<video> Modify this image with {caption}. Describe modified image in one word: "
cirr_target_prompt = "<video> Describe this image in one word: "
# {garment}: dress or shirt (also for toptee); {caption}: "one, two", then "two, one"
fashioniq_prompt = ("<video> Change the style of this {garment} to \"{caption}\". Describe this "
                    "modified {garment} in one word based on its style: ")
fashioniq_target_prompt = "<video> Describe this {garment} in one word based on its style: "
mmeb_prompt = "<video>\n{caption}" # of an image with a text; MMEB's texts bring their instructions
font = "DejaVuSans.ttf"            # I2I: font file the captions are drawn with
# end of settings
if __name__ == "__main__":         # before torch is imported, so that --help is instant
    from configurator import at_once, configure
    args = at_once(lambda: configure(__file__))

import inspect
import os
from difflib import get_close_matches
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tqdm import tqdm

import eval as E
from data import BadVideo
from tasks import LOADERS, MMEB, Entries, load_font

PILOT = {"text_prompt": "{caption} Summary above sentence in one word: ",
         "image_prompt": "<video> Summary above image in one word: "}
# which prompts a task uses, and what each of them has to hold
PROMPTS = {"text_prompt": ("{caption}",), "image_prompt": ("<video>",),
           "cirr_prompt": ("<video>", "{caption}"), "cirr_target_prompt": ("<video>",),
           "fashioniq_prompt": ("<video>", "{caption}"), "fashioniq_target_prompt": ("<video>",),
           "mmeb_prompt": ("<video>", "{caption}")}
USES = {"cirr": ("cirr_prompt", "cirr_target_prompt"), "mmeb": ("mmeb_prompt",),
        "fashioniq": ("fashioniq_prompt", "fashioniq_target_prompt"),
        "i2i_coco": ("image_prompt",), "i2i_flickr30k": ("image_prompt",)}


# -----------------------------------------------------------------------------
# entries -> features

class Prompted:
    """A model as eval.encode wants it, for entries that share a prompt."""

    def __init__(self, model, prompt, normalize):
        self.model, self.prompt, self.how = model, prompt, {}
        self.side = "video" if "<video>" in prompt else "text"
        if not normalize:
            self.how = {"normalize": False}
            if "normalize" not in inspect.signature(self.encode_of()).parameters:
                raise ValueError(f"{type(model).__name__}.encode_{self.side} has no "
                                 "normalize=False, which a query of several parts needs")

    def encode_of(self):
        return getattr(self.model, f"encode_{self.side}")

    def collate(self, samples):
        return {self.side: self.model.collate_prompt(samples, self.prompt)}

    def encode_text(self, inputs):
        return self.encode_of()(inputs, **self.how)

    encode_video = encode_text


def encode_entries(model, tasks, cfg, **how):
    """
    Features [n, ...] of all that occurs in the tasks, each once; {(entry, summed): row} of what
    could be read; the entries whose text was cut. summed: of a query of several, not normalised.
    """
    wanted = {}                                    # (prompt, summed) -> {entry: None}
    for task in tasks:
        for parts in [*task.queries, *((c,) for c in task.candidates)]:
            for e in parts:
                wanted.setdefault((e.prompt, len(parts) > 1), {})[e] = None
    if cfg.on_bad_video == "raise":                # better now than after an hour
        lost = [e for group in wanted.values() for e in group
                if isinstance(e.image, str) and not os.path.isfile(e.image)]
        if lost:
            raise BadVideo(f"{lost[0].where}: no image {lost[0].image} ({len(lost)} are missing); "
                           "set --images to the folder they are in, or --on_bad_video=skip")
    features, row, cut = [], {}, set()
    for (prompt, summed), group in wanted.items():
        # texts of about the same length waste little on padding; images stay in their file's order
        entries = list(group) if "<video>" in prompt else sorted(group, key=lambda e: len(e.text))
        prompted = Prompted(model, prompt, not summed)
        found, kept, cuts = E.encode(
            prompted, prompted.side, Entries(entries, cfg.frame_size, cfg.on_bad_video),
            range(len(entries)), cfg.eval_batch_size, cfg.num_workers, **how)
        start = len(row)
        row |= {(entries[i], summed): start + n for n, i in enumerate(kept)}
        cut |= {entries[i] for i in cuts}
        features.append(found)
    return {k: torch.cat([f[k] for f in features]) for k in features[0]}, row, cut


# -----------------------------------------------------------------------------
# tasks -> recalls

def take(features, rows):
    """Features [n, ...] of n tuples of rows: one row as it is, several summed, then normalised."""
    if all(len(r) == 1 for r in rows):
        return {k: v[[r[0] for r in rows]] for k, v in features.items()}
    return {k: F.normalize(torch.stack([v[list(r)].sum(0) for r in rows]), dim=-1)
            for k, v in features.items()}


def rank_task(model, task, features, row, device="cpu"):
    """
    Ranks [n] of the queries that can be asked; how many queries and candidates had to be skipped:
    their image cannot be read, or no right candidate is left.
    """
    place = [row.get((c, False)) for c in task.candidates]
    asked = []                                     # (query, its rows, its right candidates)
    for q, parts in enumerate(task.queries):
        rows = [row.get((e, len(parts) > 1)) for e in parts]
        right = [c for c in task.positives[q] if place[c] is not None]
        if None not in rows and right:
            asked.append((q, rows, right))
    if not asked:
        raise ValueError(f"{task.label}: none of its {len(task.queries)} queries can be asked, for "
                         "want of images that can be read")
    # queries with candidates of their own are asked a few at a time, so that the union stays small
    world = dist.get_world_size() if dist.is_initialized() else 1
    size, ranks = 64 if task.own else E.TILE * world, []
    for start in tqdm(range(0, len(asked), size), desc=f"rank {task.label}", leave=False,
                      disable=world > 1 and dist.get_rank() > 0):
        block = asked[start:start + size]
        union = {c for q, _, _ in block for c in task.own[q]} if task.own else range(len(place))
        columns = [c for c in sorted(union) if place[c] is not None]
        at = {c: n for n, c in enumerate(columns)}
        S = E.similarity(model.similarity, take(features, [r for _, r, _ in block]),
                         take(features, [(place[c],) for c in columns]), device=device)    # [B, C]
        E.check_finite(S, [task.queries[q][0].where for q, _, _ in block],
                       [task.candidates[c].where for c in columns])
        own = torch.zeros(S.shape, dtype=torch.bool)
        allowed = torch.full(S.shape, not task.own)
        for i, (q, _, right) in enumerate(block):
            own[i, [at[c] for c in right]] = True
            if task.own:
                allowed[i, [at[c] for c in task.own[q] if c in at]] = True
            if task.excluded:
                allowed[i, [at[c] for c in task.excluded[q] if c in at]] = False
        # below every score: never higher than the right one, and no tie with it
        ranks.append(E.ranks(S.masked_fill(~allowed & ~own, S.min().item() - 1), own))
    return torch.cat(ranks), len(task.queries) - len(asked), place.count(None)


def measure(model, tasks, cfg, device="cpu", **how):
    """A row of the result for each of the tasks."""
    was_training = model.training
    model.eval()
    features, row, cut = encode_entries(model, tasks, cfg, device=device, **how)
    out = []
    for task in tasks:
        ranks, lost_queries, lost_candidates = rank_task(model, task, features, row, device)
        entries = {e for parts in task.queries for e in parts} | set(task.candidates)
        own = [len(own) for own in task.own or []]
        out.append({"name": task.label, **task.tags, "queries": len(ranks),
                    "candidates": len(task.candidates) - lost_candidates,
                    "own_candidates": [min(own), max(own)] if own else None,
                    "skipped_queries": lost_queries, "skipped_candidates": lost_candidates,
                    "cut_texts": len(cut & entries), "encoded": len(entries),
                    **{f"{task.prefix}{k}": 100 * (ranks <= k).double().mean().item()
                       for k in task.ks}})
    model.train(was_training)
    return out


def averages(task, rows):
    """What the benchmark's authors report beside the single rows: {name: percent}."""
    def mean(key, rows):
        return sum(r[key] for r in rows) / len(rows)

    if task == "cirr":
        return {"(R@5 + Rs@1) / 2": (rows[0]["R@5"] + rows[1]["Rs@1"]) / 2}
    if task == "fashioniq":
        return {f"average {key} of {len(rows)} categories": mean(key, rows)
                for key in ("R@10", "R@50")}
    if task != "mmeb":
        return {}
    out = {}
    for key, sizes in (("group", {g: len(" ".join(h).split()) for g, h in MMEB.items()}),
                       ("distribution", {"IND": 20, "OOD": 16})):
        for value, size in sizes.items():
            found = [r for r in rows if r[key] == value]
            if found:
                out[f"average P@1 {value}, {len(found)} of {size} data sets"] = mean("P@1", found)
    return out | {f"average P@1 over all, {len(rows)} of 36 data sets": mean("P@1", rows)}


def table(result):
    """What was measured on what, in full; then a line for each row and average."""
    out = [f"{result['task']}, split {result['split']}: {result['model']}, {result['checkpoint']}"]
    out += [f"{name}: {prompt!r}" for name, prompt in result["prompts"].items()]
    out += [f"font: {result['font']}"] if "font" in result else []
    for r in result["rows"]:
        own = r["own_candidates"]
        gallery = f"{r['candidates']} candidates" if own is None else \
            f"{own[0] if own[0] == own[1] else f'{own[0]} to {own[1]}'} candidates each"
        notes = [f"{r[f'skipped_{what}']} {what} skipped" for what in ("queries", "candidates")
                 if r[f"skipped_{what}"]] + [f"{r['cut_texts']} texts cut"] * bool(r["cut_texts"])
        tags = " ".join(r[k] for k in ("group", "distribution") if k in r)
        label = f"{r['name']}{f' ({tags})' if tags else ''}: {r['queries']} queries, {gallery}"
        out.append(f"{label:<66}" + "".join(f"  {k} {v:6.2f}" for k, v in r.items() if "@" in k)
                   + (f"  ({', '.join(notes)})" if notes else ""))
    out += [f"{name:<66}{value:12.2f}" for name, value in result["averages"].items()]
    return "\n".join(out)


# -----------------------------------------------------------------------------
# the script

def check_prompts(cfg, names):
    for name in names:
        prompt = getattr(cfg, name).replace("\\n", "\n")   # a shell passes \n as two letters
        setattr(cfg, name, prompt)
        need = PROMPTS[name]
        if any(prompt.count(mark) != (mark in need) for mark in ("<video>", "{caption}")):
            only = "" if len(need) == 2 else " and no " + ("{caption}" if "<video>" in need else
                                                          "<video>")
            raise ValueError(f"{name} must hold {' and '.join(need)} once{only}; got {prompt!r}")


def settings(args, say=print):
    """
    The run's settings; this script's over them; the checkpoint's folder; the prompts that the task
    uses; the name of the result: the task, and whatever makes it another one than the run's own.
    """
    if args.task not in LOADERS:
        near = get_close_matches(args.task, LOADERS, n=1)
        raise ValueError(f"task {args.task!r} is " + (f"unknown, did you mean {near[0]!r}?" if near
                         else f"none of {', '.join(LOADERS)}"))
    if not args.data:
        raise ValueError(f"set --data to the folder that holds the files of {args.task}")
    training = dict.fromkeys(("data", "video_root", "frame_cache", "num_frames", "text_prompt",
                              "video_prompt", "paragraph"))
    run, step, other = E.load_settings(SimpleNamespace(**{**vars(args), **training}), say)
    if not hasattr(run, "text_prompt"):
        raise ValueError(f"{args.ckpt} is a run of {run.model}, which has no prompts: these tasks "
                         "need a method on a multimodal LLM")
    cfg = SimpleNamespace(**{**vars(run), **{k: v for k, v in vars(args).items() if v is not None}})
    cfg.split = args.split or ("val" if args.task in ("cirr", "fashioniq") else "test")
    default = {name: globals()[name] for name in PROMPTS}
    default |= PILOT if args.pilot else {"text_prompt": getattr(run, "text_prompt", ""),
                                         "image_prompt": getattr(run, "video_prompt", "")}
    for key in ("text_prompt", "image_prompt"):
        setattr(cfg, key, default[key] if getattr(args, key) is None else getattr(args, key))
    uses = USES.get(args.task, ("text_prompt", "image_prompt"))
    check_prompts(cfg, uses)
    other |= {k: getattr(args, k) for k in ("which", "split", "datasets", "pilot", "font")
              if getattr(args, k) != globals()[k]}
    other |= {k: getattr(cfg, k) for k in uses if getattr(cfg, k) != default[k]}
    return run, cfg, step, uses, " ".join([args.task, *(f"{k}={v}" for k, v in other.items())])


def main(args):
    import train                             # knows the models and the devices
    rank, _, device = train.init_distributed(args.device)
    say = print if rank == 0 else lambda *_: None
    run, cfg, step, uses, name = settings(args, say)
    file = Path(args.ckpt, "tasks.json")
    if file.is_file():
        E.read_json(file)                    # better now than after the work
    if cfg.eval_batch_size < 1 or cfg.num_workers < 0:
        raise ValueError(f"eval_batch_size {cfg.eval_batch_size} must be at least 1, num_workers "
                         f"{cfg.num_workers} at least 0")
    loader = LOADERS[args.task](cfg)
    tasks = next(loader)                     # the files are read before the model is
    model = train.build_model(run, device)
    if not hasattr(model, "collate_prompt"):
        raise ValueError(f"{type(model).__name__} has no collate_prompt: it can't read an image "
                         "and a text together, as these tasks may ask")
    E.load_weights(model, step)
    say(f"{step.resolve().name} of {args.ckpt}, {run.model}, on {device}")
    result = {"task": args.task, "split": cfg.split, "model": type(model).__name__,
              "checkpoint": step.resolve().name, "data": os.path.abspath(cfg.data),
              "prompts": {k: getattr(cfg, k) for k in uses}, "rows": [], "averages": {}}
    if args.task.startswith("i2i"):
        result["font"] = load_font(cfg.font, 40)[1]
        if "DejaVu" not in result["font"]:
            say(f"note: {cfg.font} not found, captions are drawn with {result['font']}; set --font")
    while tasks:
        result["rows"] += measure(model, tasks, cfg, device,
                                  autocast=train.autocast_of(run, device))
        result["averages"] = averages(args.task, result["rows"])
        if rank == 0:                        # a killed run over MMEB keeps what it has measured
            E.save_result(file, result, name)
        tasks = next(loader, None)
    say(table(result))


if __name__ == "__main__":
    from train import one_line_errors
    one_line_errors(lambda: main(args))
