"""torch.save since 1.6: a zip archive of stored records under one root folder.

::

    ROOT/data.pkl               the object; storages are persistent ids ('storage', class, key, location, numel)
    ROOT/.format_version        since 2.7; with .storage_alignment
    ROOT/byteorder              'little' or 'big'; absent before 2.1, and then little
    ROOT/data/KEY               the bytes of a storage
    ROOT/version                of the archive format, '3'
    ROOT/.data/serialization_id

The root need not match the file's name. Source: torch/serialization.py (``_save``, ``_load``) and
caffe2/serialize/inline_container.cc.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

from ckptfix.checkpoint import (
    ByteRange,
    Checkpoint,
    Drop,
    Edit,
    OutputFile,
    Plan,
    Put,
    Segment,
    TensorEntry,
    segment_length,
)
from ckptfix.commands import quoted
from ckptfix.errors import BadDirectory, Bomb, DamagedFile, Unsupported
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.formats.base import OF_OBJECTS, TORCH_SUFFIXES, Format, plain_weights, unknown
from ckptfix.formats.in_place import data_moves, unchanged
from ckptfix.formats.torch import common as torch_common
from ckptfix.formats.torch.edit import patches
from ckptfix.formats.torch.object import object_of_pickle
from ckptfix.formats.torch.zip_layout import (
    MAX_PICKLE,
    ZipCheckpoint,
    ZipStorages,
    ambiguous_names,
    fresh,
    refuse_damaged_pickle,
)
from ckptfix.formats.torch.zip_layout import NAME as NAME
from ckptfix.io.blocks import shift_for
from ckptfix.io.crc import checksum
from ckptfix.io.layers import MAX_RATIO
from ckptfix.io.read import read_chunks
from ckptfix.io.source import Source, open_source
from ckptfix.io.virtual_files import PlannedFile
from ckptfix.pickles import Graph, parse, splice
from ckptfix.zips.local import read_local, record_data
from ckptfix.zips.read import Directory, read_directory
from ckptfix.zips.write import NewRecord, replace_record

if TYPE_CHECKING:
    from ckptfix.formats.torch.weights import Weights

MAX_VERSION = 10


def score(path: str, head: bytes, size: int) -> int:
    """Return 90 for a zip whose first record is a data.pkl, 40 for any other zip, else 0."""
    if not head.startswith(b"PK\x03\x04"):
        return 0
    name_length = int.from_bytes(head[26:28], "little")
    return 90 if head[30 : 30 + name_length].endswith(b"/data.pkl") else 40


def read(path: str) -> Checkpoint:
    """Read names, shapes and places; see the contract in `base`."""
    with open_source(path) as reader:
        directory = read_directory(reader)
        findings: list[Finding] = []
        archive, pickle = _open(reader, directory, findings)
        traits: dict[str, object] = {"zip root": archive.root, "records": len(directory.records)}
        byteorder = small_record(reader, directory, f"{archive.root}/byteorder")
        if byteorder not in ("", "little", "big"):
            raise DamagedFile(f"unknown byte order {byteorder[:20]!r}", path=path, where=f"{archive.root}/byteorder")
        version = small_record(reader, directory, f"{archive.root}/version")
        if version.isdigit() and int(version) > MAX_VERSION:
            raise Unsupported(f"archive version {version} is newer than {MAX_VERSION}", path=path)
        traits["version"] = version or "none"
        size = reader.size
    if byteorder:
        traits["byteorder"] = byteorder
    records = directory.records
    sums = [crc32 for crc32, size in zip(records.sums, records.sizes, strict=True) if size]
    if sums and not any(sums):
        traits["checksums"] = "none"
    if directory.trailing:
        findings.append(
            found("trailing-bytes", f"{directory.trailing} bytes follow the archive", offset=size)
        )
    places = ZipStorages(path, archive)
    return torch_common.build(
        path,
        format=NAME,
        size=size,
        found=object_of_pickle(pickle, path, archive.pickle.name),
        container=archive,
        # torch reads the record of a storage before it checks the device.
        storages=torch_common.Storages(
            places, meta_has_bytes=True, sizes=places.sizes, forget=places.forget
        ),
        traits=traits,
        byteorder="big" if byteorder == "big" else "little",
        findings=findings,
    )


def read_object(path: str) -> tuple[ZipCheckpoint, Graph]:
    """Return the container and the parsed pickle of a file, without building a checkpoint. Raises like `read`."""
    archive, pickle = read_stream(path)
    return archive, parse(pickle, path=path, where=archive.pickle.name)


def read_stream(path: str) -> tuple[ZipCheckpoint, bytes]:
    """Return the container of a file and its pickle, unparsed. Raises like `read`."""
    with open_source(path) as reader:
        return _open(reader, read_directory(reader), [])


def _open(reader: Source, directory: Directory, findings: list[Finding]) -> tuple[ZipCheckpoint, bytes]:
    """Return the archive and the bytes of its pickle."""
    records = directory.records
    pickles = [records[index] for index in records.with_ending("/data.pkl")]
    roots = {record.name.partition("/")[0] for record in pickles if record.name.count("/") == 1}
    scripted = records.with_ending("/constants.pkl") or records.with_ending("/archive_format")
    if len(roots) != 1 or scripted:
        raise unknown(reader.name, reader.read(0, min(4096, reader.size)), reader.size)
    (root,) = roots
    record = next(record for record in pickles if record.name == f"{root}/data.pkl")
    if record.size > MAX_PICKLE:
        raise Unsupported(f"a pickle of {record.size} bytes is too large", path=reader.name, where=record.name)
    if record.size > max(MAX_RATIO * record.stored, 1 << 20):
        message = f"{record.stored} bytes claim to inflate to {record.size}, more than any checkpoint's pickle"
        raise Bomb(message, path=reader.name, where=record.name, offset=record.header)
    data = b"".join(read_chunks(record_data(reader, record)))
    intact = record.crc32 in (0, checksum(data))
    if not intact:
        message = "the bytes do not match their CRC-32: the file is damaged"
        findings.append(found("bad-crc", message, where=record.name, offset=record.header))
    ambiguous = ambiguous_names(directory)
    if record.name in ambiguous:
        raise BadDirectory("several records have the name of the pickle", path=reader.name, where=record.name)
    for name in sorted(ambiguous):
        findings.append(found("duplicate-record", "several records have this name", where=name))
    return ZipCheckpoint(directory, root, record, intact, ambiguous), data


def small_record(reader: Source, directory: Directory, name: str) -> str:
    """Return the text of a short record; an empty string if the record is missing or long."""
    record = directory.records.named(name)
    if record is None or record.size > 64:
        return ""
    return b"".join(read_chunks(record_data(reader, record))).decode("ascii", "replace").strip()


def plan_edit(checkpoint: Checkpoint, edits: Sequence[Edit], dest: str) -> Plan:
    """Plan the checkpoint with `edits` applied to its pickle; every other byte is copied.

    A Drop, or a Put of other bytes, leads to a new layout.

    Raises:
        DamagedFile: the pickle does not match its checksum, and an edit would hide that; or torch reads other bytes
            of a record than the file means (see `refuse_disputed`).
    """
    refuse_disputed(checkpoint)
    if any(isinstance(edit, Drop | Put) for edit in edits):
        from ckptfix.formats.torch import rewrite as torch_rewrite

        if torch_rewrite.is_needed(checkpoint, edits):
            return torch_rewrite.plan_edits(checkpoint, edits, dest)
    parts = torch_common.pickled_object(checkpoint)
    archive = archive_of(checkpoint)
    assert archive is not None
    changes = patches(parts.found, edits)
    path = checkpoint.path
    segments: list[Segment] = [ByteRange(path, 0, checkpoint.size)]
    if changes:
        refuse_damaged_pickle(archive, path)
        with open_source(path) as reader:
            new = splice(parts.graph, changes)
            segments = replace_record(reader, archive.directory, archive.pickle, new, shift_for(dest))
    return Plan((OutputFile.of(dest, segments),))


def in_place(checkpoint: Checkpoint, plan: Plan, block: Callable[[], int]) -> Plan:
    """Plan an in-place edit (`Format.in_place`): the new pickle, new storages and a new directory are appended.

    Records that the edit leaves out stay, and nothing refers to them.
    """
    (file,) = plan.files
    if unchanged(file):
        return plan
    archive = archive_of(checkpoint)
    assert archive is not None
    from ckptfix.zips.append import append_records

    with open_source(PlannedFile(file)) as reader:
        planned, pickle = _open(reader, read_directory(reader), [])
        added = _added(archive, planned, file, reader)
    with open_source(checkpoint.path) as reader:
        segments = append_records(reader, archive.directory, archive.pickle, pickle, added)
    return replace(plan, files=(OutputFile.of(file.path, segments),))


def _added(archive: ZipCheckpoint, planned: ZipCheckpoint, file: OutputFile, reader: Source) -> list[NewRecord]:
    """Return the records of a planned file that the archive lacks.

    Raises:
        Unsupported: a record has the name of an existing one and other data; or its data is copied from a file.
    """
    here = {row.name.removeprefix(f"{archive.root}/"): (row.size, row.crc32) for row in archive.directory.records}
    starts = accumulate(map(segment_length, file.segments), initial=0)
    segments = dict(zip(starts, file.segments, strict=False))
    added = []
    for row in planned.directory.records:
        name = row.name.removeprefix(f"{planned.root}/")
        if row.name == planned.pickle.name or here.get(name) == (row.size, row.crc32):
            continue
        data = segments.get(read_local(reader, row).data, b"") if row.size else b""
        if name in here or isinstance(data, ByteRange) or segment_length(data) != row.size:
            raise data_moves(file.path)
        added.append(NewRecord(f"{archive.root}/{name}", data))
    return added


def refuse_disputed(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint with a record that torch would misread: such a record must not be copied silently.

    Raises:
        BadDirectory: readers disagree on the bytes of a record (see `Record.dispute`).
    """
    archive = archive_of(checkpoint)
    for record in archive.directory.records.disputed() if archive is not None else ():
        dispute = record.dispute
        if archive is not None and dispute is not None and record.name.startswith(f"{archive.root}/"):
            hint = f"ckptfix repair {quoted(checkpoint.path)} OUT"
            raise BadDirectory(dispute, path=checkpoint.path, where=record.name, offset=record.header, hint=hint)


