"""The expectations of a model, from its own code: the only module that runs it, and only if the user allows that."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from functools import reduce
from pathlib import Path
from tempfile import mkdtemp
from weakref import finalize

from ckptfix.errors import CkptfixError
from ckptfix.extras import need_torch
from ckptfix.io.output import SCRATCH
from ckptfix.urls import as_path

Row = tuple[str, tuple[int, ...], str, object]


def build(text: str) -> list[Row]:
    """Return (name, shape, dtype, identity) for the state dict of the model of ``module:factory``, in definition order.

    The model is built on the meta device, where it takes no memory. A constructor that computes with values, such as
    evenly spaced drop rates, cannot run there, and is called again on the CPU. The current folder is on the import
    path, and the module's output is redirected to stderr.

    Raises:
        MissingExtra: torch is not installed.
        CkptfixError: the module cannot be imported or has no such factory, or the factory fails or returns no model.
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
    return rows_of(text, made)


def rows_of(text: str, made: object) -> list[Row]:
    """Return the rows of `build` for a model or a state dict in memory; `text` names it in errors."""
    need_torch(f"reading {text}")
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
        hint = "pass a callable without arguments: def build(): return Net(num_classes=10)"
        raise CkptfixError(f"calling {text!r} failed: {_in_words(error)}", hint=hint) from error


def _tensors(text: str, made: object) -> Mapping[str, object]:
    """Return the named tensors of a model or a state dict; tied ones are the same object."""
    import torch

    if isinstance(made, torch.nn.Module):
        found: Mapping[str, object] = made.state_dict(keep_vars=True)
        return found
    if isinstance(made, Mapping) and all(isinstance(name, str) for name in made):
        return made
    raise CkptfixError(f"{text!r} returns a {type(made).__name__}, not a module or a state dict")


class SavedModel:
    """A temporary file with the state dict of a model in memory; it is removed with the object.

    Attributes:
        path: the file.
        name: the words for the model in reports.
    """

    def __init__(self, model: object) -> None:
        need_torch("comparing a model in memory")
        import torch

        self.name = f"<{type(model).__name__}>"
        folder = mkdtemp(prefix=SCRATCH)
        finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.path = str(as_path(folder, "model.pth"))
        value = model.state_dict() if isinstance(model, torch.nn.Module) else model
        torch.save(value, self.path)


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")


@contextmanager
def _own_folder_importable() -> Iterator[None]:
    """Put the current folder first on the import path, as ``python -m`` does."""
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)
