"""Many inputs: every command does on each what it does on one, whatever the others are."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy
import pytest
import torch
from builders import written
from cli.conftest import Cli, state, wrapped
from file_commands import COMMANDS, arguments, small_files
from sharded import write

from ckptfix import urls
from ckptfix.runner import inputs

WRITING = [name for name, words in COMMANDS.items() if len(words) > 2 and words[2].startswith("{out}")]
TO = {"convert": ["--to", "safetensors"], "convert back": ["--to", "zip"]}
SUFFIX = {"convert": ".safetensors", "convert back": ".pth"}


def tree(folder: Path) -> dict[str, bytes]:
    """Path below `folder` -> content, of all files."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of a checkpoint of many files, three plain ones in two folders, and files that are none."""
    monkeypatch.chdir(tmp_path)
    runs = Path("runs")
    for name in ("a/one.pth", "a/two.pth", "b/one.pth", ".hidden.pth"):
        (runs / name).parent.mkdir(parents=True, exist_ok=True)
        written(runs / name, wrapped())
    shards: list[dict[str, torch.Tensor]] = [{"module.v": torch.ones(3)}, {"module.w": torch.ones(2)}]
    write(runs / "shards", shards)
    written(runs / "a/model", wrapped())
    (runs / "a/log.txt").write_text("no checkpoint")
    torch.save({"lr": 1}, runs / "a/scheduler.pt")
    numpy.savez(runs / "a/arrays.npz", x=numpy.ones(3))
    (runs / "b/words.pkl").write_bytes(pickle.dumps({"a": 1}))
    return runs


FOUND = ["runs/a/model", "runs/a/one.pth", "runs/a/two.pth", "runs/b/one.pth", "runs/shards"]


@pytest.mark.parametrize("name", WRITING)
def test_every_command_writes_to_a_folder_what_it_writes_alone(cli: Cli, name: str, tmp_path: Path) -> None:
    words = arguments(name, tmp_path)
    alone = cli(*words)
    suffix = Path(words[1]).suffix
    copy = shutil.copy(words[1], tmp_path / f"other{suffix}")
    out = tmp_path / "folder"
    done = cli(words[0], words[1], copy, *words[3:], *TO.get(name, ()), "--out-dir", out)
    assert done.exit_code == alone.exit_code == 0, done.stderr
    wanted = SUFFIX.get(name, suffix)
    assert sorted(path.name for path in out.iterdir()) == [f"in{wanted}", f"other{wanted}"]
    assert {path.read_bytes() for path in out.iterdir()} == {Path(words[2]).read_bytes()}
    lines = done.stdout.splitlines()
    said = "; ".join(line for line in alone.stdout.splitlines() if not line.startswith(" "))
    assert [line.split("  ", 1)[1].strip() for line in lines[:-1]] == [said, said]
    assert lines[-1] == f"2 files: 2 written to {out}."


def test_one_that_fails_does_not_stop_the_others(cli: Cli, ddp: Path, tmp_path: Path) -> None:
    bad = written(tmp_path / "bad.pth", b"<html>")
    out = tmp_path / "out"
    done = cli("to-cpu", bad, tmp_path / "none.pth", ddp, "--out-dir", out)
    assert done.exit_code == 2
    assert list(tree(out)) == ["ddp.pth"]
    assert done.stdout.splitlines()[-1] == f"3 files: 1 written to {out}, 2 failed."
    assert done.stderr.startswith(f"{bad}: ")
    assert f"{tmp_path / 'none.pth'}: no such file or folder" in done.stderr
    assert done.stderr.count(str(bad)) == 1
    quiet = cli("to-cpu", bad, ddp, "--out-dir", tmp_path / "quiet", "--quiet")
    assert quiet.stdout == "" and quiet.stderr.startswith(f"{bad}: ")


def test_exit_codes(cli: Cli, ddp: Path, plain: Path, tmp_path: Path) -> None:
    cut = written(tmp_path / "cut.pth", wrapped()[:1000])
    number = 0

    def code(*words: object) -> int:
        nonlocal number
        number += 1
        return cli("repair", *words, "--fill", "zeros", "--out-dir", tmp_path / str(number)).exit_code

    assert [code(ddp, plain), code(ddp, cut), code(cut, tmp_path / "none")] == [0, 3, 2]
    html = written(tmp_path / "page.pth", b"<html>")
    assert cli("doctor", ddp, plain).exit_code == 0
    assert cli("doctor", ddp, html).exit_code == 1
    assert cli("doctor", ddp, html, tmp_path / "none").exit_code == 2
    assert cli("inspect", ddp, plain).exit_code == 0
    assert cli("inspect", ddp, html).exit_code == 2


