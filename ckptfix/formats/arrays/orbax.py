"""Folders that orbax writes, the checkpoints of JAX: an item, or a step with several items.

::

    STEP/_CHECKPOINT_METADATA            of a step; the items are folders in it
    ITEM/_METADATA                       the tree: {"tree_metadata": {"('params', 'w')": {"key_metadata", ...}, ...},
                                         "use_ocdbt": true, "use_zarr3": false}
    ITEM/manifest.ocdbt, d/              all arrays in one store, OCDBT
    ITEM/params.w/.zarray or zarr.json   without OCDBT, a folder for each array

An array is in zarr format in chunks, which zstd compresses. The package tensorstore reads them, chunk by chunk: it is
the extra orbax. The code of an item's handler, which the metadata names, is never imported.
Sources: orbax/checkpoint/_src/metadata/tree.py and _src/serialization/tensorstore_utils.py.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any

from ckptfix.checkpoint import ByteRange, Checkpoint, Derived, FileVersion, dtypes
from ckptfix.checkpoint.address import join
from ckptfix.dataclass import dataclass
from ckptfix.errors import BadIndex, DamagedFile
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.formats.arrays.common import Array, checkpoint_of, read_only
from ckptfix.formats.folders.safe_paths import file_inside
from ckptfix.formats.signs import Beginning, named
from ckptfix.io.source import is_file, is_local, mark, open_source
from ckptfix.urls import as_path, scan_folder

NAME = "orbax"

TREE = "_METADATA"
"""The file of an item that lists its arrays."""

STEP = "_CHECKPOINT_METADATA"
"""The file of a step, whose items are the folders in it."""

STORE = "manifest.ocdbt"
"""The file of a store that holds all arrays."""

OPTIMIZER = ("opt_state", "optimizer_state", "opt")
"""Names at the top of a tree that hold the state of an optimizer, as flax's TrainState and MaxText call it."""

MOST_TREE = 1 << 28
"""The limit in bytes of a list of arrays."""

MOST_CHUNK = 1 << 34
"""The limit in bytes of a chunk: it is in memory while it is read."""

BLOCK = 1 << 24
"""Bytes of an array that are read at once, at least a row of chunks."""

_NOTHING = ("None", "Dict", "List", "Tuple", "NamedTuple")
"""Kinds of values without content of their own."""


def available() -> bool:
    """Return whether the package tensorstore is installed."""
    return find_spec("tensorstore") is not None


def is_orbax(path: str) -> bool:
    """Return whether a folder is an item or a step of orbax."""
    return named("_metadata")(Beginning(path, b"", 0)) and bool(_items(path))


def _items(path: str) -> dict[str, str]:
    """Return name -> folder of the items of a step; a folder that is an item has the name ``""``."""
    if not is_local(path):
        return {}
    if is_file(as_path(path, TREE)):
        return {"": path}
    if not is_file(as_path(path, STEP)):
        return {}
    with scan_folder(path) as rows:
        names = sorted(row.name for row in rows if row.is_dir(follow_symlinks=False))
    return {name: str(as_path(path, name)) for name in names if is_file(as_path(path, name, TREE))}


def score(path: str, head: bytes, size: int) -> int:
    """Return 90 for a folder that orbax wrote, if tensorstore is installed."""
    return 90 if not head and not size and available() and is_orbax(path) else 0


@dataclass(frozen=True, slots=True)
class _Stored:
    """An array or number of an item.

    Attributes:
        where: its keys from the top of the tree.
        kind: what the tree says that it is, such as ``jax.Array`` or ``scalar``.
    """

    where: tuple[str, ...]
    kind: str


