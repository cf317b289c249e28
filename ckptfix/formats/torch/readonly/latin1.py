"""Bytes in a pickle of protocol 0 to 2 that Python 3 wrote: text in which each character is one byte.

::

    _codecs.encode(TEXT, 'latin1')      bytes from 128 on take two bytes of the text's UTF-8

Every read decodes the text from its beginning, so the bytes of a tensor are a stream instead of a range.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from dataclasses import replace

from ckptfix.checkpoint import ByteRange, Data, Derived
from ckptfix.errors import BadPickle, DamagedFile
from ckptfix.io.layers import WindowName
from ckptfix.io.read import cut, read_chunks
from ckptfix.io.source import Source
from ckptfix.pickles import Call, Text

_HEADS = {0x58: 5, 0x8C: 2, 0x8D: 9}
"""Opcode that pushes text -> number of bytes before the text."""


def encoded_text(node: object) -> Text | None:
    """Return the text of bytes that are written as text; None for any other node."""
    if type(node) is Call and node.is_call_of("_codecs", "encode") and len(node.arguments) == 2:
        text, encoding = node.arguments
        if type(text) is Text and encoding in ("latin1", "latin-1"):
            return text
    return None


class EncodedPart(WindowName):
    """The name of a virtual file whose bytes are the characters of a text in another file."""

    raw: ByteRange

    @classmethod
    def of(cls, path: str, text: Text, opcode: int) -> EncodedPart:
        """Return the part for the bytes of `text`, which `opcode` pushes.

        Raises:
            BadPickle: a different opcode pushes it, such as those of protocol 0.
        """
        written = text.origin or text
        if opcode not in _HEADS:
            raise BadPickle("the pickle stores bytes as text of protocol 0", path=path, offset=written.start)
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
    """Yield the bytes that the text in `raw` encodes."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for chunk in read_chunks(raw):
            yield decoder.decode(chunk).encode("latin-1")
    except UnicodeError as error:
        raise DamagedFile(f"a text does not encode bytes: {error}", path=raw.path, offset=raw.offset) from None
