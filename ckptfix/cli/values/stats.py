"""ckptfix stats."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from ckptfix.cli.shared import tables
from ckptfix.cli.shared.batch import FullText
from ckptfix.cli.shared.common import files_argument, reads
from ckptfix.cli.shared.console import Console
from ckptfix.cli.shared.operands import Inputs, search_options
from ckptfix.cli.shared.options import allow_unmatched_option, at_option, dequantized_option
from ckptfix.ops import stats

if TYPE_CHECKING:
    from ckptfix.ops.stats import TensorStats

ROWS = 40
"""Rows shown on a terminal, unless --limit changes that."""


@reads(
    "stats",
    files_argument("path", "FILE..."),
    click.Option(["--by-layer"], is_flag=True, help="Show one line for each layer or other module."),
    click.Option(
        ["--depth"], metavar="N", type=click.IntRange(min=1),
        help="Group by the first N parts of the keys.",
    ),
    click.Option(["--filter", "globs"], metavar="GLOB", multiple=True, help="Show only tensors whose keys match."),
    allow_unmatched_option(),
    at_option(),
    dequantized_option(),
    click.Option(["--csv", "as_csv"], is_flag=True, help="Print comma-separated values with all digits."),
    click.Option(
        ["--limit"], metavar="N", type=click.IntRange(min=0),
        help=f"Rows to show, 0 for all. [default: {ROWS} on a terminal, all in a pipe]",
    ),
    *search_options(),
    operands=Inputs("path", FullText),
)  # fmt: skip
def command(
    console: Console,
    *,
    path: str,
    by_layer: bool,
    depth: int | None,
    globs: tuple[str, ...],
    allow_unmatched: bool,
    at: str | None,
    dequantized: bool,
    as_csv: bool,
    limit: int | None,
) -> int:
    """Show min, max, mean, std, norm, and the counts of NaN, infinities and zeros per tensor.

    NaN and infinities are counted, and excluded from all other columns. Sums are in float64 for every dtype; the
    standard deviation is that of torch.std. The last line covers all tensors together. Codes of quantized weights are
    not numbers, and have no statistics; --dequantized computes the weights.
    """

    with console.progress() as progress:
        done = stats.stats(
            path,
            at=at,
            filter=globs,
            by_layer=by_layer,
            depth=depth,
            allow_unmatched=allow_unmatched,
            dequantized=dequantized,
            progress=progress,
        )
    if console.json:
        console.emit(done.as_dict(), done.exit_code)
        return done.exit_code
    rows = done.groups or done.rows
    if as_csv:
        for line in written(rows):
            console.say(line)
        console.findings(done.findings)
        return done.exit_code
    most = console.rows(limit, ROWS)
    listed = [*rows[: most or None], *([done.total] if len(rows) > 1 else [])]
    cells = [tuple(map(stats.shown, row.cells())) for row in listed]
    if len(rows) > 1:
        cells[-1] = ("(all)", *cells[-1][1:])
    grouped = bool(done.groups)
    headers = tuple(name for name in stats.COLUMNS if not (grouped and name in ("dtype", "shape")))
    if grouped:
        cells = [(cell[0], *cell[3:]) for cell in cells]
    right = range(len(headers) - 8, len(headers))
    infinite = any(row.moments is not None and row.moments.infinite for row in listed)
    spare = ("norm", "zeros", *(() if infinite else ("infinite",)), "shape", "dtype")
    drawn = tables.table(cells, headers, right=right, spare=spare, width=console.width)
    for index, line in enumerate(drawn.splitlines()):
        moments = listed[index - 2].moments if 2 <= index < len(listed) + 2 else None
        console.say(line, "damage" if moments is not None and (moments.nan or moments.infinite) else None)
    if most and len(rows) > most:
        console.say(f"... {len(rows) - most:,} more (--limit 0 shows all)")
    console.findings(done.findings)
    return done.exit_code


def written(rows: Iterable[TensorStats]) -> list[str]:
    """Return the rows as comma-separated values, with a header line."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(stats.COLUMNS)
    writer.writerows(row.cells() for row in rows)
    return text.getvalue().removesuffix("\n").split("\n")
