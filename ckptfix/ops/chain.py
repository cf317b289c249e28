"""Commands one after another, each on the plan of the one before it: the bytes are copied once, at the end.

A planned file is read through its plan, as ranges of the input (`SplicedFile`), so the next command can be planned on
it. This ends at folders, and at checksums that are only known once the bytes have been written, because a later plan
would copy them as zeros. Then the plan so far is written to a folder beside the output, which is removed at the end.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

from ckptfix import formats
from ckptfix.checkpoint import Derived, FileVersion, OutputFile, Plan, RangeCheck, segment_length
from ckptfix.command_table import STEPS
from ckptfix.dataclass import dataclass
from ckptfix.errors import Refused, StrPath, UnknownFormat, about
from ckptfix.findings.row import Finding
from ckptfix.findings.steps import Invocation, Step
from ckptfix.findings.table import found
from ckptfix.formats.target import of_suffix, suits
from ckptfix.hooks import Hook
from ckptfix.io.output import TEMP_SUFFIX
from ckptfix.io.read import CHECKSUM
from ckptfix.io.source import found_as, mark, open_source
from ckptfix.io.sources import ranges
from ckptfix.io.virtual_files import SplicedFile, SplicedPiece
from ckptfix.ops.audit.promise import Account
from ckptfix.ops.naming import last_suffix
from ckptfix.ops.writing import LOSSES, Result, write_aside
from ckptfix.urls import Virtual, as_path, is_url, real_path

R = TypeVar("R", bound=Result)


@dataclass(frozen=True, slots=True)
class Done:
    """A command that was carried out: its words as a shell takes them, and its summary lines."""

    command: tuple[str, ...]
    lines: tuple[str, ...]

    def as_dict(self) -> dict[str, list[str]]:
        """Return the command as a JSON object."""
        return {"argv": list(self.command), "summary": list(self.lines)}


_DROPPING = "--drop-unexpected (drop_unexpected=True) leaves out what the model lacks"


def function_of(command: str) -> Callable[..., Result]:
    """Return the function of a command that writes, which the front of the package registers."""
    hook: Hook[Callable[..., Result]] = Hook(f"command.{command}")
    return hook.get()


class Chain:
    """The commands so far, and their result.

    Attributes:
        current: the input of the next command: the file, its planned successor, or an intermediate file.
        format: of the plan; None before the first command.
        findings, exit_code: of all commands.
        account: counts of kept and lost tensors; None before the first command.
        read: the file, or those of the folder, as they were before.
        refused: the errors of steps that were left out.
    """

    def __init__(self, path: str, dest: StrPath | None, *, dry_run: bool) -> None:
        self.current = path
        self.format: str | None = None
        self.findings: tuple[Finding, ...] = ()
        self.exit_code = 0
        self.account: Account | None = None
        self.read: tuple[FileVersion, ...] = ()
        self.refused: list[Refused] = []
        self._path = path
        self._steps: list[Done] = []
        self._done: set[tuple[object, ...]] = set()
        self._plan: Plan | None = None
        self._target = ""
        self._source = path
        self._checks: tuple[RangeCheck, ...] = ()
        self._holds: list[object] = []
        self._dry_run = dry_run
        self._dest = None if dest is None else os.fspath(dest)
        near = real_path(path if dest is None else dest)
        self._beside = None if is_url(near) else as_path(near).parent
        self._folder: str | None = None

    def __enter__(self) -> Chain:
        return self

    def __exit__(self, *error: object) -> None:
        if self._folder is not None:
            with suppress(OSError):
                shutil.rmtree(self._folder)

    @property
    def steps(self) -> tuple[Done, ...]:
        return tuple(self._steps)

    @property
    def suffix(self) -> str | None:
        """The suffix of the planned output, which may be empty; None for a folder."""
        if not self.is_one_file:
            return None
        return last_suffix(self._path, self._target or self._path)

    @property
    def is_one_file(self) -> bool:
        """True if the planned output, or the file if nothing is planned, is one file."""
        if self.format is None:
            return found_as(self._path) != "folder"
        return not formats.FORMATS[self.format].folder and not self.is_with_others

    @property
    def is_with_others(self) -> bool:
        """True if the planned output is a folder, because its one file of weights has others beside it."""
        plan = self._plan
        return plan is not None and len(plan.files) > 1 and not formats.FORMATS[self.format or ""].folder

    def carry_out(self, commands: Sequence[Invocation], spared: Collection[Step] = ()) -> bool:
        """Plan these commands, each on the result of the one before it; return whether any of them was new.

        Args:
            spared: steps that are left out where they refuse their input; others raise the error.
        """
        new = False
        last = next((one for one in reversed(commands) if one.step.command == "convert"), None)
        for one in commands:
            key = (one.step.command, one.step.options)
            if STEPS[one.step.command].chained is None or key in self._done:
                continue
            # The output gets the format of the last conversion; one before it only rewrites the file.
            if one is last and self._is_against_name(one):
                continue
            self._done.add(key)
            refusal = self._refusal(one.step, Virtual(one.dest)) if one.step in spared else None
            if refusal is not None:
                message = f"{one.step.command}: {refusal.message}"
                self.leave([found("refused", message)])
                self.refused.append(refusal)
                continue
            self._carry_out(one.step, Virtual(one.dest))
            new = True
        return new

    def leave(self, findings: Sequence[Finding]) -> None:
        """Record findings that no command of the chain is about; with an error among them, the result has losses."""
        self.findings += tuple(findings)
        if any(finding.severity == "error" for finding in findings):
            self.exit_code = LOSSES

    def _is_against_name(self, one: Invocation) -> bool:
        """Return whether this converts to a format that the output's name rules out, while the present one suits it."""
        if one.step.command != "convert" or self._dest is None:
            return False
        to = one.step.get("to")
        made = of_suffix(one.dest) if to is None else str(to)
        if made is None or suits(self._dest, made):
            return False
        return suits(self._dest, self.format or formats.detect(self._path).name)

    def _carry_out(self, step: Step, dest: Virtual) -> Result:
        words = (step.command, *step.words())
        return self.plan(words, dest, partial(function_of(step.command), **step.keywords()))

    def plan(self, words: Sequence[str], dest: Virtual, function: Callable[..., R]) -> R:
        """Plan one command on the result of those before it, and return what it returns.

        Args:
            words: the command and its options, for `steps`.
            function: called with the input, the output, and ``dry_run=True``.
        """
        command, *options = words
        row = STEPS.get(command)
        before_output = (row.output_option,) if row is not None and row.output_option else ()
        source = self._readable()
        with about(self._path):
            result = function(source, dest, dry_run=True)
        refused = next((finding for finding in result.findings if finding.id == "refused"), None)
        if refused is not None:
            raise Refused(refused.message, path=self._path, hint=_DROPPING if command == "match" else None)
        plan = result.plan
        line = ("ckptfix", *command.split(), self._source, *before_output, str(dest), *options)
        self._steps.append(Done(line, result.lines))
        self._source = str(dest)
        self._plan, self._target, self.format = plan, dest, result.format
        self._checks += plan.checks
        self._holds.append(plan)
        self.findings += result.findings
        self.exit_code = max(self.exit_code, result.exit_code)
        self.account = _together(self.account, result.account)
        self.read = self.read or self._inputs(plan)
        self.current = self._spliced() if self.is_one_file else self._path
        return result

    def _refusal(self, step: Step, dest: Virtual) -> Refused | None:
        """Return why a step refuses the planned output; None if it does not. Nothing is written."""
        source = self._path if self._plan is None else self._spliced() if self.is_one_file else self._path
        try:
            function_of(step.command)(source, dest, dry_run=True, **step.keywords())
        except Refused as error:
            return error
        return None

    def _inputs(self, plan: Plan) -> tuple[FileVersion, ...]:
        """Return the files that the first command read.

        Writing the output into a folder changes the folder itself, so its files are recorded instead: those that a
        plan copies from, where the folder is not a checkpoint and only repair reads it.
        """
        if found_as(self._path) != "folder":
            return (self._as_opened(),)
        try:
            return formats.open_checkpoint(self._path).files
        except UnknownFormat:
            return tuple(map(mark, dict.fromkeys(where.path for where in ranges(plan))))

    def _as_opened(self) -> FileVersion:
        """Return the file's mark from when this command opened it, before it was diagnosed."""
        with open_source(self._path) as source:
            return FileVersion(self._path, source.mark)

    def _spliced(self) -> SplicedFile:
        """Return the planned output as a file that can be read."""
        assert self._plan is not None
        (file,) = self._plan.files
        return SplicedFile(
            self._target,
            [segment_length(segment) for segment in file.segments],
            lambda i: SplicedPiece((file.segments[i],)),
            self._path,
        )

    def _readable(self) -> str:
        """Return the path that the next command reads."""
        if self._plan is None:
            return self._path
        if self._can_be_joined():
            return self._spliced()
        if self._dry_run:
            # Nothing will be written, so zeros in place of its checksums do no harm.
            return self._spliced() if self.is_one_file else self._path
        if self._folder is None:
            self._folder = tempfile.mkdtemp(TEMP_SUFFIX, ".", self._beside)
        aside = str(as_path(self._folder, as_path(self._target).name))
        write_aside(self._written(aside), aside, folder=not self.is_one_file)
        self._plan, self._target, self._checks, self._holds = None, aside, (), []
        return aside

    def _can_be_joined(self) -> bool:
        assert self._plan is not None
        made = [segment for file in self._plan.files for segment in file.segments if isinstance(segment, Derived)]
        return self.is_one_file and all(segment.what != CHECKSUM for segment in made)

    def plan_for(self, dest: str) -> Plan | None:
        """Return the plan that writes `dest`; None if there was nothing to do."""
        if self._plan is None:
            return None
        return self._written(dest)

    def _written(self, dest: str) -> Plan:
        """Return the plan of all commands since the last intermediate file, with `dest` as its output."""
        assert self._plan is not None
        files = tuple(_moved(file, self._target, dest) for file in self._plan.files)
        return replace(self._plan, files=files, checks=self._checks, holds=tuple(self._holds))


def _together(first: Account | None, last: Account) -> Account:
    """Combine the accounts of two commands that ran one after the other on a file."""
    if first is None:
        return last
    return replace(
        last,
        tensors=first.tensors,
        nbytes=first.nbytes,
        left=(*first.left, *last.left),
        lost=(*first.lost, *last.lost),
        excused=first.excused or last.excused,
    )


def _moved(file: OutputFile, old: str, new: str) -> OutputFile:
    """Return the file with `new` in place of the path prefix `old`."""
    return replace(file, path=new + file.path[len(old) :])
