"""Salvage of a header that readers cannot parse: each entry that is whole by itself counts.

One wrong byte makes the whole JSON unreadable, although the other entries state dtype, shape and place as before. An
entry counts only if its shape fits its bytes, the file has them, and no other entry claims them. The length of the
header must be right, since every place counts from its end: it must end with the closing brace.
"""

from __future__ import annotations

import math
import re
from collections import Counter

from ckptfix.checkpoint import dtypes
from ckptfix.findings.table import found
from ckptfix.formats.safetensors.header import (
    DECODER,
    METADATA,
    Header,
    HeaderEntry,
    MetadataPair,
    bytes_of,
    described,
)

MOST_LOST = 1000
"""Damaged entries up to which a header is salvaged. Each may cost a walk over the text, and files may be hostile."""

# A string begins at a quote that no backslash precedes, so that the search takes linear time.
_ENTRY = re.compile(r'(?<!\\)"((?:[^"\\]|\\.)*)"[ \t\n\r]*:[ \t\n\r]*(?=\{)')
_BETWEEN = re.compile(r"[ \t\n\r,{}]*")
_AFTER = re.compile(r"[ \t\n\r]*[,}]")
_NAME = re.compile(r"[\w.\-/]{2,}(?=\"?[ \t\n\r]*:)")


def salvaged(path: str) -> Header | None:
    """Return the header of `path` with the entries that are whole; None if no entry is, or the length is wrong.

    Each damaged entry is a finding ``bad-tensor``. Positions in the text have no use, because the text is not valid.

    Raises:
        DamagedFile: as `header.read_header`, for the length of the header.
    """
    raw, size = bytes_of(path)
    text = raw.decode(errors="replace")
    header = Header(path, size, len(raw), text)
    if not text.rstrip(" \0\t\n\r").endswith("}"):
        return None
    lost: dict[str, str] = {}
    at, damaged, open_loss = 0, 0, False
    while (match := _ENTRY.search(text, at)) is not None:
        between = _BETWEEN.match(text, at)
        gap = text[between.end() if between is not None else at : match.start()]
        if gap and not open_loss:
            name = _NAME.search(gap)
            lost[name.group() if name else f"an entry before {match[1]}"] = "its entry in the header is damaged"
        entry = _entry(header, match)
        open_loss = entry is None
        at = match.end() if entry is None else entry
        if entry is None:
            lost[match[1]] = "its entry in the header is damaged"
            damaged += 1
        if max(damaged, len(lost)) > MOST_LOST:  # damaged entries may share one name
            return None
    wrong = _doubtful(header)
    lost |= {row.key: "its entry in the header does not fit the data" for row in header.rows if row.start in wrong}
    header.rows = [row for row in header.rows if row.start not in wrong]
    header.findings += [found("bad-tensor", message, where=name) for name, message in lost.items()]
    return header if header.rows else None


def _entry(header: Header, match: re.Match[str]) -> int | None:
    """Add the entry that begins at `match`, and return the position behind it; None if it is damaged."""
    try:
        value, end = DECODER.raw_decode(header.text, match.end())
        key = DECODER.raw_decode(header.text, match.start())[0]
    except (ValueError, RecursionError):
        return None
    if _AFTER.match(header.text, end) is None or "\ufffd" in key:
        return None
    if key == METADATA:
        texts = {name: text for name, text in value.items() if type(text) is str}
        header.pairs = [MetadataPair(name, text, 0, 0) for name, text in texts.items()]
        return end if len(texts) == len(value) else None
    fields = described(value)
    if fields is None or len(value) > len(fields):
        return None
    code, shape, (begin, stop) = fields
    header.rows.append(HeaderEntry(key, match.start(), match.end(), end, code, tuple(shape), begin, stop))
    return end


def _doubtful(header: Header) -> set[int]:
    """Return the positions of entries whose shape does not fit, or whose key or bytes another one claims too."""
    counts = Counter(row.key for row in header.rows)
    wrong = {row.start for row in header.rows if not _fits(row, header.data_size) or counts[row.key] > 1}
    rows = [row for row in header.rows if row.start not in wrong and row.stop > row.begin]
    last: HeaderEntry | None = None
    for row in sorted(rows, key=lambda row: row.begin):
        if last is not None and row.begin < last.stop:
            wrong |= {last.start, row.start}
        last = row if last is None or row.stop > last.stop else last
    return wrong


def _fits(row: HeaderEntry, available: int) -> bool:
    dtype = dtypes.by_safetensors(row.code)
    if dtype is None or not 0 <= row.begin <= row.stop <= available:
        return False
    return math.prod(row.shape) * dtype.itemsize == (row.stop - row.begin) * dtype.packed
