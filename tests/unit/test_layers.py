"""The architecture, held by tests: which room may import which, what only some may use, and how large one is."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from file_commands import CODES, COMMANDS, arguments
from forks import Forks
from lesser_system import MODULES as LACKING
from lesser_system import WINDOWS_OS, WINDOWS_SIGNALS
from package_trees import FILES, PACKAGE, parsed

# each file is parsed once
pytestmark = [pytest.mark.xdist_group("layers"), pytest.mark.sampled(1_000)]  # each row is a rule of its own

LAYERS: tuple[tuple[str, ...], ...] = (
    ("dataclass", "pool"),
    (
        *("errors", "arguments", "extras", "command_table", "commands", "hooks", "shown", "words", "numbers", "docs"),
        *("platform", "urls", "version"),
    ),
    ("findings",),
    ("checkpoint", "pickles"),
    ("io", "names"),
    ("zips", "align", "elements"),
    ("formats",),
    ("ops", "runner"),
    ("browse", "fleet", "git", "html", "loaders"),
    ("trainer", "cli"),
)
"""The rooms of the house from the bottom up: a room imports from layers below its own, or as `BESIDE` says."""

OPS: tuple[tuple[str, ...], ...] = (
    (
        *("audit", "candidates", "inplace", "layers", "naming"),
        *("quantized", "record", "tensor_classes"),
    ),
    ("choose", "hazards"),
    ("dequantize", "rank_shards", "writing"),
    ("adapter", "chain"),
    ("any_source",),
    ("average", "convert", "inspect", "relocate", "rename", "sanitize"),
    ("cast", "select", "set_metadata", "slim", "target", "undo"),
    ("deploy", "diff", "extract", "lora", "repair"),
    ("match",),
    ("digest", "doctor", "merge", "stats"),
    ("fix", "histogram", "listing", "verdict"),
)
"""The verbs, and what they share, in the same way. A verb that no other one imports need not be listed."""

BESIDE = {
    *(("errors", name) for name in ("commands", "urls")),
    *((name, "errors") for name in ("arguments", "extras", "shown", "words")),
    *((name, "hooks") for name in ("shown", "urls")),
}
MOST_MODULES = 25
"""A room with more of them has no inner walls."""

FRONT = {"__init__", "__main__"}
"""The package's own name space (which imports lazily, and registers hooks) and ``python -m``: above all layers."""

COMPUTED = {
    "extras.py": "a package that may not be installed",
    "hooks.py": "what the front of the package, or of a room, has registered: there the names count as imports",
    "io/remote/clients.py": "the package of a client",
    "ops/target/model.py": "the module of the user's model",
}
"""Modules that import by a name of which no part is written there, and what that is."""

NOT_FORMATS = {
    "checkpoint/tensors.py": "meta is a kind of tensor",
    "ops/cast/__init__.py": "meta is a kind of tensor",
    "ops/relocate.py": "meta is a device",
    "findings/table.py": "words in the names of outputs, in a room below the formats",
    "ops/doctor/contents.py": "archive is the root of torch's records",
    "ops/doctor/groups.py": "pickle is a place in a file",
    "io/remote/folders.py": "hf is a scheme of URLs",
    "io/remote/write.py": "hf is a scheme of URLs",
}
"""Modules that compare a word that is also the name of a format, and what it is."""

ONLY_IN_CLI = {"click"}
LAZY = {"torch", "numpy", "safetensors", "ml_dtypes", "distributed", "submitit"}
MOST_LINES = 900


def every_module(check: Callable[[Path], None]) -> Callable[[], None]:
    """A test that runs `check` on each module of the package, and names all that fail it."""

    def test() -> None:
        wrong = []
        for path in FILES:
            try:
                check(path)
            except AssertionError as error:
                wrong.append(f"{path.relative_to(PACKAGE)}: {error}")
        assert not wrong, "\n".join(wrong)

    return test


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def telling(tree: ast.AST) -> tuple[ast.Import | ast.ImportFrom | ast.Call, ...]:
    """The imports and calls anywhere in `tree`."""
    return tuple(node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom | ast.Call))


def imports(tree: ast.AST, path: Path) -> Iterator[tuple[str, int]]:
    """(dotted name, line) of everything that is imported, wherever in the file; relative ones made absolute."""
    package = ("ckptfix", *path.relative_to(PACKAGE).parts[:-1])
    for node in telling(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *((node.module,) if node.module else ())))
            yield from ((f"{module}.{alias.name}", node.lineno) for alias in node.names)


