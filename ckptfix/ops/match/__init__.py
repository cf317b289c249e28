"""``ckptfix.match``: a checkpoint's keys renamed to fit another model."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from typing import Any, Literal

from ckptfix import formats
from ckptfix.align import depths
from ckptfix.align import match as matcher
from ckptfix.align.fused import Heads
from ckptfix.align.result import Matching, Skipped
from ckptfix.arguments import Model, checks_types, takes_model
from ckptfix.checkpoint import Checkpoint, Plan, Put, address
from ckptfix.dataclass import dataclass
from ckptfix.errors import CkptfixError, Refused, StrPath, WouldOverwrite, about, file_name, printable
from ckptfix.findings import table
from ckptfix.findings.row import Finding
from ckptfix.formats import format_of
from ckptfix.io.read import Progress
from ckptfix.io.source import found_as, shares_open_files
from ckptfix.io.virtual_files import SplicedFile
from ckptfix.io.write_log import recorded
from ckptfix.names.rulefile import TensorRule
from ckptfix.names.rules import NameRule
from ckptfix.names.slots import Slot
from ckptfix.ops.any_source import takes_any_source
from ckptfix.ops.audit.promise import Promise
from ckptfix.ops.choose import refuse_damaged
from ckptfix.ops.match import layouts, running
from ckptfix.ops.match import plan as match_plan
from ckptfix.ops.match import verify as verifier
from ckptfix.ops.match.fused import Operations, of_found_rules, with_operations
from ckptfix.ops.match.values import same_values
from ckptfix.ops.quantized import config_beside, refuse_apart, refuse_lone
from ckptfix.ops.rename import run, sites
from ckptfix.ops.target import targets
from ckptfix.ops.writing import (
    Draft,
    Result,
    WriteOptions,
    beside_model,
    carry_out,
    is_folder,
    looked_at,
    plan_edits,
    refuse_destination,
    write_text,
)
from ckptfix.pickles.collector import gc_paused
from ckptfix.urls import as_path
from ckptfix.words import plural, some

Rule = NameRule | TensorRule
"""A line of a rules file."""

By = Literal["structure", "position"]
"""The two ways to match keys."""


@dataclass(frozen=True)
class MatchProposal:
    """A matching of a checkpoint to a target, before anything is written.

    Attributes:
        source, target: the two sides.
        refusals: reasons not to write it, if any.
        planned: the edits; None if they are refused themselves.
        drops: names of the source that the target lacks are left out.
        verified: both models, run on one input, gave equal outputs.
        named: the user's name of the checkpoint, which may be that of its folder.
    """

    checkpoint: Checkpoint
    source: targets.ExpectedModel
    target: targets.ExpectedModel
    matching: Matching
    planned: match_plan.MatchPlan | None
    refusals: tuple[CkptfixError, ...] = ()
    notes: tuple[str, ...] = field(default=(), repr=False)
    drops: bool = False
    verified: bool = False
    named: StrPath | None = None

    @property
    def left(self) -> tuple[str, ...]:
        """The names of the source without a target that stay in the output."""
        return () if self.drops else self.matching.left


@checks_types
@takes_model
@gc_paused
@shares_open_files()
@takes_any_source()
def match(
    source: StrPath,
    dest: StrPath | None,
    like: StrPath | Model,
    *,
    by: By = "structure",
    at: str | None = None,
    like_at: str | None = None,
    accept_ambiguous: bool = False,
    partial: bool = False,
    drop_unexpected: bool = False,
    reshape: bool = False,
    heads: int | None = None,
    kv_heads: int | None = None,
    blocks: str | None = None,
    verify: bool = False,
    source_model: str | None = None,
    inputs: StrPath | None = None,
    allow_import: bool = False,
    force: bool = False,
    keep_old: bool = False,
    dry_run: bool = False,
    in_place: bool = False,
    progress: Progress | None = None,
) -> MatchResult:
    """Write `source` to `dest` with the keys of the model `like`; values do not change.

    A tensor that one side has whole and the other in parts is split or joined if words and sizes leave only one way:
    query, key and value, gate and up, stacked experts. Weights of `Conv1D` are transposed.

    Args:
        like: a checkpoint, a file of keys (``keys.json``), or ``module:factory``.
        by: ``"structure"`` (keys, shapes, dtypes, neighbors) or ``"position"`` (definition order).
        at, like_at: addresses of the state dicts, if there are several.
        accept_ambiguous: accept the proposed target even if another would fit equally well.
        partial: rename the tensors that have a counterpart; the others keep their keys, and `exit_code` is 1.
        drop_unexpected: leave out keys of `source` that the model lacks; they are listed.
        reshape: pair tensors with the same number of elements, and reshape them.
        heads, kv_heads: number of query heads, and of key/value heads, for layouts that depend on them.
        blocks: where a stack of `source` has more blocks than that of `like`, the blocks to keep: ``"first"``,
            ``"last"``, ``"every-other"``, or numbers as in ``"0,2,4"``; the others are left out and listed.
        verify: run both models with the same random weights, and accept only a matching with equal outputs. This
            settles pairs that are ambiguous, the order of gates and heads, and transposes. `like` and `source_model`
            are factories then, and `allow_import` is set.
        source_model: ``module:factory`` of the model that `source` was saved from.
        inputs: input of both models: a file that torch.save wrote, or ``module:factory``; one tensor, a tuple, or a
            mapping of arguments. By default it follows from the first layer of the model.
        allow_import: import the module of ``module:factory`` and call the factory, which runs their code.
        force: replace an existing `dest`.
        keep_old: keep the checkpoint that `force` replaces beside it, as ``DEST.~1~``; see `Result.backup`.
        dry_run: plan, and write nothing; reasons to refuse are then findings, and `exit_code` is 1.
        progress: called with the bytes done and the total bytes.

    Raises:
        NoMatch: pairs are ambiguous, tensors are left over, or two orders do not match; `lines` lists them.
        KeyConflict: an unchanged key would also be another key's new name.
        CkptfixError: as `strip_module`, and as `targets.read` for `like`.
    """
    how = WriteOptions(force=force, keep_old=keep_old, dry_run=dry_run, in_place=in_place, progress=progress)
    name = file_name(like, "the model")
    if dest is not None:
        check(source, dest, name, force)
    found = find(
        *(source, name),
        by=by,
        at=at,
        like_at=like_at,
        accept_ambiguous=accept_ambiguous,
        partial=partial,
        drop_unexpected=drop_unexpected,
        reshape=reshape,
        heads=heads,
        kv_heads=kv_heads,
        blocks=blocks,
        verify=verify,
        source_model=source_model,
        inputs=inputs,
        allow_import=allow_import,
    )
    origin = source.origin if isinstance(source, SplicedFile) else ""
    if origin and found.refusals:
        # One command of several: its refusal ends them all, and the lines of it say what is missing.
        found.refusals[0].path = origin
        raise found.refusals[0]
    if dry_run and not in_place:
        return preview(found, "" if dest is None else dest)
    return write(found, dest, how)


def check(source: StrPath, dest: StrPath, like: StrPath, force: bool) -> None:
    """Refuse a destination that cannot be written, or is one of the other files, before a long read."""
    folder = is_folder(source) or beside_model(source, formats.located(source), dest) is not None
    ours, theirs = ([path] if found_as(path) else [] for path in map(file_name, (source, like)))
    refuse_destination(dest, ours, WriteOptions(force=force), folder=folder)
    try:
        refuse_destination(dest, theirs, WriteOptions(force=True), folder=folder)
    except WouldOverwrite as error:
        raise WouldOverwrite(error.message.replace("input", "target"), path=error.path, hint=error.hint) from None


@gc_paused
def find(
    source: StrPath,
    like: StrPath,
    *,
    by: By = "structure",
    at: str | None = None,
    like_at: str | None = None,
    accept_ambiguous: bool = False,
    partial: bool = False,
    drop_unexpected: bool = False,
    reshape: bool = False,
    heads: int | None = None,
    kv_heads: int | None = None,
    blocks: str | None = None,
    verify: bool = False,
    source_model: str | None = None,
    inputs: StrPath | None = None,
    allow_import: bool = False,
    reported: bool = False,
) -> MatchProposal:
    """Match `source` to `like`; the arguments are those of `match`.

    Args:
        reported: the pairs are shown, so no hint says how to see them.
    """
    if by not in ("structure", "position"):
        raise Refused(f"cannot match by {by!r}", hint="match by structure or by position")
    _refuse_heads(heads, kv_heads)
    proves = verify or source_model is not None
    if blocks is not None and proves:
        message = "a model with fewer blocks gives other outputs, so nothing can be verified"
        raise Refused(message, hint="leave out --blocks or --verify")
    # Before the keys of TARGET are read, on the meta device: what a factory imports there would make tensors there.
    both = models(source_model or "", os.fspath(like), inputs, allow_import) if proves else None
    target = targets.read(like, at=like_at, allow_import=allow_import)
    checkpoint = formats.open_checkpoint(source)
    one = targets.of_fitting(checkpoint, target) if at is None else targets.of_checkpoint(checkpoint, at)
    refuse_damaged(checkpoint)
    with about(checkpoint.path):

        def fit(mine: targets.ExpectedModel, count: Heads | None = None) -> tuple[Matching, Operations]:
            nonlocal one, target
            proven = same_values(mine, target) if by == "structure" else {}
            configs = _config(mine), _config(target)
            # Names are matched next, and tensors would need memory until that is done.
            target, one, mine = target.without_values(), one.without_entries(), mine.without_entries()
            checkpoint.forget_entries()
            count = count or Heads(heads, kv_heads)
            return aligned(mine, target, proven, by=by, reshape=reshape, heads=count, blocks=blocks, configs=configs)

        by_layers = in_torchs_layout(checkpoint, one, fit) if by == "structure" and blocks is None else None
        matching, operations = by_layers or fit(one)
        verdict = None
        if both is not None:
            again = None if by_layers else lambda count: fit(one, count)
            verdict = verifier.prove(both, matching, operations, one.slots, converted, again)
            matching, operations = verdict.matching, verdict.operations
        refusals = list(
            match_plan.refusals(
                *(one, target, matching, operations),
                accept_ambiguous=accept_ambiguous,
                partial=partial,
                drop_unexpected=drop_unexpected,
                reshape=reshape,
                heads=heads is not None,
                reported=reported,
                settles=None if verdict is None else _settling(verdict, inputs),
            )
        )
        if verdict is not None and not verdict.equal:
            refusals.insert(0, verifier.refusal(verdict))
            if refusals[0].hint is None and inputs is None:
                refusals[0].hint = running.GIVE_INPUT
        elif verdict is not None and verdict.unproved and refusals:
            refusals.insert(0, verifier.unproved(verdict, _settling(verdict, inputs)))
        planned = None
        try:
            refuse_codes(checkpoint, one, matching, operations, drop_unexpected=drop_unexpected)
            ties = match_plan.second_keys(target, matching)
            planned = match_plan.plan(
                checkpoint, one, matching, operations, ties=ties, drop_unexpected=drop_unexpected
            )
        except CkptfixError as error:
            refusals.append(error)
    for refusal in refusals:
        refusal.path = refusal.path or checkpoint.path
    notes = match_plan.notes(one, target, matching, operations, drop_unexpected=drop_unexpected)
    if planned is not None and planned.unsaid:
        old, new = next(iter(planned.unsaid.items()))
        notes = (*notes, f"{plural(len(planned.unsaid), 'key')} that no rule can hold: {_pair(old, new)}")
    verified = verdict is not None and verdict.equal
    if verdict is not None and verified:
        notes = (*verdict.sentences, *notes)
    return MatchProposal(
        *(checkpoint, one, target, matching, planned, tuple(refusals), notes, drop_unexpected, verified), named=source
    )


def _settling(verdict: verifier.Verdict, inputs: StrPath | None) -> str:
    """Return what settles pairs that stayed open although both models have run."""
    line = "a line of a rules file can state it (`ckptfix help rules`)"
    if not verdict.unproved:
        return line
    given = "--input" if inputs is None else "an input"
    return f"{given} with more tokens, a state or other values may reach these tensors; or {line}"


def in_torchs_layout(
    checkpoint: Checkpoint,
    one: targets.ExpectedModel,
    fit: Callable[[targets.ExpectedModel], tuple[Matching, Operations]],
) -> tuple[Matching, Operations] | None:
    """Match a file of another framework after the table of its layers.

    Args:
        fit: matches the tensors to those of the target.

    Returns:
        None if there is no such table.

    Raises:
        Refused: the table or the matching cannot say how a tensor is stored.
    """
    found = layouts.turned(checkpoint, one.at)
    if found is None:
        return None
    matching, operations = fit(found.side)
    return layouts.of_original(found, matching, operations)


def models(source: str, target: str, inputs: StrPath | None, allow_import: bool) -> running.Models:
    """Build both models and their input.

    Raises:
        Refused: one of them is no ``module:factory``, or `allow_import` is not set.
    """
    if not source:
        hint = "add --source module:factory, the model that IN was saved from"
        raise Refused("verifying runs the model of IN too, which is not named", hint=hint)
    for text in (source, target):
        if not targets.is_factory(text):
            hint = "pass package.module:function, a callable without arguments that returns the model"
            raise Refused(f"verifying runs both models, and {text!r} is not a module:factory", hint=hint)
    if not allow_import:
        raise Refused("verifying runs the code of both models", hint="add --allow-import to allow it")
    from ckptfix.ops.target.model import make

    given: object = None
    if inputs is not None:
        text = file_name(inputs)
        given = make(text) if targets.is_factory(text) else running.read_input(text)
    return running.models(make(source), make(target), given)


def converted(file: str, matching: Matching, operations: Operations) -> Mapping[str, Any]:
    """Return the weights of a file under the names of the target, written as a matching of it is."""
    import torch

    checkpoint = formats.open_checkpoint(file)
    one = targets.of_checkpoint(checkpoint, "")
    planned = match_plan.plan(checkpoint, one, matching, operations, drop_unexpected=True)
    found = MatchProposal(checkpoint, one, one, matching, planned, drops=True)
    with recorded():  # an error of the verb does not concern this temporary file
        done = _write(found, f"{file}.out", WriteOptions(force=True))
    made: Mapping[str, Any] = torch.load(done.dest, weights_only=True)
    return made


def _config(side: targets.ExpectedModel) -> Mapping[str, object]:
    """Return the settings in config.json beside the file of a side, if it exists."""
    return {} if side.checkpoint is None else config_beside(side.checkpoint)


def aligned(
    one: targets.ExpectedModel,
    target: targets.ExpectedModel,
    proven: Mapping[str, str],
    *,
    by: By = "structure",
    reshape: bool = False,
    heads: Heads | None = None,
    blocks: str | None = None,
    configs: tuple[Mapping[str, object], Mapping[str, object]] | None = None,
) -> tuple[Matching, Operations]:
    """Match the tensors of `one` to those of `target`, and find the operations that further tensors need.

    Args:
        proven: pairs of tensors that have equal bytes.
        blocks: as for `match`.
        configs: config.json beside each file; None to read them.
    """
    chosen = None if blocks is None else depths.choose(one.slots, target.slots, blocks)
    slots: Sequence[Slot] = one.slots
    if chosen is not None:
        slots = chosen.slots
        proven = {new: proven[old] for new, old in chosen.names.items() if old in proven}
    operations = Operations()
    matching = matcher.match(slots, target.slots, by=by, reshape=reshape, proven=proven)
    if by == "structure":
        matching, operations = with_operations(
            *(matching, slots, target.slots, heads or Heads(), proven),
            reshape=reshape,
            configs=configs or (_config(one), _config(target)),
        )
    missing = {slot.name: slot.shape for slot in target.slots if slot.name in matching.missing}
    left = {slot.name: slot.shape for slot in slots if slot.name in matching.left}
    unfit = tuple(name for name, shape in left.items() if missing.get(name, shape) != shape)
    matching = replace(matching, unfit=unfit)
    if chosen is None:
        return matching, operations
    return chosen.restored(matching), replace(operations, taken=chosen.restored_tensors(operations.taken))


def refuse_codes(
    checkpoint: Checkpoint,
    side: targets.ExpectedModel,
    matching: Matching,
    operations: Operations,
    *,
    drop_unexpected: bool = False,
) -> None:
    """Refuse to change quantized weights except in name, unless codes and companions change in the same way."""
    if drop_unexpected:
        refuse_lone(checkpoint, side.at or "", match_plan.unexpected(side.slots, matching))
    steps = [(one.old, one.operations) for one in operations.taken]
    shapes = {slot.name: slot.shape for slot in side.slots}
    reshaped = [
        ((pair.source,), (match_plan.reshape(shapes[pair.source], pair.reshape),))
        for pair in matching.pairs
        if pair.reshape is not None
    ]
    refuse_apart(checkpoint, side.at or "", [*steps, *reshaped])


def _refuse_heads(heads: int | None, kv_heads: int | None) -> None:
    if kv_heads is not None and heads is None:
        raise Refused("the number of key/value heads is set, but not that of query heads", hint="add --heads N")
    if heads is not None and (heads < 1 or (kv_heads is not None and (kv_heads < 1 or heads % kv_heads))):
        raise Refused(f"{kv_heads} key/value heads do not divide {heads} query heads")


@gc_paused
def write(found: MatchProposal, dest: StrPath | None, how: WriteOptions) -> MatchResult:
    """Write a matching to `dest`, or in place.

    Raises:
        NoMatch, KeyConflict: the first of `found.refusals`.
    """
    if found.refusals:
        raise found.refusals[0]
    return _write(found, dest, how)


@gc_paused
def preview(found: MatchProposal, dest: StrPath = "") -> MatchResult:
    """Return the result without writing it; without `dest` only the matching, otherwise the plan too."""
    if os.fspath(dest) and not found.refusals:
        return _write(found, dest, WriteOptions(force=True, dry_run=True))
    return looked_at(_draft(found, Plan(())), found.checkpoint.path, dest)


def write_rules(found: MatchProposal, path: StrPath, *, force: bool = False) -> None:
    """Write the learned rules to `path`, for ``rename --map``: lines ``old -> new``, or JSON for ``*.json``.

    Raises:
        Refused: nothing can be planned, or a line cannot hold a key. JSON can hold one with spaces, none with braces.
        WouldOverwrite: it exists, and `force` is not set.
    """
    if found.planned is None:
        raise found.refusals[0]
    rules = found.planned.rules
    names = [rule for rule in rules if isinstance(rule, NameRule)]
    name = os.fspath(path)
    for old, new in found.planned.unsaid.items():
        hint = "braces and spaces have a meaning in rules: without --rules, match writes OUT with these keys"
        raise Refused(f"no rule can hold the key of {_pair(old, new)}", path=name, hint=hint)
    if name.endswith(".json"):
        if len(names) < len(rules):
            raise Refused("JSON holds only names, but these rules change tensors", path=name, hint="name a text file")
        text = json.dumps({rule.old: rule.new for rule in names}, indent=1, ensure_ascii=False) + "\n"
    else:
        rows = [_row(rule) for rule in rules]
        odd = next((text for row in rows for text in (row["old"], row["new"]) if text and not _is_word(text)), None)
        if odd is not None:
            hint = "name a file *.json" if len(names) == len(rules) else "leave out --rules, and match writes OUT"
            raise Refused(f"a line of rules cannot hold {odd!r}", path=name, hint=hint)
        text = "".join(f"{rule}\n" for rule in rules)
        ours, theirs = as_path(found.checkpoint.path).name, as_path(found.target.label).name
        proof = "# verified on outputs\n" if found.verified else ""
        text = f"# {printable(ours)} -> {printable(theirs)}\n{proof}{text}"
    write_text(name, text, found.checkpoint.path, force=force)


def _pair(old: str, new: str) -> str:
    return f"{old!r} -> {new!r}" if new else repr(old)


def _row(rule: Rule) -> dict[str, str | None]:
    if isinstance(rule, NameRule):
        return {"old": rule.old, "new": rule.new, "operations": None}
    new = None if rule.new is None else rule.new.text
    return {"old": rule.old.text, "new": new, "operations": " | ".join(map(str, rule.operations))}


def _is_word(text: str) -> bool:
    return len(text.split()) == 1 and text.split()[0] == text and not text.startswith("#") and text != "->"


def _write(found: MatchProposal, dest: StrPath | None, how: WriteOptions) -> MatchResult:
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
                message = f"an in-place edit can only rename keys, and this one {_beyond_names(planned)}"
                raise Refused(message, hint="name an output")
            at = found.source.at or ""
            with of_found_rules(checkpoint.path):
                renames = sites.rename(checkpoint, at=at)
                done = run.transformed(
                    checkpoint, planned.tensors, dest, renames=renames, at=at, allow_unmatched=True
                )
            draft = _draft(found, done.plan, done.promise)
            return replace(
                draft,
                result=partial(draft.result, references=done.references),
                lines=(*draft.lines, *run.lines_of(done)[1:]),
                findings=(*draft.findings, *(row for row in done.findings if row.id != "unused-rule")),
            )
        plan = plan_edits(checkpoint, planned.edits, dest)
        gone = frozenset(row.where for row in planned.findings if row.id == "left-behind")
        promise = Promise(names_stay=False, edited=checkpoint, puts=puts, reported=gone)
        return _draft(found, plan, promise)

    return carry_out(found.checkpoint, dest, make, how, named=found.named)


def _beyond_names(planned: match_plan.MatchPlan) -> str:
    """Describe what a plan does besides renaming keys."""
    rules = () if planned.tensors is None else planned.tensors.tensors
    said = []
    if any(rule.new is not None and rule.operations[0].name not in ("tie", "untie") for rule in rules):
        said.append("changes tensors")
    if any(rule.new is None or rule.operations[0].name == "untie" for rule in rules):
        said.append("leaves keys out")
    if planned.ties:
        said.append(f"adds {plural(len(planned.ties), 'second key')} of tensors ({some([*planned.ties])})")
    return " and ".join(said)


def _draft(found: MatchProposal, plan: Plan, promise: Promise | None = None) -> Draft[MatchResult]:
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
            second_keys={key: planned.names.get(main, main) for key, main in planned.ties.items()} if planned else {},
        ),
        format=found.checkpoint.format,
        plan=plan,
        promise=promise or Promise(),
        lines=_lines(found),
        findings=_findings(found),
        read=found.target.files,
        exit_code=1 if found.left or found.matching.missing or found.refusals else 0,
    )


def _findings(found: MatchProposal) -> tuple[Finding, ...]:
    matching = found.matching
    findings = [table.found("refused", refusal.message) for refusal in found.refusals]
    if not found.refusals:
        for label, names in (("IN", found.left), ("TARGET", matching.missing)):
            findings += [table.found("no-counterpart", f"only in {label}", where=name) for name in names]
    if found.planned is not None:
        findings += found.planned.findings
    return (*findings, *(table.found("note", note) for note in found.notes))


def _lines(found: MatchProposal) -> tuple[str, ...]:
    matching, planned = found.matching, found.planned
    paired = len({pair.source for pair in matching.pairs})
    line = f"matched {paired:,} of {len(found.source.slots):,} keys by {matching.by}"
    added = planned.ties if planned is not None else ()
    skipped = len(matching.skipped_source) + len(matching.skipped_target) - len(added)
    if skipped:
        line += f"; {skipped:,} skipped by rule"
    if planned is not None:
        said = f"; {len(planned.names):,} renamed" if planned.names else "; all have the right keys already"
        line += "" if planned.tensors is not None and not planned.names else said
        if planned.references:
            line += f" (and {plural(planned.references, 'related name')})"
        reshaped = sum(pair.reshape is not None for pair in matching.pairs)
        changed = {pair.target for pair in matching.pairs if pair.operation}
        line += f"; {plural(len(changed), 'tensor')} of TARGET built by rule" if changed else ""
        over = match_plan.left_out(found.source.slots, matching, drop_unexpected=found.drops)
        line += f"; {len(over):,} left out: {some([*over])}" if over else ""
        # A conversion to another format may follow, so that the format of OUT is not known here.
        where = " (in the metadata if OUT is safetensors)" if format_of(found.checkpoint).has_ties else ""
        line += f"; {plural(len(added), 'second key')} added: {some([*added])}{where}" if added else ""
        line += f"; {reshaped:,} reshaped" if reshaped else ""
    rules: Sequence[Rule] = planned.rules if planned else matching.rules
    return (line, *(f"  {rule}" for rule in rules), *(f"note: {note}" for note in found.notes))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class MatchResult(Result):
    """A matching, and the renames that follow from it.

    Attributes:
        matching: pairs, and unmatched tensors of both sides.
        slots: shapes and dtypes of the source's tensors by key.
        at: address of the state dict that was matched.
        names: old -> new for every key that changed.
        rules: the same renames in few lines, for `rename --map`.
        notes: further remarks for the user, a sentence each.
        references: number of names beside the keys that changed with them.
        second_keys: keys that were added for tensors that OUT has under another key -> that key.
    """

    matching: Matching
    slots: Mapping[str, Slot] = field(default_factory=dict, repr=False)
    at: str = ""
    names: Mapping[str, str] = field(default_factory=dict, repr=False)
    rules: tuple[Rule, ...] = ()
    notes: tuple[str, ...] = ()
    references: int = 0
    second_keys: Mapping[str, str] = field(default_factory=dict)

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
            "second_keys": dict(self.second_keys),
        }


def _rows(skipped: Sequence[Skipped]) -> list[dict[str, str]]:
    return [{"name": row.name, "rule": row.rule} for row in skipped]
