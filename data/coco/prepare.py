"""
COCO in Karpathy's split: 113,287 (82,783 train + 30,504 restval) / 5,000 / 5,000 images.

    python data/coco/prepare.py --annotations DIR --videos DIR      # DIR with train2014, val2014

Reads Karpathy's dataset_coco.json, ALBEF's and BLIP's coco_karpathy_{train,val,test}.json, parquet
files of the Hugging Face hub (their images are written to <out>/images), or VSE++'s *_caps.txt,
which do not name the images. Validation and test keep the first five captions of an image (some
have six or seven), training all. Images may be called COCO_val2014_000000391895.jpg or, as since
2017, 000000391895.jpg.
"""
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from annotations import SPLITS, arguments, find_layout, one_line_errors
from images import image_set
from report import finish

LAYOUTS = {
    "karpathy": {"all": ["dataset_coco.json"]},
    "blip": {s: [f"coco_karpathy_{s}.json"] for s in SPLITS},
    "hub": {"train": ["train-*.parquet", "train.parquet"],
            "val": ["val-*.parquet", "validation-*.parquet", "val.parquet"],
            "test": ["test-*.parquet", "test.parquet"]},
    "precomp": {"train": ["*train_caps.txt"], "val": ["*dev_caps.txt", "*val_caps.txt"],
                "test": ["*testall_caps.txt", "*test_caps.txt"]}}
EXPECTED = {"train": [("Karpathy", 113287, 566747)], "val": [("Karpathy", 5000, 25000)],
            "test": [("Karpathy", 5000, 25000)]}


def main(argv=None):
    args = arguments(__doc__, HERE, argv, "images", limits=(77, 128))
    layout, files = find_layout(args, "COCO", LAYOUTS)
    splits = image_set(args, layout, files)
    finish(args, splits, EXPECTED, aliases=lambda name: [name.split("_")[-1]])


if __name__ == "__main__":
    one_line_errors(main)
