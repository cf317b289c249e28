"""Compatibility of torch versions: when each storage class, dtype and rebuild call appeared, and its older forms.

A version reads everything that appeared with it or before. Nothing here was run against an old torch: each row names
the source of the fact, or states that no source was found. If a thread shows only that one version has a name and an
earlier one lacks it, the later version counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckptfix.checkpoint import dtypes
from ckptfix.dataclass import dataclass
from ckptfix.errors import Unsupported
from ckptfix.formats.torch import calls
from ckptfix.formats.torch.calls import UNSTATED, Number, RebuildCall
from ckptfix.formats.torch.common import PickledObject
from ckptfix.pickles import Call, Global, PersId
from ckptfix.pickles.graph import attributes, pairs

ZIP_SINCE: Number = (1, 6)
"""The default of torch.save since 1.6; 1.5 and older stop at its archive version (pytorch/pytorch#43766, #47243)."""

OLDEST: Number = (1, 5)
"""The last version that reads no zip container; earlier versions read a file for it if they have its rebuild calls."""

NEWEST: Number = (2, 13)


@dataclass(frozen=True, slots=True)
class Version:
    """A torch version: `number` is (major, minor)."""

    number: Number

    @property
    def name(self) -> str:
        """The version as text: ``major.minor``."""
        return f"{self.number[0]}.{self.number[1]}"

    @property
    def reads_zip(self) -> bool:
        """True if the version reads zip files."""
        return self.number >= ZIP_SINCE

    def has_dtype(self, name: str) -> bool:
        """Return whether the version can load tensors of torch's dtype `name`."""
        return self.number >= DTYPES.get(name, Since(NEWEST, "")).number


@dataclass(frozen=True, slots=True)
class Since:
    """The version with which something appeared, and the source of that fact."""

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
"""Dtypes by the first version that can load their tensors. A dtype that is not listed needs the newest version."""

UNTYPED_SINCE: Number = (2, 0)
"""First version with ``torch.storage.UntypedStorage`` in a pickle."""


def since(node: Global) -> Number | None:
    """Return the version with which the global `node` appeared; None if all versions have it, or it is not torch's."""
    row = calls.of(node)
    if row is not None and row.since is not None:
        return row.since
    return UNTYPED_SINCE if node.full in ("torch.storage.UntypedStorage", "torch.UntypedStorage") else None


def needs(parts: PickledObject) -> dict[str, Number]:
    """Map each name of torch in an object that not all versions have to the version with which it appeared."""
    return {node.full: number for node in parts.graph.globals if (number := since(node)) is not None}


Losses = list[tuple[str, str]]


def find(text: str) -> Version:
    """Return the version that `text` names: ``"1.5"``, ``"1.5.1"``, ``"2.0"``.

    Raises:
        Unsupported: it is not a version, or is outside the table.
    """
    parts = text.removeprefix("v").split(".")
    if not 2 <= len(parts) <= 4 or not all(part.isascii() and part.isdigit() and len(part) < 5 for part in parts[:2]):
        raise Unsupported(f"{text!r} is not a torch version", hint="name a version such as 1.5 or 2.0")
    number = (int(parts[0]), int(parts[1]))
    if not OLDEST <= number <= NEWEST:
        first, last = Version(OLDEST).name, Version(NEWEST).name
        raise Unsupported(f"torch {text} is not in the table, which covers {first} to {last}")
    return Version(number)


def older_storage(pid: tuple[Any, ...], version: Version) -> tuple[Any, ...]:
    """Return the fields of a storage reference in the form that `version` reads.

    Raises:
        Unsupported: `version` has no such elements.
    """
    kind: Any = pid[1] if len(pid) > 1 else None
    row = dtypes.by_storage_class(kind.name) if type(kind) is Global else None
    if row is None:
        raise Unsupported("the class of a storage is unknown")
    if kind.name == "UntypedStorage":
        if version.number >= UNTYPED_SINCE and version.reads_zip:
            return pid
        return (pid[0], Global("torch", "ByteStorage", 0), *pid[2:])
    if not version.has_dtype(row.name):
        raise Unsupported(f"torch {version.name} has no {row.name}")
    return pid


def older(call: Call, version: Version) -> tuple[Call, Losses]:
    """Return a call of torch's own in the form that `version` reads, and the attributes that this form cannot hold.

    Raises:
        Unsupported: `version` has neither the call nor an older form of it, or no version can read the call.
    """
    try:
        return _older(call, version)
    except (IndexError, TypeError, ValueError, AttributeError):
        name = call.func.name if type(call.func) is Global else "a call"
        raise Unsupported(f"{name} has arguments that no version of torch can read", offset=call.position) from None


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
            raise Unsupported(f"torch {version.name} cannot read {row.name}, which is new in {Version(row.since).name}")
        call = form(call, version, losses)
    raise Unsupported(f"torch {version.name} has no form of {getattr(call.func, 'name', 'a call')}")


def _too_long(row: RebuildCall, call: Call, version: Version) -> bool:
    return row is calls.TENSOR_V2 and len(call.arguments) > 6 and version.number < calls.MARKS_SINCE


def _v3(call: Call, version: Version, losses: Losses) -> Call:
    """Rewrite the call as a `_rebuild_tensor_v2`, over a typed storage."""
    persid, dtype = call.arguments[0], call.arguments[6]
    row = dtypes.find(dtype.name) if type(dtype) is Global else None
    if row is None or row.storage_class is None or not version.has_dtype(row.name):
        raise Unsupported(f"torch {version.name} has no {getattr(dtype, 'name', 'such dtype')}")
    pid = persid.fields if type(persid) is PersId else ()
    nbytes = pid[4]
    if not isinstance(nbytes, int):
        raise ValueError("the storage has no size")
    if nbytes % row.itemsize:
        raise Unsupported(f"a storage of {nbytes} bytes does not hold whole {row.name} elements")
    count = nbytes // row.itemsize
    typed = PersId((*pid[:1], Global("torch", row.storage_class, 0), *pid[2:4], count, *pid[5:]), 0, -1)
    return calls.TENSOR_V2.call(typed, *call.arguments[1:6], *call.arguments[7:])


def _v2(call: Call, version: Version, losses: Losses) -> Call:
    """Rewrite the call without the marks of conjugate and negative views."""
    marks = [str(key) for key, value in pairs(call.arguments[6]) or () if value]
    if marks:
        raise Unsupported(f"torch {version.name} cannot read tensors marked as {', '.join(marks)}")
    return calls.TENSOR_V2.call(*call.arguments[:6])


def _parameter_with_state(call: Call, version: Version, losses: Losses) -> Call:
    reason = f"torch {version.name} saves no attributes with a parameter"
    losses += [(str(name), reason) for name, _ in attributes(call.arguments[3])]
    return calls.PARAMETER.call(*call.arguments[:3])


def _from_type(call: Call, version: Version, losses: Losses) -> Call:
    """Rewrite the call as the plain call inside it; the attributes of the object are lost."""
    func, cls, args, state = call.arguments[:4]
    if type(cls) is not Global or cls.name not in ("Tensor", "Parameter") or type(func) is not Global:
        raise Unsupported(f"torch {version.name} has no form of a tensor subclass")
    reason = f"torch {version.name} saves no attributes with a tensor"
    losses += [(str(name), reason) for name, _ in attributes(state)]
    return Call(func, args, "REDUCE", call.position)


_OLDER: dict[str, Callable[[Call, Version, Losses], Call]] = {
    calls.TENSOR_V3.name: _v3,
    calls.TENSOR_V2.name: _v2,
    calls.PARAMETER_WITH_STATE.name: _parameter_with_state,
    calls.FROM_TYPE.name: _from_type,
}
"""Name of a call -> function that rewrites it in its older form, which may have an older form again."""
