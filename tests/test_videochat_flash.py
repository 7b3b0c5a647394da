"""
VideoChat-Flash against literal loops written from its description, Pillow, and the published sizes;
then a tiny random one under MARS and SLQ. CPU, about 15 s.

python -m pytest tests/test_videochat_flash.py -v
"""
import json
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import backbones
import videochat_flash as vcf
from conftest import ROOT, SPECIAL, make_videochat_flash
from model_mars import MARS, MARSConfig
from model_slq import SLQ, SLQConfig

close = torch.testing.assert_close
VIDEO, TEXT = '<video>\nSummarize above video in one word:', '{caption}\nSummarize above sentence:'
CPU = torch.device('cpu')


@pytest.fixture(scope='module')
def path(tiny_videochat_flash):
    return tiny_videochat_flash


@pytest.fixture(scope='module')
def backbone(path):
    return backbones.load(path)


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def clips(*lengths, height=20, width=30, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, (t, height, width, 3), dtype=np.uint8) for t in lengths]


# -----------------------------------------------------------------------------
# merging

@pytest.mark.parametrize('n, steps', [
    (196, [98, 34]),                                # an image of res224
    (784, [392, 196, 98, 34]),                      # a clip of res224, an image of res448
    (3136, [1568, 784, 392, 196, 98, 34]),          # a clip of res448
    (324, [162, 81, 17]), (65, [1]), (64, [])])
def test_merge_schedule(n, steps):
    assert vcf.merge_schedule(n, 64) == steps
    assert n - sum(steps) == 64


def test_one_merge_by_hand():
    # even tokens (3, 4), (1, 0), (0, 2); odd tokens (0, 1), (5, 0). cosines with the odd ones:
    # (.8, .6), (0, 1), (1, 0), so the best are .8 with 0, 1 with 1, 1 with 0: the first is left
    x = torch.tensor([[3., 4], [0, 1], [1, 0], [5, 0], [0, 2]])
    size = torch.tensor([[1.], [2], [3], [1], [2]])
    y, total = vcf.merge_once(x, size, 2, num_heads=1)
    # (0, 1) of 2 patches with (0, 2) of 2; (5, 0) of 1 with (1, 0) of 3
    close(y, torch.tensor([[3., 4], [0, 1.5], [2, 0]]))
    close(total, torch.tensor([[1.], [4], [4]]))


