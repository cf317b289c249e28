"""ckptfix strip-module."""

from __future__ import annotations

import click

from ckptfix.cli.shared.common import Written, writes
from ckptfix.cli.shared.options import at_option, in_place_option, link_option
from ckptfix.ops import rename
from ckptfix.ops.writing import How


@writes(
    "strip-module",
    click.Option(["--prefix"], default="module", show_default=True, metavar="P", help="The path components to remove."),
    click.Option(["--all-levels"], is_flag=True, help="Remove it as often as every name begins with it."),
    click.Option(["--partial"], is_flag=True, help="Strip the names that begin with it where others do not."),
    at_option(),
    in_place_option(),
    link_option(),
    example="ckptfix strip-module ddp.pth plain.pth",
)
def command(
    source: str, dest: str | None, how: How, *, prefix: str, all_levels: bool, partial: bool, at: str | None
) -> Written:
    """Write OUT: IN with `module.` removed from the front of its names.

    DataParallel and DistributedDataParallel put it there. Every state dict in the file is done, at any depth, and
    with it everything else that holds its names: `_metadata`, the optimizer's `param_names`. Only full path
    components count: `submodule.weight` is unchanged. If only some names of a state dict begin with it, nothing is
    written.
    """

    return rename.strip_module(
        source, dest, prefix=prefix, all_levels=all_levels, partial=partial, at=at, **how.keywords()
    )
