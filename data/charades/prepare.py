"""
Charades: videos of about 30 seconds at home, one caption each (the script that was acted).

    python data/charades/prepare.py --annotations DIR --videos DIR
    python data/charades/prepare.py --annotations DIR --captions descriptions   # what viewers wrote

Reads the official Charades_v1_{train,test}.csv: 7,985 / 1,863 videos, 9,848 in all. PHA-Net says
"typically one caption", which is the column `script`; `descriptions` has several, divided by ";".
--layout sta reads charades_sta_{train,test}.txt instead ("VID start end##sentence"), whose
sentences are about moments: all of a video, in the file's order, for paragraph=True.
There is no validation split: training videos are held out.
"""
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from annotations import Split, arguments, find_layout, one_line_errors, read_csv, read_lines, unique
from report import finish

LAYOUTS = {"official": {"train": ["Charades_v1_train.csv"], "test": ["Charades_v1_test.csv"]},
           "sta": {"train": ["charades_sta_train.txt"], "test": ["charades_sta_test.txt"]}}
EXPECTED = {"train": [("official", 7985, None)], "test": [("official", 1863, None)]}
EXPECTED_STA = {"train": [("official", None, 12408)], "test": [("official", None, 3720)]}


def official(split, path, column):
    for where, row in unique(read_csv(path, ["id", column])):
        texts = [row[column]]
        if column == "descriptions":  # an empty part between two ; is no caption
            texts = [t for t in row[column].split(";") if t.strip()]
        split.add(row["id"], texts, where)


def sta(split, path):
    for where, line in unique(read_lines(path)):
        found = re.fullmatch(r"(\S+)\s+([\d.]+)\s+([\d.]+)\s*##(.*)", line)
        if not found:
            raise ValueError(f"{where}: expected 'VID start end##sentence', found {line!r:.100}")
        split.add(found[1], found[4], where)


def main(argv=None):
    args = arguments(__doc__, HERE, argv, limits=(32, 256), captions=(
        "script", "column of the official csv: script or descriptions",
        ("script", "descriptions")))
    layout, files = find_layout(args, "Charades", LAYOUTS)
    splits = {s: Split(args) for s in ("train", "test") if s in files}
    for name, split in splits.items():
        if layout == "sta":
            sta(split, files[name])
        else:
            official(split, files[name], args.captions)
    finish(args, splits, EXPECTED_STA if layout == "sta" else EXPECTED,
           paragraph=layout == "sta")


if __name__ == "__main__":
    one_line_errors(main)
