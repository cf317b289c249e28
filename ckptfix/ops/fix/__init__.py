"""``ckptfix.fix``: carry out everything that doctor proposes, in one step."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ckptfix import formats
from ckptfix.arguments import Model, checks_types, takes_model
from ckptfix.command_table import COMMANDS
from ckptfix.commands import command
from ckptfix.dataclass import dataclass
from ckptfix.errors import Refused, StrPath, Unsupported
from ckptfix.findings.steps import Invocation, Step, step
from ckptfix.formats.in_place import A_COPY
from ckptfix.formats.target import of_suffix, suits
from ckptfix.io.read import Progress
from ckptfix.io.source import found_as, shares_open_files
from ckptfix.ops.audit.promise import Account, Promise
from ckptfix.ops.chain import Chain, Done
from ckptfix.ops.doctor import expected
from ckptfix.ops.doctor.examine import examine
from ckptfix.ops.doctor.report import Diagnosis
from ckptfix.ops.inplace import refuse_far
from ckptfix.ops.naming import named_beside
from ckptfix.ops.writing import (
    Draft,
    Result,
    WriteOptions,
    beside_model,
    carry_out,
    carry_out_file,
    copy_note,
    copy_of,
    existing,
    folder_draft,
)
from ckptfix.pickles.collector import gc_paused
from ckptfix.urls import as_path
from ckptfix.words import plural

ROUNDS = 5
"""How often the result is examined again: each command may uncover findings that were hidden before."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class FixResult(Result):
    """The outcome of a fix; `steps` are the commands that were carried out, in order, empty if nothing was wrong."""

    steps: tuple[Done, ...] = ()

    def _details(self) -> dict[str, Any]:
        return {"steps": [done.as_dict() for done in self.steps]}


@checks_types
@takes_model
@gc_paused
@shares_open_files()
@formats.reads_once()
def fix(
    source: StrPath,
    dest: StrPath | None = None,
    *,
    like: StrPath | Model | None = None,
    like_at: str | None = None,
    at: str | None = None,
    drop_unexpected: bool = False,
    error: str | None = None,
    allow_import: bool = False,
    force: bool = False,
    keep_old: bool = False,
    dry_run: bool = False,
    in_place: bool = False,
    progress: Progress | None = None,
) -> FixResult:
    """Write a checkpoint that ``torch.load(weights_only=True)`` accepts on a CPU, under plain keys.

    The commands that doctor proposes are carried out in its order, and the result is examined again, until nothing is
    left to fix. Each command works on the plan of the one before it, so the file is copied only once.

    Args:
        dest: by default the name that doctor would propose, beside `source`. For a folder whose weights need the
            configuration beside them, it is a folder, with copies of the other files.
        like, like_at, at, allow_import: as `doctor`: the model that the checkpoint is meant for.
        drop_unexpected: leave out keys that `like` lacks; they are listed.
        error: the error message that the user saw. The commands that follow from its keys are carried out too, and
            without any command nothing is written.
        in_place: change only the bytes of `source` that differ; `dest` is None then. `undo` reverts all steps at once.

    Returns:
        The commands that were carried out. A file without faults yields an identical copy. Errors of other files of its
        folder, which no step is about, are findings of the result, and its exit code is 3.

    Raises:
        Refused: something is wrong that no command fixes; message and hint describe it, and nothing was written.
        Unsupported: with `in_place`, the steps change tensor data, or the format.
        CkptfixError: as the commands.
    """
    path = formats.located(existing(source))
    diagnose = partial(examine, like=expected(like, like_at, allow_import=allow_import), at=at, like_at=like_at)
    how = WriteOptions(force=force, keep_old=keep_old, dry_run=dry_run, in_place=in_place, progress=progress)
    if in_place:
        refuse_far(path)
    with Chain(path, dest, dry_run=dry_run) as chain:
        first = diagnosis = diagnose(source, error=error, progress=_unfinished(progress))
        solved = first.message is not None and first.message.solved
        # Only a look at tensor data may show again an error that no command fixes.
        fast = not first.unfixed
        if to := _one_file(diagnosis, dest):
            _refuse(diagnosis, path, chain.steps, helped=True)
            (conversion,) = step("convert", to=to)
            chain.carry_out([Invocation(conversion, path, named_beside(path, to))])
            diagnosis = diagnose(chain.current, fast=fast)
        for _ in range(ROUNDS):
            commands = _asked(diagnosis.chain, drop_unexpected)
            if not chain.carry_out(commands, _spared(commands, chain.steps)) or not chain.is_one_file:
                break
            diagnosis = diagnose(chain.current, fast=fast)
            if solved:  # the message says how the model's keys begin, and is about the file as it was
                break
        if first.message is not None and not chain.steps:
            raise Refused(first.sentence, path=path, hint=first.advice)
        if other := _named(chain, diagnosis, dest):
            (conversion,) = step("convert", to=other)
            chain.carry_out([Invocation(conversion, path, named_beside(path, other))])
        # An intermediate folder was not examined again, so the commands proposed for it count as its fix.
        try:
            _refuse(diagnosis, path, chain.steps, helped=not chain.is_one_file)
        except Refused as error:
            raise next(iter(chain.refused), error) from None
        chain.leave(first.beside)
        if in_place:
            anew = [done.command[1] for done in chain.steps if not COMMANDS[done.command[1]].in_place]
            made = None if chain.format is None else formats.FORMATS[chain.format]
            if anew or (made is not None and made is not formats.detect(path)):
                # What such a step takes out, a file that is edited in place would still hold.
                what = ", ".join(anew or [done.command[1] for done in chain.steps])
                raise Unsupported(f"not in place: {what} writes the file anew", path=path, hint=A_COPY)
            return carry_out(path, dest, lambda checkpoint, name: _draft(chain, checkpoint.path, name), how)
        around = beside_model(source, path, dest) if chain.is_one_file else None
        if around is not None:
            name = dest if dest is not None else named_beside(source, "fixed", folder=True)

            def in_folder(path: str, dest: str) -> Draft[FixResult]:
                return folder_draft(partial(_draft, chain, path), around, path, dest)

            return carry_out_file(path, name, in_folder, how, folder=True)
        folder = chain.is_with_others
        if folder and dest is not None and of_suffix(os.fspath(dest)):
            raise Refused(IN_A_FOLDER, path=os.fspath(dest), hint="name a folder, without a suffix")
        name = dest if dest is not None else named_beside(source, "fixed", chain.suffix, folder=folder)
        return carry_out_file(path, name, partial(_draft, chain), how, folder=folder)


