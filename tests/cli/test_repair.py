from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import safetensors.torch
import torch
from builders import written
from cli.conftest import Cli, state

A = (1.0, 2.0, 3.0)
B = (4.0, 5.0)


@pytest.fixture
def cut(tmp_path: Path) -> Path:
    """``a`` and ``b``, cut short inside the bytes of ``b``."""
    data = state(a=A, b=B)
    place = data.index(torch.tensor(B).numpy().tobytes())
    return written(tmp_path / "cut.pth", data[: place + 5])


def test_what_is_whole_is_kept_and_the_rest_named(cli: Cli, cut: Path, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"central directory|Invalid argument|negative seek"):
        torch.load(cut)
    result = cli("repair", cut, tmp_path / "out.pth")
    assert result.exit_code == 3
    assert result.stdout.startswith("kept 1 of 2 tensors (12 bytes); lost 1: b")
    assert "warning: b: [2] float32: storage 1: 8 bytes are expected, but only 5 are left" in result.stderr
    loaded = torch.load(tmp_path / "out.pth")
    assert list(loaded) == ["a"] and loaded["a"].tolist() == list(A)


def test_of_many_lost_tensors_some_have_a_line(cli: Cli, tmp_path: Path) -> None:
    """The first line names all of them, folded; --json has each with its reason."""
    data = state(**{f"layers.{number}.w": (float(number),) * 4 for number in range(60)})
    source = written(tmp_path / "cut.pth", data[: data.index(torch.full((4,), 20.0).numpy().tobytes())])
    result = cli("repair", source, tmp_path / "out.pth")
    assert result.exit_code == 3 and "lost 40: layers.20-59.w" in result.stdout
    assert result.stderr.count("warning: layers.") == 20
    assert "... 20 more findings (--json has all)" in result.stderr
    assert len(json.loads(cli("repair", source, tmp_path / "out2.pth", "--json").stdout)["losses"]) == 40


def test_json_lists_kept_and_lost(cli: Cli, cut: Path, tmp_path: Path) -> None:
    document = json.loads(cli("repair", cut, tmp_path / "out.pth", "--json").stdout)
    assert document["written"] and document["kept"] == ["a"]
    (lost,) = document["losses"]
    assert (lost["name"], lost["shape"], lost["dtype"], lost["filled"]) == ("b", [2], "float32", "")


def test_check_only_needs_no_output_and_writes_none(cli: Cli, cut: Path, tmp_path: Path) -> None:
    result = cli("repair", cut, "--check-only")
    assert result.exit_code == 3 and result.stdout.startswith("intact: 1 of 2 tensors")
    assert cli("repair", cut, tmp_path / "out.pth", "--check-only").exit_code == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut.pth"]


def test_a_dry_run_shows_what_would_be_written(cli: Cli, cut: Path, tmp_path: Path) -> None:
    result = cli("repair", cut, tmp_path / "out.pth", "--dry-run")
    assert result.exit_code == 3 and "would write" in result.stdout
    assert not (tmp_path / "out.pth").exists()


def test_a_whole_file_is_said_to_be_whole(cli: Cli, tmp_path: Path) -> None:
    path = written(tmp_path / "in.pth", state(a=A, b=B))
    result = cli("repair", path, tmp_path / "out.pth")
    assert (result.exit_code, result.stdout) == (0, "kept all 2 tensors (20 bytes)\n")


@pytest.mark.parametrize(("fill", "values"), [("zeros", [0.0, 0.0]), ("nan", [float("nan")] * 2)])
def test_fill(cli: Cli, cut: Path, tmp_path: Path, fill: str, values: list[float]) -> None:
    result = cli("repair", cut, tmp_path / "out.pth", "--fill", fill)
    assert result.exit_code == 3 and "filled 1: b" in result.stdout
    loaded = torch.load(tmp_path / "out.pth")
    assert loaded["a"].tolist() == list(A)
    assert torch.equal(loaded["b"], torch.tensor(values)) or loaded["b"].isnan().all()
    assert loaded["b"].isnan().any().item() == (fill == "nan")


def test_fill_from_an_older_checkpoint(cli: Cli, cut: Path, tmp_path: Path) -> None:
    older = written(tmp_path / "older.pth", state(a=(9.0, 9.0, 9.0), b=(7.0, 8.0)))
    result = cli("repair", cut, tmp_path / "out.pth", "--fill-from", older)
    assert result.exit_code == 3, "what is older is not what was lost"
    loaded = torch.load(tmp_path / "out.pth")
    assert loaded["a"].tolist() == list(A) and loaded["b"].tolist() == [7.0, 8.0]


