"""ckptfix digest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from ckptfix.cli.shared.batch import FullText
from ckptfix.cli.shared.common import FileName, files_argument, reads
from ckptfix.cli.shared.console import Console
from ckptfix.cli.shared.operands import Inputs, search_options
from ckptfix.cli.shared.options import dequantized_option
from ckptfix.cli.shared.terminal_width import LEAST, cut, wrapped
from ckptfix.errors import printable
from ckptfix.ops import digest

if TYPE_CHECKING:
    from ckptfix.ops.digest import Algorithm
    from ckptfix.ops.digest.compare import DigestCheck

ROWS = 40
"""Names of each kind shown on a terminal; a pipe gets all of them."""


@reads(
    "digest",
    files_argument("path", "[FILE...]", required=False),
    click.Option(
        ["--check"], metavar="OTHER | MANIFEST", type=FileName(),
        help="Compare FILE with its original, or with a manifest. A manifest of files needs no FILE.",
    ),
    click.Option(["--at"], metavar="PATH", help="Hash only the state dict at this address."),
    click.Option(["--check-at"], metavar="PATH", help="Like --at, for OTHER."),
    click.Option(
        ["--algorithm"], metavar="NAME", type=click.Choice(["sha256", "sha512", "blake2b", "blake3"]), default="sha256",
        show_default=True, help="Hash algorithm. sha256, sha512, blake2b; or blake3, the fastest, if it is installed.",
    ),
    click.Option(["--files"], is_flag=True, help="Hash whole files, as sha256sum does; for a folder, all files in it."),
    click.Option(["--hub"], is_flag=True, help="Check the files of a Hugging Face cache. Their names are hashes."),
    click.Option(["--total"], is_flag=True, help="Print only two digests of all tensors: with names, and without."),
    click.Option(["--manifest"], metavar="OUT", type=FileName(output=True), help="Write the digests to this file."),
    dequantized_option(),
    click.Option(["-f", "--force"], is_flag=True, help="Replace the manifest if it exists."),
    *search_options(),
    operands=Inputs("path", FullText),
)  # fmt: skip
def command(
    console: Console,
    *,
    path: str | None,
    check: str | None,
    at: str | None,
    check_at: str | None,
    algorithm: Algorithm,
    files: bool,
    hub: bool,
    total: bool,
    manifest: str | None,
    dequantized: bool,
    force: bool,
) -> int:
    """Print a digest of each tensor, in the format of sha256sum, or check FILE against its original.

    The digest covers dtype, shape and elements; keys, containers, shards and byte order do not change it. A copy that
    was stripped, renamed, converted or resharded therefore verifies against its original. Tensors that were renamed,
    changed, removed or added are listed, and then the exit code is 1. A state dict of the original that FILE lacks
    entirely, such as the optimizer, is reported but does not count as a difference.
    """

    if path is None and check is None:
        raise click.UsageError("Missing argument 'FILE...', or --check MANIFEST.")
    with console.progress() as progress:
        done = digest.digest(
            path,
            check=check,
            at=at,
            check_at=check_at,
            algorithm=algorithm,
            whole_files=files,
            hub=hub,
            manifest=manifest,
            force=force,
            dequantized=dequantized,
            progress=progress,
        )
    if console.json:
        console.emit(done.as_dict(), done.exit_code)
    elif done.check is not None:
        _show(console, done.check, done.lines)
    elif total and done.named is not None:
        console.say(f"{done.named}  {printable(done.path)} (with names)")
        console.say(f"{done.unnamed}  {printable(done.path)} (without names)")
    elif manifest is not None:
        console.done([*done.lines, f"output: {printable(manifest)}"])
    else:
        for line in fitted(done.manifest.removesuffix("\n").split("\n"), console.width):
            console.say(line)
        console.done([line for line in done.lines if line.startswith("no data")])
    return done.exit_code


SHORT = 16
"""Digits of a digest that a narrow terminal shows; a pipe gets all."""


def fitted(lines: Sequence[str], width: int) -> list[str]:
    """Return the lines of a manifest with digests cut so that the names fit the terminal."""
    if not width or max(map(len, lines)) <= width:
        return list(lines)
    kept = []
    for line in lines:
        digest, space, name = line.partition("  ")
        if space and len(digest) > SHORT:
            line = f"{digest[:SHORT]}...  {cut(name, max(width - SHORT - 5, LEAST))}"
        kept.append(cut(line, width))
    return [*kept, *wrapped("(a pipe, or --manifest OUT, gets whole digests)", width)]


def _show(console: Console, check: DigestCheck, lines: Sequence[str]) -> None:
    most = console.rows(None, ROWS)
    console.done(lines[:1])
    for names, what in check.rows:
        for name in names[: most or None]:
            console.say(f"{what}: {printable(name)}")
        if most and len(names) > most:
            console.say(f"{what}: {len(names) - most:,} more")
    console.done([line for line in lines[1:] if line.startswith("not in it")])
