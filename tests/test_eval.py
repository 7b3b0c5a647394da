"""
Metrics against hand-worked numbers, all tie-breakings and literal loops; one process against two.

python -m pytest tests/test_eval.py -v
"""
import itertools
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

import eval as E
from data import Item, Sample

ROOT = Path(__file__).parents[1]

# texts x videos; texts 0 and 1 are video 0's, text 2 is video 1's
S32 = torch.tensor([[.9, .5], [.2, .6], [.5, .3]])
OWNER = [0, 0, 1]


def scores(nt, nv, seed=0, levels=None):
    """Random scores; with `levels` only so many values, so that ties are everywhere."""
    g = torch.Generator().manual_seed(seed)
    if levels:
        return torch.randint(levels, (nt, nv), generator=g) / 8
    return torch.rand(nt, nv, generator=g) * 2 - 1


# -----------------------------------------------------------------------------
# ranks and metrics

def test_both_directions_by_hand():
    # T2V: .9 beats .5 -> 1; .2 under .6 -> 2; .3 under .5 -> 2
    assert E.ranks(S32, OWNER).tolist() == [1, 2, 2]
    # V2T best: column 0, own .9 beats .5 -> 1; column 1, own .3 under .5 and .6 -> 3
    # V2T group: video 0's captions count as one, .6 -> the second video has rank 2
    best = E.both_directions(S32, S32, OWNER, "best")
    group = E.both_directions(S32, S32, OWNER, "group")
    t2v = {"R@1": 100 / 3, "R@5": 100, "R@10": 100, "MdR": 2, "MnR": 5 / 3, "RSum": 700 / 3}
    assert best["t2v"] == group["t2v"] == pytest.approx(t2v)
    v2t = {"R@1": 50, "R@5": 100, "R@10": 100, "MdR": 2, "MnR": 2, "RSum": 250}
    assert best["v2t"] == v2t
    assert group["v2t"] == {**v2t, "MdR": 1.5, "MnR": 1.5}
    assert best["SumR"] == pytest.approx(700 / 3 + 250)
    # each direction has scores of its own: with the signs turned, V2T best is 1, 1; group 1, 1
    turned = E.both_directions(S32, -S32, OWNER, "best")
    assert turned["t2v"] == best["t2v"] and turned["v2t"]["MnR"] == 1
    assert E.both_directions(S32, -S32, OWNER, "group")["v2t"]["MnR"] == 1


