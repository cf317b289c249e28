"""Engines: each task ends with its result, its error, or the loss of its process."""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckptfix.runner.engines import Engine, Here, Processes, ProcessLost, _portable, carry_out
from ckptfix.runner.jobs import Summary

TASKS = ["1 + 1", "1 / 0", "__import__('os')._exit(7)", "[][0]", "2 * 3"]


def ended(engine: Engine, tasks: list[str]) -> dict[str, object]:
    """What each task comes to, as Python evaluates it."""
    left = deque(tasks)
    found: dict[str, object] = {}
    for task, pending in carry_out(lambda: left.popleft() if left else None, eval, engine):
        try:
            found[task] = pending.result()
        except Exception as error:
            found[task] = f"{type(error).__name__}: {error}"
    return found


def test_a_process_that_dies_ends_its_own_task_only() -> None:
    assert ended(Processes(2), TASKS) == {
        "1 + 1": 2,
        "1 / 0": "ZeroDivisionError: division by zero",
        "__import__('os')._exit(7)": "ProcessLost: ended with exit code 7",
        "[][0]": "IndexError: list index out of range",
        "2 * 3": 6,
    }


STOPPED_IN_A_CALLBACK = """
import os, signal, time, weakref
class Any: pass
one = Any()
held = weakref.ref(one, lambda _: [os.kill(os.getpid(), signal.SIGTERM), *range(1000)])
del one
time.sleep(300)
"""


@pytest.mark.slow
def test_a_signal_in_a_callback_ends_a_process_too(capfd: pytest.CaptureFixture[str]) -> None:
    """Python swallows what a callback raises, and prints it."""
    task = f"exec({STOPPED_IN_A_CALLBACK!r})"
    assert ended(Processes(1), [task])[task] == "ProcessLost: ended with exit code 0"
    assert "Exception ignored" not in capfd.readouterr().err


def test_any_executor_does_tasks() -> None:
    with ThreadPoolExecutor(2) as executor:
        assert ended(Engine(executor), TASKS[:2]) == ended(Processes(1), TASKS[:2])


def test_a_task_can_be_done_again() -> None:
    tries: deque[str] = deque(["1 / 0"])
    again = 0
    with ThreadPoolExecutor(1) as executor:
        for task, pending in carry_out(lambda: tries.popleft() if tries else None, eval, Engine(executor)):
            with pytest.raises(ZeroDivisionError):
                pending.result()
            again += 1
            if again < 3:
                tries.append(task)
    assert again == 3


def test_this_process_passes_errors_on() -> None:
    assert ended(Here(), ["1 + 1", "2 * 3"]) == {"1 + 1": 2, "2 * 3": 6}
    with pytest.raises(ZeroDivisionError):
        ended(Here(), ["1 / 0"])


def test_steps_name_their_task() -> None:
    seen: list[tuple[str, int, int]] = []

    def call(task: str, *, step: object) -> str:
        assert callable(step)
        step(1, 2)
        return task

    left = deque("ab")
    engine = Here(lambda task, done, total: seen.append((task, done, total)))
    assert [task for task, _ in carry_out(lambda: left.popleft() if left else None, call, engine)] == ["a", "b"]
    assert seen == [("a", 1, 2), ("b", 1, 2)]


class TwoWords(Exception):
    """An error that a copy of it cannot be made of."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(f"{one} {other}")


def test_an_error_that_cannot_be_sent_is_told() -> None:
    assert str(_portable(TwoWords("a", "b"))) == "TwoWords: a b"
    lost = ProcessLost("gone")
    assert _portable(lost) is lost


@pytest.mark.parametrize(
    ("codes", "exit_code", "done", "failed"),
    [([], 0, 0, 0), ([0, 0], 0, 2, 0), ([0, 1], 1, 2, 0), ([1, 3], 3, 2, 0), ([3, 2, 0], 2, 2, 1)],
)
def test_a_summary_has_one_exit_code(codes: list[int], exit_code: int, done: int, failed: int) -> None:
    summary = Summary()
    for code in codes:
        summary.count(code)
    assert (summary.exit_code, summary.done, summary.failed) == (exit_code, done, failed)
