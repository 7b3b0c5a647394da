"""
data/<name>/prepare.py on small files in each layout that people have, on broken ones, and on real
annotation files where there are any beside the repo (../shared/annotations).
"""
import importlib.util
import json
import pickle
import subprocess
import sys

import numpy as np
import pytest

from conftest import ROOT, SHARED
from data import load_annotations

REAL = SHARED / 'annotations'
real = pytest.mark.skipif(not REAL.is_dir(), reason='no real annotation files beside the repo')
TASKS = ROOT / 'tests' / 'tasks'


def module(name):
    spec = importlib.util.spec_from_file_location(f'prepare_{name}',
                                                  ROOT / 'data' / name / 'prepare.py')
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


class Prepare:
    """prepare('didemo', folder, '--val', '0') -> {split: {id: Item}}; .said is what it printed."""

    def __init__(self, tmp_path, capsys):
        self.out, self.capsys = tmp_path / 'out', capsys

    def __call__(self, name, folder, *args):
        module(name).main(['--annotations', str(folder), '--out', str(self.out), *args])
        self.said = self.capsys.readouterr().out
        return {s: {i.id: i for i in load_annotations(str(self.out / f'{s}.jsonl'))}
                for s in ('train', 'val', 'test') if (self.out / f'{s}.jsonl').exists()}


@pytest.fixture
def prepare(tmp_path, capsys):
    return Prepare(tmp_path, capsys)


@pytest.fixture
def write(tmp_path):
    """write(name=text or object for JSON) -> the folder"""
    def write(files):
        folder = tmp_path / 'annotations'
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            text = content if isinstance(content, str) else json.dumps(content)
            (folder / name).write_text(text, encoding='utf-8', newline='')
        return folder
    return write


def videos(tmp_path, *names):
    folder = tmp_path / 'videos'
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b'x')
    return str(folder)


def captions(split):
    return {i: item.captions for i, item in split.items()}


# -----------------------------------------------------------------------------
# MSR-VTT

def msrvtt(n=20, first=6505):
    """n videos around the first of the official validation split, 2 captions each, not in order"""
    names = [f'video{first + i}' for i in range(n)]
    return names, {'info': {}, 'videos': [
        {'video_id': v, 'split': 'train' if i < 8 else 'validate' if i < 15 else 'test', 'id': i}
        for i, v in enumerate(names)],
        'sentences': [{'video_id': v, 'caption': f'{k} of {v}', 'sen_id': 100 * k + i}
                      for k in (1, 2) for i, v in enumerate(names)]}


def test_msrvtt_clip4clip(prepare, write):
    names, data = msrvtt()
    folder = write({'MSRVTT_train.9k.csv': 'video_id\n' + '\n'.join(names[:18]) + '\n',
                    'MSRVTT_train.7k.csv': 'video_id\n' + '\n'.join(names[:10]) + '\n\n',
                    'MSRVTT_data.json': data, 'MSRVTT_JSFUSION_test.csv':
                    '\ufeffkey,vid_key,video_id,sentence\nret0,msr1,video6523,"he says ""hi"", '
                    'twice"\nret1,msr2,video6524,"two\n \nlines"  \n'})
    found = prepare('msrvtt', folder)
    assert 'layout clip4clip' in prepare.said and 'training list: 9k' in prepare.said
    assert captions(found['test']) == {'video6523': ['he says "hi", twice'],
                                       'video6524': ['two lines']}
    assert list(found['val']) == [f'video{n}' for n in range(6513, 6523)]  # the official ones
    assert list(found['train']) == names[:8]
    assert found['train']['video6505'].captions == ['1 of video6505', '2 of video6505']
    assert 'train 18 videos, 36 captions; 1k-A 9k 9,000 videos, 180,000 captions: 8,982 videos ' \
        'fewer' in prepare.said and '10 videos of the official validation split' in prepare.said
    found = prepare('msrvtt', folder, '--train', '7k', '--val', '3')
    assert (len(found['train']), len(found['val'])) == (7, 3) and 'seed 1337' in prepare.said
    again = [prepare('msrvtt', folder, '--val', '3', '--train', '7k', '--seed', seed)['val']
             for seed in ('1337', '1')]
    assert again[0] == found['val'] != again[1]


