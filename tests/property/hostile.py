"""Hostile pickles by name, assembled by hand.

The payloads are harmless, and never run: they are there to be named.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from builders import (
    Op,
    Tensor,
    assemble,
    push,
    replace,
    state_dict_ops,
    tensor_ops,
)

GADGETS = (
    ("os", "system"), ("posix", "system"), ("nt", "system"), ("subprocess", "Popen"), ("subprocess", "check_output"),
    ("builtins", "eval"), ("builtins", "exec"), ("builtins", "getattr"), ("builtins", "__import__"),
    ("__builtin__", "eval"), ("__builtin__", "apply"), ("importlib", "import_module"), ("runpy", "run_path"),
    ("pip", "main"), ("webbrowser", "open"), ("socket", "create_connection"), ("shutil", "rmtree"), ("pty", "spawn"),
    ("inspect", "getattr_static"), ("importlib.machinery", "SourceFileLoader"), ("timeit", "timeit"),
    ("bdb", "Bdb.run"),
    ("cProfile", "run"), ("code", "InteractiveInterpreter.runcode"), ("ctypes", "CDLL"), ("operator", "attrgetter"),
    ("functools", "partial"), ("torch.hub", "load"), ("torch", "load"), ("torch.serialization", "load"),
    ("torch.jit", "load"), ("torch.utils.cpp_extension", "load"), ("torch._inductor.codecache", "compile_file"),
    ("torch.storage", "_load_from_bytes"), ("numpy.testing._private.utils", "runstring"), ("no_such_module", "f"),
    ("torch._utils", "os.system"), ("collections", "abc.sys.modules"), ("torch", "os.system"),
    ("torch._utils", "sys.exit"),
)  # fmt: skip
"""Calls that scanners have missed, aliases of them, and a module that is not there."""

DEPTH = 20_000
"""Far beyond the interpreter's recursion limit, and quick to read."""

WEIGHT = Tensor("0", (2,), 2, location="cuda:0")
WEIGHT_DATA = struct.pack("<2f", 1, 2)


def one_pickle(*ops: Op, protocol: int = 2) -> bytes:
    return assemble(("PROTO", protocol), *ops, "STOP")


def beside_weights(ops: list[Op]) -> bytes:
    """`ops` push a value; it stands in a checkpoint beside a tensor."""
    return one_pickle(*state_dict_ops({"state_dict": state_dict_ops({"module.w": WEIGHT}), "x": ops}))


def _calls(module: str, name: str) -> Iterator[tuple[str, list[Op]]]:
    """Every way in which a pickle calls ``module.name("true")``."""
    argument = [*push("true"), "TUPLE1"]
    text = [*push(module), *push(name)]
    yield "global", [("GLOBAL", module, name), *argument, "REDUCE"]
    yield "inst", ["MARK", *push("true"), ("INST", module, name)]
    yield "obj", ["MARK", ("GLOBAL", module, name), *push("true"), "OBJ"]
    yield "stack", [*text, "STACK_GLOBAL", *argument, "REDUCE"]
    yield "newobj", [("GLOBAL", module, name), *argument, "NEWOBJ"]
    yield "newobj-ex", [("GLOBAL", module, name), *argument, "EMPTY_DICT", "NEWOBJ_EX"]
    yield "popped", [*push(1), "MARK", ("GLOBAL", module, name), *push("true"), "OBJ", "POP"]
    yield "memo", [*push(module), ("BINPUT", 0), "POP", *push(name), ("BINPUT", 1), "POP", ("BINGET", 0), ("BINGET", 1),
                   "STACK_GLOBAL", *argument, "REDUCE"]  # fmt: skip
    yield "build", [("GLOBAL", module, name), "EMPTY_TUPLE", "NEWOBJ", *push({"__setstate__": "true"}), "BUILD"]


def gadgets() -> Iterator[tuple[str, str, bytes]]:
    """(name, global as it should be reported, pickle) of calls beside a tensor."""
    for module, name in GADGETS:
        for way, ops in _calls(module, name):
            if way == "global" or (module, name) in GADGETS[:3]:
                reported = f"{module}.{name}".replace("__builtin__", "builtins")
                yield f"{way}-{module}.{name}", reported, beside_weights(ops)


