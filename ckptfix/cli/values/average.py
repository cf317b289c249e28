"""ckptfix average."""

from __future__ import annotations

import click

from ckptfix.cli.shared.common import FileName, Written, writes
from ckptfix.cli.shared.options import at_option
from ckptfix.ops import average
from ckptfix.ops.writing import How


@writes(
    "average",
    click.Argument(["more"], metavar="[IN ...]", nargs=-1, required=False, type=FileName()),
    click.Option(["--weights"], metavar="W,W...", help="How much each IN counts, such as 1,2,3; as much by default."),
    click.Option(
        ["--ema"], metavar="DECAY", type=click.FloatRange(0, 1, max_open=True),
        help="The exponential moving average of IN in their order.",
    ),
    click.Option(
        ["--last"], metavar="N", type=click.IntRange(min=2),
        help="IN is a folder: take its last N checkpoints, by the step or epoch in their names.",
    ),
    at_option(),
    example="ckptfix average epoch_8.pth epoch_9.pth epoch_10.pth -o mean.pth",
)  # fmt: skip
def command(
    source: str,
    dest: str,
    how: How,
    *,
    more: tuple[str, ...],
    weights: str | None,
    ema: float | None,
    last: int | None,
    at: str | None,
) -> Written:
    """Write OUT (-o): the mean of the weights of all IN, in the last of them.

    Sums are in float64 and rounded once; each tensor keeps its dtype. Integers, the counters of BatchNorm, the
    optimizer and everything else are those of the last IN. Names, shapes or dtypes that differ are all listed, and
    nothing is written. The statistics of BatchNorm (running_mean, running_var) belong to other weights then: run
    torch.optim.swa_utils.update_bn before the model is used.
    """

    if not more and last is None:
        raise click.UsageError("Give two inputs or more and -o OUT, or a folder and --last N.")
    return average.average(
        [source, *more], dest, weights=None if weights is None else _numbers(weights), ema=ema, last=last, at=at,
        **how.keywords(),
    )  # fmt: skip


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise click.BadParameter(f"{text!r} is not numbers with commas between.", param_hint="--weights") from None
