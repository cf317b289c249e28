"""A whole pickled module where a state dict is wanted: its state dict is extracted first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptfix
from ckptfix.errors import Refused

OPERATIONS: dict[str, Callable[[Path, Path], Any]] = {
    "convert": lambda source, folder: ckptfix.convert(source, folder / "out.safetensors"),
    "match": lambda source, folder: ckptfix.match(source, folder / "out.pth", state_dict(folder)),
    "match --like": lambda source, folder: ckptfix.match(state_dict(folder), folder / "out.pth", source),
    "rename": lambda source, folder: ckptfix.rename(source, folder / "out.pth", subs=[("weight", "w")]),
    "strip-module": lambda source, folder: ckptfix.strip_module(source, folder / "out.pth"),
    "add-module": lambda source, folder: ckptfix.add_module(source, folder / "out.pth"),
    "unwrap": lambda source, folder: ckptfix.unwrap(source, folder / "out.pth"),
}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def state_dict(folder: Path) -> Path:
    torch.save(net().state_dict(), folder / "state_dict.pth")
    return folder / "state_dict.pth"


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(("nested", "at"), [(False, ""), (True, " --at model")])
def test_its_state_dict_is_extracted_first(tmp_path: Path, operation: str, nested: bool, at: str) -> None:
    source = tmp_path / "whole.pth"
    model = nn.DataParallel(net())
    torch.save({"model": model, "epoch": 3} if nested else model, source)
    if "--like" in operation:
        with pytest.raises(Refused, match="a whole pickled module") as caught:
            OPERATIONS[operation](source, tmp_path)
        assert f"ckptfix extract {source} OUT{at}" in (caught.value.hint or "")
        assert "_parameters" not in (caught.value.hint or "")
        assert not (tmp_path / "out.pth").exists()
        return
    result = OPERATIONS[operation](source, tmp_path)
    made = {entry.key: tuple(entry.shape) for entry in ckptfix.open_checkpoint(result.dest).entries}
    assert sorted(made.values()) == sorted(tuple(value.shape) for value in model.state_dict().values())
    assert result.exit_code == 0 and not any("_parameters" in key for key in made)


def test_a_state_dict_beside_a_module_is_renamed_and_the_module_left(tmp_path: Path) -> None:
    source, out = tmp_path / "both.pth", tmp_path / "out.pth"
    wrapped = nn.DataParallel(net())
    torch.save({"model": wrapped, "state_dict": wrapped.state_dict()}, source)
    ckptfix.strip_module(source, out)
    loaded = torch.load(out, weights_only=False)
    assert list(loaded["state_dict"]) == list(net().state_dict())
    assert list(loaded["model"].state_dict()) == list(wrapped.state_dict())


def test_a_state_dict_beside_a_module_is_not_guessed(tmp_path: Path) -> None:
    source = tmp_path / "both.pth"
    torch.save({"model": net(), "state_dict": net().state_dict()}, source)
    with pytest.raises(Refused, match="2 state dicts: state_dict; model is a whole pickled module"):
        ckptfix.convert(source, tmp_path / "out.safetensors")
    assert ckptfix.convert(source, tmp_path / "out.safetensors", at="state_dict").tensors == 9


def test_mappings_that_are_called_like_a_module_s_are_none(tmp_path: Path) -> None:
    source, out = tmp_path / "a.pth", tmp_path / "out.pth"
    torch.save({"_parameters": {"module.weight": torch.ones(2)}}, source)
    ckptfix.strip_module(source, out)
    assert list(torch.load(out)["_parameters"]) == ["weight"]


@pytest.mark.parametrize("at", [None, "model", "model/module"])
@pytest.mark.parametrize("strip", ["auto", "module", None])
def test_load_state_dict_takes_its_state_dict(tmp_path: Path, at: str | None, strip: str | None) -> None:
    source = tmp_path / "whole.pth"
    model = nn.DataParallel(net())
    torch.save({"model": model, "epoch": 3}, source)
    inner = at == "model/module"
    loaded = ckptfix.load_state_dict(source, at="model/_modules/module" if inner else at, strip=strip)
    expected = (model.module if inner or strip else model).state_dict()
    assert list(loaded) == list(expected)
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    assert loaded._metadata == expected._metadata  # type: ignore[attr-defined]
    assert not any(tensor.requires_grad for tensor in loaded.values())


def test_load_state_dict_of_a_module_wrapped_twice(tmp_path: Path) -> None:
    source = tmp_path / "whole.pth"
    model = net()
    torch.save(nn.DataParallel(nn.DataParallel(model)), source)
    net().load_state_dict(ckptfix.load_state_dict(source))
    assert list(ckptfix.load_state_dict(source, at="")) == list(model.state_dict())


def test_load_state_dict_does_not_guess_between_two_modules(tmp_path: Path) -> None:
    source = tmp_path / "two.pth"
    torch.save({"g": net(), "d": net()}, source)
    with pytest.raises(Refused):
        ckptfix.load_state_dict(source)
    assert list(ckptfix.load_state_dict(source, at="d")) == list(net().state_dict())
