"""The tensors of a file as torch sees them, whatever ckptfix says: the judge of the weight audit.

`tensors(path)` lists every tensor of a checkpoint with its address and its bytes. Nothing here uses ckptfix's own
reading, and no class that a file names is imported: each is an inert stub, whose arguments, state, items and attributes
are searched.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import re
import tarfile
import tempfile
import types
import warnings
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

__all__ = ["Leaf", "Truth", "Unreadable", "of_object", "tensors"]

TIE_KEYS = {"format", "ckptfix.order", "ckptfix.views"}


class Unreadable(Exception):
    """Torch cannot read it, even with every class a stub."""


@dataclass(frozen=True, slots=True, order=True)
class Leaf:
    """One dense tensor: shape, dtype (with what else its values need, as a scale), and a digest of its elements."""

    shape: tuple[int, ...]
    dtype: str
    digest: str

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)} {self.digest[:8]}"


@dataclass(slots=True)
class Truth:
    """What a file holds.

    Attributes:
        found: (address, leaf), an alias once for each address.
        places: address -> where its first element is in memory, and its strides: aliases have one in common.
        storages: distinct storages with bytes, over all tensors that torch gave with one.
        arrays: numpy arrays, which sanitize makes tensors of.
        ordered: `found` has the order of the file; the safetensors package does not give it.
    """

    found: list[tuple[str, Leaf]] = field(default_factory=list)
    places: dict[str, tuple[object, ...]] = field(default_factory=dict)
    storages: int = 0
    arrays: int = 0
    ordered: bool = True

    @property
    def leaves(self) -> Counter[Leaf]:
        return Counter(leaf for _, leaf in self.found)

    @property
    def apart(self) -> Counter[Leaf]:
        """The same with aliases once: what has to be somewhere, if not under each of its names."""
        once = {(leaf, self.places.get(address, (address,))) for address, leaf in self.found}
        return Counter(leaf for leaf, _ in once)

    @property
    def distinct(self) -> int:
        """Tensors with elements that lie in different places."""
        return len({place for address, place in self.places.items() if place[1]})

    def addresses(self, leaf: Leaf) -> list[str]:
        return [address for address, other in self.found if other == leaf]

    def listed_as(self, address: str, addresses: list[str]) -> list[str]:
        """Those of `addresses` under which that is listed: an attribute of a tensor of several names, under one."""
        holders = {one: self.places.get(one.rpartition("/")[0]) for one in (address, *addresses)}
        return [one for one in addresses if one == address or None is not holders[one] == holders[address]]

    def under(self, at: str) -> list[tuple[str, Leaf]]:
        """What lies in the mapping at an address, at any depth; everything for the address ''."""
        return [row for row in self.found if not at or row[0].startswith(f"{at}/")]


class Stub:
    """Stands for a class that is not imported: keeps what it was called with, and what was set on it."""

    label = "?"

    def __new__(cls, *args: Any, **keywords: Any) -> Stub:
        self = object.__new__(cls)
        self.__dict__["stub_args"] = args
        self.__dict__["stub_items"] = []
        return self

    def __init__(self, *args: Any, **keywords: Any) -> None:
        pass

    def __call__(self, *args: Any, **keywords: Any) -> Stub:
        return Stub(self, *args)

    def __setstate__(self, state: Any) -> None:
        self.__dict__["stub_state"] = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.__dict__["stub_items"].append((key, value))

    def append(self, value: Any) -> None:
        self.__dict__["stub_items"].append((len(self.__dict__["stub_items"]), value))

    def extend(self, values: Any) -> None:
        for value in values:
            self.append(value)

    def add(self, value: Any) -> None:
        self.append(value)

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


_stubs: dict[str, type[Stub]] = {}


def stub(name: str) -> type[Stub]:
    if name not in _stubs:
        _stubs[name] = type(name.rpartition(".")[2] or "Stub", (Stub,), {"label": name})
    return _stubs[name]


def _attribute(owner: Any, name: str) -> type[Stub]:
    """``getattr`` in a pickle: a class's method or a member, by its name."""
    return stub(f"{getattr(owner, 'label', type(owner).__name__)}.{name}")


def _from_type(call: Any, kind: Any, args: Any, state: Any) -> Any:
    """``_rebuild_from_type_v2``: a tensor with attributes; of a class of its own only the parts are known."""
    if isinstance(call, type) and issubclass(call, Stub):
        return call(*args, state)
    return _with_state(call(*args), state)


def _with_state(tensor: torch.Tensor, state: Any) -> torch.Tensor:
    rows = state if isinstance(state, tuple) else (state,)
    for row in rows:
        if isinstance(row, dict):
            vars(tensor).update(row)
        elif row is not None:
            vars(tensor)["state"] = row
    return tensor


