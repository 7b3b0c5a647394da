"""
What every data/<name>/prepare.py shares: options, finding the layout, reading annotation files.

    files in some layout --find_layout--> {role: path} --read_csv, read_rows, ...--> (where, row)
      --Split.add--> {id: {"id", "video", "captions"}} --report.finish--> {train,val,test}.jsonl

All is read as text: an id 007 stays 007. A caption loses blanks at its ends and its line breaks,
nothing else. What cannot be read right stops with one line: file, line, what was found there.
"""
import argparse
import csv
import fnmatch
import io
import json
import os
import re
import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # the repo's root, wherever one is
from data import visible

SPLITS = ("train", "val", "test")
VIDEO_ENDS = re.compile(r"\.(mp4|webm|mkv|avi|mov|m4v|mpe?g|3gpp?|flv|wmv|ogv|ogg|mod|mts|ts|gif|"
                        r"jpe?g|png|webp|bmp)$", re.IGNORECASE)


# --------------------------------------------------------------------------------------------------
# the command line

def arguments(doc, here, argv=None, unit="videos", limits=(), **more):
    """
    argparse's result; unit is what a line stands for. more: further options, name=(default, help)
    or name=(default, help, choices).
    """
    files = "videos" if unit == "videos" else "images"
    parser = argparse.ArgumentParser(description=doc,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--annotations", default=str(here), metavar="DIR",
                        help="folder of the annotation files (looked for two folders deep)")
    there = os.path.join(here, files)  # videos: where train.py looks if video_root is not set
    parser.add_argument("--videos", default=there if os.path.isdir(there) else "", metavar="DIR",
                        help=f"folder of the {files}, to find each one's file; train.py's "
                             f"--video_root is then the same folder; default: {files}/ beside this "
                             "file, if there")
    parser.add_argument("--out", default=str(here), metavar="DIR", help="where to write")
    parser.add_argument("--layout", default="", help="take this layout if there are several")
    parser.add_argument("--val", type=int, default=None, metavar="N",
                        help="training videos held out where there is no validation split; 0: none")
    parser.add_argument("--seed", type=int, default=1337, help="chooses them")
    parser.add_argument("--empty", choices=("error", "drop"), default="error",
                        help="a caption without a letter or digit: stop, or leave it out")
    parser.add_argument("--limits", type=int, nargs="*", default=list(limits), metavar="TOKENS",
                        help="context limits: how many texts are longer is reported")
    parser.add_argument("--tokenizer", default="", metavar="NAME",
                        help="a Hugging Face tokenizer to count real tokens with, not words")
    for name, (default, about, *choices) in more.items():
        parser.add_argument(f"--{name}", default=default, help=about,
                            choices=choices[0] if choices else None)
    args = parser.parse_args(argv)
    args.unit = unit
    if args.val is not None and args.val < 0:
        parser.error(f"--val is {args.val}, the least is 0")
    if args.videos and not os.path.isdir(args.videos):
        parser.error(f"--videos {args.videos} is no folder")
    return args


def one_line_errors(main):
    try:
        main()
    except (ValueError, OSError) as e:
        sys.exit(f"{os.path.relpath(sys.argv[0])}: {e}")


# --------------------------------------------------------------------------------------------------
# which files there are

