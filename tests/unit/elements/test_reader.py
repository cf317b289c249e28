"""The one reader of elements: every element once, whatever the blocks, chunks and parts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from builders import safetensors, written
from ranges import small_blocks

from ckptfix.checkpoint import ByteRange, Derived
from ckptfix.elements import reader
from ckptfix.elements.arrays import Encoding
from ckptfix.elements.nonfinite import PATTERNS, NonFinite
from ckptfix.elements.reader import Content, content, read_each, reduced
from ckptfix.errors import CkptfixError, Unsupported
from ckptfix.formats import open_checkpoint
from ckptfix.io.read import whole_items
from ckptfix.io.source import Readers

OTHER = "big" if sys.byteorder == "little" else "little"


class Seen:
    """A reducer that keeps the elements, in order."""

    def __init__(self) -> None:
        self.elements: list[float] = []

    def add(self, block: np.ndarray) -> None:
        self.elements += block.tolist()

    def join(self, other: Seen) -> None:
        self.elements += other.elements

    @classmethod
    def each(cls, block: np.ndarray, count: int) -> Iterator[Seen]:
        for start in range(0, len(block), count):
            made = cls()
            made.add(block[start : start + count])
            yield made


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "CHUNK", 64)
    monkeypatch.setattr(reader, "STRETCH", 16)
    monkeypatch.setattr(reader, "PART", 32)
    small_blocks(monkeypatch, 64)
    monkeypatch.setattr(reader, "TASK", 200)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("others", [0, 3])
def test_every_element_is_read_once_in_order(tmp_path: Path, stream: bool, others: int) -> None:
    values = np.arange(1000, dtype=np.int32)
    raw = values.tobytes()
    path = written(tmp_path / "raw", raw)
    data = Derived(len(raw), lambda: (raw[at : at + 7] for at in range(0, len(raw), 7)))
    held = data if stream else ByteRange(str(path), 0, len(raw))
    whole = Content(held, 0, len(raw), Encoding.of("int32", sys.byteorder))
    told: list[tuple[int, int]] = []
    found = reduced(dict.fromkeys(range(1 + others), whole), Seen, lambda *done: told.append(done))
    assert [row.elements for row in found.values()] == [values.tolist()] * (1 + others)
    total = len(raw) * (1 + others)
    assert told[-1] == (total, total) and told == sorted(told)
    if stream and not others:  # the progress of a lone stream is reported as it is read, so that it can be stopped
        assert len(told) == -(-len(raw) // 64)
    with Readers() as readers:
        blocks = [block.tolist() for block in whole.blocks(readers, 300)]
    assert [len(block) for block in blocks] == [300, 300, 300, 100] and [
        x for block in blocks for x in block
    ] == values.tolist()


def test_a_tensor_in_a_file_of_the_other_byte_order() -> None:
    values = np.array([1.5, -2.0, np.inf])
    foreign = Encoding.of("float64", OTHER)
    raw = foreign.stored(values.copy())
    assert raw == values.byteswap().tobytes()
    assert foreign.decoded(raw).tolist() == values.tolist()
    assert Encoding.of("float64", "big").little_endian(values.astype(">f8").tobytes()) == values.astype("<f8").tobytes()


def test_a_view_without_end_is_not_read(tmp_path: Path) -> None:
    path = written(tmp_path / "a.safetensors", safetensors([("w", "F32", [2], bytes(8))]))
    place = content(open_checkpoint(path).entries[0], "little")
    endless = Content(place.data, place.start, place.nbytes, place.encoding, endless=True)
    assert reduced({"": endless}, Seen) == {}
    with Readers() as readers, pytest.raises(Unsupported, match="repeats its storage"):
        next(endless.blocks(readers))


def test_an_error_in_one_item_ends_the_reading() -> None:
    def read(item: int, _: Readers) -> int:
        if item == 3:
            raise CkptfixError("no")
        return item

    found = read_each(range(10), read, lambda _: 1000)
    with pytest.raises(CkptfixError, match="no"):
        list(found)


@pytest.mark.parametrize("name", [name for name in PATTERNS if name != "complex32"])
@pytest.mark.parametrize("byteorder", ["little", "big"])
def test_bits_and_numbers_have_the_same_counts(name: str, byteorder: str) -> None:
    import torch

    dtype = getattr(torch, name)
    values = torch.tensor([0.0, -1.0, float("nan"), float("inf"), -float("inf"), 3.0]).to(dtype)
    encoding = Encoding.of(name, byteorder)
    native = Encoding.of(name, sys.byteorder)
    raw = values.view(torch.uint8).numpy().tobytes()
    if encoding.swap:
        raw = np.frombuffer(raw, f"u{native.dtype.unit}").byteswap().tobytes()
    by_bits, by_numbers = NonFinite(), NonFinite()
    by_bits.add_bits(raw + b"\x7f" * (native.dtype.unit - 1), encoding)  # what is no whole number is not counted
    by_numbers.add(encoding.decoded(raw))
    assert (by_bits.nan, by_bits.infinite) == (by_numbers.nan, by_numbers.infinite) == (1, 2)


def test_chunks_of_whole_items() -> None:
    raw = bytes(range(50))
    for step in (1, 3, 7, 8, 50):
        found = list(whole_items((raw[at : at + step] for at in range(0, 50, step)), 8))
        assert b"".join(found) == raw and all(len(chunk) % 8 == 0 for chunk in found[:-1])
        assert len(found[-1]) % 8 in (0, 2)
