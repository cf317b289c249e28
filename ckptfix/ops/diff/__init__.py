"""``ckptfix.diff``: list the differences between two checkpoints."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ckptfix.arguments import Model, checks_types, is_model
from ckptfix.errors import Refused, StrPath
from ckptfix.findings.table import found
from ckptfix.formats import open_checkpoint
from ckptfix.io.read import Progress
from ckptfix.io.source import shares_open_files
from ckptfix.pickles.collector import gc_paused

if TYPE_CHECKING:
    from ckptfix.checkpoint import Checkpoint
    from ckptfix.ops.diff.compare import DiffResult
    from ckptfix.ops.target.model import SavedModel


@checks_types
@gc_paused
@shares_open_files()
def diff(
    a: StrPath | Model,
    b: StrPath | Model,
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
    names: str | None = None,
    rules: StrPath | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    progress: Progress | None = None,
) -> DiffResult:
    """Compare two checkpoints of any formats; see `DiffResult`.

    Args:
        a, b: a file, or a model or state dict in memory, which is saved to a temporary file as long as the result
            lives.
        keys_only: compare keys, shapes and dtypes; no tensor byte is read.
        rtol, atol: values that differ by at most ``atol + rtol * abs(b)`` count as the same.
        filter: a glob; only tensors whose names match are compared.
        allow_unmatched: a glob that matches nothing on either side is a note, not an error.
        strip: prefixes to remove on both sides before keys are matched.
        quick: equal CRC-32 and size count as equal bytes.
        at: address of the state dicts to compare, one for both or one each.
        dequantized: compare the plain weights of a quantized model, on either side, instead of codes and scales.
        names: compare A as it would be after ``rename(names=...)``, such as ``"meta:hf"``, with B.
        rules: a file of rules that A goes through before it is compared; with `names`, the table.
        heads, kv_heads: as for `rename`.

    Raises:
        NoSuchTensor: a file has no tensors at `at`, or `filter` matches nothing.
        Refused: the rules do not fit A, or no table does.
    """
    from ckptfix.ops.diff.compare import diff as compared

    for name, tolerance in (("rtol", rtol), ("atol", atol)):
        if not 0 <= tolerance < math.inf:
            raise Refused(f"{name} is {tolerance}, but must be a number of at least 0")
    sides = [_opened(side) for side in (a, b)]
    both = sides[0][0], sides[1][0]
    after = ""
    if dequantized:
        from ckptfix.ops.dequantize.view import as_plain

        both = as_plain(*both)
    if names is not None or rules is not None:
        from ckptfix.align.fused import Heads
        from ckptfix.ops.rename.by_table import between

        first = at if at is None or isinstance(at, str) else at[0]
        changed, after = between(both[0], names, rules, at=first, heads=Heads(heads, kv_heads))
        both = changed, both[1]
    result = compared(
        *both,
        keys_only=keys_only,
        rtol=rtol,
        atol=atol,
        filter=filter,
        allow_unmatched=allow_unmatched,
        strip=(strip,) if isinstance(strip, str) else strip,
        quick=quick,
        at=at,
        progress=progress,
    )
    if after:
        message = f"A was compared as it is after the conversion {after}"
        result = replace(result, notes=(*result.notes, found("note", message)))
    saved_a, saved_b = (saved for _, saved in sides)
    if saved_a is None and saved_b is None:
        return result
    return replace(
        result,
        path_a=result.path_a if saved_a is None else saved_a.name,
        path_b=result.path_b if saved_b is None else saved_b.name,
        tensors=replace(result.tensors, holds=(saved_a, saved_b)),
    )


def _opened(side: StrPath | Model) -> tuple[Checkpoint, SavedModel | None]:
    """Return a side as a checkpoint, and the temporary file that holds it."""
    if isinstance(side, str | os.PathLike) or not is_model(side):
        return open_checkpoint(side), None  # type: ignore[arg-type]
    from ckptfix.ops.target.model import SavedModel

    saved = SavedModel(side)
    return open_checkpoint(saved.path), saved
