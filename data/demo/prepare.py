"""
Renders the demo data: short H.264 clips of two events in sequence, captions from a grammar.

    python data/demo/prepare.py               # train 3000, val 200, test 500 clips, then a no-op

An event is (size, colour, shape, motion); a clip is a pair of events. The galleries are
adversarial: most clips come in families of four that a bag of words (or of frames) confuses, see
`families`. No pair of events of a split occurs, in either order, in another one, and pretrain.py
skips those of val and test too.

clip (event1, event2) --render--> uint8 [T, S, S, 3] --write_mp4--> videos/<id>.mp4
                      --captions--> sentences -----------------> {train,val,test}.jsonl
The same settings give the same decoded pixels and the same sentences on every run.
"""
import argparse
import hashlib
import json
import multiprocessing
import os
import sys
from pathlib import Path

import numpy as np
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
FRAMES, FPS, SIDE = 24, 12, 96  # 24 frames at 12 per second: two events of about a second each

# --------------------------------------------------------------------------------------------------
# The grammar: what can happen, and the words for it (the first word is the usual one)

SIZES = {"small": ["small", "little", "tiny"], "large": ["large", "big", "huge"]}
COLOURS = {  # RGB; the backgrounds are dull and at most half bright, so that all of these stand out
    "red": (222, 40, 44), "green": (44, 190, 70), "blue": (52, 92, 236), "yellow": (244, 222, 56),
    "purple": (160, 62, 204), "orange": (246, 138, 30), "white": (246, 246, 246)}
COLOUR_WORDS = {c: [c] for c in COLOURS} | {"purple": ["purple", "violet"]}
SHAPES = {"circle": ["circle", "disc"], "square": ["square", "box"], "triangle": ["triangle"],
          "star": ["star"], "cross": ["cross", "plus sign"], "ring": ["ring", "hoop"]}
MOTIONS = {  # (finite verb, participle); every form of a motion means exactly the same
    "left": [("moves left", "moving left"), ("slides to the left", "sliding to the left"),
             ("goes leftwards", "going leftwards")],
    "right": [("moves right", "moving right"), ("slides to the right", "sliding to the right"),
              ("goes rightwards", "going rightwards")],
    "up": [("moves up", "moving up"), ("rises", "rising"), ("climbs upwards", "climbing upwards")],
    "down": [("moves down", "moving down"), ("sinks", "sinking"),
             ("drops downwards", "dropping downwards")],
    "grow": [("grows", "growing"), ("gets bigger", "getting bigger"), ("expands", "expanding")],
    "shrink": [("shrinks", "shrinking"), ("gets smaller", "getting smaller"),
               ("contracts", "contracting")],
    "spin": [("spins", "spinning"), ("rotates", "rotating"), ("turns around", "turning around")],
    "still": [("stays still", "staying still"), ("does not move", "not moving"),
              ("rests in place", "resting in place")]}
REVERSE = {"left": "right", "right": "left", "up": "down", "down": "up", "grow": "shrink",
           "shrink": "grow"}
PATTERNS = [  # A comes first in time, B second; sentence order and event order are not the same
    "{A} {va}, then {B} {vb}", "first {A} {va}, and then {B} {vb}", "{A} {va} before {B} {vb}",
    "{A} {va}, followed by {B} {ib}", "{B} {vb} after {A} {va}", "after {A} {va}, {B} {vb}",
    "before {B} {vb}, {A} {va}", "{B} {vb}, but first {A} {va}"]


def random_event(rng):
    while True:
        event = tuple(str(rng.choice(list(kind))) for kind in (SIZES, COLOURS, SHAPES, MOTIONS))
        if not (event[3] == "spin" and event[2] in ("circle", "ring")):  # would look still
            return event


def random_clip(rng):
    """Two events. Colours differ, so that swapping them always makes another clip."""
    while True:
        first, second = random_event(rng), random_event(rng)
        if first[1] != second[1]:
            return first, second


def unordered(clip):
    return tuple(sorted(clip))


