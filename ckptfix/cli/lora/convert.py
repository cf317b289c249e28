"""ckptfix lora convert."""

from __future__ import annotations

from typing import Any

import click

from ckptfix.cli.lora.options import adapter_option, alpha_option, file_named, writing
from ckptfix.cli.shared.common import FileName
from ckptfix.cli.shared.options import at_option
from ckptfix.ops.writing import WriteOptions


@writing(
    "convert",
    file_named("source", "IN"),
    click.Argument(["dest"], metavar="OUT", required=False, type=FileName(output=True)),
    click.Option(
        ["--to"], type=click.Choice(["peft", "kohya", "diffusers", "comfy"]), required=True, help="The layout of OUT."
    ),
    click.Option(["--like"], metavar="BASE", help="The base, for the dots that kohya leaves out."),
    click.Option(["--prefix"], metavar="P", help="Beginning of the names of OUT, such as lora_unet or transformer."),
    alpha_option(),
    adapter_option(),
    at_option(),
    examples=(
        "ckptfix lora convert style.safetensors style/ --to peft",
        "ckptfix lora convert adapter/ style.safetensors --to kohya",
        "ckptfix lora convert lycoris.safetensors new/ --to peft --like base/",
    ),
)  # fmt: skip
def convert(dest: str, how: WriteOptions, *, source: str, to: Any, **options: Any) -> Any:
    """Write an adapter in the layout of another library, with the same update for each weight.

    kohya and ComfyUI state alpha for each module, PEFT in adapter_config.json (OUT is a folder then); for diffusers it
    becomes a part of lora_B. The metadata (ss_*) is kept.
    """
    from ckptfix.ops.lora.convert import lora_convert

    return lora_convert(source, dest, to=to, **options, **how.keywords())
