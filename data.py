"""
From files on disk to Samples: annotations, frames, the order of training steps, the loader.

    train.jsonl: {"id", "video", "captions": [...]} per line
      load_annotations -> [Item] -> Pairs (training) | Texts, Videos (evaluation)
      worker: decode -> Sample(id, caption, frames uint8 [T, H, W, 3]) -> collate (the model's)

Frame indices count the frames that decode, in the order the decoder hands them out, for every
reader. decord (no release since 2021) is asked only for files whose header says that it is right
on them (`decord_is_right`); all others, and all that it fails on, are read with PyAV. Where both
are right they give the same pixels, bit for bit, upright. An image is a video of one frame.

Not here on purpose: augmentation, normalisation and the backbone's own resize (its processor's).
"""
import gc
import glob
import hashlib
import importlib.util
import json
import multiprocessing
import os
import signal
import sys
import unicodedata
from dataclasses import dataclass, field

import numpy as np  # and torch where it is used, so that a missing file is told of at once


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


class BadVideo(ValueError):
    """One line: which file, its codec if known, why it cannot be read, what to do."""

    def __init__(self, message):
        # a loader's worker hands its error over as a whole formatted traceback: keep the last line
        super().__init__(message.strip().splitlines()[-1].split("BadVideo: ")[-1])


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
# samplers: (n decodable frames, T wanted) -> T indices, never decreasing; n < T repeats frames

def uniform(n, T):
    """Middle of T equal segments: floor((i + 1/2) * n / T). The default; MARS says "16 frames"."""
    return (2 * np.arange(T) + 1) * n // (2 * T)


def linspace(n, T):
    """BLiM's: np.linspace(0, n - 2, T) cut to integers; the last frame is never taken."""
    return np.linspace(0, max(n - 2, 0), T, dtype=int)


SAMPLERS = {"uniform": uniform, "linspace": linspace}


# -----------------------------------------------------------------------------
# frames

def read_frames(path, num_frames, sampler="uniform", reader="auto", size=0):
    """
    uint8 [T, H, W, 3], upright RGB. size > 0: the shorter side becomes size (antialiased bicubic,
    frame by frame while decoding), 0 keeps the native size. Raises BadVideo. A file of which only
    a part decodes is read from that part, and named on stderr. reader: auto is right on all we
    have met; pyav gives the same, slower on long files; decord is that one alone, for comparison.
    """
    frames, partial = decode(path, num_frames, sampler, reader, size)
    if partial:
        print(f"warning: {path} is partial: {partial}", file=sys.stderr, flush=True)
    return frames


def decode(path, num_frames, sampler="uniform", reader="auto", size=0):
    """-> (frames, None or a sentence saying what is missing)"""
    check_names(sampler, reader)
    pick, head = SAMPLERS[sampler], None
    try:
        if os.path.isdir(path):
            raise ValueError("it is a folder, not a file")
        if not os.path.isfile(path):
            raise ValueError("no such file")
        if os.path.getsize(path) == 0:
            raise ValueError("the file is empty (0 bytes)")
        if reader == "decord":
            return decode_decord(path, num_frames, pick, size), None
        head = scan(path)
        if reader == "auto" and decord_is_right(head):
            try:
                return decode_decord(path, num_frames, pick, size, head.packets), head.partial()
            except Exception:  # RuntimeError, DECORDError, IndexError, no decord at all: use PyAV
                pass
        return decode_pyav(path, num_frames, pick, size, head)
    except Exception as e:  # PyAV's errors share no base class with decord's
        codec = f" (codec {head.codec})" if head else ""
        reason = (getattr(e, "strerror", None) or str(e) or type(e).__name__).strip()
        if type(e).__name__ == "InvalidDataError":
            reason = f"it is no video, or cut off before its index ({reason})"
        raise BadVideo(f"cannot read {path}{codec}: {reason}; replace or re-encode it (H.264), "
                       f"or set on_bad_video=skip") from None


def check_names(sampler, reader):
    if sampler not in SAMPLERS:
        raise ValueError(f"sampler {sampler!r} is not one of {', '.join(SAMPLERS)}")
    if reader not in ("auto", "decord", "pyav"):
        raise ValueError(f"reader {reader!r} is not one of auto, decord, pyav")
    module = "decord" if reader == "decord" else "av"
    if module not in sys.modules and importlib.util.find_spec(module) is None:
        raise ValueError(f"reader={reader} needs the package {module}: pip install {module}")


