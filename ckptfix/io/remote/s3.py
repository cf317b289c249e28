"""``s3://BUCKET/KEY[?versionId=VERSION]``: objects of S3, and of stores with the same interface.

A new object is made of uploaded and copied parts, by one request at the end. It gets the properties (metadata, tags,
encryption, storage class) of the old object with the same name. If there is no old object, it gets those of the object
that it is copied from.

The client is botocore, which both s3fs and boto3 install: it finds credentials, profile, region and endpoint
(``AWS_ENDPOINT_URL``). The configuration of fsspec for ``s3`` (``endpoint_url``, ``key``, ``secret``, ``token``,
``profile``, ``anon``, ``client_kwargs``, ``config_kwargs``) takes precedence.
"""

from __future__ import annotations

import base64
import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from typing import Any, ClassVar, NamedTuple, NoReturn
from urllib.parse import quote_plus

from ckptfix.checkpoint import ByteRange
from ckptfix.errors import CkptfixError, DamagedFile, NoSuchFile, NotPermitted, WouldOverwrite, WriteFailed
from ckptfix.io.remote import obstore_s3
from ckptfix.io.remote.multipart import LEAST
from ckptfix.io.remote.store import (
    CONNECT_TIMEOUT,
    TIMEOUT,
    CannotCopyError,
    Facts,
    NewObject,
    Object,
    Passing,
    Trace,
    WritableStore,
    changed,
    failed,
    no_trace,
    retried,
    size_said,
)
from ckptfix.numbers import whole_number
from ckptfix.urls import redacted

AT_ONCE = 32
"""Connections that are kept open."""

PATIENCE = 900.0
"""Seconds that a store may take for its own work, without sending a byte of an answer."""

_LONG = {"upload_part_copy", "complete_multipart_upload", "copy_object"}
_PASSING = {"SlowDown", "RequestTimeout", "InternalError", "ServiceUnavailable", "Throttling", "RequestTimeTooSkewed"}
_lock = threading.Lock()
_clients: dict[bool, Any] = {}


class Location(NamedTuple):
    """The place of an object."""

    bucket: str
    key: str
    version: str | None = None

    @property
    def params(self) -> dict[str, str]:
        made = {"Bucket": self.bucket, "Key": self.key}
        return made if self.version is None else {**made, "VersionId": self.version}


def location(name: str) -> Location:
    """Return the location of the object called `name`."""
    rest = name.partition("://")[2]
    rest, _, version = rest.partition("?versionId=")
    bucket, _, key = rest.partition("/")
    return Location(bucket, key, version or None)


def client(*, patient: bool = False) -> Any:
    """Return the client of this process, or one that waits longer for an answer; safe to share between threads."""
    with _lock:
        if patient not in _clients:
            _clients[patient] = _made(PATIENCE if patient else TIMEOUT)
        return _clients[patient]


def _made(timeout: float) -> Any:
    import botocore.session
    from botocore import UNSIGNED
    from botocore.config import Config

    options = _configured()
    session = botocore.session.Session(profile=options.get("profile"))
    settings: dict[str, Any] = {
        # Not every store supports checksums, so they are sent only where one is required.
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "retries": {"total_max_attempts": 1, "mode": "standard"},
        "max_pool_connections": AT_ONCE,
        "connect_timeout": CONNECT_TIMEOUT,
        "read_timeout": timeout,
        **options.get("config_kwargs", {}),
    }
    if str(options.get("anon", "")).lower() in ("true", "1", "yes"):
        settings["signature_version"] = UNSIGNED
    named = {
        "endpoint_url": options.get("endpoint_url"),
        "aws_access_key_id": options.get("key") or options.get("username"),
        "aws_secret_access_key": options.get("secret") or options.get("password"),
        "aws_session_token": options.get("token"),
        **options.get("client_kwargs", {}),
    }
    if session.get_config_variable("region") is None and "region_name" not in named:
        named["region_name"] = "us-east-1"
    return session.create_client("s3", config=Config(**settings), **named)


def _configured() -> dict[str, Any]:
    try:
        from fsspec.config import conf
    except ImportError:
        return {}
    return dict(conf.get("s3") or {})


def forget_client() -> None:
    """Forget the client, so that the next use creates a new one: the environment has changed."""
    with _lock:
        _clients.clear()
    obstore_s3.forget()


def call(name: str, operation: str, **params: Any) -> Any:
    """Return the store's answer to `operation`.

    Raises:
        Passing: worth another try.
        CkptfixError: about `name`.
    """
    return asked(name, lambda: getattr(client(patient=operation in _LONG), operation)(**params))


