"""What is done without ckptfix, one function each: ``python baselines.py NAME ARGUMENT...``.

Each is written as well as its libraries allow. They run in processes of their own, some of them under another
interpreter, so every import stands in the function that needs it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any


def torch_strip(source: str, dest: str, mmap: str = "") -> None:
    """Load to CPU, remove ``module.`` from every key, save."""
    import torch

    state = torch.load(source, map_location="cpu", weights_only=True, mmap=bool(mmap))
    torch.save({key.removeprefix("module."): value for key, value in state.items()}, dest)


def torch_to_cpu(source: str, dest: str, mmap: str = "") -> None:
    import torch

    torch.save(torch.load(source, map_location="cpu", weights_only=True, mmap=bool(mmap)), dest)


def torch_strip_nested(source: str, dest: str) -> None:
    """As `torch_strip`, for a state dict under ``model_state_dict``."""
    import torch

    checkpoint = torch.load(source, map_location="cpu", weights_only=True)
    state = checkpoint["model_state_dict"]
    checkpoint["model_state_dict"] = {key.removeprefix("module."): value for key, value in state.items()}
    torch.save(checkpoint, dest)


def torch_by_order(source: str, names: str, dest: str) -> None:
    """The n-th name of the file `names` for the n-th tensor, nothing checked."""
    import torch

    with open(names, encoding="utf-8") as file:
        wanted = json.load(file)
    checkpoint = torch.load(source, map_location="cpu", weights_only=True)
    state = checkpoint["model_state_dict"]
    checkpoint["model_state_dict"] = dict(zip(wanted, state.values(), strict=True))
    torch.save(checkpoint, dest)


def _model(source: str) -> Any:
    """An unwrapped model for the big checkpoint, without memory until it is touched."""
    import torch

    state = torch.load(source, map_location="meta", weights_only=True, mmap=True)
    return _made(len(state) // 2, len(state["module.blocks.0.fc.bias"]), bias=True)


def _made(layers: int, width: int, *, bias: bool) -> Any:
    import torch
    from torch import nn

    with torch.device("meta"):
        blocks = nn.ModuleList(nn.ModuleDict({"fc": nn.Linear(width, width, bias)}) for _ in range(layers))
        model = nn.ModuleDict({"blocks": blocks})
    return model.to_empty(device="cpu")


def load_into(source: str, unverified: str = "") -> None:
    import ckptfix

    assert ckptfix.load_into(_model(source), source, verify=not unverified).complete


def torch_load(source: str) -> None:
    import torch

    torch.load(source, map_location="cpu", weights_only=True)


def ours_load(source: str) -> None:
    import ckptfix

    ckptfix.load_state_dict(source, map_location="cpu")


def _filled(layers: str, width: str, bias: str) -> Any:
    """A model whose memory was written to, as that of every model is that was initialized."""
    import torch

    model = _made(int(layers), int(width), bias=bool(int(bias)))
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    return model


def folder_into(source: str, *sizes: str) -> None:
    import ckptfix

    assert ckptfix.load_into(_filled(*sizes), source).complete


def folder_read(source: str, *sizes: str) -> None:
    """Make the same model, and read each byte of the folder, as ``cat`` does."""
    from pathlib import Path

    model = _filled(*sizes)
    room = bytearray(128 << 10)
    for path in filter(Path.is_file, Path(source).rglob("*")):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(room):
                pass
    del model


def load_state_dict(source: str, mmap: str = "") -> None:
    """Load to CPU, remove ``module.`` from every key, copy into the model."""
    import torch

    model = _model(source)
    state = torch.load(source, map_location="cpu", weights_only=True, mmap=bool(mmap))
    model.load_state_dict({key.removeprefix("module."): value for key, value in state.items()})


def save_file(source: str, dest: str) -> None:
    """zip to safetensors through a memory map."""
    import torch
    from safetensors.torch import save_file

    state = torch.load(source, map_location="cpu", weights_only=True, mmap=True)
    save_file(state, dest, metadata={"format": "pt"})


def torch_cast(source: str, dest: str) -> None:
    from safetensors.torch import load_file, save_file

    save_file({name: tensor.bfloat16() for name, tensor in load_file(source).items()}, dest)


def pt_safe_loader(source: str, dest: str) -> None:
    """zip to safetensors by the package pt-safe-loader, its limits raised to what the file needs."""
    from pt_loader import PtCheckpoint  # type: ignore[import-not-found]

    room = 1 << 40
    loaded = PtCheckpoint.load(
        source, max_archive_bytes=room, max_tensor_count=1 << 20, max_tensor_bytes=room, max_pickle_bytes=1 << 30
    )
    loaded.export(filename=dest, format="safetensors", overwrite=True)


def numpy_diff(left: str, right: str) -> None:
    """Maximum and mean absolute difference, relative L2 and cosine of every pair of float32 tensors."""
    import numpy as np

    def tensors(path: str) -> dict[str, Any]:
        with open(path, "rb") as file:
            start = 8 + (length := int.from_bytes(file.read(8), "little"))
            header = json.loads(file.read(length))
        data = np.memmap(path, np.uint8, "r", offset=start)
        places = {name: row["data_offsets"] for name, row in header.items() if name != "__metadata__"}
        return {name: data[begin:end].view(np.float32) for name, (begin, end) in places.items()}

    ours, theirs = tensors(left), tensors(right)
    for name, a in ours.items():
        b = theirs[name]
        first, second = a.astype(np.float64), b.astype(np.float64)
        difference = first - second
        absolute = np.abs(difference)
        norms = np.sqrt(first @ first), np.sqrt(second @ second)
        print(
            name,
            np.isnan(absolute).sum(),
            absolute.max(),
            absolute.mean(),
            np.sqrt(difference @ difference) / norms[0],
            first @ second / (norms[0] * norms[1]),
        )


def dcp_to_torch(source: str, dest: str) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(source, dest)


def torch_to_dcp(source: str, dest: str) -> None:
    from torch.distributed.checkpoint.format_utils import torch_save_to_dcp

    torch_save_to_dcp(source, dest)


def torch_strip_dicts(source: str, dest: str) -> None:
    """As `torch_strip`, for a dict of state dicts."""
    import torch

    parts = torch.load(source, map_location="cpu", weights_only=True)
    stripped = {
        at: {key.removeprefix("module."): value for key, value in part.items()} for at, part in parts.items()
    }
    torch.save(stripped, dest)


def dcp_metadata(source: str) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    for name, entry in FileSystemReader(source).read_metadata().state_dict_metadata.items():
        print(name, entry)


def import_torch() -> None:
    import torch  # noqa: F401


BASELINES: dict[str, Callable[..., None]] = {
    function.__name__: function
    for function in (
        torch_strip,
        torch_to_cpu,
        torch_strip_nested,
        torch_by_order,
        load_into,
        load_state_dict,
        torch_load,
        ours_load,
        folder_into,
        folder_read,
        save_file,
        pt_safe_loader,
        torch_cast,
        numpy_diff,
        dcp_to_torch,
        dcp_metadata,
        torch_strip_dicts,
        torch_to_dcp,
        import_torch,
    )
}

if __name__ == "__main__":
    BASELINES[sys.argv[1]](*sys.argv[2:])
