"""Two checkpoints side by side: their tensors paired as in `diff`, and compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ckptfix.browse.model.contents import METADATA, ContentItem, Contents, Status, parts_of, placed, read
from ckptfix.checkpoint import Checkpoint, TensorEntry
from ckptfix.dataclass import dataclass
from ckptfix.findings.row import Finding
from ckptfix.formats import format_of, states
from ckptfix.io.read import Progress
from ckptfix.io.source import Readers, shares_open_files
from ckptfix.io.threads import batches
from ckptfix.ops.diff.pairs import At, DiffInput, doubts, match, sides
from ckptfix.ops.diff.plain import compare_values
from ckptfix.ops.diff.result import TensorChange
from ckptfix.ops.diff.tensors import COMPARED, MatchedTensors
from ckptfix.pickles.collector import gc_paused

BATCH = 64 << 20
"""Bytes of one side to compare before the results are shown."""

Told = Callable[[ContentItem, Status, tuple[TensorChange, ...]], None]
"""Called with an item, its status, and its differences."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """Two checkpoints and their pairs.

    Attributes:
        a, b: the checkpoints as `diff` compares them: a module that only one file has becomes its state dict.
        items: leaves of both files, or of one.
        notes: for each file, a finding if the choice of its main state dict is in doubt.
    """

    a: Contents
    b: Contents
    items: Sequence[ContentItem]
    notes: tuple[Finding, ...] = ()

    def refuse_changed(self, *, again: bool = False) -> None:
        """Refuse files that changed since they were read; see `Contents.refuse_changed`."""
        self.a.refuse_changed(again=again)
        self.b.refuse_changed(again=again)


@gc_paused
@shares_open_files()
def read_pairs(path_a: str, path_b: str, at: At = None) -> Pairs:
    """Read the headers of two checkpoints, and pair their tensors by name.

    Raises:
        CkptfixError: one cannot be read, or several state dicts could be the ones to compare.
    """
    a, b = read(path_a), read(path_b)
    notes = tuple(doubts(a.checkpoint, b.checkpoint, at))
    side_a, side_b, _, _ = sides(a.checkpoint, b.checkpoint, at=at, strip=(), filter=None)
    matched, rest_a, rest_b = match(side_a, side_b)
    tensors = _tensors(side_a.checkpoint, side_b.checkpoint)
    partner = {id(pair.a): pair.b for pair in matched}
    left = {id(entry) for entry in rest_a}
    items: list[ContentItem] = []
    for entry in _listed(side_a, matched_a=[pair.a for pair in matched], rest=rest_a):
        other = partner.get(id(entry))
        if other is not None:
            items.append(_pair(entry, other, tensors))
        elif id(entry) in left:
            items.append(ContentItem(entry.name, parts_of(entry.at, entry.key), entry, status="-"))
    items += (ContentItem(entry.name, parts_of(entry.at, entry.key), None, entry, status="+") for entry in rest_b)
    items += _values(side_a, side_b)
    found_a = Contents(side_a.checkpoint, items)
    return Pairs(found_a, Contents(side_b.checkpoint, items), items, notes)


def _listed(side: DiffInput, *, matched_a: Sequence[TensorEntry], rest: Sequence[TensorEntry]) -> list[TensorEntry]:
    """Return the tensors of A in file order; keys that metadata ties to a tensor come last."""
    taken = {id(entry): entry for entry in (*matched_a, *rest)}
    ordered = [taken.pop(id(entry)) for entry in side.checkpoint.entries if id(entry) in taken]
    return [*ordered, *taken.values()]


def _tensors(a: Checkpoint, b: Checkpoint) -> MatchedTensors:
    unstated = COMPARED - (format_of(a).states & format_of(b).states)
    return MatchedTensors((a.byteorder, b.byteorder), 0.0, 0.0, False, unstated)


def _pair(entry: TensorEntry, other: TensorEntry, tensors: MatchedTensors) -> ContentItem:
    tensors.rows.clear()
    tensors.jobs.clear()
    tensors.add(entry, other, "name")
    differs = any(row.differs for row in tensors.rows)
    to_read = any(row.job is not None and row.job.nbytes for row in tensors.rows)
    status: Status = "~" if differs else "?" if to_read else "="
    return ContentItem(entry.name, parts_of(entry.at, entry.key), entry, other, status=status)


def _values(a: DiffInput, b: DiffInput) -> list[ContentItem]:
    """Return the equal values, in the order of A, and then those that differ, as in `diff`."""
    changes, _ = compare_values(a, b, rtol=0.0, atol=0.0)
    mappings = {state.at for side in (a, b) for state in side.checkpoint.state_dicts}
    differing = {change.name_a for change in changes if change.name_a is not None}
    tensors = {entry.name for entry in a.checkpoint.entries}
    items = []
    for name, value in _compared(a, b):
        # Attributes of a tensor in only one file are internal to the library that wrote them; `diff` leaves them out.
        if name not in differing and name.rpartition("/")[0] not in tensors:
            items.append(ContentItem(name, placed(name, mappings), value=value, other_value=value, status="="))
    for change in changes:
        name = change.name_a if change.name_a is not None else change.name_b or ""
        status: Status = "+" if change.name_a is None else "-" if change.name_b is None else "~"
        items.append(ContentItem(name, placed(name, mappings), value=change.a, other_value=change.b, status=status))
    return items


def _compared(a: DiffInput, b: DiffInput) -> Iterator[tuple[str, object]]:
    """Yield the values of A that are compared."""
    yield from ((name, value) for name, value in a.checkpoint.values() if a.place(name) is not None)
    if a.everything and all(states(side.checkpoint, "metadata") for side in (a, b)):
        yield from ((f"{METADATA}/{key}", text) for key, text in a.checkpoint.metadata.items())


@shares_open_files()
def compare(pairs: Pairs, items: Sequence[ContentItem], told: Told, progress: Progress) -> None:
    """Compare the tensors of `items` that have two sides, in bounded memory.

    Args:
        progress: called with bytes done and total bytes; an exception that it raises ends the comparison.

    Raises:
        DamagedFile: a file changed since it was read, or lacks bytes that its headers promise.
    """
    both = [item for item in items if item.entry is not None and item.other is not None]
    total = sum(item.nbytes for item in both)
    done = 0
    pairs.refuse_changed()
    with Readers() as readers:
        for batch in batches(both, lambda item: item.nbytes + 4096, BATCH):
            tensors = _tensors(pairs.a.checkpoint, pairs.b.checkpoint)
            rows = []
            for item in batch:
                before = len(tensors.rows)
                assert item.entry is not None
                assert item.other is not None
                tensors.add(item.entry, item.other, "name")
                rows.append((item, before, len(tensors.rows)))

            def advance(count: int, _: int, before: int = done) -> None:
                progress(before + count, total)

            tensors.run(readers, advance)
            pairs.refuse_changed(again=True)
            for item, first, last in rows:
                own = tensors.rows[first:last]
                status: Status = "~" if any(row.differs for row in own) else "="
                told(item, status, tuple(row.change() for row in own if row.differs or row.is_close))
            done += sum(item.nbytes for item in batch)
            progress(done, total)

