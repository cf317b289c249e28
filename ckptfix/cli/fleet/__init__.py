"""ckptfix fleet: one command on thousands of checkpoints."""

from __future__ import annotations

from ckptfix.cli.fleet.plan import plan
from ckptfix.cli.fleet.run import run
from ckptfix.cli.fleet.status import status
from ckptfix.cli.shared.help_text import GroupHelp
from ckptfix.command_table import COMMANDS


class Fleet(GroupHelp):
    """The command group of plan, run and status."""

    examples = COMMANDS["fleet"].all_examples


command = Fleet(
    "fleet",
    commands=[plan, run, status],
    help="""Run one command on thousands of checkpoints: planned, resumable and reported.

    `plan` writes a plan, one job per line, for you to review. `run` does the jobs that are not done yet; you can stop
    it and start it again at any time. `status` shows what is done, failed and left.

    Records of finished jobs are kept next to the plan, in PLAN.d. They belong to their inputs and outputs, so you can
    make the plan again from a longer list.
    """,
)
