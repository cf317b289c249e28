"""TorchScript archives and exported programs, loaded by the same calls as every other checkpoint."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn, optim

import ckptfix
from ckptfix.errors import CkptfixError, DamagedFile


def net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).eval()


def same(one: nn.Module, other: nn.Module) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return list(ours) == list(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture(params=["script", "trace", "export"])
def program(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / ("net.pt2" if request.param == "export" else "net.pt")
    if request.param == "export":
        torch.export.save(torch.export.export(net(), (torch.ones(2, 3),)), path)
    else:
        traced = request.param == "trace"
        made = (torch.jit.trace(net(), torch.ones(2, 3)) if traced  # type: ignore[no-untyped-call]
                else torch.jit.script(net()))  # fmt: skip
        torch.jit.save(made, path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("assign", [False, True])
def test_load_into(program: Path, assign: bool) -> None:
    torch.manual_seed(6)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    assert not same(model, net())
    report = ckptfix.load_into(nn.DataParallel(model), program, assign=assign)
    assert report.complete and same(model, net())


@pytest.mark.slow
def test_load_state_dict(program: Path) -> None:
    loaded, expected = ckptfix.load_state_dict(program), net().state_dict()
    assert sorted(loaded) == sorted(expected), "an exported program has its parameters first"
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_the_object_of_a_program_is_its_state_dict(program: Path) -> None:
    if zipfile.is_zipfile(program) and "serialized_state_dict.pt" in zipfile.ZipFile(program).namelist():
        pytest.skip("before torch 2.8, torch.export.save wrote an archive of checkpoints, which is read")
    loaded, expected = ckptfix.load_checkpoint(program), net().state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    with pytest.raises(CkptfixError, match="optimizer"):
        ckptfix.load_optimizer(optim.SGD(net().parameters(), 0.1), program)


def test_a_damaged_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "net.pt"
    torch.jit.save(torch.jit.script(net()), path)
    data = bytearray(path.read_bytes())
    place = data.index(net().state_dict()["0.weight"].numpy().tobytes())
    data[place] ^= 1
    path.write_bytes(data)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    with pytest.raises(DamagedFile):
        ckptfix.load_into(model, path)
