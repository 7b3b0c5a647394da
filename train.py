"""
Train any of the methods: one loop, one or many processes.

    $ python train.py config/demo_mars.py                          # a laptop
    $ torchrun --nproc_per_node=2 train.py config/mars_didemo.py   # two GPUs
    $ python train.py --help                                       # every setting

samples --model.collate (in workers)--> chunks --model.forward--> Features of this rank's pairs
--losses.gather, with gradient--> Features of the global batch --model.loss--> scalar --> AdamW

W processes compute what one would, dropout masks aside: the global batch is a function of (seed,
epoch, step), every rank takes the full-batch loss, DDP's mean of the gradients is one process's.
Not here on purpose: gradient accumulation. It adds no negatives to a contrastive loss, so it is not
training with a large batch; `chunk_size` gives exactly that in the memory of a small one.
"""
# settings: configurator.py reads them from this text, puts the config file and --key=value over
# them, and the code below uses cfg.<name>; a model's own settings stand in its dataclass
out_dir = 'out/run'      # the run's directory: checkpoints, log.jsonl, metrics.json
model = 'mars'           # which method: one of MODELS
resume = False           # go on from out_dir/latest if it is there; else an existing run is refused
# data
data = 'data/demo'       # folder with {train,val,test}.jsonl, made by its prepare.py
video_root = ''          # folder the annotations' video paths start from; empty: <data>/videos
paragraph = False        # join a video's captions to one text (DiDeMo, ActivityNet)
train_split = 'train'    # <data>/<train_split>.jsonl is trained on
val_split = 'val'        # the split that picks `best`
select_on_test = False   # must be true to let val_split be 'test': optimistic numbers
sampler = 'uniform'      # how frames are picked in time, see video.py: uniform, fps3, first30, ...
reader = 'pyav'          # what decodes: pyav, or decord, which refuses what it would get wrong
frame_size = 0           # resize the shorter side of decoded frames to this; 0: as they are
frame_cache = ''         # folder for decoded frames: each video is decoded once; empty: every time
cache_vision = ''        # folder for what the frozen vision tower makes of each video, once; or ''
on_bad_video = 'raise'   # an unreadable video: 'raise' stops, 'skip' takes the next pair and counts
min_decoded = 0.9        # a video is unreadable if a smaller share of it decodes, else `partial`
video_timeout = 60.0     # or if decoding takes longer, in seconds; 0: wait for ever
num_workers = 4          # loader processes per rank; 0 loads in the training process
# optimization
batch_size = 320         # pairs in the global batch, over all processes: each has 319 negatives
chunk_size = 0           # pairs per forward in a process; 0: all, else the two-pass exact gradient
epochs = 5
warmup_epochs = 1.0      # linear, then cosine to zero, both per iteration (MARS: decay unstated)
learning_rate = 2e-4
beta1 = 0.9
beta2 = 0.95
adam_eps = 1e-8
weight_decay = 0.05      # none on 1-D tensors and on what the model's no_decay names
grad_clip = 1.0          # largest norm of the gradient (not in the paper); 0: no clipping
seed = 0
max_steps = 0            # stop there, schedule and validations (each epoch) unchanged; 0: never
# evaluation, checkpoints, logs
select_metric = 'SumR'   # what `best` maximises on val_split: SumR, or t2v/R@1 and the like
eval_batch_size = 64     # items per forward in evaluation
save_every = 0           # steps between checkpoints besides the one per epoch; 0: only those
log_every = 10           # steps between log lines
dtype = 'auto'           # frozen weights, autocast: float32, bfloat16; auto: bfloat16 on a GPU
device = 'auto'          # cuda or cpu; auto: a GPU if there is one
wandb = False            # also log to Weights & Biases, which is imported only then
wandb_project = 'nanotvr'
# what it will need, see plan.py
plan = False             # print parameters and memory per GPU and end; wants no weights and no data
plan_gpus = 0            # plan for so many processes; 0: torchrun's number, else 2
# end of settings

