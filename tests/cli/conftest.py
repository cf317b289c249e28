"""What the tests of the commands share: a runner, and small checkpoints made without ckptfix."""

from __future__ import annotations

import os
import struct
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from builders import Op, Tensor, assemble, push, safetensors, state_dict_ops, torch_zip, written
from click.testing import CliRunner, Result
from json_contract import checked

from ckptfix.cli import commands

Cli = Callable[..., Result]


@pytest.fixture
def cli() -> Cli:
    """Runs a command line in this very process; stdout, stderr and exit_code are apart, and JSON is checked."""

    def run(*arguments: object) -> Result:
        words = [str(argument) for argument in arguments]
        result = CliRunner().invoke(commands, words)
        if "--json" in words:
            checked(result)
        return result

    return run


@cache
def shell_words(line: str) -> list[str]:
    """How bash splits `line`, nothing of it run."""
    done = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, check=True)
    return [os.fsdecode(part) for part in done.stdout.split(b"\0")[:-1]]


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def wrapped(prefix: str = "module.", location: str = "cuda:0", *, second: str | None = None) -> bytes:
    """A training checkpoint: epoch, and a state dict of two tensors.

    `prefix` begins their names, `second` the second one's if it is another.
    """
    weight = Tensor("0", (2, 3), 6, location=location)
    bias = Tensor("1", (2,), 2, location=location)
    model = state_dict_ops({f"{prefix}fc.weight": weight, f"{prefix if second is None else second}fc.bias": bias})
    top: list[Op] = ["EMPTY_DICT", "MARK", *push("epoch"), *push(3), *push("model_state_dict"), *model, "SETITEMS"]
    return torch_zip(assemble(("PROTO", 2), *top, "STOP"), [floats(1, 2, 3, 4, 5, 6), floats(7, 8)])


def state(**tensors: tuple[float, ...]) -> bytes:
    """A torch zip of flat float32 tensors on the CPU; two underscores in a name are a dot."""
    items = {
        name.replace("__", "."): Tensor(str(index), (len(values),), len(values))
        for index, (name, values) in enumerate(tensors.items())
    }
    pickle = assemble(("PROTO", 2), *state_dict_ops(items), "STOP")
    return torch_zip(pickle, [floats(*values) for values in tensors.values()])


@pytest.fixture
def ddp(tmp_path: Path) -> Path:
    return written(tmp_path / "ddp.pth", wrapped())


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return written(tmp_path / "plain.pth", wrapped("", "cpu"))


@pytest.fixture
def tensors(tmp_path: Path) -> Path:
    """A safetensors file: float32 a [2], bfloat16 b [3], and metadata."""
    rows = [("a", "F32", [2], floats(1, 2)), ("b", "BF16", [3], b"\0" * 6)]
    return written(tmp_path / "small.safetensors", safetensors(rows, metadata={"format": "pt"}))


def names(path: Path) -> dict[str, str]:
    """Name -> device, as torch itself reads the file; nested mappings are joined by a slash."""
    import torch

    found: dict[str, str] = {}

    def walk(value: object, place: str) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                walk(item, f"{place}/{key}" if place else str(key))
        elif isinstance(value, torch.Tensor):
            found[place] = locations[value.untyped_storage().data_ptr()]

    locations: dict[int, str] = {}

    def remember(storage: Any, location: str) -> Any:
        locations[storage.data_ptr()] = location
        return storage

    walk(torch.load(path, map_location=remember, weights_only=True), "")
    return found
