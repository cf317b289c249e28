"""The wire format of Protocol Buffers: fields by number, as in protobuf.dev/programming-guides/encoding.

The library protobuf reads whole messages into memory, and needs classes made for each message. A model's data is one
field among thousands, which stays in the file here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ckptfix.checkpoint import ByteRange
from ckptfix.errors import DamagedFile
from ckptfix.formats.arrays.cursor import Cursor
from ckptfix.io.source import Source

MOST_TEXT = 1 << 16
"""The limit in bytes of a name or another short text."""


class MessageField(NamedTuple):
    """A field of a message.

    Attributes:
        number: in the definition of the message.
        value: a number as it is stored, unsigned; or the place of bytes: a text, a message or packed numbers.
        packed: bytes of each number in `value` if it is stored as 4 or 8 bytes; 0 for a varint or bytes.
    """

    number: int
    value: int | ByteRange
    packed: int = 0


def fields(source: Source, place: ByteRange) -> Iterator[MessageField]:
    """Yield the fields of the message at `place`, in the order of the file.

    Raises:
        DamagedFile: the bytes are not a message.
        Truncated: a field ends beyond the message.
    """
    cursor = Cursor(source, place.offset, place.end)
    while cursor.at < place.end:
        at = cursor.at
        tag = varint(cursor)
        number, wire = tag >> 3, tag & 7
        if not number:
            raise DamagedFile("a field has no number", path=source.name, offset=at)
        if wire == 0:
            yield MessageField(number, varint(cursor))
        elif wire == 2:
            yield MessageField(number, cursor.skip(varint(cursor)))
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
            yield MessageField(number, cursor.skip(size), size)
        else:
            raise DamagedFile(f"a field has the unknown wire type {wire}", path=source.name, offset=at)


def varint(cursor: Cursor) -> int:
    """Read a number of up to 64 bits, seven in a byte, the lowest first."""
    at = cursor.at
    made = 0
    for shift in range(0, 70, 7):
        byte = cursor.take(1)[0]
        made |= (byte & 0x7F) << shift
        if byte < 0x80:
            return made & (1 << 64) - 1
    raise DamagedFile("a number has more than ten bytes", path=cursor.source.name, offset=at)


def varints(data: bytes) -> list[int]:
    """Return packed varints, as signed numbers of 64 bits.

    Raises:
        DamagedFile: the last one is incomplete.
    """
    made: list[int] = []
    number = shift = 0
    for byte in data:
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            number &= (1 << 64) - 1
            made.append(number - (number >> 63 << 64))
            number = shift = 0
        elif shift > 63:
            raise DamagedFile("a number has more than ten bytes")
    if shift:
        raise DamagedFile("the last number is incomplete")
    return made


def text_of(source: Source, value: int | ByteRange) -> str:
    """Return the text of a field; its first `MOST_TEXT` bytes, and empty for a number."""
    if not isinstance(value, ByteRange):
        return ""
    return source.read(value.offset, min(value.length, MOST_TEXT)).decode("utf-8", "backslashreplace")


def signed(value: int | ByteRange) -> int:
    """Return a varint as a signed number of 64 bits; -1 for bytes."""
    return value - (value >> 63 << 64) if isinstance(value, int) else -1
