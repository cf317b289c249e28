"""ckptfix convert."""

from __future__ import annotations

import click

from ckptfix.cli.shared.common import Written, at_option, writes
from ckptfix.ops import convert
from ckptfix.ops.writing import How


@writes(
    "convert",
    click.Option(
        ["--to"],
        metavar="zip|legacy|safetensors|dcp",
        help="The format of OUT; without it, what OUT's suffix says. zip is also called torch.",
    ),
    at_option(),
    click.Option(
        ["--drop-unsupported"],
        is_flag=True,
        help="Leave out what OUT's format cannot hold, list it, and exit with 3.",
    ),
    example="ckptfix convert model.pth model.safetensors",
)
def command(source: str, dest: str, how: How, *, to: str | None, at: str | None, drop_unsupported: bool) -> Written:
    """Write OUT: IN in another container: torch zip (1.6 and later), torch legacy, or safetensors.

    zip and legacy hold the same, so between them nothing is lost. safetensors holds one state dict: the one found,
    or the one --at names; what else the file had is listed. Tied tensors are tied again on the way back.
    dcp is a folder that torch.distributed.checkpoint loads; it holds the whole object, without ties and views.
    """

    return convert.convert(source, dest, to=to, at=at, drop_unsupported=drop_unsupported, **how.keywords())
