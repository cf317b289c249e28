"""``ckptfix.stats``: min, max, mean, standard deviation and non-finite values, per tensor and per group of layers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import field
from typing import Any

from ckptfix.arguments import checks_types
from ckptfix.checkpoint import Checkpoint, TensorEntry, address
from ckptfix.dataclass import dataclass
from ckptfix.elements.moments import ElementMoments
from ckptfix.elements.reader import Content, content, reduced, tensor_id
from ckptfix.errors import StrPath, Unsupported, about
from ckptfix.findings.row import Finding
from ckptfix.findings.table import as_rows
from ckptfix.formats import open_checkpoint
from ckptfix.io.read import Progress
from ckptfix.io.source import shares_open_files
from ckptfix.names import typed
from ckptfix.names.globs import Globs
from ckptfix.names.groups import layer_of
from ckptfix.ops import choose, quantized
from ckptfix.ops.audit.promise import listed
from ckptfix.ops.candidates import at_address
from ckptfix.pickles.collector import gc_paused
from ckptfix.shown import html
from ckptfix.words import plural

COLUMNS = ("name", "dtype", "shape", "min", "max", "mean", "std", "norm", "nan", "infinite", "zeros")


@dataclass(frozen=True, slots=True)
class TensorStats:
    """The statistics of a tensor, or of a group of tensors. NaN and infinities are counted, and otherwise ignored.

    Attributes:
        name: address of the tensor; for a group, the beginning of their names.
        dtype, shape: of a tensor; None for a group.
        tensors: how many are in the group.
        moments: the statistics; None if there are no numbers to compute with.
        reason: why there are none.
    """

    name: str
    dtype: str | None
    shape: tuple[int, ...] | None
    tensors: int
    moments: ElementMoments | None
    reason: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the row as a JSON object."""
        found = self.moments or ElementMoments()
        average = found.average
        if self.shape is None:
            of: dict[str, Any] = {"tensors": self.tensors}
        else:
            of = {"dtype": self.dtype, "shape": list(self.shape), "reason": self.reason}
        return {
            "name": self.name,
            **of,
            "elements": found.elements,
            "min": found.low,
            "max": found.high,
            "mean": None if average is None else average[0],
            "mean_imag": None if average is None or not average[1] else average[1],
            "std": found.deviation,
            "norm": found.norm,
            "nan": found.nan,
            "infinite": found.infinite,
            "zeros": found.zeros,
        }

    def cells(self) -> tuple[object, ...]:
        """Return the values of `COLUMNS`; None for undefined ones."""
        row = {"dtype": None, **self.as_dict()}
        if self.moments is not None:
            row["mean"] = self.moments.mean_value
        row["shape"] = "" if self.shape is None else "x".join(map(str, self.shape))
        return tuple(row[name] if self.moments is not None or name in COLUMNS[:3] else None for name in COLUMNS)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Statistics:
    """The statistics of a checkpoint.

    Attributes:
        path: the file or folder.
        rows: one for each tensor, in the order of the file.
        groups: tensors joined by the beginnings of their names; empty unless asked for.
        total: of all tensors together.
        findings: globs that matched nothing, and whether the choice of the model is in doubt (`choose.remarks`).
    """

    path: str
    rows: tuple[TensorStats, ...]
    groups: tuple[TensorStats, ...] = ()
    total: TensorStats = field(repr=False)
    findings: tuple[Finding, ...] = ()

    @property
    def exit_code(self) -> int:
        """Always 0, because statistics are not a fault."""
        return 0

    def __repr__(self) -> str:
        return f"<Statistics: {self.path!r}, {plural(len(self.rows), 'tensor')}>"

    def __str__(self) -> str:
        rows = self.groups or self.rows
        return "\n".join("  ".join(map(shown, row.cells())) for row in rows)

    def _repr_html_(self) -> str:
        rows = [tuple(map(shown, row.cells())) for row in (self.groups or self.rows)]
        return html([repr(self)], [("", COLUMNS, rows)])

    def as_dict(self) -> dict[str, Any]:
        """Return the statistics as a JSON object."""
        return {
            "path": self.path,
            "entries": [row.as_dict() for row in self.rows],
            "groups": [row.as_dict() for row in self.groups],
            "total": self.total.as_dict(),
            "findings": as_rows(self.findings, self.path),
        }


