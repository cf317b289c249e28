"""Power cuts while a plan is written: every state that the disk may be left in, by a record of what was asked of it.

The calls of one run are recorded. After each of them the power may go: then a file has what was written before its
last sync, and of what came later any part; a folder likewise has the names of its last sync, and of later changes any.
Writes and names do not wait for each other, which is less than any file system promises. In each state every output
must be as it was or as planned, an index never before its shards, and what is kept never lost.
"""

from __future__ import annotations

import math
import os
import random
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations, product
from pathlib import Path
from typing import Any

from faults.scenarios import OLD, SCENARIOS, SMALLER, Scenario, expected, plan, prepare, writing

from ckptfix import platform
from ckptfix.io import copy as io_copy
from ckptfix.io.write import write_plan

EMPTY = hash(b"")
Names = dict[str, int]
"""Name in the folder -> number of a file."""


@dataclass(frozen=True)
class Op:
    """One call. `kind`: ``write`` of `data` at `offset` of `file`, ``sync`` of `file`, ``name`` or ``sync names``."""

    kind: str
    file: int = 0
    offset: int = 0
    data: bytes = b""
    names: tuple[tuple[str, int | None], ...] = ()


@dataclass
class Recorder:
    """Records what is asked of the files in `folder`, which it still does."""

    folder: Path
    ops: list[Op] = field(default_factory=list)
    names: Names = field(default_factory=dict)
    contents: dict[int, bytes] = field(default_factory=dict)
    fds: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for path in self.folder.iterdir():
            self.contents[len(self.names)] = path.read_bytes()
            self.names[path.name] = len(self.names)
        self.before = dict(self.names)
        self._files = len(self.names)

    def _name(self, *changes: tuple[str, int | None]) -> None:
        self.ops.append(Op("name", names=changes))
        for name, file in changes:
            if file is None:
                del self.names[name]
            else:
                self.names[name] = file

    @contextmanager
    def recording(self) -> Iterator[None]:
        calls = ("open", "write", "fsync", "fdatasync", "link", "replace", "unlink")
        real = {name: getattr(os, name) for name in calls}
        means = platform.kernel_copies

        def opened(path: Any, flags: int, *mode: Any, **options: Any) -> int:
            fd: int = real["open"](path, flags, *mode, **options)
            self.fds.pop(fd, None)
            if flags & os.O_CREAT:
                self.fds[fd] = self._files
                self._files += 1
                self._name((Path(path).name, self.fds[fd]))
            return fd

        def written(fd: int, data: Any) -> int:
            offset = os.lseek(fd, 0, os.SEEK_CUR) if fd in self.fds else 0
            count: int = real["write"](fd, data)
            if fd in self.fds:
                self.ops.append(Op("write", self.fds[fd], offset, bytes(data[:count])))
            return count

        def synced(fd: int) -> None:
            real["fsync"](fd)
            names = stat.S_ISDIR(os.fstat(fd).st_mode)
            self.ops.append(Op("sync names") if names else Op("sync", self.fds[fd]))

        def linked(source: str, dest: str) -> None:
            real["link"](source, dest)
            self._name((Path(dest).name, self.names[Path(source).name]))

        def replaced(source: str, dest: str) -> None:
            real["replace"](source, dest)
            file = self.names[Path(source).name]
            self._name((Path(source).name, None), (Path(dest).name, file))

        def unlinked(path: str) -> None:
            real["unlink"](path)
            self._name((Path(path).name, None))

        shims = (opened, written, synced, synced, linked, replaced, unlinked)
        for name, shim in zip(real, shims, strict=True):
            setattr(os, name, shim)
        platform.kernel_copies = list  # every byte by way of os.write
        try:
            yield
        finally:
            for name, call in real.items():
                setattr(os, name, call)
            platform.kernel_copies = means


def recorded(folder: Path, name: str) -> Recorder:
    """The run of scenario `name`, which succeeds."""
    scenario = SCENARIOS[name]
    prepare(folder, scenario)
    planned = plan(folder, scenario)
    recorder = Recorder(folder)
    before = {constant: getattr(io_copy, constant) for constant in SMALLER}
    try:
        for constant, value in SMALLER.items():
            setattr(io_copy, constant, value)
        with recorder.recording():
            write_plan(planned, **writing(scenario))
    finally:
        for constant, value in before.items():
            setattr(io_copy, constant, value)
    return recorder


def subsets(count: int, rng: random.Random, most: int = 8) -> Iterator[frozenset[int]]:
    """Which of `count` changes arrived: all subsets of few; of many each prefix, each one missing or alone, others."""
    everything = frozenset(range(count))
    if count <= most:
        for size in range(count + 1):
            yield from map(frozenset, combinations(range(count), size))
        return
    for number in range(count + 1):
        yield frozenset(range(number))
    for number in range(count):
        yield everything - {number}
        yield frozenset({number})
    for _ in range(32):
        yield frozenset(number for number in range(count) if rng.random() < 0.5)


