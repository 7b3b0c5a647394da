"""
Published files -> Tasks: COCO, Flickr30K, KARR-Bench, I2I, CIRR, FashionIQ and MMEB, from the files
that people have: Karpathy's or the authors' json with a folder of images, or HF parquet files.

    LOADERS[task](cfg) yields [Task]: queries, candidates, who is right, who is not asked
    Entry: prompt, text and/or image --Entries--> Sample(caption, frames uint8 [1, H, W, 3])

cfg: data, images, split, datasets, font and the prompts, see eval_tasks.py. A file that is not as
it should be stops with one line: which file, which row, what was expected.
"""
import glob
import json
import os
import sys
import tempfile
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import Dataset

from data import BadVideo, Sample, read_frames, resize, visible

IMAGE_FOLDERS = ("images", "flickr30k-images", "img_raw", "eval_images")  # below data
# MMEB's four groups: the data sets it has training data of (in distribution), then the others
MMEB = {
    "classification": ("ImageNet-1K N24News HatefulMemes VOC2007 SUN397",
                       "Place365 ImageNet-A ImageNet-R ObjectNet Country211"),
    "VQA": ("OK-VQA A-OKVQA DocVQA InfographicsVQA ChartQA Visual7W",
            "ScienceQA VizWiz GQA TextVQA"),
    "retrieval": ("VisDial CIRR VisualNews_t2i VisualNews_i2t MSCOCO_t2i MSCOCO_i2t NIGHTS WebQA",
                  "FashionIQ Wiki-SS-NQ OVEN EDIS"),
    "grounding": ("MSCOCO", "RefCOCO RefCOCO-Matching Visual7W-Pointing")}
MMEB_SETS = {name: (group, kind) for group, halves in MMEB.items()
             for kind, names in zip(("IND", "OOD"), halves) for name in names.split()}


class Packed(NamedTuple):
    """An image inside a parquet file, as HF `datasets` writes it: struct {bytes, path}."""
    file: str
    group: int            # row group
    row: int              # inside the group
    column: str


class Drawn(NamedTuple):
    """A text that is drawn as an image (I2I)."""
    text: str
    font: str


@dataclass(frozen=True)
class Entry:
    """What is encoded: equal ones are encoded once, and their scores are equal to the bit."""
    prompt: str
    text: str | None = None
    image: Any = None                              # a path, Packed, Drawn or None
    where: str = field(default="", compare=False)  # "file, row n", for errors


@dataclass
class Task:
    """Queries against candidates. own, excluded: indices of candidates, a list per query."""
    label: str
    queries: list         # tuples of Entries; of several, the features are summed before the norm
    candidates: list      # Entries
    positives: list       # indices of the right candidates; the best ranked counts
    own: list | None = None        # the only candidates of a query; None: all are
    excluded: list | None = None   # candidates that a query is not asked about
    ks: tuple = (1, 5, 10)         # R@K
    prefix: str = "R@"
    tags: dict = field(default_factory=dict)       # further fields of the result


# -----------------------------------------------------------------------------
# files -> rows

def find(data, patterns, what):
    """The files of the first pattern that has any below `data`; or data, if it is a file."""
    if os.path.isfile(data):
        return [data]
    if not os.path.isdir(data or "."):
        raise FileNotFoundError(f"data {data!r} is neither a folder nor a file; set --data to "
                                f"where {what} is")
    for pattern in patterns:
        hits = sorted(glob.glob(os.path.join(glob.escape(data), pattern)))
        if hits:
            return hits
    raise FileNotFoundError(f"{os.path.abspath(data)} holds nothing of {what}; expected "
                            f"{' or '.join(patterns)}")


def load_json(path, *kinds):
    """What a JSON file holds, which must be one of the kinds."""
    try:
        with open(path, encoding="utf-8-sig") as f:
            found = json.load(f)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{path} is no JSON file: {str(e).splitlines()[0]}") from None
    if not isinstance(found, kinds):
        raise ValueError(f"{path} holds a {type(found).__name__}, expected a "
                         f"{' or a '.join(k.__name__ for k in kinds)}")
    return found


