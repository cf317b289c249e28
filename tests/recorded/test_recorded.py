"""Compare the answers of all commands to good and damaged files with those of the last run that somebody read.

``said/`` has a line for each answer: the command, its exit code, a checksum of what it wrote, a checksum of the numbers
that it printed, and the findings and errors by their ids and classes. ``said/texts/`` has every sentence once, without
its numbers. That the answers are right is for the other tests to show; these notice what changes: a byte of an output,
an offset in a message, a missing finding, a word. After a change on purpose write them anew, and read the difference::

    PYTHONPATH=tests python -m recorded
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
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


HEADINGS = ("", *(f"mutant {number}" for number in range(MUTANTS)))
"""Of the good file and of each mutant, in the order of the lines that are kept."""
FIRST = MUTANTS // 4 + 1
"""So many of them are asked for in make test."""


def recorded(name: str, headings: Sequence[str] = HEADINGS) -> Iterator[tuple[str, list[Answer]]]:
    """Yield the answers of all commands to a good file, and those of some to each of its mutants."""
    data = FILES[name]
    for heading in headings:
        if not heading:
            yield heading, [*answers(data, NAMES)]
            continue
        number = int(heading.split()[1])
        # By a sum of the two, so that a new command takes the place of few.
        drawn = sorted(set(NAMES) - {"doctor"}, key=lambda command: crc32(f"{command} {number}".encode()))
        yield heading, [*answers(mutant(name, data, number), ("doctor", *drawn[:2]))]


def sections(name: str) -> dict[str, list[str]]:
    """Return the recorded lines of a file by their headings."""
    found: dict[str, list[str]] = {"": []}
    for line in (SAID / f"{name}.txt").read_text().splitlines():
        if line.startswith("mutant "):
            found[line] = []
        else:
            found[[*found][-1]].append(line)
    return found


def compare(name: str, headings: Sequence[str]) -> None:
    """Fail if the answers under these headings are not those recorded."""
    texts = {file.stem: frozenset(file.read_text().splitlines()) for file in TEXTS.iterdir()}
    before = sections(name)
    assert (*before,) == HEADINGS
    wrong, unknown = [], set()
    for heading, found in recorded(name, headings):
        lines = [answer.line for answer in found]
        wrong += [
            f"{heading}\n  was: {old}\n  now: {new}"
            for old, new in zip_longest(before[heading], lines, fillvalue="(nothing)")
            if old != new
        ]
        unknown |= {f"{each.verb}: {text}" for each in found for text in each.sentences - texts.get(each.verb, set())}
    assert not wrong, f"{len(wrong)} answers changed:\n" + "\n".join(wrong[:5])
    assert not unknown, f"{len(unknown)} sentences are new:\n" + "\n".join(sorted(unknown)[:20])


@pytest.mark.slow
@pytest.mark.sampled(6, quick=3, test_all=10_000)
@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("name", FILES)
def test_answers_are_those_recorded(name: str) -> None:
    compare(name, HEADINGS[:FIRST])


@pytest.mark.sampled(0)
@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("name", FILES)
def test_answers_to_the_other_mutants_are_those_recorded(name: str) -> None:
    compare(name, HEADINGS[FIRST:])


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder of the test, where a terminal is as wide as it was."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")


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
