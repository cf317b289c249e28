"""Blocks that have the same names as others: what a name is in one of them, it is in all.

Two towers, or blocks whose tensors have other widths, may be of one class of modules: then they have the same names
inside. Where shapes show in one of them which name of the other side goes with a name, they show it for the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

from ckptfix.align.units import ModelSide, Unit

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
