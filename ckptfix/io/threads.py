"""Tasks on several threads, and ranges of bytes divided into tasks of similar size."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from itertools import chain, islice
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from ckptfix.checkpoint import ByteRange, Data
from ckptfix.io.source import threads

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

WORKERS = min(4, os.cpu_count() or 1)

AHEAD = 16
"""Tasks that can run ahead of the one whose result is next. The number is small, so that a writer still finds the bytes
that the tasks have read in the page cache."""

TASK = 16 << 20
"""Bytes that one task reads; a long range becomes several tasks."""

OVERHEAD = 4096
"""Bytes that cost about as much to read as one more read call."""

Task = TypeVar("Task")

Result = TypeVar("Result")


class RangeBlock(NamedTuple):
    """The part of the range `number` that a task reads: `data`, which begins `start` bytes into it."""

    number: int
    data: Data
    start: int


def batches(items: Iterable[Task], weight: Callable[[Task], int], most: int) -> Iterator[list[Task]]:
    """Group the items in order: a batch ends with the item that brings its weight to `most`."""
    batch: list[Task] = []
    held = 0
    for item in items:
        batch.append(item)
        held += weight(item)
        if held >= most:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def tasks(ranges: Iterable[Data]) -> list[list[RangeBlock]]:
    """Divide `ranges` into tasks, in order: long ranges are split, short ones are grouped."""
    made: list[list[RangeBlock]] = []
    room = 0
    for number, data in enumerate(ranges):
        if isinstance(data, ByteRange) and data.length > TASK:
            cuts = range(0, data.length, TASK)
            made += [[RangeBlock(number, data.sub(at, min(TASK, data.length - at)), at)] for at in cuts]
            room = 0
            continue
        if room < data.length or not made:
            made.append([])
            room = TASK
        made[-1].append(RangeBlock(number, data, 0))
        room -= data.length + OVERHEAD
    return made


class Flag:
    """A flag that one thread sets and others check.

    It uses no lock, unlike `threading.Event`: if memory runs out while that lock is released, the lock stays held, and
    a second attempt to set the event waits forever.
    """

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        """Set the flag, permanently."""
        self._is_set = True

    def is_set(self) -> bool:
        """Return whether the flag is set."""
        return self._is_set


class Workers:
    """A runner of tasks on threads, up to `ahead` of the current result; an error or interrupt stops all of them."""

    def __init__(self, ahead: int = AHEAD) -> None:
        self.stopped = Flag()
        self._ahead = ahead
        self._pool: ThreadPoolExecutor | None = None

    def begun(self, call: Callable[[Task], Result], tasks: Iterable[Task]) -> Generator[Future[Result]]:
        """Start ``call(task)`` for every task, in order, and yield the futures; more tasks run behind each of them."""
        pool = self._pool = threads(WORKERS)
        waiting: deque[Future[Result]] = deque()
        try:
            for task in tasks:
                waiting.append(pool.submit(call, task))
                if len(waiting) > self._ahead:
                    yield waiting.popleft()
            yield from waiting
        except GeneratorExit:
            # The consumer has stopped. The garbage collector can raise this in any thread, at any point, so this code
            # must not wait for a lock: the threads end when the pool is gone.
            for future in waiting:
                future.cancel()
            raise
        except BaseException:
            self._end()
            raise
        self._end()

    def run(self, call: Callable[[Task], Result], tasks: Iterable[Task]) -> Generator[Result]:
        """Yield the results of `begun`; a single task runs in this thread."""
        rest = iter(tasks)
        few = list(islice(rest, 2))
        if len(few) < 2:
            yield from map(call, few)
            return
        with closing(self.begun(call, chain(few, rest))) as begun:
            try:
                for future in begun:
                    yield future.result()
            except GeneratorExit:
                self.stopped.set()
                raise
            except BaseException:
                self.stopped.set()
                self._end()
                raise

    def _end(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)