def test_msrvtt_lists_and_the_full_split(prepare, write):
    names, data = msrvtt()
    rows = [{'video': f'{v}.mp4', 'caption': ['a', 'a', 'b']} for v in names[:3]]  # a twice: kept
    flat = [{'video': f'{v}.mp4', 'caption': c} for v in names[:3] for c in 'aab']
    test = [{'video': 'video1.mp4', 'caption': 'c', 'duration': 1.5}]
    for files, layout in (({'msrvtt_ret_train9k.json': rows, 'msrvtt_ret_test1k.json': test},
                           'vindlu'),
                          ({'msrvtt_ret_train.json': flat, 'msrvtt_ret_test.json': test},
                           'vindlu'),
                          ({'msrvtt_train_9k.json': [{'video_id': r['video'][:-4], **r, 'id': 0}
                                                     for r in rows],
                            'msrvtt_test_1k.json': test}, 'hub')):
        folder = write(files)
        found = prepare('msrvtt', folder, '--val', '0', '--layout', layout)
        assert captions(found['train']) == {v: ['a', 'a', 'b'] for v in names[:3]}, layout
        assert captions(found['test']) == {'video1': ['c']}
        for name in files:
            (folder / name).unlink()
    found = prepare('msrvtt', write({'MSRVTT_data.json': data}))
    assert 'not 1k-A' in prepare.said
    assert [len(found[s]) for s in ('train', 'val', 'test')] == [8, 7, 5]


# -----------------------------------------------------------------------------
# DiDeMo, ActivityNet

def test_didemo(prepare, write, tmp_path):
    row = lambda video, text, n: {'video': video, 'description': text, 'times': [[0, 0]],
                                  'annotation_id': n, 'num_segments': 6, 'dl_link': ''}
    folder = write({
        'train_data.json': [row(f'{i:03}@N0_{i}.mov', f'text {i}', i) for i in range(30)],
        'val_data.json': [row('v@N.m4v', 'only one', 1)],
        'test_data.json': [row('a@N00_1_b.mov', 'second in the alphabet', 1),
                           row('b@N00.avi', 'other', 2), row('c@N00.avi', 'not listed', 3),
                           row('a@N00_1_b.mov', 'first in the alphabet', 4),
                           row('b@N00.avi', 'other', 2), row('b@N00.avi', 'other', 5)],
        'test_list.txt': 'b@N00\na@N00_1_b\r\n\nz@N00\n'})
    root = videos(tmp_path, 'x/a@N00_1_b.m4v.mp4', 'b@N00.3gp', 'b@N00.json', '007@N0_7',
                  '006@N0_6.MOV')
    found = prepare('didemo', folder, '--videos', root)
    # the order of the list; captions in that of the file; a whole repeated row once
    assert list(captions(found['test']).items()) == [
        ('b@N00', ['other', 'other']),
        ('a@N00_1_b', ['second in the alphabet', 'first in the alphabet'])]
    assert found['test']['a@N00_1_b'].video == 'x/a@N00_1_b.m4v.mp4'
    assert found['test']['b@N00'].video == 'b@N00.3gp'
    assert (found['train']['007@N0_7'].video, found['train']['006@N0_6'].video) == (
        '007@N0_7', '006@N0_6.MOV')
    assert found['train']['005@N0_5'].video == '005@N0_5.mov'  # as named, since it is missing
    for line in ('MARS 1,003 videos: 1,001 videos fewer', 'official 1,065 videos',
                 '1 of its videos are not in the list', '1 of the list have no caption',
                 'on disk in', '4 of 33', 'missing: 29', 'left out: 1 (the first: ',
                 'paragraphs of 2 to 8 words, median 5'):
        assert line in prepare.said, line
    lost = (prepare.out / 'missing.txt').read_text().splitlines()
    assert len(lost) == 29 and lost[0] == 'train\t000@N0_0\t000@N0_0.mov'

    for name in ('train_data.json', 'val_data.json', 'test_data.json'):
        (folder / name).unlink()
    rows = [{'video': f'{i}@N.mov.mp4', 'caption': ['one.', ' two']} for i in range(30)]
    found = prepare('didemo', write({'didemo_ret_train.json': rows,
                                     'didemo_ret_test.json': rows[:1]}))
    assert 'layout vindlu' in prepare.said and 'warning: 1 ids are in train and in test' \
        in prepare.said
    assert len(found['val']) == 3 and len(found['train']) == 27 and '3 training videos are held ' \
        'out (seed 1337)' in prepare.said
    assert found['test']['0@N'].captions == ['one.', 'two']


