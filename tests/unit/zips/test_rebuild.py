"""Records found again: by their headers, descriptors or rows, whatever program wrote the archive."""

from __future__ import annotations

import io
import random
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from builders import Record, build_zip, replace, torch_records, written

from ckptfix.errors import Unsupported, WriteFailed
from ckptfix.io.read import read_chunks
from ckptfix.io.source import Source, open_source
from ckptfix.ops import repair
from ckptfix.zips import rebuild as zip_rebuild
from ckptfix.zips import scan as zip_scan
from ckptfix.zips.rebuild import Rebuilt, RebuiltArchive

RECORDS = torch_records(b"\x80\x02}.", {"0": b"\x01" * 100, "1": random.Random(0).randbytes(3000), "2": b""})
CONTENT = {record.name: record.data for record in RECORDS}


def rebuilt(tmp_path: Path, data: bytes) -> tuple[Rebuilt, dict[str, bytes]]:
    path = written(tmp_path / "in.zip", data)
    with open_source(path) as reader:
        found = RebuiltArchive(reader).rebuild()
    return found, {record.name: b"".join(read_chunks(record.data)) for record in found.records}


def python_zip(method: int, *, seekable: bool, zip64: bool) -> bytes:
    """The records as Python's zipfile writes them; to a pipe it writes descriptors."""

    class Pipe(io.BytesIO):
        def seekable(self) -> bool:
            return seekable

        def seek(self, offset: int, whence: int = 0) -> int:
            if not seekable:
                raise io.UnsupportedOperation
            return super().seek(offset, whence)

        def tell(self) -> int:
            if not seekable:
                raise io.UnsupportedOperation
            return super().tell()

    out = Pipe()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, data in CONTENT.items():
            with archive.open(name, "w", force_zip64=zip64) as file:
                file.write(data)
    return out.getvalue()


@pytest.mark.parametrize("zip64", [False, True])
@pytest.mark.parametrize("seekable", [False, True])
@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_archives_of_python_without_their_directory(
    tmp_path: Path, method: int, seekable: bool, zip64: bool
) -> None:
    data = python_zip(method, seekable=seekable, zip64=zip64)
    assert rebuilt(tmp_path, data)[1] == CONTENT
    found, content = rebuilt(tmp_path, data[: data.index(b"PK\x01\x02")])
    assert content == CONTENT and not found.directory and not found.damaged
    assert all(record.verified for record in found.records)


def test_an_archive_of_wide_descriptors(tmp_path: Path) -> None:
    data = build_zip([replace(record, zip64=True) for record in RECORDS])
    assert rebuilt(tmp_path, data[: data.index(b"PK\x01\x02")])[1] == CONTENT
    assert rebuilt(tmp_path, data)[1] == CONTENT


@pytest.mark.parametrize("window", [5, 64, 1000])
def test_signatures_across_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    data = build_zip(RECORDS)
    whole = rebuilt(tmp_path, data)[0]
    monkeypatch.setattr(zip_scan, "WINDOW", window)
    assert [record.header for record in rebuilt(tmp_path, data)[0].records] == [r.header for r in whole.records]


@pytest.mark.parametrize("part", ["header", "descriptor", "row", "header and descriptor"])
def test_one_description_is_enough(tmp_path: Path, part: str) -> None:
    clean = build_zip(RECORDS)
    data = bytearray(clean)
    place = clean.index(CONTENT["archive/data/1"])
    header = clean.rindex(b"PK\x03\x04", 0, place)
    row = clean.index(b"archive/data/1", clean.index(b"PK\x01\x02")) - 46
    spans = {"header": (header, 30), "descriptor": (place + 3000, 16), "row": (row, 46)}
    for name in part.split(" and "):
        start, length = spans[name]
        data[start : start + length] = b"\xa5" * length
    assert rebuilt(tmp_path, bytes(data))[1] == CONTENT


def test_without_any_description_it_is_lost_and_the_others_are_not(tmp_path: Path) -> None:
    clean = build_zip(RECORDS)
    data = bytearray(clean[: clean.index(b"PK\x01\x02")])
    end = clean.index(CONTENT["archive/data/1"]) + 3000
    data[end : end + 16] = b"\xa5" * 16
    content = rebuilt(tmp_path, bytes(data))[1]
    assert set(CONTENT) - set(content) == {"archive/data/1"}
    assert all(CONTENT[name] == value for name, value in content.items())