def rows_of(path):
    """(where, row) of a parquet or a JSON file. An image in a parquet file stays there: Packed."""
    if path.endswith(".parquet"):
        yield from parquet_rows(path)
        return
    found = load_json(path, list, dict)
    if isinstance(found, dict):                    # Karpathy's files
        found = get(found, path, ["images"], list, "a list of images")
    for n, row in enumerate(found, 1):
        if not isinstance(row, dict):
            raise ValueError(f"{path}, row {n}: expected an object, found {row!r:.60}")
        yield f"{path}, row {n}", row


def open_parquet(path):
    try:
        import pyarrow.parquet as pq               # only who has parquet files needs it
    except ImportError:
        raise ValueError(f"reading {path} needs the package pyarrow: pip install pyarrow") from None
    try:
        return pq.ParquetFile(path)
    except Exception as e:  # pyarrow's own kinds, and OSError
        raise ValueError(f"{path} is no parquet file ({str(e).splitlines()[0]}); was only its "
                         "git-lfs pointer fetched?") from None


def parquet_rows(path):
    file = open_parquet(path)
    packed = [f.name for f in file.schema_arrow
              if str(f.type).startswith("struct") and f.type.get_field_index("bytes") >= 0]
    plain = [name for name in file.schema_arrow.names if name not in packed]
    n = 0
    for group in range(file.num_row_groups):
        for i, row in enumerate(file.read_row_group(group, columns=plain).to_pylist()):
            n += 1
            yield f"{path}, row {n}", row | {c: Packed(path, group, i, c) for c in packed}


def get(row, where, names, kind, want):
    """row's value of the first name that it has, which must be of `kind`."""
    name = next((n for n in names if row.get(n) is not None), None)
    if name is None:
        raise ValueError(f"{where}: no field {' or '.join(map(repr, names))} ({want}); its fields "
                         f"are {', '.join(map(str, row)) or 'none'}")
    if not isinstance(row[name], kind):
        raise ValueError(f"{where}: {name!r} must be {want}, found {row[name]!r:.60}")
    return row[name]


def clean(text, where, name="caption"):
    if not isinstance(text, str) or not visible(text):
        raise ValueError(f"{where}: {name} {text!r:.60} is no text")
    return text.strip()


def image_root(cfg):
    """The folder of the images."""
    if cfg.images:
        if not os.path.isdir(cfg.images):
            raise FileNotFoundError(f"images {cfg.images!r} is no folder")
        return cfg.images
    folder = os.path.dirname(cfg.data) if os.path.isfile(cfg.data) else cfg.data
    there = (os.path.join(folder, name) for name in IMAGE_FOLDERS)
    return next(filter(os.path.isdir, there), folder)


# -----------------------------------------------------------------------------
# rows -> tasks. A loader yields lists of Tasks whose entries are encoded together

def captions_of(row, where):
    """All captions of a row: Karpathy's sentences, or a text or a list of texts."""
    found = get(row, where, ["sentences", "caption", "captions", "text", "sentences_raw"],
                (str, list, dict), "captions")
    found = found if isinstance(found, list) else [found]
    found = [get(c, where, ["raw"], str, "a caption") if isinstance(c, dict) else c for c in found]
    if not found:
        raise ValueError(f"{where}: it has no caption")
    return [clean(c, where) for c in found]


def image_of(row, where, root):
    found = next((row[c] for c in ("image", "img") if isinstance(row.get(c), Packed)), None)
    if found is not None:
        return found
    name = get(row, where, ["image", "filename", "file_name"], str, "the image's file")
    return os.path.join(root, row.get("filepath") or "", name)


def captioned_images(cfg, what, files, n_captions):
    """[(image, captions, where)] of a split; the first n_captions of each image."""
    paths = find(cfg.data, [f.format(split=cfg.split) for f in files], what)
    root, found, splits = image_root(cfg), {}, set()
    for path in paths:
        for where, row in rows_of(path):
            splits.add(row.get("split"))
            if row.get("split", cfg.split) != cfg.split:
                continue
            image = image_of(row, where, root)
            # some parquet files have a row per sentence, and the image once more in each of them
            key = row.get("filename") if isinstance(row.get("sentences"), dict) else None
            found.setdefault(key or where, (image, [], where))[1].extend(captions_of(row, where))
    if not found:
        raise ValueError(f"{paths[0]} has no row of split {cfg.split!r}; it has "
                         f"{', '.join(sorted(map(str, splits))) or 'no rows'}")
    return [(image, captions[:n_captions], where) for image, captions, where in found.values()]


