"""
The pictures' numbers against literal versions and eval.py; the files appear, errors are one line.
CPU, about 10 s, on a PHA-Net whose head is random, over the demo's tiny CLIP.

python -m pytest tests/test_figures.py -v
"""
import json
import math
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import eval as evaluation
import figures
import train
from checkpoint import trainable_state
from configurator import configure, read_settings
from conftest import ROOT

PNG = b"\x89PNG\r\n\x1a\n"
CLIP = os.path.join(ROOT, "data", "demo", "backbones", "tiny-clip")


def settings(**given):
    args = configure(os.path.join(ROOT, "figures.py"), [])
    return type(args)(**{**vars(args), "device": "cpu", **given})


def make_run(folder, data, **given):
    """A run folder as train.py leaves it, with weights as they were initialised."""
    base = {k: d for k, (_, d, _) in read_settings(os.path.join(ROOT, "train.py")).items()}
    file, config = train.SETTINGS[given.get("model", "pha")]
    own = {k: d for k, (_, d, _) in read_settings(os.path.join(ROOT, file), config).items()}
    cfg = type(settings())(**{**base, **own, "model": "pha", "backbone": CLIP, "data": data,
                              "num_frames": 4, "max_words": 16, "block_layers": 2,
                              "num_workers": 0, "device": "cpu", **given})
    model = train.build_model(cfg, torch.device("cpu"))
    step = folder / "step_000001"
    step.mkdir(parents=True)
    save_file({k: v.contiguous() for k, v in trainable_state(model).items()},
              str(step / "model.safetensors"))
    (step / "config.json").write_text(json.dumps({"settings": vars(cfg)}))
    os.symlink("step_000001", folder / "best")
    return str(folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_data):
    folder = tmp_path_factory.mktemp("runs")
    return (make_run(folder / "pha", tiny_data),
            make_run(folder / "bare", tiny_data, individual_prototypes=0, local_prototypes=0),
            make_run(folder / "mean", tiny_data, levels="mean"))


@pytest.fixture(scope="module")
def model(tiny_data):
    from model_pha import PHAConfig, PHANet
    import backbones
    torch.manual_seed(0)
    return PHANet(PHAConfig(backbone=CLIP, num_frames=4, max_words=16, block_layers=2),
                  backbones.load(CLIP, dtype=torch.float32)).eval()


def wrote(folder):
    files = {f.name: f.read_bytes() for f in Path(folder, "figures").iterdir()}
    assert all(content.startswith(PNG) and len(content) > 2000 for content in files.values())
    return set(files)


def test_all_pictures_of_a_run_and_of_two(runs, capsys, monkeypatch):
    monkeypatch.setitem(figures.matplotlib.rcParams, "savefig.dpi", 40)  # quick, not pretty
    pha, bare, mean = runs
    figures.main(settings(ckpt=pha, compare=bare, tsne_pairs=4, samples=2))
    examples = {"examples_t2v_test.png", "examples_v2t_test.png"}
    assert wrote(pha) == {"attention_test.png", "cmc_test.png", "tsne_test.png", *examples}
    # a model without prototypes and tokens says what it skips
    figures.main(settings(ckpt=mean, max_rank=5, ids="test3"))
    assert wrote(mean) == {"cmc_test.png", "geometry_test.png", *examples}
    said = capsys.readouterr().out
    assert "attention of" in said and "tsne of" in said and "skipped: PHANet has no" in said
    assert "geometry of" in said and "an item of PHANet is many vectors" in said


def test_signs_that_no_font_has_are_told_in_one_line(tmp_path, capsys, recwarn):
    # a letter of a script that no font of matplotlib's list draws, twice, and one that it does
    fig = figures.Figure()
    fig.text(0.1, 0.5, "\U00012000 \U00012001 \U00012000 a")
    fig.canvas.draw()
    figures.save(fig, tmp_path / "a.png")
    wrote, note = capsys.readouterr().out.splitlines()
    assert wrote == f"wrote {tmp_path / 'a.png'}"
    assert "boxes for 2 signs that no font here has (\U00012000\U00012001)" in note
    assert not [w for w in recwarn if "Glyph" in str(w.message)]


