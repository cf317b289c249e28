"""What a command says and where: results to stdout, everything else to stderr.

Where the output itself goes to stdout, results go to stderr too.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, TYPE_CHECKING

import click

from ckptfix.cli.shared.fit import width_of, wrapped
from ckptfix.cli.shared.paint import Meaning, When, painted, wanted
from ckptfix.errors import printable

if TYPE_CHECKING:
    from ckptfix.cli.shared.progress import Progress as Bar
    from ckptfix.findings.row import Finding
    from ckptfix.io.read import Progress

SCHEMA_VERSION = 1
"""Version of what ``--json`` prints (``docs/schema.json``): it goes up when a field goes or gets another meaning."""

_WORDS = {"info": "note", "warning": "warning", "error": "error"}


class Console:
    """The two streams of one run.

    Attributes:
        command: the command that runs; None before it is known.
        json: stdout gets one JSON object and nothing else; of several inputs, one on a line for each.
        quiet: no results in text, no notes, no progress; warnings and errors still show.
        silent: nothing at all is shown: another process shows it.
        aside: stdout is for the output itself, so that results go to stderr too.
        streams: files that stand in for a stream, and what is shown instead of their names.
        record: outputs keep a record of what was done, by the command line `arguments`.
        row: what a command says of this input in its list of several, where it has one of its own.
        color: where text is painted; JSON never is.
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
        """A line of the result, for a person; it, or its first `label` characters, in the colour of `meaning`."""
        if not self.json and not self.quiet:
            self._print(text, self._out, meaning, label)

    def data(self, text: str) -> None:
        """Text for another program, whole lines in UTF-8 whatever the locale is; on a terminal as `for_terminal`."""
        if is_terminal(sys.stdout):
            self._print(text.removesuffix("\n"), sys.stdout)
        elif not self.silent:
            click.echo(text.encode() if hasattr(sys.stdout, "buffer") else text, nl=False)

    def done(self, lines: Sequence[str], details: Sequence[str] = ()) -> None:
        """What was done, in sentences, and lines that say more of it."""
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
        """A line of the result that is text: on a terminal too narrow for it, it is broken at spaces."""
        for line in wrapped(for_terminal(text), self.width):
            self.say(line, meaning, label)
            meaning = meaning if label is None else None

    def note(self, text: str, meaning: Meaning | None = None, label: int | None = None) -> None:
        """A line beside the result."""
        for line in wrapped(for_terminal(text), width_of(sys.stderr)):
            self._print(line, sys.stderr, meaning, label)
            meaning = meaning if label is None else None

    def over_echo(self) -> None:
        """Go back to the beginning of the line, where a terminal has echoed ^C."""
        if not self.silent and is_terminal(sys.stderr):
            click.echo("\r", nl=False, err=True)

    @property
    def width(self) -> int:
        """The columns of the terminal that shows the result; 0 in a pipe, where nothing is cut or broken."""
        return width_of(self._out)

    def rows(self, asked: int | None, default: int) -> int:
        """How many rows of a list to show, 0 for all: `asked`, else `default` on a terminal, else all.

        A list that is written to a file or another program is data, and data is complete.
        """
        return asked if asked is not None else default if is_terminal(self._out) else 0

    def emit(self, document: Mapping[str, object], exit_code: int, *, line: bool = False) -> None:
        """The result as one JSON object, ASCII only; a number that JSON lacks is a string (``"NaN"``).

        What every object has is added here: the version of the schema, the command, and the exit code.

        Args:
            line: it is one of several, on a line of its own also on a terminal.
        """
        import json

        envelope = {"schema_version": SCHEMA_VERSION, "command": self.command, "exit_code": exit_code}
        whole = {**envelope, **document}
        indent = 2 if is_terminal(self._out) and not line else None
        try:
            text = json.dumps(whole, indent=indent, allow_nan=False)
        except ValueError:
            text = json.dumps(_finite(whole), indent=indent, allow_nan=False)
        # ASCII but for this one, which is a control character all the same.
        self._print(text.replace("\x7f", "\\u007f"), self._out)

    def findings(self, findings: Iterable[Finding], *, most: int | None = None) -> None:
        """What an operation noticed, a line each, and its remedy below. JSON carries them in the result.

        Args:
            most: how many are shown; a file could be made to have millions. None for all.
        """
        if self.json:
            return
        shown = [finding for finding in findings if not (self.quiet and finding.severity == "info")]
        for finding in shown[:most]:
            place = printable(finding.where)
            if finding.offset is not None:
                place = f"{place} @ {finding.offset:#x}".strip()
            word = _WORDS[finding.severity]
            text = ": ".join(part for part in (word, place, printable(finding.message)) if part)
            self.note(text, "damage" if finding.severity == "error" else None, len(word))
            if finding.fix:
                self.note(f"  hint: {printable(finding.fix)}")
        if most is not None and len(shown) > most:
            self.note(f"... {len(shown) - most:,} more findings (--json has all)")

    @contextlib.contextmanager
    def progress(self, at_end: str = "") -> Iterator[Progress | None]:
        """A callable (bytes done, bytes in all) that draws on stderr; None where it would not be seen.

        Args:
            at_end: shown when all bytes are done and the command still works on.
        """
        if self.quiet or self.silent or not is_terminal(sys.stderr):
            yield None
            return
        from ckptfix.cli.shared.progress import Progress

        bar = self._bar = Progress(sys.stderr, at_end=at_end)
        try:
            yield bar
        finally:
            self._bar = None
            bar.clear()


class Lines(Console):
    """A console that keeps what is said, all rows and whole names, for the text of a result."""

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
    """Whether a person watches `stream`."""
    try:
        return stream is not None and stream.isatty()
    except (AttributeError, ValueError):  # no stream at all, or a closed one
        return False


def for_terminal(text: str) -> str:
    """`text` for a terminal: all that goes to one passes through here. Names in it are those of a stranger's file.

    Control characters, escapes and what turns the direction of text are made visible; only the ends of lines and tabs
    remain. So are sentences everywhere; a pipe gets data as it is, such as a manifest or comma-separated values.
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