def _parameter_with_state(data: torch.Tensor, requires_grad: bool, hooks: Any, state: Any) -> torch.Tensor:
    return _with_state(data.detach(), state)


OURS = {
    ("builtins", "getattr"): _attribute,
    ("torch._tensor", "_rebuild_from_type_v2"): _from_type,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter_with_state,
}

REAL = {
    "torch._utils": {
        "_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter", "_rebuild_qtensor",
        "_rebuild_sparse_tensor", "_rebuild_sparse_csr_tensor", "_rebuild_nested_tensor",
        "_rebuild_device_tensor_from_numpy", "_rebuild_device_tensor_from_cpu_tensor",
        "_rebuild_meta_tensor_no_storage",
    },
    "torch.serialization": {"_get_layout"},
    "torch.storage": {"UntypedStorage", "TypedStorage"},
    "torch": {"device", "Size", "Tensor"},
    "collections": {"OrderedDict", "defaultdict", "Counter", "deque"},
    "_codecs": {"encode"},
    "builtins": {
        "set", "frozenset", "list", "dict", "tuple", "bytearray", "complex", "slice", "range", "object", "bytes", "int",
        "float", "str", "bool",
    },
}  # fmt: skip
"""What a stub could not stand for: it makes the tensors and containers themselves."""


def _is_torch_value(name: str) -> bool:
    value = getattr(torch, name, None)
    return isinstance(value, torch.dtype | torch.qscheme) or name.endswith("Storage") or name in REAL["torch"]


class Inert(pickle.Unpickler):
    """Resolves what makes tensors, containers and numpy arrays; the rest are stubs."""

    def find_class(self, module: str, name: str) -> Any:
        module = {"__builtin__": "builtins"}.get(module, module)
        if module == "torch" and _is_torch_value(name) and "." not in name:
            return getattr(torch, name)
        if (module, name) in OURS:
            return OURS[module, name]
        if name in REAL.get(module, ()) or module.partition(".")[0] == "numpy":
            return super().find_class(module, name)
        return stub(f"{module}.{name}")


def _inert_load(file: Any, **keywords: Any) -> Any:
    return Inert(file, **keywords).load()


INERT: Any = types.ModuleType("inert")
INERT.Unpickler, INERT.load = Inert, _inert_load


def tensors(path: Path, *, trusted: bool) -> Truth:
    """Every tensor of the file or folder at `path`.

    Args:
        trusted: it is of our own making. Others are read with ``weights_only=True`` only, or by `Inert` alone.

    Raises:
        Unreadable: torch does not read it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if path.is_dir():
            return _of_folder(path)
        head = path.read_bytes()[:16]
        if head[8:9] == b"{":
            return _of_safetensors(path)
        if path.suffix == ".distcp":
            return _of_part(path)
        if head[:2] == b"\x1f\x8b":
            return _of_tar(path)
        try:
            if _is_script(path):
                return of_object(_script(path))
            return of_object(_load_trusted(path) if trusted else _load_safely(path))
        except Exception as error:
            raise Unreadable(f"{path.name}: {type(error).__name__}: {error}") from error


def _load_trusted(file: Path | io.BytesIO) -> Any:
    return torch.load(file, map_location="cpu", weights_only=False, pickle_module=INERT)


def _load_safely(path: Path) -> Any:
    """``weights_only=True`` with stubs for the classes that it asks for, one after the other."""
    allowed: dict[str, Any] = {}
    while True:
        with torch.serialization.safe_globals([(value, name) for name, value in allowed.items()]):
            try:
                return torch.load(path, map_location="cpu", weights_only=True)
            except pickle.UnpicklingError as error:
                text = str(error)
                if "got module" in text or "persistent_load" in text:
                    return _legacy_through_stubs(path)
                asked = re.search(r"GLOBAL (\S+) was not an allowed global", text)
                if asked is None or asked[1] in allowed:
                    raise
                allowed[asked[1]] = stub(asked[1])


def _storage(data: bytes, dtype: Any) -> Any:
    """A storage as the rebuild calls take it."""
    raw: Any = torch.UntypedStorage(len(data))  # type: ignore[no-untyped-call]
    if data:
        raw.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8).untyped_storage())
    return torch.storage.TypedStorage(  # type: ignore[no-untyped-call]
        wrap_storage=raw, dtype=dtype, _internal=True
    )


def _dtype(storage_class: Any) -> torch.dtype:
    return storage_class.dtype if hasattr(storage_class, "dtype") else torch.uint8


def _legacy_through_stubs(path: Path) -> Any:
    """A legacy file that holds the source text of its classes, which ``weights_only`` refuses."""
    sizes: dict[str, tuple[Any, int]] = {}
    made: dict[str, Any] = {}

    class Reader(Inert):
        def persistent_load(self, pid: Any) -> Any:
            if pid[0] == "module":
                return pid[1]
            _, kind, key, _, count, view = pid
            assert view is None
            sizes[key] = kind, count
            if key not in made:
                made[key] = _storage(bytes(count * _dtype(kind).itemsize), _dtype(kind))
            return made[key]

    with open(path, "rb") as file:
        for _ in range(3):
            Inert(file).load()
        value = Reader(file).load()
        for key in Inert(file).load():
            count = int.from_bytes(file.read(8), "little")
            kind, wanted = sizes[key]
            assert count == wanted
            data = file.read(count * _dtype(kind).itemsize)
            if data:
                target = made[key]._untyped_storage
                target.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8).untyped_storage())
    return value


def _is_script(path: Path) -> bool:
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(name.endswith("/constants.pkl") for name in archive.namelist())


def _script(path: Path) -> Any:
    """Both pickles of a TorchScript archive, through stubs."""
    with zipfile.ZipFile(path) as archive:
        root = archive.namelist()[0].partition("/")[0]
        found = {}
        for part, folder in (("data.pkl", "data"), ("constants.pkl", "constants")):
            made: dict[str, Any] = {}

            class Reader(Inert):
                def persistent_load(
                    self, pid: Any, folder: str = folder, made: dict[str, Any] = made
                ) -> Any:
                    _, kind, key, _, _ = pid
                    if key not in made:
                        made[key] = _storage(archive.read(f"{root}/{folder}/{key}"), _dtype(kind))
                    return made[key]

            found[folder] = Reader(io.BytesIO(archive.read(f"{root}/{part}"))).load()
    return found["data"] if not _count(found["constants"]) else found


def _count(value: Any) -> int:
    return len(of_object(value).found)


def _of_tar(path: Path) -> Truth:
    """A packed folder with one checkpoint in it, as AllenNLP's model.tar.gz."""
    with tarfile.open(path) as archive, tempfile.TemporaryDirectory() as folder:
        inside = [member for member in archive.getmembers() if member.name.endswith((".th", ".pt", ".pth", ".bin"))]
        if len(inside) != 1:
            raise Unreadable(f"{path.name}: {len(inside)} checkpoints in it")
        data = archive.extractfile(inside[0])
        assert data is not None
        copy = Path(folder, "inside")
        copy.write_bytes(data.read())
        return of_object(_load_safely(copy))


