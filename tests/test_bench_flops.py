"""
Every printed cell against numbers worked out apart from this code, formulas against literal loops,
and full-size models without weights (on the meta device) under torch's own FLOP counter, which is
itself checked. No time is asserted. CPU, ~15 s on one core.
"""
import contextlib
import json
import re
import subprocess
import sys

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import bench_flops
import flops
import model_mars
import model_pha
import model_slq
import stopwatch
from configurator import configure
from conftest import ROOT, SHARED
from flops import GALLERY, LLMS, MARS_SLOTS, MARS_TOKENS, count


def run(capsys, *args):
    """-> the JSON line as a dict, and what was printed"""
    line = bench_flops.main(configure(bench_flops.__file__, [f'--table={args[0]}', *args[1:]]))
    printed = capsys.readouterr().out
    last = printed.strip().splitlines()[-1]
    assert json.loads(last) == json.loads(json.dumps(line)), "what is printed is what is returned"
    return json.loads(last), printed


def cells(line, rule=None):
    return {(r['model'], r['cell']): r for r in line['rows'] if rule in (None, r['rule'])}


# ---------------------------------------------------------------- the printed cells

# fvcore's numbers for the official modules, to three digits: offline, four times online, total
TABLE4 = {
    'UMT': (267.785, 1740.802, 2683.431, 2089.214, 1395.153, 20.546),
    'InternVideo2-1B': (2542.566, 4576.067, 5661.288, 4977.537, 4177.360, 61.718),
    'InternVideo2-6B': (13384.140, 2857.242, 3942.464, 3258.712, 2458.535, 133.971),
    'MARS': (5657.655, 322.326, 1031.824, 659.296, 274.262, 51.139)}


def test_all_cells_of_table_4_round_to_the_printed_digit(capsys):
    line, printed = run(capsys, 'mars')
    rows = [r for r in line['rows'] if r['paper'] is not None]
    assert len(rows) == 24 and '24 of 24 cells round' in printed and 'residual' not in printed
    for r in rows:
        assert abs(r['diff']) <= 0.05 and r['diff'] == pytest.approx(r['ours'] - r['paper'])
        assert r['rule'] == 'fvcore'
    for name, numbers in TABLE4.items():
        ours = [r['ours'] for r in rows if r['model'] == name]
        assert ours == pytest.approx(numbers, abs=0.0006)


def test_what_table_4_leaves_out(capsys):
    line, printed = run(capsys, 'mars')
    at = {key: r['ours'] for key, r in cells(line, 'fvcore+').items()}
    assert at['MARS', 'offline GF/video, nothing left out'] == pytest.approx(7511.5, abs=0.05)
    assert at['MARS', 'total M GF, nothing left out'] == pytest.approx(65.8, abs=0.05)
    assert at['UMT', 'offline GF/video, 12 frames'] == pytest.approx(984.6, abs=0.05)
    online = [at['UMT', f'online GF/query, {s}, 12 frames'] for s in GALLERY]
    assert online == pytest.approx([3976.9, 5096.2, 4391.0, 3565.5], abs=0.06)
    assert at['UMT', 'total M GF, 12 frames'] == pytest.approx(44.8, abs=0.05)
    assert '7,511.5' in printed and '65.8' in printed and '44.8' in printed
    # a multiply-add is two FLOPs: twice, less the LayerNorms
    both = cells(line, 'flops')
    assert both['MARS, 16 frames', 'offline GF/video']['ours'] == pytest.approx(15016.9, abs=0.05)
    at_224 = flops.mars_video(side=224)
    assert count(at_224, 'fvcore+') / 1e9 == pytest.approx(3041.1, abs=0.05)


# thop's own numbers on a rebuild of each model, G: six digits
THOP = {'CLIP4Clip': 36.267098, 'X-CLIP': 36.267098, 'HBI': 36.380433, 'DRL': 36.278655,
        'UCoFiA': 36.425767, 'X-Pool': 37.339294, 'TC-MGC': 37.393453, 'PHA-Net': 36.835746}
TABLE7 = {'w/o 1D-Conv': 36.785414, 'w/o CA': 36.821008, 'CCA & CCA': 36.862063,
          'CCA & PCA': 36.855747, 'PCA & CCA': 36.842062, 'PCA & PCA': 36.835746}
TABLE10 = {2: 36.745503, 4: 36.790624, 6: 36.835746, 8: 36.880867, 10: 36.925989}


