from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch
from builders import Tensor, assemble, safetensors, state_dict_ops, torch_zip, written
from cli.conftest import Cli, floats, state, wrapped

import ckptfix
from ckptfix.cli import diff
from ckptfix.cli.shared import console


def saved(path: Path, **tensors: tuple[float, ...]) -> Path:
    return written(path, state(**tensors))


def test_the_same(cli: Cli, ddp: Path, tmp_path: Path) -> None:
    result = cli("diff", ddp, written(tmp_path / "b.pth", ddp.read_bytes()))
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("Same: 2 tensors")


def test_across_formats(cli: Cli, tmp_path: Path) -> None:
    a = saved(tmp_path / "a.pth", w=(1, 2))
    b = written(tmp_path / "b.safetensors", safetensors([("w", "F32", [2], floats(1, 2))]))
    assert cli("diff", a, b).exit_code == 0


def test_every_kind_of_difference_is_listed(cli: Cli, tmp_path: Path) -> None:
    a = saved(tmp_path / "a.pth", same=(1, 2), moved=(3, 4, 5), changed=(1, 2), gone=(9,), short=(1, 2))
    b = saved(tmp_path / "b.pth", same=(1, 2), renamed=(3, 4, 5), changed=(1, 4), new=(8, 8, 8, 8), short=(1, 2, 3))
    result = cli("diff", a, b)
    assert result.exit_code == 1
    sections = dict(part.split(":\n", 1) for part in result.stdout.split("\n\n")[1:])
    assert sections["Only in A"].splitlines()[2].split() == ["gone", "float32", "[1]"]
    assert sections["Only in B"].splitlines()[2].split() == ["new", "float32", "[4]"]
    assert sections["Renamed"].splitlines()[2].split() == ["moved", "renamed"]
    assert sections["Properties"].splitlines()[2].split() == ["short", "shape", "[2]", "[3]"]
    assert sections["Values"].splitlines()[2].split()[:6] == ["changed", "1", "of", "2", "2", "1"]


def test_a_wrapper_prefix_and_other_values_are_told_apart(cli: Cli, ddp: Path, plain: Path) -> None:
    result = cli("diff", ddp, plain)
    assert result.exit_code == 1
    assert "Same keys except for a wrapper's prefix" in result.stdout
    assert "Only in A" not in result.stdout
    assert "cuda:0" in result.stdout


def test_json(cli: Cli, ddp: Path, plain: Path) -> None:
    result = cli("diff", ddp, plain, "--json")
    document = json.loads(result.stdout)
    assert result.exit_code == 1
    assert document["same"] is False
    assert len(document["wrapped"]) == 2


def test_quiet_leaves_the_exit_code(cli: Cli, ddp: Path, plain: Path) -> None:
    result = cli("diff", ddp, plain, "--quiet")
    assert (result.exit_code, result.output) == (1, "")


def test_tolerances(cli: Cli, tmp_path: Path) -> None:
    a, b = saved(tmp_path / "a.pth", w=(1, 100)), saved(tmp_path / "b.pth", w=(1, 101))
    assert cli("diff", a, b).exit_code == 1
    assert cli("diff", a, b, "--atol", "0.5").exit_code == 1
    assert cli("diff", a, b, "--atol", "1").exit_code == 0
    assert cli("diff", a, b, "--rtol", "0.01").exit_code == 0
    assert cli("diff", a, b, "--rtol", "-1").exit_code == 2
    assert cli("diff", a, b, "--keys-only").exit_code == 0


def test_a_filter_that_matches_nothing_is_no_proof_of_sameness(cli: Cli, ddp: Path) -> None:
    result = cli("diff", ddp, ddp, "--filter", "nothing*")
    assert result.exit_code == 2
    assert "nothing*" in result.stderr


def test_strip_filter_and_at(cli: Cli, tmp_path: Path) -> None:
    a, b = saved(tmp_path / "a.pth", net__w=(1, 2), x=(1,)), saved(tmp_path / "b.pth", w=(1, 2), x=(2,))
    assert cli("diff", a, b, "--strip", "net").exit_code == 1
    assert cli("diff", a, b, "--strip", "net", "--filter", "*w").exit_code == 0
    nested = written(tmp_path / "n.pth", wrapped("", "cpu"))
    flat = saved(tmp_path / "f.pth", fc__weight=(1, 2, 3, 4, 5, 6), fc__bias=(7, 8))
    assert cli("diff", nested, nested, "--at", "model_state_dict").exit_code == 0
    different = cli("diff", nested, flat, "--at", "model_state_dict", "--at", "")
    assert "fc.weight" in different.stdout
    assert "fc.bias" not in different.stdout
    assert cli("diff", nested, flat, *["--at", "x"] * 3).exit_code == 2


