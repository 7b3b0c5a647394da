"""
Trains the demo's two backbones from scratch and saves them as ordinary Hugging Face checkpoints.

    python data/demo/pretrain.py qwen2-vl     # captioning                -> backbones/tiny-qwen2-vl
    python data/demo/pretrain.py clip         # frame-caption contrast    -> backbones/tiny-clip

qwen2-vl  clip uint8 [T, S, S, 3] + instruction -> caption, caption + instruction -> paraphrase.
          Half of the items must answer through a bottleneck: the answer sees only the prompt's last
          tokens, so that these learn to hold all of the content (as "in one word" asks for).
clip      one frame of a clip -> a text that is true of it; masked InfoNCE.
The clips are drawn here, on separate seeds, and share no pair of events with val and test.
Not here on purpose: resuming. The checkpoint is written once, at the end, under a temporary name.
"""
import argparse
import json
import math
import multiprocessing
import os
import re
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))
sys.path.insert(0, str(HERE))
import prepare  # noqa: E402

T = 8  # frames per clip: the middles of T equal parts of the 24, as data.py's uniform sampler
KEEP = [int((i + 0.5) * prepare.FRAMES / T) for i in range(T)]
QWEN_SIDE, CLIP_SIDE = 48, 48
IMAGE_MEAN, IMAGE_STD = [0.5] * 3, [0.5] * 3
# what is asked of a clip or a caption, and what the answer tells: both events (2), the first (0) or
# the last (1). The first line of either kind is what MARS asks (model_mars.py)
VIDEO_PROMPTS = [("<video>\nSummarize above video in one word:", 2),
                 ("<video>\nDescribe this video.", 2), ("<video>\nWhat happens first?", 0),
                 ("<video>\nWhat happens last?", 1)]
TEXT_PROMPTS = [("{caption}\nSummarize above sentence in one word:", 2),
                ("{caption}\nSay it differently.", 2), ("{caption}\nWhat happens first?", 0),
                ("{caption}\nWhat happens last?", 1)]


# --------------------------------------------------------------------------------------------------
# Clips, drawn once and kept in memory as the small frames that the models see

def draw(job):
    clip, seed, side = job
    video = prepare.render(clip, seed, keep=KEEP)                       # [T, S, S, 3]
    small = F.interpolate(torch.from_numpy(video).permute(0, 3, 1, 2), (side, side), mode="bicubic",
                          antialias=True)                               # as backbones.py resizes
    return small.permute(0, 2, 3, 1).contiguous().numpy()               # [T, s, s, 3]


def draw_clips(n, seed, side, processes, taken):
    """n clips without the event pairs in `taken`, and their frames uint8 [n, T, side, side, 3]."""
    clips = prepare.random_clips(n, np.random.default_rng([seed, 5]), taken)
    jobs = [(clip, s, side) for clip, s in zip(clips, draw_seeds(n, seed))]
    frames = np.empty((n, T, side, side, 3), dtype=np.uint8)
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for i, small in enumerate(tqdm(pool.imap(draw, jobs, chunksize=32), total=n, unit="clip",
                                       desc="drawing clips")):
            frames[i] = small
    return clips, frames


def draw_seeds(n, seed):
    return [[seed, 6, i] for i in range(n)]


def clip_seed(seed, k):
    """Apart from the seeds of prepare.py, which start with its own --seed."""
    return 10_000_019 + 10 * seed + k


def read_caption(text):
    """The inverse of prepare.caption: the two events in order of time, or None."""
    word = lambda table: {w: k for k, words in table.items() for w in words}
    verbs = {form: k for k, forms in prepare.MOTIONS.items() for pair in forms for form in pair}
    tables = [word(prepare.SIZES), word(prepare.COLOUR_WORDS), word(prepare.SHAPES), verbs]
    either = ["|".join(sorted(table, key=len, reverse=True)) for table in tables]
    event = "a ({}) ({}) ({}) ({})".format(*either)
    found = [tuple(table[w] for table, w in zip(tables, m)) for m in re.findall(event, text)]
    if len(found) != 2:
        return None
    backwards = text.startswith("before ") or " after " in text or ", but first " in text
    return (found[1], found[0]) if backwards and not text.startswith("first ") else tuple(found)


