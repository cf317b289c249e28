"""Signs that a file or folder may be in a format: what detection asks before it imports the module of the format.

A sign is a necessary condition of `Format.score`, which decides. It needs no more than the first bytes of a file, the
unparsed directory of a zip, or the names in a folder.
"""

from __future__ import annotations

from collections.abc import Callable

from ckptfix.dataclass import cached_property
from ckptfix.errors import CkptfixError
from ckptfix.io.source import is_local, open_source
from ckptfix.urls import scan_folder
from ckptfix.zips.read import raw_directory

ZIP = b"PK\x03\x04"
MAGIC = 0x1950A86A20F9469CFC6C
"""The number that torch.save wrote first until 1.5."""
MAGIC_BYTES = MAGIC.to_bytes(10, "little")


class Beginning:
    """The beginning of a file, or a folder: all signs look at one, so that nothing is read twice.

    Attributes:
        path: of the file or folder.
        head: the first bytes; empty for a folder.
        size: bytes of the file; 0 for a folder.
    """

    def __init__(self, path: str, head: bytes, size: int) -> None:
        self.path = path
        self.head = head
        self.size = size

    def has_record(self, name: str) -> bool:
        """Return whether it is a zip whose directory contains ``/NAME``.

        The directory is searched and not parsed: nearly all zips are checkpoints.
        """
        return self.has_text(f"/{name}")

    def has_text(self, text: str) -> bool:
        """Return whether it is a zip whose directory contains `text`."""
        return self.head.startswith(ZIP) and text.encode() in self._directory

    @cached_property
    def _directory(self) -> bytes:
        try:
            with open_source(self.path) as reader:
                return raw_directory(reader)
        except CkptfixError:
            return b""

    @cached_property
    def names(self) -> tuple[str, ...] | None:
        """The names in the folder, in lower case; None if it cannot be listed, as in a store."""
        if not is_local(self.path):
            return None
        try:
            with scan_folder(self.path) as rows:
                return tuple(row.name.lower() for row in rows)
        except OSError:
            return None


Sign = Callable[[Beginning], bool]


def never(seen: Beginning) -> bool:
    """Return False: a checkpoint of this kind is recognized only when it is read as another format."""
    return False


def zipped(seen: Beginning) -> bool:
    """Return whether the file begins like a zip."""
    return seen.head.startswith(ZIP)


def record(name: str) -> Sign:
    """Return the sign that a zip has the record ``ROOT/NAME``."""
    return lambda seen: seen.has_record(name)


def begins(with_bytes: bytes) -> Sign:
    """Return the sign that the file begins with these bytes."""
    return lambda seen: seen.head.startswith(with_bytes)


def zip_of(suffix: str) -> Sign:
    """Return the sign that a zip has a file with this suffix."""
    return lambda seen: seen.has_text(suffix)


def mapped(seen: Beginning) -> bool:
    """Return whether the file begins like a MessagePack mapping whose first key is text."""
    head = seen.head
    at = {0xDE: 3, 0xDF: 5}.get(head[0], 1 if 0x81 <= head[0] <= 0x8F else 0) if head else 0
    return at > 0 and len(head) > at and (0xA0 <= head[at] < 0xC0 or 0xD9 <= head[at] <= 0xDB)


def model_proto(seen: Beginning) -> bool:
    """Return whether the file begins like an ONNX ModelProto: ir_version, then a producer, an opset or the graph."""
    head = seen.head
    return len(head) > 5 and head[0] == 0x08 and 1 <= head[1] <= 0x20 and head[2] in (0x12, 0x3A, 0x42)


def hdf5(seen: Beginning) -> bool:
    """Return whether the signature of HDF5 is at the beginning, or behind a user block of 512, 1024 or 2048 bytes."""
    return any(seen.head.startswith(b"\x89HDF\r\n\x1a\n", at) for at in (0, 512, 1024, 2048))


def tensor_bundle(seen: Beginning) -> bool:
    """Return whether the file begins with the first row of TensorFlow's index: an empty key, a header of one field."""
    return len(seen.head) > 4 and seen.head[:2] == b"\0\0" and 0 < seen.head[2] < 64 and seen.head[3] == 0x08


def legacy(seen: Beginning) -> bool:
    """Return whether the file begins with the pickle of torch's magic number."""
    return is_legacy(seen.head)


def is_legacy(head: bytes) -> bool:
    """Return whether these first bytes hold the pickle of torch's magic number."""
    return MAGIC_BYTES in head[:24] or head.startswith(f"L{MAGIC}L\n".encode())


def braced(seen: Beginning) -> bool:
    """Return whether an opening brace follows the first eight bytes, as in safetensors."""
    return seen.size > 8 and seen.head[8:].lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{")


def pickled(seen: Beginning) -> bool:
    """Return whether the file begins like a pickle of protocol 2 or later, and not with torch's magic number."""
    return seen.head[:1] == b"\x80" and 2 <= seen.head[1:2].ljust(1)[0] <= 5 and not is_legacy(seen.head)


def tar(seen: Beginning) -> bool:
    """Return whether the file begins with the header of a tar member."""
    return len(seen.head) >= 512 and is_tar_header(seen.head[:512])


def is_tar_header(block: bytes) -> bool:
    """Return whether the checksum of a tar header is right: the sum of its bytes, its own field counted as spaces."""
    try:
        stated = int(block[148:156].strip(b" \0") or b"x", 8)
    except ValueError:
        return False
    return stated == sum(block[:148]) + 8 * 32 + sum(block[156:])


def archive(seen: Beginning) -> bool:
    """Return whether the file is a tar, or a zip that does not begin with a pickle."""
    first = seen.head[30 : 30 + int.from_bytes(seen.head[26:28], "little")]
    return not first.endswith(b".pkl") if zipped(seen) else tar(seen)


def named(*parts: str) -> Sign:
    """Return the sign that one of the names in a folder contains one of `parts`, which are in lower case."""
    return lambda seen: seen.names is None or any(part in name for name in seen.names for part in parts)


def saved_by_deepspeed(seen: Beginning) -> bool:
    """Return whether the folder is or holds a save of DeepSpeed."""
    from ckptfix.formats.deepspeed import find

    return seen.names is None or find(seen.path) is not None