def test_warnings_name_their_file(cli: Cli, ddp: Path, plain: Path, tmp_path: Path) -> None:
    done = cli("map-location", ddp, plain, "cuda:0=cpu", "cuda:7=cpu", "--out-dir", tmp_path / "out")
    assert done.exit_code == 0
    assert done.stderr.splitlines() == [
        f"{ddp}: warning: cuda:7: no tensor is on this device, only on cuda:0",
        f"{plain}: warning: cuda:0: no tensor is on this device, only on cpu",
        f"{plain}: warning: cuda:7: no tensor is on this device, only on cpu",
    ]


def test_json_is_a_line_for_each(cli: Cli, ddp: Path, plain: Path, tmp_path: Path) -> None:
    html = written(tmp_path / "page.pth", b"<html>")
    for number, words in enumerate((["to-cpu", "--out-dir", str(tmp_path / "0")], ["doctor"], ["inspect"])):
        done = cli(*words, ddp, html, plain, "--json")
        first, page, last = map(json.loads, done.stdout.splitlines())
        assert [first["path"], page["path"], last["path"]] == [str(ddp), str(html), str(plain)]
        assert {row["command"] for row in (first, page, last)} == {words[0]}
        codes = [0, 1, 0] if words[0] == "doctor" else [0, 2, 0]
        assert [row["exit_code"] for row in (first, page, last)] == codes and done.exit_code == max(codes)
        if words[0] != "doctor":
            assert page["error"]["type"] == "UnknownFormat" and page["error"]["path"] == str(html)
        alone = ["-o", tmp_path / f"{number}.pth"] if words[0] == "to-cpu" else []
        document = json.loads(cli(words[0], plain, *alone, "--json").stdout)
        assert {**document, "output": None} == {**last, "output": None}


def test_folders_are_searched(cli: Cli, runs: Path) -> None:
    done = cli("doctor", "-r", runs, "--fail-on", "never", "--json")
    assert [json.loads(line)["path"] for line in done.stdout.splitlines()] == FOUND
    said = cli("inspect", "-r", runs).stdout.splitlines()
    assert [line.split("  ")[-1].strip() for line in said if line.startswith("file ")] == FOUND


def test_outputs_keep_their_place_below_the_folder(cli: Cli, runs: Path) -> None:
    before = tree(runs)
    done = cli("strip-module", "-r", runs, "--out-dir", "new/out")
    assert done.exit_code == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "5 files: 5 written to new/out."
    for path in FOUND:
        cli("strip-module", path, "alone", "--force")
        made = Path("new/out", Path(path).relative_to("runs"))
        alone = Path("alone")
        assert tree(made) == tree(alone) if made.is_dir() else made.read_bytes() == alone.read_bytes()
        (shutil.rmtree if alone.is_dir() else os.remove)(alone)
    assert tree(runs) == before
    assert len(tree(Path("new/out"))) == 4 + len(tree(runs / "shards"))


def test_the_folder_of_outputs_is_not_searched(cli: Cli, runs: Path) -> None:
    for _ in range(2):
        done = cli("to-cpu", "-r", "runs", "--out-dir", "runs/cpu", "--force")
        assert (done.exit_code, done.stdout.splitlines()[-1]) == (0, "5 files: 5 written to runs/cpu.")


def test_a_checkpoint_of_many_files_that_is_named_is_one_input(cli: Cli, runs: Path) -> None:
    done = cli("strip-module", "-r", "runs/shards", "--out-dir", "out")
    assert done.stdout.splitlines()[-1] == "1 file: 1 written to out."
    assert [path.name for path in Path("out").iterdir()] == ["shards"]


@pytest.mark.parametrize("verb", ["to-cpu", "fix"])
def test_a_folder_without_checkpoints_is_an_error(cli: Cli, ddp: Path, tmp_path: Path, verb: str) -> None:
    (tmp_path / "empty").mkdir()
    done = cli(verb, "-r", tmp_path / "empty", ddp, "--out-dir", tmp_path / "out")
    assert done.exit_code == 2 and "an empty folder" in done.stderr
    assert list(tree(tmp_path / "out")) == ["ddp.pth"]


def test_what_is_called_a_checkpoint_and_is_none_is_not_passed_over(cli: Cli, runs: Path) -> None:
    written(runs / "page.pth", b"<html>")
    done = cli("doctor", "-r", runs)
    assert done.exit_code == 1
    assert "runs/page.pth" in done.stdout and "log.txt" not in done.stdout


