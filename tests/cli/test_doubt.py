"""The choice of the model in doubt: commands that only read print one note, and go on."""

from __future__ import annotations

import html
import json
import queue
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cli.conftest import Cli
from click.testing import Result

from ckptfix.browse.model import screen_text
from ckptfix.browse.model.contents import ContentItem
from ckptfix.browse.model.outline import Outline
from ckptfix.browse.model.session import Session
from ckptfix.formats import open_checkpoint
from ckptfix.ops import choose

READ = {
    "inspect": ("inspect", "doubt.pth"),
    "doctor": ("doctor", "doubt.pth"),
    "doctor --fast": ("doctor", "doubt.pth", "--fast"),
    "ls": ("ls", "."),
    "stats": ("stats", "doubt.pth"),
    "stats --csv": ("stats", "doubt.pth", "--csv"),
    "stats --by-layer": ("stats", "doubt.pth", "--by-layer"),
    "diff, A": ("diff", "doubt.pth", "plain.pth"),
    "diff, B": ("diff", "plain.pth", "doubt.pth"),
    "diff --keys-only": ("diff", "doubt.pth", "doubt.pth", "--keys-only"),
    "diff --at of the other": ("diff", "doubt.pth", "plain.pth", "--at", "net"),
}
"""What is run -> its command line."""

CHOSEN = {
    "stats --at": ("stats", "doubt.pth", "--at", "detector"),
    "diff --at of each": ("diff", "doubt.pth", "plain.pth", "--at", "detector", "--at", "net"),
    "digest": ("digest", "doubt.pth"),
}
"""Command lines that choose, or that choose nothing."""


@pytest.fixture
def note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file in doubt and one that is not, in the current folder; what is said of the first."""
    monkeypatch.chdir(tmp_path)
    weights = torch.nn.Linear(3, 2).state_dict()
    torch.save({"detector": weights, "zeta": {"a": torch.ones(100)}}, "doubt.pth")
    torch.save({"net": weights}, "plain.pth")
    (found,) = choose.remarks(open_checkpoint("doubt.pth"))
    assert found.id == "doubtful-model" and not list(choose.remarks(open_checkpoint("plain.pth")))
    return found.message


def one_line(result: Result) -> str:
    return " ".join((result.stdout + result.stderr).split())


@pytest.mark.parametrize("name", READ)
def test_what_only_reads_prints_the_note(cli: Cli, note: str, name: str) -> None:
    result = cli(*READ[name])
    assert result.exit_code == (1 if name in ("diff, A", "diff, B") else 0)
    assert one_line(result).count(note) == (2 if name == "diff --keys-only" else 1)
    if name == "stats --csv":
        assert note not in result.stdout
    rows = [json.loads(line) for line in cli(*READ[name], "--json").stdout.splitlines()]
    found = [row for row in rows for row in row["findings"] if row["id"] == "doubtful-model"]
    assert found and all(note in row["message"] and row["severity"] == "info" for row in found)


@pytest.mark.parametrize("name", CHOSEN)
def test_a_choice_by_address_is_in_no_doubt(cli: Cli, note: str, name: str) -> None:
    assert note not in one_line(cli(*CHOSEN[name]))
    assert "doubtful-model" not in cli(*CHOSEN[name], "--json").stdout


def test_the_note_is_no_difference(cli: Cli, note: str) -> None:
    assert cli("diff", "doubt.pth", "doubt.pth").exit_code == 0
    assert json.loads(cli("diff", "doubt.pth", "doubt.pth", "--json").stdout)["same"]
    assert cli("diff", "doubt.pth", "plain.pth", "--html", "page.html").exit_code == 1
    assert note in html.unescape(Path("page.html").read_text())


class Quiet:
    """A screen that nobody looks at."""

    def filled(self, *, keep: bool) -> None:
        pass

    def told(self, item: ContentItem | None = None) -> None:
        pass

    def warned(self, text: str) -> None:
        raise AssertionError(text)


@pytest.mark.parametrize("other", [None, "plain.pth", "doubt.pth"])
def test_browse_shows_the_note(note: str, other: str | None) -> None:
    posted: queue.Queue[Callable[[], object]] = queue.Queue()
    session = Session("doubt.pth", other, None, Quiet(), posted.put)
    session.load()
    while session.jobs:
        posted.get(timeout=30)()
    node = Outline(session.items).root
    lines = [line for _, line in screen_text.details(session, node, 80, 40, everything=True)]
    assert sum(note in line for line in lines) == (2 if other == "doubt.pth" else 1)
