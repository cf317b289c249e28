"""The state of a matching: the two sides, the links, and what the certain links imply for the rest."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import field
from itertools import islice

from ckptfix.align.groups import Effort, Sides, UnitGroup, alike, listed_otherwise
from ckptfix.align.nesting import Twins
from ckptfix.align.pairs import Link
from ckptfix.align.scores import rising
from ckptfix.align.siblings import Companions
from ckptfix.align.units import ModelSide, Signature, Unit
from ckptfix.dataclass import cached_property, dataclass

SHOWN = 8
"""Instances of two groups whose blocks are compared."""


@dataclass
class AlignState:
    """The two sides, and what is certain.

    Attributes:
        pins: for each side, the positions of the linked units in order.
        blocks: pairs of blocks that are known to be the same.
    """

    a: ModelSide
    b: ModelSide
    links: list[Link] = field(default_factory=list)
    pins: tuple[list[int], list[int]] = ([], [])
    blocks: Sequence[tuple[str, str]] = ()
    twins: Twins | None = None
    effort: Effort = field(default_factory=Effort)
    compared: int = 0

    @cached_property
    def by_signature(self) -> dict[Signature, list[Unit]]:
        found: dict[Signature, list[Unit]] = {}
        for unit in self.b.units:
            found.setdefault(unit.signature, []).append(unit)
        return found

    @cached_property
    def companions(self) -> tuple[Companions, Companions]:
        return Companions(self.a), Companions(self.b)

    @property
    def ordered(self) -> bool:
        return self.a.in_order and self.b.in_order

    def add(self, links: Iterable[Link]) -> None:
        self.links += links

    def pin(self) -> None:
        """Use the certain links as landmarks: the longest run of them that is in the same order on both sides.

        The blocks that they show to be counterparts become landmarks too.
        """
        sure = [(link.one, link.other) for link in self.links if not link.instead]
        self.twins = Twins(sure, (self.a.contents, self.b.contents), self.blocks)
        certain = sorted((one.first, other.first) for one, other in sure)
        kept = rising([other for _, other in certain])
        self.pins = ([certain[index][0] for index in kept], [certain[index][1] for index in kept])

    def between(self, one: UnitGroup, other: UnitGroup, *, swapped: bool) -> bool:
        """Return whether the units defined just before and after each pair of the groups are certainly linked."""
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

    def place(self, group: UnitGroup, which: int) -> list[int]:
        """Return for each unit the number of landmarks before it."""
        return [bisect_left(self.pins[which], unit.first) for unit in group.units]

    def apart(self, one: Unit, other: Unit) -> bool:
        """Return whether two units are known to be in different blocks."""
        return self.twins is not None and self.twins.say(one, other) < 0

    def in_blocks(self, one: UnitGroup, other: UnitGroup) -> float:
        """Return 1 if all instances of two groups are in the same blocks, -1 if any is known not to be, or a share."""
        if self.twins is None or not alike(one, other):
            return 0.0
        said = [self.twins.say(unit, twin) for unit, twin in islice(zip(one.units, other.units, strict=True), SHOWN)]
        return -1.0 if -1 in said else sum(said) / len(said)

    def listed_otherwise(
        self, pair: tuple[UnitGroup, UnitGroup], sides: Sides, mute: Sequence[Sequence[UnitGroup]]
    ) -> bool:
        """Apply `groups.listed_otherwise`, unless other modules of the lists show which of their places match."""
        one, other = pair
        if self.twins is not None and alike(one, other) and all(map(self.twins.lists, one.units, other.units)):
            return False
        return listed_otherwise(pair, sides, mute)
