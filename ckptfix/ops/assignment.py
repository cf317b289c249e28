"""The best assignment of rows to columns, and how much better it is than the next."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


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
    """For each row, (by how much the best sum falls when the row takes another column, that column).

    `assigned` is what `best` says. A row that could take no other column has an infinite margin. In the graph whose
    edges are what a row loses when it takes another's column, what is lost in all is the shortest cycle through the
    row (Floyd 1962, Warshall 1962). The columns that are free are one more node: who takes one leaves another.
    """
    if not assigned:
        return []
    table = np.array(scores, dtype=np.float64)
    rows = len(assigned)
    own = table[np.arange(rows), list(assigned)]
    loss = own[:, None] - table
    free = [column for column in range(table.shape[1]) if column not in set(assigned)]
    step = np.full((rows + 1, rows + 1), np.inf)
    step[:rows, :rows] = loss[:, list(assigned)]
    if free:
        step[:rows, rows] = loss[:, free].min(axis=1)
        step[rows, :rows] = 0.0
    np.fill_diagonal(step, np.inf)
    reach = step.copy()
    np.fill_diagonal(reach, 0.0)
    for middle in range(rows + 1):
        np.minimum(reach, reach[:, middle, None] + reach[None, middle], out=reach)
    found = []
    for row in range(rows):
        ways = step[row] + reach[:, row]
        way = int(ways.argmin())
        if math.isinf(ways[way]):
            found.append((math.inf, assigned[row]))
            continue
        column = assigned[way] if way < rows else free[int(loss[row, free].argmin())]
        found.append((max(0.0, float(ways[way])), column))
    return found
