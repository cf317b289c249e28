"""The object in a checkpoint as Python values: `load_checkpoint`.

A pickle's nodes become values in three passes without recursion: an empty shell for everything that can be filled
later, then what must be made from its parts (tuples, tensors, numpy arrays), then the shells are filled. So shared
objects are still shared, an object may contain itself, and depth is not limited.
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
from ckptfix.formats.torch.common import fields, parts_of, pickled
from ckptfix.formats.torch.plain import plain
from ckptfix.formats.torch.tensors import BadTensor, is_tensor, storage_entry, tensor_entry
from ckptfix.loaders import values
from ckptfix.loaders.opened import opened, opens_once
from ckptfix.loaders.tensors import TensorMaker, restore_location
from ckptfix.loaders.values import NOTHING, ForeignObject
from ckptfix.ops.choose import BROKEN, refuse_damaged
from ckptfix.pickles import Call, Dict, Global, PersId, Set
from ckptfix.pickles.collector import collector_paused
from ckptfix.pickles.graph import Node, Text, attributes, label, pairs

if TYPE_CHECKING:
    from ckptfix.loaders.tensors import MapLocation


MOST_IN_TUPLE = 1 << 24
"""Parts of a tuple, including the parts of tuples in it: hashing them takes some 0.2 s."""


@opens_once
def load_checkpoint(
    path: str | os.PathLike[str], *, map_location: MapLocation = None, mmap: bool = False, verify: bool = True
) -> Any:
    """The whole object in the checkpoint at `path`: tensors, and plain values with their Python types.

    Dicts (ordered, default and counting ones too), lists, tuples, sets, numbers, strings and bytes come back as what
    they were, torch.Size, torch.dtype, torch.device and numpy arrays and scalars as well; an attribute such as
    ``_metadata`` of a state dict comes with it. Whatever was one object is one object. What only another class could
    be is a `ForeignObject`: nothing is imported, nothing is called. The values of an
    ``argparse.Namespace`` are its record's `state`, a namedtuple's are its `args`. A tensor of a subclass is a plain
    tensor with the subclass's attributes, and a warning says so once; one that only its own library can rebuild
    (DTensor, nested) is a record of its parts.

    Args:
        map_location, mmap, verify: as for `load_state_dict`.

    Returns:
        What torch.load would give. Of safetensors, which hold nothing else, an OrderedDict of the tensors with the
        file's ``__metadata__`` as its attribute ``metadata``.

    Raises:
        WouldLoseData: a tensor of the file cannot be read; the message names it.
        DamagedFile: the pickle, or the data of a tensor, has another checksum than the file states.
        ChangedFile: the file was written to while it was read.
        BadPickle: Python could not hold the object, such as a dict with a list for a key.
        MissingExtra: torch is not installed.
    """
    need_torch("load_checkpoint")
    checkpoint = opened(path)
    maker = TensorMaker(checkpoint, restore_location(map_location), warn=True, verify=verify, mmap=mmap)
    parts = pickled(checkpoint)
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
    """The tensors and values of a format without an object, as mappings by address."""
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
"""The last part of an address, behind what comes before it."""


@dataclass(slots=True)
class _Step:
    """A node on the way down: `after` says that its parts are made."""

    node: Node
    where: Where
    after: bool = False


class Builder:
    """Makes Python values of the nodes of one checkpoint; each node once.

    Raises:
        WouldLoseData: a record of the file is not what its writer meant.
    """

    def __init__(self, checkpoint: Checkpoint, maker: TensorMaker) -> None:
        self.checkpoint = checkpoint
        self.maker = maker
        self.parts = parts_of(checkpoint)
        self.made: dict[int, object] = {}
        self.shells: list[tuple[Node, object]] = []
        self.unfolded: dict[int, int] = {}
        """``id`` of a tuple that was made -> how many parts it has, counted each time that they stand there."""
        for row in checkpoint.findings:
            # Depth is not limited here, and tensors are judged when they are made.
            if row.id in BROKEN - {"too-deep", "bad-tensor"}:
                raise WouldLoseData(row.message, path=checkpoint.path, where=row.where or None, offset=row.offset)

    def build(self, root: Node) -> object:
        """The value of the node `root`.

        Raises:
            BadPickle: no such object can be.
            WouldLoseData: a call that describes no tensor of the file.
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
        """Make `root` and everything below it; shells are left empty."""
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
                raise self._impossible(node, "it would have to exist before it is made")
            else:
                open_nodes.add(id(node))
                stack.append(_Step(node, step.where, True))
            stack += [_Step(child, (step.where, name)) for name, child in self._below(node)]

    def _below(self, node: Node) -> Iterator[tuple[str, Node]]:
        """(label, node) of all that the value of `node` is made of or filled with."""
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
        """What `node` became."""
        return values.leaf(node) if is_leaf(node) else self.made[id(node)]

    def _now(self, node: Node) -> object:
        """The value of arguments that must be whole at once: a list among them is not filled yet."""
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
        """`made`, unless it holds shared tuples so often that its hash would never be known: tuples keep none."""
        count = self.unfolded[id(made)] = 1 + sum(self.unfolded.get(id(part), 1) for part in made)
        if count > max(MOST_IN_TUPLE, 1 + len(made)):
            raise self._impossible(node, "tuples that stand in each other so often that their hash is never known")
        return made

    def _tensor(self, node: Call, where: Where) -> object:
        address = _address(where)
        at, _, key = address.rpartition("/")
        try:
            return self.maker(tensor_entry(node, key, at, self.parts.storages))
        except BadTensor as error:
            raise WouldLoseData(str(error), path=self.checkpoint.path, where=address) from None

    def _storage(self, node: PersId, where: Where) -> object:
        """A storage that stands by itself, or a persistent id that is not one."""
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
        message = f"an object that Python could not hold: {why}"
        return BadPickle(message, path=self.checkpoint.path, offset=getattr(node, "position", None))


def is_leaf(node: Node) -> bool:
    return type(node) not in _INNER


_INNER = frozenset((tuple, list, Dict, Set, Call, PersId))


def _is_storage(node: PersId) -> bool:
    pid = node.pid
    return type(pid) is tuple and len(pid) >= 5 and pid[0] == "storage"


def _is_plain_tensor(node: Node) -> TypeGuard[Call]:
    """A tensor that can be made here; others (DTensor, nested) become records of what would make them."""
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
    """String keys of a mapping node and their nodes; empty for any other node."""
    return {str(key): value for key, value in pairs(node) or () if type(key) is Text}
