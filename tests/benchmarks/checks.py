"""Whether a contender did its work, asked of its first output: ``python checks.py NAME SOURCE OUTPUT``.

A fast wrong answer is not a result. The values of every tenth tensor are compared, and all names and shapes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def read(path: str) -> dict[str, Any]:
    """The state dict in `path`, memory-mapped; of a folder, that of all its shards or items."""
    import torch

    if Path(path, ".metadata").is_file():
        from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

        items: dict[str, Any] = _load_state_dict_from_keys(checkpoint_id=path)
        return items
    if Path(path).is_dir():
        found_in = [read(str(shard)) for shard in Path(path).glob("*.safetensors")]
        return {name: value for shard in found_in for name, value in shard.items()}
    with open(path, "rb") as file:
        zipped = file.read(4) == b"PK\x03\x04"
    if not zipped:
        from safetensors.torch import load_file

        return load_file(path)
    found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    nested: dict[str, Any] = found.get("model_state_dict", found)
    return nested


def same(source: str, output: str, rename: Callable[[str], str] = str) -> None:
    """Output holds the tensors of source, keys passed through `rename`."""
    import torch

    wanted = {rename(key): value for key, value in read(source).items()}
    found = read(output)
    assert set(wanted) == set(found), sorted(set(wanted) ^ set(found))[:6]
    for number, (key, value) in enumerate(wanted.items()):
        assert (value.shape, value.dtype) == (found[key].shape, found[key].dtype), key
        assert number % 10 or torch.equal(value, found[key]), key


def stripped(source: str, output: str) -> None:
    same(source, output, lambda key: key.removeprefix("module."))


def stripped_sharing(source: str, output: str) -> None:
    """As `stripped`, and less than a hundredth of its blocks is its own."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from disks import own

    path = Path(output)
    assert own(path) < 0.01 * path.stat().st_size, f"{own(path):,} bytes of it are not shared"
    stripped(source, output)


def on_cpu(source: str, output: str) -> None:
    """No storage is tagged with a GPU any more."""
    import zipfile

    with zipfile.ZipFile(output) as archive:
        (pickle,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
        assert b"cuda" not in archive.read(pickle)
    same(source, output)


def optimizer(source: str, output: str) -> None:
    """As `stripped`, and the optimizer is as it was."""
    import torch

    before, after = (torch.load(path, map_location="cpu", weights_only=True) for path in (source, output))
    states = [checkpoint["optimizer_state_dict"]["state"] for checkpoint in (before, after)]
    assert before["epoch"] == after["epoch"]
    assert list(states[0]) == list(states[1])
    assert all(torch.equal(states[0][key]["exp_avg"], states[1][key]["exp_avg"]) for key in list(states[0])[::10])
    stripped(source, output)


def ruled(make: Callable[[dict[str, Any], str], Any]) -> Callable[[str, str], None]:
    """Each tenth new tensor is what `make` makes for its name of the weights of `inputs.big`, by their numbers."""

    def check(source: str, output: str) -> None:
        import torch

        weights = {name.split(".")[2]: value for name, value in read(source).items() if name.endswith(".weight")}
        made = {name: value for name, value in read(output).items() if not name.startswith("module.")}
        assert made
        for name in list(made)[::10]:
            assert torch.equal(made[name], make(weights, name)), name

    return check


def half(weights: dict[str, Any], name: str) -> Any:
    number, part, _ = name.split(".")
    return weights[number].chunk(2)[part == "b"]


def stack(weights: dict[str, Any], name: str) -> Any:
    import torch

    return torch.stack([weights[str(number)] for number in range(len(weights))])


def of_ranks(source: str, output: str) -> None:
    """The weights are those of the folder, whose ranks counted their rows."""
    import torch

    state = read(output)
    state = state.get("model", state)
    names = [f"blocks.{number}.fc.weight" for number in range(len(state))]
    assert set(state) == set(names)
    first = state[names[0]].view(8, -1)[0]
    for number in (0, len(names) - 1):
        rows = state[names[number]].view(8, -1)
        assert all(torch.equal(rows[rank], first + rank + number) for rank in range(8))


def of_tensor_ranks(source: str, output: str) -> None:
    """The weights are the parts of the ranks side by side."""
    import torch

    state = read(output)
    files = sorted(Path(source).glob("consolidated.*.pth"))
    parts = [torch.load(file, mmap=True, weights_only=True) for file in files]
    assert set(state) == set(parts[0])
    for name in (min(state), max(state)):
        dim = 1 if name.endswith("wo.weight") else 0
        assert torch.equal(state[name], torch.cat([part[name] for part in parts], dim))


def lora_merged(source: str, output: str) -> None:
    """Each tenth weight is the sum of the old one and the product of the adapter beside it."""
    import torch

    old, new = read(source), read(output)
    factors = read(str(Path(source).with_name("adapter.safetensors")))
    assert old.keys() == new.keys()
    for name in [name for name in old if name.endswith(".weight")][::10]:
        front = f"diffusion_model.{name.removesuffix('.weight')}"
        up, down = (factors[f"{front}.lora_{side}.weight"].double() for side in "BA")
        assert torch.equal(new[name], (old[name].double() + 0.5 * (up @ down)).float()), name


CHECKS: dict[str, Callable[[str, str], None]] = {
    "same": same,
    "stripped": stripped,
    "stripped_sharing": stripped_sharing,
    "on_cpu": on_cpu,
    "optimizer": optimizer,
    "of_ranks": of_ranks,
    "of_tensor_ranks": of_tensor_ranks,
    "lora_merged": lora_merged,
    "split": ruled(half),
    "stack": ruled(stack),
    "transpose": ruled(lambda weights, name: weights[name.split(".")[0]].T),
}

if __name__ == "__main__":
    CHECKS[sys.argv[1]](*sys.argv[2:])
