"""
SLQ (Shared Latent Queries) on a frozen decoder MLLM, and what the paper compares it with.

N learned queries stand behind a caption or an image; causal attention lets them see all of it, and
the mean of their last hidden states is the embedding. Paper: SLQ, Sec. 4 ("Eq. n").

    samples -> collate   [content; instruction; N placeholders] -> input_ids [B, L], append_pos
    content -> cache     no gradient: it never sees a query      -> N layers of K, V [B, Hkv, n, d]
    queries -> states    with gradient, on top of the cache      -> h [B, N, D]
    h       -> pool      mean over N, L2 norm (Eq. 5-6)          -> {"z": [B, D]}
    z of Nt texts and Nv images or videos -> similarity          -> S [Nt, Nv]

An image is a video of one frame. Where the paper is silent, a comment says "Choice:".
Shapes: B items, L tokens, n of them content, N queries, D hidden width, Hkv heads of width d.
"""
import math
import re
import warnings
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import Cache, DynamicLayer

from losses import fp32, info_nce, same_video

MIN_TAU, MAX_TAU = 0.01, 1.0  # where the learned temperature stops; 1 / 0.01 is CLIP's limit too
HEADS = ("linear", "block")  # extractions with a trained head on the last token


# The rows of Table 5 and their settings. Tuning: tuning=prompt | adapter | lora | full, all with
# extraction=last. Extraction, on the frozen backbone: extraction=linear | block |
# share_queries=False. Pooling: pooling=last | max. Fig. 7: num_queries. Fig. 2, without training:
# extraction=last | num_queries=1 query_init=zeros.
@dataclass
class SLQConfig:
    backbone: str = ""  # folder or hub id of the MLLM
    max_pixels: int = 0  # most pixels per frame, 0 = the backbone's own limit
    num_frames: int = 1  # frames per video; the paper has images
    # Choice: Eq. 1-2 have an instruction, its words are not in the paper; the authors' code trains
    # without one and uses these in its zero-shot pilot
    video_prompt: str = "<video> Summary above image in one word:"  # user's turn for a video
    text_prompt: str = "{caption} Summary above sentence in one word:"  # user's turn for a text
    max_text_tokens: int = 128  # a longer caption is cut, its prompt is not (authors' code: 128)
    tuning: str = "slq"  # slq: frozen backbone | prompt | adapter | lora | full (Table 3, Table 5)
    extraction: str = "queries"  # queries | last: last token | linear, block: head on it (Table 5)
    # Table 3's parameter column is no N * D + 1: 20 * 896 + 1 = 17,921 against 36k, and about twice
    # N * D for the other backbones too
    num_queries: int = 20  # N (Sec. 5), with tuning=prompt the learned tokens in front
    query_init: str = "normal"  # normal: N(0, 1 / sqrt(D)), the authors' code | zeros (Fig. 2)
    share_queries: bool = True  # the same queries for texts and videos (Table 5)
    pooling: str = "mean"  # over the N queries: mean (Eq. 5-6) | last | max (Table 5)
    tau: float = 0.07  # where the learned temperature starts (Eq. 7-8; value: authors' code)
    mask_same_video: bool = False  # an image's other captions are no negatives (unstated)
    lora_r: int = 8  # tuning=lora: rank on every linear of the LLM (App. A)
    lora_alpha: int = 16  # LoRA scale is alpha / r (App. A)
    lora_dropout: float = 0.05  # (App. A)
    adapter_dim: int = 64  # tuning=adapter: width of the bottleneck (unstated)
    prefix_cache: bool = True  # the exact shortcut of SLQ._cached; False: one pass over everything
    content_chunk: int = 32  # items per frozen pass, sorted by length; 0 = the whole batch
    # recompute in backward: with prefix_cache the pass of a chunk's queries, else decoder layers
    gradient_checkpointing: bool = True

    def __post_init__(self):
        choices = dict(tuning=("slq", "prompt", "adapter", "lora", "full"),
                       extraction=("queries", "last", *HEADS), query_init=("normal", "zeros"),
                       pooling=("mean", "last", "max"))
        for key, allowed in choices.items():
            if getattr(self, key) not in allowed:
                raise ValueError(f"{key} must be one of {', '.join(allowed)}; "
                                 f"got {getattr(self, key)!r}")
        if self.tuning != "slq" and self.extraction != "last":
            raise ValueError(f"tuning={self.tuning} is compared on the last token: set "
                             f"extraction=last; got extraction={self.extraction}")
        if not self.share_queries and self.extraction != "queries":
            raise ValueError("share_queries=False needs extraction=queries; got "
                             f"extraction={self.extraction}")
        if self.pooling != "mean" and self.extraction != "queries":
            raise ValueError(f"pooling={self.pooling} needs extraction=queries: one token is not "
                             f"pooled; got extraction={self.extraction}")
        least = dict(max_pixels=0, num_frames=1, max_text_tokens=1, num_queries=1, lora_r=1,
                     lora_alpha=1, lora_dropout=0, adapter_dim=1, content_chunk=0)
        for key, low in least.items():
            if not low <= getattr(self, key) < math.inf:
                raise ValueError(f"{key} must be at least {low}; got {getattr(self, key)}")
        if not self.lora_dropout < 1:
            raise ValueError(f"lora_dropout must be below 1; got {self.lora_dropout}")
        if not MIN_TAU <= self.tau <= MAX_TAU:
            raise ValueError(f"tau must be between {MIN_TAU} and {MAX_TAU}; got {self.tau}")
        for key, need, other in (("video_prompt", "<video>", "{caption}"),
                                 ("text_prompt", "{caption}", "<video>")):
            prompt = getattr(self, key).replace("\\n", "\n")  # a shell passes \n as two letters
            setattr(self, key, prompt)
            if prompt.count(need) != 1 or other in prompt:
                raise ValueError(f"{key} must hold {need} once and no {other}; got {prompt!r}")


