"""Mutants of the package's own code: one small change each, in a function that a file's safety hangs on.

A mutant is drawn by a sum of what it changes, so that the same are drawn again while the code around them changes.
Only bodies of functions are changed: a function that is there already gets the new code, and nothing is imported anew.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType
from zlib import crc32

ROOMS = (
    "checkpoint/edits.py", "checkpoint/byte_ranges.py", "checkpoint/file_version.py", "formats/dcp/edit.py",
    "formats/dcp/write.py", "formats/safetensors/edit.py",
    "formats/safetensors/header.py", "formats/safetensors/write.py", "formats/shards/edit.py",
    "formats/shards/layout.py", "formats/shards/write.py", "formats/torch/edit.py", "formats/torch/emit.py",
    "formats/torch/legacy_layout.py", "formats/torch/put_tensors.py", "formats/torch/containers.py",
    "formats/torch/rewrite.py", "formats/torch/zip_layout.py", "io/background_checks.py", "io/copy.py",
    "io/durable.py", "io/folders.py", "io/inplace", "io/output.py", "io/virtual_files.py", "io/sources.py",
    "io/write.py", "ops/inplace.py", "ops/audit", "ops/undo.py", "ops/writing.py", "pickles/emit.py",
    "pickles/graph.py", "pickles/machine.py", "pickles/patch.py", "pickles/reemit.py", "zips",
)  # fmt: skip
"""Of the package: what reads pickles and archives, plans, writes, and counts what was written."""

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.Mod: ast.Mult,
}  # fmt: skip
DROPPED = (ast.AugAssign, ast.Break, ast.Continue, ast.Delete, ast.Raise)

Function = ast.FunctionDef | ast.AsyncFunctionDef
Change = Callable[[ast.AST], ast.AST]


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change of one node: the `place`-th that can be changed so in its function."""

    file: str
    """Below the package, with slashes."""
    function: str
    """Qualified, the outermost one that is no method of a local class: its code holds the code of inner ones."""
    first: int
    """The line on which the function begins."""
    line: int
    kind: str
    place: int
    before: str
    after: str

    @property
    def what(self) -> str:
        """Without the number of the line: it names the mutant for as long as the code that it changes."""
        return f"{self.file}: {self.function}: {self.kind}: {self.before} -> {self.after} #{self.place}"

    def __str__(self) -> str:
        return f"ckptfix/{self.file}:{self.line} {self.function}: {self.before}  ->  {self.after}"


def _negated(node: ast.expr) -> ast.expr:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return node.operand
    return ast.UnaryOp(ast.Not(), node)


def _compare(at: int) -> Change:
    def done(node: ast.AST) -> ast.AST:
        assert isinstance(node, ast.Compare)
        node.ops[at] = COMPARISONS[type(node.ops[at])]()
        return node

    return done


def _other_filter(node: ast.AST) -> ast.AST:
    assert isinstance(node, ast.comprehension)
    node.ifs[0] = _negated(node.ifs[0])
    return node


def _with(field: str, change: Callable[[ast.expr], ast.expr]) -> Change:
    def done(node: ast.AST) -> ast.AST:
        setattr(node, field, change(getattr(node, field)))
        return node

    return done


def _constant(node: ast.AST) -> ast.AST:
    assert isinstance(node, ast.Constant)
    value = node.value
    if isinstance(value, bool):
        return ast.Constant(not value)
    assert isinstance(value, int)
    return ast.Constant(value + 1)


def changes(node: ast.AST) -> Iterator[tuple[str, Change]]:
    """(kind, change) of every change that can be made at this node itself."""
    if isinstance(node, ast.Compare):
        for at, op in enumerate(node.ops):
            if type(op) in COMPARISONS:
                yield "comparison", _compare(at)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield "constant", _constant
    elif isinstance(node, ast.BoolOp):
        other = ast.Or if isinstance(node.op, ast.And) else ast.And
        yield "and, or", lambda new: ast.BoolOp(other(), new.values)  # type: ignore[attr-defined]
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS and not isinstance(node.left, ast.JoinedStr):
        operator = OPERATORS[type(node.op)]
        yield "operator", lambda new: ast.BinOp(new.left, operator(), new.right)  # type: ignore[attr-defined]
    elif isinstance(node, ast.If | ast.While | ast.IfExp):
        yield "condition", _with("test", _negated)
    elif isinstance(node, ast.comprehension) and node.ifs:
        yield "condition", _other_filter
    elif isinstance(node, ast.Return) and node.value is not None:
        if not (isinstance(node.value, ast.Constant) and node.value.value in (None, False)):
            yield "return", lambda new: ast.Return(ast.Constant(None))
    elif isinstance(node, DROPPED) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.YieldFrom)):
        yield "statement", lambda new: ast.Pass()


