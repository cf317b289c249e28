"""The formats of models that tensor and pipeline parallelism cut into files.

Megatron-LM's and Meta's files are read and written, fairseq's are only read. A command edits them through a conversion,
as the parts of a tensor are in several files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from ckptfix.checkpoint import Checkpoint, Edit, OutputFile, Plan, TensorEntry
from ckptfix.commands import command
from ckptfix.errors import CkptfixError, DamagedFile, Unsupported
from ckptfix.findings.row import Finding
from ckptfix.formats.base import AS_THE_FILES_SAY, OF_OBJECTS, Format, JoinOptions, plain_weights
from ckptfix.formats.folders.companions import beside
from ckptfix.formats.parallel import files, flat, megatron, nemo, write
from ckptfix.formats.parallel.files import FoundFiles
from ckptfix.formats.signs import is_tar_header
from ckptfix.formats.torch import zip as torch_zip
from ckptfix.formats.torch.common import all_findings
from ckptfix.io.source import is_place


def _score(find: Callable[[str], FoundFiles | None], path: str, head: bytes, size: int) -> int:
    """Return 70 for a folder in which `find` finds the files of ranks."""
    if head or size or not is_place(path):
        return 0
    return 70 if find(path) is not None else 0


def _found(made: FoundFiles | None, path: str) -> FoundFiles:
    if made is None:
        raise DamagedFile("the folder contains no files of several ranks", path=path)
    return made


def read_megatron(path: str, options: JoinOptions = AS_THE_FILES_SAY) -> Checkpoint:
    """Read the files of all ranks of a save of Megatron-LM."""
    return megatron.read(path, _found(files.megatron_files(path), path), options)


def read_nemo(path: str, options: JoinOptions = AS_THE_FILES_SAY) -> Checkpoint:
    """Read the files of all ranks of an unpacked archive of NeMo."""
    return megatron.read(path, _found(nemo.rank_files(path), path), options, megatron.NEMO_LAYOUT)


def read_nemo_archive(path: str, options: JoinOptions = AS_THE_FILES_SAY) -> Checkpoint:
    """Read the files of all ranks in an archive of NeMo that is not compressed."""
    return megatron.read(path, _found(nemo.archived_files(path), path), options, megatron.NEMO_ARCHIVE_LAYOUT)


def score_archive(path: str, head: bytes, size: int) -> int:
    """Return 60 for a tar with the files of ranks of NeMo, else 0."""
    if len(head) < 512 or not is_tar_header(head[:512]):
        return 0
    try:
        return 60 if nemo.archived_files(path) is not None else 0
    except CkptfixError:
        return 0


def read_meta(path: str, options: JoinOptions = AS_THE_FILES_SAY) -> Checkpoint:
    """Read Meta's files of all ranks."""
    return flat.read(flat.META_LAYOUT, path, _found(files.meta_files(path), path), options)


def read_fairseq(path: str, options: JoinOptions = AS_THE_FILES_SAY) -> Checkpoint:
    """Read fairseq's files of all model parts."""
    return flat.read(flat.FAIRSEQ_LAYOUT, path, _found(files.part_files(path), path), options)


def validate(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield the findings of the reader."""
    yield from all_findings(checkpoint)


def plan_edit(checkpoint: Checkpoint, edits: Sequence[Edit], dest: str) -> Plan:
    """Refuse the edit: the parts of a tensor are in several files."""
    hint = f"`{command('convert', checkpoint.path, 'OUT.safetensors')}` joins them into one file; edit that file"
    raise Unsupported("the files of ranks are not edited one by one", path=dest, hint=hint)


def not_written(entries: Sequence[TensorEntry], dest: str, *, metadata: Mapping[str, str] | None = None) -> Plan:
    """Raise Unsupported: files of fairseq and NeMo are only read."""
    raise Unsupported("ckptfix reads files of this kind, but does not write them", path=dest, hint="use --to zip")


def companions(checkpoint: Checkpoint, dest: str) -> tuple[OutputFile, ...]:
    """Return copies of params.json, the tokenizer and other files beside Meta's files."""
    return beside(checkpoint.path, [file.path for file in checkpoint.files]).copied_to(dest)


FAIRSEQ = Format(
    name=flat.FAIRSEQ_NAME,
    title="fairseq's model parts",
    suffixes=(),
    states=OF_OBJECTS,
    score=partial(_score, files.part_files),
    read=read_fairseq,
    validate=validate,
    weights=plain_weights,
    refuses=torch_zip.refuses,
    plan_edit=plan_edit,
    plan_write=not_written,
    folder=True,
    edits=False,
    writes=False,
    rejoined=lambda checkpoint, options: read_fairseq(checkpoint.path, options),
)

NEMO = replace(
    FAIRSEQ,
    name=nemo.NAME,
    title="NeMo's files of ranks",
    score=partial(_score, nemo.rank_files),
    read=read_nemo,
    rejoined=lambda checkpoint, options: read_nemo(checkpoint.path, options),
)

NEMO_ARCHIVE = replace(
    NEMO,
    name=nemo.ARCHIVE_NAME,
    title="NeMo archive of the files of ranks",
    score=score_archive,
    read=read_nemo_archive,
    folder=False,
    rejoined=lambda checkpoint, options: read_nemo_archive(checkpoint.path, options),
)

MEGATRON = replace(
    FAIRSEQ,
    name=megatron.NAME,
    title="Megatron-LM folder",
    score=partial(_score, files.megatron_files),
    read=read_megatron,
    refuses=write.refuses,
    plan_write=write.plan_megatron_alone,
    writes=True,
    read_planned=write.read_megatron_plan,
    rejoined=lambda checkpoint, options: read_megatron(checkpoint.path, options),
    kept_beside=frozenset({"args", "iteration", "checkpoint_version"}),
    parallel=lambda checkpoint, sizes: partial(write.plan_megatron, checkpoint, sizes),
)

META = replace(
    FAIRSEQ,
    name=flat.META_NAME,
    title="Meta's files of ranks",
    score=partial(_score, files.meta_files),
    read=read_meta,
    refuses=write.refuses,
    plan_write=write.plan_meta_alone,
    writes=True,
    companions=companions,
    read_planned=write.read_meta_plan,
    rejoined=lambda checkpoint, options: read_meta(checkpoint.path, options),
    parallel=lambda checkpoint, sizes: partial(write.plan_meta, checkpoint, sizes),
)
