"""The limits of the jobs of a plan: a plan is data, and may come from anybody.

A job reads its input, writes its output, and does nothing else. Outputs are in the folder of the plan, or in a folder
that the command line of the run names. Only that command line can allow imports of code.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from ckptfix.commands import quoted
from ckptfix.dataclass import dataclass
from ckptfix.errors import Refused
from ckptfix.fleet.plan_lines import PlannedJob
from ckptfix.hooks import Hook
from ckptfix.runner.jobs import Job
from ckptfix.urls import as_path, is_url, known, normal, real_path

JOB: Hook[Callable[[Sequence[str]], Job | str]] = Hook("fleet.job")
"""The function that parses a command line: its job, or a sentence on why it cannot run in a fleet."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The limits of the jobs of a plan.

    Attributes:
        plan: its name.
        roots: absolute paths of folders, and URLs, that can contain outputs; the first is the folder of the plan.
        allow_import: ``module:factory`` of a job is imported and called.
    """

    plan: str
    roots: tuple[str, ...]
    allow_import: bool = False

    def holds(self, name: str) -> bool:
        """Return whether `name` is in one of the roots; links are followed."""
        if is_url(name):
            return ".." not in name.split("/") and any(_below(str(as_path(name)), root) for root in self.roots)
        real = real_path(name)
        # The roots are resolved where the job is done, because links may differ between machines.
        return any(_below(real, real_path(root)) for root in self.roots)

    def check(self, planned: PlannedJob, where: str) -> Job:
        """Return the job of a line. Refuse one that does more than it declares, or more than it is allowed to.

        Raises:
            Refused: the job exceeds its limits; `where` is its place in the plan.
        """
        hint = "write a plan with `ckptfix fleet plan LIST -- VERB ARGS > plan.jsonl`"
        job = JOB.get()(planned.argv)
        if isinstance(job, str):
            raise Refused(f"not a job for a fleet: {job}", path=self.plan, where=where, hint=hint)
        if job.options.get("allow_import") and not self.allow_import:
            raise Refused(
                "the job asks to import code, which a plan cannot allow",
                path=self.plan,
                where=where,
                hint=f"if you trust that code, run `ckptfix fleet run {quoted(self.plan)} --allow-import`",
            )
        if job.input is None or _plain(job.input) != _plain(planned.input):
            what = "nothing" if job.input is None else job.input
            raise Refused(f"the job declares the input {planned.input}, but reads {what}", path=self.plan, where=where)
        written = [_plain(name) for name in job.outputs]
        said = [] if planned.output is None else [_plain(planned.output)]
        if written != said:
            does, says = (" and ".join(names) or "nothing" for names in (written, said))
            message = f"the job declares the output {says}, but writes {does}"
            raise Refused(message, path=self.plan, where=where, hint="a job can write only its output")
        # `normal` may map a name to the same text although it is a different file, if one of its folders is a link.
        for name in job.outputs:
            if self.holds(name):
                continue
            folder = str(as_path(name).parent)
            raise Refused(
                f"the job writes {name}, which is outside the folder of the plan",
                path=self.plan,
                where=where,
                hint=f"allow it: `ckptfix fleet run {quoted(self.plan)} {' '.join(_options((*self._given, folder)))}`",
            )
        return job

    def check_records(self, folder: str) -> None:
        """Refuse a folder of records with a link that leads elsewhere, because records are written there.

        Raises:
            Refused: a link leads elsewhere.
        """
        if is_url(folder):
            return
        jobs = Path(folder) / "jobs"
        inner = jobs.iterdir() if jobs.is_dir() else ()
        for path in (Path(folder), Path(folder) / "slurm", jobs, *inner):
            if path.is_symlink() and not self.holds(str(path)):
                raise Refused("is a link that leads out of the folder of the plan", path=str(path))

    @property
    def _given(self) -> tuple[str, ...]:
        return self.roots[1:]


def bounds_of(plan: str, roots: Iterable[str] = (), *, allow_import: bool = False) -> Bounds:
    """Return the bounds of a plan: its own folder, and `roots`."""
    own = str(as_path(_absolute(plan)).parent)
    return Bounds(plan, (own, *(_absolute(known(str(root))) for root in roots)), allow_import)


def _absolute(name: str) -> str:
    return str(as_path(name)) if is_url(name) else os.path.abspath(name)  # noqa: PTH100


def outside(plan: str, outputs: Iterable[str]) -> list[str]:
    """Return the folders that a run of `plan` needs as roots for these outputs; few rather than exact."""
    bounds = bounds_of(plan)
    folders: list[str] = []
    for folder in sorted({str(as_path(name).parent) for name in outputs if not bounds.holds(name)}, key=len):
        real = real_path(folder)
        if not any(_below(real, real_path(other)) for other in folders):
            folders.append(folder)
    return folders


def root_options(plan: str, outputs: Iterable[str]) -> str:
    """Return the options that `ckptfix fleet run` needs for these outputs; empty if it needs no options."""
    return " ".join(_options(outside(plan, outputs)))


def _options(roots: Iterable[str]) -> list[str]:
    return [f"--root {quoted(root)}" for root in dict.fromkeys(roots)]


def _below(name: str, root: str) -> bool:
    return name == root or name.startswith(root if root.endswith("/") else f"{root}/")


def _plain(name: str) -> str:
    """Return a name in the form that all equivalent spellings share."""
    return normal(known(name))
