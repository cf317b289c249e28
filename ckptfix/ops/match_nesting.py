"""Linked modules must nest: a numbered block of one side is never in two of the other side, each with more than it.

Classes of shapes are assigned one after another, each by itself. Where one rule sends block 3 to block 2 and another
rule sends block 3 to block 3, at least one of them is wrong, and nothing here says which.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ckptfix import keys
from ckptfix.ops.match_names import Signature, Unit, words

_NUMBER = re.compile(r"\d{1,18}")

Stack = str
"""The path before a number: ``encoder.layers.``"""

UPWARD = frozenset(
    ["up", "ups", "upsample", "upsamples", "upconv", "upconvs", "upblock", "upblocks", "dec", "decoder", "decoders"]
)
"""Words for the levels of a U-Net's way up: some count them as they run, some as those on the way down."""

MOST = 6
"""Numbers in one path that count as those of blocks."""


def crossed(pairs: Sequence[tuple[Unit, Unit]]) -> set[int]:
    """Indices of the pairs that belong to stacks whose blocks do not nest."""
    shared: dict[tuple[Stack, Stack], list[tuple[int, int, int]]] = {}
    for index, (one, other) in enumerate(pairs):
        theirs = list(_blocks(other.path))
        for ours, number in _blocks(one.path):
            for stack, twin in theirs:
                shared.setdefault((ours, stack), []).append((number, twin, index))
    found: set[int] = set()
    for rows in shared.values():
        if not _nest([(number, twin) for number, twin, _ in rows]):
            found.update(index for _, _, index in rows)
    return found


def _blocks(path: str) -> Iterator[tuple[Stack, int]]:
    """The stacks that a module stands in, and the number of its block there."""
    for count, match in enumerate(_NUMBER.finditer(path)):
        if count == MOST:
            return
        yield path[: match.start()], int(match[0])


def _nest(numbers: Iterable[tuple[int, int]]) -> bool:
    """Whether each block of one side is within one of the other, or both sides count things that cross, as in a grid.

    ``layers.{}`` and ``experts.{}`` cross: each has as much of each.
    """
    counts = Counter(numbers)
    ours, theirs = Counter(one for one, _ in counts), Counter(other for _, other in counts)
    if max(ours.values()) == 1 or max(theirs.values()) == 1:
        return True
    return len(counts) == len(ours) * len(theirs) and len(set(counts.values())) == 1


def turnable(pairs: Sequence[tuple[Unit, Unit]], side: Iterable[Unit]) -> set[int]:
    """Indices of the pairs in the way up of a U-Net whose levels may be counted from either end.

    `side` has all units of the source. Shapes that one level alone has tell where it is; equal levels say nothing.
    """
    convolving = {_front(unit.path) for unit in side if any(len(slot.shape) > 2 for slot in unit.slots.values())}
    shared: dict[tuple[Stack, Stack], list[tuple[int, int, int]]] = {}
    for index, (one, other) in enumerate(pairs):
        if _front(one.path) not in convolving:
            continue
        for ours, number in _blocks(one.path):
            for stack, twin in _blocks(other.path):
                if _upward(ours) or _upward(stack):
                    shared.setdefault((ours, stack), []).append((number, twin, index))
    found: set[int] = set()
    for rows in shared.values():
        levels = {number: twin for number, twin, _ in rows}
        units = [pairs[index][0] for _, _, index in rows]
        if len(levels) == len(set(levels.values())) > 1 and not _anchored(rows, units, levels):
            found.update(index for _, _, index in rows)
    return found


def _front(path: str) -> str:
    """The words of the path before its first number, of the first component that has any."""
    return _NUMBER.split(keys.unwrapped(path).partition(".")[0])[0]


def _upward(stack: Stack) -> bool:
    """Whether the stack's own words, which stand after the last number before it, are of the way up."""
    own = next((part for part in reversed(_NUMBER.split(stack)) if words(part)), "")
    return bool(UPWARD.intersection(words(own)))


def _anchored(rows: Sequence[tuple[int, int, int]], units: Sequence[Unit], levels: Mapping[int, int]) -> bool:
    """Whether a level that is not the middle one has shapes of its own."""
    where: dict[Signature, set[int]] = {}
    for (number, _, _), unit in zip(rows, units, strict=True):
        where.setdefault(unit.signature, set()).add(number)
    order = sorted(levels)
    middle = order[len(order) // 2] if len(order) % 2 else None
    return any(len(numbers) == 1 and numbers != {middle} for numbers in where.values())
