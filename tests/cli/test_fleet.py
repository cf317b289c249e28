"""ckptfix fleet: what is planned and refused, done and resumed, and what is said of it."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import builders
import pytest
from cli.conftest import Cli, state, wrapped
from click.testing import CliRunner
from holding import holding
from stores import Bucket

from ckptfix import fleet
from ckptfix.cli import commands
from ckptfix.command_table import COMMANDS
from ckptfix.errors import CkptfixError, Refused
from ckptfix.fleet import PlanShard
from ckptfix.fleet.locks import locked
from ckptfix.fleet.plan_lines import parsed
from ckptfix.fleet.records import PlanRecords
from ckptfix.fleet.states import shard_of, survey
from ckptfix.io.source import open_source

Fleet = Callable[..., Path]

NOT_IN_A_FLEET = [row.name for row in COMMANDS.values() if row.not_in_a_fleet]


def written(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return Path(builders.written(path, content))


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Six checkpoints below ``in``, one of them cut off, in a folder that is the current one."""
    monkeypatch.chdir(tmp_path)
    for number in range(5):
        written(tmp_path / "in" / f"{number}.pth", wrapped())
    written(tmp_path / "in" / "cut.pth", wrapped()[:900])
    return tmp_path


@pytest.fixture
def planned(cli: Cli, inputs: Path) -> Fleet:
    """Writes plan.jsonl, as the words after ``fleet plan`` say."""

    def write(*words: object) -> Path:
        done = cli("fleet", "plan", *words)
        assert done.exit_code == 0, done.stderr
        path = inputs / "plan.jsonl"
        path.write_text(done.stdout)
        return path

    return write


def rows(plan: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in plan.read_text().splitlines()]


def in_threads(plan: Path, **how: Any) -> fleet.FleetReport:
    with ThreadPoolExecutor(2) as executor:
        return fleet.run(str(plan), executor=executor, **how)


def states(cli: Cli, plan: Path) -> tuple[int, ...]:
    found = json.loads(cli("fleet", "status", plan, "--json").stdout)
    return tuple(found[name] for name in ("done", "failed", "left", "changed"))


def test_a_plan_has_a_line_for_each_job(planned: Fleet, inputs: Path) -> None:
    plan = planned("in/*.pth", "--", "map-location", "--out-dir", "out", "cuda:1")
    found = rows(plan)
    assert [row["input"] for row in found] == [f"in/{name}.pth" for name in (0, 1, 2, 3, 4, "cut")]
    first = (inputs / "in/0.pth").stat()
    assert found[0] == {
        "input": "in/0.pth",
        "identity": {"size": first.st_size, "mtime_ns": first.st_mtime_ns},
        "output": "out/0.pth",
        "bytes": first.st_size,
        "argv": ["map-location", "in/0.pth", "out/0.pth", "cuda:1"],
    }
    assert not (inputs / "out").exists()


@pytest.mark.parametrize(
    ("words", "outputs"),
    [
        (["to-cpu", "-o", "out/{stem}.cpu{suffix}"], ["out/0.cpu.pth", "out/1.cpu.pth"]),
        (["to-cpu", "out/{parent}/{name}"], ["out/in/0.pth", "out/in/1.pth"]),
        (["convert", "--output=out/{stem}", "--to", "hf"], ["out/0", "out/1"]),
        (["convert", "--to", "safetensors", "--out-dir=out"], ["out/0.safetensors", "out/1.safetensors"]),
        (["rename", "out/{stem}.pth", "--sub", r"x{2}=\1"], ["out/0.pth", "out/1.pth"]),
        (["to-cpu", "--in-place"], ["in/0.pth", "in/1.pth"]),
        (["doctor", "--fast"], [None, None]),
        (["repair", "--check-only"], [None, None]),
        (["match", "--like", "in/2.pth", "--rules", "out/{stem}.txt"], ["out/0.txt", "out/1.txt"]),
    ],
)
def test_where_outputs_go(planned: Fleet, words: Sequence[str], outputs: Sequence[str | None]) -> None:
    found = rows(planned("in/0.pth", "in/1.pth", "--", *words))
    assert [row["output"] for row in found] == outputs
    for row in found:
        assert row["argv"][1] == row["input"]
        assert not any("{stem}" in word for word in row["argv"])


