"""Checksums of what lies in pieces, each of which is summed by itself."""

from __future__ import annotations

import random
import zlib
from pathlib import Path

import pytest

from ckptfix.checkpoint import ByteRange, Segment
from ckptfix.errors import Truncated
from ckptfix.io.checksums import PORTION, Checksums, crc32_of_pieces
from ckptfix.io.parallel_map import _Scratch


def test_pieces_large_and_small_have_the_checksum_of_the_whole(tmp_path: Path) -> None:
    data = random.Random(0).randbytes(3 * PORTION + 500)
    path = tmp_path / "in"
    path.write_bytes(data)
    chance = random.Random(1)
    for _ in range(12):
        pieces: list[Segment] = []
        whole = b""
        for _ in range(chance.randrange(5)):
            length = chance.choice([0, 1, 300, PORTION - 1, PORTION, PORTION + 7])
            start = chance.randrange(len(data) - length)
            part = data[start : start + length]
            whole += part
            pieces.append(part if chance.random() < 0.3 else ByteRange(str(path), start, length))
        assert crc32_of_pieces(pieces) == zlib.crc32(whole)


def test_an_error_belongs_to_its_own_range(tmp_path: Path) -> None:
    """Small ranges are summed in one task; what ends one of them says nothing of the others."""
    path = tmp_path / "in"
    path.write_bytes(bytes(100))
    sums = Checksums([ByteRange(str(path), 0, 10), ByteRange(str(path), 95, 10), ByteRange(str(path), 0, 20)])
    assert sums.value(0) == zlib.crc32(bytes(10)) and sums.value(2) == zlib.crc32(bytes(20))
    for _ in range(2):
        with pytest.raises(Truncated) as caught:
            sums.value(1)
        assert caught.value.offset == 95


def test_memory_that_is_used_again_fits_whatever_is_asked_for() -> None:
    scratch = _Scratch()
    for lengths in ([5], [3, 9], [9], [], [10, 1, 2], [1]):
        views = scratch.views(lengths)
        assert [len(view) for view in views] == lengths
        for number, view in enumerate(views):
            view[:] = bytes([number]) * len(view)
        assert [bytes(view) for view in views] == [bytes([number]) * n for number, n in enumerate(lengths)]
