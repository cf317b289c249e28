"""Tensors nested in objects: every form in which pickle can put them there, generated; what is in a file, and what a
listing of it covers.

The classes are of a module that no reader has (`gone_nest`); a node's value is only what ``__reduce_ex__`` returns.
"""

from __future__ import annotations

import copyreg
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

import torch
from compare import tensor_bytes
from hypothesis import strategies as st

from ckptfix.checkpoint import Checkpoint, TensorEntry
from ckptfix.formats.torch.common import pickled_object
from ckptfix.pickles import Call, Dict, PersId, Set

__all__ = ["Counted", "covered", "found_in", "key_of", "nestings", "referenced", "tensors_of"]

Counted = Counter[tuple[tuple[int, ...], str, bytes]]


NEW: Any = vars(copyreg)["__newobj__"]
NEW_EX: Any = vars(copyreg)["__newobj_ex__"]


class Held:
    """An object that is pickled as `reduced` says."""

    def __init__(self, reduced: Callable[[type], tuple[Any, ...]], inside: list[torch.Tensor]) -> None:
        self.reduced = reduced
        self.inside = inside

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.reduced(type(self))

    def __repr__(self) -> str:
        func, args, *rest = self.reduced(type(self))
        return f"{func.__name__}{args}{rest}"


class Holder(Held):
    """One that pickle makes by ``cls.__new__(cls)``."""


class Slotted(Held):
    """Another."""


def rebuild(*args: Any) -> None:
    """A function of a library that is gone."""


class Sub(torch.Tensor):
    """A tensor subclass of a library that is gone."""


GONE = ModuleType("gone_nest")
for made in (Held, Holder, Slotted, rebuild, Sub):
    made.__module__ = "gone_nest"
    setattr(GONE, made.__name__, made)
sys.modules["gone_nest"] = GONE


class _Numbers:
    """Tensors that all differ, so that each can be found again."""

    def __init__(self) -> None:
        self.next = 1

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self.next += 1
        return torch.full(shape, self.next, dtype=dtype)


def _states(parts: list[Any]) -> dict[str, Any]:
    """The forms that a state can have, of some values."""
    named = {f"part{index}": value for index, value in enumerate(parts)}
    return {
        "none": None,
        "dict": named,
        "tuple": (*parts, 7),
        "list": parts,
        "slots": (None, named),
        "both": ({f"part{index}": value for index, value in enumerate(parts[1:])}, {"part0": parts[0]}),
        "one": parts[0],
        "nested": ([{"deep": tuple(parts)}], "told"),
        "ordered": OrderedDict(named),
    }


STATES = tuple(_states([0]))

FORMS = (
    *("list", "tuple", "dict", "ordered", "key", "object", "slotted", "class", "args", "kwargs", "items", "elements"),
    *("everything", "function", "subclass", "wrapper", "sharded", "other function", "parameter"),
)


