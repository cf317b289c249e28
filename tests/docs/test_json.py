"""``ckptfix help json`` and the schema say what is printed: no more, no fewer fields, and their types."""

from __future__ import annotations

import copy
import json
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from builders import written
from click.testing import CliRunner
from docs.json_samples import RUNS, make
from docs.pages import FOLDER, UPDATE
from json_contract import SCHEMA, VALIDATOR, checked, faults, fields, formatted, inner, kinds, printed

import ckptfix
from ckptfix.cli import commands
from ckptfix.cli.shared.console import SCHEMA_VERSION
from ckptfix.command_table import COMMANDS
from ckptfix.docs import page

DEFS: dict[str, dict[str, Any]] = SCHEMA["$defs"]
BASES = {"envelope", "writes"}
"""What the objects of several commands begin with."""
PARTS = {"check", "edit", "finding", "quantization", "statistics", "statistics_of_several", "values"}
"""What stands in several places of them."""

FAULTS = {"account.left_behind[]", "account.lost[]", "changed[].values.reason", "close[].values.reason"}
"""Filled only where a command did not name what it left out, and where two tensors could not be compared."""


LATE = {"error.written", "error.written[]"}
"""Only where the output is complete and the command fails after that (tests/cli/test_written.py)."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("json")
    for name, content in make():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        written(folder / name, content)
    return folder


@pytest.fixture(scope="module")
def shown(folder: Path) -> dict[str, dict[str, set[str]]]:
    """Name of a definition -> field -> the types that its runs print; each object is as the schema has it."""
    found: dict[str, dict[str, set[str]]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for number, (name, lines) in enumerate(RUNS.items()):
            known = dict(every(name))
            seen = found[name] = {}
            for run, line in enumerate(lines):
                words = shlex.split(line.replace("OUT", f"out-{number}-{run}"))
                for document in checked(CliRunner().invoke(commands, [*words, "--json"])):
                    for path, kind in printed(document, known):
                        seen.setdefault(path, set()).add(kind)
    return found


def every(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The fields of the objects that the definition describes, those of its base too."""
    for base in DEFS[name].get("allOf", ()):
        yield from every(base["$ref"].rpartition("/")[2])
    yield from fields(DEFS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in DEFS if name not in BASES | PARTS])
def test_every_field_is_printed_by_some_run(shown: dict[str, dict[str, set[str]]], name: str) -> None:
    seen = shown[name]
    own = {path: kinds(node) for path, node in fields(DEFS[name]) if not path.startswith("findings[]")}
    assert not sorted(own.keys() - seen.keys() - LATE), "in the schema, and not printed"
    missing = {path: types - {"null", "number"} - seen[path] for path, types in own.items() if path not in LATE}
    assert not {path: types for path, types in missing.items() if types and path not in FAULTS}


@pytest.mark.slow
def test_every_field_of_a_finding_is_printed_by_some_run(shown: dict[str, dict[str, set[str]]]) -> None:
    for path, node in fields(DEFS["finding"]):
        seen = set().union(*(found.get(f"findings[].{path}", set()) for found in shown.values()))
        assert kinds(node) <= seen, path


@pytest.mark.slow
def test_the_common_fields_are_printed_by_what_writes(shown: dict[str, dict[str, set[str]]]) -> None:
    seen: dict[str, set[str]] = {}
    for name, found in shown.items():
        if DEFS[name].get("allOf") == [{"$ref": "#/$defs/writes"}]:
            for path, types in found.items():
                seen.setdefault(path, set()).update(types)
    for path, node in every("writes"):
        below = path.startswith("findings[]")
        assert below or path in FAULTS or kinds(node) - {"null"} <= seen[path], path


@pytest.mark.slow
def test_results_in_python_are_the_same_without_the_envelope(folder: Path) -> None:
    path = str(folder / "ddp.pth")
    for result, name in ((ckptfix.doctor(path), "doctor"), (ckptfix.inspect(path), "inspect")):
        (document,) = checked(CliRunner().invoke(commands, [name, path, "--json"]))
        envelope = {field: document.pop(field) for field in DEFS["envelope"]["properties"]}
        assert document == json.loads(json.dumps(result.as_dict()))
        assert envelope == {"schema_version": 1, "command": name, "exit_code": 0}


