"""
PHA-Net (Prototype-based Hierarchical Alignment Network) on CLIP, all of it in this file.

Paper: PHA-Net, Sec. 3 ("Eq. n"); its losses are in losses.py. It builds on HBI (CVPR 2023).

    caption -> words  [B, N_w, D]   CLIP's text tower at every position, projected
    clip    -> frames [B, N_f, D]   CLIP's CLS feature of each frame, projected
    + N_I^p shared prototypes, shared block -> individual level I: N + N_I^p tokens   (Eq. 4)
    merge to 6 + N_L^p prototypes, block    -> local level L: phrases, clips          (Eq. 5-7)
    merge to 1                              -> global level G: sentence, video
    S = S^I + alpha S^L + beta S^G: token-wise interaction (Eq. 3) at I and L, cosine at G

Eq. 7 taken literally gives an item's six phrases one and the same vector: its six queries are one
mean prototype, repeated. `merge_residual` says what keeps them apart ("none" is the literal form).
Shapes: B items, N tokens, P prototypes, M clusters, D width. "Choice:" marks what is not stated.
"""
import copy
import math
import warnings
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers.models.clip.modeling_clip import CLIPEncoderLayer

from losses import fp32, info_nce, prototype_contrast, same_video, self_distillation

MAX_SCALE = 100.0  # a learned 1 / sigma stops here, as CLIP's does
LEVELS = {"individual": "I", "individual+local": "IL", "individual+global": "IG", "all": "ILG",
          "mean": "G"}
BLOCK = 64  # texts x videos whose token products are in memory at once, see `similarity`


@dataclass
class PHAConfig:
    backbone: str = ""  # folder or hub id of a CLIP
    num_frames: int = 12  # N_f (Sec. 4.1)
    max_words: int = 32  # N_w with start and end (Sec. 4.1); a longer caption is cut, its end stays
    # Table 3, and "mean": no head at all, CLIP's EOT vector against the mean frame (CLIP4Clip)
    levels: str = "all"
    alpha: float = 0.5  # weight of the local level, in training and in the score (Eq. 9)
    beta: float = 0.1  # the same of the global level
    lambda_dl: float = 0.2  # lambda, weight of the self-distillation (Eq. 14)
    mu_pcl: float = 0.2  # mu, weight of the prototype contrast (Eq. 14)
    sigma: float = 0.01  # temperature (Eq. 2, 8)
    # HBI learns CLIP's logit_scale = 1 / sigma, but with a rate of 1e-7 it hardly moves
    learn_sigma: bool = False
    individual_prototypes: int = 3  # N_I^p (Table 8)
    local_prototypes: int = 1  # N_L^p (Table 8)
    share_individual_prototypes: bool = True  # text and video have the same ones (Table 4)
    share_local_prototypes: bool = True
    share_individual_block: bool = True  # the same for the transformer blocks (Table 4)
    share_local_block: bool = True
    individual_block: bool = True  # False: without that transformer block (Table 6)
    local_block: bool = True
    block_layers: int = 4  # (Sec. 4.1)
    block_init: str = "clip"  # clip: CLIP's first text layers, as HBI | random (unstated)
    # Choice: "position embeddings are omitted for brevity" (Sec. 3.2) is said of the first block;
    # the second is "similar", and with cluster_order=time its phrases have an order
    local_positions: bool = True
    # The demo's CLIP has positions 60 times smaller than its features: order is hardly seen.
    # Above 0 they start as N(0, position_std) instead; 1 is about the features' size
    position_std: float = 0.0
    cluster_order: str = "time"  # of merged tokens: time (of the centers) | score (HBI)
    num_phrases: int = 6  # N_p (Table 10)
    num_clips: int = 6  # N_c
    cluster: str = "dpc-knn"  # dpc-knn | kmeans | dbscan | gaussian (Table 9)
    knn: int = 3  # K of DPC-KNN (Table 11)
    merge_conv: bool = True  # the 1D convolution (Table 7)
    attention_local: str = "prototype"  # merging to phrases: prototype (PCA) | center (CCA) | none
    attention_global: str = "prototype"  # merging to one token: the same (Table 7)
    # what is added to that attention's output: merged | query (HBI's block, taken over) | none
    merge_residual: str = "merged"
    # Eq. 3's maximum ranges over all N_w words; a padded one counts as similarity zero (HBI) or
    # not at all (ignore)
    padding: str = "zero"
    kl_direction: str = "paper"  # KL(upper || lower) as in Eq. 12 | hbi: KL(lower || upper)
    kl_reduction: str = "batchmean"  # E over samples (Eq. 12) | mean: HBI's, B times smaller
    kl_detach: bool = False  # the first argument of KL is a constant target (unstated)
    kl_temperature: float = 1.0  # Eq. 10-11 have none, which leaves KL nearly inert: see the log
    mask_same_video: bool = False  # a video's other captions are no negatives (unstated)
    clip_lr_scale: float = 1e-3  # CLIP's rate is so much of the others': 1e-7 to 1e-4 (Sec. 4.1)
    freeze_patches: bool = True  # CLIP's first convolution (HBI, CLIP4Clip)
    gradient_checkpointing: bool = False  # recompute CLIP's layers in backward

    def __post_init__(self):
        attention = ("prototype", "center", "none")
        choices = dict(levels=tuple(LEVELS), block_init=("clip", "random"),
                       cluster_order=("time", "score"), cluster=tuple(CLUSTERINGS),
                       attention_local=attention, attention_global=attention,
                       merge_residual=("merged", "query", "none"), padding=("zero", "ignore"),
                       kl_direction=("paper", "hbi"), kl_reduction=("batchmean", "mean"))
        for key, allowed in choices.items():
            if getattr(self, key) not in allowed:
                raise ValueError(f"{key} must be one of {', '.join(allowed)}; "
                                 f"got {getattr(self, key)!r}")
        least = dict(num_frames=1, max_words=3, alpha=0, beta=0, lambda_dl=0, mu_pcl=0,
                     individual_prototypes=0, local_prototypes=0, block_layers=1, num_phrases=1,
                     num_clips=1, knn=1, clip_lr_scale=0, position_std=0)
        for key, low in least.items():
            if not low <= getattr(self, key) < math.inf:
                raise ValueError(f"{key} must be at least {low}; got {getattr(self, key)}")
        for key in ("sigma", "kl_temperature"):
            if not 0 < getattr(self, key) < math.inf:
                raise ValueError(f"{key} must be above 0; got {getattr(self, key)}")
        if self.learn_sigma and self.sigma * MAX_SCALE < 1:
            raise ValueError(f"sigma must be at least {1 / MAX_SCALE} when it is learned; "
                             f"got {self.sigma}")


