"""One load_into call for every pair of wrapped and unwrapped sides, and what it costs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kinds import Net, tensor
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import ckptfix

pytestmark = pytest.mark.slow

Wrap = Callable[[nn.Module], Any]


def _wrap_inside(model: Any) -> Any:
    model.fc = checkpoint_wrapper(model.fc)
    return model


WRAPS: dict[str, Wrap] = {
    "single": lambda model: model,
    "multi": nn.DataParallel,
    "compiled": torch.compile,
    "compiled multi": lambda model: torch.compile(nn.DataParallel(model)),
    "multi compiled": lambda model: nn.DataParallel(torch.compile(model)),
    "averaged multi": lambda model: torch.optim.swa_utils.AveragedModel(nn.DataParallel(model)),
    "checkpointed": lambda model: nn.DataParallel(_wrap_inside(model)),
}
FSDP_KEYS = {"fc.": "_fsdp_wrapped_module.fc._fsdp_wrapped_module.", "": "_fsdp_wrapped_module."}


def other_net() -> Net:
    model = Net()
    with torch.no_grad():
        for value in model.state_dict().values():
            value.fill_(3)
    return model


def same_outputs(wrapped: Any, trained: nn.Module) -> bool:
    x = tensor(6, 3, seed=9)
    # Compiling takes a compiler and minutes; what is compared is what it would compile.
    inner = wrapped
    for name in ("_orig_mod", "module", "_orig_mod"):
        inner = getattr(inner, name, inner)
    return torch.equal(inner.eval()(x), trained.eval()(x))


@pytest.mark.sampled(30)
@pytest.mark.parametrize("container", ["zip", "legacy", "safetensors"])
@pytest.mark.parametrize("loaded", WRAPS)
@pytest.mark.parametrize("written", [*WRAPS, "fsdp"])
def test_whichever_side_is_wrapped(written: str, loaded: str, container: str, tmp_path: Path) -> None:
    if written == "fsdp":
        state = {
            next(new + name.removeprefix(old) for old, new in FSDP_KEYS.items() if name.startswith(old)): value
            for name, value in Net().state_dict().items()
        }
    else:
        state = WRAPS[written](Net()).state_dict()
    path = tmp_path / "a.pth"
    torch.save({"epoch": 1, "model_state_dict": state}, path, _use_new_zipfile_serialization=container != "legacy")
    if container == "safetensors":
        ckptfix.convert(path, tmp_path / "a.safetensors")
        path = tmp_path / "a.safetensors"
    model = WRAPS[loaded](other_net())
    report = ckptfix.load_into(model, path)
    assert same_outputs(model, Net()), report
    assert report.complete and len(report.loaded) + len(report.skipped) >= len(Net().state_dict())
    assert {skip.name for skip in report.skipped} <= {"n_averaged"}


@pytest.mark.parametrize("assign", [False, True])
def test_fully_sharded_parameters(assign: bool, tmp_path: Path) -> None:
    """FSDP2 on one rank: the file has whole tensors, the model distributed ones."""
    from kinds import _mesh
    fully_shard = getattr(torch.distributed.fsdp, "fully_shard", None)
    if fully_shard is None:
        pytest.skip("fully_shard is public since torch 2.6")

    mesh = _mesh()
    torch.save(Net().state_dict(), tmp_path / "a.pth")
    model: Any = other_net()
    fully_shard(model, mesh=mesh)
    report = ckptfix.load_into(model, tmp_path / "a.pth", assign=assign)
    assert report.complete
    for name, value in Net().state_dict().items():
        got = model.state_dict()[name]
        whole = got.full_tensor() if hasattr(got, "full_tensor") else got
        assert torch.equal(whole, value), name


MEMORY = """
import sys
from pathlib import Path
import torch
from torch import nn
import ckptfix, ckptfix.loaders

def anonymous():
    rows = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(rows["RssAnon"].split()[0]) // 1024

layers = int(sys.argv[2])
with torch.device("meta"):
    model = nn.Sequential(*(nn.Linear(1280, 1024, bias=False) for _ in range(layers)))
model = model.to_empty(device="cpu")
with torch.no_grad():
    for parameter in model.parameters():
        parameter.fill_(1)
ckptfix.load_into(nn.Linear(2, 2), sys.argv[3])
base = peak = anonymous()
copy = torch.Tensor.copy_
def watched(self, *arguments, **how):
    global peak
    result = copy(self, *arguments, **how)
    peak = max(peak, anonymous())
    return result
torch.Tensor.copy_ = watched
how = {"assign": True, "mmap": True} if sys.argv[4] == "mapped" else {}
report = ckptfix.load_into(model, sys.argv[1], **how)
assert report.complete
peak = max(peak, anonymous())
print(base, peak - base, float(model[-1].weight[0, 0].detach()))
"""


@pytest.mark.campaign
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize(("how", "most"), [("zip", 4), ("zip mapped", 4), ("legacy", 16)])
def test_memory_stays_at_the_model_and_one_tensor(how: str, most: int, tmp_path: Path) -> None:
    """200 MB of parameters in tensors of 5 MB; on top of the model come at most so many MB, mapped pages aside.

    The data of the legacy file lies at odd addresses: it cannot be used where it is, and each tensor is read into
    memory that the allocator may not give back at once.
    """
    layers = 40
    values = (torch.full((1024, 1280), float(index)) for index in range(layers))
    state: dict[str, Any] = {f"module.{index}.weight": value for index, value in enumerate(values)}
    path = tmp_path / "a.pth"
    torch.save(state, path, _use_new_zipfile_serialization=how.startswith("zip"))
    if how == "legacy" and ckptfix.open_checkpoint(path).entries[0].data.offset % 2 == 0:
        # A key moves the data by its own length and by six bytes of opcodes.
        state[""] = None
        state["."] = None
        torch.save(state, path, _use_new_zipfile_serialization=False)
    assert how != "legacy" or ckptfix.open_checkpoint(path).entries[0].data.offset % 2
    del state
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "small.pth")
    arguments = [str(tmp_path / "a.pth"), str(layers), str(tmp_path / "small.pth"), how.partition(" ")[2]]
    done = subprocess.run([sys.executable, "-c", MEMORY, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    base, grown, last = map(float, done.stdout.split())
    assert last == layers - 1
    assert base >= 200
    assert grown <= most
