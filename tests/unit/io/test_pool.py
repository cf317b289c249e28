"""A pool of threads where the system starts none, or only some."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptfix
from ckptfix.pool import Threads


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of threads that can still be started, as with a limit on processes."""
    left = [0]
    start = threading.Thread.start

    def started(self: threading.Thread) -> None:
        if not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        start(self)

    monkeypatch.setattr(threading.Thread, "start", started)
    return left


@pytest.mark.parametrize("most", [0, 1, 2])
def test_each_call_runs_once(limit: list[int], most: int) -> None:
    limit[0] = most
    ran: list[int] = []
    with Threads(3) as pool:
        made = [pool.submit(ran.append, number) for number in range(50)]
        failed = pool.submit(lambda: 1 // 0)
        assert [one.result(10) for one in made] == [None] * 50
        with pytest.raises(ZeroDivisionError):
            failed.result(10)
    assert sorted(ran) == list(range(50))


def test_what_a_shutdown_cancels_is_cancelled() -> None:
    hold = threading.Event()
    pool = Threads(1)
    first, second = pool.submit(hold.wait, 10), pool.submit(int)
    pool.shutdown(wait=False, cancel_futures=True)
    hold.set()
    assert first.result(10)
    with pytest.raises(CancelledError):
        second.result(10)


@pytest.mark.parametrize("how", ["copy", "assign", "map", "state dict"])
def test_one_thread_loads_what_two_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: list[int], how: str
) -> None:
    def make() -> Any:
        return nn.ParameterList([torch.randn(1 << 20) for _ in range(4)])

    trained, model = make(), make()
    path = tmp_path / "a.pth"
    torch.save(trained.state_dict(), path)
    if how == "state dict":
        model.load_state_dict(ckptfix.load_state_dict(path))
    else:
        ckptfix.load_into(model, path, assign=how != "copy", mmap=how == "map")
    assert all(map(torch.equal, model, trained))


def test_an_error_beside_the_data_is_not_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("out of something")

    path = tmp_path / "a.pth"
    torch.save({"a": torch.ones(3)}, path)
    monkeypatch.setattr("ckptfix.loaders.reading.Reading.fill", broken)
    with pytest.raises(RuntimeError, match="out of something"):
        ckptfix.load_state_dict(path)
