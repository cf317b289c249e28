"""Reader of the entries of the dicts of a `.metadata`, each at once: see `phrases`."""

from __future__ import annotations

from typing import NamedTuple

from ckptfix.formats.dcp.phrases import BOX, CHUNK, INDEX, PLACE, TENSOR, VALUE, numbers
from ckptfix.formats.torch.tensors import dtype_name
from ckptfix.pickles import Call, Global
from ckptfix.pickles.graph import Node
from ckptfix.pickles.opcodes import pushed_int

Sizes = tuple[int, ...]

MAX_SIZE = 1 << 63
MAX_PARTS = 100
"""The limit of sizes of a tensor, and of keys in a path; real programs stay below it."""


class Boxes(NamedTuple):
    """The metadata of a tensor: its dtype and shape, and the (offsets, sizes) of its chunks."""

    dtype: str
    shape: Sizes
    boxes: tuple[tuple[Sizes, Sizes], ...]


class StoredItem(NamedTuple):
    """The location of an item: its key, its offsets in the tensor, and `length` bytes at `offset` of a file."""

    fqn: str
    box: Sizes | None
    name: str
    offset: int
    length: int


class Otherwise(Exception):
    """Signal that the general pickle reader must take over."""


Row = tuple[Node, "Node | Boxes"]
WIDTHS = {0x4B: 2, 0x4D: 3, 0x4A: 5, 0x8A: 2}
"""The lengths in bytes of the opcodes that push a number; more bytes follow the last one."""

TUPLES = {0x29: 0, 0x85: 1, 0x86: 2, 0x87: 3}


