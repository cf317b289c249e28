"""Modules of one signature, in groups that repeat: which group of one side may be which of the other.

A group is what one path with open numbers stands for: ``layers.{}.attn.q`` with an instance in every layer. Where one
side writes as one group what the other writes as two (``layers.{}.norm{}``, and ``attn_norm`` with ``ffn_norm``), the
first is split at a number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from ckptfix.align.units import Unit, fronts


@dataclass(eq=False)
class Group:
    """Units whose paths differ in numbers alone, in the order of these numbers.

    Attributes:
        text: the path; ``{}`` stands where the number is open.
        open: which of the units' numbers are.
    """

    text: str
    open: tuple[int, ...]
    units: list[Unit]

    def __len__(self) -> int:
        return len(self.units)

    @cached_property
    def varying(self) -> list[int]:
        """Which of `open` distinguish the units: not the ones that are the same in all, or vary along with another."""
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
        """For each of `varying`, the last of `open` that varies along with it: what it counts stands behind that."""
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
        """The path with the numbers that are the same in all units."""
        text = self.text
        for at, place in reversed(list(enumerate(self.open))):
            if len({unit.numbers[place] for unit in self.units}) == 1:
                text = _filled(text, at, self.units[0].numbers[place])
        return text

    @cached_property
    def nesting(self) -> tuple[int, tuple[object, ...]]:
        """How many numbers vary, and how many instances stand under each value of the first, of the second ..."""
        numbers = self.numbers
        return len(numbers[0]), branches(numbers)

    @cached_property
    def inside(self) -> frozenset[int]:
        """The numbers of a list that stands in each of several blocks, if they are the same in all; else none."""
        blocks: dict[tuple[int, ...], set[int]] = {}
        for *front, last in self.numbers if len(self.varying) > 1 else ():
            blocks.setdefault(tuple(front), set()).add(last)
        counted = {frozenset(numbers) for numbers in blocks.values()}
        return counted.pop() if len(counted) == 1 else frozenset()

    @cached_property
    def blocks(self) -> frozenset[str]:
        """The paths of the innermost blocks of the units; of the next ones too, where a word has the last number."""
        return frozenset(block for unit in self.units for block in _blocks(unit.path))

    @cached_property
    def listed(self) -> frozenset[str]:
        """The paths of the blocks that have several of the units, by the last of their numbers."""
        counts = Counter(found[-1] for unit in self.units if (found := _numbered(unit.path)[:-1]))
        return frozenset(block for block, count in counts.items() if count > 1)

    @property
    def in_order(self) -> bool:
        """Whether the units were defined in the order of their numbers."""
        return all(one.first < other.first for one, other in zip(self.units, self.units[1:], strict=False))

    @property
    def backwards(self) -> bool:
        """Whether three units or more were defined from the last number down to the first."""
        return len(self) > 2 and all(one.first > other.first for one, other in pairwise(self.units))

    @cached_property
    def splits(self) -> list[list[Group]]:
        """The ways to fix one of the open numbers, the last number first."""
        ways = []
        for index in reversed(self.open):
            parts: dict[int, list[Unit]] = {}
            for unit in self.units:
                parts.setdefault(unit.numbers[index], []).append(unit)
            if len(parts) > 1:
                rest = tuple(number for number in self.open if number != index)
                at = self.open.index(index)
                ways.append([Group(_filled(self.text, at, value), rest, parts[value]) for value in sorted(parts)])
        return ways


def _numbered(path: str) -> list[str]:
    """The beginnings of `path` that end with a component that has a number."""
    components = path.split(".")
    return [".".join(components[: at + 1]) for at, one in enumerate(components) if fronts(one)]


def _blocks(path: str) -> list[str]:
    found = _numbered(path)
    return found[-1:] if found and found[-1].rpartition(".")[2].isdecimal() else found[-2:]


def branches(numbers: Sequence[tuple[int, ...]]) -> tuple[object, ...]:
    """How many instances stand under each value of the first number, of the second ..., in order."""
    if not numbers or not numbers[0]:
        return ()
    below: dict[int, list[tuple[int, ...]]] = {}
    for row in numbers:
        below.setdefault(row[0], []).append(row[1:])
    return tuple(branches(rows) if rows[0] else len(rows) for rows in below.values())


def _filled(text: str, which: int, value: int) -> str:
    """`text` with `value` in its `which`-th open place."""
    parts = text.split("{}")
    return "{}".join(parts[: which + 1]) + str(value) + "{}".join(parts[which + 1 :])


def groups(units: Iterable[Unit]) -> list[Group]:
    """`units` by their templates, in the order of the first units."""
    found: dict[str, list[Unit]] = {}
    for unit in units:
        found.setdefault(unit.template, []).append(unit)
    made = []
    for template, members in found.items():
        members.sort(key=lambda unit: unit.numbers)
        made.append(Group(template, tuple(range(len(members[0].numbers))), members))
    return made


MOST = 64
"""Groups of one signature that are looked at; a model that repeats nothing has more, and its numbers say nothing."""

BEAM = 12
"""Ways to split that are followed at once."""

WAYS = 48
"""Ways that are compared in the end; of more, none is certain."""

SPLITS = 6
"""Splits one after another that are tried."""

Sides = tuple[list[Group], list[Group]]


@dataclass(slots=True)
class Effort:
    """How many groups may still be looked at while ways to split are sought; then no way is certain any more."""

    left: int = 4_000_000


def levelled(one: Sequence[Group], other: Sequence[Group], effort: Effort) -> list[Sides]:
    """Both sides split until each group has one of equal size and nesting: all ways with the fewest splits.

    Where no splitting leads there, or too many do, the only way is not to split.
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
    """Units in groups of sizes that only one side has; if there are none, those without a like."""
    sizes = [Counter(map(len, groups)) for groups in sides]
    surplus = (sizes[0] - sizes[1]) + (sizes[1] - sizes[0])
    return sum(size * count for size, count in surplus.items()) or lonely_units(*sides)


