"""--jobs: processes do what one does, in the same order, and a signal ends them all cleanly."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import odd_command
import pytest
from builders import written
from cli.conftest import Cli, wrapped
from cli.test_many import tree
from click.testing import CliRunner
from holding import holding
from json_contract import documents, faults

from ckptfix.cli.shared.batch import Batch, run
from ckptfix.cli.shared.console import Console
from ckptfix.cli.shared.exits import TROUBLE
from ckptfix.cli.shared.one_job import perform
from ckptfix.platform import Stopped
from ckptfix.runner.jobs import ConsoleSettings, Job, Outcome, Summary

CKPTFIX = [sys.executable, "-m", "ckptfix"]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Seven files; one is a web page."""
    monkeypatch.chdir(tmp_path)
    for number in range(7):
        written(tmp_path / f"{number}.pth", b"<html>" if number == 2 else wrapped())
    return [f"{number}.pth" for number in range(7)]


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("line", ["to-cpu", "to-cpu --json", "map-location cuda:3", "doctor --json", "doctor --fast"])
def test_several_processes_say_what_one_says(cli: Cli, files: list[str], line: str) -> None:
    verb, *rest = line.split()
    flags = [word for word in rest if word.startswith("-")]
    words = [verb, *files, *(word for word in rest if word not in flags), *flags]
    writes = verb != "doctor"
    one = cli(*words, *(["--out-dir", "out"] if writes else []))
    Path("out").rename("one") if writes else None
    two = cli(*words, *(["--out-dir", "out"] if writes else []), "--jobs", "3")
    assert (two.exit_code, two.stdout, two.stderr) == (one.exit_code, one.stdout, one.stderr)
    assert one.exit_code == (2 if writes else 1)
    if writes:
        assert len(tree(Path("one"))) == 6
        assert tree(Path("one")) == tree(Path("out"))


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
def test_every_output_has_its_record(cli: Cli, files: list[str], jobs: int) -> None:
    assert cli("to-cpu", *files[:2], "--out-dir", "out", "--record", "--jobs", jobs).exit_code == 0
    made = ["0.pth", "0.pth.record.json", "1.pth", "1.pth.record.json"]
    assert sorted(path.name for path in Path("out").iterdir()) == made


@pytest.mark.slow
def test_wrong_usage_ends_the_processes(cli: Cli, files: list[str]) -> None:
    done = cli("map-location", *files, "cpu", "cuda:0=cpu", "--out-dir", "out", "--jobs", "2")
    assert done.exit_code == 2 and "give one DEVICE" in done.stderr
    assert not Path("out").exists()


class Names:
    """A report of names and codes."""

    seen: list[tuple[str, int]]

    def __init__(self, console: Console, batch: Batch) -> None:
        Names.seen = []

    def add(self, name: str, outcome: Outcome) -> bool:
        Names.seen.append((name, outcome.code))
        return False

    def end(self, summary: Summary) -> None:
        Names.seen.append(("end", summary.ended))


@pytest.fixture
def odd(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Batch]:
    """Makes the jobs of `odd_command` on these names; or of another function."""
    monkeypatch.setattr("ckptfix.cli.shared.batch.perform", odd_command.perform)

    def jobs_on(names: Sequence[str], jobs: int) -> Batch:
        shown = ConsoleSettings(json=False, quiet=False, width=0, rows=False)
        made = [
            Job(command="odd", input=name, outputs=(), options={"name": name}, words=(), record=False, settings=shown)
            for name in names
        ]
        return Batch(jobs=made, options={}, report=Names, processes=jobs)

    return jobs_on


@pytest.mark.slow
def test_a_process_that_dies_is_the_failure_of_its_input(odd: Callable[..., Batch]) -> None:
    names = ["slow", "dies", "one", "fault", "dies", "x"]
    with CliRunner().isolation() as (_, err, _):
        code = run(odd(names, 2), Console())
        said = err.getvalue().decode()
    assert code == TROUBLE
    codes = [0, TROUBLE, 1, TROUBLE, TROUBLE, 0]
    assert Names.seen == [*zip(names, codes, strict=True), ("end", 6)]
    assert said.count("dies: the worker process was killed by signal 9") == 2
    assert "fault: a bug in ckptfix: KeyError" in said


