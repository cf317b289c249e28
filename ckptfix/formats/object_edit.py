"""An edit of the object in a checkpoint: values of its tree that others replace, and the plan of the result.

Code that edits names values by their items of the tree, and gets new values here. Only this module and those below it
know that a value is spelled as a pickle; all other values are spelled as before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import copy

from ckptfix.checkpoint import Checkpoint, Plan, TensorEntry
from ckptfix.checkpoint.tree import Item, Pairs
from ckptfix.formats import FORMATS
from ckptfix.formats.folders.assembly import Assembly
from ckptfix.formats.torch import legacy_layout
from ckptfix.formats.torch.common import Storages, pickled_object
from ckptfix.formats.torch.emit import tensor_call
from ckptfix.formats.torch.put_tensors import PutStorages
from ckptfix.formats.torch.rewrite import NewStorage, counted, plan_rewrite, renumbered
from ckptfix.formats.torch.tree import node_of
from ckptfix.pickles import Call, Dict
from ckptfix.pickles.graph import Node, labels
from ckptfix.pickles.places import NodesByAddress
from ckptfix.pickles.reemit import reemit


class ObjectEdit:
    """Replacements of values in the object of `checkpoint`, and the storages of new tensors.

    A new value is an item of the tree too: it may be part of another one, or replace a value.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._parts = pickled_object(checkpoint)
        self.root: Item = self._parts.root
        self._node_at = NodesByAddress(self._parts.graph.root)
        self._legacy = FORMATS[checkpoint.format].one_stream
        self._storages = PutStorages(self._legacy, self._parts.storages.place)
        self._storages.note(self._parts.graph)
        self._replaced: dict[int, Node] = {}
        self._kept: list[Node] = []

    def at(self, address: str) -> Item:
        """Return the value at `address`.

        Raises:
            NoSuchTensor: the checkpoint has nothing there.
        """
        return self._parts.value(self._node_at(address))

    def metadata_at(self, at: str) -> Item:
        """Return the ``_metadata`` of the state dict at `at`; None without it."""
        return self._parts.value(self._parts.found.metadata.get(at))

    def rows(self, holder: Item) -> list[tuple[str, Item, Item]] | None:
        """Return (part of the address, key, value) of the items set on a mapping, as written; None without any."""
        node = node_of(holder)
        if not isinstance(node, Dict | Call) or not node.items:
            return None
        value = self._parts.value
        names = labels([key for key, _ in node.items])
        return [(name, value(key), value(own)) for name, (key, own) in zip(names, node.items, strict=True)]

    def replace(self, item: Item, new: Item) -> None:
        """Write `new` wherever the value `item` occurs."""
        node = node_of(item)
        self._kept.append(node)
        self._replaced[id(node)] = node_of(new)

    def with_rows(self, holder: Item, rows: Pairs) -> Item:
        """Return the mapping `holder` with these items instead of its own."""
        node = node_of(holder)
        assert isinstance(node, Dict | Call)
        had = node.items  # reading them makes them nodes, so that the copy has its own
        made = copy(node)
        if not had and isinstance(made, Call) and made.arguments and isinstance(made.arguments[0], list | Dict):
            made.args = made.arguments[1:]  # the items, as in a Counter, or in an OrderedDict of Python 2
        made.items = [(node_of(key), node_of(value)) for key, value in rows]
        return self._parts.value(made)

    def mapping(self, rows: Pairs) -> Item:
        """Return a new dict."""
        made = Dict()
        made.items = [(node_of(key), node_of(value)) for key, value in rows]
        return self._parts.value(made)

    def listing(self, items: Iterable[Item]) -> Item:
        """Return a new list."""
        return self._parts.value([node_of(item) for item in items])

    def copy(self, item: Item) -> Item:
        """Return a second value that holds the same."""
        return self._parts.value(copy(node_of(item)))

    def tensor(self, entry: TensorEntry) -> Item:
        """Return a new tensor."""
        if self._legacy:
            legacy_layout.refuse_unloadable([entry], self.checkpoint.path)
        return self._parts.value(tensor_call(entry, self._storages))

    def plan(self, dest: str) -> Plan:
        """Plan the file or folder with all replacements."""
        if FORMATS[self.checkpoint.format].folder:
            return self._folder(dest)
        rewritten = reemit(self._parts.graph, replaced=self._replaced)
        storages = {
            key: NewStorage(storage.data, itemsize, storage.crc32)
            for key, (storage, itemsize) in self._storages.new.items()
            if storage.data is not None
        }
        keys = None if self._legacy else counted(self._parts.graph, rewritten)
        moved = {key: self._moved(key, storages) for key in keys or ()}
        if keys is not None and None not in moved.values():
            rewritten = renumbered(rewritten, keys, self.checkpoint.path)
            storages = {keys[key]: storage for key, storage in moved.items() if storage is not None}
        return plan_rewrite(self.checkpoint, rewritten, dest, storages, same_layout=True)

    def _moved(self, key: str, storages: Mapping[str, NewStorage]) -> NewStorage | None:
        """Return a storage that gets a new key; None for one that the file lacks."""
        if key in storages:
            return storages[key]
        data, _, crc32 = self._parts.storages.place(key)
        return None if data is None else NewStorage(data, 1, crc32)

    def _folder(self, dest: str) -> Plan:
        """Plan the same for a folder, which has no pickle of its own."""
        checkpoint = self.checkpoint
        format = FORMATS[checkpoint.format]
        assert format.recode is not None
        assembly = Assembly()
        root = assembly.adopt(self._parts.graph.root, Storages(self._storages), "", instead=self._replaced)
        made = assembly.checkpoint(
            root,
            checkpoint.path,
            format=checkpoint.format,
            files=checkpoint.files,
            traits=checkpoint.traits,
        )
        plan = format.recode(made, dest)
        around = format.companions(checkpoint, dest)
        return Plan((*around, *plan.files), plan.findings)
