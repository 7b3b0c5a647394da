"""
Each bench runs on tiny sizes and returns rows of the promised shape. No time is asserted: memory is
counted by the allocator, so it is a number that can be. CPU, ~15 s.
"""
import json
import math
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import bench
from configurator import configure
from conftest import ROOT

TINY = ['--device=cpu', '--layers=2', '--hidden=64', '--num_frames=2', '--batch=2', '--rounds=1',
        '--train_rounds=1', '--train_batch=2', '--train_frames=1', '--chunks=(1,)', '--lora_r=2',
        '--clips=2']
CPU = torch.device('cpu')


def run(capsys, *args, data='no/such/folder'):
    """-> the lines as dicts, and what was printed"""
    lines = bench.main(configure(bench.__file__, [*TINY, f'--data={data}', *args]))
    printed = capsys.readouterr().out
    parsed = [json.loads(line) for line in printed.splitlines() if line.startswith('{')]
    assert parsed == json.loads(json.dumps(lines)), "what is printed is what is returned"
    return lines, printed


def rows_of(line):
    for case in line['cases']:
        assert case['rows'][0]['time_ratio'] == 1, "ratios are to the first variant"
        for row in case['rows']:
            assert row['ms'] > 0 and math.isfinite(row['ms'])
            assert row['time_ratio_min'] <= row['time_ratio'] <= row['time_ratio_max']
    return [case['rows'] for case in line['cases']]


def test_encode_costs_little_memory_beside_the_bare_backbone(capsys):
    # L = 8 frames / 2 * 32 + 30 tokens, M = 4: hooks keep 4 rows per layer, hidden_states all of L
    (line,), printed = run(capsys, '--only=encode', '--layers=6', '--num_frames=8')
    for bare, mars, hidden in rows_of(line):
        assert 0 < mars['memory_ratio'] <= line['goal'] == 1.10
        assert hidden['memory_ratio'] > 1.2 * mars['memory_ratio']
    assert [('no LoRA' in c['case'], 'r=2' in c['case']) for c in line['cases']] == \
        [(True, False), (False, True)]
    assert printed.count('goal: MARS at most 1.10') == 2


def test_encode_refuses_to_compare_different_results(capsys, monkeypatch):
    monkeypatch.setattr(bench, 'all_hidden_states',
                        lambda model, inputs: {'slots': torch.zeros(2, 4, 64)})
    with pytest.raises(ValueError, match='different slots'):
        run(capsys, '--only=encode')


def test_grad_cache_holds_less_with_smaller_chunks(capsys):
    (line,), _ = run(capsys, '--only=grad_cache', '--train_batch=4', '--chunks=(2,1)')
    off, on = rows_of(line)
    for plain, by2, by1 in (off, on):
        assert by1['memory_ratio'] < by2['memory_ratio'] < 1
        assert by1['variant'] == 'cached_step, chunks of 1'
    assert on[0]['peak_mib'] < off[0]['peak_mib'], "checkpointing holds less"


def test_slq_holds_less_with_the_prefix_cache(capsys):
    (line,), printed = run(capsys, '--only=slq', '--layers=4', '--train_batch=4', '--num_frames=4')
    videos, both = rows_of(line)
    for rows in (videos, both):
        plain, checkpointed, cache, again, chunks = (r['peak_mib'] for r in rows)
        assert max(checkpointed, cache, again) < plain / 2 and chunks < plain
    assert printed.count('faster than plain (goal 1.8') == 3 and 'gradients within' in printed


def test_loader_reads_clips_and_says_when_there_are_none(capsys, tmp_path):
    (line,), printed = run(capsys, '--only=loader')
    assert 'prepare.py' in line['skipped'] and 'loader: skipped' in printed
    av = pytest.importorskip('av')
    (tmp_path / 'videos').mkdir()
    with av.open(str(tmp_path / 'videos' / 'a.mp4'), 'w') as container:
        stream = container.add_stream('libx264', rate=8)
        stream.width = stream.height = 64
        for k in range(6):
            picture = av.VideoFrame.from_ndarray(np.full((64, 64, 3), 40 * k, np.uint8), 'rgb24')
            container.mux(stream.encode(picture))
        container.mux(stream.encode(None))
    shutil.copy(tmp_path / 'videos' / 'a.mp4', tmp_path / 'videos' / 'b.mp4')
    (tmp_path / 'val.jsonl').write_text(''.join(
        json.dumps({'id': i, 'video': f'{i}.mp4', 'captions': ['x']}) + '\n' for i in 'ab'))
    (line,), _ = run(capsys, '--only=loader', data=tmp_path)
    (rows,) = rows_of(line)
    assert {'PyAV', 'PyAV, no deadline', 'frame cache'} <= {r['variant'] for r in rows}
    assert all(abs(r['items_per_s'] * r['ms'] - 2000) < 1e-6 for r in rows), "2 clips"