# a method is a file with a dataclass of settings and a class; one more is one more line
MODELS = {
    'mars': ('model_mars.py', 'MARSConfig', 'MARS'),
    'pha': ('model_pha.py', 'PHAConfig', 'PHANet'),
    'slq': ('model_slq.py', 'SLQConfig', 'SLQ'),
}
SETTINGS = {name: (file, config) for name, (file, config, _) in MODELS.items()}

import importlib
import json
import math
import os
import re
import signal
import time
from dataclasses import fields
from functools import partial
from glob import escape, glob

from configurator import at_once, configure, one_line_errors

# -----------------------------------------------------------------------------
# what can be known to be wrong before anything is loaded

def check_settings(cfg, world):
    """Whatever can be known to be wrong before anything is loaded. -> find_run's answer"""
    from data import check_names, find_annotations  # numpy is imported, torch is not
    if cfg.batch_size % world:
        raise ValueError(f"batch_size {cfg.batch_size} is the global batch, and {world} processes "
                         "can't share it evenly")
    if cfg.val_split == 'test' and not cfg.select_on_test:
        raise ValueError("val_split is 'test': a checkpoint picked on the test split has "
                         "optimistic numbers; use a validation split, or say --select_on_test=true")
    if cfg.warmup_epochs > cfg.epochs > 0:
        raise ValueError(f"warmup_epochs {cfg.warmup_epochs} is more than epochs {cfg.epochs}")
    for key in ('beta1', 'beta2'):
        if not 0 <= getattr(cfg, key) < 1:
            raise ValueError(f"{key} is {getattr(cfg, key)} and must be at least 0 and below 1")
    if cfg.seed >= 2 ** 31:
        raise ValueError(f"seed is {cfg.seed} and must be below 2^31")
    place = os.path.abspath(cfg.out_dir)
    while not os.path.lexists(place):  # it, or the first of its parents that is there
        place = os.path.dirname(place)
    if not cfg.out_dir or not os.path.isdir(place):
        what = f": {place} is a {'link to nothing' if os.path.islink(place) else 'file'}"
        raise ValueError(f"out_dir '{cfg.out_dir}' is no folder, and can't become one"
                         + (what if cfg.out_dir else ""))
    lowest = {'log_every': 1, 'eval_batch_size': 1, 'batch_size': 2}
    for key in ('epochs', 'warmup_epochs', 'chunk_size', 'num_workers', 'save_every', 'max_steps',
                'grad_clip', 'weight_decay', 'learning_rate', 'adam_eps', 'frame_size', 'seed',
                'min_decoded', 'video_timeout', 'plan_gpus', *lowest):
        if not lowest.get(key, 0) <= getattr(cfg, key) < math.inf:
            raise ValueError(f"{key} is {getattr(cfg, key)}, the least is {lowest.get(key, 0)}")
    if cfg.min_decoded > 1:
        raise ValueError(f"min_decoded is {cfg.min_decoded}, a share of frames is at most 1")
    check_names(cfg.sampler, cfg.reader)
    more_is_better = dict.fromkeys(('R@1', 'R@5', 'R@10', 'RSum'), 0)
    pick({'t2v': more_is_better, 'v2t': more_is_better, 'SumR': 0}, cfg.select_metric)
    if cfg.plan:
        return False
    started = find_run(cfg.out_dir, cfg.resume)
    for split in (cfg.train_split, cfg.val_split):
        find_annotations(os.path.join(cfg.data, f'{split}.jsonl'))
    return started


