"""Manifests in the form of ``sha256sum``: one line ``DIGEST  NAME`` for each file or tensor.

If a name has a backslash or a line break, these are escaped, and a backslash precedes the digest. ``DIGEST *NAME``
(binary) and ``SHA256 (NAME) = DIGEST`` (BSD, ``--tag``) are read too. A manifest of tensors begins with a line that
``sha256sum`` treats as a comment::

    # ckptfix-tensor-1 sha256
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ckptfix.dataclass import dataclass
from ckptfix.errors import DamagedFile
from ckptfix.io.source import open_source
from ckptfix.ops.digest.tensors import ESCAPES, MARK, Digest, line

MOST = 256 << 20
"""Bytes of the largest manifest that is read; a million tensors need less."""

_LINE = re.compile(r"(\\?)([0-9A-Fa-f]{32,128}) [ *](.+)", re.DOTALL)
_TAGGED = re.compile(r"(\\?)([A-Za-z0-9-]+) \((.+)\) = ([0-9A-Fa-f]{32,128})", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Manifest:
    """A manifest as it was read.

    Attributes:
        tensors: whether it lists tensors; otherwise it lists files.
        algorithm: hash algorithm of its digests.
    """

    path: str
    tensors: bool
    algorithm: str
    digests: tuple[Digest, ...]


def text(digests: Iterable[Digest], algorithm: str, *, tensors: bool) -> str:
    """Return a whole manifest, in the order of `digests`."""
    first = f"# {MARK} {algorithm}\n" if tensors else ""
    return first + "".join(map(line, digests))


def read(path: str) -> Manifest:
    """Read the manifest at `path`.

    Raises:
        DamagedFile: it is not a manifest; the message names the line.
        CkptfixError: it cannot be read.
    """
    manifest = found(path)
    if manifest is None:
        raise DamagedFile("not a manifest, which has a line `DIGEST  NAME` for each tensor or file", path=path)
    return manifest


def found(path: str) -> Manifest | None:
    """Read the manifest at `path`; return None for a file that does not begin like one.

    Raises:
        DamagedFile: one of its lines is malformed; the message names the line.
    """
    with open_source(path) as source:
        head = source.read(0, min(4096, source.size))
        if not _begins(head) or source.size > MOST:
            return None
        raw = source.read(0, source.size)
    lines = raw.decode("utf-8", "surrogateescape").split("\n")
    tensors, algorithm = False, "sha256"
    rows: list[Digest] = []
    for number, one in enumerate(lines, 1):
        one = one.removesuffix("\r")
        if one.startswith("#"):
            words = one[1:].split()
            if words[:1] == [MARK] and len(words) > 1:
                tensors, algorithm = True, words[1]
        elif one.strip():
            row = _row(one)
            if row is None:
                raise DamagedFile("not a line `DIGEST  NAME`", path=path, where=f"line {number}")
            rows.append(row)
    if not tensors and any(len(row.digest) != 64 for row in rows):
        raise DamagedFile("a manifest of files must have SHA-256 digests, of 64 digits", path=path)
    return Manifest(path, tensors, algorithm, tuple(rows))


def _begins(head: bytes) -> bool:
    for one in head.decode("utf-8", "surrogateescape").split("\n"):
        if one.startswith("#") or not one.strip():
            if one.startswith(f"# {MARK} "):
                return True
            continue
        return _row(one.removesuffix("\r")) is not None
    return False


def _row(text: str) -> Digest | None:
    match = _LINE.fullmatch(text)
    if match:
        escaped, digest, name = match.groups()
    else:
        match = _TAGGED.fullmatch(text)
        if not match:
            return None
        escaped, kind, name, digest = match.groups()
        if kind.upper().replace("-", "") not in ("SHA256", "SHA2256"):
            return None
    if escaped:
        name = re.sub(r"\\[\\nr]", lambda found: ESCAPES[found[0]], name)
    return Digest(name, digest.lower(), at=name.rpartition("/")[0])
