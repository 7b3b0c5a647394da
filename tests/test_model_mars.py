"""
MARS on a tiny random Qwen2-VL of the native class: what is read where, checked against the plain
transformers model with output_hidden_states, and what must not matter. CPU, about 30 s.

python -m pytest tests/test_model_mars.py -v
"""
import warnings
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import backbones
from checkpoint import load_trainable, trainable_state
from conftest import make_qwen2vl
from model_mars import MAX_GAMMA, MARS, MARSConfig

close = torch.testing.assert_close
CAPTIONS = ["a red circle moves left", "a blue square grows", "two circles",
            "the green triangle moves up and then a red square shrinks right"]
TABLE_2 = {
    "final layer, one slot": dict(layer_fusion=False, num_slots=1, lambda_div=0.0, lambda_hn=0.0),
    "+ layer fusion": dict(num_slots=1, lambda_div=0.0, lambda_hn=0.0),
    "+ slots": dict(lambda_div=0.0, lambda_hn=0.0),
    "+ diversity": dict(lambda_hn=0.0),
    "+ hard negatives": dict(),
}


def make(path, seed=0, shake=True, **settings):
    """A small MARS; `shake` moves the parameters off their start (lora_B and w begin at zero)."""
    settings = {**dict(num_slots=3, lora_r=4, lora_alpha=8, lora_dropout=0.0), **settings}
    torch.manual_seed(seed)
    model = MARS(MARSConfig(backbone=path, **settings), backbones.load(path))
    if shake:
        with torch.no_grad():
            for p in model.parameters():
                if p.requires_grad:
                    p.add_(0.1 * torch.randn_like(p))
    return model


def samples(n=4, frames=4, seed=0):
    rng = np.random.default_rng(seed)
    return [SimpleNamespace(id=f"clip{i}", caption=CAPTIONS[i], index=i,
                            frames=rng.integers(0, 256, (frames, 16, 16, 3), dtype=np.uint8))
            for i in range(n)]


def step(model, batch, seed=None):
    if seed is not None:
        torch.manual_seed(seed)
    model.zero_grad(set_to_none=True)
    text, video = model(batch)
    loss, logs = model.loss(text, video, torch.arange(len(text["slots"])))
    loss.backward()
    return loss.detach(), logs


def grads(model):
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}


# ---------------------------------------------------------------- slots: what is read, and where


def plain_model(model, path):
    """The plain transformers model with the slot vectors written into spare rows of its embedding
    table, and model's LoRA merged: nothing of model_mars.py takes part in its forward."""
    plain = backbones.load(path).model
    M = model.config.num_slots
    lora = {n.split("base_model.model.")[1]: p for n, p in model.named_parameters() if "lora_" in n}
    scale = model.config.lora_alpha / model.config.lora_r
    with torch.no_grad():
        for name, B in lora.items():
            if "lora_B" in name:
                A = lora[name.replace("lora_B", "lora_A")]
                plain.get_submodule(name.split(".lora_B")[0]).weight += scale * B @ A
        plain.get_input_embeddings().weight[500 : 500 + M] = model.slots
    return plain