@pytest.mark.sampled(1_000)
@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["to-cup", "--out-dir", "out"], "No such command 'to-cup' for a fleet. Did you mean to-cpu?"),
        (["to-cpu", "--out-dir", "out", "--nonsense"], "No such option"),
        (["convert", "--out-dir", "out", "--to", "nonsense"], "nonsense"),
        (["map-location", "--out-dir", "out"], "Missing argument 'DEVICE"),
        (["to-cpu"], "Missing output"),
        (["to-cpu", "-o", "same.pth"], "would both write it"),
        (["to-cpu", "-o", "in/1.pth"], "but is an input"),
        (["to-cpu", "-o", "{parent}/1.pth"], "but is an input"),
        (["to-cpu", "-o", "{parent}/{name}"], "the output is the input"),
        (["to-cpu", "-o", "{name}", "--out-dir", "out"], "given twice"),
        (["to-cpu", "--out-dir", "out", "--jobs", "3"], "fleet run"),
        (["to-cpu", "--out-dir", "out", "in/2.pth"], "Unexpected argument"),
        (["doctor", "in/2.pth"], "name the inputs before --"),
        (["doctor", "--error", "-"], "stream"),
        (["stats", "--out-dir", "out"], "No such option"),
        ([], "Missing command"),
        *(([name], f"{name} cannot run in a fleet") for name in NOT_IN_A_FLEET),
    ],
)
def test_what_cannot_be_planned_is_refused(cli: Cli, inputs: Path, words: Sequence[str], why: str) -> None:
    done = cli("fleet", "plan", "in/0.pth", "in/1.pth", "--", *words)
    assert (done.exit_code, done.stdout) == (2, "")
    assert why in " ".join(done.stderr.split())


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in NOT_IN_A_FLEET])
def test_every_other_command_is_one_for_a_fleet(cli: Cli, inputs: Path, name: str) -> None:
    done = cli("fleet", "plan", "in/0.pth", "--", name, "--nonsense")
    assert "No such option" in done.stderr


