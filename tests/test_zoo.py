"""
Every MLLM family of backbones.py on a tiny random checkpoint of its own class: frames and prompts
against transformers' processor of that family, the same embedding alone and in any batch, SLQ's
prefix cache, a step of MARS, train.py and eval.py, and the full sizes without weights. CPU, 40 s.

python -m pytest tests/test_zoo.py -v
"""
import json
import math
import re
import shutil
from contextlib import nullcontext
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import backbones
import data
import eval as evaluation
import train
import video
from clips import encode, indices, ramp
from configurator import configure
from conftest import make_family
from model_mars import MARS, MARSConfig
from model_slq import SLQ, SLQConfig
from test_train import argv, lines, train_here

close = torch.testing.assert_close
FAMILIES = ['qwen2_vl', 'qwen2_5_vl', 'qwen3_vl', 'internvl', 'video_llama_3', 'smolvlm']
VIDEO, TEXT = '<video>\nSummarize above video in one word:', '{caption}\nSummarize above sentence:'
CAPTIONS = ['a red circle moves left', 'a', 'the green triangle moves up and then a red square '
            'shrinks right', 'two circles', 'a blue square grows']
SHAPES = [(2, 16, 16), (1, 24, 16), (5, 16, 24), (3, 17, 23), (4, 16, 16)]  # T, H, W
PADS = ['right', 'left']


@pytest.fixture(scope='module')
def folder_of(tmp_path_factory):
    """family -> the folder of its tiny checkpoint, made when first asked for."""
    made = {}

    def folder_of(family, real=False):
        if (family, real) not in made:
            made[family, real] = make_family(tmp_path_factory.mktemp(family), family, real)
        return made[family, real]
    return folder_of


@pytest.fixture(scope='module', params=FAMILIES)
def path(request, folder_of):
    return folder_of(request.param)


@pytest.fixture(scope='module')
def backbone(path):
    """For tests that change nothing in it."""
    return backbones.load(path)


def clips(shapes, seed=0):
    """Noise; with 4 frames or more the last one repeats the one before, in part."""
    rng = np.random.default_rng(seed)
    out = [rng.integers(0, 256, (*shape, 3), dtype=np.uint8) for shape in shapes]
    for x in out:
        if len(x) > 3:
            x[-1, :, :8] = x[-2, :, :8]
    return out


def samples(which=range(5)):
    frames = clips(SHAPES)
    return [SimpleNamespace(id=f'clip{i}', caption=CAPTIONS[i], index=i, frames=frames[i])
            for i in which]


# -----------------------------------------------------------------------------
# frames and prompts

OWN_WORD = {'internvl': '<video>', 'smolvlm': '<video>'}  # what the processor looks for in a text


