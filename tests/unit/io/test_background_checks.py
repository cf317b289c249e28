"""Checksums of inputs, compared while the output is written: whoever reads the bytes, every check is made."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ckptfix.checkpoint import ByteRange, OutputFile, Plan, RangeCheck, Segment
from ckptfix.errors import DamagedFile
from ckptfix.io import background_checks
from ckptfix.io.blocks import PAGE, SMALL
from ckptfix.io.checksums import PORTION, Checksums
from ckptfix.io.chunks import Chunk, tiled
from ckptfix.io.read import read_blocks
from ckptfix.io.source import Block, LocalFile
from ckptfix.io.virtual_files import SplicedFile, SplicedPiece
from ckptfix.io.write import write_plan

SIZE = 3 << 20


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, bytes]:
    path = tmp_path_factory.mktemp("checking") / "input"
    data = random.Random(0).randbytes(SIZE)
    path.write_bytes(data)
    return str(path), data


def cuts(path: str, chance: random.Random) -> list[ByteRange]:
    """The file in ranges of all sizes, some of them at pages, in some order; some bytes are in none."""
    at, found = 0, []
    while at < SIZE:
        length = min(chance.choice([1, 5000, 70_000, SMALL, 3 * SMALL + 1, 64 * PAGE]), SIZE - at)
        if chance.random() < 0.8:
            found.append(ByteRange(path, at, length))
        at += length
    if chance.random() < 0.5:
        chance.shuffle(found)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_every_check_is_made(source: tuple[str, bytes], tmp_path: Path, seed: int) -> None:
    path, data = source
    chance = random.Random(seed)
    ranges = cuts(path, chance)
    segments: list[Segment] = [b"h" * chance.choice([0, 64, PAGE])]
    sums = Checksums(ranges) if seed % 3 == 0 else None
    for number, where in enumerate(ranges):
        segments.append(where)
        if sums is not None:
            segments.append(sums.segment(number, lambda crc: crc.to_bytes(4, "little"), bytes(4)))
    checks: list[RangeCheck] = []
    for where in cuts(path, chance):
        checks.append(RangeCheck(str(len(checks)), where, zlib.crc32(data[where.offset : where.end])))
    plan = Plan((OutputFile.of(tmp_path / "out", segments),), checks=tuple(checks))
    write_plan(plan)
    expected = b"".join(
        data[where.offset : where.end]
        + (b"" if sums is None else zlib.crc32(data[where.offset : where.end]).to_bytes(4, "little"))
        for where in ranges
    )
    assert (tmp_path / "out").read_bytes() == bytes(segments[0] if isinstance(segments[0], bytes) else b"") + expected

    for wrong in chance.sample(range(len(checks)), 4):
        changed = [*checks]
        changed[wrong] = RangeCheck(str(wrong), checks[wrong].data, checks[wrong].crc32 ^ 1)
        with pytest.raises(DamagedFile, match=f"storage {wrong}"):
            write_plan(Plan(plan.files, checks=tuple(changed)), overwrite=True)
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_what_is_summed_already_is_not_read_again(
    source: tuple[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that the writer reads, and bytes that a checksum is made of, are read for no check."""
    path, data = source
    read: list[int] = []

    def watched(part: ByteRange) -> Iterator[Block]:
        read.append(part.length)
        return read_blocks(part)

    monkeypatch.setattr("ckptfix.io.checksums.read_blocks", watched)
    whole = ByteRange(path, 0, SIZE)
    check = RangeCheck("whole", whole, zlib.crc32(data))
    write_plan(Plan((OutputFile.of(tmp_path / "unaligned", [b"h", whole]),), checks=(check,)))
    assert sum(read) == 0
    write_plan(Plan((OutputFile.of(tmp_path / "aligned", [whole]),), checks=(check,)))
    assert sum(read) == SIZE
    sums = Checksums([whole])
    summed = sums.segment(0, lambda crc: crc.to_bytes(4, "little"), bytes(4))
    write_plan(Plan((OutputFile.of(tmp_path / "summed", [whole, summed]),), checks=(check,)))
    assert sum(read) == 2 * SIZE


