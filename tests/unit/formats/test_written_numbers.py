"""Numbers and strings at the places where an edit reads or writes them."""

from __future__ import annotations

import struct
import zlib

import pytest
from builders import assemble, push

from ckptfix.errors import Unsupported
from ckptfix.formats.torch.containers import _int_at
from ckptfix.pickles import opcodes as op
from ckptfix.pickles import parse
from ckptfix.pickles.patch import string_opcode
from ckptfix.zips.read import CENTRAL
from ckptfix.zips.write import _local_zip64, _row_maker, repadded

ZIP64 = 1 << 32


@pytest.mark.parametrize("value", [0, 127, 128, 200, 255, 256, 40000, 65535, 65536, -1, -(1 << 31), 1 << 31, 1 << 40])
def test_an_int_is_read_where_it_is_pushed(value: int) -> None:
    data = assemble(("PROTO", 2), *push(value), "STOP")
    assert _int_at(parse(data), 2) == (2, len(data) - 1, value)


def test_what_is_no_int_is_refused() -> None:
    with pytest.raises(Unsupported):
        _int_at(parse(assemble(("PROTO", 2), *push("text"), "STOP")), 2)


@pytest.mark.parametrize("text", ["plain", "back\\slash", "two\nlines", "ä"])
def test_a_line_of_protocol_0_stays_one(text: str) -> None:
    made = string_opcode(text, 0, op.UNICODE)
    assert made[:1] == b"V" and made.count(b"\n") == 1
    assert parse(made + b".").root == text
    assert string_opcode(text, 2, op.UNICODE)[:1] == string_opcode(text, 0)[:1] == b"X"


def test_fields_of_64_bits_say_how_long_they_are() -> None:
    kind, length = struct.unpack_from("<2H", _local_zip64(ZIP64, 0))
    assert (kind, length) == (1, len(_local_zip64(ZIP64, 0)) - 4)
    row = _row_maker(b"name", ZIP64, ZIP64 + 8, 0)(7)
    assert struct.unpack_from("<H", row, 6) == (45,)
    extra = row[CENTRAL.size + 4 :]
    assert struct.unpack("<2H3Q", extra) == (1, 24, ZIP64, ZIP64, ZIP64 + 8)
    assert struct.unpack_from("<H", _row_maker(b"name", 4, 8, 0)(zlib.crc32(b"")), 6) == (0,)


@pytest.mark.parametrize("unit", [64, 4096])
@pytest.mark.parametrize("cursor", [0, 1, 63, 64, 5000])
def test_padding_moves_data_by_whole_units_and_is_less_than_one(cursor: int, unit: int) -> None:
    kept = struct.pack("<2HQ", 1, 8, 5)
    raw = bytes(30) + b"name" + kept
    made = repadded(raw, kept, cursor, 1000, unit)
    assert (cursor + len(made)) % unit == 1000 % unit
    assert struct.unpack_from("<H", made, 28) == (len(made) - 34,)
    assert len(made) - len(raw) - 4 < unit and made[34 : 34 + len(kept)] == kept


def test_padding_that_no_header_can_state_is_that_of_a_page() -> None:
    made = repadded(bytes(30) + b"name", b"", 0, 200_001, 1 << 20)
    assert len(made) % 4096 == 200_001 % 4096 and len(made) < 34 + 4 + 4096
