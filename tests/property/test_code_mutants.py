"""A slice of T14: mutants of our own code are made, put into what runs, and noticed by the tests of their lines."""

from __future__ import annotations

from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
from campaigns import code_kills
from campaigns.code_equivalent import EQUIVALENT
from campaigns.code_mutants import Mutant, code_of, drawn, mutants_of
from conftest import ROOT

PACKAGE = ROOT / "ckptfix"
ROOM = ("zips/scan.py",)
SAMPLE = '''
class Box:
    def first(self, rows, most=3):
        """Text, which is no code."""
        if len(rows) > most and not rows[0]:
            raise ValueError
        rows.sort()
        return [row + 1 for row in rows if row is not None]
'''

BOTH = "len(rows) > most and (not rows[0])"


def sample(folder: Path) -> list[Mutant]:
    (folder / "box.py").write_text(SAMPLE)
    return list(mutants_of(folder, "box.py"))


def test_what_is_changed(tmp_path: Path) -> None:
    found = Counter((mutant.line, mutant.kind, mutant.before, mutant.after) for mutant in sample(tmp_path))
    assert found == Counter([
        (5, "condition", f"if {BOTH}: ...", f"if not ({BOTH}): ..."),
        (5, "and, or", BOTH, "len(rows) > most or not rows[0]"),
        (5, "comparison", "len(rows) > most", "len(rows) >= most"),
        (5, "constant", "0", "1"),
        (6, "statement", "raise ValueError", "pass"),
        (7, "statement", "rows.sort()", "pass"),
        (8, "return", "return [row + 1 for row in rows if row is not None]", "return None"),
        (8, "operator", "row + 1", "row - 1"),
        (8, "constant", "1", "2"),
        (8, "condition", "if row is not None", "if not row is not None"),
        (8, "comparison", "row is not None", "row is None"),
    ])  # fmt: skip


def test_the_changed_code_takes_the_place_of_the_old(tmp_path: Path) -> None:
    space: dict[str, type] = {}
    exec(compile(SAMPLE, str(tmp_path / "box.py"), "exec"), space)
    ends = []
    for mutant in sample(tmp_path):
        space["Box"].first.__code__ = code_of(tmp_path, mutant)  # type: ignore[attr-defined]
        try:
            ends.append(space["Box"]().first([2, 1, 0]))
        except ValueError:
            ends.append("raised")
    changed = ["raised", [3, 2, 1], None, [-1, 0, 1], [2, 3, 4], [], []]
    assert sorted(map(str, ends)) == sorted(map(str, [*changed, *[[1, 2, 3]] * 4]))


@pytest.mark.sampled(0, test_all=1)
@pytest.mark.slow
def test_the_same_mutants_are_drawn_and_each_can_be_made() -> None:
    chosen = drawn(PACKAGE, 60)
    assert len({mutant.what for mutant in chosen}) == 60
    assert set(chosen) < set(drawn(PACKAGE, 200))
    assert all(code_of(PACKAGE, mutant).co_qualname == mutant.function for mutant in chosen)


@pytest.mark.slow
def test_a_reason_is_given_for_mutants_that_there_are() -> None:
    files = sorted({what.partition(":")[0] for what in EQUIVALENT})
    every = {mutant.what for mutant in drawn(PACKAGE, 1_000_000, files)}
    assert sorted(set(EQUIVALENT) - every) == []
    assert all(len(reason) > 20 for reason in EQUIVALENT.values())


@pytest.mark.campaign
@pytest.mark.skipif(find_spec("coverage") is None, reason="coverage is not installed")
def test_a_slice_is_noticed(tmp_path: Path) -> None:
    rows = code_kills.run(tmp_path, 6, "", ["tests/unit/zips"], "not campaign and not slow", ROOM)
    ends = Counter(row["end"].partition(" ")[0] for row in rows)
    # The tests of one room alone; all tests have to notice 95 of 100.
    assert ends.total() == 6 and ends["killed"] >= 4 and not ends["unused:"], rows
    assert all("::test_" in row["end"] for row in rows if row["end"].startswith("killed by tests"))
