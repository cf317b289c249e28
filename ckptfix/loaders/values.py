"""Plain values from the items of a tree: a table of the classes that are made here; the rest become inert records.

Nothing here runs code of the file. Each entry of the table builds a value from checked numbers, text and bytes.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import field
from typing import Any, Final, TypeAlias

from ckptfix.checkpoint.tree import Item, ListValue, MapValue, NameValue, ObjectValue, Value
from ckptfix.dataclass import dataclass
from ckptfix.errors import printable
from ckptfix.words import plural, some

MOST_SHOWN = 6
"""Values shown in the repr of a foreign object."""

NOTHING: Final = object()
"""Marker: no value can be made here."""

ValueOf: TypeAlias = Callable[[Item], object]
Make: TypeAlias = Callable[[tuple[object, ...], object], object]


@dataclass(slots=True, eq=False, repr=False)
class ForeignObject:
    """A record of what a pickle says about an object whose class is not imported.

    Two records are equal only if they are the same object, and each can be a dict key. The values that `state` holds by
    name can be read as attributes: ``found.lr``, ``vars(found)``. If a name is also one of the fields below, use
    ``vars(found)["name"]``.

    A record also reads like a dict or a list: ``found["lr"]``, ``dict(found)``, ``Model(**found)``, ``list(found)``.
    Its items are those of a subclass of dict (``AttributeDict``) or of list, the content of an OmegaConf container, or
    else the values that `state` holds by name (``argparse.Namespace``).

    Attributes:
        module, name: of the class or function; if a class is the value itself, `args` is empty.
        args, kwargs: the arguments of the call that would have made the object.
        state: the value that would have gone to its ``__setstate__`` or ``__dict__``.
        items: pairs set on it, as on a subclass of dict; None if no pair was set.
        elements: values appended to it, as to a subclass of list; None if nothing was appended.
    """

    module: str
    name: str
    args: tuple[Any, ...] = ()
    kwargs: Any = None
    state: Any = None
    items: list[tuple[Any, Any]] | None = field(default=None)
    elements: list[Any] | None = field(default=None)

    def __getattr__(self, name: str) -> Any:
        """Return a value of the state. Called only for names that are not fields."""
        if name == "__dict__":  # for vars(); a class with slots has none
            return self._named()
        if (name.startswith("__") and name.endswith("__")) or name in ForeignObject.__slots__:
            raise AttributeError(name)
        held = self._named()
        if name in held:
            return held[name]
        content = self._content()
        if isinstance(content, dict):
            if name in content:
                return content[name]
            held = {key: value for key, value in content.items() if isinstance(key, str)}
        names = ", ".join(held) if held else "nothing by name"
        raise AttributeError(f"{self.module}.{self.name} has no {name!r}; its state holds {printable(names[:500])}")

    def _named(self) -> dict[str, object]:
        """Return the values that the state holds by name: the pickled ``__dict__`` and ``__slots__``."""
        parts = self.state if isinstance(self.state, tuple) and len(self.state) == 2 else (self.state,)
        if not all(part is None or isinstance(part, dict) for part in parts):
            return {}
        return {key: value for part in parts if part for key, value in part.items() if isinstance(key, str)}

    def _content(self) -> dict[Any, Any] | list[Any]:
        """Return what the object holds as a dict or a list."""
        if self.items is not None:
            return dict(self.items)
        if self.elements is not None:
            return self.elements
        held = self._named()
        content = held.get("_content") if self.module.startswith("omegaconf.") else held
        if isinstance(content, list):
            return list(map(_without_node, content))
        return {key: _without_node(value) for key, value in content.items()} if isinstance(content, dict) else {}

    def keys(self) -> list[Any]:
        """Return the keys of the items, so that ``dict(found)`` and ``Model(**found)`` work; none for a list."""
        content = self._content()
        return list(content) if isinstance(content, dict) else []

    def __iter__(self) -> Iterator[Any]:
        return iter(self._content())

    def __getitem__(self, key: Any) -> Any:
        return self._content()[key]

    def __dir__(self) -> list[str]:
        content = self._content()
        names = [key for key in content if isinstance(key, str)] if isinstance(content, dict) else []
        return sorted({*object.__dir__(self), *self._named(), *names})

    def __repr__(self) -> str:
        """Return one short line: the class and the contents, with only numbers and short texts shown by value."""
        given = [_brief(value) for value in self.args]
        content = self._content() if self.module.startswith("omegaconf.") else {}
        shown = content if isinstance(content, dict) and content else self._named()
        given += [f"{name}={_brief(value)}" for name, value in shown.items()]
        if self.state is not None and not self._named():
            given.append(f"state={_brief(self.state)}")
        for what, held in (("item", self.items), ("element", self.elements)):
            if held is not None:
                given.append(plural(len(held), what))
        return printable(f"<{self.module}.{self.name}({some(given, MOST_SHOWN)})>")

    @classmethod
    def empty(cls, item: ObjectValue) -> ForeignObject:
        maker = item.maker
        return cls.named(maker) if isinstance(maker, NameValue) else cls("", "call")

    @classmethod
    def named(cls, item: NameValue) -> ForeignObject:
        """Return a record of a class or function under its name in Python 3, whatever protocol wrote it."""
        full, own = item.canonical, item.name
        if full.endswith(f".{own}"):
            return cls(full.removesuffix(f".{own}"), own)
        module, _, name = full.rpartition(".")
        return cls(module, name)


def _without_node(value: object) -> object:
    """Return the value in a node that OmegaConf puts around it; anything else unchanged."""
    if isinstance(value, ForeignObject) and value.module == "omegaconf.nodes":
        return vars(value).get("_val", value)
    return value


def _brief(value: object) -> str:
    """Return the repr of a short plain value, or else the class name."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        text = repr(value[:60] if isinstance(value, str | bytes) else value)
        return text if len(text) <= 40 else f"{text[:37]}..."
    if isinstance(value, ForeignObject):
        return f"<{value.module}.{value.name}>"
    return f"<{type(value).__name__}>"


