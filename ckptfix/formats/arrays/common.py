"""Code shared by these formats: arrays become tensors, and edits are refused.

Such a file holds arrays by name, and no object of torch: it has no devices, no ties and no ``requires_grad``. Names
from nested mappings are joined with dots, as in a state dict of torch. The data of an array is a range of the file
wherever the file stores plain bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from ckptfix.checkpoint import (
    ByteRange,
    Checkpoint,
    Data,
    Derived,
    FileVersion,
    NameList,
    StateDict,
    Storage,
    TensorEntry,
    contiguous_stride,
    dtypes,
    file_of,
    short_shape,
)
from ckptfix.dataclass import dataclass
from ckptfix.errors import DamagedFile
from ckptfix.findings.row import Finding
from ckptfix.findings.steps import step
from ckptfix.findings.table import found
from ckptfix.formats.base import Format, plain_weights
from ckptfix.formats.torch.readonly.common import refuse_edit, refuse_write
from ckptfix.io.derived import byteswapped
from ckptfix.io.read import read_chunks, read_from
from ckptfix.io.source import is_folder, open_source

MOST_ELEMENTS = 1 << 63
"""The element count from which on torch cannot represent a tensor."""


@dataclass(frozen=True, slots=True)
class NumpyKind:
    """The type of an array's elements, as NumPy writes it.

    Attributes:
        dtype: torch's name; None for a type that torch lacks.
        itemsize: bytes of one element.
        big: whether the numbers are big-endian.
    """

    dtype: str | None
    itemsize: int
    big: bool = False


_LETTERS: Mapping[str, str] = {
    **{f"f{size}": f"float{8 * size}" for size in (2, 4, 8)},
    **{f"i{size}": f"int{8 * size}" for size in (1, 2, 4, 8)},
    **{f"u{size}": f"uint{8 * size}" for size in (1, 2, 4, 8)},
    "b1": "bool", "c8": "complex64", "c16": "complex128", "V2": "bfloat16",
}
"""NumPy's code for a type without its byte order -> torch's name.

