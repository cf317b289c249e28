"""Grouping of findings with one cause: thirty classes that weights_only=True refuses are read and fixed as one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ckptfix.dataclass import dataclass
from ckptfix.findings.row import Finding, Severity
from ckptfix.findings.table import Remedy
from ckptfix.words import some

TOLD = "message"
"""The subject of findings that come from the message."""

BESIDE = "beside"
"""The subject of findings that the message contradicts, or that its own command includes."""

OF_THE_FORMAT = frozenset({"needs-torch", "no-checksums", "no-mmap"})
"""Notes that apply to nearly every file of a format, and tell nothing about this one."""

_EXAMPLES = frozenset({"one-rank", "optimizer-state"})
"""Findings whose place is only the first of many."""

_ABOUT = {
    "foreign-global": "torch.load refuses this file: it contains objects that weights_only=True does not allow ({})",
    "tensor-class": "torch.load needs the library of these tensors to be imported first: {}",
    "dangerous-global": "the pickle contains {}, which can run code or open files",
}
"""id -> a sentence about everything that such findings name (`Finding.about`)."""


@dataclass(frozen=True, slots=True)
class FindingGroup:
    """Findings of one id and severity, in their order, with the first advice that any of them has.

    Attributes:
        advice: an instruction in words; None where commands help, or nothing does.
    """

    findings: tuple[Finding, ...]
    advice: str | None = None

    @property
    def id(self) -> str:
        return self.findings[0].id

    @property
    def severity(self) -> Severity:
        return self.findings[0].severity

    def text(self, most: int = 4) -> str:
        """Return one message for all findings; it lists the first `most` names and places, 0 for all."""
        first = self.findings[0]
        names = list(dict.fromkeys(finding.about for finding in self.findings if finding.about))
        runs = [finding.runs for finding in self.findings if finding.runs]
        if runs:
            idle = [name for name in names if not any(row.runs and row.about == name for row in self.findings)]
            more = f"; it also contains {some(idle, most)}, which can run code or open files" if idle else ""
            return f"loading this file runs {some(runs, most)}{more}"
        if self.id in _ABOUT and names:
            places = list(dict.fromkeys(finding.where for finding in self.findings))
            other = "" if places == [first.where] and _of_pickle(first.where) else f", in {some(places, most)}"
            return _ABOUT[self.id].format(some(names, most)) + other
        text = placed(first)
        if len(self.findings) == 1:
            return text
        others = [finding.where for finding in self.findings[1:] if finding.where]
        alike = len(others) < len(self.findings) - 1 or first.where in others
        return f"{text} (and {len(self.findings) - 1:,} more)" if alike else f"{text}; also at {some(others, most)}"


def grouped(findings: Sequence[Finding], remedies: Iterable[Remedy]) -> list[FindingGroup]:
    """Group the findings that belong together, in the order of the first of each group."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    advice: dict[tuple[str, str], str | None] = {}
    for finding, remedy in zip(findings, remedies, strict=True):
        key = finding.id, finding.severity
        groups.setdefault(key, []).append(finding)
        advice[key] = advice.get(key) or remedy.advice
    return [FindingGroup(tuple(rows), advice[key]) for key, rows in groups.items()]


def placed(finding: Finding) -> str:
    """Return the message, preceded by the place unless the message or the pickle implies it."""
    plain = finding.id in _EXAMPLES or finding.where in finding.message or _of_pickle(finding.where)
    return finding.message if plain else f"{finding.where}: {finding.message}"


def _of_pickle(where: str) -> bool:
    """Return whether `where` is the checkpoint's pickle as a whole, which adds nothing to a message."""
    return where in ("", "pickle") or where.endswith("data.pkl")
