"""Folders that ckptfix writes: what torch unpickles is what torch would have pickled, and loads on any ranks."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_same
from conftest import LONG
from dcp_ranks import merged
from safetensors.torch import save_file
from torch.distributed.checkpoint.format_utils import torch_save_to_dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from unit.formats.dcp.conftest import on_ranks

import ckptfix
from ckptfix.errors import KeyConflict, Refused, Unsupported
from ckptfix.formats import open_checkpoint


def written(tmp_path: Path, state: object, **options: Any) -> Path:
    torch.save(state, tmp_path / "in.pth", **options)
    done = ckptfix.convert(tmp_path / "in.pth", tmp_path / "out", to="dcp")
    assert (done.exit_code, done.format, done.account.lost) == (0, "dcp", ())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [".metadata", "__0_0.distcp"]
    return tmp_path / "out"


def state() -> dict[str, Any]:
    base = torch.randn(6, 4)
    return {
        "model": OrderedDict(
            {"a.weight": base, "b.weight": base, "view": base[1:3], "turned": base.t(), "half": base.bfloat16()},
        ),
        "scalar": torch.tensor(2.5),
        "nothing": torch.empty(0, 3),
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "small": base.to(torch.float8_e4m3fn),
        "long list": [1, 2, [3]],
        "list": [torch.ones(2), {"deep": [1]}, [torch.zeros(1)]],
        "tuple": (1, base[0]),
        "values": {"none": None, "text": "é", "big": 1 << 80, "set": {1, 2}, "bytes": b"raw"},
    }


def plain(value: Any) -> Any:
    """As a folder gives it back: no views, no ties, no gradients, dicts alone."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone(memory_format=torch.contiguous_format)
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    return value


@pytest.mark.parametrize("source", ["pth", "safetensors"])
def test_data_of_several_files_is_read_by_torch(tmp_path: Path, source: str) -> None:
    wanted = {f"w{number}": torch.randn(40, 10) for number in range(7)}
    path = tmp_path / f"in.{source}"
    save_file(wanted, path) if source == "safetensors" else torch.save(wanted, path)
    folder = tmp_path / "out"
    ckptfix.convert(path, folder, to="dcp", shard_size=6000)
    names = sorted(one.name for one in folder.iterdir())
    assert names == [".metadata", *(f"__0_{number}.distcp" for number in range(4))]
    assert all(one.stat().st_size <= 6000 for one in folder.glob("*.distcp"))
    assert_same(wanted, merged(folder, tmp_path))
    assert ckptfix.diff(path, folder).same


@pytest.mark.parametrize("form", ["zip", "legacy"])
def test_torch_gives_the_whole_object_back(tmp_path: Path, form: str) -> None:
    wanted = state()
    if form == "legacy":
        del wanted["small"]
    folder = written(tmp_path, wanted, _use_new_zipfile_serialization=form == "zip")
    found = merged(folder, tmp_path)
    found["tuple"] = (1, found["tuple"][1].clone())
    wanted["tuple"] = (1, wanted["tuple"][1].clone())
    assert_same(plain(wanted), found)
    assert ckptfix.diff(folder, tmp_path / "in.pth").same


