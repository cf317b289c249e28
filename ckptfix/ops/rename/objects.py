"""The object of a torch checkpoint, edited by a rules file: its state dicts, and everything that refers to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy

from ckptfix.checkpoint import Checkpoint, Plan
from ckptfix.checkpoint.address import join
from ckptfix.errors import Unsupported
from ckptfix.formats import FORMATS
from ckptfix.formats.folders.assembly import Assembly
from ckptfix.formats.torch import legacy_layout
from ckptfix.formats.torch.common import Storages, pickled_object
from ckptfix.formats.torch.emit import tensor_call
from ckptfix.formats.torch.put_tensors import PutStorages
from ckptfix.formats.torch.rewrite import NewStorage, counted, plan_rewrite, renumbered
from ckptfix.ops.rename.transform import Row, StateDictChange
from ckptfix.pickles import Call, Dict, parse
from ckptfix.pickles.graph import Node, children, label, labels, pairs
from ckptfix.pickles.places import NodesByAddress
from ckptfix.pickles.reemit import Rewritten, reemit


class Rewriting:
    """The nodes of a checkpoint's object that are replaced, and the storages of new tensors."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.parts = pickled_object(checkpoint)
        self.root: Node = self.parts.graph.root
        self._node_at = NodesByAddress(self.root)
        self._legacy = FORMATS[checkpoint.format].one_stream
        self.storages = PutStorages(self._legacy, self.parts.storages.place)
        self.storages.note(self.parts.graph)
        self._replaced: dict[int, Node] = {}
        self._kept: list[Node] = []

    def replace(self, node: Node, new: Node) -> None:
        """Write `new` wherever `node` occurs."""
        self._kept.append(node)
        self._replaced[id(node)] = new

    def value(self, row: Row, node: Node) -> Node:
        """Return the node of a row whose old key had `node`."""
        entry = row[1]
        if entry is None:
            return node
        if self._legacy:
            legacy_layout.refuse_unloadable([entry], self.checkpoint.path)
        return tensor_call(entry, self.storages)

    def site(self, site: StateDictChange) -> int:
        """Replace the rows of a state dict and the modules in its ``_metadata``; return how many modules changed.

        Raises:
            Unsupported: the object is a kind of dict that cannot be rewritten.
        """
        holder = self._node_at(site.at)
        if not isinstance(holder, Dict | Call) or not holder.items:
            message = "the tensors of this kind of dict cannot be replaced"
            raise Unsupported(message, where=site.at or None, hint="convert the file first, and edit the result")
        made = copy(holder)
        same: dict[int, Node] = {}
        made.items = []
        shown = labels([key for key, _ in holder.items])
        for (key, node), own in zip(holder.items, shown, strict=True):
            for name, entry in site.rows.get(own, [(own, None)]):
                value = same.get(id(entry)) if entry is not None else node
                if value is None and entry is not None:
                    value = same[id(entry)] = self.value((name, entry), node)
                made.items.append((key if name == own else name, value))
        self.replace(holder, made)
        return self._versions(site)

    def _versions(self, site: StateDictChange) -> int:
        """Move the entries of a state dict's ``_metadata``, so that a module's version goes along with its tensors."""
        node = self.parts.found.metadata.get(site.at)
        if not isinstance(node, Dict | Call) or not node.items:
            return 0
        paths = modules(site, [label(key) for key, _ in node.items])
        made = copy(node)
        made.items = [
            (key if new == label(key) else new, copy(own) if new != label(key) else own)
            for key, own in node.items
            for new in paths[label(key)]
        ]
        self.replace(node, made)
        return sum(new != (path,) for path, new in paths.items())

    def plan(self, dest: str) -> Plan:
        """Plan the file with all replacements."""
        rewritten = reemit(self.parts.graph, replaced=self._replaced)
        storages = {
            key: NewStorage(storage.data, itemsize, storage.crc32)
            for key, (storage, itemsize) in self.storages.new.items()
            if storage.data is not None
        }
        format = FORMATS[self.checkpoint.format]
        if format.folder:
            return self._folder(rewritten, dest)
        keys = None if self._legacy else counted(self.parts.graph, rewritten)
        moved = {key: self._moved(key, storages) for key in keys or ()}
        if keys is not None and None not in moved.values():
            rewritten = renumbered(rewritten, keys, self.checkpoint.path)
            storages = {keys[key]: storage for key, storage in moved.items() if storage is not None}
        return plan_rewrite(self.checkpoint, rewritten, dest, storages, alike=True)

    def _moved(self, key: str, storages: Mapping[str, NewStorage]) -> NewStorage | None:
        """Return a storage that gets a new key; None for one that the file lacks."""
        if key in storages:
            return storages[key]
        data, _, crc32 = self.parts.storages.place(key)
        return None if data is None else NewStorage(data, 1, crc32)

    def _folder(self, rewritten: Rewritten, dest: str) -> Plan:
        """Plan the same for a folder, which has no pickle of its own."""
        checkpoint = self.checkpoint
        recode = FORMATS[checkpoint.format].recode
        assert recode is not None
        graph = parse(rewritten.pickle, path=checkpoint.path, where="edited pickle")
        assembly = Assembly()
        root = assembly.adopt(graph.root, Storages(self.storages), "")
        made = assembly.checkpoint(
            root,
            checkpoint.path,
            format=checkpoint.format,
            files=checkpoint.files,
            traits=checkpoint.traits,
        )
        plan = recode(made, dest)
        around = FORMATS[checkpoint.format].companions(checkpoint, dest)
        return Plan((*around, *plan.files), plan.findings)


