"""ckptfix repair."""

from __future__ import annotations

import click

from ckptfix.cli.shared.common import (
    FileName,
    default_name,
    destination,
    file_argument,
    kept_name,
    reads,
    show,
    where_to,
)
from ckptfix.cli.shared.console import Console
from ckptfix.cli.shared.operands import InAndOut, Others

LOSSES = 20
"""Lost tensors with a line each; the first line summarizes all of them, and --json has them with reasons."""

_OUT, *_HOW = destination(optional=True)
_OTHERS = Others()


@reads(
    "repair",
    file_argument("source", "IN"),
    _OUT,
    _OTHERS,
    click.Option(["--check-only"], is_flag=True, help="List what can be recovered; write nothing. OUT is optional."),
    click.Option(["--fill"], type=click.Choice(["zeros", "nan"]), help="Fill lost tensors with these values."),
    click.Option(
        ["--fill-from"],
        metavar="OTHER",
        type=FileName(),
        help="Copy lost tensors from an older checkpoint. OTHER has the same keys, shapes and dtypes.",
    ),
    click.Option(
        ["--like"],
        metavar="TARGET",
        type=FileName(),
        help="For a file whose pickle is lost: the model. A checkpoint, keys.json, or module:factory.",
    ),
    click.Option(["--allow-import"], is_flag=True, help="Allow importing module:factory, which runs its code."),
    *_HOW,
    operands=InAndOut(_OTHERS, kept_name),
)
def command(
    console: Console,
    *,
    source: str,
    dest: str | None,
    output: str | None,
    check_only: bool,
    fill: str | None,
    fill_from: str | None,
    like: str | None,
    allow_import: bool,
    force: bool,
    backup: bool,
    dry_run: bool,
) -> int:
    """Recover the provably intact tensors of IN, a damaged checkpoint or the folder that it was unzipped to.

    Every storage is checked against its own size and checksum. Damaged tensors are left out or filled, and listed; the
    exit code is then 3. Truncated, re-zipped, gzipped and otherwise mangled files are recognized.
    """
    from ckptfix.ops import repair

    dest = where_to(dest, output, without=None)
    named = dest is None and not check_only
    if named:
        dest = default_name("repair", source, {})
    with console.progress("flushing to disk", ("writing",)) as progress:
        result = repair.repair(
            source,
            dest,
            check_only=check_only,
            fill=fill,  # type: ignore[arg-type]
            fill_from=fill_from,
            like=like,
            allow_import=allow_import,
            force=force or backup,
            keep_old=backup,
            dry_run=dry_run,
            progress=progress,
        )
    return show(console, result, named=named, most=LOSSES)
