from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from builders import Tensor, assemble, safetensors, state_dict_ops, torch_zip, written
from cli.conftest import Cli, floats, wrapped

from ckptfix.cli.shared import console


def test_the_summary_says_what_the_file_is(cli: Cli, ddp: Path) -> None:
    result = cli("inspect", ddp)
    assert result.exit_code == 0, result.output
    facts = dict(line.split("  ", 1) for line in result.stdout.split("\n\n")[0].splitlines() if line[0] != " ")
    facts = {name: text.strip() for name, text in facts.items()}
    assert facts["format"] == "PyTorch zip"
    assert facts["tensors"] == "2 holding 32 B"
    assert facts["parameters"] == "8"
    assert facts["dtypes"] == "float32 x 2"
    assert facts["devices"] == "cuda:0 x 2"
    assert facts["wrappers"] == "module on 2 keys, as in module.fc.weight"
    assert facts["state dicts"] == "model_state_dict: 2 tensors"
    assert facts["weights_only"] == "torch.load(weights_only=True) accepts it"
    assert "collections.OrderedDict" in facts["globals"]


def test_then_come_the_tensors(cli: Cli, ddp: Path) -> None:
    rows = cli("inspect", ddp, "--tensors").stdout.splitlines()
    assert rows[0].split() == ["name", "dtype", "shape", "size", "device"]
    assert rows[2].split() == ["model_state_dict/module.fc.weight", "float32", "[2,", "3]", "24", "B", "cuda:0"]
    assert len(rows) == 4


def test_json_has_everything(cli: Cli, ddp: Path) -> None:
    document = json.loads(cli("inspect", ddp, "--json").stdout)
    assert document["format"] == "zip"
    assert document["wrappers"] == {"module": {"keys": 2, "example": "module.fc.weight"}}
    assert [row["name"] for row in document["entries"]] == [
        "model_state_dict/module.fc.weight",
        "model_state_dict/module.fc.bias",
    ]


def many(count: int) -> bytes:
    """A state dict of `count` layers of equal shape, and one odd tensor."""
    layers = {f"layers.{index}.w": Tensor("0", (2, 2), 4) for index in range(count)}
    return torch_zip(
        assemble(("PROTO", 2), *state_dict_ops({**layers, "head": Tensor("0", (4,), 4)}), "STOP"), [b"\0" * 16]
    )


@pytest.mark.parametrize(
    ("limit", "shown", "terminal"),
    [([], 40, True), ([], 61, False), (["--limit", "3"], 3, True), (["--limit", "3"], 3, False),
     (["--limit", "0"], 61, True)],
)  # fmt: skip
def test_a_long_list_is_cut_on_a_terminal_and_says_so(
    cli: Cli, tmp_path: Path, limit: list[str], shown: int, terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "many.pth", many(60))
    monkeypatch.setattr(console, "is_terminal", lambda stream: terminal and stream is sys.stdout)
    lines = cli("inspect", path, "--tensors", *limit).stdout.splitlines()
    cut = shown < 61
    assert len(lines) == 2 + shown + cut
    assert (lines[-1] == f"... {61 - shown} more (--limit 0 shows all)") is cut
    document = json.loads(cli("inspect", path, "--json", *limit).stdout)
    assert len(document["entries"]) == (3 if limit == ["--limit", "3"] else 61), "JSON is cut only on request"
    assert document["tensors"] == 61


def test_a_pipe_gets_every_tensor_on_a_line_of_columns(cli: Cli, tmp_path: Path) -> None:
    path = written(tmp_path / "many.pth", many(100))
    lines = cli("inspect", path).stdout.splitlines()
    rows = [re.split("  +", line) for line in lines if line.startswith("layers.")]
    assert [row[:5] for row in rows] == [
        [f"layers.{index}.w", "float32", "[2, 2]", "16 B", "cpu"] for index in range(100)
    ]
    assert not any("more" in line for line in lines)


def test_a_pipe_gets_every_line_of_the_summary_and_the_tree(cli: Cli, tmp_path: Path) -> None:
    metadata = {f"key{index}": "value" for index in range(60)}
    rows = [(f"t{index}", "F32", [index], b"\0" * 4 * index) for index in range(60)]
    path = written(tmp_path / "m.safetensors", safetensors(rows, metadata=metadata))
    shown = cli("inspect", path, "--tree").stdout
    assert shown.count(": value") == 60
    assert shown.count("float32 [") == 60
    assert "more" not in shown


