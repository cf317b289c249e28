"""Pairs proven by equal bytes: of a copy most tensors are equal, of a model with frozen layers these.

A probe comes first: the largest tensors of a few shapes. If none are equal, the first bytes of the larger tensors are
compared: frozen layers and shared embeddings are found so. A tensor that equals several others, or that holds one
number throughout, such as zeros or ones, proves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckptfix.align.units import number_kind
from ckptfix.checkpoint import TensorEntry
from ckptfix.elements.reader import content
from ckptfix.formats import weights_of
from ckptfix.io.source import Readers
from ckptfix.ops.diff.content import HEAD, RenamedTensors, find_renamed, leaves
from ckptfix.ops.target.targets import ExpectedModel

PROBED = 4
"""Number of shapes whose tensors are probed."""

FEW = 64
"""The most tensors of one shape, on each side, that are probed; a shape with more is not probed."""

FROZEN = 1024
"""The fewest elements of a tensor that proves a pair by itself: shorter ones may be equal by chance, or be computed.
Also the most tensors of a side whose first bytes are compared to find these."""

READ = 1 << 26
"""The most bytes of a tensor that are read to compare it with another one of the same side."""

MOST = 0.5
"""Share of equal tensors, on the smaller side, from which the two sides are copies of one model."""


def same_values(source: ExpectedModel, target: ExpectedModel) -> dict[str, str]:
    """Pair tensors that have equal bytes and no other equal: all if most have an equal one, otherwise long ones.

    Raises:
        Truncated, DamagedFile: a file lacks data that it promises.
    """
    if source.checkpoint is None or target.checkpoint is None:
        return {}
    sides = _own(source), _own(target)
    if not min(map(len, sides)):
        return {}
    with Readers() as readers:

        def equal(ours: Sequence[TensorEntry], theirs: Sequence[TensorEntry]) -> list[RenamedTensors]:
            assert source.checkpoint is not None and target.checkpoint is not None
            rows, _ = find_renamed(source.checkpoint, target.checkpoint, ours, theirs, readers, trust_crc=False)
            return [row for row in rows if not _is_constant(row.a, source.checkpoint.byteorder, readers)]

        copies = bool(equal(*_probe(*sides)))
        if not copies:
            sides = _long(sides[0]), _long(sides[1])
        if not copies and max(map(len, sides)) > FROZEN:
            return {}
        found = equal(*sides)
    if not copies or len(found) < MOST * min(map(len, sides)):
        found = [row for row in found if _long([row.a])]
    return {row.a.key: row.b.key for row in found if not row.of_several}


def equal_values(side: ExpectedModel, one: str, other: str) -> bool | None:
    """Return whether two tensors of a side have equal bytes; None if too many bytes would have to be read."""
    if side.checkpoint is None:
        return None
    every = side.entries or weights_of(side.checkpoint, side.at, views=False)
    entries = {entry.key: entry for entry in every if entry.key in (one, other)}
    if len(entries) < 2:
        return None
    both = [leaves(entries[name]) for name in (one, other)]
    if len(both[0]) != 1 or len(both[1]) != 1 or both[0][0].dtype != both[1][0].dtype:
        return None
    places = [content(leaf, side.checkpoint.byteorder) for (leaf,) in both]
    with Readers() as readers:
        ours, theirs = (place.chunks(readers, READ) for place in places)
        if any(mine != yours for mine, yours in zip(ours, theirs, strict=False)):
            return False
    return True if places[0].nbytes == places[1].nbytes <= READ else None


def _long(entries: Sequence[TensorEntry]) -> list[TensorEntry]:
    """Return the tensors of real numbers that are equal only if one was copied from the other."""
    return [entry for entry in entries if entry.numel >= FROZEN and number_kind(entry.dtype) == "float"]


def _is_constant(entry: TensorEntry, byteorder: str, readers: Readers) -> bool:
    """Return whether a tensor begins with one element throughout, up to `HEAD` bytes of each part."""
    for part in leaves(entry):
        place = content(part, byteorder)
        size = max(1, place.nbytes // max(1, part.numel))
        head = b"".join(place.chunks(readers, HEAD))
        if head != head[:size] * (len(head) // size):
            return False
    return True


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
