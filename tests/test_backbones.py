"""
The backbone handle on a tiny random Qwen2-VL: what goes into the decoder, against hand-written
numbers, literal loops and transformers' own source. CPU, about 10 s.

python -m pytest tests/test_backbones.py -v
"""
import ast
import json
import math
import re
import shutil
import socket
import time
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers

import backbones
from conftest import make_qwen2vl

close = torch.testing.assert_close
VIDEO, TEXT = '<video>\nSummarize above video in one word:', '{caption}\nSummarize above sentence:'
PADS = ['right', 'left']


@pytest.fixture(scope='module')
def backbone(tiny_qwen2vl):
    return backbones.load(tiny_qwen2vl)


def clips(*lengths, side=16, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, (t, side, side, 3), dtype=np.uint8) for t in lengths]


# -----------------------------------------------------------------------------
# frames

def transformers_smart_resize():
    """Their function out of their file: importing it would want torchvision."""
    file = Path(transformers.__file__).parent / 'models/qwen2_vl/image_processing_qwen2_vl.py'
    body = ast.parse(file.read_text(encoding='utf-8')).body
    body = [n for n in body if isinstance(n, ast.FunctionDef) and n.name == 'smart_resize']
    names = {'math': math}
    exec(compile(ast.Module(body, []), str(file), 'exec'), names)
    return names['smart_resize']


@pytest.mark.parametrize('factor, lo, hi', [(28, 56 * 56, 768 * 28 * 28), (8, 256, 256),
                                            (28, 56 * 56, 28 * 28 * 1280), (16, 1024, 64 * 64)])
def test_fit_size_is_the_rule_of_qwen2_vls_processor(factor, lo, hi):
    smart_resize, rng = transformers_smart_resize(), np.random.default_rng(0)
    sizes = rng.integers(1, 3000, (3000, 2)).tolist() + [[14, 14], [42, 70], [1, 200], [200, 1]]
    for h, w in sizes:
        if max(h, w) <= 200 * min(h, w):
            assert backbones.fit_size(h, w, factor, lo, hi) == smart_resize(h, w, factor, lo, hi)
    with pytest.raises(ValueError, match='too thin'):
        backbones.fit_size(1, 201, factor, lo, hi)


@pytest.mark.parametrize('T', [4, 3, 1])
def test_patches_are_indexed_out_of_the_frames_one_by_one(T):
    frames = np.random.default_rng(T).integers(0, 256, (T, 16, 24, 3), dtype=np.uint8)
    mean, std = (0.48, 0.46, 0.41), (0.27, 0.26, 0.28)
    rows, grid = backbones.patches(frames, 16, 24, 4, 2, 2, mean, std)
    assert grid == (math.ceil(T / 2), 4, 6)
    n = 0
    for t in range(grid[0]):
        for block_y in range(2):
            for block_x in range(3):
                for y, x in ((0, 0), (0, 1), (1, 0), (1, 1)):  # inside the block of one LLM token
                    top, left = 8 * block_y + 4 * y, 8 * block_x + 4 * x
                    want = [(frames[min(2 * t + k, T - 1), top + i, left + j, c] / 255 - mean[c])
                            / std[c] for c in range(3) for k in range(2)   # an odd T repeats its
                            for i in range(4) for j in range(4)]           # last frame
                    close(rows[n].double(), torch.tensor(want, dtype=torch.double), atol=1e-5,
                          rtol=0)
                    n += 1
    assert len(rows) == n


def test_other_sizes_are_resized_like_uint8_images():
    frames = clips(2, side=32)[0]
    rows, _ = backbones.patches(frames, 16, 16, 4, 2, 2, (0, 0, 0), (1, 1, 1))
    small = F.interpolate(torch.from_numpy(frames).permute(0, 3, 1, 2), (16, 16), mode='bicubic',
                          antialias=True)                                    # [2, 3, 16, 16]
    again, _ = backbones.patches(small.permute(0, 2, 3, 1).numpy(), 16, 16, 4, 2, 2, (0, 0, 0),
                                 (1, 1, 1))
    close(rows, again, atol=0, rtol=0)
    # and it is a mean over areas, not a pick of pixels: noise of spread 74 gets much flatter
    assert (255 * rows).std() < 50 < frames.std()


