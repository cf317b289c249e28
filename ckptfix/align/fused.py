"""Tensors that one model fuses and another splits: found by words and shapes, matched by their parts.

A fused tensor is replaced with slots that have the names of the parts on the other side, and then tensors are matched
as usual. A fusion found in this way becomes an operation of a rules file (`names.operations`). It is proposed only if
words and sizes leave one possibility. The fused module's name tells which rows are the query's, if models agree on it;
otherwise `Heads` tells. If both sides fuse the same parts in different orders, both are replaced with the same parts,
and the operations of one side are followed by the inverse ones of the other.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from ckptfix.align.layouts import (
    EITHER,
    IN_HEADS,
    IN_ROW,
    OWN,
    RowOrders,
    any_number,
    either,
    module_of,
    of_experts,
)
from ckptfix.align.result import Matching
from ckptfix.dataclass import dataclass
from ckptfix.names.operations import Operation
from ckptfix.names.slots import Slot
from ckptfix.names.spellings import (
    CONV1D,
    FROM_THE_RIGHT,
    FUSIONS,
    REORDERED_QKV,
    canonical,
    part_of_expert,
    splits_of,
)

Shape = tuple[int, ...]

_EXPERT = re.compile(r"(.*\bexperts)\.(\d+)\.(.+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Heads:
    """Numbers of query heads and of key and value heads in attention; None if unknown."""

    query: int | None = None
    kv: int | None = None

    @property
    def options(self) -> dict[str, int]:
        """The heads as options of an operation."""
        assert self.query is not None
        return {"heads": self.query, **({} if self.kv in (None, self.query) else {"kv": self.kv or 0})}


@dataclass(frozen=True, slots=True)
class Fused:
    """A tensor of one side, and the parts that replace it.

    Attributes:
        whole: name of the tensor.
        parts: slots whose names do not exist on this side.
        operations: lead from the tensor to the parts; for the target they are run in reverse.
        experts: number of experts that the parts belong to, one after the other; 0 if they are not experts.
    """

    whole: str
    parts: tuple[Slot, ...]
    operations: tuple[Operation, ...]
    experts: int = 0


@dataclass(frozen=True, slots=True)
class UnfusedSide:
    """One side with fused tensors replaced with their parts.

    Attributes:
        slots: the slots to match.
        fused: name of a part -> the tensor that it belongs to.
        questions: reasons why a tensor that may be fused was not split, one sentence each.
    """

    slots: tuple[Slot, ...]
    fused: Mapping[str, Fused]
    questions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FusedTensors:
    """Tensors of the source that together become tensors of the target.

    Attributes:
        old, new: names; one of the two has a single name. Names of experts are ordered by expert.
        operations: from old to new.
        experts: number of experts on the side with several names; 0 if they are not experts.
        joins: whether the target is the single tensor.
    """

    old: tuple[str, ...]
    new: tuple[str, ...]
    operations: tuple[Operation, ...]
    experts: int
    joins: bool


def sides(
    source: Sequence[Slot], target: Sequence[Slot], heads: Heads, rows: tuple[RowOrders, RowOrders]
) -> tuple[UnfusedSide, UnfusedSide]:
    """Return both sides with tensors split or transposed where the other side has them so."""
    ours = _turned(source, target) | _turned_experts(source, target) | _reordered(source, target, rows)
    theirs = _turned(target, source) | _reordered(target, source, (rows[1], rows[0]))
    return (
        _apart(source, _shown(target, theirs), heads, ours, rows),
        _apart(target, _shown(source, ours), heads, theirs, (rows[1], rows[0])),
    )


def are_turned(source: Sequence[Slot], target: Sequence[Slot]) -> bool:
    """Return whether one side has matrices that the other has transposed; for square ones, shapes do not show it."""
    return bool(_turned(source, target) or _turned(target, source))


def _turned(mine: Sequence[Slot], other: Sequence[Slot]) -> dict[str, Slot]:
    """Return the matrices that one side has transposed, by name, with the shape that the weight of a `Linear` has."""
    slots = {slot.name: slot for slot in mine}
    made: dict[str, Slot] = {}
    for kind, ending in ((_conv1d, ""), (_from_the_right, ".weight")):
        if not kind(other):
            for name in kind(mine):
                made[name] = replace(slots[name], name=name + ending, shape=slots[name].shape[::-1])
    return made


def _reordered(
    mine: Sequence[Slot], other: Sequence[Slot], rows: tuple[RowOrders, RowOrders]
) -> dict[str, Slot]:
    """Return the fused tensors whose names spell an order that the other side has not, by name, spelled ``qkv``.

    Only equal parts can be put in order: as many rows each as the matrix has columns.
    """
    shapes = {slot.name: slot.shape for slot in mine}
    there = {rows[1].of(slot.name) for slot in other}
    made: dict[str, Slot] = {}
    for slot in mine:
        front, last, leaf = module_of(slot.name)
        matrix = shapes.get(f"{front}{last}.weight", ())
        if last not in REORDERED_QKV or rows[0].of(slot.name) in (OWN, *there):
            continue
        name = f"{front}qkv.{leaf}"
        if len(matrix) == 2 and matrix[0] == 3 * matrix[1] == slot.shape[0] and name not in shapes:
            made[slot.name] = replace(slot, name=name)
    return made


def _turned_experts(source: Sequence[Slot], target: Sequence[Slot]) -> dict[str, Slot]:
    """Return the stacked experts of the source that the target has transposed, by name, as the target has them.

    Square ones are as the others beside them. Experts with a bias may alternate the rows of gate and up (GPT-OSS).
    """
    theirs = {behind: slot.shape for slot in reversed(target) if (behind := of_experts(slot)) is not None}
    names = {slot.name for slot in source}
    stacked = [slot for slot in source if of_experts(slot) in theirs and f"{slot.name}_bias" not in names]
    turned = {
        slot.name.rpartition(".")[0]
        for slot in stacked
        if slot.shape != theirs[of_experts(slot) or ""] == (slot.shape[0], slot.shape[2], slot.shape[1])
    }
    return {
        slot.name: replace(slot, shape=(slot.shape[0], slot.shape[2], slot.shape[1]))
        for slot in stacked
        if slot.name.rpartition(".")[0] in turned
    }


def _conv1d(slots: Sequence[Slot]) -> list[str]:
    """Return the weights of `transformers.Conv1D` modules, (in, out). A fused one is three times as wide as high."""
    weights = [slot for slot in slots if len(slot.shape) == 2 and module_of(slot.name)[1:] in CONV1D]
    fused = [slot.shape for slot in weights if module_of(slot.name)[1] == "c_attn"]
    wide = [out / inner for inner, out in fused if inner]
    # Cross attention has a separate query, and the other two fused.
    return [slot.name for slot in weights] if 3 in wide and all(one in (2, 3) for one in wide) else []


def _from_the_right(slots: Sequence[Slot]) -> list[str]:
    """Return parameters outside a module that a `Linear` would store transposed."""
    return [
        slot.name for slot in slots if len(slot.shape) == 2 and slot.name.rpartition(".")[2] in FROM_THE_RIGHT
    ]


def _shown(slots: Sequence[Slot], turned: Mapping[str, Slot]) -> list[Slot]:
    return [turned.get(slot.name, slot) for slot in slots]


def _apart(
    mine: Sequence[Slot],
    other: Sequence[Slot],
    heads: Heads,
    turned: Mapping[str, Slot],
    rows: tuple[RowOrders, RowOrders],
) -> UnfusedSide:
    splits = _Splits(other, rows)
    names = {slot.name for slot in mine}
    shapes = {slot.name: slot.shape for slot in mine}
    made: list[Slot] = []
    fused: dict[str, Fused] = {}
    questions: dict[str, None] = {}
    for whole in mine:
        slot = turned.get(whole.name, whole)
        found = splits.of(slot, heads, names, shapes) if slot.tied is None else None
        before = (_turn(whole),) if whole.name in turned else ()
        if isinstance(found, str):
            questions[found] = None
        uneven = isinstance(found, Fused) and len({part.shape for part in found.parts}) > 1
        if before and before[0].name == "order" and uneven:
            found, slot, before = None, whole, ()  # `order` cuts equal parts
        if not isinstance(found, Fused) or not names.isdisjoint(part.name for part in found.parts):
            made.append(slot)
            if before:
                fused[slot.name] = Fused(whole.name, (slot,), before)
            continue
        names |= {part.name for part in found.parts}
        fused |= dict.fromkeys(
            (part.name for part in found.parts),
            replace(found, whole=whole.name, operations=(*before, *found.operations)),
        )
        made += found.parts
    return UnfusedSide(tuple(made), fused, tuple(questions))


def _turn(whole: Slot) -> Operation:
    """Return the operation that makes a tensor as the other side has it, for one of those that are shown so."""
    order = REORDERED_QKV.get(module_of(whole.name)[1])
    if order is not None:
        return Operation("order", {"to": order})
    return Operation("transpose", {"dims": (1, 2)} if len(whole.shape) == 3 else {})


class _Splits:
    """The split tensors of one side, for looking up tensors of the other side.

    Args:
        rows: the orders of rows of the other side, and of this one.
    """

    def __init__(self, slots: Sequence[Slot], rows: tuple[RowOrders, RowOrders]) -> None:
        by_name = {slot.name: slot for slot in slots}
        self._rows = rows[0]
        self._groups: dict[tuple[str, str], dict[tuple[Shape, ...], tuple[str, ...]]] = {}
        """(family, parameter) -> shapes of the parts -> names of the parts."""
        self._experts: dict[str, dict[tuple[int, Shape], str]] = {}
        """Role of an expert's tensor -> (number of experts, its shape) -> the rest of the name after the number."""
        self._fused: dict[tuple[str, str, Shape], str | None] = {}
        """Family, parameter and shape of the tensors that are fused on this side too -> the order of their rows."""
        self._whole = {(slot.name.rpartition("experts.")[2], slot.shape) for slot in slots if "experts." in slot.name}
        experts: dict[tuple[str, str], dict[int, Slot]] = {}
        spelled = canonical(tuple(by_name))
        named = {spelled.get(name, name): slot for name, slot in by_name.items()}
        for (front, leaf), families in splits_of(named).items():
            for family, split in families:
                shapes = tuple(named[f"{front}{part}.{leaf}"].shape for part in split)
                self._groups.setdefault((family, leaf), {}).setdefault(shapes, split)
        for name, slot in by_name.items():
            _, last, leaf = module_of(name)
            for family, fused, _ in FUSIONS:
                if last in fused:
                    self._fused[family, leaf, slot.shape] = rows[1].of(name)
            found = _EXPERT.fullmatch(name)
            if found is not None:
                experts.setdefault((found[1], found[3]), {})[int(found[2])] = slot
        for (front, behind), numbered in experts.items():
            shapes_of = {slot.shape for slot in numbered.values()}
            first = f"{front}.0."
            role = part_of_expert(spelled.get(first + behind, first + behind).removeprefix(first))
            if role and len(shapes_of) == 1 and sorted(numbered) == list(range(len(numbered))):
                self._experts.setdefault(role, {})[len(numbered), shapes_of.pop()] = behind

    def of(
        self, slot: Slot, heads: Heads, names: Collection[str], shapes: Mapping[str, Shape]
    ) -> Fused | str | None:
        """Return the parts of a fused tensor; a question if they are uncertain; None if it is not fused.

        Args:
            names: names on its own side, and of the parts already found there.
            shapes: shapes on its own side.
        """
        if (slot.name.rpartition("experts.")[2], slot.shape) in self._whole:
            return None
        return self._experts_of(slot, names, shapes) or self._parts_of(slot, heads)

    def _parts_of(self, slot: Slot, heads: Heads) -> Fused | str | None:
        front, last, leaf = module_of(slot.name)
        own = self._rows.of(slot.name)
        for family, fused, _ in FUSIONS:
            if last not in fused or len(slot.shape) not in (1, 2):
                continue
            if (family, leaf, slot.shape) in self._fused:
                if family == "qkv" and {own, self._fused[family, leaf, slot.shape]} == {IN_HEADS, IN_ROW}:
                    return _of_both(slot, heads, own == IN_HEADS)
                continue
            for shapes, split in self._groups.get((family, leaf), {}).items():
                steps = _cut(slot.shape, shapes, "split", {})
                if steps is None:
                    continue
                if own == EITHER:
                    return either(slot.name)
                if own == OWN:
                    return (
                        f"{any_number(slot.name)} {list(slot.shape)} has its rows in a special order: state it in a "
                        "rules file (`ckptfix help rules`)"
                    )
                if own == IN_HEADS:
                    if heads.query is None:
                        return (
                            f"{any_number(slot.name)} {list(slot.shape)} holds query, key and value head by head, or "
                            "one after the other: pass --heads N (and --kv-heads N) if it is head by head"
                        )
                    if not _fits(heads, shapes):
                        return f"{any_number(slot.name)} {list(slot.shape)} does not have the rows of {_said(heads)}"
                    options = heads.options if "kv" in heads.options else {"groups": heads.query}
                    steps = _cut(slot.shape, shapes, "deinterleave", options)
                    assert steps is not None
                parts = tuple(
                    Slot(f"{front}{part}.{leaf}", shape, slot.dtype) for part, shape in zip(split, shapes, strict=True)
                )
                return Fused(slot.name, parts, steps)
        return None

    def _experts_of(self, slot: Slot, names: Collection[str], shapes: Mapping[str, Shape]) -> Fused | str | None:
        front, mark, behind = slot.name.rpartition("experts.")
        if not mark or len(slot.shape) != 3:
            return None
        role = part_of_expert(behind)
        if role == "gate-up" and f"{slot.name}_bias" in names:
            return f"{any_number(slot.name)} {list(slot.shape)} may alternate the rows of gate and up, as in GPT-OSS"
        roles = ("gate", "up") if role == "gate-up" else (role,)
        count, *rest = slot.shape
        tables = [self._experts.get(role or "", {}) for role in roles]
        if not all(tables):
            return None
        for (experts, shape), first in tables[0].items():
            if experts != count or len(shape) != 2 or any((count, shape) not in table for table in tables):
                continue
            plain = (shape[0] * len(roles), shape[1])
            ways = [turned for turned in (False, True) if tuple(rest) == (plain[::-1] if turned else plain)]
            if len(ways) == 2:
                ways = self._as_beside(front, role or "", count, shapes)
            if len(ways) != 1:
                if ways:
                    return (
                        f"{any_number(slot.name)} {list(slot.shape)} may or may not hold its experts transposed: state "
                        "it in a rules file (`ckptfix help rules`)"
                    )
                continue
            steps = [Operation("unstack")]
            steps += [Operation("transpose")] if ways[0] else []
            steps += [Operation("split")] if len(roles) > 1 else []
            ends = [first, *(table[count, shape] for table in tables[1:])]
            parts = tuple(
                Slot(f"{front}experts.{number}.{end}", shape, slot.dtype) for number in range(count) for end in ends
            )
            return Fused(slot.name, parts, tuple(steps), count)
        return None

    def _as_beside(self, front: str, role: str, count: int, shapes: Mapping[str, Shape]) -> list[bool]:
        """Return whether square experts may be transposed, judging by the other tensor of experts beside them.

        Returns:
            The possible answers: False, True, or both.
        """
        beside, roles = ("gate_up_proj", ("gate", "up")) if role == "down" else ("down_proj", ("down",))
        whole = shapes.get(f"{front}experts.{beside}")
        parts = {shape for experts, shape in self._experts.get(roles[0], {}) if experts == count}
        if whole is None or len(parts) != 1:
            return [False, True]
        (rows, columns) = parts.pop()
        plain = rows * len(roles), columns
        return [turned for turned in (False, True) if whole[1:] == (plain[::-1] if turned else plain)]


