"""Readers of the pickles in a folder: the files, and fields, counts, lists and shapes of their objects."""

from __future__ import annotations

from collections.abc import Mapping

from ckptfix.checkpoint import Checkpoint
from ckptfix.dataclass import dataclass
from ckptfix.errors import Unsupported
from ckptfix.formats.base import unknown
from ckptfix.formats.torch.call_classes import class_of
from ckptfix.formats.torch.common import Storages, pickled_object
from ckptfix.formats.torch.zip_layout import ZipStorages, refuse_damaged_pickle
from ckptfix.io.source import open_source
from ckptfix.pickles import Call, PersId
from ckptfix.pickles.graph import Node, pairs

HEAD = 4096

WHOLE_ZIP = 90
"""The score of a zip that torch.save wrote."""


def read_torch(path: str) -> Checkpoint:
    """Read the torch file at `path`, one of the files of a folder.

    Raises:
        UnknownFormat: it is not a torch file; the message says what it is instead.
        Unsupported: its data is big-endian.
        DamagedFile: it contradicts itself so badly that nothing can be listed, or its pickle was changed after it was
            written.
    """
    from ckptfix.formats.torch import legacy, zip

    with open_source(path) as source:
        head = source.read(0, min(HEAD, source.size))
        able = [format for format in (zip.FORMAT, legacy.FORMAT) if format.score(path, head, source.size)]
        if not able:
            raise unknown(path, head, source.size)
        checkpoint = max(able, key=lambda format: format.score(path, head, source.size)).read(path)
    if checkpoint.byteorder != "little":
        raise _big_endian(path)
    refuse_damaged(checkpoint)
    return checkpoint


@dataclass(frozen=True, slots=True)
class ParsedFile:
    """A torch file whose object was parsed and not interpreted: no names, state dicts or findings were derived.

    Attributes:
        root: the object.
        storages: the storages by their references.
        saved_as: the name that torch.save gave the records: the file's own name at that time, without the part after
            the last dot. Empty where the file does not record it.
    """

    path: str
    root: Node
    storages: Storages
    saved_as: str = ""


def open_torch(path: str) -> ParsedFile:
    """Return the object of the torch file at `path`. Raises the same errors as `read_torch`."""
    from ckptfix.formats.torch import zip

    with open_source(path) as source:
        head = source.read(0, min(HEAD, source.size))
        if zip.FORMAT.score(path, head, source.size) < WHOLE_ZIP:
            checkpoint = read_torch(path)
            parts = pickled_object(checkpoint)
            return ParsedFile(path, parts.graph.root, parts.storages)
        archive, graph = zip.read_object(path)
        if zip.small_record(source, archive.directory, f"{archive.root}/byteorder") == "big":
            raise _big_endian(path)
        refuse_damaged_pickle(archive, path)
        places = ZipStorages(path, archive)
        storages = Storages(places, meta_has_bytes=True, sizes=places.sizes, graph=graph)
        return ParsedFile(path, graph.root, storages, archive.root)


def _big_endian(path: str) -> Unsupported:
    hint = "convert each file to a torch file of the other byte order on the machine that wrote it"
    return Unsupported("the folder has a big-endian file", path=path, hint=hint)


def refuse_damaged(checkpoint: Checkpoint) -> None:
    """Refuse a file whose pickle was changed after it was written: the joined object would not show the damage.

    Raises:
        DamagedFile: the checksum of the pickle is wrong.
    """
    from ckptfix.formats.torch.zip import archive_of

    archive = archive_of(checkpoint)
    if archive is not None:
        refuse_damaged_pickle(archive, checkpoint.path)


def numbered(node: Node) -> dict[int, Node]:
    """Return the values of a dict under integer keys, or the items of a list by their positions."""
    if isinstance(node, (list, tuple)):
        return dict(enumerate(node))
    return {key: value for key, value in pairs(node) or () if type(key) is int}


def listed(node: Node) -> list[Node]:
    """Return the items of a list or tuple; an empty list for anything else."""
    return list(node) if isinstance(node, (list, tuple)) else []


def number(node: Node) -> int | None:
    """Return an integer; None for anything else."""
    return node if type(node) is int else None


def class_name(node: Node) -> str:
    """Return the name of the class of an object; ``""`` if it is not an object."""
    found = class_of(node) if type(node) is Call else None
    return "" if found is None else found.name


def text_of(found: Mapping[str, Node], name: str) -> str | None:
    """Return the text under `name`; None for anything else."""
    value = found.get(name)
    return str(value) if isinstance(value, str) else None


def storage_key(node: Node) -> str | None:
    """Return the key of the storage of a dense tensor; None for anything else."""
    arguments = node.arguments if type(node) is Call else ()
    persid = arguments[0] if arguments else None
    if type(persid) is PersId and len(persid.fields) > 2 and isinstance(persid.fields[2], str):
        return str(persid.fields[2])
    return None
