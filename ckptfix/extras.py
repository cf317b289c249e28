"""What an extra of the package brings, and the one place that says which to install where it is missing."""

from __future__ import annotations

from ckptfix.errors import MissingExtra


def need_torch(what: str) -> None:
    """Import torch, or say how to get it. Functions that are called after this one import torch as they like.

    Args:
        what: what needs it, as the message calls it.

    Raises:
        MissingExtra: torch is not installed. A torch that is there and fails to import raises its own error.
    """
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        hint = "pip install 'ckptfix[torch]'"
        raise MissingExtra(f"{what} needs torch, which is not installed", name="torch", hint=hint) from None


def need_textual(what: str) -> None:
    """Import textual, or say how to get it. Raises as `need_torch`."""
    try:
        import textual  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "textual":
            raise
        hint = "pip install 'ckptfix[browse]'"
        raise MissingExtra(f"{what} needs textual, which is not installed", name="textual", hint=hint) from None
