"""
FashionIQ: a garment and two captions that say how the wanted one differs, in three categories.

    python data/fashioniq/prepare.py --annotations DIR --videos DIR

Reads the official cap.{dress,shirt,toptee}.{train,val}.json and split.*.json (the galleries, which
are larger than the targets). A line of the jsonl files holds the target as `video`, both captions
and the given image as `reference`, which train.py ignores: it learns from pairs of one text and one
video. The test set's answers are not public. eval_tasks.py --task fashioniq measures on val, from
the same official files; a checkpoint picked on this val.jsonl is picked on its test.
"""
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from annotations import (Split, arguments, find_layout, get, one_line_errors, read_json, read_rows,
                         unique)
from report import finish

CATEGORIES = ("dress", "shirt", "toptee")
LAYOUTS = {"official": {f"{s}_{c}": [f"cap.{c}.{s}.json"] for s in ("train", "val")
                        for c in CATEGORIES}
           | {f"gallery_{s}_{c}": [f"split.{c}.{s}.json"] for s in ("train", "val")
              for c in CATEGORIES}}
EXPECTED = {"train": [("official", 18000, 36000)],
            "val": [("official", 2017 + 2038 + 1961, 2 * (2017 + 2038 + 1961))]}


def queries(split, category, path, gallery):
    for n, (where, row) in enumerate(unique(read_rows(path))):
        target, candidate = get(row, "target", where), get(row, "candidate", where)
        if gallery and target not in gallery:
            raise ValueError(f"{where}: target {target!r} is not in the category's split file")
        split.add(f"{category}-{n:05d}", get(row, "captions", where, list), where,
                  f"{target}.png", reference=f"{candidate}.png", category=category)


def main(argv=None):
    args = arguments(__doc__, HERE, argv, "queries", limits=(77, 128))
    _, files = find_layout(args, "FashionIQ", LAYOUTS)
    splits = {s: Split(args) for s in ("train", "val")}
    for name, split in splits.items():
        for category in CATEGORIES:
            path, before = files.get(f"{name}_{category}"), len(split)
            if path is None:
                print(f"  {name}: no cap.{category}.{name}.json")
                continue
            gallery = files.get(f"gallery_{name}_{category}")
            gallery = set(read_json(gallery, list)) if gallery else set()
            queries(split, category, path, gallery)
            print(f"  {name}: {category} {len(split) - before:,} queries, gallery of "
                  f"{len(gallery):,} images")
    finish(args, splits, EXPECTED)


if __name__ == "__main__":
    one_line_errors(main)
