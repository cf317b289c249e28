"""doctor is never silent about a file that torch reads otherwise than it was written, or refuses.

The truth is torch's own: what torch.load makes of a file, by a stream and by a map. Files that were damaged by a bit,
and archives that say two things in one of the ways that libzip, miniz or zipfile know.
"""

from __future__ import annotations

import ctypes
import io
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import Tensor, assemble, build_zip, flip, replace, safetensors, state_dict_ops, torch_records
from compare import assert_same
from conftest import LONG, ROOT

from ckptfix.errors import CkptfixError
from ckptfix.formats import FORMATS, open_checkpoint
from ckptfix.ops.doctor.examine import examine

DATA = struct.pack("<4f", 1, 2, 3, 4)
TIED = {"a": Tensor("0", (4,), 4), "b": Tensor("0", (2,), 4, offset=2), "c": Tensor("1", (4,), 4)}
RECORDS = torch_records(assemble(("PROTO", 2), *state_dict_ops(TIED), "STOP"), [DATA, DATA[::-1]], root="m")
PLAIN = build_zip(RECORDS)
NAMES = [record.name for record in RECORDS]


def _again(method: int) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for record in RECORDS:
            archive.writestr(zipfile.ZipInfo(record.name, (2024, 5, 6, 7, 8, 10)), record.data, method)
    return out.getvalue()


VARIANTS = {"torch": PLAIN, "zipfile": _again(zipfile.ZIP_STORED), "deflated": _again(zipfile.ZIP_DEFLATED)}


M_PERTURB = -6
"""The parameter of mallopt(3) that fills fresh memory."""


@pytest.fixture(scope="module", autouse=True)
def poison() -> Iterator[None]:
    """Fresh memory is filled with a pattern, so that memory that was never written to is never right by chance.

    It ends with these tests: otherwise, torch.empty of gigabytes takes gigabytes in the worker's later tests.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        yield
        return
    mallopt(M_PERTURB, 0xA5)
    yield
    mallopt(M_PERTURB, 0)


def loaded(data: bytes, path: Path | None = None) -> Any:
    """What torch.load(weights_only=True) gives; with `path`, by a map of that file. The exception, if it refuses."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if path is None:
                return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
            path.write_bytes(data)
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # whatever a damaged file makes torch raise
            return error


def same(one: Any, two: Any) -> bool:
    if isinstance(one, Exception) or isinstance(two, Exception):
        return isinstance(one, Exception) and isinstance(two, Exception)
    try:
        assert_same(one, two)
    except AssertionError:
        return False
    return True


def harmless(data: bytes, whole: bytes, path: Path) -> bool:
    """Whether torch makes of `data` what it makes of `whole`, by a stream and by a map."""
    return all(same(loaded(data, by), loaded(whole, by)) for by in (None, path.with_name("mapped.pth")))


def reported(data: bytes, path: Path) -> dict[str, str]:
    """id -> severity of what doctor finds in `data`, notes left out; an error of ckptfix is one, too."""
    path.write_bytes(data)
    try:
        return {row.id: row.severity for row in examine(path).findings if row.severity != "info"}
    except CkptfixError:
        return {"refused": "error"}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "in.pth"


@pytest.mark.parametrize("variant", VARIANTS)
def test_healthy(variant: str, place: Path) -> None:
    assert not isinstance(loaded(VARIANTS[variant]), Exception)
    assert reported(VARIANTS[variant], place).keys() <= {"deflated", "misaligned-storage"}


def _bits(data: bytes, step: int) -> Iterator[int]:
    """All bits of a file, or in a short run every `step`-th."""
    return iter(range(0, len(data) * 8, 1 if LONG else step))