def find_layout(args, what, layouts):
    """
    layouts: {name: {role: patterns of file names}}. A role that ends with ! has to be there; roles
    that begin with train, val, test stand for a split, `all` for all three. -> (name, {role: path})
    of the one that has the most splits, the first of equals; of parquet files a list of paths.
    Prints which layout, and which others there are.
    """
    if args.layout and args.layout not in layouts:
        raise ValueError(f"--layout {args.layout!r} is none of {', '.join(layouts)}")
    there, found = walk(args.annotations), {}
    for name, roles in layouts.items():
        files = {role.strip("!"): pick(there, patterns) for role, patterns in roles.items()}
        files = {role: paths for role, paths in files.items() if paths}
        covered = {s for s in SPLITS for role in files if role == "all" or role.startswith(s)}
        if covered and all(r.strip("!") in files for r in roles if r.endswith("!")):
            found[name] = (len(covered), files)
    if not found or args.layout and args.layout not in found:
        wanted = {args.layout: layouts[args.layout]} if args.layout else layouts
        lines = [f"  {name}: {', '.join(p for ps in roles.values() for p in ps)}"
                 for name, roles in wanted.items()]
        raise FileNotFoundError("\n".join(
            [f"{os.path.abspath(args.annotations)} holds no annotations of {what}. Looked there "
             "and two folders deep for one of", *lines,
             f"found {len(there)} files{': ' if there else ''}"
             f"{', '.join(sorted(there)[:8])}{', ...' if len(there) > 8 else ''}; "
             "set --annotations to the folder that holds them"]))
    name = args.layout or max(found, key=lambda n: found[n][0])  # max keeps the first of equals
    files, shown = found[name][1], [path for paths in found[name][1].values() for path in paths]
    for role, paths in files.items():
        if len(paths) > 1 and not paths[0].endswith(".parquet"):
            raise ValueError(f"{args.annotations} holds more than one file for {role}: "
                             f"{', '.join(paths[:4])}; set --annotations to the folder of one")
        paths = [os.path.join(base(args.annotations), path) for path in paths]
        files[role] = paths if paths[0].endswith(".parquet") else paths[0]
    print(f"{what}, layout {name}: {', '.join(shown[:8])}{', ...' if len(shown) > 8 else ''}")
    others = [n for n in found if n != name]
    if others:
        print(f"  there too: {', '.join(others)} (choose with --layout)")
    return name, files


def base(folder):
    return os.path.dirname(folder) or "." if os.path.isfile(folder) else folder


def walk(folder, depth=2):
    """Paths of the files below the folder, relative to it."""
    if os.path.isfile(folder):
        return [os.path.basename(folder)]
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"--annotations {folder} is neither a folder nor a file")
    out = []
    for root, folders, files in os.walk(folder, followlinks=True):
        below = os.path.relpath(root, folder)
        below = "" if below == "." else below
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        if below.count(os.sep) + bool(below) >= depth:
            folders.clear()
        out += [os.path.join(below, f) for f in files]
    return out


def pick(there, patterns):
    """The files of the first pattern that matches any. The least deep ones, of parquet all."""
    for pattern in patterns:
        hits = [p for p in there if fnmatch.fnmatch(os.path.basename(p).lower(), pattern.lower())]
        if hits and not pattern.endswith(".parquet"):
            least = min(h.count(os.sep) for h in hits)
            hits = [h for h in hits if h.count(os.sep) == least]
        if hits:
            return sorted(hits)
    return []


# --------------------------------------------------------------------------------------------------
# reading: every reader gives (where, row); where is "file:line", for errors

def text_of(path):
    with open(path, "rb") as f:
        raw = f.read()
    try:
        return raw.decode("utf-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig")
    except UnicodeDecodeError as e:
        line = raw.count(b"\n", 0, e.start) + 1
        raise ValueError(f"{path}:{line}: byte 0x{raw[e.start]:02x} is no UTF-8; convert the file, "
                         "e.g. with iconv -f latin1 -t utf-8") from None


def read_lines(path):
    """Lines that are not blank, without the blanks around them."""
    for n, line in enumerate(text_of(path).split("\n"), 1):
        if line.strip():
            yield f"{path}:{n}", line.strip()


