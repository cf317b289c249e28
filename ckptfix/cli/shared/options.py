"""Options that several commands have."""

from __future__ import annotations

import click

from ckptfix.cli.shared import values


def at_option() -> click.Option:
    """--at PATH."""
    return click.Option(
        ["--at"],
        metavar="PATH",
        shell_complete=values.addresses,
        help="Only the mapping at this address, such as model_state_dict (see inspect); / is the top level.",
    )


def like_at_option() -> click.Option:
    """--like-at PATH, beside --like TARGET."""
    return click.Option(
        ["--like-at"],
        metavar="PATH",
        shell_complete=values.target_addresses,
        help="The mapping of TARGET, where it has several.",
    )


def link_option() -> click.Option:
    """--link, for edits of folders."""
    return click.Option(
        ["--link"],
        is_flag=True,
        help="Of a folder: give files that do not change a second name (hard links) instead of copying them. Saving to "
        "either folder again then changes both.",
    )


def in_place_option() -> click.Option:
    """--in-place, for edits of names and devices; `operands.InAndOut` takes all words as inputs then."""
    return click.Option(
        ["-i", "--in-place"],
        is_flag=True,
        help="Change IN itself, by the few bytes that differ; every name is an input. `ckptfix undo` takes it back.",
    )
