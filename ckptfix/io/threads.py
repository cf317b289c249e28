"""Tasks on several threads, and ranges of bytes shared out into tasks of about one size."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from ckptfix.checkpoint import ByteRange, Data
from ckptfix.io.source import threads

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

WORKERS = min(4, os.cpu_count() or 1)

AHEAD = 16
"""Tasks that may run ahead of the one whose result is taken: few enough that a writer, which reads what the tasks have
read, still finds it in the page cache."""

TASK = 16 << 20
"""Bytes that one task reads; a long range is several tasks."""

OVERHEAD = 4096
"""A read costs about as much as so many bytes of it."""

Task = TypeVar("Task")

Result = TypeVar("Result")


class Part(NamedTuple):
    """What a task reads of the range `number`: `data`, which begins `start` bytes into it."""

    number: int
    data: Data
    start: int


def batches(items: Iterable[Task], weight: Callable[[Task], int], most: int) -> Iterator[list[Task]]:
    """Several items at a time, in order: a batch ends with the item by which it weighs `most`."""
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


def tasks(ranges: Iterable[Data]) -> list[list[Part]]:
    """Tasks that together read all `ranges`, in order: parts of long ones, several short ones together."""
    made: list[list[Part]] = []
    room = 0
    for number, data in enumerate(ranges):
        if isinstance(data, ByteRange) and data.length > TASK:
            cuts = range(0, data.length, TASK)
            made += [[Part(number, data.sub(at, min(TASK, data.length - at)), at)] for at in cuts]
            room = 0
            continue
        if room < data.length or not made:
            made.append([])
            room = TASK
        made[-1].append(Part(number, data, 0))
        room -= data.length + OVERHEAD
    return made


class Flag:
    """Set by one thread, looked at by others.

    It takes no lock, as `threading.Event` does: where memory runs out as that lock is given back, it stays taken, and
    a second try to set the event waits for ever.
    """

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        """Once set, it stays so."""
        self._is_set = True

    def is_set(self) -> bool:
        """Whether it was set."""
        return self._is_set


class Workers:
    """Runs tasks on threads, some `ahead` of the one whose result is taken; an error or interrupt stops all."""

    def __init__(self, ahead: int = AHEAD) -> None:
        self.stopped = Flag()
        self._ahead = ahead
        self._pool: ThreadPoolExecutor | None = None

    def begun(self, call: Callable[[Task], Result], tasks: Iterable[Task]) -> Generator[Future[Result]]:
        """``call(task)`` of every task, in order, each with some more begun behind it."""
        pool = self._pool = threads(WORKERS)
        waiting: deque[Future[Result]] = deque()
        try:
            for task in tasks:
                waiting.append(pool.submit(call, task))
                if len(waiting) > self._ahead:
                    yield waiting.popleft()
            yield from waiting
        except GeneratorExit:
            # Nobody asks for more. The collector may say so, in any thread and in the middle of anything, so that no
            # lock may be waited for here: the threads end when the pool is gone.
            for future in waiting:
                future.cancel()
            raise
        except BaseException:
            self._end()
            raise
        self._end()

    def run(self, call: Callable[[Task], Result], tasks: Iterable[Task]) -> Generator[Result]:
        """The results of `begun`."""
        with closing(self.begun(call, tasks)) as begun:
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