def test_all_cells_of_pha_nets_tables_round_to_the_printed_digits(capsys):
    line, printed = run(capsys, 'pha')
    rows = {k: r for k, r in cells(line, 'thop').items()}
    assert len(rows) == 24 and '24 of 24 cells round' in printed and 'residual' not in printed
    for (name, cell), r in rows.items():
        assert abs(r['diff']) <= (0.0005 if 'Table 7' in cell else 0.005)
    for name, x in THOP.items():
        assert rows[name, 'Table 12, GFLOPs']['ours'] == pytest.approx(x, abs=6e-7)
    for name, x in TABLE7.items():
        assert rows['PHA-Net', f'Table 7, {name}, GFLOPs']['ours'] == pytest.approx(x, abs=6e-7)
    for n, x in TABLE10.items():
        assert rows['PHA-Net', f'Table 10, N_p = {n}, GFLOPs']['ours'] == pytest.approx(x, abs=6e-7)
    assert flops.pha_parameters() == 112589832 and flops.pha_parameters(2) == 120988680
    assert flops.pha_parameters(2, 2) == 129387528
    # under one rule they are three times as much, and as close to each other as before. 2 x MACs
    # of encoders alone, as another hand counted them: CLIP4Clip 54.517, HBI 54.632 G
    whole = cells(line, 'flops')
    assert whole['CLIP4Clip, 12 frames', 'all GF']['ours'] == pytest.approx(109.035, abs=0.05)
    assert whole['PHA-Net, 12 frames', 'all GF']['ours'] == pytest.approx(110.622, abs=0.05)


def test_slqs_table_and_its_residuals(capsys):
    line, printed = run(capsys, 'slq')
    rows = {k: r for k, r in cells(line, 'parameters').items()}
    assert len(rows) == 12 and '8 of 12 cells round' in printed and printed.count('residual') == 4
    ours = {'InternVL3-1B': (36, 17.921), 'Qwen3VL-2B': (83, 40.961), 'Qwen3VL-4B': (106, 51.201),
            'InternVL3-8B': (144, 71.681)}
    for (name, cell), r in rows.items():
        if cell.startswith('SLQ'):  # the paper's column does not follow from its N
            paper, x = ours[name]
            assert (r['paper'], r['ours']) == (paper, pytest.approx(x))
            assert 2 < r['paper'] / r['ours'] < 2.08
        else:
            assert abs(r['diff']) <= (0.5 if r['paper'] == 4 else 0.05)


def test_the_papers_numbers_are_as_printed():
    if not SHARED.is_dir():
        pytest.skip("the papers' texts are not part of the repo")
    text = (SHARED / 'papers' / 'mars.txt').read_text()
    for name, numbers in bench_flops.TABLE4.items():
        start = name if name != 'MARS' else 'MARS (Ours)'
        assert '\t'.join((start, *numbers)) in text
    text = (SHARED / 'papers' / 'pha_net.txt').read_text()
    for name, x in bench_flops.TABLE12.items():
        assert re.search(rf'^{re.escape(name)} .*min {x}G ', text, re.M)
    for n, x in bench_flops.TABLE10.items():
        assert re.search(rf'^{n} \d.* {x}G$', text, re.M)
    for name, (x, _) in bench_flops.TABLE7.items():
        assert re.search(rf'^(w/ )?{name} \d.* {x}G$', text, re.M)
    assert [x for x, *_ in bench_flops.TABLE4_PHA.values()] == re.findall(r'(1\d\d\.\d\d)M$', text,
                                                                         re.M)
    text = (SHARED / 'papers' / 'slq.txt').read_text()
    for name, papers in bench_flops.TABLE3.items():
        found = re.search(rf'{name} \d+ Full FT (\S+) .*? LoRA (\S+) .*? SLQ (\S+) ', text)
        assert found.groups() == papers


# ---------------------------------------------------------------- rules and formulas

def test_a_rule_weighs_what_its_counter_sees():
    work = flops.Counter(linear=1, conv=10, hidden=100, matmul=1000, fused=10 ** 4,
                         merging=10 ** 5, norm=10 ** 6)
    assert count(work, 'fvcore') == 5001111 and count(work, 'fvcore+') == 5111111
    assert count(work, 'thop') == 4000011 and count(work, 'flops') == 222222


def matmul_macs(a, b, c):
    """[a, b] @ [b, c], multiply-add by multiply-add."""
    return sum(1 for _ in range(a) for _ in range(b) for _ in range(c))


