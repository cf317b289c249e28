"""The page of ``ckptfix diff A B --html``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from pathlib import PurePath

from ckptfix.checkpoint import TensorEntry
from ckptfix.commands import command as line_of
from ckptfix.elements.pair_sums import ValueDiff
from ckptfix.html import charts
from ckptfix.html.grid import Column, PageTable, Tensor, grid
from ckptfix.html.heat import Scale, Spot, heat_map
from ckptfix.html.page import pasted, room_beside, section, table, tiles, whole
from ckptfix.html.text import Html, data, join, number, tag, text
from ckptfix.io.read import Progress
from ckptfix.io.source import refuse_changed, shares_open_files, stamp
from ckptfix.ops.diff.result import Compared, DiffResult, TensorChange
from ckptfix.ops.histogram import Distribution, Pair, distributions
from ckptfix.words import plural, shape, short

HISTOGRAMS = 2_000
"""Maximum tensors whose values are drawn: those that changed most."""

CARDS = 6
"""Number of tensors that are drawn even without a script."""

FOLDED = 20
"""A list below the table of tensors with more rows than this is folded."""

EQUAL, CHANGED, OTHER, RENAMED, ONLY_A, ONLY_B = range(6)
STATES = ("equal", "different values", "different properties", "renamed", "only in A", "only in B")

ARROW, MINUS, UNEQUAL = "\N{RIGHTWARDS ARROW}", "\N{MINUS SIGN}", "\N{NOT EQUAL TO}"

COLUMNS = (
    Column("Dtype"), Column("Shape"), Column("State"), Column("Differing", True), Column(f"Max |A{MINUS}B|", True),
    Column(f"Mean |A{MINUS}B|", True), Column("Rel. change", True), Column("Cosine", True),
)  # fmt: skip
STATE, CHANGE = 2, 6


@shares_open_files()
def page(
    result: DiffResult, *, histograms: bool = True, command: str | None = None, progress: Progress | None = None
) -> str:
    """Return the page; see `DiffResult.to_html`."""
    compared = result.tensors.compared
    drawn = _drawn(result, progress) if histograms and not result.keys_only else {}
    changes = [_change(row) for row in compared]
    scale = Scale([change for change in changes if change])
    tensors = _tensors(result, scale, list(drawn))
    spots = [Spot(row.a, change, _sign(row)) for row, change in zip(compared, changes, strict=True)]
    spots += [Spot(entry, None, MINUS) for entry in result.tensors.only_a]
    spots += [Spot(entry, None, "+") for entry in result.tensors.only_b]
    heat, cut = heat_map(spots, scale)
    changed = any(spot.change or spot.sign for spot in spots)
    cards = list(_cards(result, drawn))
    before = [
        _files(result, command),
        section("Largest changes", *cards, id="largest", note=_LEGEND) if cards else Html(""),
        section("Where it changed", heat, id="map", note=_HEAT) if changed and not result.keys_only else Html(""),
    ]
    after = list(_lists(result))
    shapes = {"charts": [charts.packed(found) for found in drawn.values()], "columns": charts.COLUMNS}
    made = grid(
        tensors, COLUMNS, STATES, _summed(scale), kind="diff", room=room_beside(*before, *after, data(shapes)),
        first=lambda one: one.state != EQUAL,
    )  # fmt: skip
    sections = [*before, section("Tensors", made.html, id="all"), *after]
    notes = [*_notes(result, made, drawn), *([cut] if cut else [])]
    rows = {**made.data, **shapes}
    names = _names(result.path_a, result.path_b)
    head = join((tag("h1", names[0], Html(f" <span>{ARROW}</span> "), names[1]), _verdict(result)))
    return whole(f"{names[0]} {ARROW} {names[1]}", "ckptfix diff", head, sections, notes, rows)


_LEGEND = Html(
    '<span class="key a"></span> values of A <span class="key b"></span> values of B '
    f'<span class="key d"></span> B {MINUS} A, without the elements that are equal. NaN and infinities have '
    "no bar."
)
_HEAT = (
    f"One row per layer, one column per kind of tensor. \N{MIDDLE DOT} means equal, + only in B, {MINUS} only in A, "
    f"{UNEQUAL} a different shape or dtype, ! NaN or infinity, or values without a relative change."
)


def _names(a: str, b: str) -> tuple[str, str]:
    """Return the names of the files, with enough folders to distinguish them."""
    parts_a, parts_b = PurePath(a).parts, PurePath(b).parts
    count = 1
    while parts_a[-count:] == parts_b[-count:] and count < max(len(parts_a), len(parts_b)):
        count += 1
    return "/".join(parts_a[-count:]) or a, "/".join(parts_b[-count:]) or b


def _verdict(result: DiffResult) -> Html:
    counts = result.counts
    values = sum(row.values is not None for row in result.changed)
    other = sum(bool(row.differences) and row.values is None for row in result.changed)
    both = sum(bool(row.differences) and row.values is not None for row in result.changed)
    badge = tag("p", "Same" if result.same else "Different", class_=f"verdict {'good' if result.same else 'bad'}")
    found = [
        (len(result.alarms), "with new NaN or infinity", "error"),
        (counts.matched, "tensors in both", ""),
        (counts.equal, "equal", "good"),
        (values, "with different values", "bad"),
        (both, "of these with different properties too", "bad"),
        (other, "with different properties", "bad"),
        (len(result.only_a), "only in A", "gone"),
        (len(result.only_b), "only in B", "new"),
        (len(result.renamed), "renamed", ""),
        (len(result.wrapped), "with a different wrapper prefix", ""),
        (len(result.close), "equal values, different bytes", ""),
        (len(result.values), "other values that differ", "bad"),
    ]
    kept = [(f"{count:,}", what, kind if count else "") for count, what, kind in found if count or what == "equal"]
    kinds = ["alarm"] if result.alarms else []  # the alarm is the first line
    lines = (tag("p", line, class_=kind) for line, kind in zip_longest(result.lines, kinds))
    return join((badge, tiles(kept), tag("div", *lines, class_="lines")))


def _files(result: DiffResult, command: str | None) -> Html:
    rows = [
        (Html('<span class="side a">A</span>'), result.path_a, result.format_a, *_size(result, 0)),
        (Html('<span class="side b">B</span>'), result.path_b, result.format_b, *_size(result, 1)),
    ]
    line = command or line_of("diff", result.path_a, result.path_b, keys_only="" if result.keys_only else None)
    listed = table(("", "File", "Format", "Tensors", "Bytes"), rows, right=(3, 4))
    return section("Files", listed, pasted(line))


def _size(result: DiffResult, side: int) -> tuple[str, str]:
    found = result.tensors
    entries = [row.b if side else row.a for row in found.compared] + list(found.only_b if side else found.only_a)
    return f"{len(entries):,}", f"{sum(entry.nbytes for entry in entries):,}"


def _change(row: Compared) -> float | None:
    """Return ||A - B|| / ||B||; None if it is undefined."""
    if row.change is None:
        return 0.0
    values = row.change.values
    return values.rel_l2 if values is not None else 0.0


def _sign(row: Compared) -> str:
    """Return the sign that the map shows instead of a change."""
    change = row.change
    if change is None:
        return ""
    if change.is_alarm:
        return "!"
    if any(found.what in ("shape", "kind") for found in change.differences):
        return UNEQUAL
    if change.values is not None and change.values.rel_l2 is None and change.values.differing:
        return "!"
    return UNEQUAL if change.values is None and any(f.what == "dtype" for f in change.differences) else ""


def _weight(row: Compared) -> tuple[bool, bool, float]:
    """Return the sort key for the largest changes."""
    return row.change.weight if row.change is not None else (False, False, -1.0)


def _drawn(result: DiffResult, progress: Progress | None) -> dict[int, Distribution]:
    """Return index in the table -> distribution for the tensors that changed most, the largest change first."""
    found = result.tensors
    for file in found.files:
        refuse_changed(file.path, stamp(file.path), file.stamp)
    compared = len(found.compared)
    order = sorted(
        (index for index, row in enumerate(found.compared) if _looked_at(row)),
        key=lambda index: _weight(found.compared[index]),
        reverse=True,
    )
    order += range(compared, compared + len(found.only_a) + len(found.only_b))
    pairs: list[Pair] = [(row.a, row.b) for row in found.compared]
    pairs += [(entry, None) for entry in found.only_a]
    pairs += [(None, entry) for entry in found.only_b]
    chosen = order[:HISTOGRAMS]
    made = distributions([pairs[index] for index in chosen], found.byteorders, found.codes, progress=progress)
    return {index: one for index, one in zip(chosen, made, strict=True) if one.reason is None}


def _looked_at(row: Compared) -> bool:
    change = row.change
    if change is None:
        return False
    values = change.values
    return (values is not None and bool(values.differing)) or any(
        found.what in ("shape", "dtype") for found in change.differences
    )


def _tensors(result: DiffResult, scale: Scale, drawn: Sequence[int]) -> list[Tensor]:
    detail = {index: place for place, index in enumerate(drawn)}
    rows = [_compared(row, scale) for row in result.tensors.compared]
    rows += [_one_sided(entry, ONLY_A) for entry in result.tensors.only_a]
    rows += [_one_sided(entry, ONLY_B) for entry in result.tensors.only_b]
    for index, row in enumerate(rows):
        row.detail = detail.get(index)
    return rows


def _one_sided(entry: TensorEntry, state: int) -> Tensor:
    kind, sign = ("gone", MINUS) if state == ONLY_A else ("new", "+")
    cells = (entry.dtype, shape(entry.shape), _state(kind, sign, STATES[state]), "", "", "", "", "")
    return Tensor(entry, cells, (None, entry.numel, None, None, None, None, None, None), state, counts=(1, 1))


_SIGNS = {EQUAL: ("same", "="), RENAMED: ("same", ARROW)}


def _state(kind: str, sign: str, words: object) -> Html:
    return Html(f'<s class="{kind}">{sign}</s> {text(words)}')


def _compared(row: Compared, scale: Scale) -> Tensor:
    a, b, change = row.a, row.b, row.change
    dtype = a.dtype if a.dtype == b.dtype else f"{a.dtype} {ARROW} {b.dtype}"
    size = shape(a.shape) if a.shape == b.shape else f"{shape(a.shape)} {ARROW} {shape(b.shape)}"
    values = change.values if change is not None else None
    differing = values is not None and (values.differing or values.reason is not None)
    state = CHANGED if differing else OTHER if change is not None and change.differences else EQUAL
    if state == EQUAL and a.name != b.name:
        state = RENAMED
    words = [STATES[state]] if state != OTHER else []
    if a.name != b.name:
        words.append(f"B: {b.name}")
    if change is not None:
        words += [found.what for found in change.differences]
        words += _special(values)
    kind, sign = _SIGNS.get(state, ("bad", UNEQUAL))
    numbers = (None,) * 5 if values is None or values.reason else (
        values.differing, values.max_abs, values.mean_abs, values.rel_l2, values.cosine
    )  # fmt: skip
    cells = ["", "", "", "", ""]
    if values is not None and not values.reason:
        cells = [_of(values), *map(number, numbers[1:4]), "" if numbers[4] is None else f"{numbers[4]:.6f}"]
    worst = values.rel_l2 or 0.0 if values is not None else 0.0
    return Tensor(
        a, (dtype, size, _state(kind, sign, ", ".join(words)), *cells), (None, a.numel, None, *map(_finite, numbers)),
        state, {CHANGE: scale.mark(worst)} if worst else {}, (1, int(state not in (EQUAL, RENAMED))), worst,
    )  # fmt: skip


def _finite(value: float | None) -> float | None:
    """Round a number for sorting: five digits are enough."""
    return value if value is None or (isinstance(value, int) and abs(value) < 1 << 53) else float(f"{value:.5g}")


def _of(values: ValueDiff) -> str:
    if values.differing == values.elements:
        return f"all {short(values.elements)}"
    return f"{short(values.differing)} of {short(values.elements)}"


def _special(values: ValueDiff | None) -> Iterator[str]:
    if values is None:
        return
    if values.reason is not None:
        yield values.reason
    if not values.differing and values.reason is None:
        yield "different bytes, equal values"
    for count, what in (
        (values.nan_a, "NaN in A only"), (values.nan_b, "NaN in B only"), (values.infinite, "infinite on one side"),
    ):  # fmt: skip
        if count:
            yield f"{count:,} {what}"


def _summed(scale: Scale) -> Callable[[Sequence[Tensor]], Sequence[object]]:
    """Return a function that makes the cells of a module's row."""

    def cells(tensors: Sequence[Tensor]) -> Sequence[object]:
        changed = int(sum(one.counts[1] for one in tensors))
        worst = max(one.worst for one in tensors)
        state = _state("same", "=", "")
        if changed:
            state = _state("bad", UNEQUAL, f"{changed:,} of {len(tensors):,}")
        mark = scale.mark(worst)
        most = Html(f"<u class={mark}>{number(worst)}</u>") if mark else ""
        return plural(len(tensors), "tensor"), "", state, "", "", "", most, ""

    return cells


