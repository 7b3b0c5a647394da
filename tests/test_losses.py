"""
Each loss against numbers worked out by hand, a literal loop written from the paper, and the
symmetries it must have; the gather against one process. CPU, about 15 s.

python -m pytest tests/test_losses.py -v
"""
import math

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F

from losses import (diversity, gather, gather_ids, hard_negative, info_nce, prototype_contrast,
                    same_video, self_distillation)

close = torch.testing.assert_close

# two slots, two pairs; slot 0 is the better one for both texts
S_HAND = torch.tensor([[[0.9, 0.5], [0.2, 0.8]], [[0.3, 0.6], [0.4, 0.7]]])  # [M=2, B=2, B=2]


def rand(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def units(*shape, seed=0):
    return F.normalize(rand(*shape, seed=seed), dim=-1)


# ---------------------------------------------------------------- InfoNCE


def loop_nce(S, gamma, mask=None):
    B, total = len(S), 0.0
    for side in "tv":
        for i in range(B):
            row = []
            for j in range(B):
                s = S[i][j] if side == "t" else S[j][i]
                out = mask is not None and i != j and (mask[i][j] if side == "t" else mask[j][i])
                row.append(0.0 if out else math.exp(gamma * s))
            total += -math.log(row[i] / sum(row)) / B / 2
    return total


def test_info_nce_by_hand():
    # gamma 1, rows: -log(e^1/(e^1+e^0)) = .3133, -log(e^.5/(e^.5+e^.5)) = .6931, mean .50321
    # columns: -log(e^1/(e^1+e^.5)) = .4741, -log(e^.5/(e^0+e^.5)) = .4741; mean of both .48864
    S = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    close(info_nce(S, 1.0), torch.tensor(0.488642), rtol=1e-5, atol=0)


@pytest.mark.parametrize("gamma", [1.0, 50.0])
def test_info_nce_matches_the_loop(gamma):
    S = rand(5, 5, seed=1).double() / 4
    mask = rand(5, 5, seed=12) > 0.2  # not symmetric, with True on the diagonal: no effect
    assert mask.diagonal().any() and not torch.equal(mask, mask.T)
    assert info_nce(S, gamma).item() == pytest.approx(loop_nce(S.tolist(), gamma), rel=1e-5)
    got = info_nce(S, gamma, mask).item()
    assert got == pytest.approx(loop_nce(S.tolist(), gamma, mask.tolist()), rel=1e-5)


def test_info_nce_is_the_same_for_both_sides_and_any_order():
    S, p = rand(6, 6), torch.randperm(6)
    close(info_nce(S, 20.0), info_nce(S.T, 20.0))
    close(info_nce(S, 20.0), info_nce(S[p][:, p], 20.0))


def test_info_nce_gradient_reaches_a_learned_scale():
    S, gamma = rand(4, 4), torch.tensor(3.0, requires_grad=True)
    info_nce(S, gamma).backward()
    h = 1e-2
    slope = (info_nce(S, 3.0 + h) - info_nce(S, 3.0 - h)) / (2 * h)
    close(gamma.grad, slope, rtol=1e-3, atol=1e-5)


def test_info_nce_stays_fp32_under_autocast_and_finite_when_all_is_masked():
    S = rand(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        close(info_nce(S, 50.0), torch.tensor(loop_nce(S.tolist(), 50.0)), rtol=1e-5, atol=1e-5)
    S = S.requires_grad_()
    loss = info_nce(S, 50.0, torch.ones(4, 4, dtype=torch.bool))
    loss.backward()
    assert loss.item() == 0 and torch.isfinite(S.grad).all()


# ---------------------------------------------------------------- diversity


def loop_div(z):
    B, M, _ = z.shape
    total = 0.0
    for i in range(B):
        for m in range(M):
            for n in range(M):
                if m != n:
                    total += torch.dot(z[i, m], z[i, n]).item() ** 2
    return total / (B * M * (M - 1))


def test_diversity_by_hand():
    # item 0: slots at 0 and 60 degrees, cos^2 = .25; item 1: orthogonal, 0. mean over items .125
    half, root = 0.5, math.sqrt(3) / 2
    z = torch.tensor([[[1, 0], [half, root]], [[1, 0], [0, 1]]], dtype=torch.float32)
    close(diversity(z), torch.tensor(0.125))
    close(diversity(z, z[:1]), torch.tensor((0.125 + 0.25) / 2))  # Eq. 12, the mean of two sides


def test_diversity_matches_the_loop_also_under_autocast():
    z, u = units(3, 4, 16, seed=3), units(3, 4, 16, seed=4)
    want = torch.tensor((loop_div(z) + loop_div(u)) / 2)
    close(diversity(z, u), want, rtol=1e-5, atol=1e-7)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        close(diversity(z, u), want, rtol=1e-5, atol=1e-7)


def test_diversity_of_one_slot_is_zero():
    assert diversity(units(3, 1, 8), units(3, 1, 8)).item() == 0


def test_diversity_gradient():
    z = units(2, 3, 5).double().requires_grad_()
    diversity(z).backward()
    # d/dz_m of the mean squared cosine: 4 * sum over n != m of (z_m . z_n) z_n / (B M (M-1))
    G = (z @ z.mT).detach()
    G.diagonal(dim1=1, dim2=2).zero_()
    close(z.grad, 4 * (G @ z.detach()) / (2 * 3 * 2), rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- hard negatives


def loop_hn(S_m, delta, S, mask):
    M, B, _ = S_m.shape
    total = 0.0
    for side in "tv":
        for i in range(B):
            at = (lambda T, j: T[..., i, j]) if side == "t" else (lambda T, j: T[..., j, i])
            rest = [j for j in range(B) if j != i and not at(mask, j)]
            if rest:
                j = max(rest, key=lambda j: at(S, j).item())
                gap = max((at(S_m[m], i) - at(S_m[m], j)).item() for m in range(M))
                total += max(0.0, delta - gap) / B / 2
    return total


def test_hard_negative_by_hand():
    # text side,  query 0: gaps .9-.5, .3-.6 -> .4;  query 1: .8-.2, .7-.4 -> .6
    #             relu(.5 - gap) = .1, 0 -> mean .05
    # video side, query 0: gaps .9-.2, .3-.4 -> .7;  query 1: .8-.5, .7-.6 -> .3
    #             relu(.5 - gap) = 0, .2 -> mean .10
    close(hard_negative(S_HAND, 0.5), torch.tensor(0.075))
    assert hard_negative(S_HAND).item() == 0  # every gap is wider than the paper's .04


@pytest.mark.parametrize("own_scores", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_hard_negative_matches_the_loop(own_scores, masked):
    S_m = rand(3, 6, 6, seed=5)
    S = S_m.amax(0) if own_scores else S_m.mean(0)  # maxsim picks other negatives than the mean
    mask = (rand(6, 6, seed=6) > 0.3) if masked else torch.zeros(6, 6, dtype=torch.bool)
    if masked:
        mask[2] = True  # text 2 has no negative left
    got = hard_negative(S_m, 0.7, S if own_scores else None, mask if masked else None)
    assert got.item() == pytest.approx(loop_hn(S_m, 0.7, S, mask), rel=1e-5)


def test_hard_negative_pushes_one_slot_per_query_and_not_the_choice_of_the_negative():
    S_m = S_HAND.clone().requires_grad_()
    S = S_m.mean(0)
    hard_negative(S_m, 0.5, S).backward()
    # only text 0 and video 1 are inside the margin, and slot 0 is the best slot of both:
    # -1/(2B) on the positives' cosines, +1/(2B) on the negative's, which is [0, 1] for both
    want = torch.zeros_like(S_HAND)
    want[0] = torch.tensor([[-0.25, 0.5], [0.0, -0.25]])
    close(S_m.grad, want)


def test_hard_negative_ignores_the_order_of_slots_and_of_pairs():
    S_m, p = rand(4, 6, 6, seed=7), torch.randperm(6)
    close(hard_negative(S_m.flip(0), 0.5), hard_negative(S_m, 0.5))
    close(hard_negative(S_m[:, p][:, :, p], 0.5), hard_negative(S_m, 0.5))
    close(hard_negative(S_m.mT, 0.5), hard_negative(S_m, 0.5))


def test_hard_negative_with_all_pairs_masked_is_zero_and_finite():
    S_m = rand(2, 3, 3).requires_grad_()
    loss = hard_negative(S_m, 5.0, mask=torch.ones(3, 3, dtype=torch.bool))
    loss.backward()
    assert loss.item() == 0 and torch.isfinite(S_m.grad).all()


def test_same_video_mask_removes_a_duplicate_as_negative():
    # texts 0 and 1 describe one video, so pair [0, 1] scores as high as the positive
    S = torch.tensor([[0.9, 0.9, 0.1], [0.9, 0.9, 0.2], [0.0, 0.1, 0.8]])
    mask = same_video(torch.tensor([7, 7, 3]))
    assert mask.tolist() == [[True, True, False], [True, True, False], [False, False, True]]
    assert hard_negative(S[None], 0.04).item() == pytest.approx(0.04 * 2 / 3)
    assert hard_negative(S[None], 0.04, mask=mask).item() == 0
    assert info_nce(S, 50.0).item() > 0.4 and info_nce(S, 50.0, mask).item() < 1e-10


@pytest.mark.parametrize("loss", [lambda S: info_nce(S, 50.0), lambda S: hard_negative(S[None])])
def test_one_pair_or_a_rectangle_is_an_error(loss):
    with pytest.raises(ValueError, match="batch of 1 pair"):
        loss(torch.ones(1, 1))
    with pytest.raises(ValueError, match="wants scores of B texts"):
        loss(torch.ones(2, 3))


# ---------------------------------------------------------------- PHA-Net


def test_prototype_contrast_by_hand():
    # scale 1, rows: -log(e^1/(e^1+e^0)) = .3133 and -log(e^.5/(e^.2+e^.5)) = .5544; mean .43381.
    # The columns would give -log(e^1/(e^1+e^.2)) = .3711 and -log(e^.5/(e^0+e^.5)) = .4741
    S_P = torch.tensor([[1.0, 0.0], [0.2, 0.5]])
    close(prototype_contrast(S_P, 1.0), torch.tensor(0.433808), rtol=1e-5, atol=0)
    sigma, P, S_P = 0.01, 4, rand(4, 4, seed=20).double() / 10
    want = sum(-math.log(math.exp(S_P[i, i] / sigma)
                         / sum(math.exp(S_P[i, j] / sigma) for j in range(P)))
               for i in range(P)) / P
    assert prototype_contrast(S_P, 1 / sigma).item() == pytest.approx(want, rel=1e-5)


def loop_kl(first, second, temperature=1.0):
    """Sum over rows and columns of KL(D_first || D_second), Eq. 10-12 without the mean."""
    B, total = len(first), 0.0
    for way in ("rows", "columns"):
        for i in range(B):
            p, q = [], []
            for out, S in ((p, first), (q, second)):
                line = [S[i][j] if way == "rows" else S[j][i] for j in range(B)]
                exps = [math.exp(s / temperature) for s in line]
                out += [e / sum(exps) for e in exps]
            total += sum(a * math.log(a / b) for a, b in zip(p, q))
    return total


@pytest.mark.parametrize("temperature", [1.0, 0.1])
@pytest.mark.parametrize("reduction", ["batchmean", "mean"])
@pytest.mark.parametrize("direction", ["paper", "hbi"])
def test_self_distillation_matches_the_loop(direction, reduction, temperature):
    B = 5
    S = {level: rand(B, B, seed=30 + i) for i, level in enumerate("ILG")}
    I, L, G = (s.double().tolist() for s in S.values())  # noqa: E741
    # paper: KL(upper || lower) for I2L, L2G, I2G; hbi: the other way around
    pairs = [(L, I), (G, L), (G, I)]
    pairs = pairs if direction == "paper" else [pair[::-1] for pair in pairs]
    want = sum(loop_kl(*pair, temperature) for pair in pairs)
    want /= B if reduction == "batchmean" else B * B
    got = self_distillation(S, direction, reduction, temperature=temperature)
    assert got.item() == pytest.approx(want, rel=1e-4)


def test_self_distillation_of_equal_levels_or_of_one_is_zero():
    S = rand(4, 4, seed=33)
    close(self_distillation({"I": S, "L": S.clone()}), torch.tensor(0.0), rtol=0, atol=1e-6)
    assert self_distillation({"I": S}).item() == 0
    # a constant on top of all scores changes no distribution
    close(self_distillation({"I": S, "L": S + 0.3}), torch.tensor(0.0), rtol=0, atol=1e-6)


@pytest.mark.parametrize("direction, moved, still", [("paper", "I", "L"), ("hbi", "L", "I")])
def test_self_distillation_detaches_the_first_argument(direction, moved, still):
    S = {level: rand(4, 4, seed=34 + i).requires_grad_() for i, level in enumerate("IL")}
    value = self_distillation(S, direction, detach=True)
    close(value, self_distillation(S, direction))  # the number is the same
    value.backward()
    assert S[still].grad is None and S[moved].grad.norm() > 0
    for s in S.values():
        s.grad = None
    self_distillation(S, direction).backward()
    assert all(s.grad.norm() > 0 for s in S.values())


# ---------------------------------------------------------------- gather


def full_loss(zt, zv, ids):
    S_m = torch.einsum("imd,jmd->mij", zt, zv)
    S, mask = S_m.mean(0), same_video(ids)
    return info_nce(S, 5.0, mask) + diversity(zt, zv) + hard_negative(S_m, 0.5, S, mask)


def _worker(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=2)
    mine = slice(2 * rank, 2 * rank + 2)
    zt, zv = units(4, 3, 8, seed=8), units(4, 3, 8, seed=9)
    t = zt[mine].clone().requires_grad_()
    v = zv[mine].clone().requires_grad_()
    ids = gather_ids(torch.tensor([5, 6, 5, 7])[mine])
    T, V = gather(t), gather(v.mT).mT  # .mT: not contiguous
    loss = full_loss(T, V, ids)
    loss.backward()
    try:
        gather(torch.zeros(2 + rank, 3))
        error = ""
    except ValueError as e:
        error = str(e)
    out = dict(ids=ids, T=T.detach(), V=V.detach(), loss=loss.detach(), dt=t.grad, dv=v.grad)
    torch.save({**out, "error": error}, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


def test_gather_on_two_processes_gives_the_loss_and_gradient_of_one(tmp_path):
    mp.spawn(_worker, args=(str(tmp_path),), nprocs=2)
    zt, zv = units(4, 3, 8, seed=8).requires_grad_(), units(4, 3, 8, seed=9).requires_grad_()
    ids = torch.tensor([5, 6, 5, 7])
    loss = full_loss(gather(zt), gather(zv), gather_ids(ids))  # not distributed here: identity
    loss.backward()
    for rank in range(2):
        got = torch.load(f"{tmp_path}/rank{rank}.pt")
        assert torch.equal(got["T"], zt) and torch.equal(got["V"], zv)  # rank order
        assert torch.equal(got["ids"], ids)
        close(got["loss"], loss.detach(), rtol=1e-6, atol=0)
        mine = slice(2 * rank, 2 * rank + 2)
        # the sum over the 2 copies of the loss; DDP's mean over ranks divides by 2
        close(got["dt"] / 2, zt.grad[mine], rtol=1e-5, atol=1e-7)
        close(got["dv"] / 2, zv.grad[mine], rtol=1e-5, atol=1e-7)
        assert "(2, 3), (3, 3)" in got["error"] and "drop_last" in got["error"]
