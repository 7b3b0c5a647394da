"""
Rows to runs, what is run again, tables from made-up metrics; the scripts are replaced by a stub.

python -m pytest tests/test_ablate.py -v
"""
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

import ablate
from configurator import configure

ROOT = Path(__file__).parents[1]
SPEC = dict(config='config/demo_pha.py', change='epochs=1', tables={
    'Table 1': [('one', 'levels=individual', '1 2'), ('all', '', '3 4')],
    'Table 2': [('same as all', 'cluster=dpc-knn', ''), ('three', 'mu_pcl=0 lambda_dl=0', ''),
                ('three, typed otherwise', 'lambda_dl=0.0 mu_pcl=0', ''),
                ('another file', 'config/demo_clip.py', '')]})

# in place of `python train.py ...` and `python eval.py ...`: notes that it was called, and leaves
# what they leave, with R@1 = seed
STUB = f'''
import json, os, sys, time
sys.path.insert(0, {str(ROOT)!r})
from configurator import configure
script, argv = sys.argv[1], sys.argv[2:]
flags = dict(a[2:].split("=", 1) for a in argv if "=" in a)
folder = flags.get("out_dir") or flags["ckpt"]
open("calls", "a").write(f"{{script}} {{os.path.basename(folder)}}\\n")
if script == "train.py":
    if flags.get("mu_pcl") == "0":
        sys.exit("train.py: no such luck")
    if flags.get("lambda_dl") == "7":
        open("asleep", "w").close()
        time.sleep(60)
    cfg = configure({str(ROOT / 'train.py')!r}, argv, {ablate.SETTINGS!r})
    os.makedirs(folder, exist_ok=True)
    json.dump({{"settings": vars(cfg)}}, open(folder + "/config.json", "w"))
    print("done: 1 steps")
else:
    seed = json.load(open(folder + "/config.json"))["settings"]["seed"]
    side = {{"R@1": seed, "R@5": 50, "R@10": 100}}
    by = {{"field": flags.get("by"), "within": flags.get("within"), "values": {{}}}}
    json.dump({{flags["split"]: {{"t2v": side, "v2t": side, "by": by}}}},
              open(folder + "/metrics.json", "w"))
'''


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder to run in, with the repository's configs and the stub for scripts."""
    monkeypatch.chdir(tmp_path)
    os.symlink(ROOT / 'config', 'config')
    Path('stub.py').write_text(STUB)
    monkeypatch.setitem(ablate.TABLES, 'toy', SPEC)
    return tmp_path


def run(*argv):
    ablate.main(configure(str(ROOT / 'ablate.py'), [
        '--tables=toy', f'--launch={sys.executable} stub.py', '--out_dir=out', *argv]))


def calls():
    lines = sorted(Path('calls').read_text().splitlines()) if os.path.exists('calls') else []
    Path('calls').unlink(missing_ok=True)
    return lines


def row_of(capsys, label):
    return next(line for line in reversed(capsys.readouterr().out.splitlines())
                if line.startswith(label + ' ')).removeprefix(label).split()


# -----------------------------------------------------------------------------
# rows to runs

def test_a_row_is_typed_as_on_the_command_line():
    assert ablate.arguments('config/x.py epochs=1 backbone=a.py') == [
        'config/x.py', '--epochs=1', '--backbone=a.py']
    assert ablate.name_of('') == 'default'
    assert ablate.name_of('levels=individual mu_pcl=0') == 'levels=individual,mu_pcl=0'
    assert ablate.name_of('config/demo_clip.py backbone=a/b c') == 'demo_clip,backbone=a-b,c'


