"""torch.distributed.checkpoint directories: written by all processes, read by one, and no pickle of theirs run.

A directory has ``.metadata``, a pickle that says which tensor has which parts in which file, and ``.distcp`` files
in which each tensor or value is a separate torch zip file. torch's reader unpickles the first whatever is in it,
and values too; `SafeReader` and `SafePlanner` take only what such a directory is made of.
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
"""What ``.metadata`` names, module by module: data classes, dtypes and a path. None of it acts when it is called."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if name not in KNOWN.get(module, ()):
            raise BadPickle(f"it names {module}.{name}, which no checkpoint directory has", where=METADATA)
        return super().find_class(module, name)


class SafeReader(FileSystemReader):
    """torch's reader, with a closed list of what ``.metadata`` may name."""

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        with open(Path(self.path) / METADATA, "rb") as file:
            metadata: Metadata = _Unpickler(file).load()
        return metadata


class SafePlanner(_EmptyStateDictLoadPlanner):
    """torch's planner for everything that a directory has, with values read as ``torch.load(weights_only=True)``."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        address = self.mappings[read_item.dest_index.fqn]
        set_element(self.original_state_dict, address, torch.load(value, weights_only=True, map_location="cpu"))


def read(path: Path) -> dict[str, object]:
    """All that the directory holds, nested as it was saved, with whole tensors on the CPU.

    Raises:
        DamagedFile: it is not such a directory, or an incomplete one.
        BadPickle: it contains classes that such a directory does not have.
    """
    found: dict[str, object] = {}
    if not (path / METADATA).is_file():
        raise DamagedFile(f"a folder without {METADATA} is not a checkpoint directory", path=path)
    reader, planner = SafeReader(path), SafePlanner()
    try:
        metadata = reader.read_metadata()
        # torch's loader reads .metadata again, and logs a failure of it with a traceback.
        if not isinstance(metadata, Metadata):
            raise DamagedFile(f"{METADATA} holds no metadata", path=path)
        _load_state_dict(found, storage_reader=reader, planner=planner, no_dist=True)
    except CkptfixError as error:
        error.path = error.path or str(path)
        raise
    except (Exception, CheckpointException) as error:
        # Anything may come from a damaged file: torch does not check what it reads there, and its error is not one.
        causes = error.failures.values() if isinstance(error, CheckpointException) else [(error, None)]
        words = "; ".join(" ".join(str(cause).split())[:200] for cause, _ in causes)
        raise DamagedFile(f"torch cannot read it: {words}", path=path) from error
    return found


def write(contents: dict[str, object], folder: Path) -> None:
    """Write `contents` to `folder`, each process its own shards; what all have is rank 0's."""
    with warnings.catch_warnings():
        if not distributed.is_initialized():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        save(contents, checkpoint_id=folder, planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True))
