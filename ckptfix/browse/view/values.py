"""The numbers of a tensor; only the visible ones are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widgets import Footer, Input

from ckptfix.browse.model import jobs
from ckptfix.browse.model.contents import Contents
from ckptfix.browse.model.grid import Number, TensorLayout, grid_of, window
from ckptfix.browse.model.jobs import BackgroundJob
from ckptfix.browse.model.text_drawing import shown
from ckptfix.browse.view.cells import Cells, Rows
from ckptfix.browse.view.parts import StatusLine, Title, copy
from ckptfix.checkpoint import TensorEntry
from ckptfix.errors import Unsupported
from ckptfix.io.read import Progress
from ckptfix.words import shape

Side = tuple[str, Contents, TensorEntry]

class ValuesScreen(Screen[None]):
    """The numbers of one tensor, or of a pair: of A, of B, or their difference.

    Args:
        name: its name.
        sides: the tensor in each file.
        line: the command that `y` copies.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("colon,i", "ask", "Go to index", key_display=":"),
        Binding("x", "side", "A, B, B-A"),
        Binding("y", "copy", "Copy command"),
        Binding("escape,v", "leave", "Back"),
        Binding("question_mark", "app.help", "Help", key_display="?"),
        Binding("q", "app.quit", "Quit"),
    ]
    CSS = """
    ValuesScreen {
        Cells { height: 1fr; }
        #index { display: none; height: 1; border: none; padding: 0 1; }
    }
    """

    def __init__(self, name: str, sides: Sequence[Side], line: str) -> None:
        super().__init__()
        self.tensor = name
        self.sides = sides
        self.line = line
        self.side = 0
        self.job: BackgroundJob | None = None
        self.trouble = ""
        try:
            self.grid: TensorLayout | None = grid_of(sides[0][2])
        except Unsupported as error:
            self.grid = None
            self.trouble = error.message

    def compose(self) -> ComposeResult:
        yield Title()
        yield Input(placeholder="index, such as 12, 345", id="index", compact=True)
        if self.grid is not None:
            yield Cells(self.grid, self.sides[0][2].dtype, self._look)
        yield StatusLine()
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        if self.grid is not None:
            self.query_one(Cells).focus()
        self._look()

    def on_unmount(self) -> None:
        if self.job is not None:
            self.job.stop()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return not (action == "side" and len(self.sides) < 2)

    def _shown_sides(self) -> tuple[str, list[Side]]:
        """Return the title of the shown side, and the tensors to read for it."""
        if len(self.sides) < 2:
            return "", [self.sides[0]]
        if self.side < 2:
            return self.sides[self.side][0], [self.sides[self.side]]
        return "B - A", list(self.sides)

    def _look(self) -> None:
        """Read the visible numbers that are not known yet."""
        if not self.is_mounted:
            return
        title, sides = self._shown_sides()
        entry = sides[0][2]
        what = f"{title}: " if title else ""
        self.query_one(Title).show(f"{what}{shown(self.tensor, 200)}  {shown(entry.dtype)} {shape(entry.shape)}")
        if self.grid is None or self.trouble:
            self.query_one(StatusLine).show(self.trouble, error=True)
            return
        cells = self.query_one(Cells)
        rows, columns = cells.seen()
        self._state(cells)
        if cells.has(rows, columns):
            return
        if self.job is not None:
            self.job.stop()
        more = range(max(rows.start - len(rows), 0), rows.stop + len(rows))
        around = range(max(columns.start - 8, 0), min(columns.stop + 8, self.grid.columns))

        def call(_: Progress) -> Rows:
            read = [window(contents, entry, more, around) for _, contents, entry in sides]
            return read[0] if len(read) == 1 else {row: _apart(read[0][row], read[1].get(row, [])) for row in read[0]}

        def done(known: Rows) -> None:
            self.job = None
            cells.give(known, around)
            self._state(cells)

        def failed(error: Exception) -> None:
            self.job = None
            self.trouble = shown(jobs.described(error)[0], 400)
            cells.give({}, range(0))
            self._look()

        self.job = jobs.start(call, done, failed, self.call_later)

    def _state(self, cells: Cells) -> None:
        value = cells.value()
        if self.grid is None:
            return
        first = self.grid.index(cells.row)
        if not self.grid.shape:
            place = "the element"
        elif self.grid.flat:
            place = f"[{int(first) + cells.column:,}]"
        else:
            place = f"[{first}, {cells.column}]" if len(self.grid.shape) > 1 else f"[{cells.column}]"
        text = "" if value is None else repr(value)
        self.query_one(StatusLine).show(f"{place}  {text}")

    def action_side(self) -> None:
        same = grid_of(self.sides[0][2]) == _grid(self.sides[1][2])
        self.side = (self.side + 1) % 3 if same else 0
        if not same:
            self.notify("A and B have different shapes: only A is shown", severity="warning", markup=False)
        if self.grid is not None:
            self.query_one(Cells).give({}, range(0))
        self._look()

    def action_copy(self) -> None:
        copy(self, self.line)

    def action_ask(self) -> None:
        if self.grid is not None:
            box = self.query_one(Input)
            box.display = True
            self.set_focus(box)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self._close_box()
        if self.grid is None or not event.value.strip():
            return
        try:
            words = event.value.replace("[", " ").replace("]", " ").replace(",", " ").split()
            self.query_one(Cells).place(*self.grid.row_of(tuple(map(int, words))))
        except (ValueError, IndexError) as error:
            why = f"the shape is {shape(self.grid.shape)}" if isinstance(error, ValueError) else str(error)
            self.notify(f"no element at {shown(event.value, 100)}: {why}", severity="warning", markup=False)

    def _close_box(self) -> None:
        box = self.query_one(Input)
        box.display = False
        box.value = ""
        if self.grid is not None:
            self.set_focus(self.query_one(Cells))

    def action_leave(self) -> None:
        if self.query_one(Input).display:
            self._close_box()
        else:
            self.dismiss()


def _grid(entry: TensorEntry) -> TensorLayout | None:
    try:
        return grid_of(entry)
    except Unsupported:
        return None


def _apart(a: Sequence[Number], b: Sequence[Number]) -> list[Number]:
    return [y - x for x, y in zip(a, b, strict=False)]


