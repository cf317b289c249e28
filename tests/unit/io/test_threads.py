"""Tasks on several threads: what is given up, and where that is said."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from ckptfix.io.threads import AHEAD, WORKERS, Workers


def endless() -> Iterator[int]:
    number = 0
    while True:
        yield number
        number += 1


def test_what_is_given_up_is_not_waited_for() -> None:
    """The collector may close a generator in a thread that has not begun: to wait for others there is a deadlock."""
    hold = threading.Event()
    done: list[int] = []

    def task(number: int) -> int:
        hold.wait(60)
        done.append(number)
        return number

    others = set(threading.enumerate())
    begun = Workers().begun(task, endless())
    next(begun)
    closing = threading.Thread(target=begun.close)
    closing.start()
    closing.join(20)
    assert not closing.is_alive()
    hold.set()
    for thread in set(threading.enumerate()) - others:
        thread.join(20)
    assert len(done) <= WORKERS + 1 < AHEAD, "what had not begun is not done"


def test_an_error_waits_for_what_runs() -> None:
    left: list[int] = []
    begun = threading.Event()

    def task(number: int) -> int:
        if number == 0:
            begun.wait(20)
            raise ValueError
        begun.set()
        left.append(number)
        return number

    workers = Workers()
    with pytest.raises(ValueError):
        list(workers.run(task, iter(range(1000))))
    count = len(left)
    assert workers.stopped.is_set() and count < 1000
    assert len(left) == count


def test_a_single_task_needs_no_thread() -> None:
    assert list(Workers().run(lambda _: threading.current_thread(), [0])) == [threading.current_thread()]
    assert threading.current_thread() not in set(Workers().run(lambda _: threading.current_thread(), [0, 1]))
    assert not list(Workers().run(lambda _: 1 / 0, []))
