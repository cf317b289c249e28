"""Files of every container that ckptfix reads, small, made without torch; and numbered mutants of each."""

from __future__ import annotations

import pickle
import random
import struct
from collections.abc import Mapping

from builders import (
    Op,
    Record,
    Tensor,
    assemble,
    build_zip,
    framed,
    legacy,
    push,
    replace,
    safetensors,
    state_dict_ops,
    torch_records,
    torch_zip,
)
from other_pickles import tar_of
from property.mutants import Way, in_header, in_pickle, in_records, in_stream, raw
from property.small_files import SMALL

FLOATS = struct.pack("<6f", 1, 2, 3, 4, 5, 6)
HALVES = struct.pack("<4e", 1, 2, 3, 4)
BYTES = bytes(range(9))
STORAGES = [FLOATS, HALVES, BYTES]


def tensors(prefix: str = "module.", old: bool = False) -> dict[str, Tensor]:
    """Tensors that share storages, lie transposed, with steps and empty, on three devices."""
    return {
        f"{prefix}layers.0.weight": Tensor("0", (2, 2), 6, location="cuda:0", requires_grad=True, legacy=old),
        f"{prefix}layers.0.bias": Tensor("0", (2,), 6, location="cuda:0", offset=4, legacy=old),
        f"{prefix}layers.1.weight": Tensor("1", (2, 2), 4, "HalfStorage", "cuda:1", stride=(1, 2), legacy=old),
        f"{prefix}tied": Tensor("0", (2, 2), 6, location="cuda:0", legacy=old),
        f"{prefix}every.other": Tensor("2", (5,), 9, "ByteStorage", stride=(2,), legacy=old),
        f"{prefix}empty": Tensor("2", (0, 3), 9, "ByteStorage", legacy=old),
    }


def training(old: bool = False) -> list[Op]:
    """A checkpoint of a training run: a model, an optimizer, numbers, and lists."""
    state = {0: state_dict_ops({"exp_avg": Tensor("0", (2, 2), 6, location="cuda:0", legacy=old), "step": 7})}
    numbers: list[Op] = ["EMPTY_DICT", "MARK"]
    for key, ops in state.items():
        numbers += [*push(key), *ops]
    groups = push([{"lr": 0.5, "params": [0]}])
    return state_dict_ops({
        "model": state_dict_ops(tensors(old=old)),
        "optimizer": state_dict_ops({"state": [*numbers, "SETITEMS"], "param_groups": groups}),
        "epoch": 3, "best": 0.25, "seed": 2**70, "names": push(["a", "\u00e9", "\u4f60"]),
        "when": None, "raw": b"\0\xff",
    })  # fmt: skip


def memoized() -> bytes:
    """Protocol 4 with strings that are fetched from the memo."""
    ops = state_dict_ops(tensors())
    return framed(*[part for op in ops for part in ((op, "MEMOIZE") if op[0] == "BINUNICODE" else (op,))])


def records() -> list[Record]:
    return torch_records(assemble(("PROTO", 2), *training(), "STOP"), STORAGES)


def good_files() -> dict[str, bytes]:
    """By name."""
    stated = [replace(record, flags=0, local_crc=0) for record in records()]
    old = assemble(("PROTO", 2), *training(old=True), "STOP")
    keys = [("0", 6, FLOATS), ("1", 4, HALVES), ("2", 9, BYTES)]
    rows = [
        ("module.a.weight", "F32", (2, 3), FLOATS), ("module.a.bias", "F16", (4,), HALVES),
        ("module.b", "U8", (3, 3), BYTES), ("module.none", "I64", (0,), b""), ("module.c", "BOOL", (), b"\1"),
    ]  # fmt: skip
    return {
        "zip": build_zip(records(), zip64=None),
        "zip64": build_zip([replace(record, zip64=True) for record in records()], zip64=True),
        "plain-zip": build_zip(stated, zip64=False, comment=b"a comment"),
        "protocol-4": torch_zip(memoized(), STORAGES, modern=False),
        "legacy": legacy(old, keys),
        "safetensors": safetensors(rows, metadata={"format": "pt", "epoch": "3"}),
        "pickle": pickle.dumps({"module.a": [1, 2.5, None, True], "b": {"c": (1,), "d": b"x"}, "e": "module.f"}, 2),
        "packed-zip": build_zip([Record("model.pth", SMALL["zip"]), Record("notes.txt", b"words")]),
        "packed-tar": tar_of({"model/weights.pth": SMALL["legacy"]}),
        **{f"small-{name}": data for name, data in SMALL.items()},
    }


WAYS: Mapping[bytes, tuple[Way, ...]] = {
    b"PK": (in_pickle, in_records, in_pickle, in_records, in_pickle, raw),
    b"\x80": (in_stream, in_stream, in_stream, raw),
    b"": (in_header, in_header, raw),
}


def mutant(name: str, data: bytes, number: int) -> bytes:
    """Mutant `number` of a good file: always the same."""
    dice = random.Random(f"{name} {number}")
    ways = next(ways for start, ways in WAYS.items() if data.startswith(start))
    return ways[number % len(ways)](data, dice)
