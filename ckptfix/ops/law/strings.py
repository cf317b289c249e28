"""Whether two pickles are the same but for names and location tags, found without parsing the second one.

Between the strings that an edit may change the streams must be alike, byte for byte. Where one of these is pushed in
the first, the second may push another, or write it out where it was fetched from the memo; every other use of a string
has to come to the value that it had.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from operator import attrgetter, itemgetter
from typing import TypeAlias

from ckptfix.formats.torch.edit import find_devices
from ckptfix.formats.torch.object import TorchObject
from ckptfix.pickles import PersId, Text
from ckptfix.pickles import opcodes as op
from ckptfix.pickles.graph import Node
from ckptfix.pickles.rows import Rows


def differ_alone(found: TorchObject, new: bytes) -> bool:
    """Whether `new` surely is the pickle of `found` with other names and location tags; False says nothing."""
    graph = found.graph
    # Frames state lengths; what DUP pushes twice is one use of a string in two places.
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
"""A use of a string; or where keys are pushed, in order, that are no nodes and that nothing fetches."""


def _places(uses: list[Text], rows: list[Rows]) -> Iterator[_Place]:
    """The uses, which are in order, and the keys in `rows` that are not nodes, in the order of the stream."""
    at = 0
    for keys in sorted((starts for one in rows for starts in one.starts()), key=itemgetter(0)):
        first = 0
        while first < len(keys):
            while at < len(uses) and uses[at].start <= keys[first]:
                yield uses[at]
                at += 1
            last = bisect_left(keys, uses[at].start) if at < len(uses) else len(keys)
            # Of a key that is a use too, the use comes first, and the key is listed twice.
            yield keys[first:last]
            first = last
    yield from uses[at:]


def _behind_keys(old: bytes, at: int, starts: array[int], new: bytes, after: int) -> tuple[int, int] | None:
    """The places behind the last of these keys in `old` and in `new`, from `at` and `after` on; as `_values`."""
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
    """The uses, by their identity, that come to another value in `new`; None where anything else differs."""
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
    """The string that is written out at `at`, and the offset behind it."""
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
    """What no edit changes in a reference to a storage; None for what torch never wrote."""
    fields = persid.fields
    if not 5 <= len(fields) <= 6:
        yield None
        return
    yield from (fields[0], fields[2])
    for value in fields[5:]:
        yield from (part for part in (value if type(value) is tuple else ()) if part is not None)
