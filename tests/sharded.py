"""Sharded checkpoints made without ckptfix, as transformers, accelerate and diffusers lay them out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

State = dict[str, torch.Tensor]


def state(count: int = 6, prefix: str = "") -> State:
    """So many layers of odd sizes."""
    torch.manual_seed(count)
    rows: State = {}
    for layer in range(count):
        rows[f"{prefix}layers.{layer}.weight"] = torch.randn(3 + layer, 5)
        rows[f"{prefix}layers.{layer}.bias"] = torch.randn(3 + layer).to(torch.bfloat16)
    return rows


def parted(rows: State, count: int) -> list[State]:
    """The same in so many dicts, in order."""
    names = list(rows)
    size = -(-len(names) // count)
    return [{name: rows[name] for name in names[first : first + size]} for first in range(0, len(names), size)]


def nbytes(rows: State) -> int:
    return sum(value.numel() * value.itemsize for value in rows.values())


def write(
    folder: Path,
    parts: Sequence[State],
    *,
    kind: str = "safetensors",
    name: str | None = None,
    index: bool = True,
    variant: str = "",
) -> Path:
    """The folder `folder` of these shards, with a configuration beside them.

    Args:
        kind: ``safetensors`` or ``bin``.
        name: of the files: ``model`` or ``pytorch_model``.
        variant: such as ``fp16``, in the names as diffusers has it.
    """
    folder.mkdir(exist_ok=True)
    name = name or ("model" if kind == "safetensors" else "pytorch_model")
    weight_map: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        file = f"{name}-{number:05d}-of-{len(parts):05d}{f'.{variant}' if variant else ''}.{kind}"
        if kind == "safetensors":
            save_file(part, folder / file, metadata={"format": "pt"})
        else:
            torch.save(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    if index:
        total = sum(map(nbytes, parts))
        write_index(folder / f"{name}.{kind}.index{f'.{variant}' if variant else ''}.json", weight_map, total)
    (folder / "config.json").write_text('{"hidden_size": 5}\n')
    return folder


def write_index(path: Path, weight_map: Mapping[str, str], total: int = 0) -> Path:
    document = {"metadata": {"total_size": total}, "weight_map": dict(weight_map)}
    path.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")
    return path


def index_of(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("*.index*.json")
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def load(folder: Path) -> State:
    """All that the files of a folder hold, by safetensors and torch, each tensor where the index says it is."""
    rows: State = {}
    weight_map = index_of(folder)["weight_map"]
    for file in sorted(set(weight_map.values())):
        path = folder / file
        found = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
        assert {name for name, holder in weight_map.items() if holder == file} <= set(found)
        assert not set(found) & set(rows)
        rows |= found
    return rows


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """Whether two state dicts have the same tensors, bit for bit, in any order."""
    return set(one) == set(other) and all(
        one[name].dtype == other[name].dtype
        and one[name].shape == other[name].shape
        and one[name].contiguous().view(-1).view(torch.uint8).equal(other[name].contiguous().view(-1).view(torch.uint8))
        for name in one
    )
