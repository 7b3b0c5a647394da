"""
PHA-Net on a tiny random CLIP of the native class: each equation against a slow version written from
the paper's text, one item at a time and without padding; a peer's arrays; what must not matter.
CPU, about 35 s.

python -m pytest tests/test_model_pha.py -v
"""
import contextlib
import copy
import functools
import math
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers import CLIPConfig, CLIPModel

import backbones
import eval as evaluation
import train
from conftest import ROOT, SHARED, make_clip
from losses import info_nce, self_distillation
from model_pha import (CLUSTERINGS, Block, PHAConfig, PHANet, TokenMerge, by_sklearn, dpc_knn,
                       merge, thop_parameters, weight_mlp, wti)

close = torch.testing.assert_close
CAPTIONS = ["a red circle moves left", "a", "two circles", "the green triangle moves up right",
            "a blue square grows"]
SMALL = dict(block_layers=2, max_words=12, num_frames=4)
# enough frames for clusters to be a choice, and captions shorter than the number of clusters
WIDE = dict(num_frames=9, max_words=16)


@functools.cache
def load(path):
    return backbones.load(path, dtype=torch.float32)


def make(path, seed=0, **settings):
    torch.manual_seed(seed)
    backbone = copy.copy(load(path))
    backbone.model = copy.deepcopy(backbone.model)
    return PHANet(PHAConfig(backbone=path, **{**SMALL, **settings}), backbone)


def samples(captions=CAPTIONS, frames=4, seed=0):
    rng = np.random.default_rng(seed)
    return [SimpleNamespace(id=f"clip{i}", caption=c, index=i,
                            frames=rng.integers(0, 256, (frames, 16, 16, 3), dtype=np.uint8))
            for i, c in enumerate(captions)]


def step(model, batch):
    model.zero_grad(set_to_none=True)
    text, video = model(batch)
    loss, logs = model.loss(text, video, torch.arange(len(next(iter(text.values())))))
    loss.backward()
    return loss.detach(), logs


