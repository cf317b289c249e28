"""Tensors as a tree of modules, in rows: similar numbered siblings are folded below one row for all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from ckptfix.dataclass import dataclass
from ckptfix.names.outline import SIMILAR, KeyNode, label_of, outline

DEPTH = 24
"""Maximum levels."""

Item = TypeVar("Item")


@dataclass(slots=True)
class TableRow(Generic[Item]):
    """A row of the table: a tensor, a module, or several similar modules.

    Attributes:
        level: its depth.
        prefix, label: its name; the row above shows `prefix`.
        items: the tensors in it.
        `alike`: the number of similar modules that it represents.
        tensor: whether it is a tensor.
    """

    level: int
    prefix: str
    label: str
    items: list[Item]
    alike: int = 0
    tensor: bool = False


def rows(items: Iterable[tuple[str, str, object, Item]]) -> list[TableRow[Item]]:
    """Return the rows of a table of tensors.

    Args:
        items: (address of the mapping, key, a value that is equal for similar tensors, the tensor).
    """
    return list(_walk(outline(items, DEPTH), 0, ""))


def _is_module(node: KeyNode[Item]) -> bool:
    return node.item is None


def _walk(node: KeyNode[Item], level: int, prefix: str) -> Iterator[TableRow[Item]]:
    for run in node.runs(_is_module):
        if len(run) >= SIMILAR:
            yield from _row_of(run, level, prefix, prefix)
            continue
        for child in run:
            yield from _child(child, level, prefix)


def _child(child: KeyNode[Item], level: int, prefix: str) -> Iterator[TableRow[Item]]:
    """Yield the rows of a node; a module with a single child is joined with it."""
    label = child.name
    while child.item is None:
        inside = child.runs(_is_module)
        if len(inside) != 1:
            break
        if len(inside[0]) >= SIMILAR:
            yield from _row_of(inside[0], level, prefix, prefix + label)
            return
        if len(inside[0]) > 1:
            break
        (child,) = inside[0]
        label += child.name
    yield TableRow(level, prefix, label, list(child.items()), tensor=child.item is not None)
    if child.item is None:
        yield from _walk(child, level + 1, prefix + label)


def _row_of(run: list[KeyNode[Item]], level: int, above: str, prefix: str) -> Iterator[TableRow[Item]]:
    """Yield the rows of similar modules whose names begin with `prefix`: one for all, and below it those of each."""
    label = f"{prefix[len(above) :]}{label_of(run)[:-1]}"
    yield TableRow(level, above, label, [item for node in run for item in node.items()], alike=len(run))
    for node in run:
        yield from _child(node, level + 1, prefix)
