"""The plain form of a checkpoint's object: what becomes of it, and the file that holds it.

A verb says which state dicts it keeps, by their addresses, and for which version of torch it writes. It is answered
with what was converted and left out, and with the pickle and the plan of a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ckptfix.checkpoint import Checkpoint, Plan
from ckptfix.checkpoint.address import join
from ckptfix.dataclass import dataclass
from ckptfix.errors import Unsupported
from ckptfix.findings.row import Finding
from ckptfix.formats import format_of
from ckptfix.formats.plain.convert import Converter
from ckptfix.formats.plain.report import DROPPED, Asked, ConversionReport, ConversionSettings
from ckptfix.formats.torch import failing_calls, legacy_layout, weights_only, zip_layout
from ckptfix.formats.torch.call_classes import class_name
from ckptfix.formats.torch.common import fields, pickled_object
from ckptfix.formats.torch.rewrite import lacking, plan_rewrite, written
from ckptfix.formats.torch.tensors import BadTensor
from ckptfix.formats.torch.versions import Version
from ckptfix.pickles import Call, Dict, Graph, parse
from ckptfix.pickles import opcodes as op
from ckptfix.pickles.places import NodesByAddress
from ckptfix.pickles.reemit import Rewritten, every_node

PYTHON2 = frozenset((op.STRING, op.BINSTRING, op.SHORT_BINSTRING))


class KeptMapping(NamedTuple):
    """A mapping whose values under `keys` are kept, and its ``_metadata``; all of it if `keys` is None."""

    at: str
    keys: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class PlainFile:
    """The plain form as a pickle.

    Attributes:
        failing: findings about the calls in it on which torch.load fails.
        legacy: the container is that of a legacy file.
    """

    checkpoint: Checkpoint
    rewritten: Rewritten
    report: ConversionReport
    failing: tuple[Finding, ...]
    legacy: bool

    @property
    def format(self) -> str:
        """The name of the format."""
        return legacy_layout.NAME if self.legacy else zip_layout.NAME

    def plan(self, dest: str) -> Plan:
        """Plan the file. Raises like `plan_rewrite`."""
        storages = self.report.storages
        gone = lacking(self.checkpoint, self.rewritten, storages)  # the caller lists the tensors on them
        return plan_rewrite(self.checkpoint, self.rewritten, dest, storages, legacy=self.legacy, without=gone)


class PlainForm:
    """The object of `checkpoint`, converted to plain values.

    Args:
        keep: the mappings that are kept, and nothing else; None keeps everything.
        encoding: codec of the byte strings of a Python 2 file.
        target: the torch version that must read the output; None for the current one.

    Attributes:
        report: what was converted and left out.
        refusal: why ``weights_only=True`` refuses the object as it was; None if no reason is known.
        empty: nothing of the object is left.

    Raises:
        Unsupported: the version does not support a tensor.
        KeyConflict: two keys would become one.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        keep: Sequence[KeptMapping] | None = None,
        encoding: str | None = None,
        target: Version | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._graph = graph = pickled_object(checkpoint).graph
        self.refusal = weights_only.refusal(graph)
        self.legacy = format_of(checkpoint).one_stream or (target is not None and not target.reads_zip)
        kept, whole = (None, frozenset[int]()) if keep is None else _kept(checkpoint, keep)
        settings = ConversionSettings(
            legacy=self.legacy,
            big=checkpoint.byteorder == "big",
            encoding=encoding,
            python2=bool(PYTHON2 & graph.rare.keys()) and graph.protocol < 3,
            keys_in_use=frozenset(_storage_keys(graph)),
            kept=kept,
            whole=whole,
            target=target,
        )
        converter = Converter(settings)
        self._root = converter.run(graph.root)
        self.report = converter.report
        self.empty = self._root is DROPPED

    @property
    def was(self) -> str | None:
        """The class or function of the object as it was; None for a plain container, or a computed class."""
        root = self._graph.root
        return class_name(root) if type(root) is Call else None

    @property
    def refused_protocol(self) -> int | None:
        """The protocol of the pickle, if ``weights_only=True`` refuses only its opcodes."""
        if self.refusal is None:
            return None
        named = all(weights_only.accepted(weights_only.canonical(node)) for node in self._graph.globals)
        return self._graph.protocol if named else None

    def failing(self) -> tuple[Finding, ...]:
        """Return findings about the calls in the object as it was, on which torch.load fails."""
        return tuple(failing_calls.findings(self._graph))

    def written(self) -> PlainFile:
        """Return the plain form as a pickle of protocol 2.

        Raises:
            Unsupported: ``weights_only=True`` would still refuse it.
        """
        checkpoint = self._checkpoint
        rewritten = written(checkpoint, self._root)
        graph = parse(rewritten.pickle, path=checkpoint.path, where="sanitized pickle")
        left = weights_only.refusal(graph)
        if left is not None:
            raise Unsupported(f"parts of it have no plain form: {left}", path=checkpoint.path)
        return PlainFile(checkpoint, rewritten, self.report, tuple(failing_calls.findings(graph)), self.legacy)


def _storage_keys(graph: Graph) -> Iterator[str]:
    for persid in graph.persids:
        try:
            yield fields(persid)[0]
        except BadTensor:
            continue


def _kept(checkpoint: Checkpoint, keep: Sequence[KeptMapping]) -> tuple[frozenset[int], frozenset[int]]:
    """Return ``id`` of the nodes on the way to what is kept, and of the nodes that are kept whole."""
    parts = pickled_object(checkpoint)
    node_at = NodesByAddress(parts.graph.root, parts.found.holders)
    whole = frozenset(id(node) for row in keep for node in _whole(row, node_at))
    # An optimizer may share a tensor with the model, but does not lead to it.
    return _leading_to(parts.graph, frozenset(id(node_at(row.at)) for row in keep)) | whole, whole


def _whole(kept: KeptMapping, node_at: NodesByAddress) -> Iterator[Asked]:
    """Yield the nodes of a mapping that are kept with everything below them."""
    mapping = node_at(kept.at)
    if kept.keys is None:
        yield mapping
        return
    for key in kept.keys:
        yield node_at(join(kept.at, key))
    if type(mapping) is Call and mapping.state is not None:
        yield mapping.state
        yield from _held(mapping.state)  # `_metadata` has the versions of the modules.


def _leading_to(graph: Graph, whole: frozenset[int]) -> frozenset[int]:
    """Return the nodes that hold one of `whole`, directly or through others, and `whole` itself."""
    parents: dict[int, list[int]] = {}
    for node in every_node(graph.root):
        for part in _held(node):
            parents.setdefault(id(part), []).append(id(node))
    found = set(whole)
    stack = list(whole)
    while stack:
        for parent in parents.get(stack.pop(), ()):
            if parent not in found:
                found.add(parent)
                stack.append(parent)
    return frozenset(found)


def _held(node: Asked) -> Iterable[Asked]:
    if type(node) is Call:
        yield from (node.args, node.kwargs, node.state, node.elements)
        yield from (value for _, value in node.items or ())
    elif isinstance(node, (list, tuple)):
        yield from node
    elif type(node) is Dict:
        yield from (value for _, value in node.items)
