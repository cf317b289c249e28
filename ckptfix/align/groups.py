"""Groups of modules with one signature that repeat, and which groups of the two sides may correspond.

A group is all modules under one path with open numbers: ``layers.{}.attn.q`` with an instance in every layer. One side
may have one group where the other has two (``layers.{}.norm{}`` against ``attn_norm`` with ``ffn_norm``). Then the
first is split at a number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from ckptfix.align.units import Unit, fronts
from ckptfix.dataclass import cached_property, dataclass


@dataclass(eq=False)
class UnitGroup:
    """Units whose paths differ only in numbers, in the order of these numbers.

    Attributes:
        text: the path, with ``{}`` where a number is open.
        open: indices of the open numbers among the units' numbers.
    """

    text: str
    open: tuple[int, ...]
    units: list[Unit]

    def __len__(self) -> int:
        return len(self.units)

    @cached_property
    def varying(self) -> list[int]:
        """Indices in `open` that distinguish the units, without those that are constant or vary along with another."""
        found: list[int] = []
        columns = list(zip(*([unit.numbers[index] for index in self.open] for unit in self.units), strict=True))
        for index, column in enumerate(columns):
            values = len(set(column))
            along = any(values == len(set(columns[other])) == len(set(zip(column, columns[other], strict=True)))
                        for other in found)  # fmt: skip
            if values > 1 and not along:
                found.append(index)
        return found

    @cached_property
    def numbers(self) -> list[tuple[int, ...]]:
        """The numbers that distinguish each unit from the others."""
        places = [self.open[index] for index in self.varying]
        return [tuple(unit.numbers[place] for place in places) for unit in self.units]

    @cached_property
    def innermost(self) -> list[int]:
        """For each of `varying`, the last of `open` that varies along with it. The thing it counts comes after that."""
        columns = [[unit.numbers[index] for unit in self.units] for index in self.open]
        found = []
        for first in self.varying:
            values = len(set(columns[first]))
            found.append(max(
                other for other, column in enumerate(columns)
                if values == len(set(column)) == len(set(zip(column, columns[first], strict=True)))
            ))  # fmt: skip
        return found

    @cached_property
    def label(self) -> str:
        """The path with the numbers that are the same in all units filled in."""
        text = self.text
        for at, place in reversed(list(enumerate(self.open))):
            if len({unit.numbers[place] for unit in self.units}) == 1:
                text = _filled(text, at, self.units[0].numbers[place])
        return text

    @cached_property
    def nesting(self) -> tuple[int, tuple[object, ...]]:
        """The count of varying numbers, and the counts of instances under each value of the first, of the second ..."""
        numbers = self.numbers
        return len(numbers[0]), branches(numbers)

    @cached_property
    def inside(self) -> frozenset[int]:
        """The numbers of a list that each of several blocks has, if they are the same in all; otherwise empty."""
        blocks: dict[tuple[int, ...], set[int]] = {}
        for *front, last in self.numbers if len(self.varying) > 1 else ():
            blocks.setdefault(tuple(front), set()).add(last)
        counted = {frozenset(numbers) for numbers in blocks.values()}
        return counted.pop() if len(counted) == 1 else frozenset()

    @cached_property
    def blocks(self) -> frozenset[str]:
        """The paths of the units' innermost blocks, and of the next ones if the last number belongs to a word."""
        return frozenset(block for unit in self.units for block in _blocks(unit.path))

    @cached_property
    def listed(self) -> frozenset[str]:
        """The paths of the blocks that have several of the units, distinguished by their last numbers."""
        counts = Counter(found[-1] for unit in self.units if (found := _numbered(unit.path)[:-1]))
        return frozenset(block for block, count in counts.items() if count > 1)

    @property
    def in_order(self) -> bool:
        """True if the units were defined in the order of their numbers."""
        return all(one.first < other.first for one, other in zip(self.units, self.units[1:], strict=False))

    @property
    def backwards(self) -> bool:
        """True if there are three or more units, defined from the last number down to the first."""
        return len(self) > 2 and all(one.first > other.first for one, other in pairwise(self.units))

    @cached_property
    def splits(self) -> list[list[UnitGroup]]:
        """The ways to fix one of the open numbers, starting with the last."""
        ways = []
        for index in reversed(self.open):
            parts: dict[int, list[Unit]] = {}
            for unit in self.units:
                parts.setdefault(unit.numbers[index], []).append(unit)
            if len(parts) > 1:
                rest = tuple(number for number in self.open if number != index)
                at = self.open.index(index)
                ways.append([UnitGroup(_filled(self.text, at, value), rest, parts[value]) for value in sorted(parts)])
        return ways


