"""
Small sets in the published layouts (tests/tasks), scored by a model that counts colours: what it
gives was worked out by hand. Then ranks against a literal loop, files that are not as they should
be, and the script on a tiny MARS.

python -m pytest tests/test_eval_tasks.py -v
"""
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import eval as E
import eval_tasks as ET
import tasks as T
from data import BadVideo

pytest.importorskip("pyarrow", reason="parquet files need it")
pytest.importorskip("PIL", reason="drawn captions need it")
ROOT = Path(__file__).parents[1]
SETS = ROOT / "tests/tasks"
COLORS = dict(red=(1, 0, 0), green=(0, 1, 0), blue=(0, 0, 1), yellow=(1, 1, 0), cyan=(0, 1, 1))


class Colors(torch.nn.Module):
    """An item is the sum of its picture's RGB and of the colours that its text names."""

    def __init__(self, first=1.0):
        super().__init__()
        self.first, self.prompts, self.n = first, {}, 0        # first: weight of a text's first one

    def collate_prompt(self, samples, prompt):
        self.n += len(samples)
        self.prompts.setdefault(prompt, []).extend(samples)
        z = torch.zeros(len(samples), 3)
        for i, s in enumerate(samples):
            if "<video>" in prompt:
                assert s.frames.shape[0] == 1 and s.frames.dtype == np.uint8
                z[i] += torch.tensor(s.frames).float().mean((0, 1, 2)) / 255
            if "{caption}" in prompt:
                words = [w.strip(".,?!:\"").lower() for w in s.caption.split()]
                for n, word in enumerate(w for w in words if w in COLORS):
                    z[i] += torch.tensor(COLORS[word]) * (1.0 if n else self.first)
        return {"z": z}

    def encode_text(self, inputs, normalize=True):
        return {"z": F.normalize(inputs["z"], dim=-1) if normalize else inputs["z"]}

    encode_video = encode_text

    def similarity(self, text, video):
        return text["z"] @ video["z"].T


def cfg(task, data=None, **over):
    prompts = {k: getattr(ET, k) for k in ET.PROMPTS} | ET.PILOT
    defaults = dict(split="val" if task in ("cirr", "fashioniq") else "test", datasets="",
                    images="", font=ET.font, frame_size=0, on_bad_video="raise", eval_batch_size=3,
                    num_workers=0)
    return SimpleNamespace(data=str(SETS / (data or task)), **{**prompts, **defaults, **over})


def measure(task, data=None, model=None, **over):
    """All rows of the result, as main() collects them."""
    c = cfg(task, data, **over)
    return [row for tasks in T.LOADERS[task](c) for row in ET.measure(model or Colors(), tasks, c)]


def ranks(task, data=None, model=None, **over):
    c, model, out = cfg(task, data, **over), model or Colors(), []
    for tasks in T.LOADERS[task](c):
        features, row, _ = ET.encode_entries(model, tasks, c)
        out += [ET.rank_task(model, t, features, row)[0].tolist() for t in tasks]
    return out


# -----------------------------------------------------------------------------
# the sets, by hand

# red, green, blue and yellow with five captions each; cosines 1, 0, or .71 with yellow.
# "a red or blue one" is green's: red, blue .71, yellow .5 above 0 -> 4. "red" is also said of blue:
# red 1, yellow .71 above 0 and green ties -> 3.5. "a red square" of yellow: red above .71 -> 2
T2I = [1] * 5 + [1, 1, 1, 1, 4] + [1, 1, 1, 1, 3.5] + [1, 1, 2, 1, 1]
# the red image: its own captions tie with the two others that only say red -> 1 + 2 / 2
I2T = [2, 1, 1, 1]


@pytest.mark.parametrize("task, data", [
    ("coco", "coco"), ("coco", "coco_hf"), ("coco", "coco_sentences"), ("flickr30k", "flickr30k"),
    ("flickr30k", "flickr30k_hf"), ("coco", "coco/dataset_coco.json")])
def test_five_captions_per_image_in_every_layout(task, data):
    assert ranks(task, data) == [T2I, I2T]
    t2i, i2t = measure(task, data)
    assert (t2i["name"], t2i["queries"], t2i["candidates"]) == ("text -> image", 20, 4)
    assert (i2t["name"], i2t["queries"], i2t["candidates"]) == ("image -> text", 4, 20)
    assert [t2i[f"R@{k}"] for k in (1, 5, 10)] == [85, 100, 100]
    assert [i2t[f"R@{k}"] for k in (1, 5, 10)] == [75, 100, 100]


