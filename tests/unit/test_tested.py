"""Every module of the package is named by a test, or a table says where it is tested."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

ELSEWHERE = {
    "ckptfix.align": "tests/unit/align tests/property/test_match.py",
    "ckptfix.browse": "tests/unit/browse",
    "ckptfix.checkpoint": "tests/contract tests/unit/ops",
    "ckptfix.cli": "tests/cli",
    "ckptfix.findings": "tests/unit/findings",
    "ckptfix.fleet": "tests/cli/test_fleet.py tests/faults/test_hostile_plans.py",
    "ckptfix.formats.deepspeed": "tests/unit/formats/zero",
    "ckptfix.formats.plain": "tests/unit/ops/test_sanitize.py tests/unit/ops/test_sanitize_errors.py",
    "ckptfix.formats.repairs": "tests/contract/test_folder_formats.py tests/unit/ops/test_repair_fill.py",
    "ckptfix.formats.torch": "tests/unit/formats tests/contract",
    "ckptfix.formats.torch.readonly": "tests/contract/test_read_only.py tests/unit/formats",
    "ckptfix.git": "tests/cli/test_git.py",
    "ckptfix.html": "tests/cli/test_html.py",
    "ckptfix.io": "tests/unit/io tests/faults",
    "ckptfix.io.inplace": "tests/unit/ops/test_in_place.py tests/faults/test_in_place.py",
    "ckptfix.loaders": "tests/unit/loaders",
    "ckptfix.names": "tests/unit/names",
    "ckptfix.ops": "tests/unit/ops tests/cli",
    "ckptfix.ops.audit": "tests/audit",
    "ckptfix.pickles": "tests/unit/pickles",
    "ckptfix.trainer": "tests/unit/trainer",
    "ckptfix.version": "tests/docs/test_project.py tests/cli/test_help.py",
}
"""Module or package -> where it, and what is in it and no test names, is tested through what uses it."""


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> frozenset[str]:
    return frozenset(module_of(path) for path in (ROOT / "ckptfix").rglob("*.py"))


@cache
def texts() -> dict[Path, str]:
    return {path: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")}


# Text before anything else is what makes a search fast.
IMPORT = re.compile(r"from (ckptfix[\w.]*) import (\([^)]*\)|[^\n(]+)")
NAME = re.compile(r"ckptfix(?:\.\w+)+")


@cache
def named() -> frozenset[str]:
    """Return the modules that a test imports, or names in a string."""
    found: set[str] = set()
    for text in texts().values():
        words = NAME.findall(text)
        words += [f"{match[1]}.{word}" for match in IMPORT.finditer(text) for word in re.findall(r"\w+", match[2])]
        for word in words:
            name = word
            while name not in modules() and "." in name:
                name = name.rpartition(".")[0]
            found.add(name)
    return frozenset(found)


@cache
def twins() -> frozenset[str]:
    """Return the names that tests have: of a file ``test_NAME.py``, or of a folder of several for one package."""
    files = {path.stem.removeprefix("test_") for path in texts()}
    return frozenset(files | {path.parent.name for path in texts() if len(path.relative_to(ROOT).parts) > 4})


def above(name: str) -> Iterator[str]:
    """Yield a module, and the packages that it is in, but for the whole package."""
    while "." in name:
        yield name
        name = name.rpartition(".")[0]


def is_tested(name: str) -> bool:
    inside = (one for one in above(name) if one.count(".") > 1)  # a room is too large to have one test
    return name in named() or any(one.rpartition(".")[2] in twins() for one in inside) or bool(rows(name))


def rows(name: str) -> list[str]:
    return [one for one in above(name) if one in ELSEWHERE]


@pytest.mark.parametrize("kind", ["a module", "a row of the table"])
def test_every_module_is_named_by_a_test_or_in_the_table(kind: str) -> None:
    if kind == "a module":
        wrong = sorted(name for name in modules() if not is_tested(name))
        assert not wrong, f"write a test that imports it, or a row of ELSEWHERE: {wrong}"
    else:
        wrong = [name for name, places in ELSEWHERE.items() if name not in modules() or not has_tests(places)]
        assert not wrong, f"rows of ELSEWHERE of no module, or without tests of it: {wrong}"


def has_tests(places: str) -> bool:
    wanted = [ROOT / place for place in places.split()]
    return all(any(place in (path, *path.parents) for path in texts()) for place in wanted)


def test_a_module_that_no_test_names_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_tested("ckptfix.formats.zero.moments") and not is_tested("ckptfix.nobody")
    monkeypatch.setattr(f"{__name__}.ELSEWHERE", {})
    left = {name for name in modules() if not is_tested(name)}
    assert left and not left & {"ckptfix.formats.plain.arrays", "ckptfix.formats.zero.moments"}