def find_run(out_dir, resume):
    """
    What to resume in out_dir: 'latest', or without that link (some copies drop links) the newest
    checkpoint; False if there is no run. An error unless the run can be, and is to be, resumed.
    """
    links = [os.path.join(out_dir, name) for name in ('latest', 'best')]
    steps = sorted((p for p in glob(os.path.join(escape(out_dir), 'step_*'))
                    if re.fullmatch(r'step_\d{6,}', os.path.basename(p))),
                   key=lambda p: int(p.rpartition('_')[2]))
    if not steps and not any(map(os.path.lexists, links)):
        return False
    if not resume:
        raise FileExistsError(f"{out_dir} already holds a run; --resume goes on with it, "
                              "or choose another --out_dir")
    whole = [os.path.basename(p) for p in steps if all(
        os.path.isfile(os.path.join(p, f))
        for f in ('config.json', 'model.safetensors', os.path.join('state', 'state.pt')))]
    for link in links:
        if os.path.lexists(link) and not os.path.islink(link):
            how = f"`rm -r {link}` (--resume then takes {whole[-1]})" if whole else \
                "use another --out_dir"
            raise ValueError(f"{link} is no link to a step_* folder, as of a copy that followed "
                             f"links: copy it again with cp -a or rsync -a, or {how}")
    if os.path.lexists(links[0]):
        return 'latest'
    if not whole:
        raise ValueError(f"{out_dir} holds a run without `latest` and without a complete step_* "
                         "folder: nothing to resume; restore them, or use another --out_dir")
    return whole[-1]


def pick(result, name):
    """'SumR' or 't2v/R@1' out of an evaluation's result."""
    for key in name.split('/'):
        if not isinstance(result, dict) or key not in result:
            raise ValueError(f"select_metric '{name}' is no metric; use SumR, t2v/R@1, ...")
        result = result[key]
    if isinstance(result, dict):
        raise ValueError(f"select_metric '{name}' is several numbers; use for example {name}/R@1")
    return result


def configured():
    """The settings of the command line, checked."""
    cfg = configure(__file__, models=SETTINGS)
    check_settings(cfg, world_of(cfg))
    return cfg


def world_of(cfg):
    world = int(os.environ.get('WORLD_SIZE', 1))
    return (cfg.plan_gpus or (world if world > 1 else 2)) if cfg.plan else world


if __name__ == '__main__':  # before torch is imported: --help, typos, missing files answer at once
    cfg = at_once(configured)

import torch
import torch.distributed as dist
from tqdm import tqdm

import backbones
import data as datalib
import losses
import vision_cache
from checkpoint import (Log, describe, fingerprint, load_checkpoint, lock, point, restore_best,
                        save_checkpoint, write_atomic)

# -----------------------------------------------------------------------------
# processes, devices, model

