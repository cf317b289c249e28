"""--backup: an old OUT stays, under another name; --force replaces it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli.conftest import Cli, state, wrapped
from file_commands import WRITERS, line_of

COMMANDS = [name for name in WRITERS if line_of(name).only != "safetensors"]
OLD = state(weight=(1.0, 2.0))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("a.pth").write_bytes(wrapped())
    Path("like.pth").write_bytes(wrapped())
    Path("b.pth").write_bytes(OLD)
    return tmp_path


def line(command: str, *how: object) -> list[object]:
    return [command, "a.pth", *how, *(word.format(torch="like.pth") for word in line_of(command).options)]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_checkpoint_that_is_replaced_is_kept(cli: Cli, command: str) -> None:
    done = cli(*line(command, "b.pth"), "--backup")
    assert done.exit_code == 0, done.output
    assert "kept the old b.pth as b.pth.~1~\n" in done.stdout and done.stdout.count("kept the old") == 1
    assert Path("b.pth.~1~").read_bytes() == OLD
    first = Path("b.pth").read_bytes()
    assert first != OLD
    done = cli(*line(command, "b.pth"), "-b", "--json")
    document = json.loads(done.stdout)
    assert document["backup"] == "b.pth.~2~"
    assert Path("b.pth.~2~").read_bytes() == first
    assert Path("b.pth.~1~").read_bytes() == OLD


@pytest.mark.parametrize("option", [(), ("-o",)])
@pytest.mark.parametrize("command", COMMANDS)
def test_force_replaces_it(cli: Cli, command: str, option: tuple[str, ...], folder: Path) -> None:
    words = line(command, *option, "b.pth")
    assert cli(*words).exit_code == 2
    assert Path("b.pth").read_bytes() == OLD
    done = cli(*words, "--force", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["backup"] is None
    assert Path("b.pth").read_bytes() != OLD
    assert sorted(path.name for path in folder.iterdir()) == ["a.pth", "b.pth", "like.pth"]


@pytest.mark.parametrize("command", COMMANDS)
def test_one_output_is_wanted(cli: Cli, command: str) -> None:
    twice = cli(*line(command, "c.pth"), "-o", "d.pth")
    # Several files and -o are the inputs of convert.
    said = "c.pth: no such file" if command == "convert" else "Error: "
    assert twice.exit_code == 2 and twice.stderr.count(said) == 1
    assert not Path("c.pth").exists() and not Path("d.pth").exists()


@pytest.mark.parametrize("content", [b"", b"an old log\n", b"<html>no</html>"])
def test_what_is_no_checkpoint_is_kept_too(cli: Cli, content: bytes) -> None:
    Path("b.pth").write_bytes(content)
    done = cli(*line("to-cpu", "b.pth"), "-b", "--json")
    assert (done.exit_code, json.loads(done.stdout)["backup"]) == (0, "b.pth.~1~")
    assert Path("b.pth.~1~").read_bytes() == content


@pytest.mark.parametrize("cut", [1, 30, 200])
def test_a_checkpoint_that_is_cut_short_is_one(cli: Cli, cut: int) -> None:
    Path("b.pth").write_bytes(OLD[:-cut])
    assert cli(*line("to-cpu", "b.pth"), "-b").exit_code == 0
    assert Path("b.pth.~1~").read_bytes() == OLD[:-cut]


def test_the_target_of_a_link_is_kept_beside_itself(cli: Cli, folder: Path) -> None:
    (folder / "far").mkdir()
    Path("b.pth").rename("far/real.pth")
    Path("b.pth").symlink_to("far/real.pth")
    done = cli(*line("to-cpu", "b.pth"), "-b")
    assert f"as {folder.resolve()}/far/real.pth.~1~" in done.stdout
    assert Path("far/real.pth.~1~").read_bytes() == OLD
    assert Path("b.pth").is_symlink() and Path("b.pth").read_bytes() == Path("far/real.pth").read_bytes() != OLD


def test_a_dry_run_keeps_nothing(cli: Cli, folder: Path) -> None:
    assert cli(*line("to-cpu", "b.pth"), "-b", "--dry-run").exit_code == 0
    assert sorted(path.name for path in folder.iterdir()) == ["a.pth", "b.pth", "like.pth"]
    assert Path("b.pth").read_bytes() == OLD


def test_a_name_that_leaves_no_room_for_a_number_is_refused(cli: Cli) -> None:
    name = "b" * 250 + ".pth"
    Path(name).write_bytes(OLD)
    done = cli(*line("to-cpu", name), "-b")
    assert done.exit_code == 2 and "--force" in done.stderr
    assert Path(name).read_bytes() == OLD
