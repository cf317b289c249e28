"""The commands that doctor gives together: in the right order, each reading what the one before wrote."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from cli.conftest import Cli, shell_words
from click.testing import CliRunner
from forks import MAIN, Forks
from safetensors.torch import save_file

import ckptfix
from ckptfix.cli import commands
from ckptfix.ops.doctor import messages


def wrapped() -> dict[str, torch.Tensor]:
    return {f"module.{name}": value for name, value in torch.nn.Linear(3, 2).state_dict().items()}


def on_gpu(path: Path) -> Path:
    """The file as if it were saved on a GPU."""
    made = path.with_name(f"gpu-{path.name}")
    ckptfix.map_location(path, made, "cuda:0")
    path.unlink()
    made.rename(path)
    return path


def training(path: Path, **options: Any) -> Path:
    torch.save({"model": wrapped(), "args": argparse.Namespace(lr=0.1), "step": np.float64(3)}, path, **options)
    return on_gpu(path)


def run(cli: Cli, fixes: list[list[str]]) -> Path:
    for words in fixes:
        assert words[0] == "ckptfix"
        done = cli(*words[1:])
        assert done.exit_code == 0, done.output
    return Path(fixes[-1][3])


NAMES = ("train.pth", "a b'c.pth", "-x.pth", "train.pth.tar", "train.ckpt", "odd\n\x1b[2Jname.pth", "{a}.pth", "train")


@pytest.mark.slow
@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("name", NAMES)
def test_the_commands_together_leave_a_clean_file(
    cli: Cli, tmp_path: Path, name: str, legacy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    training(tmp_path / name, _use_new_zipfile_serialization=not legacy)
    document = json.loads(cli("doctor", tmp_path / name, "--json").stdout)
    fixes = document["fixes"]
    assert [words[1] for words in fixes] == ["sanitize", "strip-module", "to-cpu"]
    assert [words[2] for words in fixes[1:]] == [words[3] for words in fixes[:-1]]
    assert document["fix"][:3] == ["ckptfix", "fix", fixes[0][2]] and document["advice"] is None
    for lines in (fixes, [document["fix"]]):
        made = run(cli, lines)
        after = cli("doctor", made, "--fail-on", "warning")
        assert after.exit_code == 0, after.output
        assert list(torch.load(made, weights_only=True)["model"]) == ["weight", "bias"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a b'c.pth", "-x.pth", "odd\n\x1b[2Jname.pth"])
def test_the_printed_lines_run_in_a_shell(program: Forks, tmp_path: Path, name: str) -> None:
    training(tmp_path / name)
    done = program(MAIN, ["doctor", f"./{name}", "-v"], folder=tmp_path)
    lines = [line.partition(": ")[2] for line in done.stdout.splitlines() if ": ckptfix " in line]
    assert done.code == 1 and len(lines) == 4 and "\x1b" not in done.stdout
    for line in lines:
        assert program(MAIN, shell_words(line)[1:], folder=tmp_path).code == 0
    for word in ("fixed", "plain.stripped.cpu"):
        [made] = tmp_path.glob(f"*.{word}.pth")
        torch.load(made, weights_only=True)


def test_a_file_that_is_cut_is_repaired_before_the_rest(cli: Cli, tmp_path: Path) -> None:
    path = training(tmp_path / "a.pth")
    data = path.read_bytes()
    path.write_bytes(data[:-40])
    fixes = json.loads(cli("doctor", path, "--json").stdout)["fixes"]
    assert fixes[0][1] == "repair"


def test_a_compressed_file_gets_an_output_that_is_not_called_compressed(cli: Cli, tmp_path: Path) -> None:
    import gzip

    torch.save({"w": torch.ones(3)}, tmp_path / "a.pth")
    packed = tmp_path / "a.pth.gz"
    packed.write_bytes(gzip.compress((tmp_path / "a.pth").read_bytes()))
    made = run(cli, json.loads(cli("doctor", packed, "--json").stdout)["fixes"])
    assert made == tmp_path / "a.repaired.pth"
    assert cli("doctor", made).exit_code == 0


def test_no_command_is_null(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "a.pth").write_bytes(b"")
    document = json.loads(cli("doctor", tmp_path / "a.pth", "--json").stdout)
    assert document["fix"] is None and document["fixes"] == [] and "again" in document["advice"]


def test_only_what_is_at_the_address_is_reported(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "gan.pth"
    torch.save({"generator": wrapped(), "discriminator": {**wrapped(), "module.nan": torch.tensor(torch.nan)}}, path)
    on_gpu(path)
    document = json.loads(cli("doctor", path, "--at", "generator", "--json").stdout)
    assert not any("discriminator" in row["where"] + row["message"] for row in document["findings"])
    assert {"wrapped-names", "device-tags"} <= {row["id"] for row in document["findings"]}
    assert document["fixes"][0][1] == "strip-module" and document["fix"][1] == "fix"
    for lines in (document["fixes"], [document["fix"]]):
        assert lines[0][-2:] == ["--at", "generator"]
        made = run(cli, lines)
        assert cli("doctor", made, "--at", "generator", "--fail-on", "warning").exit_code == 0
    both = torch.load(made, weights_only=True)
    assert "weight" in both["generator"] and "module.weight" in both["discriminator"]


def test_damage_elsewhere_is_reported_with_an_address_too(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "gan.pth"
    torch.save({"generator": {"a.w": torch.ones(5)}, "discriminator": {"a.w": torch.full((5,), 7.5)}}, path)
    path.write_bytes(path.read_bytes().replace(torch.full((5,), 7.5).numpy().tobytes(), b"\1" * 20))
    done = json.loads(cli("doctor", path, "--at", "generator", "--json").stdout)
    assert "bad-crc" in {row["id"] for row in done["findings"]}


def test_an_address_that_is_not_there_is_trouble(cli: Cli, tmp_path: Path) -> None:
    torch.save({"generator": wrapped()}, tmp_path / "gan.pth")
    done = cli("doctor", tmp_path / "gan.pth", "--at", "generatr")
    assert done.exit_code == 2 and "generator" in done.stderr


EXITS = (
    ({"w": torch.ones(2)}, (0, 0, 0)),
    (wrapped(), (0, 1, 0)),
    ({"w": torch.ones(2), "args": argparse.Namespace(a=1)}, (1, 1, 0)),
    (torch.nn.Linear(2, 2), (1, 1, 0)),
    ({"state": 1, "last_epoch": 3}, (0, 0, 0)),
    ({"args": argparse.Namespace(a=1)}, (0, 1, 0)),
    (np.random.default_rng(0).bit_generator.state["state"]["state"] % 1000, (0, 0, 0)),
)


@pytest.mark.parametrize(("content", "codes"), EXITS, ids=range(len(EXITS)))
def test_the_exit_codes(cli: Cli, tmp_path: Path, content: Any, codes: tuple[int, ...]) -> None:
    torch.save(content, tmp_path / "a.pth")
    options: tuple[list[str], ...] = ([], ["--fail-on", "warning"], ["--fail-on", "never"])
    assert tuple(cli("doctor", tmp_path / "a.pth", *option).exit_code for option in options) == codes
    assert ckptfix.doctor(tmp_path / "a.pth").exit_code() == codes[0]
    assert cli("inspect", tmp_path / "a.pth").exit_code == 0


def test_damage_and_misfits_are_errors(cli: Cli, tmp_path: Path) -> None:
    torch.save(wrapped(), tmp_path / "a.pth")
    torch.save({"weight": torch.ones(2, 3), "bias": torch.ones(2), "more": torch.ones(1)}, tmp_path / "like.pth")
    assert cli("doctor", tmp_path / "a.pth", "--like", tmp_path / "like.pth").exit_code == 1
    (tmp_path / "cut.pth").write_bytes((tmp_path / "a.pth").read_bytes()[:-30])
    assert cli("doctor", tmp_path / "cut.pth").exit_code == 1
    (tmp_path / "page.pth").write_text("<!DOCTYPE html><html></html>")
    assert cli("doctor", tmp_path / "page.pth").exit_code == 1
    assert cli("doctor", tmp_path / "page.pth", "--fail-on", "never").exit_code == 0


def test_a_folder_with_one_checkpoint_is_that_checkpoint(cli: Cli, tmp_path: Path) -> None:
    torch.save(wrapped(), tmp_path / "pytorch_model.bin")
    torch.save({"last_epoch": 1}, tmp_path / "scheduler.pt")
    (tmp_path / "config.json").write_text("{}")
    document = json.loads(cli("doctor", tmp_path, "--json").stdout)
    assert document["path"] == str(tmp_path / "pytorch_model.bin")
    assert document["fix"][:3] == ["ckptfix", "strip-module", str(tmp_path)], "the configuration belongs to the model"
    assert cli("doctor", tmp_path).exit_code == 0


def incompatible(model: torch.nn.Module, content: dict[str, torch.Tensor]) -> str:
    try:
        model.load_state_dict(content)
    except RuntimeError as error:
        return str(error)
    raise AssertionError("it loads")


def net() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))


@pytest.mark.parametrize("extra", [{}, {"criterion.w": torch.ones(2)}], ids=["all", "some"])
def test_the_prefix_of_lightning_comes_from_the_message(cli: Cli, tmp_path: Path, extra: dict[str, Any]) -> None:
    """With BatchNorm's counters among the names, which are not the cause."""
    inner = {f"model.{name}": value for name, value in net().state_dict().items()}
    torch.save({"state_dict": inner | extra, "epoch": 1}, tmp_path / "a.ckpt")
    message = incompatible(net(), inner | extra)
    document = json.loads(cli("doctor", tmp_path / "a.ckpt", "--error", message, "--json").stdout)
    assert document["load_error"]["explained"][0] == "names-prefixed" and "`model.`" in document["summary"][0]
    assert "num_batches" not in document["load_error"]["meanings"][0]
    # One command removes the prefix, and leaves out what the model lacks.
    assert document["fix"][1] == ("rename" if extra else "strip-module")
    made = run(cli, document["fixes"])
    net().load_state_dict(torch.load(made, weights_only=True)["state_dict"])


