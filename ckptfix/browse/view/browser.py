"""The main screen: the tree, the details of the row under the cursor, and the search."""

from __future__ import annotations

import asyncio
import re
from typing import ClassVar

from textual import events, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.screen import Screen
from textual.timer import Timer
from textual.widgets import Footer, Input

from ckptfix.browse.model import screen_text, search
from ckptfix.browse.model.contents import ContentItem
from ckptfix.browse.model.outline import ORDERS
from ckptfix.browse.model.session import RUNNING, Session
from ckptfix.browse.model.text_drawing import shown
from ckptfix.browse.view.findings import Findings
from ckptfix.browse.view.parts import Details, StatusLine, Title, copy
from ckptfix.browse.view.rows import LineList
from ckptfix.browse.view.tree import Tree
from ckptfix.browse.view.values import ValuesScreen
from ckptfix.errors import Refused

PAUSE = 0.15
"""Seconds for which the cursor rests on a tensor before it is read."""


class Browser(Screen[None]):
    """One checkpoint, or two side by side.

    Args:
        path, other: their names.
        at: addresses of the state dicts to compare.
        inside: it was opened from a list, and escape returns to it.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        # Priority, as the keys typed or pasted after it are for the search box.
        Binding("slash", "search", "Search", key_display="/", priority=True),
        Binding("s", "sort", "Sort"),
        Binding("v", "values", "Values"),
        Binding("c", "compute", "Compute", show=False),
        Binding("f", "findings", "Findings"),
        Binding("y", "copy", "Copy"),
        Binding("n", "next(1)", "Next mark", show=False),
        Binding("N", "next(-1)", "Mark before", show=False),
        Binding("C", "compare_all", "Compare all", show=False),
        Binding("r", "reload", "Read again", show=False),
        Binding("tab", "focus_next", "Other panel", show=False),
        Binding("escape", "back", "Back", show=False),
        Binding("question_mark", "app.help", "Help", key_display="?"),
        Binding("q", "app.quit", "Quit"),
    ]
    CSS = """
    Browser {
        #body { layout: vertical; }
        Tree { height: 1fr; }
        Details { height: 1fr; border-top: solid $panel; }
        #search { display: none; height: 1; border: none; padding: 0 1; }
        &.-wide #body { layout: horizontal; }
        &.-wide Tree { width: 3fr; height: 1fr; }
        &.-wide Details { width: 2fr; height: 1fr; border-top: none; border-left: solid $panel; }
    }
    """
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (110, "-wide")]

    def __init__(
        self, path: str, other: str | None = None, at: tuple[str, str] | None = None, *, inside: bool = False
    ) -> None:
        super().__init__()
        self.session = Session(path, other, at, self, self.call_later)
        self.inside = inside
        self._resting: Timer | None = None
        self._not_a_search = ""

    def compose(self) -> ComposeResult:
        yield Title()
        yield Input(placeholder="part of a name, glob or /REGEX/", id="search", compact=True)
        with Container(id="body"):
            yield Tree()
            yield Details()
        yield StatusLine()
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        self.query_one(Tree).focus()
        self.session.load()
        self._show()
        self.set_interval(0.2, self._tick)
        self.set_interval(2.0, self.session.look_at_disk)

    def on_unmount(self) -> None:
        self.session.stop(*self.session.jobs.copy())

    # Callbacks of the session

    def filled(self, *, keep: bool) -> None:
        """Show new leaves in the tree."""
        session = self.session
        self.query_one(Tree).fill(
            session.items, screen_text.name_of(session), paired=session.pairs is not None, keep=keep
        )
        text = self.query_one(Input).value
        if text:
            self._search(text)
        self._show()

    def told(self, item: ContentItem | None = None) -> None:
        """Show new information."""
        tree = self.query_one(Tree)
        tree.marks = self.session.marks
        tree.refresh()
        if self.session.trouble is not None and tree.display:
            tree.display = False
            self.set_focus(self.query_one(Details))
        node = tree.node
        if item is None or node is None or node.item is item or node.item is None:
            self._show(top=False)

    def warned(self, text: str) -> None:
        """Show a warning."""
        self.notify(text, severity="warning", markup=False)

    def _tick(self) -> None:
        text, error = screen_text.state(self.session)
        if self._not_a_search:
            text, error = self._not_a_search, True
        tree = self.query_one(Tree)
        extra = [f"{len(tree.found):,} found"] if tree.found is not None and not error else []
        extra += [f"sorted by {tree.outline.order}"] if tree.outline.order != "file" and not error else []
        self.query_one(StatusLine).show("   ".join([*extra, text]), error=error)

    def _show(self, *, top: bool = True) -> None:
        """Show the title, the details of the row under the cursor, and the status line."""
        if not self.is_mounted:
            return
        tree, panel = self.query_one(Tree), self.query_one(Details)
        self.query_one(Title).show(*screen_text.title(self.session))
        node = tree.node
        room, height = panel.room, panel.size.height
        panel.show(screen_text.details(self.session, node, room, height, everything=node is tree.outline.root), top=top)
        self._tick()

    def on_line_list_moved(self, event: LineList.Moved) -> None:
        event.stop()
        self._show()
        if self._resting is not None:
            self._resting.stop()
        self._resting = self.set_timer(PAUSE, self._rested)

    def _rested(self) -> None:
        item = self._item()
        if item is not None and self.is_current:
            self.session.compute_small(item)

    def _item(self) -> ContentItem | None:
        """Return the leaf under the cursor."""
        node = self.query_one(Tree).node
        return None if node is None or node.item is None or node.item.pending else node.item

    def on_resize(self) -> None:
        self.call_after_refresh(self._show)

    # Keys

    def on_line_list_chosen(self, event: LineList.Chosen) -> None:
        event.stop()
        tree = self.query_one(Tree)
        node = tree.node
        if node is None:
            return
        if tree.found is not None and not event.clicked and node.item is not None:
            self._leave_search(node.item)
        elif node.item is None:
            tree.action_turn()
        elif not event.clicked:
            self.action_values()

    def action_values(self) -> None:
        node, item = self.query_one(Tree).node, self._item()
        if node is None or item is None or item.is_value:
            return
        if self.session.stale:
            self.notify(screen_text.STALE, severity="error", markup=False)
        else:
            self.app.push_screen(
                ValuesScreen(item.name, self.session.sides(item), self.session.commands.of(node, "file"))
            )

    def action_compute(self) -> None:
        item, node = self._item(), self.query_one(Tree).node
        if item is not None and not item.is_value:
            self.session.compute(item)
        elif node is not None:
            self.session.compare(node.items)
        self._tick()

    def action_compare_all(self) -> None:
        self.session.compare(self.session.items)
        self._tick()

    def action_reload(self) -> None:
        self.query_one(Tree).display = True
        self.set_focus(self.query_one(Tree))
        self.session.load()
        self._show()

    def action_sort(self) -> None:
        tree = self.query_one(Tree)
        tree.sort(ORDERS[(ORDERS.index(tree.outline.order) + 1) % len(ORDERS)])
        self._tick()

    def action_next(self, by: int) -> None:
        if not self.query_one(Tree).next_marked(by):
            self.notify("no visible row has a mark; * opens all", markup=False)

    def action_findings(self) -> None:
        session = self.session
        if session.pairs is not None:
            self.notify("findings are listed only for one file: browse one of them", markup=False)
        elif session.marks.diagnosis is None:
            session.judge(then=self.action_findings)
            self._tick()
        else:
            self.app.push_screen(Findings(session.marks, session.commands.findings()), self._go_to)

    def _go_to(self, address: str | None) -> None:
        """Show the subject of a finding: a tensor, or the first tensor of a module."""
        if address is None:
            return
        items = self.session.items
        item = next((item for item in items if item.name == address), None)
        item = item or next((item for item in items if item.name.startswith((f"{address}/", f"{address}."))), None)
        if item is not None:
            self._leave_search(item)

    def action_copy(self) -> None:
        tree, commands = self.query_one(Tree), self.session.commands
        node, order = tree.node, tree.outline.order
        if self.session.trouble is not None:
            line = commands.findings() if self.session.other is None else commands.everything()
        elif tree.found is not None:
            line = commands.search(self.query_one(Input).value, order)
        elif node is None or node is tree.outline.root or node.items[0].pending:
            line = commands.everything(order)
        else:
            line = commands.of(node, order)
        copy(self, line)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return not (action == "search" and self.is_mounted and self.query_one(Input).has_focus)

    def action_search(self) -> None:
        box = self.query_one(Input)
        box.display = True
        self.set_focus(box)  # immediately: the next key is for the box

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        self._search(event.value)

    @work(exclusive=True)
    async def _search(self, text: str) -> None:
        tree = self.query_one(Tree)
        self._not_a_search = ""
        if not text:
            tree.show_found(None)
            return
        found: list[ContentItem] = []
        try:
            for batch in search.find(self.session.items, text):
                found += batch
                await asyncio.sleep(0)
        except re.error as error:
            self._not_a_search = f"not a regular expression: {shown(error)}"
            self._tick()
            return
        except Refused as error:
            self._not_a_search = shown(error)
            self._tick()
            return
        tree.show_found(found)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        if self.query_one(Tree).found is None:
            self._leave_search(None)
        self.set_focus(self.query_one(Tree))

    def on_key(self, event: events.Key) -> None:
        if self.query_one(Input).has_focus and event.key in ("down", "up"):
            event.stop()
            self.set_focus(self.query_one(Tree))

    def _leave_search(self, item: ContentItem | None) -> None:
        self._not_a_search = ""
        box = self.query_one(Input)
        box.display = False
        with box.prevent(Input.Changed):
            box.value = ""
        if item is not None:
            self.query_one(Tree).reveal(item)
        elif self.query_one(Tree).found is not None:
            self.query_one(Tree).show_found(None)
        self.set_focus(self.query_one(Tree))

    def action_back(self) -> None:
        """Stop running jobs, or leave the search, or return to the list."""
        busy = [what for what in RUNNING if what in self.session.jobs]
        tree = self.query_one(Tree)
        if self.query_one(Input).display:
            node = tree.node
            self._leave_search(node.item if tree.found is not None and node is not None else None)
        elif busy:
            self.session.stop(*busy)
            self.notify("stopped", markup=False, timeout=2)
            self._show(top=False)
        elif self.inside:
            self.dismiss()