@pytest.mark.parametrize("side", ["text", "video"])
def test_attention_is_a_literal_softmax_of_queries_and_keys(model, side):
    from data import Sample
    frames = torch.randint(256, (4, 48, 48, 3), dtype=torch.uint8).numpy()
    batch = model.collate([Sample("a", "a red square moves up", frames)])[side]
    A, share = figures.prototype_attention(model, side, batch, 2)
    P, n = 3, 7 if side == "text" else 4  # five words with start and end; frames
    assert A.shape == (P, n)
    torch.testing.assert_close(A.sum(1), torch.ones(P))
    # the block's input, made by hand: tokens, without the padding, then prototypes
    with torch.no_grad():
        x, mask = model.words(batch) if side == "text" else (model.frames(batch), None)
        p = model.head["prototypes_I"]["both"]
        x = torch.cat([x[0], p]) + model.head["block_I"]["both"].positions[:x.shape[1] + P]
        real = torch.cat([mask[0] if side == "text" else torch.ones(n, dtype=torch.bool),
                          torch.ones(P, dtype=torch.bool)])
        x = x[real][None]  # [1, n + P, D]
        first, second = model.head["block_I"]["both"].layers
        h = second.layer_norm1(first(x, attention_mask=None))[0]
        att, want = second.self_attn, torch.zeros(n + P, n + P)
        d = h.shape[1] // att.num_heads
        q, k = att.q_proj(h), att.k_proj(h)
        for head in range(att.num_heads):
            part = slice(head * d, head * d + d)
            for i in range(n + P):
                e = [torch.exp(q[i, part] @ k[j, part] / d ** 0.5).item() for j in range(n + P)]
                want[i] += torch.tensor(e) / sum(e) / att.num_heads
    torch.testing.assert_close(want.sum(1), torch.ones(n + P))
    torch.testing.assert_close(share, want[-P:, :n].sum(1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(A, want[-P:, :n] / want[-P:, :n].sum(1, keepdim=True), rtol=1e-4,
                               atol=1e-5)


def test_cmc_counts_the_ranks_of_eval():
    S = torch.randint(6, (12, 8), generator=torch.Generator().manual_seed(0)) / 8  # with ties
    owner = torch.tensor([0, 0, 1, 2, 3, 4, 4, 4, 5, 6, 7, 7])
    for protocol in evaluation.PROTOCOLS:
        want = evaluation.both_directions(S, S, owner, protocol)
        for r, m in zip(evaluation.both_ranks(S, S, owner, protocol), (want["t2v"], want["v2t"])):
            curve = figures.cmc(r, 12)
            assert [curve[k - 1].item() for k in (1, 5, 10)] == \
                pytest.approx([m["R@1"], m["R@5"], m["R@10"]])
            literal = [100 * sum(x <= k for x in r.tolist()) / len(r) for k in range(1, 13)]
            assert curve.tolist() == pytest.approx(literal)


def test_word_pieces_are_readable(model):
    tok = model.backbone.tokenizer
    ids = [tok.bos_token_id, *tok("a red zebra, $5", add_special_tokens=False).input_ids,
           tok.eos_token_id]
    pieces = figures.word_pieces(tok, ids)
    assert pieces[:3] == ["[start]", "a", "red"] and pieces[-1] == "[end]"
    joined = "".join(p[:-1] if p[-1] == "-" else p + " " for p in pieces[1:-1])
    assert joined == "a red zebra , $ 5 "


def test_mixing_of_apart_and_of_equal_clouds():
    x = torch.nn.functional.normalize(torch.randn(200, 8), dim=-1)
    assert figures.mixing(x[:40], x[:40])[0] > 0.4
    e = torch.eye(8)
    apart = [torch.nn.functional.normalize(e[i] + 0.01 * x[:40], dim=-1) for i in (0, 1)]
    got, chance = figures.mixing(*apart)
    assert got == 0 and chance == pytest.approx(40 / 79)


def test_geometry_is_the_literal_formulas():
    g = torch.Generator().manual_seed(0)
    owner = [0, 0, 1, 2, 3, 3]
    T, V = (torch.nn.functional.normalize(torch.randn(n, 5, generator=g), dim=-1) for n in (6, 4))
    got = figures.geometry(T, V, torch.tensor(owner))
    t, v = T.tolist(), V.tolist()

    def squared(a, b):
        return sum((x - y) ** 2 for x, y in zip(a, b))

    centroids = [[sum(row[d] for row in rows) / len(rows) for d in range(5)] for rows in (t, v)]
    assert got["gap"] == pytest.approx(math.sqrt(squared(*centroids)), rel=1e-6)
    assert got["alignment"] == pytest.approx(
        sum(squared(t[i], v[j]) for i, j in enumerate(owner)) / 6, rel=1e-6)
    for key, rows in (("uniformity, text", t), ("uniformity, video", v)):
        e = [math.exp(-2 * squared(a, b)) for i, a in enumerate(rows) for b in rows[:i]]
        assert got[key] == pytest.approx(math.log(sum(e) / len(e)), rel=1e-6)
    # identical clouds have no gap; opposite ones are as far apart as unit vectors get
    one = torch.eye(5)[:1].repeat(3, 1)
    assert figures.geometry(one, one, torch.arange(3)) == pytest.approx(
        {"gap": 0, "alignment": 0, "uniformity, text": 0, "uniformity, video": 0})
    assert figures.geometry(one, -one, torch.arange(3))["gap"] == pytest.approx(2)


def test_principal_components_are_those_of_sklearn():
    from sklearn.decomposition import PCA
    x = torch.randn(30, 6, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 7)
    a, b, shares = figures.components(x[:20], x[20:])
    pca = PCA(2, svd_solver="full")
    want, got = pca.fit_transform(x.double().numpy()), np.concatenate([a, b])
    assert abs(got) == pytest.approx(abs(want))  # an axis may point either way
    assert shares == pytest.approx(list(pca.explained_variance_ratio_))


def test_the_dot_product_of_slots_side_by_side_is_the_score_of_mars():
    text, video = (torch.nn.functional.normalize(torch.randn(n, 3, 5), dim=-1) for n in (4, 6))
    S = torch.einsum("imd,jmd->mij", text, video).mean(0)
    a, b = (figures.one_vector({"slots": x}) for x in (text, video))
    torch.testing.assert_close(a @ b.T, S)
    torch.testing.assert_close(a.norm(dim=1), torch.ones(4))


def test_slq_has_geometry_and_examples(tiny_qwen2vl, tiny_data, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(figures.matplotlib.rcParams, "savefig.dpi", 40)
    run = make_run(tmp_path / "slq", tiny_data, model="slq", backbone=tiny_qwen2vl)
    figures.main(settings(ckpt=run, samples=1, only="geometry,examples"))
    assert wrote(run) == {"geometry_test.png", "examples_t2v_test.png", "examples_v2t_test.png"}
    assert "attention" not in capsys.readouterr().out
    for head in (None, torch.nn.Linear(2, 2)):
        model = SimpleNamespace(head=head)
        assert figures.no_attention(model).startswith("SimpleNamespace has no prototypes")


def test_the_geometry_of_two_runs_is_printed_and_drawn(runs, capsys, monkeypatch):
    monkeypatch.setitem(figures.matplotlib.rcParams, "savefig.dpi", 40)
    figures.main(settings(ckpt=runs[2], compare=f"{runs[2]}/best", only="geometry"))
    said = [line.split() for line in capsys.readouterr().out.splitlines()]
    at = next(i for i, line in enumerate(said) if line[:1] == ["gap"])
    assert said[at + 1][1:] == said[at + 2][1:] and len(said[at + 1]) == 5
    assert "geometry_test.png" in wrote(runs[2])


@pytest.mark.parametrize("run, given, says", [
    (0, dict(only="geometry"), "an item of PHANet is many vectors here"),
    (0, dict(only="tsen"), "'tsen' is not one of"), (0, dict(pick="good"), "pick must be one of"),
    (0, dict(ids="tets3", only="attention"), "did you mean 'test3'"),
    (0, dict(layer=3, only="attention"), "layer must be 1 .. 2"),
    (1, dict(only="attention"), "without individual prototypes"),
    (2, dict(only="tsne"), "PHANet has no individual or local level")])
def test_errors_are_one_line(runs, run, given, says, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["figures.py"])
    with pytest.raises(SystemExit) as stop:
        train.one_line_errors(lambda: figures.main(settings(ckpt=runs[run], **given)))
    assert re.search(re.escape(says), stop.value.code) and "\n" not in stop.value.code
