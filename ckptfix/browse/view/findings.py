"""The list of findings, with their meaning and remedy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.screen import Screen
from textual.widgets import Footer

from ckptfix.browse.model.facts import Line
from ckptfix.browse.model.node_findings import Marks
from ckptfix.browse.model.text_drawing import shown
from ckptfix.browse.view.parts import Details, Title, copy
from ckptfix.browse.view.rows import LineList, Span
from ckptfix.findings.table import ENTRIES
from ckptfix.words import plural


class FindingRows(LineList):
    """A row for each finding."""

    def __init__(self, marks: Marks) -> None:
        super().__init__()
        self.marks = marks

    def count(self) -> int:
        return len(self.marks.rows)

    def spans(self, index: int, width: int) -> Sequence[Span]:
        finding = self.marks.rows[index].finding
        word = "note" if finding.severity == "info" else finding.severity
        style = finding.severity if finding.severity != "info" else "dim"
        return [(f" {word:<8} ", style), (f"{finding.id}  ", "value"), (shown(finding.message, 400), "")]


class Findings(Screen[str | None]):
    """All findings; enter goes to the subject of one. The screen returns an address, or None."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "copy", "Copy command"),
        Binding("x", "copy_fix", "Copy the fix"),
        Binding("escape,f,left,h", "leave", "Back"),
        Binding("question_mark", "app.help", "Help", key_display="?"),
        Binding("q", "app.quit", "Quit"),
    ]
    CSS = """
    Findings {
        #found { layout: vertical; }
        FindingRows { height: 1fr; }
        Details { height: 1fr; border-top: solid $panel; }
    }
    """

    def __init__(self, marks: Marks, line: str) -> None:
        super().__init__()
        self.marks = marks
        self.line = line

    def compose(self) -> ComposeResult:
        yield Title()
        with Container(id="found"):
            yield FindingRows(self.marks)
            yield Details()
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        rows = self.query_one(FindingRows)
        rows.changed()
        rows.focus()
        self.query_one(Title).show(f"{plural(len(self.marks.rows), 'finding')}, without reading tensors")

    def on_line_list_moved(self, event: LineList.Moved) -> None:
        event.stop()
        self.query_one(Details).show(self._lines())

    def _lines(self) -> list[Line]:
        rows = self.marks.rows
        if not rows:
            return [("", "No problems were found. The tensors were not read: `ckptfix doctor` reads them.")]
        finding = rows[self.query_one(FindingRows).cursor].finding
        entry = ENTRIES.get(finding.id)
        place = f" @ {finding.offset:#x}" if finding.offset is not None else ""
        lines: list[Line] = [("strong", finding.id), ("", shown(finding.message, 4000))]
        if finding.where:
            lines.append(("dim", f"at {shown(finding.where)}{place}"))
        if finding.fix:
            lines += [("", ""), ("added", f"Fix: {shown(finding.fix)}")]
        if self.marks.fix is not None:
            lines.append(("added", f"All: {shown(self.marks.fix)}"))
        if entry is not None:
            lines += [("", ""), ("", " ".join(entry.story.split()))]
        return lines

    def on_line_list_chosen(self, event: LineList.Chosen) -> None:
        event.stop()
        if not event.clicked:
            self.dismiss(self.marks.rows[self.query_one(FindingRows).cursor].address)

    def action_leave(self) -> None:
        self.dismiss(None)

    def action_copy(self) -> None:
        copy(self, self.line)

    def action_copy_fix(self) -> None:
        rows = self.marks.rows
        own = rows[self.query_one(FindingRows).cursor].finding.fix if rows else None
        fix = self.marks.fix if self.marks.fix is not None else own
        if fix is not None:
            copy(self, fix)
        else:
            self.notify("no command fixes this finding", markup=False)
