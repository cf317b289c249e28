"""Tensors that are written from their numbers, without nodes: the same stream as from nodes."""

from __future__ import annotations

from typing import Any

from ckptfix.pickles import Call, Dict, Global, PersId
from ckptfix.pickles.emit import emit
from ckptfix.pickles.graph import Node
from ckptfix.pickles.new_tensors import NewTensorArguments

HOOKS = Global("collections", "OrderedDict", 0)
SHAPES: list[tuple[int, ...]] = [(8,), (), (2, 3), (70_000,), (1, 2, 3, 4), (0, 3), (3_000_000_000, 2)]


def tensors(fresh: bool) -> Dict:
    """Some hundred of them: names that are the keys of storages, shapes that are one object, a tensor at two places."""
    root = Dict()
    shared, late, steps = (5, 5), (6, 6), (9, 7)
    for number in range(200):
        kind = Global("torch", ("FloatStorage", "LongStorage")[number % 2], 0)
        shape = shared if number % 5 == 4 else (*SHAPES[number % len(SHAPES)],)
        stride = tuple(range(len(shape)))
        if number > 150 and number % 5 < 2:
            # First seen when the memo has more entries than a byte counts.
            shape, stride = late if number % 5 else (*late,), steps
        key, location = str(number), "cpu" if number % 3 else "cuda:0"
        func = Global("torch._utils", "_rebuild_tensor_v2", 0)
        if fresh:
            args: Any = NewTensorArguments(kind, key, location, number, (0, shape, stride), number % 7 == 0, HOOKS)
            call = Call.folded_at(func, 0, args)
        else:
            persid = PersId(("storage", kind, key, location, number), 0, -1)
            nodes: tuple[Node, ...] = (persid, 0, shape, stride, number % 7 == 0, Call(HOOKS, (), "REDUCE", 0))
            call = Call(func, nodes, "REDUCE", 0)
        root.items.append((f"layer.{number}", call))
        if number % 20 == 0:
            root.items += [(str(number + 2), number), (f"tied.{number}", call)]
    return root


def test_it_is_the_same_stream() -> None:
    assert emit(tensors(fresh=True)) == emit(tensors(fresh=False))


def test_whoever_looks_finds_nodes() -> None:
    root = tensors(fresh=True)
    for _, value in root.items:
        if type(value) is Call:
            assert type(value.arguments[0]) is PersId and value.folded is None
    assert emit(root) == emit(tensors(fresh=False))
