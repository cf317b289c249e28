"""Tensors as a tree of modules, in rows: similar numbered siblings are folded below one row for all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

DEPTH = 24
"""Maximum levels; a longer name keeps its rest in one piece."""

ALIKE = 3
"""Minimum number of siblings that are folded."""

Item = TypeVar("Item")


@dataclass(slots=True)
class PageNode(Generic[Item]):
    """A module, or a tensor if it has an `item`.

    Attributes:
        name: its component of the names, with the final dot or slash.
        likeness: the same for nodes with equal contents.
    """

    name: str
    item: Item | None = None
    children: dict[str, PageNode[Item]] = field(default_factory=dict)
    likeness: int = -1


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
    root: PageNode[Item] = PageNode("")
    likeness: dict[object, int] = {}
    for at, key, like, item in items:
        parts = [f"{part}/" for part in at.split("/") if part] + [f"{part}." for part in key.split(".")]
        parts[-1] = parts[-1][:-1]
        if len(parts) > DEPTH:
            parts[DEPTH - 1 :] = ["".join(parts[DEPTH - 1 :])]
        node = root
        for part in parts[:-1]:
            node = node.children.setdefault(part, PageNode(part))
        name, count = f"{parts[-1]}:", 0  # the colon keeps a tensor "a." apart from a module
        while name in node.children:
            count += 1
            name = f"{parts[-1]}:{count}"
        node.children[name] = PageNode(parts[-1], item, likeness=likeness.setdefault(like, len(likeness)))
    _liken(root, likeness)
    return list(_walk(root, 0, ""))


def _liken(node: PageNode[Item], seen: dict[object, int]) -> None:
    if node.item is not None:
        return
    for child in node.children.values():
        _liken(child, seen)
    content = tuple((name, child.likeness) for name, child in node.children.items())
    node.likeness = seen.setdefault(content, len(seen))


def _items(node: PageNode[Item]) -> list[Item]:
    if node.item is not None:
        return [node.item]
    return [item for child in node.children.values() for item in _items(child)]


def _walk(node: PageNode[Item], level: int, prefix: str) -> Iterator[TableRow[Item]]:
    for run in _runs(node):
        if len(run) >= ALIKE:
            yield from _row_of(run, level, prefix, prefix)
            continue
        for child in run:
            yield from _child(child, level, prefix)


def _child(child: PageNode[Item], level: int, prefix: str) -> Iterator[TableRow[Item]]:
    """Yield the rows of a node; a module with a single child is joined with it."""
    label = child.name
    while child.item is None:
        inside = _runs(child)
        if len(inside) != 1:
            break
        if len(inside[0]) >= ALIKE:
            yield from _row_of(inside[0], level, prefix, prefix + label)
            return
        if len(inside[0]) > 1:
            break
        (child,) = inside[0]
        label += child.name
    yield TableRow(level, prefix, label, _items(child), tensor=child.item is not None)
    if child.item is None:
        yield from _walk(child, level + 1, prefix + label)


def _row_of(run: list[PageNode[Item]], level: int, above: str, prefix: str) -> Iterator[TableRow[Item]]:
    """Yield the rows of similar modules whose names begin with `prefix`: one for all, and below it those of each."""
    label = f"{prefix[len(above) :]}{run[0].name[:-1]}-{run[-1].name[:-1]}"
    yield TableRow(level, above, label, [item for node in run for item in _items(node)], alike=len(run))
    for node in run:
        yield from _child(node, level + 1, prefix)


def _runs(node: PageNode[Item]) -> list[list[PageNode[Item]]]:
    """Return the children, with similar ones that have consecutive numbers grouped."""
    runs: list[list[PageNode[Item]]] = []
    for child in node.children.values():
        last = runs[-1][-1] if runs else None
        if last is not None and child.item is None and last.likeness == child.likeness and _follows(last, child):
            runs[-1].append(child)
        else:
            runs.append([child])
    return runs


def _follows(node: PageNode[Item], after: PageNode[Item]) -> bool:
    name, following = node.name[:-1], after.name[:-1]
    numbers = name.isdecimal() and following.isdecimal() and len(following) < 10
    return node.item is None and numbers and str(int(name) + 1) == following
