"""Bytes in place of lost ones: zeros, NaN, or the same tensor's bytes in another checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from ckptfix.checkpoint import Checkpoint, Data, Derived, Storage, TensorEntry
from ckptfix.checkpoint.tensors import LAZY
from ckptfix.errors import CkptfixError, Refused, Unsupported
from ckptfix.formats import weights_of
from ckptfix.io.elements import row_major
from ckptfix.io.source import BATCH
from ckptfix.names import wrappers

Fill = Literal["zeros", "nan"]

_NAN = {
    "float64": bytes.fromhex("000000000000f87f"),
    "float32": bytes.fromhex("0000c07f"),
    "float16": bytes.fromhex("007e"),
    "bfloat16": bytes.fromhex("c07f"),
    "float8_e5m2": b"\x7f",
    "float8_e4m3fn": b"\x7f",
    "float8_e5m2fnuz": b"\x80",
    "float8_e4m3fnuz": b"\x80",
    "float8_e8m0fnu": b"\xff",
}
"""A quiet NaN, little-endian; of the 8-bit kinds as in the OCP specification and torch/headeronly/util/Float8_*.h."""
_NAN |= {"complex128": _NAN["float64"], "complex64": _NAN["float32"], "complex32": _NAN["float16"]}


_AVERAGED = re.compile(r"ema|averag|avg|swa|shadow|teacher", re.IGNORECASE)
"""Addresses of weights that are not the model's own."""


class Leaf(NamedTuple):
    """A dense tensor on a lost storage, and the name of the tensor that it is, or is a part of."""

    name: str
    entry: TensorEntry


def constant(fill: Fill, leaves: Sequence[Leaf], nbytes: int, byteorder: str) -> tuple[Data, str]:
    """`nbytes` of zeros or NaN for a storage that `leaves` view, and what they are; zeros where a dtype has no NaN."""
    kinds = {leaf.entry.dtype for leaf in leaves}
    pattern = _NAN.get(min(kinds), b"") if fill == "nan" and len(kinds) == 1 else b""
    if not pattern:
        return repeated(b"\0", nbytes), "zeros" if fill == "zeros" else "zeros, as its dtype has no NaN"
    return repeated(pattern if byteorder == "little" else pattern[::-1], nbytes), "NaN"


MOST_FILLED = 64 << 20
FILLED_TIMES = 100
"""Bytes that are made up at most: so many, and so many times the file. A hostile shape must not fill the disk."""


class Allowance:
    """The bytes that may be made up for a damaged file or folder.

    Args:
        size: bytes of it, or of what is intact of it.
    """

    def __init__(self, path: str, size: int) -> None:
        self._path = path
        self._made, self._most = 0, MOST_FILLED + FILLED_TIMES * size

    def take(self, nbytes: int, name: str) -> None:
        """Make up so many more, for the tensor `name`.

        Raises:
            Refused: they are too many.
        """
        self._made += nbytes
        if self._made > self._most:
            most = f"for what is left here --fill makes up at most {self._most:,}"
            message = f"lost tensors of {self._made:,} bytes or more; {most}"
            raise Refused(message, path=self._path, where=name, hint="without --fill, they are left out")


def repeated(pattern: bytes, nbytes: int) -> Derived:
    """`nbytes` bytes of `pattern`, again and again."""

    def chunks() -> Iterator[bytes]:
        block = pattern * (BATCH // len(pattern))
        left = nbytes
        while left:
            piece = block[:left]
            left -= len(piece)
            yield piece

    return Derived(nbytes, chunks, "fill")


def _plain(name: str) -> str:
    at, slash, key = name.rpartition("/")
    return at + slash + wrappers.unwrapped(key)


class Donor:
    """Another checkpoint, whose tensors stand in for lost ones of the same name, shape and dtype."""

    def __init__(self, checkpoint: Checkpoint, byteorder: str) -> None:
        if checkpoint.byteorder != byteorder:
            raise Unsupported("its byte order differs from the damaged file's", path=checkpoint.path)
        self.path = checkpoint.path
        self._byteorder = byteorder
        entries = weights_of(checkpoint)
        self.entries: Mapping[str, TensorEntry] = {entry.name: entry for entry in entries}
        self._unwrapped: dict[str, list[TensorEntry]] = {}
        self._keys: dict[str, list[TensorEntry]] = {}
        for entry in entries:
            self._unwrapped.setdefault(_plain(entry.name), []).append(entry)
            self._keys.setdefault(wrappers.unwrapped(entry.key), []).append(entry)
        if not self.entries:
            raise Refused("it holds no tensors", path=self.path)

    def entry(self, name: str) -> TensorEntry | None:
        """The tensor of that name, or the only one whose name is the same without what wrappers add.

        A state dict at the top is paired with one inside a training checkpoint, if only one of them has the key; but
        averaged weights are never taken for the others, or the other way round.
        """
        if name in self.entries:
            return self.entries[name]
        alike = self._unwrapped.get(_plain(name), ())
        if len(alike) == 1:
            return alike[0]
        at, _, key = name.rpartition("/")
        found = [entry for entry in self._keys.get(wrappers.unwrapped(key), ()) if not at or not entry.at]
        if len(found) != 1 or _AVERAGED.search(at) or _AVERAGED.search(found[0].at):
            return None
        return found[0]

    def storage(self, storage: Storage, leaves: Sequence[Leaf]) -> Data | str:
        """The bytes for `storage`, all of whose tensors are `leaves`; or why they cannot be taken from here."""
        found: list[TensorEntry] = []
        for leaf in leaves:
            other = self.entry(leaf.name)
            if other is None:
                return "the other file has no such tensor"
            if leaf.entry.kind != "dense" or other.kind != "dense" or leaf.entry.name != leaf.name:
                return "only dense tensors can be taken from another file"
            if (other.shape, other.dtype) != (leaf.entry.shape, leaf.entry.dtype):
                return f"the other file has {list(other.shape)} {other.dtype}"
            found.append(other)
        for leaf, other in zip(leaves, found, strict=True):
            entry = leaf.entry
            if not entry.offset and entry.is_contiguous and entry.nbytes == storage.nbytes:
                # The marks of either side turn values into stored bytes as they turn these into values.
                marks = [mark for mark in LAZY if (mark in entry.lazy) != (mark in other.lazy)]
                stored = replace(other, detail=", ".join(marks)) if entry.lazy or other.lazy else other
                try:
                    return row_major(stored, self._byteorder)
                except CkptfixError as error:
                    return error.message
        alike = all(
            (leaf.entry.stride, leaf.entry.offset, leaf.entry.lazy) == (other.stride, other.offset, other.lazy)
            for leaf, other in zip(leaves, found, strict=True)
        )
        theirs = {id(other.storage): other.storage for other in found}
        whole = next(iter(theirs.values())) if len(theirs) == 1 else None
        if alike and whole is not None and whole.data is not None and whole.nbytes == storage.nbytes:
            return whole.data
        return "its storage is shared, and the other file does not share it in the same way"


def with_data(entry: TensorEntry, data: Data) -> TensorEntry:
    """`entry`, contiguous, over `data`."""
    storage = Storage(entry.key, entry.dtype, data.length, "cpu", data)
    return replace(entry, storage=storage, offset=0)
