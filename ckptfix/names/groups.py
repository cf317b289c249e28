"""Compact listing of many parameter names: ``layers.0-11.attn.*`` instead of forty-eight names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field

from ckptfix.dataclass import dataclass

MAX_PARTS = 64
"""Components that are examined; the rest of a longer name counts as one. Modules are never nested so deeply."""


def layer_of(key: str, depth: int | None = None) -> str:
    """Return the part of a key that its layer shares: `depth` components, or those up to the first number."""
    parts = key.split(".")
    module = parts[:-1] or parts
    if depth is not None:
        return ".".join(module[:depth])
    first = next((index for index, part in enumerate(module) if part.isdecimal()), None)
    return ".".join(module if first is None else module[: first + 1])


@dataclass(frozen=True, slots=True)
class NameGroup:
    """The names that one pattern covers.

    Attributes:
        pattern: components; some may be ranges (``0-11``, ``0,2-5``), and the last may be ``*``.
        names: number of names that it covers.
    """

    pattern: str
    names: int

    def __str__(self) -> str:
        return self.pattern if self.names == 1 else f"{self.pattern} ({self.names})"


@dataclass(slots=True)
class _Node:
    """A component; `here` counts the names that end in it, `given` and `known` the names that pass through it."""

    children: dict[str, _Node] = field(default_factory=dict)
    here: int = 0
    given: int = 0
    known: int = 0


Below = tuple[tuple[tuple[str, ...], int], ...]
"""(components of a pattern, number of names that it covers); no components means a name that ends here."""


def collapse(names: Iterable[str], among: Iterable[str] = ()) -> tuple[NameGroup, ...]:
    """Return `names` as patterns, in the order of their first names.

    A module whose names are all given becomes ``module.*``. Numbered modules in which the same names are given become a
    range, so that the list shows which layers are meant.

    Args:
        names: the names to list.
        among: all other names; they decide whether a module is given as a whole.
    """
    wanted = tuple(dict.fromkeys(names))
    root = _Node()
    for name in wanted:
        _add(root, name, given=True)
    for name in dict.fromkeys((*wanted, *among)):
        _add(root, name, given=False)
    return tuple(NameGroup(".".join(parts), count) for parts, count in _children(root))


def shown(groups: Iterable[NameGroup], most: int = 8) -> str:
    """Return the groups in one line that shows at most `most` of them."""
    texts = [str(group) for group in groups]
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


def _add(root: _Node, name: str, *, given: bool) -> None:
    node = root
    for part in name.split(".", MAX_PARTS - 1):
        node = node.children.setdefault(part, _Node())
        if given:
            node.given += 1
        else:
            node.known += 1
    node.here += given


def _whole(node: _Node) -> bool:
    """Return whether everything below is given. Layers do not count: they are listed by number instead."""
    complete = node.given >= node.known and node.given > 1 and not node.here
    return complete and not any(part.isdecimal() for part in node.children)


def _children(node: _Node) -> Below:
    """Return everything that is given below `node`, merging numbered children whose contents are equal."""
    found: dict[tuple[str, Below], list[tuple[str, int]]] = {}
    for part, child in node.children.items():
        if not child.given:
            continue
        inside: Below = ((("*",), child.given),) if _whole(child) else _children(child)
        if child.here:
            inside = (((), 1), *inside)
        kind = "" if part.isdecimal() else part
        found.setdefault((kind, inside), []).append((part, child.given))
    rows: list[tuple[tuple[str, ...], int]] = []
    for (_, inside), parts in found.items():
        label = _ranges([part for part, _ in parts])
        rows += [((label, *pattern), count * len(parts)) for pattern, count in inside]
    return tuple(rows)


def _ranges(parts: list[str]) -> str:
    """Return ``0-3,5`` for 0, 1, 2, 3 and 5; a single part unchanged."""
    if len(parts) == 1:
        return parts[0]
    # Numbers with leading zeros or digits of other scripts are names, not layer numbers.
    plain = [part for part in parts if part == str(int(part))]
    runs: list[list[int]] = []
    for number in sorted(map(int, plain)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join(["-".join(map(str, run)) for run in runs] + [part for part in parts if part not in set(plain)])
