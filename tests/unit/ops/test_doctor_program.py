"""A program with weights is reported as one, once; damage inside it is found; a zip of several is not damaged."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path

import builders
import hidden
import pytest
import torch
from builders import Record, build_zip

from ckptfix.ops.doctor import examine as doctor

Save = Callable[[Path], None]


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.1))
        self.sizes: list[int] = [1, 2]
        self.names: dict[str, float] = {"a": 1.0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layers(x)) * self.sizes[0]


def scripted(path: Path) -> None:
    torch.jit.save(torch.jit.script(Net()), path, _extra_files={"notes.json": "{}"})


def traced(path: Path) -> None:
    torch.jit.save(torch.jit.trace(Net().eval(), torch.zeros(2, 3)), path)  # type: ignore[no-untyped-call]


def frozen(path: Path) -> None:
    torch.jit.save(torch.jit.freeze(torch.jit.script(Net().eval())), path)


def exported(path: Path) -> None:
    torch.export.save(torch.export.export(Net().eval(), (torch.zeros(2, 3),)), path)


PROGRAMS = [
    pytest.param(scripted, "torchscript", "a.pt", id="scripted"),
    pytest.param(traced, "torchscript", "a.pt", id="traced"),
    pytest.param(frozen, "torchscript", "a.pt", id="frozen"),
    pytest.param(exported, "exported-program", "a.pt2", id="exported"),
]
quiet = pytest.mark.filterwarnings("ignore")


@pytest.mark.slow
@quiet
@pytest.mark.parametrize(("save", "id", "name"), PROGRAMS)
def test_a_healthy_program_is_one_finding(save: Save, id: str, name: str, tmp_path: Path) -> None:
    save(tmp_path / name)
    done = doctor.examine(tmp_path / name)
    assert [row.id for row in done.findings] == [id]
    (row,) = done.findings
    assert row.severity == "warning" and "not a state dict" in row.message
    assert (row.fix or "").startswith("ckptfix extract ")


@pytest.mark.slow
@quiet
@pytest.mark.parametrize(("save", "id", "name"), PROGRAMS)
def test_a_flipped_bit_of_any_record_is_found(save: Save, id: str, name: str, tmp_path: Path) -> None:
    save(tmp_path / name)
    data = (tmp_path / name).read_bytes()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        rows = [row for row in archive.infolist() if row.file_size > 1]
    assert len(rows) > 5
    for row in rows:
        start = row.header_offset + 30 + sum(data[row.header_offset + at] | data[row.header_offset + at + 1] << 8
                                             for at in (26, 28))  # fmt: skip
        bit = (start + row.compress_size // 2) * 8
        (tmp_path / f"bad-{name}").write_bytes(builders.flip(data, bit))
        done = doctor.examine(tmp_path / f"bad-{name}")
        errors = [finding for finding in done.findings if finding.severity == "error"]
        assert any(finding.where == row.filename for finding in errors), (row.filename, done.findings)
        assert not any((finding.fix or "").startswith("ckptfix repair") for finding in errors if finding.where == "")


@quiet
def test_a_record_that_torch_does_not_write_is_named_and_what_runs_code(tmp_path: Path) -> None:
    scripted(tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt", "a") as archive:
        archive.writestr("a/payload.pkl", builders.assemble(("PROTO", 2), *hidden.SYSTEM, "STOP"))
        archive.writestr("a/extra/readme.txt", "fine")
    done = doctor.examine(tmp_path / "a.pt")
    assert [row.where for row in done.findings if row.id == "stray-record"] == ["a/payload.pkl"]
    assert [row.where for row in done.findings if row.id == "dangerous-global"] == ["a/payload.pkl"]
    assert "posix.system" in done.findings[0].message


def test_a_zip_of_several_checkpoints_is_read_as_one_object(tmp_path: Path) -> None:
    """As reinforcement-learning libraries write it: a policy, its optimizer, variables, and text beside them."""
    inner = hidden.torch_file(hidden.members(""))
    names = ("policy.pth", "policy.optimizer.pth", "pytorch_variables.pth")
    path = tmp_path / "agent x.zip"
    path.write_bytes(build_zip([Record(name, inner) for name in names] + [Record("data", b"{}")]))
    done = doctor.examine(path)
    assert done.findings[0].id == "other-archive"
    assert "several checkpoints" in done.sentence and "policy.pth" in done.sentence
    assert done.fixes == (("ckptfix", "extract", str(path), str(tmp_path / "agent x.weights.pth")),)