def test_activitynet(prepare, write, tmp_path):
    entry = {'duration': 9.5, 'timestamps': [[3, 4], [0, 2]],
             'sentences': ['Then he sits.', '  He  stands. ']}
    folder = write({'train.json': {f'v_{i:02}': entry for i in range(20)},
                    'val_1.json': {'v_-x': entry, 'v_y': entry},
                    'val_ids.json': ['v_-x', 'v_gone']})
    root = videos(tmp_path, 'val/-x.webm', 'a/b/v_03.mkv', 'train/v_03.mp4')
    (tmp_path / 'videos/val/again').symlink_to(tmp_path / 'videos')  # a circle
    found = prepare('activitynet', folder, '--videos', root)
    assert 'test is val_1' in prepare.said and '1 of the listed ids' in prepare.said
    assert captions(found['test']) == {'v_-x': ['Then he sits.', 'He  stands.']}
    assert load_annotations(str(prepare.out / 'test.jsonl'), paragraph=True)[0].captions == [
        'Then he sits. He  stands.']
    assert found['test']['v_-x'].video == 'val/-x.webm'
    assert {**found['train'], **found['val']}['v_03'].video == 'train/v_03.mp4'
    assert 'several files' in prepare.said and 'not in the order of their start' in prepare.said
    assert len(found['val']) == 2 and not set(found['val']) & set(found['train'])
    (folder / 'val_1.json').unlink()
    (folder / 'train.json').unlink()
    rows = [{'video_id': 'v_y', 'video': 'v_y.mp4', 'caption': 'A. B.', 'sentences': ['A.', ' B.']}]
    found = prepare('activitynet', write({'activitynet_captions_val1.json': rows}))
    assert 'layout hub' in prepare.said and captions(found['test']) == {'v_y': ['A.', 'B.']}
    rows = [{'video': 'v_y.mkv', 'caption': ['A.', '  B.'], 'duration': 3}]
    found = prepare('activitynet', write({'anet_ret_val_1.json': rows}), '--layout', 'vindlu')
    assert found['test']['v_y'].video == 'v_y.mkv' and found['test']['v_y'].captions == ['A.', 'B.']
    (folder / 'val_ids.json').unlink()
    with pytest.raises(ValueError, match=r"val_1.json:2: 'v_z' has 1 sentences and 2 timestamps"):
        prepare('activitynet', write({'val_1.json': '{"v_y": {"sentences": ["a"]},\n"v_z": '
                                      '{"timestamps": [[0, 1], [1, 2]], "sentences": ["a"]}}'}))


# -----------------------------------------------------------------------------
# LSMDC, VATEX, Charades, MSVD

