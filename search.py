"""
Type a sentence, get the moment: a trained run, pointed at a folder of videos.

    $ python search.py index --ckpt out/demo_mars VIDEOS           # again later: only what is new
    $ python search.py query --ckpt out/demo_mars VIDEOS "a red circle moves left" -k 5
    $ python search.py query --ckpt out/demo_mars VIDEOS --image frame.png     # or --video clip.mp4
    $ python search.py page  --ckpt out/demo_mars VIDEOS "query one" "query two" -o hits.html
    >>> from search import load; run = load("out/demo_mars")
    >>> run.text(["a red circle moves left"]) @ run.video(["a.mp4"]).T      # the scores [1, 1]

    videos --moments.py--> windows, whole --encode_video--> Features --shelf.py--> shards
    query  --encode_text-----> Features; a fast score of all rows, an exact one of the best --> hits

A MARS or SLQ score is one dot product of concatenated unit vectors (`as_vectors`). What is no dot
product (PHA-Net) is preselected by its global level. Exit code 3: some videos could not be read.
"""
# settings
ckpt = ""              # run folder (out/demo_mars), or one step folder inside it
which = "best"         # checkpoint of the run: best (by the validation split) or latest
index = ""             # folder of the index; "": .nanotvr in the folder of the videos
moments: float | None = None  # index: also embed overlapping windows of so many seconds; 0: none
dtype: str | None = None      # index: how vectors are stored, fp32 or int8 (a quarter of the bytes)
k = 5                  # -k 5: how many hits
image = ""             # query: a picture instead of a sentence
video = ""             # query: a clip instead of a sentence
whole = False          # query: rank whole videos although the index has moments
exhaustive = False     # query: the exact score of everything; no preselection
preselect = 200        # query: where a score is no dot product, how many rows are scored exactly
why = False            # query: scores of slots (MARS) or levels, words and frames (PHA-Net)
json = False           # query: JSON on standard output instead of a table
cut = ""               # query: folder in which the hits are saved as clips
out = "hits.html"      # page: -o hits.html, the file to write
num_workers = 2        # index: processes that read videos
video_timeout = 600.0  # index: seconds without a frame after which a video counts as broken
device = "auto"        # cuda, cpu; auto: a GPU if there is one
backbone: str | None = None   # where the backbone is now, if it has moved
# end of settings
import json as jsonlib
import os
import sys
from types import SimpleNamespace

from configurator import at_once, check_output, configure, members, one_line_errors, read_settings

COMMANDS = ("index", "query", "page")
SHORT = {"-k": "--k", "-o": "--out"}


def split_words(argv):
    """argv -> (words, what is left for configure). After `--` all are words."""
    known, words, rest, argv = read_settings(__file__), [], [], list(argv)
    while argv:
        arg = SHORT.get(argv[0], argv[0])
        argv.pop(0)
        key = arg[2:].partition("=")[0]
        if arg == "--":
            words, argv = words + argv, []
        elif arg.startswith("--") and "=" not in arg and key in known and argv \
                and bool not in members(known[key][0]):
            rest.append(f"{arg}={argv.pop(0)}")
        elif arg.startswith("-") and len(arg) > 1:
            rest.append(arg)
        else:
            words.append(arg)
    return words, rest


