"""Stacks of blocks, matched before what is inside them: the top of the tree of names.

A stack is a list of blocks of several modules: ``encoder.layer.{}``. If the stacks under one template have the same
blocks on both sides, and as many other templates do on one side as on the other, their modules have their counterparts
in each other. A module of the same shapes elsewhere, such as a pooler, is then no rival to those in the blocks.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from functools import lru_cache

from ckptfix.align import roles
from ckptfix.align.nesting import MANY
from ckptfix.align.units import CACHED, ModelSide, Unit, natural
from ckptfix.dataclass import dataclass

_NUMBER = re.compile(r"\d{1,18}")


MANIFOLD = 4
"""Kinds of modules in a block that is recognized without another of its kind, unless it has `MANY` modules."""


@dataclass(frozen=True, slots=True)
class SharedStacks:
    """The stacks that both sides have.

    Attributes:
        scopes: unit of either side -> numbers of the shared stacks that it is in; missing if in none.
        blocks: pairs of blocks, one of each side, that have the same place in stacks that only one template has.
    """

    scopes: Mapping[Unit, Hashable]
    blocks: tuple[tuple[str, str], ...]


def shared(a: ModelSide, b: ModelSide) -> SharedStacks:
    """Find the stacks that both sides have."""
    sides = _templates(a), _templates(b)
    by_content: tuple[dict[Hashable, list[str]], dict[Hashable, list[str]]] = ({}, {})
    for which, side in enumerate(sides):
        for template, stacks in side.items():
            content = _content(stacks)
            if content is not None:
                by_content[which].setdefault(content, []).append(template)
    found: dict[Unit, tuple[int, ...]] = {}
    scopes: dict[tuple[int, ...], tuple[int, ...]] = {}  # thousands of modules are in the same stacks
    blocks: list[tuple[str, str]] = []
    for number, content in enumerate(by_content[0]):
        ours, theirs = (_innermost(side, names.get(content, [])) for side, names in zip(sides, by_content, strict=True))
        by_chance = any(map(_by_chance, [*(sides[0][name] for name in ours), *(sides[1][name] for name in theirs)]))
        if len(ours) != len(theirs) or (by_chance and len(ours) == 1):
            continue
        for side, templates in zip(sides, (ours, theirs), strict=True):
            for unit in (unit for template in templates for row in side[template].values() for block in row.values()
                         for unit in (() if by_chance else block)):  # fmt: skip
                scope = (*found.get(unit, ()), number)
                found[unit] = scopes.setdefault(scope, scope)
        pairs = [(0, 0)] if len(ours) == 1 else roles.told(*(_labels(templates) for templates in (ours, theirs)))
        for row, to in pairs:
            if not (_is_grid(sides[0], ours[row]) and _is_grid(sides[1], theirs[to])):
                blocks += _same_place(sides[0][ours[row]], sides[1][theirs[to]])
    blocks += _in_order(sides, {block for block, _ in blocks})
    return SharedStacks(found, tuple(blocks))


def _is_grid(side: Mapping[str, Stacks], template: str) -> bool:
    """Return whether each block is nothing but a list of as many blocks: which number counts what, is unknown."""
    front, blocks = next(iter(side[template].items()))
    number, block = next(iter(blocks.items()))
    inside = f"{front}{number}"
    return any(
        len(inner) == len(blocks) and sum(map(len, inner.values())) == len(block)
        for other, stacks in side.items()
        if other.startswith(template + "{}")
        for start, inner in stacks.items()
        if start.startswith(inside)
    )


def _innermost(side: Mapping[str, Stacks], templates: Sequence[str]) -> list[str]:
    """Return the templates without those whose blocks each hold one block of another template, and nothing else."""
    if len(templates) < 2:
        return list(templates)
    found: dict[Hashable, str] = {}
    for template in templates:
        held = frozenset(frozenset(block) for blocks in side[template].values() for block in blocks.values())
        found[held] = max(found.get(held, ""), template, key=len)
    return list(found.values())


def _in_order(sides: tuple[dict[str, Stacks], dict[str, Stacks]], known: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield the manifold blocks of lists that hold something else too, or that are divided otherwise, in order.

    If one template has the blocks of a content on each side, or words tell which of the other side's it is, and both
    have equally many, they are the same in the order of their numbers. Blocks that hold blocks are left out: what is
    between two stages may be part of the one or of the other.
    """
    by_content = _manifold(sides[0]), _manifold(sides[1])
    for content, ours in by_content[0].items():
        theirs = by_content[1].get(content, {})
        names = [*ours], [*theirs]
        if len(ours) != len(theirs) or any(block in known for rows in ours.values() for block in rows):
            continue
        pairs = [(0, 0)] if len(ours) == 1 else roles.told(*map(_labels, names))
        for row, to in pairs:
            rows = [sorted(side[name], key=natural) for side, name in ((ours, names[0][row]), (theirs, names[1][to]))]
            if len(rows[0]) == len(rows[1]):
                yield from zip(*rows, strict=True)


