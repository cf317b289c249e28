"""Named things as a tree of modules, in which similar numbered siblings are found: layers 0 to 11."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import field
from typing import Generic, TypeVar

from ckptfix.dataclass import dataclass

SIMILAR = 3
"""Minimum number of similar modules that are shown as one where each of them can still be shown."""

Item = TypeVar("Item")


@dataclass(slots=True)
class KeyNode(Generic[Item]):
    """A module or mapping, or a leaf if it has an `item`.

    Attributes:
        name: its component of the names, with the final dot or slash.
        likeness: the same for nodes with equal contents.
    """

    name: str
    item: Item | None = None
    children: dict[str, KeyNode[Item]] = field(default_factory=dict)
    likeness: int = -1

    @property
    def word(self) -> str:
        """The name without a final dot or slash."""
        return self.name if self.item is not None else self.name[:-1]

    def items(self) -> Iterator[Item]:
        """Yield the items at and below the node."""
        if self.item is not None:
            yield self.item
        for child in self.children.values():
            yield from child.items()

    def runs(self, folds: Callable[[KeyNode[Item]], bool]) -> list[list[KeyNode[Item]]]:
        """Return the children in groups: similar ones with consecutive numbers are one, if `folds` is true of them."""
        found: list[list[KeyNode[Item]]] = []
        for child in self.children.values():
            last = found[-1][-1] if found else None
            if (
                last is not None
                and last.likeness == child.likeness
                and follows(last.word, child.word)
                and folds(last)
                and folds(child)
            ):
                found[-1].append(child)
            else:
                found.append([child])
        return found


def label_of(run: list[KeyNode[Item]]) -> str:
    """Return the name of a group of similar nodes, such as ``0-11.``; that of a lone node is its own."""
    return run[0].name if len(run) == 1 else f"{run[0].word}-{run[-1].name}"


def follows(word: str, after: str) -> bool:
    """Return whether `after` is the number after `word`; numbers longer than nine digits are not layer numbers."""
    return word.isdecimal() and after.isdecimal() and len(after) < 10 and str(int(word) + 1) == after


def outline(items: Iterable[tuple[str, str, object, Item]], depth: int) -> KeyNode[Item]:
    """Return the root of the tree of `items`.

    Args:
        items: (address of the mapping, key, a value that is equal for similar items, the item).
        depth: maximum levels; a longer name keeps its rest in one piece, so no file can make the tree deep.
    """
    root: KeyNode[Item] = KeyNode("")
    seen: dict[object, int] = {}
    for at, key, like, item in items:
        parts = [f"{part}/" for part in at.split("/") if part] + [f"{part}." for part in key.split(".")]
        parts[-1] = parts[-1][:-1]
        if len(parts) > depth:
            parts[depth - 1 :] = ["".join(parts[depth - 1 :])]
        node = root
        for part in parts[:-1]:
            node = node.children.setdefault(part, KeyNode(part))
        name, count = f"{parts[-1]}:", 0  # the colon keeps a leaf "a." apart from a module
        while name in node.children:
            count += 1
            name = f"{parts[-1]}:{count}"
        node.children[name] = KeyNode(parts[-1], item, likeness=seen.setdefault(like, len(seen)))
    _liken(root, seen)
    return root


def _liken(node: KeyNode[Item], seen: dict[object, int]) -> None:
    if node.item is not None:
        return
    for child in node.children.values():
        _liken(child, seen)
    content = tuple((name, child.likeness) for name, child in node.children.items())
    node.likeness = seen.setdefault(content, len(seen))
