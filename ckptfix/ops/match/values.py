"""Pairs proven by equal bytes: a target with weights of the same model shares most of its tensors with the source.

A probe comes first: the largest tensors of a few shapes. Only copies of a model share any of these; if none are equal,
nothing more is read. A tensor that equals several others, such as zeros or ones, proves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckptfix.checkpoint import TensorEntry
from ckptfix.io.source import Readers
from ckptfix.ops.diff.content import find_renamed
from ckptfix.ops.target.targets import ExpectedModel

PROBED = 4
"""Number of shapes whose tensors are probed."""

FEW = 64
"""The most tensors of one shape, on each side, that are probed; a shape with more is not probed."""

MOST = 0.5
"""Share of equal tensors, on the smaller side, from which the two sides are copies of one model."""


def same_values(source: ExpectedModel, target: ExpectedModel) -> dict[str, str]:
    """Pair tensors that have equal bytes and no other equal, if most tensors have an equal one.

    Raises:
        Truncated, DamagedFile: a file lacks data that it promises.
    """
    if source.checkpoint is None or target.checkpoint is None:
        return {}
    sides = _own(source), _own(target)
    if not min(map(len, sides)):
        return {}
    with Readers() as readers:

        def equal(ours: Sequence[TensorEntry], theirs: Sequence[TensorEntry]) -> list[tuple[str, str, bool]]:
            assert source.checkpoint is not None and target.checkpoint is not None
            rows, _ = find_renamed(source.checkpoint, target.checkpoint, ours, theirs, readers, trust_crc=False)
            return [(row.a.key, row.b.key, row.of_several) for row in rows]

        if not equal(*_probe(*sides)):
            return {}
        found = equal(*sides)
    if len(found) < MOST * min(map(len, sides)):
        return {}
    return {ours: theirs for ours, theirs, several in found if not several}


def _own(side: ExpectedModel) -> list[TensorEntry]:
    """Return the tensors that are not tied to an earlier one."""
    names = {slot.name for slot in side.slots if slot.tied is None}
    return [entry for entry in side.entries if entry.key in names]


def _probe(
    ours: Sequence[TensorEntry], theirs: Sequence[TensorEntry]
) -> tuple[list[TensorEntry], list[TensorEntry]]:
    """Choose the tensors of a few shapes on both sides: the rarest shapes, and among these the largest."""
    shapes: dict[tuple[str, tuple[int, ...]], tuple[list[TensorEntry], list[TensorEntry]]] = {}
    for which, entries in enumerate((ours, theirs)):
        for entry in entries:
            shapes.setdefault((entry.dtype, entry.shape), ([], []))[which].append(entry)
    rows = [row for row in shapes.values() if all(row) and max(map(len, row)) <= FEW and row[0][0].numel > 1]
    rows.sort(key=lambda row: (len(row[0]) + len(row[1]), -row[0][0].numel))
    return [entry for row in rows[:PROBED] for entry in row[0]], [entry for row in rows[:PROBED] for entry in row[1]]