def test_a_filter_picks_by_address_or_key(cli: Cli, ddp: Path) -> None:
    for glob in ("*.weight", "module.fc.w*", "model_state_dict/*.weight"):
        rows = json.loads(cli("inspect", ddp, "--json", "--filter", glob).stdout)["entries"]
        assert [row["name"] for row in rows] == ["model_state_dict/module.fc.weight"], glob
    for regex in ("/w.*ght$/", "/fc[.]we/"):
        rows = json.loads(cli("inspect", ddp, "--json", "--filter", regex).stdout)["entries"]
        assert [row["name"] for row in rows] == ["model_state_dict/module.fc.weight"], regex
    wrong = cli("inspect", ddp, "--filter", "/fc(/")
    assert wrong.exit_code == 2 and "/fc(/ is not a regular expression" in wrong.stderr
    both = json.loads(cli("inspect", ddp, "--json", "--filter", "*.weight", "--filter", "*.bias").stdout)["entries"]
    assert len(both) == 2


def test_a_filter_that_matches_nothing_is_an_error_with_near_names(cli: Cli, ddp: Path) -> None:
    result = cli("inspect", ddp, "--filter", "model_state_dict/module.fc.wieght")
    assert result.exit_code == 2
    assert "model_state_dict/module.fc.weight" in result.stderr


@pytest.mark.parametrize(
    ("order", "first"),
    [("file", "layers.0.w"), ("name", "head"), ("size", "layers.0.w"), ("dtype", "layers.0.w"), ("device", "head")],
)
def test_sorting(cli: Cli, tmp_path: Path, order: str, first: str) -> None:
    layers = {f"layers.{index}.w": Tensor("0", (2, 2), 4, location="cuda:1") for index in (0, 10, 2)}
    items = {**layers, "head": Tensor("1", (1,), 4, "LongStorage", "cuda:0")}
    path = written(
        tmp_path / "m.pth", torch_zip(assemble(("PROTO", 2), *state_dict_ops(items), "STOP"), [b"\0" * 16, b"\0" * 32])
    )
    rows = json.loads(cli("inspect", path, "--json", "--sort", order).stdout)["entries"]
    assert rows[0]["name"] == first
    if order == "name":
        assert [row["name"] for row in rows] == ["head", "layers.0.w", "layers.2.w", "layers.10.w"]


def test_the_tree_folds_layers_that_are_alike(cli: Cli, tmp_path: Path) -> None:
    path = written(tmp_path / "many.pth", many(60))
    lines = cli("inspect", path, "--tree", "--tensors").stdout.splitlines()
    assert lines == ["layers.0-59.w  60 x float32 [2, 2]", "head           float32 [4]"]


def test_notes_tell_ties_views_and_gradients(cli: Cli, tmp_path: Path) -> None:
    items = {
        "a": Tensor("0", (2, 3), 6, requires_grad=True),
        "b": Tensor("0", (2, 3), 6),
        "c": Tensor("1", (3, 2), 6, stride=(1, 3)),
    }
    pickle = assemble(("PROTO", 2), *state_dict_ops(items), "STOP")
    path = written(tmp_path / "m.pth", torch_zip(pickle, [floats(*range(6)), floats(*range(6))]))
    rows = cli("inspect", path, "--tensors").stdout.splitlines()
    assert rows[2].endswith("  requires grad")
    assert rows[3].endswith("  shares storage with a")
    assert rows[4].endswith("  stride [1, 3]")


def test_refused_globals_are_named_and_the_exit_code_is_that_of_reading(cli: Cli, tmp_path: Path) -> None:
    hostile = [("GLOBAL", "os", "system"), ("BINUNICODE", "true"), "TUPLE1", "REDUCE"]
    pickle = assemble(("PROTO", 2), *state_dict_ops({"a": Tensor("0", (2,), 2), "x": hostile}), "STOP")
    result = cli("inspect", written(tmp_path / "m.pth", torch_zip(pickle, [floats(1, 2)])))
    assert result.exit_code == 0
    assert "torch.load(weights_only=True) refuses it: it contains os.system" in result.stdout
    assert "os.system" in next(line for line in result.stdout.splitlines() if line.startswith("globals "))


def test_names_with_escapes_reach_no_terminal(cli: Cli, tmp_path: Path) -> None:
    path = written(tmp_path / "m.pth", wrapped("\x1b]0;owned\x07"))
    for options in ([], ["--tree"], ["--json"]):
        shown = cli("inspect", path, *options).output
        assert "\x1b" not in shown
        assert "\x07" not in shown


