"""What doctor finds in a file, and what it does not say about an intact one."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import written
from conftest import CORPUS, RealFile
from doctor_samples import SAMPLES, Sample

import ckptfix
from ckptfix.formats.torch import calls
from ckptfix.formats.torch.versions import DTYPES, Version


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.id)
def test_it_is_found(sample: Sample, tmp_path: Path) -> None:
    path = sample.build(tmp_path)
    like = None
    if sample.like is not None:
        rows = {name: {"shape": shape, "dtype": "float32"} for name, shape in sample.like.items()}
        like = written(tmp_path / "keys.json", json.dumps(rows).encode())
    diagnosis = ckptfix.doctor(path, like=like)
    found = {finding.id: finding for finding in diagnosis.findings}
    assert sample.id in found, list(found)
    assert found[sample.id].message and diagnosis.sentence
    json.dumps(diagnosis.as_dict())


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "complex64", "float8_e5m2"])
def test_nan_and_infinity_are_counted(dtype: str, tmp_path: Path) -> None:
    values = torch.ones(5000).to(getattr(torch, dtype))
    values[[3, 4000]] = torch.tensor(float("nan")).to(values.dtype)
    values[7] = torch.tensor(-float("inf")).to(values.dtype)
    torch.save({"fc.weight": values}, tmp_path / "a.pth")
    found = {finding.id: finding.message for finding in ckptfix.doctor(tmp_path / "a.pth").findings}
    assert found["nan-values"].startswith(f"2 NaN values of {dtype}")
    assert found["infinite-values"].startswith(f"1 infinite value of {dtype}")
    fast = ckptfix.doctor(tmp_path / "a.pth", fast=True)
    assert not {"nan-values", "infinite-values"} & {finding.id for finding in fast.findings}


def test_largest_finite_values_are_no_finding(tmp_path: Path) -> None:
    top = torch.finfo(torch.float32).max
    torch.save({"w": torch.tensor([top, -top]), "h": torch.tensor([65504.0, -65504.0]).half()}, tmp_path / "a.pth")
    assert ckptfix.doctor(tmp_path / "a.pth").exit_code() == 0


def test_a_checksum_over_several_tasks(tmp_path: Path) -> None:
    """A storage of more than one task: the sums of its parts are joined, and a flip in the second is found."""
    path = tmp_path / "a.pth"
    torch.save({"w": torch.arange(9 << 20, dtype=torch.int32)}, path)
    assert ckptfix.doctor(path).exit_code() == 0
    with open(path, "r+b") as file:
        file.seek(20 << 20)
        file.write(b"\xff\xff")
    assert [finding.id for finding in ckptfix.doctor(path).findings if finding.severity == "error"] == ["bad-crc"]


def test_a_sound_model_has_no_finding_but_notes(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Linear(4, 2))
    torch.save(model.state_dict(), tmp_path / "a.pth")
    diagnosis = ckptfix.doctor(tmp_path / "a.pth")
    assert diagnosis.exit_code() == 0 and diagnosis.cause is None
    assert "tensor data" in diagnosis.looked_at


def test_a_real_file_gets_a_diagnosis(real_file: RealFile) -> None:
    """No finding of damage in files that torch loads; CORPUS is absent elsewhere."""
    assert real_file.path.is_relative_to(CORPUS)
    diagnosis = ckptfix.doctor(real_file.path)
    assert diagnosis.sentence
    if real_file.loads:
        refused = ("foreign-global", "dangerous-global", "whole-module", "unsupported-opcode")
        errors = [row.id for row in diagnosis.findings if row.severity == "error" and row.id not in refused]
        assert not errors, diagnosis.findings


def test_the_version_that_a_file_needs_is_that_of_the_one_table(tmp_path: Path) -> None:
    """What `sanitize --torch` writes for a version, and what doctor says about it, come from the same rows."""
    storage = torch.ones(4, dtype=torch.uint16)
    torch.save({"w": storage}, tmp_path / "a.pth")
    [said] = [row.message for row in ckptfix.doctor(tmp_path / "a.pth").findings if row.id == "needs-torch"]
    assert said.startswith(f"it needs torch {Version(calls.TENSOR_V3.since or (0, 0)).name} or later")
    assert all(row.source for row in calls.TABLE) and all(row.source for row in DTYPES.values())


def test_a_whole_module_of_the_old_format_is_of_its_class(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), tmp_path / "a.pth", _use_new_zipfile_serialization=False)
    found = {finding.id: finding.message for finding in ckptfix.doctor(tmp_path / "a.pth").findings}
    assert "torch.nn.modules.linear.Linear" in found["whole-module"]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_name_that_stands_in_the_memo_is_shown_in_full(tmp_path: Path, protocol: int) -> None:
    torch.save({"w": torch.ones(2), "n": [np.float64(3), np.ones(2)]}, tmp_path / "a.pth", pickle_protocol=protocol)
    (tmp_path / "np.pkl").write_bytes(pickle.dumps({"w": np.ones(3), "x": np.float32(1), "p": tmp_path}, protocol))
    for name in ("a.pth", "np.pkl"):
        said = " ".join(finding.message for finding in ckptfix.doctor(tmp_path / name).findings)
        assert "does not allow numpy.dtype" in said and "ndarray.dtype" not in said


def test_the_headline_is_the_most_serious_with_a_remedy(tmp_path: Path) -> None:
    torch.save({"head.weight": torch.ones(3, 2), "fc.weight": torch.ones(2)}, tmp_path / "a.pth")
    torch.save({name: torch.ones(5, 2) for name in ("head.weight", "more.weight")}, tmp_path / "like.pth")
    diagnosis = ckptfix.doctor(tmp_path / "a.pth", like=tmp_path / "like.pth")
    assert "[3, 2] here, [5, 2] in the model" in diagnosis.sentence
    assert diagnosis.advice is not None or diagnosis.fixes


def test_a_device_that_only_a_value_names_is_none_that_torch_load_needs(tmp_path: Path) -> None:
    path = tmp_path / "in.pth"
    torch.save({"w": torch.ones(2), "device": torch.device("cuda:0")}, path)
    (row,) = [finding for finding in ckptfix.doctor(path).findings if finding.id == "device-tags"]
    assert row.severity == "info" and "no tensor" in row.message
    assert torch.load(path, weights_only=True)["device"].type == "cuda"
