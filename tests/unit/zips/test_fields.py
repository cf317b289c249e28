"""Each field of an archive that says something twice, changed: what is said of it, where, and whether torch minds."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from zlib import crc32

import pytest

from ckptfix.errors import BadDirectory, Unsupported
from ckptfix.io.source import open_source
from ckptfix.zips.check import Dispute, examine
from ckptfix.zips.read import read_directory

CONTENTS = {"m/data.pkl": b"a pickle", "m/data/0": b"some bytes of a tensor"}
EXTRA = struct.pack("<HH4s", 0x4246, 4, b"ZZZZ")


def field(base: bytes, at: int, form: str, change: Callable[[int], int]) -> bytes:
    data = bytearray(base)
    (value,) = struct.unpack_from(f"<{form}", data, at)
    struct.pack_into(f"<{form}", data, at, change(value))
    return bytes(data)


def archive(*, flags: int = 0, descriptor: Callable[[int, int], bytes] | None = None, deep: bool = False) -> bytes:
    """Two stored records, each with an extra field; with `descriptor` their local headers state no sizes."""
    out, rows = b"", b""
    for name, content in CONTENTS.items():
        sums = crc32(content), len(content), len(content)
        said = (0, 0, 0) if descriptor else sums
        known = flags | (8 if descriptor else 0)
        at = len(out)
        common = 20, known, 0, 0, 0
        head = struct.pack("<4s5H3L2H", b"PK\3\4", *common, *said, len(name), len(EXTRA))
        out += head + name.encode() + EXTRA + content
        if descriptor:
            out += descriptor(crc32(content), len(content))
        row = struct.pack("<4s6H3L5H2L", b"PK\1\2", 20, *common, *sums, len(name), len(EXTRA), 0, 0, 0, 0, at)
        rows += row + name.encode() + EXTRA
    directory, end = len(out), len(out) + len(rows)
    out += rows
    if deep:
        out += struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, 2, 2, len(rows), directory)
        out += struct.pack("<4sLQL", b"PK\6\7", 0, end, 1)
    return out + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 2, 2, len(rows), directory, 0)


PLAIN = archive()
DEEP = archive(deep=True)
SECOND = PLAIN.index(b"PK\3\4", 4)
ROW = PLAIN.rindex(b"PK\1\2")
DIRECTORY = PLAIN.index(b"PK\1\2")
END = PLAIN.index(b"PK\5\6")
END64, LOCATOR, DEEP_END = DEEP.index(b"PK\6\6"), DEEP.index(b"PK\6\7"), DEEP.index(b"PK\5\6")
NAME = "m/data/0"


def disputes(data: bytes, folder: Path) -> list[Dispute]:
    path = folder / "a.pth"
    path.write_bytes(data)
    with open_source(path) as reader:
        return examine(reader, read_directory(reader))[1]


def more(value: int) -> int:
    return value + 1


LOCAL, LISTING = "bad-local-header", "bad-directory"
UNFIT = "an extra field in its local header does not match its length"
RUNS = f"its data, from {{}} on, overlaps the bytes that begin at {DIRECTORY:#x}"
HEADERS: list[tuple[int, str, Callable[[int], int], list[tuple[str, int, str, bool]]]] = [
    (SECOND + 4, "H", lambda value: 63, []),
    (SECOND + 4, "H", lambda value: 64, [(LOCAL, SECOND, "it requires version 6.4 of the zip format", False)]),
    (SECOND + 6, "H", more, [(LOCAL, SECOND, "only one of its two headers marks it as encrypted", True)]),
    (SECOND + 6, "H", lambda value: 2, [(LOCAL, SECOND, "flags 0x2 in the local header, 0x0 in the directory", False)]),
    (SECOND + 8, "H", more,
     [(LOCAL, SECOND, "compression method 1 in the local header, 0 in the directory", True)]),
    (SECOND + 14, "L", more,
     [(LOCAL, SECOND, "CRC-32 a4523dac in the local header, a4523dab in the directory", True)]),
    (SECOND + 18, "L", more,
     [(LOCAL, SECOND, "22 bytes, 23 stored, in the local header; 22 and 22 in the directory", True)]),
    (SECOND + 22, "L", more,
     [(LOCAL, SECOND, "23 bytes, 22 stored, in the local header; 22 and 22 in the directory", True)]),
    (SECOND + 26, "H", more,
     [(LOCAL, SECOND, f"its local header has a different name; {UNFIT}", True),
      (LOCAL, SECOND, RUNS.format("0x67"), True)]),
    (SECOND + 28, "H", more, [(LOCAL, SECOND, UNFIT, False), (LOCAL, SECOND, RUNS.format("0x67"), True)]),
    (SECOND + 28, "H", lambda value: len(PLAIN) - SECOND - 30 - len(NAME) - 22, [
        (LOCAL, SECOND, UNFIT, False), (LOCAL, SECOND, RUNS.format("0xfa"), True)]),
    (SECOND + 28, "H", lambda value: len(PLAIN) - SECOND - 30 - len(NAME) - 21, [
        (LOCAL, SECOND, "its local header pushes its data beyond the end of the file", True),
        (LOCAL, SECOND, RUNS.format("0xfb"), True)]),
    (SECOND + 30 + len(NAME), "H", more, []),
    (SECOND + 32 + len(NAME), "H", more, [(LOCAL, SECOND, UNFIT, False)]),
    (SECOND + 32 + len(NAME), "H", lambda value: 0, [(LOCAL, SECOND, UNFIT, False)]),
    *((SECOND + 32 + len(NAME), "H", lambda value, length=length: length, [(LOCAL, SECOND, UNFIT, False)])
      for length in (2, 8, 12, 0x104)),
    (ROW + 6, "H", lambda value: 64,
     [(LISTING, ROW, "it requires version 6.4 of the zip format, which zipfile refuses", False)]),
    (ROW + 34, "H", more, [(LISTING, ROW, "the directory puts it on disk 1, but there is only one file", False)]),
    (ROW + 34, "H", lambda value: 2,
     [(LISTING, ROW, "the directory puts it on disk 2, but there is only one file", True)]),
    (ROW + 38, "L", lambda value: 0x10, [
        (LISTING, ROW, "its attributes mark it as a folder: torch would return uninitialized memory", True)]),
    (ROW + 48 + len(NAME), "H", more,
     [(LISTING, ROW, "an extra field in the directory does not match its length", False)]),
    (ROW + 20, "L", more,
     [(LISTING, ROW, "it is stored uncompressed in 23 bytes, but its size is stated as 22", True),
      (LOCAL, SECOND, "22 bytes, 22 stored, in the local header; 22 and 23 in the directory", True),
      (LOCAL, SECOND, RUNS.format("0x66"), True)]),
    (ROW + 42, "L", more,
     [(LOCAL, SECOND + 1, "the directory does not point to a local header", True),
      ("hidden-bytes", SECOND, f"1 bytes up to {SECOND + 1:#x} belong to no record", False),
      ("hidden-bytes", DIRECTORY - 7, f"7 bytes up to {DIRECTORY:#x} belong to no record", False)]),
]  # fmt: skip


@pytest.mark.sampled(1_000)
@pytest.mark.parametrize(("at", "form", "change", "expected"), HEADERS)
def test_headers_of_a_record(
    tmp_path: Path, at: int, form: str, change: Callable[[int], int], expected: list[tuple[str, int, str, bool]]
) -> None:
    found = disputes(field(PLAIN, at, form, change), tmp_path)
    assert [(row.id, row.offset, row.message, row.serious) for row in found] == expected


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_an_extra_field_of_a_few_bytes(tmp_path: Path, length: int) -> None:
    """Four bytes are a field without content, less are none, and of more the fifth is of no field."""
    cut = bytearray(PLAIN[: SECOND + 30 + len(NAME)] + b"FB\0\0\0"[:length] + PLAIN[SECOND + 38 + len(NAME) :])
    struct.pack_into("<H", cut, SECOND + 28, length)
    change = length - len(EXTRA)
    struct.pack_into("<L", cut, END + change + 16, DIRECTORY + change)
    found = disputes(bytes(cut), tmp_path)
    assert [row.message for row in found] == ([] if length == 4 else [UNFIT])


STATES = "the end record states {} as its {}, the zip64 end record {}"
ENDS: list[tuple[int, str, int, list[tuple[int, str, bool]]]] = [
    *((DEEP_END + at, form, value + 1, [(DEEP_END, STATES.format(value + 1, name, value), False)])
      for at, form, name, value in [
          (4, "H", "disk", 0), (6, "H", "disk of the directory", 0), (8, "H", "records on this disk", 2),
          (10, "H", "records", 2), (12, "L", "size", END64 - DIRECTORY), (16, "L", "offset", DIRECTORY)]),
    *((DEEP_END + at, form, most, []) for at, form, most in [
        (4, "H", 0xFFFF), (6, "H", 0xFFFF), (8, "H", 0xFFFF), (10, "H", 0xFFFF), (12, "L", 0xFFFFFFFF),
        (16, "L", 0xFFFFFFFF)]),
    (END64 + 4, "Q", 45, [(END64, "the zip64 end record states a length of 57 bytes, and has 56", False)]),
    (END64 + 4, "Q", 43, [(END64, "the zip64 end record states a length of 55 bytes, and has 56", True)]),
    (LOCATOR + 4, "L", 1, [(LOCATOR, "the zip64 locator states 1 disks, and the directory on disk 1", False)]),
    (LOCATOR + 16, "L", 2, [(LOCATOR, "the zip64 locator states 2 disks, and the directory on disk 0", True)]),
]  # fmt: skip


@pytest.mark.parametrize(("at", "form", "value", "expected"), ENDS)
def test_the_two_end_records(
    tmp_path: Path, at: int, form: str, value: int, expected: list[tuple[int, str, bool]]
) -> None:
    found = disputes(field(DEEP, at, form, lambda old: value), tmp_path)
    assert [(row.offset, row.message, row.serious) for row in found] == expected


@pytest.mark.parametrize(("length", "message"), [
    (44, "the zip64 end record states a length of 56 bytes, and has 66"),
    (54, "the zip64 end record has 10 bytes more than its fields need"),
])  # fmt: skip
def test_bytes_behind_the_fields_of_the_zip64_end_record(tmp_path: Path, length: int, message: str) -> None:
    wide = field(DEEP[:LOCATOR] + bytes(10) + DEEP[LOCATOR:], END64 + 4, "Q", lambda old: length)
    found = disputes(wide, tmp_path)
    assert [(row.offset, row.message, row.serious) for row in found] == [(END64, message, False)]


SPLIT = "the zip archive is split over several files"
REFUSED: list[tuple[bytes, int, str, str]] = [
    *((PLAIN, ROW + at, "H", "the directory holds -1 bytes more than its 2 records") for at in (28, 30, 32)),
    *((PLAIN, END + at, "H", SPLIT) for at in (4, 6, 8, 10)),
    *((PLAIN, END + at, "L", f"would end at {END + 1:#x} instead of {END:#x}") for at in (12, 16)),
    (PLAIN, END + 20, "H", f"the archive comment at {END:#x} runs past the end of the file"),
    *((DEEP, END64 + at, form, SPLIT) for at, form in ((16, "L"), (20, "L"), (24, "Q"), (32, "Q"))),
    *((DEEP, END64 + at, "Q", f"would end at {END64 + 1:#x} instead of {END64:#x}") for at in (40, 48)),
    (DEEP, LOCATOR + 8, "Q", f"the zip64 locator points at {END64 + 1:#x}, behind itself"),
    (DEEP[:LOCATOR] + b"\0" + DEEP[LOCATOR:], LOCATOR + 9, "Q",
     f"no zip64 end record at {END64 + 1:#x}, where the locator points"),
]  # fmt: skip


@pytest.mark.parametrize(("base", "at", "form", "message"), REFUSED)
def test_fields_without_which_there_is_no_directory(
    tmp_path: Path, base: bytes, at: int, form: str, message: str
) -> None:
    with pytest.raises((BadDirectory, Unsupported)) as caught:
        disputes(field(base, at, form, more), tmp_path)
    assert message in caught.value.message
    if "more than" in message:
        assert caught.value.offset == END + 1


def descriptor(form: str, signed: bool, wrong: tuple[int, int] = (0, 0)) -> Callable[[int, int], bytes]:
    def made(checksum: int, size: int) -> bytes:
        raw = struct.pack(form, checksum ^ wrong[0], size + wrong[1], size + wrong[1])
        return b"PK\7\x08" * signed + raw

    return made


CHECKSUM = [f"CRC-32 {crc32(data) ^ 1:08x} after the data, {crc32(data):08x} in the directory"
            for data in CONTENTS.values()]  # fmt: skip
NONE = ["no data descriptor follows its data, although its flags announce one"] * 2
OTHER = ["its data descriptor and the directory state different sizes"] * 2


@pytest.mark.parametrize(("behind", "expected"), [
    (descriptor("<3L", True), []),
    (descriptor("<3L", False), []),
    (descriptor("<L2Q", True), []),
    (descriptor("<L2Q", False), []),
    (descriptor("<3L", True, (1, 0)), CHECKSUM),
    (descriptor("<L2Q", True, (1, 0)), CHECKSUM),
    (descriptor("<3L", True, (0, 1)), OTHER),
    (lambda checksum, size: b"", NONE),
])  # fmt: skip
def test_what_stands_behind_the_data(
    tmp_path: Path, behind: Callable[[int, int], bytes], expected: list[str]
) -> None:
    found = disputes(archive(descriptor=behind), tmp_path)
    assert [(row.id, row.message, row.serious) for row in found] == [(LOCAL, message, False) for message in expected]


def test_a_descriptor_beside_a_header_that_states_sizes(tmp_path: Path) -> None:
    """Where the local header states what it need not, that is compared too."""
    made = archive(descriptor=descriptor("<3L", True))
    second = made.index(b"PK\3\4", 4)
    found = disputes(field(made, second + 18, "L", more), tmp_path)
    assert [(row.offset, row.message) for row in found] == [
        (second, "0 bytes, 1 stored, in the local header; 22 and 22 in the directory")
    ]
