"""
A page that shows hits, as one HTML file that opens without a network and runs no script.

    [Section(head, hits)] --render--> HTML: pictures inline, videos by a path relative to the page
    search.py page          queries and what was found for them
    eval.py --report        captions whose video is not first, with its rank and what stands before

Whatever comes from outside (queries, file names, captions) goes through `text` or `link`, nothing
else does; the page's own policy forbids scripts and the network. A <video> begins at the hit's time
by a media fragment (#t=start,end). Colours follow the reader's light or dark setting.
"""
import base64
import html
import os
from dataclasses import dataclass, field
from urllib.parse import quote

import moments as cinema
from checkpoint import write_atomic
from moments import clock

STYLE = """
:root { color-scheme: light dark; --back: #f6f6f3; --card: #fff; --ink: #1d1f21; --soft: #62666a;
        --line: #dcdcd6; --bar: #2f6f8f; --right: #2a7d4f; }
@media (prefers-color-scheme: dark) {
  :root { --back: #16181a; --card: #202326; --ink: #e8e8e4; --soft: #a0a4a8; --line: #363a3e;
          --bar: #6fb3d2; --right: #6cc493; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 78rem; background: var(--back); color: var(--ink);
       font: 16px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .2rem; overflow-wrap: anywhere; }
p { margin: .2rem 0; } .soft { color: var(--soft); font-size: .9rem; }
.hits { display: grid; gap: 1rem; margin-top: .6rem;
        grid-template-columns: repeat(auto-fill, minmax(min(100%, 17rem), 1fr)); }
.hit { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: .7rem;
       min-width: 0; overflow-wrap: anywhere; }
.right { border: 2px solid var(--right); }
video { display: block; width: 100%; aspect-ratio: 4 / 3; background: #000; border-radius: .3rem; }
.strip { display: flex; gap: 2px; margin: .4rem 0; }
.strip img { flex: 1; min-width: 0; height: 3rem; object-fit: cover; border-radius: .2rem; }
.query img { height: 5rem; border-radius: .3rem; }
.row { display: grid; grid-template-columns: 8rem 1fr 3.2rem; gap: .5rem; align-items: center;
       font-size: .85rem; }
.row span:last-child { text-align: right; font-variant-numeric: tabular-nums; }
.track { background: var(--line); border-radius: 3px; height: .55rem; }
.fill { background: var(--bar); border-radius: 3px; height: 100%; }
"""
POLICY = "default-src 'none'; img-src data:; media-src 'self' file:; style-src 'unsafe-inline'"


@dataclass
class Hit:
    title: str
    full: str               # path of the video, "" if it is not to be shown
    start: float = 0.0
    end: float = 0.0        # 0: its own end
    about: str = ""         # a line below the title
    bars: list = field(default_factory=list)   # (name, score), drawn from 0 to 1
    right: bool = False     # this is the one that was looked for


@dataclass
class Section:
    head: str
    hits: list
    about: str = ""
    stills: list = field(default_factory=list)  # JPEG files of a query that is a picture or clip


def text(s):
    """For between tags and in quoted attributes; what no UTF-8 file can hold is escaped before."""
    s = str(s).encode("utf-8", "backslashreplace").decode()
    return html.escape("".join(c if c.isprintable() else ascii(c)[1:-1] for c in s))


def link(path, folder):
    """A relative URL, every byte of the name quoted: no scheme, no query, no fragment of its own"""
    try:
        path = os.path.relpath(path, folder)
    except ValueError:  # another drive
        path = os.path.abspath(path)
    return "./" + quote(os.fsencode(path.replace(os.sep, "/")))


def picture(jpeg):
    return f'<img alt="" src="data:image/jpeg;base64,{base64.b64encode(jpeg).decode()}">'