def test_max_pixels_sets_the_number_of_tokens(tiny_qwen2vl):
    def tokens(max_pixels):
        return backbones.load(tiny_qwen2vl, max_pixels).pixels(clips(4, side=32))[1]

    assert tokens(0) == [2 * 2 * 2]  # the checkpoint's limit: 256 pixels, patch 4, merge 2
    assert tokens(32 * 32) == [2 * 4 * 4]
    assert tokens(16 * 16) == [2 * 2 * 2]


# -----------------------------------------------------------------------------
# prompts

def test_rope_positions_of_a_video_by_hand(backbone):
    x = backbone.collate(VIDEO, frames=clips(4), n_append=2)
    ids, pos = x['input_ids'][0], x['position_ids'][:, 0]                    # [L], [3, L]
    pad = backbone.tokenizer.convert_tokens_to_ids('<|video_pad|>')
    at = (ids == pad).nonzero().flatten().tolist()
    n = at[0]
    assert at == list(range(n, n + 8))  # 2 pairs of frames x 2 x 2 merged patches
    close(pos[:, :n], torch.arange(n).expand(3, n))
    close(pos[:, n:n + 8] - n, torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1],       # time
                                             [0, 0, 1, 1, 0, 0, 1, 1],       # row
                                             [0, 1, 0, 1, 0, 1, 0, 1]]))     # column
    rest = len(ids) - n - 8  # the text goes on behind the largest position, n + 1
    close(pos[:, n + 8:], (n + 2 + torch.arange(rest)).expand(3, rest))
    assert x['append_pos'].tolist() == [[len(ids) - 2, len(ids) - 1]]


@pytest.mark.parametrize('padding_side', PADS)
def test_padding_is_no_position(backbone, padding_side):
    x = backbone.collate(TEXT, ['a', 'a red circle moves left then right'], n_append=1,
                         padding_side=padding_side)
    for row, mask in enumerate(x['attention_mask'].bool()):
        n = int(mask.sum())
        close(x['position_ids'][:, row][:, mask], torch.arange(n).expand(3, n))
    padding = x['attention_mask'][0] == 0
    assert padding.sum() > 3 and padding[0 if padding_side == 'left' else -1]


@pytest.mark.parametrize('padding_side', PADS)
def test_an_embedding_depends_on_no_batch_mate_and_no_padding_side(backbone, padding_side):
    captions = ['a', 'a red circle moves left then a blue square grows', 'two']
    frames = clips(2, 4, 1)

    def last_states(which, side):
        out = []
        for kw in (dict(prompt=TEXT, captions=[captions[i] for i in which]),
                   dict(prompt=VIDEO, frames=[frames[i] for i in which])):
            x = backbone.collate(**kw, n_append=2, padding_side=side)
            with torch.no_grad():
                h = backbone.run(x)                                          # [B, L, D]
            out.append(h[torch.arange(len(which))[:, None], x['append_pos']])
        return torch.stack(out)                                              # [2, B, 2, D]

    together = last_states([0, 1, 2], padding_side)
    for i in range(3):
        close(together[:, i], last_states([i], 'right')[:, 0], atol=1e-4, rtol=1e-4)
    assert (together[:, 0] - together[:, 1]).abs().max() > 0.01


@pytest.mark.parametrize('word', ['<|im_end|>', '<|video_pad|>', '<|im_start|>', '{caption}',
                                  '<video>', '<|vision_start|>'])
def test_a_caption_that_spells_a_template_is_plain_text(backbone, word):
    caption = f'a red {word} moves'
    x = backbone.collate(TEXT, [caption])
    plain = backbone.collate(TEXT, ['a red circle moves'])
    special = torch.tensor(backbone.tokenizer.convert_tokens_to_ids(
        ['<|im_start|>', '<|im_end|>', '<|video_pad|>', '<|vision_start|>', '<|vision_end|>']))

    def count(x):
        return (x['input_ids'][0][:, None] == special).sum(0)

    close(count(x), count(plain))
    assert x['mm_token_type_ids'].sum() == 0
    text = backbone.tokenizer.decode(x['input_ids'][0])
    assert text == backbone.chat.format(TEXT).replace('{caption}', caption)


@pytest.mark.parametrize('word', ['<|video_pad|>', '<|vision_start|>', '<|vision_end|>'])
def test_a_prompt_that_spells_a_vision_token_is_an_error(backbone, word):
    for prompt, content in ((f'{{caption}} {word}', dict(captions=['a'])),
                            (f'<video>{word} now', dict(frames=clips(2)))):
        with pytest.raises(ValueError, match=re.escape(f'spells {word!r}') + '.*write <video>'):
            backbone.collate(prompt, **content)


