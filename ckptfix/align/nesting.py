"""The rule that linked modules nest: a numbered block must not partly overlap a block of the other side.

Either one block contains the other, or they share nothing. Classes of shapes are assigned one after another, each by
itself. If one rule sends block 3 to block 2 and another sends block 3 to block 3, at least one of them is wrong, and
nothing here says which.
"""

from __future__ import annotations

import re
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice

from ckptfix.align.units import CACHED, Signature, Unit, holders, is_numbered, siblings, words
from ckptfix.dataclass import cached_property
from ckptfix.names import wrappers

_NUMBER = re.compile(r"\d{1,18}")

_LAST_NUMBER = re.compile(r"\d{1,18}$")

Stack = str
"""The path before a number: ``encoder.layers.``"""

Block = tuple[Stack, int]

Cell = tuple[int, int]
"""The numbers of two blocks, one of each side, that share a pair."""

UPWARD = frozenset(
    ["up", "ups", "upsample", "upsamples", "upconv", "upconvs", "upblock", "upblocks", "dec", "decoder", "decoders"]
)
"""Words for the levels of a U-Net's way up. Some models number them as they run, some as those on the way down."""

MANY = 6
"""Modules in a block that its contents identify."""

MOST = 6
"""Numbers in one path that count as block numbers."""


Side = Iterable[Unit]

Contents = Mapping[str, tuple[int, int]]
"""Block -> its content as count and sum of signatures (`units.Side.contents`)."""


def crossed(pairs: Sequence[tuple[Unit, Unit]], sides: tuple[Side, Side] | None = None) -> set[int]:
    """Return the indices of the pairs in stacks, or in single blocks, that do not nest.

    A pair is left out if shapes allow its blocks no other counterpart. This needs `sides`, which has all units.
    """
    left = tuple(_unpaired(units, {pair[which] for pair in pairs}) for which, units in enumerate(sides or ((), ())))
    several = [_several((pair[which] for pair in pairs), left[which]) for which in (0, 1)]
    known: dict[tuple[Block, ...], tuple[Block, ...]] = {}  # modules of a block are in the same ones

    def of(unit: Unit, which: int) -> tuple[Block, ...]:
        found = tuple([block for block in _blocks(unit.path) if block[0] in several[which]])
        return known.setdefault(found, found)

    inside = [(of(one, 0), of(other, 1)) for one, other in pairs]
    known.clear()
    shared: dict[tuple[Stack, Stack], _Rows] = {}
    for index, (blocks, theirs) in enumerate(inside):
        for ours, number in blocks:
            for stack, twin in theirs:
                rows = shared.get((ours, stack)) or shared.setdefault((ours, stack), _Rows())
                rows.add(number, twin, index)
    homes: tuple[_Homes, _Homes] | None = None
    found: set[int] = set()
    nested: list[tuple[Block, Block]] = []
    for (ours, stack), rows in shared.items():
        cells = dict.fromkeys(zip(rows.numbers, rows.twins, strict=True))
        if _nest(cells):
            nested += [((ours, number), (stack, twin)) for number, twin in cells]
            continue
        placed = [(number, twin, *pairs[index]) for number, twin, index in rows]
        if _is_grid(placed) or _between(placed):
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
    shared.clear()  # it may be the largest object of all
    return found | _overlapping(pairs, inside, nested, left, sides or ((), ()))


def _several(paired: Iterable[Unit], unpaired: Mapping[Block, Sequence[Unit]]) -> set[Stack]:
    """Return the stacks with a block of several modules: blocks of one module are within any other."""
    counts = Counter(block for unit in paired for block in _blocks(unit.path))
    counts.update({block: len(units) for block, units in unpaired.items()})
    return {stack for (stack, _), count in counts.items() if count > 1}


class _Rows:
    """Pairs in two stacks: their block numbers, and their indices. Arrays need a fifth of the memory of tuples."""

    __slots__ = ("indices", "numbers", "twins")

    def __init__(self) -> None:
        self.numbers, self.twins, self.indices = array("q"), array("q"), array("q")

    def add(self, number: int, twin: int, index: int) -> None:
        self.numbers.append(number)
        self.twins.append(twin)
        self.indices.append(index)

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        return zip(self.numbers, self.twins, self.indices, strict=True)


def crossing(pairs: Iterable[tuple[Unit, Unit]]) -> set[tuple[Stack, Stack]]:
    """Return the stacks of the two sides that contain these pairs."""
    return {
        (ours, stack) for one, other in pairs for ours, _ in _blocks(one.path) for stack, _ in _blocks(other.path)
    }


