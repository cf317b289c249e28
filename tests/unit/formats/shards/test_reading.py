"""Sharded checkpoints, read: what they hold, and what index and shards say of each other."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from builders import Tensor, assemble, legacy, state_dict_ops
from conftest import ROOT
from safetensors.torch import load_file, save_file
from sharded import State, load, nbytes, parted, same, state, write, write_index

import ckptfix
from ckptfix.errors import BadIndex, CkptfixError, Refused, Unsupported, WouldLoseData
from ckptfix.formats import detect, open_checkpoint

FRAMEWORKS = ROOT.parent / "shared" / "frameworks"
KINDS = ["safetensors", "bin"]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def ids(folder: Path) -> set[str]:
    return {finding.id for finding in open_checkpoint(folder).findings}


def test_names_and_places_are_those_of_the_shards(tmp_path: Path, kind: str) -> None:
    wanted = state()
    folder = write(tmp_path / "in", parted(wanted, 3), kind=kind)
    assert detect(folder).name == "hf"
    found = open_checkpoint(folder)
    assert [entry.key for entry in found.entries] == list(wanted) or kind == "safetensors"
    assert {entry.key: (entry.dtype, entry.shape) for entry in found.entries} == {
        name: (str(value.dtype).removeprefix("torch."), tuple(value.shape)) for name, value in wanted.items()
    }
    assert {Path(entry.data.path).parent for entry in found.entries} == {folder}
    assert len({entry.data.path for entry in found.entries}) == 3
    assert not list(found.findings)
    assert {Path(mark.path).name for mark in found.files} == {
        path.name for path in folder.iterdir() if path.name != "config.json"
    }
    assert found.size == sum(mark.stamp.size for mark in found.files)


def test_no_tensor_byte_is_read_to_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptfix.io import source

    folder = write(tmp_path / "in", [{"a": torch.zeros(1 << 20)}, {"b": torch.zeros(1 << 20)}])
    read: list[int] = []
    plain = source.LocalFile._read

    def counted(self: source.LocalFile, offset: int, length: int) -> bytes:
        read.append(length)
        return plain(self, offset, length)

    monkeypatch.setattr(source.LocalFile, "_read", counted)
    assert len(open_checkpoint(folder).entries) == 2
    assert 0 < sum(read) < 20_000


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_one_file_is_made_of_them(tmp_path: Path, kind: str, suffix: str) -> None:
    wanted = state()
    folder = write(tmp_path / "in", parted(wanted, 4), kind=kind)
    done = ckptfix.convert(folder, tmp_path / f"out{suffix}")
    assert (done.exit_code, done.tensors, done.account.lost, done.left) == (0, 12, (), ())
    found = load_file(done.dest) if suffix == ".safetensors" else torch.load(done.dest, weights_only=True)
    assert same(found, wanted)
    assert ckptfix.diff(folder, done.dest).same


def test_the_index_may_be_named(tmp_path: Path, kind: str) -> None:
    wanted = state()
    folder = write(tmp_path / "in", parted(wanted, 2), kind=kind)
    (index,) = folder.glob("*.index.json")
    assert same(ckptfix.load_state_dict(index), wanted)
    assert ckptfix.inspect(index).tensors == len(wanted)
    done = ckptfix.add_module(index, tmp_path / "out")
    assert same(load(tmp_path / "out"), {f"module.{name}": value for name, value in wanted.items()})
    assert done.exit_code == 0
    with pytest.raises(CkptfixError, match="the output is the input"):
        ckptfix.strip_module(index, folder, force=True)


def test_of_several_indexes_one_is_to_be_named(tmp_path: Path) -> None:
    first, second = state(4), {name: value.half() for name, value in state(4).items()}
    folder = write(tmp_path / "in", parted(first, 2))
    write(folder, parted(second, 2), variant="fp16")
    with pytest.raises(Refused, match=r"2 checkpoint indexes: .*\.index\.fp16\.json, model\.safetensors\.index"):
        open_checkpoint(folder)
    assert same(ckptfix.load_state_dict(folder / "model.safetensors.index.json"), first)
    assert same(ckptfix.load_state_dict(folder / "model.safetensors.index.fp16.json"), second)


def test_an_index_of_another_framework_is_none(tmp_path: Path) -> None:
    wanted = state(2)
    folder = write(tmp_path / "in", parted(wanted, 2))
    write_index(folder / "tf_model.h5.index.json", {"a": "tf_model-00001-of-00001.h5"})
    assert same(ckptfix.load_state_dict(folder), wanted)


def test_without_an_index_the_numbers_are_followed(tmp_path: Path, kind: str) -> None:
    wanted = state()
    folder = write(tmp_path / "in", parted(wanted, 3), kind=kind, index=False)
    assert ids(folder) == {"no-index"}
    assert same(ckptfix.load_state_dict(folder), wanted)
    assert "no-index" in {finding.id for finding in ckptfix.doctor(folder).findings}
    assert ckptfix.doctor(folder).exit_code() == 1
    next(folder.glob("*-00002-of-00003.*")).unlink()
    assert ids(folder) == {"no-index", "missing-shard"}
    with pytest.raises(WouldLoseData, match="00002-of-00003"):
        ckptfix.convert(folder, tmp_path / "out.pth")


def test_without_an_index_a_tensor_of_two_shards_is_named(tmp_path: Path) -> None:
    first, *rest = parted(state(), 3)
    folder = write(tmp_path / "in", [first, {**rest[0], **first}, *rest[1:]], index=False)
    assert ids(folder) == {"no-index", "doubled-tensors"}
    next(folder.glob("*-00003-of-00003.*")).write_bytes(b"no checkpoint")
    assert ids(folder) == {"no-index", "doubled-tensors", "missing-shard"}


def test_without_an_index_shards_of_two_checkpoints_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "in", parted(state(2), 2), index=False)
    write(folder, parted(state(2), 2), index=False, name="other")
    with pytest.raises(Refused, match=r"shards of 2 checkpoints: model-00001-of-00002\.safetensors, other-00001"):
        open_checkpoint(folder)


@pytest.mark.parametrize("damage", ["gone", "cut", "text"])
@pytest.mark.parametrize("verb", ["convert", "strip", "load", "extract", "slim", "hf"])
def test_half_a_checkpoint_is_listed_and_not_written(tmp_path: Path, kind: str, damage: str, verb: str) -> None:
    wanted = state(6, "module.")
    folder = write(tmp_path / "in", parted(wanted, 3), kind=kind)
    shard = next(folder.glob("*-00002-of-00003.*"))
    lost = list(parted(wanted, 3)[1])
    if damage == "gone":
        shard.unlink()
    else:
        shard.write_bytes(shard.read_bytes()[:50] if damage == "cut" else b"<html>404</html>")
    found = open_checkpoint(folder)
    assert {entry.key for entry in found.entries} == set(wanted) - set(lost)
    (finding,) = [row for row in found.findings if row.id == "missing-shard"]
    assert finding.where == shard.name and lost[0] in finding.message and "1 more" in finding.message
    verbs: dict[str, Callable[[], object]] = {
        "convert": lambda: ckptfix.convert(folder, tmp_path / "out.safetensors"),
        "strip": lambda: ckptfix.strip_module(folder, tmp_path / "out"),
        "load": lambda: ckptfix.load_state_dict(folder),
        "extract": lambda: ckptfix.extract(folder, tmp_path / "out.pth"),
        "slim": lambda: ckptfix.slim(folder, tmp_path / "out"),
        "hf": lambda: ckptfix.convert(folder, tmp_path / "out", to="hf", shard_size=100),
    }
    with pytest.raises(WouldLoseData) as caught:
        verbs[verb]()
    assert lost[0] in str(caught.value) and shard.name in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def test_a_tensor_that_only_the_index_has_is_missing(tmp_path: Path) -> None:
    folder = write(tmp_path / "in", parted(state(2), 2))
    document = json.loads((folder / "model.safetensors.index.json").read_text())
    document["weight_map"]["head"] = "model-00001-of-00002.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(document))
    assert ids(folder) == {"missing-tensors"}
    with pytest.raises(WouldLoseData, match="holds head; no shard does"):
        ckptfix.convert(folder, tmp_path / "out.pth")


def test_a_tensor_that_only_a_shard_has_is_taken(tmp_path: Path, kind: str) -> None:
    wanted = state(2)
    folder = write(tmp_path / "in", parted(wanted, 2), kind=kind)
    (index,) = folder.glob("*.index.json")
    document = json.loads(index.read_text())
    del document["weight_map"]["layers.1.bias"]
    index.write_text(json.dumps(document))
    assert ids(folder) == {"index-mismatch"}
    assert same(ckptfix.load_state_dict(folder), wanted)


def test_a_value_that_is_no_tensor_need_not_be_listed(tmp_path: Path) -> None:
    first, last = parted(state(2), 2)
    folder = write(tmp_path / "in", [first, last], kind="bin")
    (path, *_) = sorted(folder.glob("*.bin"))
    torch.save({**first, "epoch": 3}, path)
    assert not ids(folder)


def test_an_index_that_confuses_the_shards_loses_nothing(tmp_path: Path) -> None:
    parts = parted(state(2), 2)
    folder = write(tmp_path / "in", parts)
    names = [path.name for path in sorted(folder.glob("*.safetensors"))]
    wrong = dict.fromkeys(parts[0], names[1]) | dict.fromkeys(parts[1], names[0])
    write_index(folder / "model.safetensors.index.json", wrong, nbytes(state(2)))
    assert ids(folder) == {"index-mismatch"}
    assert same(ckptfix.load_state_dict(folder), state(2))


@pytest.mark.parametrize("verb", [ckptfix.convert, ckptfix.extract])
def test_a_tensor_in_two_shards_is_refused(tmp_path: Path, kind: str, verb: object) -> None:
    one, two = parted(state(2), 2)
    folder = write(tmp_path / "in", [one, two | {"layers.0.bias": torch.zeros(3)}], kind=kind)
    assert ids(folder) == {"doubled-tensors"}
    assert len(open_checkpoint(folder).entries) == 4
    with pytest.raises(WouldLoseData, match=r"several shards .* hold layers\.0\.bias"):
        verb(folder, tmp_path / "out.pth")  # type: ignore[operator]


def test_a_stale_shard_and_a_wrong_total_are_noticed(tmp_path: Path) -> None:
    folder = write(tmp_path / "in", parted(state(2), 2))
    save_file(state(1), folder / "model-00003-of-00003.safetensors")
    assert ids(folder) == {"extra-shard"}
    document = json.loads((folder / "model.safetensors.index.json").read_text())
    document["metadata"]["total_size"] += 1
    (folder / "model.safetensors.index.json").write_text(json.dumps(document))
    assert {"extra-shard", "index-total"} <= {finding.id for finding in ckptfix.doctor(folder).findings}
    assert same(ckptfix.load_state_dict(folder), state(2))


def test_doctor_reads_every_shard(tmp_path: Path, kind: str) -> None:
    wanted = state(4, "module.")
    folder = write(tmp_path / "in", parted(wanted, 2), kind=kind)
    assert {"wrapped-names"} <= {finding.id for finding in ckptfix.doctor(folder).findings}
    wanted["module.layers.3.weight"][0, 0] = float("nan")
    write(folder, parted(wanted, 2), kind=kind)
    (finding,) = [row for row in ckptfix.doctor(folder).findings if row.id == "nan-values"]
    assert "module.layers.3.weight" in finding.message


def test_a_flipped_byte_of_a_torch_shard_is_refused(tmp_path: Path) -> None:
    wanted = state(4)
    folder = write(tmp_path / "in", parted(wanted, 2), kind="bin")
    shard = folder / "pytorch_model-00002-of-00002.bin"
    data = bytearray(shard.read_bytes())
    data[data.index(wanted["layers.3.weight"].numpy().tobytes()) + 7] ^= 1
    shard.write_bytes(data)
    assert "bad-crc" in {finding.id for finding in ckptfix.doctor(folder).findings}
    with pytest.raises(CkptfixError, match="CRC-32"):
        ckptfix.convert(folder, tmp_path / "out.safetensors")


def test_torch_shards_keep_what_safetensors_has_not(tmp_path: Path) -> None:
    base = torch.randn(6, 4)
    parts: list[State] = [
        {"embed": base, "head": base, "rows": base[1:3]},
        {"column": base.clone().t(), "weight": torch.nn.Parameter(torch.randn(2))},
    ]
    folder = write(tmp_path / "in", parts, kind="bin")
    ckptfix.convert(folder, tmp_path / "out.pth")
    found = torch.load(tmp_path / "out.pth", weights_only=True)
    assert same(found, {name: value.detach() for part in parts for name, value in part.items()})
    assert found["embed"].data_ptr() == found["head"].data_ptr()
    assert found["rows"].untyped_storage().data_ptr() == found["embed"].untyped_storage().data_ptr()
    assert found["column"].stride() == (1, 4) and isinstance(found["weight"], torch.nn.Parameter)
    done = ckptfix.convert(folder, tmp_path / "out.safetensors")
    assert same(ckptfix.load_state_dict(tmp_path / "out.safetensors"), {
        name: value.detach() for part in parts for name, value in part.items()
    }) and done.exit_code == 0  # fmt: skip


def test_a_legacy_shard_is_read(tmp_path: Path) -> None:
    one, two = parted(state(2), 2)
    folder = write(tmp_path / "in", [one, two], kind="bin")
    torch.save(two, folder / "pytorch_model-00002-of-00002.bin", _use_new_zipfile_serialization=False)
    assert same(ckptfix.load_state_dict(folder), one | two)


def test_a_shard_without_a_mapping_is_refused_by_name(tmp_path: Path) -> None:
    folder = write(tmp_path / "in", parted(state(2), 2), kind="bin")
    torch.save([torch.ones(2)], folder / "pytorch_model-00002-of-00002.bin")
    with pytest.raises(CkptfixError, match="does not hold a dict") as caught:
        open_checkpoint(folder)
    assert str(caught.value.path).endswith("pytorch_model-00002-of-00002.bin")


def test_a_broken_index_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "in", parted(state(2), 2))
    index = folder / "model.safetensors.index.json"
    for text in ('{"weight_map": {"a": 1}}', "[]", "{", '{"weight_map": []}', '{"weight_map": {"a": "b", "a": "c"}}'):
        index.write_text(text)
        with pytest.raises(BadIndex) as caught:
            open_checkpoint(folder)
        assert caught.value.path == str(index)
        assert "bad-index" in {finding.id for finding in ckptfix.doctor(folder).findings}


TRUTHS = {
    "hf/gpt2_sharded": "hf/gpt2_truth.pt",
    "hf/gpt2_acc_st": "hf/gpt2_truth.pt",
    "hf/gpt2_acc_bin": "hf/gpt2_truth.pt",
    "hf/gpt2_sharded_bin": "hf/gpt2_truth.pt",
    "hf/llama_bf16": "hf/llama_truth.pt",
    "accelerate/ddp_save_model": "accelerate/ddp_truth.pt",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRUTHS)
def test_what_frameworks_wrote_has_the_tensors_of_the_model(name: str, tmp_path: Path) -> None:
    if not (FRAMEWORKS / name).is_dir():
        pytest.skip("no shared/frameworks here")
    truth = torch.load(FRAMEWORKS / TRUTHS[name], weights_only=True)
    found = ckptfix.load_state_dict(FRAMEWORKS / name)
    assert set(found) <= set(truth) and set(truth) - set(found) <= {"lm_head.weight"}
    assert same(found, {key: truth[key] for key in found})
    assert same(load(FRAMEWORKS / name), found)
    ckptfix.convert(FRAMEWORKS / name, tmp_path / "out.pth")
    assert same(torch.load(tmp_path / "out.pth", weights_only=True), found)
    assert ckptfix.diff(FRAMEWORKS / name, tmp_path / "out.pth").same


@pytest.mark.parametrize("name", ["model-{:05d}-of-00009.safetensors", "shard-{:05d}-model-00001-of-00009.safetensors"])
def test_too_many_files_are_refused_before_one_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("ckptfix.formats.shards.layout.MAX_SHARDS", 8)
    for number in range(1, 10):
        (tmp_path / name.format(number)).write_bytes(b"")
    opened: list[str] = []
    monkeypatch.setattr("ckptfix.formats.shards.files.open_source", opened.append)
    with pytest.raises(BadIndex, match="9 shards and no index; the limit is 8"):
        ckptfix.inspect(tmp_path)
    assert not opened


def test_views_of_storages_are_refused_until_each_file_is_converted(tmp_path: Path) -> None:
    """Of torch before 0.4. Once all of a storage was taken for its part, and every number was another."""
    view = Tensor("0", (2,), 6, view=("9", 2, 4), legacy=True)
    data = torch.arange(6.0).numpy().tobytes()
    (folder := tmp_path / "in").mkdir()
    weight_map = {name: f"model-0000{number}-of-00002.bin" for number, name in enumerate("ab", 1)}
    for name, file in weight_map.items():
        pickle = assemble(("PROTO", 2), *state_dict_ops({name: view}), "STOP")
        (folder / file).write_bytes(legacy(pickle, [("0", 6, data)]))
    write_index(folder / "model.bin.index.json", weight_map)
    for verb in (ckptfix.load_state_dict, ckptfix.inspect):
        with pytest.raises(Unsupported, match="a view of a storage") as caught:
            verb(folder)
        assert Path(str(caught.value.path)).parent == folder and "convert" in str(caught.value.hint)
    with pytest.raises(Unsupported):
        ckptfix.convert(folder, tmp_path / "out.safetensors")
    for file in weight_map.values():
        ckptfix.convert(folder / file, tmp_path / "one", to="zip", force=True)
        (tmp_path / "one").replace(folder / file)
    found = ckptfix.load_state_dict(folder)
    assert {name: value.tolist() for name, value in found.items()} == {"a": [2, 3], "b": [2, 3]}
