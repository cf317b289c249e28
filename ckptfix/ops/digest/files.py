"""Digests of whole files, and the digests in the file names of the Hugging Face cache.

::

    models--ORG--NAME/blobs/64 digits     a large file, named by its SHA-256
    models--ORG--NAME/blobs/40 digits     any other, named as git does: the SHA-1 of "blob SIZE\\0" and its bytes
    models--ORG--NAME/snapshots/REVISION  links to these
    FOLDER/.cache/huggingface/download/FILE.metadata    of `hf download --local-dir`: commit, digest, time, a line each

Source: huggingface_hub/file_download.py (``_get_pointer_path``) and _local_folder.py (``write_download_metadata``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence

from ckptfix.checkpoint import ByteRange
from ckptfix.dataclass import dataclass
from ckptfix.errors import NoSuchFile, Refused
from ckptfix.io.read import Progress, read_blocks
from ckptfix.io.source import found_as, open_source
from ckptfix.io.threads import Workers
from ckptfix.ops.digest.tensors import Digest, Hash, NewHash, hasher
from ckptfix.urls import as_path, real_path, walk_folder

_BLOB = re.compile(r"[0-9a-f]{64}|[0-9a-f]{40}")
_LOCAL = as_path(".cache", "huggingface", "download")


@dataclass(frozen=True, slots=True)
class NamedDigest:
    """A file, and the digest that its name, or a note beside it, claims."""

    path: str
    digest: str


def below(path: str) -> list[str]:
    """List the files that a path stands for: itself, or all files in a folder except hidden ones.

    Raises:
        NoSuchFile: it does not exist.
    """
    if found_as(path) != "folder":
        if not found_as(path):
            raise NoSuchFile(path)
        open_source(path).close()  # refuse a pipe or a device
        return [path]
    found: list[str] = []
    for folder, folders, names in walk_folder(path):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [os.path.join(folder, name) for name in sorted(names) if not name.startswith(".")]  # noqa: PTH118
    return found


def digests(paths: Sequence[str], algorithm: str = "sha256", *, progress: Progress | None = None) -> list[Digest]:
    """Compute the digests of whole files, on several threads. Raises like `read_blocks`."""
    new = hasher(algorithm)
    rows = _on_threads([(path, new, False) for path in paths], progress)
    return [Digest(path, digest) for path, digest in zip(paths, rows, strict=True)]


def wrong(named: Sequence[NamedDigest], *, progress: Progress | None = None) -> list[str]:
    """Return the files whose digest is not the expected one."""
    new = hasher("sha256")
    tasks = [(row.path, _sha1, True) if len(row.digest) == 40 else (row.path, new, False) for row in named]
    rows = _on_threads(tasks, progress)
    return [row.path for row, digest in zip(named, rows, strict=True) if digest != row.digest]


def _sha1() -> Hash:
    import hashlib

    return hashlib.sha1(usedforsecurity=False)


Task = tuple[str, NewHash, bool]
"""A file, its hash function, and whether to hash it as git does."""


def _on_threads(tasks: Sequence[Task], progress: Progress | None) -> list[str]:
    total = sum(_size(path) for path, _, _ in tasks) if progress is not None else 0
    done = 0
    found: list[str] = []
    for digest, size in Workers().run(_sum, tasks):
        found.append(digest)
        done += size
        if progress is not None:
            progress(done, total)
    return found


def _size(path: str) -> int:
    with open_source(path) as source:
        return source.size


def _sum(task: Task) -> tuple[str, int]:
    path, new, as_git = task
    size = _size(path)
    state = new()
    if as_git:
        state.update(b"blob %d\0" % size)
    for block in read_blocks(ByteRange(path, 0, size)):
        state.update(block)
    return state.hexdigest(), size


def of_hub(path: str) -> list[NamedDigest]:
    """Find the files at or below `path` whose digest a cache of the Hugging Face Hub knows.

    Raises:
        Refused: there are no such files.
    """
    rows = list(_of_hub(path))
    if not rows:
        message = "no file in it is named by its digest, as the blobs of a Hugging Face cache are"
        hint = "name the folder models--ORG--NAME of the cache, a snapshot in it, or a file"
        raise Refused(message, path=path, hint=hint)
    return rows


def _of_hub(path: str) -> Iterator[NamedDigest]:
    seen: set[str] = set()
    for file in below(path):
        real = real_path(file)
        name = as_path(real).name
        if _BLOB.fullmatch(name):
            if real not in seen:
                seen.add(real)
                yield NamedDigest(file, name)
            continue
        etag = _noted(file, path)
        if etag is not None and _BLOB.fullmatch(etag):
            yield NamedDigest(file, etag)


def _noted(file: str, path: str) -> str | None:
    """Return the digest that `hf download --local-dir` recorded for a file, in a folder at or above `path`."""
    for folder in as_path(os.path.abspath(file)).parents:  # noqa: PTH100
        noted = folder / _LOCAL
        if noted.is_dir():
            place = noted / f"{as_path(os.path.abspath(file)).relative_to(folder)}.metadata"  # noqa: PTH100
            if place.is_file():
                with open_source(str(place)) as source:
                    lines = source.read(0, min(source.size, 4096)).decode("utf-8", "replace").splitlines()
                return lines[1].strip() if len(lines) > 1 else None
            return None
    return None
