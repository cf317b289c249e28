"""The tree of values in a checkpoint: mappings, lists, tensors, objects of foreign classes, and leaves.

Code that reads values uses these classes, whatever the format: only the format knows how its files spell them. A leaf
(None, bool, int, float, str, bytes, bytearray) represents itself. Everything else is a `Value`, and is a view: a format
creates it when code asks for it, so a file of many tensors has no object per tensor until it is walked.

Values may be shared and may contain themselves. Two views of one value are equal and have one `identity`: walk a tree
with a stack and a set of identities, never by recursion.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, TypeAlias

from ckptfix.checkpoint.address import keys_of
from ckptfix.checkpoint.tensors import TensorEntry
from ckptfix.errors import NoSuchTensor

Item: TypeAlias = "bool | int | float | bytes | bytearray | str | Value | None"
"""A leaf or a value."""

Pairs: TypeAlias = "Sequence[tuple[Item, Item]]"
"""(key, value) of a mapping, or (name, value) of attributes, in order."""


class Value:
    """A value that holds others. A format defines subclasses that read its own form of a value."""

    __slots__ = ()

    @property
    def identity(self) -> int:
        """A number that all views of one value have, and no other value of the tree."""
        return id(self)

    @property
    def offset(self) -> int | None:
        """The place in its source where the value is made; None if the source does not state one."""
        return None

    @property
    def label(self) -> str:
        """The part of an address that names an entry whose key is this value."""
        return f"<{type(self).__name__}>"

    @property
    def pairs(self) -> Pairs | None:
        """The items of a mapping, each key once; None for a value that is not a mapping."""
        return None

    @property
    def fields(self) -> Mapping[str, Item]:
        """The values under the text keys of a mapping, or the attributes of an object; empty for other values."""
        return {str(key): item for key, item in self.pairs or () if isinstance(key, str)}

    def children(self) -> Iterator[tuple[str, Item]]:
        """Yield (part of the address, item) for everything in the value that has an address."""
        return iter(())

    def parts(self) -> Iterable[Item]:
        """Return everything that the value holds, keys too, in no particular order."""
        return [part for _, part in self.children()]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Value) and self.identity == other.identity

    def __hash__(self) -> int:
        return hash(self.identity)


class ListValue(Value):
    """A list, tuple, set or frozenset."""

    __slots__ = ()

    @property
    def kind(self) -> Literal["list", "tuple", "set", "frozenset"]:
        """Its type."""
        raise NotImplementedError

    @property
    def count(self) -> int:
        """The number of its items."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Item]:
        """Yield the items, in order."""
        raise NotImplementedError

    def children(self) -> Iterator[tuple[str, Item]]:
        return ((str(index), item) for index, item in enumerate(self))

    def parts(self) -> Iterable[Item]:
        return self


class MapValue(Value):
    """A plain dict."""

    __slots__ = ()

    @property
    def pairs(self) -> Pairs:
        raise NotImplementedError

    def written(self) -> Iterator[tuple[Item, Item]]:
        """Yield the items as they were written, where a key may repeat."""
        return iter(self.pairs)

    def children(self) -> Iterator[tuple[str, Item]]:
        return ((label(key), item) for key, item in self.pairs)

    def parts(self) -> Iterable[Item]:
        return [part for row in self.pairs for part in row]


class NameValue(Value):
    """A class or a function, by its name; it is never imported.

    Attributes:
        module, name: as the source spells them.
    """

    __slots__ = ()

    @property
    def module(self) -> str:
        raise NotImplementedError

    @property
    def name(self) -> str:
        raise NotImplementedError

    @property
    def full(self) -> str:
        """``module.name``, as the source spells it."""
        return f"{self.module}.{self.name}"

    @property
    def canonical(self) -> str:
        """``module.name`` in Python 3, whatever version wrote it."""
        return self.full