def read_csv(path, columns):
    """Rows as dicts by the header's names; it must have `columns`, others may be there."""
    csv.field_size_limit(sys.maxsize)
    # strict tells of an open quote, and does not like blanks after the last one of a line
    text = re.sub(r'"[ \t]+(\r?)$', r'"\1', text_of(path), flags=re.MULTILINE)
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    header, start = None, 1
    while True:
        try:
            cells = [c.strip() for c in next(reader)]
        except StopIteration:
            break
        except csv.Error as e:
            raise ValueError(f"{path}:{start}: no valid CSV: {e}; is a quote left open in the row "
                             "that starts there?") from None
        where, start = f"{path}:{start}", reader.line_num + 1
        if not any(cells):
            continue
        if header is None:
            header = cells
            missing = [c for c in columns if c not in header]
            if missing:
                raise ValueError(f"{where}: no column {', '.join(map(repr, missing))}; the columns "
                                 f"are {', '.join(map(repr, header))}")
            continue
        if len(cells) < len(header) or any(cells[len(header):]):
            raise ValueError(f"{where}: {len(cells)} cells, the header has {len(header)} columns: "
                             f"{cells!r:.120}")
        yield where, dict(zip(header, cells))
    if header is None:
        raise ValueError(f"{path} is empty; expected a header with {', '.join(columns)}")


def read_tsv(path, columns):
    """Rows of a TAB-separated file without a header; quotes are letters like others."""
    for n, line in enumerate(text_of(path).split("\n"), 1):
        cells = [c.strip() for c in line.split("\t")]
        if not any(cells):
            continue
        if len(cells) < len(columns) or any(cells[len(columns):]):
            raise ValueError(f"{path}:{n}: {len(cells)} cells between TABs, expected "
                             f"{len(columns)} ({', '.join(columns)}): {line!r:.120}")
        yield f"{path}:{n}", dict(zip(columns, cells))


def without_twins(pairs):
    found = dict(pairs)
    for key, value in pairs if len(found) < len(pairs) else ():
        if found[key] != value:
            raise ValueError(f"the key {key!r} is there twice, with different values")
    return found


def read_json(path, kind):
    """What a JSON file holds, which must be of `kind` (dict or list)."""
    text = text_of(path)
    try:
        found = json.loads(text, object_pairs_hook=without_twins)
    except json.JSONDecodeError as e:
        cut = "; the file ends there: was it cut off?" if not text[e.pos:].strip() else ""
        raise ValueError(f"{path}:{e.lineno}: no valid JSON: {e.msg} at column {e.colno}{cut}"
                         ) from None
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{path}: {e}") from None
    if not isinstance(found, kind):
        raise ValueError(f"{path} holds a {type(found).__name__}, expected a {kind.__name__}")
    return found


def read_rows(path):
    """The objects of a JSON list, or of a file with one per line (JSON Lines)."""
    text = text_of(path)
    start = len(text) - len(text.lstrip())
    lines = text[start:start + 1] == "{"
    decoder = json.JSONDecoder(object_pairs_hook=without_twins)
    pos, seen, line, n = start + (not lines), 0, 1, 0
    if not lines and text[start:start + 1] != "[":
        raise ValueError(f"{path}:1: expected a JSON list of rows, found {text[start:][:40]!r}")
    while True:
        while pos < len(text) and text[pos] in " \n\r\t,":
            pos += 1
        line, seen, n = line + text.count("\n", seen, pos), pos, n + 1
        if pos >= len(text) if lines else text[pos:pos + 1] == "]":
            return
        where = f"{path}:{line}, row {n}"
        try:
            row, pos = decoder.raw_decode(text, pos)
        except json.JSONDecodeError as e:
            cut = "; was the file cut off?" if not text[e.pos:].strip() else ""
            raise ValueError(f"{path}:{e.lineno}, row {n}: no valid JSON: {e.msg} at column "
                             f"{e.colno}{cut}") from None
        except (ValueError, RecursionError) as e:
            raise ValueError(f"{where}: {e}") from None
        if not isinstance(row, dict):
            raise ValueError(f"{where}: expected an object, found {row!r:.60}")
        yield where, row