def test_all_ties_are_the_middle_rank_wherever_the_target_stands():
    sim = np.ones((10, 10))
    r = E.ranks(sim, np.arange(10))
    assert r.tolist() == [5.5] * 10                                 # 1 + 9 / 2
    assert E.metrics(r) == {"R@1": 0, "R@5": 0, "R@10": 100, "MdR": 5.5, "MnR": 5.5, "RSum": 100}
    order = torch.randperm(10, generator=torch.Generator().manual_seed(1))
    assert E.metrics(E.ranks(sim[:, order], order.argsort())) == E.metrics(r)
    # 10 videos with 2 captions each: the 18 captions of others tie, its own two do not
    ones = torch.ones(20, 10)
    both = E.both_directions(ones, ones, torch.arange(20) // 2, "best")
    assert both["v2t"]["MnR"] == 10 and both["t2v"]["MnR"] == 5.5
    assert E.both_directions(ones, ones, torch.arange(20) // 2, "group")["v2t"]["MnR"] == 5.5


def test_a_rank_is_the_mean_over_all_ways_to_break_ties():
    sim = scores(8, 5, levels=3)
    for i, row in enumerate(sim.tolist()):
        target, places = i % 5, []
        for tie in itertools.permutations(range(5)):                # tie[j]: who goes first
            order = sorted(range(5), key=lambda j: (-row[j], tie[j]))
            places.append(1 + order.index(target))
        assert E.ranks(sim[i:i + 1], [target]).item() == pytest.approx(np.mean(places))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("levels", [None, 4])
def test_several_captions_match_a_literal_loop_in_both_protocols(seed, levels):
    owner = [0, 0, 1, 2, 2, 2, 3]
    S = scores(7, 4, seed, levels)
    s = S.tolist()

    def rank(own, others):
        return 1 + sum(o > own for o in others) + sum(o == own for o in others) / 2

    t2v = [rank(s[i][owner[i]], [s[i][j] for j in range(4) if j != owner[i]]) for i in range(7)]
    best, group = [], []
    for j in range(4):
        own = max(s[i][j] for i in range(7) if owner[i] == j)
        best.append(rank(own, [s[i][j] for i in range(7) if owner[i] != j]))
        group.append(rank(own, [max(s[i][j] for i in range(7) if owner[i] == k)
                                for k in range(4) if k != j]))
    for protocol, v2t in (("best", best), ("group", group)):
        got = E.both_directions(S, S, owner, protocol)
        for direction, r in (("t2v", t2v), ("v2t", v2t)):
            assert got[direction]["MnR"] == pytest.approx(np.mean(r))
            assert got[direction]["MdR"] == pytest.approx(np.median(r))
            assert got[direction]["R@1"] == pytest.approx(100 * np.mean(np.array(r) <= 1))
    mask = torch.tensor([[owner[i] == j for i in range(7)] for j in range(4)])
    lists = [[i for i in range(7) if owner[i] == j] for j in range(4)]
    assert E.ranks(S.T, mask).tolist() == E.ranks(S.T, lists).tolist() == best


@pytest.mark.parametrize("r, want", [([1, 2], 1.5), ([2, 1, 7, 3], 2.5), ([3, 1, 2], 2), ([4], 4),
                                     ([1.5, 2, 9, 10], 5.5)])
def test_median_of_an_even_count_is_the_mean_of_the_middle_two(r, want):
    assert E.metrics(r)["MdR"] == want


def test_recalls_count_ranks_up_to_k():
    m = E.metrics([1, 1.5, 5, 5.5, 10, 10.5, 11, 100])
    assert m == {"R@1": 12.5, "R@5": 37.5, "R@10": 62.5, "MdR": 7.75, "MnR": 18.0625,
                 "RSum": 112.5}


def test_perfect_retrieval_is_rank_one_even_with_a_caption_written_twice():
    S = torch.eye(12).repeat_interleave(2, 0)                       # a video's captions are equal
    for protocol in ("best", "group"):
        both = E.both_directions(S, S, torch.arange(24) // 2, protocol)
        for m in (both["t2v"], both["v2t"]):
            assert m == {"R@1": 100, "R@5": 100, "R@10": 100, "MdR": 1, "MnR": 1, "RSum": 300}
        assert both["SumR"] == 600


def test_metrics_do_not_depend_on_the_order_of_texts_or_videos():
    owner = torch.tensor([0, 0, 1, 2, 2, 3, 4, 4, 4])
    S = scores(9, 5, levels=5)
    g = torch.Generator().manual_seed(3)
    rows, columns = torch.randperm(9, generator=g), torch.randperm(5, generator=g)
    for protocol in ("best", "group"):
        a = E.both_directions(S, S, owner, protocol)
        P = S[rows][:, columns]
        assert E.both_directions(P, P, columns.argsort()[owner[rows]], protocol) == a


def test_scores_of_any_type_are_ranked_as_they_are():
    # 1 and 1.0078 are neighbours in bf16, 1 and 1 + 1e-12 are one number in fp32
    half = torch.tensor([[1.0, 1.0078125]], dtype=torch.bfloat16)
    double = np.array([[1.0, 1 + 1e-12]])
    for sim in (half, double, np.array([[1, 2]]), [[1, 2]]):
        assert E.ranks(sim, [0]).tolist() == [2] and E.ranks(sim, np.array([1])).tolist() == [1]


def test_a_wrong_shape_or_target_is_an_error():
    with pytest.raises(ValueError, match="texts x videos"):
        E.both_directions(S32.T, S32.T, OWNER, "best")              # videos x texts
    with pytest.raises(ValueError, match="2 targets for 3 queries"):
        E.ranks(S32, [0, 1])
    with pytest.raises(ValueError, match="query 1 has none"):
        E.ranks(S32, [0, 2, 1])
    with pytest.raises(ValueError, match="query 2 has none"):
        E.ranks(S32, [[0], [1], []])


def test_scores_that_are_not_finite_are_named():
    S = S32.clone()
    S[1, 0], S[2, 1] = float("nan"), float("inf")
    with pytest.raises(ValueError, match=r"2 of 6 .* not finite.*\(b, v0\), \(c, v1\)"):
        E.check_finite(S, ["a", "b", "c"], ["v0", "v1"])
    with pytest.raises(ValueError, match=r"2 of 6 .*\(1, 0\), \(2, 1\)"):
        E.ranks(S, OWNER)


# -----------------------------------------------------------------------------
# DSL

def test_dual_softmax_matches_a_literal_loop():
    S, t = scores(4, 3, 5), 0.1
    t2v, v2t = E.dual_softmax(S, t)
    e = np.exp(S.double().numpy() / t)
    for i, j in itertools.product(range(4), range(3)):
        s = S[i, j].double().item()
        assert t2v[i, j].item() == pytest.approx(s * e[i, j] / e[:, j].sum())   # over the texts
        assert v2t[i, j].item() == pytest.approx(s * e[i, j] / e[i, :].sum())   # over the videos


def test_dual_softmax_takes_a_hub_down():
    # every text likes video 0 best; only text 0 means it. At T = .1 column 0 gives text 1 the share
    # 1 / (1 + e^2) = .119, .7 * .119 = .083; column 1: 1 / (1 + e^-5) = .993, .6 * .993 = .596
    S = torch.tensor([[.9, .1], [.7, .6]])
    assert E.ranks(S, [0, 1]).tolist() == [1, 2]
    t2v, _ = E.dual_softmax(S, 0.1)
    assert t2v[1].tolist() == pytest.approx([.7 / (1 + np.e ** 2), .6 / (1 + np.e ** -5)], abs=1e-6)
    assert E.ranks(t2v, [0, 1]).tolist() == [1, 1]


def test_dual_softmax_makes_no_ties_by_underflow():
    S = torch.tensor([[1.0, 1.0], [-0.5, -0.9], [-0.6, -0.95]])
    t2v, _ = E.dual_softmax(S, 0.005)                               # e^-300 and less
    assert all(E.ranks(t2v, [j] * 3)[i] != 1.5 for i in range(3) for j in range(2) if i)


# -----------------------------------------------------------------------------
# T2V by a field of the annotations

KINDS = [Item(f"v{i}", f"{i}.mp4", ["x"], f) for i, f in enumerate([
    dict(kind="base", family=0), dict(kind="order", family=0), dict(kind="base", family=1),
    dict(kind="single")])]
S54 = torch.tensor([[.9, .5, .1, .0],   # video 0's: rank 1, above its sibling (video 1)
                    [.4, .4, .8, .0],   # video 0's: rank 2.5, a tie with it
                    [.6, .3, .2, .1],   # video 1's: rank 2, under its sibling (video 0)
                    [.1, .2, .7, .3],   # video 2's: rank 1, no sibling here
                    [.5, .1, .2, .4]])  # video 3's: rank 2, it has no family at all


def test_by_a_field_by_hand():
    b = E.by_field(S54, [0, 0, 1, 2, 3], KINDS, "kind", "family")
    assert (b["field"], b["within"], list(b["values"])) == ("kind", "family",
                                                            ["base", "order", "single"])
    values = b["values"]
    assert [v["n_text"] for v in values.values()] == [3, 1, 1]
    assert [v["t2v"]["R@1"] for v in values.values()] == [pytest.approx(200 / 3), 0, 0]
    assert values["base"]["t2v"]["MnR"] == pytest.approx((1 + 2.5 + 1) / 3)
    assert [v["beats"] for v in values.values()] == [{"order": 75}, {"base": 0}, {}]
    assert "beats" not in E.by_field(S54, [0, 0, 1, 2, 3], KINDS, "kind")["values"]["base"]
    # two of one value are siblings as well; numbers are fine as values
    b = E.by_field(S54, [0, 0, 1, 2, 3], KINDS, "family", "kind")["values"]
    assert list(b) == ["0", "1"] and [v["n_text"] for v in b.values()] == [3, 1]
    assert b["0"]["beats"] == {"1": 50} and b["1"]["beats"] == {"0": 100}  # the two `base`
    text = "\n".join(E.by_lines(E.by_field(S54, [0, 0, 1, 2, 3], KINDS, "kind", "family")))
    assert "kind base (T2V), 3 queries" in text
    assert "base scores above what shares its family, % (chance 50): order 75.0" in text


def test_by_a_field_is_the_whole_result_when_all_share_a_value():
    items = [Item(f"v{i}", "", ["x"], dict(kind="k")) for i in range(6)]
    S, owner = scores(12, 6), torch.arange(12) // 2
    b = E.by_field(S, owner, items, "kind", "kind")["values"]["k"]
    assert b["t2v"] == E.both_directions(S, S, owner, "best")["t2v"] and b["n_text"] == 12
    # against all 5 others a rank r means 6 - r wins
    assert b["beats"]["k"] == pytest.approx(100 * ((6 - E.ranks(S, owner)) / 5).mean().item())


def test_a_field_that_is_not_there_or_is_no_word_is_named():
    with pytest.raises(ValueError, match="has a field 'kid'; .* there are: family, kind"):
        E.field_values(KINDS, "kid")
    with pytest.raises(ValueError, match="'events' holds lists"):
        E.field_values([Item("v", "", ["x"], dict(events=[["a"], ["b"]]))], "events")
    assert E.field_values(KINDS, "family") == ["0", "0", "1", None]


# -----------------------------------------------------------------------------
# features and scores

@pytest.mark.parametrize("nt, nv, tiles", [(5, 7, (1, 2, 7)), (130, 70, (33, 64, 100))])
def test_the_tile_size_changes_no_bit(nt, nv, tiles):
    g = torch.Generator().manual_seed(0)
    text = {"z": torch.randn(nt, 3, 24, generator=g)}
    video = {"z": torch.randn(nv, 3, 24, generator=g)}

    def score(t, v):
        return t["z"].flatten(1) @ v["z"].flatten(1).T

    def slots(t, v):
        return torch.einsum("imd,jmd->mij", t["z"], v["z"])

    whole = E.similarity(score, text, video)
    assert whole.dtype == torch.float32
    torch.testing.assert_close(whole, score(text, video))
    torch.testing.assert_close(E.similarity(slots, text, video, tile=40), slots(text, video))
    for tile in tiles:
        assert torch.equal(E.similarity(score, text, video, tile=tile), whole)


def test_slots_alone_by_hand():
    # ranks of the 3 targets by slot: (1, 1, 2) and (2, 1, 2): query 0 is only the first slot's
    S_m = torch.stack([torch.tensor([[.9, .1], [.8, .2], [.7, .3]]),
                       torch.tensor([[.1, .9], [.8, .2], [.7, .3]])])
    got = E.slots_alone(S_m, torch.tensor([0, 0, 1]))
    assert got["exclusive"] == [1, 0] and got["exclusive_total"] == 1
    assert [m["R@1"] for m in got["t2v"]] == pytest.approx([200 / 3, 100 / 3])


class Toy(torch.nn.Module):
    """A text is two numbers, a video too; the score is their product. Padding-free, order-free."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def collate(self, samples):
        sides = {}
        if samples[0].caption is not None:
            x = torch.tensor([[float(w) for w in s.caption.split()[:2]] for s in samples])
            sides["text"] = {"x": x, "cut": torch.tensor([len(s.caption.split()) > 2
                                                          for s in samples])}
        if samples[0].frames is not None:
            sides["video"] = {"x": torch.stack([torch.as_tensor(s.frames) for s in samples])}
        return sides

    def encode(self, inputs):
        self.seen.append(len(inputs["x"]))
        assert not self.training and not torch.is_grad_enabled()
        return {"z": inputs["x"].bfloat16()}

    encode_text = encode_video = encode

    def similarity(self, text, video):
        assert text["z"].dtype == torch.float32                     # upcast before the product
        return text["z"] @ video["z"].T


class Clips(torch.utils.data.Dataset):
    """Stands in for data.Videos: `frames` of video i are two numbers, None is unreadable."""

    def __init__(self, frames):
        self.frames, self.clips = frames, SimpleNamespace()

    def __len__(self):
        return len(self.frames)

    def __getitem__(self, i):
        f = self.frames[i]
        return Sample(f"v{i}", None, f, i, "broken" if f is None else None)


CFG = SimpleNamespace(data="toy", video_root="", num_frames=8, sampler="uniform", frame_size=0,
                      frame_cache="", on_bad_video="skip", num_workers=0, eval_batch_size=4,
                      reader="pyav", min_decoded=0.9, video_timeout=60.0, out_dir="",
                      video_prompt="v", text_prompt="t")


def evaluate(monkeypatch, frames, captions, fields=None, **how):
    fields = fields or [{}] * len(captions)
    items = [Item(f"v{i}", f"{i}.mp4", c, f) for i, (c, f) in enumerate(zip(captions, fields))]
    monkeypatch.setattr(E, "Videos", lambda *a, **k: Clips(frames))
    model = Toy().train()
    result = E.evaluate(model, items, CFG, "test", **how)
    assert model.training
    return result, model


def test_every_item_is_encoded_once_and_in_order():
    frames = [(float(i), 1.0) for i in range(10)]
    model = Toy().eval()
    video, kept, cut = E.encode(model, "video", Clips(frames), [7, 2, 9, 0, 1, 3, 8, 4, 5, 6], 4)
    assert video["z"].tolist() == [list(f) for f in frames] and video["z"].dtype == torch.float32
    assert kept == list(range(10)) and cut == [] and model.seen == [4, 4, 2]


def test_result_has_the_documented_keys_and_counts(monkeypatch):
    frames = [(1.0, 0.0), (0.0, 1.0), (-1.0, 0.0)]
    result, _ = evaluate(monkeypatch, frames, [["1 0", "2 .5"], ["0 1 cut here"], ["-1 0"]])
    assert list(result)[:10] == ["t2v", "v2t", "SumR", "n_text", "n_video", "split",
                                 "v2t_protocol", "dsl", "num_frames", "prompt"]
    names = ["R@1", "R@5", "R@10", "MdR", "MnR", "RSum"]
    assert list(result["t2v"]) == list(result["v2t"]) == names
    assert (result["n_text"], result["n_video"], result["split"]) == (4, 3, "test")
    assert result["prompt"] == {"text_prompt": "t", "video_prompt": "v"}
    assert result["dsl"] is False and result["num_frames"] == 8
    assert result["cut_captions"] == 1 and result["skipped_videos"] == 0
    assert result["SumR"] == 600 and json.loads(json.dumps(result)) == result


def test_by_leaves_out_skipped_videos_and_needs_its_field_at_once(monkeypatch):
    frames = [(1.0, 0.0), None, (0.0, 1.0), (-1.0, 0.0)]
    captions, kinds = [["1 0"], ["5 5", "6 6"], ["0 1"], ["1 0"]], ["a", "b", "a", "c"]
    fields = [dict(kind=k, pair=i // 2) for i, k in enumerate(kinds)]
    result, _ = evaluate(monkeypatch, frames, captions, fields, by="kind", within="pair")
    values = result["by"]["values"]
    assert [(k, v["n_text"], v["t2v"]["R@1"]) for k, v in values.items()] == [
        ("a", 2, 100), ("c", 1, 0)]
    assert values["a"]["beats"] == {"c": 100} and values["c"]["beats"] == {"a": 0}
    assert "kind c (T2V), 1 queries" in E.table(result)
    assert json.loads(json.dumps(result)) == result
    with pytest.raises(ValueError, match="has a field 'kid'"):
        evaluate(monkeypatch, [None] * 4, captions, fields, by="kid")
    with pytest.raises(ValueError, match="within is given without by"):
        evaluate(monkeypatch, [None] * 4, captions, fields, within="pair")


def test_two_videos_with_the_same_caption_tie_and_it_is_encoded_once(monkeypatch):
    frames = [(2.0, 0.0), (1.0, 0.0), (0.0, 1.0)]
    result, model = evaluate(monkeypatch, frames, [["1 0"], [" 1 0 "], ["0 1"]])
    assert result["duplicate_captions"] == 1 and result["n_text"] == 3
    assert model.seen == [3, 2]                                     # 3 videos, 2 texts
    # T2V: ranks 1, 2, 1. V2T: the two captions tie for both videos, rank 1.5, 1.5, 1
    assert result["t2v"]["MnR"] == pytest.approx(4 / 3)
    assert result["v2t"]["MnR"] == pytest.approx(4 / 3) and result["v2t"]["MdR"] == 1.5
    assert result["v2t"]["R@1"] == pytest.approx(100 / 3)


def test_an_unreadable_video_leaves_with_its_captions_and_is_counted(monkeypatch):
    frames = [(1.0, 0.0), None, (0.0, 1.0), (-1.0, 0.0)]
    captions = [["1 0"], ["5 5", "6 6"], ["0 1"], ["-1 0"]]
    result, _ = evaluate(monkeypatch, frames, captions)
    assert (result["n_text"], result["n_video"], result["skipped_videos"]) == (3, 3, 1)
    assert result["SumR"] == 600
    assert "3 videos (1 skipped), 3 captions" in E.table(result)
    with pytest.raises(ValueError, match=r"not one video of the 4 in toy/test.jsonl \(videos in "
                                         r"toy/videos\) could be read"):
        evaluate(monkeypatch, [None] * 4, captions)


def test_a_nan_feature_is_named_with_its_video(monkeypatch):
    frames = [(1.0, 0.0), (float("nan"), 1.0)]
    with pytest.raises(ValueError, match=r"2 of 4 similarities.*\(a caption of v0, v1\)"):
        evaluate(monkeypatch, frames, [["1 0"], ["0 1"]])


def test_a_bad_setting_fails_before_anything_is_encoded(monkeypatch):
    for how, match in ((dict(v2t="bets"), "v2t"), (dict(dsl=0.0), "dsl_temperature"),
                       (dict(dsl=float("nan")), "dsl_temperature"), (dict(per_slot=True), "slots")):
        monkeypatch.setattr(E, "encode_split", lambda *a, **k: pytest.fail("encoded"))
        with pytest.raises(ValueError, match=match):
            evaluate(monkeypatch, [(1.0, 0.0)], [["1 0"]], **how)


# -----------------------------------------------------------------------------
# tables and files

def a_result(**over):
    both = E.both_directions(S32, S32, OWNER, "best")
    return {**both, "n_text": 3, "n_video": 2, "split": "test", "v2t_protocol": "best",
            "dsl": {"temperature": 0.02}, "dsl_rows": both, "num_frames": 8, "prompt": {},
            "duplicate_captions": 0, "cut_captions": 0, "skipped_videos": 0, "trainable": 12,
            **over}


def test_the_table_says_what_was_measured_on_what():
    lines = E.table(a_result()).splitlines()
    assert lines[0] == ("split test: 2 videos (0 skipped), 3 captions (0 repeat an earlier one, "
                        "0 cut)")
    assert lines[1] == "8 frames, V2T protocol best, no DSL"
    assert lines[2].split() == list(E.METRICS)
    assert lines[3].split("  ")[0] == "text -> video (T2V), 3 queries, 2 videos"
    assert lines[3].split()[-6:] == ["33.33", "100.00", "100.00", "2.00", "1.67", "233.33"]
    assert lines[4].startswith("video -> text (V2T), 2 queries, 3 captions ")
    assert lines[5] == "SumR 483.33"
    assert lines[6].startswith("text -> video (T2V+DSL), 3 queries, 2 videos ")
    assert lines[8].startswith("SumR 483.33, DSL at temperature 0.02")
    group = E.table(a_result(v2t_protocol="group", dsl=False))
    assert "2 caption groups" in group and "DSL at" not in group


def test_compare_prints_one_line_per_run_and_refuses_other_galleries(tmp_path, capsys):
    def write(name, **over):
        E.save_result(tmp_path / name / "metrics.json", a_result(**over), "test")
        return str(tmp_path / name)
    a, b = write("a"), write("b", num_frames=4, SumR=500.0)
    out = E.compare_runs([a, b], "test").splitlines()
    assert out[0] == "split test: 2 videos, 3 captions, V2T protocol best, no DSL"
    assert out[3].split() == ["a", "33.33", "100.00", "100.00", "50.00", "100.00", "100.00",
                              "483.33", "12"]
    assert out[4].split()[0] == "b" and out[4].split()[-2:] == ["500.00", "12"]
    assert "warning: num_frames is 8" in capsys.readouterr().err
    assert "DSL at temperature 0.02" in E.compare_runs([a, b], "test", dsl=True)
    for name, over in (("c", dict(n_video=3)), ("d", dict(n_text=9)),
                       ("e", dict(v2t_protocol="group"))):
        with pytest.raises(ValueError, match=f"cannot be compared on test: {list(over)[0]} is"):
            E.compare_runs([a, write(name, **over)], "test")
    with pytest.raises(ValueError, match="dsl is"):
        E.compare_runs([a, write("f", dsl={"temperature": 1.0})], "test", dsl=True)
    with pytest.raises(ValueError, match="has no results on 'test' with DSL.*--dsl"):
        E.compare_runs([a, write("g", dsl=False)], "test", dsl=True)
    with pytest.raises(ValueError, match="has no results on 'val'"):
        E.compare_runs([a], "val")
    with pytest.raises(FileNotFoundError, match="eval.py --ckpt"):
        E.compare_runs([a, str(tmp_path / "none")], "test")
    # other data with as many captions; a result older than this key has none to compare
    c = write("data/c", data="/data/one")
    E.compare_runs([a, c], "test")
    with pytest.raises(ValueError, match="data is '/data/one' in .* and '/data/two' in"):
        E.compare_runs([c, write("data/d", data="/data/two")], "test")


def test_compare_takes_spaces_and_a_last_comma(tmp_path):
    for name in "ab":
        E.save_result(tmp_path / name / "metrics.json", a_result(), "test")
    typed = f"{tmp_path}/a, {tmp_path}/b, ".split(",")
    assert E.compare_runs(typed, "test") == E.compare_runs([f"{tmp_path}/a", f"{tmp_path}/b"],
                                                           "test")
    with pytest.raises(ValueError, match="names no run folder"):
        E.compare_runs([" ", ""], "test")


def test_compare_says_when_best_has_moved_on(tmp_path, capsys):
    run = tmp_path / "run"
    E.save_result(run / "metrics.json", a_result(checkpoint="step_000001"), "test")
    for step, says in (("step_000001", ""), ("step_000009", "warning: ")):
        (run / step).mkdir()
        (run / "best").unlink(missing_ok=True)
        (run / "best").symlink_to(step)
        E.compare_runs([str(run)], "test", dsl=True)
        err = capsys.readouterr().err
        assert err.startswith(says) and err.count("\n") == len(says[:1])
    assert f"metrics.json holds the result of step_000001, and the run's best checkpoint is " \
           f"step_000009 now: run `python eval.py --ckpt {run} --split test --dsl`" in err


@pytest.mark.parametrize("found", [3, [], {"n_text": 20}, a_result(t2v=3), a_result(SumR="x"),
                                   a_result(dsl_rows=None), a_result(dsl=True)])
def test_compare_names_a_file_that_holds_no_whole_result(found, tmp_path):
    E.save_result(tmp_path / "metrics.json", found, "test")
    with pytest.raises(ValueError, match="metrics.json holds no whole result.*run `python eval.py"):
        E.compare_runs([str(tmp_path)], "test", dsl=True)


def test_a_result_keeps_the_other_splits(tmp_path):
    path = tmp_path / "metrics.json"
    E.save_result(path, {"SumR": 1.0}, "val")
    E.save_result(path, {"SumR": 2.0}, "test")
    E.save_result(path, {"SumR": 3.0}, "val")
    assert json.loads(path.read_text()) == {"val": {"SumR": 3.0}, "test": {"SumR": 2.0}}
    assert os.listdir(tmp_path) == ["metrics.json"]
    path.write_text("{")
    with pytest.raises(ValueError, match="metrics.json is no JSON file"):
        E.save_result(path, {}, "test")


# -----------------------------------------------------------------------------
# the script, on a run with a tiny backbone

@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_qwen2vl, tiny_data):
    """A run folder as train.py leaves it, with trainable tensors that are not at their start."""
    import checkpoint
    import train
    from configurator import configure
    out = str(tmp_path_factory.mktemp("out") / "toy")
    os.makedirs(out)
    cfg = configure(str(ROOT / "train.py"), [
        f"--backbone={tiny_qwen2vl}", f"--data={tiny_data}", f"--out_dir={out}", "--lora_r=4",
        f"--video_root={tiny_data}/videos",
        "--num_frames=4", "--num_slots=3", "--eval_batch_size=4", "--num_workers=0",
        "--device=cpu"], train.SETTINGS)
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


def settings(*argv):
    from configurator import configure
    return configure(str(ROOT / "eval.py"), list(argv))


def test_a_checkpoint_gives_what_encoding_one_by_one_gives(run, tmp_path, capsys):
    E.main(settings("--ckpt", run.out, "--dsl", "--per_slot", f"--json={tmp_path / 'r.json'}"))
    result = json.loads((tmp_path / "r.json").read_text())
    assert json.loads(Path(run.out, "metrics.json").read_text()) == {"test": result}
    assert result["checkpoint"] == "step_000007" and result["n_text"] == result["n_video"] == 10
    items = E.load_annotations(f"{run.cfg.data}/test.jsonl")
    assert result["duplicate_captions"] == 10 - len({i.captions[0] for i in items})
    model = run.model.eval()
    z = {"text": [], "video": []}
    with torch.no_grad():
        for item in items:
            frames = E.Videos([item], f"{run.cfg.data}/videos", 4)[0].frames
            text = model.collate([Sample("", item.captions[0])])["text"]
            video = model.collate([Sample("", None, frames)])["video"]
            z["text"].append(model.encode_text(text)["slots"][0])
            z["video"].append(model.encode_video(video)["slots"][0])
    S = torch.tensor([[(t * v).sum(-1).mean().item() for v in z["video"]] for t in z["text"]])
    want = E.both_directions(S, S, range(10), "best")
    assert result["t2v"] == want["t2v"]
    assert len(set(E.ranks(S, range(10)).tolist())) > 3             # not all alike
    assert len(result["per_slot"]["t2v"]) == 3 and result["dsl"] == {"temperature": 0.02}
    t2v, v2t = E.dual_softmax(S, 0.02)
    want = E.both_directions(t2v, v2t, range(10), "best")
    assert result["dsl_rows"]["t2v"] == want["t2v"]
    out = capsys.readouterr().out
    assert "T2V)" in out and "T2V+DSL" in out and "slot 3 alone" in out


def test_other_settings_have_entries_of_their_own_in_metrics_json(run, tmp_path):
    out, file = tmp_path / "toy", tmp_path / "toy" / "metrics.json"
    shutil.copytree(run.out, out, symlinks=True, ignore=shutil.ignore_patterns("metrics.json"))

    def saved(*argv):
        E.main(settings("--ckpt", str(out), *argv))
        return json.loads(file.read_text())

    main = saved()["test"]
    assert list(saved("--num_workers=1", "--eval_batch_size=3")) == ["test"]  # changes no number
    others = {"val": ["--split=val"], "test num_frames=2": ["--num_frames=2"],
              "test latest": ["--which=latest"], "test v2t=group": ["--v2t=group"],
              "val latest v2t=group num_frames=2": ["--split=val", "--which=latest",
                                                    "--v2t=group", "--num_frames=2"]}
    for name, argv in others.items():
        before = json.loads(file.read_text())
        after = saved(*argv)
        assert after.keys() - before.keys() == {name}
        assert {k: after[k] for k in before} == before
    assert after["test"] == main and after["test num_frames=2"]["num_frames"] == 2
    # DSL is no other setting: it adds its rows to the entry, the numbers without it stay there
    with_dsl = saved("--dsl")
    assert with_dsl.keys() == after.keys()
    assert {**with_dsl["test"], "dsl": False, "dsl_rows": None} == {**main, "dsl_rows": None}


def test_several_runs_are_evaluated_one_by_one_and_compared(run, tmp_path, capsys, monkeypatch):
    names = [str(tmp_path / name) for name in "ab"]
    for name in names:
        shutil.copytree(run.out, name, symlinks=True,
                        ignore=shutil.ignore_patterns("metrics.json"))
    E.main_of_all(settings("--ckpt", ", ".join(names), "--num_frames=2"))
    out = capsys.readouterr().out.splitlines()
    results = [json.loads(Path(n, "metrics.json").read_text())["test num_frames=2"] for n in names]
    assert results[0] == results[1]
    assert sum("text -> video (T2V)," in s for s in out) == 2
    # the table is of what was just measured, not of the run's own entry in metrics.json
    assert [s.split()[0] for s in out[-2:]] == ["a", "b"]
    assert float(out[-1].split()[1]) == pytest.approx(results[1]["t2v"]["R@1"], abs=5e-3)
    one = tmp_path / "a,b"                                  # a folder may have a comma in its name
    shutil.copytree(names[0], one, symlinks=True)
    assert len(E.each_run(settings("--ckpt", str(one)))) == 1
    for argv, says in ((f"--json={tmp_path}/r.json", "json is the file of one run"),
                       ("--split=test", "nowhere' is no run folder")):
        monkeypatch.setattr(sys, "argv", ["eval.py", f"--ckpt={names[0]},nowhere", argv])
        with pytest.raises((ValueError, FileNotFoundError), match=says):
            E.configured()


def test_two_processes_give_the_same_bits_as_one(run, tmp_path):
    E.main(settings("--ckpt", run.out, "--dsl", f"--json={tmp_path / 'one.json'}"))
    r = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone",
                        "--nproc_per_node=2", str(ROOT / "eval.py"), "--ckpt", run.out, "--dsl",
                        f"--json={tmp_path / 'two.json'}", "--num_workers=1"],
                       capture_output=True, text=True)
    assert r.returncode == 0, r.stderr[-3000:]
    assert r.stdout.count("text -> video (T2V),") == 1              # one rank speaks
    assert (tmp_path / "one.json").read_text() == (tmp_path / "two.json").read_text()


def encode_on_rank(rank, world, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank,
                                         world_size=world)
    frames = [(float(i), 1.0) if i != 5 else None for i in range(10)]
    model = Toy().eval()
    video, kept, _ = E.encode(model, "video", Clips(frames), range(10), 4)
    torch.save((video["z"], kept, model.seen), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def test_three_processes_drop_and_repeat_nothing(tmp_path):
    # 10 items in batches of 4 for 3 ranks, and item 5 cannot be read
    torch.multiprocessing.start_processes(encode_on_rank, (3, str(tmp_path)), nprocs=3,
                                          start_method="fork")  # torch is imported already
    got = [torch.load(tmp_path / f"{rank}.pt") for rank in range(3)]
    assert [seen for _, _, seen in got] == [[4], [3], [2]]
    for z, kept, _ in got:
        assert kept == [0, 1, 2, 3, 4, 6, 7, 8, 9]
        assert z.tolist() == [[float(i), 1.0] for i in kept]


def test_settings_of_the_command_line_go_over_the_runs(run, capsys):
    cfg, step, _ = E.load_settings(settings("--ckpt", run.out, "--eval_batch_size=2"))
    assert cfg.eval_batch_size == 2 and cfg.num_frames == 4 and cfg.data == run.cfg.data
    assert step.resolve().name == "step_000007" and capsys.readouterr().out == ""
    cfg, step, _ = E.load_settings(settings("--ckpt", f"{run.out}/step_000007", "--num_frames=2",
                                         "--text_prompt={caption} in one word:"))
    assert cfg.num_frames == 2 and step.name == "step_000007"
    out = capsys.readouterr().out
    assert out.count("warning:") == 2 and "num_frames is 2 here and 4 in training" in out
    for more, root in ((), f"{run.cfg.data}/videos"), (("--data=data/b",), ""), \
            (("--data=data/b", "--video_root=c"), "c"):
        assert E.load_settings(settings("--ckpt", run.out, *more))[0].video_root == root


def test_what_is_missing_is_named_in_one_line(run, tmp_path):
    with pytest.raises(FileNotFoundError, match="--ckpt 'none' is no run folder"):
        E.load_settings(settings("--ckpt=none"))
    with pytest.raises(ValueError, match="which must be best or latest, not 'last'"):
        E.load_settings(settings("--ckpt", run.out, "--which=last"))
    with pytest.raises(FileNotFoundError, match="config.json not found: .*no finished 'latest'"):
        E.load_settings(settings("--ckpt", str(tmp_path), "--which=latest"))
    with pytest.raises(FileNotFoundError, match="annotations .*tset.jsonl not found"):
        E.main(settings("--ckpt", run.out, "--split=tset"))


def change_settings(**values):
    def change(step):
        found = json.loads((step / "config.json").read_text())
        found["settings"].update(values)
        (step / "config.json").write_text(json.dumps(found))
    return change


def damaged(run, folder, change):
    shutil.copytree(run.out, folder, symlinks=True)
    change(folder / "best")
    return str(folder)


@pytest.mark.parametrize("change, says", [
    (lambda step: (step / "config.json").write_text("{}"), "config.json holds no settings of a"),
    (lambda step: (step / "config.json").write_text("{"), "config.json is no JSON file"),
    (lambda step: (step / "config.json").write_text('{"settings": []}'), "holds no settings of a"),
    (change_settings(data=None), "config.json: the run's setting data is None"),
    (change_settings(model="foo"), "config.json: model 'foo' is none of mars, pha, slq"),
    (change_settings(num_frames="8"), "setting num_frames is '8', which is no int"),
    (change_settings(text_prompt=3), "setting text_prompt is 3, which is no str"),
    (lambda step: os.truncate(step / "model.safetensors", 300), "can't read .*model.safetensors"),
    (lambda step: os.truncate(step / "model.safetensors", 0), "can't read .*model.safetensors")])
def test_a_damaged_run_is_one_line_that_names_the_file(run, tmp_path, change, says):
    import eval_tasks
    import figures
    from configurator import configure
    ckpt = ["--ckpt", damaged(run, tmp_path / "run", change), "--device=cpu"]
    folder = ROOT / "tests" / "tasks" / "karr"
    for script, more in ((E, []), (figures, ["--only=cmc"]),
                         (eval_tasks, ["--task=karr", "--data", str(folder)])):
        with pytest.raises(ValueError, match=says) as e:
            script.main(configure(script.__file__, ckpt + more))
        assert str(tmp_path / "run" / "best") in str(e.value) and "\n" not in str(e.value)


def test_a_setting_that_the_runs_method_lacks_is_an_error(run, tmp_path):
    out = damaged(run, tmp_path / "run", change_settings(model="pha"))
    file = tmp_path / "run" / "best" / "config.json"
    found = json.loads(file.read_text())
    for key in ("text_prompt", "video_prompt"):
        del found["settings"][key]
    file.write_text(json.dumps(found))
    E.load_settings(settings("--ckpt", out))
    with pytest.raises(ValueError, match="is a run of pha, which has no setting text_prompt"):
        E.load_settings(settings("--ckpt", out, "--text_prompt=hello"))


def test_a_run_older_than_a_setting_has_its_default():
    settings = E.with_defaults({"model": "mars", "num_slots": 2, "seed": 7})
    assert settings["num_slots"] == 2 and settings["seed"] == 7
    assert settings["slot_readout"] == "preceding"      # of MARSConfig
    assert settings["eval_batch_size"] == 64            # of train.py


def test_json_may_not_be_where_the_run_keeps_all_its_results(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["eval.py", f"--ckpt={tmp_path}",
                                      f"--json={tmp_path}/./metrics.json"])
    with pytest.raises(ValueError, match="results of all its splits"):
        E.configured()
