"""
What a prepare.py says and writes: counts beside the published ones, repeated texts, lengths, files
missing on disk, a validation split where there is none; then missing.txt and the jsonl files.

    {train, val, test: Split} --finish--> printed report, {train,val,test}.jsonl
"""
import hashlib
import json
import os
import re
from collections import Counter

import numpy as np
from tqdm import tqdm

from annotations import SPLITS, Split, stem

OTHER_ENDS = re.compile(r"\.(json|jsonl|txt|csv|tsv|md|py|sh|npy|npz|pth?|pkl|pickle|h5|hdf5|wav|"
                        r"mp3|aac|m4a|srt|vtt|zip|tar|t?gz|part(-\w+)?|ytdl|tmp|log|lock|parquet|"
                        r"metadata)$", re.IGNORECASE)


# --------------------------------------------------------------------------------------------------
# videos on disk

def index_files(folder, key):
    """{key(path): path below the folder} of what may be a video; the keys that had several files"""
    found, several, been = {}, set(), set()
    for root, folders, files in tqdm(os.walk(folder, followlinks=True), desc="folders of videos",
                                     leave=False, unit=""):
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        if os.path.realpath(root) in been:  # a link back to a folder above
            folders.clear()
            continue
        been.add(os.path.realpath(root))
        for name in sorted(files):
            if name.startswith(".") or OTHER_ENDS.search(name):
                continue
            path = os.path.relpath(os.path.join(root, name), folder).replace(os.sep, "/")
            k = key(path)
            if k in found:
                several.add(k)
            if k not in found or (path.count("/"), path) < (found[k].count("/"), found[k]):
                found[k] = path
    return found, several


def find_videos(args, splits, key, aliases):
    """Sets each line's `video` (and `reference`) to its file below --videos; those without one."""
    index, several = index_files(args.videos, key)
    missing, used, total = [], set(), 0
    for name, split in splits.items():
        for line in split.lines.values():
            for field in ("video", "reference") if "reference" in line else ("video",):
                total += 1
                names = [key(line[field]), *aliases(key(line[field]))]
                hit = next((k for k in names if k in index), None)
                if hit is None:
                    missing.append((name, line["id"], line[field]))
                else:
                    line[field] = index[hit]
                    used.add(hit)
    print(f"  on disk in {args.videos}: {total - len(missing):,} of {total:,}")
    if several & used:
        first = sorted(several & used)[0]
        print(f"  {len(several & used):,} of them have several files; taken is the one in the "
              f"fewest folders, then the first by name (e.g. {index[first]})")
    return missing


def save(path, lines):
    """Under a temporary name first, so that what is there is always whole."""
    with open(path + ".tmp", "w", encoding="utf-8", newline="\n") as f:
        f.writelines(line + "\n" for line in lines)
    os.replace(path + ".tmp", path)


# --------------------------------------------------------------------------------------------------
# the report

def count_line(name, split, expected, unit):
    videos, captions = len(split), split.n_captions()
    out = f"  {name:<5} {videos:,} {unit}, {captions:,} captions"
    for who, v, c in expected:
        wanted = [f"{n:,} {u}" for n, u in ((v, unit), (c, "captions")) if n]
        off = [f"{abs(n - m):,} {u} {'fewer' if n < m else 'more'}" for n, m, u in
               ((videos, v, unit), (captions, c, "captions")) if m and n != m]
        out += f"; {who} {', '.join(wanted)}: {', '.join(off) or 'the same'}"
    return out


def texts_of(line, paragraph):
    return [" ".join(line["captions"])] if paragraph else line["captions"]


def lengths_line(split, paragraph, limits, tokenizer):
    """How long the texts are, how many are longer than each limit."""
    texts = [t for line in split.lines.values() for t in texts_of(line, paragraph)]
    n = np.array([len(t.split()) for t in texts])
    out = (f"{'paragraphs' if paragraph else 'captions'} of {n.min()} to {n.max()} words, median "
           f"{np.median(n):g}, 95 % up to {np.percentile(n, 95):g}")
    tokens, at_least = n, "at least "  # a word is a token or more
    if tokenizer:
        tokens, at_least = np.array([len(tokenizer(t).input_ids) for t in texts]), ""
    for limit in limits:
        cut = int((tokens > limit).sum())
        out += f"; cut at {limit} tokens: {at_least}{cut:,} ({100 * cut / len(n):.1f} %)"
    return out