def test_the_template_itself_is_read_with_its_special_tokens(backbone):
    x = backbone.collate(VIDEO, frames=clips(4, 2))
    names = backbone.tokenizer.convert_ids_to_tokens(x['input_ids'][0])
    assert names.count('<|im_start|>') == 3 and names.count('<|im_end|>') == 2
    first = names.index('<|vision_start|>')
    assert names[first + 1:first + 10] == ['<|video_pad|>'] * 8 + ['<|vision_end|>']
    close((x['mm_token_type_ids'] == 2).sum(1), torch.tensor([8, 4]))
    close(x['video_grid_thw'], torch.tensor([[2, 4, 4], [1, 4, 4]]))


def test_a_long_caption_is_cut_and_its_prompt_is_not(backbone):
    long = 'a red circle moves left ' * 40
    x = backbone.collate(TEXT, [long, 'a circle'], max_text_tokens=10, n_append=2)
    assert x['cut'].tolist() == [True, False]
    ids = x['input_ids'][0].tolist()
    head, tail = (backbone.ids(part) for part in backbone.chat.format(TEXT).split('{caption}'))
    assert ids[:len(head)] == head and ids[-2 - len(tail):-2] == tail
    assert ids[len(head):-2 - len(tail)] == backbone.plain_ids(long.strip())[:10]
    exact = backbone.plain_ids('a red circle moves')
    assert backbone.collate(TEXT, ['a red circle moves'],
                            max_text_tokens=len(exact))['cut'].tolist() == [False]


@pytest.mark.parametrize('padding_side', PADS)
def test_labels_cover_the_answer_and_its_end(backbone, padding_side):
    answers = ['a circle', 'a blue square grows then a red <|im_end|> moves left']
    x = backbone.collate(VIDEO, frames=clips(2, 4), answers=answers, padding_side=padding_side)
    end = backbone.tokenizer.convert_tokens_to_ids('<|im_end|>')
    for i in range(2):
        at = (x['labels'][i] != -100).nonzero().flatten()
        want = backbone.plain_ids(answers[i]) + [end]
        assert x['labels'][i][at].tolist() == x['input_ids'][i][at].tolist() == want
        last = int(x['attention_mask'][i].nonzero().max())
        assert at.tolist() == list(range(last + 1 - len(want), last + 1))
        before = x['input_ids'][i][:at[0]]  # right behind the assistant's header
        tail = backbone.ids('<|im_start|>assistant\n')
        assert before[-len(tail):].tolist() == tail


@pytest.mark.parametrize('padding_side', PADS)
def test_appended_positions_are_the_last_tokens(backbone, padding_side):
    x = backbone.collate(TEXT, ['a', 'a red circle moves left'], n_append=3,
                         padding_side=padding_side)
    eos = backbone.tokenizer.eos_token_id
    for i in range(2):
        last = int(x['attention_mask'][i].nonzero().max())
        assert x['append_pos'][i].tolist() == [last - 2, last - 1, last]
        assert x['input_ids'][i, x['append_pos'][i]].tolist() == [eos] * 3
    assert backbone.collate(TEXT, ['a', 'b'])['append_pos'].shape == (2, 0)


# -----------------------------------------------------------------------------
# loading

@pytest.mark.parametrize('layers', [2, 3])
def test_lora_regex_matches_seven_linears_per_layer_and_the_projector(tmp_path, layers):
    backbone = backbones.load(make_qwen2vl(tmp_path, layers=layers))
    linears = {name for name, m in backbone.model.named_modules() if isinstance(m, torch.nn.Linear)}
    hit = {name for name, _ in backbone.model.named_modules()
           if re.fullmatch(backbone.lora_regex, name)}
    assert hit <= linears and len(hit) == 7 * layers + 2
    assert sum('visual' in name for name in hit) == 2
    assert len([n for n in linears if 'visual' in n]) > 2  # the tower itself has linears, too
    assert backbone.num_layers == layers and backbone.hidden_size == 32


def test_a_loaded_backbone_is_frozen_and_in_eval_mode(backbone):
    assert not any(p.requires_grad for p in backbone.model.parameters())
    assert not any(m.training for m in backbone.model.modules())
    assert {p.dtype for p in backbone.model.parameters()} == {torch.float32}


def test_run_is_the_model_without_its_head(backbone):
    x = backbone.collate(VIDEO, frames=clips(4, 2), n_append=1)
    known = {k: v for k, v in x.items() if k not in ('append_pos', 'cut')}
    with torch.no_grad():
        logits = backbone.model(**known).logits
        close(logits, backbone.model.lm_head(backbone.run(x)))


