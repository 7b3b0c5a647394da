"""
Long videos: read once, from one end to the other, for the windows of a few seconds in them; and
pieces of them written as clips. search.py's use of PyAV is all here.

    path --timeline--> the time of every frame (packet headers only)
         --plan------> which frames each window needs, which the whole
         --pieces----> (start, end, frames uint8 [T, H, W, 3]) in order of time, the whole last

A frame is resized as it is decoded and dropped when no window needs it any more: in memory are the
frames of two windows and of the whole, however long the video. Times are seconds from its first
frame. A window's T frames are what is on screen in the middle of T equal parts of it.
"""
import os
from fractions import Fraction

import numpy as np

from data import (SAMPLERS, frames_of, orientation, packets, read_frames, resize, to_rgb,
                  video_stream)


def clock(t):
    """Seconds as people write them."""
    tenths = round(10 * t)
    return f"{tenths // 600}:{tenths % 600 / 10:04.1f}"


def timeline(path):
    """-> times of the frames [n] in order, and where the last one ends. Nothing is decoded."""
    import av
    with av.open(path, metadata_errors="ignore") as c:
        s = video_stream(c)
        shown = [p for p in packets(c, s) if p is not None and p.size and not p.is_discard]
        rate = float(s.average_rate or s.guessed_rate or 25)
        pts = [p.dts if p.pts is None else p.pts for p in shown]
        if None in pts or len(set(pts)) < len(pts):  # raw streams: only the rate is known
            times = np.arange(len(shown)) / rate
        else:
            times = np.sort(np.array([float(t * s.time_base) for t in pts]))
        if not len(times):
            raise ValueError("it has no frames")
        times = times - times[0]
        gap = float(np.median(np.diff(times))) if len(times) > 1 else 1 / rate
    return times, float(times[-1]) + gap


def windows(end, seconds):
    """Windows of `seconds`, half of one apart, and one more that ends with the video. One that is
    no longer than a window has none: it is its own."""
    if not seconds or end <= seconds + 1e-3:
        return []
    step = seconds / 2
    n = int(np.ceil((end - seconds) / step - 1e-3))
    return [(i * step, i * step + seconds) for i in range(n)] + [(end - seconds, end)]


def pieces(path, T, sampler="uniform", size=0, seconds=0.0):
    """
    Yields (start, end, frames) of each window of `seconds`, then (None, end, frames) of the whole
    video. Raises BadVideo as read_frames does. The whole has the frames that read_frames gives.
    """
    if not seconds:
        frames = read_frames(path, T, sampler, size=size)
        yield None, length(path), frames
        return
    try:
        times, end = timeline(path)
    except Exception:  # whatever is wrong with the file, read_frames has the sentence for it
        yield None, 0.0, read_frames(path, T, sampler, size=size)
        return
    plan = [(start, stop, frames_at(times, start + (np.arange(T) + 0.5) / T * (stop - start)))
            for start, stop in windows(end, seconds)]
    whole = SAMPLERS[sampler](len(times), T)
    kept, done, damaged = {}, 0, True
    if plan:
        needed = set(np.concatenate([whole, *(index for *_, index in plan)]).tolist())
        try:
            for i, frame in decoded(path, needed, size):
                kept[i] = frame
                while done < len(plan) and plan[done][2][-1] <= i:
                    yield *plan[done][:2], at(kept, plan[done][2])
                    done += 1
                low = plan[done][2][0] if done < len(plan) else len(times)
                kept = {j: f for j, f in kept.items() if j >= low or j in whole or j == i}
            damaged = any(j not in kept for j in whole)
        except Exception:  # damaged on the way: what was read before stands
            pass
    yield None, end, (read_frames(path, T, sampler, size=size) if damaged else
                     np.stack([kept[j] for j in whole.tolist()]))


def length(path):
    try:
        return timeline(path)[1]
    except Exception:  # it was read, so it is no bad file: only its length is unknown
        return 0.0


def frames_at(times, wanted):
    """Index of the frame that is on screen at each of the wanted times."""
    return np.clip(np.searchsorted(times, wanted + 1e-6, "right") - 1, 0, len(times) - 1)


def at(kept, index):
    """[T, H, W, 3] of the frames in `index`; a lost one is replaced by the one before it."""
    have = sorted(kept)
    return np.stack([kept[have[max(np.searchsorted(have, i, "right") - 1, 0)]]
                     for i in index.tolist()])


def decoded(path, needed, size):
    """Yields (index, frame [H, W, 3]) of the frames in `needed`, in order; one pass."""
    import av
    i, shape = 0, None
    with av.open(path, metadata_errors="ignore") as c:
        for p in packets(c, video_stream(c)):
            for f in (frames_of(p) if p is not None else None) or []:
                if i in needed:
                    frame = resize(upright(f), size, shape)
                    shape = frame.shape[:2]  # a stream may change its size on the way
                    yield i, frame
                i += 1


def upright(frame):
    turns, mirrored = orientation(frame)

    class Turn:  # what to_rgb reads of a file's head
        pass
    Turn.turns, Turn.mirrored = turns, mirrored
    return to_rgb(frame, Turn)


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
            video = video_stream(c)
            rate = video.average_rate or Fraction(25)
            new, base, n = o.add_stream("libx264", rate=rate), Fraction(1, 90000), 0
            new.pix_fmt, new.codec_context.time_base = "yuv420p", base
            new.options = {"crf": "18", "preset": "veryfast"}
            sound, add = sound_track(c, o)
            zero = (video.start_time or 0) * video.time_base
            if start > 1:
                c.seek(int((float(zero) + start - 1) * av.time_base))  # the keyframe before
            for frame in c.decode(*[s for s in (video, sound) if s is not None]):
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
            s = video_stream(c)
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