def families(n, rng, taken=()):
    """n adversarial clips as (clip, kind, family): three more clips for every base clip. None of
    them is in `taken` (unordered pairs).

    order   the same two events the other way round: the same words in the captions
    colour  the two colours exchanged: the same words again
    motion  one event's motion reversed: the same still frames in another order
    A tenth of the clips are `single`: nothing in the gallery was made to look like them.
    """
    out, seen, taken, family = [], set(), set(taken), 0
    while len(out) < n:
        first, second = random_clip(rng)
        single = len(out) >= n - n // 10 or len(out) + 4 > n
        moving = [k for k, event in enumerate((first, second)) if event[3] in REVERSE]
        if not single and not moving:
            continue
        group = {"single" if single else "base": (first, second)}
        if not single:
            turned = [first, second]
            k = int(rng.choice(moving))
            turned[k] = turned[k][:3] + (REVERSE[turned[k][3]],)
            group["order"] = (second, first)
            group["colour"] = tuple((a[0], b[1]) + a[2:] for a, b in
                                    ((first, second), (second, first)))
            group["motion"] = tuple(turned)
        if len(set(group.values())) < len(group) or seen & set(group.values()):
            continue  # e.g. two events that differ in nothing but the colour
        if taken & {unordered(clip) for clip in group.values()}:
            continue
        seen |= set(group.values())
        out += [(clip, kind, family) for kind, clip in group.items()]
        family += 1
    return out


def random_clips(n, rng, taken):
    """n clips, all different and none of them in `taken` (unordered pairs)."""
    out = []
    taken = set(taken)
    while len(out) < n:
        clip = random_clip(rng)
        if unordered(clip) not in taken:
            taken.add(unordered(clip))
            out.append(clip)
    return out


def phrases(event, rng):
    """Words for one event: 'a tiny red disc' and the two forms of a verb."""
    pick = lambda options: options[int(rng.integers(len(options)))]
    size, colour, shape, motion = event
    noun = f"a {pick(SIZES[size])} {pick(COLOUR_WORDS[colour])} {pick(SHAPES[shape])}"
    return noun, pick(MOTIONS[motion])


def caption(clip, rng, pattern=None):
    """One sentence for a clip. The words and the pattern are drawn with rng."""
    (a, (va, _)), (b, (vb, ib)) = (phrases(event, rng) for event in clip)
    if pattern is None:
        pattern = int(rng.integers(len(PATTERNS)))
    return PATTERNS[pattern].format(A=a, B=b, va=va, vb=vb, ib=ib)


def captions(clip, rng, n):
    """n sentences of n different patterns: paraphrases of each other."""
    return [caption(clip, rng, int(p)) for p in rng.permutation(len(PATTERNS))[:n]]


# --------------------------------------------------------------------------------------------------
# Pixels

def signed_distance(shape, x, y):
    """Distance to the border of a shape of radius 1, negative inside; x, y float arrays."""
    if shape == "circle":
        return np.hypot(x, y) - 1.0
    if shape == "ring":
        return np.abs(np.hypot(x, y) - 0.76) - 0.24
    if shape == "square":
        return np.maximum(np.abs(x), np.abs(y)) - 0.84
    if shape == "cross":
        x, y = np.abs(x), np.abs(y)
        return np.minimum(np.maximum(x - 1.0, y - 0.33), np.maximum(x - 0.33, y - 1.0))
    if shape == "triangle":  # three half planes; y points down, so one corner is up
        slope = np.abs(x) * 0.866 - y * 0.5
        return np.maximum(slope - 0.55, y - 0.55)
    # a five-pointed star: fold the angle into half a point, then one straight edge per half point
    inner, step = 0.45, np.pi / 5
    angle = np.arctan2(x, -y)
    angle = np.abs((angle + step) % (2 * step) - step)  # 0 at a tip, pi/5 between two tips
    r = np.hypot(x, y)
    ax, ay = inner * np.sin(step), inner * np.cos(step) - 1.0  # from the tip to the inner corner
    return ((r * np.cos(angle) - 1.0) * -ax + r * np.sin(angle) * ay) * -1.0 / np.hypot(ax, ay)


