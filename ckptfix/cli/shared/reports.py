"""--html FILE: a result as a page to read in a browser."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import click

from ckptfix.cli.shared.console import Console
from ckptfix.commands import word
from ckptfix.errors import printable


class Html(click.Option):
    """``--html FILE``, of a command that takes one input for it."""


def html_options() -> list[click.Parameter]:
    """--html and --force."""
    from ckptfix.cli.shared.common import FileName

    return [
        Html(
            ["--html"], metavar="OUT", type=FileName(output=True),
            help="Write the result as one HTML page, which needs no network. - is standard output.",
        ),
        click.Option(["-f", "--force"], is_flag=True, help="Replace that page if it exists."),
    ]  # fmt: skip


def refuse(dest: str | None, sources: Sequence[str | None], *, force: bool) -> None:
    """Refuse, before anything is read, a page that could not be written. Raises as `io.write.check_destination`."""
    if dest is None:
        if force:
            raise click.UsageError("--force goes with --html OUT.")
        return
    from ckptfix.io.write import check_destination

    check_destination(dest, [source for source in sources if source], overwrite=force)


def write(
    console: Console, dest: str, sources: Sequence[str | None], make: Callable[[str], str], *, force: bool
) -> None:
    """Write the page that `make` makes of the command line."""
    from ckptfix.ops.writing import write_text

    arguments = [*map(word, console.arguments)]
    if not {"-f", "--force"}.intersection(arguments):
        arguments.append("--force")  # so that the command that the page shows writes it again
    page = make(" ".join(["ckptfix", *arguments]))
    for name, shown in console.streams.items():
        page = page.replace(name, shown)
    write_text(dest, page, *(source for source in sources if source), force=force)


def say(console: Console, dest: str | None) -> None:
    """Say that there is a page; the last line."""
    if dest is not None:
        console.prose(f"page: {printable(dest)}")
