"""Hostile files by name: zips, safetensors and legacy files that lie, and every hostile pickle in both containers."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import cache

from builders import (
    MAGIC,
    Op,
    Record,
    build_zip,
    legacy,
    push,
    replace,
    safetensors,
    state_dict_ops,
    torch_records,
    torch_zip,
)
from property.hostile import GOOD, WEIGHT, WEIGHT_DATA, one_pickle, pickles


def zips() -> Iterator[tuple[str, bytes]]:
    """Zip files of group C."""
    records = torch_records(GOOD, [WEIGHT_DATA])
    pickle, weight = records[0], next(record for record in records if record.name.endswith("data/0"))
    at = records.index(weight)

    def with_weight(**changes: object) -> bytes:
        changed = list(records)
        changed[at] = replace(weight, **changes)  # type: ignore[arg-type]
        return build_zip(changed)

    def withone_pickle(**changes: object) -> bytes:
        return build_zip([replace(pickle, **changes), *records[1:]])  # type: ignore[arg-type]

    yield "local-name", with_weight(local_name="archive/data/9")
    yield "local-name-pickle", withone_pickle(local_name="archive/other.pkl")
    yield "local-extra-shifts", with_weight(extra=b"FB\x04\x00" + b"PK\x03\x04")
    yield "local-extra-beyond", with_weight(extra=b"\xff" * 60_000)
    yield "local-method", with_weight(local_method=8)
    yield "local-flags", with_weight(local_flags=1)
    yield "no-local-header", with_weight(local_signature=b"XXXX")
    yield "sizes-disagree", with_weight(compressed_size=4)
    yield "size-larger", with_weight(size=80, compressed_size=80)
    yield "size-max", with_weight(size=0xFFFFFFFE, compressed_size=0xFFFFFFFE)
    yield "crc-wrong", with_weight(crc=1)
    yield "crc-wrong-pickle", withone_pickle(crc=1)
    yield "crc-zero", build_zip([replace(record, crc=0) for record in records])
    yield "method-99", with_weight(method=99)
    yield "deflated", build_zip([replace(record, method=8) for record in records])
    yield "deflate-garbage", with_weight(method=8, data=b"\x07" * 20, compressed_size=20)
    yield "deflate-short", with_weight(method=8, size=3)
    yield "deflate-long", with_weight(method=8, size=3000)
    yield "deflate-bomb", build_zip([replace(pickle, method=8, data=b"(" * (64 << 20)), *records[1:]])
    yield "deflate-bomb-data", with_weight(method=8, data=b"\0" * (64 << 20))
    yield "encrypted", with_weight(flags=0x809)
    yield "encrypted-pickle", withone_pickle(flags=0x809)
    yield "strong-encryption", with_weight(flags=0x848)
    yield "patched", with_weight(flags=0x828)
    yield "another-disk", with_weight(disk=3)
    yield "duplicate", build_zip([*records, weight])
    yield "duplicate-pickle", build_zip([*records, replace(pickle, data=one_pickle(*push(1)))])
    yield "case-variant", build_zip([*records, replace(weight, name="archive/DATA/0")])
    yield "case-variant-pickle", build_zip([replace(pickle, name="archive/Data.pkl"), *records[1:]])
    for name in (
        "../../evil",
        "/etc/passwd",
        "archive\\data\\0",
        "archive/\x00x",
        "archive/\x1b[2J",
        "",
        "C:\\x",
        "a" * 60_000,
    ):
        yield f"name-{name[:12]!r}", build_zip([*records, replace(weight, name=name)])
    yield "prepended", build_zip(records, prepend=b"#!/bin/sh\n" * 10)
    yield "prepended-later", build_zip(records, prepend=b"MZ" * 50, based_on_prepended=True)
    yield "appended", build_zip(records, append=b"\0" * 100)
    yield "appended-70k", build_zip(records, append=b"\0" * 70_000)
    yield "fake-end-in-comment", build_zip(records, comment=build_zip(records)[-22:])
    yield "two-archives", build_zip(records) + build_zip(records)
    yield "comment", build_zip(records, comment=b"x" * 60_000)
    for what in ("count", "directory_size", "directory_offset"):
        for value in (0, 1, 0xFFFE, 0x7FFFFFFF, 0xFFFFFFFF, 2**63, 2**64 - 1):
            lie = {what: value}
            yield f"end-{what}-{value:x}", build_zip(records, zip64=True, **lie)  # type: ignore[arg-type]
            if value < 2**32:
                yield f"end32-{what}-{value:x}", build_zip(records, zip64=False, **lie)  # type: ignore[arg-type]
    yield "no-end", build_zip(records, end=b"")
    yield (
        "locator-beyond",
        build_zip(records, end=struct.pack("<4sIQI", b"PK\6\7", 0, 2**63, 1) + b"PK\5\6" + b"\xff" * 16 + b"\0\0"),
    )
    yield "zip64", build_zip([replace(record, zip64=True) for record in records], zip64=True)
    yield "zip64-short", with_weight(zip64=True, central_extra=struct.pack("<HHQ", 1, 8, 8))
    yield "zip64-absent", with_weight(zip64=True, central_extra=b"")
    yield "zip64-twice", with_weight(zip64=True, central_extra=struct.pack("<HHQQQ", 1, 24, 8, 8, 8) * 2)
    yield "zip64-huge", with_weight(zip64=True, central_extra=struct.pack("<HHQQQ", 1, 24, 2**63, 2**63, 2**63))
    yield "zip64-max", with_weight(zip64=True, central_extra=struct.pack("<HHQQQ", 1, 24, 2**64 - 1, 2**64 - 1, 0))
    yield "extra-garbage", with_weight(central_extra=b"\x01\x00\xff\xff")
    yield "overlap", with_weight(offset=0)
    yield "overlap-pickle", withone_pickle(offset=64)
    yield "offset-beyond", with_weight(offset=0xFFFFFFF0)
    yield (
        "many-overlapping",
        build_zip([pickle, *[replace(weight, name=f"archive/data/{index}", offset=0) for index in range(1000)]]),
    )
    yield "no-root", torch_zip(GOOD, [WEIGHT_DATA], root="")
    yield "two-roots", build_zip([*records, *torch_records(GOOD, [WEIGHT_DATA], root="other")])
    yield "deep-root", torch_zip(GOOD, [WEIGHT_DATA], root="a/b/c")
    yield "odd-root", torch_zip(GOOD, [WEIGHT_DATA], root="\x1b]0;x\x07")
    yield "no-pickle", build_zip(records[1:])
    yield "only-pickle", build_zip(records[:1])
    yield "no-version", torch_zip(GOOD, [WEIGHT_DATA], version=None)
    for version in ("11\n", "x", "", "9" * 50, "-1"):
        yield f"version-{version[:3]!r}", torch_zip(GOOD, [WEIGHT_DATA], version=version)
    for order in ("big", "middle", "", "little\n", "x" * 1000):
        yield f"byteorder-{order[:6]!r}", torch_zip(GOOD, [WEIGHT_DATA], byteorder=order)
    yield "no-byteorder", torch_zip(GOOD, [WEIGHT_DATA], byteorder=None)
    yield "pickle-in-data", torch_zip(GOOD, [one_pickle(("GLOBAL", "os", "system"))])
    yield "constants", build_zip([*records, Record("archive/constants.pkl", one_pickle(("GLOBAL", "os", "system")))])
    yield "gap", with_weight(gap=b"hidden bytes" * 10)
    yield "misaligned", with_weight(extra=b"")
    yield "signatures-in-data", torch_zip(GOOD, [b"PK\x05\x06PK\x01\x02", b"PK\x03\x04" * 10])
    yield "no-descriptors", build_zip([replace(record, flags=0x800, descriptor=b"") for record in records])
    yield "directory-reordered", build_zip(records, order=range(len(records) - 1, -1, -1))
    yield "directory-partly", build_zip(records, order=[0, at])
    yield "empty-zip", build_zip([])
    yield (
        "many-records",
        build_zip([*records, *[Record(f"archive/x{index}", b"", extra=b"") for index in range(60_000)]]),
    )
    yield "empty-pickle", torch_zip(b"", [WEIGHT_DATA])
    yield "short-data", torch_zip(GOOD, [WEIGHT_DATA[:4]])
    yield "long-data", torch_zip(GOOD, [WEIGHT_DATA * 100])


def safetensors_files() -> Iterator[tuple[str, bytes]]:
    """Files of group D."""
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    for length in (0, 1, 7, 2**20, 100_000_001, 2**32, 2**63, 2**64 - 1):
        yield f"length-{length:x}", safetensors([("module.w", "F32", (2,), WEIGHT_DATA)], length=length)
    for name, header in {
        "duplicate": b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
        b'"a":{"dtype":"I32","shape":[2],"data_offsets":[0,8]}}',
        "not-json": b"{", "list": b"[]", "null": b"null", "number": b"1e9999", "nan": b'{"a":NaN}',
        "empty": b"", "spaces": b"  {}",
        "bom": b"\xef\xbb\xbf{}", "latin": b'{"\xff":1}', "deep": b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        "deep-objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "digits": b'{"a":' + b"9" * 100_000 + b"}",
        "surrogate": b'{"\\ud800":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        "nul": b'{"\\u0000":1}', "text": b'"a"',
        "trailing": b"{}{}", "comma": b'{"a":1,}', "unclosed": b'{"a', "escape": b'{"\\x":1}',
    }.items():  # fmt: skip
        yield f"header-{name}", safetensors(header=header, tail=WEIGHT_DATA)
    changes: dict[str, dict[str, object]] = {
        "dtype": {"dtype": "F3"}, "dtype-int": {"dtype": 1}, "dtype-list": {"dtype": []}, "sub-byte": {"dtype": "F4"},
        "shape-float": {"shape": [2.0]}, "shape-negative": {"shape": [-2]}, "shape-huge": {"shape": [2**62, 2**62]},
        "shape-text": {"shape": "2"}, "shape-bool": {"shape": [True, 2]}, "shape-zero-huge": {"shape": [0, 2**64]},
        "offsets-one": {"data_offsets": [0]}, "offsets-back": {"data_offsets": [8, 0]},
        "offsets-beyond": {"data_offsets": [0, 800]},
        "offsets-negative": {"data_offsets": [-8, 0]}, "offsets-huge": {"data_offsets": [2**63, 2**63 + 8]},
        "offsets-float": {"data_offsets": [0.0, 8.0]}, "offsets-null": {"data_offsets": None}, "unknown": {"extra": 1},
        "hole": {"data_offsets": [4, 12]}, "short": {"data_offsets": [0, 4]},
    }  # fmt: skip
    for name, change in changes.items():
        yield f"entry-{name}", safetensors(header={"module.w": {**entry, **change}}, tail=WEIGHT_DATA)
    for name, value in {"text": "x", "int": 1, "list": [], "null": None, "empty": {}}.items():
        yield f"entry-is-{name}", safetensors(header={"module.w": value}, tail=WEIGHT_DATA)
    for name, metadata in {"int": {"a": 1}, "nested": {"a": {}}, "list": [], "text": "x", "null": None}.items():
        yield f"metadata-{name}", safetensors(header={"__metadata__": metadata, "module.w": entry}, tail=WEIGHT_DATA)
    overlap = {"module.a": entry, "module.b": {**entry, "data_offsets": [4, 12]}}
    yield "overlap", safetensors(header=overlap, tail=WEIGHT_DATA * 2)
    yield "same-bytes", safetensors(header={"module.a": entry, "module.b": entry}, tail=WEIGHT_DATA)
    yield "trailing", safetensors([("module.w", "F32", (2,), WEIGHT_DATA)], tail=b"x" * 100)
    yield "tiny", b"\x02\0\0\0\0\0\0\0{}"
    yield "metadata-only", safetensors(metadata={"a": "b"})


def legacies() -> Iterator[tuple[str, bytes]]:
    """Legacy files whose other pickles lie."""
    weight = replace(WEIGHT, legacy=True)
    good = one_pickle(*state_dict_ops({"module.w": weight}))
    storages = [("0", 2, WEIGHT_DATA)]
    call: list[Op] = [("GLOBAL", "os", "system"), *push(("true",)), "REDUCE"]
    computed = [("GLOBAL", "builtins", "int"), *push((str(MAGIC),)), "REDUCE"]
    yield "magic-by-reduce", legacy(good, storages, magic=one_pickle(*computed))
    yield "magic-then-reduce", legacy(good, storages, magic=one_pickle(*push(MAGIC), *call, "POP"))
    yield "protocol-by-reduce", legacy(good, storages, protocol=one_pickle(*call))
    yield "protocol-other", legacy(good, storages, protocol=one_pickle(*push(1002)))
    yield "sys-info-by-reduce", legacy(good, storages, sys_info=one_pickle(*call))
    yield "sys-info-list", legacy(good, storages, sys_info=one_pickle("EMPTY_LIST"))
    yield "sys-info-big", legacy(good, storages, sys_info={"little_endian": False})
    for name, ops in {"call": call, "int": push(1), "ints": push([1, 2]), "twice": push(["0", "0"]),
                      "more": push(["0", "1", "2"]),
                      "none": push([]), "dict": push({"0": 1}), "other": push(["7"]), "lists": push([[]]),
                      }.items():  # fmt: skip
        yield f"keys-{name}", legacy(good, storages, keys=one_pickle(*ops))
    for count in (0, 1, 3, -1, 2**40, 2**62, -(2**63)):
        yield f"count-{count:x}", legacy(good, [("0", count, WEIGHT_DATA)])
    yield "no-storage", legacy(good)
    yield "trailing", legacy(good, storages) + b"x" * 50
    views = {"ok": ("9", 0, 2), "beyond": ("9", 1, 5), "negative": ("9", -1, 2), "huge": ("9", 2**62, 2**62)}
    for view, value in views.items():
        tensor = replace(weight, view=value)
        yield f"view-{view}", legacy(one_pickle(*state_dict_ops({"module.w": tensor})), storages)


@cache
def hostile_files() -> dict[str, bytes]:
    """Every sample: name -> content of the file."""
    every = list(_samples())
    assert len(every) == len(dict(every)), "two samples have one name"
    return dict(every)


def _samples() -> Iterator[tuple[str, bytes]]:
    for name, pickle in pickles():
        yield f"zip-{name}", torch_zip(pickle, [WEIGHT_DATA])
        if not name.startswith(("inst-", "obj-", "stack-", "newobj")):
            yield f"legacy-{name}", legacy(pickle, [("0", 2, WEIGHT_DATA)])
    yield from ((f"archive-{name}", data) for name, data in zips())
    yield from ((f"safetensors-{name}", data) for name, data in safetensors_files())
    yield from ((f"old-{name}", data) for name, data in legacies())
