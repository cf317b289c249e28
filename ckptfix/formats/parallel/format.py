"""The formats of models that tensor and pipeline parallelism cut into files.

Megatron-LM's and Meta's files are read and written, fairseq's are only read. A command edits them through a conversion,
as the parts of a tensor are in several files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

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

Find = Callable[[str], FoundFiles | None]
Read = Callable[[str, FoundFiles, JoinOptions], Checkpoint]
Score = Callable[[Find, str, bytes, int], int]


def _score(find: Find, path: str, head: bytes, size: int) -> int:
    """Return 70 for a folder in which `find` finds the files of ranks."""
    if head or size or not is_place(path):
        return 0
    return 70 if find(path) is not None else 0


def _score_tar(find: Find, path: str, head: bytes, size: int) -> int:
    """Return 60 for a tar in which `find` finds the files of ranks, else 0."""
    if len(head) < 512 or not is_tar_header(head[:512]):
        return 0
    try:
        return 60 if find(path) is not None else 0
    except CkptfixError:
        return 0


def _read(find: Find, read: Read, path: str, options: JoinOptions = AS_THE_FILES_SAY) -> Checkpoint:
    """Read the files of all ranks that `find` finds with `read`."""
    made = find(path)
    if made is None:
        raise DamagedFile("the folder contains no files of several ranks", path=path)
    return read(path, made, options)


def _reading(find: Find, read: Read, score: Score = _score) -> dict[str, Any]:
    """Return the attributes of a `Format` that find and read its files."""
    reader = partial(_read, find, read)
    return {
        "score": partial(score, find),
        "read": reader,
        "rejoined": lambda checkpoint, options: reader(checkpoint.path, options),
    }


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
    **_reading(files.part_files, partial(flat.read, flat.FAIRSEQ_LAYOUT)),
    validate=validate,
    weights=plain_weights,
    refuses=torch_zip.refuses,
    plan_edit=plan_edit,
    plan_write=not_written,
    folder=True,
    edits=False,
    writes=False,
)

NEMO = replace(
    FAIRSEQ,
    name=nemo.NAME,
    title="NeMo's files of ranks",
    **_reading(nemo.rank_files, partial(megatron.read, layout=megatron.NEMO_LAYOUT)),
)

NEMO_ARCHIVE = replace(
    NEMO,
    name=nemo.ARCHIVE_NAME,
    title="NeMo archive of the files of ranks",
    **_reading(nemo.archived_files, partial(megatron.read, layout=megatron.NEMO_ARCHIVE_LAYOUT), _score_tar),
    folder=False,
)

MEGATRON = replace(
    FAIRSEQ,
    name=megatron.NAME,
    title="Megatron-LM folder",
    **_reading(files.megatron_files, megatron.read),
    refuses=write.refuses,
    plan_write=write.plan_megatron_alone,
    writes=True,
    read_planned=write.read_megatron_plan,
    kept_beside=frozenset({"args", "iteration", "checkpoint_version"}),
    parallel=lambda checkpoint, sizes: partial(write.plan_megatron, checkpoint, sizes),
)

META = replace(
    FAIRSEQ,
    name=flat.META_NAME,
    title="Meta's files of ranks",
    **_reading(files.meta_files, partial(flat.read, flat.META_LAYOUT)),
    refuses=write.refuses,
    plan_write=write.plan_meta_alone,
    writes=True,
    companions=companions,
    read_planned=write.read_meta_plan,
    parallel=lambda checkpoint, sizes: partial(write.plan_meta, checkpoint, sizes),
)
