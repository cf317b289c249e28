"""Opening a checkpoint for the loaders: damaged pickles are refused before anything in them is used."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from ckptfix.arguments import refuse_other_types
from ckptfix.checkpoint import Checkpoint
from ckptfix.commands import quoted
from ckptfix.errors import DamagedFile, WrongType
from ckptfix.formats import open_checkpoint
from ckptfix.io.source import blames_changes, shares_open_files
from ckptfix.pickles.collector import collector_paused

Call = TypeVar("Call", bound=Callable[..., Any])


def opens_once(call: Call) -> Call:
    """Wrap `call`: check the types of its arguments, open each file once, and blame changed files in errors.

    The cyclic collector is paused meanwhile. The frame that this adds belongs to the loaders, so `caller` finds the
    right stack level for warnings.
    """

    @wraps(call)
    def inner(*args: Any, **kwargs: Any) -> Any:
        refuse_other_types(call, args, kwargs)
        with shares_open_files(), blames_changes(), collector_paused():
            return call(*args, **kwargs)

    return cast(Call, inner)


def refuse_swapped_arguments(first: object, path: object, what: str) -> None:
    """Refuse (path, model) where (model, path) is expected.

    Raises:
        WrongType: the arguments are swapped.
    """
    names = (str, bytes, os.PathLike)
    if isinstance(first, names) and not isinstance(path, names):
        raise WrongType(f"the first argument must be the {what} and the second the path, but they are swapped")


def opened(path: str | os.PathLike[str]) -> Checkpoint:
    """Open the checkpoint at `path`, and refuse it if its pickle fails the checksum.

    A damaged pickle may have wrong keys, shapes and views, so nothing in it is used.

    Raises:
        DamagedFile: the pickle fails its checksum.
    """
    checkpoint = open_checkpoint(path)
    wrong = next((row for row in checkpoint.findings if row.id == "bad-crc"), None)
    if wrong is not None:
        hint = f"`ckptfix repair {quoted(checkpoint.path)} OUT` keeps what is intact"
        raise DamagedFile(wrong.message, path=checkpoint.path, where=wrong.where, offset=wrong.offset, hint=hint)
    return checkpoint
