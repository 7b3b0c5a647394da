"""
What tuning a backbone for retrieval costs it: how well it still says what a clip shows, measured on
held-out clips as the loss of their captions. The right half of SLQ's Table 3, in small.

    $ python caption_loss.py --ckpt out/demo_slq,out/demo_slq_lora,out/demo_slq_full

    clip, "Describe this video." + caption --backbone.collate(answers=...)--> inputs, labels [B, L]
    --the run's backbone, teacher forcing--> nats per token of the caption and its end, tokens right

The first row is the backbone as it was before any training. SLQ's is that one, bit by bit: queries
are no weights of it. LoRA, adapters and full fine-tuning change it, and cannot be taken for free.
"""
ckpt = ""              # comma-separated run folders of a method on a multimodal LLM
which = "best"         # checkpoint of the runs: best (by the validation split) or latest
split = "test"         # <data>/<split>.jsonl
prompt = "<video>\nDescribe this video."  # the user's turn; the demo's backbone was trained with it
# captions: the annotations' own | plain: the demo's events in the words that its backbone was
# trained to answer with, so that there is one right answer
answers = "captions"
device = "auto"        # cuda, cpu; auto: a GPU if there is one
# what follows is as in training unless it is given
data: str | None = None            # folder of the annotations; alone it moves video_root with it
video_root: str | None = None      # folder of the videos; "": <data>/videos
eval_batch_size: int | None = None # clips per forward pass
num_workers: int | None = None     # loader processes
frame_cache: str | None = None     # folder for decoded frames
on_bad_video: str | None = None    # raise, or skip an unreadable video and its captions
num_frames: int | None = None      # frames per video; prints a warning when it differs
backbone: str | None = None        # where the backbone is now, if it has moved
# end of settings
if __name__ == "__main__":         # before torch is imported, so that --help is instant
    from configurator import configure
    args = configure(__file__)

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from tqdm import tqdm

import eval as evaluation
from data import Item, Videos, load_annotations, make_loader, reading


class Asked:
    """Samples -> inputs with labels, a row for each of a clip's captions. For loader workers."""

    def __init__(self, backbone, prompt, items):
        self.backbone, self.prompt, self.items = backbone, prompt, items

    def __call__(self, samples):
        pairs = [(s.frames, s.times, c) for s in samples if s.error is None
                 for c in self.items[s.index].captions]
        if not pairs:
            return None
        frames, times, captions = map(list, zip(*pairs))
        return self.backbone.collate(self.prompt, frames=frames, times=times, answers=captions)


@torch.no_grad()
def caption_loss(backbone, inputs):
    """-> negative log likelihood [n] of all tokens of the answers, which of them rank first [n]."""
    labels = inputs["labels"][:, 1:]                                   # [B, L - 1]
    target = labels != -100                                            # the answer and its end
    h = backbone.run(inputs)[:, :-1]                                   # [B, L - 1, D]
    logits = backbone.model.get_output_embeddings()(h[target]).float()                 # [n, V]
    return (F.cross_entropy(logits, labels[target], reduction="none"),
            logits.argmax(-1) == labels[target])


def measure(backbone, items, cfg, prompt, device="cpu", autocast=torch.no_grad):
    """{"nats per token", "tokens right" in percent, "tokens", "captions"} over all the captions."""
    root = cfg.video_root or os.path.join(cfg.data, "videos")
    videos = Videos(items, root, cfg.num_frames, **reading(cfg))
    n = cfg.eval_batch_size
    batches = [list(range(len(items)))[i:i + n] for i in range(0, len(items), n)]
    loader = make_loader(videos, batches, Asked(backbone, prompt, items), cfg.num_workers)
    losses, right, captions = [], [], 0
    for inputs in tqdm(loader, desc="captions", leave=False):
        if inputs is None:
            continue
        with autocast():
            nll, first = caption_loss(backbone, {k: v.to(device) for k, v in inputs.items()})
        losses.append(nll.double().cpu())
        right.append(first.cpu())
        captions += len(inputs["labels"])
    if not losses:
        raise ValueError(f"not one of the {len(items)} videos in {root} could be read")
    losses, right = torch.cat(losses), torch.cat(right)
    return {"nats per token": losses.mean().item(),
            "tokens right": 100 * right.double().mean().item(),
            "tokens": len(losses), "captions": captions}


