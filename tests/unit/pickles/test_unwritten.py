"""An object that no stream holds: what is known of it is what a stream of it would say."""

from __future__ import annotations

from typing import Any

import pytest

from ckptfix.pickles import Call, Dict, Global, Graph, PersId, Set, parse
from ckptfix.pickles.graph import Node, new_text
from ckptfix.pickles.new_tensors import NewTensorArguments
from ckptfix.pickles.reemit import reemit
from ckptfix.pickles.unwritten import stream_of, unwritten

HOOKS = Global("collections", "OrderedDict", 0)


def tensor(key: str) -> Call:
    kind, func = Global("torch", "FloatStorage", 0), Global("torch._utils", "_rebuild_tensor_v2", 0)
    return Call.folded_at(func, 0, NewTensorArguments(kind, key, "cpu", 6, (0, (2, 3), (3, 1)), False, HOOKS))


def itself() -> Node:
    """A tuple that is in a list in the tuple."""
    inner: list[Any] = []
    inner.append((inner, 1))
    return inner[0]  # type: ignore[no-any-return]


VALUES: dict[str, Node] = {
    "plain": [1, 2.5, None, (True, new_text("a"))],
    "set": Set("set", [1]),
    "bytes": b"\xff",
    "long": 1 << 3000,
    "object": Call(Global("a", "B", 0), (1,), "NEWOBJ_EX", 0, Dict()),
    "persistent": PersId(("storage", Global("torch", "LongStorage", 0), *map(new_text, ("9", "cpu")), 1), 0, -1),
    "itself": itself(),
}


@pytest.mark.parametrize("name", VALUES)
def test_it_says_what_its_stream_would(name: str) -> None:
    root = Dict()
    root.items = [(new_text(str(number)), tensor(str(number))) for number in range(3)]
    root.items.insert(1, (new_text("value"), VALUES[name]))
    stream = reemit(Graph(b"\x80\x02", 0).around(root)).pickle
    graph, wanted = unwritten(root), parse(stream)
    assert graph.rare == wanted.rare and graph.misuses == wanted.misuses
    assert [node.full for node in graph.globals] == [node.full for node in wanted.globals]
    assert graph.storages() == wanted.storages()
    fields = [persid.fields[2:] for persid in wanted.persids]
    assert [persid.fields[2:] for persid in graph.references()] == fields
    assert stream_of(graph)[0] == stream
    assert [persid.fields[2:] for persid in graph.persids] == fields
