"""An upload of a file of a plan to S3: uploaded or copied parts, and one request that makes an object of them.

Nothing has the name before that request, and a failure removes the parts. The new object gets the properties of the old
object with the same name (metadata, tags, encryption, storage class). If there is no old object, it gets those of the
object that it is copied from.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from datetime import datetime
from typing import Any

from ckptfix.checkpoint import ByteRange, OutputFile
from ckptfix.checkpoint.file_version import FileStat
from ckptfix.errors import CkptfixError, DamagedFile, NoSuchFile, WouldOverwrite, WriteFailed
from ckptfix.io.copy import Saw
from ckptfix.io.read import read_chunks
from ckptfix.io.remote.multipart import LEAST, Copy, Part, parts_of
from ckptfix.io.remote.multipart import Upload as Bytes
from ckptfix.io.remote.s3 import call, location
from ckptfix.io.remote.store import retried
from ckptfix.io.source import BATCH, open_source
from ckptfix.io.write_log import note
from ckptfix.urls import scheme_of

Trace = Mapping[str, str | None]
"""``url``, ``upload`` (its id), ``tag`` (the ETag that a new object gets): the data to undo the work of another
process."""

UNDERWAY = 128 << 20
"""Bytes of parts that are being uploaded at the same time."""

_CARRIED = (
    *("ContentType", "ContentDisposition", "ContentEncoding", "ContentLanguage", "CacheControl", "Expires"),
    *("Metadata", "StorageClass", "ServerSideEncryption", "SSEKMSKeyId", "BucketKeyEnabled"),
    "WebsiteRedirectLocation",
)
"""Properties of an object, whose names in answers and requests are equal."""


def asked(name: str, operation: str, **params: Any) -> Any:
    """Return the store's answer, with retries."""
    return retried(name, lambda: call(name, operation, **params))


def head(name: str) -> Any:
    """Return the store's description of an object; None if it does not exist."""
    try:
        return asked(name, "head_object", **location(name).params)
    except NoSuchFile:
        return None


def in_s3(name: str) -> bool:
    """Return whether this module writes to the store of `name`."""
    return scheme_of(name) in ("s3", "s3a")


