"""The zip directory and one record replaced, against zipfile and torch's own reader and writer."""

from __future__ import annotations

import dataclasses
import io
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path

import builders
import pytest
import torch

from ckptfix.checkpoint import ByteRange, Derived, OutputFile, Plan
from ckptfix.errors import BadDirectory, CkptfixError, Truncated, Unsupported
from ckptfix.io.read import read_chunks
from ckptfix.io.source import open_source
from ckptfix.io.write import write_plan
from ckptfix.zips.append import append_records, earlier
from ckptfix.zips.local import read_local, record_data
from ckptfix.zips.read import CENTRAL, MAX32, read_directory, same_rows
from ckptfix.zips.write import NewRecord, fresh_archive, replace_record


def saved(path: Path, tensors: int = 5) -> Path:
    torch.save(OrderedDict((f"t{index}", torch.arange(float(index * 7))) for index in range(tensors)), path)
    return path


def read_all(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        return {name: archive.read(name) for name in archive.namelist()}


def test_reads_what_zipfile_reads(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pth")
    with open_source(path) as reader, zipfile.ZipFile(path) as archive:
        directory = read_directory(reader)
        for record, info in zip(directory.records, archive.infolist(), strict=True):
            assert (record.name, record.header, record.size, record.crc32) == (
                info.filename,
                info.header_offset,
                info.file_size,
                info.CRC,
            )
            data = record_data(reader, record)
            assert isinstance(data, ByteRange)
            assert b"".join(read_chunks(data)) == archive.read(info)


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 5000])
def test_a_replaced_record_keeps_all_others_and_their_alignment(tmp_path: Path, length: int) -> None:
    path = saved(tmp_path / "a.pth")
    out = tmp_path / "b.pth"
    with open_source(path) as reader:
        directory = read_directory(reader)
        new = bytes(range(256)) * 20
        segments = replace_record(reader, directory, directory.records[0], new[:length])
    write_plan(Plan((OutputFile.of(out, segments),)))
    before, after = read_all(path), read_all(out)
    assert list(before) == list(after)
    assert after.pop("a/data.pkl") == new[:length]
    before.pop("a/data.pkl")
    assert before == after
    with open_source(out) as reader:
        for record in read_directory(reader).records[1:]:
            assert read_local(reader, record).data % 64 == 0


