"""ckptfix ls: a line a checkpoint."""

from __future__ import annotations

import json
import os
import pickle
import re
import time
import zipfile
from pathlib import Path

import pytest
import torch
from builders import safetensors, written
from cli.conftest import Cli, floats, state, wrapped
from run_folders import LAYOUTS, built, cut

from ckptfix.cli.shared import console
from ckptfix.formats import SNIFFED, may_be_checkpoint
from ckptfix.io.source import Source
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
        "name", "format", "size", "tensors", "parameters", "dtypes", "devices", "wrappers", "epoch", "finding",
    ]  # fmt: skip
    shown = {row[0]: row[1:] for row in rows(done.stdout)}
    assert list(shown) == ["b9.safetensors", "b10.pth", "lfs.bin", "shards"], "natural order; no text file"
    assert shown["b10.pth"][-7:] == ["2", "8", "float32", "cuda:0", "module", "3", "wrapped-names"]
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


def test_files_are_listed_by_content(cli: Cli, tmp_path: Path) -> None:
    """Suffixes of others, or none, and not what only begins like a checkpoint."""
    for name in ("a.params", "b.model", "c.dict", "d.p", "tetris", "e.pkl"):
        written(tmp_path / name, state(fc__weight=(1, 2)))
    torch.save({"w": torch.ones(2)}, tmp_path / "f.old", _use_new_zipfile_serialization=False)
    written(tmp_path / "g.weights", safetensors([("a", "F32", [1], floats(1))], metadata={"format": "pt"}))
    written(tmp_path / "cut.params", state(fc__weight=(1, 2))[:-90])
    torch.save({"seed": 1}, tmp_path / "no_tensors.p")
    with zipfile.ZipFile(tmp_path / "report.docx", "w") as archive:
        archive.writestr("[Content_Types].xml", "x")
    (tmp_path / "data.pickle").write_bytes(pickle.dumps(list(range(50_000))))
    (tmp_path / "table.csv").write_text("a,b\n")
    (tmp_path / "empty").touch()
    os.mkfifo(tmp_path / "pipe")
    documents = [json.loads(line) for line in cli("ls", tmp_path, "--json").stdout.splitlines()]
    named = {Path(row["path"]).name: row["finding"] for row in documents}
    assert set(named) == {
        "a.params", "b.model", "c.dict", "d.p", "tetris", "e.pkl", "f.old", "g.weights", "cut.params",
    }  # fmt: skip
    assert named["cut.params"] == "truncated" and named["tetris"] is None


def test_only_the_first_bytes_of_other_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "large.log", b"x" * 4_000_000)
    (tmp_path / "data.pickle").write_bytes(pickle.dumps(list(range(100_000))))
    reads: list[int] = []
    read = Source.read

    def counted(source: Source, offset: int, length: int) -> bytes:
        reads.append(length)
        return read(source, offset, length)

    monkeypatch.setattr(Source, "read", counted)
    for name in ("large.log", "data.pickle"):
        assert not may_be_checkpoint(str(tmp_path / name))
    assert reads == [SNIFFED, SNIFFED]


@pytest.mark.sampled(quick=2)
@pytest.mark.parametrize("layout", ["trainer", "lightning", "deepspeed", "torchtitan", "megatron"])
def test_progress_and_wholeness_of_a_run(cli: Cli, tmp_path: Path, layout: str) -> None:
    sample = LAYOUTS[layout]
    run = built(layout, tmp_path / layout)
    listed = [json.loads(line) for line in cli("ls", run, "--json").stdout.splitlines()]
    if layout != "megatron":  # its folder of two ranks is not one model
        assert [row["step"] for row in listed] == [100, 200] and {row["state"] for row in listed} == {None}
    checked = cli("ls", run, "--check", "--json")
    rows = [json.loads(line) for line in checked.stdout.splitlines()]
    assert [row["step"] for row in rows] == [100, 200]
    if layout == "trainer":
        assert [(row["epoch"], row["loss"], row["state"]) for row in rows] == [(1, 1.25, "whole"), (2, 1.25, "whole")]
        assert checked.exit_code == 0
    cut(run / sample.name(200) / sample.optimizer if sample.optimizer else run / sample.name(200), 60)
    done = cli("ls", run, "--check")
    assert done.exit_code in (1, 2) and "cut at 60 %" in done.stdout


def test_check_reads_the_data(cli: Cli, tmp_path: Path) -> None:
    content = bytearray(state(fc__weight=(1, 2)))
    content[content.index(floats(1, 2))] ^= 1
    written(tmp_path / "flipped.pth", bytes(content))
    written(tmp_path / "good.pth", state(fc__weight=(1, 2)))
    assert cli("ls", tmp_path).exit_code == 0
    done = cli("ls", tmp_path, "--check")
    assert done.exit_code == 1 and "bad-crc" in done.stdout and "whole" in done.stdout
    assert cli("ls", tmp_path / "good.pth", "--check").exit_code == 0