def _manifold(side: dict[str, Stacks]) -> dict[Hashable, dict[str, list[str]]]:
    """Return content -> template -> manifold blocks of this content that hold no blocks."""
    found: dict[Hashable, dict[str, list[str]]] = {}
    for template, stacks in side.items():
        for front, blocks in stacks.items():
            for number, block in blocks.items():
                if not _is_manifold(block):
                    continue
                name = f"{front}{number}"
                inner = Counter(holder for unit in block for holder in unit.fronts if len(holder) > len(name))
                if max(inner.values(), default=0) < 2:
                    found.setdefault(_alike(block), {}).setdefault(template, []).append(name)
    return found


def _labels(templates: Sequence[str]) -> list[str]:
    return [template.removesuffix(".") for template in templates]


def _same_place(ours: Stacks, theirs: Stacks) -> Iterator[tuple[str, str]]:
    """Yield the blocks of two templates that have the same place, if those at each place have equal contents."""
    rows = [
        [(f"{front}{number}", _alike(stacks[front][number])) for front in sorted(stacks, key=natural)
         for number in sorted(stacks[front])]
        for stacks in (ours, theirs)
    ]  # fmt: skip
    if [content for _, content in rows[0]] == [content for _, content in rows[1]]:
        yield from ((one, other) for (one, _), (other, _) in zip(*rows, strict=True))


Stacks = dict[str, dict[int, list[Unit]]]
"""Path before a number -> number -> the units below."""


def _templates(side: ModelSide) -> dict[str, Stacks]:
    found: dict[str, Stacks] = {}
    for unit in side.units:
        if unit.slots:
            for template, front, number in _stacks_of(unit.path):
                found.setdefault(template, {}).setdefault(front, {}).setdefault(number, []).append(unit)
    return found


def _stacks_of(path: str) -> Iterator[tuple[str, str, int]]:
    """Yield for each number in a path the template and the text before it, and the number."""
    start = path.rfind(".") + 1
    front = path[:start]
    around, template = _stacks_in(front)
    yield from around
    for text, before, number in _stacks_in(path[start:])[0]:
        yield template + text, front + before, number


@lru_cache(CACHED)
def _stacks_in(text: str) -> tuple[tuple[tuple[str, str, int], ...], str]:
    """Return the same for a part of a path, and its own template."""
    found = [(text[: match.start()], int(match[0])) for match in _NUMBER.finditer(text)]
    return tuple((_NUMBER.sub("{}", before), before, number) for before, number in found), _NUMBER.sub("{}", text)


def _content(stacks: Stacks) -> Hashable | None:
    """Return the contents of the blocks of each stack; None if these are not blocks of several modules."""
    rows = []
    for blocks in stacks.values():
        if min(map(len, blocks.values())) < 2:
            return None
        rows.append(tuple(sorted(map(_alike, blocks.values()))))
    return tuple(sorted(rows))


def _by_chance(stacks: Stacks) -> bool:
    """Return whether other blocks may have these contents by chance.

    A block by itself is known by its contents only if it is as manifold as that of a transformer.
    """
    alone = max(map(len, stacks.values())) == 1
    return alone and not all(_is_manifold(block) for blocks in stacks.values() for block in blocks.values())


def _is_manifold(block: Sequence[Unit]) -> bool:
    return len(block) >= MANY or len({unit.kind for unit in block}) >= MANIFOLD


def _alike(block: Sequence[Unit]) -> tuple[int, int]:
    """Return a key that is the same for blocks of equally many modules with the same shapes."""
    return len(block), sum(hash(unit.kind) for unit in block)