def asked(name: str, ask: Callable[[], Any]) -> Any:
    """Return the result of `ask`; errors of the client become errors of ckptfix."""
    from botocore import exceptions

    try:
        return ask()
    except exceptions.ClientError as error:
        raise _failed(name, error.response) from None
    except (exceptions.NoCredentialsError, exceptions.PartialCredentialsError, exceptions.TokenRetrievalError):
        hint = "run aws configure; or set AWS_PROFILE; or, for a public bucket, set FSSPEC_S3_ANON=true"
        raise NotPermitted("no credentials were found", path=name, hint=hint) from None
    except (exceptions.HTTPClientError, exceptions.ConnectionError) as error:
        unreachable = (exceptions.EndpointConnectionError, exceptions.ConnectTimeoutError)
        raise Passing(_said(error), unreachable=isinstance(error, unreachable)) from None
    except exceptions.IncompleteReadError:
        raise Passing("the connection broke") from None
    except (exceptions.BotoCoreError, ValueError) as error:
        raise WriteFailed(_said(error), path=name) from None
    except (ConnectionError, TimeoutError):
        raise Passing("the connection broke") from None


def _said(error: Exception) -> str:
    return redacted(str(error)).rstrip(".")


def _failed(name: str, response: Any) -> CkptfixError | Passing:
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    code = str(response.get("Error", {}).get("Code", ""))
    if code in _PASSING:
        return Passing(f"the store answered {status} ({code})")
    if code == "NoSuchBucket":
        return WriteFailed("the bucket does not exist", path=name)
    if whole_number(code) is not None:
        code = ""
    return failed(name, status, code)


def facts_of(answer: Any, size: int) -> Facts:
    """Return the facts about an object from an answer."""
    changed_at = answer.get("LastModified")
    at = int(changed_at.timestamp()) * 10**9 if isinstance(changed_at, datetime) else 0
    return Facts(size, str(answer.get("ETag") or ""), at)


class S3Object(Object):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._where = location(name)
        if not self._where.key:
            _no_object(name)

    def get(self, start: int, length: int, expected: Facts | None) -> tuple[bytes, Facts]:
        if self._where.version is None:
            found = obstore_s3.get(self._where.bucket, self._where.key, start, length, expected, _configured)
            if found is not None:
                return found
        params: dict[str, Any] = {**self._where.params, "Range": f"bytes={start}-{start + length - 1}"}
        if expected is not None and expected.tag:
            params["IfMatch"] = expected.tag
        try:
            answer = call(self.name, "get_object", **params)
        except WriteFailed as error:
            if "416" in error.message and not start:
                return b"", self.facts()
            if "416" in error.message:
                raise changed(self.name) from None
            raise
        body = asked(self.name, answer["Body"].read)
        span = str(answer.get("ContentRange") or "")
        size = size_said(self.name, span.rpartition("/")[2] if span else answer["ContentLength"])
        data = body if span else body[start : start + length]
        facts = facts_of(answer, size)
        if expected is not None and not facts.same(expected):
            raise changed(self.name)
        if len(data) != min(length, size - start):
            raise Passing("the connection broke")
        return data, facts

    def facts(self) -> Facts:
        answer = call(self.name, "head_object", **self._where.params)
        return facts_of(answer, size_said(self.name, answer["ContentLength"]))


def _no_object(name: str) -> NoReturn:
    raise WriteFailed("names a bucket, not an object in it", path=name)


_CARRIED = (
    *("ContentType", "ContentDisposition", "ContentEncoding", "ContentLanguage", "CacheControl", "Expires"),
    *("Metadata", "StorageClass", "ServerSideEncryption", "SSEKMSKeyId", "BucketKeyEnabled"),
    "WebsiteRedirectLocation",
)
"""Properties of an object, whose names in answers and requests are equal."""


def call_again(name: str, operation: str, **params: Any) -> Any:
    """Return the store's answer like `call`, with retries."""
    return retried(name, lambda: call(name, operation, **params))


def head(name: str) -> Any:
    """Return the store's description of an object; None if it does not exist."""
    try:
        return call_again(name, "head_object", **location(name).params)
    except NoSuchFile:
        return None


