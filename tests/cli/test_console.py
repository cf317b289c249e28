from __future__ import annotations

import json
import math
import sys
from typing import Any

import pytest
from click.testing import CliRunner

from ckptfix.cli.shared import console as console_module
from ckptfix.cli.shared.console import Console
from ckptfix.findings.row import Finding

ENVELOPE = {"schema_version": 1, "command": "inspect", "exit_code": 1}


def emitted(document: dict[str, Any]) -> str:
    with CliRunner().isolation() as (out, _, _):
        console = Console()
        console.command = "inspect"
        console.emit(document, 1)
        return out.getvalue().decode()


def test_json_is_ascii_on_one_line_and_takes_any_text() -> None:
    text = emitted({"name": "モデル\udcff\x1b", "n": [1, 2.5, None, True]})
    assert text.isascii()
    assert text.count("\n") == 1
    assert json.loads(text) == {**ENVELOPE, "name": "モデル\udcff\x1b", "n": [1, 2.5, None, True]}
    assert list(json.loads(text))[:3] == list(ENVELOPE)


def test_numbers_that_json_lacks_are_strings() -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    text = emitted({"a": math.nan, "b": [math.inf, (-math.inf, 1.5)], "c": {"d": math.nan}})
    assert json.loads(text, parse_constant=refuse) == {
        **ENVELOPE,
        "a": "NaN",
        "b": ["Infinity", ["-Infinity", 1.5]],
        "c": {"d": "NaN"},
    }


@pytest.mark.parametrize(("json_on", "quiet"), [(True, False), (False, True)])
def test_lines_for_people_only_when_people_read(json_on: bool, quiet: bool) -> None:
    console = Console()
    console.json, console.quiet = json_on, quiet
    with CliRunner().isolation() as (out, _, _):
        console.say("hello")
        assert out.getvalue() == b""


def test_findings_are_a_line_each_with_their_remedy() -> None:
    findings = [
        Finding("a", "info", "", "only so you know"),
        Finding("b", "warning", "x\x1b", "odd", offset=16, fix="ckptfix doctor"),
    ]
    console = Console()
    with CliRunner().isolation() as (_, err, _):
        console.findings(findings)
        loud = err.getvalue().decode()
        console.quiet = True
        console.findings(findings)
        both = err.getvalue().decode()
    warning = "warning: x\\x1b @ 0x10: odd\n  hint: ckptfix doctor\n"
    assert loud == f"note: only so you know\n{warning}"
    assert both == loud + warning


def test_a_flood_of_findings_is_cut_on_request() -> None:
    findings = [Finding("a", "warning", str(index), "odd") for index in range(5)]
    with CliRunner().isolation() as (_, err, _):
        Console().findings(findings, most=2)
        lines = err.getvalue().decode().splitlines()
    assert lines == ["warning: 0: odd", "warning: 1: odd", "... 3 more findings (--json has all)"]


def test_a_terminal_gets_a_cause_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Finding("lost", "warning", f"t{number}", "is lost") for number in range(9)]
    Console().findings(rows)
    assert len(capsys.readouterr().err.splitlines()) == 9, "a pipe gets all"
    monkeypatch.setattr(console_module, "is_terminal", lambda stream: stream is sys.stderr)
    Console().findings([*rows, Finding("filled", "warning", "t9", "is filled")])
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 5 and "6 more warnings like these: lost" in lines[-1]
