"""safetensors: read, judged, edited and written; the safetensors library is the other opinion."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import builders
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors import torch as library

from ckptfix.checkpoint import (
    ByteRange,
    Derived,
    Drop,
    Edit,
    Plan,
    Put,
    Rename,
    SetLocation,
    SetMetadata,
    Storage,
    TensorEntry,
    contiguous_stride,
)
from ckptfix.errors import (
    BadDirectory,
    CkptfixError,
    DamagedFile,
    KeyConflict,
    NoSuchTensor,
    Truncated,
    Unsupported,
    WouldLoseData,
)
from ckptfix.formats.safetensors import format as safetensors
from ckptfix.formats.safetensors.ties import restore_ties, share_plan
from ckptfix.io.read import read_chunks

FLOATS = bytes(range(24))
TENSORS = (("fc.weight", "F32", (2, 3), FLOATS), ("fc.bias", "F16", (3,), b"abcdef"), ("steps", "I64", (), b"12345678"))
DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e5m2, torch.float8_e4m3fn, torch.float8_e5m2fnuz, torch.float8_e4m3fnuz, torch.float8_e8m0fnu),
    torch.float4_e2m1fn_x2,
)


def made(path: Path, *args: Any, **kwargs: Any) -> str:
    path.write_bytes(builders.safetensors(*args, **kwargs))
    return str(path)


def content(plan: Plan) -> bytes:
    (file,) = plan.files
    data = b"".join(
        segment if isinstance(segment, bytes) else b"".join(read_chunks(segment)) for segment in file.segments
    )
    assert len(data) == file.nbytes
    return data


def edited(path: str, *edits: Edit) -> bytes:
    return content(safetensors.FORMAT.plan_edit(safetensors.read(path), edits, "out.safetensors"))


def header_of(data: bytes) -> dict[str, Any]:
    (length,) = struct.unpack_from("<Q", data)
    header: dict[str, Any] = json.loads(data[8 : 8 + length])
    return header


def rename(names: dict[str, str], at: str = "") -> Rename:
    return Rename(at, "state_dict", names)


def ids(path: str) -> list[str]:
    return [finding.id for finding in safetensors.FORMAT.check(path)]


def stored(path: str, key: str, data: bytes, dtype: str) -> Storage:
    """A storage of these bytes in a file of its own."""
    Path(path).write_bytes(data)
    return Storage(key, dtype, len(data), "cpu", ByteRange(path, 0, len(data)))


def view(
    key: str, storage: Storage, shape: tuple[int, ...], stride: tuple[int, ...] | None = None, offset: int = 0
) -> TensorEntry:
    steps = contiguous_stride(shape) if stride is None else stride
    return TensorEntry(key, "", storage, storage.dtype, shape, steps, offset)


# Reading


def test_lists_names_shapes_and_places(tmp_path: Path) -> None:
    path = made(tmp_path / "m.safetensors", TENSORS, metadata={"format": "pt", "note": "x"})
    found = safetensors.read(path)
    assert [(entry.key, entry.dtype, entry.shape, entry.stride) for entry in found.entries] == [
        ("fc.weight", "float32", (2, 3), (3, 1)),
        ("fc.bias", "float16", (3,), (1,)),
        ("steps", "int64", (), ()),
    ]
    assert [b"".join(read_chunks(entry.data)) for entry in found.entries] == [raw for *_, raw in TENSORS]
    assert found.metadata == {"format": "pt", "note": "x"}
    assert [(site.at, site.kind, site.names) for site in found.sites] == [
        ("", "state_dict", ("fc.weight", "fc.bias", "steps"))
    ]
    assert list(found.values()) == []
    assert found.findings == ()
    assert ids(path) == []


def test_a_file_far_larger_than_memory_is_listed_and_edited_without_its_data(tmp_path: Path) -> None:
    path = made(
        tmp_path / "m.safetensors", header={"w": {"dtype": "U8", "shape": [1 << 42], "data_offsets": [0, 1 << 42]}}
    )
    os.truncate(path, Path(path).stat().st_size + (1 << 42))
    found = safetensors.read(path)
    assert found.findings == ()
    plan = safetensors.FORMAT.plan_edit(found, [rename({"w": "v"})], "out")
    fresh = safetensors.FORMAT.plan_write(found.entries, "out")
    # The data moves by whole blocks: not at all for a name as long, by one for a header that is longer.
    assert plan.nbytes == found.size
    assert fresh.nbytes == found.size + 4096
    assert found.entries[0].data.length == 1 << 42


def test_four_bit_floats_count_two_to_a_byte(tmp_path: Path) -> None:
    path = made(tmp_path / "m.safetensors", [("w", "F4", (3, 4), b"abcdef")])
    (entry,) = safetensors.read(path).entries
    assert (entry.dtype, entry.shape, entry.nbytes) == ("float4_e2m1fn_x2", (3, 2), 6)
    assert header_of(content(safetensors.FORMAT.plan_write([entry], "out")))["w"]["shape"] == [3, 4]


@pytest.mark.parametrize(
    ("code", "shape"), [("F6_E2M3", (8,)), ("Q4_K", (3, 2)), ("F4", (2, 3)), ("U8", (1 << 40,) * 2)]
)
def test_what_torch_has_no_dtype_for_is_kept_as_raw_bytes(tmp_path: Path, code: str, shape: tuple[int, ...]) -> None:
    path = made(tmp_path / "m.safetensors", [("w", code, shape, b"abcdef")])
    (entry,) = safetensors.read(path).entries
    assert (entry.dtype, entry.shape, b"".join(read_chunks(entry.data))) == ("uint8", (6,), b"abcdef")
    assert code in entry.detail
    assert len(ids(path)) == 1


def row(begin: int, end: int, **fields: Any) -> dict[str, Any]:
    return {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end], **fields}


DUPLICATE = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}'
PLAIN = b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}'


@pytest.mark.parametrize(
    ("header", "data", "expected"),
    [
        ({"a": row(0, 2), "b": row(3, 4)}, b"....", ["hole"]),
        ({"a": row(1, 2)}, b"..", ["hole"]),
        ({"a": row(0, 3), "b": row(2, 4)}, b"....", ["overlap"]),
        ({"a": row(0, 4), "b": row(2, 2)}, b"....", ["overlap"]),
        ({"a": row(0, 2)}, b"....", ["trailing-bytes"]),
        ({"a": row(0, 2, dtype="F6_E2M3")}, b"..", ["unknown-dtype"]),
        ({"a": row(0, 2, shape=[3])}, b"..", ["bad-tensor"]),
        ({"a": row(0, 2, shape=[1 << 63, 1 << 63])}, b"..", ["bad-tensor"]),
        ({"a": row(0, 4), "b": {"dtype": "U8", "shape": [0], "data_offsets": [4, 2]}}, b"....", ["bad-tensor"]),
        ({"a": row(0, 2), "b": row(2, 8)}, b"....", ["truncated"]),
        ({"a": row(0, 2, zero_point=1.5)}, b"..", ["unknown-field"]),
        ({"a": row(0, 0)}, b"", []),
        ({}, b"", []),
        (DUPLICATE + b"  ", b"...", ["duplicate-key"]),
        (b'{"__metadata__":{"k":"1","k":"2"}}', b"", ["duplicate-key"]),
        (b" " + PLAIN, b"..", ["leading-bytes"]),
        (b"\xef\xbb\xbf" + PLAIN, b"..", ["leading-bytes"]),
        (PLAIN + b"\0", b"..", ["nul-padding"]),
        (PLAIN, b"..", ["misaligned-data"]),
    ],
)
def test_findings(tmp_path: Path, header: Any, data: bytes, expected: list[str]) -> None:
    path = made(tmp_path / "m.safetensors", header=header, tail=data)
    found = ids(path)
    if isinstance(header, bytes) and len(header) % 8:
        found = [name for name in found if name != "misaligned-data" or name in expected]
    assert found == expected
    assert safetensors.read(path).entries is not None
    if any(
        name in ("hole", "overlap", "trailing-bytes", "bad-tensor", "truncated", "nul-padding") for name in expected
    ):
        # What we call an error, the library refuses.
        with pytest.raises(SafetensorError):
            library.load_file(path)


def test_of_two_equal_names_the_last_counts_as_for_the_library(tmp_path: Path) -> None:
    path = made(tmp_path / "m.safetensors", header=DUPLICATE, tail=b"abc")
    (entry,) = safetensors.read(path).entries
    assert b"".join(read_chunks(entry.data)) == b"bc"
    (finding,) = [finding for finding in safetensors.FORMAT.check(path) if finding.id == "duplicate-key"]
    assert finding.offset == 8 + DUPLICATE.rindex(b'"a"')
    assert hex(8 + DUPLICATE.index(b'"a"')) in finding.message


def test_offsets_count_bytes_where_names_are_not_ascii(tmp_path: Path) -> None:
    header = DUPLICATE.replace(b'"a"', '"é€"'.encode())
    path = made(tmp_path / "m.safetensors", header=header, tail=b"abc")
    finding = safetensors.read(path).findings[0]
    assert finding.offset == 8 + header.rindex('"é€"'.encode())


DEEP = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@pytest.mark.sampled(1_000)
@pytest.mark.parametrize(
    ("header", "error"),
    [
        (b"", BadDirectory),
        (b"[]", BadDirectory),
        (b"{", BadDirectory),
        (b'{"a"', BadDirectory),
        (b'{"a":', BadDirectory),
        (b'{"a":1}', BadDirectory),
        (b'{"a":{}}', BadDirectory),
        (b"{a:1}", BadDirectory),
        (b'{"a":[1],}', BadDirectory),
        (PLAIN + b"x", BadDirectory),
        (PLAIN + PLAIN, BadDirectory),
        (PLAIN.replace(b"[2]", b"[2.0]"), BadDirectory),
        (PLAIN.replace(b"[2]", b"[-2]"), BadDirectory),
        (PLAIN.replace(b"[2]", b"[true]"), BadDirectory),
        (PLAIN.replace(b"[2]", b"2"), BadDirectory),
        (PLAIN.replace(b"[2]", b"[18446744073709551616]"), BadDirectory),
        (PLAIN.replace(b"[2]", b"[" + b"9" * 5000 + b"]"), BadDirectory),
        (PLAIN.replace(b"[0,2]", b"[0,2,4]"), BadDirectory),
        (PLAIN.replace(b"[0,2]", b"[0,NaN]"), BadDirectory),
        (PLAIN.replace(b'"U8"', b"8"), BadDirectory),
        (PLAIN.replace(b'"U8",', b'"U8","dtype":"F32",'), BadDirectory),
        (b'{"__metadata__":{"a":1}}', BadDirectory),
        (b'{"__metadata__":{"a":{}}}', BadDirectory),
        (b'{"__metadata__":[]}', BadDirectory),
        (b'{"\xff":1}', BadDirectory),
        (b'{"\x01":1}', BadDirectory),
        (DEEP, BadDirectory),
        (b'{"a":' + b'{"a":' * 100_000, BadDirectory),
    ],
)
def test_refused_headers_have_a_place(tmp_path: Path, header: bytes, error: type[CkptfixError]) -> None:
    path = made(tmp_path / "m.safetensors", header=header, tail=b"..")
    for use in (safetensors.read, lambda path: list(safetensors.FORMAT.check(path))):
        with pytest.raises(error) as caught:
            use(path)
        assert caught.value.path == path
        assert caught.value.offset is not None
        assert 8 <= caught.value.offset <= 8 + len(header)
    with pytest.raises(SafetensorError):
        library.load_file(path)


@pytest.mark.parametrize(
    ("length", "error"),
    [(100_000_001, BadDirectory), (1 << 63, BadDirectory), (1000, Truncated), (99_999_999, Truncated)],
)
def test_header_lengths_that_no_file_has(tmp_path: Path, length: int, error: type[CkptfixError]) -> None:
    path = made(tmp_path / "m.safetensors", TENSORS, length=length)
    with pytest.raises(error):
        safetensors.read(path)


@pytest.mark.parametrize("size", range(8))
def test_shorter_than_a_length(tmp_path: Path, size: int) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(bytes(size))
    with pytest.raises(Truncated):
        safetensors.read(str(path))


def test_score(tmp_path: Path) -> None:
    data = builders.safetensors(TENSORS)
    assert safetensors.score("x.bin", data[:4096], len(data)) == 100
    assert 0 < safetensors.score("x.bin", data[:40], 40) < 100
    assert 0 < safetensors.score("x.safetensors", b"\xff" + data[1:7] + b"\xff" + data[8:], len(data)) < 100
    for other in (b"", b"PK\x03\x04", b'{"a": 1, {"b"', b"version {{", b"\x80\x02}q\x00X\x01{"):
        assert safetensors.score("x.bin", other, len(other)) == 0


# Damage


SMALL = builders.safetensors(
    (*TENSORS, ("é", "F4", (2, 2), b"xy"), ("empty", "BF16", (0, 3), b"")),
    metadata={"format": "pt", "tied": "fc.weight", "ckptfix.views": '{"fc.bias":{"base":"fc.weight"}}'},
)


def use_all(path: str) -> None:
    """Everything that can be done with a file."""
    found = safetensors.read(path)
    for entry in found.entries:
        assert entry.nbytes >= 0
    list(safetensors.FORMAT.check(path))
    restore_ties(found.entries, found.metadata)
    names = found.sites[0].names
    for edits in ([], [rename({name: f"module.{name}" for name in names})], [Drop("", names[:1])]):
        content(safetensors.FORMAT.plan_edit(found, edits, "out"))
    content(safetensors.FORMAT.plan_write(found.entries, "out"))


@pytest.mark.slow
def test_every_cut_gives_an_error_or_names_what_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    (length,) = struct.unpack_from("<Q", SMALL)
    whole = {key: value for key, value in header_of(SMALL).items() if key != "__metadata__"}
    for size, data in builders.cuts(SMALL):
        path.write_bytes(data)
        if size < 8 + length:
            with pytest.raises(Truncated):
                safetensors.read(str(path))
            continue
        found = safetensors.read(str(path))
        assert [entry.key for entry in found.entries] == list(whole)
        ends = {key: value["data_offsets"][1] for key, value in whole.items() if key != "empty"}
        lost = {key for key, end in ends.items() if end > size - 8 - length}
        assert {finding.where for finding in found.findings if finding.id == "truncated"} == lost
        for entry in found.entries:
            if entry.key in lost:
                with pytest.raises(Truncated):
                    b"".join(read_chunks(entry.data))
            else:
                begin, end = whole[entry.key]["data_offsets"]
                assert b"".join(read_chunks(entry.data)) == SMALL[8 + length :][begin:end]


def test_dropping_what_is_cut_off_mends_the_file(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(builders.safetensors(TENSORS)[:-3])
    (lost,) = (finding.where for finding in safetensors.read(str(path)).findings)
    fixed = edited(str(path), Drop("", (lost,)))
    assert set(library.load(fixed)) == {"fc.weight", "fc.bias"}


@pytest.mark.slow
def test_every_bit_flip_gives_a_result_or_our_error(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    (length,) = struct.unpack_from("<Q", SMALL)
    outcomes = set()
    for bit in range((8 + length) * 8):
        path.write_bytes(builders.flip(SMALL, bit))
        try:
            use_all(str(path))
            outcomes.add("result")
        except CkptfixError as error:
            outcomes.add(type(error).__name__)
    assert {"result", "BadDirectory", "Truncated"} <= outcomes


@given(st.binary(max_size=60), st.integers(0, len(SMALL)), st.integers(0, 40))
def test_spliced_garbage_gives_a_result_or_our_error(tmp_path: Path, garbage: bytes, at: int, gone: int) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(SMALL[:at] + garbage + SMALL[at + gone :])
    with suppress(CkptfixError):
        use_all(str(path))


# Editing


ODD_FILES = (
    builders.safetensors(TENSORS, metadata={"format": "pt"}),
    builders.safetensors(TENSORS, align=1),
    builders.safetensors(TENSORS, align=4096),
    builders.safetensors(TENSORS, tail=b"more"),
    builders.safetensors(header=b" \n" + PLAIN + b"\t\n ", tail=b".."),
    builders.safetensors(header=PLAIN + b"\0\0", tail=b".."),
    builders.safetensors(header=DUPLICATE, tail=b"..."),
    builders.safetensors(header=b'{ "\\u0061" : { "dtype":"U8", "shape":[ 2 ], "data_offsets" :[0 ,2]} }', tail=b".."),
    builders.safetensors(),
    SMALL,
)


@pytest.mark.parametrize("data", ODD_FILES, ids=range(len(ODD_FILES)))
def test_edits_that_change_nothing_give_an_identical_file(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(data)
    found = safetensors.read(str(path))
    same = {name: name for name in found.sites[0].names}
    for edits in (
        [],
        [rename({})],
        [rename(same)],
        [SetLocation({"cpu": "cuda:0"})],
        [SetMetadata({"nobody": None, **found.metadata})],
        [rename({name: f"m.{name}" for name in same}), rename({f"m.{name}": name for name in same})],
    ):
        assert edited(str(path), *edits) == data


def test_a_rename_changes_names_and_nothing_else(tmp_path: Path) -> None:
    path = made(tmp_path / "m.safetensors", TENSORS, metadata={"format": "pt"}, tail=b"trailing")
    new = edited(path, rename({"fc.weight": 'module.fc."weight"\n', "steps": "é😀"}))
    before, after = header_of(Path(path).read_bytes()), header_of(new)
    assert list(after) == ["__metadata__", 'module.fc."weight"\n', "fc.bias", "é😀"]
    assert list(after.values()) == list(before.values())
    (length,) = struct.unpack_from("<Q", new)
    assert length % 8 == 0
    assert new[8 + length :] == b"".join(raw for *_, raw in TENSORS) + b"trailing"


def test_only_the_spans_of_the_edit_are_written_anew(tmp_path: Path) -> None:
    one = b'"a" : {"shape":[ 2 ],"dtype":"U8", "data_offsets" :[0 ,2]}'
    odd = b"{ " + one + b',\n"b":{"dtype":"U8","shape":[0],"data_offsets":[2,2]} }'
    path = made(tmp_path / "m.safetensors", header=odd, tail=b"..")
    new = edited(path, rename({"b": "c"}))
    assert new[8:].startswith(odd.replace(b'"b"', b'"c"'))


def test_names_are_swapped_at_once(tmp_path: Path) -> None:
    path = made(tmp_path / "m.safetensors", [("a", "U8", (1,), b"a"), ("b", "U8", (1,), b"b")])
    new = library.load(edited(path, rename({"a": "b", "b": "a"})))
    assert (new["a"].item(), new["b"].item()) == (ord("b"), ord("a"))


def test_conflicts_are_refused_and_name_both(tmp_path: Path) -> None:
    path = made(tmp_path / "m.safetensors", TENSORS)
    with pytest.raises(KeyConflict) as caught:
        edited(path, rename({"fc.weight": "fc.bias"}))
    assert caught.value.pairs == (("fc.bias", ("fc.weight", "fc.bias")),)
    with pytest.raises(KeyConflict):
        edited(path, rename({"fc.weight": "__metadata__"}))
    assert set(header_of(edited(path, Drop("", ("fc.bias",)), rename({"fc.weight": "fc.bias"})))) == {
        "fc.bias",
        "steps",
    }


@pytest.mark.parametrize(
    "edit",
    [
        rename({"nope": "x"}),
        rename({"steps": "x"}, at="model"),
        Drop("", ("nope",)),
        Drop("model", ("steps",)),
        Rename("", "metadata", {"fc": "x"}),
    ],
)
def test_unknown_names_and_addresses_are_refused(tmp_path: Path, edit: Edit) -> None:
    path = made(tmp_path / "m.safetensors", TENSORS)
    with pytest.raises(NoSuchTensor):
        edited(path, edit)


def test_a_dropped_tensor_takes_its_bytes_along(tmp_path: Path) -> None:
    path = made(tmp_path / "m.safetensors", TENSORS, metadata={"format": "pt"})
    for gone in ((name,) for name, *_ in TENSORS):
        new = edited(path, Drop("", gone))
        kept = {name: raw for name, _, _, raw in TENSORS if name not in gone}
        loaded = library.load(new)
        assert list(header_of(new)) == ["__metadata__", *kept]
        assert {name: loaded[name].flatten().view(torch.uint8).numpy().tobytes() for name in kept} == kept
    assert header_of(edited(path, Drop("", tuple(name for name, *_ in TENSORS)))) == {"__metadata__": {"format": "pt"}}


def test_everything_can_be_dropped_without_metadata(tmp_path: Path) -> None:
    path = made(tmp_path / "m.safetensors", TENSORS)
    names = tuple(name for name, *_ in TENSORS)
    assert library.load(edited(path, Drop("", names))) == {}
    assert header_of(edited(path, Drop("", names), SetMetadata({"a": "b"}))) == {"__metadata__": {"a": "b"}}


def test_dropping_keeps_what_another_tensor_uses_holes_and_the_tail(tmp_path: Path) -> None:
    header = {"a": row(0, 4), "b": row(2, 6), "c": row(8, 10), "empty": row(3, 3)}
    path = made(tmp_path / "m.safetensors", header=header, tail=b"aabbBB__ccTAIL")
    new = edited(path, Drop("", ("a",)))
    assert new.endswith(b"bbBB__ccTAIL")
    assert {name: value["data_offsets"] for name, value in header_of(new).items()} == {
        "b": [0, 4],
        "c": [6, 8],
        "empty": [1, 1],
    }
    assert edited(path, Drop("", ("b",))).endswith(b"aabb__ccTAIL")


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[tuple[str, int, int]], list[str]]:
    """Ranges that may overlap, nest or leave holes, and which names to drop."""
    spans = draw(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), min_size=1, max_size=7))
    rows = [(f"t{index}", begin, begin + length) for index, (begin, length) in enumerate(spans)]
    return rows, [name for name, _, _ in rows if draw(st.booleans())]


@example(([("a", 0, 5), ("b", 1, 2), ("c", 3, 4)], ["a"]))
@given(layouts())
def test_after_any_drop_the_others_have_the_same_bytes(
    tmp_path: Path, case: tuple[list[tuple[str, int, int]], list[str]]
) -> None:
    rows, gone = case
    path = tmp_path / "m.safetensors"
    data = bytes(range(50))
    path.write_bytes(builders.safetensors(header={name: row(begin, end) for name, begin, end in rows}, tail=data))
    new = edited(str(path), Drop("", tuple(gone)))
    (length,) = struct.unpack_from("<Q", new)
    after = header_of(new)
    assert list(after) == [name for name, _, _ in rows if name not in gone]
    for name, begin, end in rows:
        if name not in gone:
            start, stop = after[name]["data_offsets"]
            assert new[8 + length :][start:stop] == data[begin:end]
    lost = {index for name, begin, end in rows if name in gone for index in range(begin, end)}
    kept = {index for name, begin, end in rows if name not in gone for index in range(begin, end)}
    assert len(new) - 8 - length == len(data) - len(lost - kept)


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}, {"a": "1", "note": "old", "b": "2"}])
def test_metadata_is_set_and_removed(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    path = made(tmp_path / "m.safetensors", TENSORS, metadata=metadata)
    new = edited(path, SetMetadata({"note": 'say "é"', "a": None}))
    expected = {key: value for key, value in (metadata or {}).items() if key != "a"} | {"note": 'say "é"'}
    assert header_of(new)["__metadata__"] == expected
    assert set(library.load(new)) == {"fc.weight", "fc.bias", "steps"}
    if metadata:
        assert "__metadata__" in header_of(edited(path, SetMetadata(dict.fromkeys(metadata))))


def test_null_metadata_is_none(tmp_path: Path) -> None:
    path = made(tmp_path / "m.safetensors", header=PLAIN.replace(b"{", b'{"__metadata__":null,', 1), tail=b"..")
    assert safetensors.read(path).metadata == {}
    assert header_of(edited(path, SetMetadata({"a": "b"})))["__metadata__"] == {"a": "b"}


def test_names_of_ties_follow_their_tensors(tmp_path: Path) -> None:
    views = {"fc.bias": {"base": "fc.weight", "offset": 0, "shape": [3], "stride": [1]}}
    metadata = {
        "head": "fc.weight",
        "note": "fc",
        "ckptfix.order": '{"head":1}',
        "ckptfix.views": json.dumps(views),
    }
    path = made(tmp_path / "m.safetensors", TENSORS, metadata=metadata)
    names = safetensors.read(path).sites[0].names
    assert names == ("fc.weight", "fc.bias", "steps", "head")
    after = header_of(edited(path, rename({name: f"module.{name}" for name in names})))["__metadata__"]
    assert list(after) == ["module.head", "note", "ckptfix.order", "ckptfix.views"]
    assert (after["module.head"], after["note"]) == ("module.fc.weight", "fc")
    assert json.loads(after["ckptfix.order"]) == {"module.head": 1}
    assert json.loads(after["ckptfix.views"]) == {"module.fc.bias": {**views["fc.bias"], "base": "module.fc.weight"}}


def test_the_bytes_of_a_tied_name_are_not_dropped(tmp_path: Path) -> None:
    metadata = {"head": "fc.weight", "ckptfix.views": '{"fc.bias":{"base":"fc.weight"}}', "ckptfix.order": '{"head":1}'}
    path = made(tmp_path / "m.safetensors", TENSORS, metadata=metadata)
    with pytest.raises(WouldLoseData):
        edited(path, Drop("", ("fc.weight",)))
    assert header_of(edited(path, Drop("", ("fc.weight", "head"))))["__metadata__"] == {}
    assert "head" not in header_of(edited(path, Drop("", ("head",))))["__metadata__"]


def test_tied_names_are_replaced_by_one_tensor(tmp_path: Path) -> None:
    path = made(tmp_path / "m.safetensors", TENSORS, metadata={"head": "fc.weight"})
    new, other = (view("", stored(str(tmp_path / key), key, key.encode() * 24, "float32"), (2, 3)) for key in "ab")
    for tensors in ({"fc.weight": new}, {"head": new}, {"fc.weight": new, "head": other}):
        with pytest.raises(Unsupported, match="tied to"):
            edited(path, Put("", tensors))
    both = edited(path, Put("", {"fc.weight": new, "head": new}))
    assert header_of(both)["__metadata__"] == {"head": "fc.weight"} and b"a" * 24 in both


@pytest.mark.slow
def test_a_header_longer_than_readers_take_is_not_made(tmp_path: Path) -> None:
    path = made(tmp_path / "m.safetensors", TENSORS)
    with pytest.raises(Unsupported):
        edited(path, rename({"steps": "x" * 100_000_001}))


# Writing


@st.composite
def state_dicts(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    names = draw(st.lists(st.text(min_size=1, max_size=8), max_size=6, unique=True))
    tensors = {}
    for name in names:
        dtype = draw(st.sampled_from(DTYPES))
        shape = draw(st.lists(st.integers(0, 4), min_size=1 if dtype is DTYPES[-1] else 0, max_size=3))
        size = torch.empty(shape, dtype=dtype).nbytes
        raw = torch.tensor(list(draw(st.binary(min_size=size, max_size=size))), dtype=torch.uint8)
        tensors[name] = raw.view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)
        if dtype is torch.bool:
            tensors[name] = raw.reshape(shape) > 127
    return tensors


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    raw = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0)
    return tensor.dtype, tuple(tensor.shape), raw.numpy().tobytes()


@given(state_dicts())
def test_library_and_we_read_each_other(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    path = tmp_path / "m.safetensors"
    library.save_file(tensors, path, metadata={"format": "pt"})
    theirs = path.read_bytes()
    found = safetensors.read(str(path))
    assert list(safetensors.FORMAT.check(str(path))) == []
    entries = {entry.key: entry for entry in found.entries}
    ours = content(safetensors.FORMAT.plan_write([entries[name] for name in tensors], "out"))
    path.write_bytes(ours)
    loaded = library.load_file(path)
    assert {key: bits(value) for key, value in loaded.items()} == {key: bits(value) for key, value in tensors.items()}
    assert header_of(ours) == header_of(theirs)
    assert list(header_of(ours)) == ["__metadata__", *tensors]
    assert len(ours) == len(theirs)
    (length,) = struct.unpack_from("<Q", ours)
    assert ours[8 + length :] == theirs[8 + length :]


def test_every_tensor_is_aligned_to_its_size(tmp_path: Path) -> None:
    tensors = {f"{index}": torch.zeros(3).to(dtype) for index, dtype in enumerate(DTYPES[:-1])}
    library.save_file(tensors, tmp_path / "m.safetensors")
    entries = safetensors.read(str(tmp_path / "m.safetensors")).entries
    new = tmp_path / "new.safetensors"
    new.write_bytes(content(safetensors.FORMAT.plan_write(entries, "out")))
    for entry in safetensors.read(str(new)).entries:
        assert entry.data.offset % entry.itemsize == 0


def test_metadata_says_pt_unless_told_otherwise() -> None:
    assert header_of(content(safetensors.FORMAT.plan_write([], "out")))["__metadata__"] == {"format": "pt"}
    told = content(safetensors.FORMAT.plan_write([], "out", metadata={"format": "np", "a": "b"}))
    assert header_of(told)["__metadata__"] == {"format": "np", "a": "b"}


def test_views_are_written_contiguous(tmp_path: Path) -> None:
    base = torch.arange(24, dtype=torch.int32)
    storage = stored(str(tmp_path / "0"), "0", base.numpy().tobytes(), "int32")
    cases: list[tuple[tuple[int, ...], tuple[int, ...], int]] = [
        ((4, 6), (6, 1), 0),
        ((6, 4), (1, 6), 0),
        ((3,), (7,), 2),
        ((2, 3), (0, 1), 5),
        ((0, 3), (3, 1), 24),
        ((), (), 23),
    ]
    entries = [view(str(index), storage, *case) for index, case in enumerate(cases)]
    loaded = library.load(content(safetensors.FORMAT.plan_write(entries, "out")))
    for index, (shape, stride, offset) in enumerate(cases):
        assert torch.equal(loaded[str(index)], base.as_strided(shape, stride, offset))


def test_a_part_of_a_derived_record_is_written(tmp_path: Path) -> None:
    pieces = (b"abc", b"", b"defgh", b"ij")
    storage = Storage("0", "uint8", 10, "cpu", Derived(10, lambda: pieces))
    entries = [view("all", storage, (10,)), view("part", storage, (5,), offset=2), view("none", storage, (0,))]
    loaded = library.load(content(safetensors.FORMAT.plan_write(entries, "out")))
    assert {name: tensor.numpy().tobytes() for name, tensor in loaded.items()} == {
        "all": b"abcdefghij",
        "part": b"cdefg",
        "none": b"",
    }
    with pytest.raises(Unsupported):
        safetensors.FORMAT.plan_write([view("strided", storage, (5,), (2,))], "out")
    with pytest.raises(DamagedFile):
        content(safetensors.FORMAT.plan_write([view("beyond", storage, (5,), offset=8)], "out"))


def test_what_the_format_cannot_hold_is_named(tmp_path: Path) -> None:
    storage = stored(str(tmp_path / "0"), "0", bytes(64), "float32")
    entries = [
        view("fine", storage, (2,)),
        replace(view("big complex", storage, (2,)), dtype="complex128"),
        replace(view("quantized", storage, (2,)), kind="quantized", dtype="qint8"),
        replace(view("meta", storage, (2,)), kind="meta", storage=None),
        replace(view("scalar pair", storage, ()), dtype="float4_e2m1fn_x2"),
    ]
    with pytest.raises(WouldLoseData) as caught:
        safetensors.FORMAT.plan_write(entries, "out")
    assert all(entry.key in str(caught.value) for entry in entries[1:])
    assert "fine" not in str(caught.value)


def test_one_name_twice_and_the_reserved_one_are_conflicts(tmp_path: Path) -> None:
    storage = stored(str(tmp_path / "0"), "0", bytes(64), "float32")
    for names in (("a", "a"), ("__metadata__",)):
        with pytest.raises(KeyConflict):
            safetensors.FORMAT.plan_write([view(name, storage, (2,)) for name in names], "out")


def test_a_surrogate_in_a_name_is_escaped_and_reported(tmp_path: Path) -> None:
    storage = stored(str(tmp_path / "0"), "0", bytes(64), "float32")
    plan = safetensors.FORMAT.plan_write([view("a\ud800\0", storage, (2,))], "out")
    assert [finding.id for finding in plan.findings] == ["surrogate-name"]
    path = tmp_path / "m.safetensors"
    path.write_bytes(content(plan))
    assert safetensors.read(str(path)).entries[0].key == "a\ud800\0"
    assert header_of(edited(str(path), SetMetadata({"b": "\udfff"})))["__metadata__"]["b"] == "\udfff"


# Ties and views


def planned(entries: Sequence[TensorEntry], path: Path) -> tuple[TensorEntry, ...]:
    """What comes back after `entries` were written to `path` and read."""
    kept, metadata, _ = share_plan(entries)
    path.write_bytes(content(safetensors.FORMAT.plan_write(kept, "out", metadata=metadata)))
    found = safetensors.read(str(path))
    assert list(safetensors.FORMAT.check(str(path))) == []
    return restore_ties(found.entries, found.metadata)


def geometry(entries: Sequence[TensorEntry]) -> list[tuple[Any, ...]]:
    return [(entry.key, entry.dtype, entry.shape, entry.stride) for entry in entries]


def sharing(entries: Sequence[TensorEntry]) -> list[tuple[str, str, int]]:
    """Pairs of tensors of one storage, and how far apart in it they begin."""
    pairs = []
    for index, one in enumerate(entries):
        for other in entries[index + 1 :]:
            if one.storage == other.storage and one.storage is not None:
                pairs.append((one.key, other.key, other.offset - one.offset))
    return pairs


@pytest.fixture
def tied(tmp_path: Path) -> list[TensorEntry]:
    shared = stored(str(tmp_path / "0"), "0", bytes(range(96)), "float32")
    other = stored(str(tmp_path / "1"), "1", bytes(range(16)), "int32")
    return [
        view("embed", shared, (4, 6)),
        view("first", shared, (2, 6)),
        view("flat", shared, (24,)),
        view("head", shared, (4, 6)),
        view("last", shared, (2, 6), offset=12),
        view("column", shared, (4,), (6,), 3),
        view("other", other, (4,)),
        view("transposed", shared, (6, 4), (1, 6)),
        view("also head", shared, (4, 6)),
    ]


def test_ties_and_views_come_back(tied: list[TensorEntry], tmp_path: Path) -> None:
    kept, metadata, findings = share_plan(tied)
    assert findings == ()
    assert [entry.key for entry in kept] == [entry.key for entry in tied if "head" not in entry.key]
    assert {key: value for key, value in metadata.items() if "." not in key} == {"head": "embed", "also head": "embed"}
    assert restore_ties(kept, metadata) == tuple(tied)
    back = planned(tied, tmp_path / "m.safetensors")
    assert geometry(back) == geometry(tied)
    assert sharing(back) == sharing(tied)
    for before, after in zip(tied, back, strict=True):
        one, other = (safetensors.FORMAT.plan_write([entry], "out") for entry in (before, after))
        assert content(one) == content(other)


@st.composite
def shared_storages(draw: st.DrawFn) -> list[TensorEntry]:
    entries: list[TensorEntry] = []
    for key in range(draw(st.integers(1, 2))):
        storage = Storage(str(key), "uint8", 24, "cpu", ByteRange(f"/nowhere/{key}", 0, 24))
        for _ in range(draw(st.integers(1, 5))):
            shape = draw(st.sampled_from([(24,), (4, 6), (12,), (3,), (2, 3), (0,), ()]))
            stride = draw(st.sampled_from([contiguous_stride(shape), contiguous_stride(shape), (1,) * len(shape)]))
            reach = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
            offset = draw(st.integers(0, 24 - max(reach, 0)))
            entries.append(view(f"t{len(entries)}", storage, shape, stride, offset))
    return draw(st.permutations(entries))


@given(shared_storages())
def test_restoring_a_plan_gives_what_it_was_made_of(entries: list[TensorEntry]) -> None:
    kept, metadata, findings = share_plan(entries)
    assert restore_ties(kept, metadata) == tuple(entries)
    views = json.loads(metadata.get("ckptfix.views", "{}"))
    apart = [entry for entry in kept if entry.key not in views and entry.numel]
    reported = {finding.where for finding in findings}
    for index, one in enumerate(apart):
        for two in apart[index + 1 :]:
            if one.storage == two.storage and not reported & {one.key, two.key}:
                ends = [
                    (
                        entry.offset,
                        entry.offset + 1 + sum((n - 1) * s for n, s in zip(entry.shape, entry.stride, strict=True)),
                    )
                    for entry in (one, two)
                ]
                assert max(start for start, _ in ends) >= min(end for _, end in ends)


def test_overlaps_without_a_common_base_are_reported(tmp_path: Path) -> None:
    storage = stored(str(tmp_path / "0"), "0", bytes(range(24)), "uint8")
    entries = [view("a", storage, (16,)), view("b", storage, (16,), offset=8)]
    kept, metadata, findings = share_plan(entries)
    assert (kept, metadata) == (tuple(entries), {})
    assert [(finding.id, finding.where) for finding in findings] == [("shared-memory", "b")]
    other_dtype = [view("a", storage, (16,)), replace(view("b", storage, (4,)), dtype="float32")]
    assert len(share_plan(other_dtype)[2]) == 1


def test_neighbours_in_one_storage_are_separate(tmp_path: Path) -> None:
    storage = stored(str(tmp_path / "0"), "0", bytes(range(24)), "uint8")
    entries = [view("b", storage, (12,), offset=12), view("a", storage, (12,)), view("none", storage, (0,), offset=12)]
    assert share_plan(entries) == (tuple(entries), {}, ())


def test_a_base_need_not_begin_its_storage(tmp_path: Path) -> None:
    storage = stored(str(tmp_path / "0"), "0", bytes(range(24)), "uint8")
    entries = [view("base", storage, (12,), offset=6), view("part", storage, (3,), (2,), 9)]
    _, metadata, _ = share_plan(entries)
    assert json.loads(metadata["ckptfix.views"])["part"]["offset"] == 3
    back = planned(entries, tmp_path / "m.safetensors")
    assert sharing(back) == sharing(entries) == [("base", "part", 3)]


def test_a_name_that_metadata_has_a_use_for_is_no_tie(tmp_path: Path) -> None:
    storage = stored(str(tmp_path / "0"), "0", bytes(range(24)), "uint8")
    entries = [view("w", storage, (24,)), view("format", storage, (24,))]
    kept, metadata, _ = share_plan(entries)
    assert (len(kept), list(metadata)) == (2, ["ckptfix.views"])
    assert sharing(planned(entries, tmp_path / "m.safetensors")) == [("w", "format", 0)]


@pytest.mark.slow
def test_many_views_of_one_storage_take_no_quadratic_time(tmp_path: Path) -> None:
    storage = Storage("0", "float32", 1 << 19, "cpu", ByteRange("/nowhere", 0, 1 << 19))
    pieces = [view(f"{index}", storage, (4,), offset=index * 4) for index in range(30_000)]
    assert share_plan(pieces)[1] == {}
    _, metadata, _ = share_plan([*pieces, view("flat", storage, (1 << 17,))])
    assert len(json.loads(metadata["ckptfix.views"])) == 30_000


def test_a_view_whose_bytes_were_changed_stays_apart(tied: list[TensorEntry], tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    planned(tied, path)
    data = bytearray(path.read_bytes())
    place = next(entry for entry in safetensors.read(str(path)).entries if entry.key == "first").data.offset
    data[place] ^= 1
    path.write_bytes(data)
    found = safetensors.read(str(path))
    back = {entry.key: entry for entry in restore_ties(found.entries, found.metadata)}
    assert back["first"].storage != back["embed"].storage
    assert back["last"].storage == back["embed"].storage


@pytest.mark.parametrize(
    "metadata",
    [
        {"format": "fc.weight"},
        {"fc.bias": "fc.weight"},
        {"head": "nothing"},
        {"ckptfix.views": "fc.weight", "ckptfix.order": "steps"},
        {"ckptfix.views": "[" * 100_000},
        {"ckptfix.views": '{"fc.bias": 1, "steps": {"base": 1}, "x": {"base": "steps"}}'},
        {"ckptfix.views": '{"fc.bias": {"base": "fc.weight", "offset": 0, "shape": [3], "stride": [1]}}'},
        {"ckptfix.views": '{"steps": {"base": "steps", "offset": 0, "shape": [], "stride": []}}'},
        {"ckptfix.order": '{"fc.bias": 0, "ghost": 1}'},
    ],
)
def test_other_metadata_is_not_mistaken_for_ties(tmp_path: Path, metadata: dict[str, str]) -> None:
    path = made(tmp_path / "m.safetensors", TENSORS, metadata=metadata)
    found = safetensors.read(path)
    assert restore_ties(found.entries, found.metadata) == found.entries
    assert found.sites[0].names == ("fc.weight", "fc.bias", "steps")


@pytest.mark.parametrize(
    "record",
    [
        {"offset": -1},
        {"offset": 1},
        {"offset": 1 << 70},
        {"offset": "0"},
        {"shape": [4]},
        {"shape": [True, 2]},
        {"stride": [99]},
        {"stride": [-1]},
        {"stride": []},
        {"stride": None},
    ],
)
def test_views_that_do_not_fit_are_left_alone(tmp_path: Path, record: dict[str, Any]) -> None:
    tensors = [("a", "U8", (4,), b"aaaa"), ("b", "U8", (3,), b"aaa")]
    good = {"base": "a", "offset": 0, "shape": [3], "stride": [1]}
    path = made(tmp_path / "m.safetensors", tensors, metadata={"ckptfix.views": json.dumps({"b": good})})
    found = safetensors.read(path)
    assert restore_ties(found.entries, found.metadata) != found.entries
    bad = {"ckptfix.views": json.dumps({"b": {**good, **record}})}
    if record == {"offset": 1}:
        # Inside, and of the same bytes.
        assert restore_ties(found.entries, bad)[1].offset == 1
    else:
        assert restore_ties(found.entries, bad) == found.entries


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(4, 3)
        self.head = torch.nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight


def test_ties_are_those_of_save_model(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs.safetensors", tmp_path / "ours.safetensors"
    model = Tied()
    library.save_model(model, str(theirs))
    found = safetensors.read(str(theirs))
    restored = restore_ties(found.entries, found.metadata)
    assert sorted(entry.key for entry in restored) == ["embed.weight", "head.weight"]
    kept, metadata, _ = share_plan(restored)
    assert {key: value for key, value in metadata.items() if key != "ckptfix.order"} == found.metadata
    ours.write_bytes(content(safetensors.FORMAT.plan_write(kept, "out", metadata=metadata)))
    other = Tied()
    missing, unexpected = library.load_model(other, str(ours))
    assert not missing
    assert not unexpected
    assert torch.equal(other.embed.weight, model.embed.weight)
