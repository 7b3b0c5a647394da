"""
From files on disk to Samples: annotations, data sets, the order of training steps, the loader.

    train.jsonl: {"id", "video", "captions": [...]} per line
      load_annotations -> [Item] -> Pairs (training) | Texts, Videos (evaluation)
      worker: video.decode in a child process, with a deadline -> Sample(id, caption, frames uint8
      [T, H, W, 3]) -> collate (the model's)

    $ python data.py check --data msrvtt     # tries every video before a run meets the bad ones

An image is a video of one frame. Not here on purpose: augmentation, normalisation and the
backbone's own resize (its processor's).
"""
import argparse
import collections
import glob
import hashlib
import json
import multiprocessing.connection
import os
import signal
import sys
import unicodedata
from dataclasses import dataclass, field

import numpy as np  # and torch where it is used, so that a missing file is told of at once

import video
from video import SAMPLERS, BadVideo, check_names, read_frames, resize  # noqa: F401  for others


@dataclass
class Item:
    id: str
    video: str  # path below video_root
    captions: list
    fields: dict = field(default_factory=dict, repr=False)  # the line's others: eval.py's --by


@dataclass
class Sample:
    id: str
    caption: str | None = None
    frames: np.ndarray | None = field(default=None, repr=False)  # uint8 [T, H, W, 3]
    index: int = 0  # number of the video inside its split
    error: str | None = None  # evaluation with on_bad_video=skip: why frames is None


# -----------------------------------------------------------------------------
# annotations

def find_annotations(path):
    """FileNotFoundError that says how to make the file, if it is not there."""
    if not os.path.isfile(path):
        prepare = os.path.join(os.path.dirname(path), "prepare.py")
        how = f"run `python {prepare}`" if os.path.isfile(prepare) else \
            "write it as the README's 'Your own videos' says, or set --data"
        there = sorted(glob.glob(os.path.join(glob.escape(os.path.dirname(path)), "*.jsonl")))
        there = f" (there are {', '.join(map(os.path.basename, there))})" if there else ""
        raise FileNotFoundError(f"annotations {os.path.abspath(path)} not found: {how}{there}")


def load_annotations(path, paragraph=False):
    """paragraph=True: all captions of a video, in their order, become one text."""
    find_annotations(path)
    items, seen = [], {}
    with open(path, "rb") as f:  # bytes: only \n ends a line, U+2028 inside a caption does not
        for n, line in enumerate(f, 1):
            try:
                line = line.decode("utf-8-sig" if n == 1 else "utf-8").strip()
                item = parse_item(line) if line else None
            except (ValueError, RecursionError) as e:  # the decoders' errors are ValueErrors too
                raise ValueError(f"{path}:{n}: {e}") from None
            if item is None:
                continue
            if item.id in seen:
                raise ValueError(f"{path}:{n}: id {item.id!r} is already used in line "
                                 f"{seen[item.id]}; give one line per video, with all its captions")
            seen[item.id] = n
            if paragraph:
                item.captions = [" ".join(c.strip() for c in item.captions)]
            items.append(item)
    if not items:
        raise ValueError(f"{path} holds no annotations: every line is blank")
    return items


def content(items):
    """What a split held, to be told from what it holds later: "24 videos, 24 captions, 0c3f..."."""
    digest = hashlib.sha256(repr([(i.id, i.video, i.captions) for i in items]).encode())
    return (f"{len(items)} videos, {sum(len(i.captions) for i in items)} captions, "
            f"{digest.hexdigest()[:16]}")


def parse_item(line):
    try:
        row = json.loads(line)
    except json.JSONDecodeError as e:
        raise ValueError(f"no valid JSON: {e.msg} at column {e.colno}") from None
    if not isinstance(row, dict):
        raise ValueError(f'expected an object {{"id", "video", "captions"}}, found a '
                         f"{type(row).__name__}; data/<name>/prepare.py writes the right format")
    for key in ("id", "video"):
        if not isinstance(row.get(key), str) or not visible(row[key]):  # 007 must not become 7
            raise ValueError(f"{key!r} must be a non-empty string, found {row.get(key)!r}")
    captions = row.get("captions")
    if not isinstance(captions, list) or not captions:
        raise ValueError(f"'captions' must be a non-empty list of strings, found {captions!r}")
    for c in captions:
        if not isinstance(c, str) or not visible(c):
            raise ValueError(f"caption {c!r} of {row['id']!r} is no text; remove it")
        c.encode()  # half a surrogate pair gets through JSON, but through no tokenizer
    others = {k: v for k, v in row.items() if k not in ("id", "video", "captions")}
    return Item(row["id"], row["video"], captions, others)


