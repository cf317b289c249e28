"""Plans of fleets that a stranger wrote: each job does what its line says, in the folder of the plan, or nothing."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from builders import safetensors
from cli.conftest import wrapped
from file_commands import line_of
from forks import MAIN, Forks
from property.verbs import run_command

from ckptfix import fleet
from ckptfix.command_table import COMMANDS
from ckptfix.errors import Refused

EVIL = "import pathlib\npathlib.Path({marker!r}).write_text('x')\ndef m():\n    return None\n"


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a plan, which is the current one, with two checkpoints; beside it, what is not the plan's."""
    folder = tmp_path / "work"
    (folder / "in").mkdir(parents=True)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious.pth").write_bytes(wrapped("precious."))
    for name in ("a", "b"):
        (folder / f"{name}.pth").write_bytes(wrapped())
    (folder / "link").symlink_to(outside)
    (folder / "file-link.pth").symlink_to(outside / "new.pth")
    (folder / "evil_module.py").write_text(EVIL.format(marker=str(outside / "PWNED")))
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    before = {path.name: path.read_bytes() for path in outside.iterdir()}
    yield folder
    assert {path.name: path.read_bytes() for path in outside.iterdir()} == before
    sys.modules.pop("evil_module", None)


def job(argv: list[str], output: str | None = None, input: str = "a.pth", **more: Any) -> dict[str, Any]:
    return {"input": input, "identity": None, "output": output, "bytes": 1, "argv": argv, **more}


def write(*jobs: Any, name: str = "plan.jsonl") -> Path:
    """A plan of these jobs, behind one that is right."""
    path = Path(name)
    rows = [job(["doctor", "b.pth"], input="b.pth"), *jobs]
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def in_threads(plan: Path, **how: Any) -> fleet.FleetReport:
    with ThreadPoolExecutor(1) as executor:
        return fleet.run(str(plan), executor=executor, **how)


OUT = "../outside/new.pth"
WRITERS = sorted(row.name for row in COMMANDS.values() if row.writes and not row.not_in_a_fleet)
NOT_IN_A_FLEET = sorted(row.name for row in COMMANDS.values() if row.not_in_a_fleet)
TO = {"convert": ["--to", "safetensors"]}


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def words(verb: str, *places: str) -> list[str]:
    options = [word.format(torch="b.pth") for word in line_of(verb).options]
    return [verb, "a.pth", *places, *options, *TO.get(verb, [])]


def jobs_that_write_elsewhere() -> Iterator[tuple[str, dict[str, Any]]]:
    for verb in WRITERS:
        for spelling in ([OUT], ["-o", OUT], [f"--output={OUT}"], [f"-fo{OUT}"], ["--force", "-o", OUT]):
            yield f"{verb} {spelling[0][:5]}", job(words(verb, *spelling), OUT)
        for target in ("/nowhere/new.pth", "link/new.pth", "file-link.pth", "in/../../outside/new.pth",
                       "link/../new.pth", "s3://bucket/new.pth"):  # fmt: skip
            yield f"{verb} to {target[-18:]}", job(words(verb, "-o", target), target)
        yield f"{verb} declared here", job(words(verb, "-o", OUT), "new.pth")
        yield f"{verb} beside, unnamed", job(words(verb), None)
        yield f"{verb} unnamed, declared", job(words(verb), "new.pth")
        yield f"{verb} in a folder", job(words(verb, "--out-dir", "../outside"), "../outside/a.pth")
        yield f"{verb} spelt by a link", job(words(verb, "-o", "link/../x.pth"), "x.pth")
        yield f"{verb} an option as a name", job(words(verb, f"--output={OUT}"), f"--output={OUT}")
    for verb in ("strip-module", "to-cpu"):
        target = "../outside/precious.pth"
        yield f"{verb} in place elsewhere", job([verb, "-i", target], target, input=target)
        yield f"{verb} in place, undeclared", job([verb, "-i", "a.pth"], None)
        yield f"{verb} in place, of another", job([verb, "-i", "b.pth"], "a.pth")
    for name in ("inspect", "doctor"):
        yield f"{name} --html elsewhere", job([name, "a.pth", "--html", "../outside/page.html"], "../outside/page.html")
        yield f"{name} --html undeclared", job([name, "a.pth", "--html", "page.html", "--force"])
    yield "digest --manifest elsewhere", job(["digest", "a.pth", "--manifest", "../outside/m"], "../outside/m")
    yield "digest --manifest undeclared", job(["digest", "a.pth", "--manifest", "m"])
    yield "match --rules elsewhere", job(
        ["match", "a.pth", "o.pth", "--like", "b.pth", "--rules", "../outside/rules"], "o.pth"
    )
    yield "record elsewhere", job(["to-cpu", "a.pth", "-o", OUT, "--record"], OUT)