@pytest.mark.parametrize("final_norm", ["hf", "all", "none"])
@pytest.mark.parametrize("readout", ["preceding", "self"])
def test_slots_are_the_fused_hidden_states_of_the_plain_model(tiny_qwen2vl, readout, final_norm):
    model = make(tiny_qwen2vl, slot_readout=readout, final_norm=final_norm).eval()
    plain = plain_model(model, tiny_qwen2vl)
    M, N = 3, model.backbone.num_layers
    raw_last = []
    plain.model.language_model.layers[-1].register_forward_hook(
        lambda module, args, out: raw_last.append(out))
    batch = model.collate(samples())
    for side, inputs in batch.items():
        z = model.encode_text(inputs) if side == "text" else model.encode_video(inputs)
        inputs = {k: v for k, v in inputs.items() if k != "cut"}
        pos = inputs.pop("append_pos")
        # every row ends with the M placeholders, in order, and nothing but padding comes after
        assert torch.equal(pos[:, -1] + 1, inputs["attention_mask"].sum(1))
        assert torch.equal(pos.diff(), torch.ones(4, M - 1, dtype=torch.long))
        inputs["input_ids"].scatter_(1, pos, torch.arange(500, 500 + M).expand(4, M))
        with torch.no_grad():
            out = plain.model(**inputs, use_cache=False, output_hidden_states=True)
        hs, norm = out.hidden_states, plain.model.language_model.norm
        # what the tuple holds: embeddings, N - 1 raw layers, and the last layer after the norm
        assert len(hs) == N + 1
        assert torch.equal(hs[0][torch.arange(4)[:, None], pos], model.slots.expand(4, M, -1))
        assert torch.equal(hs[N], out.last_hidden_state)
        close(hs[N], norm(raw_last[-1]))
        layers = {"hf": list(hs[1:]), "none": [*hs[1:N], raw_last[-1]],
                  "all": [norm(h) for h in hs[1:N]] + [hs[N]]}[final_norm]
        alpha = model.w.exp() / model.w.exp().sum(1, keepdim=True)
        for i in range(4):
            for m in range(M):
                at = pos[i, m] - 1 if readout == "preceding" else pos[i, m]
                want = sum(alpha[m, n] * layers[n][i, at] for n in range(N))
                close(z["slots"][i, m], want / want.norm(), rtol=1e-4, atol=1e-5)


def test_final_layer_single_slot_is_the_last_prompt_token_of_the_plain_model(tiny_qwen2vl):
    model = make(tiny_qwen2vl, lora_r=0, shake=False, **TABLE_2["final layer, one slot"]).eval()
    plain = backbones.load(tiny_qwen2vl)
    inputs = plain.collate(model.config.text_prompt, CAPTIONS)  # no slot token at all
    h = plain.run(inputs)
    want = h[torch.arange(4), inputs["attention_mask"].sum(1) - 1]
    got = model.encode_text(model.collate(samples())["text"])["slots"]
    close(got, F.normalize(want, dim=-1)[:, None], rtol=1e-4, atol=1e-5)


def test_gradients_are_those_of_the_plain_model(tiny_qwen2vl):
    model = make(tiny_qwen2vl, slot_readout="self")
    plain = plain_model(model, tiny_qwen2vl)
    table = plain.get_input_embeddings().weight.requires_grad_()
    w = model.w.detach().clone().requires_grad_()
    inputs = model.collate(samples())["video"]
    target = torch.randn(4, 3, 32, generator=torch.Generator().manual_seed(1))
    (model.encode_video(inputs)["slots"] * target).sum().backward()

    inputs = {k: v for k, v in inputs.items() if k != "cut"}
    pos = inputs.pop("append_pos")
    inputs["input_ids"].scatter_(1, pos, torch.arange(500, 503).expand(4, 3))
    hs = plain.model(**inputs, use_cache=False, output_hidden_states=True).hidden_states[1:]
    h = torch.stack([x[torch.arange(4)[:, None], pos] for x in hs])
    z = torch.einsum("mn,nbmd->bmd", w.softmax(-1), h)
    (F.normalize(z, dim=-1) * target).sum().backward()
    close(model.slots.grad, table.grad[500:503], rtol=1e-4, atol=1e-6)
    close(model.w.grad, w.grad, rtol=1e-4, atol=1e-6)


def test_preceding_never_reads_the_last_slot_token(tiny_qwen2vl):
    batch = make(tiny_qwen2vl).collate(samples())
    for readout, last_row_moves in (("preceding", False), ("self", True)):
        model = make(tiny_qwen2vl, slot_readout=readout)
        step(model, batch)
        rows = model.slots.grad.abs().sum(1)
        assert (rows[:-1] > 0).all() and (rows[-1] > 0) == last_row_moves


def test_slot_start(tiny_qwen2vl):
    model = make(tiny_qwen2vl, slot_init="mean", shake=False)
    table = model.backbone.embed.weight.detach()
    close(model.slots.detach(), torch.stack([sum(table) / len(table)] * 3))
    big = make(tiny_qwen2vl, num_slots=200, shake=False).slots
    assert big.std().item() == pytest.approx(0.02, rel=0.1) and abs(big.mean().item()) < 1e-3
    alpha = make(tiny_qwen2vl, shake=False).w.softmax(-1)
    close(alpha, torch.full_like(alpha, 1 / 3))  # the plain mean of the 3 layers


