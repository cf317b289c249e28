"""Exact reads and kernel copies: whatever the kernel answers, the bytes arrive or an error says where."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from ranges import copy_range, read_exact, small_blocks

from ckptfix import platform
from ckptfix.checkpoint import ByteRange, Derived, Segment
from ckptfix.errors import DamagedFile, Truncated, Unsupported, WriteFailed
from ckptfix.io import copy as io_copy
from ckptfix.io import read as io_read
from ckptfix.io import source as io_source
from ckptfix.io.source import open_source
from ckptfix.io.virtual_files import SplicedFile, SplicedPiece

CONTENT = bytes(range(256)) * 1200  # 300 KiB: above SMALL, so that the kernel copies it
FALLBACKS = [errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ETXTBSY, errno.EPERM]


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = tmp_path / "source"
    path.write_bytes(CONTENT)
    return str(path)


@pytest.fixture
def out(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "out", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


def written(fd: int) -> bytes:
    return os.pread(fd, 1 << 24, 0)


def without_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "kernel_copies", list)


class TestReading:
    @pytest.mark.parametrize(("offset", "length"), [(0, 0), (0, 5), (1000, 299_000), (len(CONTENT), 0)])
    def test_exact(self, source: str, offset: int, length: int) -> None:
        assert read_exact(ByteRange(source, offset, length)) == CONTENT[offset : offset + length]

    @pytest.mark.parametrize(
        ("offset", "length", "left"),
        [(0, len(CONTENT) + 1, len(CONTENT)), (len(CONTENT) - 3, 1 << 62, 3), (1 << 62, 1, 0), (-1, 2, 0), (5, -1, 0)],
    )
    def test_more_than_there_is(self, source: str, offset: int, length: int, left: int) -> None:
        with pytest.raises(Truncated) as caught:
            read_exact(ByteRange(source, offset, length))
        error = caught.value
        assert (error.path, error.offset) == (source, offset)
        assert error.message == f"{length} bytes are expected, but only {max(left, 0)} are left"

    def test_short_reads_are_continued(self, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
        pread = os.pread
        monkeypatch.setattr(os, "pread", lambda fd, length, offset: pread(fd, min(length, 7), offset))
        assert read_exact(ByteRange(source, 3, 100)) == CONTENT[3:103]

    def test_a_file_that_shrinks_under_its_reader(self, source: str) -> None:
        with open_source(source) as reader:
            os.truncate(source, 10)
            assert reader.read(0, 10) == CONTENT[:10]
            with pytest.raises(Truncated, match="20 bytes are expected, but only 6 are left"):
                reader.read(4, 20)

    def test_an_unreadable_sector_has_its_offset(self, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
        def pread(fd: int, length: int, offset: int) -> bytes:
            if offset == 4096:
                raise OSError(errno.EIO, "Input/output error")
            return b"x" * min(length, 4096 - offset)

        monkeypatch.setattr(os, "pread", pread)
        with pytest.raises(WriteFailed, match="Input/output error") as caught:
            read_exact(ByteRange(source, 96, 8000))
        assert (caught.value.path, caught.value.offset) == (source, 4096)

    def test_chunks(self, source: str) -> None:
        chunks = list(io_read.read_chunks(ByteRange(source, 1, 2500), 1000))
        assert [len(chunk) for chunk in chunks] == [1000, 1000, 500]
        assert b"".join(chunks) == CONTENT[1:2501]

    def test_blocks_are_the_bytes_and_use_one_memory(self, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
        small_blocks(monkeypatch, 1000)
        seen, parts = set(), []
        for block in io_read.read_blocks(ByteRange(source, 1, 2500)):
            assert isinstance(block, memoryview)
            seen.add(id(block.obj))
            parts.append(bytes(block))
        assert [len(part) for part in parts] == [1000, 1000, 500] and len(seen) == 1
        assert b"".join(parts) == CONTENT[1:2501]
        assert list(io_read.read_blocks(ByteRange(source, 5, 0))) == []

    def test_blocks_of_two_readers_are_apart_and_memory_comes_back(
        self, source: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        small_blocks(monkeypatch, 100)
        for _ in range(3):
            pairs = zip(
                io_read.read_blocks(ByteRange(source, 0, 450)),
                io_read.read_blocks(ByteRange(source, 7, 450)),
                strict=True,
            )
            both = [(bytes(one), bytes(other)) for one, other in pairs]
            assert b"".join(one for one, _ in both) == CONTENT[:450]
            assert b"".join(other for _, other in both) == CONTENT[7:457]
            left = io_read.read_blocks(ByteRange(source, 0, 450))
            next(left)
            left.close()  # type: ignore[attr-defined]
            assert len(io_source._SPARE) == 2
        many = [io_read.read_blocks(ByteRange(source, 0, 450)) for _ in range(2 * io_source.MOST_SPARE)]
        assert all(bytes(next(one)) == CONTENT[:100] for one in many)
        del many
        assert len(io_source._SPARE) == io_source.MOST_SPARE

    @pytest.mark.parametrize(
        ("offset", "length"), [(0, len(CONTENT) + 1), (len(CONTENT) - 3, 4), (1 << 62, 1), (-1, 2)]
    )
    def test_blocks_beyond_the_end(self, source: str, offset: int, length: int) -> None:
        with pytest.raises(Truncated) as caught:
            list(io_read.read_blocks(ByteRange(source, offset, length)))
        assert caught.value.path == source
        with open_source(source) as reader:
            os.truncate(source, 10)
            with pytest.raises(Truncated, match="6 are left"):
                list(reader.blocks(4, 20))

    def test_blocks_of_pieces(self, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
        small_blocks(monkeypatch, 100)
        stream = Derived(5, lambda: (b"ab", b"cde"))
        pieces: tuple[Segment, ...] = (ByteRange(source, 3, 250), b"literal", stream, ByteRange(source, 0, 1))
        made = SplicedFile("pieces", [263], lambda _: SplicedPiece(pieces))
        blocks = [bytes(block) for block in io_read.read_blocks(made.place(0))]
        assert b"".join(blocks) == CONTENT[3:253] + b"literalabcde" + CONTENT[:1]
        found = b"".join(bytes(block) for block in io_read.read_blocks(ByteRange(made, 200, 60)))
        assert found == b"".join(blocks)[200:260]

    def test_whole_items_of_blocks_that_are_overwritten(self) -> None:
        memory = bytearray(5)

        def overwritten() -> Iterator[memoryview]:
            for first in range(0, 50, 5):
                memory[:] = CONTENT[first : first + 5]
                yield memoryview(memory)

        assert b"".join(map(bytes, io_read.whole_items(overwritten(), 4))) == CONTENT[:50]

    def test_chunks_of_a_derived_stream(self) -> None:
        assert list(io_read.read_chunks(Derived(5, lambda: (b"ab", b"", b"cde")))) == [b"ab", b"", b"cde"]

    @pytest.mark.parametrize("length", [4, 6])
    def test_a_derived_stream_must_keep_its_promise(self, length: int) -> None:
        with pytest.raises(DamagedFile, match=f"{length} bytes are expected"):
            list(io_read.read_chunks(Derived(length, lambda: (b"ab", b"cde"))))

    def test_no_byte_too_many_is_handed_on(self) -> None:
        chunks = io_read.read_chunks(Derived(4, lambda: (b"ab", b"cde")))
        assert next(chunks) == b"ab"
        with pytest.raises(DamagedFile):
            next(chunks)

    def test_a_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(WriteFailed, match="No such file") as caught:
            open_source(tmp_path / "none")
        assert caught.value.path == str(tmp_path / "none")

    def test_a_folder(self, tmp_path: Path) -> None:
        with pytest.raises(Unsupported, match="is a folder"):
            open_source(tmp_path)

    def test_a_pipe_does_not_wait_for_a_writer(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "fifo")
        with pytest.raises(Unsupported, match="is a pipe"):
            open_source(tmp_path / "fifo")

    def test_a_device(self) -> None:
        with pytest.raises(Unsupported, match="is a device"):
            open_source(os.devnull)

    def test_a_name_that_is_no_valid_text(self, tmp_path: Path) -> None:
        path = os.fsdecode(bytes(tmp_path) + b"/\xff\xfe\n")
        try:
            Path(path).write_bytes(b"abc")
        except OSError:
            pytest.skip("the file system takes valid UTF-8 only")
        assert read_exact(ByteRange(path, 1, 2)) == b"bc"
        with pytest.raises(Truncated) as caught:
            read_exact(ByteRange(path, 1, 3))
        assert str(caught.value).isprintable()

    def test_descriptors_are_closed(self, source: str, tmp_path: Path) -> None:
        descriptors = Path("/proc/self/fd")
        if not descriptors.is_dir():
            pytest.skip("no /proc")
        before = len(list(descriptors.iterdir()))
        read_exact(ByteRange(source, 0, 1))
        list(io_read.read_chunks(ByteRange(source, 0, 10)))
        with pytest.raises(Unsupported):
            open_source(tmp_path)
        assert len(list(descriptors.iterdir())) == before


class TestCopying:
    def test_appends_at_the_current_position(self, source: str, out: int) -> None:
        os.write(out, b"head")
        copy_range(ByteRange(source, 5, 250_000), out)
        os.write(out, b"tail")
        assert written(out) == b"head" + CONTENT[5:250_005] + b"tail"

    def test_progress_counts_to_the_end(self, source: str, out: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(io_copy, "KERNEL_CHUNK", 100_000)
        calls: list[tuple[int, int]] = []
        copy_range(ByteRange(source, 0, 300_000), out, lambda done, total: calls.append((done, total)))
        assert calls == [(100_000, 300_000), (200_000, 300_000), (300_000, 300_000)]

    @pytest.mark.parametrize(
        ("head", "offset", "kernel"), [(0, 0, True), (4096, 0, True), (5, 4101, True), (5, 0, False), (0, 64, False)]
    )
    def test_the_kernel_copies_what_lies_alike_in_its_pages(
        self, source: str, out: int, monkeypatch: pytest.MonkeyPatch, head: int, offset: int, kernel: bool
    ) -> None:
        calls = []
        means = platform.kernel_copies()[0]

        def counted(*arguments: int) -> int:
            calls.append(arguments)
            return means(*arguments)

        monkeypatch.setattr(platform, "kernel_copies", lambda: [counted])
        sink = io_copy.Sink(out, lambda count: None)
        with open_source(source) as reader:
            sink.add(bytes(head))
            sink.copy(reader, offset, 200_000)
        assert written(out) == bytes(head) + CONTENT[offset : offset + 200_000]
        assert bool(calls) == kernel

    def test_into_a_pipe(self, source: str) -> None:
        read, write = os.pipe()
        with open(read, "rb") as end:
            with open(write, "wb"):
                copy_range(ByteRange(source, 0, 1000), write)
            assert end.read() == CONTENT[:1000]

    @pytest.mark.skipif(not hasattr(os, "copy_file_range"), reason="this system has no copy_file_range")
    @pytest.mark.parametrize("number", FALLBACKS, ids=errno.errorcode.get)
    @pytest.mark.parametrize("already", [0, 1])
    def test_goes_on_by_other_means_where_it_stopped(
        self, source: str, out: int, monkeypatch: pytest.MonkeyPatch, number: int, already: int
    ) -> None:
        """Call number `already` fails; those before it copied 70,000 bytes each."""
        copy_file_range = os.copy_file_range
        calls = []

        def failing(src: int, dst: int, count: int, offset_src: int) -> int:
            calls.append(offset_src)
            if len(calls) > already:
                raise OSError(number, os.strerror(number))
            return copy_file_range(src, dst, min(count, 70_000), offset_src)

        monkeypatch.setattr(os, "copy_file_range", failing)
        copy_range(ByteRange(source, 0, 290_000), out)
        assert written(out) == CONTENT[:290_000]
        assert calls == [0, 70_000][: already + 1]

    @pytest.mark.parametrize("number", FALLBACKS, ids=errno.errorcode.get)
    def test_reads_and_writes_where_the_kernel_copies_nothing(
        self, source: str, out: int, monkeypatch: pytest.MonkeyPatch, number: int
    ) -> None:
        def failing(*arguments: object) -> int:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "copy_file_range", failing, raising=False)
        monkeypatch.setattr(os, "sendfile", failing, raising=False)
        copy_range(ByteRange(source, 0, 290_000), out)
        assert written(out) == CONTENT[:290_000]

    def test_an_answer_of_zero_is_not_taken_for_the_end(
        self, source: str, out: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "copy_file_range", lambda *arguments: 0, raising=False)
        monkeypatch.setattr(os, "sendfile", lambda *arguments: 0, raising=False)
        copy_range(ByteRange(source, 0, 200_000), out)
        assert written(out) == CONTENT[:200_000]

    @pytest.mark.parametrize("kernel", [True, False])
    def test_a_source_that_shrank_is_truncated_and_no_loop(
        self, source: str, out: int, monkeypatch: pytest.MonkeyPatch, kernel: bool
    ) -> None:
        if not kernel:
            without_kernel(monkeypatch)
        with open_source(source) as reader:
            os.truncate(source, 200_000)
            sink = io_copy.Sink(out, lambda count: None)
            with pytest.raises(Truncated) as caught:
                sink.copy(reader, 8192, 290_000)
        assert caught.value.path == source
        assert CONTENT[8192:200_000].startswith(written(out))

    def test_short_writes_are_continued(self, source: str, out: int, monkeypatch: pytest.MonkeyPatch) -> None:
        without_kernel(monkeypatch)
        write = os.write
        monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:9999]))
        copy_range(ByteRange(source, 0, 250_000), out)
        assert written(out) == CONTENT[:250_000]

    def test_a_write_that_takes_nothing_is_an_error(
        self, source: str, out: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "write", lambda fd, data: 0)
        with pytest.raises(OSError, match="accepted no bytes"):
            copy_range(ByteRange(source, 0, 10), out)

    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
    def test_a_full_disk_is_not_tried_again(
        self, source: str, out: int, monkeypatch: pytest.MonkeyPatch, number: int
    ) -> None:
        def full(*arguments: object) -> int:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "copy_file_range", full, raising=False)
        monkeypatch.setattr(os, "sendfile", full, raising=False)
        monkeypatch.setattr(os, "write", full)
        with pytest.raises(OSError) as caught:
            copy_range(ByteRange(source, 0, 250_000), out)
        assert caught.value.errno == number
        assert written(out) == b""

    def test_small_pieces_are_written_together(self, source: str, out: int, monkeypatch: pytest.MonkeyPatch) -> None:
        sizes = []
        write = os.write

        def counted(fd: int, data: bytes) -> int:
            sizes.append(len(data))
            return write(fd, data)

        monkeypatch.setattr(os, "write", counted)
        sink = io_copy.Sink(out, lambda count: None)
        expected = b""
        with open_source(source) as reader:
            for number in range(1000):
                sink.add(b"literal")
                sink.copy(reader, number, 2000)
                expected += b"literal" + CONTENT[number : number + 2000]
            sink.flush()
        assert written(out) == expected
        assert len(sizes) <= len(expected) // io_copy.WRITE + 2
