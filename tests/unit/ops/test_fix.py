"""``fix``: what doctor proposes, planned as one, copied once; what remains is named and nothing is written."""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from inspect import signature
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from builders import safetensors, written
from forks import MAIN, Forks

import ckptfix
from ckptfix import formats
from ckptfix.checkpoint import Checkpoint, Plan
from ckptfix.cli import commands
from ckptfix.command_table import STEPS
from ckptfix.errors import CkptfixError, Refused, WouldOverwrite
from ckptfix.findings.steps import Step
from ckptfix.findings.table import ENTRIES
from ckptfix.formats import FORMATS
from ckptfix.formats.torch import zip as torch_zip
from ckptfix.formats.torch.common import pickled_object
from ckptfix.io import write as io_write
from ckptfix.io.source import shares_open_files
from ckptfix.ops import chain
from ckptfix.pickles.reemit import reemit


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.BatchNorm1d(40))


def wrapped(**more: Any) -> dict[str, Any]:
    return {"model": {f"module.{name}": value for name, value in model().state_dict().items()}, **more}


def on_a_gpu(path: Path) -> None:
    """Turn the device tags of a file that was saved on a CPU into ``cuda:0``, as a GPU would have written them."""
    ckptfix.map_location(path, path.with_suffix(".gpu"), "cuda:0")
    path.with_suffix(".gpu").rename(path)


