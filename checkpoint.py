"""
A run's directory, written by train.py and read by eval.py.

    config.json            resolved settings and versions: all that a later evaluation needs
    log.jsonl              one line per log step and per validation
    metrics.json           what eval.py measured, per split
    step_000123/           a checkpoint: config.json once more,
        model.safetensors    every trainable tensor and nothing frozen
        adapter/             the LoRA part again, in PEFT's own layout
        state/state.pt       optimizer and step, loadable with weights_only
    latest -> step_000123, best -> step_000094

Everything is written under a temporary name and renamed, and a link is replaced in one system call:
a kill at any moment leaves the old or the new, never half of one.
"""
import json
import os
import platform
import re
import shutil
import subprocess
import sys

import torch
from safetensors.torch import load_file, save_file
from tqdm import tqdm

# what may differ when a run is resumed: none of it changes what is computed, beyond rounding and
# (chunk_size, as the number of processes) which random masks dropout draws
MAY_CHANGE = {'resume', 'out_dir', 'max_steps', 'save_every', 'log_every', 'num_workers', 'device',
              'eval_batch_size', 'frame_cache', 'video_root', 'chunk_size', 'wandb',
              'wandb_project'}


LEFT_BY_A_KILL = re.compile(r'(\.(step_\d+|latest|best)|config\.json|log\.jsonl)\.\d+\.tmp')


def write_atomic(path, text):
    """Text into a file that is complete or absent."""
    temporary = f'{path}.{os.getpid()}.tmp'
    with open(temporary, 'w', encoding='utf-8') as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, path)


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
    if folder not in linked(cfg.out_dir):
        remove(folder)  # nothing points to it: half removed, or of a run that died before it began
        temporary = os.path.join(cfg.out_dir, f'.{name}.{os.getpid()}.tmp')
        remove(temporary)
        os.makedirs(os.path.join(temporary, 'state'))
        save_file({k: v.contiguous() for k, v in trainable_state(model).items()},
                  os.path.join(temporary, 'model.safetensors'))
        if hasattr(model, 'save_adapter'):
            model.save_adapter(os.path.join(temporary, 'adapter'))
        # sample order and dropout are functions of (seed, step), so the step is the data position
        # and the RNG state. Nothing but tensors, numbers and strings: weights_only can read it
        torch.save({'optimizer': optimizer.state_dict(), 'step': step, 'best': best},
                   os.path.join(temporary, 'state', 'state.pt'))
        write_atomic(os.path.join(temporary, 'config.json'), config_json)
        os.rename(temporary, folder)
    # `best` first: a run killed between the two comes here once more. The other way round it would
    # go on from a state that names a best step to which no link points
    if is_best:
        point(cfg.out_dir, 'best', name)
    point(cfg.out_dir, 'latest', name)
    for entry in os.listdir(cfg.out_dir):
        path = os.path.join(cfg.out_dir, entry)
        # only names that this file gives: whatever else lies in the folder is somebody's own
        if LEFT_BY_A_KILL.fullmatch(entry) or (
                re.fullmatch(r'step_\d{6,}', entry) and path not in linked(cfg.out_dir)):
            remove(path)


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
    """The folders that `latest` and `best` point to."""
    links = (os.path.join(out_dir, name) for name in ('latest', 'best'))
    return {os.path.join(out_dir, os.readlink(link)) for link in links if os.path.islink(link)}


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


def load_checkpoint(cfg, model, optimizer, config_json):
    """
    out_dir/latest into model and optimizer -> (step, best). No code in the files is executed.
    ValueError when the run was started with settings that compute something else.
    """
    folder = os.path.join(cfg.out_dir, 'latest')
    def with_precision(run):
        return {**run['settings'], 'precision': run.get('precision')}, run.get('world')

    old, old_world = read(os.path.join(folder, 'config.json'),
                          lambda path: with_precision(read_json(path)))
    new, new_world = with_precision(json.loads(config_json))
    differ = [f"{k} = {old.get(k)!r}, now {new.get(k)!r}" for k in sorted(old.keys() | new.keys())
              if k not in MAY_CHANGE and old.get(k) != new.get(k)]
    if differ:
        raise ValueError(f"{cfg.out_dir} was started with other settings ({'; '.join(differ)}): "
                         "set them back to resume, or use another --out_dir")
    if old_world != new_world:
        print(f"note: begun by {old_world} process(es), resumed by {new_world}: "
              "the same batches and losses, other dropout masks", file=sys.stderr)
    tensors = read(os.path.join(folder, 'model.safetensors'), load_file)
    def parts(path):
        state = torch.load(path, map_location='cpu', weights_only=True)
        return state['optimizer'], int(state['step']), state['best']

    optimizer_state, step, best = read(os.path.join(folder, 'state', 'state.pt'), parts)
    load_trainable(model, tensors)
    optimizer.load_state_dict(optimizer_state)
    return step, best


def describe(cfg, world=1, dtype=torch.float32):
    """What config.json holds: {"settings", "versions", "world": processes, "precision"}."""
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
            'precision': str(dtype).removeprefix('torch.')}


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
        with open(self.path, 'a', encoding='utf-8') as f:
            f.write(json.dumps(row) + '\n')
        tqdm.write('  '.join(f'{k} {v:.4g}' if isinstance(v, float) else f'{k} {v}'
                             for k, v in row.items()))
        if self.wandb is not None:
            try:
                self.wandb.log(row, step=row['step'])
            except Exception as e:
                tqdm.write(f"warning: wandb failed and is off from here: {e!r}", file=sys.stderr)
                self.wandb = None
