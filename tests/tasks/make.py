"""
Writes the small sets beside it, made up, in the layouts in which the real ones are published.

python tests/tasks/make.py     # only after a change here: what it writes is checked in

Every image is of one colour, every text names colours, so that a model that counts colours (see
test_eval_tasks.py) gives scores that can be worked out by hand.
"""
import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

HERE = Path(__file__).parent
COLORS = dict(red=(255, 0, 0), green=(0, 255, 0), blue=(0, 0, 255), yellow=(255, 255, 0),
              cyan=(0, 255, 255), pink=(255, 0, 255), white=(255, 255, 255), black=(0, 0, 0))


def png(color):
    out = io.BytesIO()
    Image.new("RGB", (16, 16), COLORS[color]).save(out, "png")
    return out.getvalue()


def write(path, what):
    path = HERE / path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(what if isinstance(what, bytes) else json.dumps(what, indent=1).encode())


def parquet(path, rows, row_group_size=2, **types):
    """types: of the columns that do not follow from the rows; an image is a struct of the hub's."""
    path = HERE / path
    path.parent.mkdir(parents=True, exist_ok=True)
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    columns = {k: pa.array([r[k] for r in rows], image if k == "image" else types.get(k))
               for k in rows[0]}
    pq.write_table(pa.table(columns), path, row_group_size=row_group_size, write_statistics=False)


# color of the image: its captions
TEST = {"red": ["a red square", "red", "the red one", "it is red", "Red ."],
        "green": ["a green square", "green ", "the green one", "it is green", "a red or blue one"],
        "blue": ["blue", "a blue square", "the blue one", "blue blue", "red", "a yellow one"],
        "yellow": ["red and green", "yellow", "a red square", "the yellow one", "green red"]}


def karpathy(color, n, captions, split, file, **more):
    sentences = [{"tokens": c.lower().strip(" .").split(), "raw": c, "imgid": n,
                  "sentid": 10 * n + i} for i, c in enumerate(captions)]
    return {**more, "sentids": [s["sentid"] for s in sentences], "filename": file, "imgid": n,
            "split": split, "sentences": sentences}


def coco():
    images = []
    for n, (color, captions) in enumerate(TEST.items()):
        file = f"COCO_val2014_{n:012d}.jpg"
        images.append(karpathy(color, n, captions, "test", file, filepath="val2014", cocoid=n))
        write(f"coco/val2014/{file}", png(color))       # a png inside, as some real ones are
    for n, split in enumerate(("restval", "train", "val"), 4):
        images.append(karpathy("cyan", n, ["a cyan one"] * 5, split, f"COCO_val2014_{n:012d}.jpg",
                               filepath="val2014", cocoid=n))
    write("coco/dataset_coco.json", {"images": images, "dataset": "coco"})
    parquet("coco_hf/data/test-00000-of-00001.parquet",
            [{"image": {"bytes": png(color), "path": f"{n}.png"}, "text": captions}
             for n, (color, captions) in enumerate(TEST.items())])
    rows = [{"image": {"bytes": png(color), "path": None}, "filepath": "val2014",
             "filename": f"{color}.jpg", "split": "test",
             "sentences": {"raw": c, "imgid": n, "sentid": 10 * n + i}, "cocoid": n}
            for n, (color, captions) in enumerate(TEST.items()) for i, c in enumerate(captions)]
    parquet("coco_sentences/data/test-00000-of-00001.parquet", rows, row_group_size=8)


def flickr30k():
    images = []
    for n, (color, captions) in enumerate(TEST.items()):
        images.append(karpathy(color, n, captions[:5], "test", f"{1000 + n}.jpg"))
        write(f"flickr30k/flickr30k-images/{1000 + n}.jpg", png(color))
    images.append(karpathy("cyan", 4, ["a cyan one"] * 5, "train", "1004.jpg"))
    write("flickr30k/dataset_flickr30k.json", {"images": images, "dataset": "flickr30k"})
    # as the hub converts it: all splits in one file, told apart by a column
    parquet("flickr30k_hf/TEST/test/0000.parquet",
            [{"image": {"bytes": png(color), "path": None}, "caption": captions[:5],
              "sentids": [str(i) for i in range(5)], "split": split, "img_id": str(n),
              "filename": f"{n}.jpg"}
             for n, (color, captions, split) in enumerate(
                 [("cyan", ["a cyan one"] * 5, "train"), *((*x, "test") for x in TEST.items())])])


