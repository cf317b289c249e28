"""Addresses: where in a checkpoint something is, as ``model_state_dict/fc.weight``; ``""`` is the top level."""

from __future__ import annotations

from collections.abc import Collection

from ckptfix.words import TOP


def join(at: str, key: str) -> str:
    """The address of `key` in the mapping at `at`."""
    return f"{at}/{key}" if at else key


def given(text: str) -> str:
    """The address that a user gave, with or without slashes around it."""
    return text.strip("/")


def is_inside(address: str, at: str) -> bool:
    """Whether `address` is the mapping or module at `at`, or something in it."""
    return not at or address == at or address.startswith(f"{at}/")


def is_inside_any(name: str, addresses: Collection[str]) -> bool:
    """Whether `name` is one of `addresses`, or below one."""
    if not addresses:
        return False
    if "" in addresses or name in addresses:
        return True
    return any(name[:end] in addresses for end, char in enumerate(name) if char == "/")


def shown(at: str | None, *, to_type: bool = False) -> str:
    """An address in a sentence; with `to_type` also how the top level is given to ``--at``."""
    return at or (f"{TOP} ('')" if to_type else TOP)
