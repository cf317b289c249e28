"""Elements that are read straight into a parameter are those that a copy would give it; all else is copied."""

from __future__ import annotations

import mmap
import sys
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import rank_files
import torch
from torch import nn

import ckptfix
from ckptfix import platform
from ckptfix.errors import DamagedFile, Truncated
from ckptfix.io.source import BLOCK, open_source
from ckptfix.loaders import reading
from ckptfix.loaders.model import direct_read

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]
SIDE = 300


class One(nn.Module):
    weight: torch.Tensor

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)


def value(dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(0, 2 if dtype is torch.bool else 100, (SIDE, SIDE)).to(dtype)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each tensor was read directly."""
    seen: list[bool] = []
    planned = direct_read.planned

    def counted(*arguments: Any) -> Any:
        found = planned(*arguments)
        seen.append(found is not None)
        return found

    monkeypatch.setattr(direct_read, "planned", counted)
    return seen


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("twice", [False, True])
def test_the_same_values(
    tmp_path: Path, dtype: torch.dtype, twice: bool, taken: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    if twice:
        monkeypatch.setattr(reading, "TWICE", 1000)
    wanted = value(dtype)
    # A slice of rows of a larger storage, at an offset.
    whole = torch.cat([value(dtype), wanted, value(dtype)])
    torch.save({"weight": whole[SIDE : 2 * SIDE]}, tmp_path / "x.pth")
    model = One(torch.zeros((SIDE, SIDE), dtype=dtype))
    before = model.weight._version
    ckptfix.load_into(model, tmp_path / "x.pth")
    assert torch.equal(model.weight, wanted)
    assert taken == [True]
    assert model.weight._version > before, "autograd has to see that the tensor was written to"


_in_shares = reading.Reading._in_shares


def _in_small_shares(self: reading.Reading, share: int, rows: Any, most: int, progress: reading.Progress) -> list[int]:
    assert most >= sum(len(row.view) for row in rows) / 2
    return _in_shares(self, rows, share, progress)


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SIDE, SIDE))


def test_pieces_in_several_files_are_shared_among_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every byte arrives and is summed, however the shares are cut; a flipped one is found in whichever it is."""
    monkeypatch.setattr(reading, "TWICE", 1000)
    wanted = value(torch.float32)
    for rank in range(3):
        rows: dict[str, rank_files.Placed] = {"weight": (wanted, ("0",))}
        rank_files.distributed(tmp_path / f"model_world_size_3_rank_{rank}.pt", rank, (3,), rows)
    for share in (777, 4096, 1 << 20):
        monkeypatch.setattr(reading.Reading, "_in_shares", partialmethod(_in_small_shares, share))
        model = Several()
        ckptfix.load_into(model, tmp_path)
        assert torch.equal(model.weight, wanted)
        assert torch.equal(ckptfix.load_state_dict(tmp_path)["weight"], wanted)
    damaged = tmp_path / "model_world_size_3_rank_1.pt"
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    model = Several()
    for load in (lambda: ckptfix.load_state_dict(tmp_path), lambda: ckptfix.load_into(model, tmp_path)):
        with pytest.raises(DamagedFile) as caught:
            load()
        assert caught.value.path == str(damaged) and model.weight.eq(0).all()


def test_an_error_in_one_thread_ends_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "TWICE", 1000)
    monkeypatch.setattr(reading.Reading, "_in_shares", partialmethod(_in_small_shares, 1000))
    torch.save({"weight": value(torch.float32)}, tmp_path / "x.pth")
    filled = reading.Reading._filled
    calls = []

    def failing(self: reading.Reading, row: Any) -> int:
        calls.append(row)
        if len(calls) > 5:
            raise DamagedFile("no more")
        return filled(self, row)

    monkeypatch.setattr(reading.Reading, "_filled", failing)
    with pytest.raises(DamagedFile, match="no more; weight may be partly overwritten"):
        ckptfix.load_into(Several(), tmp_path / "x.pth", verify=False)
    assert len(calls) <= 7, "each of the two threads ends at its first error"