@dataclass
class Head:
    """What a file says before it is decoded; packets are the compressed frames."""
    codec: str
    format: str
    promised: int = 0     # frames by the header, less those an edit list hides; 0: it does not say
    packets: int = 0      # that are really there, hidden ones not counted
    hidden: int = 0
    damaged: int = 0
    closed: bool = True   # nothing between two keyframes is shown before the first of them
    end: float = 0.0      # time stamp of the last packet, seconds
    duration: float = 0.0
    plain: bool = False   # 8-bit 4:2:0 frames of even size, progressive, not mirrored, up to 4K
    mirrored: bool = False  # upright = flipped top to bottom if mirrored, then turned
    turns: int = 0        # by so many quarters, counter-clockwise
    only: object = None   # the frame [H, W, 3] itself, if it is the only one (an image)

    def partial(self, decoded=None, errors=0):
        """None if all is there, else what is missing. Other headers than mp4's may be off by 1."""
        n = self.packets if decoded is None else decoded
        if errors or self.damaged or n < self.promised - ("mp4" not in self.format):
            return f"{n} of {max(self.promised, self.packets)} frames decode"
        if not self.promised and self.end < 0.9 * self.duration - 1:
            return f"the frames end at {self.end:.1f} s of {self.duration:.1f} s"
        return None


def video_stream(container):
    import av
    s = container.streams.best("video")
    if s is None:
        raise ValueError("it has no video stream, only audio" if container.streams.audio else
                         "it is no video, or cut off before its index (no video stream)")
    if s.disposition & av.stream.Disposition.attached_pic:
        raise ValueError("it has no video stream, only audio with a cover picture")
    if s.codec_context is None:
        raise ValueError("PyAV has no decoder for its codec")
    # 2, not 1: with one thread FFmpeg paints over damaged H.264 differently than with any other
    # number, and not more: the loader's workers are the parallelism
    s.codec_context.thread_type, s.codec_context.thread_count = "SLICE", 2
    return s


def packets(container, stream):
    """Packets until the end or the first one that cannot be fetched (then None comes last)."""
    import av
    try:
        yield from container.demux(stream)
    except av.error.FFmpegError:
        yield None


def frames_of(packet):
    """-> frames of one packet, or None if it is damaged."""
    import av
    try:
        return packet.decode()
    except av.error.FFmpegError:
        return None


def scan(path):
    """Reads all packet headers and decodes one frame: about 2% of the time of decoding the file."""
    import av
    with av.open(path, metadata_errors="ignore") as c:
        s = video_stream(c)
        head, first = Head(s.codec_context.name, c.format.name), None
        shown, keys = [], []
        for p in packets(c, s):
            if p is None or p.is_corrupt:
                head.damaged += 1
            if first is None and p is not None:
                first = next(iter(frames_of(p) or []), None)
            if p is not None and p.size:
                head.hidden += p.is_discard
                if not p.is_discard:
                    keys.append(p.is_keyframe)
                    shown.append(p.pts)
        head.packets = len(shown)
        # an mp4's index lacks what an edit list cut off before the keyframe; its count does not
        head.promised = len(s.index_entries) if "mp4" in head.format else s.frames
        head.promised = max(head.promised - head.hidden, 0)
        head.closed = closed_gops(shown, keys)
        head.end = float(max((t for t in shown if t is not None), default=0) * s.time_base)
        head.duration = (c.duration or 0) / av.time_base
    if first is not None:
        w, h = first.width, first.height
        head.turns, head.mirrored = orientation(first)
        head.plain = (first.format.name in ("yuv420p", "yuvj420p") and not first.interlaced_frame
                      and w % 2 == h % 2 == 0 and w * h <= 4096 * 2304 and not head.mirrored)
        if head.packets == 1 and not head.damaged:
            head.only = to_rgb(first, head).copy()  # not a view that keeps the frame
        del first
        gc.collect(1)  # a frame asked for its side data is in a reference cycle: megabytes each
    return head


def closed_gops(shown, keys):
    """Every keyframe has the same place in the file (shown: time stamps in that order) as on
    screen, so decoding can start there without showing frames that belong to the part before."""
    if None in shown or len(set(shown)) < len(shown) or not keys or not keys[0]:
        return False
    place = {t: i for i, t in enumerate(sorted(shown))}
    return all(place[t] == i for i, t in enumerate(shown) if keys[i])


def orientation(frame):
    """-> (turns, mirrored) as in Head, from the display matrix"""
    try:
        m = np.frombuffer(frame.side_data["DISPLAYMATRIX"], np.int32).astype(float)
        mirrored = m[0] * m[4] < m[1] * m[3]
    except (KeyError, ValueError):  # none; or a kind that PyAV has no name for (a photo's EXIF)
        mirrored = False
    return round(frame.rotation / 90) % 4, bool(mirrored)


def decord_is_right(head):
    """
    Where decord 0.6 hands out the same frames as decoding everything does. Elsewhere it is silently
    wrong: open GOPs and field-coded video (other frames than asked), edit lists (counts hidden
    frames), more than 8 bits and odd sizes (other colours), mirrored video. It fails on AV1, and
    holds a gigabyte for one 8K clip. Damage that no header tells of it may pass over in silence, or
    not come across; reader=pyav decodes all and reports it.
    """
    return (head.plain and head.codec in ("h264", "hevc", "vp9") and head.closed
            and head.format.startswith(("mov,", "matroska,")) and not head.damaged
            and not head.hidden and head.promised in (0, head.packets))


