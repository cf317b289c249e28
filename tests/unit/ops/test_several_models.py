"""A folder in which two files or series may be the model: what is taken is said, or the folder is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sharded
import torch
from safetensors.torch import save_file

import ckptfix
from ckptfix.errors import Refused
from ckptfix.formats.shards.files import find

STATE = sharded.state(2, "module.")
OTHER = {name: value + 1 for name, value in STATE.items()}
FEWER = dict(list(STATE.items())[:2])


def named(folder: Path, name: str, state: sharded.State) -> None:
    folder.mkdir(exist_ok=True)
    if name.endswith(".safetensors"):
        save_file(state, folder / name, metadata={"format": "pt"})
    else:
        torch.save(state, folder / name)


@pytest.mark.parametrize("state", [STATE, OTHER])
def test_the_same_model_in_two_containers(tmp_path: Path, state: sharded.State) -> None:
    """Names and shapes agree: safetensors is taken, as from_pretrained does, and both lines say so."""
    folder = tmp_path / "hub"
    named(folder, "model.safetensors", STATE)
    named(folder, "pytorch_model.bin", state)
    done = ckptfix.strip_module(folder, tmp_path / "out.safetensors")
    assert "read model.safetensors" in done.lines[0]
    assert "pytorch_model.bin has the same keys and shapes, and was not used" in done.lines[0]
    assert [found.id for found in done.findings] == ["other-model"]
    (row,) = [found for found in ckptfix.doctor(folder).findings if found.id == "other-model"]
    assert (row.severity, row.where) == ("info", "pytorch_model.bin")


def test_another_model_in_another_container(tmp_path: Path) -> None:
    folder = tmp_path / "hub"
    named(folder, "model.safetensors", STATE)
    named(folder, "pytorch_model.bin", FEWER)
    for done in (ckptfix.strip_module(folder, tmp_path / "out.safetensors"), ckptfix.doctor(folder)):
        (row,) = [found for found in done.findings if found.id == "other-model"]
        assert (row.severity, row.message) == ("warning", "pytorch_model.bin has different tensors, and was not used")


def test_what_cannot_be_read_is_named_too(tmp_path: Path) -> None:
    folder = tmp_path / "hub"
    named(folder, "model.safetensors", STATE)
    (folder / "pytorch_model.bin").write_bytes(b"cut")
    (row,) = ckptfix.to_cpu(folder, tmp_path / "out.safetensors").findings
    assert "cannot be read" in row.message


VERBS: dict[str, Callable[[Path, Path], Any]] = {
    "strip-module": ckptfix.strip_module,
    "to-cpu": ckptfix.to_cpu,
    "repair": ckptfix.repair,
    "fix": ckptfix.fix,
    "convert": lambda source, dest: ckptfix.convert(source, dest, to="zip"),
    "inspect": lambda source, dest: ckptfix.inspect(source),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    "names",
    [
        ("model-00001-of-00001.safetensors", "model-000001-of-00001.safetensors"),
        ("model-00001-of-00001.safetensors", "model-000001-of-000001.safetensors"),
        ("pytorch_model-00001-of-00001.bin", "pytorch_model-000001-of-000001.bin"),
        ("model-00001-of-00001.safetensors", "model.safetensors"),
        ("model-00001-of-00001.fp16.safetensors", "model.fp16.safetensors"),
        ("pytorch_model-00001-of-00001.bin", "pytorch_model.bin"),
    ],
)
def test_two_series_are_refused_by_name(tmp_path: Path, names: tuple[str, str], verb: str) -> None:
    folder = tmp_path / "hub"
    for name, state in zip(names, (STATE, OTHER), strict=True):
        named(folder, name, state)
    with pytest.raises(Refused) as caught:
        VERBS[verb](folder, tmp_path / "out")
    assert all(name in caught.value.message for name in names)
    assert "name " in (caught.value.hint or "")
    assert not (tmp_path / "out").exists()
    assert ckptfix.inspect(folder / names[1]).tensors == len(STATE), "the way out is to name the file"


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_an_index_says_which_and_the_other_stays_behind(tmp_path: Path, name: str) -> None:
    """Left in the output, a loader could take it, with the old names, in place of the shards."""
    folder = sharded.write(tmp_path / "hub", sharded.parted(STATE, 2))
    named(folder, name, OTHER)
    (row,) = [found for found in ckptfix.doctor(folder).findings if found.id == "other-model"]
    assert (row.severity, row.where) == ("warning", name)
    done = ckptfix.strip_module(folder, tmp_path / "out")
    assert [found.where for found in done.findings if found.id == "left-behind"] == [name]
    assert not (tmp_path / "out" / name).exists()
    assert (tmp_path / "out" / "config.json").exists()


def test_an_index_may_list_one_whole_file(tmp_path: Path) -> None:
    folder = tmp_path / "hub"
    named(folder, "model.safetensors", STATE)
    text = json.dumps({"metadata": {}, "weight_map": dict.fromkeys(STATE, "model.safetensors")})
    (folder / "model.safetensors.index.json").write_text(text)
    assert not [found for found in ckptfix.doctor(folder).findings if found.id == "other-model"]
    ckptfix.strip_module(folder, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_files_of_other_models_are_none_of_it(tmp_path: Path) -> None:
    folder = sharded.write(tmp_path / "hub", sharded.parted(STATE, 2))
    for name in ("adapter_model.safetensors", "model.fp16.safetensors", "consolidated.safetensors"):
        named(folder, name, OTHER)
    assert find(str(folder)).wholes == ()
