"""Records and journals of edits in place beside a file that was written anew since, or that a stranger wrote."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from builders import safetensors

import ckptfix
from ckptfix.errors import CkptfixError, DamagedFile, Unsupported
from ckptfix.io.inplace import edit
from ckptfix.io.inplace.disk import DISK
from ckptfix.io.inplace.record import MAGIC, EditRecord, FileChange, decoded
from ckptfix.io.unfinished_edits import JOURNAL, UNDO, beside
from ckptfix.ops.undo import edits

torch = pytest.importorskip("torch")


def saved(path: Path, kind: str, seed: int, *, name: str = "module.layer", count: int = 300) -> bytes:
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"{name}.{number}": torch.randn(count, generator=generator) for number in range(3)}
    if kind == "safetensors":
        from safetensors.torch import save_file

        save_file(tensors, path)
    else:
        torch.save(tensors, path, _use_new_zipfile_serialization=kind == "zip")
    return path.read_bytes()


KINDS = ("legacy", "zip", "safetensors")


@pytest.mark.parametrize("now", KINDS)
@pytest.mark.parametrize("was", KINDS)
def test_what_was_written_anew_is_edited_and_taken_back(tmp_path: Path, was: str, now: str) -> None:
    """A run goes on with another version of torch: the record of the old file is no hindrance, and no record."""
    path = tmp_path / "run.ckpt"
    saved(path, was, 1)
    ckptfix.strip_module(path, in_place=True)
    before = saved(path, now, 2, count=400)
    if was != "zip":
        assert edits(path) == ()
        with pytest.raises(DamagedFile, match="it has changed"):
            ckptfix.undo(path)
        assert path.read_bytes() == before
    for _ in range(2):
        ckptfix.strip_module(path, in_place=True)
        assert len(edits(path)) == 1
        assert ckptfix.undo(path).undone
        assert path.read_bytes() == before


@pytest.mark.parametrize("kind", ["legacy", "safetensors"])
def test_edits_on_one_another_are_taken_back_one_by_one(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.ckpt"
    contents = [saved(path, kind, 1)]
    for number in range(3):
        ckptfix.add_module(path, in_place=True) if number % 2 else ckptfix.strip_module(path, in_place=True)
        contents.append(path.read_bytes())
    for left in (3, 2, 1):
        assert len(edits(path)) == left
        assert path.read_bytes() == contents[left]
        assert ckptfix.undo(path).undone
    assert path.read_bytes() == contents[0]
    assert "nothing to undo" in str(ckptfix.undo(path))


def test_of_a_file_that_was_put_back_the_edit_before_is_known(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    first = saved(path, "safetensors", 1)
    ckptfix.strip_module(path, in_place=True)
    shutil.copy(path, tmp_path / "kept")
    ckptfix.add_module(path, in_place=True)
    path.write_bytes((tmp_path / "kept").read_bytes())
    assert ckptfix.undo(path).undone
    assert path.read_bytes() == first


PLAIN = safetensors([("module.a", "F32", [2000], bytes(range(250)) * 32)])
SIZE = len(PLAIN)


def hostile(name: str) -> dict[str, FileChange]:
    head, other = PLAIN[:100], bytes(100)
    return {
        "grow to 4 EB": FileChange(name, 1 << 62, SIZE, (), ((0, PLAIN),)),
        "grow by a byte that it has not": FileChange(name, SIZE + 1, SIZE, ((0, other),), ((0, head),)),
        "cut to nothing": FileChange(name, 0, SIZE, (), ((0, PLAIN),)),
        "from more than it kept": FileChange(name, SIZE + 500, SIZE, ((SIZE, bytes(499)),), ((0, head),)),
        "cut what it did not write": FileChange(name, SIZE - 500, SIZE, ((0, other),), ((0, head),)),
        "a shift that shows nothing": FileChange(name, SIZE - 4096, SIZE, ((0, b""),), ((0, b""),), 4096),
        "nothing": FileChange(name, SIZE, SIZE, (), ()),
    }


@pytest.mark.parametrize("kind", [UNDO, JOURNAL])
@pytest.mark.parametrize("lie", hostile(""))
def test_what_no_edit_can_have_done_is_not_believed(tmp_path: Path, kind: str, lie: str) -> None:
    """The file is as it was, can be read, edited, and taken back."""
    path = (tmp_path / "a.safetensors").resolve()
    path.write_bytes(PLAIN)
    record = EditRecord("1", "an edit", "2020", (hostile(path.name)[lie],))
    assert not [*decoded(record.encoded())]
    Path(beside(str(path), kind)).write_bytes(record.encoded())
    assert not ckptfix.undo(path).undone or kind == JOURNAL
    assert path.read_bytes() == PLAIN
    assert ckptfix.inspect(path).tensors == 1
    assert ckptfix.strip_module(path, in_place=True).written
    assert ckptfix.undo(path).undone
    assert path.read_bytes() == PLAIN


def _header(name: str) -> FileChange:
    return FileChange(name, 5000, 5000, ((0, bytes(range(1, 200))),), ((0, bytes(range(2, 201))),))


def _grown(name: str) -> FileChange:
    return FileChange(name, 900, 2000, (), ((900, os.urandom(1100)),))


def _shifted(name: str) -> FileChange:
    from ckptfix.io.inplace.record import Probe

    return FileChange(name, 9000, 13096, ((0, b"old"),), ((0, b"new" * 1000),), 4096, (Probe(4096, 100, "0" * 16),))


JOURNALS: dict[str, Callable[[str], FileChange]] = {"header": _header, "grown": _grown, "shifted": _shifted}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("journal", JOURNALS)
def test_a_journal_of_another_file_is_removed_and_the_file_is_left(tmp_path: Path, kind: str, journal: str) -> None:
    """The process was killed in the middle of an edit, and the training has saved anew since."""
    path = (tmp_path / "a.ckpt").resolve()
    before = saved(path, kind, 3)
    record = EditRecord("1", "an edit", "2020", (JOURNALS[journal](path.name),))
    assert [*decoded(record.encoded())] == [record]
    place = Path(beside(str(path), JOURNAL))
    place.write_bytes(record.encoded())
    with pytest.raises(CkptfixError, match="did not finish"):
        ckptfix.inspect(path)
    done = ckptfix.undo(path)
    assert not done.undone and "the journal of a different file" in str(done)
    assert not place.exists() and path.read_bytes() == before
    assert ckptfix.inspect(path).tensors == 3
    assert ckptfix.strip_module(path, in_place=True).written


def test_a_journal_of_a_folder_whose_files_are_others(tmp_path: Path) -> None:
    folder = tmp_path.resolve() / "run"
    folder.mkdir()
    before = saved(folder / "model.safetensors", "safetensors", 1)
    changes = (_header("model.safetensors"), _header("model-00002.safetensors"))
    place = Path(beside(str(folder), JOURNAL))
    place.write_bytes(EditRecord("1", "an edit", "2020", changes).encoded())
    assert not ckptfix.undo(folder).undone
    assert not place.exists() and (folder / "model.safetensors").read_bytes() == before


def test_a_file_between_two_states_and_changed_since_says_the_way_out(tmp_path: Path) -> None:
    """Part of it is of the edit: what is right cannot be known, and the command that keeps it is printed."""
    path = (tmp_path / "a.safetensors").resolve()
    path.write_bytes(PLAIN)
    old, new = PLAIN[:2048], bytes(2047) + b"x"
    record = EditRecord("1", "an edit", "2020", (FileChange(path.name, SIZE, SIZE, ((0, old),), ((0, new),)),))
    place = beside(str(path), JOURNAL)
    DISK.create(place, record.encoded(), str(path))
    mixed = PLAIN[:1024] + b"foreign" * 100 + PLAIN[1724:]
    path.write_bytes(mixed)
    with pytest.raises(DamagedFile, match="another program wrote to it") as caught:
        ckptfix.undo(path)
    assert path.read_bytes() == mixed
    assert caught.value.hint is not None
    assert os.system(caught.value.hint.split("`")[1]) == 0
    path.write_bytes(PLAIN)
    assert ckptfix.inspect(path).tensors == 1


def test_a_real_journal_is_honoured(tmp_path: Path) -> None:
    path = (tmp_path / "a.safetensors").resolve()
    before = saved(path, "safetensors", 1)
    ckptfix.strip_module(path, in_place=True)
    Path(beside(str(path), UNDO)).rename(beside(str(path), JOURNAL))
    assert not edit.discard_foreign(str(path))
    assert ckptfix.undo(path).undone
    assert path.read_bytes() == before


def sparse(size: int, start: bytes = b"") -> Callable[[Path], None]:
    def made(path: Path) -> None:
        with path.open("wb") as file:
            file.write(start)
            file.truncate(size)

    return made


HUGE: dict[str, Callable[[Path], None]] = {
    "zeros": sparse(1 << 40),
    "the beginning of a record": sparse(1 << 40, MAGIC),
    "a record of a long text": sparse(1 << 40, MAGIC + (1 << 39).to_bytes(8, "little") + b"{"),
    "a record, and zeros": sparse(1 << 40, EditRecord("1", "an edit", "2020", (_header("a.ckpt"),)).encoded()),
    "random bytes": sparse(1 << 40, bytes(range(256))),
}


@pytest.mark.parametrize("folder", [False, True], ids=["file", "folder"])
@pytest.mark.parametrize("kind", [UNDO, JOURNAL])
@pytest.mark.parametrize("name", HUGE)
def test_a_huge_record_is_refused_by_name_and_the_file_is_used(
    tmp_path: Path, name: str, kind: str, folder: bool
) -> None:
    """A terabyte that takes no room on the disk is not read: what is no record, or larger than records can be."""
    source = (tmp_path / "a.ckpt").resolve()
    saved(source, "safetensors", 1)
    if folder:
        ckptfix.convert(source, tmp_path / "run", to="hf", shard_size=1500)
        source = (tmp_path / "run").resolve()
    before = {path.name: path.read_bytes() for path in ([*source.iterdir()] if folder else [source])}
    record = Path(beside(str(source), kind))
    HUGE[name](record)
    def whole() -> None:
        place = source if folder else source.parent
        assert all((place / name).read_bytes() == data for name, data in before.items())

    if kind == JOURNAL:
        with pytest.raises(CkptfixError, match="did not finish"):
            ckptfix.inspect(source)
        if name not in ("zeros", "random bytes"):
            with pytest.raises(DamagedFile, match="at most") as caught:
                ckptfix.undo(source)
            assert caught.value.path == str(record) and "rm " in (caught.value.hint or "")
            record.unlink()
        else:
            ckptfix.undo(source)
        assert not record.exists()
    else:
        assert ckptfix.inspect(source).tensors == 3 and ckptfix.doctor(source).cause is not None
        if name not in ("zeros", "random bytes"):
            for verb in (ckptfix.undo, edits, lambda path: ckptfix.strip_module(path, in_place=True)):
                with pytest.raises(DamagedFile, match="at most") as caught:
                    verb(source)
                assert caught.value.path == str(record) and "rm " in (caught.value.hint or "")
            record.unlink()
        else:
            assert edits(source) == ()
    whole()
    assert ckptfix.strip_module(source, in_place=True).written
    assert ckptfix.undo(source).undone
    whole()


def test_an_edit_whose_record_would_be_larger_than_records_can_be_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.safetensors"
    before = saved(path, "safetensors", 1)
    monkeypatch.setattr(edit, "MOST", 100)
    with pytest.raises(Unsupported, match="more than 100 bytes"):
        ckptfix.strip_module(path, in_place=True)
    assert path.read_bytes() == before and not Path(beside(str(path), JOURNAL)).exists()


def test_the_oldest_edits_are_forgotten_where_records_would_be_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.safetensors"
    saved(path, "safetensors", 1)
    ckptfix.strip_module(path, in_place=True)
    after_one = path.read_bytes()
    size = Path(beside(str(path), UNDO)).stat().st_size
    monkeypatch.setattr(edit, "MOST", size + size // 2)
    ckptfix.add_module(path, in_place=True)
    assert len(edits(path)) == 1
    assert ckptfix.undo(path).undone and path.read_bytes() == after_one
    assert not ckptfix.undo(path).undone
