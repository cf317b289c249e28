"""The walk over the object: addresses, state dicts, values, and what must not unfold."""

from __future__ import annotations

import io
import pickle
import time
import zipfile
from pathlib import Path
from typing import Any

import builders
import pytest
import torch

from ckptfix.checkpoint.plain_values import plain
from ckptfix.formats import open_checkpoint
from ckptfix.formats.torch import legacy_layout
from ckptfix.formats.torch.object import walk
from ckptfix.pickles import Graph, parse


def values(data: bytes) -> dict[str, Any]:
    return dict(walk(parse(data)).plain_values())


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_values_have_addresses(protocol: int) -> None:
    value = {"epoch": 3, "lr": [0.1, 0.2], "args": {"name": "x", "raw": b"\xff\0"}, "none": None, "empty": {}, 5: True}
    found = values(pickle.dumps(value, protocol))
    assert found["epoch"] == 3
    assert found["lr"] == [0.1, 0.2]
    assert found["args/name"] == "x"
    assert found["args/raw"] == b"\xff\0"
    assert found["5"] is True
    assert set(found) == {"epoch", "lr", "args/name", "args/raw", "none", "empty", "5"}


def test_long_sequences_are_given_whole() -> None:
    history = list(range(1000))
    assert values(pickle.dumps({"history": history}, 2))["history"] == history


def test_a_shared_tuple_is_a_value_at_each_place() -> None:
    betas = (0.9, 0.999)
    found = values(pickle.dumps([{"betas": betas}, {"betas": betas}], 2))
    assert found == {"0/betas": betas, "1/betas": betas}


def test_a_foreign_object_is_described_and_its_state_is_walked() -> None:
    found = values(b"\x80\x02cgone\nArgs\n)\x81}X\x02\0\0\0lrG?\xb9\x99\x99\x99\x99\x99\x9asb.")
    assert found == {"": "<gone.Args()>", "lr": 0.1}


@pytest.mark.parametrize(("names", "count"), [(["layer.249.weight"], 299), (["state", "param_groups"], 300)])
def test_tensors_of_a_row_with_other_names_are_listed(names: list[str], count: int, tmp_path: Path) -> None:
    """A name that comes again has the last tensor; a dict with the keys of an optimizer may hold tensors alone."""
    rows = {f"layer.{number:03}.weight": torch.full((2,), float(number)) for number in range(300)}
    torch.save(rows, tmp_path / "in.pth")
    with zipfile.ZipFile(tmp_path / "in.pth") as archive:
        data = archive.read("in/data.pkl")
    for number, name in enumerate(names):
        old = f"layer.{number + 250}.weight".encode()
        data = data.replace(len(old).to_bytes(4, "little") + old, len(name).to_bytes(4, "little") + name.encode())
    found = walk(parse(data))
    listed: dict[str, Any] = {key: node for _, key, node in found.tensors}
    assert len(found.tensors) == len(listed) == count and listed.keys() >= set(names)
    assert [(state.at, state.tensors) for state in found.state_dicts] == [("", count)]
    if len(names) == 1:
        assert listed[names[0]].args[0].fields[2] == "250"


def test_cycles_end() -> None:
    value: dict[str, Any] = {"a": 1}
    value["self"] = value
    found = values(pickle.dumps(value, 2))
    assert found["a"] == 1
    assert "same object" in found["self"]


def test_laughs_are_not_unfolded() -> None:
    """Each list holds the one before twice: 2**60 leaves, 60 objects."""
    ops: list[Any] = [("GLOBAL", "gone", "Call"), "EMPTY_LIST", ("BINPUT", 0)]
    for index in range(1, 60):
        ops += ["EMPTY_LIST", ("BINPUT", index), "MARK", ("BINGET", index - 1), ("BINGET", index - 1), "APPENDS"]
    start = time.process_time()
    found = values(builders.assemble(("PROTO", 2), *ops, "TUPLE1", "REDUCE", "STOP"))
    assert len(str(found)) < 100_000
    assert time.process_time() - start < 1


def test_huge_integers_become_hexadecimal() -> None:
    value = 1 << 20_000
    assert plain(value) == hex(value)
    assert values(pickle.dumps({"n": value}, 2))["n"] == hex(value)


def tensors_at(value: dict[str, Any]) -> dict[str, bool]:
    """Address of every state dict that is found in a saved `value` -> whether it counts as a model's."""
    file = io.BytesIO()
    torch.save(value, file)
    with zipfile.ZipFile(file) as archive:
        found = walk(parse(archive.read("archive/data.pkl")))
    return {state.at: state.weights for state in found.state_dicts}


def test_scores_of_a_callback_are_no_model() -> None:
    score = torch.tensor(0.25)
    checkpoint = {
        "monitor": "loss",
        "best_model_score": score,
        "best_k_models": {"/runs/epoch=0-step=5.ckpt": score, "last.ckpt": score},
    }
    found = tensors_at(
        {
            "state_dict": {"fc.weight": torch.ones(2, 2), "scale": score},
            "callbacks": {"ModelCheckpoint{'monitor': 'loss'}": checkpoint, "EarlyStopping": {"best_score": score}},
        }
    )
    assert {at for at, weights in found.items() if weights} == {"state_dict"}
    assert "callbacks/EarlyStopping" in found


@pytest.mark.parametrize(
    ("value", "at"),
    [
        ({"w": torch.tensor(3)}, ""),
        ({"a": {"w": torch.ones(3)}}, "a"),
        ({"a": {"x.scale": torch.tensor(3.0)}}, "a"),
        ({"a": torch.nn.ParameterDict({"s": torch.nn.Parameter(torch.tensor(2.0))}).state_dict()}, "a"),
    ],
)
def test_a_model_of_one_tensor_is_one(value: dict[str, Any], at: str) -> None:
    assert tensors_at(value)[at]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("listed", [False, True])
def test_a_long_legacy_pickle_is_parsed_once(
    protocol: int, listed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The size of it is stated nowhere; what is read at first is made larger until its end is in it."""
    state = {f"layer.{number}.weight": torch.full((2,), float(number)) for number in range(50)}
    path = tmp_path / "in.pth"
    torch.save([state] if listed else state, path, pickle_protocol=protocol, _use_new_zipfile_serialization=False)
    looked: list[str] = []

    def watched(data: bytes, *, where: str, **rest: Any) -> Graph:
        looked.append(where)
        return parse(data, where=where, **rest)

    monkeypatch.setattr(legacy_layout, "FIRST_WINDOW", 1000)
    monkeypatch.setattr(legacy_layout, "parse", watched)
    assert [entry.key for entry in open_checkpoint(path).entries] == list(state)
    # A list begins as the list of the keys does: then some is parsed in vain.
    assert looked.count("object") == looked.count("storage keys") or listed
