"""
MSR-VTT, 1k-A test: 1,000 videos with a caption each; 9,000 (or 7,010) training videos with 20.

    python data/msrvtt/prepare.py --annotations DIR --videos DIR            # the 9k training list
    python data/msrvtt/prepare.py --annotations DIR --videos DIR --train 7k

Reads CLIP4Clip's csv lists with MSRVTT_data.json, the json lists of VindLU, UMT and BLiM, those on
the Hugging Face hub, or the official videodatainfo files alone (then it is the full split: 6,513 /
497 / 2,990 videos with 20 captions each, which is not 1k-A).
Validation: the official 497 videos (video6513 to video7009), which both training lists contain, are
taken out of training. --val 0 trains on the whole list, as the papers do, and leaves no val.jsonl.
"""
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from annotations import (Split, arguments, find_layout, get, one_line_errors, read_caption_rows,
                         read_csv, read_json, stem, unique)
from report import finish, make_val, take

LAYOUTS = {
    "clip4clip": {"train9k": ["MSRVTT_train.9k.csv"], "train7k": ["MSRVTT_train.7k.csv"],
                  "captions!": ["MSRVTT_data.json"], "test": ["MSRVTT_JSFUSION_test.csv"]},
    "vindlu": {"train9k": ["msrvtt_ret_train9k.json", "msrvtt_ret_train.json"],
               "train7k": ["msrvtt_ret_train7k.json"],
               "test": ["msrvtt_ret_test1k.json", "msrvtt_ret_test.json"]},
    "hub": {"train9k": ["msrvtt_train_9k.json"], "train7k": ["msrvtt_train_7k.json"],
            "test": ["msrvtt_test_1k.json"]},
    "official": {"train": ["MSRVTT_data.json", "train_val_videodatainfo.json",
                           "videodatainfo*.json"],
                 "test": ["MSRVTT_data.json", "test_videodatainfo.json", "videodatainfo*.json"]},
    "clip4clip-test": {"test": ["MSRVTT_JSFUSION_test.csv"]}}
EXPECTED = {"9k": (9000, 180000), "7k": (7010, 140200), "test": (1000, 1000)}
FULL = {"train": (6513, 130260), "val": (497, 9940), "test": (2990, 59800)}
OFFICIAL_VAL = {f"video{n}" for n in range(6513, 7010)}


def sentences(path):
    """(where, row) of {"videos": [...], "sentences": [{video_id, caption, ...}]}, in any order"""
    for n, row in enumerate(get(read_json(path, dict), "sentences", path, list), 1):
        where = f"{path}, sentence {n}"
        if not isinstance(row, dict):
            raise ValueError(f"{where}: expected an object, found {row!r:.60}")
        yield where, row


def full_split(args, files):
    """The official split: every video says which it belongs to."""
    splits = {s: Split(args) for s in ("train", "val", "test")}
    for path in dict.fromkeys(files.values()):
        split_of = {get(v, "video_id", f"{path}, videos"): get(v, "split", f"{path}, videos")
                    for v in get(read_json(path, dict), "videos", path, list)}
        for where, row in sentences(path):
            video = get(row, "video_id", where)
            name = split_of.get(video, "none").replace("validate", "val")
            if name not in splits:
                raise ValueError(f"{where}: video {video!r} is of split {name!r}, expected train, "
                                 "validate or test")
            splits[name].add(video, get(row, "caption", where), where)
    return splits


def lists(args, files):
    """CLIP4Clip: a list of training videos, all captions in one file, a csv of test pairs."""
    splits = {"test": Split(args)} if "test" in files else {}
    if "test" in files:
        for where, row in unique(read_csv(files["test"], ["video_id", "sentence"])):
            splits["test"].add(row["video_id"], row["sentence"], where)
    if "train" in files:
        wanted = [row["video_id"] for _, row in unique(read_csv(files["train"], ["video_id"]))]
        order, train = {v: n for n, v in enumerate(wanted)}, Split(args)
        for where, row in sentences(files["captions"]):
            video = get(row, "video_id", where)
            if video in order:
                train.add(video, get(row, "caption", where), where)
        train.lines = dict(sorted(train.lines.items(), key=lambda item: order[item[0]]))
        lost = len(wanted) - len(train)
        if lost:
            print(f"  warning: {lost:,} of the {len(wanted):,} videos of {files['train']} have no "
                  f"caption in {files['captions']}")
        splits["train"] = train
    return splits


def official_val(args, splits):
    """The official validation videos, if training has them; --val says otherwise."""
    ids = OFFICIAL_VAL & set(splits["train"].lines) if "train" in splits else ()
    if "val" in splits or args.val is not None or not ids:
        return make_val(args, splits)
    splits["val"] = take(splits["train"], ids)
    print(f"  val   {len(ids):,} videos of the official validation split are held out of the "
          f"training list, {len(splits['train']):,} are left; --val 0 keeps all")


def main(argv=None):
    args = arguments(__doc__, HERE, argv, limits=(32, 256),
                     train=(None, "training list: 9k (default) or 7k", ("9k", "7k")))
    layout, files = find_layout(args, "MSR-VTT", LAYOUTS)
    if layout == "official":
        print("  these files hold the full split, which is not 1k-A")
        return finish(args, full_split(args, files),
                      {s: [("official", *n)] for s, n in FULL.items()})
    which = args.train or ("7k" if "train7k" in files and "train9k" not in files else "9k")
    if f"train{which}" in files:
        files["train"] = files[f"train{which}"]
        print(f"  training list: {which}")
    elif args.train:
        raise ValueError(f"{args.annotations}: the {which} training list is not there")
    if layout.startswith("clip4clip"):
        splits = lists(args, files)
    else:
        splits = {s: Split(args) for s in ("train", "test") if s in files}
        for name, split in splits.items():
            # a video's twenty captions may hold one twice: 180,000 counts both
            read_caption_rows(split, files[name], stem, keep_repeats=True)
    finish(args, splits, {"train": [(f"1k-A {which}", *EXPECTED[which])],
                          "test": [("1k-A", *EXPECTED["test"])]}, val=official_val)


if __name__ == "__main__":
    one_line_errors(main)
