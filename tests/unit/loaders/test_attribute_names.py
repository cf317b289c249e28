"""Models with attributes that are called as wrappers call theirs, in every wrapper, loaded into every other one."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptfix
from ckptfix.names.wrappers import ANYWHERE, LEADING


class Holder(nn.Module):
    def __init__(self, **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def tensor(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


def linear() -> nn.Linear:
    return nn.Linear(3, 3)


def beside(name: str) -> Holder:
    """The attribute, and a parameter of the model itself that would have the same key without its component."""
    parts: dict[str, nn.Module | nn.Parameter] = {name: linear(), "weight": tensor(2), "bias": tensor(2, 2)}
    return Holder(**parts)


def beside_a_scale(name: str) -> Holder:
    parts: dict[str, nn.Module | nn.Parameter] = {name: linear(), "scale": tensor(2)}
    return Holder(**parts)


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{f"{name} beside its own keys": lambda name=name: beside(name) for name in (*sorted(ANYWHERE), *LEADING)},  # type: ignore[misc]
    **{f"{name} beside a scale": lambda name=name: beside_a_scale(name) for name in (*sorted(ANYWHERE), *LEADING)},  # type: ignore[misc]
    "two attributes": lambda: Holder(_orig_mod=linear(), _fsdp_wrapped_module=linear(), scale=tensor(2)),
    "inside": lambda: Holder(inner=beside("_orig_mod"), weight=tensor(4)),
    "inside an attribute": lambda: Holder(_forward_module=beside("_orig_mod"), head=linear()),
    "below module": lambda: Holder(module=beside("_orig_mod"), scale=tensor(2)),
    "no such attribute": lambda: Holder(layer=linear(), scale=tensor(2)),
}  # fmt: skip

WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda model: model,
    "DataParallel": nn.DataParallel,
    "compile": torch.compile,
    "DataParallel of compile": lambda model: nn.DataParallel(torch.compile(model)),
    "compile of DataParallel": lambda model: torch.compile(nn.DataParallel(model)),
}


def values(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.slow
@pytest.mark.sampled(6, quick=2, test_all=10_000)
@pytest.mark.parametrize("name", MODELS)
def test_a_file_that_fits_is_loaded_in_any_wrapper(name: str, tmp_path: Path) -> None:
    for source, target in itertools.product(WRAPPERS, WRAPPERS):
        saved, model = WRAPPERS[source](MODELS[name]()), WRAPPERS[target](MODELS[name]())
        torch.save(saved.state_dict(), tmp_path / "in.pth")
        report = ckptfix.load_into(model, tmp_path / "in.pth")
        assert report.complete, f"{source} -> {target}"
        assert all(map(torch.equal, values(saved), values(model))), f"{source} -> {target}"


@pytest.mark.sampled(quick=2)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_base_prefix_is_found_beside_such_an_attribute(wrapper: str, tmp_path: Path) -> None:
    whole = Holder(backbone=beside("_orig_mod"))
    torch.save(WRAPPERS[wrapper](whole).state_dict(), tmp_path / "in.pth")
    model = beside("_orig_mod")
    assert ckptfix.load_into(model, tmp_path / "in.pth").complete
    assert all(map(torch.equal, values(whole), values(model)))