def _of_safetensors(path: Path) -> Truth:
    """As the safetensors package reads it, and the names that its metadata ties to another."""
    found: dict[str, torch.Tensor] = {}
    with safe_open(path, "pt") as file:
        metadata: dict[str, str] = file.metadata() or {}
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    ties = {
        name: found[kept]
        for name, kept in metadata.items()
        if name not in TIE_KEYS and name not in found and kept in found
    }
    truth = of_object({**found, **ties})
    truth.ordered = False
    return truth


def _of_folder(path: Path) -> Truth:
    """A distributed checkpoint, by torch's own reader; or the shards that an index lists."""
    if (path / ".metadata").exists():
        from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

        state: dict[str, Any] = {}
        planner = _EmptyStateDictLoadPlanner()  # type: ignore[no-untyped-call]
        _load_state_dict(
            state, storage_reader=FileSystemReader(path), planner=planner, no_dist=True
        )
        return of_object(state)
    indexes = sorted(path.glob("*.index.json"))
    if not indexes and (path / "model.safetensors").exists():
        return tensors(path / "model.safetensors", trusted=True)
    if not indexes:
        raise Unreadable(f"{path.name}: no folder that torch reads")
    whole = Truth()
    for shard in sorted(set(json.loads(indexes[0].read_text())["weight_map"].values())):
        one = tensors(path / shard, trusted=True)
        whole.found += one.found
        whole.storages += one.storages
        whole.ordered = whole.ordered and one.ordered
    return whole


def _of_part(path: Path) -> Truth:
    """A file of a distributed checkpoint: one torch archive after another, which the folder's .metadata places."""
    metadata = path.parent / ".metadata"
    if not metadata.exists():
        raise Unreadable(f"{path.name}: no .metadata beside it")
    with open(metadata, "rb") as file:
        known = pickle.load(file)
    data = path.read_bytes()
    items = {}
    for index, place in known.storage_data.items():
        if place.relative_path == path.name:
            offset = "" if index.offset is None else f"@{tuple(index.offset)}"
            part = io.BytesIO(data[place.offset : place.offset + place.length])
            items[f"{index.fqn}{offset}"] = _load_trusted(part)
    return of_object(items)


