"""The one pass over all bytes: checksums, NaN and Inf, zeros. Several threads read at the speed of the disk."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import field

from ckptfix.checkpoint import ByteRange, Data, TensorEntry, dtypes
from ckptfix.dataclass import dataclass
from ckptfix.elements.arrays import Encoding
from ckptfix.elements.nonfinite import PATTERNS, NonFinite, all_finite
from ckptfix.errors import CkptfixError, Unsupported
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.io.checksums import crc32_joined
from ckptfix.io.crc import checksum
from ckptfix.io.layers import MAX_RATIO
from ckptfix.io.read import Progress, read_blocks, whole_items
from ckptfix.io.source import Block
from ckptfix.io.threads import RangeBlock, Workers, tasks
from ckptfix.words import plural, some

ZERO_TAIL = 4096
"""Least number of zero bytes at the end of a tensor that is reported: a page, the least that a lost write leaves."""

SMALL_ZERO = 4096
"""Least size in bytes at which a tensor of zeros is reported; biases of a new layer are smaller."""

WORTH = 1 << 24
"""Bytes whose reading takes long enough to show progress."""

FEW = 1 << 18
"""Bytes up to which a loop is faster than the import of numpy."""

@dataclass(slots=True)
class CheckedRange:
    """A run of bytes to read, and what is known about it.

    Attributes:
        where: the record, or the tensor.
        data: its bytes.
        crc32: the stated checksum; None where nothing states one.
        dtype: of the elements; ``""`` for bytes that do not belong to a tensor.
        entries: the tensors that are in it.
        apart: the same bytes by file, if `crc32` is combined from the files' checksums. On a mismatch, they show which
            file is damaged.
    """

    where: str
    data: Data
    crc32: int | None = None
    dtype: str = ""
    entries: list[TensorEntry] = field(default_factory=list)
    apart: Sequence[CheckedRange] = ()


@dataclass(slots=True)
class DataSums:
    """The sums of the bytes of a piece, or of a part of it.

    Attributes:
        start: where the part begins in its piece.
        encoding: of the elements; None if NaN and infinities are not counted.
        few: whether finite elements are recognized without numpy.
        last: end of the last byte that is not zero, from the start of the piece.
    """

    start: int = 0
    encoding: Encoding | None = None
    crc: int = 0
    length: int = 0
    odd: NonFinite = field(default_factory=NonFinite)
    last: int = 0
    few: bool = False

    def add(self, block: Block) -> None:
        """Include the following bytes, which begin with an element."""
        self.crc = checksum(block, self.crc)
        if used := _used(block):
            self.last = self.start + self.length + used
            if self.encoding is not None and not (self.few and all_finite(block, self.encoding)):
                self.odd.add_bits(block, self.encoding)
        self.length += len(block)

    def join(self, other: DataSums) -> None:
        """Include the bytes of `other`, which follow these."""
        self.crc = crc32_joined(self.crc, other.crc, other.length)
        self.length += other.length
        self.odd.join(other.odd)
        self.last = max(self.last, other.last)


def scan(
    pieces: Sequence[CheckedRange], byteorder: str = "little", progress: Progress | None = None
) -> Iterator[Finding]:
    """Read every byte of `pieces` and judge it; `progress` is called with the bytes read, and the bytes in all."""
    done, total = 0, sum(piece.data.length for piece in pieces)
    if total < WORTH:
        progress = None
    nan: dict[str, list[tuple[str, int]]] = defaultdict(list)
    infinite: dict[str, list[tuple[str, int]]] = defaultdict(list)
    zeros: list[CheckedRange] = []
    again: list[CheckedRange] = []
    totals: dict[int, DataSums] = {}
    shared = tasks(piece.data for piece in pieces)

    few = total <= FEW and byteorder == sys.byteorder

    def read(task: Sequence[RangeBlock]) -> list[DataSums | CkptfixError]:
        return [_read(pieces[part.number], part, byteorder, few=few) for part in task]

    for task, results in zip(shared, Workers().run(read, shared), strict=True):
        for part, result in zip(task, results, strict=True):
            piece = pieces[part.number]
            done += part.data.length
            if progress is not None:
                progress(done, total)
            if isinstance(result, CkptfixError):
                id = "deflate-bomb" if isinstance(result, Unsupported) else "damaged"
                yield found(id, result.message, where=piece.where, offset=result.offset)
                again += piece.apart
                continue
            if part.number in totals:
                totals[part.number].join(result)
            else:
                totals[part.number] = result
            if part.start + part.data.length < piece.data.length:
                continue
            sums = totals.pop(part.number)
            yield from _judged(piece, sums)
            again += piece.apart if sums.crc != piece.crc32 else ()
            label = _named(piece)
            if sums.odd.nan:
                nan[piece.dtype].append((label, sums.odd.nan))
            if sums.odd.infinite:
                infinite[piece.dtype].append((label, sums.odd.infinite))
            if not sums.last and sums.length >= SMALL_ZERO and piece.entries:
                zeros.append(piece)
    for id, groups in (("nan-values", nan), ("infinite-values", infinite)):
        for dtype, rows in groups.items():
            yield _counted(id, dtype, rows)
    if zeros:
        names = some([_named(piece) for piece in zeros], 5)
        total = sum(piece.data.length for piece in zeros)
        every = len(zeros) == sum(piece.data.length >= SMALL_ZERO for piece in pieces if piece.entries)
        what = f"{plural(len(zeros), 'tensor')} {'is' if len(zeros) == 1 else 'are'} all zeros"
        message = f"{what}, {total:,} bytes: {names}"
        yield found("all-zero", message, where=_named(zeros[0]), severity="warning" if every else "info")
    if again:
        yield from scan(again, byteorder)


def _counted(id: str, dtype: str, rows: Sequence[tuple[str, int]]) -> Finding:
    what = "NaN" if id == "nan-values" else "infinite"
    total = sum(count for _, count in rows)
    names = some([f"{name} ({count:,})" for name, count in rows], 5)
    tensors = plural(len(rows), "tensor")
    return found(id, f"{plural(total, f'{what} value')} of {dtype} in {tensors}: {names}", where=rows[0][0])


def _named(piece: CheckedRange) -> str:
    """Name the tensors of a piece."""
    if not piece.entries:
        return piece.where
    more = len(piece.entries) - 1
    return f"{piece.entries[0].name}{f' and {more} more' if more else ''}"


def _judged(piece: CheckedRange, sums: DataSums) -> Iterator[Finding]:
    """Yield what is wrong with a piece by itself."""
    offset = piece.data.offset if isinstance(piece.data, ByteRange) else None
    if piece.crc32 is not None and sums.crc != piece.crc32:
        whose = f" of {_named(piece)}" if piece.entries else ""
        message = f"the bytes{whose} do not match their CRC-32 ({sums.crc:08x} here, {piece.crc32:08x} stated)"
        yield found("bad-crc", message, where=piece.where, offset=offset)
    tail = sums.length - sums.last
    if not sums.last or tail < ZERO_TAIL or len(piece.entries) != 1:
        return
    entry = piece.entries[0]
    kind = dtypes.by_name(entry.dtype)
    row = kind.nbytes(entry.numel // max(entry.shape[0], 1)) if entry.shape else 0
    start = -(-sums.last // kind.itemsize) * kind.itemsize
    # Rows that pad a vocabulary are zero too, but they begin at the start of a row.
    if row and kind.family in ("float", "complex") and start % row:
        message = f"its last {tail:,} of {sums.length:,} bytes are zero, from the middle of a row on"
        yield found("zero-tail", message, where=entry.name, offset=None if offset is None else offset + sums.last)


def _read(piece: CheckedRange, part: RangeBlock, byteorder: str, *, few: bool) -> DataSums | CkptfixError:
    """Read a part of a piece; `few` if all pieces together have few bytes."""
    data = part.data
    stored = data.length if isinstance(data, ByteRange) else sum(source.length for source in data.sources)
    if data.length > MAX_RATIO * max(stored, 1 << 14):
        return Unsupported(f"{stored:,} bytes claim to unpack to {data.length:,}: not unpacked")
    encoding = Encoding.of(piece.dtype, byteorder) if piece.dtype in PATTERNS else None
    sums = DataSums(part.start, encoding, few=few)
    try:
        for block in whole_items(read_blocks(data), 1 if encoding is None else encoding.dtype.unit):
            sums.add(block)
    except CkptfixError as error:
        return error
    return sums


def _used(block: Block) -> int:
    """Return the bytes up to the last one that is not zero; usually the last byte shows it."""
    if any(block[-1:]):
        return len(block)
    data = bytes(block)
    # Comparing a block of zeros takes a hundredth of the time of stripping it.
    return 0 if data == bytes(len(data)) else len(data.rstrip(b"\0"))
