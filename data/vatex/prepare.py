"""
VATEX, ten English captions a video, in HGR's split: 25,991 / 1,500 / 1,500 videos.

    python data/vatex/prepare.py --annotations DIR --videos DIR

Reads lists of ids with one file of captions (train_list.txt ... with vatex_data.json or
ref_captions.json; HGR's trn_names.npy, val_names.npy, tst_names.npy), vatex_en_ret_*.json, or the
official vatex_training_v1.0.json and vatex_validation_v1.0.json. HGR halved the official
validation videos by a list of its own. Without that list they are halved here by --seed, which the
output says: numbers are then near the papers', not on their videos. The Chinese captions (chCap)
are not read.
"""
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from annotations import (SPLITS, Split, arguments, find_layout, get, one_line_errors,
                         read_caption_rows, read_entries, read_lines, read_rows, stem)
from report import finish, hold_out

CAPTIONS = {"captions!": ["ref_captions.json", "vatex_data.json"]}
LAYOUTS = {
    "lists": {s: [f"{s}_list.txt"] for s in SPLITS} | CAPTIONS,
    "hgr": {s: [f"{n}_names.npy"] for s, n in zip(SPLITS, ("trn", "val", "tst"))} | CAPTIONS,
    "vindlu": {s: [f"vatex_en_ret_{s}.json"] for s in SPLITS},
    "official": {"train": ["vatex_training_v1.0.json"], "val": ["vatex_validation_v1.0.json"],
                 "test_public": ["vatex_public_test_english_v1.1.json"]}}
EXPECTED = {"train": [("HGR", 25991, 259910)], "val": [("HGR", 1500, 15000)],
            "test": [("HGR", 1500, 15000)]}


def english(entry, where):
    """The captions of an entry: a list, or an object with enCap (and chCap, which is Chinese)"""
    return entry if isinstance(entry, list) else get(entry, "enCap", where, list)


def listed(args, files, splits):
    """Ids in one file a split, all captions in another"""
    captions = {video: (where, entry) for where, video, entry in read_entries(files["captions"])}
    for name, split in splits.items():
        path, lost = files[name], 0
        ids = np.load(path).tolist() if path.endswith(".npy") else [i for _, i in read_lines(path)]
        for video in dict.fromkeys(map(str, ids)):
            if stem(video) in captions:
                where, entry = captions[stem(video)]
                split.add(stem(video), english(entry, where), where)
            else:
                lost += 1
        if lost:
            print(f"  warning: {lost:,} ids of {path} are not in {files['captions']}")


def official(args, files):
    splits = {}
    for role in ("train", "val", "test_public"):
        if role in files:
            splits[role] = Split(args)
            for where, row in read_rows(files[role]):
                splits[role].add(get(row, "videoID", where), english(row, where), where)
    public = splits.pop("test_public", None)
    if "val" in splits:
        splits["test"] = hold_out(splits["val"], len(splits["val"]) // 2, args.seed)
        print(f"  HGR's list is not there: the {len(splits['val']) + len(splits['test']):,} "
              f"official validation videos are halved into val and test by seed {args.seed}")
        if public:
            print(f"  the public test file ({len(public):,} videos) is no part of this split")
    elif public:
        splits["test"] = public
        print("  test is the official public test split (6,000 videos), not HGR's: the validation "
              "file is not there")
    return splits


def main(argv=None):
    args = arguments(__doc__, HERE, argv, limits=(32, 256))
    layout, files = find_layout(args, "VATEX", LAYOUTS)
    splits = {s: Split(args) for s in SPLITS if s in files}
    if layout == "official":
        splits = official(args, files)
    elif layout == "vindlu":
        for name, split in splits.items():
            read_caption_rows(split, files[name], stem, keep_repeats=True)
    else:
        listed(args, files, splits)
    finish(args, splits, EXPECTED)


if __name__ == "__main__":
    one_line_errors(main)
