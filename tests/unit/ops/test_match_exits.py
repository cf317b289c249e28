"""Models whose code ends the program: every verb that runs them reports an error; a signal and Ctrl-C still stop it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ckptfix
from ckptfix.errors import CkptfixError
from ckptfix.io.write_log import recorded
from ckptfix.ops.match import models
from ckptfix.ops.match.rules_check import check_rules
from ckptfix.ops.target.targets import read
from ckptfix.platform import Stopped


class _Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.second(self.first(x).relu()))


def _leave(*_: object, **__: object) -> Any:
    sys.exit(0)


class _LeavingOutputs(_Plain):
    forward = _leave


class _LeavingCopy(_Plain):
    __deepcopy__ = _leave


class _LeavingState(_Plain):
    state_dict = _leave


class _LeavingBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden * 1

    backward = staticmethod(_leave)


class _LeavingGradients(_Plain):
    def forward(self, x: Tensor) -> Tensor:
        back: Any = _LeavingBack
        return torch.as_tensor(back.apply(super().forward(x)))


class _LeavingLoad(_Plain):
    def _load_from_state_dict(self, *_: Any) -> None:
        _leave()


MAKERS = (_LeavingOutputs, _LeavingCopy, _LeavingState, _LeavingGradients)


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    made: Any = ModuleType("leaving_models")
    made.plain = _Plain
    monkeypatch.setitem(sys.modules, "leaving_models", made)
    return made


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.save(_Plain().state_dict(), tmp_path / "in.pth")
    return tmp_path / "in.pth"


@pytest.mark.parametrize("maker", MAKERS)
def test_a_model_of_in_that_exits_is_an_error(saved: Path, tmp_path: Path, module: Any, maker: Any) -> None:
    module.odd = maker
    with pytest.raises(CkptfixError, match="SystemExit: 0"):
        ckptfix.match(
            *(saved, tmp_path / "out.pth", "leaving_models:plain"),
            verify=True, source_model="leaving_models:odd", allow_import=True,
        )  # fmt: skip
    assert not (tmp_path / "out.pth").exists()


@pytest.mark.parametrize("maker", [_LeavingOutputs, _LeavingCopy, _LeavingState, _LeavingLoad])
def test_a_model_of_target_that_exits_is_an_error(saved: Path, tmp_path: Path, module: Any, maker: Any) -> None:
    module.odd = maker
    with pytest.raises(CkptfixError, match="SystemExit: 0"):
        ckptfix.match(
            *(saved, tmp_path / "out.pth", "leaving_models:odd"),
            verify=True, source_model="leaving_models:plain", allow_import=True,
        )  # fmt: skip
    assert not (tmp_path / "out.pth").exists()


def test_a_check_of_rules_reports_it_without_its_temporary_file(saved: Path, tmp_path: Path, module: Any) -> None:
    module.odd = _LeavingLoad
    (tmp_path / "x.rules").write_text("first.{*} -> first.{*}\nsecond.{*} -> second.{*}\n")
    both = models("leaving_models:plain", "leaving_models:odd", None, allow_import=True)
    with recorded() as lines, pytest.raises(CkptfixError, match="SystemExit: 0") as caught:
        check_rules(saved, "leaving_models:odd", tmp_path / "x.rules", models=both, allow_import=True)
    assert caught.value.path == str(saved) and not lines


@pytest.mark.parametrize("maker", MAKERS)
def test_a_load_with_proof_reports_it(saved: Path, maker: Callable[[], nn.Module]) -> None:
    with pytest.raises(CkptfixError, match="SystemExit: 0"):
        ckptfix.load_into(_Plain(), saved, match="structure", verify_against=maker())


@pytest.mark.parametrize("error", [Stopped(signal.SIGTERM), KeyboardInterrupt()])
def test_signals_stop_the_code_of_models(saved: Path, module: Any, error: BaseException) -> None:
    calls = []

    def stopped(*_: object) -> Any:
        calls.append(1)
        raise error

    module.stopped = stopped
    with pytest.raises(type(error)):
        read("leaving_models:stopped", allow_import=True)
    assert calls == [1]

    model: Any = _Plain()
    model.forward = stopped
    with pytest.raises(type(error)):
        ckptfix.load_into(_Plain(), saved, match="structure", verify_against=model)
