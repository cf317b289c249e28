"""Several processes that write one folder together: the ranks of a torchrun or Slurm job.

Every rank plans the same output; each writes its share of the files; rank 0 writes the last one, an index, and renames
the folder to its final name. They communicate through a key-value store (`Store`), such as torch.distributed's. Every
second, a rank signals that it is alive: a rank that is silent, or reports a failure, ends the work of all.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, Protocol

from ckptfix.errors import CkptfixError, Refused
from ckptfix.io.read import Progress

BEAT, POLL = 1.0, 0.05
"""Seconds between two signals of a rank, and between two checks of the store."""

PATIENCE = 5.0
"""Seconds that a rank waits for the others to clean up and leave."""

AGAIN = "nothing was written; run it again when all ranks can run"
"""The hint when a rank is gone."""


class Store(Protocol):
    """The store that the ranks share: torch's TCPStore, or any object with these methods."""

    def set(self, key: str, value: str, /) -> Any: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def add(self, key: str, amount: int, /) -> int: ...


class RankFailed(CkptfixError):
    """A different rank failed, or is gone. `said` is True if that rank has reported the cause."""

    def __init__(self, message: str, *, said: bool, **place: Any) -> None:
        super().__init__(message, **place)
        self.said = said


class Watching(SystemExit):
    """The output is one file, which rank 0 writes: this rank has nothing to do."""


