"""
train.py and checkpoint.py: gradients against a literal reference, two processes against one, a
killed run against one that was left alone, and every way to start a run wrongly. CPU, about 40 s.

python -m pytest tests/test_train.py -v

Processes come from a fork server that has torch imported: one costs 0.2 s instead of 8.
"""
import contextlib
import json
import math
import multiprocessing.forkserver
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import backbones
import checkpoint
import eval as evaluation
import train
from checkpoint import Log, load_checkpoint, save_checkpoint, trainable_state
from configurator import configure, read_settings
from conftest import ROOT
from data import StepSampler
from model_mars import MARS, MARSConfig
from model_pha import PHANet, PHAConfig

TRAIN = str(ROOT / 'train.py')
DROPOUT = 0.2


# -----------------------------------------------------------------------------
# starting runs

@pytest.fixture(scope='module', autouse=True)
def fork_server():
    """Imports this file, and so torch and all of ours, in the background of the first tests."""
    with pytest.MonkeyPatch.context() as m:
        m.setenv('PYTHONPATH', f"{ROOT}{os.pathsep}{ROOT / 'tests'}")
        m.setenv('OMP_NUM_THREADS', '1')
        multiprocessing.set_forkserver_preload(['test_train'])
        multiprocessing.forkserver.ensure_running()
    yield


def child(rank, world, port, output, job, args):
    torch.set_num_threads(1)
    if world > 1:  # what torchrun sets
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world),
                          MASTER_ADDR='localhost', MASTER_PORT=str(port))
    with open(output, 'w', encoding='utf-8') as f:
        for number in (1, 2):
            os.dup2(f.fileno(), number)
    job(*args)


def launch(job, *args, world=1, output, timeout=300):
    """job(*args) in `world` fresh processes -> exit codes; their output lies in output.<rank>."""
    with socket.socket() as s:
        s.bind(('localhost', 0))
        port = s.getsockname()[1]
    context = multiprocessing.get_context('forkserver')
    ranks = [context.Process(target=child, args=(r, world, port, f'{output}.{r}', job, args))
             for r in range(world)]
    for p in ranks:
        p.start()
    for p in ranks:
        p.join(timeout)
        if p.is_alive():
            p.kill()
            p.join()
    return [p.exitcode for p in ranks]


def argv(out, data, backbone, **changes):
    """Arguments of a tiny run: 4 steps per epoch, 8 in all, stopped after 6, saved at 3, 4, 6."""
    settings = dict(out_dir=out, data=data, backbone=backbone, batch_size=6, epochs=2, max_steps=6,
                    save_every=3, learning_rate=1e-2, num_frames=2, num_workers=0, log_every=1,
                    eval_batch_size=16, lora_r=4, lora_alpha=8, lora_dropout=DROPOUT, device='cpu')
    return [f'--{k}={v}' for k, v in {**settings, **changes}.items()]


def run(args, strike=None):
    """A whole run. strike (n, ranks, *signals): in the n-th step these ranks send them to
    themselves."""
    steps = {'n': 0}

    def struck(step, *args):
        steps['n'] += 1
        if strike and steps['n'] == strike[0] and int(os.environ.get('RANK', 0)) in strike[1]:
            for number in strike[2:]:
                os.kill(os.getpid(), number)
        return step(*args)

    train.plain_step = partial(struck, train.plain_step)
    train.cached_step = partial(struck, train.cached_step)
    cfg = configure(TRAIN, args, train.SETTINGS)
    code = train.one_line_errors(lambda: train.main(cfg))
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(code)


def run_script(args):
    sys.argv = ['train.py', *args]
    runpy.run_path(TRAIN, run_name='__main__')


def train_here(args):
    """A whole run in this process."""
    cfg = configure(TRAIN, args, train.SETTINGS)
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        train.main(cfg)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def error_of(args):
    """The one line that a run started like this ends with."""
    with pytest.raises(SystemExit) as e:
        train.one_line_errors(lambda: train_here(args))
    assert isinstance(e.value.code, str)  # what Python prints to stderr, with exit code 1
    assert '\n' not in e.value.code.strip()
    return e.value.code


def lines(out):
    return [json.loads(s) for s in Path(out, 'log.jsonl').read_text(encoding='utf-8').splitlines()]


def timeless(out):
    return [{k: v for k, v in row.items() if k not in ('s/step', 'waiting')} for row in lines(out)]


def target(out, link):
    return os.readlink(os.path.join(out, link))


def assert_same_checkpoint(a, b):
    a, b = Path(a, 'latest'), Path(b, 'latest')
    assert os.readlink(a) == os.readlink(b)
    assert (a / 'model.safetensors').read_bytes() == (b / 'model.safetensors').read_bytes()
    a, b = (torch.load(x / 'state' / 'state.pt', weights_only=True) for x in (a, b))
    assert a['step'] == b['step'] and a['best'] == b['best']
    assert a['optimizer']['param_groups'] == b['optimizer']['param_groups']
    torch.testing.assert_close(a['optimizer']['state'], b['optimizer']['state'], atol=0, rtol=0)


# -----------------------------------------------------------------------------
# gradients

# a learned scale and learned slot weights are used by the loss alone, not by the encoders
LEARNED = dict(num_slots=3, lora_r=4, lora_alpha=8, learn_gamma=True, gamma=20.0, lambda_div=0.5,
               lambda_hn=0.5, delta=0.5, aggregation='learnable', mask_same_video=True)


def mars(path, **settings):
    """MARS with every parameter off its start: lora_B = 0 would leave lora_A no gradient."""
    torch.manual_seed(0)
    model = MARS(MARSConfig(backbone=path, **{**LEARNED, **settings}), backbones.load(path))
    with torch.no_grad():
        for p in trainable_state(model).values():
            p.add_(0.1 * torch.randn_like(p))
    return model


def samples(n):
    """Videos 0 to 4 in turn: from the sixth pair on each has a second caption."""
    rng = np.random.default_rng(0)
    words = 'a red blue circle square moves grows left right then it shrinks'.split()
    return [SimpleNamespace(id=f'clip{i}', index=i % 5, caption=' '.join(rng.choice(words, 2 + i)),
                            frames=rng.integers(0, 256, (2 + i % 2, 16, 16, 3), dtype=np.uint8))
            for i in range(n)]


def literal(model, ranks, ids, seed=0):
    """What must come out: chunk after chunk with its graph, then one loss and one backward."""
    encoded = []
    for rank, chunks in enumerate(ranks):
        torch.manual_seed(seed + rank)
        encoded += [model(chunk) for chunk in chunks]
    text, video = ({k: torch.cat([f[k] for f in side]) for k in side[0]} for side in zip(*encoded))
    loss, _ = model.loss(text, video, ids)
    loss.backward()
    return loss.item(), take_gradients(model)


def take_gradients(model):
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}
    model.zero_grad(set_to_none=True)
    return grads


def assert_same_gradients(got, want, tolerance=1e-5):
    assert got.keys() == want.keys()
    assert {'slots', 'w', 'log_gamma', 'b'} <= want.keys()
    assert sum('lora_' in name for name in want) == 2 * (7 * 3 + 2)
    for name in want:
        assert want[name].norm() > 0, name
        error = (got[name] - want[name]).norm() / want[name].norm()
        assert error < tolerance, f'{name} is off by {error:.1e}'


@pytest.mark.parametrize('chunk_size', [1, 2, 4, 6])  # 4 does not divide 6
@pytest.mark.parametrize('checkpointing', [False, True])
def test_gradient_cache_is_the_plain_gradient(tiny_qwen2vl, chunk_size, checkpointing):
    model = mars(tiny_qwen2vl, lora_dropout=0.0, gradient_checkpointing=checkpointing)
    (whole,), ids, names = train.collate_chunks(samples(6), model.collate, 0)
    assert names == [f'clip{i}' for i in range(6)] and ids.tolist() == [0, 1, 2, 3, 4, 0]
    loss, logs = train.plain_step(model, whole, ids, contextlib.nullcontext)
    want = take_gradients(model)
    chunks, ids, _ = train.collate_chunks(samples(6), model.collate, chunk_size)
    assert len(chunks) == math.ceil(6 / chunk_size)
    cached, cached_logs = train.cached_step(model, chunks, ids, contextlib.nullcontext)
    torch.testing.assert_close(cached, loss, rtol=1e-5, atol=0)
    assert cached_logs.keys() == logs.keys()
    assert_same_gradients(take_gradients(model), want)


