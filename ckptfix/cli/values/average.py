"""ckptfix average."""

from __future__ import annotations

import click

from ckptfix.cli.shared.common import MoreInputs, Written, writes
from ckptfix.cli.shared.options import at_option
from ckptfix.ops import average
from ckptfix.ops.writing import WriteOptions


@writes(
    "average",
    MoreInputs(),
    click.Option(["--weights"], metavar="W,W...", help="Weight of each IN, such as 1,2,3. Default: equal."),
    click.Option(
        ["--ema"], metavar="DECAY", type=click.FloatRange(0, 1, max_open=True),
        help="Compute a moving average. It is exponential, in the order of the inputs.",
    ),
    click.Option(
        ["--last"], metavar="N", type=click.IntRange(min=2),
        help="IN is a folder: average its last N checkpoints, by the step or epoch in their names.",
    ),
    at_option(),
)  # fmt: skip
def command(
    source: str,
    dest: str,
    how: WriteOptions,
    *,
    more: tuple[str, ...],
    weights: str | None,
    ema: float | None,
    last: int | None,
    at: str | None,
) -> Written:
    """Average the weights of all inputs; everything else is copied from the last one.

    Sums are in float64 and rounded once; each tensor keeps its dtype. Integers, BatchNorm counters, the optimizer and
    everything else come from the last IN. If keys, shapes or dtypes differ, all differences are listed, and nothing is
    written. The BatchNorm statistics (running_mean, running_var) are stale afterwards: run
    torch.optim.swa_utils.update_bn before you use the model.
    """

    if not more and last is None:
        raise click.UsageError("Give -o OUT and at least two inputs, or a folder and --last N.")
    return average.average(
        [source, *more], dest, weights=None if weights is None else _numbers(weights), ema=ema, last=last, at=at,
        **how.keywords(),
    )  # fmt: skip


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a list of numbers, such as 1,2,3.", param_hint="--weights") from None
