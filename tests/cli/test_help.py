"""ckptfix help: topics, the help of commands, near names."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import click
import pytest
from cli.conftest import Cli
from forks import MAIN, Forks

import ckptfix
from ckptfix.cli import COMPLETE, commands
from ckptfix.cli import help as help_command
from ckptfix.cli.help import plain
from ckptfix.command_table import COMMANDS
from ckptfix.docs import TOPICS, page

pytestmark = pytest.mark.sampled(1_000)  # each row is a rule of its own


def loaded(name: str) -> click.Command | None:
    return commands.get_command(click.Context(commands), name)


def test_the_topics_are_listed_with_a_line_each(cli: Cli) -> None:
    result = cli("help")
    assert result.exit_code == 0
    for topic, summary in TOPICS.items():
        assert re.search(rf"^  {topic} +{re.escape(summary)}$", result.stdout, re.MULTILINE)


@pytest.mark.parametrize("topic", TOPICS)
def test_a_topic_is_its_page_for_a_terminal(cli: Cli, topic: str) -> None:
    result = cli("help", topic)
    assert result.exit_code == 0
    assert result.stdout == plain(page(topic))
    assert "```" not in result.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_what_its_help_says(cli: Cli, name: str) -> None:
    result = cli("help", name)
    assert result.exit_code == 0
    full = "".join(result.stdout.split())
    command = commands.get_command(click.Context(commands), name)
    assert command is not None and command.help is not None
    for param in command.params:
        record = param.get_help_record(click.Context(command)) if isinstance(param, click.Option) else None
        assert record is None or "".join(record[1].split()) in full, record
    assert "".join(command.help.split()) in full and "Examples:" in full


def test_a_command_of_a_group_names_its_own_help(cli: Cli) -> None:
    groups = {name: command for name in COMMANDS if isinstance(command := loaded(name), click.Group)}
    inside = [(name, below) for name, group in groups.items() for below in group.commands]
    assert len(inside) > 5
    for name, below in inside:
        assert f"`ckptfix help {name} {below}` explains every option." in cli(name, below, "--help").stdout
        assert cli("help", name, below).stdout.startswith(f"Usage: ckptfix {name} {below} ")


@pytest.mark.parametrize(
    ("typed", "meant"), [("recipe", "recipes"), ("Format", "formats"), ("strip_module", "strip-module")]
)
def test_a_mistyped_topic_is_answered_with_the_nearest(cli: Cli, typed: str, meant: str) -> None:
    result = cli("help", typed)
    assert result.exit_code == 2
    assert meant in result.stderr.partition("Did you mean")[2]
    assert result.stdout == ""


def test_no_near_topic_no_guess(cli: Cli) -> None:
    result = cli("help", "qqqqqq")
    assert result.exit_code == 2
    assert "Did you mean" not in result.stderr
    assert "`ckptfix help` lists the topics" in result.stderr


@pytest.mark.parametrize(
    ("words", "title", "line"),
    [
        (("nan",), "nan-values", "ckptfix doctor --explain nan-values"),
        (("nan",), "stats: ", "ckptfix stats --help"),
        (("resume",), "Which step do I resume from?", "ckptfix doctor out"),
        (("resume", "other", "gpus"), "Resume on other GPUs", "ckptfix "),
        (("fp16",), "cast: ", "ckptfix cast --help"),
        (("module", "prefix"), "strip-module: ", "ckptfix strip-module --help"),
    ],
)
def test_other_words_are_searched(cli: Cli, words: tuple[str, ...], title: str, line: str) -> None:
    result = cli("help", *words)
    assert result.exit_code == 0
    rows = result.stdout.splitlines()
    at = next(number for number, row in enumerate(rows) if title in row)
    assert rows[at + 1].strip().startswith(line)


def test_the_common_options_have_a_page(cli: Cli) -> None:
    text = cli("help", "options").stdout
    assert all(option in text for option in ("--in-place", "--output", "--force", "--out-dir", "--jobs", "--json"))


def test_a_terminal_gets_a_pager(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    paged: list[str] = []
    monkeypatch.setattr(help_command, "is_terminal", lambda stream: True)
    monkeypatch.setattr("click.echo_via_pager", paged.append)
    assert cli("help", "formats").stdout == ""
    assert paged == [plain(page("formats"))]


def test_topics_and_commands_are_completed(program: Forks) -> None:
    environment = {COMPLETE: "bash_complete", "COMP_WORDS": "ckptfix help re", "COMP_CWORD": "2"}
    shown = program(f"import sys; sys.argv = ['ckptfix']; {MAIN}", environment=environment).stdout
    assert {line.partition(",")[2] for line in shown.splitlines()} == {"recipes", "remote", "rename", "repair"}


def test_markdown_becomes_plain_text() -> None:
    text = "# A\n\nSee [x\ny](y.md#z), [`u v`](w.md), `[a](b)`.\n\n```console\n$ [c](d)\n\n2\n```\n"
    assert plain(text) == "# A\n\nSee x\ny, `u v`, `[a](b)`.\n\n    $ [c](d)\n\n    2\n"


def test_the_version_names_what_a_report_should(cli: Cli) -> None:
    done = cli("--version")
    assert done.exit_code == 0 and done.stdout == cli("-V").stdout
    first, second = done.stdout.splitlines()
    assert first == f"ckptfix {ckptfix.__version__}"
    assert second.startswith(f"Python {platform.python_version()}, torch {metadata.version('torch')}, ")
    assert platform.system() in second


def test_the_version_imports_no_torch(tmp_path: Path) -> None:
    """A torch that would fail where it is imported."""
    (tmp_path / "torch.py").write_text("raise AssertionError")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", "ckptfix", "--version"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_torch_that_is_not_installed_is_said(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        if name == "torch":
            raise metadata.PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(metadata, "version", absent)
    assert "torch not installed" in cli("--version").stdout


def test_the_schema_is_printed_as_it_is(cli: Cli) -> None:
    done = cli("help", "json-schema")
    assert done.exit_code == 0 and json.loads(done.stdout)["$schema"].startswith("https://json-schema.org/")
    assert "json-schema" in cli("help").stdout


def test_a_long_default_is_left_out_whole(cli: Cli) -> None:
    for name in ("diff", "inspect", "stats"):
        lines = [line for line in cli(name, "--help").stdout.splitlines() if line.strip().startswith("--limit")]
        assert len(lines) == 1 and lines[0].endswith("0 for all."), lines