def visible(text):
    # a letter, digit or symbol; not spaces (Z), controls and joiners (C), bare accents (M) alone
    return any(unicodedata.category(c)[0] not in "ZCM" for c in text)


# -----------------------------------------------------------------------------
# datasets

def reading(cfg):
    """The settings that say how videos are read, as Pairs and Videos want them. What is skipped or
    read in part is listed in the run's folder."""
    return dict(sampler=cfg.sampler, size=cfg.frame_size, reader=cfg.reader,
                frame_cache=cfg.frame_cache, on_bad_video=cfg.on_bad_video,
                min_decoded=cfg.min_decoded, video_timeout=cfg.video_timeout,
                bad_list=os.path.join(cfg.out_dir, "bad_videos.tsv"))


class Clips:
    """The videos of a split: policy for bad files, frame cache. Shared by Pairs and Videos."""

    def __init__(self, items, video_root, num_frames, sampler="uniform", size=0, reader="pyav",
                 frame_cache="", on_bad_video="raise", min_decoded=0.9, video_timeout=60.0,
                 bad_list=""):
        if on_bad_video not in ("raise", "skip"):
            raise ValueError(f"on_bad_video {on_bad_video!r} is not one of raise, skip")
        check_names(sampler, reader)
        if not os.path.isdir(video_root or "."):
            raise FileNotFoundError(f"video_root {video_root} is no folder: set it to where the "
                                    f"videos are")
        self.items, self.video_root, self.on_bad_video = items, video_root, on_bad_video
        self.how = (num_frames, sampler, reader, size)
        self.min_decoded, self.process = min_decoded, video.Process(video_timeout)
        self.frame_cache, self.bad_list = frame_cache, bad_list
        self.vision = None  # a vision_cache.VisionCache, whose Videos then stand for the frames
        self.bad = {}  # video -> reason, of this process
        self.named = multiprocessing.Array("B", len(items))  # of all workers: 1 partial, 2 bad

    def load(self, i):
        """-> (frames, None), or with on_bad_video=skip (None, reason)"""
        if i in self.bad:
            return None, self.bad[i]
        path = os.path.join(self.video_root or "", self.items[i].video)
        try:
            frames, partial = self.vision.look(path, self.how, self.cached) if self.vision else \
                self.cached(path)
        except BadVideo as e:
            if self.on_bad_video == "raise":
                raise
            self.bad[i] = str(e)
            self.name(i, 2, "skipped", f"skipped: {e}", str(e))
            return None, self.bad[i]
        if partial:
            self.name(i, 1, "partial", f"warning: {path} is partial: {partial}", partial)
        return frames, None

    def name(self, i, what, state, line, why):
        """Once per video of a run: a line on stderr, and one in bad_list."""
        with self.named.get_lock():
            new, self.named[i] = self.named[i] != what, what
            if not new:
                return
            print(line, file=sys.stderr, flush=True)
            if self.bad_list:
                row = f"{state}\t{self.items[i].id}\t{self.items[i].video}\t{why}\n"
                # other ranks and earlier parts of a resumed run write there, too
                with open(self.bad_list, "a+", encoding="utf-8") as f:
                    f.seek(0)
                    if row not in f.read():
                        f.write(row)

    def skipped(self):
        """Ids of the videos found unreadable so far, by any worker of this process."""
        return [item.id for item, what in zip(self.items, self.named[:]) if what == 2]

    def decode(self, path):
        return self.process.call("decode", path, *self.how, self.min_decoded)

    def cached(self, path):
        if not self.frame_cache or not os.path.isfile(path):
            return self.decode(path)
        st = os.stat(path)
        key = repr(("2", os.path.abspath(path), st.st_size, st.st_mtime_ns, self.how))
        name = os.path.join(self.frame_cache, hashlib.sha1(key.encode()).hexdigest() + ".npy")
        try:
            frames = np.load(name, allow_pickle=False)
            if frames.dtype == np.uint8 and frames.ndim == 4 and len(frames) == self.how[0]:
                return frames, None
        except (OSError, ValueError, EOFError):  # not there yet, or cut short: make it again
            pass
        frames, partial = self.decode(path)
        if partial is None:  # so that a partial file is named in every run
            temporary = f"{name}.{os.getpid()}.tmp"
            try:
                os.makedirs(self.frame_cache, exist_ok=True)
                with open(temporary, "wb") as f:
                    np.save(f, frames)
                os.replace(temporary, name)
            except OSError as e:  # a full disk's has no file name, and half a file keeps it full
                if os.path.exists(temporary):
                    os.remove(temporary)
                raise OSError(f"can't write into frame_cache {self.frame_cache}: "
                              f"{e.strerror or e}; mend that, or set another or none") from e
        return frames, partial