def objects(node: Any, place: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every part of the schema that lists fields."""
    if isinstance(node, dict):
        if "properties" in node and "type" in node:
            yield place, node
        for name, below in node.items():
            yield from objects(below, f"{place}/{name}")


def test_the_schema_is_strict_and_says_what_everything_is() -> None:
    VALIDATOR.check_schema(SCHEMA)
    assert DEFS["envelope"]["properties"]["schema_version"]["const"] == SCHEMA_VERSION
    found = dict(objects(DEFS))
    assert len(found) > len(DEFS)
    for place, node in found.items():
        name = place.split("/")[1]
        closed = node.get("additionalProperties") is False or node.get("unevaluatedProperties") is False
        assert closed or (name in BASES and place.count("/") == 1), place
        optional = {"kind", "near", "others", "choices", "choice", "averages", "lines", "pairs", "written"}
        assert set(node["properties"]) - set(node["required"]) == (
            optional if place == "/failure/properties/error" else set()
        ), place
        assert set(node["required"]) <= set(node["properties"])
        for field, below in node["properties"].items():
            assert re.fullmatch(r"[a-z][a-z0-9_]*", field)
            assert below.get("description", "").endswith("."), f"{place}/{field}"


def test_every_command_with_json_is_in_the_schema() -> None:
    with_json = {name for name in COMMANDS if "--json" in commands_options(name)}
    assert with_json == set(SCHEMA["else"]["properties"]["command"]["enum"])
    named = {word for name in DEFS for word in DEFS[name]["title"].split(", ")}
    assert with_json <= named
    assert set(RUNS) == set(DEFS) - BASES - PARTS


def commands_options(name: str) -> list[str]:
    import click

    command = commands.get_command(click.Context(commands), name)
    assert command is not None
    inner = command.commands.values() if isinstance(command, click.Group) else ()
    return [option for one in (command, *inner) for param in one.params for option in param.opts]


def test_a_field_that_is_new_gone_or_other_is_seen(folder: Path) -> None:
    (good,) = checked(CliRunner().invoke(commands, ["strip-module", str(folder / "ddp.pth"), "-n", "--json"]))
    (failed,) = checked(CliRunner().invoke(commands, ["inspect", str(folder / "none.pth"), "--json"]))
    assert not faults(good) and not faults(failed)
    for change in ("new", "account", "findings", "exit_code", "written", "command"):
        worse = copy.deepcopy(good)
        if change == "new":
            worse["new"] = 1
        elif change == "account":
            worse["account"]["new"] = 1
        elif change == "findings":
            worse["findings"] = [{"id": "x"}]
        elif change == "written":
            worse["written"] = "yes"
        elif change == "command":
            worse["command"] = "slim"
        else:
            del worse["exit_code"]
        assert faults(worse), change
    assert faults({**failed, "error": {**failed["error"], "new": 1}})
    assert faults({**failed, "summary": []})


def test_the_page_has_the_fields_of_the_schema() -> None:
    text = page("json")
    head, mark, _ = text.partition(MARK)
    assert mark
    whole = head + mark + "\n" + "".join(f"{line}\n" for line in rendered())
    if UPDATE:
        (FOLDER / "json.md").write_text(whole, encoding="utf-8")
        (FOLDER / "schema.json").write_text(formatted(SCHEMA) + "\n", encoding="utf-8")
    assert text == whole
    assert formatted(SCHEMA) + "\n" == (FOLDER / "schema.json").read_text(encoding="utf-8")


MARK = "## The fields\n"
"""What follows is made of the schema."""


def rendered() -> Iterator[str]:
    """Yield the lines of a section for each definition."""
    yield "In these lists, `a.b` is the field `b` of the object `a`, and `a[].b` is a field"
    yield "of each object in the array `a`. The keys of a map come from the file. Every"
    yield "command has the fields of \"Every object\"; commands that write also have those of"
    yield "\"Commands that write\"."
    for name, node in DEFS.items():
        yield ""
        yield f"### {node['title']}"
        yield ""
        if "description" in node:
            yield from textwrap.wrap(node["description"], 80, break_on_hyphens=False)
            yield ""
        referred = tuple(path for path, below in fields(node) if inner(below) is not below)
        for path, below in fields(node):
            if "description" not in below or any(path.startswith((f"{up}.", f"{up}[")) for up in referred):
                continue
            required = name != "failure" or "." not in path or path.split(".")[1] in ERROR["required"]
            words = " or ".join(sorted(said(below), key="null".__eq__)) + ("" if required else ", optional")
            line = f"- `{path}` ({words}): {below['description']}"
            yield from textwrap.wrap(line, 80, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)


ERROR = DEFS["failure"]["properties"]["error"]


def said(node: dict[str, Any]) -> set[str]:
    """The types of a field in words."""
    if "anyOf" in node:
        return set().union(*map(said, node["anyOf"]))
    if "$ref" in node:
        return {node["$ref"].rpartition("/")[2].replace("_", " ")}
    if "const" in node or "enum" in node:
        *most, last = ("null" if value is None else f"`{value}`" for value in node.get("enum", [node.get("const")]))
        return {f"{', '.join(most)} or {last}" if most else last}
    if "items" in node:
        inside = " or ".join(sorted(said(node["items"])))
        return {f"array of {several(inside)}"} | ({"null"} if "null" in kinds(node) else set())
    below = node.get("additionalProperties")
    if isinstance(below, dict):
        return {f"map of {several(' or '.join(sorted(said(below))))}"}
    return kinds(node) or {"any"}


def several(words: str) -> str:
    head, _, rest = words.partition(" ")
    return words if words.split()[0] in ("any", "statistics", "values") else f"{head}s" + (f" {rest}" if rest else "")