def test_lsmdc(prepare, write, tmp_path):
    row = lambda clip, text: '\t'.join([clip, '1.0', '2.0', '1.0', '2.0', text]) + '\n'
    clip = '0001_A.B._Film_00.00.51.926-00.00.54.129'
    folder = write({
        'LSMDC16_annos_training.csv': ''.join(
            [row(clip, 'SOMEONE says "no", twice.'), row(clip, 'Another.'), row(clip, 'Another.')]),
        'LSMDC16_annos_val.csv': '\ufeff' + row('0002_C_00.00.01.000-00.00.02.000', 'Yes. \t'),
        'LSMDC16_challenge_1000_publictest.csv': row('0003_D_00.00.01.000-00.00.02.000', 'So.')})
    root = videos(tmp_path, f'0001_A.B._Film/{clip}.avi', '0003_D_00.00.01.000-00.00.02.000.mp4')
    found = prepare('lsmdc', folder, '--videos', root)
    assert captions(found['train']) == {clip: ['SOMEONE says "no", twice.', 'Another.']}
    assert found['train'][clip].video == f'0001_A.B._Film/{clip}.avi'
    assert found['test']['0003_D_00.00.01.000-00.00.02.000'].video.endswith('02.000.mp4')
    assert found['val']['0002_C_00.00.01.000-00.00.02.000'].captions == ['Yes.']
    assert '1 clips have several captions' in prepare.said and 'missing: 1' in prepare.said
    assert 'MARS 101,055 captions: 101,053 captions fewer' in prepare.said
    found = prepare('lsmdc', folder)  # without --videos: as they are shipped, a folder per movie
    assert found['train'][clip].video == f'0001_A.B._Film/{clip}.avi'
    for path in folder.iterdir():
        path.unlink()
    rows = [{'video': f'0001_A.B._Film/{clip}.avi', 'caption': 'Now.'}]
    for name in ('lsmdc_ret_test_1000.json', 'lsmdc_ret_test.json'):
        found = prepare('lsmdc', write({name: rows}))
        assert captions(found['test']) == {clip: ['Now.']}
    (folder / 'LSMDC16_annos_val.csv').write_text(row('a', 'b') + 'c\t1\t2\t3\t4\n')
    with pytest.raises(ValueError, match='LSMDC16_annos_val.csv:2: 5 cells between TABs'):
        prepare('lsmdc', folder)


def test_vatex(prepare, write, tmp_path):
    entry = lambda v: {'videoID': v, 'enCap': [f'{v} {k}' for k in range(10)], 'chCap': ['中'] * 10}
    ids = [f'id{i}_000001_000011' for i in range(8)]
    found = prepare('vatex', write({'vatex_training_v1.0.json': [entry(v) for v in ids[:4]],
                                    'vatex_validation_v1.0.json': [entry(v) for v in ids[4:]]}))
    assert [len(found[s]) for s in ('train', 'val', 'test')] == [4, 2, 2]
    assert 'halved into val and test by seed 1337' in prepare.said
    assert found['train'][ids[0]].captions == [f'{ids[0]} {k}' for k in range(10)]  # no Chinese
    lists = {'train_list.txt': '\n'.join(ids[:4]), 'val_list.txt': ids[4], 'test_list.txt': ids[5]}
    for captions_file in ({v: entry(v) for v in ids}, {v: entry(v)['enCap'] for v in ids}):
        name = 'ref_captions.json' if isinstance(captions_file[ids[0]], list) else \
            'vatex_data.json'
        found = prepare('vatex', write({**lists, name: captions_file}))
        assert 'layout lists' in prepare.said and list(found['val']) == [ids[4]]
        assert found['test'][ids[5]].captions == entry(ids[5])['enCap']
    folder = write({})
    for s in ('train', 'val', 'test'):
        (folder / f'{s}_list.txt').unlink()
    for s, some in (('trn', ids[:4]), ('val', ids[4:5]), ('tst', ids[5:6] + ['gone'])):
        np.save(folder / f'{s}_names.npy', np.array(some))
    found = prepare('vatex', folder)
    assert 'layout hgr' in prepare.said and '1 ids of' in prepare.said
    assert list(found['test']) == [ids[5]]


def test_charades(prepare, write):
    head = ('id,subject,scene,quality,relevance,verified,script,objects,descriptions,actions,'
            'length\n')
    folder = write({'Charades_v1_test.csv': head + '007,X,Room,5,6,Yes,"He sits, then\r\nstands.",'
                    'bed;pillow,"One.  Two;, three; ;Four",c077 1 2;c079 1 2,16.6\r\n',
                    'charades_sta_test.txt': '007 0.0 3.4##he sits. \n007 1 4##he ## stands\n'})
    found = prepare('charades', folder)
    assert captions(found['test']) == {'007': ['He sits, then stands.']}
    assert 'official 1,863 videos: 1,862 videos fewer' in prepare.said
    assert 'there too: sta' in prepare.said and 'no val.jsonl' in prepare.said
    found = prepare('charades', folder, '--captions', 'descriptions')
    assert captions(found['test']) == {'007': ['One.  Two', ', three', 'Four']}
    found = prepare('charades', folder, '--layout', 'sta')
    assert captions(found['test']) == {'007': ['he sits.', 'he ## stands']}
    with pytest.raises(ValueError, match="test.txt:2: expected 'VID start end##sentence'"):
        prepare('charades', write({'charades_sta_test.txt': '\n007 0.0 he sits\n'}), '--layout',
                'sta')