class Pairs:
    """Training: one Sample per (video, caption). With on_bad_video=skip the next readable video in
    annotation order stands in with a caption of its own, so that batches stay full and ranks stay
    in step; now and then it is in the batch already, as any video with several captions may be."""

    def __init__(self, items, video_root, num_frames, **how):
        self.clips = Clips(items, video_root, num_frames, **how)
        self.pairs = [(v, c) for v, item in enumerate(items) for c in range(len(item.captions))]

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, i):
        items, (first, c) = self.clips.items, self.pairs[i]
        for v in range(first, first + len(items)):
            v %= len(items)
            frames, reason = self.clips.load(v)
            if frames is not None:  # caption c of its c-th pair: stand-ins do not all say the same
                return Sample(items[v].id, items[v].captions[c % len(items[v].captions)], frames, v)
        raise BadVideo(f"none of the {len(items)} videos can be read, the last because: {reason}")


class Texts:
    """Evaluation: one Sample per caption; owner[i] is the index of its video in items."""

    def __init__(self, items):
        self.items = items
        self.owner = [v for v, item in enumerate(items) for _ in item.captions]
        self.captions = [c for item in items for c in item.captions]

    def __len__(self):
        return len(self.captions)

    def __getitem__(self, i):
        v = self.owner[i]
        return Sample(self.items[v].id, self.captions[i], None, v)


class Videos:
    """Evaluation: one Sample per video. With on_bad_video=skip an unreadable one comes without
    frames and with `error` set: the gallery and the queries then have to do without it."""

    def __init__(self, items, video_root, num_frames, **how):
        self.clips = Clips(items, video_root, num_frames, **how)

    def __len__(self):
        return len(self.clips.items)

    def __getitem__(self, i):
        frames, error = self.clips.load(i)
        return Sample(self.clips.items[i].id, None, frames, i, error)


# -----------------------------------------------------------------------------
# order and loader

