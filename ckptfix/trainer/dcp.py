"""torch.distributed.checkpoint directories: all processes write them, one reads them, and no foreign code is run.

A directory has ``.metadata``, a pickle that maps the parts of each tensor to files, and ``.distcp`` files in which
each tensor or value is a separate torch zip file. torch's reader unpickles anything in the first and in values;
`SafeReader` and `SafePlanner` accept only the globals of a normal directory.
"""

from __future__ import annotations

import io
import pickle
import warnings
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import save

from ckptfix.errors import BadPickle, CkptfixError, DamagedFile

METADATA = ".metadata"

KNOWN = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "collections": {"OrderedDict"},
}
"""The globals that ``.metadata`` may name, by module: data classes, dtypes and a path. Calling them is harmless."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if name not in KNOWN.get(module, ()):
            raise BadPickle(f"it names {module}.{name}, which no checkpoint directory contains", where=METADATA)
        return super().find_class(module, name)


class SafeReader(FileSystemReader):
    """torch's reader, with a fixed list of globals that ``.metadata`` may name."""

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        with open(Path(self.path) / METADATA, "rb") as file:
            metadata: Metadata = _Unpickler(file).load()
        return metadata


class SafePlanner(_EmptyStateDictLoadPlanner):
    """torch's planner for everything in a directory, with values read as by ``torch.load(weights_only=True)``."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        address = self.mappings[read_item.dest_index.fqn]
        set_element(self.original_state_dict, address, torch.load(value, weights_only=True, map_location="cpu"))


def read(path: Path) -> dict[str, object]:
    """Read everything in the directory, nested as it was saved, with whole tensors on the CPU.

    Raises:
        DamagedFile: it is not a checkpoint directory, or is incomplete.
        BadPickle: it contains classes that a checkpoint directory does not have.
    """
    found: dict[str, object] = {}
    if not (path / METADATA).is_file():
        raise DamagedFile(f"it has no {METADATA}, so it is not a checkpoint directory", path=path)
    reader, planner = SafeReader(path), SafePlanner()
    try:
        metadata = reader.read_metadata()
        # torch's loader reads .metadata again, and logs a traceback if that fails.
        if not isinstance(metadata, Metadata):
            raise DamagedFile(f"{METADATA} does not hold metadata", path=path)
        _load_state_dict(found, storage_reader=reader, planner=planner, no_dist=True)
    except CkptfixError as error:
        error.path = error.path or str(path)
        raise
    except (Exception, CheckpointException) as error:
        # A damaged file may raise anything, because torch does not check what it reads. CheckpointException is a
        # BaseException, so it must be named.
        causes = error.failures.values() if isinstance(error, CheckpointException) else [(error, None)]
        words = "; ".join(" ".join(str(cause).split())[:200] for cause, _ in causes)
        raise DamagedFile(f"torch cannot read it: {words}", path=path) from error
    return found


def write(contents: dict[str, object], folder: Path) -> None:
    """Write `contents` to `folder`. Each process writes its own shards; rank 0 writes what all share."""
    with warnings.catch_warnings():
        if not distributed.is_initialized():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        save(contents, checkpoint_id=folder, planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True))
