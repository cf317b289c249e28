"""Items left out of torch checkpoints: the rest stays as it was, whatever the memo shared."""

from __future__ import annotations

import collections
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import Op, Tensor, assemble, push, state_dict_ops, tensor_ops, torch_zip, written
from compare import assert_same
from kinds import CONTAINERS, KINDS, Kind, cases, tensor

from ckptfix import formats, pickles
from ckptfix.checkpoint import Drop
from ckptfix.errors import NoSuchTensor, Unsupported
from ckptfix.formats.torch import rewrite
from ckptfix.formats.torch.common import pickled_object
from ckptfix.io import write as io_write
from ckptfix.pickles.reemit import reemit


def saved(tmp_path: Path, value: Any, container: str = "zip", protocol: int = 2) -> Path:
    path = tmp_path / "in.pth"
    torch.save(value, path, pickle_protocol=protocol, _use_new_zipfile_serialization=container == "zip")
    return path


def dropped(path: Path, *drops: Drop, gone: tuple[int, ...] = ()) -> Path:
    dest = path.with_name("out.pth")
    checkpoint = formats.open_checkpoint(path)
    rewritten = rewrite.without(pickled_object(checkpoint).found, drops, gone=gone)
    io_write.write_plan(rewrite.plan_rewrite(checkpoint, rewritten, str(dest)), overwrite=True)
    return dest


def reread(data: bytes, **edits: Any) -> Any:
    return pickle.loads(reemit(pickles.parse(data), **edits).pickle)


@pytest.mark.slow
@pytest.mark.sampled(42)
@pytest.mark.parametrize(("kind", "container"), cases())
def test_every_kind_of_object_is_written_again_as_it_was(tmp_path: Path, kind: Kind, container: str) -> None:
    path = kind.save(tmp_path / "in.pth", container)
    out = dropped(path)
    if kind.name == "gone-classes":
        with pytest.raises((AttributeError, ModuleNotFoundError)):
            torch.load(out, weights_only=False)
        return
    on: dict[str, Any] = {"map_location": "cpu"} if kind.tag else {}
    assert_same(torch.load(path, weights_only=False, **on), torch.load(out, weights_only=False, **on))
    if kind.safe and kind.protocol == 2:
        torch.load(out, weights_only=True, **on)
    if kind.tag:
        assert formats.open_checkpoint(out).devices == formats.open_checkpoint(path).devices


@pytest.mark.slow
@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_key_goes_and_everything_else_stays(tmp_path: Path, container: str, protocol: int) -> None:
    value = KINDS["nested"].make()
    path = saved(tmp_path, value, container, protocol)
    out = dropped(path, Drop("", ("optimizer_state_dict",)), Drop("model_state_dict", ("module.fc.bias",)))
    del value["optimizer_state_dict"], value["model_state_dict"]["module.fc.bias"]
    assert_same(value, torch.load(out, weights_only=False))
    names = [entry.name for entry in formats.open_checkpoint(out).entries]
    assert names and not any(name.startswith("optimizer") for name in names)
    assert out.stat().st_size < path.stat().st_size


@pytest.mark.parametrize("container", CONTAINERS)
def test_what_the_dropped_part_shares_is_kept_for_the_others(tmp_path: Path, container: str) -> None:
    shared: dict[str, Any] = {"name of a list": ["a", 1]}
    weight = tensor(3, 2)
    value = {
        "first": {"w": weight, "shared": shared, "long enough to be memoised": 1},
        "second": {"w": weight, "shared": shared, "part": weight[1:], "long enough to be memoised": 2},
        "third": shared,
    }
    out = torch.load(dropped(saved(tmp_path, value, container), Drop("", ("first",))))
    assert list(out) == ["second", "third"]
    assert out["second"]["shared"] is out["third"] and out["third"] == shared
    assert torch.equal(out["second"]["w"], weight)
    assert out["second"]["w"].data_ptr() + 8 == out["second"]["part"].data_ptr()