def leaf(item: Item) -> object:
    """Return the value of an item that has no parts."""
    if isinstance(item, str):
        return str(item)
    if isinstance(item, NameValue):
        constant = _constant(item)
        return ForeignObject.named(item) if constant is NOTHING else constant
    return item


def _constant(item: NameValue) -> object:
    """Return a constant such as ``torch.float32`` or ``torch.per_tensor_affine``; NOTHING for other names."""
    # If a constant has no module, pickle names whichever module has imported torch.
    name = item.name.removeprefix("torch.")
    if item.module != "torch" and name == item.name:
        return NOTHING
    import torch

    value = vars(torch).get(name)
    inert = (torch.dtype, torch.memory_format, torch.qscheme, torch.layout)
    return value if isinstance(value, inert) else NOTHING


BUILTINS: dict[str, Callable[[], object]] = {
    **{f"builtins.{made.__name__}": made for made in (list, dict, set, int, float, str, tuple, bool, bytes)},
    "collections.OrderedDict": OrderedDict,
}
"""Default factories that a defaultdict may have."""


def _plain_args(item: ObjectValue) -> bool:
    args = item.args
    return isinstance(args, ListValue) and args.kind == "tuple" and item.kwargs is None


def _default(item: ObjectValue) -> object:
    given = item.arguments
    factory = given[0] if given else None
    if factory is None:
        return defaultdict(None)
    made = BUILTINS.get(factory.canonical) if isinstance(factory, NameValue) else None
    return defaultdict(made) if made is not None and len(given) == 1 else NOTHING


def _queue(item: ObjectValue) -> object:
    given = item.arguments
    most = given[1] if len(given) > 1 else None
    return deque(maxlen=most) if most is None or (type(most) is int and 0 <= most <= sys.maxsize) else NOTHING


SHELLS: dict[str, Callable[[ObjectValue], object]] = {
    "collections.OrderedDict": lambda item: OrderedDict(),
    "collections.defaultdict": _default,
    "collections.Counter": lambda item: Counter(),
    "collections.deque": _queue,
    "builtins.dict": lambda item: {},
    "builtins.list": lambda item: [],
    "builtins.set": lambda item: set(),
}
"""Classes whose objects can be made empty and filled later."""


def shell(item: Value) -> object:
    """Return an empty object to be filled, or NOTHING if the value must be made from its parts."""
    if isinstance(item, MapValue):
        return {}
    if isinstance(item, ListValue):
        return {"list": list, "set": set}[item.kind]() if item.kind in ("list", "set") else NOTHING
    if not isinstance(item, ObjectValue):
        return NOTHING
    maker = item.maker
    if isinstance(maker, NameValue) and _plain_args(item):
        name = maker.canonical
        if name in MADE:
            return NOTHING
        made = SHELLS[name](item) if name in SHELLS else NOTHING
        if made is not NOTHING:
            return made
    return ForeignObject.empty(item)


def add_elements(item: ObjectValue, shell: object, value: ValueOf) -> None:
    """Add the values that a call gives besides items: ``set([1, 2])``, and appended values."""
    if not isinstance(shell, set | list | deque):
        return
    # Read the item, not its value: a list may not be filled yet.
    first = item.arguments[0] if item.arguments else ()
    given = first if isinstance(first, ListValue) else ()
    add: Callable[[Iterable[object]], None] = shell.update if isinstance(shell, set) else shell.extend
    add(map(value, given))
    add(map(value, item.elements or ()))


def _size(args: tuple[object, ...], state: object) -> object:
    import torch

    (sizes,) = args
    return torch.Size(sizes) if isinstance(sizes, Iterable) and all(type(size) is int for size in sizes) else NOTHING


def _device(args: tuple[object, ...], state: object) -> object:
    import torch

    made: Callable[..., object] = torch.device
    return made(*args) if all(type(part) in (str, int) for part in args) else NOTHING


