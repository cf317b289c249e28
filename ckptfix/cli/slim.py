"""ckptfix slim."""

from __future__ import annotations

from dataclasses import replace

import click

from ckptfix.cli.shared.common import Written, writes
from ckptfix.ops import slim
from ckptfix.ops.writing import WriteOptions


@writes(
    "slim",
    click.Option(["--no-optimizer"], is_flag=True, help="Leave out the state of every optimizer."),
    click.Option(
        ["--dedupe"],
        is_flag=True,
        help="Store identical tensors once. They become tied: changing one changes all.",
    ),
    click.Option(
        ["--contiguous"], is_flag=True, help="Also close the gaps in strided views, such as columns. Strides change."
    ),
    click.Option(["--check-only"], is_flag=True, help="List what would be saved; write nothing. Same as --dry-run."),
    example="ckptfix slim training.ckpt small.ckpt --no-optimizer",
)
def command(
    source: str, dest: str, how: WriteOptions, *, no_optimizer: bool, dedupe: bool, contiguous: bool, check_only: bool
) -> Written:
    """Shrink IN: leave out the bytes that no tensor uses.

    torch.save writes the whole storage of a view; OUT has only the bytes that the tensors reach. Tensors that share
    memory still share it, and every value is kept. In safetensors, holes and hidden bytes are dropped.
    """

    if check_only:
        how = replace(how, dry_run=True)
    return slim.slim(source, dest, no_optimizer=no_optimizer, dedupe=dedupe, contiguous=contiguous, **how.keywords())