def test_a_block_against_literal_loops():
    n, d, mlp, heads = 5, 6, 8, 2
    linears = sum(matmul_macs(n, a, b) for a, b in ((d, d),) * 4 + ((d, mlp), (mlp, d)))
    attention = sum(matmul_macs(n, d // heads, n) + matmul_macs(n, n, d // heads)
                    for _ in range(heads))
    assert flops.block(n, d, mlp) == dict(linear=linears, matmul=attention, norm=2 * n * d)


def test_an_llm_layer_against_literal_loops():
    llm = dict(layers=2, d=6, heads=3, kv=1, head=4, mlp=5)
    n, keys, r = 3, 7, 2
    linears = [(6, 12), (6, 4), (6, 4), (12, 6), (6, 5), (6, 5), (5, 6)]
    layer = sum(matmul_macs(n, a, b) + matmul_macs(n, a, r) + matmul_macs(n, r, b)
                for a, b in linears)
    attention = sum(matmul_macs(n, 4, keys) + matmul_macs(n, keys, 4) for _ in range(3))
    assert flops.llm_pass(llm, n, keys, r) == dict(linear=2 * layer, matmul=2 * attention)


def test_a_tower_against_literal_loops():
    tower = dict(layers=1, d=4, mlp=4, patch=2, side=4, clip=2, cls=1, norms=2)
    # 3 frames are 2 clips of 2 frames, the last filled up: 2 * 4 patches and a class token each
    conv = sum(1 for clip in range(2) for frame in range(2) for y in range(0, 4, 2)
               for x in range(0, 4, 2) for weight in range(3 * 2 * 2 * 4))
    work = flops.vision(tower, 3)
    assert work['conv'] == conv
    assert work['linear'] == 2 * sum(matmul_macs(9, 4, 4) for _ in range(6))
    assert work['norm'] == 2 * 9 * 4 * (2 + 1)


def test_merging_against_literal_loops():
    def loop(n, target):
        macs = 0
        while n > target:
            even, odd = range(0, n, 2), range(1, n, 2)
            macs += sum(64 for _ in even for _ in odd)
            n -= min(len(odd), n - target)
        return macs
    for n, target in ((784, 64), (3136, 64), (49, 10)):
        assert flops.tome(n, target) == dict(merging=loop(n, target))
    assert flops.tome(64, 64)['merging'] == 0


def test_pairs_and_merge_module_against_literal_loops():
    texts = videos = flops.BATCH
    macs = sum(512 for t in range(texts) for v in range(videos) for w in range(5) for f in range(3))
    assert flops.pairs(5 * 3) == dict(matmul=macs // texts)  # an item's part of the batch
    n, M, D = 7, 3, 512
    conv = sum(3 * D * D for token in range(n))
    work = flops.merge_module(n, M)
    assert work['conv'] == conv
    assert work['linear'] == n * (D * 2 * D + 2 * D) + (M + 2 * M + M) * D * D
    # distances of n x n, the weighted means, and attention of M to M
    assert work['matmul'] == D * (n * n + M * n + 2 * M * M)


# ---------------------------------------------------------------- torch's counter, real modules

def counted(call):
    """FLOPs as torch counts them, attention written out."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        call()
    return counter.get_total_flops()


def same(a, b):
    return a == pytest.approx(b, rel=1e-3)


@pytest.fixture(autouse=True)
def no_autocast_on_meta(monkeypatch):
    for module in (model_mars, model_pha, model_slq):
        monkeypatch.setattr(module, 'fp32', lambda x: contextlib.nullcontext())


def test_the_counter_counts_attention_only_when_it_is_written_out():
    q = torch.randn(1, 2, 8, 4)
    attention = 2 * 2 * 8 * 8 * 8  # 2 FLOPs, two products, 8 queries, 8 keys, 2 heads of 4
    assert counted(lambda: F.scaled_dot_product_attention(q, q, q)) == attention
    with FlopCounterMode(display=False) as counter:
        F.scaled_dot_product_attention(q, q, q)
    assert counter.get_total_flops() in (0, attention), "the CPU's fused kernel counts as nothing"
    x, layer = torch.randn(3, 4), nn.Linear(4, 5)
    assert counted(lambda: layer(x)) == 2 * 3 * 4 * 5
    # backward: the input's gradient and the weights'
    x.requires_grad_()
    assert counted(lambda: layer(x).sum().backward()) == 3 * 2 * 3 * 4 * 5
    layer.requires_grad_(False)
    assert counted(lambda: layer(x).sum().backward()) == 2 * 2 * 3 * 4 * 5


@pytest.fixture(scope='module')
def mars_on_meta():
    """MARS of the paper's settings on a Qwen2-VL-7B, the LLM of VideoChat-Flash inside."""
    backbone = meta_backbone('qwen2_vl', 'Qwen2-7B')
    config = model_mars.MARSConfig(gradient_checkpointing=False)
    with torch.device('meta'):  # peft would fill LoRA with numbers
        return model_mars.MARS(config, backbone).requires_grad_(False)


def meta_backbone(family, llm):
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        ROOT / 'data' / 'demo' / 'backbones' / 'tiny-qwen2-vl')
    pre = dict(image_mean=[0.5] * 3, image_std=[0.5] * 3, patch_size=14, merge_size=2,
               temporal_patch_size=2, size=dict(shortest_edge=224 ** 2, longest_edge=224 ** 2))
    config = stopwatch.qwen2_vl_config(LLMS[llm], tokenizer)
    return stopwatch.random_backbone(family, config, tokenizer, pre, 'meta', dtype=torch.bfloat16,
                                     attn_implementation='eager')


def text_inputs(L, M, device='meta'):
    ids = torch.zeros(1, L, dtype=torch.long, device=device)
    return dict(input_ids=ids, attention_mask=torch.ones_like(ids),
                position_ids=ids.expand(3, 1, L), mm_token_type_ids=ids,
                append_pos=torch.arange(L - M, L, device=device)[None])


@pytest.mark.parametrize('L', [MARS_TOKENS['DiDeMo'], 291])
def test_mars_counts_what_the_formula_gives(mars_on_meta, L):
    with torch.no_grad():
        n = counted(lambda: mars_on_meta.encode_text(text_inputs(L, 4)))
    assert same(n, count(flops.mars_query(L, 0), 'flops'))


def test_matching_slots_counts_what_the_formula_gives(mars_on_meta):
    N, M, D = 50, 4, 3584
    text, video = ({'slots': torch.empty(n, M, D, device='meta')} for n in (1, N))
    n = counted(lambda: mars_on_meta.similarity(text, video))
    query = flops.mars_query(47, N) - flops.mars_query(47, 0)
    assert same(n, count(query, 'flops'))


def test_projector_and_lora_count_what_the_formula_gives(mars_on_meta):
    # Qwen2-VL's merger stands in for the projector: another shape, the same two linears with LoRA
    mlp = mars_on_meta.backbone.model.model.visual.merger
    x = torch.empty(256 * 4, 1280, device='meta', dtype=torch.bfloat16)
    shapes = [(5120, 5120), (5120, 3584)]
    work = sum((flops.linear(256, a, b) for a, b in shapes), flops.low_rank(256, shapes, 128))
    with torch.no_grad():
        assert same(counted(lambda: mlp(x)), count(work, 'flops'))


def test_a_vision_tower_of_transformers_counts_what_the_formula_gives(mars_on_meta):
    visual = mars_on_meta.backbone.model.model.visual
    n, T = 256, 2  # patches of a temporal grid step, which attend to each other
    x = torch.empty(n * T, 1176, device='meta', dtype=torch.bfloat16)
    turn = torch.empty(n * T, 80, device='meta')
    ends = torch.tensor([0, n, 2 * n], dtype=torch.int32)

    def tower():
        h = visual.patch_embed(x)
        for block in visual.blocks:
            h = block(h, cu_seqlens=ends, position_embeddings=(turn, turn))
    one = flops.times(32, flops.block(n, 1280, 5120))
    one['conv'] += n * 1176 * 1280
    with torch.no_grad():
        assert same(counted(tower), count(flops.times(T, one), 'flops'))


def test_slqs_towers_count_what_the_formula_gives():
    from transformers.models.internvl import modeling_internvl as internvl
    from transformers.models.qwen3_vl import configuration_qwen3_vl as qwen3_config
    from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3
    config = transformers.InternVLConfig(text_config=dict(model_type='qwen2', hidden_size=896))
    config.vision_config._attn_implementation = 'eager'
    wide = qwen3_config.Qwen3VLVisionConfig(
        depth=24, hidden_size=1024, intermediate_size=4096, out_hidden_size=2048,
        deepstack_visual_indexes=[5, 11, 17])  # as Qwen3-VL-2B has them
    wide._attn_implementation = 'eager'
    n = 28 * 28
    with torch.device('meta'):
        tower, merger = (internvl.InternVLVisionModel(config.vision_config),
                         internvl.InternVLMultiModalProjector(config))
        visual = qwen3.Qwen3VLVisionModel(wide)
        image, tokens = torch.empty(1, 3, 448, 448), torch.empty(1, 256, 4096)
        pixels, turn = torch.empty(n, 3 * 2 * 16 * 16), torch.empty(n, 64)

    def of_qwen3():
        h = visual.patch_embed(pixels)
        for block in visual.blocks:
            h = block(h, cu_seqlens=torch.tensor([0, n], dtype=torch.int32),
                      position_embeddings=(turn, turn))
        for one in (visual.merger, *visual.deepstack_merger_list):
            one(h)
    with torch.no_grad():
        a, b = counted(lambda: (tower(image), merger(tokens))), counted(of_qwen3)
    assert same(a, count(flops.image_vision('InternVL3-1B'), 'flops'))
    assert same(b, count(flops.image_vision('Qwen3VL-2B'), 'flops'))


class PlainTower(nn.Module):
    """UMT-L's shapes out of torch's own modules: a convolution, pre-norm layers, a norm."""

    def __init__(self, d=1024, mlp=4096, layers=23, heads=16, patch=16):
        super().__init__()
        self.conv = nn.Conv3d(3, d, (1, patch, patch), stride=(1, patch, patch))
        self.layers = nn.ModuleList(nn.ModuleDict(dict(
            n1=nn.LayerNorm(d), qkv=nn.Linear(d, 3 * d), out=nn.Linear(d, d), n2=nn.LayerNorm(d),
            up=nn.Linear(d, mlp), down=nn.Linear(mlp, d))) for _ in range(layers))
        self.heads = heads

    def forward(self, x):
        x = self.conv(x).flatten(2).mT                                       # [B, n, d]
        for m in self.layers:
            q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2)
                       for y in m['qkv'](m['n1'](x)).chunk(3, -1))
            y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            x = x + m['out'](y)
            x = x + m['down'](F.gelu(m['up'](m['n2'](x))))
        return x