def of_object(value: Any) -> Truth:
    """Every tensor in an object, by walking whatever holds others."""
    truth = Truth()
    storages: set[int] = set()
    kept: list[Any] = []
    for address, tensor in _walk(value, "", set()):
        if isinstance(tensor, np.ndarray):
            truth.arrays += 1
            continue
        for name, dtype, dense in _dense_parts(tensor):
            truth.found.append((f"{address}{name}", Leaf(tuple(dense.shape), dtype, _digest(dense))))
            kept.append(dense)  # or its memory would be another's
            truth.places[f"{address}{name}"] = _place(dense)
            if dense.device.type != "meta" and dense.untyped_storage().nbytes() and not name:
                storages.add(dense.untyped_storage().data_ptr())
    truth.storages = len(storages)
    return truth


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    start = 0 if tensor.device.type == "meta" or not tensor.numel() else tensor.data_ptr()
    return (start or id(tensor), tensor.numel() if start else 0, tuple(tensor.shape), tuple(tensor.stride()))


def _walk(value: Any, address: str, path: set[int]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.Tensor):
        yield address, value
        yield from _walk(vars(value), address, path) if vars(value) else ()
        return
    if isinstance(value, torch.UntypedStorage | torch.storage.TypedStorage):
        raw: Any = value
        raw = raw if isinstance(value, torch.UntypedStorage) else raw.untyped()
        yield address, torch.empty(0, dtype=torch.uint8).set_(raw)
        return
    if isinstance(value, np.ndarray) and value.dtype != object:
        yield address, value
        return
    if isinstance(value, Stub) and value.label.startswith("numpy.") and value.label.endswith("._reconstruct"):
        yield address, np.empty(0)
        return
    if isinstance(value, str | bytes | int | float | complex | type(None) | torch.dtype | torch.device | type):
        return
    if id(value) in path:
        return
    path.add(id(value))
    for key, item in _items(value):
        yield from _walk(item, f"{address}/{key}" if address else str(key), path)
    path.discard(id(value))


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    """What an object holds: items, attributes, slots, and what a stub was given."""
    if isinstance(value, Stub):
        own = dict(vars(value))
        yield from enumerate(own.pop("stub_args", ()))
        yield from own.pop("stub_items", ())
        state = own.pop("stub_state", None)
        yield from own.items()
        if isinstance(state, dict):
            yield from state.items()
        elif isinstance(state, tuple) and len(state) == 2 and all(isinstance(row, dict | None) for row in state):
            for row in state:
                yield from (row or {}).items()
        elif state is not None:
            yield "state", state
        return
    if isinstance(value, dict):
        for key, item in value.items():
            yield key, item
            if not isinstance(key, str | int | float | bool | type(None)):
                yield f"key {type(key).__name__}", key
    elif isinstance(value, list | tuple | set | frozenset) or type(value).__name__ == "deque":
        yield from enumerate(value)
    elif isinstance(value, np.ndarray):
        yield from enumerate(value.ravel().tolist())
    if hasattr(value, "__dict__"):
        yield from vars(value).items()
    for base in type(value).__mro__:
        names = base.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)


def _dense_parts(tensor: torch.Tensor) -> Iterator[tuple[str, str, torch.Tensor]]:
    """(suffix of the address, dtype with what the values need, dense tensor)."""
    tensor = tensor.detach()
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.is_quantized:
        if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            dtype += f" scale={tensor.q_scale()!r} zero_point={tensor.q_zero_point()}"
            yield "", dtype, tensor.int_repr()
        else:
            yield "", f"{dtype} axis={tensor.q_per_channel_axis()}", tensor.int_repr()
            yield ":scales", "float64", tensor.q_per_channel_scales()
            yield ":zero_points", "zero_points", tensor.q_per_channel_zero_points()
    elif tensor.is_nested:
        for index, part in enumerate(tensor.unbind()):
            yield f":{index}", dtype, part
    elif tensor.layout is torch.sparse_coo:
        yield ":indices", f"{tensor.dtype} indices of {list(tensor.shape)}", tensor._indices()
        yield ":values", dtype, tensor._values()
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield ":crow", f"{tensor.dtype} rows of {list(tensor.shape)}", tensor.crow_indices()
        yield ":col", "columns", tensor.col_indices()
        yield ":values", dtype, tensor.values()
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield ":ccol", f"{tensor.dtype} columns of {list(tensor.shape)}", tensor.ccol_indices()
        yield ":row", "rows", tensor.row_indices()
        yield ":values", dtype, tensor.values()
    else:
        yield "", dtype, tensor


def _digest(tensor: torch.Tensor) -> str:
    if tensor.device.type == "meta":
        return "meta"
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if not plain.numel():
        return "empty"
    raw = torch.empty(0, dtype=torch.uint8).set_(plain.untyped_storage())
    start = plain.storage_offset() * plain.element_size()
    data = raw[start : start + plain.numel() * plain.element_size()]
    return hashlib.blake2b(data.numpy().tobytes(), digest_size=16).hexdigest()