def _shown(node: ast.AST) -> str:
    """The first line of a node's source."""
    if isinstance(node, ast.comprehension):
        return " if ".join(["", *map(ast.unparse, node.ifs)]).strip()
    lines = ast.unparse(node).splitlines()
    return lines[0] + (" ..." if len(lines) > 1 else "")


def _inside(function: Function) -> Iterator[ast.AST]:
    """The nodes of a body that do something: without docstrings, annotations, decorators and assertions."""
    waiting: list[ast.AST] = list(reversed(function.body))
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Assert):
            continue
        yield node
        skipped: set[int] = set()
        if isinstance(node, ast.AnnAssign):
            skipped = {id(node.annotation)}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            skipped = {id(node.args), id(node.returns), *map(id, node.decorator_list)}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "cast":
            skipped = {id(node.args[0])}
        waiting += reversed([child for child in ast.iter_child_nodes(node) if id(child) not in skipped])


def functions(tree: ast.Module) -> Iterator[tuple[str, Function]]:
    """(qualified name, function) of the module's functions and of the methods of its classes."""
    waiting: list[tuple[str, ast.AST]] = [("", tree)]
    while waiting:
        before, node = waiting.pop()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                waiting.append((f"{before}{child.name}.", child))
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield before + child.name, child


def _sites(function: Function) -> Iterator[tuple[str, int, ast.AST, Change]]:
    """(kind, number among its kind, node, change), always in the same order."""
    seen: dict[str, int] = {}
    for node in _inside(function):
        for kind, change in changes(node):
            seen[kind] = seen.get(kind, -1) + 1
            yield kind, seen[kind], node, change


def mutants_of(package: Path, file: str) -> Iterator[Mutant]:
    tree = ast.parse((package / file).read_text(encoding="utf-8"))
    for name, function in functions(tree):
        line = function.lineno
        for kind, place, node, change in _sites(function):
            line = getattr(node, "lineno", line)
            after = _shown(change(copy.deepcopy(node)))
            yield Mutant(file, name, function.lineno, line, kind, place, _shown(node), after)


@cache
def _every(package: Path, rooms: tuple[str, ...]) -> tuple[Mutant, ...]:
    files = sorted(
        path.relative_to(package).as_posix()
        for room in rooms
        for path in ([package / room] if room.endswith(".py") else (package / room).glob("*.py"))
    )
    return tuple(mutant for file in files for mutant in mutants_of(package, file))


def drawn(package: Path, how_many: int, rooms: Sequence[str] = ROOMS, seed: int = 0) -> list[Mutant]:
    """So many of all mutants of `rooms`, in the order of the files; with another seed it draws others."""
    chosen = sorted(_every(package, tuple(rooms)), key=lambda mutant: crc32(mutant.what.encode(), seed))[:how_many]
    return sorted(chosen, key=lambda mutant: (mutant.file, mutant.line, mutant.what))


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        if node is self.old:
            return ast.copy_location(self.new, node) if "lineno" in node._attributes else self.new
        return self.generic_visit(node)


def code_of(package: Path, mutant: Mutant) -> CodeType:
    """The code of the mutant's function, changed."""
    path = package / mutant.file
    tree = ast.parse(path.read_text(encoding="utf-8"))
    function = next(node for name, node in functions(tree) if name == mutant.function and _has(node, mutant))
    node, change = next(row[2:] for row in _sites(function) if row[:2] == (mutant.kind, mutant.place))
    old = copy.deepcopy(node)
    new = change(old)
    _Replace(node, new).visit(function)
    ast.fix_missing_locations(tree)
    return found_code(compile(tree, str(path), "exec", dont_inherit=True), mutant.function, function.lineno)


def _has(function: Function, mutant: Mutant) -> bool:
    """Of functions with one name (overloads, setters) it is the one around the line."""
    return function.lineno <= mutant.line <= (function.end_lineno or function.lineno)


def found_code(module: CodeType, name: str, line: int) -> CodeType:
    waiting = [module]
    while waiting:
        code = waiting.pop()
        # With decorators the first line of the code is that of the first of them.
        if code.co_qualname == name and code.co_firstlineno <= line:
            last = max((at for _, _, at in code.co_lines() if at), default=line)
            if line <= last:
                return code
        waiting += [const for const in code.co_consts if isinstance(const, CodeType)]
    raise LookupError(f"{name} at line {line}")
