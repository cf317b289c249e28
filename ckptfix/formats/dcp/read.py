"""The reader of a folder: the `.metadata`, the values, and the locations of tensors, whose items are not opened."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import field
from itertools import chain, pairwise

from ckptfix.checkpoint import ByteRange, Checkpoint, Data, FileVersion, RangeCheck, dtypes
from ckptfix.dataclass import dataclass
from ckptfix.errors import CkptfixError, DamagedFile, NoSuchFile, Unsupported, about
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.formats.dcp import metadata as dcp_metadata
from ckptfix.formats.dcp import ranks
from ckptfix.formats.dcp.images import Images
from ckptfix.formats.dcp.items import ChunkName, TensorItem, tensor_item, value_item
from ckptfix.formats.dcp.metadata import Metadata, Path, SavedChunk, SavedKey, StorageInfo
from ckptfix.formats.dcp.molds import Molds
from ckptfix.formats.dcp.stacked import stacked_layers
from ckptfix.formats.folders.assembly import Assembled, Assembly
from ckptfix.formats.folders.copies import differing
from ckptfix.formats.folders.safe_paths import file_inside
from ckptfix.formats.torch.common import pickled_object
from ckptfix.io.chunks import Chunk, tiled
from ckptfix.io.source import is_file, mark, open_source
from ckptfix.io.virtual_files import SplicedFile, SplicedPiece
from ckptfix.pickles import Dict
from ckptfix.pickles.graph import Node, new_text
from ckptfix.urls import as_path
from ckptfix.words import plural

MAX_GAPS = 10_000
"""The limit of unfilled list positions in total: a number in a hostile path could create a list of any length."""


class Nesting:
    """The nested object of a flattened one, under construction: dicts by names, lists by numbers, gaps as None.

    Source: torch/distributed/checkpoint/_traverse.py (``set_element``), and the planner of ``dcp_to_torch_save``.
    """

    def __init__(self) -> None:
        self.root = Dict()
        self._inside: dict[int, dict[str, Node]] = {id(self.root): {}}
        self._lists: dict[int, list[Node]] = {}
        self._gaps = 0

    def put(self, path: Path, value: Node) -> None:
        """Set the value at `path`.

        Raises:
            DamagedFile: a different value is already there, or on the way.
        """
        at: Dict | list[Node] = self.root
        for key, following in pairwise(path):
            found = self._get(at, key, path)
            if found is None:
                found = self._made(following)
                self._set(at, key, found, path)
            elif id(found) not in self._inside and id(found) not in self._lists:
                raise _conflict(path)
            assert isinstance(found, Dict | list)
            at = found
        if self._get(at, path[-1], path) is not None:
            raise _conflict(path)
        self._set(at, path[-1], value, path)

    def _made(self, key: str | int) -> Dict | list[Node]:
        made: Dict | list[Node]
        if isinstance(key, int):
            made = []
            self._lists[id(made)] = made
        else:
            made = Dict()
            self._inside[id(made)] = {}
        return made

    def _get(self, at: Dict | list[Node], key: str | int, path: Path) -> Node:
        """Return the value at `key`; None if there is no value, since no container holds None otherwise."""
        if isinstance(at, Dict) is isinstance(key, int):
            raise _conflict(path)
        if isinstance(at, Dict):
            return self._inside[id(at)].get(str(key))
        assert isinstance(key, int)
        return at[key] if key < len(at) else None

    def _set(self, at: Dict | list[Node], key: str | int, value: Node, path: Path) -> None:
        if isinstance(at, Dict):
            self._inside[id(at)][str(key)] = value
            at.items.append((new_text(str(key)), value))
            return
        assert isinstance(key, int)
        self._gaps += max(key - len(at), 0)
        if self._gaps > MAX_GAPS:
            raise DamagedFile(f"planner_data names item {key} of a list of {len(at)}", where=_shown(path))
        at += [None] * (key + 1 - len(at))
        at[key] = value


def _shown(path: Path) -> str:
    return "/".join(map(str, path))


def _conflict(path: Path) -> DamagedFile:
    return DamagedFile("planner_data has two values at the same path", where=_shown(path))


NAME, RANKS, IMAGES = "dcp", "dcp-ranks", "dcp-safetensors"
MAX_METADATA = 1 << 30
MAX_VALUE = 1 << 20
"""The limit in bytes of a value that is compared between ranks."""


@dataclass(frozen=True, slots=True)
class ItemFiles:
    """The files of a folder that its metadata names.

    Attributes:
        folder: the folder as it was given.
        sizes: the size of each existing file in bytes, by the name in the metadata.
        paths: the path of each of them.
        refused: name -> the reason why it is not a file of the folder; the file was not opened.
        marks: the metadata and these files, as they were read.
        molds: known patterns of their items.
        images: the safetensors files that contain items.
    """

    folder: str
    sizes: dict[str, int]
    paths: dict[str, str]
    marks: tuple[FileVersion, ...]
    refused: dict[str, str] = field(default_factory=dict)
    molds: Molds = field(default_factory=Molds, repr=False, compare=False)
    images: Images = field(default_factory=Images, repr=False, compare=False)

    @property
    def metadata(self) -> str:
        return self.marks[0].path

    def has(self, place: StorageInfo) -> bool:
        """Return whether its file exists and is long enough."""
        return place.offset + place.length <= self.sizes.get(place.name, -1)

    def range(self, place: StorageInfo) -> ByteRange:
        """Return the bytes of an item.

        Raises:
            DamagedFile: its file is missing.
        """
        path = self.paths.get(place.name)
        if path is None and place.name in self.refused:
            raise DamagedFile(self.refused[place.name], path=self.metadata)
        if path is None:
            raise DamagedFile("is missing", path=str(as_path(self.folder, place.name)), hint=LOST_FILE)
        return ByteRange(path, place.offset, place.length)


LOST_FILE = "copy it from where the checkpoint was saved; without it, run `ckptfix repair FOLDER OUT` to keep the rest"


class Folder(Assembled):
    """The data that a checkpoint keeps about its folder, for edits and for doctor.

    Attributes:
        metadata: the content of the metadata.
        files: the files that it names.
        spliced: the tensors, one piece each, in the order of `tensors`.
        tensors: the keys that are tensors.
    """

    __slots__ = ("files", "metadata", "spliced", "tensors")

    def __init__(self, metadata: Metadata, files: ItemFiles, tensors: list[SavedKey], spliced: SplicedFile) -> None:
        self.metadata = metadata
        self.files = files
        self.tensors = tensors
        self.spliced = spliced


def read_metadata(folder: str, name: str = dcp_metadata.NAME) -> tuple[Metadata, FileVersion]:
    """Return the metadata `name` of a folder, and the file as it was read.

    Raises:
        DamagedFile: it is not a pickle of a Metadata.
        Unsupported: its items are compressed or encrypted.
    """
    path = file_inside(folder, name, where=folder)
    before = mark(path)
    with open_source(path) as source:
        if source.size > MAX_METADATA:
            raise Unsupported(f"the metadata has {source.size} bytes, which is too large to read", path=path)
        data = source.read(0, source.size)
    return dcp_metadata.understood(data, path, whole=name == dcp_metadata.NAME), before


def read_folder(path: str) -> tuple[Metadata, ItemFiles, list[Finding]]:
    """Return a folder's metadata (combined over ranks), the files that it names, and findings about ranks.

    Raises:
        DamagedFile: no metadata can be read.
        Unsupported: items are compressed or encrypted.
    """
    if is_file(as_path(path, dcp_metadata.NAME)) or not ranks.names(path):
        said, before = read_metadata(path)
        return said, find_files(path, said, (before,)), []
    made = ranks.together(path, lambda name: read_metadata(path, name))
    more = [part.place.name for _, _, part in made.doubles if part.place is not None]
    files = find_files(path, made.said, made.marks, more)
    return made.said, files, made.findings + _differing(made.doubles, files)


def _differing(doubles: Sequence[tuple[SavedKey, SavedChunk, SavedChunk]], files: ItemFiles) -> list[Finding]:
    """Return a finding for data whose copies differ between ranks, as far as lengths and checksums show it."""
    unequal: dict[str, None] = {}
    for saved, first, other in doubles:
        try:
            same = saved.address in unequal or _sum(saved, first, files) == _sum(saved, other, files)
        except CkptfixError:
            continue  # damaged or missing items are reported where they are read
        if not same:
            unequal[saved.address] = None
    return differing(list(unequal))


def _sum(saved: SavedKey, part: SavedChunk, files: ItemFiles) -> object:
    """Return a value that is equal for two items with equal content."""
    place = place_of(part)
    if saved.dtype is None:
        with open_source(files.range(place).path) as source:
            return source.read(place.offset, place.length) if place.length <= MAX_VALUE else place.length
    if not dtypes.by_name(saved.dtype).nbytes(math.prod(part.sizes)):
        return None
    check = chunk_item(saved, part, files).check
    return check.crc32 if check is not None else None


def find_files(folder: str, said: Metadata, before: Sequence[FileVersion], more: Iterable[str] = ()) -> ItemFiles:
    """Return the files that the metadata names, and `more`; a file whose name leads out of the folder is not opened."""
    names = dict.fromkeys(part.place.name for _, part in said.places() if part.place is not None)
    names |= dict.fromkeys(chain((place.name for _, place in said.unused), more))
    marks = list(before)
    sizes: dict[str, int] = {}
    paths: dict[str, str] = {}
    refused: dict[str, str] = {}
    for name in names:
        try:
            path = file_inside(folder, name, where=before[0].path)
        except NoSuchFile:
            continue
        except DamagedFile as error:
            refused[name] = error.message
            continue
        paths[name] = path
        marks.append(mark(path))
        sizes[name] = marks[-1].stamp.size
    return ItemFiles(folder, sizes, paths, tuple(marks), refused)


def read(path: str) -> Checkpoint:
    """Read names, shapes, locations and values; see the contract in `base`."""
    said, files, findings = read_folder(path)
    return assembled(path, said, files, findings)


def assembled(path: str, said: Metadata, files: ItemFiles, rows: Sequence[Finding] = ()) -> Checkpoint:
    """Return the checkpoint that the metadata describes, in these files; `rows` are findings about the ranks."""
    findings = [*rows, *(found("bad-tensor", what, where=where) for where, what in said.wrong)]
    tensors = [saved for saved in said.saved if saved.dtype is not None]
    spliced = pieces_of_tensors(path, tensors, files)
    assembly = Assembly()
    nesting = Nesting()
    with about(files.metadata):
        numbers = iter(range(len(tensors)))
        for index, saved in enumerate(said.saved):
            if saved.dtype is None:
                _put_value(saved, index, files, assembly, nesting, findings)
                continue
            findings += _without_items(saved)
            key = assembly.storage(spliced.place(next(numbers)))
            nesting.put(saved.path, assembly.tensor(key, saved.dtype, saved.shape))
    findings += _cut(said, files)
    findings += stacked_layers(path, {saved.fqn: saved.shape for saved in tensors})
    kind, traits = _kind(tensors, files), _traits(said, files)
    checkpoint = assembly.checkpoint(
        nesting.root, path, format=kind, files=files.marks, traits=traits, findings=findings
    )
    pickled_object(checkpoint).container = Folder(said, files, tensors, spliced)
    return checkpoint


def _without_items(saved: SavedKey) -> Iterator[Finding]:
    """Yield a finding for a tensor with a chunk that is in no file, judged by the metadata alone."""
    for part in saved.parts:
        if part.is_lost:
            yield found("bad-tensor", _no_item(part), where=saved.address)
            return


def _no_item(part: SavedChunk) -> str:
    return f"its metadata lists no item for the chunk of {list(part.sizes)} at {list(part.offsets)}"


def _kind(tensors: Sequence[SavedKey], files: ItemFiles) -> str:
    """Return the name of a folder's format, judged by the files that have its names and tensors."""
    if not files.metadata.endswith(f"/{dcp_metadata.NAME}"):
        return RANKS
    places = (part.place for saved in tensors for part in saved.parts if math.prod(part.sizes))
    first = next((place for place in places if place is not None and place.name in files.paths), None)
    try:
        image = None if first is None else files.images.at(files.paths[first.name], first.offset)
    except CkptfixError:
        return IMAGES
    return NAME if image is None else IMAGES


