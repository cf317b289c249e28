"""Advice on load errors about quantized weights: what the loader lacks, and the command that helps without it."""

from __future__ import annotations

from ckptfix.checkpoint import Checkpoint
from ckptfix.errors import CkptfixError
from ckptfix.findings.steps import Fix, Step
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
    """Return the command that writes plain weights instead of quantized ones, or what else helps."""
    from ckptfix.ops.dequantize.plan import dequantized

    try:
        dequantized(checkpoint, None)
    except CkptfixError:
        return "load it with the library that quantized it"
    return (Step("convert", (("dequantize", True),), word="plain"),)
