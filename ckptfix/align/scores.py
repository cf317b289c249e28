"""Evidence besides words for pairing two groups: order, place and surroundings."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

from ckptfix.align import assignment
from ckptfix.align.groups import UnitGroup

ENOUGH = 2.5
"""Margin by which an assignment must beat the next best to be certain. Definition order alone gives 2: it distinguishes
``query, key, value`` from ``q, k, v``, but also from ``k, v, q``."""

DECIDED = 1.0
"""Margin that words and numbers alone must give: order and place, however good, make nothing certain."""

FAR = 0.45
"""The most that a place among landmarks counts: less than a word, and with definition order just below `ENOUGH`."""


def ordered_alike(
    ranks: tuple[list[int], list[int]], at: tuple[int, int], places: tuple[list[int], list[int]]
) -> float:
    """Return the score of definition order for two groups: whether they have the same rank and place."""
    same = len(ranks[0]) == len(ranks[1]) and ranks[0][at[0]] == ranks[1][at[1]]
    return float(same) - apart(*places)


def undecided(likeness: Sequence[Sequence[float]], chosen: Sequence[int]) -> set[int]:
    """Return the rows whose column words and numbers alone would not choose, or not clearly."""
    alone = assignment.best(likeness)
    margins = assignment.margins(likeness, alone, DECIDED)
    return {row for row, column in enumerate(chosen) if alone[row] != column or margins[row][0] < DECIDED}


def ranks(groups: Sequence[UnitGroup]) -> list[int]:
    """Return the position of each group in the order of their first units."""
    order = sorted(range(len(groups)), key=lambda index: groups[index].units[0].first)
    return [order.index(index) for index in range(len(groups))]


def apart(one: Sequence[int], other: Sequence[int]) -> float:
    """Return the distance of two groups among the landmarks, at most `FAR`."""
    if len(one) != len(other):
        return 0.0
    return min(FAR, sum(min(abs(i - j), 3) for i, j in zip(one, other, strict=True)) / len(one))


def unlike(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the difference in size of two groups' blocks, in doublings, at most 2."""
    if len(one) != len(other):
        one, other = one[:1], other[:1]
    steps = [abs(math.log2((i + 1) / (j + 1))) for i, j in zip(one, other, strict=False)]
    return min(2.0, sum(steps) / len(steps)) if steps else 0.0


def same_block(one: Sequence[float], other: Sequence[float]) -> bool:
    """Return whether two groups repeat with a block of several modules that has equally many on both sides."""
    return bool(one and other) and one[0] > 1 and abs(math.log2(one[0] / max(other[0], 1))) <= 0.5


def rising(values: Sequence[int]) -> list[int]:
    """Return the indices of a longest increasing subsequence."""
    tails: list[int] = []
    ends: list[int] = []
    back: list[int] = []
    for index, value in enumerate(values):
        at = bisect_left(tails, value)
        tails[at : at + 1] = [value]
        ends[at : at + 1] = [index]
        back.append(ends[at - 1] if at else -1)
    kept = []
    index = ends[-1] if ends else -1
    while index >= 0:
        kept.append(index)
        index = back[index]
    return kept[::-1]
