"""
Settings with checked keys and types: script < model's dataclass < config files < command line.

    $ python train.py config/mars_didemo.py --batch_size=8 --learning_rate 1e-4 --wandb

After nanoGPT's configurator: a config file is Python, one plain assignment per setting (names that
start with _ are its own). Unlike there, an unknown key or a value of the wrong type is an error in
a file too, an int is fine for a float, and files come before the command line in whatever order
they are typed. A script's settings are the assignments above its line `# end of settings`; they are
read from the source, nothing is imported, so --help answers at once.
"""
import ast
import io
import os
import signal
import sys
import textwrap
import time
import tokenize
import typing
from difflib import get_close_matches
from glob import glob
from types import ModuleType, NoneType, SimpleNamespace

KINDS = {t.__name__: t for t in (bool, int, float, str, tuple, list, dict)}


# -----------------------------------------------------------------------------
# types: `int`, `int | None`, `tuple[float, ...]`

def members(want):
    """The alternatives of a union, or the type itself."""
    return typing.get_args(want) if typing.get_origin(want) not in (None, tuple, list, dict) \
        else (want,)


def inner(want):
    """The element type of a tuple or list, None when it is not stated or mixed."""
    args = {a for a in typing.get_args(want) if a is not Ellipsis}
    return args.pop() if len(args) == 1 else None


def type_name(want):
    names = []
    for t in members(want):
        kind = typing.get_origin(t) or t
        names.append("None" if kind is NoneType else kind.__name__ +
                     (f" of {type_name(inner(t))}" if kind in (tuple, list) and inner(t) else ""))
    return " or ".join(names)


def type_of(value):
    if type(value) in (tuple, list) and value:
        kinds = {type(v) for v in value}
        kinds = {float} if kinds == {int, float} else kinds
        if len(kinds) == 1:
            t = kinds.pop()
            return tuple[t, ...] if type(value) is tuple else list[t]
    return type(value)


def convert(value, want):
    """`value` as a `want`: an int may stand for a float, a list for a tuple; else ValueError."""
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        value = value.item()                    # arithmetic with numpy in a config file
    for t in members(want):
        kind = typing.get_origin(t) or t
        if kind in (tuple, list) and type(value) in (tuple, list):
            return kind(convert(v, inner(t)) if inner(t) else v for v in value)
        if type(value) is kind:                 # not isinstance: True is no int
            return value
    if float in members(want) and type(value) is int:
        return float(value)
    raise ValueError


def parse(text, want):
    """A value from the command line. Strings stay as typed: --run=2026 is a name."""
    if text == "None":
        return convert(None, want)
    if {*members(want)} <= {str, NoneType}:
        return text
    try:
        literal = {"true": "True", "false": "False"}.get(text, text).strip()
        return convert(ast.literal_eval(literal), want)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return convert(text, want)              # fine for `int | str`, else a ValueError


# -----------------------------------------------------------------------------
# reading the settings of a script or a dataclass

def literal(node):
    """The value of a literal or of arithmetic on literals (12 * 1024); else ValueError."""
    names = (ast.Name, ast.Call, ast.Attribute, ast.Lambda)
    if node is None or any(isinstance(n, names) for n in ast.walk(node)):
        raise ValueError
    return eval(ast.unparse(node), {"__builtins__": {}})


def annotation(node, default):
    try:
        names = {**KINDS, "Optional": typing.Optional, "Union": typing.Union, "__builtins__": {}}
        return eval(ast.unparse(node), names) if node else type_of(default)
    except Exception:                           # a type we do not know: the default's own
        return type_of(default)


def comment(node, comments):
    """The comment behind an assignment (and its indented further lines), else the lines above."""
    found = [comments[n][2] for n in range(node.lineno, node.end_lineno + 1) if n in comments]
    behind = bool(found)
    n, step = (node.end_lineno + 1, 1) if behind else (node.lineno - 1, -1)
    while n in comments:
        column, alone, text = comments[n]
        if not alone or (column > node.col_offset) != behind:
            break
        found = found + [text] if step == 1 else [text] + found
        n += step
    return " ".join(text for text in found if "---" not in text).strip()


