"""Safetensors files that other programs make, or damage leaves: no tensor goes without a word, none becomes another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ckptfix.cli import commands

DATA = bytes(range(16))

TWICE = (
    b'{"module.a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
    b'"module.a":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}'
)
UNKNOWN = (
    b'{"module.a":{"dtype":"X9","shape":[2],"data_offsets":[0,8]},'
    b'"b":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}'
)

READERS = (
    *(("convert", "--to", to) for to in ("zip", "legacy")),
    *(("extract", "--to", to) for to in ("zip", "legacy", "safetensors")),
)


def written(header: bytes, folder: Path) -> Path:
    path = folder / "in.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + DATA)
    return path


def run(verb: tuple[str, ...], path: Path, dest: Path) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(commands, [*verb, "--json", str(path), str(dest)])
    return result.exit_code, json.loads(result.stdout)


@pytest.mark.parametrize("verb", READERS, ids=" ".join)
@pytest.mark.parametrize("header", [TWICE, UNKNOWN], ids=["twice", "unknown"])
def test_a_tensor_that_is_not_known_is_not_taken(header: bytes, verb: tuple[str, ...], tmp_path: Path) -> None:
    """Of two tensors of one name one would be lost; an unknown dtype would come out as so many bytes."""
    code, said = run(verb, written(header, tmp_path), tmp_path / "out")
    assert code == 2
    assert said["error"]["where"] == "module.a"
    assert not (tmp_path / "out").exists()


def test_repair_says_which_name_stood_twice(tmp_path: Path) -> None:
    header = TWICE[:-1] + b',"b":{"dtype":"F32","shape":[0],"data_offsets":[16,16]}}'
    code, said = run(("repair",), written(header, tmp_path), tmp_path / "out.safetensors")
    assert code == 3
    assert [row["name"] for row in said["losses"]] == ["module.a"]
