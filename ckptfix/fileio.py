"""Exact reads, kernel copies, and output that is whole and durable or not there at all.

Reading is by pread: a file that shrinks under a reader is an error with an offset, where a memory map would be
a SIGBUS. Writing goes to a temp file beside the destination, which is synced and renamed over it; then the
folder is synced. Whatever stops it on the way, the destination is as it was and the temp file is gone, save
after SIGKILL or a power cut, which leave a file named ``.NAME.RANDOM.ckptfix-tmp`` that nothing reads.
"""

from __future__ import annotations

import errno
import os
import signal
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import TracebackType

from ckptfix.checkpoint import ByteRange, Data, OutputFile, Plan
from ckptfix.errors import DamagedFile, Truncated, Unsupported, WouldOverwrite, WriteFailed

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all, at least once every `KERNEL_CHUNK` bytes."""

BATCH = 1 << 20
"""Bytes of small pieces that go out in one write."""

SMALL = 128 << 10
"""Ranges below this are read and batched: one copy_file_range costs about as much as copying so many bytes."""

KERNEL_CHUNK = 16 << 20
"""Bytes of one call to the kernel: some 10 ms, so that progress moves and an interrupt is answered."""

OPEN_SOURCES = 16
"""Source files that are kept open."""

TEMP_SUFFIX = ".ckptfix-tmp"

_OTHER_MEANS = {
    errno.EXDEV,  # two file systems
    errno.EINVAL,  # the file system has no such operation, or an append-only descriptor
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.ETXTBSY,
    errno.EPERM,  # a sandbox that knows no such call, or an immutable file
    errno.EIO,  # pread and write then tell which side it was
}
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_NO_FOLDER_SYNC = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF, errno.EACCES, errno.EPERM}
_DEFERRED = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


def _write_failed(error: OSError, path: str, needed: int = 0) -> WriteFailed:
    """What the operating system said, about `path`; `needed` is the size the file was to have."""
    hint = None
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = _free_space(os.path.dirname(os.path.realpath(path)))
        left = "" if free is None else f", {free:,} are free"
        hint = f"{needed:,} bytes are needed{left}: make room, or write to another disk"
    elif error.errno == errno.EFBIG:
        hint = f"the file system, or ulimit -f, does not allow a file of {needed:,} bytes"
    return WriteFailed(error.strerror or str(error), path=path, hint=hint)


@contextmanager
def _named(path: str, needed: int = 0) -> Iterator[None]:
    """OSError inside becomes WriteFailed about `path`."""
    try:
        yield
    except OSError as error:
        raise _write_failed(error, path, needed) from error


class Reader:
    """A regular file, opened once for many exact reads; safe to share between threads.

    Raises:
        WriteFailed: it can not be opened.
        Unsupported: it is a folder, a pipe or a device.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        with _named(self.path):
            # Without O_NONBLOCK, opening a FIFO waits for somebody to write to it.
            self.fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)
            status = os.fstat(self.fd)
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise Unsupported(f"is {_kind(status.st_mode)}, not a file", path=self.path)
        self.size = status.st_size

    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes at `offset`.

        Raises:
            Truncated: the file ends before; nothing is allocated for what it does not have.
            WriteFailed: an I/O error.
        """
        if not 0 <= offset <= offset + length <= self.size:
            raise _truncated(ByteRange(self.path, offset, length), self.size)
        pieces: list[bytes] = []
        have = 0
        while True:
            try:
                data = os.pread(self.fd, length - have, offset + have)
            except OSError as error:
                raise WriteFailed(f"can not be read: {error.strerror}", path=self.path, offset=offset + have) from error
            have += len(data)
            if have == length:
                return b"".join((*pieces, data)) if pieces else data
            if not data:
                raise _truncated(ByteRange(self.path, offset, length), offset + have)
            pieces.append(data)

    def chunks(self, offset: int, length: int, size: int = BATCH) -> Iterator[bytes]:
        """`length` bytes at `offset`, in pieces of `size`. Raises as `read`."""
        for place in range(offset, offset + length, size):
            yield self.read(place, min(size, offset + length - place))

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _truncated(where: ByteRange, size: int) -> Truncated:
    left = max(0, min(size - where.offset, where.length)) if where.offset >= 0 else 0
    return Truncated(f"{where.length} bytes promised, {left} left", path=where.path, offset=where.offset)


def _kind(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "a folder"
    if stat.S_ISFIFO(mode):
        return "a pipe"
    return "a socket" if stat.S_ISSOCK(mode) else "a device"


def read_exact(where: ByteRange) -> bytes:
    """The bytes of a small range. Raises as `Reader` and `Reader.read`."""
    with Reader(where.path) as source:
        return source.read(where.offset, where.length)


def read_chunks(data: Data, size: int = BATCH) -> Iterator[bytes]:
    """The bytes of `data`, in pieces of `size` bytes (a Derived: in its own).

    Raises:
        DamagedFile: a Derived that yields more or fewer bytes than its length; Truncated for a range.
        WriteFailed: an I/O error.
    """
    if isinstance(data, ByteRange):
        with Reader(data.path) as source:
            yield from source.chunks(data.offset, data.length, size)
        return
    made = 0
    for chunk in data.chunks():
        made += len(chunk)
        if made > data.length:
            break
        yield chunk
    if made != data.length:
        found = "more came" if made > data.length else f"{made} came"
        raise DamagedFile(f"{data.length} bytes promised, {found}", where=data.what or None)


def copy_range(where: ByteRange, out_fd: int, progress: Progress | None = None) -> None:
    """Append `where` to `out_fd` at its current position, inside the kernel where it can.

    Raises:
        Truncated: the file ends before; what it had has been written.
        WriteFailed: the source can not be read.
        OSError: `out_fd` can not be written.
    """
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, where.length)

    with Reader(where.path) as source:
        sink = _Sink(out_fd, advance)
        sink.copy(source, where.offset, where.length)
        sink.flush()


Means = Callable[[int, int, int, int], int]
"""(out_fd, in_fd, offset, count) -> bytes copied to the current position of out_fd."""


def _copy_file_range(out_fd: int, in_fd: int, offset: int, count: int) -> int:
    return os.copy_file_range(in_fd, out_fd, count, offset)


def _kernel_means() -> list[Means]:
    """The ways this system can copy without passing the bytes through the process, best first."""
    means: list[Means] = []
    if hasattr(os, "copy_file_range"):
        means.append(_copy_file_range)
    if sys.platform == "linux":  # elsewhere sendfile writes to sockets only
        means.append(os.sendfile)
    return means


class _Sink:
    """A descriptor that is written front to back; small pieces are joined into writes of `BATCH` bytes."""

    def __init__(self, fd: int, advance: Callable[[int], None]) -> None:
        self._fd = fd
        self._advance = advance
        self._means = _kernel_means()
        self._pieces: list[bytes] = []
        self._pending = 0

    def add(self, data: bytes) -> None:
        self._pieces.append(data)
        self._pending += len(data)
        if self._pending >= BATCH:
            self.flush()

    def copy(self, source: Reader, offset: int, length: int) -> None:
        if length < SMALL:
            self.add(source.read(offset, length))
            return
        self.flush()
        end = offset + length
        while offset < end:
            count = self._send(source, offset, min(end - offset, KERNEL_CHUNK))
            offset += count
            self._advance(count)

    def _send(self, source: Reader, offset: int, count: int) -> int:
        while self._means:
            try:
                sent = self._means[0](self._fd, source.fd, offset, count)
            except OSError as error:
                if error.errno not in _OTHER_MEANS:
                    raise
                sent = 0
            if sent:
                return sent
            # Some file systems answer 0 for "not here": only a read of nothing says that the file has ended.
            del self._means[0]
        data = source.read(offset, min(count, BATCH))
        self._write(data)
        return len(data)

    def flush(self) -> None:
        if self._pending:
            pieces, count = self._pieces, self._pending
            self._pieces, self._pending = [], 0
            self._write(pieces[0] if len(pieces) == 1 else b"".join(pieces))
            self._advance(count)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            written = os.write(self._fd, view)
            if not written:
                raise OSError(errno.EIO, "write took no bytes")
            view = view[written:]


class _Sources:
    """The files that a plan reads: what they were at its start, and the few of them that are open."""

    def __init__(self, plan: Plan) -> None:
        self._open: dict[str, Reader] = {}
        self.stamps: dict[str, tuple[int, ...]] = {}
        for where in _ranges(plan):
            stamp = self.stamps.get(where.path)
            if stamp is None:
                stamp = self.stamps[where.path] = _stamp(where.path)
            if where.offset < 0 or where.length < 0 or where.end > stamp[0]:
                raise _truncated(where, stamp[0])

    def __getitem__(self, path: str) -> Reader:
        reader = self._open.pop(path, None)
        if reader is None:
            if len(self._open) >= OPEN_SOURCES:
                self._open.pop(next(iter(self._open))).close()
            reader = Reader(path)
        self._open[path] = reader
        return reader

    def check_unchanged(self) -> None:
        for path, stamp in self.stamps.items():
            if _stamp(path) != stamp:
                raise WriteFailed(
                    "changed while it was being read", path=path, hint="try again when nothing writes to it"
                )

    def close(self) -> None:
        for reader in self._open.values():
            reader.close()


def _ranges(plan: Plan) -> Iterator[ByteRange]:
    for file in plan.files:
        for segment in file.segments:
            if isinstance(segment, ByteRange):
                yield segment
            elif not isinstance(segment, bytes):
                yield from segment.sources


def _stamp(path: str) -> tuple[int, ...]:
    """Size first; then what else tells a file from the same one written to or replaced."""
    with _named(path):
        status = os.stat(path)
    return status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev


@dataclass(slots=True)
class _Output:
    """One file on its way: its temp file, what it replaces, and how to go back."""

    file: OutputFile
    old: os.stat_result | None
    dest: str
    temp: str = field(init=False)
    backup: str = field(init=False)
    identity: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        folder, name = os.path.split(self.dest)
        # Forty characters of the name keep the whole under NAME_MAX (255 bytes) in any encoding.
        stem = os.path.join(folder, f".{name[:40]}.{os.urandom(8).hex()}")
        self.temp = stem + TEMP_SUFFIX
        self.backup = stem + ".old" + TEMP_SUFFIX

    def write(self, sources: _Sources, advance: Callable[[int], None]) -> None:
        """Fill the temp file and bring it to the disk. A failed fsync is final: the kernel forgets what it lost."""
        fd = os.open(self.temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(fd, "wb", buffering=0):
            status = os.fstat(fd)
            self.identity = (status.st_dev, status.st_ino)
            sink = _Sink(fd, advance)
            for segment in self.file.segments:
                if isinstance(segment, bytes):
                    sink.add(segment)
                elif isinstance(segment, ByteRange):
                    sink.copy(sources[segment.path], segment.offset, segment.length)
                else:
                    for chunk in read_chunks(segment):
                        sink.add(chunk)
            sink.flush()
            size = os.fstat(fd).st_size
            if size != self.file.nbytes:
                raise WriteFailed(f"{self.file.nbytes} bytes written, {size} arrived", path=self.file.path)
            self._adopt_mode(fd)
            os.fsync(fd)

    def _adopt_mode(self, fd: int) -> None:
        """Owner and mode of the file that is replaced, as far as we may; otherwise what the umask gives."""
        with suppress(PermissionError):
            if self.old is None:
                os.fchmod(fd, 0o666 & ~_umask())
            else:
                with suppress(PermissionError):
                    os.fchown(fd, self.old.st_uid, self.old.st_gid)
                os.fchmod(fd, stat.S_IMODE(self.old.st_mode) & 0o777)

    def keep_old(self) -> None:
        """Keep a second name for what is replaced, so that `restore` can bring it back."""
        if self.old is not None:
            with suppress(OSError):
                os.link(self.dest, self.backup)

    def publish(self, overwrite: bool) -> None:
        """The temp file becomes the destination, in one step."""
        if overwrite:
            os.replace(self.temp, self.dest)
            return
        try:
            os.link(self.temp, self.dest)
        except OSError as error:
            if error.errno in _NO_LINKS and not os.path.lexists(self.dest):
                os.replace(self.temp, self.dest)
                return
            if error.errno in (errno.EEXIST, *_NO_LINKS):
                raise WouldOverwrite("appeared while it was being written", path=self.file.path) from error
            raise
        os.unlink(self.temp)

    def restore(self) -> None:
        """Undo `publish`, wherever it stopped."""
        with suppress(OSError):
            if os.path.lexists(self.backup):
                os.replace(self.backup, self.dest)
            elif self.old is None and _identity(self.dest) == self.identity:
                os.unlink(self.dest)

    def discard(self) -> None:
        for path in (self.temp, self.backup):
            with suppress(OSError):
                os.unlink(path)


def _identity(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino


def _umask() -> int:
    # It can not be asked for without being set: for a moment other threads make private files, never open ones.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Let a second Ctrl-C wait until the cleaning up after the first is done."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _DEFERRED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _free_space(folder: str) -> int | None:
    """Bytes that may be written to `folder`; None when its file system does not say."""
    try:
        status = os.statvfs(folder)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize if status.f_blocks else None


def _check_space(outputs: Iterable[_Output]) -> None:
    needed: dict[int, int] = {}
    for output in outputs:
        folder = os.path.dirname(output.dest)
        device = os.stat(folder).st_dev
        needed[device] = needed.get(device, 0) + output.file.nbytes
        free = _free_space(folder)
        if free is not None and needed[device] > free:
            raise _write_failed(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), output.file.path, needed[device])


def _sync_folders(outputs: Iterable[_Output]) -> None:
    for folder in {os.path.dirname(output.dest) for output in outputs}:
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            if error.errno not in _NO_FOLDER_SYNC:
                raise WriteFailed(
                    f"the output is complete, but may not survive a power cut: {error.strerror}", path=folder
                ) from error


def _publish(outputs: list[_Output], overwrite: bool) -> None:
    """All of them, or none; the last (an index) when the names of the others are on the disk.

    Replaced files come back through a second hard link: a file system without links can not undo them.
    """
    *others, last = outputs
    try:
        for output in outputs:
            if others:
                output.keep_old()
            if output is last and others:
                _sync_folders(others)
            with _named(output.file.path):
                output.publish(overwrite)
    except BaseException:
        with _undisturbed():
            for output in reversed(outputs):
                output.restore()
        raise
    _sync_folders(outputs)


def check_destination(
    dest: str | os.PathLike[str], sources: Iterable[str | os.PathLike[str]] = (), *, overwrite: bool
) -> None:
    """Refuse a destination that `write_plan` could not, or must not, write.

    A symbolic link stands for the file that it points to.

    Raises:
        WouldOverwrite: it is one of `sources` (by name, symlink or hard link), or exists without `overwrite`.
        Unsupported: it is a folder, a pipe or a device.
        WriteFailed: its folder does not exist or can not be written to.
    """
    path = os.fspath(dest)
    status = _status(path)
    if status is None:
        if not os.path.basename(path):
            raise Unsupported("names a folder, not a file", path=path)
        folder = os.path.dirname(os.path.realpath(path))
        if not os.path.isdir(folder):
            raise WriteFailed("its folder does not exist", path=path, hint=f"mkdir -p {folder}")
    elif not stat.S_ISREG(status.st_mode):
        raise Unsupported(f"is {_kind(status.st_mode)}, not a file", path=path)
    else:
        for source in sources:
            there = _status(os.fspath(source))
            if there is not None and os.path.samestat(status, there):
                raise WouldOverwrite("the output is the input", path=path, hint="give the output another name")
        if not overwrite:
            raise WouldOverwrite("exists", path=path, hint="give another name, or --force to replace it")
        folder = os.path.dirname(os.path.realpath(path))
    if not os.access(folder, os.W_OK | os.X_OK):
        raise WriteFailed("its folder can not be written to", path=path)


def _status(path: str) -> os.stat_result | None:
    """Of the file behind `path`; None when there is none."""
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _write_failed(error, path) from error


def write_plan(plan: Plan, *, overwrite: bool = False, progress: Progress | None = None) -> None:
    """Write the files of `plan`, in order: all complete and on the disk, or none.

    Every file is complete and synced before the first takes its name. What is replaced gives its mode and, where
    allowed, its owner; extended attributes and other hard links are not carried over. `progress` counts the
    bytes of all files.

    Raises:
        WouldOverwrite, Unsupported: as `check_destination`; also when a file appears meanwhile, or the plan
            names one file twice.
        Truncated, DamagedFile: a source does not have what the plan promises.
        WriteFailed: no space (asked before the first byte), an I/O error, or a source that changed meanwhile.
    """
    if not plan.files:
        return
    sources = _Sources(plan)
    for file in plan.files:
        check_destination(file.path, sources.stamps, overwrite=overwrite)
    outputs = [_Output(file, _status(file.path), os.path.realpath(file.path)) for file in plan.files]
    for number, output in enumerate(outputs):
        if any(output.dest == other.dest for other in outputs[:number]):
            raise WouldOverwrite("the plan writes it twice", path=output.file.path)
    _check_space(outputs)
    total = plan.nbytes
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    try:
        for output in outputs:
            with _named(output.file.path, output.file.nbytes):
                output.write(sources, advance)
        sources.check_unchanged()
        _publish(outputs, overwrite)
    finally:
        with _undisturbed():
            sources.close()
            for output in outputs:
                output.discard()
