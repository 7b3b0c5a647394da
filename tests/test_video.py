"""
video.py against files made here with known content, full decodes, hand numbers and invariances;
with the real clips of ../shared/videos, when they are there, mean colours are compared.
"""
import faulthandler
import gc
import json
import os
import signal
import subprocess
import sys
import time
import types
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from clips import encode, full_decode, indices, middles, picture, ramp, remux

import video

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared" / "videos"


# -----------------------------------------------------------------------------
# samplers

def even(n):
    return np.arange(n + 1)


def test_samplers_by_hand():
    s = Fraction(1)
    # middles of 4 segments of 10 s: 1.25, 3.75, 6.25, 8.75
    assert video.uniform(even(10), 4, s).tolist() == [1, 3, 6, 8]
    assert video.uniform(even(3), 8, s).tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
    assert video.linspace(even(10), 4, s).tolist() == [0, 2, 5, 8]  # 0, 2.67, 5.33, 8
    # 2 frames of 1 s, 1 of 6 s: the middles 1, 3, 5, 7 are its own, but for the first
    assert video.uniform(np.array([0, 1, 2, 8]), 4, s).tolist() == [1, 2, 2, 2]
    # 40 frames of 1 s, the first 30 s: 5, 15, 25; linspace 0, 14, 28
    assert video.first30(even(40), 3, s).tolist() == [5, 15, 25]
    assert video.linspace30(even(40), 3, s).tolist() == [0, 14, 28]
    assert video.first30(even(4), 2, s).tolist() == video.uniform(even(4), 2, s).tolist()
    # 25 fps, 2 s: moments 0, 1/3, .. 5/3 are frames 0, 8, 16, 25, 33, 41; of 6, linspace(0, 5, 4)
    # takes 0, 1, 3, 5
    assert video.fps3(even(50), 6, Fraction(1, 25)).tolist() == [0, 8, 16, 25, 33, 41]
    assert video.fps3(even(50), 4, Fraction(1, 25)).tolist() == [0, 8, 25, 41]
    assert video.fps3(even(25), 12, Fraction(1, 25)).tolist() == [0] * 6 + [8] * 5 + [16]


@pytest.mark.parametrize("name", video.SAMPLERS)
def test_samplers_stay_inside_and_in_order(name):
    pick, rng = video.SAMPLERS[name], np.random.default_rng(0)
    assert pick(even(1), 16, Fraction(1, 25)).tolist() == [0] * 16
    for n in (1, 2, 3, 50, 100_000):
        steps = rng.integers(1, 3000, n)
        for times in (even(n), even(n) * 1001, np.append(0, np.cumsum(steps))):
            for tick in (Fraction(1, 25), Fraction(1, 90_000), Fraction(4)):
                i = pick(times, 16, tick)
                assert len(i) == 16 and 0 <= i[0] and i[-1] < n and (np.diff(i) >= 0).all()


