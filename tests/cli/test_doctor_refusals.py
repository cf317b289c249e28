"""A command that doctor prints is one that the file lets it run: none beside damage that every command refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.conftest import Cli
from torch.distributed import checkpoint as dcp
from torch_versions import ALONE

import ckptfix

W = torch.arange(50.0)
VIEWS = {"a.weight": W[:30], "b.weight": W[20:]}


def wrapped(more: Any = VIEWS) -> dict[str, Any]:
    return {f"module.{name}": value for name, value in more.items()}


def tied() -> dict[str, Any]:
    return {"a.weight": W, "b.weight": W, "c.weight": W[:30]}


OBJECTS: dict[str, Callable[[], Any]] = {
    "views": lambda: dict(VIEWS),
    "views, wrapped": wrapped,
    "a view that is negated": lambda: {**VIEWS, "c.weight": torch._neg_view(W)},
    "a conjugate view": lambda: {"a.weight": (z := torch.complex(W, W))[:30], "b.weight": z.conj()},
    "views beside a sparse tensor": lambda: {**VIEWS, "c.weight": torch.ones(3).to_sparse()},
    "views beside a tensor without data": lambda: {**VIEWS, "c.weight": torch.ones(3, device="meta")},
    "views in two models": lambda: {"generator": dict(VIEWS), "critic": dict(VIEWS)},
    "views in doubt": lambda: {"detector": dict(VIEWS), "zeta": {"a": torch.ones(900)}},
    "ties and views": tied,
    "views below a key, wrapped": lambda: {"state_dict": wrapped(), "epoch": 3},
    "a view under a key that is a number": lambda: {**VIEWS, 3: W[:4]},
}


def printed(cli: Cli, path: Path) -> tuple[list[list[list[str]]], dict[str, Any]]:
    """Each chain of commands in the answer: all together, that of `fix`, and each finding's own unless one repairs."""
    done = cli("doctor", path, "--json")
    document = json.loads(done.stdout)
    repaired = any(words[1] == "repair" for words in document["fixes"])
    own = [row["fixes"] for row in document["findings"] if not repaired and row["severity"] != "info"]
    chains = [document["fixes"], [document["fix"]] if document["fix"] else [], *own]
    return [lines for lines in chains if lines], document


def runs(cli: Cli, chains: list[list[list[str]]], codes: tuple[int, ...] = (0,)) -> None:
    for lines in chains:
        for words in lines:
            done = cli(*words[1:])
            assert done.exit_code in codes, (words, done.output)
        for words in lines:
            made = Path(words[3]) if len(words) > 3 else None
            if made is not None and made.is_dir():
                shutil.rmtree(made)
            elif made is not None:
                made.unlink(missing_ok=True)


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("name", OBJECTS)
def test_each_command_that_is_printed_runs(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, legacy: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(OBJECTS[name](), "a.pth", _use_new_zipfile_serialization=not legacy)
    chains, _ = printed(cli, Path("a.pth"))
    runs(cli, chains)


@pytest.mark.parametrize("name", OBJECTS)
def test_fix_into_a_torch_file_converts_to_no_other_format(cli: Cli, tmp_path: Path, name: str) -> None:
    source, out = tmp_path / "a.pth", tmp_path / "fixed.pth"
    torch.save(OBJECTS[name](), source)
    done = cli("fix", source, out)
    if "without data" in name:
        assert done.exit_code == 2 and "no data for it" in done.stderr
        return
    assert done.exit_code == 0, done.output
    assert ckptfix.inspect(out).format == "zip"


def test_fix_of_views_writes_safetensors_where_the_name_says_so(cli: Cli, tmp_path: Path) -> None:
    torch.save(wrapped(), tmp_path / "a.pth")
    for out in ("b.safetensors", "c"):
        assert cli("fix", tmp_path / "a.pth", tmp_path / out).exit_code == 0
        assert ckptfix.inspect(tmp_path / out).format == "safetensors"


def of_shards(folder: Path, gone: int) -> Path:
    """Two torch shards with an index; one of them is not there."""
    folder.mkdir()
    shards = [wrapped(), wrapped({"c.weight": (c := torch.ones(4)), "d.weight": c})]
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards):
        name = f"pytorch_model-{number + 1:05d}-of-00002.bin"
        weight_map |= dict.fromkeys(shard, name)
        if number != gone:
            torch.save(shard, folder / name)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def numbered(folder: Path) -> Path:
    """The same without an index."""
    of_shards(folder, 1)
    (folder / "pytorch_model.bin.index.json").unlink()
    return folder


def safetensors_shards(folder: Path) -> Path:
    torch.save(wrapped({"a": torch.ones(90), "b": torch.ones(90)}), folder.with_suffix(".pth"))
    ckptfix.convert(folder.with_suffix(".pth"), folder, to="hf", shard_size=400)
    next(iter(sorted(folder.glob("model-*")))).unlink()
    return folder


def distributed(folder: Path) -> Path:
    dcp.save({"model": wrapped()}, checkpoint_id=folder, **ALONE)  # type: ignore[attr-defined]
    path = next(folder.glob("*.distcp"))
    path.write_bytes(path.read_bytes()[:-8])
    return folder


FOLDERS: dict[str, Callable[[Path], Path]] = {
    "the first shard": lambda folder: of_shards(folder, 0),
    "the second shard": lambda folder: of_shards(folder, 1),
    "a shard, no index": numbered,
    "a shard of safetensors": safetensors_shards,
    "a file of a DCP folder is cut": distributed,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FOLDERS)
def test_no_command_that_a_missing_file_refuses_is_printed(cli: Cli, tmp_path: Path, name: str) -> None:
    folder = FOLDERS[name](tmp_path / "run")
    chains, document = printed(cli, folder)
    assert document["findings"][0]["severity"] == "error"
    verbs = {words[1] for lines in chains for words in lines[:1]}
    assert verbs <= {"repair", "fix"}
    if not chains:
        assert "download" in document["advice"]
        assert " convert " not in cli("doctor", folder, "-v").stdout
    runs(cli, chains, (0, 3))
