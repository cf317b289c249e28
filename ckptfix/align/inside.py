"""The way down the tree of names: modules in doubt are assigned inside of blocks that are known to correspond.

The classes of `structure` hold the modules of a shape from the whole model. Once certain modules show that two blocks
are the same, the modules of these blocks have their counterparts in each other, and few are left to choose between:
the one that is left, the one that belongs to a certain sibling, or the one that words distinguish from the others
in its block. That in turn may show that further blocks are the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from operator import attrgetter

from ckptfix.align import numbered, roles
from ckptfix.align.nesting import Twins, crossing
from ckptfix.align.pairs import Link
from ckptfix.align.siblings import Companions, RepeatedBlocks, is_convolution, is_matrix, one_end, ranks
from ckptfix.align.state import AlignState
from ckptfix.align.units import ModelSide, Unit

ROUNDS = 6
"""Times that what has become certain is used again. Each settles a level of the tree."""

MOST = 16
"""Modules of a shape in one block that are told apart by words."""

WHY = "beside certain ones"
"""Reason for pairing modules whose siblings are certain."""

Place = tuple[str, str]
"""Two blocks that are the same, one of each side; empty for what is in no such block."""

NOWHERE: Place = ("", "")

Sides = tuple[list[Unit], list[Unit]]

_DIGITS = re.compile(r"\d+")


def settle(state: AlignState, held: Collection[Unit] = ()) -> bool:
    """Make links certain whose modules have one counterpart left inside of their blocks; return whether any was made.

    Args:
        held: modules whose counterparts may have other shapes.
    """
    changed = False
    across: set[tuple[str, str]] | None = None
    for _ in range(ROUNDS):
        if not any(link.instead for link in state.links):
            return changed
        if across is None:
            across = crossing((link.one, link.other) for link in state.links if link.turned)
        sure = {link.one: link.other for link in state.links if not link.instead}
        twins = Twins(sure.items(), (state.a.contents, state.b.contents), state.blocks, attrgetter("holders"))
        twins.descend()
        place_of = partial(twins.place, crossing=across)
        rows = list(_rows(state, sure, place_of, held))
        apart = _Apart(sure, state.companions, is_convolution)
        refuted = {place for place, (one, *more), (other, *_) in rows
                   if not more and (apart(one, other) or _contrary(one, other, place))}  # fmt: skip
        if refuted - {NOWHERE}:
            twins.forget(refuted)
            rows = list(_rows(state, sure, place_of, held))
        repeated = RepeatedBlocks(sure, (state.a, state.b), twins.of)
        found: dict[Unit, Unit] = {}
        for place, ours, theirs in rows:
            pairs = (
                _decided(ours, theirs, place, sure, state.companions)
                or repeated.decided(ours, theirs, place)
                or _by_number(ours, theirs, place, (state.a, state.b))
            )
            if not any(map(apart, pairs, pairs.values())):
                found |= pairs
        if not found:
            return changed
        _apply(state, found)
        changed = True
    return changed


def _rows(
    state: AlignState, sure: Mapping[Unit, Unit], place_of: Callable[[Unit, int], Place], held: Collection[Unit]
) -> Iterator[tuple[Place, list[Unit], list[Unit]]]:
    """Yield the modules of a shape and a place that are not certain, if the two sides are each other's counterparts."""
    mixed = {kind for link in state.links if link.instead and (link.one in held or link.one.kind != link.other.kind)
             for kind in (link.one.kind, link.other.kind)}  # fmt: skip
    done = sure.keys(), set(sure.values())
    rows: dict[tuple[Hashable, Place], Sides] = {}
    for which, units in enumerate((state.a.units, state.b.units)):
        for unit in units:
            if unit.slots and unit not in done[which] and (kind := unit.kind) not in mixed:
                rows.setdefault((kind, place_of(unit, which)), ([], []))[which].append(unit)
    uneven = {kind for (kind, _), (ours, theirs) in rows.items() if len(ours) != len(theirs)}
    for (kind, place), (ours, theirs) in rows.items():
        if len(ours) == len(theirs) and (place != NOWHERE or kind not in uneven):
            yield place, ours, theirs


