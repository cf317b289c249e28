"""Loading the object in a checkpoint as Python values: `load_checkpoint`.

The items of its tree become Python values in three passes without recursion. First comes an empty shell for everything
that can be filled later, then whatever must be made from its parts (tuples, tensors, numpy arrays), and last the shells
are filled. So shared objects stay shared, an object may contain itself, and depth is not limited.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import repeat
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

from ckptfix.checkpoint import Checkpoint
from ckptfix.checkpoint.address import keys_of
from ckptfix.checkpoint.plain_values import plain
from ckptfix.checkpoint.tree import (
    Item,
    ListValue,
    MapValue,
    NameValue,
    ObjectValue,
    Pairs,
    ReferenceValue,
    StorageValue,
    TensorValue,
    Value,
    ValueTree,
    label,
)
from ckptfix.dataclass import dataclass
from ckptfix.errors import BadPickle, WouldLoseData
from ckptfix.extras import need_torch
from ckptfix.formats.torch.common import maybe_pickled_object
from ckptfix.formats.torch.tensors import BadTensor
from ckptfix.loaders import values
from ckptfix.loaders.open_for_loading import opened, opens_once
from ckptfix.loaders.tensors import TensorMaker, restore_location
from ckptfix.loaders.values import NOTHING, ForeignObject
from ckptfix.ops.choose import BROKEN, refuse_damaged

if TYPE_CHECKING:
    from ckptfix.loaders.tensors import MapLocation


MOST_IN_TUPLE = 1 << 24
"""Parts that a tuple may have, counting those of nested tuples. Hashing this many takes about 0.2 s."""


@opens_once
def load_checkpoint(
    path: str | os.PathLike[str],
    *,
    at: str = "",
    map_location: MapLocation = None,
    mmap: bool = False,
    verify: bool = True,
) -> Any:
    """Load the object in the checkpoint at `path`: tensors, and plain values with their Python types.

    Dicts (also OrderedDict, defaultdict and Counter), lists, tuples, sets, numbers, strings and bytes come back
    unchanged. So do torch.Size, torch.dtype, torch.device, numpy arrays and numpy scalars. Attributes such as the
    ``_metadata`` of a state dict are kept, and shared objects stay shared.

    An object of any other class becomes a `ForeignObject`: nothing is imported and nothing is called. The values of
    an ``argparse.Namespace`` are its attributes and items, those of a namedtuple are in its `args`. A tensor subclass
    becomes a plain tensor with the attributes of the subclass, and a warning says so once. A tensor that only its own
    library can rebuild (DTensor, nested) becomes a record of its parts.

    Args:
        at: the address of the part to load, as `inspect` shows it (``hyper_parameters``, ``optimizer/param_groups``);
            the tensors outside it are not read. Empty for the whole object.
        map_location, mmap, verify: as for `load_state_dict`.

    Returns:
        The object that torch.load would return, or its part. For safetensors, which hold only tensors, an OrderedDict
        of the tensors with the file's ``__metadata__`` as its attribute ``metadata``.

    Raises:
        NoSuchTensor: the checkpoint has nothing at `at`.
        WouldLoseData: a tensor of the file cannot be read; the message names it.
        DamagedFile: the checksum of the pickle, or of a tensor's data, does not match.
        ChangedFile: the file was written to while it was read.
        BadPickle: Python cannot represent the object, such as a dict with a list for a key.
        MissingExtra: torch is not installed.
    """
    need_torch("load_checkpoint")
    checkpoint = opened(path)
    maker = TensorMaker(checkpoint, restore_location(map_location), warn=True, verify=verify, mmap=mmap)
    found = Builder(checkpoint, maker).build(tree_of(checkpoint).at(at), at)
    maker.reading.refuse_changes()
    return found


load = load_checkpoint
"""The short name of `load_checkpoint`."""


def tree_of(checkpoint: Checkpoint) -> ValueTree:
    """Return the values of a checkpoint, in a format that stores no object too.

    Raises:
        WouldLoseData, DamagedFile: such a format's tensors cannot be read as their writer meant them.
    """
    if maybe_pickled_object(checkpoint) is None:
        _ = checkpoint.entries
        refuse_damaged(checkpoint)
    return checkpoint.tree


Where: TypeAlias = "tuple[Where | None, str]"
"""The last part of an address, after the parts that come before it."""


@dataclass(slots=True)
class _Step:
    """A value on the way down; `after` is true once its parts are made."""

    value: Value
    where: Where
    after: bool = False


class Builder:
    """Maker of Python values from the tree of one checkpoint; each value is made once.

    Raises:
        WouldLoseData: a record of the file cannot be read as its writer meant it.
    """

    def __init__(self, checkpoint: Checkpoint, maker: TensorMaker) -> None:
        self.checkpoint = checkpoint
        self.maker = maker
        self.made: dict[int, object] = {}
        self.shells: list[tuple[Value, object]] = []
        self.unfolded: dict[int, int] = {}
        """``id`` of a tuple that was made -> number of its parts, counting a shared part each time that it occurs."""
        for row in checkpoint.findings:
            # Depth is not limited here, and tensors are checked when they are made.
            if row.id in BROKEN - {"too-deep", "bad-tensor"}:
                raise WouldLoseData(row.message, path=checkpoint.path, where=row.where or None, offset=row.offset)

    def build(self, root: Item, at: str = "") -> object:
        """Return the value of the item `root`, whose address is `at`.

        Raises:
            BadPickle: Python cannot represent the object.
            WouldLoseData: a call does not describe a tensor of the file.
        """
        root = _described(root)
        if not has_parts(root):
            return values.leaf(root)
        where: Where = (None, "")
        for name in keys_of(at):
            where = (where, name)
        self._make(root, where)
        while self.shells:
            item, shell = self.shells.pop()
            try:
                self._fill(item, shell)
            except (TypeError, AttributeError) as error:
                raise self._impossible(item, str(error)) from None
        return self.made[root.identity]

    def _make(self, root: Value, where: Where) -> None:
        """Make `root`, whose address is `where`, and everything below it, leaving shells empty."""
        made = self.made
        stack = [_Step(root, where)]
        open_values: set[int] = set()
        while stack:
            step = stack.pop()
            item, where = step.value, step.where
            if (own := item.identity) in made:
                continue
            if step.after:
                open_values.discard(own)
                made[own] = self._from_parts(item, where)
                continue
            shell = self._tensor(item, where) if isinstance(item, TensorValue) else values.shell(item)
            if shell is not NOTHING:
                made[own] = shell
                self.shells.append((item, shell))
            elif own in open_values:
                raise self._impossible(item, "it is a part of itself, but must be made after its parts")
            else:
                open_values.add(own)
                stack.append(_Step(item, where, True))
            for name, child in self._below(item):
                part = _described(child)
                if has_parts(part):
                    stack.append(_Step(part, (where, name)))

    def _below(self, item: Value) -> Iterator[tuple[str, Item]]:
        """Yield (label, item) for everything that the value of `item` is made of or filled with."""
        if isinstance(item, TensorValue):
            yield from ((label(name), part) for name, part in item.attributes)
        elif isinstance(item, ListValue):
            names = map(str, range(item.count)) if item.kind in ("list", "tuple") else repeat("element")
            yield from zip(names, item, strict=False)
        elif isinstance(item, MapValue):
            yield from self._below_keys(item.pairs)
        elif isinstance(item, ObjectValue):
            yield from (("()", part) for part in (item.args, item.kwargs, item.state))
            if not isinstance(item.maker, NameValue):
                yield "()func", item.maker
            yield from self._below_keys(item.pairs or item.items or ())
            yield from ((str(index), part) for index, part in enumerate(item.elements or ()))

    def _below_keys(self, rows: Pairs) -> Iterator[tuple[str, Item]]:
        for key, part in rows:
            yield "key", key
            yield label(key), part

    def value(self, item: Item) -> object:
        """Return the value made from `item`."""
        item = _described(item)
        return self.made[item.identity] if has_parts(item) else values.leaf(item)

    def _now(self, item: Item) -> object:
        """Return the value of arguments that are needed at once; lists among them are not filled yet, so copy them."""
        if not isinstance(item, ListValue) or item.kind != "tuple":
            return self.value(item)
        return tuple([[*map(self.value, part)] if _is_list(part) else self.value(part) for part in item])

    def _from_parts(self, item: Value, where: Where) -> object:
        if isinstance(item, ListValue):
            if item.kind == "tuple":
                return self._told_apart(item, tuple(map(self.value, item)))
            try:
                return frozenset(map(self.value, item))
            except TypeError as error:
                raise self._impossible(item, str(error)) from None
        if isinstance(item, StorageValue):
            return self._storage(item, where)
        if isinstance(item, ReferenceValue):
            return ForeignObject("", "persistent id", (plain(item.target),))
        assert isinstance(item, ObjectValue)
        made = values.called(item, self._now)
        if made is NOTHING:
            made = ForeignObject.empty(item)
            self.shells.append((item, made))
        return self._told_apart(item, made) if isinstance(made, tuple) and type(made) is tuple else made

    def _told_apart(self, item: Value, made: tuple[object, ...]) -> tuple[object, ...]:
        """Return `made`; refuse nested shared tuples that would make hashing endless, as tuples cache no hash."""
        count = self.unfolded[id(made)] = 1 + sum(self.unfolded.get(id(part), 1) for part in made)
        if count > max(MOST_IN_TUPLE, 1 + len(made)):
            raise self._impossible(item, "its tuples are nested and shared so often that hashing them would never end")
        return made

    def _tensor(self, item: TensorValue, where: Where) -> object:
        address = _address(where)
        at, _, key = address.rpartition("/")
        try:
            return self.maker(item.entry(key, at))
        except BadTensor as error:
            raise WouldLoseData(str(error), path=self.checkpoint.path, where=address) from None

    def _storage(self, item: StorageValue, where: Where) -> object:
        """Return a storage that belongs to no tensor."""
        import torch

        try:
            entry = item.entry(_address(where), "")
            tensor = self.maker(entry)
        except BadTensor as error:
            raise WouldLoseData(str(error), path=self.checkpoint.path, where=_address(where)) from None
        untyped = tensor.untyped_storage()
        if item.untyped:
            return untyped
        return torch.TypedStorage(wrap_storage=untyped, dtype=getattr(torch, entry.dtype), _internal=True)

    def _fill(self, item: Value, shell: Any) -> None:
        value = self.value
        if isinstance(item, TensorValue):
            self._set(shell, item.attributes)
        elif isinstance(item, ListValue):
            (shell.update if item.kind == "set" else shell.extend)(map(value, item))
        elif isinstance(shell, ForeignObject) and isinstance(item, ObjectValue):
            args = value(item.args)
            own = item.args
            shell.args = args if isinstance(args, tuple) and isinstance(own, ListValue) else (args,)
            if not isinstance(item.maker, NameValue):
                shell.args = (value(item.maker), *shell.args)
            shell.kwargs = value(item.kwargs)
            shell.state = value(item.state)
            if item.items is not None:
                shell.items = [(value(key), value(part)) for key, part in item.items]
            if item.elements is not None:
                shell.elements = list(map(value, item.elements))
        else:
            for key, part in item.pairs or ():
                shell[value(key)] = value(part)
            if isinstance(item, ObjectValue):
                self._set(shell, item.attributes)
                values.add_elements(item, shell, value)

    def _set(self, shell: object, attributes: Pairs) -> None:
        for name, part in attributes:
            if isinstance(name, str):
                vars(shell)[str(name)] = self.value(part)

    def _impossible(self, item: Value, why: str) -> BadPickle:
        message = f"an object that Python cannot represent: {why}"
        return BadPickle(message, path=self.checkpoint.path, offset=item.offset)


def has_parts(item: Item) -> TypeGuard[Value]:
    """Return whether the value of an item is made of others, or of data. A class by its name is not."""
    return isinstance(item, Value) and not isinstance(item, NameValue)


def _described(item: Item) -> Item:
    """Return the call that makes a tensor if torch alone cannot make it (DTensor, nested); otherwise `item`."""
    if isinstance(item, TensorValue) and not item.by_torch:
        return item.call
    return item


def _is_list(item: Item) -> TypeGuard[ListValue]:
    return isinstance(item, ListValue) and item.kind == "list"


def _address(where: Where) -> str:
    parts = []
    before, name = where
    while before is not None:
        parts.append(name)
        before, name = before
    return "/".join(reversed(parts))
