"""A checkpoint as the loaders take it: its pickle is what was written."""

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
    """`opened_once` and `blames_changes` around `call`, whose arguments have the right types.

    The frame that it adds is one of the loaders', as `warnings` needs it.
    """

    @wraps(call)
    def inner(*args: Any, **kwargs: Any) -> Any:
        refuse_other_types(call, args, kwargs)
        with opened_once(), blames_changes():
            return call(*args, **kwargs)

    return cast(Call, inner)


def refuse_swapped_arguments(first: object, path: object, what: str) -> None:
    """Refuse (path, model) where (model, path) is meant.

    Raises:
        WrongType: it is so.
    """
    names = (str, bytes, os.PathLike)
    if isinstance(first, names) and not isinstance(path, names):
        raise WrongType(f"the first argument is the {what}, the second the path; here they are the other way round")


def opened(path: str | os.PathLike[str], *, programs: bool = False) -> Checkpoint:
    """`open_checkpoint`, and nothing of a pickle is believed that fails its checksum: names, shapes, views.

    Args:
        programs: a TorchScript archive or an exported program is a checkpoint too, of one state dict.

    Raises:
        DamagedFile: it does.
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
    """The state dict of a program as a checkpoint that holds nothing else."""
    names = tuple(entry.key for entry in weights.entries)
    return replace(
        weights.as_checkpoint(),
        size=as_path(weights.path).stat().st_size,
        sites=(NameSite("", "state_dict", names),),
        state_dicts=(StateDict("", len(names), 0),),
    )
