"""numpy's pickles: what is read from them is what numpy pickled, in every protocol."""

import pickle
from typing import Any

import numpy
import pytest

from ckptfix.formats import numpy_pickles
from ckptfix.pickles import Call, Global, parse

ARRAYS: dict[str, Any] = {
    "float32": numpy.arange(6, dtype="<f4").reshape(2, 3),
    "big-endian": numpy.arange(6, dtype=">i8"),
    "columns first": numpy.asfortranarray(numpy.arange(6, dtype="<u2").reshape(2, 3)),
    "complex": numpy.array([1 + 2j, 3 - 4j]),
    "bool": numpy.array([True, False]),
    "empty": numpy.zeros((0, 4)),
    "one number": numpy.array(2.5),
}


def call_of(value: object, protocol: int) -> tuple[Call, str]:
    """The call that makes an array, and its name in numpy 1."""
    call = parse(pickle.dumps(value, protocol)).root
    assert type(call) is Call and type(call.func) is Global
    return call, numpy_pickles.old_name(call.func.full)


def read(value: object, protocol: int) -> numpy_pickles.PickledArray:
    return numpy_pickles.read_array(*call_of(value, protocol))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_is_read_as_it_was(name: str, protocol: int) -> None:
    array = ARRAYS[name]
    found = read(array, protocol)
    assert (found.shape, found.dtype.name) == (array.shape, array.dtype.name)
    assert numpy_pickles.ordered(found) == array.astype(array.dtype.newbyteorder("<")).tobytes("A")
    assert isinstance(found.data, bytes)
    values = numpy_pickles.nested(found.shape, numpy_pickles.items(found.dtype, found.data), found.fortran)
    if array.dtype.kind != "c":
        assert values == array.tolist()


def test_the_fields_of_records_are_read_apart() -> None:
    records = numpy.array([(1, 2.5), (3, 4.5)], dtype=[("a", "<i2"), ("b", "<f8")])
    found = dict(numpy_pickles.columns(read(records, 4)))
    values = {name: numpy_pickles.items(row.dtype, numpy_pickles.ordered(row)) for name, row in found.items()}
    assert values == {"a": [1, 3], "b": [2.5, 4.5]}


def test_bytes_that_do_not_match_the_shape_are_refused() -> None:
    call, name = call_of(ARRAYS["big-endian"], 2)
    assert type(call.state) is tuple
    call.state = (*call.state[:-1], b"short")
    with pytest.raises(numpy_pickles.BadValue, match="different size"):
        numpy_pickles.read_array(call, name)
