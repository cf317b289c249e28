"""Archives end to end in one file, told from one archive with bytes around it or an archive in it."""

from __future__ import annotations

from pathlib import Path

import hidden
import pytest
from builders import Record, build_zip, torch_records, torch_zip, written

import ckptfix
from ckptfix.errors import BadDirectory, DistributedPart, Unsupported
from ckptfix.io.source import open_source
from ckptfix.zips.archive_sequence import ArchiveSpan, several
from ckptfix.zips.local import read_local, record_data
from ckptfix.zips.read import read_directory

ONE = build_zip(torch_records(b"\x80\x02}.", {"0": b"\x01" * 100}))
OTHER = build_zip(torch_records(b"\x80\x02}.", {"0": b"\x02" * 300}))
WITHIN = build_zip(torch_records(b"\x80\x02}.", {"0": OTHER}))
LARGE = build_zip(torch_records(b"\x80\x02}.", {"0": b"\x03" * 200_000}))
JUNK = b"\xa5" * 1000


def kept(*archives: bytes) -> bytes:
    """A zip archive of archives, which is no checkpoint itself."""
    return build_zip([Record(f"{number}.pth", data) for number, data in enumerate(archives)])


@pytest.mark.parametrize(
    ("parts", "which"),
    [
        ([ONE], None),
        ([WITHIN], None),
        ([JUNK, ONE], None),
        ([ONE, JUNK], None),
        ([WITHIN, JUNK], None),
        ([ONE, OTHER], (0, 1)),
        ([ONE, JUNK, OTHER], (0, 2)),
        ([ONE, OTHER, JUNK], (0, 1)),
        ([ONE, OTHER, ONE], (0, 1)),
        ([JUNK, ONE, OTHER], (1, 2)),
        ([JUNK, ONE, JUNK], None),
        ([JUNK, WITHIN, JUNK], None),
        ([JUNK, ONE, OTHER, JUNK], (1, 2)),
        ([JUNK, ONE, JUNK, OTHER, JUNK], (1, 3)),
        ([JUNK, LARGE, JUNK, LARGE, JUNK], (1, 3)),
        ([JUNK, ONE, WITHIN, JUNK], (1, 2)),
        ([kept(ONE, OTHER)], None),
        ([JUNK, kept(ONE, OTHER), JUNK], None),
        ([kept(LARGE, LARGE), JUNK], None),
        ([JUNK, kept(LARGE, LARGE), JUNK], None),
    ],
)
def test_archives_end_to_end(tmp_path: Path, parts: list[bytes], which: tuple[int, int] | None) -> None:
    path = written(tmp_path / "in", b"".join(parts))
    starts = [sum(map(len, parts[:index])) for index in range(len(parts))]
    with open_source(path) as reader:
        found = several(reader)
    wanted = which and tuple(ArchiveSpan(starts[index], starts[index] + len(parts[index])) for index in which)
    assert found == wanted


def test_the_last_of_two_is_found_behind_more_bytes_than_are_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptfix.zips.archive_sequence.WINDOW", len(ONE) + 100)
    path = written(tmp_path / "in", ONE + JUNK * 10 + OTHER)
    with open_source(path) as reader:
        found = several(reader)
    assert found == (ArchiveSpan(0, len(ONE)), ArchiveSpan(len(ONE) + 10_000, len(ONE) + 10_000 + len(OTHER)))


@pytest.mark.parametrize("behind", [1000, 100_000])
def test_none_of_several_is_taken_for_all_that_the_file_holds(behind: int, tmp_path: Path) -> None:
    one, other = (torch_zip(hidden.pickle_of({"w": hidden.WEIGHT}), [data]) for data in (hidden.DATA, bytes(8)))
    path = written(tmp_path / "in.pth", JUNK + one + other + bytes(behind))
    with pytest.raises(DistributedPart, match="several torch archives"):
        ckptfix.repair(path, tmp_path / "out.pth")
    assert not (tmp_path / "out.pth").exists()
    # Readers find no archive where more bytes follow it than a comment may have.
    wanted = "distributed-shard" if behind == 1000 else "unknown-format"
    assert wanted in {finding.id for finding in ckptfix.doctor(path).findings}


def test_a_stored_record_that_is_encrypted_or_said_to_be_a_folder_is_not_read(tmp_path: Path) -> None:
    records = [Record("a/data.pkl", b"\x80\x02}."), Record("a/x", b"text", flags=0x809), Record("a/y/", b"text")]
    with open_source(written(tmp_path / "in", build_zip(records))) as reader:
        _, encrypted, folder = read_directory(reader).records
        with pytest.raises(Unsupported, match="encrypted"):
            read_local(reader, encrypted)
        with pytest.raises(BadDirectory):
            record_data(reader, folder)