@pytest.mark.parametrize("container", CONTAINERS)
def test_the_storage_goes_with_its_last_tensor_only(tmp_path: Path, container: str) -> None:
    value: dict[str, Any] = {"big": torch.zeros(5000), "a": tensor(4)}
    value["view"] = value["big"][:2]
    path = saved(tmp_path, value, container)
    assert dropped(path, Drop("", ("big",))).stat().st_size > 20_000
    assert dropped(path, Drop("", ("big", "view"))).stat().st_size < 5_000


def test_gone_tensors_leave_mappings_and_are_none_in_sequences(tmp_path: Path) -> None:
    lost = tensor(2)
    value = {"w": lost, "list": [1, lost, 2], "pair": (lost, 3), "kept": tensor(3), "more": {"again": lost, "x": 0}}
    path = saved(tmp_path, value)
    checkpoint = formats.open_checkpoint(path)
    nodes = [node for _, key, node in pickled_object(checkpoint).found.tensors if key != "kept"]
    rewritten = rewrite.without(pickled_object(checkpoint).found, gone={id(node) for node in nodes})
    io_write.write_plan(rewrite.plan_rewrite(checkpoint, rewritten, str(tmp_path / "out.pth")))
    out = torch.load(tmp_path / "out.pth")
    assert list(out) == ["list", "pair", "kept", "more"]
    assert (out["list"], out["pair"], out["more"]) == ([1, None, 2], (None, 3), {"x": 0})


def test_keys_that_hold_slashes_or_are_numbers_are_found(tmp_path: Path) -> None:
    value = {"a/b": {"c": 1, "d": 2}, "a": {"b": {"c": 3}}, "state": {0: {"step": 4}, 1: {"step": 5}}}
    path = saved(tmp_path, value)
    out = torch.load(dropped(path, Drop("a/b", ("d",)), Drop("state", ("1",))))
    assert out == {"a/b": {"c": 1}, "a": {"b": {"c": 3}}, "state": {0: {"step": 4}}}


def test_a_name_that_is_not_there_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, {"a": 1, "b": [2]})
    with pytest.raises(NoSuchTensor, match="no/where"):
        dropped(path, Drop("no/where", ("a",)))
    with pytest.raises(NoSuchTensor, match="no such key"):
        dropped(path, Drop("", ("c",)))
    with pytest.raises(NoSuchTensor, match="not a mapping"):
        dropped(path, Drop("b", ("0",)))


def test_a_key_that_stands_twice_goes_twice(tmp_path: Path) -> None:
    entries: list[Op] = ["EMPTY_DICT", "MARK"]
    for key in ("w", "x", "w"):
        entries += [*push(key), *tensor_ops(Tensor(key, (1,), 1))]
    data = assemble(("PROTO", 2), *entries, "SETITEMS", "STOP")
    path = written(tmp_path / "in.pth", torch_zip(data, {"w": b"\0" * 4, "x": b"\0\0\x80?"}))
    assert torch.load(dropped(path, Drop("", ("w",)))) == {"x": torch.tensor([1.0])}


def _cycle() -> Any:
    value: list[Any] = [1]
    value.append((value, {"back": value}))
    return value


class Node:
    """An object that refers to itself by its arguments."""

    def __init__(self, around: list[Any]) -> None:
        self.around = around

    def __reduce__(self) -> tuple[Any, ...]:
        return (Node, (self.around,))


def _object_cycle() -> Any:
    around: list[Any] = []
    around.append(Node(around))
    return around[0]


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("make", [_cycle, _object_cycle])
def test_cycles_stay_cycles(make: Callable[[], Any], protocol: int) -> None:
    data = pickle.dumps(make(), protocol)
    again = reread(data)
    if isinstance(again, list):
        assert again[0] == 1 and again[1][0] is again and again[1][1]["back"] is again
    else:
        assert again.around[0] is again


