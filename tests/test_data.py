"""
data.py against small files made here, hand numbers and invariances (frames: tests/test_video.py).
"""
import collections
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from clips import indices

import data
import video

ROOT = Path(__file__).parents[1]


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
    when = {"id0": [.48, 1.48, 2.48, 3.48, 4.0], "id1": [0.0, .04, .04, .08, .12]}  # at 25 a second
    assert [s.times for s in (*got, *videos)] == [when[s.id] for s in (*got, *videos)]


def list_of(samples):
    return samples


@pytest.mark.parametrize("workers", [0, 2])
def test_skip_replaces_counts_and_names_each_bad_file_once(files, workers, tmp_path, capfd):
    items = items_of("ok.mp4", "zero.mp4", "text.mp4", "three.mp4", "truncated.mp4", "audio.mp4")
    pairs = data.Pairs(items, files, 4, on_bad_video="skip", bad_list=str(tmp_path / "bad.tsv"))
    batches = [[i, (i + 1) % 12] for i in range(12)] * 2
    got = list(data.make_loader(pairs, batches, list_of, workers))
    # pairs 2-5 belong to unreadable videos: 6 and 7 are of the next; 8 to 11 go round to 0 and 1
    stands_in = [0, 1, 6, 7, 6, 7, 6, 7, 0, 1, 0, 1]
    for batch, index in zip(got, batches):
        for sample, i in zip(batch, index):
            assert sample.caption == pairs[stands_in[i]].caption and sample.frames.max() > 0
    said = capfd.readouterr().err
    for name in ("zero.mp4", "text.mp4", "audio.mp4", "truncated.mp4"):
        assert sum(name in line for line in said.splitlines()) == 1, said
    assert pairs.clips.skipped() == ["id1", "id2", "id4", "id5"]
    rows = [line.split("\t") for line in (tmp_path / "bad.tsv").read_text().splitlines()]
    assert sorted(r[:3] for r in rows) == [["skipped", f"id{i}", items[i].video]
                                           for i in (1, 2, 4, 5)]
    assert "of 100 frames decode" in dict((r[1], r[3]) for r in rows)["id4"]
    again = data.Pairs(items, files, 4, on_bad_video="skip", bad_list=str(tmp_path / "bad.tsv"))
    again[2]  # a run that is resumed meets them anew, and lists them once
    assert len((tmp_path / "bad.tsv").read_text().splitlines()) == 4


def test_a_partial_video_is_used_if_that_is_allowed_and_listed_as_partial(files, tmp_path, capfd):
    clips = data.Videos(items_of("truncated.mp4"), files, 4, min_decoded=0.5,
                        bad_list=str(tmp_path / "bad.tsv"))
    assert len(clips[0].frames) == 4 and clips[0].error is None and clips.clips.skipped() == []
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and "truncated.mp4 is partial: 59 of 100 frames decode" in said
    assert (tmp_path / "bad.tsv").read_text() \
        == "partial\tid0\ttruncated.mp4\t59 of 100 frames decode\n"


@pytest.mark.parametrize("workers", [0, 2])
def test_training_goes_on_past_a_reader_that_hangs(files, monkeypatch, workers, capfd):
    """In a loader with or without workers; one that spins in C, which no signal handler ends."""
    real = video.decode
    monkeypatch.setattr(video, "decode", lambda path, *how: sum(range(10 ** 15))
                        if path.endswith("pic.mp4") else real(path, *how))
    items = items_of("ok.mp4", "pic.mp4", "three.mp4")
    pairs = data.Pairs(items, files, 4, on_bad_video="skip", video_timeout=2.5)
    begun = time.time()
    got = list(data.make_loader(pairs, [[0, 2], [3, 4], [2, 5]], list_of, workers))
    assert [[s.id for s in batch] for batch in got] == [["id0", "id2"], ["id2"] * 2, ["id2"] * 2]
    assert pairs.clips.skipped() == ["id1"] and time.time() - begun < 30
    assert "pic.mp4: it is not read after video_timeout=2.5 s" in capfd.readouterr().err


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
    source, cache = tmp_path / "v.mp4", tmp_path / "cache" / "deep"
    source.write_bytes((files / "ok.mp4").read_bytes())
    count = collections.Counter()
    real = video.decode

    def counting(path, *how):
        count["decoded"] += 1
        return real(path, *how)

    monkeypatch.setattr(video, "decode", counting)

    def frames(**how):
        how = {"num_frames": 4, "size": 24, "min_decoded": 0.5, "video_timeout": 0, **how}
        sample = data.Videos(items_of("v.mp4"), tmp_path, frame_cache=str(cache), **how)[0]
        if how["num_frames"] == 4 and "sampler" not in how and not count["other"]:
            assert sample.times == [.48, 1.48, 2.48, 3.48, 4.0]
        return sample.frames

    want = frames()
    assert np.array_equal(frames(), want) and count["decoded"] == 1
    file, = cache.iterdir()
    whole = file.read_bytes()
    # cut inside the frames; before the times, as in files of another format; inside the times
    for broken in (whole[:-1000], whole[:128 + want.nbytes], whole[:-20], b"", b"junk"):
        file.write_bytes(broken)
        assert np.array_equal(frames(), want)
    assert count["decoded"] == 6 and np.array_equal(frames(), want) and count["decoded"] == 6
    frames(num_frames=5), frames(size=0), frames(sampler="linspace")
    assert count["decoded"] == 9 and len(list(cache.iterdir())) == 4
    os.utime(source, ns=(1, 1))
    frames()
    assert count["decoded"] == 10
    count["other"] = 1
    source.write_bytes((files / "truncated.mp4").read_bytes())  # partial: named anew in every run
    frames(), frames()
    assert count["decoded"] == 12


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
# python data.py check

