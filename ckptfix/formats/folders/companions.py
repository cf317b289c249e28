"""Companion files in the folder of a checkpoint: those copied with an edited checkpoint, and those left behind."""

from __future__ import annotations

import os
from collections.abc import Collection
from itertools import islice

from ckptfix.checkpoint import ByteRange, OutputFile
from ckptfix.dataclass import dataclass
from ckptfix.errors import CkptfixError, Refused, not_readable
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.formats.folders.safe_paths import file_inside
from ckptfix.io.output import TEMP_SUFFIX
from ckptfix.io.source import stamp
from ckptfix.io.unfinished_edits import JOURNAL, UNDO
from ckptfix.urls import as_path, scan_folder


@dataclass(frozen=True, slots=True)
class Beside:
    """The files in the folder besides those of the checkpoint itself.

    Attributes:
        folder: the folder.
        files: names of regular files that are copied along: a configuration, a tokenizer, a license.
        left: (name, reason) of entries left behind: folders, pipes, links that lead out of the folder.
    """

    folder: str
    files: tuple[str, ...] = ()
    left: tuple[tuple[str, str], ...] = ()

    def copied_to(self, dest: str) -> tuple[OutputFile, ...]:
        """Return copies of these files, byte for byte, in the folder `dest`."""
        made = []
        for name in self.files:
            path = str(as_path(self.folder, name))
            whole = ByteRange(path, 0, stamp(path).size)
            made.append(OutputFile.of(as_path(dest, name), [whole], along=True))
        return tuple(made)

    def findings(self) -> tuple[Finding, ...]:
        """Return a note for each entry that is left behind."""
        return tuple(found("left-behind", f"it was not copied: {why}", where=name) for name, why in self.left)


_OURS = (TEMP_SUFFIX, JOURNAL, UNDO)
"""Suffixes of the files that ckptfix itself keeps in a folder while it writes."""

MOST = 2000
"""The limit of the number of files and folders besides those of a checkpoint."""


def beside(folder: str, own: Collection[str]) -> Beside:
    """Return the companion files in `folder`: all but `own`, the paths of the files of the checkpoint.

    Raises:
        Refused: the folder holds far more files than a checkpoint has companions, and all would be copied.
        CkptfixError: the folder cannot be listed.
    """
    mine = {os.path.abspath(path) for path in own}  # noqa: PTH100 (a path is not resolved: a link has its own name)
    around = {str(above) for path in mine for above in as_path(path).parents}
    files: list[str] = []
    left: list[tuple[str, str]] = []
    try:
        rows = sorted(islice(scan_folder(folder), len(mine) + MOST + 1), key=lambda row: row.name)
        if len(rows) > len(mine) + MOST:
            hint = "move the files of the checkpoint to a separate folder"
            raise Refused(
                f"the folder has more than {MOST:,} files besides those of the checkpoint", path=folder, hint=hint
            )
        for row in rows:
            path = os.path.abspath(row.path)  # noqa: PTH100
            if path in mine or path in around or row.name.endswith(_OURS):
                continue
            if row.is_dir():
                left.append((row.name, "it is a folder"))
                continue
            try:
                file_inside(folder, row.name, where=folder)
            except CkptfixError as error:
                left.append((row.name, _why(row, error)))
            else:
                files.append(row.name)
    except OSError as error:
        raise not_readable(error, folder) from None
    return Beside(folder, tuple(files), tuple(left))


def _why(row: os.DirEntry[str], error: CkptfixError) -> str:
    if not row.is_symlink():
        return "it is not a regular file"
    return (
        "it is a broken link" if isinstance(error, FileNotFoundError) else "it is a link that leads out of the folder"
    )
