"""ckptfix extract."""

from __future__ import annotations

import click

from ckptfix.cli.shared import values
from ckptfix.cli.shared.common import Written, writes
from ckptfix.formats.target import FormatName
from ckptfix.ops import extract
from ckptfix.ops.writing import WriteOptions


@writes(
    "extract",
    click.Option(
        ["--at"],
        metavar="PATH",
        shell_complete=values.addresses,
        help="Extract what is at this address, such as model (see inspect); / is the top level.",
    ),
    click.Option(["--ema"], is_flag=True, help="Extract the averaged weights, under the keys of the plain model."),
    click.Option(
        ["--nest"],
        metavar="NAME[=PREFIX]",
        multiple=True,
        help="Write a dict of state dicts: the keys under PREFIX (by default NAME) become the dict NAME, and with "
        "NAME= all keys; repeatable.",
    ),
    click.Option(
        ["--to"],
        metavar="zip|legacy|safetensors",
        shell_complete=values.formats,
        help="Format of OUT (default: from its suffix). `torch` means zip.",
    ),
    click.Option(
        ["--drop-unsupported"],
        is_flag=True,
        help="Leave out what OUT's format cannot hold. It is listed, and the exit code is 3.",
    ),
)
def command(
    source: str,
    dest: str,
    how: WriteOptions,
    *,
    at: str | None,
    ema: bool,
    nest: tuple[str, ...],
    to: FormatName | None,
    drop_unsupported: bool,
) -> Written:
    """Extract one state dict from IN, as torch.save(model.state_dict(), OUT) would write it.

    IN is a whole pickled module (torch.save(model)), whose classes need not exist, a training checkpoint, a
    TorchScript archive or an exported program (.pt2). Nothing in it is imported or run. Anything that the state dict of
    the live module might also contain is listed; if that includes tensors, the exit code is 3.
    """

    return extract.extract(
        source, dest, at=at, ema=ema, nest=nest, to=to, drop_unsupported=drop_unsupported, **how.keywords()
    )
