"""The application: its first screen, and the help."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from ckptfix.browse.view.browser import Browser
from ckptfix.platform import STOP_SIGNALS

HELP: tuple[tuple[str, str], ...] = (
    ("Move", ""),
    ("↑ ↓  j k", "up and down; ctrl+u, ctrl+d half a page; g, G first and last row"),
    ("→ l  enter", "open a module, the values of a tensor, or a checkpoint in a folder"),
    ("← h", "close, or go to the enclosing module"),
    ("space", "open or close; * opens all, - closes all"),
    ("tab", "switch between the tree and the details, which scroll"),
    ("mouse", "click opens and closes; double click shows values; the wheel scrolls"),
    ("Find", ""),
    ("/", "search as you type: part of a name, a glob (*.weight), or /REGEX/"),
    ("enter", "in the search results: show the row in the tree"),
    ("n N", "next or previous row with a finding or a difference"),
    ("z", "fold similar layers into one row, or unfold them"),
    ("s", "sort: as in the file, by name, by size"),
    ("Look", ""),
    ("v", "show the values of a tensor; only the visible ones are read"),
    ("c", "read a large tensor: statistics and histogram; with two files, compare"),
    ("C", "with two files: compare the values of all tensors"),
    ("x", "in the values of two files: A, B, or B - A"),
    (": i", "in the values: go to an index, such as 12, 345"),
    ("f", "list the findings of ckptfix doctor --fast"),
    ("d", "in a folder: mark one checkpoint, and compare it with a second"),
    ("Other", ""),
    ("y", "copy the command that prints what you see, and show it"),
    ("r", "read the file again, after it changed on disk"),
    ("esc", "stop a running job; leave a search; go back"),
    ("q", "quit"),
    ("Marks", ""),
    ("✗ !", "an error or a warning of doctor here or below"),
    ("~ + -", "with two files: different, only in B, only in A"),
    ("? =", "with two files: values not compared yet, equal"),
)


class Help(ModalScreen[None]):
    """The keys."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,question_mark,enter", "leave", "Back"),
        Binding("q", "app.quit", "Quit"),
        *(Binding(key, f"scroll({by})", show=False) for key, by in (("j,down", 1), ("k,up", -1))),
    ]
    CSS = """
    Help { align: center middle; }
    Help > VerticalScroll {
        width: 86; max-width: 100%; height: auto; max-height: 100%; padding: 0 2; background: $panel;
        border: round $primary;
    }
    """

    def compose(self) -> ComposeResult:
        text = Text()
        for keys, what in HELP:
            if what:
                text.append(f"  {keys:<13}", "bold")
                text.append(f"{what}\n")
            else:
                text.append(f"{keys}\n", "bold underline")
        text.rstrip()
        with VerticalScroll():
            yield Static(text)

    def on_mount(self) -> None:
        self.query_one(VerticalScroll).focus()

    def action_leave(self) -> None:
        self.dismiss()

    def action_scroll(self, by: int) -> None:
        self.query_one(VerticalScroll).scroll_relative(y=by, animate=False)


class BrowseApp(App[None]):
    """A browser for checkpoints.

    Args:
        path: a file, a folder that is a checkpoint, or a URL.
        other: the second of two files to compare.
        at: addresses of the state dicts to compare.
        inside: the checkpoints in the folder `path`, if it is not a checkpoint itself.

    Attributes:
        signals: the signals that end it like a key does, so that the terminal is restored.
        stopped_by: the signal that ended it.
        failure: the error that ended it.
    """

    ENABLE_COMMAND_PALETTE = False
    TITLE = "ckptfix"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+c", "quit", "Quit", show=False, priority=True),
    ]

    def __init__(
        self,
        path: str,
        other: str | None = None,
        at: tuple[str, str] | None = None,
        inside: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.path = path
        self.other = other
        self.at = at
        self.inside = inside

        self.signals: Sequence[int] = ()
        self.stopped_by: int | None = None
        self.failure: Exception | None = None

    def on_mount(self) -> None:
        for number in self.signals:
            asyncio.get_running_loop().add_signal_handler(number, self._stop, number)
        if self.inside:
            from ckptfix.browse.view.files import FilesScreen

            self.push_screen(FilesScreen(self.path, self.inside))
        else:
            self.push_screen(Browser(self.path, self.other, self.at))

    def _stop(self, number: int) -> None:
        self.stopped_by = number
        self.exit()

    def _handle_exception(self, error: Exception) -> None:
        """End the program on an error in a screen, and report it like errors of other commands."""
        if not self.signals:
            super()._handle_exception(error)
            return
        self.failure = self.failure or error
        self.exit()

    def action_help(self) -> None:
        """Show the keys."""
        if not isinstance(self.screen, Help):
            self.push_screen(Help())


def run(
    path: str, other: str | None = None, at: tuple[str, str] | None = None, inside: Sequence[str] = ()
) -> int | None:
    """Run the browser until the user quits; return the number of the signal that ended it. Raise its error, if any."""
    app = BrowseApp(path, other, at, inside)
    app.signals = STOP_SIGNALS
    app.run()
    if app.failure is not None:
        raise app.failure
    return app.stopped_by
