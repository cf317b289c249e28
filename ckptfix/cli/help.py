"""ckptfix help."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from textwrap import indent
from typing import TYPE_CHECKING, Any

import click

from ckptfix.cli.shared.common import reads
from ckptfix.cli.shared.console import GROUP, Console, is_terminal
from ckptfix.docs import SCHEMA, SUMMARY, TOPICS, page, schema
from ckptfix.hooks import Hook

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

ROWS: Hook[Mapping[str, Any]] = Hook("commands.rows")
"""The table of commands, which is above each of them."""


def _complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    summaries = {**TOPICS, SCHEMA: SUMMARY, **{name: row.summary for name, row in ROWS.get().items()}}
    return [CompletionItem(name, help=text) for name, text in summaries.items() if name.startswith(incomplete)]


@reads(
    "help",
    click.Argument(
        ["topics"], metavar="[TOPIC | COMMAND]...", nargs=-1, required=False, shell_complete=_complete
    ),
    example="ckptfix help recipes",
    output=False,
)
def command(console: Console, *, topics: tuple[str, ...]) -> int:
    """Show pages of the documentation, or the help of commands.

    Without an argument, the topics are listed. A terminal shows pages in its pager; a pipe gets plain text.
    """
    for line in () if topics else overview():
        console.prose(line)
    for topic in topics:
        _show(console, topic)
    return 0


def _show(console: Console, topic: str) -> None:
    if topic == SCHEMA:
        click.echo(schema(), nl=False)
    elif topic in TOPICS:
        text = plain(page(topic))
        if is_terminal(sys.stdout):
            click.echo_via_pager(text)
        else:
            click.echo(text, nl=False)
    else:
        console.say(_of_command(topic))


def overview() -> Iterator[str]:
    """Yield the topics, one line each."""
    topics = {**TOPICS, SCHEMA: SUMMARY}
    width = max(map(len, topics))
    yield "Topics:"
    yield from (f"  {topic.ljust(width)}  {summary}" for topic, summary in topics.items())
    yield ""
    yield "`ckptfix help TOPIC` shows a topic; `ckptfix help COMMAND` shows the help of a command."


def _of_command(name: str) -> str:
    found = GROUP.get().get_command(click.get_current_context(), name)
    if found is None:
        from difflib import get_close_matches

        near = get_close_matches(name.lower().replace("_", "-"), [*TOPICS, SCHEMA, *ROWS.get()], n=3, cutoff=0.5)
        advice = f"Did you mean {' or '.join(near)}?" if near else "`ckptfix help` lists the topics."
        raise click.UsageError(f"No topic or command is called {name!r}. {advice}")
    with click.Context(found, parent=click.get_current_context().find_root(), info_name=name) as ctx:
        return found.get_help(ctx)


def plain(text: str) -> str:
    """Convert Markdown `text` for a terminal: code is indented instead of fenced, and links show only their text."""
    parts = re.split(r"^```.*\n", text, flags=re.MULTILINE)
    parts[::2] = [_CODE_OR_LINK.sub(lambda found: found["code"] or found["text"], part) for part in parts[::2]]
    parts[1::2] = [indent(part, "    ") for part in parts[1::2]]
    return "".join(parts)


_CODE_OR_LINK = re.compile(r"(?P<code>`[^`]*`)|\[(?P<text>[^\]]+)\]\([^)\s]*\)")
