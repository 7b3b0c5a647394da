"""
data.py against files made here with known content, full decodes, hand numbers and invariances.

Video frame i of `ramp` clips is one flat grey whose luma is 16 + 2 * i: reading a frame tells its
index. With the real clips of ../shared/videos, when they are there, mean colours are compared.
"""
import collections
import fractions
import gc
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import av
import numpy as np
import pytest
import torch

import data

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared" / "videos"


# -----------------------------------------------------------------------------
# small files

def encode(path, frames, codec="libx264", pix_fmt="yuv420p", rate=25, options=None):
    """frames: [n, H, W, 3] uint8 RGB, or a list of [H, W] uint8 luma planes (4:2:0, exact grey)"""
    with av.open(str(path), "w") as out:
        s = out.add_stream(codec, rate=fractions.Fraction(rate))
        s.height, s.width = frames[0].shape[:2]
        s.pix_fmt = pix_fmt
        s.options, s.thread_count = options or {}, 1
        for f in frames:
            if f.ndim == 2:
                f = np.concatenate([f, np.full((f.shape[0] // 2, f.shape[1]), 128, np.uint8)])
                f = av.VideoFrame.from_ndarray(f, format="yuv420p")
            else:
                f = av.VideoFrame.from_ndarray(f, format="rgb24")
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
    """All frames that decode, by a loop of its own, not turned."""
    out = []
    with av.open(path) as c:
        c.streams.video[0].thread_count = 2
        for p in c.demux(c.streams.video[0]):
            try:
                out += [f.to_ndarray(format="rgb24") for f in p.decode()]
            except av.error.InvalidDataError:
                pass
    return np.stack(out)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    d = tmp_path_factory.mktemp("videos")
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
    image = picture(1, 60, 90)[:1]
    encode(d / "image.jpg", image, "mjpeg", "yuvj444p")
    encode(d / "image.png", image, "png", "rgb24")

    raw = (d / "ok.mp4").read_bytes()
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
    with av.open(str(d / "audio.mp4"), "w") as out:
        s = out.add_stream("aac", rate=8000, layout="mono")
        sound = av.AudioFrame.from_ndarray(np.zeros((1, 8000), np.float32), "fltp", "mono")
        sound.rate = 8000
        out.mux(s.encode(sound))
        out.mux(s.encode(None))
    return d


def remux(source, target, options=None, start=0, matrix=None):
    """Copies the packets; start: time 0 is at that packet, what comes before it gets hidden."""
    with av.open(str(source)) as a, av.open(str(target), "w", options=options or {}) as b:
        s = b.add_stream_from_template(a.streams.video[0])
        if matrix is not None:
            s.set_display_matrix(matrix)
        packets = [p for p in a.demux(video=0) if p.size]
        step = packets[0].duration
        for p in packets:
            p.pts, p.dts, p.stream = p.pts - start * step, p.dts - start * step, s
            b.mux(p)


def packets_of(path):
    with av.open(str(path)) as c:
        return [bytes(p) for p in c.demux(video=0) if p.size]


def read(path, T=8, **how):
    return data.decode(str(path), T, **how)[0]


# -----------------------------------------------------------------------------
# annotations

def write(path, *rows, bom=b""):
    lines = [r if isinstance(r, str) else json.dumps(r, ensure_ascii=False) for r in rows]
    path.write_bytes(bom + "\n".join(lines).encode() + b"\n")
    return str(path)


def row(id="a", video="a.mp4", captions=("a dog runs",), **more):
    return {"id": id, "video": video, "captions": list(captions), **more}


def test_annotations_are_text_as_written(tmp_path):
    odd = 'he said "hi", twice\nthen\u2028left'
    path = write(tmp_path / "anything.json", row("007", "x/7.mp4", [odd, "b"], extra=[1]), "",
                 "   \r", row("1e5", captions=["b"]), bom=b"\xef\xbb\xbf")
    items = data.load_annotations(path)
    assert [(i.id, i.video, i.captions) for i in items] == [
        ("007", "x/7.mp4", [odd, "b"]), ("1e5", "a.mp4", ["b"])]
    assert [i.fields for i in items] == [{"extra": [1]}, {}]


def test_paragraph_joins_stripped_in_order(tmp_path):
    path = write(tmp_path / "a.jsonl", row(captions=[" one. ", "two.\n", "three."]),
                 row("b", captions=["x", "y"]))
    items = data.load_annotations(path, paragraph=True)
    assert [i.captions for i in items] == [["one. two. three."], ["x y"]]


@pytest.mark.parametrize("bad, says", [
    (row(captions=[]), "non-empty list"),
    (row(captions=["ok", ""]), "is no text"),
    (row(captions=["  \t"]), "is no text"),
    (row(captions=["\u200d\u200b\ufeff"]), "is no text"),
    (row(captions=[3]), "is no text"),
    ({**row(), "captions": "one string"}, "list of strings"),
    ({"id": "a", "video": "a.mp4"}, "captions"),
    ({**row(), "id": 7}, "'id' must be a non-empty string, found 7"),
    ({**row(), "video": None}, "'video' must be"),
    ([row()], "expected an object"),
    ('{"id": "a", ', "no valid JSON"),
    ('{"id": "a", "video": "a.mp4", "captions": ["\\ud800x"]}', "surrogates"),
    ("__import__('os').abort()", "no valid JSON"),
])
def test_bad_annotation_names_file_and_line(tmp_path, bad, says):
    path = write(tmp_path / "a.jsonl", row("first"), "", bad)
    with pytest.raises(ValueError) as e:
        data.load_annotations(path)
    assert f"{path}:3: " in str(e.value) and says in str(e.value) and "\n" not in str(e.value)


def test_duplicate_ids_missing_empty_and_other_encodings(tmp_path):
    with pytest.raises(ValueError, match=r"a.jsonl:3: id 'x' is already used in line 1"):
        data.load_annotations(write(tmp_path / "a.jsonl", row("x"), row("y"), row("x")))
    with pytest.raises(FileNotFoundError, match="not found: write it as the README"):
        data.load_annotations(str(tmp_path / "none.jsonl"))
    with pytest.raises(ValueError, match="every line is blank"):
        data.load_annotations(write(tmp_path / "b.jsonl", "", " "))
    (tmp_path / "c.jsonl").write_bytes(json.dumps(row()).encode() + b"\n" + b'{"id": "caf\xe9"}\n')
    with pytest.raises(ValueError, match="c.jsonl:2: 'utf-8'"):
        data.load_annotations(str(tmp_path / "c.jsonl"))


# -----------------------------------------------------------------------------
# samplers

def test_samplers_by_hand():
    # middles of 4 segments of 10: 1.25, 3.75, 6.25, 8.75
    assert data.uniform(10, 4).tolist() == [1, 3, 6, 8]
    assert data.uniform(3, 8).tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
    assert data.linspace(10, 4).tolist() == [0, 2, 5, 8]  # 0, 2.67, 5.33, 8
    for pick in data.SAMPLERS.values():
        assert pick(1, 16).tolist() == [0] * 16
        for n in (1, 2, 3, 50, 10 ** 6):
            i = pick(n, 16)
            assert len(i) == 16 and 0 <= i[0] and i[-1] < n and (np.diff(i) >= 0).all()


# -----------------------------------------------------------------------------
# frames

@pytest.mark.parametrize("reader", ["auto", "decord", "pyav"])
def test_the_frames_asked_for_are_the_frames_read(files, reader):
    assert indices(read(files / "ok.mp4", 8, reader=reader)) == [6, 18, 31, 43, 56, 68, 81, 93]
    assert indices(read(files / "ok.mp4", 4, reader=reader, sampler="linspace")) == [0, 32, 65, 98]
    assert indices(read(files / "three.mp4", 8, reader=reader)) == [0, 0, 0, 1, 1, 2, 2, 2]
    assert indices(read(files / "one.mp4", 5, reader=reader)) == [0] * 5
    assert indices(read(files / "slow.mp4", 5, reader=reader)) == [1, 3, 5, 7, 9]


READABLE = ["ok.mp4", "pic.mp4", "pic.mkv", "wide.mp4", "odd.mp4", "oddvp9.webm", "hevc.mp4",
            "tenbit.mp4", "xvid.avi", "refresh.mp4", "interlaced.mp4", "av1.mkv", "image.jpg",
            "image.png"]


@pytest.mark.parametrize("name", READABLE)
def test_both_readers_give_the_pixels_of_a_full_decode(files, name):
    everything = full_decode(str(files / name))
    for T in (1, 7, 16):
        want = everything[data.uniform(len(everything), T)]
        for reader in ("auto", "pyav"):
            got = read(files / name, T, reader=reader)
            assert got.dtype == np.uint8 and np.array_equal(got, want), (reader, T)


def test_decord_reads_what_it_can_and_nothing_else(files):
    right = {n: data.decord_is_right(data.scan(str(files / n))) for n in READABLE}
    assert [n for n in READABLE if right[n]] == ["ok.mp4", "pic.mp4", "pic.mkv", "wide.mp4"]
    for name in ("ok.mp4", "pic.mp4", "pic.mkv"):
        path = str(files / name)
        assert np.array_equal(read(path, reader="decord"), read(path, reader="pyav"))


class Fails(types.ModuleType):
    """A decord that cannot read; DECORDError derives from Exception only."""
    logging = types.SimpleNamespace(set_level=lambda level: None, QUIET=0)

    def __init__(self, error):
        super().__init__("decord")
        self.error = error

    def cpu(self, i):
        raise self.error


@pytest.mark.parametrize("fake", [None, Fails(RuntimeError("x")), Fails(IndexError("x")),
                                  Fails(type("DECORDError", (Exception,), {})("x"))])
def test_pyav_reads_when_decord_is_missing_or_fails(files, monkeypatch, fake):
    want = read(files / "pic.mp4")
    monkeypatch.setitem(sys.modules, "decord", fake)
    assert np.array_equal(read(files / "pic.mp4"), want)


def test_a_reader_that_is_not_installed_is_named_at_once(files, monkeypatch):
    monkeypatch.delitem(sys.modules, "decord", raising=False)
    monkeypatch.setattr(data.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install decord"):
        data.Pairs(items_of("ok.mp4"), files, 4, reader="decord", on_bad_video="skip")


def test_turned_and_mirrored_videos_come_upright(files, tmp_path):
    plain = read(files / "pic.mp4", 2)
    # display matrix (a b; c d): pixel (x, y) is shown at (a x + c y, b x + d y)
    for (a, b, c, d), upright in {
            (0, 1, -1, 0): lambda f: np.rot90(f, -1, (1, 2)),  # right goes down: clockwise
            (0, -1, 1, 0): lambda f: np.rot90(f, 1, (1, 2)),
            (-1, 0, 0, -1): lambda f: f[:, ::-1, ::-1],
            (-1, 0, 0, 1): lambda f: f[:, :, ::-1],
            (1, 0, 0, -1): lambda f: f[:, ::-1],
            (0, 1, 1, 0): lambda f: f.transpose(0, 2, 1, 3)}.items():
        one = 1 << 16
        path = tmp_path / f"m{a}{b}{c}{d}.mp4"
        remux(files / "pic.mp4", path,
              matrix=[a * one, b * one, 0, c * one, d * one, 0, 0, 0, 1 << 30])
        for reader in ("auto", "pyav"):
            assert np.array_equal(read(path, 2, reader=reader), upright(plain)), (a, b, c, d)


def test_image_is_a_video_of_one_frame(files):
    frames = read(files / "image.png", 3)
    assert np.array_equal(frames, np.stack([picture(1, 60, 90)[0]] * 3))


def test_hidden_frames_of_a_cut_are_not_counted(files):
    # time 0 was moved to frame 30 without decoding: 70 frames are shown
    assert indices(read(files / "edit.mp4", 7)) == [35, 45, 55, 65, 75, 85, 95]
    assert data.decode(str(files / "edit.mp4"), 7)[1] is None


@pytest.mark.parametrize("name, says", [
    ("zero.mp4", "empty (0 bytes)"), ("text.mp4", "it is no video"),
    ("audio.mp4", "no video stream, only audio"), ("missing.mp4", "no such file"),
    ("no_index.mp4", "cut off before its index")])
@pytest.mark.parametrize("reader", ["auto", "pyav", "decord"])
def test_unreadable_file_is_named_with_its_reason(files, name, says, reader):
    with pytest.raises(ValueError) as e:
        data.read_frames(str(files / name), 4, reader=reader)
    assert str(files / name) in str(e.value) and "\n" not in str(e.value)
    assert reader == "decord" or says in str(e.value)


def test_a_folder_is_told_from_a_missing_file(tmp_path):
    with pytest.raises(data.BadVideo, match="it is a folder, not a file; replace"):
        data.read_frames(str(tmp_path), 4)


@pytest.mark.parametrize("size", [0, 32])
def test_a_video_that_is_too_thin_is_a_bad_one(tmp_path, size):
    thin = encode(tmp_path / "thin.mkv", np.zeros((3, 2, 402, 3), np.uint8), "ffv1", "bgr0")
    encode(tmp_path / "long.mkv", np.zeros((3, 2, 400, 3), np.uint8), "ffv1", "bgr0")
    for reader in ("auto", "pyav"):
        with pytest.raises(data.BadVideo, match="thin.mkv.*a frame of 402x2 is too thin"):
            data.read_frames(thin, 2, reader=reader, size=size)
    pairs = data.Pairs(items_of("thin.mkv", "long.mkv"), tmp_path, 2, size=size,
                       on_bad_video="skip")
    assert pairs[0].id == pairs[1].id and pairs.clips.skipped() == [pairs.clips.items[0].id]


@pytest.mark.parametrize("name", ["truncated.mp4", "stopped.mp4", "corrupt.mp4", "truncated.mkv",
                                  "damaged.mkv"])
def test_partial_file_is_read_where_it_decodes_and_reported(files, name, capfd):
    everything = full_decode(str(files / name))
    assert 30 < len(everything) < 100
    for reader in ("auto", "pyav") if name != "damaged.mkv" else ("pyav",):  # unseen by decord
        frames = data.read_frames(str(files / name), 8, reader=reader)
        assert np.array_equal(frames, everything[data.uniform(len(everything), 8)])
        said = capfd.readouterr().err
        assert said.count(name) == 1 and "partial" in said
        assert name == "truncated.mkv" or f"{len(everything)} of 100" in said


@pytest.mark.parametrize("shape, size, want", [
    ((120, 200), 32, (32, 53)), ((200, 120), 32, (53, 32)), ((24, 18), 48, (64, 48))])
def test_resize_is_antialiased_bicubic_of_the_shorter_side(shape, size, want):
    frame = picture(1, *shape)[0]
    small = data.resize(frame, size)
    x = torch.from_numpy(frame).permute(2, 0, 1)[None].double()
    ref = torch.nn.functional.interpolate(x, want, mode="bicubic", antialias=True)[0]
    ref = ref.permute(1, 2, 0).clamp(0, 255).numpy()
    assert small.shape == (*want, 3) and small.flags.c_contiguous
    assert np.abs(small - ref).max() < 3 and np.abs(small - ref).mean() < 0.5  # rounded twice


def test_resized_frames_are_the_same_from_both_readers(files):
    a, b = (read(files / "pic.mp4", 5, reader=r, size=40) for r in ("decord", "pyav"))
    assert a.shape == (5, 40, 53, 3) and np.array_equal(a, b)  # 162 * 40 / 122 = 53.1


def test_reading_leaves_no_frame_behind(files):
    """PyAV's frames, 3 MB each in full HD, end up in reference cycles when asked for side data."""
    gc.collect()
    gc.disable()
    try:
        for name in ("ok.mp4", "hevc.mp4", "image.png", "truncated.mp4"):
            read(files / name, size=16)
        assert not [o for o in gc.get_objects() if type(o) is av.VideoFrame]
    finally:
        gc.enable()


def test_unknown_names_are_errors(files):
    with pytest.raises(ValueError, match="sampler 'random' is not one of uniform, linspace"):
        data.read_frames(str(files / "ok.mp4"), 4, sampler="random")
    with pytest.raises(ValueError, match="reader 'cv2' is not one of"):
        data.Pairs(items_of("ok.mp4"), files, 4, reader="cv2")


def test_an_8k_clip_takes_less_than_500_mb(tmp_path):
    rng = np.random.default_rng(0)
    base = rng.integers(0, 255, (4320, 7680), dtype=np.uint8) // 8
    encode(tmp_path / "8k.mp4", [base + 10 * i for i in range(5)],
           options={"preset": "ultrafast", "crf": "40"})
    assert not data.decord_is_right(data.scan(str(tmp_path / "8k.mp4")))  # it may need twice that
    code = ("import sys, resource, av, torch, data\n"
            "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024\n"
            "before = peak()\n"
            "for _ in range(3): f = data.read_frames(sys.argv[1], 8, size=224)\n"
            "print(f.shape, peak() - before)")
    out = subprocess.run([sys.executable, "-c", code, str(tmp_path / "8k.mp4")], cwd=ROOT,
                         capture_output=True, text=True, check=True).stdout
    assert out.startswith("(8, 224, 398, 3)") and float(out.split()[-1]) < 500, out


# -----------------------------------------------------------------------------
# datasets and policies

def items_of(*videos):
    return [data.Item(f"id{i}", v, [f"{v} one", f"{v} two"]) for i, v in enumerate(videos)]


def test_pairs_texts_and_videos(files):
    items = items_of("ok.mp4", "three.mp4")
    items[1].captions.append("third")
    pairs = data.Pairs(items, files, 4)
    got = [pairs[i] for i in range(5)]
    assert [(s.id, s.caption, s.index, indices(s.frames)) for s in got] \
        == [("id0", "ok.mp4 one", 0, [12, 37, 62, 87]), ("id0", "ok.mp4 two", 0, [12, 37, 62, 87]),
            ("id1", "three.mp4 one", 1, [0, 1, 1, 2]), ("id1", "three.mp4 two", 1, [0, 1, 1, 2]),
            ("id1", "third", 1, [0, 1, 1, 2])]
    texts = data.Texts(items)
    assert len(texts) == 5 and texts.owner == [0, 0, 1, 1, 1]
    assert texts[4] == data.Sample("id1", "third", None, 1)
    videos = data.Videos(items, files, 4)
    assert len(videos) == 2 and videos[1].caption is None and videos[1].index == 1
    assert indices(videos[1].frames) == [0, 1, 1, 2]


def list_of(samples):
    return samples


@pytest.mark.parametrize("workers", [0, 2])
def test_skip_replaces_counts_and_names_each_bad_file_once(files, workers, capfd):
    items = items_of("ok.mp4", "zero.mp4", "text.mp4", "three.mp4", "truncated.mp4", "audio.mp4")
    pairs = data.Pairs(items, files, 4, on_bad_video="skip")
    batches = [[i, (i + 1) % 12] for i in range(12)] * 2
    got = list(data.make_loader(pairs, batches, list_of, workers))
    # pairs 2-5 belong to unreadable videos: 6 and 7 are of the next; 10 and 11 go round to 0 and 1
    stands_in = [0, 1, 6, 7, 6, 7, 6, 7, 8, 9, 0, 1]
    for batch, index in zip(got, batches):
        for sample, i in zip(batch, index):
            assert sample.caption == pairs[stands_in[i]].caption and sample.frames.max() > 0
    said = capfd.readouterr().err
    for name in ("zero.mp4", "text.mp4", "audio.mp4", "truncated.mp4"):
        assert sum(name in line for line in said.splitlines()) == 1, said
    assert pairs.clips.skipped() == ["id1", "id2", "id5"]


@pytest.mark.parametrize("workers", [0, 2])
def test_raise_is_one_line_that_names_the_file(files, workers):
    pairs = data.Pairs(items_of("ok.mp4", "text.mp4"), files, 4)
    batches = iter(data.make_loader(pairs, [[0, 1], [2, 3]], list_of, workers))
    assert next(batches)[1].caption == "ok.mp4 two"
    try:
        said = next(batches)
    except ValueError as e:
        said = str(e)
    if workers:
        batches._shutdown_workers()  # left to the garbage collector it takes torch 10 s
    assert said.startswith("cannot read") and "text.mp4" in said and "\n" not in said


def test_a_cache_on_a_full_disk_is_one_line_and_leaves_no_half_file(files, tmp_path, monkeypatch):
    def full(f, frames):
        f.write(b"half")
        raise OSError("512 requested and 0 written")  # numpy's, without an errno

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(OSError, match="can't write into frame_cache .*: 512 requested and 0 writ"):
        data.Videos(items_of("ok.mp4"), files, 4, frame_cache=str(tmp_path))[0]
    assert not os.listdir(tmp_path)


def test_evaluation_marks_what_is_missing(files, capfd):
    items = items_of("ok.mp4", "zero.mp4", "gone.mp4")
    videos = data.Videos(items, files, 4, on_bad_video="skip")
    samples = [videos[i] for i in range(3)]
    assert [s.frames is None for s in samples] == [False, True, True]
    assert samples[0].error is None and "empty" in samples[1].error
    assert "no such file" in samples[2].error
    with pytest.raises(ValueError, match="gone.mp4"):
        data.Videos(items, files, 4)[2]


def test_nothing_readable_is_an_error_under_skip_too(files):
    with pytest.raises(ValueError, match="none of the 2 videos can be read"):
        data.Pairs(items_of("zero.mp4", "gone.mp4"), files, 4, on_bad_video="skip")[1]
    with pytest.raises(FileNotFoundError, match="video_root"):
        data.Pairs(items_of("ok.mp4"), files / "nowhere", 4, on_bad_video="skip")
    with pytest.raises(ValueError, match="on_bad_video 'zeros'"):
        data.Videos(items_of("ok.mp4"), files, 4, on_bad_video="zeros")


def test_frame_cache_is_used_renewed_and_repaired(files, tmp_path, monkeypatch):
    video, cache = tmp_path / "v.mp4", tmp_path / "cache" / "deep"
    video.write_bytes((files / "ok.mp4").read_bytes())
    count = collections.Counter()
    real = data.decode

    def counting(path, *how):
        count["decoded"] += 1
        return real(path, *how)

    monkeypatch.setattr(data, "decode", counting)

    def frames(**how):
        how = {"num_frames": 4, "size": 24, **how}
        return data.Videos(items_of("v.mp4"), tmp_path, frame_cache=str(cache), **how)[0].frames

    want = frames()
    assert np.array_equal(frames(), want) and count["decoded"] == 1
    file, = cache.iterdir()
    for broken in (file.read_bytes()[:-100], b"", b"junk"):
        file.write_bytes(broken)
        assert np.array_equal(frames(), want)
    assert count["decoded"] == 4 and np.array_equal(frames(), want) and count["decoded"] == 4
    frames(num_frames=5), frames(size=0), frames(sampler="linspace")
    assert count["decoded"] == 7 and len(list(cache.iterdir())) == 4
    os.utime(video, ns=(1, 1))
    frames()
    assert count["decoded"] == 8
    video.write_bytes((files / "truncated.mp4").read_bytes())  # partial: named anew in every run
    frames(), frames()
    assert count["decoded"] == 10


# -----------------------------------------------------------------------------
# order and loader

def seen(steps, start=0, world=1, n=27, batch=4, seed=3):
    """Global batches of `steps` steps from global step `start`, over epochs, ranks put together."""
    per_epoch, out = n // batch, []
    for step in range(start, start + steps):
        ranks = [next(iter(data.StepSampler(n, batch, seed, step // per_epoch, step % per_epoch,
                                            r, world))) for r in range(world)]
        assert all(len(r) == batch // world for r in ranks)
        out.append(sum(ranks, []))
    return out


def test_order_is_a_function_of_seed_epoch_step():
    whole = [b for e in range(2) for b in data.StepSampler(27, 4, seed=3, epoch=e)]
    assert len(whole) == 12 and len(data.StepSampler(27, 4)) == 6
    for world in (1, 2):
        assert seen(6, world=world) == whole[:6]
        assert seen(3, world=world) + seen(3, 3, world=world) == whole[:6]
        assert seen(12, world=world) == whole
    first, second = (sum(whole[k:k + 6], []) for k in (0, 6))
    assert len(set(first)) == 24 and first != second and set(first) <= set(range(27))
    assert first != sum(data.StepSampler(27, 4, seed=4), [])
    resumed = data.StepSampler(27, 4, seed=3, epoch=1, start_step=4)
    assert list(resumed) == whole[10:] and len(resumed) == 2


def test_batches_that_cannot_train_are_refused():
    with pytest.raises(ValueError, match="at least 2"):
        data.StepSampler(10, 1)
    with pytest.raises(ValueError, match="5 training pairs do not fill one global batch of 8"):
        data.StepSampler(5, 8)
    with pytest.raises(ValueError, match="not a multiple of the 3 processes"):
        data.StepSampler(10, 4, world=3)


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_keeps_the_order_and_the_global_random_state(workers):
    texts = data.Texts(items_of(*"abcdefgh"))
    sampler = data.StepSampler(16, 4, seed=1)
    state = torch.get_rng_state()
    got = list(data.make_loader(texts, sampler, list_of, workers))
    want = [[texts.captions[i] for i in batch] for batch in sampler]
    assert [[s.caption for s in batch] for batch in got] == want
    assert torch.equal(torch.get_rng_state(), state)


# -----------------------------------------------------------------------------
# real clips

@pytest.mark.skipif(not SHARED.is_dir(), reason="../shared/videos is not here")
@pytest.mark.parametrize("reader", ["auto", "pyav"])
def test_real_clips_agree_with_their_full_decode(reader, monkeypatch):
    manifest = json.loads((SHARED / "manifest.json").read_text())
    assert len(manifest) == 19
    for name, facts in manifest.items():
        index = np.array(facts["uniform8"]["index"])
        monkeypatch.setitem(data.SAMPLERS, "listed", lambda n, T: np.minimum(index, n - 1))
        frames, partial = data.decode(str(SHARED / name), 8, "listed", reader)
        assert frames.shape[1:3] == tuple(facts["size"][::-1]), name
        assert np.abs(frames.mean((1, 2)) - facts["uniform8"]["mean_rgb"]).max() < 0.05, name
        assert (partial is not None) == (facts["decode_errors"] > 0), name
