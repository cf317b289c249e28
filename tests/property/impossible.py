"""Calls whose arguments nothing could use: each call that a checkpoint makes, with each kind of wrong argument."""

from __future__ import annotations

from collections.abc import Iterator

from builders import Op, Tensor, push, replace, state_dict_ops, tensor_ops, torch_zip
from property.hostile import WEIGHT, WEIGHT_DATA, one_pickle

STORAGE: list[Op] = [
    "MARK", *push("storage"), ("GLOBAL", "torch", "FloatStorage"), *push("0"), *push("cpu"), *push(2), "TUPLE",
    "BINPERSID",
]  # fmt: skip
HOOKS: list[Op] = [("GLOBAL", "collections", "OrderedDict"), "EMPTY_TUPLE", "REDUCE"]
FLOAT: list[Op] = [("GLOBAL", "torch", "float32")]
DENSE = tensor_ops(replace(WEIGHT, location="cpu"))
INDICES = tensor_ops(Tensor("1", (1, 2), 2, storage_class="LongStorage"))


def tuple_of(*parts: list[Op]) -> list[Op]:
    return ["MARK", *(op for part in parts for op in part), "TUPLE"]


def called(name: str, arguments: list[Op]) -> list[Op]:
    """Opcodes that call the global `name`; `arguments` push whatever is to be its arguments."""
    module, _, function = name.rpartition(".")
    return [("GLOBAL", module, function), *arguments, "REDUCE"]


def layout(name: str) -> list[Op]:
    return called("torch.serialization._get_layout", push((name,)))


def scheme(name: str) -> list[Op]:
    return [("GLOBAL", "torch", name)]


SIZES = [push((2,)), push((1,))]
GOOD: dict[str, list[list[Op]]] = {
    "torch._utils._rebuild_tensor": [STORAGE, push(0), *SIZES],
    "torch._utils._rebuild_tensor_v2": [STORAGE, push(0), *SIZES, push(False), HOOKS],
    "torch._utils._rebuild_tensor_v3": [STORAGE, push(0), *SIZES, push(False), HOOKS, FLOAT],
    "torch._utils._rebuild_parameter": [DENSE, push(True), HOOKS],
    "torch._utils._rebuild_parameter_with_state": [DENSE, push(True), HOOKS, push({"a": 1})],
    "torch._utils._rebuild_qtensor": [
        STORAGE, push(0), *SIZES, tuple_of(scheme("per_tensor_affine"), push(0.5), push(1)), push(False), HOOKS,
    ],
    "torch._utils._rebuild_sparse_tensor": [layout("torch.sparse_coo"), tuple_of(INDICES, DENSE, push((9,)))],
    "torch._utils._rebuild_sparse_csr_tensor": [
        layout("torch.sparse_csr"), tuple_of(INDICES, INDICES, DENSE, push((2, 9))),
    ],
    "torch._utils._rebuild_meta_tensor_no_storage": [FLOAT, *SIZES, push(False)],
    "torch._utils._rebuild_wrapper_subclass": [
        scheme("Tensor"), FLOAT, *SIZES, push(0), push(None), push(None), push(False),
    ],
    "torch._utils._rebuild_nested_tensor": [DENSE, INDICES, INDICES, INDICES],
    "torch._utils._rebuild_device_tensor_from_numpy": [DENSE, FLOAT, push("xla:0"), push(False)],
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": [DENSE, FLOAT, push("xla:0"), push(False)],
    "torch._tensor._rebuild_from_type_v2": [
        [("GLOBAL", "torch._utils", "_rebuild_tensor_v2")], scheme("Tensor"),
        tuple_of(STORAGE, push(0), *SIZES, push(False), HOOKS), push({"a": 1}),
    ],
    "torch.Size": [push((2, 3))],
    "torch.device": [push("cuda"), push(0)],
    "torch.serialization._get_layout": [push("torch.sparse_coo")],
    "collections.OrderedDict": [tuple_of(push(["a", 1]))],
    "collections.defaultdict": [[("GLOBAL", "builtins", "int")]],
    "collections.Counter": [push({"a": 1})],
    "collections.deque": [push([1]), push(2)],
    "_codecs.encode": [push("text"), push("latin1")],
    "builtins.bytearray": [push("text"), push("latin1")],
    "builtins.complex": [push(1.0), push(2.0)],
    "builtins.set": [push([1])],
    "builtins.frozenset": [push([1])],
    "builtins.range": [push(0), push(9), push(2)],
    "builtins.slice": [push(0), push(9), push(2)],
    "builtins.getattr": [push("a"), push("b")],
    "numpy.dtype": [push("f4"), push(False), push(True)],
    "numpy.core.multiarray.scalar": [called("numpy.dtype", push(("f4", False, True))), push(b"\0\0\0\0")],
    "numpy.core.multiarray._reconstruct": [[("GLOBAL", "numpy", "ndarray")], push((0,)), push(b"b")],
    "numpy._core.numeric._frombuffer": [
        push(b"\0" * 8), called("numpy.dtype", push(("f4", False, True))), push((2,)), push("C"),
    ],
    "copyreg._reconstructor": [scheme("Tensor"), [("GLOBAL", "builtins", "object")], push(None)],
    "datetime.datetime": [push(b"\x07\xe9\x01\x01\0\0\0\0\0\0")],
    "uuid.UUID": [push("0")],
    "fractions.Fraction": [push("1/2")],
    "decimal.Decimal": [push("1")],
    "pathlib.PosixPath": [push("a"), push("b")],
    "argparse.Namespace": [],
    "functools.partial": [[("GLOBAL", "builtins", "print")]],
}  # fmt: skip
"""Call -> its arguments as they should be, each the opcodes that push it."""