def trajectory(motion, size, rng, T):
    """Centre x, y, radius (in image widths) and angle, float [T] each, of one event."""
    u = np.linspace(-1.0, 1.0, T)
    x, y = rng.uniform(0.36, 0.64, 2)
    x, y = np.full(T, x), np.full(T, y)
    radius = np.full(T, (0.135 if size == "small" else 0.235) * rng.uniform(0.93, 1.07))
    angle = np.full(T, rng.uniform(-0.12, 0.12))
    if motion in ("left", "right"):
        x = 0.5 + (u if motion == "right" else -u) * rng.uniform(0.22, 0.30)
    elif motion in ("up", "down"):
        y = 0.5 + (u if motion == "down" else -u) * rng.uniform(0.22, 0.30)
    elif motion in ("grow", "shrink"):
        radius = radius * 1.45 ** (u if motion == "grow" else -u)
    elif motion == "spin":  # 160 degrees: no shape comes back to itself between two sampled frames
        angle = angle + (u + 1.0) * 1.4 * rng.choice((-1.0, 1.0))
    return x, y, radius, angle


def background(rng, side):
    """A dull static picture, float [S, S, 3]: gradient, stripes, checks or plain, plus grain."""
    grid = (np.arange(side, dtype=np.float32) + 0.5) / side - 0.5
    x, y = np.meshgrid(grid, grid)
    turn = rng.uniform(0, 2 * np.pi)
    along, across = x * np.cos(turn) + y * np.sin(turn), y * np.cos(turn) - x * np.sin(turn)
    freq = rng.uniform(2.0, 5.0) * 2 * np.pi
    kind = rng.choice(("gradient", "stripes", "checks", "plain"))
    mix = {"gradient": along + 0.5, "stripes": 0.5 + 0.5 * np.sin(along * freq), "plain": 0 * x,
           "checks": 0.5 + 0.5 * np.sign(np.sin(along * freq) * np.sin(across * freq))}[kind]
    base = rng.uniform(20, 95) + rng.uniform(-18, 18, 3)
    other = base + rng.uniform(-22, 22) + rng.uniform(-10, 10, 3)
    picture = base + (other - base) * mix[..., None]
    return (picture + rng.normal(0, 3.0, (side, side, 1))).astype(np.float32)


def script(clip, seed, frames=FRAMES):
    """What is drawn in each frame: a list of (event 0 or 1, x, y, radius, angle, paint)."""
    rng = np.random.default_rng([*np.atleast_1d(seed), 1])
    cut = frames // 2 + int(rng.integers(-1, 2))  # when the second event starts
    out = []
    for k, ((size, colour, _, motion), length) in enumerate(zip(clip, (cut, frames - cut))):
        paint = np.clip(np.array(COLOURS[colour]) + rng.uniform(-9, 9, 3), 0, 255)
        out += [(k, *state, paint) for state in zip(*trajectory(motion, size, rng, length))]
    return out


def render(clip, seed, side=SIDE, frames=FRAMES, keep=None):
    """Draw a clip, uint8 [T, S, S, 3]. `keep` draws only those frames, with the same pixels."""
    rng = np.random.default_rng(seed)
    scene = background(rng, side)
    grid = (np.arange(side, dtype=np.float32) + 0.5) / side
    out = []
    for f, (k, x, y, radius, angle, paint) in enumerate(script(clip, seed, frames)):
        if keep is not None and f not in keep:
            continue
        picture = scene.copy()                                               # [S, S, 3]
        # only the pixels that the shape can touch, in units of its radius
        reach = 1.1 * radius + 1 / side
        rows, columns = (np.flatnonzero(np.abs(grid - c) < reach) for c in (y, x))
        box = np.s_[rows[0]:rows[-1] + 1, columns[0]:columns[-1] + 1]
        dx, dy = (grid[columns] - x)[None, :] / radius, (grid[rows] - y)[:, None] / radius
        c, s = np.cos(angle), np.sin(angle)
        d = signed_distance(clip[k][2], dx * c + dy * s, dy * c - dx * s) * radius * side
        cover = np.clip(0.5 - d, 0, 1)[..., None]                            # anti-aliased edge
        shade = 1.0 - 0.14 * np.clip(dy, -1, 1)[..., None]                   # light from above
        picture[box] += (np.clip(paint * shade, 0, 255) - picture[box]) * cover
        noise = np.random.default_rng([*np.atleast_1d(seed), 2, f])
        picture += 2.0 * noise.standard_normal((side, side, 1), dtype=np.float32)
        out.append(np.clip(picture + 0.5, 0, 255).astype(np.uint8))
    return np.stack(out)