def test_other_splits_and_a_sixth_caption_stay_out():
    rows = json.loads((SETS / "coco/dataset_coco.json").read_text())["images"]
    assert {r["split"] for r in rows} == {"test", "restval", "train", "val"}
    assert len(rows[2]["sentences"]) == 6
    tasks = next(T.LOADERS["coco"](cfg("coco")))
    texts = [e.text for (e,) in tasks[0].queries]
    assert len(texts) == 20 and "a yellow one" not in texts and "a cyan one" not in texts
    assert "green" in texts                                     # blanks around a caption are not it
    with pytest.raises(BadVideo, match="no image .*000000000006.jpg"):
        measure("coco", split="val")


def test_karr_has_one_caption_per_image():
    assert ranks("karr") == [[1, 1, 1, 1], [1, 1, 1, 1]]
    assert [r["queries"] for r in measure("karr")] == [4, 4]


def test_the_real_annotation_files_are_read(tmp_path):
    shared = ROOT.parent / "shared/annotations"
    if not shared.is_dir():
        pytest.skip("no shared/annotations here")
    for name, n in (("dataset_coco.json", 6), ("coco_karpathy_test.json", 6)):
        t2i, i2t = next(T.LOADERS["coco"](cfg("coco", shared / "coco" / name)))
        assert len(i2t.queries) == n and len(t2i.queries) == 5 * n
        assert {len(p) for p in i2t.positives} == {5}
        assert i2t.queries[0][0].image.endswith("val2014/COCO_val2014_000000391895.jpg")
    task, inside = next(T.LOADERS["cirr"](cfg("cirr", shared / "cirr")))
    assert (len(task.queries), len(task.candidates)) == (200, 270)
    assert {len(own) for own in inside.own} == {5}
    assert task.queries[0][0].image.endswith("dev/dev-244-0-img0.png")
    found = [t for (t,) in T.LOADERS["fashioniq"](cfg("fashioniq", shared / "fashioniq"))]
    assert [(t.label, len(t.queries), len(t.candidates)) for t in found] == \
        [("dress", 200, 436), ("shirt", 60, 168), ("toptee", 60, 169)]
    assert [e.text for e in found[0].queries[0]] == [
        "is shiny and silver with shorter sleeves, fit and flare",
        "fit and flare, is shiny and silver with shorter sleeves"]


def test_cirr_does_not_ask_about_the_reference():
    # red + "red, more red, and a little green" = (3, 1, 0): red itself .95, yellow .89 -> 1 without
    # red. green + green: yellow, cyan, white above blue's 0, red and pink tie -> 1 + 3 + 2 / 2;
    # among the members that are not green: yellow, white above, red and pink tie -> 4
    assert ranks("cirr") == [[1, 5], [1, 4]]
    rows = measure("cirr")
    assert [rows[0][f"R@{k}"] for k in (1, 5, 10, 50)] == [50, 100, 100, 100]
    assert [rows[1][f"Rs@{k}"] for k in (1, 2, 3)] == [50, 50, 50]
    assert rows[0]["candidates"] == 7 and rows[1]["own_candidates"] == [5, 5]
    assert ET.averages("cirr", rows) == {"(R@5 + Rs@1) / 2": 75}
    task = next(T.LOADERS["cirr"](cfg("cirr")))[0]
    task.excluded = None
    features, row, _ = ET.encode_entries(Colors(), [task], cfg("cirr"))
    assert ET.rank_task(Colors(), task, features, row)[0].tolist() == [2, 6]