def _ways(left: list[Group], right: list[Group]) -> Iterator[Sides]:
    """Both sides with one group split."""
    for group in left:
        for parts in group.splits:
            if len(left) + len(parts) <= MOST:
                yield _with(left, group, parts), right
    for group in right:
        for parts in group.splits:
            if len(right) + len(parts) <= MOST:
                yield left, _with(right, group, parts)


def _with(groups: list[Group], group: Group, parts: list[Group]) -> list[Group]:
    place = groups.index(group)
    return [*groups[:place], *parts, *groups[place + 1 :]]


def lonely_units(left: Sequence[Group], right: Sequence[Group]) -> int:
    return sum(map(len, _lonely(left, right))) + sum(map(len, _lonely(right, left)))


def _lonely(mine: Sequence[Group], others: Sequence[Group]) -> list[Group]:
    """The ones of `mine` without an equal in `others`, each of which serves once."""
    free: dict[int, list[Group]] = {}
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


def alike(one: Group, other: Group) -> bool:
    """Whether the instances of two groups can go together, one by one in the order of their numbers.

    Numbers of equally many levels must branch alike; where the levels differ, as in ``features.7`` and ``conv2_1``,
    only the count can be compared.
    """
    if len(one) != len(other):
        return False
    levels, branched = one.nesting
    other_levels, other_branched = other.nesting
    return levels != other_levels or branched == other_branched


def buckets(left: Sequence[Group], right: Sequence[Group]) -> Iterator[Sides]:
    """Groups of one size on both sides, size by size, if every group has a like; else all of them at once."""
    if lonely_units(left, right):
        yield list(left), list(right)
        return
    for size in dict.fromkeys(map(len, left)):
        yield [group for group in left if len(group) == size], [group for group in right if len(group) == size]


def listed_otherwise(pair: tuple[Group, Group], sides: Sides, mute: Sequence[Sequence[Group]]) -> bool:
    """Whether two lists inside of blocks may count otherwise, as on both sides a module of their blocks is in no list.

    ``bn0`` and ``bn1`` may be the first two of three norms, and ``norms.1`` with ``norms.2`` the last two. So they may
    where both count alike, but not from 0, and no word says which of the three norms is the other one.
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
