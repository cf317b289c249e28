"""Links that are trusted first: equal values, or else equal names, if they are too many for an accident."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

from ckptfix.align.pairs import PROOF, Link
from ckptfix.align.units import ModelSide, Unit, template
from ckptfix.names import wrappers

SAME_NAMES = 0.5
"""Share of equal paths from which on equal names are trusted first."""


def same_values(a: ModelSide, b: ModelSide, proven: Mapping[str, str]) -> list[Link]:
    """Link modules if a tensor of one has the bytes of a tensor of the other; `proven` has the tensors' names."""
    if not proven:
        return []
    homes = {slot.name: unit for unit in b.units for slot in unit.slots.values()}
    found: dict[Unit, set[Unit]] = {}
    for unit in a.units:
        for slot in unit.slots.values():
            if slot.name in proven and proven[slot.name] in homes:
                found.setdefault(unit, set()).add(homes[proven[slot.name]])
    taken = Counter(other for others in found.values() for other in others)
    return [
        Link(unit, other, 1.0, PROOF)
        for unit, (other, *more) in ((unit, list(others)) for unit, others in found.items())
        if not more and taken[other] == 1 and unit.signature == other.signature
    ]


def trusted(a: ModelSide, b: ModelSide, proven: Mapping[str, str]) -> list[Link]:
    """Return the links by equal values, and by equal names for the rest unless the sides are copies by values."""
    found = same_values(a, b, proven)
    if len(found) >= SAME_NAMES * min(len(a.units), len(b.units)):
        return found
    done = {unit for link in found for unit in (link.one, link.other)}
    return found + [link for link in same_names(a, b) if link.one not in done and link.other not in done]


def same_names(a: ModelSide, b: ModelSide) -> list[Link]:
    """Link units of equal paths, apart from wrappers and a common prefix, if they are too many for an accident.

    If numbers seem to be shifted (one side counts from 0 and the other from 1), equal ones mean nothing.
    """
    bare_a, bare_b = _bare(a.units), _bare(b.units)
    enough = SAME_NAMES * min(len(a.units), len(b.units))
    same = {
        path: unit
        for path, unit in bare_a.items()
        if path in bare_b and unit.signature == bare_b[path].signature and unit.slots
    }
    if len(same) < enough:
        return []
    moved = _moved(bare_a, bare_b)
    found = [
        Link(unit, bare_b[path], 1.0, "same name")
        for path, unit in same.items()
        if _stack(template(path)[0]) not in moved
    ]
    return found if len(found) >= enough else []


def _moved(a: dict[str, Unit], b: dict[str, Unit]) -> set[str]:
    """Return the stacks in which the numbers of similar modules overlap, but each side has numbers of its own."""
    numbers: dict[tuple[str, Hashable], tuple[set[tuple[int, ...]], set[tuple[int, ...]]]] = {}
    for which, side_units in enumerate((a, b)):
        for path, unit in side_units.items():
            text, found = (unit.template, unit.numbers) if path == unit.path else template(path)
            numbers.setdefault((text, unit.signature), (set(), set()))[which].add(found)
    return {_stack(text) for (text, _), (one, other) in numbers.items() if one - other and other - one}


def _stack(text: str) -> str:
    """Return a template up to its last number; all of it if it has no number."""
    front, number, _ = text.rpartition("{}")
    return front + number if number else text


def _bare(units: Sequence[Unit]) -> dict[str, Unit]:
    paths = [wrappers.unwrapped(unit.path) for unit in units]
    while len(paths) > 1 and "." in paths[0]:
        front = paths[0].partition(".")[0] + "."
        if not all(path.startswith(front) for path in paths):
            break
        paths = [path[len(front) :] for path in paths]
    found = dict(zip(paths, units, strict=True))
    return found if len(found) == len(units) else {unit.path: unit for unit in units}


def renumbered(links: Sequence[Link], a: ModelSide, b: ModelSide) -> list[Link]:
    """Return the links that only a number in a name takes from a path which both sides have, with the same shapes.

    They are in doubt, except where all numbers in this place are shifted: one side counts from 0, the other from 1.
    """
    paths = [{unit.path: unit for unit in side.units} for side in (a, b)]
    moved = [link for link in links if _stays(link.one, paths[1], link.other, paths[0]) and _differ(link)]
    if not moved:
        return []
    numbers = [_numbers_in_names(side.units) for side in (a, b)]
    found = []
    for link in moved:
        (place, own), (twin, other) = (_in_name(unit.path, _differ(link)) for unit in (link.one, link.other))
        if place == twin:
            rows = [sorted(side[place]) for side in numbers]
            steps = {tuple(map(int.__sub__, there, here)) for here, there in zip(*rows, strict=False)}
            if len(rows[0]) != len(rows[1]) or steps != {tuple(map(int.__sub__, other, own))}:
                found.append(link)
    return found


def _differ(link: Link) -> int:
    """Return which component of two paths differs, from 1 on; 0 if several do, or if it is a place in a list."""
    rows = [unit.path.split(".") for unit in (link.one, link.other)]
    at = [at for at, (one, other) in enumerate(zip(*rows, strict=False)) if one != other]
    return at[0] + 1 if len(rows[0]) == len(rows[1]) and len(at) == 1 and not rows[0][at[0]].isdecimal() else 0


def _stays(one: Unit, theirs: Mapping[str, Unit], other: Unit, ours: Mapping[str, Unit]) -> bool:
    """Return whether the other side has one of two modules under its own path."""
    twins = theirs.get(one.path), ours.get(other.path)
    return any(twin is not None and twin.signature == one.signature == other.signature for twin in twins)


def _numbers_in_names(units: Sequence[Unit]) -> dict[str, set[tuple[int, ...]]]:
    """Return place -> the numbers there, for each component with a number in a name."""
    found: dict[str, set[tuple[int, ...]]] = {}
    for unit in units:
        for count in range(1, unit.path.count(".") + 2):
            place, numbers = _in_name(unit.path, count)
            if numbers:
                found.setdefault(place, set()).add(numbers)
    return found


def _in_name(path: str, count: int) -> tuple[str, tuple[int, ...]]:
    """Return the first components of a path, the last of them as a template, and its numbers."""
    *front, last = path.split(".")[:count]
    text, numbers = template(last)
    return ".".join((*front, text)), numbers
