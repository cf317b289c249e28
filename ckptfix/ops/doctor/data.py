"""The one pass over all bytes: checksums, NaN and Inf, zeros. Several threads read at the speed of the disk.

A NaN or an infinity of an IEEE type is a bit pattern at or above infinity's, with either sign. Two integer maxima over
a chunk therefore show whether it has one, and whether it is all zeros; values are counted only in a chunk that has one.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ckptfix.checkpoint import ByteRange, Data, TensorEntry, dtypes
from ckptfix.errors import CkptfixError, Unsupported
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.io.checksums import crc32_joined
from ckptfix.io.crc import checksum
from ckptfix.io.layers import MAX_RATIO
from ckptfix.io.read import Progress, read_chunks
from ckptfix.io.threads import RangeBlock, Workers, tasks
from ckptfix.words import plural, some

CHUNK = 1 << 20
"""Bytes per read: a multiple of every element size, and small enough for a core's cache."""

ZERO_TAIL = 4096
"""Least number of zero bytes at the end of a tensor that is reported: a page, the least that a lost write leaves."""

SMALL_ZERO = 4096
"""Least size in bytes at which a tensor of zeros is reported; biases of a new layer are smaller."""

WORTH = 1 << 24
"""Bytes whose reading takes long enough to show progress."""

FEW = 1 << 18
"""Bytes up to which a loop is faster than the import of numpy."""

_PATTERNS: Mapping[str, tuple[str, int, int]] = {
    "float64": ("8", 0x7FF0 << 48, 1 << 63),
    "float32": ("4", 0x7F80 << 16, 1 << 31),
    "float16": ("2", 0x7C00, 1 << 15),
    "bfloat16": ("2", 0x7F80, 1 << 15),
    "complex128": ("8", 0x7FF0 << 48, 1 << 63),
    "complex64": ("4", 0x7F80 << 16, 1 << 31),
    "complex32": ("2", 0x7C00, 1 << 15),
    "float8_e5m2": ("1", 0x7C, 1 << 7),
}
"""dtype -> (bytes of a number, bits of infinity, sign bit)."""

Code = Literal["b", "B", "h", "H", "i", "I", "q", "Q"]

_CODES: Mapping[str, tuple[Code, Code]] = {"8": ("q", "Q"), "4": ("i", "I"), "2": ("h", "H"), "1": ("b", "B")}
"""Bytes of a number -> the codes of `memoryview.cast` for signed and for unsigned ones."""


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


class DataSums(NamedTuple):
    """Results of one task: `last` is the end of the last byte that is not zero, from the start of the piece."""

    crc: int
    length: int
    nan: int
    infinite: int
    last: int


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
        return [_read(pieces[part.number], part.data, part.start, byteorder, few=few) for part in task]

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
            before = totals.get(part.number)
            totals[part.number] = result if before is None else _joined(before, result)
            if part.start + part.data.length < piece.data.length:
                continue
            sums = totals.pop(part.number)
            yield from _judged(piece, sums)
            again += piece.apart if sums.crc != piece.crc32 else ()
            label = _named(piece)
            if sums.nan:
                nan[piece.dtype].append((label, sums.nan))
            if sums.infinite:
                infinite[piece.dtype].append((label, sums.infinite))
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


def _joined(one: DataSums, two: DataSums) -> DataSums:
    crc = crc32_joined(one.crc, two.crc, two.length)
    return DataSums(
        crc, one.length + two.length, one.nan + two.nan, one.infinite + two.infinite, max(one.last, two.last)
    )


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


def _read(piece: CheckedRange, data: Data, at: int, byteorder: str, *, few: bool) -> DataSums | CkptfixError:
    """Read `data`, which begins `at` bytes into its piece; `few` if all pieces together have few bytes."""
    crc = length = nan = infinite = last = 0
    pattern = _PATTERNS.get(piece.dtype)
    plain = isinstance(data, ByteRange)
    stored = data.length if isinstance(data, ByteRange) else sum(source.length for source in data.sources)
    if data.length > MAX_RATIO * max(stored, 1 << 14):
        return Unsupported(f"{stored:,} bytes claim to unpack to {data.length:,}: not unpacked")
    rest = b""
    try:
        for chunk in read_chunks(data, CHUNK):
            crc = checksum(chunk, crc)
            if _some(chunk):
                last = at + length + len(chunk.rstrip(b"\0"))
                if pattern is not None:
                    whole = chunk if plain else rest + chunk
                    size = int(pattern[0])
                    cut = len(whole) - len(whole) % size
                    numbers = whole[:cut] if cut < len(whole) else whole
                    odd = (0, 0) if few and _are_finite(numbers, pattern) else _odd(numbers, pattern, byteorder)
                    nan, infinite, rest = nan + odd[0], infinite + odd[1], whole[cut:]
            length += len(chunk)
    except CkptfixError as error:
        return error
    return DataSums(crc, length, nan, infinite, last)


def _some(chunk: bytes) -> bool:
    """Return whether a byte of `chunk` is not zero; usually one of the first bytes shows it."""
    return any(chunk[:64]) or bool(chunk.lstrip(b"\0"))


def _are_finite(chunk: bytes, pattern: tuple[str, int, int]) -> bool:
    """Return whether no element of `chunk`, in the byte order of this machine, is NaN or infinite, without numpy."""
    width, infinity, sign = pattern
    signed, unsigned = _CODES[width]
    view = memoryview(chunk)
    return not chunk or (max(view.cast(signed)) < infinity and max(view.cast(unsigned)) < infinity | sign)


def _odd(chunk: bytes, pattern: tuple[str, int, int], byteorder: str) -> tuple[int, int]:
    """Count the (NaN, infinite) elements of `chunk`."""
    import numpy

    width, infinity, sign = pattern
    if not chunk:
        return 0, 0
    order = ">" if byteorder == "big" else "<"
    bits = numpy.frombuffer(chunk, f"{order}u{width}")
    signed = bits.view(f"{order}i{width}")
    if int(signed.max()) < infinity and int(bits.max()) < infinity | sign:
        return 0, 0
    magnitude = bits & ~numpy.array(sign, bits.dtype)
    infinite = int(numpy.count_nonzero(magnitude == infinity))
    return int(numpy.count_nonzero(magnitude > infinity)), infinite
