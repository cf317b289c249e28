"""The state of the browser for one checkpoint, or two side by side, and the jobs that fill it."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ckptfix.browse.model import jobs, node_findings
from ckptfix.browse.model.contents import ContentItem, Contents, Status, read
from ckptfix.browse.model.jobs import BackgroundJob, Post
from ckptfix.browse.model.node_findings import Marks
from ckptfix.browse.model.shown_commands import OpenCommands
from ckptfix.browse.model.text_drawing import shown
from ckptfix.checkpoint import TensorEntry
from ckptfix.errors import CkptfixError, NoSuchTensor, Refused
from ckptfix.findings.row import Finding
from ckptfix.io.read import Progress
from ckptfix.io.source import is_local

if TYPE_CHECKING:
    from ckptfix.browse.model import pairs
    from ckptfix.browse.model.summary import TensorSummary
    from ckptfix.ops.diff.result import TensorChange
    from ckptfix.ops.inspect.describe import Inspection

Result = TypeVar("Result")

MANY = 20_000
"""Number of leaves from which problems are looked for only on request."""

KEPT = 500
"""Number of tensors whose statistics are kept."""

WATCHED = 64
"""Maximum number of files that are checked for changes regularly."""

RUNNING = {"judge": "looking for problems", "compute": "reading the tensor", "compare": "comparing"}
"""The jobs that can be stopped, and their descriptions."""


class Watcher(Protocol):
    """The callbacks of a session, always called in the thread of the screen."""

    def filled(self, *, keep: bool) -> None:
        """Handle new items; with `keep` they are the same, and more is known about them."""

    def told(self, item: ContentItem | None = None) -> None:
        """Handle new information about one item, or about everything."""

    def warned(self, text: str) -> None:
        """Handle a failure; `text` has no control characters."""


class Session:
    """One checkpoint, or two side by side.

    Args:
        path, other: their names.
        at: addresses of the state dicts to compare.
        watcher: called when something happens.
        post: calls a function in the thread of the screen.

    Attributes:
        contents: contents of the first file; None before it was read.
        pairs: contents of both files; None with one file.
        marks: the findings of `doctor`.
        inspection, facts: description of one file, and the lines that show it.
        notes: findings if the choice of the model is in doubt, for one file or for each of two.
        summaries: id of an entry -> its statistics.
        changes: id of an item -> the differences of its two sides.
        failures: id of an item -> why it could not be read.
        trouble: why the file could not be opened, and what to do.
        stale: the file changed on disk since it was read.
        items: all leaves; only their names while the rest is read.
        counts: number of items per status.
        jobs: the running jobs, by name.
        began: when reading began.
    """

    def __init__(
        self, path: str, other: str | None, at: tuple[str, str] | None, watcher: Watcher, post: Post
    ) -> None:
        self.path = path
        self.other = other
        self.at = at
        self._watcher = watcher
        self._post = post
        self.commands = OpenCommands(path, other, at)
        self.jobs: dict[str, BackgroundJob] = {}
        self._forget()

    def _forget(self) -> None:
        self.contents: Contents | None = None
        self.pairs: pairs.Pairs | None = None
        self.inspection: Inspection | None = None
        self.facts: Sequence[str] = ()
        self.notes: Sequence[Finding] = ()
        self.marks = Marks()
        self.summaries: dict[int, TensorSummary] = {}
        self.changes: dict[int, tuple[TensorChange, ...]] = {}
        self.failures: dict[int, str] = {}
        self.trouble: tuple[str, str] | None = None
        self.stale = False
        self.items: Sequence[ContentItem] = ()
        self.counts: Counter[Status] = Counter()
        self.began = time.monotonic()

    def _start(
        self,
        what: str,
        call: Callable[[Progress], Result],
        done: Callable[[Result], None],
        failed: Callable[[Exception], None] | None = None,
    ) -> None:
        """Run a job under a name, and stop a running job of that name."""
        self.stop(what)

        def ended(then: Callable[[Any], None]) -> Callable[[Any], None]:
            def with_result(result: Any) -> None:
                self.jobs.pop(what, None)
                then(result)

            return with_result

        self.jobs[what] = jobs.start(call, ended(done), ended(failed or self._failed), self._post)

    def stop(self, *names: str) -> None:
        """Stop these jobs."""
        for what in names:
            if what in self.jobs:
                self.jobs.pop(what).stop()

    def _failed(self, error: Exception) -> None:
        self._watcher.warned(shown(jobs.described(error)[0], 300))
        self.look_at_disk()
        self._watcher.told()

    # Reading

    def load(self) -> None:
        """Read the headers, and then everything else that needs no tensor bytes."""
        self.stop(*self.jobs.copy())
        self._forget()
        other = self.other
        if other is None:
            self._start("read", lambda _: read(self.path, self._names_known), self._loaded, self._not_loaded)
        else:

            def call(_: Progress) -> pairs.Pairs:
                from ckptfix.browse.model.pairs import read_pairs

                return read_pairs(self.path, other, self.at)

            self._start("read", call, self._paired, self._not_loaded)

    def _names_known(self, items: list[ContentItem]) -> None:
        self._post(lambda: self._named(items))

    def _named(self, items: list[ContentItem]) -> None:
        if "read" in self.jobs:
            self.items = items
            self._watcher.filled(keep=False)

    def _loaded(self, contents: Contents) -> None:
        _settle(contents.items)
        keep = bool(self.items)
        self.contents = self.commands.contents = contents
        self.items = contents.items
        self._watcher.filled(keep=keep)

        def call(_: Progress) -> tuple[Inspection, list[str], list[Finding]]:
            from ckptfix.ops import choose
            from ckptfix.ops.inspect import describe

            found = describe.inspect(contents.checkpoint)
            return found, describe.summary(found), list(choose.remarks(contents.checkpoint))

        self._start("inspect", call, self._inspected)

    def _inspected(self, found: tuple[Inspection, list[str], list[Finding]]) -> None:
        self.inspection, self.facts, self.notes = found
        self._watcher.told()
        if len(self.items) <= MANY:
            self.judge()

    def _paired(self, found: pairs.Pairs) -> None:
        _settle(found.items)
        self.pairs = found
        self.notes = found.notes
        self.contents = found.a
        self.items = found.items
        self.counts = Counter(item.status for item in found.items)
        self._watcher.filled(keep=False)

    def _not_loaded(self, error: Exception) -> None:
        self.trouble = jobs.described(error)
        path = error.path if isinstance(error, CkptfixError) and error.path is not None else self.path
        self._watcher.told()
        if not isinstance(error, Refused | NoSuchTensor):  # these concern the request, not the file
            self._start("judge", lambda progress: node_findings.of_path(path, progress), self._judged)

    def _judged(self, found: Marks) -> None:
        self.marks = found
        self._watcher.told()

    def judge(self, then: Callable[[], None] | None = None) -> None:
        """Look for problems without reading tensors."""
        contents = self.contents
        if contents is None or self.pairs is not None:
            return

        def judged(found: Marks) -> None:
            self._judged(found)
            if then is not None:
                then()

        self._start("judge", lambda progress: node_findings.of_contents(contents, progress), judged)

    def look_at_disk(self) -> None:
        """Check whether a file changed since it was read; if so, discard what is known about its values."""
        if self.stale or self.contents is None:
            return
        both = (self.contents,) if self.pairs is None else (self.pairs.a, self.pairs.b)
        try:
            for contents in both:
                files = contents.checkpoint.files
                if len(files) <= WATCHED and all(is_local(mark.path) for mark in files):
                    contents.refuse_changed()
        except CkptfixError:
            self.stale = True
            self.summaries.clear()
            self.changes.clear()
            self.stop(*RUNNING)
            self._watcher.told()

    # Computing

    def sides(self, item: ContentItem) -> list[tuple[str, Contents, TensorEntry]]:
        """Return (side, file, tensor) for each file that has the item; the side is A or B, or ``""`` for one file."""
        if self.contents is None:
            return []
        if self.pairs is None:
            return [("", self.contents, item.entry)] if item.entry is not None else []
        rows = (("A", self.pairs.a, item.entry), ("B", self.pairs.b, item.other))
        return [(title, contents, entry) for title, contents, entry in rows if entry is not None]

    def compute_small(self, item: ContentItem) -> None:
        """Compute the statistics of a tensor if it is small enough to read without a request."""
        from ckptfix.browse.model import summary

        if not item.is_value and all(summary.at_once(entry) for _, _, entry in self.sides(item)):
            self.compute(item)

    def compute(self, item: ContentItem) -> None:
        """Compute the statistics of a tensor; with two sides, also compare them."""
        both = self.pairs
        sides = self.sides(item)
        if self.stale or id(item) in self.failures or not sides:
            return
        wanted = [(contents, entry) for _, contents, entry in sides if id(entry) not in self.summaries]
        unknown = item.status == "?" or (item.status == "~" and id(item) not in self.changes)
        to_compare = len(sides) == 2 and unknown
        if not wanted and not to_compare:
            return

        def call(progress: Progress) -> None:
            from ckptfix.browse.model import pairs, summary

            for contents, entry in wanted:
                made = summary.summarise(contents, entry, progress)
                self._post(lambda entry=entry, made=made: self._keep(item, entry, made))  # type: ignore[misc]
            if both is not None and to_compare:
                pairs.compare(both, [item], self._found, progress)

        def failed(error: Exception) -> None:
            self.failures[id(item)] = shown(jobs.described(error)[0], 300)
            self.look_at_disk()
            self._watcher.told(item)

        self._start("compute", call, lambda _: self._watcher.told(item), failed)
        self._watcher.told(item)

    def _keep(self, item: ContentItem, entry: TensorEntry, made: TensorSummary) -> None:
        if self.stale:
            return
        self.summaries[id(entry)] = made
        while len(self.summaries) > KEPT:
            self.summaries.pop(next(iter(self.summaries)))
        self._watcher.told(item)

    def _found(self, item: ContentItem, status: Status, changes: tuple[TensorChange, ...]) -> None:
        self._post(lambda: self._compared(item, status, changes))

    def _compared(self, item: ContentItem, status: Status, changes: tuple[TensorChange, ...]) -> None:
        if self.stale:
            return
        self.counts[item.status] -= 1
        self.counts[status] += 1
        item.status = status
        self.changes[id(item)] = changes
        self._watcher.told(item)

    def compare(self, items: Sequence[ContentItem]) -> None:
        """Compare the values of the `items` that have two sides and were not compared yet."""
        both = self.pairs
        if both is None or self.stale:
            return
        unknown = [item for item in items if item.status == "?"]

        def call(progress: Progress) -> None:
            from ckptfix.browse.model.pairs import compare

            compare(both, unknown, self._found, progress)

        self._start("compare", call, lambda _: self._watcher.told())


def _settle(items: Sequence[ContentItem]) -> None:
    """Exclude millions of long-lived objects from the cyclic garbage collector, which would scan them repeatedly."""
    if len(items) > MANY:
        gc.freeze()
