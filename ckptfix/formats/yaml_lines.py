"""The lines ``name: value`` of a YAML file: all that settings beside a checkpoint are read for.

Nested values are ignored. This needs no PyYAML, and no tag in the file creates an object.
"""

from __future__ import annotations

import re

_WHOLE = re.compile(r"[+-]?\d{1,18}", re.ASCII)
_NUMBER = re.compile(r"[+-]?(?:\d+[.]?\d*|[.]\d+)(?:[eE][+-]?\d{1,3})?", re.ASCII)
_WORDS: dict[str, object] = {"true": True, "false": False, "null": None, "~": None}


def plain_values(text: str) -> dict[str, object]:
    """Return the words, numbers and texts at the top level of a YAML file, by name."""
    rows = (line.partition(" #")[0].partition(":") for line in text.splitlines())
    return {name: _value(value.strip()) for name, _, value in rows if name.isidentifier()}


def _value(text: str) -> object:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _WHOLE.fullmatch(text):
        return int(text)
    if len(text) < 40 and _NUMBER.fullmatch(text):
        return float(text)
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text
