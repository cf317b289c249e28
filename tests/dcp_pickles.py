"""The pickle of a `.metadata` of any keys, as torch writes it; and keys for it."""

from __future__ import annotations

import pickle
import random
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)


def as_saved(paths: dict[str, tuple[str | int, ...]], values: int = 3, nested: bool = True) -> bytes:
    """A `.metadata` of these keys, the last `values` of them no tensors; two chunks each, and names pushed once."""
    keys: dict[str, Any] = {}
    items: dict[MetadataIndex, _StorageInfo] = {}
    files = ["__0_0.distcp", "__1_0.distcp"]
    for number, name in enumerate(paths):
        if number >= len(paths) - values:
            keys[name] = BytesStorageMetadata()
            items[MetadataIndex(name)] = _StorageInfo(files[number % 2], 70_000 * number, 300 + number)
            continue
        chunks = [ChunkStorageMetadata(torch.Size((row, 0)), torch.Size((1, 5))) for row in (0, 1)]
        keys[name] = TensorStorageMetadata(TensorProperties(torch.bfloat16), torch.Size((2, 5)), chunks)
        for row, chunk in enumerate(chunks):
            place = _StorageInfo(files[row], 1_000_000_000 * number, 2000)
            items[MetadataIndex(name, chunk.offsets, row)] = place
    return pickle.dumps(Metadata(keys, paths if nested else None, items))


def named(path: tuple[str | int, ...]) -> str:
    return ".".join(map(str, path))


PATHS: list[tuple[str | int, ...]] = [
    *(("model", f"module.blocks.{number}.weight") for number in range(300)),
    *(("optim", "state", f"module.blocks.{number}.weight", "exp_avg") for number in range(300)),
    ("groups", 0, "module.\u00e9\u0394"),
    ("module.lone",),
    ("optim", "param_groups"),
    ("module.step",),
]


def random_keys(rng: random.Random) -> dict[str, tuple[str | int, ...]]:
    """Names and paths that share strings with each other, and with what a pickle says of them."""
    words = ["module", "a", "b", "module.a", "size", "\u00e9" * 120, "x" * 300]
    parts: list[str | int] = [*words, 0, 1]
    paths: dict[str, tuple[str | int, ...]] = {}
    for _ in range(rng.randint(1, 30)):
        path = tuple(rng.choice(parts) for _ in range(rng.randint(1, 3)))
        paths[named(path) if rng.random() < 0.8 else rng.choice(words)] = path
    return paths
