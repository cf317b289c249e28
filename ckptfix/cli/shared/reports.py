"""The option --html FILE: a result as a page to read in a browser."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import click

from ckptfix.cli.shared.console import Console
from ckptfix.cli.shared.operands import CommonOption
from ckptfix.commands import word
from ckptfix.errors import printable


class HtmlOption(click.Option):
    """The option ``--html FILE``, for a command that accepts one input with it."""


def html_options() -> list[click.Parameter]:
    """Return the options --html and --force."""
    from ckptfix.cli.shared.common import FileName

    return [
        HtmlOption(
            ["--html"], metavar="OUT", type=FileName(output=True),
            help="Write the result as one HTML page, which needs no network. - is standard output.",
        ),
        CommonOption(["-f", "--force"], is_flag=True, help="Replace the page if it exists."),
    ]  # fmt: skip


def refuse(dest: str | None, sources: Sequence[str | None], *, force: bool) -> None:
    """Refuse a page that could not be written, before anything is read. Raise like `io.write.check_destination`."""
    if dest is None:
        if force:
            raise click.UsageError("--force needs --html OUT.")
        return
    from ckptfix.io.write import check_destination

    check_destination(dest, [source for source in sources if source], overwrite=force)


def write(
    console: Console, dest: str, sources: Sequence[str | None], make: Callable[[str], str], *, force: bool
) -> None:
    """Write the page that `make` builds for the command line."""
    from ckptfix.ops.writing import write_text

    arguments = [*map(word, console.arguments)]
    if not {"-f", "--force"}.intersection(arguments):
        arguments.append("--force")  # so that the command shown on the page can write it again
    page = make(" ".join(["ckptfix", *arguments]))
    for name, shown in console.streams.items():
        page = page.replace(name, shown)
    write_text(dest, page, *(source for source in sources if source), force=force)


def say(console: Console, dest: str | None) -> None:
    """Print the path of the page, as the last line."""
    if dest is not None:
        console.prose(f"page: {printable(dest)}")
