"""The classes of the package, where each is defined, and which rooms import it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[1] / "ckptfix"


class Defined(NamedTuple):
    """A class of the package: its module as a dotted name, its own name, and the first paragraph of its docstring."""

    module: str
    name: str
    summary: str

    @property
    def room(self) -> str:
        """The folder or loose module of the package that it is in."""
        return room_of(self.module)


def room_of(module: str) -> str:
    """Return the room of a module: ``io`` for ``ckptfix.io.remote.hub``, ``errors`` for ``ckptfix.errors``."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


@cache
def modules() -> dict[str, ast.Module]:
    """Return the parsed modules of the package by their dotted names."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ("ckptfix", *path.relative_to(PACKAGE).with_suffix("").parts)
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return found


@cache
def classes() -> dict[tuple[str, str], Defined]:
    """Return the public classes at the top of modules, by module and name."""
    found = {}
    for module, tree in modules().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                text = ast.get_docstring(node) or ""
                found[module, node.name] = Defined(module, node.name, " ".join(text.partition("\n\n")[0].split()))
    return found


def _imports(module: str) -> Iterator[tuple[str, str, str]]:
    """Yield (module, name there, name here) of each name that `module` imports from the package, wherever."""
    for node in ast.walk(modules()[module]):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "ckptfix":
            yield from ((node.module, alias.name, alias.asname or alias.name) for alias in node.names)


def origin(module: str, name: str) -> Defined | None:
    """Return the class that `module` has under `name`, followed through modules that import it; None for others."""
    seen = set()
    while (module, name) not in seen and module in modules():
        if (module, name) in classes():
            return classes()[module, name]
        seen.add((module, name))
        found = next(((there, other) for there, other, here in _imports(module) if here == name), None)
        if found is None:
            return None
        module, name = found
    return None


@cache
def shared() -> frozenset[Defined]:
    """Return the classes that a room other than their own imports: the nouns that the whole package uses."""
    found = set()
    for module in modules():
        for there, name, _ in _imports(module):
            defined = origin(there, name)
            # The front of the package only hands names out.
            if defined is not None and room_of(module) not in ("", defined.room):
                found.add(defined)
    return frozenset(found)
