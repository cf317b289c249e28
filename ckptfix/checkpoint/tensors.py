"""Tensors by their place: storages, and the views of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ckptfix.checkpoint import dtypes
from ckptfix.checkpoint.address import join
from ckptfix.checkpoint.places import ByteRange, Data
from ckptfix.errors import DamagedFile, Unsupported

Kind = Literal["dense", "quantized", "sparse", "meta", "wrapper", "nested"]

LAZY = ("conj", "neg")
"""Marks of a tensor whose bytes stand for their conjugate or negative (``torch._utils.get_tensor_metadata``)."""

_MARKS: dict[str, tuple[str, ...]] = {"conj": ("conj",), "neg": ("neg",), "conj, neg": LAZY}
"""`TensorEntry.detail` -> the marks that it is made of."""


@dataclass(frozen=True, slots=True)
class Storage:
    """A run of bytes that tensors view.

    Attributes:
        key: its name in the file (``"17"`` for the zip record ``archive/data/17``); another file may have it too.
        dtype: torch dtype name of its elements (``"float32"``); ``"uint8"`` for an untyped storage.
        nbytes: size in bytes.
        location: location tag, such as ``"cpu"`` or ``"cuda:3"``.
        data: where the bytes are; None when the file does not hold them (meta).
        crc32: checksum that the file states for the bytes; None when it states none.
    """

    key: str
    dtype: str
    nbytes: int
    location: str
    data: Data | None
    crc32: int | None = None

    @property
    def identity(self) -> tuple[str, str]:
        """The file and the key: what distinguishes it from every other storage of a checkpoint of many files."""
        return file_of(self.data), self.key


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor by its place.

    Attributes:
        key: its key in the mapping that holds it, such as ``"module.fc.weight"``.
        at: address of that mapping: ``""`` for the top one, ``"model_state_dict"``, ``"optimizer/state/0"``.
        dtype: torch dtype name, such as ``"bfloat16"``.
        shape: sizes in elements.
        stride: steps in elements; contiguous unless the tensor is a view.
        offset: first element in the storage, counted in elements of `dtype`.
        requires_grad: as saved.
        parameter: whether it was saved as an nn.Parameter.
        kind: ``"dense"`` has its data in `storage`; the others have it in `parts`, or nowhere (``"meta"``).
        parts: the dense tensors that a sparse, quantized, nested or wrapper tensor is made of.
        detail: what else distinguishes this tensor from another of its kind (a quantizer, a layout, a class).
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
    kind: Kind = "dense"
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
        """Bytes of the elements, as if contiguous."""
        return dtypes.by_name(self.dtype).nbytes(self.numel)

    @property
    def lazy(self) -> tuple[str, ...]:
        """The marks (`LAZY`) of a tensor whose elements are not the bytes themselves; none of almost every tensor."""
        return _MARKS.get(self.detail, ()) if self.detail else ()

    @property
    def location(self) -> str:
        if self.storage is not None:
            return self.storage.location
        return self.parts[0].location if self.parts else "meta"

    @property
    def has_data(self) -> bool:
        """Whether the file holds the elements: those of a tensor on the meta device are nowhere."""
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
            Unsupported: they do not lie so in the file (a strided view, a deflated record, a sparse tensor, a tensor
                whose bytes stand for their conjugate or negative).
            DamagedFile: they would lie outside the storage.
        """
        storage = self.storage
        if storage is None or self.kind not in ("dense", "quantized"):
            raise Unsupported(f"a {self.kind} tensor has no bytes itself", where=self.name)
        if not self.is_contiguous:
            raise Unsupported("a strided view is not one run of bytes", where=self.name)
        if not isinstance(storage.data, ByteRange):
            raise Unsupported("its record is not stored as plain bytes", where=self.name)
        if self.lazy:
            raise Unsupported(f"its bytes stand for other values ({self.detail})", where=self.name)
        if self.numel == 0:
            return storage.data.sub(0, 0)
        try:
            return storage.data.sub(dtypes.by_name(self.dtype).nbytes(self.offset), self.nbytes)
        except ValueError as error:
            raise DamagedFile(f"it reaches outside its storage: {error}", where=self.name) from None


NO_DATA = "the file holds no data of it: it was saved on the meta device"
NO_DATA_HINT = "save it again once it has values, or take it from a checkpoint that has them"


def reach(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements of the storage from the first to the last of a view that has at least one."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def file_of(data: Data | None) -> str:
    """The file that bytes are read from; ``""`` for none."""
    if isinstance(data, ByteRange):
        return data.path
    return data.sources[0].path if data is not None and data.sources else ""


def is_contiguous(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether a tensor of this shape and stride is row-major without gaps, as torch defines it."""
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1:
            if step != expected:
                return False
            expected *= size
    return True


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The stride that torch gives a new tensor of `shape`."""
    stride = []
    step = 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def end_of(entry: TensorEntry) -> int:
    """The byte behind the last one that a dense tensor needs of its storage."""
    row = dtypes.by_name(entry.dtype)
    return row.nbytes(entry.offset + (reach(entry.shape, entry.stride) if entry.numel else 0))


def reshaped(entry: TensorEntry, shape: tuple[int, ...]) -> TensorEntry:
    """The same elements, in the same order, in another shape.

    Raises:
        Unsupported: a tensor that is not dense and contiguous, or a shape of more or fewer elements.
    """
    if entry.kind != "dense":
        raise Unsupported("only a dense tensor can have another shape", where=entry.name)
    if not entry.is_contiguous:
        raise Unsupported("a strided view has no other shape", where=entry.name)
    if math.prod(shape) != entry.numel:
        raise Unsupported(f"it cannot become {list(shape)}: it holds {list(entry.shape)}", where=entry.name)
    return replace(entry, shape=shape, stride=contiguous_stride(shape))


def same_place(entry: TensorEntry) -> object | None:
    """Equal for entries that are one tensor under several names; None for one that has no bytes."""
    if entry.storage is None or not entry.numel:
        return None
    return entry.storage.identity, entry.dtype, entry.offset, entry.shape, entry.stride, entry.lazy


def same_bytes(entry: TensorEntry, other: TensorEntry) -> bool:
    """Whether `other` is the tensor `entry` in its own or another shape, under any name."""
    alike = replace(other, key=entry.key, at=entry.at, shape=entry.shape, stride=entry.stride) == entry
    return alike and entry.numel == other.numel and entry.is_contiguous and other.is_contiguous


def refuse_unusable(entry: TensorEntry, where: str) -> None:
    """Refuse an entry that describes no tensor that a file could be given.

    Raises:
        Unsupported: it is not dense, or its bytes are nowhere.
        DamagedFile: it reaches outside its storage.
    """
    storage = entry.storage
    if entry.kind != "dense" or storage is None or storage.data is None:
        raise Unsupported("only a dense tensor whose bytes are known can be put in its place", where=where)
    if dtypes.find(entry.dtype) is None:
        raise Unsupported(f"a tensor of the unknown dtype {entry.dtype}", where=where)
    negative = any(number < 0 for number in (entry.offset, *entry.shape, *entry.stride))
    if negative or len(entry.shape) != len(entry.stride):
        raise DamagedFile(f"the shape {list(entry.shape)} does not go with its stride or offset", where=where)
    if storage.data.length != storage.nbytes or (entry.numel and end_of(entry) > storage.nbytes):
        raise DamagedFile(f"{end_of(entry)} bytes of a storage needed, which has {storage.data.length}", where=where)
