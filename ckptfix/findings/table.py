"""The one table of findings: every id that ckptfix reports, its meaning, and the command that fixes it.

An id never changes its meaning. A row has the severity that applies unless more is known about the file, the load
errors that the finding explains, and a remedy: a command of ckptfix, or an instruction in words. The rows are in
several modules, grouped by subject; `ENTRIES` joins them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ckptfix.command_table import STEPS
from ckptfix.commands import word as shell_word
from ckptfix.dataclass import dataclass
from ckptfix.findings.contents import CONTENTS
from ckptfix.findings.files import CONTAINERS
from ckptfix.findings.load_errors import LoadError
from ckptfix.findings.row import Finding, FindingKind, Severity, in_words
from ckptfix.findings.runs import RUNS
from ckptfix.findings.steps import LIKE, WHERE, Fix, Invocation, Steps, operand, shell_line
from ckptfix.findings.verbs import VERBS
from ckptfix.urls import as_path, folder_beside, is_url

ENTRIES: dict[str, FindingKind] = {entry.id: entry for entry in (*CONTAINERS, *CONTENTS, *RUNS, *VERBS)}

RANK: dict[Severity, int] = {"error": 0, "warning": 1, "info": 2}


def found(
    id: str,
    message: str = "",
    *,
    where: str = "",
    offset: int | None = None,
    severity: Severity | None = None,
    fix: Fix | None = None,
    about: str = "",
) -> Finding:
    """Return a finding of the row `id`, with the row's title and severity where no others are given.

    Args:
        severity: overrides the row's severity, where more is known about the file: that it is repaired, or which
            readers refuse it.
        fix: replaces the row's remedy, with the same fields; ``""`` for no remedy.
        about: the class, function or tensor that the message is about.
    """
    entry = ENTRIES[id]
    text, steps = in_words(fix)
    return Finding(id, severity or entry.severity, where, message or entry.title, offset, text, about, steps)


@dataclass(frozen=True, slots=True)
class Remedy:
    """The way to fix a finding.

    Attributes:
        lines: commands of ckptfix, to run one after the other.
        advice: an instruction in words, or a command of a different program; None where `invocations` are enough.
    """

    invocations: tuple[Invocation, ...] = ()
    advice: str | None = None

    @property
    def commands(self) -> tuple[tuple[str, ...], ...]:
        """The commands, each a list of words."""
        return tuple(line.argv() for line in self.invocations)

    @property
    def steps(self) -> Steps | None:
        """The commands without their files; None where there are none."""
        return tuple(line.step for line in self.invocations) or None

    @property
    def text(self) -> str | None:
        """The remedy in one line, with commands quoted for a shell; None where nothing helps."""
        return " && ".join(map(shell_line, self.commands)) or self.advice


def fix_of(finding: Finding) -> Fix | None:
    """Return the remedy that `finding` states, or that of its row."""
    if finding.steps is not None or finding.fix is not None:
        return finding.fix if finding.steps is None else finding.steps
    entry = ENTRIES.get(finding.id)
    return None if entry is None else entry.fix


def remedy_of(
    finding: Finding, path: str, *, at: str | None = None, kept: str | None = None, **values: str
) -> Remedy:
    """Return the remedy for `finding` in the file `path`.

    A step reads the file, or the output of the step before it. In an instruction ``{source}`` is the file, and
    ``{source!r}`` its name in Python; ``{repaired}``, ``{cpu}`` and so on are unused file names beside it; ``{at}`` is
    the place of the finding; other fields come from `values`.

    Args:
        at: the address that the user asked about, for the commands that take one.
        kept: as in `proposed`.
        values: ``like``, the model that the file was compared with.
    """
    fix = fix_of(finding)
    if not fix:
        return Remedy()
    if isinstance(fix, str):
        fields = _Fields(path, {"at": finding.where, **values}, kept)
        return Remedy(advice=fix.format_map(fields) if "{" in fix else fix)
    known = {WHERE: finding.where, LIKE: values.get("like", "")}
    lines: list[Invocation] = []
    source = path
    for step in fix:
        row = STEPS[step.command]
        ready = step.filled(known)
        if at and row.chained and row.at and ready.get("at") is None:
            ready = ready.having(at=at)
        dest = step.dest or (proposed(path, step.output_word, kept=kept) if row.writes else "")
        lines.append(Invocation(ready, step.source or source, dest))
        source = dest or source
    return Remedy(tuple(lines))


def remedy(finding: Finding, path: str, **values: str) -> str | None:
    """Return `remedy_of` in one line: commands for a shell, or words; None where nothing helps."""
    return remedy_of(finding, path, **values).text


def said_remedy(finding: Finding, path: str) -> Remedy:
    """Return the remedy that `finding`, in the file `path`, states itself; the remedy of its row is for doctor only."""
    return Remedy() if finding.fix is None and finding.steps is None else remedy_of(finding, path)


def as_row(finding: Finding, remedy: Remedy) -> dict[str, Any]:
    """Return `finding` for JSON: `fix` is the first command as a list of words, `fixes` are all, `advice` is in words.

    The subject, `about`, is part of the message.
    """
    commands = [list(words) for words in remedy.commands]
    return {
        "id": finding.id,
        "severity": finding.severity,
        "where": finding.where,
        "offset": finding.offset,
        "message": finding.message,
        "fix": commands[0] if commands else None,
        "fixes": commands,
        "advice": remedy.advice or None,
    }


def as_rows(findings: Iterable[Finding], path: str) -> list[dict[str, Any]]:
    """Return `findings` of the file `path` for JSON, each with the remedy that it states itself."""
    return [as_row(finding, said_remedy(finding, path)) for finding in findings]


def errors_of(finding: Finding) -> tuple[LoadError, ...]:
    """Return the load errors that `finding` explains."""
    entry = ENTRIES.get(finding.id)
    return entry.errors if entry is not None else ()


_PLACES = {id: place for place, id in enumerate(ENTRIES)}


def place_of(finding: Finding) -> int:
    """Return the position of its row in the table: the kind of the file comes before its contents."""
    return _PLACES.get(finding.id, len(_PLACES))


def proposed(path: str, word: str, suffix: str | None = None, kept: str | None = None) -> str:
    """Return a name beside `path` that is not in use yet: ``model.pth`` and ``cpu`` give ``model.cpu.pth``.

    Args:
        suffix: the suffix of the output, where it is known.
        kept: the suffix of outputs that have the format of `path`, where that of `path` belongs to another format.
    """
    folder, name = folder_beside(path), as_path(path).name
    stem, own = suffixed(path, word, kept)
    suffix = own if suffix is None else suffix
    if word in OWN_SUFFIXES:
        word = "" if not name.endswith(suffix) else "converted"
    middle = f".{word}" if word else ""
    candidate = folder / f"{stem}{middle}{suffix}"
    number = 2
    while not is_url(str(candidate)) and candidate.exists():
        candidate = folder / f"{stem}{middle}{number}{suffix}"
        number += 1
    return str(candidate)


def suffixed(path: str, word: str, kept: str | None = None) -> tuple[str, str]:
    """Return the stem and the suffix of the name of an output, which `word` describes, without its folder.

    Args:
        kept: as in `proposed`.
    """
    name = as_path(path).name
    if name.endswith(".json"):  # an index: the output is a folder, or a file that is called like its shards
        name = as_path(name.removesuffix(".json").partition(".index")[0]).stem
    if word in OWN_SUFFIXES:
        return _split(name)[0], OWN_SUFFIXES[word]
    stem, suffix = _split(name)
    suffix = suffix if kept is None else kept
    many = word in ("plain", "repacked") and as_path(path).is_dir()
    if word in _TORCH and not many and suffix not in (".pth", ".pt", ".bin", ".ckpt", ".pth.tar"):
        suffix = ".pth"
    return stem, suffix


OWN_SUFFIXES = {"safetensors": ".safetensors"}
"""The words that name a format of single files with a suffix of its own, which holds no object -> that suffix."""

_TORCH = ("weights", "legacy", "zip", "repacked", "plain")
"""Words of outputs that are torch files, whatever the suffix of the input."""

_SUFFIXES = (".pth.tar", ".pt.tar", ".index.json")
_PACKED = (".gz", ".bz2", ".xz", ".zst", ".lz4")
"""Suffixes of files that are compressed as a whole; ckptfix never writes such a file."""


def _split(name: str) -> tuple[str, str]:
    """Return the stem and the suffix of a name; digits after a dot are a part of the stem (``Llama-3.1-8B``)."""
    if name.lower().endswith(_PACKED):
        name = as_path(name).stem
    for suffix in _SUFFIXES:
        if name.endswith(suffix):
            return name[: -len(suffix)], suffix
    path = as_path(name)
    return (name, "") if path.suffix[1:2].isdigit() else (path.stem, path.suffix)


class _Field(str):
    """A field of an instruction: ``{source}`` is a word for a shell, and ``{source!r}`` a string for Python."""

    def __format__(self, spec: str) -> str:
        return shell_word(operand(str(self)))


class _Fields(dict[str, str]):
    """The fields of an instruction, computed on demand."""

    def __init__(self, path: str, values: dict[str, str], kept: str | None) -> None:
        super().__init__({name: _Field(value) for name, value in values.items()})
        self._path, self._kept = path, kept

    def __missing__(self, name: str) -> str:
        return _Field(self._path if name == "source" else proposed(self._path, name, kept=self._kept))