WRONG: dict[str, list[Op]] = {
    "none": push(None), "int": push(5), "negative": push(-1), "huge": push(2**62), "beyond": push(2**70),
    "float": push(2.5), "text": push("load"), "comma": push("a, b"), "surrogate": push("\ud800"), "bytes": push(b"ab"),
    "empty": push(()), "list": push([1, 2]), "dict": push({"a": 1}), "sizes": push((2**40, 2**40)),
    "global": [("GLOBAL", "os", "system")], "call": called("os.system", push(("true",))), "tensor": DENSE,
}  # fmt: skip
"""What stands in place of an argument, or of all of them."""


def impossible(name: str) -> Iterator[tuple[str, bytes]]:
    """(what is wrong, file) for the call `name`: no tuple of arguments, too few, too many, one of a wrong kind."""
    good = GOOD[name]
    arguments: dict[str, list[Op]] = {"good": tuple_of(*good), "repeated": tuple_of(*good, *good)}
    for kind, ops in WRONG.items():
        arguments[f"all {kind}"] = list(ops)
        arguments[f"only {kind}"] = tuple_of(ops)
        for place in range(len(good)):
            arguments[f"{place} {kind}"] = tuple_of(*good[:place], ops, *good[place + 1 :])
    for count in range(len(good)):
        arguments[f"first {count}"] = tuple_of(*good[:count])
    for kind, ops in arguments.items():
        yield kind, beside(called(name, ops))
    for kind in ("int", "dict", "text", "empty"):
        yield f"state {kind}", beside([*called(name, tuple_of(*good)), *WRONG[kind], "BUILD"])
    yield "key", beside([*push({}), *called(name, tuple_of(*good)), *push(1), "SETITEM"])


def quantizers() -> Iterator[tuple[str, bytes]]:
    """Quantizers and layouts by other names and with other parameters than torch has."""
    for name in ("per_tensor_affine", "per_channel_affine", "per_tensor_symmetric", "load", "no_such"):
        for kind, ops in {**WRONG, "nan": push(float("nan"))}.items():
            for parameters in (tuple_of(scheme(name), ops, push(0)), tuple_of(scheme(name), DENSE, DENSE, ops), ops):
                good = GOOD["torch._utils._rebuild_qtensor"]
                call = called("torch._utils._rebuild_qtensor", tuple_of(*good[:4], parameters, *good[5:]))
                yield f"{name} {kind}", beside(call)
    for name in ("torch.sparse_bsr", "torch.load", "torch.strided", "load", "", "torch.nn", "torch._mkldnn"):
        for parts in ([INDICES, DENSE], [INDICES, INDICES, DENSE], [DENSE], []):
            for size in ([push((2, 9))], [push(2**70)], []):
                call = called("torch._utils._rebuild_sparse_tensor", tuple_of(layout(name), tuple_of(*parts, *size)))
                yield f"{name} {len(parts)}", beside(call)


def storages() -> Iterator[tuple[str, bytes]]:
    """Storages whose key, size or device no file can have."""
    changes: dict[str, dict[str, object]] = {
        "key-surrogate": {"key": "\ud800"}, "key-long": {"key": "k" * 70_000}, "key-absent": {"key": "77"},
        "huge": {"numel": 2**61, "key": "77"}, "beyond": {"numel": 2**70, "key": "77"}, "twice": {"numel": 4},
        "meta": {"location": "meta"}, "meta-huge": {"location": "meta", "numel": 2**60},
        "meta-beyond": {"location": "meta", "numel": 2**70}, "offset": {"offset": 2**62}, "negative": {"offset": -1},
        "stride-0": {"shape": (2**62,), "stride": (0,)}, "empty-far": {"shape": (0,), "offset": 2**40},
        "none": {"numel": 0}, "absent-none": {"numel": 0, "key": "77"},
    }  # fmt: skip
    for name, change in changes.items():
        tensor = replace(WEIGHT, **change)  # type: ignore[arg-type]
        yield name, torch_zip(one_pickle(*state_dict_ops({"module.w": WEIGHT, "module.x": tensor})), [WEIGHT_DATA])


DEEP = 1500
"""More levels than Python's stack has."""


def nested() -> Iterator[tuple[str, bytes]]:
    """Tensors made of tensors without end: deep, and shared so that they unfold."""
    around: list[Op] = [("GLOBAL", "torch._utils", "_rebuild_parameter"), "MARK"]
    parameter = [*around * DEEP, *DENSE, *["NEWTRUE", "NONE", "TUPLE", "REDUCE"] * DEEP]
    yield "parameters", beside(parameter)
    shared: list[Op] = [*DENSE, ("BINPUT", 0), "POP"]
    for _ in range(64):
        pair = tuple_of([("BINGET", 0)], [("BINGET", 0)], push((2, 2)))
        shared += [*called("torch._utils._rebuild_sparse_tensor", tuple_of(layout("torch.sparse_coo"), pair)),
                   ("BINPUT", 0), "POP"]  # fmt: skip
    yield "sparse", beside([*shared, ("BINGET", 0)])
    inner: list[Op] = tuple_of(STORAGE, push(0), *SIZES, push(False), HOOKS)
    for _ in range(400):
        again: list[Op] = [("GLOBAL", "torch._tensor", "_rebuild_from_type_v2")]
        inner = tuple_of(again, scheme("Tensor"), inner, push({}))
    yield "types", beside(called("torch._tensor._rebuild_from_type_v2", inner))


def beside(ops: list[Op]) -> bytes:
    """A file in which `ops` push a value beside a tensor, in the mapping of tensors and outside of it."""
    pickle = one_pickle(*state_dict_ops({"module.w": WEIGHT, "module.x": ops}))
    return torch_zip(pickle, [WEIGHT_DATA, b"\0" * 16])
