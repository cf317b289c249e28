"""ckptfix convert."""

from __future__ import annotations

from typing import Literal

import click

from ckptfix.cli.shared import values
from ckptfix.cli.shared.common import FileName, Written, writes
from ckptfix.cli.shared.options import at_option
from ckptfix.formats.target import FormatName
from ckptfix.ops import convert
from ckptfix.ops.writing import How


@writes(
    "convert",
    click.Argument(["more"], metavar="[IN ...]", nargs=-1, required=False, type=FileName()),
    click.Option(
        ["--to"],
        metavar="zip|legacy|safetensors|hf|dcp",
        shell_complete=values.formats,
        help="The format of OUT; without it, what OUT's suffix says. zip is also called torch; hf and dcp are folders.",
    ),
    click.Option(
        ["--shard-size"],
        metavar="SIZE",
        help="With --to hf or dcp, or OUT without a suffix: what a file holds, such as 500MB or 2GiB; 5GB by default.",
    ),
    at_option(),
    click.Option(
        ["--drop-unsupported"],
        is_flag=True,
        help="Leave out what OUT's format cannot hold, list it, and exit with 3.",
    ),
    click.Option(
        ["--weights"],
        type=click.Choice(["fp32", "model"]),
        help="Of a DeepSpeed folder: the fp32 master weights (the default), or those that the model computed with.",
    ),
    click.Option(
        ["--optimizer"],
        is_flag=True,
        help="Of a DeepSpeed folder: the optimizer's state too, by parameter name; not to safetensors.",
    ),
    example="ckptfix convert model.pth model.safetensors",
)
def command(
    source: str,
    dest: str,
    how: How,
    *,
    more: tuple[str, ...],
    to: FormatName | None,
    shard_size: str | None,
    at: str | None,
    drop_unsupported: bool,
    weights: Literal["fp32", "model"] | None,
    optimizer: bool,
) -> Written:
    """Write OUT: IN in another container: torch zip (1.6 and later), torch legacy, safetensors, or shards of these.

    IN may be a folder of DeepSpeed or of the files of all ranks (FSDP, tensor parallelism), which are joined; with
    -o OUT it may be several such files.

    zip and legacy hold the same, so between them nothing is lost. safetensors holds one state dict: the one found,
    or the one --at names; what else the file had is listed. Tied tensors are tied again on the way back.

    hf is a folder OUT of safetensors shards and their index, as transformers writes it; IN may be such a folder, also
    of pytorch_model.bin shards, and every other command takes one too.
    dcp is a folder that torch.distributed.checkpoint loads; it holds the whole object, without ties and views.
    """

    return convert.convert(
        [source, *more] if more else source,
        dest,
        to=to,
        shard_size=shard_size,
        at=at,
        drop_unsupported=drop_unsupported,
        weights=weights,
        optimizer=optimizer,
        **how.keywords(),
    )
