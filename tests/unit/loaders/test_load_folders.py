"""Every kind of folder loaded: equal to what was saved, and read as far as it is needed, and no further."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rank_files
import sharded
import torch
from compare import assert_same, assert_same_state
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict_saver import save
from torch_versions import ALONE
from zero_files import Run

import ckptfix
from ckptfix.loaders import reading

State = dict[str, torch.Tensor]

LAYERS, SIDE = 4, 512
LAYER = SIDE * SIDE * 4
SLACK = 64_000
"""Bytes of a file's header, pickle and directory."""


class Net(torch.nn.Module):
    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(SIDE, SIDE, bias=False) for _ in range(layers))


def _run(stage: int) -> Run:
    torch.manual_seed(stage)
    rows = {name: torch.randn(SIDE, SIDE) for name in Net().state_dict()}
    names = list(rows)
    return Run([{name: rows[name] for name in half} for half in (names[:3], names[3:])], 3, stage)


def _moments(run: Run) -> dict[str, Any]:
    """The optimizer's state by the names of the parameters."""
    state = {
        name: {"step": torch.tensor(3.0), **{key: run.moment(name, key) for key in run.keys}} for name in run.weights
    }
    return {"state": state, "param_groups": [{"lr": 0.1, "params": list(state)}]}


def hf(folder: Path, run: Run) -> None:
    sharded.write(folder, sharded.parted(run.weights, 2))


def bins(folder: Path, run: Run) -> None:
    sharded.write(folder, sharded.parted(run.weights, 2), kind="bin")


def dcp(folder: Path, run: Run) -> None:
    save({"model": run.weights, "optim": _moments(run)}, checkpoint_id=folder, **ALONE)


def zero(folder: Path, run: Run) -> None:
    run.save(folder)


def universal(folder: Path, run: Run) -> None:
    run.universal(folder)


def ranks(folder: Path, run: Run) -> None:
    folder.mkdir()
    for rank in range(2):
        placed: dict[str, rank_files.Placed] = {name: (value, ("0",)) for name, value in run.weights.items()}
        rank_files.distributed(folder / f"model_world_size_2_rank_{rank}.pt", rank, (2,), placed)


def trainer(folder: Path, run: Run) -> None:
    folder.mkdir()
    save_file(run.weights, folder / "model.safetensors", metadata={"format": "pt"})
    moments = _moments(run)
    numbered = dict(enumerate(moments["state"].values()))
    torch.save({"state": numbered, "param_groups": [{"lr": 0.1, "params": [*numbered]}]}, folder / "optimizer.pt")
    (folder / "trainer_state.json").write_text("{}")


Maker = Callable[[Path, Run], None]
MAPPED: tuple[Maker, ...] = (hf, bins, trainer)
"""Whose tensors lie in the file as torch wants them."""
KINDS: dict[str, tuple[Maker, int]] = {
    "hf": (hf, 0), "bins": (bins, 0), "dcp": (dcp, 0), "zero-1": (zero, 1), "zero-3": (zero, 3),
    "universal": (universal, 3), "ranks": (ranks, 0), "trainer": (trainer, 0),
}  # fmt: skip


