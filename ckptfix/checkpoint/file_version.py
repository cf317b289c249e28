"""The state of a file when it was first looked at, to detect changes later."""

from __future__ import annotations

from ckptfix.dataclass import dataclass


@dataclass(frozen=True, slots=True)
class FileStat:
    """The state of a file: values that change when it is written to, or when another file takes its name.

    Attributes:
        size: bytes.
        mtime_ns: time of the last write to its content, which a program can reset.
        ctime_ns: time of the last change of any kind, which a program cannot reset.
        links: number of names of the file.
        tag: its store's name for this version (an ETag); empty for a local file.
    """

    size: int = 0
    mtime_ns: int = 0
    ctime_ns: int = 0
    inode: int = 0
    device: int = 0
    links: int = 0
    tag: str = ""

    def same(self, other: FileStat) -> bool:
        """Return whether the file was not written to between the two states.

        Adding or removing a link, including our own, also updates the ctime: it proves nothing if the number of links
        changed.
        """
        if self.tag and other.tag:
            return (self.size, self.tag) == (other.size, other.tag)
        mine = (self.size, self.mtime_ns, self.inode, self.device)
        theirs = (other.size, other.mtime_ns, other.inode, other.device)
        return mine == theirs and (self.ctime_ns == other.ctime_ns or self.links != other.links)

    def difference(self, now: FileStat) -> str:
        """Describe the change from this state to `now` in words."""
        if self.tag and now.tag:
            return "its store has a different version now"
        if (self.inode, self.device) != (now.inode, now.device):
            return "a different file has its name now"
        if now.size != self.size:
            return f"it {'was cut' if now.size < self.size else 'grew'} from {self.size:,} to {now.size:,} bytes"
        return "it was written to"


@dataclass(frozen=True, slots=True)
class FileVersion:
    """A file of a checkpoint, and its state before it was read."""

    path: str
    stamp: FileStat