def card(hit, folder):
    out = [f'<div class="hit{" right" * hit.right}">']
    if hit.full:
        end = hit.end or cinema.length(hit.full)
        n = 4 if end - hit.start > 0.2 else 1
        times = [hit.start + (i + 0.5) / n * (end - hit.start) for i in range(n)]
        stills = cinema.stills(hit.full, times)
        poster = "" if not stills else ' poster="data:image/jpeg;base64,' \
            f'{base64.b64encode(stills[0]).decode()}"'
        time = f"#t={hit.start:.3f}" + (f",{hit.end:.3f}" if hit.end > hit.start else "")
        out.append(f'<video controls muted playsinline preload="metadata"{poster} '
                   f'src="{text(link(hit.full, folder) + time)}"></video>')
        out.append('<div class="strip">' + "".join(map(picture, stills)) + "</div>")
    out.append(f"<p><b>{text(hit.title)}</b></p>")
    if hit.about:
        out.append(f'<p class="soft">{text(hit.about)}</p>')
    for name, score in hit.bars:
        width = 100 * min(max(score, 0.0), 1.0)
        out.append(f'<div class="row"><span>{text(name)}</span><div class="track"><div class="fill"'
                   f' style="width:{width:.1f}%"></div></div><span>{score:.3f}</span></div>')
    return "".join(out) + "</div>"


def render(title, sections, folder, about=""):
    """The page as text, for a file in `folder`."""
    out = ['<!doctype html><html lang="en"><head><meta charset="utf-8">',
           f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
           '<meta name="viewport" content="width=device-width, initial-scale=1">',
           f"<title>{text(title)}</title><style>{STYLE}</style></head><body>",
           f"<h1>{text(title)}</h1>", f'<p class="soft">{text(about)}</p>' if about else ""]
    for s in sections:
        out.append(f"<h2>{text(s.head)}</h2>")
        if s.stills:
            out.append('<p class="query">' + "".join(map(picture, s.stills)) + "</p>")
        if s.about:
            out.append(f'<p class="soft">{text(s.about)}</p>')
        out.append('<div class="hits">' + "\n".join(card(h, folder) for h in s.hits) + "</div>")
    return "\n".join(out) + "\n</body></html>\n"


def write(file, title, sections, about=""):
    folder = os.path.dirname(os.path.abspath(file))
    os.makedirs(folder, exist_ok=True)
    write_atomic(file, render(title, sections, folder, about))


def write_hits(file, found, root, stills=None):
    """found: [(query, hits of search.search)]; stills: {query: JPEG files} of those that are one"""
    sections = []
    for query, hits in found:
        cards = []
        for n, h in enumerate(hits, 1):
            about = f"{clock(h['start'])} - {clock(h['end'])}, score {h['score']:.4f}"
            for word, t, s in h["why"]["matches"]:
                about += f", {word} at {clock(t)} ({s:.2f})"
            cards.append(Hit(f"{n}. {h['path']}", "" if h["note"].startswith("gone") else h["full"],
                             h["start"], h["end"], about + (f", {h['note']}" if h["note"] else ""),
                             [("score", h["score"]), *h["why"]["parts"]]))
        sections.append(Section(query, cards, stills=(stills or {}).get(query, [])))
    write(file, "nanoTVR: hits", sections, f"in {root}")


def write_failures(file, failures, about):
    """
    failures: [{"caption", "rank", "true": (id, path, score), "before": [(id, path, score), ...]}],
    the captions whose own video is not the first.
    """
    sections = []
    for f in failures:
        name, path, score = f["true"]
        cards = [Hit(f"{n}. {i}", p, 0, 0, f"score {s:.4f}", [("score", s)])
                 for n, (i, p, s) in enumerate(f["before"], 1)]
        cards.append(Hit(f"{name}, the right one", path, 0, 0, f"rank {f['rank']:g}, score "
                         f"{score:.4f}", [("score", score)], right=True))
        sections.append(Section(f["caption"], cards, f"its video is at rank {f['rank']:g}"))
    write(file, "nanoTVR: captions whose video is not first", sections, about)