# ---------------------------------------------------------------- invariances


@pytest.mark.parametrize("side", ["text", "video"])
def test_an_embedding_ignores_batch_mates_and_the_side_of_padding(tiny_qwen2vl, side):
    model, items = make(tiny_qwen2vl).eval(), samples()
    # videos of unequal length, so that video rows are padded too
    items[0].frames, items[2].frames = items[0].frames[:1], np.repeat(items[2].frames, 2, 0)
    encode = getattr(model, f"encode_{side}")
    whole = model.collate(items)[side]
    assert len(set(whole["attention_mask"].sum(1).tolist())) > 1
    z = encode(whole)["slots"]
    for i in range(4):
        close(encode(model.collate(items[i : i + 1])[side])["slots"][0], z[i], rtol=0, atol=1e-4)
    close(encode(model.collate(items[::-1])[side])["slots"].flip(0), z, rtol=0, atol=1e-4)
    cfg, key = model.config, {"text": "caption", "video": "frames"}[side]
    prompt = cfg.text_prompt if side == "text" else cfg.video_prompt
    kind = {"text": "captions", "video": "frames"}[side]
    left = model.backbone.collate(prompt, **{kind: [getattr(s, key) for s in items]}, n_append=3,
                                  padding_side="left")
    assert left["attention_mask"][:, -1].all() and not left["attention_mask"][:, 0].all()
    close(encode(left)["slots"], z, rtol=0, atol=1e-4)
    assert (z[0] - z[1]).abs().max() > 1e-2  # and it does depend on the item


