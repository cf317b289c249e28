"""Text of untrusted files in HTML, and data in a script element."""

from __future__ import annotations

import json
from html import escape

from ckptfix.errors import printable

LONGEST = 240
"""Characters of a name or value; a longer one is cut in its middle."""


class Html(str):
    """HTML that is complete as it stands. Made of other text by `text` alone."""


def text(value: object, most: int = LONGEST) -> Html:
    """`value` as text: control characters, directions and lone surrogates made visible, the rest escaped."""
    if isinstance(value, Html):
        return value
    string = "" if value is None else str(value)
    if most and len(string) > most:
        half = (most - 1) // 2
        string = f"{string[:half]}\N{HORIZONTAL ELLIPSIS}{string[len(string) - half :]}"
    return Html(escape(printable(string)))


def tag(name: str, *content: object, **attributes: object) -> Html:
    """An element; of the names of attributes, underscores become dashes, or go at the end. None leaves one out."""
    said = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(value, 0)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{said}>{''.join(map(text, content))}</{name}>")


def join(parts: object, between: str = "") -> Html:
    """Elements one after the other."""
    return Html(between.join(map(text, parts)))  # type: ignore[call-overload]


def data(value: object) -> Html:
    """`value` as JSON for a script element: ASCII, and nothing in it that could end the element or begin a comment."""
    made = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for char in "<>&":
        made = made.replace(char, f"\\u{ord(char):04x}")
    return Html(made)


def number(value: float | None) -> str:
    """A number for a table: up to four digits."""
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
