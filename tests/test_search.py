"""
search.py, shelf.py, moments.py, page.py: scores against model.similarity, an index that is killed
at every step against one left alone, times against clips whose frames tell their number.

python -m pytest tests/test_search.py -v
"""
import contextlib
import fractions
import html.parser
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import av
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import backbones
import eval as evaluation
import moments
import page
import search
import shelf
import train
from conftest import ROOT, make_clip, make_clips, make_family, make_qwen2vl
from data import Item
from model_mars import MARS, MARSConfig
from video import BadVideo, read_clip

DEFAULTS = {k: d for k, (_, d, _) in search.read_settings(search.__file__).items()}


def grey(path, n, rate=10, size=32, first=0, sound=False, stride=1):
    """A clip whose frame i tells its number, modulo 100: luma 16 + 2 (first + i)."""
    with av.open(str(path), "w") as out:
        s = out.add_stream("libx264", rate=fractions.Fraction(rate))
        s.width = s.height = size
        s.pix_fmt, s.options, s.thread_count = "yuv420p", {"crf": "4", "g": "12"}, 1
        a = out.add_stream("aac", rate=8000, layout="mono") if sound else None
        for i in range(n):
            f = np.full((size * 3 // 2, size), 16 + 2 * ((first + i) * stride % 100), np.uint8)
            f[size:] = 128  # no colour
            out.mux(s.encode(av.VideoFrame.from_ndarray(f, format="yuv420p")))
        out.mux(s.encode(None))
        if a:
            f = av.AudioFrame.from_ndarray(np.zeros((1, 8000 * n // rate), np.float32), "fltp",
                                           "mono")
            f.sample_rate = 8000
            out.mux(a.encode(f))
            out.mux(a.encode(None))
    return str(path)


def number(frame):
    return round(float(frame.mean()) * 219 / 255 / 2)


@pytest.fixture(scope="module")
def ckpts(tmp_path_factory):
    """{method: run folder}, untrained but for noise on what would be trained."""
    d = tmp_path_factory.mktemp("runs")
    (d / "data").mkdir()
    data = make_clips(d / "data", train=6, val=2)
    mllm = make_qwen2vl(d / "qwen2vl")
    clip = make_clip(d / "clip")
    out = {}
    for name, backbone, own in (
            ("mars", mllm, dict(num_slots=3, lora_r=2, lora_alpha=4)), ("slq", mllm, {}),
            ("pha", clip, dict(max_words=20, individual_prototypes=2, block_layers=1))):
        args = dict(model=name, out_dir=d / name, data=data, backbone=backbone, epochs=0,
                    warmup_epochs=0, batch_size=4, num_frames=4, num_workers=0, device="cpu", **own)
        handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
        train.main(search.configure(train.__file__, [f"--{k}={v}" for k, v in args.items()],
                                    train.SETTINGS))
        for n, handler in handlers.items():
            signal.signal(n, handler)
        file = d / name / "best" / "model.safetensors"
        g = torch.Generator().manual_seed(0)
        state = load_file(file)
        save_file({k: x + 0.1 * torch.randn(x.shape, generator=g) if x.dim() > 1 else x
                   for k, x in state.items()}, file)
        out[name] = str(d / name)
    return out


@pytest.fixture(scope="module")
def runs(ckpts):
    return {name: search.load(folder, device="cpu") for name, folder in ckpts.items()}


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    """Good ones with odd names, every broken kind, what has to be passed over."""
    d = tmp_path_factory.mktemp("x") / "My videos"
    (d / "a <b> & \"q\"").mkdir(parents=True)
    (d / ".hidden").mkdir()
    (d / "folder.mp4").mkdir()
    outside = d.parent / "outside"
    outside.mkdir()
    for i, name in enumerate(["one.MP4", "a <b> & \"q\"/zwei Ölkännchen 映画.mov", "new\nline.mkv",
                              "-rf.mp4", "twin.mp4"]):
        grey(d / name, 20, first=4 * i)
    shutil.copy(d / "twin.mp4", d / "ztwin.mp4")
    shutil.copy(d / "one.MP4", os.fsencode(d) + b"/bad\xffname.mp4")
    grey(d / "long.mp4", 60)
    grey(outside / "secret.mp4", 20)
    for place in (d / ".hidden.mp4", d / ".hidden" / "x.mp4"):
        shutil.copy(d / "one.MP4", place)
    raw = (d / "one.MP4").read_bytes()
    (d / "zero.mp4").write_bytes(b"")
    (d / "text.mp4").write_text("hello\n")
    (d / "no_index.mp4").write_bytes(raw[:len(raw) * 6 // 10])
    (d / "notes.txt").write_text("no video")
    with av.open(str(d / "audio.mp4"), "w") as out:
        s = out.add_stream("aac", rate=8000, layout="mono")
        f = av.AudioFrame.from_ndarray(np.zeros((1, 8000), np.float32), "fltp", "mono")
        f.sample_rate = 8000
        out.mux(s.encode(f))
        out.mux(s.encode(None))
    os.mkfifo(d / "pipe.mp4")
    (d / "leads_out.mp4").symlink_to(outside / "secret.mp4")
    (d / "leads_in.mp4").symlink_to("one.MP4")
    (d / "dangling.mp4").symlink_to("nothing.mp4")
    (d / "folder").symlink_to(outside)
    return d


BROKEN = {"zero.mp4", "text.mp4", "no_index.mp4", "audio.mp4", "pipe.mp4", "dangling.mp4"}
GOOD = {"one.MP4", "a <b> & \"q\"/zwei Ölkännchen 映画.mov", "new\nline.mkv", "-rf.mp4",
        "twin.mp4", "ztwin.mp4", "bad\udcffname.mp4", "long.mp4", "leads_in.mp4"}


def settings(root, index="", **given):
    return SimpleNamespace(**{**DEFAULTS, "root": str(root), "index": str(index), "device": "cpu",
                              "num_workers": 1, **given})


def build(run, root, index="", **given):
    """-> (bad, what was printed)"""
    said = []
    bad = search.build(settings(root, index, **given), run, said.append)
    return bad, "\n".join(said)


def content(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(Path(folder).rglob("*"))
            if p.is_file()}


@pytest.fixture(scope="module")
def whole_index(runs, videos, tmp_path_factory):
    """An index of `videos` with moments of 2 s, made at once."""
    folder = tmp_path_factory.mktemp("index")
    before = content(videos.parent)
    bad, said = build(runs["mars"], videos, folder, moments=2.0, num_workers=2)
    assert content(videos.parent) == before  # nothing beside the index is written
    return folder, bad, said


# -----------------------------------------------------------------------------
# scores

def test_a_score_is_the_models_for_every_method(runs, videos):
    captions = ["a red square moves left", "a blue circle", "then it grows"]
    paths = [str(videos / n) for n in ("one.MP4", "twin.mp4", "long.mp4")]
    for name, run in runs.items():
        S = run.text(captions) @ run.video(paths).T
        text, video = run.text_features(captions), run.video_features(paths)
        want = evaluation.similarity(run.model.similarity, text, video, quiet=True)
        assert S.shape == (3, 3) and S.dtype == torch.float32 and want.std() > 1e-4
        torch.testing.assert_close(S, want, rtol=0, atol=2e-6)
    # MARS: the mean of M cosines is the dot product of the slots one behind the other, by M
    run = runs["mars"]
    text, video = run.text_features(captions)["slots"], run.video_features(paths)["slots"]
    M = text.shape[1]
    cosines = torch.stack([text[:, m] @ video[:, m].T for m in range(M)])
    dot = text.flatten(1) @ video.flatten(1).T
    torch.testing.assert_close(cosines.mean(0), dot / M)
    torch.testing.assert_close(run.text(captions) @ run.video(paths).T, dot / M)
    assert run.video(paths).flatten(1).norm(dim=1).tolist() == pytest.approx([M ** 0.5] * 3)
    torch.testing.assert_close(text.norm(dim=-1), torch.ones(3, M))


def test_learned_slot_weights_and_maxsim(runs):
    features = {"slots": torch.nn.functional.normalize(torch.randn(5, 3, 8), dim=-1)}
    model = SimpleNamespace(config=SimpleNamespace(aggregation="learnable"),
                            beta=lambda: torch.tensor([.5, .3, .2]))
    S = search.as_vectors(model, features, True) @ search.as_vectors(model, features).T
    z = features["slots"]
    torch.testing.assert_close(S, sum(b * z[:, m] @ z[:, m].T for m, b in enumerate((.5, .3, .2))))
    model.config.aggregation = "maxsim"  # no dot product
    assert search.as_vectors(model, features) is None


def brute(run, reader, query):
    items = reader.take(torch.arange(reader.n))
    return evaluation.similarity(run.model.similarity, query, items, quiet=True)[0]


@pytest.mark.parametrize("name", ["mars", "slq", "pha"])
def test_hits_are_the_exact_order_whatever_the_chunks(runs, videos, tmp_path, monkeypatch, name):
    run = runs[name]
    build(run, videos, tmp_path / "i", dtype="int8" if name == "slq" else "fp32")
    reader = shelf.Reader(tmp_path / "i")
    query = run.text_features(["a red square moves left"])
    want = brute(run, reader, query)
    order = sorted(range(reader.n), key=lambda r: (-want[r].item(), reader.lines[r]["path"]))
    paths = [reader.lines[r]["path"] for r in order]
    for block, preselect, exhaustive in ((2 ** 22, 200, False), (1, 200, False), (999, 1, True)):
        monkeypatch.setattr(search, "BLOCK", block)
        hits = search.search(run, reader, query, 4, exhaustive=exhaustive, preselect=preselect)
        assert [h["path"] for h in hits] == paths[:4]
        assert [h["score"] for h in hits] == [want[r].item() for r in order[:4]]  # to the last bit
    # twins tie exactly, and the path decides; more hits than videos are all videos
    hits = search.search(run, reader, query, 10 ** 6)
    assert [h["path"] for h in hits] == paths and len(hits) == len(GOOD)
    place = {h["path"]: n for n, h in enumerate(hits)}
    assert place["ztwin.mp4"] == place["twin.mp4"] + 1
    assert hits[place["ztwin.mp4"]]["score"] == hits[place["twin.mp4"]]["score"]


class Made(shelf.Writer):
    """An index of vectors z [n, D] that no video stands behind."""

    def __init__(self, folder, z):
        super().__init__(folder, dict(format=shelf.FORMAT, run={}, moments=0.0, dtype="fp32"))
        self.z = z
        self.lines = {f"{i:03d}.mp4": dict(path=f"{i:03d}.mp4", size=1, mtime_ns=1, end=1.0,
                                           digest="0" * 16, moments=[]) for i in range(len(z))}
        self.compact()

    def tensors(self, line):
        return {"z": self.z[int(line["path"][:3])][None]}


def test_what_could_be_first_is_a_candidate_although_rounding_hides_it(tmp_path, monkeypatch):
    # 300 scores 2e-8 apart, in disorder, under a rounding of 8e-6: the first 64 are any
    order = torch.randperm(300, generator=torch.Generator().manual_seed(0))
    made = Made(str(tmp_path / "i"), (0.09 - 2e-8 * order)[:, None] * torch.eye(1, 8))
    reader = shelf.Reader(made.folder)
    run = SimpleNamespace(device="cpu", model=SimpleNamespace(
        similarity=lambda text, video: text["z"] @ video["z"].T))
    query = {"z": torch.eye(1, 8)}
    rounding = 8e-6 * torch.rand(300, generator=torch.Generator().manual_seed(1))
    fast, sure = search.fast_scores(run, reader, query)
    monkeypatch.setattr(search, "fast_scores", lambda *a: (fast + rounding, sure))
    best = [f"{i:03d}.mp4" for i in order.argsort().tolist()]
    first = {f"{i:03d}.mp4" for i in (fast + rounding).topk(64).indices.tolist()}
    assert not {*best[:3]} <= first
    assert [h["path"] for h in search.search(run, reader, query, 3)] == best[:3]


def test_preselection_picks_by_the_global_level_and_scores_all_three(runs, videos, tmp_path,
                                                                      monkeypatch):
    run = runs["pha"]
    build(run, videos, tmp_path / "p")
    reader = shelf.Reader(tmp_path / "p")
    query = run.text_features(["a red square moves left"])
    S, sure = search.fast_scores(run, reader, query)
    assert not sure
    torch.testing.assert_close(S, (query["G"] @ reader.take(torch.arange(reader.n))["G"].T)[0])
    scored = []
    monkeypatch.setattr(search, "exact_scores", lambda r, q, items: scored.append(len(items["G"]))
                        or evaluation.similarity(r.model.similarity, q, items, quiet=True))
    hits = search.search(run, reader, query, 2, preselect=3)
    assert scored == [3] and len(hits) == 2
    best = set(S.topk(3).indices.tolist())
    exact = brute(run, reader, query)
    assert hits[0]["path"] == reader.lines[max(best, key=lambda r: exact[r])]["path"]


def test_int8_is_near_and_says_how_near(runs, videos, tmp_path):
    for name, run in runs.items():
        bad, said = build(run, videos, tmp_path / name, dtype="int8")
        assert "int8 against fp32: of 9 queries against 9 items" in said
        build(run, videos, tmp_path / f"{name}32")
        short, full = (shelf.Reader(tmp_path / n) for n in (name, f"{name}32"))
        rows = torch.arange(full.n)
        assert short.take(rows).keys() == full.take(rows).keys()
        for key, x in full.take(rows).items():
            y = short.take(rows)[key]
            step = x.abs().amax(-1, keepdim=True) / 127 if "_" not in key else 0
            assert ((x - y).abs() <= 0.51 * step + 1e-9).all(), key
        sizes = [sum(p.stat().st_size for p in (tmp_path / n).glob("shard*"))
                 for n in (name, f"{name}32")]
        assert sizes[0] < 0.6 * sizes[1]
    # by hand: three items, the best of the first query changes, the others' don't
    S = torch.tensor([[.9, .8, .1], [.3, .2, .1]])
    S8 = torch.tensor([[.8, .9, .1], [.3, .2, .1]])
    # Spearman of (3, 2, 1) and (2, 3, 1): 1 - 6 * 2 / (3 * 8) = .5; the mean with 1 is .75
    assert "first is the same for 50.0 %, of the best 2 100.0 % are the same, rank correlation " \
        "0.75000" in search.agree(S, S8)


# -----------------------------------------------------------------------------
# the index

def test_all_kinds_of_files(whole_index, videos):
    folder, bad, said = whole_index
    assert set(bad) == BROKEN
    lines = [json.loads(x) for x in (folder / "videos.jsonl").read_text().splitlines()]
    assert [x["path"] for x in lines] == sorted(GOOD)
    assert "passed over: 1 links that lead out of the folder, 1 other files" in said
    assert "\n  zero.mp4: the file is empty (0 bytes)" in said
    assert all(len(x) < 200 for x in said.splitlines())
    assert "9 videos, 5 moments" in said and said.count("\n") == 8  # one line per broken file
    assert not list((folder / "new").iterdir())
    by = {x["path"]: x for x in lines}
    assert by["long.mp4"]["end"] == 6.0 and by["long.mp4"]["moments"] == \
        [[0, 2], [1, 3], [2, 4], [3, 5], [4, 6]]
    assert by["one.MP4"]["moments"] == []  # no longer than a window
    # others can read it: rows as documented, unit vectors
    shard = load_file(folder / by["long.mp4"]["shard"])
    assert shard["slots"].shape[1:] == (3, 32) and len(shard["slots"]) == 9 + 5
    whole = shard["slots"][by["long.mp4"]["row"] + 5]
    torch.testing.assert_close(whole.norm(dim=-1), torch.ones(3))


def in_a_fork(job):
    """job() in a child as this process is -> its pid; exit code 0 if nothing was raised."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            os.setsid()
            job()
            code = 0
        finally:
            os._exit(code)
    return pid


def test_killed_at_any_moment_and_resumed_it_is_the_same_to_the_byte(
        runs, videos, whole_index, tmp_path, monkeypatch):
    run, want = runs["mars"], content(whole_index[0])
    torch.set_num_threads(1)
    # at changes of the file system: the n-th one kills, or stops in the middle of a file
    counted = ("replace", "remove", "makedirs")
    real, done = {name: getattr(os, name) for name in counted}, {"n": 0, "kill": 0}

    def deadly(name):
        def call(*args, **kw):
            done["n"] += 1
            if done["n"] == done["kill"]:
                os.kill(os.getpid(), signal.SIGKILL)
            return real[name](*args, **kw)
        return call

    def half(tensors, path, metadata):
        save_file(tensors, path, metadata)
        done["n"] += 1
        if done["n"] == done["kill"]:
            os.truncate(path, os.path.getsize(path) // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    def noting(self, line, tensors):
        with open(tmp_path / "done", "a") as f:
            f.write("x")
        add(self, line, tensors)

    add = shelf.Writer.add
    monkeypatch.setattr(shelf.Writer, "add", noting)
    monkeypatch.setattr(shelf, "save_file", half)
    for name in counted:
        monkeypatch.setattr(os, name, deadly(name))
    monkeypatch.setattr(search, "COMPACT", 4)
    step, kills = 0, 0
    while True:  # one index, killed again and again, each time one step later
        step += 3
        done.update(n=0, kill=step)
        pid = in_a_fork(lambda: build(run, videos, tmp_path / "i", moments=2.0))
        _, status = os.waitpid(pid, 0)
        if not os.WIFSIGNALED(status):
            break
        kills += 1
    assert status == 0 and kills >= 4
    assert content(tmp_path / "i") == want
    # a kill costs no more than the video in work
    assert len((tmp_path / "done").read_text()) <= len(GOOD) + kills
    # at random moments
    monkeypatch.undo()
    random.seed(0)
    for attempt in range(6):
        pid = in_a_fork(lambda: build(run, videos, tmp_path / "j", moments=2.0))
        time.sleep(random.uniform(0.02, 0.5))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    bad, said = build(run, videos, tmp_path / "j", moments=2.0)
    assert content(tmp_path / "j") == want and set(bad) == BROKEN


def test_a_kill_costs_only_the_video_in_work(runs, videos, tmp_path, monkeypatch):
    run, encoded = runs["mars"], []
    real = search.Run.encode

    def counting(self, side, inputs):
        encoded.append(1)
        if len(encoded) == 6:
            raise KeyboardInterrupt
        return real(self, side, inputs)

    monkeypatch.setattr(search.Run, "encode", counting)
    with pytest.raises(KeyboardInterrupt):
        build(run, videos, tmp_path / "i")
    assert len(list((tmp_path / "i" / "new").iterdir())) == 5
    _, said = build(run, videos, tmp_path / "i")
    assert len(encoded) == 6 + 4 and "(4 read, 0 changed, 0 moved, 0 deleted, 5 kept)" in said


def test_new_changed_moved_and_deleted_files(runs, tmp_path, monkeypatch):
    run, d = runs["mars"], tmp_path / "v"
    (d / "sub").mkdir(parents=True)
    for i in range(6):
        grey(d / f"{i}.mp4", 8, first=5 * i)
    monkeypatch.setattr(shelf, "SPREAD", 2)  # several shards
    build(run, d)
    folder, shards = d / ".nanotvr", set(os.listdir(d / ".nanotvr"))
    assert len([x for x in shards if x.startswith("shard")]) > 1
    same = content(folder)
    _, said = build(run, d)
    assert "0 read" in said and "6 kept" in said and content(folder) == same
    os.rename(d / "0.mp4", d / "sub" / "moved.mp4")
    grey(d / "1.mp4", 9, first=90)
    os.utime(d / "2.mp4", ns=(1, 1))  # touched: it counts as changed
    (d / "3.mp4").unlink()
    grey(d / "new.mp4", 8, first=50)
    grey(d / "other.mp4", 8, first=10)  # a gone one's size and time, other bytes: not moved
    encoded = []
    real = search.Run.encode
    monkeypatch.setattr(search.Run, "encode", lambda *a: encoded.append(1) or real(*a))
    _, said = build(run, d)
    assert "(4 read, 2 changed, 1 moved, 1 deleted, 2 kept)" in said and len(encoded) == 4
    # as made at once
    build(run, d, tmp_path / "fresh")
    assert content(folder) == content(tmp_path / "fresh")
    # a file that can't be read any more is no longer found
    (d / "new.mp4").write_bytes(b"broken")
    bad, _ = build(run, d)
    assert set(bad) == {"new.mp4"}
    assert "new.mp4" not in [x["path"] for x in shelf.Reader(folder).lines]


def test_a_video_that_changes_while_it_was_read_waits_for_the_next_run(runs, tmp_path, monkeypatch):
    grey(tmp_path / "a.mp4", 8)
    real = search.Run.encode

    def writing(self, *args):
        os.utime(tmp_path / "a.mp4", ns=(5, 5))
        return real(self, *args)

    monkeypatch.setattr(search.Run, "encode", writing)
    assert "changed while it was read" in build(runs["slq"], tmp_path)[0]["a.mp4"]
    assert build(runs["slq"], tmp_path)[0] == {}


def test_an_embedding_that_is_not_finite_is_not_indexed(runs, tmp_path, monkeypatch):
    grey(tmp_path / "a.mp4", 8)
    grey(tmp_path / "b.mp4", 8, first=9)
    real, n = search.Run.encode, []
    monkeypatch.setattr(search.Run, "encode", lambda *a: n.append(1) or {
        k: x * (float("nan") if len(n) == 1 else 1) for k, x in real(*a).items()})
    assert build(runs["slq"], tmp_path)[0] == {"a.mp4": "its embedding is not finite"}
    assert [x["path"] for x in shelf.Reader(tmp_path / ".nanotvr").lines] == ["b.mp4"]


def test_a_moved_file_is_told_by_its_bytes(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_bytes(b"x" * 300_000)
    b.write_bytes(b"x" * 150_000 + b"y" + b"x" * 149_999)
    assert shelf.digest(a) != shelf.digest(b)
    header = {"format": 1, "run": {}, "moments": 0.0, "dtype": "fp32"}
    writer = shelf.Writer(str(tmp_path / "i"), header)
    for new, want in (("b", (["b"], 0)), ("a", ([], 1))):  # of a's size and time, both
        writer.lines = {"gone": {"path": "gone", "size": 300_000, "mtime_ns": 1,
                                 "digest": shelf.digest(a), "end": 1.0, "moments": []}}
        todo, counts = writer.compare(str(tmp_path), {new: (300_000, 1)})
        assert (todo, counts["moved"]) == want and counts["deleted"] == 1 - want[1]


def test_other_settings_are_refused_with_what_differs(runs, ckpts, videos, whole_index, tmp_path):
    run, folder = runs["mars"], tmp_path / "i"
    shutil.copytree(whole_index[0], folder)
    before = content(folder)
    other = search.load(ckpts["mars"], device="cpu")
    other.cfg.video_prompt = "<video>\nWhat is this?"
    with pytest.raises(ValueError, match="other settings .video_prompt = .*, now .*What is this"):
        build(other, videos, folder)
    with pytest.raises(ValueError, match="moments = 2.0, now 5.0"):
        build(run, videos, folder, moments=5.0)
    with pytest.raises(ValueError, match="dtype = 'fp32', now 'int8'"):
        build(run, videos, folder, dtype="int8")
    # what is not asked for is as it was
    build(run, videos, folder)
    assert content(folder) == before
    args = settings(videos, folder)
    assert search.open_index(args, run).n == 14
    with pytest.raises(ValueError, match="is of another run .*video_prompt"):
        search.open_index(args, other)
    with pytest.raises(ValueError, match="of another run .*model = 'mars', now 'slq'"):
        search.open_index(args, runs["slq"])
    other = search.load(ckpts["mars"], device="cpu")
    other.precision = "bfloat16"  # made on a GPU, asked on a laptop
    assert search.open_index(args, other).n == 14
    with pytest.raises(ValueError, match="precision = 'float32', now 'bfloat16'"):
        build(other, videos, folder)


def test_an_index_leads_nowhere_else(runs, videos, whole_index, tmp_path):
    secret = tmp_path / "secret.mp4"
    shutil.copy(videos / "one.MP4", secret)
    lines = (whole_index[0] / "videos.jsonl").read_text().splitlines()
    for key, value in (("path", "../secret.mp4"), ("path", str(secret)), ("path", "a/../../x.mp4"),
                       ("path", "x\0y"), ("path", 7), ("shard", "../shard-0123456789abcdef."
                       "safetensors"), ("row", -1), ("row", True), ("end", "1"), ("size", 1.5),
                       ("moments", [[2, 1]]), ("end", float("nan"))):
        folder = tmp_path / "i"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole_index[0], folder)
        row = {**json.loads(lines[0]), key: value}
        (folder / "videos.jsonl").write_text("\n".join([json.dumps(row), *lines[1:]]))
        with pytest.raises(ValueError, match="the index is damaged: "):
            shelf.Reader(folder)
    for path in ("../x", "/etc/passwd", "a//b", "./a", "", "a/.."):
        with pytest.raises(ValueError):
            shelf.inside(str(videos), path)
    with pytest.raises(ValueError, match="leads out of"):  # a link that came after the index
        shelf.inside(str(videos), "leads_out.mp4")
    # a file of the index that is a link
    shutil.rmtree(folder)
    shutil.copytree(whole_index[0], folder)
    shard = next(folder.glob("shard*"))
    shutil.move(shard, tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="is a link"):
        shelf.Reader(folder)
    d = tmp_path / "v"
    d.mkdir()
    grey(d / "a.mp4", 5)
    (d / ".nanotvr").symlink_to(tmp_path)
    with pytest.raises(ValueError, match="is a link"):
        build(runs["mars"], d)


def test_damaged_index_files_are_named(runs, whole_index, tmp_path):
    for name, text, says in (("index.json", "{", "delete the whole folder"),
                             ("index.json", "[]", "no index of"),
                             ("videos.jsonl", "{\n", "is damaged: .*videos.jsonl; run index again"),
                             ("videos.jsonl", "", "is empty")):
        folder = tmp_path / "i"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole_index[0], folder)
        (folder / name).write_text(text)
        with pytest.raises(ValueError, match=says):
            shelf.Reader(folder)
    shutil.copy(whole_index[0] / "index.json", folder)
    shutil.copy(whole_index[0] / "videos.jsonl", folder)
    shard = next(folder.glob("shard*"))
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(ValueError, match="the index is damaged: .*shard-.*; run index again"):
        shelf.Reader(folder)
    with pytest.raises(FileNotFoundError, match="there is no index"):
        shelf.Reader(tmp_path / "nowhere")


def test_damage_costs_the_videos_of_its_shard(runs, tmp_path, monkeypatch):
    run, d, folder = runs["mars"], tmp_path / "v", tmp_path / "i"
    d.mkdir()
    for i in range(6):
        grey(d / f"{i}.mp4", 8, first=5 * i)
    monkeypatch.setattr(shelf, "SPREAD", 2)  # several shards
    build(run, d, folder)
    want = content(folder)
    shard = sorted(folder.glob("shard*"))[0]
    name, good = shard.name, load_file(shard)
    n = len(good["slots"])
    lines, header = folder / "videos.jsonl", folder / "index.json"

    def stored(change):
        return lambda: save_file({k: v.contiguous() for k, v in change(good["slots"]).items()},
                                 shard)

    def line(**change):
        def write():
            rows = [json.loads(x) for x in lines.read_text().splitlines()]
            i = next(i for i, x in enumerate(rows) if x["shard"] == name)
            rows[i] = {k: v for k, v in {**rows[i], **change}.items() if v is not None}
            lines.write_text("".join(json.dumps(x, sort_keys=True) + "\n" for x in rows))
        return write

    def broken():
        line(path="BROKEN")()
        rows = lines.read_text().splitlines(True)
        lines.write_text("".join("{\n" if "BROKEN" in x else x for x in rows))

    for damage in (
            stored(lambda x: {"slots": x * (torch.arange(n) < n // 2)[:, None, None]}),
            stored(lambda x: {"slots": 2 * x}), stored(lambda x: {"slots": x.long()}),
            stored(lambda x: {"slots": x[:, :, :-1]}), stored(lambda x: {"slots": x * torch.nan}),
            stored(lambda x: {"slot2": x}), shard.unlink, lambda: shard.write_bytes(b""),
            lambda: os.truncate(shard, shard.stat().st_size - 1), broken, line(end=9.0),
            line(moments=[[0.0, 0.5]]), line(shard=None), line(crc32=1), line(bytes="1"),
            line(of="x")):
        damage()
        with pytest.raises(ValueError, match="the index is damaged: .*; run index again"):
            shelf.Reader(folder)
        _, said = build(run, d, folder)
        assert f"({n} read, 0 changed, 0 moved, 0 deleted, {6 - n} kept)" in said
        assert content(folder) == want
    # without checksums, as of a large index
    monkeypatch.setattr(shelf, "CHECKED", 0)
    for change in (lambda x: {"slots": x.double()}, lambda x: {"slot2": x}):
        stored(change)()
        with pytest.raises(ValueError, match="the index is damaged: .*shard"):
            shelf.Reader(folder)
    shard.write_bytes(want[name][:-4] + b"\xff" * 4)  # not a number
    with pytest.raises(ValueError, match="the index is damaged: .*shard"):
        search.fast_scores(run, shelf.Reader(folder), run.text_features(["a red square"]))
    build(run, d, folder)
    assert content(folder) == want
    # shards belong to their index.json
    was = json.loads(header.read_text())
    for change in ({"dtype": "int8"}, {"moments": 0.5}):
        header.write_text(json.dumps({**was, **change}))
        with pytest.raises(ValueError, match="the index is damaged: .*index.json"):
            shelf.Reader(folder)
        assert "(6 read" in build(run, d, folder)[1]
        header.unlink()
        assert "(6 read" in build(run, d, folder, moments=0.0, dtype="fp32")[1]
        assert content(folder) == want
    for key in ("dtype", "moments", "run"):
        header.write_text(json.dumps({k: v for k, v in was.items() if k != key}))
        for what in (lambda: shelf.Reader(folder), lambda: build(run, d, folder)):
            with pytest.raises(ValueError, match="delete the whole folder"):
                what()


def test_a_damaged_file_in_new_is_read_again(runs, tmp_path, monkeypatch):
    for i in range(3):
        grey(tmp_path / f"{i}.mp4", 8, first=9 * i)
    with monkeypatch.context() as m:
        m.setattr(shelf.Writer, "compact", lambda self: None)
        with contextlib.suppress(ValueError):
            build(runs["slq"], tmp_path)
    a, b, _ = sorted((tmp_path / ".nanotvr" / "new").iterdir())
    a.write_bytes(a.read_bytes()[:-4] + b"1234")
    b.write_bytes(b"")
    assert "(2 read, 0 changed, 0 moved, 0 deleted, 1 kept)" in build(runs["slq"], tmp_path)[1]


def test_an_empty_folder_changes_nothing(runs, tmp_path):
    d = tmp_path / "unmounted"
    d.mkdir()
    with pytest.raises(ValueError, match="holds no file with an extension of a video"):
        build(runs["mars"], d)
    assert not list(d.iterdir())


def test_two_writers_at_once_are_refused(tmp_path):
    header = {"format": 1, "run": {}, "moments": 0.0, "dtype": "fp32"}
    writer = shelf.Writer(str(tmp_path / "i"), header)

    def second():
        with pytest.raises(OSError, match="another process is writing the index"):
            shelf.Writer(str(tmp_path / "i"), header)

    assert os.waitpid(in_a_fork(second), 0)[1] == 0
    del writer


def test_readers_that_hang_or_die_cost_their_video_alone():
    def read(job):
        if job == "hangs":
            while True:
                time.sleep(1)
        if job == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if job == "fails":
            raise ValueError("it is\nno good")
        for i in range(3):
            yield job, i

    jobs = ["a", "dies", "b", "hangs", "c", "fails", "d", "dies"]
    got = list(search.read_all(jobs, read, 2, 1.0))
    for job in "abcd":
        assert [x for j, kind, x in got if j == job] == [(job, 0), (job, 1), (job, 2), None]
    bad = [(j, x) for j, kind, x in got if kind == "bad"]
    assert sorted(bad) == [("dies", "it ended its reader (exit -9)")] * 2 + [
        ("fails", "it is no good"), ("hangs", "its reader gave no sign of life for 1 s")]
    assert len([1 for _, kind, _ in got if kind != "piece"]) == len(jobs)


# -----------------------------------------------------------------------------
# moments and clips

def test_windows():
    assert moments.windows(30, 10) == [(0, 10), (5, 15), (10, 20), (15, 25), (20, 30)]
    assert moments.windows(12, 10) == [(0, 10), (2, 12)]  # the last one ends with the video
    assert moments.windows(10, 10) == moments.windows(3, 10) == moments.windows(30, 0) == []


def test_windows_hold_the_frames_of_their_time_and_the_video_is_decoded_once(tmp_path,
                                                                             monkeypatch):
    file, decoded = grey(tmp_path / "a.mp4", 100), []  # 10 s, frame i is on screen from i / 10 s
    real = moments.frames_of
    monkeypatch.setattr(moments, "frames_of", lambda p: [decoded.append(1) or f
                                                         for f in real(p) or []])
    got = []
    for start, end, frames, times in moments.pieces(file, 4, size=16, seconds=4.0):
        got.append((start, end, [number(f) for f in frames]))
        assert frames.shape == (4, 16, 16, 3)
        # a window's count from its start, to the last bit
        assert times == ([.5, 1.5, 2.5, 3.5, 4.0] if start is not None else
                         [1.2, 3.7, 6.2, 8.7, 10.0])
    # the middles of four seconds each: .5, 1.5, 2.5, 3.5 after the start
    assert got[:-1] == [(s, s + 4, [10 * s + 5, 10 * s + 15, 10 * s + 25, 10 * s + 35])
                        for s in (0, 2, 4, 6)]
    assert got[-1] == (None, 10.0, [12, 37, 62, 87])  # the whole, as read_frames samples it
    assert len(decoded) == 100


def test_a_windows_times_count_from_the_frame_that_is_on_screen_as_it_begins(tmp_path):
    # 2 frames a second, 7.5 s; windows of 3.3 s begin at 0, 1.65, 3.3 and 4.2 s: the frames on
    # screen then are those of 0, 1.5, 3 and 4 s
    file = grey(tmp_path / "a.mp4", 15, rate=2)
    got = list(moments.pieces(file, 3, size=16, seconds=3.3))
    # sampled .55, 1.65, 2.75 s after the start
    assert [times for *_, times in got] == [
        [.5, 1.5, 2.5, 3.3],    # .55, 1.65, 2.75
        [.5, 1.5, 2.5, 3.3],    # 2.2, 3.3, 4.4: frames of 2, 3 and 4 s
        [.5, 1.5, 3.0, 3.3],    # 3.85, 4.95, 6.05
        [.5, 1.5, 2.5, 3.3],    # 4.75, 5.85, 6.95
        [1.0, 3.5, 6.0, 7.5]]


def test_the_times_of_windows_and_queries_reach_the_prompt(tmp_path):
    path = make_family(tmp_path / "qwen3", "qwen3_vl")
    model = MARS(MARSConfig(backbone=path, num_slots=2, lora_r=2, num_frames=4),
                 backbones.load(path))
    cfg = SimpleNamespace(num_frames=4, sampler="uniform", frame_size=16, reader="pyav",
                          min_decoded=0.9)
    seen = []

    def texts(inputs):
        rows = model.backbone.tokenizer.batch_decode(torch.as_tensor(inputs["input_ids"]))
        return [re.findall("<[0-9.]+ seconds>", row) for row in rows]

    file = grey(tmp_path / "a.mp4", 100)
    for spans, inputs in search.piece_reader(SimpleNamespace(cfg=cfg, model=model), 4.0)(file):
        seen += zip(spans, texts(inputs))
    # the middle of two frames .5 and 1.5, 2.5 and 3.5 s after the window's start
    assert seen[:-1] == [((s, s + 4), ["<1.0 seconds>", "<3.0 seconds>"]) for s in (0, 2, 4, 6)]
    assert seen[-1] == ((None, 10.0), ["<2.5 seconds>", "<7.4 seconds>"])  # 1.2, 3.7, 6.2, 8.7
    run = SimpleNamespace(cfg=cfg, features=lambda side, samples: texts(
        model.collate(samples)[side]))
    assert search.Run.video_features(run, [file]) == [["<2.5 seconds>", "<7.4 seconds>"]]


def test_memory_stays_flat(tmp_path, monkeypatch):
    """Frames are dropped when no window needs them: alive at once are those of a few windows."""
    import weakref
    file, refs, most = grey(tmp_path / "a.mp4", 400), [], [0]

    class Frame(np.ndarray):  # an array that can be referred to weakly
        pass

    real = moments.resize

    def counting(*args):
        frame = real(*args).view(Frame)
        refs.append(weakref.ref(frame))
        most[0] = max(most[0], sum(r() is not None for r in refs))
        return frame

    monkeypatch.setattr(moments, "resize", counting)
    n = sum(1 for _ in moments.pieces(file, 4, size=16, seconds=2.0))
    assert n == 40 and len(refs) > 80 and most[0] < 20


def test_the_whole_is_the_same_with_and_without_moments(runs, videos, whole_index, tmp_path):
    build(runs["mars"], videos, tmp_path / "i")
    with_moments, without = shelf.Reader(whole_index[0]), shelf.Reader(tmp_path / "i")
    rows = with_moments.whole.nonzero()[:, 0]
    assert len(rows) == without.n == 9
    assert torch.equal(with_moments.take(rows)["slots"],
                       without.take(torch.arange(9))["slots"])  # to the bit


def test_a_damaged_video_keeps_the_windows_that_can_be_read(tmp_path):
    file = tmp_path / "a.mp4"
    grey(file, 100)
    with av.open(str(file)) as a, av.open(str(tmp_path / "b.mkv"), "w") as b:
        s = b.add_stream_from_template(a.streams.video[0])
        for p in a.demux(video=0):
            if p.size:
                p.stream = s
                b.mux(p)
    raw, file = (tmp_path / "b.mkv").read_bytes(), str(tmp_path / "c.mkv")
    Path(file).write_bytes(raw[:len(raw) * 7 // 10])
    with pytest.raises(BadVideo, match="s of 10.0 s decode, less than min_decoded=0.9"):
        list(moments.pieces(file, 4, size=16, seconds=4.0))
    got = list(moments.pieces(file, 4, size=16, seconds=4.0, min_decoded=0.5))
    whole, times = read_clip(file, 4, size=16, min_decoded=0.5)
    assert np.array_equal(got[-1][2], whole) and got[-1][3] == times
    assert got[0][:2] == (0, 4) and [number(f) for f in got[0][2]] == [5, 15, 25, 35]
    assert got[-1][0] is None and 4 < got[-1][1] < 9


def test_hits_are_moments_and_neighbours_are_one(runs, videos, whole_index):
    run, reader = runs["mars"], shelf.Reader(whole_index[0])
    query = run.video_features([str(videos / "long.mp4")])
    hits = search.search(run, reader, query, 50)
    scores = brute(run, reader, query)
    long = [h for h in hits if h["path"] == "long.mp4"]
    spans = [(h["start"], h["end"]) for h in long]
    assert all(b - a == 2 for a, b in spans) and 2 <= len(spans) <= 3  # never the whole
    assert all(abs(a - c) > 1 for i, (a, _) in enumerate(spans) for c, _ in spans[:i])
    mine = [r for r in range(reader.n) if reader.lines[reader.video[r]]["path"] == "long.mp4"]
    assert long[0]["score"] == scores[mine[:-1]].max().item()
    assert {h["path"] for h in hits} == GOOD  # videos without windows are there as they are
    whole = search.search(run, reader, query, 50, whole=True)
    assert len(whole) == 9 and whole[0]["path"] == "long.mp4"
    assert (whole[0]["start"], whole[0]["end"]) == (0, 6)
    assert whole[0]["score"] == scores[mine[-1]].item()


def test_cut_is_right_at_the_asked_times(tmp_path):
    file = grey(tmp_path / "a.mp4", 100, sound=True, stride=37)  # neighbours are far apart
    moments.cut(file, 3.2, 6.7, str(tmp_path / "b.mp4"))
    with av.open(str(tmp_path / "b.mp4")) as c:
        frames = [(f.time, number(f.to_ndarray(format="rgb24"))) for f in c.decode(video=0)]
        assert [t for t, _ in frames] == pytest.approx([i / 10 for i in range(35)], abs=1e-3)
        want = np.array([(32 + i) * 37 % 100 for i in range(35)])
        assert np.abs(np.array([x for _, x in frames]) - want).max() <= 1
        assert c.streams.audio and 3 < float(c.streams.audio[0].duration *
                                             c.streams.audio[0].time_base) < 3.8
    assert sorted(os.listdir(tmp_path)) == ["a.mp4", "b.mp4"]
    with pytest.raises(ValueError, match="has no frame between 20.00 s and 30.00 s"):
        moments.cut(file, 20, 30, str(tmp_path / "c.mp4"))
    assert sorted(os.listdir(tmp_path)) == ["a.mp4", "b.mp4"]


def test_stills_are_of_their_time(tmp_path):
    from PIL import Image
    file = grey(tmp_path / "a.mp4", 100)
    got = [number(np.asarray(Image.open(io.BytesIO(x))))
           for x in moments.stills(file, [0.0, 4.05, 8.05], 16)]
    assert np.abs(np.array(got) - [0, 40, 80]).max() <= 1
    (tmp_path / "x.mp4").write_text("x")
    assert moments.stills(str(tmp_path / "x.mp4"), [0.0]) == []


# -----------------------------------------------------------------------------
# the command line

def call(*args):
    """search.py with these arguments, in this process -> (exit code, stdout, stderr)"""
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = search.main(search.configured([str(a) for a in args]))
        except SystemExit as e:
            code = e.code
    return code, out.getvalue(), err.getvalue()


def test_words_and_settings_in_any_order():
    for argv, words, rest in (
            ("index --ckpt x V", ["index", "V"], ["--ckpt=x"]),
            ("--ckpt=x query V a -k 5", ["query", "V", "a"], ["--ckpt=x", "--k=5"]),
            ("page V a b -o f.html --why", ["page", "V", "a", "b"], ["--out=f.html", "--why"]),
            ("query V --json --exhaustive a", ["query", "V", "a"], ["--json", "--exhaustive"]),
            ("query V -- --not-a-flag -k", ["query", "V", "--not-a-flag", "-k"], []),
            ("query --help", ["query"], ["--help"]), ("query V --nope 3", ["query", "V", "3"],
                                                      ["--nope"])):
        assert search.split_words(argv.split()) == (words, rest)


@pytest.mark.parametrize("given", ["a red circle", [], [None], b"x"])
def test_from_python_one_gives_lists(runs, given):
    for ask, what in ((runs["mars"].text, "texts"), (runs["mars"].video, "paths of videos")):
        with pytest.raises(ValueError, match=f"give a list of {what}"):
            ask(given)


@pytest.mark.parametrize("argv, says", [
    ([], "must be one of index, query, page"), (["find", "."], "'find'"),
    (["index"], "wants a folder"), (["index", "nowhere"], "'nowhere'"),
    (["index", ".", "word"], "takes one folder"), (["query", "."], "wants a sentence"),
    (["query", ".", " "], "a query is blank"), (["query", ".", "--image", "x.png"], "x.png is no"),
    (["query", ".", "a", "-k", "0"], "k is 0"), (["index", ".", "--dtype", "fp16"], "dtype is 'fp"),
    (["index", ".", "--moments", "-1"], "moments is -1"),
    (["index", ".", "--moments", "0.0001"], "moments is 0.0001"),
    (["query", ".", "a", "--cut", __file__], "which is a file"),
    (["page", ".", "a", "-o", __file__], "no .html file"),
    (["query", ".", "a", "--ckpt", "nowhere"], "is no run folder"),
    (["page", ".", "a", "-o", "."], "is a folder"), (["query", ".", "a", "-x"], "'-x'"),
    (["query", ".", "a", "--momets", "3"], "did you mean 'moments'")])
def test_wrong_commands_are_one_sentence(argv, says):
    with pytest.raises((ValueError, OSError, SystemExit)) as e:
        search.configured(argv)
    assert says in str(e.value) and "\n" not in str(e.value)


def test_help_answers_at_once_whatever_stands_before():
    r = subprocess.run([sys.executable, ROOT / "search.py", "query", "x", "--help"],
                       capture_output=True, text=True, timeout=60)
    assert r.returncode == 0 and "--moments" in r.stdout and "page  --ckpt" in r.stdout


def test_index_query_and_cut_from_the_shell(ckpts, videos, tmp_path, monkeypatch):
    common = ["--ckpt", ckpts["pha"], "--index", tmp_path / "i", "--device", "cpu", videos]
    code, out, err = call("index", *common, "--moments", "2", "--num_workers", "1")
    assert code == 3 and "6 can't be read" in out and "\n  text.mp4: " in out
    assert "\n  new" not in out and "\udcff" not in out  # names that can't be printed are escaped
    code, out, err = call("query", *common, "a red square", "a blue circle", "-k", "3", "--why")
    assert code == 0 and out.count("individual x 1 ") == 6 and out.startswith("a red square\n  1  ")
    assert '"square" at 0:0' in out and "global x 0.1" in out
    code, out, err = call("query", *common, "--video", videos / "long.mp4", "--json", "-k", 2,
                          "--cut", tmp_path / "clips")
    found = json.loads(out)
    assert [h["rank"] for h in found[0]["hits"]] == [1, 2] and len(found) == 1
    best = found[0]["hits"][0]
    assert set(best) == {"rank", "score", "path", "start", "end"}
    assert len(os.listdir(tmp_path / "clips")) == 2
    with av.open(str(next((tmp_path / "clips").glob("01*")))) as c:
        n = sum(1 for _ in c.decode(video=0))
    assert n == round(10 * (best["end"] - best["start"]))
    # a picture
    from PIL import Image
    Image.new("RGB", (32, 32), (90, 90, 90)).save(tmp_path / "p.png")
    code, out, err = call("query", *common, "--image", tmp_path / "p.png", "-k", "1")
    assert code == 0 and len(out.splitlines()) == 2


def test_a_hit_that_changed_or_went_is_told(ckpts, tmp_path):
    d = tmp_path / "v"
    d.mkdir()
    for i in range(3):
        grey(d / f"{i}.mp4", 8, first=9 * i)
    common = ["--ckpt", ckpts["mars"], "--device", "cpu", d]
    assert call("index", *common)[0] == 0
    os.utime(d / "0.mp4", ns=(1, 1))
    (d / "1.mp4").unlink()
    _, out, _ = call("query", *common, "a red square")
    notes = {x.split()[2]: x.partition("(")[2] for x in out.splitlines()[1:]}
    assert notes == {"0.mp4": "changed since it was indexed)", "2.mp4": "",
                     "1.mp4": "gone since it was indexed)"}


# -----------------------------------------------------------------------------
# the page

class Tags(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.words = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.words.append(data)


EVIL = ['<script>alert(1)</script>.mp4', '"><img src=x onerror=alert(2)>.mp4',
        "' onload='alert(3)#t=9?x=%20&amp;.mp4", "javascript:alert(4).mp4", "a\u202eb\nc.mp4"]


def evil_page(folder):
    """A page of clips with names that would do something, at 1.5 s of 3 s each."""
    hits = []
    for n, name in enumerate(EVIL):
        file = folder / "v" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        grey(file, 30, first=5 * n)
        hits.append({"path": name, "full": str(file), "start": 1.5, "end": 2.5, "score": 0.5,
                     "note": "", "why": {"parts": [("slot <1>", 0.25)],
                                         "matches": [("<b>w</b>", 1.75, 0.5)]}})
    page.write_hits(str(folder / "hits.html"), [("</h2><script>alert(5)</script>", hits)], "<root>")
    return folder / "hits.html"


def test_the_page_escapes_all_that_comes_from_outside(tmp_path):
    from urllib.parse import unquote, urlsplit
    text = evil_page(tmp_path).read_text(encoding="utf-8")
    parsed = Tags(text)
    used = {tag for tag, _ in parsed.tags}
    assert used == {"html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "div", "b",
                    "span", "video", "img"}
    assert not [k for _, attrs in parsed.tags for k in attrs if k.startswith("on")]
    clips = [attrs for tag, attrs in parsed.tags if tag == "video"]
    for attrs, name in zip(clips, EVIL):
        url = urlsplit(attrs["src"])
        assert url.scheme == url.netloc == url.query == "" and url.fragment == "t=1.500,2.500"
        assert unquote(url.path) == f"./v/{name}"
        assert attrs["poster"].startswith("data:image/jpeg;base64,")
    pictures = [attrs["src"] for tag, attrs in parsed.tags if tag == "img"]
    assert len(pictures) == 4 * len(EVIL) and all(x.startswith("data:") for x in pictures)
    assert {"</h2><script>alert(5)</script>", "in <root>", "slot <1>"} <= set(parsed.words)
    assert "1. <script>alert(1)</script>.mp4" in parsed.words
    assert "5. a\\u202eb\\nc.mp4" in parsed.words
    assert "http" not in text.replace('http-equiv', '')
    assert "width:25.0%" in text and "prefers-color-scheme: dark" in text


def chromium():
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
                None)


class Browser:
    """A headless Chromium, spoken to through a pipe in its debugging protocol."""

    def __init__(self, folder):
        down, self.to = os.pipe()
        self.source, up = os.pipe()
        self.rest, self.n, self.events = b"", 0, []

        def wire():  # it listens on 3 and answers on 4
            a, b = os.dup(down), os.dup(up)
            a, b = (os.dup2(x, y) for x, y in ((a, 103), (b, 104)))
            os.dup2(a, 3)
            os.dup2(b, 4)

        self.process = subprocess.Popen(
            [chromium(), "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
             "--remote-debugging-pipe", f"--user-data-dir={folder}", "about:blank"],
            preexec_fn=wire, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(down)
        os.close(up)
        self.session = None
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self.session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime"):
            self(f"{domain}.enable")

    def __call__(self, method, **params):
        self.n += 1
        message = {"id": self.n, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.rest:
                more = os.read(self.source, 2 ** 16)
                assert more, "the browser is gone"
                self.rest += more
            one, self.rest = self.rest.split(b"\0", 1)
            one = json.loads(one)
            if one.get("id") == self.n:
                return one["result"]
            self.events.append(one)

    def value(self, script):
        return self("Runtime.evaluate", expression=script, awaitPromise=True,
                    returnByValue=True)["result"]["value"]


SEEN = """(async () => {
  const seen = [];
  for (const v of document.querySelectorAll("video")) {
    for (let i = 0; i < 100 && !(v.readyState && v.currentTime); i++)
      await new Promise(f => setTimeout(f, 50));
    seen.push([v.currentTime, v.error && v.error.message]);
  }
  return {seen, scripts: document.scripts.length, wide: document.documentElement.scrollWidth,
          broken: [...document.images].filter(i => !i.naturalWidth).length,
          back: getComputedStyle(document.body).backgroundColor};
})()"""


@pytest.mark.skipif(not chromium(), reason="no Chromium here")
def test_the_page_in_a_browser(tmp_path):
    """Videos stand at their time, names do nothing, nothing is fetched, it fits a phone."""
    file, browser = evil_page(tmp_path), Browser(tmp_path / "profile")
    try:
        looks = []
        for width, scheme in ((1280, "light"), (390, "dark")):
            browser("Emulation.setDeviceMetricsOverride", width=width, height=800, mobile=False,
                    deviceScaleFactor=1)
            browser("Emulation.setEmulatedMedia",
                    features=[{"name": "prefers-color-scheme", "value": scheme}])
            browser("Page.navigate", url=file.as_uri())
            for _ in range(100):
                if browser.value("document.readyState + document.querySelectorAll('video').length"
                                 ) == f"complete{len(EVIL)}":
                    break
                time.sleep(0.1)
            got = browser.value(SEEN)
            assert got["seen"] == [[1.5, None]] * len(EVIL)
            assert got["scripts"] == got["broken"] == 0 and got["wide"] <= width
            looks.append(got["back"])
        assert looks[0] != looks[1]
        urls = [e["params"]["request"]["url"] for e in browser.events
                if e["method"] == "Network.requestWillBeSent"]
        assert urls and all(u.startswith(("file:", "data:")) for u in urls)
        assert not [e for e in browser.events if e["method"] == "Page.javascriptDialogOpening"]
    finally:
        browser.process.kill()
        browser.process.wait()


def test_failures_of_an_evaluation_by_hand(tmp_path):
    items = [Item(f"v{i}", f"v{i}.mp4", c) for i, c in enumerate(
        (["a", "b <i>"], ["c"], ["unread"], ["d"]))]
    S = torch.tensor([[.9, .1, .2], [.3, .8, .4], [.1, .5, .5], [.2, .1, .9]])
    # a: right. b: .8 and .4 beat .3, rank 3. c: ties with d's, rank 1.5. d: right
    got = evaluation.failures(S, torch.tensor([0, 0, 1, 2]), [0, 1, 3], items)
    assert [(f["caption"], f["rank"]) for f in got] == [("b <i>", 3), ("c", 1.5)]
    assert [x[0] for x in got[0]["before"]] == ["v1", "v3"] and got[0]["true"][1] == "v0.mp4"
    assert [x[0] for x in got[1]["before"]] == ["v3"]
    for i in range(4):
        grey(tmp_path / f"v{i}.mp4", 8)
    cfg = SimpleNamespace(video_root=str(tmp_path), data="")
    found = {"S": S, "owner": torch.tensor([0, 0, 1, 2]), "kept": [0, 1, 3]}
    evaluation.write_report(str(tmp_path / "r.html"), found, items, cfg, "test")
    words = Tags((tmp_path / "r.html").read_text()).words
    assert "b <i>" in words and "its video is at rank 3" in words
    assert "split test: 2 of 4 captions, here are the 2 whose video ranks worst" in words
