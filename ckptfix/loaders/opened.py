"""Opening a checkpoint for the loaders: damaged pickles are refused before anything in them is used."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any, TypeVar, cast

from ckptfix.arguments import refuse_other_types
from ckptfix.checkpoint import Checkpoint, NameSite, StateDict
from ckptfix.commands import quoted
from ckptfix.errors import DamagedFile, UnknownFormat, WrongType, file_name
from ckptfix.formats import open_checkpoint
from ckptfix.formats.torch.weights import Weights
from ckptfix.io.source import blames_changes, opened_once
from ckptfix.ops.extract.plan import read_program
from ckptfix.urls import as_path

Call = TypeVar("Call", bound=Callable[..., Any])


def opens_once(call: Call) -> Call:
    """Wrap `call`: check the types of its arguments, open each file once, and blame changed files in errors.

    The frame that this adds belongs to the loaders, so `caller` finds the right stack level for warnings.
    """

    @wraps(call)
    def inner(*args: Any, **kwargs: Any) -> Any:
        refuse_other_types(call, args, kwargs)
        with opened_once(), blames_changes():
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


def opened(path: str | os.PathLike[str], *, programs: bool = False) -> Checkpoint:
    """Open the checkpoint at `path`, and refuse it if its pickle fails the checksum.

    A damaged pickle may have wrong keys, shapes and views, so nothing in it is used.

    Args:
        programs: also open a TorchScript archive or an exported program, as a checkpoint with one state dict.

    Raises:
        DamagedFile: the pickle fails its checksum.
    """
    try:
        checkpoint = open_checkpoint(path)
    except UnknownFormat:
        weights = read_program(file_name(path)) if programs else None
        if weights is None:
            raise
        return _as_checkpoint(weights)
    wrong = next((row for row in checkpoint.findings if row.id == "bad-crc"), None)
    if wrong is not None:
        hint = f"`ckptfix repair {quoted(checkpoint.path)} OUT` keeps what is intact"
        raise DamagedFile(wrong.message, path=checkpoint.path, where=wrong.where, offset=wrong.offset, hint=hint)
    return checkpoint


def _as_checkpoint(weights: Weights) -> Checkpoint:
    """Return the state dict of a program as a checkpoint that holds nothing else."""
    names = tuple(entry.key for entry in weights.entries)
    return replace(
        weights.as_checkpoint(),
        size=as_path(weights.path).stat().st_size,
        sites=(NameSite("", "state_dict", names),),
        state_dicts=(StateDict("", len(names), 0),),
    )