@pytest.mark.slow
def test_a_process_that_dies_is_a_line_of_json(odd: Callable[..., Batch]) -> None:
    console = Console()
    console.json = True
    with CliRunner().isolation() as (out, _, _):
        assert run(odd(["dies", "fault"], 2), console) == TROUBLE
        rows = documents(out.getvalue().decode())
    said = [(row["path"], row["error"]["type"]) for row in rows]
    assert said == [("dies", "ChildProcessError"), ("fault", "KeyError")]
    assert not [fault for row in rows for fault in faults(row)]


def test_faults_and_order_in_one_process(odd: Callable[..., Batch]) -> None:
    names = ["y", "one", "fault", "x"]
    with CliRunner().isolation():
        assert run(odd(names, 1), Console()) == TROUBLE
    assert Names.seen == [*zip(names, [0, 1, TROUBLE, 0], strict=True), ("end", 4)]


def test_a_signal_is_no_failure_of_an_input(odd: Callable[..., Batch], monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(name: str) -> int:
        if name == "b":
            raise Stopped(signal.SIGINT)
        return 0

    monkeypatch.setattr(odd_command, "odd", stopped)

    with CliRunner().isolation() as (_, err, _):
        with pytest.raises(Stopped):
            run(odd(["a", "b", "c"], 1), Console())
        assert err.getvalue() == b"1 of 3 inputs done\n"
    assert Names.seen == [("a", 0)]


@pytest.mark.parametrize("at", [0, 3])
def test_a_signal_between_an_output_and_its_line(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, files: list[str], at: int
) -> None:
    calls = iter(range(7))

    def then_stopped(*arguments: Any) -> Outcome:
        outcome = perform(*arguments)
        if next(calls) == at:
            signal.raise_signal(signal.SIGTERM)
        return outcome

    monkeypatch.setattr("ckptfix.cli.shared.batch.perform", then_stopped)
    done = cli("to-cpu", *files[:2], *files[3:], "--out-dir", "out")
    assert done.exit_code == 128 + signal.SIGTERM
    made = sorted(path.name for path in Path("out").iterdir())
    assert [line for line in done.stderr.splitlines() if "is complete" in line] == [
        f"out/{made[-1]} is complete: it was written before that"
    ]
    assert len(made) == at + 1 and len(done.stdout.splitlines()) == at


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("jobs", [1, 3])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_whole_files_alone(tmp_path: Path, jobs: int, number: signal.Signals) -> None:
    for index in range(100):
        written(tmp_path / f"in/{index:03}.pth", wrapped()) if index else (tmp_path / "in").mkdir()
    words = ["to-cpu", "-r", "in", "--out-dir", "out", "--jobs", str(jobs)]
    with (
        open(tmp_path / "lines", "wb") as lines,
        subprocess.Popen(
            [*CKPTFIX, *words], cwd=tmp_path, stdout=lines, stderr=subprocess.PIPE, text=True, start_new_session=True,
            env=holding(tmp_path / "site", "in", 10),
        ) as child,
    ):
        while len([*(tmp_path / "out").glob("*.pth")]) < 5:
            assert child.poll() is None
            time.sleep(0.005)
        os.killpg(child.pid, number)  # as a terminal does: to all of them
        _, err = child.communicate(timeout=60)
    assert child.returncode == 128 + number
    assert "Traceback" not in err
    assert f"stopped by {number.name}" in err and "of 99 inputs done" in err
    made = list((tmp_path / "out").iterdir())
    assert 0 < len(made) < 99
    assert {path.suffix for path in made} == {".pth"}, "no temporary file is left"
    whole = [tmp_path / "whole.pth", *made]
    assert not subprocess.run([*CKPTFIX, "to-cpu", made[0], whole[0]], capture_output=True).returncode
    assert len({path.stat().st_size for path in whole}) == 1
    told = [line for line in err.splitlines() if "is complete" in line]
    assert len((tmp_path / "lines").read_text().splitlines()) + len(told) == len(made), "each is reported, once"


@pytest.mark.slow
def test_json_lines_come_while_others_are_worked_on(tmp_path: Path) -> None:
    for name in ("a.pth", "b.pth"):
        written(tmp_path / name, wrapped())
    done = subprocess.run(
        [*CKPTFIX, "inspect", "a.pth", "b.pth", "none", "--json", "--jobs", "2"], cwd=tmp_path, capture_output=True
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["path"], row["exit_code"]) for row in rows] == [("a.pth", 0), ("b.pth", 0), ("none", 2)]
    assert not [fault for row in rows for fault in faults(row)]
    assert done.returncode == 2
