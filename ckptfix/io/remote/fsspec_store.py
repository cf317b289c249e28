"""The names of all other stores, such as ``gs://`` and ``az://``, through their file system of fsspec."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

from ckptfix.errors import CkptfixError, MissingExtra, NoSuchFile, NotPermitted, WouldOverwrite, WriteFailed
from ckptfix.io.output import TEMP_SUFFIX
from ckptfix.io.remote.multipart import MOST_PARTS, PART
from ckptfix.io.remote.store import (
    Facts,
    NewObject,
    Object,
    Passing,
    Trace,
    WritableStore,
    changed,
    no_trace,
    retried,
    size_said,
)
from ckptfix.urls import redacted, scheme_of, secret_of

AZURE = frozenset(("az", "abfs", "abfss", "adl"))
"""Schemes whose files can be opened as new ones (``xb``), and are uploaded in blocks of a given size."""

NAMED_AT_ONCE = frozenset(("hdfs",))
"""Schemes whose files have their name as soon as they are opened. Each is written under another name, and renamed."""

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
    except FileExistsError:
        raise WouldOverwrite("appeared while it was being written", path=name) from None
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


class NewFileSystemObject(NewObject):
    """A file of a file system of fsspec, which is written from front to back.

    Some files get their name when they are committed, others (`NAMED_AT_ONCE`) when they are renamed. Those of other
    file systems, such as adlfs, are complete when they are closed: they stay open until then, and after a failure the
    data that they hold back is never sent.
    """

    def __init__(self, name: str, *, overwrite: bool) -> None:
        super().__init__(name)
        self._overwrite = overwrite
        self._system, self._path = file_system(name)
        self.is_new = not asked_again(name, lambda: self._system.exists(self._path))
        self._file: Any = None
        self._publish: Callable[[], object]
        self._discard: Callable[[], object] | None = None

    def begin(self, nbytes: int, like: str | None) -> None:
        how: dict[str, Any] = {"mode": "wb"}
        if scheme_of(self.name) in AZURE:
            how = {"mode": "wb" if self._overwrite else "xb", "block_size": max(PART, -(-nbytes // MOST_PARTS))}
        path = self._path
        if scheme_of(self.name) in NAMED_AT_ONCE:
            folder, _, last = path.rpartition("/")
            path = f"{folder}/.{last[:40]}.{os.urandom(8).hex()}{TEMP_SUFFIX}"
            self._publish, self._discard = partial(self._rename, path), partial(self._system.rm_file, path)
        file = self._file = asked_once(self.name, lambda: _opened(self._system, path, how))
        if path != self._path:
            return
        if _is_buffered(file) and not _has_commit(file):
            self._publish = file.close
        else:
            self._publish, self._discard = file.commit, file.discard

    def put(self, number: int, data: bytes) -> None:
        asked_once(self.name, lambda: self._file.write(data))

    def end(self) -> None:
        if self._discard is not None:
            asked_once(self.name, self._file.close)

    def publish(self) -> None:
        asked_once(self.name, self._publish)
        self._file = None

    def _rename(self, temp: str) -> None:
        if not self._overwrite and self._system.exists(self._path):
            raise FileExistsError
        self._system.mv(temp, self._path)

    def abort(self) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        buffered = _is_buffered(file)
        if not buffered:
            with suppress(Exception):
                file.close()
        try:
            if self._discard is not None:
                asked_once(self.name, self._discard)
        finally:
            if buffered:
                file.closed = True  # closing it would send the rest, and publish its name


def _opened(system: Any, path: str, how: Mapping[str, Any]) -> Any:
    """Open a file to write: one that must be committed, if the file system has such files.

    A file system decides so when it opens a file during a transaction. Each file is then committed by itself, so that
    those that already have their names can be removed if a later one fails.
    """
    with _lock:
        system.start_transaction()
        try:
            return system.open(path, **how)
        finally:
            system.transaction.files.clear()
            system._intrans = False


def _is_buffered(file: Any) -> bool:
    """Return whether a file is of fsspec's own class, which holds data back and sends it when it is closed."""
    from fsspec.spec import AbstractBufferedFile

    return isinstance(file, AbstractBufferedFile)


def _has_commit(file: Any) -> bool:
    """Return whether a buffered file gets its name when it is committed rather than when it is closed."""
    from fsspec.spec import AbstractBufferedFile

    return type(file).commit is not AbstractBufferedFile.commit


class FileSystemStore(WritableStore):
    def object_of(self, name: str) -> FileSystemObject:
        return FileSystemObject(name)

    def listing(self, folder: str) -> Iterator[tuple[str, Facts]]:
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

    def is_taken(self, name: str) -> bool:
        system, path = file_system(name)
        return bool(asked_again(name, lambda: system.exists(path)))

    def remove(self, name: str) -> None:
        system, path = file_system(name)
        asked_again(name, lambda: system.rm_file(path))

    def new_object(
        self, name: str, *, overwrite: bool, began: Callable[[Trace], None] = no_trace
    ) -> NewFileSystemObject:
        return NewFileSystemObject(name, overwrite=overwrite)


STORE = FileSystemStore()
