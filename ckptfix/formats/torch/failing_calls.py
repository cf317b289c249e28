"""Calls by ``torch.load(weights_only=True)`` that can only fail, or that allocate far more than the file holds.

weights_only=True calls a few Python functions with whatever arguments the pickle states. The functions and the
arguments that they accept are known: they are in one table, and none of them is ever called.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from ckptfix.checkpoint import TensorEntry, dtypes
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.formats.torch import calls, weights_only
from ckptfix.formats.torch.calls import RebuildCall
from ckptfix.formats.torch.tensors import KINDS, LAYOUTS, is_tensor
from ckptfix.pickles import Call, Dict, Global, Graph, Set, Text
from ckptfix.pickles.graph import Node, attributes, pairs
from ckptfix.pickles.reemit import every_node
from ckptfix.pickles.rows import rows_of

GIANT = 1 << 36
"""Length in bytes (64 GiB) of a value that is a bomb if the file has less than a thousandth of it."""
TIMES = 1000


def findings(graph: Graph) -> Iterator[Finding]:
    """Yield findings for values that no unpickler can build: calls with wrong arguments, unhashable keys."""
    # Folded calls are skipped: they are exactly as torch writes them.
    for node in every_node(graph.root, folded=False):
        if type(node) in _HASHING and any(map(_is_unhashable, _keys(node))):
            place = node.position if type(node) is Call else graph.start
            message = "an unhashable dict key or set element, such as a list: torch.load fails on it"
            yield found("bad-call", message, where="data.pkl", offset=place)
        if type(node) is not Call or type(node.func) is not Global:
            continue
        name = weights_only.canonical(node.func)
        row = calls.of(node.func)
        if row is not None and row.accepted and (why := _misused(row, node)):
            message = f"{name} {why}: torch.load fails on it, or returns a wrong tensor"
            yield found("bad-call", message, where="data.pkl", offset=node.position)
        takes = _TAKES.get(name)
        if takes is None:
            continue
        size = node.arguments[0] if len(node.arguments) == 1 else None
        giant = max(1 << 30, TIMES * (graph.end - graph.start))
        sized = name in ("builtins.bytearray", "torch.storage.UntypedStorage")
        if sized and type(size) is int and size >= giant:
            message = f"{name}({size:#x}): torch.load would allocate that many bytes of memory"
            yield found("memory-bomb", message, where="data.pkl", offset=node.position)
        elif node.state is not None and name not in _WITH_STATE and not _is_nothing(node.state):
            message = f"{name} has a state, which it does not accept: torch.load fails on it"
            yield found("bad-call", message, where="data.pkl", offset=node.position)
        elif type(node.args) not in (list, Dict) and not (type(node.args) is tuple and takes(node.args)):
            # weights_only=True accepts a list, or the keys of a dict, as the arguments.
            message = f"{name} has arguments that it does not accept: torch.load fails on it"
            yield found("bad-call", message, where="data.pkl", offset=node.position)


def of_tensors(entries: Iterable[TensorEntry]) -> Iterator[Finding]:
    """Yield findings for tensors that torch refuses to build, and for those that a stride of 0 makes huge."""
    for entry in entries:
        if (entry.kind != "dense" or entry.requires_grad or entry.detail) and (why := _refused(entry)):
            yield found("bad-call", f"{why}: torch.load fails on it", where=entry.name)
        if entry.storage is None or entry.numel < GIANT >> 4:
            continue
        if entry.nbytes >= max(GIANT, TIMES * entry.storage.nbytes):
            message = f"{entry.nbytes:,} bytes on a storage of {entry.storage.nbytes:,}: a copy would allocate them all"
            yield found("memory-bomb", message, where=entry.name)


def _refused(entry: TensorEntry) -> str:
    """Return why torch cannot build such a tensor; an empty string if no reason is known."""
    row = dtypes.find(entry.dtype)
    if entry.requires_grad and row is not None and row.family not in ("float", "complex"):
        return f"a tensor of {entry.dtype} cannot require a gradient"
    if "conj" in entry.lazy and row is not None and not row.is_complex:
        return f"a tensor of {entry.dtype} has no conjugate"
    return KINDS[entry.kind].refused(entry)


def _rows(args: tuple[Node, ...]) -> bool:
    if len(args) != 1 or type(args[0]) in (Dict, Call):
        return len(args) < 2
    return isinstance(args[0], (list, tuple)) and all(
        isinstance(row, (list, tuple, str)) and len(row) == 2 for row in args[0]
    )


def _values(args: tuple[Node, ...]) -> bool:
    return not args or (len(args) == 1 and type(args[0]) in (list, tuple, Set, Dict, Call, Text, bytes))


def _bytearray(args: tuple[Node, ...]) -> bool:
    if len(args) == 2:
        return type(args[0]) is Text and type(args[1]) is Text
    one = args[0] if args else b""
    if isinstance(one, (list, tuple)):
        return all(type(value) is int and 0 <= value < 256 for value in one)
    return len(args) < 2 and ((type(one) is int and one >= 0) or type(one) in (bytes, bytearray, Call))


def _sizes(args: tuple[Node, ...]) -> bool:
    if len(args) != 1 or not isinstance(args[0], (list, tuple)):
        return not args
    return all(type(size) is int for size in args[0])


def _device(args: tuple[Node, ...]) -> bool:
    if not args or type(args[0]) is not Text or _DEVICE.fullmatch(args[0]) is None:
        # A number alone is an index of the accelerator of the loading machine, if it has one.
        return len(args) == 1 and type(args[0]) is Call and _is_device(args[0])
    return len(args) == 1 or (
        len(args) == 2 and ":" not in args[0] and (args[1] is None or (type(args[1]) is int and 0 <= args[1] < 1 << 63))
    )


_DEVICES = (
    *("cpu", "cuda", "ipu", "xpu", "mkldnn", "opengl", "opencl", "ideep", "hip", "ve", "fpga", "maia", "xla", "lazy"),
    *("vulkan", "mps", "meta", "hpu", "mtia", "privateuseone"),
)
"""Device names of torch (c10/core/Device.cpp); a library's backend renames the last one."""

