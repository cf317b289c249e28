"""The quantized weights of a checkpoint in numbers: bits, groups, and the parameters of the plain model."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from ckptfix.checkpoint import Checkpoint, same_place
from ckptfix.dataclass import dataclass
from ckptfix.errors import CkptfixError
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.io.source import is_local
from ckptfix.ops.quantized import described, quantization_of
from ckptfix.words import plural, shape

if TYPE_CHECKING:
    from ckptfix.checkpoint.quantization import Quantized
    from ckptfix.ops.dequantize.layout import Layout
    from ckptfix.ops.dequantize.settings import Settings


@dataclass(frozen=True, slots=True)
class QuantizedWeights:
    """The weights of a checkpoint that are quantized in the same way.

    Attributes:
        scheme: its name.
        weights: their number.
        first: address of the codes of the first one.
        bits: of a code; None if the scheme is not computed.
        group: sizes of the block of elements that share a scale; None for one scale a tensor.
        elements: of the stored tensors.
        parameters: elements of the plain weights; None if unknown.
        described: bits and group in words.
    """

    scheme: str
    weights: int
    first: str
    bits: int | None = None
    group: tuple[int, ...] | None = None
    elements: int = 0
    parameters: int | None = None
    described: str = ""

    def __str__(self) -> str:
        """Return a line about these weights."""
        said = [f"{plural(self.weights, 'weight')}: {self.scheme}"]
        if self.described:
            said.append(self.described)
        if self.parameters is not None:
            said.append(f"{self.parameters:,} parameters")
        return ", ".join(said)

    @property
    def brief(self) -> str:
        """The scheme, its bits and groups, for a column."""
        return f"{self.scheme}, {self.described}" if self.described else self.scheme

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        made = asdict(self)
        return {**made, "group": None if self.group is None else list(self.group)}


def summary_of(checkpoint: Checkpoint) -> tuple[QuantizedWeights, ...]:
    """Return the quantized weights of a checkpoint, a row for each scheme with its bits and groups.

    A few numbers are read where a scheme keeps the shape of a weight in a tensor, and only from a local file.
    """
    return checkpoint.once(_summary)


def _summary(checkpoint: Checkpoint) -> tuple[QuantizedWeights, ...]:
    quantization = quantization_of(checkpoint)
    if not quantization:
        return ()
    elements = {entry.name: entry.numel for entry in checkpoint.entries}
    places = {entry.name: same_place(entry) or entry.name for entry in checkpoint.entries}
    seen: set[object] = set()
    rows: dict[tuple[str, str], QuantizedWeights] = {}
    for weight, layout in checkpoint.once(_layouts):
        how = "" if layout is None else layout.described
        row = rows.get((weight.label, how))
        if row is None:
            row = QuantizedWeights(weight.label, 0, weight.names[0])
            if layout is not None:
                group = layout.group or None
                row = replace(row, bits=layout.bits, group=group, parameters=0, described=how)
        count = row.parameters
        place = tuple(places.get(name) for name in weight.names)
        first = place not in seen  # Tied weights are counted as weights, and their parameters once.
        seen.add(place)
        rows[weight.label, how] = replace(
            row,
            weights=row.weights + 1,
            elements=row.elements + first * sum(elements.get(name, 0) for name in weight.names),
            parameters=None if count is None or layout is None else count + first * layout.numel,
        )
    return tuple(rows.values())


def _layouts(checkpoint: Checkpoint) -> tuple[tuple[Quantized, Layout | None], ...]:
    """Return the quantized weights, each with its layout."""
    # Most files have no quantized weights, and are described faster without this import.
    from ckptfix.ops.dequantize.settings import settings_of

    settings = checkpoint.once(settings_of)
    weights = quantization_of(checkpoint).weights
    return tuple((weight, _layout(checkpoint, weight, settings)) for weight in weights)


def plain_shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Return address of the codes -> shape of the plain weight, for the quantized weights with a known layout."""
    if not quantization_of(checkpoint):
        return {}
    rows = checkpoint.once(_layouts)
    known = [(weight.codes, layout) for weight, layout in rows if layout is not None]
    return {codes: tuple(layout.shape) for codes, layout in known if codes is not None}


def _layout(checkpoint: Checkpoint, weight: Quantized, settings: Settings) -> Layout | None:
    """Return the layout of a weight; None if it is described by its name alone."""
    from ckptfix.ops.dequantize.plan import opened

    if not is_local(checkpoint.path):
        return None
    try:
        return opened(checkpoint, weight, settings, checks=False).layout
    except CkptfixError:
        return None  # A dequantization states what is wrong.


def described_tensor(checkpoint: Checkpoint, name: str) -> list[str]:
    """Return lines about a tensor of a quantized weight: its role, and the plain weight; none for other tensors."""
    role = quantization_of(checkpoint).roles.get(name)
    if role is None:
        return []
    from ckptfix.ops.dequantize.settings import settings_of

    lines = [described(name, *role)]
    layout = _layout(checkpoint, role[1], checkpoint.once(settings_of))
    if layout is not None:
        lines.append(layout.described)
        lines.append(f"plain weight {layout.key}: {shape(layout.shape)}, {plural(layout.numel, 'parameter')}")
    return lines


def plain_parameters(checkpoint: Checkpoint, stored: int) -> int | None:
    """Return the parameters of the plain model; None if there are no quantized weights, or if some are not known.

    Args:
        stored: elements of the model's tensors in the file.
    """
    rows = summary_of(checkpoint)
    known = [row.parameters for row in rows if row.parameters is not None]
    if not rows or len(known) < len(rows):
        return None
    return stored - sum(row.elements for row in rows) + sum(known)


def notes(checkpoint: Checkpoint) -> list[Finding]:
    """Return a note for each scheme: the number of its weights, its bits and groups, and the first of them."""
    made = []
    for row in summary_of(checkpoint):
        how = f", {row.described}" if row.described else ""
        message = f"{plural(row.weights, 'tensor')} of quantized weights: {row.scheme}{how}"
        made.append(found("quantized", message, where=row.first, about=row.scheme))
    return made
