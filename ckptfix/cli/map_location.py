"""ckptfix map-location."""

from __future__ import annotations

from collections.abc import Sequence

import click

from ckptfix.cli.shared import values
from ckptfix.cli.shared.common import Written, writes
from ckptfix.cli.shared.operands import Last
from ckptfix.cli.shared.options import in_place_option, link_option
from ckptfix.errors import Refused
from ckptfix.ops import relocate
from ckptfix.ops.relocate import device
from ckptfix.ops.writing import WriteOptions


def _is_target(word: str) -> bool:
    """Return whether `word` is a device or a pair of devices, and not a file name."""
    try:
        return all(map(device, word.split("=")))
    except Refused:
        return False


@writes(
    "map-location",
    Last("targets", "DEVICE | FROM=TO...", tells=_is_target, shell_complete=values.devices),
    in_place_option(),
    link_option(),
)
def command(source: str, dest: str | None, how: WriteOptions, *, targets: tuple[str, ...]) -> Written:
    """Move the tensors of IN to another device.

    One DEVICE (cpu, cuda:1, mps ...) moves everything there. Pairs FROM=TO are applied all at once, so two devices can
    be swapped; devices that no pair names are listed.
    """

    return relocate.map_location(source, dest, parse_targets(targets), **how.keywords())


def parse_targets(targets: Sequence[str]) -> str | dict[str, str]:
    """Parse the one device, or the pairs FROM -> TO.

    Raises:
        click.BadParameter: both forms are mixed, several devices, half a pair, or two targets for one FROM.
    """
    if len(targets) == 1 and "=" not in targets[0]:
        return targets[0]
    pairs: dict[str, str] = {}
    for target in targets:
        before, sign, after = (part.strip() for part in target.partition("="))
        if not sign:
            raise click.BadParameter(f"give one DEVICE, or pairs FROM=TO; {target!r} is not a pair.")
        if not before or not after:
            raise click.BadParameter(f"{target!r} lacks one side; write it as in cuda:1=cuda:0.")
        if pairs.get(before, after) != after:
            raise click.BadParameter(f"{before} cannot move to both {pairs[before]} and {after}.")
        pairs[before] = after
    return pairs
