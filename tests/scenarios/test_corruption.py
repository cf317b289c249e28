"""Corrupted files, a test for each fault (THREATS.md, group F): doctor names it, and repair saves what is whole."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from ckptfix.cli import commands

STATE = {f"layers.{index}.weight": torch.arange(4096.0) + index + 1 for index in range(4)}
"""Four tensors of 16 KiB, no two bytes of which are alike for long."""

BLOCK = 4096


def run(*arguments: object) -> tuple[int, str]:
    """Exit code and output of a command."""
    done = CliRunner().invoke(commands, [str(argument) for argument in arguments])
    return done.exit_code, done.output


def ids(path: Path) -> set[str]:
    """What doctor finds that is more than a note."""
    _, said = run("doctor", path, "--json")
    return {row["id"] for row in json.loads(said)["findings"] if row["severity"] != "info"}


def saved(path: Path) -> tuple[int, dict[str, Any]]:
    """Exit code of repair, and what torch then loads; every tensor of it must be as it was."""
    out = path.with_name("out" + path.suffix)
    code, said = run("repair", path, out)
    if not out.exists():
        return code, {}
    found = torch.load(out, weights_only=True)
    for name, value in found.items():
        assert torch.equal(value, STATE[name]), name
    assert all(name in said for name in STATE if name not in found)
    return code, dict(found)


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    torch.save(STATE, tmp_path / "whole.pth")
    return tmp_path / "whole.pth"


@pytest.fixture
def legacy(tmp_path: Path) -> Path:
    torch.save(STATE, tmp_path / "legacy.pth", _use_new_zipfile_serialization=False)
    return tmp_path / "legacy.pth"


def changed(path: Path, change: Callable[[bytearray], bytes | bytearray]) -> Path:
    path.write_bytes(change(bytearray(path.read_bytes())))
    return path


def data_of(path: Path, number: int) -> int:
    """Where the bytes of the tensor `number` begin."""
    place = path.read_bytes().find(STATE[f"layers.{number}.weight"].numpy().tobytes())
    assert place > 0
    return place


def test_83_cut_in_the_middle_of_a_tensor(whole: Path) -> None:
    cut = data_of(whole, 2) + 100
    changed(whole, lambda data: data[:cut])
    assert "truncated" in ids(whole)
    code, found = saved(whole)
    assert code == 3 and list(found) == ["layers.0.weight", "layers.1.weight"]


def test_84_and_87_a_flipped_bit_costs_its_tensor_alone(whole: Path) -> None:
    place = data_of(whole, 1) + 5000
    changed(whole, lambda data: data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    assert torch.load(whole, weights_only=True)["layers.1.weight"].shape == (4096,)  # torch sees nothing
    assert ids(whole)
    code, found = saved(whole)
    assert code == 3 and list(found) == ["layers.0.weight", "layers.2.weight", "layers.3.weight"]


def test_85_a_sector_of_zeros(whole: Path) -> None:
    place = data_of(whole, 3) + BLOCK
    changed(whole, lambda data: data[:place] + bytes(512) + data[place + 512 :])
    assert ids(whole)
    code, found = saved(whole)
    assert code == 3 and "layers.3.weight" not in found and len(found) == 3


def test_85_a_tail_of_zeros(whole: Path) -> None:
    place = data_of(whole, 3)
    changed(whole, lambda data: data[:place] + bytes(len(data) - place))
    assert ids(whole)
    code, found = saved(whole)
    assert code == 3 and list(found) == ["layers.0.weight", "layers.1.weight", "layers.2.weight"]


def test_86_the_directory_is_lost_and_nothing_else(whole: Path) -> None:
    with zipfile.ZipFile(whole) as archive:
        start = archive.start_dir
    changed(whole, lambda data: data[:start])
    assert "truncated" in ids(whole)
    code, found = saved(whole)
    assert code == 0 and list(found) == list(STATE)


def test_88_the_object_is_lost_and_raw_storages_come_out_without_names(whole: Path, tmp_path: Path) -> None:
    start = whole.read_bytes().find(b"layers.0.weight")
    changed(whole, lambda data: data[:start] + b"#" * 40 + data[start + 40 :])
    assert ids(whole)
    code, said = run("repair", whole, tmp_path / "raw.pth")
    assert code == 3, said
    found = torch.load(tmp_path / "raw.pth", weights_only=True)
    assert not set(found) & set(STATE)
    rows = [value.contiguous().view(torch.uint8).numpy().tobytes() for value in found.values()]
    assert sorted(rows) == sorted(value.numpy().tobytes() for value in STATE.values())


def test_89_a_block_twice(whole: Path) -> None:
    start = data_of(whole, 0)
    changed(
        whole,
        lambda data: data[: start + BLOCK] + data[start : start + BLOCK] + data[start + 2 * BLOCK :],
    )
    assert ids(whole)
    code, found = saved(whole)
    assert code == 3 and list(found) == ["layers.1.weight", "layers.2.weight", "layers.3.weight"]


def test_90_text_mode(whole: Path) -> None:
    changed(whole, lambda data: bytes(data).replace(b"\n", b"\r\n"))
    found = ids(whole)
    assert found
    assert len(saved(whole)[1]) == 4


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"<!DOCTYPE html><html>not found</html>", "HTML"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 1234\n", "git lfs pull"),
        (b"", "empty"),
    ],
    ids=["html", "pointer", "empty"],
)
def test_91_what_is_no_checkpoint_is_named(tmp_path: Path, text: bytes, said: str) -> None:
    path = tmp_path / "model.pth"
    path.write_bytes(text)
    code, output = run("doctor", path)
    assert code == 1 and said in output
    code, output = run("repair", path, tmp_path / "out.pth")
    assert code == 2 and not (tmp_path / "out.pth").exists()


def test_92_a_legacy_file_cut_short(legacy: Path) -> None:
    changed(legacy, lambda data: data[: len(data) - 20_000])
    assert "truncated" in ids(legacy)
    code, found = saved(legacy)
    # Legacy storages stand in the order of their keys, which are addresses: which are lost is not the names' order.
    assert code == 3 and len(found) == 2
