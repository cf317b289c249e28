"""``ckptfix.save``: ``torch.save`` whose file is complete or absent, whatever happens while it is written."""

from __future__ import annotations

import os
from contextlib import suppress
from tempfile import mkstemp
from typing import Any

from ckptfix.errors import CkptfixError, NoSuchFolder, Refused, WriteFailed, WrongType, file_name
from ckptfix.extras import need_torch
from ckptfix.io.durable import adopt_mode, sync_folder
from ckptfix.io.output import TEMP_SUFFIX
from ckptfix.io.source import forget, is_local
from ckptfix.urls import as_path

SAFETENSORS = ".safetensors"


def save(state: Any, path: str | os.PathLike[str], *, overwrite: bool = True) -> None:
    """Write `state` to `path` in one step: a reader sees the old file or the new one, and a crash leaves one of them.

    The file is written beside `path`, synced and renamed. It is a torch zip, which ``torch.load(weights_only=True)``
    reads if `state` has only tensors and plain values, or for ``*.safetensors`` a safetensors file.

    Args:
        state: anything that ``torch.save`` takes; for safetensors a state dict of tensors, none of them shared.
        overwrite: replace an existing file, as ``torch.save`` does.

    Raises:
        WriteFailed: the disk is full, or the file cannot be written; `path` is unchanged.
        Refused: `path` exists and `overwrite` is False, or safetensors cannot hold `state`.
        WrongType: the arguments are swapped.
        MissingExtra: torch is not installed.
    """
    need_torch("save")
    if isinstance(state, str | os.PathLike) and not isinstance(path, str | os.PathLike):
        raise WrongType("the first argument must be the state and the second the path, but they are swapped")
    name = file_name(path)
    if not is_local(name):
        raise Refused("save writes local files only", path=name, hint="save it here, then copy it")
    target = os.path.realpath(name)
    folder, last = os.path.split(target)
    if not as_path(folder).is_dir():
        raise NoSuchFolder("the folder does not exist", path=folder)
    if not overwrite and os.path.lexists(target):
        raise Refused("exists", path=name, hint="use another name, or overwrite=True")
    number, temporary = mkstemp(prefix=f".{last}.", suffix=TEMP_SUFFIX, dir=folder)
    try:
        with os.fdopen(number, "wb") as stream:
            _write(state, temporary, stream, safetensors=last.endswith(SAFETENSORS))
            stream.flush()
            adopt_mode(stream.fileno(), os.stat(target) if os.path.lexists(target) else None)  # noqa: PTH116
            os.fsync(stream.fileno())
        as_path(temporary).replace(target)
    except BaseException as error:
        with suppress(OSError):
            as_path(temporary).unlink()
        if isinstance(error, OSError) and not isinstance(error, CkptfixError):
            raise WriteFailed(error.strerror or str(error), path=name, number=error.errno) from error
        raise
    forget(target)
    sync_folder(folder)


def _write(state: Any, name: str, stream: Any, *, safetensors: bool) -> None:
    import torch

    if not safetensors:
        torch.save(state, stream)
        return
    from safetensors.torch import save_file

    try:
        save_file({key: value.contiguous() for key, value in dict(state).items()}, name, metadata={"format": "pt"})
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        hint = "save it as .pth, and convert it with `ckptfix convert`, which unties tensors and lists what is left"
        raise Refused(f"safetensors cannot hold it: {str(error).splitlines()[0]}", path=name, hint=hint) from error
