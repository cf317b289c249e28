"""Which parts of a range fill whole blocks, where data begins best, and what a file system that shares none costs."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from ckptfix import platform
from ckptfix.checkpoint import ByteRange, OutputFile, Plan, Segment
from ckptfix.errors import WriteFailed
from ckptfix.io import write as io_write
from ckptfix.io.blocks import LARGE, PAGE, SMALL, best_start, block_of, shift_for, whole_blocks
from ckptfix.io.copy import Sink
from ckptfix.io.source import open_source
from ckptfix.io.write import write_plan

CONTENT = os.urandom(SMALL * 8)


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = tmp_path / "source"
    path.write_bytes(CONTENT)
    return str(path)


class Sharing:
    """A file system that shares blocks, in the place of ioctl; from call `fails` on it answers `number`."""

    def __init__(self, fails: int = 1 << 30, number: int = errno.EINVAL) -> None:
        self.calls: list[tuple[int, int, int]] = []
        self._fails = fails
        self._number = number

    def __call__(self, fd: int, request: int, argument: bytes) -> int:
        in_fd, offset, count, position = struct.unpack("=qQQQ", argument)
        self.calls.append((offset, count, position))
        assert not (offset | count | position) % PAGE
        if len(self.calls) > self._fails:
            raise OSError(self._number, os.strerror(self._number))
        os.pwrite(fd, os.pread(in_fd, count, offset), position)
        return 0


@pytest.mark.parametrize(
    ("offset", "length", "position", "expected"),
    [
        (0, SMALL, 0, (0, SMALL)),
        (0, SMALL - 1, 0, None),
        (1, SMALL + PAGE, 0, None),
        (1, SMALL + PAGE, 1 + 7 * PAGE, (PAGE, SMALL)),
        (1, SMALL + PAGE - 2, 1, None),
        (PAGE - 1, SMALL + 1, 2 * PAGE - 1, (PAGE, SMALL)),
        (64, SMALL + 2 * PAGE, PAGE + 64, (PAGE, SMALL + PAGE)),
    ],
)
def test_the_whole_blocks_of_a_range(
    offset: int, length: int, position: int, expected: tuple[int, int] | None
) -> None:
    part = whole_blocks(ByteRange("x", offset, length), position, PAGE)
    assert (part and (part.offset, part.length)) == expected


def test_where_data_begins_best() -> None:
    def at(offset: int, length: int) -> ByteRange:
        return ByteRange("x", offset, length)

    assert best_start([at(808, LARGE)], PAGE) == 808
    assert best_start([b"12345678", at(808, LARGE)], PAGE) == 800
    assert best_start([at(808, LARGE - 1)], PAGE) is None
    several: list[Segment] = [at(8, LARGE), at(9 + LARGE, LARGE), b"x", at(2 * LARGE + 10, LARGE)]
    assert best_start(several, PAGE) == 9
    assert best_start(several, PAGE, alignment=8) == 8
    assert best_start(several, PAGE, share=0.9) is None


def test_a_range_is_split_at_its_blocks(tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sharing = Sharing()
    monkeypatch.setattr(fcntl, "ioctl", sharing)
    monkeypatch.setattr("ckptfix.io.copy.CLONE_CHUNK", 2 * SMALL)
    done: list[int] = []
    out = tmp_path / "out"
    segments = (b"h" * 100, ByteRange(source, 100, 5 * SMALL), b"t", ByteRange(source, 7, SMALL * 2))
    plan = Plan((OutputFile.of(out, segments),))
    write_plan(plan, progress=lambda count, total: done.append(count))
    assert out.read_bytes() == b"h" * 100 + CONTENT[100 : 100 + 5 * SMALL] + b"t" + CONTENT[7 : 7 + SMALL * 2]
    blocks_of_it = 5 * SMALL - PAGE
    first = (PAGE, 2 * SMALL, PAGE)
    assert sharing.calls[:2] == [first, (PAGE + 2 * SMALL, 2 * SMALL, PAGE + 2 * SMALL)]
    assert sum(count for _, count, _ in sharing.calls) == blocks_of_it
    assert done == sorted(done)
    assert done[-1] == plan.nbytes


@pytest.mark.parametrize("already", [0, 1])
@pytest.mark.parametrize(
    "number",
    [errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ETXTBSY, errno.ENOTTY, errno.EPERM, errno.ENOSPC, errno.EIO],
    ids=errno.errorcode.get,
)
def test_what_cannot_be_shared_is_copied_and_asked_for_once(
    tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch, number: int, already: int
) -> None:
    sharing = Sharing(already, number)
    monkeypatch.setattr(fcntl, "ioctl", sharing)
    monkeypatch.setattr("ckptfix.io.copy.CLONE_CHUNK", SMALL)
    segments: list[Segment] = [b"x" * 5]
    expected = b"x" * 5
    for offset in (5, 3 * PAGE + 5, 9 * PAGE + 5):
        segments += [ByteRange(source, offset, 3 * SMALL), b"y" * (PAGE - 3 * SMALL % PAGE)]
        expected += CONTENT[offset : offset + 3 * SMALL] + b"y" * (PAGE - 3 * SMALL % PAGE)
    write_plan(Plan((OutputFile.of(tmp_path / "out", segments),)))
    assert (tmp_path / "out").read_bytes() == expected
    assert len(sharing.calls) == already + 1


def test_an_interrupted_call_is_made_again(tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sharing = Sharing()
    interrupts = iter([True, False])

    def ioctl(*arguments: Any) -> int:
        if next(interrupts, False):
            raise InterruptedError
        return sharing(*arguments)

    monkeypatch.setattr(fcntl, "ioctl", ioctl)
    write_plan(Plan((OutputFile.of(tmp_path / "out", [ByteRange(source, 0, len(CONTENT))]),)))
    assert (tmp_path / "out").read_bytes() == CONTENT
    assert len(sharing.calls) == 1


def test_what_is_shared_is_not_waited_for(tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is on the disk already: only what is written counts towards the next sync."""
    monkeypatch.setattr(fcntl, "ioctl", Sharing())
    written: list[int] = []
    shared: list[int] = []
    fd = os.open(tmp_path / "out", os.O_WRONLY | os.O_CREAT)
    try:
        sink = Sink(fd, written.append, None, shared.append)
        with open_source(source) as reader:
            sink.copy(reader, 0, SMALL * 4 + 9)
        sink.flush()
    finally:
        os.close(fd)
    assert (sum(shared), sum(written)) == (SMALL * 4, 9)


