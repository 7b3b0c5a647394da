"""
One video or picture -> uint8 frames [T, H, W, 3], upright RGB, and the seconds at which they are
shown, or BadVideo that says why not.

    path --scan: all packet headers--> when each frame is shown --sampler--> which T frames
         --read: only the groups of pictures that hold them--> resize each --> [T, H, W, 3]

Frames are picked in time, from the time stamps of the file, inside the range that decodes. The
reader `pyav` (FFmpeg 8) is the default: right on all we have met. `decord` (no release since 2021)
gives the same bits and refuses by name what it would get wrong (`decord_is_wrong`).

Not here on purpose: stretching by the sample aspect ratio, deinterlacing, tone mapping. A frame is
what decoding gives, as in OpenCV, decord and PyAV; rotation alone is undone.
"""
import gc
import importlib.util
import mmap
import os
import pickle
import signal
import sys
import time
import warnings
from dataclasses import dataclass, field
from fractions import Fraction
from multiprocessing import get_all_start_methods
from multiprocessing.connection import Pipe

import numpy as np


class BadVideo(ValueError):
    """One line: which file, its codec if known, why it cannot be read, what to do."""

    def __init__(self, message):
        # a loader's worker hands its error over as a whole formatted traceback: keep the last line
        super().__init__(message.strip().splitlines()[-1].split("BadVideo: ")[-1])


# -----------------------------------------------------------------------------
# samplers: (times [n + 1], T, tick) -> T indices of frames, never decreasing; few frames repeat
#
# times[i] is when frame i is shown, in ticks since frame 0, and times[n] when the last one ends; a
# tick lasts `tick` seconds. All in integers, so that a moment that is the very start of a frame
# finds that frame; at a constant frame rate the formulas are those of the papers' code, by index.

def shown_at(times, moments):
    return np.searchsorted(times[:-1], moments, side="right").clip(1) - 1


def until(times, seconds, tick):
    """The part of the video before `seconds`, its first frame in any case."""
    end = min(int(times[-1]), int(seconds / tick))
    return np.append(times[:max(1, np.searchsorted(times[:-1], end))], end)


