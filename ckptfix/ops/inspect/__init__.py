"""``ckptfix.inspect``: what a checkpoint is and holds, from its headers alone."""

from __future__ import annotations

from ckptfix.errors import StrPath
from ckptfix.formats import open_checkpoint
from ckptfix.io.source import opened_once
from ckptfix.ops.inspect.describe import Inspection
from ckptfix.ops.inspect.describe import inspect as inspect_op
from ckptfix.pickles.collector import without_collections


@without_collections
@opened_once()
def inspect(path: StrPath) -> Inspection:
    """Describe the checkpoint at `path` from its headers."""
    return inspect_op(open_checkpoint(path))