def test_at_a_constant_rate_samplers_are_the_papers_formulas_by_index():
    for n in range(1, 700):
        for T in (1, 8, 12, 16):
            assert video.uniform(even(n) * 512, T, 1).tolist() \
                == ((2 * np.arange(T) + 1) * n // (2 * T)).tolist()
            # numpy's own is short of a whole number by rounding now and then
            by_index = np.floor(np.linspace(0, max(n - 2, 0), T) + 1e-9)
            assert video.linspace(even(n) * 512, T, 1).tolist() == by_index.tolist()


# -----------------------------------------------------------------------------
# frames

def read(path, T=8, **how):
    return video.decode(str(path), T, **how)[0]


@pytest.mark.parametrize("reader", ["decord", "pyav"])
def test_the_frames_asked_for_are_the_frames_read(files, reader):
    assert indices(read(files / "ok.mp4", 8, reader=reader)) == [6, 18, 31, 43, 56, 68, 81, 93]
    assert indices(read(files / "ok.mp4", 4, reader=reader, sampler="linspace")) == [0, 32, 65, 98]
    assert indices(read(files / "three.mp4", 8, reader=reader)) == [0, 0, 0, 1, 1, 2, 2, 2]
    assert indices(read(files / "slow.mp4", 5, reader=reader)) == [1, 3, 5, 7, 9]
    assert indices(read(files / "ok.avi", 1, reader=reader)) == [50]
    assert indices(read(files / "one.mp4", 5)) == [0] * 5


READABLE = ["ok.mp4", "pic.mp4", "pic.mkv", "wide.mp4", "odd.mp4", "oddvp9.webm", "hevc.mp4",
            "tenbit.mp4", "xvid.avi", "refresh.mp4", "interlaced.mp4", "av1.mkv", "image.jpg",
            "image.png", "vfr.mp4", "late.mkv", "vp8.webm", "mpeg2.mp4", "alpha.webm", "gray.mkv",
            "wide_pixels.mp4", "bt709.mp4", "full_range.mp4", "thin.mp4", "picture.mp4", "raw.h264"]


@pytest.mark.parametrize("name", READABLE)
def test_both_readers_give_the_pixels_of_a_full_decode(files, name):
    everything, times = full_decode(files / name)
    right = 0
    for T in (1, 7, 16):
        want = everything[middles(times, T)]
        got = read(files / name, T)
        assert got.dtype == np.uint8 and np.array_equal(got, want), T
        try:
            assert np.array_equal(read(files / name, T, reader="decord"), want), T
            right += 1
        except video.BadVideo as e:
            assert "reader=pyav" in str(e)
    assert right in (0, 3) and (right or name not in ("ok.mp4", "pic.mp4", "pic.mkv", "vfr.mp4"))


@pytest.mark.parametrize("name", READABLE)
def test_times_are_those_of_the_frames_and_the_end_is_the_videos(files, name):
    _, when = full_decode(files / name)
    for T in (1, 7, 16):
        want = [float(when[i]) for i in [*middles(when, T), -1]]
        if len(when) == 2:  # an image
            want = [0.0] * T + [1 / 25]
        if name == "raw.h264":  # it has no stamps, only a frame rate
            want = [t / 25 for t in want]
        assert video.decode(str(files / name), T)[1] == want, T
        try:
            assert video.decode(str(files / name), T, reader="decord")[1] == want, T
        except video.BadVideo as e:
            assert "reader=pyav" in str(e)


def test_times_by_hand(tmp_path):
    def times(T, sampler="uniform", **how):
        return video.decode(encode(tmp_path / "x.mp4", ramp(**how), rate=rate), T, sampler)[1]

    rate = Fraction(30000, 1001)
    assert times(4, n=40) == [i * 1001 / 30000 for i in (5, 15, 25, 35, 40)]
    rate = 25
    assert times(8, n=3) == [0, 0, 0, .04, .04, .08, .08, .08, .12]  # frames repeat, so do times
    rate = 2  # 50 s: the first 30 are the whole of the video for these two
    assert times(3, "first30", n=100) == [5, 15, 25, 30]
    assert times(3, "linspace30", n=100) == [0, 14.5, 29, 30]
    assert times(3, "linspace", n=100) == [0, 24.5, 49, 50]
    assert times(2, "first30", n=8) == [1, 3, 4]


def test_time_not_index_picks_the_frame(files):
    everything, times = full_decode(files / "vfr.mp4")
    assert times[-1] > 2 and np.array_equal(read(files / "vfr.mp4", 1)[0], everything[21])


def test_decord_says_what_it_gets_wrong(files):
    why = {}
    for name in READABLE:
        head = video.Head()
        with av.open(str(files / name)) as c:
            video.scan(c, head)
        why[name] = video.decord_is_wrong(head)
    right = [n for n in READABLE if not why[n]]
    assert right == ["ok.mp4", "pic.mp4", "pic.mkv", "wide.mp4", "vfr.mp4", "late.mkv",
                     "alpha.webm", "wide_pixels.mp4", "bt709.mp4", "full_range.mp4", "thin.mp4"]
    for name, says in {"hevc.mp4": "open groups", "tenbit.mp4": "yuv420p10le", "av1.mkv": "av1",
                       "oddvp9.webm": "odd size", "interlaced.mp4": "interlaced"}.items():
        assert says in why[name]
    with pytest.raises(video.BadVideo, match=r"thin.mp4.*decord|thin.mp4.*reader=pyav"):
        read(files / "thin.mp4", reader="decord")


def test_only_what_is_needed_is_decoded(files, monkeypatch):
    """The fast way answers for plain files; whatever it can't do goes through a full decode."""
    full = []
    real = video.everything
    monkeypatch.setattr(video, "everything", lambda *a: full.append(a[0]) or real(*a))
    for name in READABLE:
        read(files / name)
    assert sorted(Path(p).name for p in set(full)) == ["gray.mkv", "mpeg2.mp4", "raw.h264",
                                                       "xvid.avi"]


def test_pyav_reads_without_decord(files, monkeypatch):
    want = read(files / "pic.mp4")
    monkeypatch.setitem(sys.modules, "decord", None)
    assert np.array_equal(read(files / "pic.mp4"), want)
    with pytest.raises(video.BadVideo, match="decord"):
        read(files / "pic.mp4", reader="decord")


class Fails(types.ModuleType):
    """A decord that cannot read; DECORDError derives from Exception only."""
    logging = types.SimpleNamespace(set_level=lambda level: None, QUIET=0)

    def __init__(self, error):
        super().__init__("decord")
        self.error = error

    def cpu(self, i):
        raise self.error

    VideoReader = None  # is not come to


@pytest.mark.parametrize("error", [RuntimeError("x\ny"), IndexError("x"),
                                   type("DECORDError", (Exception,), {})("x")])
def test_whatever_decord_raises_is_one_line(files, monkeypatch, error):
    monkeypatch.setitem(sys.modules, "decord", Fails(error))
    with pytest.raises(video.BadVideo, match="^cannot read .*pic.mp4 .codec h264.: x") as e:
        read(files / "pic.mp4", reader="decord")
    assert "\n" not in str(e.value)


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
        mirrored = a * d < b * c
        for reader in ("pyav",) if mirrored else ("pyav", "decord"):
            assert np.array_equal(read(path, 2, reader=reader), upright(plain)), (a, b, c, d)
        if mirrored:
            with pytest.raises(video.BadVideo, match="mirrored"):
                read(path, 2, reader="decord")


def test_image_is_a_video_of_one_frame(files):
    frames = read(files / "image.png", 3)
    assert np.array_equal(frames, np.stack([picture(1, 60, 90)[0]] * 3))


def test_hidden_frames_of_a_cut_are_not_counted(files):
    # time 0 was moved to frame 30 without decoding: 70 frames are shown
    assert indices(read(files / "edit.mp4", 7)) == [35, 45, 55, 65, 75, 85, 95]
    _, times, partial = video.decode(str(files / "edit.mp4"), 7)
    assert partial is None and times == [.2, .6, 1.0, 1.4, 1.8, 2.2, 2.6, 2.8]
    with pytest.raises(video.BadVideo, match="hidden by an edit list"):
        read(files / "edit.mp4", reader="decord")


def test_a_copy_cut_off_its_keyframe_is_read_from_the_first_frame_that_decodes(files):
    everything, times = full_decode(files / "late_key.mp4")
    assert 70 <= len(everything) < 87  # packets are there
    frames, when, partial = video.decode(str(files / "late_key.mp4"), 8)
    assert partial is None and np.array_equal(frames, everything[middles(times, 8)])
    assert when == [float(times[i]) for i in [*middles(times, 8), -1]]


@pytest.mark.parametrize("name, says", [
    ("zero.mp4", "empty (0 bytes)"), ("text.mp4", "it is no video"),
    ("audio.mp4", "no video stream, only audio"), ("missing.mp4", "no such file"),
    ("no_index.mp4", "cut off before its index")])
@pytest.mark.parametrize("reader", ["pyav", "decord"])
def test_unreadable_file_is_named_with_its_reason(files, name, says, reader):
    with pytest.raises(ValueError) as e:
        video.read_frames(str(files / name), 4, reader=reader)
    assert str(files / name) in str(e.value) and "\n" not in str(e.value)
    assert says in str(e.value)


def test_a_folder_is_told_from_a_missing_file(tmp_path):
    with pytest.raises(video.BadVideo, match="it is a folder, not a file; replace"):
        video.read_frames(str(tmp_path), 4)


@pytest.mark.parametrize("size", [0, 32])
def test_a_video_that_is_too_thin_is_a_bad_one(tmp_path, size):
    thin = encode(tmp_path / "thin.mkv", np.zeros((3, 2, 402, 3), np.uint8), "ffv1", "bgr0")
    encode(tmp_path / "long.mkv", np.zeros((3, 2, 400, 3), np.uint8), "ffv1", "bgr0")
    with pytest.raises(video.BadVideo, match="thin.mkv.*a frame of 402x2 is too thin"):
        video.read_frames(thin, 2, size=size)
    assert read(tmp_path / "long.mkv", 2).shape == (2, 2, 400, 3)


PARTIAL = ["truncated.mp4", "stopped.mp4", "corrupt.mp4", "truncated.mkv", "damaged.mkv"]


@pytest.mark.parametrize("name", PARTIAL)
def test_partial_file_is_reported_and_read_where_it_decodes_or_refused(files, name, capfd):
    everything, times = full_decode(files / name)
    assert 30 < len(everything) < 100
    row = video.examine(str(files / name))
    assert row["state"] == "partial" and row["frames"] == len(everything)
    assert name == "truncated.mkv" or row["why"] == f"{len(everything)} of 100 frames decode"
    for T in (1, 8):  # though one frame is far from the damage
        frames, when = video.read_clip(str(files / name), T, min_decoded=0)
        assert np.array_equal(frames, everything[middles(times, T)])
        assert when == [float(times[i]) for i in [*middles(times, T), -1]]
        said = capfd.readouterr().err
        assert said.count(name) == 1 and "partial" in said and row["why"] in said
    if name == "damaged.mkv":  # one frame of 100
        assert np.array_equal(video.decode(str(files / name), 1)[0], read(files / name, 1))
        return
    with pytest.raises(video.BadVideo, match=f"{name}.*only .*less than min_decoded=0.9"):
        video.read_frames(str(files / name), 8)
    with pytest.raises(video.BadVideo, match=name):
        video.read_frames(str(files / name), 8, reader="decord", min_decoded=0)


@pytest.mark.parametrize("shape, size, want", [
    ((120, 200), 32, (32, 53)), ((200, 120), 32, (53, 32)), ((24, 18), 48, (64, 48))])
def test_resize_is_antialiased_bicubic_of_the_shorter_side(shape, size, want):
    frame = picture(1, *shape)[0]
    small = video.resize(frame, size)
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
            read(files / name, size=16, min_decoded=0)
        assert not [o for o in gc.get_objects() if type(o) is av.VideoFrame]
    finally:
        gc.enable()


def test_unknown_names_are_errors(files, monkeypatch):
    with pytest.raises(ValueError, match="sampler 'random' is not one of uniform, linspace"):
        video.read_frames(str(files / "ok.mp4"), 4, sampler="random")
    with pytest.raises(ValueError, match="reader 'cv2' is not one of"):
        video.read_frames(str(files / "ok.mp4"), 4, reader="cv2")
    monkeypatch.delitem(sys.modules, "decord", raising=False)
    monkeypatch.setattr(video.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install decord"):
        video.check_names("uniform", "decord")


def test_an_8k_clip_takes_less_than_500_mb(tmp_path):
    rng = np.random.default_rng(0)
    base = rng.integers(0, 255, (4320, 7680), dtype=np.uint8) // 8
    encode(tmp_path / "8k.mp4", [base + 10 * i for i in range(3)],
           options={"preset": "ultrafast", "crf": "40"})
    with pytest.raises(video.BadVideo, match="more than 4K"):
        read(tmp_path / "8k.mp4", reader="decord")
    code = ("import sys, resource, av, torch, video\n"
            "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024\n"
            "before = peak()\n"
            "for _ in range(2): f = video.read_frames(sys.argv[1], 8, size=224)\n"
            "print(f.shape, peak() - before)")
    out = subprocess.run([sys.executable, "-c", code, str(tmp_path / "8k.mp4")], cwd=ROOT,
                         capture_output=True, text=True, check=True).stdout
    assert out.startswith("(8, 224, 398, 3)") and float(out.split()[-1]) < 500, out


# -----------------------------------------------------------------------------
# the process with a deadline

def spins(path):
    while True:
        pass


def spins_in_c(path):
    sum(range(10 ** 15))  # no Python signal handler runs in there, and ctrl-C does nothing


def crashes(path):
    faulthandler.disable()  # pytest's would print a page
    os.kill(os.getpid(), signal.SIGSEGV)


def fails_once(path):
    if not os.path.exists(path):
        open(path, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return "read"


def hangs_once(path):
    if not os.path.exists(path):
        open(path, "w").close()
        spins(path)
    return "read"


@pytest.fixture
def calls(monkeypatch):
    for f in (spins, spins_in_c, crashes, fails_once, hangs_once):
        monkeypatch.setattr(video, f.__name__, f, raising=False)


@pytest.mark.parametrize("name", ["spins", "spins_in_c"])
def test_a_reader_that_never_returns_is_ended_and_the_next_file_is_read(files, calls, name):
    p, begun = video.Process(0.3), time.time()
    with pytest.raises(video.BadVideo, match="cannot read x.mp4: .*after video_timeout=0.3 s; rep"):
        p.call(name, "x.mp4")
    assert time.time() - begun < 8
    assert p.call("examine", str(files / "three.mp4"))["frames"] == 3


def test_a_crash_is_the_files_fault_only_when_it_comes_again(calls, tmp_path):
    p = video.Process(20)
    with pytest.raises(video.BadVideo, match="y.mp4: its reader died twice .Segmentation fault"):
        p.call("crashes", "y.mp4")
    assert p.call("fails_once", str(tmp_path / "once")) == "read"


def test_a_process_that_never_answered_may_hang_for_no_fault_of_the_file(calls, tmp_path):
    # a lock that was held elsewhere when it was forked; where it has answered, it is the file
    p = video.Process(0.5)
    assert p.call("hangs_once", str(tmp_path / "first")) == "read"
    with pytest.raises(video.BadVideo, match="after video_timeout=0.5 s"):
        p.call("hangs_once", str(tmp_path / "second"))


def test_the_process_gives_what_a_call_here_gives(files):
    p = video.Process(20)
    for name in ("pic.mp4", "one.mp4", "pic.mp4"):
        how = (str(files / name), 4, "uniform", "pyav", 32)
        frames, times, partial = p.call("decode", *how)
        assert partial is None and np.array_equal(frames, video.decode(*how)[0])
        assert times == video.decode(*how)[1] and len(times) == 5
    here = str(files / "text.mp4"), 4
    with pytest.raises(video.BadVideo) as a, video.said_of("", video.Head()):
        video.decode(*here)
    with pytest.raises(video.BadVideo) as b:
        p.call("decode", *here)
    assert "text.mp4" in str(b.value) and str(b.value) in str(a.value)
    assert video.Process(0).call("examine", str(files / "one.mp4"))["frames"] == 1


def test_the_child_ends_with_its_owner(files):
    code = ("import os, signal, sys, video\n"
            "p = video.Process(60); p.call('examine', sys.argv[1]); print(p.pid, flush=True)\n"
            "os.kill(os.getpid(), signal.SIGKILL)")
    out = subprocess.run([sys.executable, "-c", code, str(files / "one.mp4")], cwd=ROOT,
                         capture_output=True, text=True, timeout=60).stdout
    for _ in range(200):
        try:
            state = Path(f"/proc/{int(out)}/stat").read_text().split(") ")[1][0]
        except FileNotFoundError:
            return
        if state == "Z":
            return
        time.sleep(0.02)
    raise AssertionError("the child is still there")


# -----------------------------------------------------------------------------
# real clips

@pytest.mark.skipif(not SHARED.is_dir(), reason="../shared/videos is not here")
def test_real_clips_agree_with_their_full_decode():
    manifest = json.loads((SHARED / "manifest.json").read_text())
    assert len(manifest) == 19
    right = []
    for name, facts in manifest.items():
        for reader in ("pyav", "decord"):
            try:
                frames, _, partial = video.decode(str(SHARED / name), 8, reader=reader)
            except video.BadVideo as e:
                assert reader == "decord" and name in str(e)
                continue
            assert frames.shape[1:3] == tuple(facts["size"][::-1]), name
            off = np.abs(frames.mean((1, 2)) - facts["uniform8"]["mean_rgb"]).max()
            assert off < (0.05 if reader == "pyav" else 0.06), (name, reader)
            assert (partial is not None) == (facts["decode_errors"] > 0), name
            right.append(reader)
    assert right.count("pyav") == 19 and right.count("decord") == 11
