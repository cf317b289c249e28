"""``ckptfix.inspect``: describe a checkpoint from its headers alone."""

from __future__ import annotations

from dataclasses import replace

from ckptfix.arguments import checks_types
from ckptfix.errors import StrPath, UnknownFormat, file_name
from ckptfix.formats import located, open_checkpoint
from ckptfix.formats.members import members
from ckptfix.io.source import is_folder, shares_open_files
from ckptfix.ops import rank_shards
from ckptfix.ops.inspect.describe import Inspection, of_folder
from ckptfix.ops.inspect.describe import inspect as inspect_op
from ckptfix.ops.inspect.training import beside
from ckptfix.pickles.collector import gc_paused


@checks_types
@gc_paused
@shares_open_files()
def inspect(path: StrPath) -> Inspection:
    """Describe the checkpoint at `path` from its headers.

    For a folder of files, as trainers leave it, the model is described, and every file is listed
    (`Inspection.members`).
    If there is no model, or more than one, only the files are listed.
    """
    name = file_name(path)
    place = located(name)
    if place != name:
        found = inspect_op(open_checkpoint(place))
        return replace(found, members=members(name), training={**beside(name), **found.training})
    try:
        checkpoint = open_checkpoint(place)
        described = inspect_op(checkpoint)
        return replace(described, findings=(*described.findings, *rank_shards.remarks(checkpoint)))
    except UnknownFormat as error:
        inside = members(name) if error.kind == "no-checkpoint" and is_folder(name) else ()
        if not any(member.may_be_checkpoint for member in inside):
            raise
        return of_folder(name, inside)
