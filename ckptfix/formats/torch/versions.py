"""What each torch can read: when a storage class or a dtype came, and the older forms of these and of rebuild calls.

A version reads what came with it or before. Nothing here was run against an old torch: each row says where the fact is
from, or that no source was found. Where a thread shows only that one version has a name and an earlier one has not, the
later one counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ckptfix.checkpoint import dtypes
from ckptfix.errors import Unsupported
from ckptfix.formats.torch import calls
from ckptfix.formats.torch.calls import UNSTATED, Number, RebuildCall
from ckptfix.pickles import Call, Global, PersId
from ckptfix.pickles.graph import attributes, pairs

ZIP_SINCE: Number = (1, 6)
"""The default of torch.save since 1.6; 1.5 and older stop at its archive version (pytorch/pytorch#43766, #47243)."""

OLDEST: Number = (1, 5)
"""The last that reads no zip container; a file for it is read by those before it as far as they know its calls."""

NEWEST: Number = (2, 13)


@dataclass(frozen=True, slots=True)
class Version:
    """A torch version: `number` is (major, minor)."""

    number: Number

    @property
    def name(self) -> str:
        return f"{self.number[0]}.{self.number[1]}"

    @property
    def reads_zip(self) -> bool:
        return self.number >= ZIP_SINCE

    def has_dtype(self, name: str) -> bool:
        """Whether tensors of torch's dtype `name` can be loaded."""
        return self.number >= DTYPES.get(name, Since(NEWEST, "")).number


@dataclass(frozen=True, slots=True)
class Since:
    """The version that something came with, and where that is said."""

    number: Number
    source: str


_FIRST = Since(OLDEST, "in all")
DTYPES: dict[str, Since] = {
    **dict.fromkeys(("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8"), _FIRST),
    **dict.fromkeys(("bool", "bfloat16", "qint8", "quint8", "qint32"), Since(OLDEST, "release notes of 1.2 and 1.3")),
    **dict.fromkeys(("complex64", "complex128"), Since((1, 6), "release notes of 1.6: complex numbers")),
    **dict.fromkeys(("quint4x2", "quint2x4"), Since((1, 12), UNSTATED)),
    **dict.fromkeys(("float8_e5m2", "float8_e4m3fn"), Since((2, 1), "release notes of 2.1")),
    **dict.fromkeys(("float8_e5m2fnuz", "float8_e4m3fnuz"), Since((2, 2), "release notes of 2.2")),
    **dict.fromkeys(("uint16", "uint32", "uint64"), Since((2, 3), "release notes of 2.3")),
    "float8_e8m0fnu": Since((2, 7), "release notes of 2.7"),
    "float4_e2m1fn_x2": Since((2, 8), "release notes of 2.8"),
}
"""Dtypes whose tensors a version can load from a file. What is not here counts as of today."""

UNTYPED_SINCE: Number = (2, 0)
"""``torch.storage.UntypedStorage`` in a pickle."""


def since(node: Global) -> Number | None:
    """The version that came with the global `node`; None for one that all know, or that is not torch's."""
    row = calls.of(node)
    if row is not None and row.since is not None:
        return row.since
    return UNTYPED_SINCE if node.full in ("torch.storage.UntypedStorage", "torch.UntypedStorage") else None


Losses = list[tuple[str, str]]


def find(text: str) -> Version:
    """The version that `text` names: ``"1.5"``, ``"1.5.1"``, ``"2.0"``.

    Raises:
        Unsupported: it is not a version, or one outside the table.
    """
    parts = text.removeprefix("v").split(".")
    if not 2 <= len(parts) <= 4 or not all(part.isascii() and part.isdigit() and len(part) < 5 for part in parts[:2]):
        raise Unsupported(f"{text!r} is not a torch version", hint="such as 1.5 or 2.0")
    number = (int(parts[0]), int(parts[1]))
    if not OLDEST <= number <= NEWEST:
        first, last = Version(OLDEST).name, Version(NEWEST).name
        raise Unsupported(f"torch {text} is not in the table, which covers {first} to {last}")
    return Version(number)


def older_storage(pid: tuple[Any, ...], version: Version) -> tuple[Any, ...]:
    """The fields of a storage reference as `version` knows them.

    Raises:
        Unsupported: it has no such elements.
    """
    kind: Any = pid[1] if len(pid) > 1 else None
    row = dtypes.by_storage_class(kind.name) if type(kind) is Global else None
    if row is None:
        raise Unsupported("a storage of an unknown class")
    if kind.name == "UntypedStorage":
        if version.number >= UNTYPED_SINCE and version.reads_zip:
            return pid
        return (pid[0], Global("torch", "ByteStorage", 0), *pid[2:])
    if not version.has_dtype(row.name):
        raise Unsupported(f"torch {version.name} has no {row.name}")
    return pid


def older(call: Call, version: Version) -> tuple[Call, Losses]:
    """A call of torch's own as `version` knows it, and the attributes that it has no place for.

    Raises:
        Unsupported: `version` knows neither the call nor an older form of it, or no version does.
    """
    try:
        return _older(call, version)
    except (IndexError, TypeError, ValueError, AttributeError):
        name = call.func.name if type(call.func) is Global else "a call"
        raise Unsupported(f"{name} with arguments that no torch can read", offset=call.position) from None


def _older(call: Call, version: Version) -> tuple[Call, Losses]:
    losses: Losses = []
    for _ in range(8):
        row = calls.of(call.func)
        if row is None or row.since is None:
            return call, losses
        if version.number >= row.since and not _too_long(row, call, version):
            if row.dense and row.dtype is not None and len(call.arguments) > row.dtype:
                dtype = getattr(call.arguments[row.dtype], "name", "")
                if not version.has_dtype(dtype):
                    raise Unsupported(f"torch {version.name} has no {dtype}")
            return call, losses
        form = _OLDER.get(row.name)
        if form is None:
            raise Unsupported(f"torch {version.name} cannot read {row.name}, which came with {Version(row.since).name}")
        call = form(call, version, losses)
    raise Unsupported(f"torch {version.name} has no form of {getattr(call.func, 'name', 'a call')}")


def _too_long(row: RebuildCall, call: Call, version: Version) -> bool:
    return row is calls.TENSOR_V2 and len(call.arguments) > 6 and version.number < calls.MARKS_SINCE


def _v3(call: Call, version: Version, losses: Losses) -> Call:
    """Over a typed storage, as `_rebuild_tensor_v2` has it."""
    persid, dtype = call.arguments[0], call.arguments[6]
    row = dtypes.find(dtype.name) if type(dtype) is Global else None
    if row is None or row.storage_class is None or not version.has_dtype(row.name):
        raise Unsupported(f"torch {version.name} has no {getattr(dtype, 'name', 'such dtype')}")
    pid = persid.fields if type(persid) is PersId else ()
    nbytes = pid[4]
    if not isinstance(nbytes, int):
        raise ValueError("a storage without a size")
    if nbytes % row.itemsize:
        raise Unsupported(f"a storage of {nbytes} bytes does not hold whole {row.name} elements")
    count = nbytes // row.itemsize
    typed = PersId((*pid[:1], Global("torch", row.storage_class, 0), *pid[2:4], count, *pid[5:]), 0, -1)
    return calls.TENSOR_V2.call(typed, *call.arguments[1:6], *call.arguments[7:])


def _v2(call: Call, version: Version, losses: Losses) -> Call:
    """Without the marks of conjugate and negative views."""
    marks = [str(key) for key, value in pairs(call.arguments[6]) or () if value]
    if marks:
        raise Unsupported(f"torch {version.name} does not know tensors marked as {', '.join(marks)}")
    return calls.TENSOR_V2.call(*call.arguments[:6])


def _parameter_with_state(call: Call, version: Version, losses: Losses) -> Call:
    reason = f"torch {version.name} saves none with a parameter"
    losses += [(str(name), reason) for name, _ in attributes(call.arguments[3])]
    return calls.PARAMETER.call(*call.arguments[:3])


def _from_type(call: Call, version: Version, losses: Losses) -> Call:
    """The plain call; what the object carried is lost."""
    func, cls, args, state = call.arguments[:4]
    if type(cls) is not Global or cls.name not in ("Tensor", "Parameter") or type(func) is not Global:
        raise Unsupported(f"torch {version.name} has no form of a tensor subclass")
    reason = f"torch {version.name} saves none with a tensor"
    losses += [(str(name), reason) for name, _ in attributes(state)]
    return Call(func, args, "REDUCE", call.position)


_OLDER: dict[str, Callable[[Call, Version, Losses], Call]] = {
    calls.TENSOR_V3.name: _v3,
    calls.TENSOR_V2.name: _v2,
    calls.PARAMETER_WITH_STATE.name: _parameter_with_state,
    calls.FROM_TYPE.name: _from_type,
}
"""Call -> its older form, which may have an older form again."""
