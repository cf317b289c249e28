"""Plans of matchings: the renames, the reasons against them, and notes for the user."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, replace
from types import MappingProxyType

from ckptfix.align import depths
from ckptfix.align.fused import FusedTensors
from ckptfix.align.result import MatchedPair, Matching
from ckptfix.checkpoint import Checkpoint, Edit, Put, Rename, TensorEntry, address, reshaped
from ckptfix.dataclass import dataclass
from ckptfix.errors import CkptfixError, NoMatch, NoSuchTensor, Refused, printable
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.formats import format_of
from ckptfix.names import wrappers
from ckptfix.names.groups import collapse, shown
from ckptfix.names.learn import learn
from ckptfix.names.lines import joined, line
from ckptfix.names.operations import Operation
from ckptfix.names.rulefile import Rules, TensorRule, side, turned
from ckptfix.names.rules import NameRule, is_rule, renamed
from ckptfix.names.slots import Slot, is_transposed
from ckptfix.names.spellings import fusions
from ckptfix.ops.audit.promise import listed
from ckptfix.ops.match.fused import Operations, line_of
from ckptfix.ops.match.fused import rules as fused_rules
from ckptfix.ops.match.left_over import VERIFY, reasons
from ckptfix.ops.match.values import equal_values
from ckptfix.ops.rename import sites
from ckptfix.ops.select import dropping, optimizers_left
from ckptfix.ops.target.targets import ExpectedModel
from ckptfix.words import plural, some

MOST = 12
"""Lines of one kind in a message; a report has all of them."""


@dataclass(frozen=True, slots=True)
class MatchPlan:
    """The changes that a matching makes to a checkpoint.

    Attributes:
        names: old -> new for every key that changes; skipped buffers move with their module.
        rules: rules with exactly this effect, in few lines, for `rename --map`.
        edits: edits for `plan_edit`.
        references: number of names beside the keys that change with them.
        findings: further findings for the user.
        tensors: the rules to run if tensors are split, joined, transposed or tied; there are no edits then.
        ties: the `second_keys` that are added.
        unsaid: old -> new for the keys that no line of rules can name, because they look like rules themselves.
    """

    names: Mapping[str, str]
    rules: tuple[NameRule | TensorRule, ...]
    edits: tuple[Edit, ...]
    references: int
    findings: tuple[Finding, ...]
    tensors: Rules | None = None
    ties: Mapping[str, str] = field(default_factory=dict)
    unsaid: Mapping[str, str] = field(default_factory=dict)


def plan(
    checkpoint: Checkpoint,
    source: ExpectedModel,
    matching: Matching,
    operations: Operations | None = None,
    *,
    ties: Mapping[str, str] = MappingProxyType({}),
    drop_unexpected: bool = False,
) -> MatchPlan:
    """Plan the edits that give the state dict of `source` in `checkpoint` the names of `matching`.

    Names without a target are not changed, or left out with `drop_unexpected`. References to the names change too.

    Args:
        ties: the `second_keys` to add.

    Raises:
        KeyConflict: an unchanged name is also the new name of another key.
        NoMatch: the names of one tensor would have two shapes, or a transposed one.
        Refused: a scale would be left out, and the codes that need it would stay; or rules must change tensors, and
            cannot name a key.
        Unsupported: a tensor to reshape is not dense and contiguous.
    """
    names = with_buffers(source.slots, matching)
    over = left_out(source.slots, matching, drop_unexpected=drop_unexpected)
    shapes = _shapes(source.slots, matching)
    taken = () if operations is None else operations.taken
    keys = [name for site in _keys_at(checkpoint, source) for name in site if name not in over]
    again = reshapes(source.slots, names, shapes)
    blocks = [f"{block}.{{*}} | drop" for block in matching.dropped]
    if taken or blocks or ties:
        taken = (*taken, *again)
        gone = {name for one in taken for name in one.old}
        changed = {old: new for old, new in names.items() if old != new and old not in over.keys() | gone}
        single, unsaid = learned(changed, [key for key in keys if key not in gone])
        apart = {name: other for name, other in over.items() if not is_in(name, matching.dropped)}
        unsaid |= _unsaid(again, apart, names) | _looking_like_rules({main: name for name, main in ties.items()})
        for old, new in unsaid.items():
            message = f"tensors are changed by rules here, and no rule can hold {printable(_odd(old, new))}"
            hint = "braces and spaces have a meaning in rules: name the key differently"
            raise Refused(message, where=old, hint=hint)
        made = fused_rules(taken, single, keys, blocks)
        first = len(made.tensors) + len(single) + 1
        lost = tuple(_left_out(apart, names, first))
        made = replace(made, tensors=(*made.tensors, *lost, *_tied(ties, first + len(lost))))
        return MatchPlan(changed, (*made.tensors, *single), (), 0, (), made, ties)
    at = source.at or ""
    kept = {old: new for old, new in names.items() if old not in over}
    renames = sites.rename(checkpoint, mapping=kept, at=at, allow_unmatched=True)
    edits: list[Edit] = [Put(at, _tensors(checkpoint, at, shapes))] if shapes else []
    findings = [finding for finding in renames.findings if finding.id != "unused-rule"]
    if over:
        findings += (
            found(
                "left-behind",
                "has another shape in the model" if name in matching.unfit else "is not a key of the model",
                where=address.join(at, name),
            )
            for name in over
        )
        findings += optimizers_left(checkpoint, {at})
    if shapes and any(state.optimizer for state in checkpoint.state_dicts):
        message = "the optimizer state keeps the old shapes and does not fit the reshaped parameters"
        findings.append(found("optimizer-shapes", message))
    changed = {old: new for old, new in kept.items() if old != new}
    lines = fused_rules(again, (), keys).tensors
    others = {old: new for old, new in changed.items() if old not in shapes}
    single, unsaid = learned(others, [key for key in keys if key not in shapes], matching.rules)
    unsaid |= _unsaid(again, over, names)
    said = {name: other for name, other in over.items() if name not in unsaid}
    rules: tuple[NameRule | TensorRule, ...] = (*lines, *_left_out(said, names, len(lines) + 1), *single)
    dropped = dropping(at, [*over], format_of(checkpoint).ties(checkpoint)) if over else ()
    edits = [*edits, *dropped, *_kept(renames.edits)]
    return MatchPlan(changed, rules, tuple(edits), renames.references, tuple(findings), unsaid=unsaid)


def _unsaid(again: Iterable[FusedTensors], over: Mapping[str, str], names: Mapping[str, str]) -> dict[str, str]:
    """Return old -> new (empty if it is left out) for the keys of such lines that rules cannot name."""
    found = {one.old[0]: one.new[0] for one in again if line_of(one) is None}
    return found | _looking_like_rules({name: names.get(other, other) for name, other in over.items()})


def _looking_like_rules(names: Mapping[str, str]) -> dict[str, str]:
    """Return the pairs in which a key has braces: these stand for other text in a line with operations."""
    return {old: new for old, new in names.items() if set("{}") & {*old, *new}}


def _odd(old: str, new: str) -> str:
    return repr(new if set("{}") & {*new} else old)


def left_out(slots: Sequence[Slot], matching: Matching, *, drop_unexpected: bool) -> dict[str, str]:
    """Return the names of the source that are left out -> the other name of the same tensor, or empty.

    A second name of a tensor that the target has under one name goes in any case, because its tensor stays. So do the
    blocks that the user leaves out.
    """
    over = unexpected(slots, matching)
    chosen = {slot.name: "" for slot in slots if is_in(slot.name, matching.dropped)}
    if drop_unexpected:
        return over | chosen
    names = matching.names
    tied = {row.name for row in matching.skipped_source if row.tied}
    return {name: other for name, other in over.items() if name in tied and other in names} | chosen


def is_in(name: str, blocks: Sequence[str]) -> bool:
    """Return whether a key is in one of these blocks."""
    return any(name.startswith(f"{block}.") for block in blocks)


def unexpected(slots: Sequence[Slot], matching: Matching) -> dict[str, str]:
    """Return the names of the source that the target lacks -> the other name of the same tensor, or empty.

    It lacks a name too if the tensor under this name has another shape, such as a head for other classes.
    A buffer without a pair is not among them if the target has it under its new name.
    """
    names = with_buffers(slots, matching)
    theirs = {*matching.missing, *(row.name for row in matching.skipped_target)}
    skipped = {row.name: row.tied for row in matching.skipped_source if names.get(row.name, row.name) not in theirs}
    tied = {slot.name: slot.tied or "" for slot in slots}
    left = [name for name in matching.left if name not in theirs or name in matching.unfit]
    return dict.fromkeys(left, "") | {name: tied[name] if tie else "" for name, tie in skipped.items()}


def _left_out(over: Mapping[str, str], names: Mapping[str, str], line: int) -> Iterator[TensorRule]:
    """Yield the rules that leave out the names of `over`, numbered from `line` on."""
    for number, (name, other) in enumerate(over.items(), line):
        main = names.get(other, other)
        if main:
            yield TensorRule(side(name, main), side(main, name), (Operation("untie"),), number)
        else:
            yield TensorRule(side(name, name), None, (Operation("drop"),), number)


def second_keys(target: ExpectedModel, matching: Matching) -> dict[str, str]:
    """Return further keys of tensors of the target -> the key of the source that is the tensor under another key.

    Those of tensors that the matching makes of others are not among them.
    """
    tensor = {slot.name: slot.tied or slot.name for slot in target.slots}
    found = {tensor[pair.target]: pair.source for pair in matching.pairs if not pair.operation and not pair.reshape}
    further = (row.name for row in matching.skipped_target if row.tied)
    return {name: found[tensor[name]] for name in further if tensor.get(name) in found}


def _tied(ties: Mapping[str, str], line: int) -> Iterator[TensorRule]:
    """Yield the rules that add second keys, numbered from `line` on."""
    for number, (name, main) in enumerate(ties.items(), line):
        yield TensorRule(side(main, name), side(name, main), (Operation("tie"),), number)


def _tensors(
    checkpoint: Checkpoint, at: str, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, TensorEntry]:
    """Return the tensors of the state dict `at` that `shapes` lists, in these shapes.

    Raises:
        NoSuchTensor: the state dict has no such tensor.
        Unsupported: it is not dense and contiguous.
    """
    entries = {entry.key: entry for entry in listed(checkpoint) if entry.at == at}
    missing = shapes.keys() - entries.keys()
    if missing:
        raise NoSuchTensor("there is no such tensor", where=address.join(at, min(missing)))
    return {name: reshaped(entries[name], shape) for name, shape in shapes.items()}


def _keys_at(checkpoint: Checkpoint, side: ExpectedModel) -> list[tuple[str, ...]]:
    return [site.names for site in checkpoint.sites if site.kind == "state_dict" and site.at == (side.at or "")]


def _kept(edits: Iterable[Rename]) -> list[Rename]:
    """Keep the renames that change a name."""
    changing = []
    for edit in edits:
        names = {old: new for old, new in edit.names.items() if old != new}
        if names:
            changing.append(replace(edit, names=names))
    return changing


def with_buffers(slots: Sequence[Slot], matching: Matching) -> dict[str, str]:
    """Return the pairs of `matching`, and the source's skipped buffers under the new name of their module.

    So ``num_batches_tracked``, which an old target lacks, stays beside the ``running_mean`` that it belongs to.
    """
    names = matching.names
    if all(skipped.tied for skipped in matching.skipped_source):
        return names
    modules = wrappers.renamed_modules(names)
    taken = set(names.values()) | {slot.name for slot in slots}
    found = dict(names)
    for skipped in matching.skipped_source:
        module, _, leaf = skipped.name.rpartition(".")
        new = f"{modules[module]}.{leaf}" if modules.get(module) else None
        if new is not None and not skipped.tied and new not in taken:
            found[skipped.name] = new
            taken.add(new)
    return found


def learned(
    names: Mapping[str, str], every: Sequence[str], rules: tuple[NameRule, ...] = ()
) -> tuple[tuple[NameRule, ...], dict[str, str]]:
    """Find rules that map the names in `every` to exactly `names`, and leave the others unchanged.

    `rules` are used if they do that already. A name that no rule covers, forwards or backwards, gets its own line,
    which `rename --map` applies before all rules.

    Returns:
        The rules, and the names that no line can hold, since they look like rules.
    """
    if not names:
        return (), {}
    found, odd = rules, _wrong(names, every, rules) if rules else [*names]
    if odd:
        found = learn(names, every)
        odd = _wrong(names, every, found)
    single = []
    unsaid: dict[str, str] = {}
    back = {names.get(name, name): name for name in every}
    with suppress(Refused):  # a rule that uses a number twice has no inverse
        found_back = [NameRule(*turned(rule.new, rule.old)) for rule in found]
        back = {name: back[name] for name in _wrong(back, tuple(back), found_back)}
    for name in dict.fromkeys((*odd, *back.values())):
        new = names.get(name, name)
        try:
            single.append(NameRule(name, new))
        except Refused:
            unsaid[name] = new
    return (*single, *found), unsaid


def _wrong(names: Mapping[str, str], every: Sequence[str], rules: Sequence[NameRule]) -> list[str]:
    """Return the names that do not get their new name from the rules."""
    made = _made(every, rules)
    return [name for name in every if made.get(name, name) != names.get(name, name)]


def _made(every: Sequence[str], rules: Sequence[NameRule]) -> dict[str, str]:
    """Return the result of ``rename --map`` with these rules."""
    exact = {rule.old: rule.new for rule in rules}
    patterns = [rule for rule in rules if is_rule(rule.old)]
    return {
        **renamed([name for name in every if name not in exact], patterns),
        **{name: exact[name] for name in every if name in exact},
    }


def reshapes(
    slots: Sequence[Slot], names: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[FusedTensors, ...]:
    """Return the tensors that are reshaped, and the operation of a rules file that does it."""
    old = {slot.name: slot.shape for slot in slots}
    return tuple(
        FusedTensors((name,), (names.get(name, name),), (reshape(old[name], new),), 0, joins=False)
        for name, new in shapes.items()
    )


def reshape(old: Sequence[int], new: Sequence[int]) -> Operation:
    """Return the operation that gives a tensor of the shape `old` the shape `new`."""
    return Operation("reshape", {"from": tuple((size, ()) for size in old), "to": tuple((size, ()) for size in new)})


def _shapes(slots: Sequence[Slot], matching: Matching) -> dict[str, tuple[int, ...]]:
    """Map source names to new shapes; tied names are included.

    Raises:
        NoMatch: two names of one tensor would differ, or a new shape is a transposition.
    """
    paired = {pair.source: pair for pair in matching.pairs}
    if not any(pair.reshape is not None for pair in matching.pairs):
        return {}
    shapes: dict[str, tuple[int, ...]] = {}
    ties: dict[str, list[Slot]] = {}
    for slot in slots:
        ties.setdefault(slot.tied or slot.name, []).append(slot)
        new = paired[slot.name].reshape if slot.name in paired else None
        if new is not None and is_transposed(slot.shape, new):
            raise NoMatch(f"{list(slot.shape)} to {list(new)} is a transposition, not a reshape", where=slot.name)
    for group in ties.values():
        wanted = {paired[slot.name].reshape or slot.shape for slot in group if slot.name in paired}
        if len(wanted) > 1:
            listed = " and ".join(str(list(shape)) for shape in sorted(wanted))
            raise NoMatch(f"its names share one tensor, but would get the shapes {listed}", where=group[0].name)
        shapes.update((slot.name, shape) for slot in group for shape in wanted if shape != slot.shape)
    return shapes


def refusals(
    source: ExpectedModel,
    target: ExpectedModel,
    matching: Matching,
    operations: Operations,
    *,
    accept_ambiguous: bool = False,
    partial: bool = False,
    drop_unexpected: bool = False,
    reshape: bool = False,
    heads: bool = False,
    reported: bool = False,
    settles: str | None = None,
) -> tuple[CkptfixError, ...]:
    """Return the reasons, if any, not to write the matching without further options. Hints name no option given.

    Args:
        reshape, heads: whether these options are given.
        reported: every pair is shown.
        settles: what settles open questions once both models have run; None if they have not.
    """
    found: list[CkptfixError] = []
    if operations.refused and not accept_ambiguous:
        *others, question = operations.questions
        hint = "--accept-ambiguous keeps the order of rows, as Helium, Ernie 4.5 and GLM of transformers need it"
        hint = hint if "rotary" in question else f"{settles or VERIFY}; --accept-ambiguous keeps the order of rows"
        found.append(NoMatch(question, lines=tuple(others), hint=hint))
    unsure = matching.ambiguous
    if unsure and not accept_ambiguous:
        lines = [f"{pair.source} -> {pair.target}, or {', '.join(pair.instead[:3])}" for pair in unsure]
        found.append(
            NoMatch(
                f"{len(unsure)} of {len(matching.pairs)} pairs are ambiguous: other targets would fit equally well",
                lines=_cut(lines),
                hint=("" if reported else "inspect them with --report; ")
                + "--accept-ambiguous accepts the first target of each; "
                + (settles or "--verify, with both models, proves which targets are right"),
            )
        )
    if not matching.pairs and partial and drop_unexpected:
        found.append(NoMatch("no tensor of IN has a counterpart, so nothing would be left"))
    elif matching.left and not (matching.missing or partial or drop_unexpected):
        keeps = "it" if len(matching.left) == 1 else "them"
        names = shown(collapse(matching.left, [slot.name for slot in source.slots]), 5)
        ties = untied(source, target, matching)
        hint = f"--drop-unexpected leaves {keeps} out; --partial keeps {keeps}, and renames the others"
        found.append(
            NoMatch(
                "; ".join([f"the model lacks {len(matching.left)} of its keys: {names}", *ties[:1]]),
                lines=tuple([*ties[1:], *operations.questions, *fused(source, target, matching)][:MOST]),
                hint=f"{UNTIED}; --partial keeps {keeps}, and renames the others" if ties else hint,
            )
        )
    elif matching.missing and not partial:
        lines = [*_groups("only in IN", matching.left, source), *_groups("only in TARGET", matching.missing, target)]
        resemble = [*reasons(_left(source, matching.left), _left(target, matching.missing))]
        ties = untied(source, target, matching)
        notes = [*ties, *operations.questions, *fused(source, target, matching), *resemble]
        fate = "are left out" if drop_unexpected else "keep their keys, or are left out with --drop-unexpected"
        found.append(
            NoMatch(
                f"{len(matching.left)} tensors of IN and {len(matching.missing)} of TARGET have no counterpart",
                lines=(*lines, *notes[:MOST]),
                hint=(None if reshape else _reshapes(source, target, matching))
                or (None if heads else _heads(operations))
                or _line_to_paste(source, target, matching)
                or (settles or VERIFY if resemble or _as_many_elements(source, target, matching) else "")
                or f"--partial renames the others; {UNTIED if ties else f'unmatched tensors of IN {fate}'}",
            )
        )
    if found and not matching.dropped and (stacks := depths.deeper(source.slots, target.slots)):
        found.insert(0, _too_deep(stacks))
    return tuple(found)


UNTIED = "for weights of its own, TARGET must not tie that key (transformers: tie_word_embeddings=False)"
"""The hint on `untied`. It does not name `drop_unexpected`, which would leave out trained weights."""


def untied(source: ExpectedModel, target: ExpectedModel, matching: Matching) -> list[str]:
    """Return a sentence for each tensor that is left over and has the shape of one that TARGET has under more keys."""
    further = {row.name for row in matching.skipped_target if row.tied}
    tensors: dict[str, list[Slot]] = {}
    for slot in target.slots:
        tensors.setdefault(slot.tied or slot.name, []).append(slot)
    ties: dict[tuple[int, ...], list[str]] = {}
    for slots in tensors.values():
        names = [slot.name for slot in slots if slot.name in further]
        kept = [slot.name for slot in slots if slot.name not in further]
        if names and kept:
            ties.setdefault(slots[0].shape, []).append(f"{' or '.join(names)}, which TARGET ties to {kept[0]}")
    return [f"{slot.name} may be {tie}" for slot in _left(source, matching.left) for tie in ties.get(slot.shape, ())]


def _too_deep(stacks: Sequence[depths.DeeperStack]) -> NoMatch:
    """Return the question which blocks of deeper stacks to keep."""
    one = stacks[0]
    ways = [depths.FIRST, depths.LAST, *([depths.EVERY_OTHER] if len(one.numbers[::2]) == one.depth else [])]
    numbers = depths.example(one)
    return NoMatch(
        f"{stacks[0]}, of the same size: which of them does TARGET get?",
        lines=tuple(map(str, stacks[1:MOST])),
        hint=f"{', '.join(f'--blocks {way}' for way in ways)}, or numbers, as in --blocks {numbers}",
    )


def _heads(operations: Operations) -> str | None:
    """Return a hint on `heads` if they would split a tensor that is left over."""
    asked = any("--heads N" in question for question in operations.questions)
    return "--heads N (and --kv-heads N) gives the number of heads" if asked else None


def _as_many_elements(source: ExpectedModel, target: ExpectedModel, matching: Matching) -> bool:
    """Return whether what is left over on both sides may be the same numbers in other tensors."""
    rows = _left(source, matching.left), _left(target, matching.missing)
    sums = [sum(math.prod(slot.shape) for slot in slots if slot.tied is None) for slots in rows]
    return sums[0] == sums[1] > 0


def _line_to_paste(source: ExpectedModel, target: ExpectedModel, matching: Matching) -> str | None:
    """Return a hint with the line of rules that would settle all that is left over, if it is one line."""
    old, new = matching.left, matching.missing
    wholes = fusions(_left(source, old), _left(target, new)), fusions(_left(target, new), _left(source, old))
    shapes = {slot.name: slot.shape for slot in (*source.slots, *target.slots)}
    rows = [line([whole], parts, [Operation("split")]) for whole, parts in wholes[0]]
    rows += [line(parts, [whole], [Operation("concat")]) for whole, parts in wholes[1]]
    if not rows and len(old) == len(new) == 1 and math.prod(shapes[old[0]]) == math.prod(shapes[new[0]]):
        one, other = shapes[old[0]], shapes[new[0]]
        steps = [] if one == other else [Operation("transpose")] if one == other[::-1] else [reshape(one, other)]
        rows = [line(old, new, steps)]
    made = joined([row for row in rows if row is not None])
    if not made or None in rows or len(made) > 1:
        return None
    text = " ".join(part for part in (made[0][0], "->", made[0][1], made[0][2]) if part)
    sure = "if the rows have this order" if any(wholes) else "if these two are the same"
    return f"{sure}, add the line `{text}` to the rules that --partial --rules FILE writes"


def _left(side: ExpectedModel, names: Sequence[str]) -> list[Slot]:
    there = set(names)
    return [slot for slot in side.slots if slot.name in there]


def _reshapes(source: ExpectedModel, target: ExpectedModel, matching: Matching) -> str | None:
    """Return a hint on `reshape` if every tensor that is left over could be reshaped to one of the other side."""
    left, missing = set(matching.left), set(matching.missing)
    sizes: dict[int, list[Slot]] = {}
    for slot in target.slots:
        if slot.name in missing:
            sizes.setdefault(math.prod(slot.shape), []).append(slot)
    pairs = []
    for slot in (slot for slot in source.slots if slot.name in left):
        rows = sizes.get(math.prod(slot.shape), [])
        if any(other.shape == slot.shape for other in rows):
            continue
        fitting = next((other for other in rows if not is_transposed(slot.shape, other.shape)), None)
        if fitting is None:
            return None
        pairs.append((slot, fitting))
    if not pairs:
        return None
    one, other = pairs[0]
    shown = f"{one.name} {list(one.shape)} and {other.name} {list(other.shape)}"
    return f"--reshape pairs tensors of equally many elements, such as {shown}"


def _cut(lines: Sequence[str]) -> tuple[str, ...]:
    more = (f"... {len(lines) - MOST:,} more",) if len(lines) > MOST else ()
    return (*lines[:MOST], *more)


def _groups(label: str, names: Sequence[str], side: ExpectedModel) -> list[str]:
    return [f"{label}: {shown(collapse(names, [slot.name for slot in side.slots]), MOST)}"] if names else []


def fused(source: ExpectedModel, target: ExpectedModel, matching: Matching) -> list[str]:
    """Return a sentence for each tensor that the other side has in parts and that could not be split."""
    ours, theirs = _left(source, matching.left), _left(target, matching.missing)
    sentences = []
    for one, other, whole, parts_in in ((ours, theirs, "IN", "TARGET"), (theirs, ours, "TARGET", "IN")):
        shapes = {slot.name: slot.shape for slot in one}
        for name, parts in fusions(one, other):
            sentences.append(
                f"{whole} has {name} {list(shapes[name])} where {parts_in} has {', '.join(parts)}: "
                "set their order in a rules file (`ckptfix help rules`)"
            )
    return sentences


def notes(
    source: ExpectedModel,
    target: ExpectedModel,
    matching: Matching,
    operations: Operations,
    *,
    drop_unexpected: bool = False,
) -> tuple[str, ...]:
    """Return notes on a matching for the user, a sentence each."""
    ours = {slot.name: slot for slot in source.slots}
    theirs = {slot.name: slot for slot in target.slots}
    sentences = [*matching.notes]
    if matching.by == "position":
        for label, side in (("IN", source), ("TARGET", target)):
            if not side.in_order:
                sentences.append(f"{label} is a safetensors file, which is sorted: its order may not be by definition")
    sentences += _dtype_notes(matching.pairs, ours, theirs)
    sources = {pair.target: pair.source for pair in matching.pairs}
    for slot in target.slots:
        one, other = sources.get(slot.name), sources.get(slot.tied or "")
        if one is None or other is None:
            continue
        if (ours[one].tied or one) != (ours[other].tied or other):
            tie = f"TARGET ties {slot.name} to {slot.tied}"
            equal = equal_values(source, one, other)
            used = "and a load uses the last one"
            said = "with equal values" if equal else used if equal is None else f"with other values, {used}"
            sentences.append(f"{tie}; IN has a tensor for each, {said}")
    added = second_keys(target, matching)
    lacking = [row.name for row in matching.skipped_target if row.tied and row.name not in added]
    if lacking:
        sentences.append(f"OUT lacks {plural(len(lacking), 'second key')} of tensors in TARGET: {some(lacking, 3)}")
    buffers = {row.name for row in matching.skipped_source if not row.tied}
    names = with_buffers(source.slots, matching)
    over = [names.get(name, name) for name in unexpected(source.slots, matching) if name in buffers]
    if over and not drop_unexpected:
        kept = f"OUT keeps {plural(len(over), 'buffer')} that TARGET lacks: {some(over, 3)}"
        sentences.append(f"{kept}; a strict load refuses such keys, and --drop-unexpected leaves them out")
    sentences += untied(source, target, matching)[:MOST]
    sentences += operations.questions
    sentences += fused(source, target, matching)
    return tuple(sentences)


def _dtype_notes(pairs: Iterable[MatchedPair], ours: Mapping[str, Slot], theirs: Mapping[str, Slot]) -> list[str]:
    """Return a sentence for each pair of different dtypes."""
    found: dict[tuple[str, str], list[MatchedPair]] = {}
    for pair in pairs:
        change = ours[pair.source].dtype, theirs[pair.target].dtype
        if all(change) and change[0] != change[1]:
            found.setdefault(change, []).append(pair)
    return [
        f"{len(rows):,} of IN are {one} but {other} in TARGET, such as {rows[0].source}: they stay {one}"
        for (one, other), rows in found.items()
    ]
