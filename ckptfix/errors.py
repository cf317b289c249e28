"""The errors of ckptfix: one tree; every error carries its place as fields.

::

    CkptfixError(message, path, where, offset, hint)
    ├── UnknownFormat        not a checkpoint that ckptfix reads; the message names what it is instead
    ├── DamagedFile
    │   ├── Truncated        the file is cut short
    │   ├── BadDirectory     a zip directory or safetensors header that contradicts itself
    │   ├── BadPickle        a pickle stream that no unpickler would accept
    │   │   └── TruncatedPickle  one that ends before its STOP; also a Truncated
    │   ├── BadIndex         an index that does not match its shards
    │   └── ChangedFile      a file that was written to, or replaced, while it was read
    ├── Unsupported          valid, but outside the scope of ckptfix
    │   ├── Bomb             compressed bytes that expand beyond reason
    │   ├── IsFolder         a folder where a file is needed; also an IsADirectoryError
    │   ├── NotAFolder       the output is a file and must be a folder; also a NotADirectoryError
    │   └── NoFile           a pipe, a socket or a device
    ├── Refused              possible, but ckptfix will not do it unasked
    │   ├── WouldOverwrite   the output exists, or is the input; also a FileExistsError
    │   ├── WouldLoseData    the output could not hold everything
    │   ├── PartialPrefix    only some keys of a state dict have the prefix
    │   ├── Undecided        several state dicts could be meant
    │   ├── NoMatch          the keys of two models do not fit together
    │   └── WrongType        an argument of the wrong type; also a TypeError
    ├── KeyConflict          two keys would become one
    ├── LoadMismatch         model and file disagree: missing, unexpected, shapes
    ├── NoSuchFile           no file or folder has that name; also a FileNotFoundError
    ├── NoSuchTensor         a key or an address that is not in the file, or a pattern that matches none
    ├── MissingExtra         a package is missing that an extra of ckptfix installs; also an ImportError
    └── WriteFailed          a fault of the machine: disk full, an I/O error; also an OSError, with its errno
        ├── NotPermitted     no permission to read or write a file or folder; also a PermissionError
        └── NoSuchFolder     the output's folder does not exist; also a FileNotFoundError

Callers never need to parse the text: the offset, for example, is ``error.offset``.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ckptfix.urls import known

StrPath = str | os.PathLike[str]
"""A path of a file."""


def printable(text: object) -> str:
    """Return `text` with control characters, lone surrogates and escapes made visible.

    Keys come from untrusted files: an ANSI sequence in a key must not reach a terminal.
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
        message: the problem in one sentence, without the place.
        path: the file.
        where: the record, tensor or key inside it.
        offset: byte offset in the file, or in the record that `where` names.
        hint: the way to fix it: a command to paste, or a plain instruction.
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
        """The way to fix the problem. It is stored as a note, so that a traceback shows it below the message."""
        return self._hint

    @hint.setter
    def hint(self, hint: str | None) -> None:
        self._hint = hint
        self.__notes__ = [f"hint: {printable(hint)}"] if hint else []

    @property
    def shell_hint(self) -> str | None:
        """`hint` in the words of the command line, where these differ from Python's."""
        return self._hint

    def __str__(self) -> str:
        """Return the message with its place: ``model.pth: archive/data/17 @ 0x4f0000: the record is damaged``.

        The hint is not included.
        """
        place = "" if self.where is None else self.where
        if self.offset is not None:
            place = f"{place} @ {self.offset:#x}".strip()
        parts = [str(part) for part in (self.path, place) if part]
        return printable(": ".join([*parts, self.message]))


class NoSuchFile(CkptfixError, FileNotFoundError):
    """No file or folder has that name. It is also a ``FileNotFoundError``, with its `errno` and `filename`."""

    def __init__(self, path: str | os.PathLike[str] | None = None, *, hint: str | None = None) -> None:
        super().__init__("no such file or folder", path=path, hint=hint)
        _as_of_system(self, errno.ENOENT)


