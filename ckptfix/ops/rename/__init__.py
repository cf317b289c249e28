"""``ckptfix.strip_module``, ``add_module``, ``unwrap`` and ``rename``: new keys for the same tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ckptfix.arguments import checks_types
from ckptfix.checkpoint import Checkpoint, address
from ckptfix.dataclass import dataclass
from ckptfix.errors import Refused, StrPath
from ckptfix.io.read import Progress
from ckptfix.names.rulefile import Rules, read, sizes_in
from ckptfix.ops.any_source import takes_any_source
from ckptfix.ops.audit.promise import Promise
from ckptfix.ops.rename import sites
from ckptfix.ops.rename.sites import NameChange
from ckptfix.ops.writing import Draft, Result, WriteOptions, carry_out, copy_note, plan_edits
from ckptfix.words import plural, some

if TYPE_CHECKING:
    from ckptfix.ops.rename.run import Transformed


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RenameResult(Result):
    """The outcome of a renaming: `changes` are keys of state dicts; `references` counts names that followed them."""

    changes: tuple[NameChange, ...] = ()
    references: int = 0

    def _details(self) -> dict[str, Any]:
        return {"changes": [asdict(change) for change in self.changes], "references": self.references}


@checks_types
@takes_any_source()
def strip_module(
    source: StrPath,
    dest: StrPath | None = None,
    *,
    prefix: str = "module",
    at: str | None = None,
    all_levels: bool = False,
    partial: bool = False,
    force: bool = False,
    keep_old: bool = False,
    dry_run: bool = False,
    in_place: bool = False,
    link: bool = False,
    progress: Progress | None = None,
) -> RenameResult:
    """Write `source` to `dest` with `prefix` removed from its keys.

    Args:
        prefix: path components at the front of a key, ``"module"`` for the prefix that DataParallel adds.
        at: address of the only state dict to change; all by default.
        all_levels: remove it as many times as all keys have it.
        partial: remove it even if only some keys of a state dict have it.
        force: replace an existing `dest`; with `in_place`, change a file that has further names too.
        keep_old: keep a checkpoint that `force` replaces beside it, as ``DEST.~1~``; see `Result.backup`.
        dry_run: plan, and write nothing.
        in_place: change only the bytes of `source` that differ; `dest` is None then. `undo` reverts it.
        progress: called with the bytes done and the bytes in all.

    Raises:
        PartialPrefix, KeyConflict, WouldOverwrite, DamagedFile, UnknownFormat, WriteFailed.
    """

    def make(checkpoint: Checkpoint, dest: str) -> Draft[RenameResult]:
        renames = sites.strip(checkpoint, prefix=prefix, at=at, all_levels=all_levels, partial=partial)
        near = None if renames.edits else sites.nearest_prefix(checkpoint, prefix, at)
        nothing = f"no key begins with '{prefix.strip('.')}.'" + (f" (nearest is '{near}.')" if near else "")
        return _draft(checkpoint, renames, dest, "stripped", nothing)

    how = WriteOptions(force=force, keep_old=keep_old, dry_run=dry_run, in_place=in_place, link=link, progress=progress)
    return carry_out(source, dest, make, how)


@checks_types
@takes_any_source()
def add_module(
    source: StrPath,
    dest: StrPath | None = None,
    *,
    prefix: str = "module",
    at: str | None = None,
    force: bool = False,
    keep_old: bool = False,
    dry_run: bool = False,
    in_place: bool = False,
    link: bool = False,
    progress: Progress | None = None,
) -> RenameResult:
    """Write `source` to `dest` with `prefix` before the keys of the model's state dicts; else like `strip_module`."""

    def make(checkpoint: Checkpoint, dest: str) -> Draft[RenameResult]:
        renames = sites.add(checkpoint, prefix=prefix, at=at)
        return _draft(checkpoint, renames, dest, "prefixed", "there is no state dict")

    how = WriteOptions(force=force, keep_old=keep_old, dry_run=dry_run, in_place=in_place, link=link, progress=progress)
    return carry_out(source, dest, make, how)


