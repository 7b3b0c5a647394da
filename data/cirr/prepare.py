"""
CIRR: an image and a text that says how the wanted image differs; 28,225 / 4,181 / 4,148 queries.

    python data/cirr/prepare.py --annotations DIR --videos DIR      # DIR with dev, test1, train

Reads the official cap.rc2.{train,val,test1}.json and split.rc2.*.json. A line of the jsonl files
holds the target as `video`, the text as caption and the given image as `reference`, which train.py
ignores: it learns from pairs of one text and one video. The answers of test1 are with the
organisers' server, so there is no test.jsonl. eval_tasks.py --task cirr measures on val, from the
same official files; a checkpoint picked on this val.jsonl is picked on its test.
"""
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from annotations import (Split, arguments, find_layout, get, one_line_errors, read_json, read_rows,
                         unique)
from report import finish

FILES = {"train": "train", "val": "val", "test": "test1"}
LAYOUTS = {"official": {s: [f"cap.rc2.{n}.json"] for s, n in FILES.items()}
           | {f"images_{s}": [f"split.rc2.{n}.json"] for s, n in FILES.items()}}
EXPECTED = {"train": [("official", 28225, None)], "val": [("official", 4181, None)]}


def queries(args, name, path, split_file):
    """A Split; of rows without a target only the number is told."""
    images = read_json(split_file, dict) if split_file else None
    split, unanswered = Split(args), 0
    for where, row in unique(read_rows(path)):
        reference = get(row, "reference", where)
        target = get(row, "target_hard", where) if "target_hard" in row else None
        for image in (reference, target):
            if image is not None and images is not None and image not in images:
                raise ValueError(f"{where}: image {image!r} is not in {split_file}")
        if target is None:
            unanswered += 1
            continue
        if images is None:
            raise FileNotFoundError(f"{path} is there, split.rc2.{name}.json, which says what its "
                                    "images are called, is not")
        split.add(get(row, "pairid", where), get(row, "caption", where), where,
                  os.path.normpath(images[target]),
                  reference=os.path.normpath(images[reference]))
    gallery = "no list of images" if images is None else f"gallery of {len(images):,} images"
    print(f"  {name}: {gallery}" + (f"; {unanswered:,} queries have no target, the organisers' "
                                    "server has them" if unanswered else ""))
    return split


def main(argv=None):
    args = arguments(__doc__, HERE, argv, "queries", limits=(77, 128))
    _, files = find_layout(args, "CIRR", LAYOUTS)
    splits = {}
    for name in FILES:
        if name in files:
            splits[name] = queries(args, FILES[name], files[name], files.get(f"images_{name}"))
    finish(args, splits, EXPECTED)


if __name__ == "__main__":
    one_line_errors(main)