def configured(argv=None):
    """The settings, the command, the folder and the queries; told at once if they can't be."""
    words, rest = split_words(sys.argv[1:] if argv is None else argv)
    args = configure(__file__, rest)
    args.command, args.root, *args.queries = (words + ["", ""])[:2] + words[2:]
    if args.command not in COMMANDS:
        raise ValueError(f"the first word is {args.command!r}, and must be one of "
                         f"{', '.join(COMMANDS)}; --help shows how")
    if not os.path.isdir(args.root):
        raise ValueError(f"{args.command} wants a folder of videos behind it, and {args.root!r} is "
                         "none")
    queries = len(args.queries) + bool(args.image) + bool(args.video)
    if args.command == "index" and queries:
        raise ValueError(f"index takes one folder; what is {(args.queries or ['--image'])[0]!r}?")
    if args.command != "index" and not queries:
        raise ValueError(f"{args.command} wants a sentence behind the folder, or --image, --video")
    for query in args.queries:
        if not query.strip():
            raise ValueError("a query is blank")
    for path in filter(None, (args.image, args.video)):
        if not os.path.isfile(path):
            raise ValueError(f"{path} is no file")
    for key, low in (("k", 1), ("preselect", 1), ("num_workers", 1), ("video_timeout", 0.1)):
        if not getattr(args, key) >= low:
            raise ValueError(f"{key} is {getattr(args, key)}, the least is {low}")
    if args.moments is not None and args.moments != 0 and not 0.5 <= args.moments < 1e6:
        raise ValueError(f"moments is {args.moments}: it is a length in seconds, at least 0.5, or "
                         "0 for none")
    if args.cut and os.path.lexists(args.cut) and not os.path.isdir(args.cut):
        raise ValueError(f"cut is {args.cut!r}, which is a file; name a folder for the clips")
    if args.dtype not in (None, "fp32", "int8"):
        raise ValueError(f"dtype is {args.dtype!r}, and must be fp32 or int8")
    if args.command == "page":
        check_output("out", args.out)
        if os.path.lexists(args.out) and not args.out.lower().endswith((".html", ".htm")):
            raise ValueError(f"out is {args.out!r}, which is there and no .html file: a page would "
                             "take its place; name another file")
    from eval import find_checkpoint
    find_checkpoint(args)
    return args


if __name__ == "__main__":  # before torch is imported: --help, typos, missing files answer at once
    for stream in (sys.stdout, sys.stderr):  # a file's name may be no valid Unicode
        stream.reconfigure(errors="backslashreplace")
    args = at_once(configured)

import hashlib
import signal
import time
from multiprocessing import connection, get_all_start_methods, get_context

import numpy as np
import torch
from tqdm import tqdm

import eval as evaluation
import moments as cinema
import shelf
from data import Sample, visible
from moments import clock
from video import read_clip, reason_of

CHUNK = 8             # windows of a video that are encoded together; a whole is encoded alone
BLOCK = 4 * 2 ** 20   # bytes of vectors that are unpacked at once from int8: they fit a cache
NEAR = 1e-5           # fast scores are this near to exact ones
SAMPLE = 256          # videos on which int8 is compared with fp32
COMPACT = 1000        # videos after which they go into shards, so that queries find them


# -----------------------------------------------------------------------------
# a run, for use from Python too

def load(ckpt, which="best", device="auto", backbone=None):
    """A trained run: .text([captions]) @ .video([paths]).T are its scores [Nt, Nv]."""
    return Run(SimpleNamespace(ckpt=ckpt, which=which, device=device, backbone=backbone))


class Items(dict):
    """Features of n items of which `a @ b.T` are the exact scores, though they are no dot product
    of vectors (PHA-Net's levels, MARS's maxsim)."""

    def __init__(self, features, model):
        super().__init__(features)
        self.model, self.T = model, self

    def __matmul__(self, other):
        return evaluation.similarity(self.model.similarity, self, other)


def as_vectors(model, features, query=False):
    """
    [n, D] whose dot products are the scores, or None where a score is no dot product.

    MARS: the mean of M cosines is the dot product of the M unit slots one behind the other, divided
    by M. Queries carry that 1 / M (or the learned beta), so what is indexed are the slots.
    """
    if "slots" in features and model.config.aggregation != "maxsim":
        z = features["slots"]  # [n, M, D]
        return (model.beta().to(z)[:, None] * z if query else z).flatten(1)
    if "z" in features:  # SLQ
        return features["z"]
    if [*getattr(model, "levels", {}).items()] == [("G", 1.0)]:  # CLIP, frames averaged
        return features["G"]
    return None


