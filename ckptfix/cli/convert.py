"""ckptfix convert."""

from __future__ import annotations

from typing import Literal

import click

from ckptfix.cli.shared import values
from ckptfix.cli.shared.common import MoreInputs, Written, writes
from ckptfix.cli.shared.operands import CommonOption
from ckptfix.cli.shared.options import allow_unmatched_option, at_option, names_options
from ckptfix.formats.target import FormatName
from ckptfix.ops import deploy
from ckptfix.ops.writing import WriteOptions


@writes(
    "convert",
    MoreInputs(),
    click.Option(
        ["--to"],
        metavar="FORMAT",
        shell_complete=values.formats,
        help="zip, legacy, safetensors, hf, dcp, megatron or meta (default: from OUT's suffix). `torch` means zip; the "
        "last four are folders.",
    ),
    click.Option(
        ["--shard-size"],
        metavar="SIZE",
        help="Maximum size of a shard, such as 2GB. With --to hf or dcp, or OUT without a suffix. Default: 5GB.",
    ),
    at_option(),
    click.Option(
        ["--dtype"],
        metavar="DTYPE",
        help="Cast the weights, such as fp16 or bf16, as `ckptfix cast`. With --dequantize: bf16, fp16 or fp32.",
    ),
    click.Option(["--unwrap"], is_flag=True, help="Remove the prefixes of wrappers, as `ckptfix unwrap`."),
    click.Option(["--strip-prefix"], metavar="P", help="Remove the prefix P from the keys. For example model."),
    *names_options(both=False),
    click.Option(["--keep"], metavar="GLOB", multiple=True, help="Keep the tensors whose keys in IN match."),
    click.Option(["--drop"], metavar="GLOB", multiple=True, help="Leave out the tensors whose keys in IN match."),
    allow_unmatched_option(),
    click.Option(
        ["--drop-unsupported"],
        is_flag=True,
        help="Leave out what OUT's format cannot hold. It is listed, and the exit code is 3.",
    ),
    click.Option(
        ["--weights"],
        type=click.Choice(["fp32", "model"]),
        help="DeepSpeed: which weights. The fp32 master weights (default), or those that the model computed with.",
    ),
    click.Option(
        ["--optimizer"],
        is_flag=True,
        help="DeepSpeed: include the optimizer state. By parameter name; not for safetensors.",
    ),
    click.Option(
        ["--dequantize"],
        is_flag=True,
        help="Write plain weights in place of quantized ones.",
    ),
    CommonOption(["--tp"], type=int, metavar="N", help="With --to megatron or meta: cut the tensors for N ranks."),
    CommonOption(["--pp"], type=int, metavar="N", help="With --to megatron: divide the layers into N stages."),
    CommonOption(["--ep"], type=int, metavar="N", help="With --to megatron: divide the experts into N groups."),
    CommonOption(
        ["--dim", "dims"],
        metavar="NAME=D",
        multiple=True,
        help="For files of ranks: the dimension along which NAME, or a glob, was cut, where nothing says it.",
    ),
    CommonOption(
        ["--vocab-size"],
        metavar="N|args|config",
        help="For files of ranks: keep N rows of the embeddings (default: all, with their padding).",
    ),
)
def command(
    source: str,
    dest: str,
    how: WriteOptions,
    *,
    more: tuple[str, ...],
    to: FormatName | None,
    shard_size: str | None,
    at: str | None,
    drop_unsupported: bool,
    weights: Literal["fp32", "model"] | None,
    optimizer: bool,
    dequantize: bool,
    tp: int | None,
    pp: int | None,
    ep: int | None,
    dims: tuple[str, ...],
    vocab_size: str | None,
    dtype: str | None,
    unwrap: bool,
    strip_prefix: str | None,
    names: str | None,
    heads: int | None,
    kv_heads: int | None,
    keep: tuple[str, ...],
    drop: tuple[str, ...],
    allow_unmatched: bool,
) -> Written:
    """Convert IN to torch zip (1.6 and later), legacy or safetensors, or shards.

    --dtype, --unwrap, --strip-prefix, --names, --keep and --drop make a model ready to deploy in the same pass, from
    any IN: they choose tensors by the keys of IN, remove prefixes, give it the names of another library, and cast, as
    the commands of these names do one by one.

    IN may be a folder from DeepSpeed, or one with the files of all ranks (FSDP, tensor parallelism); the shards are
    joined. With -o OUT, you can name several such files.

    Between zip (1.6 and later) and legacy nothing is lost, as both hold the same. safetensors holds one state dict: the
    one found, or the one that --at names; the rest of the file is listed. Tied tensors are tied again on the way back.
    With --at, a torch file holds that state dict alone.

    hf writes OUT as a folder of safetensors shards and their index, as transformers does. IN may be such a folder, also
    with pytorch_model.bin shards, and so may the input of every other command.
    megatron and meta write the files of the ranks of --tp, --pp and --ep, with the tensors under the names that IN has.
    IN may be such a folder: the parts of all ranks are joined.

    dcp writes a folder that torch.distributed.checkpoint loads; it holds the whole object, without ties and views.

    --dequantize computes the weights of a quantized model: with the keys and shapes of the plain model, without scales
    and zero points, and without quantization_config in a folder's config.json. OUT may have the format of IN.
    """

    return deploy.convert(
        [source, *more] if more else source,
        dest,
        to=to,
        shard_size=shard_size,
        at=at,
        drop_unsupported=drop_unsupported,
        weights=weights,
        optimizer=optimizer,
        dequantize=dequantize,
        tp=tp,
        pp=pp,
        ep=ep,
        dims=_pairs(dims),
        vocab_size=vocab_size,
        dtype=dtype,
        unwrap=unwrap,
        strip_prefix=strip_prefix,
        names=names,
        heads=heads,
        kv_heads=kv_heads,
        keep=keep,
        drop=drop,
        allow_unmatched=allow_unmatched,
        **how.keywords(),
    )


def _pairs(given: tuple[str, ...]) -> dict[str, int | str]:
    """Return the cuts in NAME=D.

    Raises:
        UsageError: one has no name or no dimension.
    """
    made: dict[str, int | str] = {}
    for text in given:
        name, sign, value = text.rpartition("=")
        if not (name and sign and value):
            raise click.UsageError(f"--dim {text}: give NAME=D, such as 'tok_embeddings.weight=1'")
        made[name] = value
    return made
