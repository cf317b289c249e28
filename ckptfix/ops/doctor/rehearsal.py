"""Rehearsal of the commands that a diagnosis proposes: they are planned, and nothing is written.

A command that refuses the file does not help, and one whose output needs a further command is only half of the answer.
Only a plan shows whether `repair` or `sanitize` keeps anything of a damaged or hostile file, and what is left to fix
then. A diagnosis must stay quick: a file without errors is not rehearsed, because the commands for device tags and
wrapped keys work then.

A plan may take a fifth of the time of the diagnosis. It takes time by the tensor, and the diagnosis also by the byte:
so the limit is a number of tensors, and more for a larger file. `repair` alone takes longer, because it reads the file
in its own way, with modules that nothing else needs; so it is rehearsed for small files, and for those that are cut
short. Their repair is planned by the diagnosis itself, which says what is left, and the rehearsal uses the same plan.
Where only checksums of some tensors are wrong, repair certainly keeps the others, and is not rehearsed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

from ckptfix.errors import CkptfixError
from ckptfix.findings.steps import Invocation
from ckptfix.findings.table import Remedy, proposed
from ckptfix.formats import open_checkpoint
from ckptfix.io.source import found_as, is_local, is_place
from ckptfix.ops.chain import Chain
from ckptfix.ops.doctor.report import Diagnosis
from ckptfix.ops.writing import unaudited
from ckptfix.urls import as_path, walk_folder

MOST_AUDITED = 1 << 16
"""Bytes of a file up to which the rehearsal is a whole dry run, with the weight audit: about 100 tensors."""

MOST_BYTES = 1 << 20
"""Bytes of a folder, or of a file that `repair` must read first, up to which commands are rehearsed."""

MOST_TENSORS = 400
"""Number of tensors of a file up to which commands are rehearsed."""

BYTES_PER_TENSOR = 2 << 20
"""Bytes of a file that allow one more tensor: their diagnosis takes five times as long as the plan of a tensor."""

MOST_FILES = 200
"""Number of files of a folder up to which commands are rehearsed."""

ROUNDS = 3
"""How often the planned output is examined again."""


def rehearsed(done: Diagnosis, look: Callable[[str], Diagnosis], *, repaired: int | None = None) -> Diagnosis:
    """Return the diagnosis without the commands that refuse the file, and with those that their output needs.

    The reason of a refusal becomes the advice.

    Args:
        look: examines a planned output, without its tensor data.
        repaired: the number of tensors of a file whose repair is planned already.
    """
    size = _size(done)
    if not size or not _is_quick(done, size, repaired):
        return done
    with nullcontext() if size <= MOST_AUDITED else unaudited():
        for _ in range(len(done.chain)):
            try:
                return replace(done, further=_further(done, look))
            except _RefusedStep as refused:
                done = _without(done, refused.command, refused.error)
    return done


def _is_quick(done: Diagnosis, size: int, repaired: int | None) -> bool:
    """Return whether the commands can be planned in a fifth of the time of the diagnosis; see the module."""
    must_read = any(one.step.command == "repair" for one in done.chain) and repaired is None
    if must_read and _keeps_others(done):
        return False
    if must_read or found_as(done.path) != "file":
        return size <= MOST_BYTES and done.tensors <= MOST_TENSORS // 2
    return (repaired or done.tensors) <= MOST_TENSORS + size // BYTES_PER_TENSOR


def _keeps_others(done: Diagnosis) -> bool:
    """Return whether the file can be read, and the checksums of some of its tensors, and nothing else, are wrong."""
    if any(one.step.command != "repair" for one in done.chain):
        return False
    rows = zip(done.findings, done.remedies, strict=True)
    damage = [row for row, fix in rows if any(one.step.command == "repair" for one in fix.invocations)]
    if not done.tensors or not all(row.id == "bad-crc" and "/data/" in row.where for row in damage):
        return False
    try:
        entries = open_checkpoint(done.path).entries
    except CkptfixError:
        return False
    return len({row.storage.identity for row in entries if row.storage is not None}) > len(damage)


def _size(done: Diagnosis) -> int:
    """Return the bytes of a file, or of the files of a local folder; 0 if there is none, or too much to plan."""
    kind = found_as(done.path) if is_place(done.path) else ""
    if kind == "file":
        # A small remote file is in memory once it has been examined.
        return done.size if is_local(done.path) or done.size <= MOST_AUDITED else 0
    if kind != "folder" or not is_local(done.path):
        return 0
    size = count = 0
    for folder, _, names in walk_folder(done.path):
        count += len(names)
        if count > MOST_FILES:
            return 0
        for name in names:
            try:
                size += as_path(folder, name).stat().st_size
            except OSError:
                continue
    return size


_UNCOVERING = frozenset({"repair", "extract", "convert"})
"""Commands whose output shows what their input did not."""


class _RefusedStep(Exception):
    """A command refuses the output of those before it."""

    def __init__(self, command: str, error: CkptfixError) -> None:
        super().__init__(command)
        self.command, self.error = command, error


def _further(done: Diagnosis, look: Callable[[str], Diagnosis]) -> tuple[Invocation, ...]:
    """Plan the commands, and return those that their output needs.

    Raises:
        _RefusedStep: one of them refuses the output of those before it.
    """
    commands = done.chain
    names = [one.step.command for one in commands]
    # `match` was tried when it was proposed, and it takes longest.
    taken = commands[: names.index("match")] if "match" in names else commands
    more: list[Invocation] = []
    with Chain(done.path, None, dry_run=True) as chain:
        for one in taken:
            try:
                chain.carry_out([one])
            except CkptfixError as error:
                raise _RefusedStep(one.step.command, error) from error
        # What `sanitize` and renames leave was visible before them. A message is about one step of a loader, and `fix`
        # does not know it.
        if _UNCOVERING.isdisjoint(names):
            return ()
        if not taken or len(taken) < len(commands) or not chain.is_one_file or done.message is not None:
            return ()
        for _ in range(ROUNDS):
            before = len(more)
            try:
                for one in look(chain.current).chain:
                    # A step that did not help once does not help when it is repeated.
                    if all(one.step.command != earlier.step.command for earlier in (*commands, *more)) and (
                        chain.carry_out([one])
                    ):
                        source = (more or commands)[-1].dest
                        more.append(Invocation(one.step, source, proposed(source, one.step.output_word)))
            except CkptfixError:
                break
            if len(more) == before:
                break
    return tuple(more)


def _without(done: Diagnosis, command: str, error: CkptfixError) -> Diagnosis:
    """Return the diagnosis without the remedies that need a command."""
    refusal = f"{command} refuses this one: {error.message}"
    action = error.hint if error.hint and "ckptfix" not in error.hint else None
    if action is None and command in ("repair", "sanitize", "extract", "convert"):
        action = "use another copy of the file"
    advice = refusal if action is None else f"{action} ({refusal})"
    findings, remedies = [], []
    for finding, row in zip(done.findings, done.remedies, strict=True):
        needs = any(one.step.command == command for one in row.invocations)
        made = Remedy(advice=advice) if needs else row
        remedies.append(made)
        findings.append(replace(finding, fix=made.text, steps=made.steps) if needs else finding)
    return replace(done, findings=tuple(findings), remedies=tuple(remedies))


def in_python(done: Diagnosis, like: str) -> Diagnosis:
    """Return `done` with calls in place of commands that need the model, as `like` names a model in memory."""
    findings, remedies = [], []
    for finding, row in zip(done.findings, done.remedies, strict=True):
        line = next((line for line in row.invocations if line.step.get("like") == like), None)
        if line is not None:
            others = {name: value for name, value in line.step.options if name not in ("like", "allow_import")}
            options = "".join(f", {name}={value!r}" for name, value in others.items())
            verb = line.step.command.replace("-", "_")
            row = Remedy(advice=f"ckptfix.{verb}({line.source!r}, {line.dest!r}, like=model{options})")
            finding = replace(finding, fix=row.text, steps=row.steps)
        findings.append(finding)
        remedies.append(row)
    return replace(done, findings=tuple(findings), remedies=tuple(remedies))
