"""
An index on disk: json, jsonl and safetensors, data that any language reads and nothing that runs.

    index.json      {"format": 3, "run": what the embeddings depend on, "moments": s, "dtype"}
    videos.jsonl    a line per video, sorted by path: {"path" below the folder, with /; "size",
                    "mtime_ns", "digest": of a sample of its bytes; "end": its length in seconds;
                    "moments": [[start, end], ...]; "of": a digest of index.json; "shard", "row":
                    where its Features begin; "bytes", "crc32": the shard's size and checksum}
    shard-*.safetensors   name -> [rows, ...]; a video's rows are its moments, then the whole. The *
                          is a digest of the videos' lines up to "of"
    new/*.safetensors     one video each, read since videos.jsonl was written; the line is in the
                          file's metadata, under "video", a checksum of the tensors under "crc32"

int8: x is `x` * `x.scale`, one scale per vector (the last axis); weights and masks, whose names
have a _, stay fp32. Every file is written under another name, then renamed. What ends up in which
shard follows from the paths and sizes alone, so an index is the same to the byte whatever its
history: killed and resumed, or made at once. A kill costs the video that is being read; damage,
which `index` looks for in every byte, costs the videos of the damaged shard.
"""
import hashlib
import itertools
import json
import os
import re
import stat
import zlib

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from checkpoint import lock, read, write_atomic

FORMAT = 3
ROWS = 4096        # a shard ends with the video that brings it to so many rows,
SPREAD = 1024      # or with one in so many, by a hash of its path: a new video moves few others
CHECKED = 2 ** 30  # bytes of an index whose checksums a query compares; of more, all but those
PLACE = ("shard", "row", "bytes", "crc32", "was")  # what a line has besides its video
EXTENSIONS = set("3g2 3gp asf avi divx f4v flv gif m2ts m4v mkv mov mp4 mpeg mpg mts mxf ogm ogv "
                 "rm rmvb ts vob webm wmv y4m".split())
SHARD = re.compile(r"shard-[0-9a-f]{16}\.safetensors")
OURS = re.compile(r"((shard-[0-9a-f]{16}|[0-9a-f]{32})\.safetensors|(videos|index)\.jsonl?)"
                  r"(\.\d+\.tmp)?")


# -----------------------------------------------------------------------------
# the folder of videos

def inside(root, path):
    """The file `path` below root; ValueError if it leads out, by .. or by a link."""
    parts = path.split("/") if isinstance(path, str) else [".."]
    if os.path.isabs(path) or "\0" in path or {"", ".", ".."} & {*parts}:
        raise ValueError(f"{path!r} is no path below {root}")
    full, base = os.path.join(root, *parts), os.path.realpath(root)
    real = os.path.realpath(full)
    if os.path.commonpath([real, base]) != base or {"", ".."} & {*real.split(os.sep)[1:]}:
        raise ValueError(f"{path!r} leads out of {root}")
    return full


def videos_in(root):
    """
    -> ({path: (size, mtime_ns)}, {path: why it can't be read}, links that lead out, other files)

    Recursive; hidden files and folders and links to folders are passed over.
    """
    found, bad, links, others = {}, {}, 0, 0

    def below(path):
        return os.path.relpath(path, root).replace(os.sep, "/")

    def unreadable(e):
        bad[below(e.filename)] = f"this folder can't be read: {e.strerror}"

    for folder, dirs, files in os.walk(root, onerror=unreadable):
        dirs[:] = sorted(d for d in dirs if not d.startswith("."))
        for name in sorted(files):
            path = below(os.path.join(folder, name))
            if name.startswith("."):
                continue
            if os.path.splitext(name)[1][1:].lower() not in EXTENSIONS:
                others += 1
                continue
            try:
                inside(root, path)
                st = os.stat(os.path.join(folder, name))
            except ValueError:
                links += 1
            except OSError as e:
                bad[path] = e.strerror
            else:
                if stat.S_ISREG(st.st_mode):
                    found[path] = st.st_size, st.st_mtime_ns
                else:
                    bad[path] = "it is no file but a pipe, a socket or a device"
    return found, bad, links, others