def test_fashioniq_sums_both_orders():
    model = Colors(first=3.0)                      # so that the two orders are not the same
    (task,) = next(T.LOADERS["fashioniq"](cfg("fashioniq")))
    features, row, _ = ET.encode_entries(model, [task], cfg("fashioniq"))
    rows = [[row[e, True] for e in parts] for parts in task.queries]
    z = ET.take(features, rows)["z"]
    # red + 3 green, twice; blue + 3 red + green and blue + 3 green + red
    torch.testing.assert_close(z, F.normalize(torch.tensor([[2., 6, 0], [4., 4, 2]]), dim=-1))
    alone = F.normalize(torch.tensor([[1., 3, 0]]), dim=-1)
    torch.testing.assert_close(z[:1], alone)       # one order twice: as that order
    texts = {s.caption for prompt, samples in model.prompts.items() if "{caption}" in prompt
             for s in samples}
    assert texts == {"is green, has longer sleeves", "has longer sleeves, is green",
                     "is more red, is green, like grass", "is green, like grass, is more red"}
    garment = [p for p in model.prompts if "{caption}" in p]
    assert garment == ['<video> Change the style of this dress to "{caption}". Describe this '
                       'modified dress in one word based on its style: ']
    # with equal weights: red + green is yellow, blue + red + green is white -> ranks 1, 1
    assert ranks("fashioniq") == [[1, 1]] * 3
    rows = measure("fashioniq")
    assert [(r["name"], r["R@10"], r["candidates"]) for r in rows] == \
        [("dress", 100, 6), ("shirt", 100, 6), ("toptee", 100, 6)]
    assert ET.averages("fashioniq", [{"R@10": 10, "R@50": 20}, {"R@10": 20, "R@50": 60}]) == \
        {"average R@10 of 2 categories": 15, "average R@50 of 2 categories": 40}
    assert [r["name"] for r in measure("fashioniq", datasets="shirt")] == ["shirt"]


def test_mmeb_by_hand():
    # ImageNet-1K: red is red; green is said to be blue, which ties with red under green -> 2.5.
    # GQA: the right answer is listed twice, and is one. MSCOCO_t2i: "blue" is said to be red.
    # RefCOCO-Matching: red with "green" is green with "red"
    assert ranks("mmeb") == [[1, 2.5], [1], [1, 2], [1]]
    rows = measure("mmeb")
    assert [(r["name"], r["group"], r["distribution"], r["P@1"]) for r in rows] == [
        ("ImageNet-1K", "classification", "IND", 50), ("GQA", "VQA", "OOD", 100),
        ("MSCOCO_t2i", "retrieval", "IND", 50), ("RefCOCO-Matching", "grounding", "OOD", 100)]
    assert [r["own_candidates"] for r in rows] == [[3, 3], [3, 3], [2, 3], [2, 2]]
    assert ET.averages("mmeb", rows) == {
        "average P@1 classification, 1 of 10 data sets": 50,
        "average P@1 VQA, 1 of 10 data sets": 100,
        "average P@1 retrieval, 1 of 12 data sets": 50,
        "average P@1 grounding, 1 of 4 data sets": 100,
        "average P@1 IND, 2 of 20 data sets": 50, "average P@1 OOD, 2 of 16 data sets": 100,
        "average P@1 over all, 4 of 36 data sets": 75}
    model = Colors()
    measure("mmeb", model=model, datasets="MSCOCO_t2i")
    assert list(model.prompts) == ["{caption}", "<video>\n{caption}"]
    assert model.n == 2 + 3                        # two queries; three candidates, asked five times
    assert not any("image_1" in s.caption for group in model.prompts.values() for s in group)


def test_mmeb_has_20_sets_in_distribution_and_16_out_of_it():
    kinds = [kind for _, kind in T.MMEB_SETS.values()]
    assert (kinds.count("IND"), kinds.count("OOD")) == (20, 16)
    groups = [group for group, _ in T.MMEB_SETS.values()]
    assert [groups.count(g) for g in T.MMEB] == [10, 10, 12, 4]


def test_captions_are_drawn_black_on_white():
    page = T.draw("a red square", ET.font)
    assert page.shape == (400, 800, 3) and page.dtype == np.uint8
    assert (page[0] == 255).all() and (page[:, 0] == 255).all()
    assert (page == page[..., :1]).all() and page.min() == 0       # no colour, but black
    rows, columns = ((page < 128).any((a, 2)).nonzero()[0] for a in (1, 0))
    assert 180 < rows.mean() < 220 and rows.max() - rows.min() < 40    # one line, in the middle
    assert 20 <= columns.min() < 30 and columns.max() < 350
    long = T.draw("a red square and then a blue one " * 5, ET.font)
    lines = (long < 128).any((1, 2)).astype(int)
    assert (np.diff(lines) == 1).sum() > 3 and (long[:, 780:] == 255).all()
    longer = T.draw("a red square and then a blue one " * 40, ET.font)
    assert (longer[:2] == 255).all() and (longer[-2:] == 255).all()    # smaller, not cut
    assert (T.draw("x" * 200, ET.font) < 128).any()                    # a word wider than the page
    assert "DejaVu" not in T.load_font("NoSuchFont.ttf", 40)[1]
    assert "built-in" in T.load_font("NoSuchFont.ttf", 40)[1]


