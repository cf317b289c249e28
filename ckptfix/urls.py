"""Names of files on other machines: ``s3://BUCKET/KEY``, ``https://HOST/PATH``, ``hf://ORG/REPO/FILE``.

A URL may contain secrets (a password, a signed query). `known` strips them as soon as the URL comes in: messages, JSON,
records and logs use the public name, and only the client that opens it asks for the whole URL (`secret_of`). This is
the only module that knows both.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path, PosixPath
from typing import Literal, NamedTuple, Protocol

from ckptfix.hooks import Hook

SCHEMES = frozenset(
    (
        *("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "hf", "http", "https", "oss", "sftp", "ssh"),
        *("memory", "ftp", "hdfs", "webhdfs", "github", "dbfs"),
    )
)
"""Schemes that are recognized before ``://``. Any other word there is the beginning of a path."""

READ_ONLY = frozenset(("http", "https", "hf"))
"""Schemes that cannot be written to."""

Kind = Literal["file", "folder", ""]

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(/+)(.*)", re.DOTALL)
_QUERY = re.compile(r"\?(?=[\w.~%-]+=)[^#]*")
_PARAMETERS = re.compile(r";(?=[\w.~%-]+=)[^/?#]*")
_FRAGMENT = re.compile(r"#(?=[\w.~%-]+=).*", re.DOTALL)
_OF_THE_WEB = frozenset(("http", "https", "ftp", "webhdfs"))
"""Schemes whose URLs end a file's name at ``;`` and ``#``."""

_PASSWORD = re.compile(r"^[^\[\]:]*:(?![0-9]*$)")
"""A host with something other than a port behind its colon."""

_SECRET = re.compile(
    r"^(x-(amz|goog|ms|oss|obs)-.*|.*(sig|token|key|secret|passw|pwd|credential|auth|hmac|hash|jwt|session|policy).*"
    r"|se|sp|sv|sr|st|spr|skoid|sktid|expires|exp|code)$",
    re.IGNORECASE,
)
_VISIBLE = 32
"""The longest value of a query that may be shown, in characters; a longer one may be a secret under any name."""

_SHOWN = frozenset({"versionid", "generation", "rev", "revision", "download", "snapshot"})

_ANYWHERE = re.compile(r"\b[A-Za-z][A-Za-z0-9+.-]+://[^\s'\"<>]*")

_whole: dict[str, str] = {}
"""Public name -> the URL with its secrets."""


def scheme_of(name: str) -> str:
    """Return the scheme of a URL; empty for a path."""
    found = _URL.match(name) if ":/" in name else None
    scheme = found[1].lower() if found else ""
    return scheme if scheme in SCHEMES else ""


def is_url(name: str) -> bool:
    """Return whether `name` is a URL rather than a path."""
    return bool(scheme_of(name))


class Virtual(str):
    """The name of something that no disk and no store has, such as a file that is planned: only its class opens it.

    It may look like a path or a URL, because names of outputs are made of it.
    """


def known(name: str) -> str:
    """Return the public name for `name`: a path unchanged, a URL without its secrets, a path for ``file:///PATH``.

    ``s3:/BUCKET/KEY``, which `pathlib` makes of a URL, counts as that URL, unless a file with that name exists. A
    `Virtual` name stays what it is.
    """
    if isinstance(name, Virtual):
        return name
    scheme = scheme_of(name)
    if not scheme:
        if name.startswith("file:///"):
            return name.removeprefix("file://")
        # A misspelled scheme, such as htps://, is not recognized, but a secret may still follow it.
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


def word_without_secrets(word: str) -> str:
    """Return `known` for a word of a command line: a URL, or an option with one (``--like=URL``, ``-oURL``)."""
    if not word.startswith("-"):
        return known(word)
    if word.startswith("--"):
        option, equals, value = word.partition("=")
        return f"{option}={known(value)}" if equals else word
    flags = next((at for at in range(2, len(word)) if is_url(word[at:])), len(word)) if ":/" in word else len(word)
    return word[:flags] + known(word[flags:])


def secret_of(name: str) -> str:
    """Return the URL behind the public `name`, with all its secrets: only for the client that opens it."""
    whole = _whole.get(name)
    if whole is not None:
        return whole
    # Files below it, or beside it, are opened with the same password.
    for public, full in _whole.items():
        around = public.rpartition("/")[0]
        if around.count("/") >= 2 and name.startswith(f"{around}/") and (userinfo := _userinfo(full)):
            scheme, _, rest = name.partition("://")
            return f"{scheme}://{userinfo}@{rest}"
    return name


def secrets() -> dict[str, str]:
    """Return the secrets that `known` has stripped in this process, to pass them to a process that works for it."""
    return dict(_whole)


def share(secrets: dict[str, str]) -> None:
    """Add the secrets of another process to this one's."""
    _whole.update(secrets)


