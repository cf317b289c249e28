"""Regular expressions on any name: as `re` has them, and none that hangs."""

from __future__ import annotations

import re
from pathlib import Path
from threading import Thread

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckptfix
from ckptfix.cli.inspect import chosen
from ckptfix.errors import Refused
from ckptfix.formats import open_checkpoint
from ckptfix.names import regexes
from ckptfix.names.regexes import Regex
from ckptfix.names.rules import NameRule

EVIL = "a" * 60 + "!"
HANGS = ["(a+)+$", "(a|a)*$", "(a|aa)+$", "(a?){40}a{40}$", "^(([a-z])+.)+[A-Z]$", "(.*)(.*)(.*)(.*)(.*)(.*)(.*)[0-9]$",
         "(?=(a+)+$)b", "(a*)*\1!!"]  # fmt: skip
USUAL = [r"^module\.", r"layers\.(\d+)\.(.*)", r"(\w+)\.(\w+)$", r"(?i)WEIGHT", r"[^.]+$", "x"]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regexes, "SECONDS", 0.2)


def stopped(work: object) -> str:
    """The error of what ends for a pattern and a name."""
    with pytest.raises(Refused, match="did not finish within") as caught:
        work()  # type: ignore[operator]
    return f"{caught.value} {caught.value.where} {caught.value.shell_hint}"


@pytest.mark.slow
@pytest.mark.parametrize("pattern", HANGS)
def test_a_pattern_that_would_hang_ends_with_its_name(pattern: str) -> None:
    regex = Regex(pattern)
    text = stopped(lambda: regex.search(["b", "c", EVIL, "d"]))
    assert repr(pattern) in text and EVIL in text
    assert "takes" not in text
    # What was begun goes on: another object has its own time.
    assert Regex(pattern).search(["b"]) == [re.search(pattern, "b") is not None]


def test_it_ends_in_a_thread_too() -> None:
    ended: list[str] = []
    thread = Thread(target=lambda: ended.append(stopped(lambda: Regex("(a+)+$").search([EVIL]))))
    thread.start()
    thread.join(60)
    assert ended and EVIL in ended[0]


@pytest.mark.parametrize("pattern", USUAL)
def test_an_ordinary_pattern_needs_no_process(pattern: str) -> None:
    names = [f"module.encoder.layers.{number}.self_attn.weight" for number in range(100)]
    regex = Regex(pattern)
    assert regex.search(names) == [re.search(pattern, name) is not None for name in names]
    assert regex.subn("<>", names) == [re.subn(pattern, "<>", name) for name in names]
    assert regex._child is None


@pytest.mark.slow
@given(
    pattern=st.sampled_from([*USUAL, *HANGS]),
    names=st.lists(st.text("ab.1A!\u00e9\ud800", max_size=12), max_size=5),
    elsewhere=st.booleans(),
)
def test_it_says_what_re_says_wherever_it_is_done(pattern: str, names: list[str], elsewhere: bool) -> None:
    regex = Regex(pattern)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regexes, "SECONDS", 20)
        patch.setattr(regexes, "QUICK", 0 if elsewhere else 1 << 200)
        patch.setattr(regexes, "QUICK_IN_ALL", 1 << 200)
        assert regex.search(names) == [re.search(pattern, name) is not None for name in names]
        assert regex.subn("x", names) == [re.subn(pattern, "x", name) for name in names]


def test_long_names_and_many_names_end_too() -> None:
    stopped(lambda: Regex(r"\d+x").search(["1" * 2_000_000]))
    stopped(lambda: Regex(r"(\d+)(\d+)x").search(["1" * 2_000] * 1000))


@pytest.mark.slow
def test_a_rule_with_many_placeholders_side_by_side_ends() -> None:
    rule = NameRule("".join(f"{{{letter}}}" for letter in "abcdefghijkl") + ".x", "{a}.x")
    stopped(lambda: rule.apply("1" * 120))
    assert NameRule("a.{n}.{*}", "b.{n+1}.{*}").apply("a.1.c") == "b.2.c"


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    torch.save({EVIL: torch.ones(2), "a.b": torch.ones(2)}, tmp_path / "in.pth")
    return tmp_path / "in.pth"


@pytest.mark.slow
def test_rename_refuses_and_writes_nothing(hostile: Path) -> None:
    text = stopped(lambda: ckptfix.rename(hostile, hostile.with_name("out.pth"), subs=[("(a+)+$", "x")]))
    assert EVIL in text and not hostile.with_name("out.pth").exists()


@pytest.mark.slow
def test_a_filter_of_the_command_line_ends(hostile: Path) -> None:
    entries = open_checkpoint(hostile).entries
    assert EVIL in stopped(lambda: chosen(entries, ["/(a+)+$/"], str(hostile)))


def test_the_search_of_browse_ends() -> None:
    from ckptfix.browse.model import search
    from ckptfix.browse.model.contents import ContentItem

    item = ContentItem.__new__(ContentItem)
    object.__setattr__(item, "name", EVIL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "key_of", lambda item: item.name)
        stopped(lambda: list(search.find([item], "/(a+)+$/")))
