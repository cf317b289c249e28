"""What a match aims at: checkpoints of every format, files of keys, and models built without memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import ckptfix
from ckptfix.errors import CkptfixError, Refused
from ckptfix.names.slots import Slot
from ckptfix.ops.target.targets import ExpectedModel, read


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight


SLOTS = (
    Slot("embed.weight", (5, 4), "float32"),
    *(Slot(f"norm.{name}", (4,), "float32") for name in ("weight", "bias", "running_mean", "running_var")),
    Slot("norm.num_batches_tracked", (), "int64"),
    Slot("head.weight", (5, 4), "float32", tied="embed.weight"),
)


def saved(path: Path, value: Any, **how: Any) -> Path:
    torch.save(value, path, **how)
    return path


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("nested", [True, False])
def test_a_torch_checkpoint(tmp_path: Path, zipped: bool, nested: bool) -> None:
    state = Tied().state_dict()
    value = {"model": state, "epoch": 3} if nested else state
    path = saved(tmp_path / "a.pth", value, _use_new_zipfile_serialization=zipped)
    assert read(path) == ExpectedModel(str(path), SLOTS, "model" if nested else "", True)


def test_a_safetensors_file_says_that_its_order_is_its_own(tmp_path: Path) -> None:
    torch_file = saved(tmp_path / "a.pth", Tied().state_dict())
    ckptfix.convert(torch_file, tmp_path / "a.safetensors")
    side = read(tmp_path / "a.safetensors")
    assert not side.in_order
    found = {slot.name: slot for slot in side.slots}
    assert {name: slot.shape for name, slot in found.items()} == {slot.name: slot.shape for slot in SLOTS}
    assert found["head.weight"].tied == "embed.weight"


def test_a_safetensors_file_of_its_own_library(tmp_path: Path) -> None:
    save_file({"b": torch.zeros(2, dtype=torch.bfloat16), "a": torch.zeros(3)}, tmp_path / "a.safetensors")
    assert set(read(tmp_path / "a.safetensors").slots) == {Slot("b", (2,), "bfloat16"), Slot("a", (3,), "float32")}


def test_views_and_empty_tensors_are_no_ties(tmp_path: Path) -> None:
    whole = torch.zeros(6)
    state = {"a.w": whole[:3], "b.w": whole[3:], "c.w": whole.view(2, 3), "d.w": whole[:0], "e.w": whole[:0]}
    assert [slot.tied for slot in read(saved(tmp_path / "a.pth", state)).slots] == [None] * 5


def test_the_address_chooses_among_several(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pth", {"g": {"a.w": torch.zeros(2)}, "d": {"b.w": torch.zeros(3)}})
    with pytest.raises(Refused, match="2 state dicts"):
        read(path)
    assert read(path, at="d").slots == (Slot("b.w", (3,), "float32"),)


@pytest.mark.parametrize(
    "document",
    [
        {"a.w": [2, 3], "b.w": []},
        {"a.w": {"shape": [2, 3]}, "b.w": {"shape": [], "dtype": None}},
        [["a.w", [2, 3]], ["b.w", []]],
        [{"name": "a.w", "shape": [2, 3]}, {"name": "b.w", "shape": []}],
    ],
)
def test_keys_in_every_form(tmp_path: Path, document: Any) -> None:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps(document))
    assert read(path).slots == (Slot("a.w", (2, 3)), Slot("b.w", ()))


@pytest.mark.parametrize("dtype", ["bfloat16", "torch.bfloat16", "BF16"])
def test_keys_with_dtypes(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"__metadata__": {}, "w": {"dtype": dtype, "shape": [1], "data_offsets": [0, 2]}}))
    assert read(path).slots == (Slot("w", (1,), "bfloat16"),)
    path.write_text(json.dumps([["w", [1], dtype]]))
    assert read(path).slots == (Slot("w", (1,), "bfloat16"),)


@pytest.mark.parametrize("nested", [True, False])
def test_what_inspect_prints(tmp_path: Path, nested: bool) -> None:
    model = Tied()
    optimizer = torch.optim.Adam(model.parameters())
    value: Any = {"model": model.state_dict(), "optimizer": optimizer.state_dict()} if nested else model.state_dict()
    path = saved(tmp_path / "a.pth", value)
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps(ckptfix.inspect(path).as_dict()))
    assert read(keys) == ExpectedModel(str(keys), SLOTS, "model" if nested else "", True)


def test_what_inspect_prints_of_several_state_dicts(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    path = saved(tmp_path / "a.pth", {"g": {"a.w": torch.zeros(2)}, "d": {"b.w": torch.zeros(3)}})
    keys.write_text(json.dumps(ckptfix.inspect(path).as_dict()))
    for several in (path, keys):
        with pytest.raises(Refused, match="2 state dicts") as caught:
            read(several)
        assert caught.value.hint == "choose one with like_at='g'"
    assert read(keys, at="d").slots == (Slot("b.w", (3,), "float32"),)
    with pytest.raises(CkptfixError, match="no tensors at 'x'"):
        read(keys, at="x")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"weight_map": {"a": "1.safetensors"}}', "without their shapes"),
        ('["a.w", "b.w"]', "a name without a shape"),
        ('{"a": [1], "a": [2]}', "'a' appears twice"),
        ('[["a", [1]], ["a", [2]]]', "'a' appears twice"),
        ('{"a": [-1]}', "not a list of sizes"),
        ('{"a": [true]}', "not a list of sizes"),
        ('{"a": [1.5]}', "not a list of sizes"),
        ('{"a": "x"}', "not a list of sizes"),
        ('{"a": {"shape": [1], "dtype": "f99"}}', "unknown dtype"),
        ('{"a": {"shape": [1], "dtype": 5}}', "unknown dtype"),
        ("[[1, [2]]]", "not [name, shape, dtype]"),
        ("{}", "lists no tensor"),
        ("[]", "lists no tensor"),
        ("3", "neither an object"),
        ("{", "not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a": [' + "1" * 5000 + "]}", "digits"),
        ('{"entries": [], "state_dicts": 3}', "no tensors at"),
        ('{"entries": [{"name": "a", "shape": [1], "storage": [], "stride": 5}], "state_dicts": []}', ""),
    ],
)
def test_bad_files_of_keys(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(text)
    if not says:
        assert read(path).slots == (Slot("a", (1,)),)
        return
    with pytest.raises(CkptfixError) as caught:
        read(path)
    assert says in caught.value.message
    assert caught.value.path == str(path)


def test_keys_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "keys.json").write_bytes(b'{"\xff": [1]}')
    with pytest.raises(CkptfixError, match="UTF-8"):
        read(tmp_path / "keys.json")


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(CkptfixError, match="no such file"):
        read(tmp_path / "keys.json")


MODEL = """
import torch
from torch import nn

