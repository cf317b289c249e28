"""The table of tensors as a tree of modules: its rows, and the data by which the script sorts and folds them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any

from ckptfix.checkpoint import TensorEntry
from ckptfix.dataclass import dataclass
from ckptfix.html import tree
from ckptfix.html.text import Html, data, join, tag, text

OVERHEAD = 70
"""Estimated bytes of a row besides its text: tags, its share of a module's row, and its sort keys."""

LEAST = 20_000
"""Bytes of rows below which shrinking the table further saves nothing."""

LEVELS = "0123456789abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its title, and whether it contains numbers."""

    title: str
    number: bool = False


@dataclass(slots=True)
class Tensor:
    """A tensor in the table.

    Attributes:
        entry: the tensor's entry, which names it.
        cells: the contents of the columns after the name.
        values: their sort keys; None to sort by the text.
        state: number of the filter that it belongs to.
        marks: cell number -> class.
        counts: numbers that a module adds up.
        worst: number that a module shows the maximum of.
    """

    entry: TensorEntry
    cells: Sequence[object]
    values: Sequence[float | None]
    state: int = 0
    marks: dict[int, str] = field(default_factory=dict)
    counts: tuple[float, ...] = ()
    worst: float = 0.0
    detail: int | None = None


@dataclass(slots=True)
class PageTable:
    """A table with the data for its script, and the number of tensors that did not fit."""

    html: Html
    data: dict[str, Any]
    left: int


def grid(
    tensors: Sequence[Tensor],
    columns: Sequence[Column],
    states: Sequence[str],
    summed: Callable[[Sequence[Tensor]], Sequence[object]],
    *,
    kind: str,
    room: int,
    first: Callable[[Tensor], bool] = lambda tensor: False,
) -> PageTable:
    """Return the table.

    Args:
        columns: the columns after the name.
        states: the filters; each tensor belongs to one.
        summed: returns the cells of a module that holds these tensors.
        kind: the class of the table, from which the style knows its columns.
        room: maximum bytes.
        first: selects the tensors to keep if not all fit.
    """
    estimate = room
    while True:
        made = _grid(tensors, _that_fit(tensors, first, estimate), columns, states, summed, kind)
        size = len(made.html.encode()) + len(data(made.data))
        if size <= room or estimate < LEAST:
            return made
        # The rows of modules took more room than estimated.
        estimate = int(estimate * room / size * 0.97)


def _grid(
    tensors: Sequence[Tensor],
    kept: Sequence[Tensor],
    columns: Sequence[Column],
    states: Sequence[str],
    summed: Callable[[Sequence[Tensor]], Sequence[object]],
    kind: str,
) -> PageTable:
    """Return the table of the kept tensors."""
    rows = tree.rows((one.entry.at, one.entry.key, (one.entry.dtype, one.entry.shape), one) for one in kept)
    made: list[str] = []
    levels: list[str] = []
    numbers: list[list[float | None]] = [[] for _ in columns]
    filters: list[int] = []
    details: list[int] = []
    for row in rows:
        one = row.items[0] if row.tensor else None
        made.append(_row(row, one, summed))
        levels.append(LEVELS[min(row.level, len(LEVELS) - 1)])
        for column, values in enumerate(numbers):
            values.append(one.values[column] if one is not None else None)
        filters.append(-1 if one is None else one.state)
        details.append(-1 if one is None or one.detail is None else one.detail)
    heads = [
        tag("th", tag("button", column.title, type="button"), class_="n" if column.number else None, scope="col")
        for column in (Column("Name"), *columns)
    ]
    html = Html(
        f'<div class="wide"><table id="tensors" class="{kind}"><thead><tr>{"".join(heads)}</tr></thead>\n'
        f"<tbody>{''.join(made)}</tbody></table></div>"
        '<button type="button" class="js" id="more" hidden></button><svg id="blank" hidden></svg>'
    )
    found = {
        "levels": "".join(levels),
        "filters": filters,
        "numbers": [values if any(value is not None for value in values) else 0 for values in numbers],
        "details": details if any(index >= 0 for index in details) else 0,
    }
    return PageTable(join((_controls(kept, states), html)), found, len(tensors) - len(kept))


def _controls(tensors: Sequence[Tensor], states: Sequence[str]) -> Html:
    """Return the search box and the filters, which only work with scripts."""
    counts = [sum(one.state == index for one in tensors) for index in range(len(states))]
    buttons = [
        tag("button", f"{name} ", tag("b", f"{count:,}"), type="button", data_filter=index)
        for index, (name, count) in enumerate(zip(states, counts, strict=True))
        if count
    ]
    number = tag("b", f"{len(tensors):,}")
    everything = tag("button", "All ", number, type="button", data_filter=-1, aria_pressed="true")
    search = Html(
        '<input type="search" id="search" placeholder="Search (press /)" '
        'aria-label="Search" autocomplete="off" spellcheck="false">'
    )
    fold = Html(
        '<span class="group"><button type="button" id="tree" aria-pressed="true">Tree</button>'
        '<button type="button" id="fold">Fold all</button>'
        '<button type="button" id="unfold">Unfold all</button></span>'
    )
    filters = tag("span", everything, *buttons, class_="group") if len(buttons) > 1 else ""
    count = Html('<output id="shown" aria-live="polite"></output>')
    return tag("div", search, filters, fold, count, class_="controls js")


def _that_fit(tensors: Sequence[Tensor], first: Callable[[Tensor], bool], room: int) -> list[Tensor]:
    """Return the tensors that fit, in their order."""
    chosen: set[int] = set()
    for wanted in (True, False):
        for index, one in enumerate(tensors):
            if bool(first(one)) is wanted and room > 0:
                name = text(one.entry.name, 400).encode()
                room -= OVERHEAD + len(name) + sum(len(text(cell).encode()) + 4 for cell in one.cells)
                chosen.add(index)
    return [one for index, one in enumerate(tensors) if index in chosen]


def _row(
    row: tree.TableRow[Tensor],
    one: Tensor | None,
    summed: Callable[[Sequence[Tensor]], Sequence[object]],
) -> str:
    level = min(row.level, 12)
    name = f"<i>{text(row.prefix, 160)}</i>{text(row.label, 240)}"
    if one is None:
        if row.alike:
            name += f' <em>{row.alike} similar</em>'
        cells, marks, kind = summed(row.items), dict[int, str](), "m"
    else:
        cells, marks, kind = one.cells, one.marks, "t" if one.detail is None else "t d"
    made = [f'\n<tr class="{kind} l{level}"><td>{name}']
    for index, cell in enumerate(cells):
        # End tags of cells and rows are optional in HTML: this makes a page of ten thousand rows a third smaller.
        made.append(f"<td class={marks[index]}>{text(cell)}" if index in marks else f"<td>{text(cell)}")
    return "".join(made)