def _numbered(path: str) -> list[str]:
    """Return the fronts of `path` that end with a component that has a number."""
    components = path.split(".")
    return [".".join(components[: at + 1]) for at, one in enumerate(components) if fronts(one)]


def _blocks(path: str) -> list[str]:
    found = _numbered(path)
    return found[-1:] if found and found[-1].rpartition(".")[2].isdecimal() else found[-2:]


def branches(numbers: Sequence[tuple[int, ...]]) -> tuple[object, ...]:
    """Return the counts of instances under each value of the first number, of the second ..., in order."""
    if not numbers or not numbers[0]:
        return ()
    below: dict[int, list[tuple[int, ...]]] = {}
    for row in numbers:
        below.setdefault(row[0], []).append(row[1:])
    return tuple(branches(rows) if rows[0] else len(rows) for rows in below.values())


def _filled(text: str, which: int, value: int) -> str:
    """Return `text` with `value` in its open place number `which`."""
    parts = text.split("{}")
    return "{}".join(parts[: which + 1]) + str(value) + "{}".join(parts[which + 1 :])


def groups(units: Iterable[Unit]) -> list[UnitGroup]:
    """Return `units` grouped by their templates, in the order of the first units."""
    found: dict[str, list[Unit]] = {}
    for unit in units:
        found.setdefault(unit.template, []).append(unit)
    made = []
    for template, members in found.items():
        members.sort(key=lambda unit: unit.numbers)
        made.append(UnitGroup(template, tuple(range(len(members[0].numbers))), members))
    return made


MOST = 64
"""Groups of one signature that are examined. A model without repetition has more, and its numbers mean nothing."""

BEAM = 12
"""Ways to split that are followed at the same time."""

WAYS = 48
"""Ways that are compared in the end. If there are more, no way is certain."""

SPLITS = 6
"""Splits that are tried one after another."""

Sides = tuple[list[UnitGroup], list[UnitGroup]]


@dataclass(slots=True)
class Effort:
    """The number of groups that may still be examined in the search for splits. At 0, no way is certain any more."""

    left: int = 4_000_000


def levelled(one: Sequence[UnitGroup], other: Sequence[UnitGroup], effort: Effort) -> list[Sides]:
    """Split both sides until each group has a partner of equal size and nesting; return all ways with fewest splits.

    If no split leads there, or too many do, the result is the unsplit sides.
    """
    unsplit = list(one), list(other)
    beam: list[Sides] = [unsplit]
    if max(len(one), len(other)) > MOST or sum(map(len, one)) != sum(map(len, other)):
        return beam
    for _ in range(SPLITS):
        if not _unlike(beam[0]):
            return beam if len(beam) <= WAYS else [unsplit]
        if len(beam) > BEAM:
            return [unsplit]
        found = {_texts(way): way for sides in beam for way in _ways(*sides)}
        effort.left -= sum(len(left) + len(right) for left, right in found.values())
        if effort.left < 0:
            return [unsplit]
        scored = sorted(((_unlike(way), index, way) for index, way in enumerate(found.values())), key=_first)
        beam = [way for unlike, _, way in scored if unlike == scored[0][0]]
        if not beam:
            break
    return beam if beam and not _unlike(beam[0]) and len(beam) <= WAYS else [unsplit]


