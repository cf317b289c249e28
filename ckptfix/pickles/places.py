"""Nodes of a graph by their addresses."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter

from ckptfix.errors import NoSuchTensor
from ckptfix.pickles.graph import Node, children


def node_at(root: Node, address: str, known: Mapping[str, Node] | None = None) -> Node:
    """The node at `address`. Arguments and errors as those of `Places`."""
    return Places(root, known)(address)


class Places:
    """Nodes by their addresses: labels joined by slashes, as the walk of a checkpoint gives them; keys may
    hold slashes too.

    The labels in a node are read once, however many addresses begin with it.

    Args:
        known: the nodes that a walk found, by the addresses that it gave them. It may have numbered an address that
            two of them would have, and no key is called so.
    """

    def __init__(self, root: Node, known: Mapping[str, Node] | None = None) -> None:
        self._root = root
        self._known = known or {}
        self._labels: dict[int, dict[str, list[tuple[int, Node]]]] = {}

    def __call__(self, address: str) -> Node:
        """The node at `address`.

        Raises:
            NoSuchTensor: there is none.
        """
        if address in self._known:
            return self._known[address]
        # Cycles and shared nodes repeat addresses, never (node, rest of the address).
        stack = [(self._root, address)]
        seen: set[tuple[int, str]] = set()
        while stack:
            node, rest = stack.pop()
            if not rest:
                return node
            if (id(node), rest) not in seen:
                seen.add((id(node), rest))
                stack += self._below(node, rest)
        raise NoSuchTensor("no such place", where=address)

    def _below(self, node: Node, rest: str) -> list[tuple[Node, str]]:
        """What in `node` the address may go on with; the last is the first to try: it stands before the others."""
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