class Run:
    def __init__(self, given):
        import transformers

        import train
        transformers.utils.logging.disable_progress_bar()
        defaults = {key: d for key, (_, d, _) in read_settings(evaluation.__file__).items()}
        self.cfg, self.step, _ = evaluation.load_settings(
            SimpleNamespace(**defaults | vars(given)), say=lambda *_: None)
        _, _, self.device = train.init_distributed(given.device)
        self.model = train.build_model(self.cfg, self.device).eval()
        evaluation.load_weights(self.model, self.step)
        self.autocast = train.autocast_of(self.cfg, self.device)
        self.precision = "bfloat16" if self.autocast.keywords.get("enabled") else "float32"

    def identity(self):
        """All that makes a video's Features what they are, and which texts go with them."""
        import train
        from checkpoint import fingerprint
        file, cls = train.SETTINGS[self.cfg.model]
        known = read_settings(os.path.join(os.path.dirname(train.__file__), file), cls)
        keys = (known.keys() | {"sampler", "frame_size"}) - {"backbone"}
        digest = hashlib.sha256()
        with open(self.step / "model.safetensors", "rb") as f:
            while block := f.read(2 ** 24):
                digest.update(block)
        return {"model": self.cfg.model, "checkpoint": digest.hexdigest()[:16],
                "backbone": fingerprint(self.model), "precision": self.precision,
                **{key: getattr(self.cfg, key) for key in sorted(keys)}}

    @torch.no_grad()
    def encode(self, side, inputs):
        """Collated inputs of one side -> Features in fp32 on the CPU, those that scores need."""
        inputs = {key: torch.as_tensor(x).to(self.device) for key, x in inputs.items()}
        with self.autocast():
            features = getattr(self.model, f"encode_{side}")(inputs)
        return {key: x.float().cpu() for key, x in features.items() if key != "P_logit"}

    def features(self, side, samples):
        """Each sample by itself, so that its Features do not depend on the others."""
        parts = [self.encode(side, self.model.collate([s])[side]) for s in samples]
        return {key: torch.cat([p[key] for p in parts]) for key in parts[0]}

    def text_features(self, captions):
        check_list("texts", captions)
        for c in captions:
            if not visible(c):
                raise ValueError(f"the query {c!r} has no letter in it")
        return self.features("text", [Sample("query", c) for c in captions])

    def video_features(self, paths):
        cfg, samples = self.cfg, []
        check_list("paths of videos", paths)
        for path in paths:
            frames, times = read_clip(path, cfg.num_frames, cfg.sampler, cfg.reader, cfg.frame_size,
                                      cfg.min_decoded)
            samples.append(Sample(path, None, frames, times=times))
        return self.features("video", samples)

    def text(self, captions):
        return self._scorable(self.text_features(captions), True)

    def video(self, paths):
        return self._scorable(self.video_features(paths), False)

    def _scorable(self, features, query):
        vectors = as_vectors(self.model, features, query)
        return Items(features, self.model) if vectors is None else vectors


def check_list(what, given):
    if isinstance(given, (str, bytes)) or not given or \
            not all(isinstance(x, (str, os.PathLike)) for x in given):
        raise ValueError(f"give a list of {what}, at least one; got {given!r}")


# -----------------------------------------------------------------------------
# reading videos in processes of their own

def piece_reader(run, seconds):
    """path -> yields ([(start, end)] of some windows or the whole, the model's inputs as numpy)."""
    cfg, model = run.cfg, run.model

    def inputs(samples):
        batch = model.collate(samples)["video"]
        return {key: x.numpy() for key, x in batch.items()}

    def read(path):
        spans, samples = [], []
        for start, end, frames, times in cinema.pieces(
                path, cfg.num_frames, cfg.sampler, cfg.frame_size, seconds, cfg.reader,
                cfg.min_decoded):
            if samples and (start is None or len(samples) == CHUNK):
                yield spans, inputs(samples)
                spans, samples = [], []
            spans.append((start, end))
            samples.append(Sample("", None, frames, times=times))
        yield spans, inputs(samples)  # the whole, alone
    return read


def serve(pipe, others, read):
    """A reader's life: a path comes, pieces go; every job ends with "done" or "bad"."""
    for p in others:  # or the end of the parent would not end this process
        p.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
    try:
        while True:
            path = pipe.recv()
            try:
                for piece in read(path):
                    pipe.send(("piece", piece))
                pipe.send(("done", None))
            except (BrokenPipeError, EOFError):
                return
            except Exception as e:  # whatever a file does to a decoder, the next one is read
                why = reason_of(e, path) or str(e) or type(e).__name__
                pipe.send(("bad", " ".join(why.split())))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


