"""Derived segments: the right bytes, in bounded memory, and damage reported as damage."""

from __future__ import annotations

import math
import random
import threading
import time
import tracemalloc
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided
from ranges import small_blocks

from ckptfix.checkpoint import ByteRange, Data, Derived, OutputFile, Plan, Segment
from ckptfix.errors import CkptfixError, DamagedFile, Truncated
from ckptfix.io import checksums as io_sums
from ckptfix.io import derived as streams
from ckptfix.io import threads as io_threads
from ckptfix.io.checksums import Checksums, crc32_joined
from ckptfix.io.derived import byteswapped, gathered, inflated
from ckptfix.io.source import Source
from ckptfix.io.system import keep_freed_memory
from ckptfix.io.write import write_plan

AHEAD = 7
"""Bytes before the storage in the test files, so that a forgotten offset shows."""


def placed(folder: Path, content: bytes) -> ByteRange:
    path = folder / "data"
    path.write_bytes(b"\xee" * AHEAD + content + b"\xee" * 9)
    return ByteRange(str(path), AHEAD, len(content))


@contextmanager
def memory_below(limit: int) -> Iterator[None]:
    """Fails when more than `limit` bytes are allocated at once inside."""
    keep_freed_memory()  # takes a large block, once and for a moment
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < limit


def all_of(data: Derived) -> bytes:
    return b"".join(data.chunks())


@st.composite
def views(draw: st.DrawFn) -> tuple[int, list[int], list[int], int]:
    """itemsize, shape, stride, offset"""
    shape = draw(st.lists(st.integers(0, 6), max_size=5))
    stride = [draw(st.sampled_from([0, 1, 2, 3, 6, 36, 200])) for _ in shape]
    return draw(st.sampled_from([1, 2, 3, 4, 8, 16])), shape, stride, draw(st.integers(0, 5))


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> tuple[ByteRange, bytes]:
    content = random.Random(1).randbytes(200_000)
    return placed(tmp_path_factory.mktemp("gathered"), content), content


