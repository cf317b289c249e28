"""A file or folder of every container that ckptfix reads, small; and numbered mutants of each.

None is made by torch when it is asked for, so that they are the same with every version. ``dcp/`` was written by torch
2.13, as ``dcp_ranks.small`` is.
"""

from __future__ import annotations

import json
import pickle
import random
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
from property import impossible
from property.folder_mutants import in_json
from property.hostile import WEIGHT_DATA, one_pickle
from property.mutants import Way, in_header, in_pickle, in_records, in_stream, raw
from property.small_files import SMALL

FLOATS = struct.pack("<6f", 1, 2, 3, 4, 5, 6)
HALVES = struct.pack("<4e", 1, 2, 3, 4)
BYTES = bytes(range(9))
Content = bytes | Mapping[str, bytes]
"""Of a file, or of each file of a folder."""

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


VIEW = Tensor("0", (2,), 6, location="cuda:0", view=("0", 2, 4), legacy=True)
"""Of a part of a storage, as torch before 0.4 wrote it."""


def objects() -> list[Op]:
    """A call of everything that torch pickles a tensor with, and of other classes that it allows."""
    calls: dict[str, list[Op]] = {}
    for name, arguments in impossible.GOOD.items():
        if name != "builtins.getattr":
            calls[f"module.{name}"] = [*impossible.called(name, impossible.tuple_of(*arguments))]
    return state_dict_ops(calls)


def odd_header() -> dict[str, Any]:
    """Tensors that lie in another order than they are named, of rarer dtypes, with a name that is escaped."""
    return {
        "module.z": {"dtype": "F8_E4M3", "shape": [3, 3], "data_offsets": [24, 33]},
        "module.\u00e9": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [33, 41]},
        "__metadata__": {"format": "pt", "module.z": "module.a", "note": "\u4f60\n"},
        "module.a": {"shape": [6], "data_offsets": [0, 24], "dtype": "F32"},
        "module.none": {"dtype": "C64", "shape": [0], "data_offsets": [41, 41]},
    }


def shards(kind: str) -> Content:
    """Two shards, their index, and a configuration beside them."""
    names = [f"model-{number:05d}-of-00002.{kind}" for number in (1, 2)]
    if kind == "safetensors":
        parts = [
            safetensors([("module.a.weight", "F32", (2, 3), FLOATS)], metadata={"format": "pt"}),
            safetensors([("module.a.bias", "F16", (4,), HALVES), ("module.b", "U8", (9,), BYTES)]),
        ]
        holds = [["module.a.weight"], ["module.a.bias", "module.b"]]
    else:
        both = tensors()
        holds = [[*both][:2], [*both][2:]]
        parts = [
            torch_zip(assemble(("PROTO", 2), *state_dict_ops({key: both[key] for key in keys}), "STOP"), STORAGES)
            for keys in holds
        ]
    index = {
        "metadata": {"total_size": 41},
        "weight_map": {key: name for name, keys in zip(names, holds, strict=True) for key in keys},
    }
    files = dict(zip(names, parts, strict=True)) | {f"model.{kind}.index.json": json.dumps(index).encode()}
    return files | {"config.json": b'{"hidden_size": 2}'}


def good_files() -> dict[str, Content]:
    """By name."""
    dcp = {file.name: file.read_bytes() for file in sorted((Path(__file__).parent / "dcp").iterdir())}
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
        "objects": torch_zip(one_pickle(*objects()), [WEIGHT_DATA, bytes(16)]),
        "odd-legacy": legacy(
            assemble(("PROTO", 2), *state_dict_ops({"module.a": VIEW, "module.b": replace(VIEW, offset=1)}), "STOP"),
            [("0", 6, FLOATS)],
            sys_info={"protocol_version": 1001, "little_endian": True, "more": [1, "x", None, 2.5]},
        ),
        "odd-safetensors": safetensors(
            header=json.dumps(odd_header(), indent=1).encode() + b"\n ", tail=FLOATS + BYTES + HALVES
        ),
        "shards": shards("safetensors"), "bin-shards": shards("bin"), "dcp": dcp,
    }


WAYS: Mapping[bytes, tuple[Way, ...]] = {
    b"PK": (in_pickle, in_records, in_pickle, in_records, in_pickle, raw),
    b"\x80": (in_stream, in_stream, in_stream, raw),
    b"{": (in_json, in_json, in_json, raw),
    b"": (in_header, in_header, raw),
}
"""How a file that begins so is changed."""


def mutant(name: str, content: Content, number: int) -> Content:
    """Mutant `number` of a good file or folder, always the same: of a folder one file is changed, missing or another's.
    """
    dice = random.Random(f"{name} {number}")
    if isinstance(content, bytes):
        return _changed(content, number, dice)
    names = sorted(content)
    name = names[number % len(names)]
    other: dict[str, bytes] = {name: content[dice.choice(names)]} if dice.random() < 0.1 else {}
    left = {name: data for name, data in content.items() if name != names[number % len(names)] or dice.random() > 0.08}
    if name in left:
        left[name] = _changed(content[name], number // len(names), dice)
    return left | other


def _changed(data: bytes, number: int, dice: random.Random) -> bytes:
    ways = next(ways for start, ways in WAYS.items() if data.startswith(start))
    return ways[number % len(ways)](data, dice)