def _overlapping(
    pairs: Sequence[tuple[Unit, Unit]],
    inside: Sequence[tuple[Sequence[Block], Sequence[Block]]],
    blocks: Iterable[tuple[Block, Block]],
    left: Sequence[Mapping[Block, Sequence[Unit]]],
    sides: tuple[Side, Side],
) -> set[int]:
    """Return the indices of the pairs of two blocks that share one although each has a module outside the other.

    If all modules of the other block are paired, an unpaired module is not in it. Its counterpart is elsewhere if
    `sides` have equally many modules like it. Lists of one kind of module are not blocks: ``convs.0.1`` and
    ``norms.0.1`` may belong to the same block. Nor is ``conv1`` if there is no second number.
    """
    members: tuple[dict[Block, array[int]], dict[Block, array[int]]] = ({}, {})
    for index, both in enumerate(inside):
        for held, side in zip(both, members, strict=True):
            for block in held:
                if block not in side:
                    side[block] = array("q")
                side[block].append(index)
    sizes = [Counter(stack for stack, _ in side) for side in members]
    alike = [Counter(unit.signature for unit in units) for units in sides]
    found: set[int] = set()
    for block, twin in blocks:
        if 1 in (sizes[0][block[0]], sizes[1][twin[0]]):
            continue
        rows = set(members[0][block]), set(members[1][twin])
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
    """Return the modules of each block that are in no pair."""
    found: dict[Block, list[Unit]] = {}
    for unit in units:
        if unit.slots and unit not in paired:
            for block in _blocks(unit.path):
                found.setdefault(block, []).append(unit)
    return found


def _kinds(units: Iterable[Unit]) -> int:
    """Count the kinds of these modules, by their names without numbers, their leaves and the ranks of the leaves."""
    return len({
        (unit.template, *sorted((leaf, len(slot.shape)) for leaf, slot in unit.slots.items())) for unit in units
    })  # fmt: skip


class _Homes:
    """The blocks that contain the modules of each signature."""

    def __init__(self, side: Side) -> None:
        self._under: Counter[tuple[Signature, str]] = Counter()
        self._all: Counter[Signature] = Counter()
        for unit in side:
            self._all[unit.signature] += 1
            self._under.update((unit.signature, f"{stack}{number}") for stack, number in _blocks(unit.path))

    def only(self, signature: Signature, block: str) -> bool:
        """Return whether all modules of this signature are in the block."""
        return self._under[signature, block] == self._all[signature]


def _blocks(path: str) -> tuple[Block, ...]:
    """Return the stacks that contain a module, and the number of its block in each."""
    start = path.rfind(".") + 1
    front, last = path[:start], path[start:]
    found = _blocks_in(front)
    if start and not is_numbered(last):
        return found
    return (*found, *[(front + text, number) for text, number in _blocks_in(last)])[:MOST]


@lru_cache(CACHED)
def _blocks_in(text: str) -> tuple[Block, ...]:
    found = islice(_NUMBER.finditer(text), MOST)
    return tuple((sys.intern(text[: match.start()]), int(match[0])) for match in found)


def _nest(cells: Collection[Cell]) -> bool:
    """Return whether each block of one side is within one block of the other."""
    return len(cells) in _sizes(cells)