@pytest.mark.parametrize('chunk_size', [2, 4])
@pytest.mark.parametrize('checkpointing', [False, True])
def test_gradient_cache_repeats_the_dropout(tiny_qwen2vl, chunk_size, checkpointing):
    model = mars(tiny_qwen2vl, lora_dropout=0.3, gradient_checkpointing=checkpointing)
    chunks, ids, _ = train.collate_chunks(samples(6), model.collate, chunk_size)
    loss, want = literal(model, [chunks], ids)
    after = torch.get_rng_state()
    torch.manual_seed(0)
    cached, _ = train.cached_step(model, chunks, ids, contextlib.nullcontext)
    assert cached.item() == pytest.approx(loss, rel=1e-6)
    assert_same_gradients(take_gradients(model), want)
    assert torch.equal(torch.get_rng_state(), after)  # pass 2 takes no random numbers of its own
    other, _ = literal(model, [chunks], ids, seed=1)
    assert abs(other - loss) > 1e-3  # dropout was on


CASES = [(0, 0.0), (0, 0.3), (3, 0.0), (3, 0.3), (1, 0.3)]  # (chunk_size, dropout)


def gradients_of_a_rank(path, file):
    rank, world, _ = train.init_distributed('cpu')
    results = []
    for chunk_size, dropout in CASES:
        model = mars(path, lora_dropout=dropout)
        wrapped = torch.nn.parallel.DistributedDataParallel(model, forward_sync_buffers=False)
        mine = samples(8)[4 * rank:4 * rank + 4]
        chunks, ids, _ = train.collate_chunks(mine, model.collate, chunk_size)
        for _ in range(2):  # a second step finds nothing left over from the first
            torch.manual_seed(rank)
            if len(chunks) == 1:
                loss, _ = train.plain_step(wrapped, chunks[0], ids, contextlib.nullcontext)
            else:
                loss, _ = train.cached_step(wrapped, chunks, ids, contextlib.nullcontext)
            results.append((loss.item(), take_gradients(model)))
    torch.save(results, f'{file}.{rank}')
    dist.destroy_process_group()


def test_two_processes_compute_the_gradient_of_one(tiny_qwen2vl, tmp_path):
    file = str(tmp_path / 'gradients')
    codes = launch(gradients_of_a_rank, tiny_qwen2vl, file, world=2, output=tmp_path / 'output')
    assert codes == [0, 0], Path(tmp_path, 'output.0').read_text()
    got = [torch.load(f'{file}.{rank}') for rank in (0, 1)]
    for i, (chunk_size, dropout) in enumerate(CASES):
        model = mars(tiny_qwen2vl, lora_dropout=dropout)
        parts = [train.collate_chunks(samples(8)[at:at + 4], model.collate, chunk_size)[0]
                 for at in (0, 4)]
        loss, want = literal(model, parts, torch.tensor([s.index for s in samples(8)]))
        for again in (2 * i, 2 * i + 1):
            for rank in (0, 1):
                assert got[rank][again][0] == pytest.approx(loss, rel=1e-6)
                assert_same_gradients(got[rank][again][1], want)
            for name in want:  # not one bit apart, or the ranks' weights would drift
                assert torch.equal(got[0][again][1][name], got[1][again][1][name])


def pha(path):
    torch.manual_seed(0)
    config = PHAConfig(backbone=path, block_layers=2, max_words=12, num_frames=2, sigma=0.1,
                       learn_sigma=True, mask_same_video=True)
    return PHANet(config, backbones.load(path, dtype=torch.float32))


def pha_samples(n):
    items = samples(n)
    for s in items:
        s.frames = s.frames[:2]
    return items


def pha_of_a_rank(path, data, file):
    """Gradients of a plain and of a cached step, and an evaluation: on W ranks or on one."""
    rank, world, device = train.init_distributed('cpu')
    results = {}
    for chunk_size in (0, 3):
        model = pha(path)
        wrapped = torch.nn.parallel.DistributedDataParallel(model, forward_sync_buffers=False) \
            if world > 1 else model
        n = 8 // world
        chunks, ids, _ = train.collate_chunks(pha_samples(8)[n * rank:n * rank + n], model.collate,
                                              chunk_size)
        step = train.plain_step if len(chunks) == 1 else train.cached_step
        loss, _ = step(wrapped, chunks[0] if len(chunks) == 1 else chunks, ids,
                       contextlib.nullcontext)
        results[chunk_size] = loss.item(), take_gradients(model)
    cfg = SimpleNamespace(video_root='', data=data, num_frames=2, sampler='uniform', frame_size=16,
                          frame_cache='', on_bad_video='raise', num_workers=0, eval_batch_size=3,
                          reader='pyav', min_decoded=0.9, video_timeout=60.0, out_dir='')
    items = evaluation.load_annotations(os.path.join(data, 'test.jsonl'))
    results['metrics'] = evaluation.evaluate(pha(path), items, cfg, 'test', device)
    torch.save(results, f'{file}.{rank}')
    if world > 1:
        dist.destroy_process_group()


def test_two_processes_train_and_evaluate_pha_as_one(tiny_clip, tiny_data, tmp_path):
    file = str(tmp_path / 'two')
    codes = launch(pha_of_a_rank, tiny_clip, tiny_data, file, world=2, output=tmp_path / 'output')
    assert codes == [0, 0], Path(tmp_path, 'output.0').read_text()
    two = [torch.load(f'{file}.{rank}') for rank in (0, 1)]
    assert launch(pha_of_a_rank, tiny_clip, tiny_data, f'{file}.one',
                  output=tmp_path / 'one') == [0], Path(tmp_path, 'one.0').read_text()
    one = torch.load(f'{file}.one.0')
    assert two[0]['metrics'] == two[1]['metrics'] == one['metrics']
    assert one['metrics']['n_video'] == 10
    for chunk_size in (0, 3):
        loss, want = one[0]  # the cached step too is the plain one
        total = sum(g.square().sum() for g in want.values()).sqrt()
        assert want['clip.logit_scale'].abs() > 0
        for rank in (0, 1):
            got_loss, got = two[rank][chunk_size]
            assert got_loss == pytest.approx(loss, rel=1e-5) and got.keys() == want.keys()
            for name in want:
                error = (got[name] - want[name]).norm()
                assert error < 1e-5 * want[name].norm() + 1e-7 * total, name
                assert torch.equal(got[name], two[0][chunk_size][1][name]), name


# -----------------------------------------------------------------------------
# a run, whole and in pieces

@pytest.fixture(scope='module')
def finished(tiny_data, tiny_qwen2vl, tmp_path_factory):
    """A run of 6 steps with the gradient cache, in one process."""
    out = tmp_path_factory.mktemp('finished') / 'run'
    args = argv(out, tiny_data, tiny_qwen2vl, chunk_size=4)
    output = out.parent / 'output'
    assert launch(run, args, output=output) == [0], Path(f'{output}.0').read_text()
    return out


@pytest.mark.parametrize('world', [1, 2])
def test_a_run_that_is_stopped_and_killed_ends_in_the_same_bits(
        world, tiny_data, tiny_qwen2vl, tmp_path, finished):
    output = tmp_path / 'output'
    args = partial(argv, data=tiny_data, backbone=tiny_qwen2vl, chunk_size=4 if world == 1 else 2)
    whole = finished
    if world == 2:
        whole = tmp_path / 'whole'
        assert launch(run, args(whole), world=2, output=output) == [0, 0]
    ours = tmp_path / 'pieces'
    # SIGTERM reaches the last rank alone, in the second step: all end behind it, not as if done
    strike = (2, [world - 1], signal.SIGTERM)
    assert launch(run, args(ours), strike, world=world, output=output) == [143] * world
    assert target(ours, 'latest') == 'step_000002'
    assert 'step 2 is saved' in Path(f'{output}.0').read_text()
    # kill -9 in the sixth step: the fifth is logged, but the fourth is the last one saved
    strike = (4, range(world), signal.SIGKILL)
    resumed = args(ours, resume=True, num_workers=1)
    assert launch(run, resumed, strike, world=world, output=output) == [-9] * world
    assert target(ours, 'latest') == 'step_000004' and lines(ours)[-1]['step'] == 5
    assert launch(run, resumed, world=world, output=output) == [0] * world
    assert_same_checkpoint(whole, ours)
    assert timeless(whole) == timeless(ours)
    assert [row['step'] for row in lines(ours) if 'loss' in row] == [1, 2, 3, 4, 5, 6]
    assert [row['step'] for row in lines(ours) if 'SumR' in row] == [4]


@pytest.mark.parametrize('number, code, saved', [
    (signal.SIGTERM, 143, 'step_000002'),  # a scheduler's and torchrun's: the step ends
    (signal.SIGINT, -signal.SIGINT, 'step_000000')])  # Ctrl-C by somebody who will not wait
