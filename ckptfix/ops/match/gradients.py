"""Proposals of a matching by gradients: what two models compute tells which parts of their tensors are the same.

Names and shapes leave open which of several equal tensors is which, in which order a fused tensor holds its gates, and
whether a square matrix is transposed. Both models get weights under which this makes no difference: parts of one shape
hold equal numbers, and square ones are symmetric. If the parts are cut rightly, both models then give equal outputs,
whatever goes where. But the gradients differ by what each part is for, and equal gradients show the counterparts. So
one run of each model replaces the trial of all orders. The result is a proposal: `verify` proves it with other weights.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, product
from typing import TYPE_CHECKING, Any

from ckptfix.align.fused import FusedTensors
from ckptfix.align.result import MatchedPair, Matching
from ckptfix.dataclass import dataclass
from ckptfix.errors import CkptfixError
from ckptfix.names.operations import Operation
from ckptfix.names.slots import Slot
from ckptfix.ops.match.fused import Operations, line_of
from ckptfix.ops.match.plan import reshape
from ckptfix.ops.match.running import (
    SEED,
    STATISTICS,
    Arguments,
    Models,
    compared,
    compared_names,
    gradients,
    head_counts,
    kept_states,
    outputs,
)

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]
Sizes = tuple[int, ...]
Cuts = Mapping[Shape, tuple[Sizes, ...]]
"""Canonical shape -> the sizes into which each dimension is cut. A matrix and its transpose share a canonical shape."""

Part = tuple[str, int, int]
"""A part of a tensor: the name of the tensor, and the place of the part in its rows and columns."""

Fill = Callable[[Matching, Operations], Mapping[str, Any]]
"""Return the random weights of the source under the names of the target, as a matching writes them."""

EQUAL = 1e-6
"""Relative difference of outputs, and of gradients, up to which they are equal."""

DEAD = 1e-12
"""Gradient, relative to the greatest of the model, up to which it is only rounding, as that of the bias of keys."""

CUTS = 6
"""Ways to cut the tensors that are tried, beside those with further orders of rows. The coarsest come first."""

STEPS = 20_000
"""Steps of the search for ways to cut."""

GATES = 3, 4
"""Numbers of gates of GRU and LSTM: their rows are as many times as many as the columns of the hidden state."""


@dataclass(frozen=True, slots=True)
class _Tensor:
    """An open tensor, cut into parts.

    Attributes:
        core: the shape without sizes of 1.
        rows, columns: sizes of the parts along the first two dimensions of the core.
    """

    name: str
    shape: Shape
    core: Shape
    rows: Sizes = ()
    columns: Sizes = ()

    @property
    def parts(self) -> Iterator[Part]:
        return ((self.name, row, column) for row in range(len(self.rows)) for column in range(len(self.columns)))

    def blocks(self, value: torch.Tensor) -> dict[Part, torch.Tensor]:
        """Return the parts of the tensor's values, or of its gradient."""
        found: dict[Part, torch.Tensor] = {}
        for row, band in enumerate(value.reshape(self.core).split_with_sizes(self.rows)):
            blocks = band.split_with_sizes(self.columns, 1) if len(self.core) > 1 else [band]
            found.update(((self.name, row, column), block) for column, block in enumerate(blocks))
        return found


def proposals(
    both: Models,
    arguments: Arguments,
    matching: Matching,
    operations: Operations,
    slots: Sequence[Slot],
    fill: Fill,
) -> Iterator[tuple[Matching, Operations]]:
    """Yield matchings whose parts have equal gradients: with the certain pairs kept, then with all pairs open.

    Args:
        slots: of the source.
        fill: as `Fill`.
    """
    seen = {_pairs_of(matching)}
    with kept_states(both):
        names = [[*outputs(one, arguments, "a model")] for one in (both.source, both.target)]
        among = compared_names(*names)
        ran = [gradients(one, arguments, "a model", names)
               for one, names in zip((both.source, both.target), among, strict=True)]  # fmt: skip
        used = [set(grads) for _, grads in ran]
        buffers = {name for one in (both.source, both.target) for name, _ in one.named_buffers()}
        kept = _certain(matching, operations, buffers)
        for base in (kept, _certain(replace(matching, pairs=()), Operations(), buffers)):
            done = base[0].pairs
            places = _Places(both, slots, {pair.source for pair in done}, {pair.target for pair in done}, used)
            if done and not any(places.open):
                continue
            tried = []
            for cuts in _hypotheses(places, head_counts(both)):
                sides = places.cut(cuts)
                if sides is None or sides in tried:
                    continue
                tried.append(sides)
                made = _by_gradients(both, arguments, places, sides, base, fill, among, matching)
                if made is not None and _pairs_of(made[0]) not in seen:
                    seen.add(_pairs_of(made[0]))
                    yield made


