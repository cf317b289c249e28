"""Keys and objects whose addresses are easily taken for each other, under every verb, judged by torch's own loading.

Every tensor has a value that no other one has. So what the output holds, and what is missing of it, is known from what
torch.load makes of both files, whatever anything is called.
"""

from __future__ import annotations

import random
import struct
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from audit.judge import Outcome, carry_out
from builders import Record, Tensor, assemble, build_zip, state_dict_ops, torch_records
from conftest import LONG
from file_commands import Use, lines
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import ckptfix

KEYS: tuple[Any, ...] = (
    "a", "b", "w", "a/b", "a/b/w", "b/w", "", "/", "a/", "/a", "a//b", "weight", "a.weight", "module.a",
    1, "1", 0, "0", "1#2", "a#2", "#1", "()", "()state", "0/w", None, "None", (1, 2), "(1, 2)", b"w", 1.5, "_metadata",
)  # fmt: skip
"""Of which each looks like another one, or like a place in another one, where keys are joined by slashes."""


class Slotted:
    """State that is the pair (None, slots); no other slot can be set."""

    __slots__ = ("b", "w")


class Exact:
    """State that is a tuple, of which each part is asked for by its name."""

    def __init__(self, first: Any, second: Any) -> None:
        self.parts = {"w": first, "bias": second}

    def __getstate__(self) -> Any:
        return (1, {"w": self.parts["w"], "inner": {"bias": self.parts["bias"], "weight": self.parts["w"]}})

    def __setstate__(self, state: Any) -> None:
        version, rows = state
        self.version = version
        self.parts = {"w": rows["w"], "bias": rows["inner"]["bias"], "weight": rows["inner"]["weight"]}


class Called:
    """Made by a call whose arguments are named."""

    def __init__(self, rows: Any = None, **named: Any) -> None:
        self.rows, self.named = rows, named

    def __reduce__(self) -> Any:
        return _call, ({"w": self.rows, "bias": self.named.get("bias")},)


def _call(rows: Any) -> Called:
    return Called(rows["w"], bias=rows["bias"])


class Held:
    """State that is a dict of attributes."""