def digest(path):
    """Of the size and of 64 kB at three places: tells a moved file from another of its size."""
    size, h = os.path.getsize(path), hashlib.sha256()
    h.update(str(size).encode())
    with open(path, "rb") as f:
        for place in (0, size // 2, max(size - 2 ** 16, 0)):
            f.seek(place)
            h.update(f.read(2 ** 16))
    return h.hexdigest()[:16]


# -----------------------------------------------------------------------------
# files

def save(path, tensors, metadata=None):
    """A safetensors file that is whole or absent."""
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        save_file({key: x.contiguous() for key, x in tensors.items()}, temporary, metadata)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)  # the library makes it for its owner alone
        with open(temporary, "rb+") as f:
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except (OSError, SafetensorError) as e:  # a full disk is either
        if os.path.exists(temporary):
            os.remove(temporary)
        raise OSError(f"can't write {path}: {getattr(e, 'strerror', None) or e}; what was done "
                      "before stands: mend that and run it again") from e


def pack(features, dtype):
    """Features as they are stored."""
    if dtype == "fp32":
        return features
    out = {}
    for key, x in features.items():
        if "_" in key:
            out[key] = x
            continue
        scale = x.abs().amax(-1).clamp(min=1e-12) / 127  # [n, ...] without the last axis
        out[key] = (x / scale[..., None]).round().to(torch.int8)
        out[f"{key}.scale"] = scale
    return out


def unpack(tensors, keys=None):
    """pack's reverse, of all Features or of those in `keys`. fp32 is handed on, not copied."""
    return {key: x.float() * tensors[f"{key}.scale"][..., None] if x.dtype == torch.int8 else x
            for key, x in tensors.items()
            if not key.endswith(".scale") and (keys is None or key in keys)}


def n_rows(line):
    return len(line["moments"]) + 1


def check_line(line, file):
    """ValueError unless a line is what this file writes: an index may come from anywhere."""
    def number(x):
        return type(x) in (int, float) and 0 <= x < 1e9

    try:
        good = (type(line["size"]) is type(line["mtime_ns"]) is int and number(line["end"])
                and all(len(m) == 2 and all(map(number, m)) and m[0] <= m[1]
                        for m in line["moments"])
                and re.fullmatch("[0-9a-f]{16}", line["digest"])
                and ("shard" not in line or type(line["row"]) is int and line["row"] >= 0
                     and type(line["bytes"]) is type(line["crc32"]) is int
                     and SHARD.fullmatch(line["shard"])))
        parts = line["path"].split("/")
        good = good and not {"", ".", ".."} & {*parts} and "\0" not in line["path"] \
            and not os.path.isabs(line["path"])
    except (KeyError, TypeError, AttributeError):
        good = False
    if not good:
        raise ValueError(f"{file}: a line is not what an index holds: {str(line)[:120]}; delete "
                         "the folder of the index and make it anew")
    return line


def only_file(path):
    """ValueError if `path` is a link: a file of an index is nobody else's."""
    if os.path.islink(path):
        raise ValueError(f"{path} is a link; an index is read from its own files only")
    return path


def damaged(file):
    return ValueError(f"the index is damaged: {file}; run index again")


def read_header(folder):
    file = only_file(os.path.join(folder, "index.json"))
    with open(file, encoding="utf-8") as f:
        header = read(file, lambda _: json.load(f), f"or delete the whole folder {folder}")
    if not isinstance(header, dict) or header.get("format") != FORMAT \
            or not isinstance(header.get("run"), dict) \
            or header.get("dtype") not in ("fp32", "int8") \
            or type(header.get("moments")) not in (int, float) or not 0 <= header["moments"] < 1e9:
        raise ValueError(f"{file} is no index of this version; give --index another folder, or "
                         f"delete the whole folder {folder}")
    return {**header, "moments": float(header["moments"])}


def header_digest(header):
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()[:16]