BAD = {"zero.mp4": "empty (0 bytes)", "text.mp4": "no video", "audio.mp4": "only audio",
       "no_index.mp4": "cut off before its index", "gone.mp4": "no such file"}
PART = {"truncated.mp4": "59 of 100", "stopped.mp4": "60 of 100", "truncated.mkv": "decode",
        "corrupt.mp4": "of 100 frames", "damaged.mkv": "99 of 100"}
FINE = {"ok.mp4", "av1.mkv", "one.mp4", "edit.mp4", "image.jpg"}


@pytest.fixture
def folder(files, tmp_path):
    """A data set with every broken kind."""
    (tmp_path / "videos").symlink_to(files)
    write(tmp_path / "train.jsonl", *(row(v, v) for v in [*BAD, *PART]))
    write(tmp_path / "test.jsonl", *(row(v, v) for v in FINE), row("again", "one.mp4"))
    return tmp_path


def test_check_tells_readable_partial_and_broken_apart(folder, capsys):
    assert data.main(["check", "--data", str(folder), "--workers=2"]) == 1
    rows = [json.loads(line) for line in (folder / "check.jsonl").read_text().splitlines()]
    state = {os.path.basename(r["path"]): r["state"] for r in rows}
    assert state == {**dict.fromkeys(BAD, "broken"), **dict.fromkeys(PART, "partial"),
                     **dict.fromkeys(FINE, "readable")}
    for r in rows:
        name = os.path.basename(r["path"])
        assert {**BAD, **PART}.get(name, "") in (r["why"] or "")
        if name == "ok.mp4":
            assert (r["codec"], r["width"], r["height"], r["frames"], r["seconds"], r["fps"]) \
                == ("h264", 64, 48, 100, 4.0, 25.0)
    text = (folder / "check.txt").read_text()
    assert text in capsys.readouterr().out
    # of damaged.mkv one frame in a hundred is lost: it is used
    assert "15 videos, 5 readable, 5 partial, 5 broken; 9 are refused (min_decoded=0.9)" in text
    assert "codec: h264 8, libdav1d 1, mjpeg 1" in text and "seconds" in text and "####" in text


def test_check_goes_on_where_it_was_killed_and_tries_changed_files_anew(folder, monkeypatch):
    monkeypatch.setattr(sys, "stdout", open(os.devnull, "w"))
    asked = []
    real = video.Process.ask
    monkeypatch.setattr(video.Process, "ask", lambda self, name, path: (
        asked.append(os.path.basename(path)), real(self, name, path)))
    data.main(["check", "--data", str(folder)])
    first, report = (folder / "check.jsonl").read_text(), (folder / "check.txt").read_text()
    assert len(asked) == 15
    lines = first.splitlines(True)
    (folder / "check.jsonl").write_text("".join(lines[:10]) + lines[10][:30])
    asked.clear()
    data.main(["check", "--data", str(folder)])
    assert len(asked) == 5 and (folder / "check.txt").read_text() == report
    asked.clear()
    data.main(["check", "--data", str(folder)])
    assert not asked
    lines = [line.replace('"stamp": [', '"stamp": [1') if "ok.mp4" in line else line
             for line in (folder / "check.jsonl").read_text().splitlines(True)]
    (folder / "check.jsonl").write_text("".join(lines))
    data.main(["check", "--data", str(folder)])
    assert asked == ["ok.mp4"] and (folder / "check.txt").read_text() == report


def test_check_ends_a_reader_that_hangs_and_takes_a_folder_without_annotations(
        files, tmp_path, monkeypatch, capsys):
    for name in ("one.mp4", "three.mp4", "wide.mp4"):
        (tmp_path / name).write_bytes((files / name).read_bytes())
    (tmp_path / "notes.txt").write_text("no video")
    real = video.examine
    monkeypatch.setattr(video, "examine", lambda path: sum(range(10 ** 15))
                        if "three" in path else real(path))
    rows, refused = data.check(str(tmp_path), workers=2, video_timeout=2.5)
    assert [(r["state"], r["path"]) for r in rows if r["state"] != "readable"] \
        == [("broken", str(tmp_path / "three.mp4"))] and len(rows) == 3 and refused == 1
    assert "three.mp4: it is not read after video_timeout=2.5 s" in capsys.readouterr().out


def test_check_finds_data_by_name_and_is_one_line_when_there_is_none(tmp_path):
    (tmp_path / "data" / "mine" / "videos").mkdir(parents=True)
    write(tmp_path / "data" / "mine" / "val.jsonl", row())
    how = dict(cwd=tmp_path, capture_output=True, text=True)
    done = subprocess.run([sys.executable, ROOT / "data.py", "check", "--data", "mine"], **how)
    assert done.returncode == 1 and "broken: data/mine/videos/a.mp4: no such file" in done.stdout
    done = subprocess.run([sys.executable, ROOT / "data.py", "check", "--data=none"], **how)
    assert done.returncode == 1 and done.stderr == \
        "error: data 'none' is no folder, and there is no data/none either\n"