print("a module that talks")

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    class Inner(nn.Linear):
        def __init__(self):
            super().__init__(2, 3)

def huge():
    return nn.Linear(1 << 22, 1 << 22)

def with_values():
    rates = [rate.item() for rate in torch.linspace(0, 1, 3)]
    return nn.Sequential(*(nn.Linear(2, 2) for _ in rates))

def state():
    weight = torch.zeros(2, 3)
    return {"a": weight, "b": weight, "epoch": 3}

def needs(arguments):
    pass

def fails():
    raise KeyError("config")

def leaves():
    raise SystemExit(3)

number = 3
net = nn.Linear(2, 2)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the current folder; its name is new to this process."""
    name = f"models_of_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    return name


def test_a_model_is_built_and_tied_names_are_known(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    side = read(f"{module}:Net", allow_import=True)
    assert side == ExpectedModel(f"{module}:Net", SLOTS, None, True)
    captured = capsys.readouterr()
    assert "talks" in captured.err
    assert not captured.out


def test_a_model_of_70_terabytes_costs_nothing(module: str) -> None:
    assert read(f"{module}:huge", allow_import=True).slots[0] == Slot("weight", (1 << 22, 1 << 22), "float32")


@pytest.mark.parametrize(
    ("factory", "names"),
    [
        ("with_values", ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias"]),
        ("Net.Inner", ["weight", "bias"]),
        ("net", ["weight", "bias"]),
        ("state", ["a", "b"]),
    ],
)
def test_other_factories(module: str, factory: str, names: list[str]) -> None:
    slots = read(f"{module}:{factory}", allow_import=True).slots
    assert [slot.name for slot in slots] == names
    assert [slot.tied for slot in slots if slot.name == "b"] == (["a"] if factory == "state" else [])


def test_without_leave_nothing_is_imported(module: str) -> None:
    Path(f"{module}.py").write_text("raise AssertionError('it was run')")
    with pytest.raises(Refused, match="no such file") as caught:
        read(f"{module}:Net")
    assert caught.value.hint is not None
    assert "--allow-import" in caught.value.hint


@pytest.mark.parametrize(
    ("factory", "says"),
    [
        ("Missing", "no attribute 'Missing'"),
        ("needs", "missing 1 required positional argument"),
        ("fails", "KeyError: 'config'"),
        ("leaves", "SystemExit: 3"),
        ("number", "not callable"),
        ("dir", "not a module or a state dict"),
    ],
)
def test_factories_that_make_no_model(module: str, factory: str, says: str) -> None:
    Path(f"{module}.py").write_text(MODEL + "\nimport os\ndir = os.getcwd\n")
    with pytest.raises(CkptfixError) as caught:
        read(f"{module}:{factory}", allow_import=True)
    assert says in caught.value.message


def test_a_module_that_is_not_there() -> None:
    with pytest.raises(CkptfixError, match="ModuleNotFoundError"):
        read("no_such_module_anywhere:Net", allow_import=True)
