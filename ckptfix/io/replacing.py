"""What a file loses that is replaced, and whether more may read it than the inputs of what replaces it.

It keeps its owner and mode. Its other hard links keep the old content, and its extended attributes are not carried
over, for they may describe the old content (a checksum, an origin): both are reported.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress

from ckptfix.checkpoint import Plan
from ckptfix.commands import quoted, verbatim
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.io.sources import permissions, ranges

OTHERS_READ = stat.S_IRGRP | stat.S_IROTH
NAMESPACES = ("user.", "system.posix_acl_access")
"""Extended attributes that a user set. Others, such as SELinux's, the system gives to each file by its place."""


def given_up(plan: Plan, inputs: Iterable[str]) -> tuple[Finding, ...]:
    """What the files that `plan` would replace lose, and which of them more may read than its inputs.

    Args:
        inputs: files that it was made from, beside those that it copies from.
    """
    allowed = permissions({*inputs, *(where.path for where in ranges(plan))})
    return tuple(finding for file in plan.files for finding in _of_file(file.path, allowed))


def _of_file(path: str, allowed: int) -> Iterator[Finding]:
    try:
        status = os.stat(path)
    except OSError:  # there is none; what else is wrong the writer finds out
        return
    mode = stat.S_IMODE(status.st_mode)
    if mode & OTHERS_READ & ~allowed:
        message = f"it keeps its mode {mode:04o}, and more may read it than the input, of mode {allowed:04o}"
        remedy = verbatim(f"chmod {mode & (allowed | ~OTHERS_READ):o} {quoted(path)}")
        yield found("more-open", message, where=path, fix=remedy)
    if status.st_nlink > 1:
        links = "1 other hard link" if status.st_nlink == 2 else f"{status.st_nlink - 1} other hard links"
        hold = "holds" if status.st_nlink == 2 else "hold"
        yield found("links-left", f"the old file had {links}, which still {hold} the old content", where=path)
    if names := _attributes(path):
        message = f"extended attributes of the old file were not kept: {', '.join(names)}"
        yield found("attributes-lost", message, where=path)


def _attributes(path: str) -> list[str]:
    if not hasattr(os, "listxattr"):
        return []
    with suppress(OSError):
        return sorted(name for name in os.listxattr(path) if name.startswith(NAMESPACES))
    return []
