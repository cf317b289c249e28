"""A pool of threads that also works where no thread can be started."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class Threads(ThreadPoolExecutor):
    """A pool of threads. If the system starts no thread, as at a limit or at exit, the submitter runs its call itself.

    The pool queues a call before it starts a thread. So one of its threads may take the call that the submitter runs.
    """

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        made: Future[Any] = Future()
        left = [fn]

        def run() -> None:
            try:
                call = left.pop()
            except IndexError:  # a different thread has taken it
                return
            if made.set_running_or_notify_cancel():
                try:
                    made.set_result(call(*args, **kwargs))
                except BaseException as error:
                    made.set_exception(error)

        def cancel(queued: Future[None]) -> None:
            if queued.cancelled():
                made.cancel()

        try:
            super().submit(run).add_done_callback(cancel)
        except RuntimeError:
            run()
        return made
