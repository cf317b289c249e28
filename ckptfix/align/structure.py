"""Matching by structure: modules of equal shapes, distinguished by numbers, words and places.

What is compared are modules (`units.Unit`). Those whose tensors have the same names, shapes and kinds on both
sides form a class. Inside a class, repeating paths are groups (`groups`), and the best assignment of groups is
sought (`assignment.best`) by what their words mean (`roles`), by numbers, by order of definition and by place
among what is certain already. An assignment that another one comes close to is ambiguous, and says so.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ckptfix.align import assignment
from ckptfix.align import classes as match_classes
from ckptfix.align import roles as match_roles
from ckptfix.align.depth import same_depth
from ckptfix.align.groups import MOST, Effort, Group, Sides, alike, buckets, groups, levelled
from ckptfix.align.levels import surroundings, turned
from ckptfix.align.nesting import crossed, turnable
from ckptfix.align.result import Matching, Pair, Skipped
from ckptfix.align.scores import ordered_alike, ranks, rising, same_block, undecided, unlike
from ckptfix.align.units import Side, Signature, Unit, side, template
from ckptfix.names import wrappers
from ckptfix.names.learn import learn
from ckptfix.names.slots import Slot

ENOUGH = 2.5
"""By how much an assignment must beat the next best to be certain. Definition order alone, which distinguishes
``query, key, value`` from ``q, k, v`` but also from ``k, v, q``, gives 2."""

SUPPORT = 3.0
"""What names must say for a pair where one side has more modules of these shapes than the other."""

COMPARED = 2_500_000
"""Groups that are compared with groups, in all classes; a model that has more of them has names that say nothing."""

SAME_NAMES = 0.5
"""Share of equal paths from which on equal names are believed first."""


@dataclass(slots=True)
class Link:
    """Two units that go together; `instead` are the other's rivals."""

    one: Unit
    other: Unit
    confidence: float
    why: str
    instead: tuple[Unit, ...] = ()


@dataclass
class _State:
    """The two sides, and what is certain: for each side, the places of the linked units in order."""

    a: Side
    b: Side
    links: list[Link] = field(default_factory=list)
    pins: tuple[list[int], list[int]] = ([], [])
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
        """Take the links that are beyond doubt as landmarks, the longest run of them that is in the same order."""
        certain = sorted((link.one.first, link.other.first) for link in self.links if not link.instead)
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


def match(source: Sequence[Slot], target: Sequence[Slot], *, reshape: bool = False) -> Matching:
    """See `ckptfix.align.match.match`."""
    state = _State(side(source), side(target))
    state.add(_same_names(state.a, state.b))
    for key in (
        match_classes.whole,
        match_classes.main,
        match_classes.vector,
        *((match_classes.flat,) if reshape else ()),
    ):
        _by_class(state, key)
    _doubt_blocks(state)
    return _matching(state, source, target)


def _doubt_blocks(state: _State) -> None:
    """Put links in doubt whose blocks do not nest or may be counted from either end.

    Where shapes leave one candidate, it is certain.
    """
    certain = [link for link in state.links if not link.instead]
    doubtful = [certain[index] for index in crossed([(link.one, link.other) for link in certain])]
    turned_round = turnable([(link.one, link.other) for link in state.links], (state.a.units, state.b.units))
    for link in (*doubtful, *(state.links[index] for index in turned_round)):
        link.instead = link.instead or _rivals(state, link)
    for link in state.links:
        if link.other in link.instead:
            link.instead = tuple(unit for unit in link.instead if unit is not link.other) or _rivals(state, link)


def _rivals(state: _State, link: Link) -> tuple[Unit, ...]:
    """Another unit of the target for which shapes leave the link a choice; None without a choice."""
    if link.other.signature not in state.by_signature:
        return ()
    alike = state.by_signature[link.other.signature]
    at = alike.index(link.other)
    return (alike[at - 1],) if at else tuple(alike[1:2])