def test_decode_goes_without_what_is_not_installed(capsys, monkeypatch):
    found = bench.importlib.util.find_spec
    monkeypatch.setattr(bench.importlib.util, 'find_spec',
                        lambda name: None if name == 'cv2' else found(name))
    (line,), printed = run(capsys, '--only=decode', '--decode_seconds=1')
    assert 'without OpenCV, all frames; pip install opencv-python-headless' in printed
    assert 'pixels within 0' in line['cases'][0]['case'] and len(line['cases']) == 2
    for rows in rows_of(line):
        assert {'ours', 'ours, no deadline', 'bare decord'} == {r['variant'] for r in rows}


def test_the_demo_backbone_and_a_given_one_are_measured(capsys, tiny_qwen2vl, tmp_path):
    shutil.copytree(tiny_qwen2vl, tmp_path / 'backbones' / 'tiny-qwen2-vl')
    (line,), _ = run(capsys, '--only=encode', data=tmp_path)
    assert len(line['cases']) == 3 and "demo" in line['cases'][2]['case']
    (line,), _ = run(capsys, '--only=encode', f'--backbone={tiny_qwen2vl}', data=tmp_path)
    assert [str(tiny_qwen2vl) in c['case'] for c in line['cases']] == [True, True]


def test_peak_memory_is_the_most_that_lives_at_once():
    def f():                     # in MiB: a 4 -> a, b 8 -> b 4 -> b, c 8 -> b, c, d 10
        a = torch.zeros(1 << 20)
        b = a + 1
        del a
        c = b * 2
        return c, torch.zeros(1 << 19)
    assert bench.peak_memory(f, CPU) == 10 * bench.MIB


def test_variants_take_turns(monkeypatch):
    order, clock = [], SimpleNamespace(now=0.0)

    def variant(name, cost):
        def f():
            order.append(name)
            clock.now += cost
        return f

    monkeypatch.setattr(bench.time, 'perf_counter', lambda: clock.now)
    costs = {'A': 1.0, 'B': 1.5, 'C': 3.0}
    rows = bench.compare({n: variant(n, c) for n, c in costs.items()}, 3, CPU, memory=False)
    assert ''.join(order) == 'ABC' + 'ABC' 'BCA' 'CAB'  # warm-up, then three rounds
    assert [r['time_ratio'] for r in rows] == [1, 1.5, 3] and rows[1]['ms'] == 1500


def test_search_finds_what_a_product_of_matrices_finds(capsys):
    (line,), printed = run(capsys, '--only=search', '--items=300', '--slot_width=32',
                           '--pha_run=nowhere')
    names = [r['variant'] for r in line['cases'][0]['rows']]
    assert names[0].startswith('torch') and names[-2:] == ['search.py, fp32 on disk',
                                                           'search.py, int8 on disk']
    assert '300 items of 4 x 32, 0.00 GB in fp32' in printed and 'goal: fp32 at most 1.2' in printed
    assert 'of 32 queries against 300 items' in printed and 'preselection: skipped' in printed


def test_errors_are_one_line_and_json_is_written(capsys, tmp_path):
    for args, word in ((['--only=enc'], 'encode, grad_cache'), (['--rounds=0'], 'rounds is 0'),
                       (['--hidden=50'], 'multiple of 32'), (['--chunks=(0,)'], 'chunks')):
        with pytest.raises(ValueError, match=word):
            run(capsys, *args)
    lines, _ = run(capsys, '--only=loader', f'--json={tmp_path}/b.json')
    assert json.loads((tmp_path / 'b.json').read_text()) == json.loads(json.dumps(lines[0]))
    done = subprocess.run([sys.executable, str(ROOT / 'bench.py'), '--help'], capture_output=True,
                          text=True)
    assert done.returncode == 0 and '--rounds = 5' in done.stdout