def pickles() -> Iterator[tuple[str, bytes]]:
    """Pickles of groups A and B, to be put into a zip or a legacy file."""
    for name, _, data in gadgets():
        yield name, data
    good = beside_weights(push(1))
    call: list[Op] = [("GLOBAL", "os", "system"), *push("true"), "TUPLE1", "REDUCE"]
    yield "payload-then-broken", assemble(("PROTO", 2), *call, b"\xff")
    yield "payload-then-end", assemble(("PROTO", 2), *call)
    yield "stacked", good + one_pickle(*call)
    yield "bytes-after-stop", good + b"\x00" * 100
    yield "pickle-in-bytes", beside_weights(push(one_pickle(*call)))
    yield "stack-global-at-0", one_pickle(*push("os"), *push("system"), "STACK_GLOBAL", *push(("true",)), "REDUCE")
    yield "stack-global-of-ints", one_pickle(*push(1), *push(2), "STACK_GLOBAL")
    yield "stack-global-of-call", one_pickle(*call, *push("system"), "STACK_GLOBAL", "EMPTY_TUPLE", "REDUCE")
    yield "frame-straddle", assemble(("PROTO", 4), ("FRAME", 3), *push("a long string"), "STOP")
    yield "frame-beyond", assemble(("PROTO", 4), ("FRAME", 2**62), *push(1), "STOP")
    yield "frame-in-frame", assemble(("PROTO", 4), ("FRAME", 20), ("FRAME", 2), *push(1), "STOP")
    for code in ("EXT1", "EXT2", "EXT4"):
        yield code.lower(), one_pickle((code, 1))
    yield "next-buffer", one_pickle("NEXT_BUFFER", protocol=5)
    yield "readonly-buffer", one_pickle(*push(1), "READONLY_BUFFER", protocol=5)
    for byte in (0x00, 0x01, 0x99, 0xC3, 0xFE, 0xFF):
        yield f"unknown-opcode-{byte:02x}", assemble(("PROTO", 2), bytes([byte]), "STOP")
    yield "proto-255", assemble(("PROTO", 255), *push(1), "STOP")
    yield "setitem-on-tensor", one_pickle(*tensor_ops(WEIGHT), *push(0), *push(1), "SETITEM")
    yield "setitems-on-tensor", one_pickle(*tensor_ops(WEIGHT), "MARK", *push(0), *push(1), "SETITEMS")
    yield "append-on-int", one_pickle(*push(1), *push(2), "APPEND")
    yield "build-on-int", one_pickle(*push(1), *push({"a": 1}), "BUILD")
    yield "reduce-on-int", one_pickle(*push(1), "EMPTY_TUPLE", "REDUCE")
    yield "reduce-with-int", one_pickle(("GLOBAL", "builtins", "bytearray"), *push(2**40), "REDUCE")
    yield "allocator", beside_weights([("GLOBAL", "builtins", "bytearray"), *push((2**40,)), "REDUCE"])
    yield "torch-allocator", beside_weights([("GLOBAL", "torch", "zeros"), *push((2**40,)), "REDUCE"])
    yield from _persistent_ids()
    yield from _rebuilds()
    yield from _texts()
    yield from _exhaustion()


