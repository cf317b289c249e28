"""ckptfix help."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from textwrap import indent
from typing import TYPE_CHECKING

import click

from ckptfix.cli.shared.common import reads
from ckptfix.cli.shared.console import GROUP, Console, is_terminal
from ckptfix.cli.shared.help_text import FULL
from ckptfix.cli.shared.operands import CommonOption
from ckptfix.command_table import COMMANDS
from ckptfix.docs import SCHEMA, SUMMARY, TOPICS, page, schema

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


def _complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    summaries = {**TOPICS, SCHEMA: SUMMARY, **{name: row.summary for name, row in COMMANDS.items()}}
    return [CompletionItem(name, help=text) for name, text in summaries.items() if name.startswith(incomplete)]


@reads(
    "help",
    click.Argument(
        ["topics"], metavar="[TOPIC | COMMAND | WORDS]...", nargs=-1, required=False, shell_complete=_complete
    ),
    output=False,
)
def command(console: Console, *, topics: tuple[str, ...]) -> int:
    """Show pages of the documentation, the help of commands, or what is known about other words.

    Without an argument, the topics are listed. A terminal shows pages in its pager; a pipe gets plain text. Other words
    are searched in recipes, commands and findings.
    """
    for line in () if topics else overview():
        console.prose(line)
    known = {*TOPICS, SCHEMA, OPTIONS, *COMMANDS}
    if len(topics) == 2 and topics[0] in COMMANDS and topics[1] in getattr(_command(topics[0]), "commands", ()):
        console.say(_of_command(*topics))
    elif topics and not known.issuperset(topics):
        _search(console, topics)
    else:
        for topic in topics:
            _show(console, topic)
    return 0


OPTIONS = "options"
"""Topic of the options that many commands have."""


def _search(console: Console, words: tuple[str, ...]) -> None:
    """Print what is known about these words. Raise UsageError if it is nothing, or one is a misspelled topic."""
    from difflib import get_close_matches

    if len(words) == 1:
        near = get_close_matches(words[0].lower().replace("_", "-"), [*TOPICS, SCHEMA, *COMMANDS], n=3, cutoff=0.8)
        if near:
            raise click.UsageError(f"No topic or command is called {words[0]!r}. Did you mean {' or '.join(near)}?")
    from ckptfix.cli.shared.help_search import search

    hits = search(words)
    if not hits:
        raise click.UsageError(f"Nothing is known about {' '.join(words)!r}. `ckptfix help` lists the topics.")
    kind = ""
    for hit in hits:
        if hit.kind != kind:
            console.say(f"{'' if not kind else chr(10)}{hit.kind}:")
            kind = hit.kind
        console.prose(f"  {hit.title}")
        console.say(f"      {hit.line}", "fix")


def _show(console: Console, topic: str) -> None:
    if topic == SCHEMA:
        click.echo(schema(), nl=False)
    elif topic in TOPICS:
        text = plain(page(topic))
        if is_terminal(sys.stdout):
            click.echo_via_pager(text)
        else:
            click.echo(text, nl=False)
    elif topic == OPTIONS:
        console.say(_common_options())
    else:
        console.say(_of_command(topic))


def _common_options() -> str:
    """Return the options that many commands have, with their texts; each once."""
    group, ctx = GROUP.get(), click.get_current_context()
    rows: dict[str, tuple[str, str]] = {}
    for name in COMMANDS:
        command = group.get_command(ctx, name)
        assert command is not None
        for param in command.params:
            record = param.get_help_record(ctx) if isinstance(param, CommonOption) else None
            if record is not None:
                rows.setdefault(param.opts[-1], record)
    formatter = ctx.make_formatter()
    with formatter.section("Options of many commands"):
        formatter.write_dl(list(rows.values()))
    return formatter.getvalue().rstrip()


def overview() -> Iterator[str]:
    """Yield the topics, one line each."""
    topics = {**TOPICS, SCHEMA: SUMMARY}
    width = max(map(len, topics))
    yield "Topics:"
    yield from (f"  {topic.ljust(width)}  {summary}" for topic, summary in topics.items())
    yield ""
    yield "`ckptfix help TOPIC` shows a topic, `ckptfix help COMMAND` explains a command, `ckptfix help options` the"
    yield "options of many commands. Other words are searched: `ckptfix help resume`."


def _command(name: str) -> click.Command:
    found = GROUP.get().get_command(click.get_current_context(), name)
    assert found is not None
    return found


def _of_command(name: str, inside: str | None = None) -> str:
    """Return the whole help of a command, or of a command `inside` a group, with the text of every option."""
    found = _command(name)
    with click.Context(found, parent=click.get_current_context().find_root(), info_name=name) as ctx:
        ctx.meta[FULL] = True
        if inside is None:
            return found.get_help(ctx)
        assert isinstance(found, click.Group)
        with click.Context(found.commands[inside], parent=ctx, info_name=inside) as below:
            return below.command.get_help(below)


def plain(text: str) -> str:
    """Convert Markdown `text` for a terminal: code is indented instead of fenced, and links show only their text."""
    parts = re.split(r"^```.*\n", text, flags=re.MULTILINE)
    parts[::2] = [_CODE_OR_LINK.sub(lambda found: found["code"] or found["text"], part) for part in parts[::2]]
    parts[1::2] = [indent(part, "    ") for part in parts[1::2]]
    return "".join(parts)


_CODE_OR_LINK = re.compile(r"(?P<code>`[^`]*`)|\[(?P<text>[^\]]+)\]\([^)\s]*\)")
