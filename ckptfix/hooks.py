"""Hooks: functions that a room calls, and that a higher room defines.

Imports point down, so a room does not name a room above it. It declares a hook with a type, and the front of the
package, which is above all rooms, registers the function for it::

    JOB: Hook[Callable[[Sequence[str]], Job | str]] = Hook("fleet.job")         # fleet/bounds.py
    register({"fleet.job": "ckptfix.cli.shared.command_lines:job_of"})          # ckptfix/__init__.py
    JOB.get()(job.argv)

The module of a function is imported when the hook is used: most commands use none.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_registered: dict[str, str] = {}


def register(places: Mapping[str, str]) -> None:
    """Register what hooks give: name of the hook -> ``module:attribute``, or a module."""
    _registered.update(places)


class Hook(Generic[T]):
    """A function, or another object, of a higher room.

    Attributes:
        name: the name that it is registered under.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def get(self) -> T:
        """Return the registered object."""
        module, _, attribute = _registered[self.name].partition(":")
        found: Any = import_module(module)
        given: T = getattr(found, attribute) if attribute else found
        return given
