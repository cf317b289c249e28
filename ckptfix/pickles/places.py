"""Nodes of a graph by their addresses."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter

from ckptfix.errors import NoSuchTensor
from ckptfix.pickles.graph import Node, children


def node_at(root: Node, address: str, known: Mapping[str, Node] | None = None) -> Node:
    """Return the node at `address`. Arguments and errors: as for `NodesByAddress`."""
    return NodesByAddress(root, known)(address)


class NodesByAddress:
    """Lookup of nodes by address: labels joined by slashes, as the walk of a checkpoint produces them.

    Keys may hold slashes too. The labels in a node are read once, however many addresses begin with it.

    Args:
        known: the nodes that a walk found, by the addresses that it gave them. The walk may have numbered an
            address that two nodes would share, and no key has that numbered name.
    """

    def __init__(self, root: Node, known: Mapping[str, Node] | None = None) -> None:
        self._root = root
        self._known = known or {}
        self._labels: dict[int, dict[str, list[tuple[int, Node]]]] = {}

    def __call__(self, address: str) -> Node:
        """Return the node at `address`.

        Raises:
            NoSuchTensor: no node has this address.
        """
        if address in self._known:
            return self._known[address]
        # With cycles and shared nodes an address repeats, but no pair of node and rest is tried twice.
        stack = [(self._root, address)]
        seen: set[tuple[int, str]] = set()
        while stack:
            node, rest = stack.pop()
            if not rest:
                return node
            if (id(node), rest) not in seen:
                seen.add((id(node), rest))
                stack += self._below(node, rest)
        raise NoSuchTensor("the checkpoint has no such entry", where=address)

    def _below(self, node: Node, rest: str) -> list[tuple[Node, str]]:
        """Return the children that the address may continue with, in reverse order, because the last is tried first."""
        labels = self._labels.get(id(node))
        if labels is None:
            labels = self._labels[id(node)] = {}
            for number, (name, child) in enumerate(children(node)):
                labels.setdefault(name, []).append((number, child))
        found = [(*row, "") for row in labels.get(rest, ())]
        end = rest.find("/")
        while end >= 0:
            found += ((*row, rest[end + 1 :]) for row in labels.get(rest[:end], ()))
            end = rest.find("/", end + 1)
        return [(child, left) for _, child, left in sorted(found, key=itemgetter(0), reverse=True)]