def test_an_output_that_exists_needs_force(cli: Cli, cut: Path, tmp_path: Path) -> None:
    out = written(tmp_path / "out.pth", b"precious")
    assert cli("repair", cut, out).exit_code == 2
    assert out.read_bytes() == b"precious"
    assert cli("repair", cut, out, "--force").exit_code == 3
    assert cli("repair", cut, cut, "--force").exit_code == 2, "the input is never replaced"


def test_without_out_the_name_is_said(cli: Cli, cut: Path) -> None:
    result = cli("repair", cut)
    beside = cut.with_name(f"{cut.stem}.repaired{cut.suffix}")
    assert result.exit_code == 3 and f"output: {beside}\n" in result.stdout
    assert beside.exists()


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"


@pytest.mark.parametrize("data", [b"", LFS, b"\0" * 99], ids=["empty", "lfs", "zeros"])
def test_what_is_not_a_checkpoint_is_identified(cli: Cli, tmp_path: Path, data: bytes) -> None:
    result = cli("repair", written(tmp_path / "in.pth", data), tmp_path / "out.pth")
    assert result.exit_code == 2 and result.stderr.count("\n") <= 2
    assert [path.name for path in tmp_path.iterdir()] == ["in.pth"]


def test_no_such_file(cli: Cli, tmp_path: Path) -> None:
    result = cli("repair", tmp_path / "absent.pth", tmp_path / "out.pth")
    assert result.exit_code == 2 and "no such file" in result.stderr


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_fill_from_a_checkpoint_with_wrapped_names(cli: Cli, tmp_path: Path, suffix: str) -> None:
    weights = {"a": torch.ones(64, 64), "b": torch.full((64, 64), 2.0)}
    damaged, older, out = (tmp_path / f"{name}{suffix}" for name in ("damaged", "older", "out"))
    save = torch.save if suffix == ".pth" else safetensors.torch.save_file
    save(weights, damaged)
    damaged.write_bytes(damaged.read_bytes()[: -64 * 65 * 2])
    save({f"module.{name}": tensor for name, tensor in weights.items()}, older)
    result = cli("repair", damaged, out, "--fill-from", older)
    assert result.exit_code == 3
    assert "warning" not in result.stderr
    assert "filled 1: b" in result.stdout + result.stderr
    loaded = torch.load(out) if suffix == ".pth" else safetensors.torch.load_file(out)
    assert torch.equal(loaded["a"], weights["a"]) and torch.equal(loaded["b"], weights["b"])


def test_an_optimizer_s_lost_tensors_are_counted(cli: Cli, tmp_path: Path) -> None:
    state = {index: {"exp_avg": torch.ones(64), "exp_avg_sq": torch.ones(64)} for index in range(6)}
    value = {"model": {"fc.weight": torch.ones(64)}, "optimizer": {"state": state, "param_groups": []}}
    source, out = tmp_path / "in.pth", tmp_path / "out.pth"
    torch.save(value, source, _use_new_zipfile_serialization=False)
    source.write_bytes(source.read_bytes()[:-1200])
    result = cli("repair", source, out)
    assert result.exit_code == 3
    first = (result.stdout + result.stderr).splitlines()[0]
    assert re.search(r"lost \d+: (model/fc\.weight and )?\d+ of optimizer$", first), first


def test_data_that_is_not_aligned_is_moved(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    safetensors.torch.save_file({"w": torch.ones(3)}, path, {"format": "pt", "rank": "4"})
    data = path.read_bytes()
    longer = (int.from_bytes(data[:8], "little") + 3).to_bytes(8, "little")
    path.write_bytes(longer + data[8:].replace(b"}}", b"}}   ", 1))
    (words,) = json.loads(cli("doctor", path, "--json").stdout)["fixes"]
    assert words[1] == "repair" and cli(*words[1:]).exit_code == 0
    with safetensors.safe_open(words[3], "pt") as made:
        assert made.metadata() == {"format": "pt", "rank": "4"} and torch.equal(made.get_tensor("w"), torch.ones(3))
    assert "No problems found" in cli("doctor", words[3]).stdout
