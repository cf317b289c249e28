"""Folders of a store: a command lists each folder once, including everything below it.

The kind of a name is found by opening it, or by listing the objects whose names begin with it; the name itself decides
which is tried first. A web server cannot list: each of its names is either a file or does not exist.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice

from ckptfix.errors import CkptfixError, NoSuchFile, Unsupported
from ckptfix.io import open_files
from ckptfix.io.open_files import far, known_far, threads
from ckptfix.io.remote import clients
from ckptfix.io.remote.file import AT_ONCE, RemoteFile
from ckptfix.io.remote.store import Facts
from ckptfix.urls import FolderEntry, Kind, as_path, scheme_of

MOST_AHEAD = 1000
"""The most files whose beginnings are requested before they are needed, since these are cached until then."""

MOST = 200_000
"""The most objects of one folder."""

UNLISTED = frozenset(("http", "https"))


class Listing:
    """All objects below a folder.

    Raises:
        Unsupported: there are too many.
    """

    def __init__(self, folder: str) -> None:
        rows: Iterator[tuple[str, Facts]] = iter(())
        if scheme_of(folder) not in UNLISTED:
            rows = clients.store_of(folder).listing(folder)
        self.files: dict[str, Facts] = dict(islice(rows, MOST + 1))
        if len(self.files) > MOST:
            raise Unsupported(f"it holds more than {MOST:,} objects", path=folder, hint="pass a folder inside it")
        self._folders: dict[str, dict[str, Kind]] = {"": {}} if self.files else {}
        for name in self.files:
            above, _, last = name.rpartition("/")
            self._folders.setdefault(above, {})[last] = "file"
            while above:
                above, _, last = above.rpartition("/")
                self._folders.setdefault(above, {}).setdefault(last, "folder")

    def kind(self, name: str) -> Kind:
        """Return the kind of `name`, which is relative to the folder."""
        return "file" if name in self.files else "folder" if name in self._folders else ""

    def entries(self, name: str) -> list[tuple[str, Kind]]:
        return sorted(self._folders.get(name, {}).items())

    def close(self) -> None:
        pass


def _key(folder: str) -> str:
    return f"{folder.rstrip('/')}/"


def listing(folder: str) -> Listing:
    """Return the objects below `folder`, as this command has found them."""
    found = far(_key(folder), lambda: Listing(folder))
    assert isinstance(found, Listing)
    return found


def _listed(name: str) -> tuple[Listing, str] | None:
    """Return a folder around `name` that this command has already listed, and the name relative to it."""
    path = name.rstrip("/")
    above, inner = path, ""
    while above.count("/") > 2:
        found = known_far(_key(above))
        if isinstance(found, Listing):
            return found, inner
        above, _, last = above.rpartition("/")
        inner = f"{last}/{inner}" if inner else last
    found = known_far(_key(above))
    return (found, inner) if isinstance(found, Listing) else None


def open_file(name: str) -> RemoteFile:
    """Open an object. The store is not asked for one that a listing of this command does not have.

    A listing without files says nothing: the web lists none.
    """
    known = _listed(name)
    absent = known is not None and known[0].files and known[1] and "?" not in known[1]
    if absent and known is not None and known[0].kind(known[1]) != "file":
        raise NoSuchFile(name)
    return RemoteFile(name)


def forget(name: str) -> None:
    """Forget what this command knows of an object or a folder, and of the folders around it: it was written."""
    open_files.forget(name)
    bare = name.rstrip("/")
    while bare.count("/") >= 2:
        open_files.forget(_key(bare))
        bare = bare.rpartition("/")[0]


def kind(name: str) -> Kind:
    """Return the kind of object that has the name `name`: empty for no object.

    Raises the errors of opening it, unless it does not exist.
    """
    known = _listed(name)
    if known is not None and (known[1] or known[0].files):
        return known[0].kind(known[1])
    scheme = scheme_of(name)
    if scheme in UNLISTED:
        return "file" if not name.endswith("/") and _is_object(name) else ""
    bare = name.rstrip("/")
    is_root = bare.count("/") <= (3 if scheme == "hf" else 2)
    if not (name.endswith("/") or is_root) and as_path(bare).suffix and _is_object(bare):
        return "file"
    if listing(bare).files:
        return "folder"
    if name.endswith("/") or is_root or as_path(bare).suffix:
        return ""
    return "file" if _is_object(bare) else ""


def _is_object(name: str) -> bool:
    try:
        RemoteFile(name)
    except NoSuchFile:
        return False
    return True


def ahead(folder: str, names: Iterable[str]) -> None:
    """Request the beginnings of files of a folder, many at a time; readers repeat the requests that failed."""
    listed = _listed(folder)
    if listed is None or not listed[0].files:
        return
    found, inner = listed
    wanted = [name for name in names if found.kind(f"{inner}/{name}" if inner else name) == "file"]

    def open_one(name: str) -> None:
        with suppress(CkptfixError):
            RemoteFile(str(as_path(folder, name)))

    if len(wanted) > 1:
        with threads(AT_ONCE, "headers") as pool:
            for _ in pool.map(open_one, wanted[:MOST_AHEAD]):
                pass


def size(name: str) -> int:
    """Return the size of a file in bytes."""
    known = _listed(name)
    if known is not None and known[1] in known[0].files:
        return known[0].files[known[1]].size
    return RemoteFile(name).size


def entries(folder: str) -> Sequence[FolderEntry]:
    """Return the entries of `folder` itself."""
    found, inner = _listed(folder) or (listing(folder), "")
    return [FolderEntry(name, str(as_path(folder, name)), kind) for name, kind in found.entries(inner)]