def _same_names(a: Side, b: Side) -> list[Link]:
    """Units of equal paths, wrappers and a common prefix aside, if there are too many for an accident.

    Where numbers seem to be moved (one side counts from 0 and the other from 1), equal ones mean nothing.
    """
    bare_a, bare_b = _bare(a.units), _bare(b.units)
    moved = _moved(bare_a, bare_b)
    found = [
        Link(unit, bare_b[path], 1.0, "same name")
        for path, unit in bare_a.items()
        if path in bare_b
        and unit.signature == bare_b[path].signature
        and unit.slots
        and _stack(template(path)[0]) not in moved
    ]
    return found if len(found) >= SAME_NAMES * min(len(a.units), len(b.units)) else []


def _moved(a: dict[str, Unit], b: dict[str, Unit]) -> set[str]:
    """Stacks where the numbers of like modules overlap, and neither side has all that the other has."""
    numbers: dict[tuple[str, Hashable], tuple[set[tuple[int, ...]], set[tuple[int, ...]]]] = {}
    for which, side_units in enumerate((a, b)):
        for path, unit in side_units.items():
            text, found = template(path)
            numbers.setdefault((text, unit.signature), (set(), set()))[which].add(found)
    return {_stack(text) for (text, _), (one, other) in numbers.items() if one - other and other - one}


def _stack(text: str) -> str:
    """A template up to its last number; all of it where it has none."""
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


def _by_class(state: _State, key: Callable[[Unit], Hashable]) -> None:
    """Link the free units of equal `key`: first where shapes leave one candidate, then where they leave several."""
    linked = {id(unit) for link in state.links for unit in (link.one, link.other)}
    unsure = {unit.signature for link in state.links if link.instead for unit in (link.one, link.other)}
    free = [[unit for unit in units
             if unit.slots and id(unit) not in linked and unit.signature not in unsure and key(unit)]
            for units in (state.a.units, state.b.units)]  # fmt: skip
    classes: dict[Hashable, tuple[list[Unit], list[Unit]]] = {}
    for which, units in enumerate(same_depth(free[0], free[1], key)):
        for unit in units:
            classes.setdefault(key(unit), ([], []))[which].append(unit)
    hard = []
    for ours, theirs in classes.values():
        if not ours or not theirs:
            continue
        ways = levelled(groups(ours), groups(theirs), state.effort)
        if len(ways) > 1:
            hard.append(ways)
            continue
        for left, right in buckets(*ways[0]):
            if len(left) == len(right) == 1 and alike(left[0], right[0]):
                state.add(_instances(left[0], right[0], math.inf, (), state))
            else:
                hard.append([(left, right)])
    state.pin()
    for ways in sorted(hard, key=lambda ways: len(ways[0][0]) * len(ways[0][1])):
        state.add(_best_way(state, ways))


def _best_way(state: _State, ways: Sequence[Sides]) -> list[Link]:
    """The links of the way to split that fits best; what a way that is close links otherwise is in doubt."""
    tried = []
    for way in ways:
        done = [_assigned(state, left, right) for left, right in (buckets(*way) if len(ways) > 1 else ways)]
        score = sum(row[0] for row in done), sum(row[1] for row in done)
        tried.append((score, [link for _, _, links in done for link in links]))
    tried.sort(key=lambda row: row[0], reverse=True)
    best, links = tried[0]
    for score, others in tried[1:]:
        if best[0] - score[0] >= ENOUGH and best[1] - score[1] >= ENOUGH:
            continue
        elsewhere = {id(link.one): link.other for link in others}
        for link in links:
            rival = elsewhere.get(id(link.one))
            if rival is not None and rival is not link.other and not link.instead:
                link.instead = (rival,)
    return links


