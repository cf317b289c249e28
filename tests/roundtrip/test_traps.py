"""The mistakes that hand-written scripts make, one test each."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_same
from kinds import CONTAINERS, CUDA, KINDS, Net, tensor
from torch import nn
from torch_versions import named_parameters

import ckptfix
from ckptfix import errors

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("container", CONTAINERS)]


def saved(path: Path, container: str, obj: Any, protocol: int = 2) -> Path:
    torch.save(obj, path, pickle_protocol=protocol, _use_new_zipfile_serialization=container == "zip")
    return path


def loaded(path: Path, *, safe: bool = True) -> Any:
    return torch.load(path, weights_only=safe, map_location="cpu")


def test_submodule_is_untouched(container: str, tmp_path: Path) -> None:
    names = ["module.submodule.weight", "module.a.module.b", "module.module_list.0", "module.x_module.w"]
    source = saved(tmp_path / "in", container, {name: tensor(2) for name in names})
    ckptfix.strip_module(source, tmp_path / "out")
    assert list(loaded(tmp_path / "out")) == ["submodule.weight", "a.module.b", "module_list.0", "x_module.w"]


def test_a_partial_prefix_is_refused(container: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "in", container, {"module.a": tensor(2), "b": tensor(2)})
    with pytest.raises(errors.PartialPrefix) as caught:
        ckptfix.strip_module(source, tmp_path / "out")
    assert "b" in caught.value.others and not (tmp_path / "out").exists()
    ckptfix.strip_module(source, tmp_path / "out", partial=True)
    assert list(loaded(tmp_path / "out")) == ["a", "b"]


def test_known_companions_do_not_make_a_prefix_partial(container: str, tmp_path: Path) -> None:
    averaged = torch.optim.swa_utils.AveragedModel(Net())
    source = saved(tmp_path / "in", container, averaged.state_dict())
    ckptfix.strip_module(source, tmp_path / "out")
    assert list(loaded(tmp_path / "out")) == ["n_averaged", *Net().state_dict()]


def test_a_conflict_is_refused(container: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "in", container, {"module.a": tensor(2), "a": tensor(3)})
    with pytest.raises(errors.KeyConflict) as caught:
        ckptfix.strip_module(source, tmp_path / "out", partial=True)
    assert caught.value.pairs and not (tmp_path / "out").exists()
    with pytest.raises(errors.KeyConflict):
        ckptfix.rename(source, tmp_path / "out", mapping={"a": "module.a"})
    assert not (tmp_path / "out").exists()


def test_a_swap_of_names_is_no_conflict(container: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "in", container, {"a": tensor(2), "b": tensor(3)})
    ckptfix.rename(source, tmp_path / "out", mapping={"a": "b", "b": "a"})
    got = loaded(tmp_path / "out")
    assert [(name, len(value)) for name, value in got.items()] == [("b", 2), ("a", 3)]


def test_one_location_string_of_a_thousand_storages_and_a_value(container: str, tmp_path: Path) -> None:
    kind = KINDS["one-tag-for-all"]
    source = kind.save(tmp_path / "in", container)
    result = ckptfix.map_location(source, tmp_path / "out", "cpu")
    assert result.moved == {(CUDA, "cpu"): 1000}
    got = torch.load(tmp_path / "out", weights_only=True)
    assert got["note"] == CUDA and got[CUDA] == CUDA
    assert_same(kind.make(), got)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_value_equal_to_a_key_is_untouched(container: str, protocol: int, tmp_path: Path) -> None:
    name = "module.w"
    obj = {"watch": name, "state_dict": OrderedDict({name: tensor(2)}), "list": [name, name], name: "outer"}
    source = saved(tmp_path / "in", container, obj, protocol)
    ckptfix.strip_module(source, tmp_path / "out")
    got = loaded(tmp_path / "out", safe=protocol < 4)
    assert list(got["state_dict"]) == ["w"]
    assert got["watch"] == name and got["list"] == [name, name] and got[name] == "outer"


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_keys_shared_with_param_names(container: str, protocol: int, tmp_path: Path) -> None:
    model = nn.DataParallel(Net())
    optimizer = torch.optim.Adam(named_parameters(model))
    source = saved(tmp_path / "in", container, {"m": model.state_dict(), "o": optimizer.state_dict()}, protocol)
    ckptfix.strip_module(source, tmp_path / "out")
    got = loaded(tmp_path / "out", safe=protocol < 4)
    plain = Net()
    assert got["o"]["param_groups"][0]["param_names"] == [name for name, _ in plain.named_parameters()]
    plain.load_state_dict(got["m"])
    torch.optim.Adam(plain.named_parameters()).load_state_dict(got["o"])


@pytest.mark.parametrize("name", ["protocol-4", "protocol-5", "many-frames"])
def test_frames_of_protocol_4(container: str, name: str, tmp_path: Path) -> None:
    source = KINDS[name].save(tmp_path / "in", container)
    ckptfix.strip_module(source, tmp_path / "out")
    ckptfix.map_location(source, tmp_path / "moved", "cuda:11")
    got = loaded(tmp_path / "out", safe=False)
    mapping = got.get("model_state_dict", got.get("state_dict"))
    assert mapping and not any(key.startswith("module.") for key in mapping)
    assert_same(KINDS[name].make(), loaded(tmp_path / "moved", safe=False))


def test_a_submodule_really_called_module(container: str, tmp_path: Path) -> None:
    """A model with a child ``module`` beside others keeps its names; wrapped, it loses one level only."""
    model = nn.ModuleDict({"module": nn.Linear(2, 2), "head": nn.Linear(2, 1)})
    source = saved(tmp_path / "plain", container, model.state_dict())
    with pytest.raises(errors.PartialPrefix):
        ckptfix.strip_module(source, tmp_path / "out")
    source = saved(tmp_path / "wrapped", container, nn.DataParallel(model).state_dict())
    ckptfix.strip_module(source, tmp_path / "out")
    model.load_state_dict(loaded(tmp_path / "out"), strict=True)


def test_a_key_without_the_prefix_is_not_cut(container: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "in", container, {"encoder.layer.weight": tensor(2)})
    ckptfix.strip_module(source, tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == source.read_bytes()


def test_a_name_shared_with_another_value(container: str, tmp_path: Path) -> None:
    """The key ``storage`` is the same memoised string as the tag of every persistent id."""
    source = saved(tmp_path / "in", container, {"storage": tensor(2), "cpu": tensor(3), "0": tensor(4)})
    ckptfix.add_module(source, tmp_path / "out")
    assert list(loaded(tmp_path / "out")) == ["module.storage", "module.cpu", "module.0"]
    ckptfix.map_location(source, tmp_path / "moved", "cuda:3")
    assert list(loaded(tmp_path / "moved")) == ["storage", "cpu", "0"]


def test_a_tie_survives(container: str, tmp_path: Path) -> None:
    source = KINDS["tied"].save(tmp_path / "in", container)
    ckptfix.strip_module(source, tmp_path / "out")
    got = loaded(tmp_path / "out")
    assert got["embed.weight"].data_ptr() == got["head.weight"].data_ptr()
    assert got["a"] is got["b"] or got["a"].data_ptr() == got["b"].data_ptr()


def test_batch_norm_versions_follow_their_modules(container: str, tmp_path: Path) -> None:
    """Without ``_metadata`` a BatchNorm would load as of version 1, and not ask for num_batches_tracked."""
    source = KINDS["data-parallel"].save(tmp_path / "in", container)
    ckptfix.strip_module(source, tmp_path / "out")
    assert loaded(tmp_path / "out")._metadata["submodule.1"] == {"version": 2}


def test_the_same_mapping_twice(container: str, tmp_path: Path) -> None:
    """One dict under two keys is renamed once, and stays one."""
    state = OrderedDict({"module.w": tensor(2)})
    source = saved(tmp_path / "in", container, {"model": state, "ema": state})
    ckptfix.strip_module(source, tmp_path / "out")
    got = loaded(tmp_path / "out")
    assert list(got["model"]) == ["w"] and got["model"] is got["ema"]


def test_one_tensor_in_two_state_dicts(container: str, tmp_path: Path) -> None:
    weight = tensor(2)
    obj = {"model": {"module.w": weight}, "ema": {"w": weight}}
    source = saved(tmp_path / "in", container, obj)
    ckptfix.strip_module(source, tmp_path / "out")
    got = loaded(tmp_path / "out")
    assert list(got["model"]) == list(got["ema"]) == ["w"]
    assert got["model"]["w"].data_ptr() == got["ema"]["w"].data_ptr()
