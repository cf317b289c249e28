"""Linked modules must nest: a numbered block of one side is never in two of the other side, each with more than it.

Classes of shapes are assigned one after another, each by itself. Where one rule sends block 3 to block 2 and another
rule sends block 3 to block 3, at least one of them is wrong, and nothing here says which.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence

from ckptfix.align.units import Signature, Unit, fronts, words
from ckptfix.names import wrappers

_NUMBER = re.compile(r"\d{1,18}")

Stack = str
"""The path before a number: ``encoder.layers.``"""

Block = tuple[Stack, int]

Cell = tuple[int, int]
"""The numbers of two blocks, one of each side, that share a pair."""

UPWARD = frozenset(
    ["up", "ups", "upsample", "upsamples", "upconv", "upconvs", "upblock", "upblocks", "dec", "decoder", "decoders"]
)
"""Words for the levels of a U-Net's way up: some count them as they run, some as those on the way down."""

MOST = 6
"""How many numbers in one path count as block numbers."""


Side = Iterable[Unit]

Contents = Mapping[str, tuple[int, int]]
"""Block -> what is in it (`units.Side.contents`)."""


def crossed(pairs: Sequence[tuple[Unit, Unit]], sides: tuple[Side, Side] | None = None) -> set[int]:
    """Indices of the pairs that belong to stacks, or to single blocks, that do not nest.

    A pair is left where shapes allow its blocks no other counterpart: `sides` have all units, to show where they do.
    """
    shared: dict[tuple[Stack, Stack], list[tuple[int, int, int]]] = {}
    for index, (one, other) in enumerate(pairs):
        theirs = list(_blocks(other.path))
        for ours, number in _blocks(one.path):
            for stack, twin in theirs:
                shared.setdefault((ours, stack), []).append((number, twin, index))
    homes: tuple[_Homes, _Homes] | None = None
    found: set[int] = set()
    nested: list[tuple[Block, Block]] = []
    for (ours, stack), rows in shared.items():
        if _is_grid([(number, twin, *pairs[index]) for number, twin, index in rows]):
            continue
        cells = dict.fromkeys((number, twin) for number, twin, _ in rows)
        if _nest(cells):
            nested += [((ours, number), (stack, twin)) for number, twin in cells]
            continue
        if sides is not None and homes is None:
            homes = _Homes(sides[0]), _Homes(sides[1])
        forced = {
            (number, twin)
            for number, twin, index in rows
            if homes is not None
            and (
                homes[0].only(pairs[index][0].signature, f"{ours}{number}")
                or homes[1].only(pairs[index][1].signature, f"{stack}{twin}")
            )
        }
        found.update(index for number, twin, index in rows if (number, twin) not in forced)
    return found | _overlapping(pairs, nested, sides or ((), ()))


def _overlapping(
    pairs: Sequence[tuple[Unit, Unit]], blocks: Iterable[tuple[Block, Block]], sides: tuple[Side, Side]
) -> set[int]:
    """Indices of the pairs of two blocks that share one, where each has another one that is not in the other block.

    A module that is in no pair is not in the other block where all of that are in pairs, and has its counterpart
    elsewhere where `sides` have equally many like it. Lists of one kind of module are no blocks: ``convs.0.1`` and
    ``norms.0.1`` may be one block's. Nor is ``conv1`` where there is no second number.
    """
    members: tuple[dict[Block, set[int]], dict[Block, set[int]]] = ({}, {})
    for index, pair in enumerate(pairs):
        for unit, inside in zip(pair, members, strict=True):
            for block in _blocks(unit.path):
                inside.setdefault(block, set()).add(index)
    sizes = [Counter(stack for stack, _ in side) for side in members]
    left = [_unpaired(units, {pair[which] for pair in pairs}) for which, units in enumerate(sides)]
    alike = [Counter(unit.signature for unit in units) for units in sides]
    found: set[int] = set()
    for block, twin in blocks:
        if 1 in (sizes[0][block[0]], sizes[1][twin[0]]):
            continue
        rows = members[0][block], members[1][twin]
        over = [left[0].get(block, []), left[1].get(twin, [])]
        beyond = [
            any(alike[0][unit.signature] == alike[1][unit.signature] for unit in own) and not others
            for own, others in (over, reversed(over))
        ]
        if not (rows[0] - rows[1] or beyond[0]) or not (rows[1] - rows[0] or beyond[1]):
            continue
        if all(
            _kinds([*(pairs[index][which] for index in rows[which]), *over[which]]) > 1 for which in (0, 1)
        ):
            found |= rows[0] | rows[1]
    return found