def init_distributed(device='auto'):
    """(rank, world, torch device); joins torchrun's group: nccl on GPUs, gloo on CPUs."""
    if device not in ('auto', 'cpu', 'cuda'):
        raise ValueError(f"device is '{device}' and must be auto, cpu or cuda")
    use_cuda = device == 'cuda' or (device == 'auto' and torch.cuda.is_available())
    if use_cuda and not torch.cuda.is_available():
        raise ValueError("device is 'cuda' and torch finds no GPU here; use --device=cpu")
    if 'RANK' not in os.environ:
        return 0, 1, torch.device('cuda' if use_cuda else 'cpu')
    rank, world, local = (int(os.environ[k]) for k in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK'))
    if use_cuda:
        if local >= torch.cuda.device_count():
            raise ValueError(f"process {local} of this machine has no GPU of its own, there are "
                             f"{torch.cuda.device_count()}; lower --nproc_per_node")
        torch.cuda.set_device(local)
    if not dist.is_initialized():
        dist.init_process_group('nccl' if use_cuda else 'gloo')
    return rank, world, torch.device('cuda', local) if use_cuda else torch.device('cpu')


def torch_dtype(cfg, device):
    """The dtype of the frozen weights and of autocast."""
    if cfg.dtype not in ('auto', 'bfloat16', 'float32'):
        raise ValueError(f"dtype is '{cfg.dtype}' and must be auto, bfloat16 or float32")
    if cfg.dtype == 'auto':
        return torch.bfloat16 if device.type == 'cuda' else torch.float32
    return getattr(torch, cfg.dtype)


def autocast_of(cfg, device):
    """A context for encoding; losses and similarities stay fp32 outside of it."""
    half = torch_dtype(cfg, device) == torch.bfloat16
    return partial(torch.autocast, device.type, dtype=torch.bfloat16, enabled=half)


def build_model(cfg, device):
    """The method cfg.model with its settings, on `device`, its trainable parts as initialised."""
    file, config_name, class_name = MODELS[cfg.model]
    module = importlib.import_module(file.removesuffix('.py'))
    config_class, model_class = getattr(module, config_name), getattr(module, class_name)
    config = config_class(**{f.name: getattr(cfg, f.name) for f in fields(config_class)})
    torch.manual_seed(cfg.seed)  # the same start on every rank
    # a frozen backbone may be in bf16, one that is trained says otherwise
    dtype = getattr(model_class, 'backbone_dtype', torch_dtype(cfg, device))
    max_pixels = config.max_pixels if hasattr(config, 'max_pixels') else 0
    backbone = backbones.load(config.backbone, max_pixels, dtype=dtype)
    return model_class(config, backbone).to(device)


def tell_cost(model, cfg, say):
    """What a widescreen video costs in LLM tokens, where there is an LLM."""
    if hasattr(model.backbone, 'cost'):
        height = cfg.frame_size or 360
        say(model.backbone.cost(cfg.num_frames, height, round(height * 16 / 9)))


def unwrap(model):
    return model.module if hasattr(model, 'module') else model


def to_device(x, device):
    if isinstance(x, dict):
        return {k: to_device(v, device) for k, v in x.items()}
    return x.to(device, non_blocking=True) if torch.is_tensor(x) else x


# -----------------------------------------------------------------------------
# one step

def collate_chunks(samples, collate, chunk_size):
    """A rank's B pairs -> [inputs of a chunk, ...], ids [B], names. Padding is per chunk."""
    n = chunk_size or len(samples)
    chunks = [collate(samples[i:i + n]) for i in range(0, len(samples), n)]
    return chunks, torch.tensor([s.index for s in samples]), [s.id for s in samples]


def global_loss(model, text, video, ids):
    """The loss of the global batch, the same on every rank, from this rank's Features."""
    text = {k: losses.gather(v) for k, v in text.items()}    # [B, ...] -> [W*B, ...]
    video = {k: losses.gather(v) for k, v in video.items()}  # [B, ...] -> [W*B, ...]
    return model.loss(text, video, losses.gather_ids(ids))


def plain_step(model, chunk, ids, autocast):
    """Gradients of the full-batch loss, the textbook way. -> loss, logs"""
    with autocast():
        text, video = model(chunk)
    loss, logs = global_loss(unwrap(model), text, video, ids)
    loss.backward()
    return loss.detach(), logs


def cached_step(model, chunks, ids, autocast):
    """
    The same gradients, holding the activations of one chunk at a time (gradient cache).

    Pass 1 encodes all chunks without a graph. The loss of the whole batch gives dL/d(feature) for
    every item. Pass 2 encodes chunk after chunk once more, with the same dropout, and sends those
    feature gradients through: by the chain rule their sum over chunks is dL/d(parameter). Exact,
    for the price of one more forward.
    """
    bare, params = unwrap(model), [p for p in model.parameters() if p.requires_grad]
    states, encoded = [], []
    with torch.no_grad(), autocast():
        for chunk in chunks:
            states.append(rng_state(ids.device))
            encoded.append(bare(chunk))
    # leaves: detached features of this rank's B pairs, [B, ...] each
    text, video = ({k: torch.cat([f[k] for f in side]).requires_grad_() for k in side[0]}
                   for side in zip(*encoded))
    leaves = [*text.values(), *video.values()]
    loss, logs = global_loss(bare, text, video, ids)
    # autograd.grad, not backward: DDP must see a parameter once, in the last chunk's backward.
    # Parameters that the loss itself uses (a learned gamma, slot weights) get a gradient here, the
    # encoders' get None
    grads = torch.autograd.grad(loss, leaves + params, allow_unused=True)
    direct = [(p, g) for p, g in zip(params, grads[len(leaves):]) if g is not None]
    # feature gradients cut as the chunks are: by_chunk[leaf of key k][i] belongs to chunk i
    sizes = [len(next(iter(chunk_text.values()))) for chunk_text, _ in encoded]
    by_chunk = [g.split(sizes) if g is not None else None for g in grads[:len(leaves)]]
    text_grads = dict(zip(text, by_chunk))                # {key: [gradient per chunk] or None}
    video_grads = dict(zip(video, by_chunk[len(text):]))

    for i, (chunk, state) in enumerate(zip(chunks, states)):
        last = i == len(chunks) - 1
        if model is not bare:
            model.require_backward_grad_sync = last  # DDP reads it in forward: set before that
        set_rng_state(state, ids.device)  # the last chunk leaves it where pass 1 did
        with autocast():
            features = model(chunk)
        # the gradient of <feature, constant g> is g pulled back through the encoder
        surrogate = sum((side[k] * g[k][i]).sum()
                        for side, g in zip(features, (text_grads, video_grads))
                        for k in side if g[k] is not None)
        if last:  # what the loss itself sends to parameters, in the one backward that DDP watches
            surrogate = surrogate + sum((p * g).sum() for p, g in direct)
        surrogate.backward()
    return loss.detach(), logs


def rng_state(device):
    cuda = torch.cuda.get_rng_state(device) if device.type == 'cuda' else None
    return torch.get_rng_state(), cuda


def set_rng_state(state, device):
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)


