"""What commands say and write, for good files and for damaged ones, is what it was when that was last looked at.

The answers stand in ``said/``, a line each: the command, its exit code, a sum of what it wrote, a sum of what it said,
and the first line of that. That they are right is for the other tests to say; these see what changes unnoticed: a byte
of an output, an offset in a message, a finding less. Where the change is wanted, ``CKPTFIX_UPDATE_RECORDED=1`` writes
them anew, and the difference is there to be read.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from zlib import crc32

import pytest
from conftest import LONG
from recorded.answers import IN_PLACE, NAMES, answers
from recorded.files import good_files, mutant

SAID = Path(__file__).parent / "said"
UPDATE = os.environ.get("CKPTFIX_UPDATE_RECORDED") == "1"
FILES = good_files()
MUTANTS = 72
"""Of each file; each meets doctor and two of the other commands."""


def rows(name: str) -> Iterator[str]:
    """What is said of a good file by all commands, and of its mutants by some."""
    data = FILES[name]
    yield from answers(data, NAMES)
    for number in range(MUTANTS):
        yield f"mutant {number}"
        # By a sum of the two, so that a new command takes the place of few.
        drawn = sorted(set(NAMES) - {"doctor"}, key=lambda command: crc32(f"{command} {number}".encode()))
        yield from answers(mutant(name, data, number), ("doctor", *drawn[:2]))


@pytest.mark.parametrize("name", FILES)
def test_what_is_said_and_written(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    file = SAID / f"{name}.txt"
    found = [*rows(name)]
    if UPDATE:
        SAID.mkdir(exist_ok=True)
        file.write_text("\n".join([*found, ""]))
    before = file.read_text().splitlines()
    where, wrong = "", []
    for old, new in zip_longest(before, found, fillvalue="(nothing)"):
        where = new if new.startswith("mutant ") else where
        if old != new:
            wrong.append(f"{where}\n  was: {old}\n  now: {new}")
    assert not wrong, f"{len(wrong)} answers are others:\n" + "\n".join(wrong[:5])


@pytest.mark.campaign
@pytest.mark.parametrize("name", FILES)
def test_other_mutants_end_in_a_result_or_an_error_of_ours(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is recorded of them: none shows a fault of ckptfix, no input changes, each edit in place is undone."""
    monkeypatch.chdir(tmp_path)
    edits = tuple(IN_PLACE)
    for number in range(MUTANTS, MUTANTS + (3000 if LONG else 10)):
        dice = random.Random(f"{name} {number}")
        asked = (*dice.sample(NAMES, 3), dice.choice(edits))
        assert len([*answers(mutant(name, FILES[name], number), asked)]) == len(asked)
