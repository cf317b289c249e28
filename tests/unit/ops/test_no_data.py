"""Tensors on the meta device: the file has their shape, and no command takes it for values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfix
from ckptfix.errors import CkptfixError
from ckptfix.findings.load_errors import LoadError
from ckptfix.ops.doctor import messages


def saved(path: Path, *, legacy: bool = False, at: str | None = None) -> Path:
    state: Any = {"fc.weight": torch.ones(3, 2), "fc.bias": torch.empty(3, device="meta"), "none": torch.empty(0)}
    torch.save(state if at is None else {at: state}, path, _use_new_zipfile_serialization=not legacy)
    return path


@pytest.mark.parametrize("at", [None, "model"])
@pytest.mark.parametrize("legacy", [False, True])
def test_nothing_is_said_of_values_that_do_not_exist(tmp_path: Path, legacy: bool, at: str | None) -> None:
    path, copy = saved(tmp_path / "m.pth", legacy=legacy, at=at), saved(tmp_path / "copy.pth", legacy=legacy, at=at)
    name = "fc.bias" if at is None else f"{at}/fc.bias"
    rows = [row for row in ckptfix.doctor(path).findings if row.id == "no-data"]
    assert [(row.severity, row.where) for row in rows] == [("error", name)]
    digests = ckptfix.digest(path)
    assert digests.no_data == (name,) and digests.exit_code == 3 and name not in digests.manifest
    checked = ckptfix.digest(path, check=copy)
    assert checked.check is not None and checked.check.no_data == (name,) and checked.exit_code == 1
    assert not checked.check.verified and any(name in line for line in checked.lines)
    compared = ckptfix.diff(path, copy)
    assert not compared.same and [row.name_a for row in compared.changed] == [name]
    assert compared.changed[0].values is not None and compared.changed[0].values.reason == "no data on both sides"
    for options in ({"to": "dcp"}, {"to": "safetensors"}, {"to": "hf"}):
        with pytest.raises(CkptfixError, match=r"data|meta"):
            ckptfix.convert(path, tmp_path / "out", **options)  # type: ignore[arg-type]
    with pytest.raises(CkptfixError) as average:
        ckptfix.average([path, copy], tmp_path / "mean.pth")
    assert average.value.where == name
    cast = ckptfix.cast(path, tmp_path / "cast.pth", "float16")
    assert set(cast.kept) == {name} and not {name} & set(cast.cast)
    assert [row.reason is None for row in ckptfix.stats(path).rows] == [True, False, True]
    assert not (tmp_path / "out").exists() and not (tmp_path / "mean.pth").exists()


def test_data_on_one_side_alone(tmp_path: Path) -> None:
    path = saved(tmp_path / "m.pth")
    torch.save({**torch.load(path), "fc.bias": torch.zeros(3)}, tmp_path / "whole.pth")
    for a, b in (("m", "whole"), ("whole", "m")):
        changed = ckptfix.diff(tmp_path / f"{a}.pth", tmp_path / f"{b}.pth").changed
        assert [row.name_a for row in changed] == ["fc.bias"] and changed[0].values is not None
        assert changed[0].values.reason == "no data on one side"
        assert ckptfix.digest(tmp_path / f"{a}.pth", check=tmp_path / f"{b}.pth").exit_code == 1


@pytest.mark.parametrize(
    "text",
    [
        "NotImplementedError: Cannot copy out of meta tensor; no data!",
        "NotImplementedError: Cannot copy out of meta tensor; no data! Please use torch.nn.Module.to_empty() instead "
        "of torch.nn.Module.to() when moving module from meta to a different device.",
        "RuntimeError: Tensor on device meta is not on the expected device: the parameter is on the meta device",
    ],
)
def test_the_message_of_torch_is_known(tmp_path: Path, text: str) -> None:
    assert LoadError.NO_DATA in messages.rows(text)
    found = ckptfix.doctor(saved(tmp_path / "m.pth"), error=text)
    assert found.findings[0].id == "no-data" and found.exit_code() == 1
