"""Stacks of blocks, matched before what is inside them: the top of the tree of names.

A stack is a list of blocks of several modules: ``encoder.layer.{}``. If the stacks under one template have the same
blocks on both sides, and as many other templates do on one side as on the other, their modules have their counterparts
in each other. A module of the same shapes elsewhere, such as a pooler, is then no rival to those in the blocks.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckptfix.align.units import ModelSide, Unit, natural

_NUMBER = re.compile(r"\d{1,18}")


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
    blocks: list[tuple[str, str]] = []
    for number, (content, ours) in enumerate(by_content[0].items()):
        theirs = by_content[1].get(content, [])
        if len(ours) != len(theirs):
            continue
        for side, templates in zip(sides, (ours, theirs), strict=True):
            for unit in (unit for template in templates for row in side[template].values() for block in row.values()
                         for unit in block):  # fmt: skip
                found[unit] = (*found.get(unit, ()), number)
        if len(ours) == 1:
            blocks += _same_place(sides[0][ours[0]], sides[1][theirs[0]])
    return SharedStacks(found, tuple(blocks))


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
            for match in _NUMBER.finditer(unit.path):
                front = unit.path[: match.start()]
                stacks = found.setdefault(_NUMBER.sub("{}", front), {})
                stacks.setdefault(front, {}).setdefault(int(match[0]), []).append(unit)
    return found


def _content(stacks: Stacks) -> Hashable | None:
    """Return the contents of the blocks of each stack; None if these are not several blocks of several modules."""
    rows = []
    for blocks in stacks.values():
        if min(map(len, blocks.values())) < 2:
            return None
        rows.append(tuple(sorted(map(_alike, blocks.values()))))
    return tuple(sorted(rows)) if max(map(len, rows)) > 1 else None


def _alike(block: Sequence[Unit]) -> tuple[int, int]:
    """Return a key that is the same for blocks of equally many modules with the same shapes."""
    return len(block), sum(hash(unit.signature) for unit in block)
