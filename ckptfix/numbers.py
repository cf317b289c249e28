"""Numbers from outside: servers, plans of fleets, records of edits. They are bounded before they are used."""

from __future__ import annotations

import re

MOST = (1 << 63) - 1
"""The largest offset that a file can have."""

_DIGITS = re.compile(r"-?[0-9]{1,19}", re.ASCII)
_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?", re.ASCII)


def whole_number(value: object, *, least: int = 0, most: int = MOST) -> int | None:
    """Return `value`, or the integer that it spells in ASCII digits; None for anything else, or if it is out of range.

    Python's own `int` accepts more than any header or file means: digits other than 0 to 9, spaces, underscores,
    floats, booleans, and thousands of digits.
    """
    if type(value) is int:
        number = value
    elif isinstance(value, str) and _DIGITS.fullmatch(value):
        number = int(value)
    else:
        return None
    return number if least <= number <= most else None


def seconds(text: object) -> float | None:
    """Return the seconds that a header spells; None for a date or other text."""
    return float(text) if isinstance(text, str) and _SECONDS.fullmatch(text) else None