class NewS3Object(NewObject):
    """An object that the last request makes of its parts; a small one is sent whole by that request."""

    at_once: ClassVar[int] = 16
    copies: ClassVar[bool] = True

    def __init__(self, name: str, *, overwrite: bool, began: Callable[[Trace], None]) -> None:
        super().__init__(name)
        self._overwrite, self._began = overwrite, began
        where = location(name)
        self._place = {"Bucket": where.bucket, "Key": where.key}
        self._old = head(name)
        self.is_new = self._old is None
        self._nbytes = 0
        self._like: str | None = None
        self._small: bytes | None = None
        self._id: str | None = None
        self._done: dict[int, str] = {}

    def begin(self, nbytes: int, like: str | None) -> None:
        self._nbytes, self._like = nbytes, like
        self._done.clear()
        if nbytes < LEAST:
            self._small = b""
            return
        self._began(self._trace(None))
        self._id = call_again(self.name, "create_multipart_upload", **self._place, **self._given())["UploadId"]
        self._began(self._trace(None))

    def put(self, number: int, data: bytes) -> None:
        if self._small is not None:
            self._small += data
            return
        digest = base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()
        answer = call_again(
            self.name, "upload_part", **self._place, UploadId=self._id, PartNumber=number, Body=data, ContentMD5=digest
        )
        self._done[number] = answer["ETag"]

    def copy(self, number: int, where: ByteRange, tag: str) -> None:
        params: dict[str, Any] = {
            **self._place,
            "UploadId": self._id,
            "PartNumber": number,
            "CopySource": location(where.path).params,
            "CopySourceRange": f"bytes={where.offset}-{where.end - 1}",
        }
        if tag:
            params["CopySourceIfMatch"] = tag
        try:
            answer = call_again(where.path, "upload_part_copy", **params)
            self._done[number] = answer["CopyPartResult"]["ETag"]
        except DamagedFile:
            raise
        except (CkptfixError, KeyError) as error:
            raise CannotCopyError(error.message if isinstance(error, CkptfixError) else "it sent no ETag") from None

    def _given(self) -> dict[str, Any]:
        """Return the properties that the new object gets."""
        source, said = self.name, self._old
        if said is None and self._like is not None:
            source, said = self._like, head(self._like)
        if said is None:
            return {}
        given = {name: said[name] for name in _CARRIED if said.get(name)}
        with suppress(CkptfixError):
            tags = call_again(source, "get_object_tagging", **location(source).params).get("TagSet", [])
            if tags:
                given["Tagging"] = "&".join(f"{quote_plus(row['Key'])}={quote_plus(row['Value'])}" for row in tags)
        return given

    def _trace(self, tag: str | None) -> Trace:
        return {"url": self.name, "upload": self._id, "tag": tag if self.is_new else None}

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
        if self._id is not None or self.is_new:
            self._began(self._trace(self._tag()))
        try:
            self._publish({} if self._overwrite else {"IfNoneMatch": "*"})
        except DamagedFile:  # the condition is not met
            raise WouldOverwrite("appeared while it was being written", path=self.name) from None
        except WriteFailed as error:
            if self._overwrite or not any(word in error.message for word in ("501", "NotImplemented")):
                raise
            if head(self.name) is not None:
                raise WouldOverwrite("appeared while it was being written", path=self.name) from None
            self._publish({})  # this store does not support conditions

    def _publish(self, condition: dict[str, str]) -> None:
        if self._small is not None:
            call_again(self.name, "put_object", **self._place, Body=self._small, **self._given(), **condition)
            return
        rows = [{"PartNumber": number, "ETag": tag} for number, tag in sorted(self._done.items())]
        try:
            call_again(
                self.name, "complete_multipart_upload", **self._place, UploadId=self._id,
                MultipartUpload={"Parts": rows}, **condition,
            )  # fmt: skip
        except NoSuchFile:
            # The answer to a successful request may be lost, and the second attempt then finds no upload.
            now = head(self.name)
            before = None if self._old is None else self._old["ETag"]
            if now is None or now["ContentLength"] != self._nbytes or now["ETag"] == before:
                raise WriteFailed("the upload is gone", path=self.name) from None
        self._id = None

    def abort(self) -> None:
        if self._id is not None:
            number, self._id = self._id, None
            with suppress(NoSuchFile):
                call_again(self.name, "abort_multipart_upload", **self._place, UploadId=number)


class S3Store(WritableStore):
    def object_of(self, name: str) -> S3Object:
        return S3Object(name)

    def listing(self, folder: str) -> Iterator[tuple[str, Facts]]:
        """Yield (name relative to the folder, its facts) for all objects below `folder`, page by page."""
        bucket, prefix, _ = location(folder)
        prefix = f"{prefix.rstrip('/')}/" if prefix else ""
        params = {"Bucket": bucket, "Prefix": prefix}
        while True:
            answer = call_again(folder, "list_objects_v2", **params)
            for row in answer.get("Contents", ()):
                name = row["Key"][len(prefix) :]
                if name and not name.endswith("/"):
                    yield name, facts_of(row, size_said(folder, row["Size"]))
            if not answer.get("IsTruncated"):
                return
            params["ContinuationToken"] = answer["NextContinuationToken"]

    def is_taken(self, name: str) -> bool:
        return head(name) is not None

    def remove(self, name: str) -> None:
        bucket, key, _ = location(name)
        call_again(name, "delete_object", Bucket=bucket, Key=key)

    def new_object(self, name: str, *, overwrite: bool, began: Callable[[Trace], None] = no_trace) -> NewS3Object:
        return NewS3Object(name, overwrite=overwrite, began=began)

    def take_away(self, trace: Trace) -> None:
        name, number, tag = str(trace["url"]), trace["upload"], trace["tag"]
        if number is not None:
            with suppress(NoSuchFile):
                call_again(name, "abort_multipart_upload", **location(name).params, UploadId=number)
        if tag and (there := head(name)) is not None and there["ETag"].strip('"') == tag:
            self.remove(name)

    def begun(self, name: str, since: datetime) -> Iterator[Trace]:
        bucket, key, _ = location(name)
        for row in call_again(name, "list_multipart_uploads", Bucket=bucket, Prefix=key).get("Uploads", ()):
            if row["Key"] == key and row["Initiated"] >= since:
                yield {"url": name, "upload": row["UploadId"], "tag": None}


STORE = S3Store()
