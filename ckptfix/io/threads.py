"""Tasks on several threads."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import TypeVar

from ckptfix.io.source import threads

WORKERS = min(4, os.cpu_count() or 1)

Task = TypeVar("Task")

Result = TypeVar("Result")


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
