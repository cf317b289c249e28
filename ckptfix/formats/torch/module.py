"""Whole pickled modules, read from their inert nodes: the state dict that ``state_dict()`` of the module would return.

A module is pickled as its class and its ``__dict__``, which holds (torch/nn/modules/module.py, ``Module``)::

    _parameters, _buffers, _modules     mappings; None as a value is skipped
    _non_persistent_buffers_set         names of buffers that no state dict has; absent before torch 1.6
    _state_dict_hooks                   functions that may change the result of state_dict()

``state_dict()`` returns the parameters, then the persistent buffers, then the tensors of the submodules, in order; the
tensors of a shared module appear under each of its names. The class is needed only for changes by its own code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, TypeAlias

from ckptfix.checkpoint import Checkpoint
from ckptfix.checkpoint.address import join
from ckptfix.dataclass import dataclass
from ckptfix.errors import BadPickle, KeyConflict, Unsupported
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.formats.torch.call_classes import UNINITIALIZED
from ckptfix.formats.torch.common import maybe_pickled_object
from ckptfix.formats.torch.tensors import is_tensor
from ckptfix.pickles import Call, Dict, Global, PersId, Set, Text
from ckptfix.pickles.graph import Node, attributes, pairs
from ckptfix.pickles.rows import unfolded_children

if TYPE_CHECKING:
    from ckptfix.checkpoint.tree import Item

HOLDERS = ("_parameters", "_buffers", "_modules")
MAX_DEPTH = 1000
"""Deepest nesting of modules: ``state_dict()`` calls itself once per level, and Python stops there."""

MAX_TEXT = 1 << 26
"""Most characters in all names together: a few modules can contain each other so often that their names never end."""

_QUANTIZED = (
    *("torch.ao.nn.quantized.", "torch.nn.quantized.", "torch.ao.nn.sparse.quantized."),
    *("torch.ao.nn.intrinsic.quantized.", "torch.nn.intrinsic.quantized."),
)
_PACKED = frozenset(("linear", "linear_relu", "conv", "conv_relu", "conv_add", "embedding_ops", "rnn"))
"""Python modules of torch's quantized classes with packed weights, which ``_save_to_state_dict`` unpacks."""

_VERSIONS = {
    "torch.ao.nn.quantized.modules.linear.Linear": 3,
    "torch.ao.nn.quantized.modules.linear.LinearPackedParams": 3,
    "torch.ao.nn.quantized.dynamic.modules.linear.Linear": 4,
    "torch.ao.nn.quantized.dynamic.modules.rnn.LSTM": 2,
    "torch.ao.nn.quantized.dynamic.modules.rnn.GRU": 2,
    "torch.ao.nn.intrinsic.qat.modules.conv_fused.ConvBn1d": 2,
    "torch.ao.nn.intrinsic.qat.modules.conv_fused.ConvBn2d": 2,
    "torch.ao.nn.intrinsic.qat.modules.conv_fused.ConvBn3d": 2,
    "torch.ao.nn.intrinsic.qat.modules.conv_fused.ConvBnReLU1d": 2,
    "torch.ao.nn.intrinsic.qat.modules.conv_fused.ConvBnReLU2d": 2,
    "torch.ao.nn.intrinsic.qat.modules.conv_fused.ConvBnReLU3d": 2,
    "torch.ao.quantization.observer.MinMaxObserver": 3,
    "torch.ao.quantization.observer.MovingAverageMinMaxObserver": 3,
    "torch.ao.quantization.observer.PerChannelMinMaxObserver": 3,
    "torch.ao.quantization.observer.MovingAveragePerChannelMinMaxObserver": 3,
    "torch.ao.quantization.observer.HistogramObserver": 3,
}
"""``_version`` of classes if it is not 1 (torch 2.13); norms with running statistics are found by their buffers."""

NORM_BUFFERS = frozenset(("running_mean", "running_var", "num_batches_tracked"))
"""Buffers of a ``torch.nn.modules.batchnorm._NormBase`` since its ``_version`` 2; None if it keeps no statistics."""

