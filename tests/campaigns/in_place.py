"""Power cuts while a file is edited in place, and while that is taken back: every state that the disk may be left in.

The file system is one in memory, whose calls are recorded. After each of them the power may go. A file then has what it
had at its last sync, and of what was asked of it later any part: any of the sectors of 512 bytes of a write, a new size
or the old one, and of blocks that are put in or taken out any number of those behind them moved. That is less than any
file system promises. From each state `undo` has to reach the file before the edit, or the edit is done, bit for bit;
cut off again while it does so, it has to as well.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from builders import Tensor, assemble, legacy, safetensors, state_dict_ops, torch_zip
from campaigns.frame import Table, report

from ckptfix import formats
from ckptfix.checkpoint import Edit, Rename
from ckptfix.errors import CkptfixError
from ckptfix.io.inplace import edit
from ckptfix.io.inplace.plan import change_of
from ckptfix.io.inplace.record import EditRecord
from ckptfix.io.unfinished_edits import JOURNAL, beside
from ckptfix.ops.inplace import target_of
from ckptfix.ops.rename import sites

BLOCK, SECTOR = 1024, 512
TWICE = 4
"""One in so many recoveries is cut off too."""


@dataclass
class Content:
    """Of a file: its bytes, and the numbers of the blocks that it does not have."""

    data: bytearray
    missing: set[int] = field(default_factory=set)

    def copy(self) -> Content:
        return Content(bytearray(self.data), set(self.missing))

    def write(self, offset: int, data: bytes) -> None:
        if offset + len(data) > len(self.data):
            self.resize(offset + len(data))
        self.data[offset : offset + len(data)] = data
        self.missing -= set(range(offset // BLOCK, -(-(offset + len(data)) // BLOCK)))

    def resize(self, size: int) -> None:
        first = -(-len(self.data) // BLOCK)
        if size > len(self.data):
            self.missing |= set(range(first, -(-size // BLOCK)))
            self.data += bytes(size - len(self.data))
        else:
            del self.data[size:]
            self.missing = {number for number in self.missing if number < -(-size // BLOCK)}

    def put_in(self, length: int, gap: int) -> None:
        """Blocks put in front, with the gap at `gap`: what is behind it has moved."""
        count, at = length // BLOCK, gap // BLOCK
        self.data[gap:gap] = bytes(length)
        moved = {number if number < at else number + count for number in self.missing}
        self.missing = moved | set(range(at, at + count))

    def take_out(self, offset: int, length: int, gap: int, *, done: bool) -> None:
        """Blocks taken out at `offset`, and what is behind them moved as far as `gap`."""
        count, first = length // BLOCK, offset // BLOCK
        del self.data[offset : offset + length]
        left = {number for number in self.missing if not first <= number < first + count}
        self.missing = {number - count if number >= first + count else number for number in left}
        if not done:
            self.put_in(length, min(gap, -(-len(self.data) // BLOCK) * BLOCK))


@dataclass(frozen=True)
class Call:
    """What was asked of the disk."""

    kind: str
    path: str
    arguments: tuple[Any, ...] = ()


class MemoryFile:
    """A file of a `MemoryDisk`."""

    def __init__(self, disk: MemoryDisk, path: str) -> None:
        self.name = path
        self._disk = disk
        self._content = disk.files[path]

    @property
    def size(self) -> int:
        return len(self._content.data)

    def read(self, offset: int, length: int) -> bytes:
        return bytes(self._content.data[offset : offset + length])

    def write(self, offset: int, data: bytes) -> None:
        self._log("write", offset, data)
        self._content.write(offset, data)

    def resize(self, size: int) -> None:
        self._log("resize", size)
        self._content.resize(size)

    def insert(self, length: int) -> None:
        self._log("insert", length)
        self._content.put_in(length, 0)

    def remove(self, offset: int, length: int) -> None:
        self._log("remove", offset, length)
        assert not offset % BLOCK and not length % BLOCK and offset + length < self.size
        self._content.take_out(offset, length, 0, done=True)

    def holes(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        at = start
        while at < min(end, self.size):
            number = at // BLOCK
            stop = number
            while stop in self._content.missing:
                stop += 1
            if stop > number:
                yield at, min(stop * BLOCK, end, self.size)
            at = (max(stop, number + 1)) * BLOCK

    def alone(self) -> None:
        self._log("lease")

    def sync(self) -> None:
        self._log("sync")

    def close(self) -> None:
        pass

    def _log(self, kind: str, *arguments: Any) -> None:
        self._disk.say(Call(kind, self.name, arguments))


class MemoryDisk:
    """Files in memory, and a record of what was asked of them."""

    def __init__(self, files: dict[str, Content]) -> None:
        self.files = {path: content.copy() for path, content in files.items()}
        self.calls: list[Call] = []
        self.fail: Callable[[Call], None] = lambda call: None

    def say(self, call: Call) -> None:
        self.calls.append(call)
        self.fail(call)

    def open(self, path: str) -> MemoryFile:
        return MemoryFile(self, path)

    def lock(self, folder: str) -> MemoryDisk:
        return self

    def close(self) -> None:
        pass

    def load(self, path: str) -> bytes | None:
        found = self.files.get(path)
        return None if found is None else bytes(found.data)

    def create(self, path: str, data: bytes, like: str) -> None:
        if path in self.files:
            raise FileExistsError(path)
        self.say(Call("create", path, (data,)))
        self.files[path] = Content(bytearray(data))

    def replace(self, path: str, data: bytes, like: str) -> None:
        self.say(Call("replace", path, (data,)))
        self.files[path] = Content(bytearray(data))

    def delete(self, path: str) -> None:
        self.say(Call("delete", path))
        self.files.pop(path, None)


def after_cut(files: dict[str, Content], calls: Sequence[Call], at: int, chance: random.Random) -> dict[str, Content]:
    """The disk after the power went while call number `at` was made, or after the last one."""
    durable = {path: content.copy() for path, content in files.items()}
    waiting: dict[str, list[Call]] = {}
    for call in calls[:at]:
        if call.kind == "sync":
            for one in waiting.pop(call.path, []):
                _apply(durable[call.path], one)
        elif call.kind in ("create", "replace"):
            durable[call.path] = Content(bytearray(call.arguments[0]))
        elif call.kind == "delete":
            durable.pop(call.path, None)
        else:
            waiting.setdefault(call.path, []).append(call)
    if at < len(calls):
        call = calls[at]
        if call.kind == "create" and chance.random() < 0.8:
            data = call.arguments[0]
            torn = Content(bytearray())
            _tear(torn, 0, data, chance)
            durable[call.path] = torn
        elif call.kind == "replace" and chance.random() < 0.5:
            durable[call.path] = Content(bytearray(call.arguments[0]))
        elif call.kind == "delete" and chance.random() < 0.5:
            durable.pop(call.path, None)
        elif call.kind in ("write", "resize", "insert", "remove", "sync"):
            waiting.setdefault(call.path, []).append(call)
    for path, some in waiting.items():
        for call in some:
            _apply_partly(durable[path], call, chance)
    return durable


def _apply(content: Content, call: Call) -> None:
    if call.kind == "write":
        content.write(*call.arguments)
    elif call.kind == "resize":
        content.resize(*call.arguments)
    elif call.kind == "insert":
        content.put_in(call.arguments[0], 0)
    elif call.kind == "remove":
        offset, length = call.arguments
        content.take_out(offset, length, 0, done=True)


def _apply_partly(content: Content, call: Call, chance: random.Random) -> None:
    if call.kind == "write":
        offset, data = call.arguments
        _tear(content, offset, data, chance)
    elif chance.random() < 0.2:
        return
    elif call.kind == "insert":
        blocks = -(-len(content.data) // BLOCK)
        gap = chance.choice((0, blocks, chance.randint(0, blocks))) * BLOCK
        length = call.arguments[0]
        size = len(content.data) + length
        content.resize(blocks * BLOCK)
        content.put_in(length, gap)
        content.resize(size)
    elif call.kind == "remove":
        offset, length = call.arguments
        size = len(content.data)
        content.resize(-(-size // BLOCK) * BLOCK)
        blocks = (len(content.data) - length) // BLOCK
        gap = chance.randint(offset // BLOCK, blocks) * BLOCK
        content.take_out(offset, length, gap, done=False)
        content.resize(size - length if gap == blocks * BLOCK and chance.random() < 0.5 else size)
    elif call.kind == "resize":
        content.resize(*call.arguments)


def _tear(content: Content, offset: int, data: bytes, chance: random.Random) -> None:
    """Any of the sectors of a write."""
    share = chance.choice((0.0, 0.1, 0.5, 0.9, 1.0))
    start = offset
    while start < offset + len(data):
        end = min(start // SECTOR * SECTOR + SECTOR, offset + len(data))
        if chance.random() < share:
            content.write(start, data[start - offset : end - offset])
        start = end


@dataclass(frozen=True)
class Case:
    """An edit: the files before and after, and what is recorded of it.

    Attributes:
        keep: it is remembered beside the file.
    """

    target: str
    before: dict[str, Content]
    record: EditRecord
    keep: bool

    def after(self) -> dict[str, Content]:
        disk = MemoryDisk(self.before)
        edit.carry_out(self.target, self.record, keep=self.keep, disk=disk)
        return disk.files


DATA: dict[str, Callable[[int], bytes]] = {
    "random": lambda size: random.Random(7).randbytes(size),
    "zeros": bytes,
    "periodic": lambda size: (bytes(range(256)) * (size // 256 + 1))[:size],
    "half zeros": lambda size: random.Random(7).randbytes(size // 2) + bytes(size - size // 2),
}
"""What tensors hold; the last two in which a gap is hard to find."""

FILES = ("zip", "legacy", "safetensors")


def made(folder: Path, kind: str, data: str, *, longer: bool, sparse: bool = False) -> Case:
    """An edit of a file of this format that gives its keys longer names or shorter ones."""
    size = 40 * BLOCK
    raw = DATA[data](size)
    keys = {f"module.block.{number}.weight": Tensor(str(number), (size // 4,), size // 4) for number in range(2)}
    path = folder / f"{kind}.{'safetensors' if kind == 'safetensors' else 'pth'}"
    if kind == "safetensors":
        path.write_bytes(safetensors([(name, "F32", [size // 4], raw) for name in keys]))
    else:
        pickle = assemble(("PROTO", 2), *state_dict_ops(keys), "STOP")
        path.write_bytes(
            torch_zip(pickle, [raw, raw])
            if kind == "zip"
            else legacy(pickle, [(str(number), size // 4, raw) for number in range(2)])
        )
    return _case(path, longer=longer, sparse=sparse)


def folder_of_shards(folder: Path) -> Case:
    """An edit of two shards and their index."""
    raw = DATA["random"](8 * BLOCK)
    names = ["module.a", "module.b"]
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for name, shard in zip(names, shards, strict=True):
        (folder / shard).write_bytes(safetensors([(name, "F32", [2 * BLOCK], raw)]))
    rows = ", ".join(f'"{name}": "{shard}"' for name, shard in zip(names, shards, strict=True))
    index = f'{{"metadata": {{"total_size": {16 * BLOCK}}}, "weight_map": {{{rows}}}}}'
    (folder / "model.safetensors.index.json").write_text(index)
    return _case(folder, longer=True)


def distributed(folder: Path) -> Case:
    """An edit of a distributed checkpoint, one of whose values lists names: its new item is appended to a file."""
    saved = Path(__file__).parents[1] / "recorded" / "dcp"
    for file in saved.iterdir():
        shutil.copy(file, folder)
    names = Rename("groups/0/params", "param_names", {"module.w": "p" * 3000 + ".module.w"})
    case = _case(folder, longer=True, more=(names,))
    assert [change.name for change in case.record.changes if not change.old] == ["__0_0.distcp"]
    return case


def _case(path: Path, *, longer: bool, sparse: bool = False, more: tuple[Edit, ...] = ()) -> Case:
    checkpoint = formats.open_checkpoint(path)
    renames = sites.add(checkpoint, prefix="p" * 3000) if longer else sites.strip(checkpoint, prefix="module")
    format = formats.format_of(checkpoint)
    target = target_of(checkpoint)
    assert format.in_place is not None
    plan = format.in_place(checkpoint, format.plan_edit(checkpoint, (*renames.edits, *more), target), lambda: BLOCK)
    files = {str(Path(file.path).resolve()): Path(file.path) for file in plan.files}
    before = {name: Content(bytearray(file.read_bytes())) for name, file in files.items()}
    if sparse:
        for content in before.values():
            _make_holes(content)
    disk = MemoryDisk(before)
    found = [change_of(disk.open(str(Path(file.path).resolve())), file, BLOCK) for file in plan.files]
    changes = tuple(change for change in found if change is not None)
    assert changes
    return Case(target, before, EditRecord("id", "renamed", "now", changes), any(change.old for change in changes))


def _make_holes(content: Content) -> None:
    """Let blocks of zeros be holes."""
    for number in range(len(content.data) // BLOCK):
        if not any(content.data[number * BLOCK : (number + 1) * BLOCK]):
            content.missing.add(number)


def states(case: Case, count: int, seed: int, *, back: bool = False) -> Table:
    """How `count` cuts of the edit, or of taking it back, end, and what is wrong."""
    chance = random.Random(seed)
    first = case.after() if back else {path: content.copy() for path, content in case.before.items()}
    disk = MemoryDisk(first)
    if back:
        edit.take_back(case.target, case.record, disk=disk)
    else:
        edit.carry_out(case.target, case.record, keep=case.keep, disk=disk)
    plain = {path: bytes(content.data) for path, content in case.before.items()}
    edited = {path: bytes(content.data) for path, content in case.after().items() if path in plain}
    ends: Counter[str] = Counter()
    wrong: list[str] = []
    for number in range(count):
        at = chance.randint(0, len(disk.calls))
        cut = after_cut(first, disk.calls, at, chance)
        again = number % TWICE == 0
        try:
            end = _recovered(case, cut, plain, edited, chance, again=again)
        except (CkptfixError, OSError, AssertionError) as error:
            end = "refused"
            wrong.append(f"cut at {at} of {len(disk.calls)} ({number}): {error!r}")
        if end == "torn":
            wrong.append(f"cut at {at} of {len(disk.calls)} ({number}): neither before nor after")
        ends[end] += 1
    return ends, wrong


def _recovered(
    case: Case,
    cut: dict[str, Content],
    plain: dict[str, bytes],
    edited: dict[str, bytes],
    chance: random.Random,
    *,
    again: bool,
) -> str:
    disk = MemoryDisk(cut)
    if beside(case.target, JOURNAL) in disk.files:
        edit.finish(case.target, disk=disk)
        if again:
            cut = after_cut(cut, disk.calls, chance.randint(0, len(disk.calls)), chance)
            return _recovered(case, cut, plain, edited, chance, again=False)
        assert beside(case.target, JOURNAL) not in disk.files
    now = {path: bytes(content.data) for path, content in disk.files.items() if path in plain}
    known = [record.id for record in edit.past(case.target, disk)]
    if now == plain:
        return "before" if not known else "torn"
    return "after" if now == edited and (known == ["id"] or not case.keep) else "torn"


def cases(folder: Path) -> Iterator[tuple[str, Case]]:
    """(name, edit): each format, with names that fit and names that do not, over data of all kinds."""
    for kind in FILES:
        yield f"{kind}, shorter", made(_new(folder, f"{kind}-shorter"), kind, "random", longer=False)
        for data in DATA if kind != "zip" else ("random",):
            for sparse in (False, True) if data in ("zeros", "half zeros") else (False,):
                name = f"{kind}, longer, {data}{', sparse' if sparse else ''}"
                yield name, made(_new(folder, name.replace(", ", "-")), kind, data, longer=True, sparse=sparse)
    yield "shards", folder_of_shards(_new(folder, "shards"))
    yield "dcp", distributed(_new(folder, "dcp"))


def _new(folder: Path, name: str) -> Path:
    made = folder / name.replace(" ", "-")
    made.mkdir()
    return made


def main(folder: Path, count: int = 4000) -> int:
    """Print the table; the number of faults that were found."""
    found = 0
    for name, case in cases(folder):
        for back in (False, True):
            way = "undo" if back else "edit"
            found += report(f"T106 {name:36} {way}  {count:6} states", states(case, count, 1, back=back), 5)
    return found