def read_lines(folder, mend=False):
    """The lines of videos.jsonl; a broken one is ValueError, or with `mend` left out."""
    file, lines = only_file(os.path.join(folder, "videos.jsonl")), []
    if os.path.exists(file):
        with open(file, "rb") as f:
            for text in f:
                try:
                    line = check_line(json.loads(text), file)
                    if "shard" not in line:
                        raise ValueError
                    lines.append(line)
                except (ValueError, RecursionError):
                    if not mend:
                        raise damaged(file) from None
    return lines


def plain(line):
    """A line without where its Features are."""
    return {k: v for k, v in line.items() if k not in PLACE}


def shard_name(lines):
    text = json.dumps([plain(line) for line in lines], sort_keys=True)
    return f"shard-{hashlib.sha256(text.encode()).hexdigest()[:16]}.safetensors"


def checksum(file):
    """-> (size, crc32) of a file."""
    size = crc = 0
    with open(file, "rb") as f:
        while block := f.read(2 ** 22):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return size, crc


def checksum_of(tensors):
    crc = 0
    for key in sorted(tensors):
        crc = zlib.crc32(tensors[key].contiguous().numpy(), zlib.crc32(key.encode(), crc))
    return crc


def is_whole(folder, lines, of, every_byte):
    """Whether the lines of a shard, and the shard, are what was written under this header."""
    first, row = lines[0], 0
    for line in lines:
        if line.get("of") != of or line["row"] != row or any(
                line.get(key) != first.get(key) for key in ("shard", "bytes", "crc32")):
            return False
        row += n_rows(line)
    if first["shard"] != shard_name(lines):
        return False
    file = only_file(os.path.join(folder, first["shard"]))
    try:
        if os.path.getsize(file) != first.get("bytes"):
            return False
        return not every_byte or checksum(file) == (first["bytes"], first.get("crc32"))
    except OSError:
        return False


def fits(tensors, like, rows, dtype):
    """Whether a shard has the names, types and shapes that it should."""
    def kind(key):
        packed = dtype == "int8" and "_" not in key and not key.endswith(".scale")
        return torch.int8 if packed else torch.float32

    return tensors and tensors.keys() == like.keys() and all(
        x.dim() and len(x) == rows and x.dtype == kind(key) and x.shape[1:] == like[key].shape[1:]
        for key, x in tensors.items())


def differences(old, new, free=()):
    """"num_frames = 8, now 4; ..." of two headers, but for the keys in `free`."""
    old, new = ({**h["run"], "moments": h["moments"], "dtype": h["dtype"]} for h in (old, new))
    return "; ".join(f"{key} = {old.get(key)!r}, now {new.get(key)!r}"
                     for key in sorted(old.keys() | new.keys())
                     if key not in free and old.get(key) != new.get(key))


# -----------------------------------------------------------------------------
# writing