def caption_tasks(name, files, n_captions, drawn=False):
    """COCO and its like: every caption asks for its image, every image for one of its captions."""
    def load(cfg):
        sets = captioned_images(cfg, name, files, n_captions)
        pictures = [Entry(cfg.image_prompt, image=image, where=where) for image, _, where in sets]
        texts = [Entry(cfg.image_prompt, image=Drawn(c, cfg.font), where=where) if drawn else
                 Entry(cfg.text_prompt, c, where=where) for _, cs, where in sets for c in cs]
        owner = [i for i, (_, cs, _) in enumerate(sets) for _ in cs]
        mine = [[] for _ in sets]
        for t, i in enumerate(owner):
            mine[i].append(t)
        text = "drawn caption" if drawn else "text"
        yield [Task(f"{text} -> image", [(t,) for t in texts], pictures, [[i] for i in owner]),
               Task(f"image -> {text}", [(p,) for p in pictures], texts, mine)]
    return load


def cirr(cfg):
    """CIRR: an image and how the wanted one differs; the image itself is not asked about."""
    file = find(cfg.data, [f"captions/cap.rc2.{cfg.split}.json", f"cap.rc2.{cfg.split}.json"],
                "CIRR")[0]
    names = load_json(find(os.path.dirname(file), [f"../image_splits/split.rc2.{cfg.split}.json",
                                                   f"split.rc2.{cfg.split}.json"], "CIRR")[0], dict)
    root, index = image_root(cfg), {name: i for i, name in enumerate(names)}
    gallery = [Entry(cfg.cirr_target_prompt, image=os.path.join(root, os.path.normpath(path)),
                     where=f"{file}, image {name}") for name, path in names.items()]

    def at(name, where):
        if name not in index:
            raise ValueError(f"{where}: image {name!r} is not in split.rc2.{cfg.split}.json")
        return index[name]

    queries, right, reference, group = [], [], [], []
    for where, row in rows_of(file):
        if "target_hard" not in row:
            raise ValueError(f"{where}: no 'target_hard': the answers of this split are with the "
                             "organisers' server; use --split=val")
        ref = at(get(row, where, ["reference"], str, "an image's name"), where)
        text = clean(get(row, where, ["caption"], str, "a text"), where)
        queries.append((Entry(cfg.cirr_prompt, text, gallery[ref].image, where),))
        right.append([at(get(row, where, ["target_hard"], str, "an image's name"), where)])
        reference.append([ref])
        members = get(row, where, ["img_set"], dict, "an object").get("members", [])
        group.append([i for i in (at(m, where) for m in members) if i != ref])
        if right[-1][0] not in group[-1]:
            raise ValueError(f"{where}: the target is not among the members of its img_set")
    yield [Task("image + text -> image", queries, gallery, right, excluded=reference,
                ks=(1, 5, 10, 50)),
           Task("the same, inside its img_set", queries, gallery, right, own=group, ks=(1, 2, 3),
                prefix="Rs@")]


def fashioniq(cfg):
    """FashionIQ: two captions say how the wanted garment differs; both orders are summed."""
    for category in chosen(cfg.datasets, ("dress", "shirt", "toptee")):
        file = find(cfg.data, [f"{folder}cap.{category}.{cfg.split}.json"
                               for folder in ("captions/", "")], "FashionIQ")[0]
        split_file = find(os.path.dirname(file), [f"{folder}split.{category}.{cfg.split}.json"
                                                  for folder in ("../image_splits/", "")],
                          "FashionIQ")[0]
        root, names = image_root(cfg), load_json(split_file, list)
        garment = "dress" if category == "dress" else "shirt"
        prompt, target_prompt = (p.replace("{garment}", garment) for p in
                                 (cfg.fashioniq_prompt, cfg.fashioniq_target_prompt))
        index = {name: i for i, name in enumerate(names)}
        gallery = [Entry(target_prompt, image=with_suffix(root, name, split_file),
                         where=f"{split_file}, image {name}") for name in names]
        queries, right = [], []
        for where, row in rows_of(file):
            target = get(row, where, ["target"], str, "an image's name")
            if target not in index:
                raise ValueError(f"{where}: target {target!r} is not in {split_file}")
            image = with_suffix(root, get(row, where, ["candidate"], str, "an image's name"), where)
            two = [clean(c, where).strip(".?, ")
                   for c in get(row, where, ["captions"], list, "a list of texts")]
            queries.append(tuple(Entry(prompt, ", ".join(order), image, where)
                                 for order in (two, two[::-1])))
            right.append([index[target]])
        yield [Task(category, queries, gallery, right, ks=(10, 50))]


