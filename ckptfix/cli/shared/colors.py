"""The one place that knows colors: a few meanings, each with a color that every terminal has."""

from __future__ import annotations

import os
from typing import Literal

Meaning = Literal["added", "removed", "damage", "warning", "fix", "note"]
"""The meanings that have a color; other text has no color."""

SEVERITIES: dict[str, Meaning] = {"error": "damage", "warning": "warning", "info": "note"}
"""The severity of a finding -> its meaning."""

When = Literal["auto", "always", "never"]

_CODES: dict[Meaning, str] = {"added": "32", "removed": "31", "damage": "1;31"}
_CODES |= {"warning": "33", "fix": "36", "note": "2"}
_END = "\x1b[0m"


def painted(text: str, meaning: Meaning | None, length: int | None = None) -> str:
    """Color `text` in the color of `meaning`.

    Args:
        length: color only the first `length` characters; if it is negative, all but the first.
    """
    if meaning is None or not text:
        return text
    if length is not None and length < 0:
        return text[:-length] + painted(text[-length:], meaning)
    length = len(text) if length is None else length
    return f"\x1b[{_CODES[meaning]}m{text[:length]}{_END}{text[length:]}"


def wanted(when: When, *, terminal: bool) -> bool:
    """Return whether to paint a stream: on a terminal, unless ``NO_COLOR`` (no-color.org) forbids it."""
    if when == "auto":
        return terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return when == "always"
