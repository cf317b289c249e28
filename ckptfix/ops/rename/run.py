"""A rules file run on a checkpoint: read, checked completely against its keys and shapes, and planned."""

from __future__ import annotations

from dataclasses import replace

from ckptfix.checkpoint import Checkpoint, Plan, same_place
from ckptfix.checkpoint.address import join
from ckptfix.commands import command
from ckptfix.dataclass import dataclass
from ckptfix.errors import CkptfixError, NoSuchFile, StrPath, Unsupported, file_name
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.formats import format_of, states
from ckptfix.formats.base import refuse_truncated
from ckptfix.formats.object_edit import ObjectEdit
from ckptfix.io.system import text_of
from ckptfix.names import typed
from ckptfix.names.rulefile import Rules, read
from ckptfix.ops.audit.promise import Promise
from ckptfix.ops.choose import chosen_sites, refuse_damaged
from ckptfix.ops.rename import flattened, optimizer
from ckptfix.ops.rename.objects import edit_site
from ckptfix.ops.rename.sites import NameChange, Renames
from ckptfix.ops.rename.transform import TransformedTensors
from ckptfix.words import plural, some


def read_rules(path: StrPath, *, reverse: bool = False) -> Rules:
    """Read the rules of a file.

    Args:
        reverse: return the rules that undo them.

    Raises:
        CkptfixError: it is neither lines nor JSON, or a rule is malformed or has no inverse; the message names the
            rule.
    """
    name = file_name(path)
    rules = read(text_in(name), name)
    return rules.reversed() if reverse else rules


def text_in(name: str) -> str:
    """Return the text of a file of rules.

    Raises:
        CkptfixError: it cannot be read, or is not text.
    """
    try:
        return text_of(name, encoding="utf-8-sig")
    except CkptfixError:
        raise
    except UnicodeDecodeError as error:
        raise CkptfixError("a file of names must be UTF-8 text", path=name, offset=error.start) from None
    except FileNotFoundError:
        raise NoSuchFile(name) from None
    except OSError as error:
        raise CkptfixError(f"it cannot be read: {error.strerror}", path=name) from None


@dataclass(frozen=True, slots=True)
class Transformed:
    """The effects of a rules file with operations.

    Attributes:
        changes: keys that are renamed, in order.
        references: how many further names and states follow.
        operations: how many tensors of the output went through operations.
        dropped: names of tensors that are left out.
    """

    plan: Plan
    promise: Promise
    changes: tuple[NameChange, ...]
    references: int
    operations: int
    dropped: tuple[str, ...]
    findings: tuple[Finding, ...]


def _refuse_folder(checkpoint: Checkpoint) -> None:
    format = format_of(checkpoint)
    if format.folder and not (format.recode if "objects" in format.states else format.writes):
        way = command("convert", checkpoint.path, "OUT")
        message = f"{format.title}: only safetensors shards allow tensors to be split and joined"
        raise Unsupported(message, path=checkpoint.path, hint=f"run `{way} --to hf` first, and edit the result")


def transformed(
    checkpoint: Checkpoint,
    rules: Rules,
    dest: str,
    *,
    renames: Renames,
    at: str | None = None,
    allow_unmatched: bool = False,
) -> Transformed:
    """Plan `dest` as `checkpoint` after a rules file that has operations.

    Args:
        renames: renamings that precede the rules, which see the new names.
        allow_unmatched: rules are findings, not an error, if none matches.

    Raises:
        NoSuchTensor: no rule matches.
        Refused: a line does not fit; the error names the line and the tensor.
        KeyConflict: two keys would get the same name.
        Unsupported: a folder of torch files or of slices is written only with the same tensors.
    """
    _refuse_folder(checkpoint)
    refuse_truncated(checkpoint)
    _ = checkpoint.entries
    refuse_damaged(checkpoint)
    made = TransformedTensors(rules)
    renamed = {edit.at: edit.names for edit in renames.edits if edit.kind == "state_dict"}
    for site in chosen_sites(checkpoint, at, weights_only=True):
        names = renamed.get(site.at, {})
        made.add(checkpoint, site, {key: names.get(key, key) for key in site.names})
    references = flattened.follow(checkpoint, made)
    if states(checkpoint, "objects"):
        edit = ObjectEdit(checkpoint)
        references += sum(edit_site(edit, site) for site in made.sites)
        references += optimizer.follow(edit, made)
        plan = edit.plan(dest)
    else:
        # Few calls need these formats, and the others start faster without this import.
        from ckptfix.ops.rename import named

        plan = named.plan(checkpoint, made.sites[0], dest) if made.sites else Plan(())
    changes = [
        NameChange(site.at, key, name)
        for site in made.sites
        for key, (name, entry) in site.after()
        if (name != key or entry is not None) and (site.at, key) not in made.followed
    ]
    operations = sum(entry is not None for site in made.sites for _, (_, entry) in site.after())
    promise = Promise(
        names_stay=False,
        edited=checkpoint,
        made=made.made,
        partly=frozenset(made.partly),
        summed=frozenset(made.summed),
        reported=frozenset((*made.dropped, *made.untied)),
    )
    findings = [
        *renames.findings,
        *(found("left-behind", "is dropped by rule", where=name) for name in made.dropped),
        *(found("left-behind", "is cut off by rule", where=row) for row in made.cut),
        *_unused(rules, made, allow=allow_unmatched),
        *_untied(made),
    ]
    return Transformed(plan, promise, tuple(changes), references, operations, tuple(made.dropped), tuple(findings))


def _unused(rules: Rules, made: TransformedTensors, *, allow: bool) -> tuple[Finding, ...]:
    if rules.table:
        return ()
    used = made.used
    texts = [old for old in rules.names if old not in used]
    lines = {rule.old.text: rule.line for rule in rules.tensors if rule.line not in used}
    names = [key for site in made.sites for key in site.entries]
    rows = typed.unmatched_rows([*texts, *lines], len(rules.names) + len(rules.tensors), names, allow=allow)
    return tuple(
        replace(row, message=f"{row.message} (line {lines[row.where]})") if row.where in lines else row for row in rows
    )


def _untied(made: TransformedTensors) -> list[Finding]:
    """List a note for each tensor with several names, if only some of them changed."""
    rows: list[Finding] = []
    for site in made.sites:
        places: dict[object, list[str]] = {}
        for key, entry in site.entries.items():
            if (place := same_place(entry)) is not None:
                places.setdefault(place, []).append(key)
        after: dict[str, object] = {}
        for key, (_, new) in site.after():
            after.setdefault(key, None if new is None else new.storage)
        for keys in places.values():
            kept = [key for key in keys if key in after]
            if len({id(after[key]) for key in kept}) > 1:
                message = f"was one tensor with {some(kept[1:])}, but no longer is"
                rows.append(found("note", message, where=join(site.at, kept[0])))
    return rows


def lines_of(done: Transformed) -> list[str]:
    """Summarize what was done, in one or two sentences."""
    renamed = len(done.changes) - done.operations
    said = [f"made {plural(done.operations, 'tensor')} by rule"] if done.operations or not renamed else []
    line = ", ".join([*said, *([f"renamed {plural(renamed, 'key')}"] if renamed else [])])
    if done.references:
        line += f" (and {plural(done.references, 'reference')} of metadata and optimizers)"
    lines = [line]
    behind = [finding.where for finding in done.findings if finding.id == "left-behind"]
    if behind:
        lines.append(f"left behind: {some(behind)}")
    return lines