def with_suffix(root, name, where):
    """FashionIQ's lists hold names without .png or .jpg."""
    if not isinstance(name, str):
        raise ValueError(f"{where}: expected an image's name, found {name!r:.60}")
    paths = [os.path.join(root, name + end) for end in (".png", ".jpg", ".jpeg")]
    return next(filter(os.path.isfile, paths), paths[0])


def mmeb(cfg):
    """MMEB: every query has candidates of its own, the first one is right."""
    if not os.path.isdir(cfg.data or "."):
        raise FileNotFoundError(f"data {cfg.data!r} is no folder; set --data to where MMEB-eval is")
    root = image_root(cfg)
    there = [name for name in MMEB_SETS if os.path.exists(os.path.join(cfg.data, name))]
    names = chosen(cfg.datasets, MMEB_SETS) if cfg.datasets else there
    if not names:
        raise FileNotFoundError(f"{os.path.abspath(cfg.data)} holds no data set of MMEB; expected "
                                f"<name>/{cfg.split}-00000-of-00001.parquet, of "
                                f"{', '.join(MMEB_SETS)}")

    def entry(text, path, where):
        # a text marks where its image goes, which is always in front
        text = text.replace("<|image_1|>", "").strip()
        if not text and not path:
            raise ValueError(f"{where}: neither text nor image")
        prompt = ("{caption}" if not path else cfg.mmeb_prompt if text else "<video>")
        return Entry(prompt, text or None, os.path.join(root, path) if path else None, where)

    for name in names:
        candidates, queries, own, right = {}, [], [], []
        for path in find(os.path.join(cfg.data, name), [f"{cfg.split}-*.parquet",
                                                        f"{cfg.split}/*.parquet",
                                                        f"{cfg.split}.json"], name):
            for where, row in rows_of(path):
                text, image = (get(row, where, [key], str, "a string")
                               for key in ("qry_text", "qry_img_path"))
                texts, paths = (get(row, where, [key], list, "a list of strings")
                                for key in ("tgt_text", "tgt_img_path"))
                if len(texts) != len(paths) or not texts:
                    raise ValueError(f"{where}: {len(texts)} 'tgt_text' and {len(paths)} "
                                     "'tgt_img_path'; expected as many of both")
                queries.append((entry(text, image, where),))
                # a candidate that is listed twice is one candidate
                mine = [candidates.setdefault(entry(t, p, where), len(candidates))
                        for t, p in zip(texts, paths)]
                own.append(list(dict.fromkeys(mine)))
                right.append(mine[:1])
        group, kind = MMEB_SETS[name]
        yield [Task(name, queries, list(candidates), right, own=own, ks=(1,), prefix="P@",
                    tags={"group": group, "distribution": kind})]


def chosen(names, known):
    """The names of a comma-separated list, each one of `known`; all of them for an empty one."""
    names = [n.strip() for n in names.split(",") if n.strip()]
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            raise ValueError(f"datasets: {name!r} is unknown" + (f", did you mean {near[0]!r}?" if
                             near else f"; there are {', '.join(known)}"))
    return names or list(known)


# an HF data set as it is uploaded, as the hub converts it, and as people rename it
HF = ["data/{split}-*.parquet", "{split}-*.parquet", "*/{split}/*.parquet", "{split}.parquet",
      "*.parquet"]
COCO = ["dataset_coco.json", "*/dataset_coco.json", "coco_karpathy_{split}.json",
        "*/coco_karpathy_{split}.json", *HF]
FLICKR = ["dataset_flickr30k.json", "*/dataset_flickr30k.json", "flickr30k_{split}.json",
          "*/flickr30k_{split}.json", *HF]
