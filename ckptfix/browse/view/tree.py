"""The tree, and the names that a search found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.cells import cell_len
from textual.binding import Binding, BindingType

from ckptfix.browse.model.contents import ContentItem
from ckptfix.browse.model.facts import STYLES
from ckptfix.browse.model.node_findings import Marks
from ckptfix.browse.model.outline import Order, Outline, OutlineNode, leaf, sorted_items
from ckptfix.browse.model.text_drawing import shown, value_text
from ckptfix.browse.view.rows import LineList, Span, fitted
from ckptfix.words import plural, shape, size

ALL = 20_000
"""Maximum number of rows for "open all"."""


BAR = 60
"""Minimum number of columns that leaves room for a bar."""


class Tree(LineList):
    """The outline of a checkpoint. Modules open in place; tensors are chosen.

    Attributes:
        title: the label of the root row.
        paired: two files are shown side by side.
        found: the results of a search; None without a search.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("right,l", "into", "Open", show=False),
        Binding("left,h", "out", "Close", show=False),
        Binding("space", "turn", "Open or close", show=False),
        Binding("asterisk,plus", "open_all", "Open all", show=False),
        Binding("minus", "close_all", "Close all", show=False),
        Binding("z", "fold", "Fold", show=False),
    ]

    def __init__(self) -> None:
        super().__init__()
        self.outline = Outline([])
        self.found: list[ContentItem] | None = None
        self.marks = Marks()
        self.title = ""
        self.paired = False
        self._items: list[ContentItem] = []

    def fill(self, items: Sequence[ContentItem], title: str, *, paired: bool = False, keep: bool = False) -> None:
        """Show these items; with `keep`, the same nodes stay open, and the cursor stays."""
        before = self.node if keep else None
        self.outline = Outline(items, self.outline)
        if not keep:
            self.outline.collapse_all()
        self.found = None
        self.title = title
        self.paired = paired
        self.changed(keep=keep)
        if before is not None:
            self._place_at(before)

    @property
    def node(self) -> OutlineNode | None:
        """The node under the cursor."""
        return self.at(self.cursor) if self.cursor < self.count() else None

    def at(self, index: int) -> OutlineNode:
        """Return the node of a row."""
        return self.outline.rows[index] if self.found is None else leaf(self.found[index])

    def count(self) -> int:
        return len(self.outline.rows if self.found is None else self.found)

    def sort(self, order: Order) -> None:
        """Sort, and keep the cursor on the same node."""
        node = self.node
        self.outline.sort(order)
        if self.found is not None:
            self.show_found(self.found)
        else:
            self.changed()
            if node is not None:
                self._place_at(node)

    def _place_at(self, node: OutlineNode) -> None:
        rows = enumerate(self.outline.rows)
        kind = node.item is None
        self.place(next((row for row, one in rows if one.key == node.key and (one.item is None) == kind), 0))

    def show_found(self, items: Sequence[ContentItem] | None) -> None:
        """Show search results, or the tree again."""
        self.found = None if items is None else sorted_items(items, self.outline.order)
        self.changed(keep=False)

    def reveal(self, item: ContentItem) -> None:
        """Show the tree, with the cursor on `item`."""
        self.found = None
        row = self.outline.show(item)
        self.changed()
        self.place(row)
        self.follow()

    def next_marked(self, by: int) -> bool:
        """Move to the next row with a finding or a difference, and return whether there is one."""
        for step in range(1, self.count()):
            index = (self.cursor + by * step) % self.count()
            node = self.at(index)
            closed = node.item is not None or not node.opened
            if closed and (self.marks.severity(node.covers) or node.status in ("~", "+", "-")):
                self.place(index)
                return True
        return False

    def spans(self, index: int, width: int) -> Sequence[Span]:
        node = self.at(index)
        mark, style = self._mark(node)
        indent = "  " * min(node.level, 20) if self.found is None else ""
        arrow = "  " if node.item is not None else "▾ " if node.opened else "▸ "
        nbytes = "" if not node.tensors else "..." if node.items[0].pending else size(node.nbytes)
        about = self._about(node)
        right = min(cell_len(about), max(width // 3, 12), 34)
        bar = width >= BAR
        room = max(width - 4 - len(indent) - right - 11 - (7 if bar else 0), 8)
        if node.item is not None and node.item.is_value:
            longest = max(room, width * 2 // 3 - len(indent))
            label = fitted(self._label(node), min(max(cell_len(self._label(node)), 8), longest))
            value = fitted(f" = {about}", max(width - 4 - len(indent) - cell_len(label), 0))
            return [(mark, style), (indent + arrow, "dim"), (label, "value"), (value, "dim")]
        strong = "" if node.item is not None else "strong"
        return [
            (mark, style),
            (indent + arrow, "dim"),
            (fitted(self._label(node), room), strong),
            (f" {fitted(about, right)}", "dim"),
            (f"{nbytes:>10}", "size"),
            *([(f" {self._share(node)}", "size")] if bar else []),
        ]

    def _share(self, node: OutlineNode) -> str:
        """Draw a bar of six cells: the share of all bytes that is below a node."""
        whole = self.outline.root.nbytes
        eighths = round(48 * node.nbytes / whole) if whole else 0
        full, rest = divmod(max(eighths, 1 if node.nbytes else 0), 8)
        part = ("", *"▏▎▍▌▋▊▉")[rest]
        return f"{'█' * full}{part}".ljust(6)

    def _label(self, node: OutlineNode) -> str:
        if node is self.outline.root:
            return self.title
        return shown(node.label, 400) or "''"

    def _about(self, node: OutlineNode) -> str:
        item = node.item
        if item is None:
            counted = plural(node.tensors, "tensor") if node.tensors else plural(node.values, "value")
            counted = f"{len(node.kids)} similar, {counted}" if node.kids is not None else counted
            if not self.paired:
                return counted
            counts = node.counts()
            apart = [f"{status}{counts[status]:,}" for status in ("~", "+", "-", "?") if counts[status]]
            return "  ".join([*apart, counted])
        entry = item.shown
        if entry is None:
            value = item.other_value if item.status == "+" else item.value
            text = value_text(value, 200)
            return f"{text} -> {value_text(item.other_value, 200)}" if item.status == "~" else text
        text = shown(f"{entry.dtype} {shape(entry.shape)}", 100)
        if item.entry is not None and item.other is not None and item.entry.shape != item.other.shape:
            text += f" -> {shape(item.other.shape)}"
        return text

    def _mark(self, node: OutlineNode) -> Span:
        severity = self.marks.severity(node.covers)
        if severity is not None:
            return ("✗ ", "error") if severity == "error" else ("! ", "warning")
        if self.paired:
            return f"{node.status or ' '} ", STYLES[node.status]
        return "  ", ""

    def action_into(self) -> None:
        node = self.node
        if node is None:
            return
        if node.item is not None:
            self.action_choose()
        elif node.opened and self.cursor + 1 < self.count():
            self.place(self.cursor + 1)
        else:
            self._open(self.cursor)

    def action_out(self) -> None:
        node = self.node
        if node is None or self.found is not None:
            return
        if node.item is None and node.opened and node is not self.outline.root:
            self.outline.collapse(self.cursor)
            self.changed()
            return
        above = self.outline.parent(self.cursor)
        if above is not None:
            self.place(above)

    def action_turn(self) -> None:
        node = self.node
        if node is not None and node.item is None and node is not self.outline.root:
            if node.opened:
                self.outline.collapse(self.cursor)
                self.changed()
            else:
                self._open(self.cursor)

    def _open(self, index: int) -> None:
        self.outline.expand(index)
        self.changed()

    def action_open_all(self) -> None:
        node = self.node
        if self.found is None and not self.outline.expand_all(ALL):
            self.notify(f"more than {ALL:,} rows: open what you need", severity="warning", markup=False)
        self.changed()
        if node is not None:
            self._place_at(node)

    def action_fold(self) -> None:
        if self.found is None:
            self.outline.fold = not self.outline.fold
            self.outline.rebuild()
            self.changed(keep=False)

    def action_close_all(self) -> None:
        if self.found is None:
            self.outline.collapse_all()
            self.changed(keep=False)