# --------------------------------------------------------------------------------------------------
# Clustering: which of an item's tokens belong together, without gradient. `merge` below has one

@torch.no_grad()
def dpc_knn(x, mask, M, K=3, order="score"):
    """
    Density peaks (Eq. 5-6): tokens in dense places and far from denser ones become the centers.

    x [B, N, D], mask [B, N] (True: a token) -> assign [B, N] in 0..M-1, -1 at padding, and centers
    [B, M], positions of the clusters' centers, N where an item has fewer than M tokens: then every
    token is a cluster and the surplus clusters stay empty. An item's clusters depend on nothing but
    its own tokens: no noise, and a tie goes to the earlier position (of two centers equally near,
    to the first in `order`).
    """
    B, N, D = x.shape
    with fp32(x):
        x = x.float()
        G = x @ x.mT  # [B, N, N]
    square = G.diagonal(dim1=1, dim2=2)  # [B, N], so that a token is at distance 0 from itself
    total = square[:, :, None] + square[:, None, :]
    d2 = total - (G + G.mT)  # i to j is j to i to the last bit: mutual neighbours may be a tie
    # rounding must not part what is equal
    d2 = d2.masked_fill(d2 < 1e-6 * total, 0.0) / D
    # Choice: Eq. 5-6 have plain squared distances; HBI's code scales them by 1/D, as its exp(-d^2)
    # would be 0 otherwise, and its delta is not squared
    d = d2.sqrt()  # [B, N, N]
    n = mask.sum(1)  # [B]
    d2 = d2.masked_fill(~mask[:, None, :], math.inf)
    k = min(K, N)
    nearest = d2.topk(k, largest=False).values  # [B, N, k], the token itself is the first
    counted = torch.arange(k, device=x.device) < n[:, None]  # [B, k]
    nearest = nearest.masked_fill(~counted[:, None, :], 0.0)
    rho = torch.exp(-nearest.sum(-1) / n.clamp(1, k)[:, None])  # Eq. 5, [B, N]

    at = torch.arange(N, device=x.device)
    denser = rho[:, None, :] > rho[:, :, None]  # [B, i, j]: j is denser than i
    denser |= (rho[:, None, :] == rho[:, :, None]) & (at[None, :] < at[:, None])
    denser &= mask[:, None, :]
    both = mask[:, None, :] & mask[:, :, None]
    farthest = d.masked_fill(~both, 0.0).flatten(1).amax(1, keepdim=True)  # [B, 1], of the sample
    delta = d.masked_fill(~denser, math.inf).amin(-1)  # Eq. 6, [B, N]
    delta = torch.minimum(delta, farthest)  # the densest token has no denser one
    score = (rho * delta).masked_fill(~mask, -1.0)
    centers = score.argsort(dim=1, descending=True, stable=True)[:, :M]  # [B, min(M, N)]
    centers = F.pad(centers, (0, M - centers.shape[1]), value=N)  # [B, M]
    centers = centers.masked_fill(torch.arange(M, device=x.device) >= n[:, None], N)
    if order == "time":
        centers = centers.sort(1).values

    far = F.pad(d, (0, 1), value=math.inf)  # column N: no center there
    to_center = far.gather(2, centers[:, None, :].expand(B, N, M))  # [B, N, M]
    assign = to_center.argmin(-1)  # the first of equals
    # a center is in its own cluster, also where an equal one comes first
    number = torch.arange(M, device=x.device).expand(B, M)
    assign = F.pad(assign, (0, 1)).scatter(1, centers, number)
    return assign[:, :N].masked_fill(~mask, -1), centers