def _cards(result: DiffResult, drawn: dict[int, Distribution]) -> Iterator[Html]:
    found = result.tensors
    cards = []
    for index, one in list(drawn.items())[:CARDS]:
        if index >= len(found.compared):
            break
        row = found.compared[index]
        values = row.change.values if row.change is not None else None
        said = _sentence(values) if values is not None else ", ".join(
            f"{f.what} {f.a} {ARROW} {f.b}" for f in (row.change.differences if row.change else ())
        )  # fmt: skip
        cards.append(tag("article", tag("h3", row.a.name), tag("p", said), charts.drawn(one)))
    if cards:
        yield tag("div", *cards, class_="cards")


def _sentence(values: ValueDiff) -> str:
    parts = [f"{_of(values)} differ"]
    if values.rel_l2 is not None:
        parts.append(f"relative change {values.rel_l2:.3g}")
    if values.max_abs is not None:
        parts.append(f"max |A{MINUS}B| {number(values.max_abs)}")
    return ", ".join([*parts, *_special(values)])


def _lists(result: DiffResult) -> Iterator[Html]:
    """Yield sections for everything that the table of tensors does not show, or shows only in part."""
    pair = ("A", "B")
    values = [(row.name_a or row.name_b, _value(row.name_a, row.a), _value(row.name_b, row.b)) for row in result.values]
    found = [(_name(row), found) for row in result.changed for found in row.differences]
    properties = [(name, row.what, _plain(row.a), _plain(row.b)) for name, row in found]
    lists: tuple[tuple[str, Sequence[str], Sequence[Sequence[object]]], ...] = (
        ("Values that are not tensors", ("Name", *pair), values),
        ("Properties", ("Name", "Property", *pair), properties),
        ("Renamed", pair, [(row.name_a, row.name_b) for row in result.renamed]),
        ("Same keys except for a wrapper's prefix", pair, [(row.name_a, row.name_b) for row in result.wrapped]),
        ("Equal to each other, so the pairing is ambiguous", pair,
         [(", ".join(row.names_a), ", ".join(row.names_b)) for row in result.ambiguous]),
        ("Storage shared on one side only", ("In", "Names"),
         [(row.side.upper(), ", ".join(row.names)) for row in result.sharing]),
        ("Could not be read", ("Severity", "Where", "Message"),
         [(row.severity, row.where, row.message) for row in result.unread]),
    )  # fmt: skip
    for title, headers, rows in lists:
        if rows:
            listed = table(headers, rows)
            if len(rows) > FOLDED:
                listed = tag("details", tag("summary", plural(len(rows), "row")), listed)
            yield section(title, listed, class_="pairs" if headers is pair else None)


def _name(row: TensorChange) -> str:
    return row.name_a if row.name_a == row.name_b else f"{row.name_a} {ARROW} {row.name_b}"


def _value(name: str | None, value: object) -> object:
    return Html('<span class="absent">absent</span>') if name is None else _plain(value)


def _plain(value: object) -> str:
    shown = list(value) if isinstance(value, tuple) else value
    return shown if isinstance(shown, str) else repr(shown)


def _notes(result: DiffResult, made: PageTable, drawn: dict[int, Distribution]) -> Iterator[str]:
    if made.left:
        yield f"The table has no room for {plural(made.left, 'tensor')}, most of them equal; --json has all."
    yield from (note.message for note in result.notes)
    changed = sum(map(_looked_at, result.tensors.compared))
    if drawn and changed > HISTOGRAMS:
        yield f"Histograms show the {HISTOGRAMS:,} tensors that changed most, of {changed:,}."