def run_at_import(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements that run when the module is imported: not in functions, not for type checkers only."""
    stack: list[ast.stmt] = list(tree.body)
    while stack:
        node = stack.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            stack += node.orelse
            continue
        yield node
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt):
                stack.append(child)
            elif isinstance(child, ast.ExceptHandler | ast.match_case):
                stack += child.body


@pytest.fixture(scope="module", autouse=True)
def no_trees_are_left() -> Iterator[None]:
    """All trees of the package take 150 MB."""
    yield
    for kept in (parsed, telling, imported):
        kept.cache_clear()


def is_import(node: ast.AST) -> bool:
    """Whether this calls a function that imports the module of a name."""
    return isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("import_module", "__import__")


def strings(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(text, line) of all strings but docstrings and the parts of f-strings."""
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value, node.lineno
        if not isinstance(node, ast.JoinedStr) and not (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        ):
            stack += ast.iter_child_nodes(node)


def is_module(name: str) -> bool:
    return name in MODULES or f"{name}.__init__" in MODULES


def begun(node: ast.Call) -> str:
    """The beginning of the name that an f-string gives to an import, such as ``ckptfix.cli.``; empty for others."""
    name = node.args[0] if node.args else None
    first = name.values[0] if isinstance(name, ast.JoinedStr) else None
    text = first.value if isinstance(first, ast.Constant) else ""
    return text if isinstance(text, str) and text.startswith("ckptfix.") and text.endswith(".") else ""


def named(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(dotted name, line) of each module of ours that a string names.

    That is a whole name, as ``ckptfix.ops.rename:unwrap``; or behind an import of f"ckptfix.ops.{name}" every string
    of the module that ends such a name. Where no string does, the table of names is elsewhere, and all of the room
    counts.
    """
    for text, line in strings(tree):
        name = text.replace(":", ".")
        # Of ``ckptfix.jobs``, a key in some dict, the front of the package is not meant.
        if OURS.fullmatch(text) and (is_module(name) or (name.count(".") > 1 and is_module(name.rpartition(".")[0]))):
            yield name, line
    for call in telling(tree):
        if not isinstance(call, ast.Call) or not is_import(call):
            continue
        if isinstance(call.args[0], ast.Constant) and call.args[0].value == "ckptfix":
            yield "ckptfix.__init__", call.lineno
        if start := begun(call):
            ends = {start + text for text, _ in strings(tree)}
            known = [name for name in MODULES if name.removesuffix(".__init__") in ends]
            for name in known or [name for name in MODULES if name.startswith(start)]:
                yield name, call.lineno


OURS = re.compile(r"ckptfix(\.\w+)+(:\w+)?")
IN_QUOTES = re.compile(r"""["']ckptfix[.:"']""")


def level(name: str, layers: Sequence[Sequence[str]]) -> int:
    return next((index for index, layer in enumerate(layers) if name in layer), len(layers))


MODULES = {".".join(("ckptfix", *path.relative_to(PACKAGE).with_suffix("").parts)): path for path in FILES}


@cache
def imported(path: Path) -> list[tuple[tuple[str, ...], int]]:
    """(parts of the module's path in the package, line) of every module of ours that `path` imports or names."""
    found = []
    tree = parsed(path)
    strings_too = named(tree) if IN_QUOTES.search(path.read_text(encoding="utf-8")) else ()
    for name, line in (*imports(tree, path), *strings_too):
        parts = tuple(name.split("."))
        if parts[0] != "ckptfix":
            continue
        for end in (len(parts), len(parts) - 1):
            for module in (".".join(parts[:end]), ".".join((*parts[:end], "__init__"))):
                if module in MODULES:
                    found.append((tuple(module.split(".")[1:]), line))
                    break
            else:
                continue
            break
    return found


def test_every_room_has_a_layer() -> None:
    assert {room(path) for path in FILES} - FRONT == set().union(*LAYERS)
    ops = {path.relative_to(PACKAGE / "ops").parts[0].removesuffix(".py") for path in FILES if room(path) == "ops"}
    assert ops >= set().union(*OPS)


def pictures() -> Iterator[list[str]]:
    """The rows of the pictures of rooms in design.md, each of which may have several lines."""
    text = (PACKAGE / "docs/design.md").read_text(encoding="utf-8")
    section = text.partition("\n## Rooms\n")[2].partition("\n## ")[0]
    for block in re.findall(r"^```text\n(.*?)^```$", section, re.MULTILINE | re.DOTALL):
        yield re.split(r"^ +\|$", block, flags=re.MULTILINE)


def test_the_pictures_are_true() -> None:
    whole, ops = pictures()
    for picture, layers in ((whole, LAYERS), (ops, OPS)):
        assert len(picture) == len(layers)
        for row, names in zip(picture, layers, strict=True):
            assert not [name for name in names if not re.search(rf"(^|  ){name}/?(  |$)", row, re.MULTILINE)], row
    assert [sorted(row.replace("/", "").split()) for row in ops] == [sorted(row) for row in OPS]


@pytest.mark.slow
@every_module
def test_imports_point_down(path: Path) -> None:
    here = room(path)
    if here in FRONT:
        return
    inside = path.relative_to(PACKAGE / "ops").parts[0].removesuffix(".py") if here == "ops" else ""
    for there, line in imported(path):
        assert there[0] not in FRONT, f"{path.name}:{line} imports the front of the package"
        if there[0] == here:
            if here == "ops" and there[1] not in (inside, "__init__") and inside != "__init__":
                assert level(there[1], OPS) < level(inside, OPS), f"{path}:{line} imports ops.{there[1]}"
        elif (here, there[0]) not in BESIDE:
            assert level(there[0], LAYERS) < level(here, LAYERS), f"{path}:{line} imports {'.'.join(there)}"


@every_module
def test_a_computed_name_is_of_a_known_kind(path: Path) -> None:
    calls = [node for node in telling(parsed(path)) if isinstance(node, ast.Call) and is_import(node)]
    hidden = [node for node in calls if not isinstance(node.args[0], ast.Constant) and not begun(node)]
    inside = path.relative_to(PACKAGE).as_posix()
    assert bool(hidden) == (inside in COMPUTED), f"imports {[ast.unparse(node.args[0]) for node in hidden]}"


def test_names_in_strings_are_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In full, behind the beginning that an f-string has, and with the table of names elsewhere."""
    texts = {
        "low/full.py": 'HOME = "ckptfix.high.a:f"',
        "low/call.py": 'def f():\n    __import__("ckptfix.high.a")',
        "low/table.py": 'HOMES = {"a": "high.a"}\nimportlib.import_module(f"ckptfix.{HOMES[name]}")',
        "low/other.py": 'import_module(f"ckptfix.high.{name}")',
        "low/front.py": 'import_module("ckptfix")',
        "low/said.py": '"""Not `ckptfix.high.a`."""\nTEXT = "see ckptfix.high.a"\nNAME = "ckptfix.none"',
        "high/__init__.py": "",
        "__init__.py": "",
        "high/a.py": "from ckptfix.low.full import HOME",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    module = sys.modules[__name__]
    files = [tmp_path / name for name in texts]
    monkeypatch.setattr(module, "PACKAGE", tmp_path)
    monkeypatch.setattr(module, "MODULES", {".".join(("ckptfix", *Path(n).with_suffix("").parts)): n for n in texts})
    monkeypatch.setattr(module, "LAYERS", (("low",), ("high",)))
    up = {path.name: {".".join(there) for there, _ in imported(path) if there[0] == "high"} for path in files}
    assert up == {
        **{name: {"high.a"} for name in ("full.py", "call.py", "table.py")},
        **{name: set() for name in ("front.py", "said.py", "a.py", "__init__.py")},
        "other.py": {"high.__init__", "high.a"},
    }
    monkeypatch.setattr(module, "FILES", files)
    with pytest.raises(AssertionError) as raised:
        test_imports_point_down()
    wrong = {name for name in texts if f"{name}: " in str(raised.value)}
    assert wrong == {f"low/{name}.py" for name in ("full", "call", "table", "other", "front")}
    assert set(circle(tmp_path)) == {"low", "high"}


def compared(tree: ast.Module, formats: frozenset[str]) -> Iterator[int]:
    """The lines that compare something with the name of a format, or `x.format` with anything but None."""
    constants = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }

    def is_name(node: ast.AST) -> bool:
        if isinstance(node, ast.Name) and node.id in constants:
            node = constants[node.id]
        parts = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]
        return any(isinstance(part, ast.Constant) and part.value in formats for part in parts)

    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            own = any(isinstance(side, ast.Attribute) and side.attr == "format" for side in sides)
            others = [side for side in sides if not isinstance(side, ast.Constant)]
            if any(map(is_name, sides)) or (own and len(others) > 1):
                yield node.lineno
        elif isinstance(node, ast.MatchValue) and is_name(node.value):
            yield node.value.lineno


@pytest.mark.slow
@every_module
def test_only_formats_compare_their_names(path: Path) -> None:
    """Others ask a `Format` what it can do: a new format need not be known to them."""
    from ckptfix.formats import FORMATS

    if room(path) != "formats":
        lines = list(compared(parsed(path), frozenset(FORMATS)))
        known = path.relative_to(PACKAGE).as_posix() in NOT_FORMATS
        assert bool(lines) == known, f"compares a format's name in the lines {lines}"


def test_a_compared_name_is_seen() -> None:
    lines = (
        'NAME, FEW, NONE = "a", ("b", "zip"), None',
        'FEW = ("b", "zip")',
        'format == "zip"',
        'checkpoint.format != NAME',
        'formats == {"zip"}',
        'word in FEW',
        'match word:\n    case "zip" | "a":\n        pass',
        'checkpoint.format is None or checkpoint.format == "folder"',
        'format = "zip" if FORMATS[checkpoint.format].sized is None else "a"',
    )
    found = [bool(list(compared(ast.parse("\n".join((lines[1], line))), frozenset({"zip"})))) for line in lines]
    assert found == [False, False, True, True, True, True, True, False, False]


def circle(folder: Path) -> list[str]:
    """A circle among the modules and rooms of one folder, by imports anywhere; empty where there is none."""
    at = folder.relative_to(PACKAGE).parts
    graph: dict[str, set[str]] = {}
    for path in sorted(folder.rglob("*.py")):
        here = path.relative_to(folder).parts[0].removesuffix(".py")
        for there, _ in imported(path):
            if there[: len(at)] == at and there[len(at)] != here:
                graph.setdefault(here, set()).add(there[len(at)])
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.mark.slow
def test_data_classes_are_made_by_one_decorator() -> None:
    """That of `ckptfix.dataclass`: each that the standard library makes costs half a millisecond at every start."""
    wrong = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in FILES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ImportFrom)
        and node.module == "dataclasses"
        and any(name.name == "dataclass" for name in node.names)
        and path != PACKAGE / "dataclass.py"
    ]
    assert not wrong


FOLDERS = sorted({path.parent for path in FILES})


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_room_has_a_circle(folder: Path) -> None:
    assert not circle(folder)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_room_is_crowded(folder: Path) -> None:
    assert len(list(folder.glob("*.py"))) <= MOST_MODULES


def test_a_circle_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = {"a.py": "from ckptfix.room import b", "b.py": "def f():\n    from ckptfix.room.c import g", "c.py": ""}
    (tmp_path / "room").mkdir()
    for name, text in ring.items():
        (tmp_path / "room" / name).write_text(text)
    files = sorted((tmp_path / "room").iterdir())
    names = {".".join(("ckptfix", *path.relative_to(tmp_path).with_suffix("").parts)): path for path in files}
    module = sys.modules[__name__]
    monkeypatch.setattr(module, "PACKAGE", tmp_path)
    monkeypatch.setattr(module, "MODULES", names)
    assert not circle(tmp_path / "room")
    shutil.copytree(tmp_path / "room", tmp_path / "again" / "room")  # what was read is kept by path
    monkeypatch.setattr(module, "PACKAGE", tmp_path / "again")
    (tmp_path / "again" / "room" / "c.py").write_text("if TYPE_CHECKING:\n    from ckptfix.room.a import x")
    assert set(circle(tmp_path / "again" / "room")) == {"a", "b", "c"}


@every_module
def test_what_belongs_to_the_command_line_stays_there(path: Path) -> None:
    if room(path) in {"cli", "__main__"}:
        return
    tree = parsed(path)
    found = {name.split(".")[0] for name, _ in imports(tree, path)} & ONLY_IN_CLI
    assert not found
    if room(path) == "trainer":
        return
    for node in telling(tree):
        printing = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
        assert not printing, f"{path.name}:{getattr(node, 'lineno', 0)} prints"


@every_module
def test_only_the_screens_draw(path: Path) -> None:
    if path.relative_to(PACKAGE).parts[:2] != ("browse", "view") and path.name != "extras.py":
        assert not {name.split(".")[0] for name, _ in imports(parsed(path), path)} & {"textual", "rich"}


@every_module
def test_heavy_packages_are_imported_where_they_are_used(path: Path) -> None:
    if room(path) == "trainer":
        return
    for node in run_at_import(parsed(path)):
        found = {name.split(".")[0] for name, _ in imports(node, path)} if _is_import(node) else set()
        assert not found & LAZY, f"{path.name}:{node.lineno} imports {found & LAZY} at its top"


def _is_import(node: ast.stmt) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


@pytest.mark.slow
@every_module
def test_values_are_read_from_the_tree(path: Path) -> None:
    """Only the formats, and what they stand on, know how a file spells its values."""
    if room(path) in ("pickles", "formats", "zips"):
        return
    assert not {there for there, _ in imported(path) if there[0] == "pickles"} - {("pickles", "collector")}
    graphs = [node for node in ast.walk(parsed(path)) if isinstance(node, ast.Attribute) and node.attr == "graph"]
    assert not [node.lineno for node in graphs if ast.unparse(node.value) != "torch.autograd"], "reads the pickle"


KNOWS_FOLDERS = {
    "ops/rank_shards.py": "what one rank's file says of the others: classes and names that `ranks/` knows",
}
"""Modules above the formats that import a format of folders, and why. All others reach it through its `Format`."""


@every_module
def test_folder_formats_are_reached_through_their_interface(path: Path) -> None:
    from ckptfix.formats import _ROWS, FORMATS

    rooms = {_ROWS[format.name].module.split(".")[0] for format in FORMATS.of(folder=True)} | {"deepspeed"}
    if room(path) != "formats":
        known = {".".join(there) for there, _ in imported(path) if there[0] == "formats" and {*there[1:2]} & rooms}
        assert bool(known) == (path.relative_to(PACKAGE).as_posix() in KNOWS_FOLDERS), f"imports {sorted(known)}"


FOLDER_FILES = re.compile(r"\.distcp|^/?\.metadata$|_(model|optim)_states|weight_map|index\.json|zero_pp_rank")
NAMES_FOLDER_FILES = {
    "ops/doctor/messages.py": "the words of other programs' errors",
    "ops/rank_shards.py": "the rank in the name of a file",
    "ops/target/targets.py": "an index that is given as a file of keys",
}
"""Modules above the formats that name a file of such a folder, and why."""


@pytest.mark.slow
@every_module
def test_only_formats_name_the_files_of_folders(path: Path) -> None:
    if room(path) not in ("formats", "findings", "trainer"):
        lines = [line for text, line in strings(parsed(path)) if FOLDER_FILES.search(text)]
        known = path.relative_to(PACKAGE).as_posix() in NAMES_FOLDER_FILES
        assert bool(lines) == known, f"names a file of a folder format in the lines {lines}"


COMPARES_KINDS = {
    "checkpoint/tensors.py": "a tensor without data anywhere; the table is in a room further down",
    "checkpoint/quantization.py": "classes of libraries, which are wrappers; the table is in a room further down",
    "formats/torch/tensors.py": "the table, and what is around a wrapper in its call",
    "ops/cast/__init__.py": "only the words of the reason",
    "ops/dequantize/own.py": "the scheme of torch itself",
    "ops/rank_shards.py": "parts of ranks, which are wrappers",
}
"""Modules that know one kind of tensor, and why. All others ask its row in `KINDS`, or only whether it is dense."""


@pytest.mark.slow
@every_module
def test_a_kind_of_tensor_is_asked(path: Path) -> None:
    from ckptfix.formats.torch.tensors import KINDS

    lines = []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            names = {part.value for side in sides for part in ast.walk(side) if isinstance(part, ast.Constant)}
            if any(isinstance(side, ast.Attribute) and side.attr == "kind" for side in sides) and names & {*KINDS} - {
                "dense"
            }:
                lines.append(node.lineno)
    assert bool(lines) == (path.relative_to(PACKAGE).as_posix() in COMPARES_KINDS), f"compares kinds in {lines}"


OPENS = {"open", "read_text", "read_bytes", "from_file"}
OPENED = {
    "io/system.py": "the one place",
    "platform.py": "folders that are synced, files without a name, the environment of the parent process",
    "io/output.py": "creates the output",
    "io/remote/http.py": "opens a URL, for `io.source`",
    "io/remote/fsspec_store.py": "creates an output in a store",
    "io/durable.py": "creates the copy of what is replaced, and syncs folders",
    "io/inplace/disk.py": "opens what is edited in place, and creates its journal",
    "formats/arrays/orbax.py": "tensorstore opens the arrays of a folder, whose files are looked at before",
    "ops/layers.py": "creates a file for what it unpacks",
    "ops/target/targets.py": "a JSON of names and shapes: text",
    "cli/shared/common.py": "an error message: text",
    "cli/fleet/plan.py": "a list of names: text",
    "fleet/locks.py": "creates and holds the locks of a plan",
    "fleet/records.py": "creates the mark of a job that has begun",
    "cli/shared/streams.py": "the files that stand for standard input and output",
    "cli/shared/exits.py": "the null device, in place of a closed output",
    "html/page.py": "the style and the script of pages, which are installed with the package",
    "docs/__init__.py": "documentation that is installed with the package",
    "names/tables/__init__.py": "tables of names that are installed with the package",
    "loaders/tensors.py": "torch maps by name; that it is the file that was read is looked at afterwards",
}
"""Modules that open files themselves, and why. All others read through `io.source`."""


def opening(tree: ast.AST) -> set[str]:
    """The functions that open files, and are called in a module."""
    called = [node.func for node in telling(tree) if isinstance(node, ast.Call)]
    names = {node.id for node in called if isinstance(node, ast.Name)}
    return OPENS & (names | {node.attr for node in called if isinstance(node, ast.Attribute)})


@every_module
def test_a_name_is_opened_in_one_place(path: Path) -> None:
    if room(path) != "trainer":
        assert bool(opening(parsed(path))) == (path.relative_to(PACKAGE).as_posix() in OPENED)


LOOKED_UP = {
    "os": {*WINDOWS_OS} - {"listxattr", "SEEK_HOLE", "SEEK_DATA"},
    "signal": {*WINDOWS_SIGNALS},
}
"""What only `platform` uses. SEEK_HOLE follows a call that only Linux has, and listxattr is looked up by `hasattr`."""


@pytest.mark.slow
@every_module
def test_one_module_looks_up_what_a_system_may_lack(path: Path) -> None:
    if path.name == "platform.py" or room(path) == "trainer":
        return
    tree = parsed(path)
    assert not {name.partition(".")[0] for name, _ in imports(tree, path)} & {*LACKING, "ctypes"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert node.attr not in LOOKED_UP.get(node.value.id, ()), f"line {node.lineno}"


@every_module
def test_rooms_stay_small(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MOST_LINES


def test_these_tests_can_fail() -> None:
    source = (
        "import torch\nif TYPE_CHECKING:\n    import numpy\ntry:\n    from . import x\nexcept E:\n    import click\n"
    )
    tree = ast.parse(source + "def f():\n    import safetensors\n")
    assert {name for name, _ in imports(tree, PACKAGE / "ops/y.py")} == {
        *("torch", "numpy", "click", "safetensors", "ckptfix.ops.x"),
    }
    top = {name for node in run_at_import(tree) if _is_import(node) for name, _ in imports(node, PACKAGE / "ops/y.py")}
    assert top == {"torch", "click", "ckptfix.ops.x"}
    assert opening(ast.parse("with os.open(x): pass")) == opening(ast.parse("f = open(x)")) == {"open"}


PROBE = """
import json, sys
from ckptfix.cli import commands
code = commands.main(sys.argv[1:], standalone_mode=False)
heavy = sorted({name.partition('.')[0] for name in sys.modules} & {'torch', 'numpy', 'safetensors', 'ml_dtypes'})
print(json.dumps([code, heavy]), file=sys.stderr)
"""


COMPUTING = {"diff", "digest", "doctor", "stats", "cast", "average", "git"}
"""Commands that compute with numpy."""


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_loads_torch(forks: Forks, tmp_path: Path, name: str) -> None:
    done = forks(PROBE, arguments(name, tmp_path))
    code, heavy = json.loads(done.stderr.splitlines()[-1])
    assert code == CODES.get(name, 0)
    assert not set(heavy) - ({"numpy", "ml_dtypes"} if name.split()[0] in COMPUTING else set())


def test_importing_the_package_loads_nothing_heavy() -> None:
    script = "import sys, ckptfix, ckptfix.ops.rename; print(*{name.partition('.')[0] for name in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "numpy", "click", "safetensors"} & set(loaded)
