"""``ckptfix help json`` lists the fields that are printed: no more, no fewer, and their types."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from builders import written
from cli.conftest import Cli
from docs.json_samples import RUNS, make

from ckptfix.cli import COMMANDS
from ckptfix.docs import page

Fields = dict[str, set[str]]

_JSON = {dict: "object", list: "array", str: "string", int: "integer", float: "number", bool: "boolean"}
_EXTRA = {"pairs", "lines", "choices", "near", "others", "kind", "written"}
"""Fields of some errors."""


def sections(text: str) -> dict[str, list[tuple[str, str]]]:
    """Heading -> (field, type in words) of each item below it."""
    found: dict[str, list[tuple[str, str]]] = {}
    for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        heading, _, body = part.partition("\n")
        items = re.findall(r"^- ((?:`[^`]+`,?\s+)+)\(([^)]+)\):", body, re.MULTILINE)
        found[heading] = [(name, kind) for names, kind in items for name in re.findall(r"`([^`]+)`", names)]
    return found


def expanded(rows: list[tuple[str, str]], finding: list[tuple[str, str]]) -> Fields:
    """Path -> JSON types. An element of an array is ``path[]``, a value of a map ``path.*``."""
    fields: Fields = {}

    def add(path: str, kind: str) -> None:
        whole, _, null = kind.partition(" or ")
        outer, _, inner = whole.partition(" of ")
        fields[path] = {"object" if outer == "map" else outer.removesuffix("s"), *([null] if null else [])}
        if inner == "findings":
            add(f"{path}[]", "object")
            for name, of_finding in finding:
                add(f"{path}[].{name}", of_finding)
        elif inner:
            add(f"{path}.*" if outer == "map" else f"{path}[]", inner if inner == "any" else inner.replace("s of", " of"))

    for path, kind in rows:
        add(path, kind)
    return fields


def printed(value: Any, fields: Mapping[str, set[str]], path: str = "") -> Iterator[tuple[str, str]]:
    """(path, JSON type) of everything in `value`; nothing below a path that may hold anything."""
    if path:
        yield path, _JSON.get(type(value), "null")
    if "any" in fields.get(path, ()):
        return
    if isinstance(value, dict):
        for key, item in value.items():
            below = f"{path}.{key}" if path else key
            yield from printed(item, fields, f"{path}.*" if f"{path}.*" in fields else below)
    elif isinstance(value, list):
        for item in value:
            yield from printed(item, fields, f"{path}[]")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("json")
    for name, content in make():
        written(folder / name, content)
    return folder


DOCUMENTED = sections(page("json"))
COMMON = "Commands that write"


def of(heading: str) -> Fields:
    inherited = [] if heading in ("inspect", "doctor", "doctor --explain", "diff", "Errors") else DOCUMENTED[COMMON]
    return expanded([*inherited, *DOCUMENTED[heading]], DOCUMENTED["A finding"])


@pytest.mark.parametrize("heading", RUNS)
def test_the_fields_are_those_that_are_printed(
    cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch, heading: str
) -> None:
    monkeypatch.chdir(folder)
    fields = of(heading)
    seen: Fields = {}
    for number, line in enumerate(RUNS[heading]):
        words = shlex.split(line.replace("OUT", f"out-{heading.split(',')[0]}-{number}"))
        result = cli(*words, "--json")
        for path, kind in printed(json.loads(result.stdout), fields):
            if heading != "Errors" or path.split(".")[1:2] == [] or re.split(r"[.\[]", path)[1] not in _EXTRA:
                seen.setdefault(path, set()).add(kind)
    assert set(seen) == set(fields)
    for path, kinds in fields.items():
        if "any" in kinds:
            continue
        wide = kinds | ({"integer"} if "number" in kinds else set())
        assert seen[path] <= wide, path
        assert kinds - {"null"} <= seen[path] | ({"number"} if "integer" in seen[path] else set()), path


def test_every_command_with_json_has_a_section() -> None:
    named = {name for heading in DOCUMENTED for name in heading.split(", ")}
    assert {*COMMANDS} - {"completion", "help"} <= named
    assert set(RUNS) == set(DOCUMENTED) - {COMMON, "A finding"}
    assert all(DOCUMENTED.values())


def test_the_comparison_can_fail() -> None:
    finding = [("id", "string")]
    fields = expanded([("a", "array of arrays of strings or null"), ("f", "array of findings"), ("m", "map of any")], finding)
    assert fields == {
        "a": {"array", "null"}, "a[]": {"array"}, "a[][]": {"string"},
        "f": {"array"}, "f[]": {"object"}, "f[].id": {"string"}, "m": {"object"}, "m.*": {"any"},
    }  # fmt: skip
    document = {"a": [["x"], 1], "f": [{"id": None}], "m": {"x": {"y": 1}}, "new": 1.5}
    assert set(printed(document, fields)) == {
        ("a", "array"), ("a[]", "array"), ("a[][]", "string"), ("a[]", "integer"), ("f", "array"), ("f[]", "object"),
        ("f[].id", "null"), ("m", "object"), ("m.*", "object"), ("new", "number"),
    }  # fmt: skip
