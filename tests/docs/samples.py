"""The small checkpoints that the console blocks of the documentation call by name."""

from __future__ import annotations

import argparse
import io
import json
import math
import struct
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from builders import Tensor, assemble, safetensors, state_dict_ops, torch_zip
from cli.conftest import state, wrapped


def model(shapes: dict[str, tuple[int, ...]]) -> bytes:
    """A torch zip of float32 zeros on the CPU."""
    sizes = [math.prod(shape) for shape in shapes.values()]
    items = {
        name: Tensor(str(index), shape, size)
        for index, ((name, shape), size) in enumerate(zip(shapes.items(), sizes, strict=True))
    }
    return torch_zip(assemble(("PROTO", 2), *state_dict_ops(items), "STOP"), [bytes(4 * size) for size in sizes])


def transformer(layer: str, modules: str, *, width: int = 8, depth: int = 2) -> bytes:
    """A checkpoint of `depth` layers; `modules` has them in order, each after what it is: linear, up, down or norm."""
    shapes = {"linear": (width, width), "up": (4 * width, width), "down": (width, 4 * width), "norm": (width,)}
    rows = [row.split() for row in modules.strip().splitlines()]
    named: dict[str, tuple[int, ...]] = {}
    for index in range(depth):
        for kind, path in rows:
            named[f"{layer.format(index)}.{path}.weight"] = shapes[kind]
            named[f"{layer.format(index)}.{path}.bias"] = shapes[kind][:1]
    return model(named)


BERT = """
linear attention.self.query
linear attention.self.key
linear attention.self.value
linear attention.output.dense
norm attention.output.LayerNorm
up intermediate.dense
down output.dense
norm output.LayerNorm
"""

MINE = """
linear attn.k
linear attn.v
linear attn.q
linear attn.proj
norm norm1
up mlp.0
down mlp.2
norm norm2
"""


def saved(contents: Callable[[], Any]) -> bytes:
    """What torch.save makes of `contents`."""
    import torch

    file = io.BytesIO()
    torch.save(contents(), file)
    return file.getvalue()


def with_settings() -> Any:
    """A training checkpoint with what only its own libraries unpickle."""
    import numpy as np
    import torch

    settings = argparse.Namespace(lr=0.1, out=PurePosixPath("runs/7"))
    return {"state_dict": {"fc.weight": torch.ones(2, 3)}, "best": np.float64(0.75), "args": settings}


def one_row() -> Any:
    """A view of six elements that drags a storage of 60,000 along."""
    import torch

    return {"head.weight": torch.zeros(10_000, 6)[0]}


def zero_run() -> dict[str, bytes]:
    """The folder of a small run with ZeRO-2 in bf16 on two ranks."""
    import torch
    from zero_files import Run

    torch.manual_seed(0)
    weights = {"fc.weight": torch.randn(2, 3), "fc.bias": torch.randn(2)}
    return _files(lambda folder: Run([weights], 2, 2, torch.bfloat16).save(folder / "zero_run"))


def parallel_runs() -> dict[str, bytes]:
    """A tied GPT of Megatron-LM on two tensor and two pipeline ranks, and Llama 2 on two ranks."""
    import rank_writer

    gpt = _files(lambda folder: rank_writer.write_megatron(
        rank_writer.gpt2(), folder / "megatron_run", rank_writer.Sizes(2, 2)
    ))  # fmt: skip
    return gpt | _files(lambda folder: rank_writer.write_meta(rank_writer.llama(2), folder / "llama_2", 2))


def whole_model() -> bytes:
    """A model that was pickled as such; the module of its class is not here."""
    import sys
    import types

    import torch

    gone = types.ModuleType("their_models")
    gone.Net = type("Net", (torch.nn.Sequential,), {"__module__": "their_models"})  # type: ignore[attr-defined]
    sys.modules["their_models"] = gone
    try:
        return saved(lambda: gone.Net(torch.nn.Linear(3, 2)))
    finally:
        del sys.modules["their_models"]


def dcp_folder() -> dict[str, bytes]:
    """What torch.distributed.checkpoint saves of a wrapped model."""
    import warnings

    import torch
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch_versions import ALONE

    state = {"model": {"module.fc.weight": torch.ones(2, 3), "module.fc.bias": torch.zeros(2)}, "epoch": 3}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _files(lambda folder: save(state, checkpoint_id=folder / "ranks", **ALONE))


def two_ranks() -> dict[str, bytes]:
    """What two ranks saved of a model with FSDP2."""
    from rank_files import dtensors

    return _files(lambda folder: [dtensors(folder / f"fsdp_rank{rank}.pt", rank) for rank in range(2)])


