"""The one place where an error or a signal becomes an exit code.

0 done, same or clean; 1 differences or findings; 2 trouble or wrong usage; 3 done with named losses; 128+n a signal.
After 2 and 128+n the output is unchanged, unless a line reports that it is complete.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import StringIO, TextIOWrapper
from types import FrameType
from typing import Any

import click

from ckptfix import platform
from ckptfix.cli.shared.console import Console
from ckptfix.errors import CkptfixError, NoSuchFile, printable
from ckptfix.io.write_log import recorded
from ckptfix.platform import Stopped
from ckptfix.urls import is_url

TROUBLE = 2
DEBUG = "CKPTFIX_DEBUG"
"""Environment variable: if it is 1, errors show their traceback."""


def run(invoke: Callable[[], object], console: Console, arguments: Sequence[str]) -> int:
    """Call `invoke`, report what went wrong, and return the exit code.

    Args:
        invoke: returns an exit code, or raises.
        arguments: the command line, to find --json even if the line cannot be parsed.
    """
    _tolerate_any_text()
    with recorded() as written:
        return _ended(invoke, console, arguments, written)


def _ended(invoke: Callable[[], object], console: Console, arguments: Sequence[str], written: Sequence[str]) -> int:
    try:
        with signals_raise():
            try:
                code = invoke()
                _flush()
                return code if isinstance(code, int) else 0
            except click.exceptions.Exit as done:
                return done.exit_code
            except Exception as error:
                if os.environ.get(DEBUG) == "1":
                    import traceback

                    traceback.print_exc()
                return _report(error, console, arguments, written)
    except Stopped as stopped:
        console.over_echo()
        console.note(f"stopped by {signal.Signals(stopped.number).name}")
        _tell(console, written)
        return 128 + stopped.number
    finally:
        _settle()


def _tell(console: Console, written: Sequence[str]) -> None:
    for line in written:
        console.note(printable(line))


def _report(error: Exception, console: Console, arguments: Sequence[str], written: Sequence[str]) -> int:
    if isinstance(error, BrokenPipeError):
        _tell(console, written)
        return 128 + platform.SIGPIPE
    document = describe(error)
    if isinstance(error, click.ClickException):
        _report_usage(error, console, document)
    else:
        what, *more = said(error, document)
        console.note(what, "damage")
        for line in more:
            console.note(line)
    _tell(console, written)
    if written:
        document["written"] = [*written]
    if console.json or "--json" in arguments:
        with contextlib.suppress(OSError):
            console.emit(failure(document), TROUBLE)
            _flush()
    return TROUBLE


def _report_usage(error: click.ClickException, console: Console, document: dict[str, Any]) -> None:
    """Report an error of the command line in plain words, with an example, and put the words into `document`."""
    from ckptfix.cli.shared.wrong_words import advice, reworded

    more, example = advice(error, console.command) if isinstance(error, click.UsageError) else ("", None)
    document["message"] = reworded(document["message"]) + more
    text = StringIO()
    error.show(text)
    for line in (reworded(text.getvalue().rstrip()) + more).splitlines():
        console.note(line, "damage" if line.startswith("Error: ") else None, len("Error"))
    if example is not None:
        console.note(f"Example: {example}")


def said(error: Exception, document: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines for an error: place and message, its list, its hint. `document` is its `describe`."""
    place = "" if isinstance(error, CkptfixError) or not document["path"] else f"{printable(document['path'])}: "
    yield place + (str(error) if isinstance(error, CkptfixError) else printable(document["message"]))
    for line in document.get("lines", ()):
        yield f"  {printable(line)}"
    if document["hint"]:
        yield f"hint: {printable(document['hint'])}"


def failure(document: Mapping[str, Any], path: str | None = None) -> dict[str, Any]:
    """Return the fields that ``--json`` prints for an error, instead of a result.

    Args:
        document: the error, from `describe`.
        path: the input that failed; by default, the file that the error is about.
    """
    return {"path": path if path is not None else document["path"], "error": document}


def describe(error: Exception) -> dict[str, Any]:
    """Return the fields of an error: type, message, path, where, offset, hint, and those that its class adds."""
    fields: dict[str, Any] = {
        "type": type(error).__name__, "message": "", "path": None, "where": None, "offset": None, "hint": None
    }  # fmt: skip
    match error:
        case CkptfixError():
            fields |= {name: value for name, value in vars(error).items() if not name.startswith("_")}
            fields["hint"] = error.shell_hint
            if isinstance(error, NoSuchFile) and error.path and not error.shell_hint and not is_url(error.path):
                from ckptfix.cli.shared.wrong_words import near_names

                near = near_names(error.path)
                fields["hint"] = f"did you mean {' or '.join(near)}?" if near else None
        case click.ClickException():
            fields["message"] = error.format_message()
        case OSError():
            path = None if error.filename is None else os.fsdecode(error.filename)
            if isinstance(error, FileNotFoundError) and path is not None:
                return describe(NoSuchFile(path))
            fields["message"] = error.strerror or str(error) or type(error).__name__
            fields["path"] = path
        case MemoryError():
            fields["message"] = "not enough memory"
        case RuntimeError(args=("can't allocate lock" | "can't start new thread", *_)):
            fields["message"] = "not enough memory"
        case RecursionError():
            fields["message"] = "nested too deeply"
        case _:
            fields["message"] = f"a bug in ckptfix: {type(error).__name__}: {error}"
            fields["hint"] = f"please report it, with the output of {DEBUG}=1"
    return fields


@contextlib.contextmanager
def signals_raise() -> Iterator[None]:
    """Make SIGINT, SIGTERM and SIGHUP raise `Stopped` in the main thread, once: a second must not interrupt cleanup.

    Signals that were ignored at the start (nohup, a background job) stay ignored.
    """
    stopped = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        if not stopped:
            stopped = True
            raise Stopped(number)

    def forget() -> None:
        nonlocal stopped
        stopped = False

    before = {}
    with contextlib.suppress(ValueError):  # only the main thread can handle signals
        for number in platform.STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, stop)
    try:
        with platform.repeated_signals(forget):
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _tolerate_any_text() -> None:
    """Escape names that stdout's encoding lacks: under LANG=C, and for lone surrogates in paths."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _flush() -> None:
    if sys.stdout is not None:
        sys.stdout.flush()


def _settle() -> None:
    """Clear stdout's buffer, so that the interpreter cannot fail to flush it at exit, with a traceback."""
    try:
        _flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, sys.stdout.fileno())
            os.close(null)
