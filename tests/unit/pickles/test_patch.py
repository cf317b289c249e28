"""What an edit writes into a pickle, read by Python's own readers; and regions of plain values, item by item."""

from __future__ import annotations

import pickle
import pickletools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfix.errors import Unsupported
from ckptfix.pickles import opcodes as op
from ckptfix.pickles import parse
from ckptfix.pickles.graph import Text
from ckptfix.pickles.patch import Patch, int_opcode, items_pushed, splice, string_opcode

EDGES = sorted({sign * (1 << bits) + more for bits in (0, 8, 16, 31, 32, 63, 2039, 2040, 2048)
                for more in (-1, 0, 1) for sign in (1, -1)})  # fmt: skip
"""Numbers on both sides of each limit of an opcode."""


def value(opcode: bytes) -> Any:
    """What an opcode alone pushes."""
    return pickle.loads(opcode + b".")


def test_a_number_is_pushed_as_pickle_pushes_it() -> None:
    for number in EDGES:
        assert value(int_opcode(number)) == number
        assert int_opcode(number) == pickle.dumps(number, 2)[2:-1]


TEXTS = (
    *("", "a", "a" * 255, "a" * 256, "é" * 127, "é" * 128, "層.𝄞", "\ud800"),
    *("line\nbreak", "back\\slash", "back\\u0041", "\0\r\x1a"),
)


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_pushed_by_an_opcode_that_the_stream_may_have(text: str) -> None:
    for protocol in range(6):
        pushed_as_it_may_be(text, protocol)


def pushed_as_it_may_be(text: str, protocol: int) -> None:
    short = {op.SHORT_BINUNICODE, op.BINUNICODE}
    for like in (op.BINUNICODE, op.SHORT_BINUNICODE, op.UNICODE):
        for used in (set[int](), short):
            made = string_opcode(text, protocol, like, used)
            assert value(made) == text
            assert made[0] in {op.BINUNICODE, *used, *({op.UNICODE} if protocol == 0 else ())}
            fits = len(text.encode("utf-8", "surrogatepass")) < 256
            if used and fits and not (like == op.UNICODE and protocol == 0):
                assert made[0] == op.SHORT_BINUNICODE


@pytest.mark.parametrize("text", [text for text in TEXTS if text != "\ud800"])
def test_a_text_of_python_2_stays_one_where_the_stream_may_have_it(text: str) -> None:
    raw = text.encode()
    for like in (op.SHORT_BINSTRING, op.BINSTRING, op.STRING):
        for used in (set[int](), {op.BINSTRING}):
            made = string_opcode(text, 2, like, used)
            if made[0] == op.BINUNICODE:
                # weights_only refuses BINSTRING: an edit of a short one brings none into a stream that has none.
                assert like == op.SHORT_BINSTRING and not used and len(raw) >= 256 and value(made) == text
            else:
                assert made[0] == (op.SHORT_BINSTRING if len(raw) < 256 and like != op.STRING else op.BINSTRING)
                assert pickle.loads(made + b".", encoding="bytes") == raw


PLAIN = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-(1 << 70), 1 << 70), st.floats(allow_nan=False), st.text(max_size=6)
    ),
    lambda inner: st.lists(inner, max_size=5).map(tuple),
    max_leaves=12,
)


@given(st.lists(PLAIN, min_size=1, max_size=4), st.integers(2, 4))
def test_a_region_falls_into_the_values_that_it_pushes(values: list[Any], protocol: int) -> None:
    parts = [pickle.dumps(one, protocol) for one in values]
    # Without PROTO, FRAME and STOP each pushes one value.
    rows = [
        [row for row in pickletools.genops(part) if row[0].name not in ("PROTO", "FRAME", "STOP")] for part in parts
    ]
    bodies = [part[row[0][2] : -1] for part, row in zip(parts, rows, strict=True)]
    before, behind = b"\x80\x04]", b"N."
    data = before + b"".join(bodies)
    found = items_pushed(data + behind, len(before), len(data))
    assert [data[item.start : item.end] for item in found] == bodies
    for item, row in zip(found, rows, strict=True):
        last = next(at for code, _, at in reversed(row) if code.name not in ("BINPUT", "LONG_BINPUT", "MEMOIZE"))
        assert item.last - item.start == last - row[0][2]


@pytest.mark.sampled(1_000)
@pytest.mark.parametrize(("region", "offset"), [
    (b"K\1t", 2), (b"q\0", 0), (b"\x85", 0), (b"K\1\x86", 2), (b"K\1K\2\x87", 4), (b"K\1(\x85", 3), (b"(K\1", 0),
    (b"(K\1(K\2t", 0), (b"}", 0), (b"K\1K\2s", 4), (b"K\x010", 2), (b"Q", 0), (b"(K\1K\2tu", 6),
])  # fmt: skip
def test_a_region_that_does_anything_else_is_refused_where_it_does(region: bytes, offset: int) -> None:
    with pytest.raises(Unsupported) as caught:
        items_pushed(b"NN" + region, 2, 2 + len(region))
    assert caught.value.offset == 2 + offset


def starts_of(stream: bytes) -> list[tuple[str, int, Any]]:
    """(name, offset, argument) of each opcode."""
    return [(code.name, at or 0, argument) for code, argument, at in pickletools.genops(stream)]


@given(st.lists(st.text("abc", max_size=40), min_size=1, max_size=30), st.data())
def test_frames_hold_what_edits_of_them_leave(words: list[str], data: st.DataObject) -> None:
    """Two frames in a row, and edits at any of their strings: each string is what it was made, and lengths agree."""
    stream = pickle.dumps(words, 4)
    body = stream[11:-1]
    cut = data.draw(st.sampled_from([at - 11 for _, at, _ in starts_of(stream) if at >= 11]))
    halves = [half for half in (body[:cut], body[cut:] + b".") if half]
    framed = b"\x80\x04" + b"".join(b"\x95" + len(half).to_bytes(8, "little") + half for half in halves)
    graph = parse(framed)
    nodes = [node for node in graph.root if type(node) is Text] if isinstance(graph.root, list) else []
    assert nodes == words == pickle.loads(framed)
    # What is fetched from the memo has no string of its own.
    own = [number for number, node in enumerate(nodes) if framed[node.start] == op.SHORT_BINUNICODE]
    wanted = {number: words[number] for number in own}
    patches = []
    for number in sorted(data.draw(st.sets(st.sampled_from(own)))):
        node, wanted[number] = nodes[number], data.draw(st.text("xyz", max_size=60))
        patches.append(Patch(node.start, node.end, string_opcode(wanted[number], 4, op.SHORT_BINUNICODE)))
    made = splice(graph, patches)
    read = pickle.loads(made)
    assert {number: read[number] for number in own} == wanted
    frames = [(at, length) for name, at, length in starts_of(made) if name == "FRAME"]
    ends = [*(at for at, _ in frames[1:]), len(made)]
    assert [at + 9 + length for at, length in frames] == ends