def duplicates_line(split, paragraph):
    """How many texts (queries, that is) repeat another one word for word."""
    texts = [t for line in split.lines.values() for t in set(texts_of(line, paragraph))]
    shared = sum(n > 1 for n in Counter(texts).values())
    what, n = ("paragraphs" if paragraph else "captions"), len(split)
    n = n if paragraph else split.n_captions()
    distinct = len(set(texts))
    return (f"{distinct:,} distinct {what} of {n:,}" if distinct == n else
            f"{distinct:,} distinct {what} of {n:,}: {n - distinct:,} repeat another one word for "
            f"word, {shared:,} texts stand on 2 or more lines")


def hold_out(train, n, seed):
    """Moves n videos to a new Split. Which does not depend on their order in the file."""
    draw = sorted(train.lines, key=lambda i: hashlib.sha256(f"{seed} {i}".encode()).digest())
    return take(train, set(draw[:n]))


def take(train, ids):
    """Moves the videos of these ids to a new Split."""
    val = Split()
    val.lines = {i: line for i, line in train.lines.items() if i in ids}
    train.lines = {i: line for i, line in train.lines.items() if i not in ids}
    return val


def make_val(args, splits, default=500):
    """A validation split from training videos, if there is no other."""
    if "val" in splits or "train" not in splits:
        return
    train = splits["train"]
    n = min(default, len(train) // 10) if args.val is None else args.val
    if n >= len(train):
        raise ValueError(f"--val {n} of {len(train)} training videos leaves none to train on")
    if n == 0:
        print("  val   none is held out (--val 0, or too few training videos): no val.jsonl; train "
              "with --val_split=test --select_on_test, or on the last epoch")
        return
    splits["val"] = hold_out(train, n, args.seed)
    print(f"  val   no validation split in these files: {n:,} training videos are held out (seed "
          f"{args.seed}), {len(train):,} are left to train on; --val N changes it, 0 keeps all")


def finish(args, splits, expected, paragraph=False, key=stem, aliases=lambda id: (), val=make_val,
           **extra):
    """
    splits: {train, val, test: Split} as far as found. expected: {split: [(who, videos, captions)]}.
    Prints all that there is to say, then writes.
    """
    splits = {s: splits[s] for s in SPLITS if s in splits and len(splits[s])}
    if not splits:
        raise ValueError(f"{args.annotations}: no video with a caption in these files")
    tokenizer = None
    if args.tokenizer:
        from transformers import AutoTokenizer  # only who asks for it waits for it
        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    for name, split in splits.items():
        print(count_line(name, split, expected.get(name, ()), args.unit))
        print(f"        {lengths_line(split, paragraph, args.limits, tokenizer)}")
        print(f"        {duplicates_line(split, paragraph)}")
        if split.dropped:
            print(f"        {split.dropped:,} captions without text are left out (--empty=drop)")
    for a, b in (("train", "val"), ("train", "test"), ("val", "test")):
        both = set(splits[a].lines) & set(splits[b].lines) if a in splits and b in splits else ()
        if both:
            print(f"  warning: {len(both):,} ids are in {a} and in {b}, e.g. {min(both)}")
    val(args, splits, **extra)
    write(args, splits, key, aliases)


def write(args, splits, key, aliases):
    """missing.txt and the jsonl files, and a line on each."""
    os.makedirs(args.out, exist_ok=True)
    lost = os.path.join(args.out, "missing.txt")
    missing = find_videos(args, splits, key, aliases) if args.videos else []
    if missing:
        save(lost, ["\t".join(m) for m in missing])
        first = ", ".join(i for _, i, _ in missing[:3])
        print(f"  missing: {len(missing):,}, all in {lost} ({first}{', ...' if missing[3:] else ''}"
              "); they stay in the jsonl files, train.py and eval.py say what --on_bad_video does")
    elif os.path.isfile(lost):
        os.remove(lost)
    if not args.videos:
        print("  files on disk were not looked for, `video` is a guess where the annotations name "
              "no file: give --videos DIR")
    for name in SPLITS:
        path = os.path.join(args.out, f"{name}.jsonl")
        if name in splits:
            save(path, (json.dumps(line, ensure_ascii=False)
                        for line in splits[name].lines.values()))
            print(f"  wrote {path}: {len(splits[name]):,} {args.unit}, "
                  f"{splits[name].n_captions():,} captions")
        else:
            old = "; the one there is from an earlier run" if os.path.isfile(path) else ""
            print(f"  no {name}.jsonl: none in these files{old}")