def test_rows_of_the_same_settings_are_one_run(here):
    laid_out, runs = ablate.plan(SPEC)
    assert {t: [row[:2] for row in rows] for t, rows in laid_out.items()} == {
        'Table 1': [('one', 'levels=individual'), ('all', 'default')],
        'Table 2': [('same as all', 'default'), ('three', 'mu_pcl=0,lambda_dl=0'),
                    ('three, typed otherwise', 'mu_pcl=0,lambda_dl=0'),
                    ('another file', 'demo_clip')]}
    assert sorted(runs) == ['default', 'demo_clip', 'levels=individual', 'mu_pcl=0,lambda_dl=0']
    argv, settings = runs['levels=individual']
    assert argv == ['config/demo_pha.py', '--epochs=1', '--levels=individual']
    assert (settings['levels'], settings['epochs'], settings['seed']) == ('individual', 1, 0)
    assert runs['demo_clip'][1]['levels'] == 'mean'
    # nobody asks for the default: it is not run
    assert list(ablate.plan({**SPEC, 'tables': {'t': SPEC['tables']['Table 1'][:1]}})[1]) == [
        'levels=individual']


def test_a_row_that_train_py_does_not_know_is_named():
    spec = {**SPEC, 'config': str(ROOT / 'config/demo_pha.py'),
            'tables': {'Table 1': [('typo', 'level=all', '')]}}
    with pytest.raises(ValueError, match="Table 1, row 'typo': command line: unknown setting "
                                         "'level', did you mean 'levels'"):
        ablate.plan(spec)


def test_different_settings_never_share_a_name(here):
    rows = [('a', 'video_root=a/b data=x', ''), ('b', 'data=x/y', ''), ('c', 'data=x-y', '')]
    with pytest.raises(ValueError, match="row 'c': its settings would have the name of another"):
        ablate.plan({**SPEC, 'tables': {'Table 1': rows}})


@pytest.mark.parametrize('tables, n', [('pha', 16), ('slq', 16)])
def test_the_tables_of_the_repository_are_readable(here, tables, n):
    laid_out, runs = ablate.plan(ablate.TABLES[tables])
    assert len(runs) == n and 'default' in runs
    for title, rows in laid_out.items():
        assert len(title) <= 100 and any(run == 'default' for _, run, _ in rows)
        assert all(len(label) < 20 and len(paper.split()) in (0, 2) for label, _, paper in rows)


def test_the_command_line_replaces_the_tables_own_config_and_change():
    def spec(*argv):
        return ablate.specification(configure(str(ROOT / 'ablate.py'), list(argv)))
    own = ablate.TABLES['pha']
    assert spec()['config'] == own['config'] and spec()['change'] == own['change']
    assert spec('--change=epochs=3')['change'] == 'epochs=3'
    other = spec('--config=config/pha_msrvtt.py')
    assert [other[k] for k in ('config', 'change', 'by', 'within', 'twins')] == [
        'config/pha_msrvtt.py', '', '', '', ()]
    assert spec('--change=epochs=3')['by'] == 'kind'
    with pytest.raises(ValueError, match="tables is 'phh'; there are: pha, slq"):
        spec('--tables=phh')
    with pytest.raises(ValueError, match="jobs is 0 and must be at least 1"):
        spec('--jobs=0')


# -----------------------------------------------------------------------------
# what is run, and what is not run again

def test_runs_are_done_once_seed_after_seed_and_again_when_settings_change(here, capsys):
    run('--seeds=1', '--jobs=1', '--only=default')
    assert calls() == ['eval.py default_s0', 'train.py default_s0']
    run('--seeds=2', '--only=de')                                   # default, demo_clip
    assert [c for c in calls() if c.startswith('train')] == [
        'train.py default_s1', 'train.py demo_clip_s0', 'train.py demo_clip_s1']
    run('--seeds=2', '--only=de')
    assert calls() == []
    assert row_of(capsys, 'all')[:6] == ['0.5', '±0.7', '50.0', '±0.0', '100.0', '±0.0']
    saved = json.loads(Path('out/toy/toy.json').read_text())
    assert saved['rows']['default']['seeds']['1']['t2v']['R@1'] == 1
    assert saved['rows']['levels=individual']['seeds'] == {}
    # another schedule: the old run is kept aside, the new one runs
    run('--seeds=1', '--only=default', '--change=epochs=2')
    assert calls() == ['eval.py default_s0', 'train.py default_s0']
    assert 'out/toy/default_s0 holds another run (epochs 1, not 2)' in capsys.readouterr().out
    old = json.loads(Path('out/toy/default_s0.old/config.json').read_text())
    assert old['settings']['epochs'] == 1
    # trained, not evaluated: train.py is asked again, which resumes
    Path('out/toy/demo_clip_s0/metrics.json').unlink()
    run('--seeds=1', '--only=clip')
    assert calls() == ['eval.py demo_clip_s0', 'train.py demo_clip_s0']