def check_finite(loss, norm, step, chunks, names, model, autocast):
    """FloatingPointError, on all ranks alike, at a loss or gradient that is not finite."""
    if math.isfinite(loss) and math.isfinite(norm):
        return
    bad, start = [], 0
    unwrap(model).eval()
    with torch.no_grad(), autocast():
        for chunk in chunks:  # which items are to blame? their own features tell
            for side in unwrap(model)(chunk):
                for v in side.values():
                    rows = (~v.flatten(1).isfinite()).any(1).nonzero().flatten().tolist()
                    bad += [names[start + r] for r in rows if names[start + r] not in bad]
            start += len(v)
    where = f"features are not finite for {bad[:8]}" if bad else f"the batch starts {names[:8]}"
    raise FloatingPointError(
        f"step {step}: loss {loss}, gradient norm {norm}; this step changed nothing and the last "
        f"good checkpoint stands in latest/; {where}")


# -----------------------------------------------------------------------------
# schedule and optimizer

def lr_at(step, per_epoch, cfg):
    """Linear warmup over warmup_epochs, then cosine to zero; the first step (0) already moves."""
    total, warmup = cfg.epochs * per_epoch, cfg.warmup_epochs * per_epoch
    if step < warmup:
        return cfg.learning_rate * min(1, (step + 1) / warmup)
    done = (step - warmup) / max(total - warmup, 1)
    return cfg.learning_rate * 0.5 * (1 + math.cos(math.pi * done))


def make_optimizer(model, cfg, device):
    """
    AdamW, without decay and with another rate (times learning_rate) where the model says so. One
    clipping of the whole gradient comes before it (grad_clip), and Adam's bias correction is on:
    BertAdam, which CLIP4Clip and HBI use, clips each tensor once more and corrects nothing.
    """
    groups = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            scale = model.lr_scale(name) if hasattr(model, 'lr_scale') else 1.0
            decay = 0.0 if model.no_decay(name) else cfg.weight_decay
            groups.setdefault((scale, decay), []).append(p)
    groups = [{'params': params, 'weight_decay': decay, 'lr_scale': scale}
              for (scale, decay), params in groups.items()]
    return torch.optim.AdamW(groups, lr=cfg.learning_rate, betas=(cfg.beta1, cfg.beta2),
                             eps=cfg.adam_eps, fused=device.type == 'cuda')


