"""Matchings that split, join or transpose tensors, and the rules file that does the same."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from ckptfix.align import match as matcher
from ckptfix.align.fused import FusedTensors, Heads, are_turned, sides, taken
from ckptfix.align.layouts import RowOrders, is_glm, neighbours, orders, rotary, row_orders
from ckptfix.align.result import MatchedPair, Matching
from ckptfix.dataclass import dataclass
from ckptfix.errors import Refused
from ckptfix.names import rulefile
from ckptfix.names.lines import Line, joined, line
from ckptfix.names.operations import HALF, Operation
from ckptfix.names.rules import NameRule
from ckptfix.names.slots import Slot
from ckptfix.ops.rename.groups import grouped

LEARNED = "the learned rules"
"""Path of rules that were found, and are in no file."""

_QUERIES = re.compile(r"\.(?:wq|q_proj)\.")


@dataclass(frozen=True, slots=True)
class Operations:
    """The changes that a matching makes to tensors, beside their keys.

    Attributes:
        taken: the tensors, and the operations on them.
        questions: reasons why a tensor has no counterpart, a sentence each.
        refused: whether the questions must be answered before the matching is written.
    """

    taken: tuple[FusedTensors, ...] = ()
    questions: tuple[str, ...] = ()
    refused: bool = False


def with_operations(
    plain: Matching,
    source: Sequence[Slot],
    target: Sequence[Slot],
    heads: Heads,
    proven: Mapping[str, str],
    *,
    reshape: bool = False,
    configs: tuple[Mapping[str, object], Mapping[str, object]] = ({}, {}),
) -> tuple[Matching, Operations]:
    """Split fused tensors if that pairs more of them, and reorder queries and keys for the target.

    Args:
        plain: the matching of the unchanged tensors.
        reshape: as for `ckptfix.align.match.match`.
        configs: config.json beside the file of each side.
    """
    ours, theirs = (
        row_orders(side, config, heads.query is not None)
        for side, config in zip((source, target), configs, strict=True)
    )
    rows = ours, theirs
    done = Operations()
    made = plain
    question = orders(plain, rows)
    if not plain.complete or are_turned(source, target) or question is not None:
        made, done = _taken_apart(plain, (source, target), heads, proven, reshape, rows)
        question = orders(made, rows)
    if question is not None and any("--heads N" in asked for asked in done.questions):
        return made, replace(done, refused=True)
    if question is None and is_glm(source) != is_glm(target) and done.taken:
        question = "GLM rotates neighboring rows, other models of transformers rotate halves of a head"
    if question is not None:
        return made, replace(done, questions=(*done.questions, question), refused=True)
    layout = rotary(source, target)
    return (made, done) if layout is None else _laid_out(made, done, (source, target), layout, heads)


def _taken_apart(
    plain: Matching,
    both: tuple[Sequence[Slot], Sequence[Slot]],
    heads: Heads,
    proven: Mapping[str, str],
    reshape: bool,
    rows: tuple[RowOrders, RowOrders],
) -> tuple[Matching, Operations]:
    source, target = both
    mine, other = sides(source, target, heads, rows)
    questions = (*mine.questions, *other.questions)
    if not mine.fused and not other.fused:
        return plain, Operations(questions=questions)
    matching = matcher.match(mine.slots, other.slots, reshape=reshape, proven=proven)
    found, wrong = taken(matching, mine, other)
    turned = are_turned(source, target)
    needed = turned or orders(plain, rows) is not None
    if wrong or _open(matching) >= _open(plain) + needed or any(line_of(one) is None for one in found):
        if turned and plain.complete:
            question = "projections of one side are transposed on the other side, and some have no counterpart"
            return plain, Operations(questions=(*questions, question), refused=True)
        return plain, Operations(questions=questions)
    by_part = {pair.source: pair for pair in matching.pairs} | {pair.target: pair for pair in matching.pairs}
    by_part |= {one.whole: by_part[name] for name, one in mine.fused.items() if name in by_part}
    parts = mine.fused.keys(), other.fused.keys()
    pairs = [pair for pair in matching.pairs if pair.source not in parts[0] and pair.target not in parts[1]]
    for one in found:
        said = " | ".join(map(str, one.operations))
        for old in one.old:
            for new in one.new:
                part = by_part[old if one.joins or new not in by_part else new]
                pairs.append(MatchedPair(old, new, part.confidence, part.why, operation=said))
    order = {slot.name: index for index, slot in enumerate(source)}
    return (
        replace(matching, pairs=tuple(sorted(pairs, key=lambda pair: order[pair.source])), rules=()),
        Operations(tuple(found), questions),
    )


def _open(matching: Matching) -> int:
    return len(matching.left) + len(matching.missing) + len(matching.ambiguous)


def _laid_out(
    matching: Matching, done: Operations, both: tuple[Sequence[Slot], Sequence[Slot]], layout: str, heads: Heads
) -> tuple[Matching, Operations]:
    """Add operations that reorder the rows of queries and keys for the target's rotary layout.

    If one side has queries and keys fused, they are reordered as parts: after the split, or before they are joined.
    """
    source, target = both
    side, slots = ("source", source) if layout == HALF else ("target", target)
    near = neighbours(slots)
    concerned = [pair for pair in matching.pairs if getattr(pair, side) in near]
    if not concerned:
        return matching, done
    rows = {slot.name: slot.shape[0] for slot in slots if slot.name in near}
    size = next((rows[name] for pair in concerned if _QUERIES.search(name := getattr(pair, side))), 0)
    question = None
    if heads.query is None:
        question = (
            "rotary pairs are neighbors in files of Meta, Mistral and torchtune, and halves of a head in most others: "
            "the rows of queries and keys must be reordered, and --heads N (and --kv-heads N) sets the number of heads"
        )
    elif size % (2 * heads.query) or any(row % (size // heads.query) for row in rows.values()):
        question = f"the {size} rows of queries, or the rows of keys, do not fit {heads.query} heads"
    if question is not None:
        return matching, replace(done, questions=(*done.questions, question), refused=True)
    assert heads.query is not None
    taken = {(one.old, one.new): one for one in done.taken}
    of = {(old, new): key for key in taken for old in key[0] for new in key[1]}
    for pair in concerned:
        if (pair.source, pair.target) not in of:
            alone = FusedTensors((pair.source,), (pair.target,), (), 0, joins=False)
            taken[alone.old, alone.new] = alone
            of[pair.source, pair.target] = alone.old, alone.new
    changed = {of[pair.source, pair.target] for pair in concerned}
    for key in changed:
        one = taken[key]
        names = one.old if layout == HALF else one.new
        steps = tuple(
            Operation("rope", {**({"of": (part,)} if len(names) > 1 else {}),
                               "heads": rows[name] * heads.query // size, "to": layout})
            for part, name in enumerate(names)
            if name in near
        )  # fmt: skip
        operations = (*steps, *one.operations) if one.joins else (*one.operations, *steps)
        taken[key] = replace(one, operations=operations)
    said = {key: " | ".join(map(str, taken[key].operations)) for key in changed}
    of = {pair: key for pair, key in of.items() if key in changed}
    pairs = tuple(
        replace(pair, operation=said[of[pair.source, pair.target]]) if (pair.source, pair.target) in of else pair
        for pair in matching.pairs
    )
    return replace(matching, pairs=pairs, rules=()), replace(done, taken=tuple(taken.values()))


def line_of(one: FusedTensors) -> Line | None:
    return line(one.old, one.new, one.operations, one.experts)


def lines(done: Sequence[FusedTensors], keys: Sequence[str]) -> list[str]:
    """Return the lines of a rules file that apply exactly these operations to the keys."""
    single = [row for row in map(line_of, done) if row is not None]
    few = joined(single)
    rows = few if _say(few, done, keys) else single
    return [f"{old} -> {new} {operations}" for old, new, operations in rows]


def _say(rows: Sequence[Line], done: Sequence[FusedTensors], keys: Sequence[str]) -> bool:
    """Return whether these lines apply exactly the wanted operations to the keys."""
    text = "\n".join(f"{old} -> {new} {operations}" for old, new, operations in rows)
    try:
        made = grouped(keys, rulefile.read(text, "rules"), {key: key for key in keys})
    except Refused:
        return False
    found = {group.old(): (group.rule.operations, group) for group in made.groups.values()}
    if len(found) != len(done):
        return False
    for one in done:
        operations, group = found.get(one.old, ((), None))
        if group is None or tuple(map(str, operations)) != tuple(map(str, one.operations)):
            return False
        per = len(one.new) // one.experts if one.experts and not one.joins else 0
        slots = [divmod(index, per) if per else (0, index) for index in range(len(one.new))]
        if tuple(map(group.new, slots)) != one.new:
            return False
    return True


def rules(
    done: Sequence[FusedTensors], names: Sequence[NameRule], keys: Sequence[str], before: Sequence[str] = ()
) -> rulefile.Rules:
    """Return the rules for `rename`: the lines `before`, the lines for tensors, and those for names."""
    rows = [*before, *lines(done, keys)]
    made = rulefile.read("\n".join(rows), LEARNED)
    start = len(rows) + 1
    return replace(
        made,
        names={rule.old: rule.new for rule in names},
        lines={rule.old: start + index for index, rule in enumerate(names)},
    )


@contextmanager
def of_found_rules(path: str) -> Iterator[None]:
    """Make errors of learned rules name the checkpoint `path`, and explain how to write the rules to a file."""
    try:
        yield
    except Refused as error:
        if error.path == LEARNED:
            way = "run `--rules FILE` to save the rules, edit the line there, and run `rename --map FILE`"
            error.path, error.where, error.hint = path, None, f"{way}; {error.hint}"
        raise
