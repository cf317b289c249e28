"""ckptfix ls: a line a checkpoint."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
import torch
from builders import safetensors, written
from cli.conftest import Cli, floats, state, wrapped

from ckptfix.cli.shared import console
from ckptfix.words import short

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 9\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of several kinds, one that is not a checkpoint, a folder of shards and a folder of other folders."""
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "b10.pth", wrapped())
    written(tmp_path / "b9.safetensors", safetensors([("a", "BF16", [3], b"\0" * 6)], metadata={"format": "pt"}))
    written(tmp_path / "lfs.bin", POINTER)
    written(tmp_path / "notes.txt", b"not a checkpoint")
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "shards").mkdir()
    written(tmp_path / "runs" / "first" / "epoch_1.pt", state(fc__weight=(1, 2), fc__bias=(3,)))
    written(tmp_path / "runs" / "first" / "epoch_2.pt", state(fc__weight=(1, 2), fc__bias=(3,)))
    shards = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    written(tmp_path / "shards" / "model.safetensors.index.json", json.dumps(shards).encode())
    for number, name in ((1, "a"), (2, "b")):
        content = safetensors([(name, "F32", [2], floats(1, 2))], metadata={"format": "pt"})
        written(tmp_path / "shards" / f"model-0000{number}-of-00002.safetensors", content)
    return tmp_path


def rows(output: str) -> list[list[str]]:
    return [re.split("  +", line) for line in output.splitlines()[2:]]


def test_a_checkpoint_is_a_line(cli: Cli, folder: Path) -> None:
    done = cli("ls", ".")
    assert done.exit_code == 0 and done.stderr == ""
    assert done.stdout.split("\n", 1)[0].split() == [
        "name", "format", "size", "tensors", "parameters", "dtypes", "devices", "wrappers", "finding",
    ]  # fmt: skip
    shown = {row[0]: row[1:] for row in rows(done.stdout)}
    assert list(shown) == ["b9.safetensors", "b10.pth", "lfs.bin", "shards"], "natural order; no text file"
    assert shown["b10.pth"][-6:] == ["2", "8", "float32", "cuda:0", "module", "wrapped-names"]
    assert shown["lfs.bin"] == ["a git-lfs pointer, not the file itself"]
    assert shown["shards"][0] == "hf" and shown["shards"][2:5] == ["2", "4", "float32"]


def test_folders_in_a_folder_are_looked_into_on_request(cli: Cli, folder: Path) -> None:
    names = [row[0] for row in rows(cli("ls", "-r", folder).stdout)]
    first = folder / "runs" / "first"
    assert names[-3:] == [str(first / "epoch_1.pt"), str(first / "epoch_2.pt"), str(folder / "shards")]
    assert cli("ls", "runs").stderr == "no checkpoints in runs; -r searches the folders in it too\n"
    assert cli("ls", "runs").exit_code == 0
    inner = ["runs/first/epoch_1.pt", "runs/first/epoch_2.pt"]
    assert [row[0] for row in rows(cli("ls", "runs/first").stdout)] == inner


def test_a_folder_that_is_a_checkpoint_is_one_line(cli: Cli, folder: Path) -> None:
    assert [row[0] for row in rows(cli("ls", "shards", "b10.pth").stdout)] == ["b10.pth", "shards"]
    (folder / "run").mkdir()
    (folder / "b10.pth").rename(folder / "run" / "pytorch_model.bin")
    written(folder / "run" / "optimizer.pt", state(a__b=(1,)))
    assert "run" in [row[0] for row in rows(cli("ls", ".").stdout)], "one model and what a trainer saves beside it"


def test_a_link_to_a_folder_above_does_not_end_in_a_circle(cli: Cli, folder: Path) -> None:
    (folder / "runs" / "up").symlink_to(folder)
    names = [row[0] for row in rows(cli("ls", "-r", "runs").stdout)]
    assert names == ["runs/first/epoch_1.pt", "runs/first/epoch_2.pt"]


