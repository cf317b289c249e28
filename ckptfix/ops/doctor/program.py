"""Faults inside a program with weights (TorchScript, .pt2); without findings, it is intact."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckptfix.errors import CkptfixError, DamagedFile
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.formats.programs import exported, torchscript
from ckptfix.io.read import Progress
from ckptfix.io.source import open_source
from ckptfix.ops.doctor import data as scan_records
from ckptfix.ops.doctor import zip as doctor_zip
from ckptfix.ops.doctor.foreign import directory_of, id_of
from ckptfix.zips.local import record_data
from ckptfix.zips.read import DirectoryRecord

_FOLDERS = (
    *("data", "constants", "code", "extra", "models", "weights", "tensors", "attributes", "xl_model_weights", ".data"),
    *("mobile_debug_handles", "traced_inputs"),
)
_FILES = (
    *("data.pkl", "constants.pkl", "attributes.pkl", "traced_inputs.pkl", "bytecode.pkl", "model.json", "tensors.json"),
    *("version", "byteorder", "archive_format", "archive_version", ".format_version", ".storage_alignment"),
    *("mobile_debug_handles.pkl", "serialized_exported_program.json", "serialized_state_dict.pt"),
    *("serialized_constants.pt", "serialized_example_inputs.pt"),
)
"""Records that ``torch.jit.save`` and ``torch.export.save`` write (torch/csrc/jit/serialization/export_module.cpp,
torch/export/pt2_archive/constants.py)."""

_OF_PLAIN_FILES = frozenset({"stray-record", "deflated", "no-version", "misaligned-storage"})
"""Findings about a checkpoint's records that do not apply to a program's: torch deflates its code."""


def scan(path: str, *, fast: bool, progress: Progress | None = None) -> Iterator[Finding]:
    """Yield findings about the archive, its records, its pickle and, unless `fast`, the checksum of every record."""
    directory = directory_of(path)
    if directory is None or not directory.records:
        return
    root = directory.records[0].name.partition("/")[0]
    with open_source(path) as reader:
        for finding in doctor_zip.scan(reader, directory, root):
            if finding.id not in _OF_PLAIN_FILES:
                yield finding
    stray = [row for row in directory.records if not _is_known(row.name)]
    for row in stray[: doctor_zip.LISTED]:
        message = f"a record of {row.size:,} bytes that torch does not write"
        yield found("stray-record", message, where=row.name, offset=row.header)
    damaged: set[str] = set()
    for finding in () if fast else scan_records.scan(list(_pieces(path, directory.records)), "little", progress):
        damaged.add(finding.where)
        yield finding
    try:
        torchscript.read(path) or exported.read(path)
    except DamagedFile as error:
        if error.where in damaged:
            return
        yield found(id_of(error), error.message, where=error.where or "", offset=error.offset, fix="")
    except CkptfixError:
        # There are several models, or an older layout; extract reports which.
        return


def _is_known(name: str) -> bool:
    below = name.partition("/")[2]
    return name.endswith("/") or below in _FILES or below.partition("/")[0] in _FOLDERS


def _pieces(path: str, records: Sequence[DirectoryRecord]) -> Iterator[scan_records.CheckedRange]:
    with open_source(path) as reader:
        for record in records:
            if record.size:
                try:
                    data = record_data(reader, record)
                except CkptfixError:
                    continue
                yield scan_records.CheckedRange(record.name, data, record.crc32 or None)
