"""ckptfix fleet: one verb on thousands of checkpoints."""

from __future__ import annotations

import click

from ckptfix.cli.fleet.plan import plan
from ckptfix.cli.fleet.run import run
from ckptfix.cli.fleet.status import status


class Fleet(click.Group):
    """The group of the three commands, with an example below."""

    example = "ckptfix fleet run plan.jsonl"

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write(f"\nExample:\n  {self.example}\n")


command = Fleet(
    "fleet",
    commands=[plan, run, status],
    help="""Do one command on thousands of checkpoints: planned, resumed and reported.

    `plan` writes a plan, a job a line, to be looked at. `run` does what is not done of it, and may be stopped and
    started again at any time. `status` says what is done, failed and left.

    Records of what is done lie beside the plan, in PLAN.d: they belong to their inputs and outputs, so that a plan may
    be made anew from a longer list.
    """,
)