def read_settings(path, cls=None):
    """Settings of a script, or the fields of its dataclass `cls`: name -> (type, default, comment).

    Nothing is imported. In a script they stand above `# end of settings`; what is no literal, has
    no default (a dataclass), or starts with _ is not a setting."""
    with open(path, encoding="utf-8") as f:
        source = f.read()
    lines, comments = source.splitlines(), {}   # line number -> (column, alone on it, text)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            alone = not lines[row - 1][:column].strip()
            comments[row] = (column, alone, token.string.lstrip("#").strip())
    body = ast.parse(source, path).body
    if cls:
        body = [n.body for n in body if isinstance(n, ast.ClassDef) and n.name == cls]
        if not body:
            raise SystemExit(f"{path}: there is no class {cls} in this file")
        body = [n for n in body[0] if isinstance(n, ast.AnnAssign)]
    else:
        end = [n for n, (_, alone, text) in comments.items() if alone and text == "end of settings"]
        if not end:
            raise SystemExit(f"{path}: a script's settings end with the line '# end of settings'")
        body = [n for n in body if n.lineno < end[0]]

    settings = {}
    for node in body:
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        name = getattr(targets[0], "id", "_")
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or name.startswith("_"):
            continue
        try:
            default = literal(node.value)
        except ValueError:
            continue
        want = annotation(getattr(node, "annotation", None), default)
        try:
            settings[name] = (want, convert(default, want), comment(node, comments))
        except ValueError:
            raise SystemExit(f"{path}, line {node.lineno}: {name} is declared as "
                             f"{type_name(want)} and set to {default!r}") from None
    return settings


# -----------------------------------------------------------------------------
# config files and the command line

def run_config(path, script):
    """Run a config file; its names -> values."""
    if not os.path.isfile(path):
        raise SystemExit(f"{path}: no such config file" + nearest_config(path, script))
    names = {"__file__": path, "__name__": "config"}
    try:
        with open(path, encoding="utf-8-sig") as f:
            exec(compile(f.read(), path, "exec"), names)
    except Exception as e:
        line, tb = getattr(e, "lineno", None), e.__traceback__
        while tb:                               # the last line of the file itself, not of a library
            line = tb.tb_lineno if tb.tb_frame.f_code.co_filename == path else line
            tb = tb.tb_next
        what = e.msg if isinstance(e, SyntaxError) else (str(e).splitlines() or [""])[0]
        raise SystemExit(f"{path}{f', line {line}' if line else ''}: {type(e).__name__}: {what}") \
            from None
    return {k: v for k, v in names.items()
            if not (k.startswith("_") or isinstance(v, ModuleType) or callable(v))}


def nearest_config(path, script):
    """', did you mean config/x.py?' for a path that is no config file."""
    folders = [os.path.join(os.path.dirname(script), "config"), os.path.dirname(path)]
    stems = {os.path.basename(f): os.path.relpath(f)
             for folder in folders if folder for f in sorted(glob(os.path.join(folder, "*.py")))}
    name = os.path.basename(path).removesuffix(".py") + ".py"
    near = [stems[n] for n in get_close_matches(name, stems, n=3, cutoff=0.5)]
    if near:
        return f", did you mean {' or '.join(near)}?"
    return f"; there are: {', '.join(stems.values())}" if stems else ""


def split_arguments(argv, script):
    """argv -> (config files, [(key, text or None)], whether help is asked for)."""
    files, pairs, wants_help, rest = [], [], False, list(argv)
    while rest:
        arg = rest.pop(0)
        if arg in ("-h", "--help"):
            wants_help = True
        elif arg.startswith("--"):
            key, equals, text = arg[2:].partition("=")
            # a value may start with one dash (-0.5); what starts with two or ends in .py stands
            # for itself, unless it is attached with =
            if not equals:
                free = rest and not (rest[0].startswith("--") or rest[0].endswith(".py"))
                text = rest.pop(0) if free else None
            pairs.append((key, text))
        elif arg.endswith(".py"):
            files.append(arg)
        else:
            near = "" if arg.startswith("-") else nearest_config(arg, script)
            raise SystemExit(f"cannot read the argument '{arg}': settings are --key=value, config "
                             "files end in .py" + (near if near.startswith(", did") else ""))
    return files, pairs, wants_help


def check(where, key, value, settings, typed):
    """The value of one assignment, or SystemExit naming the place, the key and what it expects."""
    if key not in settings:
        near = get_close_matches(key.replace("-", "_"), settings, n=1)
        hint = f", did you mean '{near[0]}'?" if near else "; --help lists the settings" if typed \
            else "; a name of the config file's own starts with _"
        raise SystemExit(f"{where}: unknown setting '{key}'{hint}")
    want, default, _ = settings[key]
    if typed and value is None:
        if bool in members(want):
            return True
        raise SystemExit(f"{where}: --{key} needs a value, as in --{key}={default!r}")
    try:
        return parse(value, want) if typed else convert(value, want)
    except ValueError:
        like = f" (default {default!r})" if want is not bool else " (true or false)"
        raise SystemExit(f"{where}: {key} expects {type_name(want)}{like}, "
                         f"got {value!r}") from None


