"""Manifests in the form of ``sha256sum``: ``DIGEST  NAME``, a line each.

A name with a backslash or a line break has these escaped, and a backslash before the digest. ``DIGEST *NAME`` (binary)
and ``SHA256 (NAME) = DIGEST`` (BSD, ``--tag``) are read too. A manifest of tensors has a first line that says so, which
is a comment to ``sha256sum``::

    # ckptfix-tensor-1 sha256
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ckptfix.errors import DamagedFile
from ckptfix.io.source import open_source
from ckptfix.ops.digest.tensors import ESCAPES, MARK, Digest, line

MOST = 256 << 20
"""Bytes of a manifest; one of a million tensors has less."""

_LINE = re.compile(r"(\\?)([0-9A-Fa-f]{32,128}) [ *](.+)", re.DOTALL)
_TAGGED = re.compile(r"(\\?)([A-Za-z0-9-]+) \((.+)\) = ([0-9A-Fa-f]{32,128})", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a manifest says.

    Attributes:
        tensors: it is about tensors; otherwise about files.
        algorithm: that its digests are of.
    """

    path: str
    tensors: bool
    algorithm: str
    digests: tuple[Digest, ...]


def text(digests: Iterable[Digest], algorithm: str, *, tensors: bool) -> str:
    """A whole manifest, in the order of `digests`."""
    first = f"# {MARK} {algorithm}\n" if tensors else ""
    return first + "".join(map(line, digests))


def read(path: str) -> Manifest:
    """The manifest at `path`.

    Raises:
        DamagedFile: it is none; the message names the line.
        CkptfixError: it cannot be read.
    """
    manifest = found(path)
    if manifest is None:
        raise DamagedFile("not a manifest: a line `DIGEST  NAME` for each tensor or file", path=path)
    return manifest


def found(path: str) -> Manifest | None:
    """The manifest at `path`; None for a file that does not begin like one.

    Raises:
        DamagedFile: a line of it is none; the message names the line.
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
        raise DamagedFile("a manifest of files has SHA-256 digests, of 64 digits", path=path)
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