def test_what_is_no_checkpoint_is_named(cli: Cli, tmp_path: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"
    result = cli("inspect", written(tmp_path / "m.pth", pointer))
    assert result.exit_code == 2
    assert "git-lfs" in result.stderr.lower().replace("git lfs", "git-lfs")


def test_safetensors_metadata_is_shown(cli: Cli, tensors: Path) -> None:
    assert "metadata" in cli("inspect", tensors).stdout
    assert "format: pt" in cli("inspect", tensors).stdout


def test_what_matters_comes_first(cli: Cli, ddp: Path) -> None:
    lines = [line.split("  ")[0] for line in cli("inspect", ddp).stdout.split("\n\n")[0].splitlines()]
    assert lines == [
        *("file", "format", "size", "state dicts", "parameters", "tensors", "dtypes", "devices", "wrappers"),
        *("training", "weights_only", "globals", "traits"),
    ]


def test_the_state_of_training_is_shown(cli: Cli, tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([{"params": [torch.ones(1)], "lr": 0.1}, {"params": [torch.ones(2)], "lr": 0.01}])
    values = {"epoch": 12, "global_step": 225680, "best_acc1": 0.75, "arch": "resnet18"}
    whole = {"state_dict": {"fc.weight": torch.ones(2)}, "optimizer": optimizer.state_dict(), **values}
    settings = {"lr_scheduler": {"step_size": 3, "last_epoch": 11}, "args": {"epochs": 90, "lr": 1}, "max_epochs": 90}
    torch.save({**whole, **settings}, tmp_path / "a.pth")
    shown = cli("inspect", tmp_path / "a.pth").stdout
    expected = "epoch 12, global_step 225,680, best_acc1 0.75, arch resnet18, lr 0.1 and 0.01"
    assert f"\ntraining      {expected}\n" in shown
    training = json.loads(cli("inspect", tmp_path / "a.pth", "--json").stdout)["training"]
    assert training == {"epoch": 12, "global_step": 225680, "best_acc1": 0.75, "arch": "resnet18", "lr": [0.1, 0.01]}


def test_the_state_that_a_trainer_left_beside_the_model(cli: Cli, tmp_path: Path) -> None:
    written(tmp_path / "model.safetensors", safetensors([("a", "F32", [2], floats(1, 2))]))
    kept = {"epoch": 0.5, "global_step": 3, "best_metric": None}
    written(tmp_path / "trainer_state.json", json.dumps(kept).encode())
    assert "training     epoch 0.5, global_step 3\n" in cli("inspect", tmp_path).stdout
    for damaged in (b"[" * 100_000, b'"text"', b"\xff{"):
        written(tmp_path / "trainer_state.json", damaged)
        done = cli("inspect", tmp_path)
        assert done.exit_code == 0 and "training" not in done.stdout.replace("trainer", "")


def test_a_whole_module_has_the_names_of_its_state_dict(cli: Cli, tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    torch.save({"net": net, "epoch": 3}, tmp_path / "whole.pth")
    done = cli("inspect", tmp_path / "whole.pth")
    names = [line.split("  ")[0] for line in done.stdout.split("\n\n")[1].splitlines()[2:]]
    assert names == [f"net/{name}" for name in net.state_dict()]
    kind = "a whole module of class torch.nn.modules.container.Sequential"
    assert f"state dicts   net: {kind}, 7 tensors\n" in done.stdout
    assert "_modules" not in done.stdout
    picked = json.loads(cli("inspect", tmp_path / "whole.pth", "--filter", "net/0.*", "--json").stdout)["entries"]
    assert [row["name"] for row in picked] == [f"net/_modules/0/_parameters/{name}" for name in ("weight", "bias")]
    by_place = cli("inspect", tmp_path / "whole.pth", "--tensors", "--filter", "*/_modules/0/*").stdout
    assert len(by_place.splitlines()) == 4


def test_what_a_module_holds_beside_its_state_dict_is_listed_too(cli: Cli, tmp_path: Path) -> None:
    net = torch.nn.Linear(2, 3)
    net.register_buffer("mask", torch.ones(5), persistent=False)
    torch.save(net, tmp_path / "whole.pth")
    rows = cli("inspect", tmp_path / "whole.pth", "--tensors").stdout.splitlines()[2:]
    assert [row.split("  ")[0] for row in rows] == ["weight", "bias", "_buffers/mask"]


def test_the_depth_of_the_tree(cli: Cli, ddp: Path) -> None:
    whole = cli("inspect", ddp, "--tensors", "--tree").stdout.splitlines()
    assert whole == ["model_state_dict/module.fc  2 tensors, 32 B", *whole[1:]] and len(whole) == 3
    assert cli("inspect", ddp, "--tensors", "--depth", "1").stdout.splitlines() == whole[:1]
    assert cli("inspect", ddp, "--depth", "0").exit_code == 2


def test_whether_weights_only_accepts_it_is_no_question_of_a_folder(cli: Cli, tmp_path: Path) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch_versions import ALONE

    save({"weight": torch.ones(3)}, storage_writer=FileSystemWriter(tmp_path / "dcp"), **ALONE)
    shown = cli("inspect", tmp_path / "dcp").stdout
    assert "format       a distributed checkpoint (DCP)" in shown and "\nweights_only" not in shown
