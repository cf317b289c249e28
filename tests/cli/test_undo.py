"""--in-place and undo on the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from builders import written
from cli.conftest import Cli, wrapped

COMMANDS = {
    "strip-module": (),
    "add-module": (),
    "unwrap": (),
    "rename": ("--sub", "fc=head"),
    "to-cpu": (),
    "map-location": ("cuda:5",),
    "match": ("--like", "{like}"),
}


@pytest.mark.parametrize("verb", COMMANDS)
def test_a_command_changes_its_input_and_undo_takes_that_back(cli: Cli, tmp_path: Path, verb: str) -> None:
    path = written(tmp_path / "a.pth", wrapped())
    like = written(tmp_path / "like.pth", wrapped(""))
    before = path.read_bytes()
    words = [word.format(like=like) for word in COMMANDS[verb]]
    planned = cli(verb, path, *words, "--in-place", "--dry-run")
    assert (planned.exit_code, path.read_bytes()) == (0, before), planned.stderr
    assert "would be changed in place" in planned.stdout
    done = cli(verb, path, *words, "-i")
    assert done.exit_code == 0, done.stderr
    assert "changed in place: " in done.stdout
    assert path.read_bytes() != before
    assert [left.name for left in sorted(tmp_path.iterdir())] == ["a.pth", "like.pth"]
    listed = cli("undo", "--list", path)
    assert re.fullmatch(rf"\w[\w ]+, as .* \(before: {len(before):,} bytes\)\n", listed.stdout)
    taken = cli("undo", path, "--json")
    assert json.loads(taken.stdout)["undone"] is True
    assert path.read_bytes() == before
    again = cli("undo", path)
    said = f"nothing to undo: {path} has no in-place edits\n"
    assert (again.exit_code, again.stdout) == (0, said)


def test_the_list_tells_edits_of_a_zip_apart(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "a.pth"
    torch.save({f"module.{number}.w": torch.ones(4) for number in range(3)}, path)
    steps = {
        ("strip-module",): "renamed 3 keys, as in module.0.w -> 0.w",
        ("map-location", "cuda:1"): "moved 3 tensors, as from cpu to cuda:1",
        ("cast", "--to", "bf16"): "cast 3 tensors, as from float32 to bfloat16",
        ("select", "--drop", "0.w"): "left out 1 key, as in 0.w",
    }
    sizes = []
    for verb, *words in steps:
        sizes.append(path.stat().st_size)
        assert cli(verb, path, *words, "-i").exit_code == 0
    lines = [f"{what} (before: {size:,} bytes)" for what, size in zip(steps.values(), sizes, strict=True)]
    assert cli("undo", "--list", path).stdout.splitlines() == lines[::-1]
    rows = json.loads(cli("undo", "--list", path, "--json").stdout)["left"]
    assert [row["what"] for row in rows] == [*steps.values()][::-1]
    said = cli("undo", path).stdout.splitlines()
    assert said == ["undid: left out 1 key, as in 0.w; a.pth is byte for byte as before", "3 earlier edits left"]


def test_json_says_that_it_is_in_place(cli: Cli, tmp_path: Path) -> None:
    path = written(tmp_path / "a.pth", wrapped())
    document = json.loads(cli("strip-module", path, "-i", "--json").stdout)
    assert (document["in_place"], document["written"], document["output"]) == (True, True, str(path))
    assert document["output_size"] == path.stat().st_size


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["strip-module", "map-location"])
def test_every_name_is_an_input(cli: Cli, tmp_path: Path, verb: str) -> None:
    paths = [written(tmp_path / f"{number}.pth", wrapped()) for number in range(3)]
    before = paths[0].read_bytes()
    done = cli(verb, *paths, *COMMANDS[verb], "-i")
    assert done.exit_code == 0, done.stderr
    assert all(path.read_bytes() != before for path in paths)
    assert "3 of 3" in done.stdout + done.stderr or "3 files" in done.stdout + done.stderr
    assert cli("undo", *paths).exit_code == 0
    assert [path.read_bytes() for path in paths] == [before] * 3
    assert cli(verb, tmp_path, "-r", *COMMANDS[verb], "-i", "--jobs", "2").exit_code == 0
    assert all(path.read_bytes() != before for path in paths)


@pytest.mark.sampled(1_000)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("a.pth", "-i", "-o", "b.pth"), "An in-place edit has no output"),
        (("a.pth", "-i", "--out-dir", "d"), "An in-place edit has no output"),
        (("-", "-i"), "- (standard input) cannot be edited in place"),
        (("-i",), "Missing argument"),
    ],
)
def test_wrong_usage(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str) -> None:
    monkeypatch.chdir(tmp_path)
    before = wrapped()
    written(tmp_path / "a.pth", before)
    done = cli("strip-module", *words)
    assert done.exit_code == 2
    assert said in done.stderr
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a.pth": before}


def test_a_file_in_between_is_refused_and_undo_helps(cli: Cli, tmp_path: Path) -> None:
    path = written(tmp_path / "a.pth", wrapped())
    (tmp_path / ".a.pth.ckptfix-journal").write_bytes(b"ckptfix edit 1\n")
    for words in (["inspect"], ["doctor"], ["strip-module", "-i"], ["to-cpu", "-o", "b.pth"], ["ls"]):
        done = cli(words[0], path, *words[1:])
        assert done.exit_code == 2, words
        assert "did not finish" in done.stderr + done.stdout
    assert "would undo" in cli("undo", "-n", path).stdout
    done = cli("undo", path)
    assert done.stdout == "undid an edit that did not finish: it had not begun\n"
    assert cli("inspect", path).exit_code == 0
