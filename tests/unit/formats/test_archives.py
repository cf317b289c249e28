"""Archives of several checkpoints: one object, by the names of the members."""

from __future__ import annotations

import gzip
import io
import json
import random
import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_same
from other_pickles import tar_of

import ckptfix
from ckptfix.checkpoint import ByteRange
from ckptfix.errors import CkptfixError, Unsupported
from ckptfix.formats import detect, open_checkpoint


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return net, optimizer


def content(value: Any, **how: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **how)
    return buffer.getvalue()


def stable_baselines(path: Path, method: int = zipfile.ZIP_STORED) -> dict[str, Any]:
    """As ``save_to_zip_file`` of stable_baselines3 writes it."""
    net, optimizer = trained()
    objects = {
        "pytorch_variables.pth": None,
        "policy.pth": net.state_dict(),
        "policy.optimizer.pth": optimizer.state_dict(),
    }
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("data", json.dumps({"policy_class": {":type:": "<class 'abc.ABCMeta'>"}}))
        for name, value in objects.items():
            with archive.open(name, mode="w", force_zip64=True) as file:
                file.write(content(value))
        archive.writestr("_stable_baselines3_version", "2.3.0")
    return objects


def nemo(path: Path, *, folder: str = "./", **how: Any) -> torch.nn.Module:
    net = trained()[0]
    files = {"model_config.yaml": b"target: x\n", "model_weights.ckpt": content(net.state_dict(), **how)}
    path.write_bytes(tar_of({f"{folder}{name}": data for name, data in files.items()}))
    return net


def test_stable_baselines(tmp_path: Path) -> None:
    path, out = tmp_path / "ppo.zip", tmp_path / "out.pth"
    objects = stable_baselines(path)
    assert detect(path).name == "archive"
    checkpoint = open_checkpoint(path)
    assert str(checkpoint.traits["members"]).startswith("data, pytorch_variables.pth, policy.pth, ")
    assert {entry.at for entry in checkpoint.entries if not entry.at.startswith("policy.opt")} == {"policy.pth"}
    assert all(isinstance(entry.data, ByteRange) and entry.data.path == str(path) for entry in checkpoint.entries)
    assert all(entry.storage is not None and entry.storage.crc32 is not None for entry in checkpoint.entries)
    ckptfix.convert(path, out)
    assert_same(objects, torch.load(out))
    assert ckptfix.diff(path, out).exit_code == 0


