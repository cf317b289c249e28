"""Every verb with its options, and every loader, on one file: what came out of each.

The commands run in this process, so that thousands of files can be tried; the loaders need torch, which is imported
when they are first used.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import click
from file_commands import ANY, IN, OTHER, OUT, lines
from property.small_files import SMALL

from ckptfix.cli import commands
from ckptfix.cli.shared import exits
from ckptfix.errors import CkptfixError

COMMANDS = lines(ANY)
"""Name -> arguments; `IN` is the file, `OTHER` a good one."""


class Outcome(NamedTuple):
    """What a verb or a loader did: its exit code (None for a loader), its output, and a failure, which none may have.

    Attributes:
        failure: the end of a traceback of an error that is not ours; empty if there was none.
        errors: the classes of the errors that a command reported.
    """

    name: str
    code: int | None
    stdout: str
    stderr: str
    failure: str
    errors: tuple[str, ...] = ()


def failure_of(error: BaseException) -> str:
    """The end of the traceback of `error` as text."""
    return "".join(traceback.format_exception(error)[-4:])


def run_command(arguments: tuple[str, ...], name: str = "") -> Outcome:
    """``ckptfix ARGUMENTS`` in this process."""
    raw: list[BaseException] = []
    errors: list[str] = []
    report = exits.describe

    def describe(error: Exception) -> dict[str, Any]:
        errors.append(type(error).__name__)
        if not isinstance(error, CkptfixError | click.ClickException):
            raw.append(error)
        return report(error)

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), patch.object(exits, "describe", describe):
        try:
            code = commands.main(list(arguments), standalone_mode=False)
        except Exception as error:
            raw.append(error)
            code = None
    failure = failure_of(raw[0]) if raw else ""
    if not failure and (code not in (0, 1, 2, 3) or "bug in ckptfix" in err.getvalue()):
        failure = f"exit code {code}: {err.getvalue()[-500:]}"
    return Outcome(name or " ".join(arguments), code, out.getvalue(), err.getvalue(), failure, tuple(errors))


def run_commands(path: Path, names: Sequence[str] = tuple(COMMANDS)) -> Iterator[Outcome]:
    """What each command says about `path`; outputs are written beside it, and removed."""
    out, other = path.with_name("verbs-out"), path.with_name("verbs-other")
    if not other.exists():
        other.write_bytes(SMALL["zip"])
    places = {IN: str(path), OUT: str(out), OTHER: str(other)}
    for name in names:
        try:
            yield run_command(tuple(places.get(part, part) for part in COMMANDS[name]), name)
        finally:
            if out.is_dir():
                shutil.rmtree(out)
            out.unlink(missing_ok=True)


def load_state_dict(path: Path) -> None:
    import ckptfix

    for key, value in ckptfix.load_state_dict(path, map_location="cpu").items():
        assert isinstance(key, str) and value is not None


def load_checkpoint(path: Path) -> None:
    import ckptfix

    ckptfix.load_checkpoint(path, map_location="cpu")


def load_into(path: Path) -> None:
    import torch

    import ckptfix

    model = torch.nn.Sequential(torch.nn.Linear(2, 1))
    before = [value.clone() for value in model.state_dict().values()]
    try:
        ckptfix.load_into(model, path, strict=False)
    except CkptfixError:
        after = model.state_dict().values()
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True)), "a refusal changed it"
        raise


def load_optimizer(path: Path) -> None:
    import torch

    import ckptfix

    model = torch.nn.Linear(2, 1)
    ckptfix.load_optimizer(torch.optim.Adam(model.parameters()), path, model=model)


LOADERS: dict[str, Callable[[Path], None]] = {
    "load_state_dict": load_state_dict,
    "load_checkpoint": load_checkpoint,
    "load_into": load_into,
    "load_optimizer": load_optimizer,
}


def run_loaders(path: Path, names: Sequence[str] = tuple(LOADERS)) -> Iterator[Outcome]:
    """What each loader says about `path`."""
    for name in names:
        said = failure = ""
        with warnings.catch_warnings(), open(os.devnull, "w") as null, contextlib.redirect_stderr(null):
            warnings.simplefilter("ignore")
            try:
                LOADERS[name](path)
            except CkptfixError as error:
                said = str(error)
            except Exception as error:
                failure = failure_of(error)
        yield Outcome(name, None, "", said, failure)
