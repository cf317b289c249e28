"""Code shared by these formats: the object in the form of a zip checkpoint, and the refusal to edit or write them.

Each format stores a storage in its own way. The storage is replaced by the reference that a zip checkpoint has for it,
``('storage', class, key, location, numel)``, so that all code that reads a checkpoint can read this one. Its calls and
globals keep their offsets in the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckptfix.checkpoint import Checkpoint, Data, Edit, Plan, TensorEntry
from ckptfix.commands import command
from ckptfix.errors import Unsupported
from ckptfix.findings.row import Finding
from ckptfix.formats.torch import common as torch_common
from ckptfix.formats.torch import weights_only
from ckptfix.formats.torch.object import object_of
from ckptfix.pickles import Global, Graph, PersId
from ckptfix.pickles.copies import grafted
from ckptfix.pickles.graph import Node, new_text
from ckptfix.pickles.unwritten import text_like, unwritten


class FoundStorages:
    """The bytes of storages by their new keys."""

    def __init__(self) -> None:
        self.data: dict[str, Data] = {}
        self.sums: dict[str, int | None] = {}

    def add(self, data: Data, crc32: int | None = None) -> str:
        """Return a new key for a storage with these bytes, and with this CRC-32 if one is stated."""
        key = str(len(self.data))
        self.data[key], self.sums[key] = data, crc32
        return key

    def __call__(self, key: str) -> tuple[Data | None, int, int | None]:
        """Return the data, the length and the CRC-32 of a storage; -1 as the length of a missing one."""
        data = self.data.get(key)
        return (None, -1, None) if data is None else (data, data.length, self.sums[key])


def reference(kind: Node, key: str, location: Node, numel: Node) -> PersId:
    """Return a reference to the storage `key`, as in a zip checkpoint."""
    return PersId((new_text("storage"), kind, new_text(key), location, numel), 0, -1)


def in_terms_of_zip(graph: Graph, replaced: Mapping[int, Node], path: str, known: Sequence[str] = ()) -> Graph:
    """Return the object of `graph` with some nodes replaced.

    Args:
        replaced: ``id`` of nodes -> their replacements.
        known: globals that are no longer needed.

    Raises:
        Unsupported: the object cannot be written again, for example because state is set twice.
    """
    root = grafted(graph.root, lambda persid: None, instead=replaced, text=text_like(graph))
    fresh = unwritten(root, graph, path=path)
    starts = {(node.module, node.name): node.start for node in sorted(graph.globals, key=_last_first)}
    for node in fresh.globals:
        node.start = starts.get((node.module, node.name), 0)
    fresh.rare = {code: graph.rare.get(code, 0) for code in fresh.rare}
    fresh.misuses = graph.misuses
    named = {(node.module, node.name) for node in fresh.globals}
    for node in sorted(graph.globals, key=_last_first, reverse=True):
        # An unpickler also imports the globals that the pickle discards.
        full = weights_only.canonical(node)
        if (node.module, node.name) not in named and not weights_only.accepted(full) and full not in known:
            named.add((node.module, node.name))
            fresh.globals.append(Global(node.module, node.name, node.start))
    return fresh


def _last_first(node: Global) -> int:
    return -node.start


def checkpoint(
    path: str,
    format: str,
    size: int,
    graph: Graph,
    found: FoundStorages,
    traits: Mapping[str, Any],
    findings: list[Finding],
    byteorder: torch_common.ByteOrder = "little",
) -> Checkpoint:
    """Return the checkpoint of an object in the form of a zip; see `torch_common.build`."""
    return torch_common.build(
        path,
        format=format,
        size=size,
        found=object_of(graph, path),
        container=found,
        storages=torch_common.Storages(found),
        traits=traits,
        byteorder=byteorder,
        findings=findings,
    )


def refuse_edit(checkpoint: Checkpoint, edits: Sequence[Edit], dest: str) -> Plan:
    """Refuse an edit (`Format.plan_edit`) of a format that is only read.

    Raises:
        Unsupported: always.
    """
    raise not_edited(checkpoint, command("convert", checkpoint.path, "OUT.pth"))


def not_edited(checkpoint: Checkpoint, way: str) -> Unsupported:
    """Return the error for an edit of a format that is only read; the command `way` writes one that can be edited."""
    message = f"a file of the format {checkpoint.format} can be read but not edited"
    return Unsupported(message, path=checkpoint.path, hint=f"run `{way}` first, and edit the result")


def refuse_write(entries: Sequence[TensorEntry], dest: str, *, metadata: Mapping[str, str] | None = None) -> Plan:
    """Refuse to write (`Format.plan_write`) a format that is only read.

    Raises:
        Unsupported: always.
    """
    raise Unsupported("this format can be read but not written", path=dest, hint="write zip, legacy or safetensors")
