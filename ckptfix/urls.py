"""Names of files that are not on this machine: ``s3://BUCKET/KEY``, ``https://HOST/PATH``, ``hf://ORG/REPO/FILE``.

What is secret in a URL (a password, a signed query) leaves it as soon as it comes in (`known`): from then on the URL
goes by a name without it, in messages, JSON, records and logs, and only the client that opens it asks for the whole
(`secret_of`). This is the one place that knows both.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path, PosixPath
from typing import Literal, NamedTuple, Protocol

SCHEMES = frozenset(
    (
        *("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "hf", "http", "https", "oss", "sftp", "ssh"),
        *("memory", "ftp", "hdfs", "webhdfs", "github", "dbfs"),
    )
)
"""What may stand before ``://``. Another word there is the beginning of a path."""

READ_ONLY = frozenset(("http", "https", "hf"))
"""What nothing is written to."""

Kind = Literal["file", "folder", ""]

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(/+)(.*)", re.DOTALL)
_QUERY = re.compile(r"\?(?=[\w.~%-]+=)[^#]*")
_PARAMETERS = re.compile(r";(?=[\w.~%-]+=)[^/?#]*")
_FRAGMENT = re.compile(r"#(?=[\w.~%-]+=).*", re.DOTALL)
_OF_THE_WEB = frozenset(("http", "https", "ftp", "webhdfs"))
"""Schemes in whose URLs ``;`` and ``#`` are no part of a file's name."""

_PASSWORD = re.compile(r"^[^\[\]:]*:(?![0-9]*$)")
"""A host with something else than a port behind its colon."""

_SECRET = re.compile(
    r"^(x-(amz|goog|ms|oss|obs)-.*|.*(sig|token|key|secret|passw|pwd|credential|auth|hmac|hash|jwt|session|policy).*"
    r"|se|sp|sv|sr|st|spr|skoid|sktid|expires|exp|code)$",
    re.IGNORECASE,
)
_VISIBLE = 32
"""Characters of a value in a query that may be shown; a longer one may be a secret whatever it is called."""

_SHOWN = frozenset({"versionid", "generation", "rev", "revision", "download", "snapshot"})

_ANYWHERE = re.compile(r"\b[A-Za-z][A-Za-z0-9+.-]+://[^\s'\"<>]*")

_whole: dict[str, str] = {}
"""Name -> the URL with what is secret in it."""


def scheme_of(name: str) -> str:
    """The scheme of a URL; empty for a path."""
    found = _URL.match(name) if ":/" in name else None
    scheme = found[1].lower() if found else ""
    return scheme if scheme in SCHEMES else ""


def is_url(name: str) -> bool:
    """Whether `name` is a URL, and no path."""
    return bool(scheme_of(name))


def known(name: str) -> str:
    """The name by which `name` goes: a path as it is, a URL without what is secret in it; ``file:///PATH`` is a path.

    ``s3:/BUCKET/KEY``, which `pathlib` makes of a URL, is that URL, unless there is a file of that name.
    """
    scheme = scheme_of(name)
    if not scheme:
        if name.startswith("file:///"):
            return name.removeprefix("file://")
        # htps:// is no scheme, and what follows may be secret all the same.
        public = _public(name) if "://" in name and _URL.match(name) is not None else name
        return public if public != name and not os.path.lexists(name) else name
    found = _URL.match(name)
    assert found is not None
    if found[2] == "/" and os.path.lexists(name):
        return name
    whole = f"{scheme}://{found[3]}" if found[2] != "/" * 3 or scheme != "memory" else f"memory://{found[3]}"
    public = _public(whole)
    if public != whole:
        _whole[public] = whole
    return public


def known_word(word: str) -> str:
    """A word of a command line, as `known`: a URL, or an option with one (``--like=URL``, ``-oURL``)."""
    if not word.startswith("-"):
        return known(word)
    if word.startswith("--"):
        option, equals, value = word.partition("=")
        return f"{option}={known(value)}" if equals else word
    flags = next((at for at in range(2, len(word)) if is_url(word[at:])), len(word)) if ":/" in word else len(word)
    return word[:flags] + known(word[flags:])


def secret_of(name: str) -> str:
    """The URL that goes by `name`, with all that is secret in it: for the client that opens it alone."""
    whole = _whole.get(name)
    if whole is not None:
        return whole
    # What lies below it, or beside it, is opened with the same password.
    for public, full in _whole.items():
        around = public.rpartition("/")[0]
        if around.count("/") >= 2 and name.startswith(f"{around}/") and (userinfo := _userinfo(full)):
            scheme, _, rest = name.partition("://")
            return f"{scheme}://{userinfo}@{rest}"
    return name


def secrets() -> dict[str, str]:
    """What `known` took away in this process, for one that works for it."""
    return dict(_whole)


def share(secrets: dict[str, str]) -> None:
    """Know what another process does."""
    _whole.update(secrets)


def _userinfo(url: str) -> str:
    host = url.partition("://")[2].partition("/")[0]
    return host.rpartition("@")[0]


