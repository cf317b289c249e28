"""Web servers that lie: about versions, numbers, places and time. Each lie costs one clear error, and no secret."""

from __future__ import annotations

import itertools
import json
import re
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from property.verbs import run_command
from stores import WebServer, _Web

import ckptfix
from ckptfix.errors import CkptfixError, DamagedFile
from ckptfix.io.remote import http
from ckptfix.urls import known, redacted

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.xdist_group("stores")

LONG_WAIT = 60
"""Seconds that a server keeps a client that never leaves; one that leaves needs a few, on any machine half of it."""


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[bytes, bytes]]:
    """Two versions of a checkpoint, of the same size, in three containers."""
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("versions")
    made: dict[str, list[bytes]] = {"pth": [], "legacy.pth": [], "safetensors": []}
    for number in range(2):
        tensors = {f"l{name}": torch.full((20_000,), float(10 * number + name)) for name in range(3)}
        for kind, found in made.items():
            path = folder / f"model.{kind}"
            if kind == "safetensors":
                save_file(tensors, path)
            else:
                torch.save(tensors, path, _use_new_zipfile_serialization=kind == "pth")
            found.append(path.read_bytes())
    return {kind: (found[0], found[1]) for kind, found in made.items()}


def part(handler: _Web, data: bytes, most: int, headers: dict[str, str], *, more: int = 0) -> bool:
    """Answer with at most `most` bytes of what was asked for; the size is said to be `more`."""
    asked = re.match(r"bytes=(\d+)-(\d+)", handler.headers["Range"])
    assert asked is not None
    first = int(asked[1])
    last = min(int(asked[2]), len(data) - 1, first + most - 1)
    span = {"Content-Range": f"bytes {first}-{last}/{len(data) + more}"}
    handler.reply(206, data[first : last + 1], {**headers, **span})
    return True


@pytest.mark.parametrize("kind", ["pth", "legacy.pth", "safetensors"])
@pytest.mark.parametrize("most", [4000, 50_000])
def test_a_server_that_sends_less_than_it_is_asked_for(
    web: WebServer, versions: dict[str, tuple[bytes, bytes]], kind: str, most: int
) -> None:
    data, _ = versions[kind]
    url = web.put(f"model.{kind}", data)
    web.fault = lambda handler, path: part(handler, data, most, {"ETag": '"1"'})
    assert {name: float(tensor[7]) for name, tensor in ckptfix.load_state_dict(url).items()} == {
        f"l{number}": number for number in range(3)
    }
    assert all(seen.get("If-Match") == '"1"' for seen in web.seen[1:])


HEADERS: dict[str, tuple[dict[str, str], dict[str, str], int]] = {
    "other ETag": ({"ETag": '"1"'}, {"ETag": '"2"'}, 0),
    "other weak ETag": ({"ETag": 'W/"1"'}, {"ETag": 'W/"2"'}, 0),
    "ETag gone": ({"ETag": '"1"'}, {}, 0),
    "ETag new": ({}, {"ETag": '"1"'}, 0),
    "other time": (
        {"Last-Modified": "Mon, 01 Jan 2024 00:00:00 GMT"},
        {"Last-Modified": "Mon, 01 Jan 2024 00:00:01 GMT"},
        *(0,),
    ),
    "same ETag, other time": (
        {"ETag": '"1"', "Last-Modified": "Mon, 01 Jan 2024 00:00:00 GMT"},
        {"ETag": '"1"', "Last-Modified": "Mon, 01 Jan 2024 00:00:01 GMT"},
        *(0,),
    ),
    "other size": ({"ETag": '"1"'}, {"ETag": '"1"'}, 1),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["pth", "legacy.pth", "safetensors"])
@pytest.mark.parametrize("lie", HEADERS)
@pytest.mark.parametrize("cut", [600, 100_000])
def test_bytes_of_two_versions_never_meet(
    web: WebServer, versions: dict[str, tuple[bytes, bytes]], tmp_path: Path, kind: str, lie: str, cut: int
) -> None:
    """Two mirrors behind one name: the rest of the first answer is of another version, and all later ones are not."""
    one, other = versions[kind]
    first, second, more = HEADERS[lie]
    url = web.put(f"model.{kind}", one)
    number = itertools.count()

    def answer(handler: _Web, path: str) -> bool:
        turn = next(number)
        if turn == 1:
            return part(handler, other, len(other), second, more=more)
        return part(handler, one, cut if not turn else len(one), first)

    web.fault = answer
    with pytest.raises(DamagedFile, match="it changed while it was read"):
        ckptfix.convert(url, tmp_path / "out.pth", to="zip")
    assert not (tmp_path / "out.pth").exists()


