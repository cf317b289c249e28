"""Sources of the elements of a tensor: files and streams, read in bounded pieces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ckptfix.checkpoint import ByteRange, Data, TensorEntry
from ckptfix.checkpoint.tensors import reach
from ckptfix.elements.comparison import PACKED
from ckptfix.errors import DamagedFile, Unsupported
from ckptfix.io.derived import gathered
from ckptfix.io.elements import Resolve, resolve
from ckptfix.io.read import read_chunks
from ckptfix.io.source import Readers, Source

CHUNK = 1 << 20
"""Bytes of one read and one comparison: the fastest of 128 KiB to 4 MiB, with both files in the page cache."""

OVERLAP = 64
"""How often a view may repeat its storage, beyond a first gigabyte. A file of a few bytes can describe a view of 2**60
elements; an honest one saves only small expanded views.
"""


@dataclass(frozen=True, slots=True)
class Content:
    """The elements of a tensor in row-major order: `nbytes` of `data`, from `start` on.

    `endless` is true for a view that repeats its storage too often to be read through. `values` converts the stored
    bytes to elements, if they are not the elements themselves.
    """

    data: Data
    start: int
    nbytes: int
    endless: bool = False
    values: Resolve | None = None


def content(entry: TensorEntry, byteorder: str) -> Content:
    """Locate the elements of a dense tensor, or of the dense part of a quantized one.

    Args:
        byteorder: of the file.

    Raises:
        Unsupported: the file has no data, or data that cannot be streamed; or torch has no such values.
        DamagedFile: the elements would be outside of the storage.
    """
    storage = entry.storage
    if storage is None or storage.data is None:
        raise Unsupported("the file does not hold its data", where=entry.name)
    if entry.dtype in PACKED:
        return Content(storage.data, 0, storage.nbytes)
    values = resolve(entry, byteorder)
    if entry.is_contiguous:
        nbytes = entry.nbytes
        start = entry.offset * entry.itemsize if nbytes else 0
        if start < 0 or start + nbytes > storage.data.length:
            raise DamagedFile("it reaches outside its storage", where=entry.name)
        return Content(storage.data, start, nbytes, values=values)
    if not isinstance(storage.data, ByteRange):
        raise Unsupported("it is a strided view of a compressed record", where=entry.name)
    view = gathered(storage.data, entry.itemsize, entry.shape, entry.stride, entry.offset)
    return Content(view, 0, entry.nbytes, entry.nbytes > max(OVERLAP * storage.nbytes, 1 << 30), values)


class TensorBytes(Protocol):
    """The bytes of a tensor; `read` is called with rising offsets, or again from the start."""

    def read(self, start: int, count: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class FileSource:
    reader: Source
    offset: int

    def read(self, start: int, count: int) -> bytes:
        return self.reader.read(self.offset + start, count)


class StreamSource:
    """A stream that is read front to back; going back restarts it."""

    def __init__(self, content: Content) -> None:
        self._content = content
        self._restart()

    def _restart(self) -> None:
        self._chunks = iter(read_chunks(self._content.data, CHUNK))
        self._held = b""
        self._skip(self._content.start)
        self._position = 0

    def _skip(self, count: int) -> None:
        while count:
            step = min(count, CHUNK)
            self._take(step)
            count -= step

    def _take(self, count: int) -> bytes:
        pieces = [self._held]
        have = len(self._held)
        while have < count:
            # read_chunks yields as many bytes as the content has, or raises an error.
            piece = next(self._chunks)
            pieces.append(piece)
            have += len(piece)
        joined = b"".join(pieces) if len(pieces) > 1 else self._held
        self._held = joined[count:]
        return joined[:count]

    def read(self, start: int, count: int) -> bytes:
        if start < self._position:
            self._restart()
        self._skip(start - self._position)
        self._position = start + count
        return self._take(count)


@dataclass(frozen=True, slots=True)
class Resolved:
    """A source of bytes that stand for other values; each read must cover whole elements."""

    stored: TensorBytes
    values: Resolve

    def read(self, start: int, count: int) -> bytes:
        return self.values(self.stored.read(start, count))


def source(content: Content, readers: Readers) -> TensorBytes:
    stored: TensorBytes
    if isinstance(content.data, ByteRange):
        stored = FileSource(readers[content.data.path], content.data.offset + content.start)
    else:
        stored = StreamSource(content)
    return stored if content.values is None else Resolved(stored, content.values)


def equal_bytes(a: Content, b: Content, readers: Readers) -> bool:
    """Return whether two contents are equal; nothing is read after the first chunk that differs."""
    if a.nbytes != b.nbytes:
        return False
    x, y = source(a, readers), source(b, readers)
    counts = ((start, min(CHUNK, a.nbytes - start)) for start in range(0, a.nbytes, CHUNK))
    return all(x.read(start, count) == y.read(start, count) for start, count in counts)


def spans(a: TensorEntry, b: TensorEntry) -> tuple[Content, Content] | None:
    """Return the bytes that contain two strided views, if their strides are the same; None otherwise."""
    if a.is_contiguous or a.stride != b.stride or a.lazy != b.lazy:
        return None
    return _span(a), _span(b)


def _span(entry: TensorEntry) -> Content:
    """Return the bytes of the storage from the first to the last element of a view."""
    storage = entry.storage
    assert storage is not None
    assert storage.data is not None
    start, nbytes = entry.offset * entry.itemsize, reach(entry.shape, entry.stride) * entry.itemsize
    if min(start, *entry.stride) < 0 or start + nbytes > storage.data.length:
        raise DamagedFile("it reaches outside its storage", where=entry.name)
    return Content(storage.data, start, nbytes)