class ObjectValue(Value):
    """An object of any other class: what would make it, and what would be set on it. Nothing is imported or called.

    An OrderedDict is one too, and its items are `pairs`.
    """

    __slots__ = ()

    @property
    def maker(self) -> Item:
        """The class or function that would be called: a `NameValue`, unless it is itself computed."""
        raise NotImplementedError

    @property
    def args(self) -> Item:
        """The arguments: a tuple, unless the file is malformed."""
        return _NOTHING

    @property
    def arguments(self) -> Sequence[Item]:
        """The items of `args` if that is a tuple; otherwise nothing."""
        args = self.args
        return tuple(args) if isinstance(args, ListValue) and args.kind == "tuple" else ()

    @property
    def kwargs(self) -> Item:
        """The keyword arguments: a mapping; None without any."""
        return None

    @property
    def items(self) -> Pairs | None:
        """The pairs that would be set on it, as they were written; None if none were."""
        return None

    @property
    def elements(self) -> Sequence[Item] | None:
        """The values that would be appended or added to it; None if none were."""
        return None

    @property
    def state(self) -> Item:
        """The value that would become its ``__dict__``, or go to its ``__setstate__``; None without one."""
        return None

    @property
    def attributes(self) -> Pairs:
        """(name, value) of the attributes in `state`: of a ``__dict__``, and of ``__slots__``."""
        return pairs_of(self.state) or ()

    @property
    def payload(self) -> frozenset[int]:
        """The `identity` of each part that its class consumes: the arguments, and a state that is not a dict."""
        state = None if isinstance(self.state, MapValue) else self.state
        return frozenset(identity(part) for part in (self.maker, self.args, self.kwargs, state) if part is not None)

    @property
    def encoded(self) -> bytes | None:
        """The bytes that the object holds, where the format of the file writes bytes as a call."""
        return None

    @property
    def cls(self) -> NameValue | None:
        """The class or function of the object, however the file spells the call; None if it is computed."""
        maker = self.maker
        return maker if isinstance(maker, NameValue) else None


class TensorValue(Value):
    """A tensor."""

    __slots__ = ()

    def entry(self, key: str, at: str) -> TensorEntry:
        """Return the tensor's entry, under a key of the mapping at `at`.

        Raises:
            CkptfixError: the file does not describe a tensor there.
        """
        raise NotImplementedError

    @property
    def call(self) -> ObjectValue | None:
        """The call that rebuilds the tensor, in a format that stores one."""
        return None

    @property
    def cls(self) -> NameValue | None:
        """The class of the tensor, if it is not one of torch's plain tensors and the file names it."""
        return None

    @property
    def is_plain(self) -> bool:
        """True if the call holds only numbers and a storage, as of most tensors; False if that is not known."""
        return False

    @property
    def by_torch(self) -> bool:
        """True if torch alone can make the tensor; otherwise only its own library can, as for DTensor."""
        return True

    @property
    def attributes(self) -> Pairs:
        """(name, value) of the attributes that a loader would set on the tensor."""
        return ()

    def children(self) -> Iterator[tuple[str, Item]]:
        return ((label(name), item) for name, item in self.attributes)


class ReferenceValue(Value):
    """A reference to something outside the tree that is not a storage."""

    __slots__ = ()

    @property
    def target(self) -> Item:
        """The content of the reference."""
        raise NotImplementedError

    def parts(self) -> Iterable[Item]:
        return (self.target,)


class StorageValue(Value):
    """A storage without a tensor around it.

    Attributes:
        untyped: it counts bytes, not elements of a dtype.
    """

    __slots__ = ()

    @property
    def untyped(self) -> bool:
        return False

    def entry(self, key: str, at: str) -> TensorEntry:
        """Return the storage as a flat tensor. Raises like the method of a tensor."""
        raise NotImplementedError


class ValueTree:
    """The values of a checkpoint: `root`, and the item at an address."""

    __slots__ = ()

    @property
    def root(self) -> Item:
        """The whole object."""
        raise NotImplementedError

    def at(self, address: str) -> Item:
        """Return the item at `address`.

        Raises:
            NoSuchTensor: the checkpoint has nothing there.
        """
        item = self.root
        for key in keys_of(address):
            below = item.children() if isinstance(item, Value) else ()
            found = [child for name, child in below if name == key]
            if not found:
                raise NoSuchTensor("the checkpoint has no such entry", where=address)
            item = found[-1]
        return item


def identity(item: Item) -> int:
    """Return a number that no other item of the tree has; equal leaves may share it."""
    return item.identity if isinstance(item, Value) else id(item)


def pairs_of(item: Item) -> Pairs | None:
    """Return the items of a mapping, each key once; None for anything else."""
    return item.pairs if isinstance(item, Value) else None


def fields(item: Item) -> Mapping[str, Item]:
    """Return the `fields` of a value; an empty mapping for a leaf."""
    return item.fields if isinstance(item, Value) else {}


def listed(item: Item) -> list[Item]:
    """Return the items of a list or tuple; an empty list for anything else."""
    return list(item) if isinstance(item, ListValue) and item.kind in ("list", "tuple") else []


