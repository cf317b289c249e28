"""Bytes in a pickle of protocol 0 to 2 that Python 3 wrote: as text, of which each character is one byte.

::

    _codecs.encode(TEXT, 'latin1')      bytes from 128 on take two bytes of the text's UTF-8

What is read of them is decoded from the beginning of the text, so the bytes of a tensor are a stream, and no range.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from dataclasses import replace

from ckptfix.checkpoint import ByteRange, Data, Derived
from ckptfix.errors import BadPickle, DamagedFile
from ckptfix.io.layers import Part
from ckptfix.io.read import cut, read_chunks
from ckptfix.io.source import Source
from ckptfix.pickles import Call, Text

_HEADS = {0x58: 5, 0x8C: 2, 0x8D: 9}
"""Opcode of a text -> the bytes before it."""


def encoded_text(node: object) -> Text | None:
    """The text of bytes that are written as one; None for anything else."""
    if type(node) is Call and node.is_call_of("_codecs", "encode") and len(node.arguments) == 2:
        text, encoding = node.arguments
        if type(text) is Text and encoding in ("latin1", "latin-1"):
            return text
    return None


class EncodedPart(Part):
    """The name of a file whose bytes are the characters of a text of another file."""

    raw: ByteRange

    @classmethod
    def of(cls, path: str, text: Text, opcode: int) -> EncodedPart:
        """The bytes of `text`, which `opcode` pushes from its start on.

        Raises:
            BadPickle: it is pushed by another opcode, as those of protocol 0.
        """
        written = text.origin or text
        if opcode not in _HEADS:
            raise BadPickle("bytes in the text of protocol 0", path=path, offset=written.start)
        start = written.start + _HEADS[opcode]
        part = cls(f"{path} @ {start:#x}", path, start, len(text))
        part.raw = ByteRange(path, start, written.end - start)
        return part

    def opened(self) -> Source:
        return _Characters(self)

    def in_whole(self, data: Data) -> Data:
        if not isinstance(data, ByteRange):
            return replace(data, sources=(self.raw,), blank=b"")
        first, count = data.offset, data.length
        return Derived(count, lambda: cut(_decoded(self.raw), first, count), "bytes of a text", (self.raw,))


class _Characters(Source):
    """The text as a file of its characters."""

    def __init__(self, part: EncodedPart) -> None:
        super().__init__(part, part.length, base=part.offset)
        self.raw = part.raw

    def _read(self, offset: int, length: int) -> bytes:
        end = min(2 * (offset + length), self.raw.length)
        return b"".join(cut(_decoded(self.raw.sub(0, end)), offset, length))


def _decoded(raw: ByteRange) -> Iterator[bytes]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for chunk in read_chunks(raw):
            yield decoder.decode(chunk).encode("latin-1")
    except UnicodeError as error:
        raise DamagedFile(f"a text that is no bytes: {error}", path=raw.path, offset=raw.offset) from None