class Readers:
    """Processes that read a video at a time. One that dies, or says nothing for `patience` seconds,
    costs its video and is replaced."""

    def __init__(self, jobs, read, patience):
        self.jobs, self.read, self.patience = iter(jobs), read, patience
        self.context = get_context("fork")
        self.busy = {}  # pipe -> [process, job, since when it is silent]

    def start(self):
        here, there = self.context.Pipe()
        process = self.context.Process(target=serve, args=(there, [here, *self.busy], self.read),
                                       daemon=True)
        process.start()
        there.close()
        self.give(here, process)

    def give(self, pipe, process):
        """The next job, or the end."""
        job = next(self.jobs, None)
        if job is None:
            pipe.close()
            process.join()
        else:
            pipe.send(job)
            self.busy[pipe] = [process, job, time.monotonic()]

    def speaking(self):
        """Those that have something to say, or should have had."""
        ready = connection.wait(list(self.busy), timeout=0.5)
        now = time.monotonic()
        return [(p, p in ready) for p in self.busy
                if p in ready or now - self.busy[p][2] > self.patience]

    def ended(self, pipe, ready):
        """Of a process that says no more: why."""
        if ready:  # its end of the pipe is closed, so it is gone or going
            self.busy[pipe][0].join(5)
        process = self.stop(pipe)
        return (f"it ended its reader (exit {process.exitcode})" if ready else
                f"its reader gave no sign of life for {self.patience:g} s")

    def stop(self, pipe):
        process = self.busy.pop(pipe)[0]
        process.kill()
        process.join()
        pipe.close()
        return process


def read_all(jobs, read, workers, patience):
    """Yields (job, "piece", what read yields), then (job, "done", None) or (job, "bad", why)."""
    if "fork" not in get_all_start_methods():  # Windows: here, one after the other
        for job in jobs:
            try:
                yield from ((job, "piece", piece) for piece in read(job))
                yield job, "done", None
            except ValueError as e:
                yield job, "bad", reason_of(e, job) or str(e)
        return
    readers = Readers(jobs, read, patience)
    try:
        for _ in range(min(workers, len(jobs))):
            readers.start()
        while readers.busy:
            for pipe, ready in readers.speaking():
                process, job, _ = readers.busy[pipe]
                try:
                    kind, what = pipe.recv() if ready else ("late", None)
                except (EOFError, OSError):
                    kind = "dead"
                if kind in ("late", "dead"):
                    yield job, "bad", readers.ended(pipe, ready)
                    readers.start()
                    continue
                if kind != "piece":
                    del readers.busy[pipe]
                    readers.give(pipe, process)
                yield job, kind, what
                if pipe in readers.busy:
                    readers.busy[pipe][2] = time.monotonic()  # encoding took its own time
    finally:
        for pipe in list(readers.busy):
            readers.stop(pipe)


# -----------------------------------------------------------------------------
# index

def index_folder(args):
    return args.index or os.path.join(args.root, ".nanotvr")


def wanted_header(args, run, folder):
    """The header of the index to make; what isn't asked for is as the one that is there has it."""
    old = {}
    if os.path.exists(os.path.join(folder, "index.json")):
        old = shelf.read_header(folder)
    return {"format": shelf.FORMAT, "run": run.identity(),
            "moments": float(old.get("moments", 0) if args.moments is None else args.moments),
            "dtype": old.get("dtype", "fp32") if args.dtype is None else args.dtype}


def build(args, run, say=print):
    """Brings the index up to date. -> {path: why it can't be read}"""
    folder = index_folder(args)
    if not args.index:
        shelf.only_file(folder)
    found, bad, links, others = shelf.videos_in(args.root)
    if not found:
        raise ValueError(f"{args.root} holds no file with an extension of a video "
                         f"({', '.join(sorted(shelf.EXTENSIONS))}); nothing was changed")
    header = wanted_header(args, run, folder)
    writer = shelf.Writer(folder, header)
    for name in writer.damaged:
        say(f"{os.path.join(folder, name)} or its lines are damaged: its videos are read again")
    todo, counts = writer.compare(args.root, found)
    parts, fresh, sample = {}, 0, []
    read = piece_reader(run, header["moments"])
    bar = tqdm(total=len(todo), desc="index", unit="video", smoothing=0.1, leave=False,
               disable=say is not print)
    jobs = [shelf.inside(args.root, path) for path in todo]
    for full, kind, what in read_all(jobs, read, args.num_workers, args.video_timeout):
        path = os.path.relpath(full, args.root).replace(os.sep, "/")
        try:
            if kind == "piece":
                times, inputs = what
                parts.setdefault(path, []).append((times, run.encode("video", inputs)))
                continue
            if kind == "done":
                line, features = assemble(path, full, found[path], parts[path])
                writer.add(line, shelf.pack(features, header["dtype"]))
                fresh += 1
                if fresh % COMPACT == 0:
                    writer.compact()
                if header["dtype"] == "int8" and len(sample) < SAMPLE:
                    sample.append({key: x[-1:] for key, x in features.items()})
        except (ValueError, FileNotFoundError) as e:
            kind, what = "bad", str(e)
        if kind == "bad":
            bad[path] = what
        parts.pop(path, None)
        bar.update()
    bar.close()
    writer.compact()
    report(args, folder, writer, counts, fresh, bad, links, others, say)
    if len(sample) > 1:
        say("int8 against fp32: " + agreement(run, sample))
    return bad


