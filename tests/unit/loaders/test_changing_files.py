"""A file that changes at any step of a load gives an error that says so, or values of exactly one version."""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import rank_files
import sharded
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save
from torch_versions import ALONE, add_pre_hook, checksums

import ckptfix
from ckptfix.errors import ChangedFile, CkptfixError
from ckptfix.loaders import reading
from ckptfix.ops import writing

State = dict[str, torch.Tensor]

SIZES = {"large": 20_000, "small": 30, "cast": 2_000, "again": 20_000}
"""Of the tensors: one is read straight into its parameter, others are copied; `cast` has another dtype in the file."""

MOST_STEPS = 7
"""Of the steps of a load, those that are tried: the first, the last, and some between."""


class Net(nn.Module):
    def __init__(self, fill: float = 0.0) -> None:
        super().__init__()
        for name, size in SIZES.items():
            self.register_parameter(name, nn.Parameter(torch.full((size,), fill)))


class OwnWay(Net):
    """One that torch's walk through the modules loads."""

    def __init__(self) -> None:
        super().__init__()
        add_pre_hook(self)


def state(version: int) -> State:
    return {
        name: torch.full((size,), float(version), dtype=torch.float64 if name == "cast" else torch.float32)
        for name, size in SIZES.items()
    }


def training(version: int) -> dict[str, Any]:
    """A model, and the state of an optimizer, whose every number says which version it is of."""
    model = Net(float(version))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float(version))
    optimizer.step()
    return {"model": state(version), "optimizer": optimizer.state_dict()}


def zipped(path: Path, version: int) -> None:
    torch.save(training(version), path)


def without_sums(path: Path, version: int) -> None:
    with checksums(False):
        torch.save(training(version), path)


def legacy(path: Path, version: int) -> None:
    torch.save(training(version), path, _use_new_zipfile_serialization=False)


def safetensors(path: Path, version: int) -> None:
    save_file(state(version), path)


def hf(path: Path, version: int) -> None:
    sharded.write(path, sharded.parted(state(version), 2))


def dcp(path: Path, version: int) -> None:
    save(training(version), checkpoint_id=path, **ALONE)


def ranks(path: Path, version: int) -> None:
    path.mkdir()
    for rank in range(2):
        rows: dict[str, rank_files.Placed] = {name: (value, ("0",)) for name, value in state(version).items()}
        rank_files.distributed(path / f"model_world_size_2_rank_{rank}.pt", rank, (2,), rows)


KINDS: dict[str, Callable[[Path, int], None]] = {
    "a.pth": zipped, "sums.pth": without_sums, "old.pth": legacy, "a.safetensors": safetensors,
    "hf": hf, "dcp": dcp, "ranks": ranks,
}  # fmt: skip
WITH_OPTIMIZER = ("a.pth", "sums.pth", "old.pth", "dcp")


def files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(one for one in path.rglob("*") if one.is_file())


def overwritten(path: Path, other: Path) -> None:
    with open(path, "r+b") as file:
        file.write(other.read_bytes())


def cut(path: Path, other: Path) -> None:
    os.truncate(path, path.stat().st_size // 3)


def replaced(path: Path, other: Path) -> None:
    shutil.copy(other, f"{path}.new")
    Path(f"{path}.new").replace(path)


def appended(path: Path, other: Path) -> None:
    with open(path, "ab") as file:
        file.write(bytes(100))


def rewritten(path: Path, other: Path) -> None:
    """As torch.save does: cut to nothing, then written."""
    shutil.copyfile(other, path)


CHANGES: tuple[Callable[[Path, Path], None], ...] = (overwritten, cut, replaced, appended, rewritten)


def _into(model: nn.Module, path: Path, **how: Any) -> State:
    ckptfix.load_into(model, path, **how)
    return model.state_dict()


def _optimizer(path: Path) -> State:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    ckptfix.load_optimizer(optimizer, path, model=model)
    return {str(number): own["momentum_buffer"] for number, own in enumerate(optimizer.state.values())}


def _checkpoint(path: Path) -> State:
    loaded = ckptfix.load_checkpoint(path)
    return dict(loaded.get("model", loaded))


LOADERS: dict[str, Callable[[Path], State]] = {
    "load_state_dict": lambda path: dict(ckptfix.load_state_dict(path)),
    "load_checkpoint": _checkpoint,
    "load_optimizer": _optimizer,
}
INTO: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "load_into": (Net, {}),
    "load_into without verify": (Net, {"verify": False}),
    "load_into, assign": (Net, {"assign": True}),
    "load_into, own way": (OwnWay, {}),
    "load_into, own way, assign": (OwnWay, {"assign": True}),
}


