"""Pauses of the cyclic garbage collector: reading a large checkpoint creates millions of objects and no garbage.

Each collection would walk all of them; without it, 100,000 tensors are read in half the time. Nothing is leaked: the
nodes are freed by their reference counts, and the collector is then switched back to its former state.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the cyclic collector inside the context."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def gc_paused(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap `function` so that the collector is paused while it runs."""

    @wraps(function)
    def paused(*args: P.args, **kwargs: P.kwargs) -> R:
        with collector_paused():
            return function(*args, **kwargs)

    return paused
