"""ckptfix lora resize."""

from __future__ import annotations

from typing import Any

import click

from ckptfix.cli.lora.options import adapter_option, alpha_option, dtype_option, file_named, writing
from ckptfix.cli.shared.common import FileName
from ckptfix.cli.shared.options import at_option
from ckptfix.ops.writing import WriteOptions


@writing(
    "resize",
    file_named("source", "IN"),
    click.Argument(["dest"], metavar="OUT", required=False, type=FileName(output=True)),
    click.Option(["--rank"], type=click.IntRange(min=1), required=True, metavar="R", help="The new rank."),
    dtype_option("Dtype of the adapter. Default: its own."),
    alpha_option(),
    adapter_option(),
    at_option(),
    examples=("ckptfix lora resize style.safetensors small.safetensors --rank 8",),
)  # fmt: skip
def resize(dest: str, how: WriteOptions, *, source: str, rank: int, **options: Any) -> Any:
    """Write an adapter with another rank, in its own layout, and report how much of the update is kept.

    Each module keeps its scale: alpha changes with the rank.
    """
    from ckptfix.ops.lora.extract import lora_resize

    return lora_resize(source, dest, rank=rank, **options, **how.keywords())