def test_the_metadata_are_the_objects_that_torch_makes(tmp_path: Path) -> None:
    wanted = {"model": {"a.weight": torch.randn(3, 2), "b": torch.ones(4).half()}, "epoch": 3, "list": [torch.ones(1)]}
    folder = written(tmp_path, wanted)
    torch_save_to_dcp(tmp_path / "in.pth", tmp_path / "torch")
    ours, theirs = (pickle.loads((path / ".metadata").read_bytes()) for path in (folder, tmp_path / "torch"))
    assert isinstance(ours, Metadata) and vars(ours).keys() == vars(theirs).keys()
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert list(ours.state_dict_metadata) == list(theirs.state_dict_metadata)
    assert ours.planner_data == theirs.planner_data and ours.version == theirs.version
    assert set(ours.storage_data) == set(theirs.storage_data)
    kinds = {type(info) for info in (*ours.storage_data.values(), *theirs.storage_data.values())}
    assert len(kinds) == 1
    assert [index.index for index in ours.storage_data] == [
        None if isinstance(ours.state_dict_metadata[index.fqn], BytesStorageMetadata) else 0
        for index in ours.storage_data
    ]
    for info in ours.storage_data.values():
        data = (folder / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
        torch.load(io.BytesIO(data), weights_only=True)


@pytest.mark.campaign
@pytest.mark.parametrize("world", [1, 2, 3] if LONG else [3])
def test_it_is_loaded_on_any_number_of_ranks(saved: Path, tmp_path: Path, world: int) -> None:
    """What three ranks saved, as one file, as a folder again: into FSDP2 and plain models with their optimizers."""
    ckptfix.convert(saved / "fsdp", tmp_path / "one.pth")
    ckptfix.convert(tmp_path / "one.pth", tmp_path / "folder", to="dcp")
    on_ranks("load", world, tmp_path / "folder", tmp_path / "found.pt")
    found = torch.load(tmp_path / "found.pt", weights_only=False)
    whole = torch.load(saved / "fsdp.pt", weights_only=False)
    for kind in ("fsdp", "plain"):
        assert found[kind]["epoch"] == 3
        for name, value in whole["model"].items():
            assert torch.equal(found[kind]["model"][name], value), name
        for name, parts in whole["optim"]["state"].items():
            for part, value in parts.items():
                assert torch.equal(found[kind]["optim"]["state"][name][part], value), (name, part)
        assert found[kind]["optim"]["param_groups"][0]["lr"] == 0.01


def test_from_safetensors(tmp_path: Path) -> None:
    wanted = {"a.weight": torch.randn(3, 2), "b": torch.ones(4)}
    save_file(wanted, tmp_path / "in.safetensors")
    ckptfix.convert(tmp_path / "in.safetensors", tmp_path / "out", to="dcp")
    assert_same(wanted, dict(sorted(merged(tmp_path / "out", tmp_path).items())))


def test_the_very_same_tensor_shares_an_item(tmp_path: Path) -> None:
    folder = written(tmp_path, {"a": (tensor := torch.randn(1000)), "b": tensor})
    assert (folder / "__0_0.distcp").stat().st_size < 6000
    assert_same({"a": tensor.clone(), "b": tensor.clone()}, merged(folder, tmp_path))


def test_two_keys_of_one_name_are_refused(tmp_path: Path) -> None:
    torch.save({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, tmp_path / "in.pth")
    with pytest.raises(KeyConflict):
        ckptfix.convert(tmp_path / "in.pth", tmp_path / "out", to="dcp")


def test_what_is_no_dict_is_refused(tmp_path: Path) -> None:
    torch.save([torch.ones(1)], tmp_path / "in.pth")
    with pytest.raises((Unsupported, Refused)):
        ckptfix.convert(tmp_path / "in.pth", tmp_path / "out", to="dcp")


@pytest.mark.parametrize("key", [torch.ones(1), (1, torch.ones(1)), frozenset([torch.ones(1)])], ids=type)
def test_a_key_that_holds_a_tensor_is_refused(tmp_path: Path, key: object) -> None:
    torch.save({"a": torch.ones(2), "b": {key: 1}}, tmp_path / "in.pth")
    with pytest.raises(Unsupported, match="a key is an object"):
        ckptfix.convert(tmp_path / "in.pth", tmp_path / "out", to="dcp", drop_unsupported=True)


def test_keys_that_are_tuples_of_plain_values_are_names(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2), ("b", 1): torch.zeros(1)}, tmp_path / "in.pth")
    assert not ckptfix.convert(tmp_path / "in.pth", tmp_path / "out", to="dcp").exit_code


def test_empty_dicts_stay(tmp_path: Path) -> None:
    found = merged(written(tmp_path, {"w": torch.ones(1), "state": {}, "inner": [{}, {"x": 1}]}), tmp_path)
    assert found["state"] == {} and found["inner"] == [{}, {"x": 1}]


def test_its_checksums_are_right(tmp_path: Path) -> None:
    folder = written(tmp_path, state())
    checkpoint = open_checkpoint(folder)
    assert not [row for row in ckptfix.doctor(folder).findings if row.severity == "error"]
    assert {entry.name for entry in checkpoint.entries} >= {"model/a.weight", "list/0", "list/2/0"}