def _pairs_of(matching: Matching) -> frozenset[tuple[str, str, str]]:
    return frozenset((pair.source, pair.target, pair.operation) for pair in matching.pairs)


def _certain(matching: Matching, operations: Operations, buffers: set[str]) -> tuple[Matching, Operations]:
    """Return the part of a matching that is certain. Buffers are not, if their module has an open tensor."""
    open_ = {name for pair in matching.ambiguous for name in (pair.source, pair.target)}
    open_ |= {*matching.left, *matching.missing}
    modules = set(map(_module, open_))
    open_ |= {name for name in buffers if _module(name) in modules}
    taken = tuple(one for one in operations.taken if open_.isdisjoint((*one.old, *one.new)))
    whole = {name for one in taken for name in one.old}
    pairs = tuple(
        pair for pair in matching.pairs
        if open_.isdisjoint((pair.source, pair.target)) and (not pair.operation or pair.source in whole)
    )  # fmt: skip
    return replace(matching, pairs=pairs, rules=(), dropped=()), replace(operations, taken=taken)


class _Places:
    """The open tensors of both models.

    Attributes:
        open: for each side, the parameters that a run uses, each under its first name, with their shapes.
        buffers: for each side, further tensors of numbers, by name.
        names: for each side, first name -> all names of the tensor.
    """

    def __init__(
        self, both: Models, slots: Sequence[Slot], ours: set[str], theirs: set[str], used: Sequence[set[str]]
    ) -> None:
        import torch

        self.open: tuple[dict[str, Shape], dict[str, Shape]] = ({}, {})
        self.buffers: tuple[dict[str, Shape], dict[str, Shape]] = ({}, {})
        self.names: tuple[dict[str, list[str]], dict[str, list[str]]] = ({}, {})
        listed = {slot.name for slot in slots}
        for which, (model, done) in enumerate(((both.source, ours), (both.target, theirs))):
            state = model.state_dict(keep_vars=True)
            firsts: dict[int, str] = {}
            for name, tensor in state.items():
                if isinstance(tensor, torch.Tensor) and (which or name in listed):
                    self.names[which].setdefault(firsts.setdefault(id(tensor), name), []).append(name)
            for first, names in self.names[which].items():
                tensor = state[first]
                if not done.isdisjoint(names):
                    continue
                if not isinstance(tensor, torch.nn.Parameter):
                    self.buffers[which][first] = tuple(tensor.shape)
                elif first in used[which]:
                    self.open[which][first] = tuple(tensor.shape)

    def cut(self, cuts: Cuts) -> tuple[dict[str, _Tensor], dict[str, _Tensor]] | None:
        """Return the open tensors, cut; None if parts of a tensor would have to be cut in different places."""
        made: tuple[dict[str, _Tensor], dict[str, _Tensor]] = ({}, {})
        for side, found in zip(self.open, made, strict=True):
            for name, shape in side.items():
                core = _core(shape)
                grid = _grid(core, cuts)
                if grid is None:
                    return None
                found[name] = _Tensor(name, shape, core, *grid)
        return made


def _core(shape: Shape) -> Shape:
    return tuple(size for size in shape if size != 1) or (1,)


def _canonical(core: Shape) -> Shape:
    return (min(core), max(core)) if len(core) == 2 else core