def uniform(times, T, tick):
    """The middles of T equal parts of the time. The default; MARS says "16 frames"."""
    return shown_at(times, (2 * np.arange(T) + 1) * times[-1] // (2 * T))


def linspace(times, T, tick):
    """BLiM's np.linspace(0, n - 2, T) cut to integers: from the first to the last frame but one."""
    return shown_at(times, np.arange(T) * times[max(len(times) - 3, 0)] // max(T - 1, 1))


def fps3(times, T, tick):
    """PHA-Net's: 3 frames a second, then np.linspace over these, cut to integers, down to T. Where
    there are fewer than T, frames repeat; CLIP4Clip's loader puts black ones, under a mask."""
    n = max(1, -int(-3 * int(times[-1]) * tick // 1))  # moments 0, 1/3, 2/3, ... before the end
    third = np.array([int(Fraction(k, 3) / tick) for k in np.linspace(0, n - 1, T, dtype=int)])
    return shown_at(times, third)


def first30(times, T, tick):
    """DiDeMo's moments are marked in the first 30 seconds: the middles of T parts of these."""
    return uniform(until(times, ENDS["first30"], tick), T, tick)


def linspace30(times, T, tick):
    """BLiM's DiDeMo: its linspace over the first 30 seconds."""
    return linspace(until(times, ENDS["linspace30"], tick), T, tick)


SAMPLERS = {"uniform": uniform, "linspace": linspace, "fps3": fps3, "first30": first30,
            "linspace30": linspace30}
ENDS = {"first30": 30, "linspace30": 30}  # seconds after which there is no video for these
READERS = {"pyav": "av", "decord": "decord"}  # name -> package


def check_names(sampler, reader):
    if sampler not in SAMPLERS:
        raise ValueError(f"sampler {sampler!r} is not one of {', '.join(SAMPLERS)}")
    if reader not in READERS:
        raise ValueError(f"reader {reader!r} is not one of {', '.join(READERS)}")
    for package in ("av", READERS[reader]):
        if package not in sys.modules and importlib.util.find_spec(package) is None:
            raise ValueError(f"reader={reader} needs the package {package}: pip install {package}")


# -----------------------------------------------------------------------------
# reading

def read_frames(*how, **named):
    """The frames of read_clip()."""
    return read_clip(*how, **named)[0]


def read_clip(path, num_frames, sampler="uniform", reader="pyav", size=0, min_decoded=0.9):
    """decode()'s frames and times; a file that is read in part is named on stderr."""
    frames, times, partial = decode(path, num_frames, sampler, reader, size, min_decoded)
    if partial:
        print(f"warning: {path} is partial: {partial}", file=sys.stderr, flush=True)
    return frames, times


def decode(path, num_frames, sampler="uniform", reader="pyav", size=0, min_decoded=0.9):
    """
    -> (frames uint8 [T, H, W, 3], their times, None or a sentence saying what is missing).
    times: T + 1 floats, see clip_times(). size > 0: the shorter side becomes size (antialiased
    bicubic, frame by frame while decoding), 0 keeps the native one. BadVideo if it cannot be read
    or less than the share min_decoded of its frames decodes.
    """
    check_names(sampler, reader)
    head, pick = Head(), SAMPLERS[sampler]
    with said_of(path, head):
        check_file(path)
        read = decode_pyav if reader == "pyav" else decode_decord
        frames, index, n, errors = read(path, num_frames, pick, size, head)
        share, partial = head.missing(n, errors)
        if share < min_decoded:
            raise ValueError(f"only {partial}, less than min_decoded={min_decoded}")
        return frames, clip_times(head, index, sampler), partial


def since(head, index, first=0):
    """Seconds from when frame `first` is shown until each of these is; -1: when the last ends."""
    # from whole ticks: a difference of floats could fall short of a whole second
    return [float((int(head.times[i]) - int(head.times[first])) * head.tick) for i in index]


def clip_times(head, index, sampler):
    """
    T + 1 seconds since the video's first frame: when each of the frames at index [T] is shown, and
    when the video ends, which is where the sampler takes it to end.
    """
    *shown, end = since(head, [*index, -1])
    return [*shown, float(min(end, ENDS.get(sampler, end)))]


class said_of:
    """`with said_of(path, head)`: any exception becomes one BadVideo that names path and codec."""

    def __init__(self, path, head):
        self.path, self.head = path, head

    def __enter__(self):
        pass

    def __exit__(self, kind, e, traceback):
        if not isinstance(e, Exception):
            return
        # PyAV's errors share no base class with decord's (RuntimeError, DECORDError, IndexError)
        codec = f" (codec {self.head.codec})" if self.head.codec else ""
        reason = " ".join((getattr(e, "strerror", None) or str(e) or type(e).__name__).split())
        if type(e).__name__ == "InvalidDataError":
            reason = f"it is no video, or cut off before its index ({reason})"
        raise BadVideo(f"cannot read {self.path}{codec}: {reason}; replace or re-encode it "
                       f"(H.264), or set on_bad_video=skip") from None


def reason_of(e, path):
    """Of a BadVideo about path, only what is wrong with it."""
    return str(e).removeprefix(f"cannot read {path}").partition(": ")[2].partition("; replace")[0]


def check_file(path):
    if os.path.isdir(path):
        raise ValueError("it is a folder, not a file")
    if not os.path.isfile(path):
        raise ValueError("no such file")
    if os.path.getsize(path) == 0:
        raise ValueError("the file is empty (0 bytes)")


@dataclass
class Head:
    """What a file says before it is decoded; packets are the compressed frames."""
    codec: str = ""
    format: str = ""
    promised: int = 0     # frames by the header, less hidden and early ones; 0: it does not say
    shown: list = field(default_factory=list, repr=False)  # time stamps of the packets that are
                          # there, in the file's order, hidden ones left out
    keys: list = field(default_factory=list, repr=False)   # which of these are keyframes
    early: int = 0        # before the first keyframe, of a copy that was cut elsewhere: lost, but
                          # no damage, and the time counts from the first frame that decodes
    hidden: int = 0
    damaged: int = 0      # packets that can't be fetched whole
    suspect: bool = False # a packet's bytes are in disorder: decode all, to count what is lost
    closed: bool = False  # keyframes have the same place in the file as on screen: nothing between
                          # two of them is shown before the first, so decoding can start at each
    tick: Fraction = Fraction(1)                           # of time stamps, seconds
    times: np.ndarray = field(default=None, repr=False)    # as the samplers want them
    duration: float = 0.0 # seconds, by the header
    size: tuple = (0, 0)  # coded height, width
    pixels: str = ""      # pixel format
    interlaced: bool = False
    mirrored: bool = False  # upright = flipped top to bottom if mirrored, then turned
    turns: int = 0        # by so many quarters, counter-clockwise
    only: object = field(default=None, repr=False)  # the one frame [H, W, 3] of an image

    @property
    def packets(self):
        return len(self.shown)

    def missing(self, decoded=None, errors=0):
        """-> (share that decodes, None or what is missing); headers but mp4's may be off by 1."""
        of = max(self.promised, self.packets - self.early)
        n = self.packets - self.early if decoded is None else decoded
        if errors or self.damaged or n < self.promised - ("mp4" not in self.format):
            return n / max(of, 1), f"{n} of {of} frames decode"
        # a container's duration may count from 0 although its first frame comes later
        start = min((t for t in self.shown if t is not None), default=0)
        end = float((max(start, 0) + int(self.times[-1])) * self.tick)
        if not self.promised and end < 0.9 * self.duration - 1:
            return end / self.duration, f"the first {end:.1f} s of {self.duration:.1f} s decode"
        return 1.0, None


# -----------------------------------------------------------------------------
# the container

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


def scan(c, head):
    """Reads all packet headers and decodes one frame: about 2% of the time of decoding the file."""
    import av
    s, first, latest, last = video_stream(c), None, -1 << 63, 0
    head.codec, head.format = s.codec_context.name, c.format.name
    prefix = prefix_of(s.codec_context)
    for p in packets(c, s):
        if p is None or p.is_corrupt:
            head.damaged += 1
        if p is None:
            break
        if first is None:
            first = next(iter(frames_of(p) or []), None)
        if p.size:
            head.suspect = head.suspect or not in_order(p, prefix)
            head.hidden += p.is_discard
            if not p.is_discard:
                head.keys.append(p.is_keyframe)
                head.shown.append(p.pts)
                if p.pts is not None and p.pts >= latest:
                    latest, last = p.pts, p.duration
    # an mp4's index lacks what an edit list cut off before the keyframe; its count does not
    head.promised = len(s.index_entries) if "mp4" in head.format else s.frames
    head.early = head.keys.index(True) if True in head.keys else 0
    head.promised = max(head.promised - head.hidden - head.early, 0)
    head.duration = (c.duration or 0) / av.time_base
    rate = Fraction(s.average_rate or s.guessed_rate or 25)
    head.tick, head.times = timeline(head.shown, last, s.time_base, rate)
    head.closed = closed_gops(head.shown, head.keys)
    if first is not None:
        looks_of(first, head)
        del first
        gc.collect(1)  # a frame asked for its side data is in a reference cycle: megabytes each


def prefix_of(ctx):
    """How many bytes tell the length of each piece of a packet (H.264, HEVC in mp4, mkv); or 0."""
    place = {"h264": 4, "hevc": 21}.get(ctx.name)
    setup = ctx.extradata or b""
    return (setup[place] & 3) + 1 if place and len(setup) > place and setup[0] == 1 else 0


def in_order(packet, prefix):
    """Do the lengths add up, and does no piece start with a set bit, which is forbidden?"""
    data, at = memoryview(packet), 0
    while prefix and at + prefix < len(data):
        if data[at + prefix] & 128:
            return False
        at += prefix + int.from_bytes(data[at:at + prefix], "big")
    return not prefix or at == len(data)


def timeline(stamps, last, tick, rate):
    """Time stamps of frames in any order, how long the last is shown -> tick, times [n + 1]."""
    n = len(stamps)
    if n == 0 or None in stamps or not tick:  # a bare stream, old AVI: there is only the frame rate
        return 1 / rate, np.arange(n + 1)
    times = np.sort(np.array(stamps, np.int64))
    steps = np.diff(times)
    last = last or (int(np.median(steps)) if n > 1 else 0) or max(1, round(1 / rate / tick))
    return Fraction(tick), np.append(times, times[-1] + last) - times[0]


def closed_gops(shown, keys):
    if None in shown or len(set(shown)) < len(shown) or not keys or not keys[0]:
        return False
    place = {t: i for i, t in enumerate(sorted(shown))}
    return all(place[t] == i for i, t in enumerate(shown) if keys[i])


def looks_of(frame, head):
    head.size, head.pixels = (frame.height, frame.width), frame.format.name
    head.interlaced = bool(frame.interlaced_frame)
    try:
        m = np.frombuffer(frame.side_data["DISPLAYMATRIX"], np.int32).astype(float)
        head.mirrored = bool(m[0] * m[4] < m[1] * m[3])
    except (KeyError, ValueError):  # none; or a kind that PyAV has no name for (a photo's EXIF)
        pass
    head.turns = round(frame.rotation / 90) % 4
    if head.packets == 1 and not head.damaged:
        head.only = to_rgb(frame, head).copy()  # not a view that keeps the frame


# -----------------------------------------------------------------------------
# reader pyav

def decode_pyav(path, T, pick, size, head):
    """-> (frames [T, H, W, 3], which they are, how many frames decode, how many packets do not)"""
    import av
    with av.open(path, metadata_errors="ignore") as c:
        scan(c, head)
        if head.only is not None:
            return np.stack([resize(head.only, size)] * T), [0] * T, 1, 0
        index = pick(head.times, T, head.tick).tolist()
        frames = sampled(c, head, set(index), size)
    if frames is not None:
        return np.stack([frames[i] for i in index]), index, head.packets, 0
    # something is amiss, or no time stamp can be trusted: decode all, and believe what comes out
    frames, errors = everything(path, head, set(index), size)
    n = len(head.times) - 1
    if n == 0:
        raise ValueError("no frame decodes")
    index = pick(head.times, T, head.tick).tolist()  # once more, inside the range that does decode
    if not frames.keys() >= set(index):
        frames, errors = everything(path, head, set(index), size)
    return np.stack([frames[i] for i in index]), index, n, errors


def sampled(c, head, wanted, size):
    """
    {index: frame} without decoding the others where that can be helped, or None if all have to be.

    Decoding starts at the last keyframe before a wanted frame and stops at the last wanted one of
    its group. H.264 marks frames that no other refers to (half of them, usually): they are skipped
    unless wanted. Both change no bit of what is read.
    """
    if not (head.codec in ("h264", "hevc", "vp8", "vp9", "libdav1d", "av1")
            and head.format.startswith(("mov,", "matroska,")) and head.keys and head.keys[0]
            and None not in head.shown and len(set(head.shown)) == head.packets
            and not head.suspect and head.missing()[1] is None):
        return None
    place = {t: i for i, t in enumerate(head.shown)}      # time stamp -> place in the file
    order = sorted(head.shown)                            # index on screen -> time stamp
    can_seek = head.closed and not head.hidden
    starts = [i for i, key in enumerate(head.keys) if key and (can_seek or i == 0)]
    groups = {}                                           # place of a keyframe -> what is wanted
    for i in wanted:
        start = starts[np.searchsorted(starts, place[order[i]], side="right") - 1]
        groups.setdefault(start, {})[order[i]] = i
    s, frames, shape = c.streams.best("video"), {}, None
    for start, stamps in sorted(groups.items()):
        for f in group(c, s, head, place, start, stamps):
            i = stamps.get(f.pts) if f is not None else None
            if f is None or i in frames:
                return None
            if i is not None:
                frames[i] = resize(to_rgb(f, head), size, shape)
                shape = frames[i].shape[:2]               # a stream may change its size on the way
    return frames if len(frames) == len(wanted) else None


def group(c, s, head, place, start, stamps):
    """Frames from the keyframe at `start` to the last of `stamps`, at least; None on an error."""
    import av
    skips = head.codec == "h264" and not head.interlaced
    end, ctx = max(place[t] for t in stamps), s.codec_context
    begun = False
    try:
        c.seek(head.shown[start] if not head.hidden else min(head.shown[0], 0), stream=s)
        for p in c.demux(s):
            if not p.size:
                break
            at = place[p.pts] if not p.is_discard else -1
            begun = begun or at == start or head.hidden
            if at > start and not begun:
                yield None  # the seek went past it
            if not begun:
                continue
            if skips:
                ctx.skip_frame = "DEFAULT" if p.pts in stamps else "NONREF"
            yield from p.decode()
            if at >= end:
                break
        yield from ctx.decode(None)  # what the decoder still holds back; the next seek wakes it up
    except av.error.EOFError:
        pass
    except av.error.FFmpegError:
        yield None


def everything(path, head, wanted, size):
    """-> ({index: frame}, how many packets do not decode); sets head.times to what does decode."""
    import av
    frames, stamps, errors, shape, last = {}, [], 0, None, 0
    with av.open(path, metadata_errors="ignore") as c:
        s = video_stream(c)
        for p in packets(c, s):
            got = None if p is None else frames_of(p)
            errors += got is None
            for f in got or []:
                if len(stamps) in wanted:
                    frames[len(stamps)] = resize(to_rgb(f, head), size, shape)
                    shape = frames[len(stamps)].shape[:2]
                stamps.append(f.pts)
                last = f.duration
        rate = Fraction(s.average_rate or s.guessed_rate or 25)
        # XviD in AVI: the stamps come out of order, the frames do not; so the times are sorted
        head.tick, head.times = timeline(stamps, last, s.time_base, rate)
    return frames, errors


def to_rgb(frame, head):
    # one thread: waking more of them costs a small frame more than its conversion
    rgb = frame.to_ndarray(format="rgb24", threads=1)  # [H, W, 3]
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
# reader decord

def decord_is_wrong(head):
    """
    None where decord 0.6 hands out the frames that decoding everything does, else why it does not.
    It says nothing itself: of open GOPs and field-coded video it gives other frames than asked, of
    edit lists those that are hidden, of the others here other colours or sizes.
    """
    h, w = head.size
    for wrong, what in (
            (head.codec not in ("h264", "hevc", "vp9"), f"codec {head.codec}"),
            (not head.format.startswith(("mov,", "matroska,")), f"container {head.format}"),
            (head.suspect or head.missing()[1], "a damaged file"),
            (head.hidden, "frames hidden by an edit list"),
            (head.early, "frames before the first keyframe"),
            (not head.closed, "open groups of pictures"),
            (head.pixels not in ("yuv420p", "yuvj420p"), f"pixel format {head.pixels}"),
            (h % 2 or w % 2, f"odd size {w}x{h}"), (head.interlaced, "interlaced video"),
            (head.mirrored, "mirrored video"), (h * w > 4096 * 2304, "more than 4K, in memory")):
        if wrong:
            return f"decord 0.6 is wrong on it ({what}), reader=pyav is not"
    return None


def decode_decord(path, T, pick, size, head):
    import av
    import torch  # noqa: F401  decord has to come after it
    import decord  # only in the process that reads
    with av.open(path, metadata_errors="ignore") as c:
        scan(c, head)
    if decord_is_wrong(head):
        raise ValueError(decord_is_wrong(head))
    decord.logging.set_level(decord.logging.QUIET)
    video = decord.VideoReader(path, ctx=decord.cpu(0), num_threads=1)
    if len(video) != head.packets:
        raise RuntimeError(f"decord counts {len(video)} frames, the file has {head.packets}")
    index, frames = pick(head.times, T, head.tick).tolist(), {}
    for i in sorted(set(index)):
        frame = video[i].asnumpy()
        if frame.shape[2] != 3:  # widths up to 32: rows with their padding
            raise RuntimeError(f"decord returns a frame of shape {frame.shape}, use reader=pyav")
        frames[i] = resize(frame, size)
    return np.stack([frames[i] for i in index]), index, head.packets, 0


# -----------------------------------------------------------------------------
# all of a file: what `data.py check` reports

def examine(path):
    """Decodes every frame. -> {"state": readable | partial | broken, "why", "share", codec, ...}"""
    import av
    row, head = {"state": "readable", "why": "", "share": 1.0}, Head()
    try:
        with said_of(path, head):
            check_file(path)
            with av.open(path, metadata_errors="ignore") as c:
                scan(c, head)
            n, errors = 1, 0
            if head.only is None:
                _, errors = everything(path, head, set(), 0)
                n = len(head.times) - 1
            if n == 0:
                raise ValueError("no frame decodes")
            if max(head.size) > 200 * min(head.size):
                raise ValueError("its frames are too thin")
            row["share"], row["why"] = head.missing(n, errors)
            row["state"] = "partial" if row["why"] else "readable"
            seconds = float(head.times[-1] * head.tick)
            h, w = head.size[::-1] if head.turns % 2 else head.size
            row |= {"frames": n, "seconds": round(seconds, 3), "width": w, "height": h,
                    "fps": round(n / seconds, 3) if seconds else 0.0, "pixels": head.pixels,
                    "variable": bool(np.ptp(np.diff(head.times)) * head.tick > Fraction(1, 100))}
    except BadVideo as e:
        row |= {"state": "broken", "why": reason_of(e, path), "share": 0.0}
    return row | {"codec": head.codec, "container": head.format.partition(",")[0]}


# -----------------------------------------------------------------------------
# a process for what may never come back

AREA = 1 << 30  # bytes


class Process:
    """
    Runs functions of this file in a child process, which the system kills when one takes longer
    than `timeout` seconds: no loop in C, no lost lock can outlive that. A child that dies otherwise
    (a decoder's segmentation fault, too little memory), or has never answered yet, costs one more
    attempt, then BadVideo. One child serves many calls; whoever forks this process (a loader's
    worker) gets a child of its own. Without fork (Windows), or with timeout 0, calls are made right
    here.
    """

    def __init__(self, timeout):
        self.timeout, self.pid, self.owner, self.pipe = timeout, 0, 0, None
        self.inside = not timeout or "fork" not in get_all_start_methods()
        if not self.inside:
            import av  # noqa: F401  once, not in each child

    def call(self, name, path, *args):
        self.ask(name, path, *args)
        return self.answer()

    def ask(self, name, path, *args):
        self.job, self.again = (name, path, *args), True
        if not self.inside:
            self.send()

    def send(self):
        if self.owner != os.getpid():
            self.start()
        self.asked = time.monotonic()
        try:
            self.pipe.send(self.job)
        except OSError:  # it died while it had nothing to do
            self.stop()
            self.start()
            self.pipe.send(self.job)

    def seconds_left(self):
        # the child's own alarm is what ends it; 5 s later even one that ignores that is left
        return max(0.0, self.asked + self.timeout + 5 - time.monotonic())

    def ready(self):
        return self.inside or self.pipe.poll(0) or not self.seconds_left()

    def answer(self):
        if self.inside:
            return globals()[self.job[0]](*self.job[1:])
        try:
            if not self.pipe.poll(self.seconds_left()):
                raise EOFError
            kind, value = self.pipe.recv()
            self.answered += 1
            if kind == "frames":
                shape, *rest = value
                frames = np.frombuffer(self.area, np.uint8, np.prod(shape)).reshape(shape)
                return frames.copy(), *rest  # the area is the next video's
        except (EOFError, OSError):
            return self.died(self.stop())
        except BaseException:  # ctrl-C: nobody may take this answer for that to the next question
            self.stop()
            raise
        if kind == "error":
            raise value
        return value

    def died(self, status):
        late = status in (None, signal.SIGALRM)
        # a lock that another thread held while this process forked is never free in the child: its
        # first job may stand still for no fault of the file
        if self.again and (not late or not self.answered):
            self.again = False
            self.send()
            return self.answer()
        how = signal.strsignal(status) if status else "no signal"
        with said_of(self.job[1], Head()):
            raise ValueError(f"it is not read after video_timeout={self.timeout:g} s" if late else
                             f"its reader died twice ({how})")

    def start(self):
        ours, theirs = Pipe()
        # memory that both see, taken as it is used; larger answers go through the pipe
        self.area = mmap.mmap(-1, AREA, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS
                              | getattr(mmap, "MAP_NORESERVE", 0))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of threads: the child does nothing but decode
            self.pid = os.fork()
        if self.pid == 0:
            ours.close()
            serve(theirs, self.area, self.timeout)
        theirs.close()
        self.pipe, self.owner, self.answered = ours, os.getpid(), 0

    def stop(self):
        """-> the signal that ended the child, 0 if it ended itself, None if this did."""
        self.pipe.close()
        self.owner = 0
        for _ in range(100):  # the pipe breaks a moment before the child can be collected
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
            time.sleep(0.01)
        os.kill(self.pid, signal.SIGKILL)  # and is not waited for: the system may be unable to
        return None

    def __del__(self):
        if self.owner == os.getpid():
            self.pipe.close()
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


def serve(pipe, area, timeout):
    """The child: one job after the other until the other end of the pipe is gone."""
    try:
        gc.freeze()  # what came with the fork is the parent's: not to be searched, not to be closed
        for s in (signal.SIGINT, signal.SIGTERM):  # the parent decides, and takes the pipe along
            signal.signal(s, signal.SIG_IGN)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process, in C code too
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)  # the threads of before are not here any more
        while True:
            name, *args = pipe.recv()
            signal.setitimer(signal.ITIMER_REAL, timeout)
            try:
                value = globals()[name](*args)
                kind = "value"
                if name == "decode" and value[0].nbytes <= AREA:
                    kind, (frames, *rest) = "frames", value
                    np.frombuffer(area, np.uint8, frames.size)[:] = frames.reshape(-1)
                    value = frames.shape, *rest
            except Exception as e:
                kind, value = "error", sendable(e)
            signal.setitimer(signal.ITIMER_REAL, 0)
            pipe.send((kind, value))
    except (EOFError, OSError):
        pass
    finally:
        os._exit(0)


def sendable(e):
    try:
        return pickle.loads(pickle.dumps(e))
    except Exception:  # an exception may hold anything, and pickle may fail in any way: say it
        return RuntimeError(f"{type(e).__name__}: {e}")
