"""
MSVD: 1,200 / 100 / 670 short videos with 18 to 81 captions each.

    python data/msvd/prepare.py --annotations DIR --videos DIR

Reads {train,val,test}_list.txt with captions_msvd.json (X-Pool) or raw-captions.pkl (CLIP4Clip,
whose captions are lists of words), the msvd_ret_*.json of VindLU and UMT, or the lists on the
Hugging Face hub. The pickle is read without running anything that it may hold.
"""
import pickle
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from annotations import (SPLITS, Split, arguments, find_layout, one_line_errors, read_caption_rows,
                         read_entries, read_lines, stem)
from report import finish

LAYOUTS = {
    "lists": {s: [f"{s}_list.txt"] for s in SPLITS}
    | {"captions!": ["captions_msvd.json", "raw-captions.pkl"]},
    "vindlu": {s: [f"msvd_ret_{s}.json"] for s in SPLITS},
    "hub": {s: [f"msvd_{s}.json"] for s in SPLITS}}
EXPECTED = {"train": [("official", 1200, None)], "val": [("official", 100, None)],
            "test": [("official", 670, None)]}


class Plain(pickle.Unpickler):
    """Lists, dicts and strings only."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"it holds a {module}.{name}, expected lists of words")


def captions_of(path):
    """{id: (where, [captions])}"""
    if not path.endswith(".pkl"):
        return {video: (where, captions) for where, video, captions in read_entries(path)}
    with open(path, "rb") as f:
        try:
            found = Plain(f, encoding="utf-8").load()
        except Exception as e:  # whatever a broken pickle raises
            raise ValueError(f"{path} cannot be read: {e}") from None
    return {video: (f"{path}, {video!r}", [" ".join(c) if isinstance(c, (list, tuple)) else c
                                           for c in captions])
            for video, captions in found.items()}


def main(argv=None):
    args = arguments(__doc__, HERE, argv, limits=(32, 256))
    layout, files = find_layout(args, "MSVD", LAYOUTS)
    splits = {s: Split(args) for s in SPLITS if s in files}
    captions = captions_of(files["captions"]) if layout == "lists" else {}
    for name, split in splits.items():
        if layout != "lists":
            read_caption_rows(split, files[name], stem, keep_repeats=True)
            continue
        ids = dict.fromkeys(stem(line) for _, line in read_lines(files[name]))
        for video in ids:
            if video in captions:
                where, texts = captions[video]
                split.add(video, texts, where, f"{video}.avi")
        lost = [i for i in ids if i not in captions]
        if lost:
            print(f"  warning: {len(lost):,} ids of {files[name]} are not in "
                  f"{files['captions']}, e.g. {lost[0]}")
    finish(args, splits, EXPECTED)


if __name__ == "__main__":
    one_line_errors(main)