@pytest.mark.parametrize("has_calls", [True, False])
def test_memory_that_was_never_used_is_filled_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_calls: bool
) -> None:
    """The kernel provides its pages beforehand, and those alone that are filled; without such a call, on the way."""
    room = mmap.mmap(-1, 4 * BLOCK)
    page = mmap.PAGESIZE
    first, other = memoryview(room)[page + 64 : 3 * BLOCK], memoryview(room)[3 * BLOCK + page :]
    if not has_calls:
        monkeypatch.setattr(platform, "_memory_calls", lambda: None)
    untouched = has_calls and sys.platform == "linux"
    assert platform.is_untouched(first) is untouched is platform.is_untouched(other)
    assert not platform.is_untouched(first[:page]), "no page is whole in it"
    wanted = torch.randint(-100, 100, (len(first) // 8,), dtype=torch.int64)
    torch.save({"weight": wanted}, tmp_path / "x.pth")
    model = One(torch.frombuffer(first, dtype=torch.int64))
    ckptfix.load_into(model, tmp_path / "x.pth")
    assert torch.equal(model.weight, wanted)
    assert not platform.is_untouched(first)
    assert platform.is_untouched(other) is untouched
    platform.touch(first)
    assert torch.equal(model.weight, wanted), "memory in use keeps its content"
    platform.touch(other)
    assert not any(other) and not platform.is_untouched(other)


@pytest.mark.parametrize(
    ("saved", "target"),
    [
        (lambda: value(torch.float32).t(), lambda: torch.zeros(SIDE, SIDE)),
        (lambda: value(torch.float32), lambda: torch.zeros(SIDE, SIDE).t()),
        (lambda: value(torch.float32), lambda: torch.zeros(SIDE, 2 * SIDE)[:, ::2]),
        (lambda: value(torch.float32), lambda: torch.zeros(SIDE, SIDE, dtype=torch.float64)),
        (lambda: value(torch.float64), lambda: torch.zeros(SIDE, SIDE)),
        (lambda: torch.randn(SIDE, SIDE, dtype=torch.complex64).conj(), lambda: torch.zeros(SIDE, SIDE) + 0j),
        (lambda: value(torch.float32), lambda: torch.zeros(SIDE, SIDE).to_mkldnn().to_dense().t()),
    ],
)
def test_what_lies_otherwise_is_copied(tmp_path: Path, saved: Any, target: Any, taken: list[bool]) -> None:
    wanted = saved()
    torch.save({"weight": wanted}, tmp_path / "x.pth")
    model = One(target())
    ckptfix.load_into(model, tmp_path / "x.pth")
    assert torch.equal(model.weight, wanted.to(model.weight.dtype))
    assert taken == [False]


def test_a_part_of_a_larger_memory_keeps_the_rest(tmp_path: Path, taken: list[bool]) -> None:
    wanted = value(torch.float32)
    torch.save({"weight": wanted}, tmp_path / "x.pth")
    memory = torch.full((3, SIDE, SIDE), 7.0)
    model = One(memory[1])
    ckptfix.load_into(model, tmp_path / "x.pth")
    assert taken == [True]
    assert torch.equal(memory[1], wanted)
    assert memory[0].eq(7).all() and memory[2].eq(7).all()


def test_a_checksum_is_compared_before_anything_is_changed(tmp_path: Path) -> None:
    torch.save({"weight": value(torch.float32)}, tmp_path / "x.pth")
    data = bytearray((tmp_path / "x.pth").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "x.pth").write_bytes(data)
    model = One(torch.zeros(SIDE, SIDE))
    with pytest.raises(DamagedFile, match="checksum"):
        ckptfix.load_into(model, tmp_path / "x.pth")
    assert model.weight.eq(0).all()


def test_a_range_beyond_the_end_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(range(100)))
    with open_source(tmp_path / "x") as source:
        room = bytearray(40)
        source.read_into(60, memoryview(room))
        assert room == bytes(range(60, 100))
        with pytest.raises(Truncated):
            source.read_into(61, memoryview(room))