def test_long_lists_are_cut_on_a_terminal_and_whole_in_a_pipe(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = saved(tmp_path / "a.pth", **{f"t{index}": (float(index),) for index in range(30)})
    b = saved(tmp_path / "b.pth", **{f"t{index}": (index + 0.5,) for index in range(30)})
    everything = cli("diff", a, b).stdout
    assert "more" not in everything
    assert everything.count(" 1 of 1 ") == 30
    assert "... 25 more (--limit 0 shows all)" in cli("diff", a, b, "--limit", "5").stdout
    monkeypatch.setattr(console, "is_terminal", lambda stream: stream is sys.stdout)
    assert "... 10 more (--limit 0 shows all)" in cli("diff", a, b).stdout
    assert cli("diff", a, b, "--limit", "0").stdout == everything


def test_a_pipe_gets_a_row_for_each_property(cli: Cli, tmp_path: Path) -> None:
    def on(name: str, device: str) -> Path:
        items = {f"t{index}": Tensor("0", (1,), 1, location=device) for index in range(30)}
        return written(tmp_path / name, torch_zip(assemble(("PROTO", 2), *state_dict_ops(items), "STOP"), [floats(1)]))

    shown = cli("diff", on("a.pth", "cpu"), on("b.pth", "cuda:0")).stdout
    assert [line.split()[0] for line in shown.splitlines() if "cuda:0" in line] == [f"t{index}" for index in range(30)]


def test_values_that_are_no_tensors(cli: Cli, tmp_path: Path) -> None:
    def with_epoch(name: str, epoch: int) -> Path:
        pickle = assemble(("PROTO", 2), *state_dict_ops({"w": Tensor("0", (1,), 1), "epoch": epoch}), "STOP")
        return written(tmp_path / name, torch_zip(pickle, [floats(1)]))

    result = cli("diff", with_epoch("a.pth", 3), with_epoch("b.pth", 4))
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1].split() == ["epoch", "3", "4"]


@pytest.mark.parametrize(
    ("value", "text"),
    [("x", "x"), (None, "None"), ((1, 2), "[1, 2]"), (True, "True"), ("y" * 99, "y" * 57 + "...")],
)
def test_values_are_shown_short(value: object, text: str) -> None:
    assert diff._text(value) == text


def test_a_missing_file_is_trouble_not_a_difference(cli: Cli, ddp: Path) -> None:
    assert cli("diff", ddp, "no-such-file.pth").exit_code == 2


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """Two checkpoints: a little, a lot and nothing changed; one number of 64 is NaN."""
    before = {"layers.0.a": torch.ones(64), "layers.0.b": torch.ones(64), "layers.1.a": torch.ones(64)}
    after = {name: value.clone() for name, value in before.items()}
    after["layers.0.b"] += 1
    after["layers.1.a"][3] = 1.001
    after["layers.1.a"][5] = float("nan")
    torch.save(before | {"same": torch.ones(2)}, tmp_path / "a.pth")
    torch.save(after | {"same": torch.ones(2)}, tmp_path / "b.pth")
    return tmp_path / "a.pth", tmp_path / "b.pth"


def test_a_nan_that_only_b_has_comes_first(cli: Cli, runs: tuple[Path, Path], tmp_path: Path) -> None:
    first = "NaN or infinity in B where A has numbers: layers.1.a (1 NaN of 64)."
    done = cli("diff", *runs, "--color", "always")
    assert done.stdout.splitlines()[0] == f"\x1b[1;31m{first}\x1b[0m"
    assert [line for line in done.stdout.splitlines() if line.startswith("\x1b[1;31mlayers.1.a ")]
    assert "; largest: layers.0.b 0.5." in done.stdout, "its other numbers are no change to speak of"
    assert json.loads(cli("diff", *runs, "--json").stdout)["summary"][0] == first
    cli("diff", *runs, "--html", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert page.index(first) < page.index("Different: ")
    assert re.search(r'<td class="?sign"?[^>]*title="layers.1.a"[^>]*>!</td>', page)
    back = cli("diff", *reversed(runs)).stdout
    assert "where A has numbers" not in back and "NaN in A only" in back


def test_an_infinity_that_only_b_has(cli: Cli, tmp_path: Path) -> None:
    a, b = saved(tmp_path / "a.pth", w=(1, -math.inf)), saved(tmp_path / "b.pth", w=(math.inf, math.inf))
    assert cli("diff", a, b).stdout.startswith("NaN or infinity in B where A has numbers: w (1 infinite of 2).")
    values = json.loads(cli("diff", a, b, "--json").stdout)["changed"][0]["values"]
    assert (values["infinite"], values["infinite_b"]) == (2, 1)


def test_the_largest_change_is_first_unless_asked(cli: Cli, runs: tuple[Path, Path]) -> None:
    def order(*words: str) -> list[str]:
        lines = cli("diff", *runs, *words).stdout.partition("\nValues")[2].splitlines()
        return [line.split()[0] for line in lines if line.startswith("layers")]

    assert order() == ["layers.1.a", "layers.0.b"], "NaN before any number"
    assert order("--sort", "file") == order("--sort", "name") == ["layers.0.b", "layers.1.a"]
    assert order("--by-layer") == ["layers.1", "layers.0"]
    assert order("--by-layer", "--sort", "name") == ["layers.0", "layers.1"]
    text = cli("diff", *runs, "--by-layer").stdout
    assert re.search(r"layers\.0 +1 of 2 +0\.5 +layers\.0\.b", text)


def test_the_overall_change(cli: Cli, tmp_path: Path) -> None:
    a = saved(tmp_path / "a.pth", x=(3, 0), y=(0, 1), z=(7,))
    b = saved(tmp_path / "b.pth", x=(3, 4), y=(0, 2), z=(7,))
    change = math.sqrt(16 + 1) / math.sqrt(25 + 4)
    said = f"Relative change of the tensors that differ: {change:.3g}; largest: x 0.8, y 0.5."
    assert said in cli("diff", a, b).stdout
    assert ckptfix.diff(a, b).overall == pytest.approx(change)
