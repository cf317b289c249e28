"""Loading the object in a checkpoint as Python values: `load_checkpoint`.

A pickle's nodes become values in three passes without recursion. First comes an empty shell for everything that can be
filled later, then whatever must be made from its parts (tuples, tensors, numpy arrays), and last the shells are filled.
So shared objects stay shared, an object may contain itself, and depth is not limited.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

from ckptfix.checkpoint import Checkpoint, TensorEntry
from ckptfix.errors import BadPickle, WouldLoseData
from ckptfix.extras import need_torch
from ckptfix.formats import weights_of
from ckptfix.formats.torch import calls
from ckptfix.formats.torch.attributes import tensor_attributes
from ckptfix.formats.torch.common import fields, maybe_pickled_object, pickled_object
from ckptfix.formats.torch.plain_values import plain
from ckptfix.formats.torch.tensors import BadTensor, is_tensor, storage_entry, tensor_entry
from ckptfix.loaders import values
from ckptfix.loaders.open_for_loading import opened, opens_once
from ckptfix.loaders.tensors import TensorMaker, restore_location
from ckptfix.loaders.values import NOTHING, ForeignObject
from ckptfix.ops.choose import BROKEN, refuse_damaged
from ckptfix.pickles import Call, Dict, Global, PersId, Set
from ckptfix.pickles.collector import collector_paused
from ckptfix.pickles.graph import Node, Text, attributes, label, pairs

if TYPE_CHECKING:
    from ckptfix.loaders.tensors import MapLocation


MOST_IN_TUPLE = 1 << 24
"""Parts that a tuple may have, counting those of nested tuples. Hashing this many takes about 0.2 s."""


@opens_once
def load_checkpoint(
    path: str | os.PathLike[str], *, map_location: MapLocation = None, mmap: bool = False, verify: bool = True
) -> Any:
    """Load the whole object in the checkpoint at `path`: tensors, and plain values with their Python types.

    Dicts (also OrderedDict, defaultdict and Counter), lists, tuples, sets, numbers, strings and bytes come back
    unchanged. So do torch.Size, torch.dtype, torch.device, numpy arrays and numpy scalars. Attributes such as the
    ``_metadata`` of a state dict are kept, and shared objects stay shared.

    An object of any other class becomes a `ForeignObject`: nothing is imported and nothing is called. The values
    of an ``argparse.Namespace`` are in the record's `state`, those of a namedtuple in its `args`. A tensor subclass
    becomes a plain tensor with the attributes of the subclass, and a warning says so once. A tensor that only its own
    library can rebuild (DTensor, nested) becomes a record of its parts.

    Args:
        map_location, mmap, verify: as for `load_state_dict`.

    Returns:
        The object that torch.load would return. For safetensors, which hold only tensors, an OrderedDict of the tensors
        with the file's ``__metadata__`` as its attribute ``metadata``.

    Raises:
        WouldLoseData: a tensor of the file cannot be read; the message names it.
        DamagedFile: the checksum of the pickle, or of a tensor's data, does not match.
        ChangedFile: the file was written to while it was read.
        BadPickle: Python cannot represent the object, such as a dict with a list for a key.
        MissingExtra: torch is not installed.
    """
    need_torch("load_checkpoint")
    checkpoint = opened(path)
    maker = TensorMaker(checkpoint, restore_location(map_location), warn=True, verify=verify, mmap=mmap)
    parts = maybe_pickled_object(checkpoint)
    if parts is not None:
        with collector_paused():
            found = Builder(checkpoint, maker).build(parts.graph.root)
    else:
        _ = checkpoint.entries
        refuse_damaged(checkpoint)
        found = from_entries(checkpoint, maker)
    maker.reading.refuse_changes()
    return found


def from_entries(checkpoint: Checkpoint, maker: Callable[[TensorEntry], object]) -> object:
    """Return the tensors and values of a format that stores no object, as dicts nested by address."""
    root: OrderedDict[str, object] = OrderedDict()
    for entry in weights_of(checkpoint):
        _mapping(root, entry.at)[entry.key] = maker(entry)
    for address, value in checkpoint.values():
        at, _, key = address.rpartition("/")
        _mapping(root, at).setdefault(key, value)
    if checkpoint.metadata:
        root.metadata = dict(checkpoint.metadata)  # type: ignore[attr-defined]
    return root


def _mapping(root: dict[str, object], at: str) -> dict[str, object]:
    for part in at.split("/") if at else ():
        inner = root.setdefault(part, {})
        if not isinstance(inner, dict):
            inner = root[f"{part}/"] = {}
        root = inner
    return root


Where: TypeAlias = "tuple[Where | None, str]"
"""The last part of an address, after the parts that come before it."""


@dataclass(slots=True)
class _Step:
    """A node on the way down; `after` is true once its parts are made."""

    node: Node
    where: Where
    after: bool = False


class Builder:
    """Maker of Python values from the nodes of one checkpoint; each node is made once.

    Raises:
        WouldLoseData: a record of the file cannot be read as its writer meant it.
    """

    def __init__(self, checkpoint: Checkpoint, maker: TensorMaker) -> None:
        self.checkpoint = checkpoint
        self.maker = maker
        self.parts = pickled_object(checkpoint)
        self.made: dict[int, object] = {}
        self.shells: list[tuple[Node, object]] = []
        self.unfolded: dict[int, int] = {}
        """``id`` of a tuple that was made -> number of its parts, counting a shared part each time that it occurs."""
        for row in checkpoint.findings:
            # Depth is not limited here, and tensors are checked when they are made.
            if row.id in BROKEN - {"too-deep", "bad-tensor"}:
                raise WouldLoseData(row.message, path=checkpoint.path, where=row.where or None, offset=row.offset)

    def build(self, root: Node) -> object:
        """Return the value of the node `root`.

        Raises:
            BadPickle: Python cannot represent the object.
            WouldLoseData: a call does not describe a tensor of the file.
        """
        if is_leaf(root):
            return values.leaf(root)
        self._make(root)
        while self.shells:
            node, shell = self.shells.pop()
            try:
                self._fill(node, shell)
            except (TypeError, AttributeError) as error:
                raise self._impossible(node, str(error)) from None
        return self.made[id(root)]

    def _make(self, root: Node) -> None:
        """Make `root` and everything below it, leaving shells empty."""
        stack = [_Step(root, (None, ""))]
        open_nodes: set[int] = set()
        while stack:
            step = stack.pop()
            node = step.node
            if is_leaf(node) or id(node) in self.made:
                continue
            if step.after:
                open_nodes.discard(id(node))
                self.made[id(node)] = self._from_parts(node, step.where)
                continue
            shell = self._tensor(node, step.where) if _is_plain_tensor(node) else values.shell(node)
            if shell is not NOTHING:
                self.made[id(node)] = shell
                self.shells.append((node, shell))
            elif id(node) in open_nodes:
                raise self._impossible(node, "it is a part of itself, but must be made after its parts")
            else:
                open_nodes.add(id(node))
                stack.append(_Step(node, step.where, True))
            stack += [_Step(child, (step.where, name)) for name, child in self._below(node)]

    def _below(self, node: Node) -> Iterator[tuple[str, Node]]:
        """Yield (label, node) for everything that the value of `node` is made of or filled with."""
        if isinstance(node, (tuple, list)):
            yield from ((str(index), value) for index, value in enumerate(node))
        elif type(node) is Dict:
            for key, value in pairs(node) or ():
                yield "key", key
                yield label(key), value
        elif type(node) is Set:
            yield from (("element", value) for value in node.elements)
        elif _is_plain_tensor(node):
            yield from ((label(name), value) for name, value in tensor_attributes(node))
        elif type(node) is Call:
            yield from (("()", part) for part in (node.args, node.kwargs, node.state))
            if type(node.func) is not Global:
                yield "()func", node.func
            for key, value in pairs(node) or node.items or ():
                yield "key", key
                yield label(key), value
            yield from ((str(index), value) for index, value in enumerate(node.elements or ()))

    def value(self, node: Node) -> object:
        """Return the value made from `node`."""
        return values.leaf(node) if is_leaf(node) else self.made[id(node)]

    def _now(self, node: Node) -> object:
        """Return the value of arguments that are needed at once; lists among them are not filled yet, so copy them."""
        if type(node) is not tuple:
            return self.value(node)
        return tuple([*map(self.value, part)] if type(part) is list else self.value(part) for part in node)

    def _from_parts(self, node: Node, where: Where) -> object:
        if type(node) is tuple:
            return self._told_apart(node, tuple(map(self.value, node)))
        if type(node) is Set:
            try:
                return frozenset(map(self.value, node.elements))
            except TypeError as error:
                raise self._impossible(node, str(error)) from None
        if type(node) is PersId:
            return self._storage(node, where)
        assert type(node) is Call
        made = values.called(node, self._now)
        if made is NOTHING:
            made = ForeignObject.empty(node)
            self.shells.append((node, made))
        return self._told_apart(node, made) if isinstance(made, tuple) and type(made) is tuple else made

    def _told_apart(self, node: Node, made: tuple[object, ...]) -> tuple[object, ...]:
        """Return `made`; refuse nested shared tuples that would make hashing endless, as tuples cache no hash."""
        count = self.unfolded[id(made)] = 1 + sum(self.unfolded.get(id(part), 1) for part in made)
        if count > max(MOST_IN_TUPLE, 1 + len(made)):
            raise self._impossible(node, "its tuples are nested and shared so often that hashing them would never end")
        return made

    def _tensor(self, node: Call, where: Where) -> object:
        address = _address(where)
        at, _, key = address.rpartition("/")
        try:
            return self.maker(tensor_entry(node, key, at, self.parts.storages))
        except BadTensor as error:
            raise WouldLoseData(str(error), path=self.checkpoint.path, where=address) from None

    def _storage(self, node: PersId, where: Where) -> object:
        """Return a storage that belongs to no tensor, or a record of a persistent id of another kind."""
        if not _is_storage(node):
            return ForeignObject("", "persistent id", (plain(node.pid),))
        import torch

        try:
            kind = fields(node)[1]
            tensor = self.maker(storage_entry(node, _address(where), "", self.parts.storages))
        except BadTensor as error:
            raise WouldLoseData(str(error), path=self.checkpoint.path, where=_address(where)) from None
        if getattr(node.fields[1], "name", "") == "UntypedStorage":
            return tensor.untyped_storage()
        untyped = tensor.untyped_storage()
        return torch.TypedStorage(wrap_storage=untyped, dtype=getattr(torch, kind), _internal=True)

    def _fill(self, node: Node, shell: Any) -> None:
        value = self.value
        if _is_plain_tensor(node):
            for name, attribute in tensor_attributes(node):
                if type(name) is Text:
                    vars(shell)[str(name)] = value(attribute)
        elif type(node) is list:
            shell.extend(map(value, node))
        elif type(node) is Set:
            shell.update(map(value, node.elements))
        elif isinstance(shell, ForeignObject) and type(node) is Call:
            args = value(node.args)
            shell.args = args if isinstance(args, tuple) and isinstance(node.args, tuple) else (args,)
            if type(node.func) is not Global:
                shell.args = (value(node.func), *shell.args)
            shell.kwargs = value(node.kwargs)
            shell.state = value(node.state)
            if node.items is not None:
                shell.items = [(value(key), value(item)) for key, item in node.items]
            if node.elements is not None:
                shell.elements = list(map(value, node.elements))
        else:
            for key, item in pairs(node) or ():
                shell[value(key)] = value(item)
            if type(node) is Call:
                for name, attribute in attributes(node.state):
                    if type(name) is Text:
                        vars(shell)[str(name)] = value(attribute)
                values.add_elements(node, shell, value)

    def _impossible(self, node: Node, why: str) -> BadPickle:
        message = f"an object that Python cannot represent: {why}"
        return BadPickle(message, path=self.checkpoint.path, offset=getattr(node, "position", None))


def is_leaf(node: Node) -> bool:
    return type(node) not in _INNER


_INNER = frozenset((tuple, list, Dict, Set, Call, PersId))


def _is_storage(node: PersId) -> bool:
    pid = node.pid
    return type(pid) is tuple and len(pid) >= 5 and pid[0] == "storage"


def _is_plain_tensor(node: Node) -> TypeGuard[Call]:
    """Return whether the tensor can be made here. Others (DTensor, nested) become records of their call."""
    if not is_tensor(node) or type(node.func) is not Global:
        return False
    row = calls.of(node.func)
    inner = node.arguments[0] if node.arguments else None
    if row is calls.FROM_TYPE and type(inner) is Global:
        row = calls.of(inner)
        return row is not None and row.kind is not None and row.torch_alone
    return row is None or row.torch_alone


def _address(where: Where) -> str:
    parts = []
    before, name = where
    while before is not None:
        parts.append(name)
        before, name = before
    return "/".join(reversed(parts))


def mapping_of(node: Node) -> Mapping[str, Node]:
    """Return the string keys of a dict node and their nodes; an empty dict for any other node."""
    return {str(key): value for key, value in pairs(node) or () if type(key) is Text}
