"""Edits of state dicts whose tensors are never nodes write what the same edits write node by node."""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfix
from ckptfix.errors import CkptfixError
from ckptfix.formats import FORMATS, open_checkpoint
from ckptfix.formats.torch import failing_calls
from ckptfix.formats.torch import zip as zip_format
from ckptfix.formats.torch.common import pickled_object
from ckptfix.ops.audit.promise import Account
from ckptfix.ops.rename import sites
from ckptfix.pickles import Dict, parse
from ckptfix.pickles.machine import RareOpcodes
from ckptfix.pickles.rows import Rows, rows_of

DTYPES = (torch.float32, torch.float16, torch.int64, torch.bool, torch.complex64, torch.bfloat16)


def tensor(pick: random.Random, whole: torch.Tensor) -> Any:
    kind = pick.randrange(24)
    if kind == 0:
        return whole[pick.randrange(4) :, :2]
    if kind == 1:
        return whole.t()
    if kind == 2:
        return torch.nn.Parameter(torch.ones(2))
    if kind == 3:
        marked = torch.ones(2, requires_grad=True)
        marked.note = "n"  # type: ignore[attr-defined]
        return marked
    if kind == 4:
        return pick.choice((3, "text", None, whole[0]))
    shape = pick.choice(((3,), (2, 2), (2, 2), (), (1, 2, 1, 2), (0,), (300, 2), (5, 1, 1)))
    return torch.zeros(shape, dtype=pick.choice(DTYPES), requires_grad=False)


def state_dict(pick: random.Random, prefix: str) -> dict[str, Any]:
    """Mostly what a model has, with odd names and odd values among it, in runs of either."""
    whole = torch.zeros(6, 4)
    rows: dict[str, Any] = OrderedDict() if pick.random() < 0.7 else {}
    common = torch.ones(3)
    for number in range(pick.choice((3, 50, 300, 300, 1100))):
        name = f"{prefix}block.{number // 6}.{pick.choice(('weight', 'bias', 'größe'))}.{number}"
        if pick.random() < 0.01:
            name = prefix + pick.choice(("cpu", "storage", "x" * 300, "", "\ud800", "a.b", str(number)))
        odd = pick.random() < 0.01
        rows[name] = tensor(pick, whole) if odd else torch.zeros(2, 3 if number % 2 else 2)
        if pick.random() < 0.005:
            rows[name] = common
    if isinstance(rows, OrderedDict) and pick.random() < 0.7:
        rows._metadata = OrderedDict([("", {"version": 1}), (f"{prefix}block", {"version": 2})])  # type: ignore[attr-defined]
    return rows


def checkpoint(pick: random.Random) -> object:
    prefix = pick.choice(("module.", "module.", "_orig_mod.", ""))
    weights = state_dict(pick, prefix)
    if pick.random() < 0.4:
        return weights
    saved: dict[str, object] = {"model": weights, "epoch": 3, "ema": dict(weights), "cpu": torch.ones(2)}
    if pick.random() < 0.5:
        saved["device"] = torch.device("cpu")
    names = list(weights)
    saved["optimizer"] = {
        "state": {number: {"step": torch.ones(()), "exp_avg": torch.ones(2)} for number in range(len(names) % 60)},
        "param_groups": [{"params": list(range(len(names))), "param_names": names}],
    }
    if pick.random() < 0.5:
        saved["other"] = state_dict(pick, prefix)
    return saved


def renamed(source: Path, out: Path) -> Account:
    return ckptfix.rename(source, out, subs=[(r"block\.1", "stage.one"), ("ß", "ss"), ("^cpu$", "cuda:0")]).account


def moved(source: Path, out: Path) -> Account:
    return ckptfix.to_cpu(source, out).account


def stripped(source: Path, out: Path) -> Account:
    return ckptfix.strip_module(source, out).account


def added(source: Path, out: Path) -> Account:
    return ckptfix.add_module(source, out).account


def mapped(source: Path, out: Path) -> Account:
    return ckptfix.map_location(source, out, {"cpu": "cuda:1"}).account


VERBS: Mapping[str, Callable[[Path, Path], Account]] = {
    "rename": renamed, "to-cpu": moved, "strip": stripped, "add": added, "map": mapped,
}  # fmt: skip


def outcome(verb: Callable[[Path, Path], Account], source: Path, out: Path) -> tuple[object, bytes]:
    out.unlink(missing_ok=True)
    try:
        account: object = verb(source, out).as_dict()
    except CkptfixError as error:
        return (type(error), error.message, error.where), b""
    return account, out.read_bytes()


@pytest.mark.slow
@pytest.mark.sampled(2, test_all=4)
@pytest.mark.parametrize("seed", range(8))
def test_edits_write_what_they_write_node_by_node(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pick = random.Random(seed)
    torch.manual_seed(seed)
    source = tmp_path / "source.pth"
    protocol = 2 if seed % 4 else 4
    torch.save(checkpoint(pick), source, pickle_protocol=protocol, _use_new_zipfile_serialization=seed % 5 != 0)
    folded = {name: outcome(verb, source, tmp_path / "out.pth") for name, verb in VERBS.items()}
    listed = json.dumps(ckptfix.inspect(source).as_dict(), sort_keys=True)
    started = RareOpcodes.__init__

    def without_folding(self: RareOpcodes, graph: Any) -> None:
        started(self, graph)
        self.folds = False

    monkeypatch.setattr(RareOpcodes, "__init__", without_folding)
    for name, verb in VERBS.items():
        assert outcome(verb, source, tmp_path / "out.pth") == folded[name], name
    assert json.dumps(ckptfix.inspect(source).as_dict(), sort_keys=True) == listed


@pytest.mark.slow
def test_tensors_of_a_state_dict_are_not_made_nodes_by_an_edit_of_names(tmp_path: Path) -> None:
    source = tmp_path / "source.pth"
    tied = torch.ones(3)
    weights = {f"module.layer.{number}.weight": torch.zeros(2, 2) for number in range(3000)}
    weights |= {"module.first": tied, "module.second": tied}
    torch.save(OrderedDict(weights | {f"module.last.{number}": torch.zeros(3) for number in range(3000)}), source)
    opened = open_checkpoint(source)
    (site,) = pickled_object(opened).found.sites
    assert isinstance(site.keys, Rows)
    assert len(site.keys.others()) < 1100, "the first ones, and the batch of the tied one up to it"
    assert FORMATS["zip"].plan_edit(opened, sites.strip(opened).edits, "out.pth")
    assert len(site.nodes) < 1200
    ckptfix.strip_module(source, tmp_path / "out.pth")
    loaded = torch.load(tmp_path / "out.pth", weights_only=True)
    assert list(loaded) == [name.removeprefix("module.") for name in torch.load(source, weights_only=True)]


def test_calls_that_fail_are_found_beside_tensors_that_are_not_made_nodes(tmp_path: Path) -> None:
    source = tmp_path / "source.pth"
    torch.save({str(number): torch.zeros(2, 2) for number in range(2500)}, source)
    _, stream = zip_format.read_stream(str(source))
    assert stream.endswith(b"u.")
    assert not list(failing_calls.findings(parse(stream)))
    listed = parse(stream[:-2] + b"](K\x01K\x02eK\x01u.")
    assert [row.id for row in failing_calls.findings(listed)] == ["bad-call"]
    assert isinstance(listed.root, Dict)
    assert rows_of(listed.root) is not None, "it is found without the tensors"
    assert len(listed.root.items) == 2501
