"""One small checkpoint of every kind that is read, all with the keys ``module.fc.weight`` and ``module.fc.bias``."""

from __future__ import annotations

import bz2
import gzip
import io
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import array_files
import pytest
import rank_files
import sharded
import torch
from other_pickles import joblib_dump, torch_tar
from safetensors.torch import save_file
from torch import nn
from zero_files import Run

WEIGHTS = {"module.fc.weight": torch.arange(12.0).view(4, 3) / 7, "module.fc.bias": torch.tensor([1.0, 2.0, 3.0, 4.0])}
"""What each of them holds; the names and values of rank files are their own."""


class _Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.fc(x))


def model() -> nn.Module:
    whole = nn.Sequential()
    whole.add_module("module", _Inner())
    whole.load_state_dict(WEIGHTS)
    return whole


Maker = Callable[[Path], Path]
SOURCES: dict[str, Maker] = {}
"""Kind -> the function that writes one into an empty folder, and returns its path."""


def source(make: Maker) -> Maker:
    SOURCES[make.__name__.strip("_")] = make
    return make


def _saved(value: Any = None, **how: Any) -> bytes:
    file = io.BytesIO()
    torch.save(WEIGHTS if value is None else value, file, **how)
    return file.getvalue()


def _put(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@source
def zip_(folder: Path) -> Path:
    return _put(folder / "a.pth", _saved())


@source
def legacy(folder: Path) -> Path:
    return _put(folder / "a.pth", _saved(_use_new_zipfile_serialization=False))


@source
def safetensors(folder: Path) -> Path:
    save_file(WEIGHTS, folder / "a.safetensors", metadata={"format": "pt"})
    return folder / "a.safetensors"


@source
def lightning(folder: Path) -> Path:
    row = {"lr": 0.1, "params": [0, 1]}
    optimizer = {"state": {0: {"exp_avg": torch.zeros(4, 3)}, 1: {"exp_avg": torch.zeros(4)}}, "param_groups": [row]}
    run = {"epoch": 3, "pytorch-lightning_version": "2.0", "state_dict": WEIGHTS, "optimizer_states": [optimizer]}
    return _put(folder / "a.ckpt", _saved(run))


@source
def whole_module(folder: Path) -> Path:
    return _put(folder / "a.pt", _saved(model()))


@source
def torchscript(folder: Path) -> Path:
    torch.jit.save(torch.jit.script(model()), str(folder / "a.pt"))
    return folder / "a.pt"


@source
def plain_pickle(folder: Path) -> Path:
    return _put(folder / "a.pkl", pickle.dumps(WEIGHTS))


@source
def joblib(folder: Path) -> Path:
    joblib_dump(WEIGHTS, folder / "a.joblib")
    return folder / "a.joblib"


@source
def old_tar(folder: Path) -> Path:
    return _put(folder / "a.pth.tar", torch_tar(WEIGHTS))


@source
def gz(folder: Path) -> Path:
    return _put(folder / "a.pth.gz", gzip.compress(_saved()))


@source
def bz(folder: Path) -> Path:
    return _put(folder / "a.safetensors.bz2", bz2.compress(safetensors(folder).read_bytes()))


@source
def zip_in_zip(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.pth", _saved())
    return folder / "a.zip"


@source
def tar_gz(folder: Path) -> Path:
    with tarfile.open(folder / "a.tar.gz", "w:gz") as archive:
        for name, data in (("config.json", b"{}"), ("weights.th", _saved())):
            row = tarfile.TarInfo(name)
            row.size = len(data)
            archive.addfile(row, io.BytesIO(data))
    return folder / "a.tar.gz"


@source
def several_in_a_zip(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "a.zip", "w") as archive:
        for name, value in (("policy.pth", WEIGHTS), ("policy.optimizer.pth", {"state": {}, "param_groups": []})):
            archive.writestr(name, _saved(value))
        archive.writestr("data", "{}")
    return folder / "a.zip"


@source
def deepspeed(folder: Path) -> Path:
    return Run([WEIGHTS], 2, 2).save(folder / "run")


@source
def ranks(folder: Path) -> Path:
    (folder / "run").mkdir()
    for rank in range(rank_files.WORLD):
        rank_files.dtensors(folder / "run" / f"model_rank{rank}.pt", rank)
    return folder / "run"


@source
def dcp(folder: Path) -> Path:
    import torch.distributed.checkpoint as dist_cp
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    dist_cp.state_dict_saver.save(dict(WEIGHTS), storage_writer=FileSystemWriter(folder / "run"), no_dist=True)
    return folder / "run"


@source
def hf(folder: Path) -> Path:
    return sharded.write(folder / "run", sharded.parted(WEIGHTS, 2))


@source
def hf_bin(folder: Path) -> Path:
    return sharded.write(folder / "run", sharded.parted(WEIGHTS, 2), kind="bin")


def _arrays() -> array_files.Arrays:
    return {name: value.numpy() for name, value in WEIGHTS.items()}


@source
def npz(folder: Path) -> Path:
    array_files.npz(_arrays(), folder / "a.npz")
    return folder / "a.npz"


@source
def gguf(folder: Path) -> Path:
    array_files.gguf(_arrays(), folder / "a.gguf")
    return folder / "a.gguf"


@source
def arrays_in_a_pickle(folder: Path) -> Path:
    array_files.pickled(_arrays(), folder / "a.pkl")
    return folder / "a.pkl"


@source
def orbax(folder: Path) -> Path:
    pytest.importorskip("tensorstore", reason="the package tensorstore reads and writes orbax folders")
    array_files.orbax(_arrays(), folder / "run")
    return folder / "run"
