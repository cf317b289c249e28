"""Text of untrusted files in HTML, and data in a script element."""

from __future__ import annotations

import json
from html import escape

from ckptfix.errors import printable

LONGEST = 240
"""Maximum characters of a name or value; a longer one loses its middle."""


class Html(str):
    """Complete HTML. Only `text` makes it from other text."""


def text(value: object, most: int = LONGEST) -> Html:
    """Escape `value`: HTML syntax, and also control characters, direction marks and lone surrogates."""
    if isinstance(value, Html):
        return value
    string = "" if value is None else str(value)
    if most and len(string) > most:
        half = (most - 1) // 2
        string = f"{string[:half]}\N{HORIZONTAL ELLIPSIS}{string[len(string) - half :]}"
    return Html(escape(printable(string)))


def tag(name: str, *content: object, **attributes: object) -> Html:
    """Make an element; underscores in attribute names become dashes, or are removed at the end. None omits one."""
    said = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(value, 0)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{said}>{''.join(map(text, content))}</{name}>")


def join(parts: object, between: str = "") -> Html:
    """Join elements one after the other."""
    return Html(between.join(map(text, parts)))  # type: ignore[call-overload]


def data(value: object) -> Html:
    """Encode `value` as JSON for a script element: ASCII that cannot end the element or begin a comment."""
    made = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for char in "<>&":
        made = made.replace(char, f"\\u{ord(char):04x}")
    return Html(made)


def number(value: float | None) -> str:
    """Format a number for a table: up to four digits."""
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
