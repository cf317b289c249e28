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
from click.testing import CliRunner
from docs.json_samples import RUNS, make

from ckptfix.cli import COMMANDS, commands
from ckptfix.docs import page

Fields = dict[str, set[str]]

_JSON = {dict: "object", list: "array", str: "string", int: "integer", float: "number", bool: "boolean"}
EXTRA = {"pairs", "lines", "choices", "near", "others", "kind", "written"}
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
            add(f"{path}.*" if outer == "map" else f"{path}[]", inner)

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
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        written(folder / name, content)
    return folder


DOCUMENTED = sections(page("json"))
COMMON = "Commands that write"
ALONE = {"inspect", "ls", "doctor", "doctor --explain", "diff", "Errors"}
"""Sections of what does not write."""


def fields_of(heading: str) -> Fields:
    """What a section lists, alone."""
    return expanded(DOCUMENTED[heading], DOCUMENTED["A finding"])


@pytest.fixture(scope="module")
def shown(folder: Path) -> dict[str, Fields]:
    """Section -> what its runs print."""
    found: dict[str, Fields] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for number, (heading, lines) in enumerate(RUNS.items()):
            fields = {**({} if heading in ALONE else fields_of(COMMON)), **fields_of(heading)}
            seen = found[heading] = {}
            for run, line in enumerate(lines):
                words = shlex.split(line.replace("OUT", f"out-{number}-{run}"))
                document = json.loads(CliRunner().invoke(commands, [*words, "--json"]).stdout)
                assert ("error" in document) is (heading in ("doctor", "Errors")), (line, document)
                if heading == "Errors":
                    document["error"] = {name: item for name, item in document["error"].items() if name not in EXTRA}
                for path, kind in printed(document, fields):
                    seen.setdefault(path, set()).add(kind)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("heading", RUNS)
def test_the_fields_are_those_that_are_printed(shown: dict[str, Fields], heading: str) -> None:
    common = {} if heading in ALONE else fields_of(COMMON)
    own, seen = fields_of(heading), shown[heading]
    assert sorted(set(seen) - set(common) - set(own)) == [], "printed, and not in the page"
    assert sorted(set(own) - set(seen)) == [], "in the page, and not printed"
    assert not {path: seen[path] for path, kinds in own.items() if not agree(kinds, seen[path])}


def test_the_common_fields_are_printed_by_what_writes(shown: dict[str, Fields]) -> None:
    writing = [seen for heading, seen in shown.items() if heading not in ALONE]
    always = {path for path in fields_of(COMMON) if "[" not in path}
    assert not [always - set(seen) for seen in writing if always - set(seen)]
    for path, kinds in fields_of(COMMON).items():
        seen = set().union(*(fields.get(path, set()) for fields in writing))
        assert agree(kinds, seen) or path in FAULTS, path


FAULTS = {"account.left[]", "account.lost[]"}
"""Filled only where a command did not name what it left out."""


def agree(said: set[str], seen: set[str]) -> bool:
    """Whether values of the types `seen` are what a page calls `said`; of null and another, one need not be met."""
    wide = said | ({"integer"} if "number" in said else set())
    return "any" in said or (seen <= wide and ("null" in said or said <= seen))


def test_every_command_with_json_has_a_section() -> None:
    named = {name for heading in DOCUMENTED for name in heading.split(", ")}
    assert {*COMMANDS} - {"completion", "help"} <= named
    assert set(RUNS) == set(DOCUMENTED) - {COMMON, "A finding"}
    assert all(DOCUMENTED.values())


def test_the_comparison_can_fail() -> None:
    finding = [("id", "string")]
    rows = [("a", "array of arrays of strings or null"), ("f", "array of findings"), ("m", "map of any")]
    fields = expanded(rows, finding)
    assert fields == {
        "a": {"array", "null"}, "a[]": {"array"}, "a[][]": {"string"},
        "f": {"array"}, "f[]": {"object"}, "f[].id": {"string"}, "m": {"object"}, "m.*": {"any"},
    }  # fmt: skip
    document = {"a": [["x"], 1], "f": [{"id": None}], "m": {"x": {"y": 1}}, "new": 1.5}
    assert set(printed(document, fields)) == {
        ("a", "array"), ("a[]", "array"), ("a[][]", "string"), ("a[]", "integer"), ("f", "array"), ("f[]", "object"),
        ("f[].id", "null"), ("m", "object"), ("m.*", "object"), ("new", "number"),
    }  # fmt: skip
