"""The one reader of elements: it locates those of a tensor, and reads them in bounded memory, on several cores.

`content` says where the elements are. `Content.chunks` yields their bytes and `Content.blocks` their values. `reduced`
and `read_each` read many tensors: long ones are shared out among the cores, short ones are read together.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

from ckptfix.checkpoint import ByteRange, Data, TensorEntry, dtypes, same_place
from ckptfix.checkpoint.tensors import reach
from ckptfix.dataclass import dataclass
from ckptfix.elements.arrays import BLOCK, Encoding
from ckptfix.errors import DamagedFile, Unsupported
from ckptfix.io.derived import gathered
from ckptfix.io.elements import Resolve, resolve, why_unresolved
from ckptfix.io.read import Progress, read_chunks, whole_items
from ckptfix.io.source import Block, Readers, Source
from ckptfix.io.threads import OVERHEAD, TASK, Workers, batches

if TYPE_CHECKING:
    from ckptfix.elements.arrays import Elements

CHUNK = 1 << 20
"""Bytes of one read and one comparison: the fastest of 128 KiB to 4 MiB, with both files in the page cache."""

STRETCH = 1 << 19
"""Elements that are read together, and reduced by calls of numpy for all their blocks at once.

Between two calls, a thread waits for the interpreter if another one has it. With calls for each `BLOCK`, two threads
together are slower than one.
"""

PART = 256 << 10
"""Bytes of elements that are reduced by themselves, and then joined to those before them."""

OVERLAP = 64
"""How often a view may repeat its storage, beyond a first gigabyte. A file of a few bytes can describe a view of 2**60
elements; an honest one saves only small expanded views.
"""


ENDLESS = "the view repeats its storage too often to be read"


@dataclass(frozen=True, slots=True)
class Content:
    """The elements of a tensor in row-major order: `nbytes` of `data`, from `start` on.

    Attributes:
        encoding: the form of the elements.
        endless: whether it is a view that repeats its storage too often to be read through.
        values: converts the stored bytes to elements, if they are not the elements themselves.
    """

    data: Data
    start: int
    nbytes: int
    encoding: Encoding
    endless: bool = False
    values: Resolve | None = None

    def chunks(self, readers: Readers, limit: int | None = None) -> Iterator[bytes]:
        """Yield the bytes of the elements, at most the first `limit`, in pieces of `CHUNK` bytes."""
        nbytes = self.nbytes if limit is None else min(limit, self.nbytes)
        bytes_of = source(self, readers)
        for start in range(0, nbytes, CHUNK):
            yield bytes_of.read(start, min(CHUNK, nbytes - start))

    def blocks_of_bytes(self, readers: Readers, size: int = 0) -> Iterator[Block]:
        """Yield the bytes of whole elements in blocks for use at once: the next one may overwrite a block.

        Args:
            size: bytes of a block that is read from a local file, as for `Source.blocks`.
        """
        if not isinstance(self.data, ByteRange):
            yield from self.chunks(readers)
            return
        stored = readers[self.data.path].blocks(self.data.offset + self.start, self.nbytes, size)
        whole = whole_items(stored, self.encoding.itemsize)
        yield from whole if self.values is None else map(self.values, whole)

    def blocks(self, readers: Readers, count: int = BLOCK) -> Iterator[Elements]:
        """Yield the elements, decoded, in blocks of `count`; only the last one may be shorter.

        Raises:
            Unsupported: the view repeats its storage too often to be read.
        """
        if self.endless:
            raise Unsupported(ENDLESS)
        bytes_of, step = source(self, readers), count * self.encoding.itemsize
        for start in range(0, self.nbytes, step):
            yield self.encoding.decoded(bytes_of.read(start, min(step, self.nbytes - start)))

    def split(self, step: int) -> Iterator[Content]:
        """Yield parts of about `step` bytes; a stream, which is read from its front, is one part."""
        if not isinstance(self.data, ByteRange):
            yield self
            return
        for at in range(0, max(self.nbytes, 1), step):
            yield replace(self, start=self.start + at, nbytes=min(step, self.nbytes - at))


def tensor_id(entry: TensorEntry) -> object:
    """Return a value that is equal for all keys of one tensor, which is read once."""
    return same_place(entry) or (entry.at, entry.key)


def why_no_numbers(entry: TensorEntry) -> str | None:
    """Return why a tensor has no numbers to compute with; None if it has."""
    if entry.kind != "dense":
        return f"a {entry.kind} tensor"
    row = dtypes.find(entry.dtype)
    if row is None or row.numpy is None or row.family not in ("float", "int", "bool", "complex"):
        return f"{entry.dtype} has no arithmetic"
    return why_unresolved(entry)


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
    encoding = Encoding.of(entry.dtype, byteorder)
    if encoding.dtype.per_item > 1:  # several elements share a byte, so the storage is read whole
        return Content(storage.data, 0, storage.nbytes, encoding)
    values = resolve(entry, byteorder)
    if entry.is_contiguous:
        nbytes = entry.nbytes
        start = entry.offset * entry.itemsize if nbytes else 0
        if start < 0 or start + nbytes > storage.data.length:
            raise DamagedFile("it reaches outside its storage", where=entry.name)
        return Content(storage.data, start, nbytes, encoding, values=values)
    if not isinstance(storage.data, ByteRange):
        raise Unsupported("it is a strided view of a compressed record", where=entry.name)
    view = gathered(storage.data, entry.itemsize, entry.shape, entry.stride, entry.offset)
    endless = entry.nbytes > max(OVERLAP * storage.nbytes, 1 << 30)
    return Content(view, 0, entry.nbytes, encoding, endless, values)


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
    # These bytes are compared and not decoded, so their order does not matter.
    return Content(storage.data, start, nbytes, Encoding.of(entry.dtype, sys.byteorder))


class Reducer(Protocol):
    """A computation over elements, block by block; the results of parts can be joined."""

    def add(self, block: Elements, /) -> None:
        """Include the elements of `block`; numpy's warnings are off."""

    def join(self, other: Self, /) -> None:
        """Include the elements that `other` includes."""

    @classmethod
    def each(cls, block: Elements, count: int, /) -> Iterable[Self]:
        """Return what is computed of each `count` elements of `block`; the last ones may be fewer."""


