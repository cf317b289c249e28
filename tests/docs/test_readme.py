"""The table of error messages in the README, and its pictures."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from docs.pages import ROOT

from ckptfix.cli import commands

README = (ROOT / "README.md").read_text(encoding="utf-8")
TABLE = README.partition("## From the error message")[2].partition("\n## ")[0]
ROWS = re.findall(r"^\| (`.*`) \| `ckptfix ([^`]*)`.*\|$", TABLE, re.MULTILINE)


def test_the_table_has_eight_messages() -> None:
    assert len(ROWS) == 8


@pytest.mark.parametrize(("message", "line"), ROWS)
def test_a_message_leads_to_its_command(message: str, line: str) -> None:
    text = ". ".join(re.findall(r"`([^`]*)`", message))
    said = CliRunner().invoke(commands, ["doctor", "--error", text]).stdout
    assert said.startswith("This message usually means that")
    if line.startswith(("FILE", "doctor")):  # no one command is meant
        return
    assert f"Try: ckptfix {line.removesuffix(' FILE OUT')} FILE OUT" in said


@pytest.mark.parametrize(("name", "shown"), [("verdict", "[foreign-global]"), ("browse", "stem.weight")])
def test_a_picture_shows_a_run_and_loads_nothing(name: str, shown: str) -> None:
    assert f"(.github/{name}.svg)" in README
    text = (ROOT / f".github/{name}.svg").read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    assert shown in "".join("".join(root.itertext()).split())
    assert not re.findall(r"https?://(?!www\.w3\.org)", text) and "url(http" not in text