def _assigned(state: _State, left: list[Group], right: list[Group]) -> tuple[float, float, list[Link]]:
    """The best assignment of groups to groups: its score, what of it is more than likeness, and the links."""
    state.compared += len(left) * len(right)
    if max(len(left), len(right)) > MOST or state.compared > COMPARED:
        return 0.0, 0.0, _in_definition_order(left, right)
    swapped = len(left) > len(right)
    rows, columns = (right, left) if swapped else (left, right)
    parts = [match_roles.parts([group.label for group in side_groups]) for side_groups in (rows, columns)]
    places = [
        [state.place(group, which) for group in side_groups]
        for which, side_groups in ((int(swapped), rows), (int(not swapped), columns))
    ]
    sides = (state.b, state.a) if swapped else (state.a, state.b)
    around = [[surroundings(group, which) for group in gs] for which, gs in zip(sides, (rows, columns), strict=True)]
    ranked = ranks(rows), ranks(columns)
    uneven = sum(map(len, rows)) != sum(map(len, columns))
    said = [[match_roles.score(one, other) for other in parts[1]] for one in parts[0]]
    likeness = [
        [said[i][j] - unlike(around[0][i], around[1][j]) - (0 if alike(one, other) else 100)
         for j, other in enumerate(columns)]
        for i, one in enumerate(rows)
    ]  # fmt: skip
    scores = [
        [score + ordered_alike(ranked, (i, j), (places[0][i], places[1][j])) for j, score in enumerate(line)]
        for i, line in enumerate(likeness)
    ] if state.ordered else likeness  # fmt: skip
    chosen = assignment.best(scores)
    unsure = undecided(likeness, chosen) if state.ordered else set[int]()
    unsure -= {i for i in unsure if state.between(rows[i], columns[chosen[i]], swapped=swapped)}
    links = []
    margins = assignment.margins(scores, chosen, ENOUGH)
    listed = [[bool(group.units[0].numbers) for group in side_groups] for side_groups in (rows, columns)]
    mixed = all(len(set(line)) == 2 for line in listed)
    doubts = []
    for (i, j), (margin, rival) in zip(enumerate(chosen), margins, strict=True):
        contrary = (said[i][j] < 0 and rival != j) or (mixed and listed[0][i] != listed[1][j])
        unfit = not alike(rows[i], columns[j]) or (uneven and scores[i][j] < SUPPORT)
        doubts.append(margin < ENOUGH or i in unsure or contrary or unfit)
    for (i, j), (margin, rival) in zip(enumerate(chosen), margins, strict=True):
        one, other = (columns[j], rows[i]) if swapped else (rows[i], columns[j])
        rivals: tuple[Unit, ...] = ()
        if doubts[i] or (any(doubts) and said[i][j] <= 0 and len(rows) > 1):
            rival = rival if rival != j else (j + 1) % len(columns)
            rivals = tuple(other.units if swapped else columns[rival].units)
            margin = min(margin, ENOUGH)
        links += _instances(one, other, margin, rivals, state)
    sure = sum(said[i][j] + 2 * same_block(around[0][i], around[1][j]) for i, j in enumerate(chosen))
    return sum(scores[i][j] for i, j in enumerate(chosen)), sure, links


def _instances(one: Group, other: Group, margin: float, rivals: Sequence[Unit], state: _State) -> list[Link]:
    """The units of two groups, one by one."""
    confidence = 0.99 if margin == math.inf else round(1 - 0.5 * 2 ** (-max(margin, 0.0) / 3), 2)
    why = "only shape" if margin == math.inf else "name and place"
    if alike(one, other):
        doubt = one.backwards != other.backwards or (state.ordered and one.in_order != other.in_order)
        twins, doubts = turned(one, other, (state.a, state.b))
        links = [
            Link(unit, twin, confidence, why, tuple(rivals[index : index + 1] or rivals[-1:]))
            for index, (unit, twin) in enumerate(zip(one.units, twins, strict=True))
        ]
        for link in links:
            if link.other in doubts:
                link.instead = link.instead or (doubts[link.other],)
        if doubt:
            for link, twin in zip(links, sorted(other.units, key=lambda unit: unit.first), strict=True):
                link.instead = link.instead or (twin,)
        return links
    pairs = zip(one.units, other.units, strict=False)
    return [Link(unit, twin, 0.3, "order", tuple(rivals[-1:])) for unit, twin in pairs]


def _why(link: Link, slot: Slot, twin: Slot) -> str:
    """Why two tensors are a pair; one with a unique shape may still have its name."""
    return "same name" if slot.name == twin.name and link.why == "only shape" else link.why


