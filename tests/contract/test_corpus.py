"""Files from other projects: inspected, stripped or unwrapped, moved, converted, compared, and loaded by torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from compare import assert_same, tensor_bytes
from conftest import RealFile
from safetensors.torch import load_file

import ckptfix
from ckptfix import errors
from ckptfix.checkpoint import StateDict

pytestmark = pytest.mark.campaign

OURS = {"zip": "zip", "legacy": "legacy", "safetensors": "safetensors"}
"""container of the manifest -> format; the others are not ours to edit."""


def ours(real_file: RealFile) -> RealFile:
    if real_file.container not in OURS:
        pytest.skip(f"{real_file.container} is not a format that ckptfix reads")
    return real_file


def named(real_file: RealFile, folder: Path) -> RealFile:
    """`real_file`, if its own names are edited: of a whole pickled module, its state dict is."""
    ours(real_file)
    if is_module(real_file):
        ckptfix.strip_module(real_file.path, folder / "stripped.pth")
        assert set(torch.load(folder / "stripped.pth", map_location="cpu")) == set(state_of(real_file, folder))
        pytest.skip("a whole pickled module")
    return real_file


def is_module(real_file: RealFile) -> bool:
    checkpoint = ckptfix.open_checkpoint(real_file.path)
    return any(row.at.split("/")[0] in ("_modules", "_parameters") for row in checkpoint.state_dicts)


def state_of(real_file: RealFile, folder: Path) -> dict[str, torch.Tensor]:
    """The state dict that `extract` takes from a whole module."""
    ckptfix.extract(real_file.path, folder / "extracted.pth")
    state: dict[str, torch.Tensor] = torch.load(folder / "extracted.pth", map_location="cpu")
    return state


def load(path: Path, real_file: RealFile) -> Any:
    """As torch reads it with weights_only, and None where the manifest says that it refuses."""
    if real_file.container == "safetensors":
        return load_file(path)
    return torch.load(path, weights_only=True, map_location="cpu") if real_file.loads else None


def assert_unchanged(before: Path, after: Path) -> None:
    """Equal by ckptfix's own comparison, for what torch does not load."""
    result = ckptfix.diff(before, after)
    assert result.same, result


def test_what_is_not_ours_is_named(real_file: RealFile) -> None:
    if real_file.container in {*OURS, "torchscript"}:
        ckptfix.open_checkpoint(real_file.path)
        return
    with pytest.raises(errors.CkptfixError) as caught:
        ckptfix.open_checkpoint(real_file.path)
    word = {"tar": "tar"}.get(real_file.container, "gzip")
    assert isinstance(caught.value, errors.UnknownFormat) and word in str(caught.value)


def models(real_file: RealFile) -> list[StateDict]:
    """The mappings of the file that look like a model's state dict."""
    found = ckptfix.open_checkpoint(real_file.path).state_dicts
    return [state for state in found if state.weights and not state.optimizer]


