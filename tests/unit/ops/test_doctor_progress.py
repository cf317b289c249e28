"""doctor says how far it has read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptfix
from ckptfix.ops.doctor import data
from ckptfix.ops.fix import _unfinished


@pytest.mark.parametrize("legacy", [False, True])
def test_bytes_of_tensors_are_counted(tmp_path: Path, legacy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "WORTH", 40_000)
    state = {f"l{index}.weight": torch.ones(3000 + index) for index in range(4)}
    torch.save(state, tmp_path / "a.pth", _use_new_zipfile_serialization=not legacy)
    calls: list[tuple[int, int]] = []
    ckptfix.doctor(tmp_path / "a.pth", progress=lambda done, total: calls.append((done, total)))
    (total,) = {total for _, total in calls}
    counts = [done for done, _ in calls]
    assert counts == sorted(counts) and counts[-1] == total and len(counts) >= 4
    assert total >= sum(tensor.nbytes for tensor in state.values())


@pytest.mark.parametrize("fast", [False, True])
def test_headers_and_few_bytes_are_not_worth_it(tmp_path: Path, fast: bool) -> None:
    torch.save({"l.weight": torch.ones(30)}, tmp_path / "a.pth")
    calls: list[tuple[int, int]] = []
    ckptfix.doctor(tmp_path / "a.pth", fast=fast, progress=lambda done, total: calls.append((done, total)))
    assert calls == []


def test_fix_is_not_done_when_it_has_read() -> None:
    calls: list[tuple[int, int]] = []
    made = _unfinished(lambda done, total: calls.append((done, total)))
    assert made is not None
    made(4, 10)
    made(10, 10)
    assert calls == [(4, 10), (9, 10)]
    assert _unfinished(None) is None
