"""The statistics and the histogram of one tensor, read once in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ckptfix.browse.model.contents import Contents
from ckptfix.checkpoint import ByteRange, TensorEntry
from ckptfix.dataclass import dataclass
from ckptfix.elements.histogram import Histogram
from ckptfix.elements.moments import ElementMoments
from ckptfix.elements.reader import ENDLESS, content, reduced
from ckptfix.errors import CkptfixError
from ckptfix.io.read import Progress
from ckptfix.io.source import is_local, shares_open_files
from ckptfix.ops.quantized import no_numbers

if TYPE_CHECKING:
    from ckptfix.elements.arrays import Elements

AT_ONCE = 64 << 20
"""Maximum bytes of a local tensor that is read without a request: a tenth of a second or two."""

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
    reason = no_numbers(contents.checkpoint, entry)
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
        return TensorSummary(reason=ENDLESS)
    progress(0, whole.nbytes)
    made = reduced({"": whole}, _Summary, progress)[""]
    contents.refuse_changed(again=True)
    return TensorSummary(made.moments, made.histogram)


class _Summary:
    """The statistics and the histogram of some elements."""

    def __init__(self) -> None:
        self.moments, self.histogram = ElementMoments(), Histogram()

    def add(self, block: Elements) -> None:
        self.moments.add(block)
        self.histogram.add(block)

    @classmethod
    def each(cls, block: Elements, count: int) -> Iterator[_Summary]:
        for number, moments in enumerate(ElementMoments.each(block, count)):
            made = cls()
            made.moments = moments
            made.histogram.add(block[number * count :][:count])
            yield made

    def join(self, other: _Summary) -> None:
        self.moments.join(other.moments)
        self.histogram.join(other.histogram)
