"""The option --html FILE: a result as a page to read in a browser."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import PurePath

import click

from ckptfix.cli.shared.console import Console
from ckptfix.cli.shared.operands import CommonOption
from ckptfix.commands import word
from ckptfix.errors import printable

DEFAULT = ""
"""Stands for the default name of a page."""


class HtmlOption(click.Option):
    """The option ``--html FILE``, for a command that accepts one input with it."""


def html_options() -> list[click.Parameter]:
    """Return the options --html and --force."""
    from ckptfix.cli.shared.common import FileName

    return [
        HtmlOption(
            ["--html"], metavar="[OUT]", type=FileName(output=True), is_flag=False, flag_value=DEFAULT,
            help="Write the result as one HTML page, which needs no network. Without OUT, the page is in this folder, "
            "named after the inputs. - is standard output.",
        ),
        CommonOption(["-f", "--force"], is_flag=True, help="Replace the page if it exists."),
    ]  # fmt: skip


def checked(dest: str | None, sources: Sequence[str | None], *, force: bool) -> str | None:
    """Return the path of the page; refuse one that could not be written, before anything is read.

    Raises:
        Refused: like `io.write.check_destination`.
    """
    if dest is None:
        if force:
            raise click.UsageError("--force needs --html.")
        return None
    from ckptfix.io.write import check_destination

    given = [source for source in sources if source]
    if dest == DEFAULT:
        names = [re.sub(r"[^\w.+-]", "_", PurePath(source).name.partition("?")[0]) for source in given] or ["message"]
        dest = f"{'-'.join(names)}.{click.get_current_context().info_name}.html"
    check_destination(dest, given, overwrite=force)
    return dest


def write(
    console: Console, dest: str, sources: Sequence[str | None], make: Callable[[str], str], *, force: bool
) -> None:
    """Write the page that `make` builds for the command line."""
    from ckptfix.ops.writing import write_text

    arguments = [*map(word, console.arguments)]
    if not force:
        arguments.append("--force")  # so that the command shown on the page can write it again
    page = make(" ".join(["ckptfix", *arguments]))
    for name, shown in console.streams.items():
        page = page.replace(name, shown)
    write_text(dest, page, *(source for source in sources if source), force=force)


def say(console: Console, dest: str | None) -> None:
    """Print the path of the page, as the last line."""
    if dest is not None:
        console.prose(f"page: {printable(dest)}")
