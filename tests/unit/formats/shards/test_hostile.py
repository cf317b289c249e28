"""Hostile folders: refused by name, and nothing outside of them opened."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from sharded import parted, same, state, write
from watch import Event, watched

import ckptfix
from ckptfix.errors import BadIndex, CkptfixError, WouldLoseData, WouldOverwrite
from ckptfix.formats import open_checkpoint


def names(events: list[Event]) -> list[str]:
    """The names that were opened."""
    return [os.fsdecode(name) for _, (name, *_) in events if isinstance(name, str | bytes)]


def test_the_watch_sees_what_is_opened(tmp_path: Path) -> None:
    folder = write(tmp_path / "in", parted(state(2), 2))
    with watched("open") as opened:
        open_checkpoint(folder)
    assert {Path(name).name for name in names(opened)} >= {
        "model.safetensors.index.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    }  # fmt: skip


def hostile(folder: Path, name: str) -> Path:
    """A sound folder, whose index also sends a loader to `name` for `evil`."""
    write(folder, parted(state(2), 2))
    index = folder / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    document["weight_map"]["evil"] = name
    index.write_text(json.dumps(document))
    return folder


@pytest.mark.parametrize(
    "name",
    [
        "../secret.safetensors",
        "sub/../../secret.safetensors",
        "{absolute}",
        "..\\secret.safetensors",
        "secret\0.safetensors",
        "link.safetensors",
        "linked/secret.safetensors",
        "",
        "x" * 3000,
        "\ud800.safetensors",
        "twin.safetensors",
        "pipe.safetensors",
        "sub",
        "closed/a.safetensors",
    ],
)
def test_a_name_that_leads_elsewhere_is_not_opened(tmp_path: Path, name: str) -> None:
    outside = tmp_path / "secret.safetensors"
    save_file({"evil": torch.ones(1)}, outside)
    folder = hostile(tmp_path / "in", name.format(absolute=outside) if name.startswith("{") else name)
    (folder / "sub").mkdir()
    (folder / "closed").mkdir()
    (folder / "link.safetensors").symlink_to(outside)
    (folder / "linked").symlink_to(tmp_path)
    (folder / "twin.safetensors").symlink_to("model-00001-of-00002.safetensors")
    os.mkfifo(folder / "pipe.safetensors")
    with watched("open") as opened:
        found = open_checkpoint(folder)
        assert len(found.entries) == 4
        (finding,) = [row for row in found.findings if row.id in ("shard-path", "missing-shard")]
        assert "evil" in finding.message or "are the same file" in finding.message
        with pytest.raises(WouldLoseData, match=r"evil|are the same file"):
            ckptfix.convert(folder, tmp_path / "out.safetensors")
        with pytest.raises(WouldLoseData, match=r"evil|are the same file"):
            ckptfix.add_module(folder, tmp_path / "out")
        assert finding.id in {row.id for row in ckptfix.doctor(folder).findings}
    resolved = {os.path.realpath(name) for name in names(opened) if name.startswith(str(tmp_path))}
    assert os.path.realpath(outside) not in resolved
    assert all(path.startswith(os.path.realpath(folder)) for path in resolved)
    assert not any("pipe" in name for name in names(opened))
    assert not (tmp_path / "out").exists()


def test_an_index_that_is_a_link_out_of_the_folder_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text('{"weight_map": {}}')
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "model.safetensors.index.json").symlink_to("../secret.json")
    with watched("open") as opened, pytest.raises(CkptfixError, match="leads out of its folder"):
        open_checkpoint(tmp_path / "in")
    assert not any("secret" in name or "index.json" in name for name in names(opened))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 200_000, "nested too deeply"),
        ('{"weight_map":' * 100_000, "nested too deeply"),
        ('{"weight_map": {"a": ' + "9" * 10_000 + "}}", "not an index"),
        ('{"weight_map": {"a": "b"}} x', "not an index"),
        ("\0" * 100, "not an index"),
        ("\xff", "no weight_map|not an index"),
        ('{"weight_map": {"a": "' + "b" * 5000 + '"}}', "has 5,000 characters"),
        ('{"weight_map": {"a": "b", "a": "c"}}', "twice"),
        ('{"weight_map": null}', "no weight_map"),
        ('{"weight_map": {"a": ["b"]}}', "no weight_map"),
        ("", "not an index"),
    ],
)
def test_an_index_that_is_none_is_one_error(tmp_path: Path, text: str, words: str) -> None:
    folder = write(tmp_path / "in", parted(state(2), 2))
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(BadIndex, match=words) as caught:
        open_checkpoint(folder)
    assert len(str(caught.value)) < 1000
    assert ckptfix.doctor(folder).exit_code() == 1


@pytest.mark.slow
def test_an_index_beyond_measure_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "in", parted(state(2), 2))
    index = folder / "model.safetensors.index.json"
    with index.open("wb") as file:
        file.truncate(1 << 36)
    with pytest.raises(BadIndex, match="bytes; the limit is"):
        open_checkpoint(folder)
    index.write_text(json.dumps({"weight_map": {str(number): f"{number}.safetensors" for number in range(20_000)}}))
    with watched("open") as opened, pytest.raises(BadIndex, match="the index names 20,000 files"):
        open_checkpoint(folder)
    assert {Path(name).name for name in names(opened)} <= {"model.safetensors.index.json"}
    monkeypatch.setattr("ckptfix.formats.shards.index.MAX_NAMES", 5000)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(map(str, range(5001)), "a.safetensors")}))
    with pytest.raises(BadIndex, match="the index has 5,001 keys"):
        open_checkpoint(folder)


def test_numbers_beyond_measure_are_not_counted_out(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    save_file(state(1), tmp_path / "in" / "model-00001-of-999999.safetensors")
    assert len(list(open_checkpoint(tmp_path / "in").findings)) < 5


def test_names_like_those_of_shards_in_a_plain_folder(tmp_path: Path) -> None:
    """A folder of one file that only happens to be called like a shard is still read."""
    (tmp_path / "in").mkdir()
    save_file(state(1), tmp_path / "in" / "model-00001-of-00001.safetensors")
    assert same(ckptfix.load_state_dict(tmp_path / "in"), state(1))


def test_a_huge_tensor_of_slices_takes_no_memory(tmp_path: Path) -> None:
    said = json.dumps({"w": {"saved_offsets": [1 << 60, 1 << 60]}})
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "shard-00001-model-00001-of-00001.safetensors"
    save_file({"w": torch.ones(1, 1)}, path, metadata={"DCP_SHARDING_INFO": said})
    assert [row.id for row in open_checkpoint(tmp_path / "in").findings] == ["missing-slices"]
    with pytest.raises(WouldLoseData, match="no chunk holds rows"):
        ckptfix.convert(tmp_path / "in", tmp_path / "out.pth")


@pytest.mark.parametrize("where", ["folder", "shard"])
def test_what_may_not_be_read_is_one_error(tmp_path: Path, where: str) -> None:
    if os.geteuid() == 0:
        pytest.skip("the superuser may read all")
    folder = write(tmp_path / "in", parted(state(2), 2))
    path = folder if where == "folder" else folder / "model-00001-of-00002.safetensors"
    path.chmod(0)
    try:
        with pytest.raises(CkptfixError):
            ckptfix.convert(folder, tmp_path / "out.pth")
    finally:
        path.chmod(0o755)


@pytest.mark.parametrize("count", [2, 200, 99999])
def test_one_shard_of_many_without_an_index_is_not_the_whole(tmp_path: Path, count: int) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    save_file({"w": torch.ones(2)}, folder / f"model-00001-of-{count:05d}.safetensors")
    with pytest.raises(WouldLoseData, match="is missing"):
        ckptfix.convert(folder, tmp_path / "out.safetensors")
    assert "missing-shard" in {finding.id for finding in ckptfix.doctor(folder).findings}


def test_a_torch_shard_whose_pickle_is_not_as_it_was_written(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    path = folder / "pytorch_model-00001-of-00001.bin"
    torch.save({"weight": torch.ones(2)}, path)
    raw = path.read_bytes()
    assert raw.count(b"weight") == 1
    path.write_bytes(raw.replace(b"weight", b"weighs"))
    with pytest.raises(CkptfixError, match="CRC-32"):
        ckptfix.convert(folder, tmp_path / "out.pth")


def test_a_folder_that_the_input_is_in_is_no_output(tmp_path: Path) -> None:
    folder = tmp_path / "above" / "in"
    folder.mkdir(parents=True)
    save_file({"module.w": torch.ones(2)}, folder / "model-00001-of-00001.safetensors")
    for dest in (tmp_path / "above", folder):
        with pytest.raises(WouldOverwrite, match="the input"):
            ckptfix.strip_module(folder, dest, force=True)
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "above", folder, folder / "model-00001-of-00001.safetensors"]


@pytest.mark.parametrize("keys", [("model", "model"), (0, 0)])
def test_shards_of_torch_files_with_one_key_do_not_hide_each_other(tmp_path: Path, keys: tuple[object, ...]) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for number, key in enumerate(keys, 1):
        value = torch.ones(number) if isinstance(key, int) else {f"w{number}": torch.ones(number)}
        torch.save({key: value}, folder / f"x-{number:05d}-of-00002.pt")
    with pytest.raises(CkptfixError, match="several shards hold"):
        ckptfix.convert(folder, tmp_path / "out.pth")


@pytest.mark.parametrize("front", ["./", ".//", "././"])
def test_a_path_that_begins_with_the_folder_itself_is_the_same_file(tmp_path: Path, front: str) -> None:
    folder = write(tmp_path / "in", parted(state(2), 2))
    index = folder / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    document["weight_map"] = {name: front + shard for name, shard in document["weight_map"].items()}
    index.write_text(json.dumps(document))
    same(ckptfix.load_state_dict(folder), state(2))
    assert not {"extra-shard", "missing-tensors", "shard-path"} & {row.id for row in ckptfix.doctor(folder).findings}
    ckptfix.convert(folder, tmp_path / "copy", to="hf")
    assert (tmp_path / "copy" / index.name).read_bytes() == index.read_bytes(), "an index that is right is copied"
    assert not ckptfix.repair(folder, tmp_path / "out").losses


def test_a_tensor_that_is_not_in_such_a_file_is_missing(tmp_path: Path) -> None:
    folder = hostile(tmp_path / "in", "./model-00001-of-00002.safetensors")
    with pytest.raises(WouldLoseData, match="evil"):
        ckptfix.convert(folder, tmp_path / "out.safetensors")


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_an_index_in_the_place_of_a_shard_costs_what_it_should_hold(tmp_path: Path, length: int) -> None:
    """An index that names itself, or one that names it, and so on: a circle of `length`."""
    others = [f"other{number}.index.json" for number in range(1, length)]
    folder = hostile(tmp_path / "in", others[0] if others else "model.safetensors.index.json")
    for own, following in pairwise([*others, "model.safetensors.index.json"]):
        (folder / own).write_text(json.dumps({"weight_map": {"evil": following}}))
    index = folder / "model.safetensors.index.json"
    done = ckptfix.repair(index, tmp_path / "out")
    assert [loss.name for loss in done.losses] == ["evil"] and "is an index" in done.losses[0].reason
    same(ckptfix.load_state_dict(tmp_path / "out"), state(2))
    findings = {row.id: row for row in ckptfix.doctor(index).findings}
    assert findings["shard-path"].fix is not None and findings["shard-path"].fix.startswith("ckptfix repair")