class Reads:
    """Bytes of tensors that were read since it was asked last: without what each file of the folder says of itself."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self._bytes = 0
        self._slack = SLACK * sum(path.is_file() for path in folder.rglob("*"))
        pread, preadv = os.pread, os.preadv

        def counted(fd: int, length: int, offset: int) -> bytes:
            data = pread(fd, length, offset)
            self._bytes += len(data)
            return data

        def counted_into(fd: int, views: Any, offset: int) -> int:
            count = preadv(fd, views, offset)
            self._bytes += count
            return count

        monkeypatch.setattr(reading, "RECENT", 0)  # a file that was written just now is read twice
        monkeypatch.setattr(os, "pread", counted)
        monkeypatch.setattr(os, "preadv", counted_into)

    def bytes(self) -> int:
        found, self._bytes = self._bytes, 0
        return found - self._slack


def _saved(kind: str, folder: Path) -> Run:
    """A training, and `folder` as its framework saves it."""
    make, stage = KINDS[kind]
    run = _run(stage)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make(folder, run)
    return run


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_loaded_and_no_more_is_read(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "in"
    run = _saved(kind, folder)
    weights, whole = run.weights, LAYERS * LAYER
    reads = Reads(monkeypatch, folder)

    assert_same_state(dict(ckptfix.load_state_dict(folder, verify=False)), weights)
    assert reads.bytes() <= whole
    assert_same_state(dict(ckptfix.load_state_dict(folder, verify=False, mmap=True)), weights)
    assert reads.bytes() <= (0 if KINDS[kind][0] in MAPPED else whole)
    model = Net()
    assert ckptfix.load_into(model, folder, verify=False).complete
    assert_same_state(dict(model.state_dict()), weights)
    assert reads.bytes() <= whole
    part = Net(1)
    ckptfix.load_into(part, folder, strict=False, verify=False)
    assert torch.equal(part.layers[0].weight, weights["layers.0.weight"])  # type: ignore[arg-type]
    assert reads.bytes() <= LAYER
    loaded = ckptfix.load_checkpoint(folder, verify=False)
    at = next((key for key in ("model", "module") if key in loaded), None)
    assert_same_state(dict(loaded if at is None else loaded[at]), weights)


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("kind", ["dcp", "zero-1", "zero-3", "universal", "trainer"])
def test_an_optimizer_goes_on_from_it(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "in"
    run = _saved(kind, folder)
    model = Net()
    named = dict(model.named_parameters())
    groups = run.groups if KINDS[kind][0] in (zero, universal) else [run.weights]
    optimizer = torch.optim.Adam([{"params": [named[name] for name in group]} for group in groups])
    reads = Reads(monkeypatch, folder)
    ckptfix.load_optimizer(optimizer, folder, model=model, verify=False)
    assert reads.bytes() <= 2 * LAYERS * LAYER
    for name, parameter in named.items():
        for key in run.keys:
            assert torch.equal(optimizer.state[parameter][key], run.moment(name, key))
        assert optimizer.state[parameter]["step"] == 3


def _stepped() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model with parameters of one shape, and an optimizer with a state of each."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.25)
    for number, parameter in enumerate(model.parameters(), 1):
        parameter.grad = torch.full_like(parameter, float(number))
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("folder", [True, False])
def test_numbers_that_a_distributed_checkpoint_made_text_are_numbers(folder: bool, tmp_path: Path) -> None:
    """Its names are in the order in which ranks wrote them: numbers stand for the optimizer's own order alone."""
    model, optimizer = _stepped()
    saved = optimizer.state_dict()
    names = dict(reversed(model.state_dict().items()))
    if folder:
        save({"model": names, "optim": saved}, checkpoint_id=tmp_path / "in", **ALONE)
    else:
        text = {str(number): own for number, own in saved["state"].items()}
        torch.save({"model": names, "optim": {**saved, "state": text}}, tmp_path / "in")
    model, optimizer = _stepped()
    optimizer.state.clear()
    with pytest.warns(UserWarning, match="the order alone was used"):
        report = ckptfix.load_optimizer(optimizer, tmp_path / "in", model=model)
    assert len(report.restored) == 4 and not report.fresh and report.by == "order"
    assert_same(saved, optimizer.state_dict())


def test_state_of_a_name_in_no_group_is_refused(tmp_path: Path) -> None:
    model, optimizer = _stepped()
    saved = optimizer.state_dict()
    saved["state"]["other.weight"] = saved["state"].pop(3)
    torch.save(saved, tmp_path / "in.pth")
    with pytest.raises(ckptfix.errors.Refused, match=r"in no group: other\.weight"):
        ckptfix.load_optimizer(optimizer, tmp_path / "in.pth", model=model)