def by_sklearn(fit):
    """fit: one item's tokens [n, D] -> labels [n] (-1: outlier). Called as dpc_knn; no centers."""
    @torch.no_grad()
    def cluster(x, mask, M, K=3, order="score"):
        assign = torch.full(mask.shape, -1)
        for b in range(len(x)):
            inside = mask[b].nonzero().flatten().cpu()  # [n]
            with warnings.catch_warnings():
                # of duplicated tokens (a still clip): fewer clusters come out, and merge() knows
                warnings.simplefilter("ignore")
                labels = torch.as_tensor(fit(x[b, mask[b]].double().cpu().numpy(), M, K))  # [n]
            names = [c for c in labels.unique().tolist() if c >= 0]
            # more clusters than M: the largest stay. Then as dpc_knn: in time, or largest first
            names = sorted(names, key=lambda c: (-int((labels == c).sum()), c))[:M]
            if order == "time":
                names = sorted(names, key=lambda c: int((labels == c).nonzero()[0]))
            for m, c in enumerate(names):
                assign[b, inside[labels == c]] = m
        return assign.to(x.device), None
    return cluster


def _kmeans(x, M, K):
    from sklearn.cluster import KMeans
    return KMeans(min(M, len(x)), n_init=1, random_state=0).fit_predict(x)


def _gaussian(x, M, K):
    from sklearn.mixture import GaussianMixture
    if len(x) <= M:
        return range(len(x))
    return GaussianMixture(M, covariance_type="diag", reg_covar=1e-3, random_state=0).fit_predict(x)


def _dbscan(x, M, K):
    # Choice: the radius is unstated; the median distance to the K-th neighbour adapts to the item
    from sklearn.cluster import DBSCAN
    from sklearn.metrics import pairwise_distances
    import numpy as np
    kth = np.sort(pairwise_distances(x), axis=1)[:, min(K, len(x) - 1)]
    labels = DBSCAN(eps=max(float(np.median(kth)), 1e-6), min_samples=K).fit_predict(x)
    return labels if (labels >= 0).any() else np.zeros_like(labels)  # all outliers: one cluster


CLUSTERINGS = {"dpc-knn": dpc_knn, "kmeans": by_sklearn(_kmeans), "dbscan": by_sklearn(_dbscan),
               "gaussian": by_sklearn(_gaussian)}


def merge(x, score, assign, M):
    """
    Weighted mean of each cluster: x [B, N, D], score [B, N] -> [B, M, D], mask [B, M] (not empty).

    W = softmax(score) over all tokens, normalised in each cluster, is a softmax inside of it. One
    product with W [B, M, N] is as differentiable as index_add and deterministic on a GPU too.
    """
    member = assign[:, None, :] == torch.arange(M, device=x.device)[:, None]  # [B, M, N]
    full = member.any(-1)  # [B, M]
    W = score.float()[:, None, :].masked_fill(~member & full[..., None], -math.inf)  # [B, M, N]
    W = W.masked_fill(~full[..., None], 0.0).softmax(-1) * full[..., None]
    with fp32(x):
        return W @ x.float(), full


# --------------------------------------------------------------------------------------------------
# The head's modules

def weight_mlp(D):
    # a token's weight from its feature, D -> 2D -> 1: in Eq. 3 and for W, Sec. 3.2
    return nn.Sequential(nn.Linear(D, 2 * D), nn.ReLU(), nn.Linear(2 * D, 1))


