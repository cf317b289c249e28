"""The errors of ckptfix: one tree, every error with its place as fields.

::

    CkptfixError(message, path, where, offset, hint)
    ├── UnknownFormat        not a checkpoint that we read; the message says what it is instead
    ├── DamagedFile
    │   ├── Truncated        the file ends before what it promises
    │   ├── BadDirectory     a zip directory or safetensors header that contradicts itself
    │   ├── BadPickle        a pickle stream that no unpickler would accept
    │   │   └── TruncatedPickle  one that ends before its STOP; also a Truncated
    │   ├── BadIndex         an index that does not match its shards
    │   └── ChangedFile      a file that was written to, or replaced, while it was read
    ├── Unsupported          valid, but not ours to do
    │   ├── Bomb             packed bytes that unfold beyond measure
    │   ├── IsFolder         a folder, and is to be a file; also an IsADirectoryError
    │   ├── NotAFolder       the output is a file, and is to be a folder; also a NotADirectoryError
    │   └── NoFile           a pipe, a socket or a device
    ├── Refused              we could, and will not
    │   ├── WouldOverwrite   the output exists, or is the input; also a FileExistsError
    │   ├── WouldLoseData    the output could not hold everything
    │   ├── PartialPrefix    only some keys of a mapping have the prefix
    │   ├── Undecided        several state dicts could be meant
    │   ├── NoMatch          the names of two models do not go together
    │   └── WrongType        an argument of another type than is asked for; also a TypeError
    ├── KeyConflict          two keys would become one
    ├── LoadMismatch         model and file disagree: missing, unexpected, shapes
    ├── NoSuchFile           no file or folder of that name; also a FileNotFoundError
    ├── NoSuchTensor         a name or an address that the file does not have
    ├── MissingExtra         a package that an extra of ckptfix installs; also an ImportError
    └── WriteFailed          the machine's fault: disk full, an I/O error; also an OSError, with its errno
        ├── NotPermitted     a file or folder that we may not read or write; also a PermissionError
        └── NoSuchFolder     the output's folder does not exist; also a FileNotFoundError

Nothing here is parsed from text: a caller who needs the offset reads ``error.offset``.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ckptfix.urls import known

StrPath = str | os.PathLike[str]
"""What names a file."""


def printable(text: object) -> str:
    """`text` with control characters, lone surrogates and escapes made visible.

    Names come from untrusted files: an ANSI sequence in a key must not reach a terminal.
    """
    string = str(text)
    if string.isascii() and string.isprintable():
        return string
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in string
    )


class CkptfixError(Exception):
    """Base of every error that ckptfix raises on purpose.

    Args:
        message: what is wrong, in one sentence, without the place.
        path: the file.
        where: the record, tensor or key inside it.
        offset: byte offset in the file, or in the record when `where` names one.
        hint: what to do: a command to paste, or a plain instruction.
    """

    def __init__(
        self,
        message: str,
        *,
        path: str | os.PathLike[str] | None = None,
        where: str | None = None,
        offset: int | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.path = None if path is None else os.fspath(path)
        self.where = where
        self.offset = offset
        self.hint = hint

    @property
    def hint(self) -> str | None:
        """What to do. It stands as a note, so that a traceback shows it below the message."""
        return self._hint

    @hint.setter
    def hint(self, hint: str | None) -> None:
        self._hint = hint
        self.__notes__ = [f"hint: {printable(hint)}"] if hint else []

    @property
    def shell_hint(self) -> str | None:
        """`hint` in the words of the command line, where they are others."""
        return self._hint

    def __str__(self) -> str:
        """``model.pth: archive/data/17 @ 0x4f0000: 4096 bytes promised, 1200 left``, hint aside."""
        place = "" if self.where is None else self.where
        if self.offset is not None:
            place = f"{place} @ {self.offset:#x}".strip()
        parts = [str(part) for part in (self.path, place) if part]
        return printable(": ".join([*parts, self.message]))


class NoSuchFile(CkptfixError, FileNotFoundError):
    """No file or folder has that name. A ``FileNotFoundError`` too, with its `errno` and `filename`."""

    def __init__(self, path: str | os.PathLike[str] | None = None, *, hint: str | None = None) -> None:
        super().__init__("no such file or folder", path=path, hint=hint)
        _as_of_system(self, errno.ENOENT)


def _as_of_system(error: CkptfixError, number: int | None) -> None:
    """Give an error that is an ``OSError`` too the fields of one."""
    assert isinstance(error, OSError)
    error.errno, error.strerror, error.filename = number, error.message, error.path


def not_readable(error: OSError, path: str | os.PathLike[str]) -> CkptfixError:
    """What to raise where the system cannot open `path`, in its words."""
    if isinstance(error, CkptfixError):
        return error
    if isinstance(error, FileNotFoundError):
        return NoSuchFile(path)
    if isinstance(error, PermissionError):
        return NotPermitted((error.strerror or str(error)).lower(), path=path, number=error.errno)
    return CkptfixError((error.strerror or str(error)).lower(), path=path)


class UnknownFormat(CkptfixError):
    """The content is none of the formats that ckptfix reads; `kind` is the id of the finding that says what it is."""

    def __init__(self, message: str, *, kind: str = "unknown-format", **place: object) -> None:
        super().__init__(message, **place)  # type: ignore[arg-type]
        self.kind = kind


class DamagedFile(CkptfixError):
    """The file contradicts itself."""


class Truncated(DamagedFile):
    """The file ends before what it promises."""


class BadDirectory(DamagedFile):
    """A zip directory or a safetensors header that contradicts itself."""


class BadPickle(DamagedFile):
    """A pickle stream that no unpickler would accept."""


class TruncatedPickle(BadPickle, Truncated):
    """A pickle stream that ends before its STOP."""


class BadIndex(DamagedFile):
    """An index that does not match its shards."""


class ChangedFile(DamagedFile):
    """A file that was written to, or replaced, while it was read: what was read of it may be of two versions."""


class Unsupported(CkptfixError):
    """Valid, but not something that ckptfix does."""


class Bomb(Unsupported):
    """Packed bytes that unfold, or say that they unfold, beyond measure."""


class NoFile(Unsupported):
    """A pipe, a socket or a device, where a regular file is needed."""


class IsFolder(Unsupported, IsADirectoryError):
    """A folder, where a file is needed. An ``IsADirectoryError`` too."""


class NotAFolder(Unsupported, NotADirectoryError):
    """The output is a file, and is to be a folder. A ``NotADirectoryError`` too."""


class DistributedPart(Unsupported):
    """A file of a distributed checkpoint: one rank's parts of it, which mean nothing without the others."""