def _is_grid(rows: Sequence[tuple[int, int, Unit, Unit]]) -> bool:
    """Return whether the two sides count things that cross each other.

    ``layers.{}`` and ``experts.{}`` do: each layer has equally many modules of each expert. The same is true for each
    path with open numbers beside those of the two blocks. A path that occurs in one block only is part of a grid if
    shapes show it, as in ``layers.{}.expand`` and ``fc1.{}``: no module of its shapes is in another block.
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


def _between(rows: Sequence[tuple[int, int, Unit, Unit]]) -> bool:
    """Return whether the stages of the two sides nest, apart from what is between two stages.

    One side may have it at the end of a stage, and the other at the beginning of the next one. Then it has names that
    nothing else in the stages has, and there is one less of it than there are stages.
    """
    cells: dict[Cell, set[Hashable]] = {}
    for number, twin, one, other in rows:
        cells.setdefault((number, twin), set()).add((one.template, other.template))
    numbers, twins = (sorted({cell[which] for cell in cells}) for which in (0, 1))
    same = list(zip(numbers, twins, strict=False))
    if len(numbers) != len(twins) or not cells.keys() >= set(same):
        return False
    inside = set().union(*(cells[cell] for cell in same))
    beyond = cells.keys() - same
    return any(
        beyond == set(zip(ours, theirs, strict=True))
        and inside.isdisjoint(set().union(*(cells[cell] for cell in beyond)))
        for ours, theirs in ((numbers[:-1], twins[1:]), (numbers[1:], twins[:-1]))
    )


def _sizes(cells: Collection[Cell]) -> tuple[int, int]:
    """Return the number of rows and of columns that have cells."""
    return len({one for one, _ in cells}), len({other for _, other in cells})


def _whole(cells: Collection[Cell]) -> bool:
    """Return whether these are all cells of several rows and several columns."""
    rows, columns = _sizes(cells)
    return rows > 1 and columns > 1 and len(cells) == rows * columns


def _apart(cells: Collection[Cell], alike: Collection[Cell]) -> bool:
    """Return whether these are several cells of one row or column, which also has all modules of their shapes."""
    lines = zip(_sizes(cells), _sizes(alike), strict=True)
    return len(cells) > 1 and any(own == every == 1 for own, every in lines)


class Twins:
    """Pairs of blocks, one of each side, that must be the same, as far as certain links show.

    Blocks nest. So if two blocks have equally many modules of the same shapes, and one module in common, then they have
    all modules in common. A module of one of them belongs in the other.
    """

    def __init__(
        self,
        links: Iterable[tuple[Unit, Unit]],
        contents: tuple[Contents, Contents],
        known: Iterable[tuple[str, str]] = (),
        around: Callable[[Unit], Sequence[str]] = siblings,
    ) -> None:
        found: tuple[dict[str, set[str]], dict[str, set[str]]] = ({}, {})
        for ours, twin in known:
            found[0].setdefault(ours, set()).add(twin)
            found[1].setdefault(twin, set()).add(ours)
        for one, other in links:
            theirs = _filled(around(other), contents[1])
            for own, ours in _filled(around(one), contents[0]).items():
                if own in theirs:
                    found[0].setdefault(ours, set()).add(theirs[own])
                    found[1].setdefault(theirs[own], set()).add(ours)
        self._twins = tuple(
            {front: outer for front, others in side.items() if (outer := _only(others, beyond)) is not None}
            for side, beyond in zip(found, reversed(contents), strict=True)
        )
        self._said = found
        self._contents = contents

    def descend(self) -> None:
        """Add blocks of many modules that are the only ones with their contents in the same place, on both sides."""
        while True:
            rows: dict[tuple[str, tuple[int, int]], tuple[list[str], list[str]]] = {}
            for which, contents in enumerate(self._contents):
                for front, content in contents.items():
                    if content[0] >= MANY and front not in self._said[which]:
                        rows.setdefault((self._around(front, which), content), ([], []))[which].append(front)
            added = False
            for ours, theirs in rows.values():
                if ours and theirs:
                    one, other = _only(ours, self._contents[0]), _only(theirs, self._contents[1])
                    if one is not None and other is not None:
                        self._twins[0][one], self._twins[1][other] = other, one
                        self._said[0][one], self._said[1][other] = {other}, {one}
                        added = True
            if not added:
                return

    def _around(self, front: str, which: int) -> str:
        """Return the innermost block with a twin that contains a block of a side, as it is called on the first one."""
        for outer in reversed(holders(front)):
            twin = self.of(outer, which)
            if twin is not None:
                return twin if which else outer
        return ""

    @cached_property
    def _lists(self) -> tuple[dict[Stack, list[tuple[int, int]]], dict[Stack, list[tuple[int, int]]]]:
        return _lists(self._contents[0]), _lists(self._contents[1])

    def _alike(self, ours: str, theirs: str) -> bool:
        """Return whether two lists have unequal lengths, or equal contents at each place.

        If what is between two stages is in the stage before on one side, and in the stage after on the other, some
        stages have equal contents and are not the same.
        """
        one, other = (side.get(front, ()) for side, front in zip(self._lists, (ours, theirs), strict=True))
        return len(one) != len(other) or one == other

    def _is_list_beside(self, twins: tuple[str, str]) -> bool:
        """Return whether one of two blocks is a whole list, and the other is in one.

        A list may hold parts of several blocks of the other side: ``layer.0.norm`` and ``layer.1.conv`` beside
        ``block1.norm``, ``block1.conv``, ``block2.norm`` and ``block2.conv``.
        """
        counted = [_LAST_NUMBER.search(front) is not None for front in twins]
        holds = [f"{front}." in lists for front, lists in zip(twins, self._lists, strict=True)]
        return any(holds[side] and not counted[side] and counted[1 - side] and not holds[1 - side] for side in (0, 1))

    def of(self, front: str, which: int = 0) -> str | None:
        """Return the block of the other side that is the same as a block of a side, 0 or 1."""
        twin = self._twins[which].get(front)
        return twin if twin is not None and self._twins[1 - which].get(twin) == front else None

    def say(self, one: Unit, other: Unit) -> int:
        """Return 1 if both are in the same numbered block, -1 if a block or module has the other elsewhere, else 0."""
        ours, theirs = siblings(one), siblings(other)
        known = [(self._twins[0][front], theirs) for front in ours if front in self._twins[0]]
        known += [(self._twins[1][front], ours) for front in theirs if front in self._twins[1]]
        if any(twin not in others for twin, others in known):
            return -1
        numbered = *one.fronts, *other.fronts
        return int(any(front in twins for front in numbered for twins in self._twins))

    def forget(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Forget that blocks are the same, if words of modules in them contradict it."""
        for pair in pairs:
            for twins, front in zip(self._twins, pair, strict=True):
                twins.pop(front, None)

    def place(self, unit: Unit, which: int, crossing: Collection[tuple[Stack, Stack]]) -> tuple[str, str]:
        """Return the innermost block that contains a module of a side, 0 or 1, and that has a twin, as pair of both.

        Blocks of two stacks that are `crossing` have none, nor have blocks of lists with different contents, nor
        have modules without a number that hold one kind of module: queries, keys and values may be held as any three.
        """
        for front in reversed(unit.holders):
            if front not in self._contents[which]:
                continue
            count, sum_ = self._contents[which][front]
            if _LAST_NUMBER.search(front) is None and sum_ == count * hash(unit.kind):
                continue
            twin = self.of(front, which)
            if twin is not None:
                found = (twin, front) if which else (front, twin)
                stacks = _LAST_NUMBER.sub("", found[0]), _LAST_NUMBER.sub("", found[1])
                if stacks not in crossing and self._alike(*stacks) and not self._is_list_beside(found):
                    return found
        return "", ""

    def lists(self, one: Unit, other: Unit) -> bool:
        """Return whether both are at the same place of two lists, because their innermost blocks are the same."""
        ours, theirs = one.fronts, other.fronts
        return bool(ours and theirs) and self._twins[0].get(ours[-1]) == theirs[-1]