def test_show_runs_nothing_and_only_must_fit(here, capsys):
    run('--show')
    assert calls() == [] and '8 runs to do' in capsys.readouterr().out
    with pytest.raises(ValueError, match="no row's settings have 'zzz' in their name; there are: "
                                         "default, levels=individual"):
        run('--only=zzz')


def test_show_writes_nothing(here, capsys):
    run('--show')
    assert not Path('out').exists()
    run('--seeds=1', '--only=default')
    before = Path('out/toy/toy.json').read_text()
    run('--seeds=1', '--show', '--change=epochs=2')
    assert Path('out/toy/toy.json').read_text() == before
    run('--seeds=1', '--show')
    assert row_of(capsys, 'all')[0] == '0.0'


def test_every_run_put_aside_is_kept(here):
    for n in (1, 2, 3, 4):
        run('--seeds=1', '--only=default', f'--change=epochs={n}')
    assert [json.loads(Path(f'out/toy/default_s0{end}/config.json').read_text())
            ['settings']['epochs'] for end in ('.old', '.old2', '.old3', '')] == [1, 2, 3, 4]


def test_a_run_that_fails_does_not_stop_the_others(here, capsys):
    with pytest.raises(ValueError, match="1 runs failed, the first: mu_pcl=0,lambda_dl=0_s0: "
                                         "train.py: no such luck .log: out/toy/mu_pcl"):
        run('--seeds=1')
    assert calls().count('train.py demo_clip_s0') == 1
    assert row_of(capsys, 'all')[:3] == ['0.0', '50.0', '100.0']


def test_a_signal_ends_the_runs_and_the_same_command_goes_on(here, monkeypatch, capsys):
    rows = [('sleeper', 'lambda_dl=7', ''), ('next', 'lambda_dl=8', '')]
    monkeypatch.setitem(ablate.TABLES, 'toy', {**SPEC, 'tables': {'Table 1': rows}})

    def interrupt():
        while not os.path.exists('asleep'):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=interrupt)
    thread.start()
    start = time.time()
    with pytest.raises(SystemExit, match='stopped; the same command goes on from here'):
        run('--seeds=1', '--jobs=1')
    thread.join()
    assert time.time() - start < 30 and signal.getsignal(signal.SIGINT) is before
    assert calls() == ['train.py lambda_dl=7_s0']                   # and nothing after it


def test_a_result_counts_only_with_its_settings_split_and_breakdown(here):
    _, runs = ablate.plan(SPEC)
    settings = runs['default'][1]
    folder = Path('a_s0')
    folder.mkdir()
    assert ablate.result_of(folder, settings, 'test') is None
    by = dict(field='kind', within='family')
    side = {'R@1': 1, 'R@5': 2, 'R@10': 3}
    result = {'t2v': side, 'v2t': side, 'SumR': 1, 'by': by}
    (folder / 'metrics.json').write_text(json.dumps({'test': result, 'val': {'SumR': 3},
                                                     'train': 3}))
    whole = vars(configure(str(ROOT / 'train.py'), runs['default'][0], ablate.SETTINGS))
    (folder / 'config.json').write_text(json.dumps({'settings': whole}))
    assert ablate.result_of(folder, settings, 'test')['SumR'] == 1
    for split in ('val', 'train', 'else'):  # two damaged ones, and one that isn't there
        assert ablate.result_of(folder, settings, split) is None
    assert ablate.result_of(folder, settings, 'test', 'kind', 'family')['SumR'] == 1
    assert ablate.result_of(folder, settings, 'test', 'kind') is None
    assert ablate.result_of(folder, {**settings, 'sigma': 0.5}, 'test') is None
    # cut short by max_steps is another row; another number of workers is not
    whole.update(num_workers=7, out_dir='elsewhere')
    (folder / 'config.json').write_text(json.dumps({'settings': whole}))
    assert ablate.differences(folder, settings) == ''
    assert ablate.differences(folder, {**settings, 'max_steps': 9}) == 'max_steps 0, not 9'


