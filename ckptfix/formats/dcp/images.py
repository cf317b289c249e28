r"""Tensors of a ``.distcp`` file that is a safetensors file, or ends with one.

``FileSystemWriter(serialization_format=SerializationFormat.SAFETENSORS)`` writes the values of a file as archives,
followed by all of its tensors as one safetensors file. For each tensor, the metadata states the start of that
safetensors file and the number of bytes of the elements, but not their offset. None of torch's own readers can read
such a folder.

::

    archives of values   N   {"__metadata__": {"DCP_SHARDING_INFO": "{\\"fc.weight\\": {\\"saved_offsets\\": [3, 0]}}"},
                              "fc.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}   data

Source: torch/distributed/checkpoint/filesystem.py (``_write_item``, ``_write_files_from_queue``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from ckptfix.checkpoint import ByteRange
from ckptfix.dataclass import dataclass
from ckptfix.errors import DamagedFile, Truncated
from ckptfix.formats.dcp.skim import Sizes
from ckptfix.formats.dcp.window import ItemWindow, in_file
from ckptfix.formats.safetensors import SHARDING_INFO
from ckptfix.formats.safetensors import format as safetensors
from ckptfix.io.source import open_source

_START = b'{"__metadata__":{'
"""The first bytes of the header that the writer creates."""


@dataclass(frozen=True, slots=True)
class Image:
    """A safetensors file inside a file.

    Attributes:
        where: its range in the file.
        tensors: name -> (dtype, shape, range of its elements, offsets in the whole tensor).
    """

    where: ByteRange
    tensors: Mapping[str, tuple[str, Sizes, ByteRange, Sizes]]

    def find(self, fqn: str, dtype: str, shape: Sizes, offsets: Sizes) -> ByteRange:
        """Return the range of the elements of a chunk.

        Raises:
            DamagedFile: the file does not have them.
        """
        row = self.tensors.get(fqn)
        if row is None:
            raise self._wrong(f"the safetensors file of its item has no tensor {fqn}")
        own_dtype, own_shape, data, begin = row
        if (own_dtype, own_shape) != (dtype, shape):
            message = f"its item holds {own_dtype} {list(own_shape)}, but the metadata says {dtype} {list(shape)}"
            raise self._wrong(message)
        if begin != offsets:
            # The writer keeps one chunk of a name in a file; if there are several, it keeps the last one.
            message = f"its item is the part at {list(begin)}, but the metadata says {list(offsets)}"
            raise self._wrong(f"{message}: the writer left out the other chunk")
        return data

    def _wrong(self, message: str) -> DamagedFile:
        return DamagedFile(message, path=str(self.where.path), offset=self.where.offset)


class Images:
    """The safetensors files in the files of a folder, by their offset."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], Image | None] = {}

    def at(self, path: str, offset: int) -> Image | None:
        """Return the safetensors file at `offset` of the file `path`; None if something else is there.

        Raises:
            DamagedFile: it is damaged, or truncated.
        """
        key = path, offset
        if key not in self._known:
            self._known[key] = _read(path, offset)
        return self._known[key]


def _read(path: str, offset: int) -> Image | None:
    with open_source(path) as source:
        where = ByteRange(path, offset, max(source.size - offset, 0))
        if where.length <= 8:
            return None
        head = source.read(offset, min(where.length, 8 + len(_START)))
    if not head[8:].startswith(_START[: len(head) - 8]):
        return None
    window = ItemWindow(where)
    with in_file(window, "safetensors"):
        length = int.from_bytes(head[:8], "little")
        if length > where.length - 8:
            raise Truncated(f"the header should have {length} bytes, and {where.length - 8} are left")
        checkpoint = safetensors.read(window)
        entries = checkpoint.entries
        for finding in checkpoint.findings:
            raise DamagedFile(f"{finding.where}: {finding.message}" if finding.where else finding.message)
        offsets = _offsets(checkpoint.metadata.get(SHARDING_INFO, "{}"))
        tensors: dict[str, tuple[str, Sizes, ByteRange, Sizes]] = {}
        for entry in entries:
            data = window.real(entry.data)
            tensors[entry.key] = entry.dtype, entry.shape, data, offsets.get(entry.key, (0,) * len(entry.shape))
    return Image(where, tensors)


def _offsets(text: str) -> dict[str, Sizes]:
    """Return name -> the offsets of its part. Raises DamagedFile if the table is invalid."""
    try:
        said = json.loads(text)
        return {str(name): tuple(int(one) for one in row["saved_offsets"]) for name, row in said.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise DamagedFile(f"{SHARDING_INFO} cannot be read") from None