def same(state: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return list(state) == list(other) and all(torch.equal(state[name], other[name]) for name in state)


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    path = tmp_path / "run.pth"
    torch.save(wrapped(args=argparse.Namespace(lr=0.1)), path)
    on_a_gpu(path)
    return path


def test_everything_is_fixed_in_one_copy(broken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = []
    real = io_write.write_plan

    def noted(plan: Plan, **rest: Any) -> dict[str, str]:
        plans.append(plan)
        return real(plan, **rest)

    monkeypatch.setattr(io_write, "write_plan", noted)
    result = ckptfix.fix(broken, tmp_path / "out.pth")
    assert [step.command[1] for step in result.steps] == ["sanitize", "strip-module", "to-cpu"]
    assert len(plans) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.pth", "run.pth"]
    loaded = torch.load(tmp_path / "out.pth", weights_only=True)
    assert loaded["args"] == {"lr": 0.1}
    assert same(loaded["model"], model().state_dict())
    assert zipfile.ZipFile(tmp_path / "out.pth").testzip() is None
    assert (result.account.tensors, result.account.written, result.account.lost) == (7, 7, ())
    assert result.exit_code == 0


@pytest.mark.parametrize("verb", ["doctor", "fix"])
def test_a_file_is_read_once_and_no_step_changes_what_was_read(
    verb: str, broken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All commands that a diagnosis proposes get the checkpoint that was examined."""
    read: list[Checkpoint] = []

    def counted(path: str) -> Checkpoint:
        if Path(path) == broken:
            read.append(torch_zip.read(path))
        return read[-1] if Path(path) == broken else torch_zip.read(path)

    monkeypatch.setitem(FORMATS, "zip", replace(torch_zip.FORMAT, read=counted))
    commands = [line.step.command for line in ckptfix.doctor(broken).chain]
    assert len(commands) > 1
    read.clear()
    if verb == "fix":
        assert len(ckptfix.fix(broken, tmp_path / "out.pth").steps) > 1
    else:
        ckptfix.doctor(broken)
    assert len(read) == 1
    whole, anew = (pickled_object(one).graph for one in (read[0], torch_zip.read(str(broken))))
    assert reemit(whole).pickle == reemit(anew).pickle
    assert read[0].entries == torch_zip.read(str(broken)).entries


def test_the_planned_output_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next diagnosis reads it. The step has been audited, so that the whole chain is not audited again."""
    torch.save({"module.fc.weight": torch.ones(2, 2)}, source := tmp_path / "in.pth")
    read: list[str] = []

    def noted(path: str) -> Checkpoint:
        read.append(path)
        return torch_zip.read(path)

    monkeypatch.setitem(FORMATS, "zip", replace(torch_zip.FORMAT, read=noted))
    result = ckptfix.fix(source, tmp_path / "out.pth")
    assert result.account.written == 1
    assert [path == str(source) for path in read] == [True, False]


def test_a_file_that_changes_between_two_reads_is_read_again(broken: Path, tmp_path: Path) -> None:
    with formats.reads_once(), shares_open_files():
        first = formats.open_checkpoint(broken)
        assert formats.open_checkpoint(broken) is first
        os.utime(broken, ns=(1, 1))
        second = formats.open_checkpoint(broken)
        assert second is not first
        others = [tmp_path / f"{number}.pth" for number in range(formats.MOST_KEPT)]
        for other in others:
            torch.save({"w": torch.ones(1)}, other)
            formats.open_checkpoint(other)
        assert formats.open_checkpoint(broken) is not second, "only the last ones are kept"
    assert formats.open_checkpoint(others[0]) is not formats.open_checkpoint(others[0])


def test_the_result_is_that_of_the_commands_one_by_one(program: Forks, broken: Path, tmp_path: Path) -> None:
    result = ckptfix.fix(broken, tmp_path / "out.pth")
    for step in result.steps:
        assert not program(MAIN, step.command[1:]).code
    last = Path(result.steps[-1].command[3])
    assert last.parent == tmp_path
    assert same(torch.load(last, weights_only=True)["model"], torch.load(result.dest, weights_only=True)["model"])
    assert not ckptfix.doctor(last).fixes
    assert not ckptfix.doctor(result.dest).fixes


def test_checksums_of_the_input_are_compared_and_kept(broken: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(broken) as archive:
        record = max(archive.infolist(), key=lambda row: row.file_size)
    data = bytearray(broken.read_bytes())
    place = data.index(model().state_dict()["0.weight"].numpy().tobytes())
    data[place + 5] ^= 1
    broken.write_bytes(data)
    result = ckptfix.fix(broken, tmp_path / "out.pth")
    assert result.steps[0].command[1] == "repair"
    assert result.exit_code == 3
    assert any("0.weight" in finding.where for finding in result.findings)
    assert record.file_size == 4800
    assert "0.weight" not in torch.load(tmp_path / "out.pth", weights_only=True)["model"]


def test_a_file_in_order_is_copied_as_it_is(tmp_path: Path) -> None:
    torch.save(model().state_dict(), tmp_path / "plain.pth")
    result = ckptfix.fix(tmp_path / "plain.pth")
    assert result.dest == str(tmp_path / "plain.fixed.pth")
    assert Path(result.dest).read_bytes() == (tmp_path / "plain.pth").read_bytes()
    assert result.steps == () and result.account.written == 7
    assert "nothing to fix" in str(result)


def test_a_dry_run_writes_nothing_and_says_the_same(broken: Path, tmp_path: Path) -> None:
    planned = ckptfix.fix(broken, tmp_path / "out.pth", dry_run=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.pth"]
    assert not planned.written
    done = ckptfix.fix(broken, tmp_path / "out.pth")
    assert planned.lines == done.lines and planned.plan.nbytes == done.plan.nbytes
    json.dumps(done.as_dict())


@pytest.mark.parametrize("name", ["net.pth.tar", "net.pth.gz", "net.pt", "net", "net.model", "a.b.ckpt"])
def test_the_output_is_called_as_doctor_says(tmp_path: Path, name: str) -> None:
    torch.save(wrapped(args=argparse.Namespace(lr=0.1)), tmp_path / name)
    said = ckptfix.doctor(tmp_path / name).fix
    assert said is not None and said[1] == "fix"
    assert ckptfix.fix(tmp_path / name).dest == said[3]
    expected = {"net.pth.tar": "net.fixed.pth.tar", "net.pth.gz": "net.fixed.pth", "net": "net.fixed.pth"}
    assert Path(said[3]).name == expected.get(name, Path(said[3]).name)


def test_what_no_command_fixes_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    written(tmp_path / "page.pth", b"<!DOCTYPE html><html>404</html>")
    with pytest.raises(Refused, match=r"a web page.*no command fixes that"):
        ckptfix.fix(tmp_path / "page.pth", tmp_path / "out.pth")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.pth"]


def test_a_misfit_with_the_model_is_refused_after_what_could_be_done(tmp_path: Path) -> None:
    torch.save(wrapped(), tmp_path / "run.pth")
    torch.save(torch.nn.Linear(3, 9).state_dict(), tmp_path / "other.pth")
    with pytest.raises(CkptfixError):
        ckptfix.fix(tmp_path / "run.pth", tmp_path / "out.pth", like=tmp_path / "other.pth")
    assert not (tmp_path / "out.pth").exists()


def test_it_goes_on_until_the_file_fits_the_model(tmp_path: Path) -> None:
    torch.save(wrapped(), tmp_path / "run.pth")
    torch.save({f"net.{name}": value for name, value in model().state_dict().items()}, tmp_path / "like.pth")
    result = ckptfix.fix(tmp_path / "run.pth", tmp_path / "out.pth", like=tmp_path / "like.pth")
    assert not ckptfix.doctor(tmp_path / "out.pth", like=tmp_path / "like.pth").exit_code()
    assert result.steps


def test_the_model_is_built_once_for_all_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(wrapped(), tmp_path / "run.pth")
    torch.save(model(), tmp_path / "model.pt")
    (tmp_path / "counted_net.py").write_text(
        "import pathlib, torch\nbuilt = []\ndef build():\n    built.append(1)\n"
        "    return torch.load(pathlib.Path(__file__).with_name('model.pt'), weights_only=False)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    result = ckptfix.fix(tmp_path / "run.pth", tmp_path / "out.pth", like="counted_net:build", allow_import=True)
    built: list[int] = importlib.import_module("counted_net").built
    assert len(built) == 1 + sum("match" in step.command for step in result.steps)


def test_an_existing_output_is_replaced_only_by_force(broken: Path, tmp_path: Path) -> None:
    (tmp_path / "out.pth").write_bytes(b"mine")
    with pytest.raises(WouldOverwrite):
        ckptfix.fix(broken, tmp_path / "out.pth")
    assert (tmp_path / "out.pth").read_bytes() == b"mine"
    ckptfix.fix(broken, tmp_path / "out.pth", force=True)
    assert torch.load(tmp_path / "out.pth", weights_only=True)


def test_a_name_of_another_format_is_put_right(tmp_path: Path) -> None:
    """safetensors under a torch name: the checksums of the zip that it becomes are known only once it is written."""
    from safetensors.torch import save_file

    save_file({f"module.{name}": value for name, value in model().state_dict().items()}, tmp_path / "odd.pth")
    result = ckptfix.fix(tmp_path / "odd.pth")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["odd.pth", Path(result.dest).name])
    again = ckptfix.load_state_dict(result.dest)
    assert set(again) == set(model().state_dict())
    if zipfile.is_zipfile(result.dest):
        with zipfile.ZipFile(result.dest) as archive:
            assert archive.testzip() is None
            assert all(row.CRC for row in archive.infolist() if row.file_size)


def test_what_is_written_on_the_way_goes_again(broken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a plan cannot be read through, the file is written aside; the result is the same."""
    expected = ckptfix.fix(broken, tmp_path / "joined.pth")
    monkeypatch.setattr(chain, "CHECKSUM", None)
    monkeypatch.setattr(chain.Chain, "_can_be_joined", lambda self: False)
    result = ckptfix.fix(broken, tmp_path / "aside.pth")
    assert [step.command[1] for step in result.steps] == [step.command[1] for step in expected.steps]
    assert same(torch.load(tmp_path / "aside.pth")["model"], torch.load(tmp_path / "joined.pth")["model"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["aside.pth", "joined.pth", "run.pth"]


PAIR = (("old", "new"),)


@cache
def stated() -> tuple[Step, ...]:
    """The steps of the table of findings, and those that the package states elsewhere."""
    return tuple(_stated())


SEVERAL: dict[str, Any] = {"subs": PAIR, "lines": ("a -> b",)}
"""Options that can be repeated, with a value."""


def _stated() -> Iterator[Step]:
    for entry in ENTRIES.values():
        yield from entry.fix if isinstance(entry.fix, tuple) else ()
    for path in (Path(ckptfix.__file__).parent).rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "step(" in text else ():
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "step":
                name = node.args[0]
                options = [word.arg for word in node.keywords if word.arg]
                if isinstance(name, ast.Constant):
                    yield Step(str(name.value), tuple((key, SEVERAL.get(key, True)) for key in options))


def test_every_option_that_is_stated_is_one_of_its_function() -> None:
    seen = 0
    for step in stated():
        if STEPS[step.command].chained is not None:
            assert set(step.keywords()) <= set(signature(chain.function_of(step.command)).parameters), step
            seen += 1
    assert seen > 40


@pytest.mark.parametrize("name", [row.name for row in STEPS.values() if row.chained])
def test_options_are_those_of_the_command_line(name: str) -> None:
    """A step as words is what the command line reads as the keywords of the step."""
    command: click.Command | None = commands
    for word in name.split():
        assert isinstance(command, click.Group)
        command = command.get_command(click.Context(command), word)
    assert command is not None
    row = STEPS[name]
    assert not row.output_option or row.output_option in {option for param in command.params for option in param.opts}
    for step in stated():
        if step.command == name:
            known = {option for param in command.params for option in param.opts}
            assert {word for word in step.words() if word.startswith("--")} <= known


def test_a_folder_of_files_is_fixed_as_its_model(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    torch.save(wrapped(), tmp_path / "run/pytorch_model.bin")
    torch.save({"state": {}, "param_groups": []}, tmp_path / "run/optimizer.bin")
    result = ckptfix.fix(tmp_path / "run", tmp_path / "out.pth")
    assert result.steps[0].command[2] == str(tmp_path / "run/pytorch_model.bin")
    assert same(torch.load(tmp_path / "out.pth", weights_only=True)["model"], model().state_dict())


def shards(folder: Path, metadata: dict[str, str] | None) -> None:
    from safetensors.torch import save_file

    folder.mkdir()
    rows = list(wrapped()["model"].items())
    names: dict[str, str] = {}
    for number, part in enumerate((rows[:3], rows[3:]), 1):
        name = f"model-0000{number}-of-00002.safetensors"
        save_file({key: value.contiguous() for key, value in part}, folder / name, metadata=metadata)
        names |= {key: name for key, _ in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


@pytest.mark.parametrize("name", ["out", "out.pth", "out.safetensors"])
def test_a_folder_stays_one_or_becomes_what_the_output_is_called(tmp_path: Path, name: str) -> None:
    shards(tmp_path / "in", {"format": "pt"})
    result = ckptfix.fix(tmp_path / "in", tmp_path / name)
    assert result.exit_code == 0
    assert (tmp_path / name).is_dir() is (name == "out")
    assert same(dict(sorted(ckptfix.load_state_dict(result.dest).items())), dict(sorted(model().state_dict().items())))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["in", name])


def test_a_folder_that_is_only_read_becomes_one_file(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    halves = {"w": torch.arange(12.0).reshape(6, 2)}
    from safetensors.torch import save_file

    for rank, rows in enumerate((halves["w"][:3], halves["w"][3:]), 1):
        info = json.dumps({"w": {"saved_offsets": [3 * rank - 3, 0]}})
        name = f"shard-{rank:05d}-model-00001-of-00001.safetensors"
        save_file({"w": rows.contiguous()}, tmp_path / "in" / name, metadata={"DCP_SHARDING_INFO": info})
    result = ckptfix.fix(tmp_path / "in")
    assert result.dest == str(tmp_path / "in.fixed.pth")
    assert torch.equal(torch.load(result.dest, weights_only=True)["w"], halves["w"])
    assert [step.command[1] for step in result.steps] == ["convert"]
    with zipfile.ZipFile(result.dest) as archive:
        assert archive.testzip() is None and all(row.CRC for row in archive.infolist() if row.file_size)


def test_what_is_written_on_the_way_of_a_folder_goes_again(tmp_path: Path) -> None:
    """Two steps on a folder: the first is written aside, and the second from there."""
    (tmp_path / "in").mkdir()
    rows = list(wrapped()["model"].items())
    names: dict[str, str] = {}
    for number, part in enumerate((rows[:3], rows[3:]), 1):
        path = tmp_path / "in" / f"pytorch_model-0000{number}-of-00002.bin"
        torch.save(dict(part), path)
        on_a_gpu(path)
        names |= {key: path.name for key, _ in part}
    (tmp_path / "in/pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    result = ckptfix.fix(tmp_path / "in", tmp_path / "out")
    assert [step.command[1] for step in result.steps] == ["strip-module", "to-cpu"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]
    assert not ckptfix.doctor(tmp_path / "out").fixes
    assert set(ckptfix.load_state_dict(tmp_path / "out")) == set(model().state_dict())


@pytest.mark.parametrize("kind", ["shards", "dcp"])
def test_a_folder_is_byte_for_byte_what_the_single_commands_write(kind: str, tmp_path: Path) -> None:
    if kind == "shards":
        shards(tmp_path / "in", {"format": "pt"})
        (tmp_path / "in" / "config.json").write_text("{}")
    else:
        torch.save(wrapped(epoch=3), tmp_path / "in.pth")
        ckptfix.convert(tmp_path / "in.pth", tmp_path / "in", to="dcp")
    done = ckptfix.fix(tmp_path / "in", tmp_path / "fixed")
    assert done.exit_code == 0
    ckptfix.strip_module(tmp_path / "in", tmp_path / "stripped")
    files = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("fixed", "stripped")]
    assert files[0] == files[1] and len(files[0]) > 1


def test_shards_without_format_stay_shards(tmp_path: Path) -> None:
    shards(tmp_path / "in", None)
    result = ckptfix.fix(tmp_path / "in", tmp_path / "out")
    assert (tmp_path / "out").is_dir() and result.format == "hf"
    assert not ckptfix.doctor(tmp_path / "out").fixes
    assert set(ckptfix.load_state_dict(tmp_path / "out")) == set(model().state_dict())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def _cut(path: Path) -> None:
    torch.save({"state": {0: {"exp_avg": torch.ones(500)}}, "param_groups": [{"params": [0]}]}, path)
    path.write_bytes(path.read_bytes()[:900])


DAMAGED: dict[str, Callable[[Path], Any]] = {
    "empty": lambda path: path.write_bytes(b""),
    "cut": _cut,
    "a page": lambda path: path.write_bytes(b"<!DOCTYPE html><html><body>404</body></html>"),
    "zeros": lambda path: path.write_bytes(bytes(4096)),
}


def one_file(folder: Path) -> None:
    folder.mkdir()
    torch.save(wrapped(), folder / "pytorch_model.bin")


def in_order(folder: Path) -> None:
    folder.mkdir()
    torch.save(model().state_dict(), folder / "pytorch_model.bin")


def a_dcp(folder: Path) -> None:
    torch.save(wrapped(), folder.with_suffix(".pth"))
    ckptfix.convert(folder.with_suffix(".pth"), folder, to="dcp")


MODELS: dict[str, Callable[[Path], None]] = {
    "one file": one_file, "in order": in_order, "shards": lambda folder: shards(folder, {"format": "pt"}), "dcp": a_dcp,
}  # fmt: skip


@pytest.mark.parametrize("name", ["optimizer.bin", "scheduler.pt", "random_states_0.pkl", "optimizer_1.bin"])
@pytest.mark.parametrize("damage", DAMAGED)
@pytest.mark.parametrize("kind", MODELS)
def test_what_is_wrong_beside_the_model_is_named(kind: str, damage: str, name: str, tmp_path: Path) -> None:
    """doctor's exit code is 1 for it, so fix does not say that all is well."""
    MODELS[kind](tmp_path / "in")
    DAMAGED[damage](tmp_path / "in" / name)
    diagnosis = ckptfix.doctor(tmp_path / "in")
    errors = [row for row in diagnosis.findings if row.severity == "error"]
    assert errors and diagnosis.exit_code() == 1 and set(errors) == set(diagnosis.beside)
    if kind == "in order":
        with pytest.raises(Refused) as refused:
            ckptfix.fix(tmp_path / "in", tmp_path / "out")
        assert name in str(refused.value) and refused.value.path == str(tmp_path / "in")
        assert not (tmp_path / "out").exists()
        return
    result = ckptfix.fix(tmp_path / "in", tmp_path / "out")
    assert result.exit_code == 3
    assert [row for row in result.findings if row.severity == "error"] == errors
    assert all(row.where.startswith(name) and row.line in str(result) for row in errors)
    fixed = ckptfix.load_state_dict(result.dest)
    assert same(dict(sorted(fixed.items())), dict(sorted(model().state_dict().items())))
    code = ckptfix.fix(tmp_path / "in" / "pytorch_model.bin", tmp_path / "alone").exit_code if kind == "one file" else 0
    assert code == 0


def test_an_error_of_data_that_no_command_fixes_is_looked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The looks between the steps read no tensor data: what only data shows would be forgotten."""
    from ckptfix.findings.table import found
    from ckptfix.ops.doctor import data

    def scan(*given: Any) -> Any:
        yield found("zero-tail", "the last half is zero", where="model/0.weight", severity="error", fix="")

    monkeypatch.setattr(data, "scan", scan)
    torch.save(wrapped(), tmp_path / "in.pth")
    with pytest.raises(Refused, match="the last half is zero"):
        ckptfix.fix(tmp_path / "in.pth", tmp_path / "out.pth")
    assert not (tmp_path / "out.pth").exists()


def test_a_missing_format_entry_is_added_beside_the_metadata(tmp_path: Path) -> None:
    """The ranks and alphas that trainers of LoRA store stay."""
    rows = [("w", "F32", [2], bytes(8))]
    (tmp_path / "a.safetensors").write_bytes(safetensors(rows, metadata={"ss_network_dim": "4"}))
    done = ckptfix.fix(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert [step.command[1] for step in done.steps] == ["set-metadata"]
    assert done.exit_code == 0 and b'"ss_network_dim":"4"' in (tmp_path / "b.safetensors").read_bytes()
    assert "no-format-metadata" not in {row.id for row in ckptfix.doctor(tmp_path / "b.safetensors").findings}


@pytest.mark.parametrize("config", ["adapter_config.json", "config.json"])
def test_a_folder_that_a_loader_reads_as_a_whole_stays_a_folder(config: str, tmp_path: Path) -> None:
    """PEFT and transformers need the configuration beside the weights, under the names that they had."""
    source = tmp_path / "lora"
    source.mkdir()
    name = "adapter_model.safetensors" if config.startswith("adapter") else "model.safetensors"
    (source / name).write_bytes(safetensors([("w", "F32", [2], bytes(8))]))
    (source / config).write_text("{}")
    (source / "README.md").write_text("a card")
    done = ckptfix.fix(source, tmp_path / "out")
    assert done.exit_code == 0 and {path.name for path in (tmp_path / "out").iterdir()} == {name, config, "README.md"}
    assert not ckptfix.doctor(tmp_path / "out").exit_code(fail_on="warning")
    named = ckptfix.fix(source)
    assert Path(named.dest).is_dir() and (Path(named.dest) / config).exists()
    one = ckptfix.fix(source, tmp_path / "one.safetensors")
    assert Path(one.dest).is_file()
