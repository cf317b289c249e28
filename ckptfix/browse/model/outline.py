"""The tree of a checkpoint. The children of a node are made when it is opened, so any number of names is fast."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from ckptfix.browse.model.contents import ContentItem, Status
from ckptfix.names.outline import SIMILAR, follows
from ckptfix.words import natural

Order = Literal["file", "name", "size"]

ORDERS: tuple[Order, ...] = ("file", "name", "size")

_WORST: tuple[Status, ...] = ("~", "+", "-", "?", "=")
"""The statuses that a module can show, in order; it shows the first that any of its tensors has."""


class OutlineNode:
    """A module or mapping, or a leaf if it has an `item`.

    Attributes:
        label: the part of its address that its parent does not show.
        address: its full address.
        items: all leaves below.
        depth: number of components of its address.
        level: indentation level.
        tensors, values, nbytes: totals of all leaves.
        opened: whether its children are shown.
        covers: the addresses that the row represents, one for each joined module.
        said: the details, cached once requested, because they need a pass over every leaf.
        kids: for a row that represents several similar modules, these modules; None otherwise.
    """

    __slots__ = (
        *("address", "covers", "depth", "item", "items", "kids", "label"),
        *("level", "nbytes", "opened", "said", "tensors", "values"),
    )

    def __init__(
        self,
        label: str,
        address: str,
        items: Sequence[ContentItem],
        depth: int,
        level: int,
        item: ContentItem | None = None,
        covers: Sequence[str] = (),
    ) -> None:
        self.covers = covers or (address,)
        self.kids: list[OutlineNode] | None = None
        self.said: Sequence[str] | None = None
        self.label = label
        self.address = address
        self.items = items
        self.depth = depth
        self.level = level
        self.item = item
        if item is not None:  # fast path: without dots there may be 100,000 such rows
            self.values = int(item.is_value)
            self.nbytes = item.nbytes
        else:
            self.values = sum(row.is_value for row in items)
            self.nbytes = sum(row.nbytes for row in items)
        self.tensors = len(items) - self.values
        self.opened = False

    @property
    def key(self) -> tuple[str, str]:
        """An identity that is equal for the same module in two outlines; leaves have no such identity."""
        return self.address, self.label if self.kids is not None else ""

    @property
    def status(self) -> Status:
        """The first of "~", "+", "-", "?", "=" that a leaf below has."""
        if self.item is not None:
            return self.item.status
        found = {row.status for row in self.items}
        return next((status for status in _WORST if status in found), "")

    def counts(self) -> Counter[Status]:
        """Count the leaves below by status."""
        return Counter(row.status for row in self.items)

    def children(self, order: Order = "file", *, fold: bool = False) -> list[OutlineNode]:
        """Return the nodes below; a module with a single child is joined with it, as in ``model.layers``.

        Args:
            fold: show similar modules with consecutive numbers as one row.
        """
        if self.kids is not None:
            return self.kids
        groups: dict[tuple[str, bool], list[ContentItem]] = {}
        depth = self.depth
        for item in self.items:
            parts = item.parts
            groups.setdefault((parts[depth], len(parts) == depth + 1), []).append(item)
        made: list[OutlineNode] = []
        for (_, is_leaf), items in groups.items():
            if is_leaf or len(items) == 1:
                made += (_leaf(item, depth, self.level + 1) for item in items)
            else:
                made.append(_module(items, depth, self.level + 1))
        if fold:
            made = _folded(made, self)
        if order == "name":
            made.sort(key=lambda node: natural(node.label))
        elif order == "size":
            made.sort(key=lambda node: -node.nbytes)
        return made


def _leaf(item: ContentItem, depth: int, level: int) -> OutlineNode:
    if len(item.parts) == depth + 1:
        return OutlineNode(item.parts[depth], item.name, (item,), depth + 1, level, item)
    covers = ["".join(item.parts[:at])[:-1] for at in range(depth + 1, len(item.parts))]
    label = "".join(item.parts[depth:])
    return OutlineNode(label, item.name, (item,), len(item.parts), level, item, covers=(*covers, item.name))


def _module(items: Sequence[ContentItem], depth: int, level: int) -> OutlineNode:
    first = items[0].parts
    end = depth + 1
    while len(first) > end + 1 and all(len(item.parts) > end + 1 and item.parts[end] == first[end] for item in items):
        end += 1
    covers = ["".join(first[:at])[:-1] for at in range(depth + 1, end + 1)]
    return OutlineNode("".join(first[depth:end])[:-1], covers[-1], items, end, level, covers=covers)


def _folded(nodes: Sequence[OutlineNode], parent: OutlineNode) -> list[OutlineNode]:
    made: list[OutlineNode] = []
    run: list[OutlineNode] = []
    likeness: object = None
    for node in nodes:
        own = _likeness(node)
        if run and own is not None and own == likeness and follows(_number(run[-1]), _number(node)):
            run.append(node)
            continue
        made += _run(run, parent)
        run, likeness = [node], own
    return [*made, *_run(run, parent)]


def _run(nodes: list[OutlineNode], parent: OutlineNode) -> list[OutlineNode]:
    if len(nodes) < SIMILAR:
        return nodes
    items = [item for node in nodes for item in node.items]
    label = f"{_number(nodes[0])}-{nodes[-1].label}"
    covers = [address for node in nodes for address in node.covers]
    made = OutlineNode(label, parent.address, items, parent.depth, parent.level + 1, covers=covers)
    made.kids = nodes
    for node in nodes:
        node.level += 1
    return [made]


def _number(node: OutlineNode) -> str:
    return node.label.partition(".")[0]


def _likeness(node: OutlineNode) -> object:
    """Return a key that is equal for modules whose tensors have the same names, dtypes and shapes; None for a leaf."""
    if node.item is not None or not _number(node).isdecimal():
        return None
    first = node.items[0].parts
    depth = next(at for at in range(len(first)) if "".join(first[: at + 1])[:-1] == node.covers[0]) + 1
    rows = []
    for item in node.items:
        entry = item.shown
        rows.append((item.parts[depth:], None if entry is None else (entry.dtype, entry.shape)))
    return tuple(rows)


class Outline:
    """The visible rows: the opened nodes and everything shown below them.

    Args:
        like: an outline whose order and open nodes to copy.

    Attributes:
        rows: the nodes in display order; the first one represents the whole file.
        order: the order of children.
        fold: whether similar modules are one row.
    """

    def __init__(self, items: Sequence[ContentItem], like: Outline | None = None) -> None:
        self.root = OutlineNode("", "", items, 0, 0)
        self.root.opened = True
        self.order: Order = "file" if like is None else like.order
        self.rows: list[OutlineNode] = []
        self.fold: bool = False if like is None else like.fold
        self._opened: set[tuple[str, str]] = set() if like is None else set(like._opened)
        self.rebuild()

    def rebuild(self) -> None:
        """Make the rows again, and keep the open nodes open."""
        self.rows = [self.root]
        if self.root.opened:
            self.rows += self._below(self.root)
            if len(self.rows) == 2:
                self.expand(1)

    def _below(self, node: OutlineNode) -> list[OutlineNode]:
        rows: list[OutlineNode] = []
        stack = list(reversed(node.children(self.order, fold=self.fold)))
        while stack:
            child = stack.pop()
            rows.append(child)
            if child.item is None and child.key in self._opened:
                child.opened = True
                stack.extend(reversed(child.children(self.order, fold=self.fold)))
        return rows

    def expand(self, index: int) -> int:
        """Show the children of a row, and return how many rows that adds."""
        node = self.rows[index]
        if node.item is not None or node.opened:
            return 0
        node.opened = True
        if node is not self.root:
            self._opened.add(node.key)
        below = self._below(node)
        self.rows[index + 1 : index + 1] = below
        return len(below)

    def collapse(self, index: int) -> int:
        """Hide the children of a row, and return how many rows that removes."""
        node = self.rows[index]
        if not node.opened:
            return 0
        node.opened = False
        self._opened.discard(node.key)
        end = index + 1
        while end < len(self.rows) and self.rows[end].level > node.level:
            end += 1
        gone = end - index - 1
        del self.rows[index + 1 : end]
        return gone

    def parent(self, index: int) -> int | None:
        """Return the row of the module that contains a row."""
        level = self.rows[index].level
        return next((row for row in range(index - 1, -1, -1) if self.rows[row].level < level), None)

    def sort(self, order: Order) -> None:
        """Sort the children of every node."""
        self.order = order
        self.rebuild()

    def show(self, item: ContentItem) -> int:
        """Open all modules around `item`, and return its row."""
        self.expand(0)
        index = 1
        while index < len(self.rows):
            node = self.rows[index]
            if node.item is item:
                return index
            if node.item is None and item.parts[: node.depth] == node.items[0].parts[: node.depth] and (
                node.kids is None or any(row is item for row in node.items)
            ):
                self.expand(index)
            index += 1
        return 0

    def expand_all(self, limit: int) -> bool:
        """Open every node if that makes at most `limit` rows, and return whether it did."""
        if len(self.root.items) > limit:
            return False
        index = 0
        while index < len(self.rows):
            self.expand(index)
            index += 1
        return True

    def collapse_all(self) -> None:
        """Close every node."""
        self._opened.clear()
        self.rebuild()


def sorted_items(items: Iterable[ContentItem], order: Order) -> list[ContentItem]:
    """Sort the items that a search found, in the order of the tree."""
    key: dict[Order, Callable[[ContentItem], Any]] = {
        "name": lambda item: natural(item.name),
        "size": lambda item: -item.nbytes,
    }
    return sorted(items, key=key[order]) if order in key else list(items)


def leaf(item: ContentItem) -> OutlineNode:
    """Return a row for an item, under its full name."""
    return OutlineNode(item.name, item.name, (item,), len(item.parts), 0, item)
