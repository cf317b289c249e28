"""A planned folder read as it will be, so that the weight audit can run before a byte is written."""

from __future__ import annotations

import os

from ckptfix.checkpoint import Checkpoint, FileVersion, Plan
from ckptfix.checkpoint.file_version import FileStat
from ckptfix.errors import DamagedFile
from ckptfix.formats.dcp import metadata as dcp_metadata
from ckptfix.formats.dcp.metadata import Metadata
from ckptfix.formats.dcp.read import ItemFiles, assembled
from ckptfix.io.source import open_source
from ckptfix.io.virtual_files import PlannedFile


def planned_metadata(plan: Plan) -> Metadata | None:
    """Return the content of the planned `.metadata`; None without one.

    Raises:
        DamagedFile: readers would not accept it.
    """
    file = next((file for file in plan.files if os.path.basename(file.path) == dcp_metadata.NAME), None)  # noqa: PTH119
    if file is None:
        return None
    with open_source(PlannedFile(file)) as source:
        return dcp_metadata.understood(source.read(0, source.size), file.path)


def read_planned(plan: Plan) -> Checkpoint:
    """Return the checkpoint of a planned folder.

    Raises:
        DamagedFile: the plan has no `.metadata`, or one that readers would not accept.
    """
    said = planned_metadata(plan)
    if said is None:
        raise DamagedFile("the plan has no .metadata")
    last = plan.files[-1]
    folder = os.path.dirname(last.path)  # noqa: PTH120 (a name, not a place)
    paths: dict[str, str] = {os.path.relpath(file.path, folder): PlannedFile(file) for file in plan.files}
    sizes = {name: planned.size for name, planned in paths.items() if isinstance(planned, PlannedFile)}
    mark = FileVersion(PlannedFile(last), FileStat(last.nbytes))
    return assembled(folder, said, ItemFiles(folder, sizes, paths, (mark,)))
