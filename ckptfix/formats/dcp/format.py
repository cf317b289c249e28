"""torch.distributed.checkpoint: a folder of what each rank wrote, and one file that says what is where.

::

    FOLDER/.metadata          a pickle: which tensor has which parts at which (file, offset, length); see `metadata`
    FOLDER/__0_0.distcp       what rank 0 wrote: torch archives end to end, one for each part or value; see `items`
    FOLDER/__1_0.distcp       ...

Megatron's ``torch_dist`` checkpoints are such folders, with common.pt and metadata.json beside.
Source: torch/distributed/checkpoint/filesystem.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ckptfix.checkpoint import Checkpoint, Plan, TensorEntry
from ckptfix.errors import CkptfixError, Unsupported
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.formats.base import Aspect, Format, plain_weights
from ckptfix.formats.dcp import ranks
from ckptfix.formats.dcp.edit import keeps_all, plan_edit, refuse_edit
from ckptfix.formats.dcp.judge import judge, skim
from ckptfix.formats.dcp.metadata import NAME as METADATA
from ckptfix.formats.dcp.planned import read_planned
from ckptfix.formats.dcp.read import IMAGES, NAME, RANKS, read
from ckptfix.formats.dcp.write import plan_write, recode, sized, sized_recode
from ckptfix.formats.in_place import as_planned
from ckptfix.io.source import is_local, open_source
from ckptfix.urls import as_path

STATES: frozenset[Aspect] = frozenset({"objects", "order"})


def score(path: str, head: bytes, size: int) -> int:
    """100 for a folder with a `.metadata` that is a pickle, or with one of each rank."""
    place = as_path(path, METADATA)
    if not place.is_file():
        own = ranks.names(path) if not head and not size and is_local(path) else {}
        if not own:
            return 0
        place = place.with_name(own[min(own)])
    try:
        with open_source(str(place)) as source:
            return 100 if source.read(0, min(source.size, 2))[:1] == b"\x80" else 0
    except CkptfixError:
        return 0


def never(path: str, head: bytes, size: int) -> int:
    """The score of a kind that is told apart when it is read."""
    return 0


def not_written(entries: Sequence[TensorEntry], dest: str, *, metadata: Mapping[str, str] | None = None) -> Plan:
    """Raises Unsupported: this kind is only read."""
    raise Unsupported("a distributed checkpoint is written with one .metadata", path=dest, hint="--to dcp")


def refuses(entry: TensorEntry) -> str | None:
    """What is not dense has no chunks."""
    return None if entry.kind == "dense" else f"a {entry.kind} tensor"


READERS = {
    NAME: "torch.distributed.checkpoint.load reads this one, into a model",
    RANKS: "torch.distributed.checkpoint.load reads this one, on as many ranks; --to dcp makes one of all",
    IMAGES: "no reader of torch reads this one back; ckptfix does, and --to dcp makes one of it that torch reads",
}
"""What reads a folder, by its format."""


def remarks(checkpoint: Checkpoint) -> Iterator[Finding]:
    """What is known of every folder."""
    yield found("dcp-folder", f"torch.load reads no folder; {READERS[checkpoint.format]}", severity="info")


FORMAT = Format(
    name=NAME,
    title="a distributed checkpoint (DCP)",
    suffixes=(),
    states=STATES,
    score=score,
    read=read,
    judge=judge,
    skim=("metadata (and no items)", skim),
    weights=plain_weights,
    refuses=refuses,
    plan_edit=plan_edit,
    in_place=as_planned,
    plan_write=plan_write,
    folder=True,
    remarks=remarks,
    sized=sized,
    recode=recode,
    sized_recode=sized_recode,
    read_planned=read_planned,
    keeps_all=keeps_all,
)

RANKS_FORMAT = replace(
    FORMAT,
    name=RANKS,
    title="a distributed checkpoint (DCP) with metadata of each rank",
    score=never,
    plan_edit=refuse_edit,
    plan_write=not_written,
    edits=False,
    writes=False,
    in_place=None,
    sized=None,
    recode=None,
    sized_recode=None,
    read_planned=None,
    keeps_all=None,
)
"""``save(..., use_collectives=False)``."""

IMAGES_FORMAT = replace(RANKS_FORMAT, name=IMAGES, title="a distributed checkpoint (DCP) of safetensors files")
"""``FileSystemWriter(..., serialization_format=SAFETENSORS)``."""
