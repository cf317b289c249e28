"""Folders of many files, as small as they can be, and mutants of them: one file another, one missing, one twice."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import rank_writer
import sharded
import torch
from property.mutants import Way, in_header, in_pickle, in_records, in_stream, other_value, raw
from rank_files import dtensors
from rank_files import sharded as sharded_tensors
from zero_files import example

Files = dict[str, bytes]
"""Path in the folder -> content."""


def _ranks(folder: Path, make: Callable[..., object]) -> None:
    folder.mkdir()
    for rank in range(2):
        make(folder / f"model_rank{rank}.pt", rank)


def _shards(folder: Path, kind: str) -> None:
    sharded.write(folder, sharded.parted(sharded.state(4), 2), kind=kind)


def _distributed(folder: Path) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch_versions import ALONE

    torch.manual_seed(0)
    state = {"model": {"module.w": torch.randn(2, 3), "module.b": torch.randn(3)}, "epoch": 3, "names": ["a"]}
    save(state, checkpoint_id=folder, **ALONE)


ZERO: dict[str, Callable[[Path], object]] = {
    "zero 1": lambda folder: example(2, 1, torch.bfloat16).save(folder),
    "zero 3": lambda folder: example(3, 3, torch.bfloat16).save(folder),
    "zero 0": lambda folder: example(2, 0).save(folder),
    "universal": lambda folder: example(2, 2).universal(folder),
    "DTensors": lambda folder: _ranks(folder, dtensors),
    "shards": lambda folder: _ranks(folder, sharded_tensors),
}
MAKE: dict[str, Callable[[Path], object]] = {
    **ZERO,
    "safetensors shards": lambda folder: _shards(folder, "safetensors"),
    "bin shards": lambda folder: _shards(folder, "bin"),
    "DCP": _distributed,
    "Megatron": lambda folder: rank_writer.write_megatron(
        rank_writer.mixtral(1, 2), folder, rank_writer.Sizes(2, 1, 1, 2)
    ),
    "Meta": lambda folder: rank_writer.write_meta(rank_writer.llama(2, layers=1), folder, 2),
    "fairseq": lambda folder: rank_writer.write_fairseq(folder, 2),
    "NeMo": lambda folder: rank_writer.write_nemo(rank_writer.legacy_grouped(1), folder, rank_writer.Sizes(2)),
}


@cache
def contents(kind: str) -> Files:
    with TemporaryDirectory() as place:
        folder = Path(place, "in")
        MAKE[kind](folder)
        return {
            path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
        }


def in_json(data: bytes, dice: random.Random) -> bytes:
    """A value of a JSON text."""
    try:
        return json.dumps(other_value(json.loads(data), dice)).encode("utf-8", "surrogatepass")
    except ValueError:
        return raw(data, dice)


def ways(name: str, data: bytes) -> list[Way]:
    """How a file of a folder may be changed."""
    if name.endswith(".distcp"):
        return [raw]
    if data[:2] == b"PK":
        return [raw, *[in_pickle] * 6, in_records]
    if data[:1] == b"\x80":
        return [raw, *[in_stream] * 6]
    if name.endswith(".safetensors"):
        return [raw, *[in_header] * 5]
    return [raw, *[in_json] * 4] if name.endswith(".json") else [raw]


def folder_mutant(kind: str, number: int) -> tuple[str, Files]:
    """(what was done, files) of mutant `number` of a folder of a kind."""
    dice = random.Random(number)
    files = dict(contents(kind))
    names = sorted(files)
    name = dice.choice(names)
    way: Callable[[bytes, random.Random], Any] = dice.choice(ways(name, files[name]))
    for _ in range(dice.choice((1, 1, 2, 4))):
        files[name] = way(files[name], dice)
    if dice.random() < 0.1:
        files[name] = files[dice.choice(names)]
    if dice.random() < 0.05:
        del files[name]
    return f"{kind} {number} {name} {way.__name__}", files


def write(files: Mapping[str, bytes], folder: Path) -> Path:
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    return folder
