"""The formats, detected from content and never from the suffix alone.

A new format is a module that ends with a `base.Format`, one row here and one line in tests/contract: in samples.py, or
for a format of folders in test_folder_formats.py.
The module is imported when a file may be in the format, so that a command costs what its file needs.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from importlib import import_module
from typing import NamedTuple

from ckptfix.checkpoint import Checkpoint, FileVersion, TensorEntry
from ckptfix.errors import CkptfixError, StrPath, UnknownFormat, WriteFailed, file_name, not_readable
from ckptfix.formats import base, signs
from ckptfix.formats.base import Aspect, Format
from ckptfix.formats.dcp.part import refuse_part as refuse_part
from ckptfix.io.source import found_as, is_file, is_local, is_place, open_source, shares_open_files
from ckptfix.io.system import named, refuse_other_kinds
from ckptfix.names import kinds
from ckptfix.pickles.collector import gc_paused
from ckptfix.urls import as_path
from ckptfix.zips.archive_sequence import BEHIND


class _Row(NamedTuple):
    """The facts about a format that are known before it is imported.

    Attributes:
        module: below this package.
        sign: whether a file or folder may be in the format.
        attribute: the format, in its module.
        folder, suffixes: as in `Format`.
        lists: it has `Format.listed_beside`.
    """

    module: str
    sign: signs.Sign
    attribute: str = "FORMAT"
    folder: bool = False
    suffixes: tuple[str, ...] = ()
    lists: bool = False

    def imported(self) -> Format:
        format: Format = getattr(import_module(f"ckptfix.formats.{self.module}"), self.attribute)
        return format


class Formats(MutableMapping[str, Format]):
    """A mapping of name -> format, whose module is imported at its first use."""

    def __init__(self, rows: Mapping[str, Format | _Row]) -> None:
        self._rows = dict(rows)

    def __getitem__(self, name: str) -> Format:
        row = self._rows[name]
        return row.imported() if isinstance(row, _Row) else row

    def __setitem__(self, name: str, format: Format) -> None:
        self._rows[name] = format

    def __delitem__(self, name: str) -> None:
        del self._rows[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def of(self, *, folder: bool) -> list[Format]:
        """Return the formats whose checkpoints are folders, or those whose checkpoints are files."""
        return [self[name] for name, row in self._rows.items() if row.folder is folder]

    def possible(self, seen: signs.Beginning, *, folder: bool) -> list[Format]:
        """Return the formats of folders, or of files, that `seen` shows no sign against."""
        rows = [(name, row) for name, row in self._rows.items() if row.folder is folder]
        return [self[name] for name, row in rows if not isinstance(row, _Row) or row.sign(seen)]

    def listing(self, seen: signs.Beginning) -> list[Format]:
        """Return the formats of folders with an index of keys that `seen` shows no sign against."""
        rows = [(name, row) for name, row in self._rows.items() if row.folder]
        able = [(name, row) for name, row in rows if not isinstance(row, _Row) or (row.lists and row.sign(seen))]
        return [self[name] for name, _ in able]

    def with_suffix(self, path: str) -> Format | None:
        """Return the first format of files that has the suffix of `path`; None if no format has it."""
        rows = [(name, row) for name, row in self._rows.items() if not row.folder]
        return next((self[name] for name, row in rows if path.lower().endswith(row.suffixes)), None)


_ROWS = {
    "zip": _Row("torch.zip", signs.zipped, suffixes=base.TORCH_SUFFIXES),
    "legacy": _Row("torch.legacy", signs.legacy, suffixes=base.TORCH_SUFFIXES),
    "safetensors": _Row("safetensors.format", signs.braced, suffixes=base.SAFETENSORS_SUFFIXES),
    "pickle": _Row("torch.readonly.pickle", signs.pickled),
    "tar": _Row("torch.readonly.tar", signs.tar),
    "archive": _Row("torch.readonly.archive", signs.archive),
    "nemo-archive": _Row("parallel.format", signs.tar, "NEMO_ARCHIVE"),
    "torchscript": _Row("programs.format", signs.record("constants.pkl"), "TORCHSCRIPT"),
    "exported-program": _Row("programs.format", signs.record("archive_format"), "EXPORTED"),
    "arrays": _Row("arrays.pickled", signs.pickled),
    "npy": _Row("arrays.numpy_files", signs.begins(b"\x93NUMPY"), "NPY"),
    "npz": _Row("arrays.numpy_files", signs.zip_of(".npy"), "NPZ"),
    "flax": _Row("arrays.flax", signs.mapped),
    "gguf": _Row("arrays.gguf", signs.begins(b"GGUF")),
    "onnx": _Row("arrays.onnx", signs.model_proto),
    "hdf5": _Row("arrays.hdf5", signs.hdf5),
    "keras": _Row("arrays.hdf5", signs.zip_of("model.weights.h5"), "KERAS"),
    "tensorflow": _Row("arrays.tensorflow", signs.tensor_bundle),
    "orbax": _Row("arrays.orbax", signs.named("_metadata"), folder=True),
    "dcp": _Row("dcp.format", signs.named(".metadata"), folder=True),
    "dcp-ranks": _Row("dcp.format", signs.never, "RANKS_FORMAT", folder=True),
    "dcp-safetensors": _Row("dcp.format", signs.never, "IMAGES_FORMAT", folder=True),
    "zero": _Row("zero.format", signs.saved_by_deepspeed, folder=True),
    "megatron": _Row("parallel.format", signs.named("mp_rank_", "latest_checkpointed", "iter_", "release"), "MEGATRON",
                     folder=True),
    "nemo-ranks": _Row("parallel.format", signs.named("mp_rank_", "tp_rank_"), "NEMO", folder=True),
    "meta": _Row("parallel.format", signs.named("consolidated."), "META", folder=True),
    "fairseq": _Row("parallel.format", signs.named("-model_part-"), "FAIRSEQ", folder=True),
    "ranks": _Row("ranks.format", signs.named("rank"), folder=True),
    "hf": _Row("shards.format", signs.named("-of-", ".index"), folder=True, lists=True),
    "hf-bin": _Row("shards.format", signs.never, "TORCH_FORMAT", folder=True),
    "torch-checkpointing": _Row("shards.format", signs.named("metadata.pkl"), "ITEMS_FORMAT", folder=True),
    "hf-dcp": _Row("shards.format", signs.never, "SLICES_FORMAT", folder=True),
}  # fmt: skip

FORMATS = Formats(_ROWS)

HEAD = 4096


@shares_open_files()
def detect(path: str | os.PathLike[str]) -> Format:
    """Return the format of the file or folder at `path`.

    Raises:
        UnknownFormat: it is in no known format; the message says what it is instead.
        DistributedPart: it is one file of a distributed checkpoint.
        NoSuchFile: the file does not exist.
        WrongType: `path` is not a file name.
        CkptfixError: it cannot be read.
    """
    return _detected(located(path))


def _detected(name: str) -> Format:
    """Return the format of the file or folder of exactly this name."""
    try:
        if is_local(name):
            status = as_path(name).stat()
            if stat.S_ISDIR(status.st_mode):
                return by_content(name, b"", 0, folder=True)
            refuse_other_kinds(status.st_mode, name)
        elif found_as(name) == "folder":
            return by_content(name, b"", 0, folder=True)
    except OSError as error:
        raise not_readable(error, name) from None
    try:
        with open_source(name) as source:
            size = source.size
            head = source.read(0, min(HEAD, size))
    except WriteFailed as error:
        if not isinstance(error.__cause__, OSError):
            raise
        raise not_readable(error.__cause__, name) from None
    refuse_part(name)
    try:
        return by_content(name, head, size, folder=None)
    except UnknownFormat:
        refuse_part(name, behind=BEHIND)
        raise


def located(path: str | os.PathLike[str]) -> str:
    """Return the path of the checkpoint that `path` means: `path` itself, or the one model in a folder."""
    name = file_name(path)
    if is_place(name) and found_as(name) == "folder" and not is_folder_checkpoint(name):
        from ckptfix.formats import members

        return members.model_of(name, is_folder_checkpoint, _may_be_model) or name
    return name


def _may_be_model(path: str) -> bool:
    """Return whether the file at `path` has tensors that may be a model's; True if it cannot be read."""
    try:
        checkpoint = open_checkpoint(path)
    except CkptfixError:
        return True
    from ckptfix.formats.torch.module import modules

    states = checkpoint.state_dicts
    return any(row.weights and not row.optimizer for row in states) or bool(modules(checkpoint))


