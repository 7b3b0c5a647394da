"""
Long videos: read once, from one end to the other, for the windows of a few seconds in them; and
pieces of them written as clips. search.py's use of PyAV is all here.

    path --timeline--> the time of every frame, from the packets' headers
         --pieces----> (start, end, frames uint8 [T, H, W, 3]) in order of time, the whole last

A frame is resized as it is decoded and dropped when no window needs it any more: in memory are the
frames of two windows and of the whole, however long the video. Times are seconds from its first
frame. A window's T frames are what is on screen in the middle of T equal parts of it.
"""
import os
from fractions import Fraction

import numpy as np

import video
from video import SAMPLERS, BadVideo, Head, frames_of, packets, read_frames, resize, to_rgb


def clock(t):
    """Seconds as people write them."""
    tenths = round(10 * t)
    return f"{tenths // 600}:{tenths % 600 / 10:04.1f}"


def timeline(path):
    """-> video.Head with the times of the frames that decode, from the packets' headers; where
    these can't be trusted, all is decoded once."""
    import av
    head = Head()
    with video.said_of(path, head):
        video.check_file(path)
        with av.open(path, metadata_errors="ignore") as c:
            video.scan(c, head)
        if head.suspect or head.early or head.missing()[1] or None in head.shown \
                or len(set(head.shown)) < head.packets:
            video.everything(path, head, set(), 0)
    return head


def seconds_of(head):
    """Times of the frames, and where the last one ends [n + 1], in seconds."""
    return head.times * float(head.tick)


def windows(end, seconds):
    """Windows of `seconds`, half of one apart, and one more that ends with the video. One that is
    no longer than a window has none: it is its own."""
    if not seconds or end <= seconds + 1e-3:
        return []
    step = seconds / 2
    n = int(np.ceil((end - seconds) / step - 1e-3))
    return [(i * step, i * step + seconds) for i in range(n)] + [(end - seconds, end)]


def pieces(path, T, sampler="uniform", size=0, seconds=0.0, reader="pyav", min_decoded=0.9):
    """
    Yields (start, end, frames) of each window of `seconds`, then (None, end, frames) of the whole
    video. Raises BadVideo as read_frames does. The whole has the frames that read_frames gives.
    """
    how = dict(sampler=sampler, reader=reader, size=size, min_decoded=min_decoded)
    head = timeline(path)
    end = length(path, head)
    plan = windows(end, seconds)
    if not plan or head.missing()[1]:  # damaged: it may be too little, and that is said first
        whole = read_frames(path, T, **how)
    if not plan:
        yield None, end, whole
        return
    times = seconds_of(head)[:-1]
    plan = [(start, stop, frames_at(times, start + (np.arange(T) + 0.5) / T * (stop - start)))
            for start, stop in plan]
    index, kept, done = SAMPLERS[sampler](head.times, T, head.tick), {}, 0
    needed = set(np.concatenate([index, *(i for *_, i in plan)]).tolist())
    for i, frame in decoded(path, needed, size, head):
        kept[i] = frame
        while done < len(plan) and plan[done][2][-1] <= i:
            yield *plan[done][:2], np.stack([kept[j] for j in plan[done][2].tolist()])
            done += 1
        low = plan[done][2][0] if done < len(plan) else len(times)
        kept = {j: f for j, f in kept.items() if j >= low or j in index or j == i}
    if done < len(plan) or not kept.keys() >= set(index.tolist()):
        raise BadVideo(f"cannot read {path}: it changed while it was read")
    yield None, end, np.stack([kept[j] for j in index.tolist()])


def length(path, head=None):
    """In seconds; 0 of a file that can't be read."""
    try:
        times = seconds_of(head or timeline(path))
    except BadVideo:
        return 0.0
    return float(times[-1]) if len(times) > 1 else 0.0


def frames_at(times, wanted):
    """Index of the frame that is on screen at each of the wanted times."""
    return np.clip(np.searchsorted(times, wanted + 1e-6, "right") - 1, 0, len(times) - 1)


