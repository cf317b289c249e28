"""The nouns: what a checkpoint is made of, what is done to it, and what will be written.

Tensor data is a place, not a value: a `ByteRange`. An output is a sequence of segments, each literal ``bytes`` (a
header, a pickle, padding), a `ByteRange` that the kernel copies, or a `Derived` stream for the few bytes that are in no
file (a strided view made contiguous, a deflated record, a checksum). A `Plan` is what will be written, and is not yet.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from ckptfix import dtypes
from ckptfix.errors import DamagedFile, Unsupported
from ckptfix.stamps import UNSEEN, Stamp


@dataclass(frozen=True, slots=True)
class ByteRange:
    """`length` bytes at `offset` of the file `path`."""

    path: str
    offset: int
    length: int

    @property
    def end(self) -> int:
        return self.offset + self.length

    def sub(self, offset: int, length: int) -> ByteRange:
        """The range of `length` bytes that starts `offset` bytes into this one.

        Raises:
            ValueError: the part does not lie inside.
        """
        if offset < 0 or length < 0 or offset + length > self.length:
            raise ValueError(f"{length} bytes at {offset} do not lie inside a range of {self.length}")
        return ByteRange(self.path, self.offset + offset, length)


@dataclass(frozen=True, slots=True)
class Derived:
    """`length` bytes that `chunks()` yields in small pieces; `sources` are what they are read from."""

    length: int
    chunks: Callable[[], Iterable[bytes]] = field(compare=False, repr=False)
    what: str = ""
    sources: tuple[ByteRange, ...] = ()


Data = ByteRange | Derived
Segment = bytes | ByteRange | Derived


def segment_length(segment: Segment) -> int:
    """Bytes that `segment` will be in the output."""
    return len(segment) if isinstance(segment, bytes) else segment.length


Kind = Literal["dense", "quantized", "sparse", "meta", "wrapper", "nested"]


@dataclass(frozen=True, slots=True)
class Storage:
    """A run of bytes that tensors view.

    Attributes:
        key: its name in the file (``"17"`` for the zip record ``archive/data/17``).
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
        return f"{self.at}/{self.key}" if self.at else self.key

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
    def location(self) -> str:
        if self.storage is not None:
            return self.storage.location
        return self.parts[0].location if self.parts else "meta"

    @property
    def is_contiguous(self) -> bool:
        return self.numel == 0 or is_contiguous(self.shape, self.stride)

    @property
    def data(self) -> ByteRange:
        """The bytes of the tensor in row-major order.

        Raises:
            Unsupported: they do not lie so in the file (a strided view, a deflated record, a sparse tensor).
            DamagedFile: they would lie outside the storage.
        """
        storage = self.storage
        if storage is None or self.kind not in ("dense", "quantized"):
            raise Unsupported(f"a {self.kind} tensor has no bytes itself", where=self.name)
        if not self.is_contiguous:
            raise Unsupported("a strided view is not one run of bytes", where=self.name)
        if not isinstance(storage.data, ByteRange):
            raise Unsupported("its record is not stored as plain bytes", where=self.name)
        if self.numel == 0:
            return storage.data.sub(0, 0)
        try:
            return storage.data.sub(dtypes.by_name(self.dtype).nbytes(self.offset), self.nbytes)
        except ValueError as error:
            raise DamagedFile(f"it reaches outside its storage: {error}", where=self.name) from None


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


SiteKind = Literal["state_dict", "metadata", "param_names", "optimizer_state"]