def test_lists(cli: Cli, planned: Fleet, inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["in/0.pth", "in/1.pth", "in/0.pth", "", "# a comment", '{"path": "in/2.pth"}', '"in/3.pth"', "in/none.pth"]
    (inputs / "list.txt").write_text("\n".join(names))
    found = rows(planned("list.txt", "--", "doctor"))
    assert [row["input"] for row in found] == [f"in/{name}.pth" for name in (0, 1, 2, 3, "none")]
    assert found[-1]["identity"] is None
    words = ["fleet", "plan", "-", "--", "doctor"]
    done = CliRunner().invoke(commands, words, input="in/a\nb.pth\0in/-x.pth\0-y.pth\0")
    assert [json.loads(line)["input"] for line in done.stdout.splitlines()] == ["in/a\nb.pth", "in/-x.pth", "-y.pth"]
    assert json.loads(done.stdout.splitlines()[-1])["argv"] == ["doctor", "./-y.pth"]
    assert cli("fleet", "plan", "none.txt", "--", "doctor").exit_code == 2
    (inputs / "empty.txt").write_text("\n")
    assert "nothing to plan" in cli("fleet", "plan", "empty.txt", "--", "doctor").stderr


def test_folders_keep_their_folders(planned: Fleet, inputs: Path) -> None:
    for name in ("a", "b"):
        written(inputs / "runs" / name / "model.pth", wrapped())
    found = rows(planned("-r", "runs", "--out-dir", "out", "--", "to-cpu"))
    assert [row["output"] for row in found] == ["out/a/model.pth", "out/b/model.pth"]
    assert rows(planned("runs", "--", "to-cpu", "--out-dir", "out", "-r")) == found


@pytest.mark.slow
def test_a_plan_is_done_and_the_same_again_does_nothing(cli: Cli, planned: Fleet, inputs: Path) -> None:
    plan = planned("in/*.pth", "--", "to-cpu", "--out-dir", "out")
    done = cli("fleet", "run", plan, "--jobs", "2", "--json")
    assert done.exit_code == 2, done.stderr
    *lines, total = [json.loads(line) for line in done.stdout.splitlines()]
    assert (total["jobs"], total["done"], total["failed"], total["left"]) == (6, 5, 1, 0)
    assert total["causes"][0] == {
        "cause": "Truncated",
        "exit_code": 2,
        "count": 1,
        "example": "in/cut.pth",
        "message": "no zip directory at the end: the file was cut short while it was written or copied",
        "fix": "ckptfix repair in/cut.pth OUT",
    }
    for line in lines:
        if line["state"] == "done":
            content = Path(line["output"]).read_bytes()
            assert line["digest"] == f"sha256:{hashlib.sha256(content).hexdigest()}"
    before = {path: path.stat() for path in (inputs / "out").iterdir()}
    assert sorted(path.name for path in before) == [f"{number}.pth" for number in range(5)]
    assert states(cli, plan) == (5, 1, 0, 0)
    again = in_threads(plan)
    assert (again.done, again.before, again.failed, again.exit_code) == (5, 5, 1, 2)
    assert {path: path.stat() for path in (inputs / "out").iterdir()} == before


def test_only_what_changed_is_done_again(cli: Cli, planned: Fleet, inputs: Path) -> None:
    plan = planned("in/*.pth", "--", "to-cpu", "--out-dir", "out")
    in_threads(plan)
    outputs = [inputs / f"out/{number}.pth" for number in range(5)]
    first = [path.stat().st_mtime_ns for path in outputs]
    written(inputs / "in/0.pth", wrapped(location="cuda:7"))
    outputs[1].unlink()
    written(outputs[2], wrapped("other."))
    written(inputs / "in/cut.pth", wrapped())
    assert states(cli, plan) == (2, 1, 0, 3)
    report = in_threads(plan)
    assert (report.done, report.before, report.failed) == (6, 2, 0)
    now = [path.stat().st_mtime_ns for path in outputs]
    assert [one == other for one, other in zip(first, now, strict=True)] == [False, False, False, True, True]
    # What another program wrote is kept.
    assert (inputs / "out/2.pth.~1~").read_bytes() == wrapped("other.")
    assert not (inputs / "out/0.pth.~1~").exists()
    # A longer list, in another order, and other words for all.
    written(inputs / "in/00.pth", wrapped())
    plan = planned("in/cut.pth", "in/00.pth", "in/4.pth", "in/0.pth", "--", "to-cpu", "--out-dir", "out")
    assert states(cli, plan) == (3, 0, 1, 0)
    plan = planned("in/4.pth", "in/0.pth", "--", "strip-module", "--out-dir", "out")
    assert states(cli, plan) == (0, 0, 0, 2)
    assert in_threads(plan).done == 2


def test_an_output_of_others_is_not_replaced(cli: Cli, planned: Fleet, inputs: Path) -> None:
    other = written(inputs / "out/0.pth", wrapped("other."))
    plan = planned("in/0.pth", "in/1.pth", "--", "to-cpu", "--out-dir", "out")
    for _ in range(2):
        report = in_threads(plan)
        assert (report.done, report.failed, [one.cause for one in report.by_cause]) == (1, 1, ["WouldOverwrite"])
        assert other.read_bytes() == wrapped("other.")
    forced = planned("in/0.pth", "in/1.pth", "--", "to-cpu", "--out-dir", "out", "--force")
    assert in_threads(forced).done == 2
    assert other.read_bytes() != wrapped("other.") and not (inputs / "out/0.pth.~1~").exists()


def test_a_job_that_was_killed_is_done_again(planned: Fleet, inputs: Path) -> None:
    """Between its output and its record, and while it wrote: what it left goes, and nothing is kept of it."""
    plan = planned("in/0.pth", "in/1.pth", "--", "to-cpu", "--out-dir", "out")
    in_threads(plan)
    for path in (inputs / "plan.jsonl.d/jobs").glob("*/*.json"):
        path.with_suffix(".begun").write_text('{"run": "earlier", "tries": 3}')
        path.unlink()
    temp = written(inputs / f"out/.0.pth.{'a' * 16}.ckptfix-tmp", b"half")
    others = written(inputs / f"out/.00.pth.{'a' * 16}.ckptfix-tmp", b"of another")
    report = in_threads(plan)
    assert (report.done, report.failed) == (2, 0)
    assert not temp.exists() and others.exists()
    assert sorted(path.name for path in (inputs / "out").glob("[0-9]*")) == ["0.pth", "1.pth"]
    assert not [*(inputs / "plan.jsonl.d/jobs").glob("*/*.begun")]


def test_edits_in_place(cli: Cli, planned: Fleet, inputs: Path) -> None:
    plan = planned("in/0.pth", "in/1.pth", "--", "to-cpu", "--in-place")
    assert in_threads(plan).done == 2
    after = (inputs / "in/0.pth").stat()
    assert states(cli, plan) == (2, 0, 0, 0)
    assert in_threads(plan).before == 2
    assert (inputs / "in/0.pth").stat() == after


def test_what_is_found_is_a_result(cli: Cli, planned: Fleet, inputs: Path) -> None:
    plan = planned("in/*.pth", "--", "doctor")
    report = in_threads(plan)
    assert (report.done, report.failed, report.exit_code, report.codes) == (6, 0, 1, {0: 5, 1: 1})
    found = {one.cause: (one.exit_code, one.count, one.fix) for one in report.by_cause}
    assert found["truncated"][:2] == (1, 1)
    assert "repair refuses this one" in str(found["truncated"][2]), "no tensor of the file is intact"
    said = cli("fleet", "status", plan)
    assert said.exit_code == 0
    assert said.stdout.startswith("6 jobs, ")
    assert "repair refuses this one" in said.stdout
    assert cli("fleet", "status", plan, "--list", "truncated").stdout == "in/cut.pth\n"
    assert cli("fleet", "status", plan, "--list", "nothing").exit_code == 2
    os.utime(inputs / "in/3.pth", ns=(5, 5))
    assert cli("fleet", "status", plan, "--list", "changed").stdout == "in/3.pth\n"


def test_dry_run_says_what_would_be_done(cli: Cli, planned: Fleet, inputs: Path) -> None:
    plan = planned("in/0.pth", "in/1.pth", "--", "to-cpu", "--out-dir", "out")
    in_threads(plan)
    (inputs / "out/1.pth").unlink()
    done = cli("fleet", "run", plan, "--dry-run")
    assert done.exit_code == 0
    assert "changed: ckptfix to-cpu in/1.pth out/1.pth\n" in done.stdout
    assert "in/0.pth" not in done.stdout
    assert not (inputs / "out/1.pth").exists()


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_shards_are_the_whole(planned: Fleet, inputs: Path, count: int) -> None:
    plan = planned("in/*.pth", "--", "doctor", "--fast")
    parts = [in_threads(plan, shard=PlanShard(index, count)) for index in range(count)]
    assert sum(part.jobs for part in parts) == 6
    assert sum(part.before for part in parts) == 0
    assert max(part.jobs for part in parts) - min(part.jobs for part in parts) <= 1
    assert in_threads(plan).before == 6


@pytest.mark.parametrize(
    ("environment", "shard"),
    [
        ({"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "4"}, PlanShard(3, 4)),
        ({"SLURM_ARRAY_TASK_ID": "4", "SLURM_ARRAY_TASK_COUNT": "4", "SLURM_ARRAY_TASK_MIN": "1"}, PlanShard(3, 4)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, PlanShard(1, 2)),
        ({"RANK": "2", "WORLD_SIZE": "2"}, None),
        ({}, None),
    ],
)
def test_a_shard_that_the_environment_says(environment: dict[str, str], shard: PlanShard | None) -> None:
    assert shard_of(environment) == shard


@pytest.mark.parametrize(
    ("text", "why"), [("2/2", "counts from 0"), ("x", "I/N"), ("-1/2", "I/N"), ("auto", "which are not set")]
)
def test_shards_that_are_none(
    cli: Cli, planned: Fleet, monkeypatch: pytest.MonkeyPatch, text: str, why: str
) -> None:
    for name in ("SLURM_ARRAY_TASK_ID", "RANK"):
        monkeypatch.delenv(name, raising=False)
    done = cli("fleet", "run", planned("in/0.pth", "--", "doctor"), f"--shard={text}")
    assert done.exit_code == 2
    assert why in done.stderr


def test_a_rank_of_torchrun_takes_its_shard(
    cli: Cli, planned: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned("in/*.pth", "--", "doctor", "--fast")
    said = []
    for rank in range(2):
        for name, value in {
            "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"
        }.items():  # fmt: skip
            monkeypatch.setenv(name, value)
        said += cli("fleet", "run", plan, "--dry-run").stdout.splitlines()[:-1]
    assert len(said) == len(set(said)) == 6


def test_a_plan_is_run_once_at_a_time(tmp_path: Path) -> None:
    plan, folder = str(tmp_path / "plan"), str(tmp_path / "plan.d")
    with locked(folder, plan, None) as alone:
        assert alone
        for shard in (None, PlanShard(0, 2)):
            with pytest.raises(Refused, match="is running"), locked(folder, plan, shard):
                pass
    with locked(folder, plan, PlanShard(0, 2)) as alone, locked(folder, plan, PlanShard(1, 2)):
        assert not alone
        for shard in (None, PlanShard(0, 2), PlanShard(1, 3)):
            with pytest.raises(Refused, match="is running"), locked(folder, plan, shard):
                pass
    with locked(folder, plan, PlanShard(1, 3)):
        pass


@pytest.mark.parametrize(
    "line", ["nothing", "[1]", '{"input": 1}', '{"input": "a", "argv": []}', '{"input": "a", "argv": [1]}', "{" * 9999]
)
def test_lines_that_are_no_plan(cli: Cli, tmp_path: Path, line: str) -> None:
    plan = written(tmp_path / "plan.jsonl", line.encode())
    done = cli("fleet", "run", plan)
    assert done.exit_code == 2
    assert "line 1" in done.stderr
    assert cli("fleet", "status", tmp_path / "none").exit_code == 2


def test_a_plan_that_was_changed_by_hand(cli: Cli, planned: Fleet, inputs: Path) -> None:
    plan = planned("in/0.pth", "--", "to-cpu", "--out-dir", "out")
    line = plan.read_text()
    plan.write_text(line + line)
    assert "planned twice" in cli("fleet", "run", plan).stderr
    plan.write_text(line.replace('"to-cpu"', '"fleet"', 1) + line.replace("out/0.pth", "out/1.pth").replace(
        '"to-cpu"', '"to-cpu", "--nonsense"'))  # fmt: skip
    with pytest.raises(Refused, match=r"line 1.*fleet cannot run in a fleet"):
        in_threads(plan)
    plan.write_text(plan.read_text().splitlines()[1])
    with pytest.raises(Refused, match=r"line 1.*No such option"):
        in_threads(plan)


class Later:
    """An executor that is no Executor: what it returns is asked whether it is done."""

    def __init__(self, failures: int) -> None:
        self.failures = failures

    def submit(self, call: Callable[[Any], Any], task: Any) -> Any:
        executor, asked = self, itertools.count()

        class Asked:
            def done(self) -> bool:
                return next(asked) > 2

            def result(self) -> Any:
                if executor.failures:
                    executor.failures -= 1
                    raise ConnectionError("the worker is gone")
                return call(task)

        return Asked()


@pytest.mark.parametrize(("failures", "failed"), [(0, 0), (2, 0), (9, 3)])
def test_any_object_that_submits(planned: Fleet, failures: int, failed: int) -> None:
    plan = planned("in/0.pth", "in/1.pth", "in/2.pth", "--", "to-cpu", "--out-dir", "out")
    report = fleet.run(str(plan), executor=Later(failures))
    assert (report.failed, report.done) == (failed, 3 - failed)
    if failed:
        assert [one.cause for one in report.by_cause] == ["ChildProcessError"]
        assert fleet.run(str(plan), executor=Later(0)).exit_code == 0


def test_an_executor_that_breaks_is_said(planned: Fleet) -> None:
    from concurrent.futures import BrokenExecutor

    class Broken:
        def submit(self, call: object, task: object) -> Future[Any]:
            raise BrokenExecutor("gone")

    with pytest.raises(CkptfixError, match="the executor has broken"):
        fleet.run(str(planned("in/0.pth", "--", "doctor")), executor=Broken())


def test_plans_in_python(inputs: Path) -> None:
    jobs = [*fleet.plan(["in/0.pth", "in/1.pth"], ["to-cpu"], out_dir="out")]
    assert all(isinstance(job, fleet.Job) for job in jobs)
    assert parsed(jobs[0].line(), "plan", 1) == jobs[0]
    plan = inputs / "plan.jsonl"
    plan.write_text("".join(job.line() for job in jobs))
    assert in_threads(plan).exit_code == 0
    assert fleet.status(str(plan)).done == 2


@pytest.mark.slow
@pytest.mark.xdist_group("stores")
def test_a_fleet_in_a_bucket(cli: Cli, planned: Fleet, bucket: Bucket) -> None:
    pytest.importorskip("botocore", reason="s3fs or boto3 is not installed")
    for number in range(3):
        bucket.put(f"in/{number % 2}/{number}.pth", wrapped())
    plan = planned("-r", bucket.url("in"), "--out-dir", bucket.url("out"), "--", "to-cpu")
    found = rows(plan)
    assert [row["output"] for row in found] == [bucket.url(f"out/{name}.pth") for name in ("0/0", "0/2", "1/1")]
    assert all(row["identity"].keys() == {"size", "etag"} for row in found)
    assert in_threads(plan, roots=[bucket.url("")]).done == 3
    assert states(cli, plan) == (3, 0, 0, 0)
    bucket.put("in/0/0.pth", wrapped(location="cuda:7"))
    assert states(cli, plan) == (2, 0, 0, 1)
    assert in_threads(plan, roots=[bucket.url("")]).before == 2
    plan = planned(bucket.url("in/**/*.pth"), "--", "convert", "-o", bucket.url("st/{stem}.safetensors"))
    assert [row["output"] for row in rows(plan)] == [bucket.url(f"st/{name}.safetensors") for name in (0, 2, 1)]
    assert in_threads(plan, roots=[bucket.url("")]).exit_code == 0
    assert len(bucket.below("st/")) == 3


@pytest.mark.slow
@pytest.mark.xdist_group("stores")
def test_an_output_that_its_store_refuses_is_named(planned: Fleet, bucket: Bucket) -> None:
    pytest.importorskip("botocore", reason="s3fs or boto3 is not installed")
    for number in range(3):
        bucket.put(f"in/{number}.pth", wrapped())
    plan = planned(bucket.url("in/*.pth"), "--out-dir", bucket.url("out"), "--", "strip-module")
    assert bucket.app is not None
    bucket.app.fault = lambda environ: (
        ("403 Forbidden", b"<Error><Code>AccessDenied</Code></Error>")
        if environ["REQUEST_METHOD"] in ("PUT", "POST") and environ["PATH_INFO"].endswith("/out/1.pth")
        else None
    )
    report = in_threads(plan, roots=[bucket.url("")])
    assert (report.done, report.failed, report.exit_code) == (2, 1, 2)
    (cause,) = report.by_cause
    assert (cause.cause, cause.example) == ("NotPermitted", bucket.url("in/1.pth"))
    assert (cause.message or "").startswith(f"{bucket.url('out/1.pth')}: the server answered 403")
    assert not bucket.uploads()
    bucket.app.fault = None
    report = in_threads(plan, roots=[bucket.url("")])
    assert (report.done, report.before, report.exit_code) == (3, 2, 0)


POISON = """
import os, signal, sys
sys.path[:0] = {path!r}
import ckptfix.cli.shared.command_lines as lines

known = lines.done

def done(job, *rest):
    if job.input.endswith("/1.pth"):
        os.kill(os.getpid(), signal.SIGKILL)
    return known(job, *rest)

lines.done = done
"""


@pytest.mark.slow
def test_a_job_that_kills_its_process_fails_and_the_others_go_on(
    planned: Fleet, inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processes import a module of their own, which kills the one that gets a certain input."""
    plan = planned("in/[0-4].pth", "--", "to-cpu", "--out-dir", "out")
    site = written(inputs / "site/sitecustomize.py", POISON.format(path=sys.path).encode())
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site.parent), *sys.path]))
    report = fleet.run(str(plan), jobs=2)
    assert (report.done, report.failed, report.left) == (4, 1, 0)
    (cause,) = report.by_cause
    assert (cause.example, cause.message) == ("in/1.pth", "the process that worked on it was killed 3 times")
    assert sorted(path.name for path in (inputs / "out").iterdir()) == ["0.pth", "2.pth", "3.pth", "4.pth"]


@pytest.mark.slow
def test_an_interrupted_run_goes_on(cli: Cli, planned: Fleet, inputs: Path) -> None:
    for number in range(60):
        written(inputs / f"many/{number}.pth", state(w=(float(number),)))
    plan = planned("many/*.pth", "--", "to-cpu", "--out-dir", "out")
    process = subprocess.Popen(
        [sys.executable, "-m", "ckptfix", "fleet", "run", str(plan), "--jobs", "2"],
        stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        env=holding(inputs / "site", "many", 10),
    )  # fmt: skip
    records = inputs / "plan.jsonl.d/jobs"
    while len([*records.glob("*/*.json")]) <= 5:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "run the same command to do the rest" in err
    done, failed, _, changed = states(cli, plan)
    assert failed == changed == 0 and 5 < done < 60
    assert not [path for path in (inputs / "out").iterdir() if path.name.startswith(".")]
    report = in_threads(plan)
    assert (report.done, report.before) == (60, done)
    assert {path.name for path in (inputs / "out").iterdir()} == {f"{number}.pth" for number in range(60)}


def test_people_see_files_bytes_and_failures() -> None:
    from ckptfix.cli.fleet.shown import Bar

    stream = io.StringIO()
    now = iter((0.0, 1.0))
    bar = Bar(stream, clock=lambda: next(now), columns=100)
    bar.report = fleet.FleetReport(jobs=2000, bytes=4_000_000, codes={0: 990, 2: 10}, done_bytes=2_000_000)
    bar(0, 4_000_000)
    bar(2_000_000, 4_000_000)
    assert stream.getvalue().strip() == "1,000 of 2,000 files  2.00 MB of 4.00 MB  2.00 MB/s  1 s left  10 failed"


@pytest.mark.slow
def test_an_array_of_tasks(planned: Fleet, inputs: Path) -> None:
    """submitit's local executor, whose tasks are processes."""
    pytest.importorskip("submitit")
    from ckptfix.fleet.arrays import run_array

    plan = planned("in/*.pth", "--", "to-cpu", "--out-dir", "out")
    in_threads(plan)
    (inputs / "out/3.pth").unlink()
    seen: list[fleet.FleetReport] = []
    report = run_array(str(plan), cluster="local", jobs=2, begin=seen.append)
    assert (report.done, report.before, report.failed, report.left) == (5, 4, 1, 0)
    # How often it is told in between depends on how long the tasks take.
    told = [(one.done, one.before, one.left) for one in seen]
    assert (told[0], told[-1]) == ((4, 4, 2), (5, 4, 0))
    assert all(before == 4 and 4 <= done <= 5 for done, before, _ in told)
    assert sorted(told, key=lambda row: -row[2]) == told


def test_what_only_an_earlier_run_tried_is_left(planned: Fleet, inputs: Path) -> None:
    """A task of an array may be lost before it comes to a job that failed before, or whose output changed since."""
    plan = planned("in/*.pth", "--", "to-cpu", "--out-dir", "out")
    in_threads(plan)
    (inputs / "out/3.pth").unlink()
    with open_source(str(plan)) as source:
        report = survey(source, PlanRecords(f"{plan}.d"), run="the present one").report
    assert (report.before, report.left, report.failed, report.changed) == (4, 2, 0, 0)


CANCELLED = """
import os, signal, sys, time
from ckptfix.fleet import arrays
from ckptfix.fleet.states import PlanShard
from ckptfix.fleet.run import tasks

signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as submitit does
os.mkdir(sys.argv[1] + ".d")
like = tasks(sys.argv[1] + ".d", 0.0)(b"")
def done(task):
    try:
        print("begun", flush=True)
        while True:
            time.sleep(0.05)  # and no pause(): a signal just before it would not end it
    finally:
        print("cleaned", flush=True)
arrays.do = done
arrays.do_share(arrays.Share(sys.argv[1], PlanShard(0, 1), like))
"""


@pytest.mark.slow
def test_a_task_that_is_cancelled_cleans_up_and_ends(planned: Fleet) -> None:
    plan = planned("in/*.pth", "--", "to-cpu", "--out-dir", "out")
    process = subprocess.Popen(
        [sys.executable, "-c", CANCELLED, str(plan)], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    process.terminate()
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (143, "cleaned\n")
