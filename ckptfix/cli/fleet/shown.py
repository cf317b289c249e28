"""Display of a fleet: its progress, its results, and the commands that fix what failed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

from ckptfix.cli.shared.console import Console, is_terminal
from ckptfix.cli.shared.progress import Progress
from ckptfix.cli.shared.tables import duration, size, table
from ckptfix.commands import command, quoted
from ckptfix.errors import printable
from ckptfix.fleet.report import FleetReport
from ckptfix.fleet.states import PlanShard, shard_of
from ckptfix.numbers import whole_number
from ckptfix.runner.jobs import LOSSES, TROUBLE
from ckptfix.words import plural

CAUSES = 30
"""Causes shown on a terminal."""

MOST_SHARDS = 1_000_000
"""Maximum number of shards of a plan."""

WHAT = {0: "warning", 1: "finding", TROUBLE: "failed", LOSSES: "losses"}
"""Exit code of a job -> its word in the table."""


class ShardType(click.ParamType[PlanShard]):
    """``I/N``, or ``auto`` to read the shard from the environment of Slurm or torchrun."""

    name = "shard"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> PlanShard:
        if isinstance(value, PlanShard):
            return value
        text = str(value)
        if text == "auto":
            found = shard_of()
            if found is None:
                self.fail("auto needs SLURM_ARRAY_TASK_ID and _COUNT, or RANK and WORLD_SIZE, which are not set.")
            return found
        index, slash, count = text.partition("/")
        part, parts = whole_number(index), whole_number(count, most=MOST_SHARDS)
        if not slash or part is None or parts is None:
            self.fail(f"{text!r} is not I/N, such as 0/8, or auto.", param, ctx)
        if part >= parts:
            self.fail(f"{text}: I counts from 0, so the last of {parts} is {parts - 1}/{parts}.", param, ctx)
        return PlanShard(part, parts)


def shard_option() -> click.Option:
    """Make the option --shard I/N."""
    return click.Option(
        ["--shard"], metavar="I/N", type=ShardType(),
        help="Only part I of N of the plan, split by size; I counts from 0. auto: from the environment.",
    )  # fmt: skip


class Bar(Progress):
    """The progress line of a fleet: files, bytes, rate, failures."""

    report = FleetReport()

    def _line(self, done: int, total: int) -> str:
        report = self.report
        ended = report.done + report.failed
        parts = [f"{ended:,} of {plural(report.jobs, 'file')}", f"{size(done)} of {size(total)}"]
        (since, before), (now, _) = self._marks[0], self._marks[-1]
        if now > since and done > before:
            rate = (done - before) / (now - since)
            parts += [f"{size(rate)}/s", f"{duration((total - done) / rate)} left"]
        return "  ".join([*parts, *([f"{report.failed:,} failed"] if report.failed else [])])


@contextmanager
def progress(console: Console) -> Iterator[Callable[[FleetReport], None]]:
    """Yield a function that draws the progress on a terminal, and does nothing elsewhere."""
    if console.quiet or not is_terminal(sys.stderr):
        yield lambda report: None
        return
    bar = Bar(sys.stderr)

    def draw(report: FleetReport) -> None:
        bar.report = report
        bar(report.done_bytes, report.bytes)

    try:
        yield draw
    finally:
        bar.clear()


def counts(report: FleetReport, *, ran: bool = False) -> str:
    """Return the counts as a sentence; with `ran`, some finished jobs may be older than this run."""
    before = f" ({report.before:,} of them before)" if report.before and ran else ""
    parts = [f"{report.done:,} done{before}"]
    with_what = ((report.codes.get(1), "findings"), (report.losses, "losses"))
    parts += [f"{number:,} of them with {what}" for number, what in with_what if number]
    others = ((report.failed, "failed"), (report.changed, "changed since"), (report.left, "left"))
    parts += [f"{number:,} {what}" for number, what in others if number]
    return f"{plural(report.jobs, 'job')}, {size(report.bytes)}: {', '.join(parts)}."


def show(console: Console, plan: str, report: FleetReport, *, ran: bool = False) -> None:
    """Show the counts, the table of causes, and the fix for each cause; `ran` as in `counts`."""
    console.prose(counts(report, ran=ran))
    causes = report.by_cause
    if not causes:
        return
    shown = causes[: console.rows(None, CAUSES) or None]
    console.say()
    rows = [(WHAT.get(one.exit_code, str(one.exit_code)), one.cause, f"{one.count:,}", one.example) for one in shown]
    head = ("result", "cause", "files", "one of them")
    for line in table(rows, head, right=(2,), width=console.width, names=(head[3],)).splitlines():
        console.say(line)
    if len(causes) > len(shown):
        console.say(f"... {len(causes) - len(shown):,} more causes (a pipe gets all)")
    for one in shown:
        console.say()
        console.prose(f"{one.cause}: {printable(one.message or 'see the record')}")
        if one.fix:
            kind = "Fix" if one.fix.startswith("ckptfix ") else "hint"
            console.say(f"{kind}: {printable(one.fix)}", "fix", len(kind))
        if one.count > 1:
            console.say(f"All {one.count:,}: {command('fleet', 'status', list=one.cause)} {printable(quoted(plan))}")
