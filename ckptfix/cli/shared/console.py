"""Output of a command: results go to stdout, everything else to stderr.

If stdout carries the output file itself, results go to stderr too.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, TYPE_CHECKING

import click

from ckptfix.cli.shared.colors import SEVERITIES, Meaning, When, painted, wanted
from ckptfix.cli.shared.terminal_width import width_of, wrapped
from ckptfix.errors import printable
from ckptfix.hooks import Hook

if TYPE_CHECKING:
    from ckptfix.cli.shared.progress import Progress as Bar
    from ckptfix.findings.row import Finding
    from ckptfix.io.read import Progress

GROUP: Hook[click.Group] = Hook("commands")
"""The group of all commands, which is above this package and above each of its commands."""

COMPLETE = "_CKPTFIX_COMPLETE"
"""Environment variable in which the completion script of a shell passes its request."""

SCHEMA_VERSION = 1
"""Version of the ``--json`` output (``docs/schema.json``); it increases if a field goes or changes its meaning."""

_WORDS = {"info": "note", "warning": "warning", "error": "error"}

ALIKE = 3
"""Findings of one id that a terminal shows; a pipe gets all."""


class Console:
    """The two streams of one run.

    Attributes:
        command: the command that runs; None before it is known.
        json: stdout gets one JSON object and nothing else; with several inputs, one object per line.
        quiet: no results in text, no notes, no progress; warnings and errors still show.
        silent: nothing is shown at all, because another process shows it.
        aside: stdout carries the output itself, so results go to stderr too.
        streams: files that replace a stream -> the name to show for them.
        record: outputs keep a record of the command line `arguments`.
        row: the row of this input in the command's list of several, if it has its own.
        color: when to paint text; JSON is never painted.
    """

    def __init__(self) -> None:
        self.command: str | None = None
        self.json = False
        self.quiet = False
        self.silent = False
        self.aside = False
        self.record = False
        self.arguments: Sequence[str] = ()
        self.streams: dict[str, str] = {}
        self.row: tuple[str, ...] | None = None
        self._bar: Bar | None = None
        self.color: When = "auto"

    def say(self, text: str = "", meaning: Meaning | None = None, label: int | None = None) -> None:
        """Print a line of the result; it, or its first `label` characters, in the color of `meaning`."""
        if not self.json and not self.quiet:
            self._print(text, self._out, meaning, label)

    def data(self, text: str) -> None:
        """Print whole lines for another program, in UTF-8 for any locale; escape them for a terminal."""
        if is_terminal(sys.stdout):
            self._print(text.removesuffix("\n"), sys.stdout)
        elif not self.silent:
            click.echo(text.encode() if hasattr(sys.stdout, "buffer") else text, nl=False)

    def done(self, lines: Sequence[str], details: Sequence[str] = ()) -> None:
        """Print what was done, in sentences, and then more detailed lines."""
        for line in (*lines, *details):
            self.prose(line)

    def _print(
        self, text: str, stream: IO[str], meaning: Meaning | None = None, label: int | None = None
    ) -> None:
        if self.silent:
            return
        if self._bar is not None:
            self._bar.clear()
        for name, shown in self.streams.items():
            text = text.replace(name, shown)
        if is_terminal(stream):
            text = for_terminal(text)
        color = wanted(self.color, terminal=is_terminal(stream))
        click.echo(painted(text, meaning, label) if color else text, err=stream is sys.stderr, color=color)

    @property
    def _out(self) -> IO[str]:
        return sys.stderr if self.aside else sys.stdout

    def prose(self, text: str, meaning: Meaning | None = None, label: int | None = None) -> None:
        """Print a line of prose; break it at spaces if the terminal is too narrow."""
        for line in wrapped(for_terminal(text), self.width):
            self.say(line, meaning, label)
            meaning = meaning if label is None else None

    def note(self, text: str, meaning: Meaning | None = None, label: int | None = None) -> None:
        """Print a line to stderr, beside the result."""
        for line in wrapped(for_terminal(text), width_of(sys.stderr)):
            self._print(line, sys.stderr, meaning, label)
            meaning = meaning if label is None else None

    def over_echo(self) -> None:
        """Return to the beginning of the line if a terminal has echoed ^C."""
        if not self.silent and is_terminal(sys.stderr):
            click.echo("\r", nl=False, err=True)

    @property
    def width(self) -> int:
        """The columns of the terminal that shows the result; 0 in a pipe, where nothing is cut or broken."""
        return width_of(self._out)

    def rows(self, asked: int | None, default: int) -> int:
        """Return the number of rows to show, 0 for all: `asked`, else `default` on a terminal, else all.

        A list that goes to a file or another program is data, and data is complete.
        """
        return asked if asked is not None else default if is_terminal(self._out) else 0

    def emit(self, document: Mapping[str, object], exit_code: int, *, line: bool = False) -> None:
        """Print the result as one JSON object, in ASCII; a number that JSON lacks becomes a string (``"NaN"``).

        This adds the fields that every object has: the schema version, the command, and the exit code.

        Args:
            line: the object is one of several, so it is on one line even on a terminal.
        """
        import json

        envelope = {"schema_version": SCHEMA_VERSION, "command": self.command, "exit_code": exit_code}
        whole = {**envelope, **document}
        indent = 2 if is_terminal(self._out) and not line else None
        try:
            text = json.dumps(whole, indent=indent, allow_nan=False)
        except ValueError:
            text = json.dumps(_finite(whole), indent=indent, allow_nan=False)
        # This is ASCII, but a control character all the same.
        self._print(text.replace("\x7f", "\\u007f"), self._out)

    def findings(self, findings: Iterable[Finding], *, most: int | None = None) -> None:
        """Print the findings of an operation, one line each, with the remedy below. JSON has them in the result.

        Args:
            most: limit on the findings shown, as a file can be crafted to have millions. None for all.
        """
        if self.json:
            return
        shown = [finding for finding in findings if not (self.quiet and finding.severity == "info")]
        counts: dict[tuple[str, str], int] = {}
        for finding in shown[:most]:
            cause = (finding.id, _WORDS[finding.severity])
            counts[cause] = counts.get(cause, 0) + 1
            if counts[cause] > ALIKE and is_terminal(sys.stderr):
                continue
            place = printable(finding.where)
            if finding.offset is not None:
                place = f"{place} @ {finding.offset:#x}".strip()
            word = _WORDS[finding.severity]
            text = ": ".join(part for part in (word, place, printable(finding.message)) if part)
            self.note(text, SEVERITIES[finding.severity], len(word))
            if finding.fix:
                self.note(f"  hint: {printable(finding.fix)}")
        for (id, word), count in counts.items():
            if count > ALIKE and is_terminal(sys.stderr):
                self.note(f"... {count - ALIKE:,} more {word}s like these: {id} (--json lists all)", "note")
        if most is not None and len(shown) > most:
            self.note(f"... {len(shown) - most:,} more findings (--json has all)")

    @contextlib.contextmanager
    def progress(self, at_end: str = "", phases: Sequence[str] = ("reading",)) -> Iterator[Progress | None]:
        """Yield a function (bytes done, total bytes) that draws on stderr; None if nobody would see it.

        Args:
            phases: what the command does, one word for each pass over the bytes.
            at_end: text to show when all bytes are done but the command still works.
        """
        if self.quiet or self.silent or not is_terminal(sys.stderr):
            yield None
            return
        from ckptfix.cli.shared.progress import Progress

        bar = self._bar = Progress(sys.stderr, at_end=at_end, phases=phases)
        try:
            yield bar
        finally:
            self._bar = None
            bar.clear()


class TextConsole(Console):
    """A console that collects its lines, all rows and whole names, for the text of a result."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def say(self, text: str = "", meaning: Meaning | None = None, label: int | None = None) -> None:
        self.lines.append(text)

    def note(self, text: str, meaning: Meaning | None = None, label: int | None = None) -> None:
        self.lines.append(text)

    @property
    def width(self) -> int:
        return 0

    def rows(self, asked: int | None, default: int) -> int:
        return asked or 0

    def __str__(self) -> str:
        return "\n".join(self.lines).strip("\n")


pass_console = click.make_pass_decorator(Console, ensure=True)


def is_terminal(stream: IO[str] | None) -> bool:
    """Return whether `stream` is a terminal."""
    try:
        return stream is not None and stream.isatty()
    except (AttributeError, ValueError):  # no stream, or a closed one
        return False


def for_terminal(text: str) -> str:
    """Escape `text` for a terminal. All terminal output passes through here, as names come from untrusted files.

    Control characters, escapes and characters that change the text direction become visible; only newlines and tabs
    remain. Sentences are escaped everywhere; a pipe gets raw data, such as a manifest or comma-separated values.
    """
    return "\n".join("\t".join(map(printable, line.split("\t"))) for line in text.split("\n"))


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