def test_a_second_sigterm_is_patient_and_a_second_ctrl_c_kills(
        number, code, saved, tiny_data, tiny_qwen2vl, tmp_path):
    args = argv(tmp_path / 'run', tiny_data, tiny_qwen2vl)
    assert launch(run, args, (2, [0], number, number), output=tmp_path / 'output') == [code]
    assert target(tmp_path / 'run', 'latest') == saved
    said = (tmp_path / 'output.0').read_text()
    assert ('stopped by a signal; step 2 is saved' in said) == (code == 143)


# -----------------------------------------------------------------------------
# what a checkpoint holds

def test_a_checkpoint_holds_what_is_trained_and_nothing_else(finished, tiny_qwen2vl):
    folder = finished / 'latest'
    tensors = load_file(folder / 'model.safetensors')
    lora = {name for name in tensors if 'lora_' in name}
    assert tensors.keys() - lora == {'slots', 'w'} and len(lora) == 2 * (7 * 3 + 2)
    assert sorted(p.name for p in folder.iterdir()) == ['adapter', 'config.json',
                                                        'model.safetensors', 'state']
    state = torch.load(folder / 'state' / 'state.pt', weights_only=True)
    assert state['step'] == 6 and len(state['optimizer']['state']) == len(tensors)
    config = json.loads((folder / 'config.json').read_text())
    assert config == json.loads((finished / 'config.json').read_text())
    assert config['settings']['lora_dropout'] == DROPOUT
    assert config['settings']['video_prompt'] == MARSConfig.video_prompt
    assert config['versions']['torch'] == torch.__version__
    assert config['world'] == 1 and config['precision'] == 'float32'
    # two checkpoints stay: the last one and the best, which is the only validated one, step 4
    assert sorted(p.name for p in finished.iterdir()) == [
        '.lock', 'best', 'config.json', 'latest', 'log.jsonl', 'step_000004', 'step_000006']
    assert target(finished, 'best') == 'step_000004'
    assert state['best']['step'] == 4
    assert state['best']['score'] == [r['SumR'] for r in lines(finished) if 'SumR' in r][0]


def test_every_kind_of_parameter_was_trained(finished, tiny_data, tiny_qwen2vl, tmp_path):
    cfg = configure(TRAIN, argv(tmp_path, tiny_data, tiny_qwen2vl), train.SETTINGS)
    start = trainable_state(train.build_model(cfg, torch.device('cpu')))
    for name, value in load_file(finished / 'latest' / 'model.safetensors').items():
        assert not torch.equal(value, start[name]), name
    rows = [row for row in lines(finished) if 'loss' in row]
    assert [row['lr'] for row in rows] == pytest.approx([train.lr_at(i, 4, cfg) for i in range(6)])
    assert all(math.isfinite(row[k]) for row in rows for k in ('loss', 'nce', 'grad_norm'))


def test_others_can_load_the_adapter_with_peft(finished, tiny_qwen2vl):
    from peft import PeftModel
    base = backbones.load(tiny_qwen2vl).model
    model = PeftModel.from_pretrained(base, str(finished / 'latest' / 'adapter'))
    theirs = {n.replace('.default', ''): p for n, p in model.named_parameters() if 'lora_' in n}
    ours = load_file(finished / 'latest' / 'model.safetensors')
    ours = {n.removeprefix('mllm.').replace('.default', ''): p for n, p in ours.items()
            if 'lora_' in n}
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[n], ours[n]) for n in ours)


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


def test_a_checkpoint_executes_no_code_and_a_broken_one_is_named(
        finished, tiny_data, tiny_qwen2vl, tmp_path):
    args = argv(tmp_path / 'run', tiny_data, tiny_qwen2vl, chunk_size=4, resume=True)
    shutil.copytree(finished, tmp_path / 'run', symlinks=True)
    state = tmp_path / 'run' / 'latest' / 'state' / 'state.pt'
    torch.save({'optimizer': Bomb(tmp_path / 'boom'), 'step': 6, 'best': None}, state)
    assert 'latest' in error_of(args) and 'state.pt' in error_of(args)
    assert not (tmp_path / 'boom').exists()
    torch.load(state, weights_only=False)
    assert (tmp_path / 'boom').exists()  # it would have
    state.unlink()
    assert 'state.pt' in error_of(args)
    weights = tmp_path / 'run' / 'latest' / 'model.safetensors'
    weights.write_bytes(weights.read_bytes()[:-100])
    assert 'model.safetensors' in error_of(args)


# -----------------------------------------------------------------------------
# killed at any moment, one file system call after the other

class Killed(BaseException):
    """No `except Exception` stops it, as none stops kill -9."""


class Bystander(torch.nn.Module):
    """A model as far as a checkpoint knows. Its weights are the number of the step."""

    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)

    def set(self, value):
        with torch.no_grad():
            for p in self.parameters():
                p.fill_(value)
        return self

    def save_adapter(self, folder):
        os.makedirs(folder)
        for name in ('adapter_config.json', 'adapter_model.safetensors'):
            Path(folder, name).write_text('{}')


