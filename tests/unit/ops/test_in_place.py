"""Edits in place of real files: equal to the copy that the same verb writes, and taken back byte for byte."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import shutil
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from builders import Op, Tensor, assemble, build_zip, state_dict_ops, torch_records, torch_zip
from compare import assert_same
from torch.serialization import skip_data

import ckptfix
from ckptfix.errors import CkptfixError, DamagedFile, Refused, Unsupported, WriteFailed
from ckptfix.io.inplace import edit
from ckptfix.io.inplace.edit import past
from ckptfix.ops.undo import edits

FIXTURES = Path(__file__).parents[3] / "fixtures"
NAMES = sorted(path.name for path in FIXTURES.iterdir() if path.suffix in (".pth", ".safetensors"))

Verb = Callable[..., Any]
VERBS: dict[str, Verb] = {
    "strip-module": lambda *names, **how: ckptfix.strip_module(*names, partial=True, **how),
    "add-module": ckptfix.add_module,
    "unwrap": ckptfix.unwrap,
    "rename": lambda *names, **how: ckptfix.rename(*names, subs=[("weight$", "w"), ("bias$", "a_longer_bias")], **how),
    "to-cpu": ckptfix.to_cpu,
    "map-location": lambda source, dest=None, **how: ckptfix.map_location(source, dest, "cuda:7", **how),
}


def sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.sampled(10, test_all=10_000)
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_verb_on_every_fixture(on_disk: Path, name: str) -> None:
    original = FIXTURES / name
    before = sha(original)
    for verb, call in VERBS.items():
        path, copy = on_disk / name, on_disk / f"copy-{name}"
        shutil.copy(original, path)
        try:
            wanted = call(path, copy, force=True)
        except CkptfixError as error:
            with pytest.raises(type(error)):
                call(path, in_place=True)
            assert sha(path) == before
            continue
        if any(line.startswith("input: a whole module") for line in wanted.lines):
            # A copy is of its state dict; the module itself is not replaced by that.
            with pytest.raises(Refused, match="ckptfix extract"):
                call(path, in_place=True)
            assert sha(path) == before
            continue
        done = call(path, in_place=True)
        assert done.lines[0].partition("; ")[0] == wanted.lines[0].partition("; ")[0], verb
        assert done.exit_code == wanted.exit_code
        assert done.written == (sha(copy) != before), verb
        assert ckptfix.diff(path, copy).same, verb
        assert [entry.name for entry in ckptfix.open_checkpoint(path).entries] == [
            entry.name for entry in ckptfix.open_checkpoint(copy).entries
        ]
        assert ckptfix.undo(path).undone == done.written
        assert sha(path) == before, verb
        assert {left.name for left in on_disk.iterdir()} <= {path.name, copy.name}, verb


def saved(path: Path, prefix: str = "module.") -> Path:
    torch.manual_seed(0)
    model = {f"{prefix}{number}.weight": torch.randn(20, 30) for number in range(4)}
    if path.suffix == ".safetensors":
        safetensors.torch.save_file(model, path, {"format": "pt"})
    else:
        torch.save(model, path, _use_new_zipfile_serialization="legacy" not in path.name)
    return path


def loaded(path: Path, **options: Any) -> Any:
    if path.suffix == ".safetensors":
        return safetensors.torch.load_file(path)
    return torch.load(path, weights_only=True, **options)


KINDS = ("a.pth", "legacy.pth", "a.safetensors")


@pytest.mark.parametrize("name", KINDS)
def test_several_edits_are_taken_back_one_by_one(tmp_path: Path, name: str) -> None:
    path = saved(tmp_path / name)
    state = loaded(path)
    states = [path.read_bytes()]
    for prefix in ("a", "b", "cc"):
        ckptfix.rename(path, subs=[(r"^\w+\.", f"{prefix}.")], in_place=True)
        states.append(path.read_bytes())
        assert_same(loaded(path), {f"{prefix}{key[6:]}": value for key, value in state.items()})
    assert len(edits(path)) == 3
    assert ckptfix.inspect(path).traits["edits in place"] == 3
    (note,) = [finding for finding in ckptfix.doctor(path).findings if finding.id == "edited-in-place"]
    assert note.severity == "info" and note.message.startswith("3 ")
    for number in (2, 1, 0):
        assert len(ckptfix.undo(path).left) == number
        assert path.read_bytes() == states[number]
    assert not ckptfix.undo(path).undone
    assert list(tmp_path.iterdir()) == [path]


def test_readers_of_a_zip_accept_one_that_has_grown(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pth")
    state = loaded(path)
    before = path.read_bytes()
    for _ in range(2):
        ckptfix.strip_module(path, in_place=True)
        ckptfix.add_module(path, in_place=True)
    assert path.read_bytes().startswith(before)
    for options in ({}, {"mmap": True}):
        assert_same(loaded(path, **options), state)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert len({info.filename for info in archive.infolist()}) == len(archive.infolist())
    assert not [finding for finding in ckptfix.doctor(path).findings if finding.severity == "error"]
    assert_same(dict(ckptfix.load_state_dict(path)), {key[7:]: value for key, value in state.items()})


def test_an_archive_whose_comment_looks_like_its_end_has_a_past(tmp_path: Path) -> None:
    path = tmp_path / "in.pth"
    ops = state_dict_ops({"module.w": Tensor("0", (1,), 1)})
    records = torch_records(assemble(("PROTO", 2), *ops, "STOP"), [bytes(4)])
    path.write_bytes(build_zip(records, zip64=False, comment=b"PK\5\6" * 9))
    before = path.read_bytes()
    ckptfix.strip_module(path, in_place=True)
    assert path.read_bytes() != before
    assert ckptfix.undo(path).undone
    assert path.read_bytes() == before


@pytest.fixture
def unfinished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, bytes]:
    """A file whose edit in place ended before its first byte, and whose undo did too; and what it was."""
    path = tmp_path / "in.safetensors"
    safetensors.torch.save_file({f"module.layers.{number}.weight": torch.ones(2) for number in range(30)}, path)
    before = path.read_bytes()

    def fail(*arguments: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(edit, "_apply", fail)
        patch.setattr(edit, "_restore", fail)
        with pytest.raises(WriteFailed, match="undoing the edit failed too"):
            ckptfix.strip_module(path, in_place=True)
        with pytest.raises(WriteFailed) as caught:
            ckptfix.undo(path)
        assert "ckptfix undo" in str(caught.value.hint)
    assert path.read_bytes() == before
    return path, before


def test_an_edit_whose_undo_failed_is_taken_back_later(unfinished: tuple[Path, bytes]) -> None:
    path, before = unfinished
    assert ckptfix.undo(path).unfinished
    assert path.read_bytes() == before and len(list(path.parent.iterdir())) == 1


def test_what_another_program_wrote_meanwhile_is_named_by_its_sector(unfinished: tuple[Path, bytes]) -> None:
    path, before = unfinished
    now = before[:700] + b"?" + before[701:]
    path.write_bytes(now)
    with pytest.raises(DamagedFile, match="the bytes at 0x200 are neither the old nor the new ones"):
        ckptfix.undo(path)
    assert path.read_bytes() == now


def test_slim_forgets_and_repair_keeps_the_present(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pth")
    size = path.stat().st_size
    ckptfix.strip_module(path, in_place=True)
    for verb in (ckptfix.slim, ckptfix.repair):
        out = tmp_path / f"{verb.__name__}.pth"
        verb(path, out)
        assert sorted(loaded(out))[0] == "0.weight"
        assert out.stat().st_size <= size
        assert not edits(out)
        assert "edited-in-place" not in [finding.id for finding in ckptfix.doctor(out).findings]


def test_what_an_edit_replaced_is_scanned(tmp_path: Path) -> None:
    hostile: list[Op] = [("GLOBAL", "posix", "system"), ("BINUNICODE", "true"), "TUPLE1", "REDUCE", "POP"]
    plain = state_dict_ops({"module.w": Tensor("0", (2,), 2)})
    path = tmp_path / "a.pth"
    path.write_bytes(torch_zip(assemble(("PROTO", 2), *hostile, *plain, "STOP"), [bytes(8)]))
    ckptfix.strip_module(path, in_place=True)
    grown = path.read_bytes()
    assert b"posix" in grown
    ids = {finding.id for finding in ckptfix.doctor(path).findings}
    assert {"edited-in-place", "hidden-pickle"} <= ids
    messages = [finding.message for finding in ckptfix.doctor(path).findings if finding.id == "hidden-pickle"]
    assert any("before an in-place edit names posix.system" in message for message in messages)


@pytest.mark.parametrize("name", KINDS)
def test_mode_links_and_inode_stay(tmp_path: Path, name: str) -> None:
    path = saved(tmp_path / name)
    path.chmod(0o640)
    before = path.stat()
    link = tmp_path / f"link-{name}"
    link.symlink_to(path.name)
    ckptfix.strip_module(link, in_place=True)
    after = path.stat()
    assert link.is_symlink()
    assert (after.st_ino, stat.S_IMODE(after.st_mode)) == (before.st_ino, 0o640)
    assert ckptfix.undo(link).undone
    other = tmp_path / f"other-{name}"
    os.link(path, other)
    with pytest.raises(Refused, match="2 names"):
        ckptfix.strip_module(path, in_place=True)
    ckptfix.strip_module(path, in_place=True, force=True)
    assert other.read_bytes() == path.read_bytes()
    assert other.stat().st_ino == path.stat().st_ino


@pytest.mark.parametrize(
    "place",
    [
        "blobs/" + "0f" * 32,
        ".git/annex/objects/aa/bb/KEY/MD5E-s400--d41d8cd98f00b204e9800998ecf8427e.pth",
        ".dvc/cache/files/md5/ab/" + "c" * 30,
    ],
)
def test_a_store_of_content_is_not_edited(tmp_path: Path, place: str) -> None:
    target = tmp_path / place
    target.parent.mkdir(parents=True)
    shutil.move(saved(tmp_path / "a.pth"), target)
    link = tmp_path / "model.pth"
    link.symlink_to(target)
    before = target.read_bytes()
    with pytest.raises(Refused, match="by their content"):
        ckptfix.strip_module(link, in_place=True)
    assert target.read_bytes() == before
    ckptfix.strip_module(link, in_place=True, force=True)
    assert target.read_bytes() != before


def shards(folder: Path) -> Path:
    folder.mkdir()
    weights = {}
    for number in (1, 2):
        name = f"model-0000{number}-of-00002.safetensors"
        safetensors.torch.save_file({f"module.{number}.weight": torch.full((8, 8), float(number))}, folder / name)
        weights[f"module.{number}.weight"] = name
    rows = ", ".join(f'"{key}": "{name}"' for key, name in weights.items())
    (folder / "model.safetensors.index.json").write_text(
        f'{{"metadata": {{"total_size": 512}}, "weight_map": {{{rows}}}}}'
    )
    (folder / "config.json").write_text("{}")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("by_index", [False, True])
def test_a_folder_of_shards(tmp_path: Path, by_index: bool) -> None:
    folder = shards(tmp_path / "run")
    before = contents(folder)
    source = folder / "model.safetensors.index.json" if by_index else folder
    done = ckptfix.strip_module(source, in_place=True)
    assert "of 3 files" in done.lines[-1]
    assert sorted(ckptfix.load_state_dict(folder)) == ["1.weight", "2.weight"]
    assert not [finding for finding in ckptfix.doctor(folder).findings if finding.severity == "error"]
    assert set(contents(folder)) == {*before, ".ckptfix-undo"}
    assert len(past(str(folder.resolve()))) == 1
    ckptfix.add_module(folder, tmp_path / "copy")
    assert set(contents(tmp_path / "copy")) == set(before)
    assert ckptfix.undo(source).undone
    assert contents(folder) == before


@pytest.mark.slow
def test_a_distributed_folder(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    folder = tmp_path / "dcp"
    save({"model": {"module.w": torch.ones(3), "module.b": torch.zeros(2)}}, storage_writer=FileSystemWriter(folder))
    before = contents(folder)
    done = ckptfix.strip_module(folder, in_place=True)
    assert done.written
    assert {name for name, data in contents(folder).items() if before.get(name) != data} == {
        ".metadata", ".ckptfix-undo",
    }  # fmt: skip
    assert sorted(entry.key for entry in ckptfix.open_checkpoint(folder).entries) == ["b", "w"]
    ckptfix.undo(folder)
    assert contents(folder) == before


def test_what_changes_data_is_refused(tmp_path: Path) -> None:
    plain = tmp_path / "plain.pkl"
    plain.write_bytes(pickle.dumps({"module.w": torch.ones(2)}))
    with pytest.raises(Unsupported):
        ckptfix.strip_module(plain, in_place=True)
    path = saved(tmp_path / "a.pth")
    with pytest.raises(Refused, match="no output"):
        ckptfix.strip_module(path, tmp_path / "b.pth", in_place=True)
    with pytest.raises(Refused, match="no output is named"):
        ckptfix.strip_module(path)
    with path.open("ab") as file:
        file.write(b"tail")
    before = path.read_bytes()
    with pytest.raises(Unsupported, match="4 bytes follow the archive"):
        ckptfix.strip_module(path, in_place=True)
    assert path.read_bytes() == before


def test_a_zip_takes_new_tensors_and_keeps_the_old_ones(tmp_path: Path) -> None:
    path, copy = saved(tmp_path / "a.pth"), tmp_path / "copy.pth"
    before = path.read_bytes()
    ckptfix.select(path, drop=["*0.weight"], in_place=True)  # its storage stays, and nothing refers to it
    selected = path.read_bytes()
    ckptfix.cast(path, copy, "float16")
    done = ckptfix.cast(path, None, "float16", in_place=True)
    assert done.exit_code == 0 and any("ckptfix slim" in line for line in done.lines)
    assert path.read_bytes().startswith(selected) and ckptfix.diff(path, copy).same
    assert_same(loaded(path, mmap=True), loaded(copy))
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert len({info.filename for info in archive.infolist()}) == len(archive.infolist())
    assert not [finding for finding in ckptfix.doctor(path).findings if finding.severity == "error"]
    ckptfix.slim(path, tmp_path / "slim.pth")
    assert (tmp_path / "slim.pth").stat().st_size < len(before)
    ckptfix.strip_module(path, in_place=True)
    for _ in range(2):
        ckptfix.undo(path)
    assert path.read_bytes() == selected
    ckptfix.undo(path)
    assert path.read_bytes() == before


def test_a_cast_in_place_counts_what_leaves_the_range(tmp_path: Path) -> None:
    path = tmp_path / "a.pth"
    torch.save({"w": torch.tensor([1.0, 1e9])}, path)
    assert [row.id for row in ckptfix.cast(path, None, "float16", in_place=True).findings] == ["out-of-range"]


@pytest.mark.parametrize("name", ["legacy.pth", "a.safetensors"])
@pytest.mark.parametrize("number", range(4))
def test_other_formats_do_not_take_data_in_place(tmp_path: Path, name: str, number: int) -> None:
    path = saved(tmp_path / name)
    before = path.read_bytes()
    for change in (
        lambda: ckptfix.select(path, drop=[f"*{number}.weight"], in_place=True),
        lambda: ckptfix.cast(path, None, "float16", only=[f"*{number}.weight"], in_place=True),
    ):
        try:
            change()
        except Unsupported as error:
            assert error.hint == "write a copy: give OUT"
            assert path.read_bytes() == before
        else:  # what is left out is at the beginning of the data, where the header may grow
            assert name == "a.safetensors" and f"module.{number}.weight" not in loaded(path)
            ckptfix.undo(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("name", KINDS)
def test_a_dry_run_and_nothing_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    path = saved(tmp_path / name, prefix="")
    before = path.read_bytes()
    real, to_write = os.open, []

    def noted(place: Any, flags: int, *more: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR) and flags & os.O_TMPFILE != os.O_TMPFILE:
            to_write.append(place)
        return real(place, flags, *more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", noted)
        planned = ckptfix.rename(path, subs=[("weight$", "w")], in_place=True, dry_run=True)
    assert to_write == []
    assert "would be changed in place" in str(planned)
    done = ckptfix.strip_module(path, in_place=True)
    assert str(done).endswith("; the file is unchanged")
    assert not done.written and done.in_place
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_match_in_place(tmp_path: Path) -> None:
    path, like = saved(tmp_path / "a.pth"), saved(tmp_path / "like.pth", prefix="backbone.blocks.")
    before = path.read_bytes()
    ckptfix.match(path, None, like, by="position", in_place=True)
    assert sorted(loaded(path)) == sorted(loaded(like))
    ckptfix.undo(path)
    assert path.read_bytes() == before


def test_another_file_under_the_name_is_not_touched(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.safetensors")
    ckptfix.strip_module(path, in_place=True)
    saved(path, prefix="other.")
    before = path.read_bytes()
    with pytest.raises(CkptfixError, match="it has changed"):
        ckptfix.undo(path)
    assert path.read_bytes() == before


@pytest.mark.slow
def test_a_zip_of_many_gigabytes(on_disk: Path) -> None:
    """Its new records lie beyond four gigabytes, and need the wide fields of zip64."""
    path = on_disk / "large.pth"
    with skip_data():
        torch.save({f"module.{number}.weight": torch.empty(300, 1 << 20) for number in range(5)}, path)
    before, records = path.stat().st_size, len(zipfile.ZipFile(path).namelist())
    assert before > 1 << 32
    for prefix in ("a", "b", "c"):
        ckptfix.rename(path, subs=[(r"^\w+\.", f"{prefix}.")], in_place=True)
        assert ckptfix.open_checkpoint(path).entries[4].name == f"{prefix}.4.weight"
        with zipfile.ZipFile(path) as archive:
            assert len(archive.infolist()) == records
    assert list(torch.load(path, weights_only=True, mmap=True))[0] == "c.0.weight"  # noqa: RUF015
    for _ in range(3):
        ckptfix.undo(path)
    assert path.stat().st_size == before
    assert ckptfix.open_checkpoint(path).entries[0].name == "module.0.weight"


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_folder_that_stands_for_its_one_model(tmp_path: Path, name: str) -> None:
    path = saved(tmp_path / name)
    (tmp_path / "config.json").write_text("{}")
    states = [path.read_bytes()]
    for prefix in ("a", "b"):
        ckptfix.rename(tmp_path, subs=[(r"^\w+\.", f"{prefix}.")], in_place=True)
        states.append(path.read_bytes())
    assert len(edits(tmp_path)) == 2
    for number in (1, 0):
        done = ckptfix.undo(tmp_path)
        assert done.undone and len(done.left) == number
        assert path.read_bytes() == states[number]
    assert not ckptfix.undo(tmp_path).undone
    assert {left.name for left in tmp_path.iterdir()} == {name, "config.json"}


@pytest.mark.slow
def test_the_header_of_the_old_format_is_padded_to_every_length(tmp_path: Path) -> None:
    path = tmp_path / "legacy.pth"
    weight = torch.randn(20, 30)
    torch.save({"x" * 400: weight}, path, _use_new_zipfile_serialization=False)
    before = path.read_bytes()
    for length in range(400, 99, -1):
        ckptfix.rename(path, subs=[("^x+$", "x" * length)], in_place=True)
        assert torch.equal(loaded(path)["x" * length], weight)
        assert len(path.read_bytes()) == len(before)
        if length < 400:
            ckptfix.undo(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("by", ["folder", "index"])
def test_a_folder_of_links_is_not_edited_in_place_even_by_force(tmp_path: Path, by: str) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / ("a" * 40)
    blobs.mkdir()
    snapshot.mkdir(parents=True)

    def put(name: str, data: bytes) -> None:
        blob = blobs / hashlib.sha256(data).hexdigest()
        blob.write_bytes(data)
        (snapshot / name).symlink_to(Path("..", "..", "blobs", blob.name))

    names = {f"module.{number}": f"model-0000{number}-of-00002.safetensors" for number in (1, 2)}
    for key, name in names.items():
        put(name, safetensors.torch.save({key: torch.zeros(10)}))
    index = snapshot / "model.safetensors.index.json"
    put(index.name, json.dumps({"metadata": {"total_size": 80}, "weight_map": names}).encode())
    before = {path.name: path.read_bytes() for path in blobs.iterdir()}
    with pytest.raises(Unsupported, match="a link to another folder") as caught:
        ckptfix.strip_module(index if by == "index" else snapshot, in_place=True, force=True)
    assert "give OUT" in str(caught.value.hint)
    assert {path.name: path.read_bytes() for path in blobs.iterdir()} == before
    assert len(list(snapshot.iterdir())) == 3