def modules(site: StateDictChange, paths: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Map each module path to its paths in the output, which are empty if the module is gone.

    A module moves with its tensors; a module without tensors of its own moves with the modules below it.
    """
    source: dict[str, str] = {"": ""}
    above: list[tuple[str, str]] = []
    busy: set[str] = set()
    for key, row in site.after():
        old, new = key.split("."), row[0].split(".")
        source.setdefault(".".join(new[:-1]), ".".join(old[:-1]))
        ends = 1
        while ends < min(len(old), len(new)) and old[-ends] == new[-ends]:
            ends += 1
            above.append((".".join(new[:-ends]), ".".join(old[:-ends])))
    for new_path, old_path in above:
        source.setdefault(new_path, old_path)
    for key in site.keys:
        parts = key.split(".")
        busy.update(".".join(parts[:end]) for end in range(len(parts)))
    made: dict[str, list[str]] = {path: [] for path in paths}
    for new_path, old_path in source.items():
        if old_path in made:
            made[old_path].append(new_path)
    for path in paths:
        if not made[path] and path not in busy:
            made[path] = [_below(path, made)]
    return {path: tuple(new) for path, new in made.items()}


def _below(path: str, made: Mapping[str, Sequence[str]]) -> str:
    """Return the new path of a module without tensors: it moves with the nearest module above it."""
    above, _, rest = path.rpartition(".")
    while above:
        if len(made.get(above, ())) == 1:
            return f"{made[above][0]}.{rest}".lstrip(".")
        above, _, part = above.rpartition(".")
        rest = f"{part}.{rest}"
    return path


def optimizers(root: Node) -> Iterator[tuple[str, Node]]:
    """Yield (address, node) of everything that ``Optimizer.state_dict()`` returned."""
    seen: set[int] = set()
    stack: list[tuple[str, Node]] = [("", root)]
    while stack:
        address, node = stack.pop()
        if type(node) not in (tuple, list, Dict, Call) or id(node) in seen:
            continue
        seen.add(id(node))
        rows = rows_of(node)
        if pairs(rows.get("state")) is not None and type(rows.get("param_groups")) in (list, tuple):
            yield address, node
            continue
        below = [(join(address, name), child) for name, child in children(node)]
        stack += [(where[:1024], child) for where, child in reversed(below)]


def rows_of(node: Node) -> Mapping[str, Node]:
    """Return the values of a dict by their keys as text; empty for any other node."""
    return {label(key): value for key, value in pairs(node) or ()}
