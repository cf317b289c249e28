"""torch.distributed.checkpoint: a folder of what each rank wrote, and one file that says what is where.

::

    FOLDER/.metadata          a pickle: which tensor has which parts at which (file, offset, length); see `metadata`
    FOLDER/__0_0.distcp       what rank 0 wrote: torch archives end to end, one for each part or value; see `items`
    FOLDER/__1_0.distcp       ...

Megatron's ``torch_dist`` checkpoints are such folders, with common.pt and metadata.json beside.
Source: torch/distributed/checkpoint/filesystem.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ckptfix.checkpoint import Checkpoint, TensorEntry
from ckptfix.errors import CkptfixError
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.formats.base import Aspect, Format, plain_weights
from ckptfix.formats.dcp.edit import keeps_all, plan_edit
from ckptfix.formats.dcp.judge import judge
from ckptfix.formats.dcp.metadata import NAME as METADATA
from ckptfix.formats.dcp.planned import read_planned
from ckptfix.formats.dcp.read import NAME, read
from ckptfix.formats.dcp.write import plan_write, recode
from ckptfix.formats.in_place import as_planned
from ckptfix.io.source import open_source

STATES: frozenset[Aspect] = frozenset({"objects", "order"})


def score(path: str, head: bytes, size: int) -> int:
    """100 for a folder with a `.metadata` that is a pickle."""
    place = Path(path, METADATA)
    if not place.is_file():
        return 0
    try:
        with open_source(str(place)) as source:
            return 100 if source.read(0, min(source.size, 2))[:1] == b"\x80" else 0
    except CkptfixError:
        return 0


def refuses(entry: TensorEntry) -> str | None:
    """What is not dense has no chunks."""
    return None if entry.kind == "dense" else f"a {entry.kind} tensor"


def remarks(checkpoint: Checkpoint) -> Iterator[Finding]:
    """What is known of every folder."""
    message = "torch.load reads no folder; torch.distributed.checkpoint.load reads this one, into a model"
    yield found("dcp-folder", message, severity="info")


FORMAT = Format(
    name=NAME,
    title="a distributed checkpoint (DCP)",
    suffixes=(),
    states=STATES,
    score=score,
    read=read,
    judge=judge,
    weights=plain_weights,
    refuses=refuses,
    plan_edit=plan_edit,
    in_place=as_planned,
    plan_write=plan_write,
    folder=True,
    remarks=remarks,
    recode=recode,
    read_planned=read_planned,
    keeps_all=keeps_all,
)
