"""doctor plans its commands, so that it prints none that refuses the file: a slice; tests/real has every file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import builders
import pytest
import torch
from builders import Tensor, assemble, state_dict_ops, torch_zip, written

import ckptfix
from ckptfix.errors import CkptfixError
from ckptfix.findings.steps import Invocation
from ckptfix.ops.chain import Chain
from ckptfix.ops.doctor.examine import examine
from ckptfix.ops.repair import open as open_repair
from ckptfix.ops.repair import remains


def nothing_intact(path: Path) -> Path:
    """A file whose only storage is shorter than its tensor."""
    pickle = assemble(("PROTO", 2), *state_dict_ops({"fc.weight": Tensor("0", (1000,), 1000)}), "STOP")
    return written(path, torch_zip(pickle, [bytes(8)]))


def test_a_command_that_keeps_nothing_is_not_printed(tmp_path: Path) -> None:
    path = nothing_intact(tmp_path / "in.pth")
    assert examine(path).fixes, "without the rehearsal, repair is proposed"
    with pytest.raises(CkptfixError):
        ckptfix.repair(path, tmp_path / "out.pth")
    found = ckptfix.doctor(path)
    assert not found.fixes and found.advice and "repair" in found.advice
    assert found.exit_code() == 1


def test_every_command_that_is_printed_runs_as_printed(tmp_path: Path) -> None:
    torch.save({"module.fc.weight": torch.ones(300), "module.fc.bias": torch.ones(3)}, tmp_path / "whole.pth")
    whole = (tmp_path / "whole.pth").read_bytes()
    for cut in range(len(whole) // 2, len(whole), len(whole) // 12):
        path = written(tmp_path / f"cut{cut}.pth", whole[:cut])
        found = ckptfix.doctor(path)
        if found.fix is not None:
            done = ckptfix.fix(path, tmp_path / f"fixed{cut}.pth")
            assert done.exit_code in (0, 3)
        else:
            assert found.advice or not found.exit_code()


@pytest.mark.parametrize("held", [0, 4])
def test_a_tensor_with_too_few_bytes_behind_an_edit(tmp_path: Path, held: int) -> None:
    """The second command reads the planned output of the first, in which the tensor is as short."""
    data = builders.safetensors([("module.w", "F32", (2,), bytes(held))])
    assert ckptfix.doctor(written(tmp_path / "in.safetensors", data)).exit_code() == 1


def test_a_sound_file_is_not_rehearsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most files with a finding have device tags or wrapped keys, and a diagnosis of them stays as quick as it was."""
    monkeypatch.setattr("ckptfix.ops.doctor.rehearsal.Chain", None)
    torch.save({"module.fc.weight": torch.ones(3)}, tmp_path / "in.pth")
    assert ckptfix.doctor(tmp_path / "in.pth").fixes


@pytest.mark.parametrize("damage", ["object", "bit", "cut"])
def test_a_large_file_is_not_rehearsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    """The limit is tensors, or bytes where `repair` must read the file first; a cut file is read in any case."""
    torch.save({"w": torch.ones(1 << 15), "b": torch.ones(3), "path": Path("x")}, tmp_path / "in.pth")
    data = bytearray((tmp_path / "in.pth").read_bytes())
    if damage == "bit":
        data[len(data) // 2] ^= 1
    written(tmp_path / "in.pth", bytes(data[:-300] if damage == "cut" else data))
    planned: list[str] = []
    plan = Chain.carry_out

    def counted(chain: Chain, commands: Sequence[Invocation], *rest: Any) -> bool:
        planned.append(commands[0].step.command)
        return plan(chain, commands, *rest)

    monkeypatch.setattr(Chain, "carry_out", counted)
    limit = "MOST_BYTES" if damage == "bit" else "MOST_TENSORS"
    for size in (1, 1 << 20):
        monkeypatch.setattr(f"ckptfix.ops.doctor.rehearsal.{limit}", size)
        assert ckptfix.doctor(tmp_path / "in.pth").fixes
        assert bool(planned) == (size > 1)


@pytest.mark.parametrize("whole", [True, False])
def test_only_a_file_with_no_sound_tensor_is_read_for_its_checksums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    """Repair keeps the others for certain; a file without any is refused, which only its plan shows."""
    planned: list[str] = []
    read = remains.read_zip

    def noted(path: str) -> remains.Wreck:
        planned.append(path)
        return read(path)

    monkeypatch.setattr(open_repair, "read_zip", noted)
    torch.save({"w": torch.full((1 << 12,), 7.5)} | ({"b": torch.ones(3)} if whole else {}), tmp_path / "in.pth")
    data = (tmp_path / "in.pth").read_bytes().replace(torch.full((9,), 7.5).numpy().tobytes(), bytes(36))
    found = ckptfix.doctor(written(tmp_path / "in.pth", data))
    assert bool(planned) != whole and [words[1] for words in found.fixes] == ["repair"] * whole


def test_a_cut_file_is_read_for_its_repair_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"w": torch.ones(1 << 15), "b": torch.ones(3)}, tmp_path / "in.pth")
    written(tmp_path / "in.pth", (tmp_path / "in.pth").read_bytes()[:-300])
    wrecks: list[str] = []

    def counted(path: str) -> remains.Wreck:
        wrecks.append(path)
        return read(path)

    read = remains.read_zip
    monkeypatch.setattr(open_repair, "read_zip", counted)
    found = ckptfix.doctor(tmp_path / "in.pth")
    assert found.survivors and [words[1] for words in found.fixes] == ["repair"] and len(wrecks) == 1
    ckptfix.repair(tmp_path / "in.pth", tmp_path / "out.pth")
    assert len(wrecks) == 2


def test_a_rehearsal_of_a_larger_file_makes_no_audit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The audit takes most of the time of a dry run, and only it reads the planned output."""
    nothing = nothing_intact(tmp_path / "in.pth").read_bytes()
    monkeypatch.setattr("ckptfix.ops.doctor.rehearsal.MOST_AUDITED", 1)
    monkeypatch.setattr("ckptfix.ops.writing.audit", None)
    assert not ckptfix.doctor(written(tmp_path / "in.pth", nothing)).fixes


def test_a_folder_is_rehearsed(tmp_path: Path) -> None:
    """Of a distributed checkpoint whose data is lost, repair can keep nothing."""
    from torch.distributed.checkpoint.state_dict_saver import save

    save({"model": {"w": torch.ones(3)}}, checkpoint_id=tmp_path / "in", no_dist=True)
    (tmp_path / "in" / "__0_0.distcp").unlink()
    found = ckptfix.doctor(tmp_path / "in")
    assert not found.fixes and found.advice and "repair" in found.advice


def test_the_output_of_a_command_is_examined_too(tmp_path: Path) -> None:
    """The keys of a pickled module can be judged once they are extracted."""
    path = tmp_path / "in.pth"
    torch.save(torch.nn.DataParallel(torch.nn.Linear(2, 2)), path)
    found = ckptfix.doctor(path)
    assert [words[1] for words in found.fixes] == ["extract", "strip-module"]
    assert found.fix is not None and found.fix[1] == "fix"
    assert found.fixes[1][2] == found.fixes[0][3]
