"""The schema of what ``--json`` prints, and whether a run keeps to it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from click.testing import Result
from jsonschema import Draft202012Validator

from ckptfix.docs import schema

SCHEMA: dict[str, Any] = json.loads(schema())
VALIDATOR = Draft202012Validator(SCHEMA)
COLUMNS = 110


def documents(text: str) -> list[dict[str, Any]]:
    """The objects in what a command printed: one, on one line or several, or one on each line."""
    try:
        return [json.loads(text)] if text.strip() else []
    except ValueError:
        return [json.loads(line) for line in text.splitlines()]


def faults(document: object) -> list[str]:
    """What the schema has against `document`; empty if it keeps to it."""
    found = []
    for error in VALIDATOR.iter_errors(document):
        below = [error]
        while below[-1].context:
            below.append(max(below[-1].context, key=lambda inner: len(inner.absolute_path)))
        found.append(f"{below[-1].json_path}: {below[-1].message[:300]}")
    return found


def checked(result: Result) -> list[dict[str, Any]]:
    """The objects that a run with ``--json`` printed, each as the schema has it, with the exit code of the run."""
    printed = documents(result.stdout)
    for document in printed:
        assert not faults(document), faults(document)
    if printed:
        codes = {document["exit_code"] for document in printed}
        # ls has failed if it could read none of them; 1 is for --check.
        order = (1, 0, 2) if printed[0]["command"] == "ls" else (2, 3, 1, 0)
        assert result.exit_code == next(code for code in order if code in codes), (codes, result.exit_code)
    return printed


def formatted(value: Any, indent: int = 0, used: int = 0) -> str:
    """`value` as JSON, what fits on a line on one line.

    Args:
        used: columns that are taken on its first line, behind the indent.
    """
    line = json.dumps(value, ensure_ascii=False)
    if indent + used + len(line) < COLUMNS or not isinstance(value, dict | list) or not value:
        return line
    space = " " * (indent + 2)
    if isinstance(value, dict):
        rows = [(f"{json.dumps(name)}: ", item) for name, item in value.items()]
        ends = "{}"
    else:
        rows = [("", item) for item in value]
        ends = "[]"
    inner = ",\n".join(f"{space}{name}{formatted(item, indent + 2, len(name) + 1)}" for name, item in rows)
    return f"{ends[0]}\n{inner}\n{' ' * indent}{ends[1]}"


def inner(node: dict[str, Any]) -> dict[str, Any]:
    """What `node` refers to, without the choice of null."""
    choices = [choice for choice in node.get("anyOf", ()) if choice != {"type": "null"}]
    if choices:
        node = choices[0]
    return SCHEMA["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node


def kinds(node: dict[str, Any]) -> set[str]:
    """The JSON types that `node` allows; empty for any."""
    if "anyOf" in node:
        return set().union(*map(kinds, node["anyOf"]))
    if "const" in node or "enum" in node:
        return {_JSON[type(value)] for value in node.get("enum", [node.get("const")])}
    node = inner(node)
    found = node.get("type", [])
    return {found} if isinstance(found, str) else set(found)


_JSON = {
    dict: "object", list: "array", str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"
}  # fmt: skip


def fields(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """(path, its schema) of every field below `node`; elements of arrays are ``path[]``, values of maps ``path.*``."""
    node = inner(node)
    for name, below in node.get("properties", {}).items():
        place = f"{path}.{name}" if path else name
        yield place, below
        yield from fields(below, place)
    for key, mark in (("items", "[]"), ("additionalProperties", ".*")):
        below = node.get(key)
        if isinstance(below, dict):
            yield path + mark, below
            yield from fields(below, path + mark)


def printed(value: Any, known: dict[str, dict[str, Any]], path: str = "") -> Iterator[tuple[str, str]]:
    """(path, JSON type) of everything in `value`, with paths as `fields` has them; nothing below what may be any."""
    if path:
        yield path, _JSON[type(value)]
        if not kinds(known.get(path, {})):
            return
    if isinstance(value, dict):
        for key, item in value.items():
            below = f"{path}.{key}" if path else key
            yield from printed(item, known, f"{path}.*" if f"{path}.*" in known else below)
    elif isinstance(value, list):
        for item in value:
            yield from printed(item, known, f"{path}[]")
