"""The group: what it lists, what it imports, what it says to a mistyped name."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import click
import pytest
from builders import written
from cli.conftest import Cli, wrapped
from forks import MAIN, Forks

import ckptfix
from ckptfix.cli import commands
from ckptfix.command_table import COMMANDS

pytestmark = pytest.mark.sampled(1_000)  # each row is a rule of its own

ROOT = Path(__file__).parents[2]


def command(name: str) -> click.Command:
    found = commands.get_command(click.Context(commands), name)
    assert found is not None
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_every_help_ends_with_examples_that_parse(cli: Cli, name: str) -> None:
    result = cli(name, "--help")
    assert result.exit_code == 0
    head, _, tail = result.stdout.rpartition("\nExamples:\n")
    examples, _, more = tail.partition("\n\n")
    assert head and f"`ckptfix help {name}`" in more
    for example in examples.splitlines():
        words = shlex.split(example.split(" >")[0])
        assert words[:2] == ["ckptfix", name]
        command(name).make_context(name, words[2:])


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_a_screen(program: Forks, name: str) -> None:
    lines = program(MAIN, [name, "--help"], environment={"COLUMNS": "100"}).stdout.splitlines()
    assert len(lines) <= 32 and max(map(len, lines)) <= 100
    titles = [line for line in lines if line and not line.startswith((" ", "`", "Usage"))]
    assert titles[-1] == "Examples:" and titles == sorted(titles, key=TITLES.index)


TITLES = ["Options:", "Common options:", "Commands:", "Examples:"]


def test_most_helps_have_twenty_five_lines_and_no_sentence_is_cut(program: Forks) -> None:
    shown = [program(MAIN, [name, "--help"], environment={"COLUMNS": "80"}).stdout for name in COMMANDS]
    assert [len(text.splitlines()) <= 25 for text in shown].count(False) <= 3
    assert not [line for text in shown for line in text.splitlines() if line.startswith("  -") and " ..." in line]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("cast", "a", "b", "--dtype", "fp16"), "Use --to DTYPE"),
        (("cast", "a", "b", "--drop", "x"), "`ckptfix select` has it"),
        (("select", "a", "b", "--exclude", "x"), "Use --drop GLOB"),
        (("map-location", "a", "b", "--to", "cuda:1"), "Use DEVICE as the last word"),
        (("inspect", "a", "--dtype", "x"), "`ckptfix cast` has --to DTYPE"),
        (("fix", "a", "--no-such-thing"), "`ckptfix fix --help` lists them"),
        (("fix", "a", "--lik", "b"), "Did you mean --like"),
        (("convert", "ddp.pth", "x.safetensors", "--to", "fp16"), "`ckptfix cast IN OUT --to fp16`"),
        (("to-cuda", "a"), "Did you mean map-location?"),
        (("drop", "a", "fc.*"), "Use `ckptfix select a --drop 'fc.*'`."),
        (("merge-shards", "a"), "Did you mean convert?"),
        (("rename", "a", "b", "s/layer(.)/stage/"), "--sub 'layer(.)=stage'"),
        (("rename", "a", "b", "layer=stage"), "--sub layer=stage"),
        (("fix", "a", "b", "c"), "Unexpected argument 'c'"),
        (("fix", "ddp.pht"), "did you mean ddp.pth?"),
        (("doctor", "qqqqq.safetensors"), "no such file or folder"),
    ],
)
def test_what_is_typed_wrong_is_answered_with_what_is_right(
    cli: Cli, ddp: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(ddp.parent)
    done = cli(*words)
    assert done.exit_code == 2 and said in done.stderr, done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_called_as_its_row_says(name: str) -> None:
    assert command(name).name == name
    assert command(name).help, "its docstring is its help"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_row_says_what_the_command_has(name: str) -> None:
    row, found = COMMANDS[name], command(name)
    params = {str(param.name) for param in found.params}
    options = {option for param in found.params for option in param.opts}
    assert row.writes == ("dest" in params)
    assert row.in_place == ("in_place" in params)
    assert row.at == ("--at" in options)
    assert not row.home or callable(getattr(ckptfix, row.function))
    assert row.writes or not (row.word or row.chained)


def test_no_two_outputs_of_one_input_have_one_name() -> None:
    words = [row.output_word for row in COMMANDS.values() if row.writes]
    assert sorted(set(words)) == sorted(words)


def test_every_module_of_a_verb_has_a_row() -> None:
    rows = {row.module for row in COMMANDS.values()}
    shared = {"__init__", "common", "console", "exits", "look", "progress", "tables", "tree", "verdict"}
    modules = {path.stem for path in (ROOT / "ckptfix/cli").glob("*.py")} - shared
    modules |= {f"values.{path.stem}" for path in (ROOT / "ckptfix/cli/values").glob("[!_]*.py")}
    assert modules | {"fleet", "lora"} == rows


def test_every_verb_has_a_twin_test() -> None:
    tested = {path.stem.removeprefix("test_") for path in Path(__file__).parent.glob("test_*.py")}
    assert {row.module.rpartition(".")[2] for row in COMMANDS.values()} <= tested


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_lists_every_command(cli: Cli, flag: str) -> None:
    result = cli(flag)
    assert result.exit_code == 0
    head, _, behind = result.stdout.partition("More commands:\n")
    for name, row in COMMANDS.items():
        if row.behind:
            assert re.search(rf"\b{name}\b", behind)
        else:
            assert re.search(rf"^  {name} +{re.escape(row.summary)}$", head, re.MULTILINE)
    assert {"strip-module", "add-module", "to-cpu", "map-location", "diff"} <= {
        name for name, row in COMMANDS.items() if not row.behind
    }
    assert sum(not row.behind for row in COMMANDS.values()) <= 20 + ("wash-tensors" in COMMANDS)
    assert "Examples:\n  ckptfix model.pth " in head


def test_help_imports_nothing_but_the_group() -> None:
    script = (
        "import sys; from ckptfix.cli import commands; commands.main(['--help'], standalone_mode=False);"
        "print(*(name for name in sys.modules), file=sys.stderr)"
    )
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stderr.split()
    ours = {name for name in loaded if name.startswith("ckptfix")}
    shared = {f"ckptfix.cli.shared.{name}" for name in ("colors", "console", "exits", "terminal_width")}
    cli = {"ckptfix", "ckptfix.cli", "ckptfix.cli.shared"} | shared
    others = ("command_table", "errors", "hooks", "io", "io.write_log", "platform", "urls", "version")
    assert ours == cli | {f"ckptfix.{name}" for name in others}
    assert not {"torch", "numpy", "safetensors", "json"} & set(loaded)



def test_python_dash_m_is_the_same_program() -> None:
    shown = subprocess.run([sys.executable, "-m", "ckptfix", "-h"], capture_output=True, text=True, check=True).stdout
    assert shown.startswith("Usage: ckptfix ")
    assert find_spec("ckptfix.__main__")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("strip_module", "strip-module"), ("inspekt", "inspect"), ("Diff", "diff"), ("tocpu", "to-cpu")],
)
def test_a_mistyped_command_is_answered_with_the_nearest(cli: Cli, typed: str, meant: str) -> None:
    result = cli(typed, "x")
    assert result.exit_code == 2
    assert f"Did you mean {meant}" in result.stderr
    assert result.stdout == ""


def test_no_near_one_no_guess(cli: Cli) -> None:
    result = cli("qqqqqq")
    assert result.exit_code == 2
    assert "Did you mean" not in result.stderr


def test_no_command_at_all_shows_the_help(cli: Cli) -> None:
    result = cli()
    assert result.exit_code == 0 and result.stderr == ""
    assert result.stdout == cli("--help").stdout


def test_the_readme_names_every_command() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    missing = [name for name in COMMANDS if not re.search(rf"(?<![\w-]){name}(?![\w-])", text)]
    assert not missing


def test_a_terminal_of_forty_columns_still_gets_help(program: Forks) -> None:
    for name in COMMANDS:
        assert program(MAIN, [name, "-h"], environment={"COLUMNS": "40"}).code == 0, name


def test_a_file_called_dash_is_one_with_its_folder(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "-", wrapped())
    assert cli("inspect", "./-").exit_code == 0
    assert cli("strip-module", "./-", "./--").exit_code == 0


def test_help_says_what_a_dash_is(cli: Cli) -> None:
    assert "- is standard input or output" in " ".join(cli("--help").stdout.split())