def test_i2i_asks_with_drawn_captions():
    model = Colors()
    rows = measure("i2i_coco", "coco", model=model)
    assert [r["name"] for r in rows] == ["drawn caption -> image", "image -> drawn caption"]
    assert list(model.prompts) == [ET.PILOT["image_prompt"]]
    shapes = {s.frames.shape for s in model.prompts[ET.PILOT["image_prompt"]]}
    assert shapes == {(1, 16, 16, 3), (1, 400, 800, 3)}
    assert rows[0]["queries"] == 20 and rows[1]["candidates"] == 20


def test_equal_items_are_encoded_once():
    model = Colors()
    measure("coco", model=model)
    texts = [s.caption for s in model.prompts[ET.PILOT["text_prompt"]]]
    assert len(texts) == len(set(texts)) == 18     # "red" and "a red square" are said twice
    model = Colors()
    measure("cirr", model=model)                   # two tasks share their queries and candidates
    assert model.n == 2 + 7


# -----------------------------------------------------------------------------
# ranks

def test_parts_of_a_query_are_summed_before_the_norm():
    parts = T.Entry("{caption}", "red red red"), T.Entry("{caption}", "green")
    task = T.Task("x", [parts, (parts[0],) * 2], [parts[0]], [[0], [0]])
    features, row, _ = ET.encode_entries(Colors(), [task], cfg("fashioniq"))
    z = ET.take(features, [[row[e, True] for e in q] for q in task.queries])["z"]
    torch.testing.assert_close(z, F.normalize(torch.tensor([[3., 1, 0], [6, 0, 0]]), dim=-1))
    assert features["z"][row[parts[0], False]].tolist() == [1, 0, 0]    # a candidate has its norm
    model = Colors()
    model.encode_text = lambda inputs: inputs
    with pytest.raises(ValueError, match="Colors.encode_text has no normalize=False"):
        ET.encode_entries(model, [task], cfg("fashioniq"))


@pytest.mark.parametrize("seed", range(3))
def test_ranks_match_a_literal_loop(seed):
    """150 queries, so more than a block; few values, so ties; some images cannot be read."""
    rng = np.random.default_rng(seed)
    queries = [(T.Entry("q", f"q{i}"),) for i in range(150)]
    candidates = [T.Entry("c", f"c{i}") for i in range(40)]
    bad = {candidates[3], candidates[17], queries[5][0]}
    everything = [*(e for (e,) in queries), *candidates]
    readable = [e for e in everything if e not in bad]
    z = torch.tensor(rng.integers(0, 2, (len(readable), 4)), dtype=torch.float32)
    row = {(e, False): i for i, e in enumerate(readable)}
    own = [rng.choice(40, 9, replace=False).tolist() for _ in queries]
    positives = [rng.choice(o, rng.integers(1, 3), replace=False).tolist() for o in own]
    excluded = [[c for c in rng.choice(40, 3).tolist() if c not in p] for p in positives]
    score = SimpleNamespace(similarity=lambda a, b: a["z"] @ b["z"].T)
    for use_own in (True, False):
        task = T.Task("x", queries, candidates, positives, own if use_own else None, excluded)
        got, lost_queries, lost_candidates = ET.rank_task(score, task, {"z": z}, row)
        want = []
        for q, (e,) in enumerate(queries):
            right = [c for c in positives[q] if candidates[c] not in bad]
            if e in bad or not right:
                continue
            s = {c: float(z[row[e, False]] @ z[row[candidates[c], False]]) for c in
                 (own[q] if use_own else range(40)) if candidates[c] not in bad}
            best = max(s[c] for c in right)
            others = [v for c, v in s.items() if c not in right and c not in excluded[q]]
            want.append(1 + sum(v > best for v in others) + sum(v == best for v in others) / 2)
        assert got.tolist() == want
        assert lost_queries == 150 - len(want) > 0 and lost_candidates == 2


