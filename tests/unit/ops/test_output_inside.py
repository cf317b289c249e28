"""An output in the folder that is the input: it is not read with it, and the folder is not said to have changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sharded
import torch
import zero_files
from torch.distributed.checkpoint.state_dict_saver import save
from torch_versions import ALONE

import ckptfix
from ckptfix.errors import DamagedFile
from ckptfix.ops import chain

STATE = sharded.state(3, "module.")


def saved_by_dcp(folder: Path) -> Path:
    save(dict(STATE), checkpoint_id=folder, **ALONE)
    return folder


FOLDERS: dict[str, Callable[[Path], Path]] = {
    "shards": lambda folder: sharded.write(folder, sharded.parted(STATE, 2)),
    "torch shards": lambda folder: sharded.write(folder, sharded.parted(STATE, 2), kind="bin"),
    "dcp": saved_by_dcp,
    "zero": lambda folder: zero_files.example(2, 2).save(folder),
}

VERBS: dict[str, tuple[Callable[..., Any], str]] = {
    "fix": (ckptfix.fix, ""),
    "fix to one file": (ckptfix.fix, ".pth"),
    "convert to one file": (ckptfix.convert, ".pth"),
    "convert to shards": (lambda source, dest: ckptfix.convert(source, dest, to="hf"), ""),
    "strip-module": (ckptfix.strip_module, ""),
    "to-cpu": (ckptfix.to_cpu, ""),
    "slim": (ckptfix.slim, ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("kind", FOLDERS)
def test_it_is_written_and_not_read(tmp_path: Path, kind: str, verb: str) -> None:
    source = FOLDERS[kind](tmp_path / "in")
    if kind == "zero" and verb in ("strip-module", "to-cpu"):
        pytest.skip("a DeepSpeed folder is only read")
    call, suffix = VERBS[verb]
    before = sorted(path.name for path in source.rglob("*"))
    done = call(source, source / f"sub{suffix}")
    assert done.exit_code == 0
    call(source, tmp_path / f"beside{suffix}")
    assert ckptfix.diff(source / f"sub{suffix}", tmp_path / f"beside{suffix}").same
    left = sorted(path.name for path in source.rglob("*") if "sub" not in path.relative_to(source).parts[0])
    assert left == before


def test_a_shard_that_changes_meanwhile_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = sharded.write(tmp_path / "in", sharded.parted(STATE, 2), kind="bin")
    real = chain.Chain.plan_for

    def changed(own: chain.Chain, dest: str) -> Any:
        torch.save({}, next(source.glob("*.bin")))
        return real(own, dest)

    monkeypatch.setattr(chain.Chain, "plan_for", changed)
    with pytest.raises(DamagedFile, match="it changed while it was read"):
        ckptfix.fix(source, source / "sub.pth")
    assert not (source / "sub.pth").exists()
