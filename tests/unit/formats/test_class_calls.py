"""Tensors that a call of a class makes, ``torch.Tensor(t)``: they are kept as any other, or named with exit code 3."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckptfix
from ckptfix.errors import WouldLoseData

VALUE = torch.arange(6.0).reshape(2, 3)


class Made:
    """Pickled as the call of `cls` with `args`."""

    def __init__(self, cls: Callable[..., Any], *args: Any) -> None:
        self.cls, self.args = cls, args

    def __reduce__(self) -> tuple[Any, ...]:
        return self.cls, self.args


OF_TENSORS = {
    "Tensor": Made(torch.Tensor, VALUE),
    "Tensor of halves": Made(torch.Tensor, VALUE.half()),
    "Tensor of a view": Made(torch.Tensor, VALUE.t()),
    "FloatTensor": Made(torch.FloatTensor, VALUE),
    "LongTensor": Made(torch.LongTensor, VALUE.long()),
    "Parameter": Made(torch.nn.Parameter, VALUE),
    "Parameter without a gradient": Made(torch.nn.Parameter, VALUE, False),
    "Parameter of a Parameter": Made(torch.nn.Parameter, torch.nn.Parameter(VALUE)),
}

OF_OTHERS = {
    "a list": Made(torch.Tensor, [1.0, 2.0]),
    "sizes": Made(torch.Tensor, 3),
    "a typed list": Made(torch.LongTensor, [1, 2]),
}


def saved(path: Path, value: Any, key: str = "module.x") -> Path:
    torch.save({"module.a": torch.ones(2), key: value}, path)
    return path


@pytest.mark.parametrize("kind", OF_TENSORS)
def test_a_tensor_by_its_class_is_a_tensor(tmp_path: Path, kind: str) -> None:
    source = saved(tmp_path / "in.pth", OF_TENSORS[kind])
    truth = torch.load(source, weights_only=True)["module.x"]
    assert ckptfix.doctor(source).exit_code() == 0
    assert ckptfix.convert(source, tmp_path / "out.safetensors").exit_code == 0
    assert ckptfix.extract(source, tmp_path / "taken.pth").exit_code == 0
    assert ckptfix.fix(source, tmp_path / "fixed.pth").exit_code == 0
    assert ckptfix.convert(source, tmp_path / "legacy.pth", to="legacy").exit_code == 0
    fixed = torch.load(tmp_path / "fixed.pth", weights_only=True)["x"]
    results = [
        load_file(tmp_path / "out.safetensors")["module.x"],
        torch.load(tmp_path / "taken.pth", weights_only=True)["module.x"],
        torch.load(tmp_path / "legacy.pth", weights_only=True)["module.x"],
        ckptfix.load_state_dict(source)["x"],
        fixed,
    ]
    for value in results:
        assert value.dtype == truth.dtype
        assert torch.equal(value, truth)
    assert (type(fixed), fixed.requires_grad) == (type(truth), truth.requires_grad)
    assert ckptfix.diff(source, tmp_path / "legacy.pth").same


@pytest.mark.parametrize("kind", OF_OTHERS)
def test_a_tensor_of_what_is_none_is_not_lost_in_silence(tmp_path: Path, kind: str) -> None:
    source = saved(tmp_path / "in.pth", OF_OTHERS[kind])
    with pytest.raises(WouldLoseData, match=r"module\.x"):
        ckptfix.convert(source, tmp_path / "out.safetensors")
    dropped = ckptfix.convert(source, tmp_path / "out.safetensors", drop_unsupported=True)
    taken = ckptfix.extract(source, tmp_path / "taken.pth")
    for done in (dropped, taken):
        assert done.exit_code == 3
        assert [row.where for row in done.findings if row.severity != "info"] == ["module.x"]
    ckptfix.strip_module(source, tmp_path / "stripped.pth")
    assert list(torch.load(tmp_path / "stripped.pth", weights_only=True)) == ["a", "x"]


def test_beside_the_weights_it_is_left_behind_as_the_rest_there(tmp_path: Path) -> None:
    path = tmp_path / "in.pth"
    torch.save({"model": {"w.a": torch.ones(2)}, "scores": Made(torch.Tensor, [1.0])}, path)
    done = ckptfix.convert(path, tmp_path / "out.safetensors")
    assert (done.exit_code, done.left) == (0, ("scores",))


def test_a_class_of_another_dtype_is_what_torch_fails_on(tmp_path: Path) -> None:
    source = saved(tmp_path / "in.pth", Made(torch.LongTensor, VALUE))
    with pytest.raises(Exception, match="expected"):
        torch.load(source, weights_only=True)
    assert "bad-tensor" in {row.id for row in ckptfix.doctor(source).findings}