class TestGathered:
    @pytest.mark.slow
    @given(view=views(), block=st.sampled_from([16, 100, 4 << 20]), cost=st.sampled_from([0, 64, 4096]))
    @settings(max_examples=300, deadline=None)
    def test_as_numpy_sees_it(
        self,
        storage: tuple[ByteRange, bytes],
        view: tuple[int, list[int], list[int], int],
        block: int,
        cost: int,
    ) -> None:
        """Whatever the blocks and the price of a read, which decide how the storage is read."""
        data, content = storage
        itemsize, shape, stride, offset = view
        elements = numpy.frombuffer(content[: len(content) // itemsize * itemsize], f"V{itemsize}")
        expected = as_strided(elements[offset:], shape, [step * itemsize for step in stride]).tobytes()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(streams, "BLOCK", block)
            patch.setattr(streams, "READ_COST", cost)
            derived = gathered(data, itemsize, shape, stride, offset)
            assert all_of(derived) == expected
        assert derived.length == len(expected)
        assert derived.sources == (data,)

    def test_as_torch_sees_it(self, tmp_path: Path) -> None:
        torch = pytest.importorskip("torch")
        base = torch.arange(24 * 10, dtype=torch.int32)
        data = placed(tmp_path, base.numpy().tobytes())
        for view in (
            base.view(24, 10).t(),
            base.view(2, 3, 4, 10).permute(3, 1, 0, 2)[1:9:3],
            base[5],
            base[5:6].expand(7, 3),
            base.unfold(0, 20, 3),
        ):
            derived = gathered(data, 4, view.shape, view.stride(), view.storage_offset())
            assert all_of(derived) == view.contiguous().numpy().tobytes()

    @pytest.mark.parametrize(
        ("shape", "stride", "offset"),
        [((5,), (2,), 2), ((11,), (1,), 0), ((1,), (1,), 10), ((1,), (1,), -1), ((2, 3), (9, 1), 0), ((3,), (-1,), 5)],
    )
    def test_a_view_outside_its_storage(
        self, tmp_path: Path, shape: tuple[int, ...], stride: tuple[int, ...], offset: int
    ) -> None:
        data = placed(tmp_path, bytes(40))
        with pytest.raises(DamagedFile) as caught:
            gathered(data, 4, shape, stride, offset)
        assert caught.value.path == data.path

    def test_the_last_element_may_be_used(self, tmp_path: Path) -> None:
        data = placed(tmp_path, bytes(range(40)))
        assert all_of(gathered(data, 4, (2,), (9,), 0)) == bytes((0, 1, 2, 3, 36, 37, 38, 39))

    def test_no_elements(self, tmp_path: Path) -> None:
        data = ByteRange(str(tmp_path / "not even a file"), 0, 0)
        assert all_of(gathered(data, 4, (3, 0), (0, 1), 99)) == b""

    def test_nothing_is_read_before_it_is_asked_for(self, tmp_path: Path) -> None:
        assert gathered(ByteRange(str(tmp_path / "none"), 0, 100), 4, (5,), (5,), 0).length == 20

    @pytest.mark.slow
    def test_transposed_in_bounded_memory_and_few_reads(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        side = 2500
        matrix = numpy.arange(side * side, dtype=numpy.uint32).reshape(side, side)
        data = placed(tmp_path, matrix.tobytes())
        reads = []
        read = Source.read

        def counted(reader: Source, offset: int, length: int) -> bytes:
            reads.append(length)
            return read(reader, offset, length)

        monkeypatch.setattr(Source, "read", counted)
        digest = 0
        with memory_below(4 * streams.TURNED):
            for chunk in gathered(data, 4, (side, side), (1, side), 0).chunks():
                digest = zlib.crc32(chunk, digest)
        assert digest == zlib.crc32(matrix.T.tobytes())
        assert len(reads) < side * math.ceil(side * side * 4 / streams.BLOCK) * 1.1
        assert sum(reads) < 2 * side * side * 4

    @pytest.mark.slow
    def test_a_sparse_column_does_not_bring_the_whole_storage_into_memory(self, tmp_path: Path) -> None:
        path = tmp_path / "data"
        with open(path, "wb") as file:
            file.truncate(60_000_000)
            file.seek(2000 * 29_999)
            file.write(b"z")
        derived = gathered(ByteRange(str(path), 0, 60_000_000), 1, (30_000,), (2000,), 0)
        with memory_below(4 * streams.BLOCK):
            assert all_of(derived) == bytes(29_999) + b"z"

    def test_an_expanded_scalar_is_no_memory_bomb(self, tmp_path: Path) -> None:
        data = placed(tmp_path, b"abcd")
        derived = gathered(data, 4, (1 << 40, 3, 1 << 20), (0, 0, 0), 0)
        assert derived.length == 3 << 62
        with memory_below(4 * streams.BLOCK):
            chunks = iter(derived.chunks())
            assert next(chunks)[:8] == b"abcdabcd"
            next(chunks)


def deflated(content: bytes) -> bytes:
    stream = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return stream.compress(content) + stream.flush()


class TestInflated:
    @pytest.mark.parametrize("size", [0, 1, 65536, 1 << 20, (1 << 20) + 1, 3_000_000])
    @pytest.mark.parametrize("kind", ["zeros", "noise"])
    def test_the_content(self, tmp_path: Path, size: int, kind: str) -> None:
        content = bytes(size) if kind == "zeros" else random.Random(size).randbytes(size)
        packed = placed(tmp_path, deflated(content))
        assert all_of(inflated(packed, size)) == content

    @pytest.mark.parametrize("promised", [0, 1, 99_999, 100_001, 1 << 40])
    def test_another_length_than_promised(self, tmp_path: Path, promised: int) -> None:
        packed = placed(tmp_path, deflated(bytes(100_000)))
        made = 0
        with pytest.raises(DamagedFile, match="promised") as caught:
            for chunk in inflated(packed, promised).chunks():
                made += len(chunk)
        assert made <= promised
        assert (caught.value.path, caught.value.offset) == (packed.path, packed.offset)

    @pytest.mark.slow
    def test_a_bomb_is_stopped_at_the_promised_length(self, tmp_path: Path) -> None:
        packed = placed(tmp_path, deflated(bytes(1 << 28)))
        with memory_below(2 << 20), pytest.raises(DamagedFile):
            all_of(inflated(packed, 1000))

    def test_cut_anywhere(self, tmp_path: Path) -> None:
        content = random.Random(2).randbytes(300) + bytes(300)
        packed = placed(tmp_path, deflated(content))
        for length in range(packed.length):
            with pytest.raises(DamagedFile):
                all_of(inflated(packed.sub(0, length), len(content)))

    def test_a_flipped_bit_gives_an_error_or_bytes_of_the_promised_length(self, tmp_path: Path) -> None:
        content = b"abracadabra " * 40
        good = deflated(content)
        failed = 0
        for bit in range(len(good) * 8):
            bad = bytearray(good)
            bad[bit // 8] ^= 1 << bit % 8
            try:
                assert len(all_of(inflated(placed(tmp_path, bytes(bad)), len(content)))) == len(content)
            except DamagedFile:
                failed += 1
        assert failed > len(good)

    def test_bytes_behind_the_stream_are_left_alone(self, tmp_path: Path) -> None:
        packed = placed(tmp_path, deflated(b"content") + b"junk" * 100_000)
        assert all_of(inflated(packed, 7)) == b"content"


class TestByteswapped:
    @pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
    def test_as_numpy_does(self, tmp_path: Path, itemsize: int) -> None:
        content = random.Random(3).randbytes(itemsize * 300_001)
        expected = numpy.frombuffer(content, f"u{itemsize}").byteswap().tobytes()
        derived = byteswapped(placed(tmp_path, content), itemsize)
        assert (derived.length, all_of(derived)) == (len(content), expected)

    def test_chunks_that_cut_through_numbers(self) -> None:
        data = Derived(8, lambda: (b"a", b"", b"bcde", b"f", b"gh"))
        assert all_of(byteswapped(data, 4)) == b"dcbahgfe"

    def test_half_a_number(self, tmp_path: Path) -> None:
        with pytest.raises(DamagedFile):
            byteswapped(placed(tmp_path, bytes(7)), 4)


class TestChecksums:
    @given(st.binary(max_size=300), st.binary(max_size=300))
    def test_joined(self, first: bytes, second: bytes) -> None:
        assert crc32_joined(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)

    def test_of_short_long_empty_and_derived_ranges(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(io_threads, "TASK", 1000)
        small_blocks(monkeypatch, 300)
        content = random.Random(4).randbytes(60_000)
        data = placed(tmp_path, content)
        rng = random.Random(5)
        ranges: list[Data] = []
        expected = []
        for length in (0, 1, 999, 1000, 1001, 2000, 5500, 10, 10, 0, 30_000, 3, *rng.choices(range(3000), k=200)):
            start = rng.randrange(len(content) - length)
            ranges.append(data.sub(start, length))
            expected.append(zlib.crc32(content[start : start + length]))
        ranges.insert(3, Derived(6, lambda: (b"abc", b"def")))
        expected.insert(3, zlib.crc32(b"abcdef"))
        sums = Checksums(ranges)
        assert [sums.value(index) for index in range(len(ranges))] == expected
        backwards = Checksums(ranges)
        assert [backwards.value(index) for index in reversed(range(len(ranges)))] == expected[::-1]

    def test_as_segments_of_a_file(self, tmp_path: Path) -> None:
        data = placed(tmp_path, random.Random(6).randbytes(200_000))
        content = Path(data.path).read_bytes()[AHEAD:][: data.length]
        parts = [data.sub(offset, 20_000) for offset in range(0, 200_000, 20_000)]
        sums = Checksums(parts)
        segments: list[Segment] = []
        for index, part in enumerate(parts):
            segments += [part, sums.segment(index, lambda crc: crc.to_bytes(4, "little"), bytes(4))]
        write_plan(Plan((OutputFile.of(tmp_path / "out", segments),)))
        written = (tmp_path / "out").read_bytes()
        for index in range(10):
            piece = written[index * 20_004 :][:20_004]
            assert piece[:20_000] == content[index * 20_000 :][:20_000]
            assert int.from_bytes(piece[20_000:], "little") == zlib.crc32(piece[:20_000])

    def test_nothing_is_read_before_the_first_question(self, tmp_path: Path) -> None:
        threads = threading.active_count()
        sums = Checksums([ByteRange(str(tmp_path / "none"), 0, 5)])
        sums.segment(0, lambda crc: b"", b"")
        assert threading.active_count() == threads

    def test_it_stays_near_the_writer(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(io_threads, "TASK", 100)
        data = placed(tmp_path, bytes(100_000))
        summed = []
        real = io_sums._crc32_of

        def counted(task: Sequence[io_threads.RangeBlock]) -> list[int | CkptfixError]:
            summed.append(task)
            return real(task)

        monkeypatch.setattr(io_sums, "_crc32_of", counted)
        sums = Checksums([data.sub(offset, 100) for offset in range(0, 100_000, 100)])
        sums.value(0)
        assert len(sums._tasks) == 1000
        until = time.monotonic() + 60
        while len(summed) <= io_threads.AHEAD and time.monotonic() < until:
            time.sleep(0.001)
        sums._begun.close()
        assert len(summed) == io_threads.AHEAD + 1

    def test_an_error_reaches_whoever_asks(self, tmp_path: Path) -> None:
        data = placed(tmp_path, bytes(1000))
        sums = Checksums([data, ByteRange(data.path, 500, 5000)])
        with pytest.raises(Truncated) as caught:
            sums.value(1)
        assert (caught.value.path, caught.value.offset) == (data.path, 500)