def test_two_records_of_one_name(tmp_path: Path) -> None:
    twice = [*RECORDS, Record("archive/data/0", b"\x02" * 100)]
    found, content = rebuilt(tmp_path, build_zip(twice))
    assert "archive/data/0" not in content and found.damaged[0].kind == "twice"
    same = [*RECORDS, Record("archive/data/0", CONTENT["archive/data/0"])]
    assert rebuilt(tmp_path, build_zip(same))[1] == CONTENT
    # The directory says which one counts.
    assert rebuilt(tmp_path, build_zip(twice, order=range(len(RECORDS))))[1] == CONTENT


@pytest.mark.parametrize("wrong", ["archive/data/0", "archive/dat@/1", "brchive/data/1"])
def test_a_record_of_two_names_gets_the_one_that_is_free(tmp_path: Path, wrong: str) -> None:
    named = [replace(one, local_name=wrong) if one.name == "archive/data/1" else one for one in RECORDS]
    assert rebuilt(tmp_path, build_zip(named))[1] == CONTENT


def test_names_that_nothing_decides_are_not_guessed(tmp_path: Path) -> None:
    named = [replace(one, local_name="archive/data/7") if one.name == "archive/data/1" else one for one in RECORDS]
    found, content = rebuilt(tmp_path, build_zip(named))
    assert set(CONTENT) - set(content) == {"archive/data/1"}
    assert "two names" in found.damaged[0].reason


def test_encrypted_records_are_not_taken_for_data(tmp_path: Path) -> None:
    secret = [replace(one, flags=0x809) if one.name == "archive/data/0" else one for one in RECORDS]
    found, content = rebuilt(tmp_path, build_zip(secret))
    assert set(CONTENT) - set(content) == {"archive/data/0"} and "encrypted" in found.damaged[0].reason


def test_a_file_full_of_signatures_is_refused_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zip_scan, "MAX_SIGNATURES", 1000)
    with pytest.raises(Unsupported, match="signatures"):
        rebuilt(tmp_path, b"PK\x03\x04" * 2000)


def test_a_sector_that_can_not_be_read_costs_what_is_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    value = {f"w{index}": torch.full((4000,), float(index)) for index in range(6)}
    torch.save(value, tmp_path / "in.pth")
    data = (tmp_path / "in.pth").read_bytes()
    bad = data.index(torch.full((4000,), 3.0).numpy().tobytes()) + 8000
    read = Source.read

    def broken(self: Source, offset: int, length: int) -> bytes:
        if offset <= bad < offset + length:
            raise WriteFailed("cannot be read: Input/output error", path=self.name, offset=offset)
        return read(self, offset, length)

    monkeypatch.setattr(Source, "read", broken)
    monkeypatch.setattr(zip_rebuild, "BLOCK", 4096)
    result = repair.repair(tmp_path / "in.pth", None, check_only=True)
    assert [loss.name for loss in result.losses] == ["w3"] and len(result.kept) == 5
    assert "unreadable" in {row.id for row in result.findings}


def _every_order(count: int) -> Iterator[list[int]]:
    for seed in range(4):
        order = list(range(count))
        random.Random(seed).shuffle(order)
        yield order


def test_the_order_of_the_directory_does_not_matter(tmp_path: Path) -> None:
    for order in _every_order(len(RECORDS)):
        assert rebuilt(tmp_path, build_zip(RECORDS, order=order))[1] == CONTENT


def test_a_script_without_its_directory_runs_again(tmp_path: Path) -> None:
    model = torch.jit.script(torch.nn.Linear(3, 2))
    torch.jit.save(model, tmp_path / "in.pt")
    data = (tmp_path / "in.pt").read_bytes()
    path = written(tmp_path / "cut.pt", data[: data.index(b"PK\x01\x02")])
    with pytest.raises(RuntimeError):
        torch.jit.load(path)  # type: ignore[no-untyped-call]
    assert repair.repair(path, tmp_path / "out.pt").exit_code == 0
    given = torch.randn(4, 3)
    again = torch.jit.load(tmp_path / "out.pt")  # type: ignore[no-untyped-call]
    assert torch.equal(again(given), model(given))