@pytest.mark.parametrize('side', [448, 224])
def test_mars_tower_of_plain_modules_counts_what_the_formula_gives(side):
    with torch.device('meta'):
        tower, frames = PlainTower(), torch.empty(4, 3, 4, side, side)  # 16 frames, 4 clips
    tower.requires_grad_(False)
    with torch.no_grad():
        n = counted(lambda: tower(frames))
    assert same(n, count(flops.vision(flops.TOWERS['MARS'] | dict(side=side), 16), 'flops'))


def test_videochat_flash_counts_what_the_formula_gives():
    vcf = pytest.importorskip('videochat_flash')
    config = vcf.VideoChatFlashConfig()
    with torch.device('meta'):
        tower = vcf.Tower(config.mm_hidden_size, config.vision_sizes()).requires_grad_(False)
        clip = torch.empty(4, 4, 3, 448, 448)
    with torch.no_grad():
        n = counted(lambda: tower(clip))
    work = flops.vision(flops.TOWERS['MARS'], 16)
    assert same(n, count(work, 'flops'))
    assert same(n + counted(lambda: vcf.merge_tokens(torch.randn(3136, 1024), 64, 16)) * 4,
                count(work + flops.times(4, flops.tome(3136, 64)), 'flops'))


@pytest.fixture(scope='module')
def pha_on_meta():
    backbone, _ = stopwatch.paper_backbone('pha', 'meta', attn_implementation='eager')
    return model_pha.PHANet(model_pha.PHAConfig(), backbone)


