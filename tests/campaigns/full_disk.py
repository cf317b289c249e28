"""Edits in place, and undo, on a disk that is really full: each file system is as large as a few checkpoints.

The free room goes from nothing to more than the edit needs, in steps. An edit that is refused leaves the file bit for
bit, remembers nothing and leaves nothing beside it; where an edit says that `undo` is needed, `undo` reaches the old
file once there is room. An edit that is done is taken back bit for bit, on the same full disk or once there is room.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from builders import Tensor, assemble, legacy, safetensors, state_dict_ops, torch_zip
from campaigns.frame import Table, report, start
from disks import Unavailable, mounted_image

import ckptfix
from ckptfix.errors import CkptfixError

KINDS = ("zip", "legacy", "safetensors", "folder")
DISKS = ("tmpfs", "ext4")
SIZE = 6 << 20
BLOCK = 4096
KEYS = 40
PREFIX = "p" * 700
"""Names grow by some 28 KB in all, so the edit needs blocks of its own."""


@contextmanager
def disk(kind: str, folder: Path) -> Iterator[Path]:
    """An empty file system of `SIZE`, until the block ends. Raises Unavailable."""
    if sys.platform != "linux" or os.geteuid() != 0:
        raise Unavailable("mounting takes root, on Linux")
    place = folder / f"full-{kind}"
    if kind == "tmpfs":
        place.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(place)], check=False)
        if done.returncode:
            place.rmdir()
            raise Unavailable("no tmpfs can be mounted here")
        try:
            yield place
        finally:
            subprocess.run(["umount", "-l", str(place)], check=True)
            place.rmdir()
        return
    image = folder / "full-image"
    image.write_bytes(b"")
    os.truncate(image, SIZE)
    try:
        command = ["mkfs.ext4", "-q", "-F", "-m", "0", "-b", str(BLOCK), "-O", "^has_journal", str(image)]
        done = subprocess.run(command, capture_output=True, check=False)
        if done.returncode:
            raise Unavailable(f"mkfs.ext4: {done.stderr.decode().strip()[-80:]}")
        with mounted_image(image, place):
            yield place
    except FileNotFoundError:
        raise Unavailable("mkfs.ext4 is not installed") from None
    finally:
        image.unlink(missing_ok=True)


def made(folder: Path, kind: str) -> Path:
    """A checkpoint of some 330 KB with `KEYS` keys; its file or folder."""
    chance = random.Random(5)
    raws = [chance.randbytes(8192) for _ in range(KEYS)]
    names = [f"block.{number}.weight" for number in range(KEYS)]
    if kind == "safetensors":
        path = folder / "m.safetensors"
        path.write_bytes(safetensors([(name, "F32", [2048], raw) for name, raw in zip(names, raws, strict=True)]))
        return path
    if kind == "folder":
        path = folder / "m"
        path.mkdir()
        index_rows = []
        for shard in range(2):
            name = f"model-0000{shard + 1}-of-00002.safetensors"
            own = [(names[at], "F32", [2048], raws[at]) for at in range(shard, KEYS, 2)]
            (path / name).write_bytes(safetensors(own))
            index_rows += [f'"{row[0]}": "{name}"' for row in own]
        total = sum(map(len, raws))
        index = f'{{"metadata": {{"total_size": {total}}}, "weight_map": {{{", ".join(index_rows)}}}}}'
        (path / "model.safetensors.index.json").write_text(index)
        return path
    keys = {name: Tensor(str(at), (2048,), 2048) for at, name in enumerate(names)}
    pickle = assemble(("PROTO", 2), *state_dict_ops(keys), "STOP")
    path = folder / "m.pth"
    rows = [(str(at), 2048, raw) for at, raw in enumerate(raws)]
    path.write_bytes(torch_zip(pickle, raws) if kind == "zip" else legacy(pickle, rows))
    return path


def content(folder: Path) -> dict[str, bytes]:
    """Every file below `folder` but the one that fills the disk."""
    found = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in ("filler", "lost+found"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def fill(folder: Path, free: int) -> None:
    """Leave `free` bytes on the disk, as a file of its own takes the rest."""
    filler = folder / "filler"
    filler.unlink(missing_ok=True)
    os.sync()
    with open(filler, "wb", buffering=0) as file:
        try:
            while True:
                file.write(b"\xaa" * BLOCK)
        except OSError:
            pass
    size = filler.stat().st_size // BLOCK * BLOCK
    os.truncate(filler, max(0, size - free))
    fd = os.open(filler, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def run(folder: Path, frees: range) -> Table:
    """Edit one checkpoint of each kind in `folder`, a small file system; how that ended, and what was wrong."""
    ends: Counter[str] = Counter()
    wrong: list[str] = []
    for kind in KINDS:
        for free in frees:
            for old in folder.iterdir():
                if old.name != "lost+found":
                    subprocess.run(["rm", "-rf", str(old)], check=True)
            path = made(folder, kind)
            before = content(folder)
            fill(folder, free)
            what = f"{kind}, {free:,} bytes free"
            try:
                ckptfix.add_module(path, prefix=PREFIX, in_place=True)
            except CkptfixError as error:
                ends[f"{kind} refused: {_why(error)}"] += 1
                if "ckptfix undo" in f"{error.hint}{error}":
                    ends[f"{kind} refused, undo needed"] += 1
                    (folder / "filler").unlink()
                    ckptfix.undo(path)
                if content(folder) != before or "0 bytes are needed" in str(error.hint):
                    changed = _difference(before, folder)
                    wrong.append(f"{what}: refused ({error}; {error.hint}); what changed: {changed}")
                continue
            except BaseException as error:
                wrong.append(f"{what}: {error!r}")
                continue
            ends[f"{kind} done"] += 1
            edited = content(folder)
            fill(folder, 0)
            try:
                ckptfix.undo(path)
                ends[f"{kind} undone when full"] += 1
            except CkptfixError as error:
                ends[f"{kind} undo refused"] += 1
                unfinished = "undo" in f"{error.hint}{error}" and content(folder) != edited
                if not unfinished and content(folder) != edited:
                    wrong.append(f"{what}: undo refused ({error}), and the folder changed")
                (folder / "filler").unlink()
                ckptfix.undo(path)
            if content(folder) != before:
                wrong.append(f"{what}: undone, and it is not as before: {_difference(before, folder)}")
    return ends, wrong


def _why(error: CkptfixError) -> str:
    """What had no room, or the kind of the error."""
    if "No space left" not in str(error):
        return type(error).__name__
    beside = next((what for what in ("journal", "undo") if f"ckptfix-{what}" in str(error)), None)
    return "no room in the file" if beside is None else f"no room for the {beside}"


def _difference(before: dict[str, bytes], folder: Path) -> str:
    now = content(folder)
    names = sorted(before.keys() ^ now.keys()) + [name for name in before if name in now and before[name] != now[name]]
    return ", ".join(names)


def main(folder: Path) -> int:
    """Print the table; the number of faults that were found."""
    found = 0
    for kind in DISKS:
        try:
            with disk(kind, folder) as place:
                found += report(f"full disk  {kind:6}", run(place, range(0, 192 * 1024, BLOCK)), 5)
        except Unavailable as error:
            print(f"full disk  {kind:6} not tried: {error}")
    return found


if __name__ == "__main__":
    start(main)