Reduced = TypeVar("Reduced", bound=Reducer)
Key = TypeVar("Key")
Item = TypeVar("Item")
Result = TypeVar("Result")


def reduce(
    place: Content, new: Callable[[], Reduced], readers: Readers, advance: Callable[[int], None] | None = None
) -> Reduced:
    """Read the elements at `place` once; `advance` is called with the bytes of each block.

    Every block is reduced by itself and then joined to those before it, so that sums lose fewer digits.

    Raises:
        Unsupported: the view repeats its storage too often to be read.
    """
    import numpy

    if place.endless:
        raise Unsupported(ENDLESS)
    whole, encoding = new(), place.encoding
    count = min(BLOCK, PART // encoding.itemsize)
    several = PART // (count * encoding.itemsize)
    with numpy.errstate(all="ignore"):
        for data in place.blocks_of_bytes(readers, STRETCH * min(encoding.itemsize, 4)):
            parts = iter(whole.each(encoding.decoded(data), count))
            for part in parts:
                for other in islice(parts, several - 1):
                    part.join(other)
                whole.join(part)
            if advance is not None:
                advance(len(data))
    return whole


def reduced(
    places: Mapping[Key, Content], new: Callable[[], Reduced], progress: Progress | None = None
) -> dict[Key, Reduced]:
    """Read the elements at several places once, on all cores, and return what `new` computes of each.

    Views that repeat their storage too often to be read have no result.

    Args:
        progress: called with bytes done and total bytes; an exception that it raises ends the reading.
    """
    found: dict[Key, Reduced] = {}
    places = {key: place for key, place in places.items() if not place.endless}
    total = sum(place.nbytes for place in places.values())
    if len(places) == 1 and progress is not None:
        ((key, place),) = places.items()
        if not isinstance(place.data, ByteRange):  # one task, which would report nothing before its end
            return {key: _reported(place, new, progress)}
    pieces = ((key, piece) for key, place in places.items() for piece in place.split(TASK))

    def read(row: tuple[Key, Content], readers: Readers) -> tuple[Key, Reduced]:
        return row[0], reduce(row[1], new, readers)

    for key, part in read_each(pieces, read, lambda row: row[1].nbytes, progress, total):
        found.setdefault(key, new()).join(part)
    return found


def _reported(place: Content, new: Callable[[], Reduced], progress: Progress) -> Reduced:
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress(done, place.nbytes)

    with Readers() as readers:
        return reduce(place, new, readers, advance)


def read_each(
    items: Iterable[Item],
    read: Callable[[Item, Readers], Result],
    nbytes: Callable[[Item], int],
    progress: Progress | None = None,
    total: int = 0,
) -> Iterator[Result]:
    """Yield ``read(item, readers)`` for every item, in order: several threads read ahead, small items together.

    Args:
        nbytes: the bytes that an item reads.
        progress: called with bytes done and `total`, after the results of these bytes.
    """
    done = 0
    with Readers() as readers:
        call = partial(_all_of, read, nbytes, readers)
        for results, count in Workers().run(call, batches(items, lambda item: nbytes(item) + OVERHEAD, TASK)):
            yield from results
            done += count
            if progress is not None:
                progress(done, total)


def _all_of(
    read: Callable[[Item, Readers], Result], nbytes: Callable[[Item], int], readers: Readers, task: list[Item]
) -> tuple[list[Result], int]:
    return [read(item, readers) for item in task], sum(map(nbytes, task))
