"""``s3://BUCKET/KEY[?versionId=VERSION]``: objects of S3, and of stores with the same interface.

The client is botocore, which both s3fs and boto3 install: it finds credentials, profile, region and endpoint
(``AWS_ENDPOINT_URL``). The configuration of fsspec for ``s3`` (``endpoint_url``, ``key``, ``secret``, ``token``,
``profile``, ``anon``, ``client_kwargs``, ``config_kwargs``) takes precedence.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple, NoReturn

from ckptfix.errors import CkptfixError, NotPermitted, WriteFailed
from ckptfix.io.remote import obstore_s3
from ckptfix.io.remote.store import (
    CONNECT_TIMEOUT,
    TIMEOUT,
    Facts,
    Object,
    Passing,
    changed,
    failed,
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


def object_of(name: str) -> S3Object:
    return S3Object(name)


def listing(folder: str) -> Iterator[tuple[str, Facts]]:
    """Yield (name relative to the folder, its facts) for all objects below `folder`, page by page."""
    bucket, prefix, _ = location(folder)
    prefix = f"{prefix.rstrip('/')}/" if prefix else ""
    params = {"Bucket": bucket, "Prefix": prefix}
    while True:
        answer = retried(folder, partial(call, folder, "list_objects_v2", **params))
        for row in answer.get("Contents", ()):
            name = row["Key"][len(prefix) :]
            if name and not name.endswith("/"):
                yield name, facts_of(row, size_said(folder, row["Size"]))
        if not answer.get("IsTruncated"):
            return
        params["ContinuationToken"] = answer["NextContinuationToken"]
