"""
Ablation tables: train every row over some seeds, print the tables in the papers' shape.

    $ python ablate.py --tables=pha          # PHA-Net's Tables 3, 5, 7, 9 on the demo
    $ python ablate.py --tables=pha --show   # what is finished so far; runs nothing
    $ python ablate.py --tables=slq          # SLQ's Table 5, Fig. 7 and Fig. 2 on the demo

a row of TABLES -> settings -> train.py, then eval.py, as one would type them
-> out/ablate/pha/<row>_s<seed>/metrics.json -> mean and spread over seeds -> tables, pha.json

To add a row, write one line in TABLES. Rows that come to the same settings are one run. What is
finished isn't run again; Ctrl-C stops the runs with a checkpoint and the same command goes on.
"""
tables = 'pha'           # which of TABLES
seeds = 2                # each row is run with the seeds 0 .. seeds - 1
jobs = 2                 # runs at a time; they share out the processor's cores (one GPU: 1)
out_dir = 'out/ablate'   # in <out_dir>/<tables>: the runs' folders, logs, <tables>.json
split = 'test'           # the split of the tables; `best` is picked on the val split, as ever
only = ''                # run only the settings with this text in their name: cluster, default
show = False             # run and write nothing, print what is finished
config = ''              # what the rows change, say config/pha_msrvtt.py; empty: the tables' own
change = ''              # settings of every run, as in 'epochs=1 batch_size=32'; empty and no
                         # config given: the tables' own
launch = ''              # stands before the scripts: 'torchrun --standalone --nproc_per_node=4'
# end of settings

# tables: {title: rows}; a row is (label, what it changes, the paper's R@1 of T2V and V2T). What it
# changes are settings of train.py, and config files, which are read after the tables' own.
# by, within: eval.py's breakdown; twins: the two values of `by` that are told apart by order alone
TABLES = {
    'pha': dict(
        config='config/demo_pha.py',
        # less than demo_pha: 4 frames instead of 6. Its one epoch is stated, so that the tables
        # stay what they are if it changes
        change='num_frames=4 epochs=1 warmup_epochs=0.1 num_workers=0',
        by='kind', within='family', twins=('base', 'order'),
        tables={
            'Table 3: levels of alignment': [
                ('Individual-only', 'levels=individual', '47.8 47.1'),
                ('Individual + Local', 'levels=individual+local', '47.8 46.6'),
                ('Individual + Global', 'levels=individual+global', '47.6 47.1'),
                ('All', '', '48.1 46.5'),
            ],
            'Table 5: losses': [
                ('HCL', 'mu_pcl=0 lambda_dl=0', '46.9 46.8'),
                ('HCL + PCL', 'lambda_dl=0', '47.5 46.4'),
                ('HCL + DL', 'mu_pcl=0', '46.9 45.5'),
                ('HCL + PCL + DL', '', '48.1 46.5'),
            ],
            'Table 7: token merge module (attention of its two stages)': [
                ('w/o 1D-Conv', 'merge_conv=false', '47.4 46.1'),
                ('w/ 1D-Conv', '', '48.1 46.5'),
                ('w/o CA', 'attention_local=none attention_global=none', '46.3 45.6'),
                ('w/ CCA & CCA', 'attention_local=center attention_global=center', '46.7 46.2'),
                ('w/ CCA & PCA', 'attention_local=center', '47.2 46.6'),
                ('w/ PCA & CCA', 'attention_global=center', '47.6 45.6'),
                ('w/ PCA & PCA', '', '48.1 46.5'),
            ],
            'Table 9: cluster algorithms': [
                ('K-Means', 'cluster=kmeans', '47.4 46.2'),
                ('DBSCAN', 'cluster=dbscan', '45.9 46.3'),
                ('Gaussian', 'cluster=gaussian', '46.8 46.1'),
                ('DPC-KNN', '', '48.1 46.5'),
            ],
            'No table of the paper: frames averaged, blind to their order': [
                ('CLIP4Clip (meanP)', 'config/demo_clip.py', ''),
                ('PHA-Net', '', ''),
            ],
        }),
    # the paper's numbers are R@5 on COCO, and not in the text we have
    'slq': dict(
        config='config/demo_slq.py', change='num_workers=0',
        by='kind', within='family', twins=('base', 'order'),
        tables={
            # rates: config/demo_slq*.py; adapters as LoRA, tokens in front as SLQ's, not searched
            'Table 5: tuning': [
                ('Prompt tuning', 'tuning=prompt extraction=last', ''),
                ('Adapter tuning', 'tuning=adapter extraction=last learning_rate=4e-3', ''),
                ('LoRA', 'config/demo_slq_lora.py', ''),
                ('Full fine-tuning', 'config/demo_slq_full.py', ''),
                ('SLQ', '', ''),
            ],
            'Table 5: extraction from the frozen backbone (heads start as the identity)': [
                ('Linear on last', 'extraction=linear learning_rate=4e-3', ''),
                ('TF block on last', 'extraction=block learning_rate=4e-3', ''),
                ('Separate queries', 'share_queries=false', ''),
                ('Shared queries', '', ''),
            ],
            'Table 5: pooling': [
                ('Last', 'pooling=last', ''),
                ('Max', 'pooling=max', ''),
                ('Mean', '', ''),
            ],
            'Fig. 7: number of queries': [
                *((f'N = {n}', f'num_queries={n}' if n != 20 else '', '')
                  for n in (1, 5, 10, 20, 32)),
            ],
            'Fig. 2: without training': [
                ('Last token', 'extraction=last epochs=0', ''),
                ('One zero query', 'num_queries=1 query_init=zeros epochs=0', ''),
                ('SLQ, trained', '', ''),
            ],
        }),
}

