"""Every verb in Python names a file that is not there, and an argument of the wrong type, in one way."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from builders import Tensor, assemble, state_dict_ops, torch_zip, written
from file_commands import WRITERS, in_python
from torch import nn, optim

import ckptfix
from ckptfix.arguments import _wanted
from ckptfix.command_table import COMMANDS
from ckptfix.errors import NoSuchFile, NotPermitted, WriteFailed, WrongType
from ckptfix.formats import FORMATS
from ckptfix.formats.target import FormatName

Verb = Callable[[Any, Any], object]

READS: dict[str, Verb] = {
    "open_checkpoint": lambda path, out: ckptfix.open_checkpoint(path),
    "inspect": lambda path, out: ckptfix.inspect(path),
    "doctor": lambda path, out: ckptfix.doctor(path),
    "diff": lambda path, out: ckptfix.diff(path, path),
    "digest": lambda path, out: ckptfix.digest(path),
    "stats": lambda path, out: ckptfix.stats(path),
    "load_checkpoint": lambda path, out: ckptfix.load_checkpoint(path),
    "load_state_dict": lambda path, out: ckptfix.load_state_dict(path),
    "load_into": lambda path, out: ckptfix.load_into(nn.Linear(2, 2), path),
    "load_optimizer": lambda path, out: ckptfix.load_optimizer(optim.SGD(nn.Linear(2, 2).parameters(), 0.1), path),
}
WRITES: dict[str, Verb] = {COMMANDS[name].function: in_python(name) for name in WRITERS if name != "fix"}


PUBLIC = sorted({*READS, *WRITES, "fix"} - {"open_checkpoint"})
UNCHECKED = {"model", "optimizer", "map_location", "path", "verify_against"}
"""Arguments that only the function itself can judge; the first of a loader may be swapped with the second."""


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
    if verb[0] == "diff" and isinstance(wrong, dict):
        wrong = 3.0  # it takes a state dict
    with pytest.raises(TypeError, match="must be the name of a file") as caught:
        verb[1](wrong, tmp_path / "out.pth")
    assert isinstance(caught.value, WrongType) and isinstance(caught.value, ckptfix.CkptfixError)
    assert ("None" if wrong is None else type(wrong).__name__) in str(caught.value)


@pytest.mark.parametrize("verb", [row for row in WRITES.items() if row[0] != "repair"], ids=lambda item: item[0])
def test_an_output_of_another_type(verb: tuple[str, Verb], tmp_path: Path) -> None:
    with pytest.raises(WrongType, match=r"`dest` must be the name of a file .*, not int: 3"):
        verb[1](sound(tmp_path), 3)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_function_says_which_argument_is_wrong(name: str, tmp_path: Path) -> None:
    """Each argument whose annotation is known is given something else; nothing is read, and nothing written."""
    function = getattr(ckptfix, name)
    good: dict[str, Any] = {
        row.name: tmp_path / "absent.pth"
        for row in signature(function).parameters.values()
        if row.default is row.empty and row.name not in ("model", "optimizer", "target")
    }
    if name == "load_into":
        good["model"] = nn.Linear(1, 1)
    elif name == "load_optimizer":
        good["optimizer"] = optim.SGD(nn.Linear(1, 1).parameters(), 0.1)
    elif name == "map_location":
        good["target"] = "cpu"
    elif name == "cast":
        good["to"] = "float16"
    _, wanted = _wanted(function)
    assert set(wanted) >= set(signature(function).parameters) - UNCHECKED, "an annotation that is not known"
    for argument, kinds in wanted.items():
        wrong = next(value for value in (object(), 3, "x") if not any(kind.takes(value) for kind in kinds))
        with pytest.raises(WrongType) as caught:
            function(**{**good, argument: wrong})
        message = str(caught.value)
        assert f"{name}(): `{argument}` must be " in message and f", not {type(wrong).__name__}" in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        (io.BytesIO(b""), "write the stream to a file first"),
        (["a.pth", "b.pth"], "once for each file"),
        (b"a.pth", "os.fsdecode"),
        ({"w": 1}, "save it first"),
        (nn.Linear(1, 1), "save it first"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_to_do_instead_is_said(wrong: Any, hint: str, tmp_path: Path) -> None:
    for call in (lambda: ckptfix.inspect(wrong), lambda: ckptfix.strip_module(wrong, tmp_path / "out.pth")):
        with pytest.raises(WrongType, match=type(wrong).__name__) as caught:
            call()
        assert hint in str(caught.value.hint)


def test_what_is_right_passes(tmp_path: Path) -> None:
    path = sound(tmp_path)
    flag: Any = np.bool_(True)
    progress: list[tuple[int, int]] = []
    ckptfix.strip_module(str(path), tmp_path / "a.pth", at=None, dry_run=flag)
    ckptfix.rename(path, tmp_path / "b.pth", subs=[("w", "v")], progress=lambda done, all: progress.append((done, all)))
    ckptfix.convert([path], tmp_path / "c.pth", to="torch")
    number: Any = np.float32(0.5)
    assert ckptfix.diff(path, tmp_path / "c.pth", atol=number, strip=("module",)).same
    assert progress and not (tmp_path / "a.pth").exists()


def test_the_names_of_formats_are_those_that_can_be_written() -> None:
    assert set(get_args(FormatName)) - {"torch"} == {row.name for row in FORMATS.values() if row.writes}


def test_functions_keep_their_signatures() -> None:
    assert str(signature(ckptfix.to_cpu)).startswith("(source: 'StrPath', dest: 'StrPath | None' = None, *, ")
    assert ckptfix.slim.__name__ == "slim" and "no_optimizer: " in str(ckptfix.slim.__doc__)


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
    with pytest.raises(WrongType, match="the first argument must be the model and the second the path"):
        ckptfix.load_into(path, model)
    optimizer: Any = optim.SGD(model.parameters(), 0.1)
    name: Any = str(path)
    with pytest.raises(WrongType, match="the first argument must be the optimizer and the second the path"):
        ckptfix.load_optimizer(name, optimizer)


def test_a_model_of_another_type(tmp_path: Path) -> None:
    wrong: Any = {}
    with pytest.raises(WrongType, match=r"not a torch\.nn\.Module but a dict"):
        ckptfix.load_into(wrong, sound(tmp_path))
    with pytest.raises(TypeError, match="not an optimizer but a dict"):
        ckptfix.load_optimizer(wrong, sound(tmp_path))