class Maker:
    """Makes objects whose tensors all differ."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.count = 0

    def tensor(self) -> torch.Tensor:
        self.count += 1
        made: Any = torch.full((2,), float(self.count))
        return torch.nn.Parameter(made) if self.random.random() < 0.2 else made

    def leaf(self) -> Any:
        made: Any = self.tensor()
        if self.random.random() < 0.15:
            made.tag = self.tensor()
        return made

    def mapping(self, depth: int) -> Any:
        made: Any = {} if self.random.random() < 0.6 else OrderedDict()
        for key in self.random.sample(KEYS, self.random.randint(1, 5)):
            made[key] = self.value(depth)
        if isinstance(made, OrderedDict) and self.random.random() < 0.3:
            made.extra = self.tensor()  # type: ignore[attr-defined]
        return made

    def value(self, depth: int) -> Any:
        kind = self.random.random()
        if depth <= 0 or kind < 0.55:
            return self.leaf()
        if kind < 0.75:
            return self.mapping(depth - 1)
        if kind < 0.8:
            return [self.value(depth - 1), self.leaf()]
        if kind < 0.85:
            slotted = Slotted()
            slotted.w, slotted.b = self.value(depth - 1), self.leaf()  # type: ignore[attr-defined]
            return slotted
        if kind < 0.9:
            return Exact(self.leaf(), self.value(depth - 1))
        if kind < 0.95:
            return Called(self.leaf(), bias=self.value(depth - 1))
        held = Held()
        held.__dict__.update(w=self.leaf(), weight=self.value(depth - 1))
        return held


def tensors_in(obj: Any) -> Iterator[torch.Tensor]:
    """Every tensor in an object, attributes of tensors and of dicts among them."""
    stack, seen, kept = [obj], set[int](), []
    while stack:
        one = stack.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        kept.append(one)
        if isinstance(one, torch.Tensor):
            yield one
        if isinstance(one, dict):
            stack += one.values()
        if isinstance(one, list | tuple):
            stack += one
        stack += getattr(one, "__dict__", {}).values()
        stack += (getattr(one, name) for name in getattr(type(one), "__slots__", ()) if hasattr(one, name))


def values_of(path: Path) -> set[float]:
    """The values in a file or folder, as torch loads it; of a file that this test made."""
    if path.is_dir() and not (path / ".metadata").exists():
        return {value for file in path.glob("*.safetensors") for value in values_of(file)}
    if path.is_dir():
        whole = path.with_suffix(".whole")
        dcp_to_torch_save(path, whole)
        path = whole
    try:
        found = torch.load(path, weights_only=False)
    except Exception:
        if path.read_bytes()[8:9] != b"{":
            raise
        from safetensors.torch import load_file

        found = load_file(path)
    return {float(tensor.detach().flatten()[0]) for tensor in tensors_in(found)}


VERBS = tuple((verb, *options) for verb, _, _, *options in lines(Use.KEYS).values())

WHOLE = {"repair", "add-module", "strip-module", "rename", "to-cpu", "cast"}


def wrong(line: tuple[str, ...], done: Outcome, source: Path, out: Path, before: set[float]) -> str | None:
    """What a verb did wrong, judged by what torch loads."""
    said = str(done.said)
    if done.crash or done.code not in (0, 2, 3):
        return f"exit {done.code}: {done.crash or said[:300]}"
    if "a bug in ckptfix" in said:
        return f"it calls itself faulty: {said[:400]}"
    if done.code == 2:
        return "refused, and something was written" if out.exists() else None
    try:
        after = values_of(out)
    except Exception as error:
        return f"the output does not load: {type(error).__name__}: {error}"
    if after - before:
        return f"values that the input has not: {sorted(after - before)}"
    account = done.said.get("weights") or done.said.get("account") or {}
    named = [*done.said.get("left_behind", ()), *done.said.get("lost", ()), *account.get("lost", ())]
    named += [row.get("where") or "" for row in done.said.get("findings", ())]
    entries = ckptfix.open_checkpoint(source).entries
    names = {_first(entry): entry.name for entry in entries}
    aliases = {entry.name for entry in entries if names[_first(entry)] != entry.name}
    missing = {names[value] for value in before - after}
    here = {names[value] for value in before & after} - aliases
    unnamed = [name for name in missing if not any(_below(name, one) for one in named)]
    if unnamed:
        return f"gone and not named: {unnamed}; named are {named[:6]}"
    if missing and line[0] in WHOLE:
        return f"a verb that keeps all left out {missing}"
    false = [one for one in done.said.get("left_behind", ()) if one in here and one not in missing]
    others = {address for address, _ in ckptfix.open_checkpoint(source).values()}
    false = [one for one in false if one not in others and not any(_below(name, one) for name in missing)]
    return f"named as left behind, and in the output: {false}" if false else None


def _first(entry: Any) -> float:
    """The first element of a tensor: its value."""
    span = entry.storage.data
    with open(span.path, "rb") as file:
        file.seek(span.offset)
        return float(torch.frombuffer(bytearray(file.read(4)), dtype=torch.float32)[0])


def _below(name: str, address: str) -> bool:
    return not address or name == address or name.startswith((f"{address}/", f"{address}."))


def wrongs(obj: Any, folder: Path, zipped: bool) -> list[str]:
    source = folder / "in.pth"
    torch.save(obj, source, _use_new_zipfile_serialization=zipped)
    before = values_of(source)
    found = []
    for number, line in enumerate(VERBS):
        out = folder / f"{number}.{line[2] if line[1:2] == ('--to',) and line[0] != 'cast' else 'pth'}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fault = wrong(line, carry_out(line, source, out), source, out, before)
        if fault:
            found.append(f"{' '.join(line)}: {fault}")
    return found


@pytest.mark.sampled(6, quick=2, test_all=12)
@pytest.mark.parametrize("seed", range(2000 if LONG else 40))
def test_what_looks_alike_is_told_apart(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda _: None)
    maker = Maker(seed)
    obj = maker.mapping(3)
    found = wrongs(obj, tmp_path, seed % 2 == 0)
    assert not found, "\n".join([repr(obj), *found])


def _t(value: float) -> torch.Tensor:
    return torch.full((2,), float(value))


def _slotted() -> Slotted:
    made = Slotted()
    made.w, made.b = _t(8), _t(9)  # type: ignore[attr-defined]
    return made


def _tagged() -> Any:
    made: Any = torch.nn.Parameter(_t(3))
    made.tag = _t(4)
    return made


CASES: dict[str, Any] = {
    "a key with a slash beside a tensor": lambda: {"a": _t(1), "a/b": _t(2)},
    "an empty key": lambda: {"": _t(1), "a.b c": _t(2), "m": _t(3)},
    "three places of one text": lambda: {"a/b": {"w": _t(1)}, "a": {"b": {"w": _t(2)}}, "a/b/w": _t(3)},
    "a number beside its text": lambda: {1: _t(1), "1": _t(2), "w": _t(3)},
    "a number beside its text, and what tells them apart": lambda: {1: _t(1), "1": _t(2), "1#2": _t(3)},
    "an attribute": lambda: {"p": _tagged(), "q": _t(5)},
    "an attribute of a dict": lambda: {"sd": _attributed(), "w": _t(2)},
    "slots": lambda: {"sd": {"w": _t(1)}, "s": _slotted()},
    "a state of its own": lambda: {"sd": {"w": _t(1)}, "s": Exact(_t(2), _t(3))},
    "arguments": lambda: {"sd": {"w": _t(1)}, "s": Called(_t(2), bias=_t(3))},
    "a state dict in slots alone": lambda: {"s": _slotted()},
}


def _attributed() -> Any:
    made: Any = OrderedDict(w=_t(1))
    made.extra = _t(7)
    return made


@pytest.mark.sampled(6, quick=1, test_all=14)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("zipped", [True, False])
def test_each_of_them_alone(name: str, zipped: bool, tmp_path: Path) -> None:
    found = wrongs(CASES[name](), tmp_path, zipped)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("keys", [("a", "A"), ("Ab", "aB", "ab"), ("x", "X", "2"), ("0", "b", "B", "3")])
def test_records_that_differ_in_case_are_kept_apart(keys: tuple[str, ...], tmp_path: Path) -> None:
    tensors = {f"w{key}{number}": Tensor(key, (2,), 2) for number, key in enumerate(keys)}
    rows = torch_records(assemble(("PROTO", 2), *state_dict_ops(tensors), "STOP"), [])
    data = [Record(f"archive/data/{key}", struct.pack("<2f", number, number)) for number, key in enumerate(keys)]
    source, out = tmp_path / "in.pth", tmp_path / "out.pth"
    source.write_bytes(build_zip([*rows, *data]))
    done = carry_out(("repair",), source, out)
    assert done.code == 0 and not done.crash, done.said
    assert "case-variant" in str(done.said)
    found = torch.load(out, weights_only=True)
    assert {name: value.tolist() for name, value in found.items()} == {
        name: [float(number)] * 2 for number, name in enumerate(tensors)
    }
    assert not any(finding.severity == "error" for finding in ckptfix.doctor(out).findings)
