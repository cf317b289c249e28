"""What is written again is what was read, where a tensor's call is not written as most are."""

from __future__ import annotations

from typing import Any

import pytest
from builders import Op, Tensor, assemble, push, tensor_ops

from ckptfix.pickles import Call, Graph, PersId, Text, parse
from ckptfix.pickles.machine import MAX_MARKS
from ckptfix.pickles.reemit import reemit

PLAIN = tensor_ops(Tensor("0", (2, 3), 6))
HOOKS = 4
"""Opcodes from the end at which the call that makes the hooks begins: GLOBAL, EMPTY_TUPLE, REDUCE, TUPLE, REDUCE."""


def written(*ops: Op) -> tuple[Graph, Any]:
    graph = parse(assemble(("PROTO", 2), *ops, "STOP"))
    return graph, parse(reemit(graph).pickle).root


def shown(node: Any) -> Any:
    """A node in plain values."""
    if isinstance(node, Call):
        parts = (node.func, node.args, node.items, node.state, node.elements)
        return tuple(shown(part) for part in parts)
    if isinstance(node, PersId):
        return "id", shown(node.pid)
    if isinstance(node, (tuple, list)):
        return type(node).__name__, *map(shown, node)
    return str(node) if isinstance(node, Text) else getattr(node, "full", node)


def with_hooks(*ops: Op) -> list[Op]:
    return [*PLAIN[:-5], *ops, "TUPLE", "REDUCE"]


def with_id(*ops: Op) -> list[Op]:
    start, end = PLAIN.index("MARK") + 1, PLAIN.index("BINPERSID")
    return [*PLAIN[:start], *ops, *PLAIN[end:]]


ORDERED: Op = ("GLOBAL", "collections", "OrderedDict")
ODD: dict[str, list[Op]] = {
    "plain": PLAIN,
    "hooks with items": with_hooks(ORDERED, "EMPTY_TUPLE", "REDUCE", *push("a"), *push(1), "SETITEM"),
    "hooks with arguments": with_hooks(ORDERED, *push(1), "TUPLE1", "REDUCE"),
    "hooks of another function": with_hooks(("GLOBAL", "a", "b"), "EMPTY_TUPLE", "REDUCE"),
    "hooks that are None": with_hooks("NONE"),
    "a location that is None": with_id(
        "MARK", *push("storage"), ("GLOBAL", "torch", "FloatStorage"), *push("0"), "NONE", *push(6), "TUPLE"
    ),
    "a key that is a number": with_id(
        "MARK", *push("storage"), ("GLOBAL", "torch", "FloatStorage"), *push(0), *push("cpu"), *push(6), "TUPLE"
    ),
    "an id of six": with_id(
        "MARK", *push("storage"), ("GLOBAL", "torch", "FloatStorage"), *push("0"), *push("cpu"), *push(6), "NONE",
        "TUPLE",
    ),
    "an id with a view": with_id(
        "MARK", *push("storage"), ("GLOBAL", "torch", "FloatStorage"), *push("0"), *push("cpu"), *push(("k", 0, 6)),
        "TUPLE",
    ),
    "an id that is a string": with_id(*push("storage")),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_a_tensor_is_written_as_it_was_read(name: str) -> None:
    graph, root = written(*ODD[name])
    assert shown(root) == shown(graph.root)


@pytest.mark.parametrize("what", ["hooks", "id"])
def test_what_two_tensors_share_they_share_afterwards(what: str) -> None:
    if what == "hooks":
        first = with_hooks(ORDERED, "EMPTY_TUPLE", "REDUCE", ("BINPUT", 9))
        second = with_hooks(("BINGET", 9))
    else:
        at = PLAIN.index("BINPERSID")
        first = [*PLAIN[:at], ("BINPUT", 9), *PLAIN[at:]]
        second = with_id(("BINGET", 9))
    graph, root = written("EMPTY_LIST", "MARK", *first, *second, "APPENDS")
    both: list[Any] = [graph.root, root]
    for one, other in both:
        if what == "hooks":
            assert one.args[5] is other.args[5]
        else:
            assert one.args[0].pid is other.args[0].pid
    assert shown(root) == shown(graph.root)


def test_as_many_marks_as_may_be_open() -> None:
    most = b"(" * (MAX_MARKS + 1) + b"1" * (MAX_MARKS + 1)
    assert parse(b"\x80\x02" + most + b"N.").root is None


def test_a_call_of_an_instance_knows_its_class_and_arguments() -> None:
    root: Any = parse(b"(S'a'\nimodule\nName\n.").root
    assert isinstance(root, Call) and root.args == ("a",) and shown(root.func) == "module.Name"
    listed: Any = parse(b"(lp0\n(I1\nimodule\nName\na.").root
    assert listed[0].args == (1,)