def write_mp4(path, video, fps=FPS):
    """H.264 in an .mp4 file. One thread and no B-frames: the same bytes every time."""
    import av
    part = str(path) + ".tmp"
    with av.open(part, "w", format="mp4") as container:
        # mbtree makes some builds of x264 choose differently from run to run, even in one thread
        options = {"crf": "20", "preset": "veryfast", "threads": "1",
                   "x264-params": "bframes=0:mbtree=0"}
        stream = container.add_stream("libx264", rate=fps, options=options)
        stream.height, stream.width, stream.pix_fmt = video.shape[1], video.shape[2], "yuv420p"
        for picture in video:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    os.replace(part, path)


# --------------------------------------------------------------------------------------------------
# Splits and files

def splits(seed, n_train, n_val, n_test):
    """{"train" | "val" | "test": list of jsonl records}, the same for the same arguments."""
    out, taken = {}, set()
    for k, (split, n) in enumerate((("test", n_test), ("val", n_val), ("train", n_train))):
        clips = families(n, np.random.default_rng([seed, k]), taken)
        taken |= {unordered(clip) for clip, _, _ in clips}
        rng = np.random.default_rng([seed, 3, k])
        out[split] = []
        for i, (clip, kind, family) in enumerate(clips):
            name = f"{split}_{i:05d}"
            out[split].append({"id": name, "video": name + ".mp4",
                               "captions": captions(clip, rng, 2),
                               "events": clip, "kind": kind, "family": family})
    return out


def held_out(seed=1337, n_val=200, n_test=500):
    """Unordered event pairs that pretraining must not see: those of the test and the val split."""
    records = splits(seed, 0, n_val, n_test)
    return {unordered(tuple(map(tuple, r["events"]))) for k in ("val", "test") for r in records[k]}


def render_file(job):
    clip, seed, path = job
    write_mp4(path, render(clip, seed))


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE, help="where to write")
    parser.add_argument("--train", type=int, default=3000, help="clips in the training split")
    parser.add_argument("--val", type=int, default=200, help="clips in the validation split")
    parser.add_argument("--test", type=int, default=500, help="clips in the test gallery")
    parser.add_argument("--seed", type=int, default=1337, help="everything is drawn from it")
    parser.add_argument("--processes", type=int, default=2, help="rendering processes")
    args = parser.parse_args()
    for name, least in (("train", 1), ("val", 1), ("test", 1), ("seed", 0), ("processes", 1)):
        if getattr(args, name) < least:
            sys.exit(f"prepare.py: --{name} is {getattr(args, name)}, the least is {least}")

    records = splits(args.seed, args.train, args.val, args.test)
    settings = [args.seed, args.train, args.val, args.test, Path(__file__).read_text()]
    stamp = hashlib.sha256(json.dumps(settings).encode()).hexdigest()
    folder = args.out / "videos"
    done = folder / "stamp"  # inside videos/, so that removing the videos removes it too
    listed = [args.out / f"{split}.jsonl" for split in records]
    if done.is_file() and done.read_text() == stamp and all(f.is_file() for f in listed):
        have = set(os.listdir(folder))
        if all(r["video"] in have for split in records.values() for r in split):
            print(f"{folder}: already rendered ({len(have) - 1} files)")
            return

    folder.mkdir(parents=True, exist_ok=True)
    done.unlink(missing_ok=True)
    jobs = [(r["events"], [args.seed, 4, k, i], folder / r["video"])
            for k, split in enumerate(records.values()) for i, r in enumerate(split)]
    with multiprocessing.Pool(args.processes) as pool:
        for _ in tqdm(pool.imap_unordered(render_file, jobs, chunksize=8), total=len(jobs),
                      desc="rendering", unit="clip"):
            pass
    for split, path in zip(records.values(), listed):
        part = path.with_name(path.name + ".tmp")
        part.write_text("".join(json.dumps(r) + "\n" for r in split))
        os.replace(part, path)
    done.write_text(stamp)  # last: an interrupted run starts over
    counts = ", ".join(f"{name} {len(split)}" for name, split in records.items())
    print(f"{args.out}: {counts} clips")


if __name__ == "__main__":
    main()