@pytest.mark.campaign
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_flip_is_harmless_or_reported(variant: str, place: Path) -> None:
    whole = VARIANTS[variant]
    known = reported(whole, place)
    silent = []
    for bit in _bits(whole, 23):
        data = flip(whole, bit)
        if reported(data, place) == known and not harmless(data, whole, place):
            silent.append(hex(bit // 8))
    assert not silent


def _headers(whole: bytes) -> Iterator[int]:
    """Offsets of the bytes of the directory and its end, and of local headers without names and padding."""
    directory = whole.index(b"PK\x01\x02")
    yield from range(directory, len(whole))
    at = -1
    while (at := whole.find(b"PK\x03\x04", at + 1, directory)) >= 0:
        yield from range(at, at + 30)


@pytest.mark.campaign
def test_every_flip_of_the_headers_that_torch_minds_is_an_error(place: Path) -> None:
    """What torch refuses or reads otherwise is more than a warning."""
    weak = []
    for byte in list(_headers(PLAIN))[:: 1 if LONG else 10]:
        for bit in range(byte * 8, byte * 8 + 8):
            data = flip(PLAIN, bit)
            found = reported(data, place)
            if "error" not in found.values() and not harmless(data, PLAIN, place):
                weak.append((hex(byte), bit % 8, found))
    assert not weak


@pytest.mark.campaign
def test_every_flip_of_a_legacy_file_that_torch_refuses_is_reported(place: Path) -> None:
    """Nothing in it has a checksum: what still loads cannot be known to be otherwise."""
    whole = (ROOT / "fixtures" / "legacy-tied.pth").read_bytes()
    known = reported(whole, place)
    silent = []
    for bit in _bits(whole, 7):
        data = flip(whole, bit)
        if isinstance(loaded(data), Exception) and reported(data, place) == known:
            silent.append(hex(bit // 8))
    assert not silent


@pytest.mark.slow
def test_every_flip_of_a_safetensors_header_is_reported_where_its_reader_refuses(place: Path) -> None:
    load = pytest.importorskip("safetensors.torch").load
    whole = safetensors([("a", "F32", (4,), DATA), ("b", "I8", (1,), b"\1")], metadata={"format": "pt"})
    place = place.with_suffix(".safetensors")
    silent = []
    for bit in range(whole.index(DATA) * 8):
        data = flip(whole, bit)
        try:
            load(data)
        except Exception:  # whatever the reader raises
            if not reported(data, place):
                silent.append(hex(bit // 8))
    assert not silent


Change = Callable[[bytearray], None]
DISPUTES: dict[str, Change] = {}
"""Name of a class of inconsistency -> what makes it, in an archive of torch's layout."""

FIELDS = {"made": (4, "H"), "needed": (6, "H"), "flags": (8, "H"), "method": (10, "H"), "crc": (16, "L"),
          "stored": (20, "L"), "size": (24, "L"), "name length": (28, "H"), "extra length": (30, "H"),
          "comment length": (32, "H"), "disk": (34, "H"), "attributes": (38, "L"), "offset": (42, "L")}  # fmt: skip
LOCAL = {"signature": (0, "L"), "needed": (4, "H"), "flags": (6, "H"), "method": (8, "H"), "crc": (14, "L"),
         "stored": (18, "L"), "size": (22, "L"), "name length": (26, "H"), "extra length": (28, "H")}  # fmt: skip
END = {"disk": (4, "H"), "directory disk": (6, "H"), "records here": (8, "H"), "records": (10, "H"),
       "size": (12, "L"), "offset": (16, "L"), "comment length": (20, "H")}  # fmt: skip
END64 = {"length": (4, "Q"), "disk": (16, "L"), "directory disk": (20, "L"), "records here": (24, "Q"),
         "records": (32, "Q"), "size": (40, "Q"), "offset": (48, "Q")}  # fmt: skip
LOCATOR = {"disk": (4, "L"), "offset": (8, "Q"), "disks": (16, "L")}


def _row(data: bytes, name: str) -> int:
    at = data.index(b"PK\x01\x02")
    while data[at + 46 : at + 46 + len(name)] != name.encode() or data[at + 28] != len(name):
        at = data.index(b"PK\x01\x02", at + 1)
    return at


def _add(base: Callable[[bytes], int], where: tuple[int, str], change: Callable[[int], int]) -> Change:
    def apply(data: bytearray) -> None:
        place = base(bytes(data)) + where[0]
        (value,) = struct.unpack_from(f"<{where[1]}", data, place)
        struct.pack_into(f"<{where[1]}", data, place, change(value))

    return apply


def _toggled(bits: int) -> Callable[[int], int]:
    return lambda value: value ^ bits


def _last(mark: bytes) -> Callable[[bytes], int]:
    return lambda data: data.rindex(mark)


for _name in NAMES:

    def _its_row(data: bytes, name: str = _name) -> int:
        return _row(data, name)

    def _its_local(data: bytes, name: str = _name) -> int:
        return int.from_bytes(data[_row(data, name) + 42 :][:4], "little")

    for _field, _where in FIELDS.items():
        DISPUTES[f"directory: {_field} one more, {_name}"] = _add(_its_row, _where, lambda value: value + 1)
        DISPUTES[f"directory: {_field} zero, {_name}"] = _add(_its_row, _where, lambda value: 0)
    for _field, _where in LOCAL.items():
        DISPUTES[f"local: {_field} one more, {_name}"] = _add(_its_local, _where, lambda value: value + 1)
        DISPUTES[f"local: {_field} seven, {_name}"] = _add(_its_local, _where, lambda value: 7)
    for _bit in (0, 3, 5, 6, 11, 13):
        _flag = 1 << _bit
        DISPUTES[f"directory: flag bit {_bit}, {_name}"] = _add(_its_row, FIELDS["flags"], _toggled(_flag))
        DISPUTES[f"local: flag bit {_bit}, {_name}"] = _add(_its_local, LOCAL["flags"], _toggled(_flag))
    DISPUTES[f"directory: folder, {_name}"] = _add(_its_row, FIELDS["attributes"], lambda value: value | 0x10)
    DISPUTES[f"directory: last disk, {_name}"] = _add(_its_row, FIELDS["disk"], lambda value: 0xFFFF)
    DISPUTES[f"directory: sizes in zip64, {_name}"] = _add(_its_row, FIELDS["size"], lambda value: 0xFFFFFFFF)
ENDS = (("end", b"PK\5\6", END), ("zip64 end", b"PK\6\6", END64), ("locator", b"PK\6\7", LOCATOR))
STEPS: tuple[tuple[str, Callable[[int], int]], ...] = (
    ("one more", lambda value: value + 1),
    ("one less", lambda value: max(value - 1, 0)),
    ("zero", lambda value: 0),
)
for _what, _mark, _fields in ENDS:
    for _field, _where in _fields.items():
        for _label, _change in STEPS:
            DISPUTES[f"{_what}: {_field} {_label}"] = _add(_last(_mark), _where, _change)


@pytest.mark.campaign
@pytest.mark.parametrize("name", DISPUTES)
def test_every_dispute_is_harmless_or_reported(name: str, place: Path) -> None:
    data = bytearray(PLAIN)
    DISPUTES[name](data)
    found = reported(bytes(data), place)
    assert "error" in found.values() or harmless(bytes(data), PLAIN, place), found


def test_disputes_of_other_readers_are_reported(place: Path) -> None:
    """torch reads them all alike; zipfile or libzip do not."""
    names = [name for name in DISPUTES if name.startswith(("local: crc one", "local: size one", "local: flag bit 11"))]
    for name in names:
        data = bytearray(PLAIN)
        DISPUTES[name](data)
        assert "bad-local-header" in reported(bytes(data), place), name


def test_an_edit_does_not_hand_on_what_torch_would_misread(place: Path) -> None:
    from ckptfix.checkpoint import Rename

    for name in NAMES:
        data = bytearray(PLAIN)
        DISPUTES[f"directory: folder, {name}"](data)
        place.write_bytes(data)
        with pytest.raises(CkptfixError) as caught:
            checkpoint = open_checkpoint(place)
            edits = [Rename(site.at, site.kind, {"a": "x"}) for site in checkpoint.sites[:1]]
            FORMATS[checkpoint.format].plan_edit(checkpoint, edits, str(place.with_name("out.pth")))
        assert "folder" in str(caught.value), name


@pytest.mark.parametrize("wide", ["data.pkl", ""])
def test_an_edit_of_rows_with_64_bit_fields_can_be_read(wide: str, place: Path) -> None:
    """The row of the pickle gets new sizes, and its zip64 field must not keep the old ones before the offset."""
    from ckptfix.checkpoint import Rename
    from ckptfix.io.write import write_plan

    place.write_bytes(build_zip([replace(row, zip64=row.name.endswith(wide)) for row in RECORDS]))
    checkpoint = open_checkpoint(place)
    site = checkpoint.sites[0]
    out = place.with_name("out.pth")
    edits = [Rename(site.at, site.kind, {"a": "a" * 500})]
    write_plan(FORMATS[checkpoint.format].plan_edit(checkpoint, edits, str(out)))
    assert set(loaded(out.read_bytes())) == {"a" * 500, "b", "c"}
    assert not reported(out.read_bytes(), place)
