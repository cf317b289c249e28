"""A checkpoint as the loaders take it: its pickle is what was written."""

from __future__ import annotations

import os
import shlex

from ckptfix.checkpoint import Checkpoint
from ckptfix.errors import DamagedFile, WrongType
from ckptfix.formats import open_checkpoint


def refuse_swapped_arguments(first: object, path: object, what: str) -> None:
    """Refuse (path, model) where (model, path) is meant.

    Raises:
        WrongType: it is so.
    """
    names = (str, bytes, os.PathLike)
    if isinstance(first, names) and not isinstance(path, names):
        raise WrongType(f"the first argument is the {what}, the second the path; here they are the other way round")


def opened(path: str | os.PathLike[str]) -> Checkpoint:
    """`open_checkpoint`, and nothing of a pickle is believed that fails its checksum: names, shapes, views.

    Raises:
        DamagedFile: it does.
    """
    checkpoint = open_checkpoint(path)
    wrong = next((row for row in checkpoint.findings if row.id == "bad-crc"), None)
    if wrong is not None:
        hint = f"`ckptfix repair {shlex.quote(checkpoint.path)} OUT` keeps what is intact"
        raise DamagedFile(wrong.message, path=checkpoint.path, where=wrong.where, offset=wrong.offset, hint=hint)
    return checkpoint
