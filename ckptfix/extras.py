"""What an extra of the package brings, and the one place that says which to install where it is missing."""

from __future__ import annotations

from importlib import import_module

from ckptfix.errors import MissingExtra


def need_torch(what: str) -> None:
    """Import torch, or say how to get it. Functions that are called after this one import torch as they like.

    Args:
        what: what needs it, as the message calls it.

    Raises:
        MissingExtra: torch is not installed. A torch that is there and fails to import raises its own error.
    """
    _need("torch", "torch", what)


def need_textual(what: str) -> None:
    """Import textual, or say how to get it. Raises as `need_torch`."""
    _need("textual", "browse", what)


def _need(package: str, extra: str, what: str) -> None:
    try:
        import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        hint = f"pip install 'ckptfix[{extra}]'"
        raise MissingExtra(f"{what} needs {package}, which is not installed", name=package, hint=hint) from None
