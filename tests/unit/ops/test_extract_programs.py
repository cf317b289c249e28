"""TorchScript archives and exported programs made here: the extracted state dict is the program's."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gone_models
import pytest
import torch
from compare import assert_same
from torch import Tensor, nn

import ckptfix
from ckptfix import errors

pytestmark = pytest.mark.filterwarnings("ignore")


class Net(nn.Module):
    """Norms, a tied weight, a buffer that no state dict has, names that are numbers, and a constant tensor."""

    passing: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(2))
        self.register_buffer("kept", torch.rand(2))
        self.chain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 4, bias=False)))
        self.one = nn.Linear(4, 3, bias=False)
        self.other = nn.Linear(4, 3, bias=False)
        self.other.weight = self.one.weight
        self.plain = torch.ones(5)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.one(self.chain(x)) + self.other(self.chain(x)) * self.scale.sum()
        return found + torch.tensor([1.0, 2.0, 3.0])


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Net().eval()


def scripted(path: Path, made: nn.Module) -> None:
    torch.jit.script(made).save(path)  # type: ignore[no-untyped-call]


def traced(path: Path, made: nn.Module) -> None:
    torch.jit.trace(made, torch.ones(2, 3)).save(path)  # type: ignore[no-untyped-call]


def exported(path: Path, made: nn.Module) -> None:
    torch.export.save(torch.export.export(made, (torch.ones(2, 3),)), path)


@pytest.mark.slow
@pytest.mark.parametrize("save", [scripted, traced, exported])
@pytest.mark.parametrize("to", ["zip", "legacy", "safetensors"])
def test_the_state_dict_of_a_program(tmp_path: Path, save: Callable[[Path, nn.Module], None], to: Any) -> None:
    living = model()
    save(tmp_path / "net.pt2", living)
    result = ckptfix.extract(tmp_path / "net.pt2", tmp_path / "out", to=to)
    assert result.exit_code == 0
    found = ckptfix.load_state_dict(tmp_path / "out")
    wanted = living.state_dict()
    if save is exported:
        # torch.export puts the parameters of all modules before their buffers.
        assert set(found) == set(wanted)
        wanted = type(wanted)((name, wanted[name]) for name in found)
    assert list(found) == list(wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert found["one.weight"].data_ptr() == found["other.weight"].data_ptr()
    fresh = model(1)
    fresh.load_state_dict(found, strict=True)
    assert torch.equal(fresh(torch.ones(2, 3)), living(torch.ones(2, 3)))


@pytest.mark.parametrize("save", [scripted, traced])
def test_versions_are_those_of_the_python_classes(tmp_path: Path, save: Callable[[Path, nn.Module], None]) -> None:
    living = model()
    save(tmp_path / "net.pt", living)
    ckptfix.extract(tmp_path / "net.pt", tmp_path / "out.pth")
    found = torch.load(tmp_path / "out.pth", weights_only=True)
    assert dict(found._metadata) == dict(living.state_dict()._metadata)  # type: ignore[attr-defined]


@pytest.mark.slow
def test_the_order_is_that_of_the_loaded_program(tmp_path: Path) -> None:
    encoder = gone_models.fill(gone_models.MODELS["encoder"]()).eval()
    made: list[Any] = [torch.jit.script(encoder)]
    made.append(torch.jit.trace(encoder, torch.ones(1, 2, 8)))  # type: ignore[no-untyped-call]
    for number, program in enumerate(made):
        program.save(tmp_path / f"{number}.pt")
        ckptfix.extract(tmp_path / f"{number}.pt", tmp_path / "out.pth", force=True)
        loaded = torch.jit.load(tmp_path / f"{number}.pt").state_dict()  # type: ignore[no-untyped-call]
        found = torch.load(tmp_path / "out.pth", weights_only=True)
        assert list(found) == list(loaded) == list(encoder.state_dict())
        assert all(torch.equal(found[name], tensor) for name, tensor in loaded.items())


def test_a_submodule_and_constants(tmp_path: Path) -> None:
    living = model()
    scripted(tmp_path / "net.pt", living)
    ckptfix.extract(tmp_path / "net.pt", tmp_path / "part.pth", at="chain.1")
    found = torch.load(tmp_path / "part.pth", weights_only=True)
    wanted = living.chain[1].state_dict()  # type: ignore[index, union-attr]
    assert list(found) == list(wanted) and all(torch.equal(found[name], wanted[name]) for name in wanted)
    frozen: Any = torch.jit.freeze(torch.jit.script(living))
    frozen.save(tmp_path / "frozen.pt")
    with pytest.raises(errors.Refused) as caught:
        ckptfix.extract(tmp_path / "frozen.pt", tmp_path / "out.pth")
    assert caught.value.hint == "--at constants extracts its constants"
    ckptfix.extract(tmp_path / "frozen.pt", tmp_path / "out.pth", at="constants")
    constants = torch.load(tmp_path / "out.pth", weights_only=True)
    assert set(constants) <= {f"c{number}" for number in range(20)} and len(constants) > 2
    with pytest.raises(errors.NoSuchTensor):
        ckptfix.extract(tmp_path / "net.pt", tmp_path / "none.pth", at="chain.9")


def test_constants_of_an_exported_program(tmp_path: Path) -> None:
    exported(tmp_path / "net.pt2", model())
    result = ckptfix.extract(tmp_path / "net.pt2", tmp_path / "out.pth", at="constants")
    assert result.tensors == 1
    (constant,) = torch.load(tmp_path / "out.pth", weights_only=True).values()
    assert constant.tolist() == [1, 2, 3]


def rewritten(source: Path, dest: Path, change: Callable[[str, bytes], bytes]) -> Path:
    """The zip `source` with other bytes in some records."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(dest, "w") as new:
        for name in old.namelist():
            new.writestr(name, change(name, old.read(name)))
    return dest


