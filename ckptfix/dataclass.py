"""`dataclass`: the standard library's decorator, which makes a class in a third of the time.

A command imports some sixty data classes, and a fifth of its start went into making them: the standard library compiles
up to seven functions for each. Here only ``__init__`` is compiled; the other methods are closures over the names of the
fields. Nothing else differs: `dataclasses.fields`, `replace` and `asdict` take these classes too.

`cached_property` is that of the standard library, without the lock that it has in Python 3.11. All objects of a class
share that lock. A process that is forked while a different thread holds it would wait for it forever. Without it, as in
Python 3.12, two threads may both make the value.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from operator import attrgetter
from reprlib import recursive_repr
from types import MemberDescriptorType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass  # type checkers know the decorators by these names
    from functools import cached_property as cached_property
else:

    class cached_property(functools.cached_property):  # noqa: N801
        def __init__(self, func):
            super().__init__(func)
            self.lock = nullcontext()

    def dataclass(made=None, /, *, frozen=False, slots=False, eq=True, repr=True, kw_only=False):
        """Make a data class; the parameters are the standard library's."""
        if made is None:
            return lambda made: dataclass(made, frozen=frozen, slots=slots, eq=eq, repr=repr, kw_only=kw_only)
        made.__doc__ = made.__doc__ or made.__name__  # else the standard library makes one from a signature: 6 ms
        own_hash = made.__dict__.get("__hash__") is not None
        made = dataclasses.dataclass(made, init=False, repr=False, eq=False, slots=slots, kw_only=kw_only)
        fields = dataclasses.fields(made)
        methods = {"__init__": _init(made, fields, frozen)}
        if repr:
            methods["__repr__"] = _repr([field.name for field in fields if field.repr])
        if eq:
            values = _values([field.name for field in fields if field.compare])
            methods["__eq__"] = _eq(values)
            if not own_hash:
                made.__hash__ = (lambda self: hash(values(self))) if frozen else None
        if frozen:
            methods |= _frozen(made, [field.name for field in fields])
        for name, method in methods.items():
            if name not in made.__dict__:  # a method that the class itself defines stays
                method.__name__, method.__qualname__ = name, f"{made.__qualname__}.{name}"
                setattr(made, name, method)
        return made


class _Factory:
    """The default of a parameter whose field has a factory."""

    def __repr__(self) -> str:
        return "<factory>"


_FACTORY = _Factory()

_Method = Callable[..., Any]


def _init(made: type, fields: Sequence[dataclasses.Field[Any]], frozen: bool) -> _Method:
    """Compile ``__init__``."""
    names: dict[str, Any] = {"_set": object.__setattr__, "_FACTORY": _FACTORY}
    parameters: list[str] = []
    keywords: list[str] = []
    body: list[str] = []
    for field in fields:
        name = value = field.name
        default = ""
        if field.default_factory is not dataclasses.MISSING:
            names[f"_make_{name}"] = field.default_factory
            value = f"_make_{name}() if {name} is _FACTORY else {name}" if field.init else f"_make_{name}()"
            default = "=_FACTORY"
        elif field.default is not dataclasses.MISSING:
            names[f"_default_{name}"] = field.default
            value = name if field.init else f"_default_{name}"
            default = f"=_default_{name}"
        elif not field.init:
            continue  # __post_init__ sets it
        if field.init:
            (keywords if field.kw_only else parameters).append(name + default)
        slot = getattr(made, name, None) if frozen else None
        if type(slot) is MemberDescriptorType:  # its own setter takes half the time
            names[f"_set_{name}"] = slot.__set__
            body.append(f"_set_{name}(self, {value})")
        else:
            body.append(f"_set(self, {name!r}, {value})" if frozen else f"self.{name} = {value}")
    if hasattr(made, "__post_init__"):
        body.append("self.__post_init__()")
    head = ", ".join(["self", *parameters, *(["*", *keywords] if keywords else [])])
    exec(f"def __init__({head}):\n " + "\n ".join(body or ["pass"]), names)
    init: _Method = names["__init__"]
    init.__annotations__ = {field.name: field.type for field in fields if field.init} | {"return": None}
    init.__module__ = made.__module__
    return init


def _values(names: Sequence[str]) -> Callable[[object], tuple[Any, ...]]:
    """Return a function of the fields' values, as a tuple."""
    if len(names) < 2:  # attrgetter returns a single value as it is
        return lambda self: tuple(getattr(self, name) for name in names)
    return attrgetter(*names)


def _eq(values: Callable[[object], tuple[Any, ...]]) -> _Method:
    def equal(self: object, other: object) -> bool:
        return values(self) == values(other) if other.__class__ is self.__class__ else NotImplemented

    return equal


def _repr(names: Sequence[str]) -> _Method:
    @recursive_repr()
    def text(self: object) -> str:
        return f"{type(self).__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    return text


def _frozen(made: Any, names: Sequence[str]) -> dict[str, _Method]:
    """Return the methods that keep the fields from being changed, and those by which copies and pickles set them."""

    def assign(self: object, name: str, value: object) -> None:
        if type(self) is made or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
        super(made, self).__setattr__(name, value)

    def delete(self: object, name: str) -> None:
        if type(self) is made or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
        super(made, self).__delattr__(name)

    def state(self: object) -> list[object]:
        return [getattr(self, name) for name in names]

    def restore(self: object, values: Sequence[object]) -> None:
        for name, value in zip(names, values, strict=True):
            object.__setattr__(self, name, value)

    return {"__setattr__": assign, "__delattr__": delete, "__getstate__": state, "__setstate__": restore}