class Refused(CkptfixError):
    """Possible, but only done when it is asked for."""


class WouldOverwrite(Refused, FileExistsError):
    """The output exists, or is the input. A ``FileExistsError`` too."""

    def __init__(self, message: str, *, path: str | os.PathLike[str] | None = None, hint: str | None = None) -> None:
        super().__init__(message, path=path, hint=hint)
        _as_of_system(self, errno.EEXIST)


class WouldLoseData(Refused):
    """The output could not hold everything that the input has."""


class PartialPrefix(Refused):
    """Only some keys of a mapping have the prefix; `others` are those that do not."""

    def __init__(self, message: str, *, others: tuple[str, ...] = (), **place: object) -> None:
        super().__init__(message, **place)  # type: ignore[arg-type]
        self.others = others


class Undecided(Refused):
    """Several state dicts could be meant.

    Attributes:
        choices: the addresses of those that the call accepts.
        choice: the arguments that choose the first of them, such as ``{"at": "generator"}``; the hint says them in
            the words of Python, and `shell_hint` as options. By default ``at``; empty where there is no choice.
        averages: whether ``ema`` takes averages that stand beside them.
    """

    def __init__(
        self,
        message: str,
        *,
        choices: tuple[str, ...] = (),
        choice: Mapping[str, object] | None = None,
        averages: bool = False,
        **place: object,
    ) -> None:
        super().__init__(message, **place)  # type: ignore[arg-type]
        self.choices = choices
        self.averages = averages
        self.choose_with(({"at": choices[0]} if choices else {}) if choice is None else choice)

    def choose_with(self, choice: Mapping[str, object]) -> None:
        """Say that these arguments choose the first."""
        self.choice = dict(choice)
        said = ", ".join(f"{name}={value!r}" for name, value in choice.items())
        self.hint = self._asking(said, "ema=True")

    @property
    def shell_hint(self) -> str:
        said = " ".join(_option(name, value) for name, value in self.choice.items())
        return self._asking(said, "--ema")

    def _asking(self, said: str, averaged: str) -> str:
        if not self.choice:
            return "this command can take none of them; `ckptfix inspect` shows what the file holds"
        return f"choose one with {said}" + (f"; {averaged} takes the averaged one" if self.averages else "")


