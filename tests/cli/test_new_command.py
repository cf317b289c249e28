"""A command that is a row in the table, a module of the command line and a function: it passes every generic check."""

from __future__ import annotations

import copy
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import json_contract
import pytest
from cli import (
    test_commands,
    test_default_names,
    test_fleet,
    test_help,
    test_keep_old,
    test_many,
    test_private,
    test_streams,
)
from cli.conftest import Cli, wrapped
from file_commands import in_python, words_of
from jsonschema import Draft202012Validator
from unit.ops import test_arguments, test_suffixes

import ckptfix
from ckptfix import hooks
from ckptfix.cli.shared.common import writes
from ckptfix.command_table import COMMANDS, Chained, Command
from ckptfix.findings import remedies, table
from ckptfix.findings.row import Finding
from ckptfix.findings.steps import step
from ckptfix.ops import chain, relocate

ROW = Command(
    "wash-tensors", "Devices", "Make every tensor clean.", example="ckptfix wash-tensors IN.pth OUT.pth",
    home="ops.wash", writes=True, other_words=("rinse",), chained=Chained(95),
)  # fmt: skip
NAME = ROW.name


def wash_tensors(source: str, dest: str | None = None, **how: Any) -> relocate.RelocateResult:
    """Write a copy of `source` for the CPU, as the function of a command."""
    return relocate.to_cpu(source, dest, **how)


def command_of() -> Any:
    """The command, as its module below ``ckptfix.cli`` would make it."""

    @writes(NAME)
    def command(source: str, dest: str | None, how: Any) -> Any:
        """Make every tensor of IN clean."""
        return wash_tensors(source, dest, **how.keywords())

    return command


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(COMMANDS, NAME, ROW)
    # These two are made of the table when the package is imported.
    monkeypatch.setitem(ckptfix._HOMES, ROW.function, ROW.home)
    monkeypatch.setitem(hooks._registered, f"command.{NAME}", f"ckptfix.{ROW.home}:{ROW.function}")
    for name, content in {"ckptfix.cli.wash_tensors": {"command": command_of()}, "ckptfix.ops.wash": {}}.items():
        module = ModuleType(name)
        vars(module).update(content or {"wash_tensors": wash_tensors})
        monkeypatch.setitem(sys.modules, name, module)
    schema = copy.deepcopy(json_contract.SCHEMA)
    schema["else"]["properties"]["command"]["enum"].append(NAME)
    for rule in schema["else"]["allOf"]:
        names = rule["if"]["properties"]["command"].get("enum", [])
        names += [NAME] if "to-cpu" in names else []
    monkeypatch.setattr(json_contract, "VALIDATOR", Draft202012Validator(schema))
    yield
    vars(ckptfix).pop(ROW.function, None)


def test_its_help_is_complete(cli: Cli) -> None:
    test_commands.test_every_help_ends_with_examples_that_parse(cli, NAME)
    test_commands.test_every_command_is_called_as_its_row_says(NAME)
    test_commands.test_every_row_says_what_the_command_has(NAME)
    test_commands.test_no_two_outputs_of_one_input_have_one_name()
    test_commands.test_help_lists_every_command(cli, "--help")
    test_help.test_a_command_is_what_its_help_says(cli, NAME)


def test_it_is_completed_and_proposed(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    for typed in ("rinse", "wash_tensors", "wash-tensor"):
        test_commands.test_a_mistyped_command_is_answered_with_the_nearest(cli, typed, NAME)
    for name, value in {"_CKPTFIX_COMPLETE": "bash_complete", "COMP_WORDS": "ckptfix was", "COMP_CWORD": "1"}.items():
        monkeypatch.setenv(name, value)
    assert f"plain,{NAME}" in cli().stdout


def test_its_output_has_a_name(cli: Cli, ddp: Path) -> None:
    test_default_names.test_the_name_is_what_was_done(cli, ddp, NAME, "wash-tensors")


def test_it_prints_json(cli: Cli, ddp: Path) -> None:
    done = json.loads(cli(NAME, ddp, "--json").stdout)
    assert (done["command"], done["output"]) == (NAME, str(ddp.with_suffix(f".{NAME}.pth")))


def test_it_writes_many(cli: Cli, tmp_path: Path) -> None:
    test_many.test_every_command_writes_to_a_folder_what_it_writes_alone(cli, NAME, tmp_path)


@pytest.mark.parametrize("option", [None, False, True])
def test_it_takes_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: bool | None) -> None:
    (tmp_path / "spool").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "spool"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    if option is None:
        test_streams.test_standard_input_is_read_as_a_file_is(NAME, tmp_path)
    else:
        test_streams.test_standard_output_gets_what_a_file_would(NAME, option, tmp_path)


def test_an_old_output_is_kept(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.pth").write_bytes(wrapped())
    Path("b.pth").write_bytes(test_keep_old.OLD)
    test_keep_old.test_a_checkpoint_that_is_replaced_is_kept(cli, NAME)


def test_it_runs_in_a_fleet(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    Path("in/0.pth").write_bytes(wrapped())
    test_fleet.test_every_other_command_is_one_for_a_fleet(cli, tmp_path, NAME)
    assert f"Did you mean {NAME}" in cli("fleet", "plan", "in/0.pth", "--", "wash-tensor").stderr
    monkeypatch.setitem(COMMANDS, NAME, ROW._replace(not_in_a_fleet="it is a toy"))
    assert f"{NAME} cannot run in a fleet: it is a toy." in cli("fleet", "plan", "in/0.pth", "--", NAME).stderr


def test_it_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(test_private.WRITING, NAME, words_of(NAME))
    test_private.test_no_file_is_more_open_than_the_input(NAME, tmp_path)


def test_its_function_is_public(tmp_path: Path) -> None:
    test_arguments.test_a_file_that_is_not_there((NAME, in_python(NAME)), tmp_path)
    test_suffixes.test_the_output_has_the_format_that_its_suffix_names(tmp_path, NAME, ".pth", ".safetensors")


def test_a_finding_may_propose_it_and_fix_runs_it(ddp: Path) -> None:
    finding = Finding("device-tags", "warning", "", "they are dirty", steps=step(NAME))
    (line,) = remedies.chain(str(ddp), [(finding, table.remedy_of(finding, str(ddp)))])
    assert line.argv() == ("ckptfix", NAME, str(ddp), str(ddp.with_suffix(f".{NAME}.pth")))
    with chain.Chain(str(ddp), None, dry_run=True) as steps:
        assert steps.carry_out([line])
        assert [done.command for done in steps.steps] == [line.argv()]
