"""
The demo data against what its captions and its documentation promise. CPU, no network.

The reader of captions here is written by hand from the words, not from prepare.py's tables.
"""
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import av
import numpy as np
import pytest

DEMO = Path(__file__).parents[1] / "data" / "demo"
sys.path.insert(0, str(DEMO))
import prepare  # noqa: E402


@pytest.fixture(scope="module")
def records():
    return prepare.splits(1337, 3000, 200, 500)


def events(record):
    return tuple(tuple(event) for event in record["events"])


# word -> meaning, by hand; words that are not here ("moves", "to", "in", "place") tell nothing
MEANING = {
    "small": "small", "little": "small", "tiny": "small", "large": "large", "big": "large",
    "huge": "large", "violet": "purple", "disc": "circle", "box": "square", "plus": "cross",
    "hoop": "ring", "rises": "up", "rising": "up", "climbs": "up", "climbing": "up",
    "sinks": "down", "sinking": "down", "drops": "down", "dropping": "down", "grows": "grow",
    "growing": "grow", "bigger": "grow", "expands": "grow", "expanding": "grow",
    "shrinks": "shrink", "shrinking": "shrink", "smaller": "shrink", "contracts": "shrink",
    "contracting": "shrink", "spins": "spin", "spinning": "spin", "rotates": "spin",
    "rotating": "spin", "turns": "spin", "turning": "spin", "stays": "still", "staying": "still",
    "not": "still", "rests": "still", "resting": "still", "left": "left", "leftwards": "left",
    "right": "right", "rightwards": "right", "up": "up", "down": "down"}
MEANING |= {w: w for w in ("red green blue yellow purple orange white circle square triangle star "
                           "cross ring").split()}


def read(sentence):
    """The two events of a caption in order of time, by the words alone."""
    words = sentence.replace(",", "").split()
    found, at = [[], []], -1
    for word in words:
        at += word == "a"
        if word in MEANING:
            found[at].append(MEANING[word])
    parts = [tuple(f) for f in found]  # size, colour, shape, motion is the order of the words too
    # "Y after X", "Y, but first X" and "before Y, X" tell the later event first
    later_first = sentence.startswith("before") or (" after " in sentence) \
        or (", but first " in sentence)
    return (parts[1], parts[0]) if later_first else tuple(parts)


def test_captions_tell_the_two_events_in_their_order(records):
    for split in records.values():
        for r in split:
            assert len(set(r["captions"])) == 2
            for sentence in r["captions"]:
                assert read(sentence) == events(r), sentence


def test_no_pair_of_events_of_test_or_val_is_in_another_split_or_in_pretraining(records):
    pairs = {k: {frozenset(events(r)) for r in split} for k, split in records.items()}
    assert not pairs["test"] & pairs["train"]
    assert not pairs["test"] & pairs["val"]
    assert not pairs["val"] & pairs["train"]
    # what pretrain.py keeps away from, and that it does so
    taken = prepare.held_out()
    assert {frozenset(p) for p in taken} == pairs["test"] | pairs["val"]
    few = prepare.random_clips(3000, np.random.default_rng(0), taken)
    assert not {frozenset(c) for c in few} & (pairs["test"] | pairs["val"])


def test_random_clips_skip_what_is_taken():
    # the first clips drawn are declared taken: none of them, in neither order, may come out again
    first = prepare.random_clips(50, np.random.default_rng(3), ())
    taken = {prepare.unordered(c) for c in first}
    again = prepare.random_clips(50, np.random.default_rng(3), taken)
    assert not {frozenset(c) for c in first} & {frozenset(c) for c in again}


def test_no_two_clips_of_a_gallery_mean_the_same(records):
    for split in records.values():
        assert len({events(r) for r in split}) == len(split)
    assert [len(records[k]) for k in ("train", "val", "test")] == [3000, 200, 500]


