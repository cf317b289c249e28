"""A tensor that stands at several places, one of them in what repair leaves out: kept at the others, named there."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path

import hidden
import pytest
import torch
from builders import Op, Record, Tensor, assemble, build_zip, push, tensor_ops, torch_records, torch_zip, written

import ckptfix
from ckptfix.checkpoint import ByteRange
from ckptfix.errors import Unsupported
from ckptfix.ops.repair.lost_pickle import _listed
from ckptfix.ops.repair.remains import IntactStorage, Wreck, _note_byteorder

WEIGHT: list[Op] = [*tensor_ops(Tensor("0", (2,), 2)), ("BINPUT", 200)]
AGAIN: list[Op] = [("BINGET", 200)]
OTHER, NOWHERE = tensor_ops(Tensor("1", (2,), 2)), tensor_ops(Tensor("9", (2,), 2))
HOOKS: list[Op] = [("GLOBAL", "collections", "OrderedDict"), "EMPTY_TUPLE", "REDUCE"]


def mapping(*items: tuple[str, Sequence[Op]]) -> list[Op]:
    return ["EMPTY_DICT", "MARK", *(op for key, value in items for op in [*push(key), *value]), "SETITEMS"]


def parameter(inner: Sequence[Op], state: Sequence[Op]) -> list[Op]:
    call = ("GLOBAL", "torch._utils", "_rebuild_parameter_with_state")
    return [call, "MARK", *inner, *push(True), *HOOKS, *state, "TUPLE", "REDUCE"]


def given(state: Sequence[Op]) -> list[Op]:
    """A parameter on which state is set that is its data, so that nobody knows what its values are."""
    call = ("GLOBAL", "torch._utils", "_rebuild_parameter")
    return [call, *OTHER, *push(True), *HOOKS, "TUPLE3", "REDUCE", *state, "BUILD"]


HELD = mapping(("twin", AGAIN))
IN = {
    "the state of a tensor without a storage": (parameter(NOWHERE, HELD), "net/twin"),
    "a dict in that": (parameter(NOWHERE, mapping(("a", HELD))), "net/a/twin"),
    "a list in that": (parameter(NOWHERE, mapping(("a", ["EMPTY_LIST", *AGAIN, "APPEND"]))), "net/a/0"),
    "the state of a parameter in that": (
        parameter(NOWHERE, mapping(("a", parameter(OTHER, HELD)))), "net/a/twin",
    ),
    "what is set on a parameter": (given(HELD), "net/twin"),
    "the arguments of what runs code": (
        [("GLOBAL", "posix", "system"), *AGAIN, "TUPLE1", "REDUCE"], "net/()/0",
    ),
    "the state of what runs code": ([*hidden.SYSTEM, *HELD, "BUILD"], "net/twin"),
    "a list in what runs code": (
        [("GLOBAL", "posix", "system"), "EMPTY_LIST", *AGAIN, "APPEND", "TUPLE1", "REDUCE"], "net/()/0/0",
    ),
}  # fmt: skip


def wreck(path: Path, *items: tuple[str, Sequence[Op]]) -> Path:
    pickle = assemble(("PROTO", 2), *mapping(*items), "STOP")
    return written(path, torch_zip(pickle, [hidden.DATA, bytes(8)]))


@pytest.mark.parametrize("held", IN)
def test_it_is_kept_where_it_stands_and_named_where_it_stood(held: str, tmp_path: Path) -> None:
    ops, name = IN[held]
    path, out = wreck(tmp_path / "in.pth", ("model", mapping(("w", WEIGHT))), ("net", ops)), tmp_path / "out.pth"
    assert name in {entry.name for entry in ckptfix.inspect(path).entries}
    done = ckptfix.repair(path, out)
    assert done.exit_code == 3
    assert "model/w" in done.kept and name not in done.kept
    assert name in {loss.name for loss in done.losses}
    assert done.account is not None and done.account.lost == ()
    assert torch.load(out)["model"]["w"].tolist() == [1, 2]


@pytest.mark.parametrize("first", [True, False])
def test_a_mapping_that_stands_elsewhere_too_keeps_its_tensors(first: bool, tmp_path: Path) -> None:
    shared: list[Op] = [*mapping(("w", WEIGHT)), ("BINPUT", 201)]
    again: list[Op] = [("BINGET", 201)]
    rows = [("net", parameter(NOWHERE, mapping(("a", shared if first else again)))), ("b", again if first else shared)]
    path, out = wreck(tmp_path / "in.pth", *(rows if first else reversed(rows))), tmp_path / "out.pth"
    done = ckptfix.repair(path, out)
    assert {loss.name for loss in done.losses} == {"net"}
    assert done.account is not None and done.account.lost == ()
    assert torch.load(out)["b"]["w"].tolist() == [1, 2]


def test_calls_that_are_nested_beyond_measure_are_refused_where_a_storage_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptfix.formats.torch.damaged.object.MAX_BELOW", 50)
    for deep in (10, 100):
        lists = [*["EMPTY_LIST"] * deep, *["APPEND"] * (deep - 1)]
        unknown: list[Op] = [("GLOBAL", "torch._utils", "_rebuild_tensor_v2"), *lists, "TUPLE1", "REDUCE"]
        path = wreck(tmp_path / "in.pth", ("w", WEIGHT), ("lost", NOWHERE), ("odd", unknown))
        if deep == 10:
            assert ckptfix.repair(path, tmp_path / "out.pth").kept == ("w",)
        else:
            with pytest.raises(Unsupported, match="nested too deeply"):
                ckptfix.repair(path, tmp_path / "out.pth", force=True)


def test_lines_of_a_record_that_end_as_text_does_are_left_as_they_are(tmp_path: Path) -> None:
    """Every line feed of the file has a carriage return before it, and no checksum says that it was put there."""
    ops = [[*push(op[1]), *push(op[2]), "STACK_GLOBAL"] if op[0] == "GLOBAL" else [op] for op in mapping(("w", WEIGHT))]
    pickle = assemble(("PROTO", 4), *(op for several in ops for op in several), "STOP")
    records = [row for row in torch_records(pickle, [hidden.DATA]) if not row.name.endswith("version")]
    # Cut at the end: what repair is for.
    data = build_zip([*records, Record("archive/notes.txt", b"one\r\nthree\r\n")])[:-30]
    assert data.count(b"\n") == data.count(b"\r\n") == 2
    done = ckptfix.repair(written(tmp_path / "in.pth", data), tmp_path / "out.pth")
    assert done.kept == ("w",) and not any(row.id == "text-mode" for row in done.findings)
    with zipfile.ZipFile(tmp_path / "out.pth") as archive:
        assert archive.read("archive/notes.txt") == b"one\r\nthree\r\n"


def test_of_a_text_that_is_no_byte_order_the_beginning_is_shown() -> None:
    lost = Wreck("in.pth")
    _note_byteorder(lost, b"middle" * 10)
    assert f"its byte order is {(b'middle' * 10)[:20]!r};" in lost.notes[0].message


@pytest.mark.parametrize(("count", "more"), [(12, []), (13, ["... 1 more storages"])])
def test_so_many_storages_are_listed(count: int, more: list[str]) -> None:
    lost = Wreck("in.pth", parts={str(key): IntactStorage(ByteRange("in.pth", 0, 8), None) for key in range(count)})
    lines = list(_listed(lost, []))
    assert lines == [*(f"storage {key}: 8 bytes" for key in range(12)), *more]
