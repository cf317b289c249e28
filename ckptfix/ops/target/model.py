"""What a model expects, from the model itself: the one place where a person lets ckptfix run a module's code."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from functools import reduce
from pathlib import Path

from ckptfix.errors import CkptfixError
from ckptfix.extras import need_torch

Row = tuple[str, tuple[int, ...], str, object]


def build(text: str) -> list[Row]:
    """(name, shape, dtype, identity) of the state dict of what ``module:factory`` makes, in definition order.

    The model is built on the meta device, where it takes no memory. A constructor that computes with values, as those
    that space drop rates evenly, cannot run there, and is called again on the CPU. The folder of the call is on the
    import path, and what the module prints is sent to stderr.

    Raises:
        MissingExtra: torch is not installed.
        CkptfixError: the module does not import, has no such factory, or the factory fails or makes no model.
    """
    need_torch(f"building {text!r}")
    module_name, _, factory_name = text.partition(":")
    *holders, name = factory_name.split(".")
    with _own_folder_importable(), redirect_stdout(sys.stderr):
        try:
            module = importlib.import_module(module_name)
            factory = getattr(reduce(getattr, holders, module), name)
        except (Exception, SystemExit) as error:
            raise CkptfixError(f"cannot import {text!r}: {_in_words(error)}") from error
        made = _made(text, factory)
    import torch

    tensors = _tensors(text, made)
    return [
        (name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), id(tensor) if tensor.numel() else None)
        for name, tensor in tensors.items()
        if isinstance(tensor, torch.Tensor)
    ]


def _made(text: str, factory: Callable[[], object]) -> object:
    import torch

    if isinstance(factory, torch.nn.Module | Mapping):
        return factory
    try:
        with torch.device("meta"):
            return factory()
    except (Exception, SystemExit):
        pass
    try:
        return factory()
    except (Exception, SystemExit) as error:
        hint = "give a callable without arguments: def build(): return Net(num_classes=10)"
        raise CkptfixError(f"{text!r} cannot be called: {_in_words(error)}", hint=hint) from error


def _tensors(text: str, made: object) -> Mapping[str, object]:
    """The named tensors of a model or a state dict, tied ones as the same object."""
    import torch

    if isinstance(made, torch.nn.Module):
        found: Mapping[str, object] = made.state_dict(keep_vars=True)
        return found
    if isinstance(made, Mapping) and all(isinstance(name, str) for name in made):
        return made
    raise CkptfixError(f"{text!r} makes a {type(made).__name__}, not a module or a state dict")


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")


@contextmanager
def _own_folder_importable() -> Iterator[None]:
    """The current folder first on the import path, as ``python -m`` has it."""
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)