def training_run() -> dict[str, bytes]:
    """A run of transformers' Trainer whose last save was cut."""
    from run_folders import built, cut

    return _files(lambda folder: cut(built("trainer", folder / "out") / "checkpoint-200" / "optimizer.pt", 60))


def adapted() -> dict[str, bytes]:
    """A base in a folder, an adapter of PEFT for it, one of kohya, and a tuned model."""
    paths = [f"layers.{layer}.attn.{part}_proj" for layer in range(2) for part in "qv"]
    numbers = {path: struct.pack("<16f", *(number + step for step in range(16))) for number, path in enumerate(paths)}
    base = [(f"{path}.weight", "F32", [4, 4], data) for path, data in numbers.items()]
    tuned = [(name, kind, shape, data[:60] + struct.pack("<f", 9)) for name, kind, shape, data in base]
    down, up = struct.pack("<8f", *range(8)), struct.pack("<8f", *[1.0] * 8)
    peft, kohya = [], []
    for path in paths:
        peft += [(f"base_model.model.{path}.lora_A.weight", "F32", [2, 4], down),
                 (f"base_model.model.{path}.lora_B.weight", "F32", [4, 2], up)]  # fmt: skip
        flat = f"lora_te_{path.replace('.', '_')}"
        kohya += [(f"{flat}.lora_down.weight", "F32", [2, 4], down), (f"{flat}.lora_up.weight", "F32", [4, 2], up),
                  (f"{flat}.alpha", "F32", [], struct.pack("<f", 1))]  # fmt: skip
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": "small/base"}
    return {
        "base/model.safetensors": safetensors(base, metadata={"format": "pt"}),
        "base/config.json": b"{}",
        "base/tokenizer.json": b"{}",
        "tuned.safetensors": safetensors(tuned),
        "adapter/adapter_model.safetensors": safetensors(peft, metadata={"format": "pt"}),
        "adapter/adapter_config.json": json.dumps(config).encode(),
        "style.safetensors": safetensors(kohya, metadata={"ss_network_dim": "2"}),
    }


def _files(make: Callable[[Path], object]) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as place:
        make(Path(place))
        found = sorted(path for path in Path(place).rglob("*") if path.is_file())
        return {path.relative_to(place).as_posix(): path.read_bytes() for path in found}


@cache
def files() -> dict[str, bytes]:
    """Name -> content."""
    return {
        **zero_run(),
        **parallel_runs(),
        **two_ranks(),
        **dcp_folder(),
        **training_run(),
        **adapted(),
        "pickled.pth": whole_model(),
        "gpu3.pth": wrapped("", "cuda:3"),
        "ddp.pth": wrapped(),
        "place.pth": wrapped(),
        "multi_gpu.pth": wrapped(),
        "cuda.pth": wrapped(""),
        "compiled.pth": wrapped("module._orig_mod."),
        "model.pth": wrapped("", "cpu"),
        "a.pth": state(fc__weight=(1, 2, 3), fc__bias=(4, 5)),
        "b.pth": state(fc__weight=(1, 2, 4), fc__bias=(4, 5)),
        "model.safetensors": safetensors([("fc.weight", "F32", [2, 3], bytes(24))], metadata={"format": "pt"}),
        "bert.pth": transformer("bert.encoder.layer.{}", BERT),
        "mine.pth": transformer("blocks.{}", MINE),
        "fuse.rules": b"blocks.{n}.attn.{q,k,v}.{*} -> blocks.{n}.attn.qkv.{*} | concat\n",
        "cut.pth": transformer("blocks.{}", MINE)[:9000],
        "settings.pth": saved(with_settings),
        "view.pth": saved(one_row),
        "ten_classes.pth": model({"fc.weight": (4, 3), "head.weight": (10, 4), "head.bias": (10,)}),
        "five_classes.pth": model({"fc.weight": (4, 3), "head.weight": (5, 4), "head.bias": (5,)}),
        "heads.pth": model({"left.weight": (4, 4), "right.weight": (4, 4)}),
        "qkv.pth": model({"blocks.0.attn.qkv.weight": (12, 4), "blocks.1.attn.qkv.weight": (12, 4)}),
        "separate.pth": model(
            {f"layer.{n}.attn.{part}.weight": (4, 4) for n in range(2) for part in ("query", "key", "value")}
        ),
        "runs/lr1/epoch_1.pth": wrapped(),
        "runs/lr1/epoch_2.pth": wrapped(),
        "runs/lr2/epoch_1.pth": wrapped()[:1500],
        "runs/lr2/epoch_2.pth": wrapped("", "cpu"),
        "runs/lr2/log.txt": b"epoch 1: 0.7\n",
        "large.pth": state(w=(1, 500, -1000), b=(0.001, 1e-9)),
        "like.pth": model({"one.weight": (4, 4), "other.weight": (4, 4)}),
    }