def test_pha_net_counts_what_the_formula_gives(pha_on_meta):
    # our class projects only a frame's first token, and one query stands for six equal ones
    formula = flops.phanet(projected=1, queries=1)
    frames = torch.zeros(1, 12, 3, 224, 224, dtype=torch.uint8, device='meta')
    ids = torch.zeros(1, 32, dtype=torch.long, device='meta')
    with torch.no_grad():
        video = counted(lambda: pha_on_meta.encode_video({'frames': frames}))
        text = counted(lambda: pha_on_meta.encode_text(
            {'input_ids': ids, 'attention_mask': torch.ones_like(ids)}))
    assert same(video, count(formula['video'], 'flops'))
    assert same(text, count(formula['text'], 'flops'))

    def features(n, tokens):
        return {'I': torch.empty(n, tokens, 512, device='meta'),
                'I_gamma': torch.empty(n, tokens, device='meta'),
                'L': torch.empty(n, 7, 512, device='meta'),
                'L_gamma': torch.empty(n, 7, device='meta'),
                'G': torch.empty(n, 512, device='meta')}
    with torch.no_grad():
        pairs = counted(lambda: [pha_on_meta.level_similarity(level, features(64, 35),
                                                              features(64, 15)) for level in 'ILG'])
    assert same(pairs, 64 * count(formula['pairs'], 'flops'))


@pytest.mark.parametrize('settings, blocks', [
    ({}, (1, 1)), (dict(share_individual_block=False), (2, 1)),
    (dict(share_individual_block=False, share_local_block=False), (2, 2))])
