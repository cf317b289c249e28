"""What these formats share: the object in the terms of a zip checkpoint, and that nothing is written as they are.

A storage stands in each of them in a way of its own. It is replaced by the reference that a zip checkpoint has for it,
``('storage', class, key, location, numel)``, and the object is written again, in memory: from there on, everything
that reads a checkpoint reads this one. Its calls and globals keep their offsets in the file.
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
from ckptfix.pickles import Call, Global, Graph, PersId, parse
from ckptfix.pickles.graph import Node
from ckptfix.pickles.reemit import parts_of, reemit


class Found:
    """The bytes of storages by their new keys."""

    def __init__(self) -> None:
        self.data: dict[str, Data] = {}
        self.sums: dict[str, int | None] = {}

    def add(self, data: Data, crc32: int | None = None) -> str:
        """A key for a storage that has these bytes, and this CRC-32 if one is stated."""
        key = str(len(self.data))
        self.data[key], self.sums[key] = data, crc32
        return key

    def __call__(self, key: str) -> tuple[Data | None, int, int | None]:
        data = self.data.get(key)
        return (None, -1, None) if data is None else (data, data.length, self.sums[key])


def reference(kind: Node, key: str, location: Node, numel: Node) -> PersId:
    """A reference to the storage `key`, as a zip checkpoint has it."""
    return PersId(("storage", kind, key, location, numel), 0, -1)


def in_terms_of_zip(graph: Graph, replaced: Mapping[int, Node], path: str, known: Sequence[str] = ()) -> Graph:
    """The object of `graph` with other nodes in the place of some, parsed from its own text.

    Args:
        replaced: ``id`` of nodes -> what stands for them.
        known: globals that nothing needs any more.

    Raises:
        Unsupported: an object that cannot be written again, as with state that is set twice.
    """
    fresh = parse(reemit(graph, replaced=replaced).pickle, path=path, where="pickle")
    _keep_offsets(graph, fresh, replaced)
    starts = {(node.module, node.name): node.start for node in sorted(graph.globals, key=_last_first)}
    for node in fresh.globals:
        node.start = starts.get((node.module, node.name), 0)
    fresh.rare = {code: graph.rare.get(code, 0) for code in fresh.rare}
    fresh.misuses = graph.misuses
    named = {(node.module, node.name) for node in fresh.globals}
    for node in sorted(graph.globals, key=_last_first, reverse=True):
        # What the pickle imports and throws away, an unpickler imports too.
        full = weights_only.canonical(node)
        if (node.module, node.name) not in named and not weights_only.accepted(full) and full not in known:
            named.add((node.module, node.name))
            fresh.globals.append(Global(node.module, node.name, node.start))
    return fresh


def _last_first(node: Global) -> int:
    return -node.start


def _keep_offsets(graph: Graph, fresh: Graph, replaced: Mapping[int, Node]) -> None:
    """Give the calls of `fresh` the offsets of those that they were written from."""
    seen: set[int] = set()
    stack: list[tuple[Node, Node]] = [(graph.root, fresh.root)]
    while stack:
        old, new = stack.pop()
        old = replaced.get(id(old), old)
        if type(old) is not type(new) or id(new) in seen:
            continue
        inside = parts_of(new)
        if not inside:
            continue
        seen.add(id(new))
        if type(old) is Call and type(new) is Call:
            new.position = old.position
        stack += zip(parts_of(old), inside, strict=False)


def checkpoint(
    path: str, format: str, size: int, graph: Graph, found: Found, traits: Mapping[str, Any], findings: list[Finding]
) -> Checkpoint:
    """The checkpoint of an object in the terms of a zip; see `torch_common.build`."""
    return torch_common.build(
        path,
        format=format,
        size=size,
        graph=graph,
        container=found,
        storages=torch_common.Storages(found),
        traits=traits,
        byteorder="little",
        findings=findings,
    )


def refuse_edit(checkpoint: Checkpoint, edits: Sequence[Edit], dest: str) -> Plan:
    """`Format.plan_edit` of a format that is only read.

    Raises:
        Unsupported: always.
    """
    way = command("convert", checkpoint.path, "OUT.pth")
    message = f"a file of the format {checkpoint.format} is read and not edited"
    raise Unsupported(message, path=checkpoint.path, hint=f"`{way}` first, and work on that")


def refuse_write(entries: Sequence[TensorEntry], dest: str, *, metadata: Mapping[str, str] | None = None) -> Plan:
    """`Format.plan_write` of a format that is only read.

    Raises:
        Unsupported: always.
    """
    raise Unsupported("a format that is read and not written", path=dest, hint="write zip, legacy or safetensors")
