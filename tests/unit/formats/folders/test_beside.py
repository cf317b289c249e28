"""What goes along with the files of a checkpoint's folder, and what does not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptfix.errors import CkptfixError
from ckptfix.formats.folders.companions import beside


def test_more_files_than_lie_beside_any_checkpoint_are_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptfix.formats.folders.companions.MOST", 10)
    for number in range(11):
        (tmp_path / str(number)).touch()
    assert len(beside(str(tmp_path), [str(tmp_path / "0")]).files) == 10
    (tmp_path / "11").touch()
    with pytest.raises(CkptfixError, match="more than 10 files besides"):
        beside(str(tmp_path), [str(tmp_path / "0")])


def test_regular_files_go_along_and_all_else_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    (folder / "runs").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"own")
    (folder / "config.json").write_bytes(b"{}")
    (folder / "empty.txt").write_bytes(b"")
    (folder / ".gitattributes").write_bytes(b"*")
    (folder / ".x.0123.ckptfix-tmp").write_bytes(b"half")
    (tmp_path / "secret").write_bytes(b"key")
    (folder / "out").symlink_to("../secret")
    (folder / "nothing").symlink_to("nowhere")
    (folder / "inner").symlink_to("config.json")
    os.mkfifo(folder / "pipe")
    found = beside(str(folder), [str(folder / "model.safetensors")])
    assert found.files == (".gitattributes", "config.json", "empty.txt", "inner")
    assert dict(found.left) == {
        "nothing": "it is a broken link",
        "out": "it is a link that leads out of the folder",
        "pipe": "it is not a regular file",
        "runs": "it is a folder",
    }
    assert [finding.where for finding in found.findings()] == ["nothing", "out", "pipe", "runs"]
    files = found.copied_to(str(tmp_path / "new"))
    assert [(Path(file.path).name, file.nbytes, file.along) for file in files] == [
        (".gitattributes", 1, True), ("config.json", 2, True), ("empty.txt", 0, True), ("inner", 2, True)
    ]  # fmt: skip


def test_a_folder_that_holds_files_of_the_checkpoint_is_not_left_behind(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "one.bin").write_bytes(b"1")
    assert beside(str(tmp_path), [str(tmp_path / "parts" / "one.bin")]).left == ()


def test_links_into_the_blobs_of_a_download_cache_go_along(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--x" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    blobs = tmp_path / "models--x" / "blobs"
    blobs.mkdir()
    (blobs / "1").write_bytes(b"{}")
    (snapshot / "config.json").symlink_to("../../blobs/1")
    assert beside(str(snapshot), []).files == ("config.json",)


def test_a_folder_that_cannot_be_listed_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(CkptfixError):
        beside(str(tmp_path / "none"), [])
