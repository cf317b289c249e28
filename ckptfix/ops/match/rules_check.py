"""``match --check``: proof that a rules file turns the keys of a checkpoint into those of a model, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ckptfix import formats
from ckptfix.checkpoint import ByteRange, Checkpoint, NameList, Plan, TensorEntry
from ckptfix.dataclass import dataclass
from ckptfix.errors import CkptfixError, StrPath, about
from ckptfix.findings import table
from ckptfix.findings.row import Finding
from ckptfix.io.write_log import recorded
from ckptfix.names import no_weights
from ckptfix.names.rulefile import Rules
from ckptfix.names.slots import Slot, misfit
from ckptfix.ops.audit.promise import Promise
from ckptfix.ops.choose import chosen_sites, refuse_damaged
from ckptfix.ops.match import running
from ckptfix.ops.match import verify as verifier
from ckptfix.ops.rename import rename, run
from ckptfix.ops.rename.transform import TransformedTensors
from ckptfix.ops.target import targets
from ckptfix.ops.writing import Draft, Result, looked_at
from ckptfix.words import plural


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CheckedRules(Result):
    """The outcome of a check of a rules file.

    Attributes:
        rules: the file.
        count: how many lines it has.
        unused: left sides of lines that match no key.
        missing, unexpected: keys of the model that the rules do not make, and keys that they make and it lacks.
        mismatched: keys that they make with another shape or kind of number.
        reverses: run backwards, the rules give the keys and shapes of the checkpoint again. Lines that drop something
            cannot, and are right all the same.
        verified: both models gave equal outputs; None if they were not run.
    """

    rules: str
    count: int
    unused: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[str, ...]
    reverses: bool
    verified: bool | None

    def _details(self) -> dict[str, Any]:
        names = ("rules", "count", "unused", "missing", "unexpected", "mismatched", "reverses", "verified")
        values = {name: getattr(self, name) for name in names}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def check_rules(
    source: StrPath,
    like: StrPath,
    rules: StrPath,
    *,
    at: str | None = None,
    like_at: str | None = None,
    models: running.Models | None = None,
    allow_import: bool = False,
) -> CheckedRules:
    """Check that the rules turn the keys of `source` into those of `like`, each with its shape, and back.

    `exit_code` is 1 if they do not. Every line must match a key. Nothing is written.

    Args:
        at, like_at: addresses of the state dicts, if there are several.
        models: the models of both sides; their outputs must be equal after the rules.
        allow_import: as for `ckptfix.match`.

    Raises:
        CkptfixError: one of the files cannot be read, or a line is malformed or does not fit a tensor.
    """
    given = run.read_rules(rules)
    target = targets.read(like, at=like_at, allow_import=allow_import)
    checkpoint = formats.open_checkpoint(source)
    one = targets.of_fitting(checkpoint, target) if at is None else targets.of_checkpoint(checkpoint, at)
    refuse_damaged(checkpoint)
    with about(checkpoint.path):
        made = TransformedTensors(given)
        (site,) = chosen_sites(checkpoint, one.at or "", weights_only=True)
        made.add(checkpoint, site, {key: key for key in site.names})
    after = list(_after(made))
    slots = {slot.name: slot for slot in target.slots}
    tied = {slot.tied or slot.name: slot.name for slot in target.slots}
    new = {entry.key: Slot(entry.key, entry.shape, entry.dtype) for entry in after}
    missing = [slot.name for slot in target.slots
               if slot.name not in new and no_weights.optional(slot) is None
               and not (slot.tied in new or tied.get(slot.name) in new)]  # fmt: skip
    unexpected = [name for name, slot in new.items() if name not in slots and no_weights.optional(slot) is None]
    apart = {name: why for name, slot in new.items()
             if name in slots and (why := misfit(slot, slots[name])) is not None}  # fmt: skip
    lines = list(_texts(given))
    unused = [text for text, line in lines if line not in made.used]
    reverse, lossy = None, ""
    try:
        reverse = given.reversed()
    except CkptfixError as error:
        lossy = f"{error.message} ({error.where})"
    wrong = None if reverse is None else _backwards(reverse, made, after)
    findings: list[Finding] = [
        *(table.found("unused-rule", "matches no key of IN", where=text) for text in unused),
        *(table.found("no-counterpart", "only in TARGET", where=name) for name in missing),
        *(table.found("no-counterpart", "not a key of TARGET", where=name) for name in unexpected),
        *(table.found("refused", why, where=name) for name, why in apart.items()),
        *([table.found("refused", wrong)] if wrong else []),
    ]
    verdict = None
    if models is not None and not (missing or apart):
        with about(checkpoint.path):
            verdict = verifier.compare(models, one.slots, partial(_renamed, rules=str(rules)))
        if not verdict.equal:
            findings.append(table.found("refused", verifier.refusal(verdict).message))
    proved = [
        f"{len(lines) - len(unused):,} of {plural(len(lines), 'line')} match keys of IN",
        f"{len(slots) - len(missing) - len(apart):,} of {plural(len(slots), 'key')} of TARGET have their shapes",
        "run backwards, they give IN's keys again" if not (wrong or lossy) else lossy or "they do not run backwards",
    ]
    if verdict is not None and verdict.equal:
        proved += verdict.sentences
    draft = Draft(
        result=partial(
            CheckedRules,
            rules=str(rules),
            count=len(lines),
            unused=tuple(unused),
            missing=tuple(missing),
            unexpected=tuple(unexpected),
            mismatched=tuple(apart),
            reverses=not (wrong or lossy),
            verified=None if models is None else verdict is not None and verdict.equal,
        ),
        format=checkpoint.format,
        plan=Plan(()),
        promise=Promise(),
        lines=("; ".join(proved),),
        findings=findings,
        exit_code=1 if findings else 0,
    )
    return looked_at(draft, checkpoint.path)


def _texts(rules: Rules) -> Iterator[tuple[str, str | int]]:
    """Yield the left side of each line, and the value by which `TransformedTensors.used` has it."""
    yield from ((text, text) for text in rules.names)
    yield from ((rule.old.text, rule.line) for rule in rules.tensors)


def _after(made: TransformedTensors) -> Iterator[TensorEntry]:
    """Yield the tensors after the rules, under their new keys."""
    site = made.sites[0]
    for old, (new, entry) in site.after():
        if entry is not None:
            yield entry
        elif old in site.entries:
            yield replace(site.entries[old], key=new)


def _backwards(rules: Rules, made: TransformedTensors, after: Sequence[TensorEntry]) -> str | None:
    """Return why these rules do not undo what was `made`, judging by keys and shapes; None if they do."""
    before = {entry.key: entry.shape for entry in made.sites[0].entries.values()}
    back = TransformedTensors(rules)
    standing = _standing(after)
    site = standing.sites[0]
    try:
        back.add(standing, site, {key: key for key in site.names})
    except CkptfixError as error:
        return f"run backwards: {error.message}" + (f" ({error.where})" if error.where else "")
    again = {entry.key: entry.shape for entry in _after(back)}
    if again == before:
        return None
    name = min(set(again) ^ set(before), default="") or next(key for key in before if before[key] != again[key])
    return f"run backwards, they do not give {name} as IN has it"


def _standing(entries: Sequence[TensorEntry]) -> Checkpoint:
    """Return a checkpoint of these tensors that has no bytes."""
    made = []
    for entry in entries:
        assert entry.storage is not None
        made.append(replace(entry, at="", storage=replace(entry.storage, data=ByteRange("", 0, entry.storage.nbytes))))
    names = tuple(entry.key for entry in made)
    return Checkpoint(
        *("", "safetensors", 0, {}),
        load_entries=lambda: tuple(made),
        load_values=lambda: iter(()),
        sites=(NameList("", "state_dict", names),),
    )


def _renamed(file: str, rules: str) -> Mapping[str, Any]:
    """Return the weights of a file after the rules."""
    import torch

    with recorded():  # an error of the check does not concern this temporary file
        done = rename(file, f"{file}.out", rules=rules, allow_unmatched=True, force=True)
    made: Mapping[str, Any] = torch.load(done.dest, weights_only=True)
    return made
