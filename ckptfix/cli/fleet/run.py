"""ckptfix fleet run."""

from __future__ import annotations

import os
from typing import Any

import click

from ckptfix.cli.fleet.shown import counts, progress, shard_option, show
from ckptfix.cli.shared.common import FileName, reads
from ckptfix.cli.shared.console import Console
from ckptfix.errors import printable
from ckptfix.fleet.report import FleetReport, JobSummary
from ckptfix.fleet.states import PlanLine, PlanShard
from ckptfix.numbers import whole_number
from ckptfix.platform import Stopped
from ckptfix.words import plural


def _setting(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if not equals:
        raise click.UsageError(f"--slurm needs NAME=VALUE, such as timeout_min=60, not {text!r}.")
    number = whole_number(value)
    return name, value if number is None else number


@reads(
    "run",
    click.Argument(["plan"], metavar="PLAN", type=FileName()),
    click.Option(
        ["--jobs"], metavar="N", type=click.IntRange(min=1),
        help="Work on N inputs at a time (default: one per processor). With Slurm: number of array tasks.",
    ),
    click.Option(
        ["--executor"], metavar="NAME", default="processes", show_default=True,
        help="Where the jobs run: processes, dask://HOST:PORT (needs distributed), slurm (needs submitit).",
    ),
    click.Option(
        ["--slurm"], metavar="NAME=VALUE", multiple=True,
        help="A parameter of submitit, such as timeout_min=60 or slurm_partition=cpu. Repeatable.",
    ),
    shard_option(),
    click.Option(
        ["--root", "roots"], metavar="DIR", multiple=True, type=FileName(),
        help="A folder or URL that may hold outputs, besides the folder of the plan. Repeatable.",
    ),
    click.Option(
        ["--allow-import"], is_flag=True,
        help="Allow jobs to import and call module:factory, which runs its code; a plan cannot ask for it.",
    ),
    click.Option(["-n", "--dry-run"], is_flag=True, help="Show what would be done, and do nothing."),
    examples=("ckptfix fleet run plan.jsonl --jobs 8",),
)  # fmt: skip
def run(
    console: Console,
    *,
    plan: str,
    jobs: int | None,
    executor: str,
    slurm: tuple[str, ...],
    shard: PlanShard | None,
    roots: tuple[str, ...],
    allow_import: bool,
    dry_run: bool,
) -> int:
    """Run the unfinished jobs of PLAN.

    These are jobs that are new, that failed, or whose input, output or command line changed. A failed job does not
    stop the others. Each finished job is recorded in PLAN.d at once, so the same command resumes where it was
    stopped. A job that kills its process is tried again, and given up after the third time.

    A plan is only data. If a job reads or writes files that its line does not name, or writes outside the folder of
    PLAN and of --root, the plan is refused before the first job begins.

    The exit code is 2 if a job failed, else 3 if one has losses, else 1 if one has findings, else 0; jobs of earlier
    runs count too. --json prints one line for each finished job, and one for the whole run.
    """
    if shard is None and executor == "processes":
        shard = _of_rank()
    if dry_run:
        return _planned(console, plan, shard, roots)
    kind, _, place = executor.partition(":")
    if kind not in ("processes", "dask", "slurm") or (kind == "processes" and place):
        raise click.UsageError(f"--executor {executor!r}: choose processes, dask://HOST:PORT or slurm.")
    if slurm and kind != "slurm":
        raise click.UsageError("--slurm needs --executor slurm.")
    if kind == "slurm" and shard is not None:
        raise click.UsageError("--shard does not go with --executor slurm, which makes its own shards.")
    report = FleetReport()
    try:
        with progress(console) as draw:

            def begin(found: FleetReport) -> None:
                nonlocal report
                report = found
                draw(found)

            def each(summary: JobSummary, now: FleetReport) -> None:
                if console.json:
                    console.emit(summary.as_dict(), summary.exit_code, line=True)
                draw(now)

            how: dict[str, Any] = {"begin": begin, "each": each, "roots": roots, "allow_import": allow_import}
            done = _done(console, plan, kind, place, jobs=jobs, slurm=slurm, shard=shard, **how)
    except Stopped:
        console.note(f"{report.done + report.failed:,} of {plural(report.jobs, 'job')} finished; run the same command "
            "to do the rest")  # fmt: skip
        raise
    if console.json:
        console.emit({"plan": plan, **done.as_dict(), "inputs": None}, done.exit_code, line=True)
    else:
        show(console, plan, done, ran=True)
    return done.exit_code


run.shares = True


def _of_rank() -> PlanShard | None:
    """Return the shard of this rank if torchrun or srun started several ranks."""
    if "WORLD_SIZE" not in os.environ and "CKPTFIX_RANKS" not in os.environ:
        return None
    from ckptfix.cli.shared.ranks import world

    here = world()
    return None if here is None else PlanShard(here.rank, here.size)


def _done(
    console: Console, plan: str, kind: str, place: str, *, jobs: int | None, slurm: tuple[str, ...], **how: Any
) -> FleetReport:
    if kind == "slurm":
        from ckptfix.fleet.arrays import run_array

        how.pop("shard")
        settings = dict(map(_setting, slurm))
        return run_array(plan, cluster=place.strip("/") or None, jobs=jobs, settings=settings, note=console.note, **how)
    from ckptfix.fleet.run import TRIES
    from ckptfix.fleet.run import run as carry_out

    if kind == "dask":
        from ckptfix.runner.engines import dask

        if not place.strip("/"):
            raise click.UsageError("--executor dask://HOST:PORT: name the address of the scheduler.")
        address = place.removeprefix("//")
        with dask(address, TRIES) as engine:
            return carry_out(plan, executor=engine, **how)
    return carry_out(plan, jobs=jobs, **how)


def _planned(console: Console, plan: str, shard: PlanShard | None, roots: tuple[str, ...]) -> int:
    """Show what a run would do."""
    from ckptfix.commands import command
    from ckptfix.fleet.bounds import bounds_of
    from ckptfix.fleet.run import status

    def say(line: PlanLine) -> None:
        if line.state == "done":
            return
        if console.json:
            job = line.job
            summary = JobSummary(job.input, job.output, 0, job.bytes, 0.0, argv=job.argv)
            console.emit({**summary.as_dict(), "state": line.state}, 0, line=True)
        else:
            verb, *words = line.job.argv
            console.say(f"{line.state}: {printable(command(verb, *words))}")

    report = status(plan, shard=shard, each=say, bounds=bounds_of(plan, roots))
    if console.json:
        console.emit({"plan": plan, **report.as_dict(), "inputs": None}, 0, line=True)
    else:
        console.prose(counts(report))
    return 0
