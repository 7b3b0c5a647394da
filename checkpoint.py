"""
A run's directory, written by train.py and read by eval.py.

    config.json            resolved settings and versions: all that a later evaluation needs
    log.jsonl              one line per log step and per validation
    .lock                  locked while a process trains here
    metrics.json           what eval.py measured, per split
    step_000123/           a checkpoint: config.json once more,
        model.safetensors    every trainable tensor and nothing frozen
        adapter/             the LoRA part again, in PEFT's own layout
        state/state.pt       optimizer and step, loadable with weights_only
    latest -> step_000123, best -> step_000094

Everything is written under a temporary name and renamed, and a link is replaced in one system call:
a kill at any moment leaves the old or the new, never half of one.
"""
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tqdm import tqdm

# what may differ when a run is resumed: none of it changes what is computed, beyond rounding and
# (chunk_size, as the number of processes) which random masks dropout draws
MAY_CHANGE = {'resume', 'out_dir', 'max_steps', 'save_every', 'log_every', 'num_workers', 'device',
              'eval_batch_size', 'frame_cache', 'cache_vision', 'video_root', 'chunk_size', 'wandb',
              'wandb_project', 'plan', 'plan_gpus'}


LEFT_BY_A_KILL = re.compile(r'(\.(step_\d+|latest|best)|config\.json|log\.jsonl)\.\d+\.tmp')


def write_atomic(path, text):
    """Text into a file that is complete or absent."""
    temporary = f'{path}.{os.getpid()}.tmp'
    try:
        with open(temporary, 'w', encoding='utf-8') as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except OSError as e:  # a full disk's has no file name
        remove(temporary)
        raise OSError(f"can't write {path}: {e.strerror or e}; mend that and run it again") from e


def remove(path):
    """A folder, file or link; of a link not what it points to."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    elif os.path.lexists(path):
        os.remove(path)


def point(out_dir, name, target):
    """The link out_dir/name -> target, new or replaced."""
    temporary = os.path.join(out_dir, f'.{name}.{os.getpid()}.tmp')
    remove(temporary)
    os.symlink(target, temporary)
    os.replace(temporary, os.path.join(out_dir, name))


def save_checkpoint(cfg, model, optimizer, step, best, config_json, is_best):
    """
    Writes the folder of this step, points `best` (if it is) and `latest` to it, removes what
    neither points to. One process only.
    """
    name = f'step_{step:06d}'
    folder = os.path.join(cfg.out_dir, name)
    if os.path.realpath(folder) not in linked(cfg.out_dir):
        remove(folder)  # nothing points to it: half removed, or of a run that died before it began
        temporary = os.path.join(cfg.out_dir, f'.{name}.{os.getpid()}.tmp')
        remove(temporary)
        try:
            write_checkpoint(temporary, model, optimizer, step, best, config_json)
            os.rename(temporary, folder)
        except (OSError, RuntimeError, SafetensorError) as e:  # a full disk is all of these
            remove(temporary)  # or it would keep the disk full
            stands = "the last good checkpoint stands in latest/; " if linked(cfg.out_dir) else ""
            raise OSError(f"can't save {folder} ({(str(e).splitlines() or [''])[0]}); {stands}make "
                          "sure that there is disk space, then --resume goes on") from e
    # `best` first: a run killed between the two comes here once more. The other way round it would
    # go on from a state that names a best step to which no link points
    if is_best:
        point(cfg.out_dir, 'best', name)
    else:
        restore_best(cfg.out_dir, best)  # what no link points to is removed below
    point(cfg.out_dir, 'latest', name)
    for entry in os.listdir(cfg.out_dir):
        path = os.path.join(cfg.out_dir, entry)
        # only names that this file gives: whatever else lies in the folder is somebody's own
        if LEFT_BY_A_KILL.fullmatch(entry) or (
                re.fullmatch(r'step_\d{6,}', entry)
                and os.path.realpath(path) not in linked(cfg.out_dir)):
            remove(path)


def write_checkpoint(folder, model, optimizer, step, best, config_json):
    os.makedirs(os.path.join(folder, 'state'))
    save_file({k: v.contiguous() for k, v in trainable_state(model).items()},
              os.path.join(folder, 'model.safetensors'))
    if hasattr(model, 'save_adapter'):
        model.save_adapter(os.path.join(folder, 'adapter'))
    # sample order and dropout are functions of (seed, step), so the step is the data position
    # and the RNG state. Nothing but tensors, numbers and strings: weights_only can read it
    torch.save({'optimizer': optimizer.state_dict(), 'step': step, 'best': best},
               os.path.join(folder, 'state', 'state.pt'))
    write_atomic(os.path.join(folder, 'config.json'), config_json)


def restore_best(out_dir, best):
    """
    A lost link `best` (some copies drop links) is made anew from `best`, {"score", "step"} or None.
    -> does it stand, or is there none to stand
    """
    if best is None or os.path.exists(os.path.join(out_dir, 'best')):
        return True
    name = f"step_{best['step']:06d}"
    if not os.path.isdir(os.path.join(out_dir, name)):
        return False
    point(out_dir, 'best', name)
    return True


def lock(out_dir):
    """
    OSError when another process trains in out_dir. The file that is returned holds the lock for as
    long as it is open; the kernel releases it with the process, whatever ends that.
    """
    file = open(os.path.join(out_dir, '.lock'), 'a')
    try:
        import fcntl
        # a record lock: unlike flock's it isn't inherited by the loader's workers, which outlive a
        # killed run by some seconds
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.close()
        raise OSError(f"another process is training in {out_dir}: wait for its end, or use another "
                      "--out_dir") from None
    except (ImportError, OSError):  # Windows, or a file system without locks: go on unprotected
        pass
    return file


def trainable_state(model):
    """{name: tensor} of every trained parameter, nothing frozen: what model.safetensors holds."""
    return {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}


def load_trainable(model, state):
    """trainable_state's reverse; ValueError, with nothing changed, unless the two fit exactly."""
    own = trainable_state(model)
    wrong = [f"{what} {len(names)} tensors (first: {sorted(names)[0]})" for what, names in
             (('lacks', own.keys() - state.keys()), ('has unknown', state.keys() - own.keys()))
             if names]
    wrong += [f"{n} is {tuple(state[n].shape)}, the model's is {tuple(own[n].shape)}"
              for n in own if n in state and state[n].shape != own[n].shape][:1]
    if wrong:
        raise ValueError(f"checkpoint does not fit this {type(model).__name__}: it "
                         f"{'; it '.join(wrong)}; use the settings and the backbone it was trained "
                         "with")
    for name, p in own.items():
        p.copy_(state[name])