class EntryReader:
    """A reader of entries and the memo numbers that they assign.

    A method that reads an entry takes the offset at which it begins, and returns its end. If the entry is written
    differently, it returns the same offset and changes nothing.

    Attributes:
        data: the opcodes, without frames.
        count: the number of memo entries so far.
        memo: the memo: strings of entries, and all objects that were read opcode by opcode.
        sizes: memo number -> sizes.
        kinds: memo number -> the dtype of the properties of a tensor.
        made: the entries that were read.
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.count = 0
        self.memo: dict[int, Node] = {}
        self.sizes: dict[int, Sizes] = {}
        self.kinds: dict[int, str] = {}
        self.made: list[StoredItem | Row] = []
        # Keyed by opcodes: since a number is assigned only once, the same opcodes mean the same everywhere.
        self._dtypes: dict[bytes, str] = {}
        self._known: dict[bytes, Sizes] = {}
        self._size_gets: set[bytes] = set()
        self._same: set[tuple[bytes | None, ...]] = set()

    def text(self, pos: int) -> tuple[str, int]:
        """Return the string that is pushed at `pos`, and the end of its opcode."""
        data = self.data
        start = pos + 2 if data[pos] == 0x8C else pos + 5
        end = start + int.from_bytes(data[pos + 1 : start], "little")
        if end > len(data):
            raise Otherwise
        return str(data[start:end], "utf-8", "surrogatepass"), end

    def number(self, get: bytes) -> int:
        """Return the number that is fetched. Raises Otherwise if it is not assigned yet."""
        found = int.from_bytes(get[1:], "little")
        if found >= self.count:
            raise Otherwise
        return found

    def name(self, pos: int) -> tuple[str | None, int]:
        """Return the string that is pushed at `pos`, numbered or fetched, and its end; (None, `pos`) otherwise."""
        data = self.data
        code = data[pos]
        if code == 0x8C or code == 0x58:
            text, end = self.text(pos)
            if data[end] != 0x94:
                return None, pos
            self.memo[self.count] = text
            self.count += 1
            return text, end + 1
        if code != 0x68 and code != 0x6A:
            return None, pos
        end = pos + (2 if code == 0x68 else 5)
        value = self.memo.get(self.number(data[pos:end]))
        return (value, end) if isinstance(value, str) else (None, pos)

    def _size(self, get: bytes, pushed: bytes | None) -> Sizes:
        """Return a ``torch.Size``, from the numbers that are `pushed` or from the memo."""
        if pushed is None:
            index = self.number(get)
            found = self.sizes.get(index)
            if found is None:
                node = self.memo[index]
                made = node.args[0] if type(node) is Call and type(node.args) is tuple and node.args else None
                if type(made) is not tuple:
                    raise Otherwise
                found = self.sizes[index] = _checked(tuple(one if type(one) is int else -1 for one in made))
            return found
        if get not in self._size_gets:
            if not self._are(get, None):
                raise Otherwise
            self._size_gets.add(get)
        found = self._known.get(pushed)
        if found is None:
            found = self._known[pushed] = _checked(numbers(pushed))
        self.count += 2 if pushed == b")" else 3
        self.sizes[self.count - 1] = found
        return found

    def _dtype(self, get: bytes) -> str:
        """Return the dtype of the global that is fetched."""
        found = self._dtypes.get(get)
        if found is None:
            found = self._dtypes[get] = dtype_name(self.memo[self.number(get)])
        return found

    def _are(self, *rows: bytes | str | None) -> bool:
        """Return whether each opcode fetches the string that follows it, or a class if that is None."""
        for get, name in zip(rows[::2], rows[1::2], strict=True):
            assert isinstance(get, bytes)
            value = self.memo.get(self.number(get))
            if type(value) is not Global if name is None else value != name:
                return False
        return True

    def tensor(self, pos: int) -> int:
        """Read the entry of ``state_dict_metadata`` at `pos`, of a tensor or a value, and return its end."""
        data, before = self.data, self.count
        fqn, at = self.name(pos)
        found = None if fqn is None else TENSOR.match(data, at)
        if found is None:
            value = None if fqn is None else VALUE.match(data, at)
            if value is None or data[value.end()] not in _NEXT or not self._are(value[1], None):
                self.count = before
                return pos
            self.count += 1
            self.made.append((fqn, _VALUE))
            return value.end()
        cls, properties, own, dtype, layout, memory, shared, size, size_get, pushed, chunks = found.groups()
        names = cls, properties, own, layout, memory, size, chunks
        if names not in self._same:
            right = self._are(cls, None, properties, "properties", size, "size", chunks, "chunks")
            if own is not None:
                others = {self.number(layout), self.number(memory)}
                right = right and self._are(own, None) and others <= self.memo.keys()
            if not right:
                self.count = before
                return pos
            self._same.add(names)
        self.count += 2
        if own is not None:
            name = self._dtype(dtype)
            self.kinds[self.count] = name
            self.count += 2
        else:
            name = self._kind(shared)
        shape = self._size(size_get, pushed)
        if pushed is not None:
            # A tuple of its own: a shared tuple would be written as shared.
            shape = self.sizes[self.count - 1] = (*shape,)
        self.count += 1
        boxes, at = self._boxes(found.end())
        if data[at : at + 2] != b"ub":
            raise Otherwise
        self.made.append((fqn, Boxes(name, shape, boxes)))
        return at + 2

    def _kind(self, get: bytes) -> str:
        """Return the dtype of a TensorProperties that is fetched."""
        index = self.number(get)
        found = self.kinds.get(index)
        if found is None:
            node = self.memo[index]
            state = node.state if type(node) is Call else None
            if type(state) is not tuple or not state:
                raise Otherwise
            found = self.kinds[index] = dtype_name(state[0])
        return found

    def _boxes(self, pos: int) -> tuple[tuple[tuple[Sizes, Sizes], ...], int]:
        """Return the chunks that are appended to a list, and their end."""
        data = self.data
        boxes: list[tuple[Sizes, Sizes]] = []
        while data[pos] != 0x75:
            several = data[pos] == 0x28
            pos += several
            while (found := CHUNK.match(data, pos)) is not None:
                cls, offsets, offsets_get, begin, sizes, sizes_get, extent = found.groups()
                names = cls, offsets, sizes
                if names not in self._same:
                    if not self._are(cls, None, offsets, "offsets", sizes, "sizes"):
                        raise Otherwise
                    self._same.add(names)
                self.count += 2
                box = self._size(offsets_get, begin)
                boxes.append((box, self._size(sizes_get, extent)))
                pos = found.end()
                if not several:
                    break
            if data[pos] != (0x65 if several else 0x61) or (found is None and not several):
                raise Otherwise
            pos += 1
        return tuple(boxes), pos

    def path(self, pos: int) -> int:
        """Read the entry of ``planner_data`` at `pos`, and return its end."""
        data, before = self.data, self.count
        fqn, at = self.name(pos)
        path: list[Node] = []
        several = fqn is not None and data[at] == 0x28
        at += several
        while fqn is not None and len(path) <= MAX_PARTS:
            code = data[at]
            if code in TUPLES or code == 0x74:
                if (code == 0x74) is not several or (not several and len(path) != TUPLES[code]) or data[at + 1] != 0x94:
                    break
                self.count += 1
                self.made.append((fqn, tuple(path)))
                return at + 2
            if code in WIDTHS and code != 0x8A:
                path.append(pushed_int(data[at : at + WIDTHS[code]]))
                at += WIDTHS[code]
                continue
            part, end = self.name(at)
            if part is None:
                break
            path.append(part)
            at = end
        self.count = before
        return pos

    def item(self, pos: int) -> int:
        """Read the entry of ``storage_data`` at `pos`, and return its end."""
        data, before = self.data, self.count
        head = INDEX.match(data, pos)
        if head is None:
            return pos
        self.count += 2
        fqn, at = self.name(head.end())
        found = None if fqn is None else BOX.match(data, at)
        if found is None:
            self.count = before
            return pos
        index, box_name, size_get, pushed, cls, path = found.groups()
        box = None if size_get is None else self._size(size_get, pushed)
        self.count += 2
        name, at = self.name(found.end())
        place = None if name is None else PLACE.match(data, at)
        if fqn is None or name is None or place is None:
            self.count = before
            return pos
        offset, begin, length, size = place.groups()
        names = (*head.groups(), index, box_name, cls, path, offset, length)
        if names not in self._same:
            right = self._are(head[1], None, head[2], "fqn", index, "index", cls, None, path, "relative_path")
            right = right and self._are(offset, "offset", length, "length")
            if not right or (box_name is not None and not self._are(box_name, "offset")):
                self.count = before
                return pos
            self._same.add(names)
        self.made.append(StoredItem(fqn, box, name, pushed_int(begin), pushed_int(size)))
        return place.end()


SIZE = Global("torch", "Size", 0)
_VALUE = Call(Global("torch.distributed.checkpoint.metadata", "BytesStorageMetadata", 0), (), "NEWOBJ", 0)
_NEXT = frozenset((0x8C, 0x58, 0x68, 0x6A, 0x75))
"""The opcodes that may follow a value without a state: the next name, or the end of the entries."""


def _checked(sizes: Sizes) -> Sizes:
    if len(sizes) > MAX_PARTS or any(not 0 <= size < MAX_SIZE for size in sizes):
        raise Otherwise
    return sizes
