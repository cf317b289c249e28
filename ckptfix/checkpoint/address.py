"""Addresses of places in a checkpoint, such as ``model_state_dict/fc.weight``; ``""`` is the top level."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ckptfix.words import TOP


class Address(str):
    """An address that knows its keys; a key may be empty or contain slashes.

    Two addresses are equal if they have the same keys: the key ``a/b`` is a different place than ``b`` in ``a``. A
    plain string, as a user types it, equals every address with the same text; ``""`` is only the top level.

    Attributes:
        keys: the path from the top level down; joined by slashes they are the text.
    """

    __slots__ = ("keys",)
    keys: tuple[str, ...]

    def __eq__(self, other: object) -> bool:
        if type(other) is Address:
            return self.keys == other.keys
        return other != "" and str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def of_keys(keys: tuple[str, ...]) -> str:
    """Return the address that these keys lead to."""
    if not keys:
        return ""
    made = Address("/".join(keys))
    made.keys = keys
    return made


def keys_of(address: str) -> tuple[str, ...]:
    """Return the keys on the way to `address`; a plain string is split at its slashes."""
    if type(address) is Address:
        return address.keys
    return tuple(address.split("/")) if address else ()


def join(at: str, key: str) -> str:
    """Return the address of `key` in the mapping at `at`."""
    made = Address(f"{at}/{key}" if at else key)
    made.keys = (*keys_of(at), key)
    return made


def numbered(address: str, number: int) -> str:
    """Return a second address for a place whose text equals that of a different one.

    Examples: the keys 1 and '1', or a key with a slash and a key in a nested mapping.
    """
    *above, last = keys_of(address) or ("",)
    return of_keys((*above, f"{last}#{number}"))


def holder_of(address: str) -> str:
    """Return the address of the mapping that contains the object at `address`."""
    return of_keys(keys_of(address)[:-1])


def holders_of(addresses: Iterable[str]) -> set[str]:
    """Return the addresses of all mappings that hold one of `addresses`, at any depth."""
    found: set[str] = set()
    for address in addresses:
        keys = keys_of(address)
        for end in range(len(keys) - 1, -1, -1):
            above = of_keys(keys[:end])
            if above in found:
                break
            found.add(above)
    return found


def key_below(address: str, at: str) -> str | None:
    """Return the key of the mapping at `at` under which `address` is; None unless it is below that mapping."""
    depth = len(keys_of(at))
    keys = keys_of(address)
    return keys[depth] if len(keys) > depth and is_inside(address, at) else None


def top_of(address: str) -> str:
    """Return the first key on the way to `address`; ``""`` for the top level."""
    return keys_of(address)[0] if address else ""


def given(text: str) -> str:
    """Return the address that a user gave, without slashes around it."""
    return text.strip("/")


def is_typed(address: str) -> bool:
    """Return whether a user can type `address`: not where a key at its ends is empty, or has a slash there."""
    return given(str(address)) == address


def is_inside(address: str, at: str) -> bool:
    """Return whether `address` is the mapping or module at `at`, or something in it."""
    if type(address) is Address and type(at) is Address:
        return address.keys[: len(at.keys)] == at.keys
    return not at or address == at or address.startswith(f"{at}/")


def is_inside_any(name: str, addresses: Collection[str]) -> bool:
    """Return whether `name` is one of `addresses`, or below one."""
    if not addresses:
        return False
    if "" in addresses or name in addresses:
        return True
    if type(name) is Address:
        return any(of_keys(name.keys[:end]) in addresses for end in range(1, len(name.keys)))
    return any(name[:end] in addresses for end, char in enumerate(name) if char == "/")


def shown(at: str | None, *, to_type: bool = False) -> str:
    """Return an address for a sentence; with `to_type`, the top level includes its spelling for ``--at``."""
    return at or (f"{TOP} ('')" if to_type else TOP)
