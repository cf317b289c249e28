"""Damaged folders of shards: a result or an error of ours, and never half a model without a word."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from sharded import parted, state, write

import ckptfix
from ckptfix.errors import CkptfixError

CASES = 25
"""Folders that one run damages."""


def ranks(folder: Path) -> Path:
    folder.mkdir()
    for rank, rows in enumerate((2, 1), 1):
        said = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [2 * (rank - 1), 0]}})}
        path = folder / f"shard-{rank:05d}-model-00001-of-00001.safetensors"
        save_file({"w": torch.ones(rows, 3), f"own{rank}": torch.ones(2)}, path, metadata=said)
    return folder


MADE: dict[str, Callable[[Path], Path]] = {
    "safetensors": lambda folder: write(folder, parted(state(4, "module."), 2)),
    "bin": lambda folder: write(folder, parted(state(4, "module."), 2), kind="bin"),
    "ranks": ranks,
}


def damaged(path: Path, source: random.Random) -> None:
    """Some bytes of a file changed, cut, put in, or copied from elsewhere in it."""
    data = bytearray(path.read_bytes())
    if not data:
        return
    place, other = source.randrange(len(data)), source.randrange(len(data))
    match source.randrange(4):
        case 0:
            for _ in range(source.randint(1, 4)):
                data[source.randrange(min(len(data), source.choice([60, 400, 1 << 20])))] = source.randrange(256)
        case 1:
            del data[place:]
        case 2:
            data[place:place] = source.randbytes(source.randint(1, 9))
        case _:
            data[place : place + 20] = data[other : other + 20]
    path.write_bytes(data)


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", MADE)
def test_a_damaged_folder_ends_in_a_result_or_an_error_of_ours(tmp_path: Path, kind: str, seed: int) -> None:
    source = random.Random(f"{kind} {seed}")
    sound = MADE[kind](tmp_path / "sound")
    folder = tmp_path / "case"
    calls: list[Callable[[], object]] = [
        lambda: ckptfix.inspect(folder),
        lambda: ckptfix.doctor(folder),
        lambda: ckptfix.diff(folder, sound),
        lambda: ckptfix.convert(folder, tmp_path / "out.pth", force=True),
        lambda: ckptfix.convert(folder, tmp_path / "hf", to="hf", shard_size=64, force=True),
        lambda: ckptfix.strip_module(folder, tmp_path / "stripped", force=True),
        lambda: ckptfix.slim(folder, tmp_path / "slim", force=True),
        lambda: ckptfix.repair(folder, tmp_path / "repaired", force=True),
    ]
    for _ in range(CASES):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(sound, folder)
        for _ in range(source.randint(1, 3)):
            damaged(source.choice([path for path in sorted(folder.iterdir()) if path.name != "config.json"]), source)
        for call in calls:
            try:
                done = call()
            except CkptfixError as error:
                assert "a bug in ckptfix" not in str(error)
            else:
                account = getattr(done, "account", None)
                assert account is None or not account.lost or getattr(done, "exit_code", 0) == 3