class Block(nn.Module):
    """Some CLIP-style layers over tokens and prototypes, with positions and a residual (HBI)."""

    def __init__(self, text_model, D, n_layers, init, positions=True, position_std=0.0):
        super().__init__()
        config = copy.deepcopy(text_model.config)
        config.hidden_size = D
        given = text_model.encoder.layers
        self.layers = nn.ModuleList(CLIPEncoderLayer(config) for _ in range(n_layers))
        table = text_model.embeddings.position_embedding.weight  # [77, D_text]
        self.positions = None
        if positions:
            start = (position_std or 0.01) * torch.randn(len(table), D, device=table.device)
            self.positions = nn.Parameter(start)
        if init == "clip":
            if table.shape[1] != D or n_layers > len(given):
                raise ValueError("PHA-Net: block_init 'clip' wants a text tower as wide as the "
                                 f"projection, {D}, and at least {n_layers} layers; this one has "
                                 f"{table.shape[1]} and {len(given)}; use block_init='random'")
            for layer, trained in zip(self.layers, given):
                layer.load_state_dict(trained.state_dict())
            if positions and not position_std:
                self.positions.data.copy_(table.detach())

    def forward(self, x, mask):
        # x [B, N, D], mask [B, N]. One table serves all N slots: prototypes come after the padding
        h = x if self.positions is None else x + self.positions[:x.shape[1]]
        bias = torch.zeros(mask.shape, dtype=h.dtype, device=h.device).masked_fill(~mask, -math.inf)
        bias = bias[:, None, None, :].expand(-1, 1, mask.shape[1], -1)  # [B, 1, N, N], on the keys
        for layer in self.layers:
            h = layer(h, attention_mask=bias)
        return x + h