def _layout(args: tuple[object, ...], state: object) -> object:
    import torch

    (name,) = args
    found = vars(torch).get(name.removeprefix("torch.")) if isinstance(name, str) else None
    return found if isinstance(found, torch.layout) else NOTHING


def _number(made: Callable[..., object]) -> Make:
    """Return a maker for a class that takes a few numbers."""

    def make(args: tuple[object, ...], state: object) -> object:
        fits = len(args) <= 3 and all(type(part) in (int, float, bool, type(None)) for part in args)
        return made(*args) if fits else NOTHING

    return make


def _encoded(args: tuple[object, ...], state: object) -> object:
    text, encoding = args
    return text.encode("latin-1") if isinstance(text, str) and encoding == "latin1" else NOTHING


def _bytearray(args: tuple[object, ...], state: object) -> object:
    if not args:
        return bytearray()
    data = args[0]
    if isinstance(data, str) and args[1:] == ("latin-1",):
        return bytearray(data.encode("latin-1"))
    return bytearray(data) if isinstance(data, bytes | bytearray) else NOTHING


def _sequence(made: Callable[..., object]) -> Make:
    def make(args: tuple[object, ...], state: object) -> object:
        inside = args[0] if args else ()
        return made(inside) if isinstance(inside, list | tuple | set | frozenset | bytes) else NOTHING

    return make


def _numpy_dtype(args: tuple[object, ...], state: object) -> object:
    """Make ``dtype('f8', False, True)`` with the state ``(3, '<', None, ...)``: numbers and booleans only."""
    import numpy as np

    code = args[0]
    if not isinstance(code, str) or code[:1] not in "biufcSU" or not code[1:].isdecimal():
        return NOTHING
    if state is not None and (not isinstance(state, tuple) or state[0] != 3 or state[2:5] != (None, None, None)):
        return NOTHING
    made = np.dtype(code)
    return made.newbyteorder(state[1]) if state is not None and state[1] in ("<", ">") else made


def _numpy_scalar(args: tuple[object, ...], state: object) -> object:
    import numpy as np

    dtype, data = args
    if not isinstance(dtype, np.dtype) or not isinstance(data, bytes | bytearray) or len(data) != dtype.itemsize:
        return NOTHING
    return np.frombuffer(data, dtype)[0]


def _numpy_array(args: tuple[object, ...], state: object) -> object:
    """Make ``_reconstruct(ndarray, (0,), b'b')`` with the state (version, shape, dtype, Fortran order, bytes)."""
    import numpy as np

    kind = args[0]
    if not isinstance(kind, ForeignObject) or (kind.module, kind.name) != ("numpy", "ndarray"):
        return NOTHING
    if not isinstance(state, tuple | list):
        return NOTHING
    _, shape, dtype, fortran, data = state
    if not isinstance(dtype, np.dtype) or not isinstance(data, bytes | bytearray):
        return NOTHING
    return np.frombuffer(bytearray(data), dtype).reshape(shape, order="F" if fortran else "C")


def _numpy_buffer(args: tuple[object, ...], state: object) -> object:
    """Make ``_frombuffer(bytes, dtype, shape, order)``, the form in which protocol 5 writes arrays."""
    import numpy as np

    data, dtype, shape, order = args
    if not isinstance(dtype, np.dtype) or order not in ("C", "F") or not isinstance(data, bytes | bytearray):
        return NOTHING
    if not isinstance(shape, tuple | list | int):
        return NOTHING
    return np.frombuffer(bytearray(data), dtype).reshape(shape, order="F" if order == "F" else "C")


MADE: dict[str, Make] = {
    "torch.Size": _size,
    "torch.device": _device,
    "torch.serialization._get_layout": _layout,
    "_codecs.encode": _encoded,
    "builtins.bytearray": _bytearray,
    "builtins.complex": _number(complex),
    "builtins.slice": _number(slice),
    "builtins.range": _number(range),
    "builtins.frozenset": _sequence(frozenset),
    "builtins.tuple": _sequence(tuple),
    "builtins.bytes": _sequence(bytes),
    "numpy.dtype": _numpy_dtype,
    "numpy.core.multiarray.scalar": _numpy_scalar,
    "numpy._core.multiarray.scalar": _numpy_scalar,
    "numpy.core.multiarray._reconstruct": _numpy_array,
    "numpy._core.multiarray._reconstruct": _numpy_array,
    "numpy.core.numeric._frombuffer": _numpy_buffer,
    "numpy._core.numeric._frombuffer": _numpy_buffer,
}
"""Calls whose value is made from their arguments and state: (args, state) -> value, or NOTHING."""


def called(item: ObjectValue, value: ValueOf) -> object:
    """Return the value of a call listed in MADE, or NOTHING."""
    maker = item.maker
    make = MADE.get(maker.canonical) if isinstance(maker, NameValue) else None
    if make is None or not _plain_args(item) or item.items or item.elements:
        return NOTHING
    try:
        args = value(item.args)
        return make(args, value(item.state)) if isinstance(args, tuple) else NOTHING
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError, RuntimeError):
        return NOTHING
