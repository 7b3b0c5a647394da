"""
MARS (Multi-layer Adaptive Representation Slots) on a frozen decoder MLLM, all of it in this file.

A caption and a video go through the same LLM, each with M learned slot tokens where the answer
would be. Slot m is its own mix of the N decoder layers; a pair scores the mean of M cosines.
Paper: MARS, Sec. 3 ("Eq. n"); Eq. 4-12 are in losses.py.

    samples -> collate   "<video> Summarize ..." + M slots -> input_ids [B, L], append_pos [B, M]
    inputs  -> states    hooks on the decoder layers         -> h [N, B, M, D]
    h       -> fuse      softmax over layers, L2 norm        -> {"slots": [B, M, D]}
    slots of Nt texts and Nv videos -> similarity            -> S [Nt, Nv]

Where the paper is silent or says two things, a comment says "Choice:".
Shapes: B items, L tokens, M slots, N decoder layers, D hidden width.
"""
import math
import re
import warnings
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model

from losses import diversity, fp32, hard_negative, info_nce, same_video

MAX_GAMMA = 100.0  # a learned scale stops here, as CLIP's does


# Table 2, row by row: layer_fusion=False num_slots=1 lambda_div=0 lambda_hn=0 | layer_fusion=True |
# num_slots=4 | lambda_div=.1 | lambda_hn=.05. With one slot, read one token before it, that is the
# prompt's last token: no learned token has a part in the first two rows.
@dataclass
class MARSConfig:
    backbone: str = ""  # folder or hub id of the MLLM
    max_pixels: int = 0  # most pixels per frame, 0 = the backbone's own limit
    num_frames: int = 16  # frames per video (Table A2)
    # Choice: the template's figure is not in the text; E5-V's wording fits Table 4's token count
    video_prompt: str = "<video>\nSummarize above video in one word:"  # user's turn for a video
    text_prompt: str = "{caption}\nSummarize above sentence in one word:"  # user's turn for a text
    max_text_tokens: int = 256  # a longer caption is cut, its prompt is not (not in the paper)
    num_slots: int = 4  # M; 3 on MSR-VTT (Table A2, Table 3)
    layer_fusion: bool = True  # mix all N layers (Eq. 1-2); False: the last layer only (Table 2)
    slot_readout: str = "preceding"  # preceding: one token before (Sec. 3.2) | self (App. B)
    final_norm: str = "hf"  # final RMSNorm on: hf = the last layer's state only | all | none
    slot_init: str = "normal"  # normal: N(0, 0.02) | mean: the mean token embedding (unstated)
    aggregation: str = "uniform"  # over slots: uniform (Eq. 3) | learnable | maxsim (Table A3)
    gamma: float = 50.0  # scale of the cosines in InfoNCE (Eq. 9; value unstated, VLM2Vec's 1/.02)
    learn_gamma: bool = False  # App. B lists no scale among the trained parameters
    lambda_div: float = 0.1  # weight of the diversity loss (Eq. 13, Table A2)
    lambda_hn: float = 0.05  # weight of the hard-negative loss (Eq. 13, Table A2)
    delta: float = 0.04  # margin of the hard-negative hinge, in cosines (Eq. 7, Table A2)
    mask_same_video: bool = False  # a video's other captions are no negatives (unstated)
    lora_r: int = 128  # LoRA rank, 0 = no LoRA (App. B)
    lora_alpha: int = 256  # LoRA scale is alpha / r (App. B)
    lora_dropout: float = 0.05  # (App. B)
    gradient_checkpointing: bool = True  # recompute the decoder layers in backward (App. B)

    def __post_init__(self):
        choices = dict(slot_readout=("preceding", "self"), final_norm=("hf", "all", "none"),
                       slot_init=("normal", "mean"),
                       aggregation=("uniform", "learnable", "maxsim"))
        for key, allowed in choices.items():
            if getattr(self, key) not in allowed:
                raise ValueError(f"{key} must be one of {', '.join(allowed)}; "
                                 f"got {getattr(self, key)!r}")
        least = dict(max_pixels=0, num_frames=1, max_text_tokens=1, num_slots=1, lambda_div=0,
                     lambda_hn=0, delta=0, lora_r=0, lora_alpha=1, lora_dropout=0)
        for key, low in least.items():
            if not low <= getattr(self, key) < math.inf:
                raise ValueError(f"{key} must be at least {low}; got {getattr(self, key)}")
        if not self.lora_dropout < 1:
            raise ValueError(f"lora_dropout must be below 1; got {self.lora_dropout}")
        if not 0 < self.gamma < math.inf or (self.learn_gamma and self.gamma > MAX_GAMMA):
            raise ValueError(f"gamma must be above 0 (and at most {MAX_GAMMA} when learned); "
                             f"got {self.gamma}")
        for key, need, other in (("video_prompt", "<video>", "{caption}"),
                                 ("text_prompt", "{caption}", "<video>")):
            prompt = getattr(self, key).replace("\\n", "\n")  # a shell passes \n as two letters
            setattr(self, key, prompt)
            if prompt.count(need) != 1 or other in prompt:
                raise ValueError(f"{key} must hold {need} once and no {other}; got {prompt!r}")


