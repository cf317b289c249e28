"""Operations of a line on tensors: they return rearranged arrays, and reject shapes that do not fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field

from ckptfix.dataclass import dataclass
from ckptfix.io import byte_view
from ckptfix.io.byte_view import ByteView
from ckptfix.names.operations import FIRST, HALF, Operation, Term
from ckptfix.words import plural

Nested = ByteView | list["Nested"]
"""A tensor, or several: by the numbers of a line's ``{e}``, and then by the names of its list."""


class Misfit(Exception):
    """An operation that does not fit the shapes; the caller adds the line and the tensors."""


@dataclass(slots=True)
class Worker:
    """The state of a line's operations while they are carried out.

    Attributes:
        name: name in messages of a file that is joined from pieces.
        wanted: how many tensors the list on the right of the line names; None without a list.
        dtype: of all tensors.
        cut: rows that were cut off, in words.
    """

    name: str
    wanted: int | None = None
    dtype: str = ""
    cut: list[str] = field(default_factory=list)

    def made(self, value: Nested, operations: Sequence[Operation], parts: int) -> Nested:
        """Apply `operations` to `value`; `parts` of them split one tensor into several.

        Raises:
            Misfit: an operation does not fit the shapes.
        """
        left = parts
        for operation in operations:
            try:
                if operation.kind == "join":
                    value = self._innermost(value, lambda rows, one=operation: _JOIN[one.name](self, one, rows))  # type: ignore[misc]
                elif operation.kind == "part":
                    left -= 1
                    count = self.wanted if not left else None
                    value = _each(value, lambda array, _, one=operation, n=count: _PART[one.name](one, array, n))  # type: ignore[misc]
                else:
                    value = _each(value, lambda array, part, one=operation: self._one(one, array, part))  # type: ignore[misc]
            except Misfit as error:
                raise Misfit(f"`{operation}`: {error}") from None
        return value

    def _innermost(self, value: Nested, join: Callable[[list[ByteView]], ByteView]) -> Nested:
        assert isinstance(value, list)
        arrays = [row for row in value if isinstance(row, ByteView)]
        return join(arrays) if len(arrays) == len(value) else [self._innermost(row, join) for row in value]

    def _one(self, operation: Operation, array: ByteView, part: int) -> Nested:
        return _EACH[operation.name](self, operation, array) if operation.concerns(part) else array


def _each(value: Nested, make: Callable[[ByteView, int], Nested], part: int = 0) -> Nested:
    if isinstance(value, list):
        return [_each(row, make, index) for index, row in enumerate(value)]
    return make(value, part)


def _dim(operation: Operation, dimensions: int, default: int = 0, option: int | None = None) -> int:
    """Return the dimension that an operation names, counted from the front."""
    dim = operation.number("dim", default) if option is None else option
    assert dim is not None
    if not -dimensions <= dim < dimensions:
        raise Misfit(f"there is no dimension {dim} among {dimensions}")
    return dim % dimensions


def _sizes(operation: Operation, total: int, count: int | None) -> tuple[int, ...]:
    """Return the sizes of the parts of `total` rows."""
    sizes = operation.numbers("sizes")
    heads, kv = operation.number("heads"), operation.number("kv", operation.number("heads"))
    if sizes is None and heads is not None and kv is not None:
        width, rest = divmod(total, heads + 2 * kv)
        if rest:
            raise Misfit(f"{total} rows cannot be divided into {heads} + {kv} + {kv} heads")
        sizes = (heads * width, kv * width, kv * width)
    elif sizes is None:
        parts = operation.number("parts", count)
        if parts is None:
            raise Misfit("the number of parts is not stated: add parts= or sizes=")
        if total % parts:
            raise Misfit(f"{total} rows cannot be divided into {parts} equal parts")
        sizes = (total // parts,) * parts
    if count is not None and len(sizes) != count:
        raise Misfit(f"the line states {plural(len(sizes), 'part')}, but names {count}")
    if sum(sizes) != total or min(sizes) < 0:
        raise Misfit(f"parts of {_listed(sizes)} rows are {sum(sizes)} together, but there are {total}")
    return sizes


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))


def _joined_sizes(operation: Operation, arrays: Sequence[ByteView], dim: int) -> None:
    """Reject parts that the line does not describe, or that it could not take apart again."""
    own = tuple(array.shape[dim] for array in arrays)
    if len(set(own)) > 1 and not operation.options.keys() & {"sizes", "heads"}:
        hint = f"state sizes={_listed(own).replace(' ', '')} or heads= and kv=, to run the line backwards"
        raise Misfit(f"its parts have {_listed(own)} rows: {hint}")
    stated = _sizes(operation, sum(own), len(own))
    if stated != own:
        raise Misfit(f"its parts have {_listed(own)} rows, not {_listed(stated)}")


def _alike(arrays: Sequence[ByteView], dim: int | None) -> None:
    shapes = [[size for axis, size in enumerate(array.shape) if axis != dim] for array in arrays]
    odd = next((index for index, shape in enumerate(shapes) if shape != shapes[0]), None)
    if odd is not None:
        raise Misfit(f"{list(arrays[0].shape)} and {list(arrays[odd].shape)} cannot be joined")