import sys
if __name__ == '__main__':  # before torch is imported, so that --help is instant
    from configurator import at_once, configure
    args = at_once(lambda: configure(__file__))

import json
import os
import re
import signal
import statistics
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cache
from itertools import count
from pathlib import Path

from tqdm import tqdm

import eval as evaluation
from checkpoint import MAY_CHANGE, write_atomic
from configurator import configure
from train import SETTINGS, one_line_errors

HERE = Path(__file__).parent
RECALLS = [(side, k) for side in ('t2v', 'v2t') for k in ('R@1', 'R@5', 'R@10')]


# -----------------------------------------------------------------------------
# from rows to runs

def arguments(text):
    """'config/x.py epochs=1' -> what follows `train.py` on a command line."""
    return [word if word.endswith('.py') and '=' not in word else f'--{word}'
            for word in text.split()]


def name_of(change):
    """A row's settings as a file name: 'levels=individual,mu_pcl=0'."""
    words = [Path(word).stem if word.endswith('.py') else word for word in change.split()]
    return re.sub(r'[^\w.=,+-]', '-', ','.join(words)) or 'default'


@cache
def settings_of(*argv):
    """What train.py makes of these arguments, without what does not change a result."""
    return essential(vars(configure(str(HERE / 'train.py'), argv, SETTINGS)))


def essential(settings):
    # unlike on resuming, max_steps counts: a run that was cut short is another row
    return {k: v for k, v in settings.items() if k not in MAY_CHANGE - {'max_steps'}}


def plan(spec):
    """
    spec (config, change, tables) -> {title: [(label, run, paper)]}, {run: (arguments, settings)}.
    Rows of equal settings share a run, which has the name of the first; settings are of seed 0.
    """
    runs, laid_out, first = {}, {}, {}  # first: settings as text -> the name they got first
    base = arguments(spec['config'])
    for title, rows in spec['tables'].items():
        laid_out[title] = []
        # a row without changes goes first, so that all rows that come to the same settings have the
        # name `default`, wherever they stand; it has no label and is no row of the table
        for label, change, paper in [('', '', '')] + rows:
            # the row's own settings stand last, so that it may change what all runs change
            argv = base + arguments(spec['change']) + arguments(change)
            try:
                settings = settings_of(*argv)
            except SystemExit as e:
                raise ValueError(f"{title}, row {label!r}: {e}") from None
            name = first.setdefault(json.dumps(settings, sort_keys=True), name_of(change))
            if runs.setdefault(name, (argv, settings))[1] != settings:
                raise ValueError(f"{title}, row {label!r}: its settings would have the name of "
                                 f"another row's, {name}; write them otherwise")
            if label:
                laid_out[title].append((label, name, paper))
    used = {name for rows in laid_out.values() for _, name, _ in rows}
    return laid_out, {name: run for name, run in runs.items() if name in used}


