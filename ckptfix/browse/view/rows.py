"""A list of any length with a cursor; only the visible lines are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.message import Message
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip

Span = tuple[str, str]
"""A text without control characters, and its style name."""

KEYS: tuple[tuple[str, str, str], ...] = (
    ("up,k", "move(-1)", "Up"),
    ("down,j", "move(1)", "Down"),
    ("pageup,ctrl+b", "page(-1)", "Page up"),
    ("pagedown,ctrl+f", "page(1)", "Page down"),
    ("ctrl+u", "half(-1)", "Half a page up"),
    ("ctrl+d", "half(1)", "Half a page down"),
    ("home,g", "first", "First"),
    ("end,G", "last", "Last"),
)


class LineList(ScrollView, can_focus=True):
    """Lines made by `spans`; a subclass defines their content and number."""

    ALLOW_SELECT = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "choose", "Open", key_display="↵"),
        *(Binding(key, action, text, show=False) for key, action, text in KEYS),
    ]
    COMPONENT_CLASSES: ClassVar[set[str]] = {
        *("rows--cursor", "rows--dim", "rows--error", "rows--warning", "rows--added", "rows--removed"),
        *("rows--changed", "rows--strong", "rows--size", "rows--value"),
    }
    DEFAULT_CSS = """
    LineList {
        background: $surface;
        & > .rows--cursor { background: $block-cursor-blurred-background; text-style: bold; }
        &:focus > .rows--cursor { background: $block-cursor-background; color: $block-cursor-foreground; }
        & > .rows--dim { text-style: dim; }
        & > .rows--error { color: $text-error; text-style: bold; }
        & > .rows--warning { color: $text-warning; text-style: bold; }
        & > .rows--added { color: $text-success; }
        & > .rows--removed { color: $text-error; }
        & > .rows--changed { color: $text-warning; }
        & > .rows--strong { text-style: bold; }
        & > .rows--size { color: $text-accent; }
        & > .rows--value { color: $text-secondary; }
        &:nocolor > .rows--cursor { background: $surface; color: $foreground; text-style: bold reverse; }
    }
    """

    cursor: reactive[int] = reactive(0, repaint=False)

    class Moved(Message):
        """The cursor moved to a different line."""

    class Chosen(Message):
        """The user chose the line under the cursor.

        Attributes:
            clicked: with the mouse.
        """

        def __init__(self, clicked: bool = False) -> None:
            self.clicked = clicked
            super().__init__()

    def count(self) -> int:
        """Return the number of lines."""
        raise NotImplementedError

    def spans(self, index: int, width: int) -> Sequence[Span]:
        """Return the line `index` in at most `width` cells."""
        raise NotImplementedError

    def changed(self, *, keep: bool = True) -> None:
        """Update after the lines changed; without `keep` the cursor goes to the first."""
        self.virtual_size = Size(0, self.count())
        self.cursor = min(self.cursor if keep else 0, max(self.count() - 1, 0))
        if not keep:
            self.scroll_to(0, 0, animate=False)
        self.refresh()
        self.post_message(self.Moved())

    @property
    def room(self) -> int:
        """Characters per line."""
        return self.scrollable_content_region.width

    def render_line(self, y: int) -> Strip:
        index = y + self.scroll_offset.y
        base = self.rich_style
        width = self.room
        if not 0 <= index < self.count():
            return Strip.blank(width, base)
        is_cursor = index == self.cursor
        over = self.get_component_rich_style("rows--cursor", partial=True) if is_cursor else None
        rest = base + over if over is not None else base
        segments = []
        for text, name in self.spans(index, width):
            own = self.get_component_rich_style(f"rows--{name}", partial=True) if name and over is None else None
            segments.append(Segment(text, rest if own is None else base + own))
        line = Strip(segments)
        return line.crop(0, width) if line.cell_length >= width else line.extend_cell_length(width, rest)

    def watch_cursor(self, before: int, now: int) -> None:
        if before != now:
            self.refresh()
            self.follow()
            self.post_message(self.Moved())

    def follow(self) -> None:
        """Scroll to make the cursor visible."""
        self.scroll_to_region(Region(0, self.cursor, 1, 1), animate=False, force=True)

    def place(self, index: int) -> None:
        """Move the cursor to a line."""
        self.cursor = max(0, min(index, self.count() - 1))

    def action_move(self, by: int) -> None:
        self.place(self.cursor + by)

    def action_page(self, by: int) -> None:
        self.place(self.cursor + by * max(self.scrollable_content_region.height - 1, 1))

    def action_half(self, by: int) -> None:
        self.place(self.cursor + by * max(self.scrollable_content_region.height // 2, 1))

    def action_first(self) -> None:
        self.place(0)

    def action_last(self) -> None:
        self.place(self.count() - 1)

    def action_choose(self) -> None:
        if self.count():
            self.post_message(self.Chosen())

    def on_click(self, event: events.Click) -> None:
        index = event.y + self.scroll_offset.y
        if event.x < self.room and 0 <= index < self.count():
            self.place(index)
            self.post_message(self.Chosen(clicked=event.chain < 2))


def fitted(text: str, width: int) -> str:
    """Fit `text` to exactly `width` cells; a long one loses its middle, as the end of a name matters more."""
    if width <= 0:
        return ""
    have = cell_len(text)
    if have <= width:
        return text + " " * (width - have)
    if width < 8:
        return set_cell_size(text, width)
    head = min(width // 3, 12)
    tail = text[-(width - head - 1) :]
    while cell_len(tail) > width - head - 1:
        tail = tail[1:]
    return set_cell_size(f"{set_cell_size(text, head)}…{tail}", width)