def _persistent_ids() -> Iterator[tuple[str, bytes]]:
    storage: list[Op] = [("GLOBAL", "torch", "FloatStorage")]
    ids: dict[str, list[Op]] = {
        "int": push(5), "text": push("storage"), "empty": ["EMPTY_TUPLE"], "tag": push(("module", "x")),
        "short": ["MARK", *push("storage"), *storage, "TUPLE"],
        "long": ["MARK", *push("storage"), *storage, *push("0"), *push("cpu"), *push(2), *push(None), *push(1),
                 "TUPLE"],
        "negative": ["MARK", *push("storage"), *storage, *push("0"), *push("cpu"), *push(-1), "TUPLE"],
        "huge": ["MARK", *push("storage"), *storage, *push("0"), *push("cpu"), *push(2**70), "TUPLE"],
        "float": ["MARK", *push("storage"), *storage, *push("0"), *push("cpu"), *push(2.5), "TUPLE"],
        "class": ["MARK", *push("storage"), ("GLOBAL", "os", "system"), *push("0"), *push("cpu"), *push(2), "TUPLE"],
        "class-text": ["MARK", *push("storage"), *push("FloatStorage"), *push("0"), *push("cpu"), *push(2), "TUPLE"],
        "key-int": ["MARK", *push("storage"), *storage, *push(0), *push("cpu"), *push(2), "TUPLE"],
        "key-parent": ["MARK", *push("storage"), *storage, *push("../../etc/passwd"), *push("cpu"), *push(2), "TUPLE"],
        "key-absolute": ["MARK", *push("storage"), *storage, *push("/etc/passwd"), *push("cpu"), *push(2), "TUPLE"],
        "key-list": ["MARK", *push("storage"), *storage, "EMPTY_LIST", *push("cpu"), *push(2), "TUPLE"],
        "location-int": ["MARK", *push("storage"), *storage, *push("0"), *push(1), *push(2), "TUPLE"],
        "location-odd": ["MARK", *push("storage"), *storage, *push("0"), *push("\x1b[2J\n"), *push(2), "TUPLE"],
        "cycle": ["EMPTY_LIST", ("BINPUT", 9), ("BINGET", 9), "APPEND"],
    }  # fmt: skip
    for name, ops in ids.items():
        bad: list[Op] = [("GLOBAL", "torch._utils", "_rebuild_tensor_v2"), "MARK", *ops, "BINPERSID", *push(0),
                         *push((2,)), *push((1,)), *push(False), *push(None), "TUPLE", "REDUCE"]  # fmt: skip
        yield f"persid-{name}", one_pickle(*state_dict_ops({"module.good": WEIGHT, "module.bad": bad}))
        yield f"persid-{name}-bare", one_pickle(*ops, "BINPERSID")
    yield "persid-line", one_pickle(("PERSID", "os"))


def _rebuilds() -> Iterator[tuple[str, bytes]]:
    lies = {
        "beyond": replace(WEIGHT, shape=(3,)),
        "offset": replace(WEIGHT, offset=2),
        "offset-negative": replace(WEIGHT, offset=-1),
        "offset-huge": replace(WEIGHT, offset=2**70),
        "shape-negative": replace(WEIGHT, shape=(-1,), stride=(1,)),
        "shape-huge": replace(WEIGHT, shape=(2**62, 2**62), stride=(0, 0)),
        "shape-overflow": replace(WEIGHT, shape=(2**32, 2**32), stride=(2**32, 1)),
        "expanded": replace(WEIGHT, shape=(2**40,), stride=(0,)),
        "stride-negative": replace(WEIGHT, stride=(-1,)),
        "stride-huge": replace(WEIGHT, stride=(2**62,)),
        "stride-short": replace(WEIGHT, stride=()),
        "stride-long": replace(WEIGHT, stride=(1, 1, 1)),
        "dimensions": replace(WEIGHT, shape=(1,) * 5000),
        "numel": replace(WEIGHT, numel=3),
        "numel-huge": replace(WEIGHT, numel=2**60),
        "missing": replace(WEIGHT, key="77"),
        "untyped": replace(WEIGHT, storage_class="UntypedStorage"),
        "no-such-class": replace(WEIGHT, storage_class="EvilStorage"),
    }
    for name, tensor in lies.items():
        yield f"tensor-{name}", one_pickle(*state_dict_ops({"module.good": WEIGHT, "module.bad": tensor}))
    odd: dict[str, list[Op]] = {
        "no-arguments": ["EMPTY_TUPLE"], "int": push(1), "few": push((1, 2)), "shape-text": push((1, 0, "ab", (1,))),
        "many": push(tuple(range(50))), "dicts": push(({}, {}, {}, {}, {}, {})),
    }  # fmt: skip
    calls = ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter", "_rebuild_qtensor",
             "_rebuild_parameter_with_state", "_rebuild_sparse_tensor", "_rebuild_sparse_csr_tensor",
             "_rebuild_meta_tensor_no_storage", "_rebuild_wrapper_subclass", "_rebuild_nested_tensor",
             "_rebuild_device_tensor_from_numpy")  # fmt: skip
    for call in calls:
        for name, ops in odd.items():
            bad: list[Op] = [("GLOBAL", "torch._utils", call), *ops, "REDUCE"]
            yield f"{call}-{name}", one_pickle(*state_dict_ops({"module.good": WEIGHT, "module.bad": bad}))
    own = [("GLOBAL", "torch._utils", "_rebuild_parameter"), "EMPTY_LIST", ("BINPUT", 1), ("BINGET", 1), "APPEND",
           *push(True), *push(None), "TUPLE3", "REDUCE"]  # fmt: skip
    yield "parameter-of-a-cycle", one_pickle(*state_dict_ops({"module.good": WEIGHT, "module.bad": own}))
    deep: list[Op] = [*[op for _ in range(5000) for op in (("GLOBAL", "torch._utils", "_rebuild_parameter"), "MARK")],
                      *tensor_ops(WEIGHT),
                      *[op for _ in range(5000) for op in (*push(True), *push(None), "TUPLE", "REDUCE")],
                      ]  # fmt: skip
    yield "parameters-deep", one_pickle(*state_dict_ops({"module.good": WEIGHT, "module.bad": deep}))


