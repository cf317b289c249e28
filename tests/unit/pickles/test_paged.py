"""A stream that is held by pages is as bytes are, wherever a page ends."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfix.errors import CkptfixError, TruncatedPickle, Unsupported
from ckptfix.pickles import paged
from ckptfix.pickles.paged import Pages, UnreadBytes, parse_paged

DATA = bytes(range(256)) * 2


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "PAGE", 16)
    monkeypatch.setattr(paged, "HEAD", 4)


def pages(data: bytes = DATA, start: int = 0) -> Pages:
    return Pages(lambda offset, length: data[offset : offset + length], start, len(data))


PLACES = st.integers(0, len(DATA) + 20)


@given(PLACES, st.lists(st.tuples(PLACES, PLACES), min_size=1, max_size=12))
def test_it_gives_what_bytes_give(start: int, looks: list[tuple[int, int]]) -> None:
    held = pages(start=start)
    assert len(held) == len(DATA)
    for first, last in looks:
        assert held[first:last] == DATA[first:last]
        if first < len(DATA):
            assert held[first] == DATA[first]
        else:
            with pytest.raises(IndexError):
                held[first]


@given(st.binary(min_size=1, max_size=1), PLACES, st.one_of(st.none(), PLACES))
def test_it_finds_a_byte_where_bytes_find_it(sub: bytes, start: int, stop: int | None) -> None:
    data = bytes(40) + DATA
    try:
        wanted: int | None = data.index(sub, start, len(data) if stop is None else stop)
    except ValueError:
        wanted = None
    if wanted is not None:
        assert pages(data).index(sub, start, stop) == wanted
    else:
        with pytest.raises(ValueError, match="no such byte"):
            pages(data).index(sub, start, stop)


def test_no_more_bytes_of_values_are_held_than_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "MAX_BYTES", 60)
    held = pages()
    assert held[0:30] + held[30:60] == DATA[:60]
    assert held[0:16] == DATA[:16]
    with pytest.raises(Unsupported, match="over 60 bytes of values"):
        held[0:17]


VALUE: dict[str, Any] = {
    "numbers": [1.5, 1 << 40, -3, 70_000, True, None], "text": "é" * 30, "tuple": (1, (2, "b"), ()), "set": {"a"},
    "small": b"abc", "four": b"0123", "five": b"01234", "large": b"*" * 300, "huge": b"#" * 70_000,
}  # fmt: skip


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_read_by_pages_is_what_pickle_reads(protocol: int) -> None:
    data = bytes(5) + pickle.dumps(VALUE, protocol)
    size = len(data)
    graph = parse_paged(lambda at, length: data[at : at + length], size, start=5, stays=lambda head: head != b"0123")
    found = {str(key): value for key, value in graph.root.items}  # type: ignore[union-attr]
    assert found["numbers"] == VALUE["numbers"] and str(found["text"]) == VALUE["text"]
    assert found["tuple"] == VALUE["tuple"] and graph.end == size
    if protocol > 2:
        # Only bytes beyond a few are left where they are, and only those that are told to stay.
        assert (found["small"], found["four"]) == (b"abc", b"0123") and found["five"] == b"01234"
        for name in ("large", "huge"):
            place: Any = found[name]
            assert isinstance(place, UnreadBytes)
            assert data[place.offset : place.offset + place.length] == VALUE[name]


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_a_pickle_that_is_cut_ends_where_bytes_end(protocol: int) -> None:
    data = pickle.dumps({key: value for key, value in VALUE.items() if key != "huge"}, protocol)
    for cut in range(2, len(data), 7):
        with pytest.raises((TruncatedPickle, CkptfixError)) as caught:
            parse_paged(lambda at, length, cut=cut: data[at : min(at + length, cut)], cut, stays=lambda head: True)  # type: ignore[misc]
        assert isinstance(caught.value, TruncatedPickle) and (caught.value.offset or 0) <= cut
