"""Tensors put together from the chunks that they were cut into, and ranges of files that are not there."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfix.checkpoint import ByteRange, OutputFile, RangeCheck, Segment
from ckptfix.checkpoint.byte_ranges import in_one_piece
from ckptfix.errors import DamagedFile, Truncated
from ckptfix.io.chunks import MAX_WORK, MOST, PART, Chunk, tiled
from ckptfix.io.derived import BLOCK
from ckptfix.io.read import read_chunks, read_from
from ckptfix.io.source import open_source
from ckptfix.io.virtual_files import SplicedFile, SplicedPiece, part_of

Box = tuple[tuple[int, ...], tuple[int, ...]]


def boxes_of(shape: Sequence[int], rng: random.Random, depth: int = 0) -> list[Box]:
    """The boxes that a tensor falls into when it is cut in two again and again, along any dimension."""
    able = [axis for axis, size in enumerate(shape) if size > 1]
    if not able or depth > 3 or rng.random() < 0.2:
        return [((0,) * len(shape), tuple(shape))]
    axis = rng.choice(able)
    cut = rng.randrange(1, shape[axis])
    found = []
    for first, size in ((0, cut), (cut, shape[axis] - cut)):
        part = list(shape)
        part[axis] = size
        for offsets, sizes in boxes_of(part, rng, depth + 1):
            moved = list(offsets)
            moved[axis] += first
            found.append((tuple(moved), sizes))
    return found


def chunks_of(array: np.ndarray, boxes: Sequence[Box], path: Path) -> list[Chunk]:
    chunks = []
    with path.open("wb") as file:
        for offsets, sizes in boxes:
            box = tuple(slice(first, first + size) for first, size in zip(offsets, sizes, strict=True))
            data = array[box].tobytes()
            chunks.append(Chunk(offsets, sizes, ByteRange(str(path), file.tell(), len(data))))
            file.write(data)
    return chunks


def content(segments: Sequence[Segment]) -> bytes:
    return b"".join(segment if isinstance(segment, bytes) else b"".join(read_chunks(segment)) for segment in segments)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    shape=st.lists(st.integers(1, 9), max_size=4),
    seed=st.integers(0, 1 << 30),
    block=st.sampled_from([4 << 20, 64, 8]),
    itemsize=st.sampled_from([1, 2, 4, 8]),
)
def test_any_cut_is_joined_and_no_other_is_taken(
    shape: list[int], seed: int, block: int, itemsize: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rng = random.Random(seed)
    array = np.frombuffer(rng.randbytes(math.prod(shape) * itemsize), f"V{itemsize}").reshape(shape)
    boxes = boxes_of(shape, rng)
    rng.shuffle(boxes)
    chunks = chunks_of(array, boxes, tmp_path_factory.mktemp("tiles") / "data")
    with pytest.MonkeyPatch.context() as patch:
        # The bound of work is for real blocks: small ones take as many times the steps.
        patch.setattr("ckptfix.io.chunks.MAX_WORK", MAX_WORK * (BLOCK // block))
        patch.setattr("ckptfix.io.chunks.BLOCK", block)
        patch.setattr("ckptfix.io.chunks.PART", 0)
        segments, whole = tiled(shape, itemsize, chunks), array.tobytes()
        assert content(segments) == whole
        file = SplicedFile("whole", [len(whole)], lambda _: SplicedPiece(segments))
        first, last = sorted(rng.randrange(len(whole) + 1) for _ in range(2))
        # A part of a block is made of the rows that have it.
        assert content(list(file.pieces(first, last - first))) == whole[first:last]
        with open_source(file) as source:
            assert source.read(first, last - first) == whole[first:last]
        if len(chunks) > 1:
            left_out = rng.randrange(len(chunks))
            for others in ([*chunks[:left_out], *chunks[left_out + 1 :]], [*chunks, chunks[left_out]]):
                with pytest.raises(DamagedFile):
                    tiled(shape, itemsize, others)


def test_rows_are_ranges_and_only_shared_rows_are_streams(tmp_path: Path) -> None:
    array = np.arange(24, dtype=np.int32).reshape(6, 4)
    rows = chunks_of(array, [((0, 0), (2, 4)), ((2, 0), (4, 4))], tmp_path / "rows")
    assert all(isinstance(segment, ByteRange) for segment in tiled((6, 4), 4, rows))
    columns = chunks_of(array, [((0, 0), (6, 3)), ((0, 3), (6, 1))], tmp_path / "columns")
    (stream,) = tiled((6, 4), 4, columns)
    assert not isinstance(stream, ByteRange)
    assert {place.path for place in read_from(stream)} == {str(tmp_path / "columns")}


def test_a_part_of_a_block_reads_only_its_rows(tmp_path: Path) -> None:
    array = np.arange(64, dtype=np.int32).reshape(8, 8)
    (block,) = tiled((8, 8), 4, chunks_of(array, [((0, 0), (8, 5)), ((0, 5), (8, 3))], tmp_path / "columns"))
    whole = array.tobytes()
    for first, count in ((0, 32), (64, 96), (33, 70), (200, 56)):
        part = part_of(block, first, count)
        assert content([part]) == whole[first : first + count]
        rows = -(-(first + count) // 32) - first // 32
        assert sum(place.length for place in read_from(part)) == rows * 32


@pytest.mark.slow
def test_many_chunks_make_larger_blocks(tmp_path: Path) -> None:
    """So that each read is worth a call, and its checksum worth remembering."""
    place = ByteRange("none", 0, (64 << 20) // 64)
    chunks = [Chunk((0, column * 128), (4096, 128), place) for column in range(64)]
    blocks = [segment for segment in tiled((4096, 64 * 128), 2, chunks) if not isinstance(segment, bytes)]
    assert {segment.length for segment in blocks} == {64 * PART}
    assert {place.length for segment in blocks for place in read_from(segment)} == {PART}
    assert all(segment.length <= MOST for segment in tiled((4096, 64 * 128), 2, chunks[:32] + [
        Chunk((0, 4096 + column), (4096, 1), place.sub(0, 8192)) for column in range(4096)
    ]) if not isinstance(segment, bytes))


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ([((0, 0), (2, 4))], "no chunk holds rows 2 to 5"),
        ([((0, 0), (6, 3))], r"no chunk holds rows 3 to 3 at \[0\]"),
        ([((0, 0), (6, 4)), ((1, 0), (2, 4))], "2 chunks hold"),
        ([((0, 0), (7, 4))], r"reaches outside of \[6, 4\]"),
        ([((-1, 0), (6, 4))], r"reaches outside of \[6, 4\]"),
        ([((0,), (6,))], r"wrong number of dimensions for \[6, 4\]"),
        ([], r"no chunk holds its \[6, 4\]"),
    ],
)
def test_what_does_not_tile_is_named(boxes: list[Box], message: str) -> None:
    place = ByteRange("none", 0, 1 << 20)
    chunks = [Chunk(offsets, sizes, place.sub(0, 4 * max(math.prod(sizes), 0))) for offsets, sizes in boxes]
    with pytest.raises(DamagedFile, match=message):
        tiled((6, 4), 4, chunks)


def test_a_chunk_has_as_many_bytes_as_its_sizes_say() -> None:
    with pytest.raises(DamagedFile, match="needs 96 bytes, but has 95"):
        tiled((6, 4), 4, [Chunk((0, 0), (6, 4), ByteRange("none", 0, 95))])


def test_nothing_and_one_number(tmp_path: Path) -> None:
    assert tiled((0, 4), 4, []) == ()
    assert tiled((2, 0), 4, [Chunk((0, 0), (2, 0), ByteRange("none", 0, 0))]) == ()
    place = ByteRange("none", 7, 8)
    assert tiled((), 8, [Chunk((), (), place)]) == (place,)
    with pytest.raises(DamagedFile, match="2 chunks hold the element"):
        tiled((), 8, [Chunk((), (), place), Chunk((), (), place)])


@pytest.mark.slow
def test_crossing_chunks_without_end_are_refused_soon() -> None:
    """Staircases of rows and columns that all cross: work grows with their number, not with its square."""
    count = 20_000
    place = ByteRange("none", 0, 4 * count)
    chunks = [Chunk((row, 0), (1, count), place) for row in range(count)]
    chunks += [Chunk((0, column), (count, 1), place) for column in range(count)]
    with pytest.raises(DamagedFile, match=r"too many chunks|2 chunks hold|chunks hold"):
        tiled((count, count), 4, chunks)


@pytest.fixture
def pieces(tmp_path: Path) -> SplicedFile:
    (tmp_path / "a").write_bytes(bytes(range(100)))
    (tmp_path / "b").write_bytes(bytes(range(100, 200)))
    made = [
        SplicedPiece((ByteRange(str(tmp_path / "a"), 10, 5), ByteRange(str(tmp_path / "b"), 0, 5))),
        SplicedPiece(()),
        SplicedPiece(
            (b"literal", ByteRange(str(tmp_path / "a"), 0, 3)),
            (RangeCheck("w", ByteRange(str(tmp_path / "a"), 0, 3), 1),),
        ),
    ]
    return SplicedFile("FOLDER", [10, 0, 10], made.__getitem__)


def test_every_part_of_a_spliced_file_reads_as_its_pieces(pieces: SplicedFile) -> None:
    whole = bytes(range(10, 15)) + bytes(range(100, 105)) + b"literal" + bytes(range(3))
    with open_source(pieces) as source:
        assert source.size == pieces.size == len(whole)
        for start, stop in itertools.combinations_with_replacement(range(len(whole) + 1), 2):
            assert source.read(start, stop - start) == whole[start:stop]
            place = ByteRange(pieces, start, stop - start)
            assert content(list(pieces.pieces(start, stop - start))) == whole[start:stop]
            assert content(OutputFile.of("out", [place]).segments) == whole[start:stop]
            assert b"".join(source.chunks(start, stop - start, 4)) == whole[start:stop]
        with pytest.raises(Truncated):
            source.read(15, 6)


def test_a_plan_names_only_files_that_are_there(pieces: SplicedFile, tmp_path: Path) -> None:
    file = OutputFile.of("out", [pieces.place(0), pieces.place(1), pieces.place(2)])
    assert {place.path for segment in file.segments for place in read_from(segment)} == {
        str(tmp_path / "a"),
        str(tmp_path / "b"),
    }
    assert list(pieces.checks(pieces.place(2))) and not list(pieces.checks(pieces.place(0)))
    assert in_one_piece(ByteRange(pieces, 1, 2)) == ByteRange(str(tmp_path / "a"), 11, 2)
    assert in_one_piece(pieces.place(0)) == pieces.place(0)


def test_a_piece_is_looked_up_when_it_is_needed_and_once() -> None:
    asked: list[int] = []

    def make(index: int) -> SplicedPiece:
        asked.append(index)
        return SplicedPiece((b"12345",))

    name = SplicedFile("FOLDER", [5, 5, 5], make)
    _ = name.place(1), name.size
    assert asked == []
    with open_source(name) as source:
        assert source.read(5, 5) == source.read(5, 5) == b"12345"
    assert asked == [1]


def test_a_piece_of_another_size_is_damage() -> None:
    with (
        pytest.raises(DamagedFile, match="5 bytes are expected, but 4 were found"),
        open_source(SplicedFile("FOLDER", [5], lambda index: SplicedPiece((b"1234",)))) as source,
    ):
        source.read(0, 5)