def test_a_system_without_the_call(tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "fcntl", None)
    write_plan(Plan((OutputFile.of(tmp_path / "out", [ByteRange(source, 0, len(CONTENT))]),)))
    assert (tmp_path / "out").read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("stated", "believed"), [(512, 512), (4096, 4096), (65536, 65536), (1 << 20, PAGE), (3000, PAGE), (0, PAGE)]
)
def test_the_block_that_a_file_system_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stated: int, believed: int
) -> None:
    class Status:
        f_frsize = stated

    monkeypatch.setattr(os, "statvfs", lambda place: Status())
    assert block_of(str(tmp_path)) == believed
    assert shift_for(str(tmp_path / "out")) == max(believed, PAGE)


def test_a_folder_that_is_not_there() -> None:
    assert shift_for("/no/such/folder/out") == PAGE


@pytest.mark.parametrize("shares", [True, False])
def test_a_disk_without_room_for_a_copy(
    tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch, shares: bool
) -> None:
    monkeypatch.setattr(fcntl, "ioctl", Sharing(1 << 30 if shares else 0))
    monkeypatch.setattr(io_write, "free_space", lambda folder: SMALL)
    plan = Plan((OutputFile.of(tmp_path / "out", [b"x" * PAGE, ByteRange(source, 0, len(CONTENT))]),))
    if shares:
        write_plan(plan)
        assert (tmp_path / "out").read_bytes() == b"x" * PAGE + CONTENT
    else:
        with pytest.raises(WriteFailed, match="No space left"):
            write_plan(plan)
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out"} - ({"out"} if not shares else set())