def test_errors_of_load_are_one_sentence(tmp_path):
    for path, why in (('', 'is empty'), (tmp_path / 'nowhere', 'no such folder'),
                      (tmp_path, 'holds no config.json')):
        with pytest.raises(FileNotFoundError, match=why) as e:
            backbones.load(str(path))
        assert '\n' not in str(e.value)
    (tmp_path / 'config.json').write_text(json.dumps({'model_type': 'idefics2'}))
    with pytest.raises(ValueError, match="'idefics2', which is not supported") as e:
        backbones.load(str(tmp_path))
    assert 'qwen2_vl' in str(e.value) and '\n' not in str(e.value)


def change_weights(change):
    def of_folder(folder):
        from safetensors.torch import load_file, save_file
        tensors = load_file(folder / 'model.safetensors')
        change(tensors, next(name for name in sorted(tensors) if name.endswith('norm1.bias')))
        save_file(tensors, folder / 'model.safetensors', metadata={'format': 'pt'})
    return of_folder


def cut_short(name):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:60])


@pytest.mark.parametrize('fixture', ['tiny_qwen2vl', 'tiny_clip'])
@pytest.mark.parametrize('damage, says', [
    (lambda f: [p.unlink() for p in f.glob('tokenizer*')], r'its tokenizer knows \d tokens'),
    (lambda f: (f / 'tokenizer.json').unlink(), 'tokenizer.json'),
    (cut_short('tokenizer.json'), "can't read its tokenizer.json"),
    (lambda f: (f / 'preprocessor_config.json').unlink(), "can't read its preprocessor_config"),
    (cut_short('preprocessor_config.json'), "can't read its preprocessor_config.json"),
    (lambda f: (f / 'preprocessor_config.json').write_text('{}'), 'config.json has no'),
    (lambda f: (f / 'model.safetensors').unlink(), "can't read its weights .*model.safetensors"),
    (cut_short('model.safetensors'), "can't read its weights"),
    (change_weights(lambda t, name: t.pop(name)), r'1 tensors are missing, first \S+norm1.bias;'),
    (change_weights(lambda t, name: t.update({name: torch.zeros(3)})),
     r'1 tensors are of another shape than config.json says, first \S+norm1.bias;')])
def test_a_checkpoint_that_lacks_a_part_is_never_made_up(fixture, damage, says, request, tmp_path):
    folder = tmp_path / 'damaged'
    shutil.copytree(request.getfixturevalue(fixture), folder)
    damage(folder)
    with pytest.raises(ValueError, match=says) as e:
        backbones.load(str(folder))
    assert str(folder) in str(e.value) and '\n' not in str(e.value)


@pytest.mark.parametrize('offline', [False, True])
def test_a_hub_id_without_a_network_is_told_at_once(offline, monkeypatch):
    def no_network(*args, **kw):
        raise socket.gaierror(-2, 'Name or service not known')

    monkeypatch.setattr(socket, 'getaddrinfo', no_network)
    monkeypatch.setattr(huggingface_hub.constants, 'HF_HUB_OFFLINE', offline)
    # transformers would try again five times, for half a minute
    monkeypatch.setattr(time, 'sleep', lambda seconds: pytest.fail(f'waits {seconds} s'))
    with pytest.raises(FileNotFoundError, match="no such folder, and it can't be fetched") as e:
        backbones.load('nobody/a-model-of-no-such-name')
    assert '\n' not in str(e.value)
    assert ('offline mode' if offline else 'service not known') in str(e.value)


def test_a_path_is_no_hub_id(monkeypatch):
    monkeypatch.setattr(socket, 'getaddrinfo', lambda *a, **k: pytest.fail('asks the hub'))
    with pytest.raises(FileNotFoundError, match='no such folder, and no hub id either'):
        backbones.load('./models/of/mine')


def test_what_the_cache_has_is_not_asked_for(monkeypatch):
    asked = []
    monkeypatch.setattr(backbones, 'get_hf_file_metadata', lambda *a, **k: asked.append(a))
    monkeypatch.setattr(backbones, 'try_to_load_from_cache', lambda *a: '/cache/config.json')
    backbones.ask_hub('nobody/a-model')
    assert not asked
    monkeypatch.setattr(backbones, 'try_to_load_from_cache', lambda *a: None)
    backbones.ask_hub('nobody/a-model')
    assert len(asked) == 1
