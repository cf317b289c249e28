"""Storages that no listed tensor views, beside tensors of equal bytes: every verb keeps them, or names them as lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders import Op, Tensor, push, state_dict_ops, tensor_ops, torch_zip
from property.hostile import one_pickle
from property.verbs import COMMANDS, LOADERS, run_commands, run_loaders

from ckptfix.ops.repair.lost_pickle import _ways

DATA = bytes(range(16))
"""Of each storage: what is equal may be tied."""


def tensor(key: str, **more: object) -> Tensor:
    return Tensor(key=key, shape=(4,), numel=4, **more)  # type: ignore[arg-type]


def reference(key: str) -> list[Op]:
    float32: Op = ("GLOBAL", "torch", "FloatStorage")
    return ["MARK", *push("storage"), float32, *push(key), *push("cpu"), *push(4), "TUPLE", "BINPERSID"]


V2: Op = ("GLOBAL", "torch._utils", "_rebuild_tensor_v2")
LIST: Op = "EMPTY_LIST"
FEW = [V2, "MARK", *reference("1"), *push(0), "TUPLE", "REDUCE"]
HOOKS = [
    *[V2, "MARK", *reference("0"), *push(0), *push((4,)), *push((1,)), *push(False)],
    *[LIST, *tensor_ops(tensor("1")), "APPEND", "TUPLE", "REDUCE"],
]
HELD: dict[str, list[Op]] = {
    "few arguments": FEW,
    "in the hooks": HOOKS,
    "in further arguments": [
        *[V2, "MARK", *reference("0"), *push(0), *push((4,)), *push((1,)), *push(False)],
        *[LIST, LIST, *tensor_ops(tensor("1")), "APPEND", "TUPLE", "REDUCE"],
    ],
    "a bare reference": [LIST, *reference("1"), "APPEND"],
    "no call": [*push("text"), *tensor_ops(tensor("1")), "TUPLE1", "REDUCE"],
    "an object": [("GLOBAL", "gone", "Box"), *tensor_ops(tensor("1")), "TUPLE1", "REDUCE"],
    "no reference": ["MARK", *push("storage"), "TUPLE", "BINPERSID"],
    "a short reference": [V2, "MARK", "MARK", *push("storage"), "TUPLE", "BINPERSID", *push(0), "TUPLE", "REDUCE"],
    "a short reference, whole": [
        *[V2, "MARK", "MARK", *push("storage"), "TUPLE", "BINPERSID"],
        *[*push(0), *push((4,)), *push((1,)), *push(False), LIST, "TUPLE", "REDUCE"],
    ],
}


@pytest.mark.slow
@pytest.mark.sampled(4, quick=2, test_all=9)
@pytest.mark.usefixtures("nothing_is_run")
@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("keys", [("module.a", "module.b", "module.c"), ("a", "b", "c")], ids=["dotted", "plain"])
def test_it_is_kept_or_named(held: str, keys: tuple[str, ...], tmp_path: Path) -> None:
    """No verb ends with a raw error, and none says that a bug in ckptfix lost something."""
    ops = state_dict_ops(dict(zip(keys, (HELD[held], tensor("0"), tensor("2")), strict=True)))
    path = tmp_path / "in.pth"
    path.write_bytes(torch_zip(one_pickle(*ops), [DATA] * 3))
    outcomes = [*run_commands(path, tuple(COMMANDS)), *run_loaders(path, tuple(LOADERS))]
    assert not [f"{outcome.name}: {outcome.failure}" for outcome in outcomes if outcome.failure]


def test_a_record_may_have_any_number() -> None:
    """`repair --like` looks at those that are there, not at all below the largest."""
    assert list(_ways([4, 8], {10**15: 4, 10**15 + 1: 8})) == [10**15]
    assert list(_ways([4, 8], {10**15: 8})) == [10**15 - 1]
    assert not list(_ways([4, 8], {0: 8, 1: 8}))
    assert list(_ways([4, 4], {0: 4, 3: 4})) == [0, 2, 3]