@pytest.mark.parametrize("most", [16, 0])
def test_bytes_are_summed_so_often_and_no_more(most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that all claim the same megabytes: what is beyond the sum of what may be looked at is not examined."""
    monkeypatch.setattr(zip_rebuild, "MOST_SUMMED", most)
    data = build_zip(torch_records(b"\x80\x02}.", {"0": bytes(2 << 20), "1": bytes(100)}))
    found, content = rebuilt(tmp_path, data)
    if most:
        assert not found.damaged and len(content) == len(found.records) > 3
    else:
        reasons = {row.name: row.reason for row in found.damaged}
        assert reasons["archive/data/0"].startswith("its bytes were not examined")
        assert "archive/data/1" not in content


@pytest.mark.parametrize(
    ("name", "extra", "cut", "there"),
    [(b"a", 0, 0, True), (b"a" * 4096, 0, 0, True), (b"", 0, 0, False), (b"a" * 4097, 0, 0, False),
     (b"a", 100, 0, True), (b"a", 100, 1, False), (b"a", 0, 40, False)],
)  # fmt: skip
def test_what_could_be_a_local_header(name: bytes, extra: int, cut: int, there: bool, tmp_path: Path) -> None:
    head = struct.pack("<4s5H3L2H", b"PK\3\4", 20, 0, 0, 0, 0, 0, 0, 0, len(name), extra)
    data = head + name + bytes(extra)
    with open_source(written(tmp_path / "in", data[: max(len(data) - cut, 12)])) as reader:
        assert (zip_scan.local_at(reader, 0) is not None) is there


def row(name: bytes, header: int, *, extra: bytes = b"", comment: bytes = b"") -> bytes:
    sizes = 7, 100, 100, len(name), len(extra), len(comment), 0, 0, 0, header
    return struct.pack("<4s6H3L5H2L", b"PK\1\2", 20, 20, 0, 0, 0, 0, *sizes) + name + extra + comment


def rows_of(data: bytes, folder: Path) -> list[tuple[str, int]]:
    with open_source(written(folder / "in", data)) as reader:
        found = zip_scan.rows(reader, zip_scan.signatures(reader).rows)
    return [(one.name, one.header) for one in found]


@pytest.mark.parametrize(("name", "cut", "there"), [
    (b"a", 0, True), (b"a" * 4096, 0, True), (b"", 0, False), (b"a" * 4097, 0, False), (b"a", 1, False),
    (b"a", 6, False),
])  # fmt: skip
def test_what_could_be_a_row(name: bytes, cut: int, there: bool, tmp_path: Path) -> None:
    data = b"before" + row(name, 5, extra=b"\1\0\0\0", comment=b"c")
    assert rows_of(data[: len(data) - cut], tmp_path) == [(name.decode(), 5)] * there


def test_the_last_rows_that_follow_each_other_are_the_directory(tmp_path: Path) -> None:
    """Whatever stands in their extra fields and comments; what only looks like a row inside of one is none."""
    inner = row(b"inner", 9)
    rows = [row(b"a", 1), row(b"b", 2, extra=b"xy\4\0abcd"), row(b"c", 3, comment=inner), row(b"d", 4, extra=inner)]
    wanted = [("a", 1), ("b", 2), ("c", 3), ("d", 4)]
    assert rows_of(b"".join(rows), tmp_path) == wanted
    assert rows_of(row(b"old", 0) + b"data" + b"".join(rows) + b"end", tmp_path) == wanted
    wide = row(b"e", 0xFFFFFFFF, extra=struct.pack("<2HQ", 1, 8, 1 << 33))
    assert rows_of(b"".join([*rows, wide, rows[0]]), tmp_path) == [*wanted, ("e", 1 << 33), ("a", 1)]


def test_headers_of_a_megabyte_are_those_of_an_archive(tmp_path: Path) -> None:
    """What may not be is headers inside of headers: they would take more than the file has bytes."""
    names = [f"archive/{number:04}{'a' * 4000}" for number in range(300)]
    found, _ = rebuilt(tmp_path, build_zip([Record(name, b"x") for name in names]))
    assert not found.damaged and [record.name for record in found.records] == names
    inside = struct.pack("<4s5H3L2H", b"PK\3\4", 20, 0, 0, 0, 0, 0, 0, 0, 4000, 0) * 3000
    with pytest.raises(Unsupported, match="too many local headers"):
        rebuilt(tmp_path, inside + bytes(4000))


@pytest.mark.slow
def test_behind_a_damaged_archive_in_an_archive_the_others_are_found(tmp_path: Path) -> None:
    inner = build_zip(RECORDS)
    records = [RECORDS[0], Record("archive/data/1", inner), Record("archive/data/2", b"\x02" * 300)]
    whole = bytearray(build_zip(records))
    whole[whole.index(inner) + inner.index(CONTENT["archive/data/1"]) + 5] ^= 1
    found, content = rebuilt(tmp_path, bytes(whole))
    assert content["archive/data/2"] == b"\x02" * 300
    assert [(row.name, row.kind) for row in found.damaged] == [("archive/data/1", "checksum")]


def test_a_size_that_is_a_lie_costs_no_other_record(tmp_path: Path) -> None:
    """Bytes that the file does not have are not counted as looked at, of which there may be only so many."""
    clean = build_zip(RECORDS)
    data = bytearray(clean)
    data[clean.index(CONTENT["archive/data/0"])] ^= 1
    row = clean.index(b"archive/data/0", clean.index(b"PK\x01\x02")) - 46
    data[row + 20 : row + 28] = struct.pack("<2L", 0xFFFFFFF0, 0xFFFFFFF0)
    with open_source(written(tmp_path / "in.zip", bytes(data))) as reader:
        found = RebuiltArchive(reader).rebuild(lambda name: len(CONTENT[name]))
    assert [row.name for row in found.damaged] == ["archive/data/0"]
    assert {record.name for record in found.records} == CONTENT.keys() - {"archive/data/0"}


def test_a_second_rebuild_with_sizes_is_that_of_a_file_read_anew(tmp_path: Path) -> None:
    """Records that the first one found intact are not examined again."""
    random_ = random.Random(7)
    for number in range(40):
        data = bytearray(build_zip(RECORDS) + (build_zip(RECORDS[1:]) if number % 4 == 0 else b""))
        for _ in range(number % 5):
            data[random_.randrange(len(data))] ^= 1 << random_.randrange(8)
        del data[len(data) - random_.choice([0, 0, 30, 400]) :]
        sizes = {name: len(content) + random_.choice([0, 0, 0, 1, -1]) for name, content in CONTENT.items() if content}
        with open_source(written(tmp_path / f"{number}.zip", bytes(data))) as reader:
            archive = RebuiltArchive(reader)
            first, again, other = archive.rebuild(), archive.rebuild(), archive.rebuild(sizes.get)
            assert again == first == RebuiltArchive(reader).rebuild()
            assert other == RebuiltArchive(reader).rebuild(sizes.get), number


@pytest.mark.parametrize("seekable", [False, True])
def test_what_was_cut_says_how_much_of_it_is_left(seekable: bool, tmp_path: Path) -> None:
    whole = python_zip(zipfile.ZIP_STORED, seekable=seekable, zip64=False)
    place = whole.index(CONTENT["archive/data/1"])
    for left in (0, 1, 2999, 3000):
        found, content = rebuilt(tmp_path, whole[: place + left])
        if seekable and left == 3000:
            assert content == {name: CONTENT[name] for name in content} and "archive/data/1" in content
            continue
        (damaged,) = found.damaged
        reason = "the file ends before the record's size and CRC-32"
        reason = f"3000 bytes are expected, but only {left} are left" if seekable else reason
        assert (damaged.name, damaged.kind, damaged.reason) == ("archive/data/1", "cut", reason)


def test_a_record_whose_row_points_behind_the_file_is_named(tmp_path: Path) -> None:
    lost = replace(RECORDS[-1], offset=1 << 20)
    found, content = rebuilt(tmp_path, build_zip([*RECORDS[:-1], lost]))
    assert [(one.name, one.header, one.kind, one.reason) for one in found.damaged if one.header == 1 << 20] == [
        (lost.name, 1 << 20, "cut", "the file ends before it")
    ]
    assert {name for name in CONTENT if name != lost.name} <= content.keys()


@pytest.mark.parametrize("cut", [0, 1])
def test_of_a_record_that_is_cut_the_checksum_says_nothing(tmp_path: Path, cut: int) -> None:
    """Whether an archive without a directory states checksums at all is known from its whole records."""
    plain = [
        Record(name, b"data", flags=0, local_crc=crc, local_size=4, local_compressed_size=4, extra=b"")
        for name, crc in (("a/data.pkl", 0), ("a/data/0", 7))
    ]
    archive = build_zip(plain, end=b"")
    data = archive[: archive.index(b"PK\1\2") - cut]
    with open_source(written(tmp_path / "in.zip", data)) as reader:
        assert RebuiltArchive(reader).checksums is not bool(cut)