@pytest.mark.parametrize("split, n", [("train", 3000), ("val", 200), ("test", 500)])
def test_the_galleries_are_adversarial(records, split, n):
    test = records[split]
    gallery = {events(r): r for r in test}
    kinds = Counter(r["kind"] for r in test)
    assert kinds["base"] == kinds["order"] == kinds["colour"] == kinds["motion"] >= n * 0.22
    assert sum(kinds.values()) == n
    bag = lambda clip: Counter(word for event in clip for word in event)
    reverse = {"left": "right", "up": "down", "grow": "shrink"}
    reverse |= {b: a for a, b in reverse.items()}
    for r in test:
        if r["kind"] != "base":
            continue
        first, second = events(r)
        family = {x["kind"]: events(x) for x in test if x["family"] == r["family"]}
        assert family["order"] == (second, first)
        # colours exchanged, nothing else; the same bag of words as the base clip
        assert family["colour"] == ((first[0], second[1], *first[2:]),
                                    (second[0], first[1], *second[2:]))
        assert bag(family["order"]) == bag(family["colour"]) == bag((first, second))
        changed = [(a, b) for a, b in zip(family["motion"], (first, second)) if a != b]
        assert len(changed) == 1
        (a, b), = changed
        assert a[:3] == b[:3] and a[3] == reverse[b[3]]
        assert all(clip in gallery for clip in family.values())


def decoded(path):
    with av.open(str(path)) as container:
        assert container.streams.video[0].codec_context.name == "h264"
        return np.stack([f.to_ndarray(format="rgb24") for f in container.decode(video=0)])


def run(out, *more):
    return subprocess.run(
        [sys.executable, str(DEMO / "prepare.py"), "--out", str(out), "--train", "3", "--val", "2",
         "--test", "5", *more], check=True, capture_output=True, text=True)


@pytest.mark.parametrize("argument, says", [
    ("--train=-1", "prepare.py: --train is -1, the least is 1"),
    ("--val=0", "prepare.py: --val is 0, the least is 1"),
    ("--test=-2", "prepare.py: --test is -2, the least is 1"),
    ("--seed=-1", "prepare.py: --seed is -1, the least is 0"),
    ("--processes=0", "prepare.py: --processes is 0, the least is 1")])
def test_a_count_that_makes_no_sense_is_one_line(argument, says, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["prepare.py", f"--out={tmp_path}", argument])
    monkeypatch.setattr(prepare, "splits", lambda *args: pytest.fail("went on"))
    with pytest.raises(SystemExit) as e:
        prepare.main()
    assert e.value.code == says and not list(tmp_path.iterdir())