@checks_types
@takes_any_source()
def unwrap(
    source: StrPath,
    dest: StrPath | None = None,
    *,
    at: str | None = None,
    force: bool = False,
    keep_old: bool = False,
    dry_run: bool = False,
    in_place: bool = False,
    link: bool = False,
    progress: Progress | None = None,
) -> RenameResult:
    """Write `source` to `dest` without the components of known wrappers in its keys; else like `strip_module`."""

    def make(checkpoint: Checkpoint, dest: str) -> Draft[RenameResult]:
        renames = sites.unwrap(checkpoint, at=at)
        return _draft(checkpoint, renames, dest, "unwrapped", "no key has a wrapper's component")

    how = WriteOptions(force=force, keep_old=keep_old, dry_run=dry_run, in_place=in_place, link=link, progress=progress)
    return carry_out(source, dest, make, how)


@checks_types
def rename(
    source: StrPath,
    dest: StrPath | None = None,
    *,
    subs: Sequence[tuple[str, str]] = (),
    mapping: Mapping[str, str] | None = None,
    rules: StrPath | None = None,
    lines: Sequence[str] = (),
    names: str | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    reverse: bool = False,
    allow_unmatched: bool = False,
    at: str | None = None,
    force: bool = False,
    keep_old: bool = False,
    dry_run: bool = False,
    in_place: bool = False,
    link: bool = False,
    progress: Progress | None = None,
) -> RenameResult:
    """Write `source` to `dest` with its keys changed by regular expressions and by an exact map.

    Args:
        subs: (pattern, replacement) of `re.sub`, applied in order.
        mapping: old key -> new key, applied after them.
        rules: a file of keys and of operations on tensors (`ckptfix help rules`), in place of `mapping`.
        lines: lines of such a file, in place of it.
        names: two ecosystems, such as ``"meta:hf"``: the rules are those of a table of names (`ckptfix help names`),
            or of `rules` if it is given.
        heads, kv_heads: number of query heads, and of key/value heads, for rules that need them. By default a
            config.json or params.json beside `source`, or arguments in it, state them.
        reverse: run the file backwards.
        allow_unmatched: a pattern that matches no key, or a map or file without a match, is a finding, not an error.

    The rest as `strip_module`. A rule that matched nothing is a finding if another one of the map or file matched.

    Raises:
        NoSuchTensor: a pattern matches no key, or nothing of the map or file does; `near` is what may be meant.
        Refused: a rule does not fit the keys or shapes of the checkpoint, or no table has its first key that does not
            fit; nothing was written.
        CkptfixError: the file of rules is malformed, or cannot be reversed.
    """
    if (rules is not None) + (mapping is not None) + bool(lines) > 1:
        raise Refused("a map, a file of rules and lines cannot be combined")
    if reverse and (rules is None or names is not None):
        raise Refused("only a file of rules can be reversed", hint="swap the ecosystems of names" if names else None)
    if names is not None and (mapping is not None or subs or lines):
        raise Refused("a table of names cannot be combined with other renamings")
    how = WriteOptions(force=force, keep_old=keep_old, dry_run=dry_run, in_place=in_place, link=link, progress=progress)
    given = read("\n".join(lines), "the lines") if lines else None
    if rules is not None or names is not None or (lines and sizes_in("\n".join(lines))):
        from ckptfix.align.fused import Heads
        from ckptfix.ops.rename import by_table

        route = by_table.route_of(source, names, rules, lines, at=at, heads=Heads(heads, kv_heads), reverse=reverse)
        if len(route) > 1:
            return by_table.in_steps(apply_rules, source, dest, route, how, at=at)
        (given,) = (one.rules for one in route)
    return apply_rules(
        *(source, dest),
        given=given,
        subs=subs,
        mapping=mapping,
        allow_unmatched=allow_unmatched,
        at=at,
        **how.keywords(),
    )