@pytest.mark.parametrize("how", [{}, {"_use_new_zipfile_serialization": False}])
@pytest.mark.parametrize("folder", ["./", ""])
def test_nemo(folder: str, how: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "model.nemo"
    net = nemo(path, folder=folder, **how)
    assert [entry.at for entry in open_checkpoint(path).entries] == ["model_weights.ckpt"] * 4
    taken = ckptfix.extract(path, tmp_path / "out.pth")
    assert taken.at == "model_weights.ckpt"
    assert_same(dict(net.state_dict()), dict(torch.load(tmp_path / "out.pth")))


def test_the_model_is_taken_and_others_by_their_address(tmp_path: Path) -> None:
    path = tmp_path / "ppo.zip"
    objects = stable_baselines(path)
    taken = ckptfix.extract(path, tmp_path / "out.pth")
    assert taken.at == "policy.pth" and any("policy.pth" in line for line in taken.lines)
    assert_same(dict(objects["policy.pth"]), dict(torch.load(tmp_path / "out.pth")))
    ckptfix.convert(path, tmp_path / "out.safetensors")
    net = trained()[0]
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    ckptfix.load_into(net, path)
    assert_same(dict(objects["policy.pth"]), dict(net.state_dict()))
    ckptfix.extract(path, tmp_path / "one.pth", at="policy.optimizer.pth/state/0")
    assert set(torch.load(tmp_path / "one.pth")) == {"step", "exp_avg", "exp_avg_sq"}


def test_doctor_repair_and_edits(tmp_path: Path) -> None:
    path = tmp_path / "ppo.zip"
    objects = stable_baselines(path)
    found = ckptfix.doctor(path)
    assert found.format == "archive" and found.findings[0].id == "other-archive"
    assert found.fixes[0][:3] == ("ckptfix", "extract", str(path))
    ckptfix.repair(path, tmp_path / "repaired.pth")
    assert_same(objects, torch.load(tmp_path / "repaired.pth"))
    ckptfix.to_cpu(path, tmp_path / "out.pth")
    assert_same(objects, torch.load(tmp_path / "out.pth"))


def test_what_no_tensor_needs_is_looked_at_too(tmp_path: Path) -> None:
    path = tmp_path / "model.nemo"
    weights = io.BytesIO(content(trained()[0].state_dict()))
    with zipfile.ZipFile(weights, "a") as inner:
        inner.writestr("archive/extra.pkl", b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R.")
    path.write_bytes(tar_of({"model_config.yaml": b"a: 1\n", "model_weights.ckpt": weights.getvalue()}))
    rows = [row for row in ckptfix.doctor(path).findings if row.id == "dangerous-global"]
    assert [row.where for row in rows] == ["model_weights.ckpt > archive/extra.pkl"]


def test_a_gzipped_one_is_unpacked_by_repair(tmp_path: Path) -> None:
    path = tmp_path / "model.nemo"
    net = nemo(path)
    path.write_bytes(gzip.compress(path.read_bytes()))
    ckptfix.repair(path, tmp_path / "out.pth")
    assert_same(dict(net.state_dict()), dict(torch.load(tmp_path / "out.pth")["model_weights.ckpt"]))


@pytest.mark.parametrize("deflated", [("policy.pth",), ("policy.pth", "policy.optimizer.pth")])
def test_an_archive_of_deflated_members_is_refused_and_comes_back(tmp_path: Path, deflated: tuple[str, ...]) -> None:
    """The hint is run as it is printed; the others alone would be half of the checkpoint."""
    stored, path = tmp_path / "stored.zip", tmp_path / "ppo.zip"
    objects = stable_baselines(stored)
    with zipfile.ZipFile(stored) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            method = zipfile.ZIP_DEFLATED if name in deflated else zipfile.ZIP_STORED
            new.writestr(name, old.read(name), method)
    with pytest.raises(Unsupported, match=r"compressed checkpoints: policy\.pth") as caught:
        open_checkpoint(path)
    assert detect(path).name == "archive" and caught.value.hint is not None
    if shutil.which("zip") is None or shutil.which("unzip") is None:
        pytest.skip("zip and unzip are not installed")
    lines = caught.value.hint.split("`")[1::2]
    assert len(lines) == 2
    for line in lines:
        subprocess.run(line, shell=True, check=True, cwd=tmp_path, capture_output=True)
    found = ckptfix.load_checkpoint(tmp_path / "FIXED.zip")
    assert_same(objects, {name: found[name] for name in objects})


def test_a_damaged_member_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ppo.zip"
    stable_baselines(path)
    data = bytearray(path.read_bytes())
    start = data.index(b"policy.pth") + 60
    data[data.index(b"ctorch\nFloatStorage", start)] ^= 1
    path.write_bytes(data)
    findings = open_checkpoint(path).findings
    assert [(row.id, row.where) for row in findings if row.id == "bad-storage"] == [("bad-storage", "policy.pth")]
    with pytest.raises(CkptfixError):
        ckptfix.convert(path, tmp_path / "out.pth")


@pytest.mark.sampled(1, test_all=10_000)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_mutants_are_errors_and_never_tracebacks(kind: str, tmp_path: Path) -> None:
    path, out = tmp_path / "in", tmp_path / "out.pth"
    if kind == "zip":
        stable_baselines(path)
    else:
        nemo(path)
    data = path.read_bytes()
    rng = random.Random(0)
    changed = [data[:end] for end in range(0, len(data), 97 * 10)]
    for _ in range(40):
        mutant = bytearray(data)
        mutant[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        changed.append(bytes(mutant))
    failed = 0
    for mutant_ in changed:
        path.write_bytes(mutant_)
        for look in (
            lambda: (open_checkpoint(path).entries, list(open_checkpoint(path).values())),
            lambda: ckptfix.doctor(path),
            lambda: ckptfix.convert(path, out, dry_run=True),
            lambda: ckptfix.repair(path, out, dry_run=True),
        ):
            try:
                look()
            except CkptfixError as error:
                failed += 1
                assert error.path == str(path)
    assert failed > 20


def test_a_member_that_is_a_string(tmp_path: Path) -> None:
    path = tmp_path / "in.nemo"
    torch.save("a text of another stream, longer than the pickle around it", tmp_path / "text.pth")
    text = (tmp_path / "text.pth").read_bytes()
    weights = content({"w": torch.ones(2)})
    path.write_bytes(tar_of({"model_config.yaml": b"a: 1\n", "model_weights.ckpt": weights, "text.ckpt": text}))
    checkpoint = open_checkpoint(path)
    assert [entry.name for entry in checkpoint.entries] == ["model_weights.ckpt/w"]