class CrossAttention(nn.Module):
    """Eq. 7 with heads, pre-normalised; the caller adds the residual."""

    def __init__(self, D, heads):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(D)  # queries and keys go through the same one (HBI)
        self.q, self.kv, self.proj = nn.Linear(D, D), nn.Linear(D, 2 * D), nn.Linear(D, D)

    def forward(self, query, keys, bias):
        # query [B, Q, D], keys [B, N, D], bias [B, N] on the logits, -inf at what is no key
        (B, Q, D), N, H = query.shape, keys.shape[1], self.heads
        q = self.q(self.norm(query)).view(B, Q, H, D // H).transpose(1, 2)  # [B, H, Q, D/H]
        k, v = self.kv(self.norm(keys)).view(B, N, 2, H, D // H).permute(2, 0, 3, 1, 4)
        # Choice: Eq. 7 divides by sqrt(D); with heads it is sqrt(D/H), as in HBI's code
        bias = bias.to(q.dtype)[:, None, None, :].expand(B, 1, Q, N)
        out = F.scaled_dot_product_attention(q, k.to(q.dtype), v.to(q.dtype), attn_mask=bias)
        return self.proj(out.transpose(1, 2).reshape(B, Q, D))


class TokenMerge(nn.Module):
    """
    Fig. 2: N tokens and prototypes -> M tokens. Each modality has its own at each of two stages.

    attention  prototype: the queries are the mean of the module's input prototypes (before the
               convolution), the keys the merged tokens. As all M queries are the same, one stands
               for all. center: queries are the merged tokens, keys all tokens, with their score
               added to the logits (HBI). Without prototypes (Table 8's zeros) prototype is center.
    """

    def __init__(self, D, heads, M, config, attention):
        super().__init__()
        self.config, self.M, self.attention = config, M, attention
        self.conv = nn.Conv1d(D, D, 3, padding=1, bias=False) if config.merge_conv else None
        self.norm = nn.LayerNorm(D)
        self.score = weight_mlp(D)
        self.cross = CrossAttention(D, heads) if attention != "none" else None

    def forward(self, x, mask, P):
        # x [B, N, D] whose last P rows are prototypes, zero where mask [B, N] is False
        y = x if self.conv is None else x + self.conv(x.mT).mT
        y = self.norm(y)  # [B, N, D]
        score = self.score(y).squeeze(-1).float().masked_fill(~mask, -math.inf)  # [B, N]
        cluster = CLUSTERINGS[self.config.cluster]
        if self.M == 1:
            assign = torch.where(mask, 0, -1)  # all there is
        else:
            assign, _ = cluster(y.detach(), mask, self.M, self.config.knn,
                                self.config.cluster_order)
        merged, full = merge(y, score, assign, self.M)  # [B, M, D], [B, M]
        if self.cross is None:
            return merged, full
        if self.attention == "prototype" and P:
            query = x[:, -P:].mean(1, keepdim=True)  # [B, 1, D]; its M repeats would all give out
            out = self.cross(query, merged, torch.zeros_like(full, dtype=torch.float32)
                             .masked_fill(~full, -math.inf))  # [B, 1, D], Eq. 7
        else:
            query = merged
            out = self.cross(query, y, score)  # [B, M, D]
        # Choice: Fig. 2 shows no residual. Without one (or with the query) all phrases are equal,
        # which leaves the local level one phrase to match; HBI's block adds its merged tokens
        residual = {"merged": merged, "query": query, "none": 0.0}[self.config.merge_residual]
        return (out + residual).expand_as(merged) * full[..., None], full


# --------------------------------------------------------------------------------------------------
# Matching

def wti(t, gamma_t, v, gamma_v):
    """
    Weighted token-wise interaction, Eq. 3, of all pairs: unit tokens t [A, n, D] and v [B, m, D],
    their weights gamma_t [A, n] and gamma_v [B, m] -> S [A, B], fp32.
    """
    (A, n, D), (B, m, _) = t.shape, v.shape
    with fp32(t):
        X = t.float().reshape(A * n, D) @ v.float().transpose(0, 1).reshape(m * B, D).T
        X = X.view(A, n, m, B)  # <w, f>; B last, so that both maxima run over long rows
        to_video = (gamma_t.float()[:, :, None] * X.amax(2)).sum(1)  # [A, B]
        to_text = (gamma_v.float().T[None] * X.amax(1)).sum(1)  # [A, B]
        return (to_video + to_text) / 2


def _of_side(parts, side):
    # Table 4: what both modalities share stands under "both", else each has its own
    return parts["both" if "both" in parts else side]


class PHANet(nn.Module):
    backbone_dtype = torch.float32  # CLIP is trained, and bf16 weights would lose steps of 1e-7

    def __init__(self, config, backbone):
        super().__init__()
        if backbone.family != "clip":
            raise ValueError(f"PHA-Net is built on a CLIP; {backbone.path!r} is a "
                             f"{backbone.family!r}")
        self.config, self.backbone = config, backbone
        self.clip = backbone.model.requires_grad_(True)
        self.clip.logit_scale.requires_grad_(config.learn_sigma)
        self.clip.logit_scale.data.fill_(-math.log(config.sigma))
        self.clip.vision_model.embeddings.patch_embedding.requires_grad_(not config.freeze_patches)
        if config.gradient_checkpointing:
            self.clip.gradient_checkpointing_enable({"use_reentrant": False})
        D, text = self.clip.config.projection_dim, self.clip.config.text_config
        # weight of each level, in training (Eq. 9) and in the final score (Sec. 3.4)
        weights = {"I": 1.0, "L": config.alpha, "G": config.beta}
        self.levels = {level: weights[level] for level in LEVELS[config.levels]}
        self.head = nn.ModuleDict()
        if config.levels == "mean":
            self.levels = {"G": 1.0}
            if config.max_words > text.max_position_embeddings:
                raise ValueError(f"max_words is {config.max_words}, this CLIP has positions for "
                                 f"{text.max_position_embeddings}")
        else:
            with torch.device(self.clip.logit_scale.device):
                self._make_head(D, text.num_attention_heads)

    def _make_head(self, D, heads):
        # Table 4 tells the module's parts by what they share; Table 6 and 7 by what is left out
        cfg, text_model = self.config, self.clip.text_model
        longest = text_model.config.max_position_embeddings
        for key, P in (("max_words", cfg.individual_prototypes),
                       ("num_frames", cfg.individual_prototypes),
                       ("num_phrases", cfg.local_prototypes), ("num_clips", cfg.local_prototypes)):
            if getattr(cfg, key) + P > longest:
                raise ValueError(f"{key} {getattr(cfg, key)} and {P} prototypes need more than the "
                                 f"{longest} positions of this CLIP")
        if D % heads:
            raise ValueError(f"PHA-Net: its modules have the projection's width {D}, which the "
                             f"{heads} heads of this CLIP's text tower can't share")

        def each(make, share):
            return {"both": make()} if share else {"text": make(), "video": make()}

        def prototypes(P, share):
            # Choice: "randomly initialised"; unit length on average
            return nn.ParameterDict(each(lambda: nn.Parameter(torch.randn(P, D) / math.sqrt(D)),
                                         share) if P else {})

        def block(wanted, share, positions=True):
            make = lambda: Block(text_model, D, cfg.block_layers, cfg.block_init,  # noqa: E731
                                 positions, cfg.position_std)
            return nn.ModuleDict(each(make, share) if wanted else {})

        def merges(M_text, M_video, attention):
            return nn.ModuleDict({side: TokenMerge(D, heads, M, cfg, attention)
                                  for side, M in (("text", M_text), ("video", M_video))})

        def weights():
            return nn.ModuleDict({"text": weight_mlp(D), "video": weight_mlp(D)})

        head = self.head
        head["prototypes_I"] = prototypes(cfg.individual_prototypes,
                                          cfg.share_individual_prototypes)
        head["block_I"] = block(cfg.individual_block, cfg.share_individual_block)
        head["wti_I"] = weights()
        if "L" in self.levels or "G" in self.levels:
            head["merge_L"] = merges(cfg.num_phrases, cfg.num_clips, cfg.attention_local)
            head["prototypes_L"] = prototypes(cfg.local_prototypes, cfg.share_local_prototypes)
            head["block_L"] = block(cfg.local_block, cfg.share_local_block, cfg.local_positions)
        if "L" in self.levels:
            head["wti_L"] = weights()
        if "G" in self.levels:
            head["merge_G"] = merges(1, 1, cfg.attention_global)

    # ---------------------------------------------------------------- encoding

    def collate(self, samples):
        """Samples -> {"text": inputs, "video": inputs} on the CPU; a side nobody has is absent."""
        batch = {}
        for side, key, make in (("text", "caption", self._text_inputs),
                                ("video", "frames", self._video_inputs)):
            values = [getattr(s, key) for s in samples]
            missing = [s.id for s, v in zip(samples, values) if v is None]
            if len(missing) == len(samples):
                continue
            if missing:
                raise ValueError(f"PHA-Net: {len(missing)} of {len(samples)} samples have no {key},"
                                 f" the first is {missing[0]!r}; a batch has it for all or none")
            try:
                batch[side] = make(values)
            except ValueError:
                for s, v in zip(samples, values):  # whose fault is it?
                    try:
                        make([v])
                    except ValueError as e:
                        raise ValueError(f"{s.id}: {e}") from None
                raise
        return batch

    def _text_inputs(self, captions):
        tok, N = self.backbone.tokenizer, self.config.max_words
        ids = torch.full((len(captions), N), tok.pad_token_id or 0)  # [B, N_w]
        mask = torch.zeros(len(captions), N, dtype=torch.long)
        cut = torch.zeros(len(captions), dtype=torch.bool)
        for i, caption in enumerate(captions):
            # a caption that spells <|endoftext|> is just text
            words = tok(caption.strip(), add_special_tokens=False,
                        split_special_tokens=True, verbose=False).input_ids
            cut[i] = len(words) > N - 2
            row = [tok.bos_token_id, *words[:N - 2], tok.eos_token_id]
            ids[i, :len(row)] = torch.tensor(row)
            mask[i, :len(row)] = 1
        return {"input_ids": ids, "attention_mask": mask, "cut": cut}

    def _video_inputs(self, clips):
        # uint8 on the way from the workers, a quarter of the bytes: normalised on the device
        return {"frames": torch.stack([self.backbone.pixels(frames) for frames in clips])}

    def words(self, inputs):
        """CLIP's projected feature at every position [B, N_w, D], and which are words [B, N_w]."""
        device = self.clip.logit_scale.device
        ids, mask = (inputs[k].to(device) for k in ("input_ids", "attention_mask"))
        h = self.clip.text_model(input_ids=ids, attention_mask=mask).last_hidden_state
        return self.clip.text_projection(h), mask.bool()

    def frames(self, inputs):
        """CLIP's projected feature of each frame [B, N_f, D] from uint8 [B, T, 3, S, S]."""
        x = inputs["frames"].to(self.clip.logit_scale.device)
        mean, std = (torch.tensor(v, device=x.device).view(3, 1, 1)
                     for v in (self.backbone.mean, self.backbone.std))
        B, T = x.shape[:2]
        x = (x.flatten(0, 1).float() / 255 - mean) / std  # [B * T, 3, S, S]
        h = self.clip.vision_model(pixel_values=x).pooler_output
        return self.clip.visual_projection(h).view(B, T, -1)

    def encode_text(self, inputs):
        x, mask = self.words(inputs)
        if self.config.levels == "mean":
            # pooled at the end token's real place, whatever ids the tokenizer gives
            x = x[torch.arange(len(x), device=x.device), mask.sum(1) - 1]  # [B, D]
            return {"G": F.normalize(x.float(), dim=-1)}
        return self.hierarchy("text", x, mask)

    def encode_video(self, inputs):
        x = self.frames(inputs)
        if self.config.levels == "mean":
            # CLIP4Clip's meanP: unit frames, their mean, unit again
            x = F.normalize(x.float(), dim=-1).mean(1)
            return {"G": F.normalize(x, dim=-1)}
        return self.hierarchy("video", x, torch.ones(x.shape[:2], dtype=torch.bool,
                                                     device=x.device))

    def hierarchy(self, side, x, mask):
        """
        Tokens x [B, N, D], mask [B, N] -> Features. For the levels I and L: unit tokens [B, n, D],
        their weights `_gamma` and `_mask` [B, n]; I's prototypes stand last, and "P_logit" [B, P]
        are their weights before the softmax. G: unit [B, D].
        """
        head, cfg = self.head, self.config
        x, mask = self._block("I", side, x, mask, cfg.individual_prototypes)  # Eq. 4
        features, logit = self._level("I", side, x, mask)
        if cfg.individual_prototypes > 1 and cfg.mu_pcl:
            features["P_logit"] = logit[:, -cfg.individual_prototypes:]
        if len(self.levels) == 1:
            return features
        x, mask = head["merge_L"][side](x, mask, cfg.individual_prototypes)  # Eq. 5-7
        x, mask = self._block("L", side, x, mask, cfg.local_prototypes)
        if "L" in self.levels:
            features |= self._level("L", side, x, mask)[0]
        if "G" in self.levels:
            x, _ = head["merge_G"][side](x, mask, cfg.local_prototypes)  # [B, 1, D]
            features["G"] = F.normalize(x[:, 0].float(), dim=-1)
        return features

    def _block(self, level, side, x, mask, P):
        # Eq. 4: concatenate the prototypes, run the block. Padding comes out as zeros, so that the
        # convolution of a merge module sees the same behind a caption's end as behind a clip's
        if P:
            p = _of_side(self.head[f"prototypes_{level}"], side).to(x.dtype)
            x = torch.cat([x, p.expand(len(x), -1, -1)], 1)  # [B, N + P, D]
            mask = F.pad(mask, (0, P), value=True)
        block = self.head[f"block_{level}"]
        if len(block):
            x = _of_side(block, side)(x, mask)
        return x * mask[..., None], mask

    def _level(self, level, side, x, mask):
        logit = self.head[f"wti_{level}"][side](x).squeeze(-1).float()  # [B, n]
        gamma = logit.masked_fill(~mask, -math.inf).softmax(-1)  # gamma_t, gamma_v of Eq. 3
        unit = F.normalize(x.float(), dim=-1)  # padding: zero, of similarity zero to everything
        if self.config.padding == "ignore":  # a token's double changes no maximum, and has weight 0
            first = mask.int().argmax(1)  # [B]
            double = unit[torch.arange(len(unit), device=unit.device), first][:, None]
            unit = torch.where(mask[..., None], unit, double)
        return {level: unit, f"{level}_gamma": gamma, f"{level}_mask": mask.float()}, logit

    def forward(self, batch):
        return self.encode_text(batch["text"]), self.encode_video(batch["video"])

    # ---------------------------------------------------------------- matching

    def level_similarity(self, level, text, video):
        """S^I, S^L or S^G [Nt, Nv], with gradient."""
        t, v = text[level], video[level]
        if level == "G":
            with fp32(t):
                return t.float() @ v.float().T  # Eq. 1
        return wti(t, text[f"{level}_gamma"], v, video[f"{level}_gamma"])

    @torch.no_grad()
    def similarity(self, text, video):
        """
        S = S^I + alpha S^L + beta S^G [Nt, Nv], fp32. In blocks of texts and videos, of which only
        the token products of one are ever in memory; texts of about the same length share a block,
        so that little is spent on padding. No score depends on the blocks.
        """
        if "I" in text:
            order = text["I_mask"].sum(1).argsort(stable=True)  # [Nt]
        else:
            order = torch.arange(len(text["G"]), device=text["G"].device)
        S = torch.empty(len(text["G" if "G" in text else "I"]),
                        len(video["G" if "G" in video else "I"]), device=order.device)
        videos = [{k: v[j:j + BLOCK] for k, v in video.items()}
                  for j in range(0, S.shape[1], BLOCK)]
        for rows in order.split(BLOCK):
            t = self._trim({k: v[rows] for k, v in text.items()})
            S[rows] = torch.cat([sum(w * self.level_similarity(level, t, v)
                                     for level, w in self.levels.items()) for v in videos], 1)
        return S

    def _trim(self, text):
        # Cut the padding that all texts of a block have. A text is N words, then P prototypes; with
        # the prototypes moved to the front, what is cut are the last terms of Eq. 3's sum. Their
        # weight is zero, so no bit of a score changes. One padded place stays for the maximum: with
        # padding="zero" it counts as similarity zero. N = 32, P = 3, longest text 11: 3 + 11 + 1
        if "I" not in text:
            return text
        P = self.config.individual_prototypes
        N = text["I"].shape[1] - P
        longest = int(text["I_mask"].sum(1).max()) - P  # words
        n = min(N, longest + 1)
        keep = [*range(N, N + P), *range(n)]
        return text | {k: text[k][:, keep] for k in ("I", "I_gamma", "I_mask")}

    def scale(self):
        """1 / sigma of Eq. 2 and 8: a float, or a 0-D tensor when it is learned."""
        return self.clip.logit_scale.exp() if self.config.learn_sigma else 1 / self.config.sigma

    def loss(self, text, video, ids=None):
        """Eq. 14 over the global batch. ids [B]: the videos' integer ids, for mask_same_video."""
        cfg = self.config
        if cfg.learn_sigma:
            with torch.no_grad():
                self.clip.logit_scale.clamp_(max=math.log(MAX_SCALE))
        mask = None
        if cfg.mask_same_video:
            if ids is None:
                raise ValueError("PHA-Net: mask_same_video needs the videos' ids in loss()")
            mask = same_video(torch.as_tensor(ids, device=self.clip.logit_scale.device))
        scale = self.scale()
        S = {level: self.level_similarity(level, text, video) for level in self.levels}
        nce = {level: info_nce(s, scale, mask) for level, s in S.items()}  # Eq. 2
        hcl = sum(w * nce[level] for level, w in self.levels.items())  # Eq. 9
        dl = self_distillation(S, cfg.kl_direction, cfg.kl_reduction, cfg.kl_detach,
                               cfg.kl_temperature)  # Eq. 10-13
        pcl = hcl.new_zeros(())
        if "P_logit" in text:
            pcl = prototype_contrast(self.prototype_similarity(text, video), scale)  # Eq. 8
        loss = hcl + cfg.lambda_dl * dl + cfg.mu_pcl * pcl  # Eq. 14
        logs = {f"nce_{level}": value for level, value in nce.items()}
        if len(S) > 1:
            logs["dl"] = dl
            logs |= self._pull(S, hcl, cfg.lambda_dl * dl)
        if "P_logit" in text:
            logs["pcl"] = pcl
        return loss, {k: v.detach() for k, v in logs.items()}

    @staticmethod
    def _pull(S, hcl, dl):
        # how hard each term pulls at the scores: the norm of its gradient. Without a temperature
        # the distillation is nearly inert, and these two numbers say so
        if not dl.requires_grad:
            return {}
        norm = lambda x: torch.cat([g.flatten() for g in torch.autograd.grad(  # noqa: E731
            x, list(S.values()), retain_graph=True, allow_unused=True) if g is not None]).norm()
        return {"grad_hcl": norm(hcl), "grad_dl": norm(dl)}

    def prototype_similarity(self, text, video):
        """
        S^P [P, P] (before Eq. 8): Eq. 3 along the batch, prototype i's outputs for B texts against
        prototype j's for B videos. Choice: weights from the individual level's MLPs.
        """
        P = self.config.individual_prototypes
        sides = []
        for f in (text, video):
            # unit [P, B, D] and weights that sum to 1 over the batch [P, B]
            sides += [f["I"][:, -P:].transpose(0, 1), f["P_logit"].T.float().softmax(-1)]
        return wti(*sides)

    # ---------------------------------------------------------------- what is trained

    def trainable_groups(self):
        """{"CLIP" | "prototypes" | "block" | ...: {name: parameter}}, each trained one once."""
        groups = {}
        for name, p in self.named_parameters():
            if p.requires_grad:
                key = "CLIP" if name.startswith("clip.") else name.split(".")[1].split("_")[0]
                groups.setdefault(key, {})[name] = p
        return groups

    def no_decay(self, name):
        """True for parameters without weight decay: prototypes, positions, and all 1-D ones."""
        return "prototypes" in name or "positions" in name or self.get_parameter(name).dim() < 2

    def lr_scale(self, name):
        """What a parameter's rate is of learning_rate."""
        return self.config.clip_lr_scale if name.startswith("clip.") else 1.0

    def summary(self):
        """A table of what is trained, as text."""
        frozen = sum(p.numel() for p in self.parameters() if not p.requires_grad)
        lines = [f"trained {key:10s} {sum(p.numel() for p in group.values()):14,d}"
                 for key, group in self.trainable_groups().items()]
        return "\n".join([*lines, f"frozen             {frozen:14,d}"])


def thop_parameters(model):
    """
    What Table 4 calls #Param: the paper's counter (thop) adds up the weights of nn.Linear, nn.Conv
    and nn.LayerNorm modules and sees nothing else. In the authors' CLIP an attention is one
    nn.MultiheadAttention, a projection is a bare matrix and a LayerNorm is a subclass, so none of
    those count, nor do embeddings, positions and prototypes. A shared block counts once, and
    CLIP's frozen convolution counts too.
    """
    total = 0
    for name, module in model.named_modules():
        ours = not name.startswith("clip.") and "block_" not in name  # no CLIP-style layers
        if ours or ".mlp." in name or name.endswith("patch_embedding"):
            if type(module) in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.LayerNorm):
                total += sum(p.numel() for p in module.parameters())
    return total
