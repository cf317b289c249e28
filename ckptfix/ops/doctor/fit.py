"""Comparison of a checkpoint with a model: keys, shapes, and what is known about the differences.

Keys are paired as `load_into` pairs them: unchanged, without wrapper components, or with a base prefix removed or added
(`names.bases`). The remaining differences are sorted by their known causes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ckptfix.align.match import match
from ckptfix.align.result import Matching
from ckptfix.checkpoint import Checkpoint
from ckptfix.checkpoint.address import join
from ckptfix.errors import CkptfixError, Refused
from ckptfix.findings.message_names import ShapeConflict
from ckptfix.findings.row import Finding
from ckptfix.findings.steps import LIKE, Fix, Step, Value, step
from ckptfix.findings.table import found
from ckptfix.names import bases, no_weights, slots, spellings
from ckptfix.names.groups import collapse, shown
from ckptfix.names.lines import joined
from ckptfix.names.slots import Slot
from ckptfix.names.vocabulary import is_output_layer
from ckptfix.ops import choose, quantized
from ckptfix.ops.doctor import quantized_keys
from ckptfix.ops.doctor.message_shapes import vocabulary
from ckptfix.ops.doctor.message_side import LORA, PRUNED, pruned
from ckptfix.ops.match import aligned, in_torchs_layout, refuse_codes
from ckptfix.ops.match import plan as match_plan
from ckptfix.ops.match.fused import Operations
from ckptfix.ops.match.layouts import Unturned
from ckptfix.ops.match.values import same_values
from ckptfix.ops.quantized import quantization_of
from ckptfix.ops.rename import by_table
from ckptfix.ops.target.targets import ExpectedModel, agreement, of_candidate

_ABOUT_NAMES = (
    *("no-names-match", "missing-keys", "unexpected-keys", "other-spelling"),
    *("matched-by-structure", "names-prefixed"),
)

_OTHER_MODEL = "no renaming makes it fit: check that TARGET is the model that the file was saved from"


def offered(
    findings: Iterable[Finding],
    checkpoint: Checkpoint,
    side: ExpectedModel,
    target: ExpectedModel,
    agreeing: int,
    *,
    several: bool,
    most: int,
    left: Fix = "",
    values: bool = True,
) -> Iterator[Finding]:
    """Yield `findings` about the keys of `side`, with `match` as their remedy only where it works.

    Args:
        agreeing: how many keys agree without it.
        several: whether the file has further state dicts, so that the command must name one.
        most: tensors of a side up to which it is tried.
        left: the remedy for keys that the model lacks, where `match` does not work.
        values: compare bytes too, as `match` does.
    """
    rows = list(findings)
    about = [row for row in rows if row.id in _ABOUT_NAMES and row.fix is None and row.steps is None]
    small = max(len(side.slots), len(target.slots)) <= most
    more = any(row.id == "unexpected-keys" for row in about)
    fix = _remedy(checkpoint, side, target, agreeing, more=more, values=values) if about and small else None
    if isinstance(fix, Step) and several and side.at:
        fix = fix.having(at=side.at)
    partly = isinstance(fix, Step) and bool(fix.get("partial"))
    for row in rows:
        if row not in about:
            yield row
        elif fix is not None and not (partly and row.id in ("unexpected-keys", "missing-keys")):
            yield row.fixed_by(fix if isinstance(fix, str) else (fix,))
        else:
            yield row.fixed_by({"no-names-match": _OTHER_MODEL, "unexpected-keys": left}.get(row.id, ""))


_HEADS = "with the number of heads: ckptfix match {source} {matched} --like {like} --heads N"
_ADAPTER_HEADS = f"{_HEADS} --partial, because the adapter does not have the weights of its base model"


_ALPHA = ".alpha"
"""The number beside a LoRA of kohya's form: the product of its tensors is multiplied by alpha / rank."""

_SCALED = (
    "no command, because the model lacks the alpha of the LoRA, and without it the LoRA would have a different "
    "strength: multiply each lora_up by alpha / rank first, or load it with a program that reads alpha"
)