def assemble(path, full, stamp, parts):
    """-> (the line of a video, its Features) from its pieces; ValueError if they are no good."""
    times = [t for piece, _ in parts for t in piece]
    features = {key: torch.cat([f[key] for _, f in parts]) for key in parts[0][1]}
    if not all(x.isfinite().all() for x in features.values()):
        raise ValueError("its embedding is not finite")
    st = os.stat(full)
    if (st.st_size, st.st_mtime_ns) != stamp:
        raise ValueError("it was changed while it was read; run index again")
    return {"path": path, "size": stamp[0], "mtime_ns": stamp[1], "digest": shelf.digest(full),
            "end": round(times[-1][1], 3),
            "moments": [[round(a, 3), round(b, 3)] for a, b in times[:-1]]}, features


def report(args, folder, writer, counts, fresh, bad, links, others, say):
    counts = {"read": fresh, **counts}
    rows = sum(len(line["moments"]) for line in writer.lines.values())
    size = sum(e.stat().st_size for e in os.scandir(folder) if e.is_file())
    say(f"{folder}: {len(writer.lines)} videos" + (f", {rows} moments" if rows else "") +
        f", {size / 1e6:.1f} MB (" + ", ".join(f"{n} {what}" for what, n in counts.items()) + ")")
    if links or others:
        say(f"passed over: {links} links that lead out of the folder, {others} other files")
    if bad:
        say(f"{len(bad)} can't be read:")
    for path in sorted(bad):
        say(f"  {shown(path)}: {shown(bad[path])}")


def shown(text):
    """Text for a line of a terminal: what is not printable is escaped."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def agreement(run, sample):
    """How the order of `sample` (wholes just indexed) by int8 vectors agrees with that by fp32."""
    whole = {key: torch.cat([f[key] for f in sample]) for key in sample[0]}
    short = shelf.unpack(shelf.pack(whole, "int8"))
    S = [evaluation.similarity(run.model.similarity, whole, v, device=run.device, quiet=True)
         .fill_diagonal_(-torch.inf) for v in (whole, short)]
    return agree(*S)


def agree(S, S8):
    """In words, from scores [Nq, N] by fp32 and by int8."""
    k = min(10, S.shape[1] - 1)
    best, best8 = (s.topk(k).indices for s in (S, S8))
    same = (best[:, :, None] == best8[:, None]).any(-1).float().mean()
    first = (best[:, 0] == best8[:, 0]).float().mean()
    ranks = [s.argsort(1).argsort(1).double() for s in (S, S8)]
    d2 = ((ranks[0] - ranks[1]) ** 2).sum(1)
    n = S.shape[1]
    rho = (1 - 6 * d2 / (n * (n * n - 1))).mean()
    return (f"of {len(S)} queries against {n} items the first is the same for {100 * first:.1f} %, "
            f"of the best {k} {100 * same:.1f} % are the same, rank correlation {rho:.5f}")


# -----------------------------------------------------------------------------
# query

def open_index(args, run):
    reader = shelf.Reader(index_folder(args))
    now = {**reader.header, "run": run.identity()}
    differ = shelf.differences(reader.header, now, free=("precision",))
    if differ:
        raise ValueError(f"the index {index_folder(args)} is of another run ({differ}): query it "
                         "with its own, or make another with --index")
    return reader


def fast_scores(run, reader, query):
    """
    -> scores [rows] of one query by a product of vectors, and whether they are, to rounding, those
    of the model. Where a score is no dot product they are the global level's; None where there is
    no such vector either.
    """
    q = as_vectors(run.model, query, True)
    level = q is None and "G" in query
    if q is None and not level:
        return None, False
    q = (query["G"] if level else q)[0].numpy()  # [D]
    S = np.empty(reader.n, np.float32)
    for first, features in reader.chunks(BLOCK, ("G",) if level else None):
        v = (features["G"] if level else as_vectors(run.model, features)).numpy()  # [n, D]
        S[first:first + len(v)] = v @ q  # numpy's is a fifth faster than torch's here
    if np.isfinite(q).all() and not np.isfinite(S).all():
        row = int((~np.isfinite(S)).argmax())
        line = reader.lines[int(reader.video[row])]
        raise shelf.damaged(os.path.join(reader.folder, line["shard"]))
    return torch.from_numpy(S), not level


def exact_scores(run, query, items):
    """model.similarity's scores [Nq, n], to the last bit those of an evaluation."""
    return evaluation.similarity(run.model.similarity, query, items, device=run.device, quiet=True)


