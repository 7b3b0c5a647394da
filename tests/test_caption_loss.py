"""
The caption loss against transformers' own and a loop over tokens; what a run's tuning does to it.

python -m pytest tests/test_caption_loss.py -v
"""
import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import backbones
import caption_loss as C
import train
from checkpoint import trainable_state
from configurator import configure
from conftest import ROOT, make_family
from data import Item, Videos, load_annotations


def settings(**given):
    args = configure(os.path.join(ROOT, "caption_loss.py"), [])
    return type(args)(**{**vars(args), "device": "cpu", **given})


def make_run(folder, data, backbone, *argv, shake=0.1):
    """A run folder as train.py leaves it, with trained tensors that are not at their start."""
    cfg = configure(str(ROOT / "train.py"), [
        "--model=slq", f"--backbone={backbone}", f"--data={data}", "--num_frames=4",
        "--num_workers=0", "--eval_batch_size=4", "--device=cpu", *argv], train.SETTINGS)
    model = train.build_model(cfg, torch.device("cpu"))
    state = {k: v + shake * torch.randn_like(v) for k, v in trainable_state(model).items()}
    folder.mkdir()
    save_file({k: v.contiguous() for k, v in state.items()}, str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps({"settings": vars(cfg)}))
    return str(folder)


def test_it_is_the_loss_of_transformers_and_of_a_loop(tiny_qwen2vl):
    backbone = backbones.load(tiny_qwen2vl)
    frames = [torch.randint(256, (t, 16, 16, 3), dtype=torch.uint8).numpy() for t in (2, 4, 2)]
    said = ["a red square", "two circles grow and then a square moves", "up"]
    inputs = backbone.collate("<video>\nDescribe.", frames=frames, answers=said)
    nll, right = C.caption_loss(backbone, inputs)
    n = [len(backbone.plain_ids(text)) + 1 for text in said]          # and <|im_end|>
    assert len(nll) == len(right) == sum(n)
    known = {k: v for k, v in inputs.items() if k not in ("append_pos", "cut")}
    with torch.no_grad():
        out = backbone.model(**known)
    torch.testing.assert_close(nll.mean(), out.loss)
    want, first = [], []
    for i in range(3):
        end = int(inputs["attention_mask"][i].sum())
        for at in range(end - n[i], end):                             # predicted one token before
            p = out.logits[i, at - 1].softmax(-1)
            want.append(-p[inputs["input_ids"][i, at]].log())
            first.append(int(p.argmax()) == int(inputs["input_ids"][i, at]))
    torch.testing.assert_close(nll, torch.stack(want))
    assert right.tolist() == first


def test_the_prompt_tells_the_videos_own_times(tiny_data, tmp_path):
    backbone = backbones.load(make_family(tmp_path, "video_llama_3"))
    items = load_annotations(os.path.join(tiny_data, "test.jsonl"))[:2]
    videos = Videos(items, os.path.join(tiny_data, "videos"), 2)
    inputs = C.Asked(backbone, "<video>\nDescribe.", items)(list(videos))
    for text in backbone.tokenizer.batch_decode(inputs["input_ids"]):
        assert re.findall(r"Time [\d.]+s:", text) == ["Time 0.2s:", "Time 0.8s:"]  # .25, .75


def test_queries_cost_nothing_and_what_changes_weights_is_seen(tiny_qwen2vl, tiny_data, tmp_path,
                                                               capsys):
    runs = {"slq": []} | {t: [f"--tuning={t}", "--extraction=last"] for t in ("prompt", "lora",
                                                                              "full")}
    folders = [make_run(tmp_path / k, tiny_data, tiny_qwen2vl, *v) for k, v in runs.items()]
    folders.append(make_run(tmp_path / "mars", tiny_data, tiny_qwen2vl, "--model=mars"))
    C.main(settings(ckpt=",".join(folders)))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    start = next(i for i, line in enumerate(lines) if line[0] == "untouched")
    bare, rows = lines[start], {line[0]: line[1:] for line in lines[start + 1:]}
    assert list(rows) == [*runs, "mars"] and "10 answers (captions)" in " ".join(lines[start - 2])
    for name in ("slq", "prompt"):
        assert rows[name] == [bare[2], "the", "same", "bits", bare[3]]
    for name in ("lora", "full", "mars"):
        assert rows[name][0] != bare[2] and rows[name][1][0] in "+-"
    saved = json.loads((tmp_path / "lora/caption_loss.json").read_text())
    (result,) = saved.values()
    assert f"{result['nats per token']:.4f}" == rows["lora"][0] and result["captions"] == 10


def test_what_is_wrong_with_the_last_run_is_told_before_the_first_is_measured(
        tiny_qwen2vl, tiny_data, tmp_path, monkeypatch):
    monkeypatch.setattr(C, "measure", lambda *_: pytest.fail("too late"))
    good, other = (make_run(tmp_path / name, tiny_data, tiny_qwen2vl) for name in "ab")
    weights, results = tmp_path / "b/model.safetensors", tmp_path / "b/caption_loss.json"
    results.write_text("{")
    with pytest.raises(ValueError, match="b/caption_loss.json is no JSON file"):
        C.main(settings(ckpt=f"{good},{other}"))
    results.unlink()
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match="can't read .*b/model.safetensors"):
        C.main(settings(ckpt=f"{good},{other}"))
    with pytest.raises(FileNotFoundError, match="'nowhere' is no run folder"):
        C.main(settings(ckpt=f"{good},nowhere"))


def test_plain_answers_are_the_demos(tiny_qwen2vl, tiny_data, tmp_path):
    row = dict(id="a", video="test0.mp4", captions=["x"], events=[
        ["small", "red", "circle", "left"], ["large", "blue", "square", "up"]])
    (tmp_path / "test.jsonl").write_text(json.dumps(row))
    cfg = configure(str(ROOT / "train.py"), [f"--data={tmp_path}"], train.SETTINGS)
    assert C.annotated(cfg, settings(answers="plain")) == [Item("a", "test0.mp4", [
        "a small red circle moves left, then a large blue square moves up"])]
    run = make_run(tmp_path / "run", tiny_data, tiny_qwen2vl)
    with pytest.raises(ValueError, match="answers=plain is for the demo: lines of .*test.jsonl"):
        C.main(settings(ckpt=run, answers="plain"))


@pytest.mark.parametrize("given, says", [
    (dict(answers="all"), "answers must be captions or plain"),
    (dict(prompt="Describe."), "prompt must hold <video> once"),
    (dict(ckpt="nowhere"), "'nowhere' is no run folder")])
def test_errors_are_one_line(given, says, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["caption_loss.py"])
    with pytest.raises(SystemExit) as stop:
        train.one_line_errors(lambda: C.main(settings(**given)))
    assert says in stop.value.code and "\n" not in stop.value.code


def test_a_clip_has_no_captions_to_lose(tiny_data, tmp_path):
    clip = str(Path(ROOT, "data/demo/backbones/tiny-clip"))
    run = make_run(tmp_path / "pha", tiny_data, clip, "--model=pha", shake=0)
    with pytest.raises(ValueError, match="is no language model"):
        C.main(settings(ckpt=run))