def _remedy(
    checkpoint: Checkpoint, side: ExpectedModel, target: ExpectedModel, agreeing: int, *, more: bool, values: bool
) -> Step | str | None:
    """Return `match` with the options with which it works and makes more keys agree; None where it does not.

    It is an instruction in words where the user must state the number of heads.

    Args:
        more: the file has keys that the model lacks, perhaps only further names of a tensor.
        values: compare bytes too, as `match` does.
    """

    def fit(mine: ExpectedModel) -> tuple[Matching, Operations]:
        return aligned(mine, target, same_values(mine, target) if values else {})

    try:
        matching, operations = in_torchs_layout(checkpoint, side, fit) or fit(side)
        planned = match_plan.plan(checkpoint, side, matching, operations)
    except Unturned as error:
        return f"no command, because of {error.where}: {error.message}"
    except CkptfixError:
        return None
    if quantized.lone(checkpoint, side.at or "", matching.left) or _takes_codes(checkpoint, side, target, matching):
        plain_fix = quantized_keys.remedy(checkpoint)
        return plain_fix if isinstance(plain_fix, str) else plain_fix[0]
    if any(name.endswith(_ALPHA) for name in matching.left) and any(map(LORA.search, planned.names)):
        return _SCALED
    changes = bool(planned.names or planned.tensors) and len(matching.pairs) > agreeing
    (plain_step,) = step("match", like=LIKE)
    dropping: dict[str, Any] = {"drop_unexpected": True}
    # Equal tensors are ambiguous, but the first choice for a key of the model is the tensor of that key.
    sure = all(pair.source == pair.target for pair in matching.ambiguous)
    ways = [dropping] + ([{**dropping, "accept_ambiguous": True}] if matching.ambiguous and sure else [])
    ways = [*([] if more else [{}]), *ways, {"partial": True}] if changes else ways
    for options in ways:
        if match_plan.refusals(side, target, matching, operations, **options):
            continue
        with suppress(Refused):
            refuse_codes(checkpoint, side, matching, operations, drop_unexpected="drop_unexpected" in options)
            return plain_step.having(**options)
    asks = operations.refused and "--heads" in operations.questions[-1]
    if not asks or matching.ambiguous:
        return None
    if matching.missing:
        adapter = all(LORA.search(slot.name) for slot in side.slots)
        return _ADAPTER_HEADS if changes and adapter and not any(map(LORA.search, matching.missing)) else None
    names = by_table.names_for(checkpoint, {slot.name: slot.shape for slot in target.slots}, side.at)
    return step("rename", names=names)[0] if names else _HEADS


def _takes_codes(
    checkpoint: Checkpoint, side: ExpectedModel, target: ExpectedModel, matching: Matching
) -> bool:
    """Return whether quantized codes would get the key of a weight of another kind of number."""
    roles = quantization_of(checkpoint).roles
    if not roles:
        return False
    wanted = {slot.name: slot.dtype for slot in target.slots}
    dtypes = {slot.name: slot.dtype for slot in side.slots}
    return any(
        join(side.at or "", old) in roles and dtypes[old] != wanted.get(new)
        for old, new in matching.names.items()
    )


def _has_codes(
    checkpoint: Checkpoint,
    side: ExpectedModel,
    renaming: bases.Renaming,
    have: Mapping[str, Slot],
    wanted: Mapping[str, Slot],
) -> bool:
    """Return whether the file has quantized codes of another shape in the place of the model's weights."""
    roles = quantization_of(checkpoint).roles
    pairs = ((old, wanted[new]) for old, new in renaming.names.items() if roles and new in wanted and old in have)
    return any(join(side.at or "", old) in roles and have[old].shape != slot.shape for old, slot in pairs)


def _dequantized(misfits: Sequence[Finding], fix: Fix) -> list[Finding]:
    """Return `misfits` with `fix` for the shapes of codes, and for the keys beside them, such as scales."""
    why = "the file has codes of quantized weights, and the model has plain weights"
    made = (
        replace(row, message=f"{row.message}; {why}") if row.id == "shape-mismatch" else row for row in misfits
    )
    return [row.fixed_by(fix) if row.id in ("shape-mismatch", "unexpected-keys") else row for row in made]


_POSITIONS = ("pos_embed", "position_embedding", "positional_embedding", "relative_position_bias_table", "wpe.weight")

_BUFFERS = {"running_mean", "running_var", "num_batches_tracked"}

MOST_MATCHED = 5000
"""Most tensors for which an alignment by structure is tried: it takes a second or so."""

FEW = 300
"""The same limit where no tensor byte is read: a tenth of a second."""