def test_one_byte_at_a_time_comes_to_an_end(web: WebServer, versions: dict[str, tuple[bytes, bytes]]) -> None:
    data, _ = versions["pth"]
    url = web.put("model.pth", data)
    web.fault = lambda handler, path: part(handler, data, 1, {"ETag": '"1"'})
    with pytest.raises(DamagedFile, match="1 bytes at a time"):
        ckptfix.inspect(url)
    assert len(web.seen) <= http.PARTS + 1


SECRET = {"X-Api-Key": "SEKRET1", "Cookie": "SEKRET2", "PRIVATE-TOKEN": "SEKRET3", "authorization": "Bearer SEKRET4",
          "X-Anything-At-All": "SEKRET5"}  # fmt: skip


@pytest.fixture
def other_server() -> Iterator[WebServer]:
    server = WebServer()
    yield server
    server.close()


@pytest.mark.parametrize("configured", [True, False])
@pytest.mark.parametrize("place", ["path", "port", "host", "user", "back"])
def test_what_is_secret_stays_with_its_origin(
    web: WebServer,
    other_server: WebServer,
    versions: dict[str, tuple[bytes, bytes]],
    monkeypatch: pytest.MonkeyPatch,
    configured: bool,
    place: str,
) -> None:
    if configured:
        config = pytest.importorskip("fsspec.config")
        monkeypatch.setitem(config.conf, "http", {"client_kwargs": {"headers": SECRET}})
    web.put("there.pth", versions["pth"][0])
    other_server.put("there.pth", versions["pth"][0])
    host = {"user": "//u:p@", "host": "//"}.get(place, "//")
    target = {"path": "/there.pth", "port": f"{other_server.url}/there.pth", "back": f"{other_server.url}/back",
              "host": f"{web.url}/there.pth".replace("127.0.0.1", "localhost"),
              "user": f"{other_server.url}/there.pth".replace("//", host)}[place]  # fmt: skip

    def redirect(to: str) -> Callable[[_Web, str], bool]:
        def answer(handler: _Web, path: str) -> bool:
            if path in ("/there.pth",):
                return False
            handler.reply(302, b"", {"Location": to})
            return True

        return answer

    web.fault, other_server.fault = redirect(target), redirect(f"{web.url}/there.pth")
    url = f"{web.url}/here.pth".replace("//", "//me:pa55w0rd@")
    assert ckptfix.inspect(url).tensors == 3
    words = [f"SEKRET{number}" for number in range(1, 6)] if configured else []
    words += [] if configured else ["Basic "]
    asked = [dict(seen) for seen in web.seen]
    assert all(word in json.dumps(asked[0]) for word in words if word != "SEKRET4")
    strange = json.dumps([dict(seen) for seen in other_server.seen])
    assert not any(word in strange for word in (*words, "Basic", "SEKRET"))
    if place == "path":
        assert all(word in json.dumps(asked[1]) for word in words if word != "SEKRET4")
    else:
        later = [seen for seen in (*asked[1:], *other_server.seen) if "Range" in seen]
        beyond = [seen for seen in asked if seen.get("Host", "").startswith("localhost")]
        assert not any(word in json.dumps(dict(seen)) for seen in beyond for word in (*words, "Basic", "SEKRET"))
        assert later


@pytest.mark.parametrize(("one", "other", "same"), [
    ("https://h/a", "https://h/b", True), ("https://h/a", "https://H:443/b", True),
    ("http://h/a", "http://h:80/b", True), ("https://h/a", "http://h/b", False),
    ("https://h/a", "http://h:443/b", False), ("http://h/a", "https://h/b", False),
    ("https://h/a", "https://h:444/b", False), ("https://h/a", "https://h.evil/b", False),
    ("https://h/a", "https://h@evil/b", False), ("http://[::1]/a", "http://[::1]:80/b", True),
])  # fmt: skip
def test_an_origin_is_scheme_host_and_port(one: str, other: str, same: bool) -> None:
    request = http._Request(one, headers={**SECRET, "Range": "bytes=0-1", "If-Match": '"1"'})
    request.said, request.clock = {}, http._Clock("name", 1)
    following = http._Redirects().redirect_request(request, None, 302, "", {}, other)  # type: ignore[arg-type]
    assert following is not None
    kept = {name.lower() for name in following.headers}
    assert {"range", "if-match"} <= kept
    assert bool(kept & {name.lower() for name in SECRET}) == same
    assert "@" not in following.full_url


