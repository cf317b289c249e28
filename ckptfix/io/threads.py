"""Files that several threads read, and the threads."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import TypeVar

from ckptfix.io.source import Source, open_source, threads

WORKERS = min(4, os.cpu_count() or 1)

Task = TypeVar("Task")


Result = TypeVar("Result")


class Readers:
    """Open files by path, shared by all threads."""

    def __init__(self) -> None:
        self._open: dict[str, Source] = {}
        self._lock = threading.Lock()

    def __getitem__(self, path: str) -> Source:
        with self._lock:
            reader = self._open.get(path)
            if reader is None:
                reader = self._open[path] = open_source(path)
            return reader

    def __enter__(self) -> Readers:
        return self

    def __exit__(self, *exc: object) -> None:
        for reader in self._open.values():
            reader.close()


class Workers:
    """Runs tasks on threads, a few ahead of the one whose result is taken; an error or interrupt stops all."""

    def __init__(self) -> None:
        self.stopped = threading.Event()

    def run(self, call: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
        """``call(task)`` of every task, in order."""
        pool = threads(WORKERS)
        waiting: deque[Future[Result]] = deque()
        try:
            for task in tasks:
                waiting.append(pool.submit(call, task))
                if len(waiting) > 2 * WORKERS:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BaseException:
            self.stopped.set()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