_DEVICE = re.compile(rf"(?:{'|'.join(_DEVICES)})(?::(?:0|[1-9]\d{{0,2}}))?")


def _is_device(node: Node) -> bool:
    return type(node) is Call and type(node.func) is Global and node.func.full == "torch.device"


_HASHING = frozenset((Dict, Call, Set))

_UNHASHABLE = ("collections.OrderedDict", "collections.Counter", "builtins.set", "builtins.bytearray")


def _keys(node: Node) -> Iterator[Node]:
    """Yield the nodes that are hashed when this node is built: keys of a mapping, elements of a set."""
    rows: Node = None
    if type(node) is Dict or type(node) is Call:
        unread = rows_of(node)
        # Keys of folded calls are text.
        yield from (key for key, _ in (node.items or () if unread is None else unread.others()))
    elif type(node) is Set:
        yield from node.elements
    if type(node) is Call:
        rows = node.arguments[0] if node.arguments and type(node.func) is Global else None
        name = weights_only.canonical(node.func) if type(node.func) is Global else ""
        if isinstance(rows, (list, tuple)) and name in ("builtins.set", "builtins.frozenset", "collections.Counter"):
            yield from rows
        elif isinstance(rows, (list, tuple)) and name == "collections.OrderedDict":
            yield from (row[0] for row in rows if isinstance(row, (list, tuple)) and row)


def _is_unhashable(key: Node) -> bool:
    if type(key) is Text:
        return False
    stack = [key]
    seen: set[int] = set()
    while stack:
        node = stack.pop()
        if type(node) is tuple and id(node) not in seen:
            seen.add(id(node))
            stack += node
        elif type(node) in (list, Dict, bytearray) or (type(node) is Set and node.kind == "set"):
            return True
        func = node.func if type(node) is Call else None
        if type(func) is Global and weights_only.canonical(func) in _UNHASHABLE:
            return True
    return False


def _misused(row: RebuildCall, node: Call) -> str:
    """Return why torch cannot make this call; an empty string if nothing is wrong.

    Faults that a reader of tensors refuses are not checked here.
    """
    args = node.arguments
    if row.takes is not None and not row.takes[0] <= len(args) <= row.takes[1]:
        return f"is called with {len(args)} arguments"
    if node.state is not None:
        return "has a state set on its tensor"
    if row.requires_grad is not None and type(args[row.requires_grad]) is not bool:
        return "has a requires_grad that is neither true nor false"
    if row is calls.TENSOR_V3 and args[4] is True:
        return "has a requires_grad of True, which it cannot restore"
    if row.marks is not None and len(args) > row.marks and not _are_marks(args[row.marks]):
        return "has marks that are not a dict"
    if row.device is not None and not (_is_device(args[row.device]) or _device((args[row.device],))):
        return "names a device that torch does not have"
    if row is calls.FROM_NUMPY and not _is_of_numpy(args[0]):
        return "is called on something that is not an array"
    if row is calls.FROM_CPU_TENSOR and not is_tensor(args[0]):
        return "is called on something that is not a tensor"
    if row in (calls.WRAPPER, calls.FROM_TYPE) and not _is_class(args[0 if row is calls.WRAPPER else 1]):
        return "names something that is not a class"
    if row.dtype is not None and (type(args[row.dtype]) is not Global or not _is_dtype(args[row.dtype])):
        return "names something that is not a dtype"
    cls = args[1] if row is calls.FROM_TYPE else None
    if type(cls) is Global and not weights_only.accepted(weights_only.canonical(cls)):
        return ""  # such a class, as ShardedTensor, may have a __setstate__ that takes any state
    return "" if row.state is None else _misset(args[row.state])


