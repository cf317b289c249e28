"""`cached_property`: the standard library's decorator, without the lock that it has in Python 3.11.

All objects of a class share that lock. A process that is forked while a different thread holds it would wait for it
forever. Without it, as in Python 3.12, two threads may both make the value.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from functools import cached_property as cached_property  # type checkers know the decorator by this name
else:

    class cached_property(functools.cached_property):  # noqa: N801
        def __init__(self, func):
            super().__init__(func)
            self.lock = nullcontext()
