"""Arguments of the public functions: one of a wrong type is refused by name, before anything is read.

What is wanted is read from the annotations, which are text: nothing is imported for them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cache, wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar, get_args, get_origin

from ckptfix.errors import WrongType

P = ParamSpec("P")
R = TypeVar("R")


class Kind(NamedTuple):
    """A type of arguments: what it is called, and whether a value is of it."""

    name: str
    takes: Callable[[object], bool]


def _is_flag(value: object) -> bool:
    return isinstance(value, bool) or type(value).__name__ in ("bool_", "bool")  # numpy's is a flag too


def _is_number(value: object) -> bool:
    return hasattr(value, "__float__") and not isinstance(value, str)


KINDS: dict[str, Kind] = {
    "StrPath": Kind("the name of a file (str or os.PathLike)", lambda value: isinstance(value, str | os.PathLike)),
    "str": Kind("text (str)", lambda value: isinstance(value, str)),
    "bool": Kind("True or False", _is_flag),
    "int": Kind("a whole number", lambda value: hasattr(value, "__index__") and not isinstance(value, bool)),
    "float": Kind("a number", _is_number),
    "None": Kind("None", lambda value: value is None),
    "Progress": Kind("a function of (bytes done, bytes in all)", callable),
    "Mapping": Kind("a mapping, such as a dict", lambda value: isinstance(value, Mapping)),
    "Sequence": Kind("a list or tuple", lambda value: isinstance(value, list | tuple)),
    "tuple": Kind("a tuple", lambda value: isinstance(value, tuple)),
}
"""Annotation, without what it holds -> the type."""


def typed(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, which refuses arguments of other types than its annotations say, with a `WrongType`."""

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        refuse_other_types(function, args, kwargs)
        return function(*args, **kwargs)

    return checked


def refuse_other_types(function: Callable[..., object], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse arguments of other types than the annotations of `function` say; what they do not say passes.

    Raises:
        WrongType: it names the argument, what was given, and what is wanted.
    """
    order, wanted = _wanted(function)
    for name, value in (*zip(order, args, strict=False), *kwargs.items()):
        kinds = wanted.get(name)
        if kinds and not any(kind.takes(value) for kind in kinds):
            choices = " or ".join(kind.name for kind in kinds)
            hint = _hint(name, value, kinds)
            raise WrongType(f"{function.__name__}(): `{name}` must be {choices}, not {_given(value)}", hint=hint)


def _hint(name: str, value: object, kinds: tuple[Kind, ...]) -> str | None:
    if KINDS["StrPath"] not in kinds:
        return None
    if callable(getattr(value, "read", None)):
        return "a checkpoint is read at random places: write the stream to a file first, and give its name"
    if isinstance(value, list | tuple | set):
        return "call it once for each file"
    if isinstance(value, bytes):
        return f"os.fsdecode(...) makes a name of it: {os.fsdecode(value)!r}"
    if callable(getattr(value, "state_dict", None)) or isinstance(value, Mapping):
        return "save it first, as in torch.save(model.state_dict(), 'model.pth'), and give the name of the file"
    return None


def _given(value: object) -> str:
    """The type of `value`, and a small value itself."""
    name = type(value).__qualname__
    if value is None:
        return "None"
    return f"{name}: {value!r}" if isinstance(value, str | int | float) and len(repr(value)) < 60 else name


@cache
def _wanted(function: Callable[..., object]) -> tuple[tuple[str, ...], dict[str, tuple[Kind, ...]]]:
    """The arguments that may be given by position, and the types of those whose annotations are known."""
    from inspect import Parameter, signature, unwrap

    names: dict[str, object] = getattr(unwrap(function), "__globals__", {})
    parameters = signature(function).parameters.values()
    order = tuple(row.name for row in parameters if row.kind is Parameter.POSITIONAL_OR_KEYWORD)
    wanted: dict[str, tuple[Kind, ...]] = {}
    for row in parameters:
        kinds = [_kind(part, names) for part in _parts(str(row.annotation))]
        if all(kinds):
            wanted[row.name] = tuple(kind for kind in kinds if kind is not None)
    return order, wanted


def _parts(annotation: str) -> list[str]:
    """The members of a union: ``"str | Mapping[str, str | None]"`` has two."""
    parts, depth = [""], 0
    for char in annotation:
        depth += (char == "[") - (char == "]")
        if char == "|" and not depth:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts]


def _kind(annotation: str, names: Mapping[str, object]) -> Kind | None:
    """The type that one member of a union is; None for one that is not known here."""
    head = annotation.partition("[")[0]
    meant = names.get(head)
    if get_origin(meant) is not None and head not in KINDS:  # the name of a Literal
        choices = get_args(meant)
    elif head == "Literal":
        choices = tuple(part.strip().strip("\"'") for part in annotation[len("Literal[") : -1].split(","))
    else:
        return KINDS.get(head)
    shown = ", ".join(repr(choice) for choice in choices)
    # Which text it may be, the function itself says, with what is nearest.
    return Kind(f"one of {shown}", lambda value: isinstance(value, str))
