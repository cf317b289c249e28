"""Folders of more files than a process may have open."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest
from builders import safetensors

FILES = 150
LIMIT = 96


def folder_of(folder: Path) -> Path:
    folder.mkdir()
    names = {f"layer.{number}.w": f"model-{number + 1:05d}-of-{FILES:05d}.safetensors" for number in range(FILES)}
    for name, shard in names.items():
        (folder / shard).write_bytes(safetensors([(name, "F32", [4], bytes(range(16)))]))
    rows = ", ".join(f'"{name}": "{shard}"' for name, shard in names.items())
    index = f'{{"metadata": {{"total_size": {16 * FILES}}}, "weight_map": {{{rows}}}}}'
    (folder / "model.safetensors.index.json").write_text(index)
    return folder


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("verb", ["inspect", "doctor", "digest", "stats", "diff", "convert", "average"])
def test_few_files_are_open_at_a_time(tmp_path: Path, verb: str) -> None:
    source = folder_of(tmp_path / "in")
    words = [verb, str(source)]
    if verb in ("diff", "average"):
        words.append(str(folder_of(tmp_path / "other")))
    outputs = {"convert": "out.safetensors", "average": "out"}
    words += ["-o", str(tmp_path / outputs[verb])] if verb in outputs else []
    done = subprocess.run(
        [sys.executable, "-m", "ckptfix", *words],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, LIMIT)),
    )
    assert done.returncode == 0, done.stderr[-500:]
