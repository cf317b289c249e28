"""Columns of a directory hold what its rows say, however long and alike the rows are."""

from __future__ import annotations

import random
import struct
import zipfile
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import builders
import pytest

import ckptfix
from ckptfix.errors import BadDirectory
from ckptfix.zips.records import CENTRAL, MAX32, DirectoryRecord, DirectoryRecords, read_rows


def rows(pick: random.Random, count: int) -> Iterator[bytes]:
    """Rows in runs: mostly names that count up, some with extra fields, comments, 64-bit numbers or other names."""
    number = pick.choice((0, 5, 90, 9_990))
    while count > 0:
        run = min(count, pick.choice((1, 2, 15, 16, 17, 40, 300)))
        extra, comment = pick.choice((b"", b"", b"UT\x01\0a")), pick.choice((b"", b"", b"note"))
        prefix = pick.choice(("archive/data/", "archive/data/", "r\u00f6ot/", "a/data.pkl/", ""))
        for _ in range(run):
            wide = pick.random() < 0.01
            short = [MAX32 if wide else pick.randrange(1 << 24)] * 2
            more = struct.pack("<2H2Q", 1, 16, number << 33, number) if wide else b""
            name = f"{prefix}{number}{'/' if pick.random() < 0.01 else ''}".encode()
            if pick.random() < 0.01:
                name = pick.choice((b"archive/data.pkl", b"archive/\xff", b"byteorder"))
            fields = (20, 45, pick.choice((0x808, 0)), pick.choice((0, 0, 8)), 1, 2, pick.randrange(1 << 32), *short)
            lengths = len(name), len(more + extra), len(comment)
            header = pick.randrange(MAX32)
            row = CENTRAL.pack(b"PK\x01\x02", *fields, *lengths, 0, 1, pick.choice((0, 0, 16)), header)
            yield row + name + more + extra + comment
            number += 1
        count -= run


def one_by_one(raw: bytes) -> list[DirectoryRecord]:
    found = []
    at = 0
    while at < len(raw):
        f = CENTRAL.unpack_from(raw, at)
        first = at + CENTRAL.size
        name = raw[first : first + f[10]].decode("utf-8", "surrogateescape")
        size, stored = f[9], f[8]
        if size == MAX32:
            size, stored = struct.unpack_from("<2Q", raw, first + f[10] + 4)
        found.append(DirectoryRecord(name, f[16], stored, size, f[7], f[4], f[3], at, f[15]))
        at = first + sum(f[10:13])
    return found


@pytest.mark.parametrize("seed", range(12))
def test_columns_are_those_of_the_rows(seed: int) -> None:
    pick = random.Random(seed)
    raw = b"".join(rows(pick, pick.choice((1, 30, 500, 3000))))
    expected = one_by_one(raw)
    records = read_rows(raw, len(expected), "a.pt", 0)
    assert list(records) == expected == [records[index] for index in range(len(records))]
    assert records[1:5] == tuple(expected[1:5])
    assert records.names() == [record.name for record in expected]
    assert list(records.disputed()) == [record for record in expected if record.dispute is not None]
    for ending in ("/data.pkl", "7", "\udcff", "nothing"):
        assert records.with_ending(ending) == [n for n, row in enumerate(expected) if row.name.endswith(ending)]
    first = next((record for record in expected if record.name == "byteorder"), None)
    assert records.named("byteorder") == first
    stated = records.headers_in(raw)
    assert list(stated) == [CENTRAL.unpack_from(raw, record.position)[16] for record in expected]
    moved = array("I", [(header * 3 + 1) % MAX32 for header in stated])
    made = bytes(records.with_headers(raw, moved))
    assert read_rows(made, len(expected), "a.pt", 0).headers_in(made) == moved
    assert records.with_headers(made, stated) == raw


@pytest.mark.parametrize("seed", range(4))
def test_a_directory_that_is_cut_or_damaged_is_refused_where_it_breaks(seed: int) -> None:
    pick = random.Random(seed)
    raw = b"".join(rows(pick, 200))
    expected = one_by_one(raw)
    place = pick.choice(expected[20:])
    damaged = bytearray(raw)
    damaged[place.position + pick.randrange(4)] ^= 1
    with pytest.raises(BadDirectory, match="no directory record here") as found:
        read_rows(bytes(damaged), len(expected), "a.pt", 1000)
    assert found.value.offset == 1000 + place.position
    with pytest.raises(BadDirectory, match="bytes more than its"):
        read_rows(raw, len(expected) - 1, "a.pt", 0)
    with pytest.raises(BadDirectory, match=f"after {len(expected)} of {len(expected) + 1}"):
        read_rows(raw, len(expected) + 1, "a.pt", 0)


def test_long_runs_are_read_as_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 20,000 rows of torch some are read alone: where the length of the names changes, and after each such place."""
    alone: list[DirectoryRecord] = []
    add = DirectoryRecords.add

    def counted(self: DirectoryRecords, record: DirectoryRecord, length: int, name_length: int) -> None:
        alone.append(record)
        add(self, record, length, name_length)

    monkeypatch.setattr(DirectoryRecords, "add", counted)
    row = CENTRAL.pack(b"PK\x01\x02", *(0,) * 6, 1, 2, 2, 12, *(0,) * 5, 64)
    raw = b"".join(row + f"data/{number:07}".encode() for number in range(20_000))
    records = read_rows(raw, 20_000, "a.pt", 0)
    assert len(records.runs) == 1
    assert len(alone) < 20
    assert records[12_345].name == "data/0012345"
    assert records.sums == array("I", [1]) * 20_000


@pytest.mark.parametrize("other", [{"stored": 1}, {"size": 3}, {"method": 8}, {"attributes": 16}, {"name": b"a/"}, {}])
def test_a_row_on_whose_bytes_readers_disagree_is_found_among_others(other: dict[str, Any]) -> None:
    """Where all others are stored, of equal sizes, and no folders."""
    plain = {"stored": 2, "size": 2, "method": 0, "attributes": 0, "name": b"ab"}
    said = [plain, {**plain, **other}, plain]
    raw = b"".join(
        CENTRAL.pack(b"PK\x01\x02", 0, 0, 0, one["method"], 0, 0, 1, one["stored"], one["size"], len(one["name"]),
                     0, 0, 0, 0, one["attributes"], 64) + one["name"]
        for one in said
    )  # fmt: skip
    records = read_rows(raw, 3, "a.pt", 0)
    disputed = bool(other) and other != {"method": 8}
    assert [bool(record.dispute) for record in records] == [False, disputed, False]
    assert list(records.disputed()) == ([records[1]] if disputed else [])


@pytest.mark.slow
@pytest.mark.parametrize("align", [1, 64, 4096, 16384])
def test_what_follows_the_pickle_may_have_moved_to_the_front(align: int, tmp_path: Path) -> None:
    """The record behind it keeps less padding than it had: its row is less than the shift of all others."""
    tensors = {f"module.{name}": builders.Tensor(str(at), (2,), 2) for at, name in enumerate("abc")}
    pickle = builders.assemble(("PROTO", 2), *builders.state_dict_ops(tensors), "STOP")
    first, *others = builders.torch_records(pickle, [bytes(range(8))] * 3)
    source = tmp_path / "in.pth"
    source.write_bytes(builders.build_zip([first, *(builders.replace(row, align=align) for row in others)]))
    ckptfix.strip_module(source, tmp_path / "out.pth")
    with zipfile.ZipFile(tmp_path / "out.pth") as archive:
        assert archive.testzip() is None
    assert ckptfix.diff(source, tmp_path / "out.pth", strip="module").same