def _option(name: str, value: object) -> str:
    option = f"--{name.replace('_', '-')}"
    if value is True:
        return option
    values = value if isinstance(value, tuple) else (value,)
    from ckptfix.commands import word

    # The top level has an empty address, which not every shell can quote.
    return " ".join(f"{option} {word(str(one) or '/')}" for one in values)


class NoMatch(Refused):
    """The names of two models do not go together; `lines` show where, or what is left over, for a person."""

    def __init__(self, message: str, *, lines: tuple[str, ...] = (), **place: object) -> None:
        super().__init__(message, **place)  # type: ignore[arg-type]
        self.lines = lines


class WrongType(Refused, TypeError):
    """An argument of another type than is asked for. A ``TypeError`` too."""


@contextmanager
def about(path: str, *, always: bool = False) -> Iterator[None]:
    """Errors inside that name no file are about `path`; with `always` those too that name another."""
    try:
        yield
    except CkptfixError as error:
        if always or not error.path:
            error.path = path
        raise


def file_name(value: object, what: str = "the path") -> str:
    """`value` as the name of a file.

    Args:
        what: the argument, as a message calls it.

    Raises:
        WrongType: it is none.
    """
    if isinstance(value, str | os.PathLike):
        name = os.fspath(value)
        if isinstance(name, str):
            return known(name)
    if isinstance(value, bytes):
        return os.fsdecode(value)
    raise WrongType(f"{what} must be the name of a file (str or os.PathLike), not {type(value).__qualname__}")


class KeyConflict(CkptfixError):
    """Two keys would become one; `pairs` are (new name, old names)."""

    def __init__(
        self, message: str, *, pairs: tuple[tuple[str, tuple[str, ...]], ...] = (), **place: object
    ) -> None:
        super().__init__(message, **place)  # type: ignore[arg-type]
        self.pairs = pairs


class LoadMismatch(CkptfixError):
    """Model and file disagree; `report` (a loaders.LoadReport) says in what, and that nothing was changed."""

    def __init__(self, message: str, *, report: object = None, **place: object) -> None:
        super().__init__(message, **place)  # type: ignore[arg-type]
        self.report = report


class NoSuchTensor(CkptfixError):
    """A name or an address that the file does not have; `near` are close ones that it has."""

    def __init__(self, message: str, *, near: tuple[str, ...] = (), **place: object) -> None:
        super().__init__(message, **place)  # type: ignore[arg-type]
        self.near = near


class MissingExtra(CkptfixError, ImportError):
    """A package that only an extra of ckptfix installs is missing; `name` is that package. An ``ImportError`` too."""

    def __init__(self, message: str, *, name: str, hint: str) -> None:
        super().__init__(message, hint=hint)
        self.name = name


class WriteFailed(CkptfixError, OSError):
    """The machine could not write or read: disk full, I/O error. An ``OSError`` too.

    Args:
        number: the `errno` of the system, where it said one.
    """

    def __init__(self, message: str, *, number: int | None = None, **place: object) -> None:
        super().__init__(message, **place)  # type: ignore[arg-type]
        _as_of_system(self, number)


class NotPermitted(WriteFailed, PermissionError):
    """A file or folder that we may not read or write. A ``PermissionError`` too."""


class NoSuchFolder(WriteFailed, FileNotFoundError):
    """The folder that the output is to be in does not exist. A ``FileNotFoundError`` too."""