def folder_of(checkpoint: Checkpoint) -> Folder:
    """Return the folder that a checkpoint was read from."""
    folder = pickled_object(checkpoint).container
    assert isinstance(folder, Folder)
    return folder


def _traits(said: Metadata, files: ItemFiles) -> dict[str, object]:
    items = sum(1 for _ in said.places())
    traits: dict[str, object] = {"files": len(files.paths), "items": items}
    if said.version is not None:
        traits["metadata version"] = said.version
    if not said.nested:
        traits["names"] = "flat"
    if said.saved_at is not None:
        traits["saved at"] = said.saved_at
    return traits


def _put_value(
    saved: SavedKey, index: int, files: ItemFiles, assembly: Assembly, nesting: Nesting, findings: list[Finding]
) -> None:
    """Read the value and put it at its path; a damaged one is reported and left out."""
    place = saved.parts[0].place
    try:
        if place is None:
            raise DamagedFile("its metadata lists no item for it")
        if not files.has(place):
            return
        item = value_item(files.range(place), saved.address)
    except DamagedFile as error:
        findings.append(found("bad-tensor", error.message, where=saved.address, offset=error.offset))
        return
    nesting.put(saved.path, assembly.adopt(item.graph.root, item.storages, f"{index}-"))


def _cut(said: Metadata, files: ItemFiles) -> list[Finding]:
    """Return a finding for each file that is missing or shorter than the metadata states."""
    ends: dict[str, int] = {}
    counts: dict[str, int] = {}
    for _, part in said.places():
        place = part.place
        if place is not None and not files.has(place):
            ends[place.name] = max(ends.get(place.name, 0), place.offset + place.length)
            counts[place.name] = counts.get(place.name, 0) + 1
    rows = []
    for name, end in ends.items():
        items = plural(counts[name], "item")
        if name in files.refused:
            message = f"{files.refused[name]}: {items} lost with it"
        elif name in files.sizes:
            message = f"it should have {end} bytes, and {files.sizes[name]} are left: {items} cut off"
        else:
            message = f"the file is missing, and {items} with it"
        rows.append(found("truncated", message, where=name))
    # Another rank has the same items, but no writer uses such a file name.
    rows += [found("shard-path", message, where=name) for name, message in files.refused.items() if name not in ends]
    return rows


