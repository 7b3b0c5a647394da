"""
Settings: where they come from, which wins, and that every mistake is one line naming key and type.

python -m pytest tests/test_configurator.py -v
"""
import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import configurator
from configurator import configure, one_line_errors, read_settings

ROOT = Path(__file__).parents[1]

SCRIPT = '''"""
Trains a toy.

    $ python script.py config/toy.py
"""
import ast
import os
out_dir = "out/run"         # the run's folder
model = "mars"              # which model
# pairs per step, over
# all processes
batch_size = 12 * 2
lr: float = 1               # peak rate,
                            # reached after warmup
clip: float | None = None   # gradient norm
# ---- logs ----
wandb = False
ckpt: str | None = None
rates = (1, 0.5)            # merge rates
layers: tuple[int, ...] | None = None
_own = 3
sep = os.sep
# end of settings
outside = 5
'''

MODEL = '''
import a_module_that_does_not_exist
from dataclasses import dataclass, field

@dataclass
class ToyConfig:
    num_slots: int = 4          # M
    batch_size: int = 320       # Table A2
    gamma: float = 50.0         # 1 / temperature
    hidden: int
    extra: list = field(default_factory=list)

    def method(self):
        inside = 1
'''

OTHER = "class OtherConfig:\n    num_queries: int = 8  # K\n    learned: bool = True\n"
MODELS = {"mars": ("model_toy.py", "ToyConfig"), "slq": ("model_other.py", "OtherConfig"),
          "pha": ("model_missing.py", "PHAConfig")}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text(SCRIPT)
    Path("model_toy.py").write_text(MODEL)
    Path("model_other.py").write_text(OTHER)
    Path("config").mkdir()
    return tmp_path


def run(line="", config=None, models=MODELS):
    if config is not None:
        Path("config/toy.py").write_text(config)
        line = "config/toy.py " + line
    return configure("script.py", line.split() if isinstance(line, str) else line, models)


def error(*args, **kw):
    with pytest.raises(SystemExit) as e:
        run(*args, **kw)
    message = e.value.code
    assert isinstance(message, str) and "\n" not in message, message
    return message


# -----------------------------------------------------------------------------
# reading the source

def test_settings_of_a_script_are_read_from_its_source(here):
    assert read_settings("script.py") == {
        "out_dir": (str, "out/run", "the run's folder"),
        "model": (str, "mars", "which model"),
        "batch_size": (int, 24, "pairs per step, over all processes"),
        "lr": (float, 1.0, "peak rate, reached after warmup"),
        "clip": (float | None, None, "gradient norm"),
        "wandb": (bool, False, ""),
        "ckpt": (str | None, None, ""),
        "rates": (tuple[float, ...], (1.0, 0.5), "merge rates"),
        "layers": (tuple[int, ...] | None, None, ""),
    }


def test_fields_of_a_dataclass_are_read_without_importing_its_file(here):
    assert read_settings("model_toy.py", "ToyConfig") == {
        "num_slots": (int, 4, "M"), "batch_size": (int, 320, "Table A2"),
        "gamma": (float, 50.0, "1 / temperature")}


def test_a_script_without_the_end_line_or_a_class_that_is_not_there_is_an_error(here):
    Path("bare.py").write_text("x = 1\n")
    with pytest.raises(SystemExit, match="bare.py.*# end of settings"):
        read_settings("bare.py")
    with pytest.raises(SystemExit, match="model_toy.py: there is no class MARSConfig"):
        read_settings("model_toy.py", "MARSConfig")
    Path("bare.py").write_text("a = 0\nx: int = 'one'\n# end of settings\n")
    with pytest.raises(SystemExit, match="bare.py, line 2: x is declared as int and set to 'one'"):
        read_settings("bare.py")


# -----------------------------------------------------------------------------
# which value wins

def test_precedence_is_script_dataclass_file_command_line(here):
    assert run(models=None).batch_size == 24
    assert run().batch_size == 320
    assert run(config="batch_size = 64").batch_size == 64
    assert run("--batch_size=8", config="batch_size = 64").batch_size == 8
    assert run("--batch_size=8 config/toy.py").batch_size == 8    # whatever the order
    Path("config/second.py").write_text("batch_size = 65")
    assert run("config/toy.py config/second.py").batch_size == 65
    assert run("--batch_size=8 --batch_size=9").batch_size == 9


