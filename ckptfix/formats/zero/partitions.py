"""The distribution of the elements of each parameter over the ranks: arithmetic alone.

A rank has a flat tensor for each group of parameters. Stages 1 and 2 concatenate the parameters of a group and split
the result into as many equal parts as there are ranks, even in the middle of a parameter: a parameter is one range of
the concatenated parts. Stage 3 splits each parameter into equal parts, the last one padded: a parameter is a range of
each rank. Source: deepspeed/utils/zero_to_fp32.py.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence

from ckptfix.dataclass import dataclass
from ckptfix.errors import DamagedFile

Shape = tuple[int, ...]
Groups = Sequence[Mapping[str, Shape]]
"""The parameters of each group, in order."""


@dataclass(frozen=True, slots=True)
class FlatRun:
    """Elements of a parameter on one rank: `count` elements from `first` on, in its flat tensor of `group`."""

    rank: int
    group: int
    first: int
    count: int


class Cut(ABC):
    """The location of the elements of one parameter."""

    @abstractmethod
    def runs(self) -> Sequence[FlatRun]:
        """Return all runs, in order."""

    @abstractmethod
    def touched(self) -> Iterator[tuple[int, int]]:
        """Yield (rank, group) of the flat tensors that contain it, including its padding."""


@dataclass(frozen=True, slots=True)
class FlatCut(Cut):
    """The location of a parameter in stages 1 and 2."""

    own: tuple[FlatRun, ...]

    def runs(self) -> Sequence[FlatRun]:
        return self.own

    def touched(self) -> Iterator[tuple[int, int]]:
        return ((run.rank, run.group) for run in self.own)


@dataclass(frozen=True, slots=True)
class Each(Cut):
    """The location of a parameter in stage 3.

    `spans` are (group, first element, elements) of each rank's share; `whole` is the number of all elements.
    """

    spans: tuple[tuple[int, int, int], ...]
    whole: int
    ranks: int

    def runs(self) -> Sequence[FlatRun]:
        share = share_of(self.whole, self.ranks)
        runs: list[FlatRun] = []
        for rank in range(self.ranks):
            left = min(share, self.whole - rank * share)
            if left <= 0:
                break
            for group, first, count in self.spans:
                taken = min(left, count)
                if taken > 0:
                    runs.append(FlatRun(rank, group, first, taken))
                left -= taken
        return runs

    def touched(self) -> Iterator[tuple[int, int]]:
        return ((rank, group) for group, _, _ in self.spans for rank in range(self.ranks))


Cuts = list[dict[str, Cut]]
"""For each group, name -> the location of its elements."""


def row_cuts(groups: Groups, sizes: Sequence[Sequence[int]]) -> Cuts:
    """Return the locations for stages 1 and 2.

    Args:
        sizes: for each group, the number of elements of each rank's part, without padding.

    Raises:
        DamagedFile: the parts do not have the size that the parameters need, as far as it can be checked.
    """
    out: Cuts = []
    for group, (shapes, parts) in enumerate(zip(groups, sizes, strict=True)):
        needed, held = sum(map(math.prod, shapes.values())), sum(parts)
        align = 2 * len(parts)
        # Both may be padded at the end to a multiple of twice the number of ranks.
        if held < needed or -(-held // align) != -(-needed // align):
            message = f"the parameters of group {group} have {needed:,} elements, but the ranks hold {held:,}"
            raise DamagedFile(f"{message}: its files are from different saves, or one of them is damaged")
        rank = first = 0
        cuts: dict[str, Cut] = {}
        for name, shape in shapes.items():
            left = math.prod(shape)
            runs: list[FlatRun] = []
            while left:
                while first == parts[rank]:
                    rank, first = rank + 1, 0
                count = min(left, parts[rank] - first)
                runs.append(FlatRun(rank, group, first, count))
                first += count
                left -= count
            cuts[name] = FlatCut(tuple(runs))
        out.append(cuts)
    return out


def each_cuts(groups: Groups, sizes: Sequence[int], ranks: int) -> Cuts:
    """Return the locations for stage 3.

    Args:
        sizes: the number of elements of each of a rank's flat tensors, in order; a parameter may span two of them.

    Raises:
        DamagedFile: as in `row_cuts`.
    """
    needed = sum(share_of(math.prod(shape), ranks) for shapes in groups for shape in shapes.values())
    if needed != sum(sizes):
        message = f"a rank's share of the parameters is {needed:,} elements, but the ranks hold {sum(sizes):,} each"
        raise DamagedFile(f"{message}: its files are from different saves, or one of them is damaged")
    group = first = 0
    out: Cuts = []
    for shapes in groups:
        cuts: dict[str, Cut] = {}
        for name, shape in shapes.items():
            whole = math.prod(shape)
            left = share_of(whole, ranks)
            spans: list[tuple[int, int, int]] = []
            while left:
                while first == sizes[group]:
                    group, first = group + 1, 0
                count = min(left, sizes[group] - first)
                spans.append((group, first, count))
                first += count
                left -= count
            cuts[name] = Each(tuple(spans), whole, ranks)
        out.append(cuts)
    return out


def share_of(elements: int, ranks: int) -> int:
    """Return the number of elements in one rank's share of a parameter in stage 3, including padding."""
    return -(-elements // ranks)


def rows_of(shape: Shape, runs: Sequence[FlatRun], rank: int) -> str | None:
    """Return a description of the part of a tensor on `rank`, such as ``rows 3 to 7``; None if there is no part."""
    at, found = 0, []
    for run in runs:
        if run.rank == rank:
            found.append((at, at + run.count))
        at += run.count
    if not found:
        return None
    first, last = found[0][0], found[-1][1]
    if last - first == at:
        return "all"
    row = math.prod(shape[1:])
    what = "rows" if len(shape) > 1 else "elements"
    return f"{what} {first // row} to {(last - 1) // row}"