def _in_definition_order(left: list[Group], right: list[Group]) -> list[Link]:
    """Too many paths that have nothing in common: a proposal, and each pair of it ambiguous."""
    units = [sorted((unit for group in side_groups for unit in group.units), key=lambda unit: unit.first)
             for side_groups in (left, right)]  # fmt: skip
    links = []
    for index, (one, other) in enumerate(zip(*units, strict=False)):
        rival = units[1][index - 1 if index else min(1, len(units[1]) - 1)]
        links.append(Link(one, other, 0.2, "order", (rival,)))
    return links


def _matching(state: _State, source: Sequence[Slot], target: Sequence[Slot]) -> Matching:
    pairs: dict[str, Pair] = {}
    skipped: tuple[dict[str, Skipped], dict[str, Skipped]] = ({}, {})
    for link in state.links:
        for leaf, slot in link.one.slots.items():
            twin = _twin(link.one, leaf, link.other)
            if twin is None:
                continue
            instead = tuple(rival.name for unit in link.instead if (rival := _twin(link.one, leaf, unit)) is not None)
            shape = None if slot.shape == twin.shape else twin.shape
            pairs[slot.name] = Pair(slot.name, twin.name, link.confidence, _why(link, slot, twin), instead, shape)
        for leaf, (slot, _) in link.one.optional.items():
            if leaf in link.other.optional and link.other.optional[leaf][0].shape == slot.shape:
                twin = link.other.optional[leaf][0]
                pairs[slot.name] = Pair(slot.name, twin.name, link.confidence, _why(link, slot, twin))
    taken = {pair.target for pair in pairs.values()}
    _pair_aliases(state, pairs, taken)
    taken = {pair.target for pair in pairs.values()}
    for which, units, done in ((0, state.a.units, pairs.keys()), (1, state.b.units, taken)):
        for unit in units:
            for slot, rule in unit.optional.values():
                if slot.name not in done:
                    skipped[which][slot.name] = Skipped(slot.name, rule)
    for which, aliases, done in ((0, state.a.aliases, pairs.keys()), (1, state.b.aliases, taken)):
        for slot in aliases:
            if slot.name not in done:
                skipped[which][slot.name] = Skipped(slot.name, "tied", tied=True)
    ordered = tuple(pairs[slot.name] for slot in source if slot.name in pairs)
    return Matching(
        "structure",
        ordered,
        learn({pair.source: pair.target for pair in ordered}, [slot.name for slot in source], skipped[0]),
        tuple(slot.name for slot in source if slot.name not in pairs and slot.name not in skipped[0]),
        tuple(slot.name for slot in target if slot.name not in taken and slot.name not in skipped[1]),
        tuple(skipped[0].values()),
        tuple(skipped[1].values()),
    )


def _twin(one: Unit, leaf: str, other: Unit) -> Slot | None:
    """The slot of `other` for `leaf` of `one`; a lone parameter is paired with a lone weight."""
    found = other.slots.get(leaf)
    if found is None and leaf in ("", "weight"):
        found = other.slots.get("weight" if leaf == "" else "")
    if found is None and len(one.slots) == len(other.slots) == 1:
        found = next(iter(other.slots.values()))
    return found


def _pair_aliases(state: _State, pairs: dict[str, Pair], taken: set[str]) -> None:
    """Names of tied tensors: to the target's names for the same tie, or to a tensor that it does not tie."""
    waiting: dict[str | None, list[Slot]] = {}
    for slot in state.b.aliases:
        waiting.setdefault(slot.tied, []).append(slot)
    free = [slot for unit in state.b.units for slot in unit.slots.values() if slot.name not in taken]
    for slot in state.a.aliases:
        primary = pairs.get(slot.tied or "")
        if primary is None:
            continue
        if waiting.get(primary.target):
            twin = waiting[primary.target].pop(0)
            pairs[slot.name] = Pair(slot.name, twin.name, primary.confidence, "tied", primary.instead)
            continue
        fitting = [other for other in free if other.shape == slot.shape]
        if len(fitting) == 1:
            free.remove(fitting[0])
            pairs[slot.name] = Pair(slot.name, fitting[0].name, 0.9, "tied in the source")
