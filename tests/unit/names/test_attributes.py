"""A component that only wrappers have, where a model has an attribute of that name: it stays; a wrapper's goes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import ckptfix
from ckptfix.names.attributes import attributes, without_wrappers
from ckptfix.names.wrappers import ANYWHERE

COMPONENTS = [*sorted(ANYWHERE), "module", "_module"]


class Model(nn.Module):
    """A model whose children are called `names`; with `scale` it has a parameter of its own."""

    def __init__(self, *names: str, scale: bool = False) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(2, 2))
        if scale:
            self.scale = nn.Parameter(torch.ones(2))


class Holder(nn.Module):
    """What a wrapper is: a module that holds one under a name."""

    def __init__(self, name: str, inner: nn.Module) -> None:
        super().__init__()
        self.add_module(name, inner)


MODELS: dict[str, Callable[[str, str], nn.Module]] = {
    "two children": lambda one, other: Model(one, other),
    "three": lambda one, other: Model(one, other, "fc"),
    "a child and a parameter": lambda one, other: Model(one, "fc", scale=True),
    "below": lambda one, other: nn.ModuleDict({"stem": nn.Linear(2, 2), "body": Model(one, other)}),
    "a parameter below": lambda one, other: nn.ModuleDict({"stem": nn.Linear(2, 2), "body": Model(one, scale=True)}),
}
AROUND: dict[str, Callable[[nn.Module], nn.Module]] = {
    "as it is": lambda model: model,
    "DataParallel": nn.DataParallel,
    "compiled": lambda model: Holder("_orig_mod", model),
    "compiled, parallel": lambda model: Holder("_orig_mod", nn.DataParallel(model)),
    "FSDP": lambda model: Holder("_fsdp_wrapped_module", Holder("_checkpoint_wrapped_module", model)),
}
TRAINING = {"epoch": 3, "best_loss": torch.tensor(0.5), "cfg": {"lr": 0.1}}
"""Beside the tensors of the model."""


def attribute_pairs() -> list[tuple[str, str]]:
    """Each component that only wrappers have, beside a plain name and beside the next component."""
    beside = [*COMPONENTS[1:], COMPONENTS[0]]
    return [(one, other) for one, next_one in zip(COMPONENTS, beside, strict=True) if one in ANYWHERE
            for other in ("fc", next_one)]  # fmt: skip


@pytest.mark.slow
@pytest.mark.sampled(4, test_all=8)
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("kind", MODELS)
def test_an_attribute_stays_and_a_wrapper_goes(kind: str, around: str, tmp_path: Path) -> None:
    """Truth by construction: names of the model before it was wrapped."""
    path = tmp_path / "a.pth"
    for one, other in attribute_pairs():
        model = MODELS[kind](one, other)
        wanted = list(model.state_dict())
        torch.save(AROUND[around](model).state_dict(), path)
        assert list(ckptfix.load_state_dict(path)) == wanted, (one, other)
        ckptfix.unwrap(path, tmp_path / "b.pth", force=True)
        assert list(torch.load(tmp_path / "b.pth")) == wanted, (one, other)
        kept = set(ckptfix.inspect(tmp_path / "b.pth").wrappers).intersection(ANYWHERE)
        assert not kept, (one, other)
        ids = [row.id for row in ckptfix.doctor(tmp_path / "b.pth").findings]
        assert "wrapped-names" not in ids, (one, other)


@pytest.mark.parametrize("component", sorted(ANYWHERE))
def test_training_state_beside_a_wrapper_is_no_child_of_it(component: str, tmp_path: Path) -> None:
    model = Model("fc", "head", scale=True)
    torch.save({**Holder(component, model).state_dict(), **TRAINING}, tmp_path / "a.pth")
    assert [name for name in ckptfix.load_state_dict(tmp_path / "a.pth") if name != "best_loss"] == [
        *model.state_dict()
    ]
    torch.save({"model": {**Holder(component, model).state_dict(), "steps": torch.tensor(3)}}, tmp_path / "b.pth")
    assert [name for name in ckptfix.load_state_dict(tmp_path / "b.pth") if name != "steps"] == [*model.state_dict()]


def test_an_optimizer_by_names_follows_its_model(tmp_path: Path) -> None:
    """A group has some of the names: what stands beside them is in the state dict."""
    model = Model("_orig_mod", "fc")
    groups = [{"lr": 0.1, "params": [0, 1], "param_names": ["_orig_mod.weight", "_orig_mod.bias"]},
              {"lr": 0.2, "params": [2, 3], "param_names": ["fc.weight", "fc.bias"]}]  # fmt: skip
    torch.save({"model": model.state_dict(), "optimizer": {"state": {}, "param_groups": groups}}, tmp_path / "a.pth")
    ckptfix.unwrap(tmp_path / "a.pth", tmp_path / "b.pth")
    after = torch.load(tmp_path / "b.pth")
    assert list(after["model"]) == list(model.state_dict())
    named = [group["param_names"] for group in after["optimizer"]["param_groups"]]
    assert named == [group["param_names"] for group in groups]


@pytest.mark.parametrize(
    ("names", "paths"),
    [
        (["_orig_mod.fc.weight", "_orig_mod.fc.bias"], ()),
        (["a._orig_mod.w", "b.w"], ()),
        (["a._orig_mod.w", "a.b.w"], ("a",)),
        (["a._orig_mod.w", "a.w"], ("a",)),
        (["_orig_mod.w", "w"], ("",)),
        (["_orig_mod.a._fsdp_wrapped_module.w", "_orig_mod.a.b.w", "_orig_mod.c.w"], ("_orig_mod.a",)),
        (["_fpw_module.w", "flat_param_0"], ()),
        (["_fsdp_wrapped_module._flat_param", "_fsdp_wrapped_module.a._fsdp_wrapped_module._flat_param"], ()),
        (["_orig_mod.w", "n_averaged"], ()),
        (["a._orig_mod.w", "a._extra_state"], ()),
    ],
)  # fmt: skip
def test_which_modules_have_one(names: list[str], paths: tuple[str, ...]) -> None:
    assert attributes(names) == frozenset(paths)
    bare = without_wrappers(attributes(names))
    assert len({bare(name) for name in names}) == len(names)
