"""Tensors described by their position: storages, and the views of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from ckptfix.checkpoint import dtypes
from ckptfix.checkpoint.address import join
from ckptfix.checkpoint.byte_ranges import ByteRange, Data
from ckptfix.dataclass import dataclass
from ckptfix.errors import DamagedFile, Unsupported

LAZY = ("conj", "neg")
"""Marks of a tensor whose bytes represent their conjugate or negative (``torch._utils.get_tensor_metadata``)."""

_MARKS: dict[str, tuple[str, ...]] = {"conj": ("conj",), "neg": ("neg",), "conj, neg": LAZY}
"""`TensorEntry.detail` -> the marks that it combines."""


@dataclass(frozen=True, slots=True)
class Storage:
    """A run of bytes that tensors view.

    Attributes:
        key: its name in the file (``"17"`` for the zip record ``archive/data/17``); other files may use it too.
        dtype: torch dtype name of its elements (``"float32"``); ``"uint8"`` for an untyped storage.
        nbytes: size in bytes.
        location: location tag, such as ``"cpu"`` or ``"cuda:3"``.
        data: the position of the bytes; None when the file does not hold them (meta).
        crc32: checksum of the bytes according to the file; None if the file states no checksum.
    """

    key: str
    dtype: str
    nbytes: int
    location: str
    data: Data | None
    crc32: int | None = None

    @property
    def identity(self) -> tuple[str, str]:
        """The file and the key, which distinguish it from every other storage of a checkpoint of many files."""
        return file_of(self.data), self.key


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor described by its position.

    Attributes:
        key: its key in the state dict that holds it, such as ``"module.fc.weight"``.
        at: address of that state dict: ``""`` for the top level, ``"model_state_dict"``, ``"optimizer/state/0"``.
        dtype: torch dtype name, such as ``"bfloat16"``.
        shape: sizes in elements.
        stride: steps in elements; contiguous unless the tensor is a view.
        offset: first element in the storage, counted in elements of `dtype`.
        requires_grad: as saved.
        parameter: whether it was saved as an nn.Parameter.
        kind: a row of `formats.torch.tensors.KINDS`. ``"dense"`` has its data in `storage`; other kinds have it in
            `parts`, too, or have no data (``"meta"``).
        parts: the dense tensors that make up a sparse, quantized, nested or wrapper tensor.
        detail: a further distinction within its kind (a quantizer, a layout, a class).
    """

    key: str
    at: str
    storage: Storage | None
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0
    requires_grad: bool = False
    parameter: bool = False
    kind: str = "dense"
    parts: tuple[TensorEntry, ...] = ()
    detail: str = ""

    @property
    def name(self) -> str:
        """The address of the tensor in the file: `at` and `key`, joined by a slash."""
        return join(self.at, self.key)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of one element, or of the smallest item that holds several (quint4x2)."""
        return dtypes.by_name(self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, as if the tensor were contiguous."""
        return dtypes.by_name(self.dtype).nbytes(self.numel)

    @property
    def lazy(self) -> tuple[str, ...]:
        """The marks (`LAZY`) of a tensor whose elements differ from its bytes; empty for almost every tensor."""
        return _MARKS.get(self.detail, ()) if self.detail else ()

    @property
    def location(self) -> str:
        if self.storage is not None:
            return self.storage.location
        return self.parts[0].location if self.parts else "meta"

    @property
    def has_data(self) -> bool:
        """True if the file holds the elements; those of a tensor on the meta device are stored nowhere."""
        if self.kind == "meta":
            return not self.numel
        own = self.storage is None or self.storage.data is not None or not self.numel
        return own and all(part.has_data for part in self.parts)

    @property
    def is_contiguous(self) -> bool:
        return is_contiguous(self.shape, self.stride) or self.numel == 0

    @property
    def data(self) -> ByteRange:
        """The bytes of the tensor in row-major order.

        Raises:
            Unsupported: the file does not store them in that order (a strided view, a deflated record, a sparse tensor,
                a tensor whose bytes represent their conjugate or negative).
            DamagedFile: they would be outside the storage.
        """
        storage = self.storage
        if storage is None:
            raise Unsupported(f"a {self.kind} tensor has no bytes of its own", where=self.name)
        if not self.is_contiguous:
            raise Unsupported("a strided view is not one run of bytes", where=self.name)
        if not isinstance(storage.data, ByteRange):
            raise Unsupported("its record is not stored as plain bytes", where=self.name)
        if self.lazy:
            raise Unsupported(f"its bytes represent other values ({self.detail})", where=self.name)
        if self.numel == 0:
            return storage.data.sub(0, 0)
        try:
            return storage.data.sub(dtypes.by_name(self.dtype).nbytes(self.offset), self.nbytes)
        except ValueError as error:
            raise DamagedFile(f"it reaches outside its storage: {error}", where=self.name) from None


