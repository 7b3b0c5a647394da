"""
LSMDC: clips of movies, one caption each; the test gallery is the 1,000 clips of the challenge.

    python data/lsmdc/prepare.py --annotations DIR --videos DIR

Reads the official LSMDC16_annos_{training,val}.csv and LSMDC16_challenge_1000_publictect.csv (so
spelt; also publictest), which have TABs, six columns and no header; or the lsmdc_ret_*.json of
VindLU, UMT and BLiM. Ids have dots inside. Some clips are in several rows of the training file:
those are one line with several captions. Files may lie in a folder per movie or all in one.
"""
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from annotations import (SPLITS, Split, arguments, find_layout, one_line_errors, read_caption_rows,
                         read_tsv, stem, unique)
from report import finish

LAYOUTS = {
    "official": {"train": ["LSMDC16_annos_training.csv"], "val": ["LSMDC16_annos_val.csv"],
                 "test": ["LSMDC16_challenge_1000_publictect.csv",
                          "LSMDC16_challenge_1000_publictest.csv"]},
    "vindlu": {"train": ["lsmdc_ret_train.json"], "val": ["lsmdc_ret_val.json"],
               "test": ["lsmdc_ret_test_1000.json", "lsmdc_ret_test.json"]},
    "hub": {s: [f"lsmdc_{s}.json"] for s in SPLITS}}
COLUMNS = ["clip", "start_aligned", "end_aligned", "start_extracted", "end_extracted", "sentence"]
EXPECTED = {"train": [("MARS", None, 101055)], "val": [("official", None, 7408)],
            "test": [("MARS", 1000, 1000)]}


def main(argv=None):
    args = arguments(__doc__, HERE, argv, limits=(32, 256))
    layout, files = find_layout(args, "LSMDC", LAYOUTS)
    splits = {s: Split(args) for s in SPLITS if s in files}
    for name, split in splits.items():
        if layout != "official":
            read_caption_rows(split, files[name], stem)
            continue
        for where, row in unique(read_tsv(files[name], COLUMNS)):
            clip = row["clip"]  # <movie>_<start>-<end>
            split.add(clip, row["sentence"], where, f"{clip.rsplit('_', 1)[0]}/{clip}.avi")
        several = sum(len(line["captions"]) > 1 for line in split.lines.values())
        if several:
            print(f"  {files[name]}: {several:,} clips have several captions")
    finish(args, splits, EXPECTED)


if __name__ == "__main__":
    one_line_errors(main)
