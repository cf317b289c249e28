"""File systems in images, mounted over loop devices: what a disk shares, and what it has after a power cut."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

KINDS: dict[str, tuple[str, ...]] = {
    "xfs": ("mkfs.xfs", "-q"),
    "xfs, blocks of 1 KiB": ("mkfs.xfs", "-q", "-b", "size=1024"),
    "xfs, blocks of 16 KiB": ("mkfs.xfs", "-q", "-b", "size=16384"),
    "btrfs": ("mkfs.btrfs", "-q"),
}
"""Kind -> what makes it. XFS with blocks larger than a page takes Linux 6.12."""

_FIEMAP, _SYNC, _LAST, _SHARED = 0xC020660B, 1, 1, 0x2000


class Unavailable(Exception):
    """Why no such file system can be had here."""


def _run(*command: str | Path) -> None:
    try:
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise Unavailable(f"{command[0]} is not installed") from None
    if done.returncode:
        raise Unavailable(f"{command[0]}: {(done.stderr or done.stdout).strip().splitlines()[-1:]}")


@contextmanager
def mounted(kind: str, folder: Path, size: int = 400 << 20) -> Iterator[Path]:
    """An empty file system of `kind`, until the block ends. Raises Unavailable."""
    if sys.platform != "linux" or os.geteuid() != 0:
        raise Unavailable("mounting takes root, on Linux")
    image = folder / "image"
    with open(image, "wb") as file:
        file.truncate(size)
    try:
        _run(*KINDS[kind], image)
        with mounted_image(image, folder / "disk") as place:
            yield place
    finally:
        image.unlink()


@contextmanager
def mounted_image(image: Path, place: Path) -> Iterator[Path]:
    """The file system in `image`, until the block ends."""
    place.mkdir()
    try:
        _run("mount", "-o", "loop", image, place)
        try:
            yield place
        finally:
            done = subprocess.run(["umount", str(place)], check=False)
            if done.returncode:  # something holds it: it goes when that ends
                subprocess.run(["umount", "-l", str(place)], check=True)
    finally:
        place.rmdir()


def snapshot(image: Path, copy: Path) -> None:
    """The image as a power cut would leave the disk now."""
    subprocess.run(["cp", "--sparse=always", str(image), str(copy)], check=True)


def used(place: Path) -> int:
    """Bytes of the file system that are not free."""
    os.sync()
    status = os.statvfs(place)
    return (status.f_blocks - status.f_bfree) * status.f_frsize


def own(path: Path) -> int:
    """Bytes of the blocks of a file that no other file shares."""
    found, start = 0, 0
    with open(path, "rb") as file:
        while True:
            room = 256
            head = struct.pack("=QQLLLL", start, (1 << 64) - 1 - start, _SYNC, 0, room, 0)
            raw = _asked(file.fileno(), head.ljust(len(head) + 56 * room, b"\0"))
            count = struct.unpack_from("=L", raw, 20)[0]
            if not count:
                return found
            for number in range(count):
                logical, _, length, _, _, flags = struct.unpack_from("=QQQQQL", raw, 32 + 56 * number)
                found += 0 if flags & _SHARED else length
                start = logical + length
            if flags & _LAST:
                return found


def _asked(fd: int, request: bytes) -> bytes:
    answer = bytearray(request)
    fcntl.ioctl(fd, _FIEMAP, answer, True)
    return bytes(answer)
