"""Options that several commands share."""

from __future__ import annotations

import click

from ckptfix.cli.shared import values
from ckptfix.cli.shared.operands import CommonOption


def at_option() -> click.Option:
    """Make the option --at PATH."""
    return click.Option(
        ["--at"],
        metavar="PATH",
        shell_complete=values.addresses,
        help="Only the state dict at this address, such as model_state_dict (see inspect); / is the top level.",
    )


def like_at_option() -> click.Option:
    """Make the option --like-at PATH, for --like TARGET."""
    return click.Option(
        ["--like-at"],
        metavar="PATH",
        shell_complete=values.target_addresses,
        help="The state dict of TARGET, if it has several.",
    )


def allow_unmatched_option() -> click.Option:
    """Make the option --allow-unmatched, for commands that take patterns or keys."""
    return CommonOption(
        ["--allow-unmatched"], is_flag=True, help="Warn of a pattern or key that matches nothing; do not stop."
    )


def dequantized_option() -> click.Option:
    """Make the option --dequantized, for commands that read values."""
    return click.Option(
        ["--dequantized"], is_flag=True, help="Read the plain weights of a quantized model, not its codes and scales."
    )


def names_options(both: bool = True) -> tuple[click.Option, ...]:
    """Make the options --names, --heads and --kv-heads, for commands that take a table of names.

    Args:
        both: --names is FROM:TO, rather than TO alone.
    """
    table = "Names of another library, by a table. It has the layout too; `ckptfix help names` lists them."
    return (
        click.Option(
            ["--names"], metavar="FROM:TO" if both else "[FROM:]TO", shell_complete=values.names, help=table
        ),
        CommonOption(
            ["--heads"], type=click.IntRange(min=1), metavar="N",
            help="Number of query heads, for a table that needs it, if no config.json beside the file states it.",
        ),
        CommonOption(
            ["--kv-heads"], type=click.IntRange(min=1), metavar="N", help="Number of key and value heads, if fewer."
        ),
    )


def drop_unexpected_option() -> click.Option:
    """Make the option --drop-unexpected, for --like TARGET."""
    return click.Option(["--drop-unexpected"], is_flag=True, help="Leave out and list the keys that TARGET lacks.")


def link_option() -> click.Option:
    """Make the option --link, for edits of folders."""
    return CommonOption(
        ["--link"],
        is_flag=True,
        help="For a folder: hard-link unchanged files instead of copying them. Saving to either folder again then "
        "changes both.",
    )


def in_place_option() -> click.Option:
    """Make the option --in-place, for edits of keys and devices; `operands.InAndOut` then reads all words as inputs."""
    return CommonOption(
        ["-i", "--in-place"],
        is_flag=True,
        help="Change only the few bytes that differ, in IN itself; every name is an input. `ckptfix undo` reverts it.",
    )
