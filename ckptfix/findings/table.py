"""The one table of findings: every id that ckptfix reports, its meaning, and the command that fixes it.

An id never changes its meaning. A row has the severity that applies unless more is known about the file, the load
errors that the finding explains, and a remedy: a command of ckptfix, or an instruction in words. The rows are in
several modules, grouped by subject; `ENTRIES` joins them.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ckptfix.commands import word as shell_word
from ckptfix.findings.contents import CONTENTS
from ckptfix.findings.files import CONTAINERS
from ckptfix.findings.load_errors import LoadError
from ckptfix.findings.row import Finding, FindingKind, Severity
from ckptfix.findings.verbs import VERBS
from ckptfix.urls import as_path, folder_beside, is_url

ENTRIES: dict[str, FindingKind] = {entry.id: entry for entry in (*CONTAINERS, *CONTENTS, *VERBS)}

RANK: dict[Severity, int] = {"error": 0, "warning": 1, "info": 2}


def found(
    id: str,
    message: str = "",
    *,
    where: str = "",
    offset: int | None = None,
    severity: Severity | None = None,
    fix: str | None = None,
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
    return Finding(id, severity or entry.severity, where, message or entry.title, offset, fix, about)


@dataclass(frozen=True, slots=True)
class Remedy:
    """The way to fix a finding.

    Attributes:
        commands: command lines of ckptfix, each a list of words, to run one after the other.
        advice: an instruction in words, or a command of a different program; None where `commands` are enough.
    """

    commands: tuple[tuple[str, ...], ...] = ()
    advice: str | None = None

    @property
    def text(self) -> str | None:
        """The remedy in one line, with commands quoted for a shell; None where nothing helps."""
        return " && ".join(map(shell_line, self.commands)) or self.advice


def remedy_of(finding: Finding, path: str, *, at: str | None = None, **values: str) -> Remedy:
    """Return the remedy for `finding` in the file `path`.

    ``{source}`` in the template is the file; ``{repaired}``, ``{cpu}`` and so on are unused file names beside it;
    ``{at}`` is the place of the finding; other fields come from `values`.

    Args:
        at: the address that the user asked about, for the commands that take one.
    """
    entry = ENTRIES.get(finding.id)
    template = finding.fix if finding.fix is not None else entry.fix if entry else None
    if not template:
        return Remedy()
    if not template.startswith("ckptfix "):
        fields = _Fields(path, {"at": finding.where, **values}, shell_word)
        return Remedy(advice=template.format_map(fields) if "{" in template else template)
    bare = _Fields(path, {"at": finding.where, **values}, str)
    lines: list[list[str]] = [[]]
    for word in shlex.split(template):
        if word == "&&":
            lines.append([])
        else:
            lines[-1].append(word.format_map(bare))
    for line in lines:
        if at and line[1] in TAKE_AT and "--at" not in line:
            line += ["--at", at]
    return Remedy(tuple(map(tuple, lines)))


def remedy(finding: Finding, path: str, **values: str) -> str | None:
    """Return `remedy_of` in one line: commands for a shell, or words; None where nothing helps."""
    return remedy_of(finding, path, **values).text


def said_remedy(finding: Finding, path: str) -> Remedy:
    """Return the remedy that `finding`, in the file `path`, states itself; the remedy of its row is for doctor only."""
    return Remedy() if finding.fix is None else remedy_of(finding, path)


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


TAKE_AT = frozenset({"strip-module", "add-module", "unwrap", "rename", "match", "extract", "convert"})
"""Commands with the option --at."""


def shell_line(words: Sequence[str]) -> str:
    """Return `words` quoted for a shell."""
    return " ".join(map(shell_word, words))


def errors_of(finding: Finding) -> tuple[LoadError, ...]:
    """Return the load errors that `finding` explains."""
    entry = ENTRIES.get(finding.id)
    return entry.errors if entry is not None else ()


_PLACES = {id: place for place, id in enumerate(ENTRIES)}


def place_of(finding: Finding) -> int:
    """Return the position of its row in the table: the kind of the file comes before its contents."""
    return _PLACES.get(finding.id, len(_PLACES))


def proposed(path: str, word: str, suffix: str | None = None) -> str:
    """Return a name beside `path` that is not in use yet: ``model.pth`` and ``cpu`` give ``model.cpu.pth``.

    Args:
        suffix: the suffix of the output, where it is known.
    """
    folder, name = folder_beside(path), as_path(path).name
    stem, own = suffixed(path, word)
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


def suffixed(path: str, word: str) -> tuple[str, str]:
    """Return the stem and the suffix of the name of an output, which `word` describes, without its folder."""
    name = as_path(path).name
    if name.endswith(".json"):  # an index: the output is a folder, or a file that is called like its shards
        name = as_path(name.removesuffix(".json").partition(".index")[0]).stem
    if word in OWN_SUFFIXES:
        return _split(name)[0], OWN_SUFFIXES[word]
    stem, suffix = _split(name)
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
    if name.lower().endswith(_PACKED):
        name = as_path(name).stem
    for suffix in _SUFFIXES:
        if name.endswith(suffix):
            return name[: -len(suffix)], suffix
    path = as_path(name)
    return path.stem, path.suffix


class _Fields(dict[str, str]):
    """The fields of a template, computed on demand; `shown` formats each of them."""

    def __init__(self, path: str, values: dict[str, str], shown: Callable[[str], str]) -> None:
        super().__init__({name: shown(value) for name, value in values.items()})
        self._path = path
        self._shown = shown

    def __missing__(self, name: str) -> str:
        return self._shown(operand(self._path if name == "source" else proposed(self._path, name)))


def operand(path: str) -> str:
    """Return `path` for a command line, so that one that begins with a dash is not mistaken for an option."""
    return f"./{path}" if path.startswith("-") else path
