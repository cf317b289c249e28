"""An output folder is complete, or as it was: whatever fails on the way, and whatever the file system cannot do."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faults.test_calls import FAULTS, Armed

from ckptfix.checkpoint import ByteRange, OutputFile, Plan, Segment
from ckptfix.errors import CkptfixError, WouldOverwrite
from ckptfix.io import folders, output
from ckptfix.io.folders import write_folder
from ckptfix.io.output import TEMP_SUFFIX

SOURCE = bytes(range(256)) * 700
OLD = {"index.json": b"old index", "one.bin": b"old one", "sub/two.bin": b"old two"}
NEW = {"index.json": b"new index", "one.bin": SOURCE, "deep/er/three.bin": SOURCE[5:9000]}
CALLS = ["mkdir", "open", "write", "fsync", "stat", "rename", "replace", "link", "unlink", "listdir", "rmdir", "fstat"]


def content(folder: Path) -> dict[str, bytes] | None:
    if not folder.exists():
        return None
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def prepare(place: Path, old: dict[str, bytes] | None) -> Plan:
    for path in place.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (place / "source").write_bytes(SOURCE)
    for name, data in (old or {}).items():
        path = place / "out" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    source = str(place / "source")
    rows: dict[str, list[Segment]] = {"index.json": [b"new index"], "one.bin": [ByteRange(source, 0, len(SOURCE))]}
    files = [OutputFile.of(place / "out" / name, segments) for name, segments in rows.items()]
    files.append(OutputFile.of(place / "out" / "deep/er/three.bin", [ByteRange(source, 5, 8995)]))
    return Plan(tuple(files))


def own(names: dict[str, bytes]) -> Callable[[str], list[str]]:
    return lambda folder: [str(Path(folder, name)) for name in names]


def left(place: Path) -> list[str]:
    return [path.name for path in place.iterdir() if TEMP_SUFFIX in path.name]


@pytest.fixture(params=["exchange", "no such rename"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Half of them bring the ends of files to the disk in the background, as large ones are."""
    if request.param != "exchange":
        monkeypatch.setattr(folders, "_renamed", lambda old, new, flags: False)
        monkeypatch.setattr(output, "WORTH_A_THREAD", 0)
    return str(request.param)