def _as_of_system(error: CkptfixError, number: int | None) -> None:
    """Set the fields of ``OSError`` on an error that is one too."""
    assert isinstance(error, OSError)
    error.errno, error.strerror, error.filename = number, error.message, error.path


def not_readable(error: OSError, path: str | os.PathLike[str]) -> CkptfixError:
    """Return the error to raise where the system cannot open `path`, with the system's message."""
    if isinstance(error, CkptfixError):
        return error
    if isinstance(error, FileNotFoundError):
        return NoSuchFile(path)
    if isinstance(error, PermissionError):
        return NotPermitted((error.strerror or str(error)).lower(), path=path, number=error.errno)
    return CkptfixError((error.strerror or str(error)).lower(), path=path)


class UnknownFormat(CkptfixError):
    """The content is in no format that ckptfix reads; `kind` is the id of the finding that describes it."""

    def __init__(self, message: str, *, kind: str = "unknown-format", **place: object) -> None:
        super().__init__(message, **place)  # type: ignore[arg-type]
        self.kind = kind


class DamagedFile(CkptfixError):
    """The file contradicts itself."""


class Truncated(DamagedFile):
    """The file is cut short."""


class BadDirectory(DamagedFile):
    """A zip directory or a safetensors header that contradicts itself."""


class BadPickle(DamagedFile):
    """A pickle stream that no unpickler would accept."""


class TruncatedPickle(BadPickle, Truncated):
    """A pickle stream that ends before its STOP."""


class BadIndex(DamagedFile):
    """An index that does not match its shards."""


class ChangedFile(DamagedFile):
    """A file that was written to, or replaced, while it was read: the data may come from two versions."""


class Unsupported(CkptfixError):
    """Valid, but outside the scope of ckptfix."""


class Bomb(Unsupported):
    """Compressed bytes that expand, or claim to expand, beyond reason."""


class NoFile(Unsupported):
    """A pipe, a socket or a device where a regular file is needed."""


class IsFolder(Unsupported, IsADirectoryError):
    """A folder where a file is needed. It is also an ``IsADirectoryError``."""


class NotAFolder(Unsupported, NotADirectoryError):
    """The output is a file and must be a folder. It is also a ``NotADirectoryError``."""


class DistributedPart(Unsupported):
    """A file of a distributed checkpoint: the parts of one rank, which are useless without the other ranks' files."""


class Refused(CkptfixError):
    """Possible, but only done on request."""

    _of_module = False

    @property
    def of_module(self) -> bool:
        """True if a whole module is where a state dict is needed, at `where`."""
        return self._of_module

    def because_of_module(self) -> Refused:
        """Return the error, with `of_module` set."""
        self._of_module = True
        return self


class WouldOverwrite(Refused, FileExistsError):
    """The output exists, or is the input. It is also a ``FileExistsError``."""

    def __init__(self, message: str, *, path: str | os.PathLike[str] | None = None, hint: str | None = None) -> None:
        super().__init__(message, path=path, hint=hint)
        _as_of_system(self, errno.EEXIST)


class WouldLoseData(Refused):
    """The output could not hold everything that the input has."""


class CutUnknown(Refused):
    """Nothing states along which dimension ranks cut a tensor; `dims` proposes it: name -> dimension."""

    def __init__(self, message: str, *, dims: Mapping[str, str], **place: object) -> None:
        super().__init__(message, **place)  # type: ignore[arg-type]
        self.dims = dims


class PartialPrefix(Refused):
    """Only some keys of a state dict have the prefix; `others` are the keys without it."""

    def __init__(self, message: str, *, others: tuple[str, ...] = (), **place: object) -> None:
        super().__init__(message, **place)  # type: ignore[arg-type]
        self.others = others