def search(run, reader, query, k=5, whole=False, exhaustive=False, preselect=200):
    """
    The best k hits of one query (Features of one item): [{"score", "path", "start", "end", ...}].

    Exact: the candidates are scored by model.similarity, and where fast scores are to rounding the
    same, all that could be among the best are candidates. Windows that overlap by half are one
    hit. A tie goes to the path that sorts first.
    """
    fast, sure = fast_scores(run, reader, query)
    eligible = reader.whole if whole or not reader.header["moments"] else reader.moment
    total = int(eligible.sum())
    n = total if exhaustive or fast is None else max(4 * k, 64) if sure else max(preselect, k)
    while True:
        if n < total:
            best = fast.masked_fill(~eligible, -torch.inf)
            rows = (best >= best.topk(n).values[-1] - NEAR * sure).nonzero()[:, 0]
        else:
            rows = eligible.nonzero()[:, 0]  # ascending, as above
        scores = torch.cat([exact_scores(run, query, reader.take(part))[0]
                            for part in rows.split(4096)])
        hits = merged(reader, rows, scores, k)
        if len(hits) == k or n >= total:
            return hits
        n = 4 * n


def merged(reader, rows, scores, k):
    evaluation.check_finite(scores[None], ["the query"],
                            [reader.lines[v]["path"] for v in reader.video[rows]])
    hits, taken = [], {}
    for i in scores.argsort(descending=True, stable=True).tolist():
        r = int(rows[i])
        line = reader.lines[int(reader.video[r])]
        start, end = float(reader.start[r]), float(reader.end[r])
        if any(min(end, b) - max(start, a) >= 0.5 * min(end - start, b - a) - 1e-3
               for a, b in taken.get(line["path"], ())):
            continue
        taken.setdefault(line["path"], []).append((start, end))
        hits.append({"score": float(scores[i]), "path": line["path"], "start": start, "end": end,
                     "row": r, "line": line})
        if len(hits) == k:
            break
    return hits


def explain(run, query, items, hit, words=None):
    """
    Where a score comes from: {"parts": [(name, score)], "matches": [(word, second, cosine)]}, the
    latter of PHA-Net: the frame that each of the query's most weighty words (or frames) met.
    """
    model, parts, matches = run.model, [], []
    on = lambda f: {key: x.to(run.device) for key, x in f.items()}  # noqa: E731
    query, items = on(query), on(items)
    with torch.no_grad():
        if hasattr(model, "slot_similarity"):
            S = model.slot_similarity(query, items)[:, 0, 0].tolist()
            parts = [(f"slot {m + 1}", s) for m, s in enumerate(S)]
        elif hasattr(model, "level_similarity"):
            name = {"I": "individual", "L": "local", "G": "global"}
            parts = [(f"{name[x]} x {w:g}", model.level_similarity(x, query, items).item())
                     for x, w in model.levels.items()]
    if words and "I" in query:
        T = run.cfg.num_frames
        A = query["I"][0, :len(words)] @ items["I"][0, :T].T  # words x frames
        best, frame = A.max(1)
        weight = query["I_gamma"][0, :len(words)] * best
        for i in weight.argsort(descending=True).tolist():
            if any(map(str.isalnum, words[i])) and len(matches) < 4:
                t = hit["start"] + (int(frame[i]) + 0.5) / T * (hit["end"] - hit["start"])
                matches.append((words[i], t, float(best[i])))
    return {"parts": parts, "matches": matches}