_COMPILED = "torch._dynamo.eval_frame.OptimizedModule"
_SPECTRAL_HOOK = "torch.nn.utils.spectral_norm.SpectralNormStateDictHook"


Versions: TypeAlias = Mapping[str, int | Mapping[str, int]]
"""The ``_metadata`` of one module: ``version``, and the entries that its hooks add."""


@dataclass(frozen=True, slots=True)
class Module:
    """The result that ``state_dict()`` of a pickled module would return.

    Attributes:
        at: address of the module.
        cls: its class.
        tensors: (name, tensor) in order; a tied tensor is under several names.
        versions: module path -> its ``_metadata``.
        classes: classes outside torch among it and its submodules, by first appearance.
        findings: one finding for each way in which the state dict of the loaded module may differ from this one.
    """

    at: str
    cls: str
    tensors: tuple[tuple[str, Item], ...]
    versions: Mapping[str, Versions]
    classes: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()


PartsOf = Callable[[Node], dict[str, Node] | None]
ClassOf = Callable[[Node], str]


def class_of(node: Node) -> str:
    """Return the dotted name of the class of the object that a call creates; ``"?"`` if there is no class.

    Protocols 0 and 1 write ``copyreg._reconstructor(class, object, None)``, and torch before 1.6 pickled a module's
    class as the persistent id ``('module', class, file, source text)``.
    """
    if type(node) is not Call:
        return "?"
    func = node.func
    if type(func) is Global and func.name == "_reconstructor" and node.arguments:
        func = node.arguments[0]
    if type(func) is PersId and type(func.pid) is tuple and len(func.pid) > 1 and func.pid[0] == "module":
        func = func.pid[1]
    return func.full if type(func) is Global else "?"


def parts_of(node: Node) -> dict[str, Node] | None:
    """Return the attributes of a pickled module by name; None for a node that is not a module.

    They are its state, or a dict among the arguments of a function that rebuilds the module
    (``torch.fx.graph_module.reduce_graph_module``).
    """
    if type(node) is not Call:
        return None
    if class_of(node) == _COMPILED and type(node.args) is tuple and node.args and parts_of(node.args[0]) is not None:
        empty = Dict()
        inner = Dict()
        inner.items = [("_orig_mod", node.args[0])]
        return {"_parameters": empty, "_buffers": empty, "_modules": inner}
    arguments = node.args if type(node.args) is tuple else ()
    for state in (node.state, *(argument for argument in arguments if type(argument) is Dict)):
        found = {str(key): value for key, value in attributes(state) if type(key) is Text}
        if sum(name in found for name in HOLDERS) > 1:
            return found
    return None


def find_modules(root: Node) -> Iterator[tuple[str, Node]]:
    """Yield (address, node) of every outermost module below a node, in file order."""
    seen: set[int] = set()
    stack: list[tuple[str, Node]] = [("", root)]
    while stack:
        address, node = stack.pop()
        if type(node) not in (tuple, list, Dict, Call, Set) or id(node) in seen or is_tensor(node):
            continue
        seen.add(id(node))
        if parts_of(node) is not None:
            yield address, node
            continue
        if len(address) > MAX_DEPTH:
            continue
        below = [(join(address, name), child) for name, child in unfolded_children(node)]
        stack.extend(reversed(below))


def modules(checkpoint: Checkpoint) -> list[tuple[str, Item]]:
    """Return (address, object) of the whole modules of a torch checkpoint; an empty list for other formats."""
    parts = maybe_pickled_object(checkpoint)
    found = find_modules(parts.graph.root) if parts is not None else ()
    return [(at, parts.value(node)) for at, node in found] if parts is not None else []


def is_module(item: Item) -> bool:
    """Return whether an item is a whole pickled module."""
    from ckptfix.formats.torch.tree import node_of

    return parts_of(node_of(item)) is not None


