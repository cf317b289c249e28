"""One shard of a model, used alone: doctor, convert and load_into say so, and the command that they print works."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from sharded import parted, state, write

import ckptfix
from ckptfix.cli import commands
from ckptfix.errors import LoadMismatch

KINDS = ["safetensors", "bin"]


@pytest.fixture(params=KINDS)
def shards(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path, Path]:
    """A folder of two shards, and its files."""
    folder = write(tmp_path / "m", parted(state(), 2), kind=str(request.param))
    first, second = sorted(folder.glob("*-of-*"))
    return folder, first, second


def message(*names: str) -> str:
    listed = ", ".join(f'"{name}"' for name in names)
    return f"RuntimeError: Error(s) in loading state_dict for Net:\n\tMissing key(s) in state_dict: {listed}. "


def test_doctor_says_which_shards_have_the_missing_keys(
    shards: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, first, _ = shards
    name = list(state())[-1]
    found = ckptfix.doctor(first, error=message(name)).findings[0]
    assert (found.id, found.severity) == ("one-shard", "error")
    assert found.message == f"the file is shard 1 of 2 of a model; the others hold {name}"
    line = (found.fix or "").split("`")[1]
    monkeypatch.chdir(tmp_path)
    assert commands.main(shlex.split(line)[1:], standalone_mode=False) == 0
    (out,) = tmp_path.glob("m.*")
    joined = ckptfix.load_state_dict(out)
    assert joined.keys() == state().keys()
    assert all(torch.equal(joined[key], value) for key, value in state().items())


def test_a_key_that_no_shard_has_stays_missing(shards: tuple[Path, Path, Path]) -> None:
    _, first, _ = shards
    name = list(state())[-1]
    rows = ckptfix.doctor(first, error=message(name, "nowhere.weight")).findings
    assert {"one-shard", "missing-keys"} <= {row.id for row in rows if row.severity == "error"}
    rows = ckptfix.doctor(first, error=message("nowhere.weight")).findings
    assert [row.id for row in rows if row.severity == "error"] == ["missing-keys"]


def test_shards_that_are_not_there_are_named(shards: tuple[Path, Path, Path]) -> None:
    folder, first, second = shards
    name = list(state())[-1]
    second.unlink()
    for index in folder.glob("*.json"):
        index.unlink()
    found = ckptfix.doctor(first, error=message(name)).findings[0]
    assert found.id == "one-shard" and second.name in (found.fix or "")


@pytest.mark.parametrize("use", [
    lambda path: [row.severity for row in ckptfix.doctor(path).findings if row.id == "one-shard"] == ["info"],
    lambda path: [
        row.severity for row in ckptfix.convert(path, path.with_suffix(".pt")).findings if row.id == "one-shard"
    ] == ["warning"],
])  # fmt: skip
def test_a_shard_alone_is_noticed(shards: tuple[Path, Path, Path], use: Callable[[Path], bool]) -> None:
    _, first, _ = shards
    assert use(first)


def test_a_file_of_all_is_no_shard(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", parted(state(), 1))
    (only,) = folder.glob("*.safetensors")
    whole = only.rename(folder / "model-00001-of-00001.safetensors")
    assert "one-shard" not in {row.id for row in ckptfix.doctor(whole).findings}


def test_load_into_names_the_folder(shards: tuple[Path, Path, Path]) -> None:
    folder, first, _ = shards
    model = torch.nn.ParameterDict({name.replace(".", "_"): value for name, value in state().items()})
    with pytest.raises(LoadMismatch) as error:
        ckptfix.load_into(model, first)
    assert str(folder) in (error.value.hint or "")