def test_a_score_that_is_no_number_names_file_and_row():
    model = Colors()
    model.similarity = lambda a, b: (a["z"] @ b["z"].T) * float("nan")
    with pytest.raises(ValueError, match=r"not finite.*dataset_coco.json, row 1"):
        measure("coco", model=model)


# -----------------------------------------------------------------------------
# files that are not as they should be

@pytest.fixture
def broken(tmp_path):
    """A copy of a set, to be damaged."""
    def copy(name):
        shutil.copytree(SETS / name, tmp_path / name)
        return tmp_path / name
    return copy


@pytest.mark.parametrize("name, image, skipped, kept", [
    ("coco", "val2014/COCO_val2014_000000000001.jpg", 5, 15),
    ("cirr", "img_raw/dev/dev-1-0-img0.png", 1, 1)])      # the target of the first query
def test_a_missing_image_stops_or_is_skipped(broken, capsys, name, image, skipped, kept):
    folder = broken(name)
    (folder / image).unlink()
    with pytest.raises(BadVideo) as e:
        measure(name, folder)
    assert str(e.value).count("\n") == 0 and image in str(e.value) and ".json, " in str(e.value)
    assert "--on_bad_video=skip" in str(e.value)
    rows = measure(name, folder, on_bad_video="skip")
    assert (rows[0]["skipped_queries"], rows[0]["queries"]) == (skipped, kept)
    assert rows[0]["skipped_candidates"] == 1
    err = capsys.readouterr().err
    assert "skipped: " in err and image in err
    assert f"{skipped} queries skipped, 1 candidates skipped" in ET.table(
        dict(task=name, split="x", model="m", checkpoint="c", prompts={}, averages={}, rows=rows))


def test_an_image_that_is_none_is_named_with_its_row(broken):
    folder = broken("cirr")
    (folder / "img_raw/dev/dev-4-0-img0.png").write_text("hello")
    with pytest.raises(BadVideo, match=r"^[^\n]*image dev-4-0-img0: cannot read .*img0.png"):
        measure("cirr", folder)
    import pyarrow as pa
    import pyarrow.parquet as pq
    folder = broken("karr")
    file = folder / "data/train-00000-of-00001.parquet"
    rows = pq.read_table(file).to_pylist()
    for content, says in ((b"hello", "its 'image'"), (None, "no bytes, only the path 'x.jpg'")):
        rows[2]["image"] = {"bytes": content, "path": "x.jpg"}
        pq.write_table(pa.Table.from_pylist(rows), file)
        T.row_group.cache_clear()      # it does not expect a file to change
        with pytest.raises(BadVideo, match=f"parquet, row 3: .*{says}"):
            measure("karr", folder)
        assert measure("karr", folder, on_bad_video="skip")[0]["queries"] == 3


def edit(file, change):
    rows = json.loads(file.read_text())
    change(rows)
    file.write_text(json.dumps(rows))


@pytest.mark.parametrize("task, file, change, says", [
    ("coco", "dataset_coco.json", lambda d: d["images"][1].pop("sentences"),
     "row 2: no field 'sentences' or 'caption' .*its fields are filepath, cocoid"),
    ("coco", "dataset_coco.json", lambda d: d["images"][0]["sentences"][3].pop("raw"),
     "row 1: no field 'raw'"),
    ("coco", "dataset_coco.json", lambda d: d["images"][2]["sentences"][0].update(raw=" "),
     "row 3: caption ' ' is no text"),
    ("coco", "dataset_coco.json", lambda d: d["images"][0].pop("filename"),
     "row 1: no field 'image' or 'filename'"),
    ("coco", "dataset_coco.json", lambda d: d.update(images={}), "'images' must be a list"),
    ("coco", "dataset_coco.json", lambda d: d["images"].insert(1, "x"),
     "row 2: expected an object, found 'x'"),
    ("cirr", "captions/cap.rc2.val.json", lambda d: d[1].pop("reference"),
     "row 2: no field 'reference'"),
    ("cirr", "captions/cap.rc2.val.json", lambda d: d[0].update(reference="dev-9"),
     "row 1: image 'dev-9' is not in split.rc2.val.json"),
    ("cirr", "captions/cap.rc2.val.json", lambda d: d[0]["img_set"].update(members=[]),
     "row 1: the target is not among the members"),
    ("cirr", "captions/cap.rc2.val.json", lambda d: d[0].update(caption=7),
     "row 1: 'caption' must be a text, found 7"),
    ("fashioniq", "captions/cap.shirt.val.json", lambda d: d[1].update(target="B1"),
     "cap.shirt.val.json, row 2: target 'B1' is not in .*split.shirt.val.json"),
    ("fashioniq", "captions/cap.dress.val.json", lambda d: d[0].update(captions="a, b"),
     "row 1: 'captions' must be a list of texts"),
    ("fashioniq", "image_splits/split.dress.val.json", lambda d: d.append(3),
     "expected an image's name, found 3")])