# KARR-Bench's authors load it as an HF data set of `image` and `text` whose one split is `train`;
# it was not public when this was written
KARR = ["karr*.json", *HF[:-1], "data/train-*.parquet", "train-*.parquet", "*.parquet"]
LOADERS = {"coco": caption_tasks("COCO", COCO, 5),
           "flickr30k": caption_tasks("Flickr30K", FLICKR, 5),
           "karr": caption_tasks("KARR-Bench", KARR, 1),
           "i2i_coco": caption_tasks("COCO", COCO, 5, drawn=True),
           "i2i_flickr30k": caption_tasks("Flickr30K", FLICKR, 5, drawn=True),
           "cirr": cirr, "fashioniq": fashioniq, "mmeb": mmeb}


# -----------------------------------------------------------------------------
# images -> frames

def frames_of(image, size):
    """A path, Packed or Drawn -> uint8 [1, H, W, 3]; BadVideo when it cannot be read."""
    if isinstance(image, Drawn):
        return resize(draw(image.text, image.font), size)[None]
    if isinstance(image, str):
        return read_frames(image, 1, size=size)
    content = row_group(image.file, image.group, image.column)[image.row].as_py() or {}
    if not content.get("bytes"):
        raise BadVideo(f"its {image.column!r} holds no bytes, only the path "
                       f"{content.get('path')!r}")
    # through a file, so that there is one way of decoding
    with tempfile.NamedTemporaryFile(suffix=os.path.splitext(content.get("path") or "")[1]) as f:
        f.write(content["bytes"])
        f.flush()
        try:
            return read_frames(f.name, 1, size=size)
        except BadVideo as e:
            raise BadVideo(str(e).replace(f.name, f"its {image.column!r}")) from None


@lru_cache(maxsize=1)     # images are read in the order of their rows: a group at a time in memory
def row_group(file, group, column):
    return open_parquet(file).read_row_group(group, columns=[column]).column(0)


@lru_cache
def load_font(name, size):
    """-> (Pillow's font, the name of what is really used)"""
    from PIL import ImageFont                      # only I2I needs it
    try:
        loaded = ImageFont.truetype(name, size)    # also looks into the system's font folders
        return loaded, " ".join(loaded.getname())
    except OSError:
        return ImageFont.load_default(size), "Pillow's built-in font"


def draw(text, font, width=800, height=400, size=40, margin=20):
    """
    uint8 [400, 800, 3]: the text black on white, 40 px, broken between words, in the middle.
    A text too long for the image is drawn smaller; SLQ's own script lets it run over the edge.
    """
    from PIL import Image, ImageDraw
    canvas = Image.new("RGB", (width, height), "white")
    pen = ImageDraw.Draw(canvas)
    while True:
        drawn_with, lines = load_font(font, size)[0], [""]
        for word in text.split():
            longer = f"{lines[-1]} {word}".strip()
            if lines[-1] and pen.textlength(longer, drawn_with) > width - 2 * margin:
                lines.append(word)
            else:
                lines[-1] = longer
        step = round(1.2 * size)
        if step * len(lines) <= height or size <= 8:
            break
        size -= 2
    top = (height - step * len(lines)) // 2
    for n, line in enumerate(lines):
        pen.text((margin, top + n * step), line, "black", drawn_with)
    return np.asarray(canvas)


class Entries(Dataset):
    """One Sample per Entry. With on_bad_video=skip an unreadable image comes with `error` set."""

    def __init__(self, entries, size, on_bad_video):
        if on_bad_video not in ("raise", "skip"):
            raise ValueError(f"on_bad_video {on_bad_video!r} is not one of raise, skip")
        self.entries, self.size, self.on_bad_video = entries, size, on_bad_video

    def __len__(self):
        return len(self.entries)

    def __getitem__(self, i):
        e, frames, error = self.entries[i], None, None
        try:
            if isinstance(e.image, str) and not os.path.isfile(e.image):
                raise BadVideo(f"no image {e.image}; set --images to the folder it is in, or "
                               "--on_bad_video=skip")
            frames = None if e.image is None else frames_of(e.image, self.size)
        except BadVideo as bad:
            error = f"{e.where}: {bad}"
            if self.on_bad_video == "raise":
                raise BadVideo(error) from None
            print(f"skipped: {error}", file=sys.stderr, flush=True)
        return Sample(e.where, e.text, frames, i, error)
