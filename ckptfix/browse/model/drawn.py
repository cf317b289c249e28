"""Text of a file as a terminal may get it, and a histogram as lines of text."""

from __future__ import annotations

from collections.abc import Sequence

from ckptfix.errors import printable

LONGEST = 1000
"""Characters of a text that are shown."""

_BLOCKS = " ▁▂▃▄▅▆▇█"


def shown(text: object, most: int = LONGEST) -> str:
    """`text` in one line without control characters, at most `most` characters; a long one loses its middle."""
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
    """A value that is not a tensor, in one line."""
    return shown(repr(value) if isinstance(value, str) else value, most)


def bars(counts: Sequence[int], height: int) -> list[str]:
    """Counts as bars, `height` lines from the top; whatever is not 0 is seen."""
    most = max(counts, default=0)
    if not most:
        return []
    levels = [max(round(count / most * height * 8), 1) if count else 0 for count in counts]
    return [
        "".join(_BLOCKS[min(max(level - 8 * line, 0), 8)] for level in levels) for line in reversed(range(height))
    ]
