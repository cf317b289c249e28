"""Stacks of another depth: which blocks of the source become the blocks of the target, as the user says.

A block is everything under a number: ``encoder.layers.4``. Two stacks are counterparts if their blocks have equally
many elements. Splitting, transposing and reshaping tensors does not change that. Only the blocks that the user chooses
are matched, with new numbers, as if the source had no others.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ckptfix.align.fused import FusedTensors
from ckptfix.align.result import Matching
from ckptfix.dataclass import dataclass
from ckptfix.errors import Refused
from ckptfix.names import no_weights
from ckptfix.names.slots import Slot
from ckptfix.words import plural

FIRST, LAST, EVERY_OTHER = "first", "last", "every-other"

_NUMBER = re.compile(r"\d{1,9}(?=\.)")

Sizes = dict[int, int]
"""Number of a block -> its elements, optional tensors aside."""


@dataclass(frozen=True, slots=True)
class DeeperStack:
    """A stack of the source that has more blocks than its counterpart.

    Attributes:
        source, target: paths before the numbers, as in ``encoder.layers.``.
        numbers: numbers of the source's blocks, in order.
        depth: how many blocks the target has.
    """

    source: str
    target: str
    numbers: tuple[int, ...]
    depth: int

    def __str__(self) -> str:
        places = self.source.rstrip("."), self.target.rstrip(".")
        return f"IN has {plural(len(self.numbers), 'block')} in {places[0]}, and TARGET {self.depth} in {places[1]}"

    def chosen(self, blocks: str) -> tuple[int, ...]:
        """Return the numbers of the blocks to take.

        Args:
            blocks: ``first``, ``last``, ``every-other``, or numbers of the source's blocks, as in ``0,2,4``.

        Raises:
            Refused: these are not as many blocks as the target has, or the source lacks one of them.
        """
        ways = {FIRST: self.numbers[: self.depth], LAST: self.numbers[-self.depth :], EVERY_OTHER: self.numbers[::2]}
        if blocks in ways:
            taken = ways[blocks]
        elif re.fullmatch(r"\d{1,9}(,\d{1,9})*", blocks):
            taken = tuple(map(int, blocks.split(",")))
        else:
            raise Refused(f"no blocks are called {blocks!r}", hint=f"use {some_ways()}")
        if not set(taken) <= set(self.numbers) or list(taken) != sorted(set(taken)):
            hint = f"name them in order, from {self.numbers[0]} to {self.numbers[-1]}"
            raise Refused(f"{self}: blocks {blocks} are not in IN, or out of order", hint=hint)
        if len(taken) != self.depth:
            hint = f"name {self.depth} of them, as in --blocks {example(self)}"
            raise Refused(f"{self}: {blocks} takes {plural(len(taken), 'block')}", hint=hint)
        return taken


def example(stack: DeeperStack) -> str:
    """Return numbers of blocks that are spread over the stack."""
    last = len(stack.numbers) - 1
    steps = max(stack.depth - 1, 1)
    return ",".join(str(stack.numbers[round(index * last / steps)]) for index in range(stack.depth))


def some_ways() -> str:
    return "first, last, every-other, or numbers such as 0,2,4"


def deeper(source: Sequence[Slot], target: Sequence[Slot]) -> tuple[DeeperStack, ...]:
    """Find the stacks of the source that have more blocks than their counterparts in the target.

    Stacks with blocks of equal sizes are taken together: if they differ in depth among themselves, they are left out,
    because nothing shows which is whose counterpart.
    """
    sides = _stacks(source), _stacks(target)
    left = [Counter(map(_row, side.values())) for side in sides]
    both = left[0] & left[1]
    spare = tuple({front: sizes for front, sizes in side.items() if not both[_row(sizes)]} for side in sides)
    found: list[DeeperStack] = []
    kinds: dict[frozenset[int], tuple[list[str], list[str]]] = {}
    for which, side in enumerate(spare):
        for front, sizes in side.items():
            kinds.setdefault(frozenset(sizes.values()), ([], []))[which].append(front)
    for ours, theirs in kinds.values():
        depths = [{len(side[front]) for front in fronts} for side, fronts in zip(spare, (ours, theirs), strict=True)]
        if len(ours) == len(theirs) and len(depths[0]) == len(depths[1]) == 1 and min(depths[0]) > max(depths[1]):
            found += [
                DeeperStack(one, other, tuple(sorted(spare[0][one])), len(spare[1][other]))
                for one, other in zip(ours, theirs, strict=True)
            ]
    return tuple(
        stack for stack in found if not any(stack is not one and stack.source.startswith(one.source) for one in found)
    )


def _row(sizes: Sizes) -> tuple[int, ...]:
    return tuple(sizes[number] for number in sorted(sizes))


def _stacks(slots: Sequence[Slot]) -> dict[str, Sizes]:
    """Return path before the number -> its blocks, for stacks of several blocks of several modules."""
    found: dict[str, Sizes] = {}
    modules: dict[tuple[str, int], set[str]] = {}
    for slot in slots:
        if slot.tied is None and no_weights.optional(slot) is None:
            for match in _NUMBER.finditer(slot.name):
                front, number = slot.name[: match.start()], int(match[0])
                sizes = found.setdefault(front, {})
                sizes[number] = sizes.get(number, 0) + math.prod(slot.shape)
                modules.setdefault((front, number), set()).add(slot.name.rpartition(".")[0])
    return {
        front: sizes
        for front, sizes in found.items()
        if len(sizes) > 1 and all(len(modules[front, number]) > 1 for number in sizes)
    }


@dataclass(frozen=True, slots=True)
class ChosenBlocks:
    """The source with chosen blocks only, under new numbers.

    Attributes:
        slots: the slots to match.
        names: their names -> names in the source.
        dropped: paths of the blocks that are left out.
    """

    slots: tuple[Slot, ...]
    names: Mapping[str, str]
    dropped: tuple[str, ...]

    def restored(self, matching: Matching) -> Matching:
        """Return the matching of these slots with the names of the source."""
        return replace(
            matching,
            pairs=tuple(replace(pair, source=self.names[pair.source]) for pair in matching.pairs),
            rules=(),
            left=tuple(self.names[name] for name in matching.left),
            skipped_source=tuple(replace(row, name=self.names[row.name]) for row in matching.skipped_source),
            dropped=self.dropped,
        )

    def restored_tensors(self, taken: Sequence[FusedTensors]) -> tuple[FusedTensors, ...]:
        """Return operations on these slots with the names of the source."""
        return tuple(replace(one, old=tuple(self.names[name] for name in one.old)) for one in taken)


def choose(source: Sequence[Slot], target: Sequence[Slot], blocks: str) -> ChosenBlocks:
    """Keep the chosen blocks of every stack that is deeper than its counterpart.

    Args:
        blocks: as for `DeeperStack.chosen`.

    Raises:
        Refused: no stack is deeper, or `blocks` does not fit one.
    """
    stacks = deeper(source, target)
    if not stacks:
        hint = "leave out --blocks"
        raise Refused("no stack of IN has blocks like those of TARGET, and more of them", hint=hint)
    moved = {
        stack.source: dict(zip(taken, stack.numbers, strict=False))
        for stack in stacks
        for taken in [stack.chosen(blocks)]
    }
    new: dict[str, str] = {}
    dropped: dict[str, None] = {}
    for slot in source:
        name: str | None = slot.name
        for match in _NUMBER.finditer(slot.name):
            front = slot.name[: match.start()]
            if front in moved:
                number = moved[front].get(int(match[0]))
                if number is None:
                    dropped[slot.name[: match.end()]] = None
                    name = None
                else:
                    name = f"{front}{number}{slot.name[match.end():]}"
                break
        if name is not None:
            new[slot.name] = name
    owners: dict[str, str] = {}
    slots = []
    for slot in source:
        if slot.name in new:
            owner = owners.setdefault(slot.tied or slot.name, new[slot.name])
            slots.append(replace(slot, name=new[slot.name], tied=None if owner == new[slot.name] else owner))
    return ChosenBlocks(tuple(slots), {name: old for old, name in new.items()}, tuple(dropped))