def tensors(value: Any) -> list[torch.Tensor]:
    """Every tensor in a loaded object, in the order of its containers."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [found for item in value for found in tensors(item)] if isinstance(value, list | tuple) else []


def test_inspect_lists_what_torch_loads(real_file: RealFile) -> None:
    ours(real_file)
    checkpoint = ckptfix.open_checkpoint(real_file.path)
    inspection = ckptfix.inspect(real_file.path)
    assert inspection.format == OURS[real_file.container] and inspection.as_dict()
    assert not [finding for finding in inspection.findings if finding.severity == "error"]
    if real_file.container != "safetensors":
        assert (inspection.weights_only is None) == real_file.loads
    wanted = load(real_file.path, real_file)
    if wanted is None:
        return
    if real_file.container == "safetensors":
        wanted = [wanted[entry.key] for entry in checkpoint.entries]
    loaded = tensors(wanted)
    entries = [entry for entry in checkpoint.entries if entry.detail != "storage"]
    if real_file.path.name == "storage_view.legacy.pt":
        return  # two raw storages, which torch gives as storages
    assert [tuple(entry.shape) for entry in entries] == [tuple(value.shape) for value in loaded]
    assert [f"torch.{entry.dtype}" for entry in entries] == [str(value.dtype) for value in loaded]


def test_a_no_op_is_byte_identical(real_file: RealFile, tmp_path: Path) -> None:
    named(real_file, tmp_path)
    ckptfix.rename(real_file.path, tmp_path / "out", mapping={"no such key": "x"}, allow_unmatched=True)
    assert (tmp_path / "out").read_bytes() == real_file.path.read_bytes()


def test_add_then_strip(real_file: RealFile, tmp_path: Path) -> None:
    named(real_file, tmp_path)
    added = ckptfix.add_module(real_file.path, tmp_path / "added", prefix="ckptfix_added")
    ckptfix.strip_module(tmp_path / "added", tmp_path / "out", prefix="ckptfix_added")
    if added.changes:
        assert any(
            entry.key.startswith("ckptfix_added.") for entry in ckptfix.open_checkpoint(tmp_path / "added").entries
        )
    if real_file.loads:
        assert_same(load(real_file.path, real_file), load(tmp_path / "out", real_file))
    assert_unchanged(real_file.path, tmp_path / "out")


def test_strip_and_unwrap(real_file: RealFile, tmp_path: Path) -> None:
    named(real_file, tmp_path)
    for name, verb in {"stripped": ckptfix.strip_module, "unwrapped": ckptfix.unwrap}.items():
        result = verb(real_file.path, tmp_path / name)
        entries = ckptfix.open_checkpoint(tmp_path / name).entries
        assert not any(entry.key.startswith("module.") for entry in entries)
        assert len(entries) == len(ckptfix.open_checkpoint(real_file.path).entries)
        load(tmp_path / name, real_file)
        if not result.changes:
            assert (tmp_path / name).read_bytes() == real_file.path.read_bytes()


def test_real_names_with_module_inside_are_kept(real_file: RealFile, tmp_path: Path) -> None:
    if real_file.path.name != "best.th":
        pytest.skip("only one file has them")
    ckptfix.unwrap(real_file.path, tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == real_file.path.read_bytes()


def test_to_cpu(real_file: RealFile, tmp_path: Path) -> None:
    ours(real_file)
    ckptfix.map_location(real_file.path, tmp_path / "out", "cpu")
    assert set(ckptfix.open_checkpoint(tmp_path / "out").devices) <= {"cpu"}
    if real_file.container == "safetensors":
        assert (tmp_path / "out").read_bytes() == real_file.path.read_bytes()
    elif real_file.loads:
        assert_same(load(real_file.path, real_file), torch.load(tmp_path / "out", weights_only=True))


def test_convert_to_the_other_torch_format_and_back(real_file: RealFile, tmp_path: Path) -> None:
    ours(real_file)
    if real_file.container == "safetensors":
        pytest.skip("test_convert_to_safetensors does it")
    other = {"zip": "legacy", "legacy": "zip"}[real_file.container]
    result = ckptfix.convert(real_file.path, tmp_path / "there", to=cast(Any, other))
    ckptfix.convert(tmp_path / "there", tmp_path / "back", to=cast(Any, real_file.container))
    named = {finding.id for finding in result.findings}
    wanted = {"tetris": {"left-behind"}, "storage_view.legacy.pt": {"tie-lost"}}.get(real_file.path.name, set())
    assert named == wanted  # source text of a class, and a storage inside another: zip has neither
    for name in ("there", "back"):
        if real_file.loads:
            assert_same(load(real_file.path, real_file), load(tmp_path / name, real_file))
        if not named:
            assert_unchanged(real_file.path, tmp_path / name)
    assert_unchanged(tmp_path / "there", tmp_path / "back")


def test_convert_to_safetensors(real_file: RealFile, tmp_path: Path) -> None:
    ours(real_file)
    out = tmp_path / "out.safetensors"
    if real_file.container == "safetensors":
        ckptfix.convert(real_file.path, tmp_path / "out.pth")
        got = torch.load(tmp_path / "out.pth", weights_only=True, mmap=True)
        wanted = load_file(real_file.path)
        assert {name: tensor_bytes(value) for name, value in got.items()} == {
            name: tensor_bytes(value) for name, value in wanted.items()
        }
        assert_unchanged(real_file.path, tmp_path / "out.pth")
        return
    states = [
        state for state in ckptfix.open_checkpoint(real_file.path).state_dicts if state.weights and not state.optimizer
    ]
    if is_module(real_file):
        ckptfix.convert(real_file.path, out)
        assert {key: tensor_bytes(value) for key, value in load_file(out).items()} == {
            key: tensor_bytes(value) for key, value in state_of(real_file, tmp_path).items()
        }
        return
    if len(states) > 1 or not ckptfix.open_checkpoint(real_file.path).state_dicts:
        with pytest.raises(errors.CkptfixError):
            ckptfix.convert(real_file.path, out)
        assert not out.exists()
        return
    ckptfix.convert(real_file.path, out, drop_unsupported=True)
    held = load_file(out)
    wanted = load(real_file.path, real_file)
    at = states[0].at if states else ""
    for part in at.split("/") if at and wanted is not None else ():
        wanted = wanted[int(part) if isinstance(wanted, list) else part]
    for name, value in held.items() if wanted is not None else ():
        assert tensor_bytes(value) == tensor_bytes(wanted[name]), name
    assert held


def test_diff_of_a_file_with_itself_and_with_a_changed_one(real_file: RealFile, tmp_path: Path) -> None:
    ours(real_file)
    assert_unchanged(real_file.path, real_file.path)
    entries = [
        entry for entry in ckptfix.open_checkpoint(real_file.path).entries if entry.numel and entry.kind == "dense"
    ]
    if not entries or entries[0].storage is None:
        return
    data = bytearray(real_file.path.read_bytes())
    place: Any = entries[0].storage.data
    at = place.offset + entries[0].offset * entries[0].itemsize
    data[at] ^= 1
    (tmp_path / "changed").write_bytes(data)
    assert not ckptfix.diff(real_file.path, tmp_path / "changed").same


def test_load_state_dict(real_file: RealFile) -> None:
    ours(real_file)
    states = [
        state for state in ckptfix.open_checkpoint(real_file.path).state_dicts if state.weights and not state.optimizer
    ]
    if len(states) != 1:
        pytest.skip(f"{len(states)} state dicts")
    got = ckptfix.load_state_dict(real_file.path, map_location="cpu", strip=None)
    wanted = load(real_file.path, real_file)
    if wanted is None:
        assert got
        return
    for part in states[0].at.split("/") if states[0].at else ():
        wanted = wanted[int(part) if isinstance(wanted, list) else part]
    assert_same({name: value for name, value in wanted.items() if isinstance(value, torch.Tensor)}, dict(got))


def test_extract_takes_whole_modules(real_file: RealFile, tmp_path: Path) -> None:
    """Every tensor of the module, and nothing of its class is needed: torch loads the result with weights_only."""
    if real_file.container == "torchscript":
        result = ckptfix.extract(real_file.path, tmp_path / "out.pth")
        assert_unchanged(real_file.path, tmp_path / "out.pth")
        wanted = torch.jit.load(real_file.path, map_location="cpu").state_dict()  # type: ignore[no-untyped-call]
    else:
        checkpoint = ckptfix.open_checkpoint(ours(real_file).path)
        held = [entry for entry in checkpoint.entries if entry.at.endswith(("_parameters", "_buffers"))]
        if not held:
            pytest.skip("no whole module is in it")
        result = ckptfix.extract(real_file.path, tmp_path / "out.pth")
        by_name = ckptfix.load_checkpoint(real_file.path, map_location="cpu")
        wanted = living(by_name)
        assert len(wanted) == len(held)
    assert result.tensors == len(wanted) > 0 and result.exit_code == 0
    found = torch.load(tmp_path / "out.pth", weights_only=True, map_location="cpu")
    assert list(found) == list(wanted)
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def living(record: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    """What state_dict() gives, of the attributes that a loaded module's record has."""
    state = record.state
    own = {prefix + name: value for part in ("_parameters", "_buffers") for name, value in state[part].items()}
    found = {name: value.detach() for name, value in own.items() if value is not None}
    for name, child in state["_modules"].items():
        found |= living(child, f"{prefix}{name}.")
    return found