def test_a_prefix_of_the_model_comes_from_the_message_too(cli: Cli, tmp_path: Path) -> None:
    torch.save(net().state_dict(), tmp_path / "a.pth")
    outer = torch.nn.ModuleDict({"model": net()})
    message = incompatible(outer, net().state_dict())
    document = json.loads(cli("doctor", tmp_path / "a.pth", "--error", message, "--json").stdout)
    assert document["fix"][1] == "add-module" and document["load_error"]["explained"][0] == "names-prefixed"
    outer.load_state_dict(torch.load(run(cli, document["fixes"]), weights_only=True))


def test_a_message_without_a_file(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = incompatible(net(), {f"model.{name}": value for name, value in net().state_dict().items()})
    (tmp_path / "m.txt").write_text(message)
    texts = (message, f"@{tmp_path / 'm.txt'}", str(tmp_path / "m.txt"))
    for done in (cli("doctor", "--error", text) for text in texts):
        assert done.exit_code == 0
        assert "`model.`" in done.stdout and "ckptfix strip-module FILE OUT --prefix model" in done.stdout
    assert "ckptfix repair FILE OUT" in cli("doctor", "--error", "failed finding central directory").stdout
    assert "I don't recognize that error message." in cli("doctor", "--error", "xyzzy").stdout
    assert cli("doctor", "--error", f"@{tmp_path / 'absent'}").exit_code == 2
    document = json.loads(cli("doctor", "--error", message, "--json").stdout)
    assert document["fix"] is None and document["advice"].startswith("ckptfix strip-module")


def test_a_message_from_stdin(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pth")
    line = ["doctor", str(tmp_path / "a.pth"), "--error", "-"]
    done = CliRunner().invoke(commands, line, input="size mismatch for w: copying a param")
    assert done.exit_code == 0 and "a different shape" in done.stdout


MESSAGES = (
    ('Need to initialize default process group using "init_process_group" before loading ShardedTensor', 46),
    ("aten.copy_.default: got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor", 46),
    ('Missing key(s) in state_dict: "a.num_batches_tracked", "b.num_batches_tracked".', 19),
    ('Missing key(s) in state_dict: "a.weight", "a.num_batches_tracked".', 2),
    ("_IncompatibleKeys(missing_keys=['a.w', 'a.num_batches_tracked'], unexpected_keys=['net.a.w', "
     "'net.a.num_batches_tracked'])", 2),
    ('Missing key(s) in state_dict: "lm_head.weight".', 26),
)  # fmt: skip


@pytest.mark.parametrize(("text", "row"), MESSAGES)
def test_what_a_message_is_first(text: str, row: int) -> None:
    assert messages.rows(text)[0] == row


def blocks(names: str, count: int, start: int = 4) -> dict[str, torch.Tensor]:
    made = {}
    for index in range(count):
        for place, name in enumerate(names.split()):
            made[f"{name.format(index)}.weight"] = torch.ones(start + place, start + place + 1)
            made[f"{name.format(index)}.bias"] = torch.ones(start + place)
    return made


OLD, NEW = "encoder.layer.{}.query encoder.layer.{}.out", "layers.{}.q_proj layers.{}.o_proj"
LIKES = {
    "all names differ": (blocks(OLD, 3), blocks(NEW, 3), []),
    "some names differ": (
        {"head.weight": torch.ones(9, 9)} | blocks(OLD, 3), {"head.weight": torch.ones(9, 9)} | blocks(NEW, 3), []
    ),
    "the model has more": (
        blocks(OLD, 3), blocks(NEW, 3) | {"classifier.weight": torch.ones(17, 3)}, ["--partial"]
    ),
    "another model": ({"a": torch.ones(2)}, {"b.weight": torch.ones(5, 5)}, None),
    "only something missing": (blocks(NEW, 2), blocks(NEW, 2) | {"classifier.weight": torch.ones(17, 3)}, None),
}  # fmt: skip


@pytest.mark.parametrize("nested", [False, True], ids=["flat", "two state dicts"])
@pytest.mark.parametrize(("content", "model", "options"), LIKES.values(), ids=LIKES)
def test_match_is_offered_where_it_works(
    cli: Cli, tmp_path: Path, content: Any, model: Any, options: list[str] | None, nested: bool
) -> None:
    torch.save({"net": content, "critic": {"c.weight": torch.ones(3)}} if nested else content, tmp_path / "a.pth")
    torch.save(model, tmp_path / "like.pth")
    done = cli("doctor", tmp_path / "a.pth", "--like", tmp_path / "like.pth", "--json")
    fixes = [words for words in json.loads(done.stdout)["fixes"] if words[1] == "match"]
    assert done.exit_code == 1
    if options is None:
        assert not fixes
        return
    [words] = fixes
    assert ("--partial" in words) == bool(options)
    assert cli(*words[1:]).exit_code == (1 if options else 0)
    made = torch.load(words[3], weights_only=True)
    assert set(made["net"] if nested else made) <= set(model)


def test_a_file_under_another_formats_name_gets_the_suffix_of_its_own(cli: Cli, tmp_path: Path) -> None:
    path = training(tmp_path / "a.pth").rename(tmp_path / "oops.safetensors")
    fixes = json.loads(cli("doctor", path, "--json").stdout)["fixes"]
    assert all(line[3].endswith((".pth", ".pt")) for line in fixes)
    assert cli("doctor", run(cli, fixes), "--fail-on", "warning").exit_code == 0


def test_a_module_beside_another_state_dict_is_fixed_without_a_choice(cli: Cli, tmp_path: Path) -> None:
    """extract would ask which of the two is meant: what is printed runs as it is printed."""
    path = tmp_path / "a.pth"
    torch.save({"state_dict": {"w": torch.ones(3), "b": torch.ones(2)}, "net": torch.nn.Linear(2, 2)}, path)
    document = json.loads(cli("doctor", path, "--json").stdout)
    assert document["findings"][0]["id"] == "whole-module"
    done = cli(*document["fix"][1:])
    assert done.exit_code == 3 and "net: left out" in done.stderr
    made = torch.load(document["fix"][3], weights_only=True)
    assert set(made) == {"state_dict", "net"} and set(made["net"]) == {"weight", "bias"}
    assert cli("doctor", document["fix"][3]).exit_code == 0


def test_a_command_for_a_finding_comes_with_the_one_that_must_run_before_it(cli: Cli, tmp_path: Path) -> None:
    """Of a damaged file, only repair reads anything."""
    path = tmp_path / "a.pth"
    torch.save({"module.a": torch.arange(9.0), "module.b": torch.ones(5)}, path)
    path.write_bytes(path.read_bytes().replace(b"module.b", b"module.c"))  # its checksum is that of the old name
    rows = json.loads(cli("doctor", path, "--json").stdout)["findings"]
    fixes = {row["id"]: [words[1] for words in row["fixes"]] for row in rows}
    assert fixes["bad-crc"] == ["repair"] and fixes["wrapped-names"] == ["repair", "strip-module"]


def test_the_repair_of_a_file_under_a_wrong_suffix_is_called_by_its_format(cli: Cli, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.ones(9), "b": torch.ones(5)}, tmp_path / "a.safetensors", metadata={"format": "pt"})
    path = tmp_path / "a.pth"
    path.write_bytes((tmp_path / "a.safetensors").read_bytes()[:-8])
    document = json.loads(cli("doctor", path, "--json").stdout)
    assert [words[1] for words in document["fixes"]] == ["repair", "convert"]
    assert document["fixes"][0][3].endswith(".safetensors")
    for lines in (document["fixes"], [document["fix"]]):
        for words in lines:
            assert cli(*words[1:]).exit_code in (0, 3)
        assert list(torch.load(lines[-1][3], weights_only=True)) == ["a"]


def test_fix_leaves_out_a_step_for_a_warning_that_refuses_the_file(cli: Cli, tmp_path: Path) -> None:
    """The array becomes a tensor without the prefix, and the rest is still fixed."""
    torch.save({"module.w": torch.ones(3), "x": np.ones(3)}, tmp_path / "a.pth")
    found = ckptfix.doctor(tmp_path / "a.pth")
    done = ckptfix.fix(tmp_path / "a.pth", tmp_path / "b.pth")
    assert set(torch.load(tmp_path / "b.pth", weights_only=True)) == {"module.w", "x"}
    assert [step.command[1] for step in done.steps] == ["sanitize"] == [words[1] for words in found.fixes]
    assert "refused" in {row.id for row in done.findings}


def test_a_buffer_that_the_model_has_is_not_left_out(cli: Cli, tmp_path: Path) -> None:
    """position_ids is optional, and the model has it."""
    inner = {"emb.position_ids": torch.arange(4), "emb.weight": torch.ones(4, 3), "head.weight": torch.ones(9, 3)}
    torch.save({f"module.{name}": value for name, value in inner.items()}, tmp_path / "a.pth")
    torch.save({name: inner[name] for name in ("emb.position_ids", "emb.weight")}, tmp_path / "like.pth")
    fixes = json.loads(cli("doctor", tmp_path / "a.pth", "--like", tmp_path / "like.pth", "--json").stdout)["fixes"]
    made = run(cli, fixes)
    assert set(torch.load(made, weights_only=True)) == {"emb.position_ids", "emb.weight"}


def test_scales_of_quantized_codes_are_not_left_out(cli: Cli, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    codes = {"l.weight": torch.ones(4, 4).to(torch.float8_e4m3fn), "l.weight_scale_inv": torch.ones(1, 1)}
    save_file(codes, tmp_path / "a.safetensors", metadata={"format": "pt"})
    torch.save({"l.weight": torch.ones(4, 4)}, tmp_path / "like.pth")
    options = ("--like", tmp_path / "like.pth", "--drop-unexpected")
    done = cli("match", tmp_path / "a.safetensors", tmp_path / "b.safetensors", *options)
    assert done.exit_code == 2 and "scale" in done.stderr
    assert not (tmp_path / "b.safetensors").exists()
    found = json.loads(cli("doctor", tmp_path / "a.safetensors", *options[:2], "--json").stdout)
    assert not any(words[1] == "match" for words in found["fixes"])


def _no_format(folder: Path) -> None:
    save_file({"a.weight": torch.ones(2, 4)}, folder / "model.safetensors")


def _wrapped_keys(folder: Path) -> None:
    torch.save({"module.a.weight": torch.ones(2, 4)}, folder / "pytorch_model.bin")


def _a_class(folder: Path) -> None:
    torch.save({"state_dict": {"module.a.weight": torch.ones(2, 4)}, "odd": PurePosixPath("x")}, folder / "model.pth")


def _cut(folder: Path) -> None:
    save_file({"a.weight": torch.ones(2, 4), "b.weight": torch.ones(9, 4)}, folder / "model.safetensors")
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate((folder / "model.safetensors").stat().st_size - 20)


@pytest.mark.parametrize("config", ["config.json", "adapter_config.json"])
@pytest.mark.parametrize("make", [_no_format, _wrapped_keys, _a_class, _cut])
def test_the_printed_command_keeps_the_configuration_of_a_folder(
    make: Callable[[Path], None], config: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "model-1.5"
    folder.mkdir()
    make(folder)
    (folder / config).write_text('{"model_type": "x", "peft_type": "LORA", "r": 2, "target_modules": ["a"]}')
    before = sorted(path.name for path in folder.iterdir())
    (line,) = [row for row in cli("doctor", "model-1.5").stdout.splitlines() if row.startswith("Fix: ")]
    words = shlex.split(line)[2:]
    assert words[1] == "model-1.5"
    done = cli(*words)
    assert done.exit_code in (0, 3), done.output
    assert sorted(path.name for path in folder.iterdir()) == before
    (out,) = [path for path in tmp_path.iterdir() if path != folder]
    assert out.is_dir() and sorted(path.name for path in out.iterdir()) == before
    assert not [row for row in cli("doctor", out.name).stdout.splitlines() if row.startswith("Fix: ")]