def jobs_that_are_others() -> Iterator[tuple[str, Any]]:
    yield "reads another", job(["strip-module", "b.pth", "o.pth"], "o.pth")
    yield "reads two", job(["convert", "a.pth", "-o", "o.pth", "b.pth"], "o.pth")
    yield "reads a pattern", job(["doctor", "*.pth"], input="*.pth")
    yield "reads a folder", job(["doctor", "-r", "."], input=".")
    yield "reads a stream", job(["inspect", "-"], input="-")
    yield "help", job(["to-cpu", "--help"])
    yield "version", job(["--version"])
    yield "nothing", job([""])
    yield "import", job(["doctor", "a.pth", "--like", "evil_module:m", "--allow-import"])
    for verb in ("match", "repair", "fix"):
        yield f"{verb} import", job([verb, "a.pth", "o.pth", "--like", "evil_module:m", "--allow-import"], "o.pth")
    for verb in NOT_IN_A_FLEET:
        yield f"verb {verb}", job([verb, "a.pth"])
    yield "undo in place", job(["undo", "a.pth"], "a.pth")
    right = ["to-cpu", "a.pth", "o.pth"]
    bad: dict[str, tuple[Any, ...]] = {
        "bytes": (-5, 10**400, 1.5, True, "5", "\u00b2", None, [], 1 << 63),
        "identity": ([], "x", {"size": -1}, {"size": "x"}, {"size": 10**400}, {"size": 1.0}, {"mtime_ns": []},
                     {"etag": 5}, {"size": True}, {"more": 1}),
        "output": (5, [], "o\0.pth"), "input": (5, None, "a\0.pth"), "argv": ([], "x", ["to-cpu", "a\0.pth"], [1], {}),
    }  # fmt: skip
    for name, values in bad.items():
        for value in values:
            yield f"{name} {ascii(value)[:12]}", {**job(right, "o.pth"), name: value}
    yield "infinite", json.dumps(job(right, "o.pth")).replace('"bytes": 1', '"bytes": 1e999')
    yield "digits", json.dumps(job(right, "o.pth")).replace('"bytes": 1', f'"bytes": {"9" * 5000}')
    yield "deep", "[" * 100_000


HOSTILE = [*jobs_that_write_elsewhere(), *jobs_that_are_others()]


@pytest.mark.slow
def test_what_a_stranger_writes_is_refused_with_its_line(work: Path) -> None:
    """Before any job begins: the right one in front of it has no record."""
    assert len(HOSTILE) > 200
    seen = names(work)
    for name, row in HOSTILE:
        plan = write(row)
        for call in (["fleet", "run", str(plan), "--dry-run"], ["fleet", "run", str(plan), "--jobs", "1"]):
            outcome = run_command(tuple(call))
            assert not outcome.failure, (name, outcome.failure)
            assert outcome.code == 2 and "plan.jsonl: line 2: " in outcome.stderr, (name, outcome)
            assert "bug in ckptfix" not in outcome.stderr and len(outcome.stderr) < 2000, (name, outcome.stderr)
        assert not [*Path("plan.jsonl.d").rglob("*.json")], name
        assert names(work) - seen <= {"plan.jsonl", "plan.jsonl.d"}, name