class Evil:
    def __reduce__(self):
        return print, ('this must not run',)


def test_msvd(prepare, write):
    folder = write({'train_list.txt': 'a_1_2\nb_1_2\n', 'val_list.txt': 'c_1_2.avi\n',
                    'test_list.txt': 'd_1_2\ngone\n',
                    'captions_msvd.json': {f'{v}_1_2': [f'a {v}', f'a {v}'] for v in 'abcd'}})
    found = prepare('msvd', folder)
    assert captions(found['val']) == {'c_1_2': ['a c', 'a c']} and len(found['train']) == 2
    assert "1 ids of" in prepare.said and 'official 1,200 videos' in prepare.said
    (folder / 'captions_msvd.json').unlink()
    words = {f'{v}_1_2': [['a', 'man'], ['he', 'runs']] for v in 'abcd'}
    (folder / 'raw-captions.pkl').write_bytes(pickle.dumps(words))
    assert prepare('msvd', folder)['test']['d_1_2'].captions == ['a man', 'he runs']
    (folder / 'raw-captions.pkl').write_bytes(pickle.dumps({'a': Evil()}))
    with pytest.raises(ValueError, match='raw-captions.pkl cannot be read: it holds a builtins'):
        prepare('msvd', folder)
    rows = [{'video': 'e_1_2.avi', 'caption': ['x', 'y']}]
    found = prepare('msvd', write({'msvd_ret_test.json': rows}), '--layout', 'vindlu')
    assert found['test']['e_1_2'].video == 'e_1_2.avi'


# -----------------------------------------------------------------------------
# images

def test_coco(prepare, write, tmp_path):
    image = lambda n, split, k: {'filepath': 'val2014', 'filename': f'COCO_val2014_{n:012}.jpg',
                                 'split': split, 'sentences': [{'raw': f'{n} {i} ', 'tokens': []}
                                                               for i in range(k)]}
    folder = write({'dataset_coco.json': {'dataset': 'coco', 'images': [
        image(1, 'train', 5), image(2, 'restval', 7), image(3, 'val', 6), image(4, 'test', 5)]}})
    root = videos(tmp_path, 'val2017/000000000004.jpg', 'val2014/COCO_val2014_000000000002.jpg')
    found = prepare('coco', folder, '--videos', root)
    assert list(captions(found['train']).values())[1] == [f'2 {i}' for i in range(7)]
    assert captions(found['val']) == {'COCO_val2014_000000000003': [f'3 {i}' for i in range(5)]}
    assert [i.video for i in found['test'].values()] == ['val2017/000000000004.jpg']
    assert '1 images of split train and 1 of restval' in prepare.said
    assert 'test  1 images, 5 captions; Karpathy 5,000 images, 25,000 captions: 4,999 images ' \
        'fewer' in prepare.said
    (folder / 'dataset_coco.json').unlink()
    found = prepare('coco', write({
        'coco_karpathy_train.json': [{'image': 'val2014/x.jpg', 'caption': c, 'image_id': 'c1'}
                                     for c in ('a', 'b')],
        'coco_karpathy_test.json': [{'image': 'val2014/y.jpg', 'caption': list('abcdef')}]}))
    assert captions(found['train']) == {'x': ['a', 'b']}  # a row per caption
    assert captions(found['test']) == {'y': list('abcde')}
    for path in folder.iterdir():
        path.unlink()
    lines = [f'image {i // 5} caption {i}' for i in range(10)]
    found = prepare('coco', write({'coco_precomp/test_caps.txt': '\n'.join(lines)}))
    assert captions(found['test']) == {f'test_{i:06}': lines[5 * i:5 * i + 5] for i in range(2)}
    with pytest.raises(ValueError, match='has 9 captions, not five an image'):
        prepare('coco', write({'coco_precomp/test_caps.txt': '\n'.join(lines[1:])}))


