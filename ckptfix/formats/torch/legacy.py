"""torch.save from 0.1.10 to 1.5, and later with ``_use_new_zipfile_serialization=False``.

::

    pickle  magic number 0x1950a86a20f9469cfc6c
    pickle  protocol version 1001
    pickle  sys_info: {'protocol_version', 'little_endian', 'type_sizes'}
    pickle  the object; storages are persistent ids ('storage', class, key, location, numel, view or None)
    pickle  list of storage keys
    then, for each key in that order: number of elements (8 bytes, little-endian), and the elements

A view is ``(key of the view, first element, elements)``: the storage that the object holds is this part of
the storage under `key`. Source: torch/serialization.py (``_legacy_save``, ``_legacy_load``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ckptfix.checkpoint import ByteRange, Checkpoint, Drop, Edit, OutputFile, Plan, Put, Segment, TensorEntry, dtypes
from ckptfix.errors import BadPickle
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.formats.base import OF_OBJECTS, TORCH_SUFFIXES, Format, plain_weights, refuse_truncated
from ckptfix.formats.in_place import data_moves, head_of, room_for, unchanged
from ckptfix.formats.signs import is_legacy
from ckptfix.formats.torch import common as torch_common
from ckptfix.formats.torch import weights_only
from ckptfix.formats.torch.edit import patches
from ckptfix.formats.torch.legacy_layout import (
    MAGIC,
    PARTS,
    PROTOCOL,
    LegacyLayout,
    LegacyStorages,
    aligned,
    compared,
    fresh,
    padded,
    read_pickles,
    refuse_unloadable,
    refuses,
    storages_of,
)
from ckptfix.formats.torch.legacy_layout import NAME as NAME
from ckptfix.formats.torch.object import object_of
from ckptfix.io.blocks import LARGE, shift_for
from ckptfix.io.source import open_source
from ckptfix.pickles import Graph, splice
from ckptfix.pickles.graph import pairs

if TYPE_CHECKING:
    from ckptfix.formats.torch.weights import Weights


def score(path: str, head: bytes, size: int) -> int:
    """Return 100 for a file that begins with the pickle of torch's magic number, else 0."""
    return 100 if is_legacy(head) else 0


def read(path: str) -> Checkpoint:
    """Read names, shapes and places; see the contract in `base`."""
    findings: list[Finding] = []
    with open_source(path) as reader:
        graphs = read_pickles(reader)
        magic, protocol, info, graph, key_graph = graphs
        if magic.root != MAGIC or protocol.root != PROTOCOL:
            raise BadPickle("the magic number or protocol is computed, not written", path=path, where="header")
        for part, side in zip(PARTS, graphs, strict=True):
            if side is not graph:
                _note(side, part, graph)
        known = {str(key): value for key, value in pairs(info.root) or () if isinstance(key, str)}
        keys = [str(key) for key in key_graph.root] if type(key_graph.root) is list else []
        storages, stated = storages_of(reader, graph, keys, key_graph.end, findings)
        size = reader.size
    layout = LegacyLayout(graph.start, graph.end, storages, stated)
    return torch_common.build(
        path,
        format=NAME,
        size=size,
        found=object_of(graph, path),
        container=layout,
        storages=torch_common.Storages(LegacyStorages(layout)),
        traits={"storages": len(storages), "written on": f"{'little' if known.get('little_endian') else 'big'}-endian"},
        byteorder="little",
        findings=findings,
    )


def _note(side: Graph, part: str, graph: Graph) -> None:
    """Add to the object's `graph` what weights_only=True refuses in `side`, which it reads too."""
    graph.globals += (node for node in side.globals if not weights_only.accepted(weights_only.canonical(node)))
    refused = weights_only.refused_opcode(side)
    if refused is not None:
        graph.misuses.append((refused[0], f"in the pickle of the {part}, {refused[1]}"))


def read_stream(path: str) -> tuple[LegacyLayout, bytes]:
    """Return the layout of the parts, and the pickle of the object. Raises like `read`."""
    with open_source(path) as reader:
        *_, graph, key_graph = read_pickles(reader)
        keys = [str(key) for key in key_graph.root] if type(key_graph.root) is list else []
        storages, _ = storages_of(reader, graph, keys, key_graph.end, [])
    return LegacyLayout(graph.start, graph.end, storages), graph.data[graph.start : graph.end]


