"""What a matching knows so far: the two sides, the links, and what those that are certain say of the rest."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice

from ckptfix.align.groups import Effort, Group, Sides, alike, listed_otherwise
from ckptfix.align.nesting import Twins
from ckptfix.align.pairs import Link
from ckptfix.align.scores import rising
from ckptfix.align.units import Side, Signature, Unit

SHOWN = 8
"""Instances of two groups of which it is looked up in which blocks they stand."""


@dataclass
class State:
    """The two sides, and what is certain: for each side, the places of the linked units in order."""

    a: Side
    b: Side
    links: list[Link] = field(default_factory=list)
    pins: tuple[list[int], list[int]] = ([], [])
    twins: Twins | None = None
    effort: Effort = field(default_factory=Effort)
    compared: int = 0

    @cached_property
    def by_signature(self) -> dict[Signature, list[Unit]]:
        found: dict[Signature, list[Unit]] = {}
        for unit in self.b.units:
            found.setdefault(unit.signature, []).append(unit)
        return found

    @property
    def ordered(self) -> bool:
        return self.a.in_order and self.b.in_order

    def add(self, links: Iterable[Link]) -> None:
        self.links += links

    def pin(self) -> None:
        """Take the links that are beyond doubt as landmarks, the longest run of them that is in the same order.

        So are the blocks that they show to be one another's counterpart.
        """
        sure = [(link.one, link.other) for link in self.links if not link.instead]
        self.twins = Twins(sure, (self.a.contents, self.b.contents))
        certain = sorted((one.first, other.first) for one, other in sure)
        kept = rising([other for _, other in certain])
        self.pins = ([certain[index][0] for index in kept], [certain[index][1] for index in kept])

    def between(self, one: Group, other: Group, *, swapped: bool) -> bool:
        """Whether what is defined just before and just after each of two groups' units is linked, and beyond doubt."""
        ours, theirs = (other, one) if swapped else (one, other)
        if not alike(ours, theirs):
            return False
        twins = {link.one: link.other for link in self.links if not link.instead}
        found = 0
        for unit, twin in zip(ours.units, theirs.units, strict=True):
            before, after = (
                None if beside is None or beside not in twins else twins[beside] is other
                for beside, other in zip(self.a.beside(unit), self.b.beside(twin), strict=True)
            )
            if before is False or after is False:
                return False
            found += bool(before and after)
        return found >= max(1, len(ours) - 1)

    def place(self, group: Group, which: int) -> list[int]:
        """For each unit, how many landmarks come before it."""
        return [bisect_left(self.pins[which], unit.first) for unit in group.units]

    def in_blocks(self, one: Group, other: Group) -> float:
        """Between 1, where all instances of two groups stand in the same blocks, and -1, where all stand in others."""
        if self.twins is None or not alike(one, other):
            return 0.0
        said = [self.twins.say(unit, twin) for unit, twin in islice(zip(one.units, other.units, strict=True), SHOWN)]
        return -1.0 if -1 in said else sum(said) / len(said)

    def listed_otherwise(self, pair: tuple[Group, Group], sides: Sides, mute: Sequence[Sequence[Group]]) -> bool:
        """`groups.listed_otherwise`, but where other modules of the lists show which places of them are the same."""
        one, other = pair
        if self.twins is not None and alike(one, other) and all(map(self.twins.lists, one.units, other.units)):
            return False
        return listed_otherwise(pair, sides, mute)
