"""Archives that are written from a template have the bytes of archives that are laid out record by record."""

from __future__ import annotations

import zipfile
import zlib
from io import BytesIO
from pathlib import Path

import pytest

from ckptfix.checkpoint import ByteRange, Segment
from ckptfix.io.read import read_chunks
from ckptfix.zips.write import ArchiveTemplate, NewRecord, TemplatedArchive, fresh_archives


def bytes_of(segments: list[Segment]) -> bytes:
    return b"".join(
        segment if isinstance(segment, bytes) else b"".join(read_chunks(segment)) for segment in segments
    )


def records(data: ByteRange, crc32: int | None, varying: int) -> list[NewRecord]:
    rows = [NewRecord("archive/data.pkl", b"pickle"), NewRecord("archive/empty", b""), NewRecord("archive/v", b"3\n")]
    rows.insert(varying, NewRecord("archive/data/0", data, crc32))
    return rows


@pytest.mark.sampled(1_000)
@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
@pytest.mark.parametrize("size", [1, 63, 64, 65, 5000, 70_000])
@pytest.mark.parametrize("varying", range(4))
def test_the_bytes_are_the_same(tmp_path: Path, size: int, varying: int, known: bool) -> None:
    held = bytes(range(256)) * 600
    path = tmp_path / "x"
    path.write_bytes(held)
    ranges = [ByteRange(str(path), start, size) for start in (0, 7, 512)]
    sums = [zlib.crc32(held[data.offset : data.end]) if known else None for data in ranges]
    template = ArchiveTemplate(records(ranges[0], sums[0], varying), varying)
    made = fresh_archives([TemplatedArchive(template, *row) for row in zip(ranges, sums, strict=True)])
    plain = fresh_archives([records(*row, varying) for row in zip(ranges, sums, strict=True)])
    assert [*map(bytes_of, made)] == [*map(bytes_of, plain)]
    for archive, data in zip(made, ranges, strict=True):
        with zipfile.ZipFile(BytesIO(bytes_of(archive))) as opened:
            assert opened.testzip() is None
            assert opened.read("archive/data/0") == held[data.offset : data.end]