@pytest.mark.parametrize("target", [
    "ftp://127.0.0.1:{port}/x", "file:///etc/passwd", "gopher://127.0.0.1:{port}/", "data:text/plain,x",
    "http://[::1/x", "http://127.0.0.1:99999/x", "http://:80/",
])  # fmt: skip
def test_redirects_stay_on_the_web(web: WebServer, target: str) -> None:
    """No other port of this network is asked anything, and the answer comes at once."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.05)
        location = target.format(port=listener.getsockname()[1])

        def answer(handler: _Web, path: str) -> bool:
            handler.reply(302, b"", {"Location": location})
            return True

        web.fault = answer
        url = web.put("model.pth", b"x")
        begun = time.monotonic()
        code, _, err = _run("inspect", url)
        assert code == 2 and "redirects to" in err and "bug in ckptfix" not in err, err
        assert time.monotonic() - begun < LONG_WAIT / 2
        with pytest.raises(TimeoutError):
            listener.accept()
    assert len(web.seen) == 1


def _run(*words: str) -> tuple[int | None, str, str]:
    outcome = run_command(words)
    assert not outcome.failure, outcome.failure
    return outcome.code, outcome.stdout, outcome.stderr


NUMBERS = ["abc", "\u00b2", "-5", "1e3", "0x10", "9" * 30, "9" * 5000, "1_000", "+5", ""]


def _raw(handler: _Web, head: str, body: bytes = b"") -> bool:
    handler.wfile.write(head.replace("\n", "\r\n").encode("latin-1") + b"\r\n\r\n" + body)
    handler.close_connection = True
    return True


@pytest.mark.parametrize("number", NUMBERS, ids=lambda text: ascii(text)[:12])
@pytest.mark.parametrize("place", ["length", "total", "first", "last", "416", "retry"])
def test_numbers_that_are_none(web: WebServer, number: str, place: str) -> None:
    data = b"x" * 50
    heads = {
        "length": f"HTTP/1.1 200 OK\nContent-Length: {number}",
        "total": f"HTTP/1.1 206 Part\nContent-Range: bytes 0-49/{number}\nContent-Length: 50",
        "first": f"HTTP/1.1 206 Part\nContent-Range: bytes {number}-49/50\nContent-Length: 50",
        "last": f"HTTP/1.1 206 Part\nContent-Range: bytes 0-{number}/50\nContent-Length: 50",
        "416": f"HTTP/1.1 416 No\nContent-Range: bytes */{number}\nContent-Length: 0",
        "retry": f"HTTP/1.1 404 No\nRetry-After: {number}\nContent-Length: 0",
    }
    web.fault = lambda handler, path: _raw(handler, heads[place], data if place != "416" else b"")
    code, out, err = _run("inspect", web.put("model.pth", data))
    assert code == 2 and not out
    assert "bug in ckptfix" not in err and len(err) < 1000, err


@pytest.mark.parametrize("url", [
    "http://u:pa55@[::1/x", "http://u:pa55@h:99999/x", "http://u:pa/55@h/x", "http:///x", "http://u:pa55@h:abc/x",
    "http://u:pa55@a b/x", "http://u:pa55@h\u2100/x",
])  # fmt: skip
def test_urls_that_are_none(url: str) -> None:
    code, out, err = _run("inspect", url)
    assert code == 2 and "bug in ckptfix" not in err
    assert "pa55" not in out + err and "pa/55" not in out + err


def _drip(text: bytes, pause: float) -> Callable[[_Web, str], bool]:
    def answer(handler: _Web, path: str) -> bool:
        handler.close_connection = True
        begun = time.monotonic()
        with suppress(OSError):
            for byte in itertools.cycle([text]):
                handler.wfile.write(byte)
                handler.wfile.flush()
                if time.monotonic() - begun > LONG_WAIT:
                    break
                time.sleep(pause)
        return True

    return answer


def _after(head: bytes, text: bytes, pause: float) -> Callable[[_Web, str], bool]:
    drip = _drip(text, pause)

    def answer(handler: _Web, path: str) -> bool:
        handler.wfile.write(head)
        return drip(handler, path)

    return answer


PART = b"HTTP/1.1 206 Part\r\nContent-Range: bytes 0-131071/999999\r\n"
TRICKLES = {
    "content": _after(PART + b"Content-Length: 131072\r\n\r\n", b"x", 0.05),
    "headers": _after(b"HTTP/1.1 206 Part\r\nX-Y: ", b"y", 0.05),
    "status": _drip(b"H", 0.05),
    "chunks": _after(PART + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n", 0.05),
    "continue, slowly": _drip(b"HTTP/1.1 100 Continue\r\n\r\n", 0.05),
    "continue, fast": _drip(b"HTTP/1.1 100 Continue\r\n\r\n" * 4000, 0.0),
    "a redirect without end": _after(b"HTTP/1.1 302 Found\r\nLocation: /x\r\n\r\n", b"z" * 65536, 0.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", TRICKLES)
def test_a_server_that_keeps_us_is_left(web: WebServer, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """It sends something now and then, so that no single wait is long."""
    monkeypatch.setattr(http, "TIMEOUT", 0.5)
    web.fault = TRICKLES[kind]
    url = web.put("model.pth", b"x" * 999_999)
    begun = time.monotonic()
    with pytest.raises(CkptfixError) as caught:
        ckptfix.inspect(url)
    assert time.monotonic() - begun < LONG_WAIT / 2
    assert caught.value.path == url
    assert len(web.seen) <= 6


@pytest.mark.parametrize(("rate", "waited"), [(400, True), (90, False)])
def test_a_slow_server_that_goes_on_is_waited_for(
    web: WebServer, monkeypatch: pytest.MonkeyPatch, rate: int, waited: bool
) -> None:
    """All takes several times as long as one wait, by a clock that goes with the bytes that arrive."""
    wait = 5.0
    monkeypatch.setattr(http, "TIMEOUT", wait)
    monkeypatch.setattr(http, "SLOWEST", 100)
    data = b"x" * 8000
    arrived = threading.Semaphore(0)
    now = 0.0
    took = http._Clock.took

    def counted(clock: http._Clock, count: int) -> None:
        nonlocal now
        took(clock, count)
        now += count / rate
        arrived.release()

    def answer(handler: _Web, path: str) -> bool:
        handler.wfile.write(b"HTTP/1.1 206 Part\r\nContent-Range: bytes 0-7999/8000\r\nContent-Length: 8000\r\n\r\n")
        with suppress(OSError):
            for start in range(0, 8000, 400):
                handler.wfile.write(data[start : start + 400])
                handler.wfile.flush()
                arrived.acquire(timeout=LONG_WAIT)
        handler.close_connection = True
        return True

    monkeypatch.setattr(http._Clock, "took", counted)
    monkeypatch.setattr(http, "time", SimpleNamespace(monotonic=lambda: now))
    web.fault = answer
    with nullcontext() if waited else pytest.raises(CkptfixError, match="too slow"):
        got, facts = http.Resource(web.put("x", data)).get(0, 8000, None)
        assert (got, facts.size) == (data, 8000)
    assert now >= 4 * wait


SECRETS = [
    "http://me:pa55w0rd@127.0.0.1:1/a/m.pth", "http://me:pa/55w0rd@127.0.0.1:1/a/m.pth",
    "http://me:pa/5/5w0rd@127.0.0.1:1/m.pth", "http://127.0.0.1:1/a/m.pth;token=pa55w0rd",
    "http://127.0.0.1:1/a;token=pa55w0rd/m.pth", "http://127.0.0.1:1/m.pth;v=1;sig=pa55w0rd",
    "http://127.0.0.1:1/m.pth#access_token=pa55w0rd", "http://127.0.0.1:1/m.pth?a=1;token=pa55w0rd",
    "htp://me:pa/55w0rd@host/m.pth;token=pa55w0rd", "http://me:pa?55w0rd@127.0.0.1:1/m.pth",
]  # fmt: skip


@pytest.mark.parametrize("url", SECRETS)
def test_no_secret_is_shown_wherever_it_is_in_a_url(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptfix.io.remote.store.TRIES", 1)
    texts = [known(url), redacted(f"the client says {url} is bad")]
    for words in (["inspect", url, "--json"], ["doctor", url], ["doctor", url, "--json"], ["digest", url],
                  ["fleet", "plan", url, "--", "doctor"], ["strip-module", url, str(tmp_path / "o.pth")],
                  ["inspect", url, "--html", str(tmp_path / "p.html")], ["doctor", url, "--like", url]):  # fmt: skip
        texts += _run(*words)[1:]
    texts += [path.read_text() for path in tmp_path.glob("*.html")]
    assert not [text for text in texts if "55w0rd" in text or "pa/5" in text]


@pytest.mark.parametrize("url", [
    "http://localhost:8080/@scope/a.pth", "http://h/a;v=2/m.pth", "https://h/a.pth?download=true#part", "hf://o/r@rev/f",
    "s3://b/run;hash=abc/x.pth", "s3://b/a#key=1.pth", "abfs://c@account/x", "http://[::1]:80/a@b", "http://h:80/m@2.pth",
])  # fmt: skip
def test_what_is_no_secret_is_shown(url: str) -> None:
    assert known(url) == url


def test_proxies_get_their_password_and_no_other_host(monkeypatch: pytest.MonkeyPatch) -> None:
    request = http._Request("http://h/a", headers={"Range": "bytes=0-1"})
    request.said, request.clock = {}, http._Clock("name", 1)
    request.add_header("Proxy-authorization", "Basic x")
    following = http._Redirects().redirect_request(request, None, 302, "", {}, "http://other/b")  # type: ignore[arg-type]
    assert isinstance(following, urllib.request.Request) and not following.has_header("Proxy-authorization")
