"""The extras of the package: the one place that names the extra to install when its package is missing."""

from __future__ import annotations

from importlib import import_module

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


def _need(package: str, extra: str, what: str) -> None:
    try:
        import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        hint = f"pip install 'ckptfix[{extra}]'"
        raise MissingExtra(f"{what} needs {package}, which is not installed", name=package, hint=hint) from None