def read_entries(path):
    """(where, key, value) of a JSON object."""
    text, pos, line = text_of(path), 0, 1
    for key, value in read_json(path, dict).items():
        at = max(text.find(f'"{key}"', pos), pos)
        line, pos = line + text.count("\n", pos, at), at
        yield f"{path}:{line}", key, value


def unique(rows):
    """rows, each only once; of those that are repeated whole a line tells."""
    seen, repeated = set(), []
    for where, row in rows:
        key = json.dumps(row, sort_keys=True)
        if key in seen:
            repeated.append(where)
        else:
            seen.add(key)
            yield where, row
    if repeated:
        print(f"  rows that repeat an earlier one whole are left out: {len(repeated):,} (the "
              f"first: {repeated[0]})")


# --------------------------------------------------------------------------------------------------
# rows -> lines of the jsonl files

def get(row, names, where, kind=str):
    """row's value of the first of `names` that it has, of the right kind."""
    name = next((n for n in names.split("|") if row.get(n) is not None), None)
    if name is None:
        raise ValueError(f"{where}: no {names.replace('|', ' or ')}; the fields are "
                         f"{', '.join(map(str, row)) or 'none'}")
    value = row[name]
    if kind is str and isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, kind):
        raise ValueError(f"{where}: {name} is {value!r:.60}, expected a {kind.__name__}")
    return value.strip() if kind is str else value


def clean(text, where, what="caption"):
    """A caption on one line. Blanks inside it stay as they are."""
    if not isinstance(text, str):
        raise ValueError(f"{where}: {what} {text!r:.60} is a {type(text).__name__}, not a text")
    text = " ".join(s.strip() for s in text.splitlines() if s.strip())
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{where}: {what} {text!r:.60} holds half a surrogate pair") from None
    return text


class Split:
    """The lines of one jsonl file by id."""

    def __init__(self, args=None):
        self.lines, self.dropped, self.drop = {}, 0, args is not None and args.empty == "drop"

    def add(self, id, captions, where, video="", **fields):
        """More captions for an id that is there already are added to its own."""
        if not id or not visible(id):
            raise ValueError(f"{where}: the id is {id!r}")
        captions = [captions] if isinstance(captions, str) else captions
        if not isinstance(captions, list):
            raise ValueError(f"{where}: captions of {id!r} are {captions!r:.60}, expected a list")
        texts = [clean(c, where) for c in captions]
        bad = [c for c, t in zip(captions, texts) if not visible(t)]
        if (bad or not texts) and not self.drop:
            raise ValueError(f"{where}: " + (f"caption {bad[0]!r} of {id!r} is no text" if bad else
                             f"{id!r} has no caption") + "; correct it, or leave it out with "
                             "--empty=drop")
        self.dropped += len(bad) + (not texts)
        texts = [t for t in texts if visible(t)]
        if texts:
            line = self.lines.setdefault(id, {"id": id, "video": video or id + ".mp4",
                                              "captions": [], **fields})
            line["captions"] += texts

    def __len__(self):
        return len(self.lines)

    def n_captions(self):
        return sum(len(line["captions"]) for line in self.lines.values())


def read_caption_rows(split, path, id_of, keep_repeats=False):
    """VindLU's, UMT's and BLiM's lists, and the hub's: [{video, caption: a text or a list}]."""
    rows = read_rows(path)
    for where, row in rows if keep_repeats else unique(rows):
        video = get(row, "video|video_id", where)
        name = get(row, "video_id", where) if row.get("video_id") is not None else id_of(video)
        # the hub's ActivityNet has the sentences beside the text that joins them
        captions = get(row, "sentences|caption|captions", where, (str, list))
        split.add(name, captions, where, video if VIDEO_ENDS.search(video) else "")


def stem(name):
    """A file's name without folders and one ending that videos have; dots inside stay."""
    return VIDEO_ENDS.sub("", os.path.basename(name.replace("\\", "/")))
