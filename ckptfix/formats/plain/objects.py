"""Calls and objects as plain values: tensors are kept, known classes have a rule, and others keep their state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from sys import stdlib_module_names

from ckptfix.errors import CkptfixError
from ckptfix.formats import numpy_pickles
from ckptfix.formats.numpy_pickles import BadValue, new_dict
from ckptfix.formats.plain import arrays
from ckptfix.formats.plain.output import ConvertedObject
from ckptfix.formats.plain.report import DROPPED, Made, Steps
from ckptfix.formats.plain.stdlib import LISTS, MAPPINGS, RULES, STATEFUL
from ckptfix.formats.torch import calls, weights_only
from ckptfix.formats.torch import module as torch_module
from ckptfix.formats.torch.call_classes import NEW, RECONSTRUCT, UNINITIALIZED, class_name
from ckptfix.formats.torch.state import state_rows
from ckptfix.formats.torch.tensors import is_tensor
from ckptfix.formats.torch.tree import node_of
from ckptfix.pickles import Call, Dict, Global, PersId, Set
from ckptfix.pickles.graph import Node, attributes, is_attributes, pairs

WHOLE_MODULE = "a whole module"
EXTRACT = f"{WHOLE_MODULE}; run `ckptfix extract` to get its weights"
NEVER = {
    "functools.partial": "it is a function",
    "functools.partialmethod": "it is a function",
    "builtins.object": "it holds nothing",
    **dict.fromkeys(UNINITIALIZED, "it was never initialized: the lazy module has seen no input, so it has no values"),
    "torch.storage._load_from_bytes": "it is a torch file inside the pickle, for a tensor not saved by torch.save",
}
"""Classes whose content is always dropped, with the reason."""


def converted(out: ConvertedObject, call: Call) -> Steps:
    """Convert an object. The steps are like all those of `convert`."""
    name = class_name(call)
    if name is None:
        return out.drop("an object", "its class or function is computed")
    args = call.args if type(call.args) is tuple else ()
    special = _SPECIAL.get(numpy_pickles.old_name(name))
    if special is not None:
        return (yield from special(out, call, args))
    if weights_only.accepted(name) and type(call.func) is Global and name == weights_only.canonical(call.func):
        return (yield from _allowed(out, call, name, args))
    row = RULES.get(name)
    if row is not None and call.items is None and call.elements is None:
        rule, became = row
        value = rule(args, call.state)
        out.changed(name, became)
        if isinstance(value, bytes):
            return out.raw(value)
        if isinstance(value, (list, tuple, Dict, Call)):
            return (yield None, value)
        return value
    return (yield from _foreign(out, call, name, args))


def _allowed(out: ConvertedObject, call: Call, name: str, args: tuple[Node, ...]) -> Steps:
    """Convert the arguments of a call that weights_only=True accepts, and keep the call."""
    if name == "collections.OrderedDict":
        return (yield from _ordered_dict(out, call, pairs(call) or []))
    if name == "_codecs.encode" and args and (dropped := out.refused(args[0])) is not None:
        return dropped
    new_args = yield None, args
    if new_args is DROPPED:
        return DROPPED
    how = call.how if call.how in ("REDUCE", "NEWOBJ") else "REDUCE"
    if call.kwargs:
        out.drop_at("kwargs", f"arguments of {name}", "no unpickler may pass keyword arguments to it")
    rest: list[Made] = []
    for part in (call.items, call.elements, call.state):
        rest.append(None if part is None else (yield None, part))
    items, elements, state = rest
    if elements is not None or (items is not None and name != "collections.Counter"):
        return out.drop(name, "it has items that no unpickler may set on it")
    if new_args is args and how == call.how and items is None and state is call.state:
        return out.older(call)
    made = Call(call.func, new_args, how, call.position)
    if isinstance(items, list):
        made.items = [(row[0], row[1]) for row in items if type(row) is tuple and len(row) == 2]
    made.state = None if state is DROPPED else state
    return out.older(made)


def _ordered_dict(out: ConvertedObject, call: Call, rows: Sequence[tuple[Node, Node]]) -> Steps:
    made = Call(Global("collections", "OrderedDict", 0), (), "REDUCE", 0)
    made.items = []
    out.done[id(call)] = made
    out.keep_alive.append(call)
    yield from out.fill(made.items, rows)
    named = _attributes(call.state)
    if call.elements or call.kwargs or (call.items and call.args) or not (named or _is_empty(call.state)):
        out.drop("a value that was set on an OrderedDict", "it is neither an item nor an attribute of it")
    if named:
        state: list[tuple[Node, Node]] = []
        yield from out.fill(state, named)
        made.state = new_dict(state) if state else None
    return made


def _foreign(out: ConvertedObject, call: Call, name: str, args: tuple[Node, ...]) -> Steps:
    """Convert an object of an unknown class to its items, its elements, its attributes, or its single argument."""
    func = weights_only.canonical(call.func) if type(call.func) is Global else ""
    state = call.state
    base: Node = None
    if func == RECONSTRUCT:
        base = args[2] if len(args) > 2 else None
        args = ()
    elif func in NEW:
        args = args[1:]
    named = _attributes(state)
    if name in NEVER:
        return out.drop(name, NEVER[name])
    if torch_module.parts_of(call) is not None:
        return (yield from _module(out, call, name))
    if name.startswith("omegaconf."):
        for key, value in named:
            if key in ("_content", "_val"):
                out.changed(name, _shape_of(value))
                return (yield None, value)
    mapping = _items_of(call, base)
    if mapping is not None or name in MAPPINGS:
        beside = _beside(args if call.items else args[1:], call.kwargs, call.elements, state, named)
        return (yield from _mapping(out, name, mapping or [], named, beside))
    if call.elements is not None or type(base) is list or name in LISTS:
        first = _parts(args) if name in LISTS else ()
        elements = [*first, *(base if type(base) is list else ()), *(call.elements or ())]
        beside = _beside(args[1:] if first else args, call.kwargs, None, state, named)
        return (yield from _list(out, name, elements, [*named, *beside]))
    values = [base] if base is not None else list(args)
    kwargs = pairs(call.kwargs) or []
    if not named and not _is_empty(state) and not values and not kwargs:
        out.changed(name, _shape_of(state))
        return (yield None, state)
    if func == name and call.how == "REDUCE" and not _stands_for_itself(name, state):
        return out.drop(name, "the file does not hold the value that this function or class of Python returns")
    if state is None and not kwargs and values:
        single = len(values) == 1
        out.changed(name, _shape_of(values[0]) if single else "tuple")
        return (yield None, values[0] if single else tuple(values))
    out.changed(name, "dict")
    rows: list[tuple[Node, Node]] = [("args", tuple(values))] if values else []
    rows += [*kwargs, *(named or ([] if _is_empty(state) else [("state", state)]))]
    made: list[tuple[Node, Node]] = []
    yield from out.fill(made, _distinct(rows))
    return new_dict(made)


def _is_empty(state: Node) -> bool:
    """Return whether a state sets nothing."""
    if isinstance(state, (tuple, list)):
        return all(part is None for part in state)
    return state is None or pairs(state) == []


_OBJECTS = (Call, PersId, Dict, Set, tuple, list)


def _beside(
    args: tuple[Node, ...], kwargs: Node, elements: Node, state: Node, named: Sequence[tuple[Node, Node]]
) -> list[tuple[Node, Node]]:
    """Return (name, value) for the objects in an object other than its items and attributes."""
    objects = tuple(part for part in args if type(part) in _OBJECTS and part != ())
    rows = [("args", objects), *(pairs(kwargs) or []), ("elements", elements)]
    rows = [(name, value) for name, value in rows if type(value) in _OBJECTS and value not in ((), [])]
    return rows if named or _is_empty(state) else [*rows, ("state", state)]


def _distinct(rows: Sequence[tuple[Node, Node]]) -> list[tuple[Node, Node]]:
    """Make all keys different, so that no value replaces another."""
    names: set[str] = set()
    out: list[tuple[Node, Node]] = []
    for key, value in rows:
        if isinstance(key, str):
            name, plain = str(key), str(key)
            while name in names:
                name += "_"
            names.add(name)
            out.append((key if name == plain else name, value))
        else:
            out.append((key, value))
    return out


def _module(out: ConvertedObject, call: Call, name: str) -> Steps:
    """Replace a module inside a checkpoint by its state dict; drop a module that is the whole checkpoint."""
    if all(part is None for part in out.labels):
        return out.drop(name, EXTRACT)
    try:
        found = torch_module.read_module(call)
    except CkptfixError as error:
        return out.drop(name, f"it is a whole module that cannot be read ({error.message})")
    out.changed(name, "its state_dict()")
    out.drop_at(None, name, "it is a whole module; only its state_dict() is kept")
    made = Call(Global("collections", "OrderedDict", 0), (), "REDUCE", 0)
    made.items = []
    yield from out.fill(made.items, [(path, node_of(tensor)) for path, tensor in found.tensors])
    if found.versions:
        versions = Call(Global("collections", "OrderedDict", 0), (), "REDUCE", 0)
        versions.items = []
        rows = [(path, _stated(own)) for path, own in found.versions.items()]
        yield from out.fill(versions.items, rows)
        made.state = new_dict([("_metadata", versions)])
    return made


def _stated(own: torch_module.Versions) -> Dict:
    """Return the versions that a module states, as nodes."""
    return new_dict((key, value if isinstance(value, int) else new_dict(value.items())) for key, value in own.items())


def _attributes(state: Node) -> list[tuple[Node, Node]]:
    """Return the `attributes` of a state that has nothing else; a name that slots repeat is changed."""
    return _distinct(attributes(state)) if is_attributes(state) else []


def _each_named_once(state: Node) -> Node:
    """Return the attributes of a tensor; as a dict if slots repeat a name, because torch sets only the last one."""
    named = _attributes(state)
    return state if [key for key, _ in named] == [key for key, _ in attributes(state)] else new_dict(named)


def _items_of(call: Call, base: Node) -> list[tuple[Node, Node]] | None:
    if call.items is not None:
        return pairs(call)
    if type(base) is Dict:
        return pairs(base)
    return None


def _mapping(
    out: ConvertedObject,
    name: str,
    rows: Sequence[tuple[Node, Node]],
    named: Sequence[tuple[Node, Node]],
    beside: Sequence[tuple[Node, Node]],
) -> Steps:
    """Convert a mapping of an unknown class; attributes become items, except ``_metadata`` of a state dict."""
    known = {str(key): value for key, value in rows if isinstance(key, str)}
    if any(key == "_metadata" for key, _ in named):
        out.changed(name, "OrderedDict")
        made = Call(Global("collections", "OrderedDict", 0), (), "REDUCE", 0)
        made.items = []
        state: list[tuple[Node, Node]] = []
        yield from out.fill(made.items, _distinct([*rows, *beside]))
        yield from out.fill(state, named)
        made.state = new_dict(state)
        return made
    out.changed(name, "dict")
    found: list[tuple[Node, Node]] = []
    # In transformers' ModelOutput each item is an attribute too; a different value of the same name is kept as well.
    more = [row for row in named if row[0] not in known or (row[1] is not known[row[0]] and type(row[1]) in _OBJECTS)]
    yield from out.fill(found, _distinct([*rows, *more, *beside]))
    return new_dict(found)


def _list(out: ConvertedObject, name: str, elements: list[Node], named: Sequence[tuple[Node, Node]]) -> Steps:
    out.changed(name, "list")
    made: list[Node] = []
    yield from out.listed(made, elements)
    for key, _ in named:
        out.drop_at(str(key), f"an attribute of {name}", "a list has no attributes")
    return made


def _stands_for_itself(name: str, state: Node) -> bool:
    """Return whether a call's arguments describe its result, as those of most classes do (an enum, an exception)."""
    module, _, last = name.rpartition(".")
    if name in STATEFUL or (state is not None and not module.startswith("builtins")):
        return True
    return last.lstrip("_")[:1].isupper() and module.partition(".")[0] not in stdlib_module_names


