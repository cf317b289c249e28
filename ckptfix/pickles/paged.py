"""Reading of a pickle in place: by pages, and without the byte strings that hold file data.

`machine.parse` reads a pickle from memory. Here the stream is read as the machine advances, and a byte string that the
caller wants to leave in the file becomes an `UnreadBytes`: only its first bytes are read. joblib puts the bytes of an
array after the opcode that creates the array, where only its own unpickler expects them. A caller reports such bytes
with `RawData`.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from typing import Any, cast, final

from ckptfix.errors import Unsupported
from ckptfix.pickles import opcodes as op
from ckptfix.pickles.machine import MAX_BYTES, Machine, RawData, finish
from ckptfix.pickles.names import Read
from ckptfix.pickles.parsed import Graph

PAGE = 1 << 14
"""Length of a page in bytes: between two strings that stay in the file are a few hundred bytes of a tensor's call."""

HEAD = 64
"""Number of first bytes that decide whether a string stays in the file."""


@final
class UnreadBytes:
    """A byte string that was not read: `length` bytes at `offset` of the stream."""

    __slots__ = ("length", "offset")

    def __init__(self, offset: int, length: int) -> None:
        self.offset = offset
        self.length = length


class Pages:
    """The stream as the machine indexes it, with one page in memory; `left` is the budget in bytes for long strings."""

    def __init__(self, read: Read, start: int, size: int) -> None:
        self._read = read
        self._size = size
        self._first = start
        self._page = b""
        self.left = MAX_BYTES

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, key: Any) -> Any:
        if type(key) is int:
            here = key - self._first
            if 0 <= here < len(self._page):
                return self._page[here]
            if not 0 <= key < self._size:
                raise IndexError("the offset is after the end of the stream")
            self._turn(key)
            return self._page[0]
        start, stop, _ = key.indices(self._size)
        here = start - self._first
        if 0 <= here and stop - self._first <= len(self._page):
            return self._page[here : stop - self._first]
        if stop - start > PAGE:
            self.left -= stop - start
            if self.left < 0:
                raise Unsupported(f"the pickle has over {MAX_BYTES} bytes of values that are not tensors")
            return self._read(start, stop - start)
        if stop <= start:
            return b""
        self._turn(start)
        return self._page[: stop - start]

    def _turn(self, offset: int) -> None:
        """Read the page that begins at `offset`."""
        self._first = offset
        self._page = self._read(offset, min(PAGE, self._size - offset))

    def index(self, sub: bytes, start: int, stop: int | None = None) -> int:
        """Return the offset of `sub`, a single byte, like ``bytes.index``."""
        end = self._size if stop is None else min(stop, self._size)
        at = start
        while at < end:
            piece = self[at : min(at + PAGE, end)]
            found = piece.find(sub)
            if found >= 0:
                return at + int(found)
            at += len(piece)
        raise ValueError("there is no such byte before the end of the stream")


class _PagedMachine(Machine):
    """The machine over pages. `stays` decides by its first bytes whether a byte string stays in the file; None: all."""

    u32 = staticmethod(lambda data, offset: (int.from_bytes(data[offset : offset + 4], "little"),))

    def __init__(self, graph: Graph, stays: Callable[[bytes], bool] | None, raw: RawData | None) -> None:
        super().__init__(graph)
        self.stays = stays
        self.raw = raw

    def rare(self, code: int, pos: int) -> int:
        data = self.graph.data
        self.at = pos
        if code == op.BINFLOAT:
            # The base class unpacks it from a buffer, and pages are not one.
            self.stack.append(struct.unpack(">d", data[pos + 1 : pos + 9])[0])
            return pos + 9
        if (width := _BYTES.get(code)) is not None:
            first = pos + 1 + width
            count = int.from_bytes(data[pos + 1 : first], "little")
            stays = self.stays is None or (count > HEAD and self.stays(data[first : first + HEAD]))
            if stays and first + count <= len(data):
                self.stack.append(cast(Any, UnreadBytes(first, count)))
                return first + count
        if code == op.BYTEARRAY8 and self.stays is None:
            count = int.from_bytes(data[pos + 1 : pos + 9], "little")
            if pos + 9 + count <= len(data):
                self.stack.append(cast(Any, UnreadBytes(pos + 9, count)))
                return pos + 9 + count
        return super().rare(code, pos)


_BYTES = {code: op.COUNTED[code] for code in (
    *(op.SHORT_BINBYTES, op.BINBYTES, op.BINBYTES8, op.SHORT_BINSTRING, op.BINSTRING),
)}  # fmt: skip
"""Width in bytes of the count, for each opcode that pushes bytes of a file."""


def parse_paged(
    read: Read,
    size: int,
    *,
    start: int = 0,
    stays: Callable[[bytes], bool] | None,
    raw: RawData | None = None,
    path: str | os.PathLike[str] | None = None,
    where: str | None = None,
) -> Graph:
    """Read the pickle that begins at `start` of a stream of `size` bytes; spans are offsets in the stream.

    Frames are not checked, because the pickle will not be edited.

    Args:
        stays: decides from the first bytes of a byte string whether it becomes a `UnreadBytes`; None for all byte
            strings, a str of Python 2 and a bytearray too.
        raw: reports bytes that follow an object and are not opcodes.
        path, where: for errors.

    Raises:
        BadPickle: as `parse`.
        Unsupported: the other values have more bytes than are kept in memory.
    """
    graph = Graph(cast(bytes, Pages(read, start, size)), start)
    return finish(_PagedMachine(graph, stays, raw), path=path, where=where, framed=False)