def test_pha_net_has_the_parameters_that_the_formula_gives(pha_on_meta, settings, blocks):
    model = pha_on_meta
    if settings:
        model = model_pha.PHANet(model_pha.PHAConfig(**settings), pha_on_meta.backbone)
    else:
        assert sum(p.numel() for p in model.parameters()) == flops.pha_true_parameters()
    assert model_pha.thop_parameters(model) == flops.pha_parameters(*blocks)


class OnMeta(nn.Module):
    """SLQ looks into masks, which have no values on meta: they stay here, only the LLM is there."""

    def __init__(self, llm):
        super().__init__()
        self.llm = llm

    def forward(self, input_ids=None, inputs_embeds=None, mm_token_type_ids=None, **kw):
        kw = {k: v.to('meta') if torch.is_tensor(v) else v for k, v in kw.items()}
        if input_ids is not None:
            inputs_embeds = self.llm.embed_tokens(input_ids.to('meta'))
        return self.llm(inputs_embeds=inputs_embeds, **kw)


@pytest.fixture(scope='module')
def qwen2_vl_2b():
    backbone = meta_backbone('qwen2_vl', 'Qwen2-1.5B')
    backbone.decoder = OnMeta(backbone.model.model.language_model)
    return backbone


@pytest.mark.parametrize('cache, checkpointing', [(False, False), (False, True), (True, True)])
def test_a_step_of_slq_counts_what_the_formula_gives(qwen2_vl_2b, cache, checkpointing):
    config = model_slq.SLQConfig(prefix_cache=cache, gradient_checkpointing=checkpointing)
    model = model_slq.SLQ(config, qwen2_vl_2b)
    model.log_tau = nn.Parameter(torch.zeros(()))  # where it is, inputs go
    n, N, llm = 266, 20, LLMS['Qwen2-1.5B']
    got = counted(lambda: model.encode_text(text_inputs(n + N, N, 'cpu'))['z'].sum().backward())
    step = flops.cache_step if cache else flops.plain_step
    assert same(got, count(step(llm, n, N, checkpointing), 'flops'))


@pytest.mark.parametrize('name', list(bench_flops.TABLE3))
def test_slqs_backbones_have_the_parameters_that_the_formula_gives(name):
    llm = LLMS[name]
    config, make = ((transformers.Qwen3Config, transformers.Qwen3ForCausalLM) if 'qk_norm' in llm
                    else (transformers.Qwen2Config, transformers.Qwen2ForCausalLM))
    with torch.device('meta'):
        model = make(config(
            hidden_size=llm['d'], num_hidden_layers=llm['layers'], intermediate_size=llm['mlp'],
            num_attention_heads=llm['heads'], num_key_value_heads=llm['kv'], head_dim=llm['head'],
            vocab_size=llm['vocab'], tie_word_embeddings=bool(llm.get('tied'))))
    assert sum(p.numel() for p in model.parameters()) == flops.llm_parameters(llm)
    linears = [m for m in model.model.layers.modules() if isinstance(m, nn.Linear)]
    assert sum(8 * (m.in_features + m.out_features) for m in linears) == \
        flops.lora_parameters(llm, 8)


# ---------------------------------------------------------------- plans

def test_a_plan_by_hand(capsys):
    # a million videos of 32 frames: 8 clips, 64 tokens each, 31 of the template, 8 slots
    line, printed = run(capsys, 'mars', '--videos=1000000', '--slots=8', '--frames=32')
    at = {r['cell']: r['ours'] for r in line['rows']}
    assert at['gallery bytes/video'] == 8 * 3584 * 2 and at['gallery bytes'] == 57344 * 10 ** 6
    tower = 2 * count(flops.vision(flops.TOWERS['MARS'], 16), 'flops')
    assert at['offline GFLOPs/video'] * 1e9 > tower + 2 * 6525e6 * (512 + 31 + 8)
    assert at['offline FLOPs, all'] == pytest.approx(at['offline GFLOPs/video'] * 1e15)
    query = flops.mars_query(43 + 8, 10 ** 6, 8)
    assert at['online GFLOPs/query'] == pytest.approx(count(query, 'flops') / 1e9)
    assert at['machines'] == 1 and '57,344,000,000 bytes' in printed
    hours = at['offline FLOPs, all'] / 1e14 / 3600
    assert at['offline device hours'] == pytest.approx(hours)


def test_a_billion_takes_machines(capsys):
    line, _ = run(capsys, 'mars', '--videos=1000000000', '--machine_gb=500')
    at = {r['cell']: r['ours'] for r in line['rows']}
    assert at['gallery bytes'] == 4 * 3584 * 2 * 10 ** 9 and at['machines'] == 58  # 28,672 GB / 500


