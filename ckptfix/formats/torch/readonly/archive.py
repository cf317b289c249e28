"""Archives of several checkpoints, which libraries write around files of torch.save.

::

    Stable-Baselines3   a zip: data (JSON), policy.pth, policy.optimizer.pth, pytorch_variables.pth, ...
    NeMo (.nemo)        a tar: model_config.yaml, model_weights.ckpt, ...
    .pt2 of torch < 2.8 a zip: serialized_exported_program.json, serialized_state_dict.pt, serialized_constants.pt, ...

Such a file is read as one object, a dict of the objects in it by the names of their members: the state dict of the
policy is at ``policy.pth``. The bytes of a tensor are a range of the archive. A deflated member has no such range, so
an archive with one is refused.

Source: stable_baselines3/common/save_util.py (``save_to_zip_file``), nemo/core/connectors/save_restore_connector.py,
torch/export/__init__.py (``save``, torch 2.1 to 2.7).
"""

from __future__ import annotations

from collections.abc import Iterator

from ckptfix.checkpoint import ByteRange, Checkpoint
from ckptfix.commands import quoted
from ckptfix.errors import CkptfixError, Unsupported, about
from ckptfix.findings.row import Finding
from ckptfix.findings.steps import step
from ckptfix.findings.table import found
from ckptfix.formats.base import OF_OBJECTS, Format, plain_weights, unknown
from ckptfix.formats.foreign.archives import tar_members
from ckptfix.formats.signs import is_tar_header
from ckptfix.formats.torch import common as torch_common
from ckptfix.formats.torch.readonly import common
from ckptfix.formats.torch.readonly.storages import Streams, begins_stream
from ckptfix.io.source import Source, open_source
from ckptfix.pickles import Dict, Graph
from ckptfix.pickles.paged import HEAD, UnreadBytes
from ckptfix.urls import as_path
from ckptfix.words import some
from ckptfix.zips.local import record_data
from ckptfix.zips.read import read_directory

NAME = "archive"

ZIPPED = (
    frozenset(("data", "policy.pth")),
    frozenset(("serialized_exported_program.json", "serialized_state_dict.pt")),
)
TARRED = (frozenset(("model_config.yaml", "model_weights.ckpt")),)
"""The members that an archive of each library has."""

CHECKPOINTS = (".pth", ".pt")
"""Suffixes of the members of a zip that are checkpoints."""

MOST_MEMBERS = 1000

Members = dict[str, UnreadBytes | None]
"""Name -> location of its bytes; None for a member that is compressed."""


def score(path: str, head: bytes, size: int) -> int:
    """Return 60 for an archive with the members of one of the libraries, else 0."""
    first = head[30 : 30 + int.from_bytes(head[26:28], "little")]
    zipped = head.startswith(b"PK\x03\x04") and not first.endswith(b".pkl")
    if not zipped and (len(head) < 512 or not is_tar_header(head[:512])):
        return 0
    try:
        with open_source(path) as reader:
            names = set(_zipped(reader, places=False) if zipped else _tarred(reader))
    except CkptfixError:
        return 0
    return 60 if any(names >= needed for needed in (ZIPPED if zipped else TARRED)) else 0


def _tarred(reader: Source) -> Members:
    rows = tar_members(reader, MOST_MEMBERS)
    members: Members = {name.removeprefix("./"): UnreadBytes(offset, max(length, 0)) for name, offset, length in rows}
    return {name: place for name, place in members.items() if name and not name.endswith("/")}


def _zipped(reader: Source, *, places: bool = True) -> Members:
    members: Members = {}
    for record in read_directory(reader).records:
        data = record_data(reader, record) if places and record.name.endswith(CHECKPOINTS) else None
        members[record.name] = UnreadBytes(data.offset, data.length) if isinstance(data, ByteRange) else None
    return members


def read(path: str) -> Checkpoint:
    """Read names, shapes and places; see the contract in `base`.

    Raises:
        Unsupported: a checkpoint in it is compressed.
        UnknownFormat: no member can be read.
    """
    findings: list[Finding] = []
    storages = common.FoundStorages()
    graph = Graph(b"\x80\x04.", 0)
    root = Dict()
    with about(path), open_source(path) as reader:
        size = reader.size
        zipped = reader.read(0, min(4, size)) == b"PK\x03\x04"
        members = _zipped(reader) if zipped else _tarred(reader)
        _refuse_deflated(path, members)
        streams = Streams(path, graph, storages, findings)
        for name, place in members.items():
            if place is not None and begins_stream(_head(reader, place)):
                noted = len(findings)
                root.items.append((name, streams.node(place, name)))
                if len(findings) > noted:
                    findings.append(found("bad-tensor", "the content of this member cannot be read", where=name))
        if not storages.data and not findings:
            raise unknown(path, reader.read(0, min(4096, size)), size)
        graph.root = root
        fresh = common.in_terms_of_zip(graph, streams.texts, path)
    traits = {"members": ", ".join(members), "storages": len(storages.data)}
    return common.checkpoint(path, NAME, size, fresh, storages, traits, findings)


def _refuse_deflated(path: str, members: Members) -> None:
    """Refuse an archive with a compressed checkpoint: the other checkpoints alone would be incomplete.

    Raises:
        Unsupported: a checkpoint in it is compressed.
    """
    names = [name for name, place in members.items() if place is None and name.endswith(CHECKPOINTS)]
    if names:
        own, folder = quoted(path), quoted(as_path(path).stem)
        again = f"(cd {folder} && zip -0 -r ../FIXED.zip .)"
        hint = f"`unzip {own} -d {folder}` unpacks its checkpoints; `{again}` packs them again, uncompressed"
        raise Unsupported(f"the archive has compressed checkpoints: {some(names)}", path=path, hint=hint)


def _head(reader: Source, place: UnreadBytes) -> bytes:
    return reader.read(place.offset, max(min(place.length, HEAD, reader.size - place.offset), 0))


def notes(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield the findings that every such file has."""
    what = f"the file is an archive of several checkpoints: {checkpoint.traits['members']}"
    yield found("other-archive", what, fix=step("extract"))


FORMAT = Format(
    name=NAME,
    title="archive of checkpoints",
    suffixes=(),
    states=OF_OBJECTS | {"checksums"},
    score=score,
    read=read,
    validate=torch_common.all_findings,
    weights=plain_weights,
    refuses=lambda entry: None,
    plan_edit=common.refuse_edit,
    plan_write=common.refuse_write,
    edits=False,
    writes=False,
    notes=notes,
)
