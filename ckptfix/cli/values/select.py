"""ckptfix select."""

from __future__ import annotations

import click

from ckptfix.cli.shared.common import Written, writes
from ckptfix.cli.shared.options import at_option
from ckptfix.ops import select
from ckptfix.ops.writing import How


@writes(
    "select",
    click.Option(
        ["--keep"], metavar="GLOB", multiple=True, help="Take the tensors whose names match, such as 'encoder.*'."
    ),
    click.Option(["--drop"], metavar="GLOB", multiple=True, help="Leave out the tensors whose names match."),
    at_option(),
    example="ckptfix select model.pth encoder.pth --keep 'encoder.*' --drop '*.bias'",
)
def command(
    source: str, dest: str, how: How, *, keep: tuple[str, ...], drop: tuple[str, ...], at: str | None
) -> Written:
    """Write OUT: IN with some tensors of its state dicts only.

    Without --keep all are taken but those of --drop. * stands for dots too. What is left out is listed. A value that is
    no tensor stays, unless --drop names it, and the optimizer stays as it is: its state belongs to numbers, which the
    model of all tensors has given. `ckptfix slim --no-optimizer` leaves it out.
    """

    if not keep and not drop:
        raise click.UsageError("Nothing to select by: give --keep or --drop.")
    return select.select(source, dest, keep=keep, drop=drop, at=at, **how.keywords())
