"""A checkpoint of many files: the seam, proved by a format that only the tests have (`folders`)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from folders import FORMAT, INDEX
from safetensors.torch import load_file

import ckptfix
from ckptfix.checkpoint import Checkpoint, Drop, Edit, Plan
from ckptfix.cli import commands
from ckptfix.errors import DamagedFile, UnknownFormat, Unsupported, WouldOverwrite
from ckptfix.formats import FORMATS, detect, open_checkpoint
from ckptfix.ops import audit, writing
from ckptfix.ops.doctor import doctor

State = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def _offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, FORMAT.name, FORMAT)


def state() -> tuple[State, State]:
    """What the two files hold: each has a tie of its own, and both call their storages 0 and 1."""
    torch.manual_seed(0)
    one, two = torch.randn(4, 3), torch.randn(4, 3)
    first = {"module.embed.weight": one, "module.head.weight": one, "module.norm.weight": torch.randn(3)}
    second = {"module.body.weight": two, "module.body.view": two[1:], "module.body.bias": torch.randn(3)}
    return first, second


def made(folder: Path) -> tuple[Path, State]:
    folder.mkdir()
    first, second = state()
    torch.save(first, folder / "one.pth")
    torch.save(second, folder / "two.pth")
    (folder / INDEX).write_text(json.dumps({"files": ["one.pth", "two.pth"]}))
    return folder, first | second


def alike(found: State, wanted: State) -> bool:
    return list(found) == list(wanted) and all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_it_is_opened(tmp_path: Path) -> None:
    source, wanted = made(tmp_path / "in")
    assert detect(source) is FORMAT
    checkpoint = open_checkpoint(source)
    assert [entry.key for entry in checkpoint.entries] == list(wanted)
    assert [Path(mark.path).name for mark in checkpoint.files] == [INDEX, "one.pth", "two.pth"]
    assert checkpoint.size == sum(path.stat().st_size for path in source.iterdir())
    storages = [entry.storage for entry in checkpoint.entries if entry.storage is not None]
    assert {storage.key for storage in storages} == {"0", "1"}
    assert len({storage.identity for storage in storages}) == 4


def test_a_folder_of_no_format_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with pytest.raises(UnknownFormat):
        open_checkpoint(tmp_path / "other")


def test_it_is_inspected(tmp_path: Path) -> None:
    source, wanted = made(tmp_path / "in")
    found = ckptfix.inspect(source)
    assert (found.format, found.title, found.tensors) == ("pair", "a pair of files", 6)
    assert found.nbytes == (12 + 3 + 12 + 3) * 4
    assert found.parameters == sum(value.numel() for name, value in wanted.items() if "head" not in name)
    done = CliRunner().invoke(commands, ["inspect", str(source)])
    assert done.exit_code == 0
    assert "shares storage with module.embed.weight" in done.output
    assert "shares storage with module.body.weight" in done.output


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_it_is_converted_to_one_file(tmp_path: Path, suffix: str) -> None:
    source, wanted = made(tmp_path / "in")
    out = tmp_path / f"out{suffix}"
    done = ckptfix.convert(source, out)
    assert (done.exit_code, done.tensors, done.account.lost) == (0, 6, ())
    found = ckptfix.load_state_dict(out, strip=None)
    assert alike(found, wanted)
    places = {name: value.untyped_storage().data_ptr() for name, value in found.items()}
    assert places["module.embed.weight"] == places["module.head.weight"] != places["module.body.weight"]
    if suffix == ".safetensors":
        assert set(load_file(out)) == set(wanted) - {"module.head.weight"}
    else:
        assert alike(torch.load(out), wanted)


def test_it_is_converted_to_a_legacy_file(tmp_path: Path) -> None:
    source, wanted = made(tmp_path / "in")
    ckptfix.convert(source, tmp_path / "out.pth", to="legacy")
    assert alike(torch.load(tmp_path / "out.pth"), wanted)


def test_names_change_in_every_file(tmp_path: Path) -> None:
    source, wanted = made(tmp_path / "in")
    done = ckptfix.strip_module(source, tmp_path / "out")
    assert (done.exit_code, done.format, done.account.lost) == (0, "pair", ())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["one.pth", INDEX, "two.pth"]
    found = torch.load(tmp_path / "out" / "one.pth") | torch.load(tmp_path / "out" / "two.pth")
    assert alike(found, {name.removeprefix("module."): value for name, value in wanted.items()})
    assert found["embed.weight"].data_ptr() == found["head.weight"].data_ptr()
    assert detect(tmp_path / "out") is FORMAT
    names = [entry.key for entry in open_checkpoint(tmp_path / "out").entries]
    assert names == [name.removeprefix("module.") for name in wanted]


def test_its_weights_are_loaded_and_extracted(tmp_path: Path) -> None:
    source, wanted = made(tmp_path / "in")
    assert alike(ckptfix.load_state_dict(source, strip=None), wanted)
    done = ckptfix.extract(source, tmp_path / "out.pth")
    assert done.tensors == 6 and alike(torch.load(tmp_path / "out.pth"), wanted)


def test_doctor_and_diff_look_at_every_file(tmp_path: Path) -> None:
    source, _ = made(tmp_path / "in")
    assert {finding.id for finding in doctor(source).findings} >= {"wrapped-names", "tied-tensors"}
    ckptfix.strip_module(source, tmp_path / "out")
    assert ckptfix.diff(source, tmp_path / "out", strip=["module"]).same
    torch.save({"module.body.weight": torch.zeros(4, 3)}, source / "two.pth")
    assert not ckptfix.diff(source, tmp_path / "out", strip=["module"]).same


def test_a_tensor_that_an_edit_loses_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, _ = made(tmp_path / "in")

    def forgetful(checkpoint: Checkpoint, edits: Sequence[Edit], dest: str) -> Plan:
        return FORMAT.plan_edit(checkpoint, [Drop("", ("module.body.bias",))], dest)

    monkeypatch.setitem(FORMATS, FORMAT.name, replace(FORMAT, plan_edit=forgetful))
    done = ckptfix.strip_module(source, tmp_path / "out")
    assert (done.exit_code, done.account.lost) == (3, ("module.body.bias",))


@pytest.mark.parametrize("name", ["one.pth", "two.pth", INDEX])
def test_no_file_of_it_may_change_meanwhile(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source, _ = made(tmp_path / "in")
    real = audit.audit

    def late(*args: object) -> object:
        os.utime(source / name, ns=(1, 1))
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(writing, "audit", late)
    with pytest.raises(DamagedFile, match="changed while it was read") as caught:
        ckptfix.strip_module(source, tmp_path / "out")
    assert caught.value.path == str(source / name)
    assert not (tmp_path / "out").exists()


def test_the_destination_is_of_the_kind_that_is_written(tmp_path: Path) -> None:
    source, _ = made(tmp_path / "in")
    (tmp_path / "file").write_text("")
    with pytest.raises(Unsupported, match="is a file, not a folder"):
        ckptfix.strip_module(source, tmp_path / "file")
    with pytest.raises(Unsupported, match="is a folder, not a file"):
        ckptfix.convert(source, source, to="zip")
    with pytest.raises(WouldOverwrite, match="the output is the input"):
        ckptfix.strip_module(source, source, force=True)
    (tmp_path / "there").mkdir()
    with pytest.raises(WouldOverwrite, match="exists"):
        ckptfix.strip_module(source, tmp_path / "there")
    ckptfix.strip_module(source, tmp_path / "there", force=True)
    assert detect(tmp_path / "there") is FORMAT


def test_names_are_matched_to_a_model(tmp_path: Path) -> None:
    source, wanted = made(tmp_path / "in")
    torch.save({f"net.{name.removeprefix('module.')}": value for name, value in wanted.items()}, tmp_path / "like.pth")
    (tmp_path / "out").mkdir()
    done = ckptfix.match(source, tmp_path / "out", like=tmp_path / "like.pth", force=True)
    assert done.exit_code == 0
    names = [entry.key for entry in open_checkpoint(tmp_path / "out").entries]
    assert names == [f"net.{name.removeprefix('module.')}" for name in wanted]


@pytest.mark.parametrize("verb", [ckptfix.slim])
def test_a_verb_that_writes_an_object_anew_refuses_it(verb: Callable[..., object], tmp_path: Path) -> None:
    source, _ = made(tmp_path / "in")
    with pytest.raises(Unsupported):
        verb(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_dry_run_writes_no_folder(tmp_path: Path) -> None:
    source, _ = made(tmp_path / "in")
    done = ckptfix.strip_module(source, tmp_path / "out", dry_run=True)
    assert len(done.plan.files) == 3 and not (tmp_path / "out").exists()
