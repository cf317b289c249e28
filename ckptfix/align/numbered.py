"""Modules of equal shapes in one block that are numbered, all but one: the missing number is that of the remaining one.

``bn2`` beside a norm that nothing describes is the second of two: a third norm would be needed if numbers began at 0,
and nothing else in the block begins with ``bn1``. ``bn1`` may be the first of two, or the second after ``bn0``, and
says nothing. Letters (``conv_b``) begin at the first. The numbers of a list (``shortcut.0``) count its own modules, and
not one beside it. The numbers may count modules of other shapes too, so a norm of another width that nothing describes
leaves all open.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from ckptfix.align import roles
from ckptfix.align.roles import RoleEvidence
from ckptfix.names.letters import COUNTED

_NUMBER = re.compile(rf"\d{{1,9}}|{COUNTED}")


def paired(
    ours: Sequence[str],
    theirs: Sequence[str],
    beside: tuple[Collection[str], Collection[str]],
    similar: tuple[Collection[str], Collection[str]],
) -> list[tuple[int, int]]:
    """Return the assignment of as many paths to paths by their order, if one side names all of them but one.

    Args:
        ours, theirs: paths in two blocks that are the same.
        beside: the paths of all modules of these blocks.
        similar: those of modules whose tensors have the same names, and other sizes.

    Returns:
        Nothing if the order of one side is unknown, or if words contradict it.
    """
    sides = roles.parts(ours, within=True), roles.parts(theirs, within=True)
    whole = [_whole(side) for side in sides]
    if None not in whole or whole == [None, None]:
        return []
    if any(map(_has_mute, similar)):
        return []
    ranks = [
        found or _all_but_one(texts, side, near)
        for found, texts, side, near in zip(whole, (ours, theirs), sides, beside, strict=True)
    ]
    if ranks[0] is None or ranks[1] is None:
        return []
    rows = [(row, ranks[1].index(rank)) for row, rank in enumerate(ranks[0])]
    return rows if all(roles.score(sides[0][row], sides[1][to]) >= 0 for row, to in rows) else []


def _has_mute(texts: Collection[str]) -> bool:
    """Return whether neither a number nor a word describes one of these modules."""
    return any(not (part.roles or part.numbers) for text in texts for part in roles.parts([text]))


def _whole(side: Sequence[RoleEvidence]) -> list[int] | None:
    """Return the ranks of modules if names give all of them."""
    found = [part.ordinal[1] for part in side if part.ordinal is not None and part.ordinal[0] == len(side)]
    return found if sorted(found) == list(range(len(side))) else None


def _all_but_one(texts: Sequence[str], side: Sequence[RoleEvidence], beside: Collection[str]) -> list[int] | None:
    """Return the ranks of modules if names give those of all but one, which nothing describes."""
    mute = [at for at, part in enumerate(side) if not (part.roles or part.numbers)]
    if len(mute) != 1:
        return None
    if len(side) == 2 and (played := side[1 - mute[0]].roles.get("recurrent")) is not None and len(played) == 1:
        first = played == frozenset(["input"])
        return [int(first) if at == mute[0] else int(not first) for at in range(2)]
    if any(part.roles.keys() & {"attention", "recurrent"} for part in side):
        return None
    numbers: list[int] = []
    fronts: set[tuple[str, str]] = set()
    zero = False
    for at, text in enumerate(texts):
        if at != mute[0]:
            found = list(_NUMBER.finditer(text))
            if len(found) != 1:
                return None
            front, number, behind = text[: found[0].start()], found[0][0], text[found[0].end() :]
            if front[-1:] in ("", ".") and behind[:1] in ("", "."):
                return None
            zero = not number.isdecimal()
            fronts.add((front, behind))
            numbers.append(_value(number))
    start = 0 if zero or 0 in numbers else 1 if len(texts) in numbers else None
    if start is None or len(fronts) > 1 or len(set(numbers)) < len(numbers):
        return None
    ((front, _),) = fronts
    missing = set(range(start, start + len(texts))) - set(numbers)
    if len(missing) > 1 or any(_counted(text, front) not in (None, *numbers) for text in beside):
        return None
    told = iter(numbers)
    return [(missing.pop() if at == mute[0] else next(told)) - start for at in range(len(texts))]


def _counted(text: str, front: str) -> int | None:
    """Return the number that follows `front` in a path; None if none does."""
    match = _NUMBER.match(text, len(front)) if text.startswith(front) else None
    return None if match is None else _value(match[0])


def _value(text: str) -> int:
    return int(text) if text.isdecimal() else ord(text) - ord("a")
