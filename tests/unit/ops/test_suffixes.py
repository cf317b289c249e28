"""What the output's suffix may say: a file of one format does not go by another's name."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from file_commands import EDITS, in_python, line_of

import ckptfix
from ckptfix import doctor, formats
from ckptfix.cli import commands
from ckptfix.errors import Refused, Unsupported
from ckptfix.ops.naming import named_beside

WEIGHTS = {"module.fc.weight": torch.ones(2, 3), "module.fc.bias": torch.zeros(2)}

def is_for(command: str, suffix: str) -> None:
    """Skip a command that is for files of another kind."""
    kind = "safetensors" if suffix == ".safetensors" else "torch"
    if line_of(command).only not in ("", kind):
        pytest.skip(f"{command} is for {line_of(command).only} files")


def sample(folder: Path, suffix: str) -> Path:
    path = folder / f"in{suffix}"
    if suffix == ".safetensors":
        safetensors.torch.save_file(WEIGHTS, path)
    else:
        torch.save(WEIGHTS, path)
    return path


@pytest.mark.parametrize("command", EDITS)
@pytest.mark.parametrize(("suffix", "other"), [(".pth", ".safetensors"), (".safetensors", ".PTH")])
def test_the_output_has_the_format_that_its_suffix_names(
    tmp_path: Path, command: str, suffix: str, other: str
) -> None:
    is_for(command, suffix)
    source, dest = sample(tmp_path, suffix), tmp_path / f"out{other}"
    if command == "set-metadata":
        with pytest.raises(Unsupported, match="no metadata"):
            in_python(command)(source, dest)
        assert not dest.exists()
        return
    result = in_python(command)(source, dest)
    name = "safetensors" if other == ".safetensors" else "zip"
    assert result.format == formats.detect(dest).name == name
    assert any(line.startswith("input: ") for line in result.lines)


@pytest.mark.parametrize("command", EDITS)
@pytest.mark.parametrize(("suffix", "other"), [(".pth", ".bin"), (".safetensors", ".model"), (".pth", "")])
def test_a_suffix_of_the_same_format_or_of_none_is_taken(tmp_path: Path, command: str, suffix: str, other: str) -> None:
    is_for(command, suffix)
    source, dest = sample(tmp_path, suffix), tmp_path / f"out{other}"
    in_python(command)(source, dest)
    if suffix == ".safetensors":
        assert len(safetensors.torch.load_file(dest)) == len(WEIGHTS)
    else:
        assert len(torch.load(dest, "cpu", weights_only=True)) == len(WEIGHTS)


TORCH_NAMES = (".pt", ".pth", ".ckpt", ".bin", ".tar", ".pth.tar", ".pt.tar", ".PTH", ".PTH.TAR", ".CKPT", ".Bin")


@pytest.mark.slow
@pytest.mark.parametrize("to", ["zip", "legacy", "safetensors"])
@pytest.mark.parametrize("suffix", [".pth", ".pth.tar", ".safetensors"])
@pytest.mark.parametrize("verb", [ckptfix.convert, ckptfix.extract])
def test_to_is_not_written_under_another_s_name(tmp_path: Path, verb: Callable[..., Any], suffix: str, to: str) -> None:
    source = sample(tmp_path, suffix)
    wrong = TORCH_NAMES if to == "safetensors" else (".safetensors", ".SafeTensors")
    for name in wrong:
        dest = tmp_path / f"out{name}"
        with pytest.raises(Refused, match="its suffix suggests") as caught:
            verb(source, dest, to=to)
        assert not dest.exists()
        assert (caught.value.hint or "").startswith("without --to it writes ")
        verb(source, dest)  # what the hint says
        own = safetensors.torch.load_file if to != "safetensors" else torch.load
        assert len(own(dest)) == len(WEIGHTS)
    for name in (".safetensors", "") if to == "safetensors" else (*TORCH_NAMES, ""):
        dest = tmp_path / f"fine{name}"
        verb(source, dest, to=to, force=True)
        assert formats.detect(dest).name == to


@pytest.mark.sampled(50)
@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("name", TORCH_NAMES)
@pytest.mark.parametrize("command", EDITS)
def test_every_suffix_of_torch_stands_on_both_of_its_formats(
    tmp_path: Path, command: str, name: str, legacy: bool
) -> None:
    is_for(command, name)
    source, dest = tmp_path / f"in{name}", tmp_path / f"out{name}"
    torch.save(WEIGHTS, source, _use_new_zipfile_serialization=not legacy)
    in_python(command)(source, dest)
    assert formats.detect(dest).name == ("legacy" if legacy else "zip")
    assert len(torch.load(dest, "cpu", weights_only=True)) == len(WEIGHTS)


def test_what_doctor_proposes_for_a_legacy_pth_tar_runs(tmp_path: Path) -> None:
    source = tmp_path / "resnet.pth.tar"
    torch.save(WEIGHTS, source, _use_new_zipfile_serialization=False)
    (fix,) = {row.fix for row in doctor(source).findings if row.id == "wrapped-names"}
    assert fix is not None and fix.startswith("ckptfix strip-module ")
    assert commands.main(shlex.split(fix)[1:], standalone_mode=False) == 0
    assert set(torch.load(tmp_path / "resnet.stripped.pth.tar")) == {"fc.weight", "fc.bias"}


@pytest.mark.parametrize(("suffix", "other"), [(".safetensors", ".pth"), (".pth", ".safetensors")])
def test_a_default_name_has_the_suffix_of_the_content(tmp_path: Path, suffix: str, other: str) -> None:
    source = sample(tmp_path, suffix).rename(tmp_path / f"in{other}")
    for command in ("strip-module", "repair"):
        out = Path(named_beside(source, command))
        in_python(command)(source, out)
        assert out.suffix in formats.detect(source).suffixes and out.suffix != other
        assert formats.detect(out) == formats.detect(source)


def test_what_doctor_proposes_for_a_damaged_file_of_the_wrong_suffix_runs(tmp_path: Path) -> None:
    source = sample(tmp_path, ".safetensors").rename(tmp_path / "in.pth")
    source.write_bytes(source.read_bytes()[:-4])
    fixes = doctor(source).fixes
    assert [line[1] for line in fixes] == ["repair", "set-metadata", "strip-module"]
    for line in fixes:
        commands.main([*line[1:]], standalone_mode=False)
    assert safetensors.torch.load_file(fixes[-1][3]).keys() == {"fc.bias"}
    result = ckptfix.fix(source, tmp_path / "fixed.pth")
    assert result.exit_code == 3 and torch.load(tmp_path / "fixed.pth", weights_only=True).keys() == {"fc.bias"}
