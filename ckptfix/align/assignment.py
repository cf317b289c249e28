"""Best assignment of rows to columns, and its margin over the next best."""

from __future__ import annotations

import math
from collections.abc import Sequence


def best(scores: Sequence[Sequence[float]]) -> list[int]:
    """Return the column of each row so that the sum of scores is as large as possible.

    Args:
        scores: one list per row; there are at least as many columns as rows.

    This is the Hungarian method with potentials (Kuhn 1955, Munkres 1957): O(rows^2 * columns).
    """
    rows, columns = len(scores), len(scores[0]) if scores else 0
    row_potential = [0.0] * (rows + 1)
    column_potential = [0.0] * (columns + 1)
    owner = [0] * (columns + 1)  # row of each column, counted from 1; 0 means no row
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


def margins(
    scores: Sequence[Sequence[float]], assigned: Sequence[int], enough: float = -math.inf
) -> list[tuple[float, int]]:
    """Return for each row (the drop of the best sum if the row takes a different column, that column).

    `assigned` is the result of `best`. A row that can take no other column has an infinite margin. Consider the
    graph whose edges are a row's losses when it takes another row's column. The total loss is the shortest cycle over
    the row (Floyd 1962, Warshall 1962). The free columns form one more node: taking one leaves an assigned column.

    Args:
        enough: the search ends as soon as swaps of two rows show that every row would lose less than this.
    """
    if not assigned:
        return []
    rows = len(assigned)
    taken = set(assigned)
    free = [column for column in range(len(scores[0])) if column not in taken]
    step: list[list[float]] = []
    spare = []
    for row, line in enumerate(scores):
        own = line[assigned[row]]
        spare.append(max(free, key=line.__getitem__) if free else -1)
        out = own - line[spare[row]] if free else math.inf
        step.append([*(math.inf if other == row else own - line[assigned[other]] for other in range(rows)), out])
    step.append([*([0.0 if free else math.inf] * rows), math.inf])
    swaps = [
        min((cost + (step[to][row] if to < rows else 0.0), to) for to, cost in enumerate(line))
        for row, line in enumerate(step[:rows])
    ]
    if all(loss < enough for loss, _ in swaps):
        return [(max(0.0, loss), assigned[to] if to < rows else spare[row]) for row, (loss, to) in enumerate(swaps)]
    reach = [[0.0 if at == to else cost for to, cost in enumerate(line)] for at, line in enumerate(step)]
    for middle, through in enumerate(reach):
        for line in reach:
            first = line[middle]
            if first < math.inf:
                line[:] = [min(cost, first + more) for cost, more in zip(line, through, strict=True)]
    found = []
    for row in range(rows):
        ways = [cost + reach[way][row] for way, cost in enumerate(step[row])]
        way = min(range(rows + 1), key=ways.__getitem__)
        if math.isinf(ways[way]):
            found.append((math.inf, assigned[row]))
        else:
            found.append((max(0.0, ways[way]), assigned[way] if way < rows else spare[row]))
    return found
