"""The signs by which a checkpoint may have quantized weights.

Most files have none of the signs. They are looked at without the table of schemes (`checkpoint.quantization`), which
takes longer to import than a small file to read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from ckptfix.checkpoint.tensors import TensorEntry

FLOATS = frozenset({"float32", "float16", "bfloat16", "float64"})
INTEGERS = frozenset({"int8", "uint8", "int16", "int32", "int64"})
BLOCKS = "GGUF blocks "
"""The beginning of `TensorEntry.detail` of such a tensor; the name of the type follows."""

ORDINARY = FLOATS | {"int64", "bool", "complex64", "complex128"}
"""Dtypes that tensors of models without quantization have."""

COMPANIONS = (
    "scale", "scales", "scale_inv", "scale_2", "scale_weight", "scale_max", "scale_packed", "scales_and_zeros", "SCB",
    "absmax", "quant_map", "zero", "zeros", "biases", "tables", "tables2", "row_offsets", "col_vals", "codebooks",
    "centroids.weight", "weight_bias", "meta", "SU", "SV", "suh", "svh", ".s",
)  # fmt: skip
"""Ends of the keys of companions; every scheme needs such a companion."""

CODES = ("dense_weights", "indices", "Qidxs", "qdata", "codes", "_data")
"""Ends of the keys of codes that may be int64."""


def has_signs(entries: Iterable[TensorEntry]) -> bool:
    """Return whether the names, dtypes or classes of some tensors may be those of quantized weights."""
    ends = COMPANIONS + CODES
    return any(
        entry.dtype not in ORDINARY or entry.detail != "" or f".{entry.key}".endswith(ends) for entry in entries
    )


def observers(entries: Iterable[TensorEntry]) -> dict[str, str]:
    """Return the scales and zero points that torch.ao keeps for a module's output or a fake quantizer.

    A `scale` counts only if an integer `zero_point` of its shape is beside it.

    Returns:
        Address -> a description.
    """
    listed = {(entry.at, entry.key): entry for entry in entries}
    found: dict[str, str] = {}
    for (at, key), entry in listed.items():
        stem, _, leaf = key.rpartition(".")
        if leaf != "zero_point" or entry.dtype not in INTEGERS:
            continue
        scale = listed.get((at, f"{stem}.scale" if stem else "scale"))
        if scale is not None and scale.shape == entry.shape:
            found[scale.name] = "torch.ao: the scale of quantized values"
            found[entry.name] = "torch.ao: the zero of quantized values"
    return found


def patterns(names: Iterable[str]) -> Iterator[str]:
    """Yield globs that match the names; names that differ only in numbers share one glob."""
    yield from dict.fromkeys(re.sub(r"\d+", "*", re.sub(r"([\[\]?*])", r"[\1]", name)) for name in names)
