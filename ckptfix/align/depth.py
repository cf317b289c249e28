"""Models of the same kind but different depth: which extra blocks one side has.

A block is everything under a number: ``layers.11``. If one side has more modules of some shapes, the surplus may be
exactly the last blocks of one stack. If there is only one such stack, these blocks are set aside, and the rest of both
sides has the same depth.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Sequence
from itertools import islice, pairwise

from ckptfix.align.groups import Effort, groups, levelled, lonely_units
from ckptfix.align.units import Unit

_NUMBER = re.compile(r"\d{1,18}")

Key = Callable[[Unit], Hashable]

MOST = 32
"""Tails that are tried. If more would fit, it is not certain which one is meant."""


def same_depth(a: Sequence[Unit], b: Sequence[Unit], key: Key) -> tuple[list[Unit], list[Unit]]:
    """Return `a` and `b` without the last blocks that only one of them has, if it is certain which blocks these are."""
    if Counter(map(key, a)) == Counter(map(key, b)):
        return list(a), list(b)
    ours, theirs = _cut(list(a), list(b), key)
    theirs, ours = _cut(theirs, ours, key)
    return ours, theirs


def _cut(mine: list[Unit], others: list[Unit], key: Key) -> tuple[list[Unit], list[Unit]]:
    have, want = Counter(map(key, mine)), Counter(map(key, others))
    surplus = {name: count - want[name] for name, count in have.items() if count > want[name]}
    shared = {name: count for name, count in surplus.items() if want[name]}
    if not shared:
        return mine, others
    if not _counted_alike(mine, others, shared, key):
        return mine, others
    tails = list(islice(_tails(mine, key, shared, surplus), MOST + 1))
    found = []
    for tail in tails if len(tails) <= MOST else ():
        gone = set(map(id, tail))
        kept = [unit for unit in mine if id(unit) not in gone]
        if _level(kept, others, set(map(key, tail)), key):
            found.append(kept)
            if len(found) > 1:
                break
    return (found[0], others) if len(found) == 1 else (mine, others)


def _counted_alike(mine: Sequence[Unit], others: Sequence[Unit], shared: Container[Hashable], key: Key) -> bool:
    """Return whether the others lack no block in the middle: they skip numbers only as `mine` do.

    For ``0, 1, 2`` and ``0, 2``, the extra block of the first may be the middle one.
    """
    ours, theirs = (_steps(unit for unit in units if key(unit) in shared) for units in (mine, others))
    even = {steps[0] for _, steps in ours if len(set(steps)) == 1} | {1}
    return all(
        (late, steps) in ours or (not late and (not steps or (len(set(steps)) == 1 and steps[0] in even)))
        for late, steps in theirs
    )


def _steps(units: Iterable[Unit]) -> set[tuple[int, tuple[int, ...]]]:
    """Return for each stack the offset of its first number from the least in similar stacks, and its steps."""
    stacks: dict[str, set[int]] = {}
    for unit in units:
        for match in _NUMBER.finditer(unit.path):
            stacks.setdefault(unit.path[: match.start()], set()).add(int(match[0]))
    least: dict[str, int] = {}
    for stack, numbers in stacks.items():
        like = _NUMBER.sub("{}", stack)
        least[like] = min(least.get(like, min(numbers)), *numbers)
    return {
        (
            min(numbers) - least[_NUMBER.sub("{}", stack)],
            tuple(after - before for before, after in pairwise(sorted(numbers))),
        )
        for stack, numbers in stacks.items()
    }


def _tails(
    units: Iterable[Unit], key: Key, shared: dict[Hashable, int], surplus: dict[Hashable, int]
) -> Iterator[list[Unit]]:
    """Yield the last blocks of a stack, but never all, that contain all of `shared` and no more than `surplus`."""
    stacks: dict[str, dict[int, list[Unit]]] = {}
    for unit in units:
        for match in _NUMBER.finditer(unit.path):
            stacks.setdefault(unit.path[: match.start()], {}).setdefault(int(match[0]), []).append(unit)
    for blocks in stacks.values():
        tail: list[Unit] = []
        left = dict(surplus)
        wanted = sum(shared.values())
        for number in sorted(blocks, reverse=True)[:-1]:
            for unit in blocks[number]:
                name = key(unit)
                left[name] = left.get(name, 0) - 1
                wanted -= name in shared
            tail += blocks[number]
            if any(left[key(unit)] < 0 for unit in blocks[number]):
                break
            if not wanted:
                yield list(tail)


def _level(mine: Sequence[Unit], others: Sequence[Unit], names: Iterable[Hashable], key: Key) -> bool:
    """Return whether the modules of these classes repeat in the same way on both sides."""
    effort = Effort()
    sides: tuple[dict[Hashable, list[Unit]], dict[Hashable, list[Unit]]] = ({}, {})
    for side, units in zip(sides, (mine, others), strict=True):
        for unit in units:
            side.setdefault(key(unit), []).append(unit)
    for name in names:
        ours, theirs = (side.get(name, []) for side in sides)
        if ours and theirs and lonely_units(*levelled(groups(ours), groups(theirs), effort)[0]):
            return False
    return True