def rand(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------- the paper's text, slowly


def literal_wti(words, frames, gamma_t, gamma_v, zeros_t=False, zeros_v=False):
    """Eq. 3 of one pair. zeros: its padding counts as similarity 0 in the maxima over that side."""
    unit = [torch.stack([x / x.norm() for x in side]).double() for side in (words, frames)]
    inner, total = (unit[0] @ unit[1].T).tolist(), 0.0
    for m, gamma in enumerate(gamma_t.tolist()):
        total += gamma * max(inner[m] + [0.0] * zeros_v)
    for n, gamma in enumerate(gamma_v.tolist()):
        total += gamma * max([inner[m][n] for m in range(len(words))] + [0.0] * zeros_t)
    return total / 2


def literal_layer_norm(norm, h):
    mean, var = h.mean(-1, keepdim=True), h.var(-1, unbiased=False, keepdim=True)
    return (h - mean) / (var + norm.eps).sqrt() * norm.weight + norm.bias


def literal_attention(q, k, v, heads, logit=None):
    """Softmax(Q K^T / sqrt(D / heads)) V per head, one query at a time; logit is added per key."""
    d = q.shape[1] // heads
    out = torch.zeros_like(q)
    for i in range(len(q)):
        for h in range(heads):
            at = slice(h * d, h * d + d)
            s = k[:, at] @ q[i, at] / math.sqrt(d)  # one number per key
            p = (s if logit is None else s + logit).exp()
            out[i, at] = p / p.sum() @ v[:, at]
    return out


def literal_block(block, x, slots):
    """Eq. 4 of one item: CLIP layers over its real tokens x [n, D], each at its slot's position."""
    h = x if block.positions is None else x + block.positions[slots]
    for layer in block.layers:
        a, u = layer.self_attn, literal_layer_norm(layer.layer_norm1, h)
        u = literal_attention(a.q_proj(u), a.k_proj(u), a.v_proj(u), a.num_heads)
        h = h + a.out_proj(u)
        u = layer.mlp.fc1(literal_layer_norm(layer.layer_norm2, h))
        h = h + layer.mlp.fc2(u * torch.sigmoid(1.702 * u))
    return x + h


def literal_density(x, K):
    """Eq. 5-6 for one item's tokens x [n, D], in fp64; distances divided by sqrt(D) as HBI's."""
    x, n = x.double(), len(x)
    d = (x[:, None] - x[None]).norm(dim=-1).div(math.sqrt(x.shape[1])).tolist()
    rho = []
    for i in range(n):
        knn = sorted(d[i][j] ** 2 for j in range(n))[:K]  # the token itself is one of them
        rho.append(math.exp(-sum(knn) / len(knn)))
    delta = []
    for i in range(n):
        # of equally dense ones the earlier counts as denser (HBI: noise decides)
        denser = [d[i][j] for j in range(n) if (rho[j], -j) > (rho[i], -i)]
        # the densest: Eq. 6 has its own largest distance, HBI the sample's. With HBI's it always is
        # the first center, whatever that distance is
        delta.append(min(denser) if denser else max(map(max, d)))
    return d, rho, delta


def literal_clusters(x, M, K, order="score"):
    """-> assign [n], centers; the centers in order of rho * delta or of time."""
    d, rho, delta = literal_density(x, K)
    centers = sorted(range(len(x)), key=lambda i: (-rho[i] * delta[i], i))[:M]
    centers = sorted(centers) if order == "time" else centers
    assign = []
    for i in range(len(x)):
        own = [centers.index(i)] if i in centers else []
        assign.append((own or sorted(range(len(centers)), key=lambda m: d[i][centers[m]]))[0])
    return assign, centers


def literal_merge(module, x, slots, P, n_slots):
    """Fig. 2 for one item: x [n, D] at `slots` of n_slots (its last P prototypes) -> [<= M, D]."""
    cfg, M = module.config, module.M
    grid = torch.zeros(n_slots, x.shape[1])
    grid[slots] = x
    y = x
    if module.conv is not None:
        rows = []
        for i, s in enumerate(slots):
            row = x[i]
            for tap in (-1, 0, 1):
                if 0 <= s + tap < n_slots:
                    row = row + module.conv.weight[:, :, tap + 1] @ grid[s + tap]
            rows.append(row)
        y = torch.stack(rows)
    y = literal_layer_norm(module.norm, y)
    score = module.score(y)[:, 0]
    W = score.softmax(0)  # W = Softmax(MLP_w(T))
    assign, _ = literal_clusters(y, M, cfg.knn, cfg.cluster_order)
    merged = []
    for m in range(min(M, len(x))):
        own = [i for i in range(len(x)) if assign[i] == m]
        merged.append(sum(W[i] * y[i] for i in own) / sum(W[i] for i in own))
    merged = torch.stack(merged)
    if module.cross is None:
        return merged
    cross, D = module.cross, x.shape[1]
    if module.attention == "prototype" and P:
        query = (sum(x[-P:]) / P).repeat(len(merged), 1)  # averaged and repeated
        keys, logit = merged, None
    else:
        query, keys, logit = merged, y, score
    norm = functools.partial(literal_layer_norm, cross.norm)
    kv = cross.kv(norm(keys))
    out = literal_attention(cross.q(norm(query)), kv[:, :D], kv[:, D:], cross.heads, logit)  # Eq. 7
    residual = {"merged": merged, "query": query, "none": 0}[cfg.merge_residual]
    return cross.proj(out) + residual


def literal_item(model, side, x, N):
    """Sec. 3.2 for one item with real tokens x [n, D], N slots if it had no padding: each level's
    tokens, their weights, and whether there is padding; the prototypes before normalisation."""
    cfg, head, out = model.config, model.head, {}

    def level(name, x, n_slots, P):
        slots = [*range(len(x)), *range(n_slots, n_slots + P)]
        if P:
            p = head[f"prototypes_{name}"]
            x = torch.cat([x, p["both"] if "both" in p else p[side]])
        block = head[f"block_{name}"]
        if len(block):
            x = literal_block(block["both"] if "both" in block else block[side], x, slots)
        return x, slots

    x, slots = level("I", x, N, cfg.individual_prototypes)
    gamma = head["wti_I"][side](x)[:, 0].softmax(0)
    out["I"] = x, gamma, len(x) < N + cfg.individual_prototypes
    if len(model.levels) == 1:
        return out
    M = cfg.num_phrases if side == "text" else cfg.num_clips
    x = literal_merge(head["merge_L"][side], x, slots, cfg.individual_prototypes,
                      N + cfg.individual_prototypes)
    x, slots = level("L", x, M, cfg.local_prototypes)
    if "L" in model.levels:
        out["L"] = x, head["wti_L"][side](x)[:, 0].softmax(0), len(x) < M + cfg.local_prototypes
    if "G" in model.levels:
        x = literal_merge(head["merge_G"][side], x, slots, cfg.local_prototypes,
                          M + cfg.local_prototypes)
        out["G"] = x[0]
    return out


def literal_items(model, batch):
    """Both sides of a batch, CLIP's own features excepted: list of literal_item's dicts."""
    words, mask = model.words(batch["text"])
    texts = [literal_item(model, "text", w[m], model.config.max_words)
             for w, m in zip(words, mask)]
    videos = [literal_item(model, "video", f, model.config.num_frames)
              for f in model.frames(batch["video"])]
    return texts, videos


def literal_scores(model, texts, videos):
    S, zero = {}, model.config.padding == "zero"
    for level in model.levels:
        S[level] = torch.zeros(len(texts), len(videos), dtype=torch.float64)
        for i, t in enumerate(texts):
            for j, v in enumerate(videos):
                t_, v_ = t[level], v[level]
                if level == "G":
                    S[level][i, j] = torch.dot(t_, v_) / (t_.norm() * v_.norm())  # Eq. 1
                else:
                    S[level][i, j] = literal_wti(t_[0], v_[0], t_[1], v_[1], t_[2] and zero,
                                                 v_[2] and zero)
    return S


def literal_prototype_contrast(model, texts, videos):
    """Eq. 8 from the prototypes of all items, S [P, P, B, B] element by element."""
    P, B = model.config.individual_prototypes, len(texts)
    # [P, B, D], and each prototype's weights over the batch
    pw, pf = (torch.stack([x["I"][0][-P:] for x in side]).transpose(0, 1) for side in
              (texts, videos))
    gamma = [model.head["wti_I"][side](p)[..., 0].softmax(1)
             for side, p in (("text", pw), ("video", pf))]
    S_P = torch.zeros(P, P)
    for i in range(P):
        for j in range(P):
            S_P[i, j] = literal_wti(list(pw[i]), list(pf[j]), gamma[0][i], gamma[1][j])
    sigma, total = model.config.sigma, 0.0
    for i in range(P):
        total -= math.log(math.exp(S_P[i, i] / sigma)
                          / sum(math.exp(S_P[i, j] / sigma) for j in range(P))) / P
    assert B == pw.shape[1]
    return S_P, total


VARIANTS = {
    "defaults": {},
    "padding ignored": dict(padding="ignore"),
    "score order, query residual": dict(cluster_order="score", merge_residual="query"),
    "literal Eq. 7": dict(merge_residual="none"),
    "center attention": dict(attention_local="center", attention_global="center"),
    "no attention, no convolution": dict(attention_local="none", attention_global="none",
                                         merge_conv=False),
    "few phrases, one prototype": dict(num_phrases=3, num_clips=4, individual_prototypes=1,
                                       local_prototypes=2, knn=2),
    "fewer tokens than phrases": dict(individual_prototypes=1, num_phrases=8),
    "no prototypes": dict(individual_prototypes=0, local_prototypes=0),
    "nothing shared": dict(share_individual_prototypes=False, share_local_prototypes=False,
                           share_individual_block=False, share_local_block=False),
    "no blocks": dict(individual_block=False, local_block=False),
    "no local positions": dict(local_positions=False),
    "two levels": dict(levels="individual+global"),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_features_and_scores_are_those_of_a_literal_item_by_item_version(tiny_clip, name):
    model = make(tiny_clip, **{**WIDE, **VARIANTS[name]})
    with torch.no_grad():  # apart from each other also where they start alike
        for p in model.head.parameters():
            p.add_(0.05 * torch.randn_like(p))
        batch = model.collate(samples(CAPTIONS[:3], frames=9))
        text, video = model(batch)
        texts, videos = literal_items(model, batch)
    for got, want in ((text, texts), (video, videos)):
        for i, item in enumerate(want):
            for level in model.levels:
                if level == "G":
                    close(got["G"][i], item["G"] / item["G"].norm(), rtol=1e-4, atol=2e-5)
                    continue
                there = got[f"{level}_mask"][i].bool()
                tokens, gamma, padded = item[level]
                assert there.sum() == len(tokens) and padded == bool((~there).any())
                close(got[level][i, there], F.normalize(tokens, dim=-1), rtol=1e-4, atol=2e-5)
                close(got[f"{level}_gamma"][i, there], gamma, rtol=1e-4, atol=1e-5)
                assert not got[f"{level}_gamma"][i, ~there].any()
    S = literal_scores(model, texts, videos)
    for level in model.levels:
        close(model.level_similarity(level, text, video).double(), S[level], rtol=0, atol=1e-5)
    weights = dict(I=1.0, L=0.5, G=0.1)  # Sec. 3.4, Inference
    close(model.similarity(text, video).double(), sum(weights[k] * s for k, s in S.items()),
          rtol=0, atol=1e-5)


def test_padding_counts_as_similarity_zero_or_not_at_all():
    # <w, f> = -0.6: alone that is the score of "ignore"; with one padded word the frame's best is 0
    w, f, one = torch.tensor([[-0.6, 0.8]]), torch.tensor([[1.0, 0.0]]), torch.ones(1)
    assert literal_wti(w, f, one, one) == pytest.approx(-0.6)
    assert literal_wti(w, f, one, one, zeros_t=True) == pytest.approx(-0.3)
    for padding, want in (("ignore", -0.6), ("zero", -0.3)):
        fake = SimpleNamespace(head={"wti_I": {"text": nn.Linear(2, 1)}},
                               config=SimpleNamespace(padding=padding))
        x = torch.cat([w, torch.zeros(1, 2)])[None]
        t, _ = PHANet._level(fake, "I", "text", x, torch.tensor([[True, False]]))
        got = wti(t["I"], t["I_gamma"], f[None], torch.ones(1, 1))
        close(got, torch.tensor([[want]]))


def test_wti_matches_the_loop_on_random_tokens():
    t, v = F.normalize(rand(4, 5, 8), dim=-1), F.normalize(rand(3, 6, 8, seed=1), dim=-1)
    gt, gv = rand(4, 5, seed=2).softmax(-1), rand(3, 6, seed=3).softmax(-1)
    want = torch.tensor([[literal_wti(t[i], v[j], gt[i], gv[j]) for j in range(3)]
                         for i in range(4)])
    close(wti(t, gt, v, gv), want)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        close(wti(t, gt, v, gv), want)


@pytest.mark.parametrize("residual", ["merged", "query", "none"])
def test_literal_eq_7_makes_all_phrases_of_an_item_one_vector(tiny_clip, residual):
    model = make(tiny_clip, merge_residual=residual)
    seen = {}
    model.head["merge_L"]["text"].register_forward_hook(
        lambda module, args, out: seen.update(phrases=out[0], full=out[1]))
    model.encode_text(model.collate(samples(CAPTIONS[3:]))["text"])
    assert seen["full"].all()
    phrases = seen["phrases"].detach()  # [B, 6, D]
    spread = (phrases - phrases.mean(1, keepdim=True)).norm(dim=-1) / phrases.norm(dim=-1)
    # one query is computed once and repeated, so the copies are equal to the last bit
    equal = [torch.equal(p, p[:1].expand_as(p)) for p in phrases]
    assert all(equal) == any(equal) == (residual != "merged")
    assert (spread.max() < 1e-6) if residual != "merged" else (spread.min() > 0.1)


# ---------------------------------------------------------------- losses


def test_loss_is_eq_14_of_the_literal_scores(tiny_clip):
    settings = dict(sigma=0.1, alpha=0.7, beta=0.3, lambda_dl=0.9, mu_pcl=0.6)
    model = make(tiny_clip, **settings)
    batch = model.collate(samples())
    with torch.no_grad():
        texts, videos = literal_items(model, batch)
        loss, logs = model.loss(*model(batch))
    S, B = literal_scores(model, texts, videos), len(texts)

    def nce(S):  # Eq. 2, the texts' part and the videos' part
        total = 0.0
        for i in range(B):
            top = math.exp(S[i, i] / 0.1)
            total -= math.log(top / sum(math.exp(S[i, j] / 0.1) for j in range(B))) / (2 * B)
            total -= math.log(top / sum(math.exp(S[j, i] / 0.1) for j in range(B))) / (2 * B)
        return total

    def kl(upper, lower):  # Eq. 10-12: KL(D^upper || D^lower) of rows and of columns, mean over B
        total = 0.0
        for U, L in ((upper, lower), (upper.T, lower.T)):
            for i in range(B):
                p = [math.exp(U[i, j]) / sum(math.exp(U[i, k]) for k in range(B)) for j in range(B)]
                q = [math.exp(L[i, j]) / sum(math.exp(L[i, k]) for k in range(B)) for j in range(B)]
                total += sum(a * math.log(a / b) for a, b in zip(p, q)) / B
        return total

    for level in "ILG":
        assert logs[f"nce_{level}"].item() == pytest.approx(nce(S[level]), rel=1e-4)
    dl = kl(S["L"], S["I"]) + kl(S["G"], S["L"]) + kl(S["G"], S["I"])  # Eq. 13
    S_P, pcl = literal_prototype_contrast(model, texts, videos)
    assert logs["dl"].item() == pytest.approx(dl, rel=1e-3)
    assert logs["pcl"].item() == pytest.approx(pcl, rel=1e-4)
    close(model.prototype_similarity(*model(batch)).detach(), S_P, rtol=0, atol=1e-5)
    hcl = nce(S["I"]) + 0.7 * nce(S["L"]) + 0.3 * nce(S["G"])  # Eq. 9
    assert loss.item() == pytest.approx(hcl + 0.9 * dl + 0.6 * pcl, rel=1e-4)


def test_one_prototype_has_no_contrast(tiny_clip):
    # "only applied to multiple prototypes", Sec. 3.3
    for settings in (dict(individual_prototypes=1), dict(mu_pcl=0.0)):
        model = make(tiny_clip, **settings)
        _, logs = step(model, model.collate(samples()))
        assert "pcl" not in logs and "P_logit" not in model.encode_text(
            model.collate(samples())["text"])


def test_same_video_mask_and_learned_sigma(tiny_clip):
    model = make(tiny_clip, mask_same_video=True, learn_sigma=True, sigma=0.05)
    text, video = model(model.collate(samples()))
    with pytest.raises(ValueError, match="needs the videos' ids"):
        model.loss(text, video)
    same, _ = model.loss(text, video, torch.zeros(5, dtype=torch.long))
    apart, _ = model.loss(text, video, torch.arange(5))
    assert same.item() < 0.9 * apart.item()
    plain = make(tiny_clip, sigma=0.05)
    close(plain.loss(text, video)[0], apart)
    apart.backward()
    assert model.clip.logit_scale.grad.abs() > 0
    with torch.no_grad():
        model.clip.logit_scale.fill_(9.0)
    model.loss(text, video, torch.arange(5))
    assert model.scale().item() == pytest.approx(100)


def test_the_distillation_is_nearly_inert_without_a_temperature(tiny_clip):
    # cosines as of a trained model: 0.25 +- 0.06, and 0.1 more on the diagonal
    B = 128
    S = {k: (0.25 + 0.06 * rand(B, B, seed=i) + 0.1 * torch.eye(B)).requires_grad_()
         for i, k in enumerate("ILG")}
    norm = lambda loss: torch.autograd.grad(loss, S["L"])[0].norm().item()  # noqa: E731
    nce = norm(0.5 * info_nce(S["L"], 100.0))
    hbi = norm(0.2 * self_distillation(S, "hbi", "mean"))
    paper = norm(0.2 * self_distillation(S))
    warm = norm(0.2 * self_distillation(S, temperature=0.01))
    assert hbi < 1e-5 * nce and paper < 1e-3 * nce and warm > 0.1 * nce
    assert paper == pytest.approx(B * hbi, rel=0.2)


# ---------------------------------------------------------------- a peer's arrays

# HBI's own code on seeded inputs. What of it does not apply to PHA-Net: `idx_token`, `agg_weight`
# (bookkeeping that nobody reads), `noise` (zero there, absent here), `hbi_total` (all levels of
# weight 1), `frame_tokens` (only CLS is used), `data.npz` (it belongs to OpenAI's vocabulary and
# HBI's frame sampler), and `dist`, `density`, `delta` of masked tokens, which HBI fills with the
# batch's largest distance + 1. That fill also is what HBI's densest token of a masked item gets for
# delta; only which tokens become centers is compared there. Rows with fewer valid tokens than
# clusters are left out: HBI picks among tied zeros.


def parity(name):
    if not (SHARED / "parity" / f"{name}.npz").is_file():
        pytest.skip("no arrays of a peer implementation here")
    with np.load(SHARED / "parity" / f"{name}.npz") as f:
        arrays = {k: torch.from_numpy(v) for k, v in f.items()}
    weights = SHARED / "parity" / f"{name}.pt"
    return arrays, torch.load(weights) if weights.is_file() else None


@pytest.mark.parametrize("name", ["cluster_nomask", "cluster_text35", "cluster_global"])
def test_clusters_are_those_of_hbi(name):
    a, _ = parity(name)
    M, K, masked = a["cluster_num"].item(), a["k"].item(), a["has_mask"].item()
    mask = a["mask"].bool() if masked else torch.ones_like(a["mask"], dtype=torch.bool)
    rows = mask.sum(1) >= M
    assert rows.sum() >= len(rows) - 1
    x = a["x"]
    assign, centers = dpc_knn(x, mask, M, K)
    for b in rows.nonzero().flatten().tolist():
        there = mask[b]
        d, rho, delta = literal_density(x[b, there], K)
        close(torch.tensor(rho), a["density"][b, there], rtol=1e-5, atol=0, check_dtype=False)
        close(torch.tensor(d), a["dist"][b][there][:, there], rtol=1e-5, atol=1e-3,
              check_dtype=False)  # theirs to itself is not always zero
        keep = torch.ones(len(rho), dtype=torch.bool)
        keep[int(np.argmax(rho))] = not masked
        close(torch.tensor(delta)[keep], a["delta"][b, there][keep], rtol=1e-4, atol=1e-5,
              check_dtype=False)
        own, own_centers = literal_clusters(x[b, there], M, K)
        at = there.nonzero().flatten()
        assert torch.equal(at[own_centers], centers[b])
        assert torch.equal(torch.tensor(own), assign[b, there])
    assert torch.equal(centers[rows], a["centers"][rows])  # and in the order of the score
    assert torch.equal(assign[rows][mask[rows]], a["idx_cluster"][rows][mask[rows]])
    # their weight is exp(score)
    score = a["weight"].squeeze(-1).log().masked_fill(~mask, -math.inf)
    merged, full = merge(x, score, assign, M)
    assert full[rows].all()
    close(merged[rows], a["merged"][rows], rtol=1e-5, atol=1e-5)
    if not masked:  # without weights HBI counts padding in
        merged, _ = merge(x, torch.zeros_like(score), assign, M)
        close(merged, a["merged_unweighted"], rtol=1e-5, atol=1e-5)
    in_time, sorted_centers = dpc_knn(x, mask, M, K, order="time")
    assert torch.equal(sorted_centers, centers.sort(1).values)
    place = centers.argsort(1).argsort(1)  # the same clusters under other numbers
    assert torch.equal(in_time[mask], place.gather(1, assign.clamp(min=0))[mask])


@pytest.mark.parametrize("name", ["ctm_text", "ctm_level2"])
def test_token_merge_and_its_gradients_are_those_of_hbi(name):
    # conv, norm, score, clusters, weighted mean, cross attention with queries = merged tokens. Its
    # score is one Linear where Table 4 has two layers
    a, weights = parity(name)
    D = a["x"].shape[-1]
    M = math.ceil(a["x"].shape[1] * a["sample_ratio"].item())
    config = PHAConfig(cluster_order="score", merge_residual="merged")
    module = TokenMerge(D, a["heads"].item(), M, config, "center")
    module.score = nn.Linear(D, 1)
    ctm, block = weights["ctm"], weights["block"]
    module.load_state_dict(
        {"conv.weight": ctm["conv.conv.weight"]}
        | {k: ctm[k] for k in ("norm.weight", "norm.bias", "score.weight", "score.bias")}
        | {f"cross.{k.replace('norm1', 'norm').replace('attn.', '')}": v for k, v in block.items()})
    mask = a["mask"].bool() if a["has_mask"] else torch.ones_like(a["mask"], dtype=torch.bool)
    assert (mask.sum(1) >= M).all()
    x = a["x"].clone().requires_grad_()
    seen = {}
    module.norm.register_forward_hook(lambda _, args, out: seen.update(tokens=out))
    module.score.register_forward_hook(lambda _, args, out: seen.update(score=out))
    out, full = module(x, mask, 0)
    assert full.all()
    close(seen["tokens"], a["ctm_tokens"], rtol=1e-5, atol=1e-5)
    close(seen["score"][mask], a["token_score"][mask], rtol=1e-5, atol=1e-5)
    close(out, a["block_out"], rtol=1e-5, atol=1e-5)
    out.backward(a["grad_out"])
    close(x.grad, a["grad_x"], rtol=1e-4, atol=1e-4)
    close(module.conv.weight.grad, a["grad_conv_w"], rtol=1e-4, atol=1e-4)
    close(module.score.weight.grad, a["grad_score_w"], rtol=1e-4, atol=1e-4)
    module.cross = None
    close(module(x, mask, 0)[0], a["ctm_merged"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["wti_small", "wti_masked"])
def test_token_wise_scores_and_weights_are_those_of_hbi(name):
    a, weights = parity(name)
    D = a["text"].shape[-1]
    # entity level: with masks, a padded token has similarity zero; action level: no masks, own MLPs
    for suffix, want in (("", "entity_sim"), ("0", "action_sim")):
        sides = []
        for side in ("text", "video"):
            mlp = weight_mlp(D)
            mlp.load_state_dict(weights[f"{side}_weight_fc{suffix}"])
            fake = SimpleNamespace(head={"wti_I": {side: mlp}}, config=PHAConfig())
            mask = a[f"{side}_mask"].bool()
            mask = mask if want == "entity_sim" else torch.ones_like(mask)
            f, _ = PHANet._level(fake, "I", side, a[side] * mask[..., None], mask)
            if want == "entity_sim":
                close(f["I_gamma"], a[f"{side}_weight"], rtol=1e-5, atol=1e-7)
            sides += [f["I"], f["I_gamma"]]
        close(wti(*sides), a[want], rtol=1e-5, atol=1e-5)
    unit = [F.normalize(a[side], dim=-1) for side in ("text", "video")]
    masks = a["text_mask"][:, None, :, None] * a["video_mask"][None, :, None, :]
    raw = torch.einsum("atd,bvd->abtv", *unit)
    assert any((raw * m - a["raw_sim"]).abs().max() < 1e-5 for m in (1, masks))


def test_losses_and_their_gradients_are_those_of_hbi():
    a, _ = parity("losses")
    S = {k: a[f"S_{k}"].clone().requires_grad_() for k in "ILG"}
    nce = {k: info_nce(S[k], a["logit_scale"].item()) for k in "ILG"}
    how = dict(direction="hbi", reduction="mean")
    for k in "ILG":
        close(nce[k].detach(), a[f"cl_{k}"], rtol=1e-5, atol=0)
    for name, pair in (("i2l", "IL"), ("i2g", "IG"), ("l2g", "LG")):
        dl = self_distillation({k: S[k] for k in pair}, **how)
        close(dl.detach(), a[name], rtol=1e-5, atol=1e-7)
    rows = S["I"].softmax(1) * (S["I"].log_softmax(1) - S["L"].log_softmax(1))  # KL(I || L)
    close((rows.sum() / 16 ** 2).detach(), a["kl_L_I_rows"], rtol=1e-5, atol=1e-7)
    close(a["kl_L_I_rows"] + a["kl_L_I_cols"], a["i2l"])
    total = nce["I"] + 0.5 * nce["L"] + 0.1 * nce["G"] + 0.2 * self_distillation(S, **how)
    close(total.detach(), a["pha_total_no_pcl"], rtol=1e-5, atol=0)
    total.backward()
    for k in "ILG":
        close(S[k].grad, a[f"grad_S_{k}"], rtol=1e-4, atol=1e-4)
    # the same from PHANet.loss, whose scores are handed over
    fake = SimpleNamespace(
        config=PHAConfig(kl_direction="hbi", kl_reduction="mean"), scale=lambda: 100.0,
        levels=dict(I=1.0, L=0.5, G=0.1), level_similarity=lambda level, t, v: S[level],
        _pull=PHANet._pull)
    loss, logs = PHANet.loss(fake, {}, {})
    close(loss.detach(), a["pha_total_no_pcl"], rtol=1e-5, atol=0)
    assert logs.keys() == {"nce_I", "nce_L", "nce_G", "dl", "grad_hcl", "grad_dl"}


def openai_layers(state, theirs, ours, n):
    """The layers of an OpenAI state dict under transformers' names."""
    names = {"ln_1": "layer_norm1", "ln_2": "layer_norm2", "mlp.c_fc": "mlp.fc1",
             "mlp.c_proj": "mlp.fc2", "attn.out_proj": "self_attn.out_proj"}
    out = {}
    for i in range(n):
        for kind in ("weight", "bias"):
            for a, b in names.items():
                out[f"{ours}{i}.{b}.{kind}"] = state[f"{theirs}resblocks.{i}.{a}.{kind}"]
            qkv = state[f"{theirs}resblocks.{i}.attn.in_proj_{kind}"].chunk(3)
            for letter, part in zip("qkv", qkv):
                out[f"{ours}{i}.self_attn.{letter}_proj.{kind}"] = part
    return out


def openai_clip(state):
    """A CLIPModel of the size of this OpenAI state dict, with its weights."""
    width, wide = state["ln_final.weight"].shape[0], state["visual.ln_post.weight"].shape[0]
    config = CLIPConfig(
        text_config=dict(hidden_size=width, intermediate_size=4 * width, num_hidden_layers=2,
                         num_attention_heads=HEADS[0], hidden_act="quick_gelu",
                         vocab_size=len(state["token_embedding.weight"]),
                         max_position_embeddings=len(state["positional_embedding"]),
                         bos_token_id=298, eos_token_id=299, pad_token_id=0),
        vision_config=dict(hidden_size=wide, intermediate_size=4 * wide, num_hidden_layers=2,
                           num_attention_heads=HEADS[1], hidden_act="quick_gelu", image_size=64,
                           patch_size=state["visual.conv1.weight"].shape[-1]),
        projection_dim=state["text_projection"].shape[1])
    clip = CLIPModel(config)
    embed = "embeddings.position_embedding.weight"
    ours = {
        "logit_scale": state["logit_scale"],
        "text_projection.weight": state["text_projection"].T,
        "visual_projection.weight": state["visual.proj"].T,
        "text_model.embeddings.token_embedding.weight": state["token_embedding.weight"],
        f"text_model.{embed}": state["positional_embedding"],
        "vision_model.embeddings.class_embedding": state["visual.class_embedding"],
        "vision_model.embeddings.patch_embedding.weight": state["visual.conv1.weight"],
        f"vision_model.{embed}": state["visual.positional_embedding"]}
    for a, b in (("ln_final", "text_model.final_layer_norm"),
                 ("visual.ln_pre", "vision_model.pre_layrnorm"),
                 ("visual.ln_post", "vision_model.post_layernorm")):
        ours |= {f"{b}.{kind}": state[f"{a}.{kind}"] for kind in ("weight", "bias")}
    ours |= openai_layers(state, "transformer.", "text_model.encoder.layers.", 2)
    ours |= openai_layers(state, "visual.transformer.", "vision_model.encoder.layers.", 2)
    missing, unexpected = clip.load_state_dict(ours, strict=False)
    assert not unexpected and all("position_ids" in name for name in missing)
    return clip


HEADS = 4, 2  # of the text and the vision tower, which no state dict tells


def test_encoders_and_temporal_block_are_those_of_hbi():
    a, weights = parity("encoders")
    clip = openai_clip(weights["clip"])
    backbone = SimpleNamespace(family="clip", path="", model=clip, tokenizer=None, pixels=None,
                               mean=(0.0,) * 3, std=(1.0,) * 3)
    model = PHANet(PHAConfig(max_words=16, num_frames=5, block_layers=2), backbone)
    with torch.no_grad():
        mask = a["text_mask"]
        words, there = model.words({"input_ids": a["ids"], "attention_mask": mask})
        assert torch.equal(there, mask.bool())
        close(words, a["words"], rtol=1e-5, atol=1e-5)
        close(words[torch.arange(4), mask.sum(1) - 1], a["eot"], rtol=1e-5, atol=1e-5)
        # their frames are normalised already: undo what frames() does to bytes
        frames = model.frames({"frames": (255 * a["frames"]).view(4, 5, 3, 64, 64)})
        close(frames.flatten(0, 1), a["frame_cls"], rtol=1e-5, atol=1e-5)
        block = Block(clip.text_model, 64, 2, "random")
        block.load_state_dict(openai_layers(weights["seq"], "", "layers.", 2)
                              | {"positions": weights["pos"]["weight"]})
        close(block(a["video_in"], a["video_mask"].bool()), a["video_seq"], rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------- clustering


def ragged(B=6, N=13, D=16, seed=0, n=(13, 1, 2, 5, 8, 3)):
    """Tokens of unequal number; what stands at the padding is huge and must not matter."""
    mask = torch.arange(N) < torch.tensor(n)[:, None]
    return rand(B, N, D, seed=seed).masked_fill(~mask[..., None], 1e4), mask


@pytest.mark.parametrize("K", [1, 2, 3, 5, 20])
@pytest.mark.parametrize("order", ["score", "time"])
@pytest.mark.parametrize("M", [1, 6, 13, 15])
def test_dpc_knn_matches_the_loop_of_each_item_alone(K, order, M):
    x, mask = ragged()
    mask[4, 2:5] = False  # padding may stand anywhere
    x[4, 2:5] = -1e4
    assign, centers = dpc_knn(x, mask, M, K, order)
    assert torch.equal(assign == -1, ~mask) and centers.shape == (6, M)
    for b in range(6):
        at = mask[b].nonzero().flatten()
        own, own_centers = literal_clusters(x[b, at], M, K, order)
        assert assign[b, at].tolist() == own
        n = len(own_centers)
        assert n == min(M, len(at)) and centers[b, :n].tolist() == at[own_centers].tolist()
        assert (centers[b, n:] == 13).all()  # no token
        alone, _ = dpc_knn(x[b : b + 1], mask[b : b + 1], M, K, order)
        assert torch.equal(alone[0], assign[b])
        if len(at) <= M:  # every token is a cluster
            assert sorted(own) == list(range(len(at)))
    again, _ = dpc_knn(x, mask, M, K, order)
    assert torch.equal(again, assign)


@pytest.mark.parametrize("name", CLUSTERINGS)
def test_a_clustering_of_an_item_ignores_batch_mates_and_padding(name):
    x, mask = ragged(D=8)
    M = 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assign, _ = CLUSTERINGS[name](x, mask, M)
        for b in range(len(x)):
            alone, _ = CLUSTERINGS[name](x[b : b + 1, mask[b]], mask[b : b + 1, mask[b]], M)
            assert torch.equal(alone[0], assign[b, mask[b]])
    assert (assign[~mask] == -1).all() and assign.max() < M
    if name != "dbscan":  # which has outliers and picks the number itself
        assert (assign[mask] >= 0).all()
        n = [len(set(row[m].tolist())) for row, m in zip(assign, mask)]
        if name == "gaussian":  # a component may be nobody's most likely one
            assert all(2 <= have <= M for have in n[3:5])
        else:
            assert n == [min(M, int(m.sum())) for m in mask]
    first = [[int((row == m).nonzero()[0]) for m in row.unique() if m >= 0] for row in
             CLUSTERINGS[name](x, mask, M, order="time")[0]]
    if name != "dpc-knn":  # there it is the centers that stand in order
        assert all(f == sorted(f) for f in first)
    assert (assign.amax(1) >= 0).all()  # no item is without a cluster


def test_of_more_clusters_than_wanted_the_largest_stay():
    found = by_sklearn(lambda x, M, K: [3, 0, 0, 1, 2, 2, 2, -1])
    mask = torch.ones(1, 8, dtype=torch.bool)
    assert found(rand(1, 8, 4), mask, 2)[0].tolist() == [[-1, 1, 1, -1, 0, 0, 0, -1]]
    assert found(rand(1, 8, 4), mask, 2, order="time")[0].tolist() == [
        [-1, 0, 0, -1, 1, 1, 1, -1]]
    # of two as large, the first label
    assert found(rand(1, 8, 4), mask, 3)[0].tolist() == [[-1, 1, 1, 2, 0, 0, 0, -1]]


@pytest.mark.parametrize("name", CLUSTERINGS)
def test_equal_tokens_make_a_valid_clustering_without_a_warning(name):
    x = rand(4, 12, 8)
    x[0] = x[0, :1]  # a still clip
    x[1, 6:] = x[1, :6]
    x[2, :11] = x[2, :1]
    x[3] = x[3, :1] + 1e-6 * rand(12, 8, seed=1)  # and one that is still but for rounding
    mask = torch.ones(4, 12, dtype=torch.bool)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assign, _ = CLUSTERINGS[name](x, mask, 6)
    assert assign.shape == (4, 12) and assign.min() >= -1 and assign.max() < 6
    assert (assign.amax(1) >= 0).all()
    merged, full = merge(x, rand(4, 12, seed=2), assign, 6)
    assert torch.isfinite(merged).all() and full.any(1).all()
    close(merged[0, full[0]], x[0, :1].expand(int(full[0].sum()), -1))


def test_dpc_knn_breaks_ties_by_position():
    still = torch.ones(1, 9, 4)
    assign, centers = dpc_knn(still, torch.ones(1, 9, dtype=torch.bool), 3)
    assert centers.tolist() == [[0, 1, 2]]
    assert assign.tolist() == [[0, 1, 2, 0, 0, 0, 0, 0, 0]]  # a center stays with itself
    # so near to each other that the product of the tokens rounds as much: the same
    blurred = 100 * rand(1, 1, 64) + 0.02 * rand(1, 9, 64, seed=1)
    assert [a.tolist() for a in dpc_knn(blurred, torch.ones(1, 9, dtype=torch.bool), 3)] == [
        a.tolist() for a in (assign, centers)]
    # two equal pairs, far apart: equally dense, and the earlier pair's first is called the densest
    x = torch.tensor([[0.0], [1.0], [10.0], [11.0]])[None]
    for K in (1, 2):
        assign, centers = dpc_knn(x, torch.ones(1, 4, dtype=torch.bool), 2, K)
        assert centers.tolist() == [[0, 2]] and assign.tolist() == [[0, 0, 1, 1]]


def test_mutual_neighbours_are_a_tie_whatever_the_product_rounds():
    # K = 2: a pair of mutual nearest neighbours has one and the same density, and the earlier one
    # counts as denser, so the later one's delta is their own small distance
    base = F.layer_norm(rand(32, 4, 512), (512,))
    near = F.layer_norm(base + 0.1 * rand(32, 4, 512, seed=1), (512,))
    x = torch.cat([near[:, :3], base], 1)  # 7 tokens: 0-3, 1-4 and 2-5 are pairs
    _, centers = dpc_knn(x, torch.ones(32, 7, dtype=torch.bool), 4, 2)
    assert (centers.sort(1).values == torch.tensor([0, 1, 2, 6])).all()


def test_merge_is_the_weighted_mean_and_an_empty_cluster_is_zero_and_marked():
    x, score = rand(2, 5, 4).requires_grad_(), rand(2, 5, seed=1).requires_grad_()
    assign = torch.tensor([[0, 2, 0, 2, 2], [1, 1, -1, 1, -1]])
    masked = score.masked_fill(assign < 0, -math.inf)
    merged, full = merge(x, masked, assign, 3)
    assert full.tolist() == [[True, False, True], [False, True, False]]
    W = masked.softmax(1)  # over all tokens of the item, as the paper has it
    for b in range(2):
        for m in range(3):
            own = [i for i in range(5) if assign[b, i] == m]
            want = sum(W[b, i] * x[b, i] for i in own) / sum(W[b, i] for i in own) if own else 0
            close(merged[b, m].detach(), (want + torch.zeros(4)).detach())
    merged.square().sum().backward()
    assert torch.isfinite(x.grad).all() and torch.isfinite(score.grad).all()
    assert not x.grad[1, 2].any() and x.grad[0].any()


# ---------------------------------------------------------------- parameters

POSITIONS = 77 * 512


def real_size(**settings):
    """PHA-Net on a CLIP ViT-B/32, without memory for a single weight."""
    with torch.device("meta"):
        clip = CLIPModel(CLIPConfig())
    backbone = SimpleNamespace(family="clip", path="", model=clip, tokenizer=None)
    return PHANet(PHAConfig(**settings), backbone)


def test_positions_start_as_clips_or_of_a_chosen_size(tiny_clip):
    table = backbones.load(tiny_clip).model.text_model.embeddings.position_embedding.weight
    for std in (0.0, 2.0):
        model = make(tiny_clip, position_std=std)
        p = model.head["block_I"]["both"].positions.detach()
        assert torch.equal(p, table) == (std == 0)
        assert std == 0 or 1.6 < p.std() < 2.4


def test_parameter_counts_at_the_papers_size():
    for positions, tables in ((False, 1), (True, 2)):
        model = real_size(local_positions=positions)
        count = sum(p.numel() for p in model.parameters())
        assert count == 188_065_545 + tables * POSITIONS
        groups = model.trainable_groups()
        trained = sum(p.numel() for group in groups.values() for p in group.values())
        # CLIP's first convolution and its logit_scale are not trained
        assert trained == count - 768 * 3 * 32 * 32 - 1 and trained // 100_000 == 1857
        assert thop_parameters(model) == 112_589_832
    assert groups.keys() == {"CLIP", "prototypes", "block", "wti", "merge"}
    sizes = {key: sum(p.numel() for p in group.values()) for key, group in groups.items()}
    assert sum(p.numel() for p in model.clip.parameters()) == 151_277_313
    layer = 4 * (512 * 512 + 512) + 2 * 512 * 2048 + 2048 + 512 + 4 * 512
    mlp = 512 * 1024 + 1024 + 1024 + 1
    attention = 4 * (512 * 512 + 512) + 1024
    assert sizes["prototypes"] == (3 + 1) * 512 and sizes["wti"] == 4 * mlp
    assert sizes["block"] == 2 * (4 * layer + POSITIONS)
    assert sizes["merge"] == 4 * (3 * 512 * 512 + 1024 + mlp + attention)
    one = thop_parameters(real_size(share_local_block=False))
    both = thop_parameters(real_size(share_local_block=False, share_individual_block=False))
    assert (round(one / 1e6, 2), round(both / 1e6, 2)) == (120.99, 129.39)  # Table 4
    alone = real_size(share_individual_prototypes=False, share_local_prototypes=False)
    more = sum(p.numel() for p in alone.parameters()) - count
    assert (4 * 3 * 512, 4 * 512) == (6144, 2048) and 4 * more == 6144 + 2048  # bytes, Table 4


def test_blocks_start_as_clips_layers_and_share_nothing_with_them(tiny_clip):
    model = make(tiny_clip)
    text = model.clip.text_model
    for level in "IL":
        block = model.head[f"block_{level}"]["both"]
        table = text.embeddings.position_embedding.weight
        assert torch.equal(block.positions, table) and block.positions is not table
        for layer, start in zip(block.layers, text.encoder.layers, strict=True):
            for p, q in zip(layer.parameters(), start.parameters(), strict=True):
                assert torch.equal(p, q) and p.data_ptr() != q.data_ptr()
    other = make(tiny_clip, block_init="random", block_layers=3).head["block_I"]["both"]
    assert len(other.layers) == 3
    start = text.encoder.layers[0].mlp.fc1.weight
    assert not torch.equal(other.layers[0].mlp.fc1.weight, start)
    p = make(tiny_clip, individual_prototypes=20).head["prototypes_I"]["both"]
    assert p.norm(dim=1).mean().item() == pytest.approx(1, rel=0.1)


def test_groups_decay_and_rates(tiny_clip):
    model = make(tiny_clip, learn_sigma=True)
    cfg = SimpleNamespace(weight_decay=0.2, learning_rate=1e-4, beta1=0.9, beta2=0.98,
                          adam_eps=1e-6)
    optimizer = train.make_optimizer(model, cfg, torch.device("cpu"))
    names = {id(p): n for n, p in model.named_parameters()}
    seen = {names[id(p)]: (g["lr_scale"], g["weight_decay"]) for g in optimizer.param_groups
            for p in g["params"]}
    assert seen.keys() == {n for n, p in model.named_parameters() if p.requires_grad}
    assert "clip.vision_model.embeddings.patch_embedding.weight" not in seen
    for name, (rate, decay) in seen.items():
        assert rate == (1e-3 if name.startswith("clip.") else 1.0)
        free = "prototypes" in name or "positions" in name
        assert decay == (0.0 if free or model.get_parameter(name).dim() < 2 else 0.2)
    assert seen["clip.logit_scale"] == (1e-3, 0.0)
    assert seen["head.block_I.both.positions"] == (1.0, 0.0)
    assert seen["head.merge_L.text.conv.weight"] == (1.0, 0.2)


# ---------------------------------------------------------------- what must not matter


@pytest.mark.parametrize("settings", [{}, dict(padding="ignore", attention_local="center"),
                                      dict(individual_prototypes=0), dict(levels="mean")])
def test_an_encoding_ignores_batch_mates(tiny_clip, settings):
    model = make(tiny_clip, **settings).eval()
    batch = model.collate(samples())
    with torch.no_grad():
        for side, inputs in batch.items():
            encode = getattr(model, f"encode_{side}")
            whole = encode(inputs)
            assert all(torch.isfinite(v).all() for v in whole.values())
            for i in range(5):
                alone = encode({k: v[i : i + 1] for k, v in inputs.items()})
                for k in whole:
                    close(alone[k][0], whole[k][i], rtol=0, atol=5e-6)
            turned = encode({k: v.flip(0) for k, v in inputs.items()})
            for k in whole:
                close(turned[k].flip(0), whole[k], rtol=0, atol=5e-6)
            top = whole["G"]
            assert (top[0] - top[1]).abs().max() > 1e-2  # and it does depend on the item


def test_what_stands_at_padding_is_invisible(tiny_clip):
    model = make(tiny_clip)
    inputs = model.collate(samples())["text"]
    other = {k: v.clone() for k, v in inputs.items()}
    gone = other["attention_mask"] == 0
    other["input_ids"][gone] = torch.arange(int(gone.sum())) % 300
    a, b = model.encode_text(inputs), model.encode_text(other)
    for k in a:
        assert torch.equal(a[k], b[k])


# parameters whose gradient is zero by proof: a constant added to all logits of a softmax changes
# nothing (the last bias of a weight MLP, every bias of keys), and over one key softmax is 1
# whatever the query (the global merge has one merged token)
ZERO = (".2.bias", "k_proj.bias", "score.2.bias", "merge_G.text.cross.q.", "merge_G.video.cross.q.")


def test_the_gradient_reaches_every_parameter_but_those_that_cannot_matter(tiny_clip):
    model = make(tiny_clip, sigma=0.2)
    step(model, model.collate(samples(frames=4)))
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    norms = {n: p.grad.norm().item() for n, p in named.items()}
    typical = np.median(list(norms.values()))
    for name, norm in norms.items():
        if name.endswith(("wti_I.text.2.bias", *ZERO[:3])) or any(z in name for z in ZERO[3:]):
            assert norm < 1e-4 * typical, name
        else:
            assert norm > 1e-4 * typical, name
    # inside of joint tensors: the key half of kv's bias, and all of the key half at the top
    for level in "LG":
        for side in ("text", "video"):
            kv = model.head[f"merge_{level}"][side].cross.kv
            D = kv.in_features
            assert kv.bias.grad[:D].norm() < 1e-4 * kv.bias.grad[D:].norm()
            assert (kv.weight.grad[:D].norm() < 1e-6 * kv.weight.grad[D:].norm()) == (level == "G")


ABLATIONS = {
    **VARIANTS,
    "individual": dict(levels="individual"), "two lower": dict(levels="individual+local"),
    "two, I and G, no attention": dict(levels="individual+global", attention_global="none"),
    "mean": dict(levels="mean"), "mean, learned sigma": dict(levels="mean", learn_sigma=True),
    "P unshared": dict(share_individual_prototypes=False),
    "L unshared": dict(share_local_prototypes=False),
    "block I unshared": dict(share_individual_block=False),
    "block L unshared": dict(share_local_block=False),
    "no block I": dict(individual_block=False), "no block L": dict(local_block=False),
    "center, prototype": dict(attention_local="center"),
    "prototype, center": dict(attention_global="center"),
    "none, prototype": dict(attention_local="none"),
    "prototype, none": dict(attention_global="none"),
    "P 0, L 1": dict(individual_prototypes=0), "P 3, L 0": dict(local_prototypes=0),
    "P 1, L 3": dict(individual_prototypes=1, local_prototypes=3),
    "one phrase": dict(num_phrases=1, num_clips=1), "ten": dict(num_phrases=10, num_clips=10),
    "kmeans": dict(cluster="kmeans"), "dbscan": dict(cluster="dbscan"),
    "gaussian": dict(cluster="gaussian"), "K 6": dict(knn=6), "K 50": dict(knn=50),
    "random blocks": dict(block_init="random", block_layers=1),
    "HBI's distillation": dict(kl_direction="hbi", kl_reduction="mean", kl_detach=True,
                               kl_temperature=0.01),
    "weights 0": dict(alpha=0.0, beta=0.0, lambda_dl=0.0, mu_pcl=0.0),
    "learned sigma, masks": dict(learn_sigma=True, mask_same_video=True),
    "patches trained, checkpointed": dict(freeze_patches=False, gradient_checkpointing=True),
    "one frame": dict(num_frames=1),
}


@pytest.mark.parametrize("name", ABLATIONS)
def test_every_setting_trains_a_step_with_all_of_its_parameters(tiny_clip, name):
    model = make(tiny_clip, **ABLATIONS[name]).train()
    loss, logs = step(model, model.collate(samples(frames=model.config.num_frames)))
    assert torch.isfinite(loss) and all(torch.isfinite(v) for v in logs.values())
    for n, p in model.named_parameters():
        if p.requires_grad:  # DistributedDataParallel waits for all of them
            assert p.grad is not None and torch.isfinite(p.grad).all(), n
        else:
            assert p.grad is None, n
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 1e-4)
    optimizer.step()
    model.eval()
    text, video = model(model.collate(samples(frames=model.config.num_frames)))
    S = model.similarity(text, video)
    assert S.shape == (5, 5) and S.dtype == torch.float32 and torch.isfinite(S).all()
    assert not S.requires_grad
    assert isinstance(model.summary(), str)


def test_a_step_under_bf16_autocast_stays_near_fp32(tiny_clip):
    model = make(tiny_clip)
    batch = model.collate(samples())
    with torch.no_grad():
        plain = model(batch)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half = model(batch)
    for features in half:
        assert all(v.dtype == torch.float32 for v in features.values())
    close(model.level_similarity("I", *half), model.level_similarity("I", *plain), rtol=0,
          atol=0.05)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        text, video = model(batch)
    model.loss(text, video)[0].backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.requires_grad)


def test_a_batch_of_one_is_encoded_and_scored(tiny_clip):
    for levels in ("all", "mean"):
        model = make(tiny_clip, levels=levels)
        text, video = model(model.collate(samples(CAPTIONS[:1])))
        assert model.similarity(text, video).shape == (1, 1)
        with pytest.raises(ValueError, match="batch of 1 pair"):
            model.loss(text, video)


# ---------------------------------------------------------------- similarity in blocks


def random_features(model, n, side, seed):
    """Features as encode_* make them, of texts of all lengths, without the cost of CLIP."""
    cfg, D = model.config, 64
    N = cfg.max_words if side == "text" else cfg.num_frames
    real = torch.full((n,), N)
    if side == "text":
        real = 2 + (rand(n, seed=seed).abs() * 1e6).long() % (N - 1)
    out = {}
    for level, slots, P in (("I", N, cfg.individual_prototypes),
                            ("L", cfg.num_phrases, cfg.local_prototypes)):
        mask = torch.arange(slots) < (real if level == "I" else torch.full((n,), slots))[:, None]
        mask = F.pad(mask, (0, P), value=True)
        x = rand(n, slots + P, D, seed=seed + 1) * mask[..., None]
        with torch.no_grad():
            f, _ = PHANet._level(SimpleNamespace(
                head={f"wti_{level}": {side: nn.Linear(D, 1)}}, config=cfg), level, side, x, mask)
        out |= f
    out["G"] = F.normalize(rand(n, D, seed=seed + 2), dim=-1)
    return out


@pytest.mark.parametrize("padding", ["zero", "ignore"])
def test_scores_are_those_of_eq_3_and_no_bit_depends_on_the_chunks(tiny_clip, padding):
    model = make(tiny_clip, padding=padding, max_words=32, num_frames=12)
    torch.manual_seed(0)
    text, video = random_features(model, 150, "text", 0), random_features(model, 131, "video", 9)
    score = lambda **how: evaluation.similarity(model.similarity, text, video, **how)  # noqa: E731
    S, threads = score(), torch.get_num_threads()
    try:
        for tile, n in ((64, 1), (100, 1), (512, 1), (100, 2), (512, 2)):
            torch.set_num_threads(n)
            assert torch.equal(score(tile=tile), S), (tile, n)
    finally:
        torch.set_num_threads(threads)
    p = torch.randperm(150)
    some = {k: v[p] for k, v in text.items()}
    assert torch.equal(evaluation.similarity(model.similarity, some, video), S[p])
    close(model.similarity(text, video), S, rtol=0, atol=1e-6)
    assert 3 <= text["I_mask"].sum(1).min() < 12 and text["I_mask"].sum(1).max() == 35
    zero = padding == "zero"
    for i in range(0, 150, 23):
        for j in range(0, 131, 29):
            want = 0.1 * torch.dot(text["G"][i], video["G"][j]).item()
            for level, weight in (("I", 1.0), ("L", 0.5)):
                t, v = text[f"{level}_mask"][i].bool(), video[f"{level}_mask"][j].bool()
                want += weight * literal_wti(
                    text[level][i, t], video[level][j, v], text[f"{level}_gamma"][i, t],
                    video[f"{level}_gamma"][j, v], zeros_t=zero and not t.all())
            assert S[i, j].item() == pytest.approx(want, abs=1e-5)


# ---------------------------------------------------------------- captions, pooling, frames


def test_a_cut_caption_keeps_its_end_and_says_so(tiny_clip):
    model = make(tiny_clip)
    tok, N = model.backbone.tokenizer, 12
    just = " ".join(["a"] * (N - 2))  # fills all places
    x = model.collate(samples([just, just + " a", "a  ", "  a"]))["text"]
    assert x["cut"].tolist() == [False, True, False, False]
    assert x["input_ids"].shape == (4, N) and x["attention_mask"].sum(1).tolist() == [N, N, 3, 3]
    assert torch.equal(x["input_ids"][0], x["input_ids"][1])
    assert (x["input_ids"][:, 0] == tok.bos_token_id).all()
    ends = x["input_ids"][torch.arange(4), x["attention_mask"].sum(1) - 1]
    assert (ends == tok.eos_token_id).all()
    assert torch.equal(x["input_ids"][2], x["input_ids"][3])


@pytest.mark.parametrize("path", ["tiny", "demo"])
def test_a_caption_that_spells_special_tokens_is_plain_text(tiny_clip, path):
    # the demo's CLIP has the tokenizer class of the public checkpoints
    path = tiny_clip if path == "tiny" else str(ROOT / "data/demo/backbones/tiny-clip")
    model = make(path, max_words=36)
    tok = model.backbone.tokenizer
    x = model.collate(samples(["a <|endoftext|> circle", "a <|startoftext|> circle"]))["text"]
    for row, mask in zip(x["input_ids"], x["attention_mask"]):
        inside = row[1 : int(mask.sum()) - 1].tolist()
        assert tok.eos_token_id not in inside and tok.bos_token_id not in inside
        assert "text" in tok.decode(inside).replace(" ", "")


@pytest.mark.parametrize("eos_in_config", [None, 2])
@pytest.mark.parametrize("pad", ["<|endoftext|>", "<|pad|>"])
def test_mean_is_clip_itself_pooled_at_the_real_end(tmp_path, eos_in_config, pad):
    wrong = {} if eos_in_config is None else dict(eos_token_id=eos_in_config)
    path = make_clip(tmp_path, pad=pad, **wrong)
    model = make(path, levels="mean")
    items = samples()
    batch = model.collate(items)
    with torch.no_grad():
        text, video = model(batch)
        for i, item in enumerate(items):
            ids = model.backbone.tokenizer(item.caption, add_special_tokens=False).input_ids
            ids = torch.tensor([[model.backbone.tokenizer.bos_token_id, *ids,
                                 model.backbone.tokenizer.eos_token_id]])
            h = model.clip.text_model(input_ids=ids).last_hidden_state[0, -1]
            want = F.normalize(model.clip.text_projection(h), dim=-1)
            close(text["G"][i], want, rtol=0, atol=1e-5)
            frames = torch.from_numpy(item.frames).permute(0, 3, 1, 2).float() / 255
            mean, std = (torch.tensor(v).view(3, 1, 1) for v in ((0.48, 0.46, 0.41),
                                                                 (0.27, 0.26, 0.28)))
            v = model.clip.get_image_features((frames - mean) / std)
            v = F.normalize(v if torch.is_tensor(v) else v.pooler_output, dim=-1).mean(0)
            close(video["G"][i], F.normalize(v, dim=0), rtol=0, atol=1e-5)
    close(model.similarity(text, video), text["G"] @ video["G"].T)
    loss, logs = model.loss(text, video)
    close(loss, info_nce(text["G"] @ video["G"].T, 100.0))
    assert logs.keys() == {"nce_G"}


def test_frames_are_bytes_until_they_are_on_the_device(tiny_clip):
    model = make(tiny_clip)
    batch = model.collate(samples())
    assert batch["video"]["frames"].dtype == torch.uint8
    assert batch["video"]["frames"].shape == (5, 4, 3, 16, 16)
    texts = samples()
    for s in texts:
        s.frames = None
    assert model.collate(texts).keys() == {"text"}
    texts[1].frames = samples()[1].frames
    with pytest.raises(ValueError, match="4 of 5 samples have no frames, the first is 'clip0'"):
        model.collate(texts)


def test_a_sample_that_cannot_be_collated_is_named(tiny_clip):
    model, items = make(tiny_clip), samples()
    items[2].frames = np.zeros((4, 1, 400, 3), dtype=np.uint8)
    with pytest.raises(ValueError, match="^clip2: a frame of 400x1 is too thin"):
        model.collate(items)


# ---------------------------------------------------------------- gradient cache


@pytest.mark.parametrize("chunk_size", [1, 2, 4])
@pytest.mark.parametrize("settings", [{}, dict(learn_sigma=True, gradient_checkpointing=True,
                                               padding="ignore", kl_temperature=0.05)])
def test_gradient_cache_is_the_plain_gradient(tiny_clip, chunk_size, settings):
    model = make(tiny_clip, sigma=0.1, **settings)

    def gradient(chunk_size):
        model.zero_grad(set_to_none=True)
        chunks, ids, _ = train.collate_chunks(samples(), model.collate, chunk_size)
        if chunk_size == 0:
            loss, _ = train.plain_step(model, chunks[0], ids, contextlib.nullcontext)
        else:
            loss, _ = train.cached_step(model, chunks, ids, contextlib.nullcontext)
        return loss, {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}

    loss, want = gradient(0)
    cached, got = gradient(chunk_size)
    close(cached, loss, rtol=1e-5, atol=0)
    scale = max(g.norm().item() for g in want.values())
    for name in want:
        error = (got[name] - want[name]).norm().item()
        assert error < 1e-5 * want[name].norm().item() + 1e-7 * scale, name


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize("settings, says", [
    (dict(levels="local"), "levels must be one of individual, "),
    (dict(cluster="k-means"), "cluster must be one of dpc-knn, kmeans"),
    (dict(attention_local="pca"), "attention_local must be one of"),
    (dict(attention_global="cca"), "attention_global must be one of"),
    (dict(merge_residual="both"), "merge_residual must be one of"),
    (dict(padding="-inf"), "padding must be one of zero, ignore"),
    (dict(kl_direction="both"), "kl_direction must be"),
    (dict(kl_reduction="sum"), "kl_reduction must be"),
    (dict(block_init="vit"), "block_init must be"),
    (dict(cluster_order="size"), "cluster_order must be"),
    (dict(max_words=2), "max_words must be at least 3"),
    (dict(num_frames=0), "num_frames must be at least 1"),
    (dict(num_phrases=0), "num_phrases must be at least 1"),
    (dict(num_clips=0), "num_clips must be at least 1"),
    (dict(individual_prototypes=-1), "individual_prototypes must be at least 0"),
    (dict(local_prototypes=-1), "local_prototypes must be at least 0"),
    (dict(block_layers=0), "block_layers must be at least 1"),
    (dict(knn=0), "knn must be at least 1"),
    (dict(alpha=math.nan), "alpha must be at least 0"),
    (dict(mu_pcl=-0.1), "mu_pcl must be at least 0"),
    (dict(lambda_dl=math.inf), "lambda_dl must be at least 0"),
    (dict(sigma=0.0), "sigma must be above 0"),
    (dict(kl_temperature=0.0), "kl_temperature must be above 0"),
    (dict(learn_sigma=True, sigma=0.001), "sigma must be at least 0.01 when it is learned"),
    (dict(max_words=38), "max_words 38 and 3 prototypes need more than the 40 positions"),
    (dict(num_frames=38), "num_frames 38 and 3 prototypes need more"),
    (dict(num_phrases=40), "num_phrases 40 and 1 prototypes need more"),
    (dict(num_clips=40), "num_clips 40 and 1 prototypes need more"),
    (dict(levels="mean", max_words=41), "max_words is 41, this CLIP has positions for 40"),
    (dict(block_layers=3), "at least 3 layers; this one has 32 and 2; use block_init='random'"),
])
def test_a_bad_setting_is_one_clear_error(tiny_clip, settings, says):
    with pytest.raises(ValueError) as e:
        make(tiny_clip, **settings)
    assert says in str(e.value) and "\n" not in str(e.value)


def test_a_backbone_that_is_no_clip_or_of_an_odd_width_is_refused(tiny_clip):
    fake = SimpleNamespace(family="qwen2_vl", path="x/y", model=None)
    with pytest.raises(ValueError, match="'x/y' is a 'qwen2_vl'"):
        PHANet(PHAConfig(), fake)
    config = CLIPConfig(text_config=dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                         num_attention_heads=4, max_position_embeddings=40),
                        vision_config=dict(hidden_size=32, intermediate_size=64,
                                           num_hidden_layers=1, num_attention_heads=4,
                                           image_size=16, patch_size=8), projection_dim=24)
    backbone = SimpleNamespace(family="clip", path="", model=CLIPModel(config), tokenizer=None)
    with pytest.raises(ValueError, match="projection, 24, .*use block_init='random'"):
        PHANet(PHAConfig(**SMALL), backbone)
    model = PHANet(PHAConfig(**SMALL, block_init="random"), backbone)  # another width is fine
    x, mask = model.head["merge_L"]["text"](rand(2, 9, 24), torch.ones(2, 9, dtype=torch.bool), 3)
    assert x.shape == (2, 6, 24) and mask.all()
    config.projection_dim = 30
    backbone.model = CLIPModel(config)
    with pytest.raises(ValueError, match="width 30.*4 heads"):
        PHANet(PHAConfig(**SMALL, block_init="random"), backbone)
