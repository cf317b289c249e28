"""The digest of a tensor: of its dtype, shape and elements, and of nothing else.

These bytes are hashed, so that other programs can compute the same digest::

    b"ckptfix-tensor-1 float32 2,3\\n"     dtype in torch's name; sizes joined by commas, none for a scalar
    the elements in row-major order       little-endian, without gaps

So keys, formats, shards, byte order, strides and storages do not change it. For a tensor that is not dense, its kind
and other distinguishing data follow the shape; then its own elements, and then the digests of its parts. A tensor that
is stored as its conjugate or negative is hashed by its real values.

There are two digests of a whole set: of its manifest, the lines ``DIGEST  NAME`` in the byte order of the names; and of
the digests alone, sorted, a line each, which renaming does not change.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter
from typing import Protocol

from ckptfix.checkpoint import Checkpoint, TensorEntry, address
from ckptfix.dataclass import dataclass
from ckptfix.elements.reader import content, read_each, tensor_id
from ckptfix.errors import MissingExtra, Refused, Unsupported
from ckptfix.io.read import Progress
from ckptfix.io.source import Readers
from ckptfix.ops import choose
from ckptfix.ops.audit.promise import listed
from ckptfix.ops.candidates import at_address, whole_module

MARK = "ckptfix-tensor-1"
"""Beginning of the hashed bytes; its number changes with the way to hash."""


ESCAPES = {"\\\\": "\\", "\\n": "\n", "\\r": "\r"}
"""Escapes of a name in a manifest, as `sha256sum` writes them."""


class Hash(Protocol):
    """A hash object of `hashlib`."""

    def update(self, data: bytes | memoryview, /) -> object: ...
    def digest(self) -> bytes: ...
    def hexdigest(self) -> str: ...


NewHash = Callable[[], Hash]


def hasher(algorithm: str) -> NewHash:
    """Return a function that creates hash objects of an algorithm.

    Raises:
        Refused: the algorithm is unknown.
        MissingExtra: its package is not installed.
    """
    if algorithm in ("sha256", "sha512", "blake2b"):
        return partial(hashlib.new, algorithm)
    if algorithm != "blake3":
        raise Refused(f"there is no algorithm called {algorithm!r}", hint="use sha256, sha512, blake2b or blake3")
    try:
        from blake3 import blake3  # type: ignore[import-not-found,unused-ignore]
    except ModuleNotFoundError:
        hint = "run pip install 'ckptfix[fast]', or use another --algorithm"
        raise MissingExtra("blake3 is not installed", name="blake3", hint=hint) from None
    made: NewHash = blake3
    return made


@dataclass(frozen=True, slots=True)
class Digest:
    """The digest of a tensor or of a file.

    Attributes:
        name: address of the tensor in its file.
        digest: hexadecimal digits.
        dtype, shape: those of the tensor; None if unknown.
        at: address of the state dict that holds it.
    """

    name: str
    digest: str
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    at: str = ""


def digests(
    checkpoint: Checkpoint, algorithm: str, *, at: str | None = None, progress: Progress | None = None
) -> tuple[list[Digest], list[str]]:
    """Compute the digest of every tensor, or of those of the state dict `at` under their keys; list those without one.

    A tensor on the meta device has no elements in the file, and no digest.

    Raises:
        WouldLoseData: a tensor cannot be read as it was written.
        NoSuchTensor: there is no state dict at `at`.
        Refused: a view repeats its storage without end.
    """
    new = hasher(algorithm)
    entries = listed(checkpoint)
    choose.refuse_damaged(checkpoint)
    if at is not None:
        entries = _at(checkpoint, entries, at)
    empty = [entry.name if at is None else entry.key for entry in entries if not entry.has_data]
    entries = [entry for entry in entries if entry.has_data]
    unique = {tensor_id(entry): entry for entry in entries}

    def hashed(entry: TensorEntry, readers: Readers) -> str:
        return _hash(new, readers, checkpoint.byteorder, entry).hexdigest()

    total = sum(entry.nbytes for entry in unique.values())
    found = read_each(unique.values(), hashed, attrgetter("nbytes"), progress, total)
    known = dict(zip(unique, found, strict=True))
    made = [
        Digest(entry.name if at is None else entry.key, known[tensor_id(entry)], entry.dtype, entry.shape, entry.at)
        for entry in entries
    ]
    return made, empty


def _at(checkpoint: Checkpoint, entries: Sequence[TensorEntry], at: str) -> list[TensorEntry]:
    row = at_address(checkpoint, at)
    if row.module is not None:
        raise whole_module(checkpoint, row.at)
    return [entry for entry in entries if entry.at == address.given(at)]


def head(entry: TensorEntry) -> bytes:
    """Return the bytes that are hashed before the elements of a tensor."""
    words = [MARK, entry.dtype, ",".join(map(str, entry.shape))]
    if entry.kind != "dense":
        words += [entry.kind, entry.detail]
    return " ".join(words).encode("utf-8", "surrogatepass") + b"\n"


def digest_of(entry: TensorEntry, readers: Readers, *, byteorder: str) -> str:
    """Return the SHA-256 of one tensor of a file in this byte order. Raises CkptfixError if it has no digest."""
    return _hash(hasher("sha256"), readers, byteorder, entry).hexdigest()


def _hash(new: NewHash, readers: Readers, byteorder: str, entry: TensorEntry) -> Hash:
    state = new()
    state.update(head(entry))
    if entry.storage is not None and entry.storage.data is not None and entry.numel:
        place = content(entry, byteorder)
        if place.endless:
            message = f"a view of {place.nbytes:,} bytes repeats {entry.storage.nbytes:,} bytes without end"
            raise Refused(message, where=entry.name)
        for block in place.blocks_of_bytes(readers):
            state.update(place.encoding.little_endian(block))
    elif entry.numel and not entry.parts and entry.kind == "dense":
        raise Unsupported("its data is not in the file (a tensor on the meta device)", where=entry.name)
    for part in entry.parts:
        state.update(_hash(new, readers, byteorder, part).digest())
    return state


def of_set(digests: Iterable[Digest], algorithm: str) -> tuple[str, str]:
    """Return the digest of a set under its names, and without them."""
    rows = list(digests)
    named, unnamed = hasher(algorithm)(), hasher(algorithm)()
    for text in sorted(line(row).encode("utf-8", "surrogatepass") for row in rows):
        named.update(text)
    for digest in sorted(row.digest for row in rows):
        unnamed.update(digest.encode() + b"\n")
    return named.hexdigest(), unnamed.hexdigest()


def line(row: Digest) -> str:
    """Return a digest as a line of a manifest."""
    name = row.name
    for escape, char in ESCAPES.items():
        name = name.replace(char, escape)
    return f"{'' if name == row.name else chr(92)}{row.digest}  {name}\n"