def validate(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield the findings of reading, and the storage counts that differ from the pickle."""
    yield from torch_common.all_findings(checkpoint)
    yield from compared(checkpoint)


def plan_edit(checkpoint: Checkpoint, edits: Sequence[Edit], dest: str) -> Plan:
    """Plan the checkpoint with `edits` applied to its object; every other byte is copied.

    A Drop, or a Put of other bytes, leads to a new layout.

    Raises:
        Truncated: the file is cut short, and an edited copy would be as broken.
    """
    if any(isinstance(edit, Drop | Put) for edit in edits):
        from ckptfix.formats.torch import rewrite as torch_rewrite

        if torch_rewrite.is_needed(checkpoint, edits):
            return torch_rewrite.plan_edits(checkpoint, edits, dest)
    parts = torch_common.pickled_object(checkpoint)
    layout: LegacyLayout = parts.container
    path, size = checkpoint.path, checkpoint.size
    changes = patches(parts.found, edits)
    if not changes:
        return Plan((OutputFile.of(dest, (ByteRange(path, 0, size),)),))
    refuse_truncated(checkpoint)
    new = splice(parts.graph, changes)
    rest = ByteRange(path, layout.object_end, size - layout.object_end)
    head: Segment = ByteRange(path, 0, layout.object_start)
    if rest.length >= LARGE:
        with open_source(path) as reader:
            head = aligned(reader.read(0, layout.object_start), rest.offset - len(new), shift_for(dest))
    segments: tuple[Segment, ...] = (head, new, rest)
    return Plan((OutputFile.of(dest, segments),))


def in_place(checkpoint: Checkpoint, plan: Plan, block: Callable[[], int]) -> Plan:
    """Plan an in-place edit (`Format.in_place`): the third pickle is padded so that the storages keep their offsets."""
    (file,) = plan.files
    if unchanged(file):
        return plan
    layout: LegacyLayout = torch_common.pickled_object(checkpoint).container
    head, data = head_of(file, checkpoint.size, layout.object_end)
    if data.offset != layout.object_end:
        raise data_moves(file.path)
    bare = padded(head, None, file.path)
    room = room_for(len(bare), data.offset, block, file.path)
    return replace(plan, files=(OutputFile.of(file.path, (padded(head, room, file.path), data)),))


def plan_write(entries: Sequence[TensorEntry], dest: str, *, metadata: Mapping[str, str] | None = None) -> Plan:
    """Plan a fresh file that holds the state dict of `entries` as an OrderedDict."""
    from ckptfix.formats.torch.emit import state_dict_pickle

    refuse_unloadable(entries, dest)
    pickle, storages = state_dict_pickle(entries, legacy=True)
    itemsizes: dict[tuple[str, str], int] = {}
    for entry in entries:
        row = dtypes.by_name(entry.dtype)
        assert entry.storage is not None
        itemsizes.setdefault(entry.storage.identity, row.itemsize if row.storage_class else 1)
    sized = [(key, data, size) for (key, data, _), size in zip(storages, itemsizes.values(), strict=True)]
    return Plan((OutputFile.of(dest, fresh(pickle, sized, dest)),))


def plan_state_dict(weights: Weights, dest: str) -> Plan:
    """Plan a fresh file of a state dict (`Format.plan_state_dict`)."""
    from ckptfix.formats.torch.weights import plan_torch

    return plan_torch(weights, dest, legacy=True)


def recode(checkpoint: Checkpoint, dest: str) -> Plan:
    """Plan the object of a checkpoint of another format as a legacy file (`Format.recode`)."""
    from ckptfix.formats.torch.containers import to_legacy

    return to_legacy(checkpoint, dest)


def notes(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield the findings that every legacy file has."""
    yield found("no-mmap")
    yield found("no-checksums", "torch's old format has no checksums: a flipped bit of the data would go unnoticed")


def keeps_all(checkpoint: Checkpoint, plan: Plan, but: Collection[str] = ()) -> bool:
    """Return whether `plan` certainly is an edit that keeps all tensors; see the contract in `base`."""
    from ckptfix.formats.torch.unchanged import edits

    return edits.keeps_all(checkpoint, plan, but, read_stream)


FORMAT = Format(
    name=NAME,
    title="PyTorch legacy",
    suffixes=TORCH_SUFFIXES,
    states=OF_OBJECTS,
    score=score,
    read=read,
    validate=validate,
    validate_headers=("pickles (and no counts of storages)", torch_common.all_findings),
    weights=plain_weights,
    refuses=refuses,
    plan_edit=plan_edit,
    in_place=in_place,
    plan_write=plan_write,
    notes=notes,
    one_stream=True,
    plan_state_dict=plan_state_dict,
    recode=recode,
    keeps_all=keeps_all,
)
