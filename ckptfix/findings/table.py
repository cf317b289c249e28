"""The one table of findings: every id that ckptfix reports, what it means, and the command that fixes it.

An id never changes its meaning. A row says how serious it is when nothing else is known of it, which rows of the
catalogue of load errors it explains, and what to do: a command of ckptfix, or an instruction in words. The rows stand
in three modules, by what they are about; `ENTRIES` joins them.
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
from ckptfix.findings.row import Entry, Finding, Severity
from ckptfix.findings.verbs import VERBS
from ckptfix.urls import as_path, folder_beside, is_url

ENTRIES: dict[str, Entry] = {entry.id: entry for entry in (*CONTAINERS, *CONTENTS, *VERBS)}

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
    """A finding of the row `id`, with the row's title and severity where nothing else is given.

    Args:
        severity: another than the row's, where more is known of the file: that it is repaired, or whose readers
            refuse it.
        fix: a remedy in place of the row's, with the same fields; ``""`` for none.
        about: the class, function or tensor that the message is about.
    """
    entry = ENTRIES[id]
    return Finding(id, severity or entry.severity, where, message or entry.title, offset, fix, about)


@dataclass(frozen=True, slots=True)
class Remedy:
    """What to do about a finding.

    Attributes:
        commands: command lines of ckptfix, each a list of words, to be run one after the other.
        advice: an instruction in words, or a command of another program; None where `commands` say it.
    """

    commands: tuple[tuple[str, ...], ...] = ()
    advice: str | None = None

    @property
    def text(self) -> str | None:
        """It in one line, the commands as a shell takes them; None where nothing helps."""
        return " && ".join(map(shell_line, self.commands)) or self.advice


def remedy_of(finding: Finding, path: str, *, at: str | None = None, **values: str) -> Remedy:
    """What to do about `finding` in the file `path`.

    ``{source}`` in the template is the file; ``{repaired}``, ``{cpu}`` and so on are free names beside it;
    ``{at}`` is where the finding is; other fields come from `values`.

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
    """`remedy_of` in one line: commands for a shell, or words; None for nothing."""
    return remedy_of(finding, path, **values).text


def said_remedy(finding: Finding, path: str) -> Remedy:
    """The remedy that `finding`, of the file `path`, states itself; what its row says is for doctor."""
    return Remedy() if finding.fix is None else remedy_of(finding, path)


def as_row(finding: Finding, remedy: Remedy) -> dict[str, Any]:
    """`finding` for JSON: `fix` is the first command, a list of words, `fixes` are all; `advice` is in words.

    What it is `about` is in the message.
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
    """`findings` of the file `path` for JSON, each with the remedy that it states itself."""
    return [as_row(finding, said_remedy(finding, path)) for finding in findings]


TAKE_AT = frozenset({"strip-module", "add-module", "unwrap", "rename", "match", "extract", "convert"})
"""Commands with the option --at."""


def shell_line(words: Sequence[str]) -> str:
    """`words` as a shell takes them."""
    return " ".join(map(shell_word, words))


def errors_of(finding: Finding) -> tuple[LoadError, ...]:
    """The load errors that `finding` explains."""
    entry = ENTRIES.get(finding.id)
    return entry.errors if entry is not None else ()


_PLACES = {id: place for place, id in enumerate(ENTRIES)}


def place_of(finding: Finding) -> int:
    """Where its row stands: what a file is comes before what it holds."""
    return _PLACES.get(finding.id, len(_PLACES))


def proposed(path: str, word: str, suffix: str | None = None) -> str:
    """A name for an output beside `path` that does not exist yet: ``model.pth`` and ``cpu`` give ``model.cpu.pth``.

    Args:
        suffix: of the output, where that is known.
    """
    folder, name = folder_beside(path), as_path(path).name
    stem, own = suffixed(path, word)
    suffix = own if suffix is None else suffix
    if word == "safetensors":
        word = "" if not name.endswith(suffix) else "converted"
    middle = f".{word}" if word else ""
    candidate = folder / f"{stem}{middle}{suffix}"
    number = 2
    while not is_url(str(candidate)) and candidate.exists():
        candidate = folder / f"{stem}{middle}{number}{suffix}"
        number += 1
    return str(candidate)


def suffixed(path: str, word: str) -> tuple[str, str]:
    """The name of an output that is made of `path` by what `word` says, without its folder: stem and suffix."""
    name = as_path(path).name
    if name.endswith(".json"):  # an index: the output is a folder, or a file that is called like its shards
        name = as_path(name.removesuffix(".json").partition(".index")[0]).stem
    if word == "safetensors":
        return _split(name)[0], ".safetensors"
    stem, suffix = _split(name)
    many = word in ("plain", "repacked") and as_path(path).is_dir()
    if word in _TORCH and not many and suffix not in (".pth", ".pt", ".bin", ".ckpt", ".pth.tar"):
        suffix = ".pth"
    return stem, suffix


_TORCH = ("weights", "legacy", "zip", "repacked", "plain")
"""Words of outputs that are torch files whatever the input was called."""

_SUFFIXES = (".pth.tar", ".pt.tar", ".index.json")
_PACKED = (".gz", ".bz2", ".xz", ".zst", ".lz4")
"""Suffixes of what is compressed as a whole, which no output of ckptfix is."""


def _split(name: str) -> tuple[str, str]:
    if name.lower().endswith(_PACKED):
        name = as_path(name).stem
    for suffix in _SUFFIXES:
        if name.endswith(suffix):
            return name[: -len(suffix)], suffix
    path = as_path(name)
    return path.stem, path.suffix


class _Fields(dict[str, str]):
    """The fields of a template, made when they are asked for, each as `shown` has it."""

    def __init__(self, path: str, values: dict[str, str], shown: Callable[[str], str]) -> None:
        super().__init__({name: shown(value) for name, value in values.items()})
        self._path = path
        self._shown = shown

    def __missing__(self, name: str) -> str:
        return self._shown(operand(self._path if name == "source" else proposed(self._path, name)))


def operand(path: str) -> str:
    """`path` for a command line; one that begins with a dash cannot be taken for an option."""
    return f"./{path}" if path.startswith("-") else path
