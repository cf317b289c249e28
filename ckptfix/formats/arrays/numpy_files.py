"""NumPy's files: ``.npy`` holds one array, and ``.npz`` is a zip of such files. MLX writes ``.npz`` too.

::

    .npy   "\\x93NUMPY", version (two bytes), length of the header (2 bytes in version 1, else 4), the header, the data
           the header is a Python literal {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }
    .npz   NAME.npy, NAME.npy, ... stored (numpy.savez) or deflated (numpy.savez_compressed)

An array of Python objects is a pickle, which is never read. Source: numpy/lib/_format_impl.py.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import islice

from ckptfix.checkpoint import ByteRange, Checkpoint, Data, Derived
from ckptfix.dataclass import dataclass
from ckptfix.errors import BadDirectory, CkptfixError, DamagedFile
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.formats.arrays.common import Array, checkpoint_of, numpy_kind, read_only
from ckptfix.formats.signs import Beginning, zip_of
from ckptfix.io.read import cut, read_chunks, read_from
from ckptfix.io.source import Source, open_source
from ckptfix.zips.local import record_data
from ckptfix.zips.read import read_directory

MAGIC = b"\x93NUMPY"

SUFFIX = ".npy"

ALONE = "array"
"""The name of the only array of a ``.npy`` file, which has no name there."""

MOST_HEADER = 1 << 16
"""The limit in bytes of a header. NumPy itself refuses headers of over 10,000 characters."""


@dataclass(frozen=True, slots=True)
class NpyHeader:
    """The header of an array.

    Attributes:
        descr: the type of the elements, as text or as a list of fields.
        columns: whether the array is in Fortran's order.
        data: the offset of the data behind the beginning of the file.
    """

    descr: object
    columns: bool
    shape: tuple[int, ...]
    data: int


def npy_header(head: bytes) -> NpyHeader:
    """Parse the header at the beginning of a ``.npy`` file.

    Args:
        head: the first `MOST_HEADER` bytes of the file, or all of them.

    Raises:
        DamagedFile: it is not as NumPy writes it.
    """
    if not head.startswith(MAGIC) or len(head) < 12:
        raise DamagedFile("the data does not begin like a .npy file")
    start = 10 if head[6] == 1 else 12
    length = int.from_bytes(head[8:start], "little")
    if head[6] not in (1, 2, 3) or length > MOST_HEADER - start:
        raise DamagedFile(f"version {head[6]} with a header of {length} bytes is not a .npy file that NumPy writes")
    text = head[start : start + length]
    if len(text) < length:
        raise DamagedFile(f"the header of {length} bytes is cut off")
    try:
        stated = ast.literal_eval(text.decode("utf-8" if head[6] == 3 else "latin-1").strip())
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        raise DamagedFile("the header is not a Python dict") from None
    if not isinstance(stated, dict) or set(stated) != {"descr", "fortran_order", "shape"}:
        raise DamagedFile("the header lacks 'descr', 'fortran_order' or 'shape'")
    shape = stated["shape"]
    if not isinstance(shape, tuple) or not all(type(size) is int and size >= 0 for size in shape):
        raise DamagedFile("the header states no shape")
    return NpyHeader(stated["descr"], stated["fortran_order"] is True, shape, start + length)


def _array(key: str, file: Data, head: bytes, crc32: int | None = None) -> Array | Finding:
    """Return the array of a ``.npy`` file whose first bytes are `head`, or why it is not a tensor."""
    offset = file.offset if isinstance(file, ByteRange) else None
    try:
        header = npy_header(head)
    except DamagedFile as error:
        return found("bad-tensor", error.message, where=key, offset=offset)
    if _has_objects(header.descr):
        message = "it holds Python objects, as a pickle that numpy.load(allow_pickle=True) would run; it is not read"
        return found("not-taken", message, where=key, offset=offset)
    kind = numpy_kind(header.descr) if isinstance(header.descr, str) else None
    if kind is None:
        message = f"it holds text, dates or records ({header.descr!r:.60}), and is not a tensor; it is not taken"
        return found("not-taken", message, where=key, offset=offset)
    data = _behind(file, header.data)
    if kind.dtype is None:
        return Array(key, None, (data.length,), data, kind=f"NumPy's {header.descr}")
    return Array(key, kind.dtype, header.shape, data, kind.itemsize, header.columns, kind.big)


def _has_objects(descr: object) -> bool:
    """Return whether a type is, or has a field of, Python objects."""
    if isinstance(descr, (list, tuple)):
        return any(map(_has_objects, descr))
    return isinstance(descr, str) and descr.lstrip("<>|=") == "O"


def _behind(file: Data, start: int) -> Data:
    """Return the bytes of `file` from `start` on."""
    length = max(file.length - start, 0)
    if isinstance(file, ByteRange):
        return ByteRange(file.path, file.offset + start, length)
    return Derived(length, lambda: cut(read_chunks(file), start, length), file.what, read_from(file))


def _first(data: Data, reader: Source) -> bytes:
    """Return the first bytes of a file in the archive, as far as they may hold a header."""
    if isinstance(data, ByteRange):
        return reader.read(data.offset, max(min(data.length, MOST_HEADER, reader.size - data.offset), 0))
    return b"".join(islice(cut(data.chunks(), 0, min(data.length, MOST_HEADER)), MOST_HEADER))


def score_npy(path: str, head: bytes, size: int) -> int:
    """Return 100 for a file that begins like a ``.npy`` file."""
    return 100 if head.startswith(MAGIC) else 0


def read_npy(path: str) -> Checkpoint:
    """Read the one array; see the contract in `base`."""
    with open_source(path) as reader:
        size = reader.size
        head = reader.read(0, min(size, MOST_HEADER))
    made = _array(ALONE, ByteRange(path, 0, size), head)
    arrays = [made] if isinstance(made, Array) else []
    findings = [made] if isinstance(made, Finding) else []
    return checkpoint_of(path, NPY.name, size, arrays, traits={}, findings=findings)


def score_npz(path: str, head: bytes, size: int) -> int:
    """Return 90 for a zip whose files are all ``.npy`` files."""
    if not zip_of(SUFFIX)(Beginning(path, head, size)):
        return 0
    try:
        with open_source(path) as reader:
            names = read_directory(reader).records.names()
    except CkptfixError:
        return 0
    return 90 if names and all(name.endswith(SUFFIX) for name in names) else 0


def read_npz(path: str) -> Checkpoint:
    """Read names, shapes and places of all arrays; see the contract in `base`."""
    findings: list[Finding] = []
    with open_source(path) as reader:
        size = reader.size
        records = read_directory(reader).records
        arrays = list(_members(reader, findings))
    deflated = sum(row.stored != row.size for row in records)
    return checkpoint_of(
        path, NPZ.name, size, arrays, traits={"compressed arrays": deflated} if deflated else {}, findings=findings
    )


def _members(reader: Source, findings: list[Finding]) -> Iterator[Array]:
    for record in read_directory(reader).records:
        key = record.name.removesuffix(SUFFIX)
        try:
            data = record_data(reader, record)
            made = _array(key, data, _first(data, reader))
        except BadDirectory as error:
            made = found("bad-directory", error.message, where=key, offset=record.header)
        except CkptfixError as error:
            made = found("bad-tensor", error.message, where=key, offset=record.header)
        if isinstance(made, Finding):
            findings.append(made)
        else:
            yield made


NPY = read_only("npy", "NumPy array", score_npy, read_npy, finding="numpy-file", models=False)
NPZ = read_only("npz", "NumPy archive", score_npz, read_npz, finding="numpy-file", checksums=True, models=False)
