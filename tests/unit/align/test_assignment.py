"""The best assignment and its margins, against all assignments tried one by one."""

from __future__ import annotations

import math
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfix.align import assignment

Scores = list[list[float]]


@st.composite
def tables(draw: st.DrawFn) -> Scores:
    rows = draw(st.integers(1, 5))
    columns = draw(st.integers(rows, 6))
    value = st.integers(-8, 8).map(lambda number: number / 2) | st.just(-100.0)
    return [draw(st.lists(value, min_size=columns, max_size=columns)) for _ in range(rows)]


def total(scores: Scores, chosen: tuple[int, ...] | list[int]) -> float:
    return sum(line[column] for line, column in zip(scores, chosen, strict=True))


@given(tables())
def test_no_assignment_is_better(scores: Scores) -> None:
    chosen = assignment.best(scores)
    assert len(set(chosen)) == len(scores)
    every = permutations(range(len(scores[0])), len(scores))
    assert total(scores, chosen) == pytest.approx(max(total(scores, other) for other in every))


@given(tables())
def test_a_margin_is_what_another_column_costs(scores: Scores) -> None:
    chosen = assignment.best(scores)
    found = assignment.margins(scores, chosen)
    every = list(permutations(range(len(scores[0])), len(scores)))
    for row, (margin, instead) in enumerate(found):
        elsewhere = [total(scores, other) for other in every if other[row] != chosen[row]]
        if not elsewhere:
            assert (margin, instead) == (math.inf, chosen[row])
            continue
        assert margin == pytest.approx(total(scores, chosen) - max(elsewhere))
        assert instead != chosen[row]
        there = max(total(scores, other) for other in every if other[row] == instead)
        assert there == pytest.approx(max(elsewhere))


def test_three_that_change_places_count_too() -> None:
    """Any two of them that swap lose much, and all three in a ring lose little."""
    scores = [[5.0, 4.9, 0.0], [0.0, 5.0, 4.9], [4.9, 0.0, 5.0]]
    assert assignment.best(scores) == [0, 1, 2]
    assert [round(margin, 6) for margin, _ in assignment.margins(scores, [0, 1, 2])] == [0.3] * 3
    assert [column for _, column in assignment.margins(scores, [0, 1, 2])] == [1, 2, 0]


@given(tables(), st.integers(0, 8))
def test_what_is_not_enough_may_be_told_too_high_but_not_as_enough(scores: Scores, enough: int) -> None:
    chosen = assignment.best(scores)
    exact, quick = assignment.margins(scores, chosen), assignment.margins(scores, chosen, enough)
    assert [margin < enough for margin, _ in exact] == [margin < enough for margin, _ in quick]
    assert all(told >= margin - 1e-9 for (margin, _), (told, _) in zip(exact, quick, strict=True))


def test_nothing_to_assign() -> None:
    assert assignment.best([]) == []
    assert assignment.margins([], []) == []