def test_two_runs_give_the_same_frames_and_captions_and_a_third_does_nothing(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    run(a)
    run(b, "--processes", "1")
    names = sorted(p.name for p in (a / "videos").glob("*.mp4"))
    assert len(names) == 10
    for name in names:
        x, y = (decoded(d / "videos" / name) for d in (a, b))
        assert x.shape == (24, 96, 96, 3)
        assert x.tobytes() == y.tobytes()
    for split in ("train", "val", "test"):
        text = (a / f"{split}.jsonl").read_text()
        assert text == (b / f"{split}.jsonl").read_text()
        for line in text.splitlines():
            record = json.loads(line)
            assert (a / "videos" / record["video"]).is_file() and len(record["captions"]) == 2
    assert not list(a.rglob("*.tmp"))

    times = {p: p.stat().st_mtime_ns for p in a.rglob("*") if p.is_file()}
    assert "already rendered" in run(a).stdout
    assert times == {p: p.stat().st_mtime_ns for p in a.rglob("*") if p.is_file()}
    (a / "videos" / names[0]).unlink()  # a clip is missing: it comes back
    run(a)
    assert (a / "videos" / names[0]).is_file()
    run(a, "--seed", "7")               # another seed is another data set
    assert (a / "test.jsonl").read_text() != (b / "test.jsonl").read_text()


def centre(picture, background):
    """Middle and area of what differs from the background, in pixels."""
    y, x = np.nonzero(np.abs(picture.astype(int) - background).max(-1) > 60)
    return x.mean(), y.mean(), len(x)


@pytest.mark.parametrize("motion, what, sign", [
    ("left", 0, -1), ("right", 0, 1), ("up", 1, -1), ("down", 1, 1), ("grow", 2, 1),
    ("shrink", 2, -1), ("still", 0, 0), ("still", 1, 0), ("still", 2, 0), ("spin", 0, 0)])
def test_a_motion_is_what_the_pixels_do(motion, what, sign):
    clip = (("large", "white", "star", motion), ("small", "red", "circle", "still"))
    for seed in range(5):
        video = prepare.render(clip, [seed, 1])
        ground = video[-1].astype(int)  # the second event's last frame: mostly background
        ground[:] = np.median(video.reshape(-1, 3), 0)
        early, late = centre(video[0], ground), centre(video[10], ground)
        moved = late[what] - early[what]
        if sign:
            assert moved * sign > (15 if what < 2 else 200), (motion, seed, early, late)
        else:
            assert abs(moved) < (4 if what < 2 else 0.1 * early[2]), (motion, seed, early, late)


def test_size_colour_order_and_single_frames():
    clip = (("small", "red", "square", "still"), ("large", "green", "ring", "still"))
    video = prepare.render(clip, 5)
    assert video.shape == (24, 96, 96, 3) and video.dtype == np.uint8
    brightest = lambda picture: picture.reshape(-1, 3).max(0) - np.median(picture.reshape(-1, 3), 0)
    assert brightest(video[2]).argmax() == 0 and brightest(video[-3]).argmax() == 1  # red, green
    kept = prepare.render(clip, 5, keep=[1, 13])
    assert (kept == video[[1, 13]]).all()
    # where script() says that the object is, there is its colour
    for f in (1, 20):
        k, x, y, *_ = prepare.script(clip, 5)[f]
        assert k == (f > 12)
    k, x, y, *_ = prepare.script(clip, 5)[1]
    pixel = video[1, int(y * 96), int(x * 96)].astype(int)
    assert pixel[0] > 150 and pixel[1] < 90 and pixel[2] < 90


# ---- pretrain.py -------------------------------------------------------------------------------

def test_read_caption_is_the_inverse_of_caption():
    import pretrain
    rng = np.random.default_rng(0)
    for i in range(400):
        clip = prepare.random_clip(rng)
        sentence = prepare.caption(clip, rng, i % len(prepare.PATTERNS))
        assert pretrain.read_caption(sentence) == clip == read(sentence)
        assert pretrain.read_caption(pretrain.plain(clip, 2)) == clip
    assert pretrain.read_caption("a small red circle grows") is None
    assert pretrain.read_caption("") is None


def test_bottleneck_mask_against_a_literal_loop():
    import torch
    import pretrain
    # 2 items of 9 and 7 tokens, the answers start at 6 and 5; width 2
    there = torch.tensor([[1] * 9, [1] * 7 + [0] * 2])
    first, squeeze = torch.tensor([6, 5]), torch.tensor([True, False])
    for flip in (False, True):
        mask = pretrain.bottleneck_mask(there, first, squeeze ^ flip, width=2)
        for b in range(2):
            for i in range(int(there[b].sum())):
                for j in range(9):
                    sees = j <= i and bool(there[b, j])
                    if bool(squeeze[b]) != flip and i >= first[b] and j < first[b] - 2:
                        sees = False
                    assert (mask[b, 0, i, j] == 0) == sees, (b, i, j)
    # padding on the left: a row of padding sees nothing and must not turn into NaN
    mask = pretrain.bottleneck_mask(there.flip(1), torch.tensor([9, 9]), squeeze)
    assert torch.isfinite(torch.softmax(mask, -1)).all()


def test_clip_texts_are_true_of_their_frames():
    import pretrain
    rng = np.random.default_rng(1)
    assert pretrain.where(0.5, 0.5) == "in the middle"
    assert pretrain.where(0.2, 0.2) == "at the top left"
    assert pretrain.where(0.8, 0.5) == "on the right"
    assert pretrain.where(0.5, 0.9) == "at the bottom"
    seen = Counter()
    for _ in range(300):
        clip = prepare.random_clip(rng)
        k = int(rng.integers(2))
        text, level = pretrain.frame_text(clip, (0.2, 0.8), k, rng)
        seen[level] += 1
        if level == 3:
            assert read(text) == clip
            continue
        told = [MEANING[w] for w in text.split("a picture of ")[-1].split() if w in MEANING]
        assert tuple(told[:3]) == clip[k][:3]
        assert ("at the bottom left" in text) == (level == 1)
    assert set(seen) == {0, 1, 2, 3}


# ---- the committed backbones -------------------------------------------------------------------

BACKBONES = DEMO / "backbones"


def test_the_backbones_are_small():
    size = sum(p.stat().st_size for p in BACKBONES.rglob("*") if p.is_file())
    assert size < 8e6, f"{size / 1e6:.1f} MB"
    assert not list(BACKBONES.rglob("*.tmp"))


def test_tiny_qwen2_vl_captions_real_files(tmp_path):
    import torch
    import backbones
    import data
    import pretrain
    backbone = backbones.load(str(BACKBONES / "tiny-qwen2-vl"), dtype=torch.float32)
    config, tokenizer = backbone.model.config, backbone.tokenizer
    for key, token in (("image_token_id", "<|image_pad|>"), ("video_token_id", "<|video_pad|>"),
                       ("vision_start_token_id", "<|vision_start|>"),
                       ("vision_end_token_id", "<|vision_end|>")):
        assert getattr(config, key) == tokenizer.convert_tokens_to_ids(token), key
        assert tokenizer(token).input_ids == [getattr(config, key)]
    assert tokenizer.decode(tokenizer("Übung 3: ein Kreis!").input_ids) == "Übung 3: ein Kreis!"
    # new clips, through the codec and data.py: the pretrained model must see what they show
    clips = prepare.random_clips(25, np.random.default_rng(99), ())
    frames = []
    for i, clip in enumerate(clips):
        prepare.write_mp4(tmp_path / f"{i}.mp4", prepare.render(clip, [99, i]))
        frames.append(data.read_frames(str(tmp_path / f"{i}.mp4"), 8))
    found = pretrain.accuracy(backbone, clips, "frames", frames, True)
    # by chance 1/2, 1/7, 1/6, 1/8
    for name, least in (("size", 0.85), ("colour", 0.85), ("shape", 0.5), ("motion", 0.7)):
        assert found[name] >= least, found
    texts = [prepare.caption(clip, np.random.default_rng(i)) for i, clip in enumerate(clips)]
    found = pretrain.accuracy(backbone, clips, "captions", texts, False)
    for name, least in (("size", 0.85), ("colour", 0.85), ("shape", 0.7), ("motion", 0.5)):
        assert found[name] >= least, found


def test_tiny_clip_finds_the_frame_of_a_text():
    import torch
    import torch.nn.functional as F
    from transformers import AutoTokenizer, CLIPModel
    folder = BACKBONES / "tiny-clip"
    model = CLIPModel.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = model.config.text_config
    # pooling at eos_token_id and pooling at the largest id (old checkpoints) are the same
    assert text.eos_token_id == tokenizer.eos_token_id == len(tokenizer) - 1 != 2
    ids = tokenizer("A small red circle").input_ids
    assert ids[0] == text.bos_token_id and ids[-1] == text.eos_token_id and len(ids) == 6
    pre = json.loads((folder / "preprocessor_config.json").read_text())
    mean, std = (torch.tensor(pre[k]).view(3, 1, 1) for k in ("image_mean", "image_std"))
    side = pre["crop_size"]["height"]
    objects = [(s, c, h) for s in prepare.SIZES for c in prepare.COLOURS for h in prepare.SHAPES]
    frames = [prepare.render(((*o, "still"), (*o, "still")), [5, i], keep=[0])[0]
              for i, o in enumerate(objects)]
    pixels = torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2)
    pixels = F.interpolate(pixels, (side, side), mode="bicubic", antialias=True) / 255
    words = tokenizer([f"a {s} {c} {h}" for s, c, h in objects], padding=True, return_tensors="pt")
    with torch.no_grad():
        S = model(pixel_values=(pixels - mean) / std, **words).logits_per_text
    right = (S.argmax(1) == torch.arange(len(objects))).float().mean()
    assert right > 0.5, f"{right:.2f} of 84 objects found, chance is 0.01"