class Trap:
    """Counts changes of the file system and is killed before number `at`."""
    EVENTS = {'os.rename', 'os.remove', 'os.rmdir', 'os.mkdir', 'os.symlink', 'os.truncate'}
    armed = None

    def __init__(self, at=None):
        self.at, self.seen = at, 0

    def __enter__(self):
        Trap.armed = self
        return self

    def __exit__(self, *error):
        Trap.armed = None
        return error[0] is Killed

    def step(self):
        self.seen += 1
        if self.seen - 1 == self.at:
            Trap.armed = None
            raise Killed

    @staticmethod
    def audit(event, args):
        if Trap.armed and (event in Trap.EVENTS or (event == 'open' and args[2] & os.O_CREAT)):
            Trap.armed.step()

    @staticmethod
    def halfway(write, path_of):
        """A writer that may also be killed after half of its file."""
        def wrapped(*args, **kw):
            trap, Trap.armed = Trap.armed, None  # what the library does inside is one write
            if trap:
                trap.step()
            result = write(*args, **kw)
            if trap:
                trap.seen += 1
                if trap.seen - 1 == trap.at:
                    os.truncate(path_of(*args), os.stat(path_of(*args)).st_size // 2)
                    raise Killed
            Trap.armed = trap
            return result
        return wrapped


@pytest.fixture
def trapped(monkeypatch, tmp_path):
    sys.addaudithook(Trap.audit)  # there is no way to remove it; it does nothing when not armed
    monkeypatch.setattr(checkpoint, 'save_file', Trap.halfway(save_file, lambda x, path: path))
    monkeypatch.setattr(torch, 'save', Trap.halfway(torch.save, lambda x, path: path))
    monkeypatch.setattr(os, 'fsync', Trap.halfway(os.fsync, lambda fd: fd))
    return SimpleNamespace(cfg=SimpleNamespace(out_dir=str(tmp_path / 'run')),
                           config=json.dumps({'settings': {'out_dir': str(tmp_path / 'run')}}))


def save(trapped, model, step, best, is_best=False):
    """As train.py does it; weights and optimizer state tell which step they belong to."""
    optimizer = torch.optim.AdamW(model.set(step).parameters(), lr=step)
    save_checkpoint(trapped.cfg, model, optimizer, step, best, trapped.config, is_best)


def load(trapped, link='latest'):
    """-> (step, best), every value checked."""
    model = Bystander()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    out, folder = trapped.cfg.out_dir, os.path.join(trapped.cfg.out_dir, link)
    if link != 'latest':  # load_checkpoint reads `latest`
        trapped = SimpleNamespace(cfg=SimpleNamespace(out_dir=os.path.join(out, 'view')), **{
            'config': trapped.config})
        os.makedirs(trapped.cfg.out_dir)
        os.symlink(os.path.realpath(folder), os.path.join(trapped.cfg.out_dir, 'latest'))
    step, best = load_checkpoint(trapped.cfg, model, optimizer, trapped.config)
    if link != 'latest':
        shutil.rmtree(trapped.cfg.out_dir)
    assert os.readlink(folder) == f'step_{step:06d}'
    assert all((p == step).all() for p in model.parameters())
    assert optimizer.param_groups[0]['lr'] == step
    assert sorted(os.listdir(os.path.join(folder, 'adapter'))) == ['adapter_config.json',
                                                                   'adapter_model.safetensors']
    return step, best


@pytest.mark.parametrize('is_best', [True, False])
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(trapped, is_best, monkeypatch):
    model, at, reached = Bystander(), 0, set()
    first, third = ({'score': 1.0, 'step': 1}, {'score': 3.0 if is_best else 1.0,
                                                'step': 3 if is_best else 1})
    while True:
        shutil.rmtree(trapped.cfg.out_dir, ignore_errors=True)
        os.makedirs(trapped.cfg.out_dir)
        monkeypatch.setattr(os, 'getpid', lambda: 4_000_001)
        save(trapped, model, 1, first, is_best=True)
        save(trapped, model, 2, first)
        with Trap(at) as trap:
            save(trapped, model, 3, third, is_best)
        if trap.seen <= at:  # it was not killed any more
            break
        step, best = load(trapped)
        of_best, _ = load(trapped, 'best')
        assert step in (2, 3) and best == (third if step == 3 else first)
        reached.add((step, of_best))
        new = Path(trapped.cfg.out_dir, 'step_000003')  # it appears at once, with all it has
        assert not new.exists() or len([p for p in new.rglob('*') if p.is_file()]) == 5
        inode = os.stat(os.path.join(trapped.cfg.out_dir, 'best')).st_ino
        # resumed, in another process: the lost step comes again, and then one that is not best
        monkeypatch.setattr(os, 'getpid', lambda: 4_000_002)
        if step == 2:
            save(trapped, model, 3, third, is_best)
        if of_best == third['step']:  # never taken away while `best` points to it
            assert os.stat(os.path.join(trapped.cfg.out_dir, 'best')).st_ino == inode
        save(trapped, model, 4, third)
        assert load(trapped) == (4, third)
        assert load(trapped, 'best')[0] == third['step']
        assert sorted(os.listdir(trapped.cfg.out_dir)) == [
            'best', 'latest', f"step_{third['step']:06d}", 'step_000004']
        at += 1
    assert at > 20
    assert reached == ({(2, 1), (2, 3), (3, 3)} if is_best else {(2, 1), (3, 1)})


def test_a_kill_in_the_first_save_leaves_nothing_in_the_way(trapped):
    model, at = Bystander(), 0
    while True:
        shutil.rmtree(trapped.cfg.out_dir, ignore_errors=True)
        os.makedirs(trapped.cfg.out_dir)
        with Trap(at) as trap:
            save(trapped, model, 0, None)
        if trap.seen <= at:
            break
        if os.path.lexists(os.path.join(trapped.cfg.out_dir, 'latest')):
            assert load(trapped) == (0, None)
        save(trapped, model, 0, None)
        save(trapped, model, 1, {'score': 1.0, 'step': 1}, is_best=True)
        assert load(trapped)[0] == load(trapped, 'best')[0] == 1
        assert sorted(os.listdir(trapped.cfg.out_dir)) == ['best', 'latest', 'step_000001']
        at += 1
    assert at > 12


def test_a_folder_that_no_link_names_is_written_anew(trapped):
    """It may be half removed, or from a run with other settings that died in its first save."""
    os.makedirs(os.path.join(trapped.cfg.out_dir, 'step_000001', 'state'))
    save(trapped, Bystander(), 1, None)
    assert load(trapped) == (1, None)


def test_resuming_refuses_another_precision_and_notes_another_number_of_processes(
        trapped, capsys):
    cfg = trapped.cfg
    trapped.config = json.dumps(checkpoint.describe(cfg, world=2, dtype=torch.bfloat16))
    save(trapped, Bystander(), 1, None)
    assert load(trapped) == (1, None) and capsys.readouterr().err == ''
    trapped.config = json.dumps(checkpoint.describe(cfg, world=3, dtype=torch.bfloat16))
    assert load(trapped) == (1, None)
    assert 'note: begun by 2 process(es), resumed by 3' in capsys.readouterr().err
    trapped.config = json.dumps(checkpoint.describe(cfg, world=2, dtype=torch.float32))
    with pytest.raises(ValueError, match="settings .precision = 'bfloat16', now 'float32'.: set"):
        load(trapped)


# -----------------------------------------------------------------------------
# a run's folder that was copied, filled or shared

@pytest.fixture
def copied(finished, tiny_data, tiny_qwen2vl, tmp_path):
    """-> (a copy of the finished run, the arguments that resume it)"""
    shutil.copytree(finished, tmp_path / 'run', symlinks=True)
    return tmp_path / 'run', argv(tmp_path / 'run', tiny_data, tiny_qwen2vl, chunk_size=4)


def test_a_run_copied_without_its_links_is_still_a_run(copied, finished, capsys):
    out, args = copied
    for link in ('latest', 'best'):  # as rsync -r leaves it
        (out / link).unlink()
    before = sorted((p, p.stat().st_mtime_ns) for p in out.rglob('*'))
    assert 'already holds a run; --resume goes on' in error_of(args)
    assert before == sorted((p, p.stat().st_mtime_ns) for p in out.rglob('*'))
    train_here([*args, '--resume'])
    assert 'has no link `latest`, its newest checkpoint step_000006 is taken' in (
        capsys.readouterr().out)
    assert_same_checkpoint(finished, out)
    assert target(out, 'best') == target(finished, 'best') == 'step_000004'
    assert lines(out) == lines(finished)
    # nothing complete is left
    (out / 'latest').unlink()
    for folder in out.glob('step_*'):
        (folder / 'config.json').unlink()
    assert 'without a complete step_* folder: nothing to resume' in error_of([*args, '--resume'])
    assert len(list(out.glob('step_*'))) == 2


@pytest.mark.parametrize('link', ['latest', 'best'])
def test_a_link_that_became_a_folder_is_told_before_training(copied, link):
    out, args = copied
    (out / link).unlink()
    shutil.copytree(out / 'step_000004', out / link)  # as cp -rL leaves it
    text = error_of([*args, '--resume', '--max_steps=8'])
    assert f'{link} is no link' in text and f'rm -r {out / link}' in text and 'step_000006' in text
    assert lines(out)[-1]['step'] == 6


def test_a_best_that_is_lost_is_not_promised(copied, capsys):
    out, args = copied
    (out / 'best').unlink()
    shutil.rmtree(out / 'step_000004')
    train_here([*args, '--resume'])
    said = capsys.readouterr().out
    assert 'warning: the best checkpoint, of step 4, is gone' in said
    assert 'done: 6 steps, and there is no `best`; next: python eval.py' in said
    assert said.rstrip().endswith('--which=latest')
    train_here([*args, '--resume', '--max_steps=8'])
    assert target(out, 'best') == 'step_000008'


def test_a_best_link_lost_while_training_is_made_anew(trapped):
    best = {'score': 1.0, 'step': 1}
    save(trapped, Bystander(), 1, best, is_best=True)
    os.remove(os.path.join(trapped.cfg.out_dir, 'best'))
    save(trapped, Bystander(), 2, best)
    assert load(trapped, 'best') == (1, best) and load(trapped) == (2, best)


@pytest.mark.parametrize('error', [OSError(28, 'No space left on device'),
                                   checkpoint.SafetensorError('Error: No space left on device')])
def test_a_full_disk_is_one_line_and_leaves_no_half_checkpoint(trapped, error, monkeypatch):
    def full(tensors, path):
        Path(path).write_bytes(b'half')
        raise error

    save(trapped, Bystander(), 1, None)
    monkeypatch.setattr(checkpoint, 'save_file', full)
    with pytest.raises(OSError, match="can't save .*step_000002 .*No space left on device.*; the "
                                      "last good checkpoint stands in latest/"):
        save(trapped, Bystander(), 2, None)
    assert sorted(os.listdir(trapped.cfg.out_dir)) == ['latest', 'step_000001']
    assert load(trapped) == (1, None)


def test_a_full_disk_leaves_no_half_text(tmp_path, monkeypatch):
    def full(fd):
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(os, 'fsync', full)
    with pytest.raises(OSError, match="can't write .*config.json: No space left on device"):
        checkpoint.write_atomic(str(tmp_path / 'config.json'), 'text')
    assert not os.listdir(tmp_path)


def hold(out, held, release):
    kept = checkpoint.lock(str(out))
    held.set()
    release.wait(60)
    kept.close()


def test_two_runs_in_one_folder_are_refused(tiny_data, tiny_qwen2vl, tmp_path):
    (tmp_path / 'run').mkdir()
    context = multiprocessing.get_context('forkserver')
    held, release = context.Event(), context.Event()
    other = context.Process(target=hold, args=(tmp_path / 'run', held, release))
    other.start()
    assert held.wait(60)
    args = argv(tmp_path / 'run', tiny_data, tiny_qwen2vl, max_steps=1)
    assert f"another process is training in {tmp_path / 'run'}" in error_of(args)
    assert os.listdir(tmp_path / 'run') == ['.lock']
    other.kill()  # the kernel gives the lock back
    other.join()
    checkpoint.lock(str(tmp_path / 'run')).close()


def test_a_run_that_another_process_began_meanwhile_is_not_overwritten(
        tiny_data, tiny_qwen2vl, tmp_path, monkeypatch):
    def lock(out):  # the other one has begun, and ended, while this one loaded its model
        (tmp_path / 'run' / 'step_000001').mkdir()

    monkeypatch.setattr(train, 'lock', lock)
    assert 'already holds a run' in error_of(argv(tmp_path / 'run', tiny_data, tiny_qwen2vl))
    assert os.listdir(tmp_path / 'run') == ['step_000001']


def test_what_is_not_finite_in_a_checkpoint_is_named(copied):
    out, args = copied
    state = torch.load(out / 'latest' / 'state' / 'state.pt', weights_only=True)
    state['optimizer']['state'][0]['exp_avg'].view(-1)[0] = math.inf
    torch.save(state, out / 'latest' / 'state' / 'state.pt')
    text = error_of([*args, '--resume'])
    assert 'latest/state/state.pt: exp_avg of parameter 0 is not finite' in text
    tensors = load_file(out / 'latest' / 'model.safetensors')
    tensors['slots'][0, 0] = math.nan
    save_file(tensors, out / 'latest' / 'model.safetensors')
    text = error_of([*args, '--resume'])
    assert 'latest/model.safetensors: slots is not finite' in text
    assert 'stands in latest' not in text


def test_an_out_dir_that_can_not_be_made_is_told(tiny_data, tiny_qwen2vl, tmp_path):
    (tmp_path / 'link').symlink_to('nothing')
    (tmp_path / 'file').touch()
    for out, what in (('link', 'link to nothing'), ('link/run', 'link to nothing'),
                      ('file/run', 'file')):
        text = error_of(argv(tmp_path / out, tiny_data, tiny_qwen2vl))
        assert text.count(f"can't become one: {tmp_path / Path(out).parts[0]} is a {what}") == 1


# -----------------------------------------------------------------------------
# runs that go wrong

def test_one_video_has_no_negatives(tiny_data, tiny_qwen2vl, tmp_path):
    row = json.loads(Path(tiny_data, 'train.jsonl').read_text().splitlines()[0])
    row['captions'] *= 6
    (tmp_path / 'train.jsonl').write_text(json.dumps(row))
    shutil.copy(os.path.join(tiny_data, 'val.jsonl'), tmp_path)
    text = error_of(argv(tmp_path / 'run', tmp_path, tiny_qwen2vl,
                         video_root=os.path.join(tiny_data, 'videos')))
    assert 'train.jsonl has 1 video: a contrastive loss needs at least 2' in text


def test_captions_that_are_cut_are_counted_once(tiny_data, tiny_qwen2vl, tmp_path, capsys):
    args = argv(tmp_path / 'run', tiny_data, tiny_qwen2vl, max_text_tokens=5, max_steps=8)
    train_here([*args, '--chunk_size=4'])
    n = sum(len(backbones.load(tiny_qwen2vl).plain_ids(json.loads(row)['captions'][0])) > 5
            for row in Path(tiny_data, 'train.jsonl').read_text().splitlines())
    said = capsys.readouterr().out
    assert n and said.count('captions were cut') == 1
    assert f'note: {n} of 24 captions were cut, max_text_tokens=5 is less than they have' in said

def test_a_loss_that_is_not_finite_stops_the_run(tiny_data, tiny_qwen2vl, tmp_path, monkeypatch):
    data = tmp_path / 'data'
    shutil.copytree(tiny_data, data)
    rows = (data / 'train.jsonl').read_text().splitlines()
    rows[17] = rows[17].replace('square', 'square 7')
    (data / 'train.jsonl').write_text('\n'.join(rows))
    batches = list(StepSampler(24, 6, seed=2))  # the first epoch
    wanted = [17 in batch for batch in batches].index(True)
    assert wanted == 2, 'choose a seed with which it is neither the first step nor the last'

    def load_with_a_nan(*args, **kw):  # in the embedding of "7", which only one caption has
        backbone = real_load(*args, **kw)
        token, = backbone.plain_ids('7')
        backbone.embed.weight.data[token, 0] = math.nan
        return backbone

    real_load = backbones.load
    monkeypatch.setattr(backbones, 'load', load_with_a_nan)
    args = argv(tmp_path / 'run', data, tiny_qwen2vl, seed=2, save_every=1)
    for chunk_size in (0, 4):
        text = error_of([*args, f'--chunk_size={chunk_size}', '--resume'])
        assert f'step {wanted}: loss nan' in text and "not finite for ['train17']" in text
        assert target(tmp_path / 'run', 'latest') == f'step_{wanted:06d}'
        saved = load_file(tmp_path / 'run' / 'latest' / 'model.safetensors')
        assert all(v.isfinite().all() for v in saved.values())
    assert [row['step'] for row in lines(tmp_path / 'run')] == list(range(1, wanted + 1))


def test_a_gradient_that_is_not_finite_changes_nothing(
        tiny_data, tiny_qwen2vl, tmp_path, monkeypatch):
    args = argv(tmp_path / 'run', tiny_data, tiny_qwen2vl, save_every=1, max_steps=2)
    plain, kept = train.plain_step, []

    def step(model, *rest):
        out = plain(model, *rest)
        kept.append((model, {n: p.clone() for n, p in trainable_state(model).items()}))
        if len(kept) == 2:
            model.slots.grad[0, 0] = math.inf
        return out

    monkeypatch.setattr(train, 'plain_step', step)
    text = error_of(args)
    assert re.search(r"step 1: loss \d.*gradient norm (inf|nan).*batch starts \['train", text)
    model, before = kept[-1]
    assert all(torch.equal(p, before[n]) for n, p in trainable_state(model).items())
    assert target(tmp_path / 'run', 'latest') == 'step_000001'


def test_best_is_picked_on_val_and_test_is_never_opened(
        tiny_data, tiny_qwen2vl, tmp_path, monkeypatch):
    data = tmp_path / 'data'
    data.mkdir()
    rows = Path(tiny_data, 'val.jsonl').read_text().splitlines(keepends=True)
    (data / 'val.jsonl').write_text(''.join(rows[:3]))
    shutil.copy(os.path.join(tiny_data, 'train.jsonl'), data)  # and no test.jsonl
    real, scores, seen = evaluation.evaluate, iter([50.0, 70.0, 60.0]), []

    def scripted(model, items, cfg, split, *rest):
        seen.append((split, [item.id for item in items]))
        return {**real(model, items, cfg, split, *rest), 'SumR': next(scores)}

    monkeypatch.setattr(evaluation, 'evaluate', scripted)
    train_here(argv(tmp_path / 'run', data, tiny_qwen2vl, batch_size=12, epochs=3, save_every=0,
                    max_steps=0, video_root=os.path.join(tiny_data, 'videos')))
    assert seen == [('val', ['val0', 'val1', 'val2'])] * 3
    assert target(tmp_path / 'run', 'best') == 'step_000004'
    assert target(tmp_path / 'run', 'latest') == 'step_000006'
    state = torch.load(tmp_path / 'run' / 'latest' / 'state' / 'state.pt', weights_only=True)
    assert state['best'] == {'score': 70.0, 'step': 4}
    assert [r['best'] for r in lines(tmp_path / 'run') if 'SumR' in r] == [True, True, False]


def test_videos_that_are_in_training_and_validation_are_told(
        tiny_data, tiny_qwen2vl, tmp_path, capsys):
    data = shutil.copytree(tiny_data, tmp_path / 'data')
    shutil.copy(data / 'train.jsonl', data / 'val.jsonl')
    train_here(argv(tmp_path / 'run', data, tiny_qwen2vl, epochs=0, warmup_epochs=0))
    assert 'warning: 24 videos of val are in train too' in capsys.readouterr().out


def test_picking_on_test_is_refused_unless_it_is_asked_for(
        tiny_data, tiny_qwen2vl, tmp_path, capsys):
    args = argv(tmp_path / 'run', tiny_data, tiny_qwen2vl, val_split='test', epochs=0,
                warmup_epochs=0)
    assert '--select_on_test=true' in error_of(args)
    assert not (tmp_path / 'run').exists()
    train_here([*args, '--select_on_test'])
    assert 'warning: `best` is picked on the test split' in capsys.readouterr().out
    assert target(tmp_path / 'run', 'best') == 'step_000000'  # epochs=0: the untrained model


def test_a_run_is_neither_overwritten_nor_resumed_with_other_settings(
        finished, tiny_data, tiny_qwen2vl):
    before = sorted((p, p.stat().st_mtime_ns) for p in finished.rglob('*'))
    args = argv(finished, tiny_data, tiny_qwen2vl, chunk_size=4)
    assert 'already holds a run; --resume goes on' in error_of(args)
    text = error_of([*args, '--resume', '--learning_rate=0.02'])
    assert 'learning_rate = 0.01, now 0.02' in text and 'lora_r' not in text
    assert 'num_slots = 4, now 2' in error_of([*args, '--resume', '--num_slots=2'])
    text = error_of([*args, '--resume', '--dtype=bfloat16'])
    assert "precision = 'float32', now 'bfloat16'" in text
    assert before == sorted((p, p.stat().st_mtime_ns) for p in finished.rglob('*'))


def edited(file, change):
    Path(file).write_text(change(Path(file).read_text()))


@pytest.mark.parametrize('split, change', [
    ('train', lambda text: text[:text.rindex('{')]),           # the last line is gone
    ('val', lambda text: text.replace('red', 'green', 1))])    # as many, another one
def test_a_run_is_not_resumed_with_other_annotations(
        split, change, copied, tiny_data, tiny_qwen2vl, tmp_path, capsys):
    shutil.copytree(tiny_data, tmp_path / 'data')
    out = copied[0]
    for file in (out / 'config.json', out / 'latest' / 'config.json'):
        edited(file, lambda text: text.replace(tiny_data, str(tmp_path / 'data')))
    args = argv(out, tmp_path / 'data', tiny_qwen2vl, chunk_size=4, resume=True)
    train_here(args)
    edited(tmp_path / 'data' / f'{split}.jsonl', change)
    text = error_of(args)
    capsys.readouterr()
    evaluation.main(configure(str(ROOT / 'eval.py'), [
        f'--ckpt={out}', f'--split={split}', '--which=latest', '--device=cpu']))
    assert f'warning: {tmp_path}/data/{split}.jsonl has changed since' in capsys.readouterr().out
    n = {'train': 24, 'val': 8}[split]
    assert f'data/{split}.jsonl has changed since' in text and f'started: {n} videos' in text
    assert f'now {n - (split == "train")} videos' in text and 'restore it to resume' in text


def test_a_run_is_neither_resumed_nor_evaluated_on_another_backbone(
        copied, tiny_qwen2vl, tiny_data, tmp_path):
    from conftest import make_qwen2vl
    out, args = copied
    same = shutil.copytree(tiny_qwen2vl, tmp_path / 'moved')
    other = make_qwen2vl(tmp_path / 'other', seed=1)           # the same shapes
    def evaluate(backbone):
        evaluation.main(configure(str(ROOT / 'eval.py'), [
            f'--ckpt={out}', f'--backbone={backbone}', '--device=cpu']))

    evaluate(same)
    with pytest.raises(ValueError, match='trained on another backbone than lies in'):
        evaluate(other)
    for file in (out / 'config.json', out / 'latest' / 'config.json'):
        edited(file, lambda text: text.replace(tiny_qwen2vl, other))
    args = argv(out, tiny_data, other, chunk_size=4, resume=True)
    assert 'trained on another backbone than lies in' in error_of(args)


def test_the_fingerprint_knows_values_and_neither_precision_nor_names():
    g = torch.Generator().manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(50, 40), torch.nn.LayerNorm(40))
    model.requires_grad_(False)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=g))
    first = checkpoint.fingerprint(model)
    assert first == checkpoint.fingerprint(torch.nn.ModuleDict({'a': model[1], 'b': model[0]}))
    model.add_module('trained', torch.nn.Linear(2, 2))
    assert first == checkpoint.fingerprint(model) == checkpoint.fingerprint(model.bfloat16())
    model[0].bias[3] += 0.5
    assert first != checkpoint.fingerprint(model)