class StepSampler:
    """
    Batches of one epoch for one rank, from start_step on. The global batch of (seed, epoch, step)
    is a slice of one permutation and rank r gets its r-th part: any number of processes sees the
    same global batches, and a resumed run those that were left. The last, shorter one is dropped.
    """

    def __init__(self, n, batch, seed=0, epoch=0, start_step=0, rank=0, world=1):
        if batch < 2:
            raise ValueError(f"global batch {batch}: a contrastive loss needs at least 2 pairs, "
                             f"with one it is always 0")
        if batch % world:
            raise ValueError(f"global batch {batch} is not a multiple of the {world} processes")
        if n < batch:
            raise ValueError(f"{n} training pairs do not fill one global batch of {batch}: "
                             f"lower the batch size")
        self.n, self.batch, self.seed, self.epoch = n, batch, seed, epoch
        self.start_step, self.rank, self.world = start_step, rank, world

    def __len__(self):
        return max(self.n // self.batch - self.start_step, 0)

    def __iter__(self):
        order = np.random.default_rng((self.seed, self.epoch)).permutation(self.n)
        part = self.batch // self.world
        for step in range(self.start_step, self.n // self.batch):
            first = step * self.batch + self.rank * part
            yield order[first:first + part].tolist()


def make_loader(dataset, batches, collate, workers=0):
    """batches: a StepSampler or a list of lists of indices. Readers are opened in the workers."""
    import torch
    # fork: a spawned worker would need the collate function pickled, and with it the whole model
    forks = "fork" in multiprocessing.get_all_start_methods()  # Linux and macOS, not Windows
    workers, context = (workers, "fork") if workers and forks else (0, None)
    return torch.utils.data.DataLoader(
        dataset, batch_sampler=batches, collate_fn=collate, num_workers=workers,
        multiprocessing_context=context, worker_init_fn=init_worker,
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator())  # its own: the global one must not move with the loader


def init_worker(worker):
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a forked tokenizer would warn or lock up
    signal.signal(signal.SIGINT, signal.SIG_IGN)    # ctrl-C is the parent's, which ends the workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)    # not the handler that is forked along


# -----------------------------------------------------------------------------
# python data.py check

NO_VIDEO = (".json", ".jsonl", ".txt", ".md", ".csv", ".tsv", ".py", ".npy", ".srt", ".vtt")


def check(data, video_root="", out="", workers=0, video_timeout=60.0, min_decoded=0.9):
    """
    Decodes every frame of every video of a data set: those its .jsonl files name, or without these
    all files of the folder. Each result is a line of <out>.jsonl at once; a video whose result is
    there, and whose size and date are the same, is not tried again. -> (rows, how many are refused)
    """
    from tqdm import tqdm
    data = data if os.path.isdir(data) or not os.path.isdir(f"data/{data}") else f"data/{data}"
    paths = videos_of(data, video_root)
    out = out or os.path.join(data, "check")
    done = earlier_rows(f"{out}.jsonl")
    rows = [done[p] for p in paths if p in done and done[p]["stamp"] == stamp_of(p)]
    have = {r["path"] for r in rows}
    todo = [p for p in paths if p not in have]
    children = [video.Process(video_timeout) for _ in range(min(workers or cores(), len(todo)))]
    with open(f"{out}.jsonl", "a+b") as f, tqdm(
            total=len(paths), initial=len(rows), desc="check", unit="video") as bar:
        if f.tell():
            f.seek(-1, os.SEEK_END)
            f.write(b"\n" * (f.read(1) != b"\n"))  # a killed check's last line
        for row in all_answers(children, todo):
            f.write(as_line(row).encode())
            f.flush()
            rows.append(row)
            bar.update()
    rows.sort(key=lambda r: r["path"])
    with open(f"{out}.jsonl.tmp", "w", encoding="utf-8") as f:  # each once, and in order
        f.writelines(map(as_line, rows))
    os.replace(f"{out}.jsonl.tmp", f"{out}.jsonl")
    refused = [r for r in rows if r["share"] < min_decoded]
    text = report(data, rows, refused, min_decoded)
    with open(f"{out}.txt", "w", encoding="utf-8", errors="backslashreplace") as f:
        f.write(text)
    print(text + f"written to {out}.txt, every video to {out}.jsonl")
    return rows, len(refused)


def as_line(row):
    return json.dumps(row) + "\n"  # names that are no UTF-8 pass as they are escaped


def cores():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def videos_of(data, video_root=""):
    """Paths, each once: what annotations in the folder `data` name, else the files below it."""
    if not os.path.isdir(data):
        raise FileNotFoundError(f"data {data!r} is no folder, and there is no data/{data} either")
    # names of splits only: this function's own report is a .jsonl, too
    lists = [os.path.join(data, f"{s}.jsonl") for s in ("train", "val", "test")]
    lists = [path for path in lists if os.path.isfile(path)]
    if lists:
        root = video_root or os.path.join(data, "videos")
        return sorted({os.path.join(root, i.video) for path in lists
                       for i in load_annotations(path)})
    found = [os.path.join(folder, name) for folder, _, names in os.walk(video_root or data)
             for name in names if not name.startswith(".") and not name.lower().endswith(NO_VIDEO)]
    if not found:
        raise FileNotFoundError(f"{video_root or data} holds no videos, and {data} no train.jsonl, "
                                "val.jsonl or test.jsonl")
    return sorted(found)


def stamp_of(path):
    try:
        st = os.stat(path)
        return [st.st_size, st.st_mtime_ns]
    except OSError:
        return None


def earlier_rows(path):
    rows = {}
    if os.path.isfile(path):
        with open(path, encoding="utf-8") as f:
            for line in f:
                try:
                    row = json.loads(line)
                    rows[row["path"]] = {"stamp": None, "share": 0.0, **row}
                except (ValueError, KeyError, TypeError):  # the last line of a killed check
                    pass
    return rows


def all_answers(children, todo):
    """One row per path, in the order in which they come; each child has one video at a time."""
    todo, busy = collections.deque(todo), {}
    while todo or busy:
        for child in children:
            if todo and child not in busy:
                busy[child] = todo.popleft()
                child.ask("examine", busy[child])
        ready = [c for c in busy if c.ready()]
        if not ready:
            multiprocessing.connection.wait([c.pipe for c in busy],
                                            min(c.seconds_left() for c in busy))
        for child in ready:
            path = busy.pop(child)
            try:
                row = {"stamp": stamp_of(path), **child.answer()}
            except BadVideo as e:  # it took too long; the next check may have more patience
                row = {"stamp": "", "state": "broken", "share": 0.0,
                       "why": video.reason_of(e, path)}
            yield {"path": path, **row}


def report(data, rows, refused, min_decoded):
    """What a person wants to know, as text."""
    count = collections.Counter(r["state"] for r in rows)
    out = [f"{data}: {len(rows)} videos, {count['readable']} readable, {count['partial']} partial, "
           f"{count['broken']} broken; {len(refused)} are refused (min_decoded={min_decoded})"]
    good = [r for r in rows if r["state"] != "broken"]
    for title, of in (("codec", lambda r: r["codec"]), ("container", lambda r: r["container"]),
                      ("size", lambda r: f"{r['width']}x{r['height']}")):
        tally = collections.Counter(map(of, good)).most_common()
        more = f", {len(tally) - 8} others" if len(tally) > 8 else ""
        out.append(f"{title}: " + ", ".join(f"{k} {n}" for k, n in tally[:8]) + more)
    if good:
        out.append(f"variable frame rate: {sum(r['variable'] for r in good)}; "
                   f"{sum(r['seconds'] for r in good) / 3600:.2f} hours in all")
        out += histogram([r["seconds"] for r in good], "seconds")
    bad = [r for r in rows if r["state"] != "readable"]
    out += [f"{r['state']}: {r['path']}: {r['why']}" for r in bad[:50]]
    if len(bad) > 50:
        out.append(f"... and {len(bad) - 50} more")
    return "\n".join(out) + "\n"


def histogram(values, unit, bins=8, width=40):
    """Lines of text; the edges are equal steps between the least and the largest value."""
    counts, edges = np.histogram(values, bins)
    return [f"{a:8.1f} .. {b:8.1f} {unit} {n:7d} {'#' * -(-width * n // max(counts))}"
            for a, b, n in zip(edges, edges[1:], counts)]


def main(args):
    p = argparse.ArgumentParser(prog="data.py", description=__doc__.split("\n\n")[0])
    sub = p.add_subparsers(dest="command", required=True)
    c = sub.add_parser("check", help="try every video of a data set", description=check.__doc__,
                       formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    c.add_argument("--data", required=True, help="folder, or the name of one in data/")
    c.add_argument("--video_root", default="", help="where the videos are; empty: <data>/videos")
    c.add_argument("--out", default="", help="report's path, no ending; empty: <data>/check")
    c.add_argument("--workers", type=int, default=0, help="processes; 0: as many as cores")
    c.add_argument("--video_timeout", type=float, default=60.0, help="seconds per video")
    c.add_argument("--min_decoded", type=float, default=0.9,
                   help="a video of which a smaller share decodes counts as refused")
    args = vars(p.parse_args(args))
    args.pop("command")
    return 1 if check(**args)[1] else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (OSError, ValueError) as e:
        sys.exit(f"error: {e}")
    except KeyboardInterrupt:
        sys.exit("stopped; what was checked is kept, start again to go on")