def _public(url: str) -> str:
    scheme, _, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    if "@" not in host and _PASSWORD.search(host) and "@" in path:
        # What follows the colon is no port: it is a password, in which a slash should have been %2F.
        host, slash, path = rest.rpartition("@")[2].partition("/")
    # abfs://CONTAINER@ACCOUNT, hf://ORG/REPO@REV: no password.
    elif "@" in host and (scheme not in ("abfs", "abfss") or ":" in host):
        host = host.rpartition("@")[2]
    query = _QUERY.search(path)
    if query is not None and _is_secret(query[0][1:]):
        path = path[: query.start()]
    for cut in (_PARAMETERS, _FRAGMENT) if scheme.lower() in _OF_THE_WEB or not is_url(url) else ():
        path = cut.sub(lambda part: "" if _is_secret(part[0][1:]) else part[0], path)
    return f"{scheme}://{host}{slash}{path}"


def _is_secret(query: str) -> bool:
    for part in re.split("[&;]", query):
        name, _, value = part.partition("=")
        if name.lower() not in _SHOWN and (_SECRET.match(name) or len(value) > _VISIBLE):
            return True
    return False


def redacted(text: str) -> str:
    """`text`, which a client or a server said, without what is secret in its URLs."""
    for public, whole in _whole.items():
        text = text.replace(whole, public)
    return _ANYWHERE.sub(lambda url: _public(url[0]).partition("?")[0], text)


class Entry(NamedTuple):
    """What lies in a folder, in the way of `os.DirEntry`."""

    name: str
    path: str
    kind: Kind

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return self.kind == "file"

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self.kind == "folder"

    def is_symlink(self) -> bool:
        return False


class Stores(Protocol):
    """What is asked about a URL."""

    def kind(self, name: str) -> Kind: ...

    def entries(self, folder: str) -> Sequence[Entry]: ...

    def size(self, name: str) -> int: ...

    def ahead(self, folder: str, names: Iterable[str]) -> None: ...


class Far:
    """The stores that are there: `io` brings them."""

    stores: Stores


class URLPath(PosixPath):
    """A URL with the manners of a path: what is asked of the disk is asked of its store."""

    def __str__(self) -> str:
        text = super().__str__()
        scheme, colon, rest = text.partition(":/")
        return f"{scheme}://{rest.lstrip('/')}" if colon else text

    def __fspath__(self) -> str:
        return str(self)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return Far.stores.kind(str(self)) == "file"

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return Far.stores.kind(str(self)) == "folder"

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        return Far.stores.kind(str(self)) != ""

    def is_symlink(self) -> bool:
        return False

    def resolve(self, strict: bool = False) -> URLPath:
        return self

    def absolute(self) -> URLPath:
        return self

    def is_absolute(self) -> bool:
        return True

    def iterdir(self) -> Generator[URLPath, None, None]:
        return (URLPath(entry.path) for entry in Far.stores.entries(str(self)))

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        kind = Far.stores.kind(str(self))
        if not kind:
            raise FileNotFoundError(2, "No such file or directory", str(self))
        if kind == "folder":
            return os.stat_result((stat.S_IFDIR | 0o755, 0, 0, 1, 0, 0, 0, 0, 0, 0))
        return os.stat_result((stat.S_IFREG | 0o644, 0, 0, 1, 0, 0, Far.stores.size(str(self)), 0, 0, 0))


def as_path(*parts: str | os.PathLike[str]) -> Path:
    """The path made of `parts`; of a URL, one that asks its store."""
    first = os.fspath(parts[0]) if parts else ""
    return (URLPath if is_url(first) else Path)(*parts)


def normal(name: str) -> str:
    """`os.path.normpath`, of a URL too."""
    return str(as_path(name)) if is_url(name) else os.path.normpath(name)


def folder_beside(name: str) -> Path:
    """The folder that an output beside `name` is put in: where nothing can be written, the current one."""
    return Path() if scheme_of(name) in READ_ONLY else as_path(name).parent


def real_path(name: str | os.PathLike[str]) -> str:
    """`os.path.realpath`, of a URL too: it has no links."""
    text = os.fspath(name)
    return str(as_path(text)) if is_url(text) else os.path.realpath(text)


class _Scan:
    """An open folder, as `os.scandir` gives it."""

    def __init__(self, folder: str) -> None:
        self._rows: Iterator[Entry] = iter(Far.stores.entries(folder))

    def __iter__(self) -> Iterator[Entry]:
        return self._rows

    def __enter__(self) -> _Scan:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


def scan_folder(folder: str | os.PathLike[str]) -> os.ScandirIterator[str] | _Scan:  # type: ignore[name-defined]
    """`os.scandir`, of a URL too."""
    text = os.fspath(folder)
    return _Scan(text) if is_url(text) else os.scandir(text)


def headers_of(folder: str, names: Iterable[str]) -> None:
    """The beginnings of these files of a folder are wanted next: a store is asked for many at a time."""
    if is_url(folder):
        Far.stores.ahead(folder, names)


def walk_folder(folder: str | os.PathLike[str]) -> Iterator[tuple[str, list[str], list[str]]]:
    """`os.walk` from the top down, of a URL too."""
    text = os.fspath(folder)
    if not is_url(text):
        yield from os.walk(text)
        return
    rows = Far.stores.entries(text)
    folders = [row.name for row in rows if row.kind == "folder"]
    yield text, folders, [row.name for row in rows if row.kind == "file"]
    for name in folders:
        yield from walk_folder(str(as_path(text, name)))
