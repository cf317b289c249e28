"""Tensors of a library that registers them when it is imported: the answer is the import, and no plain values."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import ckptfix
from ckptfix.errors import Refused


class _Wrapper(torch.Tensor):
    """A tensor made of codes and a scale, pickled as those of torchao are."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls: type, codes: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(func)


@pytest.fixture(params=["torchao.quantization", "torchao.optim.subclass_8bit", "otherlib.tensors"])
def wrapped(request: pytest.FixtureRequest) -> Iterator[tuple[str, torch.Tensor]]:
    """The name of a class, and a tensor of it; its modules are gone afterwards."""
    module: str = request.param
    made = type("Codes", (_Wrapper,), {"__module__": module})
    parts = module.split(".")
    names = [".".join(parts[: end + 1]) for end in range(len(parts))]
    before = {name: sys.modules.get(name) for name in names}
    for name in names:
        sys.modules[name] = ModuleType(name)
    sys.modules[module].Codes = made  # type: ignore[attr-defined]
    yield f"{module}.Codes", made(torch.ones(4, 4, dtype=torch.int8), torch.ones(4))
    for name, old in before.items():
        if old is None:
            del sys.modules[name]
        else:
            sys.modules[name] = old


def is_known(name: str) -> bool:
    return name.startswith("torchao.")


def test_a_tensor_of_a_library(tmp_path: Path, wrapped: tuple[str, torch.Tensor]) -> None:
    name, tensor = wrapped
    path = tmp_path / "m.pth"
    torch.save({"fc.weight": tensor, "fc.bias": torch.ones(4)}, path)
    ids = {row.id for row in ckptfix.doctor(path).findings if row.severity == "error"}
    if not is_known(name):
        assert ids == {"foreign-global"}
        assert ckptfix.sanitize(path, tmp_path / "plain.pth").exit_code == 0
        return
    assert ids == {"tensor-class"}
    assert not ckptfix.doctor(path).fixes and "import torchao" in str(ckptfix.doctor(path))
    for verb in (ckptfix.fix, ckptfix.sanitize):
        with pytest.raises(Refused) as error:
            verb(path, tmp_path / "plain.pth")
        assert "import torchao" in str(error.value.hint) and name in error.value.message
    assert not (tmp_path / "plain.pth").exists()
    assert ckptfix.sanitize(path, tmp_path / "plain.pth", parts=True).exit_code == 0
    assert set(torch.load(tmp_path / "plain.pth")["fc.weight"]) == {"codes", "scale"}
    with pytest.raises(Refused) as mean:
        ckptfix.average([path, path], tmp_path / "mean.pth")
    assert mean.value.where == "fc.weight" and name in mean.value.message


def test_an_optimizer_of_a_library_is_named(tmp_path: Path, wrapped: tuple[str, torch.Tensor]) -> None:
    name, tensor = wrapped
    path = tmp_path / "m.pth"
    weight = torch.nn.Parameter(torch.zeros(4, 4))
    group = {"params": [0], "lr": 0.1}
    torch.save({"model": {"w": weight.data}, "optimizer": {"state": {0: {"exp_avg": tensor}}, "param_groups": [group]}},
               path)  # fmt: skip
    with pytest.raises(Refused) as error:
        ckptfix.load_optimizer(torch.optim.AdamW([weight]), path)
    assert name in error.value.message and "_rebuild" not in error.value.message
    assert ("import torchao" in str(error.value.hint)) is is_known(name)
    plain = ckptfix.sanitize(path, tmp_path / "plain.pth", keep_only="weights")
    assert plain.exit_code == 0 and set(torch.load(tmp_path / "plain.pth")) == {"model"}


def test_the_bytes_of_an_optimizer_count_the_parts_of_its_tensors(
    tmp_path: Path, wrapped: tuple[str, torch.Tensor]
) -> None:
    path = tmp_path / "m.pth"
    states = {"state": {0: {"exp_avg": wrapped[1]}}, "param_groups": [{"params": [0], "lr": 0.1}]}
    torch.save({"model": {"w": torch.zeros(4, 4)}, "optimizer": states}, path)
    row = next(row for row in ckptfix.doctor(path).findings if row.id == "optimizer-state")
    # 16 codes of a byte and 4 scales of four bytes.
    assert row.message.startswith("an optimizer's state takes up 32 of its ")


def test_a_jagged_tensor(tmp_path: Path) -> None:
    path = tmp_path / "n.pth"
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.ones(3)], layout=torch.jagged)
    torch.save({"n": nested, "w": torch.ones(3)}, path)
    diagnosis = ckptfix.doctor(path)
    assert {row.id for row in diagnosis.findings if row.severity == "error"} == {"tensor-class"} and not diagnosis.fixes
    with pytest.raises(Refused, match=r"torch\.nested"):
        ckptfix.fix(path, tmp_path / "out.pth")
