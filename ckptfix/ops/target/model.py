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
from ckptfix.platform import Stopped
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
    with _called(text) as factory:
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


def make(text: str) -> object:
    """Return what the factory ``module:factory`` returns, with its values; errors are those of `build`."""
    with _called(text) as factory:
        return _values(text, factory)


@contextmanager
def _called(text: str) -> Iterator[Callable[[], object]]:
    """Import the factory; until the context ends, its folder is importable and its output goes to stderr."""
    need_torch(f"building {text!r}")
    module_name, _, factory_name = text.partition(":")
    *holders, name = factory_name.split(".")
    with _own_folder_importable(), redirect_stdout(sys.stderr):
        with failing(lambda error: CkptfixError(f"cannot import {text!r}: {_in_words(error)}")):
            module = importlib.import_module(module_name)
            factory = getattr(reduce(getattr, holders, module), name)
        yield factory


def _made(text: str, factory: Callable[[], object]) -> object:
    import torch

    try:
        with torch.device("meta"):
            return _values(text, factory)
    except CkptfixError:
        return _values(text, factory)


def _values(text: str, factory: Callable[[], object]) -> object:
    import torch

    if isinstance(factory, torch.nn.Module | torch.Tensor | Mapping):
        return factory
    hint = "pass a callable without arguments: def build(): return Net(num_classes=10)"
    with failing(lambda error: CkptfixError(f"calling {text!r} failed: {_in_words(error)}", hint=hint)):
        return factory()


def _tensors(text: str, made: object) -> Mapping[str, object]:
    """Return the named tensors of a model or a state dict; tied ones are the same object."""
    import torch

    if isinstance(made, torch.nn.Module):
        with failing(lambda error: CkptfixError(f"{text!r} gives no state dict: {_in_words(error)}")):
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


@contextmanager
def failing(
    said: Callable[[BaseException], CkptfixError], kinds: tuple[type[BaseException], ...] = (Exception, SystemExit)
) -> Iterator[None]:
    """Run code of the user, and raise what `said` makes of its error or exit. A signal passes: it stops ckptfix."""
    try:
        yield
    except Stopped:
        raise
    except kinds as error:
        raise said(error) from error


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