def is_folder_checkpoint(name: str) -> bool:
    """Return whether the folder `name` is a checkpoint of many files. Raises WriteFailed if it cannot be read."""
    with named(name):
        able = FORMATS.possible(signs.Beginning(name, b"", 0), folder=True)
        return any(format.score(name, b"", 0) for format in able)


UNPACKED = 95
"""The score of an archive of torch that was unpacked, beside those of the formats of folders."""


def folder_format(name: str) -> Format | None:
    """Return the format of the checkpoint of many files in the folder `name`, or whose index is the file `name`.

    It is None for other files, and for a folder that is an unpacked archive of torch. Nothing is raised for damage.
    """
    head, size = b"", 0
    if found_as(name) != "folder":
        if not name.endswith(".json") or found_as(name) != "file":
            return None
        with open_source(name) as source:
            size = source.size
            head = source.read(0, min(HEAD, size))
        able = FORMATS.of(folder=True)
    else:
        able = FORMATS.possible(signs.Beginning(name, b"", 0), folder=True)
    scores = [format.score(name, head, size) for format in able]
    least = UNPACKED if not head and is_file(as_path(name, "data.pkl")) else 1
    return able[scores.index(max(scores))] if scores and max(scores) >= least else None


def is_index_name(name: str) -> bool:
    """Return whether the name of a file is that of an index of the files in its folder; the file is not read."""
    return any(format.score(name, b"{", 1) for format in FORMATS.of(folder=True))


