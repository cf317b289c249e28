"""ckptfix diff."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import click

from ckptfix.cli.shared import reports, tables, values
from ckptfix.cli.shared.common import FileName, file_argument, reads
from ckptfix.cli.shared.console import Console, TextConsole
from ckptfix.cli.shared.options import allow_unmatched_option, dequantized_option, names_options
from ckptfix.cli.shared.terminal_width import wrapped
from ckptfix.errors import printable
from ckptfix.io.source import shares_open_files
from ckptfix.ops import diff

if TYPE_CHECKING:
    from ckptfix.cli.shared.colors import Meaning
    from ckptfix.elements.pair_sums import ValueDiff
    from ckptfix.ops.diff.result import DiffResult, NamePair, OneSided, TensorChange

Sort = Literal["change", "name", "file"]
SORTS: tuple[Sort, ...] = ("change", "name", "file")
"""Orders of the tensors that differ: the largest change first, by key, as in the file."""

ROWS = 20
"""Rows per list shown on a terminal, unless --limit changes that."""


def _one_or_two(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> str | tuple[str, str] | None:
    match value:
        case ():
            return None
        case (both,):
            return both
        case (first, second):
            return first, second
    raise click.BadParameter("give it once for both files, or once for each.")


@reads(
    "diff",
    file_argument("a", "A"),
    file_argument("b", "B"),
    click.Option(["--keys-only"], is_flag=True, help="Compare keys, shapes and dtypes; read no tensor."),
    click.Option(
        ["--rtol"], type=click.FloatRange(min=0), default=0.0, metavar="X", help="Accept |a - b| up to X times |b|."
    ),
    click.Option(
        ["--atol"], type=click.FloatRange(min=0), default=0.0, metavar="X", help="Accept X more, on top of --rtol."
    ),
    click.Option(["--filter"], metavar="GLOB", help="Compare only tensors whose keys match."),
    allow_unmatched_option(),
    click.Option(["--strip"], metavar="PREFIX", multiple=True, help="Ignore this key prefix. Repeatable."),
    click.Option(
        ["--at"],
        metavar="PATH",
        shell_complete=values.addresses,
        multiple=True,
        callback=_one_or_two,
        help="Compare the state dicts at this address. Give it twice for different addresses in A and B.",
    ),
    dequantized_option(),
    *names_options(),
    click.Option(["--rules"], metavar="FILE", type=FileName(),
                 help="Rules for A, before it is compared. With --names, the table."),
    click.Option(["--quick"], is_flag=True, help="Trust equal CRC-32s: do not read such tensors."),
    click.Option(
        ["--limit"],
        metavar="N",
        type=click.IntRange(min=0),
        help=f"Rows per list, 0 for all. [default: {ROWS} on a terminal, all in a pipe]",
    ),
    click.Option(
        ["--sort"], type=click.Choice(SORTS), default="change", show_default=True,
        help="Order of the rows. --json keeps the order of the file.",
    ),
    click.Option(["--by-layer"], is_flag=True, help="Show a row for each layer, not for each tensor."),
    *reports.html_options(),
)
def command(
    console: Console,
    *,
    a: str,
    b: str,
    limit: int | None,
    sort: Sort,
    by_layer: bool,
    html: str | None,
    force: bool,
    **options: Any,
) -> int:
    """Compare two checkpoints, in any formats and at any nesting.

    It compares keys, shapes, dtypes, devices, requires_grad, values bit for bit, and everything that is not a tensor.
    Keys that differ only by a wrapper's prefix are paired, and so are equal tensors under different keys. The exit code
    is 0 if both are the same, 1 if they differ.

    With --names FROM:TO or --rules FILE, A goes through this conversion first, so that the result says whether B is
    what `ckptfix rename` makes of A.
    """

    html = reports.checked(html, (a, b), force=force)
    with shares_open_files():
        with console.progress() as progress:
            result = diff.diff(a, b, progress=progress, **options)
        if html is not None:
            with console.progress() as progress:
                make = partial(result.to_html, progress=progress)
                reports.write(console, html, (a, b), lambda line: make(command=line), force=force)
    if console.json:
        console.emit(result.as_dict(), result.exit_code)
    else:
        for line, meaning in report(result, console.rows(limit, ROWS), console.width, sort, by_layer=by_layer):
            console.say(line, meaning)
        console.findings((*result.unread, *result.notes))
    reports.say(console, html)
    return result.exit_code


def text(result: DiffResult) -> str:
    """Return the text that the command prints."""
    lines = TextConsole()
    for line, _ in report(result, 0):
        lines.say(line)
    lines.findings((*result.unread, *result.notes))
    return str(lines)


Line = tuple[str, "Meaning | None"]
"""A line of the report, and the meaning that gives it a color."""


def report(
    result: DiffResult, limit: int, width: int = 0, sort: Sort = "change", *, by_layer: bool = False
) -> Iterator[Line]:
    """Yield the result for a person: its sentences, then a list for each kind of difference."""
    for number, line in enumerate(result.lines):
        alarm: Meaning | None = "damage" if result.alarms and not number else None
        yield from ((part, alarm) for part in wrapped(printable(line), width))
    changed = _sorted(result, sort)
    one_sided = ["name", "dtype", "shape"]
    yield from _table("Only in A", one_sided, map(_one_sided, result.only_a), limit, width, meaning="removed")
    yield from _table("Only in B", one_sided, map(_one_sided, result.only_b), limit, width, meaning="added")
    yield from _table("Same keys except for a wrapper's prefix", ["A", "B"], map(_pair, result.wrapped), limit, width)
    yield from _table("Renamed", ["A", "B"], map(_pair, result.renamed), limit, width)
    groups = [(", ".join(row.names_a), ", ".join(row.names_b)) for row in result.ambiguous]
    yield from _table("Equal to each other, so the pairing is ambiguous", ["A", "B"], groups, limit, width)
    yield from _table(
        "Properties", ["name", "property", "A", "B"], _properties(changed, bool(limit)), limit, width
    )
    if by_layer:
        yield from _layers(changed, result, limit, width, sort)
    else:
        yield from _values("Values", changed, limit, width)
    yield from _values("Different bytes, equal values", result.close, limit, width)
    shared = [(row.side.upper(), ", ".join(row.names)) for row in result.sharing]
    yield from _table("Storage shared on one side only", ["in", "names"], shared, limit, width)
    others = [
        (row.name_a or row.name_b or "", _value(row.name_a, row.a), _value(row.name_b, row.b)) for row in result.values
    ]
    yield from _table("Values that are not tensors", ["name", "A", "B"], others, limit, width)


def _table(
    title: str,
    headers: Sequence[str],
    rows: Iterable[Sequence[str]],
    limit: int,
    width: int,
    right: Iterable[int] = (),
    meaning: Meaning | None = None,
    alarms: Sequence[bool] = (),
    spare: Sequence[str] = (),
) -> Iterator[Line]:
    """Yield a titled table of the first `limit` rows, and the number of hidden rows; nothing without rows."""
    everything = list(rows)
    if not everything:
        return
    shown = everything[: limit or None]
    yield "", None
    yield f"{title}:", meaning
    names = headers if list(headers) == ["A", "B"] else ()
    drawn = tables.table(shown, headers, right=right, names=names, spare=spare, width=width)
    for index, line in enumerate(drawn.splitlines()):
        row = index - 2
        alarm: Meaning | None = "damage" if 0 <= row < len(shown) and any(alarms[row : row + 1]) else None
        yield line, alarm or (meaning if 0 <= row < len(shown) else None)
    if hidden := tables.more(len(everything) - len(shown)):
        yield hidden, None


def _one_sided(row: OneSided) -> tuple[str, ...]:
    return row.name, row.dtype, tables.shape(row.shape)


def _pair(row: NamePair) -> tuple[str, ...]:
    return row.name_a, row.name_b + (" (one of several with these bytes)" if row.of_several else "")


def _name(row: TensorChange) -> str:
    return row.name_a if row.name_a == row.name_b else f"{row.name_a} -> {row.name_b}"


def _properties(changes: Sequence[TensorChange], grouped: bool) -> Iterator[tuple[str, ...]]:
    """Yield a row per property that differs; with `grouped`, one row for all tensors with the same difference."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for row in changes:
        for found in row.differences:
            what = (found.what, _text(found.a), _text(found.b))
            if grouped:
                groups.setdefault(what, []).append(_name(row))
            else:
                yield _name(row), *what
    for kind, names in groups.items():
        yield names[0] + (f" and {len(names) - 1:,} more" if len(names) > 1 else ""), *kind


