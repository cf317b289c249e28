"""load_into(match="auto"): where no keys fit, a complete and unique alignment by structure is used, and it says so."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import nn

import ckptfix
from ckptfix.errors import LoadMismatch, Refused


def net(*names: str, classes: int = 3) -> nn.Module:
    made = nn.Module()
    for name, layer in zip(names, (nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, classes)), strict=True):
        made.add_module(name, layer)
    return made


@pytest.mark.parametrize("match", ["auto", True])
def test_other_names_are_aligned(tmp_path: Path, match: Literal["auto"] | bool) -> None:
    torch.save(net("trunk", "scale", "head").state_dict(), tmp_path / "a.pth")
    model = net("body", "norm", "fc")
    with pytest.warns(UserWarning, match="all 6 tensors were matched by structure"):
        report = ckptfix.load_into(model, tmp_path / "a.pth", match=match)
    with pytest.raises(Refused, match="match=False is unknown"):
        ckptfix.load_into(model, tmp_path / "a.pth", match=False)
    assert report.rule == "structure" and report.renamed["trunk.weight"] == "body.weight"
    assert torch.equal(model.state_dict()["body.weight"], torch.load(tmp_path / "a.pth")["trunk.weight"])


def test_keys_that_fit_are_not_aligned(tmp_path: Path) -> None:
    torch.save(net("body", "norm", "fc").state_dict(), tmp_path / "a.pth")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ckptfix.load_into(net("body", "norm", "fc"), tmp_path / "a.pth").rule == "exact"


@pytest.mark.parametrize("strict", [True, False])
def test_what_is_not_complete_is_not_used(tmp_path: Path, strict: bool) -> None:
    torch.save(net("trunk", "scale", "head", classes=7).state_dict(), tmp_path / "a.pth")
    model = net("body", "norm", "fc")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(LoadMismatch):
        ckptfix.load_into(model, tmp_path / "a.pth", strict=strict)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_two_layers_that_could_change_places_are_not_guessed(tmp_path: Path) -> None:
    def twins(*names: str) -> nn.Module:
        made = nn.Module()
        for name in names:
            made.add_module(name, nn.Linear(4, 4))
        return made

    torch.save(twins("alpha", "beta").state_dict(), tmp_path / "a.pth")
    with pytest.raises(LoadMismatch):
        ckptfix.load_into(twins("query", "key"), tmp_path / "a.pth")
