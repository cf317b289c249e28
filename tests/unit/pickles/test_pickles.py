"""The pickle machine, splicing and emitting, against CPython's own pickle and pickletools."""

from __future__ import annotations

import collections
import io
import pickle
import pickletools
import time
from typing import Any

import pytest
from builders import Op, assemble, push
from hypothesis import given
from hypothesis import strategies as st

from ckptfix.errors import BadPickle, TruncatedPickle, Unsupported
from ckptfix.pickles import Call, Dict, Global, Graph, Patch, PersId, Set, Text, opcodes, parse, splice
from ckptfix.pickles.emit import emit
from ckptfix.pickles.graph import children, is_versions, label, pairs
from ckptfix.pickles.patch import items_pushed, string_patches

KEYS = st.one_of(st.text(max_size=20), st.integers(), st.booleans(), st.none(), st.binary(max_size=8))
BIG = st.integers(-(1 << 200), 1 << 200)
LEAVES = st.one_of(KEYS, st.floats(allow_nan=False), BIG, st.text(min_size=250, max_size=300))
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=5).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.frozensets(KEYS, max_size=3),
        st.sets(st.integers(), max_size=3),
    ),
    max_leaves=20,
)


def real(node: Any) -> Any:
    """The value that a node stands for, built here by hand."""
    kind = type(node)
    if kind is Text:
        return str(node)
    if kind is Dict:
        return {real(key): real(value) for key, value in node.items}
    if kind is Set:
        return (set if node.kind == "set" else frozenset)(map(real, node.elements))
    if kind in (list, tuple):
        return kind(map(real, node))
    if kind is Call:
        if node.is_call_of("builtins", "set") or node.is_call_of("__builtin__", "set"):
            return set(real(node.args[0]))
        if node.func.name == "frozenset":
            return frozenset(real(node.args[0]))
        if node.func.full == "_codecs.encode":
            return node.args[0].encode(*node.args[1:])
        if node.func.name == "bytes":
            return b""
    return node


@pytest.mark.slow
@pytest.mark.parametrize("protocol", range(6))
@given(value=VALUES)
def test_reads_what_pickle_wrote(protocol: int, value: Any) -> None:
    data = pickle.dumps(value, protocol)
    graph = parse(data)
    assert real(graph.root) == value
    assert graph.end == len(data)
    assert graph.protocol == (protocol if protocol >= 2 else 0)


@given(value=VALUES, protocol=st.integers(0, 5))
def test_walk_stops_where_pickletools_does(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    expected = [(ord(info.code), at) for info, _, at in pickletools.genops(data)]
    assert [(op.code, op.start) for op in opcodes.walk(data, 0, len(data))] == expected


def test_pop_mark_takes_what_is_above_the_mark() -> None:
    data = assemble(("BININT1", 1), "MARK", ("BININT1", 2), ("BININT1", 3), "POP_MARK", "STOP")
    assert parse(data).root == pickle.loads(data) == 1


def test_a_short_tuple_is_named_by_its_parts() -> None:
    assert label(tuple(range(8))) == "(0, 1, 2, 3, 4, 5, 6, 7)"
    assert label(tuple(range(9))) == label(((1,),)) == "<tuple>"


def test_every_opcode_of_pickletools_is_known() -> None:
    assert {ord(info.code): info.name for info in pickletools.opcodes} == opcodes.NAMES


@given(value=VALUES, protocol=st.integers(0, 5), cut=st.integers(0, 10_000))
def test_a_cut_pickle_is_truncated(value: Any, protocol: int, cut: int) -> None:
    data = pickle.dumps(value, protocol)
    with pytest.raises(TruncatedPickle) as caught:
        parse(data[: cut % len(data)], path="x.pth", where="data.pkl")
    assert caught.value.path == "x.pth"
    assert caught.value.offset is not None


def test_no_global_is_resolved() -> None:
    graph = parse(b"cos\nsystem\n(S'echo hi'\ntR.")
    assert isinstance(graph.root, Call)
    assert graph.root.is_call_of("os", "system")
    assert graph.root.args == ("echo hi",)
    assert [node.full for node in graph.globals] == ["os.system"]


@pytest.mark.sampled(1_000)
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x80\x06N.", "protocol 6"),
        (b"\xff.", "unknown opcode 0xff"),
        (b".", "takes more values than the stack"),
        (b"h\x05.", "memo entry"),
        (b"X\xff\xff\xff\x7fab.", "2147483647 bytes"),
        (b"\x8b\xff\xff\xff\xffab.", "-1 bytes"),
        (b"\x82\x01.", "extension code"),
        (b"\x97.", "out-of-band"),
        (b"(NNNd.", "DICT has a key"),
        (b"](NNu.", "items are set on a list"),
        (b"}]b.", "state is set on a dict"),
        (b"K\x01Na.", "values are appended"),
        (b"I9x\n.", "unusable argument"),
        (b"(X\0\0\x01\0" + b"x" * 65536 + b"q\0" + b"h\0" * 1500 + b"t.", "fetched so often"),
        (b"(X\0\0\x01\0" + b"x" * 65536 + b"p1\n" + b"g1\n" * 1500 + b"t.", "fetched so often"),
        (b"L" + b"9" * 5000 + b"L\n.", "unusable argument"),
        (b"\x80\x04\x95\x03\0\0\0\0\0\0\0X\x01\0\0\0a.", "FRAME ends inside"),
    ],
)
def test_what_no_unpickler_takes_is_refused_with_its_offset(data: bytes, message: str) -> None:
    with pytest.raises(BadPickle, match=message) as caught:
        parse(data, where="data.pkl")
    assert caught.value.offset is not None


