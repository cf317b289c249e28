"""ckptfix add-module."""

from __future__ import annotations

import click

from ckptfix.cli.shared.common import Written, writes
from ckptfix.cli.shared.options import at_option, in_place_option, link_option
from ckptfix.ops import rename
from ckptfix.ops.writing import WriteOptions


@writes(
    "add-module",
    click.Option(["--prefix"], default="module", show_default=True, metavar="P", help="The path components to add."),
    at_option(),
    in_place_option(),
    link_option(),
    example="ckptfix add-module plain.pth ddp.pth",
)
def command(source: str, dest: str | None, how: WriteOptions, *, prefix: str, at: str | None) -> Written:
    """Add the prefix `module.` to every key of the model.

    A model wrapped in DataParallel or DistributedDataParallel then loads OUT directly.
    """

    return rename.add_module(source, dest, prefix=prefix, at=at, **how.keywords())
