"""ckptfix merge."""

from __future__ import annotations

import click

from ckptfix.cli.shared import values
from ckptfix.cli.shared.common import MoreInputs, Written, writes
from ckptfix.cli.shared.options import at_option
from ckptfix.formats.target import FormatName
from ckptfix.ops import merge
from ckptfix.ops.writing import WriteOptions


@writes(
    "merge",
    MoreInputs(),
    at_option(),
    click.Option(
        ["--to"],
        metavar="zip|legacy|safetensors|hf",
        shell_complete=values.formats,
        help="Format of OUT (default: from OUT's suffix).",
    ),
)
def command(
    source: str, dest: str, how: WriteOptions, *, more: tuple[str, ...], at: str | None, to: FormatName | None
) -> Written:
    """Combine the state dicts of all inputs into one.

    The inputs can have any format. If two of them share a key, all such keys are listed, and nothing is written.
    Everything else in the inputs (an optimizer) is left behind and listed.
    """

    if not more:
        raise click.UsageError("Give -o OUT, and at least two inputs.")
    return merge.merge([source, *more], dest, at=at, to=to, **how.keywords())
