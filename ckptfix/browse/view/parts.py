"""Small parts of the screens: the title, the status line, the details panel."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.cells import cell_len
from rich.style import Style
from rich.text import Text
from textual.containers import VerticalScroll
from textual.screen import Screen
from textual.widgets import Static

from ckptfix.browse.model.facts import Line
from ckptfix.browse.view.rows import fitted


class Title(Static):
    """The first line: the name of the open file."""

    DEFAULT_CSS = "Title { height: 1; background: $primary; color: $text; text-style: bold; padding: 0 1; }"

    def __init__(self) -> None:
        super().__init__()
        self._left = self._right = ""

    def show(self, left: str, right: str = "") -> None:
        """Show two texts without control characters; if there is no room, the left one loses its middle."""
        self._left, self._right = left, right
        self.refresh()

    def render(self) -> Text:
        width = self.content_size.width
        right = self._right if cell_len(self._right) <= width - 20 else ""
        left = fitted(self._left, max(width - cell_len(right) - (2 if right else 0), 1))
        return Text(f"{left}  {right}" if right else left, no_wrap=True, overflow="ellipsis")


class StatusLine(Static):
    """The line above the keys: running jobs and findings."""

    DEFAULT_CSS = """
    StatusLine { height: 1; background: $panel; padding: 0 1; }
    StatusLine.-error { background: $error; color: $text; text-style: bold; }
    """

    _shown: tuple[str, bool] | None = None

    def show(self, text: str, *, error: bool = False) -> None:
        """Show `text`, which has no control characters."""
        if self._shown == (text, error):
            return
        self._shown = (text, error)
        self.set_class(error, "-error")
        self.update(Text(text, no_wrap=True, overflow="ellipsis"))


class Details(VerticalScroll):
    """Details of the row under the cursor."""

    ALLOW_SELECT = False
    COMPONENT_CLASSES = {
        *("details--dim", "details--error", "details--warning", "details--added", "details--removed"),
        *("details--changed", "details--strong", "details--size"),
    }
    DEFAULT_CSS = """
    Details {
        background: $background;
        padding: 0 1;
        & > Static { background: $background; }
        &:focus { background-tint: $foreground 5%; }
        & > .details--dim { text-style: dim; }
        & > .details--error { color: $text-error; text-style: bold; }
        & > .details--warning { color: $text-warning; text-style: bold; }
        & > .details--added { color: $text-success; }
        & > .details--removed { color: $text-error; }
        & > .details--changed { color: $text-warning; }
        & > .details--strong { text-style: bold; }
        & > .details--size { color: $text-accent; }
    }
    """

    def compose(self) -> Iterable[Static]:
        yield Static()

    def show(self, lines: Iterable[Line], *, top: bool = True) -> None:
        """Show these lines; with `top`, scroll to the first."""
        text = Text()
        for name, line in lines:
            style = self.get_component_rich_style(f"details--{name}", partial=True) if name else Style()
            text.append(line + "\n", style)
        text.rstrip()
        self.query_one(Static).update(text)
        if top:
            self.scroll_home(animate=False)

    @property
    def room(self) -> int:
        """Characters per line."""
        return max(self.scrollable_content_region.width - 1, 16)


def copy(screen: Screen[Any], line: str) -> None:
    """Copy a command to the clipboard, and show it, as some terminals do not allow copying."""
    screen.app.copy_to_clipboard(line)
    screen.notify(line, title="copied to the clipboard", markup=False, timeout=4)
