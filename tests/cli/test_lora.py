"""ckptfix lora."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from adapters import LAYOUTS, base, peft, write
from cli.conftest import Cli
from json_contract import checked
from safetensors.torch import save_file


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    save_file(base(), "base.safetensors", {"format": "pt"})
    write(peft(base()), tmp_path / "adapter")
    return tmp_path


def test_info(cli: Cli, files: Path) -> None:
    text = cli("lora", "info", "adapter").stdout
    for words in ("PEFT", "LoRA", "rank:     3", "alpha:    6", "q_proj (2)", "small/model"):
        assert words in text
    assert checked(cli("lora", "info", "adapter", "--json"))[0]["base_model"] == "small/model"
    assert "it holds no adapter" in cli("lora", "info", "base.safetensors").stderr


def test_the_verdict_says_what_it_is(cli: Cli, files: Path) -> None:
    assert "PEFT LoRA, rank 3" in cli(str(files / "adapter")).stdout


def test_what_is_missing_is_named(cli: Cli, files: Path) -> None:
    (files / "adapter/adapter_config.json").unlink()
    assert "adapter_config.json" in cli("lora", "info", "adapter").stdout.partition("missing:")[2]


def test_merge(cli: Cli, files: Path) -> None:
    done = cli("lora", "merge", "base.safetensors", "adapter", "-o", "out.safetensors", "--scale", "0.5", "--json")
    (document,) = checked(done)
    assert len(document["merged"]) == 3 and document["adapters"][0]["scale"] == 0.5 and document["recorded"]
    again = cli("lora", "merge", "out.safetensors", "adapter", "-o", "more.safetensors")
    assert "is merged into it already" in again.stderr and not Path("more.safetensors").exists()
    assert "exists" in cli("lora", "merge", "base.safetensors", "adapter", "-o", "out.safetensors").stderr
    dry = cli("lora", "merge", "base.safetensors", "adapter", "-o", "dry.safetensors", "--dry-run")
    assert "merged 3 weights" in dry.stdout and not Path("dry.safetensors").exists()
    assert "OUT is required" in cli("lora", "merge", "base.safetensors", "adapter").stderr


def test_convert(cli: Cli, files: Path) -> None:
    (document,) = checked(cli("lora", "convert", "adapter", "k.safetensors", "--to", "kohya", "--prefix", "lora_te",
                              "--json"))  # fmt: skip
    assert document["to"] == "kohya" and document["layout"] == "peft" and document["config"] is None
    (document,) = checked(cli("lora", "convert", "k.safetensors", "p", "--to", "peft", "--like", "base.safetensors",
                              "--json"))  # fmt: skip
    assert json.loads(Path("p/adapter_config.json").read_text()) == document["config"]
    wrong = cli("lora", "convert", "k.safetensors", "p.safetensors", "--to", "peft", "--like", "base.safetensors")
    assert "the output is a folder" in wrong.stderr


def test_extract_and_resize(cli: Cli, files: Path) -> None:
    write(LAYOUTS["kohya"](base()), files / "other")
    cli("lora", "merge", "base.safetensors", "other", "-o", "tuned.safetensors")
    done = cli("lora", "extract", "base.safetensors", "tuned.safetensors", "-o", "made", "--rank", "2", "--json")
    (document,) = checked(done)
    assert 0.5 < document["energy"] < 1 and document["rank"] == 2 and len(document["modules"]) == 3
    (document,) = checked(cli("lora", "resize", "made", "small", "--rank", "1", "--json"))
    assert document["config"]["r"] == 1
