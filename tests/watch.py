"""What this process does, as the interpreter reports it: an audit hook cannot be taken away, so all tests share one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

RUNS = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "socket.connect", "pty.spawn", "webbrowser.open")
"""Events of what a hostile file would do."""

Event = tuple[str, tuple[object, ...]]

_watches: list[tuple[tuple[str, ...], list[Event]]] = []


def _hook(name: str, arguments: tuple[object, ...]) -> None:
    for names, seen in _watches:
        if name.startswith(names):
            seen.append((name, arguments))


sys.addaudithook(_hook)


@contextmanager
def watched(*names: str) -> Iterator[list[Event]]:
    """The audit events whose names begin with one of `names` that happen inside, each with its arguments."""
    watch: tuple[tuple[str, ...], list[Event]] = (names, [])
    _watches.append(watch)
    try:
        yield watch[1]
    finally:
        _watches.remove(watch)
