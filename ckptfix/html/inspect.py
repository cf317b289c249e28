"""The page of ``ckptfix inspect FILE --html``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath

from ckptfix.checkpoint import ByteRange, TensorEntry
from ckptfix.commands import command as line_of
from ckptfix.errors import DamagedFile
from ckptfix.formats import located, open_checkpoint
from ckptfix.html import charts
from ckptfix.html.grid import Column, PageTable, Tensor, grid
from ckptfix.html.page import facts, pasted, room_beside, section, table, tiles, whole
from ckptfix.html.text import Html, data, join, number, tag
from ckptfix.io.read import Progress
from ckptfix.io.source import shares_open_files
from ckptfix.ops.histogram import Codes, Distribution, distributions
from ckptfix.ops.inspect.describe import Inspection, notes, summed_up
from ckptfix.ops.quantized import codes_of
from ckptfix.words import plural, shape, short, size

HISTOGRAMS = 5_000
"""Maximum tensors whose values are drawn: the first of the file."""

COLUMNS = (Column("Dtype"), Column("Shape"), Column("Size", True), Column("Device"), Column("Note"))

NUMBERS = tuple(Column(title, True) for title in ("Min", "Max", "Mean", "Std", "NaN, inf"))
"""The columns of values, used if the values were read."""


@shares_open_files()
def page(
    inspection: Inspection,
    *,
    values: bool = False,
    entries: Sequence[TensorEntry] | None = None,
    command: str | None = None,
    progress: Progress | None = None,
) -> str:
    """Return the page; see `Inspection.to_html`."""
    entries = inspection.named_entries if entries is None else entries
    found: Sequence[Distribution] = ()
    if values and entries:
        checkpoint = open_checkpoint(located(inspection.path))
        if list(map(_place, checkpoint.entries)) != list(map(_place, inspection.entries)):
            raise DamagedFile("the file changed after it was inspected", path=inspection.path)
        order = checkpoint.byteorder
        codes: Codes = (codes_of(checkpoint), {})
        found = distributions([(entry, None) for entry in entries], (order, order), codes, progress=progress)
    before = [_facts(inspection, command), *_training(inspection)]
    after = list(lists(inspection))
    drawn = {index: one for index, one in enumerate(found) if one.a is not None and one.a.bins is not None}
    drawn = dict(list(drawn.items())[:HISTOGRAMS])
    shapes = {"charts": [charts.packed(one) for one in drawn.values()], "columns": charts.COLUMNS}
    room = room_beside(*before, *after, data(shapes))
    made = _grid(entries, found, list(drawn), room, inspection.plain_shapes)
    sections = [*before, section("Tensors", made.html, id="all") if made is not None and entries else Html(""), *after]
    name = PurePath(inspection.path).name or inspection.path
    head = join((tag("h1", name), _tiles(inspection)))
    rows = {**made.data, **shapes}
    return whole(name, "ckptfix inspect", head, sections, list(_left_out(made, found, drawn)), rows)


def _place(entry: TensorEntry) -> tuple[object, ...]:
    """Return the properties that differ if the file was rewritten."""
    data = None if entry.storage is None else entry.storage.data
    return entry.name, entry.dtype, entry.shape, entry.offset, data if isinstance(data, ByteRange) else None


def _grid(
    entries: Sequence[TensorEntry],
    found: Sequence[Distribution],
    drawn: Sequence[int],
    room: int,
    plain: Mapping[str, tuple[int, ...]],
) -> PageTable:
    detail = {index: place for place, index in enumerate(drawn)}
    said = notes(entries, entries, plain)
    tensors = []
    for index, (entry, note) in enumerate(zip(entries, said, strict=True)):
        cells: tuple[object, ...] = (entry.dtype, shape(entry.shape), size(entry.nbytes), entry.location, note)
        sorted_by: tuple[float | None, ...] = (None, entry.numel, entry.nbytes, None, None)
        if found:
            cells, sorted_by = _with_values(cells, sorted_by, found[index])
        tensors.append(Tensor(entry, cells, sorted_by, detail=detail.get(index)))
    columns = (*COLUMNS, *NUMBERS) if found else COLUMNS

    def summed(inside: Sequence[Tensor]) -> Sequence[object]:
        nbytes = size(sum(one.entry.nbytes for one in inside))
        return (plural(len(inside), "tensor"), "", nbytes, *[""] * (len(columns) - 3))

    return grid(tensors, columns, ("tensors",), summed, kind="look", room=room)


def _with_values(
    cells: tuple[object, ...], sorted_by: tuple[float | None, ...], one: Distribution
) -> tuple[tuple[object, ...], tuple[float | None, ...]]:
    if one.a is None:
        note = ", ".join(filter(None, (str(cells[-1]), one.reason)))
        return (*cells[:-1], note, *[""] * len(NUMBERS)), (*sorted_by, *[None] * len(NUMBERS))
    moments = one.a.moments
    mean = None if moments.average is None else moments.average[0]
    odd = moments.nan + moments.infinite
    if one.absolute:
        cells = (*cells[:-1], ", ".join(filter(None, (str(cells[-1]), "absolute values"))))
    four = (moments.low, moments.high, mean, moments.deviation)
    shown = (*map(number, four), f"{odd:,}" if odd else "")
    rounded = [None if value is None else float(f"{value:.5g}") for value in four]
    return (*cells, *shown), (*sorted_by, *rounded, odd)


def _tiles(inspection: Inspection) -> Html:
    found = [(size(inspection.size), "of files" if inspection.members else "file size", "")]
    if inspection.tensors:
        found += [
            (f"{inspection.tensors:,}", "tensors", ""),
            (short(inspection.parameters), "parameters", ""),
            (size(inspection.nbytes), "of tensor data", ""),
        ]
    errors = sum(finding.severity == "error" for finding in inspection.findings)
    if errors:
        found.append((f"{errors:,}", "errors", "error"))
    if inspection.weights_only is not None:
        found.append(("no", "weights_only=True", "bad"))
    return tiles(found)


def _facts(inspection: Inspection, command: str | None) -> Html:
    rows = [row for row in summed_up(inspection, 40) if row[0] not in ("training", "metadata", "folder")]
    line = command or line_of("inspect", inspection.path)
    return section("About this file", facts(rows), pasted(line))


def _training(inspection: Inspection) -> Iterator[Html]:
    if inspection.training:
        rows = [(name, _value(value)) for name, value in inspection.training.items()]
        yield section("Training", table(("Name", "Value"), rows))


def _value(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(_value, value))
    return f"{value:,}" if isinstance(value, int) else str(value)


def lists(inspection: Inspection) -> Iterator[Html]:
    """Yield the sections for findings of the reader, globals, metadata and files."""
    rows = [(_severity(row.severity), row.id, row.where, row.message) for row in inspection.findings]
    if rows:
        yield section("Findings", table(("Severity", "Finding", "Where", "Message"), rows))
    yield from globals_of(inspection)
    if inspection.metadata:
        yield section("Metadata", table(("Name", "Value"), list(inspection.metadata.items())))
    if inspection.members:
        files = [(row.name, row.what, "a folder" if row.folder else size(row.size)) for row in inspection.members]
        yield section("Files", table(("Name", "Contents", "Size"), files, right=(2,)))


def globals_of(inspection: Inspection) -> Iterator[Html]:
    """Yield the section for the classes and functions that the pickle names; refused ones come first."""
    if not inspection.globals:
        return
    rows = sorted(inspection.globals, key=lambda row: row[1])
    accepted = Html('<s class="good">\N{CHECK MARK}</s> accepted')
    refused = Html('<s class="error">\N{MULTIPLICATION X}</s> refused')
    listed = table(("Name", "weights_only=True"), [(name, accepted if good else refused) for name, good in rows])
    yield section("Globals", listed, note="The classes and functions that the pickle names. None was imported.")


def _severity(severity: str) -> Html:
    kind = {"error": "error", "warning": "bad"}.get(severity, "same")
    return tag("s", severity, class_=kind)


def _left_out(made: PageTable, found: Sequence[Distribution], drawn: Mapping[int, Distribution]) -> Iterator[str]:
    if made.left:
        yield f"The table has no room for the last {plural(made.left, 'tensor')}; --json has all."
    able = sum(one.a is not None for one in found)
    if able > HISTOGRAMS:
        yield f"Histograms show the first {len(drawn):,} tensors, of {able:,}."
    if not found:
        yield "The values of the tensors were not read; add --values for statistics and histograms."
