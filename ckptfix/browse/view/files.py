"""The checkpoints in a folder, as in `ls`; enter opens one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widgets import Footer

from ckptfix.browse.model import jobs
from ckptfix.browse.model.jobs import BackgroundJob
from ckptfix.browse.model.shown_commands import of_folder
from ckptfix.browse.model.text_drawing import shown
from ckptfix.browse.view.browser import Browser
from ckptfix.browse.view.parts import StatusLine, Title, copy
from ckptfix.browse.view.rows import LineList, Span, fitted
from ckptfix.io.read import Progress
from ckptfix.words import natural, plural, short, size

if TYPE_CHECKING:
    from ckptfix.ops.listing import ListedCheckpoint

ORDERS = ("name", "size", "tensors", "finding")


class FileRows(LineList):
    """A row for each checkpoint; only its name until it is read."""

    def __init__(self, folder: str, paths: Sequence[str]) -> None:
        super().__init__()
        self.folder = folder
        self.paths = list(paths)
        self.known: dict[str, ListedCheckpoint] = {}

    def count(self) -> int:
        return len(self.paths)

    def spans(self, index: int, width: int) -> Sequence[Span]:
        path = self.paths[index]
        row = self.known.get(path)
        name = shown(path.removeprefix(self.folder).lstrip("/") or path, 300)
        if row is None:
            return [("  ", ""), (fitted(name, max(width - 8, 8)), ""), ("  ...", "dim")]
        if row.error is not None:
            room = max(width // 2, 16)
            return [("✗ ", "error"), (fitted(name, room), ""), (f"  {shown(row.error, 200)}", "error")]
        mark = {"error": "✗ ", "warning": "! "}.get(row.severity or "", "  ")
        columns = [(f"{row.format or '':>15}", "dim"), (f"{size(row.size):>10}", "size")]
        if width >= 70:
            columns += [(f"{plural(row.tensors, 'tensor'):>16}", ""), (f"{short(row.all_parameters):>8}", "")]
        if width >= 110:
            columns.append((fitted(f"  {', '.join(shown(name, 20) for name in list(row.dtypes)[:3])}", 26), "dim"))
        found = shown(row.finding or "", 24)
        style = row.severity if row.severity in ("error", "warning") else "dim"
        if width >= 90:
            columns.append((fitted(f"  {found}", 24), style))
        used = sum(len(text) for text, _ in columns)
        return [(mark, style), (fitted(name, max(width - used - 2, 8)), "strong"), *columns]

    def sort(self, order: str) -> None:
        """Sort the rows; rows that are not read yet come last."""
        here = self.paths[self.cursor] if self.paths else ""
        rank = {"error": 0, "warning": 1}

        def key(path: str) -> tuple[object, ...]:
            row = self.known.get(path)
            if row is None:
                return 1, 0, natural(path)
            first = {"size": -row.size, "tensors": -row.tensors, "finding": rank.get(row.severity or "", 2)}
            return 0, first.get(order, 0), natural(path)

        self.paths.sort(key=key)
        self.changed()
        if here:
            self.place(self.paths.index(here))


class FilesScreen(Screen[None]):
    """A folder of checkpoints."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "sort", "Sort"),
        Binding("d", "mark", "Mark to compare"),
        Binding("y", "copy", "Copy command"),
        Binding("right,l", "choose", "Open", show=False),
        Binding("question_mark", "app.help", "Help", key_display="?"),
        Binding("q", "app.quit", "Quit"),
    ]
    CSS = "FilesScreen FileRows { height: 1fr; }"

    def __init__(self, folder: str, paths: Sequence[str]) -> None:
        super().__init__()
        self.folder = folder
        self.paths = paths
        self.order = ORDERS[0]
        self.marked: str | None = None
        self.job: BackgroundJob | None = None

    def compose(self) -> ComposeResult:
        yield Title()
        yield FileRows(self.folder, self.paths)
        yield StatusLine()
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        rows = self.query_one(FileRows)
        rows.sort(self.order)
        rows.focus()
        self.query_one(Title).show(f"{shown(self.folder, 200)}  {plural(len(self.paths), 'checkpoint')}")
        self.job = jobs.start(self._read, lambda _: self._state(), lambda _: self._state(), self.call_later)
        self._state()

    def on_unmount(self) -> None:
        if self.job is not None:
            self.job.stop()

    def _read(self, progress: Progress) -> None:
        from ckptfix.ops.listing import listed  # importing it takes as long as everything else together

        for number, path in enumerate(list(self.query_one(FileRows).paths)):
            progress(number, len(self.paths))
            self.call_later(self._know, listed(path))

    def _know(self, row: ListedCheckpoint) -> None:
        rows = self.query_one(FileRows)
        rows.known[row.path] = row
        rows.refresh()
        self._state()

    def _state(self) -> None:
        rows = self.query_one(FileRows)
        known = rows.known.values()
        bad = sum(row.severity == "error" for row in known)
        warned = sum(row.severity == "warning" for row in known)
        words = [f"{size(sum(row.size for row in known))}"]
        words += [plural(bad, "checkpoint") + " with errors"] if bad else []
        words += [plural(warned, "checkpoint") + " with warnings"] if warned else []
        left = len(rows.paths) - len(rows.known)
        words += [f"reading {plural(left, 'more', 'more')} ..."] if left else []
        words += [f"sorted by {self.order}"] if self.order != "name" else []
        words += [f"A is {shown(self.marked, 100)}: d on a second one compares"] if self.marked is not None else []
        self.query_one(StatusLine).show("   ".join(words))

    def on_line_list_moved(self, event: LineList.Moved) -> None:
        event.stop()

    def on_line_list_chosen(self, event: LineList.Chosen) -> None:
        event.stop()
        if not event.clicked:
            self.action_choose()

    def action_choose(self) -> None:
        rows = self.query_one(FileRows)
        if rows.paths:
            self.app.push_screen(Browser(rows.paths[rows.cursor], inside=True))

    def action_mark(self) -> None:
        rows = self.query_one(FileRows)
        path = rows.paths[rows.cursor]
        if self.marked is None or self.marked == path:
            self.marked = path if self.marked is None else None
            self._state()
        else:
            self.app.push_screen(Browser(self.marked, path, inside=True))

    def action_sort(self) -> None:
        self.order = ORDERS[(ORDERS.index(self.order) + 1) % len(ORDERS)]
        self.query_one(FileRows).sort(self.order)
        self._state()

    def action_copy(self) -> None:
        copy(self, of_folder(self.folder))