def _decided(
    ours: Sequence[Unit],
    theirs: Sequence[Unit],
    place: Place,
    sure: Mapping[Unit, Unit],
    beside: tuple[Companions, Companions],
) -> dict[Unit, Unit]:
    """Return the certain pairs of `ours` and `theirs`, whose counterparts are each other's."""
    if len(ours) == 1:
        return {} if _contrary(ours[0], theirs[0], place) else {ours[0]: theirs[0]}
    labels = [_labels(units, front) for units, front in zip((ours, theirs), place, strict=True)]
    known = dict(_by_companion(ours, theirs, sure, beside))
    if len(known) == len(ours):
        return known
    if any(beside[0].course(one) * beside[1].course(other) < 0 for one, other in known.items()):
        known = {one: other for one, other in known.items() if one_end(one, beside[0].of(one))}
    known = known or _by_name(ours, theirs)
    if known:
        return known
    if len(ours) > MOST:
        return {}
    if any(map(_counts_twice, labels)):
        return {}
    return {ours[row]: theirs[column] for row, column in roles.told(*labels)}


def _labels(units: Iterable[Unit], front: str) -> list[str]:
    """Return the paths of modules in a block; those of modules elsewhere are left out."""
    if not front:
        return [unit.path for unit in units]
    return [f"{{}}{unit.path[len(front) :]}" for unit in units if unit.path.startswith(front)]


def _by_number(
    ours: Sequence[Unit], theirs: Sequence[Unit], place: Place, sides: tuple[ModelSide, ModelSide]
) -> dict[Unit, Unit]:
    """Return the pairs of modules that one side numbers, all but one, and that the other side has in order."""
    if place == NOWHERE or not 1 < len(ours) <= MOST:
        return {}
    texts, others = _labels(ours, place[0]), _labels(theirs, place[1])
    if _counts_twice(texts) or _counts_twice(others):
        return {}
    held = [[unit for unit in side.units if unit.slots and unit.path.startswith(front)]
            for side, front in zip(sides, place, strict=True)]  # fmt: skip
    near = [_labels(units, front) for units, front in zip(held, place, strict=True)]
    similar = [
        _labels((unit for unit in units if ranks(unit) == ranks(ours[0]) and unit not in open_), front)
        for units, open_, front in zip(held, (ours, theirs), place, strict=True)
    ]
    rows = numbered.paired(texts, others, (near[0], near[1]), (similar[0], similar[1]))
    return {ours[row]: theirs[to] for row, to in rows}


def _contrary(one: Unit, other: Unit, place: Place) -> bool:
    """Return whether the words of two modules contradict each other, as a whole or inside of their blocks."""
    inside = (text for unit, front in zip((one, other), place, strict=True) for text in _labels([unit], front))
    return any(roles.score(*(roles.parts([text])[0] for text in pair)) < 0
               for pair in (inside, (one.path, other.path)))  # fmt: skip


def _counts_twice(labels: Sequence[str]) -> bool:
    """Return whether two numbers differ among paths: which counts blocks, and which the modules in one, is unknown.

    ``0.norm2`` and ``1.norm1`` may be ``norm2.0`` and ``norm1.1``, so that no order of both numbers is certain.
    """
    numbers = [_DIGITS.findall(text) for text in labels]
    return sum(len(set(column)) > 1 for column in zip_longest(*numbers)) > 1


def _by_name(ours: Sequence[Unit], theirs: Sequence[Unit]) -> dict[Unit, Unit]:
    """Return the pairs of equal names if one module of each side holds all of them, under the same names."""
    named: list[dict[str, Unit]] = [{}, {}]
    for side, units in zip(named, (ours, theirs), strict=True):
        fronts = {unit.path.rpartition(".")[0] for unit in units}
        side |= {unit.path.rpartition(".")[2]: unit for unit in units if len(fronts) == 1}
    if len(named[0]) < len(ours) or named[0].keys() != named[1].keys() or all(map(str.isdecimal, named[0])):
        return {}
    return {unit: named[1][name] for name, unit in named[0].items()}


def _by_companion(
    ours: Sequence[Unit],
    theirs: Sequence[Unit],
    sure: Mapping[Unit, Unit],
    beside: tuple[Companions, Companions],
) -> Iterator[tuple[Unit, Unit]]:
    """Yield the pairs of modules that belong to two modules which are certainly each other's counterpart."""
    for unit in ours:
        other = beside[0].of(unit)
        twin = beside[1].of(sure[other]) if other is not None and other in sure else None
        if twin is not None and twin in theirs:
            yield unit, twin


