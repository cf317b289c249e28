"""load_checkpoint: the whole object, without importing or calling anything that the file names."""

from __future__ import annotations

import argparse
import copy
import json
import pickle
import subprocess
import sys
import types
import warnings
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from builders import assemble, push, torch_zip, written
from compare import assert_same
from kinds import Kind, cases, tensor
from torch import nn

import ckptfix
from ckptfix import ForeignObject
from ckptfix.errors import BadPickle, NoSuchTensor, WouldLoseData

FOREIGN = {"jagged", "dtensor", "numpy-values", "whole-module", "gone-classes", "subclass"}


@pytest.mark.slow
@pytest.mark.sampled(38)
@pytest.mark.parametrize(("kind", "container"), cases(lambda kind: kind.name not in FOREIGN))
def test_it_is_what_torch_loads(kind: Kind, container: str, tmp_path: Path) -> None:
    path = kind.save(tmp_path / "in", container)
    wanted = torch.load(path, weights_only=False, map_location="cpu")
    assert_same(wanted, ckptfix.load_checkpoint(path, map_location="cpu"))


Pair = namedtuple("Pair", "left right")


def saved(path: Path, value: Any, **how: Any) -> Path:
    torch.save(value, path, **how)
    return path


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_values_keep_their_types(tmp_path: Path, protocol: int) -> None:
    value: dict[Any, Any] = {
        "list": [1, 2.5, None, True, "text", b"bytes", bytearray(b"x"), 1 + 2j, range(1, 5, 2), slice(1, None)],
        "tuple": (1, (2, (3,))),
        "sets": [{1, 2}, frozenset({3, 4}), set(), frozenset()],
        "default": defaultdict(list, {"a": [1]}),
        "none": defaultdict(None, {1: 2}),
        "counter": Counter("abca"),
        "ordered": OrderedDict([("z", 1), ("a", 2)]),
        "deque": deque([1, 2], maxlen=3),
        ("a", 1): {frozenset({1}): (None,), None: 1, 2.5: 3, b"k": 4},
        "torch": [torch.Size([2, 3]), torch.bfloat16, torch.device("cuda", 3), torch.strided],
        "numpy": [np.float32(1.5), np.int64(-3), np.bool_(True), np.arange(6).reshape(2, 3), np.arange(3, dtype=">i4")],
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "big": [2**100, -(2**100), float("inf"), -0.0],
    }
    if protocol >= 4:  # before, Python cannot pickle it
        value["format"] = torch.channels_last
    loaded = ckptfix.load_checkpoint(saved(tmp_path / "a.pth", value, pickle_protocol=protocol))
    assert_same(value, loaded)
    assert loaded["default"].default_factory is list and loaded["deque"].maxlen == 3


def test_what_was_one_object_is_one(tmp_path: Path) -> None:
    shared = [1, {"x": tensor(2)}]
    value: dict[str, Any] = {"a": shared, "b": (shared, shared), "t": shared[1]}
    value["itself"] = value
    value["ring"] = [(value["a"],)]
    value["ring"].append(value["ring"])
    loaded = ckptfix.load_checkpoint(saved(tmp_path / "a.pth", value))
    assert loaded["itself"] is loaded and loaded["ring"][1] is loaded["ring"]
    assert loaded["a"] is loaded["b"][0] is loaded["b"][1] is loaded["ring"][0][0]
    assert loaded["t"] is loaded["a"][1]


def test_ties_metadata_and_attributes(tmp_path: Path) -> None:
    model = nn.DataParallel(nn.BatchNorm1d(3))
    noted = tensor(2)
    noted.note = [1]  # type: ignore[attr-defined]
    base = tensor(4, 4)
    value = {"model": model.state_dict(), "noted": noted, "views": [base, base[1:, ::2], base.t()]}
    loaded = ckptfix.load_checkpoint(saved(tmp_path / "a.pth", value))
    assert loaded["model"]._metadata == model.state_dict()._metadata  # type: ignore[attr-defined]
    assert loaded["noted"].note == [1]
    loaded["views"][0].zero_()
    assert not loaded["views"][1].any() and not loaded["views"][2].any()


class Config:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


class Special(dict[str, Any]):
    pass


class Rows(list[Any]):
    pass


def test_a_foreign_class_is_an_inert_record(tmp_path: Path) -> None:
    config = Config(lr=0.1, weight=tensor(2))
    config.itself = config  # type: ignore[attr-defined]
    rows = Rows([1, config])
    value = {"c": config, "s": Special(a=1), "r": rows, "p": Pair(1, [2]), "class": Config, "call": len}
    loaded = ckptfix.load_checkpoint(saved(tmp_path / "a.pth", value))
    found = loaded["c"]
    assert type(found) is ForeignObject and (found.module, found.name) == (__name__, "Config")
    assert found.state["lr"] == 0.1 and torch.equal(found.state["weight"], tensor(2))
    assert found.state["itself"] is found and loaded["r"].elements == [1, found]
    assert loaded["s"].items == [("a", 1)] and loaded["p"].args == (1, [2])
    assert (loaded["class"].name, loaded["class"].args) == ("Config", ())
    assert loaded["call"].name == "len" and {loaded["call"]: 1}
    assert "lr" in repr(found)


