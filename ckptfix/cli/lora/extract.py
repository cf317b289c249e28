"""ckptfix lora extract."""

from __future__ import annotations

from typing import Any

import click

from ckptfix.cli.lora.options import dtype_option, file_named, writing
from ckptfix.ops.writing import WriteOptions


@writing(
    "extract",
    file_named("base", "BASE"),
    file_named("tuned", "TUNED"),
    click.Option(["--rank"], type=click.IntRange(min=1), required=True, metavar="R", help="Rank of the adapter."),
    click.Option(
        ["--to"], type=click.Choice(["peft", "kohya", "diffusers", "comfy"]), default="peft", show_default=True,
        help="The layout of OUT.",
    ),
    click.Option(["--only"], metavar="GLOB", multiple=True, help="Only the weights whose keys match."),
    click.Option(["--prefix"], metavar="P", help="Beginning of the names of OUT, such as lora_unet or transformer."),
    dtype_option("Dtype of the adapter. Default: that of the weights."),
    examples=("ckptfix lora extract base/ tuned/ -o adapter/ --rank 16",),
)  # fmt: skip
def extract(dest: str, how: WriteOptions, *, base: str, tuned: str, rank: int, to: Any, **options: Any) -> Any:
    """Make an adapter of rank R of the difference of two models, and report how much of it is kept.

    The difference of each weight is decomposed (truncated SVD). Tensors that differ and get no LoRA, such as norms and
    biases, are listed.
    """
    from ckptfix.ops.lora.extract import lora_extract

    return lora_extract(base, tuned, dest, rank=rank, to=to, **options, **how.keywords())
