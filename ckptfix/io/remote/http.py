"""``https://HOST/PATH``: ranges of files on a web server, read with Python's own client.

Redirects to http and https are followed, proxies come from the environment, and ``USER:PASSWORD@HOST`` is basic
authorization. Headers that fsspec is configured to send (``client_kwargs.headers`` of ``http`` or ``https``) are sent.
Neither is sent to a different origin (scheme, host and port) than the URL's.
"""

from __future__ import annotations

import base64
import email.utils
import http.client
import io
import re
import socket
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import cache, partial
from typing import IO, Any, NamedTuple
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from ckptfix.commands import quoted
from ckptfix.dataclass import dataclass
from ckptfix.errors import CkptfixError, DamagedFile, Unsupported, WriteFailed
from ckptfix.io.remote.store import TIMEOUT, Facts, Object, ObjectStore, Passing, changed, failed
from ckptfix.numbers import seconds, whole_number
from ckptfix.urls import redacted, scheme_of, secret_of

WHOLE = 8 << 20
"""The largest file, in bytes, that is read whole from a server without range requests."""

SLOWEST = 4096
"""Bytes per second that a server must send, once it has begun."""

HEADERS = 256 << 10
"""Bytes that a server can send before the content."""

PARTS = 64
"""The most answers for one range: some servers send less than requested."""

_CONTENT_RANGE = re.compile(r"bytes (?:([0-9]{1,19})-([0-9]{1,19})|\*)/([0-9]{1,19}|\*)")
_BROKEN = (http.client.HTTPException, ConnectionError, TimeoutError)
_PORTS = {"http": 80, "https": 443}

_OF_THE_RANGE = frozenset(("range", "if-match", "accept-encoding", "user-agent"))
"""Headers, in lower case, that a different origin gets too, because they reveal nothing about the client."""


class Origin(NamedTuple):
    """The origin that a request goes to; secrets are meant for one origin only."""

    scheme: str
    host: str
    port: int


def origin_of(url: str) -> Origin:
    """Return the origin of a URL. Raises ValueError if it has no valid host."""
    parts = urlsplit(url)
    scheme, host = parts.scheme.lower(), parts.hostname
    if scheme not in _PORTS or not host or not host.isprintable() or set(host) & set(" <>\"'\\"):
        raise ValueError("not a web host")
    if not host.isascii():
        host = host.encode("idna").decode("ascii")
    return Origin(scheme, host, parts.port if parts.port is not None else _PORTS[scheme])


@dataclass(slots=True)
class _Clock:
    """The limits of time and size for all answers to one request.

    Attributes:
        name: of the file.
        most: bytes of content that are wanted.
    """

    name: str
    most: int
    began: float = 0.0
    came: int = 0

    def wait(self) -> float:
        """Return the seconds until the next data must arrive. Raises the error of `too_slow`."""
        if not self.came:
            return TIMEOUT
        left = self.began + TIMEOUT + min(self.came, self.most) / SLOWEST - time.monotonic()
        if left <= 0:
            raise self.too_slow()
        return min(left, TIMEOUT)

    def took(self, count: int) -> None:
        """Count bytes that have arrived."""
        if not self.came:
            self.began = time.monotonic()
        self.came += count
        if self.came > 2 * self.most + PARTS * HEADERS:
            raise self.too_much()

    def too_slow(self) -> WriteFailed:
        took = time.monotonic() - self.began
        message = f"the server is too slow: {self.came:,} bytes arrived in {took:.0f} seconds"
        return WriteFailed(message, path=self.name, hint=f"download it first: curl -fLO {quoted(self.name)}")

    def too_much(self) -> DamagedFile:
        return DamagedFile(f"the server sent {self.came:,} bytes but no answer to the request", path=self.name)


