"""Matched tensors during a comparison: properties are compared at once, elements by jobs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import field
from operator import attrgetter

from ckptfix.checkpoint import ByteRange, TensorEntry
from ckptfix.dataclass import dataclass
from ckptfix.elements import reader as diff_sources
from ckptfix.elements.comparison import Comparison
from ckptfix.elements.pair_sums import ValueDiff
from ckptfix.errors import Unsupported
from ckptfix.formats.base import Aspect
from ckptfix.io.read import Progress
from ckptfix.io.source import Readers
from ckptfix.io.threads import Workers
from ckptfix.ops.diff import bytes as diff_bytes
from ckptfix.ops.diff.bytes import ElementComparison
from ckptfix.ops.diff.content import class_of, leaves, whole_crc
from ckptfix.ops.diff.result import Compared, Difference, Match, Sharing, TensorChange

COMPARED: frozenset[Aspect] = frozenset({"device", "requires_grad", "parameter", "stride", "detail", "sharing"})
"""Properties that are compared if the formats of both files state them."""


@dataclass(slots=True)
class TensorComparison:
    """Two paired tensors, or parts of such, during their comparison; `owner` numbers the pair."""

    owner: int
    a: TensorEntry
    b: TensorEntry
    match: Match
    differences: tuple[Difference, ...]
    job: ElementComparison | None = None
    reason: str | None = None

    @property
    def values(self) -> ValueDiff | None:
        """Distance between the elements; None if no byte differs, or none was compared."""
        if self.reason is not None:
            return ValueDiff(self.a.numel, 0, reason=self.reason)
        return None if self.job is None else self.job.result

    @property
    def values_differ(self) -> bool:
        values = self.values
        return values is not None and (values.differing > 0 or values.reason is not None)

    @property
    def differs(self) -> bool:
        return bool(self.differences) or self.values_differ

    @property
    def is_close(self) -> bool:
        """True if elements have different bytes but count as equal, and nothing else differs."""
        return self.values is not None and not self.differs

    def change(self) -> TensorChange:
        values = self.values if self.values_differ or self.is_close else None
        return TensorChange(self.a.name, self.b.name, self.match, self.differences, values)

    def compared(self) -> Compared:
        return Compared(self.a, self.b, self.match, self.change() if self.differs or self.is_close else None)


@dataclass(slots=True)
class MatchedTensors:
    """Matched tensors: a row each, and one more for each part; and the jobs that compare their values.

    Attributes:
        byteorders: of the two files.
        rtol, atol: see `Comparison`.
        quick: whether an equal CRC-32 and size suffice.
        unstated: properties that one of the formats does not state.
        codes: address -> description of the tensors of A, and of B, whose elements are codes of quantized weights.
        jobs: keyed by the bytes that they compare, so that tied tensors are compared once.
        trusted: owners of rows whose bytes are not read.
    """

    byteorders: tuple[str, str]
    rtol: float
    atol: float
    quick: bool
    unstated: frozenset[Aspect]
    codes: tuple[Mapping[str, str], Mapping[str, str]] = ({}, {})
    rows: list[TensorComparison] = field(default_factory=list)
    jobs: dict[Hashable, ElementComparison] = field(default_factory=dict)
    trusted: set[int] = field(default_factory=set)
    _comparisons: dict[tuple[str, str, bool], Comparison | None] = field(default_factory=dict)
    _owner: int = 0

    def unequal(self) -> int:
        """Count the tensors that were matched by key and differ."""
        return len({row.owner for row in self.rows if row.differs and row.match != "content"})

    def add_sizes(self, a: TensorEntry, b: TensorEntry, match: Match) -> None:
        """Compare only shape and dtype."""
        self._add_row(a, b, match, sizes(a, b))

    def add_equal(self, a: TensorEntry, b: TensorEntry) -> None:
        """Compare the properties of two tensors whose bytes are known to be equal."""
        self._add_row(a, b, "content", properties(a, b, self.unstated))

    def add(self, a: TensorEntry, b: TensorEntry, match: Match) -> None:
        """Compare the properties of two tensors, and note which of their data to compare."""
        row = self._add_row(a, b, match, properties(a, b, self.unstated))
        parts_a, parts_b = leaves(a), leaves(b)
        if not (a.has_data and b.has_data):
            row.reason = "no data on both sides" if a.has_data == b.has_data else "no data on one side"
            return
        if a.kind != b.kind:
            return
        if len(parts_a) != len(parts_b):
            row.reason = f"made of {len(parts_a)} and of {len(parts_b)} parts"
            return
        for x, y in zip(parts_a, parts_b, strict=True):
            part = row
            if x is not a:
                part = TensorComparison(row.owner, x, y, match, tuple(sizes(x, y)))
                self.rows.append(part)
            if x.shape == y.shape:
                self._add_values(part)

    def _add_row(
        self, a: TensorEntry, b: TensorEntry, match: Match, differences: Iterable[Difference]
    ) -> TensorComparison:
        self._owner += 1
        row = TensorComparison(self._owner, a, b, match, tuple(differences))
        self.rows.append(row)
        return row

    def _add_values(self, row: TensorComparison) -> None:
        a, b = row.a, row.b
        codes = self.codes[0].get(a.name) or self.codes[1].get(b.name)
        comparison = self._comparison(a.dtype, b.dtype, codes=codes is not None)
        if comparison is None:
            row.reason = codes
            return
        if self.quick and comparison.bytewise and whole_crc(a) is not None and whole_crc(a) == whole_crc(b):
            self.trusted.add(row.owner)
            return
        key = (_place(a), _place(b))
        job = self.jobs.get(key)
        if job is None:
            try:
                x, y = (diff_sources.content(one, order) for one, order in zip((a, b), self.byteorders, strict=True))
            except Unsupported as error:
                row.reason = error.message
                return
            count, other = x.nbytes // comparison.a.itemsize, y.nbytes // comparison.b.itemsize
            if count != other:
                row.reason = f"{count} and {other} stored elements"
                return
            spans = diff_sources.spans(a, b) if comparison.bytewise else None
            job = self.jobs[key] = ElementComparison(x, y, count, comparison, spans)
        row.job = job

    def _comparison(self, a: str, b: str, *, codes: bool) -> Comparison | None:
        """Return the comparison of two dtypes; None if values cannot be compared, which the dtypes then show."""
        key = (a, b, codes)
        if key not in self._comparisons:
            self._comparisons[key] = Comparison.of(a, b, self.byteorders, self.rtol, self.atol, codes=codes)
        return self._comparisons[key]

    def run(self, readers: Readers, progress: Progress | None) -> None:
        """Compare the elements.

        Raises:
            Truncated, DamagedFile: a file is shorter than it promises.
        """
        total = sum(job.nbytes for job in self.jobs.values())
        done = 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            if progress is not None:
                progress(done, total)

        jobs = [job for job in self.jobs.values() if job.spans is None]
        views = [job for job in self.jobs.values() if job.spans is not None]

        def spans_equal(job: ElementComparison) -> bool:
            return job.spans is not None and diff_sources.equal_bytes(*job.spans, readers)

        # Views of the same layout are equal if their storages are, without gathering their elements.
        for job, equal in zip(views, Workers().run(spans_equal, views), strict=True):
            if equal:
                advance(job.nbytes)
            else:
                jobs.append(job)
        diff_bytes.compare(jobs, readers, advance)


PROPERTIES: dict[str, Callable[[TensorEntry], object]] = {
    "kind": attrgetter("kind"),
    "shape": attrgetter("shape"),
    "dtype": attrgetter("dtype"),
    "device": attrgetter("location"),
    "requires_grad": attrgetter("requires_grad"),
    "parameter": attrgetter("parameter"),
    "detail": class_of,
}


def properties(a: TensorEntry, b: TensorEntry, unstated: frozenset[Aspect]) -> Iterator[Difference]:
    """Yield the properties in which two tensors differ, without those that one of the formats does not state."""
    for what, read in PROPERTIES.items():
        if read(a) != read(b) and what not in unstated:
            yield Difference(what, read(a), read(b))
    if a.stride != b.stride and a.shape == b.shape and "stride" not in unstated and _steps(a) != _steps(b):
        yield Difference("stride", a.stride, b.stride)


def sizes(a: TensorEntry, b: TensorEntry) -> Iterator[Difference]:
    """Yield shape and dtype, where they differ."""
    for what, x, y in (("shape", a.shape, b.shape), ("dtype", a.dtype, b.dtype)):
        if x != y:
            yield Difference(what, x, y)


def _steps(entry: TensorEntry) -> tuple[int, ...]:
    """Return the stride in the dimensions with more than one element."""
    if not entry.numel:
        return ()
    return tuple(step for size, step in zip(entry.shape, entry.stride, strict=True) if size > 1)


def _place(entry: TensorEntry) -> Hashable:
    """Return a key that is equal for tensors with the same elements of a file."""
    storage = entry.storage
    data = storage.data if storage is not None else None
    place = data if isinstance(data, ByteRange) else id(data)
    return place, entry.dtype, entry.shape, entry.stride, entry.offset, entry.lazy


def sharing(pairs: Iterable[tuple[TensorEntry, TensorEntry]]) -> Iterator[Sharing]:
    """Yield the groups of matched tensors that share one storage on one side but not on the other."""
    known = list(pairs)
    groups_a = _groups(a for a, _ in known)
    groups_b = _groups(b for _, b in known)
    for group in groups_a:
        if group not in groups_b:
            yield Sharing("a", tuple(known[index][0].name for index in sorted(group)))
    for group in groups_b:
        if group not in groups_a:
            yield Sharing("b", tuple(known[index][1].name for index in sorted(group)))


def _groups(entries: Iterable[TensorEntry]) -> dict[frozenset[int], None]:
    """Return the sets of positions whose tensors share a storage, in order."""
    by_storage: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for index, entry in enumerate(entries):
        if entry.storage is not None and entry.numel:
            by_storage[entry.storage.identity].append(index)
    return dict.fromkeys(frozenset(group) for group in by_storage.values() if len(group) > 1)