class UploadWriter:
    """One file in progress.

    Args:
        stamps: the states of the inputs when they were read: parts are copied only from those versions.
        overwrite: replace an object that has the name.
        began: called with its trace (`take_away`) before the store knows of it (``upload`` and ``tag`` are None),
            when the store knows of it, and before it gets its name.
    """

    def __init__(
        self,
        file: OutputFile,
        stamps: Mapping[str, FileStat],
        *,
        overwrite: bool,
        began: Callable[[Trace], None] = lambda trace: None,
    ) -> None:
        self.file, self._began = file, began
        self.copied = self.sent = 0
        self.published = False
        self._stamps, self._overwrite = stamps, overwrite
        self._where = location(file.path)
        self._old = head(file.path)
        if self._old is not None and not overwrite:
            raise WouldOverwrite("exists", path=file.path, hint="choose a different name, or add --force to replace it")
        self._id: str | None = None
        self._done: dict[int, str] = {}
        self._small: bytes | None = None

    @property
    def is_new(self) -> bool:
        """True if no object had its name."""
        return self._old is None

    def write(self, advance: Callable[[int], None], saw: Saw) -> None:
        """Upload all of it, without its name."""
        parts = parts_of(self.file, self._copied)
        if self.file.nbytes < LEAST and all(isinstance(part, Bytes) for part in parts):
            self._small = b"".join(_read(part, saw) for part in parts if isinstance(part, Bytes))
            advance(self.file.nbytes)
            return
        try:
            self._send(parts, advance, saw)
        except _CannotCopyError as error:
            self.abort()
            self._done.clear()
            self.copied = self.sent = 0
            note(f"the store did not copy ranges ({error}): all {self.file.nbytes:,} bytes pass through this machine")
            self._send(parts_of(self.file, lambda where: False), advance, saw)

    def _copied(self, where: ByteRange) -> bool:
        return in_s3(where.path) and where.path in self._stamps

    def _send(self, parts: list[Part], advance: Callable[[int], None], saw: Saw) -> None:
        self._began(self._trace(None))
        answer = asked(self.file.path, "create_multipart_upload", **self._place, **self._given())
        self._id = answer["UploadId"]
        self._began(self._trace(None))
        longest = max((part.nbytes for part in parts if isinstance(part, Bytes)), default=LEAST)
        many = max(2, min(16, UNDERWAY // longest))
        waiting: set[Future[int]] = set()
        with ThreadPoolExecutor(many, "parts") as pool:
            try:
                # Copies come first: a store that cannot copy then reports it before much is uploaded.
                ordered = sorted(enumerate(parts, 1), key=lambda row: not isinstance(row[1], Copy))
                for number, part in ordered:
                    if len(waiting) >= many:
                        waiting = _settled(waiting, advance)
                    if isinstance(part, Copy):
                        waiting.add(pool.submit(self._copy, number, part))
                    else:
                        waiting.add(pool.submit(self._put, number, _read(part, saw)))
                while waiting:
                    waiting = _settled(waiting, advance)
            except BaseException:
                for future in waiting:
                    future.cancel()
                raise

    @property
    def _place(self) -> dict[str, str]:
        return {"Bucket": self._where.bucket, "Key": self._where.key}

    def _put(self, number: int, data: bytes) -> int:
        digest = base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()
        answer = asked(
            self.file.path, "upload_part", **self._place, UploadId=self._id, PartNumber=number, Body=data,
            ContentMD5=digest,
        )  # fmt: skip
        self._done[number] = answer["ETag"]
        self.sent += len(data)
        return len(data)

    def _copy(self, number: int, part: Copy) -> int:
        where = part.where
        params: dict[str, Any] = {
            **self._place,
            "UploadId": self._id,
            "PartNumber": number,
            "CopySource": location(where.path).params,
            "CopySourceRange": f"bytes={where.offset}-{where.end - 1}",
        }
        if tag := self._stamps[where.path].tag:
            params["CopySourceIfMatch"] = tag
        try:
            answer = retried(where.path, lambda: call(where.path, "upload_part_copy", **params))
            self._done[number] = answer["CopyPartResult"]["ETag"]
        except DamagedFile:
            raise
        except (CkptfixError, KeyError) as error:
            raise _CannotCopyError(error.message if isinstance(error, CkptfixError) else "it sent no ETag") from None
        self.copied += where.length
        return where.length

    def _given(self) -> dict[str, Any]:
        """Return the properties that the new object gets."""
        source, said = self.file.path, self._old
        if said is None:
            reads = (piece.path for piece in self.file.segments if isinstance(piece, ByteRange))
            source = next(filter(in_s3, reads), "")
            said = head(source) if source else None
        if said is None:
            return {}
        given = {name: said[name] for name in _CARRIED if said.get(name)}
        with suppress(CkptfixError):
            tags = asked(source, "get_object_tagging", **location(source).params).get("TagSet", [])
            if tags:
                given["Tagging"] = "&".join(f"{_quoted(row['Key'])}={_quoted(row['Value'])}" for row in tags)
        return given

    def _trace(self, tag: str | None) -> Trace:
        return {"url": self.file.path, "upload": self._id, "tag": tag if self.is_new else None}

    def _tag(self) -> str:
        """Return the ETag that it will have if its store computes ETags as S3 does, without an encryption key."""
        if self._small is not None:
            return hashlib.md5(self._small, usedforsecurity=False).hexdigest()
        tags = [tag.strip('"') for _, tag in sorted(self._done.items())]
        if any(len(tag) != 32 for tag in tags):
            return ""
        joined = bytes.fromhex("".join(tags))
        return f"{hashlib.md5(joined, usedforsecurity=False).hexdigest()}-{len(tags)}"

    def publish(self) -> None:
        """Publish the object under its name, in one step.

        Raises:
            WouldOverwrite: an object has appeared meanwhile.
        """
        if self._id is not None or self.is_new:
            self._began(self._trace(self._tag()))
        try:
            self._publish({} if self._overwrite else {"IfNoneMatch": "*"})
        except DamagedFile:  # the condition is not met
            raise WouldOverwrite("appeared while it was being written", path=self.file.path) from None
        except WriteFailed as error:
            if self._overwrite or not any(word in error.message for word in ("501", "NotImplemented")):
                raise
            if head(self.file.path) is not None:
                raise WouldOverwrite("appeared while it was being written", path=self.file.path) from None
            self._publish({})  # this store does not support conditions
        self.published = True

    def _publish(self, condition: dict[str, str]) -> None:
        if self._small is not None:
            asked(self.file.path, "put_object", **self._place, Body=self._small, **self._given(), **condition)
            self.sent += len(self._small)
            return
        rows = [{"PartNumber": number, "ETag": tag} for number, tag in sorted(self._done.items())]
        try:
            asked(
                self.file.path, "complete_multipart_upload", **self._place, UploadId=self._id,
                MultipartUpload={"Parts": rows}, **condition,
            )  # fmt: skip
        except NoSuchFile:
            # The answer to a successful request may be lost, and the second attempt then finds no upload.
            now = head(self.file.path)
            before = None if self._old is None else self._old["ETag"]
            if now is None or now["ContentLength"] != self.file.nbytes or now["ETag"] == before:
                raise WriteFailed("the upload is gone", path=self.file.path) from None
        self._id = None

    def abort(self) -> None:
        """Remove the parts that have no name yet."""
        if self._id is not None:
            number, self._id = self._id, None
            with suppress(NoSuchFile):
                asked(self.file.path, "abort_multipart_upload", **self._place, UploadId=number)

    def remove(self) -> None:
        """Remove the object that was published."""
        asked(self.file.path, "delete_object", **self._place)


def take_away(trace: Trace) -> None:
    """Remove the work of a process that is gone: its parts, or a new object that already has the name.

    An object is kept if its ETag differs from the one that the process would have made: it may belong to another
    process.
    """
    name, number, tag = str(trace["url"]), trace["upload"], trace["tag"]
    place = location(name).params
    if number is not None:
        with suppress(NoSuchFile):
            asked(name, "abort_multipart_upload", **place, UploadId=number)
    if tag and (there := head(name)) is not None and there["ETag"].strip('"') == tag:
        asked(name, "delete_object", **place)


def begun(name: str, since: datetime) -> Iterator[Trace]:
    """Yield the uploads of `name` that were begun since then and have not ended, if the store lists them."""
    where = location(name)
    for row in asked(name, "list_multipart_uploads", Bucket=where.bucket, Prefix=where.key).get("Uploads", ()):
        if row["Key"] == where.key and row["Initiated"] >= since:
            yield {"url": name, "upload": row["UploadId"], "tag": None}


class _CannotCopyError(Exception):
    """The store cannot copy a range of an object into a part."""


def _settled(waiting: set[Future[int]], advance: Callable[[int], None]) -> set[Future[int]]:
    done, left = wait(waiting, return_when=FIRST_COMPLETED)
    for future in done:
        advance(future.result())
    return left


def _read(part: Bytes, saw: Saw) -> bytes:
    """Return the bytes of a part."""
    made: list[bytes] = []
    for segment in part.segments:
        if isinstance(segment, bytes):
            made.append(segment)
        elif isinstance(segment, ByteRange):
            with open_source(segment.path) as source:
                source.expect(segment.offset, segment.length)
                for offset in range(segment.offset, segment.end, BATCH):
                    data = source.read(offset, min(BATCH, segment.end - offset))
                    saw(segment.path, offset, data)
                    made.append(data)
        else:
            made += read_chunks(segment)
    data = b"".join(made)
    if len(data) != part.nbytes:
        raise WriteFailed(f"{part.nbytes} bytes were planned, but {len(data)} arrived")
    return data


def _quoted(text: str) -> str:
    from urllib.parse import quote_plus

    return quote_plus(text)
