"""ckptfix digest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from ckptfix.cli.shared.common import FileName, files_argument, reads
from ckptfix.cli.shared.console import Console
from ckptfix.cli.shared.many import Whole
from ckptfix.cli.shared.operands import Inputs, search_options
from ckptfix.errors import printable
from ckptfix.ops import digest

if TYPE_CHECKING:
    from ckptfix.ops.digest import Algorithm
    from ckptfix.ops.digest.compare import Check

ROWS = 40
"""Names of each kind that a terminal gets; a pipe gets all."""


@reads(
    "digest",
    files_argument("path", "[FILE...]", required=False),
    click.Option(
        ["--check"], metavar="OTHER | MANIFEST", type=FileName(),
        help="Compare FILE with its original, or with a manifest of it. A manifest of files needs no FILE.",
    ),
    click.Option(["--at"], metavar="PATH", help="Only the mapping at this address of FILE; its keys are the names."),
    click.Option(["--check-at"], metavar="PATH", help="The same in OTHER."),
    click.Option(
        ["--algorithm"], type=click.Choice(["sha256", "sha512", "blake2b", "blake3"]), default="sha256",
        show_default=True, help="What hashes; blake3 is the fastest, where its package is installed.",
    ),
    click.Option(["--files"], is_flag=True, help="Hash whole files, as sha256sum does; of a folder, all in it."),
    click.Option(["--hub"], is_flag=True, help="Check files of a Hugging Face cache by their names."),
    click.Option(["--total"], is_flag=True, help="Only the two digests of all tensors: with names, and without."),
    click.Option(["--manifest"], metavar="OUT", type=FileName(output=True), help="Write the digests to this file."),
    click.Option(["-f", "--force"], is_flag=True, help="Replace it if it exists."),
    *search_options(),
    example="ckptfix digest model.safetensors --check original.pth",
    operands=Inputs("path", Whole),
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
    force: bool,
) -> int:
    """Print a digest of each tensor of FILE, in the form of sha256sum, or check FILE against its original.

    The digest is of dtype, shape and elements: names, containers, shards and byte order do not change it. So a copy
    that was stripped, renamed, converted or sharded anew verifies against its original: what moved to another name,
    what changed, is missing or was added is listed, and the exit code is 1 where anything is. A mapping of the original
    of which FILE has nothing, such as the optimizer, is said and does not count.
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
        for line in done.manifest.removesuffix("\n").split("\n"):
            console.say(line)
        console.done([line for line in done.lines if line.startswith("no data")])
    return done.exit_code


def _show(console: Console, check: Check, lines: Sequence[str]) -> None:
    most = console.rows(None, ROWS)
    console.done(lines[:1])
    for names, what in check.rows:
        for name in names[: most or None]:
            console.say(f"{what}: {printable(name)}")
        if most and len(names) > most:
            console.say(f"{what}: {len(names) - most:,} more")
    console.done([line for line in lines[1:] if line.startswith("not in it")])
