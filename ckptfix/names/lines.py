"""Lines of a rules file for tensors that are split, joined or turned; one line covers many that follow one pattern.

Lines such as ``blocks.0.attn.qkv.weight -> layers.0.{q,k,v}.weight | split``, one per block, become the line
``blocks.{n}.attn.qkv.weight -> layers.{n}.{q,k,v}.weight | split``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ckptfix.names.learn import LETTERS
from ckptfix.names.operations import Operation

EXPERT = "e"
"""The letter for numbers that only one side has. It is not in `LETTERS`."""

_NUMBER = re.compile(r"(?<![A-Za-z0-9])(?:0|[1-9]\d{0,8})(?![A-Za-z0-9])")
_BRACES = re.compile(r"(\{[^{}]*\})")

Line = tuple[str, str, str]
"""Left side, right side, operations."""


def line(old: Sequence[str], new: Sequence[str], operations: Iterable[Operation], numbered: int = 0) -> Line | None:
    """Return the line that makes the tensors `new` from the tensors `old`; None if no line can express it.

    Args:
        numbered: count of the numbers, starting at 0, that the longer side runs through; 0 if its names are a list.
    """
    sides = [_side(names, numbered if len(names) > 1 or numbered == 1 else 0) for names in (old, new)]
    if sides[0] is None or sides[1] is None or any(len(side.split()) != 1 for side in sides if side is not None):
        return None
    return sides[0], sides[1], " ".join(f"| {one}" for one in operations)


def _side(names: Sequence[str], numbered: int) -> str | None:
    if any("{" in name or "}" in name for name in names):
        return None
    if not numbered:
        return _listed(names)
    per, odd = divmod(len(names), numbered)
    first = _listed(names[:per])
    if odd or first is None:
        return None
    for found in re.finditer(r"(?<=\.)0(?=\.)", first):
        made = [f"{first[: found.start()]}{number}{first[found.end() :]}" for number in range(numbered)]
        if made == [_listed(names[number * per : (number + 1) * per]) for number in range(numbered)]:
            return f"{first[: found.start()]}{{{EXPERT}}}{first[found.end() :]}"
    return None


def _listed(names: Sequence[str]) -> str | None:
    """Return ``front.{q,k,v}.back`` for names that differ in one place; None if a line cannot list them."""
    if len(names) == 1:
        return names[0]
    rows = [name.split(".") for name in names]
    shortest = min(map(len, rows))
    front = next((at for at in range(shortest) if len({row[at] for row in rows}) > 1), shortest)
    back = next((at for at in range(shortest - front) if len({row[-1 - at] for row in rows}) > 1), shortest - front)
    middles = [".".join(row[front : len(row) - back]) for row in rows]
    if not all(middles) or len(set(middles)) < len(middles) or any("," in middle for middle in middles):
        return None
    return ".".join((*rows[0][:front], "{" + ",".join(middles) + "}", *rows[0][len(rows[0]) - back :]))


def joined(lines: Sequence[Line]) -> list[Line]:
    """Merge lines that differ only in numbers, by equal steps on both sides; the meaning stays the same."""
    groups: dict[Line, list[tuple[Line, tuple[int, ...], tuple[int, ...]]]] = {}
    for row in lines:
        (old, ours), (new, theirs) = _numbers(row[0]), _numbers(row[1])
        groups.setdefault((old, new, row[2]), []).append((row, ours, theirs))
    made: list[Line] = []
    for (old, new, operations), rows in groups.items():
        one = _pattern(old, new, [(ours, theirs) for _, ours, theirs in rows])
        made += [(*one, operations)] if one is not None and len(rows) > 1 else [row for row, _, _ in rows]
    return made


def _numbers(text: str) -> tuple[str, tuple[int, ...]]:
    """Return the text with a NUL for each number outside braces, and these numbers."""
    found: list[int] = []

    def one(match: re.Match[str]) -> str:
        found.append(int(match[0]))
        return "\0"

    pieces = _BRACES.split(text)
    return "".join(piece if index % 2 else _NUMBER.sub(one, piece) for index, piece in enumerate(pieces)), tuple(found)


def _pattern(
    old: str, new: str, rows: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
) -> tuple[str, str] | None:
    """Return both sides with letters for the numbers that vary; None if the right ones do not follow from the left."""
    columns = list(zip(*(ours for ours, _ in rows), strict=True))
    letters = iter(LETTERS)
    names: dict[int, str] = {}
    for place, column in enumerate(columns):
        if len(set(column)) > 1:
            letter = next(letters, None)
            if letter is None:
                return None
            names[place] = letter
    right: list[str] = []
    for column in zip(*(theirs for _, theirs in rows), strict=True):
        if len(set(column)) == 1:
            right.append(str(column[0]))
            continue
        steps = {
            place: {theirs - ours for ours, theirs in zip(columns[place], column, strict=True)} for place in names
        }
        follows = next((place for place, step in steps.items() if len(step) == 1), None)
        if follows is None:
            return None
        step = steps[follows].pop()
        right.append(f"{{{names[follows]}{step:+d}}}" if step else f"{{{names[follows]}}}")
    left = [f"{{{names[place]}}}" if place in names else str(column[0]) for place, column in enumerate(columns)]
    if any(sum(f"{{{letter}" in text for text in right) != 1 for letter in names.values()):
        return None
    return _filled(old, left), _filled(new, right)


def _filled(text: str, numbers: Sequence[str]) -> str:
    front, *rest = text.split("\0")
    return front + "".join(number + piece for number, piece in zip(numbers, rest, strict=True))