def _values(title: str, changes: Sequence[TensorChange], limit: int, width: int) -> Iterator[Line]:
    headers = ["name", "differing", "max |a-b|", "mean |a-b|", "rel. L2", "cosine", "note"]
    rows = [(_name(row), *_statistics(row.values)) for row in changes if row.values is not None]
    alarms = [row.is_alarm for row in changes if row.values is not None]
    spare = ("mean |a-b|", "cosine")
    yield from _table(title, headers, rows, limit, width, right=range(1, 6), alarms=alarms, spare=spare)


def _sorted(result: DiffResult, sort: Sort) -> Sequence[TensorChange]:
    if sort == "name":
        return sorted(result.changed, key=lambda row: tables.natural(row.name_a))
    return result.largest if sort == "change" else result.changed


def _layers(
    changes: Sequence[TensorChange], result: DiffResult, limit: int, width: int, sort: Sort
) -> Iterator[Line]:
    """Yield a row for each layer with a tensor whose values differ: the changes of its tensors together."""
    from dataclasses import replace

    from ckptfix.names.groups import layer_of

    totals = Counter(layer_of(row.a.name) for row in result.tensors.compared)
    layers: dict[str, list[TensorChange]] = {}
    for row in changes:
        if row.values is not None:
            layers.setdefault(layer_of(row.name_a), []).append(row)
    found = [(name, rows, replace(result, changed=tuple(rows)).overall) for name, rows in layers.items()]
    if sort == "change":
        found.sort(key=lambda one: (any(row.is_alarm for row in one[1]), one[2] or 0.0), reverse=True)
    cells = [
        (name, f"{len(rows):,} of {totals[name] or len(rows):,}", _number(change), rows[0].name_a, _odd(rows))
        for name, rows, change in found
    ]  # fmt: skip
    alarms = [any(row.is_alarm for row in rows) for _, rows, _ in found]
    headers = ["layer", "tensors", "rel. L2", "largest", "note"]
    yield from _table("Values by layer", headers, cells, limit, width, right=(1, 2), alarms=alarms)


