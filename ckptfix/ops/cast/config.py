"""The dtype that ``config.json`` of transformers states, in the folder of a cast model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from ckptfix.checkpoint import Checkpoint, OutputFile
from ckptfix.ops import quantized
from ckptfix.urls import as_path

KEYS = ("torch_dtype", "dtype")
"""Keys of the dtype in config.json: of transformers before 4.56, and since. Both versions read the first."""

_OF_TRANSFORMERS = ("model_type", "architectures")


def with_dtype(checkpoint: Checkpoint, files: Iterable[OutputFile], dtype: str) -> tuple[OutputFile, ...]:
    """Return the files of an output folder, with `dtype` in the config.json that is copied along."""
    files = tuple(files)
    if not any(_is_config(file) for file in files):
        return files
    config = quantized.json_beside(checkpoint, quantized.CONFIG)
    new = stated(config, dtype)
    if new == config:
        return files
    text = json.dumps(new, indent=2, ensure_ascii=False) + "\n"
    return tuple(OutputFile.of(file.path, [text.encode()], along=True) if _is_config(file) else file for file in files)


def stated(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return a config.json that states `dtype`, also for the parts of a model that state one.

    That of another library is unchanged, unless it states a dtype.
    """
    made = {key: stated(row, dtype) if isinstance(row, dict) and set(KEYS) & set(row) else row
            for key, row in config.items()}  # fmt: skip
    keys = [key for key in KEYS if isinstance(made.get(key), str)]
    if not keys and any(key in made for key in _OF_TRANSFORMERS):
        keys = [KEYS[0]]
    return made | dict.fromkeys(keys, dtype)


def _is_config(file: OutputFile) -> bool:
    return file.along and as_path(file.path).name == quantized.CONFIG