@pytest.mark.usefixtures("system")
class TestOutcome:
    def test_a_new_folder(self, tmp_path: Path) -> None:
        assert write_folder(prepare(tmp_path, None), str(tmp_path / "out")) is None
        assert content(tmp_path / "out") == NEW
        assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]

    def test_an_existing_one_is_refused_and_an_empty_one_is_not(self, tmp_path: Path) -> None:
        with pytest.raises(WouldOverwrite):
            write_folder(prepare(tmp_path, OLD), str(tmp_path / "out"))
        assert content(tmp_path / "out") == OLD
        plan = prepare(tmp_path, None)
        (tmp_path / "out").mkdir()
        write_folder(plan, str(tmp_path / "out"))
        assert content(tmp_path / "out") == NEW

    def test_what_is_a_checkpoint_alone_goes(self, tmp_path: Path) -> None:
        plan = prepare(tmp_path, OLD)
        assert write_folder(plan, str(tmp_path / "out"), overwrite=True, own=own(OLD)) is None
        assert content(tmp_path / "out") == NEW
        assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]

    @pytest.mark.parametrize("other", ["notes.txt", "sub/deep/notes.txt"])
    def test_a_folder_with_anything_else_is_kept(self, tmp_path: Path, other: str) -> None:
        plan = prepare(tmp_path, {**OLD, other: b"mine"})
        kept = write_folder(plan, str(tmp_path / "out"), overwrite=True, own=own(OLD))
        assert kept == str(tmp_path / "out.~1~")
        assert content(Path(kept)) == {**OLD, other: b"mine"}
        assert content(tmp_path / "out") == NEW

    def test_the_old_one_is_kept_on_request_under_a_free_name(self, tmp_path: Path) -> None:
        plan = prepare(tmp_path, OLD)
        (tmp_path / "out.~1~").write_bytes(b"another's")
        kept = write_folder(plan, str(tmp_path / "out"), overwrite=True, keep_old=True, own=own(OLD))
        assert kept == str(tmp_path / "out.~2~")
        assert content(Path(kept)) == OLD
        assert (tmp_path / "out.~1~").read_bytes() == b"another's"

    def test_a_symbolic_link_stands_for_its_folder(self, tmp_path: Path) -> None:
        plan = prepare(tmp_path, OLD)
        (tmp_path / "out").rename(tmp_path / "real")
        (tmp_path / "out").symlink_to("real")
        write_folder(plan, str(tmp_path / "out"), overwrite=True, own=own(OLD))
        assert (tmp_path / "out").is_symlink()
        assert content(tmp_path / "real") == NEW

    def test_whole_files_become_links_on_request(self, tmp_path: Path) -> None:
        plan = prepare(tmp_path, None)
        write_folder(plan, str(tmp_path / "out"), link=True)
        assert content(tmp_path / "out") == NEW
        assert (tmp_path / "out/one.bin").samefile(tmp_path / "source")
        assert not (tmp_path / "out/deep/er/three.bin").samefile(tmp_path / "source")

    def test_errors_name_the_destination(self, tmp_path: Path) -> None:
        plan = prepare(tmp_path, None)
        bad = Plan((*plan.files, OutputFile.of(tmp_path / "out/bad", [ByteRange(str(tmp_path / "gone"), 0, 4)])))
        with pytest.raises(CkptfixError) as raised:
            write_folder(bad, str(tmp_path / "out"))
        assert TEMP_SUFFIX not in str(raised.value)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


@pytest.mark.slow
@pytest.mark.sampled(20)
@pytest.mark.parametrize("call", [name for name in CALLS if hasattr(os, name)])
@pytest.mark.parametrize("before", ["nothing", "a checkpoint", "more than that", "kept"])
@pytest.mark.usefixtures("system")
def test_one_call_fails(tmp_path: Path, call: str, before: str) -> None:
    old = {"nothing": None, "a checkpoint": OLD, "kept": OLD}.get(before, {**OLD, "mine.txt": b"mine"})
    options: dict[str, Any] = {"overwrite": True, "keep_old": before == "kept", "own": own(OLD)}

    def run(armed: Armed) -> str | None:
        plan = prepare(tmp_path, old)
        code, message = 0, ""
        with armed.in_place():
            try:
                write_folder(plan, str(tmp_path / "out"), **options)
            except CkptfixError as error:
                code, message = 2, str(error)
            except (KeyboardInterrupt, MemoryError):
                code = 130
            except OSError as error:
                return f"a bare {error!r}"
        found = content(tmp_path / "out")
        if found not in (old, NEW):
            return f"neither old nor new: {sorted(found or ())}"
        kept = [content(path) for path in tmp_path.glob("out.~*~")]
        if found == NEW and before in ("more than that", "kept") and kept != [old]:
            return f"the old folder is lost ({message})"
        if found == old and kept:
            return "kept and not replaced"
        if code == 0 and found != NEW:
            return "said to be written, and is not"
        if code == 2 and (found == NEW) != ("the output is complete" in message) and old != NEW:
            return f"an error, and the folder is {'new' if found == NEW else 'old'}: {message}"
        if left(tmp_path) and call not in ("unlink", "rmdir", "listdir", "open", "stat", "fstat"):
            return f"left behind: {left(tmp_path)}"
        return None

    count = Armed(call, "EIO")
    assert run(count) is None
    wrong = []
    for fault in FAULTS:
        for nth in range(count.count):
            if problem := run(Armed(call, fault, nth)):
                wrong.append(f"{fault} at call {nth} of {call}: {problem}")
    assert wrong == []
