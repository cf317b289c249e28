"""Stores that run on this machine, and count what they are asked: web servers, S3 twice, a hub."""

from __future__ import annotations

import json
import logging
import re
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest


@dataclass
class Traffic:
    """What a server was asked: (method, path, bytes that came, bytes that went)."""

    calls: list[tuple[str, str, int, int]] = field(default_factory=list)

    @property
    def requests(self) -> int:
        return len(self.calls)

    @property
    def up(self) -> int:
        return sum(call[2] for call in self.calls)

    @property
    def down(self) -> int:
        return sum(call[3] for call in self.calls)

    def add(self, method: str, path: str, up: int, down: int) -> None:
        self.calls.append((method, path, up, down))

    def clear(self) -> None:
        self.calls.clear()


Fault = Callable[["_Web", str], bool]
"""May answer in the place of the server; whether it did."""


class WebServer:
    """A web server over `files`: bytes, or a file of the disk, by path.

    Attributes:
        ranges: it answers to Range.
        fault: as `Fault`.
        headers: sent with every answer.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes | Path] = {}
        self.tags: dict[str, str] = {}
        self.ranges = True
        self.fault: Fault | None = None
        self.headers: dict[str, str] = {}
        self.seen: list[Mapping[str, str]] = []
        self.traffic = Traffic()
        self.turn = 0
        handler = type("Handler", (_Web,), {"owner": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def put(self, name: str, data: bytes | Path) -> str:
        """The URL of `data`."""
        self.files[f"/{name}"] = data
        content = data if isinstance(data, bytes) else str(data).encode()
        self.tags[f"/{name}"] = f'"{md5(content).hexdigest()}"'
        return f"{self.url}/{name}"

    def reset(self) -> None:
        self.turn += 1
        self.files.clear()
        self.traffic.clear()
        self.seen.clear()
        self.ranges, self.fault, self.headers = True, None, {}

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


class _Web(BaseHTTPRequestHandler):
    owner: WebServer
    turn = 0
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        owner = self.owner
        self.turn = owner.turn
        owner.seen.append(dict(self.headers))
        path = unquote(urlsplit(self.path).path)
        self.close_connection = True
        if owner.fault is not None and owner.fault(self, path):
            return
        data = owner.files.get(path)
        if data is None:
            self.reply(404, b"not found")
            return
        tag = owner.tags.get(path, "")
        if (wanted := self.headers.get("If-Match")) and wanted != tag:
            self.reply(412, b"")
            return
        size = len(data) if isinstance(data, bytes) else data.stat().st_size
        asked = re.match(r"bytes=(\d+)-(\d*)$", self.headers.get("Range") or "")
        base = {"ETag": tag} if tag else {}
        if asked is None or not owner.ranges:
            self.reply(200, _part(data, 0, size), base)
            return
        first = int(asked[1])
        last = min(int(asked[2] or size), size - 1)
        if first >= size:
            self.reply(416, b"", {"Content-Range": f"bytes */{size}"})
            return
        content = _part(data, first, last + 1 - first)
        self.reply(206, content, {**base, "Content-Range": f"bytes {first}-{last}/{size}"})

    def reply(self, status: int, body: bytes, headers: Mapping[str, str] = {}, *, cut: int | None = None) -> None:
        """Answer; with `cut`, promise all of the body, send so many bytes, and hang up."""
        self.send_response(status)
        for name, value in {**self.owner.headers, **headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        sent = body if cut is None else body[:cut]
        if self.turn == self.owner.turn:  # and no test before has asked
            self.owner.traffic.add(self.command, self.path, 0, len(sent))
        if self.command != "HEAD":
            try:
                self.wfile.write(sent)
                self.wfile.flush()
            except OSError:
                pass
        if cut is not None:
            self.connection.shutdown(socket.SHUT_RDWR)


def _part(data: bytes | Path, first: int, length: int) -> bytes:
    if isinstance(data, bytes):
        return data[first : first + length]
    with data.open("rb") as file:
        file.seek(first)
        return file.read(length)


@dataclass
class Bucket:
    """A bucket of a store that speaks S3, and what it was asked."""

    name: str
    client: Any
    traffic: Traffic
    kind: str
    app: Counting | None = None
    folder: Path = Path()

    def url(self, key: str) -> str:
        return f"s3://{self.name}/{key}"

    def put(self, key: str, data: bytes, **more: Any) -> str:
        self.client.put_object(Bucket=self.name, Key=key, Body=data, **more)
        self.traffic.clear()
        return self.url(key)

    def get(self, key: str) -> bytes:
        body: bytes = self.client.get_object(Bucket=self.name, Key=key)["Body"].read()
        return body

    def keys(self) -> list[str]:
        return [row["Key"] for row in self.client.list_objects_v2(Bucket=self.name).get("Contents", ())]

    def below(self, prefix: str) -> list[str]:
        return [key for key in self.keys() if key.startswith(prefix)]

    def uploads(self) -> list[Any]:
        """Multipart uploads that were begun and not ended."""
        if self.kind == "localbucket":
            return list(self.folder.glob("**/.localbucket-uploads/*/*"))
        found: list[Any] = self.client.list_multipart_uploads(Bucket=self.name).get("Uploads", [])
        return found

    def clear(self) -> None:
        for key in self.keys():
            self.client.delete_object(Bucket=self.name, Key=key)
        self.traffic.clear()


def environment(url: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": "/nonexistent",
        "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
    }


class Counting:
    """A WSGI application that counts."""

    def __init__(self, inner: Any, traffic: Traffic) -> None:
        self._inner, self._traffic = inner, traffic
        self.fault: Callable[[Mapping[str, Any]], tuple[str, bytes] | None] | None = None

    def __call__(self, environ: Any, start_response: Any) -> Any:
        path = f"{environ['PATH_INFO']}?{environ.get('QUERY_STRING', '')}"
        up = int(environ.get("CONTENT_LENGTH") or 0)
        if self.fault is not None and (answer := self.fault(environ)) is not None:
            status, body = answer
            environ["wsgi.input"].read(up)
            self._traffic.add(environ["REQUEST_METHOD"], path, up, len(body))
            start_response(status, [("Content-Length", str(len(body))), ("Content-Type", "application/xml")])
            return [body]
        body = b"".join(self._inner(environ, start_response))
        self._traffic.add(environ["REQUEST_METHOD"], path, up, 0 if environ["REQUEST_METHOD"] == "HEAD" else len(body))
        return [body]


@contextmanager
def moto() -> Iterator[tuple[str, Traffic, Counting]]:
    """moto's S3 in threads of this process."""
    import moto.server as served
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)

    traffic = Traffic()
    app = Counting(vars(served)["DomainDispatcherApplication"](vars(served)["create_backend_app"]), traffic)
    server = make_server("127.0.0.1", 0, app, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", traffic, app
    finally:
        server.shutdown()


@contextmanager
def local_bucket(folder: Path) -> Iterator[tuple[str, Traffic]]:
    """localbucket in threads of this process."""
    import localbucket

    traffic = Traffic()

    class Handler(localbucket.S3Handler):  # type: ignore[misc]
        data_root = folder
        wfile: Any

        def _dispatch(self, action: Any) -> None:
            inner = self.wfile
            sent = 0

            class Out:
                def write(self, data: Any) -> int:
                    nonlocal sent
                    sent += len(data)
                    count: int = inner.write(data)
                    return count

                def __getattr__(self, name: str) -> Any:
                    return getattr(inner, name)

            self.wfile = Out()
            try:
                super()._dispatch(action)
            finally:
                self.wfile = inner
                traffic.add(self.command, self.path, int(self.headers.get("Content-Length") or 0), sent)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", traffic
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="session")
def _web() -> Iterator[WebServer]:
    server = WebServer()
    yield server
    server.close()


