"""The checkpoints that the benchmarks read, made by torch alone: ``python inputs.py NAME FOLDER SCALE``.

Each is built in a process of its own and kept in FOLDER; SCALE (1.0 for the real thing) multiplies its size.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

BIG_LAYERS = 128
BIG_WIDTH = 2048
"""128 x (2048 x 2048 weight + bias) of float32: 2.15 GB in 256 tensors."""

SHARDS = 50
RANKS = 8
TENSOR_WIDTH = 4096
MANY_RANKS = 64
MANY_SHARDED = 1600

MANY = 100_000
MANY_VIEWS = 8000
MANY_OPTIMIZER = 10_000
"""Parameters with two tensors of Adam state each."""


def big(path: Path, scale: float) -> None:
    """A bare DataParallel state dict, tagged ``cuda:0`` as one saved on a GPU is."""
    import torch

    torch.manual_seed(0)
    layers = max(2, round(BIG_LAYERS * scale))
    state: dict[str, Any] = {}
    for number in range(layers):
        state[f"module.blocks.{number}.fc.weight"] = torch.randn(BIG_WIDTH, BIG_WIDTH)
        state[f"module.blocks.{number}.fc.bias"] = torch.randn(BIG_WIDTH)
    # Consulted before the entry for CPU storages, which has priority 10.
    torch.serialization.register_package(0, lambda storage: "cuda:0", lambda storage, location: None)
    torch.save(state, path)


def many(path: Path, scale: float) -> None:
    """A training checkpoint of very many small tensors and their optimizer."""
    import torch

    torch.manual_seed(0)
    names = [f"module.blocks.{number // 10}.part{number % 10}.weight" for number in range(round(MANY * scale))]
    trained = len(names) * MANY_OPTIMIZER // MANY
    state = {
        number: {"step": 10.0, "exp_avg": torch.randn(8), "exp_avg_sq": torch.rand(8)} for number in range(trained)
    }
    checkpoint = {
        "epoch": 3,
        "model_state_dict": {name: torch.randn(8) for name in names},
        "optimizer_state_dict": {"state": state, "param_groups": [{"lr": 1e-3, "params": list(range(trained))}]},
    }
    torch.save(checkpoint, path)


def tensors(path: Path, scale: float) -> None:
    """A state dict of very many small tensors, each with a storage of its own."""
    import torch

    names = (f"blocks.{number // 10}.part{number % 10}.weight" for number in range(round(MANY * scale)))
    torch.save({name: torch.full((2,), float(number)) for number, name in enumerate(names)}, path)


def views(path: Path, scale: float) -> None:
    """Tensors that overlap on one storage."""
    import torch

    count = max(64, round(MANY_VIEWS * scale))
    whole = torch.arange(float(count + 64))
    torch.save({f"blocks.{number}.weight": whole[number : number + 64] for number in range(count)}, path)


def dicts(prefix: str) -> Builder:
    """Very many state dicts of one tensor, whose keys begin with `prefix`."""

    def build(path: Path, scale: float) -> None:
        import torch

        count = max(64, round(MANY_VIEWS * scale))
        whole = torch.arange(2.0 * count)
        parts = {str(number): {f"{prefix}fc.weight": whole[2 * number : 2 * number + 2]} for number in range(count)}
        torch.save(parts, path)

    return build


def names(path: Path, scale: float) -> None:
    """What a model has that holds the tensors of `many` under other names, numbered from 1."""
    shapes = {f"trunk.{number // 10}.piece_{number % 10 + 1}.weight": [8] for number in range(round(MANY * scale))}
    path.write_text(json.dumps(shapes), encoding="utf-8")


def rules(line: str) -> Builder:
    """A rules file of one line, for `big`."""

    def build(path: Path, scale: float) -> None:
        path.write_text(f"module.blocks.{{n}}.fc.weight -> {line}\n", encoding="utf-8")

    return build


def small(path: Path, scale: float) -> None:
    import torch

    torch.save({"module.fc.weight": torch.randn(5, 3), "module.fc.bias": torch.randn(5)}, path)


def copy(path: Path, scale: float) -> None:
    shutil.copyfile(path.with_name("big.pth"), path)


def copy_plain(path: Path, scale: float) -> None:
    shutil.copyfile(path.with_name("plain.safetensors"), path)


def plain(path: Path, scale: float) -> None:
    """The big one, clean keys, as safetensors."""
    import torch
    from safetensors.torch import save_file

    state = torch.load(path.with_name("big.pth"), map_location="cpu", mmap=True, weights_only=True)
    save_file({key.removeprefix("module."): value for key, value in state.items()}, path, {"format": "pt"})


SIDE = 4096


def _matrices(path: Path, scale: float, made: Callable[[Any], dict[str, Any]]) -> None:
    """As many matrices as have 2 GB in bfloat16, each of the tensors that `made` returns for its generator."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    count = max(round(60 * scale), 1)
    state = {f"layers.{row}.{name}": one for row in range(count) for name, one in made(generator).items()}
    save_file(state, path, {"format": "pt"})


