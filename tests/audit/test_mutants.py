"""The weight audit runs in every verb: a verb that is broken on purpose names what it lost, and exits with 3.

Each mutant breaks one function that stands between the input's tensors and the output's. That torch finds the tensor
missing or changed is asserted apart: a mutant that breaks nothing would prove nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from audit.judge import Outcome, carry_out, named, names
from audit.truth import Leaf, Truth, tensors
from kinds import location_tags
from safetensors.torch import save_file

from ckptfix.formats import FORMATS
from ckptfix.formats.plain import convert as sanitize_convert
from ckptfix.formats.safetensors import edit as safetensors_edit
from ckptfix.formats.safetensors import format as safetensors
from ckptfix.formats.torch import containers as torch_recode
from ckptfix.formats.torch import emit as torch_emit
from ckptfix.formats.torch import legacy as torch_legacy
from ckptfix.formats.torch import legacy_layout, zip_layout
from ckptfix.formats.torch import zip as torch_zip
from ckptfix.formats.torch.damaged import object as damaged
from ckptfix.ops import slim
from ckptfix.pickles import emit, parse, reemit
from ckptfix.pickles.graph import label

pytestmark = pytest.mark.slow

VICTIM = "b.weight"
Patch = pytest.MonkeyPatch


def without_victim(rows: Any) -> Any:
    return [row for row in rows if not str(label(row[0])).endswith(VICTIM)]


def emitter_skips(patch: Patch) -> None:
    """The pickle is written again without one item of a mapping."""
    real = emit.Writer.left

    def left(self: Any, node: Any, rows: Any) -> Any:
        return without_victim(real(self, node, rows))

    patch.setattr(emit.Writer, "left", left)


@contextmanager
def skipping() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        emitter_skips(patch)
        yield


def splice_removes(patch: Patch) -> None:
    """A splice takes a key out, and its value with it."""
    for module in (torch_zip, torch_legacy, torch_recode):
        real = module.splice

        def splice(graph: Any, patches: Any, real: Any = real) -> bytes:
            with skipping():
                return bytes(reemit.reemit(parse(real(graph, patches))).pickle)

        patch.setattr(module, "splice", splice)


def names_drop(patch: Patch) -> None:
    """An edit of a safetensors header takes a row out."""
    real = safetensors_edit.Names.rename

    def rename(self: Any, edit: Any) -> None:
        real(self, edit)
        self.new[next(name for name in self.new if name.endswith(VICTIM))] = None

    patch.setattr(safetensors_edit.Names, "rename", rename)


def share_plan_forgets(patch: Patch) -> None:
    """What is to be written lacks one of the tensors."""
    real = safetensors.FORMAT.split_ties

    def share_plan(entries: Any) -> Any:
        kept, pairs, findings = real(entries)
        return tuple(entry for entry in kept if entry.key != VICTIM), pairs, findings

    patch.setitem(FORMATS, "safetensors", replace(FORMATS["safetensors"], split_ties=share_plan))


def fresh_forgets(patch: Patch) -> None:
    """A fresh state dict lacks one of the tensors."""
    real = torch_emit.fresh

    def fresh(entries: Any, **how: Any) -> Any:
        return real([entry for entry in entries if entry.key != VICTIM], **how)

    patch.setattr(torch_emit, "fresh", fresh)


def shape_changes(patch: Patch) -> None:
    """A tensor is written with another shape."""
    real = torch_emit.tensor_call

    def tensor(entry: Any, storages: Any, **how: Any) -> Any:
        flat = replace(entry, shape=(entry.numel,), stride=(1,)) if entry.key == VICTIM else entry
        return real(flat, storages, **how)

    patch.setattr(torch_emit, "tensor_call", tensor)


def dtype_changes(patch: Patch) -> None:
    """A tensor's bytes are written under another dtype of the same size."""
    real = safetensors.FORMAT.plan_write

    def plan_write(entries: Any, dest: str, **how: Any) -> Any:
        turned = [replace(entry, dtype="int32") if entry.key == VICTIM else entry for entry in entries]
        return real(turned, dest, **how)

    patch.setitem(FORMATS, "safetensors", replace(FORMATS["safetensors"], plan_write=plan_write))


def storages_swap(patch: Patch) -> None:
    """Two storages of one size change places."""
    for module in (zip_layout, legacy_layout):
        real = module.fresh

        def fresh(pickle: bytes, storages: Any, *more: Any, real: Any = real) -> Any:
            rows = list(storages)
            (key, data, *rest), (other, its, *others) = rows[:2]
            rows[:2] = [(key, its, *rest), (other, data, *others)]
            return real(pickle, rows, *more)

        patch.setattr(module, "fresh", fresh)


def unit_starts_late(patch: Patch) -> None:
    """A part of a storage is cut from the wrong place."""
    real: Any = slim.units_of  # type: ignore[attr-defined]

    def units_of(used: Any, new_key: Any, **how: Any) -> Any:
        units = real(used, new_key, **how)
        return [
            replace(unit, data=replace(unit.data, offset=unit.data.offset + 4)) if unit.start else unit
            for unit in units
        ]

    patch.setattr(slim, "units_of", units_of)


def fill_skips(patch: Patch) -> None:
    """sanitize forgets a value of a mapping."""
    real = sanitize_convert.Converter.fill

    def fill(self: Any, into: Any, rows: Any) -> Any:
        return real(self, into, without_victim(rows))

    patch.setattr(sanitize_convert.Converter, "fill", fill)