def test_the_model_brings_its_fields(here):
    s = run("--model=slq")
    assert s.model == "slq" and s.num_queries == 8 and s.batch_size == 24
    assert not hasattr(s, "num_slots")
    assert run("--num_slots=2").num_slots == 2
    assert run(config="model = 'slq'\nnum_queries = 3").num_queries == 3
    assert run("--model mars --num_slots 3", config="model = 'slq'").num_slots == 3
    assert "unknown setting 'num_slots'" in error("--model=slq --num_slots=2")
    assert error("--model=marz") == "unknown model 'marz', did you mean 'mars'?"
    assert error("--model=x") == "unknown model 'x'; there are: mars, slq, pha"
    assert error("--model=pha") == "model 'pha' needs model_missing.py, which is not there"
    assert error(config="model = 5") == \
        "config/toy.py: model expects str (default 'mars'), got 5"


# -----------------------------------------------------------------------------
# values

@pytest.mark.parametrize("line, key, value", [
    ("--batch_size=8", "batch_size", 8), ("--batch_size 8", "batch_size", 8),
    ("--batch_size -8", "batch_size", -8), ("--batch_size=1_000", "batch_size", 1000),
    ("--lr=1", "lr", 1.0), ("--lr 1e-4", "lr", 1e-4), ("--lr -1e-4", "lr", -1e-4),
    ("--clip=1", "clip", 1.0), ("--clip None", "clip", None),
    ("--wandb", "wandb", True), ("--wandb=true", "wandb", True), ("--wandb True", "wandb", True),
    ("--wandb false", "wandb", False), ("--wandb=False", "wandb", False),
    ("--wandb --lr=3", "wandb", True), ("--wandb config/toy.py", "wandb", True),
    ("--out_dir=2026", "out_dir", "2026"), ("--out_dir 1e-4", "out_dir", "1e-4"),
    ("--out_dir=a=b", "out_dir", "a=b"), ("--out_dir=true", "out_dir", "true"),
    ("--out_dir=--x", "out_dir", "--x"), ("--out_dir=x.py", "out_dir", "x.py"),
    ("--out_dir='x'", "out_dir", "'x'"), ("--out_dir=", "out_dir", ""),
    ("--ckpt=x.pt", "ckpt", "x.pt"), ("--ckpt=7", "ckpt", "7"),
    ("--ckpt=None", "ckpt", None), ("--rates=(1,.25)", "rates", (1.0, 0.25)),
    ("--rates=[1,2]", "rates", (1.0, 2.0)), ("--rates 1,2", "rates", (1.0, 2.0)),
    ("--layers=(3,4)", "layers", (3, 4)), ("--layers=None", "layers", None),
])
def test_a_value_on_the_command_line(here, line, key, value):
    Path("config/toy.py").write_text("")
    got = getattr(run(line), key)
    assert got == value and type(got) is type(value)
    if isinstance(value, tuple):
        assert [type(v) for v in got] == [type(v) for v in value]


def test_values_with_blanks_stay_one_argument(here):
    assert run(["--out_dir", "two words", "--ckpt="]).out_dir == "two words"
    assert run(["--out_dir", ""]).out_dir == ""


def test_a_config_file_is_python(here):
    s = run(config="import os\nfrom math import sqrt\n_n = 3\nbatch_size = 64 * _n // 2\n"
                   "lr = 2\nclip = sqrt(4)\nlayers = [1, 2]\nckpt = None\n")
    assert (s.batch_size, s.lr, s.clip, s.layers, s.ckpt) == (96, 2.0, 2.0, (1, 2), None)
    assert type(s.lr) is float and not hasattr(s, "_n")
    assert run(config="import numpy as np\nlr = np.float64(3) / 2").lr == 1.5


# -----------------------------------------------------------------------------
# mistakes: one line, with the place, the key and the expected type

