"""The statistics and the histogram of one tensor, read once in bounded memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from ckptfix.browse.model.contents import Contents
from ckptfix.checkpoint import ByteRange, TensorEntry, dtypes
from ckptfix.checkpoint.dtypes import Dtype
from ckptfix.elements.arrays import decoded
from ckptfix.elements.histogram import Histogram
from ckptfix.elements.moments import ElementMoments, moments
from ckptfix.elements.reader import Content, content
from ckptfix.errors import CkptfixError
from ckptfix.io.read import Progress
from ckptfix.io.source import Readers, is_local, shares_open_files
from ckptfix.io.threads import TASK, Workers
from ckptfix.ops.diff.content import chunks_of
from ckptfix.ops.stats import why_no_numbers

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Elements: TypeAlias = NDArray[Any]

AT_ONCE = 64 << 20
"""Maximum bytes of a local tensor that is read without a request: a tenth of a second or two."""

STEP = 1 << 15
"""Elements that are counted together: as float64, they fit in a core's cache."""

AT_ONCE_REMOTE = 1 << 20
"""Maximum bytes of a remote tensor that is read without a request."""

@dataclass(frozen=True, slots=True)
class TensorSummary:
    """The statistics of a tensor; `reason` says why they are missing."""

    moments: ElementMoments | None = None
    histogram: Histogram | None = None
    reason: str | None = None


def at_once(entry: TensorEntry) -> bool:
    """Return whether a tensor is small enough that selecting it computes its statistics."""
    data = entry.storage.data if entry.storage is not None else None
    remote = isinstance(data, ByteRange) and not is_local(data.path)
    return entry.nbytes <= (AT_ONCE_REMOTE if remote else AT_ONCE)


@shares_open_files()
def summarise(contents: Contents, entry: TensorEntry, progress: Progress) -> TensorSummary:
    """Read a whole tensor and compute its statistics.

    Args:
        progress: called with bytes done and total bytes; an exception that it raises ends the reading.

    Raises:
        DamagedFile: the file changed since it was opened, or lacks bytes that its headers promise.
    """
    reason = why_no_numbers(entry)
    if reason is not None:
        return TensorSummary(reason=reason)
    if entry.storage is None or entry.storage.data is None:
        return TensorSummary(reason="the file does not hold its data")
    contents.refuse_changed()
    try:
        whole = content(entry, contents.checkpoint.byteorder)
    except CkptfixError as error:
        return TensorSummary(reason=error.message)
    if whole.endless:
        return TensorSummary(reason="a view that repeats its storage too often to be read through")
    dtype = dtypes.by_name(entry.dtype)
    found, histogram = ElementMoments(), Histogram()
    done = 0
    progress(0, whole.nbytes)
    with Readers() as readers:
        swap = contents.checkpoint.byteorder != sys.byteorder and dtype.itemsize > 1
        call = partial(_of_piece, readers, dtype, swap)
        for made, bins, nbytes in _results(call, whole, progress):
            found.add(made)
            histogram.join(bins)
            done += nbytes
            progress(done, whole.nbytes)
    contents.refuse_changed(again=True)
    return TensorSummary(found, histogram)


def _results(call: Any, whole: Content, progress: Progress) -> Iterator[tuple[ElementMoments, Histogram, int]]:
    """Yield the results for each part of a tensor; a byte range is split among threads."""
    if isinstance(whole.data, ByteRange):
        starts = range(0, whole.nbytes, TASK)
        pieces = (replace(whole, start=whole.start + at, nbytes=min(TASK, whole.nbytes - at)) for at in starts)
        for rows in Workers().run(lambda piece: list(call(piece)), pieces):
            yield from rows
    else:
        yield from call(whole)


def _of_piece(
    readers: Readers, dtype: Dtype, swap: bool, piece: Content
) -> Iterator[tuple[ElementMoments, Histogram, int]]:
    for chunk in chunks_of(piece, None, readers):
        yield moments(chunk, dtype, swap), _histogram(chunk, dtype, swap), len(chunk)


def _histogram(chunk: bytes, dtype: Dtype, swap: bool) -> Histogram:
    """Count the finite elements; for complex ones, their absolute values."""
    import numpy

    made = Histogram()
    view = memoryview(chunk)
    with numpy.errstate(all="ignore"):
        for start in range(0, len(chunk), STEP * dtype.itemsize):
            block: Elements = decoded(view[start : start + STEP * dtype.itemsize], dtype, swap)
            if dtype.family == "complex":
                block = numpy.abs(block)
            wide = block.astype(numpy.float64)
            if dtype.family in ("float", "complex") and not numpy.isfinite(wide.sum()):
                wide = wide[numpy.isfinite(wide)]
            made.add(wide)
    return made