class MARS(nn.Module):
    def __init__(self, config, backbone):
        super().__init__()
        if backbone.family == "clip":
            raise ValueError(f"MARS is built on a multimodal LLM; {backbone.path!r} is a CLIP")
        for prompt in (config.text_prompt, config.video_prompt):
            backbone.check_prompt(prompt)  # better now than in a loader, when the run has begun
        self.config, self.backbone = config, backbone
        M, N, D = config.num_slots, backbone.num_layers, backbone.hidden_size
        backbone.model.requires_grad_(False)
        self.adapted = {}  # tower -> number of modules with LoRA
        self.mllm = self._add_lora() if config.lora_r else backbone.model
        if config.gradient_checkpointing:
            backbone.model.activation_checkpointing_enable({"use_reentrant": False})
            # transformers makes all embeddings require grad here, which reentrant checkpointing
            # needs. Ours does not, and the frozen vision tower would keep its activations.
            backbone.model.disable_input_require_grads()

        device = backbone.embed.weight.device
        # The same slot tokens, layer weights and LoRA serve texts and videos (Sec. 3.2). They are
        # fp32 whatever the backbone's dtype (peft does it for LoRA): bf16 loses steps of 2e-4.
        if config.slot_init == "normal":
            slots = torch.randn(M, D) * 0.02  # Choice: unstated; the LLM's own initializer range
        else:
            slots = backbone.embed.weight.detach().mean(0, dtype=torch.float32).repeat(M, 1)
        self.slots = nn.Parameter(slots.to(device))  # e^slot [M, D]
        # Choice: N counts the decoder layers, not the embedding output; w starts at the plain mean
        self.w = nn.Parameter(torch.zeros(M, N, device=device)) if config.layer_fusion else None
        learnable = config.aggregation == "learnable"
        self.b = nn.Parameter(torch.zeros(M, device=device)) if learnable else None  # beta's logits
        self.log_gamma = None
        if config.learn_gamma:
            self.log_gamma = nn.Parameter(torch.tensor(math.log(config.gamma), device=device))
        self.train()

    def _add_lora(self):
        # LoRA on the LLM's seven linears and the projector's, never in the vision tower: names like
        # q_proj may occur in both, so the backbone's regex is anchored on the language model
        cfg, model = self.config, self.backbone.model
        if any("lora_" in name for name, _ in model.named_parameters()):
            raise ValueError("MARS: this backbone already carries LoRA; load one for each model")
        inside = {id(m) for m in self.backbone.layers.modules()}
        for name, module in model.named_modules():
            if re.fullmatch(self.backbone.lora_regex, name):
                tower = "language model" if id(module) in inside else name.rpartition(".")[0]
                self.adapted[tower] = self.adapted.get(tower, 0) + 1
        if not self.adapted.get("language model"):
            raise ValueError(f"MARS: no module of the language model matches the backbone's "
                             f"lora_regex {self.backbone.lora_regex!r}; set lora_r=0 or fix it")
        lora = LoraConfig(r=cfg.lora_r, lora_alpha=cfg.lora_alpha, lora_dropout=cfg.lora_dropout,
                          target_modules=self.backbone.lora_regex, bias="none")
        with warnings.catch_warnings():  # peft asks transformers for a property by its old name
            warnings.simplefilter("ignore", FutureWarning)
            return get_peft_model(model, lora)

    def train(self, mode=True):
        """Frozen parts stay in eval mode; only LoRA's dropout and checkpointing follow `mode`."""
        super().train(False)
        self.training = mode
        for name, module in self.mllm.named_modules():
            if "lora_dropout" in name:
                module.training = mode
        # transformers checkpoints a layer only while its own flag says training. The flag of the
        # layer alone switches nothing else on: dropout reads the flags of the modules inside it.
        for layer in self.backbone.layers:
            layer.training = mode and self.config.gradient_checkpointing
        return self

    # ---------------------------------------------------------------- encoding

    def collate(self, samples):
        """Samples -> {"text": inputs, "video": inputs} on the CPU; a side nobody has is absent."""
        sides = {"text": ("caption", self.config.text_prompt),
                 "video": ("frames", self.config.video_prompt)}
        return {side: self.collate_prompt(samples, prompt) for side, (key, prompt) in sides.items()
                if any(getattr(s, key) is not None for s in samples)}

    def collate_prompt(self, samples, prompt):
        """Inputs of samples that share a prompt; what it names of <video> and {caption} is used."""
        return self.backbone.collate_samples(samples, prompt, n_append=self.config.num_slots,
                                             max_text_tokens=self.config.max_text_tokens)

    @contextmanager
    def _hooks(self, pos, layers, seen):
        # pos [B, M]: where the slot tokens stand. In: slots replace the placeholders' embeddings.
        # Out: `seen` gets each layer's states at the M read positions, so the [B, L, D] can go.
        rows = torch.arange(len(pos), device=pos.device)[:, None]  # [B, 1]
        # Choice: Sec. 3.2 reads "the hidden states immediately preceding" the slot tokens, App. B
        # those "of these tokens". Preceding, slot 1 is the prompt's last token, and the last slot
        # token is never read: its gradient is zero and it stays at its start.
        read = pos - 1 if self.config.slot_readout == "preceding" else pos

        def put(module, args, x):  # [B, L, D]
            return x.index_put((rows, pos), self.slots.to(x.dtype).expand(len(pos), -1, -1))

        def keep(module, args, h):
            h = h[0] if isinstance(h, tuple) else h  # [B, L, D]
            seen.append(h[rows, read])  # [B, M, D]

        handles = [self.backbone.embed.register_forward_hook(put)]
        handles += [layer.register_forward_hook(keep) for layer in layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def states(self, inputs):
        """h [N, B, M, D] at the read positions, layer by layer (the last alone without fusion)."""
        inputs = {k: v.to(self.slots.device, non_blocking=True) for k, v in inputs.items()}
        layers, seen = list(self.backbone.layers), []
        if self.w is None:
            layers = layers[-1:]
        with self._hooks(inputs["append_pos"], layers, seen):
            self.backbone.run(inputs)
        # Choice: Eq. 2 does not say where the final norm goes. hf: what transformers calls
        # hidden_states[1:], i.e. raw layers and the last one normed; its RMS is then ~1 while raw
        # states differ by layer, and alpha has to make up for that. all: every layer is normed.
        norm, mode = self.backbone.norm, self.config.final_norm
        if mode == "hf":
            seen[-1] = norm(seen[-1])
        return torch.stack([norm(h) for h in seen] if mode == "all" else seen)

    def fuse(self, h, normalize=True):
        """[N, B, M, D] -> unit slots [B, M, D], fp32 also under autocast."""
        with fp32(h):
            h = h.float()
            if self.w is None:
                z = h[-1]
            else:
                alpha = F.softmax(self.w, dim=-1)  # [M, N], rows sum to 1, Eq. 1
                z = torch.einsum("mn,nbmd->bmd", alpha, h)  # Eq. 2
            return F.normalize(z, dim=-1) if normalize else z

    def encode_text(self, inputs, normalize=True):
        return {"slots": self.fuse(self.states(inputs), normalize)}

    def encode_video(self, inputs, normalize=True):
        return {"slots": self.fuse(self.states(inputs), normalize)}

    def forward(self, batch):
        return self.encode_text(batch["text"]), self.encode_video(batch["video"])

    # ---------------------------------------------------------------- matching

    def slot_similarity(self, text, video):
        """Slot m of a text only meets slot m of a video: cosines S_m [M, Nt, Nv] (before Eq. 3)."""
        zt, zv = text["slots"].float(), video["slots"].float()  # [Nt, M, D], [Nv, M, D]
        with fp32(zt):
            return torch.einsum("imd,jmd->mij", zt, zv)

    def beta(self):
        # weights of the slots [M]: 1/M (Eq. 3), or learned (Table A3)
        return F.softmax(torch.zeros_like(self.slots[:, 0]) if self.b is None else self.b, dim=0)

    def aggregate(self, S_m):
        """S_m [M, Nt, Nv] -> S [Nt, Nv], Eq. 3."""
        if self.config.aggregation == "maxsim":  # Table A3: the best of the M aligned slots
            return S_m.amax(0)
        with fp32(S_m):
            return torch.einsum("m,mij->ij", self.beta(), S_m)

    @torch.no_grad()
    def similarity(self, text, video):
        """S [Nt, Nv] in fp32 for ranking. Rows and columns are independent: cut as memory asks."""
        zt, zv = text["slots"].float(), video["slots"].float()
        with fp32(zt):
            if self.config.aggregation == "maxsim":
                S = zt[:, 0] @ zv[:, 0].T
                for m in range(1, zt.shape[1]):  # a running maximum, never [M, Nt, Nv]
                    S = torch.maximum(S, zt[:, m] @ zv[:, m].T)
                return S
            # sum_m beta_m <zt_m, zv_m> is one product of the concatenated slots
            return (self.beta()[:, None] * zt).flatten(1) @ zv.flatten(1).T

    def gamma(self):
        """The scale of Eq. 9: a float, or a 0-D tensor when it is learned."""
        return self.config.gamma if self.log_gamma is None else self.log_gamma.exp()

    def loss(self, text, video, ids=None):
        """Eq. 13 over the global batch. ids [B]: the videos' integer ids, for mask_same_video."""
        cfg = self.config
        if self.log_gamma is not None:
            with torch.no_grad():
                self.log_gamma.clamp_(max=math.log(MAX_GAMMA))
        mask = None
        if cfg.mask_same_video:
            if ids is None:
                raise ValueError("MARS: mask_same_video needs the videos' ids in loss()")
            mask = same_video(torch.as_tensor(ids, device=text["slots"].device))  # [B, B]
        S_m = self.slot_similarity(text, video)  # [M, B, B]
        S = self.aggregate(S_m)  # [B, B]
        nce = info_nce(S, self.gamma(), mask)  # Eq. 9-10
        div = diversity(text["slots"], video["slots"])  # Eq. 11-12
        # Choice: hinge and diversity see raw cosines, not scaled by gamma (delta = .04 says so)
        hn = hard_negative(S_m, cfg.delta, S, mask)  # Eq. 4-8
        loss = nce + cfg.lambda_div * div + cfg.lambda_hn * hn  # Eq. 13
        with torch.no_grad():
            B, pos = len(S), S.diagonal().mean()
            logs = dict(nce=nce, div=div, hn=hn, gamma=self.gamma(), pos=pos,
                        neg=(S.sum() - pos * B) / (B * (B - 1)))
        return loss, {k: v.detach() if torch.is_tensor(v) else v for k, v in logs.items()}

    # ---------------------------------------------------------------- what is trained

    def check_trained(self):
        """ValueError when no trained parameter reaches an embedding: a run would change nothing."""
        M, N = self.config.num_slots, self.backbone.num_layers
        # preceding: the last slot token is never read. w and b of a single layer or slot are
        # softmaxes over one number, and gamma scales the loss, not the ranking
        slots_are_read = M > 1 or self.config.slot_readout == "self"
        layers_are_mixed = self.config.layer_fusion and N > 1
        if not (self.config.lora_r or slots_are_read or layers_are_mixed):
            raise ValueError(f"nothing that is trained would change an embedding: lora_r=0, one "
                             f"slot that is never read (slot_readout=preceding) and no mix of "
                             f"layers (layer_fusion={self.config.layer_fusion}, {N} of them); set "
                             "lora_r, num_slots or layer_fusion, or epochs=0 for the bare backbone")

    def trainable_groups(self):
        """{"LoRA" | "slots" | "w" | "other": {name: parameter}}, every trained one exactly once."""
        groups = {"LoRA": {}, "slots": {}, "w": {}, "other": {}}
        for name, p in self.named_parameters():
            if p.requires_grad:
                key = "LoRA" if "lora_" in name else name if name in groups else "other"
                groups[key][name] = p
        return {key: group for key, group in groups.items() if group}

    def no_decay(self, name):
        """True for parameters without weight decay: slots, layer weights, and all 1-D ones."""
        # Choice: the paper gives one weight decay for all; pulling w to 0 would pull to the mean
        return name in ("slots", "w") or self.get_parameter(name).dim() < 2

    def summary(self):
        """A table of what is adapted and trained, as text."""
        frozen = sum(p.numel() for p in self.parameters() if not p.requires_grad)
        lines = [f"LoRA on {n:4d} modules of {tower}" for tower, n in self.adapted.items()]
        for key, group in self.trainable_groups().items():
            lines.append(f"trained {key:6s} {sum(p.numel() for p in group.values()):14,d}")
        return "\n".join([*lines, f"frozen         {frozen:14,d}"])

    def save_adapter(self, folder):
        """LoRA alone in PEFT's layout, for others to load; nothing is written without LoRA."""
        if self.config.lora_r:
            self.mllm.save_pretrained(folder, save_embedding_layers=False)
