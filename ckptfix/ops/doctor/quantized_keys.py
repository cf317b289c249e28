"""Advice on load errors about quantized weights: what the loader lacks, and the command that helps without it."""

from __future__ import annotations

from ckptfix.checkpoint import Checkpoint
from ckptfix.findings.steps import Fix, step
from ckptfix.ops.dequantize.summary import summary_of
from ckptfix.ops.quantized import library_of, methods_of, quantization_of


def needs(checkpoint: Checkpoint) -> str:
    """Return what a loader of quantized weights needs: a library, and settings in config.json."""
    weight = quantization_of(checkpoint).weights[0]
    library = library_of(weight)
    methods = methods_of(checkpoint)
    if methods:
        return f"config.json names {', '.join(methods)}, so the loader needs {library}"
    return f"the loader needs {library}, and quantization_config in config.json, which is not beside the file"


def remedy(checkpoint: Checkpoint) -> Fix:
    """Return the command that writes plain weights, if all schemes of the file are computed."""
    rows = summary_of(checkpoint)
    if rows and all(row.parameters is not None for row in rows):
        return step("convert", dequantize=True)
    return "load it with the library that quantized it"
