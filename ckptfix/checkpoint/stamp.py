"""What a file was when it was first looked at, to see later that it is still the same."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stamp:
    """What changes when a file is written to, or when another takes its name.

    Attributes:
        size: bytes.
        mtime_ns: of its content, which a program may put back; `ctime_ns`, of any change, it may not.
        links: names of the file.
        tag: what its store calls this version of it (an ETag); empty for a file of this machine.
    """

    size: int = 0
    mtime_ns: int = 0
    ctime_ns: int = 0
    inode: int = 0
    device: int = 0
    links: int = 0
    tag: str = ""

    def same(self, other: Stamp) -> bool:
        """Whether the file was not written to between the two. A link made or removed moves the ctime too, ours among
        them: it proves nothing where the number of links changed."""
        if self.tag and other.tag:
            return (self.size, self.tag) == (other.size, other.tag)
        mine = (self.size, self.mtime_ns, self.inode, self.device)
        theirs = (other.size, other.mtime_ns, other.inode, other.device)
        return mine == theirs and (self.ctime_ns == other.ctime_ns or self.links != other.links)

    def difference(self, now: Stamp) -> str:
        """What happened to the file since it was this, in words."""
        if self.tag and now.tag:
            return "its store has another version now"
        if (self.inode, self.device) != (now.inode, now.device):
            return "another file has its name now"
        if now.size != self.size:
            return f"it {'was cut' if now.size < self.size else 'grew'} from {self.size:,} to {now.size:,} bytes"
        return "it was written to"


@dataclass(frozen=True, slots=True)
class Mark:
    """A file of a checkpoint, and what it was before it was read."""

    path: str
    stamp: Stamp
