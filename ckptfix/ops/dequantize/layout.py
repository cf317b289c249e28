"""A quantized weight as its scheme lays it out, and the stream of plain numbers that is computed from it.

A weight is a matrix of rows: the last dimension of the plain weight, or a block of elements where a scheme ignores the
shape. Blocks of rows are read and computed on several threads, so the memory does not grow with the weight; only its
scales are held whole.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from ckptfix.checkpoint import ByteRange, Derived, Storage, TensorEntry, contiguous_stride, dtypes
from ckptfix.checkpoint.quantization import Quantized
from ckptfix.dataclass import dataclass
from ckptfix.elements.arrays import Encoding, halves, nearest, rounded
from ckptfix.errors import Refused, WouldLoseData
from ckptfix.io.elements import row_major
from ckptfix.io.read import read_chunks, read_from
from ckptfix.io.source import Readers
from ckptfix.io.system import keep_freed_memory
from ckptfix.io.threads import Workers
from ckptfix.ops.dequantize.codes import Table
from ckptfix.ops.dequantize.settings import Settings
from ckptfix.words import plural

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[Any]

TASK = 1 << 21
"""Elements that one task computes, at least; a task has whole rows."""

BLOCK = 1 << 17
"""Elements of one pass, chosen so that they stay in a core's cache."""

HELD = 32 << 20
"""Bytes of a tensor that is held whole where a weight is made of its columns."""

AHEAD = 4
"""Tasks that can wait to be written."""

Shape = tuple[int, ...]


class Tensors:
    """Readers of the tensors of a weight; a pass over the weight has one, which its threads share."""

    def __init__(self) -> None:
        self._readers = Readers()
        self._held: dict[str, Array] = {}
        self._lock = threading.RLock()

    def rows(self, entry: TensorEntry, first: int, last: int, nbytes: int) -> Array:
        """Return the bytes of the rows `first` to `last` of a tensor whose rows have `nbytes` bytes, a row each."""
        return self._box(entry, 1, (last - first) * nbytes, first * nbytes, 0).reshape(last - first, nbytes)

    def columns(self, entry: TensorEntry, rows: int, first: int, last: int, nbytes: int) -> Array:
        """Return the bytes `first` to `last` of each of `rows` rows, which have `nbytes` bytes."""
        if last - first == nbytes:
            return self.rows(entry, 0, rows, nbytes)
        if rows * nbytes <= HELD:
            # One read of the whole costs less than a read of each row.
            return self._once(f"whole {entry.name}", lambda: self.rows(entry, 0, rows, nbytes))[:, first:last]
        return self._box(entry, rows, last - first, first, nbytes)

    def numbers(self, entry: TensorEntry) -> Array:
        """Return the whole tensor; narrow floats are float32."""
        return self._once(f"numbers {entry.name}", lambda: numbers(entry, self._readers))

    def finite(self, entry: TensorEntry, *, role: str = "scale") -> Array:
        """Return the whole tensor; all floats are float32.

        Raises:
            Refused: a number in it is infinite or NaN.
        """

        def checked() -> Array:
            import numpy

            found = self.numbers(entry)
            if found.dtype == numpy.float64:
                found = found.astype(numpy.float32)
            if not numpy.isfinite(found).all():
                raise Refused(f"the {role} has a number that is not finite", where=entry.name)
            return found

        return self._once(f"finite {entry.name}", checked)

    def once(self, name: str, make: Callable[[], Array]) -> Array:
        """Return what `make` returns, called once in a pass."""
        return self._once(f"made {name}", make)

    def close(self) -> None:
        """Close the files."""
        self._readers.close()

    def _once(self, name: str, make: Callable[[], Array]) -> Array:
        with self._lock:
            if name not in self._held:
                self._held[name] = make()
            return self._held[name]

    def _box(self, entry: TensorEntry, rows: int, nbytes: int, offset: int, step: int) -> Array:
        import numpy

        data = row_major(entry, "little")
        if not isinstance(data, ByteRange):
            # A compressed record can be read from its beginning only.
            held = self._once(f"bytes {entry.name}", lambda: numpy.frombuffer(_all(data), numpy.uint8))
            if rows == 1:
                return held[offset : offset + nbytes].reshape(1, nbytes)
            return held.reshape(rows, step)[:, offset : offset + nbytes]
        made = numpy.empty((rows, nbytes), numpy.uint8)
        source = self._readers[data.path]
        view = made.reshape(-1).data
        for row in range(rows):
            source.read_into(data.offset + offset + row * step, view[row * nbytes : (row + 1) * nbytes])
        return made


def _all(data: Any) -> bytes:
    return b"".join(read_chunks(data))


