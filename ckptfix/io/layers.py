"""Layers around a file, and how to remove them: compressed data, and windows of a file or of memory as files.

Data is decompressed only as far as the caller requests, and the caller bounds the amount.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from ckptfix.checkpoint import ByteRange, Data
from ckptfix.errors import MissingExtra, Unsupported
from ckptfix.extras import need_lz4, need_zstd
from ckptfix.io.source import BATCH, Name, Source, open_source

MAX_RATIO = 100
"""The highest compression ratio to accept. Checkpoints shrink a few times, the pickle of a large model 10 to 20 times,
a bomb a thousand times."""

MEMORY = 1 << 28
"""Bytes of memory that the decompressor of an xz or lzma stream can use."""


class Packing(NamedTuple):
    """A compression format: its name, its first bytes, and a factory of its decompressor.

    The factory raises `MissingExtra` if the package that decompresses it is not installed.
    """

    name: str
    magic: bytes
    start: Callable[[], Any]

    def missing(self) -> MissingExtra | None:
        """Return the error about the package that decompresses it; None if there is nothing to install."""
        try:
            self.start()
        except MissingExtra as error:
            return error
        return None


def _bz2() -> Any:
    from bz2 import BZ2Decompressor

    return BZ2Decompressor()


def _xz() -> Any:
    from lzma import LZMADecompressor

    return LZMADecompressor(memlimit=MEMORY)


def _zstd() -> Any:
    # It refuses windows of more than 128 MiB, as the command zstd does without --long.
    return need_zstd("zstd-compressed data").ZstdDecompressor()


def _lz4() -> Any:
    return need_lz4("LZ4-compressed data").LZ4FrameDecompressor()


BZIP2 = Packing("bzip2", b"BZh", _bz2)

PACKINGS = (
    Packing("gzip", b"\x1f\x8b\x08", lambda: zlib.decompressobj(31)),
    BZIP2,
    Packing("xz", b"\xfd7zXZ\0", _xz),
    Packing("zstd", b"\x28\xb5\x2f\xfd", _zstd),
    Packing("LZ4", b"\x04\x22\x4d\x18", _lz4),
)

_ZLIB = tuple(
    Packing("zlib", magic, zlib.decompressobj) for magic in (b"\x78\x9c", b"\x78\x01", b"\x78\xda", b"\x78\x5e")
)
"""Old versions of joblib compressed pickles with zlib. Two bytes prove little: the decompressed data must make sense,
too."""


def faults() -> tuple[type[Exception], ...]:
    """Return the exceptions that the decompressors raise for damaged data."""
    from lzma import LZMAError

    zstd = [getattr(sys.modules.get(name), "ZstdError", None) for name in ("compression.zstd", "backports.zstd")]
    # lz4 raises RuntimeError.
    return zlib.error, LZMAError, OSError, ValueError, EOFError, RuntimeError, *filter(None, zstd)


def packing_of(head: bytes) -> Packing | None:
    """Return the compression of a whole file that begins with `head`; None if it is not compressed."""
    return next((row for row in PACKINGS if head.startswith(row.magic)), None)


def any_packing_of(head: bytes) -> Packing | None:
    """Return the compression like `packing_of`, including zlib streams, which have no magic number."""
    return packing_of(head) or next((row for row in _ZLIB if head.startswith(row.magic)), None)


class Unpacked:
    """The decompressed content of `chunks`, in pieces, up to the first damage.

    Attributes:
        whole: True once everything was read without damage; False before the end is reached.
    """

    def __init__(self, packing: Packing, chunks: Iterable[bytes]) -> None:
        self.packing = packing
        self.chunks = chunks
        self.whole = False

    def __iter__(self) -> Iterator[bytes]:
        stream = self.packing.start()
        for packed in self.chunks:
            while packed or not getattr(stream, "needs_input", True):
                if stream.eof:
                    # Either one more member follows, or bytes that are not a member.
                    if not packed.startswith(self.packing.magic):
                        self.whole = True
                        return
                    stream = self.packing.start()
                try:
                    piece = stream.decompress(packed, BATCH)
                except faults():
                    return
                if piece:
                    yield piece
                packed = stream.unused_data or b"" if stream.eof else getattr(stream, "unconsumed_tail", b"")
                if stream.eof and not packed:
                    break
        self.whole = stream.eof


def lzma_of_zip(head: bytes) -> Any:
    """Return the decompressor of a zip record of method 14.

    Its data begins with `head`: a version, a length, and five bytes of properties.
    """
    import lzma

    first = head[4]
    size = int.from_bytes(head[5:9], "little")
    filters = [{"id": lzma.FILTER_LZMA1, "dict_size": min(size, MEMORY), "lc": first % 9, "lp": first // 9 % 5,
                "pb": first // 45}]  # fmt: skip
    return lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=filters)


class Memory(Source):
    """Bytes in memory, read like a file; `name` is the file that they come from."""

    def __init__(self, data: bytes, name: str) -> None:
        super().__init__(name, len(data))
        self.data = data

    def _read(self, offset: int, length: int) -> bytes:
        return self.data[offset : offset + length]


class WindowSource(Source):
    """A window of `length` bytes from `offset` of a file, read like a file of its own.

    `base` is the position of its first byte in the underlying file or memory.
    """

    def __init__(self, reader: Source, offset: int, length: int) -> None:
        if offset < 0 or length < 0:
            raise Unsupported("the window begins before the file", path=reader.name)
        super().__init__(reader.name, max(0, min(length, reader.size - offset)), base=reader.base + offset)
        self.reader = reader
        self.first = offset
        self.far = reader.far

    def _read(self, offset: int, length: int) -> bytes:
        return self.reader.read(self.first + offset, length)


class WindowName(Name):
    """The name of a file that is `length` bytes at `offset` of the file `whole`."""

    whole: str
    offset: int
    length: int

    def __new__(cls, name: str, whole: str, offset: int, length: int) -> WindowName:
        part = super().__new__(cls, name)
        part.whole = whole
        part.offset = offset
        part.length = length
        return part

    def opened(self) -> Source:
        return _OpenPart(self)

    def in_whole(self, data: Data) -> Data:
        """Return the same bytes as ranges of the file around it, so that a plan copies them from there."""
        if isinstance(data, ByteRange):
            return ByteRange(self.whole, self.offset + data.offset, data.length)
        sources = tuple(ByteRange(self.whole, self.offset + row.offset, row.length) for row in data.sources)
        return replace(data, sources=sources, blank=b"")


class _OpenPart(WindowSource):
    def __init__(self, part: WindowName) -> None:
        super().__init__(open_source(part.whole), part.offset, part.length)
        self.name = part

    def close(self) -> None:
        self.reader.close()