def test_a_wrong_field_is_named_with_file_and_row(broken, task, file, change, says):
    folder = broken(task)
    edit(folder / file, change)
    with pytest.raises(ValueError, match=says) as e:
        list(T.LOADERS[task](cfg(task, folder)))
    assert "\n" not in str(e.value) and str(folder) in str(e.value)


def test_wrong_files_are_one_line(broken, tmp_path):
    def says(match, task, data, **over):
        with pytest.raises((ValueError, OSError), match=match) as e:
            list(T.LOADERS[task](cfg(task, data, **over)))
        assert "\n" not in str(e.value)

    (tmp_path / "empty").mkdir()
    says("data '.*nowhere' is neither a folder nor a file", "coco", tmp_path / "nowhere")
    says("empty holds nothing of COCO; expected dataset_coco.json or", "coco", tmp_path / "empty")
    says("holds nothing of CIRR; expected captions/cap.rc2.val.json", "cirr", tmp_path / "empty")
    says("holds nothing of FashionIQ; expected captions/cap.dress.val.json", "fashioniq",
         tmp_path / "empty")
    says("holds no data set of MMEB; expected <name>/test-", "mmeb", tmp_path / "empty")
    says("'GQa' is unknown, did you mean 'GQA'", "mmeb", SETS / "mmeb", datasets="ImageNet-1K,GQa")
    says("neither a folder nor a file", "mmeb", SETS / "mmeb", datasets="EDIS")
    says("images 'none' is no folder", "coco", SETS / "coco", images="none")
    says("has no row of split 'tset'; it has restval, test, train, val", "coco", SETS / "coco",
         split="tset")
    says("no 'target_hard': the answers of this split are with", "cirr", SETS / "cirr",
         split="test1")
    folder = broken("coco")
    (folder / "dataset_coco.json").write_text("{")
    says("dataset_coco.json is no JSON file", "coco", folder)
    (folder / "dataset_coco.json").write_text("3")
    says("holds a int, expected a list or a dict", "coco", folder)
    file = broken("karr") / "data/train-00000-of-00001.parquet"
    file.write_text("version https://git-lfs.github.com/spec/v1\n")
    says("is no parquet file .*git-lfs pointer", "karr", file)
    (broken("cirr") / "image_splits/split.rc2.val.json").unlink()
    says("holds nothing of CIRR; expected .*split.rc2.val.json", "cirr", tmp_path / "cirr")


@pytest.mark.parametrize("change, says", [
    (lambda r: r.update(tgt_img_path=[""]), "row 1: 3 'tgt_text' and 1 'tgt_img_path'"),
    (lambda r: r.update(tgt_text=["", "b", "c"]), "row 1: neither text nor image"),
    (lambda r: r.pop("qry_text"), "row 1: no field 'qry_text'"),
    (lambda r: r.update(qry_img_path=["x"]), "row 1: 'qry_img_path' must be a string")])
def test_a_wrong_row_of_mmeb_is_named(broken, change, says):
    import pyarrow as pa
    import pyarrow.parquet as pq
    file = broken("mmeb") / "ImageNet-1K/test-00000-of-00001.parquet"
    rows = pq.read_table(file).to_pylist()[:1]
    change(rows[0])
    pq.write_table(pa.Table.from_pylist(rows), file)
    with pytest.raises(ValueError, match=says):
        list(T.LOADERS["mmeb"](cfg("mmeb", file.parents[1])))


def test_without_pyarrow_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ValueError, match="needs the package pyarrow: pip install pyarrow"):
        list(T.LOADERS["karr"](cfg("karr")))
    assert len(list(T.LOADERS["coco"](cfg("coco")))) == 1      # json files do without