# -----------------------------------------------------------------------------
# what can go wrong outside of the mathematics

def catch_signals():
    """
    Ctrl-C and SIGTERM end the run after its step, with a checkpoint; two Ctrl-C kill. torchrun
    passes them on and kills what still runs after 30 seconds, which save_every insures against.
    -> {'asked': was there one, 'code': what the process exits with then, as a shell has it}
    """
    stop = {'asked': False, 'code': 128 + signal.SIGTERM}

    def handler(number, frame):
        stop.update(asked=True, code=128 + number)
        if number == signal.SIGINT:  # a SIGTERM may well come twice, from a scheduler and torchrun
            signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)
    return stop


def any_rank(flag, device):
    """True on all ranks when true on one: ranks that leave at different steps hang each other."""
    if not dist.is_initialized():
        return flag
    value = torch.tensor([float(flag)], device=device)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return bool(value.item())


def tell_cut(cfg, long, device, say):
    """How many captions, of all ranks, were longer than the model reads; nothing if none was."""
    cut, of = long['cut'], long['of']
    if dist.is_initialized():
        counts = torch.tensor([cut, of], device=device)
        dist.all_reduce(counts)
        cut, of = counts.tolist()
    if cut:
        limit = next(f"{k}={getattr(cfg, k)}" for k in ('max_words', 'max_text_tokens')
                     if hasattr(cfg, k))
        say(f"note: {cut} of {of} captions were cut, {limit} is less than they have")


def timed(loader, clock, stop):
    """The loader's batches; clock['wait'] sums up the seconds spent waiting for them."""
    batches = iter(loader)
    while True:
        begun = time.time()
        try:
            batch = next(batches, None)
        except RuntimeError:  # SIGTERM to all processes took the workers too; a new loader goes on
            if not stop['asked']:
                raise
            return
        clock['wait'] += time.time() - begun
        if batch is None:
            return
        yield batch


# -----------------------------------------------------------------------------
# the run

