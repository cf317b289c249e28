"""``flax.serialization``: nested mappings as MessagePack, in which arrays are extension types.

::

    map      {"params": {"Dense_0": {"kernel": ARRAY, "bias": ARRAY}}, "step": 3}
    type 1   an array: the packed list [shape, name of the dtype, bytes in row-major order]
    type 3   a NumPy scalar, in the same form
    type 2   a complex number: the packed list [real, imaginary]
    larger   {"__msgpack_chunked_array__": true, "shape": {"0": n, ...}, "chunks": {"0": ARRAY, ...}}

No value is made of bytes that are not the file's: the bytes of an array stay where they are. The packages msgpack and
flax read whole files into memory, so this reader is our own. Sources: the MessagePack specification, and
flax/serialization.py (``_msgpack_ext_pack``, ``_chunk``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ckptfix.checkpoint import ByteRange, Checkpoint, Data, FileVersion
from ckptfix.checkpoint.address import join
from ckptfix.dataclass import dataclass
from ckptfix.errors import CkptfixError, DamagedFile, Truncated, Unsupported
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.formats.arrays.common import Array, checkpoint_of, concatenated, read_only
from ckptfix.formats.arrays.cursor import Cursor
from ckptfix.formats.signs import Beginning, mapped
from ckptfix.io.source import Source, is_local, open_source

NAME = "flax"

CHUNKED = "__msgpack_chunked_array__"

MOST_VALUES = 1_000_000
"""The limit of values in a file: a model has some thousands."""

MOST_LEVELS = 100

MOST_TEXT = 1 << 20
"""The limit in bytes of a name or a text."""

OPTIMIZER = ("opt_state", "optimizer", "optimizer_state")
"""Names at the top of a train state that hold the state of an optimizer (``flax.training.train_state.TrainState``,
``flax.optim``)."""

ELSEWHERE = "PLACEHOLDER://"
"""The beginning of the text that orbax had, until 2023, in a tree in place of an array that it stored elsewhere
(orbax/checkpoint/_src/handlers/pytree_checkpoint_handler.py)."""

_SIZED = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4, 0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4, 0xC7: 1, 0xC8: 2,
          0xC9: 4}  # fmt: skip
"""First byte of a value whose length follows -> bytes of the length."""

_NUMBERS = {0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i",
            0xD3: ">q"}  # fmt: skip

DTYPES = frozenset(
    {
        *(f"float{8 * size}" for size in (2, 4, 8)),
        *(f"{sign}int{8 * size}" for sign in ("", "u") for size in (1, 2, 4, 8)),
        *("bool", "bfloat16", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    }
)  # fmt: skip
"""Names of dtypes that NumPy and ml_dtypes share with torch."""


@dataclass(frozen=True, slots=True)
class PackedArray:
    """An array of the file: its dtype by NumPy's name, its shape and its bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: Data


class _Reader(Cursor):
    """Reader of MessagePack values one by one, which leaves byte strings in the file."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self.values = 0

    def value(self, level: int = 0) -> object:
        """Read the value at the current place.

        Returns:
            None, a bool, a number, a string, a `ByteRange` for bytes, a list, a dict, or a `PackedArray`.

        Raises:
            Truncated: the file ends inside the value.
            DamagedFile: the bytes are not a value, or not one that flax writes.
            Unsupported: there are too many values, or they are nested too deeply.
        """
        self.values += 1
        if self.values > MOST_VALUES or level > MOST_LEVELS:
            limit = f"{MOST_VALUES:,} values" if level <= MOST_LEVELS else f"{MOST_LEVELS} levels"
            raise Unsupported(f"the file has more than {limit}", path=self.source.name, offset=self.at)
        at = self.at
        first = self.take(1)[0]
        if first < 0x80:
            return first
        if first >= 0xE0:
            return first - 0x100
        if first in (0xC0, 0xC2, 0xC3):
            return {0xC0: None, 0xC2: False, 0xC3: True}[first]
        if first in _NUMBERS:
            number: object = self.number(_NUMBERS[first])
            return number
        if 0xD4 <= first <= 0xD8:
            return self._extension(1 << (first - 0xD4), at, level)
        if first in _SIZED:
            length = int.from_bytes(self.take(_SIZED[first]), "big")
        elif first < 0xC0:
            length = first & (0x1F if first >= 0xA0 else 0x0F)
        else:
            raise DamagedFile(f"no MessagePack value begins with 0x{first:02x}", path=self.source.name, offset=at)
        if 0xA0 <= first < 0xC0 or 0xD9 <= first <= 0xDB:
            return self._text(length, at)
        if 0xC4 <= first <= 0xC6:
            return self.skip(length)
        if 0xC7 <= first <= 0xC9:
            return self._extension(length, at, level)
        if first < 0x90 or first in (0xDE, 0xDF):
            return self._map(length, level)
        return [self.value(level + 1) for _ in range(length)]

    def _map(self, length: int, level: int) -> object:
        made: dict[str, object] = {}
        for _ in range(length):
            at = self.at
            key = self.value(level + 1)
            if not isinstance(key, (str, int)):
                raise DamagedFile("a name in a mapping is not text", path=self.source.name, offset=at)
            if str(key) in made:
                raise DamagedFile(f"a mapping has {key!r} twice", path=self.source.name, offset=at)
            made[str(key)] = self.value(level + 1)
        return self._joined(made) if CHUNKED in made else made

    def _joined(self, stated: Mapping[str, object]) -> PackedArray:
        """Return the one array of a mapping that holds it in chunks."""
        shape, chunks = stated.get("shape"), stated.get("chunks")
        parts = _in_order(chunks)
        sizes = [size for size in _in_order(shape) if isinstance(size, int) and size >= 0]
        arrays = [part for part in parts if isinstance(part, PackedArray)]
        same = len({part.dtype for part in arrays}) == 1 and len(arrays) == len(parts)
        if not same or len(sizes) != len(_in_order(shape)):
            raise DamagedFile("the chunks of an array are not as flax writes them", path=self.source.name)
        return PackedArray(arrays[0].dtype, tuple(sizes), concatenated([part.data for part in arrays]))

    def _extension(self, length: int, at: int, level: int) -> object:
        kind = self.take(1)[0]
        end = self.at + length
        if kind not in (1, 2, 3):
            raise DamagedFile(f"flax writes no extension type {kind}", path=self.source.name, offset=at)
        made = self.value(level + 1)
        if self.at != end or not isinstance(made, list):
            raise DamagedFile("an array has more or fewer bytes than it states", path=self.source.name, offset=at)
        if kind == 2:
            return repr(made)
        match made:
            case [list() as shape, str() as dtype, ByteRange() as data]:
                sizes = tuple(size for size in shape if isinstance(size, int) and not isinstance(size, bool))
                if len(sizes) == len(shape) and all(size >= 0 for size in sizes):
                    return PackedArray(dtype, sizes, data)
        raise DamagedFile("an array is not as flax writes it", path=self.source.name, offset=at)

    def _text(self, length: int, at: int) -> str:
        if length > MOST_TEXT:
            raise Unsupported(f"a text of {length:,} bytes is too long", path=self.source.name, offset=at)
        return self.take(length).decode("utf-8", "backslashreplace")


def _in_order(numbered: object) -> list[object]:
    """Return the values of ``{"0": a, "1": b}``; empty for anything else."""
    if not isinstance(numbered, dict) or any(str(i) not in numbered for i in range(len(numbered))):
        return []
    return [numbered[str(i)] for i in range(len(numbered))]


def _leaves(value: object, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], object]]:
    """Yield the path and the value of everything that is neither a mapping nor a list with arrays."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    elif isinstance(value, list) and any(isinstance(item, (dict, list, PackedArray)) for item in value):
        for i, item in enumerate(value):
            yield from _leaves(item, (*path, str(i)))
    else:
        yield path, value


