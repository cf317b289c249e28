"""The classes of the package, where each is defined, and which rooms import it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from package_trees import FILES, PACKAGE, parsed


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


class _Module(NamedTuple):
    """The public classes at the top of a module, and (module, name there, name here) of what it imports of ours."""

    classes: tuple[Defined, ...]
    imports: tuple[tuple[str, str, str], ...]


@cache
def modules() -> dict[str, _Module]:
    """Return what the modules of the package define and import, by their dotted names."""
    found = {}
    for path in FILES:
        parts = ("ckptfix", *path.relative_to(PACKAGE).with_suffix("").parts)
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        tree = parsed(path)
        found[name] = _Module(tuple(_classes(name, tree)), tuple(_imports(tree)))
    return found


@cache
def classes() -> dict[tuple[str, str], Defined]:
    """Return the public classes at the top of modules, by module and name."""
    return {(name, row.name): row for name, module in modules().items() for row in module.classes}


def _classes(module: str, tree: ast.Module) -> Iterator[Defined]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            text = ast.get_docstring(node) or ""
            yield Defined(module, node.name, " ".join(text.partition("\n\n")[0].split()))


def _imports(tree: ast.Module) -> Iterator[tuple[str, str, str]]:
    """Yield each name that a module imports from the package, wherever."""
    for node in statements(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "ckptfix":
            yield from ((node.module, alias.name, alias.asname or alias.name) for alias in node.names)


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements of a module at any depth, and no expression: those are nine tenths of the nodes."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for node in getattr(tree, field, ()):
            yield node
            yield from statements(node)


def origin(module: str, name: str) -> Defined | None:
    """Return the class that `module` has under `name`, followed through modules that import it; None for others."""
    seen = set()
    while (module, name) not in seen and module in modules():
        if (module, name) in classes():
            return classes()[module, name]
        seen.add((module, name))
        found = next(((there, other) for there, other, here in modules()[module].imports if here == name), None)
        if found is None:
            return None
        module, name = found
    return None


@cache
def shared() -> frozenset[Defined]:
    """Return the classes that a room other than their own imports: the nouns that the whole package uses."""
    found = set()
    for module in modules():
        for there, name, _ in modules()[module].imports:
            defined = origin(there, name)
            # The front of the package only hands names out.
            if defined is not None and room_of(module) not in ("", defined.room):
                found.add(defined)
    return frozenset(found)
