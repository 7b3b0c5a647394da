"""
SLQ on a tiny random Qwen2-VL: the prefix cache against the plain pass and against the plain
transformers model, what stays frozen, and each row of the paper's comparison. CPU, about 25 s.

python -m pytest tests/test_model_slq.py -v
"""
import math
import multiprocessing.forkserver
import os
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import backbones
import train
from checkpoint import load_trainable, trainable_state
from conftest import ROOT, make_qwen2vl
from model_slq import MAX_TAU, MIN_TAU, SLQ, SLQConfig
from test_train import argv, launch, lines, train_here

close = torch.testing.assert_close
CAPTIONS = ["a red circle moves left", "a blue square grows", "two circles", "a red circle moves",
            "the green triangle moves up and then a red square shrinks right", "square"]
FRAMES = (1, 4, 2, 6, 1, 3)
N = 5
LAST = dict(extraction="last")
TABLE_5 = {  # every row of the comparisons -> the groups that it trains besides tau
    "slq": (dict(), "queries"),
    "plain pass": (dict(prefix_cache=False), "queries"),
    "separate queries": (dict(share_queries=False), "queries"),
    "last query": (dict(pooling="last"), "queries"),
    "max": (dict(pooling="max", gradient_checkpointing=False), "queries"),
    "linear head": (dict(extraction="linear"), "head"),
    "TF block": (dict(extraction="block"), "head"),
    "prompt": (dict(tuning="prompt", **LAST), "prompt"),
    "adapter": (dict(tuning="adapter", adapter_dim=4, **LAST), "adapters"),
    "lora": (dict(tuning="lora", **LAST), "LoRA"),
    "full": (dict(tuning="full", **LAST), "LLM"),
    "full, no checkpointing": (dict(tuning="full", gradient_checkpointing=False, **LAST), "LLM"),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Weights larger than usual: embeddings of a flat model are all alike, and gradients vanish."""
    return make_qwen2vl(tmp_path_factory.mktemp("tiny-qwen2-vl"), initializer_range=0.2)


def make(path, seed=0, shake=True, **settings):
    """A small SLQ; `shake` moves parameters off a start at zero."""
    torch.manual_seed(seed)
    model = SLQ(SLQConfig(backbone=path, **{**dict(num_queries=N), **settings}),
                backbones.load(path))
    if shake:
        with torch.no_grad():
            for name, p in model.named_parameters():
                if p.requires_grad and name != "log_tau":
                    p.add_(0.1 * torch.randn_like(p))
    return model


def samples(n=6, seed=0):
    rng = np.random.default_rng(seed)
    return [SimpleNamespace(id=f"clip{i}", caption=CAPTIONS[i], index=i,
                            frames=rng.integers(0, 256, (FRAMES[i], 16, 16, 3), dtype=np.uint8))
            for i in range(n)]


def grads(model):
    out = {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}
    model.zero_grad(set_to_none=True)
    return out


def step(model, batch, ids=None):
    text, video = model(batch)
    loss, logs = model.loss(text, video, ids)
    loss.backward()
    return loss.detach(), logs


def assert_near(got, want, tolerance=1e-5):
    assert got.keys() == want.keys()
    for name in want:
        assert want[name].norm() > 0, name
        off = ((got[name] - want[name]).norm() / want[name].norm()).item()
        assert off < tolerance, f"{name} is off by {off:.1e}"


def inputs_of(model, side, padding_side="right"):
    cfg, items = model.config, samples()
    content = dict(captions=[s.caption for s in items]) if side == "text" else \
        dict(frames=[s.frames for s in items])
    prompt = cfg.text_prompt if side == "text" else cfg.video_prompt
    return model.backbone.collate(prompt, **content, n_append=model.n_append,
                                  padding_side=padding_side)


# ---------------------------------------------------------------- the prefix cache


@pytest.mark.parametrize("side", ["text", "video"])
def test_prefix_cache_is_the_plain_pass(path, side):
    plain = make(path, prefix_cache=False)
    target = torch.randn(6, 32, generator=torch.Generator().manual_seed(1))

    def outcome(model, inputs):
        model.queries.data.copy_(plain.queries)
        z = getattr(model, f"encode_{side}")(inputs)["z"]
        (z * target).sum().backward()
        return z.detach(), model.queries.grad.clone(), model.zero_grad(set_to_none=True)

    want_z, want_grad, _ = outcome(plain, inputs_of(plain, side))
    assert (want_z[0] - want_z[1]).abs().max() > 1e-2, "items must differ for this to be a test"
    assert len(set(inputs_of(plain, side)["attention_mask"].sum(1).tolist())) > 2
    for padding_side in ("right", "left"):
        for settings in (dict(content_chunk=0), dict(content_chunk=4), dict(content_chunk=1),
                         dict(content_chunk=4, gradient_checkpointing=False),
                         dict(prefix_cache=False)):
            model = make(path, **settings)
            inputs = inputs_of(model, side, padding_side)
            assert bool(inputs["attention_mask"][:, 0].all()) == (padding_side == "right")
            z, grad, _ = outcome(model, inputs)
            close(z, want_z, rtol=0, atol=1e-5)
            assert (grad - want_grad).norm() < 1e-5 * want_grad.norm(), (padding_side, settings)


@pytest.mark.parametrize("settings", [dict(), dict(share_queries=False), dict(pooling="max")])
def test_a_step_and_the_gradient_cache_give_the_plain_gradient(path, settings):
    plain = make(path, prefix_cache=False, **settings)
    (whole,), ids, _ = train.collate_chunks(samples(), plain.collate, 0)
    loss, _ = train.plain_step(plain, whole, ids, nullcontext)
    want = grads(plain)
    for chunk_size, content_chunk in ((0, 32), (0, 4), (4, 3), (1, 32)):
        model = make(path, content_chunk=content_chunk, **settings)
        chunks, ids, _ = train.collate_chunks(samples(), model.collate, chunk_size)
        got, _ = train.cached_step(model, chunks, ids, nullcontext) if chunk_size else \
            train.plain_step(model, chunks[0], ids, nullcontext)
        close(got, loss)
        assert_near(grads(model), want)


def test_content_runs_once_without_gradient_and_without_what_nobody_reads(path):
    model = make(path, content_chunk=0, gradient_checkpointing=False)
    inputs, seen = inputs_of(model, "video"), {0: [], 2: []}
    for i in seen:
        model.backbone.layers[i].mlp.register_forward_hook(
            lambda module, args, x, i=i: seen[i].append((*x.shape[:2], x.requires_grad)))
    model.encode_video(inputs)
    n = int(inputs["attention_mask"].sum(1).max()) - N
    vision = model.backbone.tokenizer.convert_tokens_to_ids(model.backbone.vision_token)
    P = int((inputs["input_ids"][0] == vision).nonzero()[0])  # up to the video all is the template
    assert seen[0] == [(1, P, False), (6, n - P, False), (6, N, True)]
    assert seen[2] == [(6, N, True)]  # the last layer's states of the content have no reader


def test_what_is_kept_for_backward_is_the_cache(path):
    model, plain = make(path), make(path, prefix_cache=False, gradient_checkpointing=False)
    inputs = inputs_of(model, "video")

    def saved(model):
        sizes = {}

        def pack(x):
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            model.encode_video(inputs)
        return sum(size for key, size in sizes.items() if key not in weights)

    kv = model._fill(model._content(inputs))
    n = int(inputs["attention_mask"].sum(1).max()) - N
    real = sum(x.numel() * x.element_size() for pair in kv for x in pair)
    assert real == 6 * model.cache_bytes(n) == 6 * 3 * 2 * 2 * 8 * n * 4  # layers, K V, heads, d
    assert saved(model) < 0.1 * saved(plain)
    assert f"{model.cache_bytes():,d} bytes per token" in model.summary()
    assert "KV cache" not in plain.summary()


def test_the_items_of_a_batch_are_selected_with_their_pixels(path):
    backbone, items = backbones.load(path), samples()
    rows = torch.tensor([3, 0, 4])
    for side in ("captions", "frames"):
        values = [s.caption if side == "captions" else s.frames for s in items]
        prompt = "<video> what?" if side == "frames" else "{caption} what?"
        part = backbone.select(backbone.collate(prompt, **{side: values}, n_append=2), rows)
        want = backbone.collate(prompt, **{side: [values[i] for i in rows]}, n_append=2)
        L = want["input_ids"].shape[1]
        assert part.keys() == want.keys()
        for key in want:
            cut = part[key][..., :L] if part[key].shape[-2:] == (3, part["input_ids"].shape[1]) \
                else part[key]
            mask = want["attention_mask"].bool() if key == "position_ids" else None
            close(cut[:, mask], want[key][:, mask]) if mask is not None else close(cut, want[key])


# ---------------------------------------------------------------- the method


@pytest.mark.parametrize("side", ["text", "video"])
def test_an_embedding_is_eq_1_to_6_on_the_plain_transformers_model(path, side):
    model, plain = make(path), backbones.load(path).model
    with torch.no_grad():
        plain.get_input_embeddings().weight[500:500 + N] = model.queries
    inputs = {k: v for k, v in inputs_of(model, side).items() if k != "cut"}
    pos = inputs.pop("append_pos")
    inputs["input_ids"].scatter_(1, pos, torch.arange(500, 500 + N).expand(6, N))
    h = plain.model(**inputs, use_cache=False).last_hidden_state  # after the final norm
    for pooling in ("mean", "last", "max"):
        model.config.pooling = pooling
        z = getattr(model, f"encode_{side}")(inputs_of(model, side))["z"]
        for i in range(6):
            n = int(inputs["attention_mask"][i].sum())
            rows = [h[i, n - N + k] for k in range(N)]  # Eq. 4: the last N positions
            want = {"mean": sum(rows) / N, "last": rows[-1]}.get(pooling)
            if pooling == "max":
                want = torch.stack([max(row[d] for row in rows) for d in range(32)])
            close(z[i], want / want.norm(), rtol=1e-4, atol=1e-5)


def test_an_embedding_ignores_its_batch_mates(path):
    for settings in (dict(content_chunk=2), dict(extraction="block"),
                     dict(tuning="prompt", **LAST)):
        model, items = make(path, **settings).eval(), samples()
        with torch.no_grad():
            whole = model(model.collate(items))
            turned = model(model.collate(items[::-1]))
            for side in (0, 1):
                close(turned[side]["z"].flip(0), whole[side]["z"], rtol=0, atol=1e-4)
                for i in (0, 4):
                    alone = model(model.collate(items[i:i + 1]))[side]["z"][0]
                    close(alone, whole[side]["z"][i], rtol=0, atol=1e-4)


def test_the_start_of_queries_and_temperature(path):
    big = make(path, shake=False, num_queries=500).queries
    assert big.std().item() == pytest.approx(32 ** -0.5, rel=0.05) and abs(big.mean()) < 0.01
    zero = make(path, shake=False, num_queries=1, query_init="zeros")
    assert not zero.queries.any() and zero.log_tau.exp().item() == pytest.approx(0.07)
    text, video = zero(zero.collate(samples()))  # Fig. 2's pilot: an embedding without training
    close(text["z"].norm(dim=1), torch.ones(6))
    assert make(path, share_queries=False).queries.shape == (2, N, 32)


def test_the_loss_is_eq_7_to_9(path):
    model, g = make(path, tau=0.1), torch.Generator().manual_seed(0)
    t, v = ({"z": F.normalize(torch.randn(4, 32, generator=g), dim=-1)} for _ in "tv")
    cos = [[torch.dot(a, b).item() for b in v["z"]] for a in t["z"]]

    def eq_9(negative):
        total = 0.0
        for i in range(4):
            e = [math.exp(cos[i][j] / 0.1) for j in range(4) if j == i or negative(i, j)]
            total -= math.log(math.exp(cos[i][i] / 0.1) / sum(e)) / 4
            e = [math.exp(cos[j][i] / 0.1) for j in range(4) if j == i or negative(i, j)]
            total -= math.log(math.exp(cos[i][i] / 0.1) / sum(e)) / 4
        return total / 2

    loss, logs = model.loss(t, v, [0, 1, 0, 2])
    assert loss.item() == pytest.approx(eq_9(lambda i, j: True), rel=1e-5)
    assert logs["tau"].item() == pytest.approx(0.1)
    assert logs["pos"].item() == pytest.approx(sum(cos[i][i] for i in range(4)) / 4, abs=1e-6)
    assert logs["neg"].item() == pytest.approx(
        sum(cos[i][j] for i in range(4) for j in range(4) if i != j) / 12, abs=1e-6)
    close(model.similarity(t, v), torch.tensor(cos))
    model = make(path, tau=0.1, mask_same_video=True)
    masked = model.loss(t, v, [0, 1, 0, 2])[0].item()
    assert masked == pytest.approx(eq_9(lambda i, j: {i, j} != {0, 2}), rel=1e-5)
    with pytest.raises(ValueError, match="mask_same_video needs"):
        model.loss(t, v)


def test_the_temperature_is_clamped_as_a_parameter(path):
    model = make(path)
    batch = model.collate(samples())
    for start, want in ((-9.0, MIN_TAU), (9.0, MAX_TAU)):
        with torch.no_grad():
            model.log_tau.fill_(start)
        _, logs = step(model, batch)
        assert logs["tau"].item() == pytest.approx(want)
        assert model.log_tau.exp().item() == pytest.approx(want)
        assert grads(model)["log_tau"] != 0  # at the limit it can still come back


# ---------------------------------------------------------------- frozen, trained, saved


@pytest.mark.parametrize("row", TABLE_5)
def test_every_row_trains_all_it_says_and_is_restored_by_it_alone(path, row):
    settings, group = TABLE_5[row]
    model = make(path, shake=False, lora_dropout=0.0, **settings)
    batch = model.collate(samples())
    frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for k in range(2):
        loss, logs = step(model, batch)
        assert torch.isfinite(loss)
        unused = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
        assert unused == [], "DDP would stop at the first of them"
        assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
        if k:  # from the second step on nothing is held at zero by another zero
            assert all(g.any() for n, g in grads(model).items() if "k_proj.bias" not in n)
        else:
            optimizer.step()
            optimizer.zero_grad()
    assert set(model.trainable_groups()) == {group, "tau"}
    assert all(torch.equal(p, frozen[n]) for n, p in model.named_parameters() if n in frozen)
    assert all(p.dtype == torch.float32 for p in trainable_state(model).values())

    other = make(path, seed=2, lora_dropout=0.0, **settings)
    assert not torch.allclose(other(batch)[0]["z"], model(batch)[0]["z"], atol=1e-4)
    load_trainable(other,
                   {k: v.clone() for k, v in trainable_state(model).items()})
    for a, b in zip(model.eval()(batch), other.eval()(batch)):
        assert torch.equal(a["z"], b["z"])


def test_training_leaves_the_backbone_and_its_logits_as_they_were(path):
    model, untouched = make(path, shake=False), backbones.load(path)
    batch = model.collate(samples())
    known = {k: v for k, v in batch["video"].items() if k not in ("append_pos", "cut")}
    with torch.no_grad():
        before = model.backbone.model(**known).logits
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    start = model.queries.detach().clone()
    for _ in range(2):
        step(model.train(), batch)
        optimizer.step()
        optimizer.zero_grad()
    assert (model.queries - start).abs().min() > 0
    for (name, a), b in zip(model.backbone.model.named_parameters(), untouched.model.parameters()):
        assert torch.equal(a, b), name
    with torch.no_grad():
        assert torch.equal(model.backbone.model(**known).logits, before)
        assert torch.equal(untouched.model(**known).logits, before)
    assert not model.backbone.embed._forward_hooks
    assert set(trainable_state(model)) == {"queries", "log_tau"}
    assert sum(p.numel() for p in trainable_state(model).values()) == N * 32 + 1


def test_the_backbone_stays_in_eval_mode(tmp_path):
    noisy = make_qwen2vl(tmp_path, attention_dropout=0.5)  # noisy if train() reached it
    for settings in (dict(), dict(prefix_cache=False), dict(tuning="full", **LAST)):
        model = make(noisy, **settings).train()
        batch = model.collate(samples(2))
        assert model.training and torch.equal(model(batch)[1]["z"], model(batch)[1]["z"])
    lora = make(noisy, tuning="lora", lora_dropout=0.5, **LAST)
    assert not torch.equal(lora(batch)[1]["z"], lora(batch)[1]["z"])
    lora.eval()
    assert torch.equal(lora(batch)[1]["z"], lora(batch)[1]["z"])


def test_only_the_plain_pass_checkpoints_layers_and_the_vision_tower_has_no_graph(path):
    for settings, calls in ((dict(prefix_cache=False), 4), (dict(tuning="lora", **LAST), 4),
                            (dict(tuning="lora", gradient_checkpointing=False, **LAST), 2)):
        model, n, graph = make(path, **settings), [], []
        model.backbone.layers[1].mlp.register_forward_pre_hook(lambda *a: n.append(1))
        for block in model.backbone.model.model.visual.blocks:
            block.register_forward_hook(lambda module, args, x: graph.append(x.requires_grad))
        step(model, model.collate(samples()))
        assert len(n) == calls and graph == [False, False]


# ---------------------------------------------------------------- what SLQ is compared with


def test_prompt_tokens_stand_in_front_and_see_no_content(path):
    model, plain = make(path, tuning="prompt", **LAST), backbones.load(path)
    inputs = inputs_of(model, "text")
    seen = []
    model.backbone.layers[-1].register_forward_hook(lambda module, args, h: seen.append(h[:, :N]))
    z = model.encode_text(inputs)["z"]
    close(seen[0], seen[0][:1].expand(6, -1, -1))  # the same states whatever the caption
    for i in range(6):
        ids = inputs["input_ids"][i, :int(inputs["attention_mask"][i].sum())]
        x = torch.cat([model.queries, plain.embed(ids)])[None]  # [1, N + n, D]
        h = plain.decoder(inputs_embeds=x, position_ids=torch.arange(x.shape[1]).expand(3, 1, -1),
                          use_cache=False).last_hidden_state
        close(z[i], F.normalize(h[0, -1], dim=0), rtol=1e-4, atol=1e-5)
    left = model.encode_video(inputs_of(model, "video", "left"))["z"]
    close(left, model.encode_video(inputs_of(model, "video"))["z"], rtol=0, atol=1e-4)


def test_comparisons_start_where_the_last_token_is(path):
    zero_shot = make(path, **LAST)
    batch = zero_shot.collate(samples())
    with pytest.raises(ValueError, match="is the zero-shot pilot"):
        zero_shot(batch)
    want = zero_shot.eval()(batch)
    plain = backbones.load(path)
    for side, z in zip(("text", "video"), want):
        h, n = plain.run(batch[side]), batch[side]["attention_mask"].sum(1)
        for i in range(6):
            close(z["z"][i], F.normalize(h[i, n[i] - 1], dim=0), rtol=1e-4, atol=1e-5)
    for settings in (dict(extraction="linear"), dict(extraction="block"),
                     dict(tuning="adapter", **LAST), dict(tuning="lora", **LAST),
                     dict(tuning="full", **LAST)):
        model = make(path, shake=False, **settings).eval()
        for a, b in zip(model(batch), want):
            close(a["z"], b["z"], rtol=0, atol=1e-5)


def test_lora_is_on_every_linear_of_the_llm_and_nowhere_else(path, tmp_path):
    model = make(path, tuning="lora", **LAST)
    on = {n.split("base_model.model.")[1].split(".lora_A")[0]
          for n, _ in model.named_parameters() if "lora_A" in n}
    parts = [*(f"self_attn.{x}_proj" for x in "qkvo"), *(f"mlp.{x}_proj" for x in
                                                        ("gate", "up", "down"))]
    assert on == {f"model.language_model.layers.{i}.{x}" for i in range(3) for x in parts}
    with pytest.raises(ValueError, match="already carries LoRA"):
        SLQ(model.config, model.backbone)
    model.save_adapter(str(tmp_path / "a"))
    assert (tmp_path / "a" / "adapter_model.safetensors").exists()
    make(path).save_adapter(str(tmp_path / "b"))
    assert not (tmp_path / "b").exists()


def test_full_trains_the_llm_with_its_embedding_and_leaves_vision_alone(path):
    model = make(path, tuning="full", **LAST)
    names = [n.removeprefix("mllm.model.") for n in model.trainable_groups()["LLM"]]
    assert all(n.startswith("language_model.") for n in names)
    llm = model.backbone.model.model.language_model
    assert len(names) == len(list(llm.parameters()))
    backbone = backbones.load(path, dtype=torch.bfloat16)
    model = SLQ(SLQConfig(tuning="full", **LAST), backbone)
    assert {p.dtype for p in llm.parameters()} == {torch.float32}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        text, video = model(model.collate(samples(2)))
    model.loss(text, video)[0].backward()
    assert all(torch.isfinite(g).all() for g in grads(model).values())


def test_groups_counts_and_weight_decay(path):
    # an adapter on 2 places of 3 layers: 32 -> 4 -> 32 with biases
    model = make(path, tuning="adapter", adapter_dim=4, **LAST)
    want = 6 * (2 * 32 * 4 + 4 + 32)
    assert f"trained adapters {want:14,d}" in model.summary()
    model = make(path)
    assert f"trained queries  {N * 32:14,d}\ntrained tau      {1:14,d}" in model.summary()
    assert [n for n in trainable_state(model) if model.no_decay(n)] == ["queries", "log_tau"]
    model = make(path, extraction="linear")
    assert not model.no_decay("head.weight") and model.no_decay("head.bias")


def test_bf16_backbone_under_autocast_trains_fp32_queries(path):
    model = SLQ(SLQConfig(num_queries=N), backbones.load(path, dtype=torch.bfloat16))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        text, video = model(model.collate(samples()))
        loss, _ = model.loss(text, video)
    loss.backward()
    close(text["z"].norm(dim=-1), torch.ones(6), rtol=1e-6, atol=1e-6)
    assert loss.dtype == torch.float32 and model.queries.dtype == torch.float32
    assert all(torch.isfinite(g).all() and g.any() for g in grads(model).values())
    assert model.cache_bytes() == 3 * 2 * 2 * 8 * 2


# ---------------------------------------------------------------- collate, settings, processes


def test_collate_gives_the_sides_that_the_samples_have(path):
    model, items = make(path), samples()
    texts = [SimpleNamespace(id=s.id, caption=s.caption, frames=None) for s in items]
    videos = [SimpleNamespace(id=s.id, caption=None, frames=s.frames) for s in items]
    assert list(model.collate(items)) == ["text", "video"]
    assert list(model.collate(texts)) == ["text"] and list(model.collate(videos)) == ["video"]
    with pytest.raises(ValueError, match="2 of 6 samples have no caption, the first is 'clip0'"):
        model.collate([*videos[:2], *items[2:]])


def test_an_image_and_a_text_share_a_prompt_and_sums_come_before_the_norm(path):
    model, items = make(path), samples()
    prompt = "<video> now {caption} please:"
    inputs = model.collate_prompt(items, prompt)
    assert "pixel_values_videos" in inputs
    with torch.no_grad():
        z, raw = (model.encode_video(inputs, normalize=n)["z"] for n in (True, False))
        close(F.normalize(raw, dim=-1), z)
        assert (raw.norm(dim=1) - 1).abs().min() > 1e-3
        alone = model.encode_video(model.collate_prompt(items[2:3], prompt))
    close(alone["z"][0], z[2], rtol=0, atol=1e-4)
    with pytest.raises(ValueError, match="holds neither <video> nor {caption}"):
        model.collate_prompt(items, "hello")


def test_a_long_caption_is_cut_and_keeps_its_prompt(path):
    model = make(path, max_text_tokens=3).eval()
    long = SimpleNamespace(id="x", caption="a red circle moves left and left and left", frames=None)
    short = SimpleNamespace(id="y", caption="a red circle", frames=None)
    a, b = (model.collate([s])["text"] for s in (long, short))
    assert torch.equal(a["input_ids"], b["input_ids"])
    assert a["cut"].tolist() == [True] and b["cut"].tolist() == [False]
    text = model.backbone.tokenizer.decode(a["input_ids"][0])
    assert text.count("Summary above sentence in one word:<|im_end|>\n<|im_start|>assistant\n") == 1
    assert torch.equal(model.encode_text(a)["z"], model.encode_text(b)["z"])


@pytest.mark.parametrize("bad, says", [
    (dict(tuning="none"), "tuning must be one of slq, prompt, adapter, lora, full; got 'none'"),
    (dict(extraction="cls"), "extraction must be one of queries, last, linear, block"),
    (dict(query_init="ones"), "query_init must be one of normal, zeros"),
    (dict(pooling="sum"), "pooling must be one of mean, last, max"),
    (dict(tuning="lora"), "tuning=lora is compared on the last token: set extraction=last"),
    (dict(tuning="full", extraction="linear"), "set extraction=last; got extraction=linear"),
    (dict(share_queries=False, extraction="last"), "share_queries=False needs extraction=queries"),
    (dict(pooling="max", extraction="block"), "pooling=max needs extraction=queries"),
    (dict(num_queries=0), "num_queries must be at least 1; got 0"),
    (dict(content_chunk=-1), "content_chunk must be at least 0"),
    (dict(lora_r=0), "lora_r must be at least 1"),
    (dict(lora_dropout=1.0), "lora_dropout must be below 1"),
    (dict(adapter_dim=0), "adapter_dim must be at least 1"),
    (dict(tau=0.0), "tau must be between 0.01 and 1.0; got 0.0"),
    (dict(tau=float("nan")), "tau must be between"),
    (dict(video_prompt="Summarize"), "video_prompt must hold <video> once"),
    (dict(text_prompt="{caption} <video>"), "text_prompt must hold {caption} once and no <video>"),
])
def test_bad_settings_are_one_sentence(bad, says):
    with pytest.raises(ValueError) as e:
        SLQConfig(**bad)
    assert says in str(e.value) and "\n" not in str(e.value)


def test_building_and_training_are_quiet(path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for settings in (dict(), dict(prefix_cache=False), dict(tuning="lora", **LAST)):
            model = make(path, **settings)
            step(model, model.collate(samples(2)))


def test_runs_by_train_py(path, tiny_data, tmp_path):
    args = argv(tmp_path / "slq", tiny_data, path, model="slq", chunk_size=3, max_steps=2)
    train_here(args)
    rows = lines(tmp_path / "slq")
    assert rows[0]["tau"] == pytest.approx(0.07) and rows[-1]["n_video"] == 8
    train_here(argv(tmp_path / "pilot", tiny_data, path, model="slq", extraction="last", epochs=0))
    assert lines(tmp_path / "pilot")[0]["step"] == 0  # validated without a step


@pytest.fixture(scope="module")
def fork_server():
    """As in test_train.py: processes that find torch imported."""
    with pytest.MonkeyPatch.context() as m:
        m.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{ROOT / 'tests'}")
        m.setenv("OMP_NUM_THREADS", "1")
        multiprocessing.set_forkserver_preload(["test_model_slq"])
        multiprocessing.forkserver.ensure_running()
    yield


def gradients_of_a_rank(path, file):
    rank, _, _ = train.init_distributed("cpu")
    results = []
    for chunk_size in (0, 2):
        model = make(path, content_chunk=2)
        wrapped = torch.nn.parallel.DistributedDataParallel(model, forward_sync_buffers=False)
        chunks, ids, _ = train.collate_chunks(samples()[3 * rank:3 * rank + 3], model.collate,
                                              chunk_size)
        for _ in range(2):  # a second step finds nothing left over from the first
            loss, _ = train.cached_step(wrapped, chunks, ids, nullcontext) if chunk_size else \
                train.plain_step(wrapped, chunks[0], ids, nullcontext)
            results.append((loss.item(), grads(model)))
    torch.save(results, f"{file}.{rank}")
    dist.destroy_process_group()


def test_two_processes_compute_the_gradient_of_one(path, tmp_path, fork_server):
    file = str(tmp_path / "gradients")
    codes = launch(gradients_of_a_rank, path, file, world=2, output=tmp_path / "output")
    assert codes == [0, 0], Path(tmp_path, "output.0").read_text()
    model = make(path, prefix_cache=False)
    (whole,), ids, _ = train.collate_chunks(samples(), model.collate, 0)
    loss, _ = train.plain_step(model, whole, ids, nullcontext)
    want = grads(model)
    for rank in (0, 1):
        for got_loss, got in torch.load(f"{file}.{rank}"):
            assert got_loss == pytest.approx(loss.item(), rel=1e-5)
            assert_near(got, want)
