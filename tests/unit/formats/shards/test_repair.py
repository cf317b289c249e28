"""Repair of a folder of shards: what is intact of each, and an index that is right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from sharded import index_of, load, nbytes, parted, same, state, write, write_index

import ckptfix
from ckptfix.cli import commands
from ckptfix.errors import CkptfixError, DamagedFile, Refused

INDEX = "model.safetensors.index.json"


@pytest.fixture(params=["safetensors", "bin"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def sound(folder: Path) -> bool:
    return {row.id for row in ckptfix.doctor(folder).findings} <= {"no-checksums", "no-format-metadata"}


def test_a_sound_folder_is_copied(tmp_path: Path) -> None:
    folder = write(tmp_path / "in", parted(state(), 3))
    done = ckptfix.repair(folder, tmp_path / "out")
    assert done.exit_code == 0 and bytes_of(tmp_path / "out") == bytes_of(folder)
    assert done.lines[0].startswith("kept all 12 tensors")


@pytest.mark.slow
@pytest.mark.parametrize("trouble", ["lost", "damaged", "stale", "confused", "total"])
def test_the_index_is_written_anew(tmp_path: Path, kind: str, trouble: str) -> None:
    folder = write(tmp_path / "in", parted(state(), 3), kind=kind)
    right = index_of(folder)
    (index,) = folder.glob("*.index.json")
    document = json.loads(index.read_text())
    names = list(document["weight_map"])
    if trouble == "lost":
        index.unlink()
    elif trouble == "damaged":
        index.write_text(index.read_text()[:-40])
    elif trouble == "stale":
        del document["weight_map"][names[0]]
    elif trouble == "confused":
        shards = list(document["weight_map"].values())
        document["weight_map"] = dict(zip(names, shards[1:] + shards[:1], strict=True))
    else:
        document["metadata"]["total_size"] = 3
    if trouble not in ("lost", "damaged"):
        index.write_text(json.dumps(document))
    done = ckptfix.repair(folder, tmp_path / "out")
    assert done.exit_code == 0 and not done.losses
    assert index_of(tmp_path / "out") == right
    assert [path.name for path in (tmp_path / "out").glob("*.index.json")] == [index.name]
    assert same(load(tmp_path / "out"), state()) and sound(tmp_path / "out")
    assert (tmp_path / "out" / "config.json").is_file()
    files = {name: data for name, data in bytes_of(folder).items() if "-of-" in name}
    if kind == "safetensors":
        assert files.items() <= bytes_of(tmp_path / "out").items()


def test_the_index_of_a_variant_has_its_name(tmp_path: Path) -> None:
    folder = write(tmp_path / "in", parted(state(2), 2), variant="fp16")
    (folder / "model.safetensors.index.fp16.json").unlink()
    ckptfix.repair(folder, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors.index.fp16.json").is_file()
    assert same(load(tmp_path / "out"), state(2))


@pytest.mark.parametrize("damage", ["gone", "page", "cut"])
def test_what_is_intact_of_the_shards_is_kept_and_the_rest_named(tmp_path: Path, kind: str, damage: str) -> None:
    rows = state(6)
    folder = write(tmp_path / "in", parted(rows, 3), kind=kind)
    shard = next(folder.glob("*-00002-of-*"))
    inside = list(parted(rows, 3)[1])
    if damage == "gone":
        shard.unlink()
    elif damage == "page":
        shard.write_bytes(b"<html>not found</html>")
    else:
        data = shard.read_bytes()
        last = rows[inside[2]].numpy().tobytes()
        shard.write_bytes(data[: data.index(last) + 5])
    done = ckptfix.repair(folder, tmp_path / "out")
    lost = {loss.name for loss in done.losses}
    assert done.exit_code == 3 and lost and lost <= set(inside)
    if damage != "cut":
        assert lost == set(inside)
    left = {name: value for name, value in rows.items() if name not in lost}
    assert same(load(tmp_path / "out"), left) and sound(tmp_path / "out")
    assert index_of(tmp_path / "out")["metadata"]["total_size"] == nbytes(left)
    assert {row.where for row in done.findings if row.id == "lost"} == lost


def test_lost_tensors_are_filled(tmp_path: Path) -> None:
    rows = state(6)
    folder = write(tmp_path / "in", parted(rows, 3))
    shard = folder / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-40])
    torch.save(rows, tmp_path / "older.pth")
    done = ckptfix.repair(folder, tmp_path / "out", fill_from=tmp_path / "older.pth")
    assert done.losses and all(loss.taken for loss in done.losses)
    assert same(load(tmp_path / "out"), rows)
    assert index_of(tmp_path / "out") == index_of(folder)


def test_of_a_tensor_in_two_shards_the_one_of_the_index_is_kept(tmp_path: Path, kind: str) -> None:
    one, two = parted(state(2), 2)
    folder = write(tmp_path / "in", [one, two | {"layers.0.bias": torch.zeros(3)}], kind=kind)
    (index,) = folder.glob("*.index.json")
    suffix = "safetensors" if kind == "safetensors" else "bin"
    name = "model" if kind == "safetensors" else "pytorch_model"
    document = json.loads(index.read_text())
    document["weight_map"]["layers.0.bias"] = f"{name}-00001-of-00002.{suffix}"
    index.write_text(json.dumps(document))
    done = ckptfix.repair(folder, tmp_path / "out")
    assert done.exit_code == 0 and same(load(tmp_path / "out"), state(2)) and sound(tmp_path / "out")
    (note,) = [row for row in done.findings if row.id == "doubled-tensors"]
    assert note.where == "layers.0.bias" and "00002" in note.message


def test_a_tensor_that_only_the_index_has_is_lost(tmp_path: Path) -> None:
    folder = write(tmp_path / "in", parted(state(2), 2))
    document = json.loads((folder / INDEX).read_text())
    document["weight_map"]["head"] = "model-00001-of-00002.safetensors"
    (folder / INDEX).write_text(json.dumps(document))
    done = ckptfix.repair(folder, tmp_path / "out")
    assert done.exit_code == 3 and [loss.name for loss in done.losses] == ["head"]
    assert same(load(tmp_path / "out"), state(2)) and sound(tmp_path / "out")


def test_a_name_out_of_the_folder_is_lost_and_not_opened(tmp_path: Path) -> None:
    folder = write(tmp_path / "in", parted(state(2), 2))
    save_file({"evil": torch.ones(1)}, tmp_path / "x.safetensors")
    document = json.loads((folder / INDEX).read_text())
    document["weight_map"]["evil"] = "../x.safetensors"
    (folder / INDEX).write_text(json.dumps(document))
    done = ckptfix.repair(folder, tmp_path / "out")
    (loss,) = done.losses
    assert loss.name == "evil" and "leads out of its folder" in loss.reason
    assert same(load(tmp_path / "out"), state(2))


def test_of_slices_the_whole_tensors_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    said = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [2]}, "v": {"saved_offsets": [0]}})}
    rows = {"w": torch.ones(2), "v": torch.ones(3)}
    save_file(rows, folder / "shard-00002-model-00001-of-00001.safetensors", metadata=said)
    done = ckptfix.repair(folder, tmp_path / "out")
    assert done.exit_code == 3 and done.kept == ("v",) and [loss.name for loss in done.losses] == ["w"]
    assert same(ckptfix.load_state_dict(tmp_path / "out"), {"v": torch.ones(3)})


def test_a_slice_that_is_cut_short_is_lost(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for rank in (1, 2):
        path = folder / f"shard-{rank:05d}-model-00001-of-00001.safetensors"
        said = {name: {"saved_offsets": [2 * (rank - 1)]} for name in "vw"}
        rows = {"v": torch.full((2,), float(rank)), "w": torch.full((2,), float(rank))}
        save_file(rows, path, metadata={"DCP_SHARDING_INFO": json.dumps(said)})
    path.write_bytes(path.read_bytes()[:-3])
    done = ckptfix.repair(folder, tmp_path / "out")
    assert done.exit_code == 3 and done.kept == ("v",) and [loss.name for loss in done.losses] == ["w"]
    assert same(ckptfix.load_state_dict(tmp_path / "out"), {"v": torch.tensor([1.0, 1.0, 2.0, 2.0])})


def test_nothing_intact_is_an_error(tmp_path: Path) -> None:
    folder = write(tmp_path / "in", parted(state(2), 2))
    for path in folder.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(DamagedFile, match="none of its 4 tensors is intact"):
        ckptfix.repair(folder, tmp_path / "out")
    write_index(folder / "other.safetensors.index.json", {})
    with pytest.raises(Refused, match="2 checkpoint indexes"):
        ckptfix.repair(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command_and_where_it_writes(tmp_path: Path) -> None:
    folder = write(tmp_path / "in", parted(state(2), 2))
    (folder / INDEX).unlink()
    run = CliRunner().invoke
    looked = run(commands, ["repair", str(folder), "--check-only"])
    assert looked.exit_code == 0 and "all 4 tensors" in looked.output
    assert run(commands, ["repair", str(folder), str(tmp_path / "out")]).exit_code == 0
    assert same(load(tmp_path / "out"), state(2))
    with pytest.raises(CkptfixError, match="exists"):
        ckptfix.repair(folder, tmp_path / "out")
    with pytest.raises(CkptfixError, match="the output is the input"):
        ckptfix.repair(folder, folder, force=True)
    with pytest.raises(CkptfixError, match="the output is the input"):
        ckptfix.repair(tmp_path / "out" / INDEX, tmp_path / "out", force=True)
    (line,) = [row.text for row in ckptfix.doctor(folder).remedies if row.text and "repair" in row.text]
    assert line.startswith("ckptfix repair ")


@pytest.mark.parametrize("names", [("w0",), ()])
def test_an_index_that_leaves_out_a_shard_of_its_series_loses_nothing(tmp_path: Path, names: tuple[str, ...]) -> None:
    """Half of a series is listed, or nothing: no command writes the half, and repair lists the rest."""
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(2):
        save_file({f"w{number}": torch.ones(3)}, folder / f"model-0000{number + 1}-of-00002.safetensors")
    weight_map = dict.fromkeys(names, "model-00001-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert ckptfix.doctor(folder).exit_code() == 1
    for verb, out in ((ckptfix.convert, "out.safetensors"), (ckptfix.add_module, "out"), (ckptfix.slim, "out")):
        with pytest.raises(ckptfix.CkptfixError):
            verb(folder, tmp_path / out)
    done = ckptfix.repair(folder, tmp_path / "whole")
    assert done.exit_code in (0, 3)
    assert set(ckptfix.load_state_dict(tmp_path / "whole")) == {"w0", "w1"}


def test_an_index_of_another_number_of_shards_loses_nothing(tmp_path: Path) -> None:
    """The index sends a loader to a shard that is not there, and another one holds the tensor; a stray one is named."""
    folder = write(tmp_path / "in", parted(state(), 3))
    document = index_of(folder)
    name = next(iter(document["weight_map"]))
    document["weight_map"][name] = "model-00004-of-00004.safetensors"
    (index,) = folder.glob("*.index.json")
    index.write_text(json.dumps(document))
    save_file({"other.weight": torch.ones(3)}, folder / "model-00001-of-00002.safetensors")
    save_file({"other.weight": torch.ones(3)}, folder / "model.safetensors")
    done = ckptfix.repair(folder, tmp_path / "out")
    assert done.exit_code == 0 and not done.losses and same(load(tmp_path / "out"), state())
    notes = {note.where: note.message for note in done.findings}
    assert "model-00004-of-00004.safetensors is missing; model-00001-of-00003" in notes[name]
    for stray in ("model-00001-of-00002.safetensors", "model.safetensors"):
        assert notes[stray].endswith("left out") and not (tmp_path / "out" / stray).exists()