def _texts() -> Iterator[tuple[str, bytes]]:
    lines = {
        "int-plus": b"I+0\n.", "int-l": b"I5L\n.", "int-space": b"I 5 \n.",
        "int-bad": b"Ix\n.", "int-underscore": b"I1_0\n.",
        "long": b"L5L\n.", "long-bare": b"L5\n.", "long-long": b"L" + b"9" * 5000 + b"L\n.", "float": b"F1e5\n.",
        "float-bad": b"Fx\n.", "float-nan": b"Fnan\n.", "string": b"S'a\\x41\\n'\n.", "string-open": b"S'a\n.",
        "string-none": b"Sa\n.", "unicode-escape": b"V\\u0041\\uzzzz\n.", "no-newline": b"I55555", "get": b"g0\n.",
        "get-text": b"gx\n.", "put": b"I1\np1\n.", "put-negative": b"I1\np-1\n.",
        "global-nul": b"co\x00s\nsys\x00tem\n.",
        "global-high": b"c\xff\xfe\n\xff\n.", "global-ansi": b"cos\nsys\x1b[2Jtem\n.", "global-empty": b"c\n\n.",
        "empty": b"", "stop": b".", "pops": b"0000.", "mark": b"(.", "marks": b"((((.", "dup": b"2.", "tuple": b"t.",
        "pop-mark": b"1.", "two-values": b"I1\nI2\n.",
    }  # fmt: skip
    for name, data in lines.items():
        yield f"text-{name}", data
    for name, key in {"nul": "a\x00b", "ansi": "\x1b[31mred", "surrogate": b"\xed\xa0\x80", "bad-utf8": b"\xff\xfe",
                      "newline": "a\nb", "empty": "", "dots": "..", "slash": "a/b", "long": "x" * 100_000,
                      }.items():  # fmt: skip
        ops: list[Op] = ["EMPTY_DICT", ("BINUNICODE", key), *tensor_ops(WEIGHT), "SETITEM"]
        yield f"key-{name}", one_pickle(*ops)
        yield (
            f"bytes-key-{name}",
            one_pickle("EMPTY_DICT", ("SHORT_BINSTRING", key[:200]), *tensor_ops(WEIGHT), "SETITEM"),
        )


