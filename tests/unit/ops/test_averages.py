"""Averages beside a model: AveragedModel loads its own after every edit that was not about it."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import ckptfix
from ckptfix import doctor
from ckptfix.cli import commands
from ckptfix.names.kinds import AVERAGES as KEYS


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


class Steps(nn.Module):
    """MMEngine's averaged model: a module, and the buffer steps."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = deepcopy(model)
        self.register_buffer("steps", torch.tensor(4))


class Uncounted(nn.Module):
    """timm's ModelEmaV2: a module, and no counter."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = deepcopy(model)


Wrap = Callable[[nn.Module], nn.Module]
WRAPPERS: dict[str, Wrap] = {
    "averaged": AveragedModel,
    "with buffers": lambda model: AveragedModel(model, use_buffers=True),
    "steps": Steps,
}
INSIDE: dict[str, Wrap] = {"plain": lambda model: model, "parallel": nn.DataParallel}
VERBS: dict[str, Callable[[Path, Path], Any]] = {
    "strip-module": lambda source, dest: ckptfix.strip_module(source, dest, force=True),
    "strip-module --all-levels": lambda source, dest: ckptfix.strip_module(source, dest, all_levels=True, force=True),
    "strip-module --partial": lambda source, dest: ckptfix.strip_module(source, dest, partial=True, force=True),
    "unwrap": lambda source, dest: ckptfix.unwrap(source, dest, force=True),
}


def saved(path: Path, checkpoint: Any, *, zipped: bool = True) -> Path:
    torch.save(checkpoint, path, _use_new_zipfile_serialization=zipped)
    return path


def loads(average: nn.Module, state: Any) -> None:
    """Strictly, with the versions of its modules, and every value."""
    fresh = deepcopy(average)
    for value in fresh.state_dict().values():
        value.zero_()
    fresh.load_state_dict(state)
    wanted = average.state_dict()
    assert list(state) == list(wanted)
    assert all(torch.equal(value, wanted[name]) for name, value in fresh.state_dict().items())
    assert dict(state._metadata) == dict(wanted._metadata)  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.sampled(16)
@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("key", ["ema", "anything"])
def test_an_average_keeps_its_own_level_and_loses_that_of_data_parallel(
    tmp_path: Path, key: str, wrapper: str, inside: str, verb: str, zipped: bool
) -> None:
    model = nn.DataParallel(net())
    average = WRAPPERS[wrapper](INSIDE[inside](net()))
    checkpoint = {"model": model.state_dict(), key: average.state_dict(), "epoch": 3}
    source, out = saved(tmp_path / "in.pth", checkpoint, zipped=zipped), tmp_path / "out.pth"
    result = VERBS[verb](source, out)
    found = torch.load(out, weights_only=True)
    net().load_state_dict(found["model"])
    loads(WRAPPERS[wrapper](net()), found[key])
    assert any("left the 'module.' of " in line and key in line for line in result.lines), result.lines
    (note,) = [row for row in result.as_dict()["findings"] if row["id"] == "average-kept"]
    assert note["where"] == key
    assert not {change.at for change in result.changes} - {"model"} or inside == "parallel"


@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_after_what_doctor_proposes_the_average_loads(tmp_path: Path, wrapper: str, inside: str) -> None:
    average = WRAPPERS[wrapper](INSIDE[inside](net()))
    checkpoint = {"model": nn.DataParallel(net()).state_dict(), "ema": average.state_dict()}
    source = saved(tmp_path / "in.pth", checkpoint)
    rows = [row for row in doctor(source).findings if row.id == "wrapped-names"]
    assert [row.where for row in rows] == (["model"] if inside == "plain" else ["model", "ema"])
    assert all(row.message.startswith("9 keys begin with module. ") for row in rows)
    for row in rows:
        assert row.fix is not None
        assert commands.main([*shlex.split(row.fix)[1:], "-f"], standalone_mode=False) == 0
        loads(WRAPPERS[wrapper](net()), torch.load(tmp_path / "in.stripped.pth", weights_only=True)["ema"])
    left = [row.where for row in doctor(tmp_path / "in.stripped.pth").findings if row.id == "wrapped-names"]
    assert left == []


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_its_level_goes_when_it_is_asked_for(tmp_path: Path, wrapper: str) -> None:
    checkpoint = {"model": net().state_dict(), "ema": WRAPPERS[wrapper](net()).state_dict()}
    source, out = saved(tmp_path / "in.pth", checkpoint), tmp_path / "out.pth"
    for verb in (ckptfix.strip_module, ckptfix.unwrap):
        result = verb(source, out, at="ema", force=True)
        assert {change.at for change in result.changes} == {"ema"}
        found = torch.load(out, weights_only=True)["ema"]
        assert set(net().state_dict()) < set(found)
        assert not [row for row in result.findings if row.id == "average-kept"]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_file_of_nothing_but_an_average_is_stripped(tmp_path: Path, wrapper: str) -> None:
    source, out = saved(tmp_path / "in.pth", WRAPPERS[wrapper](net()).state_dict()), tmp_path / "out.pth"
    ckptfix.strip_module(source, out)
    assert set(net().state_dict()) < set(torch.load(out, weights_only=True))
    (row,) = [row for row in doctor(source).findings if row.id == "wrapped-names"]
    assert row.fix is not None and row.fix.endswith("--ema")
    assert commands.main(shlex.split(row.fix)[1:], standalone_mode=False) == 0
    net().load_state_dict(torch.load(shlex.split(row.fix)[3], weights_only=True))


@pytest.mark.slow
@pytest.mark.parametrize("key", KEYS)
def test_without_a_counter_the_model_beside_it_tells(tmp_path: Path, key: str) -> None:
    out = tmp_path / "out.pth"
    wrapped = nn.DataParallel(net())
    for model, inside in ((net(), net()), (wrapped, wrapped)):
        checkpoint = {"model": model.state_dict(), key: Uncounted(inside).state_dict()}
        ckptfix.unwrap(saved(tmp_path / "in.pth", checkpoint), out, force=True)
        found = torch.load(out, weights_only=True)
        net().load_state_dict(found["model"])
        loads(Uncounted(net()), found[key])
    checkpoint = {"model": wrapped.state_dict(), key: deepcopy(wrapped).state_dict()}
    ckptfix.strip_module(saved(tmp_path / "in.pth", checkpoint), out, force=True)
    found = torch.load(out, weights_only=True)
    assert list(found["model"]) == list(found[key]) == list(net().state_dict())


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_no_second_prefix_is_added_to_it(tmp_path: Path, wrapper: str) -> None:
    average = WRAPPERS[wrapper](net())
    checkpoint = {"model": net().state_dict(), "ema": average.state_dict()}
    source, out = saved(tmp_path / "in.pth", checkpoint), tmp_path / "out.pth"
    result = ckptfix.add_module(source, out)
    found = torch.load(out, weights_only=True)
    nn.DataParallel(net()).load_state_dict(found["model"])
    loads(average, found["ema"])
    assert any("ema: unchanged" in line for line in result.lines)
    ckptfix.strip_module(out, tmp_path / "back.pth")
    back = torch.load(tmp_path / "back.pth", weights_only=True)
    assert list(back["model"]) == list(net().state_dict())
    loads(average, back["ema"])
    ckptfix.add_module(source, out, at="ema", force=True)
    assert "module.module.0.weight" in torch.load(out, weights_only=True)["ema"]


def test_load_into_passes_the_counter_of_mmengine(tmp_path: Path) -> None:
    checkpoint = {"state_dict": net().state_dict(), "ema_state_dict": Steps(net()).state_dict()}
    model = net()
    report = ckptfix.load_into(model, saved(tmp_path / "in.pth", checkpoint), at="ema_state_dict")
    assert report.unexpected == () and [row.name for row in report.skipped] == ["steps"]
    with pytest.raises(ckptfix.errors.LoadMismatch):
        ckptfix.load_into(Steps(net()), saved(tmp_path / "plain.pth", {**net().state_dict(), "steps_": torch.ones(1)}))
