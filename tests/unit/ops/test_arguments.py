"""Every verb in Python names a file that is not there, and an argument of the wrong type, in one way."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders import Tensor, assemble, state_dict_ops, torch_zip, written
from torch import nn, optim

import ckptfix
from ckptfix.errors import NoSuchFile, NotPermitted, WriteFailed, WrongType

Verb = Callable[[Any, Any], object]

READS: dict[str, Verb] = {
    "open_checkpoint": lambda path, out: ckptfix.open_checkpoint(path),
    "inspect": lambda path, out: ckptfix.inspect(path),
    "doctor": lambda path, out: ckptfix.doctor(path),
    "diff": lambda path, out: ckptfix.diff(path, path),
    "load_checkpoint": lambda path, out: ckptfix.load_checkpoint(path),
    "load_state_dict": lambda path, out: ckptfix.load_state_dict(path),
    "load_into": lambda path, out: ckptfix.load_into(nn.Linear(2, 2), path),
    "load_optimizer": lambda path, out: ckptfix.load_optimizer(optim.SGD(nn.Linear(2, 2).parameters(), 0.1), path),
}
WRITES: dict[str, Verb] = {
    "strip_module": ckptfix.strip_module,
    "add_module": ckptfix.add_module,
    "unwrap": ckptfix.unwrap,
    "rename": lambda path, out: ckptfix.rename(path, out, mapping={"a": "b"}),
    "map_location": lambda path, out: ckptfix.map_location(path, out, "cpu"),
    "to_cpu": ckptfix.to_cpu,
    "convert": ckptfix.convert,
    "extract": ckptfix.extract,
    "sanitize": ckptfix.sanitize,
    "slim": ckptfix.slim,
    "repair": ckptfix.repair,
    "match": lambda path, out: ckptfix.match(path, out, like=path),
}


def sound(folder: Path) -> Path:
    pickle = assemble(("PROTO", 2), *state_dict_ops({"w": Tensor("0", (1,), 1)}), "STOP")
    return written(folder / "sound.pth", torch_zip(pickle, [bytes(4)]))


@pytest.mark.parametrize("verb", [*READS.items(), *WRITES.items()], ids=lambda item: item[0])
def test_a_file_that_is_not_there(verb: tuple[str, Verb], tmp_path: Path) -> None:
    missing = tmp_path / "missing.pth"
    with pytest.raises(FileNotFoundError) as caught:
        verb[1](missing, tmp_path / "out.pth")
    error = caught.value
    assert isinstance(error, NoSuchFile) and isinstance(error, ckptfix.CkptfixError)
    assert str(error) == f"{missing}: no such file or folder"
    assert (error.errno, error.filename, error.path) == (errno.ENOENT, str(missing), str(missing))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("like", ["match", "doctor", "repair", "fill_from"])
def test_a_model_that_is_not_there(like: str, tmp_path: Path) -> None:
    path, missing, out = sound(tmp_path), str(tmp_path / "missing.pth"), tmp_path / "out.pth"
    with pytest.raises(NoSuchFile, match="no such file or folder") as caught:
        if like == "match":
            ckptfix.match(path, out, like=missing)
        elif like == "doctor":
            ckptfix.doctor(path, like=missing)
        elif like == "repair":
            ckptfix.repair(path, out, like=missing)
        else:
            ckptfix.repair(path, out, fill_from=missing)
    assert caught.value.path == missing
    assert not out.exists()


@pytest.mark.parametrize("verb", [*READS.items(), *WRITES.items()], ids=lambda item: item[0])
@pytest.mark.parametrize("wrong", [3, None, {"a": 1}])
def test_a_path_of_another_type(verb: tuple[str, Verb], wrong: object, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="must be the name of a file") as caught:
        verb[1](wrong, tmp_path / "out.pth")
    assert isinstance(caught.value, WrongType) and isinstance(caught.value, ckptfix.CkptfixError)
    assert type(wrong).__name__ in str(caught.value)


@pytest.mark.parametrize("verb", [row for row in WRITES.items() if row[0] != "repair"], ids=lambda item: item[0])
def test_an_output_of_another_type(verb: tuple[str, Verb], tmp_path: Path) -> None:
    with pytest.raises(WrongType, match="the output must be the name of a file"):
        verb[1](sound(tmp_path), 3)


def refused(*arguments: object, **options: object) -> Any:
    raise PermissionError(errno.EACCES, "Permission denied")


@pytest.mark.parametrize("verb", [*READS.items(), *WRITES.items()], ids=lambda item: item[0])
def test_a_file_that_may_not_be_read(verb: tuple[str, Verb], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = sound(tmp_path)
    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(PermissionError, match=r"(?i)permission denied") as caught:
        verb[1](path, tmp_path / "out.pth")
    error = caught.value
    assert isinstance(error, NotPermitted) and isinstance(error, ckptfix.CkptfixError)
    assert (error.errno, error.filename, error.path) == (errno.EACCES, str(path), str(path))
    assert str(error).lower() == f"{path}: permission denied".lower()


@pytest.mark.parametrize("name", WRITES)
def test_outputs_that_the_system_refuses(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, verb = sound(tmp_path), WRITES[name]
    (tmp_path / "there.pth").write_bytes(b"mine")
    (tmp_path / "folder").mkdir()
    for out, kind in {
        "there.pth": FileExistsError, "sound.pth": FileExistsError, "folder": IsADirectoryError,
        "none/out.pth": FileNotFoundError,
    }.items():  # fmt: skip
        with pytest.raises(kind) as caught:
            verb(path, tmp_path / out)
        assert isinstance(caught.value, ckptfix.CkptfixError) and str(tmp_path / out) in str(caught.value)
    monkeypatch.setattr(os, "access", lambda *arguments: False)
    with pytest.raises(PermissionError, match="cannot be written to") as closed:
        verb(path, tmp_path / "out.pth")
    assert isinstance(closed.value, WriteFailed) and closed.value.errno == errno.EACCES
    assert (tmp_path / "there.pth").read_bytes() == b"mine"


def test_a_full_disk_is_an_error_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = sound(tmp_path)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as caught:
        ckptfix.to_cpu(path, tmp_path / "out.pth")
    assert isinstance(caught.value, WriteFailed) and caught.value.errno == errno.ENOSPC
    assert [file.name for file in tmp_path.iterdir()] == ["sound.pth"]


def test_swapped_arguments_are_named(tmp_path: Path) -> None:
    path: Any = sound(tmp_path)
    model: Any = nn.Linear(2, 2)
    with pytest.raises(WrongType, match="the first argument is the model, the second the path"):
        ckptfix.load_into(path, model)
    optimizer: Any = optim.SGD(model.parameters(), 0.1)
    name: Any = str(path)
    with pytest.raises(WrongType, match="the first argument is the optimizer, the second the path"):
        ckptfix.load_optimizer(name, optimizer)


def test_a_model_of_another_type(tmp_path: Path) -> None:
    wrong: Any = {}
    with pytest.raises(WrongType, match=r"not a torch\.nn\.Module but a dict"):
        ckptfix.load_into(wrong, sound(tmp_path))
    with pytest.raises(TypeError, match="not an optimizer but a dict"):
        ckptfix.load_optimizer(wrong, sound(tmp_path))
