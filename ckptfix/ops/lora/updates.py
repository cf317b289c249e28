"""The numbers of a merge: a weight of the base plus the updates of adapters, in float64, rounded once.

Rows of the weight are read, computed and written in blocks on several threads; only the factors of its updates are held
whole. The sum is computed in float64 and rounded to float32, and then to the dtype of the output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

from ckptfix.checkpoint import Derived, TensorEntry, dtypes
from ckptfix.dataclass import dataclass
from ckptfix.elements.arrays import Encoding, rounded, unusual
from ckptfix.errors import WouldLoseData
from ckptfix.io.elements import row_major
from ckptfix.io.read import read_from
from ckptfix.io.system import keep_freed_memory
from ckptfix.io.threads import Workers
from ckptfix.ops.adapter import AdapterModule
from ckptfix.ops.dequantize.layout import Tensors, numbers
from ckptfix.words import shape as shown

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[Any]

TASK = 1 << 19
"""Elements that one task computes, at least; a task has whole rows."""

MULTIPLIED = 1 << 17
"""Multiplications of one product of matrices: OpenBLAS starts threads above 262,144 (interface/gemm.c)."""

AHEAD = 4
"""Tasks that can wait to be written."""

EPSILON = 2.0**-23
"""The number that LyCORIS adds to a norm before it divides by it (``modules/locon.py apply_weight_decompose``)."""


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """The numbers that one module of an adapter adds to rows of a weight.

    Attributes:
        scale: what its product is multiplied by, with the strength that the user asked for.
        first, rows: the rows of the weight.
        start: the first of these rows in the update.
        shape: of the weight.
        turned: the weight has the inputs in its rows (``fan_in_fan_out``).
        epsilon: added to the norm of DoRA.
    """

    module: AdapterModule
    scale: float
    first: int
    rows: int
    start: int
    shape: tuple[int, ...]
    turned: bool = False
    epsilon: float = 0.0

    @property
    def name(self) -> str:
        """A name that no other update has."""
        return f"{id(self)}"

    @property
    def width(self) -> int:
        """Columns of the weight as a matrix."""
        return prod(self.shape[1:])

    def delta(self, tensors: Tensors, first: int, last: int) -> Array:
        """Return rows of the update, from `first` to `last` of its own, times its scale."""
        import numpy

        module = self.module
        if "difference" in module.tensors and module.method is None:
            found = self._held(tensors, "difference", lambda: self._numbers("difference"))
            return found.reshape(len(found), -1)[first:last] * self.scale
        if module.method == "LoHa":
            made = self._product(tensors, "1", first, last) * self._product(tensors, "2", first, last)
        elif module.method == "LoKr":
            one, two = (self._held(tensors, f"kron{number}", partial(self._factor, number)) for number in "12")
            rows = numpy.arange(first, last)
            parts = one[rows // len(two)][:, :, None] * two.reshape(len(two), -1)[rows % len(two)][:, None, :]
            made = parts.reshape(last - first, -1)
        else:
            up, down = self._factors(tensors)
            made = product(up[first:last], down)
        made *= self.scale
        return made

    def _held(self, tensors: Tensors, what: str, make: Callable[[], Array]) -> Array:
        return tensors.once(f"{what} of {self.name}", make)

    def _numbers(self, role: Any) -> Array:
        import numpy

        made: Array = numbers(self.module.tensors[role]).astype(numpy.float64)
        return made

    def _factors(self, tensors: Tensors) -> tuple[Array, Array]:
        """Return the factors of a LoRA: (rows, rank) and (rank, width)."""
        return (
            self._held(tensors, "up", lambda: self._lora()[0]),
            self._held(tensors, "down", lambda: self._lora()[1]),
        )

    def _lora(self) -> tuple[Array, Array]:
        module = self.module
        if module.is_embedding:
            return self._numbers("embedding down").T, self._numbers("embedding up").T
        up, down = self._numbers("up"), self._numbers("down")
        if module.turned:
            up, down = up.T, down.T
        core = down.reshape(len(down), -1)
        if "mid" in module.tensors:
            core = _tucker(self._numbers("mid"), core)
        up = up.reshape(len(up), -1)
        return (core.T, up.T) if self.turned else (up, core)

    def _product(self, tensors: Tensors, number: str, first: int, last: int) -> Array:
        """Return rows of one of the two products of a LoHa."""
        up, down = (self._held(tensors, f"{number}{side}", partial(self._hada, number, side)) for side in (0, 1))
        return product(up[first:last], down)

    def _hada(self, number: str, side: int) -> Array:
        one, two = self._numbers(f"w{number}_a"), self._numbers(f"w{number}_b")
        if f"t{number}" in self.module.tensors:
            return one.T if not side else _tucker(self._numbers(f"t{number}"), two.reshape(len(two), -1))
        if self.turned:
            one, two = two.T, one.T
        return one if not side else two.reshape(len(two), -1)

    def _factor(self, number: str) -> Array:
        """Return a factor of a LoKr: a matrix, or for a convolution the second as (rows, columns, *kernel)."""
        tensors = self.module.tensors
        if f"w{number}" in tensors:
            made = self._numbers(f"w{number}")
        else:
            one, two = self._numbers(f"w{number}_a"), self._numbers(f"w{number}_b")
            if number == "2" and "t2" in tensors:
                core = _tucker(self._numbers("t2"), two.reshape(len(two), -1))
                made = one.T @ core
            else:
                made = one @ two.reshape(len(two), -1)
        if self.turned:
            made = made.T
        return made.reshape(len(made), -1)


def product(up: Array, down: Array) -> Array:
    """Return the product of two matrices, in parts for which OpenBLAS starts no threads of its own.

    Its threads would wait for each other beside ours, which takes eight times the processor time.
    """
    import numpy

    rows, rank = up.shape
    width = down.shape[1]
    made = numpy.empty((rows, width))
    most = max(MULTIPLIED // max(rank, 1), 1)
    wide = min(width, max(most // 16, 64))
    tall = max(most // max(wide, 1), 1)
    for column in range(0, width, max(wide, 1)):
        right = down[:, column : column + wide]
        for row in range(0, rows, tall):
            numpy.matmul(up[row : row + tall], right, out=made[row : row + tall, column : column + wide])
    return made


def _tucker(core: Array, down: Array) -> Array:
    """Return (rank, inputs * kernel) of a core (rank, rank, *kernel) and a matrix (rank, inputs)."""
    import numpy

    rank, inner = core.shape[:2]
    made: Array = numpy.einsum("ijk,jn->ink", core.reshape(rank, inner, -1), down)
    return made.reshape(rank, -1)


def size_of(module: AdapterModule) -> tuple[int, int] | None:
    """Return rows and columns of a module's update, as the base has them without ``fan_in_fan_out``.

    Returns:
        None if the tensors of the module do not fit together.
    """
    tensors = module.tensors
    shapes = {role: entry.shape for role, entry in tensors.items()}
    try:
        if module.method is None:
            one = shapes.get("difference")
            return None if one is None else (one[0], prod(one[1:]))
        if module.is_embedding:
            (rank, count), (width, other) = shapes["embedding down"], shapes["embedding up"]
            return (count, width) if rank == other else None
        if module.method == "LoRA":
            up, down = shapes["up"], shapes["down"]
            if len(up) < 2 or len(down) < 2 or (module.turned and (len(up), len(down)) != (2, 2)):
                return None
            if module.turned:
                up, down = up[::-1], down[::-1]
            inner = shapes.get("mid", (down[0], down[0]))
            fits = (prod(up[1:]), down[0]) == inner[:2]
            return (up[0], prod(down[1:]) * prod(inner[2:])) if fits else None
        if module.method == "LoHa":
            sizes = {_size(shapes, number) for number in "12"}
            return sizes.pop() if len(sizes) == 1 else None
        sides = [_size(shapes, number) or (0, 0) for number in "12"]
        return sides[0][0] * sides[1][0], sides[0][1] * sides[1][1]
    except (KeyError, ValueError, IndexError):
        return None


def _size(shapes: Any, number: str) -> tuple[int, int] | None:
    """Return rows and columns of a factor of a LoHa or LoKr."""
    if f"w{number}" in shapes:
        one = shapes[f"w{number}"]
        return one[0], prod(one[1:])
    one, two = shapes[f"w{number}_a"], shapes[f"w{number}_b"]
    if f"t{number}" in shapes:
        core = shapes[f"t{number}"]
        return (one[1], two[1] * prod(core[2:])) if (one[0], two[0]) == core[:2] else None
    return (one[0], prod(two[1:])) if one[1] == two[0] else None


@dataclass(frozen=True, slots=True)
class Merged:
    """A weight with its updates, in the order of the adapters."""

    entry: TensorEntry
    updates: Sequence[Update]

    @property
    def rows(self) -> int:
        """Rows of the weight."""
        return self.entry.shape[0]

    @property
    def width(self) -> int:
        """Columns of the weight as a matrix."""
        return prod(self.entry.shape[1:])

    def original(self, tensors: Tensors, first: int, last: int) -> Array:
        """Return rows of the base as float64."""
        import numpy

        nbytes = self.width * self.entry.itemsize
        data = tensors.rows(self.entry, first, last, nbytes)
        found = Encoding.of(self.entry.dtype, "little").decoded(data.reshape(-1).data)
        made: Array = found.reshape(last - first, self.width).astype(numpy.float64)
        return made

    def block(self, tensors: Tensors, first: int, last: int) -> Array:
        """Return rows of the sum as float64."""
        made = self.original(tensors, first, last)
        before = made.copy() if any(one.module.is_dora for one in self.updates) else None
        for one in self.updates:
            low, high = max(first, one.first), min(last, one.first + one.rows)
            if low >= high:
                continue
            delta = one.delta(tensors, low - one.first + one.start, high - one.first + one.start)
            rows = slice(low - first, high - first)
            made[rows] += delta
            if one.module.is_dora:
                assert before is not None
                made[rows] *= self._factor(tensors, one, before[rows] + delta, low - one.first + one.start)
        return made

    def _factor(self, tensors: Tensors, one: Update, whole: Array, start: int) -> Array:
        """Return what DoRA multiplies rows by: the magnitude over the norm of the base with this update alone."""
        import numpy

        entry = one.module.tensors["magnitude"]
        held = tensors.once(f"magnitude of {one.name}", lambda: numbers(entry).astype(numpy.float64).reshape(-1))
        if by_rows(one, entry):
            norm = numpy.sqrt(numpy.einsum("ij,ij->i", whole, whole)) + one.epsilon
            found: Array = (held[start : start + len(whole)] / norm)[:, None]
            return found
        norms = tensors.once(f"norms of {one.name}", lambda: self._norms(tensors, one, len(held)))
        spread: Array = (held / (norms + one.epsilon)).repeat(self.width // len(held))[None, :]
        return spread

    def _norms(self, tensors: Tensors, one: Update, count: int) -> Array:
        """Return the norms of the columns of the base with an update, all elements of a kernel together."""
        import numpy

        sums = numpy.zeros(count)
        step = max(TASK // max(self.width, 1), 1)
        for first in range(0, self.rows, step):
            last = min(first + step, self.rows)
            block = self.original(tensors, first, last) + one.delta(tensors, first, last)
            sums += numpy.square(block, out=block).reshape(last - first, count, -1).sum(axis=(0, 2))
        return numpy.sqrt(sums)


def by_rows(one: Update, magnitude: TensorEntry) -> bool:
    """Return whether a magnitude has a number for each row of the weight, rather than for each column."""
    if one.turned or one.module.is_embedding:
        return False
    # LyCORIS decomposes by inputs where the first dimension is 1; PEFT has (1, outputs, 1, 1) for a convolution.
    return not (len(magnitude.shape) > 1 and magnitude.shape[0] == 1 and one.epsilon)


def stream(merged: Merged, to: str, sources: Sequence[TensorEntry]) -> Derived:
    """Return the bytes of a sum in the dtype `to`, computed when they are read.

    Args:
        sources: the tensors that it is computed from.
    """
    item = dtypes.by_name(to).itemsize
    total = merged.entry.numel * item
    step = max(TASK // max(merged.width, 1), 1)

    def task(tensors: Tensors, first: int) -> bytes:
        import numpy

        last = min(first + step, merged.rows)
        with numpy.errstate(all="ignore"):
            block = merged.block(tensors, first, last)
            if to != "float64":
                block = block.astype(numpy.float32)
            made = numpy.empty(block.shape, f"u{item}")
            rounded(block, to, made)
            if to == "float16" and unusual(made, to) and _overflows(made, block):
                hint = "choose --dtype bf16 or fp32"
                raise WouldLoseData("a number is out of the range of float16", where=merged.entry.key, hint=hint)
        return made.tobytes()

    def chunks() -> Iterator[bytes]:
        tensors = Tensors()
        try:
            call = partial(task, tensors)
            firsts = range(0, merged.rows, step)
            if len(firsts) < 2:
                yield from map(call, firsts)
                return
            keep_freed_memory()
            with closing(Workers(AHEAD).run(call, firsts)) as made:
                yield from made
        finally:
            tensors.close()

    own = (entry for entry in sources if entry.storage is not None)
    places = tuple(place for entry in own for place in read_from(row_major(entry, "little")))
    return Derived(total, chunks if total else tuple, f"merged to {to}", places)


def _overflows(made: Array, block: Array) -> bool:
    """Return whether a finite number became infinite in float16."""
    import numpy

    infinite = numpy.isinf(made.view(numpy.float16))
    return bool(infinite.any() and numpy.isfinite(block[infinite]).any())


def misfit(module: AdapterModule, shape: tuple[int, ...]) -> str:
    """Return in words that an update does not have the size of the weight."""
    size = size_of(module)
    what = "its tensors do not fit together" if size is None else f"its update is {size[0]} x {size[1]}"
    return f"{module.name}: {what}, and the base has the shape {shown(shape)}"