class Writer:
    """An index that is being made or brought up to date; one process at a time."""

    def __init__(self, folder, header):
        self.folder, self.new = folder, os.path.join(folder, "new")
        try:
            os.makedirs(only_file(self.new), exist_ok=True)
        except OSError as e:
            raise OSError(f"can't make the index {folder}: {e.strerror}; say with --index where it "
                          "may lie") from None
        try:
            self.lock = lock(folder)
        except OSError:
            raise OSError(f"another process is writing the index {folder}: wait for its end, or "
                          "give --index another folder") from None
        file = os.path.join(folder, "index.json")
        if os.path.exists(file):
            differ = differences(read_header(folder), header)
            if differ:
                raise ValueError(f"the index {folder} was made with other settings ({differ}): set "
                                 "them back, give --index another folder, or delete that one")
        else:
            write_atomic(only_file(file), json.dumps(header, indent=1, sort_keys=True) + "\n")
        self.of, shards = header_digest(header), {}
        for line in read_lines(folder, mend=True):
            shards.setdefault(line["shard"], []).append(line)
        self.whole = {name: (lines[0]["bytes"], lines[0]["crc32"])
                      for name, lines in shards.items() if is_whole(folder, lines, self.of, True)}
        self.damaged = sorted(shards.keys() - self.whole)  # their videos are read again
        # path -> line; one that comes from new/ has no "shard" yet
        self.lines = {line["path"]: line for name in self.whole for line in shards[name]}
        self.read_new()

    def read_new(self):
        for name in sorted(os.listdir(self.new)):
            file = only_file(os.path.join(self.new, name))
            if OURS.fullmatch(name) and name.endswith(".tmp"):
                os.remove(file)
            elif OURS.fullmatch(name):
                try:
                    with safe_open(file, "pt") as f:
                        metadata = f.metadata()
                        crc = checksum_of({key: f.get_tensor(key) for key in f.keys()})
                    line = check_line(json.loads(metadata["video"]), file)
                    good = line.get("of") == self.of and metadata["crc32"] == str(crc)
                except Exception:  # those of json and safetensors share no base class
                    good = False
                if good and self.new_file(line["path"]) == file:
                    self.lines[line["path"]] = line
                else:
                    os.remove(file)

    def new_file(self, path):
        return os.path.join(self.new, hashlib.sha256(os.fsencode(path)).hexdigest()[:32]
                            + ".safetensors")

    def compare(self, root, found):
        """
        What of `found` is to be read, and how many were kept, moved, changed, deleted. Lines of
        videos that are gone are dropped; of one that moved, the line moves.
        """
        kept = {p for p in found if p in self.lines and self.stamp(self.lines[p]) == found[p]}
        gone = {p: line for p, line in self.lines.items() if p not in found}
        todo, moved = [], 0
        for path in sorted(found.keys() - kept):
            same = [p for p, line in gone.items() if self.stamp(line) == found[path]]
            same = [p for p in same if gone[p]["digest"] == digest(inside(root, path))]
            if same:
                line = gone.pop(same[0])
                self.lines[path] = {**self.lines.pop(same[0]), "path": path,
                                    "was": line.get("was", line["path"])}
                moved += 1
            else:
                todo.append(path)
        changed = [p for p in todo if p in self.lines]
        for path in [*changed, *gone]:
            del self.lines[path]
        return todo, dict(changed=len(changed), moved=moved, deleted=len(gone), kept=len(kept))

    @staticmethod
    def stamp(line):
        return line["size"], line["mtime_ns"]

    def add(self, line, tensors):
        line = {**line, "of": self.of}
        save(self.new_file(line["path"]), tensors,
             {"video": json.dumps(line), "crc32": str(checksum_of(tensors))})
        self.lines[line["path"]] = line

    def tensors(self, line):
        """A video's rows, from wherever they are."""
        if "shard" not in line:
            return load_file(self.new_file(line.get("was", line["path"])))
        if getattr(self, "open", (None,))[0] != line["shard"]:
            self.open = line["shard"], read_shard(self.folder, line["shard"])
        rows = slice(line["row"], line["row"] + n_rows(line))
        return {key: x[rows] for key, x in self.open[1].items()}

    def compact(self):
        """All lines into their shards. Old files go last, so a kill at any moment costs nothing."""
        out = []
        for group in groups(self.lines.values()):
            lines = [{**plain(line), "of": self.of} for line in group]
            name, row = shard_name(lines), 0
            file = only_file(os.path.join(self.folder, name))
            if name not in self.whole:
                parts = [self.tensors(line) for line in group]
                save(file, {key: torch.cat([p[key] for p in parts]) for key in parts[0]})
                self.whole[name] = checksum(file)
            size, crc = self.whole[name]
            for line in lines:
                out.append({**line, "shard": name, "row": row, "bytes": size, "crc32": crc})
                row += n_rows(line)
        text = "".join(json.dumps(line, sort_keys=True) + "\n" for line in out)
        write_atomic(only_file(os.path.join(self.folder, "videos.jsonl")), text)
        self.lines, self.open = {line["path"]: line for line in out}, (None, None)
        used = {line["shard"] for line in out}
        for folder, names in ((self.folder, os.listdir(self.folder)),
                              (self.new, os.listdir(self.new))):
            for name in names:
                stale = folder == self.new or name.endswith(".tmp") or SHARD.fullmatch(name)
                if OURS.fullmatch(name) and stale and name not in used:
                    os.remove(os.path.join(folder, name))