def decoded(path, needed, size, head):
    """Yields (index, frame [H, W, 3]) of the frames in `needed`, in order; one pass."""
    import av
    i, shape = 0, None
    with av.open(path, metadata_errors="ignore") as c:
        for p in packets(c, video.video_stream(c)):
            for f in (frames_of(p) if p is not None else None) or []:
                if i in needed:
                    frame = resize(to_rgb(f, head), size, shape)
                    shape = frame.shape[:2]  # a stream may change its size on the way
                    yield i, frame
                i += 1


def upright(frame):
    """A frame's own picture [H, W, 3], turned as its file says."""
    head = Head()
    video.looks_of(frame, head)
    return to_rgb(frame, head)


def cut(path, start, end, out):
    """
    The frames of `path` from start to before end, with the sound between, as a new H.264 file.
    Encoded again: a copied stream could only begin at a keyframe.
    """
    import av
    temporary = f"{out}.{os.getpid()}.tmp"
    try:
        with av.open(path, metadata_errors="ignore") as c, \
                av.open(temporary, "w", format="mp4") as o:
            source = video.video_stream(c)
            rate = source.average_rate or Fraction(25)
            new, base, n = o.add_stream("libx264", rate=rate), Fraction(1, 90000), 0
            new.pix_fmt, new.codec_context.time_base = "yuv420p", base
            new.options = {"crf": "18", "preset": "veryfast"}
            sound, add = sound_track(c, o)
            zero = (source.start_time or 0) * source.time_base
            if start > 1:
                c.seek(int((float(zero) + start - 1) * av.time_base))  # the keyframe before
            for frame in c.decode(*[s for s in (source, sound) if s is not None]):
                t = None if frame.time is None else frame.time - float(zero)
                if t is None or t < start - 1e-4:
                    continue
                if isinstance(frame, av.AudioFrame):
                    if t < end:
                        add(frame)
                    continue
                if t >= end - 1e-4:  # sound is at most a little behind
                    break
                image = upright(frame)
                h, w = (x - x % 2 for x in image.shape[:2])  # yuv420p is of even size
                if not n:
                    new.width, new.height = w, h
                f = av.VideoFrame.from_ndarray(np.ascontiguousarray(image[:h, :w]), format="rgb24")
                f.pts, f.time_base = round((t - start) / base), base
                o.mux(new.encode(f))
                n += 1
            if not n:
                raise ValueError(f"{path} has no frame between {start:.2f} s and {end:.2f} s")
            o.mux(new.encode())
            add(None)
        os.replace(temporary, out)
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)


def sound_track(c, o):
    """The stream to read sound from, and a function that adds a frame of it to `o`."""
    import av
    if not c.streams.audio or c.streams.audio[0].codec_context is None:
        return None, lambda frame: None
    source = c.streams.audio[0]
    new = o.add_stream("aac", rate=source.rate or 44100)
    fit = av.AudioResampler(format="fltp", layout="stereo", rate=source.rate or 44100)

    def add(frame):
        if frame is not None:
            frame.pts = None  # counted anew from the first one
        for part in fit.resample(frame):
            o.mux(new.encode(part))
        if frame is None:
            o.mux(new.encode())
    return source, add


def stills(path, times, size=160):
    """JPEG files, as bytes, of what is on screen at these times; [] if it can't be read."""
    import io

    import av
    from PIL import Image
    out = []
    try:
        with av.open(path, metadata_errors="ignore") as c:
            s = video.video_stream(c)
            zero = float((s.start_time or 0) * s.time_base)
            for t in times:
                if t > 1:
                    c.seek(int((zero + t) * av.time_base))  # to the keyframe before
                last = None
                for last in c.decode(s):
                    if last.time is None or last.time - zero >= t:
                        break
                if last is None:
                    break
                file = io.BytesIO()
                Image.fromarray(resize(upright(last), size)).save(file, "JPEG", quality=80)
                out.append(file.getvalue())
    except Exception:  # a page without a picture is better than none
        pass
    return out
