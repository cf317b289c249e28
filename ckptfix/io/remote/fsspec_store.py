"""The names of all other stores, such as ``gs://`` and ``az://``, through their file system of fsspec."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from typing import Any, TypeVar

from ckptfix.errors import CkptfixError, MissingExtra, NoSuchFile, NotPermitted, WriteFailed
from ckptfix.io.remote.store import Facts, Object, Passing, changed, retried, size_said
from ckptfix.urls import redacted, secret_of

_TAGS = ("ETag", "etag", "e_tag", "generation", "version_id", "content_md5", "md5Hash")
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "created")
_LATEST = 1e11
"""A limit for times, in seconds since the epoch: three thousand years."""

_lock = threading.Lock()

T = TypeVar("T")


def file_system(name: str) -> tuple[Any, str]:
    """Return the file system of `name`, and its path there."""
    import fsspec

    with _lock:
        found: tuple[Any, str] = asked(name, lambda: fsspec.core.url_to_fs(secret_of(name)))
        return found


def asked(name: str, ask: Callable[[], T]) -> T:
    """Return the result of `ask`; errors of the client become errors of ckptfix."""
    try:
        return ask()
    except CkptfixError:
        raise
    except ImportError as error:
        raise MissingExtra(redacted(str(error)), name=error.name or "", hint="install the missing package") from None
    except FileNotFoundError:
        raise NoSuchFile(name) from None
    except PermissionError as error:
        raise NotPermitted(redacted(str(error)), path=name, hint="set up credentials that have access") from None
    except (ConnectionError, TimeoutError, BlockingIOError) as error:
        raise Passing(redacted(str(error)) or "the connection broke") from None
    except OSError as error:
        raise Passing(redacted(str(error)) or type(error).__name__) from None
    except Exception as error:  # a client may raise anything
        raise WriteFailed(f"{type(error).__name__}: {redacted(str(error))}", path=name) from None


def asked_again(name: str, ask: Callable[[], T]) -> T:
    """Return the result of `ask`, and retry it after temporary failures: only for operations that can be repeated."""
    return retried(name, lambda: asked(name, ask))


def asked_once(name: str, ask: Callable[[], T]) -> T:
    """Return the result of `ask`, which must not be repeated, such as the next part of a file.

    Raises:
        WriteFailed: it failed, possibly for a temporary reason.
    """
    try:
        return asked(name, ask)
    except Passing as error:
        raise WriteFailed(str(error), path=name, hint="try again later", number=errno.EIO) from None


def facts_of(info: dict[str, Any]) -> Facts:
    """Return the facts of a file from its file system's description."""
    tag = next((str(info[key]) for key in _TAGS if info.get(key)), "")
    at = next((info[key] for key in _TIMES if info.get(key)), 0)
    if isinstance(at, str):
        with suppress(ValueError):
            at = datetime.fromisoformat(at)
    if isinstance(at, datetime):
        at = at.timestamp()
    seen = int(at * 10**9) if isinstance(at, int | float) and abs(at) < _LATEST else 0
    return Facts(size_said(str(info.get("name", "")), info["size"] or 0), tag, seen)


class FileSystemObject(Object):
    """A file of a file system of fsspec; it is checked for changes before and after each read."""

    checked_after = True

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._system, self._path = file_system(name)

    def get(self, start: int, length: int, expected: Facts | None) -> tuple[bytes, Facts]:
        facts = self.facts() if expected is None else expected
        end = min(start + length, facts.size)
        data = b""
        if end > start:
            data = bytes(asked(self.name, lambda: self._system.cat_file(self._path, start=start, end=end)))
        if len(data) != max(end - start, 0):
            if not self.facts().same(facts):
                raise changed(self.name)
            raise Passing("the connection broke")
        return data, facts

    def facts(self) -> Facts:
        def ask() -> Facts:
            self._system.invalidate_cache(self._path)
            info = self._system.info(self._path)
            if info.get("type") == "directory":
                raise FileNotFoundError
            return facts_of(info)

        return asked(self.name, ask)


def object_of(name: str) -> FileSystemObject:
    return FileSystemObject(name)


def listing(folder: str) -> Iterator[tuple[str, Facts]]:
    """Yield (name relative to the folder, its facts) for all files below `folder`."""
    system, path = file_system(folder)

    def ask() -> dict[str, dict[str, Any]]:
        system.invalidate_cache(path)
        found: dict[str, dict[str, Any]] = system.find(path, detail=True)
        return found

    try:
        rows = asked_again(folder, ask)
    except NoSuchFile:
        return
    above = path.rstrip("/")
    for name, info in sorted(rows.items()):
        below = name[len(above) :] if name.startswith(above) else name
        if below.strip("/"):
            yield below.strip("/"), facts_of(info)