@pytest.mark.parametrize('table, more, bytes_each', [
    # 12 frames + 3, 6 clips + 1, each of 512 and a weight, and one of 512
    ('pha', '--frames=12', 2 * (22 * 513 + 512)), ('slq', '--slots=10', 2 * 896)])
def test_other_plans_keep_what_their_features_are(capsys, table, more, bytes_each):
    line, _ = run(capsys, table, '--videos=1000', more)
    at = {r['cell'].replace('image', 'video'): r['ours'] for r in line['rows']}
    assert at['gallery bytes/video'] == bytes_each and at['gallery bytes'] == 1000 * bytes_each


def test_the_papers_plan_is_the_papers_cost(capsys):
    line, _ = run(capsys, 'mars', '--videos=1003')
    at = {r['cell']: r['ours'] for r in line['rows']}
    assert at['offline GFLOPs/video'] == pytest.approx(count(flops.mars_video(), 'flops') / 1e9)
    assert at['online GFLOPs/query'] == pytest.approx(
        count(flops.mars_query(47, 1003, MARS_SLOTS['DiDeMo']), 'flops') / 1e9)


def test_the_readme_shows_what_the_commands_print(capsys):
    readme = (ROOT / 'README.md').read_text()
    section = readme.split('## What the papers count')[1].split('\n## ')[0]
    plan = ('--videos=1000000', '--slots=8', '--frames=32')
    printed = ''.join(run(capsys, *args)[1].split('\n{')[0]
                      for args in (('mars',), ('pha',), ('slq',), ('mars', *plan)))
    assert ' '.join(('bench_flops.py mars', *plan)) in section
    numbers = re.findall(r'\d[\d,]*\.\d+|\d{1,3}(?:,\d{3})+', section)
    assert len(numbers) > 80 and [x for x in numbers if x not in printed] == []


# ---------------------------------------------------------------- JSON, help, errors

KEYS = {'model', 'cell', 'paper', 'ours', 'diff', 'rule'}


@pytest.mark.parametrize('args', [('mars',), ('pha',), ('slq',), ('mars', '--videos=5'),
                                  ('slq', '--videos=5', '--mllm=Qwen3VL-4B')])
def test_the_json_line(capsys, tmp_path, args):
    path = tmp_path / 'new' / 'flops.json'
    line, _ = run(capsys, *args, f'--json={path}')
    assert json.loads(path.read_text()) == line and [p.name for p in path.parent.iterdir()] == \
        ['flops.json'], "no temporary file stays"
    assert set(line) == {'table', 'rows'} and line['table'] == args[0] and line['rows']
    for r in line['rows']:
        assert set(r) == KEYS
        assert isinstance(r['model'], str) and isinstance(r['cell'], str)
        assert (r['paper'] is None) == (r['diff'] is None)
        assert isinstance(r['ours'], (int, float))
        assert r['rule'] in (*flops.RULES, 'parameters')


def test_one_cell_has_one_row(capsys):
    for table in ('mars', 'pha', 'slq'):
        line, _ = run(capsys, table)
        names = [(r['model'], r['cell'], r['rule']) for r in line['rows']]
        assert len(set(names)) == len(names)


def script(*args):
    return subprocess.run([sys.executable, ROOT / 'bench_flops.py', *args], capture_output=True,
                          text=True, cwd=ROOT)


def test_the_first_word_is_the_table_and_no_torch_is_needed(tmp_path):
    (tmp_path / 'torch.py').write_text('raise ImportError("torch was imported")')
    done = subprocess.run([sys.executable, ROOT / 'bench_flops.py', 'mars'], capture_output=True,
                          text=True, env={'PYTHONPATH': str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])['table'] == 'mars'


def test_help_lists_the_settings():
    done = script('mars', '--help')
    assert done.returncode == 0
    for key in ('table', 'json', 'videos', 'slots', 'frames', 'resolution', 'machine_gb', 'runs'):
        assert f'--{key} = ' in done.stdout


@pytest.mark.parametrize('args, message', [
    (('marz',), "there is no table 'marz' There are mars, pha, slq, time"),
    ((), 'which table? There are mars'),
    (('mars', '--slot=8'), "unknown setting 'slot', did you mean 'slots'?"),
    (('mars', '--slots=many'), "slots expects int (default 0), got 'many'"),
    (('mars', '--slots=-1'), 'slots is -1, the least is 1'),
    (('pha', '--slots=8'), "slots is no setting of pha's plan"),
    (('mars', '--resolution=100'), "a multiple of the tower's 16 pixels"),
    (('mars', '--video_tokens=9999'), 'only 3136 patches'),
    (('slq', '--videos=9', '--mllm=GPT'), "mllm is 'GPT', there are InternVL3-1B"),
    (('mars', '--videos=9', '--tflops=0'), 'tflops is 0.0 and must be above 0'),
    (('mars', '--json=README.md/x.json'), "can't be written"),
    (('time', '--resolution=64'), "resolution is no setting of time's plan"),
    (('time', '--model=clip'), "model is 'clip' and must be one of mars, pha, slq")])
