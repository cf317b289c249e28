"""A grid of numbers with a cursor; the screen reads the visible part."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from rich.segment import Segment
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.scroll_view import ScrollView
from textual.strip import Strip

from ckptfix.browse.model.grid import Number, TensorLayout, written

WIDTHS = {
    "float64": 15, "float32": 13, "complex64": 22, "complex128": 22, "bool": 6, "uint8": 5, "int8": 5, "int16": 8,
    "int64": 14, "int32": 14,
}  # fmt: skip
"""Width of a column, by dtype; 11 for other dtypes."""

Rows = dict[int, list[Number]]


class Cells(ScrollView, can_focus=True):
    """Rows and columns of numbers, with the indices at the top and at the left, and a cursor."""

    ALLOW_SELECT = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(key, action, text, show=False)
        for key, action, text in (
            ("up,k", "go(-1, 0)", "Up"),
            ("down,j", "go(1, 0)", "Down"),
            ("left,h", "go(0, -1)", "Left"),
            ("right,l", "go(0, 1)", "Right"),
            ("pageup,ctrl+b", "page(-1)", "Page up"),
            ("pagedown,ctrl+f,space", "page(1)", "Page down"),
            ("home,0", "edge(-1)", "First column"),
            ("end,dollar_sign", "edge(1)", "Last column"),
            ("g,ctrl+home", "end(-1)", "First row"),
            ("G,ctrl+end", "end(1)", "Last row"),
        )
    ]
    COMPONENT_CLASSES: ClassVar[set[str]] = {"cells--index", "cells--cursor", "cells--odd"}
    DEFAULT_CSS = """
    Cells {
        background: $surface;
        & > .cells--index { text-style: dim; }
        & > .cells--cursor { background: $block-cursor-background; color: $block-cursor-foreground; text-style: bold; }
        & > .cells--odd { color: $text-error; text-style: bold; }
        &:nocolor > .cells--cursor { background: $surface; color: $foreground; text-style: bold reverse; }
    }
    """

    def __init__(self, grid: TensorLayout, dtype: str, moved: Callable[[], None]) -> None:
        super().__init__()
        self.grid = grid
        self.dtype = dtype
        self.width = WIDTHS.get(dtype, 11)
        self.label = max(len(grid.index(grid.rows - 1)), 4) + 1
        self.row = 0
        self.column = 0
        self.known: Rows = {}
        self.columns = range(0)
        self._moved = moved
        self.virtual_size = Size(self.label + grid.columns * self.width, grid.rows + 1)

    def seen(self) -> tuple[range, range]:
        """Return the visible rows and columns."""
        top, left = self.scroll_offset.y, max(self.scroll_offset.x, 0) // self.width
        room = self.scrollable_content_region
        across = max(room.width - self.label, self.width) // self.width + 2
        return (
            range(top, min(top + max(room.height - 1, 1), self.grid.rows)),
            range(left, min(left + across, self.grid.columns)),
        )

    def has(self, rows: range, columns: range) -> bool:
        """Return whether these were read."""
        inside = columns.start >= self.columns.start and columns.stop <= self.columns.stop
        return inside and all(row in self.known for row in rows)

    def give(self, known: Rows, columns: range) -> None:
        """Show these numbers."""
        self.known = known
        self.columns = columns
        self.refresh()

    def value(self) -> Number | None:
        """Return the number under the cursor; None if it was not read yet."""
        row = self.known.get(self.row, [])
        at = self.column - self.columns.start
        return row[at] if 0 <= at < len(row) else None

    def render_line(self, y: int) -> Strip:
        room = self.scrollable_content_region.width
        base = self.rich_style
        dim = base + self.get_component_rich_style("cells--index", partial=True)
        first = self.scroll_offset.x // self.width
        count = max((room - self.label) // self.width, 1)  # whole columns only: a truncated number would be wrong
        columns = range(first, min(first + count, self.grid.columns))
        if y == 0:
            head = "".join(f"{column:>{self.width}}" for column in columns)
            return Strip([Segment(" " * self.label, dim), Segment(head, dim)]).adjust_cell_length(room, base)
        row = y - 1 + self.scroll_offset.y
        if row >= self.grid.rows:
            return Strip.blank(room, base)
        segments = [Segment(self.grid.index(row).rjust(self.label), dim)]
        numbers = self.known.get(row)
        for column in columns:
            at = column - self.columns.start
            style = base
            if column >= self.grid.width(row):
                break
            if numbers is None or not 0 <= at < len(numbers):
                text = "·"
            else:
                text = written(numbers[at], self.dtype)
                if text in ("nan", "inf", "-inf"):
                    style = base + self.get_component_rich_style("cells--odd", partial=True)
            if (row, column) == (self.row, self.column):
                style = style + self.get_component_rich_style("cells--cursor", partial=True)
            text = text if len(text) < self.width else f"{text[: self.width - 2]}…"
            segments += [Segment(" ", base), Segment(text.rjust(self.width - 1), style)]
        return Strip(segments).adjust_cell_length(room, base)

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        self._moved()

    def watch_scroll_x(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_x(old_value, new_value)
        self._moved()

    def on_resize(self) -> None:
        self._moved()

    def place(self, row: int, column: int) -> None:
        """Move the cursor."""
        self.row = max(0, min(row, self.grid.rows - 1))
        self.column = max(0, min(column, self.grid.width(self.row) - 1))
        room = self.scrollable_content_region
        top, height = self.scroll_offset.y, max(room.height - 1, 1)
        left, across = self.scroll_offset.x // self.width, max((room.width - self.label) // self.width, 1)
        y = min(max(top, self.row - height + 1), self.row)
        x = min(max(left, self.column - across + 1), self.column)
        if (x, y) != (left, top):
            self.scroll_to(x * self.width, y, animate=False)
        self.refresh()
        self._moved()

    def action_go(self, down: int, right: int) -> None:
        row, column = self.row + down, self.column + right
        if self.grid.flat and right and not 0 <= column < self.grid.width(self.row):
            row, column = (row - 1, self.grid.columns - 1) if column < 0 else (row + 1, 0)
            if not 0 <= row < self.grid.rows:
                return
        self.place(row, column)

    def action_page(self, by: int) -> None:
        self.place(self.row + by * max(self.scrollable_content_region.height - 2, 1), self.column)

    def action_edge(self, by: int) -> None:
        self.place(self.row, 0 if by < 0 else self.grid.columns - 1)

    def action_end(self, by: int) -> None:
        self.place(0 if by < 0 else self.grid.rows - 1, self.column)

    def on_click(self, event: events.Click) -> None:
        row = event.y - 1 + self.scroll_offset.y
        column = (event.x - self.label) // self.width + self.scroll_offset.x // self.width
        if event.y and event.x >= self.label and row < self.grid.rows and column < self.grid.columns:
            self.place(row, column)