@takes_any_source(name="rename")
def apply_rules(
    source: StrPath,
    dest: StrPath | None = None,
    *,
    given: Rules | None = None,
    subs: Sequence[tuple[str, str]] = (),
    mapping: Mapping[str, str] | None = None,
    allow_unmatched: bool = False,
    at: str | None = None,
    force: bool = False,
    keep_old: bool = False,
    dry_run: bool = False,
    in_place: bool = False,
    link: bool = False,
    progress: Progress | None = None,
) -> RenameResult:
    """Write `source` to `dest` after the rules `given`; the rest as `rename`."""

    def make(checkpoint: Checkpoint, dest: str) -> Draft[RenameResult]:
        names = mapping if given is None else given.names
        if given is not None and given.tensors:
            if in_place:
                message = "an in-place edit changes only keys, but these rules change tensors"
                raise Refused(message, hint="name an output")
            renames = sites.rename(checkpoint, subs=subs, at=at, allow_unmatched=allow_unmatched)
            from ckptfix.ops.rename.run import transformed

            done = transformed(checkpoint, given, dest, renames=renames, at=at, allow_unmatched=allow_unmatched)
            return _by(given, _tensors_draft(checkpoint, done))
        renames = sites.rename(checkpoint, subs=subs, mapping=names, at=at, allow_unmatched=allow_unmatched)
        if given is not None and given.table:
            renames = replace(renames, findings=tuple(one for one in renames.findings if one.id != "unused-rule"))
        return _by(given, _draft(checkpoint, renames, dest, "renamed", "no rule matched a key"))

    how = WriteOptions(force=force, keep_old=keep_old, dry_run=dry_run, in_place=in_place, link=link, progress=progress)
    return carry_out(source, dest, make, how)


def _by(given: Rules | None, draft: Draft[RenameResult]) -> Draft[RenameResult]:
    """Return the draft with the table that its first line owes its names to."""
    if given is None or not given.table:
        return draft
    first, *others = draft.lines
    return replace(draft, lines=[f"{first}, by the table {given.path}", *others])


def _tensors_draft(checkpoint: Checkpoint, done: Transformed) -> Draft[RenameResult]:
    from ckptfix.ops.rename.run import lines_of

    return Draft(
        result=partial(RenameResult, changes=done.changes, references=done.references),
        format=checkpoint.format,
        plan=done.plan,
        promise=done.promise,
        lines=lines_of(done),
        findings=done.findings,
    )


def _draft(
    checkpoint: Checkpoint, renames: sites.Renames, dest: str, verb: str, nothing: str
) -> Draft[RenameResult]:
    plan = plan_edits(checkpoint, renames.edits, dest)
    if renames.changes:
        first = renames.changes[0]
        places = len({change.at for change in renames.changes})
        line = f"{verb} {plural(len(renames.changes), 'key')}, as in {first.old} -> {first.new}"
        if places > 1 or first.at:
            line += f" ({some(list(dict.fromkeys(address.shown(change.at) for change in renames.changes)))})"
        if renames.references:
            line += f" (and {plural(renames.references, 'related name')})"
    elif renames.references:
        line = f"{verb} {plural(renames.references, 'name')} of an optimizer"
    else:
        line = f"nothing to do: {nothing}"
    lines = [line + copy_note(not renames.edits)]
    notes = [f"{found.where}: {found.message}" for found in renames.findings if found.severity == "info"]
    if notes:
        lines.append("; ".join(notes[:5]).removeprefix(": "))
    return Draft(
        result=partial(RenameResult, changes=renames.changes, references=renames.references),
        format=checkpoint.format,
        plan=plan,
        promise=Promise(names_stay=False, edited=checkpoint),
        lines=lines,
        findings=renames.findings,
    )