@pytest.mark.parametrize("line, message", [
    ("--batch_sise=8", "command line: unknown setting 'batch_sise', did you mean 'batch_size'?"),
    ("--batch-size=8", "command line: unknown setting 'batch-size', did you mean 'batch_size'?"),
    ("--zzz=8", "command line: unknown setting 'zzz'; --help lists the settings"),
    ("--outside=8", "command line: unknown setting 'outside'; --help lists the settings"),
    ("--_own=8", "command line: unknown setting '_own'; --help lists the settings"),
    ("--batch_size=1.5", "command line: batch_size expects int (default 320), got '1.5'"),
    ("--batch_size=True", "command line: batch_size expects int (default 320), got 'True'"),
    ("--batch_size=", "command line: batch_size expects int (default 320), got ''"),
    ("--batch_size=None", "command line: batch_size expects int (default 320), got 'None'"),
    ("--lr=fast", "command line: lr expects float (default 1.0), got 'fast'"),
    ("--clip=x", "command line: clip expects float or None (default None), got 'x'"),
    ("--wandb=1", "command line: wandb expects bool (true or false), got '1'"),
    ("--wandb maybe", "command line: wandb expects bool (true or false), got 'maybe'"),
    ("--rates=1", "command line: rates expects tuple of float (default (1.0, 0.5)), got '1'"),
    ("--layers=(1,2.5)",
     "command line: layers expects tuple of int or None (default None), got '(1,2.5)'"),
    ("--out_dir=None", "command line: out_dir expects str (default 'out/run'), got 'None'"),
    ("--lr", "command line: --lr needs a value, as in --lr=1.0"),
    ("--lr --wandb", "command line: --lr needs a value, as in --lr=1.0"),
    ("--out_dir config/toy.py", "command line: --out_dir needs a value, as in --out_dir='out/run'"),
    ("-lr=3", "cannot read the argument '-lr=3': settings are --key=value, config files end in "
              ".py"),
    ("lr=3", "cannot read the argument 'lr=3': settings are --key=value, config files end in .py"),
    ("toy", "cannot read the argument 'toy': settings are --key=value, config files end in .py, "
            "did you mean config/toy.py?"),
    ("config/tpy.py", "config/tpy.py: no such config file, did you mean config/toy.py?"),
    ("config/zzzzzz.py", "config/zzzzzz.py: no such config file; there are: config/toy.py"),
])
def test_a_mistake_on_the_command_line(here, line, message):
    Path("config/toy.py").write_text("")
    assert error(line) == message


@pytest.mark.parametrize("text, message", [
    ("lr_ = 1\nlearn = 5", "config/toy.py: unknown setting 'lr_', did you mean 'lr'?"),
    ("zzz = 5", "config/toy.py: unknown setting 'zzz'; a name of the config file's own starts "
                "with _"),
    ("batch_size = '64'", "config/toy.py: batch_size expects int (default 320), got '64'"),
    ("batch_size = 64 / 2", "config/toy.py: batch_size expects int (default 320), got 32.0"),
    ("batch_size = True", "config/toy.py: batch_size expects int (default 320), got True"),
    ("lr = True", "config/toy.py: lr expects float (default 1.0), got True"),
    ("lr = '1e-4'", "config/toy.py: lr expects float (default 1.0), got '1e-4'"),
    ("lr = None", "config/toy.py: lr expects float (default 1.0), got None"),
    ("wandb = 1", "config/toy.py: wandb expects bool (true or false), got 1"),
    ("rates = ('a',)", "config/toy.py: rates expects tuple of float (default (1.0, 0.5)), "
                       "got ('a',)"),
    ("lr = 1\nx = (\n", "config/toy.py, line 2: SyntaxError: '(' was never closed"),
    ("lr = 1\n\nlr = nope", "config/toy.py, line 3: NameError: name 'nope' is not defined"),
    ("import json\njson.loads('{')", "config/toy.py, line 2: JSONDecodeError: Expecting property "
     "name enclosed in double quotes: line 1 column 2 (char 1)"),
    ("lr = 1\nraise ValueError('two\\nlines')", "config/toy.py, line 2: ValueError: two"),
])
def test_a_mistake_in_a_config_file(here, text, message):
    assert error(config=text) == message


def test_a_command_line_value_does_not_hide_a_mistake_in_the_file(here):
    assert "config/toy.py: batch_size expects int" in error("--batch_size=8",
                                                            config="batch_size = '64'")


