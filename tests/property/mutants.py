"""Mutants of good files by structure: opcodes of the pickle, zip records and rows, JSON of a header, and plain bytes.

``mutant(n)`` is the n-th, always the same: an edit of the pickle gets a container whose checksums and sizes agree, so
that it is read and not refused at the door.
"""

from __future__ import annotations

import gzip
import json
import pickle
import pickletools
import random
import struct
import zipfile
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from builders import Op, Record, assemble, build_zip, push, replace, state_dict_ops, torch_zip
from other_pickles import joblib_dump, tar_of, torch_tar
from property import impossible
from property.hostile import WEIGHT_DATA, one_pickle
from property.small_files import SMALL

Way = Callable[[bytes, random.Random], bytes]
FIXTURES = Path(__file__).parents[2] / "fixtures"
INTS = (0, 1, 2, 3, 7, 255, 256, 2**31 - 1, 2**31, 2**40, 2**62, 2**63, 2**64, 2**70, -1, -2, -(2**31), -(2**63))
TEXTS = (
    "", "0", "1", "a", "module.", "module", "cpu", "cuda:0", "meta", "storage", "weight", "/", "../x", "\0", "\ud800",
    "\x1b[2J", "k" * 300, "torch", "_rebuild_tensor_v2", "FloatStorage", "QInt8Storage", "OrderedDict", "collections",
    "os", "system", "exp_avg", "state", "param_groups", "_metadata", "state_dict",
)  # fmt: skip


@cache
def other_formats() -> dict[str, bytes]:
    """Pickles of other programs, and a tar of torch before 0.1.10."""
    import numpy
    import torch

    arrays = {"module.w": numpy.arange(6.0).reshape(2, 3), "module.b": numpy.ones(2, numpy.float32), "epoch": 3}
    tensors = {"module.w": torch.arange(4.0).view(2, 2), "module.b": torch.ones(2)}
    with TemporaryDirectory() as folder:
        path = Path(folder, "in")
        joblib_dump(arrays, path)
        return {
            "joblib": path.read_bytes(),
            "pickle": pickle.dumps(arrays, 4),
            "pickled tensors": pickle.dumps(tensors, 2),
            "torch tar": torch_tar(tensors),
        }


@cache
def seeds() -> tuple[tuple[str, bytes], ...]:
    """The good files, by name."""
    rich: list[Op] = [op for name, arguments in impossible.GOOD.items() if name not in ("builtins.getattr",)
                      for op in (*push(name), *impossible.called(name, impossible.tuple_of(*arguments)))]  # fmt: skip
    tensors = {name: impossible.called(name, impossible.tuple_of(*arguments))
               for name, arguments in impossible.GOOD.items() if "_rebuild" in name}  # fmt: skip
    storages = [WEIGHT_DATA, b"\0" * 16]
    files = {
        **{f"small {name}": data for name, data in SMALL.items()},
        "calls": torch_zip(one_pickle("EMPTY_DICT", "MARK", *rich, "SETITEMS"), storages),
        "tensors": torch_zip(one_pickle(*state_dict_ops(tensors)), storages),
    }
    files |= other_formats()
    for path in sorted(FIXTURES.glob("*.*")):
        if path.suffix in (".pth", ".safetensors", ".pt") and path.stat().st_size < 16_000:
            files[path.name] = path.read_bytes()
    return tuple(files.items())


def mutant(number: int) -> tuple[str, bytes]:
    """(what it is, file) of mutant `number`. Small files are more often among them: they are quick, and as rich."""
    dice = random.Random(number)
    rows = seeds()
    ((name, data),) = dice.choices(rows, [1 / (2000 + len(content)) for _, content in rows])
    return other_file(number, name, data, dice)


def attack(number: int, files: Sequence[tuple[str, bytes]]) -> tuple[str, bytes]:
    """The same of one of `files`, which are hostile as they are."""
    dice = random.Random(number)
    return other_file(number, *dice.choice(files), dice)


def other_file(number: int, name: str, data: bytes, dice: random.Random) -> tuple[str, bytes]:
    """One to three changes of one kind; some mutants are then packed into an archive, which may be damaged too."""
    edits = dice.choice((1, 1, 1, 2, 3))
    ways: list[Way] = [raw]
    if data[:2] == b"PK":
        ways += [*[in_pickle] * 6, *[in_records] * 3]
    elif b"__metadata__" in data[:400] or name.endswith(".safetensors") or name == "small safetensors":
        ways += [in_header] * 5
    else:
        ways += [in_stream] * 5
    way = dice.choice(ways)
    if way is in_pickle:
        data = in_pickle(data, dice, edits)
    else:
        for _ in range(edits):
            data = way(data, dice)
    what = f"{number} {name} {way.__name__}"
    if dice.random() < 0.05:
        packing = dice.choice(list(PACKINGS))
        data, what = PACKINGS[packing](data), f"{what} {packing}"
        if dice.random() < 0.3:
            data = raw(data, dice)
    return what, data