def karr():
    parquet("karr/data/train-00000-of-00001.parquet",
            [{"image": {"bytes": png(color), "path": None}, "text": captions[0]}
             for color, captions in TEST.items()])


def cirr():
    # name: color. The reference of the first query is nearest to it, its target second
    names = {f"dev-{n}-0-img0": color for n, color in
             enumerate(("red", "yellow", "green", "pink", "blue", "white", "cyan"))}
    for name, color in names.items():
        write(f"cirr/img_raw/dev/{name}.png", png(color))
    write("cirr/image_splits/split.rc2.val.json", {n: f"./dev/{n}.png" for n in names})
    at = {color: name for name, color in names.items()}

    def row(pair, reference, target, caption, members):
        members = [at[c] for c in members]
        return {"pairid": pair, "reference": at[reference], "target_hard": at[target],
                "target_soft": {at[target]: 1.0}, "caption": caption,
                "img_set": {"id": pair, "members": members,
                            "reference_rank": members.index(at[reference]),
                            "target_rank": members.index(at[target])}}

    first = ["red", "yellow", "green", "pink", "blue", "white"]
    rows = [row(1, "red", "yellow", "red, more red, and a little green", first),
            row(2, "green", "blue", "green", ["green", "blue", "pink", "red", "yellow", "white"])]
    write("cirr/captions/cap.rc2.val.json", rows)
    test = {k: v for k, v in rows[0].items() if not k.startswith("target")}
    write("cirr/captions/cap.rc2.test1.json", [test])
    write("cirr/image_splits/split.rc2.test1.json", {n: f"./dev/{n}.png" for n in names})


def fashioniq():
    # dress: a .png, shirt: a .jpg, as either occurs. The gallery is larger than the targets
    for category, end in (("dress", "png"), ("shirt", "jpg"), ("toptee", "png")):
        ids = {color: f"B00{category[0].upper()}{color.upper()}" for color in
               ("red", "green", "blue", "yellow", "cyan", "white")}
        for color, name in ids.items():
            write(f"fashioniq/images/{name}.{end}", png(color))
        write(f"fashioniq/captions/cap.{category}.val.json",
              [{"target": ids["yellow"], "candidate": ids["red"],
                "captions": ["is green.", "has longer sleeves"]},
               {"target": ids["white"], "candidate": ids["blue"],
                "captions": ["is more red", "is green, like grass?"]}])
        write(f"fashioniq/image_splits/split.{category}.val.json", list(ids.values()))


def mmeb():
    mark = "<|image_1|>\n"
    for color in COLORS:
        write(f"mmeb/images/sets/{color}.png", png(color))
    path = {color: f"sets/{color}.png" for color in COLORS} | {"": ""}

    def rows(*made):
        return [{"qry_text": q, "qry_img_path": path[i], "tgt_text": texts,
                 "tgt_img_path": [path[c] for c in images]} for q, i, texts, images in made]

    one = f"{mark}Represent the given image for classification\n"
    target = f"{mark}Represent the given image.\n"
    sets = {
        "ImageNet-1K": rows((one, "red", ["red", "green", "blue"], [""] * 3),
                            (one, "green", ["blue", "green", "red"], [""] * 3)),
        # the right answer is listed twice: it is one candidate, and found
        "GQA": rows((f"{mark}Represent the given image with the following question: which?\n",
                     "blue", ["blue", "red", "blue", "green"], [""] * 4)),
        "MSCOCO_t2i": rows(("Find me an everyday image that matches the given caption: red\n", "",
                            [target] * 3, ["red", "green", "blue"]),
                           ("Find me an everyday image that matches the given caption: blue\n", "",
                            [target] * 2, ["red", "blue"])),
        "RefCOCO-Matching": rows((f'{mark}Select the portion: "green"\n', "red",
                                  [f'{mark}Select the portion: "{c}"\n' for c in ("red", "blue")],
                                  ["green", "green"]))}
    for name, made in sets.items():
        parquet(f"mmeb/{name}/test-00000-of-00001.parquet", made, row_group_size=1000)


if __name__ == "__main__":
    for make in (coco, flickr30k, karr, cirr, fashioniq, mmeb):
        make()