def test_json_is_a_line_each(cli: Cli, folder: Path) -> None:
    documents = [json.loads(line) for line in cli("ls", ".", "--json").stdout.splitlines()]
    by_path = {document["path"]: document for document in documents}
    row = by_path["b10.pth"]
    assert (row["format"], row["tensors"], row["parameters"]) == ("zip", 2, 8)
    assert row["size"] == Path("b10.pth").stat().st_size
    assert row["dtypes"] == {"float32": 2} and row["devices"] == {"cuda:0": 2} and row["wrappers"] == ["module"]
    assert (row["finding"], row["severity"], row["reason"]) == ("wrapped-names", "warning", None)
    broken = by_path["lfs.bin"]
    assert (broken["format"], broken["finding"], broken["severity"]) == (None, "lfs-pointer", "error")
    assert broken["reason"] == "a git-lfs pointer, not the file itself" and broken["size"] == len(POINTER)


@pytest.mark.parametrize(
    ("order", "names"),
    [
        ("name", ["a", "big", "lfs"]), ("size", ["big", "a", "lfs"]), ("tensors", ["a", "big", "lfs"]),
        ("parameters", ["big", "a", "lfs"]), ("format", ["big", "a", "lfs"]), ("finding", ["lfs", "a", "big"]),
    ],
)  # fmt: skip
def test_sorting(cli: Cli, tmp_path: Path, order: str, names: list[str]) -> None:
    written(tmp_path / "a.pth", wrapped())
    written(tmp_path / "big.pt", safetensors([("a", "F32", [900], bytes(3600))], metadata={"format": "pt"}))
    written(tmp_path / "lfs.bin", POINTER)
    found = [json.loads(line)["path"] for line in cli("ls", tmp_path, "--sort", order, "--json").stdout.splitlines()]
    assert [Path(path).stem for path in found] == names


def test_what_cannot_be_read_does_not_stop_the_others(cli: Cli, folder: Path) -> None:
    done = cli("ls", "missing.pth", "b10.pth")
    assert done.exit_code == 0
    assert rows(done.stdout)[1] == ["missing.pth", "no such file or folder"]
    assert cli("ls", "missing.pth", "lfs.bin").exit_code == 2, "none could be read"
    assert cli("ls").exit_code == 2


def test_hostile_names_reach_no_terminal(cli: Cli, tmp_path: Path) -> None:
    written(tmp_path / "a\x1b[2J.pth", wrapped("\x1b]0;owned\x07."))
    for options in ([], ["--json"]):
        shown = cli("ls", tmp_path, *options).output
        assert "\x1b" not in shown and "\x07" not in shown


def test_a_terminal_gets_short_names_and_a_summary(
    cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "width_of", lambda stream: 60)
    lines = cli("ls", ".", "runs/first").stdout.splitlines()
    assert max(map(len, lines)) <= 60
    assert any(line.startswith("b10.pth ") and line.endswith(" wrapped-names") for line in lines)
    lfs = next(line for line in lines if line.startswith("lfs.bin"))
    assert lfs.split("  ")[-1].startswith("a git-") and lfs.endswith("pointer, not the file itself")
    assert " ".join(lines[-2:]).startswith("6 checkpoints, ") or lines[-1].startswith("6 checkpoints, ")
    assert "1 with errors, 1 with warnings" in " ".join(" ".join(lines[-2:]).split())


def test_a_common_folder_is_said_once_on_a_terminal(
    cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "width_of", lambda stream: 200)
    shown = cli("ls", "-r", "runs").stdout
    assert shown.splitlines()[2].startswith("epoch_1.pt ") and "2 checkpoints in runs/first/, " in shown


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0"), (9_999, "9,999"), (10_000, "10.0k"), (999_600, "1.00M"), (7_240_000_000, "7.24B")]
)
def test_large_counts(count: int, text: str) -> None:
    assert short(count) == text


@pytest.mark.slow
def test_a_small_file_takes_some_milliseconds(cli: Cli, tmp_path: Path) -> None:
    for number in range(50):
        torch.save({f"l{index}.weight": torch.ones(4) for index in range(40)}, tmp_path / f"{number}.pth")
    cli("ls", tmp_path)
    start = time.process_time()
    assert cli("ls", tmp_path).exit_code == 0
    assert (time.process_time() - start) / 50 < 0.04