PACKINGS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": lambda data: gzip.compress(data, 1, mtime=0),
    "zip": lambda data: build_zip([Record("model.pth", data)]),
    "deflated": lambda data: build_zip([Record("a/model.pth", data, method=8), Record("readme.txt", b"words")]),
    "tar": lambda data: tar_of({"model/weights.pth": data}),
    "nemo": lambda data: tar_of({"model_config.yaml": b"a: 1", "model_weights.ckpt": data}),
    "baselines": lambda data: build_zip([
        Record("policy.pth", data), Record("data", b"{}"), Record("_stable_baselines3_version", b"2"),
    ]),
}  # fmt: skip
"""How a file is packed into another, as websites, mail and libraries do it."""


def raw(data: bytes, dice: random.Random) -> bytes:
    """Bytes changed, taken out, doubled, zeroed, or the end cut off."""
    if not data:
        return data
    start = dice.randrange(len(data))
    length = min(dice.choice((1, 1, 2, 4, 8, 64, 512)), len(data) - start)
    part = data[start : start + length]
    new = dice.choice((
        bytes((part[0] ^ (1 << dice.randrange(8)),)) + part[1:],
        b"", part * 2, b"\0" * length, b"\xff" * length, dice.randbytes(length),
        struct.pack("<I", dice.choice(INTS) & 0xFFFFFFFF),
    ))  # fmt: skip
    if dice.random() < 0.1:
        return data[:start]
    return data[:start] + new + data[start + length :]


@lru_cache(512)
def operations(pickle: bytes) -> tuple[list[bytes], bytes]:
    """The opcodes of the first pickle of a stream, each with its argument, and what follows it."""
    starts = []
    try:
        starts += [position for _, _, position in pickletools.genops(pickle) if position is not None]
    except Exception:
        if not starts:
            return [pickle], b""
    ends = [*starts[1:], len(pickle)]
    if pickle[starts[-1] : starts[-1] + 1] == b".":
        ends[-1] = starts[-1] + 1
    return [pickle[start:end] for start, end in zip(starts, ends, strict=True)], pickle[ends[-1] :]


def another(operation: bytes, dice: random.Random) -> bytes:
    """An opcode with another argument, or another opcode."""
    code = operation[:1]
    if code in b"KMJI\x8a\x8b" and dice.random() < 0.8:
        value = dice.choice(INTS)
        return assemble(("LONG1", value)) if not -(2**31) <= value < 2**31 else assemble(("BININT", value))
    if code in b"XU\x8cTV\x8d" and dice.random() < 0.8:
        return assemble(("BINUNICODE", dice.choice(TEXTS)))
    if code == b"c" and dice.random() < 0.8:
        name = dice.choice((*impossible.GOOD, "torch.QInt8Storage", "torch.float16", "torch.load", "os.system"))
        module, _, function = name.rpartition(".")
        return assemble(("GLOBAL", module, function))
    if code in b"qr\x94hj" and dice.random() < 0.7:
        return code + bytes((dice.randrange(20),)) + operation[2:] if len(operation) > 1 else operation
    return assemble(*random_operations(dice))


def random_operations(dice: random.Random) -> list[Op]:
    value = dice.choice((*INTS, *TEXTS, None, True, 2.5, float("nan"), (), (1, 2), [1], {"a": 1}, b"ab"))
    choices: list[list[Op]] = [
        push(value) if not isinstance(value, int) or abs(value) < 2**400 else push(1),
        ["POP"], ["DUP"], ["MARK"], ["TUPLE"], ["TUPLE1"], ["TUPLE2"], ["REDUCE"], ["BUILD"], ["SETITEM"], ["SETITEMS"],
        ["APPEND"], ["APPENDS"], ["EMPTY_DICT"], ["EMPTY_LIST"], ["EMPTY_TUPLE"], ["NEWOBJ"], ["BINPERSID"], ["STOP"],
        ["STACK_GLOBAL"], ["MEMOIZE"], [("BINGET", dice.randrange(30))], [("BINPUT", dice.randrange(30))], ["NONE"],
        [("PROTO", dice.randrange(7))], [("FRAME", dice.choice((0, 1, 9, 2**40)))],
        list(dice.choice(list(impossible.WRONG.values()))),
    ]  # fmt: skip
    return dice.choice(choices)


def edited(operations: list[bytes], dice: random.Random) -> list[bytes]:
    """One opcode changed, taken out, doubled or swapped with another, or a run of them moved."""
    if not operations:
        return [assemble(*random_operations(dice))]
    made = list(operations)
    place = dice.randrange(len(made))
    kind = dice.randrange(10)
    if kind < 5:
        made[place] = another(made[place], dice)
    elif kind == 5:
        del made[place]
    elif kind == 6:
        made.insert(place, made[place])
    elif kind == 7:
        other = dice.randrange(len(made))
        made[place], made[other] = made[other], made[place]
    elif kind == 8:
        made[place:place] = [assemble(*random_operations(dice))]
    else:
        run = made[place : place + dice.randrange(1, 12)]
        other = dice.randrange(len(made))
        made[other:other] = run
    return made


