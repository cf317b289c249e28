"""load_state_dict: what torch.load would give, without running a pickle."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from compare import assert_same

import ckptfix
from ckptfix.errors import PartialPrefix, Refused, Unsupported


def save(path: Path, value: Any, **how: Any) -> Path:
    torch.save(value, path, **how)
    return path


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_it_is_what_torch_loads(tmp_path: Path, zipped: bool) -> None:
    state = net().state_dict()
    state["view"] = state["0.weight"][1:, ::2]
    state["parameter"] = torch.nn.Parameter(torch.ones(2))
    state["grad"] = torch.ones(2, requires_grad=True)
    state["conj"] = torch.ones(2, dtype=torch.complex64).conj()
    state["sparse"] = torch.eye(3).to_sparse()
    state["csr"] = torch.eye(3).to_sparse_csr()
    state["meta"] = torch.ones(2, 3, device="meta")
    state["quantized"] = torch.quantize_per_tensor(torch.ones(2, 3), 0.1, 3, torch.qint8)
    scales, zeros = torch.tensor([0.1, 0.2], dtype=torch.float64), torch.tensor([0, 1])
    state["channels"] = torch.quantize_per_channel(torch.ones(2, 3), scales, zeros, 0, torch.quint8)
    source = save(tmp_path / "a.pth", state, _use_new_zipfile_serialization=zipped)
    assert_same(ckptfix.load_state_dict(source, strip=None), torch.load(source, weights_only=True))


@pytest.mark.parametrize("saved_wrapped", [True, False])
@pytest.mark.parametrize("loaded_wrapped", [True, False])
def test_single_and_multi_saved_and_loaded(tmp_path: Path, saved_wrapped: bool, loaded_wrapped: bool) -> None:
    trained = net()
    state = (torch.nn.DataParallel(trained) if saved_wrapped else trained).state_dict()
    source = save(tmp_path / "a.pth", {"epoch": 1, "model_state_dict": state})
    bare = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    model = torch.nn.DataParallel(bare) if loaded_wrapped else bare
    bare.load_state_dict(ckptfix.load_state_dict(source))
    x = torch.randn(5, 3)
    assert torch.equal(model.eval()(x), trained.eval()(x))


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("load", [ckptfix.load_state_dict, ckptfix.load_checkpoint])
def test_the_file_is_mapped_if_asked_and_not_changed_by_writing(tmp_path: Path, load: Any, mmap: bool) -> None:
    source = save(tmp_path / "a.pth", {"a.w": torch.zeros(1000)})
    before = source.read_bytes()
    loaded = load(source, mmap=mmap)["a.w"]
    if Path("/proc/self/maps").exists():
        assert (str(source) in Path("/proc/self/maps").read_text()) == mmap
    loaded += 1
    assert source.read_bytes() == before


def test_misaligned_legacy_data_is_copied(tmp_path: Path) -> None:
    for extra in range(8):
        state = {"x" * (extra + 1): torch.arange(5, dtype=torch.float64)}
        source = save(tmp_path / f"{extra}.pth", state, _use_new_zipfile_serialization=False)
        (loaded,) = ckptfix.load_state_dict(source).values()
        assert loaded.tolist() == [0, 1, 2, 3, 4]
        assert loaded.data_ptr() % 8 == 0


def test_ties_come_back_from_every_format(tmp_path: Path) -> None:
    base = torch.ones(3, 3)
    source = save(tmp_path / "a.pth", OrderedDict(embed=base, head=base, other=torch.ones(3, 3)))
    ckptfix.convert(source, tmp_path / "b.safetensors")
    for path in (source, tmp_path / "b.safetensors"):
        loaded = ckptfix.load_state_dict(path)
        assert list(loaded) == ["embed", "head", "other"]
        assert loaded["embed"].data_ptr() == loaded["head"].data_ptr() != loaded["other"].data_ptr()


def test_safetensors_of_others(tmp_path: Path) -> None:
    value = {"b": torch.arange(6.0).reshape(2, 3), "a": torch.ones(3, dtype=torch.float16)}
    safetensors.torch.save_file(value, tmp_path / "a.safetensors")
    loaded = ckptfix.load_state_dict(tmp_path / "a.safetensors")
    for name, tensor in value.items():
        assert torch.equal(loaded[name], tensor)


@pytest.fixture
def cuda_file(tmp_path: Path) -> Path:
    path = tmp_path / "cpu.pth"
    torch.save({"a.w": torch.ones(2), "a.v": torch.zeros(3)}, path)
    ckptfix.map_location(path, tmp_path / "cuda.pth", "cuda:5")
    return tmp_path / "cuda.pth"


def test_none_falls_back_to_the_cpu_and_says_so_once(cuda_file: Path) -> None:
    if torch.cuda.device_count() > 5:
        pytest.skip("cuda:5 exists here")
    with pytest.warns(UserWarning, match="saved on cuda:5") as caught:
        loaded = ckptfix.load_state_dict(cuda_file)
    assert len(caught) == 1
    assert loaded["a.w"].device.type == "cpu"


@pytest.mark.parametrize(
    "map_location",
    [
        "cpu",
        torch.device("cpu"),
        {"cuda:5": "cpu"},
        lambda storage, location: storage,
        lambda storage, location: storage if location == "cuda:5" else None,
    ],
    ids=["str", "device", "dict", "call", "call or None"],
)
def test_every_form_of_map_location(cuda_file: Path, map_location: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = ckptfix.load_state_dict(cuda_file, map_location=map_location)
    expected = torch.load(cuda_file, weights_only=True, map_location=map_location)
    assert_same(dict(loaded), expected)


def test_map_location_to_meta(cuda_file: Path) -> None:
    assert ckptfix.load_state_dict(cuda_file, map_location="meta")["a.w"].device.type == "meta"


def test_a_call_meets_each_storage_once(tmp_path: Path) -> None:
    base = torch.ones(3)
    source = save(tmp_path / "a.pth", {"a.w": base, "a.v": base, "b.w": torch.ones(1)})
    seen: list[str] = []

    def note(storage: torch.UntypedStorage, location: str) -> None:
        seen.append(location)

    ckptfix.load_state_dict(source, map_location=note)
    assert seen == ["cpu", "cpu"]


def test_strip(tmp_path: Path) -> None:
    source = save(tmp_path / "a.pth", OrderedDict({"net.a.w": torch.ones(1), "net.b.w": torch.ones(1)}))
    assert list(ckptfix.load_state_dict(source)) == ["net.a.w", "net.b.w"]
    assert list(ckptfix.load_state_dict(source, strip="net")) == ["a.w", "b.w"]
    with pytest.raises(PartialPrefix):
        ckptfix.load_state_dict(source, strip="net.a")


def test_metadata_comes_with_it(tmp_path: Path) -> None:
    model = torch.nn.DataParallel(net())
    source = save(tmp_path / "a.pth", model.state_dict())
    loaded = ckptfix.load_state_dict(source)
    assert loaded._metadata == net().state_dict()._metadata  # type: ignore[attr-defined]
    del loaded["1.num_batches_tracked"]
    with pytest.raises(RuntimeError, match="num_batches_tracked"):
        net().load_state_dict(loaded)


def test_several_state_dicts_want_a_choice(tmp_path: Path) -> None:
    source = save(tmp_path / "a.pth", {"g": {"a.w": torch.ones(1)}, "d": {"a.w": torch.zeros(1)}})
    with pytest.raises(Refused, match="at='g'"):
        try:
            ckptfix.load_state_dict(source)
        except Refused as error:
            raise Refused(f"{error} {error.hint}") from None
    assert ckptfix.load_state_dict(source, at="d")["a.w"].item() == 0


def test_what_only_its_own_library_rebuilds(tmp_path: Path) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    source = save(tmp_path / "a.pth", {"a.w": torch.ones(1), "a.n": nested})
    with pytest.raises(Unsupported, match="nested") as caught:
        ckptfix.load_state_dict(source)
    assert caught.value.where == "a.n"


@pytest.mark.parametrize("dtype", [torch.quint4x2, torch.quint2x4])
def test_several_elements_in_a_byte(tmp_path: Path, dtype: torch.dtype) -> None:
    scales, zeros = torch.ones(4), torch.zeros(4)
    value = torch.quantize_per_channel(torch.arange(32.0).reshape(4, 8) % 4, scales, zeros, 0, dtype)
    source = save(tmp_path / "a.pth", {"a.w": value})
    (entry,) = ckptfix.open_checkpoint(source).entries
    assert entry.storage is not None
    assert entry.nbytes == entry.storage.nbytes == entry.data.length
    loaded = ckptfix.load_state_dict(source)["a.w"]
    expected = torch.load(source, weights_only=True)["a.w"]
    assert torch.equal(loaded.dequantize(), expected.dequantize())


def test_two_keys_of_one_text_stay_two(tmp_path: Path) -> None:
    source = save(tmp_path / "a.pth", OrderedDict({"1": torch.ones(1), "x.w": torch.ones(1), 1: torch.zeros(1)}))
    assert len(ckptfix.load_state_dict(source)) == 3


@pytest.mark.skipif(torch.cuda.device_count() > 9, reason="the device is here")
def test_a_device_that_is_not_here_is_one_error(cuda_file: Path) -> None:
    for map_location in ("cuda:9", {"cuda:5": "cuda:9"}):
        with pytest.raises(Refused, match="saved on cuda:5, and cannot be moved") as caught:
            ckptfix.load_state_dict(cuda_file, map_location=map_location)
        assert caught.value.path == str(cuda_file) and "map_location='cpu'" in str(caught.value.hint)
    with pytest.raises(Refused, match="map_location is not a device"):
        ckptfix.load_state_dict(cuda_file, map_location="gpu")


@pytest.mark.parametrize("how", ["load_state_dict", "load_checkpoint", "assign"])
def test_the_warning_points_at_the_line_that_loads(cuda_file: Path, how: str) -> None:
    if torch.cuda.device_count() > 5:
        pytest.skip("cuda:5 exists here")
    model = torch.nn.ModuleDict({"a": torch.nn.Module()})
    for name, size in (("w", 2), ("v", 3)):
        model["a"].register_buffer(name, torch.zeros(size))
    calls: dict[str, Any] = {
        "load_state_dict": lambda: ckptfix.load_state_dict(cuda_file),
        "load_checkpoint": lambda: ckptfix.load_checkpoint(cuda_file),
        "assign": lambda: ckptfix.load_into(model, cuda_file, assign=True),
    }
    with pytest.warns(UserWarning, match="saved on cuda:5") as caught:
        calls[how]()
    assert caught[0].filename == __file__ and caught[0].lineno == calls[how].__code__.co_firstlineno


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_default_device_does_not_matter(tmp_path: Path, device: str) -> None:
    for length in range(4):
        state = {"x" * length: None, "w": torch.arange(4.0)}  # the data begins at every offset modulo 4
        torch.save(state, tmp_path / "a.pth", _use_new_zipfile_serialization=False)
        with torch.device(device):
            loaded = ckptfix.load_checkpoint(tmp_path / "a.pth")["w"]
        assert loaded.tolist() == [0, 1, 2, 3]