NumPy has no code for the bfloat16 of ml_dtypes and writes V2, which is two bytes of unknown meaning. JAX's own
checkpoints are read as bfloat16 in the same way (``flax.training.checkpoints``, big_vision's ``load_checkpoint_np``).
"""

_CODE = re.compile(r"([<>|=])([biufcV])(\d{1,4})")


def numpy_kind(code: str) -> NumpyKind | None:
    """Return the type for a code of numbers, such as ``"<f4"``; None for text, dates, records and objects."""
    match = _CODE.fullmatch(code)
    if match is None:
        return None
    order, letter, digits = match.groups()
    return NumpyKind(_LETTERS.get(letter + digits), int(digits), order == ">")


@dataclass(frozen=True, slots=True)
class Array:
    """An array of the file.

    Attributes:
        key: the name in the state dict.
        dtype: torch's name; None for elements that torch has no type for.
        shape: sizes in elements.
        data: the bytes.
        itemsize: bytes of one element; 0 for that of `dtype`.
        columns: whether the first dimension varies fastest, as in Fortran.
        big: whether the numbers are big-endian.
        kind: the file's own name of the type, for a type that torch lacks.
        at: address of the state dict.
        crc32: checksum of the bytes in the file, if it states one.
        detail: as in `TensorEntry`.
    """

    key: str
    dtype: str | None
    shape: tuple[int, ...]
    data: Data
    itemsize: int = 0
    columns: bool = False
    big: bool = False
    kind: str = ""
    at: str = ""
    crc32: int | None = None
    detail: str = ""


def tensor_of(array: Array) -> TensorEntry:
    """Return the tensor of an array; one of raw bytes for a type that torch lacks.

    Raises:
        DamagedFile: shape and type do not fit the bytes.
    """
    itemsize = array.itemsize or (dtypes.by_name(array.dtype).itemsize if array.dtype else 1)
    count = 1
    for size in array.shape:
        count *= size or 1
        if size < 0 or count >= MOST_ELEMENTS:
            raise DamagedFile(f"no tensor has the shape {short_shape(array.shape)}", where=array.key)
    if math.prod(array.shape) * itemsize != array.data.length:
        name = array.dtype or array.kind
        message = f"{name} {short_shape(array.shape)} does not fit its {array.data.length} bytes"
        raise DamagedFile(message, where=array.key)
    if array.dtype is None:
        length = array.data.length
        storage = Storage(array.key, "uint8", length, "cpu", array.data)
        return TensorEntry(
            array.key, array.at, storage, "uint8", (length,), (1,), detail=f"{array.kind} {short_shape(array.shape)}"
        )
    data, stride = array.data, contiguous_stride(array.shape)
    unit = dtypes.by_name(array.dtype).unit
    if array.big and unit > 1:
        data = byteswapped(data, unit)
    if array.columns and len(array.shape) > 1:
        stride = tuple(reversed(contiguous_stride(array.shape[::-1])))
        if isinstance(data, Derived):
            data, stride = _row_major(data, array.shape, itemsize), contiguous_stride(array.shape)
    crc32 = array.crc32 if data is array.data else None
    storage = Storage(array.key, array.dtype, data.length, "cpu", data, crc32)
    return TensorEntry(array.key, array.at, storage, array.dtype, array.shape, stride, detail=array.detail)


def _row_major(data: Derived, shape: tuple[int, ...], itemsize: int) -> Derived:
    """Return the elements of a column-major stream row by row. The array is in memory while they are read."""

    def chunks() -> Iterator[bytes]:
        import numpy

        whole = numpy.frombuffer(b"".join(read_chunks(data)), f"V{itemsize}").reshape(shape[::-1])
        yield from (row.tobytes() for row in whole.transpose())

    return Derived(data.length, chunks, "transposed", read_from(data))


def concatenated(parts: Sequence[Data]) -> Data:
    """Return data that is stored in several parts, one after the other."""
    if len(parts) == 1:
        return parts[0]

    def chunks() -> Iterator[bytes]:
        for part in parts:
            yield from read_chunks(part)

    sources = tuple(source for part in parts for source in read_from(part))
    return Derived(sum(part.length for part in parts), chunks, "joined", sources)


def checkpoint_of(
    path: str,
    format: str,
    size: int,
    arrays: Iterable[Array],
    *,
    traits: Mapping[str, object],
    findings: Sequence[Finding] = (),
    values: Mapping[str, object] | None = None,
    metadata: Mapping[str, str] | None = None,
    optimizer: Sequence[str] = (),
    others: Sequence[FileVersion] = (),
) -> Checkpoint:
    """Return the checkpoint of a file with these arrays. An array that contradicts itself becomes a finding.

    Args:
        size: bytes of the file; 0 for a folder.
        others: the other files that data is in, as they were opened; all of them for a folder.
        values: other values by name: numbers, text.
        optimizer: addresses that hold the state of an optimizer.
    """
    noted = list(findings)
    sizes = {path: size, **{other.path: other.stamp.size for other in others}}
    entries: dict[tuple[str, str], TensorEntry] = {}
    for array in arrays:
        offset = array.data.offset if isinstance(array.data, ByteRange) else None
        try:
            entry = tensor_of(array)
        except DamagedFile as error:
            noted.append(found("bad-tensor", error.message, where=array.key, offset=offset))
            continue
        if (entry.at, entry.key) in entries:
            message = "several arrays have this name; only the first is read"
            noted.append(found("bad-tensor", message, where=entry.name, offset=offset))
            continue
        if array.dtype is None:
            message = f"torch has no type for {array.kind}; read as {array.data.length} raw bytes"
            noted.append(found("unknown-dtype", message, where=entry.name, offset=offset, fix=step("repair")))
        beyond = offset is not None and offset + array.data.length > sizes[file_of(array.data)]
        if offset is not None and beyond:
            left = max(sizes[file_of(array.data)] - offset, 0)
            message = f"the file promises {array.data.length} bytes, and has {left}"
            noted.append(found("truncated", message, where=entry.name, offset=offset))
        entries[entry.at, entry.key] = entry
    listed = tuple(entries.values())
    leaves = dict(values or {})
    dicts: dict[str, list[str]] = {}
    for entry in listed:
        dicts.setdefault(entry.at, []).append(entry.key)
    return Checkpoint(
        path=path,
        format=format,
        size=sum(sizes.values()),
        traits=traits,
        load_entries=lambda: listed,
        load_values=lambda: iter(leaves.items()),
        metadata=metadata or {},
        sites=tuple(NameList(at, "state_dict", tuple(keys)) for at, keys in dicts.items()),
        state_dicts=tuple(
            StateDict(at, len(keys), 0 if at else len(leaves), optimizer=at in optimizer) for at, keys in dicts.items()
        ),
        findings=noted,
        files=_versions(path, others),
    )


def _versions(path: str, others: Sequence[FileVersion]) -> tuple[FileVersion, ...]:
    """Return the versions of all files of a checkpoint; none for a single file, whose version its opener knows."""
    if not others or is_folder(path):
        return tuple(others)
    with open_source(path) as reader:
        return (FileVersion(path, reader.mark), *others)


def findings_of(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield the findings of reading (`Format.validate`): these formats check everything then."""
    yield from checkpoint.findings


def read_only(
    name: str,
    title: str,
    score: Callable[[str, bytes, int], int],
    read: Callable[[str], Checkpoint],
    *,
    finding: str = "other-framework",
    checksums: bool = False,
    folder: bool = False,
    models: bool = True,
) -> Format:
    """Return the format of files, or of folders, with arrays that `read` reads.

    Args:
        finding: the id of the finding that every such file has: torch does not read it.
        checksums: whether the files state checksums of their data.
        models: as in `Format`.
    """

    def notes(checkpoint: Checkpoint) -> Iterator[Finding]:
        fix = step("convert", to="safetensors") if checkpoint.entries else ""
        yield found(finding, f"{title}: torch does not read it", fix=fix)
        if not checksums:
            yield found("no-checksums", f"{title} has no checksums: a flipped bit in the data cannot be detected")

    return Format(
        name=name,
        title=title,
        suffixes=(),
        states=frozenset({"checksums"} if checksums else ()),
        score=score,
        read=read,
        validate=findings_of,
        weights=plain_weights,
        refuses=lambda entry: None,
        plan_edit=refuse_edit,
        plan_write=refuse_write,
        edits=False,
        writes=False,
        folder=folder,
        models=models,
        notes=notes,
    )
