"""What the writing verbs return: the plan that was written, and what it changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ckptfix.checkpoint import Finding, Plan
from ckptfix.durable import kept_line
from ckptfix.errors import printable
from ckptfix.ops.law_promise import Account
from ckptfix.ops.match import Matching, Slot
from ckptfix.ops.name_rules import NameRule
from ckptfix.ops.rename import Change


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Result:
    """What a writing verb did, or would do.

    Attributes:
        source, dest: the files.
        format: of `dest`.
        plan: what was written.
        written: False after a dry run.
        backup: name under which the checkpoint that `dest` replaced is kept, where that was asked for.
        lines: one or two sentences for a person; warnings and errors among the findings are not repeated there.
        findings: what was noticed on the way.
        exit_code: 0, or 3 after named losses.
        account: how the tensors of the input fared, counted from the plan.
    """

    source: str
    dest: str
    format: str
    plan: Plan = field(repr=False)
    written: bool
    lines: tuple[str, ...]
    findings: tuple[Finding, ...] = ()
    exit_code: int = 0
    backup: str | None = None
    account: Account = field(default_factory=Account)

    def __str__(self) -> str:
        """What the command prints: what was done, the old file's new name, warnings and losses, each on a line."""
        lines = [*self.lines]
        if self.backup is not None:
            lines.append(kept_line(self.dest, self.backup))
        for finding in self.findings:
            if finding.severity != "info":
                parts = (finding.severity, finding.where, finding.message)
                lines.append(": ".join(part for part in parts if part))
        return "\n".join(map(printable, lines))

    def __repr__(self) -> str:
        done = "written" if self.written else "not written"
        return f"<{type(self).__name__}: {self.source!r} to {self.dest!r}, {done}, exit code {self.exit_code}>"

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return {
            "source": self.source,
            "dest": self.dest,
            "format": self.format,
            "written": self.written,
            "backup": self.backup,
            "nbytes": self.plan.nbytes,
            "summary": list(self.lines),
            "findings": [asdict(finding) for finding in self.findings],
            "account": asdict(self.account),
            **self._details(),
        }

    def _details(self) -> dict[str, Any]:
        return {}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RenameResult(Result):
    """`changes` are the keys of state dicts; `references` counts the other names that followed them."""

    changes: tuple[Change, ...] = ()
    references: int = 0

    def _details(self) -> dict[str, Any]:
        return {"changes": [asdict(change) for change in self.changes], "references": self.references}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RelocateResult(Result):
    """`moved`: (from, to) -> how many places; `kept`: location -> how many did not move."""

    moved: Mapping[tuple[str, str], int] = field(default_factory=dict)
    kept: Mapping[str, int] = field(default_factory=dict)

    def _details(self) -> dict[str, Any]:
        rows = [{"from": old, "to": new, "places": count} for (old, new), count in self.moved.items()]
        return {"moved": rows, "kept": dict(self.kept)}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ConvertResult(Result):
    """`at` is the state dict that was taken, None for the whole object; `left` is what the output lacks."""

    at: str | None = None
    tensors: int = 0
    left: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()

    def _details(self) -> dict[str, Any]:
        return {"at": self.at, "tensors": self.tensors, "left_behind": list(self.left), "lost": list(self.lost)}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class MatchResult(Result):
    """A matching, and the renames that it led to.

    Attributes:
        matching: pairs, and what is left on both sides.
        slots: shape and dtype of the source's tensors by name.
        names: old -> new for every key that changed.
        rules: the same in few lines, for `rename`'s map.
        notes: what else a person should know, a sentence each.
        references: how many names beside the keys followed them.
    """

    matching: Matching
    slots: Mapping[str, Slot] = field(default_factory=dict, repr=False)
    names: Mapping[str, str] = field(default_factory=dict, repr=False)
    rules: tuple[NameRule, ...] = ()
    notes: tuple[str, ...] = ()
    references: int = 0

    def _details(self) -> dict[str, Any]:
        matching = self.matching
        pairs = [
            {**asdict(pair), "shape": self.slots[pair.source].shape, "dtype": self.slots[pair.source].dtype}
            for pair in matching.pairs
        ]
        return {
            "by": matching.by,
            "complete": matching.complete,
            "pairs": pairs,
            "rules": [{"old": rule.old, "new": rule.new} for rule in self.rules],
            "only_in_source": list(matching.left),
            "only_in_target": list(matching.missing),
            "skipped_in_source": [asdict(skipped) for skipped in matching.skipped_source],
            "skipped_in_target": [asdict(skipped) for skipped in matching.skipped_target],
            "names": dict(self.names),
            "notes": list(self.notes),
            "references": self.references,
        }