def test_the_tail_is_one_range(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pth", 300)
    with open_source(path) as reader:
        directory = read_directory(reader)
        plan = OutputFile.of("b", replace_record(reader, directory, directory.records[0], b"x"))
    ranges = [segment for segment in plan.segments if isinstance(segment, ByteRange)]
    assert len(ranges) == 1
    assert ranges[0].length > 0.6 * path.stat().st_size


def test_a_fresh_archive_is_what_torch_writes(tmp_path: Path) -> None:
    """Byte for byte, but for the serialization id, which torch derives from a hash of the C++ library."""
    path = saved(tmp_path / "archive.pth", 40)
    contents = read_all(path)
    out = tmp_path / "fresh.zip"
    records = [NewRecord(name, data) for name, data in contents.items()]
    write_plan(Plan((OutputFile.of(out, fresh_archive(records)),)))
    assert out.read_bytes() == path.read_bytes()


def test_sums_that_are_not_known_before_writing(tmp_path: Path) -> None:
    path = saved(tmp_path / "archive.pth", 40)
    out = tmp_path / "fresh.zip"
    with open_source(path) as reader:
        directory = read_directory(reader)
        records = [NewRecord(row.name, record_data(reader, row)) for row in directory.records]
    write_plan(Plan((OutputFile.of(out, fresh_archive(records)),)))
    assert out.read_bytes() == path.read_bytes()


def test_records_beyond_four_gigabytes(tmp_path: Path) -> None:
    """A sparse file of 5 GB: offsets and sizes that need zip64, in a fresh archive and after an edit."""
    hole = tmp_path / "hole"
    with open(hole, "wb") as file:
        file.truncate(5 << 30)
    out = tmp_path / "big.zip"
    big = NewRecord("a/data/0", ByteRange(str(hole), 0, 5 << 30), crc32=0x12345678)
    records = [NewRecord("a/data.pkl", b"pickle"), big, NewRecord("a/data/1", b"after"), NewRecord("a/version", b"3\n")]
    plan = OutputFile.of(out, fresh_archive(records))
    # Only what is not the hole is written: the layout is what is tested.
    with open(out, "wb") as file:
        for segment in plan.segments:
            if isinstance(segment, bytes):
                file.write(segment)
            else:
                file.seek(segment.length, io.SEEK_CUR)
    assert out.stat().st_size == plan.nbytes
    with open_source(out) as reader, zipfile.ZipFile(out) as archive:
        directory = read_directory(reader)
        assert [record.size for record in directory.records] == [6, 5 << 30, 5, 2]
        assert archive.read("a/data/1") == b"after"
        edited = OutputFile.of("edited", replace_record(reader, directory, directory.records[0], b"x" * 9999))
    assert edited.nbytes > plan.nbytes
    large = next(segment for segment in edited.segments if isinstance(segment, ByteRange))
    assert large.length > 5 << 30
    shifted = tmp_path / "shifted.zip"
    with open(shifted, "wb") as file:
        for segment in edited.segments:
            if isinstance(segment, bytes):
                file.write(segment)
            else:
                start = file.tell()
                with open_source(out) as reader:
                    tail = reader.read(segment.offset + segment.length - 900, 900)  # type: ignore[union-attr]
                file.seek(start + segment.length - 900)
                file.write(tail)
    with zipfile.ZipFile(shifted) as archive:
        assert archive.read("a/data.pkl") == b"x" * 9999
        assert archive.read("a/data/1") == b"after"


@pytest.mark.parametrize(("size", "wide"), [(MAX32 - 1, False), (MAX32, True)])
def test_a_record_of_four_gigabytes_has_its_sizes_in_eight_bytes(size: int, wide: bool, tmp_path: Path) -> None:
    data = ByteRange(str(tmp_path / "hole"), 0, size)
    head, _, descriptor, *_ = fresh_archive([NewRecord("a/data/0", data, crc32=1)])
    assert isinstance(head, bytes) and isinstance(descriptor, bytes) and len(head) % 64 == 0
    assert (struct.pack("<2H2Q", 1, 16, size, size) in head) is wide
    assert descriptor == struct.pack("<4sL2Q" if wide else "<4s3L", b"PK\7\x08", 1, size, size)


def test_what_follows_a_record_that_is_made_while_it_is_written(tmp_path: Path) -> None:
    made = Derived(5, lambda: iter((b"made", b"!")), "made")
    out = tmp_path / "out.zip"
    records = [NewRecord("a/data/0", made), NewRecord("a/data/1", b"after")]
    write_plan(Plan((OutputFile.of(out, fresh_archive(records)),)))
    assert read_all(out) == {"a/data/0": b"made!", "a/data/1": b"after"}


@pytest.mark.parametrize(("more", "runs"), [(16, False), (17, True)])
def test_data_that_its_header_pushes_into_the_next_record_is_not_replaced(
    more: int, runs: bool, tmp_path: Path
) -> None:
    """The directory gives no hint of it: what the data begins behind stands in the local header alone."""
    data = bytearray(archive())
    # Sizes and checksum are behind the data of 2 bytes: 16 bytes, which no reader needs.
    (extra,) = struct.unpack_from("<H", data, 28)
    struct.pack_into("<H", data, 28, extra + more)
    with open_source(builders.written(tmp_path / "a.pth", bytes(data))) as reader:
        directory = read_directory(reader)
        if runs:
            with pytest.raises(BadDirectory, match="begins within the bytes of"):
                replace_record(reader, directory, directory.records[0], b"new")
        else:
            assert replace_record(reader, directory, directory.records[0], b"new")


def test_rows_that_only_moved_are_seen_at_once(tmp_path: Path) -> None:
    """Where the records begin, if no row but that of the changed record says anything else."""
    path = saved(tmp_path / "a.pth")
    with open_source(path) as reader:
        directory = read_directory(reader)
        first, second, *_ = directory.records
        found = same_rows(reader, directory, first)
    assert found == (directory.records.headers, first)
    data = path.read_bytes()
    for name, other in ((second.name, False), (first.name, True)):
        at = data.rindex(name.encode()) - CENTRAL.size
        changed = data[: at + 16] + b"\1\2\3\4" + data[at + 20 :]
        with open_source(builders.written(tmp_path / "b.pth", changed)) as reader:
            found = same_rows(reader, directory, first)
        assert found == ((directory.records.headers, first._replace(crc32=0x04030201)) if other else None)


def test_a_directory_of_another_number_of_rows_is_another_one(tmp_path: Path) -> None:
    """As many bytes, and two rows of which one was the comment of the other."""
    names = [b"a/data.pkl", b"a/data/0"]
    parts = [b"PK\1\2" + bytes(24) + struct.pack("<H", len(name)) + bytes(16) + name for name in names]
    one = parts[0][:32] + struct.pack("<H", len(parts[1])) + parts[0][34:] + parts[1]
    directories = []
    for count, rows in ((2, b"".join(parts)), (1, one)):
        end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, count, count, len(rows), 100, 0)
        directories.append(builders.written(tmp_path / f"{count}.zip", bytes(100) + rows + end))
    for path, other in (directories, directories[::-1]):
        with open_source(path) as reader, pytest.MonkeyPatch.context() as patch:
            patch.setattr("ckptfix.zips.read._refuse_overlaps", lambda *found: None)
            directory = read_directory(reader)
        with open_source(other) as reader:
            assert same_rows(reader, directory, directory.records[0]) is None