BAD: dict[str, tuple[str, Any]] = {
    "no mapping": ("not a JSON object", {"config": [1]}),
    "no config": ("description of the tensors cannot be read", {}),
    "no path": ("is not what torch writes", {"config": {"w": {"use_pickle": False}}}),
    "a row of text": ("is not what torch writes", {"config": {"w": "x"}}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", list(BAD))
def test_a_bad_description_gives_one_error(tmp_path: Path, case: str) -> None:
    words, config = BAD[case]
    exported(tmp_path / "net.pt2", model())
    text = json.dumps(config).encode()
    path = rewritten(
        tmp_path / "net.pt2",
        tmp_path / "bad.pt2",
        lambda name, data: text if name.endswith("weights_config.json") else data,
    )
    with pytest.raises(errors.BadIndex, match=words):
        ckptfix.extract(path, tmp_path / "out.pth")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (b'"sizes": [{"as_int": 4}, {"as_int": 3}]', b'"sizes": [{"as_int": 4}, {"as_int": 9}]', "needs"),
        (b'"sizes": [{"as_int": 4}, {"as_int": 3}]', b'"sizes": [{"as_int": 4}, {"as_int": -3}]', "not what torch"),
        (b'"dtype": 7', b'"dtype": 99', "not what torch"),
        (b'"path_name": "weight_0"', b'"path_name": "../../x"', "no record"),
    ],
)
def test_descriptions_that_lie(tmp_path: Path, old: bytes, new: bytes, words: str) -> None:
    exported(tmp_path / "net.pt2", model())
    path = rewritten(
        tmp_path / "net.pt2",
        tmp_path / "bad.pt2",
        lambda name, data: data.replace(old, new) if name.endswith("weights_config.json") else data,
    )
    with pytest.raises(errors.DamagedFile, match=words):
        ckptfix.extract(path, tmp_path / "out.pth")


def test_a_program_without_its_code_and_one_without_tensors(tmp_path: Path) -> None:
    scripted(tmp_path / "net.pt", model())
    path = rewritten(tmp_path / "net.pt", tmp_path / "bad.pt", lambda name, data: b"" if ".py" in name else data)
    with pytest.raises(errors.BadPickle, match="no module"):
        ckptfix.extract(path, tmp_path / "out.pth")


def test_views_in_an_exported_program(tmp_path: Path) -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            whole = torch.arange(12.0)
            self.left = nn.Parameter(whole[:6].view(2, 3))
            self.right = nn.Parameter(whole.view(3, 4).t())

        def forward(self, x: Tensor) -> Tensor:
            return x * self.left.sum() + self.right.sum()

    living = Views()
    torch.export.save(torch.export.export(living, (torch.ones(2),)), tmp_path / "net.pt2")
    ckptfix.extract(tmp_path / "net.pt2", tmp_path / "out.pth")
    assert_same(
        {name: tensor.detach() for name, tensor in torch.export.load(tmp_path / "net.pt2").state_dict.items()},
        dict(torch.load(tmp_path / "out.pth", weights_only=True)),
    )