def test_resuming_a_run_that_is_over_says_so(finished, tiny_data, tiny_qwen2vl, tmp_path, capsys):
    shutil.copytree(finished, tmp_path / 'run', symlinks=True)
    train_here(argv(tmp_path / 'run', tiny_data, tiny_qwen2vl, chunk_size=4, resume=True))
    assert 'done: 6 steps, best SumR' in capsys.readouterr().out
    assert_same_checkpoint(finished, tmp_path / 'run')


def test_a_run_that_was_stopped_before_any_validation_may_end_there(
        tiny_data, tiny_qwen2vl, tmp_path, capsys):
    args = argv(tmp_path / 'run', tiny_data, tiny_qwen2vl, save_every=1)

    def stop(*rest):
        os.kill(os.getpid(), signal.SIGTERM)
        return plain(*rest)

    plain = train.plain_step
    with pytest.MonkeyPatch.context() as m:
        m.setattr(train, 'plain_step', stop)
        train_here(args)
    train_here([*args, '--resume', '--max_steps=1'])
    assert 'done: 1 steps' in capsys.readouterr().out


@pytest.mark.parametrize('changes, says', [
    (dict(batch_size=25), 'train.jsonl has 24 pairs, too few for one global batch of 25'),
    (dict(batch_size=1), 'batch_size is 1, the least is 2'),
    (dict(select_metric='R@1'), "select_metric 'R@1' is no metric"),
    (dict(select_metric='t2v'), 'several numbers; use for example t2v/R@1'),
    (dict(select_metric='t2v/MdR'), "select_metric 't2v/MdR' is no metric"),
    (dict(data='nowhere'), 'nowhere/train.jsonl not found'),
    (dict(train_split='dev'), 'dev.jsonl not found'),
    (dict(video_root='nowhere'), 'video_root nowhere is no folder'),
    (dict(backbone='./nowhere'), "backbone './nowhere': no such folder"),
    (dict(backbone=''), 'backbone is empty'),
    (dict(warmup_epochs=3), 'warmup_epochs 3.0 is more than epochs 2'),
    (dict(learning_rate=-1), 'learning_rate is -1.0, the least is 0'),
    (dict(learning_rate='nan'), 'learning_rate expects float'),
    (dict(seed=-1), 'seed is -1, the least is 0'),
    (dict(seed=2 ** 31), 'seed is 2147483648 and must be below 2^31'),
    (dict(beta1=-0.1), 'beta1 is -0.1 and must be at least 0 and below 1'),
    (dict(beta2=1), 'beta2 is 1.0 and must be at least 0 and below 1'),
    (dict(out_dir=''), "out_dir '' is no folder, and can't become one"),
    (dict(out_dir=TRAIN), "train.py' is no folder, and can't become one"),
    (dict(lora_r=0, num_slots=1, layer_fusion=False), 'nothing that is trained would change'),
    (dict(dtype='fp16'), "dtype is 'fp16' and must be auto, bfloat16 or float32"),
    (dict(device='gpu'), "device is 'gpu' and must be auto, cpu or cuda"),
    (dict(num_slots=0), 'num_slots must be at least 1'),
    (dict(sampler='random'), "sampler 'random' is not one of"),
    (dict(on_bad_video='ignore'), "on_bad_video 'ignore' is not one of"),
    (dict(reader='cv2'), "reader 'cv2' is not one of pyav, decord"),
    (dict(min_decoded=2), 'min_decoded is 2.0, a share of frames is at most 1'),
    (dict(video_timeout=-1), 'video_timeout is -1.0, the least is 0'),
])
def test_a_wrong_start_is_one_clear_line(changes, says, tiny_data, tiny_qwen2vl, tmp_path):
    changes = {**dict(data=tiny_data, backbone=tiny_qwen2vl), **changes}
    assert says in error_of(argv(tmp_path / 'run', **changes))
    assert not (tmp_path / 'run').exists()