def plain_matrices(path: Path, scale: float) -> None:
    """The plain matrices, whose values do not matter."""
    import torch

    _matrices(path, scale, lambda generator: {"weight": torch.randn(SIDE, SIDE, generator=generator).bfloat16()})


def quantized(scheme: str) -> Builder:
    """Matrices of a scheme, with random codes."""

    def build(path: Path, scale: float) -> None:
        import torch

        def made(generator: Any) -> dict[str, Any]:
            def ints(*shape: int) -> Any:
                return torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32)

            def rand(*shape: int) -> Any:
                return torch.rand(shape, generator=generator) + 0.01

            groups, words = SIDE // 128, SIDE // 8
            if scheme in ("gptq", "awq"):
                packed = ints(words, SIDE) if scheme == "gptq" else ints(SIDE, words)
                return {"qweight": packed, "qzeros": ints(groups, words), "scales": rand(groups, SIDE).half()}
            if scheme == "fp8":
                codes = torch.randn(SIDE, SIDE, generator=generator).to(torch.float8_e4m3fn)
                return {"weight": codes, "weight_scale_inv": rand(groups, groups)}
            bytes_ = ints(SIDE, words).view(torch.uint8)
            if scheme == "nvfp4":
                fine = rand(SIDE, SIDE // 16).to(torch.float8_e4m3fn)
                return {"weight": bytes_, "weight_scale": fine, "weight_scale_2": rand(1)}
            stated = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [SIDE, SIDE]}
            text = bytearray(json.dumps(stated).encode())
            return {
                "weight": bytes_.reshape(-1, 1), "weight.absmax": rand(SIDE * SIDE // 64),
                "weight.quant_map": torch.linspace(-1, 1, 16),
                "weight.quant_state.bitsandbytes__nf4": torch.frombuffer(text, dtype=torch.uint8),
            }  # fmt: skip

        _matrices(path, scale, made)

    return build


def shards(path: Path, scale: float) -> None:
    """The big one as a DataParallel model's shards, 50 of them, with their index and a configuration."""
    import torch
    from safetensors.torch import save_file

    state = torch.load(path.with_name("big.pth"), map_location="cpu", mmap=True, weights_only=True)
    path.mkdir()
    names = list(state)
    count = min(SHARDS, len(names))
    weight_map: dict[str, str] = {}
    for number in range(count):
        file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
        own = names[number * len(names) // count : (number + 1) * len(names) // count]
        save_file({name: state[name] for name in own}, path / file, {"format": "pt"})
        weight_map |= dict.fromkeys(own, file)
    total = sum(value.numel() * value.itemsize for value in state.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    (path / "config.json").write_text("{}\n", encoding="utf-8")


def zero3(path: Path, scale: float) -> None:
    """The big one as 8 ranks have it with ZeRO-3: a share of each parameter on each, in fp32, and no moments."""
    import torch

    sys.path.insert(0, str(Path(__file__).parents[1]))
    from zero_files import Run

    state = torch.load(path.with_name("big.pth"), map_location="cpu", mmap=True, weights_only=True)
    weights = {key.removeprefix("module."): value for key, value in state.items()}
    Run([weights], 8, 3, torch.bfloat16, keys=()).save(path)


def tuned(path: Path, scale: float) -> None:
    """As `plain`, every value a little different, as after some steps of training."""
    import torch
    from safetensors.torch import load_file, save_file

    torch.manual_seed(1)
    state = load_file(path.with_name("plain.safetensors"))
    for tensor in state.values():
        tensor.add_(torch.randn(tensor.shape).mul_(1e-3))
    save_file(state, path, {"format": "pt"})


Builder = Callable[[Path, float], None]
def ranks(path: Path, scale: float) -> None:
    """What eight ranks save with torch.distributed.checkpoint, each of every weight an eighth of its rows: 2.15 GB."""
    import torch

    torch.manual_seed(0)
    part = torch.randn(BIG_WIDTH // RANKS, BIG_WIDTH)
    with Distributed(path, RANKS) as folder:
        for number in range(max(2, round(BIG_LAYERS * scale))):
            parts = {rank: part + rank + number for rank in range(RANKS)}
            folder.add(f"blocks.{number}.fc.weight", parts)


def tensor_ranks(count: int, dim: int) -> Builder:
    """A model of Meta's names in files of `count` ranks: 1.07 GB of bfloat16, cut along the dimension `dim`."""

    def build(path: Path, scale: float) -> None:
        import torch

        torch.manual_seed(0)
        layers = max(2, round(32 * scale))
        name, shape = "wq", (TENSOR_WIDTH // count, TENSOR_WIDTH)
        if dim == 1:
            name, shape = "wo", (TENSOR_WIDTH, TENSOR_WIDTH // count)
        path.mkdir()
        sizes = {"dim": TENSOR_WIDTH, "n_layers": layers, "n_heads": 32}
        (path / "params.json").write_text(json.dumps(sizes), encoding="utf-8")
        for rank in range(count):
            part = torch.randn(shape).to(torch.bfloat16)
            state = {f"layers.{number}.attention.{name}.weight": part + number for number in range(layers)}
            torch.save(state, path / f"consolidated.{rank:02d}.pth")

    return build


def many_ranks(path: Path, scale: float) -> None:
    """100,000 small tensors, each whole on one of 64 ranks."""
    import torch

    count = round(MANY * scale)
    with Distributed(path, MANY_RANKS) as folder:
        for number in range(count):
            folder.add(f"blocks.{number // 10}.part{number % 10}.weight", {number % MANY_RANKS: torch.ones(8)})


def sharded_ranks(path: Path, scale: float) -> None:
    """As many items in 1,600 tensors: of each, 64 ranks have a part of the rows, as FSDP2 saves it."""
    import torch

    with Distributed(path, MANY_RANKS) as folder:
        for number in range(max(1, round(MANY_SHARDED * scale))):
            folder.add(f"blocks.{number}.fc.weight", {rank: torch.ones(1, 8) for rank in range(MANY_RANKS)})


def adapter(path: Path, scale: float) -> None:
    """A LoRA of rank 16 for the weights of `plain`, in the layout of ComfyUI."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(1)
    state: dict[str, Any] = {}
    for number in range(max(2, round(BIG_LAYERS * scale))):
        name = f"diffusion_model.blocks.{number}.fc"
        state[f"{name}.lora_A.weight"] = torch.randn(16, BIG_WIDTH)
        state[f"{name}.lora_B.weight"] = torch.randn(BIG_WIDTH, 16)
        state[f"{name}.alpha"] = torch.tensor(8.0)
    save_file(state, path)


class Distributed:
    """A folder as torch.distributed.checkpoint writes it, put together part by part."""

    def __init__(self, path: Path, ranks: int) -> None:
        from torch.distributed.checkpoint import metadata

        path.mkdir()
        self._kinds = metadata
        self._path = path
        self._files = [open(path / f"__{rank}_0.distcp", "wb") for rank in range(ranks)]  # noqa: SIM115
        self._saved = metadata.Metadata({}, {}, {}, metadata.StorageMeta(), "1.0.0")

    def add(self, name: str, parts: Mapping[int, torch.Tensor]) -> None:
        """A tensor of the model, of which each rank has some rows."""
        import torch
        from torch.distributed.checkpoint.filesystem import _StorageInfo

        kinds, saved = self._kinds, self._saved
        chunks, first = [], 0
        for index, (rank, part) in enumerate(parts.items()):
            offsets = torch.Size((first, *[0] * (part.dim() - 1)))
            file = self._files[rank]
            start = file.tell()
            torch.save(part, file)
            info = _StorageInfo(f"__{rank}_0.distcp", start, file.tell() - start)
            saved.storage_data[kinds.MetadataIndex(f"model.{name}", offsets, index)] = info
            chunks.append(kinds.ChunkStorageMetadata(offsets, part.size()))
            first += len(part)
        any_part = next(iter(parts.values()))
        whole = torch.Size((first, *any_part.shape[1:]))
        entry = kinds.TensorStorageMetadata(kinds.TensorProperties(any_part.dtype), whole, chunks)
        saved.state_dict_metadata[f"model.{name}"] = entry
        saved.planner_data[f"model.{name}"] = ("model", name)

    def __enter__(self) -> Distributed:
        return self

    def __exit__(self, *error: object) -> None:
        import pickle

        for file in self._files:
            file.close()
        (self._path / ".metadata").write_bytes(pickle.dumps(self._saved))


INPUTS: dict[str, tuple[Builder, tuple[str, ...]]] = {
    "big.pth": (big, ()),
    "split.rules": (rules("{n}.{a,b}.weight | split"), ()),
    "stack.rules": (rules("weights | stack"), ()),
    "transpose.rules": (rules("{n}.weight | transpose"), ()),
    "many.pth": (many, ()),
    "tensors.pth": (tensors, ()),
    "views.pth": (views, ()),
    "dicts.pth": (dicts(""), ()),
    "wrapped-dicts.pth": (dicts("module."), ()),
    "names.json": (names, ()),
    "small.pth": (small, ()),
    "copy.pth": (copy, ("big.pth",)),
    "place.pth": (copy, ("big.pth",)),
    "plain.safetensors": (plain, ("big.pth",)),
    "place.safetensors": (copy_plain, ("plain.safetensors",)),
    "matrices.safetensors": (plain_matrices, ()),
    **{f"{scheme}.safetensors": (quantized(scheme), ()) for scheme in ("gptq", "awq", "fp8", "nf4", "nvfp4")},
    "shards": (shards, ("big.pth",)),
    "zero3": (zero3, ("big.pth",)),
    "adapter.safetensors": (adapter, ()),
    "tuned.safetensors": (tuned, ("plain.safetensors",)),
    "ranks": (ranks, ()),
    **{f"tensor-ranks-{count}-{dim}": (tensor_ranks(count, dim), ()) for count in (4, 8) for dim in (0, 1)},
    "many-ranks": (many_ranks, ()),
    "sharded-ranks": (sharded_ranks, ()),
}
"""File name -> what builds it, and the inputs that it is built from."""


def main(name: str, folder: str, scale: str) -> None:
    path = Path(folder, name)
    unfinished = path.with_name(f"unfinished-{name}")
    INPUTS[name][0](unfinished, float(scale))
    unfinished.rename(path)


if __name__ == "__main__":
    main(*sys.argv[1:])