def test_image_sets_as_eval_tasks_has_them(prepare):
    found = prepare('flickr30k', TASKS / 'flickr30k', '--videos', str(TASKS / 'flickr30k'))
    assert found['test']['1000'].video == 'flickr30k-images/1000.jpg'
    assert len(found['test']) == 4
    found = prepare('cirr', TASKS / 'cirr', '--videos', str(TASKS / 'cirr' / 'img_raw'))
    item = next(iter(found['val'].values()))
    assert item.video.startswith('dev/') and item.fields['reference'].startswith('dev/')
    assert "test1: gallery of 7 images; 1 queries have no target" in prepare.said
    found = prepare('fashioniq', TASKS / 'fashioniq', '--videos', str(TASKS / 'fashioniq'))
    assert len(found['val']) == 6 and 'dress 2 queries, gallery of 6 images' in prepare.said
    assert {i.video[-4:] for i in found['val'].values()} == {'.png', '.jpg'}
    assert not (prepare.out / 'missing.txt').exists()


def test_parquet(prepare):
    pytest.importorskip('pyarrow')
    found = prepare('flickr30k', TASKS / 'flickr30k_hf')
    images = prepare.out / 'images'
    assert all((images / i.video).read_bytes()[:2] in (b'\xff\xd8', b'\x89P')
               for i in found['test'].values()) and len(found['test']) == 4
    found = prepare('karr', TASKS / 'karr')
    assert len(found['test']) == 4 and 'authors 2,915 images' in prepare.said
    found = prepare('mmeb', TASKS / 'mmeb')
    assert len(found['test']) == 5 and '1 are no plain pairs' in prepare.said
    assert '4 data sets of 36' in prepare.said


# -----------------------------------------------------------------------------
# broken files, and the command line

CSV = 'key,vid_key,video_id,sentence\n'


@pytest.mark.parametrize('text, error', [
    (CSV + 'r,m,v1,fine\nr,m,v2,  \n',
     r"test.csv:3: caption '' of 'v2' is no text; .*--empty=drop"),
    (CSV + 'r,m,v1,fine\nr,m,v2,\u200d\n', r'test.csv:3: caption .* is no text'),
    (CSV + 'r,m,v1,a, b\n', r"test.csv:2: 5 cells, the header has 4 columns"),
    (CSV + 'r,m,v1\n', r'test.csv:2: 3 cells'),
    (CSV + 'r,m,,text\n', r"test.csv:2: the id is ''"),
    (CSV + 'r,m,v1,"open\nr,m,v2,b\n', r'test.csv:2: no valid CSV: .*quote left open'),
    ('key;video_id;sentence\n', r"no column 'video_id', 'sentence'; the columns are 'key;video_id"),
    ('', r'is empty; expected a header with video_id')])
def test_broken_csv(prepare, write, text, error):
    with pytest.raises(ValueError, match=error):
        prepare('msrvtt', write({'MSRVTT_JSFUSION_test.csv': text}))
    assert not prepare.out.exists()


@pytest.mark.parametrize('text, error', [
    ('[{"video": "a", "description": "b"},\n{"video": "c", "desc', r'test_data.json:2, row 2: no '
     r'valid JSON: Unterminated string'),
    ('[{"video": "a", "description": "b"},\n', 'test_data.json:2, row 2: .* cut off'),
    ('[{"video": "a", "description": "b"},\n{"video": "c", "descr": "d"}]',
     r'test_data.json:2, row 2: no description; the fields are video, descr'),
    ('[{"video": "a", "description": "b"}, 3]', r'row 2: expected an object, found 3'),
    ('[{"video": null, "description": "b"}]', r'row 1: no video'),
    ('[{"video": true, "description": "b"}]', r'video is True, expected a str'),
    ('[{"video": "a", "description": "\\ud800"}]', r'half a surrogate pair'),
    ('[{"video": "a", "video": "b", "description": "c"}]', r"the key 'video' is there twice"),
    ('version 1', 'expected a JSON list of rows'), ('[]', 'no video with a caption')])
