"""A checkpoint as the loaders take it: its pickle is what was written."""

from __future__ import annotations

import os

from ckptfix.checkpoint import Checkpoint
from ckptfix.commands import quoted
from ckptfix.errors import DamagedFile
from ckptfix.formats import open_checkpoint


def opened(path: str | os.PathLike[str]) -> Checkpoint:
    """`open_checkpoint`, and nothing of a pickle is believed that fails its checksum: names, shapes, views.

    Raises:
        DamagedFile: it does.
    """
    checkpoint = open_checkpoint(path)
    wrong = next((row for row in checkpoint.findings if row.id == "bad-crc"), None)
    if wrong is not None:
        hint = f"`ckptfix repair {quoted(checkpoint.path)} OUT` keeps what is intact"
        raise DamagedFile(wrong.message, path=checkpoint.path, where=wrong.where, offset=wrong.offset, hint=hint)
    return checkpoint
