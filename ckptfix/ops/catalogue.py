"""The one table of findings: every id that ckptfix reports, what it means, and the command that mends it.

An id never changes its meaning. A row says how serious it is when nothing else is known of it, which rows of the
catalogue of load errors it explains, and what to do: a command of ckptfix, or an instruction in words. The rows stand
in three modules, by what they are about; `ENTRIES` joins them.
"""

from __future__ import annotations

from pathlib import Path

from ckptfix.checkpoint import Finding
from ckptfix.commands import quoted, word
from ckptfix.ops.catalogue_containers import CONTAINERS
from ckptfix.ops.catalogue_contents import CONTENTS
from ckptfix.ops.catalogue_row import Entry, Severity
from ckptfix.ops.catalogue_verbs import VERBS

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
) -> Finding:
    """A finding of the row `id`, with the row's title and severity where nothing else is given.

    Args:
        fix: a remedy in place of the row's, with the same fields; ``""`` for none.
    """
    entry = ENTRIES[id]
    return Finding(id, severity or entry.severity, where, message or entry.title, offset, fix)


def remedy(finding: Finding, path: str, **values: str) -> str | None:
    """What to do about `finding` in the file `path`: a command line for a shell, or words; None for nothing.

    ``{source}`` in the template is the file; ``{repaired}``, ``{cpu}`` and so on are free names beside it;
    ``{at}`` is where the finding is; other fields come from `values`.
    """
    entry = ENTRIES.get(finding.id)
    template = finding.fix if finding.fix is not None else entry.fix if entry else None
    if not template:
        return None
    fields = _Fields(path, {"at": finding.where, **values})
    return template.format_map(fields) if "{" in template else template


def errors_of(finding: Finding) -> tuple[int, ...]:
    """Numbers of the load errors that `finding` explains."""
    entry = ENTRIES.get(finding.id)
    return entry.errors if entry is not None else ()


_PLACES = {id: place for place, id in enumerate(ENTRIES)}


def place_of(finding: Finding) -> int:
    """Where its row stands: what a file is comes before what it holds."""
    return _PLACES.get(finding.id, len(_PLACES))


def proposed(path: str, word: str) -> str:
    """A name for an output beside `path` that does not exist yet: ``model.pth`` and ``cpu`` give ``model.cpu.pth``."""
    folder, name = Path(path).parent, Path(path).name
    if word == "safetensors":
        stem, suffix = _split(name)[0], ".safetensors"
        word = "" if not name.endswith(suffix) else "converted"
    else:
        stem, suffix = _split(name)
    if word in _TORCH and suffix not in (".pth", ".pt", ".bin", ".ckpt", ".pth.tar"):
        suffix = ".pth"
    middle = f".{word}" if word else ""
    candidate = folder / f"{stem}{middle}{suffix}"
    number = 2
    while candidate.exists():
        candidate = folder / f"{stem}{middle}{number}{suffix}"
        number += 1
    return str(candidate)


_TORCH = ("weights", "legacy", "zip", "repacked", "plain")
"""Words of outputs that are torch files whatever the input was called."""

_SUFFIXES = (".pth.tar", ".pt.tar", ".index.json", ".tar.gz")


def _split(name: str) -> tuple[str, str]:
    for suffix in _SUFFIXES:
        if name.endswith(suffix):
            return name[: -len(suffix)], suffix
    path = Path(name)
    return path.stem, path.suffix


class _Fields(dict[str, str]):
    """The fields of a template, quoted for a shell, made when they are asked for."""

    def __init__(self, path: str, values: dict[str, str]) -> None:
        super().__init__({name: word(value) for name, value in values.items()})
        self._path = path

    def __missing__(self, name: str) -> str:
        if name == "source":
            return quoted(self._path)
        return quoted(proposed(self._path, name))

