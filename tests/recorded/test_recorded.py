"""Compare the answers of all commands to good and damaged files with those of the last run that somebody read.

``said/`` has a line for each answer: the command, its exit code, a checksum of what it wrote, a checksum of the numbers
that it printed, and the findings and errors by their ids and classes. ``said/texts/`` has every sentence once, without
its numbers. That the answers are right is for the other tests to show; these notice what changes: a byte of an output,
an offset in a message, a missing finding, a word. After a change on purpose write them anew, and read the difference::

    PYTHONPATH=tests python -m recorded
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from zlib import crc32

import pytest
from conftest import LONG
from recorded.answers import IN_PLACE, NAMES, Answer, answers
from recorded.files import good_files, mutant

SAID = Path(__file__).parent / "said"
TEXTS = SAID / "texts"
FILES = good_files()
MUTANTS = 72
"""Of each file; each meets doctor and two of the other commands."""


def recorded(name: str) -> Iterator[tuple[str, list[Answer]]]:
    """Yield the answers of all commands to a good file, then those of some to each of its mutants."""
    data = FILES[name]
    yield "", [*answers(data, NAMES)]
    for number in range(MUTANTS):
        # By a sum of the two, so that a new command takes the place of few.
        drawn = sorted(set(NAMES) - {"doctor"}, key=lambda command: crc32(f"{command} {number}".encode()))
        yield f"mutant {number}", [*answers(mutant(name, data, number), ("doctor", *drawn[:2]))]


@pytest.mark.sampled(quick=4)
@pytest.mark.parametrize("name", FILES)
def test_answers_are_those_recorded(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    texts = {file.stem: frozenset(file.read_text().splitlines()) for file in TEXTS.iterdir()}
    before = iter((SAID / f"{name}.txt").read_text().splitlines())
    wrong, unknown = [], set()
    for heading, found in recorded(name):
        lines = [heading] if heading else []
        lines += [answer.line for answer in found]
        wrong += [
            f"{heading}\n  was: {old}\n  now: {new}"
            for old, new in zip_longest((next(before, "(nothing)") for _ in lines), lines)
            if old != new
        ]
        unknown |= {f"{each.verb}: {text}" for each in found for text in each.sentences - texts.get(each.verb, set())}
    wrong += [f"was: {line}" for line in before]
    assert not wrong, f"{len(wrong)} answers changed:\n" + "\n".join(wrong[:5])
    assert not unknown, f"{len(unknown)} sentences are new:\n" + "\n".join(sorted(unknown)[:20])


@pytest.mark.campaign
@pytest.mark.parametrize("name", FILES)
def test_other_mutants_end_in_a_result_or_an_error_of_ours(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is recorded of them: none shows a fault of ckptfix, no input changes, each edit in place is undone."""
    monkeypatch.chdir(tmp_path)
    edits = IN_PLACE
    for number in range(MUTANTS, MUTANTS + (3000 if LONG else 10)):
        dice = random.Random(f"{name} {number}")
        asked = (*dice.sample(NAMES, 3), dice.choice(edits))
        assert len([*answers(mutant(name, FILES[name], number), asked)]) == len(asked)
