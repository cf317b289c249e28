"""Tensors as a tree of modules, with similar layers folded into one line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ckptfix.checkpoint import TensorEntry
from ckptfix.cli.shared.tables import shape, size
from ckptfix.cli.shared.terminal_width import LEAST, cut
from ckptfix.errors import printable
from ckptfix.words import plural

DEPTH = 100
"""Maximum levels: a longer key keeps its rest in one piece, so no file can make the recursion deep."""


@dataclass(slots=True)
class TreeNode:
    """A module, or a tensor if it has an `entry`.

    Attributes:
        folded: the children, with runs of similar numbered ones folded into one.
        tensors, nbytes: totals of everything below.
        likeness: the same for nodes whose contents have the same names, dtypes, shapes and devices.
        last: name of the last sibling that was folded into this node.
        count: number of nodes that it represents; `tensors` and `nbytes` count all of them.
    """

    name: str
    entry: TensorEntry | None = None
    children: dict[str, TreeNode] = field(default_factory=dict)
    tensors: int = 0
    nbytes: int = 0
    folded: list[TreeNode] = field(default_factory=list)
    likeness: int = -1
    last: str = ""
    count: int = 1


def lines(entries: Iterable[TensorEntry], *, depth: int = DEPTH, width: int = 0) -> Iterator[str]:
    """Yield the tree of `entries`, indented by two spaces a level: modules with totals, tensors with dtype and shape.

    Args:
        depth: levels to show; deeper levels appear only in the totals.
        width: width of the terminal that a line must fit; 0 for complete lines.
    """
    root = _grow(entries)
    _fold(root, {})
    rows = list(_walk(root, 0, depth))
    labels = min(max((len(label) for label, _ in rows), default=0), 60)
    if width:
        details = max((len(detail) for _, detail in rows), default=0)
        labels = min(labels, max(width - details - 2, width // 2))
    for label, detail in rows:
        if width:
            indent = len(label) - len(label.lstrip(" "))
            label = " " * indent + cut(label.lstrip(" "), max(labels - indent, LEAST))
            detail = cut(detail, max(width - max(labels, len(label)) - 2, LEAST))
        yield f"{label.ljust(labels)}  {detail}".rstrip()


def _grow(entries: Iterable[TensorEntry]) -> TreeNode:
    root = TreeNode("")
    for entry in entries:
        parts = [f"{part}/" for part in entry.at.split("/") if part] + entry.key.split(".")
        if len(parts) > DEPTH:
            parts[DEPTH - 1 :] = [".".join(parts[DEPTH - 1 :])]
        path = [root]
        for part in parts[:-1]:
            path.append(path[-1].children.setdefault(part, TreeNode(part)))
        # A key may be both a tensor ("a") and a module ("a.b"); the colon keeps the two apart.
        path.append(path[-1].children.setdefault(f"{parts[-1]}:", TreeNode(parts[-1], entry)))
        for node in path:
            node.tensors += 1
            node.nbytes += entry.nbytes
    return root


def _fold(node: TreeNode, seen: dict[object, int]) -> None:
    """Set the likeness of every node, and fold its similar children."""
    for child in node.children.values():
        _fold(child, seen)
    entry = node.entry
    content: object = (
        tuple((name, child.likeness) for name, child in node.children.items())
        if entry is None
        else (entry.dtype, entry.shape, entry.location, entry.kind)
    )
    node.likeness = seen.setdefault(content, len(seen))
    node.folded = list(_runs(node.children.values()))


def _runs(children: Iterable[TreeNode]) -> Iterator[TreeNode]:
    """Yield `children`, with each run of similar numbered ones as one node: layers 0 to 11."""
    run: TreeNode | None = None
    for child in children:
        if run is not None and child.likeness == run.likeness and _follows(run.last or run.name, child.name):
            run.last = child.name
            run.count += 1
            run.tensors += child.tensors
            run.nbytes += child.nbytes
            continue
        if run is not None:
            yield run
        run = child
    if run is not None:
        yield run


def _follows(name: str, after: str) -> bool:
    """Return whether `after` is the number after `name`; numbers longer than 9 digits are not layer numbers."""
    return name.isdecimal() and after.isdecimal() and len(after) < 10 and str(int(name) + 1) == after


def _walk(node: TreeNode, level: int, depth: int) -> Iterator[tuple[str, str]]:
    for child in node.folded:
        label, count, bottom = _label(child), child.count, child
        while len(bottom.folded) == 1:
            (bottom,) = bottom.folded
            label += ("" if label.endswith("/") else ".") + _label(bottom)
            count *= bottom.count
        indent = "  " * level
        if bottom.entry is not None:
            times = f"{count} x " if count > 1 else ""
            yield indent + label, f"{times}{_tensor(bottom.entry)}"
        else:
            yield indent + label, f"{plural(child.tensors, 'tensor')}, {size(child.nbytes)}"
            if level + 1 < depth:
                yield from _walk(bottom, level + 1, depth)


def _label(node: TreeNode) -> str:
    return printable(f"{node.name}-{node.last}" if node.last else node.name)


def _tensor(entry: TensorEntry) -> str:
    device = "" if entry.location == "cpu" else f"  {entry.location}"
    return printable(f"{entry.dtype} {shape(entry.shape)}{device}")