def named(item: Item) -> dict[str, Item]:
    """Return the items of a mapping whose keys are text; an empty dict for anything else."""
    return {str(key): part for key, part in pairs_of(item) or () if isinstance(key, str)}


def label(key: Item) -> str:
    """Return the key of a mapping as a part of an address."""
    if isinstance(key, Value):
        return key.label
    if isinstance(key, int) and key.bit_length() > MAX_KEY_BITS:
        return hex(key)
    return str(key) if isinstance(key, str | int | float | bytes | None) else f"<{type(key).__name__}>"


MAX_KEY_BITS = 4096
"""Longest int, in bits, that is part of an address in decimal: Python converts no int of more than 4,300 digits."""


def every_value(root: Item) -> Iterator[Value]:
    """Yield every value at or below `root`, once, in no particular order, whatever it is held by."""
    seen: set[int] = set()
    stack = [root]
    while stack:
        item = stack.pop()
        if isinstance(item, Value) and item.identity not in seen:
            seen.add(item.identity)
            yield item
            stack += item.parts()


class _NoItems(ListValue):
    """An empty tuple."""

    __slots__ = ()

    @property
    def kind(self) -> Literal["tuple"]:
        return "tuple"

    @property
    def count(self) -> int:
        return 0

    def __iter__(self) -> Iterator[Item]:
        return iter(())


_NOTHING = _NoItems()


class _Entry(TensorValue):
    """The tensor of a format that stores tensors by key."""

    __slots__ = ("_entry",)

    def __init__(self, entry: TensorEntry) -> None:
        self._entry = entry

    def entry(self, key: str, at: str) -> TensorEntry:
        return self._entry


class _Name(NameValue):
    __slots__ = ("_module", "_name")

    def __init__(self, module: str, name: str) -> None:
        self._module, self._name = module, name

    @property
    def module(self) -> str:
        return self._module

    @property
    def name(self) -> str:
        return self._name


_ORDERED = _Name("collections", "OrderedDict")


class _Nested(MapValue):
    """A mapping of entries, leaves and further mappings, by key."""

    __slots__ = ("_rows",)

    def __init__(self, rows: Mapping[str, Item]) -> None:
        self._rows = rows

    @property
    def pairs(self) -> Pairs:
        return list(self._rows.items())


class _Top(ObjectValue):
    """The top level of a format that stores tensors by key: an OrderedDict with the metadata as an attribute."""

    __slots__ = ("_rows", "_state")

    def __init__(self, rows: Mapping[str, Item], metadata: Mapping[str, str]) -> None:
        self._rows = rows
        self._state = _Nested({"metadata": _Nested(metadata)}) if metadata else None

    @property
    def maker(self) -> Item:
        return _ORDERED

    @property
    def items(self) -> Pairs:
        return list(self._rows.items())

    @property
    def pairs(self) -> Pairs:
        return self.items

    @property
    def state(self) -> Item:
        return self._state

    def children(self) -> Iterator[tuple[str, Item]]:
        return iter(self._rows.items())


class EntryTree(ValueTree):
    """The tree of a format that stores no object: tensors and plain values, nested by their addresses.

    If a tensor and a mapping have one address, the mapping has a slash after its key.
    """

    __slots__ = ("_root",)

    def __init__(
        self,
        entries: Iterable[TensorEntry],
        values: Iterable[tuple[str, Item]] = (),
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        rows: dict[str, Item] = {}
        inner: dict[int, dict[str, Item]] = {}
        for entry in entries:
            _rows_at(rows, inner, entry.at)[entry.key] = _Entry(entry)
        for address, value in values:
            at, _, key = address.rpartition("/")
            _rows_at(rows, inner, at).setdefault(key, value)
        self._root = _Top(rows, metadata or {})

    @property
    def root(self) -> Item:
        return self._root


def _rows_at(rows: dict[str, Item], inner: dict[int, dict[str, Item]], at: str) -> dict[str, Item]:
    """Return the rows of the mapping at `at`, below `rows`; `inner` has the rows of each mapping, by identity."""
    for part in at.split("/") if at else ():
        held = rows.get(part)
        if part in rows and not isinstance(held, _Nested):
            part, held = f"{part}/", None
        if not isinstance(held, _Nested):
            below: dict[str, Item] = {}
            held = rows[part] = _Nested(below)
            inner[held.identity] = below
        rows = inner[held.identity]
    return rows
