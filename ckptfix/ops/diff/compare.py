"""Comparison of two checkpoints, of any formats and any nesting of their state dicts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckptfix.checkpoint import Checkpoint, TensorEntry
from ckptfix.findings.row import Finding
from ckptfix.formats import format_of
from ckptfix.io.read import Progress
from ckptfix.io.source import Readers
from ckptfix.names import typed
from ckptfix.ops.diff.content import Group, RenamedTensors, find_renamed
from ckptfix.ops.diff.pairs import At, DiffInput, doubts, match, sides
from ckptfix.ops.diff.plain import compare_values
from ckptfix.ops.diff.result import Ambiguous, ComparedEntries, Counts, DiffResult, NamePair, OneSided, ValueChange
from ckptfix.ops.diff.tensors import COMPARED, MatchedTensors, sharing
from ckptfix.ops.quantized import codes_note, codes_of
from ckptfix.pickles.collector import gc_paused

__all__ = ["DiffResult", "diff"]

UNREAD = frozenset({"bad-tensor", "bad-storage", "truncated", "not-taken"})
"""Findings of a reader about a tensor that is missing from its entries, or not as it should be."""


@gc_paused
def diff(
    a: Checkpoint,
    b: Checkpoint,
    *,
    keys_only: bool = False,
    rtol: float = 0.0,
    atol: float = 0.0,
    filter: str | None = None,
    allow_unmatched: bool = False,
    strip: Sequence[str] = (),
    quick: bool = False,
    at: At = None,
    progress: Progress | None = None,
) -> DiffResult:
    """Compare checkpoint `a` with `b`: keys, properties, elements, and the values that are not tensors.

    Tensors are matched by address and key; then by key without wrapper prefixes; then by content. Memory use is bounded
    by a few MiB a core, whatever the tensors' sizes.

    Args:
        keys_only: compare keys, shapes and dtypes; no tensor byte is read.
        rtol, atol: elements and floats are the same where ``|a - b| <= atol + rtol * |b|``. NaN equals NaN.
        filter: a glob; only tensors and values whose address or last part matches are compared.
        strip: prefixes to remove from the keys of both sides, in this order, before they are matched.
        quick: tensors that fill a storage count as equal where size and the stated CRC-32 are.
        at: compare only the state dict at this address; one for both (a file without it uses its main state dict)
            or one each.
        progress: called with the bytes compared and the bytes in all, of one side.

    Raises:
        NoSuchTensor: a file has no tensors at `at`; or `filter` accepts no tensor, and `allow_unmatched` is not set.
        Undecided: it is not certain which state dict to compare with the other file's.
        KeyConflict: two tensors have the same key after `strip`.
        Truncated, DamagedFile: a file is shorter than it promises.
        ValueError: a tolerance is negative or NaN.
    """
    if not (rtol >= 0 and atol >= 0):
        raise ValueError(f"tolerances must not be negative: rtol={rtol}, atol={atol}")
    notes = tuple(doubts(a, b, at))
    side_a, side_b, pairings, modules = sides(a, b, at=at, strip=strip, filter=filter)
    a, b = side_a.checkpoint, side_b.checkpoint
    matched, rest_a, rest_b = match(side_a, side_b)
    unstated = COMPARED - (format_of(a).states & format_of(b).states)
    codes = codes_of(a), codes_of(b)
    tensors = MatchedTensors((a.byteorder, b.byteorder), rtol, atol, quick, unstated, codes)
    renamed: list[RenamedTensors] = []
    ambiguous: list[Group] = []
    values: list[ValueChange] = []
    total = 0
    for pair in matched:
        add = tensors.add_sizes if keys_only else tensors.add
        add(pair.a, pair.b, "wrapper" if pair.wrapped else "name")
    if not keys_only:
        with Readers() as readers:
            tensors.run(readers, progress)
            renamed, ambiguous = find_renamed(a, b, rest_a, rest_b, readers, trust_crc=quick)
        for found in renamed:
            tensors.add_equal(found.a, found.b)
        values, total = compare_values(side_a, side_b, rtol=rtol, atol=atol)
    if filter is not None and not (matched or rest_a or rest_b or total):
        keys = [entry.key for entry in (*a.entries, *b.entries)]
        notes += typed.unmatched([filter], keys, kind="glob", allow=allow_unmatched)
    changed = tuple(row.change() for row in tensors.rows if row.differs)
    held = {row.name_a: None for row in changed if row.values and (row.name_a in codes[0] or row.name_b in codes[1])}
    notes += codes_note(held)
    pairs = [(pair.a, pair.b) for pair in matched] + [(found.a, found.b) for found in renamed]
    taken = {id(entry) for found in renamed for entry in (found.a, found.b)}
    return DiffResult(
        path_a=a.path,
        path_b=b.path,
        format_a=a.format,
        format_b=b.format,
        keys_only=keys_only,
        pairings=pairings,
        modules=modules,
        notes=notes,
        only_a=tuple(OneSided.of(entry) for entry in rest_a if id(entry) not in taken),
        only_b=tuple(OneSided.of(entry) for entry in rest_b if id(entry) not in taken),
        wrapped=tuple(NamePair(pair.a.name, pair.b.name) for pair in matched if pair.wrapped),
        renamed=tuple(NamePair(found.a.name, found.b.name, found.of_several) for found in renamed),
        ambiguous=tuple(Ambiguous(_names(group_a), _names(group_b)) for group_a, group_b in ambiguous),
        changed=changed,
        close=tuple(row.change() for row in tensors.rows if row.is_close),
        sharing=() if keys_only or "sharing" in unstated else tuple(sharing(pairs)),
        values=tuple(values),
        unread=(*_unread(side_a), *_unread(side_b)),
        counts=Counts(
            matched=len(matched),
            equal=len(matched) - tensors.unequal(),
            trusted=len(tensors.trusted),
            nbytes=sum(pair.a.nbytes for pair in matched),
            values=total,
        ),
        tensors=ComparedEntries(
            compared=tuple(row.compared() for row in tensors.rows),
            only_a=tuple(entry for entry in rest_a if id(entry) not in taken),
            only_b=tuple(entry for entry in rest_b if id(entry) not in taken),
            byteorders=tensors.byteorders,
            files=(*a.files, *b.files),
            codes=codes,
        ),
    )


def _names(entries: Sequence[TensorEntry]) -> tuple[str, ...]:
    return tuple(entry.name for entry in entries)


def _unread(side: DiffInput) -> Iterator[Finding]:
    """Yield the findings about tensors that could not be read, as far as they take part."""
    for finding in side.checkpoint.findings:
        if finding.id in UNREAD and side.place(finding.where) is not None and side.chosen(finding.where):
            yield finding
