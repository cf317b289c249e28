"""ckptfix doctor: its first lines, its exit codes, its JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from builders import safetensors, written
from cli.conftest import Cli, floats, state

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d' * 32}\nsize 1340616616\n".encode()


def test_the_first_lines_are_the_cause_and_the_command(cli: Cli, ddp: Path) -> None:
    result = cli("doctor", ddp, "-v")
    first, *commands = result.stdout.splitlines()[:4]
    assert result.exit_code == 0 and result.stderr == ""
    assert "begin with module." in first and "module.fc.weight" in first
    stripped, both = ddp.with_name("ddp.stripped.pth"), ddp.with_name("ddp.stripped.cpu.pth")
    assert commands == [
        f"Fix: ckptfix fix {ddp} {ddp.with_name('ddp.fixed.pth')}",
        f"Or: ckptfix strip-module {ddp} {stripped}",
        f"Then: ckptfix to-cpu {stripped} {both}",
    ]
    assert [line for line in cli("doctor", ddp).stdout.splitlines() if "ckptfix " in line] == commands[:1]


def test_nothing_wrong_is_said_with_what_was_looked_at(cli: Cli, tmp_path: Path) -> None:
    path = written(tmp_path / "a.pth", state(fc__weight=(1, 2), fc__bias=(3,)))
    result = cli("doctor", path)
    assert result.exit_code == 0
    assert result.stdout.startswith("No problems found. (Checked: container, ")
    assert result.stdout.count("tensor data") == 1
    assert "safe" not in result.stdout


def test_fast_reads_no_tensor_byte(cli: Cli, tmp_path: Path) -> None:
    content = bytearray(state(fc__weight=(1.5, 2.5), fc__bias=(3,)))
    content[content.index(floats(1.5, 2.5))] ^= 1
    path = written(tmp_path / "a.pth", bytes(content))
    slow, fast = cli("doctor", path), cli("doctor", path, "--fast")
    assert slow.exit_code == 1 and "bad-crc" in slow.stdout and "fc.weight" in slow.stdout
    assert fast.exit_code == 0 and "every byte" not in fast.stdout


def test_json_has_every_finding_with_its_remedy(cli: Cli, ddp: Path) -> None:
    message = 'Unexpected key(s) in state_dict: "module.fc.w"'
    document = json.loads(cli("doctor", ddp, "--json", "--error", message).stdout)
    rows = {row["id"]: row for row in document["findings"]}
    assert document["load_error"]["names"][0] == "prefix" and "wrapped-names" in document["load_error"]["explained"]
    assert rows["wrapped-names"]["fix"] == document["fixes"][0] and len(document["fixes"]) == 2
    assert document["fixes"][0][:3] == ["ckptfix", "strip-module", str(ddp)]
    assert document["fix"] == ["ckptfix", "fix", str(ddp), str(ddp.with_name("ddp.fixed.pth"))]
    fields = {"id", "severity", "where", "message", "offset", "fix", "fixes", "advice"}
    assert fields == set(rows["device-tags"])


def test_a_message_that_the_file_does_not_explain(cli: Cli, tmp_path: Path) -> None:
    path = written(tmp_path / "a.pth", state(fc__weight=(1, 2)))
    result = cli("doctor", path, "--error", "_pickle.UnpicklingError: invalid load key, 'v'.")
    assert result.exit_code == 0
    assert "no cause of this message was found" in result.stdout and "git-lfs pointer" in result.stdout


def test_a_message_that_nobody_knows(cli: Cli, tmp_path: Path) -> None:
    path = written(tmp_path / "a.pth", state(fc__weight=(1, 2)))
    assert "I don't recognize that error message." in cli("doctor", path, "--error", "xyzzy").stdout


def test_explain(cli: Cli) -> None:
    result = cli("doctor", "--explain", "lfs-pointer")
    assert result.exit_code == 0
    assert "git-lfs" in result.stdout and "Unsupported operand 118" in " ".join(result.stdout.split())
    wrong = cli("doctor", "--explain", "lfs-ponter")
    assert wrong.exit_code == 2 and "lfs-pointer" in wrong.stderr


def test_what_can_not_be_looked_at_is_trouble(cli: Cli, tmp_path: Path) -> None:
    assert cli("doctor", tmp_path / "absent.pth").exit_code == 2
    assert cli("doctor").exit_code == 2
    path = written(tmp_path / "a.pth", state(fc__weight=(1, 2)))
    result = cli("doctor", path, "--like", "somewhere:Model")
    assert result.exit_code == 2 and "--allow-import" in result.stderr


def test_a_model_to_compare_with(cli: Cli, tmp_path: Path) -> None:
    path = written(tmp_path / "a.pth", state(fc__weight=(1, 2), head__weight=(1, 2, 3)))
    like = written(tmp_path / "keys.json", json.dumps({"fc.weight": [2], "head.weight": [5]}).encode())
    result = cli("doctor", path, "--like", like)
    assert result.exit_code == 1
    assert "head.weight is [3] here, [5] in the model" in result.stdout.splitlines()[0]


def test_names_from_the_file_do_not_reach_the_terminal(cli: Cli, tmp_path: Path) -> None:
    path = written(tmp_path / "a.safetensors", safetensors([("\x1b[2Jw", "F32", [1], b"\0\0\xc0\x7f")]))
    result = cli("doctor", path)
    assert result.exit_code == 0 and "\x1b" not in result.stdout and "NaN" in result.stdout


def test_a_pointer_tells_what_to_fetch(cli: Cli, tmp_path: Path) -> None:
    result = cli("doctor", written(tmp_path / "model.safetensors", POINTER))
    first, second = result.stdout.splitlines()[:2]
    assert "4d" * 32 in first and "1,340,616,616 bytes" in first
    assert second == "Try: git lfs pull --include=model.safetensors"


def test_a_model_that_is_wrapped_too_makes_no_finding_of_wrapped_names(cli: Cli, tmp_path: Path) -> None:
    path = written(tmp_path / "dp.pth", state(module__fc__weight=(1, 2), module__fc__bias=(3,)))
    assert cli("doctor", path, "--fail-on", "warning").exit_code == 1
    result = cli("doctor", path, "--like", path, "--fail-on", "warning")
    assert result.exit_code == 0, result.stdout
    assert "strip-module" not in result.stdout and "the model has them too" in result.stdout


def test_wrapped_names_are_told_once_with_a_model(cli: Cli, tmp_path: Path) -> None:
    path = written(tmp_path / "dp.pth", state(module__fc__weight=(1, 2), module__fc__bias=(3,)))
    plain = written(tmp_path / "plain.pth", state(fc__weight=(1, 2), fc__bias=(3,)))
    result = cli("doctor", path, "--like", plain)
    assert result.exit_code == 1
    assert result.stdout.count("ckptfix ") == 1 and "strip-module" in result.stdout
    assert "names-prefixed" not in result.stdout


def test_a_whole_module_is_to_be_extracted(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "whole.pth"
    torch.save(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)), path)
    result = cli("doctor", path)
    assert f"Fix: ckptfix extract {path} {tmp_path / 'whole.weights.pth'}" in result.stdout.splitlines()
    assert "--at" not in result.stdout and "sanitize" not in result.stdout and "_buffers" not in result.stdout


def test_a_cut_file_is_repaired_first(cli: Cli, tmp_path: Path) -> None:
    import torch

    state = {"module.weight": torch.zeros(5000), "module.bias": torch.ones(5000)}
    torch.save(state, tmp_path / "cut.pth", _use_new_zipfile_serialization=False)
    whole = (tmp_path / "cut.pth").read_bytes()
    (tmp_path / "cut.pth").write_bytes(whole[:-3000])
    said = cli("doctor", tmp_path / "cut.pth", "-v").output
    fixed = tmp_path / "cut.repaired.pth"
    assert f"Or: ckptfix repair {tmp_path / 'cut.pth'} {fixed}\nThen: ckptfix strip-module {fixed} " in said
    assert "ckptfix convert" not in said


@pytest.mark.slow
def test_a_file_of_a_distributed_checkpoint_leads_to_its_folder(cli: Cli, tmp_path: Path) -> None:
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch_versions import ALONE

    writer = FileSystemWriter(tmp_path / "sharded")
    save({"weight": torch.ones(3)}, storage_writer=writer, **ALONE)
    said = cli("doctor", tmp_path / "sharded" / ".metadata").output
    assert f"ckptfix convert {tmp_path / 'sharded'} OUT" in said
