"""HDF5 files, as Keras writes them: ``.h5``, ``.weights.h5``, and ``.keras``, a zip with ``model.weights.h5`` in it.

::

    Keras 1, 2   model_weights/dense/dense/kernel:0, optimizer_weights/...; in a weights file without model_weights
    Keras 3      layers/dense/vars/0, optimizer/vars/0

A dataset that is stored in one piece is a range of the file; a compressed or chunked one is read through h5py, block
by block. Links and data outside the file are never followed. The package h5py parses the file, in a process with limits
of time and memory (`hdf5_child`): it is the extra hdf5. Attributes are not read: on a damaged heap of texts, HDF5 2.0
never returns.
Source: keras/src/saving/saving_lib.py, keras/src/legacy/saving/legacy_h5_format.py.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from threading import Lock
from typing import TYPE_CHECKING, Any

from ckptfix.checkpoint import ByteRange, Checkpoint, Data, Derived
from ckptfix.errors import CkptfixError, DamagedFile, Refused
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.formats.arrays import hdf5_child
from ckptfix.formats.arrays.common import Array, checkpoint_of, numpy_kind, read_only
from ckptfix.formats.signs import Beginning, hdf5, zip_of
from ckptfix.io.source import open_source
from ckptfix.platform import ENDED, end_process
from ckptfix.zips.local import record_data
from ckptfix.zips.read import read_directory

if TYPE_CHECKING:
    from subprocess import Popen

NAME = "hdf5"

WEIGHTS = "model.weights.h5"
"""The member of a ``.keras`` archive that holds the weights."""

OPTIMIZER = ("optimizer_weights", "optimizer", "_trackable_optimizer")
"""Groups at the top that hold the state of an optimizer."""

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


class Hdf5Process:
    """A process in which h5py reads a part of a file; see `hdf5_child`. It is started when it is first asked."""

    def __init__(self, path: str, start: int, size: int) -> None:
        self._path, self._start, self._size = path, start, size
        self._child: Popen[bytes] | None = None
        self._lock = Lock()

    def rows(self) -> list[dict[str, Any]]:
        """Return what the file holds, in rows of `hdf5_child`.

        Raises:
            DamagedFile: the library cannot read it, does not finish, or crashes.
            Refused: no process can be started.
        """
        with self._lock:
            self._ask(None)
            made: list[dict[str, Any]] = []
            while (row := self._row()) is not None:
                made.append(row)
            assert self._child is not None
            # Most files need no further answer, and a search of folders opens many.
            child, self._child = self._child, None
            end_process(child)
            return made

    def block(self, name: str, first: int, last: int) -> bytes:
        """Return rows of a dataset.

        Raises:
            DamagedFile: as `rows`.
        """
        with self._lock:
            self._ask([name, first, last])
            kind, data = self._message()
            if kind == b"J":
                self._stop(json.loads(data), name)
            return data

    def _ask(self, request: object) -> None:
        if self._child is None:
            self._child = self._started()
            self._send(json.dumps(self._size).encode() + b"\n")
            self._row()
        self._send(json.dumps(request).encode() + b"\n")

    def _started(self) -> Popen[bytes]:
        from subprocess import DEVNULL, PIPE, Popen
        from weakref import finalize

        words = [sys.executable, "-I", hdf5_child.__file__, json.dumps([path for path in sys.path if path])]
        # Without its threads, numpy needs little of the address space that the process may have.
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
        try:
            child = Popen(words, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=environment)
        except OSError as error:
            message = f"reading HDF5 needs another process, which failed: {error.strerror or error}"
            raise Refused(message, path=self._path) from None
        finalize(self, end_process, child)
        return child

    def _send(self, data: bytes) -> None:
        assert self._child is not None and self._child.stdin is not None
        try:
            self._child.stdin.write(data)
            self._child.stdin.flush()
        except OSError:
            raise self._died() from None

    def _take(self, count: int) -> bytes:
        assert self._child is not None and self._child.stdout is not None
        data = self._child.stdout.read(count)
        if len(data) < count:
            raise self._died()
        return data

    def _message(self) -> tuple[bytes, bytes]:
        """Return the next message, and serve the ranges that are asked for before it."""
        while True:
            kind, length = hdf5_child.HEAD.unpack(self._take(hdf5_child.HEAD.size))
            data = self._take(length)
            if kind != b"R":
                return kind, data
            at, count = hdf5_child.RANGE.unpack(data)
            with open_source(self._path) as source:
                count = min(count, max(self._size - at, 0))
                part = source.read(self._start + at, count) if count else b""
            self._send(hdf5_child.LENGTH.pack(len(part)) + part)

    def _row(self) -> dict[str, Any] | None:
        _, data = self._message()
        row: dict[str, Any] | None = json.loads(data)
        self._stop(row, None)
        return row

    def _stop(self, row: Mapping[str, Any] | None, name: str | None) -> None:
        if row is not None and "stop" in row:
            raise DamagedFile(row["stop"], path=self._path, where=name)

    def _died(self) -> DamagedFile:
        from subprocess import TimeoutExpired

        assert self._child is not None
        child, self._child = self._child, None
        with suppress(TimeoutExpired):  # its pipes are closed before it has a status
            child.wait(timeout=5)
        end_process(child)
        said = f"ended its process (status {child.returncode})"
        if child.returncode == ENDED:
            said = f"did not finish within {hdf5_child.CALL_SECONDS} seconds of computing"
        return DamagedFile(f"HDF5 cannot read it: the library {said}", path=self._path)


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
    process = Hdf5Process(path, start, length)
    made = [_array(path, start, length, row, process) for row in process.rows()]
    arrays = [one for one in made if isinstance(one, Array)]
    findings = [one for one in made if isinstance(one, Finding)]
    optimizers = {array.at for array in arrays if array.at}
    return checkpoint_of(path, name, size, arrays, traits={}, findings=findings, optimizer=tuple(optimizers))


def _array(path: str, start: int, length: int, row: Mapping[str, Any], process: Hdf5Process) -> Array | Finding:
    where: list[str] = row["where"]
    at = where[0] if len(where) > 1 and where[0] in OPTIMIZER else ""
    key = ".".join(where[1:] if at else where)
    shown = ".".join(where)
    if "bad" in row:
        return found("bad-tensor", row["bad"], where=shown)
    kind = numpy_kind(row["code"])
    if kind is None:
        return found("not-taken", "it holds text or records, and is not a tensor", where=shown)
    shape = tuple(row["shape"])
    nbytes = math.prod(shape) * kind.itemsize
    offset, stored = row["offset"], row["stored"]
    if offset is None and nbytes > stored * 1100 + (1 << 20):
        # Deflate packs at most 1,032 bytes in one; what was never written takes no space.
        return found("bad-tensor", f"{stored} stored bytes cannot hold its {nbytes}", where=shown)
    data: Data
    if offset is not None:
        data = ByteRange(path, start + offset, nbytes)
    else:
        reader = partial(_chunks, process, row["name"], shape, kind.itemsize)
        data = Derived(nbytes, reader, "HDF5", (ByteRange(path, start, length),))
    if kind.dtype is None:
        return Array(key, None, (nbytes,), data, kind=row["code"], at=at)
    return Array(key, kind.dtype, shape, data, kind.itemsize, big=kind.big, at=at)


def _chunks(process: Hdf5Process, name: str, shape: tuple[int, ...], itemsize: int) -> Iterator[bytes]:
    """Yield the bytes of a dataset that is not stored in one piece, some rows at a time."""
    row = max(itemsize * math.prod(shape[1:]), 1)
    step = max(BLOCK // row, 1)
    for first in range(0, shape[0] if shape else 1, step):
        yield process.block(name, first, first + step)


FORMAT = read_only(NAME, "HDF5 file (Keras)", score, read)
KERAS = read_only("keras", "Keras model", score_keras, read_keras)