# -----------------------------------------------------------------------------
# tables

def made_up(r1, **kinds):
    """A result; kinds: name=(queries, R@1, {other: beats})."""
    side = {'R@1': r1, 'R@5': 90.0, 'R@10': 100.0}
    values = {k: {'n_text': n, 't2v': {'R@1': r}, 'beats': b} for k, (n, r, b) in kinds.items()}
    return {'t2v': side, 'v2t': {**side, 'R@1': r1 + 1},
            'by': {'field': 'kind', 'within': 'family', 'values': values}}


RESULTS = {'default': [made_up(60.0, base=(3, 70, {'order': 90}), order=(1, 50, {'base': 50})),
                       made_up(62.0, base=(3, 72, {'order': 90}), order=(1, 50, {'base': 50}))],
           'x=1': [made_up(40.0, base=(3, 40, {'order': 50}), order=(1, 40, {'base': 54}))]}
ROWS = [('Row one', 'x=1', '47.8 47.1'), ('All', 'default', '48.1 46.5'), ('not yet', 'y', '')]


def test_spread_is_the_mean_and_the_standard_deviation():
    assert ablate.spread([60.0, 62.0], 2) == '61.0 ±1.4'
    assert ablate.spread([60.0, 62.0, 64.0], 3) == '62.0 ±2.0'
    assert ablate.spread([60.0], 1) == '60.0'
    assert ablate.spread([60.0], 2) == '60.0 n1'
    assert ablate.spread([60.0, 62.0], 3) == '61.0 ±1.4 n2'
    assert ablate.spread([], 2) == '-'


def test_a_table_has_the_papers_shape():
    lines = ablate.paper_table('Table 1: rows', ROWS, RESULTS, 2)
    assert lines[0] == 'Table 1: rows' and max(map(len, lines)) <= 100
    assert lines[2].split() == ['R@1', 'R@5', 'R@10'] * 2 + ['MSR-VTT', 'R@1']
    assert lines[3].split() == ['Row', 'one', '40.0', 'n1', '90.0', 'n1', '100.0', 'n1', '41.0',
                                'n1', '90.0', 'n1', '100.0', 'n1', '47.8', '/', '47.1']
    assert lines[4].split() == ['All', '61.0', '±1.4', '90.0', '±0.0', '100.0', '±0.0', '62.0',
                                '±1.4', '90.0', '±0.0', '100.0', '±0.0', '48.1', '/', '46.5']
    assert lines[5].split() == ['not', 'yet'] + ['-'] * 6


def test_kinds_stand_in_a_table_of_their_own_each_run_once():
    lines = ablate.kind_table({'a': ROWS, 'b': ROWS[1:]}, RESULTS, 2, ('base', 'order'))
    assert 'base / order' in lines[0] and lines[1].split() == ['base', 'order', 'its', 'twin']
    # of 4 queries 3 have 90 % and 1 has 50 %: 80 %
    assert [line.split() for line in lines[2:]] == [
        ['Row', 'one', '40.0', 'n1', '40.0', 'n1', '51.0', 'n1'],
        ['default', '71.0', '±1.4', '50.0', '±0.0', '80.0', '±0.0']]
    assert ablate.kind_table({'a': ROWS}, {}, 2, ('base', 'order')) == []
    assert ablate.beaten({'base': {'n_text': 3}}, 'base', 'order') is None
    text = ablate.all_tables({'a': ROWS}, RESULTS, 2, ('base', 'order'))
    assert text.count('\n\n') == 1
