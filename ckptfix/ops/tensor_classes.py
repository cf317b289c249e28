"""Tensor classes of libraries that register them with ``torch.serialization`` when they are imported.

A file with such tensors is intact: ``torch.load(weights_only=True)`` accepts it after the import. Plain values in their
place would be the parts of the tensors, which no framework loads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ckptfix.dataclass import dataclass

if TYPE_CHECKING:
    from ckptfix.checkpoint.tree import Item


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


def libraries(names: Iterable[str], root: Callable[[], Item]) -> tuple[Library, ...]:
    """Return the libraries whose tensors are in the object of `root`, which names these classes and functions."""
    named = set(names)
    possible = [row for row in LIBRARIES if any(map(row.has, named))]
    if not possible:
        return ()
    from ckptfix.checkpoint.tree import TensorValue, every_value

    tensors = (value for value in every_value(root()) if isinstance(value, TensorValue))
    classes = {cls.canonical for tensor in tensors if (cls := tensor.cls) is not None}
    return tuple(row for row in possible if row.makers & named or any(map(row.has, classes)))
