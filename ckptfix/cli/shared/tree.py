"""Tensors as a tree of modules, with similar layers folded into one line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ckptfix.checkpoint import TensorEntry
from ckptfix.cli.shared.tables import shape, size
from ckptfix.cli.shared.terminal_width import LEAST, cut
from ckptfix.errors import printable
from ckptfix.names.outline import KeyNode, label_of, outline
from ckptfix.words import plural

DEPTH = 100
"""Maximum levels."""


def lines(entries: Iterable[TensorEntry], *, depth: int = DEPTH, width: int = 0) -> Iterator[str]:
    """Yield the tree of `entries`, indented by two spaces a level: modules with totals, tensors with dtype and shape.

    Args:
        depth: levels to show; deeper levels appear only in the totals.
        width: width of the terminal that a line must fit; 0 for complete lines.
    """
    root = outline(
        ((one.at, one.key, (one.dtype, one.shape, one.location, one.kind), one) for one in entries), DEPTH
    )
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


def _folds(node: KeyNode[TensorEntry]) -> bool:
    return not node.name.endswith("/")


def _walk(node: KeyNode[TensorEntry], level: int, depth: int) -> Iterator[tuple[str, str]]:
    for run in node.runs(_folds):
        label, count, bottom = label_of(run), len(run), run[0]
        while len(below := bottom.runs(_folds)) == 1:
            label += label_of(below[0])
            count *= len(below[0])
            bottom = below[0][0]
        indent = "  " * level
        if bottom.item is not None:
            times = f"{count} x " if count > 1 else ""
            yield indent + printable(label), f"{times}{_tensor(bottom.item)}"
        else:
            held = [entry for child in run for entry in child.items()]
            total = size(sum(entry.nbytes for entry in held))
            yield indent + printable(label.removesuffix(".")), f"{plural(len(held), 'tensor')}, {total}"
            if level + 1 < depth:
                yield from _walk(bottom, level + 1, depth)


def _tensor(entry: TensorEntry) -> str:
    device = "" if entry.location == "cpu" else f"  {entry.location}"
    return printable(f"{entry.dtype} {shape(entry.shape)}{device}")