def test_broken_json(prepare, write, text, error):
    with pytest.raises(ValueError, match=error):
        prepare('didemo', write({'test_data.json': text}))


def test_ids_are_text_and_empty_captions_can_be_dropped(prepare, write):
    folder = write({'MSRVTT_JSFUSION_test.csv': CSV.replace('\n', ',extra\n') + 'r,m, 007 ,a,1\n'
                    'r,m,7,b,\n\n , \nr,m,1e5,"",\nr,m,7,b,\n'})
    found = prepare('msrvtt', folder, '--empty', 'drop')
    assert captions(found['test']) == {'007': ['a'], '7': ['b']}
    assert '1 captions without text are left out' in prepare.said
    assert 'left out: 1 (the first: ' in prepare.said  # the repeated row
    (folder / 'MSRVTT_JSFUSION_test.csv').write_bytes((CSV + 'r,m,v,caf\xe9\n').encode('latin1'))
    with pytest.raises(ValueError, match='csv:2: byte 0xe9 is no UTF-8'):
        prepare('msrvtt', folder)
    (folder / 'MSRVTT_JSFUSION_test.csv').write_bytes((CSV + 'r,m,v,café\n').encode('utf-16'))
    assert captions(prepare('msrvtt', folder)['test']) == {'v': ['café']}


def test_real_tokens_are_counted(prepare, write, tmp_path):
    from conftest import make_tokenizer
    tok = make_tokenizer(str(tmp_path / 'tokenizer'))
    texts = ['a red circle', 'a red circle moves left then a blue square grows', 'x']
    folder = write({'didemo_ret_test.json': [{'video': f'{i}.mp4', 'caption': [t]}
                                             for i, t in enumerate(texts)]})
    limit = len(tok(texts[0]).input_ids)
    prepare('didemo', folder, '--tokenizer', str(tmp_path / 'tokenizer'), '--limits', str(limit))
    assert f'cut at {limit} tokens: 1 (33.3 %)' in prepare.said
    prepare('didemo', folder, '--limits', '5')  # without: words
    assert 'cut at 5 tokens: at least 1 (33.3 %)' in prepare.said


def test_json_lines_and_utf8_bom(prepare, write):
    lines = '\ufeff{"video": "a.mp4", "caption": ["x"]}\n\n{"video": 7, "caption": "y\\nz"}\n'
    found = prepare('didemo', write({'didemo_test.json': lines}))
    assert captions(found['test']) == {'a': ['x'], '7': ['y z']}


def test_wrong_folder_and_files_twice(prepare, write, tmp_path):
    folder = write({'readme.txt': 'hello'})
    with pytest.raises(FileNotFoundError, match=r'holds no annotations of DiDeMo(.|\n)*train_data'
                       r'.json(.|\n)*didemo_ret_test.json(.|\n)*found 1 files: readme.txt'):
        prepare('didemo', folder)
    with pytest.raises(FileNotFoundError, match='is neither a folder nor a file'):
        prepare('didemo', tmp_path / 'nowhere')
    write({'a/val_1.json': {}, 'b/val_1.json': {}})
    with pytest.raises(ValueError, match='more than one file for test: a/val_1.json, b/val_1.json'):
        prepare('activitynet', folder)
    rows = [{'video': 'v_y.mkv', 'caption': 'A.'}]  # what is not chosen may be there twice
    write({'anet_ret_train.json': rows, 'anet_ret_val_1.json': rows})
    assert 'v_y' in prepare('activitynet', folder)['test']
    file = folder / 'anet_ret_val_1.json'
    assert 'v_y' in prepare('activitynet', file)['test']  # one file alone


@pytest.mark.parametrize('name', [p.parent.name for p in sorted(ROOT.glob('data/*/prepare.py'))
                                  if p.parent.name != 'demo'])
def test_help_and_readme(name, capsys):
    with pytest.raises(SystemExit) as stop:
        module(name).main(['--help'])
    said = capsys.readouterr().out
    assert stop.value.code == 0 and '--annotations' in said and f'data/{name}/prepare.py' in said
    assert f'data/{name}/prepare.py' in (ROOT / 'data' / name / 'README.md').read_text()