# --------------------------------------------------------------------------------------------------
# Qwen2-VL: the folder of an untrained model, then captioning

def new_qwen2_vl(folder, seed):
    """Writes config, random weights, a tokenizer of the demo's own words, and the preprocessor."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX, Qwen2Tokenizer
    from tokenizers import Regex

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
               "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    bpe.decoder = decoders.ByteLevel()
    rng = np.random.default_rng(seed)
    corpus = [prepare.caption(prepare.random_clip(rng), rng) for _ in range(4000)]
    corpus += 200 * [p.replace("<video>", "").replace("{caption}", "")
                     for p, _ in VIDEO_PROMPTS + TEXT_PROMPTS]
    corpus += 200 * ["system\nYou are a helpful assistant.", "user\n", "assistant\n"]
    bpe.train_from_iterator(corpus, trainers.BpeTrainer(
        vocab_size=640, min_frequency=50, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    core = json.loads(bpe.to_str())["model"]
    # the special tokens come after the vocabulary, as in the public checkpoints
    tokenizer = Qwen2Tokenizer(vocab=core["vocab"], merges=[tuple(m) for m in core["merges"]],
                               eos_token="<|im_end|>", pad_token="<|endoftext|>",
                               extra_special_tokens=special, model_max_length=1024)
    ids = {t: tokenizer.convert_tokens_to_ids(t) for t in special}

    text = dict(vocab_size=len(tokenizer), hidden_size=96, intermediate_size=192,
                num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
                max_position_embeddings=1024, initializer_range=0.06,  # about 0.6 / sqrt(96)
                rope_parameters=dict(rope_type="default", rope_theta=10000.0,
                                     mrope_section=[4, 4, 4]),  # sums to half a head's width of 24
                bos_token_id=ids["<|endoftext|>"], eos_token_id=ids["<|im_end|>"],
                pad_token_id=ids["<|endoftext|>"])
    vision = dict(depth=2, embed_dim=96, hidden_size=96, num_heads=4, mlp_ratio=2, patch_size=12,
                  initializer_range=0.06, spatial_merge_size=2, temporal_patch_size=2)
    torch.manual_seed(seed)
    model = transformers.Qwen2VLForConditionalGeneration(transformers.Qwen2VLConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=True,
        image_token_id=ids["<|image_pad|>"], video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"]))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    preprocessor = {
        "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2VLProcessor",
        "do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True,
        "min_pixels": QWEN_SIDE ** 2, "max_pixels": QWEN_SIDE ** 2,
        "size": {"shortest_edge": QWEN_SIDE ** 2, "longest_edge": QWEN_SIDE ** 2},
        "patch_size": 12, "merge_size": 2, "temporal_patch_size": 2, "resample": 3,
        "rescale_factor": 1 / 255, "image_mean": IMAGE_MEAN, "image_std": IMAGE_STD}
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor, indent=2) + "\n")


def plain(clip, what):
    """The answer: what happens in the usual words and in the order of time, so that there is one
    right answer and the loss is all content. Captions with other words are met as input."""
    told = [f"a {size} {colour} {shape} {prepare.MOTIONS[motion][0][0]}"
            for size, colour, shape, motion in clip]
    return ", then ".join(told) if what == 2 else told[what]


def bottleneck_mask(attention_mask, first, squeeze, width=5):
    """
    Additive attention mask [B, 1, L, L]: causal, without padding. Where squeeze [B] is set, the
    answer (which starts at first [B]) sees of the prompt only its last `width` tokens: those of
    '<|im_end|>\\n<|im_start|>assistant\\n', the same for every item.
    """
    at = torch.arange(attention_mask.shape[1])
    ok = (at[None, :] <= at[:, None]) & attention_mask.bool()[:, None, :]            # [B, L, L]
    answer = at[None, :, None] >= first[:, None, None]                               # [B, L, 1]
    content = at[None, None, :] < (first - width)[:, None, None]                     # [B, 1, L]
    ok = ok & ~(answer & content & squeeze[:, None, None])
    # the least float, not -inf: a row of padding that sees nothing stays finite
    return torch.zeros(ok.shape).masked_fill(~ok, torch.finfo(torch.float32).min)[:, None]


def caption_loss(backbone, inputs, squeeze):
    """Negative log likelihood of the answers, nats per token: all, the free ones, the squeezed."""
    labels = inputs.pop("labels")                                      # [B, L]
    first = (labels != -100).int().argmax(1)                           # [B]
    mask = bottleneck_mask(inputs["attention_mask"], first, squeeze)
    h = backbone.run({**inputs, "attention_mask": mask})               # [B, L, D]
    target = labels[:, 1:] != -100
    logits = backbone.model.lm_head(h[:, :-1][target])                 # only where an answer is
    nll = F.cross_entropy(logits.float(), labels[:, 1:][target], reduction="none")
    squeezed = squeeze[:, None].expand_as(target)[target]              # of what item a token is
    return nll.mean(), nll[~squeezed].mean().detach(), nll[squeezed].mean().detach()


@torch.no_grad()
def answers(backbone, inputs, squeeze=False, longest=40):
    """Greedy decoding after B prompts padded on the left; no cache, the sequences are short."""
    B, L = inputs["input_ids"].shape
    end = backbone.tokenizer.convert_tokens_to_ids("<|im_end|>")
    first, squeeze = torch.full((B,), L), torch.full((B,), squeeze)
    for _ in range(longest):
        mask = bottleneck_mask(inputs["attention_mask"], first, squeeze)
        h = backbone.run({**inputs, "attention_mask": mask})
        token = backbone.model.lm_head(h[:, -1]).argmax(-1, keepdim=True)            # [B, 1]
        more = {"input_ids": token, "attention_mask": torch.ones_like(token),
                "mm_token_type_ids": torch.zeros_like(token),
                "position_ids": inputs["position_ids"][..., -1:] + 1}
        inputs = inputs | {k: torch.cat([inputs[k], v.to(inputs[k].dtype)], -1)
                           for k, v in more.items()}
        if (inputs["input_ids"][:, L:] == end).any(1).all():
            break
    rows = inputs["input_ids"][:, L:].tolist()
    return [backbone.tokenizer.decode(r[:r.index(end)] if end in r else r) for r in rows]


def accuracy(backbone, clips, side, given, squeeze):
    """Greedy answers about held-out clips (or captions): the share of right words per attribute, of
    clips where all eight are right, and one answer. given [n]: frames or captions."""
    texts, prompt = [], {"frames": VIDEO_PROMPTS, "captions": TEXT_PROMPTS}[side][0][0]
    for i in range(0, len(clips), 50):
        inputs = backbone.collate(prompt, **{side: list(given[i:i + 50])}, padding_side="left")
        texts += answers(backbone, inputs, squeeze)
    right = np.zeros((len(clips), 2, 4), dtype=bool)
    for row, clip, text in zip(right, clips, texts):
        read = read_caption(text)
        if read is not None:
            row[:] = [[a == b for a, b in zip(x, y)] for x, y in zip(read, clip)]
    names = ("size", "colour", "shape", "motion")
    out = {name: round(float(right[:, :, k].mean()), 4) for k, name in enumerate(names)}
    return out | {"clip": round(float(right.all((1, 2)).mean()), 4), "example": texts[0]}


def report_qwen2_vl(backbone, clips, frames, rng):
    given = {"frames": frames, "captions": [prepare.caption(clip, rng) for clip in clips]}
    report = {}
    for side, values in given.items():
        for name, squeeze in (("free", False), ("bottleneck", True)):
            found = accuracy(backbone, clips, side, values, squeeze)
            report[f"{side}_{name}"] = found
            print(f"{len(clips)} held-out {side}, {name}:", found, "| is", plain(clips[0], 2))
    return report


def train_qwen2_vl(args, folder):
    import backbones
    new_qwen2_vl(folder, args.seed)
    backbone = backbones.load(str(folder), dtype=torch.float32)
    model = backbone.model
    model.requires_grad_(True).train()
    print(f"qwen2-vl: {sum(p.numel() for p in model.parameters()):,} parameters")

    taken = prepare.held_out()
    drawn = lambda n, k: draw_clips(n, clip_seed(args.seed, k), QWEN_SIDE, args.processes, taken)
    clips, frames = drawn(args.clips, 0)
    taken |= {prepare.unordered(clip) for clip in clips}
    test_clips, test_frames = drawn(200, 1)
    rng = np.random.default_rng(args.seed)

    def loss_fn(step):
        # questions about one event first: they are short, and leave no doubt of which one is meant
        early = step < 0.4 * args.steps
        kind = rng.choice(4, p=(0.1, 0.1, 0.4, 0.4) if early else (0.5, 0.2, 0.15, 0.15))
        (video_prompt, what), (text_prompt, _) = VIDEO_PROMPTS[kind], TEXT_PROMPTS[kind]
        n_text = args.batch * 3 // 8
        pick = rng.integers(len(clips), size=args.batch)
        seen, said = pick[n_text:], [clips[i] for i in pick[:n_text]]
        batch = (backbone.collate(video_prompt, frames=[frames[i] for i in seen],
                                  answers=[plain(clips[i], what) for i in seen]),
                 backbone.collate(text_prompt, [prepare.caption(c, rng) for c in said],
                                  answers=[plain(c, what) for c in said]))
        logs, loss = {}, 0.0
        for name, inputs in zip(("video", "text"), batch):
            squeeze = torch.from_numpy(rng.random(len(inputs["labels"])) < args.bottleneck)
            part, logs[name], logs[name + "_squeezed"] = caption_loss(backbone, inputs, squeeze)
            loss = loss + part / 2
        return loss, logs

    log = fit(model, loss_fn, args)
    model.eval()
    report = {"loss": log, "parameters": sum(p.numel() for p in model.parameters())}
    report |= report_qwen2_vl(backbone, test_clips, test_frames, rng)
    model.to(torch.bfloat16).save_pretrained(folder)  # half the bytes; loads as float32 too
    return report


# --------------------------------------------------------------------------------------------------
# CLIP: single frames against texts that are true of them

def new_clip(folder, seed):
    """Writes config, random weights, a CLIP tokenizer of the demo's words, and the preprocessor."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    rng = np.random.default_rng(seed)
    corpus = [frame_text(prepare.random_clip(rng), rng.uniform(0, 1, 2), 0, rng)[0]
              for _ in range(6000)]
    start, end = "<|startoftext|>", "<|endoftext|>"
    blank = transformers.CLIPTokenizer(vocab={"!": 0, start: 1, end: 2}, merges=[])
    bpe = Tokenizer(models.BPE(end_of_word_suffix="</w>", unk_token=end))
    bpe.normalizer = blank.backend_tokenizer.normalizer
    bpe.pre_tokenizer = blank.backend_tokenizer.pre_tokenizer
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe.train_from_iterator(corpus, trainers.BpeTrainer(
        vocab_size=760, min_frequency=50, show_progress=False, initial_alphabet=alphabet,
        end_of_word_suffix="</w>"))
    core = json.loads(bpe.to_str())["model"]
    words = sorted(core["vocab"], key=core["vocab"].get)
    words += [c + "</w>" for c in alphabet if c + "</w>" not in core["vocab"]]
    # as in the public checkpoints the end of text has the largest id: pooling at the largest id
    # and pooling at eos_token_id are then the same
    vocab = {w: i for i, w in enumerate([*words, start, end])}
    tokenizer = transformers.CLIPTokenizer(vocab=vocab, merges=[tuple(m) for m in core["merges"]],
                                           model_max_length=77)
    text = dict(vocab_size=len(tokenizer), hidden_size=96, intermediate_size=192,
                num_hidden_layers=4, num_attention_heads=4, max_position_embeddings=77,
                projection_dim=96, bos_token_id=tokenizer.bos_token_id,
                eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    vision = dict(hidden_size=96, intermediate_size=192, num_hidden_layers=4, projection_dim=96,
                  num_attention_heads=4, image_size=CLIP_SIDE, patch_size=CLIP_SIDE // 4)
    torch.manual_seed(seed)
    model = transformers.CLIPModel(transformers.CLIPConfig(
        text_config=text, vision_config=vision, projection_dim=96))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    preprocessor = {
        "image_processor_type": "CLIPImageProcessor", "do_resize": True, "do_center_crop": True,
        "do_rescale": True, "do_normalize": True, "do_convert_rgb": True, "resample": 3,
        "size": {"shortest_edge": CLIP_SIDE}, "rescale_factor": 1 / 255,
        "crop_size": {"height": CLIP_SIDE, "width": CLIP_SIDE},
        "image_mean": IMAGE_MEAN, "image_std": IMAGE_STD}
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor, indent=2) + "\n")


