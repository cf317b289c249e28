"""The verdict of ``ckptfix FILE``: one file in about eight lines, with the facts on top."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple

from ckptfix.cli.shared.colors import SEVERITIES, Meaning
from ckptfix.cli.shared.console import Console
from ckptfix.commands import command as line_of
from ckptfix.errors import printable
from ckptfix.findings.steps import shell_line
from ckptfix.ops.inspect.describe import counts, state_dicts_of
from ckptfix.ops.inspect.training import shown
from ckptfix.words import plural, size

if TYPE_CHECKING:
    from ckptfix.ops.doctor.report import Diagnosis
    from ckptfix.ops.inspect.describe import Inspection

CAUSES = 5
"""Causes that a terminal shows; a pipe and -v show all of them."""

NAMES = 3
STATE_DICTS = 3

_WORDS = {"error": "error", "warning": "warning", "info": "note"}


class _Fact(NamedTuple):
    """A line ``label  text``; a command is never broken."""

    label: str
    text: str
    meaning: Meaning | None = None
    paints: Literal["label", "text"] = "label"


def show(console: Console, done: Diagnosis, inspection: Inspection | None, *, verbose: bool) -> None:
    """Print the verdict."""
    severity = done.cause.severity if done.cause is not None else None
    mark = marks()[severity or "info"]
    console.prose(f"{mark} {_headline(done, inspection)}", SEVERITIES.get(severity or "info"), len(mark))
    rows = [*_facts(inspection), *_causes(console, done, verbose), *_remedy(done), *_more(done, inspection)]
    width = max(len(row.label) for row in rows) + 2
    for row in rows:
        text = f"  {row.label.ljust(width)}{printable(row.text)}"
        painted = len(row.label) + 2 if row.paints == "label" else -(width + 2)
        (console.say if row.paints == "text" else console.prose)(text, row.meaning, painted)


def marks() -> dict[str, str]:
    """Return the marks of `browse`, in ASCII where stdout has no other characters."""
    try:
        "✗✓".encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return {"error": "x", "warning": "!", "info": "-"}
    return {"error": "✗", "warning": "!", "info": "✓"}


def _headline(done: Diagnosis, inspection: Inspection | None) -> str:
    """Return the name and what the file is."""
    kinds = {finding.id for finding in done.findings}
    if inspection is None:
        return ", ".join([printable(done.path), *([size(done.size)] if done.size else [])])
    kind = "whole pickled model" if "whole-module" in kinds else ""
    kind = "training checkpoint" if "training-checkpoint" in kinds else kind
    parts = [
        f"{kind} ({inspection.title})" if kind else inspection.title,
        size(inspection.size),
        plural(inspection.tensors, "tensor"),
        f"{inspection.parameters:,} parameters",
        ", ".join(inspection.devices),
    ]
    return f"{printable(done.path)}: {', '.join(filter(None, parts))}"


def _facts(inspection: Inspection | None) -> Iterator[_Fact]:
    """Yield the state dicts, what is special about the weights, and the progress of the training."""
    if inspection is None:
        return
    listed = list(state_dicts_of(inspection))
    if listed and not (len(listed) == 1 and listed[0].startswith("the file itself")):
        more = f"; {len(listed) - STATE_DICTS:,} more" if len(listed) > STATE_DICTS else ""
        yield _Fact("holds", "; ".join(listed[:STATE_DICTS]) + more)
    if len(inspection.dtypes) > 1:
        yield _Fact("dtypes", counts(inspection.dtypes))
    if inspection.quantized:
        yield _Fact("quantized", "; ".join(map(str, inspection.quantized[:STATE_DICTS])))
    if inspection.adapter is not None:
        yield _Fact("adapter", inspection.adapter)
    if inspection.training:
        yield _Fact("training", shown(inspection.training))


def _causes(console: Console, done: Diagnosis, verbose: bool) -> Iterator[_Fact]:
    """Yield errors and warnings, each cause once; with `verbose` every finding with its place, and notes."""
    if verbose:
        from ckptfix.ops.doctor.report import in_full

        found = [(row.severity, in_full(row)) for row in done.findings]
    else:
        first = done.cause
        groups = sorted(done.groups, key=lambda group: not any(row is first for row in group.findings))
        names = console.rows(None, NAMES)
        found = [(row.severity, f"{row.text(names)} [{row.id}]") for row in groups if row.severity != "info"]
    most = 0 if verbose else console.rows(None, CAUSES)
    for severity, text in found[: most or None]:
        yield _Fact(_WORDS[severity], text, SEVERITIES[severity])
    if most and len(found) > most:
        yield _Fact("", f"... {plural(len(found) - most, 'more cause')} (-v shows all)")
    if done.survivors:
        yield _Fact("left", done.survivors)


def _remedy(done: Diagnosis) -> Iterator[_Fact]:
    """Yield the one command that fixes the file, or the advice."""
    words = done.fix or next(iter(done.fixes), None)
    if words is not None:
        yield _Fact("fix", shell_line(words), "fix", "text")
    if done.advice is not None:
        yield _Fact("try", done.advice)
    if words is None and done.advice is None and done.cause is not None and done.cause.severity == "error":
        yield _Fact("fix", "no command fixes this")


def _more(done: Diagnosis, inspection: Inspection | None) -> Iterator[_Fact]:
    """Yield the line that says what was not checked, and where to look further."""
    if not done.findings and inspection is not None:
        yield _Fact("ok", "the structure has no problems")
    elif done.cause is None:
        yield _Fact("ok", "the structure has no problems (-v shows notes)")
    line = line_of("doctor", done.path)
    if inspection is None:
        yield _Fact("more", f"`{line} -v`", "note")
    else:
        yield _Fact("more", f"data not checked: `{line}` reads it; -v, inspect and browse show more", "note")