def _nested(draw: st.DrawFn, numbers: _Numbers, depth: int) -> tuple[Any, list[torch.Tensor]]:
    """(value, tensors in it)."""
    form = draw(st.sampled_from(("tensor", "plain", *FORMS))) if depth else "tensor"
    if form == "tensor":
        shape = draw(st.sampled_from([(1,), (2, 3), (4,)]))
        tensor = numbers.tensor(shape, draw(st.sampled_from([torch.float32, torch.int64, torch.bfloat16])))
        return tensor, [tensor]
    if form == "plain":
        return draw(st.sampled_from([None, 1, "text", 2.5, (), b"x"])), []
    below = [_nested(draw, numbers, depth - 1) for _ in range(draw(st.integers(1, 2)))]
    parts = [value for value, _ in below]
    inside = [tensor for _, found in below for tensor in found]
    how = draw(st.sampled_from(STATES))
    state = _states(parts)[how]
    told = {"none": [], "one": below[0][1]}.get(how, inside)
    match form:
        case "list":
            return parts, inside
        case "tuple":
            return tuple(parts), inside
        case "dict":
            return {str(index): value for index, value in enumerate(parts)}, inside
        case "ordered":
            return OrderedDict((str(index), value) for index, value in enumerate(parts)), inside
        case "key":
            own = numbers.tensor((2,), torch.float32)
            return {(1, _Opaque(own)): parts}, [own, *inside]
        case "object":
            return Holder(lambda cls: (NEW, (cls,), state), told), told
        case "slotted":
            return Slotted(lambda cls: (NEW, (cls, *parts), None), inside), inside
        case "class":
            return Held(lambda cls: (Sub, tuple(parts), state), inside), inside
        case "args":
            return Held(lambda cls: (Holder, tuple(parts)), inside), inside
        case "kwargs":
            named = {"given": parts}
            return Holder(lambda cls: (NEW_EX, (cls, (1,), named), None), inside), inside
        case "items":
            rows = [(str(index), value) for index, value in enumerate(parts)]
            return Holder(lambda cls: (NEW, (cls,), state, None, iter(rows)), inside), inside
        case "elements":
            return Holder(lambda cls: (NEW, (cls,), state, iter(parts)), inside), inside
        case "everything":
            own = numbers.tensor((5,), torch.float32)
            rows = [("0", own)]
            made = lambda cls: (NEW, (cls, *parts), state, iter(parts), iter(rows))  # noqa: E731
            return Holder(made, [own, *inside]), [own, *inside]
        case "function":
            return Held(lambda cls: (rebuild, tuple(parts), state), inside), inside
    own = numbers.tensor((3,), torch.float32)
    reduced: Any = own
    function, args = reduced.__reduce_ex__(2)[:2]
    from_type = torch._tensor._rebuild_from_type_v2
    empty = (torch.float32, (3,), (1,), 0, torch.strided, torch.device("cpu"), False)
    wrapper = torch._utils._rebuild_wrapper_subclass
    match form:
        case "subclass":
            return Held(lambda cls: (from_type, (function, Sub, args, state)), [own, *told]), [own, *told]
        case "parameter":
            parameter = torch._utils._rebuild_parameter_with_state
            return Held(lambda cls: (parameter, (own, True, OrderedDict(), state)), [own, *told]), [own, *told]
        case "wrapper":
            return Held(lambda cls: (from_type, (wrapper, Sub, (Sub, *empty), state)), told), told
        case "sharded":
            told = [own, *inside]
            shards = [Holder(lambda cls: (NEW, (cls,), (None, {"tensor": own, "metadata": parts})), [])]
            return Held(lambda cls: (from_type, (wrapper, Sub, (Sub, *empty), (shards, 1))), told), told
    return Held(lambda cls: (from_type, (rebuild, Sub, ({"values": own},), state)), [own, *told]), [own, *told]


class _Opaque(Held):
    """An object that may be a key."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(lambda cls: (Holder, (tensor,)), [tensor])


@st.composite
def nestings(draw: st.DrawFn, depth: int = 3) -> tuple[dict[str, Any], dict[str, list[torch.Tensor]]]:
    """(what to save: a dict of some values, key -> the tensors somewhere in its value), beside a plain state dict."""
    numbers = _Numbers()
    plain = numbers.tensor((2, 2), torch.float32)
    obj: dict[str, Any] = {"model": {"fc.weight": plain}}
    inside = {"model": [plain]}
    for index in range(draw(st.integers(1, 3))):
        obj[f"k{index}"], inside[f"k{index}"] = _nested(draw, numbers, draw(st.integers(1, depth)))
    return obj, inside


def key_of(tensor: torch.Tensor) -> tuple[tuple[int, ...], str, bytes]:
    return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), bytes(tensor_bytes(tensor))


def tensors_of(tensors: Iterable[torch.Tensor]) -> Counted:
    """As a multiset; an object that stands in several places counts once."""
    return Counter(key_of(tensor) for tensor in {id(tensor): tensor for tensor in tensors}.values())


def found_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in a loaded value: in containers, keys and attributes, each object once."""
    seen: set[int] = set()
    stack = [value]
    while stack:
        one = stack.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            yield one
        if isinstance(one, dict):
            stack += [*one.keys(), *one.values()]
        elif isinstance(one, (list, tuple, set, frozenset)):
            stack += one
        stack += getattr(one, "__dict__", {}).values()


def referenced(checkpoint: Checkpoint) -> set[str]:
    """The keys of all storages to which the object refers: a walk of its own, over everything that a node holds."""
    keys: set[str] = set()
    seen: set[int] = set()
    stack: list[Any] = [pickled_object(checkpoint).graph.root]
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        kind = type(node)
        if kind is PersId:
            if type(node.pid) is tuple and node.pid[:1] == ("storage",):
                keys.add(str(node.pid[2]))
            continue
        if kind in (tuple, list, Call, Dict, Set):
            seen.add(id(node))
        if kind in (tuple, list):
            stack += node
        elif kind is Set:
            stack += node.elements
        elif kind in (Dict, Call):
            stack += [part for pair in node.items or () for part in pair]
        if kind is Call:
            stack += [node.func, node.args, node.kwargs, node.state, *(node.elements or ())]
    return keys


def covered(entries: Iterable[TensorEntry]) -> set[str]:
    """The keys of the storages that entries or their parts view."""
    keys = set()
    stack = list(entries)
    while stack:
        entry = stack.pop()
        stack += entry.parts
        if entry.storage is not None:
            keys.add(entry.storage.key)
    return keys