def scan(
    checkpoint: Checkpoint, target: ExpectedModel, *, at: str | None = None, fast: bool = False
) -> Iterator[Finding]:
    """Yield findings about `checkpoint` as the weights of the model `target`.

    Args:
        at: address of the state dict; by default the one whose keys agree best.
        fast: try an alignment by structure only for small models.
    """
    wanted = {slot.name: slot for slot in target.slots}
    compared = _compared(checkpoint, target, at)
    if compared is None:
        yield found("no-tensors", "it has no state dict to compare with the model", severity="error")
        return
    renaming, side = compared
    have = {slot.name: slot for slot in side.slots}
    several = len(choose.states(checkpoint)) > 1
    alignable = not fast and not renaming.agreeing and len(have) <= MOST_MATCHED
    if alignable and (rules := _by_structure(side, target)):
        message = f"all {len(have):,} tensors match the model's under different keys, such as {rules}"
        fix = step("match", like=LIKE, at=side.at) if several and side.at else step("match", like=LIKE)
        yield found("matched-by-structure", message, where=side.at or "", fix=fix)
        return
    place: dict[str, Value] = {"at": side.at} if several and side.at else {}
    folded = list(pruned({name: slot.shape for name, slot in have.items()}, wanted))
    if folded:
        texts = [f"{old} -> {new} {end}" for old, new, end in joined([row for row, _, _ in folded])]
        fix = step("rename", lines=tuple(texts), **place)
        message = f"{PRUNED}: {folded[0][1][0]} and {folded[0][1][1]}, there {folded[0][2][0]}"
        yield found("other-spelling", message, where=side.at or "", fix=fix)
        gone = {name for _, olds, news in folded for name in (*olds, *news)}
        have, wanted = ({name: slot for name, slot in rows.items() if name not in gone} for rows in (have, wanted))
        renaming = replace(renaming, names={name: new for name, new in renaming.names.items() if name not in gone})
    if renaming.agreeing and renaming.rule == bases.EXACT:
        pairs = ((name, slot.shape, wanted[name].shape) for name, slot in have.items() if name in wanted)
        made = vocabulary(checkpoint, [ShapeConflict(*pair) for pair in pairs if pair[1] != pair[2]])
        if made is not None and made[2]:
            about, message, cuts = made
            yield found("vocabulary-rows", message, where=side.at or "", fix=step("rename", lines=tuple(cuts), **place))
            wanted = {**wanted, **{row.name: have[row.name] for row in about}}
    misfits = [*_misfits(renaming, side, have, wanted)]
    if _has_codes(checkpoint, side, renaming, have, wanted):
        misfits = _dequantized(misfits, quantized_keys.remedy(checkpoint))
    exact = renaming.agreeing if renaming.rule == bases.EXACT else 0
    most = FEW if fast else MOST_MATCHED
    all_there = all(row.id != "missing-keys" for row in misfits)
    plain = not quantization_of(checkpoint).roles  # `load_into` refuses codes
    left = _REST if renaming.agreeing and all_there and plain else ""
    yield from offered(
        misfits, checkpoint, side, target, exact, several=several, most=most, left=left, values=not fast
    )
    if renaming.agreeing:
        yield from _optimizers(checkpoint, target)


_REFUSED = ("missing-keys", "unexpected-keys", "shape-mismatch", "position-embedding", "no-names-match")
"""Findings for which `load_into` refuses a file."""

_LOADED = ("optional-buffers", "tied-missing", "old-spelling")
"""Findings whose advice is to load the file as it is."""


def advised(findings: Sequence[Finding]) -> list[Finding]:
    """Return `findings` without the advice to load the file as it is, where that would be refused."""
    if all(row.id not in _REFUSED for row in findings):
        return list(findings)
    return [row.fixed_by("") if row.id in _LOADED else row for row in findings]


_REST = "in Python: ckptfix.load_into(model, {source!r}, strict=False)"