def _of_both(slot: Slot, heads: Heads, by_head: bool) -> Fused | str:
    """Return query, key and value of a tensor that the other side has in another order; a question without `heads`.

    Args:
        by_head: whether the tensor holds them head by head.
    """
    front, _, leaf = module_of(slot.name)
    if heads.query is None:
        return (
            f"{any_number(slot.name)} {list(slot.shape)} and its counterpart may hold query, key and value in "
            "different orders: pass --heads N (and --kv-heads N) if one of them is head by head"
        )
    kv = heads.kv or heads.query
    size, odd = divmod(slot.shape[0], heads.query + 2 * kv)
    if odd:
        return f"{any_number(slot.name)} {list(slot.shape)} does not have the rows of {_said(heads)}"
    options = heads.options if "kv" in heads.options else {"parts": 3}
    steps = Operation("split", options)
    if by_head:
        steps = Operation("deinterleave", options if "kv" in options else {"groups": heads.query, **options})
    parts = tuple(
        Slot(f"{front}{part}.{leaf}", (size * count, *slot.shape[1:]), slot.dtype)
        for part, count in zip(("query", "key", "value"), (heads.query, kv, kv), strict=True)
    )
    return Fused(slot.name, parts, (steps,))


def _cut(
    whole: Shape, parts: Sequence[Shape], verb: str, options: Mapping[str, int]
) -> tuple[Operation, ...] | None:
    """Return the operations that split a tensor into parts of these shapes; None if there is no way."""
    rows = [shape[0] for shape in parts]
    if any(shape[1:] != parts[0][1:] or len(shape) != len(whole) for shape in parts):
        return None
    stated: dict[str, int | tuple[int, ...]] = dict(options)
    if not options and len(set(rows)) > 1:
        stated = {"sizes": tuple(rows)}
    return (Operation(verb, stated),) if whole == (sum(rows), *parts[0][1:]) else None