def per_token(key, x, mask):
    """Is this input [B, L], or positions [3, B, L], as mask [B, L] is? Else it is the videos'."""
    return x.shape[-2:] == mask.shape and not key.startswith(("pixel_values", "features"))


class Filled(Exception):
    """Raised when the cache is complete: what a last layer would still compute, nobody reads."""


class LastLayer(DynamicLayer):
    def update(self, *args, **kwargs):
        super().update(*args, **kwargs)
        raise Filled


class ReadOnlyLayer(DynamicLayer):
    def update(self, keys, values, *args, **kwargs):
        # content and queries for this pass only: a repeated pass finds the cache as it was
        return torch.cat([self.keys, keys], dim=-2), torch.cat([self.values, values], dim=-2)


def cache_of(kv, layer=DynamicLayer, last=None):
    """A cache of the given kind of layers that starts from kv: N x (K, V), each [B, Hkv, n, d]."""
    layers = [layer() for _ in kv[:-1]] + [(last or layer)()]
    for one, (k, v) in zip(layers, kv):
        if k is not None:
            one.lazy_initialization(k, v)
            one.keys, one.values = k, v
    return Cache(layers=layers)


class Adapter(nn.Module):
    """Bottleneck with a residual, the identity at the start."""

    def __init__(self, D, width):
        super().__init__()
        self.down, self.up = nn.Linear(D, width), nn.Linear(width, D)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, x):
        return x + self.up(F.gelu(self.down(x))).to(x.dtype)


