"""Tensor classes of libraries that register them with ``torch.serialization`` when they are imported.

A file with such tensors is intact: ``torch.load(weights_only=True)`` accepts it after the import. Plain values in their
place would be the parts of the tensors, which no framework loads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ckptfix.formats.torch import calls, weights_only
from ckptfix.pickles import Call, Global, Graph
from ckptfix.pickles.reemit import every_node


@dataclass(frozen=True, slots=True)
class Library:
    """A row of the table.

    Attributes:
        name: name of the package.
        prefixes: beginnings of the names that it registers.
        statement: statement to run before torch.load.
        makers: functions that build its tensors where torch has no rebuild call for them.
    """

    name: str
    prefixes: tuple[str, ...]
    statement: str
    makers: frozenset[str] = frozenset()

    def has(self, name: str) -> bool:
        """Return whether a global is the library's."""
        return any(name == prefix or name.startswith(f"{prefix}.") for prefix in self.prefixes)


LIBRARIES: tuple[Library, ...] = (
    Library("torchao", ("torchao",), "import torchao"),
    Library("tensordict", ("tensordict",), "import tensordict", frozenset({"tensordict._reductions._make_td"})),
    Library(
        "torch.nested",
        ("torch.nested", "torch._dynamo.decorators"),
        "import torch.nested, torch._dynamo",
        frozenset({"torch.nested._internal.nested_tensor._rebuild_njt"}),
    ),
)


def library_of(name: str) -> Library | None:
    """Return the library that has a class or function of this name."""
    return next((row for row in LIBRARIES if row.has(name)), None)


def libraries(graph: Graph) -> tuple[Library, ...]:
    """Return the libraries whose tensors are in the pickle."""
    named = {weights_only.canonical(node) for node in graph.globals}
    possible = [row for row in LIBRARIES if any(map(row.has, named))]
    if not possible:
        return ()
    classes = set(_classes(graph))
    return tuple(row for row in possible if row.makers & named or any(map(row.has, classes)))


def _classes(graph: Graph) -> Iterator[str]:
    """Yield the classes of the tensors that rebuild calls make."""
    for node in every_node(graph.root):
        if type(node) is not Call or type(node.args) is not tuple:
            continue
        row = calls.of(node.func)
        place = None if row is None else 1 if row.kind == "subclass" else 0 if row.kind == "wrapper" else None
        if place is not None and len(node.args) > place and type(cls := node.args[place]) is Global:
            yield weights_only.canonical(cls)
