"""What an object's state holds, whatever its form: a dict, a slots pair, a tuple, a tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeGuard

from ckptfix.pickles import Call, Dict, Global
from ckptfix.pickles.graph import Node, attributes, is_attributes, labelled, pairs

SHARDED = "torch.distributed._shard.sharded_tensor.api.ShardedTensor"
SHARD = "torch.distributed._shard.sharded_tensor.shard.Shard"

STATE_FIELDS = {SHARDED: ("local_shards", "metadata", "process_group", "sharding_spec", "init_rrefs")}
"""Class -> the names of what its state is a tuple of (``ShardedTensor.__getstate__``)."""


def state_rows(cls: Node, state: Node) -> list[tuple[str, Node]]:
    """What `state` sets on an object of the class `cls`, as (name, value), whatever its form; all of it, once."""
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


def apart(rows: list[tuple[str, Node]]) -> list[tuple[str, Node]]:
    """The same with names that are all different: 1 and '1' are two keys, and one text."""
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
    """Whether `node` is a part of a ShardedTensor, with its place in the whole."""
    return type(node) is Call and type(node.args) is tuple and type(node.func) is Global and (
        node.func.full == SHARD
        or (node.func.name in ("_reconstructor", "__newobj__") and bool(node.args)
            and type(node.args[0]) is Global and node.args[0].full == SHARD)
    )  # fmt: skip


def held(node: Node) -> list[tuple[str, Node]]:
    """What a plain container or a shard holds; empty for all else."""
    if isinstance(node, (tuple, list)):
        return [(str(index), value) for index, value in enumerate(node)]
    if type(node) is Dict:
        return apart(list(labelled(pairs(node) or ())))
    if is_shard(node):
        return state_rows(None, node.state)
    return []


MAX_PARTS = 1 << 16
"""Parts of one tensor, and rows beside them, that are listed; no model has as many shards."""


def split(
    rows: list[tuple[str, Node]], is_part: Callable[[Node], bool]
) -> tuple[list[tuple[str, Node]], list[tuple[str, Node]]]:
    """(name, node) of the parts that `rows` hold in tuples, lists, dicts and shards; and of all else in them.

    What holds no part so remains in one piece.

    Raises:
        TooManyParts: more than any tensor has.
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
            raise TooManyParts("a tensor made of too many parts")
    return parts, rest


MAX_DEPTH = 16
"""Containers in containers in which parts of a tensor are looked for; what is deeper has a separate address."""


class TooManyParts(ValueError):
    """A state that holds more parts than any tensor has."""