# -----------------------------------------------------------------------------
# the script, on a run with a tiny backbone

def make_run(folder, backbone, *argv):
    """A run folder as train.py leaves it, with trainable tensors that are not at their start."""
    import checkpoint
    import train
    from configurator import configure
    out = str(folder / "toy")
    os.makedirs(out)
    cfg = configure(str(ROOT / "train.py"), [
        f"--backbone={backbone}", "--data=nowhere", f"--out_dir={out}", "--num_frames=4",
        "--eval_batch_size=4", "--num_workers=0", "--device=cpu", *argv], train.SETTINGS)
    model = train.build_model(cfg, torch.device("cpu"))
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(torch.randn(p.shape, generator=g) * 0.1)
    optimizer = train.make_optimizer(model, cfg, torch.device("cpu"))
    checkpoint.save_checkpoint(cfg, model, optimizer, 7, None,
                               json.dumps(checkpoint.describe(cfg)), True)
    return SimpleNamespace(out=out, cfg=cfg, model=model)


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_qwen2vl):
    return make_run(tmp_path_factory.mktemp("out"), tiny_qwen2vl, "--lora_r=4", "--num_slots=3")


def settings(*argv):
    from configurator import configure
    return configure(str(ROOT / "eval_tasks.py"), list(argv))


def test_cirr_gives_what_encoding_one_by_one_gives(run, capsys):
    ET.main(settings("--ckpt", run.out, "--task=cirr", "--data", str(SETS / "cirr"),
                     "--device=cpu"))
    result = json.loads(Path(run.out, "tasks.json").read_text())["cirr"]
    assert result["checkpoint"] == "step_000007" and result["split"] == "val"
    assert result["prompts"] == {"cirr_prompt": ET.cirr_prompt,
                                 "cirr_target_prompt": ET.cirr_target_prompt}
    out = capsys.readouterr().out
    assert "cirr, split val: MARS, step_000007" in out and "2 queries, 7 candidates" in out
    assert repr(ET.cirr_prompt) in out and "R@5 " in out and "5 candidates each" in out
    task, _ = next(T.LOADERS["cirr"](cfg("cirr")))
    model = run.model.eval()
    with torch.no_grad():
        z = [[model.encode_video(model.collate_prompt([s], e.prompt))["slots"][0]
              for e in entries for s in [T.Entries([e], 0, "raise")[0]]]
             for entries in ([q for (q,) in task.queries], task.candidates)]
    S = torch.tensor([[(a * b).sum(-1).mean().item() for b in z[1]] for a in z[0]])
    for q, (out_of_it,) in enumerate(task.excluded):
        S[q, out_of_it] = -2.0
    r = E.ranks(S, task.positives)
    assert [result["rows"][0][f"R@{k}"] for k in (1, 5)] == \
        [100 * (r <= k).double().mean().item() for k in (1, 5)]
    assert len(set(S.flatten().tolist())) > 10


def test_slq_runs_too_alone_and_summed(tmp_path, tiny_qwen2vl, capsys):
    run = make_run(tmp_path, tiny_qwen2vl, "--model=slq", "--num_queries=3")
    for name in ("coco", "cirr", "fashioniq"):  # the last sums two queries before normalising
        ET.main(settings("--ckpt", run.out, f"--task={name}", "--data", str(SETS / name),
                         "--device=cpu"))
    assert "cirr, split val: SLQ, step_000007" in capsys.readouterr().out
    model = run.model.eval()

    @torch.no_grad()
    def z(e):
        (s,) = [T.Entries([e], 0, "raise")[0]]
        side = "video" if "<video>" in e.prompt else "text"
        return getattr(model, f"encode_{side}")(model.collate_prompt([s], e.prompt),
                                                normalize=False)["z"][0]

    t2i, _ = next(T.LOADERS["coco"](cfg("coco", text_prompt=run.cfg.text_prompt,
                                        image_prompt=run.cfg.video_prompt)))
    dress = next(t for ts in T.LOADERS["fashioniq"](cfg("fashioniq")) for t in ts)
    for task in (t2i, dress):
        features, row, _ = ET.encode_entries(model, [task], cfg("coco"))
        Q = F.normalize(torch.stack([sum(z(e) for e in parts) for parts in task.queries]), dim=-1)
        C = F.normalize(torch.stack([z(e) for e in task.candidates]), dim=-1)
        S = Q @ C.T
        assert ET.rank_task(model, task, features, row)[0].tolist() == \
            E.ranks(S, task.positives).tolist()
        assert len(set(S.flatten().tolist())) > 10