def test_a_stream_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptfix.pickles.machine.MAX_BYTES", 10)
    with pytest.raises(BadPickle, match="exceeds the limit of 10"):
        parse(pickle.dumps("a" * 20))


@pytest.mark.slow
def test_depth_does_not_recurse() -> None:
    graph = parse(b"]" * 1_000_000 + b"a" * 999_999 + b".")
    assert isinstance(graph.root, list) and len(graph.root) == 1
    with pytest.raises(BadPickle):
        parse(b"(" * 1_000_000 + b".")


def test_cycle() -> None:
    value: list[Any] = []
    value.append(value)
    root = parse(pickle.dumps(value)).root
    assert isinstance(root, list) and root[0] is root


def test_a_repeated_key_keeps_its_place_and_takes_the_last_value() -> None:
    graph = parse(b"}(X\x01\0\0\0aK\x01X\x01\0\0\0bK\x02X\x01\0\0\0aK\x03u.")
    assert pairs(graph.root) == [("a", 3), ("b", 2)]


class _Persistent(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return ("storage", str, obj.key, obj.location, 3) if isinstance(obj, _Storage) else None


class _Storage:
    def __init__(self, key: str, location: str) -> None:
        self.key = key
        self.location = location


def test_persistent_ids_know_their_tuple() -> None:
    out = io.BytesIO()
    _Persistent(out, 2).dump([_Storage("0", "cpu"), _Storage("1", "cpu")])
    graph = parse(out.getvalue())
    assert [persid.fields[2] for persid in graph.persids] == ["0", "1"]
    for persid in graph.persids:
        assert graph.data[persid.tuple_end] == opcodes.TUPLE
        assert graph.data[persid.position] == opcodes.BINPERSID


def texts(graph: Graph) -> list[Text]:
    """Every use of a string in a flat list or dict."""
    root: Any = graph.root
    found = [part for pair in root.items for part in pair] if isinstance(root, Dict) else list(root)
    return [value for value in found if type(value) is Text]


@pytest.mark.slow
@pytest.mark.parametrize("protocol", [1, 2, 3, 4, 5])
@given(
    words=st.lists(st.sampled_from(["cpu", "cuda:0", "module.a", "", "ß" * 130, "x" * 300]), min_size=1, max_size=12),
    data=st.data(),
)
def test_each_use_of_a_string_changes_alone(protocol: int, words: list[str], data: st.DataObject) -> None:
    # pickle shares equal objects through the memo: the same str object many times.
    pool: dict[str, str] = {}
    stream = pickle.dumps([pool.setdefault(word, word) for word in words], protocol)
    graph = parse(stream)
    uses = texts(graph)
    chosen = data.draw(st.sets(st.integers(0, len(uses) - 1)))
    new = data.draw(st.sampled_from(["cpu", "mps", "", "y" * 400, "fc.weight"]))
    edited = splice(graph, string_patches(graph, [(uses[index], new) for index in chosen]))
    expected = [new if index in chosen else word for index, word in enumerate(words)]
    assert pickle.loads(edited) == expected
    pickletools.dis(edited, out=io.StringIO())


@given(value=VALUES, protocol=st.integers(0, 5))
def test_no_edit_gives_the_same_bytes(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    graph = parse(b"junk" + data + b"tail", start=4)
    assert splice(graph, []) == data


def test_one_shared_string_and_a_value_that_must_not_change() -> None:
    location = "cuda:0"
    stream = pickle.dumps({"note": location, **{f"k{index}": location for index in range(1000)}}, 2)
    graph = parse(stream)
    uses = texts(graph)[1::2]
    edited = splice(graph, string_patches(graph, [(use, "cpu") for use in uses[1:]]))
    assert pickle.loads(edited) == {"note": "cuda:0", **{f"k{index}": "cpu" for index in range(1000)}}


def test_frames_are_resized() -> None:
    stream = pickle.dumps(["a" * 40_000, "b" * 40_000, "c"], 4)
    graph = parse(stream)
    assert len(graph.frames) > 1
    first, _, third = texts(graph)
    edited = splice(graph, string_patches(graph, [(third, "much longer"), (first, "short")]))
    assert pickle.loads(edited) == ["short", "b" * 40_000, "much longer"]
    assert parse(edited).frames


def test_overlapping_edits_are_refused() -> None:
    graph = parse(pickle.dumps("abc", 2))
    with pytest.raises(Unsupported, match="overlap"):
        splice(graph, [Patch(2, 6, b""), Patch(4, 8, b"x")])


def test_python_2_strings_stay_python_2_strings() -> None:
    stream = assemble("EMPTY_LIST", ("SHORT_BINSTRING", b"module.fc"), "APPEND", "STOP")
    graph = parse(stream)
    edited = splice(graph, string_patches(graph, [(texts(graph)[0], "fc")]))
    assert b"U\x02fc" in edited
    assert pickle.loads(edited, encoding="bytes") == [b"fc"]


def test_items_pushed() -> None:
    inner = (("BININT1", 3), ("BINPUT", 0), ("BINUNICODE", "a"), "TUPLE1", ("BININT1", 4))
    stream = assemble("MARK", *inner, "TUPLE")
    (whole,) = items_pushed(stream, 0, len(stream))
    assert (whole.start, whole.end, stream[whole.last]) == (0, len(stream), opcodes.TUPLE)
    parts = items_pushed(stream, 1, whole.last)
    assert [stream[part.start : part.end][:1] for part in parts] == [b"K", b"X", b"K"]
    with pytest.raises(Unsupported):
        items_pushed(b"}NNs", 0, 4)


def test_emit_is_what_pickle_writes() -> None:
    ordered = Call(Global("collections", "OrderedDict", 0), (), "REDUCE", 0)
    ordered.items = [(f"k{index}", (index, -index, 1.5, None, True, [index])) for index in range(1200)]
    expected = pickle.dumps(collections.OrderedDict(ordered.items), 2)
    assert emit(ordered) == expected


@given(VALUES.filter(lambda value: "set" not in repr(type(value))))
def test_emit_and_parse(value: Any) -> None:
    def node(value: Any) -> Any:
        if isinstance(value, dict):
            made = Dict()
            made.items = [(node(key), node(item)) for key, item in value.items()]
            return made
        if isinstance(value, (list, tuple)):
            return type(value)(map(node, value))
        return value

    try:
        data = emit(node(value))
    except Unsupported:
        return
    assert pickle.loads(data) == value
    assert real(parse(data).root) == value


def test_emit_persistent_id() -> None:
    data = emit(PersId(("storage", Global("torch", "FloatStorage", 0), "0", "cpu", 3), 0, -1))
    assert parse(data).persids[0].fields[2:] == ("0", "cpu", 3)


@pytest.mark.parametrize("pid", ["0", "\ud800", "\xe9", "two\nlines"])
def test_emit_persistent_id_of_text(pid: str) -> None:
    """The opcode of a line takes ASCII alone."""
    found = parse(emit(PersId(pid, 0, -1))).root
    assert isinstance(found, PersId) and str(found.pid) == pid


def test_numbers_that_are_one_key() -> None:
    value = assemble(
        "EMPTY_DICT", "MARK", ("BININT1", 1), "NONE", "NEWTRUE", ("BININT1", 5), ("BINFLOAT", 1.0), ("BININT1", 6),
        ("BINFLOAT", 0.5), ("BININT1", 7), "SETITEMS", "STOP",
    )  # fmt: skip
    assert pickle.loads(value) == {1: 6, 0.5: 7}
    assert pairs(parse(value).root) == [(1, 6), (0.5, 7)]


def test_keys_whose_hashes_collide_take_no_longer() -> None:
    """Ints that are equal modulo 2**61 - 1 have one hash: a dict of them takes quadratic time."""
    node = Dict()
    node.items = [(index * ((1 << 61) - 1), None) for index in range(50_000)]
    assert len(pairs(node) or ()) == 50_000


def test_keys_inside_keys_do_not_recurse() -> None:
    root = parse(b"\x80\x02}" + b"}" * 4000 + b"K\x01s" * 4000 + b".").root
    assert [name for name, _ in children(root)] == ["()key", "<Dict>"]


def test_a_key_that_holds_one_tuple_many_times_takes_no_longer() -> None:
    rows = [b"K\x01\x85q\x01"]
    for level in range(1, 5):
        rows.append(b"0(" + bytes((0x68, level)) * 1000 + b"t" + bytes((0x71, level + 1)))
    root = parse(b"\x80\x02}" + b"".join(rows) + b"K\x02s.").root
    before = time.process_time()
    assert [child for _, child in children(root)] == [2]
    assert time.process_time() - before < 1


def test_an_edit_of_one_use_of_a_doubled_string_leaves_the_other() -> None:
    """DUP pushes a string once more: a key and a device that are one object in the stream are two uses."""
    graph = parse(assemble(*push("5"), "DUP", "TUPLE2", "STOP"))
    assert isinstance(graph.root, tuple)
    first, second = graph.root
    assert isinstance(first, Text) and isinstance(second, Text)
    for use, wanted in ((first, ("cpu", "5")), (second, ("5", "cpu"))):
        assert pickle.loads(splice(graph, string_patches(graph, [(use, "cpu")]))) == wanted


def test_nodes_in_messages_are_the_same_in_each_run() -> None:
    """A message that shows a node has no address of memory: outputs of two runs can be compared."""
    nodes: list[object] = [Text("a"), Global("m", "n", 0), Call(None, (), "REDUCE", 3), PersId("x", 4, -1), Dict()]
    assert " at 0x" not in repr([*nodes, Set("set", []), Set("frozenset", [])])


@pytest.mark.parametrize(("module", "name"), [("a", "b"), ("a", ""), ("", "b"), ("", "")])
def test_a_class_of_inst_is_read_by_its_two_lines(module: str, name: str) -> None:
    graph = parse(assemble("MARK", *push(1), ("INST", module, name), "STOP"))
    assert type(graph.root) is Call and type(graph.root.func) is Global
    assert (graph.root.func.module, graph.root.func.name, graph.root.arguments) == (module, name, (1,))


@pytest.mark.parametrize(
    ("ops", "plain"),
    [
        ([], True),
        ([("GLOBAL", "collections", "OrderedDict"), "EMPTY_TUPLE", "REDUCE"], True),
        ([("GLOBAL", "collections", "OrderedDict"), "EMPTY_TUPLE", "REDUCE", "EMPTY_DICT", "MARK",
          *push("a"), *push(1), "SETITEMS", "BUILD"], False),
        ([("GLOBAL", "a", "B"), "EMPTY_TUPLE", "REDUCE"], False),
        ([("GLOBAL", "a", "B"), "EMPTY_TUPLE", "REDUCE", "EMPTY_DICT", "BUILD"], False),
        (["EMPTY_LIST", ("GLOBAL", "a", "B"), "EMPTY_TUPLE", "REDUCE", "APPEND"], False),
    ],
)  # fmt: skip
def test_versions_are_plain_values(ops: list[Op], plain: bool) -> None:
    value = ops or push({"version": 1})
    graph = parse(assemble("EMPTY_DICT", *push("layer"), *value, "SETITEM", "STOP"))
    assert is_versions(graph.root) is plain