def _split(operation: Operation, array: ByteView, count: int | None) -> Nested:
    dim = _dim(operation, len(array.shape))
    parts: list[Nested] = []
    at = 0
    for size in _sizes(operation, array.shape[dim], count):
        parts.append(byte_view.narrowed(array, dim, at, size))
        at += size
    return parts


def _unstack(operation: Operation, array: ByteView, count: int | None) -> Nested:
    dim = _dim(operation, len(array.shape))
    if count is not None and array.shape[dim] != count:
        raise Misfit(f"dimension {dim} has {array.shape[dim]} rows, but {count} are named")
    return [byte_view.selected(array, dim, index) for index in range(array.shape[dim])]


def _concat(worker: Worker, operation: Operation, arrays: list[ByteView]) -> ByteView:
    dim = _dim(operation, len(arrays[0].shape))
    _alike(arrays, dim)
    _joined_sizes(operation, arrays, dim)
    return byte_view.joined(arrays, dim, worker.name)


def _stack(worker: Worker, operation: Operation, arrays: list[ByteView]) -> ByteView:
    dim = _dim(operation, len(arrays[0].shape) + 1)
    _alike(arrays, None)
    return byte_view.stacked(arrays, dim, worker.name)


def _mask(worker: Worker, operation: Operation, arrays: list[ByteView]) -> ByteView:
    if len(arrays) != 2:
        raise Misfit(f"it takes a tensor and its mask, and there are {len(arrays)}")
    if worker.dtype not in byte_view.FLOAT_BITS:
        raise Misfit(f"it multiplies numbers of {', '.join(byte_view.FLOAT_BITS)}, and these are {worker.dtype}")
    _alike(arrays, None)
    array, mask = arrays
    return byte_view.masked(array, mask, worker.dtype, worker.name)


def _groups(operation: Operation, sizes: Sequence[int]) -> int:
    groups = operation.number("groups", operation.number("kv", operation.number("heads")))
    assert groups is not None
    odd = [size for size in sizes if size % groups]
    if odd:
        raise Misfit(f"a part of {odd[0]} rows cannot be divided into {groups} equal groups")
    return groups