BROKEN = ['zero.mp4', 'text.mp4', 'audio.mp4', 'no_index.mp4', 'truncated.mp4', 'corrupt.mp4',
          'truncated.mkv', 'gone.mp4']


def test_every_broken_kind_is_skipped_and_counted_or_stops_the_run(
        tiny_data, tiny_qwen2vl, files, tmp_path, capsys):
    """Training and evaluation on a data set that holds them all, with and without workers."""
    (tmp_path / 'videos').mkdir()
    for source in [*Path(tiny_data, 'videos').iterdir(), *(files / b for b in BROKEN[:-1])]:
        (tmp_path / 'videos' / source.name).symlink_to(source)
    for split in ('train', 'val', 'test'):
        bad = [json.dumps(dict(id=b, video=b, captions=[f'bad {b}'])) for b in BROKEN]
        good = Path(tiny_data, f'{split}.jsonl').read_text().splitlines()
        (tmp_path / f'{split}.jsonl').write_text('\n'.join([*bad, *good]) + '\n')
    out = tmp_path / 'run'
    how = argv(out, tmp_path, tiny_qwen2vl, on_bad_video='skip', epochs=1, max_steps=0,
               batch_size=8, num_workers=2)
    train_here(how)
    said = capsys.readouterr()
    assert 'skipped 8 unreadable training videos' in said.out and 'bad_videos.tsv' in said.out
    assert lines(out)[-1]['n_video'] == lines(out)[-1]['n_text'] == 8
    rows = [line.split('\t') for line in (out / 'bad_videos.tsv').read_text().splitlines()]
    assert sorted(r[1] for r in rows) == sorted(BROKEN) and {r[0] for r in rows} == {'skipped'}
    evaluation.main(configure(str(ROOT / 'eval.py'), [f'--ckpt={out}', '--on_bad_video=skip']))
    assert 'split test: 10 videos (8 skipped), 10 captions' in capsys.readouterr().out
    for workers in (0, 2):
        text = error_of(argv(tmp_path / f'stops{workers}', tmp_path, tiny_qwen2vl, batch_size=8,
                             num_workers=workers))
        assert 'cannot read' in text and any(b in text for b in BROKEN)
    with pytest.raises(ValueError, match='cannot read'):  # though training went on
        evaluation.main(configure(str(ROOT / 'eval.py'), [f'--ckpt={out}']))


