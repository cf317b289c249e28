"""A pattern, a key or an address that a user types and that matches nothing is an error, for every verb alike."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from cli.conftest import Cli, wrapped
from file_commands import LINES

from ckptfix.cli import commands
from ckptfix.command_table import COMMANDS
from ckptfix.names import typed

FORMS = frozenset({"GLOB", "KEY", "PATH", "REGEX=REPLACEMENT", "GLOB | /REGEX/", "PREFIX", "P"})
"""The metavars of options that take a pattern, a key, a prefix or an address."""

STAYS = {
    ("inspect", "--filter"): "shows an empty list",
    ("strip-module", "--prefix"): "writes an identical copy and says so",
    ("add-module", "--prefix"): "it adds, and matches nothing",
    ("diff", "--strip"): "a prefix to ignore, as strip-module's",
    ("browse", "--at"): "an interactive screen; test_browse has it",
}
"""Options that accept what matches nothing."""

NEEDS = {"--like-at": ("--like", "{model}"), "--check-at": ("--check", "{model}")}
"""Option -> the words without which it is wrong usage."""

ADDRESSES = frozenset({"--at", "--like-at", "--check-at"})


def options() -> Iterator[tuple[str, str]]:
    for name in COMMANDS:
        command = commands.get_command(click.Context(commands), name)
        assert command is not None
        for param in command.params:
            if isinstance(param, click.Option) and param.metavar in FORMS:
                yield name, param.opts[0]


CASES = sorted(set(options()) - set(STAYS))


def test_every_option_is_known() -> None:
    assert set(STAYS) <= set(options())
    assert {("select", "--drop"), ("rename", "--sub"), ("cast", "--only"), ("stats", "--filter")} <= set(CASES)


def line(name: str, option: str, model: Path, out: Path) -> list[str]:
    """The command line of a verb on `model`, with a value of `option` that matches nothing."""
    row = COMMANDS[name]
    needed = LINES.get(name)
    if name == "set-metadata":
        model = model.with_name("t.safetensors")
    words = [name, str(model)]
    if name == "diff":
        words.append(str(model))
    if needed is not None and needed.more:
        words.append(str(model))
    if row.writes:
        words += ["-o", str(out.with_suffix(model.suffix))]
    if needed is not None and (option in ADDRESSES or name == "cast"):
        words += needed.options
    words += NEEDS.get(option, ()) if name != "match" else ()
    value = "nothing.of.this=x" if option == "--sub" else "nothing.of.this"
    words += [option, value]
    return [word.replace("{torch}", str(model)).replace("{model}", str(model)) for word in words]


@pytest.fixture
def model(tmp_path: Path, tensors: Path) -> Path:
    tensors.rename(tmp_path / "t.safetensors")
    path = tmp_path / "model.pth"
    path.write_bytes(wrapped())
    return path


@pytest.mark.sampled(1_000)
@pytest.mark.parametrize(("name", "option"), CASES)
def test_what_matches_nothing_is_an_error(name: str, option: str, model: Path, tmp_path: Path, cli: Cli) -> None:
    before = sorted(tmp_path.iterdir())
    words = line(name, option, model, tmp_path / "out.pth")
    result = cli(*words, "--json")
    assert result.exit_code == 2, result.output
    error = json.loads(result.stdout)["error"]
    assert error["type"] == "NoSuchTensor", error
    assert error["hint"] and "nothing.of.this" in error["message"]
    assert sorted(tmp_path.iterdir()) == before, "nothing may be written"
    if option not in ADDRESSES:
        assert "--allow-unmatched" in error["hint"]
        more = ["--keep", "*"] if name in ("select", "convert") else []
        allowed = cli(*words, *more, "--allow-unmatched", *(["--quiet"] if name == "diff" else []))
        assert "nothing.of.this: " in allowed.stderr and allowed.exit_code in (0, 2), allowed.output


def test_the_nearest_keys_are_shown(model: Path, tmp_path: Path, cli: Cli) -> None:
    result = cli("select", model, tmp_path / "out.pth", "--drop", "fc.b*")
    assert result.exit_code == 2 and "did you mean 'module.fc.b*'?" in result.stderr


def test_of_several_inputs_the_others_go_on(model: Path, tmp_path: Path, cli: Cli) -> None:
    plain = tmp_path / "plain.pth"
    plain.write_bytes(wrapped(""))
    result = cli("select", model, plain, "--out-dir", tmp_path / "out", "--drop", "fc.bias")
    assert result.exit_code == 2 and "model.pth" in result.stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["plain.pth"]


@pytest.mark.parametrize("rules", ["no.{n}.such -> x.{n}", "no.such | drop"])
def test_a_map_is_wrong_only_if_no_row_matches(rules: str, model: Path, tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "rules").write_text(rules)
    words = ("rename", model, tmp_path / "out.pth", "--map", tmp_path / "rules")
    assert cli(*words).exit_code == 2
    assert not (tmp_path / "out.pth").exists()
    assert cli(*words, "--allow-unmatched").exit_code == 0
    (tmp_path / "rules").write_text(f"{rules}\nmodule.fc.bias -> b")
    result = cli(*words, "--force")
    assert result.exit_code == 0 and "matched no key" in result.stderr


@pytest.mark.parametrize(
    ("text", "kind", "expected"),
    [
        ("fc.*", "glob", ("module.fc.*",)),
        ("fc", "glob", ("module.fc.*",)),
        ("module.fc", "glob", ("module.fc.*",)),
        ("layr1.*", "glob", ("module.layer1.*",)),
        ("FC.weight", "glob", ("module.fc.weight",)),
        ("lyer", "regex", ("layer1",)),
        ("^fc", "regex", ("module.fc.weight", "module.fc.bias")),
        ("(?:", "regex", ()),
        ("fc.wieght", "key", ("module.fc.weight",)),
        ("zzz", "glob", ()),
    ],
)
def test_what_may_be_meant(text: str, kind: typed.Kind, expected: tuple[str, ...]) -> None:
    names = ["module.conv1.weight", "module.layer1.0.bn1.weight", "module.fc.weight", "module.fc.bias"]
    assert typed.meant(text, names, kind) == expected