def content_of(start: bytes, writes: Sequence[Op], torn: Op | None = None) -> bytes:
    content = bytearray(start)
    for op in writes:
        data = op.data[: len(op.data) // 2] if op is torn else op.data
        content.extend(bytes(max(0, op.offset + len(data) - len(content))))
        content[op.offset : op.offset + len(data)] = data
    return bytes(content)


def contents_after(start: bytes, pending: Sequence[Op], rng: random.Random) -> Iterator[bytes]:
    """What a file may hold when the power goes before its next sync."""
    for chosen in subsets(len(pending), rng):
        yield content_of(start, [pending[number] for number in sorted(chosen)])
    for op in pending:
        yield content_of(start, pending, torn=op)


@dataclass
class Count:
    """What was looked at: `ops` recorded, `states` that differ, and what was wrong in them."""

    ops: int = 0
    states: int = 0
    wrong: list[str] = field(default_factory=list)


def explore(
    recorder: Recorder, scenario: Scenario, ops: Sequence[Op], *, seed: int = 0, first: bool = False, stride: int = 1
) -> Count:
    """Judge every state after every prefix of `ops`, or after each `stride`-th; until the `first` fault if so asked."""
    rng = random.Random(seed)
    found = Count(len(ops))
    seen: set[int] = set()
    expect = {name: hash(expected(name)) for name in scenario.files}
    for length in range(len(ops), -1, -stride):
        if first and found.wrong:
            break
        durable = dict(recorder.contents)
        unsynced: dict[int, list[Op]] = {}
        names, changes = dict(recorder.before), list[Op]()
        for op in ops[:length]:
            if op.kind == "write":
                unsynced.setdefault(op.file, []).append(op)
            elif op.kind == "sync":
                durable[op.file] = content_of(durable.get(op.file, b""), unsynced.pop(op.file, []))
            elif op.kind == "name":
                changes.append(op)
            else:
                names = _apply(names, changes)
                changes = []
        files = list(unsynced)
        variants = [
            [*dict.fromkeys(map(hash, contents_after(durable.get(file, b""), unsynced[file], rng)))] for file in files
        ]
        hashes = {file: hash(content) for file, content in durable.items()}
        for chosen in subsets(len(changes), rng):
            after = _apply(names, [changes[number] for number in sorted(chosen)])
            for contents in _together(variants, rng):
                state = {**hashes, **dict(zip(files, contents, strict=True))}
                disk = {name: state.get(file, EMPTY) for name, file in after.items()}
                key = hash((length, *sorted(disk.items())))
                if key in seen:
                    continue
                seen.add(key)
                if complaint := judge(disk, scenario, expect, done=length == len(ops)):
                    found.wrong.append(f"after {length} of {len(ops)} calls: {complaint}")
    found.states = len(seen)
    return found


def _together(variants: Sequence[Sequence[int]], rng: random.Random, most: int = 400) -> Iterator[tuple[int, ...]]:
    """Every combination of what the files hold, or some where there are very many."""
    if math.prod(map(len, variants)) <= most:
        yield from product(*variants)
        return
    for _ in range(most):
        yield tuple(rng.choice(options) for options in variants)


def _apply(names: Names, changes: Sequence[Op]) -> Names:
    after = dict(names)
    for op in changes:
        for name, file in op.names:
            if file is None:
                after.pop(name, None)
            else:
                after[name] = file
    return after


def judge(disk: dict[str, int], scenario: Scenario, expect: dict[str, int], *, done: bool) -> str | None:
    """What is wrong with the folder that the next start of the machine finds, or None. Contents by their hash."""
    states = []
    for name in scenario.files:
        content, before = disk.get(name), hash(OLD) if scenario.replace else None
        states.append("old" if content == before else "new" if content == expect[name] else "torn")
        if scenario.keep and states[-1] == "new":
            kept = [other for at, other in disk.items() if at.startswith(f"{name}.~")]
            if hash(OLD) not in kept:
                return f"the old {name} is lost"
    if "torn" in states:
        return f"neither old nor new: {states}"
    if states[-1] == "new" and "old" in states:
        return f"an index before its shards: {states}"
    return f"said to be written, and is not: {states}" if done and "old" in states else None


def run(folder: Path, stride: int = 1) -> tuple[list[tuple[str, Count]], list[tuple[str, Count]]]:
    """Counts by scenario; and the same of records that lack one kind of sync, in which something must be wrong."""
    right, broken = [], []
    for name, scenario in SCENARIOS.items():
        recorder = recorded(folder, name)
        right.append((name, explore(recorder, scenario, recorder.ops, stride=stride)))
        for kind in ("sync", "sync names"):
            without = [op for op in recorder.ops if op.kind != kind]
            broken.append((f"{name} without {kind}", explore(recorder, scenario, without, first=True)))
    return right, broken


def main(folder: Path) -> int:
    """Print the table; the number of faults that were found."""
    right, broken = run(folder)
    for name, count in right:
        print(f"T7   {name:14} {count.ops:4} calls  {count.states:7,} states  {len(count.wrong)} wrong")
        for line in count.wrong[:5]:
            print(f"     {line}")
    missed = [name for name, count in broken if not count.wrong]
    print(f"T7   {sum(count.states for _, count in right):,} states; without a sync {len(broken)} of "
          f"{len(broken)} records have to show a fault, {len(broken) - len(missed)} do")  # fmt: skip
    return sum(len(count.wrong) for _, count in right) + len(missed)