def test_a_model_without_anything_to_train_may_be_saved_untrained(
        tiny_data, tiny_qwen2vl, tmp_path):
    train_here(argv(tmp_path / 'run', tiny_data, tiny_qwen2vl, lora_r=0, num_slots=1,
                    layer_fusion=False, epochs=0, warmup_epochs=0))
    assert target(tmp_path / 'run', 'best') == 'step_000000'


def in_workers(monkeypatch, what):
    """what() happens where a loader's worker prepares frames, and not in this process."""
    here, ours = os.getpid(), backbones.fit_size
    monkeypatch.setattr(backbones, 'fit_size', lambda *args: ours(*args) if os.getpid() == here
                        else what())


def test_an_error_in_a_loaders_worker_is_one_line_too(
        tiny_data, tiny_qwen2vl, tmp_path, monkeypatch):
    def fail():
        raise ValueError('a frame is too thin')

    in_workers(monkeypatch, fail)
    text = error_of(argv(tmp_path / 'run', tiny_data, tiny_qwen2vl, num_workers=1))
    assert text.count('a frame is too thin') == 1 and 'Traceback' not in text


def test_a_loaders_worker_that_is_killed_is_one_line_with_a_remedy(
        tiny_data, tiny_qwen2vl, tmp_path, monkeypatch):
    # as the kernel does when the memory is full
    in_workers(monkeypatch, lambda: os.kill(os.getpid(), signal.SIGKILL))
    text = error_of(argv(tmp_path / 'run', tiny_data, tiny_qwen2vl, num_workers=1))
    assert 'DataLoader worker (pid' in text and 'lower num_workers' in text


def test_the_global_batch_must_be_shared_evenly(tiny_data, tiny_qwen2vl, tmp_path):
    cfg = configure(TRAIN, argv(tmp_path, tiny_data, tiny_qwen2vl, batch_size=9), train.SETTINGS)
    with pytest.raises(ValueError, match="batch_size 9 is the global batch, and 2 processes can't"):
        train.check_settings(cfg, world=2)
    assert train.check_settings(cfg, world=3) is False  # nothing to resume there


def test_the_script_itself_ends_in_one_line_and_exit_code_1(tiny_data, tmp_path):
    (tmp_path / 'mllm').mkdir()
    (tmp_path / 'mllm' / 'config.json').write_text('{"model_type": "idefics2"}')
    args = argv(tmp_path / 'run', tiny_data, tmp_path / 'mllm')
    assert launch(run_script, args, output=tmp_path / 'output') == [1]
    text = (tmp_path / 'output.0').read_text()
    assert text.startswith('train.py: backbone') and text.count('\n') == 1, text
    assert "of family 'idefics2', which is not supported yet" in text


@pytest.mark.parametrize('script', ['train.py', 'eval.py'])
def test_help_and_typos_answer_without_torch(script, tmp_path):
    (tmp_path / 'torch.py').write_text('raise SystemExit("torch was imported")')
    env = {**os.environ, 'PYTHONPATH': str(tmp_path)}
    answer = partial(subprocess.run, capture_output=True, text=True, env=env)
    p = answer([sys.executable, ROOT / script, '--help'])
    assert p.returncode == 0 and not p.stderr
    for name, (_, default, _) in read_settings(str(ROOT / script)).items():
        assert f'--{name} = {default!r}' in p.stdout
    p = answer([sys.executable, ROOT / script, '--evil_batch_size=3'])
    assert p.returncode == 1 and not p.stdout and p.stderr.count('\n') == 1
    assert "unknown setting 'evil_batch_size', did you mean 'eval_batch_size'?" in p.stderr


@pytest.mark.parametrize('script, arguments, says', [
    ('train.py', ['--seed=-1'], 'seed is -1, the least is 0'),
    ('train.py', ['--data=nowhere'], 'nowhere/train.jsonl not found'),
    ('eval.py', ['--ckpt=nowhere'], "--ckpt 'nowhere' is no run folder"),
    ('eval.py', ['--ckpt={run}', '--split=dev'], 'dev.jsonl not found'),
    ('eval.py', ['--ckpt={run}', '--json={run}'], 'is a folder; name a file, as in '),
    ('eval.py', ['--ckpt={run}', '--json={run}/config.json/r.json'], 'config.json is no folder'),
    ('bench.py', ['--json={run}'], 'is a folder; name a file, as in '),
    ('eval.py', ['--ckpt={run}', '--data=nowhere'], 'nowhere/test.jsonl not found')])
def test_wrong_values_and_missing_files_are_told_without_torch(
        script, arguments, says, tmp_path, finished):
    (tmp_path / 'torch.py').write_text('raise SystemExit("torch was imported")')
    p = subprocess.run([sys.executable, ROOT / script, *(a.format(run=finished)
                                                         for a in arguments)],
                       capture_output=True, text=True,
                       env={**os.environ, 'PYTHONPATH': str(tmp_path)})
    assert p.returncode == 1 and not p.stdout and p.stderr.count('\n') == 1
    assert p.stderr.startswith(script) and says in p.stderr


@pytest.mark.parametrize('script, arguments', [
    ('train.py', ['--data={data}']), ('eval.py', ['--ckpt={run}']), ('eval_tasks.py', []),
    ('figures.py', []), ('ablate.py', []), ('bench.py', [])])
def test_ctrl_c_while_torch_is_imported_is_one_line(
        script, arguments, tmp_path, finished, tiny_data):
    (tmp_path / 'torch.py').write_text(
        "import time\ntry:\n    print('importing', flush=True)\n    time.sleep(60)\n"
        "except BaseException:\n    pass")  # an import that swallows it, as a few do
    arguments = [a.format(data=tiny_data, run=finished) for a in arguments]
    with subprocess.Popen([sys.executable, ROOT / script, *arguments], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True,
                          env={**os.environ, 'PYTHONPATH': str(tmp_path)}) as p:
        assert p.stdout.readline() == 'importing\n'
        p.send_signal(signal.SIGINT)
        assert p.communicate(timeout=30) == ('', f'{script}: interrupted\n')
    assert p.returncode == 130


def torchrun(*args):
    from torch.distributed.run import main
    main(['--standalone', '--nproc_per_node=2', *args])


@pytest.mark.parametrize('arguments', [['--data=nowhere'], ['--sed=1']])
def test_what_all_ranks_see_alike_is_said_once(arguments, tmp_path):
    assert launch(torchrun, TRAIN, *arguments, output=tmp_path / 'output') == [1]
    said = (tmp_path / 'output.0').read_text()
    assert said.count('nowhere/train.jsonl not found') + said.count("setting 'sed'") == 1, said


# -----------------------------------------------------------------------------
# schedule and optimizer

