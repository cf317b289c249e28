"""Checkpoints of a terabyte that take some megabytes of a disk: headers and directories are there, data is holes."""

from __future__ import annotations

import json
import os
import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.serialization import skip_data
from zero_files import Run, State

TERABYTE = 10**12


def hf(folder: Path, shards: int = 200, each: int = 40) -> Path:
    """Safetensors files, and an index."""
    folder.mkdir()
    rows = TERABYTE // (shards * each * 2 * 1000) + 1
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        for number in range(each):
            size = rows * 2000
            place = [number * size, (number + 1) * size]
            header[f"module.{shard}.{number}.weight"] = {"dtype": "BF16", "shape": [rows, 1000], "data_offsets": place}
        weight_map |= {key: name for key in header if key != "__metadata__"}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (folder / name).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + each * rows * 2000)
    index = {"metadata": {"total_size": shards * each * rows * 2000}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def dcp(folder: Path, ranks: int = 8, tensors: int = 100) -> Path:
    """Each tensor in pieces of its rows, one a rank: torch archives in the ranks' files, and ``.metadata``."""
    folder.mkdir()
    rows = TERABYTE // (ranks * tensors * 4 * 1000) + 1
    item = folder / "item"
    with skip_data():
        torch.save(torch.empty(rows, 1000), item)
    length = item.stat().st_size
    entries: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    for rank in range(ranks):
        with (folder / f"__{rank}_0.distcp").open("wb") as file:
            for number in range(tensors):
                _append(item, file.fileno(), number * length)
            file.truncate(tensors * length)
    for number in range(tensors):
        name = f"model.{number}.weight"
        sizes = torch.Size((rows, 1000))
        chunks = [ChunkStorageMetadata(torch.Size((rank * rows, 0)), sizes) for rank in range(ranks)]
        properties = TensorProperties(dtype=torch.float32)
        entries[name] = TensorStorageMetadata(properties, torch.Size((ranks * rows, 1000)), chunks)
        for rank in range(ranks):
            index = MetadataIndex(name, torch.Size((rank * rows, 0)), rank)
            places[index] = _StorageInfo(f"__{rank}_0.distcp", number * length, length)
    item.unlink()
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(entries, {}, places)))
    return folder


def _append(item: Path, out: int, at: int) -> None:
    """Copy what is not a hole of `item` to `at`."""
    with item.open("rb") as file:
        size, position = item.stat().st_size, 0
        while position < size:
            try:
                start = os.lseek(file.fileno(), position, os.SEEK_DATA)
            except OSError:
                return
            position = os.lseek(file.fileno(), start, os.SEEK_HOLE)
            os.pwrite(out, os.pread(file.fileno(), position - start, start), at + start)


@dataclass
class _Wide(Run):
    """A run whose parameters are said to have more rows, and whose flat groups are as long, in holes of `hole`."""

    hole: Path = Path()
    rows: int = 1

    def _model_states(self, module: State, fragments: State | None = None, rank: int = 0) -> dict[str, Any]:
        states = super()._model_states(module, fragments, rank)
        wide = [OrderedDict((name, torch.Size((self.rows, 1024))) for name in group) for group in self.groups]
        return states | {"param_shapes": wide}

    def _optim(self, inner: Path, rank: int, states: dict[str, Any]) -> None:
        (group,) = self.groups
        (state,) = states["optimizer_state_dict"]["state"].values()
        size = len(group) * self.rows * 1024 // self.ranks
        # Each a storage of its own, of memory that is never touched.
        flat, *moments = (torch.from_file(str(self.hole), shared=True, size=size) for _ in range(3))
        states["fp32_flat_groups"] = [flat]
        state.update(zip(self.keys, moments, strict=True))
        with skip_data():
            super()._optim(inner, rank, states)


def zero(folder: Path, ranks: int = 8, tensors: int = 100) -> Path:
    """DeepSpeed's files of stage 3: fp32 weights and two moments of each."""
    folder.mkdir()
    rows = TERABYTE // (tensors * 12 * 1024) // ranks * ranks
    group = {f"layers.{number}.weight": torch.ones(ranks) for number in range(tensors)}
    hole = folder / "hole"
    inner = _Wide([group], ranks, 3, hole=hole, rows=rows).save(folder)
    hole.unlink()
    return inner


KINDS: dict[str, Callable[[Path], Path]] = {"hf": hf, "dcp": dcp, "zero": zero}
