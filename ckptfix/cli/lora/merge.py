"""ckptfix lora merge."""

from __future__ import annotations

from typing import Any

import click

from ckptfix.cli.lora.options import adapter_option, alpha_option, dtype_option, file_named, writing
from ckptfix.cli.shared.common import files_argument
from ckptfix.cli.shared.options import at_option
from ckptfix.ops.writing import WriteOptions


@writing(
    "merge",
    file_named("base", "BASE"),
    files_argument("adapters", "[ADAPTER]...", required=False),
    click.Option(
        ["--scale"], type=float, metavar="S", multiple=True, default=(1.0,),
        help="Strength of all adapters, or one for each of them. Default: 1.",
    ),
    dtype_option("Cast the floating-point tensors of OUT, such as bfloat16. Default: each keeps its own."),
    click.Option(["--only"], metavar="GLOB", multiple=True, help="Merge only modules whose names match."),
    click.Option(["--dequantize"], is_flag=True, help="Write plain weights of a quantized base, and merge into those."),
    alpha_option(),
    adapter_option(),
    at_option(),
    examples=(
        "ckptfix lora merge base/ adapter/ -o merged/",
        "ckptfix lora merge model.safetensors style.safetensors -o styled.safetensors --scale 0.8",
    ),
)  # fmt: skip
def merge(
    dest: str, how: WriteOptions, *, base: str, adapters: tuple[str, ...], scale: tuple[float, ...], **options: Any
) -> Any:
    """Merge adapters into their base: W + scale * up @ down, computed in float64 and rounded once.

    Everything else of BASE is copied, and of a folder its configuration and tokenizer too. Memory does not grow with
    the model. Without an ADAPTER, BASE holds one beside its own weights (base_layer and lora_A.default).

    Refused: an adapter for another base, by names and shapes; one that is merged already, by the record in the metadata
    of a safetensors file (--force merges it again); a quantized base without --dequantize.
    """
    from ckptfix.ops.lora.merge import lora_merge

    scales: float | list[float] = scale[0] if len(scale) == 1 else list(scale)
    return lora_merge(base, list(adapters), dest, scale=scales, **options, **how.keywords())
