"""Some tensors of a state dict: the others are gone with their bytes, and nothing else changes."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import ckptfix
from ckptfix.errors import Refused


def training() -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.dtype is other.dtype
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("legacy", [False, True])
def test_the_rest_of_a_training_checkpoint_stays(tmp_path: Path, legacy: bool) -> None:
    whole = training()
    torch.save(whole, tmp_path / "in.pth", _use_new_zipfile_serialization=not legacy)
    done = ckptfix.select(tmp_path / "in.pth", tmp_path / "out.pth", drop=["2.*", "*.num_batches_tracked"])
    found = torch.load(tmp_path / "out.pth", weights_only=True)
    gone = {"2.weight", "2.bias", "1.num_batches_tracked"}
    expected = {**whole, "model": {key: value for key, value in whole["model"].items() if key not in gone}}
    expected["model"] = type(whole["model"])(expected["model"])
    assert same(expected, found)
    assert set(done.dropped) == {f"model/{name}" for name in gone} and done.kept == 6
    assert [row.id for row in done.findings] == ["optimizer-left"]
    assert not done.account.lost and done.exit_code == 0


@pytest.mark.parametrize("size", [None, 100])
def test_a_safetensors_file_and_shards(tmp_path: Path, size: int | None) -> None:
    whole = {f"{part}.{i}": torch.randn(5) for part in ("enc", "dec") for i in range(8)}
    safetensors.torch.save_file(whole, tmp_path / "in.safetensors", metadata={"format": "pt", "a": "b"})
    source, dest = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    if size is not None:
        ckptfix.convert(source, tmp_path / "in", to="hf", shard_size=size)
        source, dest = tmp_path / "in", tmp_path / "out"
    ckptfix.select(source, dest, keep=["enc.*"], drop=["*.7"])
    files = [dest] if size is None else sorted(dest.glob("*.safetensors"))
    found = {name: tensor for file in files for name, tensor in safetensors.torch.load_file(file).items()}
    assert same({name: whole[name] for name in sorted(found)}, dict(sorted(found.items())))
    assert set(found) == {f"enc.{i}" for i in range(7)}
    if size is not None:
        assert all(safetensors.torch.load_file(file) for file in files), "a shard of nothing"
        assert not ckptfix.doctor(dest).exit_code(fail_on="warning")
    else:
        with safetensors.safe_open(dest, "pt") as file:
            assert file.metadata() == {"format": "pt", "a": "b"}


def test_a_distributed_checkpoint_loses_the_bytes_too(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    whole = {"model": {f"l{i}.w": torch.randn(500) for i in range(4)}, "epoch": 2}
    torch.save(whole, tmp_path / "in.pth")
    ckptfix.convert(tmp_path / "in.pth", tmp_path / "in", to="dcp")
    ckptfix.select(tmp_path / "in", tmp_path / "out", drop=["l1.*", "l2.*"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(tmp_path / "out", tmp_path / "back.pth")
    found = torch.load(tmp_path / "back.pth", weights_only=True)
    kept = {name: tensor for name, tensor in whole["model"].items() if name[:2] in ("l0", "l3")}  # type: ignore[attr-defined]
    assert same({"model": kept, "epoch": 2}, {"model": dict(found["model"]), "epoch": found["epoch"]})
    size = sum(file.stat().st_size for file in (tmp_path / "in").glob("*.distcp"))
    assert sum(file.stat().st_size for file in (tmp_path / "out").glob("*.distcp")) < size - 2 * 2000
    assert not ckptfix.doctor(tmp_path / "out").exit_code(fail_on="warning")


def test_a_name_that_is_tied_to_one_that_goes_gets_its_bytes(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"embed": torch.nn.Linear(3, 2, bias=False), "head": torch.nn.Linear(3, 2)})
    model["head"].weight = model["embed"].weight
    safetensors.torch.save_model(model, str(tmp_path / "in.safetensors"))
    ckptfix.select(tmp_path / "in.safetensors", tmp_path / "out.safetensors", drop=["embed.*"])
    found = safetensors.torch.load_file(tmp_path / "out.safetensors")
    assert same({key: model.state_dict()[key] for key in ("head.bias", "head.weight")}, dict(sorted(found.items())))


def test_values_that_are_not_tensors_stay_but_for_the_state_of_modules(tmp_path: Path) -> None:
    whole = {"a.w": torch.ones(2), "a._extra_state": {"scale": 2}, "b.w": torch.ones(1), "epoch": 7, "note": "x"}
    torch.save(whole, tmp_path / "in.pth")
    done = ckptfix.select(tmp_path / "in.pth", tmp_path / "out.pth", keep=["b.*"], drop=["note"])
    assert same({"b.w": torch.ones(1), "epoch": 7}, torch.load(tmp_path / "out.pth", weights_only=True))
    assert set(done.dropped) == {"a.w", "a._extra_state", "note"}


def test_only_the_mapping_that_is_named(tmp_path: Path) -> None:
    torch.save({"g": {"a.w": torch.ones(2), "b.w": torch.ones(2)}, "d": {"a.w": torch.ones(3)}}, tmp_path / "in.pth")
    ckptfix.select(tmp_path / "in.pth", tmp_path / "out.pth", drop=["a.*"], at="g")
    found = torch.load(tmp_path / "out.pth", weights_only=True)
    assert {key: list(value) for key, value in found.items()} == {"g": ["b.w"], "d": ["a.w"]}


def test_nothing_left_no_glob_and_a_glob_that_matches_nothing(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "in.pth")
    for options in ({"keep": ["x*"], "allow_unmatched": True}, {"drop": ["*"]}, {}):
        with pytest.raises(Refused):
            ckptfix.select(tmp_path / "in.pth", tmp_path / "out.pth", **options)
        assert not (tmp_path / "out.pth").exists()
    done = ckptfix.select(tmp_path / "in.pth", tmp_path / "out.pth", drop=["b", "A"], allow_unmatched=True)
    assert [(row.id, row.where) for row in done.findings] == [("unused-rule", "A")]


def test_of_a_whole_module_it_is_the_state_dict(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), tmp_path / "in.pth")
    ckptfix.select(tmp_path / "in.pth", tmp_path / "out.pth", drop=["bias"])
    assert list(torch.load(tmp_path / "out.pth", weights_only=True)) == ["weight"]
