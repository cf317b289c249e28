"""How to make and read a file of each format without ckptfix: one line a format, those that are only read too.

`SAMPLES[name]` is (save(state dict, path), load(path) -> state dict, suffix, bytes that listing may
read of a file with two tensors: the pickle of a legacy file states its size nowhere).
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from other_pickles import torch_tar
from safetensors.torch import load_file, save_file

State = dict[str, torch.Tensor]


class Sample(NamedTuple):
    save: Callable[[State, Path], object]
    load: Callable[[Path], State]
    suffix: str
    ahead: int = 100_000


def _load(path: Path) -> State:
    state: State = torch.load(path, weights_only=True)
    return state


def _legacy(state: State, path: Path) -> None:
    torch.save(state, path, _use_new_zipfile_serialization=False)


def _safetensors(state: Any, path: Path) -> None:
    tensors = {name: value.detach().contiguous() for name, value in state.items()}
    save_file(tensors, path, metadata={"format": "pt", "a": "b"})


def _pickle(state: State, path: Path) -> None:
    path.write_bytes(pickle.dumps(state))


def _unpickle(path: Path) -> State:
    state: State = pickle.loads(path.read_bytes())
    return state


def _tar(state: State, path: Path) -> None:
    path.write_bytes(torch_tar(state))


def _untar(path: Path) -> State:
    state: State = torch.load(path, weights_only=False)
    return state


SAMPLES = {
    "zip": Sample(torch.save, _load, ".pth"),
    "legacy": Sample(_legacy, _load, ".pth", ahead=9_000_000),
    "safetensors": Sample(_safetensors, load_file, ".safetensors"),
    "pickle": Sample(_pickle, _unpickle, ".pkl", ahead=200_000),
    "tar": Sample(_tar, _untar, ".pth.tar"),
}
