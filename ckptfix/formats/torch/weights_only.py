"""Rules of ``torch.load(weights_only=True)``: one table of the globals that it accepts, and a verdict on a pickle.

Source: ``_get_allowed_globals`` and the opcodes of ``Unpickler.load`` in torch/_weights_only_unpickler.py of
torch 2.13; a test compares this table with the installed one. Nothing here proves that a file is safe: it
predicts only what one unpickler would do with it.
"""

from __future__ import annotations

from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Iterator

from ckptfix.checkpoint import dtypes
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.formats.torch import calls
from ckptfix.pickles import Global, Graph
from ckptfix.pickles import opcodes as op

_SINGLE = (
    *("collections.OrderedDict", "collections.Counter", "torch.nn.parameter.Parameter", "torch.Size", "torch.Tensor"),
    *("torch.serialization._get_layout", "torch.device", "_codecs.encode", "builtins.bytearray", "builtins.set"),
    *("builtins.complex", "torch.storage.UntypedStorage", "torch.storage.TypedStorage"),
)
_SCHEMES = (
    *("per_channel_affine", "per_channel_affine_float_qparams", "per_channel_symmetric"),
    *("per_tensor_affine", "per_tensor_symmetric"),
)
_TENSORS = ("BFloat16", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")
_CUDA_STORAGES = (*_TENSORS, "Bool", "ComplexDouble", "ComplexFloat")
ALLOWED: frozenset[str] = frozenset(
    {row.full for row in calls.TABLE if row.accepted}
    | set(_SINGLE)
    | {f"torch.{row.name}" for row in dtypes.TABLE}
    | {f"torch.{row.storage_class}" for row in dtypes.TABLE if row.storage_class}
    | {f"torch.{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)}
    | {f"torch.{scheme}" for scheme in _SCHEMES}
    | {f"torch.{device}{name}Tensor" for device in ("", "cuda.") for name in (*_TENSORS, "Bool")}
    | {f"torch.{device}sparse.{name}Tensor" for device in ("", "cuda.") for name in _TENSORS}
    | {f"torch.cuda.{name}Storage" for name in _CUDA_STORAGES}
)


def canonical(node: Global) -> str:
    """Return ``module.name`` under its Python 3 name, as every unpickler translates it for protocols up to 2."""
    renamed = NAME_MAPPING.get((node.module, node.name))
    if renamed is not None:
        return ".".join(renamed)
    return f"{IMPORT_MAPPING.get(node.module, node.module)}.{node.name}"


def accepted(full: str) -> bool:
    """Return whether the unpickler of weights_only=True accepts the global `full`, ``"module.name"``, by itself."""
    return full in ALLOWED


def refusal(graph: Graph) -> str | None:
    """Return why ``torch.load(weights_only=True)`` would refuse this pickle, or None if no reason is known."""
    for node in graph.globals:
        if not accepted(canonical(node)):
            return f"unsupported global {canonical(node)}"
    opcode = refused_opcode(graph)
    return None if opcode is None else f"unsupported {opcode[1]}"


def refused_opcode(graph: Graph, *, strict: bool = True) -> tuple[int, str] | None:
    """Return (offset, description) of the first opcode that the unpickler of weights_only=True refuses by itself.

    Without `strict`, operands do not count: if a global is refused, its uses are refused too.
    """
    beyond = set(graph.rare) - op.WEIGHTS_ONLY
    found = [(graph.rare[code], f"opcode {op.NAMES[code]} (pickle protocol {graph.protocol})") for code in beyond]
    found += [(place, f"opcode: {what}") for place, what in graph.misuses[:1] if strict]
    return min(found, default=None)


def global_findings(graph: Graph) -> Iterator[Finding]:
    """Yield a finding for each global outside the table, with the offset of its first use in the pickle."""
    seen = set()
    for node in graph.globals:
        name = canonical(node)
        if name not in seen and not accepted(name):
            seen.add(name)
            message = "the pickle contains a class or function that weights_only=True refuses; it was not imported"
            yield found("foreign-global", message, where=name, offset=node.start, severity="warning")