def shifted(state: AlignState) -> Iterator[Link]:
    """Yield the links of norms that may belong to the next matrix, because the two sides may group them differently.

    One side may group a norm with the convolution after it, and the other side with the one before it. Then one norm
    is left outside of the blocks on each side: the last one, and the first one. Links are yielded if the order of
    definition differs, or if only one of the norms outside is beside a matrix; not if order or widths show the same
    grouping, or if words show that the norms outside are the same.
    """
    sure = {link.one: link.other for link in state.links if not link.instead}
    beside = state.companions
    grouped: dict[Hashable, list[Link]] = {}
    outside: dict[Hashable, list[Link]] = {}
    same: set[Hashable] = set()
    apart: set[Hashable] = set()
    for link in state.links:
        kind = link.one.kind
        near = beside[0].of(link.one), beside[1].of(link.other)
        if link.instead or is_matrix(link.one):
            continue
        if near[0] is not None and near[1] is not None and sure.get(near[0]) is near[1]:
            course = beside[0].course(link.one) * beside[1].course(link.other)
            if course > 0 or one_end(link.one, near[0]):
                same.add(kind)
            elif beside[0].housed(link.one) and beside[1].housed(link.other):
                grouped.setdefault(kind, []).append(link)
                if course < 0:
                    apart.add(kind)
        elif not link.one.fronts and not link.other.fronts:
            found = [roles.parts([unit.path])[0] for unit in (link.one, link.other)]
            if roles.score(*found) <= 0:
                outside.setdefault(kind, []).append(link)
                if (near[0] is None) != (near[1] is None):
                    apart.add(kind)
    for kind in grouped.keys() & outside.keys() & apart - same:
        yield from (*grouped[kind], *outside[kind])


def parted(state: AlignState) -> Iterator[Unit]:
    """Yield the norms with certain links whose matrices are certainly not each other's."""
    sure = {link.one: link.other for link in state.links if not link.instead}
    apart = _Apart(sure, state.companions, is_matrix)
    return (one for one, other in sure.items() if apart(one, other))


class _Apart:
    """Tells that two norms are not each other's, because the matrices that they belong to certainly are not.

    If the order of definition differs, the two sides group norms and matrices differently, so they may be.
    """

    def __init__(
        self, sure: Mapping[Unit, Unit], beside: tuple[Companions, Companions], tells: Callable[[Unit], bool]
    ) -> None:
        """Keep the certain pairs, the companions of both sides, and which matrices show it.

        Inside of blocks that correspond, only convolutions do: before and after a linear layer, habits vary.
        """
        self._sure = sure
        self._taken = set(sure.values())
        self._beside = beside
        self._tells = tells

    def __call__(self, one: Unit, other: Unit) -> bool:
        ours, theirs = self._beside
        near, far = ours.of(one), theirs.of(other)
        if is_matrix(one) or near is None or far is None or self._sure.get(near) is far:
            return False
        known = near in self._sure or far in self._taken
        return known and self._tells(near) and self._tells(far) and ours.course(one) * theirs.course(other) >= 0


def _apply(state: AlignState, found: Mapping[Unit, Unit]) -> None:
    """Make the links that were found certain, and keep the others of these modules in doubt among what is left."""
    taken = set(found.values())
    open_ = [link for link in state.links if link.instead and link.one not in found]
    state.links[:] = [link for link in state.links if not link.instead]
    state.add(Link(one, other, 0.9, WHY) for one, other in found.items())
    free = {link.other: None for link in open_ if link.other not in taken}
    left: dict[Hashable, list[Unit]] = {}
    for unit in state.b.units:
        left.setdefault(unit.kind, []).append(unit)
    gone = taken | {link.other for link in state.links}
    for link in open_:
        rest = [unit for unit in left[link.other.kind] if unit not in gone]
        if link.other in taken:
            other = next((unit for unit in rest if unit not in free), None)
            if other is None:
                continue
            link.other = other
            free[other] = None
        rivals = [unit for unit in link.instead if unit in rest and unit is not link.other]
        rivals = rivals or [unit for unit in rest if unit is not link.other][:1]
        link.instead = tuple(rivals) or (link.other,)
        state.add([link])
