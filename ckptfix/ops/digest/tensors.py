"""The digest of a tensor: of its dtype, shape and elements, and of nothing else.

What is hashed, so that others can do the same::

    b"ckptfix-tensor-1 float32 2,3\\n"     dtype as torch calls it; sizes joined by commas, none for a scalar
    the elements in row-major order       little-endian, without gaps

So names, containers, shards, byte order, strides and storages do not change it. A tensor that is not dense has its kind
and what else distinguishes it behind its shape, then the elements that it has itself, then the digests of its parts;
the elements of one whose bytes stand for their conjugate or negative are these values.

Two digests are of a whole set: of its manifest, the lines ``DIGEST  NAME`` in the order of the names' bytes; and of the
digests alone, a line each, sorted, which new names do not change.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from ckptfix.checkpoint import Checkpoint, TensorEntry, address, same_place
from ckptfix.errors import MissingExtra, Refused, Unsupported
from ckptfix.io.read import Progress
from ckptfix.io.source import Readers
from ckptfix.io.threads import OVERHEAD, TASK, Workers, batches
from ckptfix.ops import choose
from ckptfix.ops.candidates import at_address, whole_module
from ckptfix.ops.diff.content import chunks_of, swapped, unit_of
from ckptfix.ops.diff.sources import content
from ckptfix.ops.law.promise import listed

MARK = "ckptfix-tensor-1"
"""What the bytes that are hashed begin with: another number for another way to hash."""


ESCAPES = {"\\\\": "\\", "\\n": "\n", "\\r": "\r"}
"""How a name stands in a manifest, as `sha256sum` writes it."""


class Hash(Protocol):
    """What `hashlib` makes."""

    def update(self, data: bytes, /) -> object: ...
    def digest(self) -> bytes: ...
    def hexdigest(self) -> str: ...


NewHash = Callable[[], Hash]


def hasher(algorithm: str) -> NewHash:
    """What makes hashes of an algorithm.

    Raises:
        Refused: it is none that is known.
        MissingExtra: its package is not installed.
    """
    if algorithm in ("sha256", "sha512", "blake2b"):
        return partial(hashlib.new, algorithm)
    if algorithm != "blake3":
        raise Refused(f"no algorithm called {algorithm!r}", hint="sha256, sha512, blake2b and blake3 are known")
    try:
        from blake3 import blake3  # type: ignore[import-not-found,unused-ignore]
    except ModuleNotFoundError:
        hint = "pip install 'ckptfix[fast]', or use another --algorithm"
        raise MissingExtra("blake3 is not installed", name="blake3", hint=hint) from None
    made: NewHash = blake3
    return made


@dataclass(frozen=True, slots=True)
class Digest:
    """The digest of a tensor, or of a file.

    Attributes:
        name: address of the tensor in its file.
        digest: in hexadecimal digits.
        dtype, shape: of a tensor; None where they are not known.
        at: address of the mapping that holds it.
    """

    name: str
    digest: str
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    at: str = ""


def digests(
    checkpoint: Checkpoint, algorithm: str, *, at: str | None = None, progress: Progress | None = None
) -> tuple[list[Digest], list[str]]:
    """The digest of every tensor, or of those of the mapping at an address, under their keys; and who has none.

    A tensor on the meta device has no elements in the file, and no digest.

    Raises:
        WouldLoseData: a tensor that cannot be read as it was written.
        NoSuchTensor: there is no state dict at `at`.
        Refused: a view that repeats its storage without end.
    """
    new = hasher(algorithm)
    entries = listed(checkpoint)
    choose.refuse_damaged(checkpoint)
    if at is not None:
        entries = _at(checkpoint, entries, at)
    empty = [entry.name if at is None else entry.key for entry in entries if not entry.has_data]
    entries = [entry for entry in entries if entry.has_data]
    unique = {_place(entry): entry for entry in entries}
    total = sum(entry.nbytes for entry in unique.values())
    done = 0
    known: dict[object, str] = {}
    with Readers() as readers:
        call = partial(_hashed, new, readers, checkpoint.byteorder)
        for rows, nbytes in Workers().run(call, batches(unique.items(), lambda row: row[1].nbytes + OVERHEAD, TASK)):
            known.update(rows)
            done += nbytes
            if progress is not None:
                progress(done, total)
    made = [
        Digest(entry.name if at is None else entry.key, known[_place(entry)], entry.dtype, entry.shape, entry.at)
        for entry in entries
    ]
    return made, empty


def _at(checkpoint: Checkpoint, entries: Sequence[TensorEntry], at: str) -> list[TensorEntry]:
    row = at_address(checkpoint, at)
    if row.module is not None:
        raise whole_module(checkpoint, row.at)
    return [entry for entry in entries if entry.at == address.given(at)]


def _place(entry: TensorEntry) -> object:
    """Equal for names of one tensor, which is hashed once."""
    return same_place(entry) or (entry.at, entry.key)


Task = list[tuple[object, TensorEntry]]


def _hashed(new: NewHash, readers: Readers, byteorder: str, task: Task) -> tuple[list[tuple[object, str]], int]:
    rows = [(place, _hash(new, readers, byteorder, entry).hexdigest()) for place, entry in task]
    return rows, sum(entry.nbytes for _, entry in task)


def head(entry: TensorEntry) -> bytes:
    """What is hashed of a tensor before its elements."""
    words = [MARK, entry.dtype, ",".join(map(str, entry.shape))]
    if entry.kind != "dense":
        words += [entry.kind, entry.detail]
    return " ".join(words).encode("utf-8", "surrogatepass") + b"\n"


def digest_of(entry: TensorEntry, readers: Readers, *, byteorder: str) -> str:
    """The SHA-256 of one tensor of a file in this byte order. Raises CkptfixError where it has none."""
    return _hash(hasher("sha256"), readers, byteorder, entry).hexdigest()


def _hash(new: NewHash, readers: Readers, byteorder: str, entry: TensorEntry) -> Hash:
    state = new()
    state.update(head(entry))
    if entry.storage is not None and entry.storage.data is not None and entry.numel:
        place = content(entry, byteorder)
        if place.endless:
            message = f"a view of {place.nbytes:,} bytes, which repeats {entry.storage.nbytes:,} bytes without end"
            raise Refused(message, where=entry.name)
        unit = unit_of(entry) if byteorder == "big" else 1
        for chunk in chunks_of(place, None, readers):
            state.update(swapped(chunk, unit) if unit > 1 else chunk)
    elif entry.numel and not entry.parts and entry.kind == "dense":
        raise Unsupported("its data is not in the file (a tensor on the meta device)", where=entry.name)
    for part in entry.parts:
        state.update(_hash(new, readers, byteorder, part).digest())
    return state


def of_set(digests: Iterable[Digest], algorithm: str) -> tuple[str, str]:
    """The digest of a set under its names, and without them."""
    rows = list(digests)
    named, unnamed = hasher(algorithm)(), hasher(algorithm)()
    for text in sorted(line(row).encode("utf-8", "surrogatepass") for row in rows):
        named.update(text)
    for digest in sorted(row.digest for row in rows):
        unnamed.update(digest.encode() + b"\n")
    return named.hexdigest(), unnamed.hexdigest()


def line(row: Digest) -> str:
    """A digest as a line of a manifest."""
    name = row.name
    for escape, char in ESCAPES.items():
        name = name.replace(char, escape)
    return f"{'' if name == row.name else chr(92)}{row.digest}  {name}\n"