class Steps:
    """The steps of a load, each a call that asks the kernel about a file; `act` is called before one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.at = -1
        self.act: Callable[[], None] = lambda: None
        self.inside = False
        for name in ("pread", "preadv", "fstat"):
            monkeypatch.setattr(os, name, self._counted(getattr(os, name)))

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            if not self.inside:
                self.inside = True
                try:
                    if self.count == self.at:
                        self.act()
                    self.count += 1
                finally:
                    self.inside = False
            return call(*arguments)

        return counted

    def of(self, load: Callable[[], object]) -> int:
        """How many `load` takes."""
        self.count, self.at = 0, -1
        load()
        return self.count

    def run(self, at: int, act: Callable[[], None], load: Callable[[], State]) -> State:
        self.count, self.at, self.act = 0, at, act
        try:
            return load()
        finally:
            self.at = -1


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[Steps]:
    with monkeypatch.context() as patched:
        yield Steps(patched)


def tried(count: int) -> list[int]:
    if count <= MOST_STEPS:
        return list(range(count))
    return sorted({round(number * (count - 1) / (MOST_STEPS - 1)) for number in range(MOST_STEPS)})


def versions(loaded: State) -> set[float]:
    """The numbers that are in the tensors: each version has one of its own."""
    return {number for value in loaded.values() for number in value.detach().double().flatten().tolist()}


def copied(loaded: State) -> State:
    return {name: value.detach().clone() for name, value in loaded.items()}


def same(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value.detach(), other[name]) for name, value in one.items())


def made(tmp_path: Path, kind: str) -> tuple[Path, Path, Path]:
    """The path that is loaded, and the two versions, which have the same size file by file."""
    old, new, path = tmp_path / "1" / kind, tmp_path / "2" / kind, tmp_path / kind
    for version, place in ((1, old), (2, new)):
        place.parent.mkdir()
        KINDS[kind](place, version)
    return path, old, new


def put(path: Path, old: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    (shutil.copytree if old.is_dir() else shutil.copy)(old, path)


def acts(path: Path, new: Path, change: Callable[[Path, Path], None]) -> list[Callable[[], None]]:
    """The change of all files, and of the largest one alone where there are several."""
    rows = [(one, new / one.relative_to(path) if path.is_dir() else new) for one in files(path)]
    largest = max(rows, key=lambda row: row[0].stat().st_size)

    def every() -> None:
        for row in rows:
            change(*row)

    return [every, lambda: change(*largest)] if len(rows) > 1 else [every]


def grid() -> Iterator[Any]:
    for kind in KINDS:
        for loader in (*LOADERS, *INTO):
            if loader != "load_optimizer" or kind in WITH_OPTIMIZER:
                yield pytest.param(kind, loader, id=f"{kind}, {loader}")


@pytest.mark.sampled(9, quick=1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "loader"), list(grid()))
def test_one_version_or_an_error(tmp_path: Path, steps: Steps, kind: str, loader: str) -> None:
    path, old, new = made(tmp_path, kind)
    model: list[nn.Module] = []

    def load() -> State:
        if loader in LOADERS:
            return LOADERS[loader](path)
        make, how = INTO[loader]
        model[:] = [make()]
        return _into(model[0], path, **how)

    put(path, old)
    count = steps.of(load)
    first = copied(load())
    put(path, new)
    second = copied(load())
    assert (versions(first), versions(second)) == ({1.0}, {2.0})
    wrong = []
    for change in CHANGES:
        for number in range(len(acts(path, new, change))):
            for step in tried(count):
                put(path, old)
                try:
                    found = steps.run(step, acts(path, new, change)[number], load)
                except CkptfixError as error:
                    if complaint := _complaint(str(error), loader, model):
                        wrong.append(f"{change.__name__} at {step} of {count}: {complaint}: {error}")
                else:
                    right = (first, second, *_before_it_began(load, path, old, new, number))
                    if not any(same(found, one) for one in right):
                        wrong.append(f"{change.__name__} of {number} at {step} of {count}: a mix of {versions(found)}")
    assert not wrong, "\n".join(wrong)


def _before_it_began(load: Callable[[], State], path: Path, old: Path, new: Path, number: int) -> list[State]:
    """What a load gives where one of several files was changed before it began: no reader can know of that."""
    if not number:
        return []
    put(path, old)
    acts(path, new, overwritten)[number]()
    return [copied(load())]


def _complaint(error: str, loader: str, model: list[nn.Module]) -> str:
    """What is wrong with an error; empty for a right one."""
    if "bug in ckptfix" in error:
        return "called a fault of ckptfix"
    if loader not in INTO:
        return ""
    has = versions(model[0].state_dict())
    if has == {0.0}:
        return "" if "were overwritten" not in error else "says that tensors were overwritten, and none was"
    if "assign" in loader:
        return f"the model has {has}"
    touched = [name for name, value in model[0].state_dict().items() if value.any()]
    unsaid = [name for name in touched if name not in error]
    return f"does not name {unsaid}" if unsaid else ""


@pytest.mark.parametrize("loader", ["load_into", "load_into, own way"])
def test_what_was_overwritten_is_named(tmp_path: Path, loader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written to after the last byte was copied, before the file is looked at again."""
    path, old, new = made(tmp_path, "a.safetensors")
    put(path, old)
    calls = []
    look = reading.Reading.refuse_changes

    def late(self: reading.Reading) -> None:
        calls.append(self)
        if len(calls) == 2:
            overwritten(path, new)
        look(self)

    monkeypatch.setattr(reading.Reading, "refuse_changes", late)
    model = INTO[loader][0]()
    with pytest.raises(ChangedFile, match="it changed while it was read: it was written to") as caught:
        ckptfix.load_into(model, path)
    assert all(name in str(caught.value) for name in SIZES)