def repair_forgets(patch: Patch) -> None:
    """repair writes a pickle that lacks what it says it has kept."""

    def rewritten(self: Any, gone: Any, items: Any, counts: Any, **how: Any) -> Any:
        with skipping():
            return reemit.reemit(self._found.graph)

    patch.setattr(damaged.DamagedObject, "rewritten", rewritten)


@dataclass(frozen=True)
class Case:
    line: str
    mutant: Callable[[Patch], None]
    form: str = "zip"

    def __str__(self) -> str:
        return f"{self.line} of {self.form}: {self.mutant.__name__.replace('_', ' ')}"


def cases() -> Iterator[Case]:
    edits = ("strip-module", "add-module", "unwrap", "rename --sub ^=x.", "to-cpu", "map-location cuda:7")
    matched = "match --like {in}.names"
    for form in ("zip", "legacy"):
        for line in (*edits, matched):
            yield Case(line, splice_removes, form)
        yield Case("convert --to safetensors --at model", share_plan_forgets, form)
        yield Case("convert --to safetensors --at model", dtype_changes, form)
        for to in ("zip", "legacy"):
            for mutant in (fresh_forgets, shape_changes, storages_swap):
                yield Case(f"extract --to {to} --at model", mutant, form)
        yield Case("extract --to safetensors --at model", share_plan_forgets, form)
        for mutant in (fill_skips, emitter_skips, storages_swap):
            yield Case("sanitize", mutant, form)
        yield Case("sanitize --keep-only weights", fill_skips, form)
        for line in ("slim", "slim --contiguous", "slim --dedupe"):
            yield Case(line, emitter_skips, form)
            yield Case(line, unit_starts_late, form)
        yield Case("slim --no-optimizer", emitter_skips, form)
        yield Case("repair", repair_forgets, form)
    yield Case("convert --to legacy", splice_removes, "zip")
    yield Case("convert --to legacy", storages_swap, "zip")
    yield Case("convert --to zip", splice_removes, "legacy")
    yield Case("convert --to zip", storages_swap, "legacy")
    for line in (*edits[:1], *edits[1:2], edits[3], matched):
        yield Case(line, names_drop, "safetensors")
    yield Case("convert --to zip", fresh_forgets, "safetensors")
    for to in ("zip", "legacy"):
        yield Case(f"convert --to {to}", shape_changes, "safetensors")


def source(case: Case, folder: Path) -> Path:
    """A checkpoint whose second tensor is the victim, with what the verb works on: a prefix, a device, a class."""
    prefix = "module." if case.line in ("strip-module", "unwrap") else ""
    shared = torch.arange(20.0)
    # A legacy file without the one reference to a storage would not load at all.
    whole = case.line.startswith("slim") or case.mutant is splice_removes
    values = {
        "a.weight": torch.arange(4.0).reshape(2, 2),
        VICTIM: (shared[10:14] if whole else torch.arange(90.0, 94.0)).reshape(2, 2),
        "c.weight": shared[:2],
    }
    model = {f"{prefix}{name}": value for name, value in values.items()}
    like = {f"n.{name}": value for name, value in values.items()}
    path = folder / "in"
    if case.form == "safetensors":
        save_file({name: value.clone() for name, value in model.items()}, path)
        save_file({name: value.clone() for name, value in like.items()}, f"{path}.names")
        return path
    row: dict[str, Any] = {"model": model, "epoch": 3}
    if case.line == "slim --no-optimizer":
        row["optimizer"] = {"state": {0: {"exp_avg": torch.ones(4)}}, "param_groups": [{"lr": 1.0, "params": [0]}]}
    if case.line.startswith("sanitize"):
        row["args"] = argparse.Namespace(lr=0.5)
    with location_tags((lambda _: "cuda:0") if case.line == "to-cpu" else None):
        torch.save(row, path, _use_new_zipfile_serialization=case.form == "zip")
    torch.save(like, f"{path}.names")
    return path


def weights(truth: Truth) -> dict[str, tuple[str, Leaf]]:
    """Last two parts of a name -> address and leaf, of the three tensors of the model."""
    return {
        ".".join(address.replace("/", ".").split(".")[-2:]): (address, leaf)
        for address, leaf in truth.found
        if address.endswith("weight")
    }


def run(case: Case, folder: Path) -> tuple[Outcome, list[str]]:
    """What the broken verb said, and the addresses of the tensors that its output does not hold as they were."""
    path = source(case, folder)
    before = weights(tensors(path, trusted=True))
    with pytest.MonkeyPatch.context() as patch:
        case.mutant(patch)
        done = carry_out(case.line.split(), path, folder / "out")
    assert not done.crash, done.crash
    assert done.code != 2, done.said
    after = weights(tensors(folder / "out", trusted=True))
    return done, [address for name, (address, leaf) in before.items() if after.get(name, ("", None))[1] != leaf]


CASES = list(cases())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_mutant_loses_thetensor_call(case: Case, tmp_path: Path) -> None:
    _, lost = run(case, tmp_path)
    assert any(address.endswith(VICTIM) for address in lost), lost


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_named_and_the_exit_code_is_3(case: Case, tmp_path: Path) -> None:
    done, lost = run(case, tmp_path)
    told, _ = names(done.said)
    assert done.code == 3
    assert [address for address in lost if not named(address, told, str(done.said.get("at") or ""))] == []


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_silent_when_nothing_is_broken(case: Case, tmp_path: Path) -> None:
    done, lost = run(replace(case, mutant=lambda patch: None), tmp_path)
    assert done.code == 0
    assert not lost
