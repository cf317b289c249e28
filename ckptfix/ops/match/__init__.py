"""``ckptfix.match``: a checkpoint's keys renamed to another model's."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from ckptfix import formats
from ckptfix.align import match as matcher
from ckptfix.align.fused import Heads
from ckptfix.align.result import Matching, Skipped
from ckptfix.arguments import typed
from ckptfix.checkpoint import Checkpoint, Plan, Put, address
from ckptfix.errors import CkptfixError, Refused, StrPath, about, file_name, printable
from ckptfix.findings import table
from ckptfix.findings.row import Finding
from ckptfix.io.read import Progress
from ckptfix.io.source import found_as, opened_once
from ckptfix.names.operations import Operation
from ckptfix.names.rulefile import TensorRule
from ckptfix.names.rules import NameRule
from ckptfix.names.slots import Slot
from ckptfix.ops.choose import refuse_damaged
from ckptfix.ops.law.promise import Promise
from ckptfix.ops.match import plan as match_plan
from ckptfix.ops.match.fused import Operations, of_found_rules, with_operations
from ckptfix.ops.match.values import same_values
from ckptfix.ops.quantized import refuse_apart
from ckptfix.ops.rename import run, sites
from ckptfix.ops.target import targets
from ckptfix.ops.writing import (
    Draft,
    How,
    Result,
    carry_out,
    is_folder,
    looked_at,
    plan_edits,
    refuse_destination,
    write_text,
)
from ckptfix.pickles.collector import without_collections
from ckptfix.urls import as_path
from ckptfix.words import plural

Rule = NameRule | TensorRule
"""A line of a rules file."""

By = Literal["structure", "position"]
"""How names are matched."""


@dataclass(frozen=True)
class Found:
    """A matching of a checkpoint to a target, nothing of it written.

    Attributes:
        source, target: the two sides.
        refusals: why it is not carried out; empty if nothing is against it.
        planned: the edits; None where they are refused themselves.
    """

    checkpoint: Checkpoint
    source: targets.Side
    target: targets.Side
    matching: Matching
    planned: match_plan.MatchPlan | None
    refusals: tuple[CkptfixError, ...] = ()
    notes: tuple[str, ...] = field(default=(), repr=False)


@typed
@without_collections
@opened_once()
def match(
    source: StrPath,
    dest: StrPath | None,
    like: StrPath,
    *,
    by: By = "structure",
    at: str | None = None,
    like_at: str | None = None,
    accept_ambiguous: bool = False,
    partial: bool = False,
    reshape: bool = False,
    heads: int | None = None,
    kv_heads: int | None = None,
    allow_import: bool = False,
    force: bool = False,
    keep_old: bool = False,
    dry_run: bool = False,
    in_place: bool = False,
    progress: Progress | None = None,
) -> MatchResult:
    """Write `source` to `dest` with the keys that the model `like` has; values do not change.

    Tensors that one side has in one piece and the other in several are cut and joined, where words and sizes leave one
    way: query, key and value, gate and up, stacked experts; weights of `Conv1D` are transposed.

    Args:
        like: a checkpoint, a file of keys (``keys.json``), or ``module:factory``.
        by: ``"structure"`` (names, shapes, dtypes, neighbours) or ``"position"`` (order of definition).
        at, like_at: addresses of the state dicts, where there are several.
        accept_ambiguous: take the proposed target also where another would do as well.
        partial: rename what has a counterpart; what has none keeps its name, and `exit_code` is 1.
        reshape: pair, and give new shapes to, tensors of equally many elements.
        heads, kv_heads: heads of queries, and of keys and values, where a layout depends on them.
        allow_import: import the module of ``module:factory`` and call the factory, which runs their code.
        force: replace an existing `dest`.
        keep_old: a checkpoint that `force` replaces is kept beside it, as ``DEST.~1~``; see `Result.backup`.
        dry_run: plan, and write nothing; what would be refused is a finding then, and `exit_code` is 1.
        progress: called with bytes done and bytes in all.

    Raises:
        NoMatch: pairs are ambiguous, tensors are left over, or two orders do not go together; `lines` show which.
        KeyConflict: an unchanged key would be the new name of another.
        CkptfixError: as `strip_module`, and as `targets.read` for `like`.
    """
    how = How(force=force, keep_old=keep_old, dry_run=dry_run, in_place=in_place, progress=progress)
    if dest is not None:
        check(source, dest, like, force)
    found = find(
        *(source, like),
        by=by,
        at=at,
        like_at=like_at,
        accept_ambiguous=accept_ambiguous,
        partial=partial,
        reshape=reshape,
        heads=heads,
        kv_heads=kv_heads,
        allow_import=allow_import,
    )
    if dry_run and not in_place:
        return preview(found, "" if dest is None else dest)
    return write(found, dest, how)


def check(source: StrPath, dest: StrPath, like: StrPath, force: bool) -> None:
    """Refuse a destination that could not be written, or is one of the other files, before a long read."""
    others = [path for path in map(file_name, (source, like)) if found_as(path)]
    refuse_destination(dest, others, How(force=force), folder=is_folder(source))


@without_collections
def find(
    source: StrPath,
    like: StrPath,
    *,
    by: By = "structure",
    at: str | None = None,
    like_at: str | None = None,
    accept_ambiguous: bool = False,
    partial: bool = False,
    reshape: bool = False,
    heads: int | None = None,
    kv_heads: int | None = None,
    allow_import: bool = False,
) -> Found:
    """Match `source` to `like`; the arguments are as for `match`."""
    if by not in ("structure", "position"):
        raise Refused(f"no way to match by {by!r}", hint="by structure, or by position")
    _refuse_heads(heads, kv_heads)
    target = targets.read(like, at=like_at, allow_import=allow_import)
    checkpoint = formats.open_checkpoint(source)
    one = targets.of_fitting(checkpoint, target) if at is None else targets.of_checkpoint(checkpoint, at)
    refuse_damaged(checkpoint)
    with about(checkpoint.path):
        proven = same_values(one, target) if by == "structure" else {}
        matching = matcher.match(one.slots, target.slots, by=by, reshape=reshape, proven=proven)
        operations = Operations()
        if by == "structure" and not reshape:
            matching, operations = with_operations(matching, one.slots, target.slots, Heads(heads, kv_heads), proven)
        refusals = list(
            match_plan.refusals(
                *(one, target, matching, operations), accept_ambiguous=accept_ambiguous, partial=partial
            )
        )
        planned = None
        try:
            _refuse_apart(checkpoint, one, matching, operations)
            planned = match_plan.plan(checkpoint, one, matching, operations)
        except CkptfixError as error:
            refusals.append(error)
    for refusal in refusals:
        refusal.path = refusal.path or checkpoint.path
    notes = match_plan.notes(one, target, matching, operations)
    return Found(checkpoint, one, target, matching, planned, tuple(refusals), notes)


def _refuse_apart(
    checkpoint: Checkpoint, side: targets.Side, matching: Matching, operations: Operations
) -> None:
    """Refuse to change tensors of quantized weights other than in name, unless what belongs together changes alike."""
    steps = [(one.old, one.operations) for one in operations.taken]
    reshaped = [((pair.source,), (_reshaped(pair.reshape),)) for pair in matching.pairs if pair.reshape is not None]
    refuse_apart(checkpoint, side.at or "", [*steps, *reshaped])


def _reshaped(shape: Sequence[int]) -> Operation:
    sizes = tuple((size, ()) for size in shape)
    return Operation("reshape", {"from": sizes, "to": sizes})


def _refuse_heads(heads: int | None, kv_heads: int | None) -> None:
    if kv_heads is not None and heads is None:
        raise Refused("heads of keys and values are given, and none of queries", hint="--heads N")
    if heads is not None and (heads < 1 or (kv_heads is not None and (kv_heads < 1 or heads % kv_heads))):
        raise Refused(f"{kv_heads} heads of keys and values do not divide {heads} of queries")


@without_collections
def write(found: Found, dest: StrPath | None, how: How) -> MatchResult:
    """Write what was found to `dest`, or in place.

    Raises:
        NoMatch, KeyConflict: the first of `found.refusals`.
    """
    if found.refusals:
        raise found.refusals[0]
    return _write(found, dest, how)


@without_collections
def preview(found: Found, dest: StrPath = "") -> MatchResult:
    """What was found, and nothing written; without `dest` only the matching, else the plan too."""
    if os.fspath(dest) and not found.refusals:
        return _write(found, dest, How(force=True, dry_run=True))
    return looked_at(_draft(found, Plan(())), found.checkpoint.path, dest)


def write_rules(found: Found, path: StrPath, *, force: bool = False) -> None:
    """Write the learned rules to `path`, for ``rename --map``: lines ``old -> new``, or JSON for ``*.json``.

    Raises:
        Refused: nothing can be planned, or a name that no line can hold; JSON can.
        WouldOverwrite: it exists, and no `force`.
    """
    if found.planned is None:
        raise found.refusals[0]
    rules = found.planned.rules
    names = [rule for rule in rules if isinstance(rule, NameRule)]
    name = os.fspath(path)
    if name.endswith(".json"):
        if found.planned.tensors is not None:
            raise Refused("JSON holds names alone, and these rules change tensors", path=name, hint="name a text file")
        text = json.dumps({rule.old: rule.new for rule in names}, indent=1, ensure_ascii=False) + "\n"
    else:
        odd = next((text for rule in names for text in (rule.old, rule.new) if not _is_word(text)), None)
        if odd is not None:
            raise Refused(f"{odd!r} cannot stand in a line of rules", path=name, hint="give a file called *.json")
        text = "".join(f"{rule}\n" for rule in rules)
        ours, theirs = as_path(found.checkpoint.path).name, as_path(found.target.label).name
        text = f"# {printable(ours)} -> {printable(theirs)}\n{text}"
    write_text(name, text, found.checkpoint.path, force=force)


def _row(rule: Rule) -> dict[str, str | None]:
    if isinstance(rule, NameRule):
        return {"old": rule.old, "new": rule.new, "operations": None}
    assert rule.new is not None
    return {"old": rule.old.text, "new": rule.new.text, "operations": " | ".join(map(str, rule.operations))}


def _is_word(text: str) -> bool:
    return len(text.split()) == 1 and text.split()[0] == text and not text.startswith("#") and text != "->"


def _write(found: Found, dest: StrPath | None, how: How) -> MatchResult:
    planned = found.planned
    assert planned is not None
    puts = {
        address.join(edit.at, name): entry
        for edit in planned.edits
        if isinstance(edit, Put)
        for name, entry in edit.tensors.items()
    }

    def make(checkpoint: Checkpoint, dest: str) -> Draft[MatchResult]:
        if planned.tensors is not None:
            if how.in_place:
                message = "an edit in place changes names alone, and this one changes tensors"
                raise Refused(message, hint="name an output")
            at = found.source.at or ""
            with of_found_rules(checkpoint.path):
                done = run.transformed(
                    checkpoint, planned.tensors, dest, renames=sites.rename(checkpoint, at=at), at=at
                )
            draft = _draft(found, done.plan, done.promise)
            return replace(
                draft,
                result=partial(draft.result, references=done.references),
                lines=(*draft.lines, *run.lines_of(done)[1:]),
                findings=(*draft.findings, *(row for row in done.findings if row.id != "unused-rule")),
            )
        plan = plan_edits(checkpoint, planned.edits, dest)
        return _draft(found, plan, Promise(names_stay=False, edited=checkpoint, puts=puts))

    return carry_out(found.checkpoint, dest, make, how)


def _draft(found: Found, plan: Plan, promise: Promise | None = None) -> Draft[MatchResult]:
    planned = found.planned
    return Draft(
        result=partial(
            MatchResult,
            matching=found.matching,
            slots={slot.name: slot for slot in found.source.slots},
            at=found.source.at or "",
            names=planned.names if planned else {},
            rules=planned.rules if planned else found.matching.rules,
            notes=found.notes,
            references=planned.references if planned else 0,
        ),
        format=found.checkpoint.format,
        plan=plan,
        promise=promise or Promise(),
        lines=_lines(found),
        findings=_findings(found),
        read=() if found.target.checkpoint is None else found.target.checkpoint.files,
        exit_code=1 if found.matching.left or found.matching.missing or found.refusals else 0,
    )


def _findings(found: Found) -> tuple[Finding, ...]:
    matching = found.matching
    findings = [table.found("refused", refusal.message) for refusal in found.refusals]
    if not found.refusals:
        for label, names in (("IN", matching.left), ("TARGET", matching.missing)):
            findings += [table.found("no-counterpart", f"only in {label}", where=name) for name in names]
    if found.planned is not None:
        findings += found.planned.findings
    return (*findings, *(table.found("note", note) for note in found.notes))


def _lines(found: Found) -> tuple[str, ...]:
    matching, planned = found.matching, found.planned
    paired = len({pair.source for pair in matching.pairs})
    line = f"matched {paired:,} of {len(found.source.slots):,} keys by {matching.by}"
    skipped = len(matching.skipped_source) + len(matching.skipped_target)
    if skipped:
        line += f"; {skipped:,} passed over by rule"
    if planned is not None:
        said = f"; {len(planned.names):,} renamed" if planned.names else "; all have their names already"
        line += "" if planned.tensors is not None and not planned.names else said
        if planned.references:
            line += f" (and {plural(planned.references, 'related name')})"
        reshaped = sum(pair.reshape is not None for pair in matching.pairs)
        changed = {pair.target for pair in matching.pairs if pair.operation}
        line += f"; {plural(len(changed), 'tensor')} of TARGET made by rule" if changed else ""
        line += f"; {reshaped:,} reshaped" if reshaped else ""
    rules: Sequence[Rule] = planned.rules if planned else matching.rules
    return (line, *(f"  {rule}" for rule in rules), *(f"note: {note}" for note in found.notes))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class MatchResult(Result):
    """A matching, and the renames that it led to.

    Attributes:
        matching: pairs, and what is left on both sides.
        slots: shape and dtype of the source's tensors by name.
        at: address of the mapping that was matched.
        names: old -> new for every key that changed.
        rules: the same in few lines, for `rename`'s map.
        notes: what else a person should know, a sentence each.
        references: how many names beside the keys followed them.
    """

    matching: Matching
    slots: Mapping[str, Slot] = field(default_factory=dict, repr=False)
    at: str = ""
    names: Mapping[str, str] = field(default_factory=dict, repr=False)
    rules: tuple[Rule, ...] = ()
    notes: tuple[str, ...] = ()
    references: int = 0

    def _details(self) -> dict[str, Any]:
        matching = self.matching
        pairs = [
            {
                "source": pair.source,
                "target": pair.target,
                "confidence": pair.confidence,
                "reason": pair.why,
                "instead": list(pair.instead),
                "reshape": pair.reshape,
                "operation": pair.operation or None,
                "shape": self.slots[pair.source].shape,
                "dtype": self.slots[pair.source].dtype,
            }
            for pair in matching.pairs
        ]
        return {
            "by": matching.by,
            "complete": matching.complete,
            "pairs": pairs,
            "rules": list(map(_row, self.rules)),
            "only_in_source": list(matching.left),
            "only_in_target": list(matching.missing),
            "skipped_in_source": _rows(matching.skipped_source),
            "skipped_in_target": _rows(matching.skipped_target),
            "changes": [{"at": self.at, "old": old, "new": new} for old, new in self.names.items()],
            "notes": list(self.notes),
            "references": self.references,
        }


def _rows(skipped: Sequence[Skipped]) -> list[dict[str, str]]:
    return [{"name": row.name, "rule": row.rule} for row in skipped]