def linked(out_dir):
    """The real paths that `latest` and `best` point to, however somebody spelled the links."""
    links = (os.path.join(out_dir, name) for name in ('latest', 'best'))
    return {os.path.realpath(link) for link in links if os.path.islink(link)}


def read(path, reader, instead='point latest to another step_* folder, or use another --out_dir'):
    """reader(path); ValueError naming the file, whatever is wrong with it, and what to do instead
    of restoring it."""
    try:
        return reader(path)
    except Exception as e:  # those of json, safetensors, zip and pickle share no base class
        reason = (str(e).splitlines() or [''])[0].split('. ')[0]
        raise ValueError(f"can't read {path} ({type(e).__name__}: {reason}); restore it, "
                         f"{instead}") from None


def read_json(path):
    with open(path, encoding='utf-8') as f:
        return json.load(f)


def check_finite(path, tensors):
    """ValueError naming the first of {name: tensor} that is not finite: training can't mend it."""
    for name, x in tensors.items():
        if torch.is_tensor(x) and not x.isfinite().all():
            raise ValueError(f"{path}: {name} is not finite, nothing can be trained from there; "
                             "point latest to another step_* folder, or use another --out_dir")


def fingerprint(model):
    """
    16 digits that tell one set of frozen weights from another, by 64 values of each tensor. Rounded
    to bf16, as they may be loaded, and without names, which change with the library's version.
    """
    tensors = []
    for p in model.parameters():
        if not p.requires_grad and p.numel():
            some = p.detach().flatten()[::max(1, p.numel() // 64)][:64].bfloat16().float().cpu()
            tensors.append(hashlib.sha256(some.numpy().tobytes()).digest())
    return hashlib.sha256(b''.join(sorted(tensors))).hexdigest()[:16]


def check_backbone(model, config, file):
    """ValueError unless the frozen weights are those that config.json says the run had."""
    old, new = config.get('frozen'), fingerprint(model)
    if old not in (None, new):  # None: a run older than this check
        raise ValueError(f"{file}: the run was trained on another backbone than lies in "
                         f"{config['settings'].get('backbone')!r} or where --backbone says (frozen "
                         f"weights {old}, these are {new}); give it the one it had")


def load_checkpoint(cfg, model, optimizer, config_json, name='latest'):
    """
    out_dir/<name> into model and optimizer -> (step, best). No code in the files is executed.
    ValueError when the run was started with settings, annotations or a backbone that compute
    something else.
    """
    folder = os.path.join(cfg.out_dir, name)
    file = os.path.join(folder, 'config.json')
    def with_precision(run):
        return {**run['settings'], 'precision': run.get('precision')}, run.get('world')

    old_run, new_run = read(file, read_json), json.loads(config_json)
    (old, old_world), (new, new_world) = read(file, lambda _: with_precision(old_run)), \
        with_precision(new_run)
    differ = [f"{k} = {old.get(k)!r}, now {new.get(k)!r}" for k in sorted(old.keys() | new.keys())
              if k not in MAY_CHANGE and old.get(k) != new.get(k)]
    if differ:
        raise ValueError(f"{cfg.out_dir} was started with other settings ({'; '.join(differ)}): "
                         "set them back to resume, or use another --out_dir")
    for split, had in old_run.get('data', {}).items():
        has = new_run.get('data', {}).get(split)
        if has not in (None, had):
            raise ValueError(f"{cfg.data}/{split}.jsonl has changed since {cfg.out_dir} was "
                             f"started: {had}, now {has}; restore it to resume, or use another "
                             "--out_dir")
    check_backbone(model, old_run, file)
    if old_world != new_world:
        print(f"note: begun by {old_world} process(es), resumed by {new_world}: "
              "the same batches and losses, other dropout masks", file=sys.stderr)
    weights_file, state_file = (os.path.join(folder, *parts) for parts in
                                (('model.safetensors',), ('state', 'state.pt')))
    tensors = read(weights_file, load_file)
    def parts(path):
        state = torch.load(path, map_location='cpu', weights_only=True)
        return state['optimizer'], int(state['step']), state['best']

    optimizer_state, step, best = read(state_file, parts)
    check_finite(weights_file, tensors)
    check_finite(state_file, {f"{key} of parameter {i}": x for i, moments in
                              optimizer_state['state'].items() for key, x in moments.items()})
    load_trainable(model, tensors)
    optimizer.load_state_dict(optimizer_state)
    return step, best


def describe(cfg, world=1, dtype=torch.float32, **identity):
    """
    What config.json holds: {"settings", "versions", "world": processes, "precision"}, and of a real
    run "frozen", the fingerprint of its backbone, and "data", {split: what was in it}.
    """
    import peft
    import transformers
    here = os.path.dirname(os.path.abspath(__file__))
    try:
        git = subprocess.run(['git', 'rev-parse', 'HEAD'], capture_output=True, text=True, cwd=here)
        commit = git.stdout.strip() or 'unknown'
    except OSError:  # no git on this machine
        commit = 'unknown'
    versions = {'python': platform.python_version(), 'torch': torch.__version__,
                'transformers': transformers.__version__, 'peft': peft.__version__,
                'commit': commit}
    return {'settings': dict(sorted(vars(cfg).items())), 'versions': versions, 'world': world,
            'precision': str(dtype).removeprefix('torch.'), **identity}


class Log:
    """log.jsonl, the screen, and wandb when asked; a failing wandb never stops training."""

    def __init__(self, cfg, step, quiet):
        """Keeps the lines up to `step`: a killed run may have logged more than it saved."""
        self.path, self.quiet, self.wandb = os.path.join(cfg.out_dir, 'log.jsonl'), quiet, None
        if quiet:
            return
        if os.path.exists(self.path):
            with open(self.path, encoding='utf-8', errors='replace') as f:
                lines = [line for line in f if self.step_of(line) <= step]
            write_atomic(self.path, ''.join(lines))
        if cfg.wandb:
            try:
                import wandb
                self.wandb = wandb.init(project=cfg.wandb_project, config=vars(cfg),
                                        dir=cfg.out_dir)
            except Exception as e:  # whatever a logging service does, training goes on
                tqdm.write(f"warning: wandb is off in this run: {e!r}", file=sys.stderr)

    @staticmethod
    def step_of(line):
        try:
            return float(json.loads(line)['step'])
        except (ValueError, KeyError, TypeError):  # cut short by a kill
            return float('inf')

    def __call__(self, row):
        """row: {"step": ..., ...} of numbers and strings."""
        if self.quiet:
            return
        try:
            with open(self.path, 'a', encoding='utf-8') as f:
                f.write(json.dumps(row) + '\n')
        except OSError as e:  # a full disk's has no file name
            raise OSError(f"can't write {self.path}: {e.strerror or e}; mend that, then --resume "
                          "goes on from the last checkpoint") from e
        tqdm.write('  '.join(f'{k} {v:.4g}' if isinstance(v, float) else f'{k} {v}'
                             for k, v in row.items()))
        if self.wandb is not None:
            try:
                self.wandb.log(row, step=row['step'])
            except Exception as e:
                tqdm.write(f"warning: wandb failed and is off from here: {e!r}", file=sys.stderr)
                self.wandb = None
