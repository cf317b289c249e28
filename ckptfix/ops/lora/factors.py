"""The best factors of a rank for a matrix: a truncated singular value decomposition."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[Any]

EXACT = 768
"""The smaller side of a matrix up to which the decomposition is a whole one."""

MORE = 24
"""Vectors that the search for a subspace has beyond the rank."""

PASSES = 8
"""Passes of the search; the error is then below a thousandth of the best one, also for spectra that fall slowly."""


class Factors(NamedTuple):
    """Factors of a matrix.

    Attributes:
        up: (rows, rank).
        down: (rank, columns).
        energy: sum of the squares of the product, over that of the matrix; 1 for a matrix of zeros.
    """

    up: Array
    down: Array
    energy: float


def factors(matrix: Array, rank: int) -> Factors:
    """Return the factors of a matrix of float64 with the smallest error (Eckart and Young), equally large.

    Above `EXACT`, the subspace is found by iteration (Halko, Martinsson and Tropp 2011, algorithm 4.4) from a fixed
    start, so that the result is the same in each run.
    """
    import numpy

    rows, columns = matrix.shape
    rank = min(rank, rows, columns)
    total = float(numpy.einsum("ij,ij->", matrix, matrix))
    if not total:
        return Factors(numpy.zeros((rows, rank)), numpy.zeros((rank, columns)), 1.0)
    if min(rows, columns) <= max(EXACT, 2 * rank):
        left, values, right = numpy.linalg.svd(matrix, full_matrices=False)
    else:
        start = numpy.random.default_rng(0).standard_normal((columns, rank + MORE))
        basis = numpy.linalg.qr(matrix @ start)[0]
        for _ in range(PASSES):
            basis = numpy.linalg.qr(matrix @ numpy.linalg.qr(matrix.T @ basis)[0])[0]
        small, values, right = numpy.linalg.svd(basis.T @ matrix, full_matrices=False)
        left = basis @ small
    root = numpy.sqrt(values[:rank])
    kept = float(numpy.square(values[:rank]).sum())
    return Factors(left[:, :rank] * root, root[:, None] * right[:rank], min(kept / total, 1.0))


def refactored(up: Array, down: Array, rank: int) -> Factors:
    """Return factors of another rank of the product ``up @ down``, which is never made."""
    import numpy

    one, first = numpy.linalg.qr(up)
    two, second = numpy.linalg.qr(down.T)
    made = factors(first @ second.T, rank)
    wide = max(rank - made.up.shape[1], 0)
    left, right = one @ made.up, made.down @ two.T
    if wide:
        # A larger rank than that of the product: the other vectors are zeros.
        left = numpy.concatenate([left, numpy.zeros((len(left), wide))], axis=1)
        right = numpy.concatenate([right, numpy.zeros((wide, right.shape[1]))])
    return Factors(left, right, made.energy)
