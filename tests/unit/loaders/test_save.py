"""save: complete or absent, in the place of the old file; and load, the short name."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import ckptfix
from ckptfix.errors import NoSuchFolder, Refused, WriteFailed, WrongType


class Fails:
    """An object that cannot be pickled."""

    def __reduce__(self) -> str:
        raise ValueError("not me")


def test_it_is_what_torch_save_writes(tmp_path: Path) -> None:
    state = {"model": {"w": torch.arange(3.0)}, "epoch": 3}
    path = tmp_path / "a.pth"
    ckptfix.save(state, path)
    assert torch.load(path, weights_only=True)["epoch"] == 3
    assert ckptfix.load(path)["model"]["w"].tolist() == [0, 1, 2] and ckptfix.load is ckptfix.load_checkpoint
    assert ckptfix.doctor(path).exit_code() == 0
    ckptfix.save(state["model"], tmp_path / "a.safetensors")
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"} and file.get_tensor("w").tolist() == [0, 1, 2]


def test_the_old_file_stays_until_the_new_one_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.pth"
    ckptfix.save({"w": torch.ones(2)}, path)
    path.chmod(0o640)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="not me"):
        ckptfix.save({"w": torch.ones(2), "x": Fails()}, path)

    def full(number: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(WriteFailed, match="No space left"):
            ckptfix.save({"w": torch.zeros(2)}, path)
    assert path.read_bytes() == before and [one.name for one in tmp_path.iterdir()] == ["a.pth"]
    ckptfix.save({"w": torch.zeros(2)}, path)
    assert ckptfix.load(path)["w"].tolist() == [0, 0] and stat.S_IMODE(path.stat().st_mode) == 0o640


def test_what_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.pth"
    ckptfix.save({}, path)
    with pytest.raises(Refused, match="exists"):
        ckptfix.save({}, path, overwrite=False)
    with pytest.raises(WrongType, match="swapped"):
        ckptfix.save(str(path), {"w": 1})  # type: ignore[arg-type]
    with pytest.raises(NoSuchFolder):
        ckptfix.save({}, tmp_path / "none/a.pth")
    tied = torch.ones(2)
    with pytest.raises(Refused, match="safetensors cannot hold it"):
        ckptfix.save({"a": tied, "b": tied}, tmp_path / "a.safetensors")
    with pytest.raises(Refused, match="safetensors cannot hold it"):
        ckptfix.save({"a": 1}, tmp_path / "a.safetensors")
    assert [one.name for one in tmp_path.iterdir()] == ["a.pth"]
