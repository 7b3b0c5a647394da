"""
train.py and checkpoint.py: gradients against a literal reference, two processes against one, a
killed run against one that was left alone, and every way to start a run wrongly. CPU, about 60 s.

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
import losses
import train
from checkpoint import Log, load_checkpoint, save_checkpoint
from configurator import configure, read_settings
from conftest import ROOT
from data import StepSampler
from model_mars import MARS, MARSConfig

TRAIN = str(ROOT / 'train.py')
DROPOUT = 0.2


# -----------------------------------------------------------------------------
# starting runs

@pytest.fixture(scope='module', autouse=True)
def fork_server():
    """ Imports this file, and so torch and all of ours, in the background of the first tests. """
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


def launch(job, *args, world=1, output, timeout=120):
    """ job(*args) in `world` fresh processes -> exit codes; their output lies in output.<rank>. """
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
    """ Arguments of a tiny run: 4 steps per epoch, 8 in all, stopped after 6, saved at 3, 4, 6. """
    settings = dict(out_dir=out, data=data, backbone=backbone, batch_size=6, epochs=2, max_steps=6,
                    save_every=3, learning_rate=1e-2, num_frames=2, num_workers=0, log_every=1,
                    eval_batch_size=16, lora_r=4, lora_alpha=8, lora_dropout=DROPOUT, device='cpu')
    return [f'--{k}={v}' for k, v in {**settings, **changes}.items()]


def run(args, strike=None):
    """ A whole run. strike (call, rank, signal): sent to itself by that rank in that call's step. """
    steps = {'n': 0}

    def struck(step, *args):
        steps['n'] += 1
        if strike and (steps['n'], int(os.environ.get('RANK', 0))) in [(strike[0], r) for r in
                                                                     strike[1]]:
            os.kill(os.getpid(), strike[2])
        return step(*args)

    train.plain_step = partial(struck, train.plain_step)
    train.cached_step = partial(struck, train.cached_step)
    cfg = configure(TRAIN, args, train.SETTINGS)
    train.one_line_errors(lambda: train.main(cfg))


def run_script(args):
    sys.argv = ['train.py', *args]
    runpy.run_path(TRAIN, run_name='__main__')


def train_here(args):
    """ A whole run in this process. """
    cfg = configure(TRAIN, args, train.SETTINGS)
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        train.main(cfg)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def error_of(args):
    """ The one line that a run started like this ends with. """
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
    """ MARS with every parameter off its start, where lora_B is zero and lora_A has no gradient. """
    torch.manual_seed(0)
    model = MARS(MARSConfig(backbone=path, **{**LEARNED, **settings}), backbones.load(path))
    with torch.no_grad():
        for p in model.trainable_state().values():
            p.add_(0.1 * torch.randn_like(p))
    return model


def samples(n):
    """ Videos 0 to 4 in turn: from the sixth pair on each has a second caption. """
    rng = np.random.default_rng(0)
    words = 'a red blue circle square moves grows left right then it shrinks'.split()
    return [SimpleNamespace(id=f'clip{i}', index=i % 5, caption=' '.join(rng.choice(words, 2 + i)),
                            frames=rng.integers(0, 256, (2 + i % 2, 16, 16, 3), dtype=np.uint8))
            for i in range(n)]


def literal(model, ranks, ids, seed=0):
    """ What must come out: chunk after chunk with its graph, then one loss and one backward. """
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
        wrapped = torch.nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
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


# -----------------------------------------------------------------------------
# a run, whole and in pieces

@pytest.fixture(scope='module')
def finished(tiny_data, tiny_qwen2vl, tmp_path_factory):
    """ A run of 6 steps with the gradient cache, in one process. """
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
    # SIGTERM reaches the last rank alone, in the second step: all end behind it, as if done
    strike = (2, [world - 1], signal.SIGTERM)
    assert launch(run, args(ours), strike, world=world, output=output) == [0] * world
    assert target(ours, 'latest') == 'step_000002'
    assert 'step 2 is saved' in Path(f'{output}.0').read_text()
    # kill -9 in the fifth step: saved is the third, logged the fourth
    strike = (3, range(world), signal.SIGKILL)
    resumed = args(ours, resume=True, num_workers=1)
    assert launch(run, resumed, strike, world=world, output=output) == [-9] * world
    assert target(ours, 'latest') == 'step_000004' and lines(ours)[-1]['step'] == 4
    assert launch(run, resumed, world=world, output=output) == [0] * world
    assert_same_checkpoint(whole, ours)
    assert timeless(whole) == timeless(ours)
    assert [row['step'] for row in lines(ours) if 'loss' in row] == [1, 2, 3, 4, 5, 6]
    assert [row['step'] for row in lines(ours) if 'SumR' in row] == [4]
