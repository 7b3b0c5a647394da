"""
The losses of every method in this repo, and the gather that lets W processes share one batch.

Data flow: each rank encodes its own items, gather makes the features of the global batch (with
gradient), every rank computes the same loss on all of them. Section "MARS" follows MARS, Sec. 3.2
and 3.3; "Eq. n" there means that paper. Scores are always [text, video] and fp32: autocast is
switched off in here, because gamma = 50 turns a bf16 rounding of a cosine into 0.2 of a logit.

A mask is [B, B] bool, True = "text i and video j are of one video, so the pair is no negative".
The diagonal holds the positives and is never masked. Default off: the papers do not mask.

Shapes: B pairs of the global batch, M slots, D width, W ranks.
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F

# -----------------------------------------------------------------------------
# gather


def _world():
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _all_gather(x):
    # [B, ...] on each rank -> [W*B, ...], rank 0's rows first
    if not 1 <= x.dim() <= 7:
        raise ValueError(f"gather: wants [B, ...] with 1 to 7 axes, got shape {tuple(x.shape)}")
    W, x = _world(), x.detach().contiguous()
    # ranks with unequal shapes hang or return garbage in the collective: compare the shapes first
    mine = torch.tensor([x.dim(), *x.shape, *[0] * (7 - x.dim())], device=x.device)  # [8]
    shapes = [torch.empty_like(mine) for _ in range(W)]
    dist.all_gather(shapes, mine)
    shapes = [tuple(s[1 : 1 + s[0]]) for s in torch.stack(shapes).tolist()]
    if len(set(shapes)) > 1:
        raise ValueError(
            f"gather: every rank must hold the same shape, got {shapes} for ranks 0 to {W - 1}; "
            "use drop_last and a global batch that the number of ranks divides"
        )
    out = [torch.empty_like(x) for _ in range(W)]
    dist.all_gather(out, x)
    return torch.cat(out)  # [W*B, ...]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return _all_gather(x)

    @staticmethod
    def backward(ctx, grad):
        # Each rank holds a copy of the full-batch loss L, and each copy depends on the rows of all
        # ranks. The sum over copies gives W * dL/dx on the rank that owns x, and DDP's mean over
        # ranks takes the W away again: the result is exactly the gradient of one process.
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad)
        B = grad.shape[0] // _world()
        return grad[dist.get_rank() * B : (dist.get_rank() + 1) * B]


def gather(x):
    """[B, ...] -> [W*B, ...] in rank order; backward sums the gradient over ranks."""
    return x if _world() == 1 else _Gather.apply(x)


def gather_ids(ids):
    """The same for integer ids [B] -> [W*B], without gradient."""
    return ids if _world() == 1 else _all_gather(ids)


# -----------------------------------------------------------------------------
# shared by all methods


def fp32(x):
    # context: no autocast on the device of x, so that matmuls in here stay fp32
    return torch.autocast(x.device.type, enabled=False)


def same_video(ids):
    """Mask of the pairs that share a video. [B] ints -> [B, B] bool, True = no negative."""
    return ids[:, None] == ids[None, :]


def _check_square(name, S):
    if S.dim() < 2 or S.shape[-1] != S.shape[-2]:
        raise ValueError(f"{name}: wants scores of B texts x B videos, got {tuple(S.shape)}")
    if S.shape[-1] < 2:
        raise ValueError(f"{name}: a batch of 1 pair has no negative; use a global batch >= 2")


def _off_diagonal(mask):
    # nothing on the diagonal may be masked: those are the positives
    return mask & ~torch.eye(mask.shape[0], dtype=torch.bool, device=mask.device)


# -----------------------------------------------------------------------------
# MARS; PHA-Net's Eq. 2 is info_nce too


def info_nce(S, gamma, mask=None):
    """Symmetric contrastive loss of S [B, B], the pairs on the diagonal. gamma: float or 0-D."""
    _check_square("info_nce", S)
    logits = gamma * S.float()  # [B, B]
    if mask is not None:
        logits = logits.masked_fill(_off_diagonal(mask), float("-inf"))
    target = torch.arange(S.shape[0], device=S.device)
    nce_t = F.cross_entropy(logits, target)  # Eq. 9, a = t: each text against all videos
    nce_v = F.cross_entropy(logits.T, target)  # Eq. 9, a = v: each video against all texts
    return (nce_t + nce_v) / 2  # Eq. 10


def diversity(*sides):
    """Mean squared cosine between different slots of one item; each side z [B, M, D], unit rows."""
    losses = []
    for z in sides:
        B, M, _ = z.shape
        if M == 1:  # one slot has no other to differ from; the formula would be 0/0
            return z.new_zeros((), dtype=torch.float32)
        with fp32(z):
            G = z.float() @ z.float().transpose(1, 2)  # [B, M, M]
            same = torch.eye(M, dtype=torch.bool, device=z.device)
            losses.append(G.square().masked_fill(same, 0.0).sum() / (B * M * (M - 1)))  # Eq. 11
    return sum(losses) / len(losses)  # Eq. 12: the mean of the text side and the video side


def hard_negative(S_m, delta=0.04, S=None, mask=None):
    """
    Hard-negative-aware slot specialization. S_m [M, B, B]: raw slot-wise cosines, S [B, B]: the
    aggregated score that picks the negatives (default: the mean over slots, Eq. 3).

    A query sends gradient into one slot only, the one that already separates its hard negative
    best, so different negatives may train different slots.
    """
    _check_square("hard_negative", S_m)
    B = S_m.shape[-1]
    S_m = S_m.float()
    S = S_m.mean(0) if S is None else S
    S = S.detach().float()  # only an index is taken from it
    barred = torch.eye(B, dtype=torch.bool, device=S.device)  # j != i
    barred = barred if mask is None else barred | mask
    sides = []
    # side a = t queries along rows, side a = v along columns
    for S_am, S_a, out in ((S_m, S, barred), (S_m.mT, S.T, barred.T)):
        j = S_a.masked_fill(out, float("-inf")).argmax(dim=1)  # [B], Eq. 4
        pos = S_am.diagonal(dim1=1, dim2=2)  # [M, B]
        neg = S_am[:, torch.arange(B, device=S.device), j]  # [M, B]
        gap = (pos - neg).max(dim=0).values  # [B], Eq. 5-6: gap of the most discriminative slot
        hinge = F.relu(delta - gap)
        hinge = hinge.masked_fill(out.all(dim=1), 0.0)  # no negative left for this query
        sides.append(hinge.mean())  # Eq. 7
    return (sides[0] + sides[1]) / 2  # Eq. 8


# -----------------------------------------------------------------------------
# PHA-Net: "Eq. n" below means that paper's, Sec. 3.3 and 3.4


def prototype_contrast(S_P, scale):
    """S_P [P, P]: text prototype i, video prototype j; scale = 1 / sigma. Eq. 8 has rows only."""
    target = torch.arange(len(S_P), device=S_P.device)
    return F.cross_entropy(scale * S_P.float(), target)


def self_distillation(S, direction="paper", reduction="batchmean", detach=False, temperature=1.0):
    """
    The levels' score distributions pulled together: every pair of them, both ways of searching.

    S            {level: [B, B]}, from the lowest level to the highest; one level alone gives 0
    direction    paper: KL(upper || lower), Eq. 12 | hbi: KL(lower || upper), as HBI's code
    reduction    batchmean: mean over B queries (Eq. 12's E) | mean: HBI's, over B^2 entries
    detach       the first argument of KL is a constant
    temperature  of the softmax over raw cosines. Eq. 10 has none: flat rows, little gradient
    """
    S = {level: s.float() / temperature for level, s in S.items()}
    levels = list(S)
    total = next(iter(S.values())).new_zeros(())
    for i, lower in enumerate(levels):
        for upper in levels[i + 1:]:  # I2L, I2G, L2G: Eq. 13
            first, second = (upper, lower) if direction == "paper" else (lower, upper)
            for dim in (1, 0):  # D_{t,v}: each text over the videos, Eq. 10. D_{v,t}: Eq. 11
                p, q = S[first].log_softmax(dim), S[second].log_softmax(dim)
                p = p.detach() if detach else p
                total = total + (p.exp() * (p - q)).sum()  # KL(p || q), Eq. 12
    B = next(iter(S.values())).shape[0]
    return total / (B if reduction == "batchmean" else B * B)