def pieces_of_tensors(path: str, tensors: Sequence[SavedKey], files: ItemFiles) -> SplicedFile:
    """Return the tensors as pieces of one virtual file, each assembled from its items when it is first needed."""

    def make(index: int) -> SplicedPiece:
        saved = tensors[index]
        try:
            return tensor_piece(saved, files)
        except CkptfixError as error:
            error.path = error.path or files.metadata
            error.where = error.where or saved.address
            raise

    return SplicedFile(path, [saved.nbytes for saved in tensors], make)


def tensor_piece(saved: SavedKey, files: ItemFiles) -> SplicedPiece:
    """Return the elements of a tensor in row-major order, assembled from its items, and their checksums.

    Raises:
        DamagedFile: an item is missing, damaged, or part of a different tensor; or the items do not tile the tensor.
    """
    assert saved.dtype is not None
    row = dtypes.by_name(saved.dtype)
    chunks: list[Chunk] = []
    checks: list[RangeCheck] = []
    for part in saved.parts:
        nbytes = row.nbytes(math.prod(part.sizes))
        if not nbytes:
            chunks.append(Chunk(part.offsets, part.sizes, ByteRange(files.metadata, 0, 0)))
            continue
        item = chunk_item(saved, part, files)
        chunks.append(Chunk(part.offsets, part.sizes, _as_range(item.data, saved.address)))
        if item.check is not None:
            checks.append(item.check)
    return SplicedPiece(tiled(saved.shape, row.itemsize, chunks), tuple(checks))


def chunk_item(saved: SavedKey, part: SavedChunk, files: ItemFiles) -> TensorItem:
    """Return the item of a chunk of a tensor. Raises as `tensor_item`."""
    assert saved.dtype is not None
    named = ChunkName(files.images, saved.fqn, part.offsets)
    return tensor_item(files.range(place_of(part)), saved.address, saved.dtype, part.sizes, files.molds, named)


def place_of(part: SavedChunk) -> StorageInfo:
    """Return the location of the item of a chunk. Raises DamagedFile if the metadata lists none."""
    if part.place is None:
        raise DamagedFile(_no_item(part))
    return part.place


def _as_range(data: Data, name: str) -> ByteRange:
    """Return `data` as a range; for a stream, as a range of a virtual file."""
    if isinstance(data, ByteRange):
        return data
    return SplicedFile(name, [data.length], lambda index: SplicedPiece((data,))).place(0)