def _interleave(worker: Worker, operation: Operation, arrays: list[ByteView]) -> ByteView:
    dim = _dim(operation, len(arrays[0].shape))
    _alike(arrays, dim)
    _joined_sizes(operation, arrays, dim)
    sizes = [array.shape[dim] for array in arrays]
    groups = _groups(operation, sizes)
    cut = [_cut(array, dim, (groups, array.shape[dim] // groups)) for array in arrays]
    return _flat(byte_view.joined(cut, dim + 1, worker.name), dim, 2)


def _deinterleave(operation: Operation, array: ByteView, count: int | None) -> Nested:
    dim = _dim(operation, len(array.shape))
    sizes = _sizes(operation, array.shape[dim], count)
    groups = _groups(operation, sizes)
    whole = _cut(array, dim, (groups, array.shape[dim] // groups))
    parts: list[Nested] = []
    at = 0
    for size in sizes:
        parts.append(_flat(byte_view.narrowed(whole, dim + 1, at, size // groups), dim, 2))
        at += size // groups
    return parts


def _cut(array: ByteView, dim: int, sizes: tuple[int, ...]) -> ByteView:
    """Split one dimension into several."""
    return byte_view.reshaped(array, (*array.shape[:dim], *sizes, *array.shape[dim + 1 :]))


def _flat(array: ByteView, dim: int, dims: int) -> ByteView:
    """Merge several dimensions into one."""
    size = 1
    for one in array.shape[dim : dim + dims]:
        size *= one
    return byte_view.reshaped(array, (*array.shape[:dim], size, *array.shape[dim + dims :]))


def _transpose(worker: Worker, operation: Operation, array: ByteView) -> ByteView:
    count = len(array.shape)
    dims = operation.numbers("dims")
    if dims is None:
        if count != 2:
            raise Misfit(f"it has {plural(count, 'dimension')}: name the two, such as dims=1,2")
        dims = (0, 1)
    one, other = (_dim(operation, count, option=dim) for dim in dims)
    order = list(range(count))
    order[one], order[other] = other, one
    return byte_view.permuted(array, order)


def _permute(worker: Worker, operation: Operation, array: ByteView) -> ByteView:
    dims = operation.numbers("dims") or ()
    if len(dims) != len(array.shape):
        raise Misfit(f"it has {plural(len(array.shape), 'dimension')}")
    return byte_view.permuted(array, dims)


def _rope(worker: Worker, operation: Operation, array: ByteView) -> ByteView:
    dim = _dim(operation, len(array.shape))
    heads = operation.number("heads") or 1
    width, rest = divmod(array.shape[dim], heads)
    if rest or width % 2:
        raise Misfit(f"{array.shape[dim]} rows cannot be divided into {plural(heads, 'head')} of pairs")
    to_half = operation.options["to"] == HALF
    cut = _cut(array, dim, (heads, width // 2, 2) if to_half else (heads, 2, width // 2))
    order = list(range(len(cut.shape)))
    order[dim + 1], order[dim + 2] = dim + 2, dim + 1
    return _flat(byte_view.permuted(cut, order), dim, 3)


def _outputs(worker: Worker, operation: Operation, array: ByteView) -> ByteView:
    """Reorder (..., inputs, outputs), the kernels of Keras and Flax, to (outputs, inputs, ...), or back."""
    count = len(array.shape)
    if count < 2:
        raise Misfit(f"it has {plural(count, 'dimension')}, and no inputs and outputs")
    first = operation.options["to"] == FIRST
    order = (count - 1, count - 2, *range(count - 2)) if first else (*range(2, count), 1, 0)
    return byte_view.permuted(array, order)


def _flatten(worker: Worker, operation: Operation, array: ByteView) -> ByteView:
    count = len(array.shape)
    if not count:
        raise Misfit("it has no dimensions")
    ends = operation.number("first", 0), operation.number("last", -1)
    first, last = (_dim(operation, count, option=end) for end in ends)
    if last < first:
        raise Misfit(f"it has {plural(count, 'dimension')}, and the last comes before the first")
    return _flat(array, first, last - first + 1)


def _order(worker: Worker, operation: Operation, array: ByteView) -> ByteView:
    dim, parts = _dim(operation, len(array.shape)), operation.numbers("to") or ()
    size, rest = divmod(array.shape[dim], len(parts))
    if rest:
        raise Misfit(f"{array.shape[dim]} rows cannot be divided into {plural(len(parts), 'equal part')}")
    return byte_view.joined([byte_view.narrowed(array, dim, part * size, size) for part in parts], dim, worker.name)


def _add(worker: Worker, operation: Operation, array: ByteView) -> ByteView:
    if worker.dtype not in byte_view.FLOAT_BITS:
        raise Misfit(f"it adds to numbers of {', '.join(byte_view.FLOAT_BITS)}, and these are {worker.dtype}")
    return byte_view.added(array, operation.number("n") or 0, worker.dtype, worker.name)


def _rows(worker: Worker, operation: Operation, array: ByteView) -> ByteView:
    dim = _dim(operation, len(array.shape))
    have, before, after = array.shape[dim], operation.number("from"), operation.number("to")
    assert after is not None
    if before is not None and have != before:
        raise Misfit(f"it has {have} rows")
    if after > have:
        if "fill" not in operation.options:
            raise Misfit(f"it has {have} rows: add fill=0 to pad it")
        return byte_view.padded(array, dim, after, worker.name)
    if after < have:
        worker.cut.append(f"rows {after} to {have - 1}")
    return byte_view.narrowed(array, dim, 0, after)


def _reshape(worker: Worker, operation: Operation, array: ByteView) -> ByteView:
    letters = _solved(operation.terms("from"), array.shape)
    shape = tuple(_product(term, letters) for term in operation.terms("to"))
    count = 1
    for size in shape:
        count *= size
    if count != array.numel:
        raise Misfit(f"{list(shape)} holds {count} elements, but it has {array.numel}")
    return byte_view.reshaped(array, shape)


def _solved(terms: Sequence[Term], shape: Sequence[int]) -> dict[str, int]:
    """Return the values of the letters in `terms`, given the sizes of `shape`."""
    if len(terms) != len(shape):
        raise Misfit(f"it has {plural(len(shape), 'dimension')}, but from= has {len(terms)}")
    letters: dict[str, int] = {}
    waiting = list(zip(terms, shape, strict=True))
    while waiting:
        rest = []
        for (number, names), size in waiting:
            unknown = [name for name in names if name not in letters]
            if len(unknown) > 1:
                rest.append(((number, names), size))
                continue
            known = _product((number, tuple(name for name in names if name in letters)), letters)
            if not unknown:
                if known != size:
                    raise Misfit(f"a dimension is {size}, but from= states {known}")
            elif not known or size % known:
                raise Misfit(f"a dimension of {size} is not a multiple of {known}")
            else:
                letters[unknown[0]] = size // known
        if len(rest) == len(waiting):
            raise Misfit("its sizes do not determine the letters of from=: write numbers for some")
        waiting = rest
    return letters


def _product(term: Term, letters: dict[str, int]) -> int:
    number, names = term
    for name in names:
        number *= letters[name]
    return number


_JOIN: dict[str, Callable[[Worker, Operation, list[ByteView]], ByteView]] = {
    "concat": _concat,
    "stack": _stack,
    "interleave": _interleave,
    "mask": _mask,
}
_PART: dict[str, Callable[[Operation, ByteView, int | None], Nested]] = {
    "split": _split,
    "unstack": _unstack,
    "deinterleave": _deinterleave,
}
_EACH: dict[str, Callable[[Worker, Operation, ByteView], ByteView]] = {
    "transpose": _transpose,
    "permute": _permute,
    "reshape": _reshape,
    "rope": _rope,
    "rows": _rows,
    "outputs": _outputs,
    "flatten": _flatten,
    "order": _order,
    "add": _add,
}