def _is_class(node: Node) -> bool:
    """Return whether this may be a class of tensors; the set of other classes is unknown."""
    if type(node) is not Global:
        return False
    name = weights_only.canonical(node)
    return name.endswith(("Tensor", "Parameter")) or not weights_only.accepted(name)


def _is_dtype(node: Node) -> bool:
    return type(node) is Global and node.name.islower() and node.name != "device"


def _is_of_numpy(node: Node) -> bool:
    return type(node) is Call and type(node.func) is Global and node.func.module.partition(".")[0] == "numpy"


def _are_marks(node: Node) -> bool:
    rows = pairs(node)
    return node is None or (rows is not None and all(type(key) is Text and type(value) is bool for key, value in rows))


_FIXED = frozenset((
    *("H", "T", "_base", "_cdata", "_version", "device", "dtype", "grad_fn", "imag", "is_leaf", "itemsize", "layout"),
    *("mH", "mT", "name", "nbytes", "ndim", "output_nr", "real", "retains_grad", "shape", "__class__", "__dict__"),
))  # fmt: skip
"""Attributes that every tensor has, and that cannot be set."""


def _misset(state: Node) -> str:
    """Return the fault of the attributes that are set on a tensor; an empty string if there is no fault."""
    mappings = state if type(state) is tuple else (state,)
    if len(mappings) not in (1, 2) or any(part is not None and pairs(part) is None for part in mappings):
        return "has a state that is not a dict" if state not in (None, False, []) else ""
    for key, value in attributes(state):
        if type(key) is not Text:
            continue
        if key == "data" or (key == "grad" and value is not None and not is_tensor(value)):
            return f"sets {key} as an attribute of its tensor"
        if (key == "requires_grad" and type(value) is not bool) or key in _FIXED:
            return f"sets {key} as an attribute of its tensor"
    return ""


def _encode(args: tuple[Node, ...]) -> bool:
    texts = [value for value in args if type(value) is Text]
    if not 0 < len(args) < 3 or len(texts) != len(args):
        return False
    return texts[-1] not in ("latin1", "latin-1") or len(args) == 1 or max(texts[0], default="") < "\u0100"


def _parameter(args: tuple[Node, ...]) -> bool:
    of_tensor = not args or args[0] is None or type(args[0]) is Call
    return of_tensor and len(args) < 3 and all(type(value) is bool for value in args[1:])


_TAKES: dict[str, Callable[[tuple[Node, ...]], bool]] = {
    "collections.OrderedDict": _rows,
    "collections.Counter": _values,
    "builtins.set": _values,
    "builtins.bytearray": _bytearray,
    "builtins.complex": lambda args: len(args) < 3 and all(type(value) in (int, float, Text) for value in args),
    "torch.Size": _sizes,
    "torch.device": _device,
    "torch.serialization._get_layout": lambda args: (
        len(args) == 1 and type(args[0]) is Text and args[0].removeprefix("torch.") in (*LAYOUTS, "strided", "jagged")
    ),
    "_codecs.encode": _encode,
    "torch.storage.UntypedStorage": lambda args: not args or (len(args) == 1 and type(args[0]) is int and args[0] >= 0),
    "torch.nn.parameter.Parameter": _parameter,
    "torch.storage.TypedStorage": lambda args: not args,
    **{f"torch.{row.storage_class}": lambda args: False for row in dtypes.TABLE if row.storage_class},
}
"""Function of weights_only=True that a pickle can call -> predicate that tells whether it accepts these arguments."""

_WITH_STATE = (
    *("collections.OrderedDict", "collections.Counter", "builtins.bytearray", "builtins.set"),
    "torch.nn.parameter.Parameter",
)


def _is_nothing(state: Node) -> bool:
    """Return whether BUILD with this state sets nothing."""
    return state in (None, False, (), [], "", b"", 0) or (type(state) in (Dict, Call) and pairs(state) == [])
