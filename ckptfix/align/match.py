"""Matching the keys of one model to the keys of another that names them differently.

`match` is the one entry point: by position, or by structure. Both work on slots (name, shape, dtype), and both report
what they could not match; neither guesses. Pairs known from values are passed in; no values are read here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckptfix.align import leftover, ties
from ckptfix.align.result import Matching
from ckptfix.names.slots import Slot


def match(
    source: Sequence[Slot],
    target: Sequence[Slot],
    *,
    by: str = "structure",
    reshape: bool = False,
    proven: Mapping[str, str] | None = None,
) -> Matching:
    """Match `source` to `target`, both in definition order.

    Args:
        by: ``"structure"`` (names, shapes, dtypes and neighbors), or ``"position"`` (order, with shapes checked).
        reshape: also pair tensors of different shapes with equally many elements.
        proven: pairs that are known because their bytes are equal; matching by structure uses them first.

    Raises:
        Refused: by position, the two orders do not match; the message shows where they diverge.
    """
    from ckptfix.align import position as match_position
    from ckptfix.align import structure as match_structure

    if by == "position":
        return match_position.match(source, target, reshape=reshape)
    sides = ties.as_sets(source, target)
    found = match_structure.match(*sides, reshape=reshape, proven=ties.of_untied(proven or {}, (source, target)))
    return leftover.with_leftovers(ties.settled(found, source), *sides)
