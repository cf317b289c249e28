"""Shards that are torch files, joined into one object."""

from __future__ import annotations

from ckptfix.checkpoint import Checkpoint, Storage
from ckptfix.errors import DamagedFile, Unsupported, about
from ckptfix.formats.folders.assembly import Assembly, mapping, ordered
from ckptfix.formats.folders.nodes import refuse_damaged
from ckptfix.formats.shards.layout import ShardedLayout, ShardFile
from ckptfix.formats.torch.common import PickledObject, maybe_pickled_object, pickled_object
from ckptfix.formats.torch.tensors import is_tensor
from ckptfix.pickles import Call, Dict, PersId
from ckptfix.pickles.graph import Node, label, pairs
from ckptfix.pickles.reemit import every_node


class ShardParts(PickledObject):
    """The joined object, and the shards that it was made from."""

    __slots__ = ("layout",)

    def __init__(self, parts: PickledObject, layout: ShardedLayout) -> None:
        super().__init__(parts.found, parts.storages, parts.container)
        self.layout = layout


def prefix(index: int) -> str:
    """Return the prefix of the storage keys of shard number `index`."""
    return f"{index}."


def read(layout: ShardedLayout, format: str, traits: dict[str, object]) -> Checkpoint:
    """Return the checkpoint whose object has the keys of all shards.

    Raises:
        DamagedFile: a shard does not hold a dict, or its pickle was changed after it was written.
        Unsupported: a shard is of a different kind or byte order than the others, or shares a key that holds tensors.
    """
    assembly = Assembly()
    rows: dict[object, tuple[Node, Node]] = {}
    versions: dict[object, tuple[Node, Node]] = {}
    kinds: set[type] = set()
    for index, shard in enumerate(layout.shards):
        root = _adopted(assembly, shard, prefix(index))
        found = pairs(root)
        if found is None:
            raise DamagedFile("it does not hold a dict of tensors", path=shard.path)
        kinds.add(type(root))
        for key, value in found:
            plain: object = str(key) if isinstance(key, str) else (type(key).__name__, label(key))
            by_name = isinstance(key, str) and is_tensor(value)  # the index decides which of these to use
            if plain in rows and not by_name and _holds_tensors(value):
                hint = "they are not shards of one state dict; convert each file separately"
                raise Unsupported(
                    f"several shards hold {label(key)}, which contains tensors", path=shard.path, hint=hint
                )
            if plain not in rows or plain in shard.listed:
                rows[plain] = (key, value)
        for key, value in pairs(_metadata(root)) or ():
            versions.setdefault(str(key) if isinstance(key, str) else id(key), (key, value))
    whole: Node = mapping(rows.values()) if kinds == {Dict} else ordered(rows.values())
    if versions and isinstance(whole, Call):
        whole.state = mapping({"_metadata": ordered(versions.values())})
    return assembly.checkpoint(
        whole, layout.path, format=format, files=layout.marks, traits=traits, findings=layout.findings
    )


def _adopted(assembly: Assembly, shard: ShardFile, name: str) -> Node:
    checkpoint = shard.read
    parts = maybe_pickled_object(checkpoint)
    if parts is None:
        raise Unsupported(
            "it is a safetensors file among torch files", path=shard.path, hint="convert each shard separately"
        )
    if checkpoint.byteorder != "little":
        raise Unsupported("the shard has big-endian data", path=shard.path, hint="convert it separately first")
    refuse_damaged(checkpoint)
    with about(shard.path):
        return assembly.adopt(parts.graph.root, parts.storages, name)


def _holds_tensors(value: Node) -> bool:
    return any(isinstance(node, PersId) or is_tensor(node) for node in every_node(value))


def _metadata(root: Node) -> Node:
    """Return the ``_metadata`` of an OrderedDict."""
    state = root.state if isinstance(root, Call) else None
    return next((value for key, value in pairs(state) or () if key == "_metadata"), None)


def own_storage(storage: Storage, index: int) -> Storage:
    """Return a storage of the joined object with the key that shard number `index` uses; other storages unchanged."""
    name = prefix(index)
    if not storage.key.startswith(name):
        return storage
    return Storage(
        storage.key[len(name) :], storage.dtype, storage.nbytes, storage.location, storage.data, storage.crc32
    )


def layout_of(checkpoint: Checkpoint) -> ShardedLayout:
    """Return the shards that a joined checkpoint was made from."""
    parts = pickled_object(checkpoint)
    assert isinstance(parts, ShardParts)
    return parts.layout