@pytest.mark.parametrize('family', FAMILIES)
def test_frames_and_prompt_are_those_of_the_familys_processor(family, folder_of):
    """Bit for bit. The processors want torchvision, SmolVLM's num2words as well."""
    pytest.importorskip('torchvision')
    if family == 'smolvlm':
        pytest.importorskip('num2words')
    backbone = backbones.load(folder_of(family, True))
    theirs = transformers.AutoProcessor.from_pretrained(folder_of(family, True))
    word = OWN_WORD.get(family, '<|video_pad|>')
    if family.startswith('qwen2'):  # Qwen3-VL's processor writes these around each block
        word = f'<|vision_start|>{word}<|vision_end|>'
    # ours stops at 768 tokens a frame, as their makers do; the processors of these two do not
    how = {'size': dict(shortest_edge=56 * 56, longest_edge=768 * 28 * 28)} \
        if family.startswith('qwen2') else {}
    shapes = [(1, 96, 128), (2, 1080, 1620), (3, 121, 161), (5, 300, 48), (5, 20, 90),
              (16, 90, 160)]
    # limits on all frames together; of 5 frames Qwen3-VL counts 4
    shapes += {'video_llama_3': [(16, 720, 1280)], 'qwen3_vl': [(5, 928, 960)]}.get(family, [])
    for T, H, W in shapes:
        frames, = clips([(T, H, W)], seed=T)
        if T == 5:  # frames that stand still, all of them or in part
            frames[2] = frames[1]
            frames[3, :, :W // 2] = frames[2, :, :W // 2]
        if T == 1 and family == 'qwen3_vl':  # it takes no single frame, see the next test
            continue
        x = backbone.collate('<video> Go:', frames=[frames], times=[[i / 2 for i in range(T + 1)]])
        meta = transformers.video_utils.VideoMetadata(
            total_num_frames=T, fps=2.0, duration=T / 2, frames_indices=list(range(T)))
        y = theirs(text=[backbone.chat.format(f'{word} Go:')], videos=[frames],
                   video_metadata=[meta], do_sample_frames=False, return_tensors='pt', **how)
        where = f'{family}, {T} frames of {W}x{H}'
        compared = 0
        for key in x:
            if key.startswith(('pixel_values', 'video_')):
                close(x[key].reshape(y[key].shape), y[key], atol=0, rtol=0, msg=f'{where}: {key}')
                compared += 1
        assert compared == {'internvl': 1, 'smolvlm': 1, 'video_llama_3': 4}.get(family, 2)
        if T > 1 or family.startswith('qwen2'):  # ours writes a single frame as an image
            assert x['input_ids'].tolist() == y['input_ids'].tolist(), where
        if family == 'qwen2_5_vl':
            close(x['second_per_grid_ts'], y['second_per_grid_ts'].float(), atol=0, rtol=0)


TIMED = ['qwen2_5_vl', 'qwen3_vl', 'video_llama_3', 'smolvlm']


@pytest.mark.parametrize('family', FAMILIES)
def test_real_times_are_those_of_the_familys_processor(family, folder_of, tmp_path):
    """Files of known frame rate; which frames were read is told by their grey."""
    pytest.importorskip('torchvision')
    if family == 'smolvlm':
        pytest.importorskip('num2words')
    backbone = backbones.load(folder_of(family, True))
    theirs = transformers.AutoProcessor.from_pretrained(folder_of(family, True))
    word = OWN_WORD.get(family, '<|video_pad|>')
    if family.startswith('qwen2'):
        word = f'<|vision_start|>{word}<|vision_end|>'
    told = set()
    for n, rate, T, sampler in ((100, 25, 8, 'uniform'), (97, Fraction(30000, 1001), 5, 'fps3'),
                                (3, 25, 7, 'uniform'), (100, 1, 16, 'uniform'),
                                (61, Fraction(24000, 1001), 16, 'linspace')):
        file = encode(tmp_path / 'x.mp4', ramp(n), options={'crf': '4'}, rate=rate)
        frames, times = video.read_clip(file, T, sampler)
        meta = transformers.video_utils.VideoMetadata(
            total_num_frames=n, fps=float(rate), duration=float(n / rate),
            frames_indices=indices(frames))
        x = backbone.collate('<video> Go:', frames=[frames], times=[times])
        y = theirs(text=[backbone.chat.format(f'{word} Go:')], videos=[frames],
                   video_metadata=[meta], do_sample_frames=False, return_tensors='pt')
        assert x['input_ids'].tolist() == y['input_ids'].tolist(), (n, rate)
        if family == 'qwen2_5_vl':
            close(x['second_per_grid_ts'], y['second_per_grid_ts'].float(), atol=0, rtol=0)
            close(x['position_ids'], backbone.model.model.get_rope_index(
                y['input_ids'], y['mm_token_type_ids'], video_grid_thw=y['video_grid_thw'],
                second_per_grid_ts=y['second_per_grid_ts'])[0])
        plain = backbone.collate('<video> Go:', frames=[frames])
        same = [plain[k].equal(x[k]) for k in x]
        told.add(all(same))
        assert plain.keys() == x.keys() and (all(same) or family in TIMED)
    assert told == {family not in TIMED}


@pytest.mark.parametrize('family', TIMED)
def test_times_are_given_for_all_frames_of_all_items_or_for_none(family, folder_of):
    backbone, some = backbones.load(folder_of(family)), samples([0, 2])
    for s in some:
        s.times = [i / 4 for i in range(len(s.frames) + 1)]
    x = backbone.collate_samples(some, VIDEO)
    want = backbone.collate(VIDEO, frames=[s.frames for s in some], times=[s.times for s in some])
    close(x, want)
    some[1].times = None
    with pytest.raises(ValueError, match="1 of 2 samples have no times, the first is 'clip2'; a b"):
        backbone.collate_samples(some, VIDEO)
    assert backbone.collate_samples(some, TEXT).keys() == {
        'input_ids', 'attention_mask', 'mm_token_type_ids', 'position_ids', 'append_pos', 'cut'}
    some[1].times = [0.0] * 5
    with pytest.raises(ValueError, match='clip2: 5 frames have 5 times; give one for each, and on'):
        backbone.collate_samples(some, VIDEO)


@pytest.mark.parametrize('method', ['mars', 'slq'])
@pytest.mark.parametrize('cache', ['frame_cache', 'cache_vision'])
def test_real_times_reach_the_prompt_in_training_and_evaluation(
        method, cache, folder_of, tiny_data, tmp_path, monkeypatch):
    path, seen, decoded = folder_of('qwen3_vl'), [], []
    tokenizer = backbones.load(path).tokenizer
    keep, decode = backbones.Backbone.collate, data.Clips.decode

    def collate(backbone, prompt, captions=None, frames=None, **how):
        x = keep(backbone, prompt, captions, frames, **how)
        if frames is not None:
            seen.extend(re.findall('<[0-9.]+ seconds>', text)
                        for text in tokenizer.batch_decode(x['input_ids']))
        return x

    monkeypatch.setattr(backbones.Backbone, 'collate', collate)
    monkeypatch.setattr(data.Clips, 'decode', lambda clips, file: decoded.append(file) or
                        decode(clips, file))
    own = {} if method == 'mars' else dict(lora_r=None, lora_alpha=None, lora_dropout=None)
    args = argv(tmp_path / 'run', tiny_data, path, model=method, max_steps=8, num_frames=4,
                **{cache: tmp_path / 'cache'}, **own)
    train_here([a for a in args if not a.endswith('=None')])
    # 8 frames a second, 1 s: of 4 frames, those of .125 and .375, .625 and .875 s
    assert len(seen) == 2 * (24 + 8) and len(decoded) == 24 + 8
    for _ in ('missing', 'there'):
        evaluation.main(configure(evaluation.__file__, [f'--ckpt={tmp_path / "run"}']))
    assert len(seen) == 64 + 2 * 10 and len(decoded) == 32 + 10
    assert all(row == ['<0.2 seconds>', '<0.8 seconds>'] for row in seen)


def test_a_single_frame_is_an_image(folder_of):
    pytest.importorskip('torchvision')
    frame, = clips([(1, 90, 150)])
    for family, how in (('qwen3_vl', {}), ('internvl', {}),
                        ('smolvlm', dict(do_image_splitting=False))):
        backbone = backbones.load(folder_of(family, True))
        theirs = transformers.AutoImageProcessor.from_pretrained(folder_of(family, True))
        y = theirs(images=[frame[0]], return_tensors='pt', **how)
        x, _ = backbone.pixels([frame])
        mine = next(v for k, v in x.items() if k.startswith('pixel_values'))
        close(mine.reshape(y['pixel_values'].shape), y['pixel_values'], atol=0, rtol=0)
        if family == 'qwen3_vl':
            assert x['video_grid_thw'].tolist() == y['image_grid_thw'].tolist()


PROMPTS = {  # of 3 frames of 16x16, 4 tokens each or for each two; and of one
    'qwen2_vl': ('S' + 8 * 'P' + 'E', 'S' + 4 * 'P' + 'E'),
    'qwen2_5_vl': ('S' + 8 * 'P' + 'E', 'S' + 4 * 'P' + 'E'),
    'qwen3_vl': ('<0.5 seconds>SPPPPE<2.0 seconds>SPPPPE', 'SPPPPE'),
    'internvl': ('Frame1: SPPPPE\nFrame2: SPPPPE\nFrame3: SPPPPE', 'SPPPPE'),
    'video_llama_3': ('Time 0.0s:PPPP,Time 1.0s:PPPP,Time 2.0s:PPPP', 'PPPP'),
    'smolvlm': ('You are provided the following series of three frames from a 0:00:03 [H:MM:SS] '
                'video.\n\nFrame from 00:00:SPPPPE\nFrame from 00:01:SPPPPE\nFrame from 00:02:'
                'SPPPPE\n\n', 'SPPPPE')}
MARKS = {'internvl': ('<img>', '<IMG_CONTEXT>', '</img>'),
         'smolvlm': ('<fake_token_around_image><global-img>', '<image>',
                     '<fake_token_around_image>')}


@pytest.mark.parametrize('family', FAMILIES)
def test_the_text_for_a_video_by_hand(family, folder_of):
    backbone = backbones.load(folder_of(family))
    marks = MARKS.get(family, ('<|vision_start|>', '<|video_pad|>', '<|vision_end|>'))
    for T, want in zip((3, 1), PROMPTS[family]):
        frames = clips([(T, 16, 16)])
        text = backbone.vision(backbone.pixels(frames)[1][0])
        want = re.sub('S(?=P)', lambda _: marks[0], want)
        want = re.sub('(?<=P)E', lambda _: marks[2], want).replace('P', '\0')
        for mark in marks:  # letters of the marks themselves
            want = want.replace(mark.replace('P', '\0'), mark)
        assert text == want.replace('\0', marks[1])
        x = backbone.collate(VIDEO, frames=frames, n_append=1)
        n = text.count(marks[1])
        assert x['mm_token_type_ids'].sum() == 2 * n
        assert f'{T} frame{"s" * (T > 1)} of 16x16 -> {len(backbone.ids(text))} LLM' in \
            backbone.cost(T, 16, 16)
    with pytest.raises(ValueError, match='write <video> for a video'):
        backbone.check_prompt(f'<video> {backbone.vision_token}')
    backbone.check_prompt('<video> Frame1: 00:01 seconds, the Time of a series:')  # plain words


def test_numbers_in_words():
    assert [backbones.in_words(n) for n in (1, 8, 13, 16, 20, 21, 64, 99, 100)] == [
        'one', 'eight', 'thirteen', 'sixteen', 'twenty', 'twenty-one', 'sixty-four', 'ninety-nine',
        '100']


def test_videollama3_drops_what_stands_still(folder_of):
    backbone = backbones.load(folder_of('video_llama_3'))
    frames, = clips([(4, 16, 16)])
    frames[1] = frames[0]                            # nothing moves: one token stays
    frames[2], frames[3] = frames[0], frames[0]
    # frame 3's first token differs in 9 of 192 values by 1 of 255, 2 / 255 after normalizing:
    # 2 * 9 / 192 = .094 is less than .1
    frames = frames.clip(0, 254)
    frames[3, :3, :1] += 1
    x, (blocks,) = backbone.pixels([frames])
    assert blocks == [(0, 4), (1, 1), (2, 1), (3, 1)]
    assert x['video_compression_mask'].view(4, 4).tolist() == [
        [True] * 4, *3 * [[True, False, False, False]]]
    frames[3, 3, 0] += 1                             # 12 values: 2 * 12 / 192 = .125
    frames[3, 8:, 8:] += 1
    x, (blocks,) = backbone.pixels([frames])
    assert blocks[3] == (3, 2)
    assert x['video_compression_mask'].view(4, 4)[3].tolist() == [True, False, False, True]


def test_max_pixels_bounds_a_frame_in_every_family(path):
    frames = clips([(4, 64, 64)])
    few, many = (backbones.load(path, n).collate(VIDEO, frames=frames)['mm_token_type_ids'].sum()
                 for n in (8 * 8, 16 * 16))
    assert 0 < 4 * few <= many


# -----------------------------------------------------------------------------
# the decoder

def test_positions_are_counted_without_padding(backbone):
    whole = [backbone.collate(VIDEO, frames=clips(SHAPES), n_append=2, padding_side=side)
             for side in PADS]
    for i, shape in enumerate(SHAPES):
        alone = backbone.collate(VIDEO, frames=[clips(SHAPES)[i]], n_append=2)
        for x in whole:
            mask = x['attention_mask'][i].bool()
            close(x['position_ids'][..., i, mask], alone['position_ids'][..., 0, :])
        pos = alone['position_ids'].reshape(-1, alone['input_ids'].shape[1])
        at = alone['append_pos'][0]
        assert (pos[:, at[0]] == pos[:, :at[0]].max() + 1).all()  # behind all that went before
        assert (pos[:, at[1]] == pos[:, at[0]] + 1).all()


def test_run_is_the_whole_models_own_forward(backbone):
    """With nothing of ours but the ids and the pixels, its own positions, one item."""
    for frames in clips(SHAPES[:3]):
        x = backbone.collate(VIDEO, frames=[frames])
        known = {k: v for k, v in x.items() if k not in ('append_pos', 'cut', 'position_ids')}
        with torch.no_grad():
            want = backbone.model(**known, output_hidden_states=True).hidden_states
            close(backbone.run(x), want[-1])
            seen = []
            hooks = [layer.register_forward_hook(lambda m, args, h: seen.append(h))
                     for layer in backbone.layers]
            backbone.run(x)
        for hook in hooks:
            hook.remove()
        text = x['mm_token_type_ids'] == 0  # deepstack adds to the others between the layers
        for h, w in zip(seen, want[1:-1], strict=False):
            close(h[text], w[text])
        close(backbone.norm(seen[-1]), want[-1])


def test_features_stand_for_pixels(path):
    """The frozen tower's rows, kept apart and put back, give the same states and gradients."""
    backbone = backbones.load(path)
    x = backbone.collate(VIDEO, frames=clips(SHAPES), n_append=2)
    rows = backbone.features(x)
    assert len(rows) == (x['mm_token_type_ids'] == 2).sum() and not rows.requires_grad
    y = dict(x, features=rows)  # pixels beside them are not looked at
    weights = [m.weight.requires_grad_() for name, m in backbone.model.named_modules()
               if re.fullmatch(backbone.lora_regex, name) and 'layers' not in name]
    grads = []
    for inputs in (x, y):
        h = backbone.run(inputs)
        grads.append([h, *torch.autograd.grad(h.square().sum(), weights)])
    close(*grads)
    some = torch.tensor([4, 1])
    part = backbone.select(y, some)
    close(part['features'], backbone.features(backbone.select(x, some)))


def test_selected_items_are_those_collated_alone(backbone):
    frames, rows = clips(SHAPES), torch.tensor([3, 0, 1])
    part = backbone.select(backbone.collate(VIDEO, frames=frames, n_append=2), rows)
    want = backbone.collate(VIDEO, frames=[frames[i] for i in rows], n_append=2)
    assert part.keys() == want.keys()
    L, mask = want['input_ids'].shape[1], want['attention_mask'].bool()
    for key in want:
        got = part[key]
        if key in ('input_ids', 'attention_mask', 'mm_token_type_ids', 'position_ids'):
            got = got[..., :L]  # less padding: the longest is not among them
        if key == 'position_ids':
            close(got[..., mask], want[key][..., mask])
        else:
            close(got, want[key])


@pytest.mark.parametrize('method', ['mars', 'slq', 'slq plain'])
def test_an_embedding_depends_on_no_batch_mate_and_no_padding_side(path, method):
    torch.manual_seed(0)
    backbone = backbones.load(path)
    if method == 'mars':
        model = MARS(MARSConfig(backbone=path, num_slots=2, lora_r=2), backbone).eval()
        n, key = 2, 'slots'
    else:
        model = SLQ(SLQConfig(backbone=path, num_queries=3, content_chunk=2,
                              prefix_cache=method == 'slq'), backbone).eval()
        n, key = 3, 'z'

    def encode(which, side):
        out = []
        for prompt, content in ((TEXT, dict(captions=[CAPTIONS[i] for i in which])),
                                (VIDEO, dict(frames=[clips(SHAPES)[i] for i in which]))):
            inputs = backbone.collate(prompt, **content, n_append=n, padding_side=side)
            out.append(model.encode_video(inputs)[key])
        return torch.stack(out)

    with torch.no_grad():
        alone = torch.cat([encode([i], 'right') for i in range(5)], 1)
        assert (alone[:, 0] - alone[:, 1:].mean(1)).abs().max() > 0.01, 'a flat model tests nothing'
        for side in PADS:
            close(encode(range(5), side), alone, atol=1e-4, rtol=0)
            close(encode([4, 2], side), alone[:, [4, 2]], atol=1e-4, rtol=0)


@pytest.mark.parametrize('side', ['text', 'video'])
def test_slqs_prefix_cache_is_the_plain_pass(path, side):
    content = dict(captions=CAPTIONS) if side == 'text' else dict(frames=clips(SHAPES))
    results = []
    for settings in (dict(prefix_cache=False, gradient_checkpointing=False),
                     dict(content_chunk=2), dict(content_chunk=0)):
        torch.manual_seed(0)
        model = SLQ(SLQConfig(backbone=path, num_queries=3, **settings), backbones.load(path))
        for padding_side in PADS:
            inputs = model.backbone.collate(TEXT if side == 'text' else VIDEO, **content,
                                            n_append=3, padding_side=padding_side)
            assert len(set(inputs['attention_mask'].sum(1).tolist())) > 2, 'ragged'
            z = model.encode_video(inputs)['z']
            direction = torch.randn(z.shape, generator=torch.Generator().manual_seed(1))
            grad, = torch.autograd.grad((z * direction).sum(), model.queries)
            results.append((z.detach(), grad))
    (want_z, want_grad), *others = results
    for z, grad in others:
        close(z, want_z, atol=1e-5, rtol=0)
        assert (grad - want_grad).norm() < 1e-5 * want_grad.norm()


# -----------------------------------------------------------------------------
# training

PROJECTORS = {'qwen2_vl': {'model.visual.merger.mlp.0', 'model.visual.merger.mlp.2'},
              'qwen3_vl': {'model.visual.merger.linear_fc1', 'model.visual.merger.linear_fc2'},
              'internvl': {'model.multi_modal_projector.linear_1',
                           'model.multi_modal_projector.linear_2'},
              'video_llama_3': {'model.projector.readout.0', 'model.projector.readout.2'},
              'smolvlm': {'model.connector.modality_projection.proj'}}
PROJECTORS['qwen2_5_vl'] = PROJECTORS['qwen2_vl']


@pytest.mark.parametrize('family', FAMILIES)
def test_lora_is_on_the_llms_seven_linears_and_the_projector_alone(family, folder_of):
    path = folder_of(family)
    model = MARS(MARSConfig(backbone=path, lora_r=2), backbones.load(path))
    llm = 'text_model' if family == 'smolvlm' else 'language_model'
    want = {f'model.{llm}.layers.{i}.{part}' for i in range(3) for part in (
        'self_attn.q_proj', 'self_attn.k_proj', 'self_attn.v_proj', 'self_attn.o_proj',
        'mlp.gate_proj', 'mlp.up_proj', 'mlp.down_proj')} | PROJECTORS[family]
    got = {name.removeprefix('base_model.model.') for name, m in model.mllm.named_modules()
           if hasattr(m, 'lora_A')}
    assert got == want
    text = model.summary()
    assert 'LoRA on   21 modules of language model' in text
    assert sum(model.adapted.values()) == 21 + len(PROJECTORS[family])
    slq = SLQ(SLQConfig(backbone=path, tuning='lora', extraction='last'), backbones.load(path))
    assert 'LoRA on   21 modules of language model' in slq.summary()


def test_mars_trains_all_it_adapts_and_checkpointing_changes_nothing(path):
    gradients = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = MARS(MARSConfig(backbone=path, num_slots=3, lora_r=2, lora_dropout=0.0,
                                gradient_checkpointing=checkpointing), backbones.load(path))
        with torch.no_grad():
            for name, p in model.named_parameters():
                if 'lora_B' in name:
                    p.normal_(0, 0.1)  # from their start at zero, A gets no gradient
        frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
        calls = []
        hook = model.backbone.layers[0].self_attn.register_forward_hook(
            lambda *a: calls.append(1))
        (batch,), ids, _ = train.collate_chunks(samples(), model.collate, 0)
        loss, _ = train.plain_step(model, batch, ids, nullcontext)
        hook.remove()
        assert len(calls) == (4 if checkpointing else 2)  # once more in backward
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
        assert torch.isfinite(loss)
        for n, g in gradients[-1].items():
            assert g is not None and g.any(), n
        assert all(torch.equal(p, frozen[n]) for n, p in model.named_parameters() if n in frozen)
    close(*gradients, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize('method', ['mars', 'slq'])
def test_trains_a_step_and_evaluates_through_the_scripts(path, method, tiny_data, tmp_path, capsys):
    out = str(tmp_path / 'run')
    own = {} if method == 'mars' else dict(num_queries=4, lora_r=None, lora_alpha=None,
                                           lora_dropout=None)
    args = argv(out, tiny_data, path, model=method, max_steps=1, save_every=0, batch_size=8, **own)
    train_here([a for a in args if not a.endswith('=None')])
    rows = [row for row in lines(out) if 'loss' in row]
    assert len(rows) == 1 and math.isfinite(rows[0]['loss']) and rows[0]['grad_norm'] > 0
    family = json.loads((tmp_path / 'run/config.json').read_text())
    evaluation.main(configure(evaluation.__file__, [f'--ckpt={out}', '--which=latest']))
    result = json.loads((tmp_path / 'run/metrics.json').read_text())
    assert next(iter(result.values()))['n_video'] == 10 and family
    said = capsys.readouterr().out
    assert len(re.findall(r'^\w+: 2 frames of 640x360 -> \d+ LLM tokens a video$', said, re.M)) == 2
    if method == 'mars':
        assert 'LoRA on   21 modules of language model' in said


# -----------------------------------------------------------------------------
# checkpoints

HUB_NAMES = {  # how the public files begin their tensors' names: LLM, tower, projector
    'qwen2_vl': ('model.layers.', 'visual.blocks.', 'visual.merger.'),
    'qwen2_5_vl': ('model.layers.', 'visual.blocks.', 'visual.merger.'),
    'qwen3_vl': ('model.language_model.layers.', 'model.visual.blocks.', 'model.visual.merger.'),
    'internvl': ('language_model.model.layers.', 'vision_tower.encoder.',
                 'multi_modal_projector.linear_1.'),
    'video_llama_3': ('model.language_model.layers.', 'model.vision_model.encoder.',
                      'model.projector.readout.'),
    'videollama3_qwen2': ('model.layers.', 'model.vision_encoder.encoder.',
                          'model.mm_projector.readout.'),
    'smolvlm': ('model.text_model.layers.', 'model.vision_model.encoder.',
                'model.connector.modality_projection.')}
BACK = {'llm': ('model.language_model.', 'model.text_model.'),
        'tower': ('model.visual.', 'model.vision_tower.', 'model.vision_model.'),
        'projector': ('model.multi_modal_projector.', 'model.projector.', 'model.connector.')}


@pytest.mark.parametrize('family', HUB_NAMES)
def test_a_checkpoint_under_the_hubs_names_is_loaded_whole(family, folder_of, tmp_path,
                                                           monkeypatch):
    # a folder that names code of its own is not even offered to be run
    monkeypatch.setattr('builtins.input', lambda *a: pytest.fail('asks whether to run code'))
    source = folder_of('video_llama_3' if family == 'videollama3_qwen2' else family)
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    want = backbones.load(source).model.state_dict()
    tensors = {}
    llm, tower, projector = HUB_NAMES[family]
    for name, x in want.items():  # module names -> the hub's
        if name == 'lm_head.weight':  # tied
            continue
        for kind, hub in (('llm', llm), ('tower', tower), ('projector', projector)):
            own = next((p for p in BACK[kind] if name.startswith(p)), None)
            if own:
                head = {'llm': hub.removesuffix('layers.'),
                        'tower': re.sub(r'(blocks|encoder)\.$', '', hub),
                        'projector': re.match(r'(model\.)?[a-z_]+\.', hub)[0]}[kind]
                name = head + name.removeprefix(own)
                break
        tensors[name] = x.clone()
    for start in HUB_NAMES[family]:
        assert any(name.startswith(start) for name in tensors), start
    save_file(tensors, tmp_path / 'model.safetensors', metadata={'format': 'pt'})
    if family == 'videollama3_qwen2':
        config = json.loads((tmp_path / 'config.json').read_text())
        config = dict(config['text_config'], model_type=family, vision_encoder_config=dict(
            config['vision_config'], model_type='videollama3_vision_encoder'),
            auto_map={'AutoConfig': 'no_such_file.Config', 'AutoModel': 'no_such_file.Model'},
            architectures=['Videollama3Qwen2ForCausalLM'], image_token_index=300)
        (tmp_path / 'config.json').write_text(json.dumps(config))
    got = backbones.load(str(tmp_path)).model.state_dict()
    assert got.keys() == want.keys() and all(torch.equal(got[k], want[k]) for k in want)
    # and none is made up: without one tensor nothing is loaded
    lost = next(n for n in sorted(tensors) if n.startswith(projector))
    del tensors[lost]
    save_file(tensors, tmp_path / 'model.safetensors', metadata={'format': 'pt'})
    with pytest.raises(ValueError, match='1 tensors are missing'):
        backbones.load(str(tmp_path))


@pytest.mark.parametrize('more, fine', [(1, True), (300, False)])
def test_a_tokenizer_may_know_a_few_words_more_than_the_model(more, fine, folder_of, tmp_path):
    shutil.copytree(folder_of('internvl'), tmp_path, dirs_exist_ok=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.add_tokens([f'<word{i}>' for i in range(512 + more - len(tokenizer))])
    tokenizer.save_pretrained(tmp_path)
    with nullcontext() if fine else pytest.raises(ValueError, match='its tokenizer knows 812'):
        backbones.load(str(tmp_path))


def test_sixteen_bits_are_loaded_without_a_copy_in_32(path, monkeypatch, tmp_path):
    from torch.utils._python_dispatch import TorchDispatchMode
    monkeypatch.setenv('HF_DEACTIVATE_ASYNC_LOAD', '1')  # the mode sees this thread alone
    for dtype in (torch.bfloat16, torch.float32):  # of the file; hub files are in bfloat16
        shutil.copytree(path, tmp_path, dirs_exist_ok=True)
        tensors = {k: v.to(dtype) for k, v in load_file(tmp_path / 'model.safetensors').items()}
        save_file(tensors, tmp_path / 'model.safetensors', metadata={'format': 'pt'})
        made = []

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                out = func(*args, **(kwargs or {}))
                if torch.is_tensor(out) and out.dtype == torch.float32 and \
                        out.device.type != 'meta':
                    made.append(out.numel())
                return out

        with Watch():
            backbone = backbones.load(str(tmp_path), dtype=torch.bfloat16)
        assert {p.dtype for p in backbone.model.parameters()} == {torch.bfloat16}
        if dtype == torch.bfloat16:  # rotary frequencies and the like, no weights
            assert sum(made) < 0.1 * sum(p.numel() for p in backbone.model.parameters())
    x = backbone.collate(VIDEO, frames=clips(SHAPES), n_append=1)
    assert backbone.run(x).isfinite().all()


def test_flash_attention_is_taken_where_it_can_run(monkeypatch, folder_of):
    asked = {}

    def family(path, max_pixels, **kw):
        asked.update(kw)
        return SimpleNamespace(model=torch.nn.Linear(1, 1))

    monkeypatch.setitem(backbones.FAMILIES, 'qwen2_vl', family)
    for flash, gpu, dtype, want in (
            (True, True, torch.bfloat16, 'flash_attention_2'), (True, True, torch.float32, 'sdpa'),
            (True, False, torch.bfloat16, 'sdpa'), (False, True, torch.bfloat16, 'sdpa')):
        monkeypatch.setattr(backbones, 'is_flash_attn_2_available', lambda: flash)
        monkeypatch.setattr(torch.cuda, 'is_available', lambda: gpu)
        backbones.load(folder_of('qwen2_vl'), dtype=dtype)
        assert asked['attn_implementation'] == want
        assert 'device_map' not in asked


def test_offline_says_which_files_to_put_where(monkeypatch):
    def no_network(*args, **kw):
        raise OSError('no network')

    monkeypatch.setattr(backbones, 'get_hf_file_metadata', no_network)
    with pytest.raises(FileNotFoundError) as e:
        backbones.load('nobody/a-model-of-no-such-name')
    for words in ('config.json', '*.safetensors', 'tokenizer*.json', 'preprocessor_config.json',
                  'into a folder', '--backbone=FOLDER'):
        assert words in str(e.value)


# -----------------------------------------------------------------------------
# full sizes, without weights

QWEN = dict(image_token_id=151655, video_token_id=151656, vision_start_token_id=151652,
            vision_end_token_id=151653)


def qwen2_text(D, inner, N, heads, kv, vocab=152064, tied=False, **more):
    return dict(hidden_size=D, intermediate_size=inner, num_hidden_layers=N, vocab_size=vocab,
                num_attention_heads=heads, num_key_value_heads=kv, tie_word_embeddings=tied, **more)


def mrope(section, theta, **more):
    return dict(rope_theta=theta, rope_scaling=dict(mrope_section=section, rope_type='default',
                                                    **more))


def qwen3(D, inner, N, heads, deep):
    return dict(QWEN, tie_word_embeddings=True, text_config=qwen2_text(
        D, inner, N, heads, 8, 151936, True, head_dim=128, model_type='qwen3_vl_text',
        **mrope([24, 20, 20], 5000000, mrope_interleaved=True)), vision_config=dict(
        depth=24, hidden_size=1024, intermediate_size=4096, num_heads=16, out_hidden_size=D,
        patch_size=16, spatial_merge_size=2, temporal_patch_size=2, num_position_embeddings=2304,
        deepstack_visual_indexes=deep, model_type='qwen3_vl'))


def internvl3(text):
    return dict(text_config=dict(text, model_type='qwen2'), vision_config=dict(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16,
        attention_bias=True, image_size=[448, 448], patch_size=[14, 14]),
        tie_word_embeddings=text['tie_word_embeddings'])


MROPE = mrope([16, 24, 24], 1000000)
SIZES = {  # id -> class, what its config.json says of sizes, layers, width, parameters on its page
    'Qwen/Qwen2-VL-2B-Instruct': ('Qwen2VL', dict(
        QWEN, **qwen2_text(1536, 8960, 28, 12, 2, 151936, True), **MROPE,
        vision_config=dict(hidden_size=1536, model_type='qwen2_vl')), 28, 1536, 2.209e9),
    'Qwen/Qwen2-VL-7B-Instruct': ('Qwen2VL', dict(
        QWEN, **qwen2_text(3584, 18944, 28, 28, 4), **MROPE,
        vision_config=dict(model_type='qwen2_vl')), 28, 3584, 8.29e9),
    'Qwen/Qwen2.5-VL-3B-Instruct': ('Qwen2_5_VL', dict(
        QWEN, **qwen2_text(2048, 11008, 36, 16, 2, 151936, True), **MROPE, vision_config=dict(
            hidden_size=1280, out_hidden_size=2048, model_type='qwen2_5_vl')), 36, 2048, 3.755e9),
    'Qwen/Qwen2.5-VL-7B-Instruct': ('Qwen2_5_VL', dict(
        QWEN, **qwen2_text(3584, 18944, 28, 28, 4), **MROPE, vision_config=dict(
            hidden_size=1280, model_type='qwen2_5_vl')), 28, 3584, 8.29e9),
    'Qwen/Qwen3-VL-2B-Instruct': ('Qwen3VL', qwen3(2048, 6144, 28, 16, [5, 11, 17]),
                                  28, 2048, 2.128e9),
    'Qwen/Qwen3-VL-4B-Instruct': ('Qwen3VL', qwen3(2560, 9728, 36, 32, [5, 11, 17]),
                                  36, 2560, 4.438e9),
    'OpenGVLab/InternVL3-1B-hf': ('InternVL', internvl3(
        qwen2_text(896, 4864, 24, 14, 2, 151674)), 24, 896, 0.938e9),
    'OpenGVLab/InternVL3-8B-hf': ('InternVL', internvl3(
        qwen2_text(3584, 18944, 28, 28, 4, 151674)), 28, 3584, 7.94e9),
    'lkhl/VideoLLaMA3-7B-Image-HF': ('VideoLlama3', dict(
        text_config=dict(qwen2_text(3584, 18944, 28, 28, 4), model_type='qwen2'),
        vision_config=dict(hidden_size=1152, intermediate_size=4304, num_hidden_layers=27,
                           num_attention_heads=16, patch_size=14)), 28, 3584, 8.04e9),
    'HuggingFaceTB/SmolVLM2-500M-Video-Instruct': ('SmolVLM', dict(
        text_config=dict(qwen2_text(960, 2560, 32, 15, 5, 49280), head_dim=64, model_type='llama'),
        vision_config=dict(hidden_size=768, intermediate_size=3072, num_hidden_layers=12,
                           num_attention_heads=12, image_size=512, patch_size=16),
        scale_factor=4, image_token_id=49190), 32, 960, 0.507e9)}


@pytest.mark.parametrize('name', SIZES)
def test_the_full_size_has_its_layers_width_and_parameters(name):
    kind, config, layers, width, parameters = SIZES[name]
    config = getattr(transformers, f'{kind}Config')(**config)
    with torch.device('meta'):
        model = getattr(transformers, f'{kind}ForConditionalGeneration')(config)
    family = {'Qwen2VL': 'qwen2_vl', 'Qwen2_5_VL': 'qwen2_5_vl', 'Qwen3VL': 'qwen3_vl',
              'InternVL': 'internvl', 'VideoLlama3': 'video_llama_3', 'SmolVLM': 'smolvlm'}[kind]
    regex = backbones_regex(family)
    hit = [n for n, _ in model.named_modules() if re.fullmatch(regex, n)]
    assert len(hit) == 7 * layers + len(PROJECTORS[family])
    assert model.get_input_embeddings().weight.shape[1] == width
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(parameters, rel=0.005)


def backbones_regex(family):
    """The family's lora_regex, out of a tiny backbone."""
    if family not in REGEX:
        import tempfile
        with tempfile.TemporaryDirectory() as folder:
            REGEX[family] = backbones.load(make_family(folder, family)).lora_regex
    return REGEX[family]


REGEX = {}
