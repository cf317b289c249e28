"""Numbers at several levels of a path: which number of one side counts the same as a number of the other side.

``layers.{}.experts.{}`` and ``experts.{}.layers.{}`` have equally many modules under each number if there are as many
layers as experts. Then the words before the numbers decide, or the other modules under them, or nothing does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import permutations

from ckptfix.align.groups import UnitGroup, branches
from ckptfix.align.units import ModelSide, Unit, words

NESTS = frozenset(["layer", "block", "stage", "module", "group", "unit"])
"""Words for lists that occur at any level. They do not distinguish levels."""

COUNTED = frozenset(["expert", "head", "branch", "codebook"])
"""Words that say what a number counts. If only one side has one, the numbers may count different things."""

LEVELS = 4
"""Numbers that may vary in one path. If there are more, only their given order is tried."""


def turned(
    one: UnitGroup,
    other: UnitGroup,
    sides: tuple[ModelSide, ModelSide],
    apart: Callable[[Unit, Unit], bool] | None = None,
) -> tuple[list[Unit], dict[Unit, Unit]]:
    """Return the units of `other` in the order of their partners in `one`, and a rival for each uncertain unit.

    The given order of the numbers is used if equally many modules are under each of them on both sides, or if lists of
    blocks hold lists of blocks, and no word says what they count. A different order is used only if words say so.

    Args:
        apart: whether two units are known to be in different blocks, which rules an order of the numbers out.
    """
    if one.nesting[0] != other.nesting[0] and not (
        all(_in_blocks(group, side) for group, side in zip((one, other), sides, strict=True))
        or _same_course(one, other, sides)
    ):
        return other.units, dict(zip(other.units, (*other.units[1:], other.units[0]), strict=True))
    ways = _ways(one, other)
    if len(ways) < 2 or one.text == other.text:
        return other.units, {}
    if apart is not None:
        left = [way for way in ways if not any(map(apart, one.units, _sorted(other, way)))]
        if len(left) == 1:
            return _sorted(other, left[0]), {}
        ways = left or ways
    named = _level_words(one), _level_words(other)
    said = [_said([(named[0][at], named[1][to]) for at, to in enumerate(way)]) for way in ways]
    blocks = [surroundings(group, which)[:-1] for group, which in zip((one, other), sides, strict=True)]
    alike = blocks[0] == blocks[1]
    best = max(range(len(ways)), key=lambda index: (said[index], -index))
    twins = _sorted(other, ways[best])
    shared = [sum(bool(named[0][at] & named[1][to]) for at, to in enumerate(way)) for way in ways]
    against = any(one & COUNTED != other & COUNTED for one, other in zip(*named, strict=True))
    mute = not any(words for side_words in named for words in side_words)
    nested = mute and all(_in_blocks(group, side, True) for group, side in zip((one, other), sides, strict=True))
    as_given = best == 0 and ways[0] == tuple(sorted(ways[0])) and (
        nested or (alike and not against and shared[0] == max(shared))
    )  # fmt: skip
    as_said = said[best] > 0 and not alike and said.count(said[best]) == 1
    if as_given or as_said:
        return twins, {}
    doubts: dict[Unit, Unit] = {}
    for index, way in enumerate(ways):
        if index != best:
            for twin, rival in zip(twins, _sorted(other, way), strict=True):
                if rival is not twin:
                    doubts.setdefault(twin, rival)
    return twins, doubts


def _in_blocks(group: UnitGroup, side: ModelSide, every: bool = False) -> bool:
    """Return whether modules other than the group's are under its first number, if the group has several numbers.

    Args:
        every: ask the same of each number but the last.
    """
    if group.nesting[0] < 2:
        return True
    around = surroundings(group, side)
    return all(
        around[level] > len(group) / len({numbers[: level + 1] for numbers in group.numbers})
        for level in range(len(around) - 1 if every else 1)
    )


def _same_course(one: UnitGroup, other: UnitGroup, sides: tuple[ModelSide, ModelSide]) -> bool:
    """Return whether mostly the same kind of module is defined after each of the paired units on both sides.

    Places where both are followed by another module of these shapes decide nothing.
    """
    if not all(side.numbers_rise for side in sides):
        return False
    own = one.units[0].signature
    courses = [
        (sides[0].following.get(unit.first), sides[1].following.get(twin.first))
        for unit, twin in zip(one.units, other.units, strict=True)
    ]
    deciding = [course for course in courses if course != (own, own)]
    same = sum(ours == theirs for ours, theirs in deciding)
    return same * 2 > len(deciding)


def _said(levels: Sequence[tuple[frozenset[str], frozenset[str]]]) -> int:
    """Return the number of levels at which words agree; -1 if they conflict at a level."""
    if any(one != other and not one & other for one, other in levels):
        return -1
    return sum(bool(one & other) for one, other in levels)


def _ways(one: UnitGroup, other: UnitGroup) -> list[tuple[int, ...]]:
    """Return the orders of `other`'s numbers under which it branches as `one` does; the given order comes first."""
    levels, branched = one.nesting
    if levels != other.nesting[0] or not 2 <= levels <= LEVELS:
        return [tuple(range(levels))]
    return [
        way
        for way in permutations(range(levels))
        if branches(sorted(tuple(row[at] for at in way) for row in other.numbers)) == branched
    ]


def _sorted(group: UnitGroup, way: Sequence[int]) -> list[Unit]:
    rows = zip((tuple(row[at] for at in way) for row in group.numbers), range(len(group)), strict=True)
    return [group.units[index] for _, index in sorted(rows)]


def _level_words(group: UnitGroup) -> list[frozenset[str]]:
    """Return for each varying number the words, in the singular, of the nearest component before it that has any."""
    found = []
    for index in group.varying:
        before = "{}".join(group.text.split("{}")[: index + 1])
        component = re.split(r"\.|\{\}", before.removesuffix("."))[-1]
        found.append(frozenset(word.removesuffix("s") for word in words(component)) - NESTS)
    return found


def surroundings(group: UnitGroup, side: ModelSide) -> tuple[float, ...]:
    """Return for each varying number of the group the average number of units under one of its values.

    For a group of one unit, return the size of the block that contains it.
    """
    rows = [unit.fronts for unit in group.units]
    if len(rows) == 1:
        block = max((side.under[front] for front in rows[0]), default=0)
        return (block if block > 1 else 0,)  # a number at the end of a name does not count blocks
    places = [group.open[index] for index in group.innermost]
    return tuple(sum(side.under[row[place]] for row in rows) / len(rows) for place in places)
