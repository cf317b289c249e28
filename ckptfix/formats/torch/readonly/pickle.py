"""``pickle.dump`` and ``joblib.dump`` of an object with tensors: one pickle, in which storages are byte strings.

::

    pickle  the object; a storage is torch.storage._load_from_bytes(b'...'), whose bytes are a stream of torch.save
            with the storage as its object
    joblib  the same; the bytes of an array follow the opcode that builds its wrapper (see `joblib`)

torch.load reads neither. Unpickling them runs torch.load on every stream, with everything that it may call. Here the
streams are parsed in place, and the bytes of a tensor are a range of the file. NumPy arrays are values.

Source: torch/storage.py (``_StorageBase.__reduce__``, ``_load_from_bytes``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from ckptfix.checkpoint import Checkpoint
from ckptfix.errors import about
from ckptfix.findings.row import Finding
from ckptfix.findings.steps import step
from ckptfix.findings.table import found
from ckptfix.formats.base import OF_OBJECTS, Format, plain_weights, unknown
from ckptfix.formats.signs import is_legacy
from ckptfix.formats.torch import common as torch_common
from ckptfix.formats.torch import weights_only
from ckptfix.formats.torch.readonly import common, joblib
from ckptfix.formats.torch.readonly.storages import Streams, begins_stream
from ckptfix.io.source import Source, open_source
from ckptfix.pickles import Call, Graph
from ckptfix.pickles.graph import Node
from ckptfix.pickles.names import survey
from ckptfix.pickles.paged import UnreadBytes, parse_paged
from ckptfix.pickles.reemit import children_to_write, every_node

NAME = "pickle"

_MODULE, _FUNCTION = "torch.storage", "_load_from_bytes"

MOST_OPCODES = 200_000
"""Most opcodes of a pickle that are searched for its first storage: a tenth of a second."""

SEARCHED = 64 << 20
"""Most bytes of a joblib file that are searched for it: the bytes of arrays come between its opcodes."""


def score(path: str, head: bytes, size: int) -> int:
    """Return 80 for a pickle of protocol 2 or later that names ``_load_from_bytes``, else 0."""
    if not re.match(rb"\x80[\x02-\x05]", head) or is_legacy(head):
        return 0
    if _FUNCTION.encode() in head:
        return 80
    if size <= len(head):
        return 0
    with open_source(path) as reader:
        if b"joblib" in head:
            return 80 if _has_function(reader) else 0
        seen = survey(reader.read, 0, reader.size, MOST_OPCODES)
    return 80 if any((row.module, row.name) == (_MODULE, _FUNCTION) for row in seen.seen) else 0


def _has_function(reader: Source) -> bool:
    """Return whether the first bytes of the file contain the name of the function."""
    last = b""
    for chunk in reader.chunks(0, min(reader.size, SEARCHED)):
        if _FUNCTION.encode() in last + chunk:
            return True
        last = chunk[-len(_FUNCTION) :]
    return False


def read(path: str) -> Checkpoint:
    """Read names, shapes and places; see the contract in `base`.

    Raises:
        UnknownFormat: it does not contain the bytes of a storage.
    """
    findings: list[Finding] = []
    storages = common.FoundStorages()
    with about(path), open_source(path) as reader:
        size = reader.size
        arrays = joblib.Arrays(reader)
        graph = parse_paged(reader.read, size, stays=begins_stream, raw=arrays, path=path, where="pickle")
        graph.globals += arrays.globals
        replaced = _replacements(reader, graph, Streams(path, graph, storages, findings))
        if not storages.data and not findings:
            raise unknown(path, reader.read(0, min(4096, size)), size)
        fresh = common.in_terms_of_zip(graph, replaced, path, known=(f"{_MODULE}.{_FUNCTION}", *joblib.WRAPPERS))
    if graph.end < size:
        message = f"{size - graph.end} bytes follow the pickle"
        findings.append(found("trailing-bytes", message, offset=graph.end))
    traits = {"storages": len(storages.data)} | ({"arrays of joblib": arrays.seen} if arrays.seen else {})
    return common.checkpoint(path, NAME, size, fresh, storages, traits, findings)


def _replacements(reader: Source, graph: Graph, streams: Streams) -> dict[int, Node]:
    """Return replacements for the calls that load a storage, and for byte strings that were left in the file."""
    replaced: dict[int, Node] = {}
    places: dict[int, UnreadBytes] = {}
    used: set[int] = set()
    for node in every_node(graph.root):
        if type(node) is Call and node.is_call_of(_MODULE, _FUNCTION) and len(node.arguments) == 1:
            made = streams.node(node.arguments[0])
            if made is not None:
                replaced[id(node)] = made
                used.add(id(node.arguments[0]))
        parts: Iterable[object] = children_to_write(node)
        places |= {id(part): part for part in parts if type(part) is UnreadBytes}
    left = {key: place for key, place in places.items() if key not in used}
    replaced |= {key: reader.read(place.offset, place.length) for key, place in left.items()}
    return replaced | streams.texts


def notes(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield the findings that every such file has."""
    # A refusal by weights_only=True has its own remedy, which writes a zip too.
    plain = weights_only.refusal(torch_common.pickled_object(checkpoint).graph) is None
    yield found("plain-pickle", fix=step("convert", to="zip") if plain else "")
    yield found("no-checksums", "a pickle has no checksums: a flipped bit of the data would go unnoticed")


FORMAT = Format(
    name=NAME,
    title="plain pickle",
    suffixes=(),
    states=OF_OBJECTS - {"sharing"},
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
