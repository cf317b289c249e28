"""Uploads to a file system of fsspec: the files get their names one after the other, once all of them are complete.

File systems whose files support ``commit`` and ``discard`` use their transactions. The files of others, such as adlfs,
are complete when they are closed: they stay open until then, and after a failure the data that they hold back is never
sent.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from ckptfix.checkpoint import OutputFile
from ckptfix.errors import CkptfixError, Unsupported, WouldOverwrite, WriteFailed
from ckptfix.io.background_checks import Checking
from ckptfix.io.read import read_chunks
from ckptfix.io.remote import fsspec_store, multipart
from ckptfix.io.remote.rank_folder import Steps
from ckptfix.io.source import is_local
from ckptfix.io.sources import Sources
from ckptfix.io.write_log import note, record
from ckptfix.urls import scheme_of

AZURE = frozenset(("az", "abfs", "abfss", "adl"))
"""Schemes whose files can be opened as new ones (``xb``), and are uploaded in blocks of a given size."""


class FsspecUpload:
    """The files of one output."""

    def __init__(self, sources: Sources, overwrite: bool, steps: Steps) -> None:
        self._sources, self._overwrite = sources, overwrite
        self._system: Any = None
        self._held: list[tuple[str, Any, bool]] = []
        self._closed: list[str] = []
        self._through, self._last = 0, ""
        self.replaced = False

    def write(self, file: OutputFile, advance: Callable[[int], None], checking: Checking) -> None:
        path = self._last = file.path
        system, inner = fsspec_store.file_system(path)
        if self._system is None:
            self._system = system
            system.start_transaction()
        elif system is not self._system:
            raise Unsupported("the files of one output belong to several stores", path=path)
        there = bool(fsspec_store.asked_again(path, lambda: system.exists(inner)))
        self.replaced |= there
        how: dict[str, Any] = {"mode": "wb"}
        if scheme_of(path) in AZURE:
            size = max(multipart.PART, -(-file.nbytes // multipart.MOST_PARTS))
            how = {"mode": "wb" if self._overwrite else "xb", "block_size": size}
        target = fsspec_store.asked_once(path, lambda: system.open(inner, **how))
        if not _commits(target):
            self._held.append((path, target, not there))
        count = 0
        for segment in file.segments:
            for data in (segment,) if isinstance(segment, bytes) else read_chunks(segment):
                fsspec_store.asked_once(path, partial(target.write, data))
                count += len(data)
                advance(len(data))
        if count != file.nbytes:
            raise WriteFailed(f"{file.nbytes} bytes were planned, but {count} arrived", path=path)
        if _commits(target):
            fsspec_store.asked_once(path, target.close)
        same = {where for where in self._sources.stamps if scheme_of(where) == scheme_of(path)}
        if any(not is_local(where) for where in same) and file.nbytes > multipart.LEAST:
            self._through += count

    def publish(self) -> None:
        while self._held:
            path, target, new = self._held[0]
            try:
                target.close()
            except FileExistsError:
                raise WouldOverwrite("appeared while it was being written", path=path) from None
            except Exception as error:
                fsspec_store.asked_once(path, partial(_again, error))
            del self._held[0]
            if new:
                self._closed.append(path)
        fsspec_store.asked_once(self._last, lambda: self._system.end_transaction())
        self._system = None
        if self._through:
            scheme = scheme_of(self._last)
            note(f"{scheme}:// cannot copy ranges of objects: all {self._through:,} bytes pass through this machine")

    def abort(self) -> None:
        for _, target, _ in self._held:
            target.closed = True  # closing it would send the rest, and publish its name
        for path in self._closed:
            with suppress(CkptfixError):
                system, inner = fsspec_store.file_system(path)
                fsspec_store.asked_again(path, partial(system.rm_file, inner))
        system, self._system = self._system, None
        if system is not None:
            try:
                fsspec_store.asked_once(self._last, lambda: system.transaction.complete(commit=False))
            except CkptfixError as error:
                record(f"{self._last}: the uploaded data could not be removed: {error}")
            system._intrans = False


def _again(error: Exception) -> None:
    raise error


def _commits(target: Any) -> bool:
    """Return whether a file gets its name at the end of its transaction rather than when it is closed."""
    from fsspec.spec import AbstractBufferedFile

    return not isinstance(target, AbstractBufferedFile) or type(target).commit is not AbstractBufferedFile.commit
