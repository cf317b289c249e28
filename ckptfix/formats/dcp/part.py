"""A single file of a distributed checkpoint (torch.distributed.checkpoint), which is meaningless without its folder.

::

    FOLDER/.metadata          a pickle: the parts of each tensor, and their (file, offset, length)
    FOLDER/__0_0.distcp       written by rank 0: torch archives end to end, one for each tensor or value
    FOLDER/__1_0.distcp       ...

It is recognized by its content, two whole archives end to end, or by its name, which also works for a file with one
item or a truncated file. Source: torch/distributed/checkpoint/filesystem.py.
"""

from __future__ import annotations

import re

from ckptfix.commands import command
from ckptfix.errors import ChangedFile, CkptfixError, DistributedPart
from ckptfix.formats.signs import is_tar_header
from ckptfix.io.source import is_file, is_local, open_source
from ckptfix.urls import as_path
from ckptfix.zips.archive_sequence import BEHIND, is_archive, several

SUFFIX = ".distcp"
_OWN_NAME = re.compile(r"__\d+_\d+(\..*)?")
"""Names that torch gives the files (``_generate_uuid`` aside): ``__RANK_COUNT.distcp``."""


def refuse_part(path: str, *, behind: int = 0) -> None:
    """Refuse a file of a distributed checkpoint, so that one of its items is never taken for the whole.

    Args:
        behind: for a file in no known format: also look for archives between other bytes, with at most this many bytes
            after the last archive.

    Raises:
        DistributedPart: the file at `path` holds several archives, or has the name of a file of such a folder.
    """
    place = as_path(path)
    beside = is_local(path) and is_file(place.with_name(".metadata"))
    named = place.name.endswith(SUFFIX) or (beside and _OWN_NAME.fullmatch(place.name) is not None)
    try:
        with open_source(path) as reader:
            head = reader.read(0, min(reader.size, 2048))
            zipped = head.startswith(b"PK\x03\x04")
            tail = reader.read(max(0, reader.size - 22), min(22, reader.size))
            if named and (zipped or beside or tail.startswith(b"PK\x05\x06")):
                what = "a file of a distributed checkpoint (DCP) with one rank's parts of the tensors"
            elif is_tar_header(head[:512].ljust(512)):
                return  # the torch files in it are members, such as those of NeMo's ranks
            elif (behind or is_archive(head) or tail.startswith(b"PK\x05\x06")) and (
                spans := several(reader, behind or BEHIND)
            ):
                first, second = spans
                what = (
                    f"several torch archives end to end (at {first.start:#x} and {second.start:#x}): a file of a "
                    "distributed checkpoint (DCP)"
                )
            else:
                return
    except CkptfixError as error:
        if isinstance(error, DistributedPart | ChangedFile):
            raise  # a second look would see only the new version of a file that changed
        return
    folder = str(place.parent)
    if beside:
        hint = f"its folder is the checkpoint: run {command('convert', folder, 'OUT')} to get one file"
    else:
        way = command("convert", "FOLDER", "OUT")
        hint = f"put it back in its folder, next to .metadata and the other ranks' files; then run {way}"
    raise DistributedPart(what, path=path, hint=hint)