def decode_decord(path, T, pick, size, expected=None):
    import torch  # noqa: F401  decord has to come after it
    import decord  # only in the process that reads
    decord.logging.set_level(decord.logging.QUIET)
    video = decord.VideoReader(path, ctx=decord.cpu(0), num_threads=1)
    if expected is not None and len(video) != expected:
        raise RuntimeError(f"decord counts {len(video)} frames, the file has {expected}")
    index = pick(len(video), T)
    frames = {}
    for i in sorted(set(index.tolist())):
        frame = video[i].asnumpy()
        if frame.shape[2] != 3:  # widths up to 32: rows with their padding
            raise RuntimeError(f"decord returns a frame of shape {frame.shape}")
        frames[i] = resize(frame, size)
    return np.stack([frames[i] for i in index.tolist()])


def decode_pyav(path, T, pick, size, head):
    if head.only is not None:
        return np.stack([resize(head.only, size)] * T), head.partial()
    n = max(head.packets, 1)
    frames, decoded, errors = pyav_frames(path, set(pick(n, T).tolist()), size, head)
    if decoded == 0:
        raise ValueError("no frame decodes")
    if decoded != n:  # sample again inside the range that does decode
        frames, n, errors = pyav_frames(path, set(pick(decoded, T).tolist()), size, head)
    return np.stack([frames[i] for i in pick(n, T).tolist()]), head.partial(n, errors)


def pyav_frames(path, wanted, size, head):
    """-> ({index: frame}, how many decode, how many packets do not); always reads to the end."""
    import av
    frames, n, errors, shape = {}, 0, 0, None
    with av.open(path, metadata_errors="ignore") as c:
        for p in packets(c, video_stream(c)):
            got = None if p is None else frames_of(p)
            errors += got is None
            for f in got or []:
                if n in wanted:
                    frames[n] = resize(to_rgb(f, head), size, shape)
                    shape = frames[n].shape[:2]  # a stream may change its size on the way
                n += 1
    return frames, n, errors


def to_rgb(frame, head):
    rgb = frame.to_ndarray(format="rgb24")  # [H, W, 3]
    return np.rot90(rgb[::-1] if head.mirrored else rgb, head.turns)


def resize(frame, size, shape=None):
    """[H, W, 3] uint8 -> shorter side = size, or exactly shape; a contiguous copy in any case."""
    h, w = frame.shape[:2]
    if max(h, w) > 200 * min(h, w):  # the backbones' limit; here on_bad_video may skip it
        raise ValueError(f"a frame of {w}x{h} is too thin: the longer side may be at most 200 "
                         "times the other")
    if shape is None and size:
        shape = tuple(max(1, round(x * size / min(h, w))) for x in (h, w))
    if shape is None or shape == (h, w):
        return np.ascontiguousarray(frame)
    import torch
    x = torch.from_numpy(np.ascontiguousarray(frame)).permute(2, 0, 1)[None]  # [1, 3, H, W]
    x = torch.nn.functional.interpolate(x, shape, mode="bicubic", antialias=True)
    return np.ascontiguousarray(x[0].permute(1, 2, 0).numpy())


# -----------------------------------------------------------------------------
# datasets

class Clips:
    """The videos of a split: policy for bad files, frame cache. Shared by Pairs and Videos."""

    def __init__(self, items, video_root, num_frames, sampler="uniform", size=0, reader="auto",
                 frame_cache="", on_bad_video="raise"):
        if on_bad_video not in ("raise", "skip"):
            raise ValueError(f"on_bad_video {on_bad_video!r} is not one of raise, skip")
        check_names(sampler, reader)
        if not os.path.isdir(video_root or "."):
            raise FileNotFoundError(f"video_root {video_root} is no folder: set it to where the "
                                    f"videos are")
        self.items, self.video_root, self.on_bad_video = items, video_root, on_bad_video
        self.how = (num_frames, sampler, reader, size)
        self.frame_cache = frame_cache
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
            self.name(i, 2, f"skipped: {e}")
            return None, self.bad[i]
        if partial:
            self.name(i, 1, f"warning: {path} is partial: {partial}")
        return frames, None

    def name(self, i, what, line):
        with self.named.get_lock():
            new, self.named[i] = self.named[i] != what, what
        if new:
            print(line, file=sys.stderr, flush=True)

    def skipped(self):
        """Ids of the videos found unreadable so far, by any worker of this process."""
        return [item.id for item, what in zip(self.items, self.named[:]) if what == 2]

    def cached(self, path):
        if not self.frame_cache or not os.path.isfile(path):
            return decode(path, *self.how)
        st = os.stat(path)
        key = repr(("1", os.path.abspath(path), st.st_size, st.st_mtime_ns, self.how))
        name = os.path.join(self.frame_cache, hashlib.sha1(key.encode()).hexdigest() + ".npy")
        try:
            frames = np.load(name, allow_pickle=False)
            if frames.dtype == np.uint8 and frames.ndim == 4 and len(frames) == self.how[0]:
                return frames, None
        except (OSError, ValueError, EOFError):  # not there yet, or cut short: make it again
            pass
        frames, partial = decode(path, *self.how)
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
