"""The verdict on one file from its structure alone: what it is, and what is wrong with it; the file is read once."""

from __future__ import annotations

from ckptfix.errors import CkptfixError, StrPath, file_name
from ckptfix.formats import located
from ckptfix.io.source import found_as, shares_open_files
from ckptfix.ops import doctor, inspect
from ckptfix.ops.doctor import examine
from ckptfix.ops.doctor.foreign import open_file
from ckptfix.ops.doctor.report import Diagnosis
from ckptfix.ops.inspect.describe import Inspection
from ckptfix.ops.inspect.describe import inspect as described
from ckptfix.pickles.collector import gc_paused


@gc_paused
@shares_open_files()
def verdict(path: StrPath) -> tuple[Diagnosis, Inspection | None]:
    """Return what ``doctor(path, fast=True)`` and ``inspect(path)`` return; None for a file that cannot be read.

    Raises:
        CkptfixError: there is no such file.
    """
    name = file_name(path)
    if found_as(name) == "file" and located(name) == name:
        try:
            checkpoint = open_file(name)
            inspection = described(checkpoint)
        except CkptfixError:
            pass
        else:
            done = examine.examine(name, fast=True, checkpoint=checkpoint)
            return doctor.finished(done, fast=True), inspection
    done = doctor.doctor(name, fast=True)
    try:
        return done, inspect.inspect(name) if done.run is None and done.format is not None else None
    except CkptfixError:
        return done, None
