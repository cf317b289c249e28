"""ckptfix select."""

from __future__ import annotations

import click

from ckptfix.cli.shared.common import Written, writes
from ckptfix.cli.shared.options import allow_unmatched_option, at_option, in_place_option
from ckptfix.ops import select
from ckptfix.ops.writing import WriteOptions


@writes(
    "select",
    click.Option(
        ["--keep"], metavar="GLOB", multiple=True, help="Keep the tensors whose keys match, such as 'encoder.*'."
    ),
    click.Option(["--drop"], metavar="GLOB", multiple=True, help="Leave out the tensors whose keys match."),
    allow_unmatched_option(),
    at_option(),
    in_place_option(),
)
def command(
    source: str,
    dest: str | None,
    how: WriteOptions,
    *,
    keep: tuple[str, ...],
    drop: tuple[str, ...],
    allow_unmatched: bool,
    at: str | None,
) -> Written:
    """Keep or drop tensors of IN by their keys.

    Without --keep, all tensors are kept except those of --drop. * matches dots too. A GLOB that matches no key is an
    error. Dropped tensors are listed. A value
    that is not a tensor stays, unless --drop names it. The optimizer is unchanged: its state is indexed by position in
    the full model. `ckptfix slim --no-optimizer` leaves it out.
    """

    if not keep and not drop:
        raise click.UsageError("Nothing to select: give --keep or --drop.")
    return select.select(source, dest, keep=keep, drop=drop, at=at, allow_unmatched=allow_unmatched, **how.keywords())