def _unpaired(units: Side, paired: Collection[Unit]) -> dict[Block, list[Unit]]:
    """The modules of each block that are in no pair."""
    found: dict[Block, list[Unit]] = {}
    for unit in units:
        if unit.slots and unit not in paired:
            for block in _blocks(unit.path):
                found.setdefault(block, []).append(unit)
    return found


def _kinds(units: Iterable[Unit]) -> int:
    """How many kinds of modules these are, by their names but numbers, their leaves and the ranks of these."""
    return len({
        (unit.template, *sorted((leaf, len(slot.shape)) for leaf, slot in unit.slots.items())) for unit in units
    })  # fmt: skip


class _Homes:
    """In which blocks the modules of one signature stand."""

    def __init__(self, side: Side) -> None:
        self._under: Counter[tuple[Signature, str]] = Counter()
        self._all: Counter[Signature] = Counter()
        for unit in side:
            self._all[unit.signature] += 1
            self._under.update((unit.signature, f"{stack}{number}") for stack, number in _blocks(unit.path))

    def only(self, signature: Signature, block: str) -> bool:
        """Whether no module of this signature stands outside the block."""
        return self._under[signature, block] == self._all[signature]


def _blocks(path: str) -> Iterator[Block]:
    """The stacks that a module stands in, and the number of its block there."""
    for count, match in enumerate(_NUMBER.finditer(path)):
        if count == MOST:
            return
        yield path[: match.start()], int(match[0])


def _nest(cells: Collection[Cell]) -> bool:
    """Whether each block of one side is within one of the other."""
    return len(cells) in _sizes(cells)


def _is_grid(rows: Sequence[tuple[int, int, Unit, Unit]]) -> bool:
    """Whether both sides count things that cross.

    ``layers.{}`` and ``experts.{}`` do: each has as much of each, and so has each path with open numbers, which
    stands beside the numbers of the two blocks. A path that stands in one block only is part of a grid where shapes
    show it, as in ``layers.{}.expand`` and ``fc1.{}``: no module of its shapes stands in another block.
    """
    counts = Counter((number, twin) for number, twin, _, _ in rows)
    kinds: dict[Hashable, set[Cell]] = {}
    shapes: dict[Hashable, set[Cell]] = {}
    of_kinds: dict[Hashable, set[Hashable]] = {}
    for number, twin, one, other in rows:
        kind = one.template, other.template
        kinds.setdefault(kind, set()).add((number, twin))
        shapes.setdefault(one.signature, set()).add((number, twin))
        of_kinds.setdefault(kind, set()).add(one.signature)
    return len(set(counts.values())) == 1 and _whole(counts) and all(
        _whole(cells) or _apart(cells, set().union(*(shapes[signature] for signature in of_kinds[kind])))
        for kind, cells in kinds.items()
    )  # fmt: skip


def _sizes(cells: Collection[Cell]) -> tuple[int, int]:
    """How many rows and columns these are in."""
    return len({one for one, _ in cells}), len({other for _, other in cells})


def _whole(cells: Collection[Cell]) -> bool:
    """Whether these are all cells of several rows and several columns."""
    rows, columns = _sizes(cells)
    return rows > 1 and columns > 1 and len(cells) == rows * columns


def _apart(cells: Collection[Cell], alike: Collection[Cell]) -> bool:
    """Whether these are several of one row, or of one column, and those with modules of their shapes are in it too."""
    lines = zip(_sizes(cells), _sizes(alike), strict=True)
    return len(cells) > 1 and any(own == every == 1 for own, every in lines)