@dataclass(frozen=True, slots=True)
class NameSite:
    """A place that holds parameter or module names, all of which change together.

    Attributes:
        at: its address. The ``_metadata`` of a state dict has the address of that state dict.
        kind: ``"state_dict"`` (names are keys of tensors), ``"metadata"`` (names are module paths, the root
            being ``""``), ``"param_names"`` (a list of names), ``"optimizer_state"`` (name -> its state).
        names: in order. A state dict's non-tensor keys are here too.
    """

    at: str
    kind: SiteKind
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StateDict:
    """A mapping with string keys and a tensor among its values, and where it is.

    Attributes:
        at: its address.
        tensors, extra: how many of its values are tensors, and how many are not.
        optimizer: it is a part of an optimizer's state.
        weights: it looks like what ``Module.state_dict()`` gives, rather than RNG state or statistics that
            happen to be tensors. Only such mappings get a prefix added or become a safetensors file.
    """

    at: str
    tensors: int
    extra: int
    optimizer: bool = False
    weights: bool = True


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that `check` or an operation noticed; `fix` is a command or an instruction."""
    id: str
    severity: Literal["info", "warning", "error"]
    where: str
    message: str
    offset: int | None = None
    fix: str | None = None


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as read: names, shapes and places; no tensor byte has been read.

    Attributes:
        path: the file.
        format: NAME of the format module that read it.
        size: bytes of the file.
        traits: what else the format states about the file, for `inspect` (protocol, zip root, byte order ...).
        byteorder: of the tensor data.
        metadata: string pairs that the format keeps beside the tensors (safetensors ``__metadata__``).
        sites: every place that holds names.
        devices: location -> how often it stands in the file.
        fixed_devices: places whose device cannot be edited, as text.
        graph: what the format keeps for its own edits; opaque to all other code.
        findings: what reading noticed; building `entries` may add to it.
        stamp: what `fileio.stamp` returned for the file before it was read, to see that it is still the same.
    """

    path: str
    format: str
    size: int
    traits: Mapping[str, Any]
    load_entries: Callable[[], tuple[TensorEntry, ...]] = field(repr=False, compare=False)
    load_values: Callable[[], Iterator[tuple[str, Any]]] = field(repr=False, compare=False)
    byteorder: Literal["little", "big"] = "little"
    metadata: Mapping[str, str] = field(default_factory=dict)
    sites: tuple[NameSite, ...] = ()
    state_dicts: tuple[StateDict, ...] = ()
    devices: Mapping[str, int] = field(default_factory=dict)
    fixed_devices: tuple[str, ...] = ()
    graph: Any = field(default=None, repr=False, compare=False)
    findings: Sequence[Finding] = ()
    stamp: Stamp = UNSEEN

    @cached_property
    def entries(self) -> tuple[TensorEntry, ...]:
        """Every tensor, in file order; built at the first use."""
        return self.load_entries()

    def values(self) -> Iterator[tuple[str, Any]]:
        """Every leaf that is not a tensor, as (address, plain value); foreign objects are inert records."""
        return self.load_values()


@dataclass(frozen=True, slots=True)
class Rename:
    """Change names at the site (`at`, `kind`): `names` maps old to new; others do not change."""

    at: str
    kind: SiteKind
    names: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Drop:
    """Leave out the keys `names` of the mapping `at`."""

    at: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SetLocation:
    """Change devices: `moves` maps a location to its new one, all at once; others do not change."""

    moves: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class SetMetadata:
    """Set string pairs of the file's metadata; None removes one."""

    pairs: Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class Reshape:
    """Give tensors of the mapping `at` other shapes with equally many elements; the bytes do not change.

    `shapes` maps a name, as it is in the file, to its new shape. A name that is the very same tensor object, or tied
    to it in the file's metadata, changes with it.
    """

    at: str
    shapes: Mapping[str, tuple[int, ...]]


Edit = Rename | Drop | SetLocation | SetMetadata | Reshape


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A file to be written: `segments` in order, `nbytes` together."""

    path: str
    segments: tuple[Segment, ...] = field(repr=False)
    nbytes: int

    @classmethod
    def of(cls, path: str | os.PathLike[str], segments: Iterable[Segment]) -> OutputFile:
        """An OutputFile of these segments; empty ones are left out, adjacent ranges of a file joined."""
        kept = tuple(joined(segments))
        return cls(os.fspath(path), kept, sum(map(segment_length, kept)))


def joined(segments: Iterable[Segment]) -> Iterator[Segment]:
    """The same bytes in fewer segments."""
    last: Segment = b""
    literal: list[bytes] = []
    for segment in segments:
        if not segment_length(segment):
            continue
        if isinstance(segment, bytes):
            if not isinstance(last, bytes):
                yield last
                last = b""
            literal.append(segment)
            continue
        if literal:
            yield b"".join(literal)
            literal.clear()
        if isinstance(last, ByteRange):
            if isinstance(segment, ByteRange) and segment.path == last.path and segment.offset == last.end:
                last = ByteRange(last.path, last.offset, last.length + segment.length)
                continue
            yield last
        elif isinstance(last, Derived):
            yield last
        last = segment
    if not isinstance(last, bytes):
        yield last
    if literal:
        yield b"".join(literal)


@dataclass(frozen=True, slots=True)
class Check:
    """Bytes of an input that have to have the checksum that the input states for them."""

    where: str
    data: Data
    crc32: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything to be written, and nothing yet written. Files are written in order, an index last.

    `checks` come first: of bytes that go where their checksum cannot follow. `holds` is what its ranges need to exist.
    """

    files: tuple[OutputFile, ...]
    findings: tuple[Finding, ...] = ()
    checks: tuple[Check, ...] = ()
    holds: object = field(default=None, repr=False, compare=False)

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)