# -----------------------------------------------------------------------------
# the end of a script that can't go on

def raiser(error):
    def run():
        raise error
    return run


def test_ctrl_c_ends_in_one_line_of_the_first_rank_and_130(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["some/script.py"])
    monkeypatch.setattr(configurator.signal, "signal", lambda *args: None)  # pytest needs its own
    for rank, says in (("0", "script.py: interrupted\n"), ("1", "")):
        monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(SystemExit) as e:
            one_line_errors(raiser(KeyboardInterrupt()))
        assert e.value.code == 130 and capsys.readouterr().err == says


@pytest.mark.parametrize("error, says", [
    (ValueError("two\nlines"), "script.py: two lines  (NANOTVR_TRACEBACK=1 shows where)"),
    (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "),
     "script.py: DataLoader worker (pid 7) is killed by signal: Killed: often the machine's memory "
     "is full; lower num_workers, batch_size or frame_size"),
    (OSError(2, "not there"), "script.py: [Errno 2] not there  (NANOTVR_TRACEBACK=1 shows where)"),
    (SystemExit("command line: no"), "command line: no")])
def test_other_ranks_let_the_first_speak_and_keep_what_they_have_to_say(monkeypatch, error, says):
    slept = []
    monkeypatch.setattr(configurator.time, "sleep", slept.append)
    monkeypatch.setattr(sys, "argv", ["some/script.py"])
    for rank in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(SystemExit) as e:
            one_line_errors(raiser(error))
        assert e.value.code == says and len(slept) == int(rank)
    with pytest.raises(RuntimeError, match="a bug"):
        one_line_errors(raiser(RuntimeError("a bug")))
    with pytest.raises(SystemExit):
        one_line_errors(raiser(SystemExit(0)))  # --help is no error
    assert len(slept) == 1 and one_line_errors(lambda: 7) == 7


# -----------------------------------------------------------------------------
# --help

def test_help_lists_every_setting_with_type_default_and_comment(here, capsys):
    with pytest.raises(SystemExit) as e:
        run("--lr=3 --help")
    out = capsys.readouterr().out
    assert e.value.code == 0 and out.startswith("Trains a toy.")
    line = {name: next(x for x in out.splitlines() if f"--{name} " in x)
            for name in [*read_settings("script.py"), "num_slots", "gamma"]}
    assert line["clip"].split("  ") [1:3] == ["--clip = None", "(float or None)"]
    assert line["clip"].endswith("  gradient norm")
    assert line["num_slots"].split() == ["--num_slots", "=", "4", "(int)", "M"]
    assert out.count("--batch_size") == 1 and "--batch_size = 320" in out
    assert out.index("--rates") < out.index("settings of the model mars") < out.index("--gamma")
    with pytest.raises(SystemExit):
        run("--model=slq -h")
    assert "--num_queries = 8" in capsys.readouterr().out


@pytest.mark.parametrize("script", ["train.py", "eval.py", "eval_tasks.py"])
def test_the_scripts_answer_help_without_importing_torch(script):
    env = {**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}
    r = subprocess.run([sys.executable, str(ROOT / script), "--help"], capture_output=True,
                       text=True, env=env)
    assert r.returncode == 0 and "--num_workers" in r.stdout, r.stderr[-2000:]
    imported = {line.split("|")[-1].strip() for line in r.stderr.splitlines() if "|" in line}
    assert "configurator" in imported and not {"torch", "numpy"} & imported


def test_every_config_file_of_the_repository_is_read():
    tree = ast.parse((ROOT / "train.py").read_text())
    models = next(ast.literal_eval(n.value) for n in tree.body
                  if isinstance(n, ast.Assign) and n.targets[0].id == "MODELS")
    models = {name: where[:2] for name, where in models.items()}
    for config in sorted((ROOT / "config").glob("*.py")):
        got = vars(configure(str(ROOT / "train.py"), [str(config)], models))
        names = {"__file__": str(config)}
        exec(config.read_text(), names)
        for name, value in names.items():
            assert name.startswith("_") or isinstance(value, type(ast)) or got[name] == value