class Twins:
    """Blocks of the two sides that are one and the same, as far as links that are certain show.

    Blocks nest. So two of equally many modules, of the same shapes, that have one module in common have all in common,
    and a module of one of them goes into the other.
    """

    def __init__(self, links: Iterable[tuple[Unit, Unit]], contents: tuple[Contents, Contents]) -> None:
        found: tuple[dict[str, set[str]], dict[str, set[str]]] = ({}, {})
        for one, other in links:
            theirs = _filled(other.path, contents[1])
            for own, ours in _filled(one.path, contents[0]).items():
                if own in theirs:
                    found[0].setdefault(ours, set()).add(theirs[own])
                    found[1].setdefault(theirs[own], set()).add(ours)
        self._twins = tuple(
            {front: next(iter(others)) for front, others in side.items() if len(others) == 1} for side in found
        )

    def say(self, one: Unit, other: Unit) -> int:
        """1 if the two stand in the same block, -1 if the block of one of them is not that of the other, else 0."""
        ours, theirs = fronts(one.path), fronts(other.path)
        known = [(self._twins[0][front], theirs) for front in ours if front in self._twins[0]]
        known += [(self._twins[1][front], ours) for front in theirs if front in self._twins[1]]
        if any(twin not in others for twin, others in known):
            return -1
        return int(bool(known))

    def lists(self, one: Unit, other: Unit) -> bool:
        """Whether the two stand at the same places of two lists: the innermost blocks of both are the same."""
        ours, theirs = fronts(one.path), fronts(other.path)
        return bool(ours and theirs) and self._twins[0].get(ours[-1]) == theirs[-1]


def _filled(path: str, contents: Contents) -> dict[tuple[int, int], str]:
    """What is in it -> a block that a module stands in, with others; of one in one with no other module, the inner."""
    return {contents[front]: front for front in fronts(path) if contents[front][0] > 1}


def turnable(pairs: Sequence[tuple[Unit, Unit]], sides: tuple[Side, Side]) -> set[int]:
    """Indices of the pairs in the way up of a U-Net whose levels may be counted from either end.

    `sides` have all units. Shapes that one level alone has show where it is, and so where the others are, if this is
    the same end on both sides; equal levels decide nothing.
    """
    convolving = {_front(unit.path) for unit in sides[0] if any(len(slot.shape) > 2 for slot in unit.slots.values())}
    levels = _levels(sides[0]), _levels(sides[1])
    shared: dict[tuple[Stack, Stack], list[tuple[int, int, int]]] = {}
    for index, (one, other) in enumerate(pairs):
        if _front(one.path) not in convolving:
            continue
        for ours, number in _blocks(one.path):
            for stack, twin in _blocks(other.path):
                if _counts_up(ours, stack):
                    shared.setdefault((ours, stack), []).append((number, twin, index))
    found: set[int] = set()
    for (ours, stack), rows in shared.items():
        own = levels[0][ours], levels[1][stack]
        if len({number for number, _, _ in rows}) < 2 or len({twin for _, twin, _ in rows}) < 2:
            continue  # what is counted on one side only is not a level
        anchored = False
        free = []
        for number, twin, index in rows:
            signatures = pairs[index][0].signature, pairs[index][1].signature
            if len(own[0][signatures[0]]) > 1 or len(own[1][signatures[1]]) > 1:
                free.append(index)
            else:
                ends = [_end(at, side) for at, side in zip((number, twin), own, strict=True)]
                anchored = anchored or ends[0] * ends[1] > 0
        if not anchored:
            found.update(free)
    return found


def _levels(side: Side) -> dict[Stack, dict[Signature, set[int]]]:
    """For each stack, in which of its blocks there are modules of the same shapes."""
    found: dict[Stack, dict[Signature, set[int]]] = {}
    for unit in side:
        for stack, number in _blocks(unit.path):
            found.setdefault(stack, {}).setdefault(unit.signature, set()).add(number)
    return found


def _end(number: int, levels: Mapping[Signature, set[int]]) -> float:
    """Below 0 in the first half of the levels, above 0 in the second, 0 in the middle."""
    order = sorted(set().union(*levels.values()))
    return order.index(number) - (len(order) - 1) / 2


def _counts_up(ours: Stack, stack: Stack) -> bool:
    """Whether the stacks count the levels of a way up: by the words before the number, or both by those before that."""
    own = [_NUMBER.split(text)[-1] for text in (ours, stack)]
    bare = [not words(text) for text in own]
    if any(bare):
        return all(bare) and bool(UPWARD.intersection((*words(ours), *words(stack))))
    return any(UPWARD.intersection(words(text)) for text in own)


def _front(path: str) -> str:
    """What a module is of, without numbers: the way up, with all before the word for it, or else the first words."""
    components = wrappers.unwrapped(path).split(".")
    for at, component in enumerate(components):
        for word in words(component):
            if word in UPWARD:
                return ".".join([*components[:at], word])
    return _NUMBER.split(components[0])[0]