def numbers(entry: TensorEntry, readers: Readers | None = None) -> Array:
    """Return the elements of a tensor in its shape; narrow floats are float32."""
    data = row_major(entry, "little")
    raw = bytearray(data.length)
    if isinstance(data, ByteRange) and readers is not None:
        readers[data.path].read_into(data.offset, memoryview(raw))
    else:
        raw[:] = _all(data)
    made: Array = Encoding.of(entry.dtype, "little").decoded(memoryview(raw))
    return made.reshape(entry.shape)


@dataclass(frozen=True, slots=True)
class Layout:
    """A quantized weight that can be computed.

    Attributes:
        key: of the plain weight, in the same state dict.
        shape: of the plain weight.
        dtype: of the numbers that the scheme's own code computes.
        bits: of a code.
        group: sizes of the block of elements that share a scale; empty for the whole tensor.
        rows, width: of the matrix that is computed. Its elements are those of the plain weight in row-major order; the
            last row may be longer than the weight.
        read: (readers, first row, last row) -> arrays whose first dimension is these rows.
        compute: (round, *the same arrays for some of these rows) -> float32 numbers of these rows. `round` rounds such
            numbers as an operation in the dtype of the weight does, if that is the dtype of the output.
        step: a block of rows that costs less to read together.
        table: codes of a few bits, with companions of the shape (rows, groups); `compute` is its own.
    """

    key: str
    shape: Shape
    dtype: str
    bits: int
    group: Shape
    rows: int
    width: int
    read: Callable[[Tensors, int, int], Sequence[Array]] = field(repr=False)
    compute: Callable[..., Array] = field(repr=False)
    step: int = 1
    table: Table | None = field(default=None, repr=False)

    @property
    def numel(self) -> int:
        """Elements of the plain weight."""
        return math.prod(self.shape)

    @property
    def described(self) -> str:
        """Its bits and its group in words."""
        bits = plural(self.bits, "bit")
        if not self.group:
            return f"{bits}, a scale for the tensor"
        if all(size == 1 for size in self.group[:-1]):
            return f"{bits}, groups of {self.group[-1]:,}"
        return f"{bits}, blocks of {' x '.join(map(str, self.group))}"


class Parts:
    """The tensors of a quantized weight, by the suffix of their names in the table of schemes.

    Attributes:
        weight: the row of the checkpoint's quantization.
        codes: the tensor with the codes.
        settings: the quantization settings beside the checkpoint.
        checks: whether numbers that only the computation needs are read and checked, such as group indexes.
    """

    def __init__(
        self,
        weight: Quantized,
        codes: TensorEntry,
        beside: Mapping[str, TensorEntry],
        settings: Settings,
        *,
        checks: bool = True,
    ) -> None:
        self.weight = weight
        self.codes = codes
        self.settings = settings
        self.checks = checks
        stem = codes.key[: len(codes.key) - len(weight.scheme.suffix)]
        names = {name for _, name in weight.companions}
        self._beside: dict[str, TensorEntry] = {}
        self._all = beside
        self.stem = stem
        for companion in weight.scheme.companions:
            entry = beside.get(companion.name(stem))
            if entry is not None and entry.name in names:
                self._beside.setdefault(companion.suffix, entry)
            elif entry is not None and companion.role != "activation scale":
                # The weight would be computed without it, and be wrong.
                shape = f"{entry.dtype} with the shape {list(entry.shape)}"
                raise self.wrong(f"its {companion.role} does not fit ({shape})", where=entry.name)

    def find(self, suffix: str) -> TensorEntry | None:
        """Return the companion with this suffix; None if the file lacks it."""
        return self._beside.get(suffix)

    def of_module(self, leaf: str) -> TensorEntry | None:
        """Return another tensor of the module, such as its ``bias``; None if the file lacks it."""
        return self._all.get(self.stem[: self.stem.rfind(".") + 1] + leaf)

    def need(self, suffix: str, role: str) -> TensorEntry:
        """Return the companion with this suffix.

        Raises:
            Refused: it is missing.
        """
        found = self._beside.get(suffix)
        if found is None:
            hint = "companions in another shard are found if you name the folder or its index"
            raise self.wrong(f"its {role} is missing ({self.stem}{suffix})", hint=hint)
        return found

    @property
    def first_scale(self) -> TensorEntry:
        """The scale of a scheme that has only one.

        Raises:
            Refused: it is missing.
        """
        suffix = next(row.suffix for row in self.weight.scheme.companions if row.role == "scale")
        return self.need(suffix, "scale")

    def wrong(self, why: str, *, where: str | None = None, hint: str | None = None) -> Refused:
        """Return the error of a weight that cannot be computed."""
        return Refused(f"{self.weight.label}: {why}", where=where or self.codes.name, hint=hint)