def words_of(run, caption):
    """PHA-Net's tokens of a caption as words; "" for start and end."""
    if not hasattr(run.model, "level_similarity") or "I" not in run.model.levels:
        return None
    ids = run.model.collate([Sample("query", caption)])["text"]
    n, tok = int(ids["attention_mask"].sum()), run.model.backbone.tokenizer
    return ["" if i in tok.all_special_ids else tok.decode([i]).strip()
            for i in ids["input_ids"][0, :n].tolist()]


def queries(args, run):
    """Yields (what is asked, Features of one item, its words or None)."""
    for text in args.queries:
        yield text, run.text_features([text]), words_of(run, text)
    for path in filter(None, (args.image, args.video)):
        names = [f"frame {i + 1}" for i in range(run.cfg.num_frames)]
        yield path, run.video_features([path]), names


def answer(args, run, reader):
    """Yields (query, hits); each hit with why."""
    for text, query, words in queries(args, run):
        hits = search(run, reader, query, args.k, args.whole, args.exhaustive, args.preselect)
        for hit in hits:
            hit["full"] = shelf.inside(args.root, hit["path"])
            try:
                st = os.stat(hit["full"])
                now = st.st_size, st.st_mtime_ns
            except OSError:
                now = None
            hit["note"] = "" if now == shelf.Writer.stamp(hit["line"]) else \
                "gone since it was indexed" if now is None else "changed since it was indexed"
            hit["why"] = explain(run, query, reader.take(torch.tensor([hit["row"]])), hit, words)
        yield text, hits


def table(text, hits, why):
    width = max([len(shown(h["path"])) for h in hits] + [0])
    out = [shown(text)]
    for n, h in enumerate(hits, 1):
        out.append(f"{n:3d}  {h['score']:.4f}  {shown(h['path']):<{width}}  {clock(h['start'])} - "
                   f"{clock(h['end'])}" + (f"  ({h['note']})" if h["note"] else ""))
        if why:
            parts = [f"{name} {s:.3f}" for name, s in h["why"]["parts"]]
            parts += [f'"{shown(w)}" at {clock(t)} ({s:.2f})' for w, t, s in h["why"]["matches"]]
            out.append("       " + (", ".join(parts) or "one vector: the score is all there is"))
    return "\n".join(out)


def as_json(text, hits, why):
    rows = [{"rank": n, **{key: h[key] for key in ("score", "path", "start", "end")},
             **({"note": h["note"]} if h["note"] else {}), **({"why": h["why"]} if why else {})}
            for n, h in enumerate(hits, 1)]
    return {"query": text, "hits": rows}


def save_clips(folder, hits, first):
    """The hits as files; which ones can't be cut is told, the others are."""
    os.makedirs(folder, exist_ok=True)
    for n, h in enumerate(hits, first):
        stem = os.path.splitext(os.path.basename(h["path"]))[0]
        stem = "".join(c if c.isalnum() or c in "-_ " else "_" for c in stem)[:80]
        name = os.path.join(folder, f"{n:02d} {stem} {h['start']:.1f}-{h['end']:.1f}.mp4")
        try:
            cinema.cut(h["full"], h["start"], h["end"], name)
            print(f"saved {name}", file=sys.stderr)
        except Exception as e:  # PyAV's errors share no base class
            print(f"not saved: {shown(h['path'])}: {shown(str(e))}", file=sys.stderr)


def main(args):
    run = Run(args)
    if args.command == "index":
        return 3 if build(args, run) else 0
    reader, found = open_index(args, run), []
    for text, hits in answer(args, run, reader):
        found.append((text, hits))
        if args.command == "query" and not args.json:
            print(table(text, hits, args.why), flush=True)
    if args.command == "page":
        import page
        stills = {path: cinema.stills(path, [0.0]) for path in (args.image, args.video) if path}
        page.write_hits(args.out, found, args.root, stills)
        print(f"wrote {args.out}")
    elif args.json:
        print(jsonlib.dumps([as_json(text, hits, args.why) for text, hits in found], indent=1))
    if args.cut:
        done = 1
        for _, hits in found:
            save_clips(args.cut, hits, done)
            done += len(hits)
    return 0


if __name__ == "__main__":
    sys.exit(one_line_errors(lambda: main(args)))
