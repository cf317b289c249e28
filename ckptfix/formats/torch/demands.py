"""Calls that ``torch.load(weights_only=True)`` makes and that can only fail, or take memory that the file has not.

weights_only=True calls a few functions of Python with whatever arguments the pickle gives. The functions are known, so
are the arguments that they take: one table, none of them ever called.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from ckptfix.checkpoint import TensorEntry, dtypes
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.formats.torch import weights_only
from ckptfix.formats.torch.tensors import LAYOUTS
from ckptfix.pickles import Call, Dict, Global, Graph, Set, Text
from ckptfix.pickles.graph import Node
from ckptfix.pickles.reemit import every_node

GIANT = 1 << 36
"""Bytes of one value, 64 GiB, that are a bomb where the file has not a thousandth of them."""
TIMES = 1000


def findings(graph: Graph) -> Iterator[Finding]:
    """Calls of plain Python values that no unpickler can make, each with its offset."""
    for node in every_node(graph.root):
        if type(node) is not Call or type(node.func) is not Global:
            continue
        name = weights_only.canonical(node.func)
        takes = _TAKES.get(name)
        if takes is None:
            continue
        size = node.arguments[0] if len(node.arguments) == 1 else None
        giant = max(1 << 30, TIMES * (graph.end - graph.start))
        if name == "builtins.bytearray" and type(size) is int and size >= giant:
            message = f"{name}({size:#x}): torch.load asks for that many bytes of memory"
            yield found("memory-bomb", message, where="data.pkl", offset=node.position)
        elif type(node.args) not in (list, Dict) and not (type(node.args) is tuple and takes(node.args)):
            # weights_only=True takes the items of a list, or the keys of a dict, for the arguments.
            message = f"{name} with arguments that it does not take: torch.load fails there"
            yield found("bad-call", message, where="data.pkl", offset=node.position)


def of_tensors(entries: Iterable[TensorEntry]) -> Iterator[Finding]:
    """Tensors that torch refuses to make, and tensors of far more bytes than their storage, by a stride such as 0."""
    for entry in entries:
        if (entry.kind != "dense" or entry.requires_grad or entry.detail) and (why := _refused(entry)):
            yield found("bad-call", f"{why}: torch.load fails there", where=entry.name)
        if entry.storage is None or entry.kind not in ("dense", "quantized") or entry.numel < GIANT >> 4:
            continue
        if entry.nbytes >= max(GIANT, TIMES * entry.storage.nbytes):
            message = f"{entry.nbytes:,} bytes over a storage of {entry.storage.nbytes:,}: a copy asks for that memory"
            yield found("memory-bomb", message, where=entry.name)


def _refused(entry: TensorEntry) -> str:
    """Why torch makes no such tensor; empty where nothing is known against it."""
    row = dtypes.find(entry.dtype)
    if entry.requires_grad and row is not None and row.family not in ("float", "complex"):
        return f"a tensor of {entry.dtype} that requires a gradient"
    if "conj" in entry.detail.split(", ") and row is not None and row.family != "complex":
        return f"the conjugate of a tensor of {entry.dtype}"
    values = entry.detail.split(", ")
    if entry.kind == "quantized" and values[0].startswith("per_channel"):
        if not values[-1].isdecimal() or int(values[-1]) >= len(entry.shape):
            return f"quantized along axis {values[-1]}, of {len(entry.shape)}"
    elif entry.kind == "quantized" and not -(1 << 63) <= int(values[-1]) < 1 << 63:
        return f"a zero point of {values[-1]}"
    if entry.kind == "sparse" and len(entry.parts) == 2:
        indices, held = (part.shape for part in entry.parts)
        if len(indices) != 2 or not held or indices[0] + len(held) - 1 != len(entry.shape):
            return f"a sparse tensor of {len(entry.shape)} dimensions with indices {list(indices)}"
    if entry.kind == "nested" and len(entry.parts[0].shape) != 1:
        return "a nested tensor whose values have several dimensions"
    return ""


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
    if len(args) == 1:
        return type(args[0]) is int or (type(args[0]) is Text and _DEVICE.fullmatch(args[0]) is not None)
    return len(args) == 2 and type(args[0]) is Text and type(args[1]) is int


_DEVICE = re.compile(r"[a-z_]+(?::\d{1,3})?")


def _encode(args: tuple[Node, ...]) -> bool:
    texts = [value for value in args if type(value) is Text]
    if not 0 < len(args) < 3 or len(texts) != len(args):
        return False
    return texts[-1] not in ("latin1", "latin-1") or len(args) == 1 or max(texts[0], default="") < "\u0100"


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
}
"""Call -> whether it takes these arguments. The classes of weights_only=True that a checkpoint calls itself."""