def _userinfo(url: str) -> str:
    host = url.partition("://")[2].partition("/")[0]
    return host.rpartition("@")[0]


def _public(url: str) -> str:
    scheme, _, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    if "@" not in host and _PASSWORD.search(host) and "@" in path:
        # The text after the colon is not a port but a password, whose slash should have been written as %2F.
        host, slash, path = rest.rpartition("@")[2].partition("/")
    # abfs://CONTAINER@ACCOUNT and hf://ORG/REPO@REV contain no password.
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
    """Return `text` from a client or a server without the secrets in its URLs."""
    for public, whole in _whole.items():
        text = text.replace(whole, public)
    return _ANYWHERE.sub(lambda url: _public(url[0]).partition("?")[0], text)


class FolderEntry(NamedTuple):
    """An entry of a folder, with the methods of `os.DirEntry`."""

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
    """The questions about a URL that a store answers."""

    def kind(self, name: str) -> Kind: ...

    def entries(self, folder: str) -> Sequence[FolderEntry]: ...

    def size(self, name: str) -> int: ...

    def ahead(self, folder: str, names: Iterable[str]) -> None: ...


STORES: Hook[Stores] = Hook("io.stores")
"""The stores that answer questions about URLs; `io` registers them."""


class URLPath(PosixPath):
    """A URL that behaves like a path: where a path would ask the disk, it asks its store."""

    def __str__(self) -> str:
        text = super().__str__()
        scheme, colon, rest = text.partition(":/")
        return f"{scheme}://{rest.lstrip('/')}" if colon else text

    def __fspath__(self) -> str:
        return str(self)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return STORES.get().kind(str(self)) == "file"

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return STORES.get().kind(str(self)) == "folder"

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        return STORES.get().kind(str(self)) != ""

    def is_symlink(self) -> bool:
        return False

    def resolve(self, strict: bool = False) -> URLPath:
        return self

    def absolute(self) -> URLPath:
        return self

    def is_absolute(self) -> bool:
        return True

    def iterdir(self) -> Generator[URLPath, None, None]:
        return (URLPath(entry.path) for entry in STORES.get().entries(str(self)))

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        kind = STORES.get().kind(str(self))
        if not kind:
            raise FileNotFoundError(2, "No such file or directory", str(self))
        if kind == "folder":
            return os.stat_result((stat.S_IFDIR | 0o755, 0, 0, 1, 0, 0, 0, 0, 0, 0))
        return os.stat_result((stat.S_IFREG | 0o644, 0, 0, 1, 0, 0, STORES.get().size(str(self)), 0, 0, 0))


def as_path(*parts: str | os.PathLike[str]) -> Path:
    """Return the path made of `parts`; for a URL, a path that asks its store."""
    first = os.fspath(parts[0]) if parts else ""
    return (URLPath if is_url(first) else Path)(*parts)


def normal(name: str) -> str:
    """Return `os.path.normpath(name)`, or the normal form of a URL."""
    return str(as_path(name)) if is_url(name) else os.path.normpath(name)


def folder_beside(name: str) -> Path:
    """Return the folder for an output beside `name`: the current folder if `name` is in a read-only place."""
    return Path() if scheme_of(name) in READ_ONLY else as_path(name).parent


def real_path(name: str | os.PathLike[str]) -> str:
    """Return `os.path.realpath(name)`, or the URL itself, which has no links."""
    text = os.fspath(name)
    return str(as_path(text)) if is_url(text) else os.path.realpath(text)


class _Scan:
    """An open folder that behaves like the result of `os.scandir`."""

    def __init__(self, folder: str) -> None:
        self._rows: Iterator[FolderEntry] = iter(STORES.get().entries(folder))

    def __iter__(self) -> Iterator[FolderEntry]:
        return self._rows

    def __enter__(self) -> _Scan:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


def scan_folder(folder: str | os.PathLike[str]) -> os.ScandirIterator[str] | _Scan:  # type: ignore[name-defined]
    """Return `os.scandir(folder)`; also for a URL."""
    text = os.fspath(folder)
    return _Scan(text) if is_url(text) else os.scandir(text)


def headers_of(folder: str, names: Iterable[str]) -> None:
    """Prepare to read the beginnings of these files of a folder: a store fetches many of them at a time."""
    if is_url(folder):
        STORES.get().ahead(folder, names)


def walk_folder(folder: str | os.PathLike[str]) -> Iterator[tuple[str, list[str], list[str]]]:
    """Walk a folder from the top down like `os.walk`; also for a URL."""
    text = os.fspath(folder)
    if not is_url(text):
        yield from os.walk(text)
        return
    rows = STORES.get().entries(text)
    folders = [row.name for row in rows if row.kind == "folder"]
    yield text, folders, [row.name for row in rows if row.kind == "file"]
    for name in folders:
        yield from walk_folder(str(as_path(text, name)))
