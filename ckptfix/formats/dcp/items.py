"""Items of a ``.distcp`` file: each is a whole torch archive of one tensor or value, at its offset in the file.

::

    archive/data.pkl   .format_version   .storage_alignment   byteorder   data/0   version   .data/serialization_id

Items that are only the bytes of the elements, or a tensor of a safetensors file (see `images`), are read too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ckptfix.checkpoint import ByteRange, Data, Derived, RangeCheck, TensorEntry, dtypes
from ckptfix.dataclass import dataclass
from ckptfix.errors import CkptfixError, DamagedFile, Unsupported
from ckptfix.formats.dcp.images import Images
from ckptfix.formats.dcp.molds import Molds
from ckptfix.formats.dcp.skim import Sizes
from ckptfix.formats.dcp.window import ItemWindow, in_file, tell
from ckptfix.formats.torch import zip as torch_zip
from ckptfix.formats.torch.common import ByteOrder, Storages, little_endian
from ckptfix.formats.torch.tensors import BadTensor, is_tensor, tensor_entry
from ckptfix.formats.torch.zip_layout import ZipCheckpoint, ZipStorages
from ckptfix.io.elements import row_major
from ckptfix.io.source import Source, open_source
from ckptfix.pickles import Graph

_ZIP = b"PK\x03\x04"


@dataclass(frozen=True, slots=True)
class TensorItem:
    """The elements of a chunk in row-major order, and the checksum that its archive states for them."""

    data: Data
    check: RangeCheck | None


class ChunkName(NamedTuple):
    """The identity of a chunk in a safetensors file: `fqn` and its offsets; `images` are those files."""

    images: Images
    fqn: str
    offsets: Sizes


def tensor_item(
    where: ByteRange, name: str, dtype: str, shape: Sizes, molds: Molds, named: ChunkName | None = None
) -> TensorItem:
    """Return the chunk in the item at `where`, which must have this dtype and shape.

    Args:
        name: the tensor's name, for errors.
        molds: patterns of the items that were read before.

    Raises:
        DamagedFile: it holds something else, or is incomplete.
        Unsupported: it does not hold a dense tensor.
    """
    try:
        known = molds.find(where, dtype, shape)
    except CkptfixError as error:
        tell(error, ItemWindow(where), name)
        raise
    if known is not None:
        own, crc32 = known
        return TensorItem(own, None if crc32 is None else RangeCheck(name, own, crc32))
    window = ItemWindow(where)
    with in_file(window, name), open_source(window) as source:
        if source.read(0, min(4, where.length)) != _ZIP:
            image = None if named is None else named.images.at(where.path, where.offset)
            if named is not None and image is not None:
                return TensorItem(image.find(named.fqn, dtype, shape, named.offsets), None)
            return _bare(where, name, dtype, shape)
        return _understood(window, source, name, dtype, shape, molds)


def _understood(
    window: ItemWindow, source: Source, name: str, dtype: str, shape: Sizes, molds: Molds
) -> TensorItem:
    """Return the chunk in an archive, as in `tensor_item`."""
    archive, graph = torch_zip.read_object(window)
    if not archive.pickle_ok:
        raise DamagedFile("the pickle of its item does not match its CRC-32")
    if not is_tensor(graph.root):
        raise DamagedFile("its item holds no tensor")
    try:
        entry = tensor_entry(graph.root, name, "", Storages(_places(window, archive, graph), graph=graph))
    except BadTensor as error:
        raise DamagedFile(f"its item holds no tensor: {error.message}") from None
    if entry.kind != "dense" or (entry.detail and not entry.lazy):
        raise Unsupported(f"its item holds a {entry.detail or entry.kind} tensor")
    if (entry.dtype, entry.shape) != (dtype, shape):
        message = f"its item holds {entry.dtype} {list(entry.shape)}, but the metadata says {dtype} {list(shape)}"
        raise DamagedFile(message)
    storage = entry.storage
    if storage is None or storage.data is None:
        raise DamagedFile("its item holds no elements")
    if not isinstance(storage.data, ByteRange):
        return _inflated(entry, storage.data, storage.crc32, big=_is_big(window, archive))
    whole = window.real(storage.data)
    check = RangeCheck(name, whole, storage.crc32) if storage.crc32 is not None else None
    big = _is_big(window, archive)
    data: Data = whole
    if not entry.is_contiguous or entry.lazy:
        data = row_major(replace(entry, storage=replace(storage, data=whole)), "big" if big else "little")
    elif entry.data == storage.data and not big:
        molds.learn(source, archive, dtype, shape, storage.data)
    else:
        data = window.real(entry.data)
    if big:
        data = little_endian(data, "big", dtypes.by_name(dtype).unit)
    return TensorItem(data, check)


def _inflated(entry: TensorEntry, data: Derived, crc32: int | None, *, big: bool) -> TensorItem:
    """Return the elements of an archive that was compressed after torch wrote it, to be inflated when read."""
    if not entry.is_contiguous or entry.offset or entry.nbytes != data.length:
        raise Unsupported("its item is compressed, and is a view of a larger storage")
    check = RangeCheck(entry.name, data, crc32) if crc32 is not None else None
    order: ByteOrder = "big" if big else "little"
    return TensorItem(little_endian(row_major(entry, order), order, dtypes.by_name(entry.dtype).unit), check)


def _places(window: ItemWindow, archive: ZipCheckpoint, graph: Graph) -> ZipStorages:
    if any(type(persid.pid) is not tuple for persid in graph.persids):
        raise DamagedFile("its item refers to a storage in a way that torch never does")
    return ZipStorages(window, archive)


def _is_big(window: ItemWindow, archive: ZipCheckpoint) -> bool:
    """Return whether the archive states that its numbers are big-endian."""
    with open_source(window) as source:
        return torch_zip.small_record(source, archive.directory, f"{archive.root}/byteorder") == "big"


def _bare(where: ByteRange, name: str, dtype: str, shape: Sizes) -> TensorItem:
    """Return an item without an archive: only the bytes of the elements."""
    nbytes = dtypes.by_name(dtype).nbytes(_count(shape))
    if where.length != nbytes:
        raise DamagedFile(f"its item of {where.length} bytes is neither a torch archive nor {nbytes} bytes of elements")
    return TensorItem(where, None)


def _count(shape: Sizes) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


@dataclass(frozen=True, slots=True)
class ValueItem:
    """The pickle of a value, and the storages of the tensors in it."""

    graph: Graph
    storages: Storages
    byteorder: str


def value_item(where: ByteRange, name: str) -> ValueItem:
    """Return the value in the item at `where`.

    Raises:
        DamagedFile: it is incomplete.
        Unsupported: torch.save does not write such an item.
    """
    window = ItemWindow(where)
    with in_file(window, name):
        with open_source(window) as source:
            zipped = source.read(0, min(4, where.length)) == _ZIP
        if not zipped:
            raise Unsupported("its item is not an archive that torch.save writes")
        archive, graph = torch_zip.read_object(window)
        if not archive.pickle_ok:
            raise DamagedFile("the pickle of its item does not match its CRC-32")
        places = ZipStorages(window, archive)

        def place(key: str) -> tuple[Data | None, int, int | None]:
            data, nbytes, crc32 = places(key)
            return (window.real(data) if isinstance(data, ByteRange) else data), nbytes, crc32

        if graph.persids and _is_big(window, archive):
            raise Unsupported("its item holds tensors in big-endian order")
        return ValueItem(graph, Storages(place, graph=graph), "little")
