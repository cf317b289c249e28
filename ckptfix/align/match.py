"""Keys of one model matched to the keys of another that names them differently.

`match` is the one entry: by position, or by structure. Both work on slots (name, shape, dtype), and
both say what they could not match; neither guesses. What is known from values is given, never read here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from ckptfix.align.result import Matching
from ckptfix.names.slots import Slot

Matcher = Callable[..., Matching]


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
        by: ``"structure"`` (names, shapes, dtypes and neighbours), or ``"position"`` (order, with shapes checked).
        reshape: also pair tensors of other shapes with equally many elements.
        proven: pairs that are known, as their bytes are equal; by structure, they come first.

    Raises:
        Refused: by position, the two orders do not go together; the message shows where they part.
    """
    from ckptfix.align import position as match_position
    from ckptfix.align import structure as match_structure

    matchers: dict[str, Matcher] = {
        "position": match_position.match,
        "structure": partial(match_structure.match, proven=proven or {}),
    }
    return matchers[by](source, target, reshape=reshape)
