"""ckptfix strip-module."""

from __future__ import annotations

import click

from ckptfix.cli.shared.common import Written, writes
from ckptfix.cli.shared.options import at_option, in_place_option, link_option
from ckptfix.ops import rename
from ckptfix.ops.writing import WriteOptions


@writes(
    "strip-module",
    click.Option(["--prefix"], default="module", show_default=True, metavar="P", help="The path components to remove."),
    click.Option(["--all-levels"], is_flag=True, help="Remove it repeatedly, as long as every key begins with it."),
    click.Option(["--partial"], is_flag=True, help="Strip the keys that have it, even if some do not."),
    at_option(),
    in_place_option(),
    link_option(),
    example="ckptfix strip-module ddp.pth plain.pth",
)
def command(
    source: str, dest: str | None, how: WriteOptions, *, prefix: str, all_levels: bool, partial: bool, at: str | None
) -> Written:
    """Remove the prefix `module.` from every key.

    DataParallel and DistributedDataParallel add it. Every state dict in the file is stripped, at any depth, and so is
    everything else that repeats its keys: `_metadata`, the optimizer's `param_names`. Only full path components count:
    `submodule.weight` is unchanged. If only some keys of a state dict have the prefix, nothing is written.
    """

    return rename.strip_module(
        source, dest, prefix=prefix, all_levels=all_levels, partial=partial, at=at, **how.keywords()
    )