def with_parts(entries: Iterable[TensorEntry]) -> Iterator[TensorEntry]:
    """Yield each entry and, after it, its parts, at any depth."""
    for entry in entries:
        if not entry.parts:
            yield entry
            continue
        stack = [entry]
        while stack:
            part = stack.pop()
            yield part
            stack += reversed(part.parts)


def storages_of(entries: Iterable[TensorEntry]) -> Iterator[Storage]:
    """Yield the storage of each entry and of its parts, as often as tensors are on it."""
    return (part.storage for part in with_parts(entries) if part.storage is not None)


def bytes_of(entries: Iterable[TensorEntry]) -> int:
    """Return the bytes of the storages of entries and their parts, each storage once."""
    return sum({storage.identity: storage.nbytes for storage in storages_of(entries)}.values())


NO_DATA = "the file holds no data for it: it was saved on the meta device"
NO_DATA_HINT = "save it again once it has values, or copy it from a checkpoint that has them"


def short_shape(shape: Sequence[int]) -> str:
    """Return a shape as text; the length is limited because a hostile file may state thousands of sizes."""
    shown = ", ".join(map(str, shape[:8]))
    return f"[{shown}, ...]" if len(shape) > 8 else f"[{shown}]"


def reach(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the number of storage elements from the first to the last element of a view that is not empty."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def file_of(data: Data | None) -> str:
    """Return the file that the bytes are read from; ``""`` if they come from no file."""
    if isinstance(data, ByteRange):
        return data.path
    return data.sources[0].path if data is not None and data.sources else ""


def is_contiguous(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Return whether a tensor of this shape and stride is row-major without gaps, as torch defines it."""
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1:
            if step != expected:
                return False
            expected *= size
    return True


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the stride that torch gives a new tensor of `shape`."""
    stride = []
    step = 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def end_of(entry: TensorEntry) -> int:
    """Return the end of the bytes that a dense tensor needs in its storage."""
    row = dtypes.by_name(entry.dtype)
    return row.nbytes(entry.offset + (reach(entry.shape, entry.stride) if entry.numel else 0))


def reshaped(entry: TensorEntry, shape: tuple[int, ...]) -> TensorEntry:
    """Return the entry with the same elements in the same order, but with the shape `shape`.

    Raises:
        Unsupported: the tensor is not dense and contiguous, or the shape has more or fewer elements.
    """
    if entry.kind != "dense":
        raise Unsupported("only a dense tensor can be reshaped", where=entry.name)
    if not entry.is_contiguous:
        raise Unsupported("a strided view cannot be reshaped", where=entry.name)
    if math.prod(shape) != entry.numel:
        raise Unsupported(f"it cannot be reshaped to {list(shape)}: its shape is {list(entry.shape)}", where=entry.name)
    return replace(entry, shape=shape, stride=contiguous_stride(shape))


def same_place(entry: TensorEntry) -> object | None:
    """Return a value that is equal for entries that are one tensor under several keys; None for one without bytes."""
    if entry.storage is None or not entry.numel:
        return None
    return entry.storage.identity, entry.dtype, entry.offset, entry.shape, entry.stride, entry.lazy


def same_bytes(entry: TensorEntry, other: TensorEntry) -> bool:
    """Return whether `other` is the tensor `entry`, possibly in a different shape and under a different key."""
    alike = replace(other, key=entry.key, at=entry.at, shape=entry.shape, stride=entry.stride) == entry
    return alike and entry.numel == other.numel and entry.is_contiguous and other.is_contiguous


def refuse_unusable(entry: TensorEntry, where: str) -> None:
    """Refuse an entry that describes no tensor that can be written to a file.

    Raises:
        Unsupported: it is not dense, or its bytes are stored nowhere.
        DamagedFile: it reaches outside its storage.
    """
    storage = entry.storage
    if entry.kind != "dense" or storage is None or storage.data is None:
        raise Unsupported("only a dense tensor whose bytes are known can replace it", where=where)
    if dtypes.find(entry.dtype) is None:
        raise Unsupported(f"the dtype {entry.dtype} is unknown", where=where)
    negative = any(number < 0 for number in (entry.offset, *entry.shape, *entry.stride))
    if negative or len(entry.shape) != len(entry.stride):
        raise DamagedFile(f"the shape {list(entry.shape)} contradicts its stride or offset", where=where)
    if storage.data.length != storage.nbytes or (entry.numel and end_of(entry) > storage.nbytes):
        raise DamagedFile(f"it needs {end_of(entry)} bytes of a storage of {storage.data.length}", where=where)
