"""Fleets: one verb on thousands of checkpoints, planned, resumed and reported.

A plan is a text file, a job a line. `run` does what is not done of it, and keeps a record of each job beside it::

    from ckptfix import fleet

    with open("plan.jsonl", "w") as file:
        file.writelines(job.line() for job in fleet.plan(["runs/**/*.pth"], ["to-cpu"], out_dir="cpu"))
    print(fleet.run("plan.jsonl", executor=MPIPoolExecutor()).exit_code)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module

from ckptfix.fleet.jobs import Job as Job
from ckptfix.fleet.report import Report as Report
from ckptfix.fleet.report import Summary as Summary
from ckptfix.fleet.run import run as run
from ckptfix.fleet.run import status as status
from ckptfix.fleet.states import Shard as Shard

PLANNING = "ckptfix.cli.shared.fleets"
"""What reads a command line, by name: a verb is what the command line calls so."""


def plan(
    names: Sequence[str], words: Sequence[str], *, out_dir: str | None = None, recursive: bool = False
) -> Iterator[Job]:
    """The jobs of doing a command on many inputs, as ``ckptfix fleet plan NAMES -- WORDS`` writes them.

    Args:
        names: lists of names, patterns, folders, inputs.
        words: the command and its arguments, without inputs: ``["to-cpu", "-o", "out/{stem}.pth"]``.
        out_dir: where the outputs go, under the names of their inputs.
        recursive: folders are searched.

    Raises:
        CkptfixError: a name stands for nothing, or two outputs have one name.
        click.UsageError: the words are none of a command for a fleet.
    """
    jobs: Iterator[Job] = import_module(PLANNING).jobs(names, words, out_dir=out_dir, recursive=recursive)
    return jobs