def test_small_ranges_that_follow_each_other_are_read_together(
    source: tuple[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One read serves many checks, and each is made: the one that fails is named."""
    path, data = source
    ranges = [ByteRange(path, 200 * number, 20) for number in range(1000)]
    checks = [RangeCheck(str(at), where, zlib.crc32(data[where.offset : where.end])) for at, where in enumerate(ranges)]
    reads: list[int] = []
    read = LocalFile._read

    def counted(source: LocalFile, offset: int, length: int) -> bytes:
        reads.append(length)
        return read(source, offset, length)

    monkeypatch.setattr(LocalFile, "_read", counted)
    background_checks.run(checks)
    assert len(reads) < 10
    assert max(reads) <= PORTION
    for wrong in (0, 517, 999):
        broken = [replace(check, crc32=check.crc32 ^ (number == wrong)) for number, check in enumerate(checks)]
        with pytest.raises(DamagedFile, match="do not match") as raised:
            background_checks.run(broken)
        assert (raised.value.where, raised.value.offset) == (f"storage {wrong}", 200 * wrong)


def test_planned_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    """As the steps of one command may call what they plan."""

    def planned(first: int) -> SplicedFile:
        return SplicedFile("out", [8, 8], lambda index: SplicedPiece((bytes([first + index]) * 8,)))

    files = (planned(1), planned(5))
    values = {0: (1, 5), 1: (2, 6)}
    checks = [
        RangeCheck(f"{index} {value}", file.place(index), zlib.crc32(bytes([value]) * 8))
        for index in values
        for file, value in zip(files, values[index], strict=True)
    ]
    background_checks.run(checks)
    background_checks.run(sorted(checks, key=lambda check: check.where))
    background_checks.run([checks[0], checks[3]])
    with pytest.raises(DamagedFile):
        background_checks.run([checks[0], replace(checks[3], crc32=checks[2].crc32)])


def columns(path: str, data: bytes) -> tuple[SplicedFile, bytes]:
    """A matrix of bytes whose columns are stored apart, one after the other, and its rows."""
    parts = [data[start : start + SIZE // 4] for start in range(0, SIZE, SIZE // 4)]
    width = 1024
    rows = SIZE // 4 // width
    chunks = [
        Chunk((0, number * width), (rows, width), ByteRange(path, number * SIZE // 4, SIZE // 4)) for number in range(4)
    ]
    segments = tiled((rows, 4 * width), 1, chunks)
    whole = b"".join(part[row * width : row * width + width] for row in range(rows) for part in parts)
    return SplicedFile("columns", [SIZE], lambda _: SplicedPiece(segments)), whole


def test_what_is_assembled_is_summed_as_it_is_read(
    source: tuple[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte is read once, for the output, for the check of the input and for the checksum of the output."""
    path, data = source
    file, whole = columns(path, data)
    read: list[int] = []
    own = LocalFile.read_into

    def watched(self: LocalFile, offset: int, view: memoryview) -> None:
        read.append(len(view))
        own(self, offset, view)

    def again(part: ByteRange) -> Iterator[Block]:
        assert not part.length, "it is read again"
        return iter(())

    monkeypatch.setattr(LocalFile, "read_into", watched)
    monkeypatch.setattr("ckptfix.io.checksums.read_blocks", again)
    place = file.place(0)
    sums = Checksums([place])
    summed = sums.segment(0, lambda crc: crc.to_bytes(4, "little"), bytes(4))
    check = RangeCheck("whole", ByteRange(path, 0, SIZE), zlib.crc32(data))
    write_plan(Plan((OutputFile.of(tmp_path / "out", [place, summed]),), checks=(check,)))
    assert (tmp_path / "out").read_bytes() == whole + zlib.crc32(whole).to_bytes(4, "little")
    assert sum(read) == SIZE


@pytest.mark.parametrize("start", [0, SIZE // 2, SIZE - 1])
def test_damage_in_what_is_assembled_is_found(source: tuple[str, bytes], tmp_path: Path, start: int) -> None:
    data = bytearray(source[1])
    crc = zlib.crc32(data)
    data[start] ^= 1
    (tmp_path / "input").write_bytes(data)
    file, _ = columns(str(tmp_path / "input"), bytes(data))
    check = RangeCheck("7", ByteRange(str(tmp_path / "input"), 0, SIZE), crc)
    with pytest.raises(DamagedFile, match="storage 7"):
        write_plan(Plan((OutputFile.of(tmp_path / "out", [file.place(0)]),), checks=(check,)))
    assert not (tmp_path / "out").exists()