def groups(lines):
    """The videos of each shard."""
    group, rows = [], 0
    for line in sorted(lines, key=lambda line: line["path"]):
        group.append(line)
        rows += n_rows(line)
        h = hashlib.sha256(os.fsencode(line["path"])).digest()
        if rows >= ROWS or int.from_bytes(h[:4], "big") % SPREAD == 0:
            yield group
            group, rows = [], 0
    if group:
        yield group


# -----------------------------------------------------------------------------
# reading

def read_shard(folder, name):
    """{name: tensor}, mapped from the file: what is not used is never read."""
    file = only_file(os.path.join(folder, name))
    try:
        return load_file(file)
    except Exception:  # safetensors' errors share no base class
        raise damaged(file) from None


class Reader:
    """
    The finished part of an index. Row r belongs to lines[video[r]] and is its moment from start[r]
    to end[r], or the whole. The shards are mapped into memory, not read.
    """

    def __init__(self, folder):
        if not os.path.isfile(os.path.join(folder, "index.json")):
            raise FileNotFoundError(f"there is no index {folder}: make it with `search.py index`, "
                                    "or say where it is with --index")
        self.folder, self.header, self.lines = folder, read_header(folder), read_lines(folder)
        if not self.lines:
            raise ValueError(f"the index {folder} is empty: run `search.py index` to its end")
        of = header_digest(self.header)
        if any(line.get("of") != of for line in self.lines):
            raise damaged(os.path.join(folder, "index.json"))
        groups = [[*g] for _, g in itertools.groupby(self.lines, key=lambda line: line["shard"])]
        every_byte = sum(g[0].get("bytes") or 0 for g in groups) <= CHECKED
        self.shards, spans, video, n = [], [], [], 0  # shards: (first row, tensors)
        for group in groups:
            if not is_whole(folder, group, of, every_byte):
                raise damaged(os.path.join(folder, group[0]["shard"]))
            tensors, rows = read_shard(folder, group[0]["shard"]), sum(map(n_rows, group))
            like = self.shards[0][1] if self.shards else tensors
            if not fits(tensors, like, rows, self.header["dtype"]):
                raise damaged(os.path.join(folder, group[0]["shard"]))
            self.shards.append((n, tensors))
            n += rows
        for v, line in enumerate(self.lines):
            spans += [*line["moments"], (0.0, line["end"])]
            video += [v] * n_rows(line)
        self.video, self.n = torch.tensor(video), n
        self.start, self.end = torch.tensor(spans, dtype=torch.float64).T
        self.whole = torch.ones(n, dtype=torch.bool)
        self.whole[:-1] = self.video[1:] != self.video[:-1]
        # what a search for moments ranks: a video that has none is its own
        self.moment = ~self.whole | (torch.bincount(self.video)[self.video] == 1)

    def chunks(self, size, keys=None):
        """Yields (first row, Features): fp32 as it is mapped, int8 unpacked `size` bytes a time."""
        for first, tensors in self.shards:
            n = len(next(iter(tensors.values())))
            each = sum(x[0].numel() * 4 for k, x in tensors.items()
                       if x.dtype == torch.int8 and (keys is None or k in keys))
            step = max(1, size // each) if each else n
            for i in range(0, n, step):
                yield first + i, unpack({k: x[i:i + step] for k, x in tensors.items()}, keys)

    def take(self, rows):
        """Features of these rows (ascending), copied."""
        parts = []
        for (first, tensors), last in zip(self.shards, [f for f, _ in self.shards[1:]] + [self.n]):
            mine = rows[(rows >= first) & (rows < last)] - first
            if len(mine):
                parts.append(unpack({k: x[mine] for k, x in tensors.items()}))
        return {k: torch.cat([p[k] for p in parts]) for k in parts[0]}