def main(cfg):
    if cfg.plan:
        import plan  # it imports this file
        return plan.report(cfg, world_of(cfg))
    rank, world, device = init_distributed(cfg.device)
    say = print if rank == 0 else (lambda *a: None)
    started = check_settings(cfg, world)
    if cfg.val_split == 'test':
        say("warning: `best` is picked on the test split, so its test numbers are optimistic")
    if cfg.val_split == cfg.train_split:
        say("warning: `best` is picked on the training split, where more training is always better")

    # ---- data
    root = cfg.video_root or os.path.join(cfg.data, 'videos')
    train_items, val_items = (
        datalib.load_annotations(os.path.join(cfg.data, f'{split}.jsonl'), paragraph=cfg.paragraph)
        for split in (cfg.train_split, cfg.val_split))
    shared = {i.video for i in train_items} & {i.video for i in val_items}
    if shared and cfg.val_split != cfg.train_split:
        say(f"warning: {len(shared)} videos of {cfg.val_split} are in {cfg.train_split} too, the "
            f"first is {min(shared)!r}: `best` is picked on what was trained on")
    if len(train_items) < 2:
        raise ValueError(f"{cfg.data}/{cfg.train_split}.jsonl has {len(train_items)} video: a "
                         "contrastive loss needs at least 2, the others are the negatives")
    pairs = datalib.Pairs(train_items, root, cfg.num_frames, **datalib.reading(cfg))
    per_epoch = len(pairs) // cfg.batch_size  # the last, shorter batch is dropped
    if per_epoch == 0:
        raise ValueError(f"{cfg.data}/{cfg.train_split}.jsonl has {len(pairs)} pairs, too few for "
                         f"one global batch of {cfg.batch_size}; lower batch_size")

    # ---- model
    autocast = autocast_of(cfg, device)
    model = build_model(cfg, device)
    if cfg.epochs and hasattr(model, 'check_trained'):  # epochs=0 saves the untrained model
        model.check_trained()
    pairs.clips.vision = vision_cache.attach(model, cfg)
    optimizer = make_optimizer(model, cfg, device)
    config_json = json.dumps(describe(
        cfg, world, torch_dtype(cfg, device), frozen=fingerprint(model),
        data={cfg.train_split: datalib.content(train_items),
              cfg.val_split: datalib.content(val_items)}), indent=1)
    if rank == 0:
        os.makedirs(cfg.out_dir, exist_ok=True)
        held = lock(cfg.out_dir)  # noqa: F841  until this function ends
        if find_run(cfg.out_dir, cfg.resume) != started:
            raise ValueError(f"another process trained in {cfg.out_dir} while this one started; "
                             "start it again")
    step, best = 0, None
    if started:
        step, best = load_checkpoint(cfg, model, optimizer, config_json, started)
        if world > 1:
            dist.barrier()  # the links change when all have read
        if rank == 0 and started != 'latest':
            point(cfg.out_dir, 'latest', started)
            say(f"note: {cfg.out_dir} has no link `latest`, its newest checkpoint {started} is "
                "taken")
        # a score to beat that no checkpoint stands for would leave the run without a `best`
        if any_rank(rank == 0 and not restore_best(cfg.out_dir, best), device):
            say(f"warning: the best checkpoint, of step {best['step']}, is gone from "
                f"{cfg.out_dir}; the next validation picks a new one")
            best = None
    say(config_json)
    for split, items in ((cfg.train_split, train_items), (cfg.val_split, val_items)):
        say(f"split {split}: {len(items)} videos, {sum(len(i.captions) for i in items)} captions")
    say(f"{world} process(es), {device.type}, {torch_dtype(cfg, device)}; global batch "
        f"{cfg.batch_size} pairs, {cfg.chunk_size or cfg.batch_size // world} per forward; "
        f"{cfg.epochs} epochs of {per_epoch} steps")
    say(model.summary())
    tell_cost(model, cfg, say)
    if rank == 0:
        write_atomic(os.path.join(cfg.out_dir, 'config.json'), config_json)
    log = Log(cfg, step if started else -1, quiet=rank != 0)
    train_model = model
    if world > 1:
        train_model = torch.nn.parallel.DistributedDataParallel(
            model, device_ids=[device.index] if device.type == 'cuda' else None,
            forward_sync_buffers=False)

    def save(validate):
        nonlocal best
        is_best = False
        if validate:
            import eval as evaluation  # the same code as `python eval.py`; it imports this file
            try:
                result = evaluation.evaluate(model, val_items, cfg, cfg.val_split, device, autocast)
            except BaseException:  # a bad validation video must not cost the epoch
                if rank == 0 and step:
                    save_checkpoint(cfg, model, optimizer, step, best, config_json, is_best=False)
                raise
            score = pick(result, cfg.select_metric)
            is_best = best is None or score > best['score']
            best = {'score': score, 'step': step} if is_best else best
            log({'step': step, 'split': cfg.val_split, 'n_text': result['n_text'],
                 'n_video': result['n_video'], 'T2V R@1': result['t2v']['R@1'],
                 'V2T R@1': result['v2t']['R@1'], 'SumR': result['SumR'], 'best': is_best})
        if rank == 0:
            save_checkpoint(cfg, model, optimizer, step, best, config_json, is_best)
        if world > 1:
            dist.barrier()

    # ---- loop
    total = cfg.epochs * per_epoch
    last = min(total, cfg.max_steps or total)
    if not started:
        save(validate=total == 0)  # from here on there is always something to come back to
    stop = catch_signals()
    collate = partial(collate_chunks, collate=model.collate, chunk_size=cfg.chunk_size)
    trained = [p for p in model.parameters() if p.requires_grad]
    long = {'cut': 0, 'of': 0}  # captions of this process's first epoch
    bar = tqdm(total=last, initial=min(step, last), disable=rank != 0, desc='train', unit='step')
    while step < last:
        epoch, at = divmod(step, per_epoch)
        batches = datalib.StepSampler(len(pairs), cfg.batch_size, cfg.seed, epoch, at, rank, world)
        loader = datalib.make_loader(pairs, batches, collate, cfg.num_workers)
        clock = {'start': time.time(), 'wait': 0.0, 'steps': 0}
        for chunks, ids, names in timed(loader, clock, stop):
            if long is not None:
                long['cut'] += sum(int(chunk['text']['cut'].sum()) for chunk in chunks
                                   if 'cut' in chunk['text'])
                long['of'] += len(names)
            with autocast():  # with cache_vision the tower runs here or not at all
                chunks = [vision_cache.fill_batch(model, to_device(c, device)) for c in chunks]
            ids = ids.to(device)
            model.train()
            # dropout is a function of (seed, step, rank): no state of it to restore on resuming
            torch.manual_seed((cfg.seed * 1_000_003 + step) * 1009 + rank)
            lr = lr_at(step, per_epoch, cfg)
            for group in optimizer.param_groups:
                group['lr'] = lr * group['lr_scale']
            if len(chunks) == 1:
                loss, logs = plain_step(train_model, chunks[0], ids, autocast)
            else:
                loss, logs = cached_step(train_model, chunks, ids, autocast)
            norm = torch.nn.utils.clip_grad_norm_(trained, cfg.grad_clip or math.inf)
            check_finite(loss.item(), norm.item(), step, chunks, names, model, autocast)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            clock['steps'] += 1
            bar.update()
            bar.set_postfix(loss=f'{loss.item():.3f}', refresh=False)
            if step % cfg.log_every == 0 or step == last:
                spent = time.time() - clock['start']
                log({'step': step, 'epoch': round(step / per_epoch, 3), 'loss': loss.item(),
                     **{k: float(v) for k, v in logs.items()}, 'lr': lr, 'grad_norm': norm.item(),
                     # means since the epoch (or a resumed part of it) began
                     's/step': spent / clock['steps'], 'waiting': clock['wait'] / spent})
            epoch_end, stopped = step % per_epoch == 0, any_rank(stop['asked'], device)
            if long is not None and (epoch_end or step == last):
                tell_cut(cfg, long, device, tqdm.write if rank == 0 else say)
                long = None  # the other epochs have the same captions
            if epoch_end or step == last or stopped or step % (cfg.save_every or total) == 0:
                # a run cut short by max_steps in its first epoch has no `best` yet
                save(validate=epoch_end or (step == last and best is None))
            if stopped:
                bar.close()
                say(f"stopped by a signal; step {step} is saved, --resume goes on from there")
                return stop['code'] if step < last else 0  # `train && eval` must not go on
            if step == last:
                break
    bar.close()
    skipped = pairs.clips.skipped()
    if world > 1:
        everyone = [None] * world
        dist.all_gather_object(everyone, skipped)
        skipped = sorted(set(sum(everyone, [])))
    if skipped:
        say(f"skipped {len(skipped)} unreadable training videos: {', '.join(skipped[:8])}"
            f"{' ...' if len(skipped) > 8 else ''}; {cfg.out_dir}/bad_videos.tsv says why")
    following = f"next: python eval.py --ckpt {cfg.out_dir}"
    if best is None:  # a run that was stopped in its first epoch and now goes no further
        say(f"done: {step} steps, and there is no `best`; {following} --which=latest")
    else:
        lost = not os.path.exists(os.path.join(cfg.out_dir, 'best'))
        say(f"done: {step} steps, best {cfg.select_metric} on {cfg.val_split} {best['score']:.2f} "
            f"at step {best['step']}{', which is gone' * lost}; {following}"
            f"{' --which=latest' * lost}")


if __name__ == '__main__':
    code = one_line_errors(lambda: main(cfg))
    if dist.is_initialized():  # not after an error: other ranks may wait in a collective
        dist.destroy_process_group()
    raise SystemExit(code)