def read_files(paths: Sequence[StrPath]) -> Checkpoint:
    """Read the files of all ranks of a job as one checkpoint; see `Format.read_files`.

    Raises:
        Refused: they are not files of ranks, or two belong to the same rank.
        CkptfixError: an error of `open_checkpoint`.
    """
    (read,) = (format.read_files for format in FORMATS.of(folder=True) if format.read_files is not None)
    return read(paths)


def listed_beside(path: str) -> dict[str, str]:
    """Return the keys that an index beside the file `path` lists in other files; see `Format.listed_beside`."""
    listed: dict[str, str] = {}
    for format in FORMATS.listing(signs.Beginning(str(as_path(path).parent), b"", 0)):
        if format.listed_beside is not None:
            listed |= format.listed_beside(path)
    return listed


def by_content(name: str, head: bytes, size: int, *, folder: bool | None = False) -> Format:
    """Return the format that scores highest for a file that begins with `head`, or for a folder.

    Args:
        folder: consider only formats of folders (True) or only of files (False); None for a file that may also be the
            JSON index of a folder.

    Raises:
        UnknownFormat: no format matches.
    """
    able = FORMATS.possible(signs.Beginning(name, head, size), folder=folder is True)
    if folder is None and name.lower().endswith(".json"):
        able += FORMATS.of(folder=True)
    scores = [format.score(name, head, size) for format in able]
    if not any(scores):
        raise base.unknown(name, head, size)
    return able[scores.index(max(scores))]


def format_of(checkpoint: Checkpoint) -> Format:
    """Return the format of the files that `checkpoint` was read from."""
    return FORMATS[checkpoint.format]


def states(checkpoint: Checkpoint, aspect: Aspect) -> bool:
    """Return whether the format of `checkpoint` can state `aspect`; see `Format.states`."""
    return aspect in format_of(checkpoint).states


