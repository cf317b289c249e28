"""Numbers that others say: servers, plans of fleets, records of edits. They are bounded before they are used."""

from __future__ import annotations

import re

MOST = (1 << 63) - 1
"""The largest offset that a file can have."""

_DIGITS = re.compile(r"-?[0-9]{1,19}", re.ASCII)
_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?", re.ASCII)


def whole_number(value: object, *, least: int = 0, most: int = MOST) -> int | None:
    """Give the integer that `value` is, or that it spells in ASCII digits; None where it is another thing or too far.

    Python's own `int` takes more than any header or file means: other digits than 0 to 9, spaces, underscores, floats,
    booleans, and thousands of digits.
    """
    if type(value) is int:
        number = value
    elif isinstance(value, str) and _DIGITS.fullmatch(value):
        number = int(value)
    else:
        return None
    return number if least <= number <= most else None


def seconds(text: object) -> float | None:
    """Give the seconds that a header spells; None where it spells a date or no number."""
    return float(text) if isinstance(text, str) and _SECONDS.fullmatch(text) else None
