"""The interface of a store: objects that are read by ranges and written by parts, and their errors.

Each kind of store implements it once (`s3`, `fsspec_store`, `http`, `hub`), and `clients` finds the one of a scheme.
One reader (`file.RemoteFile`) and one uploader (`upload.Uploader`) use it.
"""

from __future__ import annotations

import errno
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import ClassVar, TypeVar

from ckptfix.checkpoint import ByteRange
from ckptfix.checkpoint.file_version import FileStat
from ckptfix.dataclass import dataclass
from ckptfix.errors import ChangedFile, CkptfixError, DamagedFile, NoSuchFile, NotPermitted, WriteFailed
from ckptfix.numbers import whole_number
from ckptfix.urls import redacted

TRIES = 6
"""Attempts for a request that fails temporarily: some 6 seconds in total."""

FIRST_WAIT, LONGEST_WAIT = 0.2, 30.0
"""Seconds between two attempts, and the longest wait that a server can request (Retry-After)."""

CONNECT_TIMEOUT, FIRST_TRIES, FIRST_PATIENCE = 4.0, 3, 2.5
"""Seconds for one connection; and the attempts, and the seconds after which no other begins, as long as a store has
never answered: then its address or the network is wrong, and the user should know that within five seconds."""

TIMEOUT = 30.0
"""Seconds without a byte after which a connection counts as broken."""

PASSING = frozenset((408, 425, 429, 500, 502, 503, 504, 509))
"""Status codes of a server that may change with the next attempt."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts that a store reports about an object.

    Attributes:
        tag: identifies this version: an ETag, or the store's equivalent; empty if the store has no such tag.
    """

    size: int
    tag: str = ""
    mtime_ns: int = 0

    def stamp(self) -> FileStat:
        return FileStat(self.size, self.mtime_ns, tag=self.tag)

    def same(self, other: Facts) -> bool:
        return self.stamp().same(other.stamp())


class Passing(Exception):
    """A failure that may be gone at the next attempt.

    Args:
        wait: seconds that the server asks to wait.
        unreachable: no connection was made.
    """

    def __init__(self, message: str, wait: float | None = None, *, unreachable: bool = False) -> None:
        super().__init__(message)
        self.wait = wait
        self.unreachable = unreachable


class Object(ABC):
    """A file of a store, by its name.

    Attributes:
        checked_after: answers do not state their version, so that it must be checked at the end.
    """

    checked_after = False

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def get(self, start: int, length: int, expected: Facts | None) -> tuple[bytes, Facts]:
        """Return at most `length` bytes from `start` on, fewer only at its end, and its facts, in one request.

        Raises:
            Passing: worth another try.
            ChangedFile: it is not the `expected` version any more.
            CkptfixError: it does not exist, or cannot be read.
        """

    def facts(self) -> Facts:
        """Return its present facts."""
        return self.get(0, 1, None)[1]


Trace = Mapping[str, str | None]
"""``url``, ``upload`` (its id), ``tag`` (the ETag that a new object gets): the data to undo the work of another
process."""


def no_trace(trace: Trace) -> None:
    """Ignore a trace: no other process cleans up after this one."""


class CannotCopyError(Exception):
    """The store cannot copy a range of an object into a part."""


class NewObject(ABC):
    """An object that has no name yet: it takes parts, whose numbers begin with 1.

    Attributes:
        at_once: the most parts that are sent at the same time; with 1, they come in their order.
        copies: whether to ask the store for copies of ranges of its own objects.
        is_new: no object had its name.
    """

    at_once: ClassVar[int] = 1
    copies: ClassVar[bool] = False
    is_new: bool

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def begin(self, nbytes: int, like: str | None) -> None:
        """Prepare to take the parts.

        Args:
            nbytes: of all parts together.
            like: an object of this store that it is made from: it may get the properties of that one.
        """

    @abstractmethod
    def put(self, number: int, data: bytes) -> None:
        """Send a part."""

    def copy(self, number: int, where: ByteRange, tag: str) -> None:
        """Let the store copy a range of one of its objects into a part.

        Args:
            tag: of the version to copy; empty if it is unknown.

        Raises:
            CannotCopyError: it does not do that.
            ChangedFile: the object is not that version any more.
        """
        raise CannotCopyError("it has no such request")

    def end(self) -> None:  # noqa: B027 -- most have nothing to do
        """Do what can be done before it gets its name, when all parts are sent."""

    @abstractmethod
    def publish(self) -> None:
        """Publish it under its name, in one step.

        Raises:
            WouldOverwrite: an object with the name has appeared meanwhile, and must not be replaced.
        """

    @abstractmethod
    def abort(self) -> None:
        """Remove what was sent and has no name; `begin` can follow."""