def shown(value: object) -> str:
    """Format a value for a table: numbers with four digits."""
    if value is None:
        return ""
    if isinstance(value, complex):
        return f"{value.real:.4g}{value.imag:+.4g}j"
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


@checks_types
@gc_paused
@shares_open_files()
def stats(
    path: StrPath,
    *,
    at: str | None = None,
    filter: Sequence[str] = (),
    by_layer: bool = False,
    depth: int | None = None,
    allow_unmatched: bool = False,
    dequantized: bool = False,
    progress: Progress | None = None,
) -> Statistics:
    """Compute min, max, mean, standard deviation, norm, NaN, infinities and zeros of each tensor.

    Everything but the counts is computed from the finite elements, in float64. The standard deviation is that of
    `torch.std`.

    Args:
        at: address of the only state dict to read.
        filter: globs; only tensors whose names match one.
        by_layer: join the tensors of each numbered layer, and of each module without a number.
        depth: join tensors whose names begin with the same components, this many of them.
        allow_unmatched: a glob that matches nothing is a finding, not an error.
        dequantized: read the plain weights of a quantized model instead of its codes and scales.

    Raises:
        WouldLoseData: a tensor cannot be read as it was written.
        NoSuchTensor: there is nothing at `at`, or nothing that matches.
        CkptfixError: the file cannot be read.
    """
    checkpoint = open_checkpoint(path)
    if dequantized:
        from ckptfix.ops.dequantize.view import as_plain

        (checkpoint,) = as_plain(checkpoint)
    globs = Globs(filter)
    unused: tuple[Finding, ...] = ()
    entries = listed(checkpoint)
    choose.refuse_damaged(checkpoint)
    if at is not None:
        row = at_address(checkpoint, at)
        entries = [entry for entry in entries if address.is_inside(entry.name, row.at)]
    if globs:
        names = [name for entry in entries for name in (entry.key, entry.name)]
        entries = [entry for entry in entries if globs.match(entry.name) | globs.match(entry.key)]
        with about(checkpoint.path):
            unused = typed.unmatched(globs.unused(), names, kind="glob", allow=allow_unmatched)
    found = _computed(checkpoint, entries, progress)
    rows = tuple(_row(checkpoint, entry, found) for entry in entries)
    groups: dict[str, list[tuple[object, TensorStats]]] = {}
    placed = [(tensor_id(entry), row) for entry, row in zip(entries, rows, strict=True)]
    if by_layer or depth is not None:
        for entry, member in zip(entries, placed, strict=True):
            groups.setdefault(address.join(entry.at, layer_of(entry.key, depth)), []).append(member)
    return Statistics(
        path=checkpoint.path,
        rows=rows,
        groups=tuple(_joined(name, members) for name, members in groups.items()),
        total=_joined("", placed),
        findings=(
            *unused,
            *(choose.remarks(checkpoint) if at is None else ()),
            *_codes_note(checkpoint, [row.name for row in rows if row.name in quantized.codes_of(checkpoint)]),
        ),
    )


def _codes_note(checkpoint: Checkpoint, names: list[str]) -> tuple[Finding, ...]:
    if not names:
        return ()
    # Most files have no quantized weights, and their statistics begin sooner without this import.
    from ckptfix.ops.dequantize.summary import summary_of

    return quantized.codes_note(names, summary_of(checkpoint))


def _joined(name: str, members: Sequence[tuple[object, TensorStats]]) -> TensorStats:
    """Join the statistics of several tensors; a tensor with several names counts once."""
    both = ElementMoments()
    for row in dict(members).values():
        if row.moments is not None:
            both.join(row.moments)
    return TensorStats(name, None, None, len(members), both if both.elements else None)


def _row(checkpoint: Checkpoint, entry: TensorEntry, found: dict[object, ElementMoments]) -> TensorStats:
    made = found.get(tensor_id(entry))
    reason = None if made is not None else quantized.no_numbers(checkpoint, entry) or "the file does not hold its data"
    return TensorStats(entry.name, entry.dtype, entry.shape, 1, made, reason)


def _computed(
    checkpoint: Checkpoint, entries: Sequence[TensorEntry], progress: Progress | None
) -> dict[object, ElementMoments]:
    places: dict[object, Content] = {}
    for entry in entries:
        if quantized.no_numbers(checkpoint, entry) is None:
            with suppress(Unsupported):
                places[tensor_id(entry)] = content(entry, checkpoint.byteorder)
    return reduced(places, ElementMoments, progress)
