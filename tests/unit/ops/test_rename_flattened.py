"""Names in a flattened optimizer follow those of the model, whatever the verb and wherever its keys are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import ckptfix
from ckptfix.errors import KeyConflict, Refused

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Model(torch.nn.Module):
    """One layer and its norm; `wrapped` puts them under ``module``, as DistributedDataParallel does."""

    def __init__(self, *, wrapped: bool = False, fc: str = "fc") -> None:
        super().__init__()
        inside = torch.nn.Module() if wrapped else self
        inside.add_module(fc, torch.nn.Linear(4, 3))
        inside.add_module("norm", torch.nn.BatchNorm1d(3))
        if wrapped:
            self.module = inside


def trained(model: torch.nn.Module, kind: Any = torch.optim.AdamW, **options: Any) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = kind(model.parameters(), lr=0.25, **options)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return optimizer


def flattened(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Its state by names, as torchtitan saves it."""
    return dict(get_optimizer_state_dict(model, optimizer, options=FLAT))


def megatron(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    slots = ("exp_avg", "exp_avg_sq", "fp32_param")
    rows = model.named_parameters()
    return {f"optimizer.state.{slot}.{name}": torch.randn_like(value) for name, value in rows for slot in slots}


def beside(model: torch.nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": state, "step": 3}


def among(model: torch.nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    front = "" if next(iter(state)).startswith("optimizer.") else "optimizer."
    return {**model.state_dict(), **{f"{front}{name}": value for name, value in state.items()}}


Layout = Callable[[torch.nn.Module, dict[str, Any]], dict[str, Any]]
LAYOUTS: dict[str, Layout] = {"beside": beside, "among": among}
KINDS = ("zip", "legacy", "dcp")


def written(value: dict[str, Any], path: Path, kind: str) -> Path:
    if kind == "dcp":
        dcp.save(value, checkpoint_id=path)  # type: ignore[attr-defined]
        return path
    torch.save(value, path, _use_new_zipfile_serialization=kind == "zip")
    return path


def names(path: Path) -> set[str]:
    """All keys, those of nested mappings by their last component alone."""
    checkpoint = ckptfix.formats.open_checkpoint(path)
    return {name for site in checkpoint.sites if site.kind in ("state_dict", "optimizer_state") for name in site.names}


VERBS: dict[str, tuple[bool, Callable[..., Any], str, str]] = {
    "strip-module": (True, ckptfix.strip_module, "module.", ""),
    "unwrap": (True, ckptfix.unwrap, "module.", ""),
    "add-module": (False, ckptfix.add_module, "", "module."),
    "rename": (False, lambda *paths, **how: ckptfix.rename(*paths, subs=[(r"^fc", "head")], **how), "fc", "head"),
}


def changed(name: str, old: str, new: str) -> str:
    return new + name.removeprefix(old) if name.startswith(old) else name


@pytest.mark.sampled(12)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("of_megatron", [False, True])
def test_every_name_follows(tmp_path: Path, verb: str, layout: str, kind: str, of_megatron: bool) -> None:
    wrapped, run, old, new = VERBS[verb]
    model = Model(wrapped=wrapped)
    optimizer = trained(model)
    state = megatron(model) if of_megatron else flattened(model, optimizer)
    source = written(LAYOUTS[layout](model, state), tmp_path / "in", kind)
    result = run(source, tmp_path / "out")
    keys = {name: changed(name, old, new) for name in model.state_dict()}
    expected = set()
    for name in names(source):
        for before, after in sorted(keys.items(), key=lambda row: -len(row[0])):
            if f".{before}." in f".{name}.":
                name = f".{name}.".replace(f".{before}.", f".{after}.")[1:-1]
                break
        expected.add(name)
    assert names(tmp_path / "out") == expected != names(source)
    assert [change.old for change in result.changes] == [name for name in keys if keys[name] != name]
    assert result.exit_code == 0 and result.references >= len(state) // 2
    check = ckptfix.digest(tmp_path / "out", check=source).check
    assert check is not None and check.verified


@pytest.mark.parametrize("kind", ["zip", "dcp"])
@pytest.mark.parametrize("made", [torch.optim.AdamW, torch.optim.SGD])
def test_torch_loads_what_followed(tmp_path: Path, made: Any, kind: str) -> None:
    """Of SGD without momentum there are options alone, and no tensor."""
    model, plain = Model(wrapped=True), Model()
    source = written(beside(model, flattened(model, trained(model, made))), tmp_path / "in", kind)
    ckptfix.strip_module(source, tmp_path / "out")
    ckptfix.convert(tmp_path / "out", tmp_path / "one.pth")
    found = torch.load(tmp_path / "one.pth", weights_only=False)
    plain.load_state_dict(found["model"])
    optimizer = made(plain.parameters(), lr=1.0)
    set_optimizer_state_dict(plain, optimizer, found["optimizer"], options=FLAT)
    assert optimizer.param_groups[0]["lr"] == 0.25
    again = flattened(plain, optimizer)
    assert again.keys() == found["optimizer"].keys()
    assert all(torch.equal(torch.as_tensor(again[name]), torch.as_tensor(value))
               for name, value in found["optimizer"].items() if isinstance(value, (torch.Tensor, float)))  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("zipped", [True, False])
def test_in_place_and_back(tmp_path: Path, layout: str, zipped: bool) -> None:
    model = Model(wrapped=True)
    path = tmp_path / "a.pth"
    value = LAYOUTS[layout](model, flattened(model, trained(model)))
    torch.save(value, path, _use_new_zipfile_serialization=zipped)
    before = path.read_bytes()
    ckptfix.strip_module(path, tmp_path / "copy.pth")
    ckptfix.strip_module(path, in_place=True)
    assert names(path) == names(tmp_path / "copy.pth") and not any("module." in name for name in names(path))
    ckptfix.undo(path)
    assert path.read_bytes() == before
    ckptfix.add_module(tmp_path / "copy.pth", tmp_path / "again.pth")
    assert names(tmp_path / "again.pth") == names(path)


def test_an_optimizer_alone(tmp_path: Path) -> None:
    model = Model(wrapped=True)
    state = flattened(model, trained(model))
    for number, value in enumerate((state, {"optimizer": state}, megatron(model))):
        source = written(value, tmp_path / f"{number}.pth", "zip")
        result = ckptfix.strip_module(source, tmp_path / f"{number}-out.pth")
        assert {name.replace("module.", "") for name in names(source)} == names(tmp_path / f"{number}-out.pth")
        assert not result.changes and "names of an optimizer" in result.lines[0]


def test_at_leaves_what_another_model_has_too(tmp_path: Path) -> None:
    model = Model(wrapped=True)
    value = {**beside(model, flattened(model, trained(model))), "ema": {"net": model.state_dict()}}
    source = written(value, tmp_path / "a.pth", "zip")
    result = ckptfix.strip_module(source, tmp_path / "out.pth", at="ema/net")
    assert "optimizer-names-left" in {row.id for row in result.findings}
    found = torch.load(tmp_path / "out.pth")
    assert found["optimizer"].keys() == value["optimizer"].keys() and "fc.weight" in found["ema"]["net"]
    ckptfix.strip_module(source, tmp_path / "out2.pth", at="optimizer")
    found = torch.load(tmp_path / "out2.pth")
    assert "state.fc.weight.exp_avg" in found["optimizer"] and "module.fc.weight" in found["model"]


def test_two_names_that_become_one_are_a_conflict(tmp_path: Path) -> None:
    state = {"state.a.w.exp_avg": torch.ones(2), "state.b.w.exp_avg": torch.ones(2), "param_groups.a.w.lr": 0.1}
    source = written({"model": {"a.w": torch.ones(2)}, "optimizer": state}, tmp_path / "a.pth", "zip")
    with pytest.raises(KeyConflict, match=r"state\.b\.w\.exp_avg"):
        ckptfix.rename(source, tmp_path / "out.pth", mapping={"a.w": "b.w"})
    assert not (tmp_path / "out.pth").exists()


def test_parameters_whose_names_begin_alike(tmp_path: Path) -> None:
    """`a` is a parameter, and `a.weight` is another: each keeps its own state."""
    model = {"a": torch.ones(2), "a.weight": torch.ones(3), "exp_avg.weight": torch.ones(4)}
    state = {f"state.{name}.exp_avg": value for name, value in model.items()}
    source = written({"model": model, "optimizer": state}, tmp_path / "a.pth", "zip")
    ckptfix.rename(source, tmp_path / "out.pth", mapping={"a": "b", "exp_avg.weight": "c.weight"})
    found = torch.load(tmp_path / "out.pth")
    assert list(found["model"]) == ["b", "a.weight", "c.weight"]
    assert list(found["optimizer"]) == ["state.b.exp_avg", "state.a.weight.exp_avg", "state.c.weight.exp_avg"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_file_of_rules(tmp_path: Path, layout: str) -> None:
    model = Model()
    state = flattened(model, trained(model))
    source = written(LAYOUTS[layout](model, state), tmp_path / "a.pth", "zip")
    rules = tmp_path / "rules.txt"
    rules.write_text("fc.{*} -> head.{*}\nnorm.num_batches_tracked | drop\n")
    result = ckptfix.rename(source, tmp_path / "out.pth", rules=rules)
    expected = {name.replace("fc.", "head.") for name in names(source)} - {"norm.num_batches_tracked"}
    assert names(tmp_path / "out.pth") == expected
    assert result.references >= sum("fc." in name for name in state)
    assert [change.old for change in result.changes] == ["fc.weight", "fc.bias"]
    rules.write_text("fc.weight -> fc.{a,b,c}.weight | split\n")
    with pytest.raises(Refused, match="of a flattened optimizer") as caught:
        ckptfix.rename(source, tmp_path / "out2.pth", rules=rules)
    assert "--no-optimizer" in str(caught.value.hint) and not (tmp_path / "out2.pth").exists()
    rules.write_text("fc.bias | drop\n")
    dropped = ckptfix.rename(source, tmp_path / "out3.pth", rules=rules)
    assert names(tmp_path / "out3.pth") == {name for name in names(source) if "fc.bias" not in name}
    assert dropped.exit_code == result.exit_code == 0
    behind = {row.where.rpartition("/")[2] for row in dropped.findings if row.id == "left-behind"}
    assert {name.removeprefix("optimizer.") for name in behind} >= {"fc.bias", "state.fc.bias.exp_avg"}
