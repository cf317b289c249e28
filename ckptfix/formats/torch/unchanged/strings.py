"""Comparison of two pickles that differ only in keys and location tags, without parsing the second one.

Between the strings that an edit may change, the streams must be equal byte for byte. Where the first pushes such a
string, the second may push a different one, or write out a string that was fetched from the memo. Every other use of a
string must keep its value.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from operator import attrgetter, itemgetter
from typing import TypeAlias

from ckptfix.formats.torch.object import TorchObject, find_devices
from ckptfix.pickles import PersId, Text
from ckptfix.pickles import opcodes as op
from ckptfix.pickles.graph import Node
from ckptfix.pickles.rows import Rows


def differ_alone(found: TorchObject, new: bytes) -> bool:
    """Return whether `new` certainly is the pickle of `found` with new keys and location tags; False proves nothing."""
    graph = found.graph
    # Frames contain lengths; DUP turns one use of a string into two places.
    if graph.frames or op.DUP in graph.rare:
        return False
    devices = find_devices(graph)
    uses = [use for site in found.sites for use in site.nodes] + devices.tags
    free = set(map(id, uses))
    rows = [site.keys for site in found.sites if isinstance(site.keys, Rows)]
    places = _places(sorted(uses + graph.loose_gets, key=_START), rows)
    values = _values(graph.data, graph.start, graph.end, places, new)
    if values is None or any(id(use) not in free for use in values.values()):
        return False
    references = [part for persid in graph.loose_persids for part in _fixed(persid)]
    if None in references or any(id(part) in values for part in references):
        return False
    if graph.phrases is None:
        return True
    locations = {id(tag) for _, tag, _ in devices.folded}
    return (graph.phrases.fetched() - locations).isdisjoint(values)


_START = attrgetter("start")

_Place: TypeAlias = "Text | array[int]"
"""A use of a string; or the offsets, in order, of pushed keys that have no nodes and are never fetched."""


def _places(uses: list[Text], rows: list[Rows]) -> Iterator[_Place]:
    """Merge the uses, which are in order, with the keys in `rows` that are not nodes, in the order of the stream."""
    at = 0
    for keys in sorted((starts for one in rows for starts in one.starts()), key=itemgetter(0)):
        first = 0
        while first < len(keys):
            while at < len(uses) and uses[at].start <= keys[first]:
                yield uses[at]
                at += 1
            last = bisect_left(keys, uses[at].start) if at < len(uses) else len(keys)
            # A key that is also a use is listed twice, and the use comes first.
            yield keys[first:last]
            first = last
    yield from uses[at:]


def _behind_keys(old: bytes, at: int, starts: array[int], new: bytes, after: int) -> tuple[int, int] | None:
    """Return the offsets behind the last of these keys in `old` and `new`, from `at` and `after` on; see `_values`."""
    for start in starts:
        if start < at:
            continue  # listed twice
        end = after + start - at
        if new[after:end] != old[at:start]:
            return None
        at = start + 5 + old[start + 1]
        length = new[end + 1] if new[end : end + 1] == b"X" and new[end + 2 : end + 5] == b"\0\0\0" else -1
        after = end + 5 + length
        key = new[end + 5 : after]
        if length < 0 or len(key) < length or not key.isascii():
            literal = _literal(new, end)
            if literal is None:
                return None
            after = literal[1]
    return at, after


def _values(old: bytes, at: int, end: int, places: Iterable[_Place], new: bytes) -> dict[int, Text] | None:
    """Return the uses, by identity, whose value in `new` differs; None if anything else differs."""
    changed: dict[int, tuple[Text, str]] = {}
    after = 0
    for use in places:
        if isinstance(use, array):
            behind = _behind_keys(old, at, use, new, after)
            if behind is None:
                return None
            at, after = behind
            continue
        if use.start < at:
            continue  # listed twice
        if not new.startswith(old[at : use.start], after):
            return None
        after += use.start - at
        at = use.end
        pushed = old[use.start : at]
        value: str = use
        if new.startswith(pushed, after):
            after += len(pushed)
            if use.origin is not None and id(use.origin) in changed:
                value = changed[id(use.origin)][1]
        else:
            literal = _literal(new, after)
            if literal is None:
                return None
            value, after = literal
        if value != use:
            changed[id(use)] = use, value
    if old[at:end] != new[after:]:
        return None
    return {key: use for key, (use, _) in changed.items()}


def _literal(data: bytes, at: int) -> tuple[str, int] | None:
    """Return the string that is written out at `at`, and the offset behind it."""
    code = data[at] if at < len(data) else -1
    if code != op.BINUNICODE and code != op.SHORT_BINUNICODE:
        return None
    first = at + (5 if code == op.BINUNICODE else 2)
    end = first + int.from_bytes(data[at + 1 : first], "little")
    try:
        return (str(data[first:end], "utf-8", "surrogatepass"), end) if end <= len(data) else None
    except UnicodeDecodeError:
        return None


def _fixed(persid: PersId) -> Iterator[Node]:
    """Yield the parts of a storage reference that no edit changes; None for forms that torch never wrote."""
    fields = persid.fields
    if not 5 <= len(fields) <= 6:
        yield None
        return
    yield from (fields[0], fields[2])
    for value in fields[5:]:
        yield from (part for part in (value if type(value) is tuple else ()) if part is not None)
