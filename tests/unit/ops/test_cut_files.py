"""A file that was cut short: every way to read it says that repair keeps what is whole."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import ckptfix
from ckptfix.errors import CkptfixError

WEIGHTS = {"module.a": torch.ones(64, 64), "module.b": torch.zeros(64, 64)}

READERS: dict[str, Callable[[Path, Path], Any]] = {
    "strip-module": ckptfix.strip_module,
    "slim": ckptfix.slim,
    "extract": lambda source, dest: ckptfix.extract(source, dest, to="zip"),
    "load_state_dict": lambda source, dest: ckptfix.load_state_dict(source),
}


def cut(folder: Path, kind: str) -> Path:
    path = folder / f"a cut file.{'safetensors' if kind == 'safetensors' else 'pth'}"
    if kind == "safetensors":
        safetensors.torch.save_file(WEIGHTS, path)
    else:
        torch.save(WEIGHTS, path, _use_new_zipfile_serialization=kind == "zip")
    path.write_bytes(path.read_bytes()[: -64 * 65 * 2])
    return path


@pytest.mark.parametrize("kind", ["zip", "legacy", "safetensors"])
@pytest.mark.parametrize("reader", READERS)
def test_the_hint_is_a_command_that_keeps_what_is_whole(tmp_path: Path, kind: str, reader: str) -> None:
    source = cut(tmp_path, kind)
    if (reader, kind) == ("extract", "safetensors"):
        pytest.skip("extract is for torch files")
    with pytest.raises(CkptfixError) as caught:
        READERS[reader](source, tmp_path / f"out{source.suffix}")
    assert f"`ckptfix repair {shlex.quote(str(source))} OUT`" in (caught.value.hint or "")


@pytest.mark.parametrize("kind", ["zip", "legacy", "safetensors"])
def test_the_command_does_what_the_hint_says(tmp_path: Path, kind: str) -> None:
    source = cut(tmp_path, kind)
    assert len(ckptfix.repair(source, tmp_path / f"out{source.suffix}").kept) == 1
