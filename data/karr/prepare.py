"""
KARR-Bench: 2,915 images with a caption that asks for knowledge and reasoning. There is only a test.

    python data/karr/prepare.py --annotations DIR

Reads parquet files with `image` and `text` as the authors load them, whose one split is called
train (the images are written to <out>/images), or karr*.json with rows of image and text. eval.py
reads the test.jsonl that this writes; eval_tasks.py --task karr reads the published files directly.
The set was not public when this was written, so its exact files have not been seen.
"""
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from annotations import arguments, find_layout, one_line_errors
from images import parquet, rows
from report import finish

LAYOUTS = {"json": {"test": ["karr*.json"]},
           "hub": {"test": ["test-*.parquet", "train-*.parquet", "*.parquet"]}}
EXPECTED = {"test": [("authors", 2915, 2915)]}


def main(argv=None):
    args = arguments(__doc__, HERE, argv, "images", limits=(77, 128))
    layout, files = find_layout(args, "KARR-Bench", LAYOUTS)
    splits = rows(args, files) if layout == "json" else parquet(args, files, default="test")
    finish(args, splits, EXPECTED)


if __name__ == "__main__":
    one_line_errors(main)