Opener = Callable[[Parts], Layout]
"""A function that lays out a weight; it reads no more than a few numbers of it."""


def _exact(block: Array) -> Array:
    return block


def rounding_to(dtype: str) -> Callable[[Array], Array]:
    """Return a function that rounds float32 numbers to `dtype`, and returns them as float32."""
    if dtype == "float32":
        return _exact

    return partial(nearest, target=dtype)


def computed(layout: Layout, tensors: Tensors, first: int, to: str, step: int) -> bytes:
    """Return the bytes of the rows from `first` on, `step` of them, in the dtype `to`.

    Raises:
        WouldLoseData: a number leaves the range of float16.
        Refused: a scale is not finite.
    """
    import numpy

    last = min(first + step, layout.rows)
    made = numpy.empty((last - first, layout.width), f"u{dtypes.by_name(to).itemsize}")
    round_ = rounding_to(to) if to == layout.dtype else _exact
    few = max(BLOCK // max(layout.width, 1), 1)
    with numpy.errstate(all="ignore"):
        inputs = layout.read(tensors, first, last)
        for start in range(0, last - first, few):
            arrays = [array[start : start + few] for array in inputs]
            into = made[start : start + few]
            if layout.table is not None and _looked_up(layout, layout.table, round_, to, arrays, into):
                continue
            block = layout.compute(round_, *arrays)
            if to != "float16":
                rounded(block, to, into)
            elif halves(block, into):
                raise WouldLoseData(
                    "a number is out of the range of float16", where=layout.key, hint="choose bf16 or fp32"
                )
    return made.tobytes()


def _looked_up(layout: Layout, table: Table, round_: Any, to: str, arrays: Sequence[Array], into: Array) -> bool:
    """Fill `into` from a table of the rounded numbers of each group; return False where that costs more.

    A number of the table that is out of the range may be that of no element, so the elements decide.
    """
    import numpy

    data, *companions = arrays
    costly = to == "float16" or (table.rounds and round_ is not _exact)
    if not costly or not table.pays(layout.width, companions[0].shape[1]):
        return False
    values = table.values(round_, *companions)
    made = numpy.empty(values.shape, into.dtype)
    if to != "float16":
        rounded(values, to, made)
    elif halves(values, made):
        return False
    table.look_up(made, data, into)
    return True


def stream(
    layout: Layout, tensors: Sequence[TensorEntry], to: str, *, parallel: bool = True, what: str = "dequantized"
) -> Derived:
    """Return the bytes of the plain weight in the dtype `to`, computed when they are read.

    Args:
        tensors: all tensors that it is computed from.
        what: the computation, in the past tense.
        parallel: compute on threads; otherwise in the thread that reads the bytes.
    """
    item = dtypes.by_name(to).itemsize
    total = layout.numel * item
    step = max((TASK if parallel else TASK // 4) // max(layout.width, 1), 1)
    step = max(step // layout.step, 1) * layout.step

    def block(readers: Tensors, first: int) -> bytes:
        return computed(layout, readers, first, to, step)

    def chunks() -> Iterator[bytes]:
        left = total
        readers = Tensors()
        try:
            call = partial(block, readers)
            firsts = range(0, layout.rows, step)
            if len(firsts) < 2 or not parallel:
                for first in firsts:
                    chunk = call(first)[:left]
                    left -= len(chunk)
                    yield chunk
                return
            keep_freed_memory()
            with closing(Workers(AHEAD).run(call, firsts)) as made:
                for chunk in made:
                    yield chunk[:left]
                    left -= len(chunk)
        finally:
            readers.close()

    own = (entry for entry in tensors if entry.storage is not None)
    sources = tuple(place for entry in own for place in read_from(row_major(entry, "little")))
    return Derived(total, chunks if total else tuple, f"{what} to {to}", sources)


def plain(
    layout: Layout,
    parts: Parts,
    tensors: Sequence[TensorEntry],
    to: str | None,
    storage: Storage | None = None,
    *,
    parallel: bool = True,
) -> TensorEntry:
    """Return the plain weight as a tensor, in the dtype `to`, or in that of the scheme's own code.

    Args:
        storage: of a weight that is computed from the same tensors.
        parallel: compute on threads.
    """
    dtype = to or layout.dtype
    codes = parts.codes
    made = storage
    if made is None:
        first = next(entry.storage for entry in tensors if entry.storage is not None)
        data = stream(layout, tensors, dtype, parallel=parallel)
        made = Storage(first.key, dtype, data.length, first.location, data)
    return TensorEntry(
        layout.key,
        codes.at,
        made,
        dtype,
        layout.shape,
        contiguous_stride(layout.shape),
        parameter=codes.parameter,
        requires_grad=codes.requires_grad,
    )