VALUES: dict[str, Any] = {
    "numbers": [0, -1, 255, 256, 65536, -(2**31), 2**31, -(2**31) - 1, 2**200, -(2**3000), True, False, None, 1.5],
    "texts": ["", "a" * 300, "\ud800", "é\n\\", "a" * 300],
    "bytes": [b"", b"a" * 300, b"\xff\n", bytearray(b"xyz")],
    "sets": [{1, 2}, frozenset({3, "x"}), set(), frozenset()],
    "objects": [collections.Counter("abca"), collections.deque([1, 2], 3), range(3), complex(1, 2), Node([])],
    "large": {index: [index] for index in range(2500)},
}


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("name", VALUES)
def test_plain_values_of_all_protocols(name: str, protocol: int) -> None:
    value = VALUES[name]
    again = reread(pickle.dumps(value, protocol))
    assert repr(again)[:40] == repr(value)[:40] if name == "objects" else again == value
    assert type(again) is type(value)


def test_strings_of_python_2_stay_byte_strings() -> None:
    data = assemble(("PROTO", 2), "MARK", ("SHORT_BINSTRING", b"caf\xe9"), ("BINSTRING", b"plain"), "LIST", "STOP")
    again = reemit(pickles.parse(data)).pickle
    assert pickle.loads(again, encoding="latin1") == ["caf\xe9", "plain"]
    assert b"U\x05plain" in again


def test_an_ordered_dict_of_python_2_loses_its_pair(tmp_path: Path) -> None:
    pair: Callable[[str, int], list[Op]] = lambda key, value: push([key, value])  # noqa: E731
    rows: list[Op] = ["EMPTY_LIST", "MARK", *pair("a", 1), *pair("b", 2), "APPENDS", "TUPLE1"]
    data = assemble(("PROTO", 2), ("GLOBAL", "collections", "OrderedDict"), *rows, "REDUCE", "STOP")
    path = written(tmp_path / "in.pth", torch_zip(data))
    assert torch.load(dropped(path, Drop("", ("a",)))) == collections.OrderedDict(b=2)


@pytest.mark.slow
def test_deep_nesting_is_no_matter_of_the_stack() -> None:
    data = b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b"."
    assert reemit(pickles.parse(data)).pickle.count(b"]") >= 50_000


@pytest.mark.parametrize(
    "data",
    [
        assemble(("PROTO", 4), ("BININT1", 1), ("BININT1", 2), "STACK_GLOBAL", "STOP"),
        assemble(("PROTO", 4), *push("os\nsystem"), *push("x"), "STACK_GLOBAL", "STOP"),
        assemble(
            ("PROTO", 2), ("GLOBAL", "m", "C"), "EMPTY_TUPLE", "NEWOBJ", "EMPTY_DICT", "BUILD", "EMPTY_DICT", "BUILD",
            "STOP",
        ),
    ],
    ids=["computed", "line break", "two states"],
)  # fmt: skip
def test_what_could_come_out_as_something_else_is_refused(data: bytes) -> None:
    with pytest.raises(Unsupported):
        reemit(pickles.parse(data))


class Slotted:
    """Its state is a pair, as two states would be."""

    __slots__ = ("a", "b")

    def __init__(self) -> None:
        self.a, self.b = 1, "x"


def test_the_state_of_slots_is_no_second_state() -> None:
    again = reread(pickle.dumps([Slotted(), Slotted()], 2))
    assert [(one.a, one.b) for one in again] == [(1, "x")] * 2


def test_a_whole_module_without_one_parameter(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU())
    path = saved(tmp_path, model)
    out = torch.load(dropped(path, Drop("_modules/0/_parameters", ("bias",))), weights_only=False)
    assert list(out.state_dict()) == ["0.weight"]
    assert torch.equal(out.state_dict()["0.weight"], model.state_dict()["0.weight"])


def test_the_state_dict_alone_when_its_tensors_come_from_the_pickle(tmp_path: Path) -> None:
    ops = state_dict_ops({"a": Tensor("0", (2,), 2), "n": 5})
    path = written(tmp_path / "in.pth", torch_zip(assemble(("PROTO", 2), *ops, "STOP"), [b"\0" * 8]))
    out = torch.load(io.BytesIO(dropped(path, Drop("", ("n",))).read_bytes()))
    assert torch.equal(out["a"], torch.zeros(2)) and list(out) == ["a"]
