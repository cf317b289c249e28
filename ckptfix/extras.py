"""The extras of the package: the one place that names the extra to install when its package is missing."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType

from ckptfix.errors import MissingExtra


def need_torch(what: str) -> None:
    """Import torch, or raise an error that tells how to install it. Later code can then import torch freely.

    Args:
        what: the words in the message for the function that needs it.

    Raises:
        MissingExtra: torch is not installed. An installed torch that fails to import raises its own error.
    """
    _need("torch", "torch", what)


def need_textual(what: str) -> None:
    """Import textual, or raise an error that tells how to install it. Raises like `need_torch`."""
    _need("textual", "browse", what)


def need_zstd(what: str) -> ModuleType:
    """Return the module that decompresses zstd: of Python itself since 3.14. Raises like `need_torch`."""
    return _need("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd", "zstd", what)


def need_lz4(what: str) -> ModuleType:
    """Return the module that decompresses frames of LZ4. Raises like `need_torch`."""
    return _need("lz4.frame", "lz4", what)


def _need(package: str, extra: str, what: str) -> ModuleType:
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{package}.".startswith(f"{error.name}."):
            raise
        hint = f"pip install 'ckptfix[{extra}]'"
        name = package.removesuffix(".frame")
        raise MissingExtra(f"{what} needs {name}, which is not installed", name=name, hint=hint) from None