def _only(fronts: Collection[str], contents: Contents) -> str | None:
    """Return the outermost of blocks that hold each other and nothing else; None if they are different blocks."""
    outer = min(fronts, key=len)
    alike = all(front.startswith(f"{outer}.") and contents.get(front) == contents.get(outer)
                for front in fronts if front != outer)  # fmt: skip
    return outer if alike else None


def _lists(contents: Contents) -> dict[Stack, list[tuple[int, int]]]:
    """Return the contents of the blocks of each stack, in order."""
    found: dict[Stack, list[tuple[int, tuple[int, int]]]] = {}
    for front, content in contents.items():
        match = _LAST_NUMBER.search(front)
        if match is not None:
            found.setdefault(front[: match.start()], []).append((int(match[0]), content))
    return {stack: [content for _, content in sorted(rows)] for stack, rows in found.items()}


def _filled(fronts: Iterable[str], contents: Contents) -> dict[tuple[int, int], str]:
    """Return content -> block with other modules, for `fronts` of one module. Keep the inner of two equal ones."""
    return {contents[front]: front for front in fronts if front in contents and contents[front][0] > 1}


def turnable(pairs: Sequence[tuple[Unit, Unit]], sides: tuple[Side, Side]) -> set[int]:
    """Return the indices of the pairs in a U-Net's way up whose levels may be counted from either end.

    `sides` have all units. Shapes that only one level has show where this level is. They show where the others are,
    too, if it is at the same end on both sides. Equal levels decide nothing.
    """
    convolving = {_front(unit.path) for unit in sides[0] if any(len(slot.shape) > 2 for slot in unit.slots.values())}
    if not convolving:
        return set()
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
            continue  # a number that counts on one side only is not a level
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
    """Return for each stack the blocks that have modules of each signature."""
    found: dict[Stack, dict[Signature, set[int]]] = {}
    for unit in side:
        for stack, number in _blocks(unit.path):
            found.setdefault(stack, {}).setdefault(unit.signature, set()).add(number)
    return found


def _end(number: int, levels: Mapping[Signature, set[int]]) -> float:
    """Return below 0 in the first half of the levels, above 0 in the second, 0 in the middle."""
    order = sorted(set().union(*levels.values()))
    return order.index(number) - (len(order) - 1) / 2


def _counts_up(ours: Stack, stack: Stack) -> bool:
    """Return whether the stacks count the levels of a way up, by the words just before the number or further before."""
    own = [_NUMBER.split(text)[-1] for text in (ours, stack)]
    bare = [not words(text) for text in own]
    if any(bare):
        return all(bare) and bool(UPWARD.intersection((*words(ours), *words(stack))))
    return any(UPWARD.intersection(words(text)) for text in own)


def _front(path: str) -> str:
    """Return the front of a path, without numbers, up to the word for the way up; otherwise its first component."""
    components = wrappers.unwrapped(path).split(".")
    for at, component in enumerate(components):
        for word in words(component):
            if word in UPWARD:
                return ".".join([*components[:at], word])
    return _NUMBER.split(components[0])[0]