def _misfits(
    renaming: bases.Renaming, side: ExpectedModel, have: dict[str, Slot], wanted: dict[str, Slot]
) -> Iterator[Finding]:
    """Yield findings about the keys, and about what differs."""
    if not renaming.agreeing:
        message = f"none of its {len(have):,} keys is among the model's {len(wanted):,}: strict=False loads nothing"
        yield found("no-names-match", message, where=side.at or "")
        return
    if renaming.rule != bases.EXACT:
        pairs = [pair for pair in renaming.names.items() if pair[1] in wanted]
        example = next((pair for pair in pairs if pair[0] != pair[1]), pairs[0])
        message = f"{renaming.agreeing:,} keys agree except for {renaming.rule}: {example[0]}, there {example[1]}"
        # Where few keys agree by chance, such as norm.weight, a prefix is not what the others lack.
        most = renaming.agreeing * 2 > min(len(have), len(wanted))
        fix = _prefix_fix(renaming, *example) if most else None
        yield found("names-prefixed", message, where=side.at or "", fix=fix)
    yield from _differences(have, wanted, renaming.names)


def _compared(
    checkpoint: Checkpoint, target: ExpectedModel, at: str | None
) -> tuple[bases.Renaming, ExpectedModel] | None:
    """Return how keys map to the model's, and the state dict, for the one whose keys agree best."""
    wanted = [slot.name for slot in target.slots]
    sides = [of_candidate(checkpoint, row) for row in choose.models(checkpoint) if at in (None, row.at)]
    tried = [(agreement(side, wanted), side) for side in sides]
    return max(tried, key=lambda row: row[0].agreeing, default=None)


def settled(
    findings: Sequence[Finding], checkpoint: Checkpoint, target: ExpectedModel, *, at: str | None = None
) -> list[Finding]:
    """Adjust `findings` to the model: report wrapped keys once, and not as a fault where the model has them too."""
    compared = _compared(checkpoint, target, at)
    if compared is None or not compared[0].agreeing:
        return list(findings)
    renaming, side = compared
    where = side.at or ""
    wrapped = [row for row in findings if row.id == "wrapped-names" and row.where == where]
    prefixed = [row for row in findings if row.id == "names-prefixed" and row.where == where]
    if not wrapped:
        return list(findings)
    if renaming.rule == bases.EXACT:
        noted = [found(row.id, f"{row.message}; the model has them too", where=where, severity="info", fix="")
                 for row in wrapped]  # fmt: skip
        return [*(row for row in findings if row not in wrapped), *noted]
    misfit = wrapped if any(row.steps == _UNWRAP for row in prefixed) or not prefixed else prefixed
    others = [row for row in findings if row not in wrapped and row not in prefixed]
    # Keys that the model does not have are a misfit, whichever wrapper added them.
    return [*others, *(replace(row, severity="error") for row in misfit)]


_UNWRAP = step("unwrap")


def _prefix_fix(renaming: bases.Renaming, old: str, new: str) -> Fix | None:
    """Return the command that renames `old` to `new`."""
    if not renaming.base:
        shorter = len(new) < len(old)
        return _UNWRAP if shorter else step("add-module")
    for front, removed in ((old.removesuffix(new), True), (new.removesuffix(old), False)):
        if front and front.endswith(".") and (front + new == old or front + old == new):
            pattern = "^" + re.escape(front).replace("\\.", "[.]")
            return step("rename", subs=((pattern, "") if removed else ("^", front),))
    return None


