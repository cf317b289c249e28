"""Matching by structure: modules of equal shapes, distinguished by numbers, words and places.

Modules (`units.Unit`) are compared. Those whose tensors have the same names, shapes and kinds on both sides form a
class. Inside a class, repeating paths are groups (`groups`). The best assignment of groups is sought
(`assignment.best`) by the meaning of their words (`roles`), by numbers, by order of definition and by place among what
is certain already. An assignment that another one comes close to is ambiguous, and is reported as such.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import field, replace
from itertools import pairwise

from ckptfix.align import assignment
from ckptfix.align import roles as match_roles
from ckptfix.align.depth import same_depth
from ckptfix.align.groups import MOST, Sides, UnitGroup, alike, buckets, levelled, lonely_units
from ckptfix.align.groups import groups as by_template
from ckptfix.align.inside import parted, settle, shifted
from ckptfix.align.levels import surroundings, turned
from ckptfix.align.nesting import crossed, turnable
from ckptfix.align.pairs import PROOF, Link, matching
from ckptfix.align.result import Matching
from ckptfix.align.roles import RoleEvidence, singular
from ckptfix.align.same_names import renumbered, trusted
from ckptfix.align.scores import ENOUGH, ordered_alike, ranks, same_block, undecided, unlike
from ckptfix.align.stacks import shared
from ckptfix.align.state import AlignState
from ckptfix.align.units import ModelSide, Signature, Unit, counted, side, words
from ckptfix.dataclass import dataclass
from ckptfix.names import letters
from ckptfix.names.learn import learn
from ckptfix.names.slots import Slot


def placed_by_name(side: ModelSide, groups: Sequence[UnitGroup], parts: Sequence[RoleEvidence]) -> list[bool]:
    """Return for each of the rival `groups` whether its name shows where it belongs.

    Numbers show it if they count up as modules are defined. So does a word, or a block of its own, that it shares with
    the module defined before or after it: ``expand_bn`` is the norm of ``expand_conv``. If only one group shows
    nothing, it belongs in the remaining place. If the names of two norms show nothing, the first defined need not run
    first.
    """
    order = sorted(groups, key=lambda group: group.units[0].first)
    if all(counted(one.label, other.label) for one, other in pairwise(order)):
        return [True] * len(groups)
    homes = [_homes(group.units[0]) for group in groups]
    found = []
    for group, part, home in zip(groups, parts, homes, strict=True):
        own = {front for front in home if sum(front in other for other in homes) == 1}
        near = [unit for unit in side.beside(group.units[0]) if unit is not None]
        found.append(any(part.terms.intersection(words(unit.path)) or own & _homes(unit) for unit in near))
    return found if found.count(False) > 1 else [True] * len(groups)


def _homes(unit: Unit) -> set[str]:
    """Return the paths of the modules that contain it, except lists of modules."""
    components = unit.path.split(".")
    return {".".join(components[:count]) for count in range(1, len(components)) if not components[count].isdecimal()}


def untold(sides: Sides, parts: Sequence[Sequence[RoleEvidence]]) -> Sides:
    """Return the groups of each side that no word connects with a group of the other side."""
    told = [[singular(one, other) for other in parts[1]] for one in parts[0]]
    return (
        [group for group, row in zip(sides[0], told, strict=True) if not any(row)],
        [group for group, column in zip(sides[1], zip(*told, strict=True), strict=True) if not any(column)],
    )


def whole(unit: Unit) -> Hashable:
    """Return a key for all tensors of a module; a matrix by itself has the key of a module with just that matrix."""
    if len(unit.slots) == 1 and unit.slots.keys() <= {"", "weight"}:
        return main(unit) or unit.signature
    return unit.signature


def main(unit: Unit) -> Hashable:
    """Return a key for what is left then: modules with or without a bias, and parameters outside a module."""
    slot = unit.slots.get("weight") or unit.slots.get("")
    if slot is None or (not unit.slots.get("weight") and len(slot.shape) == 2 and slot.shape[0] == slot.shape[1]):
        return ()  # a square matrix by itself may be the transpose of a Linear's weight
    return ("weight", slot.shape)


def vector(unit: Unit) -> Hashable:
    """Return a key for what is left then: single vectors under any name (a norm's ``scale``, a lone bias)."""
    if len(unit.slots) != 1:
        return ()
    (slot,) = unit.slots.values()
    return ("vector", slot.shape) if len(slot.shape) == 1 else ()


def flat(unit: Unit) -> Hashable:
    if len(unit.slots) != 1:
        return tuple(sorted((leaf, math.prod(slot.shape)) for leaf, slot in unit.slots.items()))
    return ("one", math.prod(next(iter(unit.slots.values())).shape))


def reshaped(one: Sequence[Unit], other: Sequence[Unit]) -> frozenset[Hashable]:
    """Return the keys by `flat` for which the two sides have different shapes, so equal shapes alone decide nothing."""
    sides = (Counter(unit.signature for unit in one), Counter(unit.signature for unit in other))
    unlike = {signature for signature in sides[0] | sides[1] if sides[0][signature] != sides[1][signature]}
    return frozenset(flat(unit) for unit in (*one, *other) if unit.signature in unlike)


def without(key: Callable[[Unit], Hashable], held: frozenset[Hashable]) -> Callable[[Unit], Hashable]:
    """Return `key`, changed to return an empty key for the modules whose key by `flat` is in `held`."""
    return (lambda unit: () if flat(unit) in held else key(unit)) if held else key


def scoped(key: Callable[[Unit], Hashable], within: Mapping[Unit, Hashable]) -> Callable[[Unit], Hashable]:
    """Return `key`, which depends on signatures only, with the stacks that contain a module if both sides have them."""
    known: dict[Signature, Hashable] = {}

    def both(unit: Unit) -> Hashable:
        own = known.get(unit.signature) or known.setdefault(unit.signature, key(unit))
        return (own, within.get(unit)) if own else ()

    return both


SUPPORT = 3.0
"""Score that names must give a pair if one side has more modules of these shapes than the other."""

COMPARED = 2_500_000
"""Comparisons of groups with groups, in all classes. A model that needs more has names that say nothing."""

COUNTED = 17.0
"""Margin for pairing the only groups of n modules, rather than with a part of another group."""

BY_NUMBER = "number"
"""Reason for pairing modules whose groups are the only ones of their size."""

BY_NAME = "name and place"
"""Reason for pairing modules whose groups are not the only ones of their size."""

BLOCKS = 1.0
"""Score if two groups are in the same blocks."""

APART = 6.0
"""Penalty if they are not."""


def match(
    source: Sequence[Slot], target: Sequence[Slot], *, reshape: bool = False, proven: Mapping[str, str] | None = None
) -> Matching:
    """Match by structure; see `ckptfix.align.match.match`."""
    found = _paired(source, target, reshape, proven or {})  # the modules and links are gone when rules are learned
    wanted = {pair.source: pair.target for pair in found.pairs}
    skipped = frozenset(row.name for row in found.skipped_source)
    return replace(found, rules=learn(wanted, [slot.name for slot in source], skipped))


def _paired(source: Sequence[Slot], target: Sequence[Slot], reshape: bool, proven: Mapping[str, str]) -> Matching:
    """Return the matching without the rules that give its pairs."""
    places = letters.series(*([slot.name for slot in slots] for slots in (source, target)))
    state = AlignState(side(source, places), side(target, places))
    state.add(trusted(state.a, state.b, proven))
    held = reshaped(state.a.units, state.b.units) if reshape else frozenset()
    stacks = shared(state.a, state.b)
    state.blocks = stacks.blocks
    for key in (whole, main, vector):
        _by_class(state, scoped(without(key, held), stacks.scopes))
    if reshape:
        _by_class(state, scoped(flat, stacks.scopes))
    del stacks
    state.twins = None  # classes need it; what follows depends on all links
    state.a.forget()
    state.b.forget()
    _doubt_blocks(state, set(parted(state)))
    kept = {unit for unit in state.a.units if flat(unit) in held} if held else ()
    if state.compared <= COMPARED and settle(state, kept):
        _doubt_blocks(state)
    for link in (*shifted(state), *renumbered(state.links, state.a, state.b)):
        if link.why != PROOF:
            _doubt(state, link)
    _name_rivals(state)
    return matching(state.links, (state.a, state.b), source, target)


def _doubt_blocks(state: AlignState, strays: Collection[Unit] = ()) -> None:
    """Put links in doubt whose blocks do not nest or may be counted from either end, and `strays`.

    A wrong link makes another link of its class wrong. Only words that apply to one place keep the rest of the class.
    """
    certain = [link for link in state.links if not link.instead and link.why != PROOF]
    sides = state.a.units, state.b.units
    turned_round = turnable([(link.one, link.other) for link in state.links], sides)
    found = crossed([(link.one, link.other) for link in certain], sides)
    found |= {index for index, link in enumerate(certain) if link.one in strays}
    refuted = {certain[index].one.signature for index in found}
    for index, link in enumerate(certain):
        if index in found or (link.one.signature in refuted and not link.firm):
            _doubt(state, link)
    unsure = {link.one.signature for link in state.links if link.instead and link.why == BY_NUMBER}
    for link in state.links:
        if link.why in (BY_NUMBER, BY_NAME) and not link.firm and link.one.signature in unsure:
            _doubt(state, link)
    for index in turned_round:
        if state.links[index].why != PROOF:
            _doubt(state, state.links[index])
    for link in state.links:
        if link.other in link.instead:
            link.instead = tuple(unit for unit in link.instead if unit is not link.other)
            _doubt(state, link)


RIVALS = 3
"""Rivals of a pair that are named."""


def _name_rivals(state: AlignState) -> None:
    """Name as rivals what is possible in the place of a pair: modules like it in its block that are in doubt too."""
    open_: dict[Hashable, list[Unit]] = {}
    for link in state.links:
        if link.instead:
            open_.setdefault((link.other.signature, _block(link.other)), []).append(link.other)
    for link in state.links:
        near = [unit for unit in open_.get((link.other.signature, _block(link.other)), ()) if unit is not link.other]
        if link.instead and near:
            own = [unit for unit in link.instead if unit in near]
            link.instead = tuple(dict.fromkeys((*own, *near)))[:RIVALS]


def _block(unit: Unit) -> str:
    return next(reversed(unit.fronts), "")


def _doubt(state: AlignState, link: Link) -> None:
    """Put a link in doubt if shapes leave a choice: another unit of the target may be meant."""
    if link.instead or link.other.signature not in state.by_signature:
        return
    alike = state.by_signature[link.other.signature]
    at = alike.index(link.other)
    link.instead = (alike[at - 1],) if at else tuple(alike[1:2])


def _by_class(state: AlignState, key: Callable[[Unit], Hashable]) -> None:
    """Link the free units of equal `key`: first if shapes leave one candidate, then if they leave several."""
    linked = {id(unit) for link in state.links for unit in (link.one, link.other)}
    unsure = {unit.signature for link in state.links if link.instead for unit in (link.one, link.other)}
    free = [[unit for unit in units
             if unit.slots and id(unit) not in linked and unit.signature not in unsure and key(unit)]
            for units in (state.a.units, state.b.units)]  # fmt: skip
    classes: dict[Hashable, tuple[list[Unit], list[Unit]]] = {}
    for which, units in enumerate(same_depth(free[0], free[1], key)):
        for unit in units:
            classes.setdefault(key(unit), ([], []))[which].append(unit)
    if not any(ours and theirs for ours, theirs in classes.values()):
        return
    hard, counted, crossing = [], [], []
    for ours, theirs in classes.values():
        if not ours or not theirs:
            continue
        ways = levelled(by_template(ours), by_template(theirs), state.effort)
        left, right = ways[0]
        if len(ways) > 1:
            hard.append(ways)
        elif len(left) == len(right) == 1 and alike(left[0], right[0]):
            links = _instances(left[0], right[0], math.inf, (), state)
            if any(link.turned for link in links):
                crossing.append((left[0], right[0]))
            else:
                state.add(links)
        elif lonely_units(left, right):
            hard.append(ways)
        else:
            counted.append((left, right))
    state.pin()
    if crossing:
        for one, other in crossing:
            state.add(_instances(one, other, math.inf, (), state))
        state.pin()
    by_count = [_by_count(state, *sides) for sides in counted]
    for (left, right), found in zip(counted, by_count, strict=True):
        state.add(found.links)
        hard += [[part] for part in buckets(left, right) if len(part[0]) > 1]
    if counted:
        state.pin()
    for ways in sorted(hard, key=lambda ways: len(ways[0][0]) * len(ways[0][1])):
        state.add(_best_way(state, ways))
    linked_to = {link.one: link for link in state.links}
    for (left, _), found in zip(counted, by_count, strict=True):
        together = [linked_to[unit] for group in left for unit in group.units if unit in linked_to]
        if found.doubtful or any(link.instead for link in together):
            for link in together if found.doubtful else found.bare:
                _doubt(state, link)


@dataclass(slots=True)
class _ByCount:
    """Groups of a class that are the only ones of their size on each side.

    Attributes:
        links: links of their units.
        bare: those links that only the size supports.
        doubtful: names, levels or blocks contradict one of them, and so all that sizes say about the class.
    """

    links: list[Link] = field(default_factory=list)
    bare: list[Link] = field(default_factory=list)
    doubtful: bool = False


def _by_count(state: AlignState, left: list[UnitGroup], right: list[UnitGroup]) -> _ByCount:
    """Link the groups that are the only ones of their size in the class, and note further evidence about them."""
    parts = [match_roles.parts([group.label for group in side_groups]) for side_groups in (left, right)]
    said = match_roles.scores(*parts)
    listed = [[bool(group.units[0].numbers) for group in side_groups] for side_groups in (left, right)]
    mixed = all(len(set(line)) == 2 for line in listed)
    mute = untold((left, right), parts)
    found = _ByCount()
    for ours, theirs in buckets(left, right):
        if len(ours) > 1:
            continue
        links = _instances(ours[0], theirs[0], COUNTED, (), state)
        i, j = left.index(ours[0]), right.index(theirs[0])
        own, standing = said[i][j], state.in_blocks(ours[0], theirs[0])
        better = max(score for k, score in enumerate(said[i]) if k != j), max(
            row[j] for k, row in enumerate(said) if k != i
        )
        contrary = own < 0 < max(better) or min(better) >= own + ENOUGH or (mixed and listed[0][i] != listed[1][j])
        otherwise = state.listed_otherwise((ours[0], theirs[0]), (left, right), mute)
        found.doubtful |= contrary or standing < 0 or otherwise
        found.links += links
        found.bare += links if own <= 0 and standing <= 0 else []
    return found


def _best_way(state: AlignState, ways: Sequence[Sides]) -> list[Link]:
    """Return the links of the best way to split; a link is in doubt if a way that scores nearly as well differs."""
    tried = []
    for way in ways:
        parts = list(buckets(*way)) if len(ways) > 1 else [way]
        done = [_assigned(state, left, right, alone=len(parts) == 1) for left, right in parts]
        named = [match_roles.parts([group.label for group in side_groups]) for side_groups in way]
        mute = untold(way, named)
        for (left, right), (_, _, made) in zip(parts, done, strict=True):
            alone = len(parts) > 1 and len(left) == len(right) == 1
            if alone and state.listed_otherwise((left[0], right[0]), way, mute):
                for link in made:
                    _doubt(state, link)
        score = sum(row[0] for row in done), sum(row[1] for row in done)
        tried.append((score, [link for _, _, links in done for link in links]))
    tried.sort(key=lambda row: row[0], reverse=True)
    best, links = tried[0]
    doubtful = any(link.instead for link in links)
    for score, others in tried[1:]:
        if best[0] - score[0] >= ENOUGH and best[1] - score[1] >= ENOUGH and not doubtful:
            continue
        elsewhere = {id(link.one): link.other for link in others}
        for link in links:
            rival = elsewhere.get(id(link.one))
            if rival is not None and rival is not link.other and not link.instead:
                link.instead = (rival,)
    if any(link.instead for link in links):
        for link in links:
            if link.why == BY_NUMBER:
                _doubt(state, link)
    return links


def _assigned(
    state: AlignState, left: list[UnitGroup], right: list[UnitGroup], *, alone: bool = True
) -> tuple[float, float, list[Link]]:
    """Return the best assignment of groups to groups: its score, the part of it that is not likeness, and the links.

    Args:
        alone: whether these groups are all of their class; if not, other groups were split off before.
    """
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
    said = match_roles.scores(*parts)
    standing = [[_standing(state, one, other, swapped=swapped) for other in columns] for one in rows]
    likeness = [
        [said[i][j] - unlike(around[0][i], around[1][j]) - (0 if alike(one, other) else 100) + standing[i][j]
         for j, other in enumerate(columns)]
        for i, one in enumerate(rows)
    ]  # fmt: skip
    scores = [
        [score + ordered_alike(ranked, (i, j), (places[0][i], places[1][j])) for j, score in enumerate(line)]
        for i, line in enumerate(likeness)
    ] if state.ordered else likeness  # fmt: skip
    chosen = assignment.best(scores)
    unsure = undecided(likeness, chosen) if state.ordered else set[int]()
    placed = [
        placed_by_name(which, side_groups, side_parts)
        for which, side_groups, side_parts in zip(sides, (rows, columns), parts, strict=True)
    ]
    unsure -= {
        i
        for i in unsure
        if placed[0][i] and placed[1][chosen[i]] and state.between(rows[i], columns[chosen[i]], swapped=swapped)
    }
    links = []
    margins = assignment.margins(scores, chosen, ENOUGH)
    listed = [[bool(group.units[0].numbers) for group in side_groups] for side_groups in (rows, columns)]
    mixed = all(len(set(line)) == 2 for line in listed)
    doubts = []
    loose = match_roles.loose(parts[0], parts[1], chosen)
    for (i, j), (margin, rival) in zip(enumerate(chosen), margins, strict=True):
        contrary = (said[i][j] < 0 and (rival != j or not alone)) or (mixed and listed[0][i] != listed[1][j])
        unfit = not alike(rows[i], columns[j]) or (uneven and said[i][j] < SUPPORT)
        doubts.append(margin < ENOUGH or i in unsure or contrary or unfit or i in loose)
    for (i, j), (margin, rival) in zip(enumerate(chosen), margins, strict=True):
        one, other = (columns[j], rows[i]) if swapped else (rows[i], columns[j])
        rivals: tuple[Unit, ...] = ()
        firm = match_roles.singular(parts[0][i], parts[1][j])
        if doubts[i] or (any(doubts) and not firm and len(rows) > 1):
            rival = rival if rival != j else (j + 1) % len(columns)
            rivals = tuple(other.units if swapped else columns[rival].units)
            margin = min(margin, ENOUGH)
        made = _instances(one, other, margin if alone else min(margin, COUNTED), rivals, state)
        for link in made:
            link.firm = firm
        links += made
    sure = sum(
        said[i][j] + 2 * same_block(around[0][i], around[1][j]) + standing[i][j] for i, j in enumerate(chosen)
    )
    return sum(scores[i][j] for i, j in enumerate(chosen)), sure, links


def _standing(state: AlignState, one: UnitGroup, other: UnitGroup, *, swapped: bool) -> float:
    """Return the score of two groups for the blocks that contain them."""
    found = state.in_blocks(other, one) if swapped else state.in_blocks(one, other)
    return found * (BLOCKS if found > 0 else APART)


def _instances(
    one: UnitGroup, other: UnitGroup, margin: float, rivals: Sequence[Unit], state: AlignState
) -> list[Link]:
    """Return links between the units of two groups, one by one."""
    confidence = 0.99 if margin == math.inf else round(1 - 0.5 * 2 ** (-max(margin, 0.0) / 3), 2)
    why = BY_NAME if margin < COUNTED else "only shape" if len(one) == 1 and margin == math.inf else BY_NUMBER
    if alike(one, other):
        doubt = one.backwards != other.backwards or (state.ordered and one.in_order != other.in_order)
        twins, doubts = turned(one, other, (state.a, state.b), state.apart)
        links = [
            Link(unit, twin, confidence, why, tuple(rivals[index : index + 1] or rivals[-1:]))
            for index, (unit, twin) in enumerate(zip(one.units, twins, strict=True))
        ]
        for link in links:
            link.turned = bool(doubts)
            if link.other in doubts:
                link.instead = link.instead or (doubts[link.other],)
        if doubt:
            for link, twin in zip(links, sorted(other.units, key=lambda unit: unit.first), strict=True):
                link.instead = link.instead or (twin,)
        return links
    pairs = zip(one.units, other.units, strict=False)
    return [Link(unit, twin, 0.3, "order", tuple(rivals[-1:])) for unit, twin in pairs]


def _in_definition_order(left: list[UnitGroup], right: list[UnitGroup]) -> list[Link]:
    """Propose pairs in definition order, each ambiguous, for too many paths that have nothing in common."""
    units = [sorted((unit for group in side_groups for unit in group.units), key=lambda unit: unit.first)
             for side_groups in (left, right)]  # fmt: skip
    links = []
    for index, (one, other) in enumerate(zip(*units, strict=False)):
        rival = units[1][index - 1 if index else min(1, len(units[1]) - 1)]
        links.append(Link(one, other, 0.2, "order", (rival,)))
    return links