def _first(row: tuple[int, int, Sides]) -> tuple[int, int]:
    return row[:2]


def _texts(sides: Sides) -> tuple[frozenset[str], frozenset[str]]:
    return frozenset(group.text for group in sides[0]), frozenset(group.text for group in sides[1])


def _unlike(sides: Sides) -> int:
    """Count the units in groups whose size only one side has; if sizes are equal, those in groups without a partner."""
    sizes = [Counter(map(len, groups)) for groups in sides]
    surplus = (sizes[0] - sizes[1]) + (sizes[1] - sizes[0])
    return sum(size * count for size, count in surplus.items()) or lonely_units(*sides)


def _ways(left: list[UnitGroup], right: list[UnitGroup]) -> Iterator[Sides]:
    """Yield both sides with one group split."""
    for group in left:
        for parts in group.splits:
            if len(left) + len(parts) <= MOST:
                yield _with(left, group, parts), right
    for group in right:
        for parts in group.splits:
            if len(right) + len(parts) <= MOST:
                yield left, _with(right, group, parts)


def _with(groups: list[UnitGroup], group: UnitGroup, parts: list[UnitGroup]) -> list[UnitGroup]:
    place = groups.index(group)
    return [*groups[:place], *parts, *groups[place + 1 :]]


def lonely_units(left: Sequence[UnitGroup], right: Sequence[UnitGroup]) -> int:
    return sum(map(len, _lonely(left, right))) + sum(map(len, _lonely(right, left)))


def _lonely(mine: Sequence[UnitGroup], others: Sequence[UnitGroup]) -> list[UnitGroup]:
    """Return the groups of `mine` without an equal in `others`; each of `others` can serve only once."""
    free: dict[int, list[UnitGroup]] = {}
    for group in reversed(others):
        free.setdefault(len(group), []).append(group)
    lonely = []
    for group in mine:
        waiting = free.get(len(group), [])
        at = next((at for at in reversed(range(len(waiting))) if alike(group, waiting[at])), None)
        if at is None:
            lonely.append(group)
        else:
            del waiting[at]
    return lonely


def alike(one: UnitGroup, other: UnitGroup) -> bool:
    """Return whether the instances of two groups can be paired one by one, in the order of their numbers.

    If the numbers have equally many levels, they must branch in the same way. Otherwise, as in ``features.7`` and
    ``conv2_1``, only the counts can be compared.
    """
    if len(one) != len(other):
        return False
    levels, branched = one.nesting
    other_levels, other_branched = other.nesting
    return levels != other_levels or branched == other_branched


def buckets(left: Sequence[UnitGroup], right: Sequence[UnitGroup]) -> Iterator[Sides]:
    """Yield the groups of each size on both sides if every group has a partner; otherwise all groups at once."""
    if lonely_units(left, right):
        yield list(left), list(right)
        return
    for size in dict.fromkeys(map(len, left)):
        yield [group for group in left if len(group) == size], [group for group in right if len(group) == size]


def listed_otherwise(pair: tuple[UnitGroup, UnitGroup], sides: Sides, mute: Sequence[Sequence[UnitGroup]]) -> bool:
    """Return whether two lists inside blocks may count differently, because each side has a similar module in no list.

    ``bn0`` and ``bn1`` may be the first two of three norms, and ``norms.1`` with ``norms.2`` the last two. This may
    also happen if both count in the same way, but not from 0, and no word says which norm is which.
    """
    inside = [group.inside for group in pair]
    if inside[0] and inside[1] and inside[0] != inside[1] and all(
        any(len(other) * len(counted) == len(group) for other in groups if other is not group)
        for counted, group, groups in zip(inside, pair, sides, strict=True)
    ):
        return True
    if inside[0] == inside[1] and 0 in inside[0]:
        return False
    return all(
        any(other is not group and group.listed <= other.blocks for other in others) and group.listed
        for group, others in zip(pair, mute, strict=True)
    )