class Team:
    """The ranks of a job, as seen by one of them.

    Args:
        timeout: seconds of silence after which a rank counts as dead.
        attempt: the attempt of a launcher that restarts all ranks with the same store.

    Attributes:
        gone: ranks that never reported that they had stopped after a failure.
        begun: the number of folders that this rank has begun to write.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: float, attempt: str = "0") -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self._store = store
        # The prefix separates this command from data that an earlier command or a failed attempt left in the store.
        number = store.add(f"ckptfix/{attempt}/commands/{rank}", 1)
        self._prefix = f"ckptfix/{attempt}/{number}"
        self._lock = threading.Lock()
        self._failed = threading.Event()
        self._ended = threading.Event()
        self.begun = 0
        self.gone: frozenset[int] = frozenset()
        self.began = time.time()
        self._beats: dict[int, tuple[bytes, float]] = {}
        self._beating = threading.Thread(target=self._beat, daemon=True)
        self._beating.start()

    def _beat(self) -> None:
        count = 0
        while not self._ended.is_set():
            count += 1
            try:
                self.say(f"beat/{self.rank}", str(count))
                if self.said("failed"):
                    self._failed.set()
            except Exception:  # the store is gone, and with it the process that holds it
                self._failed.set()
                return
            self._ended.wait(BEAT)

    def say(self, key: str, value: str = "") -> None:
        with self._lock:
            self._store.set(f"{self._prefix}/{key}", value)

    def said(self, key: str) -> str | None:
        """Return the value of the key; None if it is not set yet."""
        name = f"{self._prefix}/{key}"
        with self._lock:
            return self._store.get(name).decode() if self._store.check([name]) else None

    def first(self, key: str) -> bool:
        """Return whether this rank is the first one to ask for the key."""
        with self._lock:
            return self._store.add(f"{self._prefix}/{key}", 1) == 1

    def check(self) -> None:
        """Raise RankFailed if another rank is known to have failed."""
        if self._failed.is_set():
            raise self._failure()

    def _failure(self) -> RankFailed:
        try:
            text = self.said("failed")
        except Exception:
            text = None
        if text is None:
            return self.lost(0)
        return RankFailed(**json.loads(text))

    def fail(self, message: str, *, said: bool, **place: Any) -> None:
        """Report to all ranks that the work has failed, and why, unless a rank has already reported a failure.

        Later failures are mostly consequences of the first.
        """
        with suppress(Exception):
            if self.said("failed") is None:
                self.say("failed", json.dumps({"message": message, "said": said, **place}))

    def wait(self, key: str, rank: int = 0) -> str:
        """Wait for the value that `rank` gives the key, and return it.

        Raises:
            RankFailed: a rank has failed or is gone.
        """
        while (value := self._asked(key)) is None:
            self.check()
            self.listen(rank)
            time.sleep(POLL)
        return value

    def _asked(self, key: str) -> str | None:
        try:
            return self.said(key)
        except Exception:
            self._failed.set()
            raise self._failure() from None

    def listen(self, rank: int) -> None:
        """Check whether a rank is alive."""
        beat = (self._asked(f"beat/{rank}") or "").encode()
        known = self._beats.get(rank)
        now = time.monotonic()
        if known is None or known[0] != beat:
            self._beats[rank] = beat, now
        elif now - known[1] > self.timeout:
            error = self.lost(rank, f": it has been silent for {self.timeout:g} s")
            self.fail(error.message, said=False, hint=AGAIN)
            raise error

    def lost(self, rank: int, why: str = "") -> RankFailed:
        """Return the error about a rank that is gone."""
        return RankFailed(f"rank {rank} of {self.size} is gone{why}", said=False, hint=AGAIN)

    def agree(self, what: str, value: str) -> None:
        """Ensure that all ranks have the same value.

        Raises:
            Refused: this rank's value differs from rank 0's.
        """
        if self.rank == 0:
            self.say(what, value)
        elif (first := self.wait(what)) != value:
            message = f"rank {self.rank} of {self.size} plans a different output than rank 0"
            raise Refused(f"{message}: {value[:12]}, not {first[:12]}", hint="give all machines the same input")

    def told(self, what: str, value: Callable[[], str]) -> str:
        """Return the value that rank 0 computes, on all ranks."""
        if self.rank == 0:
            found = value()
            self.say(what, found)
            return found
        return self.wait(what)

    def folder(self) -> str:
        """Return the key prefix for the next folder."""
        self.begun += 1
        self.say("begun")
        return f"folder{self.begun}"

    def checked(self, progress: Progress | None) -> Progress:
        """Return `progress` extended by a check whether another rank has failed."""

        def step(done: int, total: int) -> None:
            self.check()
            if progress is not None:
                progress(done, total)

        return step

    def give_up(self, error: BaseException) -> BaseException:
        """Stop because of `error`, and report it to the others unless it came from one of them.

        Returns:
            The error to raise: a different rank's, if that one no longer waited for this rank and removed its files.
        """
        with suppress(Exception):
            if isinstance(error, CkptfixError | OSError) and self.said(f"too slow/{self.rank}") is not None:
                failure = self._failure()
                failure.__cause__ = error
                error = failure
        if not isinstance(error, RankFailed):
            self.fail(str(error), said=True)
        self.stop()
        return error

    def stop(self) -> frozenset[int]:
        """Stop writing after a failure, wait for the others to stop, and return the ranks that did not confirm."""
        left = set(range(self.size)) - {self.rank}
        end = time.monotonic() + PATIENCE
        try:
            self.say(f"stopped/{self.rank}")
            while (left := {rank for rank in left if self.said(f"stopped/{rank}") is None}) and (
                time.monotonic() < end
            ):
                time.sleep(POLL)
            for rank in left:
                self.say(f"too slow/{rank}")
        except Exception:  # the store is gone, and with it the process that holds it
            left = {0} - {self.rank}
        self.gone = frozenset(left)
        return self.gone

    def cleans(self) -> bool:
        """Return whether this rank must remove the files of the ranks that are gone."""
        return self.rank == min(set(range(self.size)) - self.gone)

    def all_said(self, key: str) -> None:
        """Wait until every rank has set the key. Raises like `wait`."""
        for rank in range(self.size):
            self.wait(f"{key}/{rank}", rank)

    def end(self) -> None:
        """Leave the team: rank 0, which may hold the store, leaves last."""
        with suppress(Exception):
            self.say(f"left/{self.rank}")
            end = time.monotonic() + PATIENCE
            while self.rank == 0 and time.monotonic() < end:
                if all(self.said(f"left/{rank}") is not None for rank in range(self.size)):
                    break
                time.sleep(POLL)
        self._ended.set()
        self._beating.join(2 * BEAT)


_team: ContextVar[Team | None] = ContextVar("team", default=None)


def current() -> Team | None:
    """Return the ranks that this process works with; None if it works alone."""
    return _team.get()


@contextmanager
def joined(team: Team | None) -> Iterator[None]:
    """Write everything inside together with the ranks of `team`, or alone if it is None."""
    token = _team.set(team)
    try:
        yield
    finally:
        _team.reset(token)
