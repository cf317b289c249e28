"""The quick form of the weight audit: two objects are one object with other names and devices, or nothing is said."""

from __future__ import annotations

import random
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from builders import Record, Tensor, assemble, build_zip, push, state_dict_ops, tensor_ops, torch_zip

import ckptfix
from ckptfix.checkpoint import ByteRange, Checkpoint, OutputFile, Plan, Storage, TensorEntry
from ckptfix.formats import open_checkpoint
from ckptfix.formats.torch.common import pickled_object
from ckptfix.formats.torch.unchanged import edits, strings
from ckptfix.io.virtual_files import PlannedFile
from ckptfix.ops.audit import keeps_all, pieces
from ckptfix.pickles import parse

WEIGHT = Tensor("0", (2, 3), 12, location="cuda:0", offset=1)
OTHER = {
    "key": replace(WEIGHT, key="1"),
    "count": replace(WEIGHT, numel=13),
    "class": replace(WEIGHT, storage_class="IntStorage"),
    "shape": replace(WEIGHT, shape=(3, 2)),
    "stride": replace(WEIGHT, stride=(1, 2)),
    "offset": replace(WEIGHT, offset=2),
    "gradient": replace(WEIGHT, requires_grad=True),
}


def stream(weight: Tensor, name: str = "w", more: int = 7, kind: str = "a.B") -> bytes:
    module, _, cls = kind.partition(".")
    tail = [*push("epoch"), *push(more), *push("object"), ("GLOBAL", module, cls), "EMPTY_TUPLE", "REDUCE"]
    head = ["EMPTY_DICT", "MARK", *push(name), *tensor_ops(weight)]
    return assemble(("PROTO", 2), *head, *tail, "SETITEMS", "STOP")


@pytest.mark.parametrize("what", OTHER)
def test_a_reference_or_a_view_that_differs_is_seen(what: str) -> None:
    assert not edits._same_object(parse(stream(WEIGHT)), parse(stream(OTHER[what])))


def test_names_and_devices_may_differ() -> None:
    moved = replace(WEIGHT, location="cpu")
    assert edits._same_object(parse(stream(WEIGHT)), parse(stream(moved, "module.w")))


@pytest.mark.parametrize(("more", "kind"), [(8, "a.B"), (7, "a.C"), (7, "b.B")])
def test_other_numbers_and_classes_are_seen(more: int, kind: str) -> None:
    assert not edits._same_object(parse(stream(WEIGHT)), parse(stream(WEIGHT, more=more, kind=kind)))


def test_an_item_more_or_less_is_seen() -> None:
    one = assemble(("PROTO", 2), *state_dict_ops({"a": WEIGHT, "b": 1}), "STOP")
    two = assemble(("PROTO", 2), *state_dict_ops({"a": WEIGHT, "b": 1, "c": 1}), "STOP")
    assert not edits._same_object(parse(one), parse(two)) and not edits._same_object(parse(two), parse(one))


@pytest.mark.parametrize("text", ["short", "longer than a hundred " * 20])
@pytest.mark.parametrize("code", ["BINUNICODE", "SHORT_BINUNICODE"])
def test_a_string_that_is_written_out_is_read(code: str, text: str) -> None:
    text = text[:255] if code == "SHORT_BINUNICODE" else text
    raw = text.encode()
    size = len(raw).to_bytes(1 if code == "SHORT_BINUNICODE" else 4, "little")
    data = b"?" + (b"\x8c" if code == "SHORT_BINUNICODE" else b"X") + size + raw + b"."
    assert strings._literal(data, 1) == (text, len(data) - 1)
    assert strings._literal(data, 0) is None and strings._literal(data, len(data)) is None
    assert strings._literal(data[:-2], 1) is None


def made(tmp_path: Path, location: str, count: int = 12) -> Path:
    path = tmp_path / f"{location.replace(':', '')}-{count}.pth"
    path.write_bytes(torch_zip(stream(replace(WEIGHT, location=location)), [bytes(4 * count)]))
    return path


def test_storages_are_known_to_be_there_by_the_directory_alone(tmp_path: Path) -> None:
    for count, there in ((12, True), (11, False), (13, False)):
        parts = pickled_object(open_checkpoint(made(tmp_path, "cpu", count)))
        assert parts.storages.all_there(parts.graph) is there


def test_pieces_that_follow_each_other_are_one() -> None:
    first, next_, apart = (ByteRange("a", at, 4) for at in (0, 4, 12))
    assert pieces._joined((piece, 0, 4) for piece in (first, next_)) == (("a", 0, 8),)
    assert pieces._joined((piece, 0, 4) for piece in (first, apart)) == (("a", 0, 4), ("a", 12, 16))
    assert pieces._joined([(first, 0, 4), (ByteRange("b", 4, 4), 0, 4)]) == (("a", 0, 4), ("b", 4, 8))