def _fits(heads: Heads, shapes: Sequence[Shape]) -> bool:
    assert heads.query is not None
    rows = [shape[0] for shape in shapes]
    kv = heads.kv or heads.query
    size, odd = divmod(rows[0], heads.query)
    return not odd and heads.query % kv == 0 and all(row == size * kv for row in rows[1:])


def _said(heads: Heads) -> str:
    return f"{heads.query} heads" + (f" and {heads.kv} key and value heads" if heads.kv else "")


def taken(matching: Matching, source: UnfusedSide, target: UnfusedSide) -> tuple[list[FusedTensors], list[str]]:
    """Return the whole tensors that follow from the pairs of parts, and the names of tensors for which nothing follows.

    All parts must go, in order, to the parts of one module, or to all parts of one tensor.
    """
    to = {pair.source: pair.target for pair in matching.pairs if not pair.instead}
    spelled = [canonical([slot.name for slot in side.slots]) for side in (target, source)]
    back = {new: old for old, new in to.items()}
    found: list[FusedTensors] = []
    wrong: list[str] = []
    for side, pairs, joins, names in ((source, to, False, spelled[0]), (target, back, True, spelled[1])):
        elsewhere = (target if side is source else source).fused
        for whole in {one.whole: one for one in side.fused.values()}.values():
            others = tuple(pairs.get(part.name, "") for part in whole.parts)
            twin = elsewhere.get(others[0])
            if twin is not None and others == tuple(part.name for part in twin.parts):
                if not joins:
                    steps = (*whole.operations, *_inverse(twin.operations))
                    found.append(FusedTensors((whole.whole,), (twin.whole,), steps, 0, joins=False))
                continue
            words = [names.get(other, other) for other in others]
            in_order = _in_order(whole, others) or _in_order(whole, words)
            if not all(others) or any(other in elsewhere for other in others) or not in_order:
                wrong.append(whole.whole)
            elif joins:
                steps = _inverse(whole.operations)
                found.append(FusedTensors(others, (whole.whole,), steps, whole.experts, joins=True))
            else:
                found.append(FusedTensors((whole.whole,), others, whole.operations, whole.experts, joins=False))
    return found, wrong


def _inverse(operations: Sequence[Operation]) -> tuple[Operation, ...]:
    return tuple(step.inverse() for step in reversed(operations))


def _in_order(whole: Fused, others: Sequence[str]) -> bool:
    """Return whether the parts have gone to the parts of one module, each to the one with the same word."""
    own = [_ending(part.name, [slot.name for slot in whole.parts]) for part in whole.parts]
    return own == [_ending(other, others) for other in others]


def _ending(name: str, among: Sequence[str]) -> str:
    """Return what distinguishes a name among others: the text after the front that they share."""
    parts = [one.split(".") for one in among]
    shared = 0
    while len({tuple(part[: shared + 1]) for part in parts}) == 1 and shared + 1 < len(parts[0]):
        shared += 1
    return ".".join(name.split(".")[shared:]) if len(among) > 1 else ""
