"""Making torch tensors from the entries of a checkpoint, in their own memory or on a map of the file.

torch is imported inside the functions, so that the rest of ckptfix starts without it.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from ckptfix.checkpoint import ByteRange, Checkpoint, Data, Derived, RangeCheck, Storage, TensorEntry, dtypes
from ckptfix.checkpoint.byte_ranges import in_one_piece
from ckptfix.checkpoint.tensors import reach
from ckptfix.commands import quoted
from ckptfix.errors import CkptfixError, DamagedFile, Refused, Unsupported
from ckptfix.formats.torch.common import element_sizes, little_endian
from ckptfix.formats.torch.tensors import KINDS, LAYOUTS
from ckptfix.formats.torch.zip import archive_of
from ckptfix.io import background_checks
from ckptfix.io.checksums import Checksums, crc32_on
from ckptfix.io.source import open_source, refuse_changed, stamp, truncated
from ckptfix.io.virtual_files import checks_of, is_spliced
from ckptfix.loaders.reading import Differs, Fill, Progress, Reading

if TYPE_CHECKING:
    import torch

    Restore = Callable[[torch.UntypedStorage, str], torch.UntypedStorage | None]
    Move = Callable[[torch.UntypedStorage, str], torch.UntypedStorage]
    MapLocation = str | torch.device | Mapping[str, str] | Restore | None


class TensorMaker:
    """Maker of the tensors of one checkpoint. Each storage is made once, so ties are kept.

    Args:
        restore: moves a CPU storage to the device that its location tag names; see `restore_location`.
        warn: warn, once, when a tensor subclass becomes a plain tensor. Code that only copies the values can skip it.
        verify: compare the bytes of each storage with the CRC-32 stored in the file.
        mmap: map the file for storages whose bytes torch can use in place.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        restore: Move,
        *,
        warn: bool = False,
        verify: bool = False,
        mmap: bool = False,
    ) -> None:
        self.checkpoint = checkpoint
        self.verify = verify
        self.mmap = mmap
        self.reading = Reading(checkpoint)
        self.verified: set[tuple[str, str]] = set()
        self.warn = warn
        self.restore = restore
        self.units = element_sizes(checkpoint) if checkpoint.byteorder == "big" else {}
        self.storages: dict[tuple[str, str], torch.UntypedStorage] = {}
        self.maps: dict[str, torch.UntypedStorage | None] = {}
        self.copied: set[tuple[str, str]] = set()

    def looking(self, restore: Move, *, mmap: bool = False) -> TensorMaker:
        """Return a maker of tensors to look at. Both makers read from the same version, and verify a record once."""
        made = TensorMaker(self.checkpoint, restore, verify=self.verify, mmap=mmap)
        made.reading, made.verified = self.reading, self.verified
        return made

    def __call__(self, entry: TensorEntry) -> torch.Tensor:
        """Return the tensor of `entry`.

        Raises:
            Unsupported: only the library that wrote it can rebuild it.
            DamagedFile: torch cannot represent such a tensor.
        """
        return self._made(entry, self.make)

    def once(self, entry: TensorEntry) -> torch.Tensor:
        """Return the tensor of `entry` for copying, reading only its part of the storage. Raises as a call does."""
        return self._made(entry, self._part)

    def _made(self, entry: TensorEntry, make: Callable[[TensorEntry], torch.Tensor]) -> torch.Tensor:
        try:
            return make(entry)
        except CkptfixError as error:
            error.where = error.where or entry.name
            raise

    @contextmanager
    def _representing(self) -> Iterator[None]:
        """Let torch make a tensor from parts that were read.

        Raises:
            DamagedFile: torch cannot represent it.
        """
        try:
            yield
        except (RuntimeError, OverflowError, ValueError, TypeError, IndexError) as error:
            message = f"torch cannot represent this tensor: {str(error).splitlines()[0]}"
            raise DamagedFile(message, path=self.checkpoint.path) from error

    def make(self, entry: TensorEntry) -> torch.Tensor:
        load = KINDS[entry.kind].load
        if load is None:
            raise Unsupported(
                f"a {entry.kind} tensor ({entry.detail}), which only its own library can rebuild",
                path=self.checkpoint.path,
                where=entry.name,
            )
        tensor: torch.Tensor = load(self, entry)
        if self.warn and entry.kind == "dense" and _is_subclass(entry):
            self.warn = False
            message = f"{entry.name} is a {entry.detail}, which is not imported: it becomes a plain tensor"
            warnings.warn(message, stacklevel=caller())
        return self._as_saved(tensor, entry)

    def _as_saved(self, tensor: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
        import torch

        with self._representing():
            if entry.parameter:
                return torch.nn.Parameter(tensor, requires_grad=entry.requires_grad)
            return tensor.requires_grad_() if entry.requires_grad else tensor

    def dtype(self, entry: TensorEntry) -> torch.dtype:
        import torch

        dtype = getattr(torch, entry.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise Unsupported(f"this torch has no dtype {entry.dtype}", path=self.checkpoint.path, where=entry.name)
        return dtype

    def meta(self, entry: TensorEntry) -> torch.Tensor:
        import torch

        with self._representing():
            return torch.empty_strided(entry.shape, entry.stride, dtype=self.dtype(entry), device="meta")

    def dense(self, entry: TensorEntry) -> torch.Tensor:
        assert entry.storage is not None
        return self._on(self.storage(entry.storage, dtypes.by_name(entry.dtype).itemsize), entry)

    def _on(self, storage: torch.UntypedStorage, entry: TensorEntry) -> torch.Tensor:
        """Return the dense tensor of `entry` on `storage`."""
        import torch

        with self._representing():
            empty = torch.empty((0,), dtype=self.dtype(entry), device=storage.device)
            tensor = empty.set_(storage, entry.offset, entry.shape, entry.stride)
            marks = dict.fromkeys(entry.lazy, True)
            if marks:
                torch._utils.set_tensor_metadata(tensor, marks)
            return tensor

    def quantized(self, entry: TensorEntry) -> torch.Tensor:
        import torch

        scheme, *values = entry.detail.split(", ")
        parts = [self(part) for part in entry.parts]
        assert entry.storage is not None
        dtype = self.dtype(entry)
        storage = self.storage(entry.storage, entry.itemsize)
        shape, device = entry.shape, storage.device
        with self._representing():
            numbers = [_number(value) for value in values]
            if scheme.startswith("per_channel"):
                (scales, zero_points), (axis,) = parts, numbers
                empty = torch._empty_per_channel_affine_quantized(
                    shape, scales=scales, zero_points=zero_points, axis=int(axis), dtype=dtype, device=device
                )
            else:
                scale, zero_point = numbers
                empty = torch._empty_affine_quantized(
                    shape, scale=scale, zero_point=int(zero_point), dtype=dtype, device=device
                )
            tensor: torch.Tensor = empty.set_(storage, entry.offset, entry.shape, entry.stride)
            return tensor

    def sparse(self, entry: TensorEntry) -> torch.Tensor:
        import torch

        layout, _, coalesced = entry.detail.partition(", coalesced=")
        parts = [self(part) for part in entry.parts]
        with self._representing():
            if len(parts) == 2:
                ready = coalesced == "True" if coalesced else None
                return torch.sparse_coo_tensor(
                    *(parts[0], parts[1], entry.shape),
                    device=parts[1].device,
                    is_coalesced=ready,
                    check_invariants=True,
                )
            kind = getattr(torch, layout) if layout in LAYOUTS else None
            return torch.sparse_compressed_tensor(
                *(parts[0], parts[1], parts[2], entry.shape),
                device=parts[2].device,
                layout=kind,
                check_invariants=True,
            )

    def storage(self, storage: Storage, itemsize: int) -> torch.UntypedStorage:
        """Return the untyped storage on its device. Its address is a multiple of `itemsize`."""
        import torch

        made = self.storages.get(storage.identity)
        if made is None:
            if storage.data is None:  # a storage on the meta device has no bytes
                with self._representing():
                    made = self.storages[storage.identity] = torch.UntypedStorage(storage.nbytes, device="meta")
                return made
            lies = in_one_piece(storage.data)
            data = little_endian(lies, self.checkpoint.byteorder, self.units.get(storage.identity, itemsize))
            whole = self.mapped(data, itemsize) if self.mmap and isinstance(data, ByteRange) else None
            if whole is not None and self.verify:
                self.check_storage(storage)
            if whole is None:
                whole = self.read(storage, data, summed=data is lies)
                self.copied.add(storage.identity)
            made = self.storages[storage.identity] = self.moved(whole, storage.location)
        return made

    def read(self, storage: Storage, data: Data, *, summed: bool = True) -> torch.UntypedStorage:
        """Read the bytes `data` of a storage into new memory, and verify them with the checksums that cover them.

        Args:
            summed: `data` holds the bytes as in the file, so they are summed during the read. Otherwise they were
                converted, and the file's bytes are verified in a separate read before.

        Raises:
            DamagedFile: a checksum does not match, or the file is too short or was written to since it was opened.
            Refused: there is not enough memory.
        """
        import torch

        if self.verify and not summed:
            self.check_storage(storage)
        try:
            made = torch.UntypedStorage(data.length, device="cpu")
        except (RuntimeError, MemoryError):
            self.reading.refuse_short(data)
            message = f"not enough memory for a storage of {data.length:,} bytes"
            raise Refused(message, path=self.checkpoint.path, hint="use mmap=True to map the file instead") from None
        self.fill([(storage, self.planned(storage, data, bytes_of(made, 0, data.length), summed=summed))])
        return made

    def planned(
        self, storage: Storage, data: Data, view: memoryview, *, summed: bool = True, where: str | None = None
    ) -> Fill:
        """Return how to fill `view` with `data`, which is all or a part of `storage`, and with which checks.

        Args:
            where: the tensor that errors name.
        """
        checks = tuple(self._checks(storage, data)) if self.verify and summed else ()
        return Fill(data, view, checks, all_of_them=storage.identity not in self.verified, where=where)

    def fill(self, parts: Sequence[tuple[Storage, Fill]], progress: Progress | None = None) -> None:
        """Fill memory with parts of storages, and keep `progress` up to date.

        Raises:
            DamagedFile: a checksum does not match, or the file is too short or was written to since it was opened.
        """
        try:
            self.reading.fill([fill for _, fill in parts], progress)
        except Differs as found:
            raise self._differs(parts[found.number][0], found.check, found.crc32) from None

    def _checks(self, storage: Storage, data: Data) -> Iterable[RangeCheck]:
        """Return the checksums that the file states for `data`, which belongs to `storage`."""
        assert storage.data is not None
        if is_spliced(storage.data):
            return checks_of(storage.data if data == in_one_piece(storage.data) else data)
        # torch can be configured not to compute checksums; it then writes 0.
        return (RangeCheck(storage.key, data, storage.crc32),) if storage.crc32 and data == storage.data else ()

    def _differs(self, storage: Storage, check: RangeCheck, crc32: int) -> DamagedFile:
        """Return an error that names the record whose bytes do not match their checksum."""
        data = check.data
        if is_spliced(storage.data):
            return background_checks.differs(check)
        source = data if isinstance(data, ByteRange) else data.sources[0]
        record = _record_name(self.checkpoint, storage.key)
        message = f"{record} is damaged: its checksum is {crc32:#010x}, and the file states {check.crc32:#010x}"
        hint = f"`ckptfix repair {quoted(source.path)} OUT` keeps what is intact; verify=False loads it anyway"
        return DamagedFile(message, path=source.path, offset=source.offset, hint=hint)

    def _part(self, entry: TensorEntry) -> torch.Tensor:
        storage, row = entry.storage, dtypes.by_name(entry.dtype)
        count = row.nbytes(reach(entry.shape, entry.stride))
        if (
            storage is None
            or not isinstance(storage.data, ByteRange)
            or entry.kind != "dense"
            or not entry.numel
            or count >= storage.data.length
            or self.restore is not unmoved
            or storage.identity in self.storages
        ):
            return self.make(entry)
        part = in_one_piece(storage.data.sub(row.nbytes(entry.offset), count))
        data = little_endian(part, self.checkpoint.byteorder, self.units.get(storage.identity, row.itemsize))
        tensor = self._on(self.read(storage, data, summed=data is part), replace(entry, offset=0))
        return self._as_saved(tensor, entry)

    def moved(self, storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
        """Return the storage after `restore` has moved it.

        Raises:
            Refused: torch cannot move it to that device.
        """
        try:
            return self.restore(storage, location)
        except (RuntimeError, AssertionError) as error:
            message = f"saved on {location}, and cannot be moved there: {str(error).splitlines()[0]}"
            raise Refused(message, path=self.checkpoint.path, hint="map_location='cpu' loads it to the CPU") from error

    def check(self, entries: Iterable[TensorEntry]) -> None:
        """Read every record whose damage shows only when it is read, and keep nothing.

        These are all records with `verify`, and otherwise the deflated ones.

        Raises:
            DamagedFile: a record has other content than its headers state, or a checksum does not match.
        """
        due: dict[tuple[str, str], tuple[Storage, str]] = {}
        for entry in entries:
            for storage in (part.storage for part in (entry, *entry.parts)):
                if storage is not None and storage.identity not in self.verified:
                    due.setdefault(storage.identity, (storage, entry.name))
        rows = [(storage, name, check) for storage, name in due.values() for check in self._all_checks(storage)]
        sums = Checksums([check.data for _, _, check in rows])
        with closing(sums):
            for number, (storage, name, check) in enumerate(rows):
                try:
                    self._compare(storage, check, sums.value(number))
                except CkptfixError as error:
                    error.where = error.where or name
                    raise
        self.verified.update(due)

    def check_storage(self, storage: Storage) -> None:
        """Compare the bytes of a storage with the checksums stored for them, once.

        Raises:
            DamagedFile: a checksum does not match, or the bytes cannot be read; the message names the record.
        """
        if storage.identity in self.verified:
            return
        self.verified.add(storage.identity)
        for check in self._all_checks(storage):
            self._compare(storage, check, crc32_on(check.data))

    def _all_checks(self, storage: Storage) -> Iterator[RangeCheck]:
        """Yield what must be read of a storage before its bytes are used."""
        data = storage.data
        if is_spliced(data):
            yield from checks_of(data) if self.verify else ()
        # torch can be configured not to compute checksums; it then writes 0.
        elif data is not None and ((self.verify and storage.crc32) or isinstance(data, Derived)):
            yield RangeCheck(storage.key, data, storage.crc32 or 0)

    def _compare(self, storage: Storage, check: RangeCheck, crc32: int) -> None:
        if self.verify and crc32 != check.crc32 and (storage.crc32 or is_spliced(storage.data)):
            raise self._differs(storage, check, crc32)

    def forget(self, following: TensorEntry | None = None) -> None:
        """Release the storages that are not on a map of the file, except those that `following` needs."""
        entries = () if following is None else (following, *following.parts)
        used = {part.storage.identity for part in entries if part.storage is not None}
        for key in self.copied - used:
            del self.storages[key]
        self.copied &= used

    def mapped(self, data: ByteRange, itemsize: int) -> torch.UntypedStorage | None:
        """Return the bytes `data` on a private map of their file, or None if torch cannot use them in place.

        Raises:
            DamagedFile: the file was replaced or written to since it was opened, or it is too short.
        """
        # torch requires addresses that are multiples of the item size.
        if is_spliced(data) or not data.length or data.offset % itemsize:
            return None
        whole = self._map_of(data.path)
        if whole is None:
            return None
        if data.end > whole.nbytes():
            raise truncated(data, whole.nbytes())
        part: torch.UntypedStorage = whole[data.offset : data.end]
        return part

    def _map_of(self, path: str) -> torch.UntypedStorage | None:
        """Return a private map of the whole file at `path`, or None for a source that cannot be mapped."""
        import torch

        if path not in self.maps:
            with open_source(path) as source:
                if source.fd is None:
                    self.maps[path] = None
                    return None
                seen = self.reading.marks.setdefault(path, source.mark)
                try:
                    whole = torch.UntypedStorage.from_file(path, False, seen.size)
                except RuntimeError as error:
                    refuse_changed(path, stamp(path), seen)
                    message = f"torch cannot map it: {str(error).splitlines()[0]}"
                    raise Refused(message, path=path, hint="leave out mmap=True to read it instead") from error
                assert isinstance(whole, torch.UntypedStorage)
                # torch maps by name, so check that the name still belongs to the same file.
                refuse_changed(path, stamp(path), seen)
                self.maps[path] = whole
        return self.maps[path]


def bytes_of(storage: torch.UntypedStorage, start: int, count: int) -> memoryview:
    """Return a view of `count` bytes of a CPU storage."""
    import torch

    memory = torch.empty((0,), dtype=torch.uint8, device="cpu").set_(storage, start, (count,))  # type: ignore[call-overload]
    return memoryview(memory.numpy())


def _number(text: str) -> int | float:
    """Parse a quantizer parameter from its repr in the detail of an entry.

    Raises:
        ValueError: it is not a number.
    """
    try:
        return int(text)
    except ValueError:
        return float(text)


def _is_subclass(entry: TensorEntry) -> bool:
    """Return whether `detail` names a tensor subclass, rather than flags (conj, neg)."""
    return "." in entry.detail and entry.detail != "torch.nn.parameter.Parameter"


def caller() -> int:
    """Return the stack level, for use by the calling function, of the line outside the loaders that called them."""
    level = found = 1
    frame = sys._getframe(1)
    while frame.f_back is not None:
        level += 1
        if frame.f_globals.get("__name__", "").startswith(__package__):
            found = level
        frame = frame.f_back
    return found


def _record_name(checkpoint: Checkpoint, key: str) -> str:
    """Return the name of the zip record that holds the storage `key`."""
    archive = archive_of(checkpoint)
    root = None if archive is None else archive.root
    return f"storage {key}" if root is None else f"{root}/data/{key}"


def unmoved(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
    """Leave a storage on the CPU, whatever its tag says: for values that are copied elsewhere at once."""
    return storage


def restore_location(map_location: MapLocation) -> Move:
    """Return a function that moves a CPU storage where its location tag and `map_location` say.

    Raises:
        Refused: `map_location` is not a device.
    """
    import torch
    from torch.serialization import default_restore_location

    if callable(map_location):

        def by_call(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
            moved = map_location(storage, location)
            return default_restore_location(storage, location) if moved is None else moved

        return by_call
    if isinstance(map_location, Mapping):
        return lambda storage, location: default_restore_location(storage, map_location.get(location, location))
    if map_location is not None:
        try:
            target = str(torch.device(map_location))
        except (RuntimeError, TypeError) as error:
            message = f"map_location is not a device: {str(error).splitlines()[0]}"
            raise Refused(message, hint="pass 'cpu', 'cuda:0', a dict of locations or a callable") from None
        return lambda storage, location: default_restore_location(storage, target)
    warned = False

    def as_saved(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
        nonlocal warned
        try:
            moved: torch.UntypedStorage = default_restore_location(storage, location)
            return moved
        except (RuntimeError, AssertionError):
            if not warned:
                message = f"saved on {location}, which this machine does not have; loaded on the CPU (see map_location)"
                warnings.warn(message, stacklevel=caller())
                warned = True
            return storage

    return as_saved
