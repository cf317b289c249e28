"""``match --check RULES``: a rules file is proved against both sides, or every fault of it is named."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

Cli = Callable[..., Any]

D = 6


class Source(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(D, 2 * D), nn.Linear(2 * D, D), nn.Linear(D, D))


class Target(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_a, self.up_b = nn.Linear(D, D), nn.Linear(D, D)
        self.down, self.head = nn.Linear(2 * D, D), nn.Linear(D, D)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.down(torch.cat([self.up_a(x), self.up_b(x)], -1)))


RIGHT = "0.{*} -> {up_a,up_b}.{*} | split\n1.{*} -> down.{*}\n2.{*} -> head.{*}\n"


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made: Any = ModuleType("their_rules")
    made.Source, made.Target = Source, Target
    monkeypatch.setitem(sys.modules, "their_rules", made)
    monkeypatch.chdir(tmp_path)
    torch.save(Source().state_dict(), "in.pth")
    torch.save(Target().state_dict(), "like.pth")
    return tmp_path


def checked(text: str, cli: Cli, *more: str) -> tuple[int, dict[str, Any]]:
    Path("x.rules").write_text(text)
    done = cli("match", "in.pth", "--check", "x.rules", "--json", *(more or ("--like", "like.pth")))
    return done.exit_code, json.loads(done.stdout)


def test_a_right_file_is_proved(files: Path, cli: Cli) -> None:
    code, found = checked(RIGHT, cli)
    assert code == 0 and found["reverses"] and found["verified"] is None and found["count"] == 3
    assert sorted(path.name for path in files.iterdir()) == ["in.pth", "like.pth", "x.rules"]


@pytest.mark.parametrize(
    ("text", "field", "names"),
    [
        (RIGHT + "lost.{*} -> found.{*}\n", "unused", ["lost.{*}"]),
        (RIGHT.replace("head", "tail"), "missing", ["head.weight", "head.bias"]),
        (RIGHT.replace("head", "tail"), "unexpected", ["tail.weight", "tail.bias"]),
        (RIGHT.replace("1.{*} -> down", "1.{*} -> head").replace("2.{*} -> head", "2.{*} -> down"), "mismatched",
         ["head.weight", "down.weight"]),
    ],
)
def test_each_fault_is_named(
    files: Path, cli: Cli, text: str, field: str, names: list[str]
) -> None:
    code, found = checked(text, cli)
    assert code == 1 and sorted(found[field]) == sorted(names)
    assert set(names) <= {row["where"] for row in found["findings"]}


def test_what_is_dropped_does_not_come_back(files: Path, cli: Cli) -> None:
    """A line that drops has no inverse, which is no fault."""
    state = torch.load("in.pth", weights_only=True)
    torch.save({**state, "extra.weight": torch.ones(3)}, "in.pth")
    code, found = checked(RIGHT + "extra.{*} | drop\n", cli)
    assert code == 0 and not found["reverses"] and "drop" in found["summary"][0]


def test_rules_are_verified_on_outputs(files: Path, cli: Cli) -> None:
    models = ("--like", "their_rules:Target", "--source", "their_rules:Source", "--allow-import")
    code, found = checked(RIGHT, cli, *models)
    assert code == 0 and found["verified"] is True
    code, found = checked(RIGHT.replace("{up_a,up_b}", "{up_b,up_a}"), cli, *models)
    assert code == 1 and found["verified"] is False and not found["missing"]


def test_a_check_takes_no_output(files: Path, cli: Cli) -> None:
    Path("x.rules").write_text(RIGHT)
    done = cli("match", "in.pth", "out.pth", "--like", "like.pth", "--check", "x.rules")
    assert done.exit_code == 2 and "--check" in done.stderr and not Path("out.pth").exists()


def test_json_of_a_matching_has_the_lines_that_drop(files: Path, cli: Cli) -> None:
    torch.save({**torch.load("in.pth", weights_only=True), "extra.weight": torch.ones(3)}, "more.pth")
    done = cli("match", "more.pth", "out.pth", "--like", "in.pth", "--drop-unexpected", "--json")
    assert {"old": "extra.weight", "new": None, "operations": "drop"} in json.loads(done.stdout)["rules"]
