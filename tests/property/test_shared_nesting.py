"""Small files whose objects stand in each other twice, 60 deep: one visit of each must be enough."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from builders import Op, assemble, push, state_dict_ops, tensor_ops, torch_zip
from conftest import LONG
from property.hostile import WEIGHT, WEIGHT_DATA

pytestmark = pytest.mark.campaign

TESTS = Path(__file__).parents[1]
DEPTH = 60
SECONDS = 300
"""For commands and loaders on all files, which take 15 seconds on a machine that does nothing else."""


def nested(*around: Op, innermost: list[Op] | None = None, depth: int = DEPTH) -> list[Op]:
    """`around`, `depth` times about itself; ``("BINGET", 0)`` in it is what stands inside."""
    inner = innermost or push("lol")
    return [*inner, ("BINPUT", 0), *[op for _ in range(depth) for op in ("POP", *around, ("BINPUT", 0))]]


X: Op = ("BINGET", 0)
DICT: list[Op] = ["EMPTY_DICT", "MARK", ("BININT1", 1), X, ("BINUNICODE", "1"), X, "SETITEMS"]
ORDERED: list[Op] = [
    ("GLOBAL", "collections", "OrderedDict"),
    "EMPTY_TUPLE",
    "REDUCE",
    *DICT[1:],
]
LIST: list[Op] = ["EMPTY_LIST", "MARK", X, X, "APPENDS"]
TUPLE: list[Op] = [X, X, "TUPLE2"]
CALL: list[Op] = [("GLOBAL", "gone", "Config"), X, X, "TUPLE2", "REDUCE"]
STATE: list[Op] = [("GLOBAL", "gone", "Config"), "EMPTY_TUPLE", "NEWOBJ", *DICT, "BUILD"]
OPTIMIZER: list[Op] = ["EMPTY_DICT", "MARK", *push("state"), X, *push("param_groups"), X, "SETITEMS"]
FROZEN: list[Op] = [("GLOBAL", "builtins", "frozenset"), "EMPTY_LIST", X, "APPEND", "TUPLE1", "REDUCE"]
BOTH: list[Op] = [*FROZEN, ("BINPUT", 0), X, X, "TUPLE2"]
MODULE: list[Op] = [
    ("GLOBAL", "gone", "Net"),
    "EMPTY_TUPLE",
    "NEWOBJ",
    "EMPTY_DICT",
    "MARK",
    *[*push("_parameters"), "EMPTY_DICT", *push("_buffers"), "EMPTY_DICT"],
    *[*push("_modules"), "EMPTY_DICT", "MARK", *push("a"), X, *push("b"), X, "SETITEMS", "SETITEMS", "BUILD"],
]
WEIGHTS = state_dict_ops({"w": WEIGHT, "_extra_state": 1})
SECOND = [*state_dict_ops({})[:-1], ("BININT1", 1), *push(5), *push("1"), *WEIGHTS, "SETITEMS"]
"""Weights whose address is made unique by a number: ``1#2``, which no key is called."""
KINDS: dict[str, list[Op]] = {
    "dict": DICT,
    "ordered": ORDERED,
    "list": LIST,
    "tuple": TUPLE,
    "call": CALL,
    "state": STATE,
    "optimizer": OPTIMIZER,
    "frozenset": BOTH,
    "module": MODULE,
}


def samples() -> Iterator[tuple[str, list[Op]]]:
    for name, around in KINDS.items():
        yield f"{name} in hyper", state_dict_ops({"w": WEIGHT, "_extra_state": 1, "hyper": nested(*around)})
        yield f"{name} of weights", nested(*around, innermost=WEIGHTS)
        yield f"{name} of second weights", nested(*around, innermost=SECOND)
        yield f"{name} as optimizer", state_dict_ops({"w": WEIGHT, "state": nested(*around), "param_groups": []})
        yield f"{name} as extra state", state_dict_ops({"w": WEIGHT, "_extra_state": nested(*around)})
        yield f"{name} on a state dict", [*WEIGHTS, *nested(*around), "BUILD"]
    for name, around in (("tuple", TUPLE), ("frozenset", BOTH), ("call", CALL)):
        key = nested(*around)
        yield f"{name} as key", ["EMPTY_DICT", "MARK", *push("w"), *tensor_ops(WEIGHT), *key, *push(1), "SETITEMS"]
        yield f"{name} in a set", state_dict_ops(
            {"w": WEIGHT, "s": [("GLOBAL", "builtins", "set"), "EMPTY_LIST", *key, "APPEND", "TUPLE1", "REDUCE"]}
        )


def test_every_command_and_loader_comes_back(tmp_path: Path) -> None:
    files = dict(samples())
    for name, ops in files.items():
        data = torch_zip(assemble(("PROTO", 4), *ops, "STOP"), [WEIGHT_DATA])
        assert len(data) < 20_000
        (tmp_path / f"{name}.pth").write_bytes(data)
    roots = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    command = [sys.executable, "-m", "property.run_shared", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": roots}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment)
    except subprocess.TimeoutExpired as error:
        said = (error.stdout or b"").decode().split("\n")
        raise AssertionError(f"never came back: {said[-2]}") from None
    assert done.returncode == 0, (done.stdout[-200:], done.stderr)
    assert done.stdout.endswith("done\n")
    assert done.stdout.count("load_optimizer") == (len(files) if LONG else len(files) // 2)
