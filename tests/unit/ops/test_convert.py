"""Containers: what arrives is what was there, and what does not arrive is named."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any, cast

import builders
import pytest
import safetensors.torch
import torch
from compare import assert_same
from ranges import read_exact

import ckptfix
from ckptfix.errors import DamagedFile, KeyConflict, Refused, Unsupported, WouldLoseData
from ckptfix.formats import open_checkpoint
from ckptfix.formats.torch.emit import state_dict_pickle


def save(path: Path, value: Any, **how: Any) -> Path:
    torch.save(value, path, **how)
    return path


def model() -> OrderedDict[str, torch.Tensor]:
    base = torch.arange(24.0).reshape(4, 6)
    return OrderedDict(
        a=base,
        tied=base,
        view=base[1:3],
        transposed=base.t(),
        half=torch.ones(3, dtype=torch.bfloat16),
        fp8=torch.ones(5).to(torch.float8_e4m3fn),
        count=torch.tensor(7),
        empty=torch.empty(0, 3),
        flags=torch.tensor([True, False]),
    )


def test_there_and_back_by_safetensors(tmp_path: Path) -> None:
    source = save(tmp_path / "a.pth", model())
    there = ckptfix.convert(source, tmp_path / "b.safetensors")
    assert there.exit_code == 0
    loaded = safetensors.torch.load_file(tmp_path / "b.safetensors")
    assert set(loaded) == set(model()) - {"tied"}
    for name, value in loaded.items():
        assert torch.equal(value.float(), model()[name].float())
        assert value.is_contiguous()
    with safetensors.safe_open(tmp_path / "b.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"
    ckptfix.convert(tmp_path / "b.safetensors", tmp_path / "back.pth")
    assert_same(dict(torch.load(tmp_path / "back.pth", weights_only=True)), dict(model()))
    mapped = torch.load(tmp_path / "back.pth", weights_only=True, mmap=True)
    assert torch.equal(mapped["a"], model()["a"])


def test_safetensors_to_legacy(tmp_path: Path) -> None:
    value = model()
    del value["fp8"]
    source = save(tmp_path / "a.pth", value)
    ckptfix.convert(source, tmp_path / "b.safetensors")
    ckptfix.convert(tmp_path / "b.safetensors", tmp_path / "c.pth", to="legacy")
    assert_same(dict(torch.load(tmp_path / "c.pth", weights_only=True)), dict(value))


def test_what_torch_reads_from_no_legacy_file_is_refused(tmp_path: Path) -> None:
    value = {"a.w": torch.ones(2).to(torch.float8_e5m2)}
    torch.save(value, tmp_path / "torch.pth", _use_new_zipfile_serialization=False)
    with pytest.raises(AttributeError):
        torch.load(tmp_path / "torch.pth", weights_only=True)
    source = save(tmp_path / "a.pth", value)
    with pytest.raises(WouldLoseData, match="float8_e5m2"):
        ckptfix.convert(source, tmp_path / "b.pth", to="legacy")


def test_what_stays_behind_is_named(tmp_path: Path) -> None:
    checkpoint = {
        "epoch": 3,
        "state_dict": model(),
        "optimizer": {"state": {0: {"exp_avg": torch.ones(1)}}, "param_groups": [{"lr": 0.1}]},
    }
    source = save(tmp_path / "a.pth", checkpoint)
    result = ckptfix.convert(source, tmp_path / "b.safetensors")
    assert result.at == "state_dict"
    assert set(result.left) == {"epoch", "optimizer"}
    assert "left behind: " in result.lines[1]


def test_several_state_dicts_want_a_choice(tmp_path: Path) -> None:
    source = save(tmp_path / "a.pth", {"g": {"a.w": torch.ones(1)}, "d": {"a.w": torch.zeros(1)}})
    with pytest.raises(Refused, match="2 state dicts: g, d"):
        ckptfix.convert(source, tmp_path / "b.safetensors")
    ckptfix.convert(source, tmp_path / "b.safetensors", at="d")
    assert safetensors.torch.load_file(tmp_path / "b.safetensors")["a.w"].item() == 0


def test_what_safetensors_cannot_hold_is_refused_or_dropped_by_name(tmp_path: Path) -> None:
    odd = {
        "a.w": torch.ones(2),
        "a.sparse": torch.eye(3).to_sparse(),
        "a.complex": torch.ones(2, dtype=torch.complex128),
        "a.conj": torch.full((2,), 1 + 2j, dtype=torch.complex64).conj(),
        "a.conj wide": torch.ones(2, dtype=torch.complex128).conj(),
        "a.meta": torch.ones(2, device="meta"),
    }
    source = save(tmp_path / "a.pth", odd)
    with pytest.raises(WouldLoseData, match="4 of 6 tensors") as caught:
        ckptfix.convert(source, tmp_path / "b.safetensors")
    assert "--drop-unsupported" in (caught.value.hint or "")
    result = ckptfix.convert(source, tmp_path / "b.safetensors", drop_unsupported=True)
    assert result.exit_code == 3
    assert result.lost == ("a.sparse", "a.complex", "a.conj wide", "a.meta")
    found = safetensors.torch.load_file(tmp_path / "b.safetensors")
    assert {name: value.tolist() for name, value in found.items()} == {"a.w": [1, 1], "a.conj": [1 - 2j, 1 - 2j]}


def test_big_endian_data_is_turned(tmp_path: Path) -> None:
    value = torch.arange(6, dtype=torch.float32)
    turned = value.numpy().byteswap().tobytes()
    tensors = {
        "fc.weight": builders.Tensor("0", (6,), 6),
        "fc.t": builders.Tensor("0", (3, 2), 6, stride=(1, 3)),
    }
    pickle = builders.assemble(*builders.state_dict_ops(tensors), "STOP")
    source = tmp_path / "a.pth"
    source.write_bytes(builders.torch_zip(pickle, {"0": turned}, byteorder="big"))
    assert torch.equal(torch.load(source, weights_only=True)["fc.weight"], value)
    ckptfix.convert(source, tmp_path / "b.safetensors")
    loaded = safetensors.torch.load_file(tmp_path / "b.safetensors")
    assert torch.equal(loaded["fc.weight"], value)
    assert torch.equal(loaded["fc.t"], value.reshape(2, 3).t())
    ckptfix.convert(source, tmp_path / "c.pth", to="legacy")
    assert torch.equal(torch.load(tmp_path / "c.pth", weights_only=True)["fc.weight"], value)
    assert torch.equal(ckptfix.load_state_dict(source)["fc.weight"], value)


@pytest.mark.parametrize("protocol", [2, 4])
def test_zip_and_legacy_carry_the_whole_object(tmp_path: Path, protocol: int) -> None:
    weights = model()
    del weights["fp8"]
    device = torch.device("cuda", 1)
    value = {"model": weights, "epoch": 3, "none": None, "device": device, "list": [torch.ones(2), (1, 2.5)]}
    for zipped in (True, False):
        source = save(
            tmp_path / f"{zipped}.pth", value, _use_new_zipfile_serialization=zipped, pickle_protocol=protocol
        )
        there = tmp_path / f"{zipped}.there"
        back = tmp_path / f"{zipped}.back"
        ckptfix.convert(source, there, to="legacy" if zipped else "zip")
        ckptfix.convert(there, back, to="zip" if zipped else "legacy")
        for path in (there, back):
            assert_same(torch.load(path, weights_only=False), torch.load(source, weights_only=False))


def test_a_damaged_tensor_is_not_left_out_in_silence(tmp_path: Path) -> None:
    tensors = {"a.w": builders.Tensor("0", (2,), 2), "b.w": builders.Tensor("1", (2,), 2)}
    pickle = builders.assemble(*builders.state_dict_ops(tensors), "STOP")
    source = tmp_path / "a.pth"
    source.write_bytes(builders.torch_zip(pickle, {"0": b"12345678", "1": b"1234"}))
    with pytest.raises((WouldLoseData, DamagedFile)):
        ckptfix.convert(source, tmp_path / "b.safetensors")
    assert not (tmp_path / "b.safetensors").exists()


def test_deflated_archives_convert(tmp_path: Path) -> None:
    import zipfile

    value = model()
    del value["transposed"]
    source = save(tmp_path / "a.pth", value)
    squeezed = tmp_path / "squeezed.pth"
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(squeezed, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    ckptfix.convert(squeezed, tmp_path / "b.safetensors")
    assert torch.equal(safetensors.torch.load_file(tmp_path / "b.safetensors")["a"], model()["a"])
    ckptfix.add_module(squeezed, tmp_path / "c.pth")
    assert torch.equal(torch.load(tmp_path / "c.pth", weights_only=True)["module.a"], model()["a"])


def test_the_target_is_chosen_by_suffix_or_by_word(tmp_path: Path) -> None:
    source = save(tmp_path / "a.pth", model())
    with pytest.raises(Unsupported, match="cannot tell the output format"):
        ckptfix.convert(source, tmp_path / "b.xyz")
    with pytest.raises(Unsupported, match="no format called"):
        ckptfix.convert(source, tmp_path / "b.pth", to=cast(Any, "ggml"))
    assert ckptfix.convert(source, tmp_path / "b.xyz", to="torch").format == "zip"
    assert (tmp_path / "b.xyz").read_bytes() == source.read_bytes()


def test_a_fresh_pickle_is_what_torch_writes(tmp_path: Path) -> None:
    value = OrderedDict((name, tensor.clone()) for name, tensor in model().items())
    source = save(tmp_path / "a.pth", value)
    checkpoint = open_checkpoint(source)
    pickle, storages = state_dict_pickle(checkpoint.entries)
    import zipfile

    with zipfile.ZipFile(source) as archive:
        assert pickle == archive.read("a/data.pkl")
    assert [key for key, _, _ in storages] == [str(index) for index in range(len(value))]


def test_a_file_made_from_safetensors_is_what_torch_would_save(tmp_path: Path) -> None:
    value = {"a": torch.arange(3.0), "b": torch.ones(2, 2)}
    safetensors.torch.save_file(value, tmp_path / "a.safetensors")
    ckptfix.convert(tmp_path / "a.safetensors", tmp_path / "archive.pth")
    ours = open_checkpoint(tmp_path / "archive.pth")
    torch.save(OrderedDict(value), tmp_path / "torch.pth")
    theirs = open_checkpoint(tmp_path / "torch.pth")
    was = theirs.traits["records"]
    assert isinstance(was, int) and ours.traits["records"] == was - 1
    for one, other in zip(ours.entries, theirs.entries, strict=True):
        assert (one.name, one.shape, one.stride, one.dtype) == (other.name, other.shape, other.stride, other.dtype)
        assert one.data.offset % 64 == 0
        assert read_exact(one.data) == read_exact(other.data)


def view_file(path: Path, *extra: builders.Op) -> Path:
    """A legacy file as torch 0.4 wrote storage views: 8 floats, a tensor on a view of the last 4, its storage."""
    tensor = builders.Tensor("7", (2,), 8, legacy=True, view=("9", 4, 4), offset=1)
    whole = builders.Tensor("7", (8,), 8, legacy=True)
    ops = builders.state_dict_ops({"a.part": tensor, "a.whole": whole})
    pickle = builders.assemble(("PROTO", 2), "EMPTY_LIST", "MARK", *ops, *extra, "APPENDS", "STOP")
    data = torch.arange(8.0).numpy().tobytes()
    path.write_bytes(builders.legacy(pickle, [("7", 8, data)]))
    return path


def test_storage_views_of_old_files(tmp_path: Path) -> None:
    source = view_file(tmp_path / "a.pth")
    expected = torch.load(source, weights_only=True)[0]
    assert expected["a.part"].tolist() == [5, 6]
    loaded = ckptfix.load_state_dict(source)
    assert {name: value.tolist() for name, value in loaded.items()} == {"a.part": [5, 6], "a.whole": list(range(8))}
    ckptfix.convert(source, tmp_path / "b.pth", to="zip")
    converted = torch.load(tmp_path / "b.pth", weights_only=True)[0]
    assert converted["a.part"].tolist() == [5, 6]
    assert converted["a.part"].untyped_storage().data_ptr() == converted["a.whole"].untyped_storage().data_ptr()
    ckptfix.convert(source, tmp_path / "c.safetensors")
    assert safetensors.torch.load_file(tmp_path / "c.safetensors")["a.part"].tolist() == [5, 6]


@pytest.mark.parametrize("view", ["9", "7"])
def test_an_int_after_a_storage_view_is_not_taken_for_an_offset(tmp_path: Path, view: str) -> None:
    """Nor does the view take the place of the storage that it views, where it has the name of that."""
    pid = [*builders.push("storage"), ("GLOBAL", "torch", "FloatStorage"), *builders.push("7"), *builders.push("cpu")]
    storage = ["MARK", *pid, *builders.push(8), *builders.push((view, 4, 4)), "TUPLE", "BINPERSID"]
    source = view_file(tmp_path / "a.pth", *storage, *builders.push(5))
    result = ckptfix.convert(source, tmp_path / "b.pth", to="zip")
    loaded = torch.load(tmp_path / "b.pth", weights_only=True)
    assert loaded[2] == 5
    assert list(loaded[1]) == [4, 5, 6, 7]
    assert [finding.id for finding in result.findings] == ["tie-lost"]


class _Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(2, 2)
        self.conv = torch.nn.Conv1d(1, 1, 1)
        self.act = torch.nn.ReLU()


def test_a_whole_module_of_a_legacy_file(tmp_path: Path) -> None:
    """Its classes come with their source, whose strings later classes share through the memo."""
    module = _Block()
    source = save(tmp_path / "a.pth", module, _use_new_zipfile_serialization=False)
    result = ckptfix.convert(source, tmp_path / "b.pth", to="zip")
    loaded = torch.load(tmp_path / "b.pth", weights_only=False)
    assert_same(dict(loaded.state_dict()), dict(module.state_dict()))
    assert any(finding.id == "left-behind" and "Linear" in finding.where for finding in result.findings)


def test_a_class_with_its_source_under_a_numbered_memo_is_refused(tmp_path: Path) -> None:
    state = model()
    del state["fp8"]
    value = {"model": state, "cls": _Block, "ema": {"a.w": torch.ones(2)}}
    source = save(tmp_path / "a.pth", value, _use_new_zipfile_serialization=False, pickle_protocol=4)
    with pytest.raises(Unsupported, match="protocol 4"):
        ckptfix.convert(source, tmp_path / "b.pth", to="zip")
    assert not (tmp_path / "b.pth").exists()


@pytest.mark.parametrize("other", ["z/data/0", "z/DATA/0"])
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_records_that_readers_disagree_about(tmp_path: Path, other: str) -> None:
    import zipfile

    source = save(tmp_path / "z.pth", {"fc.weight": torch.arange(100.0), "fc.bias": torch.ones(2)})
    double = tmp_path / "double.pth"
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(double, "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
        new.writestr(other, b"\1" * 400)
    assert "duplicate-record" in {finding.id for finding in ckptfix.inspect(double).findings}
    assert not ckptfix.diff(source, double).same
    with pytest.raises(WouldLoseData, match="several records"):
        ckptfix.load_state_dict(double)
    with pytest.raises(WouldLoseData, match="several records"):
        ckptfix.convert(double, tmp_path / "b.safetensors")


def test_attributes_of_tensors_are_seen(tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("b", 2.0)):
        tensor: Any = torch.zeros(2)
        tensor.scale = torch.full((2,), value)
        parameter: Any = torch.nn.Parameter(torch.zeros(3))
        parameter.quant = {"absmax": torch.full((1,), value), "blocksize": 64}
        save(tmp_path / f"{name}.pth", OrderedDict({"fc.weight": tensor, "fc.p": parameter}))
    names = {entry.name for entry in ckptfix.open_checkpoint(tmp_path / "a.pth").entries}
    assert names == {"fc.weight", "fc.weight/scale", "fc.p", "fc.p/quant/absmax"}
    assert not ckptfix.diff(tmp_path / "a.pth", tmp_path / "b.pth").same
    result = ckptfix.convert(tmp_path / "a.pth", tmp_path / "c.safetensors", at="")
    assert {"fc.weight", "fc.p"} <= {address.partition("/")[0] for address in result.left}


def test_a_tensor_by_the_name_of_the_metadata_is_no_tensor_of_safetensors(tmp_path: Path) -> None:
    source = save(tmp_path / "a.pth", {"__metadata__": torch.ones(2), "b": torch.ones(2)})
    with pytest.raises(KeyConflict, match="__metadata__ cannot be the key of a tensor"):
        ckptfix.convert(source, tmp_path / "b.safetensors", to="safetensors")
