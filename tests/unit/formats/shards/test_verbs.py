"""Verbs that work on each shard by itself, and what reads a folder beside the edits."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from sharded import load, nbytes, parted, same, state, write

import ckptfix
from ckptfix.cli import commands
from ckptfix.errors import CkptfixError, Unsupported
from ckptfix.formats import open_checkpoint


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_slim_cuts_what_no_tensor_of_a_torch_shard_uses(tmp_path: Path) -> None:
    rows = {"a": torch.zeros(1000, 4)[0], "b": torch.ones(2), "c": torch.ones(2)}
    folder = write(tmp_path / "in", [{"a": rows["a"]}, {"b": rows["b"], "c": rows["c"]}], kind="bin")
    done = ckptfix.slim(folder, tmp_path / "out", dedupe=True)
    assert (done.exit_code, done.account.lost, done.compacted, done.tied) == (0, (), 1, 1)
    assert done.saved["unused storage"] == 999 * 16
    assert same(load(tmp_path / "out"), rows)
    assert (tmp_path / "out" / "config.json").is_file()
    again = ckptfix.slim(tmp_path / "out", tmp_path / "again")
    assert "nothing to do" in str(again) and bytes_of(tmp_path / "again") == bytes_of(tmp_path / "out")


def test_slim_cuts_holes_of_safetensors_shards(tmp_path: Path) -> None:
    rows = state(4)
    folder = write(tmp_path / "in", parted(rows, 2))
    shard = folder / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes() + bytes(999))
    done = ckptfix.slim(folder, tmp_path / "out")
    assert done.exit_code == 0 and done.saved == {"unused storage": 999}
    assert same(load(tmp_path / "out"), rows)
    with pytest.raises(Unsupported, match="every tensor has its own bytes"):
        ckptfix.slim(folder, tmp_path / "no", dedupe=True)


def test_sanitize_makes_every_torch_shard_plain(tmp_path: Path) -> None:
    rows = state(4)
    one, two = parted(rows, 2)
    folder = write(tmp_path / "in", [one, two], kind="bin")
    torch.save({**two, "args": argparse.Namespace(lr=1.0)}, folder / "pytorch_model-00002-of-00002.bin")
    assert ckptfix.doctor(folder).exit_code() == 1
    done = ckptfix.sanitize(folder, tmp_path / "out")
    assert done.exit_code == 0 and sum(done.changes.values()) == 1
    second = torch.load(tmp_path / "out" / "pytorch_model-00002-of-00002.bin", weights_only=True)
    assert second.pop("args") == {"lr": 1.0} and same(second, two)
    first = "pytorch_model-00001-of-00002.bin"
    assert (tmp_path / "out" / first).read_bytes() == (folder / first).read_bytes()
    assert "nothing to do" in ckptfix.sanitize(write(tmp_path / "st", parted(rows, 2)), tmp_path / "same").lines[0]


def test_the_command_that_doctor_prints_for_a_folder_runs(tmp_path: Path) -> None:
    rows = state(2)
    folder = write(tmp_path / "in", [{"a": torch.ones(1)}, {**rows}], kind="bin")
    torch.save({**rows, "args": argparse.Namespace(lr=1.0)}, folder / "pytorch_model-00002-of-00002.bin")
    lines = [line for row in ckptfix.doctor(folder).remedies for line in row.commands]
    (sanitize,) = {line for line in lines if line[1] == "sanitize"}
    assert CliRunner().invoke(commands, list(sanitize[1:])).exit_code == 0
    assert ckptfix.doctor(sanitize[-1]).exit_code() == 0


def test_values_beside_the_tensors_are_kept_or_named(tmp_path: Path) -> None:
    rows = state(2)
    folder = write(tmp_path / "in", parted(rows, 2), kind="bin")
    torch.save({**parted(rows, 2)[1], "step": 7}, folder / "pytorch_model-00002-of-00002.bin")
    assert dict(open_checkpoint(folder).values()) == {"step": 7}
    ckptfix.convert(folder, tmp_path / "out.pth")
    found = torch.load(tmp_path / "out.pth", weights_only=True)
    assert found.pop("step") == 7 and same(found, rows)
    done = ckptfix.convert(folder, tmp_path / "out.safetensors")
    assert done.left == ("step",) and done.exit_code == 0
    taken = ckptfix.extract(folder, tmp_path / "taken.pth")
    assert "step" in taken.left and same(torch.load(tmp_path / "taken.pth"), rows)


def test_versions_of_modules_are_joined(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    whole = model.state_dict()
    names = list(whole)
    folder = write(tmp_path / "in", parted(dict(whole), 2), kind="bin")
    for number, own in enumerate((names[:4], names[4:]), 1):
        part = type(whole)((name, whole[name]) for name in own)
        part._metadata = whole._metadata  # type: ignore[attr-defined]
        torch.save(part, folder / f"pytorch_model-{number:05d}-of-00002.bin")
    done = ckptfix.add_module(folder, tmp_path / "out")
    assert done.exit_code == 0
    ckptfix.convert(tmp_path / "out", tmp_path / "out.pth")
    found = torch.load(tmp_path / "out.pth", weights_only=False)
    assert found._metadata["module.1"] == {"version": 2}
    assert same(dict(found), {f"module.{name}": value for name, value in whole.items()})


def test_a_model_may_be_given_as_a_folder_or_an_index(tmp_path: Path) -> None:
    rows = state(3)
    folder = write(tmp_path / "in", parted(rows, 2))
    torch.save({f"net.{name}": value for name, value in rows.items()}, tmp_path / "other.pth")
    for like in (folder, folder / "model.safetensors.index.json"):
        done = ckptfix.match(tmp_path / "other.pth", tmp_path / "out.pth", like=like, force=True)
        assert done.exit_code == 0 and same(torch.load(tmp_path / "out.pth"), rows)
    assert ckptfix.doctor(tmp_path / "out.pth", like=folder).exit_code() == 0


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_diff_names_what_differs(tmp_path: Path, kind: str) -> None:
    rows = state(3)
    folder = write(tmp_path / "in", parted(rows, 2), kind=kind)
    rows["layers.2.weight"] = rows["layers.2.weight"] + 1
    rows["more"] = torch.ones(1)
    save_file(rows, tmp_path / "other.safetensors")
    found = ckptfix.diff(folder, tmp_path / "other.safetensors")
    assert not found.same
    shown = CliRunner().invoke(commands, ["diff", str(folder), str(tmp_path / "other.safetensors")])
    assert shown.exit_code == 1 and "layers.2.weight" in shown.output and "more" in shown.output


def test_inspect_says_what_is_missing(tmp_path: Path) -> None:
    folder = write(tmp_path / "in", parted(state(4), 2))
    (folder / "model-00002-of-00002.safetensors").unlink()
    shown = CliRunner().invoke(commands, ["inspect", str(folder)])
    assert shown.exit_code == 0
    assert "Hugging Face shards" in shown.output and "model-00002-of-00002.safetensors is missing" in shown.output


def test_slices_of_one_rank_lead_to_their_folder(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for rank in (1, 2):
        path = tmp_path / "in" / f"shard-{rank:05d}-model-00001-of-00001.safetensors"
        said = {"DCP_SHARDING_INFO": f'{{"w": {{"saved_offsets": [{rank - 1}]}}}}'}
        save_file({"w": torch.full((1,), float(rank))}, path, metadata=said)
    with pytest.raises(CkptfixError, match="is a slice") as caught:
        ckptfix.convert(path, tmp_path / "out.pth")
    assert f"ckptfix convert {tmp_path / 'in'} OUT.safetensors" in str(caught.value.hint)
    ckptfix.convert(tmp_path / "in", tmp_path / "out.safetensors")
    assert same(load_file(tmp_path / "out.safetensors"), {"w": torch.tensor([1.0, 2.0])})
    assert nbytes(load_file(tmp_path / "out.safetensors")) == 8