def test_a_tensor_that_is_none_of_ours_keeps_its_parts(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    loaded = ckptfix.load_checkpoint(saved(tmp_path / "a.pth", {"n": nested, "w": tensor(2)}))
    assert loaded["n"].name == "_rebuild_nested_tensor" and loaded["n"].args[0].tolist() == [1] * 5
    assert torch.equal(loaded["w"], tensor(2))


@pytest.mark.slow
def test_depth_is_no_limit(tmp_path: Path) -> None:
    depth = 60_000
    lists = assemble(("PROTO", 2), *["EMPTY_LIST"] * depth, *push(7), *["APPEND"] * depth, "STOP")
    tuples = assemble(("PROTO", 2), *push(7), *["TUPLE1"] * depth, "STOP")
    for name, data in (("lists", lists), ("tuples", tuples)):
        value = ckptfix.load_checkpoint(written(tmp_path / name, torch_zip(data)))
        levels = 0
        while value != 7:
            (value,) = value
            levels += 1
        assert levels == depth


def test_an_object_that_cannot_be_is_one_error(tmp_path: Path) -> None:
    ops = assemble(("PROTO", 2), "EMPTY_DICT", "EMPTY_LIST", *push(1), "SETITEM", "STOP")
    with pytest.raises(BadPickle, match=r"cannot represent: .*unhashable"):
        ckptfix.load_checkpoint(written(tmp_path / "a.pth", torch_zip(ops)))


def test_a_tensor_that_the_file_does_not_hold_is_an_error(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pth", {"deep": {"er": [tensor(3)]}})
    data = path.read_bytes()
    broken = data.replace(b"data/0", b"data/9")
    assert broken != data
    with pytest.raises(WouldLoseData, match="no storage '0'") as caught:
        ckptfix.load_checkpoint(written(tmp_path / "b.pth", broken))
    assert caught.value.where == "deep/er/0"


def test_safetensors(tmp_path: Path) -> None:
    values = {"b": tensor(2, 3), "a": tensor(3).half()}
    safetensors.torch.save_file(values, tmp_path / "a.safetensors", {"format": "pt", "epoch": "3"})
    loaded = ckptfix.load_checkpoint(tmp_path / "a.safetensors")
    assert type(loaded) is OrderedDict and loaded.metadata == {"format": "pt", "epoch": "3"}  # type: ignore[attr-defined]
    assert all(torch.equal(loaded[name], value) for name, value in values.items()) and len(loaded) == 2


def test_map_location(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pth", {"x": tensor(2), "y": [tensor(3)]})
    ckptfix.map_location(path, tmp_path / "cuda.pth", "cuda:5")
    assert ckptfix.load_checkpoint(tmp_path / "cuda.pth", map_location="meta")["y"][0].is_meta
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ckptfix.load_checkpoint(tmp_path / "cuda.pth", map_location={"cuda:5": "cpu"})["x"].device.type == "cpu"
    if torch.cuda.device_count() <= 5:
        with pytest.warns(UserWarning, match="saved on cuda:5") as caught:
            ckptfix.load_checkpoint(tmp_path / "cuda.pth")
        assert len(caught) == 1


class Bomb:
    """Unpickled, it would make the file that its argument names."""

    def __init__(self, target: str) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return (exec, (f"open({self.target!r}, 'w').close()",))


NO_CALLS = """
import json, sys
import torch, numpy, numpy.core.multiarray, ckptfix, ckptfix.loaders
from torch import nn
path = sys.argv[1]
model = nn.Linear(2, 2)
optimizer = torch.optim.Adam(model.parameters())
def run():
    found = ckptfix.load_checkpoint(path)
    ckptfix.load_into(model, path)
    try:
        ckptfix.load_optimizer(optimizer, path, model=model)
    except ckptfix.CkptfixError as error:
        found["refused"] = str(error)
    return found["bomb"].name, found["evil"].name, found["refused"]
run()
events = []
watched = ("import", "exec", "compile", "pickle.find_class", "os.", "subprocess.", "socket.", "marshal.", "ctypes.")
on = True
def hook(name, arguments):
    if on and name.startswith(watched):
        events.append(name + repr(arguments)[:200])
sys.addaudithook(hook)
names = run()
seen = list(events)
import wave
on = False
print(json.dumps([names, seen, len(events) > len(seen)]))
"""


@pytest.mark.slow
def test_nothing_in_the_file_is_imported_or_called(tmp_path: Path) -> None:
    made = str(tmp_path / "made")
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(tensor(1, 2)).sum().backward()
    optimizer.step()
    saved_state = copy.deepcopy(optimizer.state_dict())
    saved_state["state"][0]["evil"] = Bomb(made)
    value = {"model": model.state_dict(), "optimizer": saved_state, "bomb": Bomb(made), "evil": Pair}
    path = saved(tmp_path / "a.pth", value)
    with pytest.raises(pickle.UnpicklingError):
        torch.load(path, weights_only=True)
    torch.load(path, weights_only=False)
    assert Path(made).exists()
    Path(made).unlink()
    done = subprocess.run([sys.executable, "-c", NO_CALLS, str(path)], capture_output=True, text=True, check=True)
    names, events, control = json.loads(done.stdout.splitlines()[-1])
    assert names[:2] == ["exec", "Pair"] and "builtins.exec" in names[2]
    assert events == [] and control
    assert not Path(made).exists()


def test_the_values_of_a_namespace(tmp_path: Path) -> None:
    """Its own names may be ``name`` or ``args``, so they are not attributes of the record."""
    settings = argparse.Namespace(lr=0.5, name="small", args=[1])
    loaded = ckptfix.load_checkpoint(saved(tmp_path / "a.pth", {"args": settings}))["args"]
    assert type(loaded) is ForeignObject and (loaded.module, loaded.name) == ("argparse", "Namespace")
    assert loaded.state == vars(settings)


def omegaconf_class(module: str, name: str) -> type:
    """A class that pickles under a name of OmegaConf."""
    return type(name, (), {"__module__": f"omegaconf.{module}", "__qualname__": name})


def test_a_record_reads_like_the_dict_or_list_that_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, type] = {}
    monkeypatch.setitem(sys.modules, "omegaconf", types.ModuleType("omegaconf"))
    for module, name in (("nodes", "AnyNode"), ("dictconfig", "DictConfig"), ("listconfig", "ListConfig")):
        made[name] = omegaconf_class(module, name)
        within = types.ModuleType(f"omegaconf.{module}")
        vars(within)[name] = made[name]
        monkeypatch.setitem(sys.modules, within.__name__, within)

    def node(name: str, **held: object) -> object:
        one = made[name]()
        vars(one).update(held)
        return one

    rows = node("ListConfig", _content=[node("AnyNode", _val=1), node("AnyNode", _val="${lr}")])
    settings = node("DictConfig", _content={"lr": node("AnyNode", _val=0.5), "rows": rows}, _metadata=node("AnyNode"))
    value = {"cfg": settings, "ns": argparse.Namespace(lr=0.5), "own": Special(lr=0.5), "list": Rows([1, 2])}
    loaded = ckptfix.load(saved(tmp_path / "a.pth", value))
    for name in ("cfg", "ns", "own"):
        record = loaded[name]
        assert record["lr"] == record.lr == dict(record)["lr"] == 0.5 and "lr" in record and "no" not in record
        assert "lr" in dir(record) and record
        with pytest.raises(KeyError):
            record["no"]
        with pytest.raises(AttributeError, match="lr"):
            record.no  # noqa: B018
    assert list(loaded["cfg"].rows) == [1, "${lr}"] and loaded["cfg"].rows[0] == 1
    assert list(loaded["list"]) == [1, 2] and not loaded["list"].keys()
    assert "lr=0.5" in repr(loaded["cfg"])


def test_a_part_of_the_object(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pth", {"hyper_parameters": {"lr": 0.5}, "model": {"w": tensor(2), "v": tensor(3)}})
    assert ckptfix.load(path, at="hyper_parameters") == {"lr": 0.5}
    assert ckptfix.load(path, at="hyper_parameters/lr") == 0.5
    assert torch.equal(ckptfix.load(path, at="model/v"), tensor(3))
    with pytest.raises(NoSuchTensor):
        ckptfix.load(path, at="nothing")


class Marked(torch.Tensor):
    """A subclass with an attribute."""

    note: str


@pytest.mark.parametrize("how", ["load_checkpoint", "load_state_dict", "assign", "copy"])
def test_a_tensor_of_a_subclass_comes_plain_and_that_is_said_once(tmp_path: Path, how: str) -> None:
    values = [tensor(2).as_subclass(Marked) for _ in range(2)]
    values[0].note = "hi"
    path = saved(tmp_path / "a.pth", {"a.w": values[0], "b.w": values[1], "c.w": nn.Parameter(tensor(2))})
    model = nn.ModuleDict({name: nn.Module() for name in "abc"})
    for part in model.values():
        part.register_buffer("w", torch.zeros(2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if how in ("assign", "copy"):
            ckptfix.load_into(model, path, assign=how == "assign")
            loaded = model.state_dict()
        else:
            loaded = getattr(ckptfix, how)(path)
    assert type(loaded["a.w"]) is torch.Tensor and torch.equal(loaded["a.w"], tensor(2))
    told = [str(row.message) for row in caught]
    plain = f".w is a {__name__}.Marked, which is not imported: it becomes a plain tensor"
    assert [text[1:] for text in told] == ([] if how == "copy" else [plain])
    if how == "load_checkpoint":
        assert vars(loaded["a.w"]) == {"note": "hi"}