@pytest.mark.parametrize("kind", ["old.pth", "a.safetensors", "sums.pth"])
def test_a_file_in_the_middle_of_a_write_is_read_twice(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its times are those of the beginning of the write: only its bytes show that it goes on."""
    path, old, new = made(tmp_path, kind)
    put(path, old)
    times = path.stat()
    monkeypatch.setattr("ckptfix.checkpoint.file_version.FileStat.same", lambda self, other: True)
    look = reading.Reading.refuse_changes

    def late(self: reading.Reading) -> None:
        overwritten(path, new)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        look(self)

    monkeypatch.setattr(reading.Reading, "refuse_changes", late)
    with pytest.raises(ChangedFile, match="a second reading gave different bytes"):
        ckptfix.load_state_dict(path, at="" if kind.endswith("safetensors") else "model")
    put(path, old)
    monkeypatch.setattr(time, "time_ns", lambda: path.stat().st_ctime_ns + reading.RECENT)
    ckptfix.load_state_dict(path, at="" if kind.endswith("safetensors") else "model")


@pytest.mark.parametrize("mmap", [False, True])
def test_memory_is_the_caller_s_own_unless_a_map_is_asked_for(tmp_path: Path, mmap: bool) -> None:
    path, old, new = made(tmp_path, "a.pth")
    put(path, old)
    held = {
        "state dict": ckptfix.load_state_dict(path, at="model", mmap=mmap),
        "checkpoint": ckptfix.load_checkpoint(path, mmap=mmap)["model"],
        "model": _into(Net(), path, at="model", assign=True, mmap=mmap),
    }
    overwritten(path, new)
    for name, loaded in held.items():
        assert versions({"large": loaded["large"]}) == ({2.0} if mmap else {1.0}), name
    if not mmap:
        os.truncate(path, 10)
        for name, loaded in held.items():
            assert versions(dict(loaded)) == {1.0}, name


VERBS: dict[str, Callable[[Path, Path], object]] = {
    "convert": lambda path, out: ckptfix.convert(path, out.with_suffix(".safetensors")),
    "select": lambda path, out: ckptfix.select(path, out, keep=["large"]),
    "add_module": lambda path, out: ckptfix.add_module(path, out, at="model"),
    "cast": lambda path, out: ckptfix.cast(path, out, "bf16"),
    "map_location": lambda path, out: ckptfix.map_location(path, out, "cuda:0"),
    "slim": lambda path, out: ckptfix.slim(path, out),
}
IN_PLACE: dict[str, Callable[[Path, Path], object]] = {
    "in place": lambda path, out: ckptfix.add_module(path, at="model", in_place=True),
}


@pytest.mark.sampled(1_000)
@pytest.mark.parametrize(("kind", "verb"), [
    *(("a.pth", verb) for verb in (*VERBS, *IN_PLACE)), *(("old.pth", verb) for verb in VERBS),
])  # fmt: skip
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_verb_says_that_its_input_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, verb: str, change: Callable[[Path, Path], None]
) -> None:
    """Between the plan and the reading of what was planned."""
    path, old, new = made(tmp_path, kind)
    put(path, old)
    audit = vars(writing)["audit"]

    def late(*arguments: Any) -> Any:
        change(path, new)
        return audit(*arguments)

    monkeypatch.setattr(writing, "audit", late)
    with pytest.raises(ChangedFile, match="it changed while it was read: ") as caught:
        (VERBS | IN_PLACE)[verb](path, tmp_path / "out.pth")
    assert caught.value.path == str(path)
    assert {one.name for one in tmp_path.iterdir()} == {"1", "2", kind}


FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("saved", FLOATS[:4], ids=str)
@pytest.mark.parametrize("target", FLOATS, ids=str)
@pytest.mark.parametrize("own_way", [False, True])
def test_numbers_beyond_the_range_are_counted(
    tmp_path: Path, saved: torch.dtype, target: torch.dtype, own_way: bool
) -> None:
    torch.manual_seed(0)
    powers = torch.linspace(-300, 300, 2000, dtype=torch.float64)
    edges = [448.0, 464.0, 465.0, 61440.0, 65504.0, 65519.0, 65520.0, math.inf, -math.inf, math.nan, 3.4028235e38]
    values = torch.cat([10.0**powers, -(10.0**powers), torch.tensor([*edges, *(-edge for edge in edges)])]).to(saved)
    torch.save({"w": values}, tmp_path / "a.pth")
    model = nn.Module()
    model.register_buffer("w", torch.zeros(len(values)).to(target))
    if own_way:
        add_pre_hook(model)
    report = ckptfix.load_into(model, tmp_path / "a.pth")
    got = model.get_buffer("w").double()
    if target is torch.float8_e4m3fn:
        wanted = int((values.isfinite() & (values.double().abs() > 464)).sum())
    else:
        wanted = int((values.isfinite() & ~got.isfinite()).sum())
    assert report.overflow == ({"w": wanted} if wanted else {})
    assert ("beyond the range" in str(report)) == bool(wanted)
    if wanted:
        assert f"{wanted:,} in {str(target).removeprefix('torch.')}" in str(report)
        with pytest.warns(UserWarning, match="beyond the range"):
            ckptfix.load_into(model, tmp_path / "a.pth")


@pytest.mark.parametrize(("saved", "target", "values", "count"), [
    (torch.int64, torch.int32, [2**40, 5, -(2**31), 2**31], 2),
    (torch.int64, torch.float16, [70000, 5, -70000], 2),
    (torch.float32, torch.int8, [200.0, 5.0, math.nan, -128.0], 2),
    (torch.float32, torch.bool, [1e30, 0.0], 0),
    (torch.complex128, torch.complex64, [1e300 + 1j, 1 - 1e300j], 2),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_so_are_other_numbers(
    tmp_path: Path, saved: torch.dtype, target: torch.dtype, values: list[Any], count: int
) -> None:
    torch.save({"w": torch.tensor(values, dtype=saved)}, tmp_path / "a.pth")
    model = nn.Module()
    model.register_buffer("w", torch.zeros(len(values), dtype=target))
    assert ckptfix.load_into(model, tmp_path / "a.pth").overflow == ({"w": count} if count else {})