def _shape_of(node: Node) -> str:
    """Name the plain type that a node will have."""
    if isinstance(node, str):
        return "str"
    if type(node) is Dict:
        return "dict"
    if type(node) is Call:
        return "tensor" if is_tensor(node) else "value"
    return "None" if node is None else type(node).__name__


def _frozenset(out: ConvertedObject, call: Call, args: tuple[Node, ...]) -> Steps:
    made = yield None, Call(Global("__builtin__", "set", 0), (list(_parts(args)),), "REDUCE", 0)
    out.changed("frozenset", "set")
    return made


def _set(out: ConvertedObject, call: Call, args: tuple[Node, ...]) -> Steps:
    return (yield None, Set("set", list(_parts(args))))


def _parts(args: tuple[Node, ...]) -> Sequence[Node]:
    """Return the only argument of a call if it is a list or tuple, otherwise an empty one."""
    return args[0] if args and isinstance(args[0], (list, tuple)) else ()


def _from_type(out: ConvertedObject, call: Call, args: tuple[Node, ...]) -> Steps:
    """Convert ``_rebuild_from_type_v2(func, type, args, state)``; an unknown class becomes a plain tensor."""
    if len(args) < 4:
        raise BadValue("a tensor subclass without its arguments")
    func, cls, inner_args, state = args[:4]
    known = type(cls) is Global and weights_only.accepted(weights_only.canonical(cls))
    wrapper = calls.of(func) is calls.WRAPPER
    plain = type(func) is Global and weights_only.accepted(weights_only.canonical(func))
    name = weights_only.canonical(cls) if type(cls) is Global else "a tensor subclass"
    rows = state_rows(cls, state)
    _drop_set(out, call, name)
    if known and plain and (rows == [] or _attributes(state)):
        new_inner = yield None, inner_args
        if new_inner is DROPPED:
            return DROPPED
        new_state = yield None, _each_named_once(state)
        new_state = None if new_state is DROPPED else new_state
        return out.older(calls.FROM_TYPE.call(func, cls, new_inner, new_state, position=call.position))
    if not plain or wrapper:
        # The data of a wrapper is in its attributes: a DTensor's _local_tensor, or a quantized tensor's data and scale.
        out.changed(name, "dict of its parts")
        parts: list[tuple[Node, Node]] = []
        yield from out.fill(parts, _distinct(rows if wrapper else [("args", inner_args), *rows]))
        return new_dict(parts)
    out.changed(name, "tensor")
    made = yield None, Call(func, inner_args, "REDUCE", call.position)
    for key, _ in rows:
        out.drop_at(key, f"an attribute of {name}", "a plain tensor has no attributes")
    return made