def test_what_an_archive_was_before_an_edit_at_its_end(tmp_path: Path) -> None:
    """A prefix that ends in other bytes, or has two records of the name, is no archive that was edited so."""
    good = builders.build_zip(records := builders.torch_records(b"\x80\x02}.", {"0": b"12345678"}))
    cut = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 1, 1, 46, 0, 0)
    twice = builders.build_zip([*records, records[0]])
    for data, known in ((good, True), (good + b"junk" + cut, False), (twice, False)):
        with open_source(builders.written(tmp_path / "a.pth", data)) as reader:
            directory = dataclasses.replace(read_directory(reader), trailing=0)
            edited = append_records(reader, directory, directory.records[0], b"\x80\x02]." * 9)
        out = tmp_path / "b.pth"
        write_plan(Plan((OutputFile.of(out, edited),)), overwrite=True)
        with open_source(out) as reader:
            found = list(earlier(str(out), read_directory(reader)))
        assert [part.length for part, _, _ in found] == [len(data)] * known


def archive(**fields: object) -> bytes:
    return builders.torch_zip(builders.assemble("EMPTY_DICT", "STOP"), {"0": b"12345678"}, **fields)


def opened(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.pth"
    path.write_bytes(data)
    with open_source(path) as reader:
        directory = read_directory(reader)
        for record in directory.records:
            record_data(reader, record)


@pytest.mark.slow
def test_every_cut_is_truncated_or_a_bad_directory(tmp_path: Path) -> None:
    data = archive()
    opened(tmp_path, data)
    for _, cut in builders.cuts(data):
        with pytest.raises((Truncated, BadDirectory)):
            opened(tmp_path, cut)


def test_lies_of_the_end_record(tmp_path: Path) -> None:
    data = archive()
    end = data.rindex(b"PK\x05\x06")
    locator = end - 20
    end64 = locator - 56
    for position, form in ((end64 + 40, "<Q"), (end64 + 48, "<Q"), (end64 + 24, "<Q"), (locator + 8, "<Q")):
        value = struct.unpack_from(form, data, position)[0]
        for lie in (value + 1, value - 1, 0, 1 << 62):
            changed = bytearray(data)
            struct.pack_into(form, changed, position, lie)
            with pytest.raises(CkptfixError):
                opened(tmp_path, bytes(changed))


def test_overlapping_records_are_refused(tmp_path: Path) -> None:
    records = builders.torch_records(b"}.", {"0": b"1" * 64, "1": b"2" * 64})
    path = tmp_path / "x.pth"
    data = builders.build_zip(records)
    first = data.rindex(b"archive/data/1") - 46
    changed = bytearray(data)
    struct.pack_into("<L", changed, first + 42, data.index(b"archive/data/0") - 30)
    path.write_bytes(changed)
    with open_source(path) as reader, pytest.raises(BadDirectory, match="runs into"):
        read_directory(reader)


def test_local_name_that_differs(tmp_path: Path) -> None:
    data = archive()
    changed = data.replace(b"archive/data/0", b"archive/data/9", 1)
    with pytest.raises(BadDirectory, match="calls this record"):
        opened(tmp_path, changed)


def test_unknown_method_and_encryption(tmp_path: Path) -> None:
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("a/data.pkl", b"}." * 100)
    with pytest.raises(Unsupported, match="method 12"):
        opened(tmp_path, path.read_bytes())


def test_deflated_records_are_streamed(tmp_path: Path) -> None:
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data/0", b"abc" * 1000)
    with open_source(path) as reader:
        (record,) = read_directory(reader).records
        assert b"".join(read_chunks(record_data(reader, record))) == b"abc" * 1000


@pytest.mark.parametrize("size", [100, 1 << 17])
def test_an_end_record_before_a_comment_is_found_in_a_file_of_any_size(size: int, tmp_path: Path) -> None:
    path = tmp_path / "in.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a", bytes(size))
        archive.comment = b"a comment"
    with open_source(str(path)) as reader:
        assert [(record.name, record.size) for record in read_directory(reader).records] == [("a", size)]


def test_an_archive_of_no_records_is_one(tmp_path: Path) -> None:
    for comment in (b"", b"a comment"):
        end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0, 0, 0, 0, len(comment))
        with open_source(builders.written(tmp_path / "in.zip", end + comment)) as reader:
            directory = read_directory(reader)
        assert (len(directory.records), directory.comment, directory.trailing) == (0, comment, 0)