def weights_of(checkpoint: Checkpoint, at: str | None = None, *, views: bool = True) -> tuple[TensorEntry, ...]:
    """Return one state dict of a checkpoint, or all of its tensors, with ties and views; see `Format.weights`."""
    found = format_of(checkpoint).weights(checkpoint, at, views=views)
    return found if at is None else without_optimizer(found)


def without_optimizer(entries: tuple[TensorEntry, ...]) -> tuple[TensorEntry, ...]:
    """Return the tensors of one dict without those of an optimizer state in the same dict, as Megatron's folders have.

    If the dict holds nothing else, return all of them.
    """
    gone = kinds.optimizer_names(entry.key for entry in entries)
    return tuple(entry for entry in entries if entry.key not in gone) or entries if gone else entries


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Return whether the file at `path` has the content of a checkpoint, intact or not; True if it cannot be read.

    A search finds the models of other frameworks, and leaves out files that are mostly data, such as ``.npz``.
    """
    try:
        return is_searched(detect(path))
    except UnknownFormat:
        return False
    except CkptfixError:
        return True


def is_searched(format: Format) -> bool:
    """Return whether a search of a folder finds this format: torch's own, and the models of other frameworks."""
    return format.writes or format.folder or format.models or bool(format.states & base.OF_OBJECTS)


SNIFFED = 1 << 16
"""First bytes of a file without a checkpoint's suffix that are looked at to tell whether it may be one."""


def may_be_checkpoint(path: str) -> bool:
    """Return whether the first bytes of the file at `path` are those of a file format; no other bytes are read.

    A pickle must name torch's loader of storages in these bytes. Any zip or tar may be a checkpoint.
    """
    try:
        with open_source(path) as source:
            head = source.read(0, min(SNIFFED, source.size))
        if head.startswith(signs.ZIP):
            return True
        able = FORMATS.possible(signs.Beginning(path, head, len(head)), folder=False)
        return any(is_searched(format) and format.score(path, head, len(head)) for format in able)
    except (CkptfixError, OSError):
        return False


@shares_open_files()
def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read a checkpoint of any format: names, shapes and offsets, but no tensor bytes.

    Raises:
        UnknownFormat: it is in no known format; the message says what it is instead.
        DamagedFile: it contradicts itself so badly that nothing can be listed.
    """
    name = located(path)
    return open_as(name, _detected(name))


@gc_paused
@shares_open_files()
def open_as(name: str, format: Format) -> Checkpoint:
    """Read the file or folder of exactly this name in the format that `detect` found, like `open_checkpoint`."""
    if format.folder:
        return format.read(name)
    with open_source(name) as source:
        kept = _kept.get()
        if kept is not None and not is_place(name):
            # Two planned files may have equal names. After a command was planned, the next step reads its output.
            kept.clear()
            kept = None
        before = None if kept is None else kept.get((source.name, format.name))
        if before is not None and before.files[0].stamp.same(source.now()):
            return before
        checkpoint = format.read(source.name)
        if not checkpoint.files:
            checkpoint = replace(checkpoint, files=(FileVersion(source.name, source.mark),))
        if kept is not None and [file.path for file in checkpoint.files] == [source.name]:
            while len(kept) >= MOST_KEPT:
                del kept[next(iter(kept))]
            kept[source.name, format.name] = checkpoint
        return checkpoint


MOST_KEPT = 2
"""The most checkpoints that `reads_once` keeps."""

_kept: ContextVar[dict[tuple[str, str], Checkpoint] | None] = ContextVar("checkpoints that are kept", default=None)


@contextmanager
def reads_once() -> Iterator[None]:
    """Read a file only once inside, until it changes; decorate a function that reads one file in several steps.

    A checkpoint never changes: an edit makes new nodes, entries and plans. Only the last few files are kept.
    """
    if _kept.get() is not None:
        yield
        return
    token = _kept.set({})
    try:
        yield
    finally:
        _kept.reset(token)