def in_stream(data: bytes, dice: random.Random) -> bytes:
    """An opcode of one of the pickles that the file begins with."""
    before, rest = b"", data
    for _ in range(dice.choice((0, 2, 3, 3, 3, 3, 3, 4))):
        made, after = operations(rest)
        if len(made) < 2 or not after:
            break
        before, rest = before + b"".join(made), after
    made, after = operations(rest)
    return before + b"".join(edited(made, dice)) + after


@lru_cache(512)
def records_of(data: bytes) -> tuple[Record, ...]:
    with zipfile.ZipFile(BytesIO(data)) as archive:
        return tuple(Record(info.filename, archive.read(info)) for info in archive.infolist())


def in_pickle(data: bytes, dice: random.Random, edits: int = 1) -> bytes:
    """An opcode of data.pkl, or several, with sizes and checksums that agree."""
    try:
        records = [*records_of(data)]
    except Exception:
        return raw(data, dice)
    for place, record in enumerate(records):
        if record.name.endswith("data.pkl"):
            made, after = operations(record.data)
            for _ in range(edits):
                made = edited(made, dice)
            records[place] = replace(record, data=b"".join(made) + after)
    return build_zip(records)


def in_records(data: bytes, dice: random.Random) -> bytes:
    """A field of a record or of its row, a record less or twice, or an end record that lies."""
    try:
        records = [*records_of(data)]
        place = dice.randrange(len(records))
    except Exception:
        return raw(data, dice)
    number = dice.choice((0, 1, 2, 8, 9, 0x800, 0xFFFF, len(data)))
    wide = dice.choice((0, 1, 100, len(data), 0x7FFFFFFF, 0xFFFFFFFE, 0xFFFFFFFF))
    record = records[place]
    changes: list[dict[str, Any]] = [
        {"method": dice.choice((0, 8, 9, 14, 99))}, {"flags": number & 0xFFFF}, {"crc": wide}, {"size": wide},
        {"compressed_size": wide}, {"offset": wide}, {"disk": number & 0xFFFF}, {"local_name": dice.choice(("x", ""))},
        {"local_method": 8}, {"local_crc": wide}, {"local_size": wide}, {"local_compressed_size": wide},
        {"extra": dice.randbytes(5)}, {"central_extra": dice.randbytes(9)}, {"zip64": True}, {"gap": b"x" * 65},
        {"descriptor": b""}, {"local_signature": b"PK\x01\x02"}, {"comment": b"c" * 9}, {"align": 1},
        {"data": raw(record.data, dice)}, {"data": b""}, {"data": record.data * 2},
        {"name": dice.choice(("archive/data.pkl", "archive/data/0", "x", "archive/version", "", "archive/byteorder"))},
        {"name": record.name.upper()}, {"name": record.name.replace("data", "../data")},
    ]  # fmt: skip
    lies: dict[str, Any] = {}
    kind = dice.randrange(12)
    if kind < 8:
        records[place] = replace(record, **dice.choice(changes))
    elif kind == 8:
        del records[place]
    elif kind == 9:
        records.insert(place, record)
    else:
        lies = dice.choice((
            {"count": number & 0xFFFF}, {"directory_size": wide}, {"directory_offset": wide}, {"end": b""},
            {"zip64": False}, {"zip64": True}, {"prepend": b"x" * 37}, {"append": b"x" * 37},
            {"comment": b"PK\5\6" * 9},
        ))  # fmt: skip
    return build_zip(records, **lies)


def in_header(data: bytes, dice: random.Random) -> bytes:
    """A value of the JSON header, its text, or its length."""
    length = int.from_bytes(data[:8], "little")
    try:
        header = json.loads(data[8 : 8 + length])
        text = json.dumps(other_value(header, dice)).encode("utf-8", "surrogatepass")
    except (ValueError, UnicodeError):
        return raw(data, dice)
    if dice.random() < 0.15:
        text = raw(text, dice)
    stated = dice.choice(INTS) & (2**64 - 1) if dice.random() < 0.05 else len(text)
    return struct.pack("<Q", stated) + text + data[8 + length :]


def other_value(value: Any, dice: random.Random) -> Any:
    """`value` with one thing in it changed."""
    new = dice.choice((*INTS, *TEXTS, None, True, 1.5, [], {}, [0], [0, 8], [2**62, 4], {"a": "b"}, "F64", "F4"))
    if isinstance(value, dict) and value and dice.random() < 0.85:
        key = dice.choice(list(value))
        kind = dice.randrange(8)
        if kind == 0:
            return {name: part for name, part in value.items() if name != key}
        if kind == 1:
            return {**value, str(new): value[key]}
        return {**value, key: other_value(value[key], dice)}
    if isinstance(value, list) and value and dice.random() < 0.7:
        made = list(value)
        made[dice.randrange(len(made))] = other_value(made[0], dice)
        return made
    return new