def _differences(have: dict[str, Slot], wanted: dict[str, Slot], names: object) -> Iterator[Finding]:
    assert isinstance(names, dict)
    found_names = {new: old for old, new in names.items()}
    missing = [slot for name, slot in wanted.items() if name not in found_names]
    over = [have[old] for old, new in names.items() if new not in wanted]
    shapes: list[str] = []
    positions: list[str] = []
    kinds: list[str] = []
    for name, slot in wanted.items():
        if name not in found_names:
            continue
        source = have[found_names[name]]
        if source.shape != slot.shape:
            head = source.shape[1:] == slot.shape[1:] and len(source.shape) in (1, 2)
            rows = positions if any(part in name for part in _POSITIONS) else shapes
            note = " (a head of a different size)" if head and rows is shapes else ""
            rows.append(f"{name} is {list(source.shape)} here, {list(slot.shape)} in the model{note}")
        elif misfit := slots.misfit(source, slot):
            kinds.append(f"{name}: {misfit}")
    for id, lines in (("shape-mismatch", shapes), ("position-embedding", positions), ("dtype-mismatch", kinds)):
        if lines:
            more = f"; and {len(lines) - 3:,} more" if len(lines) > 3 else ""
            yield found(id, f"{'; '.join(lines[:3])}{more}", where=lines[0].partition(" ")[0].rstrip(":"))
    spelled = _spelled({slot.name: slot for slot in over}, {slot.name: slot for slot in missing})
    if spelled:
        old, new = next(iter(spelled.items()))
        yield found("other-spelling", f"{len(spelled):,} keys differ in spelling: {old}, there {new}", where=old)
    over = [slot for slot in over if slot.name not in spelled]
    respelled = set(spelled.values())
    missing = [slot for slot in missing if slot.name not in respelled]
    optional = {slot.name for slot in (*missing, *over) if no_weights.optional(slot)}
    ties = {slot.tied for name, slot in wanted.items() if name in found_names}
    tied = {slot.name for slot in missing if _tied(slot, have, found_names, ties)} - optional
    lacking = [slot.name for slot in missing if slot.name not in optional | tied]
    left = [slot.name for slot in over if slot.name not in optional]
    fused = no_weights.fused(lacking, left)
    for id, names, of in (
        ("optional-buffers", [slot.name for slot in (*missing, *over) if slot.name in optional], "one side lacks"),
        ("tied-missing", [slot.name for slot in missing if slot.name in tied], "saved only under the tied key:"),
        ("missing-keys", lacking, f"the model has {len(lacking):,} more keys:"),
        ("unexpected-keys", left, f"the model lacks {len(left):,} of its keys:"),
    ):
        if names:
            wanted_here = set(names)
            known = no_weights.described(slot for slot in (*missing, *over) if slot.name in wanted_here)
            said = (f"{of} {shown(collapse(names), 5)}", known, fused if id == "missing-keys" else "")
            yield found(id, "; ".join(part for part in said if part), where=names[0])


def _tied(slot: Slot, have: dict[str, Slot], found_names: dict[str, str], ties: Set[str | None]) -> bool:
    """Return whether the model ties `slot` to a tensor that is present, or an output head has an embedding's shape.

    Args:
        ties: the first names of the tensors that are present under a further name.
    """
    if slot.tied is not None:
        return slot.tied in found_names
    if slot.name in ties:
        return True
    alike = (name for name, other in have.items() if other.shape == slot.shape)
    return is_output_layer(slot.name) and any("embed" in name or "wte" in name for name in alike)


def _spelled(have: dict[str, Slot], wanted: dict[str, Slot]) -> dict[str, str]:
    """Map names of one side to their spelling on the other side, where only the spelling differs."""
    ours, theirs = (_canonical(list(side)) for side in (have, wanted))
    back = {new: name for name, new in theirs.items()}
    pairs = {name: back[new] for name, new in ours.items() if new in back}
    return {old: new for old, new in pairs.items() if old != new and old not in wanted and new not in have}


def _canonical(names: Sequence[str]) -> dict[str, str]:
    known = spellings.canonical(names)
    return {name: known.get(name, name) for name in names}


def _by_structure(side: ExpectedModel, target: ExpectedModel) -> str:
    """Return the first rule of a complete and unambiguous alignment; ``""`` without one."""
    try:
        matching = match(side.slots, target.slots, by="structure")
    except CkptfixError:
        return ""
    if matching.left or matching.missing or matching.ambiguous or not matching.pairs:
        return ""
    changed = [pair for pair in matching.pairs if pair.source != pair.target]
    return f"{changed[0].source} for {changed[0].target}" if changed else ""


def _optimizers(checkpoint: Checkpoint, target: ExpectedModel) -> Iterator[Finding]:
    """Yield findings about optimizers that were saved for a different number of parameters than the model has."""
    trained = [
        slot for slot in target.slots
        if slot.tied is None and slot.name.rpartition(".")[2] not in _BUFFERS and not no_weights.optional(slot)
    ]  # fmt: skip
    groups: dict[str, int] = {}
    for address, value in checkpoint.values():
        parts = address.split("/")
        if parts[-1] == "params" and parts[-3:-2] == ["param_groups"] and isinstance(value, (list, tuple)):
            at = "/".join(parts[:-3])
            groups[at] = groups.get(at, 0) + len(value)
    for at, count in groups.items():
        if count != len(trained):
            message = f"the optimizer was saved for {count:,} parameters, but the model has {len(trained):,}"
            yield found("optimizer-groups", message, where=at)