def test_bytes_of_a_planned_file_are_found_in_their_segments() -> None:
    name = PlannedFile(OutputFile.of("out", [b"12345678", ByteRange("in", 100, 10), b"abcd"]))
    middle = ByteRange("in", 100, 10)
    assert list(name.between(0, 4)) == [(b"12345678", 0, 4)]
    assert list(name.between(6, 14)) == [(b"12345678", 6, 2), (middle, 0, 10), (b"abcd", 0, 2)]
    assert list(name.between(9, 5)) == [(middle, 1, 5)]


@pytest.mark.parametrize(("offset", "start", "length", "copied"), [
    (0, 0, 10, True), (3, 3, 7, True), (3, 3, 8, False), (3, 4, 6, False), (10, 10, 0, True), (10, 0, 1, False),
])  # fmt: skip
def test_data_is_copied_if_all_of_it_is(offset: int, start: int, length: int, copied: bool) -> None:
    name = PlannedFile(OutputFile.of("out", [ByteRange("in", 0, 10), b"made"]))
    assert edits._comes_from(name, offset, ByteRange("in", start, length)) is copied


def test_only_bytes_that_are_copied_have_a_trail() -> None:
    """Those of a planned file are of the input; those of another file are what they are; text that is new is itself."""
    entry = TensorEntry("a", "", None, "uint8", (8,), (1,))
    plain = replace(entry, storage=Storage("a", "uint8", 8, "cpu", ByteRange("in", 4, 8)))
    assert pieces.planned_trail(plain, 0, 8) is None and pieces.planned_trail(entry, 0, 8) is None
    middle = ByteRange("in", 100, 8)
    name = PlannedFile(OutputFile.of("out", [b"12345678", middle]))
    planned = replace(entry, storage=Storage("a", "uint8", 8, "cpu", ByteRange(name, 8, 8)))
    assert pieces.planned_trail(planned, 2, 4) == (("in", 102, 106),)


def saved(path: Path, count: int = 120, name: str = "layer") -> Path:
    torch.save({f"module.{name}.{number}.weight": torch.full((2,), float(number)) for number in range(count)}, path)
    return path


def renamed(path: Path, out: Path) -> tuple[Checkpoint, Plan]:
    done = ckptfix.strip_module(path, out, dry_run=True)
    assert done.plan is not None
    return open_checkpoint(path), done.plan


@pytest.mark.parametrize("name", ["layer", "\u00e9\u4f60", "long" * 70])
def test_an_edit_of_names_is_seen_without_a_second_parse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Neither is a record looked at that moved with the others."""
    source, plan = renamed(saved(tmp_path / "in.pth", name=name), tmp_path / "out.pth")
    for name in ("_same_places", "_same_object", "parse"):
        monkeypatch.setattr(edits, name, None)
    assert keeps_all(source, plan)


@pytest.mark.parametrize("change", ["a record less", "another root", "another name", "other data"])
def test_other_records_are_seen(tmp_path: Path, change: str) -> None:
    path = saved(tmp_path / "in.pth", 3)
    with zipfile.ZipFile(path) as archive:
        records = [Record(name, archive.read(name)) for name in archive.namelist()]
    if change == "a record less":
        records = [record for record in records if not record.name.endswith("/data/1")]
    elif change == "another root":
        records = [replace(record, name=f"other/{record.name.partition('/')[2]}") for record in records]
    elif change == "another name":
        records[-1] = replace(records[-1], name=f"{records[-1].name}x")
    elif change == "other data":
        records = [replace(one, data=b"\1" * 8) if one.name.endswith("/data/1") else one for one in records]
    plan = Plan((OutputFile.of(tmp_path / "out.pth", [build_zip(records)]),))
    assert not keeps_all(open_checkpoint(path), plan)


@pytest.mark.slow
def test_what_is_said_of_two_pickles_alone_is_what_their_objects_say(tmp_path: Path) -> None:
    """Of streams with a changed byte: where they are called the same, the objects that they make are."""
    path = saved(tmp_path / "in.pth")
    ckptfix.strip_module(path, tmp_path / "out.pth")
    parts = pickled_object(open_checkpoint(path))
    new = pickled_object(open_checkpoint(tmp_path / "out.pth")).graph.data
    assert strings.differ_alone(parts.found, new)
    pick = random.Random(0)
    same = 0
    for _ in range(400):
        place = pick.randrange(2, len(new) - 1)
        changed = new[:place] + bytes((new[place] ^ 1 << pick.randrange(8),)) + new[place + 1 :]
        if strings.differ_alone(parts.found, changed):
            assert edits._same_object(parts.graph, parse(changed)), place
            same += 1
    assert 20 < same < 200, "a byte of a name may change, and no other"
