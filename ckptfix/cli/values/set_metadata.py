"""ckptfix set-metadata."""

from __future__ import annotations

from collections.abc import Iterable

import click

from ckptfix.cli.shared.common import Written, writes
from ckptfix.cli.shared.options import allow_unmatched_option, in_place_option
from ckptfix.ops import set_metadata
from ckptfix.ops.writing import WriteOptions


@writes(
    "set-metadata",
    click.Option(["--set", "pairs"], metavar="KEY=VALUE", multiple=True, help="Add or change a pair. Repeatable."),
    click.Option(["--delete"], metavar="KEY", multiple=True, help="Remove a pair. Repeatable."),
    allow_unmatched_option(),
    in_place_option(),
)
def command(
    source: str,
    dest: str | None,
    how: WriteOptions,
    *,
    pairs: tuple[str, ...],
    delete: tuple[str, ...],
    allow_unmatched: bool,
) -> Written:
    """Change the pairs in the __metadata__ of a safetensors file.

    IN is a safetensors file, or a folder of shards, which all get the change. With --in-place only the header is
    written. The pairs that record tied keys are unchanged.
    """

    if not pairs and not delete:
        raise click.UsageError("Nothing to change: give --set KEY=VALUE or --delete KEY.")
    return set_metadata.set_metadata(
        source, dest, pairs=split(pairs), delete=delete, allow_unmatched=allow_unmatched, **how.keywords()
    )


def split(pairs: Iterable[str]) -> dict[str, str]:
    """Split KEY=VALUE pairs into a dict; a value may contain more equals signs.

    Raises:
        click.BadParameter: a pair has no equals sign or no key, or a key has two values.
    """
    made: dict[str, str] = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not sign or not key:
            raise click.BadParameter(f"{pair!r} is not KEY=VALUE.", param_hint="--set")
        if made.setdefault(key, value) != value:
            raise click.BadParameter(f"{key} cannot be both {made[key]!r} and {value!r}.", param_hint="--set")
    return made