def _parameter(out: ConvertedObject, call: Call, args: tuple[Node, ...]) -> Steps:
    """Convert ``_rebuild_parameter_with_state(data, requires_grad, hooks, state)``.

    The state may hold only attributes, as torch requires.
    """
    name = class_name(call) or ""
    if len(args) != 4:
        raise BadValue("a parameter without its arguments")
    if _attributes(args[3]) or _is_empty(args[3]):
        state = _each_named_once(args[3])
        if state is not args[3]:
            _drop_set(out, call, name)
            call = calls.PARAMETER_WITH_STATE.call(*args[:3], state, position=call.position)
        return (yield from _allowed(out, call, name, (*args[:3], state)))
    _drop_set(out, call, name)
    made = yield None, calls.PARAMETER.call(*args[:3], position=call.position)
    for key, _ in state_rows(None, args[3]):
        out.drop_at(key, "an attribute of a parameter", "it has no name")
    return made


def _drop_set(out: ConvertedObject, call: Call, name: str) -> None:
    """Drop everything that is set on a tensor after it is made, which torch never does."""
    if call.items or call.elements or call.kwargs or not _is_empty(call.state):
        out.drop(f"a value that was set on {name}", "a tensor cannot hold it")


def _sparse(out: ConvertedObject, call: Call, args: tuple[Node, ...]) -> Steps:
    _drop_set(out, call, "a sparse tensor")
    out.changed(calls.SPARSE_CSR.name, calls.SPARSE.name)
    return (yield None, calls.SPARSE.call(*args, position=call.position))


