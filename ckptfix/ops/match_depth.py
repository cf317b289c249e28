"""Models of one kind and of different depth: which blocks one has more.

A block is what stands under a number: ``layers.11``. Where one side has more modules of some shapes, the surplus may
be just the last blocks of one stack. If there is one such stack and no other, they are set aside, and the rest is of
one depth.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

from ckptfix.ops.match_groups import groups, levelled, lonely_units
from ckptfix.ops.match_names import Unit

_NUMBER = re.compile(r"\d{1,18}")

Key = Callable[[Unit], Hashable]


def same_depth(a: Sequence[Unit], b: Sequence[Unit], key: Key) -> tuple[list[Unit], list[Unit]]:
    """`a` and `b` without the last blocks that only one of them has, where it is beyond doubt which these are."""
    ours, theirs = _cut(list(a), list(b), key)
    theirs, ours = _cut(theirs, ours, key)
    return ours, theirs


def _cut(mine: list[Unit], others: list[Unit], key: Key) -> tuple[list[Unit], list[Unit]]:
    have, want = Counter(map(key, mine)), Counter(map(key, others))
    surplus = {name: count - want[name] for name, count in have.items() if count > want[name]}
    shared = {name: count for name, count in surplus.items() if want[name]}
    if not shared:
        return mine, others
    found = []
    for tail in _tails(mine):
        counts = Counter(map(key, tail))
        if all(counts[name] == count for name, count in shared.items()) and all(
            count <= surplus.get(name, 0) for name, count in counts.items()
        ):
            gone = set(map(id, tail))
            kept = [unit for unit in mine if id(unit) not in gone]
            if _level(kept, others, counts.keys(), key):
                found.append(kept)
    return (found[0], others) if len(found) == 1 else (mine, others)


def _tails(units: Iterable[Unit]) -> Iterator[list[Unit]]:
    """The last blocks of every stack: one, two, ... but never all."""
    stacks: dict[str, dict[int, list[Unit]]] = {}
    for unit in units:
        for match in _NUMBER.finditer(unit.path):
            stacks.setdefault(unit.path[: match.start()], {}).setdefault(int(match[0]), []).append(unit)
    for blocks in stacks.values():
        tail: list[Unit] = []
        for number in sorted(blocks, reverse=True)[:-1]:
            tail = [*blocks[number], *tail]
            yield tail


def _level(mine: Sequence[Unit], others: Sequence[Unit], names: Iterable[Hashable], key: Key) -> bool:
    """Whether the modules of these classes repeat alike on both sides."""
    for name in names:
        ours, theirs = ([unit for unit in units if key(unit) == name] for units in (mine, others))
        if ours and theirs and lonely_units(*levelled(groups(ours), groups(theirs))[0]):
            return False
    return True
