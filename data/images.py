"""
What the preparers of image sets share: COCO, Flickr30K, KARR-Bench. An image is a video of one
frame: {"id", "video": its file, "captions"}.

Rows are Karpathy's, ALBEF's and BLIP's, or those of parquet files from the Hugging Face hub. The
images inside parquet files are written out as files, since train.py reads files.
"""
import os

from tqdm import tqdm

from annotations import SPLITS, Split, get, read_json, read_lines, read_rows, stem


def karpathy(args, path):
    """{"images": [{filename, filepath, split, sentences: [{raw}]}]}; restval is for training."""
    splits, restval = {s: Split(args) for s in SPLITS}, 0
    for n, row in enumerate(get(read_json(path, dict), "images", path, list), 1):
        where = f"{path}, image {n}"
        if not isinstance(row, dict):
            raise ValueError(f"{where}: expected an object, found {row!r:.60}")
        name = get(row, "split", where)
        if name not in (*SPLITS, "restval"):
            raise ValueError(f"{where}: split {name!r}, expected train, restval, val or test")
        restval += name == "restval"
        add(splits["train" if name == "restval" else name], row, where)
    if restval:
        print(f"  train is {len(splits['train']) - restval:,} images of split train and "
              f"{restval:,} of restval")
    return splits


def add(split, row, where, image=None):
    image = image or os.path.join(str(row.get("filepath") or ""),
                                  get(row, "filename|image|file_name", where))
    found = get(row, "sentences|caption|captions|text|sentences_raw", where, (list, str, dict))
    texts = [get(c, "raw", where) if isinstance(c, dict) else c
             for c in (found if isinstance(found, list) else [found])]
    split.add(stem(image), texts, where, image.replace("\\", "/"))


def rows(args, files):
    """One file a split; a row may be an image with all its captions or a single caption of it."""
    splits = {s: Split(args) for s in SPLITS if s in files}
    for name, split in splits.items():
        for where, row in read_rows(files[name]):
            add(split, row, where)
    return splits


def precomp(args, files):
    """VSE++: a caption a line, five lines an image in order. No file says what it is called."""
    splits = {s: Split(args) for s in SPLITS if s in files}
    for name, split in splits.items():
        n = 0
        for n, (where, line) in enumerate(read_lines(files[name]), 1):
            split.add(f"{name}_{(n - 1) // 5:06d}", line, where, f"{name}_{(n - 1) // 5:06d}.jpg")
        if n % 5:
            raise ValueError(f"{files[name]} has {n} captions, not five an image")
    print("  this layout does not name the images: `video` is their number in the split")
    return splits


def parquet(args, files, default=None):
    """
    Files of the hub: one or more a split, or all together with a field `split`. Writes the images
    to <out>/images unless --videos has them.
    """
    from tasks import Packed, row_group, rows_of  # torch comes with it
    splits, folder = {s: Split(args) for s in SPLITS}, os.path.join(args.out, "images")
    for role, paths in files.items():
        for where, row in tqdm((r for path in paths for r in rows_of(path)), desc=role, unit="rows",
                               leave=False):
            name = row.get("split") or default or role
            name = {"restval": "train", "validation": "val"}.get(name, name)
            if name not in splits:
                raise ValueError(f"{where}: split {name!r}, expected train, restval, val or test")
            column = next((c for c in ("image", "img") if isinstance(row.get(c), Packed)), None)
            if column is None:
                add(splits[name], row, where)
                continue
            n = where.rsplit(" ", 1)[1]
            file = row.get("filename") or row.get("file_name") or f"{name}_{int(n):06d}.jpg"
            add(splits[name], row, where, file)
            if not args.videos and not os.path.isfile(os.path.join(folder, file)):
                packed = row[column]
                content = row_group(packed.file, packed.group, column)[packed.row].as_py() or {}
                if not content.get("bytes"):
                    raise ValueError(f"{where}: {column!r} holds no bytes, only the path "
                                     f"{content.get('path')!r}; set --videos to the images")
                os.makedirs(os.path.dirname(os.path.join(folder, file)), exist_ok=True)
                with open(os.path.join(folder, file + ".tmp"), "wb") as f:
                    f.write(content["bytes"])
                os.replace(os.path.join(folder, file + ".tmp"), os.path.join(folder, file))
    if os.path.isdir(folder) and not args.videos:
        args.videos = folder
        print(f"  the images are in {folder}: train.py's --video_root")
    return splits


def first_captions(splits, n=5):
    """Of the images that are evaluated on, the first five captions, as everybody has it."""
    for name in ("val", "test"):
        more = [line for line in (splits[name].lines.values() if name in splits else ())
                if len(line["captions"]) > n]
        for line in more:
            line["captions"] = line["captions"][:n]
        if more:
            print(f"  {name}: of {len(more):,} images with more than {n} captions the first {n} "
                  "are kept")


def image_set(args, layout, files):
    """-> splits, whichever the layout"""
    splits = (karpathy(args, files["all"]) if layout == "karpathy" else
              precomp(args, files) if layout == "precomp" else
              parquet(args, files) if layout == "hub" else rows(args, files))
    first_captions(splits)
    return splits
