"""ckptfix cast."""

from __future__ import annotations

import click

from ckptfix.cli.shared.common import Written, writes
from ckptfix.cli.shared.options import allow_unmatched_option, at_option, in_place_option
from ckptfix.ops import cast
from ckptfix.ops.writing import WriteOptions


@writes(
    "cast",
    click.Option(
        ["--to", "dtype"], metavar="DTYPE", required=True,
        help="New dtype, such as bfloat16, float16 or float8_e4m3fn.",
    ),
    click.Option(
        ["--only"], metavar="GLOB", multiple=True,
        help="Cast only the tensors whose keys match, including integers and statistics.",
    ),
    click.Option(["--keep"], metavar="GLOB", multiple=True, help="Leave the tensors whose keys match unchanged."),
    allow_unmatched_option(),
    at_option(),
    click.Option(
        ["--scale"], type=click.Choice(["tensor", "row", "block"]),
        help="For fp8: write scales for whole matrices, rows or blocks of 128 x 128. With --to float8_e4m3fn.",
    ),
    click.Option(
        ["--on-overflow"], type=click.Choice(["count", "error"]), default="count", show_default=True,
        help="Numbers out of range. Count them, or stop with an error.",
    ),
    in_place_option(),
)  # fmt: skip
def command(
    source: str,
    dest: str | None,
    how: WriteOptions,
    *,
    dtype: str,
    only: tuple[str, ...],
    keep: tuple[str, ...],
    allow_unmatched: bool,
    at: str | None,
    scale: cast.ScaleFor | None,
    on_overflow: cast.OnOverflow,
) -> Written:
    """Convert the floating-point tensors of IN to another dtype.

    The values are those of torch's tensor.to(DTYPE), bit for bit. Integers, the optimizer, and statistics
    (running_mean, running_var ...) are unchanged, unless --only names them. Codes of quantized weights and their scales
    are refused; use --keep to leave them unchanged. Numbers outside the range of DTYPE are counted, and their tensors
    named.

    --scale writes fp8 as transformers and vLLM read it: the matrices of linear layers, each with weight_scale_inv
    (block) or weight_scale, and quantization_config in a folder's config.json. Embeddings, output layers and routers
    are unchanged, unless --only names them.

    --in-place adds the new tensors to a torch zip and keeps the old ones for `ckptfix undo`; other formats need OUT.
    """

    return cast.cast(
        *(source, dest, dtype),
        only=only,
        keep=keep,
        at=at,
        on_overflow=on_overflow,
        scale=scale,
        allow_unmatched=allow_unmatched,
        **how.keywords(),
    )
