"""What the output's suffix may say: a file of one format does not go by another's name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import ckptfix
from ckptfix import rescue
from ckptfix.errors import Refused

WEIGHTS = {"module.fc.weight": torch.ones(2, 3), "module.fc.bias": torch.zeros(2)}

COMMANDS: dict[str, Callable[[Path, Path], Any]] = {
    "strip-module": ckptfix.strip_module,
    "add-module": ckptfix.add_module,
    "unwrap": ckptfix.unwrap,
    "rename": lambda source, dest: ckptfix.rename(source, dest, subs=[("fc", "head")]),
    "map-location": lambda source, dest: ckptfix.map_location(source, dest, "cpu"),
    "match": lambda source, dest: ckptfix.match(source, dest, source),
    "sanitize": ckptfix.sanitize,
    "slim": ckptfix.slim,
    "repair": rescue.repair,
}


def sample(folder: Path, suffix: str) -> Path:
    path = folder / f"in{suffix}"
    if suffix == ".safetensors":
        safetensors.torch.save_file(WEIGHTS, path)
    else:
        torch.save(WEIGHTS, path)
    return path


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(("suffix", "other"), [(".pth", ".safetensors"), (".safetensors", ".PTH")])
def test_a_file_of_one_format_is_not_written_under_another_s_name(
    tmp_path: Path, command: str, suffix: str, other: str
) -> None:
    if command == "sanitize" and suffix == ".safetensors":
        pytest.skip("sanitize is for pickles")
    source, dest = sample(tmp_path, suffix), tmp_path / f"out{other}"
    with pytest.raises(Refused) as caught:
        COMMANDS[command](source, dest)
    assert f"ckptfix convert {source} {dest}" in (caught.value.hint or "")
    assert f"name the output *{suffix[:3]}" in (caught.value.hint or "")
    assert not dest.exists()


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(("suffix", "other"), [(".pth", ".bin"), (".safetensors", ".model"), (".pth", "")])
def test_a_suffix_of_the_same_format_or_of_none_is_taken(
    tmp_path: Path, command: str, suffix: str, other: str
) -> None:
    if command == "sanitize" and suffix == ".safetensors":
        pytest.skip("sanitize is for pickles")
    source, dest = sample(tmp_path, suffix), tmp_path / f"out{other}"
    COMMANDS[command](source, dest)
    loaded = safetensors.torch.load_file(dest) if suffix == ".safetensors" else torch.load(dest, weights_only=True)
    assert len(loaded) == len(WEIGHTS)
