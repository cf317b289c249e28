"""The format of DeepSpeed folders: read-only; outputs are one file."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from ckptfix.checkpoint import Checkpoint, Edit, Plan, TensorEntry
from ckptfix.checkpoint.address import is_inside
from ckptfix.checkpoint.byte_ranges import pieces_of
from ckptfix.commands import command
from ckptfix.errors import CkptfixError, Refused, Unsupported
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.formats.base import OF_OBJECTS, Format, SelectedWeights, plain_weights
from ckptfix.formats.deepspeed import find, read_save
from ckptfix.formats.folders.assembly import mapping, part
from ckptfix.formats.torch import zip as torch_zip
from ckptfix.formats.torch.common import all_findings, pickled_object
from ckptfix.formats.zero.object import COPY, MODULE, NAME, OPTIMIZER, root_rows
from ckptfix.formats.zero.read import judge_steps, ranks_of, read
from ckptfix.io.virtual_files import is_spliced
from ckptfix.words import plural, some


def score(path: str, head: bytes, size: int) -> int:
    """Return 90 for the folder of a save, or for a folder whose ``latest`` names one."""
    return 0 if head or size or find(path) is None else 90


def validate(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield findings of the reader, ranks with an optimizer at another step, and moments with damaged files."""
    yield from all_findings(checkpoint)
    for entry in checkpoint.entries if read_save(checkpoint.path).universal else ():
        data = entry.storage.data if entry.storage is not None and is_inside(entry.at, OPTIMIZER) else None
        try:
            _ = list(pieces_of(data)) if data is not None and is_spliced(data) else ()
        except CkptfixError as error:
            yield found("bad-tensor", error.message, where=entry.name)
    for path, message in judge_steps(checkpoint):
        yield found("other-save", message, where=path)


def notes(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Report the ranks whose files have nothing in them that shows their rank, and could have been exchanged."""
    ranks = ranks_of(checkpoint)
    left = [] if ranks is None else ranks.unverified()
    if left:
        numbers = some([str(rank) for rank in left])
        message = f"nothing in the files of {plural(len(left), 'rank')} shows which rank wrote each: {numbers}"
        yield found("ranks-unverified", message)


def select_weights(checkpoint: Checkpoint, weights: str | None, optimizer: bool) -> SelectedWeights:
    """Return the fp32 weights or the model's weights; with the optimizer, everything except the other weights.

    Raises:
        Refused: the folder does not have them.
    """
    rows = root_rows(pickled_object(checkpoint).graph.root)
    at = _chosen(checkpoint, rows, weights)
    if not optimizer:
        left = tuple(name for name in rows if name != at)
        return SelectedWeights(part(checkpoint, rows[at], _of(checkpoint, at)), at, left)
    if OPTIMIZER not in rows:
        raise Refused("the folder has no optimizer state", path=checkpoint.path, hint="leave out --optimizer")
    kept = {MODULE: rows[at]} | {name: node for name, node in rows.items() if name not in (MODULE, COPY)}
    left = tuple(name for name in (MODULE, COPY) if name in rows and name != at)
    return SelectedWeights(part(checkpoint, mapping(kept), checkpoint.findings), None, left)


def _chosen(checkpoint: Checkpoint, names: Collection[str], weights: str | None) -> str:
    dtype = checkpoint.traits.get("model dtype")
    if weights == "model" and dtype is not None and COPY not in names:
        message = f"no file has the model's weights in {dtype}: in stage 3, each rank has a part in memory"
        hint = "leave out --weights model for the fp32 weights, or save these with DeepSpeed's save_16bit_model"
        raise Refused(message, path=checkpoint.path, hint=hint)
    if weights == "fp32" and any(finding.id == "no-masters" for finding in checkpoint.findings):
        message = "the fp32 weights were in the optimizer states, and those files are missing"
        raise Refused(message, path=checkpoint.path, hint="use --weights model for the weights that are there")
    return COPY if weights == "model" and COPY in names else MODULE


def _of(checkpoint: Checkpoint, at: str) -> Sequence[Finding]:
    """Return the findings about the weights at `at`: faults of the ranks' files do not affect the model's copy."""
    return () if at == COPY else checkpoint.findings


def plan_edit(checkpoint: Checkpoint, edits: Sequence[Edit], dest: str) -> Plan:
    raise _read_only(checkpoint.path, dest)


def plan_write(entries: Sequence[TensorEntry], dest: str, *, metadata: Mapping[str, str] | None = None) -> Plan:
    raise _read_only("FOLDER", dest)


def _read_only(path: str, dest: str) -> CkptfixError:
    hint = f"`{command('convert', path, 'OUT.pth')}` writes its weights as one file; edit that file"
    return Unsupported("ckptfix reads DeepSpeed folders, but does not write them", path=dest, hint=hint)


FORMAT = Format(
    name=NAME,
    title="DeepSpeed folder",
    suffixes=(),
    states=OF_OBJECTS,
    score=score,
    read=read,
    validate=validate,
    weights=plain_weights,
    refuses=torch_zip.refuses,
    plan_edit=plan_edit,
    plan_write=plan_write,
    folder=True,
    notes=notes,
    edits=False,
    writes=False,
    select_weights=select_weights,
)
