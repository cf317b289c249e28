"""The page around the tables: its head, its style and script, and a security policy that allows nothing else."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files

from ckptfix.html.text import Html, data, join, tag, text
from ckptfix.version import VERSION

LIMIT = 4_800_000
"""Maximum bytes of a page, small enough to send."""


@cache
def _part(name: str) -> str:
    """Read the style or the script."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8").strip()


def _policy() -> str:
    """Return a policy that loads nothing, and allows only this style and this script, by their hashes."""
    sums = {
        name: base64.b64encode(hashlib.sha256(_part(name).encode()).digest()).decode()
        for name in ("report.css", "report.js")
    }
    style, script = (f"'sha256-{sums[name]}'" for name in ("report.css", "report.js"))
    return f"default-src 'none'; style-src {style}; script-src {script}; base-uri 'none'; form-action 'none'"


def whole(title: str, kicker: str, head: Html, sections: Iterable[Html], notes: Sequence[str], rows: object) -> str:
    """Return the page.

    Args:
        title: the title of the window.
        kicker: the small line above everything.
        head: the content at the top.
        notes: sentences on what the page does not show.
        rows: the data for the script.
    """
    made = f"Made by ckptfix {VERSION}. Nothing was loaded, and nothing in the files was run."
    footer = tag("footer", *(tag("p", note) for note in notes), tag("p", made))
    body = join((
        tag("div", tag("span", kicker, class_="kicker"), Html(
            '<button type="button" class="js" id="theme" title="Light, dark, or the system setting">Theme</button>'
        ), class_="top"),
        tag("header", head),
        tag("main", *sections),
        footer,
    ), "\n")  # fmt: skip
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_policy()}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n<meta name="color-scheme" content="light dark">\n'
        f"<title>{text(title)}</title>\n<style>{_part('report.css')}</style>\n</head>\n<body>\n{body}\n"
        f'<script type="application/json" id="data">{data(rows)}</script>\n'
        f"<script>{_part('report.js')}</script>\n</body>\n</html>\n"
    )


def room_beside(*parts: str) -> int:
    """Return the bytes that are left for the table of tensors."""
    return LIMIT - sum(len(part.encode()) for part in (_part("report.css"), _part("report.js"), *parts)) - 20_000


def section(
    title: str, *content: object, id: str | None = None, class_: str | None = None, note: object = ""
) -> Html:
    """Make a titled part of the page."""
    below = tag("p", note, class_="note") if note else ""
    return tag("section", tag("h2", title), below, *content, id=id, class_=class_)


def tiles(found: Iterable[tuple[str, str, str]]) -> Html:
    """Draw the key numbers: (number, what it counts, class)."""
    rows = [(tag("b", count), tag("span", what), f"tile {kind}".strip()) for count, what, kind in found]
    return tag("div", *(tag("div", count, what, class_=kind) for count, what, kind in rows), class_="tiles")


def pasted(line: str) -> Html:
    """Draw a command line with a button that copies it."""
    button = Html('<button type="button" class="js copy">Copy</button>')
    words = join((tag("span", text(word, 0)) for word in line.split(" ")), " ")
    return tag("div", tag("code", words), button, class_="command")


def table(
    headers: Sequence[str], rows: Iterable[Sequence[object]], *, right: Iterable[int] = (), most: int = 200
) -> Html:
    """Make a plain table of at most `most` rows, with the number of hidden rows."""
    everything = list(rows)
    aligned = set(right)
    kinds = ["n" if index in aligned else None for index in range(len(headers))]
    head = tag("tr", *(tag("th", name, class_=kind) for name, kind in zip(headers, kinds, strict=True)))
    body = [
        tag("tr", *(tag("td", cell, class_=kind) for cell, kind in zip(row, kinds, strict=True)))
        for row in everything[:most]
    ]
    more = len(everything) - most
    said = tag("p", f"{more:,} more are not shown here; --json has all.", class_="note") if more > 0 else ""
    return join((tag("div", tag("table", tag("thead", head), tag("tbody", *body)), class_="wide"), said))


def facts(rows: Iterable[tuple[str, Sequence[object]]]) -> Html:
    """List names and their values."""
    parts = []
    for name, values in rows:
        if values:
            parts += [tag("dt", name), tag("dd", *(tag("div", value) for value in values))]
    return tag("dl", *parts)
