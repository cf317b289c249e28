"""Rehearsal of the commands that a diagnosis proposes: they are planned, and nothing is written.

A command that refuses the file does not help. Only its plan shows whether `repair` or `sanitize` keeps anything of a
damaged or hostile file. A diagnosis must stay quick: a file without errors is not rehearsed, because the commands for
device tags and wrapped keys work then, and neither is a large one, because a plan takes as long as the diagnosis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ckptfix.errors import CkptfixError
from ckptfix.findings.steps import Invocation
from ckptfix.findings.table import Remedy
from ckptfix.io.source import found_as, is_local
from ckptfix.ops.chain import Chain
from ckptfix.ops.doctor.report import Diagnosis

MOST_BYTES = 1 << 16
"""Size of a file up to which commands are rehearsed: about 100 tensors, a fifth of the time of `ckptfix doctor`."""


def rehearsed(done: Diagnosis) -> Diagnosis:
    """Return the diagnosis without the commands that refuse the file; the reason becomes the advice."""
    if not 0 < done.size <= MOST_BYTES or found_as(done.path) != "file" or not is_local(done.path):
        return done
    for _ in range(len(done.chain)):
        wrong = _refused(done.path, done.chain)
        if wrong is None:
            break
        command, error = wrong
        done = _without(done, command, error)
    return done


def _refused(path: str, commands: Sequence[Invocation]) -> tuple[str, CkptfixError] | None:
    """Return the first of these commands that refuses the output of those before it, and its error."""
    names = [one.step.command for one in commands]
    # `match` was tried when it was proposed, and it takes longest.
    taken = commands[: names.index("match")] if "match" in names else commands
    with Chain(path, None, dry_run=True) as chain:
        for one in taken:
            try:
                chain.carry_out([one])
            except CkptfixError as error:
                return one.step.command, error
    return None


def _without(done: Diagnosis, command: str, error: CkptfixError) -> Diagnosis:
    """Return the diagnosis without the remedies that need a command."""
    action = error.hint if error.hint and "ckptfix" not in error.hint else "use another copy of the file"
    advice = f"{action} ({command} refuses this one: {error.message})"
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
