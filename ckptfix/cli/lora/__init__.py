"""ckptfix lora: adapters as checkpoints."""

from __future__ import annotations

from ckptfix.cli.lora.convert import convert
from ckptfix.cli.lora.extract import extract
from ckptfix.cli.lora.info import info
from ckptfix.cli.lora.merge import merge
from ckptfix.cli.lora.resize import resize
from ckptfix.cli.shared.help_text import GroupHelp
from ckptfix.command_table import COMMANDS


class Lora(GroupHelp):
    """The command group of the commands for adapters."""

    examples = COMMANDS["lora"].all_examples


command = Lora(
    "lora",
    commands=[info, merge, convert, extract, resize],
    help="""Describe adapters (LoRA, DoRA, LoHa, LoKr), merge them into their base, convert and make them.

    The layouts of PEFT, kohya, ComfyUI, diffusers (old and new), torchtune, LitGPT and MLX are recognized by keys.
    """,
)