def test_a_wrong_setting_is_one_line(capsys, args, message):
    done = script(*args)
    assert done.returncode != 0 and done.stdout == ''
    assert message in done.stderr and len(done.stderr.splitlines()) == 1


# ---------------------------------------------------------------- the stopwatch

TIME = ('--device=cpu', '--runs=2', '--clips=2', '--batch=2', '--videos=5')


@pytest.mark.parametrize('model', ['mars', 'slq', 'pha'])
def test_time_splits_what_it_measures(capsys, tiny_data, tiny_qwen2vl, tiny_clip, model):
    path = tiny_clip if model == 'pha' else tiny_qwen2vl
    line, printed = run(capsys, 'time', f'--model={model}', f'--backbone={path}',
                        f'--data={tiny_data}', *TIME)
    at = {r['cell']: r['ours'] for r in line['rows']}
    head = 'head' if model == 'pha' else 'LLM'
    for part in ('offline, decoding, ms/video', 'offline, vision tower, ms/video',
                 f'offline, {head}, ms/video', f'online, text, {head}, ms/query',
                 'online, similarity, ms/query'):
        assert 0 < at[f'{part}, least'] <= at[part] <= at[f'{part}, most']
    assert at['weights, MiB'] > 0 and at['offline, peak MiB above the weights'] > 0
    assert at['offline, vision tower, GFLOPs/video'] > 0
    assert all(r['paper'] is None for r in line['rows']), "a tiny backbone is not the paper's"
    assert ('3,626.1' in printed) == (model == 'mars') and ('407.0' in printed) == (model == 'pha')
    assert '5 in the gallery' in printed
    if model != 'pha':
        whole = [r['ours'] for r in line['rows'] if '7,920 queries' in r['cell']
                 or '7,920 videos' in r['cell']]
        parts = sum(at[p] for p in ('offline, vision tower, ms/video', 'offline, LLM, ms/video',
                                    'online, text, LLM, ms/query', 'online, similarity, ms/query'))
        assert whole == [pytest.approx(7920 * parts / 1e3)]


def test_time_counts_the_flops_that_the_formula_gives(capsys, tiny_data, tiny_qwen2vl):
    line, _ = run(capsys, 'time', f'--backbone={tiny_qwen2vl}', f'--data={tiny_data}', *TIME,
                  '--query_tokens=56')
    at = {r['cell']: r['ours'] for r in line['rows']}
    llm = dict(layers=3, d=32, heads=4, kv=2, head=8, mlp=64)  # conftest's, LoRA r=128
    work = flops.llm_pass(llm, 60, r=128) + flops.fuse(llm, 4)
    # up to the angles of the positions, which the counter sees: 60 x 3 axes x 4
    assert at['online, text, LLM, GFLOPs/query'] == pytest.approx(count(work, 'flops') / 1e9,
                                                                  rel=2e-3)
    assert at['online, similarity, GFLOPs/query'] == pytest.approx(2 * 5 * 4 * 32 / 1e9)
    # 16 frames of 16 x 16 pixels in patches of 4, 2 frames each: 8 grids of 16, 2 layers of 16, 32
    tower = flops.times(8, flops.total(flops.times(2, flops.block(16, 16, 32)),
                                       flops.linear(16, 96, 16), flops.linear(4, 64, 64),
                                       flops.linear(4, 64, 32), flops.low_rank(
                                           4, [(64, 64), (64, 32)], 128)))
    assert at['offline, vision tower, GFLOPs/video'] == pytest.approx(
        count(tower, 'flops') / 1e9, rel=2e-3)


def test_time_without_clips(capsys, tiny_qwen2vl, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match='test.jsonl'):
        run(capsys, 'time', f'--backbone={tiny_qwen2vl}', '--data=no/such', *TIME)
    monkeypatch.chdir(tmp_path)  # so there is no data/demo
    line, printed = run(capsys, 'time', f'--backbone={tiny_qwen2vl}', *TIME)
    assert "decoding isn't measured" in printed
    assert not any('decoding' in r['cell'] for r in line['rows'])