class _Timed(io.RawIOBase):
    """The data of a connection, subject to a clock."""

    def __init__(self, raw: Any, connection: socket.socket, clock: _Clock) -> None:
        super().__init__()
        self._raw, self._connection, self._clock = raw, connection, clock
        self.head: int | None = 0
        """Bytes that arrived before the content; None once the content has begun."""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._connection.settimeout(self._clock.wait())
        try:
            count: int | None = self._raw.readinto(buffer)
        except TimeoutError:
            self._clock.wait()
            raise
        self._clock.took(count or 0)
        if self.head is not None:
            self.head += count or 0
            if self.head > HEADERS:
                raise self._clock.too_much()
        return count

    def close(self) -> None:
        if not self.closed:
            self._raw.close()
        super().close()


class _Answer(http.client.HTTPResponse):
    """An answer whose every byte is subject to a clock, so that a server cannot stall the client with rare bytes."""

    def __init__(self, connection: socket.socket, *more: Any, clock: _Clock, **how: Any) -> None:
        super().__init__(connection, *more, **how)
        self._timed = _Timed(self.fp.detach(), connection, clock)
        self.fp = io.BufferedReader(self._timed)

    def begin(self) -> None:
        super().begin()
        self._timed.head = None


class _Request(urllib.request.Request):
    """A request, the headers of the servers that redirected it, and its clock."""

    said: dict[str, str]
    clock: _Clock


