"""
ActivityNet Captions, video-paragraph retrieval: all sentences of a video in annotation order.

    python data/activitynet/prepare.py --annotations DIR --videos DIR

Reads the official train.json and val_1.json, with CLIP4Clip's train_ids.json and val_ids.json if
they are there; the anet_ret_*.json of VindLU, UMT and BLiM; or the lists on the Hugging Face hub.
By convention val_1 is the test split; val_2 has the same videos and is not read. So validation
videos are held out of training. Files on disk may be called v_<id> or <id>.
Sentences are stripped, since some begin with blanks and some do not; paragraph=True in the config
joins them by one blank.
"""
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from annotations import (Split, arguments, find_layout, get, one_line_errors, read_caption_rows,
                         read_entries, read_json, stem)
from report import finish

LAYOUTS = {
    "official": {"train": ["train.json"], "test": ["val_1.json"],
                 "ids_train": ["train_ids.json"], "ids_test": ["val_ids.json", "val_1_ids.json"]},
    "vindlu": {"train": ["anet_ret_train.json"], "test": ["anet_ret_val_1.json"]},
    "hub": {"train": ["activitynet_captions_train.json"],
            "test": ["activitynet_captions_val1.json"]}}
EXPECTED = {"train": [("MARS", 10009, None)], "test": [("MARS", 4917, None)]}


def id_of(video):
    """The official files' id: with v_ in front"""
    name = stem(video)
    return name if name.startswith("v_") else f"v_{name}"


def official(split, path, ids):
    """{v_id: {duration, timestamps, sentences}}"""
    unordered = 0
    for where, video, entry in read_entries(path):
        if ids and id_of(video) not in ids:
            continue
        if not isinstance(entry, dict):
            raise ValueError(f"{where}: {video!r} is {entry!r:.60}, expected an object")
        sentences = get(entry, "sentences", where, list)
        times = entry.get("timestamps")
        if isinstance(times, list):
            if len(times) != len(sentences):
                raise ValueError(f"{where}: {video!r} has {len(sentences)} sentences and "
                                 f"{len(times)} timestamps")
            starts = [t[0] for t in times if isinstance(t, list) and t]
            unordered += starts != sorted(starts)
        split.add(id_of(video), sentences, where)
    if unordered:
        print(f"  {path}: {unordered:,} videos' sentences are not in the order of their start; "
              "they stay in the file's order, as everywhere")
    if ids:
        lost = [i for i in ids if i not in split.lines]
        if lost:
            print(f"  warning: {len(lost):,} of the listed ids are not in {path}, e.g. {lost[0]}")


def main(argv=None):
    args = arguments(__doc__, HERE, argv, limits=(64, 256))
    layout, files = find_layout(args, "ActivityNet Captions", LAYOUTS)
    print("  test is val_1, by convention")
    splits = {s: Split(args) for s in ("train", "test") if s in files}
    for name, split in splits.items():
        if layout == "official":
            ids = read_json(files[f"ids_{name}"], list) if f"ids_{name}" in files else ()
            official(split, files[name], dict.fromkeys(id_of(str(i).strip()) for i in ids))
        else:
            read_caption_rows(split, files[name], id_of)
    finish(args, splits, EXPECTED, paragraph=True, key=id_of)


if __name__ == "__main__":
    one_line_errors(main)
