"""The pickle of a new `.metadata`, in the opcodes that CPython's pickler writes for torch's objects.

The classes and the order of their fields are those of torch (torch/distributed/checkpoint/metadata.py, 2.10 to 2.14);
readers since torch 2.1 accept it.

The fast reader (`skim`) knows these opcodes. Equal strings, sizes and properties are written once and then fetched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice, starmap
from typing import TypeVarTuple

from ckptfix.checkpoint import dtypes
from ckptfix.formats.dcp.metadata import Path, SavedKey
from ckptfix.formats.dcp.skim import Sizes
from ckptfix.pickles import opcodes as op
from ckptfix.pickles.patch import int_opcode

Given = TypeVarTuple("Given")

METADATA = "torch.distributed.checkpoint.metadata"
STORAGE_INFO = "torch.distributed.checkpoint.filesystem", "_StorageInfo"
PROTOCOL = 4
VERSION = "1.0.0"
BATCH = 1000
"""The number of rows that a pickler sets on a dict at once."""

_MEMOIZE = bytes((op.MEMOIZE,))
_TUPLES = {1: b"\x85", 2: b"\x86", 3: b"\x87"}


def fresh(saved: Sequence[SavedKey], paths: Mapping[str, Path]) -> bytes:
    """Return the pickle of a new Metadata with these keys; each key has one part."""
    write = _Writer()
    write.begin("Metadata")
    write.text("state_dict_metadata")
    write.mapping(map(write.key, saved), len(saved))
    write.text("planner_data")
    write.mapping(starmap(write.path, paths.items()), len(paths))
    write.text("storage_data")
    write.mapping(map(write.item, saved), len(saved))
    write.text("storage_meta")
    write.begin("StorageMeta")
    for name in ("checkpoint_id", "save_id", "load_id"):
        write.text(name)
        write.out.append(b"N")
    write.text("modules")
    write.new(b"]")
    write.out.append(b"ub")
    write.text("version")
    write.text(VERSION)
    return b"".join((bytes((op.PROTO, PROTOCOL)), *write.out, b"ub."))


class _Writer:
    """Writer of the objects in a Metadata.

    Attributes:
        out: the opcodes after PROTO.
    """

    def __init__(self) -> None:
        self.out: list[bytes] = []
        self._count = 0
        self._known: dict[object, bytes] = {}
        """Values in the memo -> the opcode that fetches them."""
        self._forms: dict[object, bytes] = {}
        """The opcodes of `_alike`."""

    def mapping(self, rows: Iterator[None], count: int) -> None:
        """Write a dict of `count` rows; the iterator writes one when it is advanced."""
        self.new(b"}")
        for first in range(0, count, BATCH):
            begun = len(self.out)
            self.out.append(b"(")
            deque(islice(rows, min(BATCH, count - first)), maxlen=0)
            self.out.append(b"u")
            self.out[begun:] = (b"".join(self.out[begun:]),)

    def key(self, saved: SavedKey) -> None:
        """Write the name of a key, and its metadata."""
        self.text(saved.fqn)
        if saved.dtype is None:
            self.name(METADATA, "BytesStorageMetadata")
            self.new(b")\x81")
            return
        # It has three objects and the dicts of two.
        self._alike((saved.dtype, saved.shape), 5, self._tensor, saved.dtype, saved.shape)

    def _alike(self, form: object, objects: int, write: Callable[[*Given], None], *given: *Given) -> None:
        """Write what `write` writes for the arguments `given`, which is the same opcodes for each equal `form`.

        The first ones may name something new. Those after them fetch it, and only have a number of `objects` of their
        own.
        """
        body = self._forms.get(form)
        if body is not None:
            self.out.append(body)
            self._count += objects
            return
        first, before = len(self.out), self._count
        write(*given)
        if self._count == before + objects:
            self._forms[form] = b"".join(self.out[first:])

    def _tensor(self, dtype: str, shape: Sizes) -> None:
        self.begin("TensorStorageMetadata")
        self.text("properties")
        self._properties(dtype)
        self.text("size")
        self._size(shape)
        self.text("chunks")
        self.new(b"]")
        self.begin("ChunkStorageMetadata")
        self.text("offsets")
        self._size((0,) * len(shape))
        self.text("sizes")
        self._size(shape)
        self.out.append(b"ubaub")

    def path(self, fqn: str, path: Path) -> None:
        """Write the name of a key, and its path."""
        self.text(fqn)
        self._tuple(path)

    def item(self, saved: SavedKey) -> None:
        """Write the index of a key, and the location of its item."""
        part = saved.parts[0]
        assert part.place is not None
        offsets = None if saved.dtype is None else part.offsets
        self._alike("index", 2, self._index)
        self.text(saved.fqn)
        self._alike(("place", offsets), 2, self._place, offsets)
        self.text(part.place.name)
        self.text("offset")
        self.out.append(int_opcode(part.place.offset))
        self.text("length")
        self.out += (int_opcode(part.place.length), b"ub")

    def _index(self) -> None:
        """Write the beginning of an index, up to its name."""
        self.begin("MetadataIndex")
        self.text("fqn")

    def _place(self, offsets: Sizes | None) -> None:
        """Write the rest of an index, of a tensor if there are `offsets`, and the beginning of a location."""
        self.text("index")
        if offsets is None:
            self.out.append(b"N")
        else:
            self.out.append(int_opcode(0))
            self.text("offset")
            self._size(offsets)
        self.out.append(b"ub")
        self.name(*STORAGE_INFO)
        self._state()
        self.text("relative_path")

    def begin(self, kind: str) -> None:
        """Write an object of a class of torch's metadata, and the beginning of the dict of its attributes."""
        self.name(METADATA, kind)
        self._state()

    def _state(self) -> None:
        self.out.append(b")\x81\x94}\x94(")
        self._count += 2

    def text(self, text: str) -> None:
        """Write a string."""
        if not self._fetched(text):
            raw = text.encode("utf-8", "surrogatepass")
            head = bytes((op.SHORT_BINUNICODE, len(raw))) if len(raw) < 256 else b"X" + len(raw).to_bytes(4, "little")
            self.new(head, raw, what=text)

    def name(self, module: str, name: str) -> None:
        """Write a class or function by its name."""
        if not self._fetched((module, name)):
            self.text(module)
            self.text(name)
            self.new(b"\x93", what=(module, name))

    def new(self, *opcodes: bytes, what: object = None) -> None:
        """Write opcodes that make an object, and put it into the memo, as `what` unless that is None."""
        self.out += (*opcodes, _MEMOIZE)
        if what is not None:
            number = self._count
            self._known[what] = bytes((op.BINGET, number)) if number < 256 else b"j" + number.to_bytes(4, "little")
        self._count += 1

    def _fetched(self, what: object) -> bool:
        """Write the opcode that fetches `what`, and return whether it is in the memo."""
        known = self._known.get(what)
        if known is not None:
            self.out.append(known)
        return known is not None

    def _size(self, sizes: Sizes) -> None:
        """Write a ``torch.Size``."""
        if not self._fetched(("torch.Size", sizes)):
            self.name("torch", "Size")
            self._tuple(sizes)
            self.new(b"\x85")
            self.new(b"R", what=("torch.Size", sizes))

    def _tuple(self, parts: Sequence[str | int]) -> None:
        if not parts:
            self.out.append(b")")
            return
        if len(parts) > 3:
            self.out.append(b"(")
        for part in parts:
            if isinstance(part, str):
                self.text(part)
            else:
                self.out.append(int_opcode(part))
        self.new(_TUPLES.get(len(parts), b"t"))

    def _properties(self, dtype: str) -> None:
        """Write the TensorProperties of a dense tensor."""
        if self._fetched(("TensorProperties", dtype)):
            return
        self.name(METADATA, "TensorProperties")
        self.new(b")\x81", what=("TensorProperties", dtype))
        self.out.append(b"(")
        self.name("torch", dtypes.by_name(dtype).name)
        self._called("torch.serialization", "_get_layout", "torch.strided")
        self.out.append(b"\x89")
        self._called(METADATA, "_MEM_FORMAT_ENCODING", 0)
        self.out.append(b"\x89")
        self.new(b"t")
        self.out.append(b"b")

    def _called(self, module: str, name: str, argument: str | int) -> None:
        """Write the result of a call with one argument."""
        called = "called", module, name, argument
        if not self._fetched(called):
            self.name(module, name)
            self._tuple((argument,))
            self.new(b"R", what=called)
