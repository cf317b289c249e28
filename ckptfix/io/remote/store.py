"""What is asked of a store: bytes of an object by range, and what lies in a folder. Its clients are in `CLIENTS`."""

from __future__ import annotations

import errno
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TypeVar

from ckptfix.checkpoint.stamp import Stamp
from ckptfix.errors import ChangedFile, CkptfixError, DamagedFile, MissingExtra, NoSuchFile, NotPermitted, WriteFailed
from ckptfix.numbers import whole_number
from ckptfix.urls import redacted, scheme_of

TRIES = 6
"""How often a request is made that fails for a reason that passes: some 6 seconds in all."""

FIRST_WAIT, LONGEST_WAIT = 0.2, 30.0
"""Seconds between two tries, and the longest that a server may ask for (Retry-After)."""

TIMEOUT = 30.0
"""Seconds without a byte after which a connection counts as broken."""

PASSING = frozenset((408, 425, 429, 500, 502, 503, 504, 509))
"""Answers of a server that may be another one in a moment."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Facts:
    """What a store says of an object.

    Attributes:
        tag: of this version of it: an ETag, or what the store has instead; empty where it has nothing.
    """

    size: int
    tag: str = ""
    mtime_ns: int = 0

    def stamp(self) -> Stamp:
        return Stamp(self.size, self.mtime_ns, tag=self.tag)

    def same(self, other: Facts) -> bool:
        return self.stamp().same(other.stamp())


class Passing(Exception):
    """A failure that may be gone at the next try.

    Args:
        wait: seconds that the server asks for.
    """

    def __init__(self, message: str, wait: float | None = None) -> None:
        super().__init__(message)
        self.wait = wait


class Object(ABC):
    """A file of a store, by its name.

    Attributes:
        checked_after: answers do not say of which version they are: that has to be asked at the end.
    """

    checked_after = False

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def get(self, start: int, length: int, expected: Facts | None) -> tuple[bytes, Facts]:
        """At most `length` bytes from `start` on, fewer only where it ends, and what it is: in one request.

        Raises:
            Passing: worth another try.
            ChangedFile: it is not what was `expected` any more.
            CkptfixError: it is not there, or may not be read.
        """

    def facts(self) -> Facts:
        """What it is now."""
        return self.get(0, 1, None)[1]


def retried(name: str, call: Callable[[], T], given_up: Callable[[], bool] = lambda: False) -> T:
    """What `call` returns, tried again while it raises `Passing`.

    Raises:
        WriteFailed: it failed as often as `TRIES`.
    """
    for number in range(TRIES):
        try:
            return call()
        except Passing as error:
            if number == TRIES - 1 or given_up():
                message = f"{redacted(str(error))} ({number + 1} tries)"
                raise WriteFailed(message, path=name, hint="try again later", number=errno.EIO) from None
            wait = FIRST_WAIT * 2**number * random.uniform(0.75, 1.25)
            if error.wait is not None:
                wait = max(wait, error.wait)
            time.sleep(min(wait, LONGEST_WAIT))
    raise AssertionError


def size_said(name: str, said: object) -> int:
    """The bytes that a store says an object has. Raises DamagedFile where it says no number."""
    size = whole_number(said)
    if size is None:
        raise DamagedFile(f"the size that the store gives is not a number: {str(said)[:80]!r}", path=name)
    return size


def changed(name: str) -> ChangedFile:
    """What is said of an object that is another one now."""
    return ChangedFile("it changed while it was read", path=name, hint="wait until its writer is done, and try again")


def failed(name: str, status: int, said: str = "", hint: str | None = None) -> CkptfixError | Passing:
    """What an answer of a server with this status is for us; `said` is the server's own word for it."""
    what = f"the server answered {status}{f' ({redacted(said)})' if said else ''}"
    if status in (404, 410):
        return NoSuchFile(name)
    if status == 412:
        return changed(name)
    if status in PASSING:
        return Passing(what)
    if status in (401, 403, 407):
        return NotPermitted(what, path=name, hint=hint or "give your client credentials that may", number=errno.EACCES)
    return WriteFailed(what, path=name, hint=hint, number=errno.EIO)


@dataclass(frozen=True, slots=True)
class Client:
    """What opens the names of a scheme.

    Attributes:
        module: of this room.
        package: what it needs, as it is imported; empty where Python alone does.
        install: what to give to pip.
    """

    module: str
    package: str = ""
    install: str = ""


_S3 = Client("s3", "botocore", "s3fs")
_GCS = Client("other", "gcsfs", "gcsfs")
_AZURE = Client("other", "adlfs", "adlfs")
_SSH = Client("other", "paramiko", "paramiko")

CLIENTS: Mapping[str, Client] = {
    **dict.fromkeys(("s3", "s3a"), _S3),
    **dict.fromkeys(("gs", "gcs"), _GCS),
    **dict.fromkeys(("az", "abfs", "abfss", "adl"), _AZURE),
    **dict.fromkeys(("http", "https"), Client("http")),
    "hf": Client("hub", "huggingface_hub", "huggingface_hub"),
    "oss": Client("other", "ossfs", "ossfs"),
    **dict.fromkeys(("memory", "ftp", "webhdfs", "dbfs"), Client("other")),
    "hdfs": Client("other", "pyarrow", "pyarrow"),
    "github": Client("other", "requests", "requests"),
    **dict.fromkeys(("sftp", "ssh"), _SSH),
}
"""Scheme -> what opens its names."""


def client_of(name: str) -> Client:
    """What opens `name`.

    Raises:
        MissingExtra: a package that it needs is not installed.
    """
    scheme = scheme_of(name)
    client = CLIENTS[scheme]
    needed = {"other": ("fsspec", client.package)}.get(client.module, (client.package,))
    for package in filter(None, needed):
        try:
            import_module(package)
        except ImportError as error:
            install = " ".join(dict.fromkeys(filter(None, ("'ckptfix[remote]'", client.install))))
            if _is_there(package):
                raise MissingExtra(
                    f"{package} fails to import: {error}", name=package, hint=f"pip install -U {install}"
                ) from error
            message = f"{scheme}:// needs {package}, which is not installed"
            raise MissingExtra(message, name=package, hint=f"pip install {install}") from None
    return client


def _is_there(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def object_of(name: str) -> Object:
    """The object called `name`. Raises as `client_of`."""
    found: Object = import_module(f"ckptfix.io.remote.{client_of(name).module}").object_of(name)
    return found