def annotated(cfg, args):
    """The split's items, with the answers that are asked for as their captions."""
    items = load_annotations(os.path.join(cfg.data, f"{args.split}.jsonl"))
    if args.answers == "captions":
        return items
    if any("events" not in item.fields for item in items):
        raise ValueError(f"answers=plain is for the demo: lines of {cfg.data}/{args.split}.jsonl "
                         "have no events; use --answers=captions")
    sys.path.insert(0, str(Path(__file__).parent / "data/demo"))
    from pretrain import plain
    return [Item(item.id, item.video, [plain(item.fields["events"], 2)]) for item in items]


def runs_of(args, say):
    """(folder, settings, checkpoint's folder, items) of each run; whatever is wrong with one of
    them is told before any is measured."""
    training = dict.fromkeys(("text_prompt", "video_prompt", "paragraph"))
    runs = []
    for folder in [f.strip() for f in args.ckpt.split(",")]:
        cfg, step, _ = evaluation.load_settings(
            SimpleNamespace(**{**vars(args), **training, "ckpt": folder}), say)
        if cfg.eval_batch_size < 1 or cfg.num_workers < 0:
            raise ValueError(f"eval_batch_size {cfg.eval_batch_size} must be at least 1, "
                             f"num_workers {cfg.num_workers} at least 0")
        if Path(folder, "caption_loss.json").is_file():
            evaluation.read_json(Path(folder, "caption_loss.json"))
        evaluation.read_weights(step)
        runs.append((folder, cfg, step, annotated(cfg, args)))
    return runs


def rows_of(args, say=print):
    """A row (name, result) per run, before them one for each backbone as it was."""
    import train
    _, _, device = train.init_distributed(args.device)
    untouched, rows = {}, []
    for folder, cfg, step, items in runs_of(args, say):
        model = train.build_model(cfg, device).eval()
        if not hasattr(model.backbone, "chat"):
            raise ValueError(f"{folder}: the backbone {cfg.backbone} is no language model, it "
                             "has no captions to lose")
        evaluation.load_weights(model, step)
        how = (items, cfg, args.prompt, device, train.autocast_of(cfg, device))
        key = (cfg.backbone, cfg.data, cfg.num_frames, cfg.frame_size)
        if key not in untouched:       # loaded anew: nothing of the run in it, nor its precision
            import backbones
            bare = backbones.load(cfg.backbone, cfg.max_pixels, train.torch_dtype(cfg, device))
            bare.model.to(device)
            untouched[key] = measure(bare, *how)
            rows.append((f"untouched {os.path.basename(cfg.backbone)}", untouched[key]))
        result = measure(model.backbone, *how)
        result["against untouched"] = result["nats per token"] - \
            untouched[key]["nats per token"]
        rows.append((os.path.basename(os.path.abspath(folder)), result))
        name = " ".join([args.split, args.answers, repr(args.prompt)])
        evaluation.save_result(Path(folder, "caption_loss.json"), result, name)
    return rows


def table(rows, args):
    width = max(len(name) for name, _ in rows) + 2
    first = rows[0][1]
    out = [f"split {args.split}, {first['captions']} answers ({args.answers}) of "
           f"{first['tokens']} tokens to {args.prompt!r}",
           " " * width + f"{'nats per token':>16}{'against untouched':>19}{'tokens right %':>16}"]
    for name, r in rows:
        change = r.get("against untouched")
        change = "" if change is None else "the same bits" if change == 0 else f"{change:+.4f}"
        out.append(f"{name:<{width}}{r['nats per token']:16.4f}{change:>19}"
                   f"{r['tokens right']:16.1f}")
    return "\n".join(out)


def main(args):
    if args.answers not in ("captions", "plain"):
        raise ValueError(f"answers must be captions or plain; got {args.answers!r}")
    args.prompt = args.prompt.replace("\\n", "\n")  # a shell passes \n as two letters
    if args.prompt.count("<video>") != 1 or "{caption}" in args.prompt:
        raise ValueError(f"prompt must hold <video> once and no {{caption}}; got {args.prompt!r}")
    print(table(rows_of(args), args))


if __name__ == "__main__":
    from train import one_line_errors
    one_line_errors(lambda: main(args))