@pytest.mark.parametrize("aggregation", ["uniform", "learnable", "maxsim"])
def test_similarity_is_eq_3_and_does_not_depend_on_chunks(tiny_qwen2vl, aggregation):
    model = make(tiny_qwen2vl, aggregation=aggregation)
    g = torch.Generator().manual_seed(0)
    t = {"slots": F.normalize(torch.randn(5, 3, 32, generator=g), dim=-1)}
    v = {"slots": F.normalize(torch.randn(7, 3, 32, generator=g), dim=-1)}
    S = model.similarity(t, v)
    S_m = model.slot_similarity(t, v)
    beta = [1 / 3] * 3 if aggregation == "uniform" else model.beta().tolist()
    for i in range(5):
        for j in range(7):
            cos = [torch.dot(t["slots"][i, m], v["slots"][j, m]).item() for m in range(3)]
            close(S_m[:, i, j], torch.tensor(cos))
            want = max(cos) if aggregation == "maxsim" else sum(b * c for b, c in zip(beta, cos))
            assert S[i, j].item() == pytest.approx(want, abs=1e-6)
    close(model.aggregate(S_m).detach(), S)  # the loss sees the same scores
    for chunk in (1, 2, 7):
        rows = [torch.cat([model.similarity({"slots": a}, {"slots": b})
                           for b in v["slots"].split(chunk)], 1) for a in t["slots"].split(chunk)]
        close(torch.cat(rows), S, rtol=0, atol=1e-6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(model.similarity(t, v), S) and S.dtype == torch.float32
        close(model.aggregate(model.slot_similarity(t, v)).detach(), S)
    if aggregation == "learnable":
        assert sum(beta) == pytest.approx(1) and max(beta) - min(beta) > 0.01


# ---------------------------------------------------------------- training


@pytest.mark.parametrize("row", TABLE_2)
@pytest.mark.parametrize("extra", [{}, dict(slot_readout="self", learn_gamma=True,
                                            aggregation="learnable", gradient_checkpointing=False)])
def test_every_row_of_table_2_trains_each_of_its_parameters(tiny_qwen2vl, row, extra):
    model = make(tiny_qwen2vl, shake=False, **TABLE_2[row], **extra)
    loss, logs = step(model, model.collate(samples()))
    missing = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert missing == []  # DDP would stop at the first of them
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    g = grads(model)
    assert all(g[n].abs().sum() > 0 for n in g if "lora_B" in n)
    assert ("w" in g) == (row != "final layer, one slot")
    want = logs["nce"] + TABLE_2[row].get("lambda_div", 0.1) * logs["div"] \
        + TABLE_2[row].get("lambda_hn", 0.05) * logs["hn"]  # Eq. 13
    close(loss, want)
    assert (logs["div"] == 0) == (model.config.num_slots == 1)


NOTHING = dict(lora_r=0, num_slots=1, layer_fusion=False)


@pytest.mark.parametrize("layers, settings, learns", [
    (2, NOTHING, False),
    (2, dict(NOTHING, learn_gamma=True, aggregation="learnable"), False),
    (1, dict(NOTHING, layer_fusion=True), False),
    (2, dict(NOTHING, layer_fusion=True), True),
    (2, dict(NOTHING, slot_readout="self"), True),
    (2, dict(NOTHING, num_slots=2), True),
    (2, dict(NOTHING, lora_r=4), True)])
def test_a_model_that_cannot_learn_is_refused_and_only_that(tmp_path, layers, settings, learns):
    model = make(make_qwen2vl(tmp_path, layers=layers), **settings)
    features = [side["slots"] for side in model(model.collate(samples(2)))]
    weights = [torch.randn_like(z) for z in features]  # so that unit vectors have a gradient
    sum((z * w).sum() for z, w in zip(features, weights)).backward()
    reached = any(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    assert reached == learns
    if learns:
        model.check_trained()
    else:
        with pytest.raises(ValueError, match="nothing that is trained would change an embedding"):
            model.check_trained()


def test_loss_matches_the_losses_on_the_scores(tiny_qwen2vl):
    from losses import hard_negative, info_nce
    g = torch.Generator().manual_seed(0)
    t, v = ({"slots": F.normalize(torch.randn(4, 3, 32, generator=g), dim=-1)} for _ in "tv")
    S_m = torch.stack([t["slots"][:, m] @ v["slots"][:, m].T for m in range(3)])
    mask = torch.zeros(4, 4, dtype=torch.bool)
    for ids, masked in (([0, 1, 2, 3], False), ([0, 1, 0, 3], True)):
        mask[0, 2] = mask[2, 0] = masked
        for aggregation, S in (("uniform", S_m.mean(0)), ("maxsim", S_m.amax(0))):
            model = make(tiny_qwen2vl, aggregation=aggregation, mask_same_video=True, gamma=20.0,
                         delta=0.5)
            _, logs = model.loss(t, v, ids)
            close(logs["nce"], info_nce(S, 20.0, mask))
            close(logs["hn"], hard_negative(S_m, 0.5, S, mask))
            close(logs["pos"], S.diagonal().mean())
            close(logs["neg"], S[~torch.eye(4, dtype=torch.bool)].mean())
            assert logs["gamma"] == 20.0
    model = make(tiny_qwen2vl)  # the default: every other pair is a negative, whatever its video
    close(model.loss(t, v, [0, 0, 0, 0])[0], model.loss(t, v, [0, 1, 2, 3])[0])
    with pytest.raises(ValueError, match="mask_same_video needs"):
        make(tiny_qwen2vl, mask_same_video=True).loss(t, v)


def test_a_learned_scale_starts_at_gamma_and_stops_at_its_cap(tiny_qwen2vl):
    model = make(tiny_qwen2vl, learn_gamma=True, gamma=30.0, shake=False)
    assert model.gamma().item() == pytest.approx(30.0)
    with torch.no_grad():
        model.log_gamma.fill_(9.0)
    _, logs = step(model, model.collate(samples()))
    assert logs["gamma"].item() == pytest.approx(MAX_GAMMA)
    assert model.log_gamma.grad != 0  # at the cap it can still come down


def test_checkpointing_changes_neither_loss_nor_gradient_also_with_dropout(tiny_qwen2vl):
    out, calls = {}, {}
    for on in (False, True):
        model = make(tiny_qwen2vl, lora_dropout=0.3, gradient_checkpointing=on)
        n = []
        model.backbone.layers[1].mlp.register_forward_pre_hook(lambda *a: n.append(1))
        loss, _ = step(model, model.collate(samples()), seed=3)
        out[on], calls[on] = (loss, grads(model)), len(n)
    assert calls == {False: 2, True: 4}  # text + video, and once more each in backward
    # autograd.grad refuses the reentrant kind, which also breaks DDP with unused parameters
    text, video = model(model.collate(samples()))
    torch.autograd.grad(model.loss(text, video)[0], [model.slots, model.w])
    close(out[True][0], out[False][0])
    for name, g in out[False][1].items():
        close(out[True][1][name], g, rtol=1e-4, atol=1e-7, msg=name)


def test_lora_is_on_seven_linears_per_layer_and_the_projector_and_nowhere_else(tiny_qwen2vl):
    model = make(tiny_qwen2vl)
    on = {n.split("base_model.model.")[1].split(".lora_A")[0]
          for n, _ in model.named_parameters() if "lora_A" in n}
    llm = {f"model.language_model.layers.{i}.{x}" for i in range(3) for x in
           ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
            "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]}
    assert on == llm | {"model.visual.merger.mlp.0", "model.visual.merger.mlp.2"}
    assert model.adapted == {"language model": 21, "model.visual.merger.mlp": 2}
    with pytest.raises(ValueError, match="already carries LoRA"):
        MARS(model.config, model.backbone)
    backbone = backbones.load(tiny_qwen2vl)
    backbone.lora_regex = r"model\.visual\.merger\.mlp\.0"
    with pytest.raises(ValueError, match="no module of the language model"):
        MARS(model.config, backbone)


def test_frozen_parts_stay_in_eval_mode_and_lora_dropout_follows_train(tmp_path):
    # a backbone with dropout in attention: noisy if its flags were switched by train()
    path = make_qwen2vl(tmp_path, attention_dropout=0.5)
    model = make(path)
    batch = model.collate(samples())
    assert model.train() is model and model.training
    close(model(batch)[1]["slots"], model(batch)[1]["slots"], rtol=0, atol=0)
    assert all(not m.training for m in model.backbone.layers.modules() if "Dropout" in str(type(m)))
    model = make(path, lora_dropout=0.5)
    with torch.no_grad():
        assert not torch.equal(model(batch)[1]["slots"], model(batch)[1]["slots"])
        model.eval()
        assert torch.equal(model(batch)[1]["slots"], model(batch)[1]["slots"])
    on = {n for n, m in model.train().mllm.named_modules() if m.training}
    layers = {n for n, m in model.mllm.named_modules() if m in list(model.backbone.layers)}
    assert on - layers == {n for n in on if ".lora_dropout" in n} and layers <= on
    for layer in model.backbone.layers:  # no dropout hangs on a layer itself
        assert not any("ropout" in key for key in vars(layer))


def test_no_graph_is_kept_for_the_frozen_vision_tower(tiny_qwen2vl):
    model, seen = make(tiny_qwen2vl), []
    for block in model.backbone.model.model.visual.blocks:
        block.register_forward_hook(lambda module, args, out: seen.append(out.requires_grad))
    step(model, model.collate(samples()))
    assert seen == [False, False]


def test_encoding_keeps_only_the_read_positions(tiny_qwen2vl):
    model = make(tiny_qwen2vl).eval()
    inputs = model.collate(samples())["video"]
    assert model.states(inputs).shape == (3, 4, 3, 32)  # [N, B, M, D]
    assert make(tiny_qwen2vl, layer_fusion=False).states(inputs).shape == (1, 4, 3, 32)
    alive = []
    model.backbone.layers[0].register_forward_hook(
        lambda module, args, out: alive.append(weakref.ref(out)))
    with torch.no_grad():
        model.backbone.layers[2].register_forward_hook(
            lambda module, args, out: alive.append(alive[0]() is None))
        z = model.encode_video(inputs)
    assert alive[1] is True, "layer 0's [B, L, D] must be gone when layer 2 is done"
    assert not model.backbone.embed._forward_hooks and z["slots"].dtype == torch.float32
    assert len(model.backbone.layers[1]._forward_hooks) == 0  # and the hooks are gone


def test_hooks_are_removed_when_the_forward_fails(tiny_qwen2vl):
    model = make(tiny_qwen2vl)
    inputs = model.collate(samples())["text"]
    with pytest.raises(Exception):
        model.encode_text({**inputs, "input_ids": inputs["input_ids"] + 10_000})
    assert not model.backbone.embed._forward_hooks
    assert not any(layer._forward_hooks for layer in model.backbone.layers)


def test_bf16_backbone_under_autocast_trains_fp32_parameters(tiny_qwen2vl):
    torch.manual_seed(0)
    backbone = backbones.load(tiny_qwen2vl, dtype=torch.bfloat16)
    model = MARS(MARSConfig(num_slots=3, lora_r=4, lora_alpha=8), backbone)
    assert all(p.dtype == torch.float32 for p in trainable_state(model).values())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        text, video = model(model.collate(samples()))
        loss, _ = model.loss(text, video)
    loss.backward()
    close(text["slots"].norm(dim=-1), torch.ones(4, 3), rtol=1e-6, atol=1e-6)  # fp32, unit to 1e-6
    assert loss.dtype == torch.float32
    assert all(torch.isfinite(g).all() for g in grads(model).values())


# ---------------------------------------------------------------- checkpoints, groups, collate


def test_the_trained_state_alone_restores_every_embedding(tiny_qwen2vl):
    a = make(tiny_qwen2vl, seed=1, learn_gamma=True, aggregation="learnable").eval()
    b = make(tiny_qwen2vl, seed=2, learn_gamma=True, aggregation="learnable").eval()
    batch, state = a.collate(samples()), trainable_state(a)
    assert state.keys() == {n for n, p in a.named_parameters() if p.requires_grad}
    assert not torch.allclose(a(batch)[0]["slots"], b(batch)[0]["slots"], atol=1e-3)
    load_trainable(b, {k: v.clone() for k, v in state.items()})
    for side in (0, 1):
        assert torch.equal(a(batch)[side]["slots"], b(batch)[side]["slots"])
    assert torch.equal(a.gamma(), b.gamma()) and torch.equal(a.beta(), b.beta())


def test_a_state_that_does_not_fit_is_an_error_that_names_the_keys(tiny_qwen2vl):
    model = make(tiny_qwen2vl)
    state = {k: v.clone() for k, v in trainable_state(model).items()}
    before = model.slots.detach().clone()
    with pytest.raises(ValueError, match=r"lacks 1 tensors \(first: slots\)"):
        load_trainable(model, {k: v for k, v in state.items() if k != "slots"})
    with pytest.raises(ValueError, match=r"has unknown 1 tensors \(first: extra\)"):
        load_trainable(model, {**state, "extra": torch.zeros(1), "slots": state["slots"] + 1})
    with pytest.raises(ValueError, match=r"slots is \(5, 32\), the model's is \(3, 32\)"):
        load_trainable(model, {**state, "slots": torch.zeros(5, 32)})
    assert torch.equal(model.slots, before)  # nothing was loaded halfway


def test_the_adapter_folder_loads_with_peft_alone(tiny_qwen2vl, tmp_path):
    from peft import PeftModel
    model = make(tiny_qwen2vl).eval()
    model.save_adapter(str(tmp_path))
    keys = load_file(tmp_path / "adapter_model.safetensors")
    assert len(keys) == 2 * 23 and all("lora_" in key for key in keys)
    backbone = backbones.load(tiny_qwen2vl)
    inputs = model.collate(samples())["video"]
    base = backbone.run(inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft uses an old name of transformers
        peft = PeftModel.from_pretrained(backbone.model, str(tmp_path)).eval()
    got = peft.base_model.model.model(**{k: v for k, v in inputs.items()
                                         if k not in ("append_pos", "cut")}).last_hidden_state
    close(got, model.backbone.run(inputs))
    assert (got - base).abs().max() > 1e-2


def test_groups_counts_and_weight_decay(tiny_qwen2vl):
    model = make(tiny_qwen2vl, learn_gamma=True, aggregation="learnable")
    groups = model.trainable_groups()
    names = [n for group in groups.values() for n in group]
    assert sorted(names) == sorted(trainable_state(model))
    assert list(groups) == ["LoRA", "slots", "w", "other"]
    assert list(groups["other"]) == ["b", "log_gamma"]
    # r (in + out) per linear: hidden 32, MLP 64, k/v 2 heads of 8 = 16, projector 64 -> 64 -> 32
    per_layer = 4 * (32 + 32 + 32 + 16 + 32 + 16 + 32 + 32 + 3 * (32 + 64))
    want = 3 * per_layer + 4 * (64 + 64 + 64 + 32)
    assert sum(p.numel() for p in groups["LoRA"].values()) == want
    assert f"{want:,}" in model.summary() and "21 modules of language model" in model.summary()
    assert {n for n in names if model.no_decay(n)} == {"slots", "w", "b", "log_gamma"}
    backbone = backbones.load(tiny_qwen2vl)
    backbone.model.requires_grad_(True)  # whoever hands it in: MARS freezes it
    bare = MARS(MARSConfig(lora_r=0, layer_fusion=False), backbone)
    assert list(bare.trainable_groups()) == ["slots"]


def test_collate_gives_the_sides_that_the_samples_have(tiny_qwen2vl):
    model, items = make(tiny_qwen2vl), samples()
    assert list(model.collate(items)) == ["text", "video"]
    texts = [SimpleNamespace(id=s.id, caption=s.caption, frames=None) for s in items]
    videos = [SimpleNamespace(id=s.id, caption=None, frames=s.frames) for s in items]
    assert list(model.collate(texts)) == ["text"] and list(model.collate(videos)) == ["video"]
    with pytest.raises(ValueError, match="2 of 4 samples have no caption, the first is 'clip0'"):
        model.collate([*videos[:2], *items[2:]])


def test_a_sample_that_cannot_be_collated_is_named(tiny_qwen2vl):
    model, items = make(tiny_qwen2vl), samples()
    items[2].frames = np.zeros((2, 1, 400, 3), dtype=np.uint8)
    with pytest.raises(ValueError, match="^clip2: a frame of 400x1 is too thin"):
        model.collate(items)


def test_a_long_caption_is_cut_and_keeps_its_prompt(tiny_qwen2vl):
    model = make(tiny_qwen2vl, max_text_tokens=3).eval()
    long = SimpleNamespace(id="x", caption="a red circle moves left and left and left", frames=None)
    short = SimpleNamespace(id="y", caption="a red circle", frames=None)
    a, b = (model.collate([s])["text"] for s in (long, short))
    assert torch.equal(a["input_ids"], b["input_ids"]) and a["cut"].tolist() == [True]
    text = model.backbone.tokenizer.decode(a["input_ids"][0])
    assert text.count("Summarize above sentence in one word:") == 1


@pytest.mark.parametrize("bad, says", [
    (dict(slot_readout="after"), "slot_readout must be one of preceding, self; got 'after'"),
    (dict(final_norm="raw"), "final_norm must be one of hf, all, none"),
    (dict(slot_init="zero"), "slot_init must be one of"),
    (dict(aggregation="mean"), "aggregation must be one of uniform, learnable, maxsim"),
    (dict(num_slots=0), "num_slots must be at least 1; got 0"),
    (dict(lora_r=-1), "lora_r must be at least 0"),
    (dict(delta=float("nan")), "delta must be at least 0"),
    (dict(lora_dropout=1.0), "lora_dropout must be below 1"),
    (dict(gamma=0.0), "gamma must be above 0"),
    (dict(gamma=200.0, learn_gamma=True), "at most 100.0 when learned"),
    (dict(video_prompt="Summarize"), "video_prompt must hold <video> once"),
    (dict(text_prompt="{caption} {caption}"), "text_prompt must hold {caption} once"),
])
def test_bad_settings_are_one_sentence(bad, says):
    with pytest.raises(ValueError) as e:
        MARSConfig(**bad)
    assert says in str(e.value) and "\n" not in str(e.value)


def test_building_a_model_is_quiet(tiny_qwen2vl, capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = MARS(MARSConfig(num_slots=3, lora_r=4), backbones.load(tiny_qwen2vl))
        step(model, model.collate(samples()))
