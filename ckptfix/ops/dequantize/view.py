"""A checkpoint seen as its plain model: plain weights, computed when they are read, instead of quantized ones."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import overload

from ckptfix.checkpoint import Checkpoint
from ckptfix.errors import Refused, about
from ckptfix.ops import quantized
from ckptfix.ops.dequantize.own import own_tensors
from ckptfix.ops.dequantize.plan import dequantized, with_ties


@overload
def as_plain(one: Checkpoint, /) -> tuple[Checkpoint]: ...


@overload
def as_plain(one: Checkpoint, other: Checkpoint, /) -> tuple[Checkpoint, Checkpoint]: ...


@overload
def as_plain(*checkpoints: Checkpoint) -> tuple[Checkpoint, ...]: ...


def as_plain(*checkpoints: Checkpoint) -> tuple[Checkpoint, ...]:
    """Return the checkpoints with plain weights instead of quantized ones; one without such weights as it is.

    The dtype of a weight is that of its scheme's own code. Nothing is computed before it is read.

    Raises:
        Refused: none of them has quantized weights, or a weight cannot be computed.
    """
    made = tuple(map(_plain, checkpoints))
    if not any(new is not old for new, old in zip(made, checkpoints, strict=True)):
        what = "there are no quantized weights" if len(made) == 1 else "no file has quantized weights"
        raise Refused(what, path=checkpoints[0].path, hint="leave out --dequantized")
    return made


def _plain(checkpoint: Checkpoint) -> Checkpoint:
    if not quantized.quantization_of(checkpoint) and not own_tensors(checkpoint.entries):
        return checkpoint
    checkpoint = with_ties(checkpoint)
    with about(checkpoint.path):
        # The verbs that read several tensors at once have threads of their own.
        change = dequantized(checkpoint, None, parallel=False)
        entries = tuple(change.applied(checkpoint.entries))
    counts = Counter(entry.at for entry in entries)
    states = (replace(state, tensors=counts[state.at]) for state in checkpoint.state_dicts)
    return replace(checkpoint, load_entries=lambda: entries, state_dicts=tuple(states))
