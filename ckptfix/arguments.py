"""Type checks of the public functions' arguments: a wrong type is refused by name, before anything is read.

The expected types come from the annotations, which are text: checking them imports nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeAlias, TypeVar, get_args, get_origin

from ckptfix.errors import WrongType

if TYPE_CHECKING:
    import torch

Model: TypeAlias = "torch.nn.Module | Mapping[str, Any]"
"""A model, or a state dict, in memory."""

P = ParamSpec("P")
R = TypeVar("R")


def is_model(value: object) -> bool:
    """Return whether `value` is a model or a state dict in memory."""
    return isinstance(value, Mapping) or callable(getattr(value, "state_dict", None))


LIVE: dict[str, object] = {}
"""Name -> model or state dict in memory that a public function was called with, as long as the call lasts."""


def takes_model(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap `function` so that its argument `like` may be a model or a state dict in memory.

    Inside, the argument is a name, which commands, reports and `targets.read` treat like that of a file.
    """

    @wraps(function)
    def taken(*args: P.args, **kwargs: P.kwargs) -> R:
        order, _ = _wanted(function)
        words: list[Any] = [*args]
        options: dict[str, Any] = {**kwargs}
        holder: Any = options if "like" in options else words
        place: Any = "like" if "like" in options else order.index("like") if "like" in order else len(words)
        value = holder[place] if holder is options or place < len(words) else None
        if not is_model(value):
            return function(*args, **kwargs)
        name = f"<{type(value).__name__}>"
        while name in LIVE:
            name = f"<{name}>"
        LIVE[name] = value
        holder[place] = name
        try:
            return function(*words, **options)
        finally:
            del LIVE[name]

    return taken


class ArgumentKind(NamedTuple):
    """A type of arguments: its name in messages, and a test of values."""

    name: str
    takes: Callable[[object], bool]


def _is_flag(value: object) -> bool:
    return isinstance(value, bool) or type(value).__name__ in ("bool_", "bool")  # numpy's is a flag too


def _is_number(value: object) -> bool:
    return hasattr(value, "__float__") and not isinstance(value, str)


KINDS: dict[str, ArgumentKind] = {
    "StrPath": ArgumentKind(
        "the name of a file (str or os.PathLike)", lambda value: isinstance(value, str | os.PathLike)
    ),
    "str": ArgumentKind("text (str)", lambda value: isinstance(value, str)),
    "bool": ArgumentKind("True or False", _is_flag),
    "int": ArgumentKind("a whole number", lambda value: hasattr(value, "__index__") and not isinstance(value, bool)),
    "float": ArgumentKind("a number", _is_number),
    "None": ArgumentKind("None", lambda value: value is None),
    "Progress": ArgumentKind("a function of (bytes done, total bytes)", callable),
    "Mapping": ArgumentKind("a mapping, such as a dict", lambda value: isinstance(value, Mapping)),
    "Sequence": ArgumentKind("a list or tuple", lambda value: isinstance(value, list | tuple)),
    "Model": ArgumentKind("a model or a state dict", is_model),
    "tuple": ArgumentKind("a tuple", lambda value: isinstance(value, tuple)),
}
"""Annotation, without its parameters -> the type."""


def checks_types(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap `function` so that it raises `WrongType` for arguments whose types contradict its annotations."""

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        refuse_other_types(function, args, kwargs)
        return function(*args, **kwargs)

    return checked


def refuse_other_types(function: Callable[..., object], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse arguments whose types contradict the annotations of `function`; unknown annotations accept everything.

    Raises:
        WrongType: it names the argument, the value that was given, and the expected type.
    """
    order, wanted = _wanted(function)
    for name, value in (*zip(order, args, strict=False), *kwargs.items()):
        kinds = wanted.get(name)
        if kinds and not any(kind.takes(value) for kind in kinds):
            choices = " or ".join(kind.name for kind in kinds)
            hint = _hint(name, value, kinds)
            raise WrongType(f"{function.__name__}(): `{name}` must be {choices}, not {_given(value)}", hint=hint)


def _hint(name: str, value: object, kinds: tuple[ArgumentKind, ...]) -> str | None:
    if KINDS["StrPath"] not in kinds:
        return None
    if callable(getattr(value, "read", None)):
        return "checkpoints need random access: write the stream to a file first, and pass its name"
    if isinstance(value, list | tuple | set):
        return "call it once for each file"
    if isinstance(value, bytes):
        return f"decode it with os.fsdecode(...): {os.fsdecode(value)!r}"
    if callable(getattr(value, "state_dict", None)) or isinstance(value, Mapping):
        return "save it first, as in torch.save(model.state_dict(), 'model.pth'), and pass the name of the file"
    return None


def _given(value: object) -> str:
    """Return the type of `value`, and the value itself if it is short."""
    name = type(value).__qualname__
    if value is None:
        return "None"
    return f"{name}: {value!r}" if isinstance(value, str | int | float) and len(repr(value)) < 60 else name


@cache
def _wanted(function: Callable[..., object]) -> tuple[tuple[str, ...], dict[str, tuple[ArgumentKind, ...]]]:
    """Return the names of the positional arguments, and the expected types of all arguments with known annotations."""
    from inspect import Parameter, signature, unwrap

    names: dict[str, object] = getattr(unwrap(function), "__globals__", {})
    parameters = signature(function).parameters.values()
    order = tuple(row.name for row in parameters if row.kind is Parameter.POSITIONAL_OR_KEYWORD)
    wanted: dict[str, tuple[ArgumentKind, ...]] = {}
    for row in parameters:
        kinds = [_kind(part, names) for part in _parts(str(row.annotation))]
        if all(kinds):
            wanted[row.name] = tuple(kind for kind in kinds if kind is not None)
    return order, wanted


def _parts(annotation: str) -> list[str]:
    """Return the members of a union: ``"str | Mapping[str, str | None]"`` has two."""
    parts, depth = [""], 0
    for char in annotation:
        depth += (char == "[") - (char == "]")
        if char == "|" and not depth:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts]


def _kind(annotation: str, names: Mapping[str, object]) -> ArgumentKind | None:
    """Return the type for one member of a union; None if it is not in the table."""
    head = annotation.partition("[")[0]
    meant = names.get(head)
    if get_origin(meant) is not None and head not in KINDS:  # the name of a Literal
        choices = get_args(meant)
    elif head == "Literal":
        choices = tuple(part.strip().strip("\"'") for part in annotation[len("Literal[") : -1].split(","))
    else:
        return KINDS.get(head)
    shown = ", ".join(repr(choice) for choice in choices)
    # The function itself checks the text, so that its message can suggest the closest choice.
    return ArgumentKind(f"one of {shown}", lambda value: isinstance(value, str))