def _tree(folder: str) -> tuple[list[_Stored], Mapping[str, Any]]:
    """Return what an item holds, and its other metadata.

    Raises:
        BadIndex: the list is not as orbax writes it.
    """
    place = str(as_path(folder, TREE))
    with open_source(place) as source:
        if source.size > MOST_TREE:
            raise BadIndex(f"the list of arrays has {source.size:,} bytes, which is too many", path=place)
        text = source.read(0, source.size)
    try:
        stated = json.loads(text)
        stored = [
            _Stored(tuple(str(key["key"]) for key in row["key_metadata"]), str(row["value_metadata"]["value_type"]))
            for row in stated["tree_metadata"].values()
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadIndex(f"it is not a tree of orbax ({type(error).__name__})", path=place) from None
    return stored, stated


def _spec(folder: str, stated: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return how tensorstore opens an array."""
    folder = as_path(folder).as_posix()  # tensorstore refuses a double slash
    driver = "zarr3" if stated.get("use_zarr3") is True else "zarr"
    if stated.get("use_ocdbt") is True:
        base = {"driver": "file", "path": f"{folder}/"}
        return {"driver": driver, "kvstore": {"driver": "ocdbt", "base": base, "path": f"{name}/"}}
    return {"driver": driver, "kvstore": {"driver": "file", "path": f"{folder}/{name}/"}}


def _opened(spec: Mapping[str, Any], shown: str) -> Any:
    """Open an array.

    Raises:
        DamagedFile: tensorstore cannot.
    """
    import tensorstore

    try:
        return tensorstore.open(dict(spec), open=True, read=True).result()
    except (ValueError, OSError, RuntimeError, KeyError) as error:
        raise DamagedFile(f"tensorstore cannot open {shown}: {_first_line(error)}") from None


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0].partition(" [")[0][:200]


def read(path: str) -> Checkpoint:
    """Read names, shapes and values of a folder; see the contract in `base`.

    Raises:
        BadIndex: a list of arrays is not as orbax writes it.
        DamagedFile: a link in it leads out of the folder.
    """
    files = tuple(_files(path))
    arrays: list[Array] = []
    values: dict[str, object] = {}
    findings: list[Finding] = []
    items = _items(path)
    optimizers: set[str] = set()
    for item, folder in items.items():
        stored, stated = _tree(folder)
        alone = item if len(items) > 1 else ""
        for row in stored:
            top = row.where[0] if len(row.where) > 1 and row.where[0] in OPTIMIZER else ""
            at = join(alone, top) if top else alone
            key = ".".join(row.where[1:] if top else row.where)
            if row.kind in _NOTHING:
                continue
            try:
                made = _array(folder, stated, row, key, at, str(as_path(folder, TREE)))
            except DamagedFile as error:
                findings.append(found("bad-tensor", error.message, where=join(at, key)))
                continue
            if isinstance(made, Array):
                arrays.append(made)
                optimizers |= {at} if top else set()
            else:
                values[join(at, key)] = made
    return checkpoint_of(
        path, NAME, 0, arrays, traits={"items": len(items)} if len(items) > 1 else {},
        findings=findings, values=values, optimizer=tuple(optimizers), others=files,
    )  # fmt: skip


def _files(path: str) -> Iterator[FileVersion]:
    """Yield all files of the folder.

    Raises:
        DamagedFile: one of them, or a folder, is a link that leads out: tensorstore would follow it.
    """
    for folder, inside, names in sorted(os.walk(path)):
        links = [name for name in inside if as_path(folder, name).is_symlink()]
        if links:
            message = f"the folder {links[0]!r} in it is a link, which is not followed"
            raise DamagedFile(message, path=folder, hint="if the folder is yours, replace the link by a copy of it")
        for name in sorted(names):
            yield mark(file_inside(path, as_path(folder, name).relative_to(path).as_posix(), where=path))


def array_beside(tree: str, name: str, key: str, at: str) -> tuple[Array | object, tuple[FileVersion, ...]]:
    """Return an array that orbax, until 2023, stored beside the file `tree`, and the files that it is in.

    Args:
        name: the folder of the array, or its name in the one store of all arrays.

    Raises:
        DamagedFile: it is not there, or cannot be read.
    """
    folder = str(as_path(tree).parent.absolute())
    one_store = is_file(as_path(folder, STORE))
    _refuse_name(name)
    inside = as_path(folder) if one_store else as_path(folder, name)
    if inside.is_symlink() or not inside.is_dir():
        raise DamagedFile("the folder of its array is not beside this file")
    files = tuple(_files(str(inside)))
    made = _array(folder, {"use_ocdbt": one_store}, _Stored(tuple(name.split(".")), "jax.Array"), key, at, tree)
    return made, tuple(one for one in files if not as_path(one.path).samefile(tree))


def _refuse_name(name: str) -> None:
    if any(part in name for part in ("/", "\\", "\0")) or name in ("", ".", ".."):
        raise DamagedFile("its name leads out of the folder")


def _array(
    folder: str, stated: Mapping[str, Any], row: _Stored, key: str, at: str, tree: str
) -> Array | object:
    """Return an array, or the value of a number.

    Args:
        tree: the file that names it.

    Raises:
        DamagedFile: tensorstore cannot open it, or nobody can read it.
    """
    name = ".".join(row.where)
    _refuse_name(name)
    spec = _spec(folder, stated, name)
    store = _opened(spec, name)
    shape = tuple(int(size) for size in store.shape)
    kind = store.dtype.name
    itemsize = store.dtype.numpy_dtype.itemsize if kind not in ("string", "ustring", "json") else 0
    if not itemsize:
        raise DamagedFile("it holds text, and is not a tensor")
    if not shape and row.kind == "scalar":
        number: object = store.read().result().item()
        return number
    chunk = [int(size) for size in store.chunk_layout.read_chunk.shape or ()]
    held = math.prod(chunk) * itemsize
    if held > MOST_CHUNK:
        raise DamagedFile(f"one of its chunks has {held:,} bytes, which is more than is read at once")
    nbytes = math.prod(shape) * itemsize
    data = Derived(nbytes, partial(_chunks, spec, name, nbytes), "zarr", (ByteRange(tree, 0, mark(tree).stamp.size),))
    if dtypes.find(kind) is None:
        return Array(key, None, (nbytes,), data, kind=kind, at=at)
    return Array(key, kind, shape, data, at=at)


def _chunks(spec: Mapping[str, Any], name: str, nbytes: int) -> Iterator[bytes]:
    """Yield the bytes of an array, some rows of chunks at a time."""
    store = _opened(spec, name)
    try:
        if not store.shape:
            yield store.read().result().tobytes()
            return
        rows = int(store.shape[0])
        chunk = max(int(store.chunk_layout.read_chunk.shape[0]), 1)
        step = max(BLOCK * rows // max(nbytes, 1) // chunk, 1) * chunk
        for first in range(0, rows, step):
            yield store[first : min(first + step, rows)].read().result().tobytes()
    except (ValueError, OSError, RuntimeError) as error:
        raise DamagedFile(f"tensorstore cannot read {name}: {_first_line(error)}") from None


FORMAT = read_only(NAME, "orbax checkpoint (JAX)", score, read, folder=True)
