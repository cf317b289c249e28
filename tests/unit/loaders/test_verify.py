"""Loaders believe no byte that fails its checksum, and say when nothing was loaded."""

from __future__ import annotations

import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch_versions import checksums

import ckptfix
from ckptfix.errors import DamagedFile, LoadMismatch, NoMatch, PartialPrefix, Refused

Load = Callable[..., Any]


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture
def path(tmp_path: Path) -> Path:
    model, optimizer = trained()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "in.pth")
    return tmp_path / "in.pth"


LOADERS: dict[str, Load] = {
    "load_checkpoint": lambda path, **how: ckptfix.load_checkpoint(path, **how),
    "load_state_dict": lambda path, **how: ckptfix.load_state_dict(path, at="model", **how),
    "load_into": lambda path, **how: ckptfix.load_into(net(1), path, **how),
    "load_into assign": lambda path, **how: ckptfix.load_into(net(1), path, assign=True, **how),
    "load_optimizer": lambda path, **how: ckptfix.load_optimizer(torch.optim.Adam(net().parameters()), path, **how),
}


def flip(path: Path, record: str, offset: int = 0) -> None:
    """Turn one bit of a stored record of a zip."""
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo(record)
        data = bytearray(path.read_bytes())
        names = int.from_bytes(data[info.header_offset + 26 : info.header_offset + 28], "little")
        extra = int.from_bytes(data[info.header_offset + 28 : info.header_offset + 30], "little")
    data[info.header_offset + 30 + names + extra + offset] ^= 1
    path.write_bytes(data)


def records(path: Path, used: str) -> list[str]:
    with zipfile.ZipFile(path) as archive:
        names = sorted((name for name in archive.namelist() if "/data/" in name), key=lambda name: int(Path(name).name))
    return names[:4] if used == "model" else names[4:]


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("loader", LOADERS)
def test_a_flipped_bit_of_the_data_is_seen(path: Path, loader: str) -> None:
    LOADERS[loader](path)
    whole = path.read_bytes()
    for record in records(path, "optimizer" if loader == "load_optimizer" else "model"):
        flip(path, record)
        with pytest.raises(DamagedFile, match="its checksum is") as caught:
            LOADERS[loader](path)
        assert f"{record} is damaged" in caught.value.message and caught.value.path == str(path)
        assert (caught.value.where or "").startswith(("model/", "0.", "1.", "state/"))
        assert "verify=False" in (caught.value.hint or "")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            LOADERS[loader](path, verify=False)
        path.write_bytes(whole)


def test_nothing_is_changed_by_damage_anywhere(path: Path) -> None:
    for record in records(path, "model"):
        flip(path, record)
        model = net(1)
        with pytest.raises(DamagedFile):
            ckptfix.load_into(model, path)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), net(1).parameters(), strict=True))
        flip(path, record)


def test_damage_in_what_is_not_loaded_is_none_of_ours(path: Path) -> None:
    flip(path, records(path, "optimizer")[-1])
    ckptfix.load_into(net(1), path)
    ckptfix.load_state_dict(path, at="model")


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("loader", LOADERS)
def test_a_pickle_that_fails_its_checksum_is_never_believed(path: Path, loader: str, verify: bool) -> None:
    data = path.read_bytes()
    path.write_bytes(data.replace(b"param_groups", b"param_grouqs", 1))
    with pytest.raises(DamagedFile, match="CRC-32") as caught:
        LOADERS[loader](path, verify=verify)
    assert caught.value.where == "in/data.pkl" and "ckptfix repair" in (caught.value.hint or "")


def test_a_file_without_checksums_loads(tmp_path: Path) -> None:
    with checksums(False):
        torch.save(net().state_dict(), tmp_path / "in.pth")
    assert ckptfix.load_into(net(1), tmp_path / "in.pth").done


class TestNothing:
    @pytest.fixture
    def other(self, tmp_path: Path) -> Path:
        torch.save({f"base.{name}": value for name, value in nn.LSTM(3, 5).state_dict().items()}, tmp_path / "x.pth")
        return tmp_path / "x.pth"

    def test_nothing_at_all_is_refused(self, other: Path) -> None:
        model = net(1)
        with pytest.raises(LoadMismatch, match="no tensor of the file fits the model") as caught:
            ckptfix.load_into(model, other, strict=False)
        assert caught.value.report.done is False and "allow_empty=True" in (caught.value.hint or "")  # type: ignore[attr-defined]
        report = ckptfix.load_into(model, other, strict=False, allow_empty=True)
        assert report.done and report.loaded == () and len(report.missing) == 4

    def test_with_other_shapes_throughout_too(self, tmp_path: Path) -> None:
        torch.save(nn.Sequential(nn.Linear(5, 9), nn.Linear(9, 3)).state_dict(), tmp_path / "x.pth")
        with pytest.raises(LoadMismatch, match="no tensor of the file fits"):
            ckptfix.load_into(net(), tmp_path / "x.pth", strict=False)

    def test_little_is_reported(self, tmp_path: Path) -> None:
        torch.save({"0.bias": torch.ones(8), "a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "x.pth")
        with pytest.warns(UserWarning, match="only 1 of the file's 3 keys and the model's 4 match"):
            ckptfix.load_into(net(), tmp_path / "x.pth", strict=False)

    @pytest.mark.parametrize("names", [["0.weight"], ["0.weight", "0.bias", "1.weight", "head"]])
    def test_a_shard_and_another_head_are_no_matter(self, tmp_path: Path, names: list[str]) -> None:
        state = net().state_dict()
        torch.save({name: state.get(name, torch.ones(3)) for name in names}, tmp_path / "x.pth")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert ckptfix.load_into(net(), tmp_path / "x.pth", strict=False).loaded


class TestHints:
    def test_are_in_the_words_of_python(self, path: Path, tmp_path: Path) -> None:
        torch.save({"gen": net().state_dict(), "dis": net().state_dict()}, path)
        for load in (ckptfix.load_state_dict, lambda path: ckptfix.load_into(net(), path)):
            with pytest.raises(Refused) as caught:
                load(path)
            assert caught.value.hint == "choose one with at='gen'"
        torch.save({"module.a": torch.ones(1), "b": torch.ones(1)}, path)
        with pytest.raises(PartialPrefix) as partial:
            ckptfix.load_state_dict(path, strip="module")
        assert "strip=None" in (partial.value.hint or "") and "--" not in (partial.value.hint or "")
        torch.save(nn.Linear(3, 3).state_dict(), path)
        with pytest.raises(NoMatch) as order:
            ckptfix.load_into(net(), path, match="position")
        assert "match='structure'" in (order.value.hint or "") and "--" not in (order.value.hint or "")
