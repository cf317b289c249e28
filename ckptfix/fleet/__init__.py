"""Fleets: one command on thousands of checkpoints, planned, resumed and reported.

A plan is a text file with one job per line. `run` does the jobs that are not done, and keeps a record of each beside
it::

    from ckptfix import fleet

    with open("plan.jsonl", "w") as file:
        file.writelines(job.line() for job in fleet.plan(["runs/**/*.pth"], ["to-cpu"], out_dir="cpu"))
    print(fleet.run("plan.jsonl", executor=MPIPoolExecutor()).exit_code)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from ckptfix.fleet.plan_lines import PlannedJob
from ckptfix.fleet.report import FleetReport as FleetReport
from ckptfix.fleet.report import JobSummary as JobSummary
from ckptfix.fleet.run import run as run
from ckptfix.fleet.run import status as status
from ckptfix.fleet.states import PlanShard as PlanShard
from ckptfix.hooks import Hook

Job = PlannedJob
"""The public name of a line of a plan."""


class _Jobs(Protocol):
    """The type of the function that parses a command line for many inputs."""

    def __call__(
        self, names: Sequence[str], words: Sequence[str], *, out_dir: str | None, recursive: bool
    ) -> Iterator[Job]: ...


_JOBS: Hook[_Jobs] = Hook("fleet.jobs")
"""A verb is a command of the command line, which is above this room."""


def plan(
    names: Sequence[str], words: Sequence[str], *, out_dir: str | None = None, recursive: bool = False
) -> Iterator[Job]:
    """Return the jobs for a command on many inputs, as ``ckptfix fleet plan NAMES -- WORDS`` writes them.

    Args:
        names: lists of names, patterns, folders, inputs.
        words: the command and its arguments, without inputs: ``["to-cpu", "-o", "out/{stem}.pth"]``.
        out_dir: the folder for the outputs, which keep the names of their inputs.
        recursive: search the folders.

    Raises:
        CkptfixError: a name matches nothing, or two outputs have the same name.
        click.UsageError: the words are not a command for a fleet.
    """
    return _JOBS.get()(names, words, out_dir=out_dir, recursive=recursive)