def _device_tensor(out: ConvertedObject, call: Call, args: tuple[Node, ...]) -> Steps:
    """Convert a tensor made from a numpy array to the same tensor made from a tensor."""
    _drop_set(out, call, "a tensor")
    made = yield None, args
    if type(made) is not tuple or len(made) != 4 or made[0] is None:
        return out.drop(class_name(call) or "", "it has no data")
    return out.older(calls.FROM_CPU_TENSOR.call(*made, position=call.position))


_SPECIAL: dict[str, Callable[[ConvertedObject, Call, tuple[Node, ...]], Steps]] = {
    numpy_pickles.RECONSTRUCT: arrays.array,
    numpy_pickles.FROM_BUFFER: arrays.array,
    numpy_pickles.SCALAR: arrays.scalar,
    numpy_pickles.DTYPE: arrays.dtype_,
    "builtins.set": _set,
    "builtins.frozenset": _frozenset,
    calls.FROM_TYPE.full: _from_type,
    calls.FROM_TYPE_V1.full: _from_type,
    calls.PARAMETER_WITH_STATE.full: _parameter,
    calls.SPARSE_CSR.full: _sparse,
    calls.FROM_NUMPY.full: _device_tensor,
    calls.XLA.full: _device_tensor,
}
"""Calls with a special rule, under their names in numpy 1."""