class Block(nn.Module):
    """
    A pre-norm transformer block on one token, the identity at the start. Attention over a single
    key weighs it with 1 whatever query and key are, so there are none: value and output are left.
    """

    def __init__(self, D):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(D), nn.RMSNorm(D)
        self.value, self.out = nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)
        for zero in (self.out.weight, self.down.weight, self.down.bias):
            nn.init.zeros_(zero)

    def forward(self, x):  # [B, D]
        x = x + self.out(self.value(self.norm1(x)))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class SLQ(nn.Module):
    def __init__(self, config, backbone):
        super().__init__()
        if backbone.family == "clip":
            raise ValueError(f"SLQ is built on a multimodal LLM; {backbone.path!r} is a CLIP")
        for prompt in (config.text_prompt, config.video_prompt):
            backbone.check_prompt(prompt)  # better now than in a loader, when the run has begun
        self.config, self.backbone = config, backbone
        N, D, device = config.num_queries, backbone.hidden_size, backbone.embed.weight.device
        backbone.model.requires_grad_(False)
        self.frozen = config.tuning == "slq"
        self.n_append = N if config.extraction == "queries" else 0
        self.cached = self.n_append > 0 and config.prefix_cache
        self.layerwise = config.gradient_checkpointing and not self.cached
        self.mllm = self._add_lora() if config.tuning == "lora" else backbone.model
        if self.layerwise:
            backbone.model.activation_checkpointing_enable({"use_reentrant": False})
            # transformers makes all embeddings require grad here, which reentrant checkpointing
            # needs. Ours does not, and the frozen vision tower would keep its activations.
            backbone.model.disable_input_require_grads()
        # What is trained is fp32 whatever the backbone's dtype: bf16 loses small steps
        if config.tuning == "full":  # the LLM with its embedding; vision tower, projector: frozen
            for part in (*backbone.layers, backbone.norm, backbone.embed):
                part.float().requires_grad_(True)
        self.adapters = self._add_adapters(D, device) if config.tuning == "adapter" else None
        self.queries = None  # Q [N, D], [2, N, D] for texts and videos; or the prompt's tokens
        if self.n_append or config.tuning == "prompt":
            sides = () if config.share_queries else (2,)
            # the authors' 1 / sqrt(D) is a standard deviation
            scale = D ** -0.5 if config.query_init == "normal" else 0.0
            self.queries = nn.Parameter((scale * torch.randn(*sides, N, D)).to(device))
        # Choice: heads start as the identity, so that they begin where the bare last token is
        self.head = None
        if config.extraction == "linear":
            self.head = nn.Linear(D, D, device=device)
            nn.init.eye_(self.head.weight)
            nn.init.zeros_(self.head.bias)
        elif config.extraction == "block":
            self.head = Block(D).to(device)
        # Choice: the logarithm is trained, so that a step changes tau by a share of itself
        self.log_tau = nn.Parameter(torch.tensor(math.log(config.tau), device=device))
        self.train()

    def _add_lora(self):
        # every linear of the LLM and nothing else: names like q_proj may occur in the vision tower
        # too, so the expression is anchored on the list of decoder layers
        cfg, model, layers = self.config, self.backbone.model, self.backbone.layers
        if any("lora_" in name for name, _ in model.named_parameters()):
            raise ValueError("SLQ: this backbone already carries LoRA; load one for each model")
        at = next(name for name, module in model.named_modules() if module is layers)
        linears = sorted({name.partition(".")[2] for name, module in layers.named_modules()
                          if isinstance(module, nn.Linear)})
        targets = rf"{re.escape(at)}\.\d+\.({'|'.join(map(re.escape, linears))})"
        lora = LoraConfig(r=cfg.lora_r, lora_alpha=cfg.lora_alpha, lora_dropout=cfg.lora_dropout,
                          target_modules=targets, bias="none")
        with warnings.catch_warnings():  # peft asks transformers for a property by its old name
            warnings.simplefilter("ignore", FutureWarning)
            return get_peft_model(model, lora)

    def _add_adapters(self, D, device):
        # Choice: two per layer, on what attention and MLP add to the residual stream
        adapters = nn.ModuleList()
        for layer in self.backbone.layers:
            for part in (layer.self_attn.o_proj, layer.mlp):
                adapter = Adapter(D, self.config.adapter_dim).to(device)
                part.register_forward_hook(lambda module, args, x, adapter=adapter: adapter(x))
                adapters.append(adapter)
        return adapters

    def train(self, mode=True):
        """The backbone stays in eval mode; only LoRA's dropout and checkpointing follow `mode`."""
        super().train(False)
        self.training = mode
        for name, module in self.mllm.named_modules():
            if "lora_dropout" in name:
                module.training = mode
        # transformers checkpoints a layer only while its own flag says training, see model_mars.py
        for layer in self.backbone.layers:
            layer.training = mode and self.layerwise
        return self

    # ---------------------------------------------------------------- inputs

    def collate(self, samples):
        """Samples -> {"text": inputs, "video": inputs} on the CPU; a side nobody has is absent."""
        sides = {"text": ("caption", self.config.text_prompt),
                 "video": ("frames", self.config.video_prompt)}
        return {side: self.collate_prompt(samples, prompt) for side, (key, prompt) in sides.items()
                if any(getattr(s, key) is not None for s in samples)}

    def collate_prompt(self, samples, prompt):
        """Inputs of samples that share a prompt; what it names of <video> and {caption} is used."""
        return self.backbone.collate_samples(samples, prompt, n_append=self.n_append,
                                             max_text_tokens=self.config.max_text_tokens)

    def _content(self, inputs):
        """
        The content alone, whatever the side of padding: it starts at column 0, ends where the
        longest of these items ends. Positions travel with their tokens, so nothing else changes.
        """
        mask = inputs["attention_mask"]  # [B, L]
        n = mask.sum(1) - self.n_append  # [B]
        at = torch.arange(int(n.max()), device=mask.device)  # [n]
        columns = (mask.argmax(1)[:, None] + at).clamp(max=mask.shape[1] - 1)  # [B, n]
        moved = {"attention_mask": (at < n[:, None]).long()}  # [B, n]
        for key, x in inputs.items():
            if key not in ("attention_mask", "append_pos", "cut"):
                if per_token(key, x, mask):
                    x = x.gather(-1, columns.expand(*x.shape[:-1], -1))
                moved[key] = x
        return moved

    def _n_shared(self, inputs):
        """How many tokens are the same at the start of all contents: the template's head."""
        ids, n = inputs["input_ids"], inputs["attention_mask"].sum(1)
        if len(ids) == 1:
            return 0
        vision = self.backbone.tokenizer.convert_tokens_to_ids(self.backbone.vision_token)
        same = ((ids == ids[0]) & (ids != vision)).all(0)  # [n]
        return min(int(same.cumprod(0).sum()), int(n.min()) - 1)  # each item keeps a token

    def _chunks(self, inputs):
        """Yields (rows, their inputs): items of like length, so that padding costs little."""
        length = inputs["attention_mask"].sum(1)  # [B]
        size = self.config.content_chunk or len(length)
        if len(length) <= size:
            yield slice(None), inputs
            return
        for rows in length.argsort().split(size):
            yield rows, self.backbone.select(inputs, rows)

    # ---------------------------------------------------------------- encoding

    def encode_text(self, inputs, normalize=True):
        return self._encode(inputs, "text", normalize)

    def encode_video(self, inputs, normalize=True):
        return self._encode(inputs, "video", normalize)

    def forward(self, batch):
        if self.training and self.frozen and self.config.extraction == "last":
            raise ValueError("SLQ: extraction=last on a frozen backbone is the zero-shot pilot, no "
                             "embedding in it can be trained; use epochs=0 or another tuning")
        return self.encode_text(batch["text"]), self.encode_video(batch["video"])

    def _encode(self, inputs, side, normalize=True):
        inputs = {k: v.to(self.log_tau.device, non_blocking=True) for k, v in inputs.items()}
        Q = self.queries
        if Q is not None and Q.dim() == 3:
            Q = Q[0 if side == "text" else 1]  # [N, D]
        if self.cached:
            h = self._cached(inputs, Q)
        elif self.frozen and not self.n_append:
            h = self._last_tokens(inputs)
        else:
            h = self._plain(inputs, Q)
        return {"z": self.pool(h, normalize)}

    def pool(self, h, normalize=True):
        """[B, N or 1, D] -> unit embeddings [B, D], fp32 also under autocast."""
        with fp32(h):
            h = h.float()
            h = {"mean": h.mean(1), "last": h[:, -1], "max": h.amax(1)}[self.config.pooling]
            if self.head is not None:
                h = self.head(h)
            return F.normalize(h, dim=-1) if normalize else h  # Eq. 5-6

    def _plain(self, inputs, Q):
        """The textbook pass: everything with gradient. h at the queries, or at the last token."""
        mask = inputs["attention_mask"]  # [B, L]
        rows = torch.arange(len(mask), device=mask.device)[:, None]  # [B, 1]
        read = (mask * torch.arange(mask.shape[1], device=mask.device)).argmax(1)[:, None]  # [B, 1]
        put = nullcontext()
        if self.n_append:
            read = inputs["append_pos"]  # [B, N], Eq. 4: where the queries stand
            put = self._put(Q, rows, read)
        elif self.config.tuning == "prompt":
            # behind causal attention the learned tokens can't see the content, it sees them
            N = len(Q)
            inputs, read = self._in_front(inputs, N), read + N
            put = self._put(Q, rows, torch.arange(N, device=mask.device)[None])
        with put:
            return self.backbone.run(inputs)[rows, read]  # after the final norm, [B, N or 1, D]

    @contextmanager
    def _put(self, vectors, rows, pos):
        # vectors [N, D] in place of what the embedding gives at pos [B or 1, N]
        def put(module, args, x):  # [B, L, D]
            return x.index_put((rows, pos), vectors.to(x.dtype).expand(len(rows), -1, -1))

        handle = self.backbone.embed.register_forward_hook(put)
        try:
            yield
        finally:
            handle.remove()

    def _in_front(self, inputs, N):
        # N more columns at the left end: positions 0..N-1, the content's go up by N. A row padded
        # on the left has its padding between the two, which is masked
        new = {k: v for k, v in inputs.items() if k != "append_pos"}
        for key, x in inputs.items():
            if per_token(key, x, inputs["attention_mask"]):
                if key == "position_ids":
                    front = torch.arange(N, device=x.device).expand(*x.shape[:-1], N)
                    new[key] = torch.cat([front, x + N], -1)
                else:
                    value = {"attention_mask": 1, "input_ids": self.backbone.tokenizer.eos_token_id}
                    new[key] = F.pad(x, (N, 0), value=value.get(key, 0))
        return new

    @torch.no_grad()
    def _last_tokens(self, inputs):
        """h [B, 1, D] of the frozen backbone at the last token, chunk by chunk."""
        out = None
        for rows, chunk in self._chunks(inputs):
            chunk = self._content(chunk)
            last = chunk["attention_mask"].sum(1) - 1  # [b]
            h = self.backbone.run(chunk)  # [b, n, D]
            h = h[torch.arange(len(h), device=h.device), last]
            out = h.new_empty(len(inputs["attention_mask"]), 1, h.shape[1]) if out is None else out
            out[rows, 0] = h
        return out

    def _cached(self, inputs, Q):
        """
        _plain's h [B, N, D] and gradient, exactly, for about half the time and little memory: the
        backbone is frozen and causal and the queries stand last, so no content position depends
        on them. A chunk's content runs once without gradient, all that is kept of it are keys and
        values; then the N queries run on top. Tokens that all items start with run only once.
        """
        everything = self._content(inputs)
        P = self._n_shared(everything)
        shared = None  # N x (K, V) [1, Hkv, P, d]
        if P:
            head = {k: everything[k][..., :1, :P] for k in ("input_ids", "attention_mask",
                                                            "position_ids")}
            shared = self._fill(head)
        states, order = [], []
        every = torch.arange(len(inputs["attention_mask"]), device=Q.device)
        for rows, chunk in self._chunks(inputs):
            content = self._content(chunk)
            kv = self._fill(content, shared, P)
            pos = chunk["position_ids"]  # [B, L] or [3, B, L]
            at = chunk["append_pos"].expand(*pos.shape[:-1], -1)
            run = (self._queries_on, Q, kv, content["attention_mask"], pos.gather(-1, at))
            if self.config.gradient_checkpointing and torch.is_grad_enabled():
                # no dropout in here, so there is no RNG state to keep
                states.append(checkpoint(*run, use_reentrant=False, preserve_rng_state=False))
            else:
                states.append(run[0](*run[1:]))
            order.append(every[rows])
            del chunk, content  # before the next chunk's copies of pixels
        return torch.cat(states)[torch.cat(order).argsort()]

    @torch.no_grad()
    def _fill(self, content, shared=None, P=0):
        """Keys and values of the content, N x (K, V) [B, Hkv, n, d]; its first P are given."""
        kv = [(None, None)] * self.backbone.num_layers
        if P:
            mask = content["attention_mask"]  # [B, n]: attention covers the shared tokens too
            content = {k: x[..., P:] if per_token(k, x, mask) and x is not mask else x
                       for k, x in content.items()}
            kv = [tuple(x.expand(len(mask), -1, -1, -1) for x in pair) for pair in shared]
        cache = cache_of(kv, last=LastLayer)
        try:
            self.backbone.run(content, cache=cache)
        except Filled:
            pass
        return [(layer.keys, layer.values) for layer in cache.layers]

    def _queries_on(self, Q, kv, mask, position_ids):
        """h [B, N, D] of the queries, their content being in kv. mask [B, n], positions: theirs."""
        B, N = len(mask), len(Q)
        x = Q.to(kv[0][0].dtype).expand(B, -1, -1)  # [B, N, D]
        inputs = dict(inputs_embeds=x, attention_mask=F.pad(mask, (0, N), value=1),
                      position_ids=position_ids)
        return self.backbone.run(inputs, cache=cache_of(kv, ReadOnlyLayer))

    # ---------------------------------------------------------------- matching

    @torch.no_grad()
    def similarity(self, text, video):
        """S [Nt, Nv] in fp32 for ranking. Rows and columns are independent: cut as memory asks."""
        with fp32(text["z"]):
            return text["z"].float() @ video["z"].float().T

    def loss(self, text, video, ids=None):
        """Eq. 9 over the global batch. ids [B]: the videos' integer ids, for mask_same_video."""
        with torch.no_grad():  # the parameter itself, so that its gradient is never cut off
            self.log_tau.clamp_(math.log(MIN_TAU), math.log(MAX_TAU))
        mask = None
        if self.config.mask_same_video:
            if ids is None:
                raise ValueError("SLQ: mask_same_video needs the videos' ids in loss()")
            mask = same_video(torch.as_tensor(ids, device=text["z"].device))  # [B, B]
        with fp32(text["z"]):
            S = text["z"].float() @ video["z"].float().T  # [B, B]
        loss = info_nce(S, (-self.log_tau).exp(), mask)  # Eq. 7-9
        with torch.no_grad():
            B, pos = len(S), S.diagonal().mean()
            logs = dict(tau=self.log_tau.exp(), pos=pos, neg=(S.sum() - pos * B) / (B * (B - 1)))
        return loss, logs

    # ---------------------------------------------------------------- what is trained

    def trainable_groups(self):
        """{"queries", "prompt", "adapters", "LoRA", "LLM", "head", "tau": {name: parameter}}"""
        groups = {}
        for name, p in self.named_parameters():
            if p.requires_grad:
                key = "LoRA" if "lora_" in name else name.partition(".")[0]
                key = {"mllm": "LLM", "log_tau": "tau"}.get(key, key)
                key = "prompt" if key == "queries" and self.config.tuning == "prompt" else key
                groups.setdefault(key, {})[name] = p
        return groups

    def no_decay(self, name):
        """True for parameters without weight decay: queries and all that are below 2-D."""
        # Choice: unstated; queries are embeddings, nothing says they should be small
        return name == "queries" or self.get_parameter(name).dim() < 2

    def cache_bytes(self, tokens=1):
        """Bytes of the KV cache of one item: layers x 2 x kv heads x head_dim x tokens x bytes."""
        text = self.backbone.decoder.config.get_text_config()
        width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return (self.backbone.num_layers * 2 * text.num_key_value_heads * width * tokens
                * self.backbone.embed.weight.element_size())

    def summary(self, tokens=300):
        """A table of what is trained, and with the prefix cache what an item keeps, as text."""
        frozen = sum(p.numel() for p in self.parameters() if not p.requires_grad)
        lines = [f"trained {key:8s} {sum(p.numel() for p in group.values()):14,d}"
                 for key, group in self.trainable_groups().items()]
        lines.append(f"frozen           {frozen:14,d}")
        if self.config.tuning == "lora":
            n = sum(hasattr(m, "lora_A") for m in self.mllm.modules())
            lines.insert(0, f"LoRA on {n:4d} modules of language model")
        if self.cached:
            lines.append(f"KV cache: {self.cache_bytes():,d} bytes per token, "
                         f"{self.cache_bytes(tokens) / 2 ** 20:.2f} MiB per item of {tokens}")
            device = self.log_tau.device
            if device.type == "cuda":
                free = torch.cuda.mem_get_info(device)[0]
                lines[-1] += (f"; {free / 2 ** 30:.1f} GiB are free, enough for "
                              f"{free // (2 * self.cache_bytes(tokens)):,d} pairs less activations")
        return "\n".join(lines)

    def save_adapter(self, folder):
        """LoRA alone in PEFT's layout, for others to load; nothing is written without LoRA."""
        if self.config.tuning == "lora":
            self.mllm.save_pretrained(folder, save_embedding_layers=False)
