"""Programs as checkpoints that are only read: the object is the state dict, and the code is left out.

A program holds no pickle of its state dict: TorchScript has one of the whole module, and a ``.pt2`` file describes its
tensors in JSON. The pickle of the state dict is therefore written in memory, as `extract` writes it, so that all code
that reads a checkpoint can read this one. The bytes of a tensor are a range of the program. If a program has no
parameters and no buffers, like a frozen module, its checkpoint is a dict of its constants, at ``constants``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from ckptfix.checkpoint import Checkpoint, Edit, Plan
from ckptfix.commands import command
from ckptfix.errors import Unsupported
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.formats.base import OF_OBJECTS, Format, plain_weights
from ckptfix.formats.programs import exported, torchscript
from ckptfix.formats.programs.torchscript import CONSTANTS, open_program
from ckptfix.formats.signs import Beginning
from ckptfix.formats.torch import common as torch_common
from ckptfix.formats.torch import emit as torch_emit
from ckptfix.formats.torch.readonly import common
from ckptfix.formats.torch.weights import Weights
from ckptfix.io.source import open_source
from ckptfix.pickles import Dict, Graph, parse

Reader = Callable[[str, str | None], Weights | None]
"""The type of `torchscript.read` and `exported.read`."""


def read(format: str, program: Reader, path: str) -> Checkpoint:
    """Return the weights of the program at `path`; see the contract in `base`.

    Raises:
        Unsupported: it is not a program, or holds several models.
        CkptfixError: raised by `program`.
    """
    weights = program(path, None)
    if weights is None:
        raise Unsupported("it is not a program that torch writes", path=path)
    if not weights.entries and CONSTANTS in weights.left:
        weights = program(path, CONSTANTS) or weights
    made = torch_emit.fresh(weights.entries, versions=weights.versions, calls=weights.calls)
    graph = parse(made.pickle, path=path, where="state dict")
    if weights.at:
        graph = _at(weights.at, graph, path)
    storages = common.FoundStorages()
    storages.data = {key: data for key, data, _ in made.storages}
    storages.sums = {key: crc32 for key, _, crc32 in made.storages}
    with open_source(path) as reader:
        size = reader.size
    checkpoint = common.checkpoint(path, format, size, graph, storages, {}, list(_findings(weights)), weights.byteorder)
    # The pickle that was written here says nothing about the file.
    return replace(checkpoint, traits={"storages": len(storages.data)})


def _at(key: str, graph: Graph, path: str) -> Graph:
    """Return the object of `graph` as the only value of a dict, under `key`."""
    root = Dict()
    root.items.append((key, graph.root))
    graph.root = root
    return common.in_terms_of_zip(graph, {}, path)


def _findings(weights: Weights) -> Iterator[Finding]:
    """Yield the findings of `extract` as those of reading: a tensor that was not taken cannot be read."""
    for finding in weights.findings:
        if finding.id == "not-taken":
            yield found("bad-tensor", finding.message, where=finding.where, fix="")
        else:
            yield finding
    if CONSTANTS in weights.left:
        message = f"its constants are not part of its state dict; `extract --at {CONSTANTS}` takes them"
        yield found("left-behind", message, where=CONSTANTS)


def refuse_edit(checkpoint: Checkpoint, edits: Sequence[Edit], dest: str) -> Plan:
    """Refuse an edit (`Format.plan_edit`): the code of a program names its weights.

    Raises:
        Unsupported: always.
    """
    way = command("extract", checkpoint.path, "OUT.pth", **({"at": CONSTANTS} if _is_frozen(checkpoint) else {}))
    raise common.not_edited(checkpoint, way)


def _is_frozen(checkpoint: Checkpoint) -> bool:
    return any(row.at == CONSTANTS for row in checkpoint.state_dicts)


def _score(marker: str, path: str, head: bytes, size: int) -> int:
    """Return 95 for an archive with the record ROOT/`marker`, which no checkpoint of torch.save has, else 0."""
    there = Beginning(path, head, size).has_record(marker)
    return 95 if there and open_program(path, marker) is not None else 0


def notes(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield the finding that every program has, whose id is the name of its format."""
    yield found(checkpoint.format)


TORCHSCRIPT = Format(
    name="torchscript",
    title="TorchScript program",
    suffixes=(),
    states=OF_OBJECTS - {"requires_grad", "parameter"} | {"checksums"},
    score=partial(_score, "constants.pkl"),
    read=partial(read, "torchscript", torchscript.read),
    validate=torch_common.all_findings,
    weights=plain_weights,
    refuses=lambda entry: None,
    plan_edit=refuse_edit,
    plan_write=common.refuse_write,
    edits=False,
    writes=False,
    program=True,
    notes=notes,
)

EXPORTED = replace(
    TORCHSCRIPT,
    name="exported-program",
    title="exported program (.pt2)",
    score=partial(_score, "archive_format"),
    read=partial(read, "exported-program", exported.read),
)