@pytest.fixture
def web(_web: WebServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[WebServer]:
    """A web server on this machine, with nothing on it; what is retried is retried at once."""
    monkeypatch.setattr("ckptfix.io.remote.store.FIRST_WAIT", 0.001)
    yield _web
    _web.reset()


@pytest.fixture(scope="session")
def _moto() -> Iterator[tuple[str, Traffic, Counting]]:
    pytest.importorskip("moto.server", reason="moto[server] is not installed")
    with moto() as made:
        yield made


@pytest.fixture(scope="session")
def _local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Traffic, Path]]:
    pytest.importorskip("localbucket", reason="localbucket is not installed")
    folder = tmp_path_factory.mktemp("localbucket")
    with local_bucket(folder) as (url, traffic):
        yield url, traffic, folder


def _bucket(kind: str, url: str, traffic: Traffic, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    from ckptfix.io.remote import s3

    for name, value in environment(url).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("ckptfix.io.remote.store.FIRST_WAIT", 0.001)
    s3.forget_client()
    made = Bucket("bucket", s3.client(), traffic, kind)
    if not any(row["Name"] == made.name for row in made.client.list_buckets()["Buckets"]):
        made.client.create_bucket(Bucket=made.name)
    made.clear()
    yield made
    made.clear()
    s3.forget_client()


@pytest.fixture
def bucket(
    _moto: tuple[str, Traffic, Counting], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bucket]:
    """A bucket of moto, with nothing in it."""
    url, traffic, app = _moto
    for made in _bucket("moto", url, traffic, monkeypatch):
        made.app = app
        yield made
        app.fault = None


@pytest.fixture
def strict_bucket(
    _local: tuple[str, Traffic, Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bucket]:
    """A bucket of localbucket, which compares the ETag of what it copies."""
    url, traffic, folder = _local
    for made in _bucket("localbucket", url, traffic, monkeypatch):
        made.folder = folder
        yield made


class Hub(WebServer):
    """The endpoints of a hub that huggingface_hub calls to resolve files and to list a repository.

    Files of a repository are ``ORG/REPO/FILE`` in `repo`. Large ones redirect to another host, as those of the hub do,
    with a signature in the query: a new one each time, of which the first `expired` are no longer good.
    """

    COMMIT = "c0ffee" * 6 + "abcd"

    def __init__(self) -> None:
        super().__init__()
        self.repo: dict[str, bytes] = {}
        self.large: set[str] = set()
        self.issued = self.expired = 0
        self.fault = self.answer

    def reset(self) -> None:
        super().reset()
        self.repo.clear()
        self.large.clear()
        self.issued = self.expired = 0
        self.fault = self.answer

    def answer(self, handler: _Web, path: str) -> bool:
        tree = re.match(r"/api/(models|datasets)/([^/]+/[^/]+)/tree/([^/]+)/?(.*)$", path)
        found = re.match(r"/(?:datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)$", path)
        if tree is not None:
            rows = [
                {"type": "file", "path": name[len(tree[2]) + 1 :], "size": len(data), "oid": md5(data).hexdigest()}
                for name, data in self.repo.items()
                if name.startswith(f"{tree[2]}/{tree[4]}")
            ]
            there = any(name.startswith(f"{tree[2]}/") for name in self.repo)
            said = {"Content-Type": "application/json"}
            if tree[3] not in ("main", self.COMMIT):
                handler.reply(404, b"{}", {**said, "X-Error-Code": "RevisionNotFound"})
            elif rows:
                handler.reply(200, json.dumps(rows).encode(), said)
            else:
                code = "EntryNotFound" if there else "RepoNotFound"
                handler.reply(404, b"{}", {**said, "X-Error-Code": code})
        elif found is not None:
            name = f"{found[1]}/{found[3]}"
            said = {"X-Repo-Commit": self.COMMIT}
            if name not in self.repo or found[2] not in ("main", self.COMMIT):
                handler.reply(404, b"", {"X-Error-Code": "EntryNotFound"})
            elif name in self.large:
                address = self.put(f"cdn/{name}", self.repo[name]).replace("127.0.0.1", "localhost")
                self.issued += 1
                handler.reply(302, b"", {**said, "Location": f"{address}?Signature=5ecret{self.issued}"})
            else:
                self.headers = said
                self.put(handler.path.partition("?")[0][1:], self.repo[name])
                return False
        elif path.startswith("/cdn/") and int(handler.path.rpartition("5ecret")[2]) <= self.expired:
            handler.reply(403, b"")
        else:
            return False
        return True


@pytest.fixture(scope="session")
def _hub() -> Iterator[Hub]:
    server = Hub()
    yield server
    server.close()


@pytest.fixture
def hub(_hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub on this machine, with nothing on it."""
    constants = pytest.importorskip("huggingface_hub.constants", reason="huggingface_hub is not installed")
    for name, value in vars(constants).items():
        if isinstance(value, str) and "https://huggingface.co" in value:
            monkeypatch.setattr(constants, name, value.replace("https://huggingface.co", _hub.url))
    monkeypatch.setenv("HF_TOKEN", "hf_t0ken")
    monkeypatch.setattr("ckptfix.io.remote.store.FIRST_WAIT", 0.001)
    yield _hub
    _hub.reset()