def where(x, y):
    """Which of the 3 x 3 fields of the picture: 'at the top left', 'in the middle', ..."""
    row, column = (int(v > 0.42) + int(v > 0.58) for v in (y, x))
    if row == column == 1:
        return "in the middle"
    if row == 1:
        return ("on the left", "", "on the right")[column]
    return "at the " + ("top", "", "bottom")[row] + (" left", "", " right")[column]


def frame_text(clip, centre, k, rng):
    """A text for a frame that shows event k, and its level: 0 names the object, 1 its place too,
    2 is a sentence about the event, 3 a caption of the whole clip."""
    level = int(rng.choice(4, p=(0.2, 0.4, 0.2, 0.2)))
    if level == 3:
        return prepare.caption(clip, rng), level
    noun, verb = prepare.phrases(clip[k], rng)
    prefix = ("", "a picture of ", "there is ", "we see ")[int(rng.integers(4))]
    if level == 2:
        return f"{noun} {verb[int(rng.integers(2))]}", level
    return prefix + noun + (f" {where(*centre)}" if level == 1 else ""), level


def train_clip(args, folder):
    import transformers
    new_clip(folder, args.seed)
    model = transformers.CLIPModel.from_pretrained(folder).train()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    print(f"clip: {sum(p.numel() for p in model.parameters()):,} parameters")
    taken = prepare.held_out()
    seed = clip_seed(args.seed, 2)
    clips, frames = draw_clips(args.clips, seed, CLIP_SIDE, args.processes, taken)
    scripts = [prepare.script(clip, s) for clip, s in zip(clips, draw_seeds(len(clips), seed))]
    shown = [[script[f][:3] for f in KEEP] for script in scripts]      # [n][T] (event, x, y)
    rng = np.random.default_rng(args.seed)

    def batch(pool, n):
        pick, at = rng.choice(pool, size=n, replace=False), rng.integers(T, size=n)
        views = [shown[i][t] for i, t in zip(pick, at)]
        texts = [frame_text(clips[i], (x, y), k, rng) for i, (k, x, y) in zip(pick, views)]
        seen = [(clips[i][k][:3], where(x, y)) for i, (k, x, y) in zip(pick, views)]
        told = [[event[:3] for event in clips[i]] if level == 3 else [thing]
                for i, (thing, _), (_, level) in zip(pick, seen, texts)]
        # same[a, b]: frame b shows what text a tells of, so it is no negative, if not a's pair
        same = [[thing in objects and (level != 1 or place == here) for thing, place in seen]
                for objects, (_, here), (_, level) in zip(told, seen, texts)]
        pixels = torch.from_numpy(frames[pick, at]).permute(0, 3, 1, 2).float() / 255
        pixels = (pixels - IMAGE_MEAN[0]) / IMAGE_STD[0]
        tokens = tokenizer([text for text, _ in texts], padding=True, return_tensors="pt")
        return pixels, tokens, torch.tensor(same), torch.tensor([level for _, level in texts])

    def scores(pixels, tokens):
        return model(pixel_values=pixels, **tokens).logits_per_text    # [texts, frames]

    train, held = np.arange(len(clips) - 1000), np.arange(len(clips) - 1000, len(clips))

    def loss_fn(step):
        pixels, tokens, same, _ = batch(train, args.batch)
        S = scores(pixels, tokens)
        same.fill_diagonal_(False)
        S = S.masked_fill(same, float("-inf"))
        target = torch.arange(len(S))
        parts = F.cross_entropy(S, target), F.cross_entropy(S.T, target)
        with torch.no_grad():
            model.logit_scale.clamp_(max=math.log(100))
        return sum(parts) / 2, dict(zip(("text", "image"), parts))

    log = fit(model, loss_fn, args)
    model.eval()
    with torch.no_grad():
        pixels, tokens, same, level = batch(held, 500)
        best = scores(pixels, tokens).argmax(1)
    right = same[torch.arange(500), best].float()  # a frame of which the text is true
    names = ("object", "place", "event", "clip")
    report = {name: round(right[level == k].mean().item(), 4) for k, name in enumerate(names)}
    print("500 held-out frames, is the text true of the frame it finds:", report)
    model.half().save_pretrained(folder)  # half the bytes; loads as float32 just as well
    return {"loss": log, "parameters": sum(p.numel() for p in model.parameters()),
            "text_to_frame_R@1": report}