@dataclass(slots=True)
class _Walk:
    class_of: ClassOf
    tensors: dict[str, Call] = field(default_factory=dict)
    versions: dict[str, Versions] = field(default_factory=dict)
    classes: dict[str, None] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    text: int = 0

    def name(self, prefix: str, key: Node, node: Node) -> str:
        """Return the full name of a part of `node`, and count its characters."""
        if type(key) is not Text and type(key) is not str:
            raise BadPickle("a part of the module has no name", where=prefix or None, offset=_offset(node))
        name = f"{prefix}{key}"
        self.text += len(name)
        if self.text > MAX_TEXT:
            message = "modules contain each other so often that their names never end"
            raise Unsupported(message, where=name[:80], offset=_offset(node))
        return name


def read_module(
    item: Item | Node, at: str = "", *, parts_of: PartsOf = parts_of, class_of: ClassOf = class_of
) -> Module:
    """Read the module that an item, or the node of one, represents.

    Args:
        at: its address.
        parts_of, class_of: functions that read the attributes and the class of a module; TorchScript has its own.

    Raises:
        BadPickle: it is not a module as torch pickles them: for example, a module contains itself, or a parameter
            is not a tensor.
        KeyConflict: two tensors have one name.
        Unsupported: modules are nested deeper than in any program, or their names never end.
    """
    from ckptfix.formats.torch.tree import like, node_of

    node = node_of(item)
    walk = _Walk(class_of)
    open_modules: set[int] = set()
    stack: list[tuple[str, Node, int] | int] = [("", node, 0)]
    while stack:
        step = stack.pop()
        if isinstance(step, int):
            open_modules.discard(step)
            continue
        prefix, module, depth = step
        where = prefix.removesuffix(".")[:200] or at or None
        if id(module) in open_modules:
            raise BadPickle("the module contains itself", where=where, offset=_offset(module))
        if depth > MAX_DEPTH:
            raise Unsupported(f"modules are nested more than {MAX_DEPTH:,} deep", where=where, offset=_offset(module))
        parts = parts_of(module)
        if parts is None or type(module) is not Call:
            walk.findings.append(_not_read(module, prefix))
            continue
        open_modules.add(id(module))
        stack.append(id(module))
        own = [*_own_tensors(walk, prefix, module, parts)]
        for name, tensor in own:
            if name in walk.tensors:
                message = "two tensors of the module have this name"
                raise KeyConflict(message, where=name, pairs=((name, (name, name)),))
            walk.tensors[name] = tensor
        _note(walk, prefix, module, parts)
        below = []
        for key, child in _mapping(parts, "_modules", module, where):
            path = walk.name(prefix, key, module)
            if child is not None:
                below.append((f"{path}.", child, depth + 1))
        stack.extend(reversed(below))
    tensors = tuple((name, like(item, tensor)) for name, tensor in walk.tensors.items())
    return Module(at, class_of(node), tensors, walk.versions, tuple(walk.classes), tuple(walk.findings))


def _own_tensors(walk: _Walk, prefix: str, module: Call, parts: Mapping[str, Node]) -> Iterator[tuple[str, Call]]:
    """Yield the parameters and persistent buffers of the module itself, without its submodules."""
    where = prefix.removesuffix(".") or None
    passing = {str(name) for name in _elements(parts.get("_non_persistent_buffers_set"))}
    for holder in ("_parameters", "_buffers"):
        for key, value in _mapping(parts, holder, module, where):
            name = walk.name(prefix, key, module)
            if value is None or (holder == "_buffers" and str(key) in passing):
                continue
            tensor = tensor_of(value)
            if tensor is None and type(value) is Call and class_of(value) in UNINITIALIZED:
                message = "was never initialized: the lazy module has seen no input, so it has no values"
                walk.findings.append(found("not-taken", message, where=name, offset=_offset(value)))
                continue
            if tensor is None:
                what = class_of(value) if type(value) is Call else type(value).__name__
                kind = "parameter" if holder == "_parameters" else "buffer"
                raise BadPickle(f"the {kind} is not a tensor but {what}", where=name, offset=_offset(value))
            yield name, tensor


