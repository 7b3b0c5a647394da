"""
vision_cache.py: with the cache on, off, full, half full, broken or on a full disk, training and
evaluation compute the same. CPU, about 15 s.

python -m pytest tests/test_cache_vision.py -v
"""
import builtins
import json
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import backbones
import data
import eval as evaluation
import train
import vision_cache
from conftest import make_family, make_qwen2vl, make_videochat_flash
from model_mars import MARS, MARSConfig
from model_slq import SLQ, SLQConfig
from test_train import (argv, assert_same_checkpoint, error_of, fork_server, launch, lines,  # noqa
                        run, train_here)

FAMILIES = ['qwen2_vl', 'qwen2_5_vl', 'qwen3_vl', 'internvl', 'video_llama_3', 'smolvlm',
            'videochat_flash']
close = torch.testing.assert_close


@pytest.fixture(scope='module', params=FAMILIES)
def family(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return make_videochat_flash(folder, layers=2) if request.param == 'videochat_flash' else \
        make_family(folder, request.param, layers=2)


@pytest.fixture(scope='module')
def lively(tmp_path_factory):
    """A Qwen2-VL whose embeddings differ from each other."""
    return make_family(tmp_path_factory.mktemp('lively'), 'qwen2_vl', layers=2)


def make(method, path, seed=0):
    torch.manual_seed(seed)
    backbone = backbones.load(path)
    if method == 'mars':
        return MARS(MARSConfig(lora_r=2, lora_alpha=4, num_frames=3), backbone)
    return SLQ(SLQConfig(num_queries=3, num_frames=3, content_chunk=2), backbone)


def videos(model, folder, cache='', frames=3, n=6):
    items = data.load_annotations(os.path.join(folder, 'test.jsonl'))[:n]
    found = data.Videos(items, os.path.join(folder, 'videos'), frames)
    found.clips.vision = vision_cache.attach(model, SimpleNamespace(cache_vision=str(cache)))
    return found


def encode(model, found):
    model.eval()
    return next(iter(evaluation.encode(model, 'video', found, range(len(found)), 4)[0].values()))


def forbid(monkeypatch, model):
    """From here on nothing is decoded and the tower does not run."""
    monkeypatch.setattr(data.Clips, 'decode', lambda clips, path: pytest.fail(f'decodes {path}'))
    monkeypatch.setattr(model.backbone, 'tower', lambda inputs: pytest.fail('the tower runs'))


# -----------------------------------------------------------------------------
# what comes out

@pytest.mark.parametrize('method', ['mars', 'slq'])
def test_full_half_full_and_no_cache_give_the_same(method, family, tiny_data, tmp_path,
                                                   monkeypatch):
    plain = encode(make(method, family), videos(make(method, family), tiny_data))
    model = make(method, family)
    first = encode(model, videos(model, tiny_data, tmp_path))
    close(first, plain, atol=2e-5, rtol=0)
    files = sorted(tmp_path.glob('*/*'))
    assert len(files) == 6 and all(f.suffix == '.safetensors' for f in files)
    for f in files[::2]:
        f.unlink()
    assert encode(model, videos(model, tiny_data, tmp_path)).equal(first)  # hits and misses mixed
    forbid(monkeypatch, model)
    assert encode(model, videos(model, tiny_data, tmp_path)).equal(first)
    assert (first[0] - first[1]).abs().max() > 1e-3


def test_a_row_does_not_depend_on_the_batch(tiny_qwen2vl, tiny_data, tmp_path):
    contents = []
    for batch in (1, 5):
        model = make('mars', tiny_qwen2vl)
        evaluation.encode(model, 'video', videos(model, tiny_data, tmp_path / str(batch)),
                          range(6), batch)
        contents.append({f.name: f.read_bytes() for f in tmp_path.glob(f'{batch}/*/*')})
    assert contents[0] == contents[1] and len(contents[0]) == 6


def losses_of(out):
    return [row['loss'] for row in lines(out) if 'loss' in row]


@pytest.mark.parametrize('changes', [{}, {'chunk_size': 4, 'gradient_checkpointing': True},
                                     {'model': 'slq', 'content_chunk': 4, 'chunk_size': 0}])
def test_training_takes_the_same_way_and_later_epochs_see_no_video(
        changes, lively, tiny_data, tmp_path, monkeypatch):
    how = dict(max_steps=0, learning_rate=1e-3, **changes)
    decoded = []
    keep = data.Clips.decode
    monkeypatch.setattr(data.Clips, 'decode',
                        lambda clips, path: decoded.append(path) or keep(clips, path))
    train_here(argv(tmp_path / 'off', tiny_data, lively, **how))
    assert len(decoded) == 2 * (24 + 8)  # two epochs and their validations
    decoded.clear()
    train_here(argv(tmp_path / 'on', tiny_data, lively, cache_vision=tmp_path / 'c', **how))
    assert len(decoded) == len(set(decoded)) == 24 + 8
    off, on = losses_of(tmp_path / 'off'), losses_of(tmp_path / 'on')
    assert len(on) == 8 and on == pytest.approx(off, abs=2e-5)
    assert max(on) - min(on) > 1e-3


def test_two_processes_share_a_cache_and_a_killed_run_ends_in_the_same_bits(
        tiny_qwen2vl, tiny_data, tmp_path):
    def args(name, cache, **changes):
        return argv(tmp_path / name, tiny_data, tiny_qwen2vl, cache_vision=tmp_path / cache,
                    lora_dropout=0, learning_rate=1e-3, **changes)

    assert launch(run, args('one', 'a'), output=tmp_path / 'o1') == [0]
    assert launch(run, args('two', 'b'), world=2, output=tmp_path / 'o2') == [0, 0]
    assert losses_of(tmp_path / 'two') == pytest.approx(losses_of(tmp_path / 'one'), abs=1e-5)
    names = [sorted(f.relative_to(tmp_path / c) for f in (tmp_path / c).glob('*/*')) for c in 'ab']
    assert names[0] == names[1] and len(names[0]) == 24 + 8
    # killed in step 2, with some of the videos in the cache
    assert launch(run, args('killed', 'k'), (2, [0], signal.SIGKILL),
                  output=tmp_path / 'o3') == [-signal.SIGKILL]
    assert 0 < len(list((tmp_path / 'k').glob('*/*'))) < 32
    assert launch(run, args('killed', 'k', resume=True), output=tmp_path / 'o4') == [0]
    assert_same_checkpoint(tmp_path / 'killed', tmp_path / 'one')


def test_bf16_rows_are_kept_in_bf16_and_give_the_same(tiny_qwen2vl, tiny_data, tmp_path):
    backbone = backbones.load(tiny_qwen2vl, dtype=torch.bfloat16)
    model = MARS(MARSConfig(lora_r=2, lora_alpha=4), backbone)
    plain = encode(model, videos(model, tiny_data))
    first = encode(model, videos(model, tiny_data, tmp_path))
    assert {model.backbone.cache.read(f.name).rows.dtype for f in tmp_path.glob('*/*')} == {
        torch.bfloat16}
    assert encode(model, videos(model, tiny_data, tmp_path)).equal(first)
    assert (first - plain).abs().max() < 0.02


def test_a_video_that_is_twice_in_a_batch(tiny_qwen2vl, tiny_data, tmp_path):
    model = make('mars', tiny_qwen2vl)
    found = videos(model, tiny_data, tmp_path)
    for _ in range(2):  # missing, then there
        batch = model.collate([found[0], found[1], found[0]])
        z = model.eval().encode_video(vision_cache.fill_batch(model, batch)['video'])['slots']
        assert z[0].equal(z[2]) and not z[0].equal(z[1])


# -----------------------------------------------------------------------------
# what is on disk

@pytest.mark.parametrize('damage', [
    lambda x: b'', lambda x: x[:5], lambda x: x[:len(x) // 2], lambda x: b'\0' * len(x),
    lambda x: x[:-3] + bytes([x[-3] ^ 1]) + x[-2:], lambda x: x[:20] + b'}' + x[21:],
    lambda x: b'\xff' * 8 + x[8:]])
def test_a_broken_file_is_made_again(damage, tiny_qwen2vl, tiny_data, tmp_path):
    model = make('mars', tiny_qwen2vl)
    want = encode(model, videos(model, tiny_data, tmp_path, n=2))
    file = min(tmp_path.glob('*/*'))
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert encode(model, videos(model, tiny_data, tmp_path, n=2)).equal(want)
    assert file.read_bytes() == whole


def test_another_video_frame_count_backbone_or_preprocessing_is_another_file(
        tiny_qwen2vl, tiny_data, tmp_path):
    folder = tmp_path / 'data'
    shutil.copytree(tiny_data, folder)
    cache, seen = tmp_path / 'cache', set()

    def new(path=tiny_qwen2vl, n=2, max_pixels=0, dtype=None, **how):
        """How many files are new."""
        model = MARS(MARSConfig(lora_r=2), backbones.load(path, max_pixels, dtype=dtype))
        items = data.load_annotations(folder / 'test.jsonl')[:2]
        found = data.Videos(items, folder / 'videos', n, **how)
        found.clips.vision = vision_cache.attach(model, SimpleNamespace(
            cache_vision=str(cache), max_pixels=max_pixels))
        encode(model, found)
        files = set(cache.glob('*/*'))
        more = len(files - seen)
        seen.update(files)
        return more

    assert new() == 2 and new() == 0
    assert new(n=3) == 2 and new(sampler='linspace') == 2 and new(size=24) == 2
    assert new(max_pixels=64) == 2 and new(dtype=torch.bfloat16) == 2
    clip = folder / 'videos' / 'test0.mp4'
    os.utime(clip, ns=(1, 1))
    assert new() == 1
    clip.write_bytes((folder / 'videos' / 'test1.mp4').read_bytes())
    os.utime(clip, ns=(1, 1))  # the same time, another size
    assert new() == 1
    assert new(make_qwen2vl(tmp_path / 'other', seed=1)) == 2
    shutil.copytree(tiny_qwen2vl, tmp_path / 'same')
    assert new(str(tmp_path / 'same')) == 0  # where the backbone lies is not what it is
    pre = tmp_path / 'same' / 'preprocessor_config.json'
    pre.write_text(json.dumps({**json.loads(pre.read_text()), 'image_mean': [0.1] * 3}))
    assert new(str(tmp_path / 'same')) == 2


def test_code_that_resizes_in_another_way_is_another_folder(tiny_qwen2vl, tmp_path, monkeypatch):
    def folder():
        return vision_cache.VisionCache(tmp_path, backbones.load(tiny_qwen2vl)).folder

    before = folder()
    assert folder() == before
    keep = backbones.resize
    monkeypatch.setattr(backbones, 'resize', lambda frames, h, w: keep(frames, h, w, 'bilinear'))
    assert folder() != before


def test_a_full_disk_is_one_warning_and_no_end(tiny_qwen2vl, tiny_data, tmp_path, monkeypatch,
                                               capsys):
    model = make('mars', tiny_qwen2vl)
    want = encode(model, videos(model, tiny_data))

    class Full:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.file.close()

        def write(self, content):
            self.file.write(content[:10])
            raise OSError(28, 'No space left on device')

    keep = builtins.open
    monkeypatch.setattr(builtins, 'open', lambda path, mode='r', **kw: Full(keep(path, mode, **kw))
                        if str(path).endswith('.tmp') else keep(path, mode, **kw))
    close(encode(model, videos(model, tiny_data, tmp_path)), want, atol=2e-5, rtol=0)
    said = capsys.readouterr().err
    assert said.count('warning') == 1 and 'No space left on device; the run goes on' in said
    assert list(tmp_path.glob('*/*')) == []


def test_what_a_kill_left_is_removed_and_what_others_write_is_not(tiny_qwen2vl, tmp_path):
    folder = Path(vision_cache.VisionCache(tmp_path, backbones.load(tiny_qwen2vl)).folder)
    for name in ('old', 'new'):
        (folder / f'{name}.safetensors.1.tmp').write_bytes(b'half')
    os.utime(folder / 'old.safetensors.1.tmp', (1, 1))
    vision_cache.VisionCache(tmp_path, backbones.load(tiny_qwen2vl))
    assert [f.name for f in folder.iterdir()] == ['new.safetensors.1.tmp']


def test_features_that_are_not_finite_are_not_kept(tiny_qwen2vl, tiny_data, tmp_path, monkeypatch):
    model = make('mars', tiny_qwen2vl)
    found = videos(model, tiny_data, tmp_path)
    keep = model.backbone.tower
    monkeypatch.setattr(model.backbone, 'tower', lambda inputs: keep(inputs) * np.nan)
    encode(model, found)
    assert list(tmp_path.glob('*/*')) == []


# -----------------------------------------------------------------------------
# where it is refused, and where plain frames go on as ever

def test_pha_net_and_a_file_are_refused_in_one_line(tiny_clip, tiny_qwen2vl, tiny_data, tmp_path):
    said = error_of(['--model=pha', f'--backbone={tiny_clip}', f'--data={tiny_data}',
                     f'--out_dir={tmp_path / "run"}', '--batch_size=4', '--device=cpu',
                     '--block_init=random',
                     f'--cache_vision={tmp_path / "c"}'])
    assert 'cache_vision: PHANet' in said and 'frame_cache' in said
    (tmp_path / 'file').write_text('')
    assert 'is a file; name a folder' in error_of(argv(
        tmp_path / 'run', tiny_data, tiny_qwen2vl, cache_vision=tmp_path / 'file'))


def test_plain_frames_and_unreadable_videos_are_as_ever(tiny_qwen2vl, tiny_data, tmp_path):
    folder = tmp_path / 'data'
    shutil.copytree(tiny_data, folder)
    (folder / 'videos' / 'test1.mp4').write_bytes(b'no video')
    model = make('mars', tiny_qwen2vl)
    items = data.load_annotations(folder / 'test.jsonl')[:3]
    found = data.Videos(items, folder / 'videos', 3, on_bad_video='skip')
    want, kept, _ = evaluation.encode(model.eval(), 'video', found, range(3), 4)
    found.clips.vision = vision_cache.attach(model, SimpleNamespace(cache_vision=str(tmp_path)))
    for _ in range(2):
        got, kept, _ = evaluation.encode(model, 'video', found, range(3), 4)
        assert kept == [0, 2]
        close(got['slots'], want['slots'], atol=2e-5, rtol=0)
    frames = data.read_frames(str(folder / 'videos' / 'test0.mp4'), 3)
    batch = model.collate([data.Sample('a', None, frames)])['video']
    assert 'cache' not in batch and 'pixel_values_videos' in batch
    close(model.encode_video(batch)['slots'], want['slots'][:1], atol=2e-5, rtol=0)


def test_evaluation_takes_it_from_the_run_or_the_command_line(tiny_qwen2vl, tiny_data, tmp_path,
                                                              monkeypatch):
    train_here(argv(tmp_path / 'run', tiny_data, tiny_qwen2vl, epochs=0, warmup_epochs=0))
    args = dict.fromkeys(('data', 'video_root', 'eval_batch_size', 'num_workers', 'frame_cache',
                          'on_bad_video', 'num_frames', 'text_prompt', 'video_prompt', 'paragraph',
                          'backbone'))
    args = SimpleNamespace(**args, ckpt=str(tmp_path / 'run'), which='best',
                           cache_vision=str(tmp_path / 'c'))
    cfg, step, other = evaluation.load_settings(args)
    assert not other  # it changes no result
    model = train.build_model(cfg, torch.device('cpu'))
    items = data.load_annotations(Path(tiny_data, 'test.jsonl'))
    first = evaluation.evaluate(model, items, cfg, 'test')
    forbid(monkeypatch, model)
    assert evaluation.evaluate(model, items, cfg, 'test') == first