def plan_write(entries: Sequence[TensorEntry], dest: str, *, metadata: Mapping[str, str] | None = None) -> Plan:
    """Plan a fresh file that holds the state dict of `entries` as an OrderedDict."""
    from ckptfix.formats.torch.emit import state_dict_pickle

    pickle, storages = state_dict_pickle(entries)
    return Plan((OutputFile.of(dest, fresh(pickle, storages)),))


def plan_state_dict(weights: Weights, dest: str) -> Plan:
    """Plan a fresh file of a state dict (`Format.plan_state_dict`)."""
    from ckptfix.formats.torch.weights import plan_torch

    return plan_torch(weights, dest, legacy=False)


def recode(checkpoint: Checkpoint, dest: str) -> Plan:
    """Plan the object of a checkpoint of another format as a zip (`Format.recode`)."""
    from ckptfix.formats.torch.containers import to_zip

    return to_zip(checkpoint, dest)


def archive_of(checkpoint: Checkpoint) -> ZipCheckpoint | None:
    """Return the archive of a zip checkpoint; None for other formats."""
    parts = torch_common.maybe_pickled_object(checkpoint)
    return parts.container if parts is not None and isinstance(parts.container, ZipCheckpoint) else None


def refuses(entry: TensorEntry) -> str | None:
    """Return None: a zip can hold every tensor that torch has."""
    return None


def keeps_all(checkpoint: Checkpoint, plan: Plan, but: Collection[str] = ()) -> bool:
    """Return whether `plan` certainly is an edit that keeps all tensors; see the contract in `base`."""
    from ckptfix.formats.torch.unchanged import edits

    return edits.keeps_all(checkpoint, plan, but, read_stream)


FORMAT = Format(
    name=NAME,
    title="PyTorch zip",
    suffixes=TORCH_SUFFIXES,
    states=OF_OBJECTS | {"checksums"},
    score=score,
    read=read,
    validate=torch_common.all_findings,
    weights=plain_weights,
    refuses=refuses,
    plan_edit=plan_edit,
    in_place=in_place,
    plan_write=plan_write,
    since=(1, 6),
    plan_state_dict=plan_state_dict,
    recode=recode,
    keeps_all=keeps_all,
)
