"""
MMEB: 36 data sets of queries and candidates, each a text, an image or both; 20 have training data.

    python data/mmeb/prepare.py --annotations MMEB-eval --videos MMEB-eval/images
    python data/mmeb/prepare.py --annotations MMEB-train --videos MMEB-train/images

Reads a folder per data set with parquet files: MMEB-eval's test (qry_text, qry_img_path, tgt_text
and tgt_img_path, the first target is right) or MMEB-train's original (qry, qry_image_path,
pos_text, pos_image_path). What is a plain pair, a text on one side and an image on the other,
becomes a line of the jsonl files: `video`, the caption, and as `instruction` the words beside the
image. Queries that hold both (as in CIRR) are counted and left out, train.py can't learn from them.
eval_tasks.py --task mmeb measures on all of them, from the published files.
"""
import os
import sys
from pathlib import Path

from tqdm import tqdm

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from annotations import Split, arguments, clean, get, one_line_errors
from report import finish

FILES = {"test": ["test-*.parquet", "test/*.parquet", "test.json"],
         "train": ["original-*.parquet", "original/*.parquet", "train-*.parquet",
                   "train/*.parquet"]}


def sides(row, where):
    """(text, image) of the query and of the right target; how many candidates"""
    def side(text, image):
        return (clean(text or "", where, "text").replace("<|image_1|>", "").strip(), image or "")

    if "qry_text" in row:
        texts, images = (get(row, f"tgt_{k}", where, list) for k in ("text", "img_path"))
        if len(texts) != len(images) or not texts:
            raise ValueError(f"{where}: {len(texts)} tgt_text and {len(images)} tgt_img_path")
        return side(row["qry_text"], row.get("qry_img_path")), side(texts[0], images[0]), len(texts)
    return (side(get(row, "qry", where), row.get("qry_image_path")),
            side(row.get("pos_text"), row.get("pos_image_path")), 0)


def read(args, name, role, paths, split):
    from tasks import rows_of
    n = composed = most = 0
    for where, row in tqdm((r for p in paths for r in rows_of(p)), desc=name, unit="rows",
                           leave=False):
        n += 1
        query, target, candidates = sides(row, where)
        most = max(most, candidates)
        pair = (query, target) if not query[1] and target[1] else (target, query)
        (text, no_image), (instruction, image) = pair
        if no_image or not image or not text:
            composed += 1
            continue
        split.add(f"{name}-{n}", text, where, image, instruction=instruction, set=name)
    print(f"  {name:<20} {role}: {n:,} queries" + (f", up to {most:,} candidates" if most else "")
          + (f"; {composed:,} are no plain pairs" if composed else "")
          + ("" if role == "train" or n == 1000 else "; published: 1,000"))


def main(argv=None):
    args = arguments(__doc__, HERE, argv, "pairs", limits=(128, 256))
    from tasks import MMEB_SETS, find  # torch comes with it
    splits, there = {"train": Split(args), "test": Split(args)}, 0
    for name in MMEB_SETS:
        folder = os.path.join(args.annotations, name)
        for role, patterns in FILES.items():
            try:
                paths = find(folder, patterns, name) if os.path.isdir(folder) else []
            except FileNotFoundError:
                continue
            there += bool(paths)
            if paths:
                read(args, name, role, paths, splits[role])
    if not there:
        raise FileNotFoundError(f"{os.path.abspath(args.annotations)} holds no data set of MMEB; "
                                f"looked for <name>/{', '.join(FILES['test'] + FILES['train'])}, "
                                f"of {', '.join(MMEB_SETS)}")
    print(f"MMEB: {there} data sets of 36 in this folder")
    finish(args, splits, {}, key=lambda path: path)


if __name__ == "__main__":
    one_line_errors(main)