class Undecided(Refused):
    """Several state dicts could be meant.

    Attributes:
        choices: the addresses of those that the call accepts.
        choice: the arguments that choose the first of them, such as ``{"at": "generator"}``; the hint names them as
            arguments of Python, and `shell_hint` as options. ``at`` by default; empty if there is no choice.
        averages: whether ``ema`` chooses the averages that are stored beside them.
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
        """Set the arguments that choose the first state dict, and the hint that names them."""
        self.choice = dict(choice)
        said = ", ".join(f"{name}={value!r}" for name, value in choice.items())
        self.hint = self._asking(said, "ema=True")

    @property
    def shell_hint(self) -> str:
        said = " ".join(_option(name, value) for name, value in self.choice.items())
        return self._asking(said, "--ema")

    def _asking(self, said: str, averaged: str) -> str:
        """Return the hint, with the options spelled for Python or for the shell."""
        if not self.choice:
            return "this command cannot use any of them; `ckptfix inspect` shows what the file holds"
        return f"choose one with {said}" + (f"; {averaged} chooses the averaged one" if self.averages else "")


def _option(name: str, value: object) -> str:
    option = f"--{name.replace('_', '-')}"
    if value is True:
        return option
    values = value if isinstance(value, tuple) else (value,)
    from ckptfix.commands import word

    # Not every shell can quote the empty address of the top level.
    return " ".join(f"{option} {word(str(one) or '/')}" for one in values)


class NoMatch(Refused):
    """The keys of two models do not fit together; `lines` show a reader where, or which keys are left over."""

    def __init__(self, message: str, *, lines: tuple[str, ...] = (), **place: object) -> None:
        super().__init__(message, **place)  # type: ignore[arg-type]
        self.lines = lines


class WrongType(Refused, TypeError):
    """An argument of the wrong type. It is also a ``TypeError``."""


@contextmanager
def about(path: str, *, always: bool = False) -> Iterator[None]:
    """Set `path` on errors raised inside that name no file; with `always`, also on those that name a different one."""
    try:
        yield
    except CkptfixError as error:
        if always or not error.path:
            error.path = path
        raise


def file_name(value: object, what: str = "the path") -> str:
    """Return `value` as the name of a file.

    Args:
        what: the words for the argument in a message.

    Raises:
        WrongType: `value` is not a path.
    """
    if isinstance(value, str | os.PathLike):
        name = os.fspath(value)
        if isinstance(name, str):
            return known(name)
    if isinstance(value, bytes):
        return os.fsdecode(value)
    raise WrongType(f"{what} must be the name of a file (str or os.PathLike), not {type(value).__qualname__}")


class KeyConflict(CkptfixError):
    """Two keys would become one; `pairs` are (new key, old keys)."""

    def __init__(
        self, message: str, *, pairs: tuple[tuple[str, tuple[str, ...]], ...] = (), **place: object
    ) -> None:
        super().__init__(message, **place)  # type: ignore[arg-type]
        self.pairs = pairs


class LoadMismatch(CkptfixError):
    """Model and file disagree; `report` (a loaders.LoadReport) lists the differences, and that nothing was changed."""

    def __init__(self, message: str, *, report: object = None, **place: object) -> None:
        super().__init__(message, **place)  # type: ignore[arg-type]
        self.report = report


class NoSuchTensor(CkptfixError):
    """A key or an address that is not in the file, or a pattern that matches none; `near` is what may be meant."""

    def __init__(self, message: str, *, near: tuple[str, ...] = (), **place: object) -> None:
        super().__init__(message, **place)  # type: ignore[arg-type]
        self.near = near


class MissingExtra(CkptfixError, ImportError):
    """A package is missing that only an extra of ckptfix installs; `name` is the package. Also an ``ImportError``."""

    def __init__(self, message: str, *, name: str, hint: str) -> None:
        super().__init__(message, hint=hint)
        self.name = name


class WriteFailed(CkptfixError, OSError):
    """The machine could not write or read: disk full, I/O error. It is also an ``OSError``.

    Args:
        number: the `errno` of the system, where it gave one.
    """

    def __init__(self, message: str, *, number: int | None = None, **place: object) -> None:
        super().__init__(message, **place)  # type: ignore[arg-type]
        _as_of_system(self, number)


class NotPermitted(WriteFailed, PermissionError):
    """No permission to read or write a file or folder. It is also a ``PermissionError``."""


class NoSuchFolder(WriteFailed, FileNotFoundError):
    """The folder of the output does not exist. It is also a ``FileNotFoundError``."""
