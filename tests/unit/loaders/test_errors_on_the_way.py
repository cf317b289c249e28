"""load_into and load_optimizer: errors and interrupts after the first write, of torch or of the model's own code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kinds import tensor
from torch import nn

import ckptfix
from ckptfix.errors import LoadMismatch


def saved(path: Path, value: Any) -> Path:
    torch.save(value, path)
    return path


class Refuses(torch.Tensor):
    """Raises `error` when it is copied to."""

    error: type[BaseException] = RuntimeError

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "copy_":
            raise cls.error("not today")
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


class Asserts(Refuses):
    error = AssertionError


class Values(Refuses):
    error = ValueError


class Interrupts(Refuses):
    error = KeyboardInterrupt


class Exits(Refuses):
    error = SystemExit


def holding(kind: type[Refuses], own_way: bool) -> Any:
    model: Any = nn.Module()
    for name in ("a", "b", "c"):
        model.register_buffer(name, torch.zeros(4, dtype=torch.float64))
    model.b = model.b.as_subclass(kind)
    if own_way:
        model.hooked = nn.Module()
        model.hooked._register_load_state_dict_pre_hook(lambda *_: None)
    return model


STATE = {name: tensor(4) for name in ("a", "b", "c")}


@pytest.mark.parametrize("own_way", [False, True])
@pytest.mark.parametrize("kind", [Refuses, Asserts, Values])
def test_an_error_of_a_copy(tmp_path: Path, kind: type[Refuses], own_way: bool) -> None:
    model: Any = holding(kind, own_way)
    with pytest.raises(LoadMismatch, match="not today") as caught:
        ckptfix.load_into(model, saved(tmp_path / "a.pth", STATE))
    said = str(caught.value)
    if own_way:  # torch goes on
        assert "the model's modules had already received" in said
    else:
        assert "1 of 3 tensors of the model were loaded before (a), b may be partly overwritten" in said
        assert caught.value.where == "b" and isinstance(caught.value.__cause__, kind.error)
    assert (model.a != 0).any()


@pytest.mark.parametrize("kind", [Interrupts, Exits])
@pytest.mark.parametrize("own_way", [False, True])
def test_an_interrupt_stays_one_and_has_a_note(tmp_path: Path, kind: type[Refuses], own_way: bool) -> None:
    with pytest.raises(kind.error) as caught:
        ckptfix.load_into(holding(kind, own_way), saved(tmp_path / "a.pth", STATE))
    received = "modules had already received a, b" if own_way else "1 of 3 tensors of the model were loaded before (a)"
    assert received in caught.value.__notes__[0]


def test_an_interrupt_while_two_threads_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors that are full are told from those that are not."""
    from ckptfix.loaders import reading

    filled = reading.Reading._filled
    monkeypatch.setattr(reading, "SHARE", 1 << 20)

    def stopped(self: Any, row: Any) -> int:
        if row.number == 2:
            raise KeyboardInterrupt
        return filled(self, row)

    monkeypatch.setattr(reading.Reading, "_filled", stopped)
    model = nn.ParameterList([torch.zeros(1 << 19) for _ in range(4)])
    with pytest.raises(KeyboardInterrupt) as caught:
        ckptfix.load_into(model, saved(tmp_path / "a.pth", model.state_dict()))
    assert "2 may be partly overwritten" in caught.value.__notes__[0]


class Late(nn.Linear):
    """Raises only in the real load, not in its rehearsal."""

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        if not self.weight.is_meta:
            raise KeyError("late")


def test_an_error_of_a_method_of_the_module(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), Late(2, 2), nn.Linear(2, 2))
    with pytest.raises(LoadMismatch, match="KeyError: 'late'; the model's modules had already received ") as caught:
        ckptfix.load_into(model, saved(tmp_path / "a.pth", model.state_dict()))
    assert isinstance(caught.value.__cause__, KeyError)


class Picky(nn.Linear):
    def get_extra_state(self) -> Any:
        return 5

    def set_extra_state(self, state: Any) -> None:
        raise ValueError(f"not {state}")


@pytest.mark.parametrize("own_way", [False, True])
@pytest.mark.parametrize("assign", [False, True])
def test_an_error_of_extra_state(tmp_path: Path, own_way: bool, assign: bool) -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2), Picky(2, 2))
    path = saved(tmp_path / "a.pth", model.state_dict())
    if own_way:
        model[0]._register_load_state_dict_pre_hook(lambda *_: None)
    before = list(model.parameters())
    with pytest.raises(LoadMismatch, match="ValueError: not 5; ") as caught:
        ckptfix.load_into(model, path, assign=assign)
    if assign:
        assert "the model has its own tensors" in str(caught.value)
    elif own_way:
        assert "modules had already received" in str(caught.value)
    else:
        said = "4 tensors of the model were overwritten, and extra state was set: 1._extra_state"
        assert said in str(caught.value)
    assert all(map(lambda one, other: one is other, model.parameters(), before))


class Closed(nn.Linear):
    open = True

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "bias" and not self.open:
            raise AttributeError("closed")
        super().__setattr__(name, value)


@pytest.mark.parametrize("own_way", [False, True])
def test_an_error_of_an_assignment(tmp_path: Path, own_way: bool) -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2), Closed(2, 2), nn.Linear(2, 2))
    path = saved(tmp_path / "a.pth", model.state_dict())
    if own_way:
        model[0]._register_load_state_dict_pre_hook(lambda *_: None)
    model[1].open = False
    before = list(model.parameters())
    with pytest.raises(LoadMismatch, match=r"closed.*; the model has its own tensors"):
        ckptfix.load_into(model, path, assign=True)
    assert all(map(lambda one, other: one is other, model.parameters(), before))


def test_an_interrupted_optimizer_is_unchanged(tmp_path: Path) -> None:
    class Slow(torch.optim.Adam):
        stop = False

        def __setstate__(self, state: Any) -> None:
            super().__setstate__(state)  # type: ignore[no-untyped-call]
            if self.stop:
                raise KeyboardInterrupt

    make: Callable[[], Any] = lambda: Slow(nn.Linear(2, 2).parameters(), lr=0.5)  # noqa: E731
    old = make()
    for parameter in old.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    old.step()
    path = saved(tmp_path / "a.pth", old.state_dict())
    new = make()
    new.param_groups[0]["lr"] = 7.0
    new.stop = True
    with pytest.raises(KeyboardInterrupt):
        ckptfix.load_optimizer(new, path)
    assert not new.state and new.param_groups[0]["lr"] == 7.0
