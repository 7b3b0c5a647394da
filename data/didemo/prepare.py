"""
DiDeMo, video-paragraph retrieval: all captions of a video in the order of the annotations.

    python data/didemo/prepare.py --annotations DIR --videos DIR

Reads the official {train,val,test}_data.json of LocalizingMoments, with CLIP4Clip's
{train,val,test}_list.txt if they are there; the didemo_ret_*.json of VindLU, UMT and BLiM; or the
lists on the Hugging Face hub. A video's id is its name before the first dot, since the same one is
called x.mov, x.m4v.mp4 or x.mp4. The jsonl files hold single captions: paragraph=True in the config
joins them. Captions are about the first 30 seconds; cutting there is the sampler's business.
"""
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from annotations import (SPLITS, Split, arguments, find_layout, get, one_line_errors,
                         read_caption_rows, read_lines, read_rows, unique)
from report import finish

LAYOUTS = {
    "official": {s: [f"{s}_data.json"] for s in SPLITS}
    | {f"list_{s}": [f"{s}_list.txt"] for s in SPLITS},
    "vindlu": {s: [f"didemo_ret_{s}.json"] for s in SPLITS},
    "hub": {s: [f"didemo_{s}.json"] for s in SPLITS}}
EXPECTED = {"train": [("MARS", 8381, None), ("official", 8395, None)],
            "val": [("official", 1065, None)],
            "test": [("MARS", 1003, None), ("official", 1004, None)]}


def id_of(video):
    return os.path.basename(video).split(".")[0]


def moments(split, path, ids):
    """[{video, description, times, ...}], a row for each caption"""
    skipped = set()
    for where, row in unique(read_rows(path)):
        video = get(row, "video", where)
        if ids and id_of(video) not in ids:
            skipped.add(video)
            continue
        split.add(id_of(video), get(row, "description", where), where, os.path.basename(video))
    if ids:
        lost = [i for i in ids if i not in split.lines]
        if skipped or lost:
            print(f"  {path}: {len(skipped):,} of its videos are not in the list and left out, "
                  f"{len(lost):,} of the list have no caption")
        split.lines = {i: split.lines[i] for i in ids if i in split.lines}


def main(argv=None):
    args = arguments(__doc__, HERE, argv, limits=(64, 256))
    layout, files = find_layout(args, "DiDeMo", LAYOUTS)
    splits = {s: Split(args) for s in SPLITS if s in files}
    for name, split in splits.items():
        if layout == "official":
            listed = read_lines(files[f"list_{name}"]) if f"list_{name}" in files else ()
            moments(split, files[name], dict.fromkeys(id_of(line) for _, line in listed))
        else:
            read_caption_rows(split, files[name], id_of)
    finish(args, splits, EXPECTED, paragraph=True, key=id_of)


if __name__ == "__main__":
    one_line_errors(main)
