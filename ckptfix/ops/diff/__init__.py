"""``ckptfix.diff``: list the differences between two checkpoints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckptfix.arguments import checks_types
from ckptfix.errors import Refused, StrPath
from ckptfix.formats import open_checkpoint
from ckptfix.io.read import Progress
from ckptfix.io.source import shares_open_files
from ckptfix.pickles.collector import gc_paused

if TYPE_CHECKING:
    from ckptfix.ops.diff.compare import DiffResult


@checks_types
@gc_paused
@shares_open_files()
def diff(
    a: StrPath,
    b: StrPath,
    *,
    keys_only: bool = False,
    rtol: float = 0.0,
    atol: float = 0.0,
    filter: str | None = None,
    allow_unmatched: bool = False,
    strip: Sequence[str] | str = (),
    quick: bool = False,
    at: str | tuple[str, str] | None = None,
    dequantized: bool = False,
    by_layer: bool = False,
    progress: Progress | None = None,
) -> DiffResult:
    """Compare two checkpoints of any formats; see `DiffResult`.

    Args:
        keys_only: compare keys, shapes and dtypes; no tensor byte is read.
        rtol, atol: values that differ by at most ``atol + rtol * abs(b)`` count as the same.
        filter: a glob; only tensors whose names match are compared.
        allow_unmatched: a glob that matches nothing on either side is a note, not an error.
        strip: prefixes to remove on both sides before keys are matched.
        quick: equal CRC-32 and size count as equal bytes.
        at: address of the state dicts to compare, one for both or one each.
        dequantized: compare the plain weights of a quantized model, on either side, instead of codes and scales.
        by_layer: also join the differences of the tensors of each numbered layer, and of each module without a number.

    Raises:
        NoSuchTensor: a file has no tensors at `at`, or `filter` matches nothing.
    """
    from ckptfix.ops.diff.compare import diff as compared

    for name, tolerance in (("rtol", rtol), ("atol", atol)):
        if not 0 <= tolerance < math.inf:
            raise Refused(f"{name} is {tolerance}, but must be a number of at least 0")
    both = open_checkpoint(a), open_checkpoint(b)
    if dequantized:
        from ckptfix.ops.dequantize.view import as_plain

        both = as_plain(*both)
    return compared(
        *both,
        keys_only=keys_only,
        rtol=rtol,
        atol=atol,
        filter=filter,
        allow_unmatched=allow_unmatched,
        strip=(strip,) if isinstance(strip, str) else strip,
        quick=quick,
        at=at,
        by_layer=by_layer,
        progress=progress,
    )