def test_what_is_right_is_done(work: Path) -> None:
    jobs = [
        job(["to-cpu", "a.pth", "o1.pth"], "o1.pth"), job(["to-cpu", "a.pth", "-o", "./o2.pth"], "o2.pth"),
        job(["to-cpu", "./a.pth", "--output=o3.pth"], "o3.pth"), job(["doctor", "a.pth", "--like", "b.pth"]),
        job(["inspect", "a.pth", "--html", "p.html"], "p.html"), job(["digest", "a.pth", "--manifest", "m"], "m"),
        job(["strip-module", "-i", "b.pth"], "b.pth", input="b.pth"), job(["to-cpu", "a.pth", "-n", "o4.pth"]),
        job(["match", "a.pth", "--like", "a.pth", "--rules", "r.txt"], "r.txt"),
        job(["to-cpu", "a.pth", str(work / "in/o5.pth")], str(work / "in/o5.pth")),
    ]  # fmt: skip
    report = in_threads(write(*jobs))
    assert (report.done, report.failed) == (len(jobs) + 1, 0), [cause.as_dict() for cause in report.by_cause]
    assert {"o1.pth", "o2.pth", "o3.pth", "p.html", "m", "r.txt"} <= names(work)


@pytest.mark.slow
def test_the_command_line_of_the_run_allows_more(work: Path, tmp_path: Path) -> None:
    """And the hint of the refusal, run as printed, is that command line."""
    (tmp_path / "more").mkdir()
    plan = write(job(["to-cpu", "a.pth", "../more/o.pth"], "../more/o.pth"))
    with pytest.raises(Refused) as caught:
        in_threads(plan)
    assert caught.value.hint is not None
    line = caught.value.hint.split("`")[1]
    done = run_command(tuple(line.split()[1:]))
    assert done.code == 0 and (tmp_path / "more/o.pth").exists(), done
    marker = tmp_path / "more/CALLED"
    Path("mine_module.py").write_text(EVIL.format(marker=str(marker)).replace("return None", "raise ValueError('x')"))
    plan = write(job(["doctor", "a.pth", "--like", "mine_module:m"]), name="imports.jsonl")
    in_threads(plan)
    assert not marker.exists()
    in_threads(plan, allow_import=True)
    assert marker.exists()


def test_a_link_that_comes_after_the_plan_was_read_leads_nowhere(work: Path, tmp_path: Path) -> None:
    plan = write(job(["to-cpu", "a.pth", "later/o.pth"], "later/o.pth"))

    class Linking:
        def submit(self, call: Any, task: Any) -> Any:
            if not Path("later").is_symlink():
                Path("later").symlink_to(tmp_path / "outside")

            class Done:
                def done(self) -> bool:
                    return True

                def result(self) -> Any:
                    return call(task)

            return Done()

    with pytest.raises(Refused, match="outside the folder of the plan"):
        fleet.run(str(plan), executor=Linking())


