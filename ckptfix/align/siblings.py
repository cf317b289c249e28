"""Siblings of a module, and what they show about it.

A norm belongs to its convolution. Two towers, or blocks whose tensors have other widths, may be of one class of
modules: then they have the same names inside. Where shapes show in one of them which name of the other side goes with
a name, they show it for the rest.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence

from ckptfix.align.units import ModelSide, Unit
from ckptfix.names.letters import COUNTING

_NUMBERED = re.compile(
    rf"(?P<home>(?:.*\.)?)[A-Za-z_]+(?:(?P<list>\.?)(?P<number>\d+)|_(?P<letter>{COUNTING}))"
)
"""A module with a number or letter of its own, or in a list of its own: ``conv1``, ``conv_a``, ``convs.0``.

Places in lists do not count the same as numbers in names: ``shortcut.1`` is not the norm of ``conv1``.
"""


class Companions:
    """Modules that belong together: a norm and its convolution.

    They are alone in one module, have the same number in a block (``conv1`` and ``bn1``), or take turns in a list.
    """

    def __init__(self, side: ModelSide) -> None:
        self._side = side
        self._found: dict[Unit, Unit] = {}
        units = side.units
        homes: dict[str, list[Unit]] = {}
        for unit in units:
            if unit.slots:
                homes.setdefault(unit.path.rpartition(".")[0], []).append(unit)
        under = Counter(holder for unit in units if unit.slots for holder in unit.holders)
        for home, inside in homes.items():
            if home and len(inside) == 2 == under[home]:
                self._add(*inside)
        for home, inside in homes.items():
            self._take_turns(home, inside)
        self._housed = frozenset(self._found)
        numbered: dict[tuple[str, str, bool], list[Unit]] = {}
        for unit in units:
            found = _NUMBERED.fullmatch(unit.path)
            if unit.slots and unit not in self._found and found is not None:
                number = found["number"] or found["letter"]
                numbered.setdefault((found["home"], number, bool(found["list"])), []).append(unit)
        for pair in numbered.values():
            if len(pair) == 2:
                self._add(*pair)

    def of(self, unit: Unit) -> Unit | None:
        """Return the companion of a module, or None."""
        return self._found.get(unit)

    def housed(self, unit: Unit) -> bool:
        """Return whether a module or a list of such pairs shows its companion; otherwise, an equal number does."""
        return unit in self._housed

    def course(self, unit: Unit) -> int:
        """Return 1 if the companion is defined right after it, -1 if right before; 0 if not, or the order is unknown.

        A norm may be that of the convolution before it, or of the one after it.
        """
        if not self._side.in_order:
            return 0
        before, after = self._side.beside(unit)
        other = self._found[unit]
        return 1 if other is after else -1 if other is before else 0

    def _add(self, one: Unit, other: Unit) -> None:
        if is_matrix(one) != is_matrix(other):
            self._found[one], self._found[other] = other, one

    def _take_turns(self, home: str, inside: Sequence[Unit]) -> None:
        """Pair the modules of a list that holds a norm and a matrix in turn."""
        last = {unit: unit.path[len(home) :].lstrip(".") for unit in inside}
        order = {int(text): unit for unit, text in last.items() if text.isdecimal() and len(text) < 19}
        if len(order) != len(inside) or len(inside) % 2:
            return
        run = [order[at] for at in sorted(order)]
        pairs = list(zip(run[::2], run[1::2], strict=True))
        if all(is_matrix(one) != is_matrix(other) for one, other in pairs):
            for one, other in pairs:
                self._add(one, other)


def is_matrix(unit: Unit) -> bool:
    return any(len(slot.shape) > 1 for slot in unit.slots.values())


def is_convolution(unit: Unit) -> bool:
    return any(len(slot.shape) > 2 for slot in unit.slots.values())


def one_end(one: Unit, other: Unit | None) -> bool:
    """Return whether the width of a norm shows on which side of its matrix it is: only inputs or outputs are as wide.

    In a convolution of groups, the second dimension is a part of the inputs.
    """
    if other is None:
        return False
    vector, matrix = (other, one) if is_matrix(one) else (one, other)
    widths = {slot.shape[0] for slot in vector.slots.values() if len(slot.shape) == 1}
    ends = {slot.shape[:2] for slot in matrix.slots.values() if len(slot.shape) > 1}
    if len(widths) != 1 or len(ends) != 1:
        return False
    (width,), ((first, second),) = widths, ends
    return (width == first) != (width == second) and (first < second or first % second != 0)


Place = tuple[str, str]


class RepeatedBlocks:
    """The names inside of blocks that correspond, and those on the other side, by all names of the two blocks."""

    def __init__(
        self, sure: Mapping[Unit, Unit], sides: tuple[ModelSide, ModelSide], twin_of: Callable[[str], str | None]
    ) -> None:
        self._inside: tuple[dict[str, set[Hashable]], dict[str, set[Hashable]]] = ({}, {})
        for side, found in zip(sides, self._inside, strict=True):
            for unit in side.units:
                if unit.slots:
                    for front in unit.holders:
                        found.setdefault(front, set()).add((unit.path[len(front) :], ranks(unit)))
        self._keys: dict[Place, Hashable] = {}
        self._known: dict[tuple[Hashable, str], set[str]] = {}
        for one, other in sure.items():
            for front in one.holders:
                twin = twin_of(front)
                if twin is not None and other.path.startswith(twin):
                    known = self._key((front, twin)), one.path[len(front) :]
                    self._known.setdefault(known, set()).add(other.path[len(twin) :])

    def decided(self, ours: Sequence[Unit], theirs: Sequence[Unit], place: Place) -> dict[Unit, Unit]:
        """Return the pairs of modules in two blocks whose names are paired in another two with the same names."""
        if not place[0]:
            return {}
        key = self._key(place)
        named = {unit.path[len(place[1]) :]: unit for unit in theirs}
        found: dict[Unit, Unit] = {}
        for unit in ours:
            others = self._known.get((key, unit.path[len(place[0]) :]), set())
            if len(others) == 1 and (name := next(iter(others))) in named:
                found[unit] = named[name]
        return found if len(set(found.values())) == len(found) else {}

    def _key(self, place: Place) -> Hashable:
        if place not in self._keys:
            self._keys[place] = tuple(
                frozenset(found.get(front, ())) for front, found in zip(place, self._inside, strict=True)
            )
        return self._keys[place]


def ranks(unit: Unit) -> Hashable:
    """Return the names of a module's tensors and their numbers of dimensions."""
    return frozenset((leaf, len(slot.shape)) for leaf, slot in unit.slots.items())
