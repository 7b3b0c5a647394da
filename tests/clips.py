"""
Small video files with known content, made with PyAV: what tests/test_video.py and others read.

Frame i of a `ramp` is one flat grey whose luma is 16 + 2 * i: reading it tells its index.
"""
import fractions

import av
import numpy as np


def encode(path, frames, codec="libx264", pix_fmt="yuv420p", rate=25, options=None, stamps=None,
           **looks):
    """frames: [n, H, W, 3] uint8 RGB, or a list of [H, W] uint8 luma planes (4:2:0, exact grey);
    stamps: when each is shown, in milliseconds; looks: colorspace, sample_aspect_ratio, ..."""
    with av.open(str(path), "w") as out:
        s = out.add_stream(codec, rate=fractions.Fraction(rate))
        s.height, s.width = frames[0].shape[:2]
        s.pix_fmt = pix_fmt
        s.options, s.thread_count = options or {}, 1
        if stamps is not None:
            s.codec_context.time_base = fractions.Fraction(1, 1000)
        for name, value in looks.items():
            setattr(s.codec_context, name, value)
        for i, f in enumerate(frames):
            if f.ndim == 2:
                f = np.concatenate([f, np.full((f.shape[0] // 2, f.shape[1]), 128, np.uint8)])
                f = av.VideoFrame.from_ndarray(f, format="yuv420p")
            else:
                f = av.VideoFrame.from_ndarray(f, format="rgb24")
            if stamps is not None:
                f.pts, f.time_base = stamps[i], fractions.Fraction(1, 1000)
            out.mux(s.encode(f))
        out.mux(s.encode(None))
    return str(path)


def ramp(n, h=48, w=64):
    return [np.full((h, w), 16 + 2 * i, np.uint8) for i in range(n)]


def picture(n, h, w, seed=0):
    """A moving gradient with noise: no two frames or corners alike."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:h, :w]
    base = np.stack([255 * x / w, 255 * y / h, 128 + 0 * x], -1)
    out = [np.roll(base, 3 * i, 1) * (0.5 + 0.5 * i / n) + rng.integers(-20, 21, (h, w, 1))
           for i in range(n)]
    return np.clip(out, 0, 255).astype(np.uint8)


def indices(frames):
    """Which frames of a ramp these are: grey = (luma - 16) * 255 / 219."""
    return np.round(frames.mean((1, 2, 3)) * 219 / 255 / 2).astype(int).tolist()


def full_decode(path):
    """-> (all frames that decode, not turned; their times [n + 1] in seconds), by its own loop"""
    out, times = [], []
    with av.open(str(path)) as c:
        s = c.streams.video[0]
        s.thread_count = 2
        for p in c.demux(s):
            try:
                for f in p.decode():
                    out.append(f.to_ndarray(format="rgb24"))
                    times.append((f.pts, f.pts + f.duration) if f.pts is not None else None)
            except av.error.InvalidDataError:
                pass
        if None in times:  # a picture
            return np.stack(out), [fractions.Fraction(i) for i in range(len(out) + 1)]
        starts = sorted(t for t, _ in times)
        ends = starts + [max(t for _, t in times)]
        return np.stack(out), [(t - starts[0]) * s.time_base for t in ends]


def middles(times, T):
    """Which frame is shown in the middle of each of T equal parts: a search by hand."""
    moments = [(2 * i + 1) * times[-1] / (2 * T) for i in range(T)]
    return [max(k for k, t in enumerate(times[:-1]) if t <= m) for m in moments]


def make_files(d):
    """One file of each kind, good and bad, in the folder d."""
    x264 = {"crf": "12", "g": "25"}
    encode(d / "ok.mp4", ramp(100), options=x264)
    encode(d / "one.mp4", ramp(1))
    encode(d / "three.mp4", ramp(3), options=x264)
    encode(d / "slow.mp4", ramp(10), rate="1/4", options=x264)
    encode(d / "pic.mp4", picture(60, 122, 162), options={"g": "20", "bf": "2"})
    encode(d / "pic.mkv", picture(60, 120, 200), options={"g": "20", "bf": "2"})
    encode(d / "wide.mp4", picture(10, 64, 24))  # decord hands out rows with their padding
    encode(d / "odd.mp4", picture(20, 121, 161), pix_fmt="yuv444p")
    encode(d / "oddvp9.webm", picture(8, 81, 121), "libvpx-vp9",
           options={"deadline": "realtime", "cpu-used": "8"})
    encode(d / "hevc.mp4", picture(30, 120, 160), "libx265",
           options={"x265-params": "log-level=error:keyint=10:open-gop=1"})
    encode(d / "tenbit.mp4", picture(20, 120, 160), pix_fmt="yuv420p10le")
    encode(d / "xvid.avi", picture(50, 120, 160), "mpeg4", options={"g": "12", "bf": "2"})
    encode(d / "refresh.mp4", picture(60, 120, 160),
           options={"x264-params": "intra-refresh=1:keyint=20:bframes=3"})
    encode(d / "interlaced.mp4", picture(30, 128, 160), options={"x264-params": "interlaced=1"})
    encode(d / "av1.mkv", picture(10, 128, 160), "libsvtav1", options={"preset": "12"})
    # 20 frames of 20 ms, 5 of 400 ms: by index the middle is frame 12, in time frame 21
    encode(d / "vfr.mp4", picture(25, 64, 80), options={"bf": "2"},
           stamps=[20 * i for i in range(20)] + [400 * i for i in range(1, 6)])
    encode(d / "late.mkv", picture(20, 64, 80), stamps=[5000 + 40 * i for i in range(20)])
    encode(d / "vp8.webm", picture(30, 64, 80), "libvpx", options={
        "deadline": "realtime", "auto-alt-ref": "1", "lag-in-frames": "10", "g": "12"})
    encode(d / "mpeg2.mp4", picture(20, 81, 121), "mpeg2video", options={"bf": "2"})
    encode(d / "alpha.webm", picture(8, 64, 80), "libvpx-vp9", "yuva420p",
           options={"deadline": "realtime", "cpu-used": "8", "auto-alt-ref": "0"})
    encode(d / "gray.mkv", picture(8, 64, 80), "ffv1", "gray")
    encode(d / "wide_pixels.mp4", picture(8, 64, 80), sample_aspect_ratio=fractions.Fraction(4, 3))
    encode(d / "bt709.mp4", picture(8, 64, 80), colorspace=1, color_range=1)
    encode(d / "full_range.mp4", picture(8, 64, 80), pix_fmt="yuvj420p", color_range=2)
    encode(d / "thin.mp4", picture(3, 1200, 8))  # 8 wide, 1200 high: decord fails
    encode(d / "raw.h264", picture(12, 64, 80), options={"bf": "0"})  # has no time stamps
    image = picture(1, 60, 90)[:1]
    encode(d / "image.jpg", image, "mjpeg", "yuvj444p")
    encode(d / "image.png", image, "png", "rgb24")

    raw = (d / "ok.mp4").read_bytes()
    (d / "picture.mp4").write_bytes((d / "image.jpg").read_bytes())
    (d / "ok.avi").write_bytes(raw)  # the ending does not matter
    (d / "zero.mp4").write_bytes(b"")
    (d / "text.mp4").write_text("hello\n")
    (d / "no_index.mp4").write_bytes(raw[:len(raw) * 6 // 10])  # the index is at the end
    encode(d / "fast.mp4", picture(100, 96, 128), options={"g": "10"})
    remux(d / "fast.mp4", d / "front.mp4", {"movflags": "faststart"})
    raw = bytearray((d / "front.mp4").read_bytes())
    (d / "truncated.mp4").write_bytes(raw[:len(raw) * 6 // 10])
    (d / "stopped.mp4").write_bytes(raw[:raw.find(packets_of(d / "front.mp4")[60])])  # 60 whole
    a, b = len(raw) // 2, len(raw) * 7 // 10
    raw[a:b] = np.random.default_rng(0).integers(0, 256, b - a, dtype=np.uint8).tobytes()
    (d / "corrupt.mp4").write_bytes(raw)
    remux(d / "fast.mp4", d / "whole.mkv")
    raw = (d / "whole.mkv").read_bytes()
    (d / "truncated.mkv").write_bytes(raw[:len(raw) // 2])
    raw, packet = (d / "whole.mkv").read_bytes(), packets_of(d / "whole.mkv")[53]
    (d / "damaged.mkv").write_bytes(raw.replace(packet, b"\xff" * 9 + packet[9:]))
    remux(d / "ok.mp4", d / "edit.mp4", start=30)
    remux(d / "fast.mp4", d / "late_key.mp4", skip=13)
    with av.open(str(d / "audio.mp4"), "w") as out:
        s = out.add_stream("aac", rate=8000, layout="mono")
        sound = av.AudioFrame.from_ndarray(np.zeros((1, 8000), np.float32), "fltp", "mono")
        sound.rate = 8000
        out.mux(s.encode(sound))
        out.mux(s.encode(None))
    return d


def remux(source, target, options=None, start=0, matrix=None, skip=0):
    """Copies the packets; start: time 0 is at that packet, what comes before it gets hidden;
    skip: leaves out so many."""
    with av.open(str(source)) as a, av.open(str(target), "w", options=options or {}) as b:
        s = b.add_stream_from_template(a.streams.video[0])
        if matrix is not None:
            s.set_display_matrix(matrix)
        packets = [p for p in a.demux(video=0) if p.size]
        step = packets[0].duration
        for p in packets[skip:]:
            p.pts, p.dts, p.stream = p.pts - start * step, p.dts - start * step, s
            b.mux(p)


def packets_of(path):
    with av.open(str(path)) as c:
        return [bytes(p) for p in c.demux(video=0) if p.size]