def merge_literally(x, target, num_heads):
    """Tokens as lists of the patches they hold; a token's value is the mean of those."""
    x = x.double()
    tokens = [[i] for i in range(len(x))]
    while len(tokens) > target:
        r = min(len(tokens) // 2, len(tokens) - target)
        means = torch.stack([x[t].mean(0) for t in tokens])
        heads = torch.stack(means.chunk(num_heads, dim=1)).mean(0)
        unit = heads / heads.norm(dim=1, keepdim=True)
        A, B = tokens[0::2], [list(t) for t in tokens[1::2]]
        best = [(unit[1::2] @ u).max(0) for u in unit[0::2]]
        order = sorted(range(len(A)), key=lambda a: -best[a].values.item())
        for a in order[:r]:
            B[best[a].indices.item()] += A[a]
        tokens = [A[a] for a in order[r:]] + B
    return torch.stack([x[t].mean(0) for t in tokens]), tokens


@pytest.mark.parametrize('n', [196, 784, 3136, 323])
def test_merging_is_the_literal_loop(n):
    x = randn(n, 32, seed=n)
    want, tokens = merge_literally(x, 64, 4)
    got = vcf.merge_tokens(x, 64, 4)
    assert got.shape == (64, 32) and sorted(sum(tokens, [])) == list(range(n))
    close(got.double(), want, atol=1e-5, rtol=0)
    assert len(set(map(len, tokens))) > 5  # so that a plain mean of means would be off


def test_merging_in_bf16_decides_in_fp32_also_under_autocast():
    x = randn(324, 32).bfloat16()
    want = vcf.merge_tokens(x.float(), 64, 4)
    with torch.autocast('cpu', torch.bfloat16):
        got = vcf.merge_tokens(x, 64, 4)
    assert got.dtype == torch.bfloat16
    close(got, want.bfloat16(), atol=0, rtol=0)


def test_gradient_passes_through_the_averages():
    x = randn(100, 8).requires_grad_()
    vcf.merge_tokens(x, 64, 2).sum().backward()
    assert (x.grad > 0).all()
    close(vcf.merge_tokens(x, 64, 2).shape, torch.Size([64, 8]))


# -----------------------------------------------------------------------------
# the tower

def test_position_table_of_res224_by_formula():
    table = vcf.position_table(4, 14, 1024, CPU, torch.float)
    assert table.shape == (784, 1024)
    for at, j in ((0, 0), (0, 1), (1, 0), (783, 3), (200, 510), (391, 1023)):
        angle = at / 10000 ** (2 * (j // 2) / 1024)
        assert abs(table[at, j] - (math.cos(angle) if j % 2 else math.sin(angle))) < 1e-6
    close(vcf.position_table(1, 14, 1024, CPU, torch.float), table[:196])  # an image: frame 0


def cubic(t):  # weight of a pixel at distance t
    t, a = abs(t), -0.75
    return ((a + 2) * t ** 3 - (a + 3) * t ** 2 + 1 if t <= 1 else
            a * (t ** 3 - 5 * t ** 2 + 8 * t - 4) if t < 2 else 0)


@pytest.mark.parametrize('side', [28, 9])
def test_position_table_of_other_sizes_is_resized_frame_by_frame(side):
    C, small = 16, vcf.position_table(4, 14, 16, CPU, torch.float).view(4, 14, 14, 16).double()
    table = vcf.position_table(4, side, C, CPU, torch.float).view(4, side, side, C)
    for t, y, x in ((0, 0, 0), (3, side - 1, 2), (1, side // 2, side - 1), (2, 3, 5)):
        want = 0
        cy, cx = ((i + 0.5) * 14 / side - 0.5 for i in (y, x))
        for iy in range(math.floor(cy) - 1, math.floor(cy) + 3):
            for ix in range(math.floor(cx) - 1, math.floor(cx) + 3):
                want += cubic(cy - iy) * cubic(cx - ix) * small[t, min(max(iy, 0), 13),
                                                                min(max(ix, 0), 13)]
        close(table[t, y, x].double(), want, atol=1e-5, rtol=0)


def norm_literally(x, norm, eps):
    x = x - x.mean(-1, keepdim=True)
    return x / ((x ** 2).mean(-1, keepdim=True) + eps).sqrt() * norm.weight + norm.bias


def block_literally(block, x, num_heads):  # x [n, C]
    n, C = x.shape
    d = C // num_heads
    h = norm_literally(x, block.norm1, 1e-6)
    qkv = h @ block.attn.qkv.weight.T
    q, k, v = (qkv[:, i * C:(i + 1) * C] for i in range(3))
    q, v = q + block.attn.q_bias, v + block.attn.v_bias
    out = torch.empty(n, C)
    for i in range(num_heads):
        at = slice(i * d, (i + 1) * d)
        for token in range(n):
            p = torch.exp(k[:, at] @ q[token, at] / math.sqrt(d))
            out[token, at] = (p[:, None] * v[:, at]).sum(0) / p.sum()
    x = x + out @ block.attn.proj.weight.T + block.attn.proj.bias
    h = norm_literally(x, block.norm2, 1e-6) @ block.mlp['fc1'].weight.T + block.mlp['fc1'].bias
    h = h * (1 + torch.erf(h / math.sqrt(2))) / 2
    return x + h @ block.mlp['fc2'].weight.T + block.mlp['fc2'].bias


@pytest.mark.parametrize('T', [1, 4])
def test_the_tower_is_its_literal_version(backbone, T):
    tower, frames = backbone.decoder.tower, randn(T, 3, 72, 72)
    conv = tower.patch_embed['proj']
    with torch.no_grad():
        x = conv(frames.transpose(0, 1)[None])[0]                            # [C, T, 9, 9]
        x = x.permute(1, 2, 3, 0).reshape(T * 81, 32)                        # by (t, y, x)
        x = x + vcf.position_table(T, 9, 32, CPU, torch.float)
        assert len(tower.blocks) == 2  # of 3 layers
        for block in tower.blocks:
            x = block_literally(block, x, 4)
        want = norm_literally(x, tower.vision_layernorm, 1e-12)
        close(tower(frames[None])[0], want, atol=1e-4, rtol=0)


def test_epsilons_are_the_checkpoints():
    tower = vcf.Tower(8, dict(patch_size=8, side=9, num_attention_heads=2, intermediate_size=8,
                              num_blocks=1))
    x = 1e-4 * randn(5, 8)
    close(tower.blocks[0].norm1(x), norm_literally(x, tower.blocks[0].norm1, 1e-6))
    close(tower.blocks[0].norm2(x), norm_literally(x, tower.blocks[0].norm2, 1e-6))
    close(tower.vision_layernorm(x), norm_literally(x, tower.vision_layernorm, 1e-12))


def test_features_come_clip_by_clip_and_an_image_is_a_clip_of_its_own(backbone):
    frames = torch.randint(0, 256, (13, 3, 72, 72), dtype=torch.uint8,
                           generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        got = backbone.model.vision_features(frames, torch.tensor([1, 8, 4]))
        assert got.shape == (4, 64, 32)
        for k, at in enumerate(([0, 1], [1, 5], [5, 9], [9, 13])):
            x = frames[slice(*at)]
            alone = backbone.model.vision_features(x, torch.tensor([len(x)]))
            close(alone[0], got[k], atol=0, rtol=0)
            mean, std = (torch.tensor(m).view(3, 1, 1) for m in ((.485, .456, .406),
                                                                 (.229, .224, .225)))
            tokens = backbone.decoder.tower(((x / 255 - mean) / std)[None])[0]
            close(vcf.merge_tokens(tokens, 64, 4), got[k], atol=1e-4, rtol=0)
    assert (got[1] - got[2]).abs().max() > 0.1
    for bad in (3, 6, 0):
        with pytest.raises(ValueError, match=f'a video of {bad} frames'):
            backbone.model.vision_features(frames[:bad], torch.tensor([bad]))


# -----------------------------------------------------------------------------
# frames and prompts

@pytest.mark.parametrize('height, width', [(240, 320), (321, 181), (100, 90), (72, 72)])
def test_frames_are_the_official_processors(backbone, height, width):
    from transformers.image_transforms import normalize, rescale, resize
    from transformers.image_utils import ChannelDimension, PILImageResampling
    first = dict(data_format=ChannelDimension.FIRST)
    frames = clips(4, height=height, width=width)
    x, seen = backbone.pixels(frames)[0], []
    want = [normalize(rescale(resize(f, (72, 72), PILImageResampling.BICUBIC, **first), 1 / 255),
                      (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), **first) for f in frames[0]]
    handle = backbone.decoder.tower.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    backbone.model.vision_features(**x)
    handle.remove()
    assert x['pixel_values'].dtype == torch.uint8  # a quarter of what floats take on their way
    close(seen[0][0], torch.tensor(np.array(want), dtype=torch.float), atol=1e-5, rtol=0)


@pytest.mark.parametrize('T, padded, tokens', [(1, 1, 64), (2, 4, 64), (3, 4, 64), (4, 4, 64),
                                               (5, 8, 128), (16, 16, 256)])
def test_frames_fill_clips_with_the_last_one(backbone, T, padded, tokens):
    frames = clips(T, height=72, width=72)
    got, n = backbone.pixels(frames)
    want = torch.from_numpy(frames[0]).permute(0, 3, 1, 2)
    close(got['pixel_values'], torch.cat([want, want[-1:].expand(padded - T, -1, -1, -1)]))
    assert got['num_frames'].tolist() == [padded] and n == [tokens]


def test_a_prompt_holds_64_tokens_per_clip_and_chunks_apart(backbone):
    x = backbone.collate(VIDEO, frames=clips(8, 1, 3), n_append=2)
    ids, pad = x['input_ids'], backbone.tokenizer.convert_tokens_to_ids('<|video_pad|>')
    assert (ids == pad).sum(1).tolist() == [128, 64, 64]
    close(x['mm_token_type_ids'], 2 * (ids == pad).int())
    head = backbone.ids('<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n'
                        '<|im_start|>user\n')
    tail = backbone.ids('\nSummarize above video in one word:<|im_end|>\n'
                        '<|im_start|>assistant\n')
    eos = backbone.tokenizer.eos_token_id
    assert ids[0].tolist() == head + 128 * [pad] + tail + 2 * [eos]
    close(x['position_ids'][0], torch.arange(len(ids[0])))
    for row, mask in zip(*(backbone.collate(VIDEO, frames=clips(8, 1), padding_side='left')[key]
                           for key in ('position_ids', 'attention_mask'))):
        close(row[mask.bool()], torch.arange(mask.sum()))


def test_a_caption_that_spells_the_vision_token_is_plain_text(backbone):
    x = backbone.collate(TEXT, ['a <|video_pad|> moves'])
    assert x['mm_token_type_ids'].sum() == 0 and 'pixel_values' not in x
    assert backbone.run(x).isfinite().all()
    with pytest.raises(ValueError, match="spells '<|video_pad|>'"):
        backbone.check_prompt('{caption} <|video_pad|>')


def test_vision_stands_where_its_tokens_are_and_nowhere_else(backbone):
    x = backbone.collate(VIDEO, frames=clips(4, 8))
    known = {k: x[k] for k in ('attention_mask', 'position_ids')}
    with torch.no_grad():
        features = backbone.model.vision_features(x['pixel_values'], x['num_frames'])  # [3, 64, C]
        rows = backbone.decoder.mm_projector['mlp'](features)                          # [3, 64, D]
        embeds = backbone.embed(x['input_ids'])
        start = (x['mm_token_type_ids'][0] == 2).nonzero()[0].item()
        embeds[0, start:start + 64] = rows[0]
        embeds[1, start:start + 128] = rows[1:].flatten(0, 1)
        close(backbone.run(x), backbone.run(dict(inputs_embeds=embeds, **known)))
        assert backbone.model(**known, inputs_embeds=embeds).logits.shape[-1] == 512
    x['mm_token_type_ids'][1, start] = 0
    with pytest.raises(ValueError, match='191 vision tokens in the prompts, and 192'):
        backbone.run(x)


def test_vision_features_may_take_the_place_of_pixels(backbone):
    x = backbone.collate(VIDEO, frames=clips(4, 1, 8), n_append=1)
    with torch.no_grad():
        features = backbone.features(x)                                         # [4 * 64, C]
        y = {**x, 'features': features.half()}  # as a file would hold them
        close(backbone.run(x), backbone.run({**x, 'features': features}), atol=0, rtol=0)
        close(backbone.run(x), backbone.run(y), atol=1e-2, rtol=0)
        rows = torch.tensor([2, 0])
        one, other = (backbone.run(backbone.select(z, rows)) for z in (x, y))
    close(one, other, atol=1e-2, rtol=0)
    close(one, backbone.run(x)[rows], atol=1e-4, rtol=1e-4)


# -----------------------------------------------------------------------------
# checkpoints

def published_names():
    """Every key of the 7B checkpoints, from the description of its modules."""
    for i in range(28):
        at = f'model.layers.{i}.'
        for name in 'qkv':
            yield from (f'{at}self_attn.{name}_proj.{p}' for p in ('weight', 'bias'))
        yield from (f'{at}{name}.weight' for name in (
            'self_attn.o_proj', 'mlp.gate_proj', 'mlp.up_proj', 'mlp.down_proj', 'input_layernorm',
            'post_attention_layernorm'))
    yield from ('model.embed_tokens.weight', 'model.norm.weight', 'lm_head.weight')
    at = 'model.vision_tower.vision_tower.encoder.'
    modules = [f'{at}patch_embed.proj', f'{at}vision_layernorm', 'model.mm_projector.mlp.0',
               'model.mm_projector.mlp.2']
    for i in range(23):
        modules += [f'{at}blocks.{i}.{name}' for name in ('norm1', 'norm2', 'attn.proj', 'mlp.fc1',
                                                          'mlp.fc2')]
        yield from (f'{at}blocks.{i}.attn.{name}' for name in ('q_bias', 'v_bias', 'qkv.weight'))
    yield from (f'{name}.{p}' for name in modules for p in ('weight', 'bias'))


@pytest.mark.parametrize('tower, side', [('umt-hd-large', 28), ('umt-large', 14)])
def test_the_published_size_on_the_meta_device(tower, side):
    with torch.device('meta'):
        model = vcf.VideoChatFlash(vcf.VideoChatFlashConfig(mm_vision_tower=tower))
    assert set(model.state_dict()) == set(published_names())
    count = {key: sum(p.numel() for name, p in model.named_parameters() if key in name)
             for key in ('vision_tower', 'mm_projector', '')}
    llm = count[''] - count['vision_tower'] - count['mm_projector']
    # a block: qkv without k's bias, proj, the MLP, two norms; 23 of them, patches, the last norm
    block = (3 * 1024 * 1024 + 2 * 1024) + (1024 * 1024 + 1024) + (2 * 4096 * 1024 + 5120) + 4096
    assert count['vision_tower'] == 23 * block + 768 * 1024 + 1024 + 2048 == 290_479_104
    assert count['mm_projector'] == 1024 * 3584 + 3584 + 3584 * 3584 + 3584
    assert llm == 7_615_616_512  # Qwen2-7B
    assert (len(model.model.layers), model.config.hidden_size) == (28, 3584)
    assert len(model.model.tower.blocks) == 23 and model.model.tower.side == side
    assert model.config.rope_parameters['rope_theta'] == 1e6
    conv = model.model.tower.patch_embed['proj'].weight
    assert conv.shape == (1024, 3, 1, 16, 16)


def copy_of(path, folder):
    shutil.copytree(path, folder)
    return Path(folder)


def test_a_checkpoint_comes_back_whole_or_in_shards(path, tmp_path):
    one = backbones.load(path)
    folder = copy_of(path, tmp_path / 'shards')
    (folder / 'model.safetensors').unlink()
    one.model.save_pretrained(folder, max_shard_size='60KB')
    assert (folder / 'model.safetensors.index.json').exists()
    again = backbones.load(str(folder))
    want = load_file(Path(path) / 'model.safetensors')
    assert set(want) == set(one.model.state_dict()) == set(again.model.state_dict())
    for name, p in want.items():
        assert p.abs().max() > 0
        close(again.model.state_dict()[name], p, atol=0, rtol=0)
    x = one.collate(VIDEO, frames=clips(4))
    close(one.run(x), again.run(x), atol=0, rtol=0)
    assert one.family == again.family == 'videochat_flash'


def test_the_code_beside_a_checkpoint_never_runs_and_nobody_is_asked(path, tmp_path, monkeypatch,
                                                                     capsys):
    monkeypatch.setattr('builtins.input', lambda *a: pytest.fail('asks'))
    folder = copy_of(path, tmp_path / 'public')
    config = json.loads((folder / 'config.json').read_text())
    config['rope_theta'] = config.pop('rope_parameters')['rope_theta']  # as of old
    config['auto_map'] = {'AutoConfig': 'modeling_videochat_flash.VideoChatFlashQwenConfig',
                          'AutoModel': 'modeling_videochat_flash.VideoChatFlashQwenForCausalLM'}
    config |= dict(mm_llm_compress=False, mm_newline_position='nothing', torch_dtype='float16')
    (folder / 'config.json').write_text(json.dumps(config))
    (folder / 'modeling_videochat_flash.py').write_text('raise SystemExit("remote code")')
    tokenizer = json.loads((folder / 'tokenizer_config.json').read_text())
    tokenizer.pop('tokenizer_class')
    (folder / 'tokenizer_config.json').write_text(json.dumps(tokenizer))
    backbone, want = backbones.load(str(folder)), backbones.load(path)
    x = want.collate(VIDEO, frames=clips(4))
    close(backbone.run(x), want.run(x), atol=0, rtol=0)
    assert 'custom code' not in capsys.readouterr().out


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_weights_are_read_into_the_dtype_that_is_asked_for(path, dtype, tmp_path):
    folder = copy_of(path, tmp_path / 'half')
    tensors = load_file(folder / 'model.safetensors')
    save_file({k: v.half() for k, v in tensors.items()}, folder / 'model.safetensors',
              metadata={'format': 'pt'})
    model = backbones.load(str(folder), dtype=dtype).model
    assert {p.dtype for p in model.parameters()} == {dtype}
    for name, p in model.named_parameters():
        close(p, tensors[name].half().to(dtype), atol=0, rtol=0)
    bf16 = dtype == torch.bfloat16
    x = backbones.load(path).collate(VIDEO, frames=clips(4))
    with torch.autocast('cpu', dtype, enabled=bf16):
        features = model.vision_features(x['pixel_values'], x['num_frames'])
    assert features.isfinite().all()


def change_weights(folder, change):
    tensors = load_file(folder / 'model.safetensors')
    change(tensors)
    save_file(tensors, folder / 'model.safetensors', metadata={'format': 'pt'})


def test_missing_weights_are_listed_and_those_of_others_ignored(path, tmp_path):
    folder = copy_of(path, tmp_path / 'changed')
    mine = backbones.load(path).model.state_dict()
    others = {'visual_head.weight': torch.ones(3), 'model.mm_projector.tvg_mlp.0.bias': mine[
        'model.mm_projector.mlp.0.bias'] + 1, 'model.image_newline': torch.ones(32)}
    change_weights(folder, lambda t: t.update(others))
    got = backbones.load(str(folder)).model.state_dict()
    assert got.keys() == mine.keys()
    for name in mine:
        close(got[name], mine[name], atol=0, rtol=0)
    gone = ['model.mm_projector.mlp.2.bias', 'model.vision_tower.vision_tower.encoder.blocks.1.attn'
            '.q_bias']
    change_weights(folder, lambda t: [t.pop(name) for name in gone])
    with pytest.raises(ValueError, match='2 tensors are missing, first ' + ', '.join(gone)) as e:
        backbones.load(str(folder))
    assert '\n' not in str(e.value)


@pytest.mark.parametrize('key, value', [
    ('mm_vision_tower', 'internvideo2'), ('mm_projector_type', 'mlp2x_gelu'),
    ('mm_local_num_frames', 8)])
def test_another_vision_part_is_an_error(path, tmp_path, key, value):
    folder = copy_of(path, tmp_path / 'other')
    config = json.loads((folder / 'config.json').read_text()) | {key: value}
    (folder / 'config.json').write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f'{key} is {value!r} in config.json') as e:
        backbones.load(str(folder))
    assert '\n' not in str(e.value)


def test_max_pixels_cannot_shrink_frames(path):
    assert backbones.load(path, max_pixels=72 * 72).pixels(clips(4))[1] == [64]
    with pytest.raises(ValueError, match='always 72 x 72 pixels; set max_pixels=0, got 1024'):
        backbones.load(path, max_pixels=32 * 32)


def test_the_tokenizer_needs_no_token_for_videos(path, backbone):
    assert '<|video_pad|>' in SPECIAL
    assert '<|video_pad|>' not in (Path(path) / 'tokenizer.json').read_text()
    assert backbone.tokenizer.convert_tokens_to_ids('<|video_pad|>') == len(backbone.tokenizer) - 1


# -----------------------------------------------------------------------------
# under the methods

CAPTIONS = ['a', 'a red circle moves left then a blue square grows', 'two']
FRAMES = (4, 1, 8)


def samples():
    return [SimpleNamespace(id=f'clip{i}', caption=c, frames=f, index=i)
            for i, (c, f) in enumerate(zip(CAPTIONS, clips(*FRAMES)))]


def make(method, path, **settings):
    torch.manual_seed(0)
    if method == 'mars':
        settings = dict(lora_r=2, lora_alpha=4, num_slots=2) | settings
        model = MARS(MARSConfig(backbone=path, **settings), backbones.load(path))
    else:
        settings = dict(num_queries=3) | settings
        model = SLQ(SLQConfig(backbone=path, **settings), backbones.load(path))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.requires_grad and 'tau' not in name:
                p.add_(0.1 * torch.randn_like(p))
    return model


@pytest.mark.parametrize('layers', [2, 3])
def test_lora_touches_seven_linears_per_layer_and_the_projector(tmp_path, layers):
    model = make('mars', make_videochat_flash(tmp_path, layers=layers))
    names = {name.rpartition('.lora_A')[0] for name, _ in model.mllm.named_modules()
             if name.endswith('lora_A')}
    llm = {n for n in names if re.search(r'\.layers\.\d+\.', n)}
    assert len(llm) == 7 * layers and len(names) == 7 * layers + 2
    assert {n[-5:] for n in names - llm} == {'mlp.0', 'mlp.2'}
    assert model.adapted == {'language model': 7 * layers, 'model.mm_projector.mlp': 2}


@pytest.mark.parametrize('method', ['mars', 'slq'])
def test_a_step_trains_all_that_is_trained_and_nothing_else(path, method):
    model = make(method, path, **dict(lora_dropout=0.0) if method == 'mars' else {})
    before = {n: p.clone() for n, p in model.named_parameters()}
    trained = [p for p in model.parameters() if p.requires_grad]
    batch = model.collate(samples())
    for inputs in batch.values():
        assert inputs['input_ids'].shape[0] == 3
    loss, _ = model.loss(*model(batch))
    loss.backward()
    torch.optim.SGD(trained, lr=0.1).step()
    for name, p in model.named_parameters():
        moved = not torch.equal(p, before[name])
        never_read = method == 'mars' and name == 'slots' and not moved
        assert moved == p.requires_grad or never_read, name
    assert model.loss(*model(batch))[0] != loss


@pytest.mark.parametrize('method', ['mars', 'slq'])
@pytest.mark.parametrize('padding_side', ['right', 'left'])
def test_an_embedding_ignores_batch_mates_and_the_side_of_padding(path, method, padding_side):
    model = make(method, path).eval()
    n = 2 if method == 'mars' else 3

    def embed(which, side):
        out = []
        for prompt, content, encode in (
                (TEXT, dict(captions=[CAPTIONS[i] for i in which]), model.encode_text),
                (VIDEO, dict(frames=[clips(*FRAMES)[i] for i in which]), model.encode_video)):
            x = model.backbone.collate(prompt, **content, n_append=n, padding_side=side)
            with torch.no_grad():
                out += encode(x).values()
        return torch.stack(out)                                              # [2, B, ...]

    together = embed([0, 1, 2], padding_side)
    for i in range(3):
        close(together[:, i], embed([i], 'right')[:, 0], atol=1e-4, rtol=0)
    assert (together[:, 0] - together[:, 1]).abs().max() > 0.01


def grads(model, batch):
    torch.manual_seed(1)
    loss, _ = model.loss(*model(batch))
    loss.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_near(got, want):
    assert got.keys() == want.keys() and got
    for name in want:
        close(got[name], want[name], atol=1e-5, rtol=1e-3, msg=name)


def test_checkpointing_recomputes_layers_and_changes_no_gradient(path):
    batch, runs, out = None, [], []
    for on in (False, True):
        model = make('mars', path, gradient_checkpointing=on)
        batch = batch or model.collate(samples())
        model.train()
        seen = []
        model.backbone.layers[0].self_attn.register_forward_hook(lambda *a: seen.append(a))
        out.append(grads(model, batch))
        runs.append(len(seen))
    assert runs == [2, 4]  # texts and videos, and once more in backward
    assert_near(*out)


def test_the_prefix_cache_is_the_plain_pass(path):
    out = []
    for on in (True, False):
        model = make('slq', path, prefix_cache=on, content_chunk=2)
        out.append(grads(model, model.collate(samples())))
    assert 'queries' in out[0]
    assert_near(*out)


def test_the_frozen_tower_keeps_no_graph(backbone):
    x = backbone.collate(VIDEO, frames=clips(4))
    assert not backbone.model.vision_features(x['pixel_values'], x['num_frames']).requires_grad


# -----------------------------------------------------------------------------
# what the configs name

@pytest.mark.parametrize('name', ['didemo', 'activitynet', 'lsmdc', 'msrvtt'])
def test_the_papers_configs_say_offline_what_to_fetch(name, monkeypatch):
    import huggingface_hub
    monkeypatch.setattr(huggingface_hub.constants, 'HF_HUB_OFFLINE', True)
    monkeypatch.setattr(backbones, 'try_to_load_from_cache', lambda *a: None)
    text = (ROOT / 'config' / f'mars_{name}.py').read_text()
    at = re.search(r"^backbone = '(.*)'", text, re.M).group(1)
    assert at == 'OpenGVLab/VideoChat-Flash-Qwen2-7B_res448' and 'lacks' not in text
    with pytest.raises(FileNotFoundError, match=f'hf download {at} --local-dir') as e:
        backbones.load(at)
    assert '*.safetensors' in str(e.value) and '\n' not in str(e.value)
