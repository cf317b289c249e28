"""Text from a file, escaped for a terminal, and a histogram as lines of text."""

from __future__ import annotations

from collections.abc import Sequence

from ckptfix.errors import printable

LONGEST = 1000
"""Maximum characters of a text."""

_BLOCKS = " ▁▂▃▄▅▆▇█"


def shown(text: object, most: int = LONGEST) -> str:
    """Return `text` on one line, escaped, in at most `most` characters; a long one loses its middle."""
    string = str(text)
    if len(string) > most:
        head = most // 2
        string = f"{string[:head]}...{string[len(string) - (most - head) :]}"
    escaped = printable(string)
    if len(escaped) <= most:
        return escaped
    head = max(most // 3, 1)
    return f"{escaped[:head]}...{escaped[len(escaped) - max(most - head - 3, 0) :]}"


def value_text(value: object, most: int = LONGEST) -> str:
    """Return a value that is not a tensor, on one line."""
    return shown(repr(value) if isinstance(value, str) else value, most)


def bars(counts: Sequence[int], height: int) -> list[str]:
    """Draw counts as bars, as `height` lines from the top; every nonzero count is visible."""
    most = max(counts, default=0)
    if not most:
        return []
    levels = [max(round(count / most * height * 8), 1) if count else 0 for count in counts]
    return [
        "".join(_BLOCKS[min(max(level - 8 * line, 0), 8)] for level in levels) for line in reversed(range(height))
    ]
