"""Files with a function that runs code in each place that an unpickler, or an archive, has for one.

The places are generated: every opcode of a real pickle that pushes one value is replaced by the function, and by a
call of it; and the function is put into whatever else of a file may hold a pickle. Nothing of it is ever run.
"""

from __future__ import annotations

import pickletools
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

from builders import assemble, push

DANGEROUS, FOREIGN = ("os", "system"), ("zmodule", "zpayload")
GADGETS = {"dangerous": DANGEROUS, "foreign": FOREIGN}

_VALUES = frozenset((
    *("BININT", "BININT1", "BININT2", "LONG1", "NONE", "NEWTRUE", "NEWFALSE", "BINFLOAT", "BINUNICODE"),
    *("SHORT_BINUNICODE", "EMPTY_TUPLE", "EMPTY_DICT", "EMPTY_LIST", "EMPTY_SET", "GLOBAL", "BINGET", "LONG_BINGET"),
    *("SHORT_BINBYTES", "BINBYTES"),
))  # fmt: skip
"""Opcodes that push one value and take none."""

Places = Iterator[tuple[str, Callable[[], bytes]]]
"""(the place, what writes the file). A file is written only when it is asked for: a short run tries one of many."""


def named(gadget: str) -> bytes:
    """The opcodes that push the function."""
    module, name = GADGETS[gadget]
    return assemble(("GLOBAL", module, name))


def called(gadget: str) -> bytes:
    """The opcodes that push what a call of it returns."""
    return named(gadget) + assemble(*push("true"), "TUPLE1", "REDUCE")


def a_pickle(gadget: str) -> bytes:
    return assemble(("PROTO", 2)) + called(gadget) + b"."


class Edit(NamedTuple):
    """New bytes for a part of a pickle: a pickle has thousands of places, and is kept once."""

    start: int
    end: int
    new: bytes

    def of(self, pickle: bytes) -> bytes:
        return pickle[: self.start] + self.new + pickle[self.end :]


def in_pickle(pickle: bytes, gadget: str) -> Iterator[tuple[str, Edit]]:
    """What puts the gadget in the place of each value of `pickle` in turn."""
    ops = list(pickletools.genops(pickle))
    for number, (opcode, _, start) in enumerate(ops[:-1]):
        if opcode.name not in _VALUES:
            continue
        end = ops[number + 1][2]
        for way, new in (("name", named(gadget)), ("call", called(gadget))):
            yield f"{way} for {opcode.name} at {start}", Edit(start or 0, end or 0, new)
    last = ops[-1][2] or 0
    yield "thrown away", Edit(2, 2, called(gadget) + b"0")
    yield "state of the root", Edit(last, last, assemble("EMPTY_DICT", *push("x")) + called(gadget) + b"sb")


def behind_stop(pickle: bytes, gadget: str) -> Iterator[tuple[str, Edit]]:
    size = len(pickle)
    for what, between in (("", b""), (" behind zeros", bytes(64)), (" behind text", b"no opcodes \xff")):
        yield f"behind STOP{what}", Edit(size, size, between + a_pickle(gadget))
    yield "behind two", Edit(size, size, assemble(("PROTO", 2), "NONE", "STOP") + a_pickle(gadget))


def _records(data: bytes) -> dict[str, bytes]:
    """Return the records of an archive, also of one that states no checksums."""
    with zipfile.ZipFile(BytesIO(data)) as archive:
        rows = archive.infolist()
        for row in rows:
            row.CRC = None  # type: ignore[assignment]  # zipfile compares nothing then
        return {row.filename: archive.read(row) for row in rows}


def _with_records(old: dict[str, bytes], changed: dict[str, bytes], added: dict[str, bytes]) -> bytes:
    out = BytesIO()
    with zipfile.ZipFile(out, "w") as new:
        root = next(iter(old)).partition("/")[0]
        for name, content in old.items():
            new.writestr(name, changed.get(name.removeprefix(f"{root}/"), content))
        for name, content in added.items():
            new.writestr(f"{root}/{name}", content)
    return out.getvalue()


def _with_pickle(old: dict[str, bytes], pickle: bytes, edit: Edit) -> bytes:
    return _with_records(old, {"data.pkl": edit.of(pickle)}, {})


def in_zip(data: bytes, gadget: str) -> Places:
    """An archive of torch.save with the gadget in every place."""
    records = _records(data)
    pickle = next(content for name, content in records.items() if name.endswith("/data.pkl"))
    for place, edit in (*in_pickle(pickle, gadget), *behind_stop(pickle, gadget)):
        yield place, partial(_with_pickle, records, pickle, edit)
    bad = a_pickle(gadget)
    for name in ("x.pkl", "extra/x", "constants.pkl", ".data/x", "data/99999", "data/y/z"):
        yield f"record {name}", partial(_with_records, records, {}, {name: bad})
    for name in ("version", "byteorder", ".format_version"):
        yield f"record {name}", partial(_with_records, records, {name: bad}, {})
    yield "before the archive", partial(bytes, bad + data)
    yield "behind the archive", partial(bytes, data + bad)


def in_legacy(data: bytes, gadget: str) -> Places:
    """A legacy file with the gadget in every place."""
    starts = [0]
    for _ in range(5):
        *_, last = pickletools.genops(data[starts[-1] :])
        starts.append(starts[-1] + (last[2] or 0) + 1)
    for number, what in enumerate(("magic number", "protocol", "sys_info", "object", "keys")):
        start, end = starts[number], starts[number + 1]
        for place, edit in in_pickle(data[start:end], gadget):
            yield f"{what}: {place}", partial(Edit(start + edit.start, start + edit.end, edit.new).of, data)
        yield f"behind the {what}", partial(b"".join, (data[:end], a_pickle(gadget), data[end:]))
    yield "behind the file", partial(bytes, data + a_pickle(gadget))


def places(path: Path, container: str, gadget: str) -> Places:
    """The file at `path`, which torch saved, with the gadget in every place."""
    data = path.read_bytes()
    return in_zip(data, gadget) if container == "zip" else in_legacy(data, gadget)