def _exhaustion() -> Iterator[tuple[str, bytes]]:
    yield "dup-laughs", one_pickle(*push("lol"), *["DUP", "TUPLE2"] * 60)
    twice: list[Op] = [("BINGET", 0), ("BINGET", 0), "TUPLE2", ("BINPUT", 0), "POP"]
    yield "memo-laughs", one_pickle(*push("lol"), ("BINPUT", 0), *twice * 60, ("BINGET", 0))
    yield "dict-laughs", beside_weights(
        ["EMPTY_DICT", *[op for _ in range(60)
                         for op in ("DUP", ("BINPUT", 0), "POP", "EMPTY_DICT", *push("a"), ("BINGET", 0),
                         "SETITEM", *push("b"), ("BINGET", 0), "SETITEM")]]
    )  # fmt: skip
    shared: list[Op] = [*state_dict_ops({"module.w": WEIGHT}), ("BINPUT", 0)]
    for _ in range(40):
        shared += [
            "POP",
            "EMPTY_DICT",
            *push("a"),
            ("BINGET", 0),
            "SETITEM",
            *push("b"),
            ("BINGET", 0),
            "SETITEM",
            ("BINPUT", 0),
        ]
    yield "state-dict-laughs", one_pickle(*shared)
    lists: list[Op] = [*push("lol"), ("BINPUT", 0)]
    for _ in range(40):
        lists += ["POP", "EMPTY_LIST", ("BINGET", 0), "APPEND", ("BINGET", 0), "APPEND", ("BINPUT", 0)]
    yield "list-laughs", beside_weights(lists)
    for name, code in {"binunicode8": b"\x8d", "binbytes8": b"\x8e", "bytearray8": b"\x96"}.items():
        yield f"{name}-2^62", assemble(("PROTO", 5), code + struct.pack("<Q", 2**62), "STOP")
        yield f"{name}-2^64", assemble(("PROTO", 5), code + b"\xff" * 8, "STOP")
    yield "binunicode-2^32", assemble(("PROTO", 2), b"X\xff\xff\xff\xff", "STOP")
    yield "binstring-negative", assemble(("PROTO", 2), b"T\xff\xff\xff\xff", "STOP")
    yield "long4-negative", assemble(("PROTO", 2), b"\x8b\xff\xff\xff\xff", "STOP")
    yield "long4-huge", assemble(("PROTO", 2), b"\x8b\xff\xff\xff\x7f", "STOP")
    yield "long4-big", beside_weights([b"\x8b" + struct.pack("<i", 100_000) + b"\x7f" * 100_000])
    yield "digits", beside_weights([b"L" + b"7" * 4000 + b"L\n"])
    yield "digits-many", beside_weights([b"L" + b"7" * 100_000 + b"L\n"])
    yield "deep-lists", one_pickle(*["EMPTY_LIST"] * DEPTH, *["APPEND"] * (DEPTH - 1))
    yield "deep-tuples", one_pickle("EMPTY_TUPLE", *["TUPLE1"] * DEPTH)
    yield "deep-dicts", one_pickle(*state_dict_ops({"module.w": WEIGHT, "deep": [
        *[op for _ in range(DEPTH) for op in ("EMPTY_DICT", *push("a"))], "NONE", *["SETITEM"] * DEPTH]}))  # fmt: skip
    yield (
        "deep-calls",
        one_pickle(
            *[("GLOBAL", "a", "b")] * DEPTH,
            "EMPTY_TUPLE",
            *[op for _ in range(DEPTH) for op in ("REDUCE", "TUPLE1")][:-1],
        ),
    )
    yield "cycle-list", beside_weights(["EMPTY_LIST", ("BINPUT", 0), ("BINGET", 0), "APPEND"])
    yield "cycle-dict", one_pickle("EMPTY_DICT", ("BINPUT", 0), *push("module.w"), *tensor_ops(WEIGHT), "SETITEM",
                                *push("self"), ("BINGET", 0), "SETITEM")  # fmt: skip
    yield (
        "cycle-call",
        one_pickle("EMPTY_LIST", ("BINPUT", 0), ("GLOBAL", "a", "b"), ("BINGET", 0), "TUPLE1", "REDUCE", "APPEND"),
    )
    yield "memo-index", one_pickle(*push("a"), ("LONG_BINPUT", 2**32 - 1), ("LONG_BINGET", 2**32 - 1))
    yield "memo-text-index", assemble(("PROTO", 2), *push("a"), b"p999999999999999999999\n", "STOP")
    yield "mark-flood", one_pickle(*["MARK"] * 300_000)
    yield "pop-flood", one_pickle(*push(1), *["DUP", "POP"] * 100_000)
    yield "memo-flood", one_pickle(*push(1), *[("LONG_BINPUT", index) for index in range(200_000)])
    yield "line", assemble(b"c" + b"a" * (8 << 20))
    yield "line-int", assemble(b"I" + b"1" * (1 << 20))
    yield "unhashable-key", beside_weights(["EMPTY_DICT", "EMPTY_LIST", *push(1), "SETITEM"])
    yield "dict-key", one_pickle("EMPTY_DICT", "EMPTY_DICT", *tensor_ops(WEIGHT), "SETITEM")
    yield "odd-setitems", one_pickle("EMPTY_DICT", "MARK", *push(1), "SETITEMS")
    yield "equal-keys", one_pickle("EMPTY_DICT", "MARK", *push("module.w"), *tensor_ops(WEIGHT), *push("module.w"),
                                *tensor_ops(WEIGHT), "SETITEMS")  # fmt: skip
    collisions = [op for index in range(20_000) for op in (("LONG1", index * (2**61 - 1)), *push(1))]
    yield "hash-collisions", beside_weights(["EMPTY_DICT", "MARK", *collisions, "SETITEMS"])


GOOD = beside_weights(push(1))