def _odd(rows: Sequence[TensorChange]) -> str:
    """Return the numbers of NaN and infinities in the tensors of a layer that one side lacks."""
    found = [row.values for row in rows if row.values is not None]
    counts = (
        (sum(row.nan_a for row in found), "NaN in A only"),
        (sum(row.nan_b for row in found), "NaN in B only"),
        (sum(row.infinite for row in found), "infinite on one side"),
    )
    return ", ".join(f"{count:,} {what}" for count, what in counts if count)


def _statistics(values: ValueDiff) -> tuple[str, ...]:
    if values.reason is not None:
        return "", "", "", "", "", values.reason
    special = [
        (values.nan_a, "NaN in A only"),
        (values.nan_b, "NaN in B only"),
        (values.infinite, "infinite on one side"),
    ]
    return (
        f"{values.differing:,} of {values.elements:,}",
        *map(_number, (values.max_abs, values.mean_abs, values.rel_l2)),
        "" if values.cosine is None else f"{values.cosine:.6f}",
        ", ".join(f"{count:,} {what}" for count, what in special if count),
    )


def _number(value: float | None) -> str:
    return "" if value is None else str(value) if isinstance(value, int) else f"{value:.3g}"


def _value(name: str | None, value: object) -> str:
    return "(absent)" if name is None else _text(value)


def _text(value: object) -> str:
    text = list(value) if isinstance(value, tuple) else value
    shown = text if isinstance(text, str) else repr(text)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