def _grid(core: Shape, cuts: Cuts) -> tuple[Sizes, Sizes] | None:
    """Return the sizes of the parts of a tensor, whose parts may be cut themselves."""
    found = cuts.get(_canonical(core))
    if found is None:
        return (core[0],), (core[1] if len(core) > 1 else 1,)
    if len(core) == 1:
        bands = [_grid((size,), cuts) for size in found[0]]
        return sum((band[0] for band in bands if band), ()), (1,)
    rows, columns = found[:2] if len(core) > 2 or core[0] <= core[1] else found[1::-1]
    inner = {(row, column): _grid((row, column, *core[2:]), cuts) for row in rows for column in columns}
    if None in inner.values():
        return None
    heights = [{inner[row, column][0] for column in columns} for row in rows]  # type: ignore[index]
    widths = [{inner[row, column][1] for row in rows} for column in columns]  # type: ignore[index]
    if any(len(one) != 1 for one in (*heights, *widths)):
        return None
    return sum((one.pop() for one in heights), ()), sum((one.pop() for one in widths), ())


def _hypotheses(places: _Places, heads: Sequence[tuple[int, int]]) -> Iterator[Cuts]:
    """Yield ways to cut the open tensors so that both sides have equally many parts of each shape.

    The coarsest come first. Then rows are cut further that may be in another order on the other side: gates, and heads.
    """
    cores = [[_core(shape) for shape in side.values()] for side in places.open]
    counts = [Counter(map(_canonical, side)) for side in cores]
    shapes = counts[0].keys() | counts[1].keys()
    uneven = {size for shape in shapes if counts[0][shape] != counts[1][shape] for size in shape[:2]}
    found = list(islice(_balanced(counts, uneven), CUTS))
    yield from found
    rows = {(_canonical(core), core[0]) for side in cores for core in side}
    for query, kv in heads:
        for part in sorted({core[0] // (query + 2 * kv) for side in cores for core in side}):
            every = {part * query, part * kv, part * (query + 2 * kv)}
            cuts = _along([one for one in rows if one[1] in every], part)
            ours, theirs = (_parts(side, cuts) for side in counts)
            if cuts and ours == theirs:
                yield cuts
    square = {frozenset(shape[:2]) for shape in shapes}
    sizes = {size for shape in shapes for size in shape[:2]}
    for base in found:
        for size, count in product(sizes, GATES):
            if {size, size * count} in square:
                yield {**_along([(shape, size * count) for shape in shapes if shape not in base], size), **base}


def _along(rows: Sequence[tuple[Shape, int]], part: int) -> dict[Shape, tuple[Sizes, ...]]:
    """Return the cuts of shapes along a dimension of a size, in equal parts."""
    cuts = {}
    for shape, whole in rows:
        if whole in shape[:2] and whole > part > 1 and whole % part == 0:
            dim = shape.index(whole)
            cuts[shape] = tuple(
                (part,) * (whole // part) if at == dim else (size,) for at, size in enumerate(shape[:2])
            )
    return cuts


def _parts(counts: Counter[Shape], cuts: Cuts) -> Counter[Shape]:
    """Return how many parts of each shape there are after the cuts."""
    made = Counter[Shape]()
    for shape, count in counts.items():
        for sizes in product(*cuts.get(shape, [(size,) for size in shape[:2]])):
            made[_canonical((*sizes, *shape[2:]))] += count
    return made


def _balanced(counts: Sequence[Counter[Shape]], uneven: set[int]) -> Iterator[Cuts]:
    """Yield the cuts after which both sides have equally many parts of each shape.

    The largest shape is decided first: it stays whole if both sides have equally many, and is cut otherwise.

    Args:
        uneven: sizes of the parts to try.
    """
    steps = iter(range(STEPS))

    def search(left: Sequence[Counter[Shape]], cuts: Cuts) -> Iterator[Cuts]:
        shapes = {shape for side in left for shape, count in side.items() if count}
        odd = [shape for shape in shapes if left[0][shape] != left[1][shape]]
        if not odd:
            yield cuts
            return
        shape = max(odd, key=lambda shape: (math.prod(shape), shape))
        if shape in cuts or next(steps, None) is None:
            return
        for way in _ways(shape, uneven):
            after = [Counter(side) for side in left]
            for side in after:
                count = side.pop(shape, 0)
                side.update(_parts(Counter({shape: count}), {shape: way}))
            yield from search(after, {**cuts, shape: way})

    yield from search(counts, {})


def _ways(shape: Shape, sizes: set[int]) -> list[tuple[Sizes, ...]]:
    """Return the ways to cut a shape: each dimension in equal parts, or in two; the fewest parts first."""
    choices = []
    for whole in shape[:2]:
        smaller = sorted((size for size in sizes if 1 < size < whole), reverse=True)
        equal = [(size,) * (whole // size) for size in smaller if whole % size == 0]
        two = [(size, whole - size) for size in smaller if 2 * size != whole and whole - size in sizes]
        choices.append([(whole,), *equal, *two])
    ways = list(product(*choices))
    cut = [way for way in ways if any(len(one) > 1 for one in way)]
    return sorted(cut, key=lambda way: (math.prod(map(len, way)), len(way[-1])))  # rows before columns


def _by_gradients(
    both: Models,
    arguments: Arguments,
    places: _Places,
    sides: tuple[Mapping[str, _Tensor], Mapping[str, _Tensor]],
    base: tuple[Matching, Operations],
    fill: Fill,
    among: tuple[list[str], list[str]],
    first: Matching,
) -> tuple[Matching, Operations] | None:
    """Return the matching of the parts with equal gradients; None if outputs or gradients differ."""
    import torch

    try:
        with torch.no_grad():
            if base[0].pairs:
                both.target.load_state_dict(fill(*base), strict=False)
            widths = [min(one.core[:2]) for side in sides for one in side.values() if len(one.core) > 1]
            scale = 0.5 / math.sqrt(max(widths, default=1))
            for model, side, buffers in zip((both.source, both.target), sides, places.buffers, strict=True):
                state = model.state_dict()
                for one in side.values():
                    _set_equal(state[one.name], one, scale)
                for name, shape in buffers.items():
                    if name.endswith(STATISTICS):
                        size = math.prod(shape)
                        _set_equal(state[name], _Tensor(name, shape, (size,), (size,), (1,)), scale)
        ran = [gradients(one, arguments, "a model", names)
               for one, names in zip((both.source, both.target), among, strict=True)]  # fmt: skip
    except (CkptfixError, RuntimeError):
        return None
    apart, _ = compared(ran[0][0], ran[1][0])
    if apart is None or apart > EQUAL:
        return None
    greatest = max((float(one.abs().max()) for _, found in ran for one in found.values() if one.numel()), default=0.0)
    blocks: list[dict[Part, torch.Tensor]] = [{}, {}]
    for into, side, (_, found) in zip(blocks, sides, ran, strict=True):
        for name, one in side.items():
            slope = found[name] if name in found else torch.zeros(one.shape, dtype=torch.float64)
            into.update(one.blocks(slope))
    hints = {(pair.source, pair.target) for pair in first.pairs}
    to = _counterparts(blocks[0], blocks[1], greatest * DEAD, hints)
    return None if to is None else _assembled(places, sides, to, base, first)


def _set_equal(tensor: torch.Tensor, one: _Tensor, scale: float) -> None:
    """Fill a tensor with the numbers of the shapes of its parts.

    Args:
        scale: of matrices. If equal queries and keys were large, attention would be saturated, without a gradient.
    """
    import torch

    bands = []
    for row in one.rows:
        shapes = [(row, column, *one.core[2:]) for column in one.columns] if len(one.core) > 1 else [(row,)]
        blocks = [equal_numbers(_canonical(shape), scale) for shape in shapes]
        blocks = [block if block.shape == shape else block.T for block, shape in zip(blocks, shapes, strict=True)]
        bands.append(torch.cat(blocks, 1) if len(one.core) > 1 else blocks[0])
    tensor.copy_(torch.cat(bands).reshape(one.shape))


def equal_numbers(shape: Shape, scale: float) -> torch.Tensor:
    """Return the numbers of all parts of a shape; a square matrix is symmetric."""
    import torch

    generator = torch.Generator().manual_seed(SEED + zlib.crc32(repr(shape).encode()))
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
    if len(shape) == 1:
        return torch.add(0.8, drawn.abs(), alpha=0.2)
    if len(shape) == 2 and shape[0] == shape[1]:
        drawn = (drawn + drawn.T) / math.sqrt(2)
    return drawn * (scale / math.sqrt(math.prod(shape[2:])))


def _counterparts(
    ours: Mapping[Part, torch.Tensor], theirs: Mapping[Part, torch.Tensor], dead: float, hints: set[tuple[str, str]]
) -> dict[Part, tuple[Part, set[bool]]] | None:
    """Pair parts with equal gradients: part of the target -> part of the source, and whether it may be transposed.

    Parts whose gradients are all equal do the same, such as the two biases of a gate. They go where the other parts of
    their tensors and modules go.

    Returns:
        None if a part has no counterpart.
    """
    near: dict[Part, dict[Part, set[bool]]] = {}
    classes: dict[Shape, list[tuple[float, Part]]] = {}
    for part, block in theirs.items():
        classes.setdefault(_canonical(tuple(block.shape)), []).append((float(block.norm()), part))
    for part, block in ours.items():
        norm = float(block.norm())
        near[part] = {}
        for other_norm, other in classes.get(_canonical(tuple(block.shape)), ()):
            if abs(norm - other_norm) <= 2 * EQUAL * max(norm, other_norm) + dead * block.numel():
                alike = max(norm, other_norm) <= dead  # no need to look at thousands of zeros
                turns = {turned for turned in (False, True) if alike or _same(block, theirs[other], turned, dead)}
                if turns:
                    near[part][other] = turns
    found: dict[Part, tuple[Part, set[bool]]] = {}
    related = Counter[tuple[object, object]]()

    def pair(part: Part, other: Part) -> None:
        if other not in found:
            found[other] = part, near[part][other]
            related.update(zip(_relatives(part), _relatives(other), strict=True))

    def rank(part: Part, other: Part) -> tuple[int, ...]:
        near_by = (related[one] for one in zip(_relatives(part), _relatives(other), strict=True))
        return *near_by, (part[0], other[0]) in hints, leaf(part[0]) == leaf(other[0]), part[1:] == other[1:]

    several = []
    for part, others in near.items():
        if len(others) == 1:
            pair(part, *others)
        else:
            several.append(part)
    best = {part: max((rank(part, other) for other in near[part]), default=()) for part in several}
    for part in sorted(several, key=best.__getitem__, reverse=True):
        free = [other for other in near[part] if other not in found]
        if free:
            pair(part, max(free, key=lambda other: rank(part, other)))
    return found if len(found) == len(theirs) == len(ours) else None


def _relatives(part: Part) -> tuple[object, ...]:
    """Return what a part shares with those beside it: rows of its module, its tensor, and its module."""
    name, row, _ = part
    return (_module(name), row), name, _module(name)


def _same(one: torch.Tensor, other: torch.Tensor, turned: bool, dead: float) -> bool:
    if turned:
        if one.dim() != 2:
            return False
        other = other.T
    if one.shape != other.shape:
        return False
    return float((one - other).abs().max()) <= EQUAL * max(float(one.abs().max()), float(other.abs().max())) + dead


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _assembled(
    places: _Places,
    sides: tuple[Mapping[str, _Tensor], Mapping[str, _Tensor]],
    to: Mapping[Part, tuple[Part, set[bool]]],
    base: tuple[Matching, Operations],
    first: Matching,
) -> tuple[Matching, Operations] | None:
    """Return the matching in which the parts go to their counterparts; None if no line of rules can express it."""
    pairs, taken = list(base[0].pairs), list(base[1].taken)
    modules: dict[str, str] = {}
    for names in _components(to):
        one, other = ([side[name] for name in row] for side, row in zip(sides, names, strict=True))
        steps = _equation(one, other, to)
        if steps is None:
            return None
        old, new, operations = steps
        if operations or len(old) > 1 or len(new) > 1:
            made = FusedTensors(old, new, operations, 0, joins=len(new) == 1 and len(old) > 1)
            if line_of(made) is None:
                return None
            taken.append(made)
        modules[_module(old[0])] = _module(new[0])
        said = " | ".join(map(str, operations))
        related = {(to[part][0][0], part[0]) for tensor in other for part in tensor.parts}
        for name, counterpart in sorted(related):
            tied = zip(places.names[0][name], places.names[1][counterpart], strict=False)
            pairs += (MatchedPair(*both, 1.0, "equal gradients", operation=said) for both in tied)
    pairs += _buffers(places, modules)
    order = {name: index for index, names in enumerate(places.names[0].values()) for name in names}
    done, filled = {pair.source for pair in pairs}, {pair.target for pair in pairs}
    ours = [*(pair.source for pair in first.pairs), *first.left]
    theirs = [*(pair.target for pair in first.pairs), *first.missing]
    matching = replace(
        first,
        pairs=tuple(sorted(pairs, key=lambda pair: order.get(pair.source, -1))),
        rules=(),
        left=tuple(dict.fromkeys(name for name in ours if name not in done)),
        missing=tuple(dict.fromkeys(name for name in theirs if name not in filled)),
        unfit=(),
    )
    return matching, Operations(tuple(taken))


def _components(to: Mapping[Part, tuple[Part, set[bool]]]) -> Iterator[tuple[list[str], list[str]]]:
    """Yield the tensors of both sides that exchange parts."""
    links: dict[str, dict[str, None]] = {}
    back: dict[str, dict[str, None]] = {}
    for other, (part, _) in to.items():
        links.setdefault(part[0], {})[other[0]] = None
        back.setdefault(other[0], {})[part[0]] = None
    done: set[str] = set()
    for name in links:
        if name in done:
            continue
        ours, theirs = {name: None}, dict(links[name])
        while True:
            more = {one: None for other in theirs for one in back[other]}
            if more.keys() <= ours.keys():
                break
            ours |= more
            theirs |= {other: None for one in ours for other in links[one]}
        done |= ours.keys()
        yield list(ours), list(theirs)


def _equation(
    ours: list[_Tensor], theirs: list[_Tensor], to: Mapping[Part, tuple[Part, set[bool]]]
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[Operation, ...]] | None:
    """Return the names of both sides in the order of a line, and the operations that make one from the other."""
    flags = set.intersection(*(to[part][1] for one in theirs for part in one.parts))
    for turned in sorted(flags):
        for join in (0, 1) if len(ours) > 1 else (0,):
            for split in (0, 1) if len(theirs) > 1 else (0,):
                found = _steps(ours, theirs, to, turned, join, split)
                if found is not None:
                    return found
    return None


def _steps(
    ours: list[_Tensor],
    theirs: list[_Tensor],
    to: Mapping[Part, tuple[Part, set[bool]]],
    turned: bool,
    join: int,
    split: int,
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[Operation, ...]] | None:
    """Return what `_equation` does, for tensors that are joined along one dimension, and split along one.

    Args:
        turned: the joined tensor is transposed.
        join, split: the dimensions; if `turned`, `join` is one before the transposition.
    """
    places, wanted = _laid(theirs, split), dict[Part, tuple[int, int]]()
    for _ in range(2):  # the order of one side depends on that of the other
        back = {part: _turned(places[other], turned) for other, (part, _) in to.items() if other in places}
        ours = sorted(ours, key=lambda one: min(back[part][join] for part in one.parts))
        own = _laid(ours, join)
        wanted = {other: _turned(own[to[other][0]], turned) for other in places}
        theirs = sorted(theirs, key=lambda one: min(wanted[part][split] for part in one.parts))
        places = _laid(theirs, split)
    lengths = [one.rows for one in ours], [one.columns for one in ours]
    if len(set(lengths[1 - join])) > 1:
        return None
    joined = [sum(sizes, ()) if dim == join else sizes[0] for dim, sizes in enumerate(lengths)]
    orders = []
    for dim, sizes in enumerate(joined[::-1] if turned else joined):
        moves = {places[other][dim]: place[dim] for other, place in wanted.items()}
        if any(moves[places[other][dim]] != place[dim] for other, place in wanted.items()):
            return None
        if sorted(moves) != sorted(moves.values()) or len(moves) != len(sizes):
            return None
        order = _shortest([moves[place] for place in range(len(sizes))])
        if len(order) > 1 and len(set(sizes)) > 1:
            return None
        orders.append(order)
    axes = {_axes(one) for one in (*ours, *theirs)}
    alike = len(axes) == 1 and not turned
    shapes = {one.shape for one in ours}, {one.shape for one in theirs}
    if not alike and max(map(len, shapes)) > 1 and any(one.shape != one.core for one in (*ours, *theirs)):
        return None
    place = axes.pop()[1] if alike else (0, 1)
    steps = []
    if not alike and ours[0].shape != ours[0].core:
        steps.append(reshape(ours[0].shape, ours[0].core))
    if len(ours) > 1:
        steps.append(_cut("concat", place[join], [one.core[join] for one in ours]))
    if turned:
        steps.append(Operation("transpose"))
    for dim, order in enumerate(orders):
        if len(order) > 1:
            steps += _reordered(order, {"dim": place[dim]} if place[dim] else {})
    if len(theirs) > 1:
        steps.append(_cut("split", place[split], [one.core[split] for one in theirs]))
    if not alike and theirs[0].shape != theirs[0].core:
        steps.append(reshape(theirs[0].core, theirs[0].shape))
    return tuple(one.name for one in ours), tuple(one.name for one in theirs), tuple(steps)


def _laid(tensors: Sequence[_Tensor], dim: int) -> dict[Part, tuple[int, int]]:
    """Return the places of the parts of tensors that are joined along a dimension."""
    found: dict[Part, tuple[int, int]] = {}
    start = 0
    for one in tensors:
        for name, row, column in one.parts:
            found[name, row, column] = (row, start + column) if dim else (start + row, column)
        start += len(one.columns if dim else one.rows)
    return found


def _turned(place: tuple[int, int], turned: bool) -> tuple[int, int]:
    return place[::-1] if turned else place


def _axes(one: _Tensor) -> tuple[int, tuple[int, ...]]:
    """Return the number of dimensions of a tensor, and which of them its core has."""
    return len(one.shape), tuple(index for index, size in enumerate(one.shape) if size != 1)


def _shortest(order: Sequence[int]) -> list[int]:
    """Return the order of the largest equal blocks that is the same: 2, 3, 0, 1 is 1, 0."""
    for size in range(len(order), 0, -1):
        starts = order[::size]
        if len(order) % size == 0 and all(
            start % size == 0 and list(order[at * size : (at + 1) * size]) == list(range(start, start + size))
            for at, start in enumerate(starts)
        ):
            return [start // size for start in starts]
    return list(order)


def _reordered(order: list[int], dim: Mapping[str, int]) -> list[Operation]:
    """Return the operations for an order of equal blocks: that of heads, if it is one, and otherwise `order`."""
    for parts in (2, 3, 4):
        groups, odd = divmod(len(order), parts)
        if odd or groups < 2:
            continue
        apart, together = order[::groups], [one // groups for one in order[:parts]]
        stated = {**dim, "groups": groups, "parts": parts}
        by_part = {**dim, "parts": parts}
        if order == [group * parts + part for part in apart for group in range(groups)]:
            last = [Operation("order", {**dim, "to": tuple(apart)})] if apart != sorted(apart) else []
            return [Operation("deinterleave", stated), Operation("concat", by_part), *last]
        if order == [part * groups + group for group in range(groups) for part in together]:
            first = [Operation("order", {**dim, "to": tuple(together)})] if together != sorted(together) else []
            return [*first, Operation("split", by_part), Operation("interleave", stated)]
    return [Operation("order", {**dim, "to": tuple(order)})]


def _cut(verb: str, dim: int, sizes: Sequence[int]) -> Operation:
    stated: dict[str, int | tuple[int, ...]] = {"dim": dim} if dim else {}
    return Operation(verb, stated if len(set(sizes)) == 1 else {**stated, "sizes": tuple(sizes)})


def _buffers(places: _Places, modules: Mapping[str, str]) -> Iterator[MatchedPair]:
    """Yield pairs of buffers of one shape, in the order of their modules' counterparts."""
    free: dict[tuple[str, Shape], list[str]] = {}
    for name, shape in places.buffers[1].items():
        free.setdefault((_module(name), shape), []).append(name)
    for name, shape in places.buffers[0].items():
        row = free.get((modules.get(_module(name), ""), shape), [])
        if row:
            other = next((one for one in row if leaf(one) == leaf(name)), row[0])
            row.remove(other)
            yield MatchedPair(name, other, 1.0, "beside equal gradients")
