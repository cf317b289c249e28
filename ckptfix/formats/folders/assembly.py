"""A checkpoint of many files, assembled into one object.

A format whose files hold tensors by key, in pieces, or as separate values builds the object that one torch.save of the
whole checkpoint would have pickled, out of inert nodes. The code for torch files reads it like one that it parsed, and
finds its names, state dicts, optimizers, values and edits. A pickle of it is only made where one is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ckptfix.checkpoint import Checkpoint, Data, FileVersion, TensorEntry, contiguous_stride, dtypes
from ckptfix.errors import Unsupported
from ckptfix.findings.row import Finding
from ckptfix.formats.torch import calls, common
from ckptfix.formats.torch.emit import dense_call
from ckptfix.formats.torch.object import object_of
from ckptfix.pickles import Call, Dict, Global, PersId
from ckptfix.pickles.copies import grafted
from ckptfix.pickles.graph import Node, labels, new_text
from ckptfix.pickles.new_tensors import NewTensorArguments
from ckptfix.pickles.places import NodesByAddress
from ckptfix.pickles.unwritten import unwritten

_ORDERED_DICT = Global("collections", "OrderedDict", 0)
_TENSOR = Global(calls.TENSOR_V2.module, calls.TENSOR_V2.name, 0)


class Assembled:
    """The container of an assembled checkpoint, which has no file of its own.

    Attributes:
        pickle_ok: always True: the pickle is made here, so no checksum can contradict it.
    """

    __slots__ = ()
    pickle_ok = True


class Assembly:
    """The object under construction, and its storages."""

    def __init__(self) -> None:
        self._places: dict[str, tuple[Data, int, int | None]] = {}
        self._adopted: dict[str, str] = {}
        self._kinds: dict[str, Global] = {}

    def storage(self, data: Data, crc32: int | None = None, key: str | None = None) -> str:
        """Add a storage of these bytes, and return its key."""
        key = str(len(self._places)) if key is None else key
        self._places[key] = (data, data.length, crc32)
        return key

    def tensor(self, key: str, dtype: str, shape: tuple[int, ...], *, requires_grad: bool = False) -> Call:
        """Return the rebuild call of a contiguous tensor at the beginning of the storage `key`."""

        row = dtypes.by_name(dtype)
        nbytes = self._places[key][1]
        kind = self._kinds.get(dtype)
        if kind is None and row.storage_class is not None:
            kind = self._kinds[dtype] = Global("torch", row.storage_class, 0)
        if kind is not None:
            layout = 0, shape, contiguous_stride(shape)
            made: Any = NewTensorArguments(
                kind, key, "cpu", nbytes // row.itemsize, layout, requires_grad, _ORDERED_DICT
            )
            return Call.folded_at(_TENSOR, 0, made)

        def refer(kind: Global, count: int) -> PersId:
            return PersId((new_text("storage"), kind, new_text(key), new_text("cpu"), count), 0, -1)

        return dense_call(dtype, nbytes, refer, (0, shape, contiguous_stride(shape)), requires_grad=requires_grad)

    def adopt(
        self,
        root: Node,
        storages: common.Storages,
        prefix: str,
        location: str | None = None,
        replaced: Mapping[int, Node] | None = None,
        instead: Mapping[int, Node] | None = None,
    ) -> Node:
        """Return a copy of the object `root` of another torch file, with `prefix` before its storage keys.

        Args:
            location: the device of its tensors; by default the one that they state.
            replaced: ``id`` of nodes -> the nodes of this object that replace them everywhere.
            instead: ``id`` of nodes -> the nodes whose copies replace them.

        Raises:
            Unsupported: it refers to a part of a storage.
        """

        def fields_of(node: PersId) -> tuple[Node, ...] | None:
            fields = node.fields
            if len(fields) < 5 or not isinstance(fields[2], str):
                return None
            if common.view_of(node) is not None:
                message = "a tensor uses a view of a storage, as torch before 0.4 wrote it"
                hint = "convert each such file to zip first"
                raise Unsupported(message, where="pickle", offset=node.position, hint=hint)
            old = f"{prefix}{fields[2]}"
            if old not in self._adopted:
                data, nbytes, crc32 = storages.place(str(fields[2]))
                known = data is not None and nbytes >= 0
                self._adopted[old] = self.storage(data, crc32) if known and data is not None else f"lacking {old}"
            to = fields[3] if location is None else location
            return (*fields[:2], self._adopted[old], to, fields[4])

        return grafted(root, fields_of, replaced, instead)

    def checkpoint(
        self,
        root: Node,
        path: str,
        *,
        format: str,
        files: tuple[FileVersion, ...],
        traits: Mapping[str, Any],
        findings: Iterable[Finding] = (),
    ) -> Checkpoint:
        """Return the checkpoint whose object is `root`.

        Raises:
            BadPickle: torch could not have saved such an object.
        """
        made = unwritten(root, path=path, where="the object of its files")
        places = self._places

        def place(key: str) -> tuple[Data | None, int, int | None]:
            return places.get(key, (None, -1, None))

        checkpoint = common.build(
            path,
            format=format,
            size=sum(file.stamp.size for file in files),
            found=object_of(made, path),
            container=Assembled(),
            storages=common.Storages(place),
            traits={},
            byteorder="little",
            findings=list(findings),
        )
        return replace(checkpoint, traits=dict(traits), files=files)


def part(checkpoint: Checkpoint, root: Node, findings: Iterable[Finding] = ()) -> Checkpoint:
    """Return a checkpoint whose object is `root`, which consists of nodes of the object of `checkpoint`."""
    assembly = Assembly()
    adopted = assembly.adopt(root, common.pickled_object(checkpoint).storages, "")
    return assembly.checkpoint(
        adopted,
        checkpoint.path,
        format=checkpoint.format,
        files=checkpoint.files,
        traits=checkpoint.traits,
        findings=findings,
    )


def without(
    checkpoint: Checkpoint, gone: Iterable[TensorEntry], replaced: Iterable[tuple[TensorEntry, Data]] = ()
) -> Checkpoint:
    """Return a checkpoint without the tensors `gone`, and with other bytes, little-endian, in those `replaced`."""
    parts = common.pickled_object(checkpoint)
    node_at = NodesByAddress(parts.graph.root)
    assembly = Assembly()
    new: dict[int, Node] = {}
    for entry, data in replaced:
        new[id(node_at(entry.name))] = assembly.tensor(assembly.storage(data), entry.dtype, entry.shape)
    keys: dict[str, set[str]] = {}
    for entry in gone:
        keys.setdefault(entry.at, set()).add(entry.key)
    for at, names in keys.items():
        _drop(node_at(at), names)
    adopted = assembly.adopt(parts.graph.root, parts.storages, "", replaced=new)
    return assembly.checkpoint(
        adopted, checkpoint.path, format=checkpoint.format, files=checkpoint.files, traits=checkpoint.traits
    )


def _drop(node: Node, names: set[str]) -> None:
    """Remove items from a dict."""
    if isinstance(node, Dict | Call) and node.items is not None:
        shown = labels([key for key, _ in node.items])
        node.items = [row for row, name in zip(node.items, shown, strict=True) if name not in names]


def mapping(rows: Mapping[str, Node] | Iterable[tuple[Node, Node]]) -> Dict:
    """Build a plain dict of these rows."""
    made = Dict()
    made.items = _named(rows)
    return made


def ordered(rows: Mapping[str, Node] | Iterable[tuple[Node, Node]]) -> Call:
    """Build an OrderedDict of these rows."""
    made = Call(_ORDERED_DICT, (), "REDUCE", 0)
    made.items = _named(rows) or None
    return made


def _named(rows: Mapping[str, Node] | Iterable[tuple[Node, Node]]) -> list[tuple[Node, Node]]:
    """Return the rows with new keys: each use of a string is one of its own."""
    pairs = rows.items() if isinstance(rows, Mapping) else rows
    return [(new_text(key) if isinstance(key, str) else key, value) for key, value in pairs]