def test_from_another_folder_in_one_line(tmp_path):
    run = subprocess.run([sys.executable, ROOT / 'data/msvd/prepare.py', '--annotations', 'x'],
                         cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 1 and 'prepare.py: --annotations x is neither' in run.stderr
    assert 'Traceback' not in run.stderr


# -----------------------------------------------------------------------------
# the real files

@real
@pytest.mark.parametrize('name, layout, split, n, n_captions', [
    ('msrvtt', 'clip4clip', 'test', 1000, 1000), ('msrvtt', 'vindlu', 'test', 1000, 1000),
    ('msrvtt', 'official', 'test', 200, 201), ('msvd', 'lists', 'test', 200, 8428),
    ('didemo', 'official', 'test', 200, 875), ('didemo', 'vindlu', 'test', 200, 875),
    ('activitynet', 'official', 'test', 200, 723), ('activitynet', 'vindlu', 'test', 200, 723),
    ('charades', 'official', 'test', 200, 200), ('charades', 'sta', 'test', 154, 400),
    ('lsmdc', 'official', 'val', 60, 60), ('lsmdc', 'official', 'test', 120, 120),
    ('lsmdc', 'vindlu', 'test', 120, 120), ('coco', 'karpathy', 'test', 6, 30),
    ('coco', 'karpathy', 'train', 2, 10), ('coco', 'karpathy', 'val', 1, 5),
    ('coco', 'blip', 'test', 6, 30), ('coco', 'precomp', 'test', 200, 1000),
    ('flickr30k', 'precomp', 'test', 200, 1000), ('cirr', 'official', 'val', 200, 200),
    ('fashioniq', 'official', 'val', 320, 640)])
def test_real_files(prepare, name, layout, split, n, n_captions):
    found = prepare(name, REAL / name, '--layout', layout)[split]
    assert len(found) == n and sum(len(i.captions) for i in found.values()) == n_captions
    assert all(c == c.strip() and '\n' not in c for i in found.values() for c in i.captions)


@real
def test_real_files_traps(prepare):
    both = {layout: prepare('msrvtt', REAL / 'msrvtt', '--layout', layout)['test']
            for layout in ('clip4clip', 'vindlu', 'official')}
    assert captions(both['clip4clip']) == captions(both['vindlu'])
    prepare('msrvtt', REAL / 'msrvtt')
    assert '1k-A 1,000 videos, 1,000 captions: the same' in prepare.said
    assert '995 distinct captions of 1,000: 5 repeat another one word for word, 4 texts' in \
        prepare.said
    rows = json.loads((REAL / 'msrvtt/MSRVTT_data.json').read_text())['sentences']
    two = next(i for i in both['official'].values() if len(i.captions) == 2)
    assert two.captions == [r['caption'].strip() for r in rows if r['video_id'] == two.id]
    for name in ('didemo', 'activitynet', 'lsmdc'):
        same = [captions(prepare(name, REAL / name, '--layout', layout)['test'])
                for layout in ('official', 'vindlu')]
        assert same[0] == same[1] and list(same[0]) == list(same[1]), name
    assert '0001_Made.Up_Movie_00.01.01.500-00.01.04.625' in same[0]
    assert any('"no"; then' in c[0] for c in same[0].values())
    first = prepare('activitynet', REAL / 'activitynet')['test']['v_uqiMw7tQ1Cc'].captions
    assert first[1].startswith('The coach helps')
    script = prepare('charades', REAL / 'charades')['test']['YSKX3'].captions
    assert script == ['A person fixes the bed then throws pillow on it.']
    found = prepare('vatex', REAL / 'vatex')
    assert sorted(len(i.captions) for s in ('val', 'test') for i in found[s].values()) == [10, 10]
    assert all(c.isascii() for s in ('val', 'test') for i in found[s].values() for c in i.captions)
    prepare('cirr', REAL / 'cirr')
    assert 'test1: no list of images; 50 queries have no target' in prepare.said
    prepare('coco', REAL / 'coco', '--layout', 'karpathy')
    assert '1 of restval' in prepare.said and 'of 1 images with more than 5' in prepare.said
