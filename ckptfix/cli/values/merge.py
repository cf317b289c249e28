"""ckptfix merge."""

from __future__ import annotations

import click

from ckptfix.cli.shared import values
from ckptfix.cli.shared.common import FileName, Written, writes
from ckptfix.cli.shared.options import at_option
from ckptfix.formats.target import FormatName
from ckptfix.ops import merge
from ckptfix.ops.writing import How


@writes(
    "merge",
    click.Argument(["more"], metavar="[IN ...]", nargs=-1, required=False, type=FileName()),
    at_option(),
    click.Option(
        ["--to"],
        metavar="zip|legacy|safetensors|hf",
        shell_complete=values.formats,
        help="The format of OUT; without it, what OUT's suffix says.",
    ),
    example="ckptfix merge encoder.pth decoder.safetensors -o model.pth",
)
def command(
    source: str, dest: str, how: How, *, more: tuple[str, ...], at: str | None, to: FormatName | None
) -> Written:
    """Write OUT (-o): the state dicts of all IN as one.

    The inputs are of any format. Two of them may have no name in common: such names are all listed, and nothing is
    written. What else they hold (an optimizer) is left behind, and listed.
    """

    if not more:
        raise click.UsageError("Give two inputs or more, and -o OUT.")
    return merge.merge([source, *more], dest, at=at, to=to, **how.keywords())
