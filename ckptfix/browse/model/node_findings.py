"""The findings of `doctor` (without reading tensors), on the nodes that they concern."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field
from typing import TYPE_CHECKING

from ckptfix.browse.model.contents import Contents
from ckptfix.dataclass import dataclass
from ckptfix.errors import CkptfixError
from ckptfix.findings.row import Finding, Severity
from ckptfix.findings.steps import shell_line
from ckptfix.findings.table import RANK
from ckptfix.io.read import Progress

if TYPE_CHECKING:
    from ckptfix.ops.doctor.report import Diagnosis


@dataclass(frozen=True, slots=True)
class MarkedFinding:
    """A finding, and the address that it concerns; None if it concerns the whole file."""

    finding: Finding
    address: str | None


@dataclass(frozen=True, slots=True)
class Marks:
    """The findings about a file.

    Attributes:
        diagnosis: the full result of `doctor`; None before it has run.
        rows: the findings, worst first.
        severities: address -> the worst severity at or below it; notes do not count.
    """

    diagnosis: Diagnosis | None = None
    rows: tuple[MarkedFinding, ...] = ()
    severities: dict[str, Severity] = field(default_factory=dict)

    def at(self, addresses: Iterable[str]) -> list[Finding]:
        """Return the findings about exactly these addresses."""
        wanted = set(addresses)
        return [row.finding for row in self.rows if row.address in wanted]

    def severity(self, addresses: Iterable[str]) -> Severity | None:
        """Return the worst severity at or below any of these addresses."""
        found = [self.severities[address] for address in addresses if address in self.severities]
        return min(found, key=RANK.__getitem__, default=None)

    @property
    def fix(self) -> str | None:
        """The command that fixes everything."""
        done = self.diagnosis
        return shell_line(done.fix) if done is not None and done.fix is not None else None


def of_contents(contents: Contents, progress: Progress) -> Marks:
    """Return the findings about an open checkpoint.

    Raises:
        CkptfixError: the file can no longer be read.
    """
    from ckptfix.ops.doctor.examine import examine  # importing it takes as long as everything else together

    progress(0, 0)
    contents.refuse_changed()
    diagnosis = examine(contents.path, fast=True, checkpoint=contents.checkpoint)
    known: dict[str, str] = {}
    for item in contents.items:
        entry = item.entry
        known[item.name] = item.name
        if entry is not None:
            known.setdefault(entry.name, item.name)
            if entry.storage is not None:
                known.setdefault(f"data/{entry.storage.key}", item.name)
                known.setdefault(entry.storage.key, item.name)
    return _marks(diagnosis, known)


def of_path(path: str, progress: Progress) -> Marks:
    """Return the findings about a file that cannot be opened."""
    from ckptfix.ops.doctor import doctor

    progress(0, 0)
    try:
        return _marks(doctor(path, fast=True), {})
    except CkptfixError:
        return Marks()


def _marks(diagnosis: Diagnosis, known: dict[str, str]) -> Marks:
    inside = _prefixes(known.values())
    rows = tuple(MarkedFinding(finding, _address(finding.where, known, inside)) for finding in diagnosis.findings)
    severities: dict[str, Severity] = {}
    for row in rows:
        severity = row.finding.severity
        if severity == "info":
            continue
        for place in ("", *(() if row.address is None else (row.address, *_above(row.address)))):
            if place not in severities or RANK[severity] < RANK[severities[place]]:
                severities[place] = severity
    return Marks(diagnosis, rows, severities)


def _address(where: str, known: dict[str, str], inside: set[str]) -> str | None:
    """Return the address that a finding concerns: a tensor, a mapping, a module, or the tensor stored in a record."""
    if not where:
        return None
    if where in known:
        return known[where]
    if where in inside:
        return where
    at = where.rfind("data/")
    return known.get(where[at:]) if at >= 0 else None


def _above(address: str) -> list[str]:
    return [address[:end] for end, char in enumerate(address) if char in "/."][-200:]


def _prefixes(names: Iterable[str]) -> set[str]:
    found: set[str] = set()
    for name in names:
        end = name.rfind("/")
        while end > 0 and name[:end] not in found:
            found.add(name[:end])
            end = name.rfind("/", 0, end)
    return found
