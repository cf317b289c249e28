"""ckptfix undo."""

from __future__ import annotations

import click

from ckptfix.cli.shared.batch import LineReport
from ckptfix.cli.shared.common import files_argument, reads
from ckptfix.cli.shared.console import Console
from ckptfix.cli.shared.operands import Inputs, search_options
from ckptfix.errors import printable


@reads(
    "undo",
    files_argument("source", "FILE..."),
    click.Option(["--list", "listed"], is_flag=True, help="List the edits that can be undone, and do nothing."),
    click.Option(["-n", "--dry-run"], is_flag=True, help="Show what would be undone, and do nothing."),
    *search_options(),
    operands=Inputs("source", LineReport),
)
def command(console: Console, *, source: str, listed: bool, dry_run: bool) -> int:
    """Undo the last in-place edit of FILE, byte for byte.

    Run it again to undo earlier edits, one by one. It also undoes an edit that was interrupted because its process or
    the machine stopped; until then no command reads the file.
    """
    from ckptfix.ops import undo

    if source in console.streams:
        raise click.UsageError("- (standard input) cannot be undone: name the file that was edited in place.")
    result = undo.listed(source) if listed else undo.undo(source, dry_run=dry_run)
    if console.json:
        console.emit(result.as_dict(), result.exit_code)
    else:
        console.done(list(map(printable, result.lines)))
    return result.exit_code
