"""How often repair reads a pickle: once where the output has the same one, and again where it has another."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch
from builders import written

import ckptfix
from ckptfix.formats.torch import object as torch_object
from ckptfix.pickles import Graph


@pytest.fixture
def walked(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """The graphs whose objects were read."""
    walk = torch_object.walk
    graphs: list[Graph] = []

    def noted(graph: Graph) -> torch_object.TorchObject:
        graphs.append(graph)
        return walk(graph)

    monkeypatch.setattr(torch_object, "walk", noted)
    return graphs


def test_an_equal_pickle_is_read_once(tmp_path: Path, walked: list[Graph]) -> None:
    torch.save({"w": torch.ones(3), "b": torch.ones(2)}, tmp_path / "in.pth")
    done = ckptfix.repair(tmp_path / "in.pth", tmp_path / "out.pth")
    assert len(walked) == 1 and done.account.written == 2
    with zipfile.ZipFile(tmp_path / "out.pth") as made:
        assert made.read("archive/data.pkl") == walked[0].data


def test_the_pickle_of_what_is_left_is_read_again(tmp_path: Path, walked: list[Graph]) -> None:
    torch.save({"w": torch.full((9,), 7.5), "b": torch.ones(2)}, tmp_path / "in.pth")
    data = (tmp_path / "in.pth").read_bytes().replace(torch.full((9,), 7.5).numpy().tobytes(), bytes(36))
    done = ckptfix.repair(written(tmp_path / "in.pth", data), tmp_path / "out.pth")
    assert [row.name for row in done.losses] == ["w"] and done.account.written == 1
    assert len(walked) == 2 and walked[0].data != walked[1].data


def test_two_files_with_one_pickle_keep_their_own_tensors(tmp_path: Path, walked: list[Graph]) -> None:
    """The older file has the same pickle, and other bytes: the lost tensor comes from it, and nothing else."""
    for name, value in (("in.pth", 7.5), ("older.pth", 2.5)):
        torch.save({"w": torch.full((9,), value), "b": torch.full((2,), value)}, tmp_path / name)
    data = (tmp_path / "in.pth").read_bytes().replace(torch.full((9,), 7.5).numpy().tobytes(), bytes(36))
    written(tmp_path / "in.pth", data)
    ckptfix.repair(tmp_path / "in.pth", tmp_path / "out.pth", fill_from=tmp_path / "older.pth")
    made = torch.load(tmp_path / "out.pth", weights_only=True)
    assert made["w"].eq(2.5).all() and made["b"].eq(7.5).all() and len(walked) == 1
