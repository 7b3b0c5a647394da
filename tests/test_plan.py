"""
plan.py: what a step is said to need against what it allocates, on tiny models. CPU, about 15 s.

python -m pytest tests/test_plan.py -v
"""
from contextlib import nullcontext

import pytest
import torch

import bench
import plan
import train
from configurator import configure
from conftest import make_clip, make_family
from test_train import TRAIN, error_of, train_here

MLLM = dict(num_frames=4, frame_size=32, max_text_tokens=40, batch_size=8, eval_batch_size=4,
            device='cpu')
VARIANTS = {  # what is allocated at the peak of a step; layers of the backbone
    'plain': (3, dict(gradient_checkpointing=False, lora_r=8)),
    'checkpointed': (3, dict(lora_r=8)),
    'chunks': (3, dict(lora_r=8, chunk_size=2)),
    'from 2 and 4 layers to 8': (8, dict(lora_r=8, chunk_size=4, gradient_checkpointing=False)),
    'slq': (3, dict(model='slq')),
    'slq in chunks': (3, dict(model='slq', content_chunk=2)),
    'slq plain': (3, dict(model='slq', prefix_cache=False, gradient_checkpointing=False)),
    'pha': (0, dict(model='pha', block_init='random')),
    'pha in chunks': (0, dict(model='pha', block_init='random', batch_size=16, chunk_size=4)),
}


@pytest.fixture(scope='module')
def folders(tmp_path_factory):
    """By the number of layers; 0: a CLIP."""
    made = {n: make_family(tmp_path_factory.mktemp(f'layers{n}'), 'qwen2_vl', layers=n)
            for n in (3, 8)}
    return {**made, 0: make_clip(tmp_path_factory.mktemp('clip'))}


def settings(**changes):
    return configure(TRAIN, [f'--{k}={v}' for k, v in changes.items()], train.SETTINGS)


def measured(cfg):
    """Peak of a step over what was there before, gradients, inputs, weights: allocated bytes."""
    model = train.build_model(cfg, torch.device('cpu'))
    samples = plan.samples_for(model, cfg, cfg.batch_size)
    chunks, ids, _ = train.collate_chunks(samples, model.collate, cfg.chunk_size)
    one = len(chunks) == 1

    def step():
        (train.plain_step if one else train.cached_step)(
            model, chunks[0] if one else chunks, ids, nullcontext)

    step()
    gradients = plan.nbytes([p.grad for p in model.parameters() if p.grad is not None])
    model.zero_grad(set_to_none=True)
    return dict(step=bench.peak_memory(step, torch.device('cpu')), gradients=gradients,
                inputs=plan.nbytes(plan.inputs_of(chunks)),
                weights=plan.nbytes([*model.parameters(), *model.buffers()]))


@pytest.mark.parametrize('name', VARIANTS)
def test_a_step_needs_what_the_plan_says(name, folders):
    layers, how = VARIANTS[name]
    mllm = {k: v for k, v in MLLM.items() if layers or k != 'max_text_tokens'}
    cfg = settings(**{**mllm, **how}, backbone=folders[layers])
    planned, real = plan.make(cfg, 1, half=False), measured(cfg)
    for key in ('step', 'gradients', 'inputs', 'weights'):
        assert planned[key] == pytest.approx(real[key], rel=0.15), key
    assert planned['weights'] == real['weights'] and planned['gradients'] == real['gradients']
    assert planned['step'] > planned['gradients'] > 0


def test_what_it_says_of_two_gpus_and_halves(folders):
    cfg = settings(**MLLM, backbone=folders[3], lora_r=8)
    one, two, half = (plan.make(cfg, *how) for how in ((1, False), (2, False), (1, True)))
    assert two['pairs'] == 4 and one['pairs'] == 8
    assert (one['buckets'], two['buckets'], two['optimizer']) == (
        0, two['gradients'], 2 * two['gradients'])
    assert 0.4 < two['activations'] / one['activations'] < 0.7
    assert half['gradients'] == one['gradients']  # what is trained stays in fp32
    assert 0.5 < half['activations'] / one['activations'] < 0.9
    frozen = sum(n for k, n in one['parameters'].items() if k.startswith('frozen'))
    assert frozen == sum(p.numel() for p in plan.ghost_model(cfg, False).parameters()
                         if not p.requires_grad)


@pytest.mark.parametrize('name, total', [('Qwen/Qwen2-VL-2B-Instruct', 2.209e9),
                                         ('DAMO-NLP-SG/VideoLLaMA3-7B', 8.04e9)])
def test_published_sizes_need_no_network_and_no_weights(name, total):
    model = plan.ghost_model(settings(backbone=name, lora_r=0), True)
    assert {p.device.type for p in model.parameters()} == {'meta'}
    frozen = {k: n for k, n in plan.groups(model).items() if k.startswith('frozen')}
    assert sum(frozen.values()) == pytest.approx(total, rel=0.005)
    assert set(frozen) >= {'frozen: decoder layers', 'frozen: vision tower', 'frozen: projector'}


def test_the_command_wants_no_data_and_trains_nothing(folders, tmp_path, capsys):
    how = dict(MLLM, backbone=folders[3], lora_r=8, data=tmp_path / 'nowhere',
               out_dir=tmp_path / 'run', chunk_size=2, plan=True)
    train_here([f'--{k}={v}' for k, v in how.items()])
    said = capsys.readouterr().out
    assert not (tmp_path / 'run').exists()
    assert '2 pairs per forward, 2 forward(s) a step' in said  # of two processes' 8
    assert '40 GB fits' in said and 'cache_vision: 4 rows x 64 x 4 bytes' in said
    assert 'its sizes are not among those in plan.py; fetch its small files first' in error_of(
        ['--plan', '--backbone=nobody/nothing'])
