"""Matching by position: tensor n of one model is tensor n of the other.

Both sequences are in definition order. Pairs are checked for shape and dtype. A tensor that one side lacks must be
allowed by a rule of `names.spellings`, or be a tied name; otherwise it is an error. Nothing is cut off to make the
lengths equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from itertools import product

from ckptfix.align.result import MatchedPair, Matching, Skipped
from ckptfix.dataclass import dataclass
from ckptfix.errors import NoMatch
from ckptfix.names.learn import learn
from ckptfix.names.no_weights import optional
from ckptfix.names.slots import Slot, dtype_kind, misfit

AROUND = 3
"""Rows shown before and after the place where the two sequences diverge."""

_BESIDE, _PARTS = "  ", "x "
"""Beginnings of the rows of the excerpt; the second one marks the place itself."""


@dataclass(slots=True)
class _Walk:
    """One way through both sequences: pairs of indices, the skipped names, and where it stopped, if it did."""

    pairs: list[tuple[int, int]] = field(default_factory=list)
    skipped_source: list[Skipped] = field(default_factory=list)
    skipped_target: list[Skipped] = field(default_factory=list)
    stopped: tuple[int, int, str] | None = None


def match(source: Sequence[Slot], target: Sequence[Slot], *, reshape: bool = False) -> Matching:
    """Pair `source` and `target` in order.

    A buffer that a family's rule allows to be absent is skipped if the other side does not have it at that place. Tied
    names are first treated as separate tensors, and skipped only if the sequences do not match otherwise. The same goes
    for a buffer that has a name unknown to the rules on the other side (``count`` for ``num_batches_tracked``).

    Raises:
        NoMatch: the sequences diverge; its lines show the place in both.
    """
    best: _Walk | None = None
    for by_shape, source_ties, target_ties in product((False, True), (True, False), (True, False)):
        walk = _walk(source, target, source_ties, target_ties, reshape, by_shape)
        if walk.stopped is None:
            return _matching(source, target, walk)
        if best is None or len(walk.pairs) > len(best.pairs):
            best = walk
    assert best is not None
    raise _parted(source, target, best)


def _walk(
    source: Sequence[Slot], target: Sequence[Slot], source_ties: bool, target_ties: bool, reshape: bool, by_shape: bool
) -> _Walk:
    """Walk both sequences; `source_ties` and `target_ties` say whether tied names count.

    With `by_shape`, an integer buffer, which is never a weight, is paired with an unknown one if it fits there.
    """
    walk = _Walk()
    i = j = 0
    while True:
        if i < len(source) and source[i].tied is not None and not source_ties:
            walk.skipped_source.append(_tied(source[i]))
            i += 1
            continue
        if j < len(target) and target[j].tied is not None and not target_ties:
            walk.skipped_target.append(_tied(target[j]))
            j += 1
            continue
        ours = source[i] if i < len(source) else None
        theirs = target[j] if j < len(target) else None
        if ours is None and theirs is None:
            return walk
        our_rule = optional(ours) if ours is not None else None
        their_rule = optional(theirs) if theirs is not None else None
        why = None
        if ours is not None and theirs is not None and (our_rule == their_rule or (by_shape and _whole(ours, theirs))):
            why = misfit(ours, theirs, reshape=reshape)
            if why is None:
                walk.pairs.append((i, j))
                i, j = i + 1, j + 1
                continue
        if ours is not None and our_rule is not None:
            walk.skipped_source.append(Skipped(ours.name, our_rule.id))
            i += 1
        elif theirs is not None and their_rule is not None:
            walk.skipped_target.append(Skipped(theirs.name, their_rule.id))
            j += 1
        else:
            longer = "IN" if theirs is None else "TARGET"
            walk.stopped = (i, j, why or f"{longer} has more tensors")
            return walk


def _whole(*slots: Slot) -> bool:
    return all(dtype_kind(slot.dtype) == "whole" for slot in slots)


def _tied(slot: Slot) -> Skipped:
    return Skipped(slot.name, f"tied to {slot.tied}", tied=True)


def _matching(source: Sequence[Slot], target: Sequence[Slot], walk: _Walk) -> Matching:
    pairs = []
    for i, j in walk.pairs:
        ours, theirs = source[i], target[j]
        reshaped = theirs.shape if theirs.shape != ours.shape else None
        pairs.append(MatchedPair(ours.name, theirs.name, why=f"place {i + 1} and {j + 1}", reshape=reshaped))
    return Matching(
        "position",
        tuple(pairs),
        learn({pair.source: pair.target for pair in pairs}, [slot.name for slot in source]),
        skipped_source=tuple(walk.skipped_source),
        skipped_target=tuple(walk.skipped_target),
    )


def _parted(source: Sequence[Slot], target: Sequence[Slot], walk: _Walk) -> NoMatch:
    assert walk.stopped is not None
    i, j, why = walk.stopped
    return NoMatch(
        f"matching by position stops after {len(walk.pairs)} pairs, at tensor {i + 1} of IN ({len(source)} in all) "
        f"and {j + 1} of TARGET ({len(target)} in all): {why}",
        lines=_excerpt(source, target, walk.pairs, i, j),
        hint="--by structure also uses the names and neighbors of tensors",
    )


def _excerpt(
    source: Sequence[Slot], target: Sequence[Slot], pairs: Sequence[tuple[int, int]], i: int, j: int
) -> tuple[str, ...]:
    """Return two columns around the place: the last pairs, then what follows on both sides, unpaired."""
    rows: list[tuple[str, Slot | None, Slot | None]] = [(_BESIDE, source[a], target[b]) for a, b in pairs[-AROUND:]]
    for step in range(AROUND + 1):
        ours = source[i + step] if i + step < len(source) else None
        theirs = target[j + step] if j + step < len(target) else None
        if ours is not None or theirs is not None:
            rows.append((_BESIDE if step else _PARTS, ours, theirs))
    left = [_shown(ours) for _, ours, _ in rows]
    width = max(map(len, left), default=0)
    return tuple(
        f"{mark}{text.ljust(width)}  {_shown(theirs)}" for (mark, _, theirs), text in zip(rows, left, strict=True)
    )


def _shown(slot: Slot | None) -> str:
    if slot is None:
        return "(nothing)"
    return f"{slot.name} {list(slot.shape)} {slot.dtype}".rstrip()
