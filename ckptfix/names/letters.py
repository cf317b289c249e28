"""Letters in names that count like numbers: ``conv_a``, ``conv_b`` and ``conv_c``, or ``res2a_branch2b``.

A letter counts if those in its place are the first of the alphabet, or those in the module around it are. Others are
abbreviations: ``W_f``, ``W_i``, ``W_c`` and ``W_o`` are the gates of an LSTM. They become capitals in the paths that
are compared: words are the same in capitals, and numbers are not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from string import ascii_lowercase

COUNTING = "[a-h]"
"""Pattern of the letters that may count."""

COUNTED = f"(?<![A-Za-z]){COUNTING}(?![A-Za-z])"
"""Pattern of such a letter by itself."""

_LETTER, _COUNTED = re.compile(r"(?<![A-Za-z])[a-z](?![A-Za-z])"), re.compile(COUNTED)
_NUMBER = re.compile(r"\d+")
_SECOND = frozenset("b")
_WORD = re.compile(r"[A-Za-z]+[^A-Za-z.]*$")
"""Pattern of the word before a letter: what is before it is the module around it, such as a block."""


def series(*sides: Iterable[str]) -> frozenset[str]:
    """Return the places in the names of models where letters count, in each model that has letters there.

    ``bn_b`` beside ``conv_a`` and ``conv_b`` counts too. If there are no other letters, ``conv_a`` is the first, and
    ``conv_b`` the second of two.
    """
    found: set[str] = set()
    others: set[str] = set()
    for names in sides:
        places: dict[str, set[str]] = {}
        homes: dict[str, set[str]] = {}
        within: dict[str, set[str]] = {}
        for name in names:
            for match in _LETTER.finditer(name):
                place, home = _place(name, match), _WORD.sub("", name[: match.start()])
                places.setdefault(place, set()).add(match[0])
                homes.setdefault(home, set()).add(match[0])
                within.setdefault(place, set()).add(home)
        for place, letters in places.items():
            alone = len(letters) > 1 and _are_first(letters)
            (found if alone or all(_count(homes[home]) for home in within[place]) else others).add(place)
    return frozenset(found - others)


def spelled(path: str, places: frozenset[str]) -> str:
    """Return a path with capitals for the letters that might count, but are not in `places`."""
    return _COUNTED.sub(lambda match: match[0] if _place(path, match) in places else match[0].upper(), path)


def _count(letters: set[str]) -> bool:
    return _are_first(letters) or letters == _SECOND


def _are_first(letters: set[str]) -> bool:
    return letters == set(ascii_lowercase[: len(letters)])


def _place(name: str, match: re.Match[str]) -> str:
    """Return what is before a letter in a name, without the values of numbers."""
    return _NUMBER.sub("{}", name[: match.start()])
