"""
Flickr30K in Karpathy's split: 29,000 / 1,014 / 1,000 images with five captions each.

    python data/flickr30k/prepare.py --annotations DIR --videos flickr30k-images

Reads Karpathy's dataset_flickr30k.json, ALBEF's and BLIP's flickr30k_{train,val,test}.json, parquet
files of the Hugging Face hub (their images are written to <out>/images), or VSE++'s *_caps.txt,
which do not name the images.
"""
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from annotations import SPLITS, arguments, find_layout, one_line_errors
from images import image_set
from report import finish

LAYOUTS = {
    "karpathy": {"all": ["dataset_flickr30k.json"]},
    "blip": {s: [f"flickr30k_{s}.json"] for s in SPLITS},
    "hub": {"train": ["train-*.parquet", "train.parquet"],
            "val": ["val-*.parquet", "validation-*.parquet", "val.parquet"],
            "test": ["test-*.parquet", "test.parquet", "0*.parquet"]},
    "precomp": {"train": ["*train_caps.txt"], "val": ["*dev_caps.txt", "*val_caps.txt"],
                "test": ["*test_caps.txt"]}}
EXPECTED = {"train": [("Karpathy", 29000, 145000)], "val": [("Karpathy", 1014, 5070)],
            "test": [("Karpathy", 1000, 5000)]}


def main(argv=None):
    args = arguments(__doc__, HERE, argv, "images", limits=(77, 128))
    layout, files = find_layout(args, "Flickr30K", LAYOUTS)
    finish(args, image_set(args, layout, files), EXPECTED)


if __name__ == "__main__":
    one_line_errors(main)
