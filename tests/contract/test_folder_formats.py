"""What every format of folders must do, whole and damaged: those of users, and two that only the tests have.

A format passes here by its `Format` alone: nothing above `ckptfix.formats` knows the two of the tests (`toy_folder`,
`folders`), and nothing there imports the others (tests/unit/test_layers.py).
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import folders
import pytest
import sharded
import torch
import toy_folder
from click.testing import CliRunner
from compare import assert_same_state
from conftest import in_turn
from file_commands import FORMS
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint as dcp

import ckptfix
from ckptfix.cli import commands
from ckptfix.errors import CkptfixError
from ckptfix.formats import FORMATS, detect, open_checkpoint

State = dict[str, torch.Tensor]


def state() -> State:
    torch.manual_seed(0)
    rows: State = {f"module.{n}.weight": torch.randn(4, 3 + n) for n in range(3)}
    return rows | {"module.0.bias": torch.randn(4).to(torch.bfloat16)}


def pieces(rows: State, folder: Path) -> None:
    folder.mkdir()
    listed = []
    for number, (name, value) in enumerate(rows.items()):
        file = f"tensor{number}.bin"
        (folder / file).write_bytes(bytes(value.contiguous().view(torch.uint8).flatten().tolist()))
        dtype = str(value.dtype).removeprefix("torch.")
        listed.append({"name": name, "dtype": dtype, "shape": list(value.shape), "file": file})
    (folder / toy_folder.INDEX).write_text(json.dumps({"pieces": listed}))


def pair(rows: State, folder: Path) -> None:
    folder.mkdir()
    for name, part in zip(("one.pth", "two.pth"), sharded.parted(rows, 2), strict=True):
        torch.save(part, folder / name)
    (folder / folders.INDEX).write_text(json.dumps({"files": ["one.pth", "two.pth"]}))


def distributed(rows: State, folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(rows, storage_writer=dcp.FileSystemWriter(folder, single_file_per_rank=False), no_dist=True)  # type: ignore[attr-defined]


MAKERS: dict[str, Callable[[State, Path], object]] = {
    "hf": lambda rows, folder: sharded.write(folder, sharded.parted(rows, 2)),
    "hf-bin": lambda rows, folder: sharded.write(folder, sharded.parted(rows, 2), kind="bin"),
    "dcp": distributed,
    "pair": pair,
    "pieces": pieces,
}

pytestmark = pytest.mark.parametrize("name", MAKERS)


@pytest.fixture(autouse=True)
def _offered(monkeypatch: pytest.MonkeyPatch) -> None:
    for format in (folders.FORMAT, toy_folder.FORMAT):
        monkeypatch.setitem(FORMATS, format.name, format)


@pytest.fixture
def source(name: str, tmp_path: Path) -> Path:
    MAKERS[name](state(), tmp_path / "in")
    return tmp_path / "in"


def said(*words: object) -> tuple[int, Any]:
    """The exit code of a command and its JSON; fails for an error that is not one of ours."""
    done = CliRunner().invoke(commands, [*map(str, words), "--json"])
    assert "a bug in ckptfix" not in done.output, (words, done.output)
    return done.exit_code, json.loads(done.stdout.partition("\n")[0] or "null")


def test_every_reader_reads_it(name: str, source: Path, tmp_path: Path) -> None:
    same = tmp_path / "same.safetensors"
    save_file(state(), same, metadata={"format": "pt"})
    assert open_checkpoint(source).format == name and detect(source).name == name.removesuffix("-bin")
    assert_same_state(ckptfix.load_state_dict(source, strip=None), state())
    model = torch.nn.ModuleList(torch.nn.Linear(3 + n, 4, bias=not n) for n in range(3))
    model[0].bias.data = model[0].bias.data.bfloat16()
    assert not ckptfix.load_into(model, source).missing
    assert torch.equal(model.state_dict()["2.weight"], state()["module.2.weight"])
    assert said("inspect", source)[1]["tensors"] == said("ls", source)[1]["tensors"] == 4
    code, told = said("doctor", source)
    assert code == 0 and "wrapped-names" in {row["id"] for row in told["findings"]}
    assert said("diff", source, same)[0] == 0
    for verb in ("digest", "stats"):
        here, there = ({row["name"]: row for row in said(verb, path)[1]["entries"]} for path in (source, same))
        assert here == there and len(here) == 4


def test_it_is_written_in_other_formats_and_its_own(name: str, source: Path, tmp_path: Path) -> None:
    done = ckptfix.convert(source, tmp_path / "out.safetensors")
    assert (done.exit_code, done.account.lost) == (0, ())
    assert_same_state(load_file(tmp_path / "out.safetensors"), state())
    if FORMATS[open_checkpoint(source).format].writes:
        assert ckptfix.convert(tmp_path / "out.safetensors", tmp_path / "again", to=name).exit_code == 0  # type: ignore[arg-type]
        assert_same_state(ckptfix.load_state_dict(tmp_path / "again", strip=None), state())


def test_names_are_edited(name: str, source: Path, tmp_path: Path) -> None:
    done = ckptfix.strip_module(source, tmp_path / "out")
    wanted = {key.removeprefix("module."): value for key, value in state().items()}
    assert (done.exit_code, done.format) == (0, open_checkpoint(source).format)
    assert_same_state(ckptfix.load_state_dict(tmp_path / "out"), wanted)


def test_tensors_are_edited(name: str, source: Path, tmp_path: Path) -> None:
    (tmp_path / "rules").write_text("module.1.weight -> turned | transpose\n")
    if not FORMATS[open_checkpoint(source).format].writes:
        with pytest.raises(CkptfixError):
            ckptfix.rename(source, tmp_path / "out", rules=tmp_path / "rules")
        return
    ckptfix.rename(source, tmp_path / "out", rules=tmp_path / "rules")
    found = ckptfix.load_state_dict(tmp_path / "out", strip=None)
    assert torch.equal(found.pop("turned"), state()["module.1.weight"].T) and len(found) == 3


DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: path.unlink(),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\1\2\3"),
}
READERS = ("inspect", "ls", "stats", "digest", "doctor")


def data_files(source: Path) -> list[Path]:
    return sorted(path for path in source.iterdir() if path.suffix in (".bin", ".pth", ".safetensors", ".distcp"))


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_and_the_rest_is_saved(name: str, source: Path, tmp_path: Path, damage: str) -> None:
    """A file that is longer may be whole: of that, only no value may be another."""
    DAMAGES[damage](data_files(source)[-1])
    codes = {verb: said(verb, source)[0] for verb in READERS}
    if damage != "longer":
        assert codes["doctor"] in (1, 2)
        with pytest.raises(CkptfixError):
            ckptfix.convert(source, tmp_path / "out.safetensors")
    if name == "pair":  # its reader refuses, where it could report
        return
    done = ckptfix.repair(source, tmp_path / "saved")
    kept = ckptfix.load_state_dict(tmp_path / "saved", strip=None)
    assert len(kept) > 1
    assert_same_state(kept, {key: state()[key] for key in kept})
    assert {loss.name for loss in done.losses} == set(state()) - set(kept)
    assert done.exit_code == (3 if done.losses else 0) and (done.losses or damage == "longer")
    save_file(state(), tmp_path / "older.safetensors")
    filled = ckptfix.repair(source, tmp_path / "filled", fill_from=tmp_path / "older.safetensors")
    if not any(loss.shape is None for loss in filled.losses):
        assert_same_state(ckptfix.load_state_dict(tmp_path / "filled", strip=None), state())


@pytest.mark.sampled(quick=2)
def test_its_index_may_be_anything(name: str, source: Path) -> None:
    if name == "pair":  # its reader trusts its index
        return
    index = next(path for path in source.iterdir() if path.suffix == ".json" or path.name == ".metadata")
    whole = index.read_bytes()
    outside = re.sub(rb"[\w-]+\.(bin|pth)", b"../up.bin", whole)
    for text in (b"", whole[: len(whole) // 2], b"{}", b"[" * 100_000, outside):
        index.write_bytes(text)
        for verb in (*READERS, "repair --check-only"):
            assert said(*verb.split(), source)[0] in range(4)


@pytest.mark.campaign
@pytest.mark.parametrize("damage", ["", *DAMAGES])
def test_every_command_ends_well(name: str, source: Path, tmp_path: Path, damage: str) -> None:
    save_file(state(), tmp_path / "other.safetensors")
    if damage:
        DAMAGES[damage](data_files(source)[0])
    forms = [*FORMS.values()]
    for number, form in enumerate(in_turn(forms, [*DAMAGES].index(damage), 2) if damage else forms):
        values = {"in": source, "other": tmp_path / "other.safetensors", "truth": tmp_path / "other.safetensors"}
        words = [word.format(**values, out=tmp_path / f"out{number}", at="") for word in form.words]
        done = CliRunner().invoke(commands, words)
        assert "a bug in ckptfix" not in done.output, (words, done.output)