def score(path: str, head: bytes, size: int) -> int:
    """Return 80 for a MessagePack mapping of text whose first array or end is as flax writes it."""
    if not mapped(Beginning(path, head, size)):
        return 0
    if b"\x93" not in head and size > len(head):
        return 0
    try:
        with open_source(path) as source:
            root = _Reader(source).value()
    except Truncated:
        # A cut file is one of flax if an array precedes the cut: its header names a dtype.
        return 60 if any(b"\xa0"[0] + len(name) in head and name.encode() in head for name in DTYPES) else 0
    except CkptfixError:
        return 0
    return 80 if any(isinstance(value, PackedArray) for _, value in _leaves(root, ())) else 0


def read(path: str) -> Checkpoint:
    """Read names, shapes and places; see the contract in `base`.

    Raises:
        DamagedFile: it is not MessagePack as flax writes it.
        Truncated: the file ends inside a value.
    """
    with open_source(path) as source:
        size = source.size
        reader = _Reader(source)
        root = reader.value()
        if reader.at < size:
            raise DamagedFile(f"{size - reader.at} bytes follow the value", path=path, offset=reader.at)
    arrays: list[Array] = []
    values: dict[str, object] = {}
    findings: list[Finding] = []
    optimizers: set[str] = set()
    others: dict[str, FileVersion] = {}
    for where, value in _leaves(root, ()):
        at = where[0] if len(where) > 1 and where[0] in OPTIMIZER else ""
        key = ".".join(where[1:] if at else where)
        if isinstance(value, PackedArray):
            optimizers |= {at} if at else set()
            if value.dtype in DTYPES:
                arrays.append(Array(key, value.dtype, value.shape, value.data, at=at))
            else:
                arrays.append(Array(key, None, (value.data.length,), value.data, kind=value.dtype[:40], at=at))
        elif isinstance(value, ByteRange):
            values[join(at, key)] = f"{value.length} bytes"
        elif isinstance(value, str) and value.startswith(ELSEWHERE):
            try:
                beside, files = _beside(path, value.removeprefix(ELSEWHERE), key, at)
            except DamagedFile as error:
                findings.append(found("bad-tensor", error.message, where=join(at, key)))
                continue
            others |= {one.path: one for one in files}
            if isinstance(beside, Array):
                optimizers |= {at} if at else set()
                arrays.append(beside)
            else:
                values[join(at, key)] = beside
        else:
            values[join(at, key)] = value
    return checkpoint_of(
        path, NAME, size, arrays, traits={}, values=values, findings=findings, optimizer=tuple(optimizers),
        others=tuple(others.values()),
    )  # fmt: skip


def _beside(path: str, name: str, key: str, at: str) -> tuple[object, tuple[FileVersion, ...]]:
    """Return the array that a tree of an older orbax names, or the value of a number, and the files that it is in.

    Raises:
        DamagedFile: it cannot be read, or nothing is installed that reads it.
    """
    from ckptfix.formats.arrays import orbax

    if not is_local(path):
        raise DamagedFile("its array is in a folder beside this file, which is read only where it is a local file")
    if not orbax.available():
        raise DamagedFile("its array is in a folder beside this file: pip install 'ckptfix[orbax]' to read it")
    return orbax.array_beside(path, name, key, at)


FORMAT = read_only(NAME, "Flax checkpoint (MessagePack)", score, read)
