"""TorchScript archives (``torch.jit.save``): the state dict of the module in them, its program read as text.

::

    ROOT/data.pkl           the module; objects of classes ``__torch__.PATH Name``, their attributes as a dict
    ROOT/data/KEY           storages of its tensors
    ROOT/constants.pkl      a tuple that the program calls CONSTANTS.c0, c1 ...; its storages are in ROOT/constants/KEY
    ROOT/code/__torch__/PATH.py
        class Name(Module):
          __parameters__ = ["weight", "bias", ]
          __buffers__ = ["running_mean", ]
          weight : Tensor
          __annotations__["0"] = __torch__.torch.nn.modules.linear.Linear

The attributes of an object are in the order of its class, as in ``state_dict()``. Source:
torch/csrc/jit/serialization/export_module.cpp and python_print.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sized
from dataclasses import field
from typing import Literal, TypeGuard

from ckptfix.checkpoint import TensorEntry
from ckptfix.dataclass import dataclass
from ckptfix.errors import (
    BadDirectory,
    BadPickle,
    CkptfixError,
    DamagedFile,
    NoSuchTensor,
    Unsupported,
    WouldLoseData,
    about,
)
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.formats.torch import module as torch_module
from ckptfix.formats.torch.calls import detached_call, detached_entry
from ckptfix.formats.torch.common import Storages
from ckptfix.formats.torch.emit import Calls
from ckptfix.formats.torch.tensors import BadTensor, is_tensor, tensor_entry
from ckptfix.formats.torch.tree import node_of
from ckptfix.formats.torch.weights import Weights, check_whole
from ckptfix.formats.torch.zip_layout import ZipCheckpoint, ZipStorages, ambiguous_names
from ckptfix.io.crc import checksum
from ckptfix.io.read import read_chunks
from ckptfix.io.source import open_source
from ckptfix.pickles import Call, Dict, Global, Graph, Text, parse
from ckptfix.pickles.graph import Node, attributes
from ckptfix.zips.local import record_data
from ckptfix.zips.read import Directory, DirectoryRecord, read_directory

CONSTANTS = "constants"
"""The address of the constants of a program, c0 to cN: a frozen module has nothing else."""

MAX_TEXT = 256 << 20
"""The limit in bytes of a record that is read whole: a pickle, or the text of a program."""

_CLASS = re.compile(r"^class (\w+)\(Module\):$")
_LIST = re.compile(r"^  __(parameters|buffers)__ = \[(.*)\]$")
_ATTRIBUTE = re.compile(r'^  (?:(\w+) : |__annotations__\["((?:[^"\\]|\\.)*)"\] = )(.*)$')
_NAME = re.compile(r'"((?:[^"\\]|\\.)*)"')
_MANGLED = re.compile(r"\.___torch_mangle_\d+")


@dataclass(slots=True)
class _Class:
    """A class as the text of a program declares it; `buffers` is None where an old program does not list them."""

    parameters: frozenset[str] = frozenset()
    buffers: frozenset[str] | None = None
    types: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Program:
    """A TorchScript archive: its directory, root folder and byte order."""

    path: str
    size: int
    directory: Directory
    records: Mapping[str, DirectoryRecord]
    root: str
    byteorder: Literal["little", "big"]

    def text(self, name: str) -> bytes | None:
        """Return the bytes of a record below the root; None if it does not exist.

        Raises:
            DamagedFile: the bytes do not match their checksum, so they may name and describe other tensors.
            Unsupported: the record is too large.
        """
        record = self.records.get(f"{self.root}/{name}")
        if record is None:
            return None
        if record.size > MAX_TEXT or record.size > max(100 * record.stored, 1 << 20):
            raise Unsupported(
                f"a record of {record.size:,} bytes is too large to read", path=self.path, where=record.name
            )
        with open_source(self.path) as reader:
            data = b"".join(read_chunks(record_data(reader, record)))
        if record.crc32 not in (0, checksum(data)):
            message = "the bytes do not match their CRC-32: the file is damaged"
            raise DamagedFile(message, path=self.path, where=record.name, offset=record.header)
        return data

    def pickle(self, name: str, folder: str) -> tuple[Graph, Storages]:
        """Return the parsed pickle, and the storages in `folder` that it refers to.

        Raises:
            BadDirectory: no record has this name, or several have.
        """
        data = self.text(name)
        where = f"{self.root}/{name}"
        if data is None:
            raise BadDirectory(f"the archive has no {name}", path=self.path)
        twice = ambiguous_names(self.directory)
        if where in twice:
            raise BadDirectory("several records have the name of the pickle", path=self.path, where=where)
        archive = ZipCheckpoint(self.directory, self.root, self.records[where], True, twice)
        graph = parse(data, path=self.path, where=where)
        return graph, Storages(ZipStorages(self.path, archive, folder), graph=graph)


def open_program(path: str, marker: str) -> Program | None:
    """Return the archive at `path` if it is a zip with the record ROOT/`marker`; None for every other file."""
    with open_source(path) as reader:
        if reader.size < 4 or reader.read(0, 4) != b"PK\x03\x04":
            return None
        try:
            directory = read_directory(reader)
        except CkptfixError:
            return None
        size = reader.size
    records: dict[str, DirectoryRecord] = {}
    for record in directory.records:
        records.setdefault(record.name, record)
    roots = [name.removesuffix(f"/{marker}") for name in records if name.endswith(f"/{marker}")]
    roots = [root for root in roots if root and "/" not in root]
    if len(roots) != 1:
        return None
    program = Program(path, size, directory, records, roots[0], "little")
    order = program.text("byteorder")
    if order is not None and order.strip() == b"big":
        return Program(path, size, directory, records, roots[0], "big")
    return program


def read(path: str, at: str | None = None) -> Weights | None:
    """Return the state dict of the TorchScript module at `path`, or its constants; None for any other file.

    Args:
        at: ``"constants"`` for the constants, or the path of a submodule, such as ``"encoder"``.

    Raises:
        NoSuchTensor: no submodule has this name.
        DamagedFile: the archive, its pickle or its classes are not as torch writes them.
        WouldLoseData: a tensor cannot be read.
    """
    program = open_program(path, "constants.pkl")
    if program is None:
        return None
    if at == CONSTANTS:
        return _constants(program)
    graph, storages = program.pickle("data.pkl", "data")
    classes = _Classes(program)
    node = graph.root
    for part in re.split(r"[./]", at) if at else ():
        node = dict(_attributes(node)).get(part)
        if classes.parts_of(node) is None:
            hint = "--at takes the path of a submodule, or constants"
            raise NoSuchTensor(f"no module at {at!r}", path=path, hint=hint)
    if classes.parts_of(node) is None:
        raise BadPickle("data.pkl holds no module", path=path, where=f"{program.root}/data.pkl")
    with about(path, always=True):
        module = torch_module.read_module(node, at or "", parts_of=classes.parts_of, class_of=class_of)
    left = () if program.text("constants.pkl") in (None, b"\x80\x02).") else (CONSTANTS,)
    findings = [*module.findings, *_unsaid(module.tensors)]
    what = f"the TorchScript module {module.cls}, without its program"
    tensors = tuple((name, node) for name, item in module.tensors if type(node := node_of(item)) is Call)
    return _weights(program, graph, storages, tensors, what, at or "", module.versions, left, tuple(findings))


def _constants(program: Program) -> Weights:
    graph, storages = program.pickle("constants.pkl", "constants")
    values = graph.root if isinstance(graph.root, (tuple, list)) else ()
    tensors = tuple((f"c{index}", value) for index, value in enumerate(values) if is_tensor(value))
    what = "the constants of a TorchScript program"
    return _weights(program, graph, storages, tensors, what, CONSTANTS, None, ("data.pkl",), ())


def _weights(
    program: Program,
    graph: Graph,
    storages: Storages,
    tensors: tuple[tuple[str, Call], ...],
    what: str,
    at: str,
    versions: Mapping[str, torch_module.Versions] | None,
    left: tuple[str, ...],
    findings: tuple[Finding, ...],
) -> Weights:
    entries: list[TensorEntry] = []
    tensors = tuple((name, _without_tags(node)) for name, node in tensors)
    for name, node in tensors:
        try:
            entries.append(detached_entry(tensor_entry(node, name, "", storages), name))
        except BadTensor as error:
            raise WouldLoseData(str(error), path=program.path, where=name) from None
    odd = {entry.key for entry in entries if entry.kind != "dense"}
    nodes = {name: detached_call(node) for name, node in tensors if name in odd}
    made = Weights(
        path=program.path,
        what=what,
        at=at,
        entries=tuple(entries),
        versions=versions,
        calls=Calls(graph, storages, nodes) if nodes else None,
        left=left,
        findings=findings,
        byteorder=program.byteorder,
    )
    check_whole(made, lambda _: program.size)
    return made


def _without_tags(node: Call) -> Call:
    """Return the rebuild call of a tensor with plain arguments.

    TorchScript writes the dict of the marks of a tensor (conj, neg) as ``restore_type_tag({...}, 'Dict[str, bool]')``.
    """
    if not any(_is_tag(argument) for argument in node.arguments):
        return node
    arguments = tuple(part.arguments[0] if _is_tag(part) else part for part in node.arguments)
    made = Call(node.func, arguments, node.how, node.position, node.kwargs)
    made.items, made.elements, made.state = node.items, node.elements, node.state
    return made


def _is_tag(node: Node) -> TypeGuard[Call]:
    return type(node) is Call and node.is_call_of("torch.jit._pickle", "restore_type_tag") and bool(node.arguments)


def _unsaid(tensors: Sized) -> Iterator[Finding]:
    """Yield a note on buffers with ``persistent=False``: TorchScript keeps them in its state dict, unmarked."""
    if tensors:
        message = "buffers with persistent=False are included: TorchScript does not record which they are"
        yield found("all-buffers", message)


def class_of(node: Node) -> str:
    """Return the Python name of the class of a TorchScript object."""
    name = torch_module.class_of(node)
    return _MANGLED.sub("", name).removeprefix("__torch__.")


class _Classes:
    """The classes of a program, each read at its first use."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._files: dict[str, dict[str, _Class]] = {}

    def parts_of(self, node: Node) -> dict[str, Node] | None:
        """Return the attributes of a scripted module, grouped like those of a pickled one; None for anything else."""
        if type(node) is not Call or type(node.func) is not Global or not node.func.module.startswith("__torch__"):
            return None
        cls = self._find(node.func)
        if cls is None:
            return None
        parts = {name: Dict() for name in torch_module.HOLDERS}
        for name, value in _attributes(node):
            stated = cls.types.get(name, "")
            if name in cls.parameters:
                parts["_parameters"].items.append((name, value))
            elif name in cls.buffers if cls.buffers is not None else stated == "Tensor":
                parts["_buffers"].items.append((name, value))
            elif stated.startswith("__torch__.") and type(value) is Call:
                parts["_modules"].items.append((name, value))
        return dict(parts)

    def _find(self, named: Global) -> _Class | None:
        if named.module not in self._files:
            text = self._program.text(f"code/{named.module.replace('.', '/')}.py")
            self._files[named.module] = {} if text is None else _read_classes(text.decode("utf-8", "replace"))
        return self._files[named.module].get(named.name)


def _attributes(node: Node) -> list[tuple[str, Node]]:
    """Return the names and values of an object's attributes, in the order of its class."""
    state = node.state if type(node) is Call else None
    return [(str(key), value) for key, value in attributes(state) if type(key) is Text]


def _read_classes(text: str) -> dict[str, _Class]:
    """Return the modules that a file of a program defines. Nothing of it is run, and methods are skipped."""
    found: dict[str, _Class] = {}
    current = _Class()
    for line in text.splitlines():
        if begins := _CLASS.match(line):
            current = found[begins[1]] = _Class()
        elif names := _LIST.match(line):
            listed = frozenset(_NAME.findall(names[2]))
            if names[1] == "parameters":
                current.parameters = listed
            else:
                current.buffers = listed
        elif stated := _ATTRIBUTE.match(line):
            current.types[stated[1] or stated[2]] = stated[3].strip()
    return found