# --------------------------------------------------------------------------------------------------
# The loop of both

def fit(model, loss_fn, args):
    """AdamW, linear warmup, cosine to zero. Returns the mean of the last 50 steps' losses."""
    steps = args.steps
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    opt = torch.optim.AdamW([{"params": decay, "weight_decay": 0.05},
                             {"params": rest, "weight_decay": 0.0}], lr=args.lr, betas=(0.9, 0.98))
    rate = lambda s: min((s + 1) / 100, 0.5 + 0.5 * math.cos(math.pi * s / steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, rate)
    history, bar = [], tqdm(range(steps), unit="step", mininterval=2)
    for step in bar:
        loss, parts = loss_fn(step)
        if not torch.isfinite(loss):
            raise RuntimeError(f"step {step}: the loss is {loss.item()}; try a smaller --lr")
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        schedule.step()
        history.append({k: v.item() for k, v in parts.items()})
        if step % 50 == 49 or step == steps - 1:
            mean = {k: round(float(np.nanmean([h[k] for h in history[-50:]])), 4) for k in parts}
            bar.write(f"step {step + 1} " + " ".join(f"{k} {v}" for k, v in mean.items()))
    return mean


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("qwen2-vl", "clip"), help="which backbone")
    parser.add_argument("--out", type=Path, default=HERE / "backbones", help="where to write")
    parser.add_argument("--steps", type=int, default=0, help="optimizer steps (0: 3500, clip 2000)")
    parser.add_argument("--batch", type=int, default=0, help="items per step (0: 64, clip 128)")
    parser.add_argument("--clips", type=int, default=12000, help="clips to draw and train on")
    parser.add_argument("--lr", type=float, default=0.0, help="peak rate (0: 2e-3, clip 1e-3)")
    parser.add_argument("--bottleneck", type=float, default=0.5,
                        help="qwen2-vl: share of answers that see only the prompt's end")
    parser.add_argument("--seed", type=int, default=1337, help="weights, clips, order")
    parser.add_argument("--processes", type=int, default=2, help="processes that draw clips")
    args = parser.parse_args()
    args.steps = args.steps or {"qwen2-vl": 3500, "clip": 2000}[args.what]
    args.batch = args.batch or {"qwen2-vl": 64, "clip": 128}[args.what]
    args.lr = args.lr or {"qwen2-vl": 2e-3, "clip": 1e-3}[args.what]

    start, target = time.time(), args.out / f"tiny-{args.what}"
    part = args.out / f"tiny-{args.what}.tmp"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    report = {"qwen2-vl": train_qwen2_vl, "clip": train_clip}[args.what](args, part)
    report |= {"seconds": round(time.time() - start), "cpu_seconds": round(sum(os.times()[:4])),
               "settings": {k: v for k, v in vars(args).items() if k not in ("out", "processes")}}
    (part / "pretraining.json").write_text(json.dumps(report, indent=2) + "\n")
    shutil.rmtree(target, ignore_errors=True)
    os.replace(part, target)
    print(f"{target}: {json.dumps(report)}")


if __name__ == "__main__":
    main()
