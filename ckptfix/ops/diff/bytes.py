"""Comparison of the bytes of two tensors, in chunks, on every core.

Equal bytes are the common case, and a fast one: chunks are compared as bytes, and elements are decoded only from the
first chunk that differs. The equal chunks before it are then read again, on one side, for the norms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import field

from ckptfix.checkpoint import ByteRange
from ckptfix.dataclass import dataclass
from ckptfix.elements.comparison import Comparison
from ckptfix.elements.pair_sums import PairSums, ValueDiff
from ckptfix.elements.reader import CHUNK, ENDLESS, Content, source
from ckptfix.io.source import Readers
from ckptfix.io.threads import Flag, Workers, batches

PIECE = 32 << 20
"""Bytes of a task: some 10 ms of work, so that all cores finish together and progress moves."""

OVERHEAD = 16 << 10
"""Overhead of a small tensor, as the number of bytes that are compared in the same time."""

Range = tuple[int, int]


@dataclass(slots=True)
class ElementComparison:
    """Two tensors whose elements are compared, and what is known about them so far.

    Attributes:
        spans: the bytes between the first and last element, for strided views of the same layout; equal spans mean
            equal elements.
        equal: ranges of elements that are equal and not yet in any sum.
        identical: no byte differs.
        result: the differences; None if no value differs.
    """

    a: Content
    b: Content
    elements: int
    comparison: Comparison
    spans: tuple[Content, Content] | None = None
    sums: PairSums = field(default_factory=PairSums)
    equal: list[Range] = field(default_factory=list)
    identical: bool = True
    result: ValueDiff | None = None

    @property
    def nbytes(self) -> int:
        return self.a.nbytes

    @property
    def seekable(self) -> bool:
        return isinstance(self.a.data, ByteRange) and isinstance(self.b.data, ByteRange)


@dataclass(frozen=True, slots=True)
class ElementRange:
    """The elements `start` to `end` of a job."""

    job: ElementComparison
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return (self.end - self.start) * self.job.comparison.a.itemsize


def _pieces(jobs: Iterable[ElementComparison]) -> Iterator[ElementRange]:
    """Yield parts of about `PIECE` bytes of long tensors, and short ones whole."""
    for job in jobs:
        step = PIECE // job.comparison.a.itemsize if job.seekable else max(1, job.elements)
        for start in range(0, job.elements, step):
            yield ElementRange(job, start, min(start + step, job.elements))


Found = tuple[ElementRange, PairSums | None, list[Range]]


def compare(jobs: Sequence[ElementComparison], readers: Readers, progress: Callable[[int], None]) -> None:
    """Compare the tensors of all `jobs` and set their results; `progress` is called with the bytes newly compared.

    Raises:
        Truncated, DamagedFile: a file is shorter than it promises.
    """
    workers = Workers()
    for job in jobs:
        if job.a.endless or job.b.endless:
            job.result = ValueDiff(job.elements, 0, reason=ENDLESS)

    def compare_all(pieces: list[ElementRange]) -> list[Found]:
        return [_compare(piece, readers, workers.stopped) for piece in pieces]

    readable = [job for job in jobs if job.result is None]
    tasks = batches(_pieces(readable), lambda piece: piece.nbytes + OVERHEAD, PIECE)
    for batch in workers.run(compare_all, tasks):
        for piece, sums, equal in batch:
            job = piece.job
            if sums is not None:
                job.sums = job.sums.added(sums)
                job.identical = False
            job.equal.extend(equal)
            progress(piece.nbytes)
    differing = [job for job in readable if not job.identical]
    summable = [job for job in differing if job.sums.differing and job.comparison.arithmetic != "bits"]
    for job, sums in workers.run(lambda part: _norms(part, readers, workers.stopped), _equal_parts(summable)):
        job.sums = job.sums.added(sums)
    for job in differing:
        job.result = job.sums.result(job.elements)


def _compare(piece: ElementRange, readers: Readers, stopped: Flag) -> Found:
    """Return the sums from the first chunk of `piece` that differs, if any; and the ranges that are equal."""
    job, comparison = piece.job, piece.job.comparison
    a, b = source(job.a, readers), source(job.b, readers)
    size_a, size_b = comparison.a.itemsize, comparison.b.itemsize
    step = CHUNK // max(size_a, size_b)
    sums: PairSums | None = None
    equal: list[Range] = []
    for start in range(piece.start, piece.end, step):
        if stopped.is_set():
            break
        count = min(step, piece.end - start)
        x, y = a.read(start * size_a, count * size_a), b.read(start * size_b, count * size_b)
        if comparison.bytewise and x == y:
            if sums is not None:
                comparison.add_equal(x, sums)
            elif equal:
                equal[-1] = (equal[-1][0], start + count)
            else:
                equal.append((start, start + count))
        else:
            if sums is None:
                sums = PairSums()
            comparison.add(x, y, sums)
    return piece, sums, equal


def _equal_parts(jobs: Iterable[ElementComparison]) -> Iterator[tuple[ElementComparison, list[Range]]]:
    """Yield the equal ranges of each job: one task each, or one for all ranges of a stream."""
    for job in jobs:
        if job.seekable:
            yield from ((job, [part]) for part in job.equal)
        elif job.equal:
            yield job, job.equal


def _norms(
    part: tuple[ElementComparison, list[Range]], readers: Readers, stopped: Flag
) -> tuple[ElementComparison, PairSums]:
    job, ranges = part
    a, size = source(job.a, readers), job.comparison.a.itemsize
    step = CHUNK // size
    sums = PairSums()
    for first, end in ranges:
        for start in range(first, end, step):
            if stopped.is_set():
                break
            job.comparison.add_equal(a.read(start * size, min(step, end - start) * size), sums)
    return job, sums