_PARAMETER_CLASSES = frozenset((
    *("torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"),
    *("torch.autograd.variable.Variable", "torch.nn.Parameter"),
))  # fmt: skip


def tensor_of(node: Node) -> Call | None:
    """Return the node of the tensor in a parameter; None if the node holds no tensor.

    torch before 0.4 pickled a parameter as ``Parameter(tensor, requires_grad)`` and a variable as ``Variable(tensor)``.
    """
    if is_tensor(node):
        return node
    if type(node) is Call and class_of(node) in _PARAMETER_CLASSES and type(node.args) is tuple and node.args:
        return node.args[0] if is_tensor(node.args[0]) else None
    return None


def _mapping(parts: Mapping[str, Node], holder: str, module: Node, where: str | None) -> Sequence[tuple[Node, Node]]:
    """Return the items of the attribute `holder`; nothing if the module lacks it."""
    node = parts.get(holder)
    found = pairs(node)
    if found is None:
        if holder not in parts:
            return ()
        raise BadPickle(f"the module's {holder} is not a mapping", where=where, offset=_offset(module))
    return found


def _elements(node: Node) -> Sequence[Node]:
    """Return the elements of a set or list; protocols before 4 write a set as ``set([...])``."""
    if type(node) is Set:
        return node.elements
    if type(node) is Call and type(node.args) is tuple and node.args:
        node = node.args[0]
    return node if isinstance(node, (list, tuple)) else ()


def _note(walk: _Walk, prefix: str, module: Call, parts: Mapping[str, Node]) -> None:
    """Record the version of a module, and the changes that its own code would make to the state dict."""
    cls = walk.class_of(module)
    path = prefix.removesuffix(".")
    buffers = {str(key) for key, _ in pairs(parts.get("_buffers")) or ()}
    version = parts.get("_version")
    if type(version) is not int:
        version = 2 if buffers >= NORM_BUFFERS else _VERSIONS.get(cls, 1)
    versions: dict[str, int | Mapping[str, int]] = {"version": version}
    walk.versions[path] = versions
    if not cls.startswith(("torch.nn.", "torch.ao.", "torch.fx.", "torch._dynamo.", "torch.optim.")):
        walk.classes.setdefault(cls)
    if cls.startswith(_QUANTIZED) and cls.split(".")[-2] in _PACKED:
        message = f"{cls} keeps weights in packed form and writes them into a state dict by its own code"
        walk.findings.append(found("not-taken", message, where=path, offset=_offset(module)))
    spectral: dict[str, int] = {}
    for _, hook in pairs(parts.get("_state_dict_hooks")) or ():
        name = class_of(hook) if type(hook) is Call else getattr(hook, "full", "a function")
        if name == _SPECTRAL_HOOK:
            spectral[f"{_spectral_name(hook)}.version"] = 1
            versions["spectral_norm"] = spectral
        else:
            message = f"{name} may change the state dict of the loaded module, and was not run"
            walk.findings.append(found("hook-not-run", message, where=path, offset=_offset(module)))


def _spectral_name(hook: Node) -> str:
    """Return the name of the parameter to which a hook of ``torch.nn.utils.spectral_norm`` belongs."""
    for key, value in attributes(hook.state if type(hook) is Call else None):
        if key == "fn" and type(value) is Call:
            return next((str(name) for field_, name in attributes(value.state) if field_ == "name"), "weight")
    return "weight"


def _not_read(node: Node, prefix: str) -> Finding:
    """Return the finding for a submodule whose class pickles it in a private format.

    Raises:
        BadPickle: it is not an object at all.
    """
    path = prefix.removesuffix(".")
    if type(node) is not Call:
        raise BadPickle(f"the submodule is of type {type(node).__name__}", where=path or None, offset=_offset(node))
    message = f"{class_of(node)} is pickled in a private format (__getstate__ or __reduce__); its tensors are left out"
    return found("not-taken", message, where=path, offset=_offset(node))


def _offset(node: Node) -> int | None:
    return getattr(node, "position", None)