def result_of(folder, settings, split, by='', within=''):
    """The finished result in a run's folder; None if there is none, or it is of other settings."""
    if not (folder / 'metrics.json').is_file() or differences(folder, settings):
        return None
    result = evaluation.read_json(folder / 'metrics.json').get(split)
    try:
        whole = all(isinstance(result[side][k], (int, float)) for side, k in RECALLS)
    except (KeyError, TypeError):
        whole = False
    if not whole:                        # of an evaluation that is missing or damaged: run it again
        return None
    if by and [result.get('by', {}).get(k) for k in ('field', 'within')] != [by, within]:
        return None
    return result


def differences(folder, settings):
    """How the run in this folder differs from `settings`: 'epochs 1, not 2'; '' if it does not."""
    file = folder / 'config.json'
    if not file.is_file():
        return ''
    there = evaluation.with_defaults(evaluation.run_settings(file), file)
    there, settings = (json.loads(json.dumps(essential(s))) for s in (there, settings))  # no tuples
    return ', '.join(f"{k} {there.get(k)!r}, not {settings.get(k)!r}"
                     for k in sorted(there.keys() | settings.keys())
                     if there.get(k) != settings.get(k))


# -----------------------------------------------------------------------------
# running them

class Runner:
    """Trains and evaluates runs in subprocesses, `jobs` at a time, until it is told to stop."""

    def __init__(self, out_dir, split, jobs, launch='', by='', within=''):
        self.out_dir, self.jobs = Path(out_dir), jobs
        self.python = launch.split() or [sys.executable]
        self.eval_flags = [f'--split={split}', *([f'--by={by}'] if by else []),
                           *([f'--within={within}'] if within else [])]
        threads = str(max(1, (os.cpu_count() or 1) // jobs))
        self.env = {'OMP_NUM_THREADS': threads, **os.environ}
        self.stopping, self.children = threading.Event(), set()

    def commands(self, folder, argv):
        """What is run for one row, as lists of words."""
        return [[*self.python, 'train.py', *argv, f'--out_dir={folder}', '--resume'],
                [*self.python, 'eval.py', f'--ckpt={folder}', *self.eval_flags]]

    def stop(self, *_):
        # a signal's handler. train.py ends after its step with a checkpoint, eval.py at once
        self.stopping.set()
        for child in list(self.children):
            child.terminate()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)  # asked twice: leave at once

    def run(self, folder, argv):
        """-> True when there is a result, False when it was stopped; ValueError when it failed."""
        log = Path(f'{folder}.log')
        for command in self.commands(folder, argv):
            if self.stopping.is_set():
                return False
            with open(log, 'ab') as f:
                start = f.tell()
                f.write(f"$ {' '.join(command)}\n".encode())
                f.flush()
                child = subprocess.Popen(command, stdout=f, stderr=subprocess.STDOUT,
                                         stdin=subprocess.DEVNULL, env=self.env)
                self.children.add(child)
                if self.stopping.is_set():  # between the check above and here
                    child.terminate()
                code = child.wait()
                self.children.discard(child)
            said = log.read_bytes()[start:].decode(errors='replace').strip()
            if self.stopping.is_set():
                return False
            if code:
                raise ValueError(f"{said.splitlines()[-1].strip()} (log: {log})")
            if 'train.py' in command and not re.search('^done: ', said, re.M):
                raise ValueError(f"training was stopped before its end (log: {log})")
        return True

    def all(self, todo, finished):
        """todo: [(folder, arguments)]; finished(folder) after each. -> one line per failure"""
        failures, old = [], {n: signal.signal(n, self.stop)
                             for n in (signal.SIGINT, signal.SIGTERM)}
        with ThreadPoolExecutor(self.jobs) as pool, tqdm(total=len(todo), unit='run') as bar:
            futures = {pool.submit(self.run, *run): run[0] for run in todo}
            for future in as_completed(futures):
                folder = futures[future]
                try:
                    if not future.result():
                        continue  # stopped
                    tqdm.write(finished(folder))
                except (ValueError, OSError) as e:
                    failures.append(f"{folder.name}: {e}")
                    tqdm.write(f"failed: {failures[-1]}", file=sys.stderr)
                bar.update()
        for number, handler in old.items():
            signal.signal(number, handler)
        return failures


def put_aside(folder, why):
    """A run of other settings keeps its files under a name that is free: .old, .old2, .old3, ..."""
    names = (folder.with_name(f'{folder.name}.old{n if n > 1 else ""}') for n in count(1))
    old = next(name for name in names if not os.path.lexists(name))
    os.rename(folder, old)
    print(f"{folder} holds another run ({why}), which is now {old}")


# -----------------------------------------------------------------------------
# tables

def spread(values, seeds):
    """'48.1 ±0.7': mean and standard deviation; fewer seeds than wanted are marked by their n."""
    if not values:
        return '-'
    text = f"{statistics.fmean(values):.1f}"
    if len(values) > 1:
        text += f" ±{statistics.stdev(values):.1f}"
    return text if len(values) == seeds else f"{text} n{len(values)}"


def paper_table(title, rows, results, seeds):
    """rows [(label, run, paper)], results {run: [result per seed]} -> lines, 100 columns."""
    paper = ('the paper,', 'MSR-VTT R@1') if any(row[2] for row in rows) else ('', '')
    out = [title, f"{'':20}{'Text-to-Video':^33}{'Video-to-Text':^33}{paper[0]:>14}",
           f"{'':20}" + ''.join(f"{k:>11}" for _, k in RECALLS) + f"{paper[1]:>14}"]
    for label, run, paper in rows:
        cells = [spread([r[side][k] for r in results.get(run, [])], seeds) for side, k in RECALLS]
        out.append(f"{label:20}" + ''.join(f"{c:>11}" for c in cells)
                   + f"{' / '.join(paper.split()):>14}")
    return [line.rstrip() for line in out]


def kind_table(laid_out, results, seeds, twins):
    """T2V R@1 of each value of `by`, and how often a clip beats its twin; every run once."""
    found = [r['by'] for rs in results.values() for r in rs if 'by' in r]
    if not found:
        return []
    values = list(found[0]['values'])
    out = [f"T2V R@1 by {found[0]['field']}, and how often a query's own clip is above its twin "
           f"({' / '.join(twins)}; chance 50)",
           f"{'':20}" + ''.join(f"{v:>12}" for v in values) + f"{'its twin':>14}"]
    seen = set()
    for rows in laid_out.values():
        for label, run, _ in rows:
            rs = [r['by']['values'] for r in results.get(run, []) if 'by' in r]
            if run in seen or not rs:
                continue
            seen.add(run)
            label = 'default' if run == 'default' else label
            cells = [spread([r[v]['t2v']['R@1'] for r in rs], seeds) for v in values]
            above = [beaten(r, *twins) for r in rs]
            out.append(f"{label:20}" + ''.join(f"{c:>12}" for c in cells)
                       + f"{spread([a for a in above if a is not None], seeds):>14}")
    return out


def beaten(values, a, b):
    """Percent of queries, of kind a or b, whose own clip is above its sibling of the other kind."""
    pairs = [(values[x]['n_text'], values[x].get('beats', {}).get(y))
             for x, y in ((a, b), (b, a)) if x in values]
    pairs = [(n, p) for n, p in pairs if p is not None]
    return sum(n * p for n, p in pairs) / sum(n for n, _ in pairs) if pairs else None


def all_tables(laid_out, results, seeds, twins=()):
    parts = [paper_table(title, rows, results, seeds) for title, rows in laid_out.items()]
    parts += [kind_table(laid_out, results, seeds, twins)] if twins else []
    return '\n\n'.join('\n'.join(lines) for lines in parts if lines)


# -----------------------------------------------------------------------------
# the script

def specification(args):
    """The entry of TABLES with the command line's config and change over its own."""
    if args.tables not in TABLES:
        raise ValueError(f"tables is {args.tables!r}; there are: {', '.join(TABLES)}")
    for key in ('seeds', 'jobs'):
        if getattr(args, key) < 1:
            raise ValueError(f"{key} is {getattr(args, key)} and must be at least 1")
    spec = {'by': '', 'within': '', 'twins': (), **TABLES[args.tables]}
    if args.config:  # other data: its annotations need not have the demo's fields
        spec.update(config=args.config, by='', within='', twins=())
    if args.config or args.change:
        spec['change'] = args.change
    return spec


def main(args):
    spec = specification(args)
    laid_out, runs = plan(spec)
    named = {name: run for name, run in runs.items() if args.only in name}
    if not named:
        raise ValueError(f"no row's settings have {args.only!r} in their name; there are: "
                         f"{', '.join(runs)}")
    out, by = Path(args.out_dir, args.tables), {k: spec[k] for k in ('by', 'within')}
    # seed after seed, so that what is there after a while is whole tables
    places = {(name, seed): out / f'{name}_s{seed}' for seed in range(args.seeds) for name in runs}
    wanted = {key: {**runs[key[0]][1], 'seed': key[1]} for key in places}
    found = {}                           # (run, seed) -> result

    def collect():
        """{run: [result per seed]} of what is finished; unless show, also in <tables>.json."""
        for key in places.keys() - found.keys():
            if result := result_of(places[key], wanted[key], args.split, **by):
                found[key] = result
        rows = {name: {str(s): found[name, s] for s in range(args.seeds) if (name, s) in found}
                for name in runs}
        if not args.show:
            out.mkdir(parents=True, exist_ok=True)
            write_atomic(out / f'{args.tables}.json', json.dumps(
                {'config': spec['config'], 'change': spec['change'], 'split': args.split,
                 'rows': {name: {'settings': runs[name][1], 'seeds': rows[name]} for name in runs}},
                indent=1) + '\n')
        return {name: list(r.values()) for name, r in rows.items()}

    collect()
    todo = [key for key in places if key[0] in named and key not in found]
    print(f"{args.tables}: {len(runs)} settings x {args.seeds} seeds, each is {spec['config']} "
          f"{spec['change']}\n{len(todo)} runs to do, {args.jobs} at a time; {out}/<run>.log",
          flush=True)
    failures, stopped = [], False
    if todo and not args.show:
        for key in todo:
            if why := differences(places[key], wanted[key]):
                put_aside(places[key], why)
        runner = Runner(out, args.split, args.jobs, args.launch, **by)
        keys = {places[key]: key for key in todo}

        def finished(folder):
            collect()
            r = found.get(keys[folder])
            if r is None:
                raise ValueError("it ran, and left no result of the settings asked for; look at "
                                 f"{folder}.log")
            return f"{folder.name}: T2V R@1 {r['t2v']['R@1']:.1f}, V2T R@1 {r['v2t']['R@1']:.1f}"

        failures = runner.all([(places[k], [*runs[k[0]][0], f'--seed={k[1]}']) for k in todo],
                              finished)
        stopped = runner.stopping.is_set()
    print('\n' + all_tables(laid_out, collect(), args.seeds, spec['twins']))
    print(f"\n{args.split} split, {spec['config']} {spec['change']}: mean ± std over "
          f"{args.seeds} seeds (n: of so many)")
    if failures:
        raise ValueError(f"{len(failures)} runs failed, the first: {failures[0]}")
    if stopped:
        raise SystemExit("stopped; the same command goes on from here")


if __name__ == '__main__':
    one_line_errors(lambda: main(args))
