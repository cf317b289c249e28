"""Items of a tree of values as plain values and text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from ckptfix.checkpoint.tree import (
    Item,
    ListValue,
    MapValue,
    NameValue,
    ObjectValue,
    TensorValue,
    Value,
    label,
    pairs_of,
)


def _call(item: Item) -> ObjectValue | None:
    """Return an object, or the call that makes a tensor; None for anything else."""
    if isinstance(item, TensorValue):
        return item.call
    return item if isinstance(item, ObjectValue) else None


def described(item: Item) -> str:
    """Return the kind of an item: the function of a call, or the name of a type."""
    call = _call(item)
    if call is not None:
        return call.maker.full if isinstance(call.maker, NameValue) else "Call"
    if isinstance(item, MapValue):
        return "dict"
    if isinstance(item, ListValue):
        return "Set" if item.kind in _SETS else item.kind
    return "PersId" if isinstance(item, Value) else type(item).__name__


MAX_BITS = 4096
"""Longest int, in bits, that is shown in decimal; longer ones are hexadecimal.

Python converts no int of more than 4,300 digits to decimal text.
"""

MAX_ITEMS = 1000
"""Most arguments of a foreign object that are shown: shared values can unfold without end."""


def plain(item: Item) -> Any:
    """Return an item as a plain value: a foreign object becomes a string that names its class and arguments."""
    # A sequence of plain values is returned whole, because a comparison of values must see all of it.
    if isinstance(item, ListValue) and item.kind not in _SETS:
        made = map(_scalar, item)
        return tuple(made) if item.kind == "tuple" else list(made)
    return _scalar(item)


def _scalar(item: Item) -> Any:
    """Return a leaf unchanged, and everything else as text."""
    if isinstance(item, str):
        return str(item)
    if type(item) is int and item.bit_length() > MAX_BITS:
        return hex(item)
    if isinstance(item, Value):
        return "".join(_in_words(item, [MAX_ITEMS]))
    return item


def _in_words(item: Item, left: list[int], depth: int = 0) -> Iterator[str]:
    """Yield the pieces of a description of `item`; `left` is how many more items may be shown."""
    left[0] -= 1
    if left[0] < 0 or depth > 4:
        yield "..."
    elif not isinstance(item, Value):
        text = repr(_scalar(item))
        yield text if len(text) <= 80 else text[:77] + "..."
    elif isinstance(item, NameValue):
        yield f"<{item.full}>"
    elif (call := _call(item)) is not None:
        yield f"<{described(item)}("
        args = call.args
        yield from _listed(args if isinstance(args, ListValue) and args.kind == "tuple" else (), left, depth)
        yield ")>"
    elif isinstance(item, MapValue):
        yield "{"
        yield from _listed([part for pair in islice(item.written(), max(left[0], 0)) for part in pair], left, depth)
        yield "}"
    elif not isinstance(item, ListValue):
        yield "<persistent id>"
    elif item.kind in _SETS:
        yield f"<{item.kind} of {item.count}>"
    else:
        yield "(" if item.kind == "tuple" else "["
        yield from _listed(item, left, depth)
        yield ")" if item.kind == "tuple" else "]"


def _listed(items: Iterable[Item], left: list[int], depth: int) -> Iterator[str]:
    for index, item in enumerate(items):
        if left[0] < 0:
            return
        if index:
            yield ", "
        yield from _in_words(item, left, depth + 1)


MAX_DEPTH = 16
"""Deepest nesting of containers that `versions_of` keeps; anything deeper becomes text."""

_KEYS = (str, int, float, bytes, type(None))


def _structured(item: Item, depth: int, made: dict[int, Any]) -> Any:
    """Return an item with its structure: mappings and sequences of plain values, of any depth.

    `made` caches the results, so that sharing does not unfold. Other values are as in `plain`.
    """
    if not isinstance(item, Value) or isinstance(item, NameValue) or depth > MAX_DEPTH:
        return plain(item)
    if item.identity in made:
        return made[item.identity]
    made[item.identity] = "..."  # shown where a cycle returns to this item
    rows = pairs_of(item)

    def inner(part: Item) -> Any:
        return _structured(part, depth + 1, made)

    value: Any
    if rows is not None:
        value = {key_of(key): inner(part) for key, part in rows}
    elif isinstance(item, ListValue) and item.kind not in _SETS:
        parts = [inner(part) for part in item]
        value = tuple(parts) if item.kind == "tuple" else parts
    elif isinstance(item, ObjectValue) and (literal := item.encoded) is not None:
        value = literal
    elif (elements := _elements(item)) is not None:
        value = elements
    else:
        value = plain(item)
    made[item.identity] = value
    return value


_SETS = {"set": set, "frozenset": frozenset}


def _elements(item: Item) -> Any:
    """Return a set of plain values, written as an opcode or, before protocol 4, as a call; None for any other item."""
    kind, parts = "", list[Item]()
    if isinstance(item, ListValue):
        kind, parts = item.kind, list(item)
    elif isinstance(item, ObjectValue) and isinstance(item.maker, NameValue) and len(item.arguments) == 1:
        given = item.arguments[0]
        if item.maker.canonical.startswith("builtins.") and isinstance(given, ListValue) and given.kind == "list":
            kind, parts = item.maker.name, list(given)
    if kind not in _SETS or not all(isinstance(part, _KEYS) for part in parts):
        return None
    return _SETS[kind](map(key_of, parts))


def key_of(item: Item) -> Any:
    """Return a key of a mapping as a plain value; for an object, its label in addresses."""
    if isinstance(item, ListValue) and item.kind == "tuple" and all(isinstance(part, _KEYS) for part in item):
        return tuple(map(key_of, item))
    return plain(item) if isinstance(item, _KEYS) else label(item)


def versions_of(metadata: Item) -> dict[str, dict[str, Any]] | None:
    """Return the ``_metadata`` of a state dict: module path -> the entries of the module; None without metadata."""
    if metadata is None:
        return None
    made: dict[int, Any] = {}
    return {
        label(path): {label(key): _structured(value, 0, made) for key, value in pairs_of(own) or ()}
        for path, own in pairs_of(metadata) or ()
    }