def test_lr_by_hand():
    cfg = SimpleNamespace(learning_rate=8.0, epochs=3, warmup_epochs=1.0)
    lr = [train.lr_at(step, 4, cfg) for step in range(13)]
    assert lr[:5] == [2.0, 4.0, 6.0, 8.0, 8.0]  # a quarter more each step, then the top
    assert lr[6] == pytest.approx(4 * (1 + math.sqrt(0.5)))  # a quarter of the way: cos 45 degrees
    assert lr[8] == pytest.approx(4.0)  # half of the way: half of the top
    assert lr[11] == pytest.approx(4 * (1 - math.cos(math.pi / 8)))  # the last step that is taken
    assert lr[12] == pytest.approx(0.0, abs=1e-12)
    cfg.warmup_epochs = 0.5
    assert [train.lr_at(step, 4, cfg) for step in (0, 1, 2, 7)] == pytest.approx([4, 8, 8, 4])
    cfg.warmup_epochs = 0.0
    assert train.lr_at(0, 4, cfg) == 8.0


def test_optimizer_groups(tiny_qwen2vl):
    model = mars(tiny_qwen2vl)
    cfg = SimpleNamespace(weight_decay=0.05, learning_rate=1e-3, beta1=0.9, beta2=0.95,
                          adam_eps=1e-8)
    optimizer = train.make_optimizer(model, cfg, torch.device('cpu'))
    names = {id(p): n for n, p in model.named_parameters()}
    groups = {g['weight_decay']: [names[id(p)] for p in g['params']]
              for g in optimizer.param_groups}
    assert sorted(groups[0.0]) == ['b', 'log_gamma', 'slots', 'w']
    assert groups.keys() == {0.0, 0.05}
    everything = sorted(groups[0.0] + groups[0.05])
    assert everything == sorted(n for n, p in model.named_parameters() if p.requires_grad)
    assert len(everything) == len(set(everything)) == 4 + 2 * (7 * 3 + 2)
    assert all(g['betas'] == (0.9, 0.95) and g['lr'] == 1e-3 for g in optimizer.param_groups)


def test_weights_are_clipped_by_the_norm_of_the_whole_gradient(
        tiny_data, tiny_qwen2vl, tmp_path, monkeypatch):
    norms = []

    class Spy(torch.optim.AdamW):
        def step(self):
            grads = [p.grad for g in self.param_groups for p in g['params']]
            norms.append(torch.cat([g.flatten() for g in grads]).norm().item())
            super().step()

    monkeypatch.setattr(torch.optim, 'AdamW', Spy)
    for name, clip in (('tight', 0.01), ('off', 0.0)):
        train_here(argv(tmp_path / name, tiny_data, tiny_qwen2vl, max_steps=1, grad_clip=clip))
    logged = lines(tmp_path / 'off')[0]['grad_norm']
    assert lines(tmp_path / 'tight')[0]['grad_norm'] == logged > 0.1  # before clipping
    assert norms == pytest.approx([0.01, logged], rel=1e-3)


# -----------------------------------------------------------------------------
# wandb

def wandb_cfg(tmp_path, on=True):
    return SimpleNamespace(out_dir=str(tmp_path), wandb=on, wandb_project='p')


def test_wandb_is_imported_only_when_it_is_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, 'wandb', None)  # importing it now raises ImportError
    Log(wandb_cfg(tmp_path, on=False), -1, quiet=False)({'step': 1, 'loss': 1.0})
    assert 'wandb' not in capsys.readouterr().err
    Log(wandb_cfg(tmp_path), -1, quiet=True)({'step': 2})  # rank 1 logs nowhere
    assert 'wandb' not in capsys.readouterr().err and len(lines(tmp_path)) == 1


def test_training_goes_on_without_wandb(tiny_data, tiny_qwen2vl, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, 'wandb', None)
    train_here(argv(tmp_path / 'run', tiny_data, tiny_qwen2vl, max_steps=2, wandb=True))
    assert capsys.readouterr().err.count('warning: wandb is off in this run') == 1
    assert [row['step'] for row in lines(tmp_path / 'run') if 'loss' in row] == [1, 2]


def test_a_wandb_that_fails_is_dropped(tmp_path, monkeypatch, capsys):
    sent = []

    def log(row, step):
        sent.append((row, step))
        if len(sent) == 2:
            raise ConnectionError('no network')

    fake = SimpleNamespace(init=lambda **kw: SimpleNamespace(log=log))
    monkeypatch.setitem(sys.modules, 'wandb', fake)
    logger = Log(wandb_cfg(tmp_path), -1, quiet=False)
    for step in (1, 2, 3):
        logger({'step': step})
    assert sent == [({'step': 1}, 1), ({'step': 2}, 2)] and len(lines(tmp_path)) == 3
    assert capsys.readouterr().err.count('no network') == 1

    def init(**kw):
        raise RuntimeError('api_key not configured')

    fake.init = init
    Log(wandb_cfg(tmp_path), 3, quiet=False)({'step': 4})
    assert 'api_key not configured' in capsys.readouterr().err
    assert [row['step'] for row in lines(tmp_path)] == [1, 2, 3, 4]


def test_a_half_written_log_line_is_dropped(tmp_path):
    Path(tmp_path, 'log.jsonl').write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4, "lo')
    Log(wandb_cfg(tmp_path, on=False), 2, quiet=False)({'step': 3})
    assert lines(tmp_path) == [{'step': 1}, {'step': 2}, {'step': 3}]


# -----------------------------------------------------------------------------
# settings

@pytest.mark.parametrize('file', sorted(p.name for p in (ROOT / 'config').glob('*.py')))
def test_every_config_loads(file):
    cfg = configure(TRAIN, [str(ROOT / 'config' / file)], train.SETTINGS)
    assert cfg.out_dir == f"out/{file.removesuffix('.py')}"
    assert cfg.backbone and cfg.batch_size % 2 == 0
    assert cfg.val_split != 'test'


@pytest.mark.parametrize('script, cls', [('train.py', None), ('eval.py', None),
                                         ('model_mars.py', 'MARSConfig'),
                                         ('model_slq.py', 'SLQConfig')])
def test_every_setting_is_read_by_something(script, cls):
    source = '\n'.join(p.read_text(encoding='utf-8') for p in ROOT.glob('*.py'))
    for name in read_settings(str(ROOT / script), cls):
        read = re.search(rf"\b(cfg|config|args)(\.|, '){name}\b", source)
        assert read, f'{name} is a dead setting'


def test_workers_lost_to_a_stop_end_the_batches_and_others_are_an_error():
    def lost():
        yield 1
        raise RuntimeError('DataLoader worker is killed by signal: Terminated')

    assert list(train.timed(lost(), {'wait': 0.0}, {'asked': True})) == [1]
    with pytest.raises(RuntimeError, match='Terminated'):
        list(train.timed(lost(), {'wait': 0.0}, {'asked': False}))


@pytest.mark.parametrize('name, ours', [
    ('.step_000012.77.tmp', True), ('.latest.77.tmp', True), ('config.json.77.tmp', True),
    ('log.jsonl.77.tmp', True), ('notes.tmp', False), ('step_keep', False),
    ('metrics.json.77.tmp', False), ('.step_000012.tmp', False)])
def test_only_leftovers_of_our_own_names_are_removed(name, ours):
    assert bool(checkpoint.LEFT_BY_A_KILL.fullmatch(name)) == ours


def test_a_prompt_typed_in_a_shell_has_its_line_break():
    from model_mars import MARSConfig
    assert MARSConfig(video_prompt=r'<video>\nWhat?').video_prompt == '<video>\nWhat?'


def test_a_bad_validation_video_costs_no_trained_step(tiny_data, tiny_qwen2vl, tmp_path):
    data = tmp_path / 'data'
    shutil.copytree(tiny_data, data)
    (data / 'videos' / 'val0.mp4').write_bytes(b'')
    args = argv(tmp_path / 'run', str(data), tiny_qwen2vl)
    assert 'val0.mp4' in error_of(args)
    assert os.readlink(tmp_path / 'run' / 'latest') != 'step_000000'


@pytest.mark.parametrize('spelled', ['step_000002/', './step_000002', '{out}/step_000002'])
def test_a_best_linked_by_hand_is_kept(tmp_path, spelled):
    cfg, model = SimpleNamespace(out_dir=str(tmp_path)), Bystander()
    optimizer = torch.optim.AdamW(model.parameters())
    save_checkpoint(cfg, model, optimizer, 2, {'score': 1.0, 'step': 2}, '{}', True)
    (tmp_path / 'best').unlink()
    (tmp_path / 'best').symlink_to(spelled.format(out=tmp_path))
    for step in (3, 4):
        save_checkpoint(cfg, model, optimizer, step, {'score': 1.0, 'step': 2}, '{}', False)
    assert (tmp_path / 'best' / 'model.safetensors').is_file()
    assert not (tmp_path / 'step_000003').exists()
