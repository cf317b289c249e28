"""``https://HOST/PATH``: ranges of a web server, by Python's own client.

Redirects are followed, proxies are those of the environment, and ``USER:PASSWORD@HOST`` is basic authorization; an
authorization never goes to another host. Headers that fsspec is configured to send (``client_kwargs.headers`` of
``http`` or ``https``) are sent.
"""

from __future__ import annotations

import base64
import email.utils
import http.client
import re
import socket
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import closing
from functools import cache
from typing import IO, Any
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from ckptfix.commands import quoted
from ckptfix.errors import CkptfixError, DamagedFile, Unsupported, WriteFailed
from ckptfix.io.remote.store import TIMEOUT, Facts, Object, Passing, changed, failed
from ckptfix.urls import scheme_of, secret_of

WHOLE = 8 << 20
"""Bytes of a file that is taken whole from a server that sends no ranges."""

_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)$")
_BROKEN = (http.client.HTTPException, ConnectionError, TimeoutError)


class _Request(urllib.request.Request):
    """A request, and what servers said on the way that redirected it."""

    said: dict[str, str]


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows, and tells no other host who we are."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        following = super().redirect_request(req, fp, code, msg, headers, newurl)
        if following is not None and urlsplit(newurl).netloc != urlsplit(req.full_url).netloc:
            following.remove_header("Authorization")
        if isinstance(req, _Request):
            req.said.update(headers.items())
            if following is not None:
                following.__class__ = _Request
                assert isinstance(following, _Request)
                following.said = req.said
        return following


@cache
def _opener() -> urllib.request.OpenerDirector:
    opener = urllib.request.build_opener(_Redirects)
    opener.addheaders = [("User-Agent", "ckptfix")]
    return opener


def configured(scheme: str) -> dict[str, str]:
    """Headers that fsspec is configured to send, where it is there."""
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
    """What a web server gives for a URL."""

    def __init__(self, name: str, url: str | None = None, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(name)
        parts = urlsplit(secret_of(name) if url is None else url)
        login, _, host = parts.netloc.rpartition("@")
        # A name may hold what a browser would have quoted, such as a space.
        path, query = quote(parts.path, safe="/%:@!$&'()*+,;=~"), quote(parts.query, safe="/%:@!$&'()*+,;=?~")
        self.url = urlunsplit((parts.scheme, host, path or "/", query, ""))
        self._headers = {**configured(scheme_of(name)), **(headers or {}), "Accept-Encoding": "identity"}
        if login:
            user = base64.b64encode(unquote(login).encode()).decode()
            self._headers["Authorization"] = f"Basic {user}"

    def get(self, start: int, length: int, expected: Facts | None) -> tuple[bytes, Facts]:
        headers = {**self._headers, "Range": f"bytes={start}-{start + length - 1}"}
        if expected is not None and expected.tag.startswith('"'):
            headers["If-Match"] = expected.tag
        request = _Request(self.url, headers=headers)
        request.said = {}
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
        """The URL, behind redirects, that answered, and the headers of all answers on the way."""

    def _broken(self, error: Exception) -> Exception:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(reason, ssl.SSLCertVerificationError):
            return WriteFailed(f"the server's certificate is not trusted: {reason.verify_message}", path=self.name)
        if isinstance(reason, socket.gaierror) and reason.errno != socket.EAI_AGAIN:
            return WriteFailed("there is no server of that name", path=self.name, hint="look at the URL")
        if isinstance(reason, ConnectionRefusedError):
            return Passing("the server refused the connection")
        if isinstance(reason, TimeoutError):
            return Passing(f"the server sent nothing for {TIMEOUT:.0f} seconds")
        return Passing("the connection broke")

    def _failed(self, error: urllib.error.HTTPError) -> CkptfixError | Passing:
        hint = None
        if error.code in (401, 403):
            hint = "a signed URL may have expired; USER:PASSWORD@ before the host, or a signed URL, gives access"
        made = failed(self.name, error.code, str(error.reason), hint)
        if isinstance(made, Passing):
            made.wait = _seconds(error.headers.get("Retry-After"))
        return made

    def _beyond(
        self, error: urllib.error.HTTPError, start: int, expected: Facts | None
    ) -> tuple[bytes, Facts]:
        """The server has nothing there: the file is empty, or shorter than it was."""
        found = _CONTENT_RANGE.match(error.headers.get("Content-Range") or "")
        if start or expected is not None or (found and found[3] not in ("0", "*")):
            raise changed(self.name)
        return b"", Facts(0, _tag(error.headers), _time(error.headers))

    def _taken(self, answer: Any, start: int, length: int) -> tuple[bytes, Facts]:
        if answer.headers.get("Content-Encoding", "identity") != "identity":
            packed = answer.headers["Content-Encoding"]
            raise Unsupported(f"the server packs it ({packed}): it has no ranges", path=self.name, hint=self._download)
        if answer.status != 206:
            return self._whole(answer, start, length)
        found = _CONTENT_RANGE.match(answer.headers.get("Content-Range") or "")
        if found is None or found[1] is None:
            said = answer.headers.get("Content-Range")
            raise DamagedFile(f"the server sent a part and does not say which (Content-Range: {said})", path=self.name)
        first, last = int(found[1]), int(found[2])
        if first != start or last >= start + length or last < first:
            asked = f"bytes {start} to {start + length - 1} were asked for, {first} to {last} came"
            raise DamagedFile(f"the server sent another part: {asked}", path=self.name, offset=start)
        data = answer.read(last + 1 - first)
        if len(data) != last + 1 - first:
            raise Passing("the connection broke")
        if found[3] == "*":
            raise Unsupported("the server does not say how large it is", path=self.name, hint=self._download)
        size = int(found[3])
        if len(data) < min(length, size - start):
            # A server may send less than it is asked for: the rest is asked for as well.
            rest, _ = self.get(start + len(data), length - len(data), None)
            data += rest
        return data, Facts(size, _tag(answer.headers), _time(answer.headers))

    def _whole(self, answer: Any, start: int, length: int) -> tuple[bytes, Facts]:
        """From a server that sends no ranges: all of a small file."""
        size = int(answer.headers.get("Content-Length") or -1)
        if size > WHOLE or size < 0:
            many = f"of {size:,} bytes" if size >= 0 else "of a file whose size it does not say"
            raise Unsupported(f"the server sends no ranges {many}", path=self.name, hint=self._download)
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
    except (TypeError, ValueError):
        return 0


def _seconds(text: str | None) -> float | None:
    try:
        return float(text or "")
    except ValueError:
        return None


def object_of(name: str) -> Resource:
    return Resource(name)
