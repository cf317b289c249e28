"""The best assignment of rows to columns, and how much better it is than the next."""

from __future__ import annotations

import math
from collections.abc import Sequence


def best(scores: Sequence[Sequence[float]]) -> list[int]:
    """For each row, the column that it gets, so that the sum of scores is the largest possible.

    Args:
        scores: as many columns as rows, or more.

    The Hungarian method with potentials (Kuhn 1955, Munkres 1957): O(rows^2 * columns).
    """
    rows, columns = len(scores), len(scores[0]) if scores else 0
    row_potential = [0.0] * (rows + 1)
    column_potential = [0.0] * (columns + 1)
    owner = [0] * (columns + 1)  # row of each column, counted from 1; 0 is none
    for row in range(1, rows + 1):
        owner[0] = row
        column = 0
        least = [math.inf] * (columns + 1)
        back = [0] * (columns + 1)
        done = [False] * (columns + 1)
        while owner[column]:
            done[column] = True
            current, delta, following = owner[column], math.inf, 0
            for other in range(1, columns + 1):
                if done[other]:
                    continue
                cost = -scores[current - 1][other - 1] - row_potential[current] - column_potential[other]
                if cost < least[other]:
                    least[other], back[other] = cost, column
                if least[other] < delta:
                    delta, following = least[other], other
            for other in range(columns + 1):
                if done[other]:
                    row_potential[owner[other]] += delta
                    column_potential[other] -= delta
                else:
                    least[other] -= delta
            column = following
        while column:
            owner[column] = owner[back[column]]
            column = back[column]
    assigned = [0] * rows
    for column in range(1, columns + 1):
        if owner[column]:
            assigned[owner[column] - 1] = column - 1
    return assigned


def margins(scores: Sequence[Sequence[float]], assigned: Sequence[int]) -> list[tuple[float, int]]:
    """For each row, (by how much the sum falls when it takes another column, that column).

    Looked at are all swaps of two rows, and all columns that are free. A row without either has an infinite margin.
    """
    free = set(range(len(scores[0]) if scores else 0)) - set(assigned)
    found = []
    for row, column in enumerate(assigned):
        least, instead = math.inf, column
        for other, taken in enumerate(assigned):
            if other == row:
                continue
            loss = scores[row][column] + scores[other][taken] - scores[row][taken] - scores[other][column]
            if loss < least:
                least, instead = loss, taken
        for taken in free:
            loss = scores[row][column] - scores[row][taken]
            if loss < least:
                least, instead = loss, taken
        found.append((least, instead))
    return found
