"""HDF5 files, as Keras writes them: ``.h5``, ``.weights.h5``, and ``.keras``, a zip with ``model.weights.h5`` in it.

::

    Keras 1, 2   model_weights/dense/dense/kernel:0, optimizer_weights/...; in a weights file without model_weights
    Keras 3      layers/dense/vars/0, optimizer/vars/0

A dataset that is stored in one piece is a range of the file; a compressed or chunked one is read through h5py, block
by block. Links and data outside the file are never followed. The package h5py parses the file: it is the extra hdf5.
Attributes are not read: on a damaged heap of texts, HDF5 2.0 never returns.
Source: keras/src/saving/saving_lib.py, keras/src/legacy/saving/legacy_h5_format.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any

from ckptfix.checkpoint import ByteRange, Checkpoint, Data, Derived
from ckptfix.errors import CkptfixError, DamagedFile
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.formats.arrays.common import Array, checkpoint_of, numpy_kind, read_only
from ckptfix.formats.signs import Beginning, hdf5, zip_of
from ckptfix.io.source import open_source
from ckptfix.zips.local import record_data
from ckptfix.zips.read import read_directory

NAME = "hdf5"

WEIGHTS = "model.weights.h5"
"""The member of a ``.keras`` archive that holds the weights."""

OPTIMIZER = ("optimizer_weights", "optimizer", "_trackable_optimizer")
"""Groups at the top that hold the state of an optimizer."""

MOST_DATASETS = 1 << 20

BLOCK = 1 << 22
"""Bytes of a compressed dataset that are read at once, at least a row."""


def available() -> bool:
    """Return whether the package h5py is installed."""
    return find_spec("h5py") is not None


def score(path: str, head: bytes, size: int) -> int:
    """Return 100 for a file with the signature of HDF5, if h5py is installed."""
    return 100 if available() and hdf5(Beginning(path, head, size)) else 0


def score_keras(path: str, head: bytes, size: int) -> int:
    """Return 95 for a zip with `WEIGHTS`, if h5py is installed."""
    if not available() or not zip_of(WEIGHTS)(Beginning(path, head, size)):
        return 0
    try:
        with open_source(path) as reader:
            return 95 if WEIGHTS in read_directory(reader).records.names() else 0
    except CkptfixError:
        return 0


class _Part:
    """A range of a file as h5py reads it: a file object that cannot leave the range."""

    def __init__(self, path: str, start: int, size: int) -> None:
        self._source = open_source(path).__enter__()
        self._start, self._size, self._at = start, size, 0

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, count: int = -1) -> bytes:
        left = max(self._size - self._at, 0)
        data = self._source.read(self._start + self._at, left if count < 0 else min(count, left))
        self._at += len(data)
        return data

    def readinto(self, target: Any) -> int:
        data = self.read(len(target))
        target[: len(data)] = data
        return len(data)

    def flush(self) -> None:
        """Do nothing: the file is only read."""

    def truncate(self, size: int) -> None:
        raise OSError("the file is only read")

    def write(self, data: bytes) -> int:
        raise OSError("the file is only read")

    def close(self) -> None:
        self._source.close()


@contextmanager
def _opened(path: str, start: int, size: int) -> Iterator[Any]:
    """Open a part of a file as HDF5.

    Raises:
        DamagedFile: the library cannot open it.
    """
    import h5py

    part = _Part(path, start, size)
    try:
        try:
            file = h5py.File(part, "r", driver="fileobj", locking=False)
        except (OSError, ValueError, RuntimeError, TypeError) as error:
            raise DamagedFile(f"HDF5 cannot open it: {_first_line(error)}", path=path) from None
        with file:
            yield file
    finally:
        part.close()


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:200]


def read(path: str) -> Checkpoint:
    """Read names, shapes and places; see the contract in `base`.

    Raises:
        DamagedFile: the library cannot open it.
    """
    with open_source(path) as source:
        size = source.size
    return _read(path, NAME, 0, size, size)


def read_keras(path: str) -> Checkpoint:
    """Read the weights of a ``.keras`` archive, like `read`.

    Raises:
        DamagedFile: they are compressed, which Keras does not do, or HDF5 cannot open them.
    """
    with open_source(path) as source:
        size = source.size
        record = next(row for row in read_directory(source).records if row.name == WEIGHTS)
        data = record_data(source, record)
    if not isinstance(data, ByteRange):
        hint = "unzip it, and pass the file model.weights.h5 in it"
        raise DamagedFile("its weights are compressed, and HDF5 needs them plain", path=path, where=WEIGHTS, hint=hint)
    return _read(path, KERAS.name, data.offset, data.length, size)


def _read(path: str, name: str, start: int, length: int, size: int) -> Checkpoint:
    findings: list[Finding] = []
    with _opened(path, start, length) as file:
        try:
            arrays = list(_arrays(path, start, length, file, findings))
        except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
            raise DamagedFile(f"HDF5 cannot read it: {_first_line(error)}", path=path) from None
    optimizers = {array.at for array in arrays if array.at}
    return checkpoint_of(path, name, size, arrays, traits={}, findings=findings, optimizer=tuple(optimizers))


def _arrays(path: str, start: int, length: int, file: Any, findings: list[Finding]) -> Iterator[Array]:
    """Yield the datasets of a file, in the order in which they were created where the file knows it."""
    import h5py

    stack: list[tuple[tuple[str, ...], Any]] = [((), file)]
    seen: set[Any] = set()
    count = 0
    while stack:
        where, group = stack.pop()
        inside: list[tuple[tuple[str, ...], Any]] = []
        for key in group:
            place = (*where, key)
            shown = ".".join(place)
            if not isinstance(group.get(key, getlink=True), h5py.HardLink):
                message = "it is a link to other data, which is not followed"
                findings.append(found("bad-tensor", message, where=shown))
                continue
            try:
                item = group[key]
            except (OSError, KeyError, ValueError, RuntimeError) as error:
                findings.append(found("bad-tensor", f"HDF5 cannot read it: {_first_line(error)}", where=shown))
                continue
            count += 1
            if count > MOST_DATASETS:
                raise DamagedFile(f"the file has more than {MOST_DATASETS:,} objects", path=path)
            if isinstance(item, h5py.Group):
                identity = h5py.h5o.get_info(item.id).addr
                if identity not in seen:
                    seen.add(identity)
                    inside.append((place, item))
            elif isinstance(item, h5py.Dataset):
                made = _array(path, start, length, place, item)
                if isinstance(made, Finding):
                    findings.append(made)
                else:
                    yield made
        stack += reversed(inside)


def _array(path: str, start: int, length: int, where: tuple[str, ...], item: Any) -> Array | Finding:
    at = where[0] if len(where) > 1 and where[0] in OPTIMIZER else ""
    key = ".".join(where[1:] if at else where)
    shown = ".".join(where)
    if item.external or item.is_virtual:
        return found("bad-tensor", "its data is in another file, which is not opened", where=shown)
    kind = numpy_kind(item.dtype.str) if item.dtype.kind != "O" and item.shape is not None else None
    if kind is None:
        return found("not-taken", "it holds text or records, and is not a tensor", where=shown)
    shape = tuple(int(size) for size in item.shape)
    nbytes = math.prod(shape) * kind.itemsize
    offset = item.id.get_offset()
    plain = item.chunks is None and offset is not None
    if not plain and nbytes > item.id.get_storage_size() * 1100 + (1 << 20):
        # Deflate packs at most 1,032 bytes in one; what was never written takes no space.
        stored = item.id.get_storage_size()
        return found("bad-tensor", f"{stored} stored bytes cannot hold its {nbytes}", where=shown)
    data: Data
    if plain:
        data = ByteRange(path, start + int(offset), nbytes)
    else:
        reader = partial(_chunks, path, start, length, item.name)
        data = Derived(nbytes, reader, "HDF5", (ByteRange(path, start, length),))
    if kind.dtype is None:
        return Array(key, None, (nbytes,), data, kind=item.dtype.str, at=at)
    return Array(key, kind.dtype, shape, data, kind.itemsize, big=kind.big, at=at)


def _chunks(path: str, start: int, length: int, name: str) -> Iterator[bytes]:
    """Yield the bytes of a dataset that is not stored in one piece, some rows at a time."""
    with _opened(path, start, length) as file:
        item = file[name]
        try:
            if not item.shape:
                yield item[()].tobytes()
                return
            row = max(item.dtype.itemsize * math.prod(item.shape[1:]), 1)
            step = max(BLOCK // row, 1)
            for first in range(0, item.shape[0], step):
                yield item[first : first + step].tobytes()
        except (OSError, ValueError, RuntimeError) as error:
            raise DamagedFile(f"HDF5 cannot read {name}: {_first_line(error)}", path=path) from None


FORMAT = read_only(NAME, "HDF5 file (Keras)", score, read)
KERAS = read_only("keras", "Keras model", score_keras, read_keras)
