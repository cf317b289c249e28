"""Comparing two objects as ckptfix does, for the tests of diff."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from ckptfix import formats
from ckptfix.ops.diff.compare import DiffResult, diff

Compare = Callable[..., DiffResult]


@pytest.fixture
def compare(tmp_path: Path) -> Compare:
    """diff of two objects, each saved by torch; or of two files."""

    def run(a: Any, b: Any, **options: Any) -> DiffResult:
        paths = []
        for name, obj in (("a.pth", a), ("b.pth", b)):
            path = obj if isinstance(obj, Path) else tmp_path / name
            if not isinstance(obj, Path):
                torch.save(obj, path)
            paths.append(path)
        result = diff(*map(formats.open_checkpoint, paths), **options)
        json.dumps(result.as_dict(), allow_nan=False)
        assert result.exit_code == (0 if result.same else 1)
        assert result.lines[bool(result.alarms)].startswith("Same: " if result.same else "Different: ")
        return result

    return run


@pytest.fixture
def as_safetensors() -> Callable[..., Path]:
    """Writes tensors, and metadata if any, to a safetensors file."""

    def write(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> Path:
        safetensors.torch.save_file(tensors, path, metadata)
        return path

    return write
