"""A file whose blocks were being moved when the machine stopped: the gap is found and closed, wherever it is."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import cast

import pytest

from ckptfix.errors import DamagedFile
from ckptfix.io.inplace import shifted
from ckptfix.io.inplace.disk import EditedFile
from ckptfix.io.inplace.record import FileChange

BLOCK = 8


class Blocks:
    """A file in memory: a block is its bytes, or None where there is none."""

    name = "file"

    def __init__(self, blocks: list[bytes | None]) -> None:
        self.blocks = blocks

    @property
    def size(self) -> int:
        return BLOCK * len(self.blocks)

    def read(self, offset: int, length: int) -> bytes:
        return b"".join(block or bytes(BLOCK) for block in self.blocks)[offset : offset + length]

    def resize(self, size: int) -> None:
        del self.blocks[size // BLOCK :]

    def remove(self, offset: int, length: int) -> None:
        del self.blocks[offset // BLOCK : (offset + length) // BLOCK]

    def holes(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        for number, block in enumerate(self.blocks):
            begin, stop = max(number * BLOCK, start), min((number + 1) * BLOCK, end)
            if block is None and begin < stop:
                if found and found[-1][1] == begin:
                    begin = found.pop()[0]
                found.append((begin, stop))
        yield from found

    def sync(self) -> None:
        pass


def change_of(blocks: list[bytes | None], count: int) -> FileChange:
    """What is remembered of a file before that many blocks are put in front of it."""
    file = cast(EditedFile, Blocks(list(blocks)))
    return FileChange(
        "file", file.size, file.size + count * BLOCK, ((0, b""),), (), count * BLOCK,
        shifted.probes_of(file, 0, file.size, BLOCK), shifted.holes_of(file, 0, file.size),
    )  # fmt: skip


def cut_off(blocks: list[bytes | None], count: int, place: int) -> Blocks:
    """The same file with the gap at one of its blocks."""
    return Blocks([*blocks[:place], *[None] * count, *blocks[place:]])


def closed(file: Blocks, change: FileChange) -> list[bytes | None]:
    shifted.close_gap(cast(EditedFile, file), change, 0)
    return file.blocks


@pytest.mark.parametrize("seed", range(12))
def test_the_gap_is_closed_wherever_it_is(seed: int) -> None:
    """Of blocks that are alike: what is read is as before, and what had no blocks has none where that can be told."""
    dice = random.Random(seed)
    told = 0
    for _ in range(40):
        blocks = [dice.choice([b"aaaaaaaa", b"bbbbbbbb", None, bytes(BLOCK)]) for _ in range(dice.randrange(1, 7))]
        count = dice.randrange(1, 3)
        change = change_of(blocks, count)
        for place in range(len(blocks) + 1):
            found = closed(cut_off(blocks, count, place), change)
            assert b"".join(block or bytes(BLOCK) for block in found) == Blocks(blocks).read(0, 99)
            told += found == blocks
    assert told > 40


def test_holes_tell_where_the_gap_is() -> None:
    """The content alone would do with the gap at either of two places."""
    blocks = [b"aaaaaaaa", bytes(BLOCK), None, bytes(BLOCK), b"aaaaaaaa"]
    change = change_of(blocks, 1)
    for place in range(len(blocks) + 1):
        assert closed(cut_off(blocks, 1, place), change) == blocks


@pytest.mark.parametrize("place", [1, 2, 3])
def test_what_another_program_wrote_is_seen(place: int) -> None:
    blocks: list[bytes | None] = [bytes([65 + number]) * BLOCK for number in range(5)]
    file = cut_off(blocks, 1, 4)
    file.blocks[place] = b"????????"
    before = list(file.blocks)
    with pytest.raises(DamagedFile):
        closed(file, change_of(blocks, 1))
    assert file.blocks == before


@pytest.mark.parametrize(("most", "refused"), [(4 * BLOCK, False), (4 * BLOCK - 1, True)])
def test_so_much_is_read_to_see_that_two_places_come_to_the_same(
    most: int, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shifted, "LOOK", most)
    blocks: list[bytes | None] = [bytes(BLOCK)] * 4
    change = change_of(blocks, 1)
    file = Blocks([None, *[bytes(BLOCK)] * 3, None])
    if refused:
        with pytest.raises(DamagedFile):
            closed(file, change)
    else:
        assert Blocks(closed(file, change)).read(0, 99) == bytes(4 * BLOCK)


@pytest.mark.parametrize(("start", "size", "offsets"), [
    (0, 0, []), (3, 3, []), (0, 1, [0]), (3, 40, [3, 8, 16, 24, 32]), (8, 33, [8, 16, 24, 32]), (7, 8, [7]),
])  # fmt: skip
def test_each_block_of_a_small_file_is_probed(start: int, size: int, offsets: list[int]) -> None:
    file = cast(EditedFile, Blocks([bytes([number]) * BLOCK for number in range(5)]))
    probes = shifted.probes_of(file, start, size, BLOCK)
    assert [probe.offset for probe in probes] == offsets
    assert all(probe.offset // BLOCK == (probe.offset + probe.length - 1) // BLOCK for probe in probes)
    assert not probes or probes[-1].offset + probes[-1].length == size
