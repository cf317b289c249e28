"""Contents of an object's state in any form: a dict, a slots pair, a tuple, a tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeGuard

from ckptfix.pickles import Call, Dict, Global
from ckptfix.pickles.graph import Node, attributes, is_attributes, labelled, pairs

SHARDED = "torch.distributed._shard.sharded_tensor.api.ShardedTensor"
SHARD = "torch.distributed._shard.sharded_tensor.shard.Shard"

STATE_FIELDS = {SHARDED: ("local_shards", "metadata", "process_group", "sharding_spec", "init_rrefs")}
"""Class -> the names of the fields in its state, a tuple (``ShardedTensor.__getstate__``)."""


def state_rows(cls: Node, state: Node) -> list[tuple[str, Node]]:
    """Return all that `state` sets on an object of the class `cls`, in any form, as (name, value), each once."""
    if state is None:
        return []
    if is_attributes(state):
        rows = list(labelled(attributes(state)))
    else:
        fields = STATE_FIELDS.get(cls.full, ()) if type(cls) is Global else ()
        if not (fields and type(state) is tuple and len(state) == len(fields)):
            return [("state", state)]
        rows = list(zip(fields, state, strict=True))
    return apart(rows)


def fields(node: Node) -> dict[str, Node]:
    """Return the string keys of a dict with their values, or the attributes of an object."""
    rows: Sequence[tuple[Node, Node]] | None = pairs(node)
    if rows is None:
        rows = state_rows(None, node.state) if type(node) is Call else ()
    return {str(key): value for key, value in rows if isinstance(key, str)}


def apart(rows: list[tuple[str, Node]]) -> list[tuple[str, Node]]:
    """Return the rows with names that are all different: 1 and '1' are two keys, but one text."""
    if len({name for name, _ in rows}) == len(rows):
        return rows
    seen: dict[str, int] = {}
    names = {name for name, _ in rows}
    out = []
    for name, child in rows:
        own, number = name, seen.get(name, 0) + 1
        while number > 1 and (own := f"{name}#{number}") in names:
            number += 1
        seen[name] = number
        out.append((own, child))
    return out


def is_shard(node: Node) -> TypeGuard[Call]:
    """Return whether `node` is a shard of a ShardedTensor, which states its place in the whole tensor."""
    return type(node) is Call and type(node.args) is tuple and type(node.func) is Global and (
        node.func.full == SHARD
        or (node.func.name in ("_reconstructor", "__newobj__") and bool(node.args)
            and type(node.args[0]) is Global and node.args[0].full == SHARD)
    )  # fmt: skip


def held(node: Node) -> list[tuple[str, Node]]:
    """Return the values in a plain container or a shard; an empty list for any other node."""
    if isinstance(node, (tuple, list)):
        return [(str(index), value) for index, value in enumerate(node)]
    if type(node) is Dict:
        return apart(list(labelled(pairs(node) or ())))
    if is_shard(node):
        return state_rows(None, node.state)
    return []


MAX_PARTS = 1 << 16
"""Most parts of one tensor, and most other rows, that are listed; no model has as many shards."""


def split(
    rows: list[tuple[str, Node]], is_part: Callable[[Node], bool]
) -> tuple[list[tuple[str, Node]], list[tuple[str, Node]]]:
    """Split `rows` into (name, node) of the parts inside tuples, lists, dicts and shards, and of everything else.

    A container without parts stays in one piece.

    Raises:
        TooManyParts: there are more parts than any tensor has.
    """
    parts: list[tuple[str, Node]] = []
    rest: list[tuple[str, Node]] = []
    open_nodes: set[int] = set()
    stack = [(name, value, 0) for name, value in reversed(rows)]
    while stack:
        name, node, depth = stack.pop()
        if is_part(node):
            parts.append((name, node))
        elif (below := held(node)) and id(node) not in open_nodes and depth < MAX_DEPTH:
            open_nodes.add(id(node))
            if not any(is_part(value) or held(value) for _, value in below):
                rest.append((name, node))
            else:
                short = is_shard(node)
                stack += [
                    (name if short and inner == "tensor" else f"{name}.{inner}", value, depth + 1)
                    for inner, value in reversed(below)
                ]
        else:
            rest.append((name, node))
        if len(parts) + len(rest) > MAX_PARTS:
            raise TooManyParts("the tensor has too many parts")
    return parts, rest


MAX_DEPTH = 16
"""Deepest nesting of containers that is searched for parts of a tensor; anything deeper has a separate address."""


class TooManyParts(ValueError):
    """A state with more parts than any tensor has."""