def test_results_of_all_tasks_stand_side_by_side(run, capsys):
    for task in ("karr", "mmeb", "fashioniq"):
        ET.main(settings("--ckpt", run.out, f"--task={task}", "--data", str(SETS / task),
                         "--device=cpu"))
    ET.main(settings("--ckpt", run.out, "--task=karr", "--data", str(SETS / "karr"), "--pilot"))
    ET.main(settings("--ckpt", run.out, "--task=mmeb", "--data", str(SETS / "mmeb"),
                     "--datasets=GQA", "--mmeb_prompt=<video>{caption}"))
    found = json.loads(Path(run.out, "tasks.json").read_text())
    assert {"karr", "mmeb", "fashioniq", "karr pilot=True",
            "mmeb datasets=GQA mmeb_prompt=<video>{caption}"} <= set(found)
    assert found["karr"]["prompts"] == {"text_prompt": run.cfg.text_prompt,
                                        "image_prompt": run.cfg.video_prompt}
    assert found["karr pilot=True"]["prompts"] == ET.PILOT
    assert [r["name"] for r in found["mmeb"]["rows"]] == ["ImageNet-1K", "GQA", "MSCOCO_t2i",
                                                         "RefCOCO-Matching"]
    assert "average P@1 over all, 4 of 36 data sets" in found["mmeb"]["averages"]
    out = capsys.readouterr().out
    assert "average R@50 of 3 categories" in out and "(classification IND)" in out
    assert os.listdir(run.out).count("tasks.json") == 1 and not list(Path(run.out).glob("*.tmp"))


def test_two_processes_give_the_same_bits_as_one(run):
    argv = ["--ckpt", run.out, "--task=coco", "--data", str(SETS / "coco"), "--device=cpu"]
    ET.main(settings(*argv))
    one = Path(run.out, "tasks.json").read_text()
    Path(run.out, "tasks.json").unlink()
    r = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone",
                        "--nproc_per_node=2", str(ROOT / "eval_tasks.py"), *argv,
                        "--num_workers=1"], capture_output=True, text=True)
    assert r.returncode == 0, r.stderr[-3000:]
    assert r.stdout.count("coco, split test: MARS") == 1           # one rank speaks
    assert json.loads(Path(run.out, "tasks.json").read_text())["coco"] == json.loads(one)["coco"]


@pytest.mark.parametrize("argv, says", [
    (["--task=coc"], "task 'coc' is unknown, did you mean 'coco'"),
    (["--task="], "task '' is none of coco, flickr30k"),
    (["--task=coco"], "set --data to the folder that holds the files of coco"),
    (["--task=coco", "--data=x", "--ckpt=none"], "--ckpt 'none' is no run folder"),
    (["--task=coco", "--data=x", "--text_prompt=hello"],
     "text_prompt must hold {caption} once and no <video>; got 'hello'"),
    (["--task=cirr", "--data=x", "--cirr_prompt=<video>"],
     "cirr_prompt must hold <video> and {caption} once; got '<video>'"),
    (["--task=karr", "--data=x", "--on_bad_video=stop"], "neither a folder nor a file"),
    (["--task=karr", f"--data={SETS / 'karr'}", "--on_bad_video=stop"],
     "on_bad_video 'stop' is not one of raise, skip"),
    (["--task=karr", f"--data={SETS / 'karr'}", "--eval_batch_size=0"], "must be at least 1")])
def test_a_wrong_setting_is_one_line(run, argv, says):
    with pytest.raises((ValueError, OSError)) as e:
        ET.main(settings("--ckpt", run.out, "--device=cpu", *argv))
    assert says in str(e.value) and "\n" not in str(e.value)


def test_a_model_without_prompts_says_so(run, monkeypatch):
    from model_mars import MARS
    monkeypatch.delattr(MARS, "collate_prompt")
    with pytest.raises(ValueError, match="MARS has no collate_prompt"):
        ET.main(settings("--ckpt", run.out, "--task=karr", "--data", str(SETS / "karr"),
                         "--device=cpu"))