def test_what_cannot_be_read_is_not_passed_over(cli: Cli, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    def locked(path: str) -> object:
        if str(path).endswith("b"):
            raise PermissionError(13, "Permission denied", path)
        return urls.scan_folder(path)

    monkeypatch.setattr(inputs, "scan_folder", locked)  # only there: pathlib of Python 3.13 calls os.scandir too
    done = cli("to-cpu", "-r", runs, "--out-dir", "out")
    assert "read one.pth in runs/b" in done.stdout, "the folder itself is an input, and its command says what it finds"


def test_patterns(cli: Cli, runs: Path) -> None:
    done = cli("strip-module", "runs/**/*.pth", "--out-dir", "out")
    assert done.exit_code == 0
    assert sorted(tree(Path("out"))) == ["a/one.pth", "a/two.pth", "b/one.pth"]
    both = cli("strip-module", "-r", "runs/[as]*", "--out-dir", "both")
    assert both.exit_code == 0
    assert sorted(path.name for path in Path("both").iterdir()) == ["a", "shards"]
    assert sorted(tree(Path("both/a"))) == ["model", "one.pth", "two.pth"]
    assert cli("doctor", "runs/?/t*.pth").stdout.startswith("1 file: 0 with errors")
    missing = cli("inspect", "runs/*.none")
    assert missing.exit_code == 2 and "runs/*.none: no such file or folder" in missing.stderr
    Path("a[1].pth").write_bytes(wrapped())
    assert cli("inspect", "a[1].pth").stdout.startswith("file          a[1].pth")


def test_equal_names_are_refused_before_anything_is_written(cli: Cli, runs: Path) -> None:
    done = cli("to-cpu", "runs/a/two.pth", "runs/a/one.pth", "runs/b/one.pth", "--out-dir", "out")
    assert done.exit_code == 2 and not Path("out").exists()
    assert "out/one.pth: runs/a/one.pth and runs/b/one.pth would both write it" in done.stderr
    twice = cli("convert", "runs/a/one.pth", "runs/a/one.pth", "--out-dir", "out", "--to", "safetensors")
    assert twice.exit_code == 2 and not Path("out").exists()


def test_an_output_is_no_input(cli: Cli, runs: Path) -> None:
    before = tree(runs)
    done = cli("to-cpu", "runs/a/one.pth", "runs/b/one.pth", "--out-dir", "runs/b", "--force")
    assert done.exit_code == 2 and tree(runs) == before
    same = cli("to-cpu", "runs/a/one.pth", "runs/a/two.pth", "--out-dir", "runs/a", "--force")
    assert same.exit_code == 2 and tree(runs) == before
    assert same.stderr.count("the output is the input") == 2


def test_existing_outputs(cli: Cli, runs: Path) -> None:
    words = ("to-cpu", "runs/a/one.pth", "runs/a/two.pth", "--out-dir", "out")
    assert cli(*words).exit_code == 0
    again = cli(*words)
    assert again.exit_code == 2 and again.stderr.count("exists") == 2
    assert again.stdout == "2 files: 0 written to out, 2 failed.\n"
    assert cli(*words, "--force").exit_code == 0 and sorted(tree(Path("out"))) == ["one.pth", "two.pth"]
    forced = cli(*words, "--backup")
    assert forced.exit_code == 0 and "kept the old out/one.pth as out/one.pth.~1~" in forced.stdout
    assert sorted(tree(Path("out"))) == ["one.pth", "one.pth.~1~", "two.pth", "two.pth.~1~"]


def test_a_dry_run_writes_no_file_and_leaves_no_folder(cli: Cli, runs: Path) -> None:
    before = tree(Path())
    done = cli("strip-module", "-r", runs, "--out-dir", "new/out", "--dry-run")
    assert done.exit_code == 0
    assert done.stdout.splitlines()[-1] == "5 files: 5 would be written to new/out."
    assert tree(Path()) == before and not Path("new").exists()
    assert cli("repair", "runs/a/one.pth", "--out-dir", "new", "--check-only").exit_code == 0
    assert not Path("new").exists()


@pytest.mark.sampled(1_000)
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("strip-module a.pth b.pth c.pth", "With --out-dir DIR every name is an input"),
        ("match a.pth b.pth c.pth --like d.pth", "With --out-dir DIR every name is an input"),
        ("repair a.pth b.pth c.pth", "With --out-dir DIR every name is an input"),
        ("to-cpu -r .", "-r needs --out-dir DIR"),
        ("to-cpu *.pth", "IN is a pattern: give --out-dir DIR"),
        ("to-cpu a.pth -o b.pth --out-dir out", "The output is given twice"),
        ("convert a.pth b.pth --out-dir out", "OUT is required unless you use --to"),
        ("convert a.pth b.pth --out-dir out --to foo", "no format called 'foo'; formats are"),
        ("map-location a.pth --out-dir out", "Missing argument 'DEVICE | FROM=TO...'"),
        ("map-location a.pth cpu cuda:0=cpu --out-dir out", "give one DEVICE, or pairs FROM=TO"),
        ("rename a.pth --out-dir out", "Nothing to rename"),
        ("to-cpu - a.pth --out-dir out", "has no name"),
        ("to-cpu a.pth --out-dir out --jobs 0", "Invalid value for '--jobs'"),
        ("to-cpu b.pth --out-dir a.pth", "Directory 'a.pth' is a file"),
        ("match a.pth --like b.pth --rules rules --out-dir out", "--rules is one file"),
        ("doctor -r", "-r needs the name of a folder"),
    ],
)
def test_wrong_usage(cli: Cli, line: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in "abc":
        written(tmp_path / f"{name}.pth", wrapped())
    done = cli(*line.split())
    assert done.exit_code == 2, done.stdout
    assert message in " ".join(done.stderr.split())
    assert sorted(tree(Path())) == ["a.pth", "b.pth", "c.pth"]


def test_devices_and_names_of_files_are_told_apart(cli: Cli, tmp_path: Path) -> None:
    files = [written(tmp_path / name, wrapped()) for name in ("epoch=3-step=100.ckpt", "cpu.pth")]
    done = cli("map-location", *files, "cuda:0=cpu", "mps=cpu", "--out-dir", tmp_path / "out")
    assert done.exit_code == 0 and len(tree(tmp_path / "out")) == 2


def names_kept() -> Mapping[str, tuple[str, tuple[str, ...], str]]:
    """What is tried -> name of the input, command and options, name of the output."""
    return {
        "two suffixes": ("x.pth.tar", ("convert", "--to", "safetensors"), "x.safetensors"),
        "a folder of it": ("x.pth", ("convert", "--to", "hf"), "x"),
        "legacy": ("x.bin", ("convert", "--to", "legacy"), "x.bin"),
        "no suffix": ("model", ("to-cpu",), "model"),
        "extract": ("x.foo", ("extract",), "x.pth"),
        "extract to": ("x.pth", ("extract", "--to", "safetensors"), "x.safetensors"),
    }


@pytest.mark.parametrize(("name", "words", "kept"), names_kept().values(), ids=names_kept())
def test_names_are_kept(
    cli: Cli, name: str, words: tuple[str, ...], kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path / name, state(w=(1, 2)))
    done = cli(*words, name, "--out-dir", "out")
    assert (done.exit_code, [path.name for path in Path("out").iterdir()]) == (0, [kept]), done.stderr


def test_extract_without_an_output_names_it_by_its_format(cli: Cli, plain: Path) -> None:
    assert cli("extract", plain, "--to", "safetensors").exit_code == 0
    assert plain.with_name("plain.weights.safetensors").exists()


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_a_line_fits_the_terminal(
    cli: Cli, columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("long" * 30)
    long.mkdir()
    torch_file, _ = small_files(long)
    monkeypatch.setattr("ckptfix.cli.shared.console.width_of", lambda stream: columns)
    done = cli("to-cpu", torch_file, "--out-dir", tmp_path / "out")
    first = done.stdout.splitlines()[0]
    assert len(first) <= columns and "in.pth" in first and "moved" in first


def test_reports_whole_are_apart(cli: Cli, ddp: Path, plain: Path) -> None:
    done = cli("inspect", ddp, plain)
    assert done.stdout == f"{cli('inspect', ddp).stdout}\n{cli('inspect', plain).stdout}"


def test_tables_alone_have_the_name_of_their_file(cli: Cli, ddp: Path, plain: Path) -> None:
    first, second = (cli("inspect", path, "--tensors").stdout for path in (ddp, plain))
    assert cli("inspect", ddp, plain, "--tensors").stdout == f"{ddp}:\n{first}\n{plain}:\n{second}"


def test_help_takes_several_topics(cli: Cli) -> None:
    assert cli("help", "json", "to-cpu").stdout == cli("help", "json").stdout + cli("help", "to-cpu").stdout
