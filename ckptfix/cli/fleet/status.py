"""ckptfix fleet status."""

from __future__ import annotations

import click

from ckptfix.cli.fleet.shown import shard_option, show
from ckptfix.cli.shared.common import FileName, reads
from ckptfix.cli.shared.console import Console
from ckptfix.fleet.states import PlanLine, PlanShard

STATES = ("done", "failed", "left", "changed")


@reads(
    "status",
    click.Argument(["plan"], metavar="PLAN", type=FileName()),
    shard_option(),
    click.Option(
        ["--list", "listed"], metavar="WHICH",
        help="Print only the input names, one per line, of jobs that are done, failed, left or changed, or of a cause.",
    ),
    examples=("ckptfix fleet status plan.jsonl",),
)  # fmt: skip
def status(console: Console, *, plan: str, shard: PlanShard | None, listed: str | None) -> int:
    """Show which jobs of PLAN are done, failed or left.

    It also shows why jobs failed, and which jobs changed since they were done. Only the records and the files' stat
    data are read. The output of --list is an input list for `fleet plan -`.
    """
    from ckptfix.fleet.run import status as find

    def say(line: PlanLine) -> None:
        cause = None if line.record is None or line.state not in ("done", "failed") else line.record["cause"]
        if listed in (line.state, cause):
            found.append(line.job.input)

    found: list[str] = []
    report = find(plan, shard=shard, each=None if listed is None else say)
    if listed is not None and listed not in STATES and not found:
        known = [*STATES, *(one.cause for one in report.by_cause)]
        raise click.UsageError(f"--list {listed!r}: choose one of {', '.join(known)}.")
    if console.json:
        console.emit({"plan": plan, **report.as_dict(), "inputs": None if listed is None else found}, 0)
    elif listed is not None:
        for name in found:
            # A newline in a name would split it into two lines.
            console.say(name if name.isprintable() else _quoted(name))
    else:
        show(console, plan, report)
    return 0


def _quoted(name: str) -> str:
    import json

    return json.dumps(name)