def print_help(script, groups):
    with open(script, encoding="utf-8") as f:
        print((ast.get_docstring(ast.parse(f.read())) or script) + "\n")
    for title, settings in groups:
        print(f"{title}:")
        for name, (want, default, text) in settings.items():
            head = f"  --{name} = {default!r}  ({type_name(want)})"
            print(textwrap.fill(f"{head:<44}  {text}".rstrip(), 100, subsequent_indent=" " * 46,
                                break_long_words=False, break_on_hyphens=False))
        print()


def configure(path, argv=None, models=None):
    """A namespace with every setting of the script at `path`, see the top of this file.

    models: {name: (file, dataclass)}; the setting `model` picks one and adds its fields."""
    settings = read_settings(path)
    files, pairs, wants_help = split_arguments(sys.argv[1:] if argv is None else argv, path)
    given = [(f, k, v, False) for f in files for k, v in run_config(f, path).items()]
    given += [("command line", k, text, True) for k, text in pairs]
    groups = [("settings", settings)]
    if models:
        name = settings["model"][1]
        for where, key, value, typed in given:
            if key == "model":
                name = check(where, key, value, settings, typed)
        if name not in models:
            near = get_close_matches(name, models, n=1)
            raise SystemExit(f"unknown model '{name}'" + (f", did you mean '{near[0]}'?" if near
                             else f"; there are: {', '.join(models)}"))
        file, cls = models[name]
        file = os.path.join(os.path.dirname(path), file)
        if not os.path.isfile(file):
            raise SystemExit(f"model '{name}' needs {file}, which is not there")
        fields = read_settings(file, cls)
        groups = [("settings", {k: v for k, v in settings.items() if k not in fields}),
                  (f"settings of the model {name} ({os.path.basename(file)})", fields)]
        settings = {**settings, **fields}
    if wants_help:
        print_help(path, groups)
        raise SystemExit(0)
    values = {k: default for k, (_, default, _) in settings.items()}
    values.update({k: check(where, k, v, settings, typed) for where, k, v, typed in given})
    return SimpleNamespace(**values)


def check_output(key, path):
    """ValueError when a file can't be written at `path` (empty: none is): better now than after the
    work."""
    if not path:
        return
    folder = os.path.dirname(os.path.abspath(path))
    while not os.path.lexists(folder):              # what isn't there is made
        folder = os.path.dirname(folder)
    if os.path.isdir(path):
        raise ValueError(f"{key} '{path}' is a folder; name a file, as in "
                         f"{os.path.join(path, key + '.json')}")
    if not (os.path.isdir(folder) and os.access(folder, os.W_OK)):
        raise ValueError(f"{key} '{path}' can't be written, {folder} is no folder one may write to")


# -----------------------------------------------------------------------------
# the end of a script that can't go on: one line

def one_line_errors(run):
    """run(). An error that says what, where and what to do needs no traceback; others keep theirs.
    Nor does Ctrl-C, whose exit code is 130."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return run()
    except SystemExit as e:
        if e.code:
            first_speaks()
        raise
    except (ValueError, OSError, FloatingPointError) as e:
        if os.environ.get("NANOTVR_TRACEBACK"):
            raise
        text = str(e).strip().splitlines() or [type(e).__name__]
        # a loader's worker hands its error over as a formatted traceback: the last line says it
        text = text[-1] if text[0].startswith("Caught") else " ".join(text)
        first_speaks()
        sys.exit(f"{os.path.basename(sys.argv[0])}: {text}  (NANOTVR_TRACEBACK=1 shows where)")
    except RuntimeError as e:
        if not str(e).startswith("DataLoader worker (pid") or os.environ.get("NANOTVR_TRACEBACK"):
            raise
        first_speaks()
        sys.exit(f"{os.path.basename(sys.argv[0])}: {str(e).strip().rstrip('.').splitlines()[0]}: "
                 "often the machine's memory is full; lower num_workers, batch_size or frame_size")
    except KeyboardInterrupt:
        interrupted(sys.exit)


def at_once(check):
    """one_line_errors(check), for what needs no torch. In the imports that follow, up to the next
    one_line_errors, Ctrl-C leaves on the spot: an import may print its traceback or swallow it."""
    result = one_line_errors(check)
    signal.signal(signal.SIGINT, lambda *_: interrupted(os._exit))
    return result


def interrupted(leave):
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # torchrun sends another one: no word on that
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"{os.path.basename(sys.argv[0])}: interrupted", file=sys.stderr, flush=True)
    leave(130)


def first_speaks():
    """Most errors are all ranks' alike. The first rank of a machine prints its own and ends, and
    torchrun then ends the others; what one of those alone has met, it says after this pause."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(5)