def _asked(commands: Sequence[Invocation], drop_unexpected: bool) -> list[Invocation]:
    """Return the commands without the option that leaves out keys, unless the user asked for it."""
    if drop_unexpected:
        return list(commands)
    return [replace(one, step=one.step.without("drop_unexpected")) for one in commands]


_OPENING = ("repair", "extract", "sanitize", "convert")
"""Commands whose output all others read."""


def _spared(commands: Sequence[Invocation], steps: tuple[Done, ...]) -> list[Step]:
    """Return the steps whose refusal must not stop the others; what they would fix is judged in the end."""
    if len(commands) + len(steps) < 2:
        return []
    return [one.step for one in commands if one.step.command not in _OPENING]


def _unfinished(progress: Progress | None) -> Progress | None:
    """Adapt `progress` to the reading before the writing, so that the end of reading does not show as 100 %."""
    return None if progress is None else lambda done, total: progress(min(done, total - 1), total)


def _one_file(diagnosis: Diagnosis, dest: StrPath | None) -> str | None:
    """Return the format of one file that a folder must become: it is read-only, or the output's name demands it."""
    format = None if diagnosis.format is None else formats.FORMATS[diagnosis.format]
    if format is None or not format.folder:
        return None
    named = None if dest is None else of_suffix(os.fspath(dest))
    return named or (None if format.edits else "zip")


def _named(chain: Chain, diagnosis: Diagnosis, dest: StrPath | None) -> str | None:
    """Return the format that the name of the output demands, if what was made so far has another one."""
    made = chain.format or diagnosis.format
    if dest is None or made is None or not chain.is_one_file:
        return None
    return None if suits(os.fspath(dest), made) else of_suffix(os.fspath(dest))


IN_A_FOLDER = "a loader reads the configuration beside the weights, so the output is a folder"
"""Refusal of an output that is named like a file."""


def _refuse(diagnosis: Diagnosis, path: str, steps: tuple[Done, ...], *, helped: bool) -> None:
    """Raise `Refused` for a result that still does not load. With `helped`, a finding with a command does not count."""
    rows = zip(diagnosis.findings, diagnosis.remedies, strict=True)
    errors = [finding for finding, row in rows if finding.severity == "error" and not (helped and row.invocations)]
    if steps or helped:
        # The model can be fixed all the same: the result names the errors of other files of the folder.
        errors = [finding for finding in errors if finding not in diagnosis.beside]
    cause = errors[0] if errors else None
    if cause is None:
        return
    if cause.id == "no-checkpoint":
        _refuse_run(path)
    after = f" (after {', '.join(done.command[1] for done in steps)})" if steps else ""
    message = cause.message if diagnosis.cause is not cause else diagnosis.sentence
    advice = diagnosis.advice or next((row.advice for row in diagnosis.remedies if row.advice), None)
    several = cause.id == "no-checkpoint" and diagnosis.size == 0 and advice is not None
    end = "" if several else ": no command fixes that"
    place = str(as_path(path).parent) if cause in diagnosis.beside and found_as(path) == "file" else path
    raise Refused(f"{message}{after}{end}", path=place, hint=advice)


def _refuse_run(path: str) -> None:
    """Raise `Refused` for a folder with the checkpoints of a run, and name the one to resume from."""
    from ckptfix.ops.doctor import runs

    done = runs.diagnosis_of(path)
    if done is None or done.run is None:
        return
    one = done.run.resume
    hint = command("doctor", path) if one is None else command("fix", one.path)
    count = plural(len(done.run.checkpoints), "checkpoint")
    raise Refused(f"a run with {count}, and fix takes one; {done.run.sentence}", path=path, hint=f"`{hint}`")


def _draft(chain: Chain, path: str, dest: str) -> Draft[FixResult]:
    lines = [f"{done.command[1]}: {line}" for done in chain.steps for line in done.lines]
    plan = chain.plan_for(dest)
    promise: Promise | None = None
    if plan is None:
        checkpoint = formats.open_checkpoint(path)
        plan, promise = copy_of(checkpoint, dest), Promise(edited=checkpoint)
        lines = [f"nothing to fix{copy_note(True)}"]
    return Draft(
        result=partial(_result, chain),
        format=chain.format or formats.detect(path).name,
        plan=plan,
        promise=promise,
        lines=lines,
        findings=chain.findings,
        exit_code=chain.exit_code,
        read=chain.read,
        folder=chain.is_with_others,
    )


def _result(chain: Chain, *, account: Account, **fields: Any) -> FixResult:
    # Each step has counted the tensors already.
    return FixResult(steps=chain.steps, account=chain.account or account, **fields)