class _Handler(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(_by_the_clock(http.client.HTTPConnection, req), req)


class _SafeHandler(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(_by_the_clock(http.client.HTTPSConnection, req), req)


def _by_the_clock(kind: Any, request: urllib.request.Request) -> Any:
    assert isinstance(request, _Request)

    def made(host: str, **how: Any) -> http.client.HTTPConnection:
        connection: http.client.HTTPConnection = kind(host, **how)
        connection.response_class = partial(_Answer, clock=request.clock)  # type: ignore[assignment]
        return connection

    return made


class _Redirects(urllib.request.HTTPRedirectHandler):
    """A handler that follows redirects on the web, without revealing secrets to other origins."""

    def http_error_302(self, req: Any, fp: Any, code: int, msg: str, headers: Any) -> Any:
        where = headers.get("Location") or headers.get("URI") or ""
        try:
            scheme = urlsplit(where).scheme.lower()
            if scheme not in ("", *_PORTS):
                what = f"the server redirects to {redacted(where[:_SHOWN])}: only http and https are allowed"
                raise Unsupported(what, path=req.clock.name)
            return super().http_error_302(req, fp, code, msg, headers)
        except (ValueError, http.client.InvalidURL):
            raise _no_url("the server redirects to an invalid URL", req.clock.name) from None

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        parts = urlsplit(newurl)
        # The user in a server's redirect must not be sent.
        newurl = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
        other = origin_of(newurl) != origin_of(req.full_url)
        following = super().redirect_request(req, fp, code, msg, headers, newurl)
        if following is not None and other:
            following.headers = {
                name: value for name, value in following.headers.items() if name.lower() in _OF_THE_RANGE
            }
        if isinstance(req, _Request):
            req.said.update(headers.items())
            if following is not None:
                following.__class__ = _Request
                assert isinstance(following, _Request)
                following.said, following.clock = req.said, req.clock
        return following


_SHOWN = 80
"""Characters of a server's text that a message quotes."""


def _no_url(what: str, name: str) -> Unsupported:
    hint = "http[s]://[USER:PASSWORD@]HOST[:PORT]/PATH; a / in a password is written %2F"
    return Unsupported(what, path=name, hint=hint)


@cache
def _opener() -> urllib.request.OpenerDirector:
    opener = urllib.request.build_opener(_Redirects, _Handler, _SafeHandler)
    opener.addheaders = [("User-Agent", "ckptfix")]
    return opener


def configured(scheme: str) -> dict[str, str]:
    """Return the headers that fsspec is configured to send, if it is installed."""
    fsspec = sys.modules.get("fsspec.config")
    if fsspec is None:
        try:
            import fsspec.config as found
        except ImportError:
            return {}
        fsspec = found
    options = fsspec.conf.get(scheme) or fsspec.conf.get("http") or {}
    headers: dict[str, str] = {**options.get("client_kwargs", {}).get("headers", {}), **options.get("headers", {})}
    return headers


class Resource(Object):
    """The object that a web server provides at a URL."""

    def __init__(self, name: str, url: str | None = None, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(name)
        try:
            parts = urlsplit(secret_of(name) if url is None else url)
            login, _, host = parts.netloc.rpartition("@")
            # A name may contain characters that a browser would have quoted, such as a space.
            path, query = quote(parts.path, safe="/%:@!$&'()*+,;=~"), quote(parts.query, safe="/%:@!$&'()*+,;=?~")
            self.url = urlunsplit((parts.scheme, host, path or "/", query, ""))
            origin_of(self.url)
        except ValueError:
            raise _no_url("is not a valid web URL: its host or port cannot be read", name) from None
        self._headers = {**(configured(scheme_of(name)) if headers is None else headers), "Accept-Encoding": "identity"}
        if login:
            user = base64.b64encode(unquote(login).encode()).decode()
            self._headers["Authorization"] = f"Basic {user}"

    def get(self, start: int, length: int, expected: Facts | None) -> tuple[bytes, Facts]:
        clock = _Clock(self.name, max(length, WHOLE))
        data, facts = self._part(start, length, expected, clock)
        pieces, came = [data], len(data)
        wanted = min(length, facts.size - start)
        for _ in range(PARTS):
            if came >= wanted:
                break
            # A server may send less than requested: request the rest as well, of the same version.
            data, found = self._part(start + came, wanted - came, facts, clock)
            if found != facts:
                raise changed(self.name)
            pieces.append(data)
            came += len(data)
        if came < wanted:
            message = f"the server sends {came // len(pieces):,} bytes at a time, although {wanted:,} were requested"
            raise DamagedFile(message, path=self.name, hint=self._download)
        return (pieces[0] if len(pieces) == 1 else b"".join(pieces)), facts

    def _part(self, start: int, length: int, expected: Facts | None, clock: _Clock) -> tuple[bytes, Facts]:
        """Request these bytes once, and return the first of them: at least one, if the file has any."""
        headers = {**self._headers, "Range": f"bytes={start}-{start + length - 1}"}
        if expected is not None and expected.tag.startswith('"'):
            headers["If-Match"] = expected.tag
        request = _Request(self.url, headers=headers)
        request.said, request.clock = {}, clock
        try:
            with closing(_opener().open(request, timeout=TIMEOUT)) as answer:
                self.came_from(answer.geturl(), {**request.said, **answer.headers})
                data, facts = self._taken(answer, start, length)
        except urllib.error.HTTPError as error:
            with closing(error):
                if error.code == 416:
                    return self._beyond(error, start, expected)
                raise self._failed(error) from None
        except (*_BROKEN, urllib.error.URLError) as error:
            raise self._broken(error) from None
        if expected is not None and not facts.same(expected):
            raise changed(self.name)
        return data, facts

    def came_from(self, url: str, said: Mapping[str, str]) -> None:
        """Process the URL that answered, behind redirects, and the headers of all answers on the way."""

    def _broken(self, error: Exception) -> Exception:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(reason, ssl.SSLCertVerificationError):
            return WriteFailed(f"the server's certificate is not trusted: {reason.verify_message}", path=self.name)
        if isinstance(reason, socket.gaierror) and reason.errno != socket.EAI_AGAIN:
            return WriteFailed("no server has that name", path=self.name, hint="check the URL")
        if isinstance(reason, CkptfixError):  # it was raised on the way to a proxy
            return reason
        if isinstance(reason, ConnectionRefusedError):
            return Passing("the server refused the connection")
        if isinstance(reason, TimeoutError):
            return Passing(f"the server sent nothing for {TIMEOUT:.0f} seconds")
        return Passing("the connection broke")

    def _failed(self, error: urllib.error.HTTPError) -> CkptfixError | Passing:
        hint = None
        if error.code in (401, 403):
            hint = "a signed URL may have expired; use a new one, or put USER:PASSWORD@ before the host"
        made = failed(self.name, error.code, str(error.reason), hint)
        if isinstance(made, Passing):
            made.wait = seconds(error.headers.get("Retry-After"))
        return made

    def _beyond(
        self, error: urllib.error.HTTPError, start: int, expected: Facts | None
    ) -> tuple[bytes, Facts]:
        """Handle an answer that the server has no bytes there: the file is empty, or shorter than it was."""
        found = _CONTENT_RANGE.fullmatch(error.headers.get("Content-Range") or "")
        if start or expected is not None or (found and found[3] not in ("0", "*")):
            raise changed(self.name)
        return b"", Facts(0, _tag(error.headers), _time(error.headers))

    def _taken(self, answer: Any, start: int, length: int) -> tuple[bytes, Facts]:
        if answer.headers.get("Content-Encoding", "identity") != "identity":
            packed = answer.headers["Content-Encoding"]
            raise Unsupported(f"the server compresses it ({packed}): no ranges", path=self.name, hint=self._download)
        if answer.status != 206:
            return self._whole(answer, start, length)
        found = _CONTENT_RANGE.fullmatch(answer.headers.get("Content-Range") or "")
        if found is None or found[1] is None:
            said = redacted(str(answer.headers.get("Content-Range"))[:_SHOWN])
            raise DamagedFile(f"the server sent a part without its range (Content-Range: {said})", path=self.name)
        first, last = whole_number(found[1]), whole_number(found[2])
        if first is None or last is None or first != start or last >= start + length or last < first:
            asked = f"bytes {start} to {start + length - 1} were requested, {found[1]} to {found[2]} arrived"
            raise DamagedFile(f"the server sent the wrong part: {asked}", path=self.name, offset=start)
        data = answer.read(last + 1 - first)
        if len(data) != last + 1 - first:
            raise Passing("the connection broke")
        if found[3] == "*":
            raise Unsupported("the server does not report its size", path=self.name, hint=self._download)
        size = whole_number(found[3], least=last + 1)
        if size is None:
            message = f"the server reports a size of {found[3]} bytes, but sent bytes up to {last + 1}"
            raise DamagedFile(message, path=self.name)
        return data, Facts(size, _tag(answer.headers), _time(answer.headers))

    def _whole(self, answer: Any, start: int, length: int) -> tuple[bytes, Facts]:
        """Return bytes from a server that sends no ranges, by reading all of a small file."""
        said = answer.headers.get("Content-Length")
        size = None if said is None else whole_number(said.strip())
        if said is not None and size is None:
            shown = ascii(said[:_SHOWN])
            raise DamagedFile(f"the server reports an invalid size (Content-Length: {shown})", path=self.name)
        if size is None or size > WHOLE:
            why = f"and this one has {size:,} bytes" if size is not None else "and does not report their size"
            raise Unsupported(f"the server sends only whole files, {why}", path=self.name, hint=self._download)
        data = answer.read(size)
        if len(data) != size:
            raise Passing("the connection broke")
        return data[start : start + length], Facts(size, _tag(answer.headers), _time(answer.headers))

    @property
    def _download(self) -> str:
        return f"download it first: curl -fLO {quoted(self.name)}"


def _tag(headers: Any) -> str:
    return str(headers.get("ETag") or "")


def _time(headers: Any) -> int:
    try:
        return int(email.utils.parsedate_to_datetime(headers.get("Last-Modified") or "").timestamp()) * 10**9
    except (TypeError, ValueError, OverflowError, OSError):
        return 0


class WebStore(ObjectStore):
    """The web, whose servers cannot list a folder."""

    def object_of(self, name: str) -> Resource:
        return Resource(name)

    def listing(self, folder: str) -> Iterator[tuple[str, Facts]]:
        return iter(())


STORE = WebStore()
