"""ckptfix extract."""

from __future__ import annotations

import click

from ckptfix.cli.shared import values
from ckptfix.cli.shared.common import Written, writes
from ckptfix.formats.target import FormatName
from ckptfix.ops import extract
from ckptfix.ops.writing import How


@writes(
    "extract",
    click.Option(
        ["--at"],
        metavar="PATH",
        shell_complete=values.addresses,
        help="Take the state dict or module at this address, such as model (see inspect); / is the top level.",
    ),
    click.Option(["--ema"], is_flag=True, help="Take the averaged weights, under the names of a plain model."),
    click.Option(
        ["--to"],
        metavar="zip|legacy|safetensors",
        shell_complete=values.formats,
        help="The format of OUT; without it, what OUT's suffix says. zip is also called torch.",
    ),
    click.Option(
        ["--drop-unsupported"],
        is_flag=True,
        help="Leave out tensors that OUT's format cannot hold, list them, and exit with 3.",
    ),
    example="ckptfix extract whole_model.pth state_dict.pth",
)
def command(
    source: str, dest: str, how: How, *, at: str | None, ema: bool, to: FormatName | None, drop_unsupported: bool
) -> Written:
    """Write OUT: one state dict of IN, as torch.save(model.state_dict(), OUT) would.

    IN is a whole pickled module (torch.save(model)), whose classes need not exist, a training checkpoint, a
    TorchScript archive or an exported program (.pt2). Nothing in it is imported or run. What else a state dict of the
    living module may have is listed; if it is tensors, the exit code is 3.
    """

    return extract.extract(source, dest, at=at, ema=ema, to=to, drop_unsupported=drop_unsupported, **how.keywords())