@pytest.mark.parametrize("place", ["plan.jsonl.d", "plan.jsonl.d/jobs", "plan.jsonl.d/jobs/{}", "record", "begun"])
def test_records_are_written_nowhere_else(work: Path, tmp_path: Path, place: str) -> None:
    """A folder of records comes with a stranger's plan."""
    plan = write(job(["to-cpu", "a.pth", "o.pth"], "o.pth"))
    keys = [row.key for row in _jobs(plan)]
    path = Path(place.format(keys[0][:2]))
    if place in ("record", "begun"):
        suffix = {"record": ".json", "begun": ".begun"}[place]
        path = Path(f"plan.jsonl.d/jobs/{keys[0][:2]}/{keys[0][2:]}{suffix}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(tmp_path / "outside" / ("precious.pth" if place in ("record", "begun") else "."))
    if place in ("record", "begun"):
        assert in_threads(plan).done == 2
    else:
        with pytest.raises(Refused, match="leads out of the folder"):
            in_threads(plan)


RECORDED = ("exit_code", "bytes", "seconds", "argv", "input", "digest", "output_identity", "run")


@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize("value", [-1, 10**400, "x", None, [], {"a": 1}, 1e999])
def test_records_that_no_run_has_written(work: Path, name: str, value: Any) -> None:
    plan = write()
    in_threads(plan)
    (path,) = Path("plan.jsonl.d/jobs").glob("*/*.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    outcome = run_command(("fleet", "status", str(plan), "--json"))
    assert not outcome.failure and outcome.code in (0, 1), outcome
    report = in_threads(plan)
    assert report.failed == 0 and json.dumps(report.as_dict(), allow_nan=False)


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", RECORDED)
def test_processes_go_on_with_records_that_no_run_has_written(work: Path, name: str) -> None:
    plan = write()
    in_threads(plan)
    (path,) = Path("plan.jsonl.d/jobs").glob("*/*.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), name: {"a": 1}}))
    outcome = run_command(("fleet", "run", str(plan), "--jobs", "1", "--json"))
    assert not outcome.failure and outcome.code == 0, outcome


def _jobs(plan: Path) -> list[fleet.Job]:
    from ckptfix.fleet.plan_lines import parsed

    return [parsed(line, "plan", 1) for line in plan.read_text().splitlines()]


@pytest.mark.sampled(quick=4)
@pytest.mark.parametrize("where", ["here", "above", "elsewhere", "pipe"])
@pytest.mark.parametrize("out", [["--out-dir", "out"], ["--out-dir", "../more/a b"], ["-o", "{parent}/x-{name}"]])
def test_a_plan_says_which_roots_it_needs(
    work: Path, tmp_path: Path, program: Forks, where: str, out: list[str]
) -> None:
    """The line that `fleet plan` prints is accepted as printed, and runs; where it prints none, the plain one does."""
    (tmp_path / "plans").mkdir()
    place = {"here": "p.jsonl", "above": "../p.jsonl", "elsewhere": "../plans/p.jsonl", "pipe": "plan.jsonl"}[where]
    words = ["fleet", "plan", "a.pth", "b.pth", "--", "to-cpu", *out]
    if where == "pipe":
        read, write_end = os.pipe()
        done = program(MAIN, words, stdout=write_end)
        os.close(write_end)
        with open(read) as file:
            Path(place).write_text(file.read())
    else:
        with open(place, "w") as file:
            done = program(MAIN, words, stdout=file.fileno())
    assert done.code == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "outside the folder of the plan" in line]
    line = f"ckptfix fleet run {place}"
    if said:
        line = said[0].partition(": ")[2]
        if where == "pipe":
            line = f"ckptfix fleet run {place} --root {line.partition('--root ')[2]}"
    words = shlex.split(line)[1:]
    assert run_command((*words, "--dry-run")).code == 0, line
    if where == "elsewhere":
        assert run_command((*words, "--jobs", "1")).code == 0, line


def test_what_a_plan_cannot_ask_for_is_refused_when_it_is_made(work: Path) -> None:
    for words in (["doctor", "--like", "evil_module:m", "--allow-import"], ["undo"],
                  ["match", "--like", "b.pth", "-o", "{stem}.o", "--rules", "{stem}.r"]):  # fmt: skip
        done = run_command(("fleet", "plan", "a.pth", "--", *words))
        assert (done.code, done.stdout) == (2, ""), words


def test_no_word_of_a_job_is_another_when_it_is_checked(work: Path) -> None:
    """A name of the job that is spelt as an option, or as a value of one, is checked as it is done."""
    Path("zip").write_bytes(safetensors([("module.a", "F32", [4], bytes(16))]))
    plan = write(job(["convert", "zip", "o.pth", "--to", "zip"], "o.pth", input="zip"))
    assert in_threads(plan).failed == 0
    assert Path("o.pth").exists()