class ObjectStore(ABC):
    """A kind of store, to read from."""

    @abstractmethod
    def object_of(self, name: str) -> Object:
        """Return the object called `name`."""

    @abstractmethod
    def listing(self, folder: str) -> Iterator[tuple[str, Facts]]:
        """Yield (name relative to the folder, its facts) for all objects below `folder`."""


class WritableStore(ObjectStore):
    """A kind of store that can be written to."""

    @abstractmethod
    def is_taken(self, name: str) -> bool:
        """Return whether an object has the name."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove an object."""

    @abstractmethod
    def new_object(self, name: str, *, overwrite: bool, began: Callable[[Trace], None] = no_trace) -> NewObject:
        """Return a new object, which will get the name.

        Args:
            overwrite: replace an object that has the name.
            began: called with its trace (`take_away`) before the store knows of it (``upload`` and ``tag`` are None),
                when the store knows of it, and before it gets its name.
        """

    def take_away(self, trace: Trace) -> None:
        """Remove the work of a process that is gone: its parts, or a new object that already has the name.

        An object is kept if its ETag differs from the one that the process would have made: it may belong to another
        process.
        """

    def begun(self, name: str, since: datetime) -> Iterator[Trace]:
        """Yield the uploads of `name` that were begun since then and have not ended, if the store lists them."""
        return iter(())


def retried(name: str, call: Callable[[], T], given_up: Callable[[], bool] = lambda: False) -> T:
    """Return the result of `call`, which is retried while it raises `Passing`.

    Raises:
        WriteFailed: it failed `TRIES` times, or a store that never answered cannot be reached.
    """
    store = name.partition("://")[2].partition("/")[0]
    began = time.monotonic()
    for number in range(TRIES):
        try:
            found = call()
        except Passing as error:
            patient = number < FIRST_TRIES - 1 and time.monotonic() - began < FIRST_PATIENCE
            if error.unreachable and store not in _answered and not patient:
                hint = "check AWS_ENDPOINT_URL, the region, the name of the bucket, and the network"
                raise WriteFailed(redacted(str(error)), path=name, hint=hint, number=errno.EIO) from None
            if number == TRIES - 1 or given_up():
                message = f"{redacted(str(error))} ({number + 1} tries)"
                raise WriteFailed(message, path=name, hint="try again later", number=errno.EIO) from None
            wait = FIRST_WAIT * 2**number * random.uniform(0.75, 1.25)
            if error.wait is not None:
                wait = max(wait, error.wait)
            time.sleep(min(wait, LONGEST_WAIT))
        else:
            _answered.add(store)
            return found
    raise AssertionError


_answered: set[str] = set()
"""Buckets and hosts that have answered in this process."""


def size_said(name: str, said: object) -> int:
    """Return the size that a store states for an object. Raises DamagedFile if it is not a number."""
    size = whole_number(said)
    if size is None:
        raise DamagedFile(f"the size that the store reports is not a number: {str(said)[:80]!r}", path=name)
    return size


def changed(name: str) -> ChangedFile:
    """Return the error about an object that has been replaced."""
    return ChangedFile("it changed while it was read", path=name, hint="wait until its writer is done, and try again")


def failed(name: str, status: int, said: str = "", hint: str | None = None) -> CkptfixError | Passing:
    """Return the error for an answer with this status; `said` is the server's own code or text for it."""
    what = f"the server answered {status}{f' ({redacted(said)})' if said else ''}"
    if status in (404, 410):
        return NoSuchFile(name)
    if status == 412:
        return changed(name)
    if status in PASSING:
        return Passing(what)
    if status in (401, 403, 407):
        return NotPermitted(what, path=name, hint=hint or "set up credentials that have access", number=errno.EACCES)
    return WriteFailed(what, path=name, hint=hint, number=errno.EIO)
