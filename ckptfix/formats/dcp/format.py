"""torch.distributed.checkpoint: a folder of files from each rank, and one file that lists their content.

::

    FOLDER/.metadata          a pickle: the parts of each tensor, and their (file, offset, length); see `metadata`
    FOLDER/__0_0.distcp       written by rank 0: torch archives end to end, one for each part or value; see `items`
    FOLDER/__1_0.distcp       ...

Megatron's ``torch_dist`` checkpoints are such folders, with common.pt and metadata.json in addition. Source:
torch/distributed/checkpoint/filesystem.py.
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
from ckptfix.formats.dcp.edit import in_place, keeps_all, plan_edit, refuse_edit
from ckptfix.formats.dcp.judge import validate, validate_headers
from ckptfix.formats.dcp.metadata import NAME as METADATA
from ckptfix.formats.dcp.planned import read_planned
from ckptfix.formats.dcp.read import IMAGES, NAME, RANKS, read
from ckptfix.formats.dcp.repair import repair
from ckptfix.formats.dcp.write import plan_write, recode, sized, sized_recode
from ckptfix.io.source import is_file, is_local, open_source
from ckptfix.urls import as_path

STATES: frozenset[Aspect] = frozenset({"objects", "order"})


def score(path: str, head: bytes, size: int) -> int:
    """Return 100 for a folder with a `.metadata` that is a pickle, or with one for each rank."""
    place = as_path(path, METADATA)
    if not is_file(place):
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
    """Return 0: this kind is recognized only when it is read."""
    return 0


def not_written(entries: Sequence[TensorEntry], dest: str, *, metadata: Mapping[str, str] | None = None) -> Plan:
    """Raise Unsupported: this kind is read-only."""
    raise Unsupported(
        "ckptfix writes a distributed checkpoint only with a single .metadata", path=dest, hint="--to dcp"
    )


def refuses(entry: TensorEntry) -> str | None:
    """Return the reason why a tensor cannot be stored: only dense tensors have chunks."""
    return None if entry.kind == "dense" else f"a {entry.kind} tensor"


READERS = {
    NAME: "torch.distributed.checkpoint.load reads this one, into a model",
    RANKS: "torch.distributed.checkpoint.load reads this one, on the same number of ranks; --to dcp joins all ranks",
    IMAGES: "torch has no reader for this one; ckptfix has, and --to dcp writes a folder that torch reads",
}
"""The readers of a folder, by its format."""


def notes(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield findings that apply to every folder."""
    yield found("dcp-folder", f"torch.load cannot read a folder; {READERS[checkpoint.format]}", severity="info")


FORMAT = Format(
    name=NAME,
    title="a distributed checkpoint (DCP)",
    suffixes=(),
    states=STATES,
    score=score,
    read=read,
    validate=validate,
    validate_headers=("metadata (and no items)", validate_headers),
    weights=plain_weights,
    refuses=refuses,
    plan_edit=plan_edit,
    in_place=in_place,
    plan_write=plan_write,
    folder=True,
    notes=notes,
    sized=sized,
    recode=recode,
    sized_recode=sized_recode,
    read_planned=read_planned,
    keeps_all=keeps_all,
    repair=repair,
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
"""The format of ``save(..., use_collectives=False)``."""

IMAGES_FORMAT = replace(RANKS_FORMAT, name=IMAGES, title="a distributed checkpoint (DCP) of safetensors files")
"""The format of ``FileSystemWriter(..., serialization_format=SAFETENSORS)``."""
